"""Reading a file message by message: live, across killed producers, with damage, from anywhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stream_consumers.consumer import Consumer, Edge
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import OutOfBoundsError, StreamEndedError, StreamNotFoundError, StreamRemovedError
from stream_consumers.file import consumer as file_consumer
from stream_consumers.file.scanner import FrameScanner
from stream_consumers.file.stream_file import BeaconSearch
from stream_consumers.messages import DeadLetter, Shard, from_milliseconds
from stream_consumers.options import AutoStreamReset, FileProducerOptions
from tests.support.polling import until
from tests.support.ss_files import (
    END_OF_STREAM,
    ORDERS,
    START_MS,
    Sent,
    break_length,
    damages,
    file_bytes,
    flip,
    items,
    numbered,
    payload_offset,
    sent,
    write_file,
)
from tests.support.streams import take

PATIENCE = 60.0
CLICKS = Shard("clicks")
KIB_EOS = FileProducerOptions(beacon_interval=1024, end_with_eos=True)


def sequences(consumer: Consumer) -> list[int]:
    return [message.sequence for message in consumer]


# Upstream's consumer tests


def test_earliest_and_latest_until_the_end_of_the_stream(url: str) -> None:
    """F-consumer."""
    with create_producer(url, producer_options=KIB_EOS) as producer:
        for _ in range(50):
            producer.send(b"x", shard=1)
        producer.flush()
        with (
            create_consumer(url) as earliest,
            create_consumer(url, reset=AutoStreamReset.LATEST) as latest,
        ):
            assert take(earliest, 50) == list(range(1, 51))
            for _ in range(50):
                producer.send(b"x", shard=1)
            producer.flush()
            assert take(earliest, 50) == take(latest, 50) == list(range(51, 101))
            assert earliest.next(0) is None
            producer.close()
            for consumer in (earliest, latest):
                for _ in range(2):
                    with pytest.raises(StreamEndedError):
                        consumer.next(PATIENCE)


@pytest.mark.parametrize("interval", [640, 1024 * 1024])
def test_seek_in_a_file_without_and_with_beacons(path: Path, url: str, interval: int) -> None:
    """F-loopback::source."""
    write_file(path, numbered(10, size=300), interval=interval)
    with create_consumer(url, live=False) as consumer:
        for target, first in ((0, 1), (1, 1), (5, 5), (10, 10)):
            consumer.rewind(target)
            assert sequences(consumer) == list(range(first, 11))
        with pytest.raises(OutOfBoundsError):
            consumer.rewind(11)
        for at, first in ((START_MS - 5, 1), (START_MS + 4, 5), (START_MS + 9, 10)):
            consumer.seek(from_milliseconds(at))
            assert sequences(consumer) == list(range(first, 11))
        with pytest.raises(OutOfBoundsError):
            consumer.seek(from_milliseconds(START_MS + 10))


# The end of the stream


def test_an_end_of_stream_that_ends_at_a_beacon(path: Path, url: str) -> None:
    """A beacon follows it then."""

    def ends_at_a_beacon(data: bytes) -> bool:
        end = data.rindex(b"EOS\xed\x7c\r") + 6
        return end % 128 == 0 and end < len(data)

    files = (file_bytes([Sent(ORDERS, 1, 5, b"x" * size), END_OF_STREAM], interval=128) for size in range(128))
    path.write_bytes(next(filter(ends_at_a_beacon, files)))
    with create_consumer(url) as consumer:
        assert take(consumer, 1) == [1]
        with pytest.raises(StreamEndedError):
            consumer.next(1)


def test_an_end_of_stream_in_the_middle(path: Path, url: str) -> None:
    """As SeaStreamer leaves it when it appends to a small file."""
    write_file(path, [*numbered(5), END_OF_STREAM, *numbered(5, first=6)])
    with create_consumer(url, live=False) as consumer:
        assert sequences(consumer) == list(range(1, 11))


def test_a_rewind_leaves_the_end(path: Path, url: str) -> None:
    write_file(path, [*numbered(5), END_OF_STREAM])
    with create_consumer(url) as consumer:
        assert sequences(consumer) == [1, 2, 3, 4, 5]
        consumer.rewind(4)
        assert sequences(consumer) == [4, 5]


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("size", [0, 17, 18, 19, 300])
def test_an_end_of_stream_is_cut_off_while_a_reader_is_before_it(
    path: Path, url: str, is_live: bool, size: int
) -> None:
    """A payload of 18 bytes makes a frame as long as that of the end of the stream."""
    letters: list[DeadLetter] = []
    write_file(path, [*numbered(3), END_OF_STREAM])
    with create_consumer(url, live=is_live, on_dead_letter=letters.append) as consumer:
        assert take(consumer, 1) == [1]
        with create_producer(url, producer_options=KIB_EOS) as producer:
            for _ in range(5):
                producer.send(b"x" * size)
        for expected in range(2, 9):
            message = consumer.next(0)
            assert message is not None
            assert message.sequence == expected
        with pytest.raises(StreamEndedError):
            consumer.next(0)
    assert letters == []


def test_latest_waits_after_an_end_of_stream_for_the_next_producer(path: Path, url: str) -> None:
    write_file(path, [*numbered(3), END_OF_STREAM])
    with create_consumer(url, reset=AutoStreamReset.LATEST) as consumer:
        assert consumer.next(0) is None
        with create_producer(url, producer_options=KIB_EOS) as producer:
            producer.send(b"new")
        message = consumer.next(0)
        assert message is not None
        assert message.sequence == 4
        with pytest.raises(StreamEndedError):
            consumer.next(0)
        consumer.rewind(Edge.END)
        assert consumer.next(0) is None


def test_stale_bytes_at_the_end_are_not_a_message(path: Path, url: str) -> None:
    """SeaStreamer writes over an end-of-stream message without cutting what is left of it."""
    path.write_bytes(file_bytes(numbered(5)) + b"\x03\x45\x4f\x53\xed\x7c\r")
    with create_consumer(url) as consumer:
        assert take(consumer, 5) == [1, 2, 3, 4, 5]
        assert consumer.next(0) is None
    with create_consumer(url, live=False) as consumer:
        assert sequences(consumer) == [1, 2, 3, 4, 5]


def test_a_file_cut_while_it_is_read(path: Path, url: str) -> None:
    write_file(path, numbered(5))
    with create_consumer(url) as consumer:
        assert take(consumer, 5) == [1, 2, 3, 4, 5]
        path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(StreamRemovedError):
            consumer.next(0)


def replace_by_renaming(path: Path) -> None:
    write_file(path.with_name("new.ss"), numbered(2)).rename(path)


def write_anew(path: Path) -> None:
    """In the same inode, and longer than what was read."""
    data = bytearray(file_bytes(numbered(50)))
    data[data.index(b"orders.ss") + len(b"orders.ss") + 7] ^= 1  # created a millisecond earlier or later
    path.write_bytes(data)


def write_over_the_last(path: Path) -> None:
    """A producer takes a message with a damaged length for an unfinished one, and writes in its place."""
    break_length(path, 5)
    with create_producer(f"file://{path}/orders") as producer:
        producer.send(b"more" * 50)


REPLACED = {
    "removed": lambda path: path.unlink(),
    "its folder too": lambda path: path.parent.rename(path.parent.with_name("elsewhere")),
    "rotated": lambda path: (path.rename(path.with_name("old.ss")), write_file(path, numbered(2))),
    "renamed over": replace_by_renaming,
    "written anew": write_anew,
    "the last message written over": write_over_the_last,
}


@pytest.mark.parametrize("how", REPLACED)
def test_a_file_that_was_replaced_under_a_live_reader_is_told(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = write_file(folder / "orders.ss", numbered(5))
    with create_consumer(f"file://{path}/orders") as consumer:
        assert take(consumer, 5) == [1, 2, 3, 4, 5]
        assert consumer.next(0) is None
        REPLACED[how](path)
        for _ in range(2):
            with pytest.raises(StreamRemovedError):
                consumer.next(0.5)


def test_what_was_written_before_the_file_was_rotated_is_read_first(path: Path, url: str) -> None:
    write_file(path, numbered(3))
    with create_consumer(url) as consumer:
        assert take(consumer, 3) == [1, 2, 3]
        assert consumer.next(0) is None
        path.write_bytes(file_bytes(numbered(6)))
        path.rename(path.with_name("old.ss"))
        write_file(path, numbered(1))
        assert take(consumer, 3) == [4, 5, 6]
        for call in (lambda: consumer.next(0.5), lambda: consumer.rewind(2), lambda: consumer.rewind(Edge.BEGINNING)):
            with pytest.raises(StreamRemovedError):
                call()


def test_a_file_that_ended_and_was_replaced_has_ended(path: Path, url: str) -> None:
    write_file(path, [*numbered(2), END_OF_STREAM])
    with create_consumer(url) as consumer:
        assert take(consumer, 2) == [1, 2]
        replace_by_renaming(path)
        assert sequences(consumer) == []


def test_another_working_directory_is_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "orders.ss", numbered(1))
    monkeypatch.chdir(tmp_path)
    with create_consumer("file://orders.ss/orders") as consumer:
        assert take(consumer, 1) == [1]
        monkeypatch.chdir("/")
        assert consumer.next(0) is None
        write_file(tmp_path / "orders.ss", numbered(2))
        assert take(consumer, 1) == [2]


def test_a_message_written_in_pieces(path: Path, url: str) -> None:
    data = file_bytes(numbered(40))
    path.write_bytes(data[:128])
    ends = [0]
    found: list[int] = []
    with create_consumer(url) as consumer, path.open("ab") as file:
        for at in range(128, len(data), 11):
            file.write(data[at : at + 11])
            file.flush()
            while (message := consumer.next(0)) is not None:
                found.append(message.sequence)
            ends.append(len(found))
    assert found == list(range(1, 41))
    assert all(after - before <= 1 for before, after in pairwise(ends))


# A producer that is killed

PRODUCE = """
import sys
from stream_consumers.create import create_producer
from stream_consumers.options import FileProducerOptions
with create_producer(sys.argv[1], producer_options=FileProducerOptions(beacon_interval=1024)) as producer:
    while True:
        producer.send(b"x" * 200)
        producer.flush()
