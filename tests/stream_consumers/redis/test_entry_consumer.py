"""Consumers of entries: coredis' own statements, its traps, its asyncio, with our meaning where that differs."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stream_consumers.errors import (
    BrokerUnavailableError,
    FormatError,
    GroupNotFoundError,
    GroupRemovedError,
    InvalidOptionError,
    NotSubscribedError,
    StreamEndedError,
)
from stream_consumers.messages import DeadLetter, Message, Shard
from stream_consumers.redis.entry_consumer import AsyncEntryConsumer, EntryConsumer, EntryReader, create_entry_consumer
from stream_consumers.testing.consumer_contract import median_seconds
from tests.support.lossy_proxy import LossyProxy
from tests.support.polling import until
from tests.support.redis_entries import GROUP, ME, PATIENCE, Found, Keys, by_stream, take
from tests.support.redis_streams import unique_name

both = pytest.mark.parametrize("kind", ["simple", "group"])


def test_02_the_same_in_a_group_that_is_there(keys: Keys) -> None:
    keys.make_groups(keys.a, keys.b)
    with keys.member(auto_create=False) as consumer:
        for name in (keys.a, keys.b):
            keys.add(name, range(10))
        found = take(consumer, 20)
        assert by_stream(found) == {keys.a: list(range(10)), keys.b: list(range(10))}
        assert (keys.pending(keys.a), keys.pending(keys.b)) == (10, 10)
        assert consumer.acknowledge(keys.a, *(entry for name, entry in found if name == keys.a)) == 10
        assert (keys.pending(keys.a), keys.pending(keys.b)) == (0, 10)


@pytest.mark.parametrize("buffer_size", [0, 3])
def test_06_entering_again_replays_from_the_identifiers(keys: Keys, buffer_size: int) -> None:
    for name in (keys.a, keys.b):
        keys.add(name, range(5))
    consumer = keys.consumer(identifiers={keys.a: "0-0"}, buffer_size=buffer_size)
    with consumer:
        assert by_stream(take(consumer, 3)) == {keys.a: [0, 1, 2]}
    keys.add(keys.b, [5])
    with consumer:
        assert by_stream(consumer) == {keys.a: list(range(5))}
        keys.add(keys.b, [6])
        assert by_stream(consumer) == {keys.b: [6]}


def test_07_a_group_goes_on_and_keeps_pending_what_was_buffered(keys: Keys) -> None:
    consumer = keys.member(keys.a, buffer_size=5)
    with consumer:
        keys.add(keys.a, range(5))
        assert by_stream(take(consumer, 2)) == {keys.a: [0, 1]}
    keys.add(keys.a, [5])
    with consumer:
        assert by_stream(consumer) == {keys.a: [5]}
    assert keys.pending(keys.a) == 6


def test_08_a_missing_group_names_the_streams_that_lack_it(keys: Keys) -> None:
    keys.make_groups(keys.a)
    with pytest.raises(GroupNotFoundError) as caught, keys.member(auto_create=False):
        pass
    assert keys.b in caught.value.what
    assert keys.a not in caught.value.what
    assert not keys.client.exists(keys.b)
    keys.make_groups(keys.b)
    with keys.member(auto_create=False) as consumer:
        assert consumer.get_entry() is None


def test_09_a_stream_that_is_added(keys: Keys) -> None:
    later = unique_name("later")
    for name in (keys.a, keys.b, later):
        keys.add(name, range(3))
    with keys.consumer(keys.a) as consumer:
        keys.add(keys.a, [3])
        assert consumer.add_stream(keys.b)
        assert consumer.add_stream(later, "0-0")
        assert not consumer.add_stream(later, "0-0")
        keys.add(keys.b, [3])
        assert by_stream(consumer) == {keys.a: [3], keys.b: [3], later: [0, 1, 2]}
        assert not consumer.add_stream(later, "0-0")
        assert list(consumer) == []
    assert consumer.streams == (keys.a, keys.b, later)


def test_10_a_stream_that_is_added_to_a_group(keys: Keys) -> None:
    keys.make_groups(keys.a)
    keys.add(keys.b, range(3))
    with keys.member(keys.a, auto_create=False) as consumer:
        with pytest.raises(GroupNotFoundError, match=keys.b):
            consumer.add_stream(keys.b)
        keys.add(keys.a, [0])
        assert by_stream(consumer) == {keys.a: [0]}
        keys.make_groups(keys.b)
        assert consumer.add_stream(keys.b)
        assert not consumer.add_stream(keys.b)
        assert by_stream(consumer) == {keys.b: [0, 1, 2]}
    later = unique_name("later")
    with keys.member(keys.a) as consumer:
        assert consumer.add_stream(later)
        keys.add(later, range(3))
        assert by_stream(consumer) == {later: [0, 1, 2]}


def test_12_two_members_share_everything(keys: Keys) -> None:
    for name in (keys.a, keys.b):
        keys.add(name, range(100))
    with keys.member() as one, keys.member(consumer="consumer-2") as other, ThreadPoolExecutor(2) as threads:
        first, second = threads.map(list, (one, other))
    places = [(name, entry.identifier) for name, entry in [*first, *second]]
    assert len(places) == len(set(places)) == 200


@pytest.mark.parametrize("buffer_size", [0, 4])
def test_13_the_backlog_comes_first(keys: Keys, buffer_size: int) -> None:
    options = {"start_from_backlog": True, "buffer_size": buffer_size}
    with keys.member(**options) as consumer:
        for name in (keys.a, keys.b):
            keys.add(name, range(10))
        assert len(take(consumer, 10)) == 10
    for name in (keys.a, keys.b):
        keys.add(name, range(10, 15))
    with keys.member(**options) as consumer:
        assert by_stream(take(consumer, 30)) == {keys.a: list(range(15)), keys.b: list(range(15))}
        assert consumer.get_entry() is None
        keys.add(keys.a, [15])
        assert by_stream(consumer) == {keys.a: [15]}


@both
def test_14_buffered(keys: Keys, kind: str) -> None:
    with keys.any(kind, buffer_size=10) as consumer:
        for name in (keys.a, keys.b):
            keys.add(name, range(10))
        found = list(consumer)
    assert by_stream(found) == {keys.a: list(range(10)), keys.b: list(range(10))}
    # A whole buffer of one stream, then of the other.
    assert [name for name, _ in found] == [keys.a] * 10 + [keys.b] * 10


@both
@pytest.mark.parametrize("is_iterated", [False, True])
def test_15_waiting_gets_what_is_added_meanwhile(keys: Keys, kind: str, is_iterated: bool) -> None:
    with keys.any(kind, timeout_seconds=PATIENCE) as consumer:
        found: list[Found | None] = []
        read = (lambda: next(iter(consumer))) if is_iterated else consumer.get_entry
        waiting = threading.Thread(target=lambda: found.append(read()))
        waiting.start()
        until(lambda: consumer._is_started, what="the start")
        assert not found
        keys.add(keys.b, [7])
        waiting.join(PATIENCE)
        assert by_stream(pair for pair in found if pair) == {keys.b: [7]}


@both
def test_16_iterating_without_waiting_drains_everything_and_ends(keys: Keys, kind: str) -> None:
    with keys.any(kind) as consumer:
        for name in (keys.a, keys.b):
            keys.add(name, range(20))
        assert len(list(consumer)) == 40
        assert list(consumer) == []
        keys.add(keys.a, [20])
        assert by_stream(consumer) == {keys.a: [20]}


# where coredis loses, hangs or misleads: order and places


def test_streams_take_turns_without_a_buffer(keys: Keys) -> None:
    for name in (keys.a, keys.b):
        keys.add(name, range(3))
    beginning = dict.fromkeys((keys.a, keys.b), "0-0")
    with keys.consumer(identifiers=beginning) as consumer:
        found = [(name, int(entry.fields[0][1])) for name, entry in consumer]
    assert found == [(keys.a, 0), (keys.b, 0), (keys.a, 1), (keys.b, 1), (keys.a, 2), (keys.b, 2)]


@pytest.mark.parametrize("buffer_size", [0, 5])
def test_a_place_moves_when_its_entry_is_returned(keys: Keys, buffer_size: int) -> None:
    keys.add(keys.a, range(4))
    with keys.consumer(keys.a, identifiers={keys.a: "0-0"}, buffer_size=buffer_size) as consumer:
        assert consumer.positions == {keys.a: "0-0"}
        (_, first), (_, second) = take(consumer, 2)
        assert consumer.positions == {keys.a: second.identifier} != {keys.a: first.identifier}
        places = consumer.positions
    with keys.consumer(keys.a, identifiers=places) as other:
        assert by_stream(other) == {keys.a: [2, 3]}


def test_an_entry_is_given_as_it_is_and_as_a_message(keys: Keys) -> None:
    words = (b"n\xff", b"1", b"msg", b"\x00", b"n\xff", b"2")
    keys.client.execute_command("XADD", f"{keys.a}:7", "5-1", *words)
    with keys.consumer(keys.b) as consumer:
        consumer.add_stream(f"{keys.a}:7", "0-0")
        ((name, entry),) = list(consumer)
    assert (name, entry.identifier) == (f"{keys.a}:7", "5-1")
    assert entry.fields == ((b"n\xff", b"1"), (b"msg", b"\x00"), (b"n\xff", b"2"))
    assert isinstance(entry.message, Message)
    assert (entry.message.shard, entry.message.payload) == (Shard(keys.a, 7), b"\x00")


def test_an_entry_that_is_no_message_is_returned_nevertheless(keys: Keys) -> None:
    keys.client.xadd(keys.a, {"id": 1}, id=f"1-{2**16}")
    with keys.member(keys.a, buffer_size=3) as consumer:
        keys.add(keys.a, [2])
        (_, first), (_, second) = list(consumer)
    assert isinstance(first.message, DeadLetter)
    assert "has no sequence" in first.message.error
    assert isinstance(second.message, DeadLetter)
    assert "no field" in second.message.error


@pytest.mark.parametrize("kind", [pytest.param("simple", marks=pytest.mark.slow), "group"])
def test_0_never_waits_beside_threads_that_wait(keys: Keys, kind: str) -> None:
    keys.make_groups(keys.a, keys.b)
    found: list[Found | None] = []
    with keys.any(kind, keys.a) as consumer:
        threads = [threading.Thread(target=lambda: found.append(consumer.get_entry(PATIENCE))) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert median_seconds(lambda: consumer.get_entry(0)) < 0.05
        assert median_seconds(lambda: consumer.add_stream(keys.b)) < 0.5
        assert all(thread.is_alive() for thread in threads)
        keys.add(keys.a, range(3))
        for thread in threads:
            thread.join(PATIENCE)
    assert sorted(int(entry.fields[0][1]) for _, entry in filter(None, found)) == [0, 1, 2]


# where a group starts


@pytest.mark.parametrize(("start", "expected"), [(None, [0, 1, 2, 3]), ("$", [3]), ("1-2", [2, 3])])
def test_a_group_that_is_made_starts_where_it_is_told(keys: Keys, start: str | None, expected: list[int]) -> None:
    for index in range(3):
        keys.client.xadd(keys.a, {"id": index}, id=f"1-{index + 1}")
    with keys.member(keys.a, **({"start": start} if start else {})) as consumer:
        keys.add(keys.a, [3])
        assert by_stream(consumer) == {keys.a: expected}


def test_the_backlog_of_one_stream_from_an_id_on(keys: Keys) -> None:
    """coredis returns the first pending entry for ever."""
    for name in (keys.a, keys.b):
        keys.add(name, range(3))
    with keys.member() as consumer:
        found = take(consumer, 6)
    first = next(entry.identifier for name, entry in found if name == keys.a)
    keys.add(keys.a, [3])
    with keys.member(identifiers={keys.a: first}) as consumer:
        assert by_stream(consumer) == {keys.a: [1, 2, 3]}
    with keys.member(identifiers={keys.a: ">"}, start_from_backlog=True) as consumer:
        assert by_stream(consumer) == {keys.b: [0, 1, 2]}


# the backlog


@pytest.mark.parametrize(("buffer_size", "auto_acknowledge"), [(0, False), (2, False), (20, True)])
def test_a_trimmed_entry_is_told_and_acknowledged(keys: Keys, buffer_size: int, auto_acknowledge: bool) -> None:
    """coredis raises a TypeError, at every start."""
    keys.add(keys.a, range(6))
    with keys.member(keys.a) as consumer:
        ids = [entry.identifier for _, entry in take(consumer, 6)]
    keys.client.xdel(keys.a, *ids[:4])
    keys.add(keys.a, [6])
    told: list[DeadLetter] = []
    options = {"start_from_backlog": True, "buffer_size": buffer_size, "auto_acknowledge": auto_acknowledge}
    with keys.member(keys.a, on_dead_letter=told.append, **options) as consumer:
        assert by_stream(consumer) == {keys.a: [4, 5, 6]}
    assert ["trimmed or deleted" in letter.error for letter in told] == [True] * 4
    assert keys.pending(keys.a) == (0 if auto_acknowledge else 3)


def test_an_observer_that_raises_leaves_the_entry_pending(keys: Keys) -> None:
    keys.add(keys.a, range(2))
    with keys.member(keys.a) as consumer:
        ids = [entry.identifier for _, entry in take(consumer, 2)]
    keys.client.xdel(keys.a, ids[0])

    def refuse(letter: DeadLetter) -> None:
        raise ValueError(letter.error)

    with keys.member(keys.a, on_dead_letter=refuse, start_from_backlog=True, buffer_size=5) as consumer:
        with pytest.raises(ValueError, match="trimmed"):
            consumer.get_entry()
        assert by_stream(consumer) == {keys.a: [1]}
    assert keys.pending(keys.a) == 2


def test_auto_acknowledge_leaves_nothing_pending_of_new_entries(keys: Keys) -> None:
    keys.add(keys.a, range(4))
    with keys.member(keys.a, auto_acknowledge=True, buffer_size=9) as consumer:
        assert by_stream(take(consumer, 2)) == {keys.a: [0, 1]}
        assert keys.pending(keys.a) == 0
    # At most once: what was buffered is gone for this group.
    with keys.member(keys.a, auto_acknowledge=True, start_from_backlog=True) as consumer:
        assert list(consumer) == []


def test_auto_acknowledge_drains_the_backlog_entry_by_entry(keys: Keys) -> None:
    """coredis leaves them all pending."""
    keys.add(keys.a, range(6))
    with keys.member(keys.a) as consumer:
        take(consumer, 6)
    with keys.member(keys.a, auto_acknowledge=True, start_from_backlog=True, buffer_size=9) as consumer:
        assert by_stream(take(consumer, 2)) == {keys.a: [0, 1]}
        assert keys.pending(keys.a) == 4
        assert by_stream(consumer) == {keys.a: [2, 3, 4, 5]}
        assert keys.pending(keys.a) == 0


# a group that is removed


@pytest.mark.parametrize("remove", ["group", "stream"])
def test_a_group_that_is_removed_is_told_and_never_made_again(keys: Keys, remove: str) -> None:
    consumer = keys.member(start_from_backlog=True)
    with consumer:
        keys.add(keys.a, range(2))
        ((name, entry),) = take(consumer, 1)
        assert list(consumer)
        keys.client.xgroup_destroy(keys.a, consumer.group) if remove == "group" else keys.client.delete(keys.a)
        for _ in range(2):
            with pytest.raises(GroupRemovedError):
                consumer.get_entry()
        with pytest.raises(GroupRemovedError):
            consumer.acknowledge(name, entry)
    with consumer, pytest.raises(GroupRemovedError):
        consumer.get_entry()
    assert not keys.client.exists(keys.a) or keys.client.xinfo_groups(keys.a) == []


# lost answers


@pytest.mark.parametrize("before", [0, 2])
def test_entries_of_an_answer_that_got_lost_come_with_the_next(keys: Keys, redis_address: str, before: int) -> None:
    # Ids of several lengths.
    for number in range(7, 9):
        keys.client.xadd(keys.a, {"id": number}, id=f"{number}-1")
    with keys.member(keys.a) as earlier:
        # Pending from before: not wanted again.
        take(earlier, 2)
    with LossyProxy(redis_address) as proxy:
        url = f"redis://{proxy.address}/{keys.a}"
        with create_entry_consumer(url, group=GROUP, consumer=ME) as consumer:
            for number in range(9, 14):
                keys.client.xadd(keys.a, {"id": number}, id=f"{number}-1")
            found = take(consumer, before)
            proxy.drop_the_reply_of(b"XREADGROUP")
            with pytest.raises(BrokerUnavailableError):
                consumer.get_entry()
            assert proxy.dropped == 1
            assert by_stream([*found, *consumer]) == {keys.a: list(range(9, 14))}


def test_an_entry_that_could_not_be_acknowledged_is_returned_by_the_next_call(keys: Keys, redis_address: str) -> None:
    keys.add(keys.a, range(3))
    with keys.member(keys.a) as earlier:
        take(earlier, 3)
    with LossyProxy(redis_address) as proxy:
        options = {"start_from_backlog": True, "auto_acknowledge": True, "buffer_size": 5}
        url = f"redis://{proxy.address}/{keys.a}"
        with create_entry_consumer(url, group=GROUP, consumer=ME, **options) as consumer:
            found = take(consumer, 1)
            proxy.drop_the_reply_of(b"XACK")
            with pytest.raises(BrokerUnavailableError):
                consumer.get_entry()
            assert by_stream([*found, *consumer]) == {keys.a: [0, 1, 2]}
            assert keys.pending(keys.a) == 0


# waiting


def test_waiting_for_ever_ends_with_the_context(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[BaseException] = []
    asked: list[float] = []
    fetch = EntryConsumer._fetch
    monkeypatch.setattr(EntryConsumer, "_fetch", lambda self, seconds: asked.append(seconds) or fetch(self, seconds))

    def wait() -> None:
        try:
            consumer.get_entry(math.inf)
        except StreamEndedError as error:
            caught.append(error)

    with keys.consumer() as consumer:
        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: len(asked) > 1, what="the wait")
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert len(caught) == 1
    with pytest.raises(StreamEndedError):
        consumer.get_entry()


@pytest.mark.parametrize("timeout", [None, -1])
def test_no_timeout_does_not_wait(keys: Keys, monkeypatch: pytest.MonkeyPatch, timeout: float | None) -> None:
    monkeypatch.setattr(EntryReader, "poll_seconds", 1000.0)
    with keys.consumer(timeout_seconds=timeout) as consumer:
        assert consumer.get_entry() is None
        keys.add(keys.a, [1])
        assert by_stream(consumer) == {keys.a: [1]}


# what cannot be


@pytest.mark.parametrize(
    "options",
    [
        {"group": "g"},
        {"consumer": "c"},
        {"buffer_size": -1},
        {"identifiers": {"other": "0-0"}},
        {"identifiers": {"one": "soon"}},
        {"identifiers": {"one": ">"}},
        {"identifiers": {"one": "$"}, "group": "g", "consumer": "c"},
        {"start": ">", "group": "g", "consumer": "c"},
    ],
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        create_entry_consumer("redis://127.0.0.1/one", **options)


def test_a_key_of_the_wrong_type(keys: Keys) -> None:
    keys.client.set(keys.a, "text")
    for kind in ("simple", "group"):
        with pytest.raises(FormatError), keys.any(kind) as consumer:
            consumer.get_entry()


def test_only_own_streams_can_be_acknowledged(keys: Keys) -> None:
    with keys.member(keys.a) as consumer, pytest.raises(NotSubscribedError):
        consumer.acknowledge(keys.b, "1-0")


# asyncio


def run(work: Callable[[AsyncEntryConsumer], Coroutine[Any, Any, None]], consumer: EntryReader) -> None:
    async def within() -> None:
        async with AsyncEntryConsumer(consumer) as opened:
            await work(opened)

    asyncio.run(within())


async def drain(consumer: AsyncEntryConsumer) -> list[Found]:
    return [found async for found in consumer]


def test_async_for_gives_streams_and_entries_until_there_are_none(keys: Keys) -> None:
    async def work(consumer: AsyncEntryConsumer) -> None:
        assert await drain(consumer) == []
        keys.add(keys.a, range(3))
        keys.add(keys.b, range(3))
        found = [(stream, entry) async for stream, entry in consumer]
        assert by_stream(found) == {keys.a: [0, 1, 2], keys.b: [0, 1, 2]}
        assert [name for name, _ in found] == [keys.a, keys.b] * 3, "streams take turns"
        stream, entry = found[0]
        ((identifier, fields),) = keys.client.xrange(stream, count=1)
        assert (entry.identifier.encode(), entry.field_values) == (identifier, fields)
        assert await consumer.get_entry() is None
        # Again goes on.
        keys.add(keys.a, [3])
        assert by_stream(await drain(consumer)) == {keys.a: [3]}
        third = unique_name("c")
        keys.add(third, range(2))
        assert await consumer.add_stream(third, "0-0")
        assert by_stream(await drain(consumer)) == {third: [0, 1]}

    run(work, keys.consumer())


def test_waiting_holds_nothing_else_up_and_a_cancelled_task_loses_no_entry(keys: Keys) -> None:
    async def work(consumer: AsyncEntryConsumer) -> None:
        waiting = asyncio.create_task(consumer.get_entry(math.inf))
        began = time.monotonic()
        await asyncio.sleep(0.05)
        assert time.monotonic() - began < 2
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        keys.add(keys.a, range(2))
        found = [await consumer.get_entry(PATIENCE), await consumer.get_entry(PATIENCE)]
        assert by_stream(pair for pair in found if pair is not None) == {keys.a: [0, 1]}

    run(work, keys.consumer())


def test_entering_again_starts_again_and_outside_of_it_nothing_is_read(keys: Keys) -> None:
    keys.add(keys.a, range(3))

    async def work() -> None:
        consumer = AsyncEntryConsumer(keys.consumer(keys.a, identifiers={keys.a: "0-0"}))
        for _ in range(2):
            async with consumer:
                assert by_stream(await drain(consumer)) == {keys.a: [0, 1, 2]}
            with pytest.raises(StreamEndedError):
                await consumer.get_entry()

    asyncio.run(work())


def test_a_member_acknowledges_its_own_streams(keys: Keys) -> None:
    async def work(consumer: AsyncEntryConsumer) -> None:
        keys.add(keys.a, range(2))
        (name, first), (_, second) = await drain(consumer)
        assert [await consumer.acknowledge(name, found) for found in (first, second.identifier)] == [1, 1]
        with pytest.raises(NotSubscribedError):
            await consumer.acknowledge("another", "1-0")

    run(work, keys.member())


def test_without_a_group_nothing_is_acknowledged(keys: Keys) -> None:
    async def work(consumer: AsyncEntryConsumer) -> None:
        with pytest.raises(InvalidOptionError, match="this consumer has no group"):
            await consumer.acknowledge(keys.a, "1-0")

    run(work, keys.consumer())


def test_a_consumer_that_blocks_refuses_async_with(keys: Keys) -> None:
    async def work() -> None:
        async with keys.consumer():
            pytest.fail("it blocks")

    with pytest.raises(InvalidOptionError):
        asyncio.run(work())
