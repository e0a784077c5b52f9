"""SeaStreamer's wildcard: one consumer of all streams, whatever the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from stream_assets.cli.main import main
from stream_consumers.consumer import Edge
from stream_consumers.create import StreamSource, create_consumer, create_producer, open_batch_source
from stream_consumers.errors import (
    InvalidStreamKeyError,
    NotSubscribedError,
    OutOfBoundsError,
    StreamEndedError,
    UnsupportedError,
)
from stream_consumers.kafka import consumer as kafka_consumer
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.messages import WILDCARD, Shard, from_milliseconds
from stream_consumers.options import ConsumerMode
from stream_consumers.redis import consumer as redis_consumer
from stream_consumers.redis.entry_consumer import EntryConsumer, GroupEntryConsumer
from stream_consumers.streamer import connect
from stream_consumers.testing.consumer_contract import places, replay, take
from stream_consumers.testing.harness import STREAMS, Stream, round_robin
from stream_consumers.urls import StreamUrl
from tests.support.contract_backends import BACKENDS
from tests.support.polling import until
from tests.support.topics import create_topic, delete_topics

PATIENCE = 60.0
BOTH = round_robin(12, shards=3, streams=STREAMS)


@pytest.fixture
def kafka(kafka: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The broker, as if its topics were those of the test only."""
    all_topics = KafkaBrokers.all_topics

    def own_topics(self: KafkaBrokers) -> dict[str, Any]:
        return {name: found for name, found in all_topics(self).items() if name in {*STREAMS, "refunds"}}

    monkeypatch.setattr(KafkaBrokers, "all_topics", own_topics)
    return kafka


@pytest.fixture
def redis_address(redis_address: str) -> str:
    """The server, without what other tests have left."""
    host, _, port = redis_address.partition(":")
    with redis.Redis(host, int(port)) as client:
        client.flushdb()
    return redis_address


def test_all_streams_are_read_each_message_once(stream: Stream) -> None:
    receipts = stream.send(BOTH)
    with replay(stream, "*") as consumer:
        found = list(consumer)
    assert len(found) == len(receipts)
    assert set(places(found)) == {(receipt.shard, receipt.sequence) for receipt in receipts}
    with create_consumer(stream.url(WILDCARD, "orders"), live=False) as consumer:
        assert len(list(consumer)) == len(receipts), "a stream that is named, too, is not read twice"


def test_nothing_there_is_an_end_and_no_wait(stream: Stream) -> None:
    with replay(stream, "*") as consumer, pytest.raises(StreamEndedError):
        consumer.next(PATIENCE)


def test_seek_and_rewind_are_about_all_streams(stream: Stream) -> None:
    receipts = stream.send(BOTH)
    with replay(stream, "*") as consumer:
        consumer.seek(from_milliseconds(1_000 + 10 * 7))
        assert set(places(consumer)) == {(r.shard, r.sequence) for r in receipts[7:]}
        consumer.rewind(Edge.BEGINNING)
        assert len(list(consumer)) == len(receipts)
        consumer.rewind(Edge.END)
        assert list(consumer) == []
        second = max(receipt.sequence for receipt in receipts)
        consumer.rewind(second)
        assert set(places(consumer)) == {(r.shard, r.sequence) for r in receipts if r.sequence >= second}
        with pytest.raises(OutOfBoundsError):
            consumer.rewind(second + 1)


def test_shards_of_any_stream_are_assigned(stream: Stream) -> None:
    receipts = stream.send(BOTH)
    chosen = {Shard("clicks", 1), Shard("orders", 2)}
    with replay(stream, "*") as consumer:
        for shard in chosen:
            consumer.assign(shard)
        consumer.rewind(Edge.BEGINNING)
        assert set(places(consumer)) == {(r.shard, r.sequence) for r in receipts if r.shard in chosen}
        consumer.unassign(Shard("clicks", 1))
        with pytest.raises(NotSubscribedError):
            consumer.unassign(Shard("clicks", 0))
        consumer.rewind(Edge.BEGINNING)
        assert {message.shard for message in consumer} == {Shard("orders", 2)}


def test_a_streamer_has_the_wildcard_too(stream: Stream) -> None:
    stream.send(BOTH)
    with connect(stream.url("*")) as streamer:
        assert len(list(streamer.create_consumer(live=False))) == len(BOTH)
        assert len(list(streamer.create_consumer("*", live=False))) == len(BOTH)
        assert len(list(streamer.create_consumer(["clicks"], live=False))) == len(BOTH) // 2
        # The wildcard is no stream to send to; a producer has to name one.
        with streamer.create_producer() as producer:
            assert producer.stream is None
        with pytest.raises(InvalidStreamKeyError):
            streamer.create_producer(WILDCARD)


