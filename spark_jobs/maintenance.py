"""Maintains the tables of a group, and keeps its ledger readable.

Many small files are joined, and files that no restorable version needs are deleted. A group that has written nothing
for a long time writes its state again, before the commits with this state are cleaned from the Delta log. Dead letters
of batches that never landed are deleted, before the commits that show this are cleaned.

Spark writes these commits, because delta-rs does not use the log store of the table, which alone prevents that two
commits overwrite each other (:mod:`spark_jobs.writing.delta_table`), and cannot write tables with deletion vectors or
column mapping.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from deltalake import DeltaTable
from pyarrow.fs import FileSelector
from pyspark.sql import Row, SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.target_table import commit_empty, fence_abandoned
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.entries import KEEPER, EntryFields
from spark_jobs.ledger.ledger import LOG_RETENTION, LedgerState, interval_ms
from spark_jobs.purge import purge_deleted
from spark_jobs.reading.spark_types import properties
from spark_jobs.session import check_session
from spark_jobs.table_location import absolute_location, folders_above, sql_name
from spark_jobs.writing.delta_table import HISTORY, check_log_store, is_conflict
from spark_jobs.writing.failures import explain
from stream_consumers.errors import InvalidOptionError, StreamNotFoundError

FILE_RETENTION = "delta.deletedFileRetentionDuration"
SET_FILE_RETENTION = "stream-assets.deletedFileRetentionDuration"
"""The property with the file retention that maintenance has set; if the table has another one, a user has chosen it."""
DEFAULT_LOG_RETENTION = "interval 30 days"
MIN_FILE_RETENTION = "interval 1 day"
MIN_FILE_RETENTION_MS = 86_400_000
_PARTS = 4
_INNER_LOG = "/_delta_log/"
"""A part of the paths of commits of other tables, relative to the folder of a table."""


@dataclass(frozen=True, slots=True)
class TableMaintenance:
    """The result of the maintenance of one table.

    Args:
        table: the path or URI of the table.
        version: the version of the table afterwards.
        files_before: the number of files that were joined.
        files_after: the number of files that they were joined into.
        deleted_files: the number of deleted files; ``None`` if Delta does not report it.
        is_kept: whether the state of the ledger was written again.
        is_busy: whether another commit came first, so that files are joined the next time.
        purged_rows: the rows of deleted keys that were removed.
    """

    table: str
    version: int
    files_before: int = 0
    files_after: int = 0
    deleted_files: int | None = 0
    is_kept: bool = False
    is_busy: bool = False
    purged_rows: int = 0


def maintain(
    spark: SparkSession, ingestion: Ingestion, *, purge_after_days: float | None = None
) -> list[TableMaintenance]:
    """Maintain the table of an ingestion and its dead-letter table, if there is one, even while runs write them.

    Args:
        spark: a session that can write Delta tables.
        ingestion: group and table.
        purge_after_days: remove rows of deleted keys that are older; see :mod:`spark_jobs.purge`. By default none.

    Returns:
        The results, with the main table first.

    Raises:
        StreamNotFoundError: there is no table yet.
        InvalidOptionError: the file retention is so short that a batch in flight could lose its files; or the folder of
            the table is in that of another table, or has one in it.
        LedgerTruncatedError: required commits were already cleaned from the log.
        UnsafeStorageError: another driver could overwrite commits of this one.
        WriteError: Spark failed; run the maintenance again.
    """
    check_session(spark)
    check_log_store(spark, ingestion.table, single_writer=ingestion.single_writer)
    log, letters = ingestion.ledger().log, ingestion.dead_letters().log()
    if log.snapshot() is None:
        raise StreamNotFoundError(
            f"there is no table {ingestion.table}",
            remedy="Run the asset first, which creates it.",
        )
    is_kept = keep_alive(spark, ingestion)
    purged = 0
    if purge_after_days is not None:
        purged = purge_deleted(spark, ingestion, older_than=timedelta(days=purge_after_days))
    done = [replace(_maintain(spark, log), is_kept=is_kept, purged_rows=purged)]
    if letters.snapshot() is not None:
        done.append(_maintain(spark, letters))
    return done


def keep_alive(spark: SparkSession, ingestion: Ingestion) -> bool:
    """Write the state of the ledger again if the commit with the newest state is old; return whether that was done.

    A write to the table cleans commits from the log that are older than ``delta.logRetentionDuration``. A group that
    wrote nothing for that long, while others did, would have no readable commit left.

    Dead letters that can never count are deleted first, because the commits that show this may be cleaned, too.
    """
    own = replace(ingestion, member=KEEPER, shard=None)
    ledger, dead_letters, is_kept = own.ledger(), own.dead_letters(), False

    def checked() -> LedgerState:
        state = ledger.read()
        return dead_letters.clean_up(spark, ledger, state).added_to(state)

    def fields(state: LedgerState) -> EntryFields | None:
        nonlocal is_kept
        is_kept = _is_old(state, ledger.log)
        return {} if is_kept else None

    state = ledger.read()
    if state.full is None:
        return False
    fence_abandoned(spark, own, dead_letters.clean_up(spark, ledger, state).abandoned)
    if _is_old(state, ledger.log):
        commit_empty(spark, own, "keep", fields, read=checked)
    return is_kept


def _is_old(state: LedgerState, log: DeltaLog) -> bool:
    snapshot = log.snapshot()
    if state.full is None or snapshot is None:
        return False
    kept = interval_ms(snapshot.configuration.get(LOG_RETENTION, DEFAULT_LOG_RETENTION))
    age = time.time() * 1000 - (state.full.timestamp_ms or 0)
    # The length of an interval of months is unknown, so the state is then written each time.
    return state.full.is_planned_before_restore or kept is None or age > kept / _PARTS


def _maintain(spark: SparkSession, log: DeltaLog) -> TableMaintenance:
    log.check_version()
    check_own_folder(log)
    try:
        _keep_files(spark, log)
        joined = _first(spark, f"OPTIMIZE {sql_name(log.path)}")["metrics"]
        _first(spark, f"VACUUM {sql_name(log.path)}")
        before, after = int(joined["numFilesRemoved"]), int(joined["numFilesAdded"])
        done = TableMaintenance(log.path, -1, before, after, _deleted_files(spark, log))
    except Exception as error:  # noqa: BLE001 - a classic session raises bare errors of Java
        if not is_conflict(error):
            raise explain(error, table=log.path) from None
        done = TableMaintenance(log.path, -1, is_busy=True)
    snapshot = log.snapshot()
    assert snapshot is not None  # it was there
    return replace(done, version=snapshot.version)


def check_own_folder(log: DeltaLog) -> None:
    """Refuse a folder that is in the folder of another table, or has another table in it.

    VACUUM deletes each old file below the folder that the log of this table does not name, also those of other tables.

    Raises:
        InvalidOptionError: there is such a table.
        TableUnreadableError, LedgerUnreadableError: the storage cannot be read.
    """
    with log.reading():
        below = log.files().get_file_info(FileSelector("", recursive=True))
    other = next((f"{log.path}/{one.path.partition(_INNER_LOG)[0]}" for one in below if _INNER_LOG in one.path), None)
    for folder in folders_above(absolute_location(log.path)):
        # A folder that cannot be read is none that this client could have written a table into.
        with suppress(Exception):
            if DeltaTable.is_deltatable(folder, log.storage_options):
                other = folder
    if other is not None:
        raise InvalidOptionError(
            f"one of the tables {log.path} and {other} is in the folder of the other, so that VACUUM would delete its "
            "files",
            remedy="Move one of them to another folder. If one is not a table, remove its folder _delta_log.",
            other=other,
        )


def _keep_files(spark: SparkSession, log: DeltaLog) -> None:
    snapshot = log.snapshot()
    wanted = file_retention(snapshot.configuration if snapshot else {}, table=log.path)
    if wanted:
        spark.sql(f"ALTER TABLE {sql_name(log.path)} SET TBLPROPERTIES {properties(wanted)}")


def file_retention(configuration: Mapping[str, str], *, table: str) -> Mapping[str, str]:
    """Return the table properties that keep files as long as the log; empty if nothing needs to be set.

    A RESTORE to a version in the log needs its files. By default Delta keeps files for 7 days and the log for 30. The
    retention is a table property, because Delta reads it from nowhere else (``RETAIN`` is ignored), and because it
    then holds for every other VACUUM, too. A second property records the value that maintenance has set, so that it
    follows the log retention unless a user chooses another one.

    Args:
        configuration: the properties of the table.
        table: the path of the table, for the error.

    Raises:
        InvalidOptionError: a user has chosen less than a day, so that a batch in flight could lose its files.

    Example:
        >>> file_retention({"delta.logRetentionDuration": "interval 60 days"}, table="lake/orders")[FILE_RETENTION]
        'interval 60 days'
        >>> file_retention({"delta.deletedFileRetentionDuration": "interval 7 days"}, table="lake/orders")
        {}
    """
    chosen = configuration.get(FILE_RETENTION)
    if chosen is None or chosen == configuration.get(SET_FILE_RETENTION):
        kept = configuration.get(LOG_RETENTION, DEFAULT_LOG_RETENTION)
        length = interval_ms(kept)
        if length is not None and length < MIN_FILE_RETENTION_MS:
            kept = MIN_FILE_RETENTION
        return {} if kept == chosen else {FILE_RETENTION: kept, SET_FILE_RETENTION: kept}
    length = interval_ms(chosen)
    if length is not None and length < MIN_FILE_RETENTION_MS:
        raise InvalidOptionError(
            f"{table} lets files be deleted after {chosen!r} ({FILE_RETENTION}), even those of a batch in flight",
            remedy=f"Set it to a day or more; or unset it, to keep files as long as the log ({LOG_RETENTION}).",
        )
    return {}


def _deleted_files(spark: SparkSession, log: DeltaLog) -> int | None:
    history = spark.sql(f"DESCRIBE HISTORY {sql_name(log.path)} LIMIT {HISTORY}")
    ends = (row for row in history.collect() if row["operation"] == "VACUUM END")
    metrics = next((row["operationMetrics"] for row in ends), None) or {}
    return int(metrics["numDeletedFiles"]) if "numDeletedFiles" in metrics else None


def _first(spark: SparkSession, statement: str) -> Row:
    return spark.sql(statement).collect()[0]
