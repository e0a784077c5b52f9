"""Follows a batch from plan to commit, for ingestion, replays, redrives, claims and dismissals.

The functions stand in the order in which a batch passes them. The numbers are the steps of :mod:`spark_jobs.batches`:

    batch_events              the loop of a run
      _next_batch       1-4   plan: :meth:`BatchJob.plan` makes a frozen :class:`Batch` from one snapshot of the ledger
      written_events          what follows the plan
        write_batch     5-7   one pass if the batch is expected to be clean, otherwise:
          read_batch            read the messages, and split them into rows and dead letters
          commit_batch          write the dead letters, then the rows, and look whether the commit landed
        BatchJob.finish   8   commit the position to the broker
        BatchJob.report       the event that the loop yields

How a batch is written is a value of it: ``append``, or ``replace`` of its ranges or places (``mode`` of its entry). The
jobs differ in how they plan, and in what they do when a batch is in the table. A plan never calls the loop back: it
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
from spark_jobs.batches.ingestion import CONTINUES, Batch, BatchReport, Event, Ingestion, Observer, Step, Tail, Waiting
from spark_jobs.batches.run_control import BatchSizer, HeldSignals, IdleWait, Retries
from spark_jobs.batches.target_table import MAX_RACES, OutdatedError, Target, YieldRequests, YieldTo, lost_races
from spark_jobs.dead_letters.table import DEAD_LETTER_SCHEMA, NotCounting, Settlement, lost_ranges
from spark_jobs.decoding.ddl import quoted
from spark_jobs.ledger.delta_log import Commit
from spark_jobs.ledger.entries import MODES, LedgerEntry, PlannedFields
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.ledger.table_rows import PLACE, in_places, in_ranges
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
"""How long a run waits for messages that other members hold."""
_log = logging.getLogger(__name__)


class BatchJob(ABC):
    """Plans and finishes the batches of a table; :func:`batch_events` runs it.

    Args:
        spark: a session that can write Delta tables.
        ingestion: source, table and options.
        url: of the stream, for error messages.
        observer: called at each step, for progress bars and for tests that kill the process there.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
    """

    claims_while_planning = False
    """Whether a plan claims messages, so that a signal waits until they are written or released."""
    asks_others_to_yield = False
    """Whether other runs are asked to pause after a lost race, so that what was read may be written again."""
    wait_seconds = 1.0
    """How long to wait before asking again whether the job is drained."""

    def __init__(self, spark: SparkSession, ingestion: Ingestion, *, url: StreamUrl, observer: Observer) -> None:
        self.ingestion = ingestion
        self.telemetry = BatchTelemetry(ingestion, observer)
        self.target = Target.of(spark, ingestion, url=url, observer=self.telemetry)
        self.ledger = self.target.ledger
        self.retries = Retries(ingestion.retry_seconds)
        self.yields = YieldRequests(spark, ingestion, self.ledger)
        self.sizer = BatchSizer(ingestion.limits)
        self._races = 0
        self._settlement: Settlement | None = None
        # The version up to which RESTOREs are known to the settlement.
        self._settled_at = -1

    @abstractmethod
    def plan(self) -> Batch | YieldTo | None:
        """Steps 1 to 4: plan the next batch from the ledger as it is now; ``None`` if nothing is left.

        Raises:
            OutdatedError: the stream has changed meanwhile.
            StreamAssetsError: no batch can be planned.
        """

    def write(self, batch: Batch) -> WrittenBatch | None:
        """Steps 5 to 7: read and commit a batch; ``None`` if it is not in the table and has to be planned again.

        Raises:
            TransformError, SchemaMismatchError, WriteError: nothing of the batch is in the table.
            DataLossError: rows would be replaced whose messages the stream does not hold any more.
            LedgerUnreadableError: it is unknown whether it is in the table. Nothing was committed to the broker.
        """
        return write_batch(self, self.target, batch)

    def check_read(self) -> None:  # noqa: B027 - a job may read no stream
        """Refuse, after the read, a stream that is not the planned one any more.

        Raises:
            SourceRecreatedError: it was recreated.
        """

    def is_still_next(self, batch: Batch, state: LedgerState) -> bool:
        """Whether, after a lost race, the batch may be written as it was read; if not, it has to be planned again."""
        return False

    @abstractmethod
    def finish(self, written: WrittenBatch) -> Mapping[Shard, int]:
        """Step 8: commit a written batch to the broker, and count what is left per shard. It may be repeated."""

    def is_drained(self) -> bool:
        """Whether, after a plan that found nothing, other members hold nothing either."""
        return True

    def has_more(self) -> bool:
        """Whether there may be another batch, after a plan that found none. This is cheap, and needs no Spark.

        Raises:
            StreamAssetsError: the stream cannot be read.
        """
        return False

    def forget_stream(self) -> None:  # noqa: B027 - a job may know nothing of the stream
        """Forget what is known of the stream, because it has changed since the batch was planned."""

    def count_lost_race(self, reason: StreamAssetsError | None = None) -> None:
        """Count a batch that has to be planned again.

        Raises:
            StreamAssetsError: it happened too often in a row. It is the reason, or by default that others are faster.
        """
        self._races += 1
        if self._races >= MAX_RACES:
            raise reason or lost_races(self.ledger, self.ingestion)

    def report(self, written: WrittenBatch, lag: Mapping[Shard, int], seconds: float) -> BatchReport:
        """The report of a batch that is in the table and committed."""
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

    def settled(self, state: LedgerState, *, again: bool = False) -> LedgerState:
        """Delete the orphaned dead letters of batches that were dropped: the first time, after a RESTORE, or ``again``.

        A RESTORE may have removed batches that dead letters were counted with. Another writer of the group may have
        committed since, so that it is looked up from the version of the last look on.

        Returns:
            The state from which batches are planned: it says which dead letters count.
        """
        found = self._settlement
        if again or found is None or self.ledger.was_restored(after=self._settled_at, state=state):
            found = self._settlement = self.target.dead_letters.settle(self.target.spark, self.ledger, state)
        self._settled_at = state.version
        state = replace(state, dead_letters_version=found.version, uncounted=found.uncounted)
        return replace(state, replaces_considered=found.replaces_considered)

    def _planned(
        self,
        kind: str,
        state: LedgerState,
        plan: BatchPlan,
        *,
        identities: Mapping[str, str],
        bid: str = "",
        maybe_written: Mapping[Shard, Range] | None = None,
        letters: pa.Table | None = None,
        held: Any = None,
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
            letters=letters,
            held=held,
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
        """The fingerprints at the beginning."""
        return self._source.identities()

    def _plan_ranges(self, gaps: Mapping[Shard, Range]) -> BatchPlan | None:
        try:
            return self._source.plan(gaps, limits=self.sizer.limits, parallelism=self._parallelism)
        except DataLossError as error:
            raise OutdatedError(error) from error

    def check_read(self) -> None:
        """See :meth:`BatchJob.check_read`."""
        found = self._source.identities()
        if found != self._identities:
            raise SourceRecreatedError(
                f"{self._source.url} was recreated while it was read",
                remedy="Nothing was written. The next run says how to accept it, if it was recreated on purpose.",
                planned=dict(self._identities),
                found=dict(found),
            )


def batch_events(
    job: BatchJob, *, max_batches: int | None = None, idle_wait: IdleWait | None = None
) -> Iterator[Event]:
    """Plan, write, verify and commit batches until nothing is left.

    A transient failure is retried for ``retry_seconds``: a plan is made again, from the ledger, and so is a batch that
    could not be read or written. A signal that asks the process to end waits for the batch in hand, and for what the
    caller does with its report.

    Args:
        job: plans the batches.
        max_batches: stop after this number of them.
        idle_wait: how long to stay once everything is in the table.

    Yields:
        Each batch when it is in the table and committed; ``CONTINUES`` before another one is written, and while the
        job stays idle; and ``Waiting`` with the reason before it waits. A caller that takes no event after
        ``CONTINUES`` leaves that batch unwritten.

    Raises:
        StreamAssetsError: whatever stops the run; what was yielded before is in the table.
    """
    idle_wait = idle_wait or IdleWait()
    count, worked_at = 0, time.monotonic()
    while count != max_batches:
        held = HeldSignals()
        with ExitStack() as hand:
            if job.claims_while_planning:
                hand.enter_context(held)
            batch = yield from _next_batch(job, held)
            if batch is not None:
                yield CONTINUES
                if not job.claims_while_planning:
                    hand.enter_context(held)
                count += yield from written_events(job, batch, held)
                worked_at = time.monotonic()
                continue
        if (yield from job.retries.call(job.is_drained)):
            if not (yield from _idle(job, idle_wait)):
                return
            worked_at = time.monotonic()
        elif time.monotonic() - worked_at > STANDBY_SECONDS:
            _log.warning("%s leaves: others hold messages and did nothing for %g s", job.ledger.app, STANDBY_SECONDS)
            return
        else:
            time.sleep(job.wait_seconds)


def _next_batch(job: BatchJob, held: HeldSignals) -> Generator[Waiting, None, Batch | None]:
    """Steps 1 to 4: plan, again and again while the stream changes, another run goes first, or an outage lasts."""
    job.telemetry.planning()
    while True:
        try:
            with explained(job.ingestion.table):
                planned = job.plan()
        except OutdatedError as outdated:
            _plan_again(job, outdated)
        except StreamAssetsError as error:
            with held.nothing_in_hand():
                yield from job.retries.pause(error)
        else:
            if not isinstance(planned, YieldTo):
                return planned
            with held.nothing_in_hand():
                yield from job.yields.wait(planned)


def written_events(job: BatchJob, batch: Batch, held: HeldSignals) -> Generator[Event, None, bool]:
    """Steps 5 to 8 of a planned batch; return whether it is in the table. If not, it has to be planned again.

    Args:
        job: which planned it.
        batch: the plan.
        held: signals that wait until it is written.

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
        with held.nothing_in_hand():
            yield from job.retries.pause(error)
        return False
    if written is None:
        return False
    job.sizer.adapt(batch.plan.records, time.monotonic() - began)
    lag = yield from job.retries.call(partial(job.finish, written))
    try:
        yield job.report(written, lag, time.monotonic() - began)
    finally:
        # What the process logs from here on is not about the batch any more.
        about({})
    return True