def test_the_wildcard_is_for_consumers_without_a_group(stream: Stream) -> None:
    url = stream.url("*")
    for mode in (ConsumerMode.LOAD_BALANCED, ConsumerMode.RESUMABLE):
        if mode is ConsumerMode.LOAD_BALANCED or stream.location.startswith(("redis", "kafka")):
            with pytest.raises(UnsupportedError):
                create_consumer(url, mode=mode, group="g")
    for make in (create_producer, open_batch_source, lambda url: StreamSource(StreamUrl.parse(url))):
        with pytest.raises(UnsupportedError):
            make(url)
    with pytest.raises(NotSubscribedError), replay(stream, "*") as consumer:
        consumer.assign(Shard("SEA_STREAMER_INTERNAL"))


@pytest.mark.parametrize("name", ["*", WILDCARD])
def test_a_pipe_and_consumers_of_entries_name_their_streams(name: str) -> None:
    url = StreamUrl.parse(f"redis://localhost:6379/{name}")
    with pytest.raises(UnsupportedError):
        create_consumer(f"stdio:///{name}")
    with pytest.raises(UnsupportedError):
        EntryConsumer(url)
    with pytest.raises(UnsupportedError):
        GroupEntryConsumer(url, group="g", consumer="me")


@pytest.mark.parametrize("harness", [backend for backend in BACKENDS if backend.service != "kafka"], indirect=True)
def test_a_stream_that_comes_later_is_read(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_consumer, "SHARD_SEARCH_SECONDS", 0.05)
    with create_consumer(stream.url("*")) as consumer:
        assert consumer.next(0) is None
        stream.send([Shard("orders", 0), Shard("refunds", 0)])
        assert {message.shard.stream for message in take(consumer, 2)} == {"orders", "refunds"}


@pytest.fixture
def refunds(kafka: str) -> Iterator[Callable[[], str]]:
    """Makes a topic, whose URL it returns."""
    made: list[str] = []
    yield lambda: made.append(create_topic(kafka, 1, name="refunds")) or f"kafka://{kafka}/refunds"  # type: ignore[func-returns-value]
    delete_topics(kafka, made)


def test_a_topic_that_comes_later_is_read(
    kafka: str, refunds: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_consumer, "METADATA_SECONDS", 0.05)
    with create_consumer(f"kafka://{kafka}/*") as consumer:
        consumer.next(0)
        with create_producer(refunds()) as producer:
            producer.send(b"late")
        assert until(lambda: consumer.next(0.1), what="a message of the new topic").text() == "late"


def test_a_broker_without_topics_is_an_end_and_no_wait(kafka: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KafkaBrokers, "all_topics", lambda self: {})
    with create_consumer(f"kafka://{kafka}/*", live=False) as consumer, pytest.raises(StreamEndedError):
        consumer.next(0)


def test_topics_of_the_brokers_themselves_are_left_out(
    refunds: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = refunds()
    monkeypatch.undo()
    with KafkaBrokers(url) as cluster:
        # A commit makes the brokers' own topic of offsets.
        cluster.commit("somebody", {Shard("refunds", 0): 0})
        assert "refunds" in cluster.all_topics()
        assert not [name for name in cluster.all_topics() if name.startswith("__")]
        assert "__consumer_offsets" in cluster._admin.list_topics(timeout=10.0).topics


def test_an_empty_redis_is_waited_for_without_a_busy_loop(redis_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []
    read = redis_consumer.RedisConsumer._read

    def counting(self: redis_consumer.RedisConsumer, seconds: float) -> None:
        reads.append(seconds)
        read(self, seconds)

    monkeypatch.setattr(redis_consumer.RedisConsumer, "_read", counting)
    with create_consumer(f"redis://{redis_address}/*") as consumer:
        assert consumer.next(0.3) is None
    assert len(reads) < 10, "a busy loop"


def test_peek_shows_all_streams(stream: Stream) -> None:
    stream.send(round_robin(4, streams=STREAMS))
    shown = CliRunner().invoke(main, ["peek", stream.url("*")])
    assert shown.exit_code == 0, shown.output
    assert {line.split(" | ")[1] for line in shown.stdout.splitlines()} == set(STREAMS)
    refused = CliRunner().invoke(main, ["relay", stream.url("*"), "stdio:///orders"])
    assert refused.exit_code == 1
