"""What a run reports of its batches, as plain values that any orchestrator can show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spark_jobs.batches.ingestion import BatchReport
from spark_jobs.batches.replay import ReplayPlan
from spark_jobs.ledger.delta_log import MergedRows
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import ROW_TIME, changed_times, names_in_files
from stream_consumers.batches import Range
from stream_consumers.messages import Shard

ReportedValue = int | float | list[dict[str, Any]] | Mapping[str, Any]
"""A number, a table of one row per shard, or a value for each shard; all of it can be written as JSON."""


@dataclass(slots=True)
class BatchTotals:
    """Totals of the batches that one report has.

    Args:
        last: the last batch.
        batches: the number of batches.
        first_version: the table version of the first batch.
        ranges: per shard, the range from the start of the first batch to the end of the last one.
        messages: messages decoded, per shard.
        rows: rows written, after the transform.
        dead: dead letters.
        dead_batches: the ids of the batches with dead letters or recorded losses.
        replaced: rows that were replaced; ``None`` if the Delta log does not have the number.
        merged: the rows that were inserted, updated and deleted in a keyed table; ``None`` for other tables.
        stale: the rows of a replayed range that stay in a keyed table, although their messages make no row now.
        lost: the recorded ranges of messages that were gone.
        seconds: the total time of the batches, each from its plan to its commit.
        worst_lag: the most messages that were left after one of the batches.
    """

    last: BatchReport
    batches: int = 0
    first_version: int = -1
    ranges: dict[Shard, Range] = field(default_factory=dict)
    messages: dict[Shard, int] = field(default_factory=dict)
    rows: int = 0
    dead: int = 0
    dead_batches: list[str] = field(default_factory=list)
    replaced: int | None = 0
    merged: MergedRows | None = None
    stale: int = 0
    lost: dict[Shard, Intervals] = field(default_factory=dict)
    seconds: float = 0.0
    worst_lag: int = 0

    def add(self, report: BatchReport) -> None:
        """Add a batch."""
        entry = report.entry
        self.first_version = self.first_version if self.batches else report.version
        self.last = report
        self.batches += 1
        for shard, (start, end, *_) in {**entry.ranges, **entry.claims}.items():
            known = self.ranges.get(shard, Range(start, end))
            self.ranges[shard] = Range(min(known.start, start), max(known.end, end))
        for shard, count in report.messages.items():
            self.messages[shard] = self.messages.get(shard, 0) + count
        for shard, parts in entry.lost.items():
            self.lost[shard] = self.lost.get(shard, Intervals()) | parts
        self.rows += report.rows
        self.dead += report.dead
        if report.dead or entry.lost:
            self.dead_batches.append(entry.bid)
        is_known = self.replaced is not None and report.replaced is not None
        self.replaced = (self.replaced or 0) + (report.replaced or 0) if is_known else None
        if report.merged is not None:
            self.merged = MergedRows(*map(sum, zip(self.merged or MergedRows(), report.merged, strict=True)))
        self.stale += report.stale
        self.seconds += report.seconds
        self.worst_lag = max(self.worst_lag, sum(report.lag.values()))

    def values(self) -> dict[str, ReportedValue]:
        """Return what is reported of the batches, by name; ``stream_assets.metadata_keys`` describes the names."""
        values: dict[str, ReportedValue] = {
            "rows": self.rows,
            "messages": sum(self.messages.values()),
            "dead_letters": self.dead,
            "ranges": [
                {
                    "shard": str(shard),
                    "start": start,
                    "end": end,
                    "messages": self.messages.get(shard, 0),
                    "lag after": self.last.lag.get(shard, 0),
                }
                for shard, (start, end) in sorted(self.ranges.items())
            ],
            "rows_per_second": round(self.rows / self.seconds, 1) if self.seconds else 0.0,
        }
        if self.replaced is not None:
            values["replaced_rows"] = self.replaced
        if self.merged is not None:
            values |= {f"{kind}_rows": count for kind, count in self.merged._asdict().items()}
        if self.lost:
            values["lost"] = {str(shard): parts.to_json() for shard, parts in sorted(self.lost.items())}
        return values


def touched_intervals(ledger: Ledger, milliseconds: int, *, since_version: int) -> list[int]:
    """Return the starts of the hours, days or the like, of the rows that the group wrote or replaced.

    Rows whose files VACUUM has removed are left out.

    Args:
        ledger: the ledger of the group.
        milliseconds: the length of an interval; they begin in 1970.
        since_version: the version of the table with the first batch to look at.

    Returns:
        The starts in milliseconds since 1970.

    Raises:
        LedgerUnreadableError, TableUnreadableError: the log or the data cannot be read.
    """
    names, found = names_in_files(ledger.log, ROW_TIME), set[int]()
    for commit in ledger.surviving():
        if commit.version < since_version:
            break
        times = None if commit.entry is None else changed_times(ledger.log, commit, names=names)
        for part in times or ():
            found.update(np.unique(part // milliseconds).tolist())
    return [number * milliseconds for number in sorted(found)]


def kept_rows(plan: ReplayPlan) -> Iterator[str]:
    """Yield warnings of rows of the replayed time that a replay does not replace."""
    if plan.last_copies:
        yield (
            f"the stream no longer has the messages of {describe_ranges(plan.last_copies)}: their rows of this time "
            "are the last copy, and are kept"
        )
    if plan.note:
        yield plan.note


def describe_ranges(ranges: Mapping[Shard, tuple[int, ...]]) -> str:
    """Return ranges as text.

    Example:
        >>> describe_ranges({Shard("orders", 1): (5, 9)})
        'orders/1 [5, 9)'
    """
    return ", ".join(f"{shard} [{start}, {end})" for shard, (start, end, *_) in sorted(ranges.items()))
