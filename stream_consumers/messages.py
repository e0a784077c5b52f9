"""Messages and their coordinates: streams, shards, sequences and timestamps (SeaStreamer's terms)."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import TypeVar
from urllib.parse import quote, unquote_to_bytes

from stream_consumers.errors import InvalidOptionError, InvalidStreamKeyError, InvalidUrlError

MAX_STREAM_KEY_BYTES = 249
WILDCARD = "SEA_STREAMER_WILDCARD"
"""The stream key that subscribes to all streams (SeaStreamer's); ``*`` is an abbreviation."""
INTERNAL_KEY = "SEA_STREAMER_INTERNAL"
"""The stream key of SeaStreamer's own messages, like the end of a stream."""
MAX_SEQUENCE = 2**63 - 2
"""The greatest sequence: the position after it still fits into a signed 64-bit number of tables and logs."""
MAX_SHARD = 2**63 - 1
"""The greatest shard number."""
MIN_TIMESTAMP_MS, MAX_TIMESTAMP_MS = -62_135_596_800_000, 253_402_300_799_999
"""The range of a datetime and of a Spark TIMESTAMP: the years 1 to 9999."""
EPOCH_MARK = "#"
"""Precedes the number in an epoch name, see :mod:`stream_consumers.epochs`; no stream key contains it."""
_STREAM_KEY = re.compile(r"[a-zA-Z0-9._-]*\Z")
_RESERVED = frozenset(f" %/,*?{EPOCH_MARK}'\"`\\^<>")
_ESCAPED = re.compile(r"%[0-9A-Fa-f]{2}")
_NUMBER = re.compile(r"[0-9]{1,19}")
_NUMBERED = re.compile(r"(.):(0|[1-9][0-9]{0,18})\Z")
_EPOCH_NAME = re.compile(rf"(.+){EPOCH_MARK}[1-9][0-9]*\Z")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MILLISECOND = timedelta(milliseconds=1)
T = TypeVar("T")


def check_stream_key(key: str) -> str:
    """Return ``key`` if it is a stream key: ``[a-zA-Z0-9._-]``, at most 249 bytes (SeaStreamer's rule).

    Raises:
        InvalidStreamKeyError: it is not a stream key.

    Example:
        >>> check_stream_key("orders-2026.eu")
        'orders-2026.eu'
    """
    if len(key) > MAX_STREAM_KEY_BYTES or not _STREAM_KEY.match(key):
        raise InvalidStreamKeyError(
            f"{key[:60]!r} is not a stream key",
            remedy=f"Use letters, digits, '.', '_' and '-', at most {MAX_STREAM_KEY_BYTES} of them.",
            length=len(key),
        )
    return key


def encode_key(key: bytes) -> str:
    r"""Encode a server's key of arbitrary bytes (Redis) as a stream key; most characters stay as they are.

    These are percent-encoded: characters with a meaning in a URL, a list of streams or a shard (``% / , * ? #``),
    quotes, ``\ ^ < >``, white space, characters that cannot be printed, bytes that are not UTF-8, and a colon before
    a number at the end, because ``user:42`` is shard 42 of ``user`` (SeaStreamer's rule). So the text is safe in a
    URL and in SQL.

    Example:
        >>> encode_key(b"user:events"), encode_key(b"user:42"), encode_key(b"tenants/7, new"), encode_key(b"\xff")
        ('user:events', 'user%3A42', 'tenants%2F7%2C%20new', '%FF')
    """
    text = "".join(map(_encoded, key.decode("utf-8", "surrogateescape")))
    if text == WILDCARD:
        return f"%{ord(text[0]):02X}{text[1:]}"
    return _NUMBERED.sub(r"\1%3A\2", text) if _shard_suffix(text) else text


def decode_key(stream: str) -> bytes:
    """Decode a stream key of :func:`encode_key`.

    Example:
        >>> decode_key("user:events"), decode_key("user%3A42")
        (b'user:events', b'user:42')
    """
    return unquote_to_bytes(stream)


def check_encoded_key(text: str) -> str:
    """Return ``text`` as the stream key that :func:`encode_key` would return.

    Raises:
        InvalidStreamKeyError: a character must be percent-encoded, or the text is ambiguous.

    Example:
        >>> check_encoded_key("user%3aevents")
        'user:events'
    """
    plain = _ESCAPED.sub("", text)
    wrong = next((char for char in plain if not _is_literal(char)), None)
    if wrong is not None:
        written = quote(wrong, safe="", errors="replace")
        raise InvalidStreamKeyError(
            f"{text[:60]!r} is not a stream key: {wrong!r} has a special meaning or cannot be printed",
            remedy=f"Write it as {written}."
            + (" Keys are not patterns; only '*' alone stands for all streams." if wrong == "*" else ""),
        )
    numbered = _shard_suffix(text)
    if numbered:
        stream, number = text[: numbered.end(1)], numbered[2]
        raise InvalidStreamKeyError(
            f"{text[:60]!r} is ambiguous: shard {number} of the stream {stream!r}, or a key",
            remedy=f"Write {stream} for that stream with all its shards, or {stream}%3A{number} for the key.",
        )
    return encode_key(decode_key(text)) if "%" in text else text


def _shard_suffix(text: str) -> re.Match[str] | None:
    """Match the shard number at the end of a key; see :func:`stream_consumers.redis.entries.is_shard_id`."""
    found = _NUMBERED.search(text)
    return found if found and int(found[2]) <= MAX_SHARD else None


def _is_literal(char: str) -> bool:
    return char not in _RESERVED and char.isprintable()


def _encoded(char: str) -> str:
    return char if _is_literal(char) else quote(char, safe="", errors="surrogateescape")


@dataclass(frozen=True, order=True, slots=True)
class Shard:
    """An ordered part of a stream: a Kafka partition, a Redis key ``orders:3``, or a shard id in a file.

    Args:
        stream: the stream key; for Redis, as encoded by :func:`encode_key`.
        id: the shard number, from 0.

    Example:
        >>> str(Shard("orders", 3)), Shard.parse("orders/3") == Shard("orders", 3)
        ('orders/3', True)
    """

    stream: str
    id: int = 0

    def __str__(self) -> str:
        return f"{self.stream}/{self.id}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse ``stream/id``; the stream may be an epoch, like ``orders#2``.

        Raises:
            InvalidUrlError: the text has no ``/`` followed by a whole number up to :data:`MAX_SHARD`.
        """
        stream, slash, number = text.rpartition("/")
        if not slash or not _NUMBER.fullmatch(number) or int(number) > MAX_SHARD:
            raise InvalidUrlError(f"{text!r} is not a shard", remedy="Write it as stream/number, like orders/3.")
        epoch = _EPOCH_NAME.match(stream)
        if epoch:
            check_encoded_key(epoch[1])
        return cls(stream if epoch else check_encoded_key(stream), int(number))


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a stream; (shard, sequence) identifies it.

    Args:
        shard: the stream and shard of the message.
        sequence: the sequence in the shard, from 0; sequences grow, but not always by one.
        timestamp_ms: the send time in Unix milliseconds (UTC).
        payload: the bytes; ``None`` for a Kafka tombstone.
        key: the partitioning key, if the backend has keys.
        headers: (name, value) pairs in order, if the backend has headers.

    Example:
        >>> Message(Shard("orders"), 7, 1_700_000_000_020, b"{}").text()
        '{}'
    """

    shard: Shard
    sequence: int
    timestamp_ms: int
    payload: bytes | None = field(repr=False)
    key: bytes | None = field(default=None, repr=False)
    headers: tuple[tuple[str, bytes | None], ...] = field(default=(), repr=False)

    @property
    def timestamp(self) -> datetime:
        """The send time as an aware UTC datetime with millisecond precision."""
        return from_milliseconds(self.timestamp_ms)

    def text(self) -> str:
        """Return the payload as UTF-8 text (empty for a tombstone).

        Raises:
            UnicodeDecodeError: the payload is not UTF-8.
        """
        return (self.payload or b"").decode()

    def to_json(self) -> Mapping[str, object]:
        """Return the message as a JSON object with SeaStreamer's header names; :meth:`from_json` parses it.

        Bytes that are not UTF-8 are encoded in base64, under a name that ends with ``_base64``. ``key`` and ``headers``
        are left out if the message has none.

        Example:
            >>> Message(Shard("orders"), 7, 20, b"{}", key=b"a", headers=(("n", None),)).to_json()["headers"]
            [{'name': 'n', 'value': None}]
        """
        document: dict[str, object] = {
            "stream_key": self.shard.stream,
            "shard_id": self.shard.id,
            "sequence": self.sequence,
            "timestamp": utc_text(self.timestamp_ms),
            **bytes_to_json("payload", self.payload),
        }
        if self.key is not None:
            document |= bytes_to_json("key", self.key)
        if self.headers:
            document["headers"] = [{"name": name, **bytes_to_json("value", value)} for name, value in self.headers]
        return document

    @classmethod
    def from_json(cls, document: object) -> Message:
        r"""Parse the result of :meth:`to_json`; the defaults are shard 0, sequence 0, now, and no payload.

        Raises:
            InvalidOptionError: the document is not such an object, or a value has another type.

        Example:
            >>> message = Message(Shard("orders", 3), 7, 1_700_000_000_020, b"\xff", key=b"a")
            >>> Message.from_json(message.to_json()) == message
            True
        """
        if not isinstance(document, dict):
            raise _invalid_message("it is not an object")
        try:
            moment = document.get("timestamp")
            headers = map(_parsed_header, _checked_type(list, "headers", document.get("headers", [])))
            shard_id = _checked_type(int, "shard_id", document.get("shard_id", 0))
            return cls(
                check_shard(Shard(_checked_type(str, "stream_key", document.get("stream_key", "")), shard_id)),
                _checked_type(int, "sequence", document.get("sequence", 0)),
                now_milliseconds() if moment is None else to_milliseconds(_parsed_time(moment)),
                bytes_from_json("payload", document),
                bytes_from_json("key", document),
                tuple(headers),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise _invalid_message(str(error)) from None


def _invalid_message(reason: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"the JSON is not a message: {reason}",
        remedy='Write an object like {"payload": "…", "key": "…", "shard_id": 0}, as stream-assets peek --json does.',
    )


def _checked_type(kind: type[T], name: str, value: object) -> T:
    if isinstance(value, kind) and type(value) is kind:
        return value
    raise TypeError(f"{name} must be {kind.__name__}, and is {type(value).__name__}")


def _parsed_header(header: object) -> tuple[str, bytes | None]:
    fields = _checked_type(dict, "a header", header)
    return _checked_type(str, "name of a header", fields.get("name")), bytes_from_json("value", fields)


def _parsed_time(moment: object) -> datetime:
    text = _checked_type(str, "timestamp", moment)
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        # Python's own text repeats the value.
        raise ValueError("timestamp must be a time in ISO 8601") from None


def bytes_to_json(name: str, data: bytes | None) -> dict[str, object]:
    """Return bytes as text, or in base64 under a name that ends with ``_base64`` if they are not UTF-8."""
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data or b"").decode()}


