"""Finds the status of claimed entries in the ledger (open, written or dead), and the entries that are gone.

A loss is recorded by a batch without rows in the transaction sequence of its shard, so that only one of several members
records it. Only then are the entries acknowledged, or accounted for at the server.
"""

from __future__ import annotations

import enum
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Batch, Ingestion, Observer
from spark_jobs.batches.source_checks import check_removed_by_restore
from spark_jobs.batches.target_table import TargetTable, fence
from spark_jobs.ledger.entries import ClaimedRange, LedgerEntry, PlannedFields, State
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger, app_id
from stream_consumers.batches import Range
from stream_consumers.display import counted
from stream_consumers.errors import DataLossError, LedgerTruncatedError
from stream_consumers.messages import Shard
from stream_consumers.redis.claims import ClaimName, RedisClaims, TrimmedEntries
from stream_consumers.redis.entries import id_before, quoted_words, to_id, to_sequence

MAX_NUMBERS_AHEAD = 1_000_000_000
"""How far the number in the name of a member may be after its last number in the ledger: 30 years of a batch a second.

Without a limit, a name of another client that looks like one of a member could use up all numbers of that member."""


class ClaimStatus(enum.Enum):
    """The status of a claim, which is identified by its consumer name. ``WRITTEN`` and ``DEAD`` never change again.

    ``OPEN``: its number may still be written. ``WRITTEN``: its batch is in the table, so its entries are acknowledged
    and never written again. ``DEAD``: its batch never will be in the table, so its entries may go into another batch.
    """

    OPEN = "open"
    WRITTEN = "written"
    DEAD = "dead"


