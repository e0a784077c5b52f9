"""Consumers under asyncio: many that wait, some that are cancelled, and no message lost."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from stream_consumers.async_consumer import AsyncConsumer
from stream_consumers.consumer import Edge
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import InvalidOptionError, OutOfBoundsError, StreamEndedError, StreamRemovedError
from stream_consumers.messages import Message, Shard, from_milliseconds

PATIENCE = 60.0
_numbers = itertools.count()


@pytest.fixture
def url() -> str:
    return f"memory://async-{next(_numbers)}/orders"


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), PATIENCE)

    asyncio.run(bounded())


def send(url: str, *numbers: int, shard: int = 0) -> None:
    with create_producer(url) as producer:
        for number in numbers:
            producer.send(b"%d" % number, shard=shard, timestamp_ms=1_000 + number)


def number(message: Message | None) -> int | None:
    return int(message.payload or b"") if message else None


async def until_waiting() -> None:
    """Let each task that was started ask for its message."""
    for _ in range(10):
        await asyncio.sleep(0)


async def cancel_with_its_message(consumer: AsyncConsumer, send_it: Callable[[], None]) -> None:
    """Cancel a task in the moment between its message and its waking up."""
    patched: Any = consumer
    read_item, loop = patched._read_item, asyncio.get_running_loop()

    def read_and_cancel(seconds: float) -> Message | None:
        found: Message | None = read_item(seconds)
        if found is not None:
            loop.call_soon_threadsafe(waiting.cancel)
        return found

    patched._read_item = read_and_cancel
    waiting = asyncio.create_task(consumer.next())
    await until_waiting()
    send_it()
    await asyncio.wait([waiting])
    patched._read_item = read_item
    assert waiting.cancelled()


@pytest.mark.parametrize("timeout", [0, 0.15])
def test_next_without_a_message_gives_up_in_time(url: str, timeout: float) -> None:
    async def test() -> None:
        async with AsyncConsumer(create_consumer(url)) as consumer:
            begin = time.monotonic()
            assert await consumer.next(timeout) is None
            assert timeout <= time.monotonic() - begin < timeout + 2

    run(test)


def test_many_that_wait_get_theirs_in_the_order_they_asked(url: str) -> None:
    async def test() -> None:
        async with AsyncConsumer(create_consumer(url)) as consumer:
            waiting = [asyncio.create_task(consumer.next()) for _ in range(20)]
            await until_waiting()
            send(url, *range(20))
            assert [number(message) for message in await asyncio.gather(*waiting)] == list(range(20))

    run(test)


# cancellation


def test_cancelled_while_waiting_takes_no_message(url: str) -> None:
    async def test() -> None:
        async with AsyncConsumer(create_consumer(url)) as consumer:
            waiting = [asyncio.create_task(consumer.next()) for _ in range(3)]
            await until_waiting()
            waiting[0].cancel()
            waiting[2].cancel()
            await asyncio.wait([waiting[0], waiting[2]])
            send(url, 1, 2)
            assert number(await waiting[1]) == 1
            assert number(await consumer.next()) == 2

    run(test)


def test_cancelled_after_the_message_was_given_passes_it_on_first(url: str) -> None:
    async def test() -> None:
        async with AsyncConsumer(create_consumer(url)) as consumer:
            await cancel_with_its_message(consumer, lambda: send(url, 1, 2))
            assert [number(await consumer.next(PATIENCE)) for _ in range(2)] == [1, 2]

    run(test)


def test_a_read_that_everybody_has_left_keeps_its_message(url: str) -> None:
    class Slow:
        """Answers when it is told to, whatever the time."""

        def __init__(self) -> None:
            self.consumer = create_consumer(url)
            self.asked, self.told = threading.Event(), threading.Event()

        def next(self, timeout_seconds: float | None = None) -> Message | None:
            self.asked.set()
            assert self.told.wait(PATIENCE)
            return self.consumer.next(timeout_seconds)

        def close(self) -> None:
            self.consumer.close()

    send(url, 1, 2)

    async def test() -> None:
        slow: Any = Slow()
        async with AsyncConsumer(slow) as consumer:
            waiting = asyncio.create_task(consumer.next())
            await asyncio.to_thread(slow.asked.wait, PATIENCE)
            waiting.cancel()
            await asyncio.wait([waiting])
            slow.told.set()
            assert [number(await consumer.next(PATIENCE)) for _ in range(2)] == [1, 2]

    run(test)


def test_cancelling_all_the_time_loses_nothing(url: str) -> None:
    count = 300
    found: list[int | None] = []

    async def read(consumer: AsyncConsumer, place: int) -> None:
        while len(found) < count:
            task = asyncio.create_task(consumer.next())
            for _ in range(place):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                found.append(number(task.result()))

    async def test() -> None:
        async with AsyncConsumer(create_consumer(url)) as consumer:
            send(url, *range(count))
            await asyncio.gather(*(read(consumer, place) for place in (3, 5, 8, 50)))
            assert sorted(n for n in found if n is not None) == list(range(count))
            assert await consumer.next(0) is None

    run(test)


# moves


class Held:
    """A consumer whose reads and moves wait until they are let go."""

    def __init__(self, url: str) -> None:
        self.consumer: Any = create_consumer(url)
        self.busy, self.free = threading.Event(), threading.Event()
        self.moved, self.may_return = threading.Event(), threading.Event()
        self.free.set()

    def next(self, timeout_seconds: float | None = None) -> Message | None:
        if timeout_seconds:
            self.busy.set()
            assert self.free.wait(PATIENCE)
        found: Message | None = self.consumer.next(timeout_seconds)
        return found

    def rewind(self, to: Edge | int) -> None:
        self.consumer.rewind(to)
        self.moved.set()
        assert self.may_return.wait(PATIENCE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.consumer, name)


MOVES: dict[str, Callable[[AsyncConsumer], Awaitable[object]]] = {
    "rewind": lambda consumer: consumer.rewind(2),
    "rewind to the beginning": lambda consumer: consumer.rewind(Edge.BEGINNING),
    "seek": lambda consumer: consumer.seek(from_milliseconds(1_002)),
    "go_to": lambda consumer: consumer.go_to({Shard("orders"): 2}),
    "one of its own": lambda consumer: consumer.move(lambda: consumer.consumer.rewind(2)),
}


async def leave_by_cancelling(consumer: AsyncConsumer) -> None:
    waiting = asyncio.create_task(consumer.next())
    await until_waiting()
    waiting.cancel()
    await asyncio.wait([waiting])


async def leave_by_a_timeout_around(consumer: AsyncConsumer) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(consumer.next(), 0.001)


async def leave_by_its_own_timeout(consumer: AsyncConsumer) -> None:
    assert await consumer.next(0.001) is None


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
@pytest.mark.parametrize("leave", [leave_by_cancelling, leave_by_a_timeout_around, leave_by_its_own_timeout])
def test_nothing_from_before_a_move_comes_behind_it(
    url: str, move: Callable[[AsyncConsumer], Awaitable[object]], leave: Callable[[AsyncConsumer], Awaitable[None]]
) -> None:
    async def test() -> None:
        for turn in range(3):
            place = url.replace("/orders", f"-{turn}/orders")
            send(place, *range(5))
            async with AsyncConsumer(create_consumer(place)) as consumer:
                for _ in range(5):
                    await consumer.next()
                await leave(consumer)
                # The read that was begun for it goes on, and gets this one.
                send(place, 5)
                await move(consumer)
                found = [number(await consumer.next(PATIENCE)) for _ in range(4)]
                first = found[0] or 0
                assert first in {0, 2}
                assert found == list(range(first, first + 4))

    run(test)


def test_a_move_to_nowhere_keeps_what_a_cancelled_task_left(url: str) -> None:
    async def test() -> None:
        async with AsyncConsumer(create_consumer(url)) as consumer:
            await leave_by_cancelling(consumer)
            send(url, 0, 1)
            with pytest.raises(OutOfBoundsError):
                await consumer.rewind(7)
            assert [number(await consumer.next(PATIENCE)) for _ in range(2)] == [0, 1]

    run(test)


def test_a_move_whose_task_was_cancelled_forgets_what_was_read_before_it(url: str) -> None:
    async def test() -> None:
        held: Any = Held(url)
        async with AsyncConsumer(held) as consumer:
            await leave_by_cancelling(consumer)
            send(url, 0, 1)
            moving = asyncio.create_task(consumer.rewind(1))
            await asyncio.to_thread(held.moved.wait, PATIENCE)
            moving.cancel()
            await asyncio.wait([moving])
            held.may_return.set()
            # It is called after the move.
            await consumer.assign(Shard("orders"))
            assert number(await consumer.next(PATIENCE)) == 1
            assert await consumer.next(0.01) is None

    run(test)


def test_a_move_of_one_shard_forgets_what_was_left_of_this_one_only(url: str) -> None:
    one, other = Shard("orders", 0), Shard("orders", 1)

    async def test() -> None:
        for left, expected in ((other, [9, 0]), (one, [0])):
            place = url.replace("/orders", f"-{left.id}/orders")
            send(place, 0)
            async with AsyncConsumer(create_consumer(place)) as consumer:
                assert number(await consumer.next(PATIENCE)) == 0
                await cancel_with_its_message(consumer, partial(send, place, 9, shard=left.id))
                await consumer.go_to({one: 0})
                assert [number(await consumer.next(PATIENCE)) for _ in expected] == expected

    run(test)


def test_single_shards_cannot_be_moved_everywhere(url: str) -> None:
    async def test() -> None:
        async with AsyncConsumer(create_consumer(url, mode="load_balanced", group="g")) as consumer:
            with pytest.raises(InvalidOptionError, match="cannot move single shards"):
                await consumer.go_to({Shard("orders"): 0})

    run(test)


def test_who_does_not_wait_is_not_held_up_by_a_read_that_waits(url: str) -> None:
    async def test() -> None:
        held: Any = Held(url)
        async with AsyncConsumer(held) as consumer:
            held.free.clear()
            patient = asyncio.create_task(consumer.next())
            await asyncio.to_thread(held.busy.wait, PATIENCE)
            send(url, 1, 2)
            assert await consumer.next(0) is None
            held.free.set()
            assert number(await patient) == 1
            assert number(await consumer.next(0)) == 2

    run(test)


# the rest of a consumer


def test_moves(url: str) -> None:
    send(url, *range(10))

    async def test() -> None:
        async with AsyncConsumer(create_consumer(url, live=False)) as consumer:
            assert number(await consumer.next()) == 0
            await consumer.rewind(7)
            assert [number(message) async for message in consumer] == [7, 8, 9]
            await consumer.seek(from_milliseconds(1_008))
            assert [number(message) async for message in consumer] == [8, 9]
            with pytest.raises(OutOfBoundsError):
                await consumer.rewind(10)
            await consumer.assign(Shard("orders", 1))
            await consumer.rewind(Edge.BEGINNING)
            assert [message async for message in consumer] == []
            await consumer.assign(Shard("orders", 0))
            await consumer.unassign(Shard("orders", 1))
            await consumer.rewind(Edge.BEGINNING)
            assert number(await consumer.next()) == 0

    run(test)


def test_close_ends_those_that_wait(url: str) -> None:
    async def test() -> None:
        consumer = AsyncConsumer(create_consumer(url))
        waiting = [asyncio.create_task(consumer.next()) for _ in range(3)]
        await until_waiting()
        await consumer.close()
        await consumer.close()
        for task in waiting:
            with pytest.raises(StreamEndedError):
                await task
        for call in (consumer.next(), consumer.rewind(Edge.BEGINNING)):
            with pytest.raises(StreamEndedError):
                await call
        assert consumer._thread._shutdown

    before = threading.active_count()
    run(test)
    assert threading.active_count() == before


def test_close_ends_when_the_last_read_has(url: str) -> None:
    class Lingering:
        """Its read takes a while to notice that it is closed."""

        def __init__(self) -> None:
            self.closed = threading.Event()
            self.reads = 0

        def next(self, timeout_seconds: float | None = None) -> Message | None:
            self.reads += 1
            assert self.closed.wait(PATIENCE)
            time.sleep(0.2)
            self.reads -= 1
            return None

        def close(self) -> None:
            self.closed.set()

    lingering: Any = Lingering()

    async def test() -> None:
        consumer = AsyncConsumer(lingering)
        waiting = asyncio.create_task(consumer.next())
        await until_waiting()
        await consumer.close()
        assert lingering.reads == 0
        with pytest.raises(StreamEndedError):
            await waiting

    run(test)


def test_an_error_that_somebody_got_is_not_logged_as_well(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with AsyncConsumer(create_consumer(url, live=False)) as consumer:
            with pytest.raises(StreamEndedError):
                await consumer.next()

    run(test)
    gc.collect()
    assert caplog.records == []


def test_errors_reach_the_one_who_asked_first_and_reading_goes_on(url: str) -> None:
    class Failing:
        """Fails once."""

        def __init__(self) -> None:
            self.consumer = create_consumer(url)
            self.errors = [StreamRemovedError("it is gone", remedy="Look.")]

        def next(self, timeout_seconds: float | None = None) -> Message | None:
            if self.errors:
                raise self.errors.pop()
            return self.consumer.next(timeout_seconds)

        def close(self) -> None:
            self.consumer.close()

    send(url, 1)

    async def test() -> None:
        failing: Any = Failing()
        async with AsyncConsumer(failing) as consumer:
            first, second = asyncio.create_task(consumer.next()), asyncio.create_task(consumer.next())
            with pytest.raises(StreamRemovedError):
                await first
            assert number(await second) == 1

    run(test)
