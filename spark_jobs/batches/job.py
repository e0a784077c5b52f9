"""Follows a batch from plan to commit, for ingestion, replays, redrives, claims and dismissals.

The functions are in the order in which a batch passes them. The numbers are the steps of :mod:`spark_jobs.batches`:

    batch_events              the loop of a run
      _next_batch       1-4   plan: :meth:`BatchJob.plan` makes a frozen :class:`Batch` from one snapshot of the ledger
      written_events          all steps after the plan
        write_batch     5-7   one pass if the batch is expected to be clean, otherwise:
          read_batch            read the messages, and split them into rows and dead letters
          commit_batch          write the dead letters, then the rows, and check that the commit landed
        BatchJob.finish   8   commit the position to the broker
        BatchJob.report       the event that the loop yields

Each batch says how it is written (``mode`` of its entry): it appends rows, or replaces those of its ranges or places.
The jobs differ in how they plan, and in what they do when a batch is in the table. A plan never calls the loop back: it
returns a batch, :class:`YieldTo` if another run asked to go first, or ``None`` if nothing is left.
"""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from spark_jobs.batches.bad_rows import Cached, FilteredBatch, caching
from spark_jobs.batches.ingestion import (
    CONTINUES,
    Batch,
    BatchReport,
    Event,
    Ingestion,
    Observer,
    Step,
    UnreadableTail,
    Waiting,
)
from spark_jobs.batches.run_control import BatchSizer, DeferredSignals, IdleWait, Retries
from spark_jobs.batches.target_table import MAX_RACES, OutdatedError, TargetTable, YieldRequests, YieldTo, lost_races
from spark_jobs.dead_letters.table import DEAD_LETTER_SCHEMA, CheckedDeadLetters, NotCounting, lost_ranges
from spark_jobs.decoding.ddl import quoted
from spark_jobs.ledger.delta_log import Commit
from spark_jobs.ledger.entries import MODES, LedgerEntry, PlannedFields
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.ledger.table_rows import ROW_PLACE, in_places, in_ranges
from spark_jobs.metrics.recorders import BatchLabels, BatchNumbers, recorders
from spark_jobs.reading.rejection import fail_on_bad_rows
from spark_jobs.reading.source import DEAD_LETTER_COLUMNS, STREAM_COLUMNS, read_on_driver, read_splits
from spark_jobs.spark_server.configuration import CORES
from spark_jobs.structured_logs import FIELDS, about
from spark_jobs.writing.delta_table import only_within, read_table
from spark_jobs.writing.failures import (
    FailedRowError,
    RejectedRowError,
    UnexplainedError,
    UnfinishedReadError,
    explain_failed_read,
    explain_read,
    explained,
)
from stream_consumers.batches import BatchPlan, BatchSource, Range, expected_counts, widths
from stream_consumers.errors import (
    BatchTooLargeError,
    ConstraintViolatedError,
    DataLossError,
    SchemaMismatchError,
    SourceRecreatedError,
    StreamAssetsError,
)
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

if TYPE_CHECKING:
    from typing_extensions import Unpack

STANDBY_SECONDS = 600.0
"""How long a run waits for messages that other members have claimed, in seconds."""
_log = logging.getLogger(__name__)


