"""Entries that are gone before they were in the table: told, or recorded once: data loss is never silent.

A loss is recorded by a batch without rows in the transaction sequence of its shard, so that of several members that see
it one records it; only then are the entries acknowledged, or accounted for at the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Batch, Ingestion, Observer
from spark_jobs.batches.writer import BatchWriter
from spark_jobs.ledger.entries import ClaimedRange
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState
from stream_consumers.batches import BatchPlan
from stream_consumers.errors import DataLossError
from stream_consumers.messages import Shard
from stream_consumers.options import DataLoss
from stream_consumers.redis.claim_name import Trimmed
from stream_consumers.redis.claims import ClaimedEntries, RedisClaims
from stream_consumers.redis.ids import to_sequence
from stream_consumers.wording import counted


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A planned batch: who writes it, and what is to be done when it is in the table.

    Args:
        batch: what is written.
        writer: of its transaction sequence.
        finish: acknowledges.
        held: the name that holds its entries, if one does.
    """

    batch: Batch
    writer: BatchWriter
    finish: Callable[[], None]
    held: ClaimedEntries | None = None


class ClaimLosses:
    """What is known to be gone, and its batches.

    Args:
        spark: a session that can write Delta tables.
        claims: the group.
        ingestion: what goes where, and whether losses are recorded.
        observer: told of each step.
    """

    def __init__(self, spark: SparkSession, claims: RedisClaims, ingestion: Ingestion, *, observer: Observer) -> None:
        self._spark = spark
        self._claims = claims
        self._ingestion = ingestion
        self._observer = observer
        self._gone: dict[Shard, set[bytes]] = {}

    @property
    def are_known(self) -> bool:
        """Whether claimed entries were found to be gone that are not recorded yet."""
        return bool(self._gone)

    def of(self, shard: Shard) -> frozenset[bytes]:
        """The ids of these entries."""
        return frozenset(self._gone.get(shard, ()))

    def add(self, shard: Shard, ids: Iterable[bytes]) -> None:
        """ClaimedRange entries that are not in the stream any more."""
        self._gone.setdefault(shard, set()).update(ids)

    def next(self) -> OpenBatch | None:
        """The batch that records what is gone of one shard; ``None`` if nothing is.

        Raises:
            DataLossError: something is, and losses are not to be recorded.
        """
        while True:
            trimmed = self._claims.trimmed()
            shards = sorted({*trimmed, *self._gone})
            if not shards:
                return None
            if self._ingestion.on_data_loss is DataLoss.ERROR:
                raise self._error(trimmed)
            opened = self._record(shards[0], trimmed.get(shards[0]))
            if opened is not None:
                return opened

    def _record(self, shard: Shard, unread: Trimmed | None) -> OpenBatch | None:
        writer = BatchWriter(
            self._spark, replace(self._ingestion, shard=shard), url=self._claims.url, observer=self._observer
        )
        state = writer.ledger.read()
        check_restored(writer.ledger, state, self._ingestion)
        lost, count, hint = self._missing(writer, shard, unread)
        if not count:
            self._account(shard, unread)
            return None
        entry = writer.entry(
            "batch",
            state,
            identities=self._claims.identities(),
            lost={shard: lost},
            claims={shard: ClaimedRange(lost.ranges[0].start, lost.ranges[-1].end, count)},
            hint=hint,
        )
        return OpenBatch(Batch(entry, BatchPlan({}, [], 0)), writer, lambda: self._account(shard, unread))

    def _missing(
        self, writer: BatchWriter, shard: Shard, unread: Trimmed | None
    ) -> tuple[Intervals, int, Mapping[str, object] | None]:
        """What is not recorded yet: a crash may have come between the record and the acknowledgement."""
        records = [
            commit.entry
            for commit in writer.ledger.newest_first()
            if commit.entry is not None and commit.entry.app == writer.ledger.app and shard in commit.entry.lost
        ]
        gone = self._gone.get(shard)
        if gone:
            known = Intervals.of(*(part for entry in records if not entry.hint for part in entry.lost[shard]))
            places = [place for place in map(to_sequence, sorted(gone)) if place not in known]
            return Intervals.of(*((place, place + 1) for place in places)), len(places), None
        assert unread is not None
        # Once it is accounted for the group has counted more: the same place and count mean the same loss.
        hint = {"start": unread.start, "read": unread.read}
        count = unread.entries - sum(entry.claims[shard].entries for entry in records if entry.hint == hint)
        return Intervals.of((unread.start, unread.end)), max(0, count), hint

    def _account(self, shard: Shard, unread: Trimmed | None) -> None:
        gone = self._gone.pop(shard, set())
        if gone:
            self._claims.acknowledge({shard: sorted(gone)})
        elif unread is not None:
            self._claims.account_for(shard, unread)

    def _error(self, trimmed: Mapping[Shard, Trimmed]) -> DataLossError:
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
