"""Headers of Kafka messages."""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller
from typing import Any

import pyarrow as pa
from confluent_kafka import Message as KafkaMessage

from stream_consumers.batches import headers_array

_NOT_UTF8 = "a header's name is not UTF-8"
# The client lets a UnicodeDecodeError escape as a SystemError, and keeps half a list: asking such a message for its
# headers once more would end the process.
_UNREADABLE = (UnicodeDecodeError, SystemError)
# Not message.headers(): where the interpreter has specialised that call it does not look for the error that the client
# leaves behind, and raises it at some later line. This call is always checked.
_ask_headers = methodcaller("headers")
HeaderPairs = tuple[tuple[str, "bytes | None"], ...]


def read_headers(message: KafkaMessage) -> tuple[HeaderPairs, str | None]:
    """The headers in order, and why they cannot be read (the client knows names that are UTF-8 only)."""
    try:
        return _pairs(_ask_headers(message)), None
    except _UNREADABLE:
        return (), _NOT_UTF8


def message_bytes(message: KafkaMessage) -> int:
    """The bytes of the payload, the key and the headers, those aside that cannot be read; asks for the headers once."""
    size = len(message) + len(message.key() or b"")
    headers, _ = read_headers(message)
    return size + sum(len(name.encode()) + len(value or b"") for name, value in headers) if headers else size


def headers_columns(messages: Sequence[KafkaMessage]) -> tuple[pa.Array[Any], pa.Array[Any]]:
    """The headers of messages as a column, and as another one why they cannot be read where they cannot."""
    found: list[Any] = []
    unreadable: list[int] = []
    # Each message is asked once, also behind one that cannot be read: the list keeps what was found before it.
    asked = map(_ask_headers, messages)
    while len(found) < len(messages):
        try:
            found.extend(asked)
        except _UNREADABLE:
            unreadable.append(len(found))
            found.append(None)
    errors = pa.nulls(len(messages), pa.string())
    if unreadable:
        places = set(unreadable)
        errors = pa.array([_NOT_UTF8 if place in places else None for place in range(len(messages))], pa.string())
    return headers_array([_pairs(headers) for headers in found] if any(found) else found), errors


def _pairs(found: Any) -> HeaderPairs:
    if not found:
        return ()
    pairs = found.items() if isinstance(found, dict) else found
    return tuple((name, value.encode() if isinstance(value, str) else value) for name, value in pairs)
