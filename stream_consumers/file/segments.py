"""Segments of a ``.ss`` file: the messages that a scan finds in them, and how they make up a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from stream_consumers.batches import Range, add_counts
from stream_consumers.file.format import HEADER_SIZE
from stream_consumers.file.scanner import NO_MISSING, Damage, Frame, Missing, Run, greatest_next
from stream_consumers.messages import INTERNAL_KEY, Shard
from stream_consumers.options import Limits

CHECKPOINT_FRAMES = 4096
MAX_SEGMENTS = 1024
SHARDS_OF_ALL = 100
"""Each segment keeps a position of every shard, so a file with more shards has fewer segments."""
EMPTY_RANGE = Range(0, 0)

Block = Run | Frame | Damage
Bounds = Mapping[Shard, tuple[int, int]]
"""The first and the last sequence of each shard."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An offset between two frames.

    Args:
        offset: the offset.
        positions: for each shard of the wanted streams, a sequence above those of all its messages before the offset.
        missing: how many sequences the shards may lack because of damage before the offset.
    """

    offset: int
    positions: Mapping[Shard, int]
    missing: Missing = NO_MISSING

    def is_before(self, gaps: Mapping[Shard, Range]) -> bool:
        """Return whether no message of ``gaps`` is before this checkpoint."""
        return all(shard not in gaps or end <= gaps[shard].start for shard, end in self.positions.items())


START = Checkpoint(HEADER_SIZE, {})


@dataclass(frozen=True, slots=True)
class Segment:
    """The messages of the wanted streams between two checkpoints, so that a plan need not scan again.

    Args:
        begin: the checkpoint at its begin.
        end: the checkpoint at its end.
        bounds: the first and the last sequence of each shard.
        counts: the number of sequences of each shard, including damaged messages.
        payload_bytes: the bytes of their payloads.
        has_damage: whether the segment contains damage.
    """

    begin: Checkpoint
    end: Checkpoint
    bounds: Bounds
    counts: Mapping[Shard, int]
    payload_bytes: int
    has_damage: bool

    def may_lack(self, gaps: Mapping[Shard, Range]) -> bool:
        """Return whether damage in the segment may be a message of a gap, or come before one."""
        positions = self.end.positions
        return any(
            shard not in positions or gap.start <= greatest_next(shard, positions[shard] - 1, self.end.missing)
            for shard, gap in gaps.items()
        )


class SegmentScan:
    """Divides the items of a file into segments between checkpoints, from which a scan may resume.

    A checkpoint is after a message, never after the end-of-stream message (an appending producer cuts it off), nor
    between damage without a known shard and sequence and the message that it counts with.

    Args:
        begin: the first checkpoint.
        streams: the wanted streams.
        frames: the minimum number of messages in a segment.
        span: the minimum size of a segment in bytes, for few shards.

    Attributes:
        open_damage: damage without a known sequence that no message has followed yet.
        last_damage: the last damage without a known sequence.
        offset: the last offset at which a segment could end.
        positions: for each shard of the wanted streams, a sequence above those of its messages so far.
    """

    def __init__(self, begin: Checkpoint, streams: frozenset[str], *, frames: int = 1, span: int = 0) -> None:
        self.open_damage: Damage | None = None
        self.last_damage: Damage | None = None
        self._begin = begin
        self.offset = begin.offset
        self.positions = dict(begin.positions)
        self._missing = self._missing_ahead = begin.missing.total
        self._missing_before = dict(begin.missing.before)
        # Control messages have no sequences.
        self._streams = streams - {INTERNAL_KEY}
        self._frames, self._span = frames, span
        self._start_segment()

    def segments(self, blocks: Iterable[Block]) -> Iterator[Segment]:
        """Divide ``blocks`` into segments; items after the last checkpoint are left out."""
        for block in blocks:
            if isinstance(block, Run) and self.open_damage is None:
                self._step_run(block)
            else:
                for item in items_of(block):
                    self._step(item)
            span = self._span * (1 + len(self.positions) // SHARDS_OF_ALL)
            is_long = self._messages >= self._frames and self.offset - self._begin.offset >= max(1, span)
            if is_long and self.open_damage is None:
                yield self._end_segment()
        if self.offset > self._begin.offset:
            yield self._end_segment()

    def _start_segment(self) -> None:
        self._bounds: dict[Shard, tuple[int, int]] = {}
        self._counts: dict[Shard, int] = {}
        self._messages = self._payload_bytes = 0
        self._has_damage = False

    def _end_segment(self) -> Segment:
        begin, self._begin = self._begin, self.checkpoint()
        found = Segment(begin, self._begin, self._bounds, self._counts, self._payload_bytes, self._has_damage)
        self._start_segment()
        return found

    def checkpoint(self) -> Checkpoint:
        """Return the last checkpoint at which a segment could end."""
        return Checkpoint(self.offset, dict(self.positions), Missing(self._missing, dict(self._missing_before)))

    def _step_run(self, run: Run) -> None:
        self.offset = run.end
        self._messages += len(run.sizes)
        if run.stream in self._streams:
            self.positions.update((shard, last + 1) for shard, (_, last) in run.bounds.items())
            if self._missing:
                self._missing_before.update(dict.fromkeys(run.bounds, self._missing))
            self._count(run.bounds, run.counts, int(run.sizes.sum()))

    def _step(self, item: Frame | Damage) -> None:
        shard, sequence = item.shard, item.sequence
        if isinstance(item, Frame) and item.is_control:
            return
        is_wanted = shard is None or shard.stream in self._streams
        self._messages += 1
        self._has_damage |= isinstance(item, Damage)
        if is_wanted and isinstance(item, Damage):
            self._missing_ahead += item.missing
        if is_wanted and (shard is None or sequence is None):
            assert isinstance(item, Damage)
            self.open_damage = self.last_damage = item
        elif is_wanted and shard is not None and sequence is not None:
            self.open_damage, self._missing = None, self._missing_ahead
            self.positions[shard] = sequence + 1
            if self._missing:
                self._missing_before[shard] = self._missing
            self._count({shard: (sequence, sequence)}, {shard: 1}, _payload_bytes(item))
        if self.open_damage is None:
            self.offset = item.end

    def _count(self, bounds: Bounds, counts: Mapping[Shard, int], payload_bytes: int) -> None:
        for shard, (first, last) in bounds.items():
            self._bounds[shard] = (self._bounds[shard][0] if shard in self._bounds else first, last)
        add_counts(self._counts, counts)
        self._payload_bytes += payload_bytes


@dataclass(slots=True)
class BatchPart:
    """A part of a batch that can be read alone; ``counts`` and ``records`` count only messages of the batch."""

    begin: Checkpoint
    end: Checkpoint
    counts: dict[Shard, int] = field(default_factory=dict)
    records: int = 0
    has_damage: bool = False


class PlannedBatch:
    """Collects segments into one batch: the messages in ``gaps``, within limits.

    Args:
        gaps: the messages that the table lacks.
        limits: the limits of the batch.
        is_begun: whether the batch begins with the first segment. If not, it begins with the first one that has one of
            its messages, because damage before that is not the group's.
    """

    def __init__(self, gaps: Mapping[Shard, Range], limits: Limits, *, is_begun: bool) -> None:
        self.parts: list[BatchPart] = []
        self.ends: dict[Shard, int] = {}
        self.records = 0
        self.is_full = False
        self._bytes = 0
        self._complete: set[Shard] = set()
        self._gaps, self._limits = gaps, limits
        self._is_begun = is_begun

    @property
    def is_over(self) -> bool:
        """Whether the batch is full or has all messages of the gaps."""
        return self.is_full or len(self._complete) == len(self._gaps)

    def take(self, segment: Segment) -> bool:
        """Add a segment; return ``False`` if the batch begins or ends within it, or a gap does."""
        inside: dict[Shard, int] = {}
        for shard, (first, last) in segment.bounds.items():
            gap = self._gaps.get(shard, EMPTY_RANGE)
            if first in gap and last in gap:
                inside[shard] = segment.counts[shard]
            elif first < gap.end and last >= gap.start:
                return False
        if inside and not self._is_begun and segment.has_damage and len(inside) < len(segment.bounds):
            return False
        count = sum(inside.values())
        size = segment.payload_bytes if inside else 0
        is_within_limits = (
            self.records + count <= self._limits.max_records and self._bytes + size <= self._limits.max_bytes
        )
        # A batch has at least one message, whatever its size.
        if count and not is_within_limits and (self.records or count > 1):
            return False
        self.records += count
        self._bytes += size
        for shard, (_, last) in segment.bounds.items():
            if shard in inside:
                self.ends[shard] = last + 1
            if shard in self._gaps and last + 1 >= self._gaps[shard].end:
                self._complete.add(shard)
        self._extend(segment, inside)
        return True

    def _extend(self, segment: Segment, inside: Mapping[Shard, int]) -> None:
        if not self._is_begun:
            self.parts.clear()
        self._is_begun = self._is_begun or bool(inside)
        if not self.parts or self.parts[-1].records >= CHECKPOINT_FRAMES:
            self.parts.append(BatchPart(segment.begin, segment.end))
        part = self.parts[-1]
        part.end = segment.end
        part.has_damage |= segment.has_damage
        part.records += sum(inside.values())
        add_counts(part.counts, inside)


def items_of(block: Block) -> Iterable[Frame | Damage]:
    """Return the items of a block."""
    return block.frames() if isinstance(block, Run) else (block,)


def _payload_bytes(item: Frame | Damage) -> int:
    return len(item.payload) if isinstance(item, Frame) else item.end - item.offset
