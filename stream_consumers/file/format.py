"""The ``.ss`` file format of SeaStreamer, byte for byte: header, frames, beacons, checksums.

All integers are big-endian and unsigned. A file is a 128-byte header, then message frames, and at every file offset
that is a positive multiple of the beacon interval a beacon, even in the middle of a frame.
"""

from __future__ import annotations

import struct
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice
from os import PathLike, fspath
from typing import NamedTuple

from fastcrc import crc16

from stream_consumers.errors import (
    FormatError,
    InvalidOptionError,
    InvalidStreamKeyError,
    SizeLimitError,
    UnsupportedVersionError,
)
from stream_consumers.messages import MAX_STREAM_KEY_BYTES, Shard, check_stream_key

MAGIC = b"Ss"
VERSION = 1
HEADER_SIZE = 128
MAX_FILE_NAME_BYTES = 111
END = 0x0D
MAX_PAYLOAD_BYTES = 256 * 1024 * 1024
"""The longest payload that is written and read; SeaStreamer's format allows 4 GiB."""
EOS_PAYLOAD = b"EOS"
CHECKSUM_START = 0xFFFF

FRAME_FIELDS = struct.Struct(">QQQI")
_CHECKSUM = struct.Struct(">H")
_BEACON_HEAD = struct.Struct(">BIB")
_MARKER_TAIL = struct.Struct(">QQQH")
_HEADER_TAIL = struct.Struct(">QI")
EMPTY_BEACON_SIZE = _BEACON_HEAD.size + 1
_MAX_MARKER_SIZE = 1 + 255 + _MARKER_TAIL.size
MAX_BEACON_BYTES = EMPTY_BEACON_SIZE + 255 * _MAX_MARKER_SIZE


def checksum(data: bytes, start: int = CHECKSUM_START) -> int:
    """Compute the CRC-16/CDMA2000 of ``data``, continuing from ``start``.

    Example:
        >>> f"{checksum(b'123456789'):04X}"
        '4C06'
    """
    return crc16.cdma2000(data, start)


def running_checksum(running: int, message_checksum: int) -> int:
    """Return the running checksum of a shard after a message with this checksum."""
    return checksum(_CHECKSUM.pack(message_checksum), running)


@dataclass(frozen=True, slots=True)
class Header:
    """The first 128 bytes of a file.

    Args:
        file_name: the name the file was created with, at most 111 bytes of UTF-8.
        created_at_ms: unix milliseconds; together with the name it is the fingerprint that detects a recreated file.
        beacon_interval: bytes between beacons, at least 128.
    """

    file_name: str
    created_at_ms: int
    beacon_interval: int

    def encode(self) -> bytes:
        """Encode the header as 128 bytes.

        Raises:
            InvalidOptionError: the name, the interval or the time does not fit into the header.
        """
        # A file name may be invalid UTF-8.
        name = self.file_name.encode(errors="replace")
        if len(name) > MAX_FILE_NAME_BYTES:
            raise InvalidOptionError(
                f"the file name {self.file_name[:40]!r}… is too long for the header of a stream file",
                remedy=f"Use at most {MAX_FILE_NAME_BYTES} bytes.",
                bytes=len(name),
            )
        try:
            tail = _HEADER_TAIL.pack(self.created_at_ms, self.beacon_interval)
        except struct.error as error:
            raise InvalidOptionError(
                f"beacon_interval={self.beacon_interval} does not fit into the header ({error})",
                remedy="Use an interval below 4 GiB, and a time from 0 on.",
                created_at_ms=self.created_at_ms,
            ) from error
        head = MAGIC + bytes((VERSION, len(name))) + name + tail
        return head.ljust(HEADER_SIZE - 1, b"\0") + bytes((END,))

    @classmethod
    def decode(cls, data: bytes, *, path: str | PathLike[str]) -> Header:
        """Decode a header; the padding is ignored.

        Raises:
            FormatError: the file is not a stream file, or ends within the header.
            UnsupportedVersionError: the file has a version other than 1.
        """
        name = fspath(path)
        if data[:2] != MAGIC:
            raise FormatError(
                f"{name} is not a stream file",
                remedy="Point at a .ss file: it starts with the bytes 53 73 ('Ss').",
                first_bytes=data[:4].hex(" ") or "none",
            )
        if len(data) < HEADER_SIZE:
            raise FormatError(
                f"{name} ends within its header", remedy="Copy the file again.", bytes=len(data), needed=HEADER_SIZE
            )
        if data[2] != VERSION:
            raise UnsupportedVersionError(
                f"{name} has a newer format than this version of stream-assets reads",
                remedy="Upgrade stream-assets, or write the file with version 1.",
                version=data[2],
                known=VERSION,
            )
        length = data[3]
        if length > MAX_FILE_NAME_BYTES:
            raise FormatError(f"the header of {name} is damaged", remedy="Copy the file again.", name_bytes=length)
        created_at_ms, interval = _HEADER_TAIL.unpack_from(data, 4 + length)
        if interval < HEADER_SIZE:
            raise FormatError(f"the header of {name} is damaged", remedy="Copy it again.", beacon_interval=interval)
        return cls(data[4 : 4 + length].decode(errors="replace"), created_at_ms, interval)


