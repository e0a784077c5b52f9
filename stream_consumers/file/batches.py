"""Micro-batches from a ``.ss`` file. Nothing is committed to files: only the ledger stores positions."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from stream_consumers.batches import (
    BATCH_BYTES,
    BATCH_ROWS,
    BatchPlan,
    BatchSource,
    Extent,
    LastMessage,
    MessageRow,
    Range,
    Resume,
    check_shard_count,
    dead_letter_row,
    message_checksum,
    packed,
    plain_batch,
    readable_gaps,
    record_batches,
    total_counts,
)
from stream_consumers.errors import DataLossError, InvalidUrlError, SourceRecreatedError
from stream_consumers.file import segments
from stream_consumers.file.format import HEADER_SIZE, Header
from stream_consumers.file.scanner import AtJump, Damage, Frame, FrameScanner, Missing, Run
from stream_consumers.file.segments import (
    EMPTY_RANGE,
    START,
    BatchPart,
    Block,
    Checkpoint,
    PlannedBatch,
    Segment,
    SegmentScan,
    items_of,
)
from stream_consumers.file.stream_file import OpenStreamFile
from stream_consumers.messages import DeadLetter, Shard, is_recent
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl

QUIET_SECONDS = 2.0
TAIL_BYTES = 4096
"""The number of bytes before the end of a batch whose checksum is in its hint."""


@dataclass(frozen=True, slots=True)
class FileSplit:
    """Bytes ``[start, stop)`` of a file, where both offsets are between two frames.

    Damage without a known sequence comes with the next message after it, and no split ends between the two. It is a
    dead letter, unless all shards are past it: because it may be a message of any shard, it is one if that next message
    is read, or if another shard may lack a message there. A batch begins where the previous one ended, so it is one
    only once. If a rewind reads it again, only the newest dead letter of an offset counts.

    Whether bytes are damaged may depend on bytes after ``stop``, so a split may read up to ``frozen_size``, as the scan
    that planned it did.

    Args:
        ranges: the messages to read of each known shard of the streams; an empty range begins at the position.
    """

    path: Path
    start: int
    stop: int
    previous: Mapping[Shard, int]
    missing: Missing
    ranges: Mapping[Shard, Range]
    streams: frozenset[str]
    frozen_size: int
    created_at_ms: int
    messages: Mapping[Shard, int] | None

    def counts(self) -> Mapping[Shard, int] | None:
        """Return the number of messages of each shard that the planning scan found; ``None`` if it found damage."""
        return self.messages

    def identities(self) -> Mapping[str, str]:
        """See :meth:`stream_consumers.batches.CountedSplit.identities`."""
        with OpenStreamFile(self.path) as file:
            return _fingerprints(self.streams, file.header)

    def read(self) -> Iterator[pa.RecordBatch]:
        """See :meth:`stream_consumers.batches.Split.read`."""
        return packed(self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with FrameScanner(
            self.path,
            start=self.start,
            previous=self.previous,
            missing=self.missing,
            streams=self.streams,
            stop=self.frozen_size,
            at_jump=AtJump.WAIT,
        ) as scanner:
            if scanner.header.created_at_ms != self.created_at_ms:
                raise SourceRecreatedError(
                    f"{self.path} was replaced during the read", remedy="Run again.", planned=self.created_at_ms
                )
            damages: list[_Unplaced] = []

            def is_plain(block: Block) -> bool:
                return not damages and self._is_planned(block)

            for are_plain, blocks in groupby(_until(self.stop, scanner, is_checked=True), is_plain):
                if are_plain:
                    yield from _plain_batches(block for block in blocks if not isinstance(block, Damage))
                else:
                    items = chain.from_iterable(map(items_of, blocks))
                    yield from record_batches(self._rows(items, damages, scanner))

    def _is_planned(self, block: Block) -> bool:
        """Return whether the block is not damaged, and the split has all its messages."""
        if isinstance(block, Damage):
            return False
        if isinstance(block, Frame):
            return block.shard.stream in self.streams and block.sequence in self.ranges.get(block.shard, EMPTY_RANGE)
        parts = ((self.ranges.get(shard, EMPTY_RANGE), bounds) for shard, bounds in block.bounds.items())
        return block.stream in self.streams and all(first in part and last in part for part, (first, last) in parts)

    def _rows(
        self, items: Iterable[Frame | Damage], damages: list[_Unplaced], scanner: FrameScanner
    ) -> Iterator[MessageRow]:
        """Yield the rows of the items; ``damages`` collects damage until the next message."""
        for item in items:
            if item.shard is not None and item.shard.stream not in self.streams:
                continue
            if item.shard is None or item.sequence is None:
                if isinstance(item, Damage):
                    lacking = (shard for shard, part in self.ranges.items() if scanner.may_come_next(shard, part.start))
                    damages.append(_Unplaced(item, tuple(islice(lacking, 2))))
                continue
            found = damages.copy()
            damages.clear()
            is_read = item.sequence in self.ranges.get(item.shard, EMPTY_RANGE)
            for damage, lacking_shards in found:
                # That shard itself lacks no message here if it is past this one.
                if is_read or any(shard != item.shard for shard in lacking_shards):
                    yield self._dead_letter(scanner, damage, item.shard)
            if is_read and isinstance(item, Frame):
                origin = (item.shard.stream, item.shard.id, item.sequence, item.timestamp_ms)
                yield (*origin, None, item.payload, None, None, None)
            elif is_read and isinstance(item, Damage):
                yield self._dead_letter(scanner, item, item.shard)

    @staticmethod
    def _dead_letter(scanner: FrameScanner, damage: Damage, shard: Shard) -> MessageRow:
        found = DeadLetter(
            damage.shard or shard,
            damage.sequence,
            damage.timestamp_ms,
            scanner.read_bytes(damage),
            f"{damage.reason} (offset {damage.offset} of {scanner.path.name})",
            damage.offset,
        )
        return dead_letter_row(found)


class _Unplaced(NamedTuple):
    """Damage without a known sequence, and up to two shards that may lack a message there."""

    damage: Damage
    lacking: tuple[Shard, ...]


class FileBatchSource(BatchSource):
    """A ``.ss`` file as a batch source.

    Every byte after the ledger's position is scanned once to find the messages, in bounded memory, and a plan scans
    again only where a batch begins or ends, or where damage was found. A batch is a contiguous part of the file, so
    executors read each byte once, for any number of shards.

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
        self._segments: list[Segment] = []
        # Where earlier batches of the group ended: the last one that was planned, unless the ledger shows that
        # it was not written, and that of the hint. A scan may begin at the first of the two only.
        self._last_end: Checkpoint | None = None
        self._hinted_end: Checkpoint | None = None
        # The streams of which it is unknown where an earlier batch ended.
        self._unknown: frozenset[str] = frozenset()
        self._extents: dict[Shard, Extent] = {}
        self._lost: dict[Shard, Range] = {}
        with OpenStreamFile(self._path) as file:
            self._header = file.header
        self._frozen_size = self._end = HEADER_SIZE
        # What the bytes after the last message are, and whether a producer may still be writing them.
        self._tail: tuple[str, bool] | None = None

    def identities(self) -> Mapping[str, str]:
        """Identify the file by the creation time in its header."""
        return _fingerprints(self._streams, self._header)

    def extents(self, *, resume: Resume | None = None, budget_seconds: float | None = None) -> Mapping[Shard, Extent]:
        """See :meth:`stream_consumers.batches.BatchSource.extents`; freezes the file at its size now."""
        with OpenStreamFile(self._path) as file:
            # The file may have been replaced since it was last read.
            self._header, self._frozen_size = file.header, file.size
        self._segments, self._last_end = [], None
        is_unknown = self._use_hint(resume)
        first = self._last_end or START
        deadline = math.inf if budget_seconds is None else time.monotonic() + budget_seconds
        span = (self._frozen_size - first.offset) // segments.MAX_SEGMENTS
        scan = SegmentScan(first, self._streams, frames=segments.CHECKPOINT_FRAMES, span=span)
        self._tail, self.is_exact = None, True
        with self._scanner(first) as scanner:
            self._segments += scan.segments(self._blocks(scanner, scan, deadline))
            if self.is_exact:
                damage, hinted = scan.open_damage, self._hinted_end
                if damage is None and resume and hinted:
                    damage = _waiting_damage(scan, resume, hinted)
                self._tail = self._describe_tail(damage, scanner)
        starts: dict[Shard, int] = {}
        for segment in self._segments:
            for shard, (sequence, _) in segment.bounds.items():
                starts.setdefault(shard, sequence)
        end = self._segments[-1].end if self._segments else first
        self._end = end.offset
        self._extents = {
            shard: Extent(starts.get(shard, position), position) for shard, position in sorted(end.positions.items())
        }
        self._lost = self._removed(resume) if resume is not None and is_unknown and self.is_exact else {}
        return self._extents

    def _blocks(self, scanner: FrameScanner, scan: SegmentScan, deadline: float) -> Iterator[Block]:
        """Yield the blocks of a scan until the deadline, but at least one message; check the shards after each block.

        A segment may be as large as the file, if that has many shards.
        """
        begin = scan.offset
        for block in scanner.blocks(is_checked=False):
            yield block
            check_shard_count(self.url, len(scan.positions))
            if time.monotonic() > deadline and scan.offset > begin:
                self.is_exact = False
                return

    def remember(self, resume: Resume) -> None:
        """See :meth:`stream_consumers.batches.BatchSource.remember`; a planned batch that was not written is forgotten.

        The damage in it comes with the next batch.
        """
        self._use_hint(resume)

    def lost(self, gaps: Mapping[Shard, Range]) -> Mapping[Shard, Range]:
        """See :meth:`stream_consumers.batches.BatchSource.lost`.

        A file itself never drops messages. A file other than that of the hint must have the message before the position
        or the one at the position.
        """
        found = {shard: self._lost[shard].clamp(gap) for shard, gap in gaps.items() if shard in self._lost}
        return {shard: part for shard, part in found.items() if part.start < part.end}

    def _removed(self, resume: Resume) -> dict[Shard, Range]:
        """Return the ranges after the positions that the file lacks, if it was rewritten or not read from yet."""
        positions = {shard: position for shard, position in resume.positions.items() if shard in self._extents}
        if (resume.hint or {}).get("created_at_ms") != self._header.created_at_ms:
            following: Mapping[Shard, int] = {shard: self._extents[shard].start for shard in positions}
        else:
            following = self._first_from({shard: position - 1 for shard, position in positions.items()})
        return {
            shard: Range(positions[shard], sequence)
            for shard, sequence in following.items()
            if positions[shard] < sequence <= self._extents[shard].end
        }

    def _first_from(self, places: Mapping[Shard, int]) -> Mapping[Shard, int]:
        """Return the first sequence of each shard at or after the given one, else the end of the shard."""
        found: dict[Shard, int] = {}
        with self._scanner(START) as scanner:
            for item in chain.from_iterable(map(items_of, _until(self._end, scanner))):
                shard, sequence = item.shard, item.sequence
                if shard is not None and sequence is not None and sequence >= places.get(shard, math.inf):
                    found.setdefault(shard, sequence)
                    if len(found) == len(places):
                        break
        return {shard: found.get(shard, self._extents[shard].end) for shard in places}

    def has_grown(self, extents: Mapping[Shard, Extent], *, resume: Resume | None = None) -> bool:
        """See :meth:`stream_consumers.batches.BatchSource.has_grown`; true if the size of the file has changed."""
        try:
            return self._path.stat().st_size != self._frozen_size
        except FileNotFoundError:
            return True

    def plan(self, gaps: Mapping[Shard, Range], *, limits: Limits, parallelism: int) -> BatchPlan | None:
        """See :meth:`stream_consumers.batches.BatchSource.plan`."""
        open_gaps = readable_gaps(gaps, self._extents)
        if not open_gaps:
            return None
        with OpenStreamFile(self._path) as file:
            # If its writer has not synced it, other messages may get the sequences of the batch after a power cut.
            file.force()
        return self._plan_within(open_gaps, limits, parallelism)

    def _plan_within(self, gaps: Mapping[Shard, Range], limits: Limits, parallelism: int) -> BatchPlan:
        batch = PlannedBatch(gaps, limits, is_begun=bool(self._previous_end(gaps) or self._unknown))
        for segment in self._segments_from(gaps):
            if not batch.take(segment):
                for part in self._scan_segments(segment.begin, segment.end.offset):
                    batch.is_full = not batch.take(part)
                    if batch.is_over:
                        break
            if batch.is_over:
                break
        ends = batch.ends if batch.is_full else {shard: gap.end for shard, gap in gaps.items()}
        ranges = {shard: Range(gaps[shard].start, end) for shard, end in sorted(ends.items())}
        last = self._last_end = batch.parts[-1].end
        hint = {
            "created_at_ms": self._header.created_at_ms,
            "offset": last.offset,
            "tail": self._tail_checksum(last.offset),
            "positions": _listed(last.positions),
            "missing": last.missing.total,
            "missing_before": _listed(last.missing.before),
            "streams": sorted(self._streams),
        }
        positions = {shard: extent.end for shard, extent in self._extents.items()}
        positions |= {shard: gap.start for shard, gap in gaps.items()}
        empty = {shard: Range(position, position) for shard, position in positions.items()}
        splits = [self._split(parts, {**empty, **ranges}) for parts in _shares(batch, parallelism)]
        return BatchPlan(ranges, splits, batch.records, hint, lost=self.lost(ranges))

    def _previous_end(self, gaps: Mapping[Shard, Range]) -> Checkpoint | None:
        """Return where an earlier batch ended, if that is before all gaps."""
        ends = (self._last_end, self._hinted_end)
        return next((end for end in ends if end is not None and end.is_before(gaps)), None)

    def _segments_from(self, gaps: Mapping[Shard, Range]) -> Iterator[Segment]:
        """Yield the segments of the last :meth:`extents`, from the last one before all gaps, else all of them.

        They begin earlier if there is damage since the last batch. If it is unknown where that ended, they begin with
        the damage that may be a message of a gap.
        """
        numbers = reversed(range(len(self._segments)))
        first = next((number for number in numbers if self._segments[number].begin.is_before(gaps)), None)
        if first is None:
            yield from self._scan_segments(START, self._end, frames=segments.CHECKPOINT_FRAMES)
            return
        previous = self._previous_end(gaps)
        unknown = {shard: gap for shard, gap in gaps.items() if shard.stream in self._unknown}
        for number, earlier in enumerate(self._segments[:first]):
            is_after = previous is not None and earlier.end.offset > previous.offset
            if earlier.has_damage and (is_after or earlier.may_lack(unknown)):
                first = number
                break
        segment, last = self._segments[first], self._last_end
        if last is not None and segment.begin.offset < last.offset < segment.end.offset and last.is_before(gaps):
            # The previous plan ended within this segment.
            yield from self._scan_segments(last, segment.end.offset)
        else:
            yield segment
        yield from self._segments[first + 1 :]

    def _scan_segments(self, begin: Checkpoint, stop: int, *, frames: int = 1) -> Iterator[Segment]:
        """Scan between two checkpoints in segments, by default of one message each."""
        with self._scanner(begin) as scanner:
            yield from SegmentScan(begin, self._streams, frames=frames).segments(
                _until(stop, scanner, in_runs=frames > 1)
            )

    def _scanner(self, begin: Checkpoint) -> FrameScanner:
        return FrameScanner(
            self._path,
            start=begin.offset,
            previous=_previous(begin),
            missing=begin.missing,
            streams=self._streams,
            stop=self._frozen_size,
            at_jump=AtJump.WAIT,
        )

    def _split(self, parts: Sequence[BatchPart], ranges: Mapping[Shard, Range]) -> FileSplit:
        begin, end = parts[0].begin, parts[-1].end
        has_damage = any(part.has_damage for part in parts)
        return FileSplit(
            self._path,
            begin.offset,
            end.offset,
            _previous(begin),
            begin.missing,
            ranges,
            self._streams,
            self._frozen_size,
            self._header.created_at_ms,
            None if has_damage else total_counts(part.counts for part in parts),
        )

    def at(self, timestamp_ms: int) -> Mapping[Shard, int]:
        """See :meth:`stream_consumers.batches.BatchSource.at`; scan until every shard has reached the time."""
        found: dict[Shard, int] = {}
        with self._scanner(START) as scanner:
            for item in chain.from_iterable(map(items_of, _until(self._end, scanner))):
                shard, sequence, moment = item.shard, item.sequence, item.timestamp_ms
                if shard is None or sequence is None or moment is None or moment < timestamp_ms:
                    continue
                if shard in self._extents:
                    found.setdefault(shard, sequence)
                if len(found) == len(self._extents):
                    break
        return {shard: found.get(shard, extent.end) for shard, extent in self._extents.items()}

    def last_messages(self, ranges: Mapping[Shard, Range]) -> Mapping[Shard, LastMessage]:
        """See :meth:`stream_consumers.batches.BatchSource.last_messages`.

        A shard is left out if its range ends where the last :meth:`extents` began, because the checksum in the hint has
        proved the file unchanged up to that offset.
        """
        left = {shard: part for shard, part in ranges.items() if shard in self._extents}
        found: dict[Shard, LastMessage] = {}
        for segment in reversed(self._segments):
            if any(bounds[0] < left[shard].end for shard, bounds in segment.bounds.items() if shard in left):
                found |= self._last_messages_within(segment, left)
                left = {shard: part for shard, part in left.items() if shard not in found}
        return found

    def _last_messages_within(self, segment: Segment, ranges: Mapping[Shard, Range]) -> Mapping[Shard, LastMessage]:
        last: dict[Shard, Frame | Damage] = {}
        with self._scanner(segment.begin) as scanner:
            for item in chain.from_iterable(map(items_of, _until(segment.end.offset, scanner, is_checked=True))):
                if item.shard is not None and item.sequence in ranges.get(item.shard, EMPTY_RANGE):
                    last[item.shard] = item
            return {shard: _last_message(item, scanner) for shard, item in last.items()}

    def is_replaced(self, shard: Shard, read: LastMessage, held: LastMessage | None) -> bool:
        """Return true also if the message is missing, because no message is removed from a file."""
        return super().is_replaced(shard, read, held) or (held is not None and held.sequence < read.sequence)

    def unreadable_tail(self) -> str | None:
        """Describe damage after the last message, or an undecided end that is unchanged for :data:`QUIET_SECONDS`."""
        if self._tail is None or not self._path.exists():
            return None
        tail, may_be_written = self._tail
        if may_be_written and is_recent(self._path.stat().st_mtime, now=time.time(), seconds=QUIET_SECONDS):
            return None
        return tail

    def _describe_tail(self, damage: Damage | None, scanner: FrameScanner) -> tuple[str, bool] | None:
        if damage is not None:
            where = f"bytes {damage.offset} to {damage.end} of {self._path}, after its last message,"
            return f"{where} cannot be read: {damage.reason}. They become dead letters with the next message", False
        if scanner.is_undecided:
            return (
                f"the sequence of the message at offset {scanner.offset} of {self._path} is not the next one of its "
                "shard, and too few messages follow to decide whether it is damaged: the last "
                f"{scanner.incomplete_bytes} bytes are read when more messages are written"
            ), True
        if scanner.unreadable_tail():
            return (
                f"{self._path} is damaged at offset {scanner.offset}, and no beacon after it marks where messages "
                f"begin again: the last {scanner.incomplete_bytes} bytes, which may contain messages, cannot be read. "
                "They become readable or dead letters when the file grows past its next beacon, as it does when a "
                "producer opens it and sends a message"
            ), False
        if scanner.incomplete_bytes:
            return (
                f"{self._path} ends in the middle of a message: its last {scanner.incomplete_bytes} bytes are "
                "incomplete. "
                "If a producer still writes, run again; if it died, open the file with a producer once "
                "(stream-assets produce URL --count 0), which moves the incomplete bytes into a file beside it"
            ), True
        return None

    def _use_hint(self, resume: Resume | None) -> bool:
        """Take over where an earlier batch ended; return whether the file may differ from the one that was read."""
        hinted, is_unknown = self._hinted(resume)
        self._hinted_end, self._unknown = hinted, self._unknown_streams(hinted, resume)
        if self._last_end != hinted:
            is_covered = hinted is not None and resume is not None and self._is_covered(hinted, resume)
            self._last_end = hinted if is_covered else None
        return is_unknown

    def _hinted(self, resume: Resume | None) -> tuple[Checkpoint | None, bool]:
        """Return the end of the batch that wrote the hint, if that is in this file.

        Returns:
            The checkpoint, and whether the file may differ from the one that was read.
        """
        hint = resume.hint if resume else None
        if not resume or not hint or hint.get("created_at_ms") != self._header.created_at_ms:
            # The hint is missing, or belongs to another file that the group ingests into the same table.
            return None, True
        offset, total = hint.get("offset"), hint.get("missing")
        try:
            positions = _parsed(hint.get("positions"))
            missing = Missing(int(total), _parsed(hint.get("missing_before"))) if isinstance(total, int) else None
        except (ValueError, TypeError, OverflowError, InvalidUrlError):
            # Another version wrote the hint in another form.
            return None, False
        if not isinstance(offset, int) or missing is None or not positions:
            return None, False
        if not all(0 <= count <= missing.total <= offset for count in (0, *missing.before.values())):
            return None, False
        if not HEADER_SIZE <= offset <= self._frozen_size or hint.get("tail") != self._tail_checksum(offset):
            return None, True
        return Checkpoint(offset, positions, missing), False

    def _unknown_streams(self, hinted: Checkpoint | None, resume: Resume | None) -> frozenset[str]:
        """Return the streams that the hint says nothing about; none if the group has read no file before."""
        hint = (resume.hint if resume else None) or {}
        if "created_at_ms" not in hint:
            return frozenset()
        listed = hint.get("streams")
        return self._streams.difference(listed if hinted is not None and isinstance(listed, list) else ())

    def _is_covered(self, end: Checkpoint, resume: Resume) -> bool:
        """Return whether no message before the end of a batch is to be read.

        Some are after a RESTORE or a rewind, or if the URL names a stream that it did not name then.
        """
        is_same = (resume.hint or {}).get("streams") == sorted(self._streams)
        return is_same and all(resume.positions.get(shard, -1) >= last for shard, last in end.positions.items())

    def _tail_checksum(self, offset: int) -> int:
        """Return the CRC-32 of the bytes before ``offset``, which reveals that a file was truncated and grew again."""
        start = max(0, offset - TAIL_BYTES)
        with OpenStreamFile(self._path) as file:
            return zlib.crc32(file.read(start, offset - start))


