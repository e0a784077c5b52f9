"""The message-by-message protocols: a consumer and a producer, the same on every backend."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Protocol

from stream_consumers.messages import DeadLetter, Message, Receipt, Shard
from stream_consumers.options import choice


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


def rewind_place(to: object) -> Edge | int:
    """Where a rewind goes: an edge, which may be given as text, or a sequence.

    Raises:
        InvalidOptionError: it is neither.

    Example:
        >>> rewind_place("end"), rewind_place(7)
        (<Edge.END: 'end'>, 7)
    """
    if isinstance(to, int) and not isinstance(to, bool):
        return to
    return choice(Edge, to, option="to", beside="a sequence, which is a whole number, or ")


DeadLetterObserver = Callable[[DeadLetter], None]
_log = logging.getLogger(__name__)


def log_dead_letter(letter: DeadLetter) -> None:
    """The default observer: one warning a dead letter, without its bytes.

    Example:
        >>> from stream_consumers.create import create_consumer
        >>> with create_consumer("file://orders.ss/orders", live=False, on_dead_letter=log_dead_letter) as orders:
        ...     len(list(orders))
        3
    """
    _log.warning("dead letter in %s at offset %s: %s", letter.shard, letter.offset, letter.error)


class Consumer(Protocol):
    """Reads one message at a time. Close it when done; it is a context manager and an iterator.

    Meanings are the same on every backend: a rewind to n delivers n first (inclusive), a seek to t delivers the
    first message with a timestamp at or after t.

    With a group (modes ``resumable`` and ``load_balanced``) it is a member, and :meth:`ack` and :meth:`commit` say what
    is done. What a group remembers differs. Kafka keeps a position in each shard: acknowledging a message says that it
    and all before it in its shard are done, and a :class:`stream_consumers.tracking.consumer.TrackedConsumer` finishes
    them in any order. Redis keeps each entry, and ``group_options`` say whether ``ack`` and ``commit`` are left to the
    user. Groups of files, of memory and of pipes live as long as their members, and remember nothing.

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
        ...

    def seek(self, moment: datetime) -> None:
        """Continue at the first message with a timestamp at or after ``moment``, in every assigned shard.

        Raises:
            OutOfBoundsError: no assigned shard has one; the position stays.
        """
        ...

    def rewind(self, to: Edge | int) -> None:
        """Continue at the beginning, at the end, or at a sequence (inclusive), in every assigned shard.

        Raises:
            OutOfBoundsError: no assigned shard has a message at or after that sequence; the position stays.
        """
        ...

    def assign(self, shard: Shard) -> None:
        """Read this shard too, from the next seek or rewind on.

        Raises:
            NotSubscribedError: its stream is none of the consumer's.
        """
        ...

    def unassign(self, shard: Shard) -> None:
        """Stop reading this shard, from the next seek or rewind on.

        Raises:
            NotSubscribedError: it is not assigned, or it is the last one.
        """
        ...

    @property
    def group(self) -> str | None:
        """The group's name; ``None`` without one."""
        ...

    def ack(self, message: Message) -> object:
        """Say that a message is done; the next commit tells the group so.

        Raises:
            InvalidOptionError: there is no group, or its ``group_options`` acknowledge by themselves.
            NotSubscribedError: it is of a stream that is not read.
        """
        ...

    def commit(self) -> object:
        """Tell the group what was acknowledged; returns how many positions or entries it took.

        Raises:
            InvalidOptionError: there is no group, or its ``group_options`` commit by themselves.
            StreamAssetsError: as the broker says; the next commit tells it again.
        """
        ...

    def close(self) -> None:
        """Release what is open; a waiting :meth:`next` ends."""
        ...

    def __iter__(self) -> Iterator[Message]: ...

    def __enter__(self) -> Consumer: ...

    def __exit__(self, *_: object) -> None: ...


class Producer(Protocol):
    """Sends messages. Close it when done; it is a context manager, and leaving it flushes.

    Example:
        >>> from stream_consumers.create import create_producer
        >>> with create_producer("memory://example-producer/orders") as producer:
        ...     receipt = producer.send(b"{}", shard=2, timestamp_ms=1_700_000_000_000)
        ...     receipt.shard, receipt.sequence
        (Shard(stream='orders', id=2), 0)
    """

    def send(
        self, payload: bytes, *, stream: str | None = None, shard: int = 0, timestamp_ms: int | None = None
    ) -> Receipt:
        """Send one message; it is on its way when this returns, and safe after :meth:`flush`.

        Args:
            payload: the bytes.
            stream: the stream key; the first of the URL by default.
            shard: the shard id.
            timestamp_ms: unix milliseconds; now by default.

        Raises:
            ProducerEndedError: the producer was ended.
            InvalidOptionError, InvalidStreamKeyError: there cannot be such a message.
            StreamAssetsError: what was sent before does not arrive. Whatever is raised, this message was not taken.
        """
        ...

    def flush(self) -> None:
        """Wait until everything sent is with the backend.

        Raises:
            ProducerEndedError: the producer was closed.
            StreamAssetsError: so many messages are not known to have arrived (``undelivered``). They stay queued, in
                the order of each shard: flush again. Where the error says that they were given up, send them again.
        """
        ...

    def close(self) -> None:
        """Flush and end.

        Raises:
            StreamAssetsError: as :meth:`flush`; what is counted in it is dropped, as the producer has ended.
        """
        ...

    def __enter__(self) -> Producer: ...

    def __exit__(self, *_: object) -> None: ...
