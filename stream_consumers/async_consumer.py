"""Any consumer for asyncio: a thread of its own reads, and only while a task waits for a message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import TypeVar

from stream_consumers.async_reader import AsyncReader
from stream_consumers.capabilities import EmptyingConsumer, Positions, positioned
from stream_consumers.consumer import Consumer, Edge, rewind_place
from stream_consumers.errors import InvalidOptionError, StreamEndedError
from stream_consumers.messages import Message, Shard
from stream_consumers.options import check_timeout

Result = TypeVar("Result")


class AsyncConsumer(AsyncReader[Consumer, Message]):
    """A consumer whose :meth:`next` is awaited; an asynchronous iterator and context manager.

    Several tasks may wait at once: they get their messages in the order in which they asked. Cancelling a task loses no
    message: the next call returns the one that was meant for it, unless its shard was moved since. Nothing is read
    ahead. Use it in one event loop.

    Args:
        consumer: the consumer to read; it is closed with this one. Its other methods may be called
            directly; those that move it only by :meth:`move`.

    Example:
        >>> from stream_consumers.create import create_consumer
        >>> async def read() -> list[str]:
        ...     async with AsyncConsumer(create_consumer("file://orders.ss/orders", live=False)) as orders:
        ...         return [message.text() async for message in orders]
        >>> asyncio.run(read())
        ['{"id": 0}', '{"id": 1}', '{"id": 2}']
    """

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
        return await self._next(None if timeout_seconds is None else check_timeout(timeout_seconds))

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

    def ack(self, message: Message) -> object:
        """A message is done; returns what the consumer's own ``ack`` does. It waits for nobody.

        Raises:
            InvalidOptionError: the consumer has no group.
        """
        return self._consumer.ack(message)

    async def commit(self) -> object:
        """Commit what was acknowledged; returns what the consumer's own ``commit`` does.

        Raises:
            InvalidOptionError: the consumer has no group.
            StreamAssetsError: as the consumer says.
        """
        # Not in the reading thread, which may be busy.
        return await asyncio.to_thread(self._consumer.commit)

    async def wait_empty(self, timeout_seconds: float | None = None) -> bool:
        """See :meth:`stream_consumers.tracking.consumer.TrackedConsumer.wait_empty`; other tasks go on meanwhile.

        Raises:
            InvalidOptionError: the consumer does not know which messages are unfinished.
        """
        if not isinstance(self._consumer, EmptyingConsumer):
            raise InvalidOptionError(
                f"{type(self._consumer).__name__} does not know which messages are unfinished",
                remedy="Give a TrackedConsumer to the AsyncConsumer.",
            )
        return await asyncio.to_thread(self._consumer.wait_empty, timeout_seconds)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[Message]:
        while True:
            try:
                message = await self.next()
            except StreamEndedError:
                return
            if message is not None:
                yield message

    def _read_item(self, seconds: float) -> Message | None:
        return self._consumer.next(seconds)

    def _shard_of(self, item: Message) -> Shard:
        return item.shard
