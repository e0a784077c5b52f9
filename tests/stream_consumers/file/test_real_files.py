"""Files of the real SeaStreamer: decoded, and encoded again byte by byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from stream_consumers.create import create_consumer
from stream_consumers.file.format import HEADER_SIZE, FrameWriter, Header, decode_beacon
from tests.support.ss_files import damages, items, sent

FIXTURES = Path(__file__).parent / "fixtures"
ONE_SESSION = [path.name for path in sorted(FIXTURES.glob("b*.ss"))]
TWO_SESSIONS = "app_b1024_s3_sink.ss"


def encode(path: Path, sessions: list[int]) -> bytes:
    """Decode a file and write it again; each session of the writer begins with an empty state."""
    frames = sent(items(path))
    data = Header.decode(path.read_bytes(), path=path).encode()
    interval = Header.decode(data, path=path).beacon_interval
    for begin, end in zip(sessions, [*sessions[1:], len(frames)]):
        writer = FrameWriter(beacon_interval=interval, offset=len(data))
        for frame in frames[begin:end]:
            writer.write(*frame)
        data += writer.take()
    return data


SESSIONS = {**{name: [0] for name in ONE_SESSION}, TWO_SESSIONS: [0, 60]}


@pytest.mark.parametrize("name", SESSIONS)
def test_encoded_again_byte_by_byte(name: str) -> None:
    assert len(SESSIONS) == 6
    path = FIXTURES / name
    assert encode(path, SESSIONS[name]) == path.read_bytes()
    found = items(path)
    assert damages(found) == []
    assert path.stat().st_size - 300 <= found[-1].end <= path.stat().st_size


def test_messages_are_what_the_real_one_was_given() -> None:
    """Message i went to shard i % 3 with number i // 3 + 1 and i milliseconds after the start."""
    with create_consumer(f"file://{FIXTURES / 'b1024_s3_n100_p64_eos.ss'}/hello") as consumer:
        found = list(consumer)
    assert [(m.shard.stream, m.shard.id, m.sequence, m.timestamp_ms) for m in found] == [
        ("hello", i % 3, i // 3 + 1, 1_700_000_000_000 + i) for i in range(100)
    ]
    assert all(message.payload is not None and len(message.payload) == 64 for message in found)
    assert found[7].text().startswith('{"id":7,"pad":"abc')


@pytest.mark.parametrize("name", SESSIONS)
def test_every_beacon_is_read(name: str) -> None:
    data = (FIXTURES / name).read_bytes()
    interval = Header.decode(data, path=name).beacon_interval
    for offset in range(max(interval, HEADER_SIZE), len(data), interval):
        beacon, size = decode_beacon(data, offset) or (None, 0)
        assert beacon is not None
        assert size >= 7
        assert beacon.encode() == data[offset : offset + size]
