"""Finds where a stream that lost its newest messages begins to differ from what the table holds of it.

The last messages that earlier batches read say up to where the stream is still the same: their checksums are in the
ledger. From there on the timestamps of rows and dead letters are compared with those of the stream. Where these do not
show a difference either, or cannot, since they are a part of the sequence (Redis), the answer is the end of what is
known to be the same, so that no message is lost; those that are the same on both sides are then read again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import chain

import numpy as np

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.ledger.intervals import MIN_SEQUENCE
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.ledger.table_rows import MESSAGE_MOMENT, NO_MOMENTS, ROW_MOMENT, compared, in_ranges, moments_of, scan
from stream_consumers.batches import BatchSource, Extent, LastMessage, Range
from stream_consumers.errors import LedgerTruncatedError, LedgerUnreadableError
from stream_consumers.messages import Shard
from stream_consumers.options import Limits


def divergences(
    source: BatchSource,
    ingestion: Ingestion,
    state: LedgerState,
    extents: Mapping[Shard, Extent],
    shards: Collection[Shard],
) -> Mapping[Shard, int]:
    """For each shard, the first sequence from which the stream may hold other messages than the table.

    Args:
        source: the stream, by the names of its epochs, after :meth:`BatchSource.extents`.
        ingestion: group and table.
        state: the ledger.
        extents: what the shards hold.
        shards: those that lost messages; the ledger knows the last message of each.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
        StreamAssetsError: the stream cannot be read.
    """
    remembered = _remembered(ingestion.ledger(), state, shards)
    same = _same_up_to(source, remembered)
    ends = {shard: min(state.shards[shard].covered.position or 0, extents[shard].end) for shard in shards}
    starts = {shard: min(ends[shard], max(same[shard], extents[shard].start)) for shard in shards}
    last = {shard: state.last_messages[shard] for shard in shards}
    held = source.last_messages({shard: Range(one.sequence, one.sequence + 1) for shard, one in last.items()})
    # Where another message has the very same timestamp, timestamps show nothing.
    telling = {
        shard: Range(starts[shard], ends[shard])
        for shard in shards
        if source.has_own_timestamps and (shard not in held or held[shard].timestamp_ms != last[shard].timestamp_ms)
    }
    differing, alike = _by_timestamps(source, ingestion, telling)
    # A stream that ends before the last message was only cut: all that it holds may be the same.
    is_short = {shard: extents[shard].end <= last[shard].sequence for shard in shards}
    return {s: differing.get(s, alike.get(s, starts[s]) if is_short[s] else starts[s]) for s in shards}


def _remembered(ledger: Ledger, state: LedgerState, shards: Collection[Shard]) -> Mapping[Shard, list[LastMessage]]:
    """The last messages of all batches that the log still has, in the order of their sequences."""
    found: dict[Shard, set[LastMessage]] = {shard: set() for shard in shards}
    with suppress(LedgerTruncatedError, LedgerUnreadableError):
        for entry in (commit.entry for commit in ledger.surviving(state.version) if commit.entry):
            full = {shard: one.last for shard, one in (entry.state or {}).items() if shard in found}
            for shard, last in chain(full.items(), entry.last_messages.items()):
                if shard in found and last is not None:
                    found[shard].add(last)
    return {shard: sorted(messages) for shard, messages in found.items()}


def _same_up_to(source: BatchSource, remembered: Mapping[Shard, list[LastMessage]]) -> Mapping[Shard, int]:
    """After the newest of these messages that the stream still holds; at its beginning, if it holds none."""
    low = dict.fromkeys(remembered, 0)
    high = {shard: len(messages) for shard, messages in remembered.items()}
    while asked := {s: remembered[s][(low[s] + high[s]) // 2] for s in remembered if low[s] < high[s]}:
        held = source.last_messages({s: Range(m.sequence, m.sequence + 1) for s, m in asked.items()})
        for shard, message in asked.items():
            middle = (low[shard] + high[shard]) // 2
            if shard in held and not source.is_replaced(shard, message, held[shard]):
                low[shard] = middle + 1
            else:
                high[shard] = middle
    return {
        shard: messages[low[shard] - 1].sequence + 1 if low[shard] else MIN_SEQUENCE
        for shard, messages in remembered.items()
    }


def _by_timestamps(
    source: BatchSource, ingestion: Ingestion, gaps: Mapping[Shard, Range]
) -> tuple[Mapping[Shard, int], Mapping[Shard, int]]:
    """Compare the timestamps of these ranges with those in the table.

    Returns:
        Per shard, the end of what is the same before the first difference; and of shards without one, of all.
    """
    logs = [log for log in (ingestion.ledger().log, ingestion.dead_letters().log()) if log.snapshot() is not None]
    left = {shard: gap for shard, gap in gaps.items() if gap.start < gap.end}
    alike = {shard: gap.start for shard, gap in left.items()}
    differing: dict[Shard, int] = {}
    while left and (plan := source.plan(left, limits=Limits(), parallelism=1)) is not None:
        held = moments_of((batch for split in plan.splits for batch in split.read()), MESSAGE_MOMENT)
        where = in_ranges(plan.ranges)
        kept = moments_of(chain.from_iterable(scan(log, ROW_MOMENT, where=where) for log in logs), ROW_MOMENT)
        for shard, part in plan.ranges.items():
            rows = kept.get(shard, NO_MOMENTS)
            same, _ = compared(held.get(shard, NO_MOMENTS), rows)
            # What was removed may have been compacted, or lost: it counts as a difference.
            other = np.setdiff1d(rows.sequences, same)
            same = same[same < other.min()] if len(other) else same
            alike[shard] = max(alike[shard], int(same.max()) + 1 if len(same) else 0)
            gap = left.pop(shard)
            if len(other):
                differing[shard] = alike.pop(shard)
            elif part.end < gap.end:
                left[shard] = Range(part.end, gap.end)
    return differing, alike
