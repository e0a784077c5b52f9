"""Controls a run over time: retries outages, defers signals, polls while the run lingers, and sizes its batches."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, TypeVar

from spark_jobs.batches.ingestion import Waiting
from stream_consumers.errors import SparkEndedError, StreamAssetsError, Transient
from stream_consumers.options import Limits, check_range

MIN_RETRY_PAUSE_SECONDS = 1.0
MAX_RETRY_PAUSE_SECONDS = 60.0
FINISH_SECONDS = 20.0
"""How long a signal is deferred for the current batch, in seconds."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
MIN_POLL_SECONDS = 0.02
MAX_POLL_SECONDS = 0.25
_POLL_GROWTH = 1.5
TARGET_SECONDS = 60.0
"""How long a batch should take, in seconds."""
MIN_RECORDS = 1000
MAX_CHANGE_FACTOR = 4.0
"""The factor by which a batch may be larger or smaller than the one before it, so that one outlier changes little."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Retries:
    """Retries one outage with growing pauses, until a step succeeds or the time is over.

    Only errors that are :class:`stream_consumers.errors.Transient` are retried. A retry repeats a whole step, which
    reads the ledger first, as in a new run. So an outage has the same effect as a killed run that is started again.

    Args:
        seconds: how long to retry after the first error; 0 to not retry.
        sleep: pauses; for tests.
        clock: the time in seconds; for tests.

    Example:
        >>> from stream_consumers.errors import BrokerUnavailableError
        >>> answers = iter([BrokerUnavailableError("kafka://a does not answer", remedy="Check it."), None, None])
        >>> def ask():
        ...     answer = next(answers)
        ...     if answer is not None:
        ...         raise answer
        ...     return "the end is 7"
        >>> result_of(Retries(60, sleep=lambda seconds: None, clock=lambda: 0.0).call(ask), print)
        kafka://a does not answer. Check it. It is tried again in 1 s; tried for 0 s so far, of 60 s at most
        'the end is 7'
    """

    def __init__(
        self,
        seconds: float,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._sleep = sleep
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Start the retry time again at the next error, after something succeeded."""
        self._since: float | None = None
        self._tries = 0

    def pause(self, error: StreamAssetsError) -> Iterator[Waiting]:
        """Yield why the run waits, then wait for the next try.

        Raises:
            StreamAssetsError: the error, if it cannot be retried. If the retry time is over, it also says for how long
                it was retried.
        """
        # A session whose Spark has ended cannot be used again: the next run creates another one.
        if not isinstance(error, Transient) or isinstance(error, SparkEndedError) or not self._seconds:
            raise error
        now = self._clock()
        self._since = now if self._since is None else self._since
        tried = now - self._since
        left = self._seconds - tried
        if left <= 0:
            raise type(error)(
                f"{error.what.rstrip('.')}, still after {self._tries} more tries in {tried:.0f} s",
                remedy=error.remedy,
                **error.facts,
            ) from error
        pause = min(MIN_RETRY_PAUSE_SECONDS * 2**self._tries, MAX_RETRY_PAUSE_SECONDS)
        # A server may say how long it refuses requests, and refuse them for longer if it gets more of them.
        asked = error.facts.get("retry_after")
        pause = min(max(pause, asked) if isinstance(asked, int) else pause, left)
        self._tries += 1
        yield Waiting(
            f"{error} It is tried again in {pause:.0f} s; tried for {tried:.0f} s so far, "
            f"of {self._seconds:g} s at most"
        )
        self._sleep(pause)

    def call(self, step: Callable[[], T]) -> Generator[Waiting, None, T]:
        """Yield each wait, and return the result of ``step`` as soon as it succeeds.

        Success does not restart the retry time, because a batch that can be planned may still not be readable.

        Raises:
            StreamAssetsError: see :meth:`pause`.
        """
        while True:
            try:
                return step()
            except StreamAssetsError as error:
                yield from self.pause(error)


def result_of(steps: Generator[Waiting, None, T], notify: Callable[[str], object] = _log.warning) -> T:
    """Run a generator of waits to its end, for callers that yield no events themselves.

    Args:
        steps: like those of :meth:`Retries.call`.
        notify: gets the reason of each wait.

    Raises:
        StreamAssetsError: whatever the steps raise.
    """
    while True:
        try:
            notify(next(steps).why)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


