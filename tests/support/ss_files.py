"""Stream files for the tests: built from what is to be in them, read back as sets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from stream_consumers.file.format import EOS_PAYLOAD, HEADER_SIZE, FrameWriter, Header
from stream_consumers.file.scanner import Damage, Frame, FrameScanner
from stream_consumers.messages import INTERNAL_KEY, Shard

NO_BEACONS = 1 << 20
"""An interval of beacons, in bytes, that no small file reaches."""
CREATED_MS = 1_700_000_000_123
START_MS = 1_700_000_000_000
ORDERS = Shard("orders")


class Sent(NamedTuple):
    """A message as it was given to the writer."""

    shard: Shard
    sequence: int
    timestamp_ms: int
    payload: bytes


END_OF_STREAM = Sent(Shard(INTERNAL_KEY), 0, 1_700_009_999_999, EOS_PAYLOAD)


def numbered(count: int, *, shards: Sequence[Shard] = (ORDERS,), size: int = 20, first: int = 1) -> list[Sent]:
    """``count`` messages, the shards in turn, a millisecond apart."""
    return [
        Sent(
            shards[index % len(shards)],
            index // len(shards) + first,
            START_MS + index,
            (b"message-%d " % index).ljust(size, b".")[: max(size, 0)],
        )
        for index in range(count)
    ]


def file_bytes(messages: Iterable[Sent], *, interval: int = 1024) -> bytes:
    """A whole file."""
    writer = FrameWriter(beacon_interval=interval, offset=HEADER_SIZE)
    for message in messages:
        writer.write(*message)
    return Header("orders.ss", CREATED_MS, interval).encode() + writer.take()


def cut_front(path: Path, *, first: int) -> None:
    """Put a copy of the newest messages in the place of the file, as a log rotation would."""
    with FrameScanner(path) as scanner:
        start = next(item.offset for item in scanner if isinstance(item, Frame) and item.sequence == first)
    data = path.read_bytes()
    path.with_name("newest").write_bytes(data[:HEADER_SIZE] + data[start:])
    path.with_name("newest").rename(path)


def write_file(path: Path, messages: Iterable[Sent], *, interval: int = 1024) -> Path:
    """Write a whole file."""
    path.write_bytes(file_bytes(messages, interval=interval))
    return path


def items(path: Path, **options: object) -> list[Frame | Damage]:
    """Everything a scanner yields."""
    with FrameScanner(path, **options) as scanner:
        return list(scanner)


def sent(frames: Iterable[Frame | Damage]) -> list[Sent]:
    """The frames among the items, as what was sent."""
    return [Sent(i.shard, i.sequence, i.timestamp_ms, i.payload) for i in frames if isinstance(i, Frame)]


def damages(found: Iterable[Frame | Damage]) -> list[Damage]:
    """The damages among the items."""
    return [item for item in found if isinstance(item, Damage)]


def flip(path: Path, offset: int, mask: int = 0x01) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def break_length(path: Path, sequence: int) -> int:
    """Let a message of a file without beacons reach far beyond its end, since long ago; return where it begins."""
    frame = next(item for item in items(path) if isinstance(item, Frame) and item.sequence == sequence)
    flip(path, payload_offset(frame) - 3, 0x10)
    os.utime(path, (1, 1))
    return frame.offset


def payload_offset(frame: Frame) -> int:
    """Where the payload of a frame without a beacon in it begins."""
    return frame.offset + 1 + len(frame.shard.stream) + 28
