"""Walking the frames of a file: whole ones, unfinished ones, damaged ones, and arbitrary bytes."""

from __future__ import annotations

import os
import random
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stream_consumers.errors import FormatError, StreamNotFoundError, StreamRemovedError
from stream_consumers.file import scanner as file_scanner
from stream_consumers.file.format import (
    FRAME_FIELDS,
    HEADER_SIZE,
    Beacon,
    Header,
    checksum,
    decode_beacon,
    encode_frame,
)
from stream_consumers.file.producer import FileProducer
from stream_consumers.file.scanner import Damage, Frame, FrameScanner, Run
from stream_consumers.messages import MAX_SEQUENCE, MAX_SHARD, MAX_TIMESTAMP_MS, Shard
from tests.support.ss_files import (
    CREATED_MS,
    END_OF_STREAM,
    ORDERS,
    START_MS,
    Sent,
    damages,
    file_bytes,
    flip,
    items,
    numbered,
    payload_offset,
    sent,
    write_file,
)

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
SHARDS = (ORDERS, Shard("orders", 1), Shard("clicks", 7))


@pytest.fixture(autouse=True)
def _runs_of_a_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_scanner, "MIN_RUN_BYTES", 1)


def test_offsets_are_those_of_the_bytes(tmp_path: Path) -> None:
    messages = numbered(40, size=90)
    path = write_file(tmp_path / "orders.ss", messages)
    data = path.read_bytes()
    with FrameScanner(path) as scanner:
        behind = HEADER_SIZE
        for frame in scanner:
            assert scanner.offset == frame.end
            between = data[behind : frame.offset]
            assert between == b"" or decode_beacon(between) is not None
            assert scanner.read_bytes(frame) == data[frame.offset : frame.end]
            assert data[frame.offset : frame.offset + 7] == b"\x06orders" or frame.offset % 1024 > 1000
            behind = frame.end


@pytest.mark.parametrize("interval", [128, 640])
def test_prefixes_never_yield_anything_wrong(tmp_path: Path, interval: int) -> None:
    messages = [*numbered(6, shards=SHARDS, size=100), END_OF_STREAM]
    path = write_file(tmp_path / "orders.ss", messages, interval=interval)
    data, whole = path.read_bytes(), items(path)
    for cut in range(HEADER_SIZE, len(data) + 1):
        path.write_bytes(data[:cut])
        with FrameScanner(path) as scanner:
            assert list(scanner) == [frame for frame in whole if frame.end <= cut]
            assert scanner.offset + scanner.incomplete_bytes == cut
    for cut in range(HEADER_SIZE):
        path.write_bytes(data[:cut])
        with pytest.raises(FormatError):
            FrameScanner(path)


@pytest.mark.parametrize("step", [1, 300])
def test_a_growing_file_yields_the_same_as_a_whole_one(tmp_path: Path, step: int) -> None:
    messages = [*numbered(12, shards=SHARDS, size=150), END_OF_STREAM]
    data = file_bytes(messages, interval=640)
    path = tmp_path / "orders.ss"
    path.write_bytes(data[:HEADER_SIZE])
    found: list[Frame | Damage] = []
    with FrameScanner(path) as scanner, path.open("ab") as file:
        for at in range(HEADER_SIZE, len(data), step):
            file.write(data[at : at + step])
            file.flush()
            # Only the end of the stream comes again.
            found += (item for item in scanner if item not in found[-1:])
    assert sent(found) == messages
    assert damages(found) == []


def test_stop_and_start(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(40, size=90))
    whole = items(path)
    for at in range(1, len(whole)):
        previous = {ORDERS: whole[at - 1].sequence or 0}
        assert items(path, start=whole[at - 1].end, previous=previous) == whole[at:]
        assert items(path, stop=whole[at].end) == whole[: at + 1]
        assert items(path, stop=whole[at].end - 1) == whole[:at]


def test_small_windows_change_nothing(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(60, shards=SHARDS, size=700), interval=640)
    flip(path, payload_offset(items(path)[0]) + 3)
    flip(path, 6400)
    assert items(path, window=512) == items(path)


# Upstream's loopback and reader tests


