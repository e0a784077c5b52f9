"""Runs an ingestion: drains a source into a table, as the only member or one of several, and may then keep polling."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark.sql import SparkSession

from spark_jobs.batches.accept import accept
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingest_job import CHECK_INTERVAL_SECONDS, IngestJob
from spark_jobs.batches.ingestion import (
    CONTINUES,
    BatchReport,
    Event,
    Ingestion,
    Observer,
    UnreadableTail,
    Waiting,
    ignore_steps,
)
from spark_jobs.batches.job import STANDBY_SECONDS, batch_events, reports_of
from spark_jobs.batches.run_control import DeferredSignals, IdleWait, Retries
from spark_jobs.claims.claim_job import ClaimJob
from stream_consumers.batches import BatchSource, Membership
from stream_consumers.create import StreamSource
from stream_consumers.epochs import EpochNames, with_epoch_names
from stream_consumers.errors import (
    BrokerUnavailableError,
    InvalidOptionError,
    LedgerTruncatedError,
    SourceRecreatedError,
    SourceTruncatedError,
    StreamAssetsError,
    UnsupportedError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode

JOIN_SECONDS = 60.0
PARALLEL_SHARDS = 4
"""The number of batches that a member writes at the same time."""
_TICK_SECONDS = 0.1
_log = logging.getLogger(__name__)


def drain(spark: SparkSession, source: StreamSource, ingestion: Ingestion, **options: Any) -> Iterator[BatchReport]:
    """Yield the batches of :func:`run_events`, which documents the arguments, and log its other events."""
    return reports_of(run_events(spark, source, ingestion, **options))


def run_events(
    spark: SparkSession,
    source: StreamSource,
    ingestion: Ingestion,
    *,
    observer: Observer = ignore_steps,
    max_batches: int | None = None,
    origin: Bound | None = None,
    stop: Bound | None = None,
    linger_seconds: float = 0.0,
) -> Iterator[Event]:
    """Write micro-batches up to the end of the source at the start, and later messages while the run keeps polling.

    After SIGINT or SIGTERM it finishes the current batch, see :class:`spark_jobs.batches.run_control.DeferredSignals`.

    Args:
        spark: a session that can write Delta tables.
        source: the stream.
        ingestion: the group, the table and the options.
        observer: called at each step.
        max_batches: stop after this number of batches.
        origin: the start of a group without a position, in place of the one in ``ingestion``.
        stop: the bound at which to stop.
        linger_seconds: how long the run keeps polling, in seconds from its start. With 0 it ends when it has written
            all messages that the source had.

    Yields:
        Each batch when it is in the table and committed; ``CONTINUES`` before the next batch is written, and from time
        to time while the run polls; ``Waiting`` before each wait for a retry; and ``UnreadableTail`` if bytes after the
        last message cannot be read.

    Raises:
        InvalidOptionError: two arguments exclude each other.
        StreamAssetsError: any error that stops the run; batches that were yielded before stay in the table.
    """
    idle_wait = IdleWait(linger_seconds, batch_seconds=ingestion.batch_seconds)
    _check_run(source, ingestion, has_bound=bool(origin or stop))
    if stop and linger_seconds:
        raise InvalidOptionError(
            f"a run with a stop ends there, but linger_seconds={linger_seconds:g} lets it keep polling",
            remedy="Leave one of them out.",
        )
    retries, count = Retries(ingestion.retry_seconds), 0
    if source.is_claimed:
        names = ingestion.epochs(source.url.required_streams())
        with (yield from retries.call(lambda: source.claims(ingestion.group, names))) as claims:
            member = ClaimJob(spark, claims, replace(ingestion, claims=True), observer=observer, idle_wait=idle_wait)
            yield from batch_events(member, max_batches=max_batches, idle_wait=idle_wait)
        return
    make_job = partial(IngestJob, spark, observer=observer, origin=origin, stop=stop, idle_wait=idle_wait)
    is_shared = source.mode is ConsumerMode.LOAD_BALANCED
    while True:
        left = None if max_batches is None else max_batches - count
        try:
            if is_shared:
                events = _shared_events(spark, source, ingestion, make_job, left=left, stop=stop, idle_wait=idle_wait)
            else:
                events = _own_events(source, ingestion, make_job, left=left, idle_wait=idle_wait)
            for event in events:
                count += isinstance(event, BatchReport)
                if not isinstance(event, Waiting):
                    retries.reset()
                yield event
            return
        except SourceRecreatedError as error:
            # If the stream only lost messages, although its counts say otherwise, it is accepted, too.
            ingestion.refuse_or_record(error)
            _log.warning("%s", error)
            if not _accept_truncation(spark, source, ingestion, error):
                raise
        except StreamAssetsError as error:
            if not is_shared:
                raise
            # An outage may end the membership, so the member joins again; its own jobs do not retry.
            yield from retries.pause(error)


def _check_run(source: StreamSource, ingestion: Ingestion, *, has_bound: bool) -> None:
    if source.mode is not ingestion.sharing:
        raise InvalidOptionError(
            f"the mode of the source is {source.mode.value}, but that of the ingestion is {ingestion.sharing.value}",
            remedy="Set the same mode for both.",
        )
    if not source.is_claimed and ingestion.member != "main":
        raise InvalidOptionError(
            f"mode {source.mode.value} of {source.url.protocol} has no named members: member={ingestion.member!r}",
            remedy="Leave the member out: a second transaction sequence would write each message a second time.",
        )
    if source.is_claimed and has_bound:
        raise UnsupportedError(
            f"group {ingestion.group!r} claims entries one by one, in no order, so that it has no start or stop",
            remedy="Leave start and stop out, or use mode 'resumable'.",
        )


MakeJob = Callable[[BatchSource, Ingestion], IngestJob]


def _own_events(
    source: StreamSource, ingestion: Ingestion, make_job: MakeJob, *, left: int | None, idle_wait: IdleWait
) -> Iterator[Event]:
    """Yield the events of a run that has all shards of the group."""
    with source.open() as opened:
        yield from batch_events(make_job(opened, ingestion), max_batches=left, idle_wait=idle_wait)
        if tail := opened.unreadable_tail():
            yield UnreadableTail(tail)


def _shared_events(
    spark: SparkSession,
    source: StreamSource,
    ingestion: Ingestion,
    make_job: MakeJob,
    *,
    left: int | None,
    stop: Bound | None,
    idle_wait: IdleWait,
) -> Iterator[Event]:
    """Yield the events of a run that is one of several members, each with some of the shards."""
    own = replace(ingestion, retry_seconds=0.0)
    with source.join(ingestion.group) as membership:
        drain = SharedDrain(spark, source, own, membership, make_job, max_batches=left, stop=stop, idle_wait=idle_wait)
        yield from drain.events()


def _accept_truncation(
    spark: SparkSession, source: StreamSource, ingestion: Ingestion, error: SourceRecreatedError
) -> bool:
    """Begin the next epoch where the stream differs from the table; return whether the run can go on."""
    try:
        with source.open() as opened:
            accepted = accept(spark, opened, ingestion, is_cut=True)
    except LedgerTruncatedError:
        raise error from None
    for one in accepted:
        _log.warning(
            "%s continues as %s from %s; %s is unchanged up to %s",
            source.url,
            one.name,
            ", ".join(f"{shard}: {start}" for shard, start in sorted(one.origin.items())),
            one.before,
            ", ".join(f"{shard}: {end}" for shard, end in sorted(one.ended.items())),
        )
    return bool(accepted) or isinstance(error, SourceTruncatedError)


class CapturedEnds:
    """The ends that a group must reach; while members keep polling, they are captured again when the stream has grown.

    Args:
        source: the stream, with the names of its epochs.
        stop: the bound at which to stop.
    """

    def __init__(self, source: BatchSource, stop: Bound | None) -> None:
        self._source = source
        self._stop = stop
        self._capture()

    def have_grown(self) -> bool:
        """Return whether the stream has grown, and capture its new ends."""
        before = self.shards
        if time.monotonic() < self._next_check and not self._source.has_grown(self._extents):
            return False
        self._capture()
        return self.shards != before

    def _capture(self) -> None:
        self._extents = self._source.extents()
        stops = self._stop.resolve(self._source, self._extents) if self._stop else {}
        self.shards = {shard: min(extent.end, stops.get(shard, extent.end)) for shard, extent in self._extents.items()}
        self._next_check = time.monotonic() + CHECK_INTERVAL_SECONDS


class SharedDrain:
    """One member of a group that drains its assigned shards, several at a time, each in its own transaction sequence.

    No member is fenced, and no shard is locked: a member that wakes up late races with the new owner for the next
    transaction number of the shard, and Delta accepts one commit.

    Args:
        spark: the session; its jobs are interrupted if the run is aborted.
        source: the stream.
        ingestion: the group, the table and the options.
        membership: assigns shards to this member; the caller closes it.
        make_job: creates the job of one shard; its observer is called from several threads.
        max_batches: stop after this number of batches, of all shards together.
        stop: the bound at which to stop.
        idle_wait: how long to keep polling after the group has reached the end.
    """

    def __init__(
        self,
        spark: SparkSession,
        source: StreamSource,
        ingestion: Ingestion,
        membership: Membership,
        make_job: MakeJob,
        *,
        max_batches: int | None = None,
        stop: Bound | None = None,
        idle_wait: IdleWait | None = None,
    ) -> None:
        self._spark = spark
        self._source = source
        self._ingestion = ingestion
        self._membership = membership
        self._ledger = ingestion.ledger()
        self._names = EpochNames(ingestion.epochs(source.url.required_streams()))
        self._make_job = make_job
        self._stop_at = stop
        self._idle_wait = idle_wait or IdleWait()
        self._jobs: dict[Shard, IngestJob] = {}
        self._left = max_batches
        self._done: set[Shard] = set()
        self._seen: Mapping[Shard, int] = {}
        self._moved_at = time.monotonic()
        self._next_check = 0.0
        self._found: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def events(self) -> Iterator[Event]:
        """Yield the batches that are written until every assigned shard is drained.

        Raises:
            BrokerUnavailableError: the group assigned no shards in time.
            StreamAssetsError: the first error of a shard; the other shards finish their batches.
        """
        if not self._membership.wait(JOIN_SECONDS):
            raise BrokerUnavailableError(
                f"group {self._ingestion.group!r} assigned nothing within {JOIN_SECONDS:g} s",
                remedy="Check the brokers and the group's other members; nothing was lost, run again.",
            )
        running: dict[Future[bool], Shard] = {}
        pool = ThreadPoolExecutor(PARALLEL_SHARDS, thread_name_prefix="shard")
        with ExitStack() as self._opened, DeferredSignals(self._ingestion.finish_seconds) as signals:
            try:
                ends = CapturedEnds(with_epoch_names(self._open(), self._names.names), self._stop_at)
                while True:
                    if not running and (signals.is_pending or (yield from self._is_over(ends, signals))):
                        break
                    if signals.is_pending:
                        self._stop.set()
                    else:
                        for shard in sorted(self._shards() - self._done - set(running.values())):
                            running[pool.submit(self._drain_shard, shard)] = shard
                    for future in wait(running, _TICK_SECONDS, FIRST_COMPLETED).done if running else ():
                        shard = running.pop(future)
                        self._done |= {shard} if future.result() else set()
                    # Yield what the shards that are done just wrote before the member waits for more.
                    yield from self._take()
            except StreamAssetsError:
                self._stop.set()
                for future in running:
                    future.cancel()
                wait(running)
                # Yield the batches that the other shards finished meanwhile, because they are in the table.
                yield from self._take()
                raise
            except GeneratorExit:
                raise
            except BaseException:
                self._stop.set()
                self._spark.interruptAll()
                raise
            finally:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
            yield from self._take()

    def _open(self) -> BatchSource:
        source = self._source.open(self._membership)
        with self._lock:
            return self._opened.enter_context(source)

    def _is_over(self, ends: CapturedEnds, signals: DeferredSignals) -> Generator[Event, None, bool]:
        """Return whether the whole group has reached ``ends``; until then a member stays, to take over dead members."""
        if self._shards() - self._done:
            return False
        if self._left is not None and self._left <= 0:
            return True
        if not self._idle_wait.is_over:
            for _ in self._idle_wait.polls():
                if signals.is_pending or (self._idle_wait.is_due and self._has_more(ends)):
                    break
                yield CONTINUES
            return False
        return self._is_reached(ends.shards)

    def _has_more(self, ends: CapturedEnds) -> bool:
        """Return whether this member got a shard, a shard has messages to read again, or the stream has grown."""
        self._done -= self._moved_back(ends.shards)
        if self._shards() - self._done:
            return True
        if not ends.have_grown():
            return False
        self._done.clear()
        return True

    def _moved_back(self, ends: Mapping[Shard, int]) -> set[Shard]:
        """Return drained shards that a RESTORE or a rewind moved back since; look for them every few seconds only."""
        drained = self._shards() & self._done
        if not drained or time.monotonic() < self._next_check:
            return set()
        positions = self._ledger.read().positions
        self._next_check = time.monotonic() + CHECK_INTERVAL_SECONDS
        return {shard for shard in drained if positions.get(shard, 0) < ends.get(shard, 0)}

    def _is_reached(self, ends: Mapping[Shard, int]) -> bool:
        if set(ends) <= self._done:
            return True
        time.sleep(_TICK_SECONDS)
        positions = self._ledger.read().positions
        if positions != self._seen:
            self._seen, self._moved_at = positions, time.monotonic()
        # A shard that was drained here and moved back since is left to the next run: no other member would drain it.
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

    def _take(self) -> Iterator[Event]:
        while not self._found.empty():
            yield CONTINUES
            yield self._found.get()

    def _drain_shard(self, shard: Shard) -> bool:
        """Drain a shard; return ``False`` if it belongs to another member now."""
        if not self._is_ours(shard):
            return False
        job = self._jobs.get(shard)
        if job is None:
            job = self._jobs[shard] = self._make_job(self._open(), replace(self._ingestion, shard=shard))
        for event in batch_events(job):
            if event is not CONTINUES:
                self._found.put(event)
                if not self._is_ours(shard):
                    return False
            elif self._stop.is_set():
                return False
            elif not self._start():
                return True
        return not self._stop.is_set()

    def _is_ours(self, shard: Shard) -> bool:
        return not self._stop.is_set() and shard in self._shards()

    def _shards(self) -> frozenset[Shard]:
        return frozenset(map(self._names.to_epoch, self._membership.shards()))

    def _start(self) -> bool:
        """Count a batch; return ``False`` if the maximum is reached."""
        with self._lock:
            if self._left is None:
                return True
            self._left -= 1
            return self._left >= 0
