"""A tracked consumer over a member of a Redis group: XACK for what is finished and committed, and for nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from stream_consumers.consumer import EntryCommitter, PositionCommitter, ProcessCommitter
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import InvalidOptionError
from stream_consumers.memory import MemoryCommitter
from stream_consumers.messages import Message, Shard
from stream_consumers.options import AutoCommit, ConsumerMode, RedisGroupOptions
from stream_consumers.redis.entries import to_id
from stream_consumers.redis.group import RedisCommitter
from stream_consumers.redis.group_consumer import RedisGroupConsumer
from stream_consumers.tracking.commits import CommitResult, create_committer
from stream_consumers.tracking.consumer import TrackedConsumer
from stream_consumers.tracking.options import TrackingOptions
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.redis_streams import Place, numbers, take, take_until_silent
from tests.support.settings import ROOT
from tests.support.tracking import fetched

GROUP = "billing"
BY_HAND = TrackingOptions(commit_interval_seconds=None, commit_every=None, close_seconds=0.0)
WORKER = """
import sys, time
from stream_consumers.options import AutoCommit, RedisGroupOptions
from stream_consumers.redis.group_consumer import RedisGroupConsumer
from stream_consumers.tracking.consumer import TrackedConsumer
from stream_consumers.tracking.options import TrackingOptions
from stream_consumers.urls import StreamUrl
options = RedisGroupOptions(auto_commit=AutoCommit.DISABLED, consumer="me")
member = RedisGroupConsumer(StreamUrl.parse(sys.argv[1]), group="billing", options=options)
tracking = TrackingOptions(commit_interval_seconds=0.05)
consumer = TrackedConsumer(member, member, options=tracking)
messages = [message for shard, message in consumer.getmany(10, max_messages=6)]
for message in (messages[1], messages[2], messages[4]):
    consumer.ack(message)
print("working", flush=True)
time.sleep(600)
"""


def member(place: Place, mode: ConsumerMode = ConsumerMode.RESUMABLE, **rest: Any) -> RedisGroupConsumer:
    options = RedisGroupOptions(**{"auto_commit": AutoCommit.DISABLED, "consumer": "me", **rest})
    return RedisGroupConsumer(StreamUrl.parse(place.url), mode=mode, group=GROUP, options=options)


def tracked(consumer: RedisGroupConsumer, options: TrackingOptions = BY_HAND) -> TrackedConsumer:
    return TrackedConsumer(consumer, consumer, options=options)


def ids(messages: list[Message]) -> list[str]:
    return [to_id(message.sequence) for message in messages]


def test_a_message_is_acknowledged_when_it_is_finished_and_committed(place: Place) -> None:
    place.send(range(6))
    with tracked(member(place)) as consumer:
        messages = take(consumer, 6)
        assert consumer.commit() is CommitResult.NOTHING_TO_DO
        for message in (messages[1], messages[4]):
            assert consumer.ack(message)
        assert list(place.pending(GROUP)) == ids(messages), "acknowledged, not committed"
        assert consumer.commit() is CommitResult.COMMITTED
        left = [messages[n] for n in (0, 2, 3, 5)]
        assert list(place.pending(GROUP)) == ids(left), "the first one is unfinished, and holds nothing back"
        assert consumer.commit() is CommitResult.NOTHING_TO_DO
        assert consumer.unacked == left
        for message in left:
            consumer.ack(message)
    assert place.pending(GROUP) == {}, "closing commits"
    with tracked(member(place)) as consumer:
        assert consumer.next(0) is None


def test_what_is_unfinished_in_a_process_that_is_killed_is_delivered_again(place: Place) -> None:
    place.send(range(6))
    with subprocess.Popen([sys.executable, "-c", WORKER, place.url], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout
        assert process.stdout.readline() == b"working\n"
        until(lambda: len(place.pending(GROUP)) == 3, what="a commit in the background")
        process.send_signal(signal.SIGKILL)
    with tracked(member(place)) as consumer:
        again = take(consumer, 3)
        assert numbers(again) == [0, 3, 5]
        assert consumer.next(0) is None
        consumer.ack(again[1])
        # What comes behind it is committed, however early the one before it is.
        place.send([6])
        consumer.ack(take(consumer, 1)[0])
        assert consumer.commit() is CommitResult.COMMITTED
        assert list(place.pending(GROUP)) == ids([again[0], again[2]])


def test_a_peer_takes_over_what_is_unfinished(place: Place) -> None:
    place.send(range(4))
    shared = ConsumerMode.LOAD_BALANCED
    quick = {"auto_claim_interval_seconds": 0.01, "auto_claim_idle_seconds": 0.1}
    dead = tracked(member(place, shared, consumer="dead"))
    messages = take(dead, 4)
    dead.ack(messages[2])
    dead.close()
    with tracked(member(place, shared, consumer="peer", **quick)) as peer:
        found: list[Message] = []
        until(
            lambda: found.extend(fetched(peer, 4, seconds=0.05)) or len(found) >= 3,
            what="entries that were left behind",
        )
        assert numbers(found) == [0, 1, 3]
        for message in found:
            peer.ack(message)
        assert peer.commit() is CommitResult.COMMITTED
    assert place.pending(GROUP) == {}


def test_only_the_chosen_shards_are_committed(place: Place) -> None:
    place.send(range(4), shards=2, is_sharded=True)
    with tracked(member(place)) as consumer:
        for message in take(consumer, 4):
            consumer.ack(message)
        consumer.commit([Shard(place.stream, 1)])
        left = [place.client.xpending(f"{place.stream}:{number}", GROUP)["pending"] for number in (0, 1)]
        assert left == [2, 0]
        assert consumer.commit([place.stream]) is CommitResult.COMMITTED
        assert place.client.xpending(f"{place.stream}:0", GROUP)["pending"] == 0


def test_positions_are_refused_where_entries_are_shared(place: Place) -> None:
    place.send(range(2))
    url = StreamUrl.parse(place.url)
    with member(place) as consumer:
        positions: list[PositionCommitter] = [ProcessCommitter(), RedisCommitter(url, GROUP), MemoryCommitter(url, "g")]
        for committer in positions:
            with pytest.raises(InvalidOptionError):
                TrackedConsumer(consumer, committer)
        assert take_until_silent(consumer) == [0, 1], "the consumer is as it was"


@pytest.mark.parametrize("kind", [AutoCommit.IMMEDIATE, AutoCommit.DELAYED, AutoCommit.ROLLING])
def test_a_member_that_acknowledges_by_itself_is_refused(place: Place, kind: AutoCommit) -> None:
    with (
        member(place, auto_commit=kind) as consumer,
        pytest.raises(InvalidOptionError),
    ):
        create_committer(StreamUrl.parse(place.url), GROUP, consumer=consumer)


def test_the_committer_that_fits_is_made(place: Place) -> None:
    url = StreamUrl.parse(place.url)
    with member(place) as consumer:
        assert create_committer(url, GROUP, consumer=consumer) is consumer
        assert not isinstance(create_committer(url, GROUP), EntryCommitter)
        with pytest.raises(InvalidOptionError):
            create_committer(url, "other", consumer=consumer)


def test_a_member_that_shares_messages_in_this_process_has_no_positions() -> None:
    url = "memory://tracked-groups/orders"
    shared = create_consumer(url, mode=ConsumerMode.LOAD_BALANCED, group="g")
    with shared, create_producer(url), pytest.raises(InvalidOptionError):
        TrackedConsumer(shared, MemoryCommitter(StreamUrl.parse(url), "g"))
