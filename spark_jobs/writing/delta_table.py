"""Writes a batch to a Delta table in one commit, verifies it in the log, and checks that the storage is safe.

A commit is a file that may only be created if it does not exist. Where two drivers can both create it, the second one
overwrites the first. The rows of the first are then in no commit, although its write succeeded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from delta import exceptions as conflicts
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.jars import LOG_STORE_CLASS, S3_LOG_STORE_CLASS
from spark_jobs.ledger.delta_log import Commit, DeltaLog, without_values
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import ROW_PLACE, in_places, in_ranges
from spark_jobs.session import first_line
from spark_jobs.table_location import LOCAL, S3, scheme, spark_location, sql_name
from spark_jobs.writing.failures import (
    FOREIGN_PLACE,
    ROWS_CHANGED,
    catalog_unavailable,
    explain,
    first_lines,
    said_by_raise_error,
)
from spark_jobs.writing.key_history import merge_history
from spark_jobs.writing.keyed import MAX_LISTED, Keys, merge, purge
from stream_consumers.batches import Range
from stream_consumers.display import counted
from stream_consumers.errors import StorageMismatchError, UnsafeStorageError
from stream_consumers.messages import Shard
from stream_consumers.options import SchemaChanges, choose_fields

# All of Delta's exceptions are conflicts with another commit; they have no base of their own.
CONFLICTS: tuple[type[Exception], ...] = tuple(getattr(conflicts, name) for name in conflicts.__all__)
_CONFLICT = re.compile(
    r"\(?io\.delta\.exceptions\."
    r"|(?:\([\w.$]+\) |(?:\w+\.)+[\w$]+: )?\[DELTA_(?:CONCURRENT|PROTOCOL_CHANGED|METADATA_CHANGED)"
)
MAX_EXTENTS = 64
"""With more ranges than this, :func:`only_within` compares rows with one range per stream."""
HISTORY = 100
_log = logging.getLogger(__name__)
# These file systems can create a file only if it is absent, and Delta's log stores for them use that.
_SAFE_SCHEMES = frozenset({"hdfs", "viewfs", "ofs", "abfs", "abfss", "wasb", "wasbs", "gs"})
# Delta's built-in log stores, which are safe only for the schemes above.
_LOG_STORES_OF_DELTA = frozenset(
    {"S3SingleDriverLogStore", "HDFSLogStore", "LocalLogStore", "AzureLogStore", "GCSLogStore"}
)


@dataclass(frozen=True, slots=True)
class DeltaWriter:
    """The Delta table at ``path``.

    Args:
        path: a local path or a URI that Spark understands.
        properties: table properties, set when the table is created.
        schema_changes: whether the write may add new columns.
        keys: the key of a keyed table, whose batches are merged.
        new_partitions: for a rebuild, the columns that will divide the table; with ``None``, the table keeps its
            columns and partitions.
        columns: for a keyed table, the columns that a write sets, and the SQL of the value of each in rows without it.
    """

    path: str
    properties: Mapping[str, str] = field(default_factory=dict)
    schema_changes: SchemaChanges | str = SchemaChanges.FAIL
    keys: Keys | None = None
    new_partitions: Sequence[str] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choose_fields(self, schema_changes=SchemaChanges)

    def write(self, rows: DataFrame, entry: LedgerEntry, *, creates: bool = False, truncate: int | None = None) -> None:
        """Write ``rows`` with the transaction and the metadata of ``entry``, in one commit.

        A return does not prove that the rows are in the table: Delta silently ignores a transaction version that it
        has already recorded. :meth:`commit` verifies the write.

        Raises:
            Exception: any error of Spark; see :func:`explain`.
        """
        if self.keys is not None and entry.write_mode.merges:
            adds = self.schema_changes is not SchemaChanges.FAIL
            settings = _settings(entry)
            # A transform may make other keys each time that it is computed.
            is_small = entry.messages <= MAX_LISTED and not entry.transform
            if self.keys.keeps_history:
                merge_history(
                    rows,
                    self.keys,
                    self.path,
                    adds_columns=adds,
                    is_small=is_small,
                    settings=settings,
                    columns=self.columns,
                )
                return
            merge(
                rows,
                self.keys,
                self.path,
                overwrites_equal=entry.write_mode.replaces_dead_letters,
                adds_columns=adds,
                is_small=is_small,
                floor=entry.floor,
                truncate=truncate,
                settings=settings,
                columns=self.columns,
            )
            return
        writer = (
            rows.write.format("delta")
            .option("txnAppId", entry.app)
            .option("txnVersion", str(entry.number))
            .option("userMetadata", entry.to_json())
        )
        if creates:
            for name, value in self.properties.items():
                writer = writer.option(name, value)
        if entry.write_mode.rebuilds:
            if self.new_partitions is not None:
                writer = writer.option("overwriteSchema", "true").partitionBy(*self.new_partitions)
            writer.mode("overwrite").save(spark_location(self.path))
            return
        if self.schema_changes is not SchemaChanges.FAIL:
            writer = writer.option("mergeSchema", "true")
        if entry.write_mode.overwrites:
            writer = writer.mode("overwrite").option("replaceWhere", in_places(entry.affected))
        else:
            writer = writer.mode("append")
        writer.save(spark_location(self.path))

    def try_write(
        self, rows: DataFrame, entry: LedgerEntry, *, creates: bool = False, truncate: int | None = None
    ) -> Exception | None:
        """Write and return the error, if any. Only the log shows whether the commit landed despite an error."""
        try:
            self.write(rows, entry, creates=creates, truncate=truncate)
        except Exception as error:  # noqa: BLE001 - Spark raises errors of any type
            return error
        return None

    def try_purge(self, spark: SparkSession, condition: str, entry: LedgerEntry) -> Exception | None:
        """Remove rows that mark deleted keys; see :meth:`try_write` and :func:`spark_jobs.writing.keyed.purge`."""
        try:
            purge(spark, self.path, condition, settings=_settings(entry))
        except Exception as error:  # noqa: BLE001 - Spark raises errors of any type
            return error
        return None

    def verified(
        self, entry: LedgerEntry, failure: Exception | None, *, spark: SparkSession, ledger: Ledger
    ) -> Commit | None:
        """Return the commit of ``entry`` if it landed, or ``None`` if another commit came first.

        The other commit has the same transaction number, or Delta found a conflict with it.

        Args:
            entry: the entry that was written.
            failure: the error that the write raised, if any.
            spark: the session that wrote.
            ledger: the ledger of the transaction sequence of ``entry``.

        Raises:
            TransformError, SchemaMismatchError, WriteError: the table has none of its rows.
            LedgerUnreadableError: the log cannot be read to find the commit.
            StorageMismatchError: Spark wrote to a table, or to files, that this process does not see.
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


