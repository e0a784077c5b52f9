"""Entries of Redis Streams as messages: SeaStreamer's field ``msg`` is the payload, every other field a header."""

from __future__ import annotations

import json

from stream_consumers.errors import FormatError
from stream_consumers.messages import DeadLetter, Message, Shard
from stream_consumers.redis.ids import to_sequence, to_timestamp_ms


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
    error = f"the entry has no field {field!r}" if not payloads else f"the field {field!r} occurs {len(payloads)} times"
    return DeadLetter(shard, sequence, to_timestamp_ms(sequence), original_bytes(fields), error)


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
