"""One check for each kind of argument: the same nonsense is refused everywhere, with an error of ours."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stream_consumers.async_consumer import AsyncConsumer
from stream_consumers.consumer import ProcessCommitter
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import InvalidOptionError, StreamEndedError
from stream_consumers.kafka.producer import KafkaProducer
from stream_consumers.memory import MemoryCommitter, forget_memory_broker
from stream_consumers.messages import Message, Shard
from stream_consumers.options import FileProducerOptions, Limits, RedisGroupOptions
from stream_consumers.redis.client import ClaimPolicy
from stream_consumers.redis.entry_consumer import EntryConsumer, GroupEntryConsumer, create_entry_consumer
from stream_consumers.redis.group import RedisCommitter
from stream_consumers.redis.group_consumer import RedisGroupConsumer
from stream_consumers.redis.producer import RedisProducer
from stream_consumers.redis.server import RedisConnection
from stream_consumers.stdio.backend import StdioProducerOptions
from stream_consumers.subscription.backend import EventMessage
from stream_consumers.subscription.config import RetryPolicy, SubscriptionConfig
from stream_consumers.subscription.memory_backend import MemoryBackend
from stream_consumers.subscription.redis_backend import RedisBackend
from stream_consumers.tracking.commits import CommitResult
from stream_consumers.tracking.consumer import TrackedConsumer
from stream_consumers.tracking.options import TrackingOptions
from stream_consumers.urls import StreamUrl
from tests.support.redis_streams import unique_name

URL = "memory://arguments/orders"
NO_COUNTS = (0, -1, 1.5, 2.0, True, "1", None, math.nan)
NO_TIMES = (math.nan, "1", True, [])


@pytest.fixture(autouse=True)
def messages() -> Iterator[None]:
    with create_producer(URL) as producer:
        for number in range(3):
            producer.send(b"%d" % number)
    yield
    forget_memory_broker(StreamUrl.parse(URL))


@pytest.fixture
def tracked() -> Iterator[TrackedConsumer]:
    options = TrackingOptions(close_seconds=0)
    with TrackedConsumer(
        create_consumer(URL), MemoryCommitter(StreamUrl.parse(URL), "billing"), options=options
    ) as made:
        yield made


def options_with_counts() -> dict[str, Callable[[Any], object]]:
    """Options that are whole numbers, at least 1."""
    stream: dict[str, Any] = {"stream": "orders", "group": "billing", "dead_letter_stream": "dead"}
    return {
        "max_records": lambda count: Limits(max_records=count),
        "max_bytes": lambda count: Limits(max_bytes=count),
        "max_records of an asset": lambda count: Limits().override(0 if count is None else count),
        "batch_size": lambda count: RedisGroupOptions(batch_size=0 if count is None else count),
        "max_deliveries": lambda count: RedisGroupOptions(max_deliveries=0 if count is None else count),
        "deliveries of a claim": lambda count: ClaimPolicy(max_deliveries=count),
        "beacon_interval": lambda count: FileProducerOptions(beacon_interval=count),
        "buffer_size": lambda count: TrackingOptions(buffer_size=count),
        "commit_every": lambda count: TrackingOptions(commit_every=0 if count is None else count),
        "max_in_flight": lambda count: SubscriptionConfig(**stream, max_in_flight=count),
        "ack_batch_size": lambda count: SubscriptionConfig(**stream, ack_batch_size=count),
        "max_retries": lambda count: RetryPolicy(max_retries=-1 if count == 0 and count is not False else count),
        "shards of Kafka": lambda count: KafkaProducer(
            StreamUrl.parse("kafka://127.0.0.1:1/orders"), shards=0 if count is None else count
        ),
        "shards of Redis": lambda count: RedisProducer(
            StreamUrl.parse("redis://127.0.0.1:1/orders"), shards=0 if count is None else count
        ),
    }


@pytest.mark.parametrize("option", options_with_counts())
@pytest.mark.parametrize("count", NO_COUNTS, ids=repr)
def test_an_option_that_counts_is_a_whole_number(option: str, count: Any) -> None:
    with pytest.raises(InvalidOptionError):
        options_with_counts()[option](count)


def options_that_are_switched() -> dict[str, Callable[[Any], object]]:
    """Options that are on or off."""
    member: dict[str, Any] = {"group": "billing", "consumer": "me", "streams": ["orders"]}
    server = "redis://127.0.0.1:1/"
    return {
        "live": lambda switch: create_consumer(URL, live=switch),
        "end_with_eos": lambda switch: FileProducerOptions(end_with_eos=switch),
        "create_stream": lambda switch: RedisGroupOptions(create_stream=switch),
        "bare": lambda switch: StdioProducerOptions(bare=switch),
        "loopback": lambda switch: StdioProducerOptions(loopback=switch),
        "auto_create": lambda switch: GroupEntryConsumer(server, **member, auto_create=switch),
        "start_from_backlog": lambda switch: GroupEntryConsumer(server, **member, start_from_backlog=switch),
        "auto_acknowledge": lambda switch: GroupEntryConsumer(server, **member, auto_acknowledge=switch),
    }


@pytest.mark.parametrize("option", options_that_are_switched())
@pytest.mark.parametrize("switch", ["false", "", 0, 1, None], ids=repr)
def test_an_option_that_is_on_or_off_is_no_text(option: str, switch: Any) -> None:
    with pytest.raises(InvalidOptionError, match=f"{option}=.* is not a Boolean"):
        options_that_are_switched()[option](switch)


@pytest.mark.parametrize("count", NO_COUNTS, ids=repr)
def test_messages_are_asked_for_and_tracked_by_whole_numbers(tracked: TrackedConsumer, count: Any) -> None:
    with pytest.raises(InvalidOptionError):
        list(tracked.getmany(0, max_messages=count))
    message = tracked.next(0)
    assert message is not None
    with pytest.raises(InvalidOptionError):
        tracked.track_message(message, readers=count)


@pytest.mark.parametrize("seconds", NO_TIMES, ids=repr)
def test_a_time_to_wait_is_a_number(tracked: TrackedConsumer, redis_address: str, seconds: Any) -> None:
    def refuses(call: Callable[[], object]) -> None:
        with pytest.raises(InvalidOptionError):
            call()

    redis = StreamUrl.parse(f"redis://{redis_address}/{unique_name()}")
    for url in (URL, str(redis)):
        with create_consumer(url) as consumer:
            refuses(lambda: consumer.next(seconds))
    with RedisGroupConsumer(redis, group="billing") as member:
        refuses(lambda: member.next(seconds))
    with EntryConsumer(redis) as entries:
        refuses(lambda: entries.get_entry(seconds))

    async def ask() -> None:
        async with AsyncConsumer(create_consumer(URL)) as consumer:
            await consumer.next(seconds)

    refuses(lambda: asyncio.run(ask()))
    for call in (tracked.next, tracked.wait_empty, tracked.wait_for_stopped_flow):
        refuses(lambda call=call: call(seconds))  # type: ignore[misc]
    for backend in (MemoryBackend(), RedisBackend(redis)):
        refuses(lambda backend=backend: backend.read_new("orders", "billing", "me", 1, seconds))  # type: ignore[misc]


@pytest.mark.parametrize("place", [3.7, True, "nonsense", None, math.nan, "7"], ids=repr)
def test_a_rewind_goes_to_an_edge_or_to_a_whole_number(redis_address: str, tmp_path: Any, place: Any) -> None:
    create_producer(f"file://{tmp_path}/orders.ss/orders").close()
    for url in (URL, f"redis://{redis_address}/{unique_name()}", f"file://{tmp_path}/orders.ss/orders"):
        with create_consumer(url) as consumer, pytest.raises(InvalidOptionError):
            consumer.rewind(place)


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_a_stream_backend_counts_in_whole_numbers_and_knows_its_ids(kind: str, redis_address: str) -> None:
    url = StreamUrl.parse(f"redis://{redis_address}/")
    stream, words = unique_name(), ("billing", "me")
    with MemoryBackend() if kind == "memory" else RedisBackend(url) as backend:
        for number in range(3):
            backend.publish(stream, EventMessage(b"%d" % number))
        for start in ("nonsense", "", "-1", "1-", "١"):
            with pytest.raises(InvalidOptionError):
                backend.create_group(stream, "billing", start)
        backend.create_group(stream, "billing", "0")
        for count in NO_COUNTS:
            wrong: Any = count
            with pytest.raises(InvalidOptionError):
                backend.read_new(stream, *words, wrong, 0)
            with pytest.raises(InvalidOptionError):
                backend.reclaim_idle(stream, *words, 0.0, wrong)
        # Nothing was read meanwhile.
        (entry,) = backend.read_new(stream, *words, 1, 0)
        for entry_id in ("nonsense", "", "$", "1-0-0", 7, None):
            no_id: Any = entry_id
            calls: list[Callable[[Any], object]] = [
                lambda no_id: backend.ack_many(stream, "billing", [entry.id, no_id]),
                lambda no_id: backend.ack(stream, "billing", no_id),
                lambda no_id: backend.touch(stream, *words, [no_id]),
                lambda no_id: backend.redeliver(stream, *words, no_id),
            ]
            for call in calls:
                with pytest.raises(InvalidOptionError):
                    call(no_id)
        # The good one among the bad is still pending.
        assert backend.ack(stream, "billing", entry.id) == 1


def test_client_options_as_text_are_numbers_where_the_client_wants_them(redis_address: str) -> None:
    url = StreamUrl.parse(f"redis://{redis_address}/orders")
    client = {"socket_timeout": "5", "socket_connect_timeout": "2.5", "db": "0", "socket_keepalive": "true"}
    server = RedisConnection(url, client)
    server.check()
    found = server.connection.connection_pool.connection_kwargs
    assert (found["socket_timeout"], found["socket_connect_timeout"], found["db"]) == (5, 2.5, 0)
    assert found["socket_keepalive"] is True
    for wrong in ({"socket_timeout": "soon"}, {"db": "nan"}, {"socket_keepalive": "maybe"}):
        with pytest.raises(InvalidOptionError):
            RedisConnection(url, wrong).check()
    # A password of digits is no number.
    assert (
        RedisConnection(url, {"password": "12345"}).connection.connection_pool.connection_kwargs["password"] == "12345"
    )


@pytest.mark.parametrize("name", ["a\0b", "\ud800", 5, b"billing"], ids=ascii)
def test_a_name_is_text_that_every_client_takes_as_it_is(name: Any) -> None:
    # A client in C would join group 'a' instead of 'a\0b', and abort the process over '\ud800'.
    for url in (URL, "redis://127.0.0.1:1/orders", "kafka://127.0.0.1:1/orders"):
        with pytest.raises(InvalidOptionError):
            create_consumer(url, mode="load_balanced", group=name)
    with pytest.raises(InvalidOptionError):
        RedisGroupOptions(consumer=name)
    with pytest.raises(InvalidOptionError):
        SubscriptionConfig(stream="orders", group=name, dead_letter_stream="dead")


def test_a_moment_a_shard_and_an_observer_are_what_they_should_be(tracked: TrackedConsumer) -> None:
    consumer = create_consumer(URL)
    with consumer:
        for moment in ("2026-01-01", 5, None):
            with pytest.raises(InvalidOptionError):
                consumer.seek(moment)  # type: ignore[arg-type]
        for shard in ("orders/0", ("orders", 0), Shard("orders", -1), Shard("orders", "0"), None):  # type: ignore[arg-type]
            with pytest.raises(InvalidOptionError):
                consumer.assign(shard)  # type: ignore[arg-type]
            with pytest.raises(InvalidOptionError):
                tracked.pause_partitions([shard])  # type: ignore[list-item]
            with pytest.raises(InvalidOptionError):
                tracked.resume_partitions([shard])  # type: ignore[list-item]
        for position in ("1", 1.5, None, True):
            with pytest.raises(InvalidOptionError):
                tracked.go_to({Shard("orders"): position})  # type: ignore[dict-item]
    for observer in (None, 5):
        with pytest.raises(InvalidOptionError):
            create_consumer(URL, on_dead_letter=observer)  # type: ignore[arg-type]


@pytest.mark.parametrize("chosen", ["orders", b"orders", 7, [7], [None]], ids=repr)
def test_a_tracked_consumer_takes_collections(tracked: TrackedConsumer, chosen: Any) -> None:
    for call in (tracked.commit, tracked.force_commit, tracked.pause_partitions, tracked.resume_partitions):
        # With nothing to commit, and with something.
        with pytest.raises(InvalidOptionError):
            call(chosen)
        message = tracked.next(0)
        if message is not None:
            tracked.ack(message)
        with pytest.raises(InvalidOptionError):
            call(chosen)
    assert tracked.commit(["orders"]) is CommitResult.COMMITTED


def test_a_closed_tracked_consumer_does_nothing_more() -> None:
    consumer = TrackedConsumer(create_consumer(URL), MemoryCommitter(URL, "billing"))
    message = consumer.next(0)
    assert message is not None
    consumer.ack(message)
    consumer.close()
    calls: list[Callable[[], object]] = [
        lambda: consumer.next(0),
        lambda: list(consumer.getmany(0)),
        lambda: consumer.ack(message),
        lambda: consumer.track_message(message),
        consumer.commit,
        consumer.force_commit,
        consumer.wait_empty,
        lambda: consumer.pause_partitions([message.shard]),
        lambda: consumer.resume_partitions([message.shard]),
        lambda: consumer.seek(message.timestamp),
        lambda: consumer.rewind(0),
        lambda: consumer.go_to({message.shard: 0}),
        consumer.seek_to_committed,
        lambda: consumer.assign(message.shard),
        lambda: consumer.unassign(message.shard),
    ]
    for call in calls:
        with pytest.raises(StreamEndedError):
            call()
    consumer.close()
    # What a handler raised is not hidden.
    with pytest.raises(ValueError, match="its own"), consumer.processing(message):
        raise ValueError("its own")


@pytest.mark.parametrize("positions", ["orders", ["orders"], 7, {"orders": 1}, {Shard("orders"): "1"}], ids=repr)
def test_committers_take_sequences_of_shards(redis_address: str, positions: Any) -> None:
    for committer in (
        ProcessCommitter(),
        MemoryCommitter(URL, "billing"),
        RedisCommitter(f"redis://{redis_address}/{unique_name()}", "billing"),
    ):
        with pytest.raises(InvalidOptionError):
            committer.commit(positions)


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_a_stream_backend_takes_collections_and_names(kind: str, redis_address: str) -> None:
    stream = unique_name()
    with MemoryBackend() if kind == "memory" else RedisBackend(f"redis://{redis_address}/") as backend:
        backend.create_group(stream, "billing", "0")
        words: Any
        for words in ("1", b"1", 7):
            for call in (
                lambda words=words: backend.ack_many(stream, "billing", words),
                lambda words=words: backend.touch(stream, "billing", "me", words),
                lambda words=words: backend.publish_batch(stream, words),
            ):
                with pytest.raises(InvalidOptionError):
                    call()  # type: ignore[no-untyped-call]
        message = EventMessage(b"{}")
        for name in ("a\0b", "\ud800", "", 7, None, ["billing"]):
            wrong: Any = name
            refused: list[Callable[[Any], object]] = [
                lambda wrong: backend.create_group(stream, wrong, "0"),
                lambda wrong: backend.read_new(stream, "billing", wrong, 1, 0),
                lambda wrong: backend.reclaim_idle(stream, "billing", wrong, 0, 1),
            ]
            # A key of Redis may have a NUL, and be empty.
            if kind == "memory" or name not in ("a\0b", ""):
                refused += [
                    lambda wrong: backend.publish(wrong, message),
                    lambda wrong: backend.create_group(wrong, "billing", "0"),
                ]
            for refuse in refused:
                with pytest.raises(InvalidOptionError):
                    refuse(wrong)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "", 7], ids=ascii)
def test_an_entry_consumer_takes_names(name: Any) -> None:
    url = "redis://127.0.0.1:1/orders"
    for words in ({"group": name, "consumer": "me"}, {"group": "billing", "consumer": name}):
        with pytest.raises(InvalidOptionError):
            create_entry_consumer(url, **words)
    wrong: Any
    for wrong in ("orders", b"orders", 7, ["\ud800"], [7]):
        with pytest.raises(InvalidOptionError):
            create_entry_consumer(url, streams=wrong)
    with pytest.raises(InvalidOptionError):
        create_entry_consumer(url, identifiers="orders")


def test_the_repr_of_a_message_shows_where_it_is_and_not_what_it_holds() -> None:
    message = Message(Shard("orders"), 7, 20, b"secret", key=b"secret", headers=(("token", b"secret"),))
    assert repr(message) == "Message(shard=Shard(stream='orders', id=0), sequence=7, timestamp_ms=20)"


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("timestamp", {"timestamp": "card 4111"}),
        ("payload", {"payload_base64": "card 4111"}),
        ("payload", {"payload": "card 4111\ud800"}),
        ("key", {"key": ["card 4111"]}),
        ("stream_key", {"stream_key": ["card 4111"]}),
        ("shard_id", {"shard_id": "card 4111"}),
        ("headers", {"headers": "card 4111"}),
        ("header", {"headers": ["card 4111"]}),
        ("value", {"headers": [{"name": "card", "value_base64": "card 4111"}]}),
    ],
)
def test_the_error_of_json_that_is_no_message_names_the_field_and_not_its_value(
    name: str, document: dict[str, object]
) -> None:
    with pytest.raises(InvalidOptionError) as raised:
        Message.from_json(document)
    said = "".join(traceback.format_exception(raised.value))
    assert name in raised.value.what
    assert "4111" not in said
    assert "ud800" not in said