class BatchJob(ABC):
    """The base of the jobs, which plan and finish batches of a table; :func:`batch_events` runs a job.

    Args:
        spark: a session that can write Delta tables.
        ingestion: source, table and options.
        url: of the stream, for error messages.
        observer: called at each step, for progress bars and for tests that kill the process there.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
    """

    claims_while_planning = False
    """Whether planning claims messages, so that a signal is deferred until they are written or released."""
    asks_others_to_yield = False
    """Whether to ask other runs to pause after a lost race, and then commit the same read again."""
    wait_seconds = 1.0
    """The seconds between two calls of :meth:`is_drained`."""

    def __init__(self, spark: SparkSession, ingestion: Ingestion, *, url: StreamUrl, observer: Observer) -> None:
        self.ingestion = ingestion
        self.telemetry = BatchTelemetry(ingestion, observer)
        self.target = TargetTable.of(spark, ingestion, url=url, observer=self.telemetry)
        self.ledger = self.target.ledger
        self.retries = Retries(ingestion.retry_seconds)
        self.yields = YieldRequests(spark, ingestion, self.ledger)
        self.sizer = BatchSizer(ingestion.limits)
        self._races = 0
        self._checked: CheckedDeadLetters | None = None
        # The version of the table as of the last check.
        self._checked_at = -1

    @abstractmethod
    def plan(self) -> Batch | YieldTo | None:
        """Steps 1 to 4: plan the next batch from the ledger as it is now; ``None`` if nothing is left.

        Raises:
            OutdatedError: the stream has changed meanwhile.
            StreamAssetsError: the batch cannot be planned.
        """

    def write(self, batch: Batch) -> WrittenBatch | None:
        """Steps 5 to 7: read and commit a batch; ``None`` if it is not in the table and has to be planned again.

        Raises:
            TransformError, SchemaMismatchError, WriteError: nothing of the batch is in the table.
            DataLossError: rows would be replaced whose messages the stream no longer holds.
            LedgerUnreadableError: it is unknown whether the batch is in the table. Nothing was committed to the broker.
        """
        return write_batch(self, self.target, batch)

    def check_read(self) -> None:  # noqa: B027 - a job may read no stream
        """Refuse a stream that was recreated since the plan; called after the read.

        Raises:
            SourceRecreatedError: it was recreated.
        """

    def is_still_next(self, batch: Batch, state: LedgerState) -> bool:
        """Return whether the batch may be committed as it was read, after a lost race; if not, it is planned again."""
        return False

    @abstractmethod
    def finish(self, written: WrittenBatch) -> Mapping[Shard, int]:
        """Step 8: commit a written batch to the broker, and return the messages left per shard. It may be repeated."""

    def is_drained(self) -> bool:
        """Return whether other members have no open messages either, after a plan that found none."""
        return True

    def has_more(self) -> bool:
        """Return whether there may be another batch, after a plan that found none. This is cheap, and needs no Spark.

        Raises:
            StreamAssetsError: the stream cannot be read.
        """
        return False

    def forget_stream(self) -> None:  # noqa: B027 - a job may read no stream
        """Clear what is cached of the stream, because it has changed since the batch was planned."""

    def count_lost_race(self, reason: StreamAssetsError | None = None) -> None:
        """Count a batch that has to be planned again.

        Raises:
            StreamAssetsError: it happened ``MAX_RACES`` times in a row. The error is ``reason``; without one, a
                :class:`WriteError` that other runs are faster.
        """
        self._races += 1
        if self._races >= MAX_RACES:
            raise reason or lost_races(self.ledger, self.ingestion)

    def report(self, written: WrittenBatch, lag: Mapping[Shard, int], seconds: float) -> BatchReport:
        """Return the report of a batch that is in the table and committed."""
        self._races = 0
        self.retries.reset()
        report = BatchReport(
            written.entry,
            written.batch.plan,
            written.commit.version,
            written.messages,
            written.commit.output_rows or 0,
            written.entry.dead,
            lag,
            seconds,
            replaced=self.ledger.log.deleted_rows(written.commit),
            bytes=written.commit.output_bytes,
        )
        self.telemetry.reported(report)
        return report

    def delete_orphaned_dead_letters(self, state: LedgerState, *, again: bool = False) -> LedgerState:
        """Delete the dead letters of batches that were dropped: the first time, after a RESTORE, or ``again``.

        A RESTORE may have removed batches whose dead letters counted before. Another writer of the group may have
        committed since, so RESTOREs are looked for from the version that was checked last.

        Returns:
            The state to plan batches from, which shows which dead letters count.
        """
        found = self._checked
        if again or found is None or self.ledger.was_restored(after=self._checked_at, state=state):
            found = self._checked = self.target.dead_letters.clean_up(self.target.spark, self.ledger, state)
        self._checked_at = state.version
        state = replace(state, dead_letters_version=found.version, uncounted=found.uncounted)
        return replace(state, replaces_considered=found.replaces_considered)

    def _new_batch(
        self,
        kind: str,
        state: LedgerState,
        plan: BatchPlan,
        *,
        identities: Mapping[str, str],
        bid: str = "",
        maybe_written: Mapping[Shard, Range] | None = None,
        dead_letters: pa.Table | None = None,
        job_data: Any = None,
        **fields: Unpack[PlannedFields],
    ) -> Batch:
        batch = Batch(
            kind,
            state,
            plan,
            bid or uuid.uuid4().hex,
            fields,
            identities=identities,
            maybe_written=maybe_written or {},
            dead_letters=dead_letters,
            job_data=job_data,
        )
        self.telemetry(Step.PLANNED, batch)
        return batch


