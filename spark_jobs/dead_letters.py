"""Dead letters: a Delta table of their own, written before the rows, and counted once.

A dead letter counts only if the main ledger holds its batch id: a batch that was dropped after its dead letters were
written (a crash, a race) leaves rows that count for nothing, until housekeeping deletes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.delta_log import DeltaLog
from spark_jobs.ledger import Ledger
from stream_consumers.errors import LedgerUnreadableError

SETTLED_IN_A_ROW = 50


def dead_letter_path(table: str) -> str:
    """Where the dead letters of a table go by default: beside it."""
    return f"{table.rstrip('/')}_dead_letters"


@dataclass(frozen=True, slots=True)
class DeadLetterTable:
    """The dead letters of one table.

    Columns: ``_stream, _shard, _sequence, _timestamp`` (null where the framing was lost), ``key``, ``payload`` (the
    original bytes), ``error``, ``offset`` (bytes from the start of a file), ``_batch``, ``_group``, ``_member``,
    ``_number``, ``_recorded_at``.
    """

    path: str
    storage_options: Mapping[str, str] = field(default_factory=dict)

    def log(self) -> DeltaLog:
        """Its Delta log."""
        return DeltaLog(self.path, storage_options=self.storage_options)

    def write(self, letters: DataFrame, *, ledger: Ledger, number: int, bid: str) -> bool:
        """Write the dead letters of a batch under the table's own next number (protocol 3.5, D1 to D3).

        Args:
            letters: rows of the source with ``_error`` set.
            ledger: of the main table.
            number: the batch's number in the main ledger.
            bid: the batch's id.

        Returns:
            Whether they are there; ``False``: another run was faster, drop the batch.

        Raises:
            Exception: what Spark raises, if they are not there.
            LedgerUnreadableError: it cannot be told whether they are there.
        """
        snapshot = self.log().snapshot()
        base, own_number = (snapshot.version, snapshot.last_number(ledger.app) + 1) if snapshot else (-1, 1)
        rows = letters.select(
            "_stream",
            "_shard",
            "_sequence",
            "_timestamp",
            f.col("_key").alias("key"),
            f.col("_payload").alias("payload"),
            f.col("_error").alias("error"),
            f.col("_offset").alias("offset"),
            f.lit(bid).alias("_batch"),
            f.lit(ledger.group).alias("_group"),
            f.lit(ledger.member).alias("_member"),
            f.lit(number).cast("bigint").alias("_number"),
            f.current_timestamp().alias("_recorded_at"),
        ).coalesce(1)
        account = {"v": 1, "bid": bid, "app": ledger.app, "n": own_number, "number": number}
        failure: Exception | None = None
        try:
            (
                rows.write.format("delta")
                .mode("append")
                .option("delta.dataSkippingStatsColumns", "_stream,_shard,_sequence,_timestamp,_batch")
                .option("txnAppId", ledger.app)
                .option("txnVersion", str(own_number))
                .option("userMetadata", json.dumps(account))
                .save(self.path)
            )
        except Exception as error:  # noqa: BLE001 - whether it landed is for the log to say
            failure = error
        if self._holds(bid, after=base):
            return True
        if failure is not None:
            raise failure
        return False

    def _holds(self, bid: str, *, after: int) -> bool:
        log = self.log()
        snapshot = log.snapshot()
        for version in range(snapshot.version if snapshot else -1, after, -1):
            commit = log.commit(version)
            if commit is None:
                raise LedgerUnreadableError(
                    f"version {version} of {self.path} is missing from its log", remedy="Run again."
                )
            if commit.account.get("bid") == bid:
                return True
        return False

    def counted(self, spark: SparkSession, ledger: Ledger) -> DataFrame | None:
        """The dead letters of the group that count; ``None`` if there is no table yet."""
        if self.log().snapshot() is None:
            return None
        held = ledger.batch_commits()
        numbers = [commit.entry.number for commit in held.values() if commit.entry]
        oldest = min(numbers, default=0)
        return (
            spark.read.format("delta")
            .load(self.path)
            .where(f.col("_group") == ledger.group)
            .where(f.col("_batch").isin(list(held)) | (f.col("_number") < oldest))
        )

    def settle(self, spark: SparkSession, ledger: Ledger) -> int:
        """Delete the rows of batches that never made it into the main table; returns how many batches (D5).

        Only batches whose number the main ledger has passed are judged, and only while its log can tell.
        """
        orphans = self._orphans(ledger)
        if orphans:
            listed = ", ".join(f"'{bid}'" for bid in orphans)
            spark.sql(f"DELETE FROM delta.`{self.path}` WHERE _batch IN ({listed})")  # noqa: S608 - our own ids
        return len(orphans)

    def _orphans(self, ledger: Ledger) -> list[str]:
        log = self.log()
        snapshot = log.snapshot()
        if snapshot is None:
            return []
        held = ledger.batch_commits()
        passed = {c.entry.number for c in held.values() if c.entry and c.entry.app == ledger.app}
        orphans: list[str] = []
        deleted = ""
        settled = 0
        for version in range(snapshot.version, -1, -1):
            commit = log.commit(version)
            if commit is None or settled >= SETTLED_IN_A_ROW:
                break
            deleted += commit.predicate
            bid = str(commit.account.get("bid", ""))
            if commit.account.get("app") != ledger.app:
                continue
            if bid in held:
                settled += 1
            elif commit.account.get("number") in passed and bid not in deleted:
                orphans.append(bid)
        return orphans
