"""Fetches and hands out the messages of a tracked consumer: one thread fetches at a time, and any may be stopped."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stream_consumers.capabilities import EndedConsumer, PausableConsumer
from stream_consumers.consumer import Consumer
from stream_consumers.errors import StreamEndedError
from stream_consumers.messages import Message, Shard
from stream_consumers.polling_lock import PollingLock
from stream_consumers.tracking.options import Activity, Shards
from stream_consumers.tracking.shards import TrackedShards


class Activities:
    """What several threads are doing now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Activity] = Counter()

    @contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """Within, it is being done."""
        with self._lock:
            self._counts[activity] += 1
        try:
            yield
        finally:
            with self._lock:
                self._counts[activity] -= 1

    @property
    def now(self) -> Activity:
        """All of it."""
        found = Activity.NOTHING
        with self._lock:
            for activity, count in self._counts.items():
                found |= activity if count else Activity.NOTHING
        return found


class TrackedReader:
    """Hands out messages.

    Args:
        consumer: what to read from.
        shards: keeps what was fetched and not handed out; only touched with ``changed`` held.
        changed: the lock of ``shards``.
        activities: is told of fetches and seeks.
        is_committing: whether a commit is under way.
        on_buffer_full: told of a shard that became full.
    """

    def __init__(
        self,
        consumer: Consumer,
        shards: TrackedShards,
        changed: threading.Condition,
        activities: Activities,
        *,
        is_committing: Callable[[], bool],
        on_buffer_full: Callable[[Shard], None],
    ) -> None:
        self._consumer, self._shards, self._changed, self._activities = consumer, shards, changed, activities
        self._is_committing, self._on_buffer_full = is_committing, on_buffer_full
        self.fetching = PollingLock()
        self.fetched_at: float | None = None
        self.is_flowing = True
        self._handing = 0
        self._natively_paused: Shards = frozenset()

    def let_flow(self, is_flowing: bool) -> None:
        """Stop or go on."""
        with self._changed:
            self.is_flowing = is_flowing
            self._changed.notify_all()

    def wait_for_stopped_flow(self, timeout_seconds: float) -> bool:
        """Wait until no thread hands out a message any more."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_flowing and not self._handing, timeout_seconds)

    def forget(self, shards: Shards) -> None:
        """These shards changed their owner: their pauses are over; call it with ``changed`` held."""
        self._natively_paused -= shards

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Within, nothing is fetched, and the consumer may be moved."""
        with self.fetching.moving(), self._activities.doing(Activity.SEEKING):
            try:
                yield
            finally:
                # A client may or may not forget it with a seek; it is paused again before the next fetch.
                if isinstance(self._consumer, PausableConsumer):
                    self._consumer.resume(self._natively_paused)
                self._natively_paused = frozenset()

    def poll(self, seconds: float) -> Message | None:
        """Hand out the next message; waits for it, for the flow and for a commit so many seconds each at most.

        Raises:
            StreamEndedError: the stream has an end, it was reached, and nothing that was fetched is left.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_flowing, seconds):
                return None
            self._handing += 1
        try:
            return self._obtain(seconds)
        finally:
            with self._changed:
                self._handing -= 1
                if not self._handing and not self.is_flowing:
                    self._changed.notify_all()

    def _obtain(self, seconds: float) -> Message | None:
        message = self._hand_out()
        # Whoever fetches already may get it for this thread, too.
        if message is not None or not self.fetching.acquire(seconds):
            return message
        try:
            message, has_more = self._hand_out(), True
            # What came may be of a closed shard: that is no reason to say that there is nothing.
            while message is None and has_more and self._may_fetch(seconds):
                with self._activities.doing(Activity.FETCHING):
                    has_more = self._fetch(seconds) and self._fetch_ahead()
                message = self._hand_out()
            return message
        finally:
            self.fetching.release()

    def _hand_out(self) -> Message | None:
        with self._changed:
            message = self._shards.take() if self.is_flowing else None
            is_full = message is not None and self._shards.is_too_full(message.shard)
            if message is not None and is_full:
                self._shards.full.add(message.shard)
        if message is not None and is_full:
            self._on_buffer_full(message.shard)
        return message

    def _may_fetch(self, seconds: float) -> bool:
        with self._changed:
            # The group may take shards in a fetch, and give them back: a commit from before must not come behind that.
            self._changed.wait_for(lambda: not self._is_committing(), seconds)
            if not self.is_flowing:
                return False
            if not self._shards.can_hold:
                self._changed.wait(seconds)
            return self._shards.can_hold

    def _fetch(self, seconds: float) -> bool:
        self._pause_natively()
        message = None
        try:
            message = self._consumer.next(seconds)
        except StreamEndedError:
            with self._changed:
                if not self._shards.is_holding:
                    raise
                # The stream has ended, but not for those who wait for a paused shard.
                self._changed.wait(seconds)
        finally:
            ends = self._consumer.reached_ends() if isinstance(self._consumer, EndedConsumer) else {}
            with self._changed:
                self.fetched_at = time.monotonic()
                if message is not None:
                    self._shards.hold(message)
                self._shards.reach(ends)
        return message is not None

    def _fetch_ahead(self) -> bool:
        for _ in range(self._shards.read_ahead - 1):
            if not self._may_fetch(0.0) or not self._fetch(0.0):
                break
        return True

    def _pause_natively(self) -> None:
        if isinstance(self._consumer, PausableConsumer):
            with self._changed:
                closed = self._shards.closed
            if closed != self._natively_paused:
                self._consumer.resume(self._natively_paused - closed)
                self._consumer.pause(closed - self._natively_paused)
                self._natively_paused = closed
