"""Dead letters: a Delta table of their own, written before the rows, and counted once.

A dead letter counts only if the main ledger holds its batch id: a batch that was dropped after its dead letters were
written (a crash, a race) leaves rows that count for nothing, until housekeeping deletes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.ledger.delta_log import Commit, DeltaLog
from spark_jobs.ledger.entries import ClaimedRange, LedgerEntry
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import is_within, open_dataset
from spark_jobs.reading.source import DEAD_LETTER_DDL, STREAM_DDL, struct_type
from spark_jobs.writing.sink import explain, in_ranges, is_conflict, write_verified
from stream_consumers.batches import Range
from stream_consumers.messages import Shard


@dataclass(frozen=True, slots=True)
class OrphanedBatch:
    """A batch with orphaned dead letters: they were written, and the main ledger does not hold it.

    Args:
        bid: its id.
        app: the app id of the member that planned it.
        number: its number in the main ledger.
        version: of the dead-letter table.
        is_passed: the main ledger has another batch of this number, so this one never comes. A batch that a RESTORE
            removed is not passed: another RESTORE may bring it back.
    """

    bid: str
    app: str
    number: int
    version: int
    is_passed: bool = False


def dead_letter_path(table: str) -> str:
    """Where the dead letters of a table go by default: beside it."""
    return f"{table.rstrip('/')}_dead_letters"


@dataclass(frozen=True, slots=True)
class DeadLetterTable:
    """The dead letters of one table.

    Columns: ``_stream, _shard, _sequence, _timestamp`` (null where the framing was lost), ``key``, ``payload`` and
    ``headers`` (the original bytes), ``error``, ``offset`` (bytes from the start of a file), ``_batch``, ``_group``,
    ``_member``, ``_number``, ``_recorded_at``. A range that was gone before it was read is one, too, without bytes.
    """

    path: str
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def log(self) -> DeltaLog:
        """Its Delta log."""
        return DeltaLog(self.path, storage_options=self.storage_options, is_own_folder=True)

    def write(self, dead_letters: DataFrame, *, ledger: Ledger, number: int, bid: str) -> bool:
        """Write the dead letters of a batch under the table's own next number (protocol 3.5, D1 to D3).

        Args:
            dead_letters: rows of the source with ``_error`` set.
            ledger: of the main table.
            number: the batch's number in the main ledger.
            bid: the batch's id.

        Returns:
            Whether they are there; ``False``: another run was faster, drop the batch.

        Raises:
            WriteError: Spark failed, and they are not there.
            LedgerUnreadableError: it cannot be told whether they are there.
        """
        snapshot = self.log().snapshot()
        base, own_number = (snapshot.version, snapshot.last_number(ledger.app) + 1) if snapshot else (-1, 1)
        rows = dead_letters.select(
            "_stream",
            "_shard",
            "_sequence",
            "_timestamp",
            f.col("_key").alias("key"),
            f.col("_payload").alias("payload"),
            f.col("_headers").alias("headers"),
            f.col("_error").alias("error"),
            f.col("_offset").alias("offset"),
            f.lit(bid).alias("_batch"),
            f.lit(ledger.group).alias("_group"),
            f.lit(ledger.member).alias("_member"),
            f.lit(number).cast("bigint").alias("_number"),
            f.current_timestamp().alias("_recorded_at"),
        ).coalesce(1)
        metadata = {"v": 1, "bid": bid, "app": ledger.app, "n": own_number, "number": number}
        writer = (
            rows.write.format("delta")
            .mode("append")
            .option("delta.dataSkippingStatsColumns", "_stream,_shard,_sequence,_timestamp,_batch")
            .option("txnAppId", ledger.app)
            .option("txnVersion", str(own_number))
            .option("userMetadata", json.dumps(metadata))
        )
        found = write_verified(
            lambda: writer.save(self.path),
            lambda: self.log().find(lambda commit: commit.user_metadata.get("bid") == bid, after=base),
            table=self.path,
        )
        return found is not None

    def counted(self, spark: SparkSession, ledger: Ledger) -> DataFrame | None:
        """The dead letters of the group that count; ``None`` if there is no table yet."""
        if self.log().snapshot() is None:
            return None
        dead_letters = spark.read.format("delta").load(self.path).where(f.col("_group") == ledger.group)
        orphaned = [batch.bid for batch in self.orphaned(ledger)]
        if orphaned:
            dead_letters = dead_letters.where(~f.col("_batch").isin(orphaned))
        for replaced in replacements(ledger):
            is_older = ~f.col("_batch").isin(sorted(replaced.since))
            dead_letters = dead_letters.where(~f.coalesce(is_older & f.expr(in_ranges(replaced.ranges)), f.lit(False)))
        return dead_letters

    def counted_places(self, ledger: Ledger) -> pa.Table:
        """Stream, shard and sequence of the dead letters that count, without Spark; no rows if there is no table."""
        columns = ["_stream", "_shard", "_sequence", "_batch"]
        if self.log().snapshot() is None:
            return pa.table({name: [] for name in columns})
        orphaned = pa.array([batch.bid for batch in self.orphaned(ledger)], pa.string())
        is_counted = (pc.field("_group") == ledger.group) & ~pc.field("_batch").isin(orphaned)
        for replaced in replacements(ledger):
            for shard, part in replaced.ranges.items():
                is_older = ~pc.field("_batch").isin(pa.array(sorted(replaced.since), pa.string()))
                is_counted &= ~(is_within(shard, part) & is_older)
        rows = open_dataset(self.path, storage_options=self.storage_options)
        return rows.to_table(columns=columns, filter=is_counted)

    def delete_orphaned(self, spark: SparkSession, ledger: Ledger, *, after: int = -1) -> int:
        """Delete the orphaned dead letters: those of batches that never made it into the main table (D5).

        Only batches whose number the main ledger has passed are judged.

        Args:
            spark: does the deleting.
            ledger: of the main table.
            after: up to this version of the dead-letter table everything was settled before.

        Returns:
            The version up to which everything is settled now.
        """
        snapshot = self.log().snapshot()
        if snapshot is None:
            return -1
        orphaned = self.orphaned(ledger, after=after)
        passed = [batch.bid for batch in orphaned if batch.is_passed]
        if passed:
            listed = ", ".join(f"'{bid}'" for bid in passed)
            try:
                spark.sql(f"DELETE FROM delta.`{self.path}` WHERE _batch IN ({listed})")  # noqa: S608 - our own ids
            except Exception as error:
                if not is_conflict(error):
                    raise explain(error, table=self.path) from error
                # Another run is deleting the same; what is left of them counts for nothing and is deleted next time.
                return after
            if any(batch.is_passed for batch in self.orphaned(ledger, after=after)):
                # Delta silently ignores a DELETE if the session names a transaction version that is recorded already.
                return after
        return min((batch.version - 1 for batch in orphaned if not batch.is_passed), default=snapshot.version)

    def orphaned(self, ledger: Ledger, *, after: int | None = None) -> list[OrphanedBatch]:
        """The batches whose dead letters do not count, because the main ledger does not hold them."""
        if after is None:
            after = ledger.read().settled
        written, deleted = self._written(ledger, after)
        if not written:
            return []
        needed = {app: min(s.number for s in written if s.app == app) for app in {s.app for s in written}}
        numbers = _numbers(ledger.newest_first(), needed)
        held = _numbers(ledger.surviving(), needed)
        return [
            replace(
                batch,
                is_passed=batch.number in numbers.get(batch.app, {}) and batch.bid not in numbers[batch.app].values(),
            )
            for batch in written
            if batch.bid not in held.get(batch.app, {}).values() and batch.bid not in deleted
        ]

    def _written(self, ledger: Ledger, after: int) -> tuple[list[OrphanedBatch], str]:
        """The batches of the group with dead letters behind version ``after``, and what was deleted since."""
        log = self.log()
        snapshot = log.snapshot()
        found: list[OrphanedBatch] = []
        deleted = ""
        newest = snapshot.version if snapshot else -1
        # Settled up to a version that is not there: the table was deleted and made anew.
        oldest = after if after <= newest else -1
        for version in range(newest, oldest, -1):
            commit = log.commit(version)
            if commit is None:
                break
            deleted += commit.predicate
            app, number = str(commit.user_metadata.get("app", "")), commit.user_metadata.get("number")
            if app.startswith(f"{ledger.group}/") and isinstance(number, int):
                found.append(OrphanedBatch(str(commit.user_metadata.get("bid")), app, number, version))
        return found, deleted


def lost_ranges(spark: SparkSession, entry: LedgerEntry) -> DataFrame:
    """A dead letter for each range that was gone from the stream before it was read; it has no sequence."""
    schema = struct_type(f"{STREAM_DDL}, {DEAD_LETTER_DDL}")
    rows = [
        (shard.stream, shard.id, None, None, None, None, None, _lost(part, entry.claims.get(shard)), None)
        for shard, parts in sorted(entry.lost.items())
        for part in parts
    ]
    return spark.createDataFrame(rows, schema)


def _lost(part: Range, claimed: ClaimedRange | None) -> str:
    if claimed is not None:
        return (
            f"lost: entries between {part.start} and {part.end} were removed from the stream before they were written "
            f"({claimed.entries} in all)"
        )
    return (
        f"lost: sequences {part.start} to {part.end - 1} were removed from the stream before they were read; "
        f"the first left is {part.end}"
    )


@dataclass(frozen=True, slots=True)
class Replaced:
    """Ranges that a batch replaced: dead letters of older batches in them count no more.

    Args:
        ranges: what was replaced.
        since: the ids of that batch and of all behind it in the log; numbers of several lines do not compare.
    """

    ranges: Mapping[Shard, Range]
    since: frozenset[str]


def replacements(ledger: Ledger) -> list[Replaced]:
    """What batches have replaced, as far as no RESTORE removed them."""
    found, since = [], []
    for commit in ledger.surviving():
        if commit.entry is not None:
            since.append(commit.entry.bid)
            if commit.entry.mode == "replace":
                found.append(Replaced(commit.entry.ranges, frozenset(since)))
    return found


def _numbers(commits: Iterator[Commit], needed: Mapping[str, int]) -> dict[str, dict[int, str]]:
    """Per app id the batch ids by number, from the newest commit down to the needed numbers."""
    found: dict[str, dict[int, str]] = {}
    for commit in commits:
        if commit.entry is not None:
            found.setdefault(commit.entry.app, {})[commit.entry.number] = commit.entry.bid
        if all(app in found and min(found[app]) <= number for app, number in needed.items()):
            break
    return found