def bytes_from_json(name: str, document: Mapping[str, object]) -> bytes | None:
    """Parse the result of :func:`bytes_to_json`.

    Raises:
        TypeError, ValueError: the value has another type, is not base64, or is given twice.
    """
    encoded, text = document.get(f"{name}_base64"), document.get(name)
    if encoded is not None and text is not None:
        raise ValueError(f"it has {name} and {name}_base64")
    try:
        if encoded is not None:
            return base64.b64decode(_checked_type(str, f"{name}_base64", encoded), validate=True)
        return None if text is None else _checked_type(str, name, text).encode()
    except ValueError:
        # Python's own text may repeat a character.
        raise ValueError(f"{name} is not {'text' if encoded is None else 'base64'}") from None


class Receipt:
    """The shard, sequence and timestamp of a message that was sent.

    Args:
        shard: the shard of the message.
        sequence: its sequence in the shard, or a function that waits for the broker to assign it.
        timestamp_ms: its timestamp in Unix milliseconds.

    Example:
        >>> Receipt(Shard("orders"), lambda: 7, 1_700_000_000_020).sequence
        7
    """

    __slots__ = ("_sequence", "shard", "timestamp_ms")

    def __init__(self, shard: Shard, sequence: int | Callable[[], int], timestamp_ms: int) -> None:
        self.shard = shard
        self.timestamp_ms = timestamp_ms
        self._sequence = sequence

    @property
    def sequence(self) -> int:
        """The sequence in the shard; waits until it is known.

        Raises:
            StreamAssetsError: the message was not delivered.
        """
        if not isinstance(self._sequence, int):
            self._sequence = self._sequence()
        return self._sequence

    def __repr__(self) -> str:
        sequence = self._sequence if isinstance(self._sequence, int) else "pending"
        return f"Receipt({self.shard}, {sequence}, {self.timestamp_ms})"


