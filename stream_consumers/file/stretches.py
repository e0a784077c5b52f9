"""What a walk over a ``.ss`` file finds, in stretches, and how much of it becomes one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stream_consumers.batches import Range, total_counts
from stream_consumers.file.format import HEADER_SIZE
from stream_consumers.file.frames import Damage, Frame, Run
from stream_consumers.messages import INTERNAL_KEY, Shard
from stream_consumers.options import Limits

CHECKPOINT_FRAMES = 4096
MOST_STRETCHES = 1024
# Each stretch has a place in every shard: where there are more shards, there are fewer stretches.
FEWEST_STRETCHES, SHARDS_OF_ALL = 16, 100
NOTHING = Range(0, 0)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A place between two frames: every message before ``offset`` has a sequence below ``positions``."""

    offset: int
    positions: Mapping[Shard, int]

    def is_before(self, gaps: Mapping[Shard, Range]) -> bool:
        """Whether no message of ``gaps`` lies before this place."""
        return all(shard not in gaps or end <= gaps[shard].start for shard, end in self.positions.items())


START = Checkpoint(HEADER_SIZE, {})


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a walk has found between two checkpoints, so that a plan need not walk there again.

    Args:
        begin: where it begins.
        end: where it ends.
        counts: the messages of each shard; ``None`` if there is damage among them.
        records: all of them.
        payload_bytes: the bytes of their payloads.
    """

    begin: Checkpoint
    end: Checkpoint
    counts: Mapping[Shard, int] | None = None
    records: int = 0
    payload_bytes: int = 0

    def bounds(self) -> Mapping[Shard, tuple[int, int]]:
        """Of each shard a sequence that is not after its first one, and its last one."""
        before, behind = self.begin.positions, self.end.positions
        return {shard: (before.get(shard, 0), behind[shard] - 1) for shard in self.counts or ()}

    def join(self, other: Stretch) -> Stretch:
        """This one and the one behind it as one."""
        counts = total_counts((self.counts, other.counts))
        records, payload_bytes = self.records + other.records, self.payload_bytes + other.payload_bytes
        return Stretch(self.begin, other.end, counts, records, payload_bytes)


class Walk:
    """Finds the places at which a walk over the items of a file may be resumed, later and by another process.

    That is behind a message, never behind the end-of-stream message (an appending producer cuts it off), nor between
    damage whose place in a shard is unknown and the message that it is counted with.
    """

    def __init__(self, begin: Checkpoint, streams: frozenset[str]) -> None:
        self.offset = begin.offset
        self.open_damage: Damage | None = None
        self._streams = streams
        self._positions = dict(begin.positions)
        self._ahead: dict[Shard, int] = {}

    def is_own(self, item: Frame | Damage) -> bool:
        """Whether the item counts towards these streams."""
        return item.shard is None or item.shard.stream in self._streams

    def step(self, item: Frame | Damage) -> None:
        """Step over ``item``."""
        shard, sequence = item.shard, item.sequence
        if isinstance(item, Frame) and item.is_control:
            return
        if self.open_damage is not None or shard is None or sequence is None:
            self._step_with_damage(item)
            return
        self._positions[shard] = sequence + 1
        self.offset = item.end

    def step_run(self, bounds: Mapping[Shard, tuple[int, int]], end: int) -> None:
        """Step over messages up to ``end``, where no damage is open: of each shard, from one sequence to another."""
        self._positions.update((shard, last + 1) for shard, (_, last) in bounds.items())
        self.offset = end

    def step_stretch(self, stretch: Stretch) -> None:
        """Step over what another walk has found, where no damage is open."""
        self._positions = dict(stretch.end.positions)
        self.offset = stretch.end.offset

    def _step_with_damage(self, item: Frame | Damage) -> None:
        if item.shard is not None and item.sequence is not None:
            self._ahead[item.shard] = item.sequence + 1
        if self.is_own(item):
            self.open_damage = item if item.sequence is None and isinstance(item, Damage) else None
        if self.open_damage is None:
            self._positions.update(self._ahead)
            self._ahead.clear()
            self.offset = item.end

    def checkpoint(self) -> Checkpoint:
        """The last place at which the walk may be resumed."""
        return Checkpoint(self.offset, dict(self._positions))


class Stretches:
    """What a walk from ``begin`` finds of these streams, in stretches of some thousand messages and more."""

    def __init__(self, begin: Checkpoint, streams: frozenset[str]) -> None:
        self._begin = begin
        # Control messages have no places.
        self._streams = streams - {INTERNAL_KEY}
        self._found: list[Stretch] = []
        self._size = CHECKPOINT_FRAMES
        self._start()

    def _start(self) -> None:
        self._counts: dict[Shard, int] = {}
        self._has_damage = False
        self._payload_bytes = self._messages = 0

    def add(self, block: Run | Frame | Damage, walk: Walk) -> None:
        """Count ``block``, which ``walk`` has stepped over."""
        if isinstance(block, Damage):
            self._has_damage = True
        elif (block.stream if isinstance(block, Run) else block.shard.stream) in self._streams:
            _add(self._counts, block.counts if isinstance(block, Run) else {block.shard: 1})
            self._payload_bytes += _payload_bytes(block)
        self._messages += len(block.sizes) if isinstance(block, Run) else 1
        if self._messages >= self._size and walk.open_damage is None:
            self._cut(walk.checkpoint())

    def _cut(self, end: Checkpoint) -> None:
        counts = None if self._has_damage else self._counts
        self._found.append(Stretch(self._begin, end, counts, sum(self._counts.values()), self._payload_bytes))
        self._begin = end
        self._start()
        most = max(FEWEST_STRETCHES, MOST_STRETCHES // (1 + len(end.positions) // SHARDS_OF_ALL))
        if len(self._found) >= most:
            # They are kept while the batches are planned: their number must not grow with the file.
            pairs = [one.join(other) for one, other in zip(self._found[::2], self._found[1::2])]
            self._found = pairs + self._found[2 * len(pairs) :]
            self._size *= 2

    def up_to(self, end: Checkpoint) -> list[Stretch]:
        """All of them, the last one up to ``end``, where the walk has ended."""
        if end.offset > self._begin.offset:
            self._cut(end)
        return self._found


class PlannedBatch:
    """What becomes one batch of a walk from ``begin`` over the items of a file: messages in ``gaps``, within limits."""

    def __init__(self, begin: Checkpoint, gaps: Mapping[Shard, Range], limits: Limits, streams: frozenset[str]) -> None:
        self.walk = Walk(begin, streams)
        self.cuts = [begin]
        self.counts: list[dict[Shard, int]] = [{}]
        self.damaged: set[int] = set()
        self.ends: dict[Shard, int] = {}
        self.records = 0
        self.is_full = False
        self._bytes = 0
        self._cut_at = 0
        self._behind: set[Shard] = set()
        self._gaps = gaps
        self._limits = limits

    @property
    def is_over(self) -> bool:
        """Whether it is full, or nothing of the gaps lies behind."""
        return self.is_full or (len(self._behind) == len(self._gaps) and self.walk.open_damage is None)

    def take_stretch(self, stretch: Stretch) -> bool:
        """Step over a stretch in one go; ``False`` if there is damage, or the batch, or a gap, begins or ends in it."""
        if stretch.counts is None or not self._is_whole(stretch.bounds(), stretch.counts, stretch.payload_bytes):
            return False
        self.walk.step_stretch(stretch)
        self._cover(stretch.bounds(), stretch.counts, stretch.payload_bytes)
        return True

    def take(self, block: Run | Frame | Damage) -> bool:
        """Step over ``block`` as far as the batch reaches; whether it may go on behind it."""
        if isinstance(block, Damage):
            self.damaged.add(len(self.cuts) - 1)
        if not isinstance(block, Run):
            return self._take_item(block, _payload_bytes(block))
        bounds, counts, size = block.bounds, block.counts, _payload_bytes(block)
        if self.walk.open_damage is not None or not self._is_whole(bounds, counts, size):
            return all(map(self._take_item, block.frames(), block.sizes.tolist()))
        self.walk.step_run(bounds, block.end)
        self._cover(bounds, counts, size)
        return not self.is_over

    def _is_whole(self, bounds: Mapping[Shard, tuple[int, int]], counts: Mapping[Shard, int], size: int) -> bool:
        """Whether of these messages all belong to the batch, or none, as they are before its gaps."""
        if self._is_before_gaps(bounds):
            return True
        records, payload_bytes = self.records + sum(counts.values()), self._bytes + size
        is_within_limits = records <= self._limits.max_records and payload_bytes <= self._limits.max_bytes
        return is_within_limits and is_within(bounds, self._gaps)

    def _is_before_gaps(self, bounds: Mapping[Shard, tuple[int, int]]) -> bool:
        return all(shard not in self._gaps or last < self._gaps[shard].start for shard, (_, last) in bounds.items())

    def _cover(self, bounds: Mapping[Shard, tuple[int, int]], counts: Mapping[Shard, int], size: int) -> None:
        """Count messages that were stepped over, if they belong to the batch."""
        if self._is_before_gaps(bounds):
            return
        ends = {shard: last + 1 for shard, (_, last) in bounds.items()}
        self.ends.update(ends)
        self._behind.update(shard for shard, end in ends.items() if end == self._gaps[shard].end)
        self._count(counts, size)

    def _take_item(self, item: Frame | Damage, payload_bytes: int) -> bool:
        shard, sequence = item.shard, item.sequence
        if shard is not None and sequence is not None and sequence in self._gaps.get(shard, NOTHING):
            limits = self._limits
            if self.records and (self.records >= limits.max_records or self._bytes + payload_bytes > limits.max_bytes):
                self.is_full = True
                return False
            self.ends[shard] = sequence + 1
            self.walk.step(item)
            self._count({shard: 1}, payload_bytes)
        else:
            self.walk.step(item)
        if shard is not None and shard in self._gaps and sequence is not None and sequence + 1 >= self._gaps[shard].end:
            self._behind.add(shard)
        return not self.is_over

    def _count(self, counts: Mapping[Shard, int], size: int) -> None:
        self.records += sum(counts.values())
        self._bytes += size
        _add(self.counts[-1], counts)
        if self.records - self._cut_at >= CHECKPOINT_FRAMES and self.walk.open_damage is None:
            self.cuts.append(self.walk.checkpoint())
            self.counts.append({})
            self._cut_at = self.records


def _add(total: dict[Shard, int], counts: Mapping[Shard, int]) -> None:
    """Count some more, in place: there may be thousands of shards."""
    for shard, count in counts.items():
        total[shard] = total.get(shard, 0) + count


def _payload_bytes(block: Run | Frame | Damage) -> int:
    if isinstance(block, Run):
        return int(block.sizes.sum())
    return len(block.payload) if isinstance(block, Frame) else block.end - block.offset


def is_within(bounds: Mapping[Shard, tuple[int, int]], ranges: Mapping[Shard, Range]) -> bool:
    """Whether all sequences, from the first to the last one of each shard, are in these ranges."""
    found = ((ranges.get(shard, NOTHING), first, last) for shard, (first, last) in bounds.items())
    return all(part.start <= first and last < part.end for part, first, last in found)
