"""What the protocol needs of the storage under a table: commits are put if absent, and Spark and we see the same.

A commit is a file that must be absent when it is put. Where two drivers may both put it, the second one overwrites the
first, whose rows are in no commit then, although it was told that they are.
"""

from __future__ import annotations

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from spark_jobs.jars import LOG_STORE_CLASS, S3_LOG_STORE_CLASS
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.session import first_line
from spark_jobs.table_location import LOCAL, S3, scheme, spark_location, sql_name
from spark_jobs.writing.failures import catalog_away, explain
from stream_consumers.errors import StorageMismatchError, UnsafeStorageError
from stream_consumers.wording import counted

HISTORY = 100
# Their renames, or their own conditions, put a file only if it is absent, and Delta's log stores for them use that.
_SAFE_SCHEMES = frozenset({"hdfs", "viewfs", "ofs", "abfs", "abfss", "wasb", "wasbs", "gs"})
# What Delta takes by itself, and what is right for the schemes above only.
_LOG_STORES_OF_DELTA = frozenset(
    {"S3SingleDriverLogStore", "HDFSLogStore", "LocalLogStore", "AzureLogStore", "GCSLogStore"}
)


def log_store_of(spark: SparkSession, table: str) -> str:
    """The class of the log store that somebody has chosen for the file system of the table; empty if nobody has."""
    chosen = spark.conf.get(f"spark.delta.logStore.{scheme(table)}.impl", "")
    return str(chosen or spark.conf.get("spark.delta.logStore.class", "") or "")


def check_log_store(spark: SparkSession, table: str, *, single_writer: bool) -> None:
    """Refuse a table that a second driver could overwrite commits of.

    Args:
        spark: the session that writes.
        table: where the table is.
        single_writer: the user says that no two drivers write it at the same time.

    Raises:
        UnsafeStorageError: with the setting that is missing.
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
            f"{S3_LOG_STORE_CLASS}, which puts a commit only if it is absent"
        )
    else:
        remedy = f"Set {setting} to a log store that puts a commit only if it is absent"
    raise UnsafeStorageError(
        f"{chosen or 'the log store that Delta takes by itself'} lets two drivers that write {table} at the same time "
        "overwrite each other's commits",
        remedy=f"{remedy}; or, if no two drivers ever write this table at the same time, say so: single_writer=True.",
    )


def check_unseen(spark: SparkSession, log: DeltaLog) -> None:
    """Before a table is made: Spark must not have one where we see none.

    Raises:
        StorageMismatchError: it has.
    """
    try:
        location = _location(spark, log.path)
    except AnalysisException as error:
        if away := catalog_away(error):
            raise away from None
        return
    except Exception as error:  # noqa: BLE001 - a classic session raises bare errors of Java
        raise explain(error, table=log.path) from None
    if log.snapshot() is None:
        raise _mismatch(f"Spark sees a table at {location}", log)


def check_seen(spark: SparkSession, log: DeltaLog, bid: str) -> None:
    """After a write that raised nothing and that we do not see: does Spark see it?

    Args:
        spark: the session that wrote.
        log: of the table, as we see it.
        bid: the batch id of what was written.

    Raises:
        StorageMismatchError: it does.
    """
    try:
        history = spark.sql(f"DESCRIBE HISTORY {sql_name(log.path)} LIMIT {HISTORY}")
        found = [row["version"] for row in history.collect() if bid in (row["userMetadata"] or "")]
    except AnalysisException:
        return
    if found:
        raise _mismatch(f"Spark wrote version {found[0]} of {_location(spark, log.path)}", log)


def check_files(log: DeltaLog, version: int) -> None:
    """After a commit to a local table: executors on other machines would have written its files to their own disks.

    Raises:
        StorageMismatchError: files of the commit are not there.
    """
    missing = log.missing_files(version)
    if missing:
        raise StorageMismatchError(
            f"version {version} of {log.path} has "
            f"{counted(len(missing), 'file')} not on this machine, like {missing[0]}",
            remedy="The executors wrote them elsewhere. Stop the runs, go back with RESTORE TABLE … TO VERSION AS OF "
            f"{version - 1}, and give the table as a path or URI that this machine and all executors share. Nothing "
            "was committed to the broker, and after the RESTORE these messages are read again.",
        )


def read_table(spark: SparkSession, log: DeltaLog, *, version: int | None = None) -> DataFrame:
    """The table as Spark reads it.

    Args:
        spark: reads it.
        log: of the table.
        version: of the table; without it the newest one, whenever it is read.

    Raises:
        StorageMismatchError: Spark sees none.
    """
    location = spark_location(log.path)
    reader = spark.read.format("delta")
    try:
        frame = (reader if version is None else reader.option("versionAsOf", version)).load(location)
        frame.schema  # noqa: B018 - a Connect session looks only now
    except AnalysisException as error:
        raise _mismatch(f"Spark sees no table at {location} ({first_line(error)})", log) from None
    except Exception as error:  # noqa: BLE001 - a classic session raises bare errors of Java
        raise explain(error, table=log.path) from None
    return frame


def _location(spark: SparkSession, table: str) -> str:
    return str(spark.sql(f"DESCRIBE DETAIL {sql_name(table)}").collect()[0]["location"])


def _mismatch(what_spark_sees: str, log: DeltaLog) -> StorageMismatchError:
    snapshot = log.snapshot()
    ours = "no table" if snapshot is None else f"one at version {snapshot.version} that does not have it"
    return StorageMismatchError(
        f"{what_spark_sees}, but this process sees {ours} at {log.path}",
        remedy="Give the table as a path or URI under which this process, the Spark driver (with Spark Connect: the "
        "server) and its executors reach the same storage, with the same credentials and endpoint. Nothing was "
        "committed to the broker.",
    )
