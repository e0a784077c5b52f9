"""The queue of the Kafka producer: it is the client's own, and what the client gives up is named."""

from __future__ import annotations

from typing import Any

import pytest

from stream_consumers.create import create_consumer
from stream_consumers.errors import (
    BrokerUnavailableError,
    InvalidOptionError,
    ProducerEndedError,
    SizeLimitError,
    StreamAssetsError,
)
from stream_consumers.kafka.producer import KafkaProducer
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl
from tests.support.raising import raises_with
from tests.support.topics import create_topic


def producer_of(kafka: str, topic: str, client: Any = None, **words: Any) -> Any:
    return KafkaProducer(StreamUrl.parse(f"kafka://{kafka}/{topic}"), client, **words)


def payloads(kafka: str, topic: str) -> list[bytes | None]:
    with create_consumer(f"kafka://{kafka}/{topic}", live=False) as consumer:
        return [message.payload for message in consumer]


@pytest.fixture
def topic(kafka: str) -> str:
    return create_topic(kafka, 1)


@pytest.mark.parametrize("words", [{"key": "text"}, {"timestamp_ms": 0}])
def test_what_cannot_be_sent_is_refused_and_takes_nobody_with_it(kafka: str, topic: str, words: dict[str, Any]) -> None:
    with producer_of(kafka, topic) as producer:
        producer.send(b"before")
        with pytest.raises(InvalidOptionError):
            producer.send(**{"payload": b"{}", **words})
        producer.send(None)
        producer.send(b"behind")
    assert payloads(kafka, topic) == [b"before", None, b"behind"]


def test_what_the_client_holds_stays_queued_in_order(kafka: str, topic: str) -> None:
    # The client waits for more before it sends anything: as if the broker did not answer.
    producer = producer_of(kafka, topic, {"linger.ms": 60_000}, flush_seconds=0.2)
    producer.send(b"0")
    client = producer._client
    producer._client = Unanswered(client)
    receipts = [producer.send(b"%d" % number) for number in range(1, 4)]
    for _ in range(2):
        with raises_with(BrokerUnavailableError, undelivered=4):
            producer.flush()
    producer._client, producer._patience = client, 60.0
    producer.close()
    assert payloads(kafka, topic) == [b"0", b"1", b"2", b"3"]
    assert [receipt.sequence for receipt in receipts] == [1, 2, 3]


def test_a_producer_that_ends_names_what_it_drops(kafka: str, topic: str) -> None:
    producer = producer_of(kafka, topic, {"linger.ms": 60_000}, flush_seconds=0.2)
    producer._client = Unanswered(producer._client)
    receipts = [producer.send(b"lost") for _ in range(3)]
    with raises_with(BrokerUnavailableError, undelivered=3, to=f"3 to {topic}/0"):
        producer.close()
    for receipt in receipts:
        with pytest.raises(StreamAssetsError):
            _ = receipt.sequence
    assert payloads(kafka, topic) == []


def test_what_the_client_gives_up_is_named(kafka: str) -> None:
    topic = create_topic(kafka, 2, max_message_bytes="2000")
    with producer_of(kafka, topic) as producer:
        for number in range(2):
            producer.send(b"x" * 5000, shard=number)
        with raises_with(SizeLimitError, undelivered=2, to=f"1 to {topic}/0, 1 to {topic}/1"):
            producer.flush()
        assert producer.send(b"small").shard == Shard(topic, 0)


class Unanswered:
    """A client whose broker takes nothing, as far as its flush can tell."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def flush(self, seconds: float) -> int:
        self._client.poll(seconds)
        return len(self._client)

    def __len__(self) -> int:
        return len(self._client)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def test_what_kafka_would_cut_is_refused_and_a_producer_that_ended_is_not_flushed(kafka: str) -> None:
    producer = KafkaProducer(f"kafka://{kafka}/{create_topic(kafka, 1)}")
    with producer, pytest.raises(InvalidOptionError):
        producer.send(b"", headers=[("a\0b", b"")])
    with pytest.raises(ProducerEndedError):
        producer.flush()