class SourceJob(BatchJob):
    """A job that reads ranges of a source.

    Args:
        spark: a session that can write Delta tables.
        source: the stream; the caller closes it.
        ingestion: what goes where.
        observer: called at each step.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
    """

    def __init__(self, spark: SparkSession, source: BatchSource, ingestion: Ingestion, *, observer: Observer) -> None:
        super().__init__(spark, ingestion, url=source.url, observer=observer)
        self._source = ingestion.in_epochs(source, self.ledger)
        self._parallelism = parallelism(spark)

    @cached_property
    def _identities(self) -> Mapping[str, str]:
        """The fingerprints at the start of the job."""
        return self._source.identities()

    def _plan_ranges(self, gaps: Mapping[Shard, Range]) -> BatchPlan | None:
        try:
            return self._source.plan(gaps, limits=self.sizer.limits, parallelism=self._parallelism)
        except DataLossError as error:
            raise OutdatedError(error) from error

    def check_read(self) -> None:
        """Compare the fingerprints with those at the start of the job; see :meth:`BatchJob.check_read`."""
        found = self._source.identities()
        if found != self._identities:
            raise SourceRecreatedError(
                f"{self._source.url} was recreated while it was read, so nothing was written",
                remedy="Run again: if it was recreated on purpose, the error of the next run says how to accept it.",
                planned=dict(self._identities),
                found=dict(found),
            )


def batch_events(
    job: BatchJob, *, max_batches: int | None = None, idle_wait: IdleWait | None = None
) -> Iterator[Event]:
    """Plan, write, verify and commit batches until nothing is left.

    A transient failure is retried for ``retry_seconds``: the batch is planned again from the ledger, also if it could
    not be read or written. A signal that asks the process to end is deferred until the current batch is committed and
    the caller has handled its report.

    Args:
        job: plans the batches.
        max_batches: stop after this number of them.
        idle_wait: how long to linger once everything is in the table.

    Yields:
        A report of each batch when it is in the table and committed; ``CONTINUES`` before another batch is written, and
        while the job lingers; and ``Waiting`` with the reason before it waits. A caller that takes no event after
        ``CONTINUES`` leaves that batch unwritten.

    Raises:
        StreamAssetsError: the error that ends the run. Batches that were yielded before are in the table.
    """
    idle_wait = idle_wait or IdleWait()
    count, worked_at = 0, time.monotonic()
    while count != max_batches:
        signals = DeferredSignals()
        with ExitStack() as stack:
            if job.claims_while_planning:
                stack.enter_context(signals)
            batch = yield from _next_batch(job, signals)
            if batch is not None:
                yield CONTINUES
                if not job.claims_while_planning:
                    stack.enter_context(signals)
                count += yield from written_events(job, batch, signals)
                worked_at = time.monotonic()
                continue
        if (yield from job.retries.call(job.is_drained)):
            if not (yield from _idle(job, idle_wait)):
                return
            worked_at = time.monotonic()
        elif time.monotonic() - worked_at > STANDBY_SECONDS:
            _log.warning("%s ends: other members did nothing for %g s", job.ledger.app, STANDBY_SECONDS)
            return
        else:
            time.sleep(job.wait_seconds)


def _next_batch(job: BatchJob, signals: DeferredSignals) -> Generator[Waiting, None, Batch | None]:
    """Steps 1 to 4: plan, and repeat it while the stream changes, another run asks to go first, or an outage lasts."""
    job.telemetry.planning()
    while True:
        try:
            with explained(job.ingestion.table):
                planned = job.plan()
        except OutdatedError as outdated:
            _plan_again(job, outdated)
        except StreamAssetsError as error:
            with signals.suspended():
                yield from job.retries.pause(error)
        else:
            if not isinstance(planned, YieldTo):
                return planned
            with signals.suspended():
                yield from job.yields.wait(planned)