"""


def test_following_a_producer_that_is_killed(path: Path, url: str) -> None:
    """Every message comes once, in order, over two kills, whatever was half written."""
    create_producer(url, producer_options=FileProducerOptions(beacon_interval=1024)).close()
    found: list[int] = []
    with create_consumer(url) as consumer:
        for session in range(2):
            with subprocess.Popen([sys.executable, "-c", PRODUCE, url]) as process:
                try:
                    found += take(consumer, 200)
                finally:
                    process.send_signal(signal.SIGKILL)
            # What a kill within a write leaves: the beginning of the next message.
            with path.open("ab") as file:
                file.write(b"\x06orders\0\0\0"[: 6 * session])
            while (message := consumer.next(0)) is not None:
                found.append(message.sequence)
        with create_producer(url) as producer:
            producer.send(b"after")
        last = until(lambda: consumer.next(1), what="the message after the kills")
    found.append(last.sequence)
    assert found == list(range(1, len(found) + 1))
    assert [message.sequence for message in sent(items(path))] == found
    assert damages(items(path)) == []


def test_an_unfinished_message_is_forgotten_when_it_is_cut_off(path: Path, url: str) -> None:
    """The reader has seen its beginning already when an appending producer writes another one in its place."""
    data = file_bytes([*numbered(5), Sent(Shard("orders", 9), 1, 5, b"never finished")])
    path.write_bytes(data[:-6])
    with create_consumer(url) as consumer:
        assert take(consumer, 5) == [1, 2, 3, 4, 5]
        assert consumer.next(0) is None
        with create_producer(url) as producer:
            receipt = producer.send(b"written in its place, and longer than it was")
        message = consumer.next(PATIENCE)
    assert message is not None
    assert (message.shard, message.sequence) == (receipt.shard, receipt.sequence) == (ORDERS, 6)
    assert message.text() == "written in its place, and longer than it was"


@pytest.mark.parametrize("cut", [1, 20, 45])
def test_an_unfinished_message_is_cut_off_while_a_reader_is_before_it(path: Path, url: str, cut: int) -> None:
    path.write_bytes(file_bytes(numbered(3))[:-cut])
    letters: list[DeadLetter] = []
    with create_consumer(url, on_dead_letter=letters.append) as consumer:
        assert take(consumer, 1) == [1]
        with create_producer(url) as producer:
            for _ in range(30):
                producer.send(b"in its place", timestamp_ms=5)
        found = [
            (message.sequence, message.timestamp_ms) for message in [consumer.next(0) for _ in range(4)] if message
        ]
    assert found == [(2, START_MS + 1), (3, 5), (4, 5), (5, 5)]
    assert letters == []


@pytest.mark.parametrize("window", [128, 512, 1024 * 1024])
def test_a_reader_polls_while_producers_come_and_go(
    window: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_consumer, "FrameScanner", partial(FrameScanner, window=window))
    monkeypatch.setattr(os, "fsync", lambda file: None)
    session = st.tuples(
        st.lists(st.integers(0, 700), max_size=4),  # the sizes of the payloads
        st.booleans(),  # whether it ends the stream
        st.integers(0, 55),  # how many of its last bytes are never written
        st.integers(0, 5),  # how many messages are read then
    )

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.sampled_from([256, 1024]), st.lists(session, min_size=1, max_size=8))
    def check(interval: int, sessions: list[tuple[list[int], bool, int, int]]) -> None:
        path = tmp_path_factory.mktemp("sessions") / "orders.ss"
        url = f"file://{path}/orders"
        letters: list[DeadLetter] = []
        found: list[Sent] = []
        write_file(path, [], interval=interval)
        with create_consumer(url, on_dead_letter=letters.append) as consumer:

            def poll() -> bool:
                try:
                    message = consumer.next(0)
                except StreamEndedError:
                    assert found == [message for message in sent(items(path)) if message.shard == ORDERS]
                    consumer.rewind(Edge.END)
                    return False
                if message is not None:
                    found.append(Sent(message.shard, message.sequence, message.timestamp_ms, message.payload))
                return message is not None

            for number, (sizes, is_ended, cut, polls) in enumerate(sessions):
                options = FileProducerOptions(end_with_eos=is_ended)
                with create_producer(url, producer_options=options) as producer:
                    for size in sizes:
                        producer.send(bytes((number + 65,)) * size, timestamp_ms=START_MS + number)
                last = items(path)[-1:] if sizes or is_ended else []
                for frame in last:
                    os.truncate(path, max(frame.offset, path.stat().st_size - cut))
                for _ in range(polls):
                    poll()
            while poll():
                pass
        assert found == [message for message in sent(items(path)) if message.shard == ORDERS]
        assert letters == []

    check()


# Damage


def test_a_corrupt_message_is_reported_and_reading_goes_on(path: Path, url: str) -> None:
    write_file(path, numbered(50))
    frame = items(path)[20]
    flip(path, payload_offset(frame))
    letters: list[DeadLetter] = []
    with create_consumer(url, live=False, on_dead_letter=letters.append) as consumer:
        assert sequences(consumer) == [n for n in range(1, 51) if n != 21]
    (letter,) = letters
    assert (letter.shard, letter.sequence, letter.timestamp_ms) == (ORDERS, 21, frame.timestamp_ms)
    assert letter.payload == path.read_bytes()[frame.offset : frame.end]
    assert letter.offset == frame.offset


def test_damage_is_logged_by_default(path: Path, url: str, caplog: pytest.LogCaptureFixture) -> None:
    write_file(path, numbered(3))
    flip(path, payload_offset(items(path)[1]))
    with create_consumer(url, live=False) as consumer:
        assert sequences(consumer) == [1, 3]
    (record,) = caplog.records
    assert "dead letter in orders/0" in record.getMessage()


@pytest.mark.parametrize("interval", [1024, 1024 * 1024])
def test_lost_framing_at_the_end_is_a_dead_letter(path: Path, url: str, interval: int) -> None:
    write_file(path, numbered(100), interval=interval)
    frame = items(path)[98 if interval == 1024 else 50]
    flip(path, payload_offset(frame) - 3)  # The length of its payload.
    data = path.read_bytes()
    letters: list[DeadLetter] = []
    with create_consumer(url, live=False, on_dead_letter=letters.append) as consumer:
        assert sequences(consumer) == list(range(1, frame.sequence))
        with pytest.raises(StreamEndedError):
            consumer.next(0)
    (letter,) = letters
    assert (letter.sequence, letter.offset, letter.payload) == (None, frame.offset, data[frame.offset :])
    letters.clear()
    with create_consumer(url, on_dead_letter=letters.append) as consumer:
        assert take(consumer, frame.sequence - 1) == list(range(1, frame.sequence))
        assert consumer.next(0) is None
        assert letters == [], "more bytes may decide"


def test_an_unfinished_message_is_no_dead_letter(path: Path, url: str) -> None:
    write_file(path, numbered(5))
    path.write_bytes(path.read_bytes()[:-5])
    letters: list[DeadLetter] = []
    with create_consumer(url, live=False, on_dead_letter=letters.append) as consumer:
        assert isinstance(consumer, file_consumer.FileConsumer)
        assert sequences(consumer) == [1, 2, 3, 4]
        assert consumer.unfinished_bytes == path.stat().st_size - items(path)[-1].end
    assert letters == []


def test_messages_that_are_written_at_the_end_are_no_dead_letter(
    path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(path, numbered(5))
    end = file_consumer.FileConsumer._end

    def append(self: file_consumer.FileConsumer) -> None:
        write_file(path, numbered(9))
        end(self)

    monkeypatch.setattr(file_consumer.FileConsumer, "_end", append)
    letters: list[DeadLetter] = []
    with create_consumer(url, live=False, on_dead_letter=letters.append) as consumer:
        assert isinstance(consumer, file_consumer.FileConsumer)
        assert sequences(consumer) == [1, 2, 3, 4, 5]
        assert consumer.unfinished_bytes == 0
    assert letters == []


def test_damage_of_other_streams_is_not_reported(path: Path, url: str) -> None:
    write_file(path, numbered(20, shards=(ORDERS, CLICKS)))
    whole = items(path)
    for index in (5, 6):
        flip(path, payload_offset(whole[index]))
    letters: list[DeadLetter] = []
    with create_consumer(url, live=False, on_dead_letter=letters.append) as consumer:
        assert sequences(consumer) == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert [(letter.shard, letter.sequence) for letter in letters] == [(ORDERS, 4)]


# Big files


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads."""
    sizes: list[int] = []
    pread = os.pread

    def counted(file: int, count: int, offset: int) -> bytes:
        data = pread(file, count, offset)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    return sizes


