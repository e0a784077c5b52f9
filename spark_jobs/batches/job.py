"""The way of a batch, which ingestion, replays, redrives, claims and dismissals share.

:func:`batch_events` is the protocol of :mod:`spark_jobs.batches`, top to bottom:

    1 to 4  plan      a frozen :class:`Batch`, made from one snapshot of the ledger
    5 to 7  write     :func:`write_batch`: read, split into rows and dead letters, write both, verify
    8       finish    commit to the broker
            yield     the batch, which is in the table; and before it, and between tries, why the run goes on or waits

How a batch is written is a value of it: ``append``, or ``replace`` of its ranges or places (``mode`` of its entry).
What the jobs differ in is how they plan, and what they do when a batch is in the table.
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
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_jobs.batches.bad_rows import caching
from spark_jobs.batches.ingestion import CONTINUES, Batch, BatchReport, Event, Ingestion, Observer, Step, Tail, Waiting
from spark_jobs.batches.interruption import HeldSignals
from spark_jobs.batches.linger import Linger
from spark_jobs.batches.pace import Pace
from spark_jobs.batches.retries import Retries
from spark_jobs.batches.telemetry import BatchTelemetry
from spark_jobs.batches.turns import TurnRequestedError, Turns
from spark_jobs.batches.writer import (
    MAX_RACES,
    OutdatedError,
    Target,
    Written,
    lost_races,
    one_pass_counts,
    read,
    write,
    write_in_one_pass,
)
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.spark_server.configuration import CORES
from spark_jobs.structured_logs import about
from spark_jobs.writing.dead_letters import Settlement
from spark_jobs.writing.failures import explained
from stream_consumers.batches import BatchPlan, BatchSource, Range
from stream_consumers.errors import DataLossError, SourceRecreatedError, StreamAssetsError
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

STANDBY_SECONDS = 600.0
"""How long a run waits for what other members hold."""
_log = logging.getLogger(__name__)


class BatchJob(ABC):
    """What is written into a table, batch by batch: :func:`batch_events` runs it.

    Args:
        spark: a session that can write Delta tables.
        ingestion: what goes where.
        url: of the stream, for messages.
        observer: called at each step, for progress bars and for tests that kill the process there.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
    """

    claims_while_planning = False
    """Whether a plan takes hold of messages, so that a signal waits until they are written or released."""
    asks_for_turn = False
    """Whether other runs are asked to wait after a lost race, so that what was read may be written again."""
    wait_seconds = 1.0
    """How long to wait before asking again whether the job is drained."""

    def __init__(self, spark: SparkSession, ingestion: Ingestion, *, url: StreamUrl, observer: Observer) -> None:
        self.ingestion = ingestion
        self.telemetry = BatchTelemetry(ingestion, observer)
        self.target = Target.of(spark, ingestion, url=url, observer=self.telemetry)
        self.ledger = self.target.ledger
        self.retries = Retries(ingestion.retry_seconds)
        self.turns = Turns(spark, ingestion, self.ledger)
        self.pace = Pace(ingestion.limits)
        self._races = 0
        self._settlement: Settlement | None = None
        # The version up to which RESTOREs are known to the settlement.
        self._settled_at = -1

    @abstractmethod
    def plan(self) -> Batch | None:
        """Steps 1 to 4, from the ledger as it is now: the next batch; ``None`` if there is none.

        Raises:
            TurnRequestedError: another run has to go first.
            OutdatedError: the stream has changed meanwhile.
            StreamAssetsError: no batch can be planned.
        """

    def write(self, batch: Batch) -> Written | None:
        """Steps 5 to 7; ``None`` if the batch is not in the table and has to be planned again.

        Raises:
            TransformError, SchemaMismatchError, WriteError: nothing of the batch is in the table.
            DataLossError: rows would be replaced whose messages the stream does not hold any more.
            LedgerUnreadableError: whether it is cannot be found out; nothing was committed to the broker.
        """
        return write_batch(self, self.target, batch)

    def check_read(self) -> None:  # noqa: B027 - a job may read no stream
        """After the read: refuse a stream that is another one than was planned.

        Raises:
            SourceRecreatedError: it is.
        """

    def is_still_next(self, batch: Batch, state: LedgerState) -> bool:
        """After a lost race: whether the batch may be written as it was read; if not, it has to be planned anew."""
        return False

    @abstractmethod
    def finish(self, written: Written) -> Mapping[Shard, int]:
        """Step 8, for a batch that is in the table; the messages that are left, per shard. It may be repeated."""

    def is_drained(self) -> bool:
        """After a plan that found nothing: whether nothing is left that others hold."""
        return True

    def has_more(self) -> bool:
        """Whether there may be another batch, after a plan that found none: a cheap look, without Spark.

        Raises:
            StreamAssetsError: the stream cannot be looked at.
        """
        return False

    def look_again(self) -> None:  # noqa: B027 - a job may know nothing of the stream
        """The stream is not what it was when the batch was planned: the next plan looks at it anew."""

    def lose_race(self, reason: StreamAssetsError | None = None) -> None:
        """A batch has to be planned again.

        Raises:
            StreamAssetsError: it was so too often in a row: the reason, or by default that others are faster.
        """
        self._races += 1
        if self._races >= MAX_RACES:
            raise reason or lost_races(self.ledger, self.ingestion)

    def report(self, written: Written, lag: Mapping[Shard, int], seconds: float) -> BatchReport:
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
        committed since, so that ``state.is_restored`` is not enough.

        Returns:
            The state from which batches are planned: it says which dead letters count.
        """
        found = self._settlement
        if again or found is None or self.ledger.was_restored(after=self._settled_at, state=state):
            found = self._settlement = self.target.dead_letters.settle(self.target.spark, self.ledger, state)
        self._settled_at = state.version
        return replace(state, settled=found.version, uncounted=found.uncounted, judged=found.judged)

    def _planned(
        self,
        kind: str,
        state: LedgerState,
        plan: BatchPlan,
        *,
        identities: Mapping[str, str],
        bid: str = "",
        doubtful: Mapping[Shard, Range] | None = None,
        letters: pa.Table | None = None,
        held: Any = None,
        **fields: Any,
    ) -> Batch:
        batch = Batch(
            kind,
            state,
            plan,
            bid or uuid.uuid4().hex,
            fields,
            identities=identities,
            doubtful=doubtful or {},
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
            return self._source.plan(gaps, limits=self.pace.limits, parallelism=self._parallelism)
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


def batch_events(job: BatchJob, *, max_batches: int | None = None, linger: Linger | None = None) -> Iterator[Event]:
    """Plan, write, verify and commit batches until there is nothing left.

    What fails for a reason that may be gone soon is tried again for ``retry_seconds``: a plan is made anew, from the
    ledger, and so is a batch that could not be read or written. A signal that asks the process to end waits for the
    batch in hand, and for what is done with its report.

    Args:
        job: plans the batches.
        max_batches: stop after this number of them.
        linger: how long to stay when everything is in the table.

    Yields:
        Each batch when it is in the table and committed; ``CONTINUES`` before another one is written, and while the
        job stays idle; and why it waits. A caller that takes no event after ``CONTINUES`` leaves that batch unwritten.

    Raises:
        StreamAssetsError: whatever stops it; what was yielded before is in the table.
    """
    linger = linger or Linger()
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
            if not (yield from _idle(job, linger)):
                return
            worked_at = time.monotonic()
        elif time.monotonic() - worked_at > STANDBY_SECONDS:
            _log.warning("%s leaves: others hold messages and did nothing for %g s", job.ledger.app, STANDBY_SECONDS)
            return
        else:
            time.sleep(job.wait_seconds)


def _next_batch(job: BatchJob, held: HeldSignals) -> Generator[Waiting, None, Batch | None]:
    """Steps 1 to 4, until a plan can be made."""
    job.telemetry.planning()
    while True:
        try:
            with explained(job.ingestion.table):
                return job.plan()
        except TurnRequestedError as asked:
            with held.nothing_in_hand():
                yield from job.turns.wait(asked.version)
        except OutdatedError as outdated:
            _look_again(job, outdated)
        except StreamAssetsError as error:
            with held.nothing_in_hand():
                yield from job.retries.pause(error)


def written_events(job: BatchJob, batch: Batch, held: HeldSignals) -> Generator[Event, None, bool]:
    """Steps 5 to 8 of a planned batch: whether it is in the table; if not, it has to be planned again.

    Args:
        job: which planned it.
        batch: planned.
        held: signals that wait until it is written.

    Raises:
        StreamAssetsError: see :meth:`BatchJob.write`.
    """
    began = time.monotonic()
    try:
        with explained(job.ingestion.table):
            written = job.write(batch)
    except OutdatedError as outdated:
        _look_again(job, outdated)
        return False
    except StreamAssetsError as error:
        with held.nothing_in_hand():
            yield from job.retries.pause(error)
        return False
    if written is None:
        return False
    job.pace.took(batch.plan.records, time.monotonic() - began)
    lag = yield from job.retries.call(partial(job.finish, written))
    try:
        yield job.report(written, lag, time.monotonic() - began)
    finally:
        # What the process logs from here on is not about the batch any more.
        about({})
    return True


def write_batch(job: BatchJob, target: Target, batch: Batch) -> Written | None:
    """Read a planned batch, and write it: steps 5 to 7.

    1. A large batch that is expected to be clean is written while it is read. Executors check that it is clean, or
       nothing is committed; then it is tried as any other batch, under the same number, of which Delta takes one.
    2. The messages are read and counted; those that are bad are found.
    3. Only now it is known that the stream is still the one that was planned.
    4. The dead letters are written, then the rows; the ledger says whether they landed.
    5. After a lost race for its number a replay waits, or asks the other runs to wait, with a commit of its own
       (:meth:`spark_jobs.batches.turns.Turns.ask`); then it tries what it has read under the next one.

    Args:
        job: which planned it.
        target: the table, by the transaction sequence of the batch.
        batch: planned.

    Returns:
        ``None`` if another run was faster: plan again.

    Raises:
        StreamAssetsError: see :meth:`BatchJob.write`.
    """
    target.columns.look_up()
    is_isolated = False
    if (counts := one_pass_counts(batch, target.ingestion)) is not None:
        written = write_in_one_pass(target, batch, counts)
        if isinstance(written, Written):
            return written
        if written is None:
            job.lose_race()
            return None
        target.observer(Step.UNCLEAN, batch)
        batch, is_isolated = replace(batch, bid=uuid.uuid4().hex), written.is_unexplained
    with caching() as cached:
        filtered = read(target, batch, cached, is_isolated=is_isolated)
        job.check_read()
        target.observer(Step.READ, batch)
        while True:
            if (found := write(target, batch, filtered)) is not None:
                return found
            job.lose_race()
            if not job.asks_for_turn:
                break
            job.turns.ask()
            state = job.settled(job.ledger.read())
            if not job.is_still_next(batch, state):
                break
            batch = replace(batch, state=state, bid=uuid.uuid4().hex)
    return None


def _look_again(job: BatchJob, outdated: OutdatedError) -> None:
    _log.warning("%s is planned again: %s", job.ledger.app, outdated.reason)
    job.look_again()
    job.lose_race(outdated.reason)


def _idle(job: BatchJob, linger: Linger) -> Generator[Event, None, bool]:
    """Look for more while the run stays: whether there is something."""
    for _ in linger.looks():
        if (yield from job.retries.call(job.has_more)):
            return True
        # Nothing is left to do, so that nothing can be wrong with it.
        job.retries.reset()
        yield CONTINUES
    return False


def reports_of(events: Iterable[Event]) -> Iterator[BatchReport]:
    """The batches among the events; what else is to be known is logged."""
    for event in events:
        if isinstance(event, BatchReport):
            yield event
        elif isinstance(event, Waiting):
            _log.warning("waiting: %s", event.why)
        elif isinstance(event, Tail):
            _log.warning("%s", event.what)


def drain_batches(
    job: BatchJob, *, max_batches: int | None = None, linger: Linger | None = None
) -> Iterator[BatchReport]:
    """The batches of :func:`batch_events`."""
    return reports_of(batch_events(job, max_batches=max_batches, linger=linger))


def parallelism(spark: SparkSession) -> int:
    """How many splits to read at the same time."""
    try:
        return max(1, spark.sparkContext.defaultParallelism)
    except PySparkException:
        # A Connect session does not say, unless the server is ours; others may have more or fewer cores.
        return int(spark.conf.get(CORES, "8") or 8)