class ClaimStatuses:
    """Looks claims up in the ledger of their group.

    Args:
        ledger: the ledger of the group.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: dict[ClaimName, ClaimStatus] = {}

    def of(self, names: Iterable[ClaimName]) -> Mapping[ClaimName, ClaimStatus]:
        """Return the status of each claim.

        Raises:
            LedgerTruncatedError: the log was cleaned, so that a status is unknown.
        """
        wanted = set(names)
        unknown = wanted - self._known.keys()
        last = {member: self._ledger.last_number(member) for member in {name.member for name in unknown}}
        closed = {name for name in unknown if name.number <= last[name.member]}
        group = self._ledger.group
        try:
            entries = self._ledger.find((app_id(group, name.member), name.number) for name in closed)
        except LedgerTruncatedError as error:
            oldest = min(closed, key=lambda name: name.number)
            # No batch can be written under its name any more, and entries of other clients are compared with the table.
            raise LedgerTruncatedError(
                f"{error.what}: it is unknown whether the entries of the Redis consumer {oldest} are in the table",
                remedy=f"Restore the log files. Or run XCLAIM <key> {shlex.quote(group)} released 0 <id> for each id "
                f"that XPENDING lists for {oldest} and XRANGE still finds. Later runs write those entries that have "
                "neither a row nor a dead letter in the table. Then delete the consumer released (XGROUP DELCONSUMER).",
                **{**error.facts, "consumer": str(oldest)},
            ) from None
        for name in closed:
            entry = entries.get((app_id(group, name.member), name.number))
            is_written = entry is not None and entry.kind == "batch" and entry.bid == name.bid
            self._known[name] = ClaimStatus.WRITTEN if is_written else ClaimStatus.DEAD
        return {name: self._known.get(name, ClaimStatus.OPEN) for name in wanted}


def claim_names(raw_names: Iterable[bytes], ledger: Ledger) -> Mapping[bytes, ClaimName]:
    """Return the consumer names of members; the others are names of other kinds of clients.

    A member names a claim by its next number. The ledger may have much smaller numbers, because an older copy of the
    table was put in place, or the group goes on in a copy of the table. ``tests/model/claims.py`` shows why such names
    have to be fenced.

    Args:
        raw_names: consumer names from the server.
        ledger: the ledger of the group.
    """
    parsed = {raw: name for raw in raw_names if (name := ClaimName.parse(raw)) is not None}
    last = {member: ledger.last_number(member) for member in {name.member for name in parsed.values()}}
    return {raw: name for raw, name in parsed.items() if name.number <= last[name.member] + MAX_NUMBERS_AHEAD}


def fence_claim(spark: SparkSession, ingestion: Ingestion, name: ClaimName) -> None:
    """Take the number of a claim, and all numbers before it, so that a batch in flight with one of them never lands.

    Args:
        spark: a session that can write Delta tables.
        ingestion: the group, and the member that fences.
        name: the claim.
    """
    fence(spark, replace(ingestion, member=name.member), name.number, by=ingestion.member)


@dataclass(frozen=True, slots=True)
class ClaimState:
    """The entries of a group that were delivered, are pending, or are lost.

    Args:
        delivered: per shard, the range from the start of the group to after the last delivered entry, without entries
            that are recorded as skipped.
        pending: the sequences in it that are pending and not in the table.
        lag: the number of entries that are unread or pending.
        lost: the range of entries that were removed before they were written, or were skipped, and are not recorded.
    """

    delivered: Mapping[Shard, Intervals]
    pending: Mapping[Shard, npt.NDArray[np.int64]]
    lag: Mapping[Shard, int]
    lost: Mapping[Shard, Range] = field(default_factory=dict)


class SkippedEntries(NamedTuple):
    """Entries that were delivered to no member, because another client moved the group forwards.

    Args:
        part: the range from the first skipped entry to the position of the group.
        entries: the number of skipped entries that the stream still holds; others may be gone.
    """

    part: Range
    entries: int


def skipped_entries(claims: RedisClaims, ledger: Ledger) -> Mapping[Shard, SkippedEntries]:
    """Find the entries between the last delivered one and the position of the group that are not recorded as skipped.

    An entry that was delivered to a member is pending, or its batch is in the table, or its loss is recorded. Other
    clients in the group may acknowledge any entry, so that no skipped entries are reported for a shard with such
    clients. Skipped entries are also found if they were removed from the stream since.

    Args:
        claims: the group; from here on it refuses to claim from another position, unless a member has moved it.
        ledger: the ledger of the group.
    """
    # In this order: entries that are acknowledged between two of these steps are seen by the next step.
    positions = claims.positions()
    ends = claims.pending_ends(positions)
    state = ledger.read()
    shards = state.shards
    found = {}
    for shard, position in positions.items():
        if shard not in shards:
            continue
        known = shards[shard]
        part = Range(max(known.claimed or 0, known.covered.position or 0, ends[shard]), position)
        if part.start >= part.end:
            continue
        names = claims.consumers(shard)
        if names - claim_names(names, ledger).keys():
            continue
        recorded = Intervals.of(part) & state.totals.lost.get(shard, Intervals())
        left = Intervals.of(part) - (recorded - _around_trimmed(ledger, shard, recorded))
        entries = sum(claims.count(shard, piece) for piece in left)
        # The group was moved to an entry that is neither written, nor pending, nor recorded as lost.
        is_moved = part.start > 0 and position - 1 in left
        if entries or (is_moved and claims.may_be_removed(shard, part.start)):
            found[shard] = SkippedEntries(left.hull, entries)
    return found


def _around_trimmed(ledger: Ledger, shard: Shard, recorded: Intervals) -> Intervals:
    """Return the parts of recorded losses that are ranges around trimmed unread entries.

    Other unread entries in such a range may be skipped later.

    Args:
        ledger: the ledger of the group.
        shard: the shard.
        recorded: the recorded losses to look for.
    """
    trimmed, others = Intervals(), Intervals()
    for commit in ledger.surviving() if recorded else ():
        entry = commit.entry
        if entry is not None and shard in entry.lost:
            if _of_unread(entry):
                trimmed |= entry.lost[shard]
            else:
                others |= entry.lost[shard]
        if not recorded - (trimmed | others):
            break
    return trimmed - others


def recorded_skips(ledger: Ledger) -> Mapping[Shard, Intervals]:
    """Return the ranges that the ledger records as skipped."""
    found: dict[Shard, Intervals] = {}
    for commit in ledger.surviving():
        for shard, part in commit.entry.skipped.items() if commit.entry is not None else ():
            found[shard] = found.get(shard, Intervals()) | Intervals.of(part)
    return found


def losses_of_claims(
    claims: RedisClaims, ingestion: Ingestion | None = None, ledger: Ledger | None = None
) -> Mapping[Shard, Range]:
    """Check the group like a run, and return the entries that were removed or skipped before they were delivered.

    Args:
        claims: the group.
        ingestion: the group, if there is a table.
        ledger: the ledger of the group, if the caller has one, which caches what it has read.

    Raises:
        DataLossError: see :func:`spark_jobs.batches.source_checks.check_removed_by_restore`.
        SourceRecreatedError: see :meth:`stream_consumers.redis.claims.RedisClaims.check`.
    """
    lost: dict[Shard, Range] = {}
    written: frozenset[Shard] = frozenset()
    if ingestion is not None:
        ledger = ledger or ingestion.ledger()
        state = ledger.read()
        check_removed_by_restore(state, ingestion)
        claims.check({shard: known.written_end for shard, known in state.shards.items()})
        lost = {shard: skipped.part for shard, skipped in skipped_entries(claims, ledger).items()}
        written = _written_shards(state.shards)
    for shard, part in claims.trimmed(written).items():
        # Skipped entries are before the position, trimmed ones after it.
        lost[shard] = Range(lost[shard].start if shard in lost else part.start, part.end)
    return lost


def _written_shards(shards: State) -> frozenset[Shard]:
    return frozenset(shard for shard, known in shards.items() if known.written_end is not None)


def claim_state(claims: RedisClaims, ingestion: Ingestion, known: State) -> ClaimState:
    """Return the state of the claims of a group, from the server and the ledger.

    Args:
        claims: the group.
        ingestion: the group.
        known: the shards of the ledger.

    Raises:
        DataLossError: see :func:`spark_jobs.batches.source_checks.check_removed_by_restore`.
        SourceRecreatedError: see :meth:`stream_consumers.redis.claims.RedisClaims.check`.
        LedgerTruncatedError: the log was cleaned, so that the status of a claim is unknown.
    """
    ledger = ingestion.ledger()
    lost = dict(losses_of_claims(claims, ingestion, ledger))
    status = ClaimStatuses(ledger)
    skipped = recorded_skips(ledger)
    delivered, pending = {}, {}
    holders = claims.holders()
    members = claim_names(chain.from_iterable(holders.values()), ledger)
    for shard, names in holders.items():
        places: list[int] = []
        for raw in names:
            name = members.get(raw)
            if name is None or status.of([name])[name] is not ClaimStatus.WRITTEN:
                pages = claims.pending(shard, raw, idle=False)
                places += [to_sequence(entry.id) for page in pages for entry in page]
        pending[shard] = np.array(sorted(places), np.int64)
        origin = known[shard].origin if shard in known else None
        delivered[shard] = Intervals.of((origin or 0, claims.position(shard))) - skipped.get(shard, Intervals())
        gone = claims.missing({shard: [to_id(place).encode() for place in pending[shard].tolist()]}).get(shard)
        if gone:
            lost[shard] = Range(to_sequence(gone[0]), to_sequence(gone[-1]) + 1)
    return ClaimState(delivered, pending, {shard: b.total for shard, b in claims.backlog().items()}, lost)


@dataclass(frozen=True, slots=True)
class PlannedLoss:
    """The ``job_data`` of a batch that records the loss of entries of one shard.

    Args:
        target: the target of the transaction sequence of the shard.
        shard: the shard.
        kind: the entries that were skipped, or trimmed before they were read; ``None`` if claimed entries are gone.
    """

    target: TargetTable
    shard: Shard
    kind: SkippedEntries | TrimmedEntries | None


class ClaimLosses:
    """Finds lost entries, and plans the batches that record them.

    Args:
        spark: a session that can write Delta tables.
        claims: the group.
        ingestion: group and table, and whether losses are recorded.
        observer: called at each step.
    """

    def __init__(self, spark: SparkSession, claims: RedisClaims, ingestion: Ingestion, *, observer: Observer) -> None:
        self._spark = spark
        self._claims = claims
        self._ingestion = ingestion
        self._observer = observer
        self._ledger = ingestion.ledger()
        self._gone: dict[Shard, set[bytes]] = {}

    @property
    def are_known(self) -> bool:
        """Whether claimed entries are known to be gone, and are not recorded yet."""
        return bool(self._gone)

    def of(self, shard: Shard) -> frozenset[bytes]:
        """Return the ids of these entries."""
        return frozenset(self._gone.get(shard, ()))

    def add(self, shard: Shard, ids: Iterable[bytes]) -> None:
        """Remember claimed entries that are no longer in the stream."""
        self._gone.setdefault(shard, set()).update(ids)

    def next(self) -> Batch | None:
        """Plan the batch that records the lost entries of one shard; ``None`` if none are lost.

        Raises:
            DataLossError: entries are lost, and ``on_data_loss`` is not ``record``.
        """
        while True:
            # In this order: the server restarts the count of a group that another client moved, which hides the loss.
            skipped = skipped_entries(self._claims, self._ledger)
            written = _written_shards(self._ledger.read().shards)
            self._claims.count_reads(written)
            trimmed = self._claims.trimmed(written)
            shards = sorted({*skipped, *trimmed, *self._gone})
            if not shards:
                return None
            self._ingestion.refuse_or_record(self._error(skipped, trimmed))
            shard = shards[0]
            batch = self._record(shard, skipped.get(shard) or trimmed.get(shard))
            if batch is not None:
                return batch

    def _record(self, shard: Shard, kind: SkippedEntries | TrimmedEntries | None) -> Batch | None:
        own = replace(self._ingestion, shard=shard)
        target = TargetTable.of(self._spark, own, url=self._claims.url, observer=self._observer)
        state = target.ledger.read()
        if isinstance(kind, SkippedEntries):
            if shard not in skipped_entries(self._claims, target.ledger):
                return None
            lost, count, hint = Intervals.of(kind.part), kind.entries, None
        else:
            lost, count, hint = self._missing(target.ledger, shard, kind)
            if not count:
                self.account(shard, kind)
                return None
        fields = PlannedFields(
            lost={shard: lost},
            skipped={shard: kind.part} if isinstance(kind, SkippedEntries) else {},
            claims={shard: ClaimedRange(lost.ranges[0].start, lost.ranges[-1].end, count)},
            hint=hint,
        )
        loss = PlannedLoss(target, shard, kind)
        return Batch("batch", state, identities=self._claims.identities(), fields=fields, job_data=loss)

    def _missing(
        self, ledger: Ledger, shard: Shard, unread: TrimmedEntries | None
    ) -> tuple[Intervals, int, Mapping[str, object] | None]:
        """Return the lost entries that are not recorded yet, after a possible crash before they were acknowledged."""
        records = [
            commit.entry
            for commit in ledger.newest_first()
            if commit.entry is not None and commit.entry.app == ledger.app and shard in commit.entry.lost
        ]
        gone = self._gone.get(shard)
        if gone:
            known = Intervals.of(*(part for entry in records if not _of_unread(entry) for part in entry.lost[shard]))
            places = [place for place in map(to_sequence, sorted(gone)) if place not in known]
            return Intervals.of(*((place, place + 1) for place in places)), len(places), None
        assert unread is not None
        # After a loss is accounted for, the group's count is higher. So the same start and count are the same loss.
        hint = {"start": unread.start, "read": unread.read}
        count = unread.entries - sum(entry.claims[shard].entries for entry in records if _of_unread(entry) == hint)
        return Intervals.of((unread.start, unread.end)), max(0, count), hint

    def account(self, shard: Shard, kind: SkippedEntries | TrimmedEntries | None) -> None:
        """Acknowledge recorded losses of a shard, or let the group's count continue after them."""
        if isinstance(kind, SkippedEntries):
            return
        gone = self._gone.pop(shard, set())
        if gone:
            self._claims.acknowledge({shard: sorted(gone)})
        elif kind is not None:
            self._claims.account_for(shard, kind)

    def _error(self, skipped: Mapping[Shard, SkippedEntries], trimmed: Mapping[Shard, TrimmedEntries]) -> DataLossError:
        if skipped:
            return moved_forwards(self._claims, skipped)
        if uncounted := {shard: part for shard, part in trimmed.items() if part.read is None}:
            return _count_forgotten(self._claims, uncounted)
        texts = [
            f"{s}: {counted(part.entries, 'entry', 'entries')} from {part.start} to {part.end}"
            for s, part in sorted(trimmed.items())
        ]
        for shard, ids in sorted(self._gone.items()):
            texts.append(
                f"{shard}: {counted(len(ids), 'pending entry', 'pending entries')} from {min(map(to_sequence, ids))}"
            )
        count = sum(part.entries for part in trimmed.values()) + sum(map(len, self._gone.values()))
        return DataLossError(
            f"{count} entries of {self._claims.url} were trimmed or deleted before group {self._ingestion.group!r} "
            f"wrote them ({'; '.join(texts)})",
            remedy="Set on_data_loss='record' to skip them and continue, and record the loss in the table's log and "
            "dead letters. To prevent it, keep more entries (MAXLEN, MINID), or ingest more often.",
        )


