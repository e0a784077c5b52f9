"""The lock of consumers whose client serves one thread at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# What a poll that does not wait gives another one that does not wait either, to end.
BRIEF_SECONDS = 0.05


class PollingLock:
    """Lets one thread at a time use a client, without anybody waiting for a thread that waits for a message.

    The thread that polls keeps the lock while it waits. Beside it, a poll that does not wait is refused at once, and
    who moves the client (a seek, a pause, closing) is the next one, however many threads poll: it waits for one poll at
    most. A thread that has the lock may take it again, since clients call back while they are polled.

    Example:
        >>> lock = PollingLock()
        >>> lock.acquire(5.0), lock.acquire(0)
        (True, True)
        >>> beside = threading.Thread(target=lambda: print(lock.acquire(0)))
        >>> beside.start(); beside.join()
        False
        >>> lock.release(); lock.release()
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._owner: int | None = None
        self._depth = 0
        self._is_brief = False
        self._movers = 0

    def acquire(self, seconds: float) -> bool:
        """Take the lock for a poll that waits so long; returns whether that was possible within this time.

        Without time it is refused if anybody has the lock who may wait. For a poll that does not wait either it waits
        a moment, so that threads that share what there is do not take each other for the end of it.
        """
        me = threading.get_ident()
        with self._changed:
            if self._owner != me:
                deadline = time.monotonic() + (seconds or BRIEF_SECONDS)
                while self._owner is not None or self._movers:
                    left = deadline - time.monotonic()
                    if left <= 0 or not (seconds or (self._is_brief and not self._movers)):
                        return False
                    self._changed.wait(left)
                self._owner, self._is_brief = me, not seconds
            self._depth += 1
            return True

    def release(self) -> None:
        """Give it back, once for each time that it was taken."""
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Within, nobody polls: the client may be moved."""
        me = threading.get_ident()
        with self._changed:
            if self._owner != me:
                self._movers += 1
                try:
                    self._changed.wait_for(lambda: self._owner is None)
                finally:
                    self._movers -= 1
                    self._changed.notify_all()
                self._owner, self._is_brief = me, False
            self._depth += 1
        try:
            yield
        finally:
            self.release()
