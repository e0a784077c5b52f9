"""Splices message frames with beacons: the writing half of the ``.ss`` format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice

from stream_consumers.errors import SizeLimitError
from stream_consumers.file.format import CHECKSUM_START, Beacon, Marker, encode_frame, marker_capacity, running_checksum
from stream_consumers.messages import Shard


@dataclass(frozen=True, slots=True)
class ShardTail:
    """The greatest sequence and timestamp of one shard, and its running checksum."""

    sequence: int
    timestamp_ms: int
    running_checksum: int

    def after(self, sequence: int, timestamp_ms: int, checksum: int) -> ShardTail:
        """The state after one more message."""
        return ShardTail(
            max(self.sequence, sequence),
            max(self.timestamp_ms, timestamp_ms),
            running_checksum(self.running_checksum, checksum),
        )


NEW_SHARD = ShardTail(0, 0, CHECKSUM_START)


class FrameWriter:
    """Turns messages into file bytes, a beacon at every multiple of the interval, even inside a frame.

    It writes to memory: take the bytes with :meth:`take` and append them to the file.

    Args:
        beacon_interval: bytes between beacons, from the header of the file.
        offset: the file offset of the next byte.
        shards: the state of the shards already in the file.

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
        if offset % beacon_interval == 0:
            self._write_beacon(remaining=0)

    def write(
        self, shard: Shard, sequence: int, timestamp_ms: int, payload: bytes, *, limit: int | None = None
    ) -> None:
        """Add one message, or nothing of it.

        Args:
            shard: of the message.
            sequence: of the message.
            timestamp_ms: of the message.
            payload: of the message.
            limit: the most bytes that the file may have.

        Raises:
            InvalidOptionError: if a field does not fit the format.
            SizeLimitError: if the file would grow beyond the limit.
        """
        frame, checksum = encode_frame(shard, sequence, timestamp_ms, payload)
        pending, tail = len(self._pending), self.shards.get(shard)
        before = (self.offset, self._next_beacon, self._picked)
        # Beacons within the message name it already.
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
            else:
                self.shards[shard] = tail
            raise SizeLimitError(
                "the file would grow beyond its limit",
                remedy="Raise file_size_limit, or continue in a new file.",
                size=self.offset,
                message=needed,
                limit=limit,
            )

    def take(self) -> bytes:
        """The bytes written since the last call."""
        data = self.pending
        self._pending.clear()
        return data

    @property
    def pending(self) -> bytes:
        """What :meth:`take` would return."""
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
        known = sorted(self.shards)
        count = min(len(known), self._capacity)
        if not count:
            return ()
        first = self._picked % len(known)
        self._picked += count
        return tuple(
            Marker(shard, state.sequence, state.timestamp_ms, state.running_checksum)
            for shard in islice(chain(known[first:], known), count)
            for state in (self.shards[shard],)
        )
