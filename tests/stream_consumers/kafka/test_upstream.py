"""SeaStreamer's own test of its Kafka backend, and what its documentation says of groups, on a real broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from stream_consumers.consumer import Consumer, Edge
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.kafka.consumer import KafkaConsumer
from stream_consumers.messages import Shard, from_milliseconds
from stream_consumers.options import AutoStreamReset, ConsumerMode
from stream_consumers.urls import StreamUrl
from tests.support.topics import committed, create_topic, unique_group

PATIENCE = 60.0
START_MS = 1_700_000_000_000
QUICK: Mapping[str, str | int] = {"session.timeout.ms": 1000, "heartbeat.interval.ms": 300}


def send(url: str, numbers: Iterable[int]) -> None:
    """A message a number, a second apart."""
    with create_producer(url) as producer:
        for number in numbers:
            producer.send(b"%d" % number, timestamp_ms=START_MS + 1000 * number)


def take(consumer: Consumer, count: int) -> list[int]:
    found = [consumer.next(PATIENCE) for _ in range(count)]
    return [int(message.text()) for message in found if message]


def test_consumer(kafka: str) -> None:
    topic, group = create_topic(kafka, 1), unique_group()
    url, shard = f"kafka://{kafka}/{topic}", Shard(topic)
    send(url, range(10))
    with create_consumer(url, reset=AutoStreamReset.EARLIEST) as real_time:
        assert take(real_time, 10) == list(range(10))
        real_time.assign(shard)
        real_time.rewind(Edge.BEGINNING)
        assert take(real_time, 10) == list(range(10))
        real_time.rewind(5)
        assert take(real_time, 5) == [5, 6, 7, 8, 9]
        assert real_time.next(0) is None
    parsed = StreamUrl.parse(url)
    with KafkaConsumer(parsed, mode=ConsumerMode.RESUMABLE, group=group) as half:
        assert take(half, 10) == list(range(10))
        assert committed(kafka, group, topic) == {}, "nothing is committed by itself"
        half.commit({shard: 6})
    with KafkaConsumer(parsed, mode=ConsumerMode.RESUMABLE, group=group) as full:
        assert take(full, 4) == [6, 7, 8, 9]
        full.seek(from_milliseconds(START_MS + 6500))
        assert take(full, 3) == [7, 8, 9]
        send(url, range(10, 20))
        assert take(full, 10) == list(range(10, 20))
        full.commit({shard: 19})
    assert committed(kafka, group, topic) == {0: 19}


def test_the_default_group(kafka: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, host = create_topic(kafka, 1), unique_group()
    monkeypatch.setenv("HOST_ID", host)
    with KafkaConsumer(StreamUrl.parse(f"kafka://{kafka}/{topic}"), mode=ConsumerMode.RESUMABLE) as consumer:
        consumer.commit({Shard(topic): 0})
    assert committed(kafka, f"{host}r", topic) == {0: 0}
