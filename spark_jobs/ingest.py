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

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.storagelevel import StorageLevel

from spark_jobs.dead_letters import lost_letters
from spark_jobs.delta_log import Commit
from spark_jobs.ingestion import (
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
    position_of,
)
from spark_jobs.intervals import LOWEST, Intervals
from spark_jobs.ledger import LedgerState
from spark_jobs.ledger_entries import Entry
from spark_jobs.session import check_session, first_line
from spark_jobs.sink import DeltaSink, check_columns, explain, is_conflict, last_line
from spark_jobs.source import LETTER_COLUMNS, STREAM_COLUMNS, read_splits, source_schema
from stream_consumers.batches import BatchPlan, BatchSource, Extent, Range, Resume
from stream_consumers.errors import (
    DataLossError,
    InvalidOptionError,
    SourceRecreatedError,
    StreamAssetsError,
    TransformError,
    WriteError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset

T = TypeVar("T")
MAX_RACES = 20
_log = logging.getLogger(__name__)


class OutdatedError(Exception):
    """What was known of the stream when its end was frozen is not true any more."""

    def __init__(self, reason: DataLossError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class IngestJob:
    """Drains a source into a table, up to the end it had when the job began.

    Args:
        spark: a session that can write Delta tables.
        source: the stream; the caller closes it.
        ingestion: what goes where.
        observer: told of each step, for progress bars and for tests that kill the process there.

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
    ) -> None:
        self._spark = check_session(spark)
        self._source = source
        self._ingestion = ingestion
        self._observer = observer
        self._ledger = ingestion.ledger()
        self._letters = ingestion.dead_letters()
        self._sink = DeltaSink(ingestion.table, _TABLE_PROPERTIES, ingestion.merge_schema)
        self._extents: Mapping[Shard, Extent] | None = None
        self._identities = source.identities()
        self._parallelism = parallelism(spark)
        self._checked = False
        self._settled = -1
        self._races = 0

    def plan(self) -> Batch | None:
        """Steps 1 to 4: the next batch, or ``None`` if everything up to the frozen end is in the table.

        Raises:
            SourceRecreatedError: the stream is not the one the ledger remembers.
            SchemaMismatchError, TransformError: the rows cannot go into the table.
        """
        while True:
            state = self._ledger.read()
            check_sharing(state, self._ingestion)
            extents = self._freeze(state)
            if state.newest is None:
                if not extents and self._ingestion.start is AutoStreamReset.EARLIEST:
                    return None
                self._claim(state, extents)
                continue
            self._check_columns(state)
            self._reconcile(state)
            try:
                batch = self._plan(state, self._own(extents))
            except OutdatedError as outdated:
                self._look_again(outdated.reason)
                continue
            if batch is None:
                # The last batches may have passed the number of one that was dropped.
                self._settle(state)
            return batch

    def run(self, batch: Batch) -> BatchReport | None:
        """Steps 5 to 8; ``None`` if another run was faster, then plan again.

        Raises:
            TransformError, SchemaMismatchError, WriteError: nothing of the batch is in the table.
            LedgerUnreadableError: whether it is cannot be told; nothing was committed to the broker.
        """
        began = time.monotonic()
        frame = read_splits(self._spark, batch.plan.splits, self._ingestion.decoder).persist(
            StorageLevel.MEMORY_AND_DISK
        )
        try:
            try:
                messages, dead = self._read(frame)
            except DataLossError as error:
                self._look_again(error)
                return None
            self._check_identity()
            self._observer(Step.READ, batch)
            entry = _counted(batch.entry, sum(messages.values()), sum(dead.values()))
            if entry.dead or entry.lost:
                letters = frame.where(f.col("_error").isNotNull()).select(*STREAM_COLUMNS, *LETTER_COLUMNS)
                letters = letters.unionByName(lost_letters(self._spark, entry.lost)) if entry.lost else letters
                if not self._letters.write(letters, ledger=self._ledger, number=entry.number, bid=entry.bid):
                    self._raced()
                    return None
            self._observer(Step.DEAD_LETTERS_WRITTEN, batch)
            commit = self._write(self._transformed(frame), entry, batch)
        finally:
            frame.unpersist()
        if commit is None:
            self._raced()
            return None
        self._races = 0
        self._observer(Step.VERIFIED, batch)
        state = self._ledger.read()
        self._source.commit(self._ingestion.group, self._own(state.positions))
        self._observer(Step.COMMITTED, batch)
        return BatchReport(
            Batch(entry, batch.plan),
            commit.version,
            messages,
            commit.output_rows or 0,
            entry.dead,
            lag(state, self._own(self._extents or {})),
            time.monotonic() - began,
        )

    def _freeze(self, state: LedgerState) -> Mapping[Shard, Extent]:
        if self._extents is None:
            hint = state.newest.hint if state.newest else None
            resume = (
                Resume(state.positions, hint)
                if state.newest and not any(s.redo for s in state.shards.values())
                else None
            )
            extents = self._source.extents(resume=resume)
            # Only here: later the position may be beyond the frozen end, because another run went on.
            check_source(self._source, self._ingestion.group, state, extents)
            self._extents = extents
        return self._extents

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
        """The first commit of a group: empty, with the resolved origin (I9)."""
        self._ledger.check_first(extents)
        self._check_other_groups()
        latest = self._ingestion.start is AutoStreamReset.LATEST
        origin = {shard: extent.end if latest else extent.start for shard, extent in extents.items()}
        entry = self._entry("claim", state, origin=origin)
        empty = self._transformed(self._spark.createDataFrame([], source_schema(self._ingestion.decoder)))
        self._check_columns(state)
        try:
            self._sink.write(empty, entry, creates=state.version < 0)
        except Exception as error:  # a lost race to create the table shows in many ways; the log decides
            if self._ledger.read().newest is None and not is_conflict(error):
                raise explain(error, table=self._ingestion.table) from error
            self._raced()
        self._observer(Step.CLAIMED, None)

    def _check_other_groups(self) -> None:
        """One group a stream and table: a replace would take the rows of the other one away."""
        other = self._ledger.other_group(frozenset(self._identities))
        if other is not None:
            raise InvalidOptionError(
                f"group {other!r} already writes {self._source.url} into {self._ingestion.table}",
                remedy=f"Use group {other!r}, or another table: a row is known by stream, shard and sequence only.",
            )

    def _plan(self, state: LedgerState, extents: Mapping[Shard, Extent]) -> Batch | None:
        redo = {shard: state.shards[shard].redo.ranges[0] for shard in extents if _has_redo(state, shard)}
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
                if position_of(state, shard) is None
            }
            covered = {shard: Intervals.of((LOWEST, start)) for shard, start in new.items()}
            covered |= {shard: s.covered for shard, s in state.shards.items() if s.covered}
            found = {shard: covered[shard].first_gap(extent.end) for shard, extent in extents.items()}
            gaps = {shard: gap for shard, gap in found.items() if gap}
            lost = check_loss(self._source, self._ingestion, gaps)
            plan = self._plan_ranges(gaps)
            mode, origin = "append", new
        if plan is None:
            return None
        entry = self._entry(
            "batch",
            state,
            ranges=plan.ranges,
            mode=mode,
            origin={shard: start for shard, start in origin.items() if shard in plan.ranges},
            hint=plan.hint if mode == "append" else None,
            lost={shard: part for shard, part in lost.items() if shard in plan.ranges},
        )
        batch = Batch(entry, plan)
        self._observer(Step.PLANNED, batch)
        return batch

    def _check_redo(self, redo: Mapping[Shard, Range]) -> None:
        """Rows are replaced only by what can be read again."""
        lost = self._source.lost(redo)
        if lost:
            raise DataLossError(
                f"{self._source.url} no longer holds messages whose rows would have to be replaced",
                remedy="The rows in the table are the last copy, so they are not touched. Bring the messages back, or "
                "go on with a new group name and another table.",
                **{str(shard): f"{part.start} to {part.end}" for shard, part in sorted(lost.items())},
            )

    def _plan_ranges(self, gaps: Mapping[Shard, Range]) -> BatchPlan | None:
        try:
            return self._source.plan(gaps, limits=self._ingestion.limits, parallelism=self._parallelism)
        except DataLossError as error:
            raise OutdatedError(error) from error

    def _entry(
        self,
        kind: str,
        state: LedgerState,
        *,
        ranges: Mapping[Shard, Range] | None = None,
        mode: str = "append",
        origin: Mapping[Shard, int] | None = None,
        hint: Mapping[str, object] | None = None,
        lost: Mapping[Shard, Range] | None = None,
    ) -> Entry:
        return Entry(
            kind=kind,
            group=self._ingestion.group,
            app=self._ledger.app,
            number=state.last_number + 1,
            by=self._ledger.member,
            bid=uuid.uuid4().hex,
            base=state.version,
            ranges=ranges or {},
            mode=mode,
            origin=origin or {},
            state=state.shards,
            identities={**(state.newest.identities if state.newest else {}), **self._identities},
            hint=hint,
            letters=self._settled,
            sharing=state.sharing,
            switch=self._ingestion.sharing.value if kind == "claim" else None,
            lost=lost or {},
        )

    def _reconcile(self, state: LedgerState) -> None:
        """Step 3, and the dead letters of batches that were dropped."""
        known = self._source.committed(self._ingestion.group)
        positions = self._own(state.positions)
        if known is not None and any(known.get(shard) != position for shard, position in positions.items()):
            self._source.commit(self._ingestion.group, positions)
        # The first time, and after a RESTORE: it may have removed batches that dead letters were counted with.
        if not self._checked or state.letters < 0:
            self._checked = True
            self._settle(state)

    def _settle(self, state: LedgerState) -> None:
        self._settled = self._letters.settle(self._spark, self._ledger, after=state.letters)

    def _read(self, frame: DataFrame) -> tuple[Mapping[Shard, int], Mapping[Shard, int]]:
        """Read the source into the cache; messages and dead letters per shard."""
        is_dead = f.col("_error").isNotNull().cast("bigint")
        counts = frame.groupBy("_stream", "_shard").agg(f.count("*").alias("all"), f.sum(is_dead).alias("dead"))
        try:
            found = counts.collect()
        except PySparkException as error:
            reason = last_line(error)
            if DataLossError.__name__ in reason:
                raise DataLossError(reason, remedy="Run again.") from error
            raise WriteError(
                f"{self._source.url} could not be read: {reason}",
                remedy="Nothing was written; the batch is planned anew at the next run.",
            ) from error
        messages = {Shard(row["_stream"], row["_shard"]): int(row["all"] - row["dead"]) for row in found}
        return messages, {Shard(row["_stream"], row["_shard"]): int(row["dead"]) for row in found}

    def _transformed(self, frame: DataFrame) -> DataFrame:
        rows = frame.where(f.col("_error").isNull()).drop(*LETTER_COLUMNS)
        transform = self._ingestion.transform
        if transform is None:
            return rows
        name = getattr(transform, "__name__", "transform")
        try:
            result = transform(rows)
            columns = result.columns
        except StreamAssetsError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise TransformError(
                f"the transform {name!r} raised {type(error).__name__}: {first_line(error)}",
                remedy="Correct it; nothing was written, and the next run reads the same messages.",
            ) from error
        return result.select(*columns)

    def _check_columns(self, state: LedgerState) -> None:
        """Before the first batch: do the rows fit the table?"""
        if self._checked:
            return
        rows = self._transformed(self._spark.createDataFrame([], source_schema(self._ingestion.decoder))).schema
        table = self._spark.read.format("delta").load(self._ingestion.table).schema.fields if state.version >= 0 else []
        check_columns(
            {column.name: column.dataType.simpleString() for column in rows.fields},
            {column.name: column.dataType.simpleString() for column in table},
            path=self._ingestion.table,
            merge_schema=self._ingestion.merge_schema,
        )

    def _write(self, rows: DataFrame, entry: Entry, batch: Batch) -> Commit | None:
        """Steps 6 and 7; the commit, or ``None`` if the number is somebody else's."""
        self._observer(Step.WRITING, batch)
        failure: Exception | None = None
        try:
            self._sink.write(rows, entry)
        except Exception as error:  # noqa: BLE001 - whether it landed is for the ledger to say
            failure = error
        self._observer(Step.ROWS_WRITTEN, batch)
        commit = self._ledger.written(entry.number, after=entry.base)
        if commit is not None and commit.entry is not None and commit.entry.bid == entry.bid:
            return commit
        if commit is None and failure is not None and not is_conflict(failure):
            raise explain(failure, table=self._ingestion.table) from failure
        _log.info("batch %d of %s was written by another run; planning again", entry.number, entry.app)
        return None

    def _look_again(self, reason: DataLossError) -> None:
        """The stream is not what it was when its end was frozen; the next plan says what is missing.

        Raises:
            DataLossError: it was planned again so often that something else is wrong.
        """
        _log.warning("%s is planned again: %s", self._ledger.app, reason)
        self._extents = None
        self._races += 1
        if self._races >= MAX_RACES:
            raise reason

    def _raced(self) -> None:
        self._races += 1
        if self._races >= MAX_RACES:
            raise WriteError(
                f"{self._ledger.app} lost {self._races} races for a batch of {self._ingestion.table} in a row",
                remedy="Other runs of the same group are faster; this one stops. Limit the group to one run at a time.",
            )


_TABLE_PROPERTIES = {"delta.dataSkippingStatsColumns": "_stream,_shard,_sequence,_timestamp"}


def parallelism(spark: SparkSession) -> int:
    """How many splits to read at the same time."""
    try:
        return max(1, spark.sparkContext.defaultParallelism)
    except PySparkException:
        # A Connect session does not tell; the server may have more or fewer cores.
        return 8


def _has_redo(state: LedgerState, shard: Shard) -> bool:
    return shard in state.shards and bool(state.shards[shard].redo)


def _counted(entry: Entry, rows: int, dead: int) -> Entry:
    return replace(entry, rows=rows, dead=dead)