def written_events(job: BatchJob, batch: Batch, signals: DeferredSignals) -> Generator[Event, None, bool]:
    """Steps 5 to 8 of a planned batch; return whether it is in the table. If not, it has to be planned again.

    Args:
        job: the job that planned it.
        batch: the plan.
        signals: defers signals until the batch is written.

    Raises:
        StreamAssetsError: see :meth:`BatchJob.write`.
    """
    began = time.monotonic()
    try:
        with explained(job.ingestion.table):
            written = job.write(batch)
    except OutdatedError as outdated:
        _plan_again(job, outdated)
        return False
    except StreamAssetsError as error:
        with signals.suspended():
            yield from job.retries.pause(error)
        return False
    if written is None:
        return False
    job.sizer.adapt(batch.plan.records, time.monotonic() - began)
    lag = yield from job.retries.call(partial(job.finish, written))
    try:
        yield job.report(written, lag, time.monotonic() - began)
    finally:
        # Later log lines of the process are not about this batch.
        about({})
    return True


def write_batch(job: BatchJob, target: TargetTable, batch: Batch) -> WrittenBatch | None:
    """Steps 5 to 7: read a planned batch and commit it.

    * A large batch that is expected to be clean is written while it is read. Executors check that it is clean, or
      nothing is committed. If it is not clean, it is written like any other batch, under the same number, which Delta
      accepts once.
    * The messages are read and counted, and the bad ones are found.
    * Only after the read is it known that the stream is still the planned one.
    * The dead letters are written, then the rows. The ledger shows whether they landed.
    * After a lost race for its number a replay waits, or asks the other runs to pause
      (:meth:`spark_jobs.batches.target_table.YieldRequests.ask`). Then it commits the same read under the next number.

    Args:
        job: the job that planned it.
        target: the table, and the transaction sequence of the batch.
        batch: the plan.

    Returns:
        ``None`` if another run was faster, so that the batch has to be planned again.

    Raises:
        StreamAssetsError: see :meth:`BatchJob.write`.
    """
    target.columns.look_up()
    is_isolated = False
    if (counts := one_pass_counts(batch, target.ingestion)) is not None:
        written = commit_in_one_pass(target, batch, counts)
        if isinstance(written, WrittenBatch):
            return written
        if written is None:
            job.count_lost_race()
            return None
        target.observer(Step.UNCLEAN, batch)
        batch, is_isolated = replace(batch, bid=uuid.uuid4().hex), written.is_unexplained
    with caching() as cached:
        filtered = read_batch(target, batch, cached, is_isolated=is_isolated)
        job.check_read()
        target.observer(Step.READ, batch)
        while True:
            if (found := commit_batch(target, batch, filtered)) is not None:
                return found
            job.count_lost_race()
            if not job.asks_others_to_yield:
                break
            job.yields.ask()
            state = job.delete_orphaned_dead_letters(job.ledger.read())
            if not job.is_still_next(batch, state):
                break
            batch = replace(batch, state=state, bid=uuid.uuid4().hex)
    return None


def _plan_again(job: BatchJob, outdated: OutdatedError) -> None:
    _log.warning("%s is planned again: %s", job.ledger.app, outdated.reason)
    job.forget_stream()
    job.count_lost_race(outdated.reason)


def _idle(job: BatchJob, idle_wait: IdleWait) -> Generator[Event, None, bool]:
    """Poll while the run lingers; return whether there may be another batch."""
    for _ in idle_wait.polls():
        if (yield from job.retries.call(job.has_more)):
            return True
        # Nothing is left to do, so an outage is over.
        job.retries.reset()
        yield CONTINUES
    return False


def reports_of(events: Iterable[Event]) -> Iterator[BatchReport]:
    """Yield the reports among the events, and log the others."""
    for event in events:
        if isinstance(event, BatchReport):
            yield event
        elif isinstance(event, Waiting):
            _log.warning("waiting: %s", event.why)
        elif isinstance(event, UnreadableTail):
            _log.warning("%s", event.what)


def drain_batches(
    job: BatchJob, *, max_batches: int | None = None, idle_wait: IdleWait | None = None
) -> Iterator[BatchReport]:
    """Run :func:`batch_events`, and yield its reports."""
    return reports_of(batch_events(job, max_batches=max_batches, idle_wait=idle_wait))


def parallelism(spark: SparkSession) -> int:
    """Return how many splits to read at the same time."""
    try:
        return max(1, spark.sparkContext.defaultParallelism)
    except PySparkException:
        # A Connect session does not know it, unless the server is ours.
        return int(spark.conf.get(CORES, "8") or 8)


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """A batch that is in the table.

    Args:
        batch: the batch as it was written. A repeated write gives it another batch id.
        entry: the metadata of its commit.
        commit: the commit.
        messages: messages decoded, per shard.
    """

    batch: Batch
    entry: LedgerEntry
    commit: Commit
    messages: Mapping[Shard, int]