def _waiting_damage(scan: SegmentScan, resume: Resume, previous: Checkpoint) -> Damage | None:
    """Return the last damage after a batch if a shard may lack a message there, and there are no messages to read."""
    end = scan.checkpoint()
    if scan.last_damage is None or scan.last_damage.offset < previous.offset:
        return None
    is_read = all(resume.positions.get(shard, -1) >= position for shard, position in end.positions.items())
    is_followed = all(end.missing.before.get(shard, 0) == end.missing.total for shard in end.positions)
    return scan.last_damage if is_read and not is_followed else None


def _fingerprints(streams: frozenset[str], header: Header) -> Mapping[str, str]:
    return {stream: f"ss:{header.created_at_ms}" for stream in sorted(streams)}


def _listed(sequences: Mapping[Shard, int]) -> Mapping[str, int]:
    return {str(shard): sequence for shard, sequence in sorted(sequences.items())}


def _parsed(listed: object) -> Mapping[Shard, int]:
    """Return what :func:`_listed` returned for.

    Raises:
        ValueError, TypeError, OverflowError, InvalidUrlError: another function returned it.
    """
    if not isinstance(listed, Mapping):
        raise TypeError
    return {Shard.parse(str(shard)): int(sequence) for shard, sequence in listed.items()}


def _previous(checkpoint: Checkpoint) -> dict[Shard, int]:
    return {shard: end - 1 for shard, end in checkpoint.positions.items()}


