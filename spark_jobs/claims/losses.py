"""Entries that are gone before they were in the table: an error, or recorded once. Data loss is never silent.

A loss is recorded by a batch without rows in the transaction sequence of its shard, so that of several members that see
it one records it; only then are the entries acknowledged, or accounted for at the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Batch, Ingestion, Observer
from spark_jobs.batches.writer import Target
from spark_jobs.claims.status import Skipped, skipped_entries
from spark_jobs.ledger.entries import ClaimedRange, LedgerEntry
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState
from stream_consumers.errors import DataLossError
from stream_consumers.messages import Shard
from stream_consumers.redis.claim_name import Trimmed
from stream_consumers.redis.claims import RedisClaims
from stream_consumers.redis.ids import before, to_sequence
from stream_consumers.redis.keys import readable
from stream_consumers.wording import counted


@dataclass(frozen=True, slots=True)
class OpenLoss:
    """What is held for a batch that records what is gone of one shard.

    Args:
        target: the table, by the transaction sequence of the shard.
        shard: what the loss is of.
        kind: what is recorded: entries that were skipped, that were trimmed before they were read, or ``None``, if
            claimed ones are gone.
    """

    target: Target
    shard: Shard
    kind: Skipped | Trimmed | None


class ClaimLosses:
    """What is known to be gone, and its batches.

    Args:
        spark: a session that can write Delta tables.
        claims: the group.
        ingestion: what goes where, and whether losses are recorded.
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
        """Whether claimed entries were found to be gone that are not recorded yet."""
        return bool(self._gone)

    def of(self, shard: Shard) -> frozenset[bytes]:
        """The ids of these entries."""
        return frozenset(self._gone.get(shard, ()))

    def add(self, shard: Shard, ids: Iterable[bytes]) -> None:
        """Remember claimed entries that are not in the stream any more."""
        self._gone.setdefault(shard, set()).update(ids)

    def next(self) -> Batch | None:
        """The batch that records what is gone of one shard; ``None`` if nothing is.

        Raises:
            DataLossError: something is, and losses are not to be recorded.
        """
        while True:
            # In this order: a group that another client has moved counts anew, which hides what it was moved over.
            skipped = skipped_entries(self._claims, self._ledger)
            self._claims.count_reads()
            trimmed = self._claims.trimmed()
            shards = sorted({*skipped, *trimmed, *self._gone})
            if not shards:
                return None
            self._ingestion.refuse_or_record(self._error(skipped, trimmed))
            shard = shards[0]
            batch = self._record(shard, skipped.get(shard) or trimmed.get(shard))
            if batch is not None:
                return batch

    def _record(self, shard: Shard, kind: Skipped | Trimmed | None) -> Batch | None:
        own = replace(self._ingestion, shard=shard)
        target = Target.of(self._spark, own, url=self._claims.url, observer=self._observer)
        state = target.ledger.read()
        check_restored(target.ledger, state, self._ingestion)
        if isinstance(kind, Skipped):
            if shard not in skipped_entries(self._claims, target.ledger):
                return None
            lost, count, hint = Intervals.of(kind.part), kind.entries, None
        else:
            lost, count, hint = self._missing(target.ledger, shard, kind)
        if not count:
            self.account(shard, kind)
            return None
        fields = {
            "lost": {shard: lost},
            "skipped": {shard: kind.part} if isinstance(kind, Skipped) else {},
            "claims": {shard: ClaimedRange(lost.ranges[0].start, lost.ranges[-1].end, count)},
            "hint": hint,
        }
        opened = OpenLoss(target, shard, kind)
        return Batch("batch", state, identities=self._claims.identities(), fields=fields, held=opened)

    def _missing(
        self, ledger: Ledger, shard: Shard, unread: Trimmed | None
    ) -> tuple[Intervals, int, Mapping[str, object] | None]:
        """What is not recorded yet: a crash may have come between the record and the acknowledgement."""
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
        # Once it is accounted for the group has counted more: the same place and count mean the same loss.
        hint = {"start": unread.start, "read": unread.read}
        count = unread.entries - sum(entry.claims[shard].entries for entry in records if _of_unread(entry) == hint)
        return Intervals.of((unread.start, unread.end)), max(0, count), hint

    def account(self, shard: Shard, kind: Skipped | Trimmed | None) -> None:
        """What was gone of a shard is recorded: acknowledge it, or let the group's count go on after it."""
        if isinstance(kind, Skipped):
            return
        gone = self._gone.pop(shard, set())
        if gone:
            self._claims.acknowledge({shard: sorted(gone)})
        elif kind is not None:
            self._claims.account_for(shard, kind)

    def _error(self, skipped: Mapping[Shard, Skipped], trimmed: Mapping[Shard, Trimmed]) -> DataLossError:
        if skipped:
            return moved_forwards(self._claims, skipped)
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
            remedy="To skip them and continue, with the loss recorded in the table's log and its dead letters, set "
            "on_data_loss='record'. Keep more entries (MAXLEN, MINID), or ingest more often.",
        )


def moved_forwards(claims: RedisClaims, skipped: Mapping[Shard, Skipped]) -> DataLossError:
    """The error about entries that another client moved the group over."""
    shard, (part, entries) = min(skipped.items())
    key, group = readable(claims.server.key(shard)), claims.group.name
    return DataLossError(
        f"group {group!r} of {shard} at {claims.url} was moved forwards by another client: "
        f"{counted(entries, 'entry', 'entries')} from {part.start} to {part.end} were given to no member",
        remedy=f"To read them, move it back: XGROUP SETID {key} {group} {before(part.start)}. To skip them, "
        "with that recorded in the table's log and its dead letters, set on_data_loss='record'.",
        given=part.start,
        position=part.end,
    )


def check_restored(ledger: Ledger, state: LedgerState, ingestion: Ingestion) -> None:
    """Refuse to continue after a RESTORE that removed batches: their entries are acknowledged.

    Raises:
        DataLossError: with the numbers.
    """
    lost = ledger.lost_rows(state)
    if lost:
        raise DataLossError(
            f"a RESTORE of {ingestion.table} removed batches whose entries group {ingestion.group!r} has acknowledged; "
            "they cannot be claimed again",
            remedy="RESTORE the table to a version that has them, or ingest the stream with a new group name into "
            "another table.",
            batches=len(lost),
            version=state.version,
        )


def _of_unread(entry: LedgerEntry) -> Mapping[str, object]:
    """Where unread entries were trimmed that an entry records; empty if it records others."""
    return {name: entry.hint[name] for name in ("start", "read") if entry.hint and name in entry.hint}
