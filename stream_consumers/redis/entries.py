"""Conversion of entry ids to sequences, keys to shards, and entries to messages (SeaStreamer's rules)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable
from typing import TypeAlias

from stream_consumers.display import counted
from stream_consumers.errors import FormatError, InvalidOptionError
from stream_consumers.messages import MAX_SEQUENCE, MAX_SHARD, DeadLetter, Message, Shard, decode_key, encode_key
from stream_consumers.options import check_iterable

_ENTRY_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?\Z")
SUB_BITS = 16
MAX_SUB = (1 << SUB_BITS) - 1
MAX_MS = (1 << 47) - 1
"""The last millisecond whose sequences fit into signed 64-bit numbers, in the year 6429."""
MAX_OTHER_BYTES = 256 * 1024 * 1024
"""The most bytes of an entry, in the form in which they are kept, beside those of its payload."""
# A byte of a name that is not UTF-8 is shown as four characters, and as JSON a byte may become six.
_MAX_PRINTED, _MAX_ESCAPES = 4, 5
_PLAIN = bytes(byte for byte in range(0x20, 0x7F) if byte not in b'"\\')
_NOT_KEPT = f"its bytes are not kept, which as JSON are more than {MAX_OTHER_BYTES:,}"
_PATTERN_CHARACTERS = re.compile(rb"[*?\[\]\\]")
RawEntry: TypeAlias = tuple[bytes, "list[bytes] | None"]
"""An entry of a Redis reply: the id, and alternating names and values; ``None`` if the entry was trimmed."""


def to_sequence(entry_id: bytes | str) -> int:
    """Convert an entry id to a sequence.

    Raises:
        FormatError: it is not an id, or an id without a sequence (more than 65536 entries in a millisecond, or above
            :data:`GREATEST`).

    Example:
        >>> to_sequence("1795219782548-1")
        117651523669065729
    """
    text = _two_numbers(entry_id)
    milliseconds, sub = id_order(text)
    sequence = milliseconds << SUB_BITS | sub
    if sub > MAX_SUB or sequence > MAX_SEQUENCE:
        raise FormatError(
            f"the entry id {text} has no sequence: its second number exceeds {MAX_SUB}, or the id exceeds {GREATEST}",
            remedy="Let Redis generate the ids (XADD key * …), or distribute the messages over shards.",
        )
    return sequence


def to_id(sequence: int) -> str:
    """Convert a sequence to an entry id.

    Example:
        >>> to_id(117651523669065729)
        '1795219782548-1'
    """
    return f"{sequence >> SUB_BITS}-{sequence & MAX_SUB}"


GREATEST = to_id(MAX_SEQUENCE)
"""The greatest entry id that has a sequence."""


class EntrySequence(int):
    """A sequence that prints as the id of its entry.

    Example:
        >>> f"{EntrySequence(117651523669065729)}"
        '1795219782548-1'
    """

    def __str__(self) -> str:
        return to_id(self)

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def parse_sequence(text: str) -> int | None:
    """Parse a sequence: a number, or the id of a Redis entry; return ``None`` if it is neither.

    Example:
        >>> parse_sequence("7"), parse_sequence("1795219782548-1"), parse_sequence("2026-11-01")
        (7, 117651523669065729, None)
    """
    if not _ENTRY_ID.match(text):
        return None
    return to_sequence(text) if "-" in text else int(text)


def check_entry_id(entry_id: str, special: Collection[str] = ()) -> str:
    """Return ``entry_id`` if it is the id of an entry, or one of ``special``.

    Raises:
        InvalidOptionError: it is neither.

    Example:
        >>> check_entry_id("1700000000000-0"), check_entry_id("$", special=["$"])
        ('1700000000000-0', '$')
    """
    if not isinstance(entry_id, str) or (entry_id not in special and not _ENTRY_ID.match(entry_id)):
        listed = "".join(f", or {word!r}" for word in special)
        raise InvalidOptionError(
            f"{entry_id!r} is not an identifier of an entry", remedy=f"Write an id like 1700000000000-0{listed}."
        )
    return entry_id


def check_entry_ids(entry_ids: Iterable[str]) -> None:
    """Raise unless ``entry_ids`` is a collection of entry ids.

    Raises:
        InvalidOptionError: it is text, or contains something that is not an id.

    Example:
        >>> check_entry_ids(["1-0", "2-0"])
    """
    check_iterable("entry_ids", entry_ids)
    for entry_id in entry_ids:
        check_entry_id(entry_id)


def sequence_after(entry_id: bytes | str) -> int:
    """Return the first sequence after an id, which may have none; 0 for ``0-0``, which is never the id of an entry.

    Raises:
        FormatError: it is not an id.

    Example:
        >>> sequence_after("0-0"), sequence_after("0-5"), to_id(sequence_after("9-70000"))
        (0, 6, '10-0')
    """
    sequence = sequence_up_to(entry_id)
    return sequence + 1 if sequence else 0


def id_before(sequence: int) -> str:
    """Return the id after which a read returns ``sequence`` first.

    Example:
        >>> id_before(0), id_before(6)
        ('0-0', '0-5')
    """
    return to_id(max(0, sequence - 1))


def id_range(start: int, end: int) -> tuple[str, str]:
    """Return the arguments of XRANGE for ``[start, end)``.

    Each id is in one of two adjacent ranges. An id without a sequence is in the later one, because the earlier one may
    have been read before its entry was added.

    Example:
        >>> id_range(5, 8), id_range(10 << 16, 11 << 16)
        (('(0-4', '0-7'), ('(9-65535', '10-65535'))
    """
    return f"({id_before(start)}", id_before(end)


def id_order(entry_id: str) -> tuple[int, ...]:
    """Return a sort key for entry ids, including ids without a sequence.

    Raises:
        FormatError: it is not an id.

    Example:
        >>> sorted(["10-0", "9-70000", "9-2"], key=id_order)
        ['9-2', '9-70000', '10-0']
    """
    if not _ENTRY_ID.match(entry_id):
        raise _not_an_id(entry_id)
    return tuple(map(int, entry_id.split("-")))


def sequence_up_to(entry_id: bytes | str) -> int:
    """Return the last sequence at or before an id, which may have none, like that of an entry that was deleted.

    Raises:
        FormatError: it is not an id.

    Example:
        >>> sequence_up_to("0-5"), to_id(sequence_up_to("9-70000"))
        (5, '9-65535')
    """
    time, number = id_order(_two_numbers(entry_id))
    return min((time << SUB_BITS) + min(number, MAX_SUB), MAX_SEQUENCE)


def _two_numbers(entry_id: bytes | str) -> str:
    text = entry_id.decode("ascii", "replace") if isinstance(entry_id, bytes) else entry_id
    if "-" not in text:
        raise _not_an_id(text)
    return text


def _not_an_id(text: str) -> FormatError:
    return FormatError(f"{text[:50]!r} is not a Redis entry id", remedy="Write it as milliseconds-number.")


def to_timestamp_ms(sequence: int) -> int:
    """Return the time when the entry was added, in Unix milliseconds."""
    return sequence >> SUB_BITS


def is_shard_id(text: str) -> bool:
    """Return whether the end of a key is a shard number: up to 2^63-1, without leading zeros.

    Example:
        >>> [is_shard_id(text) for text in ("0", "12", "012", "x", "")]
        [True, True, False, False, False]
    """
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_SHARD))
    return is_number and int(text) <= MAX_SHARD and str(int(text)) == text


def shard_of(key: bytes) -> Shard:
    """Return the shard of a key (SeaStreamer's rule).

    Example:
        >>> shard_of(b"orders:3"), shard_of(b"user:events")
        (Shard(stream='orders', id=3), Shard(stream='user:events', id=0))
    """
    stream, _, tail = key.rpartition(b":")
    number = tail.decode("latin-1")
    return Shard(encode_key(stream), int(number)) if stream and is_shard_id(number) else Shard(encode_key(key))


def numbered_key(shard: Shard) -> bytes:
    """Return the key of a shard in a stream with numbered keys.

    Example:
        >>> numbered_key(Shard("orders", 3)), numbered_key(Shard("user%3A42", 0))
        (b'orders:3', b'user:42:0')
    """
    return b"%s:%d" % (decode_key(shard.stream), shard.id)


def is_numbered(key: bytes, shard: Shard) -> bool:
    """Return whether the key of a shard contains its number; otherwise it is the only key of its stream.

    Example:
        >>> is_numbered(b"orders:0", Shard("orders")), is_numbered(b"orders", Shard("orders"))
        (True, False)
    """
    return key != decode_key(shard.stream)


def pattern_of_shards(stream: str) -> bytes:
    r"""Return a SCAN pattern that matches the numbered keys of a stream, and possibly other keys.

    Example:
        >>> pattern_of_shards("orders"), pattern_of_shards("[a]")
        (b'orders:*', b'\\[a\\]:*')
    """
    return _PATTERN_CHARACTERS.sub(rb"\\\g<0>", decode_key(stream)) + b":*"


def to_key(name: str) -> bytes:
    r"""Convert the result of :func:`key_text` back to a key.

    Raises:
        InvalidOptionError: it is not text, or contains a surrogate that represents no byte.

    Example:
        >>> to_key("user:42")
        b'user:42'
        >>> to_key("\ud800")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: stream='\ud800' cannot be used. Use the text of a key, or its bytes.
    """
    try:
        return name.encode("utf-8", "surrogateescape")
    except (AttributeError, UnicodeEncodeError) as error:
        raise InvalidOptionError(
            f"stream={name!r} cannot be used", remedy="Use the text of a key, or its bytes."
        ) from error


def key_text(key: bytes) -> str:
    r"""Convert a key to text without loss, for APIs whose stream names are plain keys.

    Example:
        >>> to_key(key_text(b"any bytes: \xff"))
        b'any bytes: \xff'
    """
    return key.decode("utf-8", "surrogateescape")


def printable_key(key: bytes) -> str:
    """Return a key for logs and errors.

    Example:
        >>> printable_key(b"orders:0")
        'orders:0'
    """
    return key.decode("utf-8", "backslashreplace")


def quoted_words(key: bytes, group: str) -> str:
    """Return a key and the name of a group for a command that an error proposes.

    Example:
        >>> quoted_words(b"orders:0", "my group")
        "orders:0 'my group'"
    """
    return shlex.join([printable_key(key), group])


def read_entry(shard: Shard, entry_id: bytes, fields: list[bytes], message_field: bytes) -> Message | DeadLetter:
    """Convert an entry to a message, or to a dead letter if it does not have the message field exactly once.

    Args:
        shard: the shard of the entry.
        entry_id: its id.
        fields: its alternating names and values.
        message_field: the name of the field with the payload.

    Example:
        >>> read_entry(Shard("orders"), b"1-0", [b"msg", b"{}", b"trace", b"7"], b"msg").headers
        (('trace', b'7'),)
    """
    sequence = to_sequence(entry_id)
    pairs = list(zip(fields[::2], fields[1::2]))
    payloads = [value for name, value in pairs if name == message_field]
    others = sum(_MAX_PRINTED * len(name) + len(value) for name, value in pairs if name != message_field)
    if len(payloads) == 1 and others <= MAX_OTHER_BYTES:
        headers = tuple((printable_key(name), value) for name, value in pairs if name != message_field)
        return Message(shard, sequence, to_timestamp_ms(sequence), payloads[0], headers=headers)
    field = printable_key(message_field)
    if len(payloads) == 1:
        error = f"the fields beside {field!r} have more than {MAX_OTHER_BYTES:,} bytes"
    elif payloads:
        error = f"the field {field!r} occurs {counted(len(payloads), 'time')}"
    else:
        error = f"the entry has no field {field!r}"
    kept = original_bytes(fields)
    return DeadLetter(shard, sequence, to_timestamp_ms(sequence), kept, error if kept else f"{error}; {_NOT_KEPT}")


def read_reply(shard: Shard, entry_id: bytes, fields: list[bytes] | None, message_field: bytes) -> Message | DeadLetter:
    """Convert an entry of a Redis reply to a message, or to a dead letter if it is not a valid message.

    Args:
        shard: the shard of the entry.
        entry_id: its id.
        fields: its alternating names and values; ``None`` if it was trimmed while it was pending.
        message_field: the name of the field with the payload.

    Example:
        >>> read_reply(Shard("orders"), b"1-0", None, b"msg").error
        'the entry 1-0 was trimmed or deleted while it was pending'
    """
    try:
        if fields is not None:
            return read_entry(shard, entry_id, fields, message_field)
        sequence = to_sequence(entry_id)
    except FormatError as error:
        return DeadLetter(shard, None, None, original_bytes(fields or []), str(error))
    said = f"the entry {entry_id.decode()} was trimmed or deleted while it was pending"
    return DeadLetter(shard, sequence, to_timestamp_ms(sequence), b"", said)


def original_bytes(fields: list[bytes]) -> bytes:
    """Encode names and values as JSON without loss: each byte becomes the character with its number.

    Returns:
        The JSON; empty if it would have more than :data:`MAX_OTHER_BYTES`, because it has up to six times the bytes.

    Example:
        >>> original_bytes([b"msg", b"{}"])
        b'[["msg", "{}"]]'
    """
    if sum(len(part) + _MAX_ESCAPES * len(part.translate(None, _PLAIN)) for part in fields) > MAX_OTHER_BYTES:
        return b""
    pairs = zip(fields[::2], fields[1::2])
    return json.dumps([[name.decode("latin-1"), value.decode("latin-1")] for name, value in pairs]).encode()
