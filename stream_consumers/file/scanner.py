"""Scans the frames of a ``.ss`` file, in bounded memory.

A scan finds messages one by one (:class:`Frame`) or as columns (:class:`Run`), and :class:`Damage`. Frames depend only
on the bytes, never on where the scan began, so that two readers agree:

* A frame with an intact end (its last byte is ``0D`` and the beacons within it agree with its length) but a wrong
  checksum is reported as damaged; the scan continues after it. If an intact message is within it, its length may be
  damaged, so that it has swallowed messages of any shard: the damage has no shard then. Nothing within it is read,
  because a payload may contain the bytes of a message, too.
* At other bytes that cannot be a frame, the scan loses the framing and continues at the next beacon, which marks where
  the next frame begins. The bytes in between are reported as one damaged region.
* A frame whose sequence does not grow within its shard is reported as damaged, too. So is one whose sequence jumps,
  unless the next frames prove the jump: no checksum covers the sequence, so a single one must not decide about others.
* At a frame with a payload longer than :data:`MAX_PAYLOAD_BYTES`, the scan loses the framing, to save memory.

A producer that appends cuts off an unfinished frame at the end of the file, and an end-of-stream message before it. So
once an item was yielded, such bytes are read again from the file before the scan continues.
"""

from __future__ import annotations

import enum
import os
import string
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice, repeat, takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from fastcrc.crc16 import cdma2000

from stream_consumers.closing import ClosesOnExit
from stream_consumers.errors import InvalidStreamKeyError
from stream_consumers.file.format import (
    END,
    EOS_PAYLOAD,
    FRAME_FIELDS,
    HEADER_SIZE,
    MAX_BEACON_BYTES,
    MAX_PAYLOAD_BYTES,
    BeaconError,
    checksum,
    decode_beacon,
)
from stream_consumers.file.stream_file import OpenStreamFile
from stream_consumers.messages import (
    INTERNAL_KEY,
    MAX_SEQUENCE,
    MAX_SHARD,
    MAX_STREAM_KEY_BYTES,
    MAX_TIMESTAMP_MS,
    Shard,
    check_stream_key,
)

TRAILER_SIZE = 3
MIN_FRAME_BYTES = 1 + FRAME_FIELDS.size + TRAILER_SIZE
MAX_HEAD_BYTES = 1 + 255 + FRAME_FIELDS.size
_CONTRADICTION = "its length contradicts the next beacon"

Integers = npt.NDArray[np.int64]


class AtJump(enum.Enum):
    """What to do at a jump that the rest of the file neither proves nor refutes.

    ``WAIT`` stops before it, so that what is read does not depend on the size of the file. ``DECIDE`` judges it as if
    only messages of other shards followed: a producer that continues from an accepted one is read in any case.
    """

    ACCEPT = "accept"
    WAIT = "wait"
    DECIDE = "decide"


class Frame(NamedTuple):
    """A whole message frame; ``offset`` and ``end`` are file offsets."""

    offset: int
    end: int
    shard: Shard
    sequence: int
    timestamp_ms: int
    payload: bytes

    @property
    def is_control(self) -> bool:
        """Whether this is one of SeaStreamer's own messages (end of stream)."""
        return self.shard.stream == INTERNAL_KEY

    @property
    def is_end_of_stream(self) -> bool:
        """Whether this is an end-of-stream message."""
        return self.is_control and self.payload == EOS_PAYLOAD


