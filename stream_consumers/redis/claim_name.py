"""Claim mode: the consumer names that hold the entries of one batch, and when entries of others are taken over."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from stream_consumers.options import check_count, check_range

_NAME = re.compile(r"([^/]+)/([1-9][0-9]*)/([0-9a-f]{32})\Z")


@dataclass(frozen=True, order=True, slots=True)
class ClaimName:
    """The consumer name that holds the entries of one batch attempt; the ledger knows whether the batch was written.

    Args:
        member: who claimed.
        number: of the batch in the member's transaction sequence.
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
        """Parse a consumer name; ``None`` if it is the name of another kind of client, which may be any bytes."""
        match = _NAME.match(raw.decode("utf-8", "replace"))
        return cls(match[1], int(match[2]), match[3]) if match else None


class Backlog(NamedTuple):
    """How many entries of a shard a group has not finished.

    Args:
        unread: entries that were not delivered yet; an upper bound if single entries were deleted.
        pending: entries that were delivered and not acknowledged.
    """

    unread: int
    pending: int

    @property
    def total(self) -> int:
        """Unread and pending entries."""
        return self.unread + self.pending


class Trimmed(NamedTuple):
    """Entries that were removed from a stream before they were delivered to the group.

    Args:
        start: the lost entries are at or after it.
        end: the lost entries are before it.
        entries: how many.
        read: how many entries the group counts as read; together with ``start`` it identifies the loss.
        position: the sequence after the last one that was delivered.
    """

    start: int
    end: int
    entries: int
    read: int
    position: int


@dataclass(frozen=True, slots=True)
class ClaimPolicy:
    """When entries of another member are taken over, and how often one is tried.

    Args:
        min_idle_seconds: entries that were idle for this time are taken over; a member that is writing sends
            a heartbeat three times as often.
        max_deliveries: an entry that was in this number of batches whose process crashed becomes a dead letter; it is
            alone in the last of them. At least 2.

    Raises:
        InvalidOptionError: a value is out of range.

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
        check_count("max_deliveries", self.max_deliveries, at_least=2)

    @property
    def min_idle_ms(self) -> int:
        """``min_idle_seconds`` in milliseconds."""
        return round(self.min_idle_seconds * 1000)

    def most(self, records: int, *, deliveries: int) -> int:
        """How many entries that were delivered so often go into one batch: fewer each time, to find the bad one.

        Args:
            records: the most in any batch.
            deliveries: how often they were delivered.
        """
        left = self.max_deliveries - 1 - deliveries
        # Entries that were tried often enough are not decoded any more, so that they can do no harm.
        if left < 0:
            return records
        return max(1, round(records ** min(1.0, left / max(1, self.max_deliveries - 2)))) if left else 1
