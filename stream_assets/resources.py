"""Dagster resources of stream assets: connections to streams, the tables of a lake, and Spark sessions."""

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
from spark_jobs.session import SparkOptions, create_session, hide_secrets, running_session
from spark_jobs.table_location import LOCAL, check_folder_name, check_location, check_table_uri, is_s3, scheme
from stream_consumers.client_config import ClientConfig, Deferred, resolve_value, variable_name
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import check_name
from stream_consumers.urls import StreamUrl


class StreamConnection(dg.ConfigurableResource):  # type: ignore[type-arg]  # the class is generic only inside Dagster
    """A connection to streams. Each text may be a ``dg.EnvVar``, which is read when a client is created."""

    # Without this, a misspelled option, like the security protocol, would be ignored silently.
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, coerce_numbers_to_str=True)

    def stream(self, *names: str) -> StreamLocation:
        """Select streams of this connection, for ``source=`` of a stream asset.

        Args:
            names: the stream keys: Kafka topics, Redis keys, or streams of a file.

        Raises:
            InvalidOptionError: a name is not valid.
        """
        for name in names:
            check_name("stream", name)
        return StreamLocation(self, names)

    address_option: ClassVar[str]
    """The name of the option that holds the addresses of the servers, or the path of the file."""

    scheme: ClassVar[str]
    """The scheme of the URL."""

    @property
    def protocol(self) -> str:
        """The protocol of the URL of this connection."""
        return self.scheme

    def client(self) -> ClientConfig:
        """Configuration of the broker's client; values of variables are not resolved yet."""
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
    bootstrap_servers: str = Field(description="Servers with their ports, separated by commas, like kafka-1:9092.")
    security_protocol: str | None = Field(
        default=None, description="The security protocol, like SASL_SSL; PLAINTEXT by default."
    )
    sasl_mechanism: str | None = Field(default=None, description="The SASL mechanism, like SCRAM-SHA-512.")
    sasl_username: str | None = Field(default=None, description="The user name of this client.")
    sasl_password: str | None = Field(default=None, description="The password; use an EnvVar.", repr=False)
    options: dict[str, str] = Field(default_factory=dict, description="More options of librdkafka.", repr=False)

    def client(self) -> ClientConfig:
        """Return the options of librdkafka."""
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
    address: str = Field(description="The server with its port, like redis:6379.")
    tls: bool = Field(default=False, description="Encrypt the connection.")
    username: str | None = Field(default=None, description="The user name of this client.")
    password: str | None = Field(default=None, description="The password; use an EnvVar.", repr=False)
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of redis.Redis or this library, like min_idle_seconds.", repr=False
    )

    @property
    def protocol(self) -> str:
        """The protocol of the URL."""
        return "rediss" if self.tls else "redis"

    def client(self) -> ClientConfig:
        """Return the arguments of the Redis client."""
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
    path: str = Field(description="The path of the file, like /data/orders.ss.")


@dataclass(frozen=True)
class StreamLocation:
    """The streams that an asset reads, as a connection or a URL. Environment variables are read when it is used.

    Args:
        source: the connection, a URL, or an ``EnvVar`` that holds a URL.
        names: the stream keys, with a connection.
        is_found: a pattern found the streams, so that a client may have chosen their names; see
            :attr:`spark_jobs.Ingestion.owns_table`.
    """

    source: StreamConnection | str
    names: tuple[str, ...] = ()
    is_found: bool = False

    @property
    def is_deferred(self) -> bool:
        """Whether the URL, with the names of the streams, is in a variable that is read later."""
        return is_deferred(self.source)

    @property
    def shown(self) -> StreamUrl | None:
        """The URL for display, with the names of variables in braces; ``None`` if a variable holds the whole URL."""
        if isinstance(self.source, StreamConnection):
            return self._at(self.source, shown_text(getattr(self.source, self.source.address_option)))
        return None if self.is_deferred else StreamUrl.parse(self.source)

    @property
    def url(self) -> StreamUrl:
        """The URL, with variables resolved.

        Raises:
            InvalidOptionError: a variable is not set.
            InvalidUrlError: the variable does not hold a URL.
        """
        if isinstance(self.source, StreamConnection):
            option = self.source.address_option
            return self._at(self.source, resolved_text(option, getattr(self.source, option)))
        return StreamUrl.parse(resolved_text("source", self.source))

    @property
    def client(self) -> ClientConfig:
        """Configuration of the broker's client; values of variables are not resolved yet."""
        return self.source.client() if isinstance(self.source, StreamConnection) else {}

    def _at(self, connection: StreamConnection, nodes: str) -> StreamUrl:
        return StreamUrl.parse(f"{connection.protocol}://{nodes}/").with_streams(self.names)

    def __str__(self) -> str:
        shown = self.shown
        return f"{{{variable_name(self.source)}}}" if shown is None else str(shown)


