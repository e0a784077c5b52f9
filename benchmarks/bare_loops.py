"""The least that the work costs in Python: read, build Arrow columns, write Parquet, without exactly-once guarantees.

Each function is one worker; two workers at the same time use as many cores as Spark.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq
import redis
from confluent_kafka import Consumer, TopicPartition

from benchmarks.messages import SCHEMA
from stream_consumers.file.format import FRAME_FIELDS, HEADER_SIZE, Header, decode_beacon

PAGE_SIZE = 10_000
_TRAILER_SIZE = 3  # the checksum, and the byte that ends a frame


def _columns(shard: int, sequences: Sequence[int], payloads: list[bytes], *, is_json: bool) -> pa.Table:
    shards = np.full(len(sequences), shard)
    if not is_json:
        columns: dict[str, Any] = {"payload": pa.array(payloads, pa.binary()), "_shard": shards, "_sequence": sequences}
        return pa.table(columns)
    lines = io.BytesIO(b"\n".join(payloads))
    parsed = pj.read_json(
        lines, pj.ReadOptions(use_threads=False, block_size=1 << 27), pj.ParseOptions(explicit_schema=SCHEMA)
    )
    return parsed.append_column("_shard", pa.array(shards)).append_column("_sequence", pa.array(sequences, pa.int64()))


class _File:
    """A Parquet file that is created with its first rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self._tables: list[pa.Table] = []
        self._rows = 0

    def add(self, table: pa.Table) -> None:
        self._tables.append(table)
        self._rows += table.num_rows
        if self._rows >= 100_000:
            self.write()

    def write(self) -> None:
        if self._tables:
            table = pa.concat_tables(self._tables)
            self._writer = self._writer or pq.ParquetWriter(self._path, table.schema)
            self._writer.write_table(table)
            self._tables, self._rows = [], 0

    def close(self) -> None:
        self.write()
        if self._writer is not None:
            self._writer.close()


def consume(address: str, topic: str, ends: dict[int, int], folder: Path, is_json: bool) -> None:
    """Consume the partitions of a topic up to these ends."""
    settings = {
        "bootstrap.servers": address,
        "group.id": "bare",
        "enable.auto.commit": False,
        "queued.min.messages": 200_000,
        "fetch.wait.max.ms": 10,
        "check.crcs": False,
        "max.partition.fetch.bytes": 10 << 20,
        "log_level": 2,
    }
    consumer = Consumer(settings)
    for partition, end in ends.items():
        consumer.assign([TopicPartition(topic, partition, 0)])
        file, at = _File(folder / f"{partition}.parquet"), 0
        while at < end:
            messages = consumer.consume(min(PAGE_SIZE, end - at), 1.0)
            if messages:
                payloads = [message.value() or b"" for message in messages]
                offsets = [message.offset() or 0 for message in messages]
                file.add(_columns(partition, offsets, payloads, is_json=is_json))
                at += len(messages)
        file.close()
    consumer.close()


def xrange(address: str, stream: str, shards: Sequence[int], folder: Path) -> None:
    """Read the keys of a stream, in pages."""
    client: Any = redis.Redis.from_url(f"redis://{address}")
    for shard in shards:
        file, start = _File(folder / f"{shard}.parquet"), b"-"
        while page := client.xrange(f"{stream}:{shard}", start, b"+", PAGE_SIZE):
            ids = [entry.split(b"-") for entry, _ in page]
            sequences = [int(ms) << 16 | int(sub) for ms, sub in ids]
            payloads = [fields[b"msg"] for _, fields in page]
            file.add(_columns(shard, sequences, payloads, is_json=False))
            start = b"(" + page[-1][0]
        file.close()
    client.close()


def scan(stream_file: Path, folder: Path) -> None:
    """Read the frames of a stream file without its beacons, and without comparing checksums."""
    data = stream_file.read_bytes()
    interval = Header.decode(data[:HEADER_SIZE], path=stream_file).beacon_interval
    parts = [data[HEADER_SIZE:interval]]
    for at in range(interval, len(data), interval):
        beacon = decode_beacon(data, at)
        assert beacon is not None
        parts.append(data[at + beacon[1] : at + interval])
    frames = b"".join(parts)
    file, at = _File(folder / "0.parquet"), 0
    while at < len(frames):
        shards: list[int] = []
        sequences: list[int] = []
        payloads: list[bytes] = []
        while at < len(frames) and len(payloads) < PAGE_SIZE:
            fields = at + 1 + frames[at]
            shard, sequence, _, length = FRAME_FIELDS.unpack_from(frames, fields)
            payload = fields + FRAME_FIELDS.size
            shards.append(shard)
            sequences.append(sequence)
            payloads.append(frames[payload : payload + length])
            at = payload + length + _TRAILER_SIZE
        columns: dict[str, Any] = {"payload": pa.array(payloads, pa.binary()), "_shard": shards, "_sequence": sequences}
        file.add(pa.table(columns))
    file.close()
