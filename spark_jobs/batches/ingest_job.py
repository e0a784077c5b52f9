"""Ingestion: writes a stream into a Delta table in bounded batches, each message exactly once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from pyspark.sql import SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Batch, Ingestion, Observer, Step, WrittenBatch, ignore_steps
from spark_jobs.batches.job import SourceJob
from spark_jobs.batches.ledger_recovery import commit_positions, keep, read_or_recover
from spark_jobs.batches.replay import last_copies_error
from spark_jobs.batches.run_control import IdleWait
from spark_jobs.batches.source_checks import (
    check_epochs,
    check_keys,
    check_loss,
    check_only_group,
    check_planned,
    check_removed_by_restore,
    check_sharing,
    check_source,
    lag,
    last_messages_before,
    not_held,
    without_positions,
)
from spark_jobs.batches.target_table import OutdatedError, YieldTo, initialize, register_streams
from spark_jobs.ledger.entries import PlannedFields, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.session import check_served
from spark_jobs.writing.delta_table import compute_state
from stream_consumers.batches import BatchPlan, BatchSource, Extent, Range, Resume, position_facts_in
from stream_consumers.errors import DataLossError, KeyConflictError, SourceRecreatedError
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset

CHECK_INTERVAL_SECONDS = 5.0
"""A lingering run checks for new shards and for commits of other writers at this interval, in seconds."""


class IngestJob(SourceJob):
    """Drains a source into a table, up to its end when the job began, or, while it lingers, up to its newest end.

    Args:
        spark: a session that can write Delta tables.
        source: the stream; the caller closes it.
        ingestion: what goes where.
        observer: called at each step, for progress bars and for tests that kill the process there.
        origin: where a group without a position starts; ``ingestion.start`` by default.
        stop: go no further than this.
        idle_wait: how long the job lingers. When everything up to the captured ends is in the table, it captures them
            again.

    Raises:
        SparkSessionError: the session cannot write Delta tables.

    Example::

        for report in drain_batches(IngestJob(spark, source, ingestion)):
            print(report.rows)
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
        idle_wait: IdleWait | None = None,
    ) -> None:
        super().__init__(spark, source, ingestion, observer=observer, idle_wait=idle_wait)
        self._extents: Mapping[Shard, Extent] | None = None
        self._origin = origin or Bound(edge=ingestion.start)
        self._stop = stop
        self._stops: Mapping[Shard, int] = {}
        self._resume: Resume | None = None
        self._version = -1
        self._next_check = 0.0
        self._is_last_plan_empty = False

    def plan(self) -> Batch | YieldTo | None:
        """Steps 1 to 4: the next batch, or ``None`` if everything up to the captured ends is in the table.

        Raises:
            SourceRecreatedError: the stream is not the one the ledger remembers.
            SourceTruncatedError: it lost messages that were read.
            DataLossError: messages or rows are gone, and ``on_data_loss`` is not ``record``.
            InvalidOptionError: another group or mode has the stream, or the table holds rows for which the ledger has
                no positions.
            SchemaMismatchError, TransformError: the rows cannot go into the table.
        """
        while True:
            state, is_recovered = read_or_recover(self._source, self.ingestion, self.ledger)
            if is_recovered:
                keep(self.target.spark, self._source, self.ingestion, state)
                continue
            if (request := self.yields.unanswered(state.version)) is not None:
                return request
            check_sharing(state, self.ingestion)
            check_keys(state, self.ingestion)
            check_removed_by_restore(state, self.ingestion)
            check_epochs(state, self._identities, url=self._source.url)
            extents = self._captured(state)
            if state.newest is None:
                if not extents and self._origin.edge is AutoStreamReset.EARLIEST:
                    return None
                self._initialize(state, extents)
                continue
            if not self._has_read(state, extents):
                self._compute_state()
            self.target.columns.check(state)
            checked = self._reconcile(state)
            # For all shards, even if each has its own transaction sequence, because this one commit registers them all.
            if new := _new_streams(state, replace(self.ingestion, shard=None).own(extents, self._identities)):
                facts = {shard: known for shard, (_, known) in position_facts_in(self._source.hint(new)).items()}
                register_streams(self.target, new, identities=self._identities, facts=facts)
                continue
            batch = self._plan(checked, self._own(extents))
            self._is_last_plan_empty = batch is None
            if batch is None:
                # The last batches may have taken the number of one that was dropped.
                self.clean_up_dead_letters(state, again=True)
            return batch

    def finish(self, written: WrittenBatch) -> Mapping[Shard, int]:
        """Step 8: commit the positions to the broker."""
        state = self.ledger.read()
        self.commit_to_broker(state)
        if self.idle_wait.lingers:
            self._compute_state()
        self.telemetry(Step.COMMITTED, written.batch)
        # For all shards: if each has its own transaction sequence, the lag of the group includes the others.
        of_group = replace(self.ingestion, shard=None)
        return lag(self._source, state, of_group.own(self._extents or {}, self._identities))

    def has_more(self) -> bool:
        """Return whether the stream or the table has changed since the last plan.

        Each call checks the ends of the known shards. Every ``CHECK_INTERVAL_SECONDS`` it also checks for new shards,
        and for commits of other writers, because a RESTORE or a rewind leaves messages to read.

        Raises:
            StreamAssetsError: the stream or the ledger cannot be read, or the Spark server of the run has ended.
        """
        check_served(self.target.spark)
        if self._extents is None:
            return True
        if time.monotonic() < self._next_check:
            return self._source.has_grown(self._extents, resume=self._resume)
        found = self._source.extents(resume=self._resume)
        self._next_check = time.monotonic() + CHECK_INTERVAL_SECONDS
        snapshot = self.ledger.log.snapshot()
        ends = {shard: extent.end for shard, extent in self._extents.items()}
        is_same = ends == {shard: extent.end for shard, extent in found.items()}
        return not is_same or (snapshot.version if snapshot else -1) != self._version

    def _captured(self, state: LedgerState) -> Mapping[Shard, Extent]:
        """Return the ends to read up to, captured at the first plan, and again when a lingering job reaches them.

        Before it is due, it plans nothing beyond the ends that it has, so that what comes meanwhile is one batch.
        """
        self._resume = state.resume
        if self._resume is not None:
            self._source.remember(self._resume)
        self._version = state.version
        # Without a table, or after it was deleted, the group starts at the present start of the stream.
        if state.newest is None:
            self._extents = None
        if self._extents is None or (self._is_reached(state, self._extents) and not self.idle_wait.is_over):
            self.idle_wait.begin()
            extents = self._source.extents(resume=self._resume)
            # Not later: another run may then have moved the position beyond the captured ends.
            group, is_first = self.ingestion.group, self._extents is None
            # Each plan checks the last messages of the shards that it reads.
            check_source(self._source, group, state, extents, reads_last_messages=is_first)
            self._extents = extents
            self._next_check = time.monotonic() + CHECK_INTERVAL_SECONDS
            self._stops = self._stop.resolve(self._source, extents) if self._stop else {}
        return self._extents

    def _is_reached(self, state: LedgerState, extents: Mapping[Shard, Extent]) -> bool:
        return self._is_last_plan_empty or (self.idle_wait.is_due and self._has_read(state, extents))

    def _has_read(self, state: LedgerState, extents: Mapping[Shard, Extent]) -> bool:
        """Return whether the positions are at these ends. It is false if a new shard is empty, and has no position."""
        positions = state.positions
        return all(positions.get(shard, -1) >= extent.end for shard, extent in self._own(extents).items())

    def _compute_state(self) -> None:
        """Let Delta compute what the next write needs, while the batch is planned and read."""
        # Members that write other shards commit meanwhile, and each commit makes another state.
        if self.ingestion.shard is None:
            compute_state(self.target.spark, self.ingestion.table)

    def _end(self, shard: Shard, extent: Extent) -> int:
        return min(extent.end, self._stops.get(shard, extent.end))

    def _own(self, extents: Mapping[Shard, Extent]) -> Mapping[Shard, Extent]:
        return self.ingestion.own(extents, self._identities)

    def _initialize(self, state: LedgerState, extents: Mapping[Shard, Extent]) -> None:
        named = self._origin.resolve(self._source, extents)
        origin = {shard: named.get(shard, extent.start) for shard, extent in extents.items()}
        last = last_messages_before(self._source, origin)
        hint = self._source.hint(origin)
        initialize(self.target, state, origin, identities=self._identities, last_messages=last, hint=hint)

    def _plan(self, state: LedgerState, extents: Mapping[Shard, Extent]) -> Batch | None:
        if state.removed_from_ended:
            return self._record_removed(state)
        ends = {shard: self._end(shard, extent) for shard, extent in extents.items()}
        redo = {s: part.clamp(Range(MIN_SEQUENCE, ends[s])) for s in extents for part in _redo(state, s)[:1]}
        redo = {shard: part for shard, part in redo.items() if part.start < part.end}
        new: Mapping[Shard, int] = {}
        hint = state.hint
        if redo:
            if lost := not_held(self._source, self.ingestion, state, extents, redo):
                error = last_copies_error(
                    f"{self._source.url} no longer holds messages whose rows would have to be replaced",
                    lost,
                    remedy="Bring the messages back, or set on_data_loss='record' to keep those rows as they are and "
                    "replace the others.",
                )
                self.ingestion.refuse_or_record(error)
            plan = self._plan_again(redo)
        else:
            known = {shard.stream for shard in state.shards}
            new = {
                shard: self._source.first(shard, extent) if shard.stream in known else extent.start
                for shard, extent in extents.items()
                if not state.shards.get(shard, ShardState()).covered
            }
            self._check_added(shard for shard in new if shard.stream in known)
            covered = {shard: Intervals.of((MIN_SEQUENCE, start)) for shard, start in new.items()}
            covered |= {shard: s.covered for shard, s in state.shards.items() if s.covered}
            found = {shard: covered[shard].first_gap(end) for shard, end in ends.items()}
            gaps = {shard: gap for shard, gap in found.items() if gap}
            self._check_rest(state, extents, gaps)
            plan = self._plan_new(gaps)
            if plan is not None:
                hint = _hint_after(self._source, plan, covered)
        if plan is None:
            return None
        check_only_group(self.ingestion, state, {shard.stream for shard in plan.ranges}, url=self._source.url)
        # In this order, and before the read: if the stream is cut between the two, the second check or the next plan
        # sees it.
        # A replace moves no position, and the entry that set the position has the last message before it.
        ends = {} if redo else {shard: part.end for shard, part in plan.ranges.items()}
        last = last_messages_before(self._source, ends, state.last_messages)
        planned = {shard: extent for shard, extent in extents.items() if shard in plan.ranges}
        try:
            check_planned(self._source, self.ingestion.group, state, planned)
        except SourceRecreatedError as error:
            # Another run may have read further than the captured ends. The next plan checks the stream with new ones.
            raise OutdatedError(error) from error
        lost = {} if redo else plan.lost
        check_loss(self._source, self.ingestion, lost, planned)
        fields = PlannedFields(
            ranges=plan.ranges,
            mode=self.ingestion.write_mode(again=bool(redo)),
            origin={shard: start for shard, start in new.items() if shard in plan.ranges},
            hint=hint,
            lost={shard: Intervals.of(part) for shard, part in lost.items()},
            last_messages=last,
        )
        maybe_written = {} if redo else _claimed_before(state, plan.ranges)
        return Batch("batch", state, plan, fields, identities=self._identities, maybe_written=maybe_written)

    def _plan_new(self, gaps: Mapping[Shard, Range]) -> BatchPlan | None:
        """Plan messages that this table has not read before, and that have no corrections."""
        return self._plan_ranges(gaps)

    def _check_rest(self, state: LedgerState, extents: Mapping[Shard, Extent], gaps: Mapping[Shard, Range]) -> None:
        """Refuse to merge into a gap if the stream no longer holds what has to be merged again behind it.

        Raises:
            DataLossError: ``on_data_loss`` is not ``record``.
        """
        rest = {shard: Range(gap.end, gap.end) for shard, gap in gaps.items()}
        if lost := not_held(self._source, self.ingestion, state, extents, rest):
            error = last_copies_error(
                f"{self._source.url} no longer holds messages that have to be merged again behind messages that a "
                "RESTORE removed",
                lost,
                remedy="Bring the messages back, or set on_data_loss='record' to merge without them.",
            )
            self.ingestion.refuse_or_record(error)

    def _check_added(self, shards: Iterable[Shard]) -> None:
        """Refuse shards that a stream got after the group began, if keys may have moved to them.

        If a change of a key is read before an older one from another shard, the older one may win in silence.

        Raises:
            KeyConflictError: positions order the changes of a keyed table.
        """
        keys = self.ingestion.keys
        if keys is not None and keys.is_ordered_by_position and (added := sorted(shards)):
            raise KeyConflictError(
                f"{', '.join(map(str, added))} were added to {self._source.url} after group {self.ingestion.group!r} "
                "began, so the changes of a key may now be in two shards, and positions do not order them",
                remedy="Rebuild the table with sequence_by, which orders changes by a value: stream-assets rebuild.",
            )

    def _record_removed(self, state: LedgerState) -> Batch:
        """Plan to skip what a RESTORE removed of a stream that was recreated since, if losses are to be recorded."""
        listed = ", ".join(f"{shard} {parts}" for shard, parts in state.removed_from_ended.items())
        error = DataLossError(
            f"a RESTORE of {self.ingestion.table} removed rows of a stream that was recreated since: {listed}",
            remedy="Their messages cannot be read again. RESTORE the table to a version that has the rows. Or set "
            "on_data_loss='record' to continue without them, and record the loss in the table's log and dead letters.",
        )
        self.ingestion.refuse_or_record(error)
        ranges = {shard: parts.ranges[0] for shard, parts in state.removed_from_ended.items()}
        fields = PlannedFields(ranges=ranges, lost={shard: Intervals.of(part) for shard, part in ranges.items()})
        return Batch("batch", state, fields=fields, identities=self._identities)

    def _reconcile(self, state: LedgerState) -> LedgerState:
        """Step 3: repair the positions of the broker, and delete the dead letters of dropped batches."""
        known = self._source.committed(self.ingestion.group)
        positions = self.ingestion.own(state.positions, self._identities)
        if known is not None and any(known.get(shard) != position for shard, position in positions.items()):
            self.commit_to_broker(state)
        return self.clean_up_dead_letters(state)

    def commit_to_broker(self, state: LedgerState) -> None:
        """Commit the positions of the ledger to the broker."""
        commit_positions(self._source, self.ingestion, state, self._identities)

    def forget_stream(self) -> None:
        """Capture the ends again; see :meth:`BatchJob.forget_stream`."""
        self._extents = None


