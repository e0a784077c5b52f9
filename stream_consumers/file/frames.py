"""What a walk over a stream file finds: messages one by one, runs of them as columns, and damage."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from fastcrc.crc16 import cdma2000

from stream_consumers.file.format import END, FRAME_FIELDS
from stream_consumers.messages import INTERNAL_KEY, MAX_SEQUENCE, MAX_SHARD, MAX_TIMESTAMP_MS, Shard

TRAILER_SIZE = 3
_SIZE = struct.Struct(">I")

Integers = npt.NDArray[np.int64]


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
        """Whether it is one of SeaStreamer's own messages (end of stream)."""
        return self.shard.stream == INTERNAL_KEY


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


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Messages of one stream that follow each other in the file, as columns; ``offset`` and ``end`` are file offsets.

    Args:
        offset: where the first one begins.
        end: where the last one ends.
        stream: their stream key.
        bounds: the first and the last sequence of each shard.
        counts: the messages of each shard.
        numbers: the shard of each message.
        sequences: the sequence of each; they grow within a shard.
        timestamps_ms: the time of each.
        sizes: the bytes of each payload.
        payloads: the payloads; none where checksums were not asked for.
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
        """The messages one by one; without a payload where it was not asked for."""
        shards = {shard.id: shard for shard in self.counts}
        around = 1 + len(self.stream) + FRAME_FIELDS.size + TRAILER_SIZE
        offset = self.offset
        columns = (column.tolist() for column in (self.numbers, self.sequences, self.timestamps_ms, self.sizes))
        for number, sequence, moment, size, payload in zip(*columns, self.payloads or repeat(b"")):
            end = offset + around + size
            yield Frame(offset, end, shards[number], sequence, moment, payload)
            offset = end


def read_run(
    data: bytes, start: int, limit: int, *, stream: str, last: Mapping[Shard, int], most: int, is_checked: bool
) -> Run | None:
    """The messages of one stream from ``start`` on that are as they should be, at a fraction of the cost of one by one.

    Args:
        data: frames without beacons.
        start: where the first one begins.
        limit: none reaches beyond it.
        stream: their stream key.
        last: the last sequence of each shard before them.
        most: messages, at most.
        is_checked: compare checksums, and keep payloads.

    Returns:
        The run, with places in ``data`` for file offsets; ``None`` if not even the first one is as it should be.
    """
    key = bytes((len(stream),)) + stream.encode()
    head = _head(len(key))
    places, payloads = _chain(data, start, limit, key, head_bytes=head.itemsize, most=most, is_checked=is_checked)
    if not places:
        return None
    heads = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), head.itemsize)[places]
    fields = heads.view(head)[:, 0]
    is_good = (fields["number"] <= MAX_SHARD) & (fields["timestamp_ms"] <= MAX_TIMESTAMP_MS)
    is_good &= fields["sequence"] <= MAX_SEQUENCE
    count = len(places) if is_good.all() else int(np.argmin(is_good))
    numbers, sequences = (fields[name][:count].astype(np.int64) for name in ("number", "sequence"))
    by_shard = _ByShard(stream, numbers, sequences)
    if (grown := by_shard.grown(last)) < count:
        count = grown
        by_shard = _ByShard(stream, numbers[:count], sequences[:count])
    if not count:
        return None
    timestamps_ms, sizes = (fields[name][:count].astype(np.int64) for name in ("timestamp_ms", "size"))
    end = places[count - 1] + head.itemsize + int(sizes[-1]) + TRAILER_SIZE
    columns = (numbers[:count], sequences[:count], timestamps_ms, sizes)
    return Run(start, end, stream, by_shard.bounds(), by_shard.counts(), *columns, payloads[:count])


def _chain(
    data: bytes, start: int, limit: int, key: bytes, *, head_bytes: int, most: int, is_checked: bool
) -> tuple[list[int], list[bytes]]:
    """Where messages of a stream begin, as long as each one begins and ends as it should; and the payloads."""
    unpack, size_at, last_head = _SIZE.unpack_from, head_bytes - _SIZE.size, limit - head_bytes
    places: list[int] = []
    payloads: list[bytes] = []
    while start <= last_head and len(places) < most:
        end = start + head_bytes + unpack(data, start + size_at)[0] + TRAILER_SIZE
        if end > limit or data[end - 1] != END or not data.startswith(key, start):
            break
        if is_checked:
            payload = data[start + head_bytes : end - TRAILER_SIZE]
            if cdma2000(payload) != data[end - 3] << 8 | data[end - 2]:
                break
            payloads.append(payload)
        places.append(start)
        start = end
    return places, payloads


class _ByShard:
    """The sequences of messages, those of each shard together."""

    def __init__(self, stream: str, numbers: Integers, sequences: Integers) -> None:
        self._order = np.argsort(numbers, kind="stable")
        grouped = numbers[self._order]
        self._sequences = sequences[self._order]
        self._firsts = np.flatnonzero(np.diff(grouped, prepend=-1))
        self._shards = [Shard(stream, number) for number in grouped[self._firsts].tolist()]

    def grown(self, last: Mapping[Shard, int]) -> int:
        """How many messages there are before one whose sequence is not greater than the one before it."""
        before = np.roll(self._sequences, 1)
        before[self._firsts] = [last.get(shard, -1) for shard in self._shards]
        others = self._order[self._sequences <= before]
        return int(others.min()) if len(others) else len(self._order)

    def _ends(self) -> Integers:
        return np.append(self._firsts[1:], len(self._order))

    def bounds(self) -> Mapping[Shard, tuple[int, int]]:
        """The first and the last sequence of each shard."""
        firsts, lasts = self._sequences[self._firsts].tolist(), self._sequences[self._ends() - 1].tolist()
        return dict(zip(self._shards, zip(firsts, lasts)))

    def counts(self) -> Mapping[Shard, int]:
        """The messages of each shard."""
        return dict(zip(self._shards, (self._ends() - self._firsts).tolist()))


@lru_cache(maxsize=64)
def _head(key_bytes: int) -> np.dtype[np.void]:
    """What stands before a payload: a stream key of so many bytes, with its length, and the fields."""
    fields = [("number", ">u8"), ("sequence", ">u8"), ("timestamp_ms", ">u8"), ("size", ">u4")]
    return np.dtype([("key", f"V{key_bytes}"), *fields])