def test_moving_in_a_big_file_reads_a_part_of_it(path: Path, url: str, read_bytes: list[int]) -> None:
    shards = (ORDERS, Shard("orders", 1))
    write_file(path, numbered(40_000, shards=shards, size=1000), interval=256 * 1024)
    size = path.stat().st_size
    with create_consumer(url, live=False) as consumer:
        for first in (19_000, 3, 12_345):
            for by_time in (True, False):
                read_bytes.clear()
                if by_time:
                    consumer.seek(from_milliseconds(START_MS + 2 * (first - 1)))
                else:
                    consumer.rewind(first)
                assert take(consumer, 4) == [first, first, first + 1, first + 1]
                assert sum(read_bytes) < size / 5
        read_bytes.clear()
        with pytest.raises(OutOfBoundsError):
            consumer.rewind(10**9)
        assert sum(read_bytes) < size / 5
    read_bytes.clear()
    with create_consumer(url, reset=AutoStreamReset.LATEST) as consumer:
        assert consumer.next(0) is None
        assert sum(read_bytes) < size / 20


def test_moving_is_right_from_every_place_to_every_place(path: Path, url: str) -> None:
    shards = (ORDERS, Shard("orders", 1), CLICKS)
    write_file(path, numbered(120, shards=shards), interval=640)
    flip(path, 3 * 640)
    with FrameScanner(path) as scanner:
        readable = [message for message in sent(scanner) if message.shard != CLICKS]
    letters: list[DeadLetter] = []
    with create_consumer(url, live=False, on_dead_letter=letters.append) as consumer:
        for target in range(1, 41):
            consumer.rewind(target)
            found = [(message.shard, message.sequence) for message in consumer]
            assert found == [message[:2] for message in readable if message.sequence >= target]
        for at in range(START_MS, START_MS + 119):
            if all(message.timestamp_ms < at for message in readable):
                continue
            consumer.seek(from_milliseconds(at))
            found = [(message.shard, message.sequence) for message in consumer]
            assert found == [message[:2] for message in readable if message.timestamp_ms >= at]


