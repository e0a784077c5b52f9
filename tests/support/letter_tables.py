"""A table with dead letters, written without Spark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, write_deltalake

from spark_jobs.dead_letters.reader import DeadLetterReader, DeadLetters, Span
from spark_jobs.dead_letters.table import DeadLetterTable
from spark_jobs.ledger.entries import LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import Ledger
from stream_consumers.batches import HEADERS_TYPE, Range
from stream_consumers.messages import Shard
from tests.support.written_log import WrittenLog

ORDERS, SECOND, CLICKS = Shard("orders", 0), Shard("orders#2", 1), Shard("clicks", 0)
OWN = b"its sequence"
_TIME = pa.timestamp("us", "UTC")
NOON = datetime(2026, 11, 17, 12, tzinfo=timezone.utc)


def write_letters(
    table: DeadLetterTable,
    shard: Shard,
    *sequences: int | None,
    group: str = "g",
    is_message: bool | None = True,
    reason: str | None = "no number",
    payload: bytes | None = OWN,
    batch: str = "b1",
    number: int = 1,
    metadata: Mapping[str, object] | None = None,
    dismissed_by: str | None = None,
    dismisses: str | None = None,
    offset: int | None = None,
    correction: bytes | None = None,
) -> None:
    """Write dead letters of a batch with this number; the payload of each is its sequence, or what is given.

    ``metadata`` changes that of the commit. With a ``correction``, they are records of corrections.
    """
    count = len(sequences)
    times = [NOON + timedelta(minutes=(s or 0) % 1000) for s in sequences]
    payloads = [b"%d" % (s or 0) if payload is OWN else payload for s in sequences]
    rows = {
        "_stream": pa.array([shard.stream] * count, pa.string()),
        "_shard": pa.array([shard.id] * count, pa.int64()),
        "_sequence": pa.array(sequences, pa.int64()),
        "_timestamp": pa.array([None if s is None else t for s, t in zip(sequences, times)], _TIME),
        "key": pa.array([b"k"] * count, pa.binary()),
        "payload": pa.array(payloads, pa.binary()),
        "headers": pa.array([[{"name": "trace", "value": b"\xff"}]] * count, HEADERS_TYPE),
        "error": pa.array([reason] * count, pa.string()),
        "offset": pa.array([offset] * count, pa.int64()),
        "is_message": pa.array([is_message] * count, pa.bool_()),
        "_batch": pa.array([batch] * count, pa.string()),
        "_group": pa.array([group] * count, pa.string()),
        "_number": pa.array([number] * count, pa.int64()),
        "_recorded_at": pa.array([NOON + timedelta(days=1)] * count, _TIME),
    }
    if correction is not None:
        rows["corrected_by"] = rows["note"] = pa.array(["ann"] * count, pa.string())
        rows["correction"] = pa.array([correction] * count, pa.binary())
    told = {"v": 1, "bid": batch, "app": f"{group}/main", "n": 1, "number": number}
    told |= metadata or {}
    if dismissed_by is not None:
        rows["dismissed_by"] = pa.array([dismissed_by] * count, pa.string())
        rows["corrected_by"] = pa.nulls(count, pa.string())
        rows["dismisses"] = pa.array([dismisses] * count, pa.string())
    commit = CommitProperties(custom_metadata={"userMetadata": json.dumps(told)})
    write_deltalake(table.path, pa.table(rows), mode="append", schema_mode="merge", commit_properties=commit)


class Tables:
    """A table with one batch, ``b1``, and dead letters of it, each as many minutes past noon as its sequence says."""

    def __init__(self, folder: Path, *, group: str = "g") -> None:
        self.group = group
        self.main, self.table = WrittenLog(folder / "t"), DeadLetterTable(str(folder / "t_dead_letters"))
        state = {shard: ShardState(Intervals.of((MIN_SEQUENCE, 0)), origin=0) for shard in (ORDERS, SECOND, CLICKS)}
        self.commit(1, "b1", dict.fromkeys(state, Range(0, 100)), state=state, dead=9)

    def commit(self, number: int, bid: str, ranges: Mapping[Shard, Range], **more: object) -> None:
        """A batch of the group in the main table."""
        app = f"{self.group}/main"
        entry = LedgerEntry("batch", self.group, app, number, "main", bid, number - 2, ranges=ranges, **more)  # type: ignore[arg-type]
        self.main.ours(entry)

    def add(self, shard: Shard, *sequences: int | None, **details: Any) -> None:
        """Dead letters of the group, see :func:`write_letters`."""
        write_letters(self.table, shard, *sequences, **{"group": self.group, **details})

    def reader(self, span: Span | None = None, *, streams: tuple[str, ...] = ("orders",)) -> DeadLetterReader:
        ledger = Ledger(self.main.log(), group=self.group, member="replay")
        return DeadLetterReader(self.table, ledger, streams, span or Span())

    def letters(self) -> DeadLetters:
        return DeadLetters(str(self.main.path), group=self.group)
