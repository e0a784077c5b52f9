"""Encodes messages as bytes and decodes them: the codec, and the size limit around it."""

from __future__ import annotations

import base64
import json
from typing import Protocol

from stream_consumers.errors import FormatError, InvalidOptionError, SizeLimitError
from stream_consumers.subscription.messages import DecodedEntry, Delivery, EventMessage, FetchedEntry, MalformedEntry

MAX_PAYLOAD_BYTES = 4 * 1024 * 1024
# base64 adds a third, and names and headers come on top; above this nothing needs to be decoded to be too large.
_ENVELOPE_FACTOR, _ENVELOPE_BYTES = 2, 64 * 1024
_TEXTS = ("uid", "key", "kind")


class EventCodec(Protocol):
    """How a message becomes the bytes of an entry.

    Example:
        >>> codec: EventCodec = JsonCodec()
        >>> codec.decode(b'{"payload": "hello"}').payload
        b'hello'
    """

    def encode(self, message: EventMessage) -> bytes:
        """The bytes of a message."""
        ...

    def decode(self, raw: bytes) -> EventMessage:
        """The message that the bytes hold; an entry for which this raises is malformed."""
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
                "the entry is no JSON object with either payload or payload_base64",
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
        codec: how messages become bytes.
        max_payload_bytes: the largest payload; 0 sets no limit.

    Raises:
        InvalidOptionError: a negative limit.
    """

    def __init__(self, codec: EventCodec, max_payload_bytes: int) -> None:
        if max_payload_bytes < 0:
            raise InvalidOptionError(
                f"max_payload_bytes={max_payload_bytes} allows nothing", remedy="Use 1 or more, or 0 for no limit."
            )
        self._codec, self._most = codec, max_payload_bytes
        self._most_sealed = _ENVELOPE_FACTOR * max_payload_bytes + _ENVELOPE_BYTES

    def seal(self, message: EventMessage) -> bytes:
        """The bytes to publish.

        Raises:
            SizeLimitError: the payload, or what is beside it, is too large.
            FormatError: the codec cannot encode it, or no receiver could read it: the payload is no bytes, or
                something else is no text.
        """
        check_readable(message)
        size = len(message.payload)
        if self._most and size > self._most:
            raise SizeLimitError(
                f"the payload of message {message.uid!r} is too large to publish",
                remedy="Store it elsewhere and publish where it is, or raise max_payload_bytes on both sides.",
                bytes=size,
                max_payload_bytes=self._most,
            )
        try:
            sealed = self._codec.encode(message)
        except Exception as error:
            raise FormatError(
                f"message {message.uid!r} cannot be encoded: {error!r}",
                remedy="Check its fields, or use another codec.",
            ) from error
        if self._most and len(sealed) > self._most_sealed:
            raise SizeLimitError(
                f"message {message.uid!r} has too much beside its payload to publish",
                remedy="Make its headers smaller, or raise max_payload_bytes on both sides.",
                bytes=len(sealed),
                max_bytes=self._most_sealed,
            )
        return sealed

    def open(self, entry_id: str, raw: bytes, delivery: Delivery) -> FetchedEntry:
        """The entry that was read: decoded, or malformed."""
        size = len(raw)
        if self._most and size > self._most_sealed:
            return self._oversize(entry_id, size, delivery)
        try:
            message = self._codec.decode(raw)
            check_readable(message)
        except Exception as error:  # noqa: BLE001 - a codec is the user's
            return self.malformed(entry_id, raw, f"it cannot be decoded: {error!r}", delivery)
        if self._most and len(message.payload) > self._most:
            return self._oversize(entry_id, size, delivery)
        return DecodedEntry(entry_id, message, delivery)

    def malformed(self, entry_id: str, raw: bytes, error: str, delivery: Delivery) -> MalformedEntry:
        """An entry that is not a message, with its bytes if a dead letter can hold them."""
        original = raw if not self._most or len(raw) <= self._most else b""
        return MalformedEntry(entry_id, error, original, delivery, len(raw))

    def _oversize(self, entry_id: str, size: int, delivery: Delivery) -> MalformedEntry:
        error = f"the entry has {size} bytes, more than max_payload_bytes={self._most} allows; it is at {entry_id}"
        return MalformedEntry(entry_id, error, b"", delivery, size)


def check_readable(message: EventMessage) -> None:
    """Check that every part of a message has its type, and can be written as UTF-8.

    Raises:
        FormatError: naming the parts that cannot be published, nor published again as a dead letter.
    """
    texts = {name: getattr(message, name) for name in _TEXTS}
    texts["idempotency_key"] = message.idempotency_key or ""
    texts.update({f"the value of header {name!r}": value for name, value in message.headers.items()})
    texts.update({f"the name of header {name!r}": name for name in message.headers})
    wrong = [place for place, text in texts.items() if not isinstance(text, str) or not _is_encodable(text)]
    if not isinstance(message.payload, bytes):
        wrong.insert(0, "payload")
    if wrong:
        raise FormatError(
            f"message {message.uid!r} cannot be encoded: {', '.join(wrong)}",
            remedy="Give the payload as bytes, and everything else as text without lone surrogates.",
        )


def _is_encodable(text: str) -> bool:
    """Whether a text has no lone surrogates."""
    return text.encode("utf-8", "ignore").decode() == text


def removed_entry(entry_id: str, delivery: Delivery) -> MalformedEntry:
    """The malformed entry that stands for one that was removed from the stream while it was pending."""
    return MalformedEntry(entry_id, f"the entry {entry_id} was removed while it was pending", b"", delivery, 0)
