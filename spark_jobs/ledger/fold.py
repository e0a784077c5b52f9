"""The fold: what the ledger knows after each of its commits.

It goes over the commits in log order:

    append         redo |= R ∩ covered, and if late R ∩ [−∞, claimed) ;  covered |= R
    replace,replay late ? redo |= R ∩ covered : redo -= R ;  covered |= R ;  redo |= [R.end, until) ∩ covered
    RESTORE to v   covered, redo, last := those of the fold at v ; origins and what was claimed stay, but an origin goes
                   back to before what was adopted since v
    dismiss        late ? redo |= R ∩ covered : redo stays ;  covered |= R
    init, fence    origins (of an adopt: behind the rows) and what is known there, how the group shares ; the
                   transaction number only otherwise
    accept         origins of the new epoch ; the shards of the epoch before it are ended, redo := {} there, for good

What is known at the position of a shard (:mod:`stream_consumers.batches`) is said by the entry that moved it there. The
others repeat it as it was at their base, which may be outdated. A RESTORE takes it back like the position. What is
known at an origin stays with the origin, so that a RESTORE to before the group began with the shard does not hide what
was lost since (``tests/model/counts.py``).

Appends say the last message of each shard that they read; ``last`` is the one with the highest sequence. R is the range
of the commit, or the places of a redrive or a dismissal; it is late if a RESTORE lies between the version it was
planned from and itself. ``claimed`` is the end of the entries that members have claimed: a position lies before it in
claim mode, and after a RESTORE to before the group left that mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spark_jobs.ledger.entries import (
    MOST_LOSSES,
    MOST_REPLAYS,
    LedgerEntry,
    ReplayProgress,
    ShardState,
    State,
    Totals,
    replay_key,
)
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from stream_consumers.batches import FactsByShard, PositionFacts, position_facts_in
from stream_consumers.messages import Shard

NONE = Intervals()


def fold(state: State, entry: LedgerEntry, *, late: bool) -> State:
    """The state after one commit of the group."""
    after = dict(state)
    counted = {**_at_origins(entry), **entry.counted}
    for shard, origin in entry.origin.items():
        known = after.get(shard, ShardState())
        adopted = entry.adopted.get(shard)
        if known.origin is None or adopted is not None:
            # The RESTORE may have removed rows that a late adopt counted on.
            start = origin if adopted is None or not late else adopted
            covered = known.covered | Intervals.of((MIN_SEQUENCE, start))
            after[shard] = replace(known, covered=covered, origin=start, adopted=adopted, counted=counted.get(shard))
    for shard, end in entry.ended.items():
        # Its messages cannot be read again, so rows that were to be replaced are the last copy.
        after[shard] = replace(after.get(shard, ShardState()), ended=end, redo=Intervals())
    for shard, claim in entry.claims.items():
        known = after.get(shard, ShardState())
        if shard not in entry.lost:
            after[shard] = replace(known, claimed=max(claim.end, known.claimed or 0))
    for shard, message in entry.last_messages.items():
        known = after.get(shard, ShardState())
        after[shard] = replace(known, last=message if known.last is None else max(known.last, message))
    if entry.adds_copies:
        return after
    for shard, written in entry.affected.items():
        known = after.get(shard, ShardState())
        redo = known.redo
        if late or not entry.does.reduces_redo:
            # What a batch left out of claimed entries the RESTORE may have removed, and brought back what it has.
            claimed = Intervals.of((MIN_SEQUENCE, known.claimed or MIN_SEQUENCE)) if late else Intervals()
            redo |= written & (known.covered | claimed)
            if late and known.lacks_adopted:
                # The rows that the RESTORE brought back from before the adopt may be of the same messages.
                redo |= written
        elif entry.kind != "dismiss":
            redo -= written
        covered = known.covered | written
        if shard in entry.until:
            redo |= Intervals.of((entry.ranges[shard].end, entry.until[shard])) & covered
        # A message that is not the last one before the position would be taken for one that others came after.
        is_read = shard in entry.last_messages and covered.position == entry.ranges[shard].end
        is_last = is_read or (known.last is not None and known.last.sequence + 1 == covered.position)
        last = known.last if is_last or covered.position == known.covered.position else None
        after[shard] = replace(known, covered=covered, redo=redo if known.ended is None else Intervals(), last=last)
    return after


def restore(state: State, past: State) -> State:
    """The state after a RESTORE to a version with the state ``past``: origins and ends stay as they are now.

    Without its origin a shard would begin at whatever lands next, and what lies before that would be lost. Without its
    end, what the RESTORE removed of a stream that is gone would be missing in silence. An origin behind rows that were
    adopted goes back to before them: the RESTORE removed some.
    """
    after: dict[Shard, ShardState] = {}
    for shard in state.keys() | past.keys():
        now, then = state.get(shard, ShardState()), past.get(shard, ShardState())
        begun = then if then.adopted is not None else now
        adopted, origin, counted = begun.adopted, begun.origin, begun.counted
        if then.adopted is None and adopted is not None:
            origin = adopted
        start = Intervals() if origin is None else Intervals.of((MIN_SEQUENCE, origin))
        redo = then.redo if now.ended is None else Intervals()
        covered = then.covered | start
        after[shard] = replace(
            now, covered=covered, redo=redo, last=then.last, origin=origin, adopted=adopted, counted=counted
        )
    return after


def _at_origins(entry: LedgerEntry) -> Mapping[Shard, PositionFacts]:
    """What the hint of an entry says at the origins; of adopted rows it is asked before them."""
    if not entry.origin:
        return {}
    places = position_facts_in(entry.hint, of=entry.origin.keys() - entry.adopted.keys())
    return {shard: known for shard, (position, known) in places.items() if position == entry.origin[shard]}


def moved_places(entry: LedgerEntry) -> FactsByShard:
    """What the hint of an entry says of the shards whose positions it moves."""
    return position_facts_in(entry.hint, of=entry.ranges.keys() | entry.origin.keys())


def places_at(state: State, *places: FactsByShard) -> FactsByShard:
    """Of what is known of each shard, the first that is of its position, at last what is known where it begins.

    Of shards that have ended, nothing.
    """
    first = {shard: place for shard, one in state.items() if (place := one.first_place) is not None}
    return {
        shard: place
        for each in (first, *reversed(places))
        for shard, place in each.items()
        if shard in state and state[shard].ended is None and state[shard].covered.position == place[0]
    }


def tally(totals: Totals, entry: LedgerEntry) -> Totals:
    """The totals after one commit of the group.

    Example:
        >>> entry = LedgerEntry("batch", "g", "g/main", 1, "main", "b", 0, messages=9, dead=1)
        >>> tally(tally(Totals(), entry), entry).dead
        2
    """
    lost = {**totals.lost}
    for shard, parts in entry.lost.items():
        lost[shard] = _joined(lost.get(shard, NONE) | parts)
    replays = dict(totals.replays)
    is_forgetful = totals.is_forgetful
    if entry.replay:
        key = replay_key(entry.kind, entry.replay)
        known = replays.pop(key, ReplayProgress(entry.goal, is_whole=entry.begins or not is_forgetful))
        done = {**known.done}
        for shard, part in entry.ranges.items():
            done[shard] = done.get(shard, NONE) | Intervals.of(part)
        is_finished = bool(known.goal) and not any(Intervals.of(p) - done.get(s, NONE) for s, p in known.goal.items())
        # The newest one is the last; of one that is finished it is known that nothing is left.
        replays[key] = ReplayProgress() if is_finished else replace(known, done=done)
        if len(replays) > MOST_REPLAYS:
            is_forgetful = True
            finished = (key for key, one in replays.items() if one == ReplayProgress())
            del replays[next(finished, next(iter(replays)))]
    return Totals(
        # Those that are dismissed were counted when they were written.
        dead=totals.dead + (0 if entry.kind == "dismiss" else entry.dead),
        lost=lost,
        replaced=totals.replaced + entry.does.uncounts_dead_letters,
        replays=replays,
        is_forgetful=is_forgetful,
    )


def _joined(lost: Intervals) -> Intervals:
    """No more intervals than are remembered: the first ones become one, with what lies between."""
    older, newer = lost.ranges[:-MOST_LOSSES], lost.ranges[-MOST_LOSSES:]
    return Intervals.of((older[0].start, newer[0].end), *newer[1:]) if older else lost
