"""Follows a batch from plan to commit, for ingestion, replays, redrives, claims and dismissals.

The classes are the jobs. The functions after them are in the order in which a batch passes them; the numbers are the
steps of :mod:`spark_jobs.batches`:

    batch_events              the loop of a run
      _next_batch       1-4   plan: :meth:`BatchJob.plan` makes a frozen :class:`Batch` from one snapshot of the ledger
      written_events          all steps after the plan
        write_batch     5-7   one pass if the batch is expected to be clean; otherwise read it, then commit it
        BatchJob.finish   8   commit the position to the broker
        BatchJob.report       the event that the loop yields

:mod:`spark_jobs.batches.read_and_commit` has the functions for steps 5 to 7.

The ``mode`` in the ledger entry of a batch decides how its rows are written: they are appended, or they replace the
rows in its ranges or at its places.

The jobs differ in how they plan, and in what they do when a batch is in the table. ``plan`` returns one of three
things: a :class:`Batch`; :class:`YieldTo`, if another run has asked to go first; or ``None``, if nothing is left.
"""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from spark_jobs.batches.bad_rows import caching
from spark_jobs.batches.ingestion import (
    CONTINUES,
    Batch,
    BatchReport,
    Event,
    Ingestion,
    Observer,
    PlanAgain,
    Step,
    UnreadableTail,
    Waiting,
    WrittenBatch,
)
from spark_jobs.batches.read_and_commit import NotClean, commit_batch, commit_in_one_pass, one_pass_counts, read_batch
from spark_jobs.batches.run_control import BatchSizer, DeferredSignals, IdleWait, Retries
from spark_jobs.batches.target_table import (
    MAX_RACES,
    OutdatedError,
    TargetTable,
    YieldRequests,
    YieldTo,
    fence_abandoned,
    lost_races,
)
from spark_jobs.batches.telemetry import BatchTelemetry
from spark_jobs.dead_letters.corrections import corrected_splits, records_within
from spark_jobs.dead_letters.table import CheckedDeadLetters
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.reading.source import SourceColumns, read_splits
from spark_jobs.spark_server.configuration import CORES
from spark_jobs.structured_logs import about
from spark_jobs.writing.failures import translating_spark_errors
from stream_consumers.batches import BatchPlan, BatchSource, Range
from stream_consumers.errors import DataLossError, SourceRecreatedError, StreamAssetsError
from stream_consumers.messages import Shard
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl

STANDBY_SECONDS = 600.0
"""How long a run waits for messages that other members have claimed, in seconds."""
_ALL = Limits(max_records=2**62, max_bytes=2**62)
_log = logging.getLogger(__name__)