def moved_forwards(claims: RedisClaims, skipped: Mapping[Shard, SkippedEntries]) -> DataLossError:
    """Return the error about entries that were skipped because another client moved the group."""
    shard, (part, entries) = min(skipped.items())
    group = claims.group.name
    words = quoted_words(claims.server.key(shard), group)
    return DataLossError(
        f"group {group!r} of {shard} at {claims.url} was moved forwards by another client: "
        f"the entries from {part.start} to {part.end} were delivered to no member, and the stream still has {entries}",
        remedy=f"To read those, move it back: XGROUP SETID {words} {id_before(part.start)}. The next run then "
        "reports whether others may be gone. Or set on_data_loss='record' to skip them, and record that in the table's "
        "log and dead letters.",
        given=part.start,
        position=part.end,
    )


def _count_forgotten(claims: RedisClaims, uncounted: Mapping[Shard, TrimmedEntries]) -> DataLossError:
    """Return the error about entries that may be lost, because Redis does not know how many the group has read."""
    shard, part = min(uncounted.items())
    group = claims.group.name
    words = quoted_words(claims.server.key(shard), group)
    return DataLossError(
        f"Redis does not know how many entries of {shard} at {claims.url} group {group!r} has read, and entries from "
        f"{part.start} to {part.end} may have been trimmed or deleted before the group wrote them",
        remedy=f"If none is lost, set the count: XGROUP SETID {words} {id_before(part.position)} ENTRIESREAD "
        f"{part.entries}. If some are, set it lower by their number. Or set on_data_loss='record' to continue, and "
        "record the range in the table's log and dead letters. Always give the right ENTRIESREAD to XGROUP SETID.",
        position=part.position,
        count=part.entries,
    )


def _of_unread(entry: LedgerEntry) -> Mapping[str, object]:
    """Return the start and count of trimmed unread entries in the hint of an entry; empty if it records others."""
    return {name: entry.hint[name] for name in ("start", "read") if entry.hint and name in entry.hint}
