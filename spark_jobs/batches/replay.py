"""Replays read covered messages again and replace their rows; rewinds move the position of a group.

A replay follows the commit order of :mod:`spark_jobs.batches`, with these differences:

 1. Its goal, the ranges that it replaces, is clamped to what the ledger covers, once, when it begins. Each of its
    commits has the goal and the replay's id, so that a replay that was killed continues after its last batch.
 2. Its commits are of kind ``replay``: they never move a position, neither the ledger's nor the broker's.
 3. It has its own transaction sequence, unless the table is keyed. Ingestion only appends what is not covered, and a
    replay only replaces what is covered, so that they need not compete for numbers. If another commit lands first, a
    replace is written again without another read.

A rewind is one empty commit in each transaction sequence of the group. A rewind backwards replaces nothing itself: its
commit has the end of the range that later batches replace (``until``), and the ledger keeps what is left of it across
crashes. After a rewind forwards, the skipped range counts as covered, and the ledger records that it was skipped. A
batch in flight loses its number to the commit and is planned again.
"""

from __future__ import annotations

import enum
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain, islice
from typing import NamedTuple

from pyspark.sql import SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Batch, Ingestion, Observer, WrittenBatch, ignore_steps
from spark_jobs.batches.job import SourceJob
from spark_jobs.batches.ledger_recovery import commit_positions, keep, surviving_state
from spark_jobs.batches.run_control import Retries, result_of
from spark_jobs.batches.source_checks import (
    check_epochs,
    check_keys,
    check_only_group,
    check_sharing,
    check_source,
    last_messages_before,
    not_held,
    redoes_rest,
)
from spark_jobs.batches.target_table import commit_empty
from spark_jobs.ledger.delta_log import Commit
from spark_jobs.ledger.entries import (
    CLAIMS,
    LEAVING_CLAIMS,
    REPLAYER,
    EntryFields,
    PlannedFields,
    ReplayProgress,
    ShardState,
    Totals,
    replay_key,
)
from spark_jobs.ledger.fold import totals_after
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.ledger.table_rows import ROW_PLACE, extents_of, in_ranges, in_time, scan, sequences_of
from stream_consumers.batches import BatchSource, Extent, Range
from stream_consumers.display import counted
from stream_consumers.epochs import split_epoch
from stream_consumers.errors import (
    DataLossError,
    GroupActiveError,
    InvalidOptionError,
    LedgerTruncatedError,
    StreamNotFoundError,
    TableUnreadableError,
    UnsupportedError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, choose_fields

_MAX_PLACES = 5
"""How many shards a note names at most."""
_log = logging.getLogger(__name__)


class OnReplay(enum.Enum):
    """What a replay does with the rows that the table has of its range."""

    REPLACE = "replace"
    APPEND = "append"


@dataclass(frozen=True, slots=True)
class Replay:
    """The settings of a replay.

    Args:
        start: the first messages to replay; without it, the first that the stream holds.
        stop: the messages to stop before; without it, the position of the group.
        on_replay: replace the rows of the range, or append to them.
        id: the id of the replay. With the id of a replay that was killed, it continues that one.

    Example:
        >>> replay = Replay(start=Bound.parse("2026-11-01T00:00:00Z"), stop=Bound.parse("2026-11-02T00:00:00Z"))
        >>> replay.on_replay.value
        'replace'
    """

    start: Bound | None = None
    stop: Bound | None = None
    on_replay: OnReplay = OnReplay.REPLACE
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        choose_fields(self, on_replay=OnReplay)


def next_ranges(progress: ReplayProgress, state: LedgerState) -> Mapping[Shard, Range]:
    """Return the next range to replace per shard, within what the ledger covers now, after a possible RESTORE."""
    left = {
        shard: (Intervals.of(part) & state.shards[shard].covered) - progress.done.get(shard, Intervals())
        for shard, part in progress.goal.items()
        if shard in state.shards
    }
    return {shard: parts.ranges[0] for shard, parts in left.items() if parts}


def replay_progress(ledger: Ledger, replay_id: str, *, kind: str = "replay") -> ReplayProgress | None:
    """Return the progress of the replay with this id from the ledger; ``None`` if it has written nothing.

    Args:
        ledger: the ledger of the group.
        replay_id: the id of the replay.
        kind: the kind of its entries; ``batch`` for a rewind.
    """
    state = ledger.read()
    totals, key = state.totals, replay_key(kind, replay_id)
    known = totals.replays.get(key)
    if known.is_complete if known else not totals.has_dropped_replays:
        return known
    entries = [c.entry for c in ledger.surviving(state.version) if c.entry and c.entry.replay == replay_id]
    return reduce(totals_after, reversed(entries), Totals()).replays.get(key)


def replay_commits(ledger: Ledger, replay_id: str) -> list[Commit]:
    """Return the commits of a replay whose rows no RESTORE removed, oldest first, as far as the log reaches back.

    Args:
        ledger: the ledger of the group.
        replay_id: the id of the replay; its commits may come from several runs.
    """
    if replay_progress(ledger, replay_id) is None:
        return []
    found = []
    for commit in ledger.surviving():
        entry = commit.entry
        if entry is not None and (entry.kind, entry.replay) == ("replay", replay_id):
            found.append(commit)
            if entry.begins:
                break
    return found[::-1]


def goal_of(
    replay: Replay, source: BatchSource, state: LedgerState, extents: Mapping[Shard, Extent]
) -> Mapping[Shard, Range]:
    """Return the ranges that a replay replaces: from start to stop, clamped to what is covered and the stream holds.

    Raises:
        InvalidOptionError: the stop is before the start, or the stream does not hold one of them.
    """
    starts = replay.start.resolve(source, extents) if replay.start else {s: e.start for s, e in extents.items()}
    stops = replay.stop.resolve(source, extents) if replay.stop else {}
    goal = {}
    for shard, start in sorted(starts.items()):
        known = state.shards.get(shard)
        covered = known.covered.position if known else None
        stop = stops.get(shard, covered or start)
        if stop < start and shard in stops:
            raise InvalidOptionError(
                f"the replay of {shard} would stop at {stop}, before its start at {start}",
                remedy="Give a later stop, or an earlier start.",
            )
        part = Range(start, stop).clamp(Range(extents[shard].start, covered or start))
        if part.start < part.end:
            goal[shard] = part
    return goal


def last_copies(
    replay: Replay, source: BatchSource, ledger: Ledger, *, extents: Mapping[Shard, Extent], goal: Mapping[Shard, Range]
) -> Mapping[Shard, Range]:
    """Return the ranges of rows in the replayed time whose messages the stream no longer holds.

    Only a start that is a time can lie before the first message of the stream; such sequences are refused.

    Args:
        replay: what to replay.
        source: the stream.
        ledger: the ledger of the group.
        extents: what the stream holds.
        goal: the ranges that the replay replaces.

    Returns:
        The range from the first to after the last of these rows, per shard.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    if replay.start is None or replay.start.moment is None:
        return {}
    streams = source.url.required_streams()
    gone = {}
    for shard, known in ledger.read().shards.items():
        if split_epoch(shard.stream)[0] not in streams or not known.covered:
            continue
        end = known.covered.ranges[-1].end
        first = extents[shard].start if shard in extents else end
        if shard not in goal or goal[shard].start <= first:
            gone[shard] = Range(0, min(first, end))
    if not any(part.start < part.end for part in gone.values()):
        return {}
    time = in_time(replay.start.moment, replay.stop.moment if replay.stop else None)
    return extents_of(scan(ledger.log, ROW_PLACE, where=f"{time} AND ({in_ranges(gone)})"))


class LeftOut(NamedTuple):
    """Rows of the time of a replay, in one shard, that lie outside of the range that it replaces.

    Args:
        rows: their number.
        within: the range from the first to after the last of them.
    """

    rows: int
    within: Range


def rows_left_out(
    replay: Replay,
    source: BatchSource,
    ledger: Ledger,
    *,
    extents: Mapping[Shard, Extent],
    replaced: Mapping[Shard, Range],
    version: int,
) -> Mapping[Shard, LeftOut]:
    """Find the rows of the time of a replay that it leaves out, because a range cannot select by time exactly.

    A time stands for the first message with that timestamp or a later one. So the range of a time leaves out messages
    that came late, and messages that came after one with a timestamp in the future.

    Args:
        replay: what to replay; without a time, it leaves out no row.
        source: the stream.
        ledger: the ledger of the group.
        extents: what the stream holds.
        replaced: the ranges that the replay replaces, and those that it cannot replace.
        version: the version of the table; a newer one may have rows that came after the plan.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    start = replay.start or Bound(edge=AutoStreamReset.EARLIEST)
    stop = replay.stop or Bound(edge=AutoStreamReset.LATEST)
    if start.moment is stop.moment is None:
        return {}
    starts = dict.fromkeys(extents, 0) if start.moment else start.resolve(source, extents)
    stops = {} if stop.moment else stop.resolve(source, extents)
    asked = {shard: Range(first, stops.get(shard, extents[shard].end)) for shard, first in starts.items()}
    where = f"{in_time(start.moment, stop.moment)} AND ({in_ranges(asked) or 'FALSE'})"
    where += f" AND NOT ({in_ranges(replaced)})" if replaced else ""
    found = sequences_of(scan(ledger.log, ROW_PLACE, where=where, version=version))
    return {s: LeftOut(len(own), Range(int(own.min()), int(own.max()) + 1)) for s, own in sorted(found.items())}


def check_replay(state: LedgerState, ingestion: Ingestion) -> None:
    """Refuse to replay or move a group that has no positions.

    Raises:
        StreamNotFoundError: the group has written nothing.
        UnsupportedError: the members of the group claim entries one by one.
    """
    if state.newest is None:
        raise StreamNotFoundError(
            f"group {ingestion.group!r} has written nothing into {ingestion.table}, so it cannot be replayed or moved",
            remedy="Ingest first. With start='latest' the first run only sets the position; then earlier messages can "
            "be replayed.",
        )
    if state.sharing in (CLAIMS, LEAVING_CLAIMS):
        raise UnsupportedError(
            f"group {ingestion.group!r} claims entries one by one, so it has no ranges that could be replaced",
            remedy="Change its mode with: stream-assets switch --to resumable. Run this again, and change it back.",
        )


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What a replay has to do, after all checks that need no Spark.

    Args:
        progress: everything that it replaces, and how much of it is done.
        left: the next range to replace, per shard.
        last_copies: the ranges of rows in its time whose messages are gone; these rows stay as they are.
        left_out: the rows in its time that lie outside of what it replaces.
        note: a sentence about these rows with a remedy, or why they cannot be counted; empty if there are none.
    """

    progress: ReplayProgress
    left: Mapping[Shard, Range]
    last_copies: Mapping[Shard, Range]
    left_out: Mapping[Shard, LeftOut] = field(default_factory=dict)
    note: str = ""


def plan_replay(
    replay: Replay,
    source: BatchSource,
    ingestion: Ingestion,
    ledger: Ledger,
    state: LedgerState,
    *,
    first_plan: ReplayPlan | None = None,
) -> ReplayPlan:
    """Resolve a replay against the ledger and the stream; a dry run and the replay itself both start with it.

    Args:
        replay: what to replay.
        source: the stream, by the names of its epochs.
        ingestion: group, table, and what to do about messages that are gone.
        ledger: the ledger of the group.
        state: the present state of the ledger.
        first_plan: an earlier plan of the same replay in this process, whose goal is kept.

    Raises:
        StreamNotFoundError, UnsupportedError, InvalidOptionError: it cannot be replayed; or its time selects no message
            although the table has rows of it.
        SourceRecreatedError: the stream is not the one in the ledger.
        DataLossError: the stream no longer holds the messages.
    """
    check_replay(state, ingestion)
    extents = source.extents()
    check_source(source, ingestion.group, state, extents)
    known = replay_progress(ledger, replay.id)
    progress = known or (first_plan.progress if first_plan else ReplayProgress(goal_of(replay, source, state, extents)))
    if first_plan is None:
        last = last_copies(replay, source, ledger, extents=extents, goal=progress.goal)
        if last and known is None:
            error = last_copies_error(
                f"{source.url} no longer holds all messages of the time to replay",
                last,
                remedy="Start later. Or set on_data_loss='record' to keep them as they are and replace the others.",
            )
            ingestion.refuse_or_record(error)
        replaced = _hulls(progress.goal, last)
        try:
            left_out = rows_left_out(replay, source, ledger, extents=extents, replaced=replaced, version=state.version)
            note = _note_left_out(left_out, progress.goal, extents, is_begun=known is not None)
        except TableUnreadableError as error:
            left_out, note = {}, f"the rows of this time that are not replayed cannot be counted: {error}"
    else:
        last, left_out, note = first_plan.last_copies, first_plan.left_out, first_plan.note
    left = next_ranges(progress, state)
    names = {shard.stream for shard in extents}
    if gone := {shard: part for shard, part in left.items() if shard.stream not in names}:
        raise last_copies_error(
            f"{source.url} was recreated since this replay began, so the messages that it has left are gone",
            gone,
            remedy="Start a new replay.",
        )
    if lost := not_held(source, ingestion, state, extents, left):
        what = f"{source.url} no longer holds messages that this replay has left, or that have to be merged again"
        raise last_copies_error(what, lost, remedy="Start later.")
    return ReplayPlan(progress, left, last, left_out, note)


def _note_left_out(
    left_out: Mapping[Shard, LeftOut], goal: Mapping[Shard, Range], extents: Mapping[Shard, Extent], *, is_begun: bool
) -> str:
    """Return the note on rows that a replay leaves out.

    A message that came late beside others of its time is normal, also in a shard that has only such rows. If nothing
    would be replayed at all, that must not look like success.

    Raises:
        InvalidOptionError: the replay has not begun, and would replace nothing although the table has rows of its time.
    """
    if not left_out:
        return ""
    held = {shard: Range(extent.start, extent.end) for shard, extent in extents.items()}
    within = {shard: part.within for shard, part in left_out.items()}
    hulls = {shard: part.clamp(held[shard]) for shard, part in sorted(_hulls(goal, within).items()) if shard in held}
    start, stop = (",".join(f"{shard}={part[at]}" for shard, part in hulls.items()) for at in (0, 1))
    remedy = (
        f"To replay them too, give sequences in place of the time: --from {start} --until {stop}, or in a run config "
        "start and stop with rewind."
    )
    places = {
        str(shard): f"{counted(rows, 'row')} from {part.start} to {part.end - 1}"
        for shard, (rows, part) in left_out.items()
    }
    if not is_begun and not goal:
        raise InvalidOptionError(
            f"no message of this time would be replayed, but the table has rows of it in {', '.join(places)}: they "
            "came late, or after a message with a time in the future",
            remedy=remedy,
            **places,
        )
    listed = "; ".join(f"{shard}: {place}" for shard, place in islice(places.items(), _MAX_PLACES))
    return (
        f"rows of this time that are not replayed: {sum(part.rows for part in left_out.values())} ({listed}). Their "
        "messages came late, or after one with a time in the future, and lie in the stream among those of other times. "
        f"{remedy}"
    )


def _hulls(*ranges: Mapping[Shard, Range]) -> Mapping[Shard, Range]:
    """Return, per shard, the range from the first start to the last end."""
    parts = {shard: [one[shard] for one in ranges if shard in one] for shard in chain.from_iterable(ranges)}
    return {s: Range(min(part.start for part in p), max(part.end for part in p)) for s, p in parts.items()}


def last_copies_error(what: str, gone: Mapping[Shard, Range], *, remedy: str) -> DataLossError:
    """Return the error about rows that would be replaced although their messages are gone.

    Args:
        what: the message.
        gone: the ranges of messages that are gone.
        remedy: what to do.
    """
    return DataLossError(
        what,
        remedy=f"The rows in the table are the last copy, so nothing was replaced. {remedy}",
        **{str(shard): f"{part.start} to {part.end}" for shard, part in sorted(gone.items())},
    )


class ReplayJob(SourceJob):
    """Replays a stream into a table, batch by batch.

    Args:
        spark: a session that can write Delta tables.
        source: the stream; the caller closes it.
        ingestion: group and table; its transform and decoder make the new rows.
        replay: what to replay.
        observer: called at each step, for progress bars and for tests that kill the process there.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
    """

    asks_others_to_yield = True

    def __init__(
        self,
        spark: SparkSession,
        source: BatchSource,
        ingestion: Ingestion,
        replay: Replay,
        *,
        observer: Observer = ignore_steps,
    ) -> None:
        own = replace(ingestion, member=REPLAYER, shard=None)
        super().__init__(spark, source, own, observer=observer)
        self._replay = replay
        self._first_plan: ReplayPlan | None = None

    def resolve(self, state: LedgerState | None = None) -> ReplayPlan:
        """Return what the replay replaces, including the runs that were killed, and what is left of it.

        The ledger has the progress. Before the first commit of the replay, the goal of the first plan in this process
        is used, so that the goal is resolved once.

        Args:
            state: the state of the ledger; the present one by default.

        Raises:
            StreamNotFoundError, UnsupportedError, InvalidOptionError: it cannot be replayed.
            DataLossError: the stream no longer holds all messages of the time to replay.
        """
        state = state or self.ledger.read()
        plan = plan_replay(self._replay, self._source, self.ingestion, self.ledger, state, first_plan=self._first_plan)
        self._first_plan = plan
        return plan

    def _left(self, state: LedgerState) -> Mapping[Shard, Range]:
        """Return the next range to replace per shard, after a batch was planned.

        Raises:
            SourceRecreatedError: another epoch of the stream was accepted since.
        """
        assert self._first_plan is not None
        check_epochs(state, self._identities, url=self._source.url)
        return next_ranges(replay_progress(self.ledger, self._replay.id) or self._first_plan.progress, state)

    def plan(self) -> Batch | None:
        """Return the next batch; ``None`` if everything is replaced.

        Raises:
            StreamNotFoundError, UnsupportedError, InvalidOptionError: it cannot be replayed.
            DataLossError: the stream no longer holds the messages.
            SchemaMismatchError, TransformError: the rows cannot go into the table.
        """
        state = self.ledger.read()
        check_replay(state, self.ingestion)
        check_keys(state, self.ingestion)
        self.target.columns.check(state)
        checked = self.clean_up_dead_letters(state)
        resolved = self.resolve(state)
        if not resolved.left:
            self.clean_up_dead_letters(state, again=True)
            return None
        plan = self._plan_again(resolved.left)
        if plan is None:
            return None
        fields = PlannedFields(
            ranges=plan.ranges,
            mode=self._mode(),
            replay=self._replay.id,
            goal=resolved.progress.goal,
            begins=not resolved.progress.done,
        )
        return Batch("replay", checked, plan, fields, identities=self._identities)

    def _mode(self) -> str:
        """Return the write mode of the batches.

        Raises:
            InvalidOptionError: they would append to a keyed table.
        """
        if self.ingestion.keys is not None and self._replay.on_replay is OnReplay.APPEND:
            raise InvalidOptionError(
                f"on_replay='append' would give {self.ingestion.table} two rows with one key",
                remedy="A replay of a keyed table merges: leave on_replay out.",
            )
        return "append" if self._replay.on_replay is OnReplay.APPEND else self.ingestion.write_mode(again=True)

    def finish(self, written: WrittenBatch) -> Mapping[Shard, int]:
        """Return the messages that are left to replace; nothing is committed to the broker."""
        state = self.ledger.read()
        return self._source.count(self._left(state))

    def is_still_next(self, batch: Batch, state: LedgerState) -> bool:
        """Return whether the whole batch is still left to replace, with the same corrections."""
        gaps, ranges = self._left(state), batch.plan.ranges
        is_left = all(shard in gaps and part == part.clamp(gaps[shard]) for shard, part in ranges.items())
        return is_left and self._corrected(batch.plan) == batch.plan


@dataclass(frozen=True, slots=True)
class PositionMove:
    """The effect of a rewind on one shard.

    Args:
        shard: the shard.
        position: the present position.
        covered: the end of the last covered range; after a RESTORE there may be a gap before it.
        to: the new position.
    """

    shard: Shard
    position: int
    covered: int
    to: int

    @property
    def replaced(self) -> Range:
        """The range whose rows are replaced."""
        return Range(min(self.to, self.covered), self.covered)

    @property
    def skipped(self) -> Range:
        """The range that is never read."""
        return Range(self.covered, max(self.to, self.covered))


def read_or_derive(source: BatchSource, ingestion: Ingestion) -> tuple[LedgerState, bool]:
    """Return the state of the ledger and ``False``; if its log was cleaned, a state from the rows and ``True``."""
    ledger = ingestion.ledger()
    source = ingestion.in_epochs(source, ledger)
    try:
        return ledger.read(), False
    except LedgerTruncatedError:
        return surviving_state(ingestion, source), True


def plan_moves(source: BatchSource, ingestion: Ingestion, to: Bound, *, state: LedgerState) -> list[PositionMove]:
    """Return what :func:`rewind` would do in the shards whose position changes.

    Raises:
        StreamNotFoundError: the group has written nothing.
        UnsupportedError: the members of the group claim entries one by one.
        InvalidOptionError: the stream does not hold the new position; or it is after rows that still have to be
            replaced; or another group writes the stream into the table.
        DataLossError: a move forwards would hide messages that were lost unread.
    """
    check_replay(state, ingestion)
    check_sharing(state, ingestion)
    source = ingestion.in_epochs(source)
    extents = source.extents()
    check_source(source, ingestion.group, state, extents)
    moves = []
    for shard, sequence in sorted(to.resolve(source, extents).items()):
        move = _move(shard, sequence, state.shards.get(shard, ShardState()), extents[shard])
        # To the first message means backwards: a shard whose next messages are gone stays, and the loss is reported.
        if move.to != move.position and not (to.edge is AutoStreamReset.EARLIEST and move.to > move.covered):
            moves.append(move)
    check_only_group(ingestion, state, {move.shard.stream for move in moves}, url=source.url)
    back = {move.shard: move.replaced for move in moves if move.to < move.covered}
    if redoes_rest(ingestion) and (gone := not_held(source, ingestion, state, extents, back)):
        what = f"{source.url} may no longer hold all messages that have to be merged again"
        raise last_copies_error(what, gone, remedy="Move to a later position.")
    ahead = {move.shard: Range(move.covered, extents[move.shard].end) for move in moves if move.to > move.covered}
    if ahead:
        # A file that is read from the position on begins there, so it does not hold what a move backwards names.
        source.extents(resume=state.resume)
    if lost := source.lost(ahead):
        raise DataLossError(
            f"messages of {source.url} are gone that group {ingestion.group!r} has not read, and a move forwards would "
            "hide that",
            remedy="Ingest first, with on_data_loss='record' if they cannot be brought back. Then move the group.",
            **{str(shard): f"{part.start} to {part.end}" for shard, part in sorted(lost.items())},
        )
    return moves


def _move(shard: Shard, to: int, known: ShardState, extent: Extent) -> PositionMove:
    # A shard that was never read begins at its first message.
    end = known.covered.ranges[-1].end if known.covered else extent.start
    position = end if known.position is None else known.position
    has_hole = len(known.covered.ranges) > 1
    # A move to the end keeps the rows that still have to be replaced, but would skip a gap.
    if position < to and (to < end or has_hole):
        raise InvalidOptionError(
            f"{shard} cannot be moved forwards to {to}: the rows from {position} on still have to be written again",
            remedy="Ingest first. Or, to undo a rewind, RESTORE the table to the version before it.",
        )
    return PositionMove(shard, position, end, to)


def rewind(
    spark: SparkSession,
    source: BatchSource,
    ingestion: Ingestion,
    to: Bound,
    *,
    replay_id: str = "",
    on_wait: Callable[[str], object] = _log.warning,
) -> list[PositionMove]:
    """Move the group's position; the next run continues there.

    Errors that may be temporary are retried for ``ingestion.retry_seconds``. If the position of the group is unknown
    because its log was cleaned, the rewind sets it; see :mod:`spark_jobs.batches.ledger_recovery`.

    Args:
        spark: a session that can write Delta tables.
        source: the stream.
        ingestion: group and table.
        to: the new position.
        replay_id: the id of the rewind. If a rewind with this id is in the ledger, nothing is moved.
        on_wait: called with the reason of each wait.

    Returns:
        The shards that were moved.

    Raises:
        StreamNotFoundError, UnsupportedError, InvalidOptionError: see :func:`plan_moves`.
        WriteError: Spark failed; run it again.
    """
    rewind_id = replay_id or uuid.uuid4().hex
    moved: list[PositionMove] = []

    def move() -> None:
        for one in _move_shards(spark, source, ingestion, to, rewind_id):
            moved.append(one)
        if moved:
            _commit_to_broker(ingestion.in_epochs(source), ingestion)

    result_of(Retries(ingestion.retry_seconds).call(move), on_wait)
    return moved


def _move_shards(
    spark: SparkSession, source: BatchSource, ingestion: Ingestion, to: Bound, rewind_id: str
) -> Iterator[PositionMove]:
    """Yield each move when it is in the ledger, without the shards that were moved under this id before."""
    source = ingestion.in_epochs(source)
    ledger = ingestion.ledger()
    state, is_derived = read_or_derive(source, ingestion)
    if is_derived:
        # Check the move first, so that one that is refused commits nothing.
        plan_moves(source, ingestion, to, state=state)
        keep(spark, source, ingestion, state)
    known = replay_progress(ledger, rewind_id, kind="batch")
    done = known.done.keys() if known else ()
    moves = [m for m in plan_moves(source, ingestion, to, state=ledger.read()) if m.shard not in done]
    for own, shards in ingestion.by_sequence(move.shard for move in moves):

        def fields(state: LedgerState, shards: Set[Shard] = shards) -> EntryFields | None:
            left = [m for m in plan_moves(source, ingestion, to, state=state) if m.shard in shards]
            skipped = {move.shard: move.to for move in left if move.to > move.covered}
            if not left:
                return None
            return {
                **_moved(left),
                "last_messages": last_messages_before(source, skipped, state.last_messages),
                "hint": source.hint(skipped, state.hint),
                "replay": rewind_id,
                "begins": not done,
            }

        commit_empty(spark, own, "batch", fields)
        yield from (move for move in moves if move.shard in shards)


def _moved(moves: list[PositionMove]) -> EntryFields:
    back = [move for move in moves if move.to < move.covered]
    ahead = [move for move in moves if move.to > move.covered]
    return {
        "mode": "replace",
        "ranges": {m.shard: Range(m.to, m.to) for m in back} | {m.shard: m.skipped for m in ahead},
        "until": {m.shard: m.covered for m in back},
        "skipped": {m.shard: m.skipped for m in ahead},
    }


def _commit_to_broker(source: BatchSource, ingestion: Ingestion) -> None:
    streams = source.identities()
    for own, _ in ingestion.by_sequence(ingestion.ledger().read().positions):
        try:
            commit_positions(source, own, own.ledger().read(), streams)
        except GroupActiveError as error:
            _log.warning("the position in the ledger was moved, but not that of the broker: %s", error)
            return