def test_a_damaged_beacon_moves_no_reader_past_a_message(path: Path, url: str) -> None:
    """Each bit of each beacon is wrong once: what is read is what a scan of the whole file finds."""
    write_file(path, numbered(80, size=40), interval=1280)
    with BeaconSearch(path) as beacons:
        count, size = beacons.count, 7 + sum(27 + len(marker.shard.stream) for marker in beacons.markers(1))
    data = path.read_bytes()
    targets = {
        "sequence": (lambda consumer: consumer.rewind(40), lambda message: message.sequence >= 40),
        "time": (
            lambda consumer: consumer.seek(from_milliseconds(START_MS + 39)),
            lambda message: message.timestamp_ms >= START_MS + 39,
        ),
        "end": (lambda consumer: consumer.rewind(Edge.END), lambda message: False),
    }
    for at in (index * 1280 + byte for index in range(1, count + 1) for byte in range(size)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            whole = items(path)
            letters: list[DeadLetter] = []
            with create_consumer(url, on_dead_letter=letters.append) as consumer:
                for move, is_wanted in targets.values():
                    move(consumer)
                    read = []
                    while (message := consumer.next(0)) is not None:
                        read.append((message.shard, message.sequence))
                    assert read == [
                        message[:2] for message in sent(whole) if message.shard == ORDERS and is_wanted(message)
                    ], (at, bit)
            assert {letter.offset for letter in letters} <= {damage.offset for damage in damages(whole)}


@pytest.mark.parametrize("streams", ["orders,rare,clicks", "*"])
def test_moving_in_a_file_with_more_shards_than_a_beacon_names(path: Path, streams: str) -> None:
    """The only marker of a beacon is one shard's; what the others have before it counts, too."""
    with create_producer(f"file://{path}/rare", producer_options=FileProducerOptions(beacon_interval=1024)) as producer:
        producer.send(b"rare", stream="clicks", timestamp_ms=START_MS)
        receipts = [producer.send(b"x" * 100, stream="orders", timestamp_ms=START_MS + n) for n in range(5)]
        producer.send(b"x" * 900, timestamp_ms=START_MS + 9)
    with create_consumer(f"file://{path}/{streams}", live=False) as consumer:
        for first in (2, 4):
            consumer.rewind(first)
            assert [(m.shard, m.sequence) for m in consumer] == [(ORDERS, n) for n in range(first, 6)]
        consumer.seek(from_milliseconds(START_MS + 3))
        assert [m.sequence for m in consumer if m.shard == ORDERS] == [receipts[3].sequence, receipts[4].sequence]


def test_a_shard_that_no_beacon_has_room_for_is_found(path: Path, url: str) -> None:
    early, late = Shard("orders", 1), Shard("orders", 0)
    messages = [Sent(early, n, START_MS + n, b"") for n in range(1, 10)]
    messages += [Sent(late, n, START_MS, b"." * 400) for n in range(1, 4)]
    write_file(path, messages, interval=1024)
    with create_consumer(url, live=False) as consumer:
        consumer.rewind(4)
        assert [message.sequence for message in consumer] == [4, 5, 6, 7, 8, 9]
        consumer.seek(from_milliseconds(START_MS + 1))
        assert [message.sequence for message in consumer] == list(range(1, 10))


@pytest.mark.parametrize("is_producer", [False, True])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, is_producer: bool) -> None:
    os.mkfifo(tmp_path / "orders.ss")
    url = f"file://{tmp_path}/orders.ss/orders"
    with pytest.raises(StreamNotFoundError):
        create_producer(url) if is_producer else create_consumer(url)
