"""Micro-batches from a ``.ss`` file. Nothing is committed to files: only the ledger stores positions."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

import pyarrow as pa

from stream_consumers.batches import (
    BatchPlan,
    BatchSource,
    Extent,
    MessageRow,
    Range,
    Resume,
    dead_letter_row,
    packed,
    plain_batch,
    record_batches,
    total_counts,
)
from stream_consumers.errors import DataLossError, InvalidUrlError, SourceRecreatedError
from stream_consumers.file import stretches
from stream_consumers.file.format import HEADER_SIZE, Header
from stream_consumers.file.frames import Damage, Frame, Run
from stream_consumers.file.scanner import FrameScanner
from stream_consumers.file.stream_file import StreamFile
from stream_consumers.file.stretches import (
    NOTHING,
    START,
    Checkpoint,
    PlannedBatch,
    Stretch,
    Stretches,
    Walk,
    is_within,
)
from stream_consumers.messages import DeadLetter, Shard, is_recent
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl

DEADLINE_FRAMES = 64
QUIET_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class FileSplit:
    """Bytes ``[start, stop)`` of a file, both between two frames.

    Damage whose place in a shard is unknown counts once, together with the next message behind it, whatever the batches
    are. Whether bytes are damaged may depend on bytes behind ``stop``, so that a split may read up to ``frozen_size``,
    as the walk that planned it did.
    """

    path: Path
    start: int
    stop: int
    previous: Mapping[Shard, int]
    ranges: Mapping[Shard, Range]
    streams: frozenset[str]
    frozen_size: int
    created_at_ms: int
    messages: Mapping[Shard, int] | None

    def counts(self) -> Mapping[Shard, int] | None:
        """What the walk that planned it has found; ``None`` if there is damage among it."""
        return self.messages

    def identities(self) -> Mapping[str, str]:
        """See :meth:`stream_consumers.batches.CountedSplit.identities`."""
        with StreamFile(self.path) as file:
            return _fingerprints(self.streams, file.header)

    def read(self) -> Iterator[pa.RecordBatch]:
        """See :meth:`stream_consumers.batches.Split.read`."""
        return packed(self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with FrameScanner(self.path, start=self.start, previous=self.previous, stop=self.frozen_size) as scanner:
            if scanner.header.created_at_ms != self.created_at_ms:
                raise SourceRecreatedError(
                    f"{self.path} was replaced while it was read", remedy="Run again.", planned=self.created_at_ms
                )
            damages: list[Damage] = []

            def is_plain(block: Run | Frame | Damage) -> bool:
                return isinstance(block, Run) and not damages and self._is_planned(block)

            for are_plain, blocks in groupby(_until(self.stop, scanner, is_checked=True), is_plain):
                if are_plain:
                    yield from (_record_batch(block) for block in blocks if isinstance(block, Run))
                else:
                    items = chain.from_iterable(map(_items, blocks))
                    yield from record_batches(self._rows(items, damages, scanner))

    def _is_planned(self, run: Run) -> bool:
        """Whether all messages of the run are to be read."""
        return run.stream in self.streams and is_within(run.bounds, self.ranges)

    def _rows(
        self, items: Iterable[Frame | Damage], damages: list[Damage], scanner: FrameScanner
    ) -> Iterator[MessageRow]:
        """The rows of items; ``damages`` keeps those whose place is told by a message that is still to come."""
        for item in items:
            if item.shard is not None and item.shard.stream not in self.streams:
                continue
            if item.shard is None or item.sequence is None:
                damages += (item,) if isinstance(item, Damage) else ()
                continue
            found = damages.copy()
            damages.clear()
            if item.sequence not in self.ranges.get(item.shard, NOTHING):
                continue
            for damage in found:
                yield self._dead_letter(scanner, damage, item.shard)
            if isinstance(item, Frame):
                place = (item.shard.stream, item.shard.id, item.sequence, item.timestamp_ms)
                yield (*place, None, item.payload, None, None, None)
            else:
                yield self._dead_letter(scanner, item, item.shard)

    @staticmethod
    def _dead_letter(scanner: FrameScanner, damage: Damage, shard: Shard) -> MessageRow:
        letter = DeadLetter(
            damage.shard or shard,
            damage.sequence,
            damage.timestamp_ms,
            scanner.read_bytes(damage),
            f"{damage.reason} (offset {damage.offset} of {scanner.path.name})",
            damage.offset,
        )
        return dead_letter_row(letter)


class FileBatchSource(BatchSource):
    """A ``.ss`` file as a batch source.

    Every byte behind the ledger's position is walked once to find the messages, in bounded memory, and a plan walks
    again only where a batch begins or ends, or damage was found. A batch is a contiguous part of the file, so that
    executors read each byte once, whatever the number of shards.

    Args:
        url: ``file://path/to/orders.ss/orders``.

    Raises:
        StreamNotFoundError: the file does not exist, or may not be read.
        FormatError: the file is not a stream file.
        UnsupportedVersionError: the file has a newer version of the format.
    """

    def __init__(self, url: str | StreamUrl) -> None:
        url = StreamUrl.parse(url)
        super().__init__(url)
        self._path = Path(url.path).absolute()
        self._streams = frozenset(url.required_streams())
        self._stretches: list[Stretch] = []
        self._place = START
        self._extents: dict[Shard, Extent] = {}
        with StreamFile(self._path) as file:
            self._header = file.header
        self._frozen_size = self._end = HEADER_SIZE
        self._tail: str | None = None
        self._is_exact = True

    def identities(self) -> Mapping[str, str]:
        """The creation time in the header."""
        return _fingerprints(self._streams, self._header)

    def extents(self, *, resume: Resume | None = None, budget_seconds: float | None = None) -> Mapping[Shard, Extent]:
        """See :meth:`stream_consumers.batches.BatchSource.extents`; freezes the file at its size now."""
        with StreamFile(self._path) as file:
            # It may have been replaced since.
            self._header, self._frozen_size = file.header, file.size
        first = self._first_checkpoint(resume)
        deadline = math.inf if budget_seconds is None else time.monotonic() + budget_seconds
        self._tail = None
        self._is_exact = True
        starts: dict[Shard, int] = {}
        walk, found = Walk(first, self._streams), Stretches(first, self._streams)
        with self._scanner(first) as scanner:
            unwatched = 0
            for block in scanner.blocks(most=stretches.CHECKPOINT_FRAMES, is_checked=False):
                bounds = _bounds(block)
                if isinstance(block, Run) and walk.open_damage is None:
                    walk.step_run(bounds, block.end)
                else:
                    for item in _items(block):
                        walk.step(item)
                found.add(block, walk)
                for shard, (sequence, _) in bounds.items():
                    if shard.stream in self._streams:
                        starts.setdefault(shard, sequence)
                unwatched += len(block.sizes) if isinstance(block, Run) else 1
                if unwatched >= DEADLINE_FRAMES:
                    unwatched = 0
                    if time.monotonic() > deadline:
                        self._is_exact = False
                        break
            else:
                self._tail = self._describe_tail(walk.open_damage, scanner)
        end = walk.checkpoint()
        self._place = START
        self._stretches, self._end, ends = found.up_to(end), end.offset, end.positions
        self._extents = {
            shard: Extent(starts.get(shard, end), end)
            for shard, end in sorted(ends.items())
            if shard.stream in self._streams
        }
        return self._extents

    def has_grown(self, extents: Mapping[Shard, Extent], *, resume: Resume | None = None) -> bool:
        """See :meth:`stream_consumers.batches.BatchSource.has_grown`: whether the file has another size by now."""
        try:
            return self._path.stat().st_size != self._frozen_size
        except FileNotFoundError:
            return True

    @property
    def is_exact(self) -> bool:
        """Whether the last :meth:`extents` saw the whole file within its budget."""
        return self._is_exact

    def plan(self, gaps: Mapping[Shard, Range], *, limits: Limits, parallelism: int) -> BatchPlan | None:
        """See :meth:`stream_consumers.batches.BatchSource.plan`."""
        clamped = {
            shard: gap.clamp(Range(0, self._extents[shard].end))
            for shard, gap in gaps.items()
            if shard in self._extents
        }
        open_gaps = {shard: gap for shard, gap in clamped.items() if gap.start < gap.end}
        if not open_gaps:
            return None
        with StreamFile(self._path) as file:
            # Its writer may not have done so. After a power cut other messages could get the sequences of the batch.
            file.force()
        return self._plan_within(open_gaps, limits, parallelism)

    def _plan_within(self, gaps: Mapping[Shard, Range], limits: Limits, parallelism: int) -> BatchPlan:
        found = self._stretches_from(gaps)
        batch = PlannedBatch(found[0].begin, gaps, limits, self._streams)
        most = min(limits.max_records, sum(stretch.records for stretch in found)) / parallelism / 2
        for stretch in found:
            # A split is at least a stretch.
            is_small = stretch.records < max(2 * stretches.CHECKPOINT_FRAMES, most)
            if not (is_small and batch.take_stretch(stretch)):
                self._walk(stretch, batch)
            if batch.is_over:
                break
        ends = batch.ends if batch.is_full else {shard: gap.end for shard, gap in gaps.items()}
        ranges = {shard: Range(gaps[shard].start, end) for shard, end in sorted(ends.items())}
        place = batch.walk.checkpoint()
        self._place = place
        splits = self._splits(batch, place.offset, ranges, parallelism)
        hint = {
            "created_at_ms": self._header.created_at_ms,
            "offset": place.offset,
            "positions": {str(shard): end for shard, end in sorted(place.positions.items())},
        }
        return BatchPlan(ranges, splits, batch.records, hint)

    def _stretches_from(self, gaps: Mapping[Shard, Range]) -> Sequence[Stretch]:
        """What the last :meth:`extents` found from the last place on that is before all gaps, or all of the file."""
        for number in reversed(range(len(self._stretches))):
            stretch = self._stretches[number]
            if stretch.begin.is_before(gaps):
                # The plan before this one may have ended within it.
                if stretch.begin.offset < self._place.offset < stretch.end.offset and self._place.is_before(gaps):
                    stretch = Stretch(self._place, stretch.end)
                return [stretch, *self._stretches[number + 1 :]]
        return [Stretch(START, Checkpoint(self._end, {}))]

    def _walk(self, stretch: Stretch, batch: PlannedBatch) -> None:
        with self._scanner(stretch.begin) as scanner:
            for block in _until(stretch.end.offset, scanner):
                if not batch.take(block):
                    return

    def _scanner(self, begin: Checkpoint) -> FrameScanner:
        return FrameScanner(self._path, start=begin.offset, previous=_previous(begin), stop=self._frozen_size)

    def _splits(
        self, batch: PlannedBatch, stop: int, ranges: Mapping[Shard, Range], parallelism: int
    ) -> list[FileSplit]:
        """Parts of about as many messages, between two cuts each."""
        sizes = [sum(counts.values()) for counts in batch.counts]
        share = math.ceil(batch.records / parallelism)
        firsts, taken = [0], 0
        for number, size in enumerate(sizes[:-1], 1):
            taken += size
            # The last cut may be the end of the batch.
            if taken >= share and batch.cuts[number].offset < stop:
                firsts.append(number)
                taken = 0
        splits = []
        for first, behind in zip(firsts, [*firsts[1:], len(sizes)]):
            is_damaged = not batch.damaged.isdisjoint(range(first, behind))
            end = stop if behind == len(sizes) else batch.cuts[behind].offset
            splits.append(
                FileSplit(
                    self._path,
                    batch.cuts[first].offset,
                    end,
                    _previous(batch.cuts[first]),
                    ranges,
                    self._streams,
                    self._frozen_size,
                    self._header.created_at_ms,
                    None if is_damaged else total_counts(batch.counts[first:behind]),
                )
            )
        return splits

    def at(self, timestamp_ms: int) -> Mapping[Shard, int]:
        """See :meth:`stream_consumers.batches.BatchSource.at`; walks the file until every shard has got there."""
        found: dict[Shard, int] = {}
        with FrameScanner(self._path, stop=self._frozen_size) as scanner:
            for item in chain.from_iterable(map(_items, _until(self._end, scanner))):
                shard, sequence, moment = item.shard, item.sequence, item.timestamp_ms
                if shard is None or sequence is None or moment is None or moment < timestamp_ms:
                    continue
                if shard in self._extents:
                    found.setdefault(shard, sequence)
                if len(found) == len(self._extents):
                    break
        return {shard: found.get(shard, extent.end) for shard, extent in self._extents.items()}

    def first(self, shard: Shard) -> int:
        """The first sequence that is there; earlier ones are unknown."""
        return self._extents[shard].start

    def unreadable_tail(self) -> str | None:
        """An unfinished message, or damage without a message behind it, that nobody has touched for some seconds."""
        if self._tail is None or not self._path.exists():
            return None
        if is_recent(self._path.stat().st_mtime, now=time.time(), seconds=QUIET_SECONDS):
            return None
        return self._tail

    def _describe_tail(self, damage: Damage | None, scanner: FrameScanner) -> str | None:
        if damage is not None:
            where = f"bytes {damage.offset} to {damage.end} of {self._path}, behind its last message,"
            return f"{where} cannot be read: {damage.reason}. They are dead letters of the next message that comes"
        if scanner.incomplete_bytes and scanner.tail_holds_messages():
            return (
                f"{self._path} is damaged at offset {scanner.offset}, and no beacon behind it tells where messages "
                f"begin again: the last {scanner.size - scanner.offset} bytes hold messages that cannot be read. "
                "They become readable or dead letters when the file grows past its next beacon"
            )
        if scanner.incomplete_bytes:
            return (
                f"{self._path} ends in the middle of a message: {scanner.incomplete_bytes} bytes before its end are "
                "not whole. "
                "If a producer still writes, run again; if it died, open the file with a producer once "
                "(stream-assets produce URL --count 0), which cuts the tail off and keeps it beside the file"
            )
        return None

    def _first_checkpoint(self, resume: Resume | None) -> Checkpoint:
        """The place in the hint, if the positions are still those of its batch: not after a RESTORE or a rewind."""
        hint = resume.hint if resume else None
        if not resume or not hint or hint.get("created_at_ms") != self._header.created_at_ms:
            # There is no hint, or it belongs to another file that the group writes into the same table.
            return START
        offset, listed = hint.get("offset"), hint.get("positions")
        if not isinstance(offset, int) or not isinstance(listed, Mapping):
            return START
        try:
            positions = {Shard.parse(str(shard)): int(end) for shard, end in listed.items()}
        except (ValueError, TypeError, InvalidUrlError):
            # A release of another age wrote it in another form.
            return START
        own = {shard: end for shard, end in positions.items() if shard.stream in self._streams}
        if (
            not own
            or any(resume.positions.get(shard, -1) < end for shard, end in own.items())
            or offset > self._path.stat().st_size
        ):
            return START
        return Checkpoint(offset, positions)


def _fingerprints(streams: frozenset[str], header: Header) -> Mapping[str, str]:
    return {stream: f"ss:{header.created_at_ms}" for stream in sorted(streams)}


def _previous(checkpoint: Checkpoint) -> dict[Shard, int]:
    return {shard: end - 1 for shard, end in checkpoint.positions.items()}


def _until(stop: int, scanner: FrameScanner, *, is_checked: bool = False) -> Iterator[Run | Frame | Damage]:
    """The items before ``stop``, which is the end of one of them.

    Raises:
        DataLossError: the file ends before ``stop``.
    """
    if scanner.offset >= stop:
        return
    for block in scanner.blocks(most=stretches.CHECKPOINT_FRAMES, stop=stop, is_checked=is_checked):
        yield block
        if block.end >= stop:
            return
    raise DataLossError(
        f"{scanner.path} changed while it was read",
        remedy="Run again; if the error persists, restore the file.",
        readable_to=scanner.offset,
        planned_to=stop,
    )


def _items(block: Run | Frame | Damage) -> Iterable[Frame | Damage]:
    return block.frames() if isinstance(block, Run) else (block,)


def _bounds(block: Run | Frame | Damage) -> Mapping[Shard, tuple[int, int]]:
    """The first and the last sequence of each shard."""
    if isinstance(block, Run):
        return block.bounds
    if block.shard is None or block.sequence is None:
        return {}
    return {block.shard: (block.sequence, block.sequence)}


def _record_batch(run: Run) -> pa.RecordBatch:
    return plain_batch(
        run.stream,
        pa.array(run.numbers, pa.int64()),
        pa.array(run.sequences, pa.int64()),
        pa.array(run.timestamps_ms, pa.int64()),
        pa.array(run.payloads, pa.binary()),
    )
