"""Signals that ask a run to end: the batch in hand is finished first, within a deadline."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

FINISH_SECONDS = 20.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class HeldSignals:
    """While it is entered, SIGINT and SIGTERM wait until it is left; a context manager.

    Then they take effect as if they came just then: in Dagster the run is cancelled, in a script there is a
    ``KeyboardInterrupt``, and where SIGTERM would end the process, a ``SystemExit`` with the exit code 143. A second
    signal does not wait, nor does the first one for longer than the deadline, at which the batch is given up: nothing
    of it is in the table, or all of it, and the next run sees which.

    Only the main thread gets signals; in others nothing is held.

    Args:
        seconds: the deadline; the longest that a signal waits.

    Example:
        >>> with HeldSignals() as held:
        ...     held.is_pending
        False
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = FINISH_SECONDS if seconds is None else seconds
        self._handlers: dict[int, Any] = {}
        self._pending: int | None = None
        self._is_entered = False
        self._alarm: tuple[Any, tuple[float, float]] = signal.SIG_DFL, (0.0, 0.0)

    @property
    def is_pending(self) -> bool:
        """Whether a signal waits."""
        return self._pending is not None

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            known = {number: signal.getsignal(number) for number in _SIGNALS}
            # A signal that is ignored, or whose handler is not of Python, stays as it is.
            self._handlers = {n: handler for n, handler in known.items() if handler not in (signal.SIG_IGN, None)}
            try:
                for number in self._handlers:
                    signal.signal(number, self._hold)
            except BaseException:
                # A signal that came before is held, and __exit__ is not called.
                self._deliver()
                raise
            self._is_entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._is_entered = False
        self._deliver()

    @contextmanager
    def nothing_in_hand(self) -> Iterator[None]:
        """For pauses: a signal that waits, or that comes meanwhile, takes effect at once."""
        if not self._is_entered:
            yield
            return
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._pending is not None:
            self._deliver()
            return
        self._alarm = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
        self._pending = number
        signal.signal(signal.SIGALRM, lambda *_: self._deliver())
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def _deliver(self) -> None:
        # A signal is held until its handler is back, so that only then it is known whether one waits.
        for number, handler in list(self._handlers.items()):
            signal.signal(number, handler)
            self._handlers.pop(number, None)
        if self._pending is None:
            return
        handler, timer = self._alarm
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        pending, self._pending = self._pending, None
        own = signal.getsignal(pending)
        if callable(own):
            own(pending, None)
        else:
            raise SystemExit(128 + pending)