def test_rewind_to_beacons(tmp_path: Path) -> None:
    """F-loopback::rewind: a message over several beacons makes the second slip to the third."""
    path = write_file(
        tmp_path / "orders.ss",
        [*numbered(5, size=150), Sent(ORDERS, 6, 1, b"x" * 768), *numbered(3, first=7)],
        interval=640,
    )
    whole = items(path)
    with FrameScanner(path) as scanner:
        for index in (1, 2, 3):
            assert scanner.skip_spliced(index)
            first = next(iter(scanner))
            behind = [frame for frame in whole if frame.offset >= 640 * index]
            assert first == behind[0]
    with FrameScanner(path) as scanner:
        assert not scanner.skip_spliced(4)


def test_skip_to_a_frame_that_is_not_whole(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(1, size=2000))
    path.write_bytes(path.read_bytes()[:-1])
    with FrameScanner(path) as scanner:
        assert not scanner.skip_spliced(1)


# Damage


def test_a_flipped_payload_costs_its_frame_only(tmp_path: Path) -> None:
    messages = numbered(20)
    path = write_file(tmp_path / "orders.ss", messages)
    frame = items(path)[4]
    flip(path, payload_offset(frame))
    found = items(path)
    assert sent(found) == messages[:4] + messages[5:]
    (damage,) = damages(found)
    assert damage[:2] == (frame.offset, frame.end)
    assert damage.shard == ORDERS
    assert damage.sequence == 5
    assert damage.timestamp_ms == frame.timestamp_ms
    with FrameScanner(path) as scanner:
        raw = scanner.read_bytes(damage)
    assert raw == path.read_bytes()[frame.offset : frame.end]
    assert f"{checksum(frame.payload):04X}" in damage.reason
    assert f"{checksum(raw[35:-3]):04X}" in damage.reason


def test_lost_framing_goes_on_at_the_next_beacon(tmp_path: Path) -> None:
    messages = numbered(60)
    path = write_file(tmp_path / "orders.ss", messages)
    whole = items(path)
    flip(path, whole[3].offset, 0xF0)
    found = items(path)
    behind = next(frame for frame in whole if frame.offset >= 1024)
    (damage,) = damages(found)
    assert (damage.offset, damage.sequence) == (whole[3].offset, None)
    assert damage.end in (behind.offset, 1024)
    assert sent(found) == messages[:3] + messages[whole.index(behind) :]


@pytest.mark.parametrize("window", [64, 1 << 20])
def test_a_message_that_is_too_long_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    messages = numbered(90)
    messages[40] = messages[40]._replace(payload=b"x" * 50_000)
    path = write_file(tmp_path / "orders.ss", messages)
    whole = items(path)
    monkeypatch.setattr(file_scanner, "MAX_PAYLOAD_BYTES", 10_000)
    monkeypatch.setattr(file_scanner, "MAX_FRAME_BYTES", 11_024)
    found = items(path, window=window)
    (damage,) = damages(found)
    assert (damage.offset, damage.end, damage.sequence) == (whole[40].offset, whole[40].end, None)
    assert found[:40] + found[41:] == whole[:40] + whole[41:]
    with FrameScanner(path) as scanner:
        assert len(scanner.read_bytes(damage)) == 11_024, "a dead letter has its beginning"


def test_a_sparse_file_takes_no_memory(tmp_path: Path) -> None:
    path, size = tmp_path / "orders.ss", 300_000_000
    with path.open("wb") as file:
        file.write(Header("orders.ss", CREATED_MS, 0xFFFFFFFF).encode())
        file.write(b"\x06orders" + FRAME_FIELDS.pack(0, 1, START_MS, size))
        file.seek(size, os.SEEK_CUR)
        file.write(b"\0\0\r")
    tracemalloc.start()
    try:
        with FrameScanner(path) as scanner:
            assert list(scanner) == []
            assert scanner.incomplete_bytes == path.stat().st_size - HEADER_SIZE
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()


