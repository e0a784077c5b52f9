"""Writes the rows of a batch and its batch metadata in one Delta commit, and looks into the log whether it is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from delta import exceptions as conflicts
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.ledger.delta_log import Commit, DeltaLog
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import PLACE, in_places, in_ranges
from spark_jobs.table_location import spark_location
from spark_jobs.writing.failures import FOREIGN_PLACE, explain, text_of
from spark_jobs.writing.storage import check_files, check_seen
from stream_consumers.batches import Range
from stream_consumers.messages import Shard
from stream_consumers.options import SchemaChanges, choose_fields

# All of Delta's exceptions are conflicts with another commit; they have no base of their own.
CONFLICTS: tuple[type[Exception], ...] = tuple(getattr(conflicts, name) for name in conflicts.__all__)
CONFLICT_TEXTS = ("io.delta.exceptions.", "DELTA_CONCURRENT", "DELTA_PROTOCOL_CHANGED", "DELTA_METADATA_CHANGED")
MOST_EXTENTS = 64
"""A row is compared with so many ranges, one after the other."""


@dataclass(frozen=True, slots=True)
class DeltaSink:
    """The Delta table at ``path``.

    Args:
        path: a local path or a URI that Spark understands.
        properties: table properties, set when the table is created.
        schema_changes: whether new columns come into the table.
    """

    path: str
    properties: Mapping[str, str] = field(default_factory=dict)
    schema_changes: SchemaChanges | str = SchemaChanges.FAIL

    def __post_init__(self) -> None:
        choose_fields(self, schema_changes=SchemaChanges)

    def write(self, rows: DataFrame, entry: LedgerEntry, *, creates: bool = False) -> None:
        """Write ``rows`` with the transaction and the metadata of ``entry``, in one commit.

        That it returns does not mean that the rows are in the table: Delta silently ignores a transaction version it
        has already recorded. :meth:`commit` looks.

        Raises:
            Exception: whatever Spark raises; see :func:`explain`.
        """
        writer = (
            rows.write.format("delta")
            .option("txnAppId", entry.app)
            .option("txnVersion", str(entry.number))
            .option("userMetadata", entry.to_json())
        )
        if creates:
            for name, value in self.properties.items():
                writer = writer.option(name, value)
        if self.schema_changes is not SchemaChanges.FAIL:
            writer = writer.option("mergeSchema", "true")
        if entry.does.replaces:
            writer = writer.mode("overwrite").option("replaceWhere", in_places(entry.affected))
        else:
            writer = writer.mode("append")
        writer.save(spark_location(self.path))

    def try_write(self, rows: DataFrame, entry: LedgerEntry, *, creates: bool = False) -> Exception | None:
        """Write; the error, if there was one: whether the commit landed all the same is for the log to say."""
        try:
            self.write(rows, entry, creates=creates)
        except Exception as error:  # noqa: BLE001 - Spark raises what comes
            return error
        return None

    def verified(
        self, entry: LedgerEntry, failure: Exception | None, *, spark: SparkSession, ledger: Ledger
    ) -> Commit | None:
        """The commit of ``entry``, if it landed; ``None`` if another run has its number.

        Args:
            entry: what was written.
            failure: what the write raised.
            spark: the session that wrote.
            ledger: of the transaction sequence of ``entry``.

        Raises:
            TransformError, SchemaMismatchError, WriteError: nothing of it is in the table.
            LedgerUnreadableError: whether it is cannot be found out.
            StorageMismatchError: it is in a table, or in files, that are not to be seen from here.
        """
        commit = ledger.commit_of(entry.number, after=entry.base)
        check_landed(commit, failure, spark=spark, log=ledger.log, bid=entry.bid)
        if commit is None or commit.entry is None or commit.entry.bid != entry.bid:
            return None
        check_files(ledger.log, commit.version)
        return commit

    def commit(self, rows: DataFrame, entry: LedgerEntry, *, ledger: Ledger) -> Commit | None:
        """Write ``rows`` and verify the write; see :meth:`verified`."""
        return self.verified(entry, self.try_write(rows, entry), spark=rows.sparkSession, ledger=ledger)


def only_within(rows: DataFrame, extents: Mapping[Shard, Range]) -> DataFrame:
    """The same rows; the write fails if one of them is of no message in these ranges.

    A transform may give a row the place of another message, and then nobody would know what became of its own.

    Args:
        rows: to be written.
        extents: the ranges; of very many shards only those are checked that they have in common.
    """
    condition = in_ranges(extents) if len(extents) <= MOST_EXTENTS else _in_hulls(extents)
    place = f.concat_ws(" ", *(f.coalesce(f.col(name).cast("string"), f.lit("null")) for name in PLACE))
    foreign = f.raise_error(f.concat(f.lit(f"{FOREIGN_PLACE} "), place))
    return rows.where(f.when(f.expr(condition or "FALSE"), f.lit(True)).otherwise(foreign))


def _in_hulls(extents: Mapping[Shard, Range]) -> str:
    """The rows between the first and the last shard of each stream, as a SQL condition that is quick to evaluate.

    Example:
        >>> _in_hulls({Shard("orders", 3): Range(5, 9), Shard("orders", 7): Range(0, 6)})
        "(_stream = 'orders' AND _shard BETWEEN 3 AND 7 AND _sequence >= 0 AND _sequence < 9)"
    """
    found = []
    for stream in sorted({shard.stream for shard in extents}):
        own = {shard.id: part for shard, part in extents.items() if shard.stream == stream}
        start, end = min(part.start for part in own.values()), max(part.end for part in own.values())
        found.append(
            f"(_stream = '{stream}' AND _shard BETWEEN {min(own)} AND {max(own)} "
            f"AND _sequence >= {start} AND _sequence < {end})"
        )
    return " OR ".join(found)


def check_landed(
    found: object | None, failure: Exception | None, *, spark: SparkSession, log: DeltaLog, bid: str
) -> None:
    """Check the outcome of a write: an error may follow a commit that landed, and none one that was ignored.

    Args:
        found: the commit, or what stands for it; ``None`` if it is not in the log.
        failure: what the write raised.
        spark: the session that wrote.
        log: of the table.
        bid: the batch id of what was written.

    Raises:
        TransformError, SchemaMismatchError, WriteError, …: nothing of it is in the table; see :func:`explain`.
        StorageMismatchError: it is in a table that only Spark sees.
    """
    if found is None and failure is None:
        check_seen(spark, log, bid)
    elif found is None and failure is not None and not is_conflict(failure):
        raise explain(failure, table=log.path) from None


def is_conflict(error: BaseException) -> bool:
    """Whether somebody else's commit came first: look into the ledger and plan again.

    In a classic session some conflicts arrive as bare Java errors, so the text counts as well as the type.
    """
    if isinstance(error, CONFLICTS):
        return True
    said = text_of(error)
    return any(text in said for text in CONFLICT_TEXTS)
