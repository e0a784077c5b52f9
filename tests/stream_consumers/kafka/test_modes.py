"""The modes of a Kafka consumer and its membership, on a real broker."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from confluent_kafka import Producer

from stream_consumers.consumer import Edge
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import (
    BrokerUnavailableError,
    DataLossError,
    GroupActiveError,
    InvalidOptionError,
    OutOfBoundsError,
    StreamNotFoundError,
    StreamRemovedError,
)
from stream_consumers.kafka import cluster as kafka_cluster
from stream_consumers.kafka import consumer as kafka_consumer
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.kafka.consumer import KafkaConsumer
from stream_consumers.kafka.membership import KafkaMembership
from stream_consumers.messages import Message, Shard
from stream_consumers.options import AutoStreamReset, ConsumerMode
from stream_consumers.tracking.consumer import TrackedConsumer
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.raising import raises_with
from tests.support.topics import admin, committed, create_topic, delete_topics, fill, unique_group

QUICK = {"session.timeout.ms": 1000, "heartbeat.interval.ms": 300}
RESUMABLE, SHARED = ConsumerMode.RESUMABLE, ConsumerMode.LOAD_BALANCED


def url(kafka: str, topic: str) -> StreamUrl:
    return StreamUrl.parse(f"kafka://{kafka}/{topic}")


def read_all(kafka: str, topic: str, **options: object) -> list[Message]:
    with create_consumer(url(kafka, topic), live=False, **options) as consumer:  # type: ignore[arg-type]
        return list(consumer)


def member(kafka: str, topic: str, group: str, **client: str | int) -> KafkaConsumer:
    return KafkaConsumer(url(kafka, topic), mode=SHARED, group=group, client={**QUICK, **client})


def settle(members: list[KafkaConsumer]) -> None:
    """Poll until everybody has shards, and together all four."""

    def is_shared() -> bool:
        for one in members:
            one.next(0.05)
        shares = [one.assigned() for one in members]
        return all(shares) and sum(map(len, shares)) == 4

    until(is_shared, what="the shards being shared")


# resumable


def test_a_group_goes_on_at_what_it_committed_and_0_is_not_nothing(kafka: str) -> None:
    topic, group = create_topic(kafka, 1), unique_group()
    fill(kafka, topic, 20, partitions=1)
    options = {"mode": RESUMABLE, "group": group}
    assert len(read_all(kafka, topic, **options)) == 20
    with KafkaConsumer(url(kafka, topic), mode=RESUMABLE, group=group) as consumer:
        consumer.commit({Shard(topic): 0})
    assert committed(kafka, group, topic) == {0: 0}
    assert len(read_all(kafka, topic, **options, reset=AutoStreamReset.LATEST)) == 20
    with KafkaConsumer(url(kafka, topic), mode=RESUMABLE, group=group) as consumer:
        consumer.commit({Shard(topic): 6})
    assert [m.sequence for m in read_all(kafka, topic, **options)] == list(range(6, 20))
    assert read_all(kafka, topic, mode=RESUMABLE, group=unique_group(), reset=AutoStreamReset.LATEST) == []


def test_a_live_member_of_somebody_else_is_named(kafka: str) -> None:
    topic, group = create_topic(kafka, 4), unique_group()
    with member(kafka, topic, group, **{"client.id": "console-7"}) as other:
        settle([other])
        with (
            KafkaConsumer(url(kafka, topic), mode=RESUMABLE, group=group) as consumer,
            pytest.raises(GroupActiveError, match="console-7"),
        ):
            consumer.commit({Shard(topic): 1})


def test_the_default_group(kafka: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, host = create_topic(kafka, 1), unique_group()
    monkeypatch.setenv("HOST_ID", host)
    with KafkaConsumer(url(kafka, topic), mode=RESUMABLE) as consumer:
        consumer.commit({Shard(topic): 0})
    assert committed(kafka, f"{host}r", topic) == {0: 0}


# load_balanced


def protocols(*first: str) -> pytest.MarkDecorator:
    """How members agree, those of the first tier by name."""
    cooperative = {**QUICK, "partition.assignment.strategy": "cooperative-sticky"}
    known = {"eager": QUICK, "cooperative": cooperative, "kip-848": {"group.protocol": "consumer"}}
    slow = {name: () if name in first else (pytest.mark.slow,) for name in known}
    return pytest.mark.parametrize(
        "client", [pytest.param(client, id=name, marks=slow[name]) for name, client in known.items()]
    )


@protocols("eager", "kip-848")
def test_members_share_the_shards_and_one_that_leaves_gives_its_own_back(
    kafka: str, client: dict[str, str | int]
) -> None:
    topic, group = create_topic(kafka, 4), unique_group()
    fill(kafka, topic, 40, partitions=4)
    found: set[tuple[int, int]] = set()
    one = KafkaConsumer(url(kafka, topic), mode=SHARED, group=group, client=client)
    with one, KafkaConsumer(url(kafka, topic), mode=SHARED, group=group, client=client) as other:

        def is_shared() -> bool:
            for consumer in (one, other):
                while (message := consumer.next(0.05)) is not None:
                    found.add((message.shard.id, message.sequence))
            return len(one.assigned()) == len(other.assigned()) == 2 and len(found) == 40

        until(is_shared, what="every message being read by one of the two")
        one.close()
        until(lambda: (other.next(0.05), len(other.assigned()) == 4)[1], what="the other having all shards")


@protocols("cooperative")
def test_a_member_reads_what_it_was_given_while_the_brokers_did_not_say_where_it_begins(
    kafka: str, client: dict[str, str | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, group = create_topic(kafka, 4), unique_group()
    fill(kafka, topic, 40, partitions=4)
    starts, told, found = KafkaBrokers.starts, list[str](), set[tuple[int, int]]()

    def silent(cluster: KafkaBrokers, shards: Iterable[Shard]) -> Mapping[Shard, int]:
        if len(told) < 2:
            told.append("asked")
            raise BrokerUnavailableError("no answer", remedy="Ask again.")
        return starts(cluster, shards)

    with KafkaConsumer(url(kafka, topic), mode=SHARED, group=group, client=client) as consumer:
        monkeypatch.setattr(KafkaBrokers, "starts", silent)

        def has_read_all() -> bool:
            try:
                message = consumer.next(0.05)
            except BrokerUnavailableError:
                return False
            if message is not None:
                found.add((message.shard.id, message.sequence))
                consumer.ack(message)
            return len(found) == 40

        until(has_read_all, what="every message being read")
        assert told == ["asked", "asked"]
        assert consumer.commit() == 4


@protocols("eager")
def test_a_seek_and_a_change_of_owner_end_a_pause(kafka: str, client: dict[str, str | int]) -> None:
    topic, group = create_topic(kafka, 4), unique_group()
    fill(kafka, topic, 40, partitions=4)
    found: list[Message] = []
    one = KafkaConsumer(url(kafka, topic), mode=SHARED, group=group, client=client)
    with one:

        def reads_all() -> bool:
            while (message := one.next(0.05)) is not None:
                found.append(message)
            return len({(message.shard, message.sequence) for message in found}) == 40

        def gives_two_away() -> bool:
            other.next(0.05)
            found.extend(filter(None, [one.next(0.05)]))
            return len(one.assigned()) == len(other.assigned()) == 2

        until(reads_all, what="every message being read")
        one.pause(one.assigned())
        one.rewind(Edge.BEGINNING)
        found.clear()
        until(reads_all, what="every message being read after a seek")
        one.pause(one.assigned())
        with KafkaConsumer(url(kafka, topic), mode=SHARED, group=group, client=client) as other:
            until(gives_two_away, what="the shards being shared")
            one.pause(one.assigned())
            before = one.assigned()
            found.clear()
        given = frozenset(Shard(topic, number) for number in range(4)) - before
        until(
            lambda: reads_all() or given <= {message.shard for message in found},
            what="those that came back being read",
        )


def test_seek_and_rewind_are_about_the_shards_that_are_assigned(kafka: str) -> None:
    topic, group = create_topic(kafka, 4), unique_group()
    fill(kafka, topic, 40, partitions=4)
    with member(kafka, topic, group) as consumer:
        settle([consumer])
        consumer.rewind(7)
        found = {(m.shard.id, m.sequence) for m in iter(lambda: consumer.next(1), None)}
        assert found == {(shard, n) for shard in range(4) for n in (7, 8, 9)}
        with pytest.raises(OutOfBoundsError):
            consumer.rewind(10)
        consumer.rewind(Edge.END)
        assert consumer.next(0.2) is None
        with pytest.raises(InvalidOptionError):
            consumer.assign(Shard(topic, 0))


# membership without reading


def test_members_commit_from_any_thread_and_stay_without_reading(kafka: str) -> None:
    topic, group = create_topic(kafka, 4), unique_group()
    client = {**QUICK, "max.poll.interval.ms": 1000}
    with KafkaMembership(url(kafka, topic), group, client) as one:
        assert one.wait(20)
        answers: list[bool] = []
        threads = [
            threading.Thread(target=lambda n=n: answers.append(one.commit({Shard(topic, n): n}))) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert answers == [True] * 4
        assert committed(kafka, group, topic) == {0: 0, 1: 1, 2: 2, 3: 3}
        with KafkaMembership(url(kafka, topic), group, client) as other:
            until(lambda: len(one.shards()) == len(other.shards()) == 2, what="the two sharing")
            assert not one.shards() & other.shards()
        until(lambda: len(one.shards()) == 4, what="one having all shards again")
    assert not one.commit({Shard(topic, 0): 1}), "refused after it left, and no error"


# what is in the log


def test_aborted_messages_are_not_delivered_and_a_tail_of_markers_is_an_end(kafka: str) -> None:
    topic = create_topic(kafka, 1)
    producer = Producer({"bootstrap.servers": kafka, "transactional.id": topic, "log_level": 2})
    producer.init_transactions(10)
    for value, is_kept in ((b"kept", True), (b"aborted", False)):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush()
        (producer.commit_transaction if is_kept else producer.abort_transaction)(10)
    assert [m.payload for m in read_all(kafka, topic)] == [b"kept"]
    both = read_all(kafka, topic, client={"isolation.level": "read_uncommitted"})
    assert [m.payload for m in both] == [b"kept", b"aborted"]


@pytest.mark.parametrize("assigns", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_partition_that_is_added_is_read_from_its_first_message(
    kafka: str, monkeypatch: pytest.MonkeyPatch, assigns: bool
) -> None:
    monkeypatch.setattr(kafka_consumer, "METADATA_SECONDS", 0.2)
    from confluent_kafka.admin import NewPartitions

    topic = create_topic(kafka, 1)
    with create_consumer(url(kafka, topic), reset=AutoStreamReset.LATEST) as consumer:
        assert consumer.next(0) is None
        if assigns:
            # It counts from the next seek or rewind on.
            consumer.assign(Shard(topic, 0))
        client = admin(kafka)
        client.create_partitions([NewPartitions(topic, 2)])[topic].result(10)
        with create_producer(url(kafka, topic)) as producer:
            producer.send(b"first", shard=1)
        found = until(lambda: consumer.next(0.2), what="the message of the new partition")
        assert (found.shard, found.sequence) == (Shard(topic, 1), 0)
        consumer.rewind(Edge.BEGINNING)
        if assigns:
            assert consumer.next(0.3) is None
        else:
            assert until(lambda: consumer.next(0.2)) == found


@pytest.mark.slow
def test_a_member_gets_a_partition_that_is_added(kafka: str) -> None:
    from confluent_kafka.admin import NewPartitions

    topic = create_topic(kafka, 1)
    with KafkaMembership(url(kafka, topic), unique_group()) as member:
        until(lambda: member.shards() == {Shard(topic, 0)}, what="the first partition")
        admin(kafka).create_partitions([NewPartitions(topic, 2)])[topic].result(10)
        until(lambda: member.shards() == {Shard(topic, 0), Shard(topic, 1)}, seconds=100, what="the new one")


def test_messages_that_are_gone_are_an_error_with_the_numbers(kafka: str) -> None:
    from confluent_kafka import TopicPartition

    topic, group = create_topic(kafka, 1), unique_group()
    fill(kafka, topic, 20, partitions=1)
    client = admin(kafka)
    for future in client.delete_records([TopicPartition(topic, 0, 12)]).values():
        future.result(10)
    with KafkaConsumer(url(kafka, topic), mode=RESUMABLE, group=group) as consumer:
        consumer.commit({Shard(topic): 3})
    with raises_with(DataLossError, earliest=12, end=20):
        read_all(kafka, topic, mode=RESUMABLE, group=group)


class OneMessageBefore:
    """A client whose first poll returns a given message."""

    def __init__(self, client: Any, first: Any) -> None:
        self._client, self._first = client, [first]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def poll(self, seconds: float) -> Any:
        return self._first.pop() if self._first else self._client.poll(seconds)


def test_an_error_about_the_position_before_a_move_is_not_about_the_new_one(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confluent_kafka import Consumer, TopicPartition

    topic = create_topic(kafka, 1)
    fill(kafka, topic, 20, partitions=1)
    settings = {"bootstrap.servers": kafka, "group.id": unique_group(), "auto.offset.reset": "error"}
    client = Consumer(settings)
    client.assign([TopicPartition(topic, 0, 99)])
    late = until(lambda: client.poll(0.1), what="the error")
    assert late.error() is not None
    client.close()
    with KafkaConsumer(url(kafka, topic), live=False) as consumer:
        consumer.rewind(14)
        monkeypatch.setattr(consumer, "_consumer", OneMessageBefore(consumer._consumer, late))
        assert [message.sequence for message in consumer] == list(range(14, 20))


class RecordedClient:
    """A client that notes the names of the methods that are called."""

    def __init__(self, client: Any) -> None:
        self._client, self.called = client, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return getattr(self._client, name)


def test_a_pause_ends_before_the_client_starts_elsewhere(kafka: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it ended meanwhile, the client may drop all that it fetches from then on."""
    topic, group = create_topic(kafka, 2), unique_group()
    fill(kafka, topic, 40, partitions=2)
    with KafkaConsumer(url(kafka, topic), mode=RESUMABLE, group=group) as consumer:
        recorded = RecordedClient(consumer._consumer)
        monkeypatch.setattr(consumer, "_consumer", recorded)
        tracked = TrackedConsumer(consumer, consumer)
        tracked.pause_partitions([Shard(topic, 0)])
        until(lambda: (tracked.next(0.1), "pause" in recorded.called)[1], what="a pause of the client")
        recorded.called.clear()
        tracked.rewind(Edge.BEGINNING)
        consumer.resume(consumer.assigned())
        assert {"resume", "assign"} <= {*recorded.called}
        assert recorded.called[-1] == "assign"


