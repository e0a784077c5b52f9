"""SeaStreamer's own tests of its Redis backend, by its names, with our meaning where that differs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from stream_consumers.consumer import Edge
from stream_consumers.create import create_consumer
from stream_consumers.errors import FormatError, StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.options import AutoCommit, AutoStreamReset, ConsumerMode, RedisGroupOptions
from stream_consumers.redis.entries import MAX_MS, to_id, to_sequence
from stream_consumers.redis.group_consumer import RedisGroupConsumer
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.redis_streams import Place, numbers, poll, take, take_until_silent, unique_name

RESUMABLE, SHARED = ConsumerMode.RESUMABLE, ConsumerMode.LOAD_BALANCED
EARLIEST, LATEST = AutoStreamReset.EARLIEST, AutoStreamReset.LATEST
REAL_TIME = ConsumerMode.REAL_TIME
SHORT = 0.02


def member(place: Place, mode: ConsumerMode, group: str | None = None, **rest: Any) -> RedisGroupConsumer:
    options = {name: rest.pop(name) for name in ("reset", "live", "on_dead_letter") if name in rest}
    settings = RedisGroupOptions(**rest)
    return RedisGroupConsumer(StreamUrl.parse(place.url), mode=mode, group=group, options=settings, **options)


# R-consumer-group


def test_consumer_group_does_not_make_a_stream_unless_told(place: Place) -> None:
    with member(place, SHARED, "g", create_stream=False) as consumer:
        with pytest.raises(StreamNotFoundError):
            consumer.next(0)
        assert not place.client.exists(place.stream)
        place.send(range(2))
        assert numbers(take(consumer, 2)) == [0, 1]


# R-load-balance


def test_load_balance(place: Place) -> None:
    with (
        member(place, SHARED, auto_commit=AutoCommit.DISABLED, batch_size=1) as one,
        member(place, SHARED, auto_commit=AutoCommit.DISABLED, batch_size=1) as other,
    ):
        assert one.group == other.group
        assert one.group.endswith(":s")
        assert one.consumer != other.consumer
        place.send(range(10))
        found: dict[str, list[int]] = {one.consumer: [], other.consumer: []}

        def is_complete() -> bool:
            for consumer in (one, other):
                message = consumer.next(0)
                if message is not None:
                    found[consumer.consumer] += numbers([message])
            return sum(map(len, found.values())) == 10

        until(is_complete)
        assert sorted(itertools.chain(*found.values())) == list(range(10))
        assert all(found.values())


# R-realtime


def fill(place: Place, payloads: range) -> list[int]:
    """Send with the plain client; returns the sequences."""
    return [to_sequence(place.client.xadd(place.stream, {"msg": str(number)})) for number in payloads]


@pytest.mark.parametrize("mode", [RESUMABLE, SHARED])
def test_a_group_of_two_streams(streams: list[Place], mode: ConsumerMode) -> None:
    one, other = streams[:2]
    options = RedisGroupOptions(auto_commit=AutoCommit.DISABLED)
    fill(one, range(5))
    fill(other, range(5, 10))
    both = f"{one.url},{other.stream}"
    for is_again in (False, True):
        with create_consumer(both, mode=mode, group="g", group_options=options) as consumer:
            assert isinstance(consumer, RedisGroupConsumer)
            if mode is SHARED and is_again:
                assert consumer.next(0) is None
                continue
            found = take(consumer, 10)
            assert sorted(numbers(found)) == list(range(10))
            if is_again:
                for message in found:
                    consumer.ack(message)
                assert consumer.commit() == 10


# R-realtime-multi


@pytest.fixture
def streams(redis_address: str) -> Iterator[list[Place]]:
    found = [Place(redis_address) for _ in range(4)]
    yield found
    for place in found:
        place.client.close()


def url_of(streams: list[Place]) -> str:
    return f"redis://{streams[0].address}/{','.join(place.stream for place in streams)}"


def by_stream(place: Place, messages: list[Any]) -> list[int]:
    return numbers(message for message in messages if message.shard.stream == place.stream)


@pytest.mark.parametrize("quiet", [1, 3], ids=["a", "b"])
def test_realtime_multi_a_b_quiet_streams_are_not_starved(streams: list[Place], quiet: int) -> None:
    busy, *others = streams[: 1 + quiet]
    fill(busy, range(500))
    with create_consumer(url_of([busy, *others]), reset=EARLIEST) as consumer:
        take(consumer, 10)
        for place in others:
            fill(place, range(1))
        # They come before the busy one is through.
        found = take(consumer, 300)
        assert [by_stream(place, found) for place in others] == [[0]] * quiet


@pytest.mark.parametrize("mode", [REAL_TIME, RESUMABLE, SHARED])
def test_realtime_multi_h_a_key_of_the_wrong_type(place: Place, mode: ConsumerMode) -> None:
    place.client.set(place.stream, "something else")
    with create_consumer(place.url, mode=mode) as consumer, pytest.raises(FormatError):
        consumer.next(0)


# R-resumable-1


@pytest.mark.parametrize(("mode", "auto_commit"), [(RESUMABLE, AutoCommit.IMMEDIATE), (SHARED, AutoCommit.DELAYED)])
def test_resumable_1(place: Place, mode: ConsumerMode, auto_commit: AutoCommit) -> None:
    options: dict[str, Any] = {"auto_commit": auto_commit, "auto_commit_delay_seconds": 0.0}
    place.send(range(5))
    late, early = unique_name("group"), unique_name("group")
    with member(place, mode, late, reset=LATEST, **options) as half:
        assert half.next(0) is None
        with member(place, mode, early, reset=EARLIEST, **options) as full:
            assert numbers(take(full, 5)) == [0, 1, 2, 3, 4]
            place.send(range(5, 10))
        assert numbers(take(half, 5)) == [5, 6, 7, 8, 9]
    assert place.pending(early) == {}
    # LATEST does not matter where the group is there already.
    with member(place, mode, early, reset=LATEST, **options) as again:
        assert numbers(take(again, 5)) == [5, 6, 7, 8, 9]


# R-sharding


def test_sharding_by_a_producer_that_comes_after_the_consumer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_consumers.redis.group_consumer.SHARD_SEARCH_SECONDS", SHORT)
    with member(place, RESUMABLE, "g") as consumer:
        assert consumer.next(0) is None
        # The stream that the consumer has made is there without numbers.
        assert place.client.exists(place.stream)
        found: list[Any] = []
        place.send(range(6), shards=3, is_sharded=True)
        poll(consumer, 6, found)
        assert sorted(numbers(found)) == list(range(6))


@pytest.mark.parametrize("assigns", [False, True])
def test_a_shard_that_comes_later_is_read(place: Place, monkeypatch: pytest.MonkeyPatch, assigns: bool) -> None:
    monkeypatch.setattr("stream_consumers.redis.consumer.SHARD_SEARCH_SECONDS", SHORT)
    place.send(range(2), shards=2, is_sharded=True)
    with create_consumer(place.url) as consumer:
        assert sorted(numbers(take(consumer, 2))) == [0, 1]
        if assigns:
            # It counts from the next seek or rewind on.
            consumer.assign(Shard(place.stream, 0))
        place.send(range(2, 5), shards=3, is_sharded=True)
        assert sorted(numbers(take(consumer, 3))) == [2, 3, 4]
        consumer.rewind(Edge.BEGINNING)
        assert sorted(take_until_silent(consumer)) == ([0, 3] if assigns else [0, 1, 2, 3, 4])


# R-units


@pytest.mark.parametrize("text", ["0-0", "1-1", f"{MAX_MS}-65534"])
def test_units_ids(text: str) -> None:
    assert to_id(to_sequence(text)) == text


@pytest.mark.parametrize(
    "text", ["", "123", "1-", "-1", "a-1", "1-2-3", "1.5-0", " 1-0", "-1-0", "1-65536", f"{2**63}-0", f"{MAX_MS}-65535"]
)
def test_units_not_ids(text: str) -> None:
    # SeaStreamer takes ids up to 2^64-1; a sequence of ours and what follows it are signed numbers of 64 bits.
    with pytest.raises(FormatError):
        to_sequence(text)


def test_the_default_names(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_ID", "thishost")
    before = time.time_ns()
    with (
        member(place, RESUMABLE) as one,
        member(place, SHARED) as other,
        member(place, SHARED, "g", consumer="c") as own,
    ):
        assert (one.group, one.consumer) == ("thishost:r", "thishost:r")
        host, pid, thread, moment = other.consumer.split(":")
        assert (other.group, host) == ("thishost:s", "thishost")
        assert int(pid) > 0
        assert int(thread) > 0
        assert before <= int(moment) <= time.time_ns()
        assert (own.group, own.consumer) == ("g", "c")
