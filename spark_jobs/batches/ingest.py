"""The batch protocol: bounded micro-batches into a Delta table, each message once.

One batch, in this order; every step may be the last one of a process (protocol 3.1):

 1. snapshot     ONE table version gives the number and the positions
 2. claim        the first commit of a group is empty and records the resolved origin
 3. reconcile    what the broker was told is brought in line with the ledger
 4. plan         the lowest gap up to the end frozen at the start; a new batch id
 5. dead letters into their own table, under its own number
 6. rows         with number, batch id and ranges in the same commit
 7. verify       the commit with our number carries our batch id; if not, drop the batch and plan again
 8. commit       tell the broker, only now
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeVar

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import (
    Batch,
    BatchReport,
    Ingestion,
    Observer,
    Step,
    check_loss,
    check_sharing,
    check_source,
    ignore_steps,
    lag,
)
from spark_jobs.batches.ledger_recovery import keep, line_mark, read_or_recover
from spark_jobs.batches.writer import BatchWriter, OutdatedError
from spark_jobs.ledger.entries import ShardState
from spark_jobs.ledger.intervals import LOWEST, Intervals
from spark_jobs.ledger.ledger import LedgerState
from stream_consumers.batches import BatchPlan, BatchSource, Extent, Range, Resume
from stream_consumers.errors import DataLossError, SourceRecreatedError
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, DataLoss

T = TypeVar("T")


class IngestJob:
    """Drains a source into a table, up to the end it had when the job began.

    Args:
        spark: a session that can write Delta tables.
        source: the stream; the caller closes it.
        ingestion: what goes where.
        observer: told of each step, for progress bars and for tests that kill the process there.
        origin: where a group without a position starts, if not where ``ingestion`` says.
        stop: go no further than this.

    Raises:
        SparkSessionError: the session cannot write Delta tables.

    Example::

        job = IngestJob(spark, source, ingestion)
        while (batch := job.plan()) is not None:
            report = job.run(batch)
    """

    def __init__(
        self,
        spark: SparkSession,
        source: BatchSource,
        ingestion: Ingestion,
        *,
        observer: Observer = ignore_steps,
        origin: Bound | None = None,
        stop: Bound | None = None,
    ) -> None:
        self._spark = spark
        self._source = source
        self._ingestion = ingestion
        self._observer = observer
        self._writer = BatchWriter(spark, ingestion, url=source.url, observer=observer)
        self._extents: Mapping[Shard, Extent] | None = None
        self._origin = origin or Bound(edge=ingestion.start)
        self._stop = stop
        self._stops: Mapping[Shard, int] = {}
        self._identities = source.identities()
        self._parallelism = parallelism(spark)

    def plan(self) -> Batch | None:
        """Steps 1 to 4: the next batch, or ``None`` if everything up to the frozen end is in the table.

        Raises:
            SourceRecreatedError: the stream is not the one the ledger remembers.
            SchemaMismatchError, TransformError: the rows cannot go into the table.
        """
        while True:
            state, is_recovered = read_or_recover(self._source, self._ingestion)
            if is_recovered:
                keep(self._spark, self._source, self._ingestion, state)
                continue
            check_sharing(state, self._ingestion)
            extents = self._freeze(state)
            if state.newest is None:
                if not extents and self._origin.edge is AutoStreamReset.EARLIEST:
                    return None
                self._claim(state, extents)
                continue
            self._writer.check_columns(state)
            self._reconcile(state)
            try:
                batch = self._plan(state, self._own(extents))
            except OutdatedError as outdated:
                self._look_again(outdated)
                continue
            if batch is None:
                # The last batches may have passed the number of one that was dropped.
                self._writer.settle(state, again=True)
            return batch

    def run(self, batch: Batch) -> BatchReport | None:
        """Steps 5 to 8; ``None`` if another run was faster, then plan again.

        Raises:
            TransformError, SchemaMismatchError, WriteError: nothing of the batch is in the table.
            LedgerUnreadableError: whether it is cannot be told; nothing was committed to the broker.
        """
        began = time.monotonic()
        try:
            written = self._writer.write(batch, check=self._check_identity)
        except OutdatedError as outdated:
            self._look_again(outdated)
            return None
        if written is None:
            return None
        state = self._writer.ledger.read()
        self._commit(state)
        self._observer(Step.COMMITTED, batch)
        return BatchReport(
            Batch(written.entry, batch.plan),
            written.commit.version,
            written.messages,
            written.commit.output_rows or 0,
            written.entry.dead,
            lag(self._source, state, self._own(self._extents or {})),
            time.monotonic() - began,
            replaced=self._writer.ledger.log.deleted_rows(written.commit),
        )

    def _freeze(self, state: LedgerState) -> Mapping[Shard, Extent]:
        if self._extents is None:
            hint = state.newest.hint if state.newest else None
            extents = self._source.extents(resume=Resume(state.positions, hint) if state.newest else None)
            # Only here: later the position may be beyond the frozen end, because another run went on.
            check_source(self._source, self._ingestion.group, state, extents)
            self._extents = extents
            self._stops = self._stop.resolve(self._source, extents) if self._stop else {}
        return self._extents

    def _end(self, shard: Shard, extent: Extent) -> int:
        return min(extent.end, self._stops.get(shard, extent.end))

    def _own(self, shards: Mapping[Shard, T]) -> Mapping[Shard, T]:
        """Those of this source, and of this number line."""
        only = self._ingestion.shard
        return {s: value for s, value in shards.items() if s.stream in self._identities and only in (None, s)}

    def _check_identity(self) -> None:
        """After the read: only then is it known that it was the stream that was planned."""
        found = self._source.identities()
        if found != self._identities:
            raise SourceRecreatedError(
                f"{self._source.url} was recreated while it was read",
                remedy="Nothing was written. If it was recreated on purpose, ingest it with a new group name.",
                planned=dict(self._identities),
                found=dict(found),
            )

    def _claim(self, state: LedgerState, extents: Mapping[Shard, Extent]) -> None:
        named = self._origin.resolve(self._source, extents)
        origin = {shard: named.get(shard, extent.start) for shard, extent in extents.items()}
        self._writer.claim(state, origin, identities=self._identities)

    def _plan(self, state: LedgerState, extents: Mapping[Shard, Extent]) -> Batch | None:
        ends = {shard: self._end(shard, extent) for shard, extent in extents.items()}
        redo = {s: part.clamp(Range(LOWEST, ends[s])) for s in extents for part in _redo(state, s)[:1]}
        redo = {shard: part for shard, part in redo.items() if part.start < part.end}
        lost: Mapping[Shard, Range] = {}
        if redo:
            self._check_redo(redo)
            plan = self._plan_ranges(redo)
            mode, origin = "replace", {}
        else:
            known = {shard.stream for shard in state.shards}
            new = {
                shard: self._source.first(shard) if shard.stream in known else extent.start
                for shard, extent in extents.items()
                if not state.shards.get(shard, ShardState()).covered
            }
            covered = {shard: Intervals.of((LOWEST, start)) for shard, start in new.items()}
            covered |= {shard: s.covered for shard, s in state.shards.items() if s.covered}
            found = {shard: covered[shard].first_gap(end) for shard, end in ends.items()}
            gaps = {shard: gap for shard, gap in found.items() if gap}
            lost = check_loss(self._source, self._ingestion, gaps)
            plan = self._plan_ranges(gaps)
            mode, origin = "append", new
        if plan is None:
            return None
        entry = self._writer.entry(
            "batch",
            state,
            identities=self._identities,
            ranges=plan.ranges,
            mode=mode,
            origin={shard: start for shard, start in origin.items() if shard in plan.ranges},
            hint=plan.hint if mode == "append" else None,
            lost={shard: Intervals.of(part) for shard, part in lost.items() if shard in plan.ranges},
        )
        batch = Batch(entry, plan)
        self._observer(Step.PLANNED, batch)
        return batch

    def _check_redo(self, redo: Mapping[Shard, Range]) -> None:
        """Rows are replaced only by what can be read again."""
        lost = self._source.lost(redo)
        if lost and self._ingestion.on_data_loss is DataLoss.ERROR:
            raise DataLossError(
                f"{self._source.url} no longer holds messages whose rows would have to be replaced",
                remedy="The rows in the table are the last copy, so they are not touched. Bring the messages back, or "
                "set on_data_loss to 'record': then those rows stay as they are, and the others are replaced.",
                **{str(shard): f"{part.start} to {part.end}" for shard, part in sorted(lost.items())},
            )

    def _plan_ranges(self, gaps: Mapping[Shard, Range]) -> BatchPlan | None:
        try:
            return self._source.plan(gaps, limits=self._ingestion.limits, parallelism=self._parallelism)
        except DataLossError as error:
            raise OutdatedError(error) from error

    def _reconcile(self, state: LedgerState) -> None:
        """Step 3, and the dead letters of batches that were dropped."""
        known = self._source.committed(self._ingestion.group)
        positions = self._own(state.positions)
        if known is not None and any(known.get(shard) != position for shard, position in positions.items()):
            self._commit(state)
        self._writer.settle(state)

    def _commit(self, state: LedgerState) -> None:
        positions = self._own(state.positions)
        metadata = line_mark(self._writer.ledger.app, state, positions)
        self._source.commit(self._ingestion.group, positions, metadata=metadata)

    def _look_again(self, outdated: OutdatedError) -> None:
        self._extents = None
        self._writer.look_again(outdated)


def parallelism(spark: SparkSession) -> int:
    """How many splits to read at the same time."""
    try:
        return max(1, spark.sparkContext.defaultParallelism)
    except PySparkException:
        # A Connect session does not tell; the server may have more or fewer cores.
        return 8


def _redo(state: LedgerState, shard: Shard) -> tuple[Range, ...]:
    return state.shards[shard].redo.ranges if shard in state.shards else ()