def _shares(batch: PlannedBatch, parallelism: int) -> Iterator[Sequence[BatchPart]]:
    """Divide the parts of a batch into at most ``parallelism`` groups with about as many messages each."""
    share, taken, first = math.ceil(batch.records / parallelism), 0, 0
    for number, part in enumerate(batch.parts):
        taken += part.records
        if taken >= share or number == len(batch.parts) - 1:
            yield batch.parts[first : number + 1]
            taken, first = 0, number + 1


def _until(stop: int, scanner: FrameScanner, *, in_runs: bool = True, is_checked: bool = False) -> Iterator[Block]:
    """Yield the items before ``stop``, which is the end of one of them; see :meth:`FrameScanner.blocks`.

    Raises:
        DataLossError: the file ends before ``stop``.
    """
    if scanner.offset >= stop:
        return
    for block in scanner.blocks(stop=stop, in_runs=in_runs, is_checked=is_checked):
        yield block
        if block.end >= stop:
            return
    raise DataLossError(
        f"{scanner.path} changed during the read",
        remedy="Run again; if the error persists, restore the file.",
        readable_to=scanner.offset,
        planned_to=stop,
    )


def _last_message(item: Frame | Damage, scanner: FrameScanner) -> LastMessage:
    payload = item.payload if isinstance(item, Frame) else scanner.read_bytes(item)
    return LastMessage(item.sequence or 0, item.timestamp_ms or 0, message_checksum(None, payload))


