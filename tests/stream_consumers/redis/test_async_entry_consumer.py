"""coredis' consumers in coredis' manner: awaited, iterated with ``async for``, over streams with any keys."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from stream_consumers.errors import InvalidOptionError, NotSubscribedError, StreamEndedError
from stream_consumers.redis.entry_consumer import AsyncEntryConsumer, EntryReader
from tests.support.redis_entries import PATIENCE, Found, Keys, by_stream
from tests.support.redis_streams import unique_name


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
        with pytest.raises(InvalidOptionError, match="this consumer has none"):
            await consumer.acknowledge(keys.a, "1-0")

    run(work, keys.consumer())


def test_a_consumer_that_blocks_refuses_async_with(keys: Keys) -> None:
    async def work() -> None:
        async with keys.consumer():
            pytest.fail("it blocks")

    with pytest.raises(InvalidOptionError):
        asyncio.run(work())
