"""The ``.ss`` format byte by byte, against what the real SeaStreamer writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_consumers.create import create_consumer
from stream_consumers.errors import FormatError, InvalidOptionError, SizeLimitError, UnsupportedVersionError
from stream_consumers.file import format as file_format
from stream_consumers.file.format import (
    EOS_PAYLOAD,
    HEADER_SIZE,
    Beacon,
    BeaconError,
    FrameWriter,
    Header,
    Marker,
    checksum,
    decode_beacon,
    encode_frame,
    marker_capacity,
)
from stream_consumers.messages import INTERNAL_KEY, Shard
from tests.support.raising import raises_with
from tests.support.ss_files import Sent, damages, items, sent

HELLO = Shard("hello")
U64 = st.integers(0, 2**64 - 1)
KEYS = st.text("abcXYZ019._-", max_size=249)
MARKERS = st.builds(Marker, st.builds(Shard, KEYS, U64), U64, U64, st.integers(0, 2**16 - 1))
TINY = bytes.fromhex(
    "537301 07 74696e792e7373 000001a1fb6ea325 00100000"
    + "00" * 104
    + "0d"
    + "05 68656c6c6f 0000000000000000 0000000000000001 0000018bcfe56801 00000009 6d6573736167652d31 f79e 0d"
    + "05 68656c6c6f 0000000000000000 0000000000000002 0000018bcfe56802 00000009 6d6573736167652d32 6750 0d"
    + "05 68656c6c6f 0000000000000000 0000000000000003 0000018bcfe56803 00000009 6d6573736167652d33 af37 0d"
    + "15 5345415f53545245414d45525f494e5445524e414c 0000000000000000 0000000000000000"
    + "000001a1fb6ea325 00000003 454f53 ed7c 0d"
)
"""A file of the real crate: three messages, then the end of the stream."""


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"123456789", 0x4C06),
        (b"", 0xFFFF),
        (b"EOS", 0xED7C),
    ],
)
def test_checksum_vectors(data: bytes, crc: int) -> None:
    assert checksum(data) == crc
    assert checksum(data[3:], checksum(data[:3])) == crc


def test_tiny_file_is_written_byte_by_byte() -> None:
    header = Header("tiny.ss", 0x1A1FB6EA325, 1024 * 1024).encode()
    writer = FrameWriter(beacon_interval=1024 * 1024, offset=128)
    for number in (1, 2, 3):
        writer.write(HELLO, number, 1_700_000_000_000 + number, b"message-%d" % number)
    assert len(TINY) == 322
    assert header == TINY[:128]
    assert header + writer.take() + encode_frame(Shard(INTERNAL_KEY), 0, 0x1A1FB6EA325, EOS_PAYLOAD)[0] == TINY


def test_tiny_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tiny.ss"
    path.write_bytes(TINY)
    found = items(path)
    assert sent(found)[:3] == [Sent(HELLO, n, 1_700_000_000_000 + n, b"message-%d" % n) for n in (1, 2, 3)]
    assert [(item.offset, item.end) for item in found] == [(0x80, 0xAE), (0xAE, 0xDC), (0xDC, 0x10A), (0x10A, 0x142)]
    assert found[3].is_control
    assert found[3].payload == b"EOS"


def test_what_pads_a_header_says_nothing() -> None:
    header = Header("ö.ss", 1_700_000_000_123, 640)
    assert Header.decode(header.encode()[:40] + b"\xff" * 87 + b"\r", path="x") == header


@pytest.mark.parametrize(("created_at_ms", "interval"), [(-1, 1024), (2**64, 1024), (0, 2**32)])
def test_numbers_that_do_not_fit_the_header(created_at_ms: int, interval: int) -> None:
    with pytest.raises(InvalidOptionError):
        Header("orders.ss", created_at_ms, interval).encode()


def test_a_file_name_that_is_no_text_is_written_nevertheless() -> None:
    assert Header.decode(Header("a\udcff.ss", 0, 1024).encode(), path="x").file_name == "a?.ss"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=111), U64, st.integers(128, 2**32 - 1))
def test_every_header_comes_back(file_name: str, created_at_ms: int, interval: int) -> None:
    header = Header(file_name, created_at_ms, interval)
    if len(file_name.encode()) > 111:
        with pytest.raises(InvalidOptionError):
            header.encode()
    else:
        assert Header.decode(header.encode(), path="x") == header


@given(st.binary(max_size=200) | st.binary(min_size=124, max_size=140).map(lambda data: b"Ss\x01" + data))
def test_any_bytes_are_a_header_or_refused(data: bytes) -> None:
    try:
        header = Header.decode(data, path="orders.ss")
    except (FormatError, UnsupportedVersionError):
        return
    assert len(data) >= 128
    assert header.beacon_interval >= 128


def test_broken_headers() -> None:
    data = Header("orders.ss", 1, 1024).encode()
    for bad in (b"", b"S", b"PAR1" + data[4:], b"ss" + data[2:]):
        with pytest.raises(FormatError):
            Header.decode(bad, path="orders")
    for length in (2, 3, 4, 127):
        with raises_with(FormatError, bytes=length, needed=128):
            Header.decode(data[:length], path="orders")
    with raises_with(UnsupportedVersionError, version=2, known=1):
        Header.decode(b"Ss\x02" + data[3:], path="orders")
    with raises_with(FormatError, name_bytes=112):
        Header.decode(b"Ss\x01\x70" + data[4:], path="orders")
    with raises_with(FormatError, beacon_interval=127):
        Header.decode(data[:21] + (127).to_bytes(4, "big") + data[25:], path="orders")


def test_beacon_splice_of_a_real_file() -> None:
    """Frame 21 of bea.ss is cut after six bytes of its timestamp, at offset 0x400."""
    shard = Shard("hi", 2)
    writer = FrameWriter(beacon_interval=1024, offset=128)
    for number in range(1, 22):
        writer.write(shard, number, 1_700_000_000_000 + number, b"message-%d" % number)
    data = bytes(128) + writer.take()
    assert data[0x3E7:0x3EA] == b"\x02hi"
    before = "0015 0000018bcfe5"
    beacon = "0d 00000013 01 02 6869 0000000000000002 0000000000000015 0000018bcfe56815 53b2 0d"
    behind = "6815 0000000a" + b"message-21".hex()
    expected = bytes.fromhex(before + beacon + behind)
    assert data[0x3F8 : 0x3F8 + len(expected)] == expected


def test_multi_beacon_splice() -> None:
    """Payloads of 2500 bytes over beacons 1024 bytes apart, as in a file of the real crate."""
    shard = Shard("hi")
    writer = FrameWriter(beacon_interval=1024, offset=128)
    for number in (1, 2):
        writer.write(shard, number, 1_700_000_000_000 + number, b"p" * 2500)
    data = bytes(128) + writer.take()
    found = [decode_beacon(data, offset) for offset in range(1024, len(data), 1024)]
    beacons = [beacon for beacon, _ in found if beacon]
    assert [beacon.remaining for beacon in beacons] == [1638, 650, 2196, 1208, 220]
    assert [beacon.markers[0].sequence for beacon in beacons] == [1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("interval", "capacity"),
    [(128, 0), (570, 0), (571, 1), (1024, 1), (1135, 2), (1024 * 1024, 127), (2**32 - 1, 127)],
)
def test_marker_capacity(interval: int, capacity: int) -> None:
    assert marker_capacity(interval) == capacity


def test_markers_take_turns() -> None:
    shards = [Shard("a", 0), Shard("a", 1), Shard("b", 0)]
    writer = FrameWriter(beacon_interval=640, offset=128)
    for index in range(60):
        writer.write(shards[index % 3], index // 3 + 1, index, b"x" * 30)
    data = bytes(128) + writer.take()
    named = [decode_beacon(data, offset)[0].markers[0].shard for offset in range(640, len(data), 640)]
    assert named[:4] == [shards[0], shards[1], shards[2], shards[0]]


@pytest.mark.parametrize(
    "data",
    [
        b"\x0e\0\0\0\0\0\r",
        b"\x0e",
        b"\r\0\0\0\0\0\x0e",
        b"\r\0\0\0\0\x01\xfa" + b"k" * 300,
        b"\r\0\0\0\0\x01\x01?" + b"\0" * 26 + b"\r",
        b"\r\0\0\0\0\x01\x01\xff" + b"\0" * 26 + b"\r",
        b"\r\0\0\0\0\x01\x01k" + b"\0" * 26 + b"\x0e",
    ],
)
def test_no_beacon(data: bytes) -> None:
    with pytest.raises(BeaconError):
        decode_beacon(data)


def test_empty_beacon_behind_the_header_when_the_interval_is_128() -> None:
    assert FrameWriter(beacon_interval=128, offset=128).take().hex() == "0d00000000000d"
    assert FrameWriter(beacon_interval=640, offset=128).take() == b""


def test_beacon_at_once_when_a_frame_ends_at_the_boundary() -> None:
    writer = FrameWriter(beacon_interval=1024, offset=128)
    writer.write(HELLO, 1, 5, b"x" * (1024 - 128 - 37))
    data = writer.take()
    assert writer.offset == 128 + len(data)
    beacon, size = decode_beacon(data, 1024 - 128) or (None, 0)
    assert beacon is not None
    assert beacon.remaining == 0
    assert size == len(data) - 896
    assert beacon.markers[0][:3] == (HELLO, 1, 5)


def test_a_frame_that_does_not_fit_leaves_the_writer_as_it_was() -> None:
    writer = FrameWriter(beacon_interval=1024, offset=128)
    with pytest.raises(InvalidOptionError):
        writer.write(HELLO, -1, 0, b"")
    assert (writer.take(), writer.offset, writer.shards) == (b"", 128, {})


def test_a_message_beyond_the_limit_leaves_no_shard_behind() -> None:
    plain, limited = (FrameWriter(beacon_interval=1024, offset=128) for _ in range(2))
    with pytest.raises(SizeLimitError):
        limited.write(Shard("a"), 1, 1, bytes(2000), limit=200)
    for writer in (plain, limited):
        writer.write(Shard("b"), 1, 1, bytes(2000))
    assert limited.take() == plain.take()


@given(st.integers(0, 2**32 - 1), st.lists(MARKERS, max_size=6), st.binary(max_size=9), st.binary(max_size=9))
def test_every_beacon_comes_back_and_none_before_its_last_byte(
    remaining: int, markers: list[Marker], before: bytes, behind: bytes
) -> None:
    beacon = Beacon(remaining, tuple(markers))
    data = beacon.encode()
    assert decode_beacon(before + data + behind, len(before)) == (beacon, len(data))
    for length in range(len(data)):
        assert decode_beacon(before + data[:length], len(before)) is None


@given(
    st.binary(max_size=80) | st.binary(max_size=80).map(lambda data: b"\r\0\0\0\1" + data),
    st.integers(0, 3),
)
def test_any_bytes_are_a_beacon_or_refused(data: bytes, at: int) -> None:
    try:
        found = decode_beacon(data, at)
    except BeaconError:
        return
    if found is not None:
        beacon, size = found
        assert beacon.encode() == data[at : at + size]


@given(KEYS, st.integers(), st.integers(), st.integers(), st.binary(max_size=50))
def test_a_frame_fits_or_is_refused(key: str, shard_id: int, sequence: int, timestamp_ms: int, payload: bytes) -> None:
    numbers = (shard_id, sequence, timestamp_ms)
    try:
        data, crc = encode_frame(Shard(key, shard_id), sequence, timestamp_ms, payload)
    except InvalidOptionError:
        assert not all(0 <= number < 2**64 for number in numbers)
        return
    head = 1 + len(key)
    assert data[:head] == bytes((len(key),)) + key.encode()
    assert [int.from_bytes(data[head + 8 * place :][:8], "big") for place in range(3)] == list(numbers)
    assert data[head + 24 :] == len(payload).to_bytes(4, "big") + payload + crc.to_bytes(2, "big") + b"\r"


def test_a_payload_that_is_too_long_to_be_read_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_format, "MAX_PAYLOAD_BYTES", 10)
    assert encode_frame(Shard("orders"), 1, 0, b"x" * 10)
    with pytest.raises(InvalidOptionError):
        encode_frame(Shard("orders"), 1, 0, b"x" * 11)


# Files of the real SeaStreamer: decoded, and encoded again byte by byte


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
