"""Consumers of the entries of many Redis streams, with and without a group, blocking and for asyncio (coredis' kinds).

They give entries as they are, stream by stream in turn, and never wait longer than asked. Where a consumer is to be
like those of the other backends, use :func:`stream_consumers.create.create_consumer`.
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
    """An entry of a Redis stream, as it is and as a message.

    Args:
        identifier: its id, ``milliseconds-number``.
        fields: names and values, in order; a name may occur twice.
        message: what :func:`stream_consumers.redis.entries.read_entry` makes of it; a dead letter for an entry that
            does not have the message field once.

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
        """The values by their names; of a name that occurs twice, the last one."""
        return dict(self.fields)

    @property
    def is_trimmed(self) -> bool:
        """Whether it was pending, and is not in the stream any more: only then it has no field."""
        return not self.fields


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryOptions:
    """Options of a consumer of entries.

    Args:
        streams: more streams to read than those of the URL, by their keys, whatever these are; bytes, if a key is no
            text.
        identifiers: per stream, the id to start behind: ``0-0`` the beginning, ``$`` the end.
        buffer_size: entries to fetch ahead, per stream.
        timeout_seconds: how long ``get_entry`` waits by default; without it, and with 0 or less, not at all.

    Raises:
        InvalidOptionError: an option that cannot be.

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
    """Options of a consumer of entries that is a member of a group.

    Args:
        group: the group's name.
        consumer: this member's name; give a member that starts again the same.
        auto_create: create groups that do not exist, and their streams. A group that is removed later is an error, and
            is never created again: its position would be unknown.
        start: the id behind which such a group starts: ``0-0`` the beginning (coredis starts at the end, and misses
            the entries that exist), ``$`` the end.
        start_from_backlog: begin with entries that are pending for this member. One that was trimmed meanwhile is
            given to ``on_dead_letter`` and acknowledged.
        auto_acknowledge: **at most once**: the server forgets an entry when it delivers it, before it was worked on;
            those in the buffer are lost when the context is left. Entries of the backlog are acknowledged, too, each
            before it is returned.
        identifiers: per stream, ``>`` for new entries only, or an id: entries behind it that are pending for this
            member come first. It is ``start_from_backlog`` for a single stream.

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
    """Reads entries of many streams, one buffer a stream; see the consumers that are made of it.

    Args:
        url: ``redis://host:6379/one,two``; each stream is a Redis key, and is called by it, also
            where the URL has to encode it.
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
                remedy=f"Read are: {', '.join(self._identifiers)}.",
            )
        self._identifiers |= options.identifiers or {}
        self._special_identifiers, self._count = options.special_identifiers, options.buffer_size + 1
        self._url, self._client, self._on_dead_letter = url, client, on_dead_letter
        self.timeout_seconds = max(0.0, options.timeout_seconds or 0.0)
        # Entries, and whether they were pending for this member before they were read now.
        self._buffers: dict[str, deque[tuple[Entry, bool]]] = {}
        self._lock = PollingLock()
        self._is_started = False
        self._server = RedisConnection(url, client)

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams that are read."""
        return tuple(self._identifiers)

    def get_entry(self, timeout_seconds: float | None = None) -> tuple[str, Entry] | None:
        """The next entry and its stream: of the buffers if there is one, else of the server.

        Args:
            timeout_seconds: how long to wait for one, ``math.inf`` until there is one; the consumer's by default.

        Returns:
            ``None`` if there was none in time (coredis returns a pair of ``None``).

        Raises:
            StreamEndedError: the context was left.
            FormatError: a key holds something else than a stream.
            BrokerUnavailableError: nothing is lost; call it again.
        """
        return self._poll_until(self.timeout_seconds if timeout_seconds is None else timeout_seconds)

    def add_stream(self, name: str, identifier: str | None = None) -> bool:
        """Read another stream, too; the others stay where they are.

        Args:
            name: its key.
            identifier: where it starts, as for the consumer.

        Returns:
            False if it is read already; nothing is changed then.

        Raises:
            InvalidOptionError: ``identifier`` is no id.
            GroupNotFoundError: it has no group, which is not made either.
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
        """Close connections and drop buffered entries; a waiting :meth:`get_entry` ends."""
        self._closed.set()
        with self._lock.moving():
            self._buffers.clear()
            self._is_started = False
            self._release()
            self._server.close()

    def __iter__(self) -> Iterator[tuple[str, Entry]]:
        """Entries until there is none in time, as in coredis; iterate again to go on."""
        while (found := self.get_entry()) is not None:
            yield found

    def __enter__(self: Self) -> Self:
        with self._lock.moving():
            self._closed.clear()
            self._start()
        return self

    async def __aenter__(self) -> NoReturn:
        """Refuse ``async with``.

        Raises:
            InvalidOptionError: naming the consumer for asyncio.
        """
        raise InvalidOptionError(
            f"{type(self).__name__} blocks, and cannot be entered with 'async with'",
            remedy="Wrap it: async with AsyncEntryConsumer(create_entry_consumer(…)) as consumer.",
        )

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: nothing was entered."""

    # How the consumers differ.

    @abstractmethod
    def _open(self) -> None:
        """Open what is needed to read."""

    @abstractmethod
    def _release(self) -> None:
        """Close what :meth:`_open` opened, if anything."""

    @abstractmethod
    def _join(self, identifiers: Mapping[str, str | None]) -> None:
        """Begin to read these streams, all of them or none."""

    @abstractmethod
    def _fetch(self, seconds: float) -> bool:
        """Fill the buffers, waiting at most this long; returns whether any entry was read."""

    @abstractmethod
    def _hand_out(self, name: str, entry: Entry, *, is_pending: bool) -> None:
        """The user gets this entry now, or the observer was called for it."""

    # the rest

    def _start(self) -> None:
        if self._is_started:
            return
        self._server = RedisConnection(self._url, self._client)
        try:
            self._open()
            # The order in which the streams take turns.
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
            # Entries that were trimmed are no reason to give up before the next ones.
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
    """Reads many streams without a group: no server remembers its position.

    A stream starts behind the last entry that it has when the context is entered (or at the first
    :meth:`get_entry`), unless its identifier says otherwise; one that is not there yet starts at its beginning.
    Entering the context again starts there again: where an identifier was given, entries are replayed from it on.
    Without a buffer, streams take turns: a1 b1 a2 b2. The position in a stream moves when its entry is returned.
    A stream that is deleted is an error within some seconds, also if it was made again with lower ids meanwhile.

    Args:
        url: ``redis://host:6379/one,two``; each stream is a Redis key, and is called by it, also
            where the URL has to encode it.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``. On a cluster the streams are asked
            one after the other, without holding each other up.
        **options: see :class:`EntryOptions`.

    Raises:
        InvalidUrlError, InvalidOptionError: an option that cannot be.
        BrokerUnavailableError, AccessDeniedError: on entering, as the server says.
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
        """Per stream, the id of the last entry that was returned, or where it started: identifiers to go on with."""
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

    An entry that was returned stays pending until :meth:`acknowledge`. Entering the context again continues where the
    group is; entries that were buffered and not returned are pending then, and come with ``start_from_backlog``.
    Entries that are pending for other names do not (mode ``load_balanced`` of
    :func:`stream_consumers.create.create_consumer` takes them over).

    Args:
        url: ``redis://host:6379/one,two``; each stream is a Redis key, and is called by it, also
            where the URL has to encode it.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.
        on_dead_letter: called for pending entries that were trimmed. If it raises, the entry stays pending.
        **options: see :class:`GroupEntryOptions`; ``group`` and ``consumer`` are needed.

    Raises:
        InvalidUrlError, InvalidOptionError: an option that cannot be.
        GroupNotFoundError: on entering, without ``auto_create``; it names the streams that lack the group.
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
            stream: of which stream.
            entries: the entries, or their ids.

        Returns:
            How many were pending; fewer than given is no error.

        Raises:
            NotSubscribedError: the stream is not read by this consumer.
            GroupRemovedError: the group is gone.
        """
        self._check_open()
        if stream not in self._identifiers:
            raise NotSubscribedError(
                f"{stream} is not read by this consumer", remedy=f"Read are: {', '.join(self._identifiers)}."
            )
        if not self._is_started:
            with self._lock.moving():
                self._start()
        # Without the lock, which a waiting reader holds.
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
        # A group that existed before is not created again: reading says that it is gone.
        missing = [name for name, found in facts.items() if found is None and name not in self._joined]
        if missing and not self._options.auto_create:
            raise GroupNotFoundError(
                f"group {self.group!r} does not exist for streams: {', '.join(missing)}",
                remedy="Make it there (XGROUP CREATE … MKSTREAM), or set auto_create.",
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
    """A consumer of entries (coredis' ``client.xconsumer``).

    Args:
        url: ``redis://host:6379/one,two``, or ``redis://host:6379/`` and ``streams``.
        group: with one, a :class:`GroupEntryConsumer`, which needs ``consumer``, too.
        **options: of :class:`EntryConsumer` or :class:`GroupEntryConsumer`.

    Raises:
        InvalidOptionError: a consumer's name without a group, or the other way round; as the classes say.

    Example::

        keys = ["one", "user:42", "a key, with spaces"]
        with create_entry_consumer("redis://localhost:6379/", streams=keys, group="billing", consumer="me") as member:
            print(member.get_entry(timeout_seconds=1.0))
    """
    parsed = StreamUrl.parse(url)
    if (group is None) != (options.get("consumer") is None):
        raise InvalidOptionError("a member needs the names of group and consumer", remedy="Give both, or neither.")
    if group is None:
        options.pop("consumer", None)
        return EntryConsumer(parsed, **options)
    return GroupEntryConsumer(parsed, group=group, **options)


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

    async def __aenter__(self: AsyncSelf) -> AsyncSelf:
        if self._is_closed:
            self._start_reading()
        await self._in_thread(self._consumer.__enter__)
        return self

    async def __aiter__(self) -> AsyncIterator[tuple[str, Entry]]:
        """Entries until there is none in time, as in coredis; iterate again to go on."""
        while (found := await self.get_entry()) is not None:
            yield found

    def _read_item(self, seconds: float) -> tuple[str, Entry] | None:
        return self._consumer.get_entry(seconds)
