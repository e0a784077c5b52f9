"""Where streams are, as resources: a Kafka cluster, a Redis server, a stream file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
from pydantic import ConfigDict, Field

from stream_assets.deferred import is_deferred, resolved_text, shown_text, variable
from stream_consumers.client_config import ClientConfig
from stream_consumers.create import StreamSource
from stream_consumers.options import ConsumerMode, check_name, choose_fields
from stream_consumers.urls import StreamUrl

Text = Callable[[str, str], str]


class StreamConnection(dg.ConfigurableResource):  # type: ignore[type-arg]  # the class is generic only inside Dagster
    """Where streams are. Each text of it may be a ``dg.EnvVar``, which is looked up when a client is made."""

    # A misspelt option, like that of the security protocol, would be left out without a word.
    model_config = ConfigDict(extra="forbid")

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

    @abstractmethod
    def servers(self, text: Text) -> tuple[str, str]:
        """The protocol and the nodes of the URL.

        Args:
            text: what to make of the text of an option.
        """

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

    bootstrap_servers: str = Field(description="Servers with their ports, separated by commas: kafka-1:9092.")
    security_protocol: str | None = Field(default=None, description="Like SASL_SSL; PLAINTEXT by default.")
    sasl_mechanism: str | None = Field(default=None, description="Like SCRAM-SHA-512.")
    sasl_username: str | None = Field(default=None, description="Of this client.")
    sasl_password: str | None = Field(default=None, description="Of this client; use an EnvVar.", repr=False)
    options: dict[str, str] = Field(default_factory=dict, description="More options of librdkafka.", repr=False)

    def servers(self, text: Text) -> tuple[str, str]:
        """The protocol and the nodes of the URL."""
        return "kafka", text("bootstrap_servers", self.bootstrap_servers)

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

    address: str = Field(description="The server with its port: redis:6379.")
    tls: bool = Field(default=False, description="Encrypt the connection.")
    username: str | None = Field(default=None, description="Of this client.")
    password: str | None = Field(default=None, description="Of this client; use an EnvVar.", repr=False)
    options: dict[str, Any] = Field(
        default_factory=dict, description="More arguments of redis.Redis, and ours, like min_idle_seconds.", repr=False
    )

    def servers(self, text: Text) -> tuple[str, str]:
        """The protocol and the nodes of the URL."""
        return "rediss" if self.tls else "redis", text("address", self.address)

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

    path: str = Field(description="Of the file, like /data/orders.ss.")

    def servers(self, text: Text) -> tuple[str, str]:
        """The protocol and the nodes of the URL."""
        return "file", text("path", self.path)


@dataclass(frozen=True)
class StreamLocation:
    """Streams at a connection.

    Args:
        connection: where they are.
        names: the stream keys.
    """

    connection: StreamConnection
    names: tuple[str, ...]

    @property
    def shown(self) -> StreamUrl:
        """The URL for people, with the names of variables in braces."""
        return self._url(lambda _, value: shown_text(value))

    @property
    def url(self) -> StreamUrl:
        """The URL.

        Raises:
            InvalidOptionError: a variable is not set.
        """
        return self._url(resolved_text)

    @property
    def client(self) -> ClientConfig:
        """Configuration of the broker's client, with values that are deferred."""
        return self.connection.client()

    def _url(self, text: Text) -> StreamUrl:
        protocol, nodes = self.connection.servers(text)
        return StreamUrl.parse(f"{protocol}://{nodes}/").with_streams(self.names)


@dataclass(frozen=True)
class Origin:
    """Where the messages of an asset come from; it is looked up when it is used.

    Args:
        source: a URL, an ``EnvVar`` that holds one, or streams at a connection.
        mode: how the group shares and remembers.
        client: more configuration of the broker's client.
    """

    source: str | StreamUrl | StreamLocation
    mode: ConsumerMode
    client: ClientConfig = field(repr=False)

    def __post_init__(self) -> None:
        choose_fields(self, mode=ConsumerMode)

    @property
    def is_deferred(self) -> bool:
        """Whether not even the names of the streams are known before it is used."""
        return is_deferred(self.source)

    @property
    def shown(self) -> StreamUrl | None:
        """The URL for people; ``None`` if it is in a variable."""
        if isinstance(self.source, StreamLocation):
            return self.source.shown
        return None if self.is_deferred else StreamUrl.parse(self.source)

    def __str__(self) -> str:
        shown = self.shown
        return f"{{{variable(self.source)}}}" if shown is None else str(shown)

    def check(self) -> None:
        """Refuse what can be seen to be wrong before it is used.

        Raises:
            InvalidUrlError, InvalidOptionError: naming it.
        """
        shown = self.shown
        if shown is not None:
            StreamSource(shown, self.mode, self._client)

    def stream(self) -> StreamSource:
        """The stream.

        Raises:
            InvalidOptionError: a variable is not set.
            InvalidUrlError: it holds no URL.
        """
        if isinstance(self.source, StreamLocation):
            return StreamSource(self.source.url, self.mode, self._client)
        url = resolved_text("source", self.source) if isinstance(self.source, str) else self.source
        return StreamSource(url, self.mode, self._client)

    @property
    def _client(self) -> ClientConfig:
        own = self.source.client if isinstance(self.source, StreamLocation) else {}
        return {**own, **self.client}