def check_shard(shard: object) -> Shard:
    """Return ``shard`` if it is a valid shard.

    Raises:
        InvalidOptionError: it is not.

    Example:
        >>> check_shard(Shard("orders", "0"))
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: Shard(stream='orders', id='0') is not a shard. Give one like \
Shard('orders', 3), with a number from 0.
    """
    if isinstance(shard, Shard) and isinstance(shard.stream, str) and type(shard.id) is int and shard.id >= 0:
        return shard
    raise InvalidOptionError(
        f"{shard!r} is not a shard", remedy="Give one like Shard('orders', 3), with a number from 0."
    )


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A part of a stream that cannot be read as a message, with its original bytes.

    Args:
        shard: the shard that counts it.
        sequence: its sequence; ``None`` if it is unknown because framing was lost.
        timestamp_ms: its send time in Unix milliseconds; ``None`` if unknown.
        payload: the original bytes.
        error: the reason why it cannot be read as a message.
        offset: its start, in bytes from the beginning of the file.

    Example:
        >>> dead_letter = DeadLetter(Shard("orders"), 7, 1_700_000_000_000, b"?", "checksum mismatch", offset=128)
        >>> dead_letter.sequence, dead_letter.error
        (7, 'checksum mismatch')
    """

    shard: Shard
    sequence: int | None
    timestamp_ms: int | None
    payload: bytes = field(repr=False)
    error: str
    offset: int | None = None


def to_milliseconds(moment: datetime) -> int:
    """Convert a datetime to Unix milliseconds, rounded down; a naive datetime is taken as UTC.

    Example:
        >>> to_milliseconds(datetime(1970, 1, 1, 0, 0, 1))
        1000

    Raises:
        InvalidOptionError: it is not a datetime.
    """
    if not isinstance(moment, datetime):
        raise InvalidOptionError(f"{moment!r} is not a datetime", remedy="Give one with a time zone, or in UTC.")
    aware = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return (aware - _EPOCH) // _MILLISECOND


def from_milliseconds(milliseconds: int) -> datetime:
    """Convert Unix milliseconds to an aware UTC datetime.

    Example:
        >>> from_milliseconds(1000).isoformat()
        '1970-01-01T00:00:01+00:00'
    """
    return _EPOCH + milliseconds * _MILLISECOND


def now_milliseconds() -> int:
    """Return the current time in Unix milliseconds.

    Example:
        >>> from_milliseconds(now_milliseconds()) <= datetime.now(timezone.utc)
        True
    """
    return time.time_ns() // 1_000_000


def is_recent(moment: float, *, now: float, seconds: float) -> bool:
    """Return whether a moment on the system's clock is within ``seconds`` before or after now.

    A moment further in the future was recorded before the clock was set back. It counts as long past, because waiting
    for it to pass would take as long as the clock was set back.

    Args:
        moment: the moment, in seconds since 1970.
        now: the current time, in seconds since 1970.
        seconds: the greatest distance of a recent moment.

    Example:
        >>> [is_recent(moment, now=100.0, seconds=10.0) for moment in (80.0, 95.0, 105.0, 3700.0)]
        [False, True, True, False]
    """
    return abs(now - moment) < seconds


def utc_text(milliseconds: int) -> str:
    """Format Unix milliseconds in ISO 8601 with the zone, or as a number outside the range of dates.

    Example:
        >>> utc_text(20), utc_text(1 << 60)
        ('1970-01-01T00:00:00.020Z', '1152921504606846976 ms')
    """
    try:
        return from_milliseconds(milliseconds).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except OverflowError:
        return f"{milliseconds} ms"
