"""The declaration that operators and triggers share: a stream, its group, and the table that it is written into."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

from spark_jobs.table_location import check_location
from stream_consumers.client_config import ClientConfig, Scalar, option_value, resolve
from stream_consumers.create import StreamSource
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import AutoStreamReset, ConsumerMode, DataLoss, ErrorPolicy, choose_fields
from stream_consumers.urls import NOT_SHOWN, StreamUrl, check_no_credentials

if TYPE_CHECKING:
    from spark_jobs.batches.ingestion import Ingestion


# What Airflow replaces before a task runs.
_TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
_OF_PARAMETERS = frozenset("?#;")
_REMEDY = "Put them into a connection of Airflow, or into client and storage_options, from the environment."
# Other backends check their URLs when they are opened, and may have nodes that are no servers.
_OF_SERVERS = ("kafka", "redis", "rediss")


def check_addresses(source: object, table: object, *, has_connection: bool) -> None:
    """Refuse credentials in addresses, because logs, events and the database of Airflow have them.

    Args:
        source: a stream URL, or with a connection only stream keys.
        table: the path or URI of a table.
        has_connection: whether the source has a connection.

    Beside a template, an address may have neither credentials nor parameters.

    Raises:
        InvalidUrlError, InvalidOptionError: an address is invalid or has credentials; the message does not repeat them.

    Example:
        >>> check_addresses("redis://cache:6379/orders", "lake/{{ ds }}", has_connection=False)
    """
    for name, value in (("source", source), ("table", table)):
        if isinstance(value, str):
            text = check_no_credentials(name, _TEMPLATE.sub("a", value), remedy=_REMEDY)
            if text != value and "://" in text and not _OF_PARAMETERS.isdisjoint(text):
                raise InvalidOptionError(f"{name} has parameters beside a template; {NOT_SHOWN}", remedy=_REMEDY)
    if _is_final(source):
        is_url = "://" in source or not has_connection
        url = StreamUrl.parse(source if is_url else f"redis://of-connection/{source}")
        if url.protocol in _OF_SERVERS:
            url.check_servers()
    if _is_final(table):
        check_location(table)


def _is_final(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _TEMPLATE.search(value) is None


@dataclass(frozen=True, slots=True)
class StreamTable:
    """A stream, the group that reads it, and the table that it is written into, as far as measuring the lag needs it.

    Args:
        source: the stream URL, like ``kafka://broker:9092/orders``.
        table: the Delta table, a path or URI.
        group: the consumer group; the mode may have a default.
        mode: how the group shares the stream: ``resumable``, ``real_time`` or ``load_balanced``.
        start: where a group without a position starts: ``earliest``, or ``latest``, the default of ``real_time``.
        on_data_loss: for messages that the stream removed before they were read: ``error`` or ``record``.
        client: options of the broker's client. A value ``env:NAME`` is read from the environment when it is used.
        storage_options: options of the table's storage, in the names of delta-rs; ``env:NAME`` as for ``client``.
        stream_conn_id: a connection of Airflow with the servers and options of the client; then ``source`` may be only
            the keys of the streams, separated by commas.
        storage_conn_id: a connection of Airflow with the options of the table's storage.

    Raises:
        InvalidUrlError, InvalidOptionError: a URL is invalid or has credentials, which logs and events would show.

    Example:
        >>> StreamTable("memory://shop/orders", "lake/orders", "lakehouse").arguments()
        {'source': 'memory://shop/orders', 'table': 'lake/orders', 'group': 'lakehouse'}
    """

    source: str
    table: str
    group: str | None = None
    mode: ConsumerMode = ConsumerMode.RESUMABLE
    start: AutoStreamReset | None = None
    on_data_loss: DataLoss = DataLoss.ERROR
    client: Mapping[str, Scalar] = field(default_factory=dict, repr=False)
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    stream_conn_id: str | None = None
    storage_conn_id: str | None = None

    def __post_init__(self) -> None:
        choose_fields(self, mode=ConsumerMode, on_data_loss=DataLoss)
        if self.start is not None:
            choose_fields(self, start=AutoStreamReset)
        check_addresses(self.source, self.table, has_connection=self.stream_conn_id is not None)

    @property
    def stream(self) -> StreamSource:
        """The stream; creating it opens nothing."""
        return StreamSource(self.source, self.mode, _with_variables(self.client))

    @property
    def is_from_the_end(self) -> bool:
        """Whether a group without a position starts at the end of the stream."""
        return self.first is AutoStreamReset.LATEST

    @property
    def first(self) -> AutoStreamReset:
        """Where a group without a position starts."""
        is_real_time = self.mode is ConsumerMode.REAL_TIME
        return self.start or (AutoStreamReset.LATEST if is_real_time else AutoStreamReset.EARLIEST)

    def ingestion(self, *, errors: ErrorPolicy | None = None, **settings: Any) -> Ingestion:
        """Return the group, the table and how rows are made.

        Args:
            errors: how to handle what cannot be written; by default only ``on_data_loss`` of this declaration.
            settings: further settings of the ingestion.
        """
        from spark_jobs.batches.ingestion import Ingestion  # noqa: PLC0415 - Spark is imported when it is needed

        stream = self.stream
        return Ingestion(
            group=stream.group(self.group),
            table=self.table,
            sharing=self.mode,
            claims=stream.is_claimed,
            start=self.first,
            errors=errors or ErrorPolicy(on_data_loss=self.on_data_loss),
            storage_options=self.resolved_storage_options(),
            **settings,
        )

    def resolved_storage_options(self) -> dict[str, str]:
        """Return the storage options with variables resolved.

        Raises:
            InvalidOptionError: a variable is not set.
        """
        return {name: str(value) for name, value in resolve(_with_variables(self.storage_options)).items()}

    def arguments(self) -> dict[str, Any]:
        """Return what differs from the defaults, as plain values that can be written as JSON."""
        plain = {
            "source": self.source,
            "table": self.table,
            "group": self.group,
            "mode": self.mode.value,
            "start": None if self.start is None else self.start.value,
            "on_data_loss": DataLoss(self.on_data_loss).value,
            "client": dict(self.client),
            "storage_options": dict(self.storage_options),
            "stream_conn_id": self.stream_conn_id,
            "storage_conn_id": self.storage_conn_id,
        }
        defaults = {"mode": ConsumerMode.RESUMABLE.value, "on_data_loss": DataLoss.ERROR.value}
        return {name: value for name, value in plain.items() if value and value != defaults.get(name)}


def _with_variables(options: Mapping[str, Scalar]) -> ClientConfig:
    """Return options whose values ``env:NAME`` are variables, as on the command line."""
    return {name: option_value(value) for name, value in options.items()}
