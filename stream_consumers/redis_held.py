"""What a name holds: the batch that is being claimed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stream_consumers.claims import ClaimName
from stream_consumers.messages import Shard
from stream_consumers.redis_batches import Slice


@dataclass
class Held:
    """What a name holds by now: the batch that is being claimed.

    Args:
        name: the consumer name.
        records: the most entries.
        room: the most bytes; one entry is always taken.
    """

    name: ClaimName
    records: int
    room: int
    ids: dict[Shard, list[bytes]] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    used: int = 0

    @property
    def count(self) -> int:
        """Entries."""
        return sum(map(len, self.ids.values()))

    def add(self, piece: Slice, ids: Sequence[bytes], size: int) -> None:
        """Entries that were claimed."""
        self.ids.setdefault(piece.shard, []).extend(ids)
        self.slices.append(piece)
        self.used += size