def _new_streams(state: LedgerState, extents: Mapping[Shard, Extent]) -> Mapping[Shard, int]:
    """Return the starts of the shards of streams that the group has not begun yet.

    Empty streams are included, so that messages that come later and are lost before a batch reads them are detected.
    """
    new = without_positions(state, (shard.stream for shard in extents))
    return {shard: extent.start for shard, extent in extents.items() if shard.stream in new}


def _hint_after(
    source: BatchSource, plan: BatchPlan, covered: Mapping[Shard, Intervals]
) -> Mapping[str, object] | None:
    """Return the hint of a plan.

    If the plan fills a gap, the hint also covers the next position: the end of the covered range after the gap.

    Args:
        source: the stream, after the plan has found the losses.
        plan: the plan of a gap.
        covered: what is in the table before it.
    """
    after = {shard: (covered[shard] | Intervals.of(part)).position or 0 for shard, part in plan.ranges.items()}
    jumps = {shard: position for shard, position in after.items() if position != plan.ranges[shard].end}
    return source.hint(jumps, plan.hint) if jumps else plan.hint


def _claimed_before(state: LedgerState, ranges: Mapping[Shard, Range]) -> Mapping[Shard, Range]:
    """Return the parts that may have rows of claimed entries, after a RESTORE to before a switch from claims."""
    claimed = {shard: state.shards[shard].claimed or 0 for shard in ranges if shard in state.shards}
    parts = {shard: ranges[shard].clamp(Range(MIN_SEQUENCE, end)) for shard, end in claimed.items()}
    return {shard: part for shard, part in parts.items() if part.start < part.end}


def _redo(state: LedgerState, shard: Shard) -> tuple[Range, ...]:
    return state.shards[shard].redo.ranges if shard in state.shards else ()