@dataclass(frozen=True, slots=True)
class NotClean:
    """The result of one pass if a message or a row is bad, so that nothing was committed.

    Args:
        is_unexplained: whether the reason is unknown, so that a message may have crashed a Python worker.
    """

    is_unexplained: bool


@dataclass(frozen=True, slots=True)
class _Read:
    """Messages that were read before they are written.

    Args:
        frame: with the columns of :func:`spark_jobs.reading.source.read_splits`.
        messages: how many could be decoded, per shard.
        dead: how many dead letters there are.
    """

    frame: DataFrame
    messages: Mapping[Shard, int]
    dead: int


def one_pass_counts(batch: Batch, ingestion: Ingestion) -> Mapping[Shard, int] | None:
    """Return the messages per shard, if the batch can be written while it is read; ``None`` if it must be read first.

    One pass needs more messages than the driver reads, splits that know the result of a clean read, an append, and a
    transform for which Spark must read every split to its end. It is not tried after a batch that was not clean,
    because most faults repeat.
    """
    is_append = batch.kind == "batch" and not MODES[batch.fields.get("mode", "append")].replaces
    needs_first_read = batch.maybe_written or batch.fields.get("claims") or batch.fields.get("lost")
    reads_all = ingestion.transform is None or ingestion.is_row_wise
    is_large = batch.plan.records > ingestion.driver_records
    if not is_large or not is_append or needs_first_read or not reads_all or not batch.plan.splits:
        return None
    counts = expected_counts(batch.plan.splits)
    if counts is None:
        return None
    planned = sum(widths(batch.plan.ranges).values())
    return counts if _was_clean(batch.state.newest, is_dense=sum(counts.values()) == planned) else None


def _was_clean(entry: LedgerEntry | None, *, is_dense: bool) -> bool:
    """Return whether a batch had no dead letter, and if sequences grow by one, a message for each sequence."""
    if entry is None or entry.kind != "batch":
        return True
    return not entry.dead and not (is_dense and entry.messages < sum(widths(entry.ranges).values()))


def commit_in_one_pass(
    target: TargetTable, batch: Batch, counts: Mapping[Shard, int]
) -> WrittenBatch | NotClean | None:
    """Write the batch while it is read. Executors check that the read matches the plan, or nothing is committed.

    Args:
        target: the table.
        batch: the plan.
        counts: the messages of each shard, if the batch is clean.

    Returns:
        ``None`` if another run was faster.

    Raises:
        OutdatedError: the stream lost messages of the batch; nothing was written.
        StreamAssetsError: see :func:`commit_batch`.
    """
    source = target.columns.source_of_batch
    frame = read_splits(target.spark, batch.plan.splits, source, identities=batch.identities)
    # An error here does not depend on a message, so it would happen with any way of writing.
    rows = target.columns.rows_of_clean(frame, fail_on_bad_rows)
    entry = target.entry(batch, messages=sum(counts.values()))
    try:
        return _commit_rows(target, batch, entry, rows, counts)
    except BatchTooLargeError as error:
        raise OutdatedError(error) from error
    except StreamAssetsError as error:
        of_rows = (FailedRowError, ConstraintViolatedError) if target.filter.makes_dead_letters else ()
        if not isinstance(error, (UnfinishedReadError, RejectedRowError, UnexplainedError, *of_rows)):
            raise
        # If the messages can be read, the same error is raised again there.
        _log.info("batch %d of %s is read and counted first: %s", batch.number, target.ledger.app, error)
        return NotClean(isinstance(error, UnexplainedError))


