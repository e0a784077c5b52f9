"""A table that a rebuild may make anew, and what a rebuild reports, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spark_jobs.batches.ingestion import NOTHING_TO_READ, BatchReport
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.ledger import Ledger
from stream_consumers.batches import Range
from tests.support.streams import shard
from tests.support.written_log import WrittenLog


def write_table(path: Path, *, group: str) -> None:
    """A table that the group has written a part of ``orders`` into."""
    log = WrittenLog(path)
    ledger = Ledger(log.log(), group=group, member="main")
    starts = {shard(0): 1, shard(1): 1}
    log.ours(ledger.entry("init", ledger.read(), origin=starts, switch="resumable"))
    log.ours(ledger.entry("batch", ledger.read(), ranges={one: Range(1, 3) for one in starts}))


def rebuild_reports() -> Iterator[BatchReport]:
    """A batch of the staging table, and the swap."""
    batch = LedgerEntry("batch", "g", "g/main", 1, "main", "b", 0, messages=3)
    yield BatchReport(batch, NOTHING_TO_READ, 3, {shard(0): 3}, 3, 0, {shard(0): 2}, 1.0)
    swap = LedgerEntry("rebuild", "g", "g/main", 1, "main", "b", 0, messages=5, mode="rebuild")
    yield BatchReport(swap, NOTHING_TO_READ, 7, {}, 4, 1, {shard(0): 0}, 1.0)
