"""Accepts a stream that was recreated, that lost messages, or that another stream of its name replaced.

One empty commit in the group's transaction sequence begins the stream's next epoch. The commit has the fingerprint of
the new stream, the start of its shards, and the end of the shards of the epoch before it. Later rows and positions
belong to the new epoch (:mod:`stream_consumers.epochs`), and earlier ones stay as they are. A batch of the old stream
that is in flight loses its number to the commit, or lands in the old epoch, where its messages belong. Nothing else
has to be done, so that an accept that was killed has either happened or not. tests/model/epochs.py explores all
interleavings.

A shard that lost its newest messages continues where stream and table differ (:func:`divergences`). The ledger has the
checksums of the last messages that earlier batches read, which show up to where the stream is still the same. From
there on the timestamps of rows and dead letters are compared with those of the stream. If timestamps show no
difference, or are a part of the sequence (Redis), the epoch begins at the end of what is known to be the same. Then
messages that are the same on both sides are read again, and none is lost. A shard that has none of the messages that
were read was recreated, and begins with its first message. The other shards continue at their positions, with the facts
that are known there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.source_checks import (
    certain_facts,
    changed_shards,
    check_only_group,
    last_messages_before,
    recreations,
)
from spark_jobs.batches.target_table import commit_empty
from spark_jobs.ledger.entries import CLAIMS, LEAVING_CLAIMS, SWITCHING, ClaimedRange, EntryFields
from spark_jobs.ledger.intervals import MIN_SEQUENCE
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.ledger.table_rows import MESSAGE_TIME, NO_TIMES, ROW_TIME, compared, in_ranges, scan, timestamps_of
from stream_consumers.batches import (
    BatchSource,
    Extent,
    FactsByShard,
    LastMessage,
    PositionFacts,
    Range,
    hint_with_facts,
    position_facts_in,
)
from stream_consumers.epochs import EpochNames, epoch_name, newest_epochs, split_epoch, with_epoch_names
from stream_consumers.errors import (
    InvalidOptionError,
    LedgerTruncatedError,
    LedgerUnreadableError,
    RestoreTargetError,
    SourceRecreatedError,
    SourceTruncatedError,
    StreamNotFoundError,
    UnsupportedError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import Limits
from stream_consumers.redis.claims import RedisClaims


@dataclass(frozen=True, slots=True)
class AcceptedEpoch:
    """An epoch that begins.

    Args:
        name: the name of the epoch, which its rows have in ``_stream``.
        before: the name of the epoch before it.
        identity: the fingerprint of the new stream.
        origin: where its shards begin.
        ended: where the shards of the epoch before it end; later messages of the old stream were not read.
        last_messages: the last messages before the origin, if the stream goes on.
        facts: the facts of the source at the origins, as far as they are known.
        claims: in claim mode, the end of the entries that were written of each shard that goes on.
    """

    name: str
    before: str
    identity: str
    origin: Mapping[Shard, int]
    ended: Mapping[Shard, int]
    last_messages: Mapping[Shard, LastMessage] = field(default_factory=dict)
    facts: FactsByShard = field(default_factory=dict)
    claims: Mapping[Shard, ClaimedRange] = field(default_factory=dict)


def plan_accept(
    source: BatchSource,
    ingestion: Ingestion,
    state: LedgerState,
    *,
    epochs: Collection[str] = (),
    claims: RedisClaims | None = None,
    is_cut: bool = False,
) -> list[AcceptedEpoch]:
    """Return the epochs that :func:`accept` would begin.

    Raises:
        StreamNotFoundError: the group has written nothing, or the stream was deleted and not recreated.
        InvalidOptionError: a stream was not recreated, or another epoch than its next one is asked for; or rows of
            messages that are not lost have to be written again.
    """
    _check_begun(state, ingestion)
    if state.keys is not None:
        raise UnsupportedError(
            f"{ingestion.table} is keyed by {state.keys}, and the order of its changes ends with its stream",
            remedy="Write the new stream into a new table with a new group.",
        )
    if state.sharing in (SWITCHING, LEAVING_CLAIMS):
        raise InvalidOptionError(
            f"group {ingestion.group!r} is changing its mode", remedy="Finish that first, with: stream-assets switch."
        )
    names = newest_epochs(state.identities, source.url.required_streams())
    current = with_epoch_names(source, names)
    extents = current.extents(resume=state.resume)
    if state.sharing == CLAIMS:
        if claims is None:
            raise InvalidOptionError(
                f"group {ingestion.group!r} claims entries one by one", remedy="Pass claims=, too."
            )
        found = _recreated_claims(claims, state, are_named=bool(epochs))
    else:
        found = recreations(current, ingestion.group, state, extents, counts_all=True)
    if is_cut:
        for name, error in found.items():
            if not _is_only_cut(current, ingestion, state, name, error):
                raise error
        if not found:
            return []
    wanted = _wanted(epochs, names, frozenset(found))
    check_only_group(ingestion, state, wanted, url=source.url)
    return [
        _next_claimed_epoch(current, claims, state, extents, name)
        if claims is not None and state.sharing == CLAIMS
        else _next_epoch(source, state, name)
        if _is_other_stream(current, state, name)
        else _continued(current, ingestion, state, extents, name)
        for name in sorted(wanted)
    ]


def _check_begun(state: LedgerState, ingestion: Ingestion) -> None:
    if state.newest is None:
        raise StreamNotFoundError(
            f"group {ingestion.group!r} has written nothing into {ingestion.table}, so it has no epoch to end",
            remedy="Ingest the stream without an accept.",
        )


def _changed_claims(claims: RedisClaims, state: LedgerState) -> Mapping[Shard, SourceRecreatedError]:
    """Return the shards whose group or stream is gone, or is another one."""
    found: dict[Shard, SourceRecreatedError] = {}
    for shard, known in state.shards.items():
        if shard.stream not in claims.identities():
            continue
        try:
            claims.check({shard: known.written_end})
        except SourceRecreatedError as error:
            found[shard] = error
    return found


def _recreated_claims(
    claims: RedisClaims, state: LedgerState, *, are_named: bool
) -> Mapping[str, SourceRecreatedError]:
    """Return the epochs whose group or stream is gone. Unless named, a stream that still has its last entry is not."""
    found: dict[str, SourceRecreatedError] = {}
    for shard, error in _changed_claims(claims, state).items():
        written = state.shards[shard].written_end
        if are_named or written is None or not claims.holds(shard, written - 1):
            found[shard.stream] = error
    return found


def _wanted(epochs: Collection[str], names: Mapping[str, str], recreated: frozenset[str]) -> frozenset[str]:
    """Return the epochs that end: all that were recreated, or those before the requested epochs."""
    if not epochs:
        if not recreated:
            raise InvalidOptionError(
                f"{', '.join(sorted(names))} was not recreated, so there is nothing to accept",
                remedy="Ingest without an accept: the group continues at its position.",
            )
        return recreated
    wanted = set()
    for epoch in epochs:
        stream, number = split_epoch(epoch)
        if stream not in names:
            raise InvalidOptionError(
                f"{epoch!r} is not an epoch of a stream that is read", remedy=f"Use one of {', '.join(sorted(names))}."
            )
        known = split_epoch(names[stream])[1]
        if number <= known:
            # It was accepted before, by another run or by one that was killed.
            continue
        if number > known + 1:
            raise InvalidOptionError(
                f"{epoch!r} is not the next epoch of {stream!r}", remedy=f"Use {epoch_name(stream, known + 1)}."
            )
        if names[stream] not in recreated:
            raise InvalidOptionError(
                f"{stream!r} was not recreated: it is still the stream that the table has as {names[stream]!r}",
                remedy="Ingest without an accept: the group continues at its position.",
            )
        wanted.add(names[stream])
    return frozenset(wanted)


def _is_other_stream(source: BatchSource, state: LedgerState, name: str) -> bool:
    identity = source.identities()[name]
    return state.identities.get(name, identity) != identity


def _is_only_cut(
    source: BatchSource, ingestion: Ingestion, state: LedgerState, name: str, error: SourceRecreatedError
) -> bool:
    """Return whether a stream only lost its newest messages, although its counts say otherwise until it has as many."""
    if isinstance(error, SourceTruncatedError):
        return True
    if _is_other_stream(source, state, name):
        return False
    known = {shard: position for shard, position in state.positions.items() if shard.stream == name}
    same = same_up_to(source, ingestion, state, source.recreated(known))
    return bool(same) and MIN_SEQUENCE not in same.values()


def _next_epoch(source: BatchSource, state: LedgerState, before: str) -> AcceptedEpoch:
    """Return the first epoch of another stream of the same name."""
    stream, number = split_epoch(before)
    renamed = EpochNames({stream: epoch_name(stream, number + 1)})
    extents = {shard: extent for shard, extent in source.extents().items() if shard.stream == stream}
    # From the first message on, even if the first run of the group began later in the old stream.
    origin = {shard: source.first(shard, extent) for shard, extent in extents.items()}
    facts = renamed.all_to_epochs(certain_facts(source, extents, origin))
    identity, ended = source.identities()[stream], _ends(state, before)
    return AcceptedEpoch(renamed.names[stream], before, identity, renamed.all_to_epochs(origin), ended, facts=facts)


def _ends(state: LedgerState, epoch: str) -> Mapping[Shard, int]:
    known = {shard: one.covered.ranges for shard, one in sorted(state.shards.items()) if shard.stream == epoch}
    return {shard: ranges[-1].end for shard, ranges in known.items() if ranges}


def _next_claimed_epoch(
    source: BatchSource, claims: RedisClaims, state: LedgerState, extents: Mapping[Shard, Extent], before: str
) -> AcceptedEpoch:
    """Return the next epoch of a group in claim mode: a shard whose group goes on begins after its last row."""
    stream, number = split_epoch(before)
    own = {shard: extent for shard, extent in extents.items() if shard.stream == before}
    changed = _changed_claims(claims, state)
    kept = {shard: state.shards[shard] for shard in own if shard in state.shards and shard not in changed}
    written = {shard: one.written_end for shard, one in kept.items()}
    begins = {shard: kept[shard].covered.position or 0 if shard in kept else 0 for shard in own}
    begins |= {shard: end for shard, end in written.items() if end is not None}
    claimed = {shard: ClaimedRange(end, end, 0) for shard, end in written.items() if end is not None}
    anew = {shard: start for shard, start in begins.items() if shard not in kept}
    renamed = EpochNames({before: epoch_name(stream, number + 1)})
    return AcceptedEpoch(
        renamed.names[before],
        before,
        source.identities()[before],
        renamed.all_to_epochs(begins),
        _ends(state, before),
        facts=renamed.all_to_epochs(certain_facts(source, own, anew)),
        claims=renamed.all_to_epochs(claimed),
    )


def _continued(
    source: BatchSource, ingestion: Ingestion, state: LedgerState, extents: Mapping[Shard, Extent], before: str
) -> AcceptedEpoch:
    """Return the next epoch of a stream some of whose shards lost messages or were recreated."""
    stream, number = split_epoch(before)
    ended = _ends(state, before)
    own = {shard: extent for shard, extent in extents.items() if shard.stream == before}
    changed = changed_shards(source, ingestion.group, state, own)
    positions = {shard: state.shards[shard].covered.position or 0 for shard in ended}
    recreated = source.recreated({shard: positions[shard] for shard in changed & positions.keys()})
    compared = same_up_to(source, ingestion, state, recreated | (changed & state.last_messages.keys()))
    anew = (own.keys() - ended.keys()) | (changed - state.last_messages.keys())
    anew |= {shard for shard in recreated if compared[shard] == MIN_SEQUENCE}
    cut = divergences(source, ingestion, state, own, {s: compared[s] for s in changed - anew})
    # A shard that is gone, but comes back later, begins with its first message.
    begins = {s: source.first(s, e) if s in anew else cut.get(s, positions.get(s, e.start)) for s, e in own.items()}
    _check_complete(ingestion, state, {shard: begin for shard, begin in begins.items() if shard not in anew})
    set_here = {shard: begins[shard] for shard in anew | cut.keys()}
    facts = {s: at for s, at in position_facts_in(state.hint).items() if s in begins and at[0] == begins[s]}
    # If nothing that was read is left, messages that are gone may have been unread.
    known = {s: begin for s, begin in set_here.items() if s in anew or compared[s] > MIN_SEQUENCE}
    facts = {s: at for s, at in facts.items() if s not in set_here} | dict(certain_facts(source, own, known))
    # The new epoch may be cut, too, before its first batch is written.
    last = {shard: message for shard, message in state.last_messages.items() if shard in begins}
    last = {s: m for s, m in last.items() if s not in set_here} | dict(last_messages_before(source, set_here))
    renamed = EpochNames({before: epoch_name(stream, number + 1)})
    return AcceptedEpoch(
        renamed.names[before],
        before,
        source.identities()[before],
        renamed.all_to_epochs(begins),
        ended,
        renamed.all_to_epochs(last),
        renamed.all_to_epochs(facts),
    )


def _check_complete(ingestion: Ingestion, state: LedgerState, begins: Mapping[Shard, int]) -> None:
    """Refuse to end an epoch whose rows have to be written again, because they would keep its name.

    Args:
        ingestion: group and table.
        state: the ledger.
        begins: where the next epoch begins, of the shards that go on. What comes after it is read again anyway.

    Raises:
        InvalidOptionError: with the places.
    """
    left = {}
    for shard, begin in sorted(begins.items()):
        known = state.shards[shard]
        first = known.redo.ranges[0].start if known.redo else begin
        gap = known.covered.position or 0
        if first < begin or (len(known.covered.ranges) > 1 and gap <= begin):
            left[str(shard)] = f"from {min(first, gap)}"
    if left:
        raise InvalidOptionError(
            f"rows of {', '.join(left)} in {ingestion.table} still have to be written again, after a rewind or a "
            "RESTORE, and the stream still has their messages",
            remedy="RESTORE the table to the version before the rewind, or before the batch that landed after the "
            "RESTORE. Then accept the stream: what that removes is read again.",
            **left,
        )


def accept(
    spark: SparkSession,
    source: BatchSource,
    ingestion: Ingestion,
    *,
    epochs: Collection[str] = (),
    claims: RedisClaims | None = None,
    is_cut: bool = False,
) -> list[AcceptedEpoch]:
    """Let the group continue with streams that were recreated; the next run begins with their first messages.

    Args:
        spark: a session that can write Delta tables.
        source: the streams.
        ingestion: group and table.
        epochs: only these, each the next epoch of a stream, like ``orders#2``. An epoch that was accepted before is
            ignored, so that a run with the same settings accepts nothing more. Without any, all recreated streams.
        claims: the group, if members claim entries in mode ``load_balanced`` (Redis).
        is_cut: accept only streams that lost their newest messages; for a recreated one, raise its error. A stream that
            still has a message that was read only lost messages.

    Returns:
        The epochs that were accepted.

    Raises:
        StreamNotFoundError: the group has written nothing, or the stream was deleted and not recreated.
        InvalidOptionError: a stream was not recreated, or another epoch than its next one is asked for.
        WriteError: Spark failed; run it again.
    """
    _check_begun(ingestion.ledger().read(), ingestion)
    accepted: list[AcceptedEpoch] = []

    def fields(state: LedgerState) -> EntryFields | None:
        # After the ledger was read: an identity that was read earlier may have been accepted meanwhile.
        accepted[:] = plan_accept(source, ingestion, state, epochs=epochs, claims=claims, is_cut=is_cut)
        if not accepted:
            return None
        names = newest_epochs([*state.identities, *(one.name for one in accepted)], source.url.required_streams())
        kept = with_epoch_names(source, names).hint({}, state.hint)
        facts = {shard: known for one in accepted for shard, known in one.facts.items()}
        return EntryFields(
            identities={**state.identities, **{one.name: one.identity for one in accepted}},
            origin={shard: start for one in accepted for shard, start in one.origin.items()},
            hint=hint_with_facts(kept, {**position_facts_in(kept), **facts}),
            claims={shard: claim for one in accepted for shard, claim in one.claims.items()},
            ended={shard: end for one in accepted for shard, end in one.ended.items()},
            last_messages={shard: last for one in accepted for shard, last in one.last_messages.items()},
        )

    commit_empty(spark, replace(ingestion, member="main", shard=None), "accept", fields)
    return accepted


def divergences(
    source: BatchSource,
    ingestion: Ingestion,
    state: LedgerState,
    extents: Mapping[Shard, Extent],
    same: Mapping[Shard, int],
) -> Mapping[Shard, int]:
    """Return for each shard the first sequence from which the stream may hold other messages than the table.

    Args:
        source: the stream, by the names of its epochs, after :meth:`BatchSource.extents`.
        ingestion: group and table.
        state: the ledger.
        extents: what the shards hold.
        same: for each shard that lost messages, what :func:`same_up_to` found; the ledger has its last message.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
        StreamAssetsError: the stream cannot be read.
    """
    ends = {shard: min(state.shards[shard].covered.position or 0, extents[shard].end) for shard in same}
    starts = {shard: min(ends[shard], max(same[shard], extents[shard].start)) for shard in same}
    last = {shard: state.last_messages[shard] for shard in same}
    now = source.last_messages({shard: Range(one.sequence, one.sequence + 1) for shard, one in last.items()})
    # If another message has the same timestamp, timestamps show no difference.
    comparable = {
        shard: Range(starts[shard], ends[shard])
        for shard in same
        if source.has_own_timestamps and (shard not in now or now[shard].timestamp_ms != last[shard].timestamp_ms)
    }
    differing, alike = _by_timestamps(source, ingestion, comparable)
    # A stream that ends before the last message was only cut: everything that it holds may be the same.
    is_short = {shard: extents[shard].end <= last[shard].sequence for shard in same}
    return {s: differing.get(s, alike.get(s, starts[s]) if is_short[s] else starts[s]) for s in same}


def _remembered(
    ledger: Ledger, state: LedgerState, shards: Collection[Shard]
) -> Mapping[Shard, Mapping[LastMessage, tuple[int, PositionFacts] | None]]:
    """Return the last messages of all batches that the log still has, with the facts between each and the next one."""
    found: dict[Shard, dict[LastMessage, tuple[int, PositionFacts] | None]] = {shard: {} for shard in shards}
    with suppress(LedgerTruncatedError, LedgerUnreadableError, RestoreTargetError):
        for entry in (commit.entry for commit in ledger.surviving(state.version) if commit.entry):
            facts = position_facts_in(entry.hint) if entry.last_messages or entry.state else {}
            # After a batch that filled a gap, the facts are those at the end of later batches.
            facts = {s: at for s, at in facts.items() if s not in entry.ranges or at[0] == entry.ranges[s].end}
            for shard, one in (entry.state or {}).items():
                if shard in found and one.last is not None:
                    at = None if shard in entry.last_messages else facts.get(shard)
                    found[shard].setdefault(one.last, at)
            for shard in found.keys() & entry.last_messages.keys():
                found[shard][entry.last_messages[shard]] = facts.get(shard)
    return found


def same_up_to(
    source: BatchSource, ingestion: Ingestion, state: LedgerState, shards: Collection[Shard]
) -> Mapping[Shard, int]:
    """Return the sequence after the newest remembered message up to which the stream is the same, or ``MIN_SEQUENCE``.

    Of the messages that the stream holds at these sequences, the first ones are the same, and the later ones differ. A
    message that was removed counts as neither, and one that was lost differs. Each look-up also finds the messages
    before it that are missing, because it returns the last one that the stream holds up to there.

    A producer of Redis can send a lost message again, with its id, after new ones. A later message may then be the same
    although an earlier one differs. So where the source counts its messages, each remembered message is compared, from
    the oldest to the first that differs. A message is only the same if the facts after its batch are known and show
    that no message came late. The source counts after all look-ups, so that it also counts what came during them.
    """
    remembered = _remembered(ingestion.ledger(), state, shards)
    facts = {shard: [at for at in messages.values() if at] for shard, messages in remembered.items()}
    same: dict[Shard, dict[int, int]] = {shard: {} for shard in remembered}
    left = {shard: sorted(messages) for shard, messages in remembered.items()}
    while left := {shard: messages for shard, messages in left.items() if messages}:
        places = {shard: 0 if facts[shard] else len(messages) // 2 for shard, messages in left.items()}
        chosen = {shard: left[shard][place] for shard, place in places.items()}
        asked = {shard: Range(left[shard][0].sequence, message.sequence + 1) for shard, message in chosen.items()}
        now = source.last_messages(asked)
        for shard, message in chosen.items():
            before, after = left[shard][: places[shard]], left[shard][places[shard] + 1 :]
            held, at = now.get(shard), remembered[shard][message]
            if source.is_replaced(shard, message, held):
                left[shard] = before
            elif held is None or held.sequence < message.sequence:
                left[shard] = [one for one in before if held is not None and one.sequence <= held.sequence] + after
            else:
                left[shard] = after
                if at or not facts[shard]:
                    same[shard][message.sequence + 1] = at[0] if at else message.sequence + 1
    late = source.with_late_messages({shard: places for shard, places in facts.items() if places}, counts_all=True)
    return {
        shard: max((end for end, place in ends.items() if place < late.get(shard, math.inf)), default=MIN_SEQUENCE)
        for shard, ends in same.items()
    }


def _by_timestamps(
    source: BatchSource, ingestion: Ingestion, gaps: Mapping[Shard, Range]
) -> tuple[Mapping[Shard, int], Mapping[Shard, int]]:
    """Compare the timestamps of these ranges with those in the table.

    Returns:
        For shards with a difference, the end of the messages that are the same before it; for other shards, the end of
        all messages that are the same.
    """
    logs = [log for log in (ingestion.ledger().log, ingestion.dead_letters().log()) if log.snapshot() is not None]
    left = {shard: gap for shard, gap in gaps.items() if gap.start < gap.end}
    alike = {shard: gap.start for shard, gap in left.items()}
    differing: dict[Shard, int] = {}
    while left and (plan := source.plan(left, limits=Limits(), parallelism=1)) is not None:
        in_stream = timestamps_of((batch for split in plan.splits for batch in split.read()), MESSAGE_TIME)
        where = in_ranges(plan.ranges)
        in_table = timestamps_of(chain.from_iterable(scan(log, ROW_TIME, where=where) for log in logs), ROW_TIME)
        for shard, part in plan.ranges.items():
            rows = in_table.get(shard, NO_TIMES)
            same, _ = compared(in_stream.get(shard, NO_TIMES), rows)
            # A message that is missing may have been compacted or lost: it counts as a difference.
            other = np.setdiff1d(rows.sequences, same)
            same = same[same < other.min()] if len(other) else same
            alike[shard] = max(alike[shard], int(same.max()) + 1 if len(same) else 0)
            gap = left.pop(shard)
            if len(other):
                differing[shard] = alike.pop(shard)
            elif part.end < gap.end:
                left[shard] = Range(part.end, gap.end)
    return differing, alike