def read_batch(target: TargetTable, batch: Batch, cached: Cached, *, is_isolated: bool = False) -> FilteredBatch:
    """Read the messages, count them, and split them into rows and dead letters.

    They are read again if the first read shows one of three things:

    * A message crashes the decoder, so that executors have to decode in isolation.
    * There are undeclared fields, which become columns.
    * The transform rejects rows for the first time, and their payloads were not kept.

    Args:
        target: the table.
        batch: the plan.
        cached: keeps what is read until the batch is written.
        is_isolated: whether executors decode in child processes.

    Raises:
        OutdatedError: the stream lost messages of the batch.
        TransformError: the transform raised, or fails for some messages.
        StreamAssetsError: they cannot be read.
    """
    keeps_payloads = target.filter.needs_payloads
    while True:
        try:
            found = _read(target, batch, cached, keeps_payloads=keeps_payloads, is_isolated=is_isolated)
        except UnexplainedError as error:
            if is_isolated:
                raise
            _log.warning("batch %d of %s is decoded in isolation: %s", batch.number, target.ledger.app, error)
            is_isolated = True
            continue
        if found.dead and target.columns.learn_fields(found.frame):
            keeps_payloads = target.filter.needs_payloads
            continue
        filtered = target.filter.apply(found.frame, cached, has_payloads=keeps_payloads)
        if filtered is None:
            keeps_payloads = True
            continue
        if filtered.frame is not found.frame:
            found = _counted(target, filtered.frame)
        return FilteredBatch(filtered.frame, filtered.rows, found.messages, found.dead)


def _read(target: TargetTable, batch: Batch, cached: Cached, *, keeps_payloads: bool, is_isolated: bool) -> _Read:
    source, splits, what = target.columns.source_of_batch, batch.plan.splits, str(target.url)
    if batch.plan.records <= target.ingestion.driver_records and not (batch.maybe_written or is_isolated):
        try:
            read = read_on_driver(splits, source, keeps_payloads=keeps_payloads)
        except (DataLossError, BatchTooLargeError) as error:
            raise OutdatedError(error) from error
        except StreamAssetsError:
            raise
        except Exception as error:  # noqa: BLE001 - a decoder of the user's may raise anything
            raise explain_read(f"{type(error).__name__}: {error}", what=what) from None
        if read is not None:
            return _Read(read.frame(target.spark, source), read.messages, read.dead)
    try:
        frame = read_splits(target.spark, splits, source, keeps_payloads=keeps_payloads, is_isolated=is_isolated)
        frame = cached.keep(_without_written(target, frame, batch.maybe_written))
    except Exception as error:  # noqa: BLE001 - Spark raises what comes, once it has ended
        raise explain_failed_read(error, what=what) from None
    return _counted(target, frame)


def _without_written(target: TargetTable, frame: DataFrame, maybe_written: Mapping[Shard, Range]) -> DataFrame:
    """Leave out messages within ``maybe_written`` that have rows in the table, or dead letters that count."""
    if not maybe_written:
        return frame
    condition = in_ranges(maybe_written)
    found = read_table(target.spark, target.ledger.log).where(condition).select(*ROW_PLACE)
    dead_letters = target.dead_letters.counted(target.spark, target.ledger)
    if dead_letters is not None:
        found = found.unionByName(dead_letters.where(condition).select(*ROW_PLACE))
    return frame.join(found, [*ROW_PLACE], "left_anti").select(*map(quoted, frame.columns))


def _counted(target: TargetTable, frame: DataFrame) -> _Read:
    """Count the messages and dead letters, which reads the source into the cache."""
    is_dead = f.col("_error").isNotNull().cast("bigint")
    counts = frame.groupBy("_stream", "_shard").agg(f.count("*").alias("all"), f.sum(is_dead).alias("dead"))
    try:
        found = counts.collect()
    except Exception as error:  # noqa: BLE001 - Spark raises what comes
        failure = explain_failed_read(error, what=str(target.url))
        if isinstance(failure, (DataLossError, BatchTooLargeError)):
            raise OutdatedError(failure) from None
        raise failure from None
    messages = {Shard(row["_stream"], row["_shard"]): int(row["all"] - row["dead"]) for row in found}
    return _Read(frame, messages, sum(int(row["dead"]) for row in found))


def refused_messages(target: TargetTable, plan: BatchPlan) -> Mapping[tuple[Shard, int], str]:
    """Return the messages that would become dead letters although they can be decoded, and why; nothing is written.

    They are decoded in isolation, because one of these dead letters may have crashed a process before.

    Args:
        target: the table.
        plan: a plan of dead letters that can be decoded, without the undeclared fields that they may have.

    Raises:
        TransformError: the transform raised, or fails for some of them.
    """
    with caching() as cached:
        filtered = read_batch(target, Batch("replay", target.ledger.read(), plan), cached, is_isolated=True)
        if not filtered.dead:
            return {}
        bad = filtered.frame.where(f.col("_error").isNotNull()).select(*ROW_PLACE, "_error").collect()
        return {(Shard(row["_stream"], row["_shard"]), row["_sequence"]): row["_error"] for row in bad}


