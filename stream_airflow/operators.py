"""The operators: a task writes a stream into a table, as a run of a Dagster asset does."""

from __future__ import annotations

import enum
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import Asset, BaseOperator

from stream_airflow.airflow_names import AirflowException, AirflowFailException, mask_secret
from stream_airflow.connections import connected, connected_spark
from stream_airflow.declaration import StreamTable, check_addresses
from stream_consumers.client_config import resolve, secret_values
from stream_consumers.errors import StreamAssetsError, Terminal
from stream_consumers.messages import utc_text
from stream_consumers.options import ConsumerMode, ErrorPolicy, Limits, check_range, choice

if TYPE_CHECKING:
    from airflow.sdk import Context
    from pyspark.sql import SparkSession

    from spark_jobs.batches.ingestion import BatchReport, Event, Ingestion, Transform
    from spark_jobs.decoding.decoders import Decoder
    from spark_jobs.run_report import BatchTotals
    from spark_jobs.session import SparkOptions
    from spark_jobs.writing.keyed import Keys
    from spark_jobs.writing.layout import TableLayout

FINISH_SECONDS = 4.0
"""How long a task that is killed goes on with its batch, in seconds: Airflow sends SIGKILL 5 s after SIGTERM."""


class Intervals(enum.Enum):
    """The intervals of time in which a task reports that it changed rows."""

    HOUR = "hour"
    DAY = "day"

    @property
    def milliseconds(self) -> int:
        """The length of an interval."""
        return 3_600_000 if self is Intervals.HOUR else 86_400_000

    def name_of(self, start_ms: int) -> str:
        """Return the name of an interval in UTC, like ``2026-11-17T05`` or ``2026-11-17``.

        Args:
            start_ms: its start, in milliseconds since 1970.
        """
        return utc_text(start_ms)[: len("2026-11-17T05" if self is Intervals.HOUR else "2026-11-17")]


class _Killed(BaseException):
    """Airflow asked the task to end. As with KeyboardInterrupt, no handler of other errors may catch it."""