def test_shards_of_other_streams_take_no_memory(tmp_path: Path) -> None:
    path, count = tmp_path / "orders.ss", 20_000
    frames = (encode_frame(Shard("clicks", number), 1, START_MS, b"")[0] for number in range(count))
    path.write_bytes(Header("orders.ss", CREATED_MS, 0xFFFFFFFF).encode() + b"".join(frames))
    tracemalloc.start()
    try:
        with FrameScanner(path, streams=["orders"], window=10_000) as scanner:
            assert sum(1 for _ in scanner) == count
            assert tracemalloc.get_traced_memory()[0] < 20 * count
    finally:
        tracemalloc.stop()


def test_lost_framing_without_a_later_beacon_is_unfinished(tmp_path: Path) -> None:
    messages = numbered(6)
    path = write_file(tmp_path / "orders.ss", messages)
    third = items(path)[2]
    flip(path, third.offset, 0xF0)
    with FrameScanner(path) as scanner:
        assert sent(scanner) == messages[:2]
        assert scanner.incomplete_bytes == path.stat().st_size - third.offset


def test_a_sequence_that_does_not_grow(tmp_path: Path) -> None:
    one, two, three = numbered(3)
    other = Sent(Shard("orders", 1), 1, 5, b"own numbers")
    path = write_file(tmp_path / "orders.ss", [one, two, other, two, one, three])
    found = items(path)
    assert sent(found) == [one, two, other, three]
    assert [damage.sequence for damage in damages(found)] == [None, None]
    assert sent(items(path, previous={ORDERS: 2})) == [other, three]


def test_numbers_out_of_range(tmp_path: Path) -> None:
    late = Sent(ORDERS, 1, 2**60, b"late")
    huge = Sent(ORDERS, MAX_SEQUENCE + 1, 5, b"huge")
    last = Sent(ORDERS, 3, 5, b"last")
    path = write_file(tmp_path / "orders.ss", [late, huge, last])
    found = items(path)
    assert sent(found) == [last]
    assert [(damage.sequence, damage.timestamp_ms) for damage in damages(found)] == [(1, None), (None, None)]


def test_a_broken_beacon_between_two_frames_costs_its_interval_only(tmp_path: Path) -> None:
    """Frames of exactly an interval less its beacon: every beacon stands between two frames."""
    beacon = 7 + 1 + len("orders") + 26
    size = 1024 - beacon - 38
    messages = [Sent(ORDERS, 1, 5, b"x" * (1024 - 128 - 38)), *(Sent(ORDERS, n, 5, b"y" * size) for n in range(2, 7))]
    path = write_file(tmp_path / "orders.ss", messages)
    assert sent(items(path)) == messages
    assert [frame.end % 1024 for frame in items(path)] == [0] * 6
    flip(path, 2048)
    found = items(path)
    assert sent(found) == messages[:2] + messages[3:]
    (damage,) = damages(found)
    assert (damage.offset, damage.end) == (2048, 3072)


def test_the_last_beacon_broken_is_unfinished_until_the_next(tmp_path: Path) -> None:
    messages = numbered(100)
    data = file_bytes(messages)
    path = tmp_path / "orders.ss"
    path.write_bytes(data[:2500])
    flip(path, 2048)
    with FrameScanner(path) as scanner:
        first = list(scanner)
        assert damages(first) == []
        damaged = bytearray(data)
        damaged[2048] ^= 1
        path.write_bytes(damaged)
        assert first + list(scanner) == items(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(StreamNotFoundError):
        FrameScanner(tmp_path / "nothing.ss")
    with pytest.raises(StreamNotFoundError):
        FrameScanner(tmp_path)
    (tmp_path / "text").write_text("no stream")
    with pytest.raises(FormatError):
        FrameScanner(tmp_path / "text")


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(5))
    with FrameScanner(path) as scanner:
        assert len(list(scanner)) == 5
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(StreamRemovedError):
            list(scanner)


# Properties

KEYS = st.sampled_from(["", "o", "orders", "k" * 100])
MESSAGES = st.lists(
    st.tuples(
        KEYS,
        st.integers(0, 2),
        st.integers(1, 5),
        st.integers(0, 2**41),
        st.one_of(st.binary(max_size=40), st.integers(0, 3000).map(lambda size: random.Random(size).randbytes(size))),
    ),
    max_size=40,
)