def commit_batch(target: TargetTable, batch: Batch, filtered: FilteredBatch) -> WrittenBatch | None:
    """Steps 5 to 7: write the dead letters, then the rows; ``None`` if another run was faster.

    The entry of the batch is created here, because only now is the content of the batch known.

    Args:
        target: the table.
        batch: the plan.
        filtered: its rows and dead letters.

    Raises:
        DataLossError: rows or dead letters would be replaced whose messages the stream no longer holds.
        SchemaMismatchError, TransformError, WriteError: nothing of the batch is in the table.
        LedgerUnreadableError: it is unknown whether the batch is in the table. Nothing may be committed to the broker.
    """
    entry = target.entry(batch, messages=sum(filtered.messages.values()), dead=filtered.dead)
    rows, kept = filtered.rows, None
    if entry.write_mode.replaces:
        rows = _with_last_copies(target, rows, filtered.frame, entry)
    if entry.write_mode.uncounts_dead_letters and not entry.places:
        # Not for a redrive, whose messages are the dead letters themselves.
        kept, count = _last_dead_letters(target, filtered.frame, entry)
        entry = replace(entry, dead=entry.dead + count)
    if entry.dead or entry.lost:
        letters = filtered.frame.where(f.col("_error").isNotNull()).select(*STREAM_COLUMNS, *DEAD_LETTER_COLUMNS)
        letters = letters.unionByName(lost_ranges(target.spark, entry)) if entry.lost else letters
        if not target.dead_letters.write(letters, kept, ledger=target.ledger, number=entry.number, bid=entry.bid):
            return None
    return commit_recorded(target, batch, entry, rows, filtered.messages)


def commit_recorded(
    target: TargetTable, batch: Batch, entry: LedgerEntry, rows: DataFrame, messages: Mapping[Shard, int]
) -> WrittenBatch | None:
    """Write the corrections or dismissals of the batch, then the rows; ``None`` if another run was faster."""
    if (own := batch.dead_letters) is not None:
        schema = from_arrow_schema(pa.schema([DEAD_LETTER_SCHEMA.field(name) for name in own.column_names]))
        frame = target.spark.createDataFrame(own, schema)
        if not target.dead_letters.append(frame, ledger=target.ledger, number=entry.number, bid=entry.bid):
            return None
    target.observer(Step.DEAD_LETTERS_WRITTEN, batch)
    return _commit_rows(target, batch, entry, rows, messages)


def _commit_rows(
    target: TargetTable, batch: Batch, entry: LedgerEntry, rows: DataFrame, messages: Mapping[Shard, int]
) -> WrittenBatch | None:
    """Steps 6 and 7: write the rows in one commit, and verify it in the log; ``None`` if another run was faster."""
    target.observer(Step.WRITING, batch)
    if target.ingestion.transform is not None:
        rows = only_within(rows, entry.extents)
    failure = target.writer.try_write(rows, entry)
    target.observer(Step.ROWS_WRITTEN, batch)
    try:
        commit = target.writer.verified(entry, failure, spark=target.spark, ledger=target.ledger)
    except ConstraintViolatedError as error:
        raise target.filter.located(error, rows) from error
    except SchemaMismatchError:
        if target.columns.is_current(target.ledger.read()):
            raise
        _log.info("the columns of %s have changed meanwhile; planning again", target.ingestion.table)
        return None
    if commit is None:
        _log.info("batch %d of %s was written by another run; planning again", entry.number, entry.app)
        return None
    target.observer(Step.VERIFIED, batch)
    return WrittenBatch(batch, entry, commit, messages)


def _with_last_copies(target: TargetTable, rows: DataFrame, frame: DataFrame, entry: LedgerEntry) -> DataFrame:
    """Add the rows of the range whose messages cannot be read again: they are the last copies.

    Raises:
        DataLossError: there are some, and ``on_data_loss`` is not ``record``.
    """
    log = target.ledger.log
    table = read_table(target.spark, log)
    last, count = _without_messages(target, table, frame, entry, what="rows")
    if not count:
        return rows
    snapshot = log.snapshot()
    computed = (snapshot.computed_columns if snapshot else frozenset()) - set(rows.columns)
    return rows.unionByName(last.select(*map(quoted, table.columns)).drop(*computed), allowMissingColumns=True)


