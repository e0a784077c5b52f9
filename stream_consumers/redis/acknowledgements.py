"""The entries that a member of a Redis group holds: received, acknowledged, to be committed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable

from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Shard
from stream_consumers.options import AutoCommit, RedisGroupOptions

EntryLocation = tuple[Shard, bytes]
"""Where an entry is: its shard and its id."""


class Acknowledgements:
    """Tells which entries are to be acknowledged, and which are to be committed; these are two steps. Thread-safe.

    Args:
        options: what decides when an entry may be committed.

    Example:
        >>> held = Acknowledgements(RedisGroupOptions(auto_commit=AutoCommit.DISABLED))
        >>> held.receive((Shard("orders"), b"1-0")), held.receive((Shard("orders"), b"1-0"))
        (True, False)
        >>> held.acknowledge((Shard("orders"), b"1-0"))
        >>> held.acknowledged()
        [(Shard(stream='orders', id=0), b'1-0')]
    """

    def __init__(self, options: RedisGroupOptions) -> None:
        self._mode = options.auto_commit
        self._delay = options.auto_commit_delay_seconds
        self._interval = options.auto_commit_interval_seconds
        self._lock = threading.Lock()
        self._held: set[EntryLocation] = set()
        self._aging: deque[tuple[float, EntryLocation]] = deque()
        # Dictionaries, because they keep the order.
        self._acknowledged: dict[EntryLocation, None] = {}
        self._settled: dict[EntryLocation, None] = {}
        self._next_commit = time.monotonic() + self._interval

    def receive(self, location: EntryLocation) -> bool:
        """Note an entry that came from the server; false if this member holds it already."""
        with self._lock:
            if location in self._held:
                return False
            if self._mode is not AutoCommit.IMMEDIATE:
                self._held.add(location)
            return True

    def is_held(self, location: EntryLocation) -> bool:
        """Whether the entry was received and is not committed yet."""
        with self._lock:
            return location in self._held

    def forget(self, locations: Iterable[EntryLocation]) -> None:
        """These entries were received and will not be handed out; they stay pending."""
        with self._lock:
            self._held.difference_update(locations)

    def hand_out(self, location: EntryLocation) -> None:
        """The user gets this message now; with ``delayed``, its time begins."""
        if self._mode is AutoCommit.DELAYED:
            with self._lock:
                self._aging.append((time.monotonic() + self._delay, location))

    def settle(self, location: EntryLocation) -> None:
        """This entry is not a message, so that nobody will acknowledge it: it is committed in every mode."""
        if self._mode is not AutoCommit.IMMEDIATE:
            with self._lock:
                self._settled[location] = None

    def acknowledge(self, location: EntryLocation) -> None:
        """The user is done with this message.

        Raises:
            InvalidOptionError: with ``delayed``, which acknowledges by itself.
        """
        if self._mode is AutoCommit.DELAYED:
            raise InvalidOptionError(
                "auto_commit is 'delayed', which acknowledges by itself",
                remedy="Do not call ack, or set auto_commit to rolling or disabled.",
                auto_commit_delay_seconds=self._delay,
            )
        if self._mode is not AutoCommit.IMMEDIATE:
            with self._lock:
                self._acknowledged[location] = None

    def check_manual(self) -> None:
        """Refuse to commit by hand where it is done automatically.

        Raises:
            InvalidOptionError: with ``delayed`` and ``rolling``.
        """
        if self._mode in {AutoCommit.DELAYED, AutoCommit.ROLLING}:
            raise InvalidOptionError(
                f"auto_commit is {self._mode.value!r}, which commits by itself",
                remedy="Do not call commit, or set auto_commit to disabled.",
                auto_commit_interval_seconds=self._interval,
            )

    def acknowledged(self) -> list[EntryLocation]:
        """The entries that a commit by hand sends."""
        with self._lock:
            return [*self._settled, *self._acknowledged]

    def due(self, *, is_last: bool = False) -> list[EntryLocation]:
        """The entries that an automatic commit sends now.

        Args:
            is_last: there will be no later commit, so that the interval does not matter; the delay does.
        """
        now = time.monotonic()
        with self._lock:
            while self._aging and self._aging[0][0] <= now:
                self._acknowledged[self._aging.popleft()[1]] = None
            if self._mode is AutoCommit.DISABLED or not (is_last or now >= self._next_commit):
                return list(self._settled)
            self._next_commit = now + self._interval
            return [*self._settled, *self._acknowledged]

    def committed(self, locations: Iterable[EntryLocation]) -> None:
        """These entries were committed: the server has acknowledged them."""
        with self._lock:
            for location in locations:
                self._held.discard(location)
                self._settled.pop(location, None)
                self._acknowledged.pop(location, None)
