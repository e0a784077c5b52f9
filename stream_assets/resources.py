"""What stream assets are connected to, as Dagster resources: streams, the tables of a lake, and Spark."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import dagster as dg
from pydantic import ConfigDict, Field, PrivateAttr
from pyspark.sql import SparkSession

from spark_jobs.jars import download_note
from spark_jobs.session import SparkOptions, create_session, running_session
from spark_jobs.table_location import LOCAL, check_location, check_table_uri, is_s3, scheme
from stream_consumers.client_config import ClientConfig, Deferred, resolve_value, variable_name
from stream_consumers.errors import InvalidOptionError
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
        return f"{{{variable_name(self.source)}}}" if shown is None else str(shown)


DEFAULT_SCHEMA = "public"


class DeltaLake(dg.ConfigurableResource):  # type: ignore[type-arg]  # the class is generic only inside Dagster
    """A folder or bucket of Delta tables: ``<root>/<schema>/<table>``, as the IO managers of dagster-deltalake have it.

    As the ``table=`` of a stream asset the key of the asset says which one: its last part is the table, the part before
    it the schema, ``public`` without one. Each text may be a ``dg.EnvVar``, which is looked up when it is used.

    Example:
        >>> lake = DeltaLake(root=dg.EnvVar("LAKE"), storage_options={"AWS_SECRET_ACCESS_KEY": dg.EnvVar("SECRET")})
        >>> str(lake.table("orders", schema="sales"))
        '{LAKE}/sales/orders'
        >>> str(lake.table_of(dg.AssetKey(["sales", "orders"])))
        '{LAKE}/sales/orders'
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, coerce_numbers_to_str=True)

    root: str = Field(description="A folder or URI, like /lake or s3a://bucket/lake.")
    schema_name: str | None = Field(default=None, description="Of all tables, whatever their keys are.")
    storage_options: dict[str, str] = Field(
        default_factory=dict, description="Of an object store, for Spark and for reading the Delta log.", repr=False
    )

    def table(self, name: str, *, schema: str | None = None) -> LakeTable:
        """A table by its name.

        Args:
            name: of the table.
            schema: the folder that it is in; ``public`` by default.
        """
        return LakeTable(self.root, (schema or self.schema_name or DEFAULT_SCHEMA, name), self.storage_options)

    def table_of(self, key: dg.AssetKey) -> LakeTable:
        """The table of an asset."""
        table = self.table(key.path[-1], schema=self.schema_name or ([DEFAULT_SCHEMA, *key.path][-2]))
        return replace(table, is_named_by_key=True)


class TableLocation(ABC):
    """Where a Delta table is, which is looked up when it is used. As text it is for people."""

    storage_options: Mapping[str, str]
    """For reading the log; shown nowhere."""
    is_named_by_key: bool
    """Whether the key of an asset says which table it is."""

    @property
    @abstractmethod
    def is_deferred(self) -> bool:
        """Whether something has to be looked up before the path is known."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of the table for people."""

    @property
    @abstractmethod
    def path(self) -> str:
        """The path or URI of the table now.

        Raises:
            InvalidOptionError: a variable is not set, or nothing says where the table is.
            AccessDeniedError, CatalogUnavailableError: a catalog has the table and does not say where it is.
        """

    @property
    def shown(self) -> str:
        """The location for people: the checked path, or the names of what has to be looked up."""
        return str(self) if self.is_deferred else check_location(self.path)

    def options(self) -> dict[str, str]:
        """The storage options with the values of their variables.

        Raises:
            InvalidOptionError: a variable is not set.
        """
        return resolved_options("storage_options", self.storage_options)


@dataclass(frozen=True)
class LakeTable(TableLocation):
    """A table at a path or URI.

    Args:
        root: a folder or URI, or the whole path of the table.
        parts: what follows it.
        storage_options: see :class:`TableLocation`.
        is_named_by_key: see :class:`TableLocation`.

    Raises:
        InvalidOptionError: a URI with credentials or parameters in it.
    """

    root: str
    parts: Sequence[str] = ()
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    is_named_by_key: bool = False

    def __post_init__(self) -> None:
        # It is shown even where the rest is still in the environment.
        if not is_deferred(self.root) and scheme(check_name("table", self.root)) != LOCAL:
            check_table_uri("table", self.root)

    @property
    def is_deferred(self) -> bool:
        """Whether a variable is part of the path."""
        return any(map(is_deferred, (self.root, *self.parts)))

    @property
    def label(self) -> str:
        """The path, of which the last parts name the table."""
        return str(self)

    @property
    def path(self) -> str:
        """See :attr:`TableLocation.path`."""
        root = check_name("table", resolved_text("table", self.root))
        return _join_path(root, [check_name("table", resolved_text("table", part)) for part in self.parts])

    def __str__(self) -> str:
        return _join_path(shown_text(self.root), [shown_text(part) for part in self.parts])


def _join_path(root: str, parts: Sequence[str]) -> str:
    return "/".join([root.rstrip("/"), *parts]) if parts else root


class SparkSessionResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # the class is generic only inside Dagster
    """A Spark session that can write Delta tables: local, on a master, or over Spark Connect.

    The session is made when it is first asked for, and stopped after the run if this made it. A local Spark is a server
    that outlives the run, so that the next one does not wait for a JVM; ``stream-assets spark status`` shows it.

    Example:
        >>> SparkSessionResource(master="local[2]").remote is None
        True
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, coerce_numbers_to_str=True)

    master: str = Field(default="local[*]", description="The Spark master; not used with `remote`.")
    remote: str | None = Field(default=None, repr=False, description="A Spark Connect address, sc://host:port.")
    in_process: bool = Field(default=False, description="Start a local Spark for each run, in its process.")
    spark_config: dict[str, str] = Field(default_factory=dict, repr=False, description="More Spark settings.")

    _session: SparkSession | None = PrivateAttr(default=None)
    _is_own: bool = PrivateAttr(default=False)

    @property
    def spark_session(self) -> SparkSession:
        """The session.

        Raises:
            SparkSessionError: it cannot be had.
            MissingDependencyError: there is no Java.
        """
        return self.session_for("", {})

    def session_for(self, table: str, storage_options: Mapping[str, str]) -> SparkSession:
        """The session; if it is made now, Spark gets what it needs to write a table in an object store.

        Args:
            table: a path or URI.
            storage_options: for the table, as delta-rs has them.

        Raises:
            SparkSessionError: it cannot be had.
            MissingDependencyError: there is no Java, or jars cannot be downloaded.
        """
        if self._session is None:
            self._is_own = running_session() is None
            self._session = create_session(
                SparkOptions(
                    master=self.master,
                    remote=self.remote,
                    config=self.spark_config,
                    in_process=self.in_process,
                    table=table,
                    storage_options=storage_options,
                )
            )
        return self._session

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Stop the session if this resource made it."""
        session, self._session = self._session, None
        if session is not None and self._is_own:
            session.stop()


@contextmanager
def run_session(context: Any, spark: Any, table: TableLocation) -> Iterator[SparkSession]:
    """The session of a run.

    Args:
        context: of the run, or of a resource of it.
        spark: a resource, or the key of one; ``None`` for a local Spark.
        table: what the run writes or reads.
    """
    if isinstance(spark, str):
        yield _wait_for_session(context, getattr(context.resources, spark), table)
        return
    resource = SparkSessionResource() if spark is None else spark
    # A resource of the asset's own is set up here, not by Dagster: so that it has no key that another asset could have,
    # and no place in the run config, where a launchpad would keep its settings.
    with dg.build_resources({"spark": resource}, instance=context.instance) as resources:
        yield _wait_for_session(context, resources.spark, table)


def _wait_for_session(context: Any, resource: Any, table: TableLocation) -> SparkSession:
    """The session of a resource. Starting one may take minutes, in which the log of a run would say nothing."""
    note = None if getattr(resource, "remote", None) else download_note(with_s3=is_s3(table.path))
    context.log.info(f"waiting for Spark; {note}" if note else "waiting for Spark")
    since = time.monotonic()
    session: SparkSession
    if isinstance(resource, SparkSessionResource):
        session = resource.session_for(table.path, table.options())
    else:
        session = resource.spark_session
    context.log.info(f"Spark is ready after {time.monotonic() - since:.1f} s")
    return session


def is_deferred(value: object) -> bool:
    """Whether it is looked up when it is used."""
    # dagster.EnvVar is a str that must not be used as one.
    return isinstance(value, Deferred)


def shown_text(value: str) -> str:
    """For people: the name of the variable in braces, never what it holds.

    Example:
        >>> from dagster import EnvVar
        >>> shown_text("lakehouse"), shown_text(EnvVar("GROUP"))
        ('lakehouse', '{GROUP}')
    """
    return f"{{{variable_name(value)}}}" if is_deferred(value) else value


def resolved_text(option: str, value: str) -> str:
    """The text, looked up now if it is deferred.

    Args:
        option: what it is for, for the message.
        value: text, or an ``EnvVar``.

    Raises:
        InvalidOptionError: the variable is not set, or there is nothing in it.
    """
    if not isinstance(value, Deferred):
        return value
    found = str(resolve_value(value, option))
    # Nothing would be taken for a default: the root folder, a broker on this machine.
    if not found.strip():
        raise InvalidOptionError(
            f"{option} comes from the environment variable {variable_name(value)}, which is empty",
            remedy="Set it where this process runs: the daemon's code server and the runs.",
        )
    return found


def resolved_options(option: str, options: Mapping[str, str]) -> dict[str, str]:
    """Options, each looked up now if it is deferred.

    Raises:
        InvalidOptionError: a variable is not set.
    """
    # An option may be empty, like a session token that is not needed.
    return {
        name: str(resolve_value(value, f"{option}[{name!r}]")) if isinstance(value, Deferred) else value
        for name, value in options.items()
    }
