"""Where streams are, as resources: a Kafka cluster, a Redis server, a stream file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import dagster as dg
from pydantic import ConfigDict, Field

from stream_assets.deferred import is_deferred, resolved_text, shown_text
from stream_consumers.client_config import ClientConfig, variable
from stream_consumers.options import check_name
from stream_consumers.urls import StreamUrl


class StreamConnection(dg.ConfigurableResource):  # type: ignore[type-arg]  # the class is generic only inside Dagster
    """Where streams are. Each text of it may be a ``dg.EnvVar``, which is looked up when a client is made."""

    # A misspelt option, like that of the security protocol, would be left out without a word.
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, coerce_numbers_to_str=True)

    def stream(self, *names: str) -> StreamLocation:
        """Streams of it, as the ``source=`` of a stream asset.

        Args:
            names: the stream keys: topics, keys of Redis, streams of a file.

        Raises:
            InvalidOptionError: one of them is no name.
        """
        for name in names:
            check_name("stream", name)
        return StreamLocation(self, names)

    address_option: ClassVar[str]
    """The option that says where the servers are, or the file is."""

    scheme: ClassVar[str]
    """The protocol of the URL."""

    @property
    def protocol(self) -> str:
        """The protocol of the URL of this one."""
        return self.scheme

    def client(self) -> ClientConfig:
        """Configuration of the broker's client, with values that are deferred."""
        return {}


class KafkaCluster(StreamConnection):
    """A Kafka cluster.

    Example:
        >>> kafka = KafkaCluster(bootstrap_servers=dg.EnvVar("KAFKA"), sasl_password=dg.EnvVar("KAFKA_PASSWORD"))
        >>> str(kafka.stream("orders", "payments").shown)
        'kafka://{KAFKA}/orders,payments'
    """

    scheme: ClassVar[str] = "kafka"
    address_option: ClassVar[str] = "bootstrap_servers"
    bootstrap_servers: str = Field(description="Servers with their ports, separated by commas: kafka-1:9092.")
    security_protocol: str | None = Field(default=None, description="Like SASL_SSL; PLAINTEXT by default.")
    sasl_mechanism: str | None = Field(default=None, description="Like SCRAM-SHA-512.")
    sasl_username: str | None = Field(default=None, description="Of this client.")
    sasl_password: str | None = Field(default=None, description="Of this client; use an EnvVar.", repr=False)
    options: dict[str, str] = Field(default_factory=dict, description="More options of librdkafka.", repr=False)

    def client(self) -> ClientConfig:
        """Configuration of librdkafka."""
        named = {
            "security.protocol": self.security_protocol,
            "sasl.mechanism": self.sasl_mechanism,
            "sasl.username": self.sasl_username,
            "sasl.password": self.sasl_password,
        }
        return {**{name: value for name, value in named.items() if value is not None}, **self.options}


class RedisServer(StreamConnection):
    """A Redis server.

    Example:
        >>> redis = RedisServer(address="localhost:6379", tls=True, password=dg.EnvVar("REDIS_PASSWORD"))
        >>> str(redis.stream("orders").shown)
        'rediss://localhost:6379/orders'
    """

    scheme: ClassVar[str] = "redis"
    address_option: ClassVar[str] = "address"
    address: str = Field(description="The server with its port: redis:6379.")
    tls: bool = Field(default=False, description="Encrypt the connection.")
    username: str | None = Field(default=None, description="Of this client.")
    password: str | None = Field(default=None, description="Of this client; use an EnvVar.", repr=False)
    options: dict[str, Any] = Field(
        default_factory=dict, description="More arguments of redis.Redis, and ours, like min_idle_seconds.", repr=False
    )

    @property
    def protocol(self) -> str:
        """The protocol of the URL."""
        return "rediss" if self.tls else "redis"

    def client(self) -> ClientConfig:
        """Arguments of the client."""
        named = {"username": self.username, "password": self.password}
        return {**{name: value for name, value in named.items() if value is not None}, **self.options}


class StreamFile(StreamConnection):
    """A SeaStreamer stream file.

    Example:
        >>> str(StreamFile(path="orders.ss").stream("orders").shown)
        'file://orders.ss/orders'
    """

    scheme: ClassVar[str] = "file"
    address_option: ClassVar[str] = "path"
    path: str = Field(description="Of the file, like /data/orders.ss.")


@dataclass(frozen=True)
class StreamLocation:
    """Where the messages of an asset come from: streams at a connection, or a URL; it is looked up when it is used.

    Args:
        source: the connection; or a URL, or an ``EnvVar`` that holds one.
        names: the stream keys at a connection.
    """

    source: StreamConnection | str
    names: tuple[str, ...] = ()

    @property
    def is_deferred(self) -> bool:
        """Whether not even the names of the streams are known before it is used."""
        return is_deferred(self.source)

    @property
    def shown(self) -> StreamUrl | None:
        """The URL for people, with the names of variables in braces; ``None`` if a variable holds the whole URL."""
        if isinstance(self.source, StreamConnection):
            return self._at(self.source, shown_text(getattr(self.source, self.source.address_option)))
        return None if self.is_deferred else StreamUrl.parse(self.source)

    @property
    def url(self) -> StreamUrl:
        """The URL.

        Raises:
            InvalidOptionError: a variable is not set.
            InvalidUrlError: it holds no URL.
        """
        if isinstance(self.source, StreamConnection):
            option = self.source.address_option
            return self._at(self.source, resolved_text(option, getattr(self.source, option)))
        return StreamUrl.parse(resolved_text("source", self.source))

    @property
    def client(self) -> ClientConfig:
        """Configuration of the broker's client, with values that are deferred."""
        return self.source.client() if isinstance(self.source, StreamConnection) else {}

    def _at(self, connection: StreamConnection, nodes: str) -> StreamUrl:
        return StreamUrl.parse(f"{connection.protocol}://{nodes}/").with_streams(self.names)

    def __str__(self) -> str:
        shown = self.shown
        return f"{{{variable(self.source)}}}" if shown is None else str(shown)