def _plain_batches(blocks: Iterable[Run | Frame]) -> Iterator[pa.RecordBatch]:
    """Make record batches of a size that :func:`stream_consumers.batches.packed` need not copy."""
    held: list[Run | Frame] = []
    rows = size = 0
    for block in blocks:
        held.append(block)
        rows += len(block.payloads) if isinstance(block, Run) else 1
        size += block.end - block.offset
        if rows >= BATCH_ROWS // 2 or size >= BATCH_BYTES:
            yield _plain_batch(held)
            held, rows, size = [], 0, 0
    if held:
        yield _plain_batch(held)


def _plain_batch(blocks: Sequence[Run | Frame]) -> pa.RecordBatch:
    streams, *integers, payloads = zip(*map(_columns, blocks))
    numbers, sequences, timestamps_ms = (pa.array(np.concatenate(parts), pa.int64()) for parts in integers)
    return plain_batch(
        pa.concat_arrays([pa.repeat(stream, len(own)) for stream, own in zip(streams, payloads)]),
        numbers,
        sequences,
        timestamps_ms,
        pa.array(list(chain.from_iterable(payloads)), pa.binary()),
    )


def _columns(block: Run | Frame) -> tuple[Any, ...]:
    if isinstance(block, Run):
        return block.stream, block.numbers, block.sequences, block.timestamps_ms, block.payloads
    return block.shard.stream, [block.shard.id], [block.sequence], [block.timestamp_ms], [block.payload]
