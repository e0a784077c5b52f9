"""Runs that stay: how long a run waits for more when everything is in the table, and how it looks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from stream_consumers.options import check_range

SHORTEST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 0.25
_GROWTH = 1.5


class Linger:
    """The time that a run has, counted from now, however much of it goes into writing.

    What the run knows of by then is written; then it ends, so that the next one begins with fresh memory and the code
    of that moment.

    Args:
        seconds: 0 for a run that ends as soon as everything is in the table.
        sleep: pauses; for tests.
        clock: the time in seconds; for tests.

    Raises:
        InvalidOptionError: it is no finite number from 0 on.

    Example:
        >>> now = iter(range(100))
        >>> len(list(Linger(3, sleep=lambda seconds: None, clock=lambda: next(now)).looks()))
        1
        >>> list(Linger().looks())
        []
    """

    def __init__(
        self,
        seconds: float = 0.0,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_range("linger_seconds", seconds)
        self._sleep = sleep
        self._clock = clock
        self._end = clock() + seconds
        self._is_staying = seconds > 0

    @property
    def is_over(self) -> bool:
        """Whether the run ends as soon as what it knows of is in the table."""
        return not self._is_staying or self._clock() >= self._end

    def looks(self) -> Iterator[None]:
        """Yield when it is time to look for more, at pauses that grow to a quarter of a second, until it is over."""
        pause = SHORTEST_PAUSE_SECONDS
        while not self.is_over:
            yield
            self._sleep(min(pause, max(0.0, self._end - self._clock())))
            pause = min(pause * _GROWTH, LONGEST_PAUSE_SECONDS)