DEFAULT_SCHEMA = "public"


class DeltaLake(dg.ConfigurableResource):  # type: ignore[type-arg]  # the class is generic only inside Dagster
    """A folder or bucket of Delta tables: ``<root>/<schema>/<table>``, like the IO managers of dagster-deltalake.

    As ``table=`` of a stream asset it selects the table by the key of the asset: the last part names the table, and the
    part before it the schema, ``public`` by default. Each text may be a ``dg.EnvVar``, which is read when it is used.

    Example:
        >>> lake = DeltaLake(root=dg.EnvVar("LAKE"), storage_options={"AWS_SECRET_ACCESS_KEY": dg.EnvVar("SECRET")})
        >>> str(lake.table("orders", schema="sales"))
        '{LAKE}/sales/orders'
        >>> str(lake.table_of(dg.AssetKey(["sales", "orders"])))
        '{LAKE}/sales/orders'
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, coerce_numbers_to_str=True)

    root: str = Field(description="A folder or URI, like /lake or s3a://bucket/lake.")
    schema_name: str | None = Field(default=None, description="The schema of all tables, whatever their keys are.")
    storage_options: dict[str, str] = Field(
        default_factory=dict, description="Options of the object store, for Spark and delta-rs.", repr=False
    )

    def table(self, name: str, *, schema: str | None = None) -> LakeTable:
        """Select a table by name.

        Args:
            name: the name of the table.
            schema: the folder of the table; ``public`` by default.

        Raises:
            InvalidOptionError: one of them is not the name of a folder, like ``..``.
        """
        folder = self.schema_name or DEFAULT_SCHEMA if schema is None else schema
        return LakeTable(self.root, (folder, name), self.storage_options)

    def table_of(self, key: dg.AssetKey) -> LakeTable:
        """Select the table that the key of an asset names."""
        table = self.table(key.path[-1], schema=self.schema_name or ([DEFAULT_SCHEMA, *key.path][-2]))
        return replace(table, is_named_by_key=True)


class TableLocation(ABC):
    """The location of a Delta table, which is resolved when it is used. Its text is for display."""

    storage_options: Mapping[str, str]
    """Options for reading the Delta log; never displayed."""
    is_named_by_key: bool
    """Whether the key of the asset selects the table."""

    @property
    @abstractmethod
    def is_deferred(self) -> bool:
        """Whether a variable or a catalog has to be read before the path is known."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of the table for display."""

    @property
    @abstractmethod
    def path(self) -> str:
        """The current path or URI of the table.

        Raises:
            InvalidOptionError: a variable is not set, or the catalog has no such Delta table.
            AccessDeniedError, CatalogUnavailableError: the catalog refuses access, or does not answer.
        """

    @property
    def shown(self) -> str:
        """The location for display: the checked path, or the names of the variables and the catalog."""
        return str(self) if self.is_deferred else check_location(self.path)

    def options(self) -> dict[str, str]:
        """Return the storage options, with variables resolved.

        Raises:
            InvalidOptionError: a variable is not set.
        """
        return resolved_options("storage_options", self.storage_options)


@dataclass(frozen=True)
class LakeTable(TableLocation):
    """A table at a path or URI.

    Args:
        root: a folder or URI, or the whole path of the table.
        parts: the parts of the path after ``root``, each the name of a folder.
        storage_options: see :class:`TableLocation`.
        is_named_by_key: see :class:`TableLocation`.

    Raises:
        InvalidOptionError: the URI contains credentials or parameters; or a part is not the name of a folder.
    """

    root: str
    parts: Sequence[str] = ()
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    is_named_by_key: bool = False

    def __post_init__(self) -> None:
        # The root is displayed even if the other parts are variables.
        if not is_deferred(self.root) and scheme(check_name("table", self.root)) != LOCAL:
            check_table_uri("table", self.root)
        for part in self.parts:
            if not is_deferred(part):
                check_folder_name("table", part)

    @property
    def is_deferred(self) -> bool:
        """Whether a variable is part of the path."""
        return any(map(is_deferred, (self.root, *self.parts)))

    @property
    def label(self) -> str:
        """The path, whose last parts name the table."""
        return str(self)

    @property
    def path(self) -> str:
        """See :attr:`TableLocation.path`."""
        root = check_name("table", resolved_text("table", self.root))
        return _join_path(root, [check_folder_name("table", resolved_text("table", part)) for part in self.parts])

    def __str__(self) -> str:
        return _join_path(shown_text(self.root), [shown_text(part) for part in self.parts])


def _join_path(root: str, parts: Sequence[str]) -> str:
    return "/".join([root.rstrip("/"), *parts]) if parts else root


class SparkSessionResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # the class is generic only inside Dagster
    """A Spark session that can write Delta tables: local, on a master, or over Spark Connect.

    The session is created on first use. After the run it is stopped if this resource created it. A local Spark is a
    server that outlives the run, so the next run does not wait for a JVM; ``stream-assets spark status`` shows it.

    Example:
        >>> SparkSessionResource(master="local[2]").remote is None
        True
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, coerce_numbers_to_str=True)

    master: str = Field(default="local[*]", description="The Spark master; not used with `remote`.")
    remote: str | None = Field(default=None, repr=False, description="A Spark Connect address, sc://host:port.")
    in_process: bool = Field(default=False, description="Start a local Spark in the process of each run.")
    spark_config: dict[str, str] = Field(default_factory=dict, repr=False, description="More Spark settings.")

    _session: SparkSession | None = PrivateAttr(default=None)
    _is_own: bool = PrivateAttr(default=False)

    @property
    def spark_session(self) -> SparkSession:
        """The session.

        Raises:
            SparkSessionError: the session cannot be created.
            MissingDependencyError: Java is missing.
        """
        return self.session_for("", {})

    def session_for(self, table: str, storage_options: Mapping[str, str]) -> SparkSession:
        """Return the session. If it is created now, it is configured for the object store of the table.

        Args:
            table: the path or URI of the table.
            storage_options: the storage options of the table, in the names of delta-rs.

        Raises:
            SparkSessionError: the session cannot be created.
            MissingDependencyError: Java is missing, or the jars cannot be downloaded.
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
        """Stop the session if this resource created it."""
        session, self._session = self._session, None
        if session is not None and self._is_own:
            session.stop()


@contextmanager
def run_session(context: Any, spark: Any, table: TableLocation) -> Iterator[SparkSession]:
    """Provide the Spark session of a run.

    Args:
        context: the context of the run, or of a resource of the run.
        spark: a resource, or the key of one; ``None`` for a local Spark.
        table: the table that the run writes or reads.
    """
    if isinstance(spark, str):
        yield _wait_for_session(context, getattr(context.resources, spark), table)
        return
    resource = SparkSessionResource() if spark is None else spark
    # A resource that belongs to the asset is set up here, not by Dagster. So it needs no key, which could collide with
    # that of another asset, and does not appear in the run config, where a launchpad would keep its settings.
    with dg.build_resources({"spark": resource}, instance=context.instance) as resources:
        yield _wait_for_session(context, resources.spark, table)


def _wait_for_session(context: Any, resource: Any, table: TableLocation) -> SparkSession:
    """Get the session of a resource, and log the wait, because starting Spark may take minutes."""
    note = None if getattr(resource, "remote", None) else download_note(with_s3=is_s3(table.path))
    context.log.info(f"waiting for Spark; {note}" if note else "waiting for Spark")
    since = time.monotonic()
    session: SparkSession
    options = table.options()
    # A session that exists was created for another table, or elsewhere.
    hide_secrets(SparkOptions(storage_options=options))
    if isinstance(resource, SparkSessionResource):
        session = resource.session_for(table.path, options)
    else:
        session = resource.spark_session
    context.log.info(f"Spark is ready after {time.monotonic() - since:.1f} s")
    return session


def is_deferred(value: object) -> bool:
    """Return whether a value is a variable that is read when it is used."""
    # dagster.EnvVar is a subclass of str, but its text is the name of the variable.
    return isinstance(value, Deferred)


def shown_text(value: str) -> str:
    """Return the text for display: a variable as its name in braces, never as its value.

    Example:
        >>> from dagster import EnvVar
        >>> shown_text("lakehouse"), shown_text(EnvVar("GROUP"))
        ('lakehouse', '{GROUP}')
    """
    return f"{{{variable_name(value)}}}" if is_deferred(value) else value


def resolved_text(option: str, value: str) -> str:
    """Return the text, and read it now if it is in a variable.

    Args:
        option: the name of the option, for the error.
        value: text, or an ``EnvVar``.

    Raises:
        InvalidOptionError: the variable is not set, or is empty.
    """
    if not isinstance(value, Deferred):
        return value
    found = str(resolve_value(value, option))
    # An empty text would select a default: the root folder, or a broker on this machine.
    if not found.strip():
        raise InvalidOptionError(
            f"{option} comes from the environment variable {variable_name(value)}, which is empty",
            remedy="Set it where this process runs: the daemon's code server and the runs.",
        )
    return found


def resolved_options(option: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return options with all variables resolved.

    Raises:
        InvalidOptionError: a variable is not set.
    """
    # An option may be empty, like a session token that is not needed.
    return {
        name: str(resolve_value(value, f"{option}[{name!r}]")) if isinstance(value, Deferred) else value
        for name, value in options.items()
    }
