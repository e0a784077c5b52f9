"""How many messages are being worked on: claimed before anything is fetched."""

from __future__ import annotations

import threading
import time


class InFlight:
    """Places for messages, and which entries are in them.

    Args:
        limit: how many places there are.

    Example:
        >>> places = InFlight(2)
        >>> places.claim(0.0), places.claim(0.0)
        (2, 0)
        >>> places.enter("1-0"), places.enter("1-0"), places.ids
        (True, False, ['1-0'])
        >>> places.release(1)
        >>> places.leave("1-0")
        >>> places.wait_until_empty(0.0)
        True
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._entries: set[str] = set()
        self._is_woken = False
        self._changed = threading.Condition()

    @property
    def ids(self) -> list[str]:
        """The entries that are being worked on."""
        with self._changed:
            return sorted(self._entries)

    def claim(self, timeout: float) -> int:
        """Take all free places, waiting at most so many seconds for one; how many they are."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._free <= 0 and not self._is_woken:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            claimed, self._free = max(0, self._free), min(0, self._free)
            return claimed

    def enter(self, entry_id: str) -> bool:
        """Put an entry into a claimed place; false if it is in one already."""
        with self._changed:
            if entry_id in self._entries:
                return False
            self._entries.add(entry_id)
            return True

    def leave(self, entry_id: str) -> None:
        """The entry is done with, and its place is free."""
        with self._changed:
            self._entries.discard(entry_id)
            self._free += 1
            self._changed.notify_all()

    def release(self, places: int) -> None:
        """Give claimed places back that were not needed."""
        with self._changed:
            self._free += places
            self._changed.notify_all()

    def wake(self) -> None:
        """Let nobody wait for a place any more."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def wait_until_empty(self, timeout: float) -> bool:
        """Whether nothing was being worked on within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._entries, timeout)
