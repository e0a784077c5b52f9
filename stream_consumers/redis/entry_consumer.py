"""Consumers of raw entries of many Redis streams, with and without a group, blocking and for asyncio (like coredis).

They return entries unchanged, alternate between streams, and never wait longer than the timeout. For a consumer with
the same API as other backends, use :func:`stream_consumers.create.create_consumer`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeVar, overload

from stream_consumers.async_consumer import AsyncReader
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import DeadLetterObserver, PollingLock, PollingReader, log_dead_letter
from stream_consumers.errors import (
    GroupNotFoundError,
    InvalidOptionError,
    NotSubscribedError,
    StreamAssetsError,
)
from stream_consumers.messages import DeadLetter, Message, Shard, decode_key
from stream_consumers.options import check_count, check_iterable, check_name, check_switch, check_timeout
from stream_consumers.redis.entries import RawEntry, check_entry_id, key_text, read_reply, shard_of, to_key
from stream_consumers.redis.group import NEW, NOW, START, RedisGroup
from stream_consumers.redis.group_consumer import GroupReader
from stream_consumers.redis.server import REPLY_SECONDS, RedisConnection, RemovalDetector
from stream_consumers.urls import StreamUrl

Self = TypeVar("Self", bound="EntryReader")
AsyncSelf = TypeVar("AsyncSelf", bound="AsyncEntryConsumer")


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a Redis stream, with its raw fields and as a message.

    Args:
        identifier: its id, ``milliseconds-number``.
        fields: names and values, in order; a name may occur twice.
        message: the result of :func:`stream_consumers.redis.entries.read_entry`: a dead letter if the entry does not
            have the message field exactly once.

    Example:
        >>> message = Message(Shard("orders"), 1 << 16, 1, b"{}")
        >>> entry = Entry("1-0", ((b"msg", b"{}"), (b"source", b"web")), message)
        >>> entry.identifier, entry.field_values
        ('1-0', {b'msg': b'{}', b'source': b'web'})
    """

    identifier: str
    fields: tuple[tuple[bytes, bytes], ...]
    message: Message | DeadLetter

    @property
    def field_values(self) -> Mapping[bytes, bytes]:
        """The values by their names; the last value of a repeated name."""
        return dict(self.fields)

    @property
    def is_trimmed(self) -> bool:
        """Whether it was pending and is no longer in the stream: only then it has no fields."""
        return not self.fields


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryOptions:
    """Options of an entry consumer.

    Args:
        streams: streams to read in addition to those of the URL, by their keys; bytes for a key that is not text.
        identifiers: for each stream, the id to start after: ``0-0`` is the beginning, ``$`` is the end.
        buffer_size: the number of entries to fetch ahead, per stream.
        timeout_seconds: how long ``get_entry`` waits by default; it does not wait if this is ``None`` or at most 0.

    Raises:
        InvalidOptionError: an option is invalid.

    Example:
        >>> EntryOptions(streams=["one"], identifiers={"one": "0-0"}).buffer_size
        0
    """

    streams: Sequence[str | bytes] = ()
    identifiers: Mapping[str, str] | None = None
    buffer_size: int = 0
    timeout_seconds: float | None = None
    special_identifiers: ClassVar[tuple[str, ...]] = (NOW,)

    def __post_init__(self) -> None:
        check_iterable("streams", self.streams)
        if not isinstance(self.identifiers or {}, Mapping):
            raise InvalidOptionError(
                f"identifiers={self.identifiers!r} is a {type(self.identifiers).__name__}",
                remedy="Give a mapping of streams to identifiers.",
            )
        for identifier in (self.identifiers or {}).values():
            check_entry_id(identifier, self.special_identifiers)
        check_count("buffer_size", self.buffer_size, at_least=0)
        check_timeout(self.timeout_seconds or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntryOptions(EntryOptions):
    """Options of an entry consumer that is a member of a group.

    Args:
        group: the group's name.
        consumer: this member's name; use the same name after a restart.
        auto_create: create missing groups and their streams. A group that is removed later is an error, and is never
            created again, because its position would be unknown.
        start: the id after which a created group starts: ``0-0`` is the beginning (coredis starts at the end, and
            misses existing entries), ``$`` is the end.
        start_from_backlog: start with the entries that are pending for this member. A pending entry that was trimmed
            is passed to ``on_dead_letter`` and acknowledged.
        auto_acknowledge: **at most once**: the server acknowledges an entry when it delivers it, before it is
            processed; buffered entries are lost when the context is left. Each pending entry is also acknowledged
            before it is returned.
        identifiers: for each stream, ``>`` for new entries only, or an id: entries after it that are pending for this
            member come first. This is ``start_from_backlog`` for a single stream.

    Example:
        >>> GroupEntryOptions(group="billing", consumer="me").start
        '0-0'
    """

    group: str
    consumer: str
    auto_create: bool = True
    start: str = START
    start_from_backlog: bool = False
    auto_acknowledge: bool = False
    special_identifiers: ClassVar[tuple[str, ...]] = (NEW,)

    def __post_init__(self) -> None:
        EntryOptions.__post_init__(self)
        check_name("group", self.group)
        check_name("consumer", self.consumer)
        check_entry_id(self.start, (NOW,))
        for name in ("auto_create", "start_from_backlog", "auto_acknowledge"):
            check_switch(name, getattr(self, name))


class EntryReader(PollingReader[tuple[str, Entry]]):
    """The base class of entry consumers: reads entries of many streams, with one buffer per stream.

    Args:
        url: ``redis://host:6379/one,two``; each stream is a Redis key, and its name is the key, even if the URL
            has to encode it.
        options: which streams to read, and how.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.
        on_dead_letter: called for pending entries that were trimmed. If it raises, the entry stays pending.
    """

    remedy_if_closed = "Enter it again, or create a new one."

    def __init__(
        self,
        url: str | StreamUrl,
        options: EntryOptions,
        client: ClientConfig | None,
        on_dead_letter: DeadLetterObserver,
    ) -> None:
        super().__init__()
        url = StreamUrl.parse(url)
        self._identifiers: dict[str, str | None] = dict.fromkeys(_names(url, options.streams))
        unknown = sorted(set(options.identifiers or {}) - set(self._identifiers))
        if unknown:
            raise InvalidOptionError(
                f"identifiers are given for streams that are not read: {', '.join(unknown)}",
                remedy=f"The consumer reads: {', '.join(self._identifiers)}.",
            )
        self._identifiers |= options.identifiers or {}
        self._special_identifiers, self._count = options.special_identifiers, options.buffer_size + 1
        self._url, self._client, self._on_dead_letter = url, client, on_dead_letter
        self.timeout_seconds = max(0.0, options.timeout_seconds or 0.0)
        # For each stream, its entries, and whether each of them was pending for this member before this read.
        self._buffers: dict[str, deque[tuple[Entry, bool]]] = {}
        self._lock = PollingLock()
        self._is_started = False
        self._server = RedisConnection(url, client)

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams that are read."""
        return tuple(self._identifiers)

    def get_entry(self, timeout_seconds: float | None = None) -> tuple[str, Entry] | None:
        """Return the next entry and its stream, from the buffers or from the server.

        Args:
            timeout_seconds: how long to wait; ``math.inf`` waits without a limit. The default is the consumer's.

        Returns:
            The entry, or ``None`` if none arrived in time (coredis returns a pair of ``None``).

        Raises:
            StreamEndedError: the context was left.
            FormatError: a key does not hold a stream.
            BrokerUnavailableError: the server does not answer; no entry is lost, so call the method again.
        """
        return self._poll_until(self.timeout_seconds if timeout_seconds is None else timeout_seconds)

    def add_stream(self, name: str, identifier: str | None = None) -> bool:
        """Also read another stream; the positions of the other streams do not change.

        Args:
            name: the key of the stream.
            identifier: where to start, as for the consumer.

        Returns:
            Whether the stream was added; ``False`` if it is already read.

        Raises:
            InvalidOptionError: ``identifier`` is not an id.
            GroupNotFoundError: the group does not exist, and ``auto_create`` is not set.
        """
        name = _name(name)
        with self._lock.moving():
            self._check_open()
            if name in self._identifiers:
                return False
            checked = None if identifier is None else check_entry_id(identifier, self._special_identifiers)
            self._start()
            self._join({name: checked})
            self._buffers[name], self._identifiers[name] = deque(), checked
            return True

    def close(self) -> None:
        """Close connections, drop buffered entries, and end a waiting :meth:`get_entry`."""
        self._closed.set()
        with self._lock.moving():
            self._buffers.clear()
            self._is_started = False
            self._release()
            self._server.close()

    def __iter__(self) -> Iterator[tuple[str, Entry]]:
        """Yield entries until none arrives in time, as in coredis; iterate again to continue."""
        while (found := self.get_entry()) is not None:
            yield found

    def __enter__(self: Self) -> Self:
        with self._lock.moving():
            self._closed.clear()
            self._start()
        return self

    async def __aenter__(self) -> NoReturn:
        """Reject ``async with``.

        Raises:
            InvalidOptionError: always; the error names the consumer for asyncio.
        """
        raise InvalidOptionError(
            f"{type(self).__name__} blocks, and cannot be entered with 'async with'",
            remedy="Wrap it: async with AsyncEntryConsumer(create_entry_consumer(…)) as consumer.",
        )

    async def __aexit__(self, *_: object) -> None:
        """Do nothing, because nothing was entered."""

    # Methods that subclasses implement.

    @abstractmethod
    def _open(self) -> None:
        """Open the resources for reading."""

    @abstractmethod
    def _release(self) -> None:
        """Close the resources that :meth:`_open` opened, if any."""

    @abstractmethod
    def _join(self, identifiers: Mapping[str, str | None]) -> None:
        """Start to read these streams, either all or none."""

    @abstractmethod
    def _fetch(self, seconds: float) -> bool:
        """Fill the buffers, waiting at most this long; return whether any entry was read."""

    @abstractmethod
    def _hand_out(self, name: str, entry: Entry, *, is_pending: bool) -> None:
        """Called when the user gets this entry, or after the observer was called for it."""

    # shared implementation

    def _start(self) -> None:
        if self._is_started:
            return
        self._server = RedisConnection(self._url, self._client)
        try:
            self._open()
            # The streams take turns in this order.
            self._buffers = {name: deque() for name in self._identifiers}
            self._join(self._identifiers)
        except BaseException:
            self._release()
            self._server.close()
            raise
        self._is_started = True

    def _poll(self, seconds: float) -> tuple[str, Entry] | None:
        if not self._lock.acquire(seconds):
            return None
        try:
            self._check_open()
            self._start()
            # If all entries of a fetch were trimmed, fetch again.
            while (found := self._take()) is None and self._fetch(seconds):
                seconds = 0.0
            return found
        finally:
            self._lock.release()

    def _take(self) -> tuple[str, Entry] | None:
        for name, buffer in self._buffers.items():
            while buffer:
                entry, is_pending = buffer[0]
                if entry.is_trimmed and isinstance(entry.message, DeadLetter):
                    buffer.popleft()
                    self._on_dead_letter(entry.message)
                    self._hand_out(name, entry, is_pending=is_pending)
                    continue
                # The entry stays in the buffer if this fails.
                self._hand_out(name, entry, is_pending=is_pending)
                buffer.popleft()
                return name, entry
        return None

    def _buffer_entries(self, name: str, entries: Iterable[RawEntry], *, is_pending: bool = False) -> None:
        shard, field = shard_of(to_key(name)), self._server.message_field
        for entry_id, fields in entries:
            flat = fields or []
            pairs = tuple(zip(flat[::2], flat[1::2]))
            entry = Entry(entry_id.decode(), pairs, read_reply(shard, entry_id, fields, field))
            self._buffers[name].append((entry, is_pending))


class EntryConsumer(EntryReader):
    """Reads many streams without a group; the server stores no position.

    By default, a stream starts after its last entry at the time when the context is entered (or at the first
    :meth:`get_entry`); an identifier changes that, and a stream that does not exist yet starts at its beginning.
    Entering the context again starts anew: with an identifier, entries after it are read again. Without a buffer,
    streams take turns: a1 b1 a2 b2. The position in a stream moves when its entry is returned. A deleted stream raises
    an error within several seconds, even if it was created again with lower ids meanwhile.

    Args:
        url: ``redis://host:6379/one,two``; each stream is a Redis key, and its name is the key, even if the URL
            has to encode it.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``. On a cluster, streams are polled
            one after the other without blocking each other.
        **options: see :class:`EntryOptions`.

    Raises:
        InvalidUrlError, InvalidOptionError: an option is invalid.
        BrokerUnavailableError, AccessDeniedError: on entering: the server returned an error.
        StreamRemovedError: from :meth:`get_entry`: a stream was deleted.

    Example::

        url = "redis://localhost:6379/one,two"
        with EntryConsumer(url, identifiers={"one": "0-0"}, buffer_size=100) as consumer:
            for stream, entry in consumer:
                print(stream, entry.identifier, entry.field_values)
    """

    def __init__(self, url: str | StreamUrl, *, client: ClientConfig | None = None, **options: Any) -> None:
        super().__init__(url, EntryOptions(**options), client, log_dead_letter)
        self._reading: Any = None
        self._positions: dict[str, str] = {}

    @property
    def positions(self) -> Mapping[str, str]:
        """For each stream, the id of the last returned entry, or its start: identifiers for continuing."""
        with self._lock.moving():
            return dict(self._positions)

    def _open(self) -> None:
        self._reading = self._server.new_connection(REPLY_SECONDS)
        self._removals = RemovalDetector(self._server)
        self._positions = {}

    def _release(self) -> None:
        if self._reading is not None:
            self._reading.close()

    def _join(self, identifiers: Mapping[str, str | None]) -> None:
        for name, after in identifiers.items():
            last = self._server.last_id(to_key(name))
            self._positions[name] = last if after in {None, NOW} else str(after)
            self._removals.record(Shard(name), last)

    def _fetch(self, seconds: float) -> bool:
        self._removals.check({Shard(name): to_key(name) for name in self._positions})
        after = {to_key(name): entry_id for name, entry_id in self._positions.items()}
        pages = self._server.read(self._reading, ["XREAD", "COUNT", self._count], after, seconds=seconds)
        for key, entries in pages:
            self._buffer_entries(key_text(key), entries)
            self._removals.record(Shard(key_text(key)), entries[-1][0].decode())
        return bool(pages)

    def _hand_out(self, name: str, entry: Entry, *, is_pending: bool) -> None:
        self._positions[name] = entry.identifier


class GroupEntryConsumer(EntryReader):
    """Reads many streams as a member of a group; every entry goes to one member.

    A returned entry stays pending until :meth:`acknowledge`. Entering the context again continues at the position of
    the group; entries that were buffered but not returned are then pending, and are read with ``start_from_backlog``.
    Entries that are pending for other names are not read (mode ``load_balanced`` of
    :func:`stream_consumers.create.create_consumer` takes them over).

    Args:
        url: ``redis://host:6379/one,two``; each stream is a Redis key, and its name is the key, even if the URL
            has to encode it.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.
        on_dead_letter: called for pending entries that were trimmed. If it raises, the entry stays pending.
        **options: see :class:`GroupEntryOptions`; ``group`` and ``consumer`` are required.

    Raises:
        InvalidUrlError, InvalidOptionError: an option is invalid.
        GroupNotFoundError: on entering, without ``auto_create``: the group does not exist for the named streams.
        GroupRemovedError: from :meth:`get_entry` and :meth:`acknowledge`: a group or its stream was removed.

    Example::

        url = "redis://localhost:6379/one,two"
        with GroupEntryConsumer(url, group="billing", consumer="me", start_from_backlog=True) as consumer:
            while (found := consumer.get_entry(timeout_seconds=1.0)) is not None:
                stream, entry = found
                consumer.acknowledge(stream, entry)
    """

    def __init__(
        self,
        url: str | StreamUrl,
        *,
        client: ClientConfig | None = None,
        on_dead_letter: DeadLetterObserver = log_dead_letter,
        **options: Any,
    ) -> None:
        self._options = GroupEntryOptions(**options)
        super().__init__(url, self._options, client, on_dead_letter)
        self._group: RedisGroup | None = None
        self._joined: set[str] = set()

    @property
    def group(self) -> str:
        """The group's name."""
        return self._options.group

    @property
    def consumer(self) -> str:
        """This member's name in the group."""
        return self._options.consumer

    def acknowledge(self, stream: str, *entries: Entry | str) -> int:
        """Acknowledge entries.

        Args:
            stream: the stream of the entries.
            entries: the entries, or their ids.

        Returns:
            The number of entries that were pending; it may be less than the number given.

        Raises:
            NotSubscribedError: the stream is not read by this consumer.
            GroupRemovedError: the group was removed.
        """
        self._check_open()
        if stream not in self._identifiers:
            raise NotSubscribedError(
                f"{stream} is not read by this consumer", remedy=f"It reads: {', '.join(self._identifiers)}."
            )
        if not self._is_started:
            with self._lock.moving():
                self._start()
        # Do not take the lock, because a waiting reader holds it.
        ids = [check_entry_id(entry) if isinstance(entry, str) else entry.identifier for entry in entries]
        return self._member.acknowledge(Shard(stream), ids)

    @property
    def _member(self) -> RedisGroup:
        assert self._group is not None
        return self._group

    def _open(self) -> None:
        options = self._options
        self._group = RedisGroup(
            self._server, options.group, options.consumer, acknowledge_on_read=options.auto_acknowledge
        )
        self._reader = GroupReader(self._group, count=self._count)

    def _release(self) -> None:
        if self._group is not None:
            self._group.close()

    def _join(self, identifiers: Mapping[str, str | None]) -> None:
        member = self._member
        member.keys = {**member.keys, **{Shard(name): to_key(name) for name in identifiers}}
        facts = {name: member.facts(Shard(name)) for name in identifiers}
        # A group that was joined before is not created again: reading raises that it was removed.
        missing = [name for name, found in facts.items() if found is None and name not in self._joined]
        if missing and not self._options.auto_create:
            raise GroupNotFoundError(
                f"group {self.group!r} does not exist for streams: {', '.join(missing)}",
                remedy="Create it (XGROUP CREATE … MKSTREAM), or set auto_create.",
                streams=len(facts),
                missing=len(missing),
            )
        for name in missing:
            member.create(Shard(name), self._options.start)
            facts[name] = member.facts(Shard(name))
        for name, identifier in identifiers.items():
            found, after = facts[name], identifier or (START if self._options.start_from_backlog else NEW)
            self._reader.join(Shard(name), after, last_delivered=found.delivered if found else START)
            self._joined.add(name)

    def _fetch(self, seconds: float) -> bool:
        has_entries = False
        try:
            for shard, entries, is_redelivery in self._reader.read(seconds):
                self._buffer_entries(shard.stream, entries, is_pending=is_redelivery)
                has_entries = True
        except StreamAssetsError:
            self._reader.read_again()
            raise
        return has_entries

    def _hand_out(self, name: str, entry: Entry, *, is_pending: bool) -> None:
        if entry.is_trimmed or (is_pending and self._options.auto_acknowledge):
            self._member.acknowledge(Shard(name), [entry.identifier])


def _names(url: StreamUrl, streams: Sequence[str | bytes]) -> list[str]:
    if not streams or url.streams:
        streams = [*(decode_key(stream) for stream in url.required_streams()), *streams]
    return [_name(stream) for stream in streams]


def _name(stream: str | bytes) -> str:
    return key_text(stream if isinstance(stream, bytes) else to_key(stream))


@overload
def create_entry_consumer(url: str | StreamUrl, *, group: None = None, **options: Any) -> EntryConsumer: ...


@overload
def create_entry_consumer(url: str | StreamUrl, *, group: str, **options: Any) -> GroupEntryConsumer: ...


def create_entry_consumer(
    url: str | StreamUrl, *, group: str | None = None, **options: Any
) -> EntryConsumer | GroupEntryConsumer:
    """Create an entry consumer (coredis' ``client.xconsumer``).

    Args:
        url: ``redis://host:6379/one,two``, or ``redis://host:6379/`` and ``streams``.
        group: with a group, the result is a :class:`GroupEntryConsumer`, which also requires ``consumer``.
        **options: options of :class:`EntryConsumer` or :class:`GroupEntryConsumer`.

    Raises:
        InvalidOptionError: only one of ``group`` and ``consumer`` is given, or an option is invalid.

    Example::

        keys = ["one", "user:42", "a key, with spaces"]
        with create_entry_consumer("redis://localhost:6379/", streams=keys, group="billing", consumer="me") as member:
            print(member.get_entry(timeout_seconds=1.0))
    """
    parsed = StreamUrl.parse(url)
    if (group is None) != (options.get("consumer") is None):
        raise InvalidOptionError("only one of group and consumer is given", remedy="Give both, or neither.")
    if group is None:
        options.pop("consumer", None)
        return EntryConsumer(parsed, **options)
    return GroupEntryConsumer(parsed, group=group, **options)


class AsyncEntryConsumer(AsyncReader[EntryReader, tuple[str, Entry]]):
    """An entry consumer whose :meth:`get_entry` is awaited; an asynchronous iterator and context manager.

    Several tasks may wait at once; they get their entries in the order in which they asked. Canceling a task loses no
    entry: the next call returns the entry that the task would have got. Entering the context again restarts the
    consumer.

    Args:
        consumer: an entry consumer with or without a group; it is closed with this object.

    Example::

        streams = create_entry_consumer("redis://localhost:6379/", streams=["one", "user:42"], timeout_seconds=30)
        async with AsyncEntryConsumer(streams) as consumer:
            async for stream, entry in consumer:
                print(stream, entry.identifier, entry.field_values[b"msg"])
    """

    async def get_entry(self, timeout_seconds: float | None = None) -> tuple[str, Entry] | None:
        """Return the next entry and its stream.

        Args:
            timeout_seconds: how long to wait; ``math.inf`` waits without a limit. The default is the consumer's.

        Returns:
            The entry, or ``None`` if none arrived in time (coredis returns a pair of ``None``).

        Raises:
            StreamEndedError: the context was left.
            StreamAssetsError: the consumer raised an error; the task that asked first gets it.
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
                "this consumer has no group to acknowledge entries to", remedy="Create it with group and consumer."
            )
        # The reading thread may be busy, so another thread acknowledges.
        return await asyncio.to_thread(self._consumer.acknowledge, stream, *entries)

    async def __aenter__(self: AsyncSelf) -> AsyncSelf:
        if self._is_closed:
            self._start_reading()
        await self._in_thread(self._consumer.__enter__)
        return self

    async def __aiter__(self) -> AsyncIterator[tuple[str, Entry]]:
        """Yield entries until none arrives in time, as in coredis; iterate again to continue."""
        while (found := await self.get_entry()) is not None:
            yield found

    def _read_item(self, seconds: float) -> tuple[str, Entry] | None:
        return self._consumer.get_entry(seconds)