def test_brokers_and_topics_that_are_not_there(kafka: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StreamNotFoundError):
        create_consumer(f"kafka://{kafka}/nothing-here")
    monkeypatch.setattr(kafka_cluster, "REQUEST_SECONDS", 1.0)
    with pytest.raises(BrokerUnavailableError, match=r"127\.0\.0\.1:1"):
        create_consumer("kafka://127.0.0.1:1/orders")


# topics that are gone


@pytest.mark.parametrize(
    ("mode", "is_made_again"),
    [
        (ConsumerMode.REAL_TIME, True),
        (RESUMABLE, False),
        pytest.param(SHARED, True, marks=pytest.mark.slow),
        pytest.param(SHARED, False, marks=pytest.mark.slow),
    ],
)
def test_a_topic_that_is_deleted_under_a_live_reader_is_told_until_it_moves(
    kafka: str, mode: ConsumerMode, is_made_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_consumer, "METADATA_SECONDS", 0.2)
    topic = create_topic(kafka, 1)
    fill(kafka, topic, 5, partitions=1)
    group = None if mode is ConsumerMode.REAL_TIME else unique_group()
    with KafkaConsumer(url(kafka, topic), mode=mode, group=group) as consumer:
        found = [until(lambda: consumer.next(0.1), what="a message") for _ in range(5)]
        assert len(found) == 5
        delete_topics(kafka, [topic])
        if is_made_again:
            # More messages than were read: the position is one of the new topic, too.
            create_topic(kafka, 1, name=topic)
            fill(kafka, topic, 20, partitions=1)
        with pytest.raises(StreamRemovedError):
            until(lambda: consumer.next(0.1) and None, seconds=30)
        with pytest.raises(StreamRemovedError):
            consumer.next(0)
        if is_made_again and mode is ConsumerMode.REAL_TIME:
            consumer.rewind(Edge.BEGINNING)
            assert until(lambda: consumer.next(0.1), what="a message of the new topic").sequence == 0