def write_batch(job: BatchJob, target: Target, batch: Batch) -> WrittenBatch | None:
    """Steps 5 to 7: read a planned batch and commit it.

    1. A large batch that is expected to be clean is written while it is read. Executors check that it is clean, or
       nothing is committed. Then it is written like any other batch, under the same number, of which Delta takes one.
    2. The messages are read and counted, and the bad ones are found.
    3. Only after the read it is known that the stream is still the planned one.
    4. The dead letters are written, then the rows. The ledger shows whether they landed.
    5. After a lost race for its number a replay waits, or asks the other runs to pause
       (:meth:`spark_jobs.batches.target_table.YieldRequests.ask`). Then it commits what it has read under the next
       number.

    Args:
        job: which planned it.
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
            state = job.settled(job.ledger.read())
            if not job.is_still_next(batch, state):
                break
            batch = replace(batch, state=state, bid=uuid.uuid4().hex)
    return None


def _plan_again(job: BatchJob, outdated: OutdatedError) -> None:
    _log.warning("%s is planned again: %s", job.ledger.app, outdated.reason)
    job.forget_stream()
    job.count_lost_race(outdated.reason)


def _idle(job: BatchJob, idle_wait: IdleWait) -> Generator[Event, None, bool]:
    """Poll while the run stays; return whether there is something to plan."""
    for _ in idle_wait.polls():
        if (yield from job.retries.call(job.has_more)):
            return True
        # Nothing is left to do, so an outage is over.
        job.retries.reset()
        yield CONTINUES
    return False


def reports_of(events: Iterable[Event]) -> Iterator[BatchReport]:
    """The batches among the events; the others are logged."""
    for event in events:
        if isinstance(event, BatchReport):
            yield event
        elif isinstance(event, Waiting):
            _log.warning("waiting: %s", event.why)
        elif isinstance(event, Tail):
            _log.warning("%s", event.what)


def drain_batches(
    job: BatchJob, *, max_batches: int | None = None, idle_wait: IdleWait | None = None
) -> Iterator[BatchReport]:
    """The batches of :func:`batch_events`."""
    return reports_of(batch_events(job, max_batches=max_batches, idle_wait=idle_wait))


def parallelism(spark: SparkSession) -> int:
    """How many splits to read at the same time."""
    try:
        return max(1, spark.sparkContext.defaultParallelism)
    except PySparkException:
        # A Connect session does not say, unless the server is ours; others may have more or fewer cores.
        return int(spark.conf.get(CORES, "8") or 8)


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """A batch that is in the table.

    Args:
        batch: as it was written: after another try it has another batch id than it was planned with.
        entry: what its commit says.
        commit: the commit.
        messages: messages decoded, per shard.
    """

    batch: Batch
    entry: LedgerEntry
    commit: Commit
    messages: Mapping[Shard, int]


@dataclass(frozen=True, slots=True)
class NotClean:
    """Why a batch could not be written while it was read: a message or a row is bad.

    Args:
        is_unexplained: the reason is unknown, so that a message may have crashed a Python worker.
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
    """The messages of each shard, if the batch can be written while it is read; ``None`` if it has to be counted first.

    One pass needs more messages than the driver reads, splits that know what a clean read gives, an append, and rows
    that take a read of every split to its end. It is not tried after a batch that was not clean, because most of what
    is wrong comes again.
    """
    is_append = batch.kind == "batch" and not MODES[batch.fields.get("mode", "append")].replaces
    has_more = batch.maybe_written or batch.fields.get("claims") or batch.fields.get("lost")
    reads_all = ingestion.transform is None or ingestion.is_row_wise
    is_large = batch.plan.records > ingestion.driver_records
    if not is_large or not is_append or has_more or not reads_all or not batch.plan.splits:
        return None
    counts = expected_counts(batch.plan.splits)
    if counts is None:
        return None
    planned = sum(widths(batch.plan.ranges).values())
    return counts if _was_clean(batch.state.newest, is_dense=sum(counts.values()) == planned) else None


