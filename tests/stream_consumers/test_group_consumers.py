"""What a member of a group offers: ``group``, ``ack`` and ``commit``, on every backend."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from stream_consumers.async_consumer import AsyncConsumer
from stream_consumers.consumer import Consumer, Edge
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import InvalidOptionError, NotSubscribedError, StreamEndedError
from stream_consumers.memory import MemoryCommitter, forget_memory_broker
from stream_consumers.messages import Message, Shard
from stream_consumers.options import RedisGroupOptions
from stream_consumers.stdio.backend import StdioConsumer
from stream_consumers.stdio.broker import StdioBroker
from stream_consumers.tracking.commits import CommitResult
from stream_consumers.tracking.consumer import TrackedConsumer
from stream_consumers.tracking.options import TrackingOptions
from tests.support.redis_streams import Place
from tests.support.streams import write_stream
from tests.support.topics import committed, create_topic, fill, unique_group

PATIENCE = 60.0
URL = "memory://group-consumers/orders"


@pytest.fixture
def memory() -> Iterator[str]:
    with create_producer(URL) as producer:
        for number in range(3):
            producer.send(b"%d" % number)
    yield URL
    forget_memory_broker(URL)


def take(member: Consumer, count: int) -> list[Message]:
    """The next messages, each acknowledged."""
    found = []
    for _ in range(count):
        message = member.next(PATIENCE)
        assert message is not None
        member.ack(message)
        found.append(message)
    return found


@pytest.mark.parametrize("mode", ["resumable", "load_balanced"])
def test_kafka_keeps_the_position_behind_what_was_acknowledged(kafka: str, mode: str) -> None:
    topic, group = create_topic(kafka, 2), unique_group()
    fill(kafka, topic, 10, partitions=2)
    url = f"kafka://{kafka}/{topic}"
    with create_consumer(url, mode=mode, group=group, live=False) as member:
        assert (member.group, member.commit()) == (group, 0)
        messages = list(member)
        for message in messages:
            if message.sequence != 4:
                member.ack(message)
        # An earlier one once more does not move it back.
        member.ack(next(message for message in messages if message.sequence == 1))
        assert member.commit() == 2
        assert committed(kafka, group, topic) == {0: 4, 1: 4}
        assert member.commit() == 0
        with pytest.raises(NotSubscribedError):
            member.ack(Message(Shard("other"), 0, 0, b""))
    with create_consumer(url, mode=mode, group=group, live=False) as member:
        assert sorted((m.shard.id, m.sequence) for m in member) == [(0, 4), (1, 4)]


def test_groups_that_remember_nothing(memory: str, tmp_path: Path) -> None:
    file = write_stream(tmp_path / "orders.ss", 3, shards=1)
    lines = StdioBroker(io.BytesIO(b"[orders | 1] one\n[orders | 2] two\n[orders | 3] three\n"), io.BytesIO())
    members: list[Consumer] = [
        create_consumer(memory, mode="load_balanced", group="billing"),
        create_consumer(file, mode="load_balanced", group="billing"),
        StdioConsumer("stdio:///orders", mode="load_balanced", group="billing", broker=lines),  # type: ignore[arg-type]
    ]
    for member in members:
        with member:
            take(member, 3)
            assert (member.group, member.commit()) == ("billing", 0)


def test_a_closed_member_acknowledges_and_commits_nothing(memory: str, tmp_path: Path, redis_address: str) -> None:
    place = Place(redis_address)
    place.send(range(3))
    file = write_stream(tmp_path / "orders.ss", 3, shards=1)
    lines = StdioBroker(io.BytesIO(b"[orders | 1] one\n"), io.BytesIO())
    manual = RedisGroupOptions(auto_commit="disabled")  # type: ignore[arg-type]
    members: list[Consumer] = [
        create_consumer(memory, mode="load_balanced", group="billing"),
        create_consumer(file, mode="load_balanced", group="billing"),
        create_consumer(place.url, mode="load_balanced", group="billing", group_options=manual),
        StdioConsumer("stdio:///orders", mode="load_balanced", group="billing", broker=lines),  # type: ignore[arg-type]
    ]
    for member in members:
        message = member.next(PATIENCE)
        assert message is not None
        member.close()
        for call in closed_calls(member, message):
            with pytest.raises(StreamEndedError):
                call()
    place.client.close()


def test_a_closed_member_of_kafka_acknowledges_and_commits_nothing(kafka: str) -> None:
    topic = create_topic(kafka, 1)
    fill(kafka, topic, 1, partitions=1)
    member = create_consumer(f"kafka://{kafka}/{topic}", mode="resumable", group=unique_group())
    message = member.next(PATIENCE)
    assert message is not None
    member.close()
    for call in closed_calls(member, message):
        with pytest.raises(StreamEndedError):
            call()


def closed_calls(member: Consumer, message: Message) -> list[Callable[[], object]]:
    """Every operation of a member that was closed."""
    return [
        lambda: member.next(0),
        lambda: member.ack(message),
        member.commit,
        lambda: member.seek(message.timestamp),
        lambda: member.rewind(Edge.BEGINNING),
        lambda: member.assign(message.shard),
        lambda: member.unassign(message.shard),
    ]


async def aislice(consumer: AsyncConsumer, count: int) -> AsyncIterator[Message]:
    for _ in range(count):
        message = await consumer.next(PATIENCE)
        assert message is not None
        yield message


def test_asyncio_acknowledges_commits_and_waits_until_everything_is_finished(memory: str) -> None:
    committer = MemoryCommitter(memory, "billing")
    options = TrackingOptions(commit_interval_seconds=None, commit_every=None, close_seconds=0)

    async def work() -> None:
        tracked = TrackedConsumer(create_consumer(memory), committer, options=options)
        async with AsyncConsumer(tracked) as consumer:
            first, second, third = [message async for message in aislice(consumer, 3)]
            assert consumer.ack(first) is True
            assert consumer.ack(first) is False
            assert await consumer.commit() is CommitResult.COMMITTED
            assert dict(committer.committed()) == {Shard("orders"): 1}
            assert await consumer.wait_empty(0.05) is False

            async def finish() -> None:
                with create_producer(memory) as producer:
                    producer.send(b"3")
                last = await consumer.next(PATIENCE)
                assert last is not None, "reading goes on while somebody waits"
                for message in (third, second, last):
                    consumer.ack(message)

            empty, _ = await asyncio.gather(consumer.wait_empty(PATIENCE), finish())
            assert empty is True
            assert dict(committer.committed()) == {Shard("orders"): 4}

    asyncio.run(work())


def test_asyncio_over_a_consumer_that_knows_nothing_of_it(memory: str) -> None:
    async def work() -> None:
        async with AsyncConsumer(create_consumer(memory)) as consumer:
            message = await consumer.next(PATIENCE)
            assert message is not None
            with pytest.raises(InvalidOptionError, match="MemoryConsumer has no group"):
                consumer.ack(message)
            with pytest.raises(InvalidOptionError, match="MemoryConsumer has no group"):
                await consumer.commit()
            with pytest.raises(InvalidOptionError, match="does not know which messages are unfinished"):
                await consumer.wait_empty()

    asyncio.run(work())
