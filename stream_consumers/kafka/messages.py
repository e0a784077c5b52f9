"""Messages of the Kafka client as messages, dead letters and record batches of this project."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message as KafkaMessage

from stream_consumers.batches import (
    BATCH_BYTES,
    BATCH_ROWS,
    HEADER_BYTES,
    HEADERS_TYPE,
    MESSAGE_SCHEMA,
    LastMessage,
    headers_array,
    headers_bytes,
    message_checksum,
)
from stream_consumers.messages import DeadLetter, Message, Shard

MAX_PAYLOAD_BYTES = 256 * 1024 * 1024
"""The longest payload; a message with a longer one, which only compression gets to a broker, is a dead letter."""
MAX_BATCH_BYTES = 2 * MAX_PAYLOAD_BYTES
"""The size up to which the client decompresses a batch of the broker."""
HEADERS_MESSAGES = 16
"""The number of messages whose headers are read at once. Each has up to 100,000, and needs memory for every one."""
_NOT_UTF8 = "a header's name is not UTF-8"
# The client lets a UnicodeDecodeError escape as a SystemError, and keeps half a list: a second call for the headers of
# such a message would crash the process.
_UNREADABLE = (UnicodeDecodeError, SystemError)
# message.headers() is not called directly: the interpreter may specialize that call, and then raise the error that the
# client sets only at a later line. A methodcaller is always checked.
_ask_headers = methodcaller("headers")
_second = itemgetter(1)
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


class Run(NamedTuple):
    """Successive messages of one partition, with their offsets."""

    shard: Shard
    offsets: list[int]
    messages: list[KafkaMessage]


def record_batches(runs: Iterable[Run]) -> Iterator[pa.RecordBatch]:
    """Convert messages to record batches of several thousand rows or several megabytes each.

    A batch has fewer rows if its messages have more bytes than a column can have, which is 2 GiB.
    """
    rows = _Rows()
    for run in runs:
        left: Run | None = run
        while left is not None:
            left = rows.add(left)
            if len(rows.offsets) >= BATCH_ROWS or rows.size >= BATCH_BYTES:
                yield from rows.to_batches()
                rows = _Rows()
    if rows.offsets:
        yield from rows.to_batches()


@dataclass(slots=True)
class _Rows:
    """Columns of messages, except that a shard is stored once for each run."""

    shards: list[Shard] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    payloads: list[bytes | None] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    size: int = 0
    """The sum of :func:`message_bytes`."""

    def add(self, run: Run) -> Run | None:
        """Add messages, reading each field once; return those that are left because the headers have enough bytes."""
        first, count, left = len(self.offsets), self._add_headers(run.messages), None
        if count < len(run.messages):
            left = Run(run.shard, run.offsets[count:], run.messages[count:])
            run = Run(run.shard, run.offsets[:count], run.messages[:count])
        messages = run.messages
        self.shards.append(run.shard)
        self.counts.append(count)
        self.offsets += run.offsets
        self.timestamps += map(_second, map(KafkaMessage.timestamp, messages))
        self.keys.extend(map(cast("Any", KafkaMessage.key), messages))
        self.payloads.extend(map(cast("Any", KafkaMessage.value), messages))
        size = sum(map(len, messages))
        self.size += size + sum(map(len, filter(None, self.keys[first:])))
        if size > MAX_PAYLOAD_BYTES:
            for place, message in enumerate(messages, first):
                if len(message) > MAX_PAYLOAD_BYTES:
                    self.payloads[place], self.errors[place] = None, _too_long(message)
        return left

    def _add_headers(self, messages: Sequence[KafkaMessage]) -> int:
        """Add headers of messages until they have the bytes of a batch; return of how many messages."""
        first, size = len(self.headers), 0
        # The headers of each message are read once, even after an error: the list keeps the results before it.
        asked = map(KafkaMessage.headers, messages)
        while len(self.headers) < first + len(messages) and size < BATCH_BYTES:
            begin = len(self.headers)
            try:
                self.headers.extend(islice(asked, HEADERS_MESSAGES))
            except _UNREADABLE:
                self.errors[len(self.headers)] = _NOT_UTF8
                self.headers.append(None)
            if any(found := self.headers[begin:]):
                size += sum(map(headers_bytes, filter(None, found)))
        self.size += size
        return len(self.headers) - first

    def to_batches(self) -> list[pa.RecordBatch]:
        """Return the messages as one record batch, or several if they have too many bytes for one."""
        count = len(self.offsets)
        streams = pa.array([shard.stream for shard in self.shards], pa.string())
        numbers = np.array([shard.id for shard in self.shards], np.int64)
        columns: list[pa.Array[Any] | pa.ChunkedArray[Any]] = [
            streams.take(pa.array(np.repeat(np.arange(len(streams)), self.counts), pa.int64())),
            pa.array(np.repeat(numbers, self.counts)),
            pa.array(np.array(self.offsets, np.int64)),
            pa.array(np.array(self.timestamps, np.int64)),
            pa.array(self.keys, pa.binary()),
            pa.array(self.payloads, pa.binary()),
            headers_array(self.headers) if any(self.headers) else pa.nulls(count, cast(Any, HEADERS_TYPE)),
            pa.array(map(self.errors.get, range(count)), pa.string()) if self.errors else pa.nulls(count, pa.string()),
            pa.nulls(count, pa.int64()),
        ]
        return pa.Table.from_arrays(columns, schema=MESSAGE_SCHEMA).to_batches()


def message_bytes(message: KafkaMessage) -> int:
    """Return what the payload, the key and the readable headers count; reads the headers once."""
    size = len(message) + len(message.key() or b"")
    try:
        return size + headers_bytes(_ask_headers(message) or ())
    except _UNREADABLE:
        return size


def bytes_of(batch: pa.RecordBatch) -> int:
    """Return the sum of :func:`message_bytes` over the messages of a record batch."""
    headers: Any = pc.list_flatten(batch.column("headers"))
    parts = [batch.column("payload"), batch.column("key"), headers.field("name"), headers.field("value")]
    return HEADER_BYTES * len(headers) + sum(pc.sum(pc.binary_length(part)).as_py() or 0 for part in parts)


def _too_long(message: KafkaMessage) -> str:
    return f"its payload has {len(message):,} bytes, which is too long"


def _pairs(found: Any) -> HeaderPairs:
    if not found:
        return ()
    pairs = found.items() if isinstance(found, dict) else found
    return tuple((name, value.encode() if isinstance(value, str) else value) for name, value in pairs)


def _bytes(value: str | bytes | None) -> bytes | None:
    """Return the bytes themselves; only the type hints of the client allow text."""
    return value.encode() if isinstance(value, str) else value
