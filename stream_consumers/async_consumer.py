"""Adapters that read any consumer from asyncio. A dedicated thread reads, only while a task waits for a message."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from stream_consumers.closing import ClosesOnExit
from stream_consumers.consumer import (
    SHORT_WAIT_SECONDS,
    Consumer,
    DrainableConsumer,
    Edge,
    Positions,
    require_positioned,
    rewind_target,
)
from stream_consumers.errors import InvalidOptionError, StreamEndedError
from stream_consumers.messages import Message, Shard
from stream_consumers.options import check_timeout

READ_SECONDS = 0.1
Reader = TypeVar("Reader", bound=ClosesOnExit)
Item = TypeVar("Item")
Result = TypeVar("Result")
Self = TypeVar("Self", bound="AsyncReader[ClosesOnExit, object]")


@dataclass(slots=True)
class _ReadResult(Generic[Item]):
    """The result of one read, and whether its shard was moved afterwards."""

    item: Item | None
    is_outdated: bool = False


class AsyncReader(ABC, Generic[Reader, Item]):
    """Lets any number of tasks await the items of a consumer; an asynchronous context manager.

    Tasks get their items in the order in which they asked. Canceling a task loses no item: the next call returns the
    item that the task would have got, unless its shard was moved since. Nothing is read ahead. Use it in one event
    loop.

    Args:
        consumer: the consumer to read; it is closed with this object.
    """

    def __init__(self, consumer: Reader) -> None:
        self._consumer = consumer
        self._start_reading()

    @property
    def consumer(self) -> Reader:
        """The consumer that is read."""
        return self._consumer

    def _start_reading(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="consumer")
        # The task that reads holds this lock. Tasks acquire it in the order in which they asked.
        self._reading = asyncio.Lock()
        # A read continues after the task that started it is canceled; the next task gets its item.
        self._read: Future[_ReadResult[Item]] | None = None
        self._is_waiting = self._is_closed = False
        # Only the reading thread uses it; that thread also moves the consumer.
        self._last: _ReadResult[Item] = _ReadResult(None)

    @abstractmethod
    def _read_item(self, seconds: float) -> Item | None:
        """Read one item, waiting at most this many seconds; the reading thread calls this method."""

    async def close(self) -> None:
        """Close the consumer and end the thread; waiting tasks get a :class:`StreamEndedError`."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            # The reading thread may be busy, so another thread closes the consumer.
            await asyncio.to_thread(self._consumer.close)
        finally:
            # Closing the consumer ends the last read.
            await asyncio.to_thread(self._thread.shutdown)

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _next(self, timeout_seconds: float | None) -> Item | None:
        """Return the next item, or ``None`` if none arrived in time.

        Args:
            timeout_seconds: how long to wait; ``None`` waits without a limit, 0 does not wait.
        """
        if self._is_closed:
            raise _closed()
        loop = asyncio.get_running_loop()
        timeout_seconds = None if timeout_seconds == math.inf else timeout_seconds
        deadline = math.inf if timeout_seconds is None else loop.time() + timeout_seconds
        if timeout_seconds == 0 and not self._is_waiting:
            # The task that reads now does not wait either, so it releases the lock shortly.
            timeout_seconds = SHORT_WAIT_SECONDS
        if not await self._acquire_read(timeout_seconds):
            return None
        try:
            return await self._read_until(deadline)
        finally:
            self._is_waiting = False
            self._reading.release()

    async def _acquire_read(self, seconds: float | None) -> bool:
        """Wait at most this long until no other task reads; return whether this task may read now."""
        # asyncio.wait_for may ignore the cancellation of its task up to Python 3.11.
        taking = asyncio.ensure_future(self._reading.acquire())
        try:
            await asyncio.wait([taking], timeout=seconds)
        except asyncio.CancelledError:
            if taking.done():
                self._reading.release()
            raise
        finally:
            taking.cancel()
        return taking.done()

    async def _read_until(self, deadline: float) -> Item | None:
        """Poll without waiting first, then wait if nothing was found."""
        loop = asyncio.get_running_loop()
        seconds = 0.0
        while True:
            if self._is_closed:
                raise _closed()
            is_own = self._read is None
            if self._read is None:
                self._is_waiting = seconds > 0
                self._read = self._thread.submit(self._read_one, seconds)
            answer = asyncio.wrap_future(self._read)
            # Retrieve the exception: if this task is canceled, the next one gets the error, and asyncio logs nothing.
            answer.add_done_callback(lambda done: done.exception())
            await asyncio.wait([answer])
            self._read = None
            read = answer.result()
            if read.item is not None:
                if not read.is_outdated:
                    return read.item
                seconds = 0.0
            elif is_own:
                left = deadline - loop.time()
                if left <= 0:
                    return None
                seconds = min(READ_SECONDS, left)

    async def _move(self, call: Callable[[], Result], is_moved: Callable[[Item], bool]) -> Result:
        """Move the consumer by ``call`` in the reading thread; drop the last item if ``is_moved`` selects it."""

        def move() -> Result:
            result = call()
            # Mark the item here, because a canceled task does not learn whether the move happened.
            item = self._last.item
            self._last.is_outdated |= item is not None and is_moved(item)
            return result

        return await self._in_thread(move)

    def _read_one(self, seconds: float) -> _ReadResult[Item]:
        self._last = _ReadResult(self._read_item(seconds))
        return self._last

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        if self._is_closed:
            raise _closed()
        return await asyncio.wrap_future(self._thread.submit(call))