def _settings(entry: LedgerEntry) -> Mapping[str, str]:
    """Return the settings of a session, from which Delta takes the transaction and the metadata of a SQL statement.

    Spark replaces ``${env:NAME}`` and the like in a setting by secrets of its process. The metadata may have text of a
    message, like a floor, so each dollar sign is escaped.
    """
    return {
        "spark.databricks.delta.write.txnAppId": entry.app,
        "spark.databricks.delta.write.txnVersion": str(entry.number),
        "spark.databricks.delta.commitInfo.userMetadata": entry.to_json().replace("$", r"\u0024"),
    }


def compute_state(spark: SparkSession, table: str) -> Future[None]:
    """Let Delta compute the state of a table in a thread; it keeps the state until the next commit.

    Delta looks up the transaction number of a write in this state. Computing it takes most of the time of a small
    commit, and Delta would otherwise begin with it at the write. The write gives the same result without it, and
    computes the state itself if this fails, or if another commit lands in between.

    Args:
        spark: the session that will write.
        table: its path or URI.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="table-state")
    computing = pool.submit(_compute_state, spark, table)
    pool.shutdown(wait=False)
    return computing


def _compute_state(spark: SparkSession, table: str) -> None:
    try:
        spark.sql(f"DESCRIBE DETAIL {sql_name(table)}").collect()
    except Exception as error:  # noqa: BLE001 - Spark raises errors of any type
        _log.debug("Spark did not compute the state of %s before the write: %s", table, type(error).__name__)


def only_within(rows: DataFrame, extents: Mapping[Shard, Range]) -> DataFrame:
    """Return the same rows, whose write fails if a row has the place of a message outside these ranges.

    A transform may give a row the place of another message. The fate of its own message would then be unknown.

    Args:
        rows: the rows to write.
        extents: the ranges; above :data:`MAX_EXTENTS`, only one range per stream is checked.
    """
    condition = in_ranges(extents) if len(extents) <= MAX_EXTENTS else _in_hulls(extents)
    place = f.concat_ws(" ", *(f.coalesce(f.col(name).cast("string"), f.lit("null")) for name in ROW_PLACE))
    foreign = f.raise_error(f.concat(f.lit(f"{FOREIGN_PLACE} "), place))
    return rows.where(f.when(f.expr(condition or "FALSE"), f.lit(True)).otherwise(foreign))


def _in_hulls(extents: Mapping[Shard, Range]) -> str:
    """Return a SQL condition for rows within the hull of the ranges of each stream; it is quick to evaluate.

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
    """Check the outcome of a write: it may raise although its commit landed, and succeed although Delta ignored it.

    Args:
        found: any value if the commit is in the log; ``None`` if it is not.
        failure: the error that the write raised, if any.
        spark: the session that wrote.
        log: the log of the table.
        bid: the batch id of the write.

    Raises:
        TransformError, SchemaMismatchError, WriteError, …: the table has none of its rows; see :func:`explain`.
        StorageMismatchError: Spark wrote to a table that this process does not see.
    """
    if found is None and failure is None:
        check_seen(spark, log, bid)
    elif found is None and failure is not None and not is_conflict(failure):
        raise explain(failure, table=log.path) from None


