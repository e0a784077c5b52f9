"""The interface of subscriptions to a streaming server, with values and codec (eventbus-core's ``StreamBackend``)."""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from stream_consumers.closing import ClosesOnExit
from stream_consumers.errors import FormatError, InvalidOptionError, SizeLimitError, StreamAssetsError, described
from stream_consumers.options import check_iterable

MAX_PAYLOAD_BYTES = 4 * 1024 * 1024
# base64 adds a third, and names and headers add more; a larger entry is too large without being decoded.
_ENVELOPE_FACTOR, _ENVELOPE_BYTES = 2, 64 * 1024
_TEXTS = ("uid", "key", "kind")
Published = str | StreamAssetsError
"""The id of a published message, or the error that prevented its publication."""


@dataclass(frozen=True, slots=True)
class EventMessage:
    """A message to publish, or a published one (eventbus-core's ``Message``).

    Args:
        payload: the bytes.
        uid: the producer's own id of the message; may be empty.
        key: messages with the same key belong together.
        kind: the type of the event.
        idempotency_key: a key by which a receiver recognizes a second copy.
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
        first_received: the time of its first delivery to any consumer.
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
    """The position of a group that was created, or existed already.

    Args:
        is_new: whether it was created just now.
        start: the requested id, after which a new group starts.
        position: the id of the last entry that it has delivered or skipped.

    Example:
        >>> GroupPosition(is_new=False, start="0-0", position="7-0").difference
        'the group existed already, and its position is 7-0, not 0-0'
    """

    is_new: bool
    start: str
    position: str

    @property
    def difference(self) -> str | None:
        """How the position differs from the requested one; ``None`` if it does not."""
        if self.is_new or self.position == self.start:
            return None
        return f"the group existed already, and its position is {self.position}, not {self.start}"


class EventCodec(Protocol):
    """Converts between messages and the bytes of entries.

    Example:
        >>> codec: EventCodec = JsonCodec()
        >>> codec.decode(b'{"payload": "hello"}').payload
        b'hello'
    """

    def encode(self, message: EventMessage) -> bytes:
        """Return the bytes of a message."""
        ...

    def decode(self, raw: bytes) -> EventMessage:
        """Return the message in the bytes; if this raises an error, the entry is malformed."""
        ...


class JsonCodec:
    r"""A JSON object; the payload is text where it is UTF-8, else base64.

    Example:
        >>> JsonCodec().encode(EventMessage(b"hello", uid="7"))
        b'{"uid": "7", "payload": "hello"}'
        >>> JsonCodec().decode(JsonCodec().encode(EventMessage(bytes([255])))).payload
        b'\xff'
    """

    def encode(self, message: EventMessage) -> bytes:
        """See :meth:`EventCodec.encode`."""
        parts: dict[str, object] = {name: getattr(message, name) for name in _TEXTS if getattr(message, name)}
        if message.idempotency_key is not None:
            parts["idempotency_key"] = message.idempotency_key
        if message.headers:
            parts["headers"] = dict(message.headers)
        try:
            parts["payload"] = message.payload.decode()
        except UnicodeDecodeError:
            parts["payload_base64"] = base64.b64encode(message.payload).decode()
        return json.dumps(parts, ensure_ascii=False).encode()

    def decode(self, raw: bytes) -> EventMessage:
        """See :meth:`EventCodec.decode`.

        Raises:
            ValueError: the bytes are not JSON.
            FormatError: they are JSON, but not a message.
        """
        parts = json.loads(raw)
        if not isinstance(parts, dict) or ("payload" in parts) == ("payload_base64" in parts):
            raise FormatError(
                "the entry is not a JSON object with either payload or payload_base64",
                remedy="Publish it with the codec that it is read with.",
            )
        payload = (
            parts["payload"].encode()
            if "payload" in parts
            else base64.b64decode(parts["payload_base64"], validate=True)
        )
        names = (*_TEXTS, "idempotency_key", "headers")
        return EventMessage(payload, **{name: parts[name] for name in names if name in parts})


class Envelope:
    """A codec with a size limit: a message that is too large is neither published nor decoded.

    Args:
        codec: encodes and decodes messages.
        max_payload_bytes: the largest payload; 0 sets no limit.

    Raises:
        InvalidOptionError: a negative limit.
    """

    def __init__(self, codec: EventCodec, max_payload_bytes: int) -> None:
        if max_payload_bytes < 0:
            raise InvalidOptionError(
                f"max_payload_bytes must not be negative, got {max_payload_bytes}", remedy="Use 0 for no limit."
            )
        self._codec, self._most = codec, max_payload_bytes
        self._most_sealed = _ENVELOPE_FACTOR * max_payload_bytes + _ENVELOPE_BYTES

    def seal(self, message: EventMessage) -> bytes:
        """Return the bytes to publish.

        Raises:
            SizeLimitError: the payload, or the whole encoded message, is too large.
            FormatError: the codec cannot encode the message, or no receiver could read it: the payload is not bytes, or
                another part is not text.
        """
        check_readable(message)
        size = len(message.payload)
        if self._most and size > self._most:
            raise SizeLimitError(
                f"the payload of message {message.uid!r} is too large to publish",
                remedy="Store it elsewhere and publish its location, or raise max_payload_bytes on both sides.",
                bytes=size,
                max_payload_bytes=self._most,
            )
        try:
            sealed = self._codec.encode(message)
        except Exception as error:  # noqa: BLE001 - a codec is the user's
            raise FormatError(
                f"message {message.uid!r} cannot be encoded: {described(error)}",
                remedy="Check its fields, or use another codec.",
            ) from None
        if self._most and len(sealed) > self._most_sealed:
            raise SizeLimitError(
                f"message {message.uid!r} is too large to publish with its headers",
                remedy="Make its headers smaller, or raise max_payload_bytes on both sides.",
                bytes=len(sealed),
                max_bytes=self._most_sealed,
            )
        return sealed

    def open(self, entry_id: str, raw: bytes, delivery: Delivery) -> FetchedEntry:
        """Decode an entry, or return it as malformed."""
        size = len(raw)
        if self._most and size > self._most_sealed:
            return self._oversize(entry_id, size, delivery)
        try:
            message = self._codec.decode(raw)
            check_readable(message)
        except Exception as error:  # noqa: BLE001 - a codec is the user's
            return self.malformed(entry_id, raw, f"it cannot be decoded: {described(error)}", delivery)
        if self._most and len(message.payload) > self._most:
            return self._oversize(entry_id, size, delivery)
        return DecodedEntry(entry_id, message, delivery)

    def malformed(self, entry_id: str, raw: bytes, error: str, delivery: Delivery) -> MalformedEntry:
        """Return an entry that is not a message, with its bytes if they fit into a dead letter."""
        original = raw if not self._most or len(raw) <= self._most else b""
        return MalformedEntry(entry_id, error, original, delivery, len(raw))

    def _oversize(self, entry_id: str, size: int, delivery: Delivery) -> MalformedEntry:
        error = f"the entry has {size} bytes, more than max_payload_bytes={self._most} allows; it is at {entry_id}"
        return MalformedEntry(entry_id, error, b"", delivery, size)


def check_readable(message: EventMessage) -> None:
    """Check that every part of a message has its type, and can be written as UTF-8.

    Raises:
        FormatError: a part can be published neither as a message nor as a dead letter; the error names it.
    """
    texts = {name: getattr(message, name) for name in _TEXTS}
    texts["idempotency_key"] = message.idempotency_key or ""
    texts.update({f"the value of header {name!r}": value for name, value in message.headers.items()})
    texts.update({f"the name of header {name!r}": name for name in message.headers})
    wrong = [part for part, text in texts.items() if not isinstance(text, str) or not _is_encodable(text)]
    if not isinstance(message.payload, bytes):
        wrong.insert(0, "payload")
    if wrong:
        raise FormatError(
            f"message {message.uid!r} cannot be encoded: {', '.join(wrong)}",
            remedy="Give the payload as bytes, and everything else as text without lone surrogates.",
        )


def _is_encodable(text: str) -> bool:
    """Return whether a text has no lone surrogates."""
    return text.encode("utf-8", "ignore").decode() == text


def removed_entry(entry_id: str, delivery: Delivery) -> MalformedEntry:
    """Return the malformed entry that stands for one that was removed from the stream while it was pending."""
    return MalformedEntry(entry_id, f"the entry {entry_id} was removed while it was pending", b"", delivery, 0)


class StreamBackend(ClosesOnExit, ABC):
    """Streams of messages, and groups that share them. A backend is thread-safe.

    Every method raises :class:`stream_consumers.errors.BrokerUnavailableError` if the server does not answer, and
    :class:`stream_consumers.errors.GroupRemovedError` if it needs a group that was removed: only :meth:`create_group`
    creates groups.

    A backend of your own needs five methods, as in eventbus-core: :meth:`create_group`, :meth:`publish`,
    :meth:`reclaim_idle`, :meth:`read_new` and :meth:`ack`. The other methods have defaults; their docstrings say what a
    backend gains by overriding them.

    Example:
        >>> from stream_consumers.subscription.memory_backend import MemoryBackend
        >>> backend: StreamBackend = MemoryBackend()
        >>> backend.publish("orders", EventMessage(b"{}"))
        '1-0'
        >>> backend.create_group("orders", "billing", "0").is_new
        True
        >>> [entry.id for entry in backend.read_new("orders", "billing", "me", 10, 0)]
        ['1-0']
        >>> backend.ack("orders", "billing", "1-0")
        1
    """

    @abstractmethod
    def create_group(self, stream: str, group: str, start: str) -> GroupPosition:
        """Create a group, and its stream, unless they exist.

        Args:
            stream: the name of the stream.
            group: the name of the group.
            start: the id after which a new group starts: ``0`` delivers all entries, ``$`` only those published later.

        Returns:
            The position of the group. A group that exists keeps its position; the difference is returned and logged.
        """

    @abstractmethod
    def publish(self, stream: str, message: EventMessage) -> str:
        """Publish a message, and return its id.

        Raises:
            SizeLimitError: its payload is too large.
            FormatError: the codec cannot encode it.
        """

    def publish_batch(self, stream: str, messages: Sequence[EventMessage]) -> list[Published]:
        """Publish messages in order, and return a result for each; a refused one does not stop the others."""
        check_iterable("messages", messages)
        results: list[Published] = []
        for message in messages:
            try:
                results.append(self.publish(stream, message))
            except StreamAssetsError as error:
                results.append(error)
        return results

    @abstractmethod
    def reclaim_idle(
        self, stream: str, group: str, consumer: str, min_idle_seconds: float, count: int
    ) -> list[FetchedEntry]:
        """Claim entries that were idle for ``min_idle_seconds``, including this consumer's own.

        Each counts as delivered once more. The search continues where the last search of this consumer ended.

        Args:
            stream: the name of the stream.
            group: the group that the entries are pending in.
            consumer: the consumer that gets them.
            min_idle_seconds: seconds since the last delivery, or the last :meth:`touch`.
            count: the most entries to claim, at least 1; every claimed entry is returned.
        """

    @abstractmethod
    def read_new(
        self, stream: str, group: str, consumer: str, count: int, timeout_seconds: float
    ) -> list[FetchedEntry]:
        """Read entries that the group has not delivered to any consumer.

        Args:
            stream: the name of the stream.
            group: the name of the group.
            consumer: the consumer that gets them.
            count: the most entries to read, at least 1.
            timeout_seconds: how long to wait for an entry; 0 does not wait, and no value waits forever.
        """

    @abstractmethod
    def ack(self, stream: str, group: str, entry_id: str) -> int:
        """Acknowledge an entry; see :meth:`ack_many`."""

    def ack_many(self, stream: str, group: str, entry_ids: Sequence[str]) -> int:
        """Acknowledge entries: by default one after the other, up to the first error; override it to save round trips.

        Returns:
            The number of entries that were pending. It may be smaller than the number of ids, because others may have
            acknowledged some.

        Raises:
            StreamAssetsError: the entries may still be pending; they will be delivered again.
        """
        check_iterable("entry_ids", entry_ids)
        return sum(self.ack(stream, group, entry_id) for entry_id in entry_ids)

    def redeliver(self, stream: str, group: str, consumer: str, entry_id: str) -> FetchedEntry | None:
        """Deliver an entry once more to the consumer that holds it; return ``None`` if it is not delivered now.

        By default it never is: an entry to retry stays pending, and :meth:`reclaim_idle` returns it once it was idle
        for ``claim_idle_seconds``. With a backend that overrides this method, it is retried after ``backoff_seconds``.
        """
        return None

    def touch(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """Send a heartbeat: reset the idle time of those entries that the consumer holds.

        This does not count as a delivery. By default it does nothing, so that a peer claims an entry whose handler
        takes longer than ``claim_idle_seconds``: set that to more than a handler ever takes, or override this method.
        """
        return

    def forget_consumer(self, stream: str, group: str, consumer: str) -> bool:
        """Drop the state of a consumer, and remove it from the group unless it holds entries; a no-op by default.

        Returns:
            Whether the consumer was removed.
        """
        return False

    def close(self) -> None:
        """Release all resources; a no-op by default."""
