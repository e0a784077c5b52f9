"""Producers of test messages, and checks that a table has each message once."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import redis
from confluent_kafka import Producer
from deltalake import DeltaTable

from stream_consumers.create import create_producer
from stream_consumers.redis.entries import to_sequence

PARTITIONS = 4
DDL = "id BIGINT, user STRING, amount DOUBLE, ts TIMESTAMP, note STRING"
COLUMNS: dict[str, pa.DataType] = {
    "id": pa.int64(),
    "user": pa.string(),
    "amount": pa.float64(),
    "ts": pa.timestamp("us", "UTC"),
    "note": pa.string(),
}
SCHEMA = pa.schema(COLUMNS)
AVRO: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "user", "type": "string"},
        {"name": "amount", "type": "double"},
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "note", "type": ["null", "string"]},
    ],
}
SMALL, LARGE = 95, 2048
MALFORMED = b'{"id": '
Sequences = Mapping[int, "np.ndarray[tuple[int], np.dtype[np.int64]]"]


def documents(count: int, size: int = SMALL, *, malformed_every: int | None = None) -> Iterator[bytes]:
    """JSON documents of about ``size`` bytes, with five fields."""
    for number in range(count):
        if malformed_every and number % malformed_every == 0:
            yield MALFORMED
            continue
        head = b'{"id":%d,"user":"u%d","amount":%d.25,"ts":"2026-11-21T00:00:00Z","note":"' % (
            number,
            number % 1000,
            number % 97,
        )
        yield head + b"the quick brown fox "[: max(1, size - len(head) - 2)].ljust(size - len(head) - 2, b"x") + b'"}'


def avro_values(count: int, size: int, *, number: int) -> Iterator[bytes]:
    """The values of :func:`documents`, in Avro with the id of a schema."""
    schema, head = fastavro.parse_schema(AVRO), b"\0" + number.to_bytes(4, "big")
    for text in documents(count, size):
        buffer = io.BytesIO()
        buffer.write(head)
        document = json.loads(text)
        document["ts"] = datetime.fromisoformat(document["ts"].replace("Z", "+00:00"))
        fastavro.schemaless_writer(buffer, schema, document)
        yield buffer.getvalue()


def to_kafka(address: str, topic: str, payloads: Iterator[bytes], shards: Iterable[int] | None = None) -> Sequences:
    """Produce to these partitions or to all in turn; return the offsets of the latter."""
    settings = {
        "bootstrap.servers": address,
        "linger.ms": 20,
        "batch.size": 1_000_000,
        "queue.buffering.max.messages": 1_000_000,
        "queue.buffering.max.kbytes": 256 * 1024,
        "compression.type": "lz4",
        "log_level": 2,
    }
    producer, count = Producer(settings), 0
    for payload, shard in zip(payloads, shards or cycle(range(PARTITIONS))):
        while True:
            try:
                producer.produce(topic, payload, key=b"%d" % (count % 1000), partition=shard)
                break
            except BufferError:
                producer.poll(0.1)
        count += 1
        if count % 10_000 == 0:
            producer.poll(0)
    producer.flush()
    return {shard: np.arange(len(range(shard, count, PARTITIONS))) for shard in range(PARTITIONS)}


def to_redis(address: str, stream: str, payloads: Iterator[bytes]) -> Sequences:
    """Add to the keys ``stream:0``, ``stream:1``, … in turn, and return the sequences of the ids."""
    client, added = redis.Redis.from_url(f"redis://{address}"), []
    pipeline = client.pipeline(transaction=False)
    for number, payload in enumerate(payloads):
        pipeline.xadd(f"{stream}:{number % PARTITIONS}", {b"msg": payload})
        if number % 1000 == 999:
            added += pipeline.execute()
    added += pipeline.execute()
    client.close()
    return {
        shard: np.array([to_sequence(entry) for entry in added[shard::PARTITIONS]], np.int64)
        for shard in range(PARTITIONS)
    }


def to_file(url: str, payloads: Iterator[bytes], *, shards: int = PARTITIONS) -> int:
    """Append to the shards in turn, and return the number of messages."""
    count = 0
    with create_producer(url) as producer:
        for payload in payloads:
            producer.send(payload, shard=count % shards)
            count += 1
    return count


def check_parquet(path: Path, expected: Sequences) -> None:
    """Fail unless the Parquet files of a folder have each of these messages once."""
    _check(pq.read_table(path, columns=["_shard", "_sequence"]), expected)


def check_delta(path: Path, expected: Sequences) -> None:
    """Fail unless the table has each of these messages once."""
    _check(DeltaTable(str(path)).to_pyarrow_table(columns=["_shard", "_sequence"]), expected)


def check_with_dead_letters(expected: Sequences) -> Callable[[Path], None]:
    """A check that the table and its dead letters together have each message once, and that neither is empty."""

    def check(path: Path) -> None:
        parts = [DeltaTable(str(path)), DeltaTable(f"{path}_dead_letters")]
        tables = [part.to_pyarrow_table(columns=["_shard", "_sequence"]) for part in parts]
        assert all(table.num_rows for table in tables)
        _check(pa.concat_tables(tables), expected)

    return check


def _check(rows: pa.Table, expected: Sequences) -> None:
    total = sum(map(len, expected.values()))
    assert rows.num_rows == total, f"{rows.num_rows} rows of {total} messages"
    shards, sequences = rows.column("_shard").to_numpy(), rows.column("_sequence").to_numpy()
    for shard, wanted in expected.items():
        assert np.array_equal(np.sort(sequences[shards == shard]), wanted), f"shard {shard} differs from the stream"
