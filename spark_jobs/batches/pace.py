"""How large the next batch is: as large as the limits let it be, and no larger than what is written in some time."""

from __future__ import annotations

from dataclasses import replace

from stream_consumers.options import Limits

TARGET_SECONDS = 60.0
FEWEST_RECORDS = 1000
# From one batch to the next, so that one that was slow by chance does little.
MOST_CHANGE = 4.0


class Pace:
    """Adapts the batches of a job to a target time, within its limits.

    The first one is as large as the limits say. One that took longer than the target makes the next one smaller, in
    proportion, and one that was faster lets it grow again. So a slow transform, or a slow cluster, has no batch of an
    hour, which would have to be made anew if the run ends in the middle of it.

    Args:
        limits: the most that a batch holds.
        target_seconds: what a batch may take.

    Example:
        >>> pace = Pace(Limits(max_records=100_000), target_seconds=10)
        >>> pace.limits.max_records
        100000
        >>> pace.took(100_000, 20.0)
        >>> pace.limits.max_records
        50000
        >>> pace.took(50_000, 8.0)
        >>> pace.limits.max_records
        62500
    """

    def __init__(self, limits: Limits, *, target_seconds: float = TARGET_SECONDS) -> None:
        self._limits = limits
        self._target = target_seconds
        self._records = limits.max_records

    @property
    def limits(self) -> Limits:
        """Of the next batch."""
        return replace(self._limits, max_records=self._records)

    def took(self, records: int, seconds: float) -> None:
        """A batch was written.

        Args:
            records: messages that it held, or at most held.
            seconds: from its plan to its commit.
        """
        change = min(MOST_CHANGE, max(1 / MOST_CHANGE, self._target / max(seconds, 0.001)))
        if change > 1 and records < self._records // 2:
            # It was fast because there was little: that says nothing of a large one.
            return
        # Where the bytes are the limit it held fewer than it might have.
        base = self._records if change > 1 else min(self._records, records)
        # A batch of few that was slow, like the first one of a cold session, says little of a large one.
        fewest = max(FEWEST_RECORDS, int(self._records / MOST_CHANGE))
        self._records = min(self._limits.max_records, max(fewest, int(base * change)))