class Marker(NamedTuple):
    """An entry of a beacon: the greatest sequence and timestamp of one shard so far, and its running checksum."""

    shard: Shard
    sequence: int
    timestamp_ms: int
    running_checksum: int


class Beacon(NamedTuple):
    """A beacon; ``remaining`` counts the bytes of the spliced frame that follow it (beacons not counted)."""

    remaining: int
    markers: tuple[Marker, ...]

    def encode(self) -> bytes:
        """Encode the beacon."""
        parts = [_BEACON_HEAD.pack(END, self.remaining, len(self.markers))]
        for shard, sequence, timestamp_ms, running in self.markers:
            key = shard.stream.encode()
            parts += (bytes((len(key),)), key, _MARKER_TAIL.pack(shard.id, sequence, timestamp_ms, running))
        return b"".join((*parts, bytes((END,))))


class BeaconError(ValueError):
    """The bytes at the offset of a beacon are not a beacon."""


def decode_beacon(data: bytes, at: int = 0) -> tuple[Beacon, int] | None:
    """Decode the beacon at ``at``; return it with its size in bytes, or ``None`` if ``data`` ends within it.

    Raises:
        BeaconError: the bytes are not a beacon.
    """
    available = len(data)
    if available - at < EMPTY_BEACON_SIZE:
        if available > at and data[at] != END:
            raise BeaconError
        return None
    lead, remaining, count = _BEACON_HEAD.unpack_from(data, at)
    if lead != END:
        raise BeaconError
    position = at + _BEACON_HEAD.size
    markers: list[Marker] = []
    for _ in range(count):
        if position >= available:
            return None
        key_end = position + 1 + data[position]
        if data[position] > MAX_STREAM_KEY_BYTES:
            raise BeaconError
        if key_end + _MARKER_TAIL.size > available:
            return None
        try:
            key = check_stream_key(bytes(data[position + 1 : key_end]).decode("ascii"))
        except (ValueError, InvalidStreamKeyError) as error:
            raise BeaconError from error
        shard_id, sequence, timestamp_ms, running = _MARKER_TAIL.unpack_from(data, key_end)
        markers.append(Marker(Shard(key, shard_id), sequence, timestamp_ms, running))
        position = key_end + _MARKER_TAIL.size
    if position >= available:
        return None
    if data[position] != END:
        raise BeaconError
    return Beacon(remaining, tuple(markers)), position + 1 - at