def as_sent(drawn: list[tuple[str, int, int, int, bytes]]) -> list[Sent]:
    last: dict[Shard, int] = {}
    messages = []
    for key, number, step, timestamp_ms, payload in drawn:
        shard = Shard(key, number)
        last[shard] = last.get(shard, 0) + step
        messages.append(Sent(shard, last[shard], timestamp_ms, payload))
    return messages


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scanner") / "orders.ss"


@RELAXED
@given(drawn=MESSAGES, interval=st.one_of(st.integers(128, 3000), st.just(1024 * 1024)))
def test_round_trip(scratch: Path, drawn: list[tuple[str, int, int, int, bytes]], interval: int) -> None:
    messages = as_sent(drawn)
    write_file(scratch, messages, interval=interval)
    found = items(scratch)
    assert sent(found) == messages
    assert damages(found) == []


@RELAXED
@given(
    interval=st.integers(128, 600),
    body=st.one_of(
        st.binary(max_size=3000),
        st.lists(
            st.one_of(st.binary(max_size=30), st.just(b"\r\0\0\0\0\0\r"), st.just(b"\x01k" + b"\0" * 30 + b"\r")),
            max_size=99,
        ).map(b"".join),
    ),
)
def test_arbitrary_bytes_neither_crash_nor_hang(scratch: Path, interval: int, body: bytes) -> None:
    scratch.write_bytes(Header("o", 1, interval).encode() + body)
    with FrameScanner(scratch) as scanner:
        behind = HEADER_SIZE
        for item in scanner:
            assert behind <= item.offset < item.end
            behind = item.end
        assert behind <= scanner.offset <= scratch.stat().st_size


def is_header_field(frame: Frame, data: bytes, offset: int, interval: int) -> bool:
    """Whether ``offset`` is in the fields before the payload of a frame (key, shard, sequence, timestamp, size)."""
    at, left = frame.offset, 1 + len(frame.shard.stream) + FRAME_FIELDS.size
    while left:
        if at % interval == 0:
            _, size = decode_beacon(data, at) or (None, 0)
            at += size
        if at == offset:
            return True
        at, left = at + 1, left - 1
    return False


def assert_nothing_is_lost_silently(path: Path, data: bytes, whole: list[Frame], offset: int, mask: int) -> None:
    damaged = bytearray(data)
    damaged[offset] ^= mask
    path.write_bytes(damaged)
    interval = Header.decode(data, path=path).beacon_interval
    with FrameScanner(path) as scanner:
        found = list(scanner)
        tail = scanner.offset
    read = {item for item in found if isinstance(item, Frame)}
    regions = [(damage.offset, damage.end) for damage in damages(found)] + [(tail, len(data))]
    altered = [
        frame
        for frame in whole
        if frame.offset <= offset < frame.end and is_header_field(frame, data, offset, interval)
    ]
    for frame in whole:
        if frame in read or frame in altered:
            continue
        assert any(begin < frame.end and frame.offset < end for begin, end in regions), (offset, mask, frame.sequence)
    assert len(read - set(whole)) <= len(altered), (offset, mask)


@pytest.mark.parametrize("interval", [128, 640])
def test_any_byte_flipped_loses_nothing_silently(scratch: Path, interval: int) -> None:
    data = file_bytes(numbered(9, shards=SHARDS, size=60), interval=interval)
    scratch.write_bytes(data)
    whole = [item for item in items(scratch) if isinstance(item, Frame)]
    masks = random.Random(7)
    for offset in range(HEADER_SIZE, len(data)):
        assert_nothing_is_lost_silently(scratch, data, whole, offset, masks.randrange(1, 256))


@RELAXED
@given(
    drawn=MESSAGES, interval=st.integers(128, 1500), place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255)
)
def test_damage_loses_nothing_silently(
    scratch: Path, drawn: list[tuple[str, int, int, int, bytes]], interval: int, place: float, mask: int
) -> None:
    data = file_bytes(as_sent(drawn), interval=interval)
    if len(data) == HEADER_SIZE:
        return
    scratch.write_bytes(data)
    whole = [item for item in items(scratch) if isinstance(item, Frame)]
    offset = HEADER_SIZE + int(place * (len(data) - HEADER_SIZE))
    assert_nothing_is_lost_silently(scratch, data, whole, offset, mask)