def is_conflict(error: BaseException) -> bool:
    """Return whether another commit came first, so that the batch has to be planned again.

    A write of :func:`unless_changed` may have found that. A classic session raises some conflicts as bare Java errors,
    so the start of a line counts as well as the type.
    """
    if isinstance(error, CONFLICTS):
        return True
    return any(map(_CONFLICT.match, first_lines(error))) or ROWS_CHANGED in said_by_raise_error(error)


def log_store_of(spark: SparkSession, table: str) -> str:
    """Return the class of the log store configured for the file system of the table, or ``""``."""
    chosen = spark.conf.get(f"spark.delta.logStore.{scheme(table)}.impl", "")
    return str(chosen or spark.conf.get("spark.delta.logStore.class", "") or "")


def check_log_store(spark: SparkSession, table: str, *, single_writer: bool) -> None:
    """Check that no second driver can overwrite commits of the table.

    Args:
        spark: the session that writes.
        table: the path or URI of the table.
        single_writer: whether the user guarantees that no two drivers write it at the same time.

    Raises:
        UnsafeStorageError: a second driver could; it names the missing setting.
    """
    kind, chosen = scheme(table), log_store_of(spark, table)
    is_own = bool(chosen) and chosen.rpartition(".")[2] not in _LOG_STORES_OF_DELTA
    if single_writer or kind in _SAFE_SCHEMES or is_own:
        return
    setting = f"spark.delta.logStore.{kind}.impl"
    if kind == LOCAL:
        remedy = f"Add spark_jobs.session.delta_spark_config() to its settings, with {setting}={LOG_STORE_CLASS}"
    elif kind in S3:
        remedy = (
            f"Add spark_jobs.session.delta_spark_config({table!r}) to its settings before it starts, with {setting}="
            f"{S3_LOG_STORE_CLASS}, which creates a commit only if it is absent"
        )
    else:
        remedy = f"Set {setting} to a log store that creates a commit only if it is absent"
    raise UnsafeStorageError(
        f"{chosen or 'the default log store of Delta'} lets two drivers that write {table} at the same time overwrite "
        "each other's commits",
        remedy=f"{remedy}; or, if no two drivers ever write this table at the same time, set single_writer=True.",
    )


def check_unseen(spark: SparkSession, log: DeltaLog) -> None:
    """Check, before a table is created, that Spark sees no table that this process does not see.

    Raises:
        StorageMismatchError: it sees one.
    """
    try:
        location = _location(spark, log.path)
    except AnalysisException as error:
        if away := catalog_unavailable(error):
            raise away from None
        return
    except Exception as error:  # noqa: BLE001 - a classic session raises bare errors of Java
        raise explain(error, table=log.path) from None
    if log.snapshot() is None:
        raise _mismatch(f"Spark sees a table at {location}", log)


def check_seen(spark: SparkSession, log: DeltaLog, bid: str) -> None:
    """Check that Spark does not see a write that succeeded but is not in the log that this process reads.

    Args:
        spark: the session that wrote.
        log: the log of the table.
        bid: the batch id of the write.

    Raises:
        StorageMismatchError: Spark sees it.
    """
    try:
        history = spark.sql(f"DESCRIBE HISTORY {sql_name(log.path)} LIMIT {HISTORY}")
        found = [row["version"] for row in history.collect() if bid in (row["userMetadata"] or "")]
    except AnalysisException:
        return
    if found:
        raise _mismatch(f"Spark wrote version {found[0]} of {_location(spark, log.path)}", log)


