"""What a name holds: the batch that is being claimed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stream_consumers.batches import Range
from stream_consumers.messages import Shard
from stream_consumers.redis.batches import Slice
from stream_consumers.redis.claim_name import ClaimName


@dataclass
class Held:
    """What a name holds by now: the batch that is being claimed.

    Args:
        name: the consumer name.
        records: the most entries.
        room: the most bytes; one entry is always taken.
        ids: what it holds.
        slices: how to read that.
        doubtful: where entries came from clients of another kind: they may have had them from one of our names, so that
            only the table can tell whether they are written.
        used: bytes.
    """

    name: ClaimName
    records: int
    room: int
    ids: dict[Shard, list[bytes]] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    doubtful: dict[Shard, Range] = field(default_factory=dict)
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
