"""Runs that stay: how long a run waits for more when everything is in the table, and how it looks for it."""

from __future__ import annotations

import time
from collections.abc import Callable

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
        >>> looks = iter([False, False, True])
        >>> Linger(60, sleep=lambda seconds: None).until(lambda: next(looks))
        True
        >>> Linger().until(lambda: True)
        False
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

    def until(self, has_more: Callable[[], bool], *, on_idle: Callable[[], object] = lambda: None) -> bool:
        """Wait until there is more; ``False`` if the time is over before.

        Args:
            has_more: looks; asked at pauses that grow to a quarter of a second.
            on_idle: called after each look that found nothing.
        """
        pause = SHORTEST_PAUSE_SECONDS
        while not self.is_over:
            if has_more():
                return True
            on_idle()
            self._sleep(min(pause, max(0.0, self._end - self._clock())))
            pause = min(pause * _GROWTH, LONGEST_PAUSE_SECONDS)
        return False