class Damage(NamedTuple):
    """Bytes ``[offset, end)`` of the file that are not a usable message.

    ``shard``, ``sequence`` and ``timestamp_ms`` are those of the frame where its framing is intact, else ``None``.
    """

    offset: int
    end: int
    reason: str
    shard: Shard | None = None
    sequence: int | None = None
    timestamp_ms: int | None = None

    @property
    def missing(self) -> int:
        """The most sequences that the shards can lack because of this damage."""
        if self.sequence is not None:
            return 0
        return 1 if self.shard else max(1, (self.end - self.offset) // MIN_FRAME_BYTES)


class Missing(NamedTuple):
    """How many sequences damage without sequences can explain the lack of.

    Args:
        total: the sum of :attr:`Damage.missing` so far.
        before: the sum before the last message of each shard, if it is not 0.
    """

    total: int = 0
    before: Mapping[Shard, int] = {}


NO_MISSING = Missing()


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Successive messages of one stream, as columns.

    Args:
        offset: the file offset where the first message begins.
        end: the file offset where the last message ends.
        stream: the stream key of the messages.
        bounds: the first and the last sequence of each shard.
        counts: the number of messages of each shard.
        numbers: the shard id of each message.
        sequences: the sequence of each message; they grow within a shard.
        timestamps_ms: the time of each message.
        sizes: the size of each payload in bytes.
        payloads: the payloads; empty if checksums were not compared.
    """

    offset: int
    end: int
    stream: str
    bounds: Mapping[Shard, tuple[int, int]]
    counts: Mapping[Shard, int]
    numbers: Integers
    sequences: Integers
    timestamps_ms: Integers
    sizes: Integers
    payloads: Sequence[bytes]

    def frames(self) -> Iterator[Frame]:
        """Yield the messages one by one, with empty payloads if the run has no payloads."""
        shards = {shard.id: shard for shard in self.counts}
        around = 1 + len(self.stream) + FRAME_FIELDS.size + TRAILER_SIZE
        offset = self.offset
        columns = (column.tolist() for column in (self.numbers, self.sequences, self.timestamps_ms, self.sizes))
        for number, sequence, moment, size, payload in zip(*columns, self.payloads or repeat(b"")):
            end = offset + around + size
            yield Frame(offset, end, shards[number], sequence, moment, payload)
            offset = end


def read_run(
    data: bytes,
    start: int,
    limit: int,
    *,
    stream: str,
    last: Mapping[Shard, int] | None,
    missing: Missing,
    span: int,
    is_checked: bool,
) -> Run | None:
    """Read intact messages of one stream from ``start`` on, much faster than one by one.

    Args:
        data: frames without beacons.
        start: where the first message begins.
        limit: the end of the last possible message.
        stream: the stream key of the messages.
        last: the last sequence of each shard before them; ``None`` accepts all sequences.
        missing: how many sequences a shard may lack before its first message.
        span: the number of bytes in which the messages begin.
        is_checked: whether to compare checksums, and keep payloads. Otherwise only those of messages within which
            another one may be are compared.

    Returns:
        The run, with offsets in ``data`` in place of file offsets; ``None`` if the first message is not intact.
    """
    key = bytes((len(stream),)) + stream.encode()
    head = _head(len(key))
    last_start = min(start + span, limit - head.itemsize + 1) - 1
    if last_start < start:
        return None
    octets = np.frombuffer(data, np.uint8)
    # The first message begins at the start, and each other one after the end of a message.
    after = start + _after_ends(octets[start:last_start])
    is_begin = octets[after] == key[0]
    places = np.append(start, after[is_begin])
    # The bytes before the payload of a message that begins at an offset, for each offset.
    heads: npt.NDArray[np.void] = np.ndarray(
        len(data) - head.itemsize + 1, np.dtype((np.void, head.itemsize)), data, strides=(1,)
    )
    fields = heads[places].view(head)
    is_key = fields["key"] == key
    if not is_key.all():
        # A payload contains such bytes, too.
        is_begin[is_begin] = is_key[1:]
        places, fields = places[is_key], fields[is_key]
    places, fields = places[:MAX_RUN_MESSAGES], fields[:MAX_RUN_MESSAGES]
    begins = places + head.itemsize
    stops = begins + fields["size"].astype(np.int64)
    ends = stops + TRAILER_SIZE
    is_good = (places == np.append(start, ends[:-1])) & (ends <= limit)
    is_good &= octets[np.minimum(ends, limit) - 1] == END
    is_good &= (fields["number"] <= MAX_SHARD) & (fields["timestamp_ms"] <= MAX_TIMESTAMP_MS)
    is_good &= fields["sequence"] <= MAX_SEQUENCE
    count = _leading(is_good)
    payloads: list[bytes] = []
    if is_checked:
        payloads = [data[begin:stop] for begin, stop in zip(begins[:count].tolist(), stops[:count].tolist())]
        computed = np.fromiter(map(cdma2000, payloads), np.int64, count)
        stored = octets[stops[:count]].astype(np.int64) << 8 | octets[stops[:count] + 1]
        count = _leading(computed == stored)
    elif count:
        last_begin, end = int(places[count - 1]), int(ends[count - 1])
        within = after[~is_begin]
        within = np.append(within[within < last_begin], _after_ends(octets[last_begin : end - 1]) + last_begin)
        inner, _ = _payloads_at(octets[:end], within)
        for number in np.unique(np.searchsorted(ends[:count], inner, "right")).tolist():
            stop = int(stops[number])
            if cdma2000(data[int(begins[number]) : stop]) != int.from_bytes(data[stop : stop + 2], "big"):
                count = number
                break
    numbers, sequences = (fields[name][:count].astype(np.int64) for name in ("number", "sequence"))
    by_shard = _ByShard(stream, numbers, sequences)
    if last is not None and (following := by_shard.following(last, missing)) < count:
        count = following
        by_shard = _ByShard(stream, numbers[:count], sequences[:count])
    if not count:
        return None
    columns = (numbers[:count], sequences[:count], fields["timestamp_ms"][:count].astype(np.int64))
    sizes = stops[:count] - begins[:count]
    end = int(ends[count - 1])
    return Run(start, end, stream, by_shard.bounds(), by_shard.counts(), *columns, sizes, payloads[:count])


def _leading(is_good: npt.NDArray[np.bool_]) -> int:
    """Return the number of true values before the first false one."""
    return len(is_good) if is_good.all() else int(np.argmin(is_good))


class _ByShard:
    """The sequences of messages, grouped by shard."""

    def __init__(self, stream: str, numbers: Integers, sequences: Integers) -> None:
        # numpy sorts short integers much faster.
        is_short = numbers.max(initial=0) <= np.iinfo(np.uint16).max
        self._order = np.argsort(numbers.astype(np.uint16) if is_short else numbers, kind="stable")
        grouped = numbers[self._order]
        self._sequences = sequences[self._order]
        self._firsts = np.flatnonzero(np.diff(grouped, prepend=-1))
        self._shards = [Shard(stream, number) for number in grouped[self._firsts].tolist()]

    def following(self, last: Mapping[Shard, int], missing: Missing) -> int:
        """Return the number of messages before the first one whose sequence does not grow, or jumps, within its shard.

        A shard begins with the sequence 0 or 1, and may lack as many sequences as are missing.
        """
        steps = np.diff(self._sequences, prepend=0)
        firsts = self._sequences[self._firsts]
        lasts = np.array([last.get(shard, -1) for shard in self._shards], np.int64)
        greatest = np.maximum(lasts, 0) + 1
        if missing.total:
            lacking = [missing.total - missing.before.get(shard, 0) for shard in self._shards]
            greatest += np.array(lacking, np.int64)
        steps[self._firsts] = (firsts > lasts) & (firsts <= greatest)
        others = self._order[steps != 1]
        return int(others.min()) if len(others) else len(self._order)

    def _ends(self) -> Integers:
        return np.append(self._firsts[1:], len(self._order))

    def bounds(self) -> Mapping[Shard, tuple[int, int]]:
        """Return the first and the last sequence of each shard."""
        firsts, lasts = self._sequences[self._firsts].tolist(), self._sequences[self._ends() - 1].tolist()
        return dict(zip(self._shards, zip(firsts, lasts)))

    def counts(self) -> Mapping[Shard, int]:
        """Return the number of messages of each shard."""
        return dict(zip(self._shards, (self._ends() - self._firsts).tolist()))


def greatest_next(shard: Shard, last: int, missing: Missing) -> int:
    """Return the greatest sequence of the next message of a shard that is no jump; ``last`` is -1 before the first."""
    return max(last, 0) + 1 + missing.total - missing.before.get(shard, 0)


@lru_cache(maxsize=1024)
def _shard(key: bytes, number: int) -> Shard | None:
    """Return a shard, or ``None`` if there cannot be one with this stream key and number."""
    try:
        return Shard(check_stream_key(key.decode("ascii")), number) if number <= MAX_SHARD else None
    except (UnicodeDecodeError, InvalidStreamKeyError):
        return None


@lru_cache(maxsize=64)
def _head(key_bytes: int) -> np.dtype[np.void]:
    """Return the layout of the bytes before a payload: the length of the stream key, the key, and the fields."""
    fields = [
        ("key", f"S{key_bytes}"),
        ("number", ">u8"),
        ("sequence", ">u8"),
        ("timestamp_ms", ">u8"),
        ("size", ">u4"),
    ]
    return np.dtype(fields)


WINDOW_BYTES = 1024 * 1024
# How many of the bytes after the last item, and of the possible payloads within damage, are searched for messages.
TAIL_BYTES = 4 * 1024 * 1024
# For each byte, whether it can be in a stream key.
_IS_IN_KEY = np.isin(np.arange(256), list(f"{string.ascii_letters}{string.digits}._-".encode()))
# The longest payload, with room for the key and the other fields.
MAX_FRAME_BYTES = MAX_PAYLOAD_BYTES + 1024
# Messages of fewer bytes are read faster one by one than as columns.
MIN_RUN_BYTES = 4096
MIN_RUN_MESSAGES, MAX_RUN_MESSAGES, MAX_SINGLES = 16, 4096, 256
# The number of bytes in which a run is searched for after one that ended early, and after a longer one.
MIN_SPAN, MAX_SPAN = 16 * 1024, 512 * 1024
# The number of frames after a jump that decide about it, and how many of its shard prove or refute it.
LOOKAHEAD_FRAMES = 64
PROVING_FRAMES, REFUTING_FRAMES = 3, 2
# No less than the longest beacon, which is read at once.
LOOKAHEAD_BYTES = max(64 * 1024, MAX_BEACON_BYTES)


class _Splice(NamedTuple):
    """A beacon that was taken out of the buffer at ``at``; ``remaining`` is ``None`` if it was unreadable."""

    at: int
    size: int
    remaining: int | None


class _FrameReader:
    """Reads the frames of an open file one by one, whatever their sequences.

    Args:
        file: the file.
        start: the file offset of a frame or of a beacon between two frames.
        stop: the offset at which to stop reading; the end of the file by default.
        window: the number of bytes to read at once.
    """

    def __init__(self, file: OpenStreamFile, *, start: int, stop: int | None, window: int) -> None:
        self._file = file
        self._interval = file.header.beacon_interval
        self._stop = stop
        self._window = window
        # An end-of-stream message that no item follows.
        self._end_of_stream: Frame | None = None
        self._reset(start)

    @property
    def offset(self) -> int:
        """The file offset after the last item."""
        return self._position + self._shift

    @property
    def resume_offset(self) -> int:
        """The file offset to continue at later: :attr:`offset`, or that of an end-of-stream message before it."""
        return self.offset if self._end_of_stream is None else self._end_of_stream.offset

    @property
    def size(self) -> int:
        """The size of the file now, at most ``stop``."""
        size = self._file.size
        return size if self._stop is None else min(size, self._stop)

    def frames(self) -> Iterator[Frame | Damage]:
        """Yield the items up to the current end of the file."""
        for item in self._found(self._next):
            assert not isinstance(item, Run)
            yield item

    def _found(self, find: Callable[[], Run | Frame | Damage | None]) -> Iterator[Run | Frame | Damage]:
        """Yield what ``find`` returns up to the current end of the file.

        An end-of-stream message is yielded when the next item follows it, or the end of the file was read after it.
        """
        while True:
            found = find()
            if found is not None:
                before = self._end_of_stream
                self._end_of_stream = found if isinstance(found, Frame) and found.is_end_of_stream else None
                if before is not None:
                    yield before
                if self._end_of_stream is None:
                    yield found
            elif not self._read_on():
                if self._end_of_stream is not None:
                    yield self._end_of_stream
                return

    def _read_on(self) -> bool:
        """Read bytes after those that contain no more items; return ``False`` at the end of the file.

        If the buffer has yielded items, the bytes after them may be old, and are read again. If not, they were just
        read, as those of a frame that is larger than a window.
        """
        if not self._lost and self._start != self.resume_offset:
            self._reset(self.resume_offset)
        elif not self._lost and self._is_at_end:
            # Bytes that are written now may not continue those in the buffer.
            return False
        return self._fill()

    def _reset(self, offset: int) -> None:
        """Continue at a file offset, without the bytes that were read."""
        self._start = offset
        self._is_at_end = False
        self._end_of_stream = None
        self._buffer = bytearray()
        self._copy: bytes | None = None
        self._position = 0
        self._shift = offset
        self._read_to = offset
        self._splices: deque[_Splice] = deque()
        # Why the framing is lost, until a beacon restores it; and how many bytes after the position were dropped
        # meanwhile.
        self._lost, self._skipped = "", 0

    def _advance(self, position: int) -> None:
        """Move to a buffer position, past the beacons before it."""
        self._position = position
        while self._splices and self._splices[0].at < position:
            self._shift += self._splices.popleft().size

    def _fill(self, *, keep: bool = False) -> bool:
        """Read one more window without its beacons; return whether any bytes were read."""
        self._copy = None
        if self._position and not keep:
            del self._buffer[: self._position]
            self._splices = deque(s._replace(at=s.at - self._position) for s in self._splices)
            self._shift += self._position
            self._position = 0
        limit = self._window if self._stop is None else min(self._window, self._stop - self._read_to)
        begin, window = self._read_to, self._file.read(self._read_to, max(0, limit))
        self._is_at_end = len(window) < self._window
        at = 0
        while at < len(window):
            offset = begin + at
            if offset % self._interval == 0:
                taken = self._take_beacon(window, at, offset)
                if not taken:
                    break
            else:
                taken = min(len(window) - at, self._interval - offset % self._interval)
                self._buffer += memoryview(window)[at : at + taken]
            at += taken
        self._read_to = begin + at
        return at > 0

    def _take_beacon(self, window: bytes, at: int, offset: int) -> int:
        """Record the beacon at ``offset``; return its size in bytes, or 0 if it is incomplete."""
        index = len(self._buffer)
        try:
            found = decode_beacon(window, at)
        except BeaconError:
            # The length of the beacon is unknown, so no bytes up to the next beacon can be trusted.
            if offset + self._interval > self.size:
                return 0
            self._splices.append(_Splice(index, self._interval, None))
            return self._interval
        if found is None:
            return 0
        beacon, size = found
        self._splices.append(_Splice(index, size, beacon.remaining))
        return size

    def _next(self) -> Frame | Damage | None:
        """Return the next item; ``None`` if it is incomplete."""
        if self._lost:
            return self._lose_framing(self._lost)
        splices = self._splices
        while splices and splices[0].at == self._position:
            if splices[0].remaining != 0:
                return self._lose_framing("a beacon is where a message should begin")
            self._shift += splices.popleft().size
        is_head_spliced = splices and splices[0].at < self._position + MAX_HEAD_BYTES
        found = _CONTRADICTION if is_head_spliced and self._exceeds_beacons() else self._read_frame()
        return self._lose_framing(found) if isinstance(found, str) else found

    def _exceeds_beacons(self) -> bool:
        """Return whether a beacon in the head of a message names an end that is too early even for an empty payload."""
        payload_at = self._position + 1 + self._buffer[self._position] + FRAME_FIELDS.size
        in_head = takewhile(lambda splice: splice.at < payload_at, self._splices)
        return any(splice.at + (splice.remaining or 0) < payload_at + TRAILER_SIZE for splice in in_head)

    def _read_frame(self) -> Frame | Damage | str | None:
        """Return the frame at the position, ``None`` if it is not decided yet, or a reason if it cannot be a frame."""
        buffer, position, splices = self._buffer, self._position, self._splices
        body = position + 1 + (buffer[position] if position < len(buffer) else 0)
        payload_at = body + FRAME_FIELDS.size
        if payload_at > len(buffer):
            return None
        shard_id, sequence, timestamp_ms, size = FRAME_FIELDS.unpack_from(buffer, body)
        end = payload_at + size + 3
        shard = _shard(bytes(buffer[position + 1 : body]), shard_id)
        if shard is None or size > MAX_PAYLOAD_BYTES:
            return f"its payload has {size:,} bytes, which is too long" if shard else "no message begins here"
        spliced = bool(splices) and splices[0].at < end
        if spliced and self._agreeing(0, end)[1]:
            return _CONTRADICTION
        if end > len(buffer):
            return None
        payload = bytes(buffer[payload_at : end - 3])
        stored = buffer[end - 3] << 8 | buffer[end - 2]
        computed = checksum(payload)
        if stored != computed and buffer[end - 1] != END:
            return "both its checksum and its end are wrong"
        spliced_bytes = sum(splice.size for splice in splices if splice.at < end) if spliced else 0
        frame = Frame(position + self._shift, end + self._shift + spliced_bytes, shard, sequence, timestamp_ms, payload)
        is_swallowing = stored != computed and _may_contain_message(bytes(buffer[position:end]))
        found = self._judge(_checked(frame, stored, computed, is_swallowing=is_swallowing))
        if found is not None and spliced:
            self._advance(end)
        elif found is not None:
            self._position = end
        return found

    def _judge(self, found: Frame | Damage) -> Frame | Damage | None:
        """Return a whole frame, or damage if its sequence is wrong; ``None`` if that is not decided yet."""
        return found

    def _lose_framing(self, reason: str) -> Damage | None:
        """Report the bytes up to the next frame that the beacons confirm; ``None`` if they confirm none yet."""
        offset, self._lost = self.offset, reason
        if not self._resync():
            return None
        self._lost = ""
        return Damage(offset, self.offset, f"unreadable from here on: {reason}")

    def _resync(self) -> bool:
        """Move to the first frame after a beacon that the beacons agree on; return whether one was found.

        A beacon that contradicts the first one also contradicts those between them, which agree with the first one. So
        each beacon is compared once, however many bytes are damaged.
        """
        while True:
            while not self._splices:
                self._drop_buffer(len(self._buffer))
                if not self._fill(keep=True):
                    return False
            refuted = self._refuted()
            if not refuted:
                self._shift += self._skipped
                self._skipped = 0
                self._advance(self._splices[0].at + (self._splices[0].remaining or 0))
                return True
            for _ in range(refuted):
                self._skipped += self._splices.popleft().size

    def _refuted(self) -> int:
        """Return how many of the next beacons mark no begin of a frame; 0 if the beacons agree on that of the first."""
        remaining = self._splices[0].remaining
        if remaining is None or remaining > MAX_FRAME_BYTES:
            return 1
        if 2 * (self._splices[0].at - self._position) > len(self._buffer):
            self._drop_buffer(self._splices[0].at)
        end = self._splices[0].at + remaining
        agreeing = 1
        while True:
            agreeing, is_contradicted = self._agreeing(agreeing, end)
            if is_contradicted:
                return agreeing
            if len(self._buffer) > end:
                return 0
            if not self._fill(keep=True):
                return agreeing if len(self._buffer) < end else 0

    def _drop_buffer(self, end: int) -> None:
        """Drop the bytes between the position and ``end``, where no beacon marks the begin of a frame."""
        dropped = end - self._position
        self._skipped += dropped
        del self._buffer[self._position : end]
        self._splices = deque(splice._replace(at=splice.at - dropped) for splice in self._splices)
        self._copy = None

    def _agreeing(self, first: int, end: int) -> tuple[int, bool]:
        """Return how many of the next beacons lead to buffer position ``end``, and whether the one after them does not.

        The ``first`` ones are known to lead there.
        """
        count = first
        for splice in islice(self._splices, first, None):
            if splice.at >= end:
                break
            if splice.remaining != end - splice.at:
                return count, True
            count += 1
        return count, False


class FrameScanner(_FrameReader, ClosesOnExit):
    """Yields the frames of an open ``.ss`` file in order.

    Args:
        path: the file.
        start: the file offset of a frame or of a beacon between two frames; the first frame by default.
        previous: the last sequence of each shard before ``start``; ``None`` if they are not known.
        missing: how many sequences the shards may lack because of damage before ``start``.
        streams: the streams whose sequences are checked; by default all streams.
        stop: the offset at which to stop reading; the end of the file by default.
        window: the number of bytes to read at once.
        at_jump: what to do at a jump that the rest of the file neither proves nor refutes.

    Raises:
        StreamNotFoundError: the file does not exist.
        FormatError: the file is not a stream file.

    Example:
        >>> with FrameScanner("orders.ss") as scanner:
        ...     [(str(item.shard), item.sequence) for item in scanner]
        [('orders/0', 1), ('orders/0', 2), ('orders/0', 3)]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        start: int = HEADER_SIZE,
        previous: Mapping[Shard, int] | None = None,
        missing: Missing = NO_MISSING,
        streams: Collection[str] | None = None,
        stop: int | None = None,
        window: int = WINDOW_BYTES,
        at_jump: AtJump = AtJump.ACCEPT,
    ) -> None:
        super().__init__(OpenStreamFile(path), start=start, stop=stop, window=window)
        self.path, self.header = self._file.path, self._file.header
        self._span, self._pause, self._singles = MAX_SPAN, 1, 0
        self._streams, self._at_jump = streams, at_jump
        # The size of the file when the last iteration began.
        self._pass_end = start
        self._begin(start, previous, missing)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def seek(self, start: int) -> None:
        """Continue at another offset, which is that of a frame or of a beacon between two frames."""
        self._begin(start, None)

    def _begin(self, start: int, previous: Mapping[Shard, int] | None, missing: Missing = NO_MISSING) -> None:
        self._last: dict[Shard, int] = dict(previous or {})
        self._missing_before = dict(missing.before)
        self._missing = Missing(missing.total, self._missing_before)
        # Whether a shard may begin with any sequence; ``None``: the first frames of the file decide.
        self._is_cut = True if previous is None and start > HEADER_SIZE else None
        self._reset(start)

    def skip_spliced(self, index: int) -> bool:
        """Continue at the first frame after the beacon with this number, counted from 1.

        Returns:
            Whether that offset has been written, and no later beacon contradicts it.
        """
        self._begin(index * self._interval, None)
        self._fill()
        if not self._splices or self._refuted():
            return False
        self._advance(self._splices[0].at + (self._splices[0].remaining or 0))
        return True

    @property
    def incomplete_bytes(self) -> int:
        """The number of bytes after the last item, not whole frames yet, that were there when the iteration began."""
        return max(0, self._pass_end - self.offset)

    @property
    def is_undecided(self) -> bool:
        """Whether the next item is a jump that the rest of the file neither proves nor refutes."""
        return self._is_undecided

    def may_come_next(self, shard: Shard, sequence: int) -> bool:
        """Return whether a shard may lack all messages between those that were read and this sequence.

        If so, damage that was just read may be one of these messages, or the one with this sequence.
        """
        is_near = sequence <= greatest_next(shard, self._last.get(shard, -1), self._missing)
        return is_near or (shard not in self._last and self._begins_with_any_sequence())

    def unreadable_tail(self) -> Damage | None:
        """Return the incomplete bytes as damage if they are more than the begin of one message."""
        if not self.incomplete_bytes or self.has_unfinished_message():
            return None
        reason = self._lost or "its length exceeds the file, or a beacon within it is damaged"
        return Damage(self.offset, self._pass_end, f"unreadable from here on: {reason}")

    def without_hole(self, damage: Damage) -> Damage:
        """Return damage without the zero bytes at its end, as a producer leaves after an unreadable tail."""
        begin = end = damage.end
        while end == begin > damage.offset:
            begin = max(damage.offset, end - WINDOW_BYTES)
            end = begin + len(self._file.read(begin, end - begin).rstrip(b"\0"))
        return damage._replace(end=end)

    def has_unfinished_message(self) -> bool:
        """Return whether the bytes after the last item are the begin of one message, which may be cut off.

        A beacon in these bytes can prove it. If there is none, it is uncertain whether the length of the message is
        damaged, so that intact messages follow; it counts as unfinished if the bytes contain none.
        """
        if self._lost:
            return False
        try:
            decode_beacon(self._file.read(self._read_to, min(MAX_BEACON_BYTES, max(0, self._pass_end - self._read_to))))
        except BeaconError:
            return False
        after_key = self._position + 1 + (self._buffer[self._position] if self._position < len(self._buffer) else 0)
        is_proven = bool(self._splices) and after_key + FRAME_FIELDS.size <= len(self._buffer)
        return is_proven or not self._may_contain_messages()

    def _may_contain_messages(self) -> bool:
        """Return whether the bytes after the last item contain intact messages.

        These may be messages that only other programs read, because one of their numbers exceeds our limits. The answer
        is also true if there are more bytes, or more that look like messages, than can be checked in a short time.
        """
        tail = self._file.read(self.offset, min(TAIL_BYTES, self.incomplete_bytes))
        return self.incomplete_bytes > len(tail) or _may_be_intact(tail, _possible_payloads(tail))

    def check_in_place(self) -> None:
        """Check that the open file is still the one at its path, so that new messages will be read.

        Raises:
            StreamRemovedError: the file was removed, or replaced by another one.
        """
        if not self._file.is_in_place:
            raise self._file.removed("was removed or replaced by another file", read=self.offset)

    def read_bytes(self, item: Frame | Damage) -> bytes:
        """Return the bytes of an item, with its beacons; of long damage, only the first ones."""
        return self._file.read(item.offset, min(item.end - item.offset, MAX_FRAME_BYTES))

    def __iter__(self) -> Iterator[Frame | Damage]:
        """Yield all items up to the current end of the file; iterate again when the file has grown.

        An end-of-stream message at the end of the file is yielded again, because a producer may have cut it off since.

        Raises:
            StreamRemovedError: the file became shorter than the bytes that were read, or was rewritten.
        """
        for item in self.blocks(in_runs=False):
            assert not isinstance(item, Run)
            yield item

    def blocks(
        self, *, stop: int | None = None, in_runs: bool = True, is_checked: bool = True
    ) -> Iterator[Run | Frame | Damage]:
        """Yield the same items, but successive messages as runs, which is much faster than one by one.

        Args:
            stop: the end of an item; no run exceeds it.
            in_runs: whether to yield runs; otherwise messages are yielded one by one.
            is_checked: whether to compare checksums of runs, and yield their payloads. Otherwise runs include messages
                with wrong checksums within which no other one may be; the offsets of the items are the same.

        Raises:
            StreamRemovedError: see :meth:`__iter__`.
        """

        def find() -> Run | Frame | Damage | None:
            return (self._read_run(stop, is_checked) if in_runs else None) or self._next()

        self._pass_end = self.size
        self._file.check_kept(self.resume_offset)
        self._reset(self.resume_offset)
        for found in self._found(find):
            if isinstance(found, Damage) and self._is_judged(found.shard):
                self._missing = self._missing._replace(total=self._missing.total + found.missing)
            yield found
        self._file.note_read(self.resume_offset)

    def _read_on(self) -> bool:
        return not self._is_undecided and super()._read_on()

    def _reset(self, offset: int) -> None:
        super()._reset(offset)
        self._is_undecided = False
        # Reads the frames after a jump, and those that it has read.
        self._scout: _FrameReader | None = None
        self._ahead: deque[Frame | Damage] = deque()

    def _is_judged(self, shard: Shard | None) -> bool:
        return shard is None or self._streams is None or shard.stream in self._streams

    def _read_run(self, stop: int | None, is_checked: bool) -> Run | None:
        """Return the intact messages up to the next beacon or other item; ``None`` if there are none."""
        start = self._position
        limit = self._splices[0].at if self._splices else len(self._buffer)
        limit = limit if stop is None else min(limit, stop - self._shift)
        if self._singles:
            self._singles -= 1
            return None
        body = start + 1 + (self._buffer[start] if start < limit else 0)
        payload_at = body + FRAME_FIELDS.size
        if start + MIN_RUN_BYTES > limit or payload_at > limit:
            return None
        # A message that is larger than the buffer is not copied at each fill.
        if payload_at + FRAME_FIELDS.unpack_from(self._buffer, body)[-1] + TRAILER_SIZE > limit:
            return None
        shard = _shard(bytes(self._buffer[start + 1 : start + 1 + self._buffer[start]]), 0)
        if shard is None or shard.stream == INTERNAL_KEY:
            return None
        if self._copy is None:
            # Slices of bytes can be payloads; slices of the buffer would be copied once more.
            self._copy = bytes(self._buffer)
        is_judged = self._is_judged(shard)
        run = read_run(
            self._copy,
            start,
            limit,
            stream=shard.stream,
            last=self._last if is_judged else None,
            missing=self._missing,
            span=self._span,
            is_checked=is_checked,
        )
        self._adapt(run, min(self._span, limit - start))
        if run is None:
            return None
        if is_judged:
            self._last.update((shard, last) for shard, (_, last) in run.bounds.items())
            if self._missing.total:
                self._missing_before.update(dict.fromkeys(run.bounds, self._missing.total))
        self._position = run.end
        return replace(run, offset=run.offset + self._shift, end=run.end + self._shift)

    def _judge(self, found: Frame | Damage) -> Frame | Damage | None:
        offset, end, shard, sequence = found.offset, found.end, found.shard, found.sequence
        is_control = isinstance(found, Frame) and found.is_control
        if is_control or shard is None or sequence is None or not self._is_judged(shard):
            return found
        last = self._last.get(shard, -1)
        if sequence <= last:
            return Damage(offset, end, f"sequence {sequence} comes after {last} in {shard}: it must grow", shard)
        if sequence > greatest_next(shard, self._last.get(shard, -1), self._missing):
            reason = f"sequence {sequence} is not the next one in {shard}"
            if isinstance(found, Damage):
                return Damage(offset, end, f"{found.reason}; {reason}", shard)
            is_proven = self._is_proven(found, last)
            if is_proven is None:
                self._is_undecided = True
                return None
            if not is_proven:
                return Damage(offset, end, f"{reason}, and later messages do not follow it", shard)
        self._last[shard] = sequence
        if self._missing.total:
            self._missing_before[shard] = self._missing.total
        return found

    def _is_proven(self, jump: Frame, last: int) -> bool | None:
        """Return whether the frames after a jump prove it; ``None`` if more frames must be written to decide.

        A frame that continues the old sequences refutes it, and so do two that are between them and the jump. Three
        later sequences prove it. What more bytes can no longer change is decided, so that all readers agree.
        """
        shard, sequence = jump.shard, jump.sequence
        explained = greatest_next(shard, self._last.get(shard, -1), self._missing)
        greater = between = count = 0
        for item in self._following(jump.end):
            count += 1
            if item.shard is None or item.shard == shard:
                explained += item.missing if isinstance(item, Damage) and item.shard is None else 1
            if isinstance(item, Damage) or item.shard != shard:
                continue
            if item.sequence == sequence or last < item.sequence <= min(explained, sequence):
                return False
            greater += item.sequence > sequence
            between += last < item.sequence < sequence
            if between == REFUTING_FRAMES or greater == PROVING_FRAMES:
                return between < REFUTING_FRAMES
        if count == LOOKAHEAD_FRAMES or self._at_jump is AtJump.DECIDE:
            return not between and (greater > 0 or (last < 0 and self._begins_with_any_sequence()))
        return None if self._at_jump is AtJump.WAIT else not between

    def _following(self, offset: int) -> Iterator[Frame | Damage]:
        """Yield the next frames from ``offset`` on, without payloads; fewer if the file ends before."""
        ahead = self._ahead
        while ahead and ahead[0].offset < offset:
            ahead.popleft()
        if self._scout is None or (not ahead and self._scout.offset < offset):
            self._scout = _FrameReader(self._file, start=offset, stop=self._stop, window=LOOKAHEAD_BYTES)
        yield from tuple(ahead)
        for item in self._scout.frames() if len(ahead) < LOOKAHEAD_FRAMES else ():
            if isinstance(item, Damage) or not item.is_control:
                ahead.append(item._replace(payload=b"") if isinstance(item, Frame) else item)
                yield ahead[-1]
            if len(ahead) >= LOOKAHEAD_FRAMES:
                return

    def _begins_with_any_sequence(self) -> bool:
        """Return whether the file lacks its oldest messages, so that its shards begin with any sequence."""
        if self._is_cut is None:
            reader = _FrameReader(self._file, start=HEADER_SIZE, stop=self._stop, window=LOOKAHEAD_BYTES)
            whole = (item for item in reader.frames() if isinstance(item, Frame) and not item.is_control)
            # One of them may be damaged.
            first = [frame.sequence > PROVING_FRAMES for frame in islice(whole, PROVING_FRAMES)]
            self._is_cut = all(first) and len(first) == PROVING_FRAMES
        return self._is_cut

    def _adapt(self, run: Run | None, searched: int) -> None:
        """Search fewer bytes after a run that ended early; after a short run, read messages one by one for a while."""
        count, size = (len(run.sizes), run.end - run.offset) if run else (0, 0)
        is_whole = count == MAX_RUN_MESSAGES or 2 * size >= searched
        self._span = MAX_SPAN if is_whole else MIN_SPAN
        if is_whole or count >= MIN_RUN_MESSAGES:
            self._pause = 1
        else:
            self._singles, self._pause = self._pause, min(2 * self._pause, MAX_SINGLES)


