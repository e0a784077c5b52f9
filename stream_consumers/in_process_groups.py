"""Consumer groups within one process, for backends without groups: files and memory (SeaStreamer's file groups)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from stream_consumers.consumer import SHORT_WAIT_SECONDS, Consumer, DetachableMember
from stream_consumers.errors import InvalidOptionError, StreamEndedError
from stream_consumers.messages import Message
from stream_consumers.options import AutoStreamReset
from stream_consumers.urls import StreamUrl

OpenConsumer = Callable[[], Consumer]


class GroupSettings(NamedTuple):
    """The settings of a group, the same for all of its members.

    Args:
        streams: the streams that it reads.
        reset: where it starts.
        live: whether it waits for more messages at the end.
    """

    streams: frozenset[str]
    reset: AutoStreamReset
    live: bool


@dataclass(eq=False)
class _Member:
    """A member, and a heap of the messages that wait for it, numbered in the order of reading."""

    # The consumer, by a weak reference: a consumer that was dropped without being closed is noticed.
    owner: weakref.ref[object]
    queue: list[tuple[int, Message]] = field(default_factory=list)


class SharedGroup:
    """One reader, and the members that share its messages. A member that waits for a message reads for all members.

    Args:
        settings: the settings of the group.
        reader: the consumer that reads for the group; it is closed with the last member.
    """

    def __init__(self, settings: GroupSettings, reader: Consumer) -> None:
        self.settings = settings
        self._reader = reader
        self._changed = threading.Condition()
        self._members: list[_Member] = []
        self._is_reading = self._is_brief = False
        self._count = 0

    @property
    def has_members(self) -> bool:
        """Whether the group has a member that was not dropped."""
        with self._changed:
            return any(member.owner() is not None for member in self._members)

    def join(self, owner: object) -> _Member:
        """Add a member; it gets its share of messages from now on, until it leaves or ``owner`` is dropped."""
        member = _Member(weakref.ref(owner))
        with self._changed:
            self._members.append(member)
        return member

    def leave(self, member: _Member) -> bool:
        """Remove a member, and assign its waiting messages to the others; return whether it was the last one."""
        with self._changed:
            if member not in self._members:
                return False
            self._remove(member)
            return not self._members

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def take(self, member: _Member, seconds: float) -> tuple[Message | None, bool]:
        """Return the member's next message, waiting at most ``seconds``, and whether any message was read.

        Raises:
            StreamEndedError: the stream has ended, and no message waits for this member.
        """
        with self._changed:
            for dropped in [other for other in self._members if other.owner() is None]:
                self._remove(dropped)
            if not member.queue and self._is_reading:
                self._changed.wait(seconds or (SHORT_WAIT_SECONDS if self._is_brief else 0.0))
            if member.queue or self._is_reading or member not in self._members:
                return self._pop(member), False
            self._is_reading, self._is_brief = True, not seconds
        message = None
        try:
            message = self._reader.next(seconds)
        finally:
            with self._changed:
                self._is_reading = False
                if message is not None:
                    self._count += 1
                    self._assign_message(self._count, message)
                self._changed.notify_all()
        with self._changed:
            return self._pop(member), message is not None

    def _remove(self, member: _Member) -> None:
        self._members.remove(member)
        for number, message in member.queue:
            self._assign_message(number, message)
        member.queue.clear()
        self._changed.notify_all()

    def _assign_message(self, number: int, message: Message) -> None:
        """Assign a message to the member that its sequence selects."""
        if self._members:
            heappush(self._members[message.sequence % len(self._members)].queue, (number, message))

    @staticmethod
    def _pop(member: _Member) -> Message | None:
        return heappop(member.queue)[1] if member.queue else None


# The groups by file or broker and group name. Members keep their group alive.
_groups: weakref.WeakValueDictionary[tuple[str, str], SharedGroup] = weakref.WeakValueDictionary()
_groups_lock = threading.Lock()


class SharedGroupConsumer(DetachableMember):
    """A member of a group in this process; see :class:`stream_consumers.consumer.Consumer`.

    The members of a group share one reader. A message goes to member number ``sequence % members``, in the order in
    which they joined; members are counted when the message is read (SeaStreamer's rule). Messages wait until their
    member reads them; when it leaves, or is dropped without being closed, the other members get them. The group ends
    with its last member. Files and memory store no positions of groups, so ``reset`` decides where a new group starts.

    A :meth:`seek` or :meth:`rewind` leaves the group; the consumer then reads every message of the assigned shards. A
    thread that is waiting in :meth:`next` continues there.

    Args:
        url: the file or broker and its streams; the same for all members.
        group: the group's name.
        reset: where the group starts; the same for all members.
        live: wait for more messages at the end; the same for all members.
        open_consumer: opens a consumer that reads everything. The consumer of the first member reads for the group, and
            reports dead letters to its observer; the consumer of a later member is opened when it leaves the group.

    Raises:
        InvalidOptionError: the settings differ from those of the existing group.

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

    def __init__(
        self, url: str | StreamUrl, *, group: str, reset: AutoStreamReset, live: bool, open_consumer: OpenConsumer
    ) -> None:
        url = StreamUrl.parse(url)
        super().__init__(open_consumer)
        settings = GroupSettings(frozenset(url.required_streams()), reset, live)
        self._key = (f"{url.protocol}://{','.join(url.nodes)}", group)
        with _groups_lock:
            found = _groups.get(self._key)
            if found is not None and not found.has_members:
                found.close()
                found = None
            if found is None:
                found = _groups[self._key] = SharedGroup(settings, open_consumer())
            elif found.settings != settings:
                raise InvalidOptionError(
                    f"group {group!r} of {url} has other settings: {found.settings}",
                    remedy="Give all members the same streams, reset and live, or another group.",
                )
            self._group = found
            self._member = found.join(self)

    @property
    def group(self) -> str:
        """The group's name."""
        return self._key[1]

    def ack(self, message: Message) -> None:
        """Do nothing: the group stores nothing, and a message is done once it is delivered."""
        self._check_open()

    def commit(self) -> int:
        """Do nothing, see :meth:`ack`."""
        self._check_open()
        return 0

    def _poll(self, seconds: float) -> Message | None:
        if self._is_detached and self._standalone is not None:
            return self._standalone.next(seconds)
        while True:
            try:
                message, was_read = self._group.take(self._member, seconds)
            except StreamEndedError:
                if not self._is_detached:
                    raise
                # A seek or rewind left the group, which ended with its last member. This thread continues there.
                return None
            # Messages for other members do not count: read the next one.
            if message is not None or not was_read:
                return message
            self._check_open()

    def close(self) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.close`; the other members get its waiting messages."""
        self._closed.set()
        self._leave()
        self._close_standalone()

    def _detach(self) -> None:
        self._is_detached = True
        self._leave()

    def _leave(self) -> None:
        with _groups_lock:
            if not self._group.leave(self._member):
                return
            _groups.pop(self._key, None)
        self._group.close()
