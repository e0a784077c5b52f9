"""Messages and their coordinates: streams, shards, sequences, timestamps (SeaStreamer's terms)."""

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
"""The stream key that subscribes to all streams (SeaStreamer's); ``*`` is short for it."""
INTERNAL_KEY = "SEA_STREAMER_INTERNAL"
"""The stream key of SeaStreamer's own messages, like the end of a stream."""
MAX_SEQUENCE = 2**63 - 2
"""The greatest sequence: the position behind it is a signed number of 64 bits, as tables and logs have them."""
MAX_SHARD = 2**63 - 1
"""The greatest number of a shard."""
MIN_TIMESTAMP_MS, MAX_TIMESTAMP_MS = -62_135_596_800_000, 253_402_300_799_999
"""The times that a datetime, and a TIMESTAMP of Spark, can say: the years 1 to 9999."""
EPOCH_MARK = "#"
"""Stands in the names of epochs before their number, see :mod:`stream_consumers.epochs`; no stream key holds it."""
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
        InvalidStreamKeyError: naming the key and its length.

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
    r"""The stream key of a server's key that may be any bytes (Redis): it as it is, but for some characters.

    Percent-encoded are those that a URL, a list of streams or a shard give a meaning (``% / , * ? #``), quotes,
    ``\ ^ < >``, white space, what cannot be printed, bytes that are not UTF-8, and the colon before a number at the
    end, since ``user:42`` is shard 42 of ``user`` (SeaStreamer's rule). So the text may stand in a URL and in SQL.

    Example:
        >>> encode_key(b"user:events"), encode_key(b"user:42"), encode_key(b"tenants/7, new"), encode_key(b"\xff")
        ('user:events', 'user%3A42', 'tenants%2F7%2C%20new', '%FF')
    """
    text = "".join(map(_encoded, key.decode("utf-8", "surrogateescape")))
    if text == WILDCARD:
        return f"%{ord(text[0]):02X}{text[1:]}"
    return _NUMBERED.sub(r"\1%3A\2", text) if _shard_suffix(text) else text


def decode_key(stream: str) -> bytes:
    """The key that a stream key of :func:`encode_key` stands for.

    Example:
        >>> decode_key("user:events"), decode_key("user%3A42")
        (b'user:events', b'user:42')
    """
    return unquote_to_bytes(stream)


def check_encoded_key(text: str) -> str:
    """Return the stream key that ``text`` writes, as :func:`encode_key` would.

    Raises:
        InvalidStreamKeyError: a character has to be percent-encoded; or the text may be read in two ways.

    Example:
        >>> check_encoded_key("user%3aevents")
        'user:events'
    """
    plain = _ESCAPED.sub("", text)
    wrong = next((char for char in plain if not _is_literal(char)), None)
    if wrong is not None:
        written = quote(wrong, safe="", errors="replace")
        raise InvalidStreamKeyError(
            f"{text[:60]!r} is not a stream key: {wrong!r} has a meaning here, or cannot be shown",
            remedy=f"Write it as {written}."
            + (" Keys are no patterns; '*' alone stands for all streams." if wrong == "*" else ""),
        )
    numbered = _shard_suffix(text)
    if numbered:
        stream, number = text[: numbered.end(1)], numbered[2]
        raise InvalidStreamKeyError(
            f"{text[:60]!r} may be shard {number} of the stream {stream!r}, or a key of its own",
            remedy=f"Write {stream} for that stream with all its shards, or {stream}%3A{number} for the key.",
        )
    return encode_key(decode_key(text)) if "%" in text else text


def _shard_suffix(text: str) -> re.Match[str] | None:
    """How a key ends that is a shard; see :func:`stream_consumers.redis.entries.is_shard_id`."""
    found = _NUMBERED.search(text)
    return found if found and int(found[2]) <= MAX_SHARD else None


def _is_literal(char: str) -> bool:
    return char not in _RESERVED and char.isprintable()


def _encoded(char: str) -> str:
    return char if _is_literal(char) else quote(char, safe="", errors="surrogateescape")