class DeferredSignals:
    """A context manager that defers SIGINT and SIGTERM, so that the current batch is finished.

    On exit a deferred signal takes effect as if it came just then: in Dagster the run is cancelled, in a script there
    is a ``KeyboardInterrupt``, and where SIGTERM would end the process, a ``SystemExit`` with the exit code 143. A
    second signal takes effect at once, and the first one after ``seconds`` at the latest. Then the batch is abandoned:
    either nothing of it is in the table or all of it, and the next run sees which.

    Only the main thread gets signals; in other threads nothing is deferred.

    Args:
        seconds: the longest time that a signal is deferred.

    Example:
        >>> with DeferredSignals() as held:
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
        """Whether a signal is deferred at the moment."""
        return self._pending is not None

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            known = {number: signal.getsignal(number) for number in _SIGNALS}
            # Signals that are ignored, or whose handler is not written in Python, are left alone.
            self._handlers = {n: handler for n, handler in known.items() if handler not in (signal.SIG_IGN, None)}
            try:
                for number in self._handlers:
                    signal.signal(number, self._defer)
            except BaseException:
                # A signal that came meanwhile is deferred, and __exit__ is not called.
                self._deliver()
                raise
            self._is_entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._is_entered = False
        self._deliver()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Defer no signals inside, for pauses: one that was deferred, or that comes meanwhile, takes effect at once."""
        if not self._is_entered:
            yield
            return
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self._pending is not None:
            self._deliver()
            return
        self._alarm = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
        self._pending = number
        signal.signal(signal.SIGALRM, lambda *_: self._deliver())
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def _deliver(self) -> None:
        # A signal is deferred until its old handler is set, so that only then is it known whether one is pending.
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


class IdleWait:
    """The time for which a run lingers for more messages, from now on, including the time for writing them.

    When it is over, the run writes everything up to the captured ends and ends, so that the next run begins with fresh
    memory and the newest code.

    Args:
        seconds: 0 for a run that ends as soon as everything is in the table.
        batch_seconds: the least time between two batches that begin after everything was in the table.
        sleep: pauses; for tests.
        clock: the time in seconds; for tests.

    Raises:
        InvalidOptionError: a number of seconds is not finite, or below 0.

    Example:
        >>> now = iter(range(100))
        >>> len(list(IdleWait(3, sleep=lambda seconds: None, clock=lambda: next(now)).polls()))
        1
        >>> list(IdleWait().polls())
        []
    """

    def __init__(
        self,
        seconds: float = 0.0,
        *,
        batch_seconds: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_range("linger_seconds", seconds)
        check_range("batch_seconds", batch_seconds)
        self._sleep = sleep
        self._clock = clock
        self._end = clock() + seconds
        self._batch_seconds = batch_seconds
        self._due_at = 0.0
        self.lingers = seconds > 0

    @property
    def is_over(self) -> bool:
        """Whether the run ends as soon as everything up to the captured ends is in the table."""
        return not self.lingers or self._clock() >= self._end

    @property
    def is_due(self) -> bool:
        """Whether ``batch_seconds`` have passed since :meth:`begin`, or the run no longer lingers."""
        return self.is_over or self._clock() >= self._due_at

    def begin(self) -> None:
        """Begin the time until the next batch is due."""
        self._due_at = self._clock() + self._batch_seconds

    def polls(self) -> Iterator[None]:
        """Yield when it is time to poll, with pauses that grow to ``MAX_POLL_SECONDS``, until the time is over.

        It yields also before a batch is due, so that a caller can report and end meanwhile.
        """
        pause = MIN_POLL_SECONDS
        while not self.is_over:
            yield
            now = self._clock()
            until = self._due_at if now < self._due_at < self._end else self._end
            self._sleep(min(pause, max(0.0, until - now)))
            pause = min(pause * _POLL_GROWTH, MAX_POLL_SECONDS)


class BatchSizer:
    """Adapts the size of a job's batches to a target time, within its limits.

    The first batch is as large as the limits allow. If a batch took longer than the target, the next one is smaller in
    proportion; if it was faster, the next one is larger. So a slow transform, or a slow cluster, never works for an
    hour on one batch, which would be lost if the run ended in the middle of it.

    Args:
        limits: the most that a batch holds.
        target_seconds: how long a batch should take.

    Example:
        >>> sizer = BatchSizer(Limits(max_records=100_000), target_seconds=10)
        >>> sizer.limits.max_records
        100000
        >>> sizer.adapt(100_000, 20.0)
        >>> sizer.limits.max_records
        50000
        >>> sizer.adapt(50_000, 8.0)
        >>> sizer.limits.max_records
        62500
    """

    def __init__(self, limits: Limits, *, target_seconds: float = TARGET_SECONDS) -> None:
        self._limits = limits
        self._target = target_seconds
        self._records = limits.max_records

    @property
    def limits(self) -> Limits:
        """The limits of the next batch."""
        return replace(self._limits, max_records=self._records)

    def adapt(self, records: int, seconds: float) -> None:
        """Choose the size of the next batch, after one was written.

        Args:
            records: the messages in it, or an upper bound of them.
            seconds: the time from its plan to its commit.
        """
        change = min(MAX_CHANGE_FACTOR, max(1 / MAX_CHANGE_FACTOR, self._target / max(seconds, 0.001)))
        if change > 1 and records < self._records // 2:
            # A batch that was fast because it was small shows nothing about a large one.
            return
        # If bytes are the limit, it held fewer messages than the limit allows.
        base = self._records if change > 1 else min(self._records, records)
        # A slow small batch, like the first one of a cold session, shows little about a large one.
        fewest = max(MIN_RECORDS, int(self._records / MAX_CHANGE_FACTOR))
        self._records = min(self._limits.max_records, max(fewest, int(base * change)))
