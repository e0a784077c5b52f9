"""Entries of Redis Streams as messages: SeaStreamer's field ``msg`` is the payload, every other field a header."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from stream_consumers.errors import FormatError
from stream_consumers.messages import MAX_SEQUENCE, DeadLetter, Message, Shard
from stream_consumers.redis.ids import MAX_MS, MAX_SUB, SUB_BITS, to_sequence, to_timestamp_ms
from stream_consumers.wording import counted

Entry: TypeAlias = tuple[bytes, list[bytes]]
"""The id of an entry, and its names and values in turn."""


def read_entry(shard: Shard, entry_id: bytes, fields: list[bytes], message_field: bytes) -> Message | DeadLetter:
    """An entry as a message; a dead letter if it does not have the message field exactly once.

    Args:
        shard: where it was read.
        entry_id: its id.
        fields: names and values in turn.
        message_field: the name of the payload's field.

    Example:
        >>> read_entry(Shard("orders"), b"1-0", [b"msg", b"{}", b"trace", b"7"], b"msg").headers
        (('trace', b'7'),)
    """
    sequence = to_sequence(entry_id)
    pairs = list(zip(fields[::2], fields[1::2]))
    payloads = [value for name, value in pairs if name == message_field]
    if len(payloads) == 1:
        headers = tuple((_readable(name), value) for name, value in pairs if name != message_field)
        return Message(shard, sequence, to_timestamp_ms(sequence), payloads[0], headers=headers)
    field = _readable(message_field)
    error = (
        f"the entry has no field {field!r}"
        if not payloads
        else f"the field {field!r} occurs {counted(len(payloads), 'time')}"
    )
    return DeadLetter(shard, sequence, to_timestamp_ms(sequence), original_bytes(fields), error)


def plain_entries(
    page: Sequence[Entry], message_field: bytes
) -> tuple[pa.Array[Any], pa.Array[Any], pa.Array[Any]] | None:
    """Sequences, timestamps and payloads of entries that have nothing but the message field; ``None`` if others do.

    What they are is what :func:`read_entry` makes of each of them.

    Example:
        >>> [column.to_pylist() for column in plain_entries([(b"1-2", [b"msg", b"{}"])], b"msg")]
        [[65538], [1], [b'{}']]
    """
    fields = [entry[1] for entry in page]
    if not page or any(len(pairs) != 2 or pairs[0] != message_field for pairs in fields):
        return None
    try:
        ids = pa.array(b"-".join([entry[0] for entry in page]).split(b"-"), pa.string()).cast(pa.int64())
    except pa.ArrowInvalid:
        return None
    if len(ids) != 2 * len(page):
        return None
    milliseconds, subs = ids[::2], ids[1::2]
    if pc.max(milliseconds).as_py() > MAX_MS or pc.max(subs).as_py() > MAX_SUB:
        return None
    sequences = pc.bit_wise_or(pc.shift_left(milliseconds, SUB_BITS), subs)
    if pc.max(sequences).as_py() > MAX_SEQUENCE:
        return None
    return sequences, milliseconds, pa.array([pairs[1] for pairs in fields], pa.binary())


def read_reply(shard: Shard, entry_id: bytes, fields: list[bytes] | None, message_field: bytes) -> Message | DeadLetter:
    """An entry as Redis replied it, as a message; a dead letter if it cannot be one.

    Args:
        shard: where it was read.
        entry_id: its id.
        fields: names and values in turn; ``None`` where it was trimmed while it was pending.
        message_field: the name of the payload's field.

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
    """Names and values as JSON, every byte as the character of its number, so that nothing of it is lost.

    Example:
        >>> original_bytes([b"msg", b"{}"])
        b'[["msg", "{}"]]'
    """
    pairs = zip(fields[::2], fields[1::2])
    return json.dumps([[name.decode("latin-1"), value.decode("latin-1")] for name, value in pairs]).encode()


def _readable(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