def place(item: Frame | Damage) -> tuple[object, ...]:
    return item.offset, item.end, item.shard, item.sequence, item.timestamp_ms


@RELAXED
@given(
    drawn=MESSAGES,
    interval=st.one_of(st.integers(128, 1500), st.just(1024 * 1024)),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=3),
    most=st.integers(1, 5),
    last=st.integers(0, 40),
)
def test_runs_are_the_items_one_by_one(
    scratch: Path,
    drawn: list[tuple[str, int, int, int, bytes]],
    interval: int,
    flips: list[tuple[float, int]],
    most: int,
    last: int,
) -> None:
    """Whatever is damaged, wherever they end, and without checksums at the same places."""
    messages = as_sent(drawn)
    if len(messages) % 2:
        messages = [*messages, END_OF_STREAM]
    data = bytearray(file_bytes(messages, interval=interval))
    for part, mask in flips if messages else ():
        data[HEADER_SIZE + int(part * (len(data) - HEADER_SIZE))] ^= mask
    scratch.write_bytes(data)
    whole = items(scratch)
    stop = whole[last % len(whole)].end if whole and last else None
    expected = [item for item in whole if stop is None or item.end <= stop]
    for is_checked in (True, False):
        with FrameScanner(scratch) as scanner, pytest.MonkeyPatch.context() as patch:
            patch.setattr(file_scanner, "MAX_RUN_MESSAGES", most)
            found: list[Frame | Damage] = []
            for block in scanner.blocks(stop=stop, is_checked=is_checked):
                if isinstance(block, Run):
                    assert 1 <= len(block.sizes) <= most
                    frames = list(block.frames())
                    assert (frames[0].offset, frames[-1].end) == (block.offset, block.end)
                    firsts = {frame.shard: frame.sequence for frame in reversed(frames)}
                    lasts = {frame.shard: frame.sequence for frame in frames}
                    assert block.bounds == {shard: (firsts[shard], lasts[shard]) for shard in lasts}
                    assert block.counts == Counter(frame.shard for frame in frames)
                    found += frames
                else:
                    found.append(block)
                if stop is not None and block.end >= stop:
                    break
        assert list(map(place, found)) == list(map(place, expected))
        assert not is_checked or found == expected


def test_streams_in_turn_are_not_looked_at_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(2000, shards=(ORDERS, Shard("click"))), interval=1024 * 1024)
    calls: list[int] = []
    read_run = file_scanner.read_run
    monkeypatch.setattr(file_scanner, "read_run", lambda *a, **k: (calls.append(1), read_run(*a, **k))[1])
    with FrameScanner(path) as scanner:
        assert len(list(items_of(scanner.blocks()))) == 2000
    assert len(calls) < 40


def test_sequences_that_begin_again_are_not_looked_at_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [*numbered(4, first=10**6), *numbered(2000)]
    path = write_file(tmp_path / "orders.ss", messages, interval=1024 * 1024)
    spans: list[int] = []
    read_run = file_scanner.read_run
    monkeypatch.setattr(file_scanner, "read_run", lambda *a, **k: (spans.append(k["span"]), read_run(*a, **k))[1])
    with FrameScanner(path) as scanner:
        assert len(list(items_of(scanner.blocks()))) == 2004
    assert len(spans) < 40
    assert max(spans[1:]) == file_scanner.MIN_SPAN


@pytest.mark.parametrize("length", [2, 7, 8])
def test_payloads_that_contain_what_begins_a_message(tmp_path: Path, length: int) -> None:
    """Only the whole stream key of a message that begins in a payload ends a run."""
    begin = b"\r\x06orders"[:length]
    messages = [message._replace(payload=b"%b?" % begin * 2) for message in numbered(200)]
    path = write_file(tmp_path / "orders.ss", messages, interval=1024 * 1024)
    with FrameScanner(path) as scanner:
        blocks = list(scanner.blocks())
    assert sent(items_of(blocks)) == messages
    assert (len(blocks) == 1) is (length < 8)