class StreamOperator(BaseOperator):
    """The base of the operators.

    Args:
        source: the stream URL, like ``kafka://broker:9092/orders``.
        table: the Delta table, a path or URI.
        group: the consumer group; the mode may have a default.
        decode: decodes payloads into columns; ``Raw()`` by default.
        transform: converts the decoded rows of a batch to the rows to write, which must keep the stream columns.
        mode: how the group shares the stream: ``resumable``, ``real_time`` or ``load_balanced``.
        errors: how to handle what cannot be written unchanged.
        limits: the most that one batch holds.
        layout: the layout of the table, if it has to be created.
        keys: makes the table keyed.
        client: options of the broker's client. A value ``env:NAME`` is read from the environment of the task.
        storage_options: options of the table's storage, in the names of delta-rs; ``env:NAME`` as for ``client``.
        spark: options of the Spark session; by default a local Spark, whose server outlives the task.
        stream_conn_id: a connection of type ``kafka`` or ``redis`` with the servers and options of the client; then
            ``source`` may be only the keys of the streams, separated by commas.
        storage_conn_id: a connection of type ``aws`` with the options of the table's storage.
        spark_conn_id: a connection of type ``spark_connect`` or ``spark`` with the address of Spark.
        intervals: ``hour`` or ``day`` to report ``intervals``, too: the hours or days, in UTC, of the messages whose
            rows were written or replaced, like ``2026-11-17``; this reads the times of these rows.
        finish_seconds: how long a task that is killed goes on with its batch, in seconds. Airflow sends SIGKILL 5 s
            after SIGTERM, unless the worker itself is stopped. A batch that is given up is written by the next run.
        settings: further settings of :class:`spark_jobs.batches.ingestion.Ingestion`, like ``retry_seconds``.
        operator: arguments of every operator of Airflow.
    """

    template_fields: Sequence[str] = (
        *("source", "table", "group", "client", "storage_options"),
        *("stream_conn_id", "storage_conn_id", "spark_conn_id"),
    )
    ui_color = "#dbeafe"
    kind: ClassVar[str]
    """What the task does, for its XCom and the event of its assets."""

    def __init__(
        self,
        *,
        source: str,
        table: str,
        group: str | None = None,
        decode: Decoder | None = None,
        transform: Transform | None = None,
        mode: ConsumerMode | str = ConsumerMode.RESUMABLE,
        errors: ErrorPolicy | None = None,
        limits: Limits | None = None,
        layout: TableLayout | None = None,
        keys: Keys | None = None,
        client: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, str] | None = None,
        spark: SparkOptions | None = None,
        stream_conn_id: str | None = None,
        storage_conn_id: str | None = None,
        spark_conn_id: str | None = None,
        intervals: Intervals | str | None = None,
        finish_seconds: float = FINISH_SECONDS,
        settings: Mapping[str, Any] | None = None,
        **operator: Any,
    ) -> None:
        super().__init__(**operator)
        check_addresses(source, table, has_connection=stream_conn_id is not None)
        self.source = source
        self.table = table
        self.group = group
        self.decode = decode
        self.transform = transform
        self.mode = choice(ConsumerMode, mode, option="mode")
        self.errors = errors or ErrorPolicy()
        self.limits = limits or Limits()
        self.layout = layout
        self.keys = keys
        self.client = client or {}
        self.storage_options = storage_options or {}
        self.spark = spark
        self.stream_conn_id = stream_conn_id
        self.storage_conn_id = storage_conn_id
        self.spark_conn_id = spark_conn_id
        self.intervals = None if intervals is None else choice(Intervals, intervals, option="intervals")
        check_range("finish_seconds", finish_seconds)
        self.finish_seconds = finish_seconds
        self.settings = settings or {}
        self._is_executing = False

    def declared(self, **more: Any) -> StreamTable:
        """Return the stream, the group and the table, after the templates were rendered; logs will hide the secrets."""
        declared = StreamTable(
            self.source,
            self.table,
            self.group,
            mode=self.mode,
            on_data_loss=self.errors.on_data_loss,  # type: ignore[arg-type]  # it is chosen by __post_init__
            client=self.client,
            storage_options=self.storage_options,
            stream_conn_id=self.stream_conn_id,
            storage_conn_id=self.storage_conn_id,
            **more,
        )
        declared = connected(declared)
        for options in (resolve(declared.stream.client), declared.resolved_storage_options()):
            for secret in secret_values(options):
                # With a name, Airflow would hide only those that its own list has.
                mask_secret(secret)
        return declared

    def ingestion(self, declared: StreamTable) -> Ingestion:
        """Return the group, the table, and how rows are made."""
        given = {"decoder": self.decode, "layout": self.layout}
        return declared.ingestion(
            errors=self.errors,
            transform=self.transform,
            limits=self.limits,
            keys=self.keys,
            finish_seconds=self.finish_seconds,
            **{name: value for name, value in given.items() if value is not None},
            **self.settings,
        )

    def execute(self, context: Context) -> dict[str, Any]:
        """Do the work; the result is the XCom of the task, and the extra of the events of its asset outlets.

        Raises:
            AirflowFailException: an error that a retry cannot fix.
            AirflowException: the task was killed; a retry continues its work.
            StreamAssetsError: another error.
        """
        self._is_executing = True
        try:
            with _final_failures(shows_values=self.errors.dead_letter_payloads):
                values = {"kind": self.kind, **self.work(context)}
        except _Killed:
            raise AirflowException("The task was asked to end. The batches that it reported are in the table") from None
        finally:
            self._is_executing = False
        for outlet in self.outlets:
            if isinstance(outlet, Asset):
                context["outlet_events"][outlet].extra.update(values)
        return values

    def on_kill(self) -> None:
        """End the task. Airflow calls this at SIGTERM, which is deferred until the current batch is written.

        It is also called after ``execution_timeout``, when the task has ended already.
        """
        if self._is_executing:
            self._is_executing = False
            raise _Killed

    @abstractmethod
    def work(self, context: Context) -> dict[str, Any]:
        """Do the work of the task, and return what it reports."""

    @contextmanager
    def session(self, declared: StreamTable) -> Iterator[SparkSession]:
        """Provide the Spark session of the task, and stop it at the end if the task has created it."""
        from spark_jobs.jars import download_note  # noqa: PLC0415 - Spark is imported when it is needed
        from spark_jobs.session import SparkOptions, create_session, running_session  # noqa: PLC0415
        from spark_jobs.table_location import is_s3  # noqa: PLC0415

        options = connected_spark(self.spark or SparkOptions(), self.spark_conn_id)
        options = replace(options, table=self.table, storage_options=declared.resolved_storage_options())
        note = None if options.remote else download_note(with_s3=is_s3(self.table))
        self.log.info("waiting for Spark%s", f"; {note}" if note else "")
        since, is_own = time.monotonic(), running_session() is None
        session = create_session(options)
        self.log.info("Spark is ready after %.1f s", time.monotonic() - since)
        try:
            yield session
        finally:
            if is_own:
                session.stop()

    def logged(self, events: Iterable[Event]) -> Iterator[BatchReport]:
        """Log the events of a run as they arrive, and yield its batches, which are in the log of the task already."""
        from spark_jobs.batches.ingestion import BatchReport, Continues, Waiting  # noqa: PLC0415 - as in session()

        for event in events:
            if isinstance(event, BatchReport):
                yield event
            elif not isinstance(event, Continues):
                self.log.warning("%s", event.why if isinstance(event, Waiting) else event.what)

    def report(self, events: Iterable[Event], ingestion: Ingestion) -> dict[str, Any]:
        """Log the events of a run as they arrive, and return the sums of its batches."""
        from spark_jobs.run_report import BatchTotals  # noqa: PLC0415 - as in session()

        totals: BatchTotals | None = None
        for batch in self.logged(events):
            totals = totals or BatchTotals(batch)
            totals.add(batch)
        return self.summary(totals, ingestion)

    def summary(self, totals: BatchTotals | None, ingestion: Ingestion) -> dict[str, Any]:
        """Return what the task reports of its batches, as plain values."""
        from spark_jobs.run_report import touched_intervals  # noqa: PLC0415 - as in session()

        ledger = ingestion.ledger()
        found: dict[str, Any] = dict.fromkeys(("batches", "rows", "messages", "dead_letters", "lag"), 0)
        starts: list[int] = []
        if totals is None:
            found["version"] = ledger.read().version
        else:
            found |= {"batches": totals.batches, **totals.values(), "lag": sum(totals.last.lag.values())}
            found |= {"first_version": totals.first_version, "version": totals.last.version}
            if self.intervals is not None:
                length = self.intervals.milliseconds
                starts = touched_intervals(ledger, length, since_version=totals.first_version)
        if self.intervals is not None:
            found["intervals"] = [self.intervals.name_of(start) for start in starts]
        return found


