"""Messages of the Kafka client as messages, dead letters and record batches of this project."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import methodcaller
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message as KafkaMessage

from stream_consumers.batches import MESSAGE_SCHEMA, LastMessage, headers_array, message_checksum
from stream_consumers.messages import DeadLetter, Message, Shard

MAX_PAYLOAD_BYTES = 256 * 1024 * 1024
"""The longest payload; a message with a longer one, which only compression gets to a broker, is a dead letter."""
MAX_BATCH_BYTES = 2 * MAX_PAYLOAD_BYTES
"""The size up to which the client decompresses a batch of the broker."""
_NOT_UTF8 = "a header's name is not UTF-8"
# The client lets a UnicodeDecodeError escape as a SystemError, and keeps half a list: a second call for the headers of
# such a message would crash the process.
_UNREADABLE = (UnicodeDecodeError, SystemError)
# message.headers() is not called directly: the interpreter may specialize that call, and then raise the error that the
# client sets only at a later line. A methodcaller is always checked.
_ask_headers = methodcaller("headers")
HeaderPairs = tuple[tuple[str, "bytes | None"], ...]


def shard_of(message: KafkaMessage) -> Shard:
    """Return the partition of a message."""
    return Shard(message.topic() or "", message.partition() or 0)


def read_message(found: KafkaMessage) -> Message | DeadLetter:
    """Return the message, or a dead letter if it is too long or its headers cannot be read.

    The client supports only names of headers in UTF-8.
    """
    shard, offset, timestamp = shard_of(found), found.offset() or 0, found.timestamp()[1]
    if len(found) > MAX_PAYLOAD_BYTES:
        return DeadLetter(shard, offset, timestamp, b"", _too_long(found))
    try:
        return Message(shard, offset, timestamp, found.value(), found.key(), _pairs(_ask_headers(found)))
    except _UNREADABLE:
        return DeadLetter(shard, offset, timestamp, found.value() or b"", _NOT_UTF8)


def last_message(message: KafkaMessage) -> LastMessage:
    """Return the facts that identify a message as the last one of a range."""
    checksum, epoch = message_checksum(_bytes(message.key()), _bytes(message.value())), message.leader_epoch()
    return LastMessage(message.offset() or 0, message.timestamp()[1], checksum, -1 if epoch is None else epoch)


def record_batches(messages: list[KafkaMessage], shards: Collection[Shard]) -> list[pa.RecordBatch]:
    """Convert messages of these shards, reading only the fields that may differ between messages.

    Returns:
        One record batch; several if the messages have more bytes than a column can have, which is 2 GiB.
    """
    count = len(messages)
    streams, numbers = {shard.stream for shard in shards}, {shard.id for shard in shards}
    headers, errors = _headers_column(messages)
    payloads = list(map(KafkaMessage.value, messages))
    if max(map(len, messages), default=0) > MAX_PAYLOAD_BYTES:
        for place, message in enumerate(messages):
            if len(message) > MAX_PAYLOAD_BYTES:
                payloads[place], errors[place] = None, _too_long(message)
    columns: list[pa.Array[Any] | pa.ChunkedArray[Any]] = [
        _column(streams, map(KafkaMessage.topic, messages), count, pa.string()),
        _column(numbers, map(KafkaMessage.partition, messages), count, pa.int64()),
        pa.array(list(map(KafkaMessage.offset, messages)), pa.int64()),
        pa.array([moment for _, moment in map(KafkaMessage.timestamp, messages)], pa.int64()),
        pa.array(list(map(KafkaMessage.key, messages)), pa.binary()),
        pa.array(payloads, pa.binary()),
        headers,
        pa.array([errors.get(place) for place in range(count)], pa.string())
        if errors
        else pa.nulls(count, pa.string()),
        pa.nulls(count, pa.int64()),
    ]
    return pa.Table.from_arrays(columns, schema=MESSAGE_SCHEMA).to_batches()


def message_bytes(message: KafkaMessage) -> int:
    """Return the bytes of the payload, the key and the readable headers; reads the headers once."""
    size = len(message) + len(message.key() or b"")
    try:
        headers = _pairs(_ask_headers(message))
    except _UNREADABLE:
        return size
    return size + sum(len(name.encode()) + len(value or b"") for name, value in headers)


def bytes_of(batch: pa.RecordBatch) -> int:
    """Return the sum of :func:`message_bytes` over the messages of a record batch."""
    headers: Any = pc.list_flatten(batch.column("headers"))
    parts = [batch.column("payload"), batch.column("key"), headers.field("name"), headers.field("value")]
    return sum(pc.sum(pc.binary_length(part)).as_py() or 0 for part in parts)


def _headers_column(messages: Sequence[KafkaMessage]) -> tuple[pa.Array[Any], dict[int, str]]:
    """Return the headers of messages as a column, and the reasons why those of some messages cannot be read."""
    found: list[Any] = []
    unreadable: dict[int, str] = {}
    # The headers of each message are read once, even after an error: the list keeps the results before it.
    asked = map(_ask_headers, messages)
    while len(found) < len(messages):
        try:
            found.extend(asked)
        except _UNREADABLE:
            unreadable[len(found)] = _NOT_UTF8
            found.append(None)
    return headers_array([_pairs(headers) for headers in found] if any(found) else found), unreadable


def _too_long(message: KafkaMessage) -> str:
    return f"its payload has {len(message):,} bytes, which is too long"


def _column(possible: set[Any], values: Iterable[Any], count: int, kind: pa.DataType) -> pa.Array[Any]:
    if len(possible) > 1:
        return pa.array(list(values), kind)
    (value,) = possible
    return pa.array(pa.repeat(value, count), kind)


def _pairs(found: Any) -> HeaderPairs:
    if not found:
        return ()
    pairs = found.items() if isinstance(found, dict) else found
    return tuple((name, value.encode() if isinstance(value, str) else value) for name, value in pairs)


def _bytes(value: str | bytes | None) -> bytes | None:
    """Return the bytes themselves; only the type hints of the client allow text."""
    return value.encode() if isinstance(value, str) else value
