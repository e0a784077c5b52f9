"""What a run is told of batches that nobody wrote."""

from __future__ import annotations

from spark_jobs.batches.ingestion import BatchReport
from spark_jobs.ledger.intervals import Intervals
from stream_consumers.batches import BatchPlan, Range
from stream_consumers.messages import Shard
from tests.support.written_log import made_entry

ZERO, ONE = Shard("orders", 0), Shard("orders", 1)


def report(number: int, *, replaced: int | None = 0) -> BatchReport:
    """Batch ``number``: ten messages of one shard, one of them unusable, in half a second."""
    shard, start = (ZERO, ONE)[number % 2], number // 2 * 10
    ranges = {shard: Range(start, start + 10)}
    lost = {shard: Intervals.of((start, start + 1))} if number == 3 else {}
    entry = made_entry(number, number - 2, group="lakehouse", bid=f"bid-{number}", ranges=ranges, lost=lost)
    return BatchReport(entry, BatchPlan(ranges, [], 10), number, {shard: 9}, 9, 1, {shard: 100 - number}, 0.5, replaced)
