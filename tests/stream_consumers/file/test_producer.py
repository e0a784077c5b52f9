"""Writing files: creation, numbering, appending, locking, limits, and what a power cut leaves."""

from __future__ import annotations

import errno
import io
import logging
import multiprocessing
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from stream_consumers.batches import Range
from stream_consumers.create import create_consumer, create_producer, open_batch_source
from stream_consumers.errors import (
    BrokerError,
    FormatError,
    InvalidOptionError,
    ProducerBusyError,
    SizeLimitError,
    StreamExistsError,
    StreamNotFoundError,
)
from stream_consumers.file.format import Header, decode_beacon, encode_frame
from stream_consumers.file.scanner import MIN_FRAME_BYTES, AtJump, Frame, FrameScanner
from stream_consumers.messages import MAX_SHARD, Shard
from stream_consumers.options import FileCreation, FileProducerOptions, Limits
from stream_consumers.stdio.broker import StdioBroker
from stream_consumers.stdio.spool import spool_stdin
from tests.support.power_cut import Disk, disk
from tests.support.profiles import examples
from tests.support.raising import raises_with
from tests.support.ss_files import (
    END_OF_STREAM,
    ORDERS,
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
from tests.support.streams import sequences_in_file, shard

KIB = FileProducerOptions(beacon_interval=1024)
KIB_EOS = FileProducerOptions(beacon_interval=1024, end_with_eos=True)


def produce(url: str, count: int, options: FileProducerOptions = KIB, *, shards: int = 1) -> None:
    with create_producer(url, producer_options=options) as producer:
        for number in range(count):
            producer.send(b"message-%d" % number, shard=number % shards)


def sequences(path: Path, shard: Shard = ORDERS) -> list[int]:
    return [frame.sequence for frame in sent(items(path)) if frame.shard == shard]


# Creation (F-streamer)


def test_a_file_is_created_appended_to_or_in_the_way_as_asked_for(url: str, path: Path) -> None:
    never, new = (FileProducerOptions(creation=how, beacon_interval=1024) for how in ("never", "always_new"))
    with pytest.raises(StreamNotFoundError):
        create_producer(url, producer_options=never)
    assert not path.exists()
    produce(url, 4, new)
    with pytest.raises(StreamExistsError):
        create_producer(url, producer_options=new)
    produce(url, 1, never)
    produce(url, 4)
    assert sequences(path) == list(range(1, 10))
    header = Header.decode(path.read_bytes(), path=path)
    assert (header.file_name, header.beacon_interval) == ("orders.ss", 1024)


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(StreamNotFoundError):
        create_producer(f"file://{tmp_path}/nowhere/orders.ss/orders")
    with pytest.raises(StreamNotFoundError):
        create_producer(f"file://{tmp_path}/orders")
    (tmp_path / "text").write_text("not a stream " * 20)
    with pytest.raises(FormatError):
        create_producer(f"file://{tmp_path}/text/orders")
    assert (tmp_path / "text").read_text() == "not a stream " * 20


def test_a_name_too_long_for_the_header_leaves_no_file(tmp_path: Path) -> None:
    for creation in (FileCreation.IF_MISSING, FileCreation.ALWAYS_NEW):
        with pytest.raises(InvalidOptionError):
            create_producer(
                f"file://{tmp_path}/{'n' * 110}.ss/orders", producer_options=FileProducerOptions(creation=creation)
            )
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("interval", [0, -1024, 1000, 1025])
def test_beacon_intervals_that_cannot_be(interval: int) -> None:
    with pytest.raises(InvalidOptionError):
        FileProducerOptions(beacon_interval=interval)


# Numbering and appending (F-producer, F-sink)


def test_each_shard_counts_from_one(url: str, path: Path) -> None:
    with create_producer(url, producer_options=KIB) as producer:
        receipts = [producer.send(b"x", shard=n % 3) for n in range(9)]
        other = producer.send(b"x", stream="clicks")
    assert [receipt.sequence for receipt in receipts] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert (other.shard, other.sequence) == (Shard("clicks"), 1)
    assert [(f.shard, f.sequence) for f in sent(items(path))] == [(r.shard, r.sequence) for r in [*receipts, other]]


@pytest.mark.parametrize("count", [1, 25, 100])
def test_an_end_of_stream_is_removed_by_appending(url: str, path: Path, count: int) -> None:
    """Also in a file smaller than a beacon interval, where SeaStreamer leaves it in the middle."""
    for session in range(3):
        produce(url, count, KIB_EOS)
        found = items(path)
        assert [item.offset for item in found if isinstance(item, Frame) and item.is_control] == [found[-1].offset]
        assert sequences(path) == list(range(1, (session + 1) * count + 1))
    with create_consumer(url) as consumer:
        assert [message.sequence for message in consumer] == list(range(1, 3 * count + 1))


@pytest.mark.parametrize("interval", [128, 640])
def test_the_header_of_the_file_wins(url: str, path: Path, interval: int) -> None:
    write_file(path, [*numbered(10), END_OF_STREAM], interval=interval)
    produce(url, 40, KIB_EOS)
    data = path.read_bytes()
    assert Header.decode(data, path=path).beacon_interval == interval
    assert all(decode_beacon(data, offset) for offset in range(max(interval, 128), len(data), interval))
    assert sequences(path) == list(range(1, 51))
    assert damages(items(path)) == []


def test_appended_bytes_are_those_of_one_session(path: Path, url: str) -> None:
    """Numbers, timestamps, running checksums and markers go on as if the producer had never ended."""
    messages = numbered(100)
    whole = file_bytes(messages)
    for session in range(4):
        if not session:
            path.write_bytes(whole[:128])
        with create_producer(url) as producer:
            for message in messages[25 * session : 25 * session + 25]:
                producer.send(message.payload, timestamp_ms=message.timestamp_ms)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("cut", [1, 30, 57, 58])
def test_an_unfinished_message_is_kept_aside(path: Path, url: str, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    write_file(path, numbered(6))
    last = items(path)[-1]
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    with caplog.at_level(logging.WARNING, "stream_consumers.file.producer"):
        produce(url, 2)
    assert sequences(path) == [1, 2, 3, 4, 5, 6, 7]
    assert damages(items(path)) == []
    beside = path.with_name(f"orders.ss.tail-{last.offset}")
    assert ([beside.read_bytes()] if beside.exists() else []) == ([data[last.offset : -cut]] if cut < 58 else [])
    assert len(caplog.records) == (cut < 58)


def test_an_unfinished_message_is_kept_in_a_new_file_that_only_this_user_can_read(path: Path, url: str) -> None:
    write_file(path, numbered(6))
    last = items(path)[-1]
    data = path.read_bytes()[:-1]
    path.write_bytes(data)
    # Its group may be another one than that of a new file.
    path.chmod(0o640)
    planted, target = path.with_name(f"orders.ss.tail-{last.offset}"), path.with_name("target")
    planted.symlink_to(target)
    produce(url, 1)
    assert not target.exists(), "the bytes were written through a link that another user may have made"
    [beside] = set(path.parent.glob("*.tail-*")) - {planted}
    assert beside.read_bytes() == data[last.offset :]
    assert stat.S_IMODE(beside.stat().st_mode) == 0o600


def test_every_cut_can_be_appended_to(path: Path, url: str) -> None:
    data = file_bytes([*numbered(6, size=30), END_OF_STREAM], interval=256)
    path.write_bytes(data)
    ends = [item.end for item in items(path)][:-1]
    for cut in range(128, len(data) + 1):
        path.write_bytes(data[:cut])
        produce(url, 4)
        found = items(path)
        whole = sum(end <= cut for end in ends)
        assert damages(found) == []
        assert sequences(path) == list(range(1, whole + 5)), cut
        with FrameScanner(path) as scanner:
            list(scanner)
            assert scanner.incomplete_bytes == 0
        for beside in path.parent.glob("*.tail-*"):
            beside.unlink()


def test_an_end_of_stream_before_an_unfinished_message(path: Path, url: str) -> None:
    """As a SeaStreamer producer leaves it that was killed while it appended to a small file."""
    data = file_bytes([*numbered(3), END_OF_STREAM, *numbered(1, first=4)])
    path.write_bytes(data[:-5])
    produce(url, 1)
    assert [frame.is_control for frame in items(path) if isinstance(frame, Frame)] == [False] * 4


def test_numbering_goes_on_behind_a_damaged_message(path: Path, url: str) -> None:
    write_file(path, numbered(5))
    flip(path, payload_offset(items(path)[-1]))
    with create_producer(url) as producer:
        assert producer.send(b"next").sequence == 6
    assert sequences(path) == [1, 2, 3, 4, 6]


# One producer at a time


def _try_to_produce(url: str, answers: multiprocessing.Queue[str]) -> None:
    try:
        create_producer(url).close()
        answers.put("opened")
    except ProducerBusyError:
        answers.put("busy")


def test_a_producer_in_another_process_has_to_wait(url: str) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with create_producer(url):
        other = context.Process(target=_try_to_produce, args=(url, answers))
        other.start()
        assert answers.get(timeout=30) == "busy"
        other.join(30)
    _try_to_produce(url, answers)
    assert answers.get(timeout=30) == "opened"


# Limits


@pytest.mark.parametrize("limit", [1000, 1062, 1063, 4000])
def test_size_limit(url: str, path: Path, limit: int) -> None:
    producer = create_producer(url, producer_options=FileProducerOptions(beacon_interval=1024, file_size_limit=limit))

    def send_for_ever() -> None:
        while True:
            producer.send(b"x" * 20)

    with producer, pytest.raises(SizeLimitError) as caught:
        send_for_ever()
    whole = sequences(path)
    assert path.stat().st_size <= limit
    assert (caught.value.facts["limit"], caught.value.facts["size"]) == (limit, path.stat().st_size)
    produce(url, 1)
    assert path.stat().st_size > limit - 58
    assert sequences(path) == [*whole, len(whole) + 1]
    assert damages(items(path)) == []


def test_a_smaller_message_still_fits(url: str, path: Path) -> None:
    with create_producer(
        url, producer_options=FileProducerOptions(beacon_interval=1024, file_size_limit=400)
    ) as producer:
        producer.send(b"x" * 100)
        with pytest.raises(SizeLimitError):
            producer.send(b"x" * 200)
        assert producer.send(b"y" * 20).sequence == 2
    assert sequences(path) == [1, 2]


# Bytes at the end that are no message


def check_kept_as_damage(path: Path, url: str, data: bytes, *, before: int, interval: int) -> None:
    """These bytes stay in the file as one region of damage, and messages are appended after it."""
    create_producer(url).close()
    opened = path.read_bytes()
    for _ in range(2):
        # Without a message, opening the file changes it once.
        create_producer(url).close()
        assert path.read_bytes() == opened
    produce(url, 3)
    (damage,) = damages(items(path))
    kept = len(data) - damage.offset
    following = before + 1 + kept // MIN_FRAME_BYTES
    assert sequences(path) == [*range(1, before + 1), *range(following, following + 3)], "more than those in the tail"
    assert path.read_bytes()[: len(data)] == data
    assert damage.end == -(-(len(data) + kept) // interval) * interval
    assert list(path.parent.glob("*.tail-*")) == []


@pytest.mark.parametrize("interval", [1024 * 1024, 64 * 1024 * 1024])
def test_damage_with_whole_messages_behind_it_is_not_cut_off(path: Path, url: str, interval: int) -> None:
    write_file(path, numbered(100), interval=interval)
    flip(path, items(path)[50].offset, 0x40)
    check_kept_as_damage(path, url, path.read_bytes(), before=50, interval=interval)


def test_a_broken_last_beacon_is_not_cut_off(path: Path, url: str) -> None:
    write_file(path, numbered(100))
    path.write_bytes(path.read_bytes()[:2500])
    flip(path, 2048)
    whole = len(sequences(path))
    check_kept_as_damage(path, url, path.read_bytes(), before=whole, interval=1024)


def unfinished(path: Path, size: int, *, interval: int = 1024 * 1024) -> bytes:
    """Write a file whose last message has the bytes of an intact one in its payload, and is not whole."""
    hidden, _ = encode_frame(Shard("x"), 1, 1, b"hello")
    data = file_bytes([*numbered(2), Sent(ORDERS, 3, 5, hidden + b"y" * 2 * size)], interval=interval)[:size]
    path.write_bytes(data)
    return data


def test_an_unfinished_message_that_contains_a_whole_one_stops_no_producer(path: Path, url: str) -> None:
    data = unfinished(path, 5000)
    check_kept_as_damage(path, url, data, before=2, interval=1024 * 1024)


@pytest.mark.parametrize("size", [1100, 5000])
def test_a_beacon_proves_that_a_message_is_unfinished(path: Path, url: str, size: int) -> None:
    data = unfinished(path, size, interval=1024)
    offset = items(path)[-1].end
    produce(url, 1)
    assert sequences(path) == [1, 2, 3]
    assert damages(items(path)) == []
    assert path.with_name(f"orders.ss.tail-{offset}").read_bytes() == data[offset:]


@pytest.mark.parametrize("seed", range(examples(20)))
def test_whatever_the_end_of_a_file_is_all_its_bytes_are_kept_and_messages_are_appended(
    path: Path, url: str, seed: int
) -> None:
    chance = random.Random(seed)
    interval = chance.choice([128, 1024, 4096])
    hidden, _ = encode_frame(Shard("x"), 1, 1, b"hello")
    messages = numbered(chance.randrange(5, 60), size=chance.choice([0, 20, 300]))
    messages.append(Sent(ORDERS, len(messages) + 1, 5, (hidden + chance.randbytes(50)) * chance.randrange(1, 40)))
    data = bytearray(file_bytes(messages, interval=interval))
    del data[max(128, len(data) - chance.randrange(3000)) :]
    for _ in range(chance.randrange(3)):
        data[chance.randrange(128, len(data) + 1) - 1] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    before = [frame.sequence for frame in sent(items(path, at_jump=AtJump.DECIDE)) if frame.shard == ORDERS]
    create_producer(url).close()
    opened = path.read_bytes()
    kept = b"".join(found.read_bytes() for found in path.parent.glob("*.tail-*"))
    assert (opened[: len(data) - len(kept)] + kept)[: len(data)] == data
    create_producer(url).close()
    assert path.read_bytes() == opened
    produce(url, 70)
    found = sequences(path)
    assert found[-70:] == list(range(found[-70], found[-70] + 70))
    assert found[:-70] == before


def test_bytes_that_cannot_be_saved_stay_where_they_are(path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(file: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_file(path, numbered(6))
    data = path.read_bytes()[:-1]
    path.write_bytes(data)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", pwrite)
        with pytest.raises(BrokerError):
            create_producer(url)
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == data
    produce(url, 1)
    assert sequences(path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("number", "sequence", "timestamp_ms"),
    [(2**48, 2, 5), (MAX_SHARD, 2, 5), (2**64 - 1, 2, 5), (0, 2**64 - 1, 5), (0, 2, 2**64 - 1)],
)
@pytest.mark.parametrize("size", [0, 5000])
def test_whole_messages_behind_damage_are_not_cut_off_whatever_their_numbers(
    path: Path, url: str, number: int, sequence: int, timestamp_ms: int, size: int
) -> None:
    """SeaStreamer reads those whose numbers are beyond our limits."""
    last = Sent(Shard("orders", number), sequence, timestamp_ms, b"x" * size)
    write_file(path, [*numbered(3), last], interval=1024 * 1024)
    flip(path, items(path)[2].offset, 0x40)
    check_kept_as_damage(path, url, path.read_bytes(), before=2, interval=1024 * 1024)


# A disk that takes nothing


def test_a_disk_that_is_full_for_a_while_leaves_no_trace_in_the_file(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, room = os.pwrite, 100

    def pwrite(file: int, data: bytes, offset: int) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken, room = min(room, len(data)), max(0, room - len(data))
        return written(file, bytes(data)[:taken], offset)

    with create_producer(url, producer_options=FileProducerOptions(beacon_interval=1024)) as producer:
        producer.send(b"first")
        producer.flush()
        monkeypatch.setattr(os, "pwrite", pwrite)
        for number in range(50):
            producer.send(b"message-%d" % number)
        with raises_with(BrokerError, undelivered=50, to="50 to orders/0"):
            producer.flush()
        # A part was written: what is whole of it can be read meanwhile.
        assert damages(items(path)) == []
        producer.send(b"later")
        monkeypatch.undo()
    assert sequences(path) == list(range(1, 53))
    assert damages(items(path)) == []


def test_a_disk_that_stays_full_is_told_when_the_producer_ends(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(file: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    producer = create_producer(url)
    producer.send(b"first")
    producer.flush()
    monkeypatch.setattr(os, "pwrite", pwrite)
    producer.send(b"lost")
    with raises_with(BrokerError, undelivered=1):
        producer.close()
    monkeypatch.undo()
    assert sequences(path) == [1]
    # The file is released: another producer goes on.
    produce(url, 1)
    assert sequences(path) == [1, 2]


# A position never covers messages that a power cut could take out of the file again


@pytest.fixture
def lazy(folder: Path) -> Iterator[Disk]:
    with disk(folder) as made:
        yield made


def test_what_is_planned_is_in_the_file_whatever_its_writer_does(lazy: Disk) -> None:
    url = f"file://{lazy.folder}/orders.ss/orders"
    with create_producer(url) as producer:
        for _ in range(100):
            producer.send(b"{}", shard=0)
        producer.flush()
        with lazy.after_power_cut() as found:
            assert not (found / "orders.ss").exists(), "a producer forces its file when it is closed"
        with open_batch_source(url) as source:
            extents = source.extents()
            plan = source.plan({shard(0): Range(0, extents[shard(0)].end)}, limits=Limits(), parallelism=1)
        assert plan is not None
        assert plan.records == 100
        with lazy.after_power_cut() as found:
            assert len(sequences_in_file(found / "orders.ss")) == 100


def test_a_spooled_pipe_is_in_the_file(lazy: Disk) -> None:
    pipe = StdioBroker(io.BytesIO(b"message\n" * 100), io.BytesIO())
    spool_stdin("stdio:///orders", lazy.folder / "spool.ss", broker=pipe)
    with lazy.after_power_cut() as found:
        assert len(sequences_in_file(found / "spool.ss")) == 100
