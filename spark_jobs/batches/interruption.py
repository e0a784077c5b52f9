"""Signals that ask a run to end: the batch in hand is finished first, within a deadline."""

from __future__ import annotations

import signal
import threading
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
        self._alarm = (0.0, 0.0)

    @property
    def is_pending(self) -> bool:
        """Whether a signal waits."""
        return self._pending is not None

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            known = {number: signal.getsignal(number) for number in _SIGNALS}
            # A signal that is ignored, or whose handler is not of Python, stays as it is.
            self._handlers = {n: handler for n, handler in known.items() if handler not in (signal.SIG_IGN, None)}
            for number in self._handlers:
                signal.signal(number, self._hold)
        return self

    def __exit__(self, *error: object) -> None:
        self._deliver()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._pending is not None:
            self._deliver()
            return
        self._pending = number
        self._handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, lambda *_: self._deliver())
        self._alarm = signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def _deliver(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            signal.setitimer(signal.ITIMER_REAL, *self._alarm)
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if pending is None:
            return
        if callable(handlers[pending]):
            handlers[pending](pending, None)
        else:
            raise SystemExit(128 + pending)