class BatchJob(ABC):
    """The base of the jobs, which plan and finish batches of a table; :func:`batch_events` runs a job.

    Args:
        spark: a session that can write Delta tables.
        ingestion: source, table and options.
        url: of the stream, for error messages.
        observer: called at each step, for progress bars and for tests that kill the process there.
        idle_wait: how long the run lingers, and how often it then begins a batch.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
    """

    claims_while_planning = False
    """Whether planning claims messages, so that a signal is deferred until they are written or released."""
    asks_others_to_yield = False
    """Whether to ask other runs to pause after a lost race, and then commit the same read again."""
    wait_seconds = 1.0
    """The seconds between two calls of :meth:`is_group_drained`."""

    def __init__(
        self,
        spark: SparkSession,
        ingestion: Ingestion,
        *,
        url: StreamUrl,
        observer: Observer,
        idle_wait: IdleWait | None = None,
    ) -> None:
        self.ingestion = ingestion
        self.idle_wait = idle_wait or IdleWait()
        # A run that lingers has a batch each second, and Dagster may store each line as an event.
        level = logging.DEBUG if self.idle_wait.lingers else logging.INFO
        self.telemetry = BatchTelemetry(ingestion, observer, level=level)
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

    def clean_up_dead_letters(self, state: LedgerState, *, again: bool = False) -> LedgerState:
        """Find which dead letters count, delete those that never can, and fence abandoned batches.

        This is done at the first call, and after a RESTORE, because it may have removed batches whose dead letters
        counted before. Other calls return what the last check found.

        Args:
            state: the ledger as of now. RESTOREs are searched for from the version of the last check up to this one.
            again: check also without a RESTORE.

        Returns:
            The state to plan batches from. It has the result of the check.
        """
        found = self._checked
        if again or found is None or self.ledger.was_restored(after=self._checked_at, up_to=state.version):
            found = self._checked = self.target.dead_letters.clean_up(self.target.spark, self.ledger, state)
            fence_abandoned(self.target.spark, self.ingestion, found.abandoned)
        self._checked_at = state.version
        return found.added_to(state)

    def write(self, batch: Batch) -> WrittenBatch | PlanAgain:
        """Steps 5 to 7: read and commit a batch, or return why it has to be planned again.

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

    def count_lost_race(self, reason: StreamAssetsError | None = None) -> None:
        """Count a batch that has to be planned again.

        Raises:
            StreamAssetsError: it happened ``MAX_RACES`` times in a row. The error is ``reason``; without one, a
                :class:`WriteError` that other runs are faster.
        """
        self._races += 1
        if self._races >= MAX_RACES:
            raise reason or lost_races(self.ledger, self.ingestion)

    def forget_stream(self) -> None:  # noqa: B027 - a job may read no stream
        """Clear what is cached of the stream, because it has changed since the batch was planned."""

    @abstractmethod
    def finish(self, written: WrittenBatch) -> Mapping[Shard, int]:
        """Step 8: commit a written batch to the broker, and return the messages left per shard. It may be repeated."""

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
            merged=written.commit.merged,
            stale=written.stale,
        )
        self.telemetry.reported(report)
        return report

    def is_group_drained(self) -> bool:
        """Return whether all members of the group are done. Called after a plan that found nothing for this member."""
        return True

    def has_more(self) -> bool:
        """Return whether there may be another batch, after a plan that found none. This is cheap, and needs no Spark.

        Raises:
            StreamAssetsError: the stream cannot be read.
        """
        return False


class SourceJob(BatchJob):
    """A job that reads ranges of a source.

    Args:
        spark: a session that can write Delta tables.
        source: the stream; the caller closes it.
        ingestion: what goes where.
        observer: called at each step.
        idle_wait: see :class:`BatchJob`.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
    """

    def __init__(
        self,
        spark: SparkSession,
        source: BatchSource,
        ingestion: Ingestion,
        *,
        observer: Observer,
        idle_wait: IdleWait | None = None,
    ) -> None:
        super().__init__(spark, ingestion, url=source.url, observer=observer, idle_wait=idle_wait)
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

    def _corrections(self, ranges: Mapping[Shard, Range]) -> pa.Table:
        """Return the records of corrections of messages in these ranges."""
        return records_within(self.target.dead_letters.corrections(self.ledger), ranges)

    def _plan_again(self, ranges: Mapping[Shard, Range]) -> BatchPlan | None:
        """Plan messages that were read before, with their corrections."""
        plan = self._plan_ranges(ranges)
        return None if plan is None else self._corrected(plan)

    def _corrected(self, plan: BatchPlan) -> BatchPlan:
        """Return the plan with the corrections that are in force now, in place of those that it has."""
        return replace(plan, splits=corrected_splits(plan.splits, self._corrections(plan.ranges)))

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


def parallelism(spark: SparkSession) -> int:
    """Return how many splits to read at the same time."""
    try:
        return max(1, spark.sparkContext.defaultParallelism)
    except PySparkException:
        # A Connect session does not know it, unless the server is ours.
        return int(spark.conf.get(CORES, "8") or 8)


def read_all(
    spark: SparkSession,
    source: BatchSource,
    ranges: Mapping[Shard, Range],
    columns: SourceColumns,
    *,
    is_isolated: bool = False,
) -> DataFrame:
    """Return a frame that reads all messages in these ranges, which the stream must hold.

    Args:
        spark: a session.
        source: the stream, by the names of its epochs.
        ranges: what to read; empty ranges are left out.
        columns: decode the payloads.
        is_isolated: see :func:`spark_jobs.reading.source.read_splits`.
    """
    held = {shard: part for shard, part in ranges.items() if part.start < part.end}
    plan = source.plan(held, limits=_ALL, parallelism=parallelism(spark)) if held else None
    return read_splits(spark, plan.splits if plan else [], columns, is_isolated=is_isolated)


def batch_events(
    job: BatchJob, *, max_batches: int | None = None, idle_wait: IdleWait | None = None
) -> Iterator[Event]:
    """Plan, write, verify and commit batches until nothing is left.

    After an error that may be temporary, the run tries again for up to ``retry_seconds``. If a batch could not be
    planned, read or written, it is planned again from the ledger. If it is in the table, only step 8 is repeated.

    A signal that asks the process to end is deferred until the current batch is committed and the caller has handled
    its report.

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
        signals = DeferredSignals(job.ingestion.finish_seconds)
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
        if (yield from job.retries.call(job.is_group_drained)):
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
            with translating_spark_errors(job.ingestion.table):
                planned = job.plan()
                if isinstance(planned, Batch):
                    job.telemetry(Step.PLANNED, planned)
        except OutdatedError as outdated:
            _count_outdated(job, outdated)
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
        with translating_spark_errors(job.ingestion.table):
            written = job.write(batch)
    except OutdatedError as outdated:
        _count_outdated(job, outdated)
        return False
    except StreamAssetsError as error:
        with signals.suspended():
            yield from job.retries.pause(error)
        return False
    if isinstance(written, PlanAgain):
        _log.info("batch %d of %s is planned again: %s", batch.number, job.ingestion.group, written.value)
        return False
    job.sizer.adapt(batch.plan.records, time.monotonic() - began)
    lag = yield from job.retries.call(partial(job.finish, written))
    try:
        yield job.report(written, lag, time.monotonic() - began)
    finally:
        # Later log lines of the process are not about this batch.
        about({})
    return True


