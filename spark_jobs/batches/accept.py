"""Accepts a stream that was deleted and made again, that lost messages, or that another one of its name replaced.

One empty commit in the group's transaction sequence begins the stream's next epoch: it says what the new stream is
known by, where its shards begin, and where those of the epoch before it end. From there on rows and positions are of
the new epoch (:mod:`stream_consumers.epochs`), and those that are there stay as they are. A batch of the old stream
that is on its way loses its number to the commit, or lands in the old epoch, where its messages belong. There is
nothing else to do, so that an accept that was killed has happened or not. tests/model/epochs.py explores all
interleavings.

The next epoch of a stream that lost its newest messages begins where stream and table differ (:func:`divergences`).
The last messages that earlier batches read show up to where the stream is still the same, because the ledger has their
checksums. From there on the timestamps of rows and dead letters are compared with those of the stream. Where
timestamps show no difference, or are a part of the sequence (Redis), the epoch begins at the end of what is known to
be the same. Then messages that are the same on both sides are read again, and none is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.source_checks import check_only_group, recreations, truncations
from spark_jobs.batches.target_table import commit_empty
from spark_jobs.ledger.entries import CLAIMS, LEAVING_CLAIMS, SWITCHING, EntryFields
from spark_jobs.ledger.intervals import MIN_SEQUENCE
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.ledger.table_rows import MESSAGE_TIME, NO_TIMES, ROW_TIME, compared, in_ranges, scan, timestamps_of
from stream_consumers.batches import BatchSource, Extent, LastMessage, Range
from stream_consumers.epochs import epoch_name, newest_epochs, split_epoch, with_epoch_names
from stream_consumers.errors import (
    InvalidOptionError,
    LedgerTruncatedError,
    LedgerUnreadableError,
    SourceRecreatedError,
    SourceTruncatedError,
    StreamNotFoundError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import Limits
from stream_consumers.redis.claims import RedisClaims


@dataclass(frozen=True, slots=True)
class AcceptedEpoch:
    """An epoch that begins.

    Args:
        name: of the epoch; the rows of its messages have it in ``_stream``.
        before: the name of the epoch before it.
        identity: what the new stream is known by.
        origin: where its shards begin.
        ended: where the shards of the epoch before it end; what their stream held behind that was not read.
        last_messages: of a stream that lost messages in other shards, the last message that was read of its shards.
    """

    name: str
    before: str
    identity: str
    origin: Mapping[Shard, int]
    ended: Mapping[Shard, int]
    last_messages: Mapping[Shard, LastMessage] = field(default_factory=dict)


def plan_accept(
    source: BatchSource,
    ingestion: Ingestion,
    state: LedgerState,
    *,
    epochs: Collection[str] = (),
    claims: RedisClaims | None = None,
    is_cut: bool = False,
) -> list[AcceptedEpoch]:
    """What :func:`accept` would do.

    Raises:
        StreamNotFoundError: the group has written nothing, or the stream is gone and was not made again.
        InvalidOptionError: a stream was not recreated, or another epoch than its next one is asked for.
    """
    _check_begun(state, ingestion)
    if state.sharing in (SWITCHING, LEAVING_CLAIMS):
        raise InvalidOptionError(
            f"group {ingestion.group!r} is about to change its mode", remedy="Finish it with: stream-assets switch."
        )
    names = newest_epochs(state.identities, source.url.required_streams())
    current = with_epoch_names(source, names)
    extents = current.extents(resume=state.resume)
    if state.sharing == CLAIMS:
        if claims is None:
            raise InvalidOptionError(
                f"group {ingestion.group!r} claims entries one by one", remedy="Give its claims, too."
            )
        found = _recreated_claims(claims, state, are_named=bool(epochs))
    else:
        found = recreations(current, ingestion.group, state, extents)
    if is_cut:
        for error in found.values():
            if not isinstance(error, SourceTruncatedError):
                raise error
        if not found:
            return []
    wanted = _wanted(epochs, names, frozenset(found))
    check_only_group(ingestion, state, wanted, url=source.url)
    return [
        _continued(current, ingestion, state, extents, name)
        if isinstance(found[name], SourceTruncatedError)
        else _next_epoch(source, state, name, is_claimed=state.sharing == CLAIMS)
        for name in sorted(wanted)
    ]


def _check_begun(state: LedgerState, ingestion: Ingestion) -> None:
    if state.newest is None:
        raise StreamNotFoundError(
            f"group {ingestion.group!r} has written nothing into {ingestion.table}: there is no other stream to accept",
            remedy="Ingest it.",
        )


def _recreated_claims(
    claims: RedisClaims, state: LedgerState, *, are_named: bool
) -> Mapping[str, SourceRecreatedError]:
    """The epochs whose group or stream is gone; unless they are named, not where the last entry is still there."""
    found: dict[str, SourceRecreatedError] = {}
    for shard, known in state.shards.items():
        if shard.stream not in claims.identities():
            continue
        try:
            claims.check({shard: known.written_end})
        except SourceRecreatedError as error:
            if are_named or known.written_end is None or not claims.holds(shard, known.written_end - 1):
                found[shard.stream] = error
    return found


def _wanted(epochs: Collection[str], names: Mapping[str, str], recreated: frozenset[str]) -> frozenset[str]:
    """The epochs that end: all that were recreated, or those before the ones that are asked for."""
    if not epochs:
        if not recreated:
            raise InvalidOptionError(
                f"{', '.join(sorted(names))} was not recreated: there is nothing to accept",
                remedy="Ingest it; the group continues where it was.",
            )
        return recreated
    wanted = set()
    for epoch in epochs:
        stream, number = split_epoch(epoch)
        if stream not in names:
            raise InvalidOptionError(
                f"{epoch!r} is no epoch of a stream that is read", remedy=f"Read are: {', '.join(sorted(names))}."
            )
        known = split_epoch(names[stream])[1]
        if number <= known:
            # It was accepted before: by this run, which was killed, or by another one.
            continue
        if number > known + 1:
            raise InvalidOptionError(
                f"{epoch!r} is not the next epoch of {stream!r}", remedy=f"That is {epoch_name(stream, known + 1)}."
            )
        if names[stream] not in recreated:
            raise InvalidOptionError(
                f"{stream!r} was not recreated: it is the stream that is in the table as {names[stream]!r}",
                remedy="Ingest it; the group continues where it was.",
            )
        wanted.add(names[stream])
    return frozenset(wanted)


def _next_epoch(source: BatchSource, state: LedgerState, before: str, *, is_claimed: bool) -> AcceptedEpoch:
    stream, number = split_epoch(before)
    name = epoch_name(stream, number + 1)
    extents = {shard: extent for shard, extent in source.extents().items() if shard.stream == stream}
    # From the first message on, wherever the first run of the group began: the group wants all of the stream.
    origin = {Shard(name, s.id): 0 if is_claimed else source.first(s, extent) for s, extent in extents.items()}
    known = {shard: s.covered.ranges for shard, s in state.shards.items() if shard.stream == before}
    ended = {shard: ranges[-1].end for shard, ranges in sorted(known.items()) if ranges}
    return AcceptedEpoch(name, before, source.identities()[stream], origin, ended)


def _continued(
    source: BatchSource, ingestion: Ingestion, state: LedgerState, extents: Mapping[Shard, Extent], before: str
) -> AcceptedEpoch:
    """The epoch of a stream that lost messages: it begins where stream and table differ, or at the position."""
    stream, number = split_epoch(before)
    name = epoch_name(stream, number + 1)
    known = {s: one for s, one in state.shards.items() if s.stream == before and one.covered.position is not None}
    ended = {shard: one.covered.position or 0 for shard, one in sorted(known.items())}
    own = {shard: extent for shard, extent in extents.items() if shard.stream == before}
    cut = truncations(source, ingestion.group, state, own)
    begins = {**ended, **divergences(source, ingestion, state, own, cut.keys())}
    # A shard that is not there any more begins with its first message, should it come back.
    origin = {Shard(name, s.id): begins[s] if s in begins else source.first(s, extent) for s, extent in own.items()}
    # The new epoch may be cut as well before its first batch is written.
    last = source.last_messages({shard: Range(MIN_SEQUENCE, begins[shard]) for shard in cut})
    last = {**{s: m for s, m in state.last_messages.items() if s in ended and s in own and s not in cut}, **last}
    last = {Shard(name, shard.id): message for shard, message in last.items()}
    return AcceptedEpoch(name, before, source.identities()[before], origin, ended, last)


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
        epochs: only these, each the next epoch of a stream, like ``orders#2``. One that was accepted before is left
            alone, so that a run with the same settings accepts nothing more. Without any, all that were recreated.
        claims: the group, where members claim entries in mode ``load_balanced`` (Redis).
        is_cut: only streams that lost their newest messages; of another one the error is raised.

    Returns:
        What was accepted.

    Raises:
        StreamNotFoundError: the group has written nothing, or the stream is gone and was not made again.
        InvalidOptionError: a stream was not recreated, or another epoch than its next one is asked for.
        WriteError: Spark failed; run it again.
    """
    _check_begun(ingestion.ledger().read(), ingestion)
    accepted: list[AcceptedEpoch] = []

    def fields(state: LedgerState) -> EntryFields | None:
        # The ledger first: an identity that was asked for earlier may have been accepted meanwhile.
        accepted[:] = plan_accept(source, ingestion, state, epochs=epochs, claims=claims, is_cut=is_cut)
        if not accepted:
            return None
        names = newest_epochs([*state.identities, *(one.name for one in accepted)], source.url.required_streams())
        origin = {shard: start for one in accepted for shard, start in one.origin.items()}
        return EntryFields(
            identities={**state.identities, **{one.name: one.identity for one in accepted}},
            origin=origin,
            hint=with_epoch_names(source, names).hint(origin, state.hint),
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
        held = timestamps_of((batch for split in plan.splits for batch in split.read()), MESSAGE_TIME)
        where = in_ranges(plan.ranges)
        kept = timestamps_of(chain.from_iterable(scan(log, ROW_TIME, where=where) for log in logs), ROW_TIME)
        for shard, part in plan.ranges.items():
            rows = kept.get(shard, NO_TIMES)
            same, _ = compared(held.get(shard, NO_TIMES), rows)
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
