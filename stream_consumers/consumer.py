"""Consumers read a stream message by message, the same on every backend.

:class:`Consumer` is what users call and backends extend. Below it are what several backends share (which shards are
assigned, how threads share a client), what some consumers can do beyond it (:class:`PositionedConsumer` and others),
and where positions of groups are kept (:class:`PositionCommitter`).
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
# How long a poll that does not wait waits for another one that does not wait either.
SHORT_WAIT_SECONDS = 0.05
DeadLetterObserver = Callable[[DeadLetter], None]
Positions = Mapping[Shard, int]
"""The next sequence to read, per shard."""
Entries = Mapping[Shard, Sequence[int]]
"""Sequences of messages, per shard."""
Item = TypeVar("Item")
_log = logging.getLogger(__name__)


class Edge(enum.Enum):
    """The two places of a stream that need no number.

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
    """Where a rewind goes: an edge, which may be given as text, or a sequence.

    Raises:
        InvalidOptionError: it is neither.

    Example:
        >>> rewind_target("end"), rewind_target(7)
        (<Edge.END: 'end'>, 7)
    """
    if isinstance(to, int) and not isinstance(to, bool):
        return to
    return choice(Edge, to, option="to", others="a sequence, which is a whole number, or ")


def log_dead_letter(letter: DeadLetter) -> None:
    """The default observer: one warning a dead letter, without its bytes.

    Example:
        >>> from stream_consumers.create import create_consumer
        >>> with create_consumer("file://orders.ss/orders", live=False, on_dead_letter=log_dead_letter) as orders:
        ...     len(list(orders))
        3
    """
    _log.warning("dead letter in %s at offset %s: %s", letter.shard, letter.offset, letter.error)


class PollingLock:
    """Lets one thread at a time use a client, and no thread wait for one that waits for a message.

    The thread that polls keeps the lock while it waits. Meanwhile a poll with timeout 0 is refused at once, and a
    thread that moves the client (a seek, a pause, closing) is next, however many threads poll: it waits for one poll at
    most. A thread that has the lock may take it again, because clients call back while they are polled.

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
        """Take the lock for a poll that waits at most this long; returns whether that was possible within this time.

        With 0 it is refused if the lock belongs to a poll that waits. If it belongs to one that does not wait either,
        it waits :data:`SHORT_WAIT_SECONDS`, so that threads that share a stream do not take each other for its end.
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
        """Give it back, once for each time that it was taken."""
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Keep every poll out within the context, so that the client may be moved."""
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
        :class:`stream_consumers.consumer.PollingLock`.

        Args:
            seconds: the most that it may wait; 0 does not wait at all.

        Raises:
            StreamEndedError: the stream has an end, and it was reached; see :func:`end_of_stream`.
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


class Consumer(PollingReader[Message]):
    """Reads one message at a time. Close it when done; it is a context manager and an iterator.

    Meanings are the same on every backend: a rewind to n delivers n first (inclusive), a seek to t delivers the
    first message with a timestamp at or after t.

    With a group (modes ``resumable`` and ``load_balanced``) it is a member, and :meth:`ack` and :meth:`commit` say what
    is done. What a group remembers differs. Kafka keeps a position in each shard: acknowledging a message says that it
    and all before it in its shard are done, and a :class:`stream_consumers.tracking.consumer.TrackedConsumer` finishes
    them in any order. Redis keeps each entry, and ``group_options`` say whether ``ack`` and ``commit`` are left to the
    user. Groups of files, of memory and of pipes live as long as their members, and remember nothing.

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
        """The next message of the assigned shards.

        Args:
            timeout_seconds: how long to wait for one; ``None`` until there is one or the stream ends, 0 not at all.

        Returns:
            ``None`` if there was none in time.

        Raises:
            StreamEndedError: the stream has an end, and it was reached.
        """
        return self._poll_until(timeout_seconds)

    @abstractmethod
    def seek(self, moment: datetime) -> None:
        """Continue at the first message with a timestamp at or after ``moment``, in every assigned shard.

        Raises:
            OutOfBoundsError: no assigned shard has one; the position stays.
        """

    @abstractmethod
    def rewind(self, to: Edge | int) -> None:
        """Continue at the beginning, at the end, or at a sequence (inclusive), in every assigned shard.

        Raises:
            OutOfBoundsError: no assigned shard has a message at or after that sequence; the position stays.
        """

    @abstractmethod
    def assign(self, shard: Shard) -> None:
        """Read this shard too, from the next seek or rewind on.

        Raises:
            NotSubscribedError: its stream is none of the consumer's.
        """

    @abstractmethod
    def unassign(self, shard: Shard) -> None:
        """Stop reading this shard, from the next seek or rewind on.

        Raises:
            NotSubscribedError: it is not assigned, or it is the last one.
        """

    @property
    def group(self) -> str | None:
        """The group's name; ``None`` without one."""
        return None

    def ack(self, message: Message) -> object:
        """Mark a message as done; the next commit reports it to the group.

        Raises:
            InvalidOptionError: there is no group, or its ``group_options`` acknowledge by themselves.
            NotSubscribedError: it is of a stream that is not read.
        """
        raise self._no_group()

    def commit(self) -> object:
        """Commit to the group what was acknowledged; returns how many positions or entries it took.

        Raises:
            InvalidOptionError: there is no group, or its ``group_options`` commit by themselves.
            StreamAssetsError: as the broker says; the next commit repeats it.
        """
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


