"""The tracked consumer and transactions on a real Kafka broker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Producer

from stream_consumers.consumer import Edge, ShardEnd
from stream_consumers.errors import (
    GroupActiveError,
    InvalidOptionError,
    ProducerEndedError,
    ProducerFencedError,
    TransactionAbortedError,
)
from stream_consumers.kafka.consumer import KafkaConsumer
from stream_consumers.kafka.transactions import KafkaTransactions
from stream_consumers.messages import Message, Shard
from stream_consumers.options import ConsumerMode
from stream_consumers.tracking.commits import CommitResult
from stream_consumers.tracking.consumer import TrackedConsumer
from stream_consumers.tracking.livelock import LivelockOptions, LivelockWatch
from stream_consumers.tracking.options import Shards, TrackingCallbacks, TrackingOptions
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.topics import committed, create_topic, ends, fill, unique_group

PATIENCE = 60.0
RESUMABLE, SHARED = ConsumerMode.RESUMABLE, ConsumerMode.LOAD_BALANCED
QUICK = {"session.timeout.ms": 1000, "heartbeat.interval.ms": 300}
BY_HAND = TrackingOptions(commit_interval_seconds=None, commit_every=None, close_seconds=0.0)


def url(kafka: str, topic: str) -> StreamUrl:
    return StreamUrl.parse(f"kafka://{kafka}/{topic}")


def open_consumer(
    kafka: str, topic: str, group: str, mode: ConsumerMode = RESUMABLE, client: dict[str, str | int] | None = None
) -> KafkaConsumer:
    return KafkaConsumer(url(kafka, topic), mode=mode, group=group, client=client)


@contextmanager
def tracked(
    kafka: str,
    topic: str,
    group: str,
    mode: ConsumerMode = RESUMABLE,
    *,
    options: TrackingOptions = BY_HAND,
    callbacks: TrackingCallbacks | None = None,
    client: dict[str, str | int] | None = None,
) -> Iterator[TrackedConsumer]:
    inner = open_consumer(kafka, topic, group, mode, client)
    with TrackedConsumer(inner, inner, options=options, callbacks=callbacks) as consumer:
        yield consumer


def read(consumer: TrackedConsumer | KafkaConsumer, count: int) -> list[Message]:
    found: list[Message] = []

    def is_enough() -> bool:
        message = consumer.next(0.1)
        found.extend([] if message is None else [message])
        return len(found) >= count

    until(is_enough, seconds=PATIENCE, what=f"{count} messages")
    return found


def transactional(kafka: str, **settings: str) -> Producer:
    made = Producer({"bootstrap.servers": kafka, "transactional.id": unique_group(), "log_level": 2, **settings})
    made.init_transactions(PATIENCE)
    return made


# what is committed


def test_what_is_committed_is_behind_the_first_unfinished_message_and_read_next(kafka: str) -> None:
    topic, group = create_topic(kafka, 2), unique_group()
    fill(kafka, topic, 20, partitions=2)
    with tracked(kafka, topic, group) as consumer:
        messages = read(consumer, 20)
        for message in messages:
            if (message.shard.id, message.sequence) not in {(0, 4), (1, 0)}:
                consumer.ack(message)
        assert consumer.commit() is CommitResult.COMMITTED
        assert committed(kafka, group, topic) == {0: 4}
        assert consumer.seek_to_committed() == {Shard(topic, 0): 4}
        again = read(consumer, 16)
        assert sorted((m.shard.id, m.sequence) for m in again) == [
            *((0, n) for n in range(4, 10)),
            *((1, n) for n in range(10)),
        ]
    with tracked(kafka, topic, group) as consumer:
        assert len(read(consumer, 16)) == 16


def test_case_h_markers_at_the_end_are_committed_and_the_lag_is_0(kafka: str) -> None:
    topic, group = create_topic(kafka, 1), unique_group()
    producer = transactional(kafka)
    for aborts in (False, True):
        producer.begin_transaction()
        for number in range(3):
            producer.produce(topic, b"%d" % number, partition=0)
        producer.flush()
        producer.abort_transaction() if aborts else producer.commit_transaction()
    with tracked(kafka, topic, group) as consumer:
        messages = read(consumer, 3)
        for message in messages[:2]:
            consumer.ack(message)
        until(lambda: consumer.next(0.05) or consumer.progress()[0].received == 8, what="the end being reached")
        consumer.commit()
        assert committed(kafka, group, topic) == {0: 2}, "past an unfinished message"
        consumer.ack(messages[2])
        consumer.commit()
        assert committed(kafka, group, topic) == {0: 8} == ends(kafka, topic)


def test_an_end_that_was_reached_behind_messages_of_a_paused_shard_is_not_committed(kafka: str) -> None:
    topic, group = create_topic(kafka, 1), unique_group()
    with tracked(kafka, topic, group) as consumer:
        consumer.next(0.2)
        # It is paused while the client has it all already.
        consumer._pause_in_client = lambda: None  # type: ignore[method-assign]
        consumer.pause_partitions([Shard(topic)])
        producer = transactional(kafka)
        producer.begin_transaction()
        for number in range(3):
            producer.produce(topic, b"%d" % number, partition=0)
        producer.commit_transaction()
        until(lambda: consumer.next(0.05) or consumer.progress()[0].received == 4)
        until(lambda: consumer.next(0.05) or consumer._consumer._reached == {Shard(topic): 4})  # type: ignore[attr-defined]
        consumer.commit()
        assert committed(kafka, group, topic).get(0, 0) == 0
        consumer.resume_partitions([Shard(topic)])
        messages = read(consumer, 3)
        assert [message.sequence for message in messages] == [0, 1, 2]
        for message in messages:
            consumer.ack(message)
        consumer.commit()
        assert committed(kafka, group, topic) == {0: 4}


# pause


@pytest.mark.parametrize("moves", [pytest.param(False, marks=pytest.mark.slow), True])
def test_pause_and_resume_lose_nothing(kafka: str, moves: bool) -> None:
    topic, group = create_topic(kafka, 2), unique_group()
    fill(kafka, topic, 200, partitions=2)
    one, two = Shard(topic, 0), Shard(topic, 1)
    options = TrackingOptions(commit_interval_seconds=None, close_seconds=0)
    with tracked(kafka, topic, group, options=options) as consumer:
        found = read(consumer, 20)
        consumer.pause_partitions([two])
        before = {message.sequence for message in found if message.shard == two}
        own = [message.sequence for message in found if message.shard == one]
        while len(own) < 100:
            message = consumer.next(0.1)
            if message is not None:
                assert message.shard == one
                own.append(message.sequence)
        assert own == list(range(100))
        start = max(before, default=-1) + 1
        if moves:
            consumer.go_to({two: 50})
            assert consumer.next(0.1) is None
            start = 50
        consumer.resume_partitions([two])
        fill(kafka, topic, 2, partitions=2)
        later = [m.sequence for m in read(consumer, 100 - start + 2) if m.shard == two]
        assert later == list(range(start, 101))


def test_what_is_committed_of_a_shard_that_was_unassigned_is_still_told(kafka: str) -> None:
    topic, group = create_topic(kafka, 2), unique_group()
    fill(kafka, topic, 4, partitions=2)
    with open_consumer(kafka, topic, group) as consumer:
        consumer.commit({Shard(topic, 0): 1, Shard(topic, 1): 2})
        consumer.unassign(Shard(topic, 1))
        consumer.rewind(Edge.BEGINNING)
        assert consumer.assigned() == {Shard(topic, 0)}
        assert consumer.committed() == {Shard(topic, 0): 1, Shard(topic, 1): 2}


# rebalancing (statements 19, 20, 30)


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(QUICK, id="eager", marks=pytest.mark.slow),
        pytest.param({**QUICK, "partition.assignment.strategy": "cooperative-sticky"}, id="cooperative"),
        pytest.param({"group.protocol": "consumer"}, id="kip-848", marks=pytest.mark.slow),
    ],
)
def test_shards_are_committed_before_they_are_released(kafka: str, client: dict[str, str | int]) -> None:
    topic, group = create_topic(kafka, 4), unique_group()
    fill(kafka, topic, 40, partitions=4)
    revoked: list[tuple[Shards, dict[int, int]]] = []
    assigned: list[Shards] = []
    callbacks = TrackingCallbacks(
        on_revoked=lambda shards: revoked.append((shards, committed(kafka, group, topic))),
        on_assigned=assigned.append,
    )
    with tracked(kafka, topic, group, SHARED, callbacks=callbacks, client=client) as one:
        for message in read(one, 40):
            one.ack(message)
        assert set().union(*assigned) == {Shard(topic, n) for n in range(4)}
        assert committed(kafka, group, topic) == {}
        with tracked(kafka, topic, group, SHARED, client=client) as other:
            got: list[Message] = []

            def is_shared() -> bool:
                for member in (one, other):
                    message = member.next(0.05)
                    got.extend([] if message is None else [message])
                return len(other.progress()) == 2

            until(is_shared, what="the other one having two shards")
            taken = set().union(*(shards for shards, _ in revoked))
            assert all(at_that_time == {} for _, at_that_time in revoked), "the callback comes first"
            assert {n: p for n, p in committed(kafka, group, topic).items() if Shard(topic, n) in taken} == {
                shard.id: 10 for shard in taken
            }
            assert len(taken) >= 2
            assert got == [], "nothing is read twice"


def test_what_was_lost_is_not_committed_over_the_new_owner(kafka: str) -> None:
    topic, group = create_topic(kafka, 1), unique_group()
    fill(kafka, topic, 3, partitions=1)
    with open_consumer(kafka, topic, group, SHARED, QUICK) as consumer:
        read(consumer, 3)
        consumer.commit({Shard(topic): 3})
        consumer._assigned = frozenset()
        with pytest.raises(GroupActiveError):
            consumer.commit({Shard(topic): 1})
    assert committed(kafka, group, topic) == {0: 3}


@pytest.mark.slow
def test_commits_in_the_background_while_the_group_changes(kafka: str) -> None:
    topic, group = create_topic(kafka, 4), unique_group()
    fill(kafka, topic, 400, partitions=4)
    options = TrackingOptions(commit_interval_seconds=0.02, commit_every=10, close_seconds=5)
    found: set[tuple[int, int]] = set()
    stop = threading.Event()

    def work() -> None:
        with tracked(kafka, topic, group, SHARED, client=QUICK, options=options) as consumer:
            while not stop.is_set():
                message = consumer.next(0.05)
                if message is not None:
                    found.add((message.shard.id, message.sequence))
                    consumer.ack(message)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(found) == 400, what="every message")
    until(lambda: committed(kafka, group, topic) == dict.fromkeys(range(4), 100), what="every position")
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a commit and a change of owner wait for each other"


# transactions (40)


@contextmanager
def transactions(
    kafka: str, topic: str, results: str, group: str, name: str | None = None
) -> Iterator[tuple[TrackedConsumer, KafkaTransactions]]:
    inner = open_consumer(kafka, topic, group)
    with (
        KafkaTransactions(url(kafka, results), name or unique_group(), inner) as sending,
        TrackedConsumer(inner, sending, options=BY_HAND) as consumer,
    ):
        yield consumer, sending


def payloads(kafka: str, topic: str) -> list[bytes | None]:
    """What a reader with read_committed sees."""
    with KafkaConsumer(url(kafka, topic), live=False) as consumer:
        return [message.payload for message in consumer]


def test_messages_and_positions_land_together(kafka: str) -> None:
    topic, results, group = create_topic(kafka, 1), create_topic(kafka, 1), unique_group()
    fill(kafka, topic, 4, partitions=1)
    with transactions(kafka, topic, results, group) as (consumer, sending):
        sending.begin()
        for message in read(consumer, 4)[:3]:
            sending.send(b"%d" % message.sequence, key=b"k", headers=[("h", b"1")])
            consumer.ack(message)
        assert payloads(kafka, results) == []
        assert committed(kafka, group, topic) == {}
        assert consumer.commit() is CommitResult.COMMITTED
        assert payloads(kafka, results) == [b"0", b"1", b"2"]
        assert committed(kafka, group, topic) == {0: 3}
        assert sending.is_open, "the next one has begun"
        assert consumer.commit() is CommitResult.NOTHING_TO_DO


def test_nothing_is_seen_of_an_aborted_one_and_its_messages_come_again(kafka: str) -> None:
    topic, results, group = create_topic(kafka, 1), create_topic(kafka, 1), unique_group()
    fill(kafka, topic, 3, partitions=1)
    with transactions(kafka, topic, results, group) as (consumer, sending):
        sending.begin()
        for message in read(consumer, 3):
            sending.send(b"wrong")
            consumer.ack(message)
        sending.abort()
        for _ in range(2):
            assert consumer.commit() is CommitResult.FAILED
            assert isinstance(consumer.commit_error, TransactionAbortedError)
        with pytest.raises(TransactionAbortedError):
            sending.begin()
        assert committed(kafka, group, topic) == {}
        consumer.seek_to_committed()
        sending.begin()
        for message in read(consumer, 3):
            sending.send(b"right %d" % message.sequence)
            consumer.ack(message)
        assert consumer.commit() is CommitResult.COMMITTED
    assert payloads(kafka, results) == [b"right 0", b"right 1", b"right 2"]
    assert committed(kafka, group, topic) == {0: 3}


def test_an_empty_commit_is_fine_and_one_that_was_not_begun_is_not(kafka: str) -> None:
    topic, results, group = create_topic(kafka, 1), create_topic(kafka, 1), unique_group()
    with transactions(kafka, topic, results, group) as (_, sending):
        with pytest.raises(InvalidOptionError):
            sending.send(b"1")
        with pytest.raises(InvalidOptionError):
            sending.commit_and_end_transactions({})
        sending.begin()
        sending.commit_and_end_transactions({})
        assert not sending.is_open
        sending.begin()
        sending.send(b"sent without positions")
        sending.commit_and_end_transactions({})
        assert payloads(kafka, results) == [b"sent without positions"]
        sending.begin()
        sending.send(b"left open")
    assert payloads(kafka, results) == [b"sent without positions"]
    with pytest.raises(ProducerEndedError):
        sending.begin()


def test_who_is_fenced_out_commits_nothing(kafka: str) -> None:
    topic, results, group, name = create_topic(kafka, 1), create_topic(kafka, 1), unique_group(), unique_group()
    fill(kafka, topic, 2, partitions=1)
    inner = open_consumer(kafka, topic, group)
    with inner, KafkaTransactions(url(kafka, results), name, inner) as old:
        old.begin()
        old.send(b"from the old one")
        with KafkaTransactions(url(kafka, results), name, inner) as new:
            with pytest.raises(ProducerFencedError):
                old.commit_and_end_transactions({Shard(topic): 2})
            new.begin()
            new.send(b"from the new one")
            new.commit_and_end_transactions({Shard(topic): 1})
    assert payloads(kafka, results) == [b"from the new one"]
    assert committed(kafka, group, topic) == {0: 1}


def test_a_commit_that_starts_no_new_transaction(kafka: str) -> None:
    topic, results, group = create_topic(kafka, 1), create_topic(kafka, 1), unique_group()
    fill(kafka, topic, 3, partitions=1)
    with transactions(kafka, topic, results, group) as (consumer, sending):
        first, second, third = read(consumer, 3)
        sending.begin()
        sending.send(b"1", stream=results)
        consumer.ack(first)
        assert consumer.commit() is CommitResult.COMMITTED
        assert sending.is_open, "the next one has begun"
        sending.send(b"2", stream=results)
        consumer.ack(second)
        assert consumer.commit(start_new_transaction=False) is CommitResult.COMMITTED
        assert not sending.is_open
        assert committed(kafka, group, topic) == {0: 2}
        assert consumer.commit(start_new_transaction=False) is CommitResult.NOTHING_TO_DO
        # Nothing is finished, and the transaction ends all the same.
        sending.begin()
        sending.send(b"3", stream=results)
        assert consumer.commit_and_end_transactions() is CommitResult.COMMITTED
        assert not sending.is_open
        consumer.ack(third)
        assert consumer.force_commit(start_new_transaction=False) is CommitResult.COMMITTED
        assert not sending.is_open
        assert committed(kafka, group, topic) == {0: 3}
    assert payloads(kafka, results) == [b"1", b"2", b"3"]


def test_a_transaction_is_not_ended_by_the_background(kafka: str) -> None:
    topic, group = create_topic(kafka, 1), unique_group()
    with (
        open_consumer(kafka, topic, group) as inner,
        KafkaTransactions(url(kafka, topic), unique_group(), inner) as sending,
        pytest.raises(InvalidOptionError),
    ):
        TrackedConsumer(inner, sending)


# livelock


def test_an_open_transaction_and_a_shard_without_news_are_no_livelock(kafka: str) -> None:
    topic, group = create_topic(kafka, 2), unique_group()
    fill(kafka, topic, 2, partitions=2)
    options = LivelockOptions(fetch_timeout_seconds=60, arrival_timeout_seconds=0.01, commit_timeout_seconds=0.01)
    open_one = transactional(kafka)
    with tracked(kafka, topic, group) as consumer:
        for message in read(consumer, 2):
            consumer.ack(message)
        consumer.commit()
        open_one.begin_transaction()
        open_one.produce(topic, b"open", partition=0)
        open_one.flush()
        watch = LivelockWatch(consumer.progress, consumer._ends, options=options)

        until(
            lambda: consumer._ends()[Shard(topic, 0)] == ShardEnd(readable=1, written=2),
            what="the open transaction being seen",
        )
        for _ in range(3):
            consumer.next(0.02)
            assert watch.check() == []
        open_one.abort_transaction()
