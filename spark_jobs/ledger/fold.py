"""The fold: computes the state of the ledger after each of its commits.

It applies the commits in log order:

    append         redo |= R ∩ covered ;  covered |= R
    replace,replay redo -= R ;  covered |= R ;  redo |= [R.end, until) ∩ covered
    merge          as replace, with redo |= [end of the first interval of R, ∞) ∩ covered
    upsert         as replace
    RESTORE to v   covered, redo, last := those of the fold at v ; origins and ``claimed`` stay ; if rows were adopted
                   after v, the origin moves back to the first of them
    dismiss        covered |= R  (it writes and removes no rows)
    late commit    redo |= R ∩ (covered ∪ [−∞, claimed)), with ``covered`` before the commit, in place of the first
                   change of redo in its line above ; all of R after a RESTORE undid an adopt, or if the commit has
                   messages that were read again, because the RESTORE may have removed their corrections
    overtaken      replace, merge, upsert: also redo |= R ∩ the places of redrives that landed since its plan, because
                   it lacks their corrections (``tests/model/redrive.py``)
    init, adopt    set origins (adopt: after the last row) and what the source reported at them
    rebuild        covered := [−∞, position of the staging table) ;  redo := {}, if it is late [its origin, ∞) ∩ covered
                   ;  its origin, last message and keys
    purge          floor := max(floor, its own) ;  rebuild: none
    init, fence    may change how the group shares ; other entries of these kinds only use up a transaction number
    accept         origins of the new epoch ; the shards of the epoch before it are ended, redo := {} there, for good

The facts at the position of a shard (:class:`stream_consumers.batches.PositionFacts`) come from the entry that moved
the shard to it. Other entries only copy the facts of their base, which may be out of date. A RESTORE restores the facts
together with the position. The facts at an origin stay with the origin, so that a RESTORE to before the group began
with the shard does not hide later losses (``tests/model/counts.py``).

An append, and each entry that sets a position, records the last message before it; ``last`` is the one with the highest
sequence. R is the
range of the commit, or the places of a redrive or a dismissal. A commit is late if a RESTORE lies between the version
that it was planned from and the commit itself. ``claimed`` is the end of the entries that members have claimed. A
position can be below it in two cases: in claim mode, and when a RESTORE went back to before the group left claim mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spark_jobs.ledger.entries import (
    MAX_LOSSES,
    MAX_REPLAYS,
    Floor,
    KeyOrder,
    LedgerEntry,
    ReplayProgress,
    ShardState,
    State,
    Totals,
    replay_key,
)
from spark_jobs.ledger.intervals import MAX_SEQUENCE, MIN_SEQUENCE, Intervals
from stream_consumers.batches import FactsByShard, LastMessage, PositionFacts, position_facts_in
from stream_consumers.messages import Shard

NONE = Intervals()


def fold(state: State, entry: LedgerEntry, *, late: bool, redriven: Mapping[Shard, Intervals] | None = None) -> State:
    """Return the state after one commit of the group.

    Args:
        state: the state before it.
        entry: its ledger entry.
        late: whether there was a RESTORE between its plan and the commit.
        redriven: the places of redrives that landed between the two; none by default.
    """
    if entry.write_mode.rebuilds:
        return {
            **state,
            **{shard: _rebuilt(state.get(shard, ShardState()), entry, shard, late) for shard in entry.ranges},
        }
    after = dict(state)
    facts = {**_facts_at_origins(entry), **entry.facts_at_start}
    for shard, origin in entry.origin.items():
        known = after.get(shard, ShardState())
        adopted = entry.adopted.get(shard)
        if known.origin is None or adopted is not None:
            # A late adopt may have been planned with rows that the RESTORE then removed.
            start = origin if adopted is None or not late else adopted
            covered = known.covered | Intervals.of((MIN_SEQUENCE, start))
            known = replace(known, covered=covered, origin=start, adopted=adopted)
            after[shard] = replace(known, facts_at_start=facts.get(shard))
    for shard, end in entry.ended.items():
        # No message is read under its name again, so rows that were due to be replaced stay.
        after[shard] = replace(after.get(shard, ShardState()), ended=end, redo=Intervals())
    for shard, claim in entry.claims.items():
        known = after.get(shard, ShardState())
        if shard not in entry.lost:
            after[shard] = replace(known, claimed=max(claim.end, known.claimed or 0))
    for shard in entry.last_messages.keys() - entry.affected.keys():
        known, message = after.get(shard, ShardState()), entry.last_messages[shard]
        after[shard] = replace(known, last=message if known.last is None else max(known.last, message))
    if entry.adds_copies:
        return after
    for shard, written in entry.affected.items():
        known = after.get(shard, ShardState())
        redo = known.redo
        if late or entry.write_mode.repeats_rows:
            # The RESTORE may have removed rows of claimed entries that this batch left out as already written, and
            # brought back rows of messages that this batch wrote.
            claimed = Intervals.of((MIN_SEQUENCE, known.claimed or MIN_SEQUENCE)) if late else Intervals()
            redo |= written & (known.covered | claimed)
            if late and (known.is_adopt_undone or entry.write_mode.reads_again):
                # The RESTORE may have brought back rows of the same messages, from before the adopt, or removed
                # corrections of messages that this batch read again.
                redo |= written
        elif entry.write_mode.reduces_redo:
            redo = redo - written | written & (redriven or {}).get(shard, NONE)
        covered = known.covered | written
        redo |= _rest(entry, shard) & covered
        last = _last_message(known, entry, shard, covered.position)
        after[shard] = replace(known, covered=covered, redo=redo if known.ended is None else Intervals(), last=last)
    return after


def _last_message(before: ShardState, entry: LedgerEntry, shard: Shard, position: int | None) -> LastMessage | None:
    """Return the last message that was read of a shard after an entry that covers some of it.

    It is ``None`` if a message may be between it and the position, because a check would expect this message. A batch
    that landed after a RESTORE may have read beyond a gap. The last sequences of a range may have no message, such as
    transaction markers; the entry then has an earlier message, which is the last one before the end of its range.
    """
    last, message = before.last, entry.last_messages.get(shard)
    is_before_position = message is not None and (position is None or position <= entry.ranges[shard].end)
    if message is not None and (last is None or message.sequence > last.sequence):
        return message if is_before_position else None
    if last is None or position is None or is_before_position:
        return last
    if position in (before.covered.position, last.sequence + 1):
        return last
    is_in_reach = (part.start <= last.sequence < part.end and position <= part.end for part in before.covered.ranges)
    return last if any(is_in_reach) else None


def _rebuilt(known: ShardState, entry: LedgerEntry, shard: Shard, late: bool) -> ShardState:
    """Return the state of a shard after a rebuild, which removes all rows, but if it is late, no dead letters."""
    start, end = entry.ranges[shard]
    return replace(
        known,
        covered=Intervals.of((MIN_SEQUENCE, end)),
        redo=Intervals.of((start, end)) if late else NONE,
        origin=start,
        adopted=None,
        last=entry.last_messages.get(shard),
        facts_at_start=entry.facts_at_start.get(shard),
    )


def keys_after(keys: KeyOrder | None, entry: LedgerEntry, *, is_first: bool) -> KeyOrder | None:
    """Return the key of the table after one commit of the group; ``None`` for a table that is appended to."""
    return entry.keys if is_first or entry.write_mode.rebuilds else keys


def is_of_other_keys(keys: KeyOrder | None, entry: LedgerEntry) -> bool:
    """Return whether a batch was planned for another key than the table has where it landed.

    It was in flight while a rebuild, or a RESTORE to before one, changed the key. Its rows are wrong there.
    """
    return entry.kind in ("batch", "replay") and not entry.write_mode.rebuilds and entry.keys != keys


def floor_after(floor: Floor | None, entry: LedgerEntry) -> Floor | None:
    """Return the floor of a keyed table after one commit of the group. A rebuild brings back what was purged."""
    return None if entry.write_mode.rebuilds else higher_floor(floor, entry.purged_below)


def higher_floor(one: Floor | None, other: Floor | None) -> Floor | None:
    """Return the higher one of two floors of a table; ``None`` is the lowest."""
    found: list[Any] = [each for each in (one, other) if each is not None]
    return max(found, default=None)


def is_below_floor(floor: Floor | None, entry: LedgerEntry) -> bool:
    """Return whether a batch was planned with a lower floor than the table has where it landed.

    It may have inserted a row of a key whose deletion was purged. Only a RESTORE that takes back another one lets such
    a batch land.
    """
    return entry.write_mode.merges and higher_floor(floor, entry.floor) != entry.floor


def _rest(entry: LedgerEntry, shard: Shard) -> Intervals:
    """Return what has to be read again behind the places of an entry, where it is covered."""
    if entry.write_mode.redoes_rest and (written := entry.affected[shard].ranges):
        return Intervals.of((written[0].end, MAX_SEQUENCE))
    return Intervals.of((entry.ranges[shard].end, entry.until[shard])) if shard in entry.until else NONE


def restore(state: State, past: State) -> State:
    """Return the state after a RESTORE to a version with the state ``past``. Origins and ends stay as they are now.

    Without its origin, a shard would begin at the next message that is written, and all messages before it would be
    lost. Without its end, no check would find the messages that the RESTORE removed of a stream that is gone. If the
    RESTORE undid an adopt, the origin moves back to before the adopted rows, because some of them are gone.
    """
    after: dict[Shard, ShardState] = {}
    for shard in state.keys() | past.keys():
        now, then = state.get(shard, ShardState()), past.get(shard, ShardState())
        start_of = then if then.adopted is not None else now
        adopted, origin, facts = start_of.adopted, start_of.origin, start_of.facts_at_start
        if then.adopted is None and adopted is not None:
            origin = adopted
        start = Intervals() if origin is None else Intervals.of((MIN_SEQUENCE, origin))
        redo = then.redo if now.ended is None else Intervals()
        covered = then.covered | start
        after[shard] = replace(
            now, covered=covered, redo=redo, last=then.last, origin=origin, adopted=adopted, facts_at_start=facts
        )
    return after


def _facts_at_origins(entry: LedgerEntry) -> Mapping[Shard, PositionFacts]:
    """Return the facts in an entry's hint at its origins, without shards with adopted rows, which begin earlier."""
    if not entry.origin:
        return {}
    facts = position_facts_in(entry.hint, of=entry.origin.keys() - entry.adopted.keys())
    return {shard: known for shard, (position, known) in facts.items() if position == entry.origin[shard]}