@dataclass(frozen=True, order=True, slots=True)
class Shard:
    """One ordered part of a stream: a Kafka partition, a Redis key ``orders:3``, a shard id in a file.

    Args:
        stream: the stream key; of Redis, as :func:`encode_key` writes it.
        id: its number, from 0.

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
        """Read ``stream/id`` back; the stream may be an epoch, like ``orders#2``.

        Raises:
            InvalidUrlError: if there is no ``/``, or no whole number up to :data:`MAX_SHARD` behind it.
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
        shard: the stream and shard it came from.
        sequence: its place in the shard, from 0, growing but not always by one.
        timestamp_ms: when it was sent, unix milliseconds UTC.
        payload: the bytes; ``None`` for a Kafka tombstone.
        key: the partitioning key where the backend has one.
        headers: (name, value) pairs in order where the backend has them.

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
        """The payload as UTF-8 text (empty for a tombstone).

        Raises:
            UnicodeDecodeError: if it is not UTF-8.
        """
        return (self.payload or b"").decode()

    def to_json(self) -> Mapping[str, object]:
        """The message as a JSON object, under SeaStreamer's header names; :meth:`from_json` reads it back.

        Bytes that are not UTF-8 are in base64, under a name with ``_base64`` at its end. ``key`` and ``headers`` are
        left out where the message has none.

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
        r"""Read :meth:`to_json` back; what a document leaves out is shard 0, sequence 0, now, or nothing.

        Raises:
            InvalidOptionError: it is not such an object, or one of its values is of another kind.

        Example:
            >>> message = Message(Shard("orders", 3), 7, 1_700_000_000_020, b"\xff", key=b"a")
            >>> Message.from_json(message.to_json()) == message
            True
        """
        if not isinstance(document, dict):
            raise _invalid_message("it is not an object")
        try:
            moment = document.get("timestamp")
            headers = [
                (_checked_type(str, "name", one.get("name")), bytes_from_json("value", one))
                for one in document.get("headers", ())
            ]
            return cls(
                check_shard(Shard(document.get("stream_key", ""), document.get("shard_id", 0))),
                _checked_type(int, "sequence", document.get("sequence", 0)),
                now_milliseconds() if moment is None else to_milliseconds(datetime.fromisoformat(_utc(moment))),
                bytes_from_json("payload", document),
                bytes_from_json("key", document),
                tuple(headers),
            )
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise _invalid_message(str(error)) from error


def _invalid_message(reason: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"the JSON is not a message: {reason}",
        remedy='Write an object like {"payload": "…", "key": "…", "shard_id": 0}, as stream-assets peek --json does.',
    )


def _checked_type(kind: type[T], name: str, value: object) -> T:
    if isinstance(value, kind) and type(value) is kind:
        return value
    raise TypeError(f"{name} must be {kind.__name__}, and is {type(value).__name__}")


def _utc(moment: object) -> str:
    return _checked_type(str, "timestamp", moment).replace("Z", "+00:00")


def bytes_to_json(name: str, data: bytes | None) -> dict[str, object]:
    """Bytes as text; those that are not UTF-8 in base64, under the name with ``_base64`` at its end."""
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data or b"").decode()}


def bytes_from_json(name: str, document: Mapping[str, object]) -> bytes | None:
    """Read :func:`bytes_to_json` back.

    Raises:
        TypeError, ValueError: a value of another kind, no base64, or both ways at once.
    """
    encoded, text = document.get(f"{name}_base64"), document.get(name)
    if encoded is not None and text is not None:
        raise ValueError(f"it has {name} and {name}_base64")
    if encoded is not None:
        return base64.b64decode(_checked_type(str, f"{name}_base64", encoded), validate=True)
    return None if text is None else _checked_type(str, name, text).encode()


class Receipt:
    """The shard, sequence and timestamp of a message that was sent.

    Args:
        shard: the shard it was sent to.
        sequence: its place in the shard, or a function that waits for the broker to assign it.
        timestamp_ms: the time it was sent with.

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
        """Its place in the shard; waits until it is known.

        Raises:
            StreamAssetsError: the message was not delivered; the error of the producer.
        """
        if not isinstance(self._sequence, int):
            self._sequence = self._sequence()
        return self._sequence

    def __repr__(self) -> str:
        sequence = self._sequence if isinstance(self._sequence, int) else "on its way"
        return f"Receipt({self.shard}, {sequence}, {self.timestamp_ms})"


def check_shard(shard: object) -> Shard:
    """Return ``shard`` if it is one.

    Raises:
        InvalidOptionError: naming what it is instead.

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
    """A part of a stream that cannot be used as a message, with its original bytes.

    Args:
        shard: the shard that it counts towards.
        sequence: its sequence, or ``None`` if that is unknown since framing was lost.
        timestamp_ms: its send time, or ``None`` if that is unknown.
        payload: the original bytes.
        error: the reason why it cannot be used.
        offset: where it starts, in bytes from the start of the file.

    Example:
        >>> letter = DeadLetter(Shard("orders"), 7, 1_700_000_000_000, b"?", "checksum mismatch", offset=128)
        >>> letter.sequence, letter.error
        (7, 'checksum mismatch')
    """

    shard: Shard
    sequence: int | None
    timestamp_ms: int | None
    payload: bytes = field(repr=False)
    error: str
    offset: int | None = None


def to_milliseconds(moment: datetime) -> int:
    """Unix milliseconds of an aware datetime (a naive one is read as UTC), rounded down.

    Example:
        >>> to_milliseconds(datetime(1970, 1, 1, 0, 0, 1))
        1000

    Raises:
        InvalidOptionError: it is not a datetime.
    """
    if not isinstance(moment, datetime):
        raise InvalidOptionError(f"{moment!r} is not a datetime", remedy="Give one with its zone, or in UTC.")
    aware = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return (aware - _EPOCH) // _MILLISECOND


def from_milliseconds(milliseconds: int) -> datetime:
    """The aware UTC datetime of unix milliseconds.

    Example:
        >>> from_milliseconds(1000).isoformat()
        '1970-01-01T00:00:01+00:00'
    """
    return _EPOCH + milliseconds * _MILLISECOND


def now_milliseconds() -> int:
    """The current time in unix milliseconds.

    Example:
        >>> from_milliseconds(now_milliseconds()) <= datetime.now(timezone.utc)
        True
    """
    return time.time_ns() // 1_000_000


def is_recent(moment: float, *, now: float, seconds: float) -> bool:
    """Whether a moment on the system's clock is within ``seconds`` of now, on either side.

    A moment further ahead was noted before the clock was set back. It counts as long past: what waits for it to pass
    would wait for as long as the clock was set back.

    Args:
        moment: in seconds since 1970, like ``now``.
        now: the clock.
        seconds: how long a moment is recent.

    Example:
        >>> [is_recent(moment, now=100.0, seconds=10.0) for moment in (80.0, 95.0, 105.0, 3700.0)]
        [False, True, True, False]
    """
    return abs(now - moment) < seconds


def utc_text(milliseconds: int) -> str:
    """Unix milliseconds in ISO 8601 with the zone, or as their number where no date can say them.

    Example:
        >>> utc_text(20), utc_text(1 << 60)
        ('1970-01-01T00:00:00.020Z', '1152921504606846976 ms')
    """
    try:
        return from_milliseconds(milliseconds).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except OverflowError:
        return f"{milliseconds} ms"
