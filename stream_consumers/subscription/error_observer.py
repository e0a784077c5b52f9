"""Reports errors to an observer without ever waiting for it."""

from __future__ import annotations

import enum
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from stream_consumers.options import choose_fields

_log = logging.getLogger(__name__)


class ErrorScope(str, enum.Enum):
    """The operation that failed (eventbus's scopes).

    ``read``: reading entries, or a malformed entry. ``reclaim``: taking entries over, keeping them by a heartbeat, or
    delivering them again. ``ack``: acknowledging. ``dead_letter``: publishing a dead letter. ``handler``: the handler
    raised. ``drop``: the subscription was garbage-collected without being closed.

    Example:
        >>> ErrorScope("handler") is ErrorScope.HANDLER
        True
    """

    READ = "read"
    RECLAIM = "reclaim"
    ACK = "ack"
    DEAD_LETTER = "dead_letter"
    HANDLER = "handler"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """One error, and the subscription and entry that it belongs to.

    Args:
        scope: the operation that failed.
        error: the exception.
        stream: the stream of the subscription.
        group: the group of the subscription.
        consumer: the name of the group's member.
        entry_id: the entry that was worked on; ``None`` if the error does not belong to one.
        attempt: the number of the entry's delivery, from 1.

    Example:
        >>> report = ErrorReport(ErrorScope.HANDLER, ValueError("no"), "orders", "billing", "me", "7-0", 2)
        >>> report.scope.value, report.attempt
        ('handler', 2)
    """

    scope: ErrorScope
    error: BaseException
    stream: str
    group: str
    consumer: str
    entry_id: str | None = None
    attempt: int | None = None

    def __post_init__(self) -> None:
        choose_fields(self, scope=ErrorScope)


ErrorObserver = Callable[[ErrorReport], None]


def log_error(report: ErrorReport) -> None:
    """The default observer: a warning in the log.

    Example:
        >>> observe: ErrorObserver = log_error
        >>> observe(ErrorReport(ErrorScope.READ, ValueError("no"), "orders", "billing", "me"))
    """
    place = f" entry {report.entry_id} (attempt {report.attempt})" if report.entry_id else ""
    _log.warning("%s of %r as %r:%s %s", report.scope.value, report.stream, report.group, place, report.error)


class ObserverThread:
    """Calls an observer on a thread of its own.

    What it raises is logged once; reports that it is too slow for are dropped.

    Args:
        observer: gets the reports in order.
        capacity: the most reports that may wait for it.
    """

    def __init__(self, observer: ErrorObserver, *, capacity: int = 1000) -> None:
        self.dropped = 0
        self._observer, self._capacity = observer, capacity
        # A SimpleQueue may be put to from anywhere, also while garbage is collected.
        self._reports: queue.SimpleQueue[ErrorReport | None] = queue.SimpleQueue()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="error-observer", daemon=True)
        self._thread.start()

    def report(self, report: ErrorReport) -> None:
        """Pass a report on to the observer; never waits, never raises."""
        if self._reports.qsize() >= self._capacity:
            if not self.dropped:
                _log.warning("the error observer is too slow: reports are dropped (capacity=%d)", self._capacity)
            self.dropped += 1
        else:
            self._reports.put(report)

    def close(self, timeout_seconds: float) -> None:
        """Wait at most ``timeout_seconds`` until the observer has got every report."""
        self._reports.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, timeout_seconds))

    def _run(self) -> None:
        while (report := self._reports.get()) is not None:
            try:
                self._observer(report)
            except BaseException as error:  # noqa: BLE001 - an observer must not end what it observes
                if not self._has_failed:
                    _log.warning("the error observer raised %r; later errors of it are not logged", error)
                self._has_failed = True
