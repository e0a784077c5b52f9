"""The consumer of Redis Streams that is a member of a consumer group."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import (
    DeadLetterObserver,
    DetachableMember,
    Entries,
    PollingLock,
    Positions,
    end_of_stream,
    log_dead_letter,
)
from stream_consumers.display import counted
from stream_consumers.errors import InvalidOptionError, NotSubscribedError, StreamAssetsError
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
from stream_consumers.redis.consumer import RedisConsumer
from stream_consumers.redis.entries import RawEntry, id_order, read_reply, to_id
from stream_consumers.redis.group import BEGIN, NEW, NOW, START, RedisGroup
from stream_consumers.redis.server import RedisConnection
from stream_consumers.urls import StreamUrl

BATCH = 100
SHARED_BATCH = 10
SHARD_SEARCH_SECONDS = 5.0
# The most pages of pending entries that one read searches before it reads new entries again.
CLAIM_PAGES = 20
EntryLocation = tuple[Shard, bytes]
"""The location of an entry: its shard and its id."""
MEMBER_MODES = Modes(
    of="members of a Redis group",
    available=(ConsumerMode.RESUMABLE, ConsumerMode.LOAD_BALANCED),
    host_groups={ConsumerMode.RESUMABLE: ":r", ConsumerMode.LOAD_BALANCED: ":s"},
)


class Acknowledgements:
    """Records which entries are acknowledged, and separately which may be committed. Thread-safe.

    Args:
        options: the options that decide when an entry may be committed.

    Example:
        >>> held = Acknowledgements(RedisGroupOptions(auto_commit=AutoCommit.DISABLED))
        >>> held.receive((Shard("orders"), b"1-0")), held.receive((Shard("orders"), b"1-0"))
        (True, False)
        >>> held.acknowledge((Shard("orders"), b"1-0"))
        >>> held.acknowledged()
        [(Shard(stream='orders', id=0), b'1-0')]
    """

    def __init__(self, options: RedisGroupOptions) -> None:
        self._mode = options.auto_commit
        self._delay = options.auto_commit_delay_seconds
        self._interval = options.auto_commit_interval_seconds
        self._lock = threading.Lock()
        self._held: set[EntryLocation] = set()
        self._aging: deque[tuple[float, EntryLocation]] = deque()
        # Dictionaries instead of sets, because they preserve the order.
        self._acknowledged: dict[EntryLocation, None] = {}
        self._settled: dict[EntryLocation, None] = {}
        self._next_commit = time.monotonic() + self._interval

    def receive(self, location: EntryLocation) -> bool:
        """Record an entry that was read from the server; return whether this member did not hold it yet."""
        with self._lock:
            if location in self._held:
                return False
            if self._mode is not AutoCommit.IMMEDIATE:
                self._held.add(location)
            return True

    def is_held(self, location: EntryLocation) -> bool:
        """Return whether the entry was received and is not committed yet."""
        with self._lock:
            return location in self._held

    def drop(self, locations: Iterable[EntryLocation]) -> None:
        """Remove received entries that will not be delivered to the user; they stay pending."""
        with self._lock:
            self._held.difference_update(locations)

    def hand_out(self, location: EntryLocation) -> None:
        """Record that the user gets this message; with ``delayed``, its delay starts now."""
        if self._mode is AutoCommit.DELAYED:
            with self._lock:
                self._aging.append((time.monotonic() + self._delay, location))

    def settle(self, location: EntryLocation) -> None:
        """Mark a dead letter for the next commit in every mode, because the user never acknowledges it."""
        if self._mode is not AutoCommit.IMMEDIATE:
            with self._lock:
                self._settled[location] = None

    def acknowledge(self, location: EntryLocation) -> None:
        """Record that the user has finished this message.

        Raises:
            InvalidOptionError: with ``delayed``, which acknowledges automatically.
        """
        if self._mode is AutoCommit.DELAYED:
            raise InvalidOptionError(
                "auto_commit is 'delayed', which acknowledges automatically",
                remedy="Do not call ack, or set auto_commit to rolling or disabled.",
                auto_commit_delay_seconds=self._delay,
            )
        if self._mode is not AutoCommit.IMMEDIATE:
            with self._lock:
                self._acknowledged[location] = None

    def check_manual(self) -> None:
        """Raise if commits are automatic.

        Raises:
            InvalidOptionError: with ``delayed`` and ``rolling``.
        """
        if self._mode in {AutoCommit.DELAYED, AutoCommit.ROLLING}:
            raise InvalidOptionError(
                f"auto_commit is {self._mode.value!r}, which commits automatically",
                remedy="Do not call commit, or set auto_commit to disabled.",
                auto_commit_interval_seconds=self._interval,
            )

    def acknowledged(self) -> list[EntryLocation]:
        """Return the entries for an explicit commit."""
        with self._lock:
            return [*self._settled, *self._acknowledged]

    def due(self, *, is_last: bool = False) -> list[EntryLocation]:
        """Return the entries for an automatic commit now.

        Args:
            is_last: whether this is the last commit, which ignores the interval but not the delay.
        """
        now = time.monotonic()
        with self._lock:
            while self._aging and self._aging[0][0] <= now:
                self._acknowledged[self._aging.popleft()[1]] = None
            if self._mode is AutoCommit.DISABLED or not (is_last or now >= self._next_commit):
                return list(self._settled)
            self._next_commit = now + self._interval
            return [*self._settled, *self._acknowledged]

    def committed(self, locations: Iterable[EntryLocation]) -> None:
        """Remove entries that were committed to the server."""
        with self._lock:
            for location in locations:
                self._held.discard(location)
                self._settled.pop(location, None)
                self._acknowledged.pop(location, None)


class EntryPage(NamedTuple):
    """A page of entries that a member read.

    Args:
        shard: the shard of the entries.
        entries: the entries, in order.
        is_redelivery: whether they may have been delivered before.
    """

    shard: Shard
    entries: Sequence[RawEntry]
    is_redelivery: bool


class GroupReader:
    """Reads entries for one member of a group: first its pending entries, then new ones. Not thread-safe.

    Args:
        group: the group as this member sees it.
        count: the most entries per shard and read.
    """

    def __init__(self, group: RedisGroup, *, count: int) -> None:
        self._group, self._count = group, count
        self._joined: set[Shard] = set()
        # For each shard with unread pending entries of this member, the last id read; other shards read new entries.
        self._backlog: dict[Shard, str] = {}
        # For each shard, the last id delivered to this member, if no entry up to it needs to be read again.
        self._last_delivered: dict[Shard, str] = {}

    def join(self, shard: Shard, after: str, *, last_delivered: str | None = None) -> None:
        """Start to read a shard.

        Args:
            shard: the shard.
            after: :data:`stream_consumers.redis.group.NEW`, or an id: then the entries after it that are pending for
                this member are read first.
            last_delivered: the last id that the group delivered to any member before. When the reply to a read was
                lost, only pending entries after it are read again; without it, all of them are.
        """
        self._joined.add(shard)
        if after != NEW:
            self._backlog[shard] = after
        if last_delivered is not None:
            self._last_delivered[shard] = last_delivered

    def read(self, seconds: float) -> Iterator[EntryPage]:
        """Yield pages of entries, waiting at most this long for new ones; entries need not be valid messages.

        Call :meth:`read_again` after an error, including an error of the code that processes a page.

        Raises:
            StreamAssetsError: the server returned an error.
        """
        has_entries = False
        for source in (self._read_backlog(), self._take_over(), self._read_new(seconds)):
            for page in source:
                has_entries = True
                yield page
            if has_entries:
                return

    def read_again(self) -> None:
        """Read the pending entries of this member again, because entries in a lost reply are pending."""
        for shard in self._joined:
            self._backlog.setdefault(shard, self._last_delivered.get(shard, START))

    def _read_backlog(self) -> Iterator[EntryPage]:
        """Read the pending entries of this member until a page is empty; trimmed entries count as entries."""
        while self._backlog:
            pages = self._group.read(dict(sorted(self._backlog.items())), count=self._count)
            for shard in list(self._backlog):
                if entries := pages.get(shard):
                    yield from self._yield_page(shard, entries, is_redelivery=True)
                    self._backlog[shard] = entries[-1][0].decode()
                else:
                    del self._backlog[shard]
            if any(pages.values()):
                return

    def _take_over(self) -> Iterator[EntryPage]:
        """Take over entries of dead members; the base class takes over none."""
        return iter(())

    def _read_new(self, seconds: float) -> Iterator[EntryPage]:
        pages = self._group.read(dict.fromkeys(sorted(self._joined), NEW), count=self._count, seconds=seconds)
        for shard, entries in pages.items():
            yield from self._yield_page(shard, entries, is_redelivery=False)

    def _yield_page(self, shard: Shard, entries: Sequence[RawEntry], *, is_redelivery: bool) -> Iterator[EntryPage]:
        yield EntryPage(shard, entries, is_redelivery)
        if shard in self._last_delivered:
            self._last_delivered[shard] = max(self._last_delivered[shard], entries[-1][0].decode(), key=id_order)


class SharingReader(GroupReader):
    """A :class:`GroupReader` that also creates the group in new shards and takes over entries of dead members.

    Args:
        group: the group as this member sees it.
        options: batch size, claims, and whether to create streams.
        is_shared: whether to take over entries of dead members.
        start: the id after which a created group starts.
        finds_new_shards: whether to search for new shards.
    """

    def __init__(
        self, group: RedisGroup, options: RedisGroupOptions, *, is_shared: bool, start: str, finds_new_shards: bool
    ) -> None:
        super().__init__(group, count=options.batch_size or (SHARED_BATCH if is_shared else BATCH))
        self._options, self._finds_new_shards = options, finds_new_shards
        self._to_join: dict[Shard, str] = dict.fromkeys(group.find_shards(), start)
        self._next_shard_search = time.monotonic() + SHARD_SEARCH_SECONDS
        # For each shard, the cursor of the search for entries of dead members.
        self._claim_cursors: dict[Shard, str] = {}
        # Removed entries that were already passed on; searches find them again until they are acknowledged.
        self._removed: set[EntryLocation] = set()
        interval = options.auto_claim_interval_seconds if is_shared else None
        self._next_claim = None if interval is None else time.monotonic() + interval

    def read(self, seconds: float) -> Iterator[EntryPage]:
        """See :meth:`GroupReader.read`."""
        self._find_new_shards()
        for shard, start in list(self._to_join.items()):
            self._group.create(shard, start, create_stream=self._options.create_stream)
            del self._to_join[shard]
            # Entries that are taken over may have any id, so after a lost reply all pending entries are read again.
            self.join(shard, START)
        yield from super().read(seconds)

    def _find_new_shards(self) -> None:
        if not self._finds_new_shards or time.monotonic() < self._next_shard_search:
            return
        self._next_shard_search = time.monotonic() + SHARD_SEARCH_SECONDS
        before = self._group.keys
        for shard, key in self._group.find_shards().items():
            if before.get(shard) != key:
                self._to_join[shard] = START

    def _take_over(self) -> Iterator[EntryPage]:
        interval, idle = self._options.auto_claim_interval_seconds, self._options.auto_claim_idle_seconds
        if self._next_claim is None or interval is None:
            return
        if not self._claim_cursors and time.monotonic() >= self._next_claim:
            self._next_claim = time.monotonic() + interval
            self._claim_cursors = {s: BEGIN for s in sorted(self._joined) if self._group.has_idle_peer(s, idle)}
        room = self._count
        for _ in range(CLAIM_PAGES):
            if not self._claim_cursors or room <= 0:
                return
            shard, cursor = next(iter(self._claim_cursors.items()))
            found = self._group.reclaim(shard, cursor, idle_seconds=idle, count=room)
            entries = [entry for entry in found.entries if (shard, entry[0]) not in self._removed]
            if entries:
                yield EntryPage(shard, entries, is_redelivery=True)
            self._removed.update((shard, entry_id) for entry_id, fields in entries if fields is None)
            room -= len(entries)
            if found.cursor:
                self._claim_cursors[shard] = found.cursor
            else:
                del self._claim_cursors[shard]


class RedisGroupConsumer(DetachableMember):
    """A member of a consumer group of Redis Streams; see :class:`stream_consumers.consumer.Consumer`.

    Every message is delivered at least once (with ``immediate`` at most once): first the messages that are pending for
    this member's name, then those that the group has not delivered to any member. Commits happen within :meth:`next`,
    including while it waits, and in :meth:`close`. A delivered message that is not committed stays pending, and is
    delivered again to the next consumer with the same name, or to a peer that claims it. Two live members must not have
    the same name: when one starts, it would also get the pending messages of the other.

    With ``auto_commit`` ``disabled``, the member is the :class:`stream_consumers.consumer.EntryCommitter` of a tracked
    consumer that reads it.

    A :meth:`seek` or :meth:`rewind` leaves the group: from then on, every message of the assigned shards is read by
    position, and no new message becomes pending. Messages that the group delivered before can still be acknowledged.

    Args:
        url: ``redis://host:6379/orders``.
        mode: ``resumable``: one member. ``load_balanced``: several members share the messages, and take over those of
            dead members.
        group: by default the host's id and ``:r``, or ``:s`` with ``load_balanced`` (SeaStreamer's rule).
        reset: where the group starts if it does not exist at the first :meth:`next`.
        live: wait for more messages; without it, reading ends when the group has delivered all messages.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.
        options: see :class:`stream_consumers.options.RedisGroupOptions`.
        on_dead_letter: called for entries that cannot be read as a message, were trimmed while they were pending, or
            were delivered too often; they are then acknowledged. If it raises, the entry stays pending.

    Raises:
        InvalidOptionError: the mode is ``real_time``, or the group name is empty.
        BrokerUnavailableError, AccessDeniedError: the server returned an error; no message is lost, so call
            :meth:`next` again.
        StreamNotFoundError: from :meth:`next`: the stream of the group does not exist.
        GroupRemovedError: from :meth:`next`: the group or the stream was removed.

    Example::

        url = "redis://localhost:6379/orders"
        options = RedisGroupOptions(auto_commit=AutoCommit.DISABLED)
        with RedisGroupConsumer(url, group="billing", options=options) as consumer:
            for message in consumer:
                bill(message)
                consumer.ack(message)
                consumer.commit()
    """

    is_transactional = False

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
        super().__init__(lambda: RedisConsumer(url, live=live, client=client, on_dead_letter=on_dead_letter))
        self._options = options or RedisGroupOptions()
        mode, reset = MEMBER_MODES.check(mode), choice(AutoStreamReset, reset, option="reset")
        name = MEMBER_MODES.group(mode, group) or ""
        # SeaStreamer's rule for a member without a name.
        consumer = self._options.consumer or (name if mode is ConsumerMode.RESUMABLE else new_consumer_name())
        self._url, self._mode, self._live = url, mode, live
        self._on_dead_letter = on_dead_letter
        self._streams = url.required_streams()
        server = RedisConnection(url, client)
        is_immediate = self._options.auto_commit is AutoCommit.IMMEDIATE
        self._message_field = server.message_field
        self._group = RedisGroup(server, name, consumer, acknowledge_on_read=is_immediate)
        self._acknowledgements = Acknowledgements(self._options)
        self._reader = SharingReader(
            self._group,
            self._options,
            is_shared=mode is ConsumerMode.LOAD_BALANCED,
            start=START if reset is AutoStreamReset.EARLIEST else NOW,
            finds_new_shards=live,
        )
        # A thread that waits for messages holds only _reading, so that it blocks nothing else.
        self._reading, self._committing, self._lock = PollingLock(), threading.Lock(), threading.Lock()
        self._buffer: deque[tuple[EntryLocation, Message | DeadLetter]] = deque()

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

    def _poll(self, seconds: float) -> Message | None:
        self._commit_what_is_due()
        if self._standalone is not None and self._is_detached:
            return self._standalone.next(seconds)
        # After a page without a message, read the next page.
        deadline = time.monotonic() + seconds + self.poll_seconds
        while (message := self._take()) is None and self._read(seconds) and not self._is_detached:
            if time.monotonic() >= deadline:
                return self._take()
            seconds = 0.0
        return message

    def ack(self, message: Message | tuple[Shard, int]) -> None:
        """Acknowledge a message; the next commit sends the acknowledgement to the server.

        Args:
            message: the message, or its shard and sequence.

        Raises:
            InvalidOptionError: auto_commit is ``delayed``.
            NotSubscribedError: the message belongs to another stream.
        """
        self._check_open()
        shard, sequence = (message.shard, message.sequence) if isinstance(message, Message) else message
        location = (shard, to_id(sequence).encode())
        if self._is_detached and shard.stream in self._streams and not self._acknowledgements.is_held(location):
            # The message was read by position, so the group did not deliver it.
            return
        if shard not in self._group.keys:
            raise NotSubscribedError(
                f"{shard} is not read by this consumer", remedy=f"It reads: {', '.join(map(str, self._group.keys))}."
            )
        self._acknowledgements.acknowledge(location)

    def commit(self, positions: Positions | None = None) -> int:
        """Send the acknowledgements to the server; return how many entries are no longer pending.

        The number may be less than the number of acknowledged messages, because a peer may have taken some over.

        Args:
            positions: ignored, because a group whose members share entries has no positions.

        Raises:
            InvalidOptionError: auto_commit is ``delayed`` or ``rolling``.
            GroupRemovedError: the group was removed.
            BrokerUnavailableError: the server does not answer; the next commit sends all of them again.
        """
        self._check_open()
        self._acknowledgements.check_manual()
        with self._committing:
            return self._send(self._acknowledgements.acknowledged())

    def commit_entries(self, entries: Entries) -> None:
        """See :meth:`stream_consumers.consumer.EntryCommitter.commit_entries`.

        The server gets an XACK when a message was acknowledged *and* a commit runs. Until then the message is pending,
        and is delivered again to the next consumer with the same name, or to a peer that takes it over.

        Raises:
            GroupRemovedError: the group was removed.
            BrokerUnavailableError, AccessDeniedError: the server returned an error; the next commit sends them again.
        """
        for shard, sequences in entries.items():
            for sequence in sequences:
                self.ack((shard, sequence))
        self.commit()

    def committed(self) -> Positions:
        """Return no positions, because the server stores and delivers the pending entries."""
        return {}

    def check_waits_for_ack(self) -> None:
        """Raise if the member would commit unfinished messages, so that it cannot be tracked.

        Raises:
            InvalidOptionError: ``auto_commit`` is not ``disabled``.
        """
        if self.auto_commit is not AutoCommit.DISABLED:
            raise InvalidOptionError(
                f"auto_commit of {self} is {self.auto_commit.value!r}: it would not wait for unfinished messages",
                remedy="Give it RedisGroupOptions(auto_commit=AutoCommit.DISABLED).",
            )

    def close(self) -> None:
        """Commit what may be committed, release connections, and end a waiting :meth:`next`.

        These messages stay pending: messages that were read but not delivered to the user; with ``delayed``, messages
        delivered less than ``auto_commit_delay_seconds`` ago; with ``rolling``, messages that were not acknowledged;
        with ``disabled``, messages that no :meth:`commit` covers.

        Raises:
            StreamAssetsError: the last commit failed; all resources are released nevertheless.
        """
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        try:
            with self._committing:
                self._send(self._acknowledgements.due(is_last=True))
        finally:
            self._close_standalone()
            with self._reading.moving():
                self._group.close()

    # committing

    def _commit_what_is_due(self) -> None:
        # If another thread is committing, it commits for all threads.
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

    # leaving the group

    def _detach(self) -> None:
        with self._lock:
            self._is_detached = True
            self._acknowledgements.drop(location for location, _ in self._buffer)
            self._buffer.clear()

    # reading

    def _take(self) -> Message | None:
        """Return the next message of the buffer; call the observer for the dead letters before it."""
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
        """Fill the buffer with a page, waiting at most this long; return whether any entries were read.

        Raises:
            StreamEndedError: no entries were read, and the consumer is not live.
        """
        if not self._reading.acquire(seconds):
            return False
        try:
            self._check_open()
            if self._buffer or self._is_detached:
                return True
            has_entries = False
            for page in self._reader.read(seconds if self._live else 0.0):
                self._receive(page)
                has_entries = True
        except StreamAssetsError:
            self._reader.read_again()
            raise
        finally:
            self._reading.release()
        if not has_entries and not self._live and not self._is_detached:
            raise end_of_stream(f"group {self.group!r}")
        return has_entries

    def _receive(self, page: EntryPage) -> None:
        """Add entries to the buffer, except those that this member already holds."""
        shard, entries, is_redelivery = page
        counts: dict[bytes, int] = {}
        most = self._options.max_deliveries
        if is_redelivery and most is not None:
            counts = self._group.deliveries(shard, [entry_id for entry_id, _ in entries])
        if is_redelivery and self.auto_commit is AutoCommit.IMMEDIATE:
            # The server acknowledges only new entries on reading.
            self._group.acknowledge(shard, [entry_id for entry_id, _ in entries])
        for entry_id, fields in entries:
            if self._acknowledgements.receive((shard, entry_id)):
                item = read_reply(shard, entry_id, fields, self._message_field)
                if most is not None and counts.get(entry_id, 1) > most and isinstance(item, Message):
                    item = _delivered_too_often(item, counts[entry_id], most)
                with self._lock:
                    if self._is_detached:
                        self._acknowledgements.drop([(shard, entry_id)])
                    else:
                        self._buffer.append(((shard, entry_id), item))


def _delivered_too_often(message: Message, count: int, most: int) -> DeadLetter:
    said = f"the message was delivered {counted(count, 'time')}, more often than max_deliveries={most} allows"
    return DeadLetter(message.shard, message.sequence, message.timestamp_ms, message.payload or b"", said)
