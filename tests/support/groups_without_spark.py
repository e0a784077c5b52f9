"""A group whose commits delta-rs writes in place of Spark: the ledger, the sources and all checks are the real ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from spark_jobs import maintenance
from spark_jobs.batches import accept as accepting
from spark_jobs.batches import ledger_recovery, replay, target_table
from spark_jobs.batches.accept import AcceptedEpoch, accept
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.replay import PositionMove, rewind
from spark_jobs.batches.source_checks import last_messages_before, losses_of_stream
from spark_jobs.ledger.entries import EntryFields, LedgerEntry, ShardState
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.ledger.table_rows import in_ranges
from stream_consumers.batches import Range
from stream_consumers.create import open_batch_source
from stream_consumers.messages import Shard
from stream_consumers.options import Limits

NO_SPARK: Any = None
Place = tuple[int, int]
Batch = tuple[LedgerEntry, list[tuple[str, int, int]]]


def land(what: Ingestion, entry: LedgerEntry, rows: list[tuple[str, int, int]]) -> None:
    """Write a commit as the writer of a batch does: stream, shard and sequence of each row."""
    names = {"_stream": pa.string(), "_shard": pa.int64(), "_sequence": pa.int64()}
    columns = list(zip(*rows)) or [[], [], []]
    table = pa.table({name: pa.array(part, kind) for (name, kind), part in zip(names.items(), columns)})
    properties = CommitProperties(
        custom_metadata={"userMetadata": entry.to_json()}, app_transactions=[Transaction(entry.app, entry.number)]
    )
    if entry.write_mode.overwrites and any(part.start < part.end for part in entry.ranges.values()):
        where = in_ranges(entry.ranges)
        write_deltalake(what.table, table, mode="overwrite", predicate=where, commit_properties=properties)
    else:
        write_deltalake(what.table, table, mode="append", commit_properties=properties)


def write_empty_commits_by(patch: pytest.MonkeyPatch, write: Callable[[Ingestion, LedgerEntry], object]) -> None:
    """Let ``write`` write the empty commits of an accept, an adopt, a rewind, a recovery, a fence and maintenance."""

    def commit(
        spark: object,
        what: Ingestion,
        kind: str,
        fields: Callable[[LedgerState], EntryFields | None],
        *,
        read: Callable[[], LedgerState] | None = None,
    ) -> None:
        state = (read or what.ledger().read)()
        if (more := fields(state)) is not None:
            write(what, what.ledger().entry(kind, state, **more))

    for module in (accepting, ledger_recovery, replay, target_table, maintenance):
        patch.setattr(module, "commit_empty", commit)


def write_empty_commits_without_spark(patch: pytest.MonkeyPatch) -> None:
    """Let delta-rs write the empty commits."""
    write_empty_commits_by(patch, lambda what, entry: land(what, entry, []))


class GroupWithoutSpark:
    """A group that writes a stream into a table.

    Args:
        url: the stream.
        what: group and table.
    """

    def __init__(self, url: str, what: Ingestion) -> None:
        self.url = url
        self.what = what

    def state(self) -> LedgerState:
        return self.what.ledger().read()

    def shards(self) -> Mapping[Shard, ShardState]:
        return self.state().shards

    def begin(self) -> None:
        """Write the first entry of a group, or of its streams without a position."""
        ledger = self.what.ledger()
        state = ledger.read()
        with open_batch_source(self.url) as opened:
            source = self.what.in_epochs(opened)
            origin = {s: e.start for s, e in source.extents(resume=state.resume).items() if s not in state.shards}
            fields = EntryFields(origin=origin, identities=source.identities(), hint=source.hint(origin, state.hint))
            land(self.what, ledger.entry("init", state, switch=None if state.newest else "resumable", **fields), [])

    def losses(self) -> Mapping[Shard, Range]:
        with open_batch_source(self.url) as opened:
            return losses_of_stream(self.what.in_epochs(opened), self.what, self.state())

    def plan(self, records: int = 1000, *, records_loss: bool = False) -> Batch | None:
        """Plan the next batch like a run, and read its rows; a loss is an error of the test, unless it is recorded."""
        ledger = self.what.ledger()
        state = ledger.read()
        with open_batch_source(self.url) as opened:
            source = self.what.in_epochs(opened)
            extents = source.extents(resume=state.resume)
            losses = losses_of_stream(source, self.what, state)
            assert records_loss or losses == {}
            redo = {s: known.redo.ranges[0] for s, known in state.shards.items() if s in extents and known.redo}
            starts = {s: Intervals.of((-(2**63), source.first(s, extent))) for s, extent in extents.items()}
            covered = {s: state.shards[s].covered if s in state.shards else start for s, start in starts.items()}
            gaps = {s: gap for s, known in covered.items() if (gap := known.first_gap(extents[s].end))}
            planned = source.plan(redo or gaps, limits=Limits(max_records=records), parallelism=1)
            if planned is None:
                return None
            ends = {} if redo else {s: part.end for s, part in planned.ranges.items()}
            entry = ledger.entry(
                "batch",
                state,
                ranges=planned.ranges,
                mode="replace" if redo else "append",
                hint=state.hint if redo else planned.hint,
                last_messages=last_messages_before(source, ends, state.last_messages),
                identities={**state.identities, **source.identities()},
            )
            found = [batch.to_pydict() for split in planned.splits for batch in split.read()]
            return entry, [row for one in found for row in zip(one["stream"], one["shard"], one["sequence"])]

    def ingest(self, *, records_loss: bool = False) -> None:
        """Write batches until nothing is left."""
        while (batch := self.plan(records_loss=records_loss)) is not None:
            land(self.what, *batch)

    def accept(self, *, is_cut: bool = False) -> list[AcceptedEpoch]:
        with open_batch_source(self.url) as source:
            return accept(NO_SPARK, source, self.what, is_cut=is_cut)

    def rewind(self, to: str) -> list[PositionMove]:
        with open_batch_source(self.url) as source:
            return rewind(NO_SPARK, source, self.what, Bound.parse(to))

    def restore(self, version: int) -> None:
        DeltaTable(self.what.table).restore(version)

    @property
    def version(self) -> int:
        return DeltaTable(self.what.table).version()

    def rows(self) -> Counter[Place]:
        """How many rows each shard and sequence has, in all epochs together."""
        table = DeltaTable(self.what.table).to_pyarrow_table()
        return Counter(zip(table["_shard"].to_pylist(), table["_sequence"].to_pylist()))
