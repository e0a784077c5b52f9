"""Trying again within a run what failed for a reason that may be gone soon: a broker that is restarted, a lost answer.

Nothing is retried but whole steps that begin with a look into the ledger, as those of a new run do, so that an outage
is no different from a run that was killed and started again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from spark_jobs.batches.ingestion import Waiting
from stream_consumers.errors import SparkEndedError, StreamAssetsError, Transient

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Retries:
    """The budget for one outage: tries with growing pauses, until something succeeds or the time is over.

    Only errors that are :class:`stream_consumers.errors.Transient` are tried again.

    Args:
        seconds: how long to try from the first error on; 0 for not at all.
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
        """Something succeeded: the next outage has the whole budget again."""
        self._since: float | None = None
        self._tries = 0

    def pause(self, error: StreamAssetsError) -> Iterator[Waiting]:
        """Yield why the run waits, then wait for the next try.

        Raises:
            StreamAssetsError: the error, if it is none to be tried again, or the budget is used up; it says then how
                long it was tried.
        """
        # A session of a Spark that has ended does not come back: the next run makes another one.
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
        pause = min(FIRST_PAUSE_SECONDS * 2**self._tries, LONGEST_PAUSE_SECONDS)
        # A server may say how long it refuses requests, and refuse for longer if it gets more of them.
        asked = error.facts.get("retry_after")
        pause = min(max(pause, asked) if isinstance(asked, int) else pause, left)
        self._tries += 1
        yield Waiting(
            f"{error} It is tried again in {pause:.0f} s; tried for {tried:.0f} s so far, "
            f"of {self._seconds:g} s at most"
        )
        self._sleep(pause)

    def call(self, step: Callable[[], T]) -> Generator[Waiting, None, T]:
        """Yield each wait; return what ``step`` returns, as soon as it does not fail.

        It does not give the budget back: a plan that can be made says nothing of whether it can be read.

        Raises:
            StreamAssetsError: see :meth:`pause`.
        """
        while True:
            try:
                return step()
            except StreamAssetsError as error:
                yield from self.pause(error)


def result_of(steps: Generator[Waiting, None, T], notify: Callable[[str], object] = _log.warning) -> T:
    """Run steps to their end, for callers that yield no events themselves.

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
