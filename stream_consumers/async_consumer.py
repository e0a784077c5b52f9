"""Any consumer for asyncio: a thread of its own reads, and only while a task waits for a message."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from stream_consumers.capabilities import Positions, positioned
from stream_consumers.consumer import Consumer, Edge, rewind_place
from stream_consumers.errors import StreamEndedError
from stream_consumers.messages import Message, Shard

READ_SECONDS = 0.1
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Read:
    """A message, and how many moves there had been when it was read."""

    message: Message
    moves: int


@dataclass(eq=False, slots=True)
class _Waiter:
    """A task that waits for a message.

    Args:
        answer: the future of the message; ``None`` if there was none in time.
        deadline: when it gives up, in seconds of the event loop's clock.
    """

    answer: asyncio.Future[_Read | None]
    deadline: float


class AsyncConsumer:
    """A consumer whose :meth:`next` is awaited; an asynchronous iterator and context manager.

    Several tasks may wait at once: they get their messages in the order in which they asked. Cancelling a task loses no
    message: the next call returns the one that was meant for it, unless its shard was moved since. Nothing is read
    ahead. Use it in one event loop at a time.

    Args:
        consumer: the consumer to read; it is closed with this one. Its other methods, like ``ack`` and ``commit`` of a
            member of a Redis group, may be called directly; those that move it only by :meth:`move`.

    Example:
        >>> from stream_consumers.create import create_consumer
        >>> async def read() -> list[str]:
        ...     async with AsyncConsumer(create_consumer("file://orders.ss/orders", live=False)) as orders:
        ...         return [message.text() async for message in orders]
        >>> asyncio.run(read())
        ['{"id": 0}', '{"id": 1}', '{"id": 2}']
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="consumer")
        self._waiters: deque[_Waiter] = deque()
        self._returned: deque[_Read] = deque()
        self._pump: asyncio.Task[None] | None = None
        # A read continues when the task that started it is cancelled; the next call gets its message.
        self._read: Future[_Read | None] | None = None
        self._is_waiting = self._is_closed = False
        # What was read before a move is not delivered behind it. Only the reading thread counts, which moves, too.
        self._moves = self._all_moved = 0
        self._moved: dict[Shard, int] = {}

    @property
    def consumer(self) -> Consumer:
        """The consumer that is read, as it was given."""
        return self._consumer

    async def next(self, timeout_seconds: float | None = None) -> Message | None:
        """The next message.

        Args:
            timeout_seconds: how long to wait for one; ``None`` until there is one or the stream ends, 0 not at all.

        Returns:
            ``None`` if there was none in time.

        Raises:
            StreamEndedError: the stream has ended, or the consumer was closed.
            StreamAssetsError: the consumer raised it; the task that asked first gets it.
        """
        if self._is_closed:
            raise _closed()
        # A message is only returned while no task waits.
        while self._returned:
            returned = self._returned.popleft()
            if self._is_current(returned):
                return returned.message
        if timeout_seconds == 0 and self._is_waiting and self._read is not None and not self._read.done():
            # Whoever waits has looked, there was nothing, and what comes now is theirs.
            return None
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop.create_future(), math.inf if timeout_seconds is None else loop.time() + timeout_seconds)
        self._waiters.append(waiter)
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._serve())
        try:
            await asyncio.wait([waiter.answer])
        except asyncio.CancelledError:
            self._forget(waiter)
            raise
        read = waiter.answer.result()
        return None if read is None else read.message

    async def seek(self, moment: datetime) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.seek`."""
        await self.move(lambda: self._consumer.seek(moment))

    async def rewind(self, to: Edge | int) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.rewind`."""
        place = rewind_place(to)
        await self.move(lambda: self._consumer.rewind(place))

    async def go_to(self, positions: Positions) -> None:
        """See :meth:`stream_consumers.capabilities.PositionedConsumer.go_to`.

        Raises:
            InvalidOptionError: the backend cannot move single shards.
        """
        consumer = positioned(self._consumer)
        await self._move(lambda: consumer.go_to(positions), positions)

    async def move(self, call: Callable[[], Result]) -> Result:
        """Move the consumer in a way of its own, like ``seek_to_committed`` of a tracked one.

        No message that was read before is delivered afterwards: neither one whose task was cancelled, nor one of a read
        that goes on since its task gave up. A call that raises has moved nothing. Where the task that moves is
        cancelled, the call may happen nevertheless.

        Args:
            call: moves the consumer; it is called in the thread that reads.

        Returns:
            What ``call`` returned.
        """
        return await self._move(call)

    async def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`."""
        await self._in_thread(lambda: self._consumer.assign(shard))

    async def unassign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`."""
        await self._in_thread(lambda: self._consumer.unassign(shard))

    async def close(self) -> None:
        """Close the consumer and end the thread; tasks that wait get a :class:`StreamEndedError`."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            # Not in the reading thread, which may be busy.
            await asyncio.to_thread(self._consumer.close)
        finally:
            while self._waiters:
                self._waiters.popleft().answer.set_exception(_closed())
            # The last read ends, since the consumer is closed.
            await asyncio.to_thread(self._thread.shutdown)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._messages()

    async def __aenter__(self) -> AsyncConsumer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _messages(self) -> AsyncIterator[Message]:
        while True:
            try:
                message = await self.next()
            except StreamEndedError:
                return
            if message is not None:
                yield message

    # The methods below run in the event loop only, so that they need no lock.

    async def _serve(self) -> None:
        """Read while a task waits: look first, and wait only if there is nothing."""
        loop = asyncio.get_running_loop()
        seconds = 0.0
        while self._waiters:
            asked = list(self._waiters)
            is_own = self._read is None
            if self._read is None:
                self._is_waiting = seconds > 0
                self._read = self._thread.submit(self._read_one, seconds)
            answer = asyncio.wrap_future(self._read)
            await asyncio.wait([answer])
            self._read = None
            # The exception is fetched from the loop's own future, which would otherwise log that nobody did.
            error = answer.exception()
            if error is not None:
                if self._waiters:
                    self._waiters.popleft().answer.set_exception(error)
                continue
            read = answer.result()
            seconds = 0.0
            if read is not None:
                self._give(read)
            elif is_own:
                self._expire(asked)
                left = min((waiter.deadline for waiter in self._waiters), default=math.inf) - loop.time()
                seconds = min(READ_SECONDS, max(0.0, left))

    def _give(self, read: _Read) -> None:
        if not self._is_current(read):
            return
        if self._waiters:
            self._waiters.popleft().answer.set_result(read)
        else:
            self._returned.append(read)

    def _expire(self, asked: list[_Waiter]) -> None:
        """Answer ``None`` to the tasks that asked before the last read and have no time left."""
        now = asyncio.get_running_loop().time()
        for waiter in asked:
            if waiter.deadline <= now and waiter in self._waiters:
                self._waiters.remove(waiter)
                waiter.answer.set_result(None)

    def _forget(self, waiter: _Waiter) -> None:
        """A task was cancelled; a message that it was given already is for the next one."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        answer = waiter.answer
        if not answer.done() or answer.cancelled() or answer.exception() is not None:
            return
        read = answer.result()
        if read is None:
            return
        if self._waiters:
            # No waiting task has been answered, and this message is older than any that will be read.
            self._give(read)
        else:
            self._returned.appendleft(read)

    def _is_current(self, read: _Read) -> bool:
        """Whether its shard is where it was when it was read."""
        return read.moves >= max(self._all_moved, self._moved.get(read.message.shard, 0))

    async def _move(self, call: Callable[[], Result], shards: Iterable[Shard] | None = None) -> Result:
        def move_and_count() -> Result:
            result = call()
            # Here, since a task that is cancelled does not learn whether the move happened.
            self._moves += 1
            if shards is None:
                self._all_moved = self._moves
            else:
                self._moved.update(dict.fromkeys(shards, self._moves))
            return result

        return await self._in_thread(move_and_count)

    def _read_one(self, seconds: float) -> _Read | None:
        message = self._consumer.next(seconds)
        return None if message is None else _Read(message, self._moves)

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        if self._is_closed:
            raise _closed()
        return await asyncio.wrap_future(self._thread.submit(call))


def _closed() -> StreamEndedError:
    return StreamEndedError("the consumer was closed", remedy="Create a new one.")