def test_shards_of_a_run_whose_numbers_are_the_same_in_16_bits_are_kept_apart(tmp_path: Path) -> None:
    shards = [Shard("orders", number) for number in (3, 65536 + 3, MAX_SHARD & ~0xFFFF | 3)]
    path = write_file(tmp_path / "orders.ss", numbered(300, shards=shards), interval=1024 * 1024)
    with FrameScanner(path) as scanner:
        (run,) = scanner.blocks()
    assert isinstance(run, Run)
    assert run.counts == dict.fromkeys(shards, 100)
    assert run.bounds == dict.fromkeys(shards, (1, 100))


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_run_ends_before_a_wrong_end_and_before_a_beacon(tmp_path: Path, is_checked: bool) -> None:
    messages = [message._replace(payload=b"\r" * 150) for message in numbered(60)]
    path = write_file(tmp_path / "orders.ss", messages, interval=2000)
    wrong = items(path)[3]
    flip(path, payload_offset(wrong))
    flip(path, wrong.end - 1)
    with FrameScanner(path) as scanner:
        found = list(items_of(scanner.blocks(is_checked=is_checked)))
    assert list(map(place, found)) == list(map(place, items(path)))


def test_a_message_that_is_not_read_yet_is_not_copied_each_time_that_more_is(tmp_path: Path) -> None:
    path = write_file(tmp_path / "orders.ss", numbered(1, size=8 * 1024 * 1024), interval=1024 * 1024 * 1024)
    copies: list[int] = []

    class Copying(FrameScanner):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "_copy" and isinstance(value, bytes):
                copies.append(len(value))
            super().__setattr__(name, value)

    with Copying(path, window=64 * 1024) as scanner:
        (block,) = scanner.blocks()
    assert block.end == path.stat().st_size
    assert len(copies) <= 1, "of 129 parts"


@pytest.mark.parametrize(
    "odd",
    [
        Sent(ORDERS, 3, START_MS, b"a sequence again"),
        Sent(ORDERS, 2**63, START_MS, b"a sequence that is too great"),
        Sent(ORDERS, MAX_SEQUENCE + 1, START_MS, b"a sequence with none behind it"),
        Sent(SHARDS[1], 2**64 - 1, START_MS, b"the greatest sequence"),
        Sent(ORDERS, 100, MAX_TIMESTAMP_MS + 1, b"a time that is too late"),
        Sent(ORDERS, 100, 2**64 - 1, b"the latest time"),
        Sent(Shard("orders", 2**63), 1, START_MS, b"a shard that is too great"),
        Sent(Shard("prders", 0), 1, START_MS, b"a stream with a name as long"),
        Sent(Shard("or", 0), 1, START_MS, b"a stream with a shorter name"),
        END_OF_STREAM,
    ],
    ids=lambda odd: odd.payload.decode(),
)
@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("place_of_it", [0, 12, 40])
def test_runs_end_where_a_message_is_odd(tmp_path: Path, odd: Sent, is_checked: bool, place_of_it: int) -> None:
    messages = numbered(40, shards=SHARDS[:2], first=10)
    messages.insert(place_of_it, odd)
    path = write_file(tmp_path / "orders.ss", messages, interval=1024 * 1024)
    previous = {ORDERS: 5}
    with FrameScanner(path, previous=previous) as scanner:
        found = list(items_of(scanner.blocks(is_checked=is_checked)))
    expected = items(path, previous=previous)
    assert list(map(place, found)) == list(map(place, expected))
    assert [type(item) for item in found] == [type(item) for item in expected]


@pytest.mark.parametrize("place_of_it", [0, 12, 40, 57])
def test_runs_end_where_a_message_may_contain_others(tmp_path: Path, place_of_it: int) -> None:
    """Whether or not checksums are compared, so that all readers find the same damage."""
    path = write_file(tmp_path / "f.ss", numbered(60, size=26), interval=1024 * 1024)
    data, hit = path.read_bytes(), items(path)[place_of_it]
    assert isinstance(hit, Frame)
    for mask in (0x40, 0x80):
        path.write_bytes(data)
        flip(path, payload_offset(hit) - 1, mask)
        (damage,) = damages(items(path)) or [None]
        assert damage is None or (damage.offset, damage.end, damage.shard) == (hit.offset, hit.end + mask, None)
        assert damage is not None or hit.end + mask > len(data)
        for is_checked in (True, False):
            with FrameScanner(path) as scanner:
                found = list(items_of(scanner.blocks(is_checked=is_checked)))
            assert list(map(place, found)) == list(map(place, items(path)))