def _last_dead_letters(target: TargetTable, frame: DataFrame, entry: LedgerEntry) -> tuple[DataFrame | None, int]:
    """Return the dead letters of the range that are last copies, and their count; the batch writes them again."""
    table, ledger, where = target.dead_letters, target.ledger, in_places(entry.affected)
    # Most ranges have none, which delta-rs finds without a Spark job.
    if not any(len(part) for part in table.scan(ledger.group, NotCounting(), ROW_PLACE, where=where)):
        return None, 0
    dead_letters = table.counted(target.spark, ledger)
    assert dead_letters is not None
    last, count = _without_messages(target, dead_letters, frame, entry, what="dead letters")
    return (last if count else None), count


def _without_messages(
    target: TargetTable, table: DataFrame, frame: DataFrame, entry: LedgerEntry, *, what: str
) -> tuple[DataFrame, int]:
    """Return what ``table`` has in the range of a batch without a message in ``frame``, and how many.

    Raises:
        DataLossError: there are some, and ``on_data_loss`` is not ``record``.
    """
    ingestion = target.ingestion
    last = table.where(in_places(entry.affected)).join(frame.select(*ROW_PLACE), [*ROW_PLACE], "left_anti")
    found = last.agg(f.count("*").alias("rows"), f.min("_sequence").alias("first"), f.max("_sequence").alias("last"))
    counts = found.collect()[0]
    if not counts["rows"]:
        return last, 0
    error = DataLossError(
        f"{counts['rows']} {what} of {ingestion.table} between sequences {counts['first']} and "
        f"{counts['last']} would be replaced, but {target.url} no longer holds their messages",
        remedy="They are the last copy, so nothing was replaced. Replay only what the stream holds, or set "
        "on_data_loss='record' to keep them as they are and replace the others.",
    )
    ingestion.refuse_or_record(error)
    _log.warning("%d %s whose messages are gone from %s stay as they are", counts["rows"], what, target.url)
    return last, int(counts["rows"])


class BatchTelemetry:
    """An observer that measures the time between the steps, and calls another one.

    Args:
        ingestion: what goes where.
        observer: called at each step; the time that it takes is not counted.
    """

    def __init__(self, ingestion: Ingestion, observer: Observer) -> None:
        self._ingestion = ingestion
        self._observer = observer
        self._recorders = recorders()
        self._since = time.monotonic()

    def __call__(self, step: Step, batch: Batch | None) -> None:
        """Record a step that is done."""
        seconds = time.monotonic() - self._since
        if batch is not None:
            fields = {"batch": batch.bid, "batch_number": batch.number, "batch_kind": batch.kind}
            about({**fields, "group": self._ingestion.group, "table": self._ingestion.table})
            self._recorders.step(self._labels(batch.kind), step.value, seconds)
        self._observer(step, batch)
        self._since = time.monotonic()

    def planning(self) -> None:
        """Start to measure the next batch; until it is planned, log lines are about no batch."""
        about({})
        self._since = time.monotonic()

    def reported(self, report: BatchReport) -> None:
        """Record a batch that is in the table and committed."""
        entry = report.entry
        messages = sum(report.messages.values())
        lag: dict[str, int] = {}
        for shard, count in report.lag.items():
            lag[shard.stream] = lag.get(shard.stream, 0) + count
        # The messages that a replay has left are not a lag of the group.
        group_lag = lag if entry.kind == "batch" else {}
        numbers = BatchNumbers(messages, report.rows, report.bytes, report.dead, report.seconds, group_lag)
        if entry.kind != "dismiss":
            self._recorders.batch(self._labels(entry.kind), numbers)
        fields = {
            "version": report.version,
            "messages": messages,
            "rows": report.rows,
            "bytes": report.bytes,
            "dead_letters": report.dead,
            "seconds": round(report.seconds, 3),
            "lag": sum(lag.values()),
        }
        text = (
            "%(kind)s is in version %(version)d of %(table)s: %(messages)d messages, %(rows)d rows, "
            "%(dead_letters)d dead letters in %(seconds).2f s, lag %(lag)d"
        )
        _log.info(text, {"kind": entry.kind, "table": self._ingestion.table, **fields}, extra={FIELDS: fields})

    def _labels(self, kind: str) -> BatchLabels:
        return BatchLabels(self._ingestion.group, self._ingestion.table, kind)
