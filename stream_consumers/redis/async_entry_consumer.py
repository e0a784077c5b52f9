"""Entries of many Redis streams for asyncio, with and without a group (coredis' consumers)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from stream_consumers.async_reader import AsyncReader
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Shard
from stream_consumers.redis.entry_consumer import Entry, EntryReader, GroupEntryConsumer

Self = TypeVar("Self", bound="AsyncEntryConsumer")


class AsyncEntryConsumer(AsyncReader[EntryReader, tuple[str, Entry]]):
    """An entry consumer whose :meth:`get_entry` is awaited; an asynchronous iterator and context manager.

    Several tasks may wait at once: they get their entries in the order in which they asked. Cancelling a task loses no
    entry: the next call returns the one that was meant for it. Entering the context again starts again, as that of the
    consumer does.

    Args:
        consumer: with a group or without one; it is closed with this one.

    Example::

        streams = create_entry_consumer("redis://localhost:6379/", streams=["one", "user:42"], timeout_seconds=30)
        async with AsyncEntryConsumer(streams) as consumer:
            async for stream, entry in consumer:
                print(stream, entry.identifier, entry.field_values[b"msg"])
    """

    async def get_entry(self, timeout_seconds: float | None = None) -> tuple[str, Entry] | None:
        """The next entry and its stream.

        Args:
            timeout_seconds: how long to wait for one, ``math.inf`` until there is one; the consumer's by default.

        Returns:
            ``None`` if there was none in time (coredis returns a pair of ``None``).

        Raises:
            StreamEndedError: the context was left.
            StreamAssetsError: as the consumer says; the task that asked first gets it.
        """
        return await self._next(
            max(0.0, self._consumer.timeout_seconds if timeout_seconds is None else timeout_seconds)
        )

    async def add_stream(self, name: str, identifier: str | None = None) -> bool:
        """See :meth:`stream_consumers.redis.entry_consumer.EntryReader.add_stream`."""
        return await self._in_thread(lambda: self._consumer.add_stream(name, identifier))

    async def acknowledge(self, stream: str, *entries: Entry | str) -> int:
        """See :meth:`stream_consumers.redis.entry_consumer.GroupEntryConsumer.acknowledge`.

        Raises:
            InvalidOptionError: the consumer has no group.
        """
        if not isinstance(self._consumer, GroupEntryConsumer):
            raise InvalidOptionError(
                "entries are acknowledged to a group, and this consumer has none", remedy="Give it group and consumer."
            )
        # Not in the reading thread, which may be busy.
        return await asyncio.to_thread(self._consumer.acknowledge, stream, *entries)

    async def __aenter__(self: Self) -> Self:
        if self._is_closed:
            self._begin()
        await self._in_thread(self._consumer.__enter__)
        return self

    def __aiter__(self) -> AsyncIterator[tuple[str, Entry]]:
        """Entries until there is none in time, as in coredis; iterate again to go on."""
        return self._entries()

    async def _entries(self) -> AsyncIterator[tuple[str, Entry]]:
        while (found := await self.get_entry()) is not None:
            yield found

    def _read_item(self, seconds: float) -> tuple[str, Entry] | None:
        return self._consumer.get_entry(seconds)

    def _shard_of(self, item: tuple[str, Entry]) -> Shard:
        return item[1].message.shard