def _was_clean(entry: LedgerEntry | None, *, is_dense: bool) -> bool:
    """Whether a batch held no dead letter, and where sequences grow by one, a message for each of them."""
    if entry is None or entry.kind != "batch":
        return True
    return not entry.dead and not (is_dense and entry.messages < sum(widths(entry.ranges).values()))


def commit_in_one_pass(target: Target, batch: Batch, counts: Mapping[Shard, int]) -> WrittenBatch | NotClean | None:
    """Write the batch while it is read. Executors check that it is what was planned, or nothing is committed.

    Args:
        target: the table.
        batch: the plan.
        counts: the messages of each shard, if it is clean.

    Returns:
        ``None`` if another run was faster.

    Raises:
        OutdatedError: the stream lost messages of the batch; nothing was written.
        StreamAssetsError: see :func:`commit_batch`.
    """
    source = target.columns.source_of_batch
    frame = read_splits(target.spark, batch.plan.splits, source, identities=batch.identities)
    # What fails here does not depend on a message, so it would fail with any other way of writing, too.
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
        # If the messages can be read, the same error shows once more.
        _log.info("batch %d of %s is read and counted first: %s", batch.number, target.ledger.app, error)
        return NotClean(isinstance(error, UnexplainedError))


def read_batch(target: Target, batch: Batch, cached: Cached, *, is_isolated: bool = False) -> FilteredBatch:
    """Read the messages, count them, and split them into rows and dead letters.

    They are read again, for one of three reasons, where a read shows what had to be known before it: a message crashes
    the decoder, so that executors have to decode in isolation; undeclared fields become columns; or the transform
    rejects rows for the first time, whose payloads were not kept.

    Args:
        target: the table.
        batch: the plan.
        cached: keeps what is read until the batch is written.
        is_isolated: executors decode in processes of their own.

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
        judged = target.filter.judge(found.frame, cached, has_payloads=keeps_payloads)
        if judged is None:
            keeps_payloads = True
            continue
        if judged.frame is not found.frame:
            found = _counted(target, judged.frame)
        return FilteredBatch(judged.frame, judged.rows, found.messages, found.dead)


def _read(target: Target, batch: Batch, cached: Cached, *, keeps_payloads: bool, is_isolated: bool) -> _Read:
    source, splits, what = target.columns.source_of_batch, batch.plan.splits, str(target.url)
    if batch.plan.records <= target.ingestion.driver_records and not (batch.maybe_written or is_isolated):
        try:
            small = read_on_driver(splits, source, keeps_payloads=keeps_payloads)
        except (DataLossError, BatchTooLargeError) as error:
            raise OutdatedError(error) from error
        except StreamAssetsError:
            raise
        except Exception as error:  # noqa: BLE001 - a decoder of the user's may raise anything
            raise explain_read(f"{type(error).__name__}: {error}", what=what) from None
        if small is not None:
            return _Read(small.frame(target.spark, source), small.messages, small.dead)
    try:
        frame = read_splits(target.spark, splits, source, keeps_payloads=keeps_payloads, is_isolated=is_isolated)
        frame = cached.keep(_without_written(target, frame, batch.maybe_written))
    except Exception as error:  # noqa: BLE001 - Spark raises what comes, once it has ended
        raise explain_failed_read(error, what=what) from None
    return _counted(target, frame)


def _without_written(target: Target, frame: DataFrame, maybe_written: Mapping[Shard, Range]) -> DataFrame:
    """Without what is in the table, or in the dead letters that count, within ``maybe_written``."""
    if not maybe_written:
        return frame
    condition = in_ranges(maybe_written)
    found = read_table(target.spark, target.ledger.log).where(condition).select(*PLACE)
    dead_letters = target.dead_letters.counted(target.spark, target.ledger)
    if dead_letters is not None:
        found = found.unionByName(dead_letters.where(condition).select(*PLACE))
    return frame.join(found, [*PLACE], "left_anti").select(*map(quoted, frame.columns))


def _counted(target: Target, frame: DataFrame) -> _Read:
    """Read the source into the cache, and count."""
    is_dead = f.col("_error").isNotNull().cast("bigint")
    counts = frame.groupBy("_stream", "_shard").agg(f.count("*").alias("all"), f.sum(is_dead).alias("dead"))
    try:
        found = counts.collect()
    except Exception as error:  # noqa: BLE001 - Spark raises what comes
        explained = explain_failed_read(error, what=str(target.url))
        if isinstance(explained, (DataLossError, BatchTooLargeError)):
            raise OutdatedError(explained) from None
        raise explained from None
    messages = {Shard(row["_stream"], row["_shard"]): int(row["all"] - row["dead"]) for row in found}
    return _Read(frame, messages, sum(int(row["dead"]) for row in found))


def refused_messages(target: Target, plan: BatchPlan) -> Mapping[tuple[Shard, int], str]:
    """The messages that would become dead letters although they can be decoded, and why; nothing is written.

    They are decoded in isolation: they are dead letters, and one may have crashed a process before.

    Args:
        target: the table.
        plan: of dead letters; each message can be decoded, without the new fields that it may have.

    Raises:
        TransformError: the transform raised, or fails for some of them.
    """
    with caching() as cached:
        filtered = read_batch(target, Batch("replay", target.ledger.read(), plan), cached, is_isolated=True)
        if not filtered.dead:
            return {}
        bad = filtered.frame.where(f.col("_error").isNotNull()).select(*PLACE, "_error").collect()
        return {(Shard(row["_stream"], row["_shard"]), row["_sequence"]): row["_error"] for row in bad}


def commit_batch(target: Target, batch: Batch, filtered: FilteredBatch) -> WrittenBatch | None:
    """Steps 5 to 7: write the dead letters, then the rows; ``None`` if another run was faster.

    The entry of the batch is made here, because only now it is known what the batch holds.

    Args:
        target: the table.
        batch: the plan.
        filtered: what was read of it.

    Raises:
        DataLossError: rows or dead letters would be replaced whose messages the stream does not hold any more.
        SchemaMismatchError, TransformError, WriteError: nothing of the batch is in the table.
        LedgerUnreadableError: it is unknown whether it is in the table. Nothing may be committed to the broker.
    """
    entry = target.entry(batch, messages=sum(filtered.messages.values()), dead=filtered.dead)
    rows, kept = filtered.rows, None
    if entry.write_mode.replaces:
        rows = _with_last_copies(target, rows, filtered.frame, entry)
    if entry.write_mode.uncounts_dead_letters and not entry.places:
        # A redrive reads the dead letters themselves.
        kept, count = _last_dead_letters(target, filtered.frame, entry)
        entry = replace(entry, dead=entry.dead + count)
    if entry.dead or entry.lost:
        letters = filtered.frame.where(f.col("_error").isNotNull()).select(*STREAM_COLUMNS, *DEAD_LETTER_COLUMNS)
        letters = letters.unionByName(lost_ranges(target.spark, entry)) if entry.lost else letters
        if not target.dead_letters.write(letters, kept, ledger=target.ledger, number=entry.number, bid=entry.bid):
            return None
    return commit_recorded(target, batch, entry, rows, filtered.messages)


def commit_recorded(
    target: Target, batch: Batch, entry: LedgerEntry, rows: DataFrame, messages: Mapping[Shard, int]
) -> WrittenBatch | None:
    """Write the corrections or dismissals of the batch, then the rows; ``None`` if another run was faster."""
    if batch.letters is not None:
        schema = from_arrow_schema(pa.schema([DEAD_LETTER_SCHEMA.field(name) for name in batch.letters.column_names]))
        frame = target.spark.createDataFrame(batch.letters, schema)
        if not target.dead_letters.append(frame, ledger=target.ledger, number=entry.number, bid=entry.bid):
            return None
    target.observer(Step.DEAD_LETTERS_WRITTEN, batch)
    return _commit_rows(target, batch, entry, rows, messages)


def _commit_rows(
    target: Target, batch: Batch, entry: LedgerEntry, rows: DataFrame, messages: Mapping[Shard, int]
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
        if target.columns.is_of_now(target.ledger.read()):
            raise
        _log.info("the columns of %s have changed meanwhile; planning again", target.ingestion.table)
        return None
    if commit is None:
        _log.info("batch %d of %s was written by another run; planning again", entry.number, entry.app)
        return None
    target.observer(Step.VERIFIED, batch)
    return WrittenBatch(batch, entry, commit, messages)


def _with_last_copies(target: Target, rows: DataFrame, frame: DataFrame, entry: LedgerEntry) -> DataFrame:
    """Together with the rows of the range whose messages cannot be read again: they are the last copies.

    Raises:
        DataLossError: there are some, and it was not said that they are to be kept.
    """
    log = target.ledger.log
    table = read_table(target.spark, log)
    last, count = _unread(target, table, frame, entry, what="rows")
    if not count:
        return rows
    snapshot = log.snapshot()
    computed = (snapshot.computed_columns if snapshot else frozenset()) - set(rows.columns)
    return rows.unionByName(last.select(*map(quoted, table.columns)).drop(*computed), allowMissingColumns=True)


def _last_dead_letters(target: Target, frame: DataFrame, entry: LedgerEntry) -> tuple[DataFrame | None, int]:
    """Likewise the dead letters that count, and how many; the batch that replaces their range writes them again."""
    table, ledger, where = target.dead_letters, target.ledger, in_places(entry.affected)
    # Most ranges have none, which is known without a job of Spark.
    if not any(len(part) for part in table.scan(ledger.group, NotCounting(), PLACE, where=where)):
        return None, 0
    letters = table.counted(target.spark, ledger)
    assert letters is not None
    last, count = _unread(target, letters, frame, entry, what="dead letters")
    return (last if count else None), count


def _unread(
    target: Target, held: DataFrame, frame: DataFrame, entry: LedgerEntry, *, what: str
) -> tuple[DataFrame, int]:
    """Those in the range of a batch whose messages are not in ``frame``, which was read of it, and how many.

    Raises:
        DataLossError: there are some, and it was not said that they are to be kept.
    """
    ingestion = target.ingestion
    last = held.where(in_places(entry.affected)).join(frame.select(*PLACE), [*PLACE], "left_anti")
    found = last.agg(f.count("*").alias("rows"), f.min("_sequence").alias("first"), f.max("_sequence").alias("last"))
    counts = found.collect()[0]
    if not counts["rows"]:
        return last, 0
    error = DataLossError(
        f"{counts['rows']} {what} of {ingestion.table} between sequences {counts['first']} and "
        f"{counts['last']} would be replaced, but {target.url} does not hold their messages any more",
        remedy="They are the last copy, so they are not touched. Replay only what the stream holds, or set "
        "on_data_loss='record': then they stay as they are, and the others are replaced.",
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
        """A step is done."""
        seconds = time.monotonic() - self._since
        if batch is not None:
            fields = {"batch": batch.bid, "batch_number": batch.number, "batch_kind": batch.kind}
            about({**fields, "group": self._ingestion.group, "table": self._ingestion.table})
            self._recorders.step(self._labels(batch.kind), step.value, seconds)
        self._observer(step, batch)
        self._since = time.monotonic()

    def planning(self) -> None:
        """Another batch is looked for: what is logged now is about none."""
        about({})
        self._since = time.monotonic()

    def reported(self, report: BatchReport) -> None:
        """A batch is in the table and committed."""
        entry = report.entry
        messages = sum(report.messages.values())
        lag: dict[str, int] = {}
        for shard, count in report.lag.items():
            lag[shard.stream] = lag.get(shard.stream, 0) + count
        # What a replay has left is not what the group is behind.
        behind = lag if entry.kind == "batch" else {}
        numbers = BatchNumbers(messages, report.rows, report.bytes, report.dead, report.seconds, behind)
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
