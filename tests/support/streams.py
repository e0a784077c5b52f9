"""Stream files, and what is in a table, read independently of the code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from deltalake import DeltaTable

from stream_consumers.consumer import Consumer
from stream_consumers.create import create_producer
from stream_consumers.file.scanner import Frame, FrameScanner
from stream_consumers.messages import Shard

PATIENCE = 60.0
Identity = tuple[str, int, int]


def write_stream(path: Path, count: int, *, shards: int = 2, malformed: frozenset[int] = frozenset()) -> str:
    """Append ``count`` JSON messages in turn to the shards of a new file; returns its URL."""
    url = f"file://{path}/orders"
    with create_producer(url) as producer:
        for index in range(count):
            payload = b'{"id": ' if index in malformed else b'{"id": %d, "user": "u%d"}' % (index, index % 7)
            producer.send(payload, shard=index % shards, timestamp_ms=1_700_000_000_000 + index)
    return url


def take(consumer: Consumer, count: int) -> list[int]:
    """The sequences of the next messages."""
    found = [consumer.next(PATIENCE) for _ in range(count)]
    return [message.sequence for message in found if message]


def sequences_in_file(path: Path) -> set[Identity]:
    """Every message of a stream file."""
    with FrameScanner(path) as scanner:
        return {(i.shard.stream, i.shard.id, i.sequence) for i in scanner if isinstance(i, Frame)}


def sequences_in_table(path: Path | str, storage_options: Mapping[str, str] | None = None) -> Counter[Identity]:
    """Every row of a table, counted."""
    options = dict(storage_options or {})
    if not DeltaTable.is_deltatable(str(path), options):
        return Counter()
    rows = (
        DeltaTable(str(path), storage_options=options)
        .to_pyarrow_table(columns=["_stream", "_shard", "_sequence"])
        .to_pydict()
    )
    return Counter(zip(rows["_stream"], rows["_shard"], rows["_sequence"]))


def assert_each_once(file: Path, table: Path | str, storage_options: Mapping[str, str] | None = None) -> None:
    """Every message of the file is in the table or its dead letters, once."""
    letters = sequences_in_table(f"{table}_dead_letters", storage_options)
    found = sequences_in_table(table, storage_options) + letters
    assert {identity: count for identity, count in found.items() if count != 1} == {}
    assert set(found) == sequences_in_file(file)


def shard(number: int, stream: str = "orders") -> Shard:
    """A shard of the test stream."""
    return Shard(stream, number)