class IngestOperator(StreamOperator):
    """Writes a stream into a table exactly once, up to the end that the stream has when the task starts.

    Args:
        start: where a group without a position starts: ``earliest``, or ``latest``, the default of ``real_time``.
        linger_seconds: how long the task keeps polling for new messages, in seconds from its start.
        max_batches: stop after this number of batches.
        member: the name of this member of a Redis group in mode ``load_balanced``.
        arguments: see :class:`StreamOperator`.
    """

    kind = "ingestion"

    def __init__(
        self,
        *,
        start: str | None = None,
        linger_seconds: float = 0.0,
        max_batches: int | None = None,
        member: str = "main",
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.start = start
        self.linger_seconds = linger_seconds
        self.max_batches = max_batches
        self.member = member

    def work(self, context: Context) -> dict[str, Any]:
        """Ingest."""
        from spark_jobs.decoding.isolation import prepare  # noqa: PLC0415 - as in session()
        from spark_jobs.run_ingestion import run_events  # noqa: PLC0415

        declared = self.declared(start=self.start)
        ingestion = replace(self.ingestion(declared), member=self.member)
        prepare()
        with self.session(declared) as spark:
            events = run_events(
                spark,
                declared.stream,
                ingestion,
                max_batches=self.max_batches,
                linger_seconds=self.linger_seconds,
            )
            found = self.report(events, ingestion)
        if not found["batches"]:
            self.log.info("no new messages: group %s is at the end of %s", ingestion.group, declared.stream.url.shown)
        return found


@contextmanager
def _final_failures(*, shows_values: bool) -> Iterator[None]:
    """Raise errors that a retry cannot fix as ``AirflowFailException``, after which Airflow does not retry.

    Args:
        shows_values: whether the log may show errors that contain values of messages.
    """
    try:
        yield
    except StreamAssetsError as error:
        shown = error.revealed() if shows_values else error
        if isinstance(shown, Terminal):
            raise AirflowFailException(str(shown)) from shown
        raise shown from error.__cause__