def end_of_stream(stream: object = "the stream") -> StreamEndedError:
    """What a poll raises when everything was read and nothing is waited for.

    Example:
        >>> end_of_stream("orders").what
        'orders has no more messages'
    """
    return StreamEndedError(f"{stream} has no more messages", remedy="Rewind, or open it live to wait for more.")


def no_message_error(place: str, stream: object = "the stream") -> OutOfBoundsError:
    """What a seek or rewind raises that finds no message.

    Args:
        place: where it looked, like "at or after 2026-01-01".
        stream: what was read.

    Example:
        >>> no_message_error("from sequence 7 on", "orders").what
        'orders has no message from sequence 7 on'
    """
    return OutOfBoundsError(f"{stream} has no message {place}", remedy="Rewind to the end to wait for newer messages.")


class Assignment:
    """The shards that a consumer reads: all that there are, until one is assigned or unassigned.

    A choice counts from the next seek or rewind on; :meth:`is_read` says which shards are read until then.

    Args:
        streams: those that the consumer is for; with the wildcard among them, all but SeaStreamer's own.

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
        """Whether it is for all streams."""
        return WILDCARD in self._streams

    def subscribes(self, stream: str) -> bool:
        """Whether it is for this stream."""
        return stream in self._streams or (self.has_wildcard and stream != INTERNAL_KEY)

    @property
    def chosen(self) -> frozenset[Shard] | None:
        """The shards that were chosen; ``None`` if none were, so that new ones are read, too."""
        return self._chosen

    def __contains__(self, shard: object) -> bool:
        is_subscribed = isinstance(shard, Shard) and self.subscribes(shard.stream)
        return is_subscribed and (self._chosen is None or shard in self._chosen)

    def is_read(self, shard: Shard) -> bool:
        """Whether it was to be read at the last seek or rewind."""
        return self.subscribes(shard.stream) and (self._read is None or shard in self._read)

    @property
    def is_all_read(self) -> bool:
        """Whether all shards were to be read at the last seek or rewind, so that new ones are, too."""
        return self._read is None

    def apply(self) -> None:
        """A seek or rewind: what is chosen is read from here on."""
        self._read = self._chosen

    def select(self, shards: Iterable[Shard]) -> list[Shard]:
        """Those of ``shards`` that are to be read, in order."""
        return sorted(shard for shard in shards if shard in self)

    def assign(self, shard: Shard) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.assign`."""
        if not self.subscribes(check_shard(shard).stream):
            raise NotSubscribedError(
                f"{shard} is not of a subscribed stream", remedy=f"Use one of: {', '.join(sorted(self._streams))}."
            )
        self._chosen = (self._chosen or frozenset()) | {shard}

    def unassign(self, shard: Shard, shards: Iterable[Shard]) -> None:
        """See :meth:`stream_consumers.consumer.Consumer.unassign`.

        Args:
            shard: which one.
            shards: all that there are.
        """
        assigned = frozenset(self.select(shards)) if self._chosen is None else self._chosen
        if shard not in assigned:
            raise NotSubscribedError(
                f"{shard} is not assigned", remedy=f"Assigned are: {', '.join(map(str, sorted(assigned)))}."
            )
        if len(assigned) == 1:
            raise NotSubscribedError(f"{shard} is the last shard", remedy="Close the consumer instead.")
        self._chosen = assigned - {shard}


class LockedConsumer(Consumer):
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
    """A member of a group that leaves it with a seek or rewind: from then on it reads by position.

    Args:
        open_standalone: opens the consumer that reads by position; called when that is needed first.
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
    """Where a consumer can continue that is asked to go to these positions: as :meth:`Consumer.rewind` for each shard.

    Args:
        positions: as asked for; one before everything, like -1, is the beginning.
        read: the shards that the consumer reads.
        ends: returns the end of each shard, which is the last position to go to.

    Raises:
        NotSubscribedError: naming the first shard that is not read.
        OutOfBoundsError: naming the first position behind the end of its shard.

    Example:
        >>> orders = Shard("orders")
        >>> resolve_positions({orders: -1}, frozenset([orders]), lambda: {orders: 3})
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


