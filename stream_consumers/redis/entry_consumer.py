"""Consumers of the entries of many Redis streams, with and without a group (coredis' two kinds).

They give entries as they are, stream by stream in turn, and never wait longer than asked. Where a consumer is to be
like those of the other backends, use :func:`stream_consumers.create.create_consumer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import DeadLetterObserver, log_dead_letter
from stream_consumers.errors import GroupNotFoundError, InvalidOptionError, NotSubscribedError, StreamAssetsError
from stream_consumers.messages import Shard
from stream_consumers.redis.entry_reader import Arrival, Entry, EntryReader, check_identifier
from stream_consumers.redis.group import NEW, NOW, START, RedisGroup
from stream_consumers.redis.server import REPLY_SECONDS
from stream_consumers.urls import StreamUrl


class EntryConsumer(EntryReader):
    """Reads many streams without a group; nobody remembers its place.

    A stream starts behind the last entry that it has when the context is entered (or at the first
    :meth:`get_entry`), unless its identifier says otherwise; one that is not there yet starts at its beginning.
    Entering the context again starts again there: what was read since is replayed where an identifier was given.
    Without a buffer, streams take turns: a1 b1 a2 b2. The place in a stream moves when its entry is returned.

    Args:
        url: ``redis://host:6379/one,two``; each stream is a Redis key, taken as it is.
        identifiers: per stream, the id to start behind: ``0-0`` the beginning, ``$`` the end.
        buffer_size: entries to fetch ahead, per stream.
        timeout: seconds that :meth:`get_entry` waits by default; without it, and with 0 or less, it does not wait.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``. On a cluster the streams are asked
            one after the other, without holding each other up.

    Raises:
        InvalidUrlError, InvalidOptionError: an option that cannot be.
        BrokerUnavailableError, AccessDeniedError: on entering, as the server says.

    Example::

        url = StreamUrl.parse("redis://localhost:6379/one,two")
        with EntryConsumer(url, identifiers={"one": "0-0"}, buffer_size=100) as consumer:
            for stream, entry in consumer:
                print(stream, entry.id, dict(entry.fields))
    """

    _words = (NOW,)

    def __init__(
        self,
        url: StreamUrl,
        *,
        identifiers: Mapping[str, str] | None = None,
        buffer_size: int = 0,
        timeout: float | None = None,
        client: ClientConfig | None = None,
    ) -> None:
        super().__init__(
            url,
            identifiers=identifiers,
            buffer_size=buffer_size,
            timeout=timeout,
            client=client,
            on_dead_letter=log_dead_letter,
        )
        self._reading: Any = None
        self._positions: dict[str, str] = {}

    @property
    def positions(self) -> Mapping[str, str]:
        """Per stream, the id of the last entry that was returned, or where it started: identifiers to go on with."""
        with self._lock:
            return dict(self._positions)

    def _open(self) -> None:
        self._reading = self._server.new_connection(REPLY_SECONDS)
        self._positions = {}

    def _release(self) -> None:
        if self._reading is not None:
            self._reading.close()

    def _join(self, identifiers: Mapping[str, str | None]) -> None:
        self._positions.update(
            {n: self._server.last_id(n) if place in {None, NOW} else str(place) for n, place in identifiers.items()}
        )

    def _fetch(self, seconds: float) -> bool:
        pages = self._server.read(self._reading, ["XREAD", "COUNT", self._count], self._positions, seconds=seconds)
        found = {key.decode(): entries for key, entries in pages}
        # In the order of the streams, whatever the order of the answer.
        for name in self._positions:
            self._put(name, found.get(name, ()))
        return bool(found)

    def _hand_out(self, name: str, arrival: Arrival) -> None:
        self._positions[name] = arrival.entry.id


class GroupEntryConsumer(EntryReader):
    """Reads many streams as a member of a group; every entry goes to one member.

    What was returned stays pending until :meth:`acknowledge`. Entering the context again goes on where the group is;
    what was buffered and not returned is pending then, and comes with ``start_from_backlog``. Only what is pending for
    this member's name does, not what others left behind (mode ``load_balanced`` of
    :func:`stream_consumers.create.create_consumer` takes that over).

    Args:
        url: ``redis://host:6379/one,two``; each stream is a Redis key, taken as it is.
        group: the group's name.
        consumer: this member's name; give a member that starts again the same.
        identifiers: per stream, ``>`` for new entries only, or an id: what is pending for this member behind it comes
            first. For a single stream this is what ``start_from_backlog`` is for all of them.
        buffer_size: entries to fetch ahead, per stream.
        timeout: seconds that :meth:`get_entry` waits by default; without it, and with 0 or less, it does not wait.
        auto_create: make groups that are not there, and their streams. A group that is removed later is an error, and
            is never made again: what it had read would be unknown.
        start: the id that such a group starts behind: ``0-0`` the beginning (coredis starts at the end, which misses
            what is there), ``$`` the end.
        start_from_backlog: begin with what is pending for this member. An entry that was trimmed meanwhile is told to
            ``on_dead_letter`` and acknowledged.
        auto_acknowledge: **at most once**: the server forgets an entry when it gives it, before anybody has worked on
            it; those in the buffer are lost when the context is left. Entries of the backlog are acknowledged, too,
            each before it is returned.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.
        on_dead_letter: told of pending entries that were trimmed. If it raises, the entry stays pending.

    Raises:
        InvalidUrlError, InvalidOptionError: an option that cannot be.
        GroupNotFoundError: on entering, without ``auto_create``; it names the streams that lack the group.
        GroupRemovedError: from :meth:`get_entry` and :meth:`acknowledge`: a group or its stream was removed.

    Example::

        url = StreamUrl.parse("redis://localhost:6379/one,two")
        with GroupEntryConsumer(url, group="billing", consumer="me", start_from_backlog=True) as consumer:
            while (found := consumer.get_entry(timeout=1.0)) is not None:
                stream, entry = found
                consumer.acknowledge(stream, entry)
    """

    _words = (NEW,)

    def __init__(
        self,
        url: StreamUrl,
        *,
        group: str,
        consumer: str,
        identifiers: Mapping[str, str] | None = None,
        buffer_size: int = 0,
        timeout: float | None = None,
        auto_create: bool = True,
        start: str = START,
        start_from_backlog: bool = False,
        auto_acknowledge: bool = False,
        client: ClientConfig | None = None,
        on_dead_letter: DeadLetterObserver = log_dead_letter,
    ) -> None:
        super().__init__(
            url,
            identifiers=identifiers,
            buffer_size=buffer_size,
            timeout=timeout,
            client=client,
            on_dead_letter=on_dead_letter,
        )
        if not group or not consumer:
            raise InvalidOptionError("a member needs the names of group and consumer", remedy="Give both.")
        check_identifier(start, (NOW,))
        self._auto_create, self._start_id = auto_create, start
        self._start_from_backlog, self._auto_acknowledge = start_from_backlog, auto_acknowledge
        self._names = (group, consumer)
        self._group: RedisGroup | None = None
        self._joined: set[str] = set()
        # Per stream, the id to read behind: of what is pending for this member, or NEW.
        self._places: dict[str, str] = {}
        # Per stream, up to where the group's answers came.
        self._received: dict[str, str] = {}

    @property
    def group(self) -> str:
        """The group's name."""
        return self._names[0]

    @property
    def consumer(self) -> str:
        """This member's name in the group."""
        return self._names[1]

    def acknowledge(self, stream: str, *entries: Entry | str) -> int:
        """Tell the server that entries are done.

        Args:
            stream: of which stream.
            entries: the entries, or their ids.

        Returns:
            How many were pending; fewer than given is no error.

        Raises:
            NotSubscribedError: the stream is not read by this consumer.
            GroupRemovedError: the group is gone.
        """
        if stream not in self._identifiers:
            raise NotSubscribedError(
                f"{stream} is not read by this consumer", remedy=f"Read are: {', '.join(self._identifiers)}."
            )
        self._check_open()
        if not self._is_started:
            with self._lock:
                self._start()
        # Without the lock, which a waiting reader has.
        ids = [entry if isinstance(entry, str) else entry.id for entry in entries]
        return self._member.acknowledge(Shard(stream), ids)

    @property
    def _member(self) -> RedisGroup:
        assert self._group is not None
        return self._group

    def _open(self) -> None:
        group, consumer = self._names
        self._group = RedisGroup(self._server, group, consumer, acknowledge_on_read=self._auto_acknowledge)
        self._places = {}

    def _release(self) -> None:
        if self._group is not None:
            self._group.close()

    def _join(self, identifiers: Mapping[str, str | None]) -> None:
        member = self._member
        member.keys = {**member.keys, **{Shard(name): name for name in identifiers}}
        facts = {name: member.facts(Shard(name)) for name in identifiers}
        # One that was there before is not made again; reading tells that it is gone.
        missing = [name for name, found in facts.items() if found is None and name not in self._joined]
        if missing and not self._auto_create:
            raise GroupNotFoundError(
                f"group {self.group!r} does not exist for streams: {', '.join(missing)}",
                remedy="Make it there (XGROUP CREATE … MKSTREAM), or set auto_create.",
                streams=len(facts),
                missing=len(missing),
            )
        for name in missing:
            member.create(Shard(name), self._start_id)
            facts[name] = member.facts(Shard(name))
        for name, identifier in identifiers.items():
            self._places[name] = identifier or (START if self._start_from_backlog else NEW)
            found = facts[name]
            self._received[name] = found.delivered if found else START
            self._joined.add(name)

    def _fetch(self, seconds: float) -> bool:
        places = {Shard(name): place for name, place in self._places.items()}
        try:
            pages = self._member.read(places, count=self._count, seconds=seconds)
        except StreamAssetsError:
            # What the group gave while its answer was lost is pending for us, behind what came before: ask for it.
            for name, place in self._places.items():
                if place == NEW:
                    self._places[name] = self._received[name]
            raise
        for name, place in list(self._places.items()):
            entries = pages.get(Shard(name), [])
            self._put(name, entries, is_pending=place != NEW)
            if entries:
                last = entries[-1][0].decode()
                self._received[name] = max(self._received[name], last, key=_order)
            if place != NEW:
                self._places[name] = last if entries else NEW
        return any(pages.values()) or any(place != NEW for place in places.values())

    def _hand_out(self, name: str, arrival: Arrival) -> None:
        if arrival.is_trimmed or (arrival.is_pending and self._auto_acknowledge):
            self._member.acknowledge(Shard(name), [arrival.entry.id])


