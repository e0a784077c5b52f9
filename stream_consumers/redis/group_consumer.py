"""Redis Streams, message by message, as a member of a consumer group."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime

from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import DeadLetterObserver, Edge, log_dead_letter, rewind_place
from stream_consumers.consumer_base import PollingConsumer, end_of
from stream_consumers.errors import NotSubscribedError, StreamAssetsError
from stream_consumers.messages import DeadLetter, Message, Shard
from stream_consumers.options import (
    AutoCommit,
    AutoStreamReset,
    ConsumerMode,
    Modes,
    RedisGroupOptions,
    choice,
    new_consumer_name,
)
from stream_consumers.polling_lock import PollingLock
from stream_consumers.redis.acknowledgements import Acknowledgements, EntryLocation
from stream_consumers.redis.consumer import RedisConsumer
from stream_consumers.redis.entries import read_reply
from stream_consumers.redis.group import NEW, NOW, START, RedisGroup
from stream_consumers.redis.ids import id_order, to_id
from stream_consumers.redis.server import RawEntry, RedisServer
from stream_consumers.urls import StreamUrl
from stream_consumers.wording import counted

BATCH = 100
SHARED_BATCH = 10
SHARDS_SECONDS = 5.0
# How many pages of pending entries one read may search before it turns to new entries again.
CLAIM_PAGES = 100
Receive = Callable[[Shard, Sequence[RawEntry], bool], None]
"""Gets entries of a shard in order, and whether they may have been delivered before."""
MEMBER_MODES = Modes(
    of="members of a Redis group",
    available=(ConsumerMode.RESUMABLE, ConsumerMode.LOAD_BALANCED),
    host_groups={ConsumerMode.RESUMABLE: ":r", ConsumerMode.LOAD_BALANCED: ":s"},
)


class GroupReader:
    """Reads entries for one member of a group: first those that are pending for it, then new ones. Not thread-safe.

    Args:
        group: the group as this member sees it.
        receive: called with the entries of each page.
        count: the most entries of a shard at once.
    """

    def __init__(self, group: RedisGroup, receive: Receive, *, count: int) -> None:
        self._group, self._receive, self._count = group, receive, count
        self._joined: set[Shard] = set()
        # Per shard, up to which id the entries pending for this member were read; the other shards are at new entries.
        self._backlog: dict[Shard, str] = {}
        # Per shard, the last id that was given to this member, where nothing before it needs to be read again.
        self._given: dict[Shard, str] = {}

    def join(self, shard: Shard, after: str, *, given: str | None = None) -> None:
        """Begin to read a shard.

        Args:
            shard: which one.
            after: :data:`stream_consumers.redis.group.NEW`, or an id: first, entries behind it are read that are
                pending for this member.
            given: the last id that the group gave to anybody before. When the answer to a read was lost, pending
                entries are read again behind it only; without it, all of them are.
        """
        self._joined.add(shard)
        if after != NEW:
            self._backlog[shard] = after
        if given is not None:
            self._given[shard] = given

    def read(self, seconds: float) -> bool:
        """Read a page, waiting for new entries at most so long; whether there were any entries, usable or not.

        Raises:
            StreamAssetsError: as the server says; a later call reads what it gave to this member meanwhile.
        """
        try:
            return self._read_backlog() or self._take_over() or self._read_new(seconds)
        except StreamAssetsError:
            # Entries in an answer that was lost are pending for this member: read them again.
            for shard in self._joined:
                self._backlog.setdefault(shard, self._given.get(shard, START))
            raise

    def _read_backlog(self) -> bool:
        """Read entries that are pending for this member, page by page until an empty page; trimmed ones count, too."""
        while self._backlog:
            pages = self._group.read(dict(sorted(self._backlog.items())), count=self._count)
            for shard in list(self._backlog):
                entries = pages.get(shard)
                if not entries:
                    del self._backlog[shard]
                    continue
                self._pass_on(shard, entries, is_again=True)
                self._backlog[shard] = entries[-1][0].decode()
            if any(pages.values()):
                return True
        return False

    def _take_over(self) -> bool:
        """Take over entries of members that are gone; whether there were any."""
        return False

    def _read_new(self, seconds: float) -> bool:
        pages = self._group.read(dict.fromkeys(sorted(self._joined), NEW), count=self._count, seconds=seconds)
        for shard, entries in pages.items():
            self._pass_on(shard, entries, is_again=False)
        return any(pages.values())

    def _pass_on(self, shard: Shard, entries: Sequence[RawEntry], *, is_again: bool) -> None:
        self._receive(shard, entries, is_again)
        if shard in self._given:
            self._given[shard] = max(self._given[shard], entries[-1][0].decode(), key=id_order)


class SharingReader(GroupReader):
    """Beyond :class:`GroupReader`, creates the group in new shards, and takes over entries of members that are gone.

    Args:
        group: the group as this member sees it.
        receive: called with the entries of each page.
        options: batch size, claims, whether to make streams.
        is_held: whether this member holds an entry already.
        is_shared: take over entries of members that are gone.
        start: the id behind which a group starts that is created.
        meets_new_shards: look for shards that were added.
    """

    def __init__(
        self,
        group: RedisGroup,
        receive: Receive,
        options: RedisGroupOptions,
        *,
        is_held: Callable[[EntryLocation], bool],
        is_shared: bool,
        start: str,
        meets_new_shards: bool,
    ) -> None:
        super().__init__(group, receive, count=options.batch_size or (SHARED_BATCH if is_shared else BATCH))
        self._options, self._is_held, self._meets_new_shards = options, is_held, meets_new_shards
        self._to_join: dict[Shard, str] = dict.fromkeys(group.find_shards(), start)
        self._look_again = time.monotonic() + SHARDS_SECONDS
        # Per shard, where the search for entries of members that are gone goes on.
        self._sweeps: dict[Shard, str] = {}
        interval = options.auto_claim_interval_seconds if is_shared else None
        self._next_sweep = None if interval is None else time.monotonic() + interval

    def read(self, seconds: float) -> bool:
        """See :meth:`GroupReader.read`."""
        self._meet_new_shards()
        for shard, start in list(self._to_join.items()):
            self._group.create(shard, start, create_stream=self._options.create_stream)
            del self._to_join[shard]
            # Entries that are taken over may have any id: after a lost answer, all pending ones are read again.
            self.join(shard, START)
        return super().read(seconds)

    def _meet_new_shards(self) -> None:
        if not self._meets_new_shards or time.monotonic() < self._look_again:
            return
        self._look_again = time.monotonic() + SHARDS_SECONDS
        before = self._group.keys
        for shard, key in self._group.find_shards().items():
            if before.get(shard) != key:
                self._to_join[shard] = START

    def _take_over(self) -> bool:
        interval, idle = self._options.auto_claim_interval_seconds, self._options.auto_claim_idle_seconds
        if self._next_sweep is None or interval is None:
            return False
        if not self._sweeps and time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + interval
            self._sweeps = {s: START for s in sorted(self._joined) if self._group.has_idle_peer(s, idle)}
        room, came = self._count, False
        for _ in range(CLAIM_PAGES):
            if not self._sweeps or room <= 0:
                break
            shard, cursor = next(iter(self._sweeps.items()))
            page = self._group.claim(shard, cursor, idle_seconds=idle, count=room)
            # XAUTOCLAIM returns the caller's own entries, too, and those are being worked on.
            wanted = [entry_id for entry_id in page.ids if not self._is_held((shard, entry_id))]
            deleted = [entry_id for entry_id in page.deleted if not self._is_held((shard, entry_id))]
            entries = self._group.deliver(shard, wanted)
            self._receive(shard, [*entries, *((entry_id, None) for entry_id in deleted)], True)
            came = came or bool(entries or deleted)
            room -= len(entries)
            if page.cursor == START:
                del self._sweeps[shard]
            else:
                self._sweeps[shard] = page.cursor
        return came


class RedisGroupConsumer(PollingConsumer):
    """A member of a consumer group of Redis Streams; see :class:`stream_consumers.consumer.Consumer`.

    Every message is delivered at least once (with ``immediate`` at most once): first those that are pending for this
    member's name, then those that the group has not delivered to anybody. Commits happen within :meth:`next`, also
    while it waits, and in :meth:`close`. A message that was delivered and not committed stays pending, and is delivered
    again to the next consumer of the same name, or to a peer that claims it. Two live members must not have the same
    name: each would get the other's pending messages, too, when it starts.

    A :meth:`seek` or :meth:`rewind` leaves the group: from then on, every message of the assigned shards is read by
    position, and nothing new becomes pending. Messages that the group delivered before can still be acknowledged.

    Args:
        url: ``redis://host:6379/orders``.
        mode: ``resumable``: one member. ``load_balanced``: several share the messages, and take over those of a member
            that is gone.
        group: by default the host's id and ``:r``, or ``:s`` with ``load_balanced`` (SeaStreamer's rule).
        reset: where a group starts that does not exist at the first :meth:`next`.
        live: wait for more messages; without it the stream ends when the group has delivered everything.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.
        options: see :class:`stream_consumers.options.RedisGroupOptions`.
        on_dead_letter: called for entries that cannot be used as a message, were trimmed while they were pending, or
            were delivered too often; they are acknowledged. If it raises, the entry stays pending.

    Raises:
        InvalidOptionError: mode ``real_time``, or an empty group name.
        BrokerUnavailableError, AccessDeniedError: as the server says.

    Example::

        url = "redis://localhost:6379/orders"
        options = RedisGroupOptions(auto_commit=AutoCommit.DISABLED)
        with RedisGroupConsumer(url, group="billing", options=options) as consumer:
            for message in consumer:
                bill(message)
                consumer.ack(message)
                consumer.commit()
    """

    def __init__(
        self,
        url: str | StreamUrl,
        *,
        mode: ConsumerMode = ConsumerMode.RESUMABLE,
        group: str | None = None,
        reset: AutoStreamReset = AutoStreamReset.EARLIEST,
        live: bool = True,
        client: ClientConfig | None = None,
        options: RedisGroupOptions | None = None,
        on_dead_letter: DeadLetterObserver = log_dead_letter,
    ) -> None:
        url = StreamUrl.parse(url)
        super().__init__()
        self._options = options or RedisGroupOptions()
        mode, reset = MEMBER_MODES.check(mode), choice(AutoStreamReset, reset, option="reset")
        name = MEMBER_MODES.group(mode, group) or ""
        consumer = self._options.consumer or _member_name(mode, name)
        self._url, self._mode, self._live, self._client = url, mode, live, client
        self._on_dead_letter = on_dead_letter
        self._streams = url.required_streams()
        server = RedisServer(url, client)
        is_immediate = self._options.auto_commit is AutoCommit.IMMEDIATE
        self._message_field = server.message_field
        self._group = RedisGroup(server, name, consumer, acknowledge_on_read=is_immediate)
        self._acknowledgements = Acknowledgements(self._options)
        self._reader = SharingReader(
            self._group,
            self._receive,
            self._options,
            is_held=self._acknowledgements.is_held,
            is_shared=mode is ConsumerMode.LOAD_BALANCED,
            start=START if reset is AutoStreamReset.EARLIEST else NOW,
            meets_new_shards=live,
        )
        # A thread that waits for messages holds _reading only, so that nothing else waits for it.
        self._reading, self._moving, self._committing = PollingLock(), threading.Lock(), threading.Lock()
        self._lock = threading.Lock()
        self._buffer: deque[tuple[EntryLocation, Message | DeadLetter]] = deque()
        self._by_position: RedisConsumer | None = None
        self._is_detached = False

    def __repr__(self) -> str:
        names = f"group={self.group!r}, consumer={self.consumer!r}"
        return f"RedisGroupConsumer({str(self._url)!r}, mode={self._mode.value!r}, {names})"

    @property
    def group(self) -> str:
        """The group's name."""
        return self._group.name

    @property
    def consumer(self) -> str:
        """This member's name in the group."""
        return self._group.consumer

    @property
    def auto_commit(self) -> AutoCommit:
        """When it acknowledges messages."""
        return self._options.auto_commit

    def next(self, timeout_seconds: float | None = None) -> Message | None:
        """See :meth:`stream_consumers.consumer.Consumer.next`.

        Raises:
            StreamEndedError: the consumer was closed, or everything was delivered and ``live`` is off.
            StreamNotFoundError: there is no stream to create the group for.
            GroupRemovedError: the group or the stream was removed.
            BrokerUnavailableError: no message is lost; call it again.
        """
        return super().next(timeout_seconds)

    def _poll(self, seconds: float) -> Message | None:
        self._commit_what_is_due()
        if self._by_position is not None and self._is_detached:
            return self._by_position.next(seconds)
        # A page without a message is no reason to give up before the next one.
        deadline = time.monotonic() + seconds + self.poll_seconds
        while (message := self._take()) is None:
            if not self._read(seconds) or self._is_detached or time.monotonic() >= deadline:
                return None
            seconds = 0.0
        return message

    def seek(self, moment: datetime) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.seek`; leaves the group."""
        with self._moving:
            self._positions().seek(moment)
            self._detach()

    def rewind(self, to: Edge | int) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.rewind`; leaves the group."""
        to = rewind_place(to)
        with self._moving:
            self._positions().rewind(to)
            self._detach()

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`."""
        with self._moving:
            self._positions().assign(shard)

    def unassign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`."""
        with self._moving:
            self._positions().unassign(shard)

    def ack(self, message: Message | tuple[Shard, int]) -> None:
        """Acknowledge a message: it is done, and the next commit tells the server.

        Args:
            message: the message, or its shard and sequence.

        Raises:
            InvalidOptionError: auto_commit is ``delayed``.
            NotSubscribedError: it is of another stream.
        """
        self._check_open()
        shard, sequence = (message.shard, message.sequence) if isinstance(message, Message) else message
        location = (shard, to_id(sequence).encode())
        if self._is_detached and shard.stream in self._streams and not self._acknowledgements.is_held(location):
            # It was read by position: the group did not deliver it.
            return
        if shard not in self._group.keys:
            raise NotSubscribedError(
                f"{shard} is not read by this consumer", remedy=f"Known are: {', '.join(map(str, self._group.keys))}."
            )
        self._acknowledgements.acknowledge(location)

    def commit(self) -> int:
        """Tell the server which messages were acknowledged; returns how many entries are no longer pending.

        It is no error if these are fewer than were acknowledged: a peer may have taken some over.

        Raises:
            InvalidOptionError: auto_commit is ``delayed`` or ``rolling``.
            GroupRemovedError: the group is gone.
            BrokerUnavailableError: the next commit sends all of them again.
        """
        self._check_open()
        self._acknowledgements.check_manual()
        with self._committing:
            return self._send(self._acknowledgements.acknowledged())

    def close(self) -> None:
        """Commit what may be committed, and release connections; a waiting :meth:`next` ends.

        These messages stay pending: those that were read and not handed out; with ``delayed``, those that were handed
        out less than ``auto_commit_delay_seconds`` ago; with ``rolling``, those that were not acknowledged; with
        ``disabled``, those that no :meth:`commit` was called for.

        Raises:
            StreamAssetsError: the last commit failed; everything is released nevertheless.
        """
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        try:
            with self._committing:
                self._send(self._acknowledgements.due(is_last=True))
        finally:
            with self._moving:
                if self._by_position is not None:
                    self._by_position.close()
            with self._reading.moving():
                self._group.close()

    # committing

    def _commit_what_is_due(self) -> None:
        # A thread that is committing already does it for all of them.
        if self._committing.acquire(blocking=False):
            try:
                self._send(self._acknowledgements.due())
            finally:
                self._committing.release()

    def _send(self, locations: Sequence[EntryLocation]) -> int:
        by_shard: dict[Shard, list[bytes]] = {}
        for shard, entry_id in locations:
            by_shard.setdefault(shard, []).append(entry_id)
        done = 0
        for shard, ids in by_shard.items():
            done += self._group.acknowledge(shard, ids)
            self._acknowledgements.committed((shard, entry_id) for entry_id in ids)
        return done

    # positions

    def _positions(self) -> RedisConsumer:
        self._check_open()
        if self._by_position is None:
            self._by_position = RedisConsumer(
                self._url, live=self._live, client=self._client, on_dead_letter=self._on_dead_letter
            )
        return self._by_position

    def _detach(self) -> None:
        with self._lock:
            self._is_detached = True
            self._acknowledgements.forget(location for location, _ in self._buffer)
            self._buffer.clear()

    # reading

    def _take(self) -> Message | None:
        """The next message of the buffer; calls the observer for the dead letters before it."""
        while True:
            with self._lock:
                if not self._buffer:
                    return None
                location, item = self._buffer.popleft()
                if isinstance(item, Message):
                    self._acknowledgements.hand_out(location)
                    return item
            self._on_dead_letter(item)
            self._acknowledgements.settle(location)

    def _read(self, seconds: float) -> bool:
        """Fill the buffer with a page, waiting at most so long; whether there were any entries.

        Raises:
            StreamEndedError: there were none, and the consumer is not live.
        """
        if not self._reading.acquire(seconds):
            return False
        try:
            self._check_open()
            if self._buffer or self._is_detached:
                return True
            came = self._reader.read(seconds if self._live else 0.0)
        finally:
            self._reading.release()
        if not came and not self._live and not self._is_detached:
            raise end_of(f"group {self.group!r}")
        return came

    def _receive(self, shard: Shard, entries: Sequence[RawEntry], is_again: bool) -> None:
        """Put entries into the buffer, except those that this member holds already."""
        counts: dict[bytes, int] = {}
        most = self._options.max_deliveries
        if is_again and most is not None:
            counts = self._group.deliveries(shard, [entry_id for entry_id, _ in entries])
        if is_again and self.auto_commit is AutoCommit.IMMEDIATE:
            # The server acknowledges on reading new entries only.
            self._group.acknowledge(shard, [entry_id for entry_id, _ in entries])
        for entry_id, fields in entries:
            if self._acknowledgements.receive((shard, entry_id)):
                item = read_reply(shard, entry_id, fields, self._message_field)
                if most is not None and counts.get(entry_id, 1) > most and isinstance(item, Message):
                    item = _too_often(item, counts[entry_id], most)
                self._put((shard, entry_id), item)

    def _put(self, location: EntryLocation, item: Message | DeadLetter) -> None:
        with self._lock:
            if self._is_detached:
                self._acknowledgements.forget([location])
            else:
                self._buffer.append((location, item))


def _member_name(mode: ConsumerMode, group: str) -> str:
    """The name of a member that was given none (SeaStreamer's rule)."""
    if mode is ConsumerMode.RESUMABLE:
        return group
    return new_consumer_name()


def _too_often(message: Message, count: int, most: int) -> DeadLetter:
    said = f"the message was delivered {counted(count, 'time')}, more often than max_deliveries={most} allows"
    return DeadLetter(message.shard, message.sequence, message.timestamp_ms, message.payload or b"", said)
