r"""Lines of text as messages: ``[timestamp | stream | sequence | shard] payload`` (SeaStreamer's stdio format).

Parts of the header may be left out from its end, and the timestamp from its start; without a header, the line is the
payload. Lines are bytes. The differences to SeaStreamer:

* A line that starts with ``[`` and has no valid header is a payload; SeaStreamer's process aborts. A line with a shard
  above 2^63 - 1 or a reserved stream key is a payload, too. So is a JSON array of one bare number, ``true``, ``false``
  or ``null``, which could also be a stream's name without a payload.
* A header without a time or a sequence counts only if a consumer reads its stream. Otherwise the line is a
  payload, like ``[INFO] started`` or text after a time alone (:mod:`stream_consumers.stdio.broker`).
* Text with a time finer than milliseconds is not a header, because a message has its time in milliseconds.
* A payload that a line cannot contain (a newline, white space around it, bytes that are not UTF-8) is written in base64
  after :data:`ESCAPE`, and decoded if the header has a timestamp, a stream and a sequence, as ours do. For SeaStreamer
  it is text.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field, replace
from datetime import datetime

from stream_consumers.display import as_text
from stream_consumers.errors import FormatError, InvalidOptionError
from stream_consumers.messages import (
    INTERNAL_KEY,
    MAX_SHARD,
    MAX_STREAM_KEY_BYTES,
    WILDCARD,
    Message,
    check_stream_key,
    from_milliseconds,
    to_milliseconds,
)

BROADCAST = "broadcast"
SEQUENCES = 2**64
_RESERVED = {INTERNAL_KEY.encode(), WILDCARD.encode()}
ESCAPE = b"data:application/vnd.stream-assets;base64,"
MAX_HEADER_PARTS = 4
"""A time, a stream, a sequence and a shard."""
_HEADER = re.compile(rb"\[([^\]]+)\]")
_TIMESTAMP = re.compile(rb"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.(\d{1,3}))?")
_STREAM = re.compile(rb"[a-zA-Z0-9._-]{1,%d}" % MAX_STREAM_KEY_BYTES)
_NUMBER = re.compile(rb"\d{1,20}")
_JSON_SCALAR = re.compile(rb"-?(0|[1-9]\d*)(\.\d+)?([eE]-?\d+)?|true|false|null")


@dataclass(frozen=True, slots=True)
class Line:
    """The parts of a line; ``None`` for parts that it leaves out.

    Args:
        payload: the bytes of the message.
        timestamp_ms: unix milliseconds.
        stream: the stream key; a line without one is for every consumer.
        sequence: the sequence of the message in its shard.
        shard: the shard id.
    """

    payload: bytes = field(repr=False)
    timestamp_ms: int | None = None
    stream: str | None = None
    sequence: int | None = None
    shard: int | None = None

    @property
    def is_certain(self) -> bool:
        """Whether the header has a time, a stream and a sequence, as producers write it; other text does not."""
        return self.timestamp_ms is not None and self.sequence is not None


def parse_line(line: bytes) -> Line:
    """Parse one line without its newline; every line can be parsed.

    Example:
        >>> parse_line(b"[2022-01-02T03:04:05.678 | orders | 7] {}").sequence
        7
        >>> parse_line(b'["a", "b"]').payload
        b'["a", "b"]'
    """
    head = _HEADER.match(line)
    header = head and _parse_header(head[1])
    if not head or not header:
        return Line(line)
    payload = line[head.end() :].strip()
    if not payload and header.timestamp_ms is header.sequence is None and _JSON_SCALAR.fullmatch(head[1].strip()):
        return Line(line)
    return replace(header, payload=_unescaped(payload) if header.is_certain else payload)


def format_line(message: Message) -> bytes:
    r"""Return one message as a line with its newline; :func:`parse_line` restores the message.

    The shard and the milliseconds of the time are written unless they are 0. ``None`` as a payload is written like an
    empty one.

    Raises:
        InvalidStreamKeyError: the stream of the message is not a stream key.
        InvalidOptionError: the time is not in the years 1 to 9999, or a number is too great.

    Example:
        >>> from stream_consumers.messages import Shard
        >>> format_line(Message(Shard("orders"), 7, 1_700_000_000_020, b"{}"))
        b'[2023-11-14T22:13:20.020 | orders | 7] {}\n'
        >>> format_line(Message(Shard("orders", 3), 8, 1_700_000_000_000, b"two\nlines"))
        b'[2023-11-14T22:13:20 | orders | 8 | 3] data:application/vnd.stream-assets;base64,dHdvCmxpbmVz\n'
    """
    shard = message.shard
    for name, number, greatest in (("sequence", message.sequence, SEQUENCES - 1), ("shard", shard.id, MAX_SHARD)):
        if not 0 <= number <= greatest:
            raise InvalidOptionError(f"{name}={number} does not fit into a line", remedy=f"Use 0 to {greatest}.")
    parts = [_timestamp(message.timestamp_ms), check_stream_key(shard.stream), str(message.sequence)]
    if not shard.stream:
        raise InvalidOptionError("a line cannot name the stream ''", remedy="Give the stream a name.")
    if shard.id:
        parts.append(str(shard.id))
    header, payload = f"[{' | '.join(parts)}]".encode(), _escaped(message.payload or b"")
    return b"%s %s\n" % (header, payload) if payload else header + b"\n"


def format_bare_line(message: Message) -> bytes:
    r"""Return the payload alone as a line, for tools that do not read headers.

    Raises:
        FormatError: the payload contains a newline, and would be several lines.

    Example:
        >>> from stream_consumers.messages import Shard
        >>> format_bare_line(Message(Shard("orders"), 7, 0, b"{}"))
        b'{}\n'
    """
    payload = message.payload or b""
    if b"\n" in payload:
        raise FormatError(
            f"a message to {message.shard} contains a newline, and would be several lines without a header",
            remedy="Write it with its header, which encodes the payload in base64.",
            sequence=message.sequence,
            newlines=payload.count(b"\n"),
        )
    return payload + b"\n"


def _parse_header(text: bytes) -> Line | None:
    """Return the header between the brackets, with an empty payload; ``None`` if it is not a header."""
    timestamp_ms: int | None = None
    # A longer header is none, and splitting a long line at each bar would take many times its size.
    parts = [part.strip() for part in text.split(b"|", MAX_HEADER_PARTS)]
    if b":" in parts[0]:
        timestamp_ms = _milliseconds(parts.pop(0))
        if timestamp_ms is None:
            return None
    if not parts:
        return Line(b"", timestamp_ms)
    stream, *numbers = parts
    values = [int(number) if _NUMBER.fullmatch(number) else SEQUENCES for number in numbers]
    if not _STREAM.fullmatch(stream) or stream in _RESERVED or len(values) > 2 or max(values, default=0) >= SEQUENCES:
        return None
    sequence, shard = (*values, None, None)[:2]
    if shard is not None and shard > MAX_SHARD:
        return None
    return Line(b"", timestamp_ms, stream.decode(), sequence, shard)


def _milliseconds(text: bytes) -> int | None:
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        return None
    *fields, fraction = match.groups()
    year, month, day, hour, minute, second = map(int, fields)
    try:
        moment = to_milliseconds(datetime(year, month, day, hour, minute, second))  # noqa: DTZ001 - naive means UTC
    except ValueError:
        return None
    return moment + int((fraction or b"").ljust(3, b"0"))


def _timestamp(milliseconds: int) -> str:
    try:
        moment = from_milliseconds(milliseconds).replace(tzinfo=None)
    except OverflowError as error:
        raise InvalidOptionError(
            f"timestamp_ms={milliseconds} does not fit into a line", remedy="Use a time in the years 1 to 9999."
        ) from error
    return moment.isoformat(timespec="milliseconds" if milliseconds % 1000 else "seconds")


def _escaped(payload: bytes) -> bytes:
    is_plain = payload == payload.strip() and b"\n" not in payload and not payload.startswith(ESCAPE)
    return payload if is_plain and as_text(payload) is not None else ESCAPE + base64.b64encode(payload)


def _unescaped(payload: bytes) -> bytes:
    if not payload.startswith(ESCAPE):
        return payload
    encoded = payload[len(ESCAPE) :]
    try:
        decoded = base64.b64decode(encoded, validate=True)
    except ValueError:
        return payload
    # Only text that format_line could have written is decoded; other text is the payload.
    return decoded if ESCAPE + base64.b64encode(decoded) == payload and _escaped(decoded) == payload else payload
