"""Any consumer for asyncio: a thread of its own reads, and only while a task waits for a message."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime

from stream_consumers.consumer import Consumer, Edge, rewind_place
from stream_consumers.errors import StreamEndedError
from stream_consumers.messages import Message, Shard

READ_SECONDS = 0.1


@dataclass(eq=False, slots=True)
class _Waiter:
    """A task that waits for a message.

    Args:
        answer: the future of the message; ``None`` if there was none in time.
        deadline: when it gives up, in seconds of the event loop's clock.
    """

    answer: asyncio.Future[Message | None]
    deadline: float


class AsyncConsumer:
    """A consumer whose :meth:`next` is awaited; an asynchronous iterator and context manager.

    Several tasks may wait at once: they get their messages in the order in which they asked. Cancelling a task loses no
    message: the next call returns the one that was meant for it. Nothing is read ahead. Use it in one event loop at a
    time.

    Args:
        consumer: the consumer to read; it is closed with this one. Its other methods, like ``ack`` and ``commit`` of a
            member of a Redis group, may be called directly.

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
        self._returned: deque[Message] = deque()
        self._pump: asyncio.Task[None] | None = None
        # A read continues when the task that started it is cancelled; the next call gets its message.
        self._read: Future[Message | None] | None = None
        self._is_closed = False

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
        if self._returned:
            return self._returned.popleft()
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
        return waiter.answer.result()

    async def seek(self, moment: datetime) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.seek`."""
        await self._move(lambda: self._consumer.seek(moment))

    async def rewind(self, to: Edge | int) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.rewind`."""
        place = rewind_place(to)
        await self._move(lambda: self._consumer.rewind(place))

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
        """Read while a task waits."""
        loop = asyncio.get_running_loop()
        while self._waiters:
            asked = list(self._waiters)
            if self._read is None:
                left = min(waiter.deadline for waiter in asked) - loop.time()
                self._read = self._thread.submit(self._consumer.next, min(READ_SECONDS, max(0.0, left)))
                is_own = True
            else:
                is_own = False
            read = self._read
            answer = asyncio.wrap_future(read)
            await asyncio.wait([answer])
            self._read = None
            # The exception is fetched from the loop's own future, which would otherwise log that nobody did.
            error = answer.exception()
            if error is not None:
                if self._waiters:
                    self._waiters.popleft().answer.set_exception(error)
                continue
            message = read.result()
            if message is not None:
                self._give(message)
            elif is_own:
                self._expire(asked)

    def _give(self, message: Message) -> None:
        if self._waiters:
            self._waiters.popleft().answer.set_result(message)
        else:
            self._returned.append(message)

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
        message = answer.result()
        if message is None:
            return
        if self._waiters:
            # No waiting task has been answered, and this message is older than any that will be read.
            self._give(message)
        else:
            self._returned.appendleft(message)

    async def _move(self, move: Callable[[], None]) -> None:
        await self._in_thread(move)
        self._returned.clear()

    async def _in_thread(self, call: Callable[[], None]) -> None:
        if self._is_closed:
            raise _closed()
        await asyncio.wrap_future(self._thread.submit(call))


def _closed() -> StreamEndedError:
    return StreamEndedError("the consumer was closed", remedy="Create a new one.")