def write_batch(job: BatchJob, target: TargetTable, batch: Batch) -> WrittenBatch | PlanAgain:
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

    Raises:
        StreamAssetsError: see :meth:`BatchJob.write`.
    """
    target.columns.refresh_registry_schema()
    is_isolated = False
    if (counts := one_pass_counts(batch, target.ingestion)) is not None:
        written = commit_in_one_pass(target, batch, counts)
        if isinstance(written, PlanAgain):
            job.count_lost_race()
        if not isinstance(written, NotClean):
            return written
        target.observer(Step.UNCLEAN, batch)
        batch, is_isolated = replace(batch, bid=uuid.uuid4().hex), written.is_unexplained
    with caching() as cached:
        filtered = read_batch(target, batch, cached, is_isolated=is_isolated)
        job.check_read()
        target.observer(Step.READ, batch)
        while True:
            found = commit_batch(target, batch, filtered)
            if isinstance(found, WrittenBatch):
                return found
            job.count_lost_race()
            if not job.asks_others_to_yield:
                return found
            job.yields.ask()
            state = job.clean_up_dead_letters(job.ledger.read())
            # Below another floor, other messages become dead letters.
            if state.floor != batch.state.floor or not job.is_still_next(batch, state):
                return PlanAgain.NOT_NEXT
            batch = replace(batch, state=state, bid=uuid.uuid4().hex)


def _count_outdated(job: BatchJob, outdated: OutdatedError) -> None:
    _log.warning("%s is planned again: %s", job.ledger.app, outdated.reason)
    job.forget_stream()
    job.count_lost_race(outdated.reason)


def _idle(job: BatchJob, idle_wait: IdleWait) -> Generator[Event, None, bool]:
    """Poll while the run lingers; return whether there may be another batch."""
    for _ in idle_wait.polls():
        if idle_wait.is_due and (yield from job.retries.call(job.has_more)):
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
