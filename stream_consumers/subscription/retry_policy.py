"""How often, and how soon, a message is given to its handler again."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from stream_consumers.errors import InvalidOptionError

MAX_BACKOFF_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The budget of a message, counted by the backend's delivery counter: what a killed process got counts, too.

    Args:
        max_retries: how often it is delivered after the first time; 0 makes the first failure a dead letter, and one
            whose process was killed as well.
        backoff_seconds: before the first retry, twice as long before each next one, give or take a half (eventbus's
            rule).
        max_backoff_seconds: the longest, at most 5.

    Raises:
        InvalidOptionError: a number that makes no sense.

    Example:
        >>> RetryPolicy(max_retries=2).max_attempts
        3
        >>> RetryPolicy(backoff_seconds=0.1).longest_backoff_seconds
        0.6
    """

    max_retries: int = 3
    backoff_seconds: float = 0.1
    max_backoff_seconds: float = MAX_BACKOFF_SECONDS

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise InvalidOptionError(f"max_retries={self.max_retries} is no number of retries", remedy="Use 0 or more.")
        for name in ("backoff_seconds", "max_backoff_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0) or (name[0] == "m" and value > MAX_BACKOFF_SECONDS):
                raise InvalidOptionError(
                    f"{name}={value} is not a time to wait", remedy=f"Use 0 to {MAX_BACKOFF_SECONDS:g}."
                )

    @property
    def max_attempts(self) -> int:
        """How often a message is delivered at most."""
        return self.max_retries + 1

    @property
    def longest_backoff_seconds(self) -> float:
        """The longest wait that can come out."""
        return round(min(1.5 * self._middle(max(1, self.max_retries)), self.max_backoff_seconds), 9)

    def delay(self, attempt: int) -> float:
        """Seconds to wait after so many failed attempts."""
        middle = self._middle(attempt)
        return min(middle / 2 + random.uniform(0.0, middle), self.max_backoff_seconds)  # noqa: S311 - spreads load

    def _middle(self, attempt: int) -> float:
        return min(self.backoff_seconds * 2.0 ** min(attempt - 1, 64), self.max_backoff_seconds)
