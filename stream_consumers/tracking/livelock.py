"""Detects consumers that run without progress, and reports what stopped, for how long, and which setting applies."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stream_consumers.closing import ClosesOnExit
from stream_consumers.consumer import ShardEnd
from stream_consumers.errors import StreamAssetsError, log_text
from stream_consumers.messages import Shard
from stream_consumers.options import check_range, choose_fields

_log = logging.getLogger(__name__)
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardProgress:
    """The progress of one shard. Times are seconds of ``time.monotonic``; ``None`` means never, or unknown.

    Args:
        shard: the shard.
        started: when it was assigned.
        fetched: when the consumer last finished a fetch.
        arrived: when the last message of the shard arrived.
        committed_at: when a commit of the shard last succeeded.
        received: the next sequence to fetch.
        committed: the committed position at the broker.
        committable: the position that a commit would set.
        unfinished: the number of messages that were returned and not acknowledged.
        is_paused: whether the shard is paused.

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
    """The kinds of missing progress, in the order of the checks (Faust's).

    Example:
        >>> LivelockKind.COMMIT_STOPPED.value
        'nothing is committed any more'
    """

    NO_ASSIGNMENT = "no shard is assigned"
    NEVER_FETCHED = "nothing was ever fetched"
    FETCH_STOPPED = "nothing is fetched any more"
    END_UNKNOWN = "the end of the shard is not known"
    NEVER_ARRIVED = "no message has ever arrived"
    ARRIVAL_STOPPED = "messages do not arrive any more"
    NEVER_COMMITTED = "nothing was ever committed"
    COMMIT_STOPPED = "nothing is committed any more"


@dataclass(frozen=True, slots=True)
class Livelock:
    """A finding of missing progress.

    Args:
        kind: what has stopped.
        shard: the shard; ``None`` if none is assigned.
        seconds: for how long.
        numbers: the values that were compared.
        advice: the likely causes, and the setting of the timeout.

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
    """The timeouts after which missing progress is reported (Faust's ``broker_commit_livelock_soft_timeout``).

    Args:
        fetch_timeout_seconds: the longest time without a fetch.
        arrival_timeout_seconds: the longest time without a message although the shard has some.
        commit_timeout_seconds: the longest time without a commit although the shard has messages after the position.
        check_interval_seconds: the time between two checks in the background.

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
    """Log a finding as an error; this is the default callback.

    Example:
        >>> log_livelock(Livelock(LivelockKind.COMMIT_STOPPED, Shard("orders"), 301.0, {}, "Acknowledge."))
    """
    _log.error("%s", livelock)


class LivelockWatch(ClosesOnExit):
    """Checks every shard, and reports missing progress.

    A tracked consumer creates a watch for its option ``livelock``.

    A shard that is paused, has no message to read, or waits for an open transaction is not reported. Only successful
    fetches and commits count as progress.

    Args:
        progress: returns the progress of the shards; ``TrackedConsumer.progress``.
        ends: returns the ends of the shards; after an error the ends count as unknown.
        options: the timeouts.
        on_livelock: called for each new finding.
        clock: returns seconds, as in ``progress``.

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
        # When the shard first had a message to fetch or a position to commit, by check and shard.
        self._waiting_since: dict[tuple[str, Shard], float] = {}
        self._found: list[Livelock] = []
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LivelockWatch:
        self._thread = threading.Thread(target=self._run, name="livelock watch", daemon=True)
        self._thread.start()
        return self

    def status(self) -> list[Livelock]:
        """Return the findings of the last check."""
        return list(self._found)

    def close(self) -> None:
        """End the watch's thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def check(self) -> list[Livelock]:
        """Check now, and return the findings, at most one for each shard."""
        with self._lock:
            try:
                ends = self._ends()
            except StreamAssetsError as error:
                _log.debug("the ends of the shards are unknown: %s", error)
                ends = {}
            now, shards = self._clock(), self._progress()
            found = [livelock for shard in shards if (livelock := self._check(shard, ends.get(shard.shard), now))]
            if not shards and now - self._started >= self._options.fetch_timeout_seconds:
                found = [self._finding(LivelockKind.NO_ASSIGNMENT, None, now - self._started)]
            active = {shard.shard for shard in shards if not shard.is_paused}
            self._waiting_since = {key: at for key, at in self._waiting_since.items() if key[1] in active}
            known = {(livelock.kind, livelock.shard) for livelock in self._found}
            self._found = found
        for livelock in found:
            if (livelock.kind, livelock.shard) not in known:
                self._on_livelock(livelock)
        return list(found)

    def _check(self, shard: ShardProgress, end: ShardEnd | None, now: float) -> Livelock | None:
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
        """Return the seconds for which a position has not moved although it is before the end; 0 at the end."""
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
            except Exception as error:  # noqa: BLE001 - a callback may raise anything, and the watch must go on
                _log.error("a check of the livelock watch failed: %s; it continues", log_text(error))


_FAILING = "Commits fail, or commit is never called: see commit_error, and commit_interval_seconds of TrackingOptions."
_HANGING = "A message is not finished: its handler hangs, or never calls ack; see unacked."
_FETCH = "No thread calls next: a handler hangs, or the flow is stopped (resume_flow). If handlers are slow, raise \
fetch_timeout_seconds."
_ARRIVAL = "The broker has messages but does not deliver them: check the broker, and buffer_size of TrackingOptions (a \
full shard waits for acks). If handlers are slow, raise arrival_timeout_seconds."
_COMMIT = "If handlers are slow, raise commit_timeout_seconds."
_ADVICE = {
    LivelockKind.NO_ASSIGNMENT: "The group has more members than shards, or the topic has none: check the group.",
    LivelockKind.NEVER_FETCHED: _FETCH,
    LivelockKind.FETCH_STOPPED: _FETCH,
    LivelockKind.END_UNKNOWN: "The broker does not report the end of the shard: check the broker and the ACLs. "
    "If the broker is slow, raise fetch_timeout_seconds.",
    LivelockKind.NEVER_ARRIVED: _ARRIVAL,
    LivelockKind.ARRIVAL_STOPPED: _ARRIVAL,
    LivelockKind.NEVER_COMMITTED: _COMMIT,
    LivelockKind.COMMIT_STOPPED: _COMMIT,
}
