"""Stored batches that are damaged, on a real broker whose log a test changes in place."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from confluent_kafka import Producer

from stream_consumers.batches import LastMessage, Range
from stream_consumers.errors import FormatError
from stream_consumers.kafka import client, messages
from stream_consumers.kafka.batches import KafkaBatchSource, KafkaSplit
from stream_consumers.kafka.consumer import KafkaConsumer
from stream_consumers.messages import DeadLetter, Shard
from stream_consumers.urls import StreamUrl
from tests.support.kafka_broker import Listeners
from tests.support.kafka_topics import Broker

SECONDS = 20.0
# A batch begins with its base offset and its length, and its records after 61 bytes.
HEADER = struct.Struct(">qi")
RECORDS = 61


@pytest.fixture
def broker(kafka_listeners: Listeners) -> Iterator[Broker]:
    with Broker(kafka_listeners.plain) as broker:
        yield broker


@pytest.fixture
def topic(broker: Broker) -> str:
    """A topic with three batches of ten messages."""
    topic = broker.create()
    for first in (0, 10, 20):
        # It sends a batch only when it has ten messages; flush() would send at once.
        producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 60_000, "batch.num.messages": 10})
        for number in range(first, first + 10):
            producer.produce(topic, b"number %d" % number)
        deadline = time.monotonic() + SECONDS
        while len(producer) and time.monotonic() < deadline:
            producer.poll(0.1)
        assert not len(producer)
    return topic


@pytest.fixture
def log(topic: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return log_of(topic, tmp_path_factory)


def log_of(topic: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (found,) = tmp_path_factory.getbasetemp().rglob(f"data/{topic}-0/*.log")
    return found


def flip(log: Path, place: Callable[[bytes], int], bit: int) -> None:
    """Flip bits of a byte in the last batch but one; ``place`` finds the byte in it."""
    data = log.read_bytes()
    starts = [0]
    while starts[-1] < len(data):
        starts.append(starts[-1] + HEADER.size + HEADER.unpack_from(data, starts[-1])[1])
    *_, start, end, _ = starts
    at = start + place(data[start:end])
    with log.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ bit]))


def payload(batch: bytes) -> int:
    return batch.index(b"number 13")


def offset_delta(batch: bytes) -> int:
    """The byte of the fourth record after its length, attributes and the delta of its time, all of one byte."""
    return RECORDS + 3 * (1 + batch[RECORDS] // 2) + 3


def base_offset(batch: bytes) -> int:
    return 1


def low_byte_of_base_offset(batch: bytes) -> int:
    return 7


def length_of_a_record(batch: bytes) -> int:
    return RECORDS


def read(broker: Broker, topic: str, start: int, end: int) -> Mapping[int, bytes | None]:
    url = StreamUrl.parse(f"kafka://{broker.address}/{topic}")
    split = KafkaSplit(url, {}, {Shard(topic): Range(start, end)}, SECONDS)
    rows = [row for batch in split.read() for row in batch.to_pylist()]
    assert all((row["payload"] is None) == (row["error"] is not None) for row in rows)
    return {row["sequence"]: row["payload"] for row in rows}


@pytest.mark.parametrize("place", [payload, offset_delta, length_of_a_record, base_offset])
def test_a_flipped_bit_in_a_stored_batch_stops_the_read(
    broker: Broker, topic: str, log: Path, place: Callable[[bytes], int]
) -> None:
    flip(log, place, 0x40)
    with pytest.raises(FormatError) as raised:
        read(broker, topic, 0, 30)
    assert raised.value.facts["offset"] == 10
    assert sorted(read(broker, topic, 0, 10)) == list(range(10))
    if place is not base_offset:
        assert sorted(read(broker, topic, 20, 30)) == list(range(20, 30))


@pytest.mark.parametrize("end", [12, 15, 20, 30])
def test_a_batch_that_moved_to_higher_offsets_stops_the_read_that_skips_messages(
    broker: Broker, topic: str, log: Path, end: int
) -> None:
    flip(log, low_byte_of_base_offset, 10 ^ 14)
    with pytest.raises(FormatError) as raised:
        read(broker, topic, 0, end)
    assert raised.value.facts == {"offset": 24, "found": 20}
    with KafkaConsumer(f"kafka://{broker.address}/{topic}", live=False) as consumer:
        for _ in range(2):
            with pytest.raises(FormatError) as raised:
                list(consumer)
            assert raised.value.facts == {"offset": 24, "found": 20}


def test_a_batch_that_moved_to_lower_offsets_stops_the_read(broker: Broker, topic: str, log: Path) -> None:
    flip(log, low_byte_of_base_offset, 10 ^ 8)
    with pytest.raises(FormatError) as raised:
        read(broker, topic, 0, 30)
    assert raised.value.facts == {"offset": 10, "found": 8}


def test_a_range_with_a_gap_is_read_up_to_a_damaged_batch(
    broker: Broker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    topic = broker.create()
    broker.commit(topic, 2)
    for message in (b"last of the range", b"number 13", b"after it"):
        broker.send(topic, [message])
    flip(log_of(topic, tmp_path_factory), payload, 0x04)
    assert sorted(read(broker, topic, 0, 4)) == [0, 1, 3]
    with pytest.raises(FormatError):
        read(broker, topic, 0, 5)


@pytest.mark.parametrize(("bit", "found"), [(0x40, 45), (0x01, 6)], ids=["after the end", "smaller"])
def test_offsets_grow_up_to_the_end(
    broker: Broker, topic: str, log: Path, bit: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FIXED", {**client.FIXED, "check.crcs": False})
    flip(log, offset_delta, bit)
    with pytest.raises(FormatError) as raised:
        read(broker, topic, 0, 30)
    assert raised.value.facts == {"offset": 13, "found": found}


def test_a_group_that_was_moved_past_a_damaged_batch_can_continue(broker: Broker, topic: str, log: Path) -> None:
    flip(log, payload, 0x04)
    shard = Shard(topic)
    with KafkaBatchSource(f"kafka://{broker.address}/{topic}") as source:
        source.extents()
        held = source.last_messages({shard: Range(0, 20)})[shard]
        assert held.sequence == 9
        assert not source.is_replaced(shard, held, held)
        assert source.last_messages({shard: Range(10, 20)}) == {}
        assert source.last_messages({shard: Range(0, 30)})[shard].sequence == 29


def test_a_damaged_message_that_was_read_is_not_compared(broker: Broker, topic: str, log: Path) -> None:
    flip(log, payload, 0x04)
    shard = Shard(topic)
    with KafkaBatchSource(f"kafka://{broker.address}/{topic}") as source:
        source.extents()
        held = source.last_messages({shard: Range(0, 20)})[shard]
        read = LastMessage(19, held.timestamp_ms, 1, held.epoch)
        for found in (held, None):
            with pytest.raises(FormatError) as raised:
                source.is_replaced(shard, read, found)
            assert raised.value.facts == {"offset": 19}
        broker.remove_before(topic, 20)
        source.extents()
        held = source.last_messages({shard: Range(0, 20)}).get(shard)
        assert not source.is_replaced(shard, read, held), "the batch was deleted"


def test_a_consumer_stops_at_a_damaged_batch(broker: Broker, topic: str, log: Path) -> None:
    flip(log, payload, 0x04)
    with KafkaConsumer(f"kafka://{broker.address}/{topic}", live=False) as consumer:
        whole = [message for _ in range(10) if (message := consumer.next(SECONDS)) is not None]
        assert [message.sequence for message in whole] == list(range(10))
        for _ in range(5):
            with pytest.raises(FormatError) as raised:
                consumer.next(SECONDS)
            assert raised.value.facts["offset"] == 10
    with KafkaConsumer(f"kafka://{broker.address}/{topic}", live=False) as consumer:
        consumer.rewind(20)
        assert [message.sequence for message in consumer] == list(range(20, 30))


@pytest.fixture
def zeros(broker: Broker) -> str:
    """A topic with a message, another one whose 150 MiB of zeros are 5 kB in the log, and a third one."""
    topic = broker.create()
    settings = {"bootstrap.servers": broker.address, "compression.type": "zstd", "message.max.bytes": 10**9}
    for payload in (b"before", bytes(150 << 20), b"after"):
        producer = Producer(settings)
        producer.produce(topic, payload)
        assert producer.flush(SECONDS) == 0
    return topic


def test_a_long_message_that_was_compressed_is_read_and_a_too_long_one_is_a_dead_letter(
    broker: Broker, zeros: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [len(payload or b"") for payload in read(broker, zeros, 0, 3).values()] == [6, 150 << 20, 5]
    monkeypatch.setattr(messages, "MAX_PAYLOAD_BYTES", 100 << 20)
    assert read(broker, zeros, 0, 3) == {0: b"before", 1: None, 2: b"after"}
    refused = list[DeadLetter]()
    url = f"kafka://{broker.address}/{zeros}"
    with KafkaConsumer(url, live=False, on_dead_letter=refused.append) as consumer:
        assert [message.payload for message in consumer] == [b"before", b"after"]
    assert [(letter.sequence, letter.payload) for letter in refused] == [(1, b"")]


def test_a_batch_that_the_client_does_not_decompress_stops_the_read(broker: Broker, zeros: str) -> None:
    url = StreamUrl.parse(f"kafka://{broker.address}/{zeros}")
    small = {"receive.message.max.bytes": 100_000_000}
    with pytest.raises(FormatError) as raised:
        list(KafkaSplit(url, small, {Shard(zeros): Range(0, 3)}, SECONDS).read())
    assert raised.value.facts == {"offset": 1, "code": "_BAD_COMPRESSION"}
    (batch,) = KafkaSplit(url, small, {Shard(zeros): Range(2, 3)}, SECONDS).read()
    assert batch.column("payload").to_pylist() == [b"after"]
