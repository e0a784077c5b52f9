"""The interface of consumers, which read a stream message by message and behave the same on every backend.

Users call :class:`Consumer`, and backends extend it. This module also has the code that backends share (assigned
shards, locks for clients), the protocols for optional features (:class:`PositionedConsumer` and others), and the
protocol for storing positions of groups (:class:`PositionCommitter`).
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from stream_consumers.closing import ClosesOnExit
from stream_consumers.errors import InvalidOptionError, NotSubscribedError, OutOfBoundsError, StreamEndedError
from stream_consumers.messages import INTERNAL_KEY, WILDCARD, DeadLetter, Message, Shard, check_shard
from stream_consumers.options import check_count, check_timeout, choice

POLL_SECONDS = 0.1
# How long a poll with timeout 0 waits for another poll with timeout 0 that holds the lock.
SHORT_WAIT_SECONDS = 0.05
DeadLetterObserver = Callable[[DeadLetter], None]
Positions = Mapping[Shard, int]
"""The next sequence to read, per shard."""
Entries = Mapping[Shard, Sequence[int]]
"""Sequences of messages, per shard."""
Item = TypeVar("Item")
_log = logging.getLogger(__name__)


class Edge(enum.Enum):
    """The beginning and the end of a stream, as targets of a rewind.

    Example:
        >>> from stream_consumers.create import create_consumer
        >>> with create_consumer("file://orders.ss/orders", live=False) as orders:
        ...     orders.rewind(Edge.END)
        ...     list(orders)
        []
    """

    BEGINNING = "beginning"
    END = "end"


def rewind_target(to: object) -> Edge | int:
    """Return the target of a rewind: an edge, which may be given as text, or a sequence.

    Raises:
        InvalidOptionError: the value is neither.

    Example:
        >>> rewind_target("end"), rewind_target(7)
        (<Edge.END: 'end'>, 7)
    """
    if isinstance(to, int) and not isinstance(to, bool):
        return to
    return choice(Edge, to, option="to", others="a sequence, which is a whole number, or ")


def log_dead_letter(dead_letter: DeadLetter) -> None:
    """Log one warning per dead letter, without its bytes; the default observer.

    Example:
        >>> from stream_consumers.create import create_consumer
        >>> with create_consumer("file://orders.ss/orders", live=False, on_dead_letter=log_dead_letter) as orders:
        ...     len(list(orders))
        3
    """
    _log.warning("dead letter in %s at offset %s: %s", dead_letter.shard, dead_letter.offset, dead_letter.error)


class PollingLock:
    """A lock that lets one thread at a time use a client, without long waits for a thread that waits for a message.

    A polling thread holds the lock while it waits for a message. Meanwhile, a poll with timeout 0 fails at once, and a
    thread that moves the client (by a seek, a pause or closing) gets the lock next: it waits for one poll at most,
    however many threads poll. The lock is re-entrant, because clients call back while they are polled.

    Example:
        >>> lock = PollingLock()
        >>> lock.acquire(5.0), lock.acquire(0)
        (True, True)
        >>> other = threading.Thread(target=lambda: print(lock.acquire(0)))
        >>> other.start(); other.join()
        False
        >>> lock.release(); lock.release()
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._owner: int | None = None
        self._depth = 0
        self._is_brief = False
        self._movers = 0

    def acquire(self, seconds: float) -> bool:
        """Acquire the lock for a poll of at most this many seconds; return whether it was acquired within this time.

        With 0, the call fails if a waiting poll holds the lock. If another poll with timeout 0 holds it, the call waits
        up to :data:`SHORT_WAIT_SECONDS`, so that a thread does not take another thread's short poll for the end of the
        stream.
        """
        me = threading.get_ident()
        with self._changed:
            if self._owner != me:
                deadline = time.monotonic() + (seconds or SHORT_WAIT_SECONDS)
                while self._owner is not None or self._movers:
                    left = deadline - time.monotonic()
                    if left <= 0 or not (seconds or (self._is_brief and not self._movers)):
                        return False
                    self._changed.wait(left)
                self._owner, self._is_brief = me, not seconds
            self._depth += 1
            return True

    def release(self) -> None:
        """Release the lock, once for each acquisition."""
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Block every poll within the context, so that the client can be moved."""
        me = threading.get_ident()
        with self._changed:
            if self._owner != me:
                self._movers += 1
                try:
                    self._changed.wait_for(lambda: self._owner is None)
                finally:
                    self._movers -= 1
                    self._changed.notify_all()
                self._owner, self._is_brief = me, False
            self._depth += 1
        try:
            yield
        finally:
            self.release()


class PollingReader(ClosesOnExit, ABC, Generic[Item]):
    """A reader whose subclass implements a single poll; waiting, timeouts and closing are implemented here."""

    poll_seconds: ClassVar[float] = POLL_SECONDS
    """The longest wait of a single poll, in seconds."""
    remedy_if_closed: ClassVar[str] = "Create a new one."

    def __init__(self) -> None:
        self._closed = threading.Event()

    @abstractmethod
    def _poll(self, seconds: float) -> Item | None:
        """Poll once for an item.

        Any number of threads may call this method. :meth:`_poll_until` calls it with 0 first, and waits only if that
        finds nothing. It may return ``None`` early: it is called again until the timeout, and then once more with 0.
        An item that is not for this reader (a dead letter, another member's message) does not count as found.

        A waiting poll must not hold a lock that a poll with 0 waits for. If the client serves one thread at a time,
        use a :class:`stream_consumers.consumer.PollingLock`.

        Args:
            seconds: the longest wait; 0 does not wait.

        Raises:
            StreamEndedError: the stream has an end, and it was reached; see :func:`end_of_stream`.
        """

    def _poll_until(self, timeout_seconds: float | None) -> Item | None:
        """Poll until an item arrives or the timeout passes; ``None`` waits without a limit."""
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
        """Raise if the reader was closed; a poll that takes a lock calls this again once it has the lock."""
        if self._closed.is_set():
            raise StreamEndedError("the consumer was closed", remedy=self.remedy_if_closed)


class Consumer(PollingReader[Message]):
    """Reads one message at a time. Close it when done; it is a context manager and an iterator.

    Methods mean the same on every backend: a rewind to n delivers n first (inclusive), and a seek to t delivers the
    first message with a timestamp at or after t.

    With a group (modes ``resumable`` and ``load_balanced``) the consumer is a member of it, and :meth:`ack` and
    :meth:`commit` report finished messages. Groups store different state. Kafka stores a position for each shard:
    acknowledging a message also acknowledges all messages before it in its shard. With a
    :class:`stream_consumers.tracking.consumer.TrackedConsumer`, messages can be finished in any order. Redis stores the
    state of each entry, and ``group_options`` decide whether the user calls ``ack`` and ``commit``. Groups of files,
    memory and pipes live as long as their members and store nothing.

    A backend implements the abstract methods; one with groups also :attr:`group`, :meth:`ack` and :meth:`commit`.

    Example:
        >>> from stream_consumers.create import create_consumer
        >>> with create_consumer("file://orders.ss/orders", live=False) as orders:
        ...     first = orders.next(timeout_seconds=1)
        ...     print(first.shard, first.sequence, first.text())
        ...     orders.rewind(3)
        ...     [message.sequence for message in orders]
        orders/0 1 {"id": 0}
        [3]
    """

    def next(self, timeout_seconds: float | None = None) -> Message | None:
        """Return the next message of the assigned shards.

        Args:
            timeout_seconds: how long to wait; ``None`` waits until a message arrives or the stream ends, 0 does not
                wait.

        Returns:
            The message, or ``None`` if none arrived in time.

        Raises:
            StreamEndedError: the stream has an end, and it was reached.
        """
        return self._poll_until(timeout_seconds)

    @abstractmethod
    def seek(self, moment: datetime) -> None:
        """Continue at the first message with a timestamp at or after ``moment``, in every assigned shard.

        Raises:
            OutOfBoundsError: no assigned shard has such a message; the position does not change.
        """

    @abstractmethod
    def rewind(self, to: Edge | int) -> None:
        """Continue at the beginning, at the end, or at a sequence (inclusive), in every assigned shard.

        Raises:
            OutOfBoundsError: no assigned shard has a message at or after that sequence; the position does not change.
        """

    @abstractmethod
    def assign(self, shard: Shard) -> None:
        """Also read this shard, starting with the next seek or rewind.

        Raises:
            NotSubscribedError: the consumer does not read the stream of this shard.
        """

    @abstractmethod
    def unassign(self, shard: Shard) -> None:
        """Stop reading this shard, starting with the next seek or rewind.

        Raises:
            NotSubscribedError: the shard is not assigned, or it is the last assigned shard.
        """

    @property
    def group(self) -> str | None:
        """The group's name; ``None`` without a group."""
        return None

    def ack(self, message: Message) -> object:
        """Mark a message as done; the next commit reports it to the group.

        Raises:
            InvalidOptionError: the consumer has no group, or its ``group_options`` acknowledge automatically.
            NotSubscribedError: the consumer does not read the stream of the message.
        """
        raise self._no_group()

    def commit(self) -> object:
        """Commit the acknowledged messages to the group; return how many positions or entries were committed.

        Raises:
            InvalidOptionError: the consumer has no group, or its ``group_options`` commit automatically.
            StreamAssetsError: the commit failed; the next commit includes the same messages.
        """
        raise self._no_group()

    def _no_group(self) -> InvalidOptionError:
        return InvalidOptionError(
            f"{type(self).__name__} has no group that could store what is done",
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


def end_of_stream(stream: object = "the stream") -> StreamEndedError:
    """Return the error of a poll at the end of a stream that is not read live.

    Example:
        >>> end_of_stream("orders").what
        'orders has no more messages'
    """
    return StreamEndedError(f"{stream} has no more messages", remedy="Rewind, or open it live to wait for more.")


def no_message_error(place: str, stream: object = "the stream") -> OutOfBoundsError:
    """Return the error of a seek or rewind that finds no message.

    Args:
        place: the place that was searched, such as "at or after 2026-01-01".
        stream: the stream that was searched.

    Example:
        >>> no_message_error("from sequence 7 on", "orders").what
        'orders has no message from sequence 7 on'
    """
    return OutOfBoundsError(f"{stream} has no message {place}", remedy="Rewind to the end to wait for newer messages.")


class Assignment:
    """The shards that a consumer reads: all shards of its streams, until one is assigned or unassigned.

    A change takes effect at the next seek or rewind; until then, :meth:`is_read` returns which shards are read.

    Args:
        streams: the streams of the consumer; the wildcard includes all streams except SeaStreamer's own.

    Example:
        >>> assignment = Assignment(["orders"])
        >>> assignment.unassign(Shard("orders", 1), [Shard("orders", 0), Shard("orders", 1)])
        >>> assignment.select([Shard("orders", 0), Shard("orders", 1), Shard("clicks")])
        [Shard(stream='orders', id=0)]
        >>> before = assignment.is_read(Shard("orders", 1))
        >>> assignment.apply()
        >>> before, assignment.is_read(Shard("orders", 1))
        (True, False)
    """

    def __init__(self, streams: Iterable[str]) -> None:
        self._streams = frozenset(streams)
        self._chosen: frozenset[Shard] | None = None
        self._read: frozenset[Shard] | None = None

    @property
    def has_wildcard(self) -> bool:
        """Whether the consumer reads all streams."""
        return WILDCARD in self._streams

    def subscribes(self, stream: str) -> bool:
        """Return whether the consumer reads this stream."""
        return stream in self._streams or (self.has_wildcard and stream != INTERNAL_KEY)

    @property
    def chosen(self) -> frozenset[Shard] | None:
        """The chosen shards; ``None`` if none were chosen, so that new shards are read as well."""
        return self._chosen

    def __contains__(self, shard: object) -> bool:
        is_subscribed = isinstance(shard, Shard) and self.subscribes(shard.stream)
        return is_subscribed and (self._chosen is None or shard in self._chosen)

    def is_read(self, shard: Shard) -> bool:
        """Return whether the shard is read since the last seek or rewind."""
        return self.subscribes(shard.stream) and (self._read is None or shard in self._read)

    @property
    def is_all_read(self) -> bool:
        """Whether all shards are read since the last seek or rewind, so that new shards are read as well."""
        return self._read is None

    def apply(self) -> None:
        """Start reading the chosen shards, at a seek or rewind."""
        self._read = self._chosen

    def select(self, shards: Iterable[Shard]) -> list[Shard]:
        """Return the chosen shards among ``shards``, in order."""
        return sorted(shard for shard in shards if shard in self)

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`."""
        if not self.subscribes(check_shard(shard).stream):
            raise NotSubscribedError(
                f"{shard} does not belong to a subscribed stream",
                remedy=f"Use one of: {', '.join(sorted(self._streams))}.",
            )
        self._chosen = (self._chosen or frozenset()) | {shard}

    def unassign(self, shard: Shard, shards: Iterable[Shard]) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`.

        Args:
            shard: the shard.
            shards: all existing shards.
        """
        assigned = frozenset(self.select(shards)) if self._chosen is None else self._chosen
        if shard not in assigned:
            raise NotSubscribedError(
                f"{shard} is not assigned", remedy=f"The assigned shards are: {', '.join(map(str, sorted(assigned)))}."
            )
        if len(assigned) == 1:
            raise NotSubscribedError(f"{shard} is the last shard", remedy="Close the consumer instead.")
        self._chosen = assigned - {shard}


class LockedConsumer(Consumer):
    """A consumer whose client serves one thread at a time.

    Args:
        streams: the streams that it reads.
        on_dead_letter: called for each dead letter.
    """

    def __init__(self, streams: Iterable[str], on_dead_letter: DeadLetterObserver) -> None:
        super().__init__()
        self._lock = PollingLock()
        self._assignment = Assignment(streams)
        self._on_dead_letter = on_dead_letter
        self._known: frozenset[Shard] = frozenset()

    @abstractmethod
    def _take(self, seconds: float) -> Message | DeadLetter | None:
        """Poll once for an item, as :meth:`_poll` does; only one thread at a time calls this method."""

    def _poll(self, seconds: float) -> Message | None:
        while self._lock.acquire(seconds):
            try:
                self._check_open()
                item = self._take(seconds)
            finally:
                self._lock.release()
            if not isinstance(item, DeadLetter):
                return item
            self._on_dead_letter(item)
        return None

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


class DetachableMember(Consumer):
    """A member of a group that leaves the group at a seek or rewind, and reads by position from then on.

    Args:
        open_standalone: opens the consumer that reads by position; called when it is first needed.
    """

    def __init__(self, open_standalone: Callable[[], Consumer]) -> None:
        super().__init__()
        self._open_standalone = open_standalone
        self._moving = threading.Lock()
        self._standalone: Consumer | None = None
        self._is_detached = False

    @abstractmethod
    def _detach(self) -> None:
        """Leave the group, and set ``_is_detached``."""

    def seek(self, moment: datetime) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.seek`; leaves the group."""
        with self._moving:
            self._standalone_consumer().seek(moment)
            self._detach()

    def rewind(self, to: Edge | int) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.rewind`; leaves the group."""
        to = rewind_target(to)
        with self._moving:
            self._standalone_consumer().rewind(to)
            self._detach()

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`."""
        with self._moving:
            self._standalone_consumer().assign(shard)

    def unassign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`."""
        with self._moving:
            self._standalone_consumer().unassign(shard)

    def _standalone_consumer(self) -> Consumer:
        self._check_open()
        if self._standalone is None:
            self._standalone = self._open_standalone()
        return self._standalone

    def _close_standalone(self) -> None:
        with self._moving:
            if self._standalone is not None:
                self._standalone.close()


def resolve_positions(positions: Positions, read: frozenset[Shard], ends: Callable[[], Positions]) -> Positions:
    """Check positions that a consumer is to go to, and clamp negative ones to 0.

    Args:
        positions: the requested positions; a negative position means the beginning.
        read: the shards that the consumer reads.
        ends: returns the end of each shard, the last valid position.

    Raises:
        NotSubscribedError: the consumer does not read one of the shards.
        OutOfBoundsError: a position is after the end of its shard.

    Example:
        >>> orders = Shard("orders")
        >>> resolve_positions({orders: -1}, frozenset([orders]), lambda: {orders: 3})
        {Shard(stream='orders', id=0): 0}
    """
    check_positions(positions)
    unknown = sorted(positions.keys() - read)
    if unknown:
        raise NotSubscribedError(
            f"{unknown[0]} is not read by this consumer", remedy=f"It reads: {', '.join(map(str, sorted(read)))}."
        )
    found = {shard: max(0, position) for shard, position in positions.items()}
    if any(found.values()):
        known = ends()
        for shard, position in sorted(found.items()):
            if position > known.get(shard, 0):
                raise OutOfBoundsError(
                    f"{shard} ends before the position {position}",
                    remedy="Go no further than the end of the shard; check whether the stream was recreated.",
                    end=known.get(shard, 0),
                )
    return found


def check_positions(positions: object) -> None:
    """Raise unless ``positions`` is a mapping of shards to sequences.

    Raises:
        InvalidOptionError: it is something else.

    Example:
        >>> check_positions("orders")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: positions='orders' is a str. Give a mapping of shards to \
sequences, like {Shard('orders'): 3}.
    """
    if not isinstance(positions, Mapping):
        raise InvalidOptionError(
            f"positions={positions!r} is a {type(positions).__name__}",
            remedy="Give a mapping of shards to sequences, like {Shard('orders'): 3}.",
        )
    for shard, position in positions.items():
        check_count(f"the position in {check_shard(shard)}", position, at_least=-(2**63))


@runtime_checkable
class PositionedConsumer(Protocol):
    """A consumer that can move single shards."""

    def assigned(self) -> frozenset[Shard]:
        """Return the shards that are read now."""
        ...

    def go_to(self, positions: Positions) -> None:
        """Continue these shards at these sequences; other shards stay where they are.

        Args:
            positions: the next sequence to read, per shard. A negative one means the beginning; the last valid one is
                the end of the shard.

        Raises:
            NotSubscribedError: a shard is not read by this consumer; no shard is moved.
            OutOfBoundsError: a position is after the end of its shard; no shard is moved.
        """
        ...


def require_positioned(consumer: object) -> PositionedConsumer:
    """Return ``consumer`` if it can move single shards.

    Raises:
        InvalidOptionError: it cannot.

    Example:
        >>> require_positioned("no consumer")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: str cannot move single shards. Use rewind or seek.
    """
    if not isinstance(consumer, PositionedConsumer):
        raise InvalidOptionError(f"{type(consumer).__name__} cannot move single shards", remedy="Use rewind or seek.")
    return consumer


@runtime_checkable
class PausableConsumer(Protocol):
    """A consumer that can pause single shards."""

    def pause(self, shards: Iterable[Shard]) -> None:
        """Stop fetching messages of these shards."""
        ...

    def resume(self, shards: Iterable[Shard]) -> None:
        """Fetch messages of these shards again."""
        ...


class ShardObserver(Protocol):
    """An observer of shard assignments; the reading thread calls it."""

    def on_assigned(self, shards: frozenset[Shard]) -> None:
        """Called when these shards are assigned to the consumer."""
        ...

    def on_revoked(self, shards: frozenset[Shard]) -> None:
        """Called before these shards are given up: the last chance to commit their positions."""
        ...


@runtime_checkable
class ObservableConsumer(Protocol):
    """A consumer whose assigned shards change."""

    def observe(self, observer: ShardObserver) -> None:
        """Notify ``observer`` of changes from now on."""
        ...


@runtime_checkable
class EndReportingConsumer(Protocol):
    """A consumer that detects the end of a shard separately from messages, like the end of a Kafka partition."""

    def reached_ends(self) -> Positions:
        """Return the ends that were reached since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class ShardEnd:
    """The end of a shard.

    Args:
        readable: the sequence after the last readable message (Kafka's last stable offset with ``read_committed``).
        written: the sequence after the last written message; greater than ``readable`` while a transaction is open.

    Example:
        >>> ShardEnd(readable=7, written=9).written
        9
    """

    readable: int
    written: int


@runtime_checkable
class MeasurableConsumer(Protocol):
    """A consumer that can determine the ends of its shards."""

    def ends(self) -> Mapping[Shard, ShardEnd]:
        """Return the current ends of the shards that are read; any thread may call this, even while another waits.

        Raises:
            StreamAssetsError: the broker returned an error.
        """
        ...


@runtime_checkable
class DrainableConsumer(Protocol):
    """A consumer that knows which messages are unfinished."""

    def wait_empty(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all delivered messages are finished; return whether that happened in time."""
        ...


class PositionCommitter(Protocol):
    """Stores the positions of one group. A position is the next sequence to read; 0 is a position, not "none".

    Example:
        >>> committer: PositionCommitter = ProcessCommitter({Shard("orders"): 3})
        >>> committer.committed()
        {Shard(stream='orders', id=0): 3}
    """

    @property
    def is_transactional(self) -> bool:
        """Whether a commit ends a transaction, so that only the code that fills the transaction may call it."""
        ...

    def commit(self, positions: Positions) -> object:
        """Store these positions.

        Raises:
            StreamAssetsError: the positions were not stored.
        """
        ...

    def committed(self) -> Positions:
        """Return the stored positions; shards without a position are left out.

        Raises:
            StreamAssetsError: the positions cannot be read.
        """
        ...


@runtime_checkable
class TransactionCommitter(PositionCommitter, Protocol):
    """A :class:`PositionCommitter` whose commits end a transaction.

    Example:
        >>> isinstance(ProcessCommitter(), TransactionCommitter)
        False
    """

    @property
    def is_open(self) -> bool:
        """Whether a transaction is open."""
        ...

    def commit(self, positions: Positions, *, start_new_transaction: bool = True) -> None:
        """Store these positions in the open transaction, and end the transaction.

        Args:
            positions: the next sequence to read, per shard.
            start_new_transaction: begin the next transaction immediately.

        Raises:
            StreamAssetsError: the positions were not stored.
        """
        ...


@runtime_checkable
class EntryCommitter(Protocol):
    """Beyond :class:`PositionCommitter`: stores which single messages are finished, in any order.

    Example:
        >>> isinstance(ProcessCommitter(), EntryCommitter)
        False
    """

    def commit_entries(self, entries: Entries) -> None:
        """Store that these messages are finished.

        Args:
            entries: their sequences, per shard.

        Raises:
            StreamAssetsError: it is unknown whether they were stored.
        """
        ...


class ProcessCommitter:
    """Keeps positions only in this process, for streams whose broker stores none.

    Example:
        >>> committer = ProcessCommitter()
        >>> committer.commit({Shard("orders"): 0})
        >>> committer.committed()
        {Shard(stream='orders', id=0): 0}
    """

    is_transactional = False

    def __init__(self, positions: Positions | None = None) -> None:
        check_positions(positions or {})
        self._positions = dict(positions or {})

    def commit(self, positions: Positions) -> None:
        """See :meth:`PositionCommitter.commit`."""
        check_positions(positions)
        self._positions |= positions

    def committed(self) -> Positions:
        """See :meth:`PositionCommitter.committed`."""
        return dict(self._positions)