def marker_capacity(beacon_interval: int) -> int:
    """Return the maximum number of markers in a beacon (SeaStreamer's formula)."""
    return min(255, (beacon_interval - EMPTY_BEACON_SIZE) // _MAX_MARKER_SIZE) // 2


def encode_frame(shard: Shard, sequence: int, timestamp_ms: int, payload: bytes) -> tuple[bytes, int]:
    """Return one message as bytes, and the checksum of its payload.

    Raises:
        InvalidOptionError: the payload or a number does not fit into its field.
    """
    key = check_stream_key(shard.stream).encode()
    try:
        fields = FRAME_FIELDS.pack(shard.id, sequence, timestamp_ms, len(payload))
    except struct.error as error:
        raise InvalidOptionError(
            f"a message of {shard} does not fit into the format ({error})",
            remedy="Sequences, shards and timestamps are whole numbers from 0 to 2^64 - 1.",
            sequence=sequence,
            timestamp_ms=timestamp_ms,
            payload_bytes=len(payload),
        ) from error
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InvalidOptionError(
            f"a message of {shard} has {len(payload):,} bytes",
            remedy=f"Send at most {MAX_PAYLOAD_BYTES:,} bytes in a payload.",
            sequence=sequence,
        )
    crc = checksum(payload)
    return b"".join((bytes((len(key),)), key, fields, payload, _CHECKSUM.pack(crc), bytes((END,)))), crc


@dataclass(frozen=True, slots=True)
class ShardTail:
    """The greatest sequence and timestamp of one shard, and its running checksum."""

    sequence: int
    timestamp_ms: int
    running_checksum: int

    def after(self, sequence: int, timestamp_ms: int, checksum: int) -> ShardTail:
        """Return the state after one more message."""
        return ShardTail(
            max(self.sequence, sequence),
            max(self.timestamp_ms, timestamp_ms),
            running_checksum(self.running_checksum, checksum),
        )


NEW_SHARD = ShardTail(0, 0, CHECKSUM_START)


class FrameWriter:
    """Turns messages into file bytes, with a beacon at every multiple of the interval, even within a frame.

    It writes to memory: get the bytes from :meth:`take` and append them to the file.

    Args:
        beacon_interval: bytes between beacons, from the header of the file.
        offset: the file offset of the next byte.
        shards: the state of the shards that the file has.

    Example:
        >>> writer = FrameWriter(beacon_interval=1024, offset=128)
        >>> writer.write(Shard("hello"), 1, 1_700_000_000_001, b"message-1")
        >>> len(writer.take())
        46
    """

    def __init__(self, *, beacon_interval: int, offset: int, shards: Mapping[Shard, ShardTail] | None = None) -> None:
        self._interval = beacon_interval
        self._capacity = marker_capacity(beacon_interval)
        self._next_beacon = (offset // beacon_interval + 1) * beacon_interval
        self._picked = 0
        self._pending = bytearray()
        self.offset = offset
        self.shards: dict[Shard, ShardTail] = dict(shards or {})
        self._sorted = sorted(self.shards)
        if offset % beacon_interval == 0:
            self._write_beacon(remaining=0)

    def write(
        self, shard: Shard, sequence: int, timestamp_ms: int, payload: bytes, *, limit: int | None = None
    ) -> None:
        """Add one message; after an error, nothing of it was added.

        Args:
            shard: the shard of the message.
            sequence: the sequence of the message.
            timestamp_ms: the time of the message.
            payload: the payload of the message.
            limit: the largest size of the file in bytes.

        Raises:
            InvalidOptionError: a field does not fit into the format.
            SizeLimitError: the file would exceed the limit.
        """
        frame, checksum = encode_frame(shard, sequence, timestamp_ms, payload)
        pending, tail = len(self._pending), self.shards.get(shard)
        before = (self.offset, self._next_beacon, self._picked)
        if tail is None:
            insort(self._sorted, shard)
        # Beacons within the message include it.
        self.shards[shard] = (tail or NEW_SHARD).after(sequence, timestamp_ms, checksum)
        left = memoryview(frame)
        while self.offset + len(left) >= self._next_beacon:
            room = self._next_beacon - self.offset
            self._append(left[:room])
            left = left[room:]
            self._write_beacon(remaining=len(left))
        self._append(left)
        if limit is not None and self.offset > limit:
            needed = self.offset - before[0]
            self.offset, self._next_beacon, self._picked = before
            del self._pending[pending:]
            if tail is None:
                del self.shards[shard]
                self._sorted.remove(shard)
            else:
                self.shards[shard] = tail
            raise SizeLimitError(
                "the file would exceed its limit",
                remedy="Raise file_size_limit, or continue in a new file.",
                size=self.offset,
                message=needed,
                limit=limit,
            )

    def take(self) -> bytes:
        """Return and remove the bytes that were written since the last call."""
        data = self.pending
        self._pending.clear()
        return data

    @property
    def pending(self) -> bytes:
        """The bytes that :meth:`take` would return."""
        return bytes(self._pending)

    @property
    def pending_bytes(self) -> int:
        """The number of bytes that :meth:`take` would return."""
        return len(self._pending)

    def _append(self, data: bytes | memoryview) -> None:
        self._pending += data
        self.offset += len(data)

    def _write_beacon(self, *, remaining: int) -> None:
        self._next_beacon = self.offset + self._interval
        self._append(Beacon(remaining, self._pick_markers()).encode())

    def _pick_markers(self) -> tuple[Marker, ...]:
        known = self._sorted
        count = min(len(known), self._capacity)
        if not count:
            return ()
        first = self._picked % len(known)
        self._picked += count
        return tuple(
            Marker(shard, state.sequence, state.timestamp_ms, state.running_checksum)
            for shard in islice(chain(known[first : first + count], known), count)
            for state in (self.shards[shard],)
        )
