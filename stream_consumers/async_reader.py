"""Awaits what a consumer reads: a thread of its own reads, and only while a task waits."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from stream_consumers.errors import StreamEndedError
from stream_consumers.messages import Shard
from stream_consumers.polling_lock import BRIEF_SECONDS

READ_SECONDS = 0.1
Reader = TypeVar("Reader", bound="ClosesReads")
Item = TypeVar("Item")
Result = TypeVar("Result")
Self = TypeVar("Self", bound="AsyncReader[ClosesReads, object]")


class ClosesReads(Protocol):
    """A consumer."""

    def close(self) -> None:
        """Close it; called by any thread, and a read that waits ends."""
        ...


@dataclass(slots=True)
class _Read(Generic[Item]):
    """The outcome of one read, and whether its shard was moved after it."""

    item: Item | None
    is_outdated: bool = False


class AsyncReader(ABC, Generic[Reader, Item]):
    """Items that are awaited by any number of tasks; a context manager that closes.

    They get their items in the order in which they asked. Cancelling a task loses none: the next call returns the one
    that was meant for it, unless its shard was moved since. Nothing is read ahead. Use it in one event loop.

    Args:
        consumer: what is read; it is closed with this one.
    """

    def __init__(self, consumer: Reader) -> None:
        self._consumer = consumer
        self._begin()

    @property
    def consumer(self) -> Reader:
        """The consumer that is read, as it was given."""
        return self._consumer

    def _begin(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="consumer")
        # Held by the task that reads.
        self._turn = asyncio.Lock()
        # A read continues when the task that started it is cancelled; the next task gets its item.
        self._read: Future[_Read[Item]] | None = None
        self._is_waiting = self._is_closed = False
        # Only the reading thread, which moves, too, has this.
        self._last: _Read[Item] = _Read(None)

    # How the consumers differ.

    @abstractmethod
    def _read_item(self, seconds: float) -> Item | None:
        """Read one, waiting at most this long; called by the reading thread."""

    @abstractmethod
    def _shard_of(self, item: Item) -> Shard:
        """Where it is from."""

    # the rest

    async def close(self) -> None:
        """Close the consumer and end the thread; tasks that wait get a :class:`StreamEndedError`."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            # Not in the reading thread, which may be busy.
            await asyncio.to_thread(self._consumer.close)
        finally:
            # The last read ends, since the consumer is closed.
            await asyncio.to_thread(self._thread.shutdown)

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _next(self, timeout_seconds: float | None) -> Item | None:
        """The next item; ``None`` if there was none in time.

        Args:
            timeout_seconds: how long to wait for one; ``None`` until there is one, 0 not at all.
        """
        if self._is_closed:
            raise _closed()
        loop = asyncio.get_running_loop()
        timeout_seconds = None if timeout_seconds == math.inf else timeout_seconds
        deadline = math.inf if timeout_seconds is None else loop.time() + timeout_seconds
        if timeout_seconds == 0 and not self._is_waiting:
            # The task before this one does not wait either: it ends in a moment.
            timeout_seconds = BRIEF_SECONDS
        if not await self._take_turn(timeout_seconds):
            return None
        try:
            return await self._read_until(deadline)
        finally:
            self._is_waiting = False
            self._turn.release()

    async def _take_turn(self, seconds: float | None) -> bool:
        """Wait for the turn, at most this long."""
        # Not with wait_for: up to Python 3.11 it may ignore that its task is cancelled.
        taking = asyncio.ensure_future(self._turn.acquire())
        try:
            await asyncio.wait([taking], timeout=seconds)
        except asyncio.CancelledError:
            if taking.done():
                self._turn.release()
            raise
        finally:
            taking.cancel()
        return taking.done()

    async def _read_until(self, deadline: float) -> Item | None:
        """Look first, and wait only if there is nothing."""
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
            # Nothing is logged about an error that a cancelled task does not look at: the next task gets it.
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

    async def _move(self, call: Callable[[], Result], shards: Container[Shard] | None = None) -> Result:
        def move() -> Result:
            result = call()
            # Here, since a task that is cancelled does not learn whether the move happened.
            item = self._last.item
            if item is not None and (shards is None or self._shard_of(item) in shards):
                self._last.is_outdated = True
            return result

        return await self._in_thread(move)

    def _read_one(self, seconds: float) -> _Read[Item]:
        self._last = _Read(self._read_item(seconds))
        return self._last

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        if self._is_closed:
            raise _closed()
        return await asyncio.wrap_future(self._thread.submit(call))


def _closed() -> StreamEndedError:
    return StreamEndedError("the consumer was closed", remedy="Create a new one.")
