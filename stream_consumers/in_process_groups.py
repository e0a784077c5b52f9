"""Groups of consumers in one process, for backends that have none: files and memory (SeaStreamer's file groups)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter

from stream_consumers.consumer import Consumer, Edge
from stream_consumers.consumer_base import PollingConsumer
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Message, Shard
from stream_consumers.options import AutoStreamReset
from stream_consumers.urls import StreamUrl

Open = Callable[[], Consumer]


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Which group: of which file or broker, by which name.

    Args:
        place: the file or broker.
        name: the group's name.
    """

    place: str
    name: str


@dataclass(frozen=True, slots=True)
class GroupReading:
    """How a group reads, the same for all of its members.

    Args:
        streams: which streams.
        reset: where it starts.
        live: whether it waits at the end.
    """

    streams: frozenset[str]
    reset: AutoStreamReset
    live: bool


@dataclass(eq=False)
class _Member:
    """Messages that are one member's and not handed out yet, each with its number in the order of reading."""

    queue: deque[tuple[int, Message]] = field(default_factory=deque)


class SharedGroup:
    """One reader and the members that it reads for. Whoever wants a message and finds none reads on for all.

    Args:
        reading: how it reads.
        reader: what it reads with; closed with the last member.
    """

    def __init__(self, reading: GroupReading, reader: Consumer) -> None:
        self.reading = reading
        self._reader = reader
        self._changed = threading.Condition()
        self._members: list[_Member] = []
        self._is_reading = False
        self._count = 0

    def join(self) -> _Member:
        """Add a member; it shares in what is read from now on."""
        member = _Member()
        with self._changed:
            self._members.append(member)
        return member

    def leave(self, member: _Member) -> bool:
        """Remove a member, dealing what it was not handed out to the others; whether it was the last one."""
        with self._changed:
            if member not in self._members:
                return False
            self._members.remove(member)
            for number, message in member.queue:
                self._deal(number, message)
            member.queue.clear()
            for other in self._members:
                other.queue = deque(sorted(other.queue, key=itemgetter(0)))
            self._changed.notify_all()
            return not self._members

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def take(self, member: _Member, seconds: float) -> tuple[Message | None, bool]:
        """The member's next message, waiting for it at most so long, and whether any message was read.

        Raises:
            StreamEndedError: the stream has ended, and nothing is left for this member.
        """
        with self._changed:
            if not member.queue and self._is_reading:
                self._changed.wait(seconds)
            if member.queue or self._is_reading or member not in self._members:
                return self._pop(member), False
            self._is_reading = True
        message = None
        try:
            message = self._reader.next(seconds)
        finally:
            with self._changed:
                self._is_reading = False
                if message is not None:
                    self._count += 1
                    self._deal(self._count, message)
                self._changed.notify_all()
        with self._changed:
            return self._pop(member), message is not None

    def _deal(self, number: int, message: Message) -> None:
        """Give a message to the member whose turn its sequence is."""
        if self._members:
            self._members[message.sequence % len(self._members)].queue.append((number, message))

    @staticmethod
    def _pop(member: _Member) -> Message | None:
        return member.queue.popleft()[1] if member.queue else None


_groups: dict[GroupKey, SharedGroup] = {}
_groups_lock = threading.Lock()


class SharedGroupConsumer(PollingConsumer):
    """A member of a group in this process; see :class:`stream_consumers.consumer.Consumer`.

    The members of a group share one reader. A message goes to member number ``sequence % members``, in the order in
    which they joined, as many as there are when it is read (SeaStreamer's rule). What belongs to a member that does not
    ask is kept for it; when it leaves, the others get it. The group is forgotten with its last member: files and memory
    remember no position, so that a new group starts where ``reset`` says.

    A :meth:`seek` or :meth:`rewind` leaves the group; from then on, every message of the assigned shards is read.

    Args:
        url: which streams of which place; the same for all members.
        group: the group's name.
        reset: where the group starts; the same for all members.
        live: wait at the end; the same for all members.
        open_consumer: opens a consumer that reads everything; that of the first member reads for the group (and tells
            its observer of damage), that of a later one when it leaves the group.

    Raises:
        InvalidOptionError: members that would read differently.

    Example:
        >>> from stream_consumers.create import create_consumer, create_producer
        >>> from stream_consumers.options import ConsumerMode
        >>> def join():
        ...     return create_consumer("memory://pets/cats", mode=ConsumerMode.LOAD_BALANCED, group="walkers")
        >>> with create_producer("memory://pets/cats") as producer, join() as chip, join() as dale:
        ...     receipts = [producer.send(b"%d" % number) for number in range(4)]
        ...     [chip.next().text(), chip.next().text()], [dale.next().text(), dale.next().text()]
        (['0', '2'], ['1', '3'])
    """

    poll_seconds = 0.05

    def __init__(self, url: StreamUrl, *, group: str, reset: AutoStreamReset, live: bool, open_consumer: Open) -> None:
        super().__init__()
        reading = GroupReading(frozenset(url.required_streams()), reset, live)
        self._key = GroupKey(f"{url.protocol}://{','.join(url.nodes)}", group)
        self._open, self._live = open_consumer, live
        self._moving = threading.Lock()
        self._alone: Consumer | None = None
        self._is_detached = False
        with _groups_lock:
            found = _groups.get(self._key)
            if found is None:
                found = _groups[self._key] = SharedGroup(reading, open_consumer())
            elif found.reading != reading:
                raise InvalidOptionError(
                    f"group {group!r} of {url} reads otherwise: {found.reading}",
                    remedy="Give all members the same streams, reset and live, or another group.",
                )
            self._group = found
            self._member = found.join()

    @property
    def group(self) -> str:
        """The group's name."""
        return self._key.name

    def _poll(self, seconds: float) -> Message | None:
        if self._is_detached and self._alone is not None:
            return self._alone.next(seconds)
        while True:
            message, was_read = self._group.take(self._member, seconds)
            # A message of another member is no reason to give up before the next one.
            if message is not None or not was_read:
                return message
            self._check_open()

    def seek(self, moment: datetime) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.seek`; leaves the group."""
        with self._moving:
            self._own().seek(moment)
            self._detach()

    def rewind(self, to: Edge | int) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.rewind`; leaves the group."""
        with self._moving:
            self._own().rewind(to)
            self._detach()

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`."""
        with self._moving:
            self._own().assign(shard)

    def unassign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`."""
        with self._moving:
            self._own().unassign(shard)

    def close(self) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.close`; what was not handed out goes to the other members."""
        self._closed.set()
        self._leave()
        with self._moving:
            if self._alone is not None:
                self._alone.close()

    def _own(self) -> Consumer:
        self._check_open()
        if self._alone is None:
            self._alone = self._open()
        return self._alone

    def _detach(self) -> None:
        self._is_detached = True
        self._leave()

    def _leave(self) -> None:
        with _groups_lock:
            if not self._group.leave(self._member):
                return
            _groups.pop(self._key, None)
        self._group.close()