def moved_facts(entry: LedgerEntry) -> FactsByShard:
    """Return the facts in the hint of an entry, for the shards whose positions the entry moves."""
    return position_facts_in(entry.hint, of=entry.ranges.keys() | entry.origin.keys())


def facts_at(state: State, *candidates: FactsByShard) -> FactsByShard:
    """Return, for each shard that goes on, the first of ``candidates`` whose sequence is the position of the shard.

    If there is none, the facts at the start of the shard are used, if that is its position.
    """
    first = {shard: known for shard, one in state.items() if (known := one.start_facts) is not None}
    return {
        shard: known
        for each in (first, *reversed(candidates))
        for shard, known in each.items()
        if shard in state and state[shard].ended is None and state[shard].covered.position == known[0]
    }


def totals_after(totals: Totals, entry: LedgerEntry) -> Totals:
    """Return the totals after one commit of the group.

    Example:
        >>> entry = LedgerEntry("batch", "g", "g/main", 1, "main", "b", 0, messages=9, dead=1)
        >>> totals_after(totals_after(Totals(), entry), entry).dead
        2
    """
    lost = {**totals.lost}
    for shard, parts in entry.lost.items():
        lost[shard] = _joined(lost.get(shard, NONE) | parts)
    replays = dict(totals.replays)
    has_dropped_replays = totals.has_dropped_replays
    if entry.replay:
        key = replay_key(entry.kind, entry.replay)
        known = replays.pop(key, ReplayProgress(entry.goal, is_complete=entry.begins or not has_dropped_replays))
        done = {**known.done}
        for shard, part in entry.ranges.items():
            done[shard] = done.get(shard, NONE) | Intervals.of(part)
        is_finished = bool(known.goal) and not any(Intervals.of(p) - done.get(s, NONE) for s, p in known.goal.items())
        # The newest is last in the mapping. A finished replay is kept as an empty progress: nothing is left to do.
        replays[key] = ReplayProgress() if is_finished else replace(known, done=done)
        if len(replays) > MAX_REPLAYS:
            has_dropped_replays = True
            finished = (key for key, one in replays.items() if one == ReplayProgress())
            del replays[next(finished, next(iter(replays)))]
    return Totals(
        # Dismissed dead letters were counted when they were first written.
        dead=totals.dead + (0 if entry.kind == "dismiss" else entry.dead),
        lost=lost,
        replaced=totals.replaced + entry.write_mode.replaces_dead_letters,
        replays=replays,
        has_dropped_replays=has_dropped_replays,
    )


def _joined(lost: Intervals) -> Intervals:
    """Merge the first intervals into one, with the gaps between them, so that at most ``MAX_LOSSES`` are left."""
    older, newer = lost.ranges[:-MAX_LOSSES], lost.ranges[-MAX_LOSSES:]
    return Intervals.of((older[0].start, newer[0].end), *newer[1:]) if older else lost