def _order(identifier: str) -> tuple[int, ...]:
    return tuple(map(int, identifier.split("-")))


@overload
def create_entry_consumer(url: str | StreamUrl, *, group: None = None, **options: Any) -> EntryConsumer: ...


@overload
def create_entry_consumer(url: str | StreamUrl, *, group: str, **options: Any) -> GroupEntryConsumer: ...


def create_entry_consumer(
    url: str | StreamUrl, *, group: str | None = None, **options: Any
) -> EntryConsumer | GroupEntryConsumer:
    """A consumer of entries (coredis' ``client.xconsumer``).

    Args:
        url: ``redis://host:6379/one,two``.
        group: with one, a :class:`GroupEntryConsumer`, which needs ``consumer``, too.
        **options: of :class:`EntryConsumer` or :class:`GroupEntryConsumer`.

    Raises:
        InvalidOptionError: a consumer's name without a group, or the other way round; as the classes say.

    Example::

        with create_entry_consumer("redis://localhost:6379/one,two", group="billing", consumer="me") as consumer:
            print(consumer.get_entry(timeout=1.0))
    """
    parsed = StreamUrl.parse(url) if isinstance(url, str) else url
    if (group is None) != (options.get("consumer") is None):
        raise InvalidOptionError("a member needs the names of group and consumer", remedy="Give both, or neither.")
    if group is None:
        options.pop("consumer", None)
        return EntryConsumer(parsed, **options)
    return GroupEntryConsumer(parsed, group=group, **options)
