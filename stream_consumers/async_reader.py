"""Awaits what a consumer reads: a thread of its own reads, and only while a task waits."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from stream_consumers.errors import StreamEndedError
from stream_consumers.messages import Shard

READ_SECONDS = 0.1
Item = TypeVar("Item")
Result = TypeVar("Result")
Self = TypeVar("Self", bound="AsyncReader[object]")


@dataclass(frozen=True, slots=True)
class _Read(Generic[Item]):
    """An item, and how many moves there had been when it was read."""

    item: Item
    moves: int


@dataclass(eq=False, slots=True)
class _Waiter(Generic[Item]):
    """A task that waits for an item.

    Args:
        answer: the future of the item; ``None`` if there was none in time.
        deadline: when it gives up, in seconds of the event loop's clock.
    """

    answer: asyncio.Future[_Read[Item] | None]
    deadline: float


class AsyncReader(ABC, Generic[Item]):
    """Items that are awaited by any number of tasks; a context manager that closes.

    They get their items in the order in which they asked. Cancelling a task loses none: the next call returns the one
    that was meant for it, unless its shard was moved since. Nothing is read ahead. Use it in one event loop at a time.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="consumer")
        self._waiters: deque[_Waiter[Item]] = deque()
        self._returned: deque[_Read[Item]] = deque()
        self._pump: asyncio.Task[None] | None = None
        # A read continues when the task that started it is cancelled; the next call gets its item.
        self._read: Future[_Read[Item] | None] | None = None
        self._is_waiting = self._is_closed = False
        # What was read before a move is not delivered behind it. Only the reading thread counts, which moves, too.
        self._moves = self._all_moved = 0
        self._moved: dict[Shard, int] = {}

    # How the consumers differ.

    @abstractmethod
    def _read_item(self, seconds: float) -> Item | None:
        """Read one, waiting at most so long; called by the reading thread."""

    @abstractmethod
    def _shard_of(self, item: Item) -> Shard:
        """Where it is from."""

    @abstractmethod
    def _close(self) -> None:
        """Close what is read; called by any thread, and the last read ends."""

    # the rest

    async def close(self) -> None:
        """Close the consumer and end the thread; tasks that wait get a :class:`StreamEndedError`."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            # Not in the reading thread, which may be busy.
            await asyncio.to_thread(self._close)
        finally:
            while self._waiters:
                self._waiters.popleft().answer.set_exception(_closed())
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
        # An item is only returned while no task waits.
        while self._returned:
            returned = self._returned.popleft()
            if self._is_current(returned):
                return returned.item
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
        return None if read is None else read.item

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

    def _give(self, read: _Read[Item]) -> None:
        if not self._is_current(read):
            return
        if self._waiters:
            self._waiters.popleft().answer.set_result(read)
        else:
            self._returned.append(read)

    def _expire(self, asked: list[_Waiter[Item]]) -> None:
        """Answer ``None`` to the tasks that asked before the last read and have no time left."""
        now = asyncio.get_running_loop().time()
        for waiter in asked:
            if waiter.deadline <= now and waiter in self._waiters:
                self._waiters.remove(waiter)
                waiter.answer.set_result(None)

    def _forget(self, waiter: _Waiter[Item]) -> None:
        """A task was cancelled; an item that it was given already is for the next one."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        answer = waiter.answer
        if not answer.done() or answer.cancelled() or answer.exception() is not None:
            return
        read = answer.result()
        if read is None:
            return
        if self._waiters:
            # No waiting task has been answered, and this item is older than any that will be read.
            self._give(read)
        else:
            self._returned.appendleft(read)

    def _is_current(self, read: _Read[Item]) -> bool:
        """Whether its shard is where it was when it was read."""
        return read.moves >= max(self._all_moved, self._moved.get(self._shard_of(read.item), 0))

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

    def _read_one(self, seconds: float) -> _Read[Item] | None:
        item = self._read_item(seconds)
        return None if item is None else _Read(item, self._moves)

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        if self._is_closed:
            raise _closed()
        return await asyncio.wrap_future(self._thread.submit(call))


def _closed() -> StreamEndedError:
    return StreamEndedError("the consumer was closed", remedy="Create a new one.")