def _closed() -> StreamEndedError:
    return StreamEndedError("the consumer was closed", remedy="Create a new one.")


class AsyncConsumer(AsyncReader[Consumer, Message]):
    """A consumer whose :meth:`next` is awaited; an asynchronous iterator and context manager.

    Several tasks may wait at once; they get their messages in the order in which they asked. Canceling a task loses no
    message: the next call returns the message that the task would have got, unless its shard was moved since. Nothing
    is read ahead. Use it in one event loop.

    Args:
        consumer: the consumer to read; it is closed with this object. Call its other methods directly, but call methods
            that move it only by :meth:`move`.

    Example:
        >>> from stream_consumers.create import create_consumer
        >>> async def read() -> list[str]:
        ...     async with AsyncConsumer(create_consumer("file://orders.ss/orders", live=False)) as orders:
        ...         return [message.text() async for message in orders]
        >>> asyncio.run(read())
        ['{"id": 0}', '{"id": 1}', '{"id": 2}']
    """

    async def next(self, timeout_seconds: float | None = None) -> Message | None:
        """Return the next message.

        Args:
            timeout_seconds: how long to wait; ``None`` waits until a message arrives or the stream ends, 0 does not
                wait.

        Returns:
            The message, or ``None`` if none arrived in time.

        Raises:
            StreamEndedError: the stream has ended, or the consumer was closed.
            StreamAssetsError: the consumer raised an error; the task that asked first gets it.
        """
        return await self._next(None if timeout_seconds is None else check_timeout(timeout_seconds))

    async def seek(self, moment: datetime) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.seek`."""
        await self.move(lambda: self._consumer.seek(moment))

    async def rewind(self, to: Edge | int) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.rewind`."""
        target = rewind_target(to)
        await self.move(lambda: self._consumer.rewind(target))

    async def go_to(self, positions: Positions) -> None:
        """See :meth:`stream_consumers.consumer.PositionedConsumer.go_to`.

        Raises:
            InvalidOptionError: the backend cannot move single shards.
        """
        consumer = require_positioned(self._consumer)
        await self._move(lambda: consumer.go_to(positions), lambda message: message.shard in positions)

    async def move(self, call: Callable[[], Result]) -> Result:
        """Move the consumer by any of its methods, for example ``seek_to_committed`` of a tracked consumer.

        No message that was read before the move is delivered afterwards. This includes messages of canceled tasks and
        of reads that continue after their task timed out. A call that raises must not have moved anything. If the
        task that moves is canceled, the call may still run.

        Args:
            call: moves the consumer; the reading thread calls it.

        Returns:
            What ``call`` returned.
        """
        return await self._move(call, lambda message: True)

    async def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`."""
        await self._in_thread(lambda: self._consumer.assign(shard))

    async def unassign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`."""
        await self._in_thread(lambda: self._consumer.unassign(shard))

    def ack(self, message: Message) -> object:
        """Mark a message as done, without waiting; return the result of the consumer's own ``ack``.

        Raises:
            InvalidOptionError: the consumer has no group.
        """
        return self._consumer.ack(message)

    async def commit(self) -> object:
        """Commit the acknowledged messages; return the result of the consumer's own ``commit``.

        Raises:
            InvalidOptionError: the consumer has no group.
            StreamAssetsError: the consumer raised an error.
        """
        # The reading thread may be busy, so another thread commits.
        return await asyncio.to_thread(self._consumer.commit)

    async def wait_empty(self, timeout_seconds: float | None = None) -> bool:
        """See :meth:`stream_consumers.tracking.consumer.TrackedConsumer.wait_empty`; other tasks continue meanwhile.

        Raises:
            InvalidOptionError: the consumer does not know which messages are unfinished.
        """
        if not isinstance(self._consumer, DrainableConsumer):
            raise InvalidOptionError(
                f"{type(self._consumer).__name__} does not know which messages are unfinished",
                remedy="Give a TrackedConsumer to the AsyncConsumer.",
            )
        return await asyncio.to_thread(self._consumer.wait_empty, timeout_seconds)

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            try:
                message = await self.next()
            except StreamEndedError:
                return
            if message is not None:
                yield message

    def _read_item(self, seconds: float) -> Message | None:
        return self._consumer.next(seconds)