def items_of(blocks: Iterable[Run | Frame | Damage]) -> Iterator[Frame | Damage]:
    for block in blocks:
        yield from block.frames() if isinstance(block, Run) else (block,)


def lines_run(action: Callable[[], object]) -> int:
    """Count the lines of the scanner that an action runs: unlike seconds, they are the same on every machine."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != file_scanner.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("window", [4096, 1024 * 1024])
def test_beacons_that_the_last_one_contradicts_are_compared_once(tmp_path: Path, window: int) -> None:
    def scan_of(beacons: int, *, interval: int = 128) -> int:
        body = interval - len(Beacon(0, ()).encode())
        content = Header("orders.ss", CREATED_MS, interval).encode()
        for number in range(beacons):
            remaining = (beacons - number) * body + (number == beacons - 1)
            content += Beacon(remaining, ()).encode() + b"\xff" * body
        path = tmp_path / f"{beacons}.ss"
        path.write_bytes(content + Beacon(0, ()).encode() + b"\xff" * 200)
        found: list[Frame | Damage] = []
        lines = lines_run(lambda: found.extend(items(path, window=window)))
        assert [(item.offset, item.end) for item in found] == [(HEADER_SIZE, HEADER_SIZE + beacons * interval)]
        return lines

    assert scan_of(1000) < 3 * scan_of(500)


@pytest.mark.parametrize("streams", [1, 70])
def test_messages_of_any_stream_are_found_behind_damage(tmp_path: Path, streams: int) -> None:
    """In the first message of the file, and in the last stream of many, behind which only that stream has messages."""
    path = tmp_path / "orders.ss"
    with FileProducer(f"file://{path}/orders") as producer:
        for number in range(streams):
            producer.send(b"first", stream=f"s{number:03}")
        producer.flush()
        damaged = HEADER_SIZE if streams == 1 else path.stat().st_size
        for _ in range(5):
            producer.send(b"more", stream=f"s{streams - 1:03}" if streams == 1 else "later")
    content = bytearray(path.read_bytes())
    content[damaged] ^= 1
    path.write_bytes(content)
    with FrameScanner(path) as scanner:
        assert len(list(scanner)) == (0 if streams == 1 else streams)
        assert not scanner.has_unfinished_message()
    with FileProducer(f"file://{path}/orders") as producer:
        producer.send(b"new")
    assert path.read_bytes()[: len(content)] == bytes(content)


def test_a_tail_that_looks_like_many_messages_is_checked_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = b"\x06orders" + FRAME_FIELDS.pack(0, 2, START_MS, 4000)
    path = write_file(tmp_path / "orders.ss", numbered(1), interval=2**30)
    with path.open("ab") as file:
        file.write(b"\x06orders" + FRAME_FIELDS.pack(0, 2, START_MS, 10**6) + head * 500 + b"\x0d" * 5000)
    monkeypatch.setattr(file_scanner, "TAIL_BYTES", 64 * 1024)
    sums: list[int] = []
    monkeypatch.setattr(file_scanner, "cdma2000", lambda payload: sums.append(len(payload)) or -1)
    with FrameScanner(path) as scanner:
        assert len(list(scanner)) == 1
        assert not scanner.has_unfinished_message()
    assert 0 < sum(sums) <= 2 * 64 * 1024


def test_more_bytes_after_the_last_message_than_are_searched_may_contain_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_scanner, "TAIL_BYTES", 4096)
    path = write_file(
        tmp_path / "orders.ss", [Sent(ORDERS, 1, START_MS, b"x" * 5000), *numbered(9, first=2)], interval=2**30
    )
    content = bytearray(path.read_bytes())
    content[HEADER_SIZE + 1 + len("orders") + FRAME_FIELDS.size - 4] ^= 1  # The length of the first payload.
    path.write_bytes(content)
    with FileProducer(f"file://{path}/orders") as producer:
        producer.send(b"new")
    assert path.read_bytes()[: len(content)] == bytes(content)
