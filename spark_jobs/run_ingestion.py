"""A run: drains a source into a table, with one member for all shards or as one of several, and stays if it is to."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from pyspark.sql import SparkSession

from spark_jobs.batches.accept import accept
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingest import LOOK_SECONDS, IngestJob
from spark_jobs.batches.ingestion import BatchReport, Ingestion, Observer, ignore_steps
from spark_jobs.batches.interruption import HeldSignals
from spark_jobs.batches.job import drain_batches, handed_over
from spark_jobs.batches.linger import Linger
from spark_jobs.batches.retries import Retries
from spark_jobs.claims.job import ClaimJob
from stream_consumers.batches import BatchSource, Membership
from stream_consumers.create import StreamSource
from stream_consumers.epochs import EpochNames, named
from stream_consumers.errors import (
    BrokerUnavailableError,
    InvalidOptionError,
    SourceTruncatedError,
    StreamAssetsError,
    UnsupportedError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode, DataLoss

JOIN_SECONDS = 60.0
PARALLEL_SHARDS = 4
STANDBY_SECONDS = 600.0
_TICK_SECONDS = 0.1
_log = logging.getLogger(__name__)


def drain(
    spark: SparkSession,
    source: StreamSource,
    ingestion: Ingestion,
    *,
    observer: Observer = ignore_steps,
    max_batches: int | None = None,
    on_tail: Callable[[str], None] = _log.warning,
    origin: Bound | None = None,
    stop: Bound | None = None,
    linger_seconds: float = 0.0,
    on_next: Callable[[], object] = lambda: None,
    on_wait: Callable[[str], object] = _log.warning,
) -> Iterator[BatchReport]:
    """Micro-batches up to the end that the source had at the beginning, and what comes while the run stays.

    SIGINT and SIGTERM let the batch in hand be finished, see :class:`spark_jobs.batches.interruption.HeldSignals`.

    Args:
        spark: a session that can write Delta tables.
        source: the stream.
        ingestion: what goes where.
        observer: told of each step.
        max_batches: stop after so many.
        on_tail: told what is wrong behind the last message, if anything is.
        origin: where a group without a position starts, if not where ``ingestion`` says.
        stop: go no further than this.
        linger_seconds: how long the run has, from now on: until then it looks for new messages when it has written all
            that there were. 0 for a run that ends then.
        on_next: called before another batch is written, and from time to time while the run stays without any: what
            was yielded so far is not the last.
        on_wait: told what is tried again, how long it was tried, and when the next try is.

    Yields:
        Each batch when it is in the table and committed.

    Raises:
        InvalidOptionError: arguments that do not go together.
        StreamAssetsError: whatever stops it; what was yielded before is safe.
    """
    linger = Linger(linger_seconds)
    if stop and linger_seconds:
        raise InvalidOptionError(
            f"a run with a stop ends there, but linger_seconds={linger_seconds:g} lets it stay",
            remedy="Leave one of them out.",
        )
    if source.mode is not ingestion.sharing:
        raise InvalidOptionError(
            f"the source is {source.mode.value}, but the ingestion {ingestion.sharing.value}",
            remedy="Give both the same mode.",
        )
    if not source.is_claimed and ingestion.member != "main":
        raise InvalidOptionError(
            f"mode {source.mode.value} of {source.url.protocol} has no members by name: member={ingestion.member!r}",
            remedy="Leave the member out: a second transaction sequence would write everything a second time.",
        )
    if source.is_claimed and (origin or stop):
        raise UnsupportedError(
            f"group {ingestion.group!r} claims entries one by one, in no order, so that it has no start and no stop",
            remedy="Leave them out, or use mode 'resumable'.",
        )
    retries = Retries(ingestion.retry_seconds, on_wait=on_wait)
    if source.is_claimed:
        names = ingestion.epochs(source.url.required_streams())
        with retries.call(lambda: source.claims(ingestion.group, names)) as claims:
            own = replace(ingestion, claims=True)
            member = ClaimJob(spark, claims, own, observer=observer, on_wait=on_wait)
            yield from _claimed_reports(member, ingestion, max_batches, linger, on_next)
        return
    if source.mode is ConsumerMode.LOAD_BALANCED:
        job_of = partial(IngestJob, spark, observer=observer, origin=origin, stop=stop, linger=linger)
        # A membership does not outlive every outage: after one the member joins anew, with jobs that do not wait.
        own = replace(ingestion, retry_seconds=0.0)

        def go_on() -> None:
            # Whoever is told that the run goes on knows that nothing is wrong.
            retries.reset()
            on_next()

        def shared(count: int) -> Iterator[BatchReport]:
            left = None if max_batches is None else max_batches - count
            with source.join(ingestion.group) as membership:
                yield from SharedDrain(
                    source,
                    own,
                    membership,
                    job_of,
                    max_batches=left,
                    stop=stop,
                    linger=linger,
                    on_next=go_on,
                    give_up=spark.interruptAll,
                ).reports()

        yield from _over_truncations(
            spark, source, ingestion, lambda count: retries.iterate(lambda more: shared(count + more))
        )
        return

    def alone(count: int) -> Iterator[BatchReport]:
        left = None if max_batches is None else max_batches - count
        with source.open() as opened:
            job = IngestJob(
                spark, opened, ingestion, observer=observer, origin=origin, stop=stop, linger=linger, on_wait=on_wait
            )
            yield from drain_batches(job, max_batches=left, linger=linger, on_next=on_next)
            tail = opened.unreadable_tail()
            if tail:
                on_tail(tail)

    yield from _over_truncations(spark, source, ingestion, alone)


def _over_truncations(
    spark: SparkSession, source: StreamSource, ingestion: Ingestion, drained: Callable[[int], Iterator[BatchReport]]
) -> Iterator[BatchReport]:
    """What ``drained`` yields; where the stream lost messages, and that is to be recorded, it goes on in a new epoch.

    Args:
        spark: a session that can write Delta tables.
        source: the stream.
        ingestion: what goes where.
        drained: makes the batches of a run that has had this many.

    Raises:
        SourceTruncatedError: the stream lost messages, and that is not to be recorded.
    """
    count = 0
    while True:
        try:
            for report in drained(count):
                count += 1
                yield report
            return
        except SourceTruncatedError as error:
            if ingestion.on_data_loss is DataLoss.ERROR:
                raise
            _log.warning("%s", error)
            with source.open() as opened:
                accepted = accept(spark, opened, ingestion, is_cut=True)
            for one in accepted:
                _log.warning(
                    "%s goes on as %s from %s; %s stays as it is up to %s",
                    source.url,
                    one.name,
                    ", ".join(f"{shard}: {start}" for shard, start in sorted(one.origin.items())),
                    one.before,
                    ", ".join(f"{shard}: {end}" for shard, end in sorted(one.ended.items())),
                )


def _claimed_reports(
    job: ClaimJob, ingestion: Ingestion, max_batches: int | None, linger: Linger, on_next: Callable[[], object]
) -> Iterator[BatchReport]:
    """Until the group is done with what was there at the beginning: a member stays, to take over from one that dies."""
    count, since = 0, time.monotonic()
    while count != max_batches:
        # What a plan claims is to be written, or released.
        with HeldSignals():
            batch = job.plan()
            if batch is not None:
                on_next()
                report, since = job.run(batch), time.monotonic()
                if report is not None:
                    count += 1
                    yield from handed_over(report)
                continue
        if job.is_drained():
            if not linger.until(job.has_more, on_idle=on_next):
                return
            since = time.monotonic()
            continue
        if time.monotonic() - since > STANDBY_SECONDS:
            _log.warning(
                "other members of group %s hold entries and did not acknowledge them for %g s; this one leaves",
                ingestion.group,
                STANDBY_SECONDS,
            )
            return
        time.sleep(job.wait_seconds)


class Ends:
    """The ends that a group is to reach; while members stay, they are captured anew when the stream has grown.

    Args:
        source: the stream, by the names of its epochs.
        stop: go no further than this.
    """

    def __init__(self, source: BatchSource, stop: Bound | None) -> None:
        self._source = source
        self._stop = stop
        self._capture()

    def have_grown(self) -> bool:
        """Whether the stream goes further; then these are its ends from now on."""
        before = self.shards
        if time.monotonic() < self._look_at and not self._source.has_grown(self._extents):
            return False
        self._capture()
        return self.shards != before

    def _capture(self) -> None:
        self._extents = self._source.extents()
        stops = self._stop.resolve(self._source, self._extents) if self._stop else {}
        self.shards = {shard: min(extent.end, stops.get(shard, extent.end)) for shard, extent in self._extents.items()}
        self._look_at = time.monotonic() + LOOK_SECONDS


class SharedDrain:
    """One member of a group that drains the shards it is given, several at a time, each in its own sequence.

    Nothing is fenced and nothing is owned: a member that wakes up late races with the new owner for the next
    transaction number of the shard, and Delta picks one.

    Args:
        source: the stream.
        ingestion: what goes where.
        membership: says which shards are ours; the caller closes it.
        job_of: makes the job of one shard; its observer is told of each step of each batch, from several threads.
        max_batches: stop after so many, of all shards together.
        stop: go no further than this.
        linger: how long to stay when the group has reached the end.
        on_next: called when it is known that what was yielded is not the last.
        give_up: called when batches that are being written are waited for no longer.
        parallel_shards: how many batches are written at the same time.
    """

    def __init__(
        self,
        source: StreamSource,
        ingestion: Ingestion,
        membership: Membership,
        job_of: Callable[[BatchSource, Ingestion], IngestJob],
        *,
        max_batches: int | None = None,
        stop: Bound | None = None,
        linger: Linger | None = None,
        on_next: Callable[[], object] = lambda: None,
        give_up: Callable[[], object] = lambda: None,
        parallel_shards: int = PARALLEL_SHARDS,
    ) -> None:
        self._source = source
        self._ingestion = ingestion
        self._membership = membership
        self._ledger = ingestion.ledger()
        self._names = EpochNames(ingestion.epochs(source.url.required_streams()))
        self._job_of = job_of
        self._stop_at = stop
        self._linger = linger or Linger()
        self._on_next = on_next
        self._give_up = give_up
        self._jobs: dict[Shard, IngestJob] = {}
        self._left = max_batches
        self._parallel = parallel_shards
        self._done: set[Shard] = set()
        self._seen: Mapping[Shard, int] = {}
        self._moved_at = time.monotonic()
        self._look_at = 0.0
        self._found: queue.SimpleQueue[BatchReport] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def reports(self) -> Iterator[BatchReport]:
        """The batches, as they get written, until every shard of ours is drained.

        Raises:
            BrokerUnavailableError: the group did not answer.
            StreamAssetsError: the first error of a shard; the others finish their batch.
        """
        if not self._membership.wait(JOIN_SECONDS):
            raise BrokerUnavailableError(
                f"group {self._ingestion.group!r} assigned nothing within {JOIN_SECONDS:g} s",
                remedy="Check the brokers and the group's other members; nothing was lost, run again.",
            )
        running: dict[Future[bool], Shard] = {}
        pool = ThreadPoolExecutor(self._parallel, thread_name_prefix="shard")
        with ExitStack() as self._opened, HeldSignals() as held:
            try:
                ends = Ends(named(self._open(), self._names.names), self._stop_at)
                while running or not (held.is_pending or self._is_over(ends, held)):
                    if held.is_pending:
                        self._stop.set()
                    else:
                        for shard in sorted(self._shards() - self._done - set(running.values())):
                            running[pool.submit(self._drain_shard, shard)] = shard
                    for future in wait(running, _TICK_SECONDS, FIRST_COMPLETED).done if running else ():
                        shard = running.pop(future)
                        self._done |= {shard} if future.result() else set()
                    # What the shards that are done just wrote is told before the member waits for more.
                    yield from self._take()
            except StreamAssetsError:
                self._stop.set()
                for future in running:
                    future.cancel()
                wait(running)
                # What the others finished meanwhile is in the table: tell of it first.
                yield from self._take()
                raise
            except GeneratorExit:
                raise
            except BaseException:
                self._stop.set()
                self._give_up()
                raise
            finally:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
            yield from self._take()

    def _open(self) -> BatchSource:
        source = self._source.open(self._membership)
        with self._lock:
            return self._opened.enter_context(source)

    def _is_over(self, ends: Ends, held: HeldSignals) -> bool:
        """Whether the whole group has reached ``ends``: until then a member stays, to take over from one that dies."""
        if self._shards() - self._done:
            return False
        if self._left is not None and self._left <= 0:
            return True
        if not self._linger.is_over:
            self._linger.until(lambda: held.is_pending or self._has_more(ends), on_idle=self._on_next)
            return False
        return self._is_reached(ends.shards)

    def _has_more(self, ends: Ends) -> bool:
        """Whether a shard became ours, or has something to read again, or the stream has grown."""
        self._done -= self._moved_back(ends.shards)
        if self._shards() - self._done:
            return True
        if not ends.have_grown():
            return False
        self._done.clear()
        return True

    def _moved_back(self, ends: Mapping[Shard, int]) -> set[Shard]:
        """Our shards that were drained, and moved back since by a RESTORE or a rewind; looked for every few seconds."""
        drained = self._shards() & self._done
        if not drained or time.monotonic() < self._look_at:
            return set()
        positions = self._ledger.read().positions
        self._look_at = time.monotonic() + LOOK_SECONDS
        return {shard for shard in drained if positions.get(shard, 0) < ends.get(shard, 0)}

    def _is_reached(self, ends: Mapping[Shard, int]) -> bool:
        if set(ends) <= self._done:
            return True
        time.sleep(_TICK_SECONDS)
        positions = self._ledger.read().positions
        if positions != self._seen:
            self._seen, self._moved_at = positions, time.monotonic()
        # One that was drained here and moved back since is for the next run: who waited for it would wait for itself.
        left = {shard: end for shard, end in sorted(ends.items()) if shard not in self._done}
        behind = [shard for shard, end in left.items() if positions.get(shard, 0) < end]
        if behind and time.monotonic() - self._moved_at > STANDBY_SECONDS:
            _log.warning(
                "the members of group %s that have %s wrote nothing for %g s; this one leaves",
                self._ingestion.group,
                ", ".join(map(str, behind)),
                STANDBY_SECONDS,
            )
            return True
        return not behind

    def _take(self) -> Iterator[BatchReport]:
        while not self._found.empty():
            report = self._found.get()
            self._on_next()
            yield report

    def _drain_shard(self, shard: Shard) -> bool:
        """Whether it was drained; ``False`` if somebody else has it now."""
        if not self._is_ours(shard):
            return False
        job = self._jobs.get(shard)
        if job is None:
            job = self._jobs[shard] = self._job_of(self._open(), replace(self._ingestion, shard=shard))
        while self._is_ours(shard):
            batch = job.plan()
            if self._stop.is_set():
                return False
            if batch is None or not self._start():
                return True
            report = job.run(batch)
            if report is not None:
                self._found.put(report)
        return False

    def _is_ours(self, shard: Shard) -> bool:
        return not self._stop.is_set() and shard in self._shards()

    def _shards(self) -> frozenset[Shard]:
        return frozenset(map(self._names.out, self._membership.shards()))

    def _start(self) -> bool:
        """Count a batch; ``False`` if there were enough."""
        with self._lock:
            if self._left is None:
                return True
            self._left -= 1
            return self._left >= 0
