"""A watch over consumers that live and get nowhere: what stands still, for how long, and which setting is about it."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stream_consumers.closing import ClosesOnExit
from stream_consumers.consumer import ShardEnd
from stream_consumers.errors import StreamAssetsError
from stream_consumers.messages import Shard
from stream_consumers.options import check_range, choose_fields

_log = logging.getLogger(__name__)
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardProgress:
    """How far one shard is. Times are seconds of ``time.monotonic``; ``None`` is never, or unknown.

    Args:
        shard: which one.
        started: when it was assigned.
        fetched: when the consumer last came back from asking for messages.
        arrived: when the last message of it arrived.
        committed_at: when a commit of it last succeeded.
        received: the next sequence to fetch.
        committed: the next sequence to read as the broker has it.
        committable: the position that a commit would set.
        unfinished: messages that were handed out and are not acknowledged.
        is_paused: whether it is paused.

    Example:
        >>> ShardProgress(shard=Shard("orders"), started=0.0, received=7, committed=5, unfinished=2).unfinished
        2
    """

    shard: Shard
    started: float
    fetched: float | None = None
    arrived: float | None = None
    committed_at: float | None = None
    received: int | None = None
    committed: int | None = None
    committable: int | None = None
    unfinished: int = 0
    is_paused: bool = False


class LivelockKind(enum.Enum):
    """What stands still, in the order in which it is looked for (Faust's).

    Example:
        >>> LivelockKind.COMMIT_STOPPED.value
        'nothing is committed any more'
    """

    NO_ASSIGNMENT = "no shard is assigned"
    NEVER_FETCHED = "nothing was ever asked for"
    FETCH_STOPPED = "nothing is asked for any more"
    END_UNKNOWN = "the end of the shard is not known"
    NEVER_ARRIVED = "no message has ever arrived"
    ARRIVAL_STOPPED = "messages do not arrive any more"
    NEVER_COMMITTED = "nothing was ever committed"
    COMMIT_STOPPED = "nothing is committed any more"


@dataclass(frozen=True, slots=True)
class Livelock:
    """One finding.

    Args:
        kind: what stands still.
        shard: where; ``None`` if there is none.
        seconds: for how long.
        numbers: what was compared.
        advice: the likely causes, and the setting that is about it.

    Example:
        >>> print(Livelock(LivelockKind.COMMIT_STOPPED, Shard("orders"), 301.0, {"committed": 5}, "Acknowledge."))
        orders/0: nothing is committed any more for 301 s (committed=5). Acknowledge.
    """

    kind: LivelockKind
    shard: Shard | None
    seconds: float
    numbers: Mapping[str, object]
    advice: str

    def __post_init__(self) -> None:
        choose_fields(self, kind=LivelockKind)

    def __str__(self) -> str:
        numbers = ", ".join(f"{name}={value}" for name, value in self.numbers.items())
        return f"{self.shard or 'consumer'}: {self.kind.value} for {self.seconds:.0f} s ({numbers}). {self.advice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LivelockOptions:
    """When a standstill is a finding (Faust's ``broker_commit_livelock_soft_timeout``, its defaults).

    Args:
        fetch_timeout_seconds: without asking the broker for messages.
        arrival_timeout_seconds: without a message although there are some.
        commit_timeout_seconds: without a commit although there is something behind the position.
        check_interval_seconds: between two looks of the watch's own thread.

    Example:
        >>> LivelockOptions(commit_timeout_seconds=60.0).fetch_timeout_seconds
        300.0
    """

    fetch_timeout_seconds: float = 300.0
    arrival_timeout_seconds: float = 300.0
    commit_timeout_seconds: float = 300.0
    check_interval_seconds: float = 7.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check_range(name, getattr(self, name), more_than=0)


def log_livelock(livelock: Livelock) -> None:
    """The default callback: one error line.

    Example:
        >>> log_livelock(Livelock(LivelockKind.COMMIT_STOPPED, Shard("orders"), 301.0, {}, "Acknowledge."))
    """
    _log.error("%s", livelock)


class LivelockWatch(ClosesOnExit):
    """Looks at every shard, and reports what stands still although it should not.

    A tracked consumer has one of its own with the option ``livelock``.

    A shard with nothing to read, one that is paused, and one behind an open transaction are no findings. Only successes
    count as progress.

    Args:
        progress: how far the shards are; ``TrackedConsumer.progress``.
        ends: where they end. Errors of it are taken for ends that are not known.
        options: what is too long.
        on_livelock: called for a finding when it is new.
        clock: seconds, as in ``progress``.

    Example:
        >>> stuck = ShardProgress(shard=Shard("orders"), started=0, fetched=500, arrived=10, received=7, committed=5)
        >>> watch = LivelockWatch(lambda: [stuck], lambda: {Shard("orders"): ShardEnd(7, 7)}, clock=lambda: 100)
        >>> watch.check()
        []
    """

    def __init__(
        self,
        progress: Callable[[], Sequence[ShardProgress]],
        ends: Callable[[], Mapping[Shard, ShardEnd]],
        *,
        options: LivelockOptions | None = None,
        on_livelock: Callable[[Livelock], None] = log_livelock,
        clock: Clock = time.monotonic,
    ) -> None:
        self._progress, self._ends, self._clock = progress, ends, clock
        self._options = options or LivelockOptions()
        self._on_livelock = on_livelock
        self._started = clock()
        self._lock = threading.Lock()
        # Since when there has been something to fetch or to commit, by what is late: before that nothing was.
        self._waiting_since: dict[tuple[str, Shard], float] = {}
        self._found: list[Livelock] = []
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LivelockWatch:
        self._thread = threading.Thread(target=self._run, name="livelock watch", daemon=True)
        self._thread.start()
        return self

    def status(self) -> list[Livelock]:
        """What the last look found."""
        return list(self._found)

    def close(self) -> None:
        """End the watch's thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def check(self) -> list[Livelock]:
        """Look now; returns what stands still, at most one finding a shard."""
        with self._lock:
            try:
                ends = self._ends()
            except StreamAssetsError as error:
                _log.debug("ends are not known: %s", error)
                ends = {}
            now, shards = self._clock(), self._progress()
            found = [livelock for shard in shards if (livelock := self._look(shard, ends.get(shard.shard), now))]
            if not shards and now - self._started >= self._options.fetch_timeout_seconds:
                found = [self._finding(LivelockKind.NO_ASSIGNMENT, None, now - self._started)]
            active = {shard.shard for shard in shards if not shard.is_paused}
            self._waiting_since = {place: at for place, at in self._waiting_since.items() if place[1] in active}
            known = {(livelock.kind, livelock.shard) for livelock in self._found}
            self._found = found
        for livelock in found:
            if (livelock.kind, livelock.shard) not in known:
                self._on_livelock(livelock)
        return list(found)

    def _look(self, shard: ShardProgress, end: ShardEnd | None, now: float) -> Livelock | None:
        if shard.is_paused:
            return None
        limits = self._options
        fetched = shard.started if shard.fetched is None else shard.fetched
        if now - fetched >= limits.fetch_timeout_seconds:
            kind = LivelockKind.NEVER_FETCHED if shard.fetched is None else LivelockKind.FETCH_STOPPED
            return self._finding(kind, shard, now - fetched)
        if end is None:
            since = now - shard.started
            is_late = since >= limits.fetch_timeout_seconds
            return self._finding(LivelockKind.END_UNKNOWN, shard, since) if is_late else None
        arrival = LivelockKind.NEVER_ARRIVED if shard.arrived is None else LivelockKind.ARRIVAL_STOPPED
        since = self._seconds_behind("arrival", shard, shard.received, end, now=now, moved_at=shard.arrived)
        if since >= limits.arrival_timeout_seconds:
            return self._finding(arrival, shard, since, end=end.readable)
        commit = LivelockKind.NEVER_COMMITTED if shard.committed_at is None else LivelockKind.COMMIT_STOPPED
        since = self._seconds_behind("commit", shard, shard.committed, end, now=now, moved_at=shard.committed_at)
        is_late = since >= limits.commit_timeout_seconds
        return self._finding(commit, shard, since, end=end.readable) if is_late else None

    def _seconds_behind(
        self,
        what: str,
        shard: ShardProgress,
        position: int | None,
        end: ShardEnd,
        *,
        now: float,
        moved_at: float | None,
    ) -> float:
        """For how long a position has been before the end without moving; 0 where it is at the end."""
        if (position or 0) >= end.readable:
            self._waiting_since.pop((what, shard.shard), None)
            return 0.0
        return now - max(self._waiting_since.setdefault((what, shard.shard), now), moved_at or 0.0, shard.started)

    def _finding(self, kind: LivelockKind, shard: ShardProgress | None, seconds: float, **facts: object) -> Livelock:
        if shard is None:
            return Livelock(kind, None, seconds, facts, _ADVICE[kind])
        numbers = {
            **facts,
            "received": shard.received,
            "committed": shard.committed,
            "committable": shard.committable,
            "unfinished": shard.unfinished,
        }
        advice = _ADVICE[kind]
        if kind in {LivelockKind.NEVER_COMMITTED, LivelockKind.COMMIT_STOPPED}:
            advice = f"{_FAILING if shard.committable is not None else _HANGING} {advice}"
        return Livelock(kind, shard.shard, seconds, numbers, advice)

    def _run(self) -> None:
        while not self._closing.wait(self._options.check_interval_seconds):
            try:
                self.check()
            except Exception:  # noqa: BLE001 - a callback may raise anything, and the watch must go on
                _log.exception("the livelock watch goes on")


_FAILING = "Commits fail, or commit is never called: see commit_error, and commit_interval_seconds of TrackingOptions."
_HANGING = "A message is not finished: its handler hangs, or never calls ack; see unacked."
_FETCH = "No thread calls next: a handler hangs, or the flow is stopped (resume_flow). Too short for slow handlers: \
fetch_timeout_seconds."
_ARRIVAL = "The broker has messages that it does not give: check it, and buffer_size of TrackingOptions (a full shard \
waits for acks). Too short for slow handlers: arrival_timeout_seconds."
_COMMIT = "Too short for slow handlers: commit_timeout_seconds."
_ADVICE = {
    LivelockKind.NO_ASSIGNMENT: "The group has more members than shards, or the topic has none: check the group.",
    LivelockKind.NEVER_FETCHED: _FETCH,
    LivelockKind.FETCH_STOPPED: _FETCH,
    LivelockKind.END_UNKNOWN: "The broker does not report where it ends: check the broker and the ACLs. "
    "Too short: fetch_timeout_seconds.",
    LivelockKind.NEVER_ARRIVED: _ARRIVAL,
    LivelockKind.ARRIVAL_STOPPED: _ARRIVAL,
    LivelockKind.NEVER_COMMITTED: _COMMIT,
    LivelockKind.COMMIT_STOPPED: _COMMIT,
}