def check_positions(positions: object) -> None:
    """Refuse what is not a mapping of shards to sequences.

    Raises:
        InvalidOptionError: naming what it is instead.

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
    """A consumer whose shards can be moved one by one."""

    def assigned(self) -> frozenset[Shard]:
        """The shards that are read now."""
        ...

    def go_to(self, positions: Positions) -> None:
        """Continue these shards at these sequences; others go on where they are.

        Args:
            positions: the next sequence to read, per shard: one before everything, like -1, is the beginning, and the
                end of the shard is the last place to go to.

        Raises:
            NotSubscribedError: a shard is not read by this consumer; no shard is moved.
            OutOfBoundsError: a position is behind the end of its shard; no shard is moved.
        """
        ...


def require_positioned(consumer: object) -> PositionedConsumer:
    """This consumer, if its shards can be moved one by one.

    Raises:
        InvalidOptionError: they cannot.

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
    """A consumer that can stop fetching single shards."""

    def pause(self, shards: Iterable[Shard]) -> None:
        """Fetch nothing of these."""
        ...

    def resume(self, shards: Iterable[Shard]) -> None:
        """Fetch them again."""
        ...


class ShardObserver(Protocol):
    """Is called by the thread that reads when shards come and go."""

    def on_assigned(self, shards: frozenset[Shard]) -> None:
        """These are read from here on."""
        ...

    def on_revoked(self, shards: frozenset[Shard]) -> None:
        """These are given back when this returns, so it is the last moment to commit them."""
        ...


@runtime_checkable
class ObservableConsumer(Protocol):
    """A consumer whose shards come and go."""

    def observe(self, observer: ShardObserver) -> None:
        """Call ``observer`` from now on."""
        ...


@runtime_checkable
class EndReportingConsumer(Protocol):
    """A consumer that finds ends that are not messages, like the end of a partition."""

    def reached_ends(self) -> Positions:
        """The ends that were reached since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class ShardEnd:
    """Where a shard ends.

    Args:
        readable: the sequence behind what can be read (Kafka's last stable offset with ``read_committed``).
        written: the sequence behind what was written; greater while a transaction is open.

    Example:
        >>> ShardEnd(readable=7, written=9).written
        9
    """

    readable: int
    written: int


@runtime_checkable
class MeasurableConsumer(Protocol):
    """A consumer that can ask how far its shards reach."""

    def ends(self) -> Mapping[Shard, ShardEnd]:
        """The ends of the shards that are read, now; any thread may ask, also while another one waits in ``next``.

        Raises:
            StreamAssetsError: as the broker says.
        """
        ...


@runtime_checkable
class DrainableConsumer(Protocol):
    """A consumer that knows which messages are unfinished."""

    def wait_empty(self, timeout_seconds: float | None = None) -> bool:
        """Wait until everything that was handed out is finished; whether that came true in time."""
        ...


class PositionCommitter(Protocol):
    """Keeps the positions of one group. A position is the next sequence to read; 0 is not "none".

    Example:
        >>> committer: PositionCommitter = ProcessCommitter({Shard("orders"): 3})
        >>> committer.committed()
        {Shard(stream='orders', id=0): 3}
    """

    @property
    def is_transactional(self) -> bool:
        """Whether a commit ends a transaction, so that only the one who fills it may call it."""
        ...

    def commit(self, positions: Positions) -> object:
        """Keep these positions.

        Raises:
            StreamAssetsError: they were not kept.
        """
        ...

    def committed(self) -> Positions:
        """What is kept; shards without a position are left out.

        Raises:
            StreamAssetsError: the positions cannot be read.
        """
        ...


@runtime_checkable
class TransactionCommitter(PositionCommitter, Protocol):
    """Beyond :class:`PositionCommitter`: its commits end a transaction.

    Example:
        >>> isinstance(ProcessCommitter(), TransactionCommitter)
        False
    """

    @property
    def is_open(self) -> bool:
        """Whether a transaction was begun and has not ended."""
        ...

    def commit(self, positions: Positions, *, start_new_transaction: bool = True) -> None:
        """Keep these positions, and end the transaction with them.

        Args:
            positions: the next sequence to read, per shard.
            start_new_transaction: begin the next one at once.

        Raises:
            StreamAssetsError: they were not kept.
        """
        ...


@runtime_checkable
class EntryCommitter(Protocol):
    """Beyond :class:`PositionCommitter`: keeps message by message which ones are finished, in any order.

    Example:
        >>> isinstance(ProcessCommitter(), EntryCommitter)
        False
    """

    def commit_entries(self, entries: Entries) -> None:
        """Keep that these messages are finished.

        Args:
            entries: their sequences, per shard.

        Raises:
            StreamAssetsError: they may not have been kept.
        """
        ...


class ProcessCommitter:
    """Keeps positions in this process only: for streams whose broker remembers none.

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
