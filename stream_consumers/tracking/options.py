"""Options, callbacks and states of a tracked consumer."""

from __future__ import annotations

import enum
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TypeVar

from stream_consumers.errors import log_text
from stream_consumers.messages import Shard
from stream_consumers.options import check_count, check_range
from stream_consumers.tracking.livelock import Livelock, LivelockOptions, log_livelock

READ_AHEAD = 500
Shards = frozenset[Shard]
Scheduler = Callable[[Sequence[Shard]], Shard]
"""Chooses the shard whose message is returned next, from the shards that have one, least recently chosen first."""
Subject = TypeVar("Subject")
_log = logging.getLogger(__name__)


class Activity(enum.Flag):
    """What a tracked consumer is doing now (Faust's ``diag`` flags).

    Example:
        >>> Activity.FETCHING in Activity.FETCHING | Activity.COMMITTING
        True
    """

    NOTHING = 0
    FETCHING = enum.auto()
    COMMITTING = enum.auto()
    SEEKING = enum.auto()
    WAITING_EMPTY = enum.auto()
    SHARDS_REVOKED = enum.auto()
    SHARDS_ASSIGNED = enum.auto()
    FLOW_STOPPED = enum.auto()


class Activities:
    """Counts what several threads are doing now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Activity] = Counter()

    @contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """Count the activity during the block."""
        with self._lock:
            self._counts[activity] += 1
        try:
            yield
        finally:
            with self._lock:
                self._counts[activity] -= 1

    @property
    def now(self) -> Activity:
        """All activities of all threads."""
        found = Activity.NOTHING
        with self._lock:
            for activity, count in self._counts.items():
                found |= activity if count else Activity.NOTHING
        return found


def _nothing(*_: object) -> None:
    pass


def _guarded(name: str, callback: Callable[[Subject], None]) -> Callable[[Subject], None]:
    def call(subject: Subject) -> None:
        try:
            callback(subject)
        except Exception as error:  # noqa: BLE001 - a callback may raise anything
            about = log_text(subject) if isinstance(subject, BaseException) else subject
            _log.error("the callback %s failed for %s: %s", name, about, log_text(error))

    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingCallbacks:
    """Lifecycle callbacks; each is called in the thread of the event.

    An error of a callback is logged, without its text, and changes nothing else: the message is returned, the positions
    are committed, and the error that the callback was called for is raised.

    Args:
        on_revoked: the group revokes these shards. After the callback they are committed and released, so finish and
            acknowledge messages that are nearly done.
        on_assigned: the group has assigned these shards.
        on_buffer_full: too many messages of a shard are unfinished, so that no more are returned.
        on_buffer_drop: few enough messages of the shard are unfinished, so that they are returned again.
        on_task_error: processing a message failed.
        on_livelock: the watch (see ``livelock`` of :class:`TrackingOptions`) has a new finding; logged by default.

    Example:
        >>> full: list[Shard] = []
        >>> TrackingCallbacks(on_buffer_full=full.append).on_buffer_full(Shard("orders"))
        >>> full
        [Shard(stream='orders', id=0)]
    """

    on_revoked: Callable[[Shards], None] = _nothing
    on_assigned: Callable[[Shards], None] = _nothing
    on_buffer_full: Callable[[Shard], None] = _nothing
    on_buffer_drop: Callable[[Shard], None] = _nothing
    on_task_error: Callable[[BaseException], None] = _nothing
    on_livelock: Callable[[Livelock], None] = log_livelock

    def guarded(self) -> TrackingCallbacks:
        """Return the same callbacks with their errors logged instead of raised."""
        callbacks = {field.name: _guarded(field.name, getattr(self, field.name)) for field in fields(self)}
        return TrackingCallbacks(**callbacks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingOptions:
    """Options of a tracked consumer (Faust's names where it has them, and its defaults).

    Args:
        commit_interval_seconds: the time between background commits (``broker_commit_interval``); ``None`` commits
            only on request, or by ``commit_every``.
        commit_every: the number of acknowledgements after which to commit in the background
            (``broker_commit_every``); ``None`` does not count.
        retry_seconds: how long to wait after a failed commit; twice as long after each further one.
        retry_limit_seconds: the longest such wait.
        buffer_size: the unfinished messages of one shard (``stream_buffer_maxsize``); at 80 % of it no more are
            returned, until at most 40 % are unfinished.
        close_seconds: how long :meth:`close` waits for unfinished messages (``stream_wait_empty``); 0 does not wait.
        scheduler: chooses the shard whose message is returned next (``ConsumerScheduler``). With a scheduler, up to
            ``READ_AHEAD`` messages are fetched ahead, so that it can choose; ``lambda shards: shards[0]`` takes the
            shards in turn. Without one, messages are returned in the order of arrival.
        livelock: watch the consumer in a background thread, and call ``on_livelock`` for missing progress
            (``broker_commit_livelock_soft_timeout``); ``None`` does not watch.

    Raises:
        InvalidOptionError: an option is out of range.

    Example:
        >>> options = TrackingOptions(buffer_size=10)
        >>> options.full_at, options.drop_at
        (8, 4)
    """

    commit_interval_seconds: float | None = 2.8
    commit_every: int | None = 10_000
    retry_seconds: float = 0.5
    retry_limit_seconds: float = 30.0
    buffer_size: int = 4096
    close_seconds: float = 30.0
    scheduler: Scheduler | None = None
    livelock: LivelockOptions | None = None

    def __post_init__(self) -> None:
        for name in ("commit_interval_seconds", "retry_seconds", "retry_limit_seconds"):
            value = getattr(self, name)
            if value is not None or name != "commit_interval_seconds":
                check_range(name, value, more_than=0)
        check_range("close_seconds", self.close_seconds)
        check_count("buffer_size", self.buffer_size, at_least=2)
        if self.commit_every is not None:
            check_count("commit_every", self.commit_every)

    @property
    def full_at(self) -> int:
        """The number of unfinished messages at which a shard is full."""
        return max(1, self.buffer_size * 4 // 5)

    @property
    def drop_at(self) -> int:
        """The number of unfinished messages at which a full shard resumes."""
        return self.buffer_size * 2 // 5