def _checked(frame: Frame, stored: int, computed: int, *, is_swallowing: bool) -> Frame | Damage:
    """Return a whole frame, or damage if its content is damaged, without a shard if it may contain other messages."""
    offset, end, shard, sequence, timestamp_ms, _ = frame
    if is_swallowing:
        reason = f"checksum error: stored {stored:04X}, computed {computed:04X}, and it may contain other messages"
        return Damage(offset, end, reason)
    if frame.is_control:
        return frame
    if sequence > MAX_SEQUENCE:
        return Damage(offset, end, f"sequence {sequence} of {shard} is beyond {MAX_SEQUENCE}", shard)
    if stored != computed:
        reason = f"checksum error: stored {stored:04X}, computed {computed:04X}"
        return Damage(offset, end, reason, shard, sequence, min(timestamp_ms, MAX_TIMESTAMP_MS))
    if timestamp_ms > MAX_TIMESTAMP_MS:
        return Damage(offset, end, f"timestamp {timestamp_ms} ms is after the year 9999", shard, sequence)
    return frame


def _possible_payloads(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield where payloads may begin and end, of messages of whatever stream, shard, sequence and time."""
    octets = np.frombuffer(data, np.uint8)
    for start in range(0, len(data), WINDOW_BYTES):
        window = octets[start : start + WINDOW_BYTES + MAX_STREAM_KEY_BYTES + 1]
        lengths = window[:WINDOW_BYTES].astype(np.int64)
        # A key of n characters comes after a byte with the value n.
        keys = np.arange(1, len(lengths) + 1)
        others = np.append(np.flatnonzero(~_IS_IN_KEY[window]), len(window))
        is_head = (lengths > 0) & (lengths <= MAX_STREAM_KEY_BYTES)
        is_head &= others[np.searchsorted(others, keys)] >= keys + lengths
        yield from zip(*(places.tolist() for places in _payloads_at(octets, start + np.flatnonzero(is_head))))


def _payloads_at(octets: npt.NDArray[np.uint8], places: Integers) -> tuple[Integers, Integers]:
    """Return where payloads may begin and end, of those messages that may begin at the places."""
    lengths = octets[places].astype(np.int64)
    begins = places + 1 + lengths + FRAME_FIELDS.size
    begins = begins[(lengths > 0) & (lengths <= MAX_STREAM_KEY_BYTES) & (begins + TRAILER_SIZE <= len(octets))]
    # The size is the last of the fields, and has four bytes.
    ends = begins + octets[begins[:, np.newaxis] + np.arange(-4, 0)].astype(np.int64) @ 256 ** np.arange(3, -1, -1)
    is_whole = ends + TRAILER_SIZE <= len(octets)
    is_whole[is_whole] = octets[ends[is_whole] + TRAILER_SIZE - 1] == END
    return begins[is_whole], ends[is_whole]


def _after_ends(octets: npt.NDArray[np.uint8]) -> Integers:
    """Return the places after the bytes that can end a message."""
    return 1 + np.flatnonzero(octets == END)


def _may_contain_message(frame: bytes) -> bool:
    """Return whether an intact message, after the end of another one, is within a frame, or too much looks like one."""
    octets = np.frombuffer(frame, np.uint8)
    ends = (start + _after_ends(octets[start : start + WINDOW_BYTES]) for start in range(0, len(frame), WINDOW_BYTES))
    found = (_payloads_at(octets, places[places < len(frame)]) for places in ends)
    return _may_be_intact(frame, chain.from_iterable(zip(*map(np.ndarray.tolist, payloads)) for payloads in found))


def _may_be_intact(data: bytes, payloads: Iterable[tuple[int, int]]) -> bool:
    """Return whether a payload has its checksum, or there are more than can be checked in a short time."""
    left = TAIL_BYTES
    for begin, end in payloads:
        if left <= 0 or cdma2000(data[begin:end]) == int.from_bytes(data[end : end + 2], "big"):
            return True
        left -= max(MIN_RUN_BYTES, end - begin)
    return False