def check_files(log: DeltaLog, version: int) -> None:
    """Check that a local table has the files of a commit; remote executors would have written to their own disks.

    Raises:
        StorageMismatchError: files of the commit are missing.
    """
    missing = log.missing_files(version)
    if missing:
        raise StorageMismatchError(
            f"version {version} of {log.path} has "
            f"{counted(len(missing), 'file')} not on this machine, like {without_values(missing[0])}",
            remedy="The executors wrote them to their own disks. Stop the runs, undo the commit with RESTORE TABLE … "
            f"TO VERSION AS OF {version - 1}, and set a path or URI that this machine and all executors share. Nothing "
            "was committed to the broker, and the next run reads these messages again.",
        )


def unless_changed(rows: DataFrame, log: DeltaLog, *, version: int, where: str = "TRUE", fails: str) -> DataFrame:
    """Return the same rows, whose write fails if other rows of the table come, go or change before it.

    A write removes what the table has when Delta begins it, and that may be later than the plan. A RESTORE takes no
    transaction number, and the shards of a group may have sequences of their own, so that the number of the batch is
    still free. Delta reads the table for this check in the version whose rows it removes. The check is a part of the
    frame that has no rows, because Spark would not compute a condition for a batch that it knows to be empty. Apply it
    after all conditions that raise errors: Spark may compute them for that part as well.

    Args:
        rows: the rows to write.
        log: the log of the table.
        version: the version from which the batch was planned.
        where: selects the rows of the table that must not change.
        fails: the text of the error.
    """
    known = _identity_of(read_table(rows.sparkSession, log, version=version).where(where), "known")
    found = _identity_of(read_table(rows.sparkSession, log).where(where), "found")
    is_changed = f.when(f.expr("known <=> found"), f.lit(False)).otherwise(f.raise_error(f.lit(fails)))
    return rows.unionByName(known.crossJoin(found).where(is_changed).select(), allowMissingColumns=True)


def _identity_of(rows: DataFrame, name: str) -> DataFrame:
    """Return one value that differs if the rows are others: a data file never changes, and a new one has a new name.

    Two rows of one message cancel each other out in ``bit_xor``, but not in ``sum``.
    """
    row = (rows.metadataColumn("_metadata")["file_path"], *map(f.col, ROW_PLACE))
    return rows.agg(f.struct(f.sum(f.hash(*row)), f.bit_xor(f.xxhash64(*row))).alias(name))


def read_table(spark: SparkSession, log: DeltaLog, *, version: int | None = None) -> DataFrame:
    """Return a frame that reads the table.

    Args:
        spark: the session that reads.
        log: the log of the table.
        version: the version of the table; by default the newest one at the time of each read.

    Raises:
        StorageMismatchError: Spark sees no table.
        UnsupportedError, LedgerUnreadableError, …: its metadata may let Spark run code; see
            :meth:`DeltaLog.check_version`.
    """
    log.check_version(version)
    location = spark_location(log.path)
    reader = spark.read.format("delta")
    try:
        frame = (reader if version is None else reader.option("versionAsOf", version)).load(location)
        frame.schema  # noqa: B018 - a Connect session resolves the table only now
    except AnalysisException as error:
        raise _mismatch(f"Spark sees no table at {location} ({first_line(error)})", log) from None
    except Exception as error:  # noqa: BLE001 - a classic session raises bare errors of Java
        raise explain(error, table=log.path) from None
    return frame


def _location(spark: SparkSession, table: str) -> str:
    return str(spark.sql(f"DESCRIBE DETAIL {sql_name(table)}").collect()[0]["location"])


def _mismatch(what_spark_sees: str, log: DeltaLog) -> StorageMismatchError:
    snapshot = log.snapshot()
    ours = "no table" if snapshot is None else f"version {snapshot.version} without that commit"
    return StorageMismatchError(
        f"{what_spark_sees}, but this process sees {ours} at {log.path}",
        remedy="Set a path or URI under which this process, the Spark driver (with Spark Connect: the server) and its "
        "executors reach the same storage, with the same credentials and endpoint. Nothing was committed to the "
        "broker.",
    )
