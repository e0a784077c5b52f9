"""What every consumer does alike with its messages and its shards."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import ClassVar, Generic, TypeVar

from stream_consumers.capabilities import Positions, check_positions
from stream_consumers.closing import ClosesOnExit
from stream_consumers.consumer import Consumer, DeadLetterObserver, Edge, rewind_place
from stream_consumers.errors import InvalidOptionError, NotSubscribedError, OutOfBoundsError, StreamEndedError
from stream_consumers.messages import INTERNAL_KEY, WILDCARD, DeadLetter, Message, Shard, check_shard
from stream_consumers.options import check_timeout
from stream_consumers.polling_lock import PollingLock

POLL_SECONDS = 0.1
Item = TypeVar("Item")


class PollingReader(ClosesOnExit, ABC, Generic[Item]):
    """A reader that says how it polls once; waiting, the timeout and the closed reader are the same for all."""

    poll_seconds: ClassVar[float] = POLL_SECONDS
    """The longest wait of a single poll."""
    remedy_if_closed: ClassVar[str] = "Create a new one."

    def __init__(self) -> None:
        self._closed = threading.Event()

    @abstractmethod
    def _poll(self, seconds: float) -> Item | None:
        """Look once for an item.

        Any number of threads call it. :meth:`_poll_until` calls it with 0 first, and waits only if there is nothing. It
        may return ``None`` early: it is called again until the time is over, and then once more with 0. What was found
        but is not for this reader (a dead letter, another member's message) does not count.

        A poll that waits holds no lock that one with 0 waits for; where the client serves one thread at a time, take a
        :class:`stream_consumers.polling_lock.PollingLock`.

        Args:
            seconds: the most that it may wait; 0 does not wait at all.

        Raises:
            StreamEndedError: the stream has an end, and it was reached; see :func:`end_of`.
        """

    def _poll_until(self, timeout_seconds: float | None) -> Item | None:
        """Poll until there is an item, or the time is over; ``None`` waits without an end."""
        deadline = math.inf if timeout_seconds is None else time.monotonic() + check_timeout(timeout_seconds)
        seconds = 0.0
        while True:
            self._check_open()
            item = self._poll(seconds)
            if item is not None:
                return item
            left = max(0.0, deadline - time.monotonic())
            if not (seconds or left):
                return None
            seconds = min(self.poll_seconds, left)

    def _check_open(self) -> None:
        """Refuse a reader that was closed; a poll that takes a lock asks again when it has it."""
        if self._closed.is_set():
            raise StreamEndedError("the consumer was closed", remedy=self.remedy_if_closed)


class PollingConsumer(PollingReader[Message]):
    """A consumer that says how it polls once.

    Example:
        >>> class Countdown(PollingConsumer):
        ...     left = 2
        ...
        ...     def _poll(self, seconds):
        ...         if not self.left:
        ...             raise end_of("the countdown")
        ...         self.left -= 1
        ...         return Message(Shard("countdown"), self.left, 0, b"")
        ...
        ...     def close(self):
        ...         self._closed.set()
        >>> with Countdown() as countdown:
        ...     [message.sequence for message in countdown]
        [1, 0]
        >>> countdown.next(timeout_seconds=0)
        Traceback (most recent call last):
        stream_consumers.errors.StreamEndedError: the consumer was closed. Create a new one.
    """

    def next(self, timeout_seconds: float | None = None) -> Message | None:
        """See :meth:`stream_consumers.consumer.Consumer.next`."""
        return self._poll_until(timeout_seconds)

    @property
    def group(self) -> str | None:
        """The group's name; ``None`` without one."""
        return None

    def ack(self, message: Message) -> object:
        """See :meth:`stream_consumers.consumer.Consumer.ack`; without a group it is refused."""
        raise self._no_group()

    def commit(self) -> object:
        """See :meth:`stream_consumers.consumer.Consumer.commit`; without a group it is refused."""
        raise self._no_group()

    def _no_group(self) -> InvalidOptionError:
        return InvalidOptionError(
            f"{type(self).__name__} has no group that could remember what is done",
            remedy="Use a mode with a group, or a TrackedConsumer.",
        )

    def __iter__(self) -> Iterator[Message]:
        while True:
            try:
                message = self.next()
            except StreamEndedError:
                return
            if message is not None:
                yield message


def end_of(stream: object = "the stream") -> StreamEndedError:
    """What a poll raises when everything was read and nothing is waited for.

    Example:
        >>> end_of("orders").what
        'orders has no more messages'
    """
    return StreamEndedError(f"{stream} has no more messages", remedy="Rewind, or open it live to wait for more.")


def no_message(place: str, stream: object = "the stream") -> OutOfBoundsError:
    """What a seek or rewind raises that finds no message.

    Args:
        place: where it looked, like "at or after 2026-01-01".
        stream: what was read.

    Example:
        >>> no_message("from sequence 7 on", "orders").what
        'orders has no message from sequence 7 on'
    """
    return OutOfBoundsError(f"{stream} has no message {place}", remedy="Rewind to the end to wait for newer messages.")


class Assignment:
    """The shards that a consumer was told to read: all that there are, until one is assigned or unassigned.

    A choice is for the next seek or rewind; the shards that are read until then are :meth:`is_read`.

    Args:
        streams: those that the consumer is for; with the wildcard among them, all but SeaStreamer's own.

    Example:
        >>> assignment = Assignment(["orders"])
        >>> assignment.unassign(Shard("orders", 1), [Shard("orders", 0), Shard("orders", 1)])
        >>> assignment.of([Shard("orders", 0), Shard("orders", 1), Shard("clicks")])
        [Shard(stream='orders', id=0)]
        >>> before = assignment.is_read(Shard("orders", 1))
        >>> assignment.begin()
        >>> before, assignment.is_read(Shard("orders", 1))
        (True, False)
    """

    def __init__(self, streams: Iterable[str]) -> None:
        self._streams = frozenset(streams)
        self._only: frozenset[Shard] | None = None
        self._read: frozenset[Shard] | None = None

    @property
    def is_for_all(self) -> bool:
        """Whether it is for all streams."""
        return WILDCARD in self._streams

    def subscribes(self, stream: str) -> bool:
        """Whether it is for this stream."""
        return stream in self._streams or (self.is_for_all and stream != INTERNAL_KEY)

    @property
    def chosen(self) -> frozenset[Shard] | None:
        """The shards that were chosen; ``None`` if none were, so that new ones are read, too."""
        return self._only

    def __contains__(self, shard: object) -> bool:
        is_subscribed = isinstance(shard, Shard) and self.subscribes(shard.stream)
        return is_subscribed and (self._only is None or shard in self._only)

    def is_read(self, shard: Shard) -> bool:
        """Whether it was to be read at the last seek or rewind."""
        return self.subscribes(shard.stream) and (self._read is None or shard in self._read)

    @property
    def is_all_read(self) -> bool:
        """Whether all shards were to be read at the last seek or rewind, so that new ones are, too."""
        return self._read is None

    def begin(self) -> None:
        """A seek or rewind: what is chosen is read from here on."""
        self._read = self._only

    def of(self, shards: Iterable[Shard]) -> list[Shard]:
        """Those of ``shards`` that are to be read, in order."""
        return sorted(shard for shard in shards if shard in self)

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`."""
        if not self.subscribes(check_shard(shard).stream):
            raise NotSubscribedError(
                f"{shard} is not of a subscribed stream", remedy=f"Use one of: {', '.join(sorted(self._streams))}."
            )
        self._only = (self._only or frozenset()) | {shard}

    def unassign(self, shard: Shard, shards: Iterable[Shard]) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`.

        Args:
            shard: which one.
            shards: all that there are.
        """
        assigned = frozenset(self.of(shards)) if self._only is None else self._only
        if shard not in assigned:
            raise NotSubscribedError(
                f"{shard} is not assigned", remedy=f"Assigned are: {', '.join(map(str, sorted(assigned)))}."
            )
        if len(assigned) == 1:
            raise NotSubscribedError(f"{shard} is the last shard", remedy="Close the consumer instead.")
        self._only = assigned - {shard}


class LockedConsumer(PollingConsumer):
    """A consumer whose client serves one thread at a time.

    Args:
        streams: the streams that it is for.
        on_dead_letter: called for messages that cannot be used.
    """

    def __init__(self, streams: Iterable[str], on_dead_letter: DeadLetterObserver) -> None:
        super().__init__()
        self._lock = PollingLock()
        self._assignment = Assignment(streams)
        self._on_dead_letter = on_dead_letter
        self._known: frozenset[Shard] = frozenset()

    @abstractmethod
    def _take(self, seconds: float) -> Message | DeadLetter | None:
        """Look once for an item, as :meth:`_poll` does; only one thread at a time calls it."""

    def _poll(self, seconds: float) -> Message | None:
        while isinstance(item := self._take_locked(seconds), DeadLetter):
            self._on_dead_letter(item)
        return item

    def _take_locked(self, seconds: float) -> Message | DeadLetter | None:
        if not self._lock.acquire(seconds):
            return None
        try:
            self._check_open()
            return self._take(seconds)
        finally:
            self._lock.release()

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`."""
        with self._lock.moving():
            self._check_open()
            self._assignment.assign(shard)

    def unassign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`."""
        with self._lock.moving():
            self._check_open()
            self._assignment.unassign(shard, self._known)


class LeavingMember(PollingConsumer):
    """A member of a group that leaves it with a seek or rewind: from then on it reads by position.

    Args:
        open_alone: opens the consumer that reads by position; called when that is needed first.
    """

    def __init__(self, open_alone: Callable[[], Consumer]) -> None:
        super().__init__()
        self._open_alone = open_alone
        self._moving = threading.Lock()
        self._alone: Consumer | None = None
        self._is_detached = False

    @abstractmethod
    def _detach(self) -> None:
        """Leave the group, and set ``_is_detached``."""

    def seek(self, moment: datetime) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.seek`; leaves the group."""
        with self._moving:
            self._by_position().seek(moment)
            self._detach()

    def rewind(self, to: Edge | int) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.rewind`; leaves the group."""
        to = rewind_place(to)
        with self._moving:
            self._by_position().rewind(to)
            self._detach()

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`."""
        with self._moving:
            self._by_position().assign(shard)

    def unassign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`."""
        with self._moving:
            self._by_position().unassign(shard)

    def _by_position(self) -> Consumer:
        self._check_open()
        if self._alone is None:
            self._alone = self._open_alone()
        return self._alone

    def _close_alone(self) -> None:
        with self._moving:
            if self._alone is not None:
                self._alone.close()


def positions_to_go_to(positions: Positions, read: frozenset[Shard], ends: Callable[[], Positions]) -> Positions:
    """Where a consumer can continue that is asked to go to these positions: as :meth:`Consumer.rewind` for each shard.

    Args:
        positions: as asked for; one before everything, like -1, is the beginning.
        read: the shards that the consumer reads.
        ends: tells the sequence behind the last message of each shard. There is one to go to; what is behind it is not.

    Raises:
        NotSubscribedError: naming the first shard that is not read.
        OutOfBoundsError: naming the first position behind the end of its shard.

    Example:
        >>> orders = Shard("orders")
        >>> positions_to_go_to({orders: -1}, frozenset([orders]), lambda: {orders: 3})
        {Shard(stream='orders', id=0): 0}
    """
    check_positions(positions)
    unknown = sorted(positions.keys() - read)
    if unknown:
        raise NotSubscribedError(
            f"{unknown[0]} is not read by this consumer", remedy=f"Read are: {', '.join(map(str, sorted(read)))}."
        )
    found = {shard: max(0, position) for shard, position in positions.items()}
    if any(found.values()):
        known = ends()
        for shard, position in sorted(found.items()):
            if position > known.get(shard, 0):
                raise OutOfBoundsError(
                    f"{shard} ends before the position {position}",
                    remedy="Go to the end of the shard at most; was the stream made anew?",
                    end=known.get(shard, 0),
                )
    return found
