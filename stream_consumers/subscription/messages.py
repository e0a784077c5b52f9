"""What a stream backend passes on: messages to publish, and entries as a group delivers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class EventMessage:
    """A message to publish, or as it was published (eventbus-core's ``Message``).

    Args:
        payload: the bytes.
        uid: the producer's own id; may be empty.
        key: what belongs together.
        kind: what the payload is about.
        idempotency_key: by which a receiver may recognise a second copy.
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
    """How often, and since when, a group has delivered an entry.

    Args:
        attempt: the backend's own delivery counter, from 1; it counts what a killed process got, too.
        first_received: when somebody got it first.
        last_received: when this delivery was.

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
        """Whether somebody got it before."""
        return self.attempt > 1


@dataclass(frozen=True, slots=True)
class DecodedEntry:
    """An entry that is a message.

    Args:
        id: its place in the stream.
        message: what was published.
        delivery: which delivery this is.

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
        id: its place in the stream.
        error: why it cannot be used.
        original: its bytes; none if they are too many, or were removed from the stream.
        delivery: which delivery this is.
        size: how many bytes it has; 0 where it was removed.

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
    """Where a group stands that was to be made.

    Args:
        is_new: it was made just now.
        start: the id that it was asked to start behind.
        position: the id of the last entry that it has given to somebody, or skipped.

    Example:
        >>> GroupPosition(is_new=False, start="0-0", position="7-0").difference
        'the group was there already and stands at 7-0, not at 0-0'
    """

    is_new: bool
    start: str
    position: str

    @property
    def difference(self) -> str | None:
        """What is not as it was asked for; ``None`` if all is."""
        if self.is_new or self.position == self.start:
            return None
        return f"the group was there already and stands at {self.position}, not at {self.start}"
