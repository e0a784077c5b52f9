"""The values that pass a stream backend: messages to publish, and entries that a group delivers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class EventMessage:
    """A message that is published, or was (eventbus-core's ``Message``).

    Args:
        payload: the bytes.
        uid: the producer's own id of the message; may be empty.
        key: messages with the same key belong together.
        kind: the type of the event.
        idempotency_key: a key by which a receiver recognises a second copy.
        headers: names and values.

    Example:
        >>> EventMessage(b"{}", kind="order.created").kind
        'order.created'
    """

    payload: bytes = field(repr=False)
    uid: str = ""
    key: str = ""
    kind: str = ""
    idempotency_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delivery:
    """The number of times that a group has delivered an entry, and since when.

    Args:
        attempt: the backend's own delivery counter, from 1; deliveries to crashed consumers count.
        first_received: the time of its first delivery, to whatever consumer.
        last_received: the time of this delivery.

    Example:
        >>> from datetime import timezone
        >>> now = datetime.now(timezone.utc)
        >>> Delivery(2, now, now).redelivered
        True
    """

    attempt: int
    first_received: datetime
    last_received: datetime

    @property
    def redelivered(self) -> bool:
        """Whether it was delivered before."""
        return self.attempt > 1


@dataclass(frozen=True, slots=True)
class DecodedEntry:
    """An entry that is a message.

    Args:
        id: its id in the stream.
        message: the message that was published.
        delivery: the number and the time of this delivery.

    Example:
        >>> from datetime import timezone
        >>> now = datetime.now(timezone.utc)
        >>> DecodedEntry("7-0", EventMessage(b"{}"), Delivery(1, now, now)).message.payload
        b'{}'
    """

    id: str
    message: EventMessage
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class MalformedEntry:
    """An entry that cannot be used as a message; the others of its batch can.

    Args:
        id: its id in the stream.
        error: the reason why it cannot be used.
        original: its bytes; empty if they are too many, or were removed from the stream.
        delivery: the number and the time of this delivery.
        size: its size in bytes; 0 if it was removed.

    Example:
        >>> from datetime import timezone
        >>> now = datetime.now(timezone.utc)
        >>> MalformedEntry("7-0", "no JSON", b"{", Delivery(1, now, now), 1).error
        'no JSON'
    """

    id: str
    error: str
    original: bytes = field(repr=False)
    delivery: Delivery
    size: int


FetchedEntry = DecodedEntry | MalformedEntry


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """The position of a group that was created, or was there already.

    Args:
        is_new: whether it was created just now.
        start: the id after which it was asked to start.
        position: the id of the last entry that it has delivered or skipped.

    Example:
        >>> GroupPosition(is_new=False, start="0-0", position="7-0").difference
        'the group was there already and stands at 7-0, not at 0-0'
    """

    is_new: bool
    start: str
    position: str

    @property
    def difference(self) -> str | None:
        """How the position differs from what was asked for; ``None`` if it does not."""
        if self.is_new or self.position == self.start:
            return None
        return f"the group was there already and stands at {self.position}, not at {self.start}"
