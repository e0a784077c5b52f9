"""Claiming entries one by one: names that hold what one batch claimed, and what is known of them (Redis)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from stream_consumers.options import check_range

_NAME = re.compile(r"([^/]+)/([1-9][0-9]*)/([0-9a-f]{32})\Z")


@dataclass(frozen=True, order=True, slots=True)
class ClaimName:
    """The consumer name that holds the entries of one batch attempt, so that the ledger can tell what became of them.

    Args:
        member: who claimed.
        number: the number that the batch has on the member's line.
        bid: the batch id.

    Example:
        >>> name = ClaimName("main", 7, "0" * 32)
        >>> ClaimName.parse(str(name).encode()) == name, ClaimName.parse(b"worker-1")
        (True, None)
    """

    member: str
    number: int
    bid: str

    def __str__(self) -> str:
        return f"{self.member}/{self.number}/{self.bid}"

    @classmethod
    def parse(cls, raw: bytes) -> ClaimName | None:
        """Read it back; ``None`` if it is the name of another kind of client, which may be any bytes."""
        match = _NAME.match(raw.decode("utf-8", "replace"))
        return cls(match[1], int(match[2]), match[3]) if match else None


class Backlog(NamedTuple):
    """What a group has before it in one shard.

    Args:
        unread: entries that nobody was given yet; an upper bound if entries were deleted singly.
        pending: entries that somebody was given and has not acknowledged.
    """

    unread: int
    pending: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.unread + self.pending


class Trimmed(NamedTuple):
    """Entries that were removed from a stream before the group was given them.

    Args:
        start: the sequence behind the last one that was given.
        end: what was lost lies below it: the first sequence that is there, or the end where it lay in between.
        entries: how many.
        read: what the group has counted as read; together with ``start`` it tells one loss from the next.
    """

    start: int
    end: int
    entries: int
    read: int


@dataclass(frozen=True, slots=True)
class ClaimPolicy:
    """When entries of somebody else are taken over, and how often one is tried.

    Args:
        min_idle_seconds: entries that nobody touched for so long are taken over; a member that writes touches its own
            three times as often.
        max_deliveries: an entry that was given to so many batches whose process died, at last alone, becomes a dead
            letter; at least 2.

    Raises:
        InvalidOptionError: a value that makes no sense.

    Example:
        >>> [ClaimPolicy(max_deliveries=4).most(1000, deliveries=n) for n in (0, 1, 2, 3)]
        [1000, 1000, 32, 1]
    """

    min_idle_seconds: float = 30.0
    max_deliveries: int = 5

    def __post_init__(self) -> None:
        # A shorter idle time would take entries away from members that are at work.
        check_range("min_idle_seconds", self.min_idle_seconds, at_least=0.1)
        # Fewer deliveries would make dead letters of entries whose process was just killed.
        check_range("max_deliveries", self.max_deliveries, at_least=2)

    @property
    def min_idle_ms(self) -> int:
        """The same in milliseconds."""
        return round(self.min_idle_seconds * 1000)

    def most(self, records: int, *, deliveries: int) -> int:
        """How many entries that were given so often go into one batch: fewer each time, so that the bad one is found.

        Args:
            records: the most in any batch.
            deliveries: how often they were given to somebody.
        """
        left = self.max_deliveries - 1 - deliveries
        # Those that have had their tries are not decoded any more, so that they can do no harm.
        if left < 0:
            return records
        return max(1, round(records ** min(1.0, left / max(1, self.max_deliveries - 2)))) if left else 1
