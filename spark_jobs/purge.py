"""Removes rows that mark deleted keys from a keyed table with ``sequence_by``, once no change needs them.

Such a row stops an older change, which arrives late or is read again, from inserting the key again. Where it is gone,
the floor of the table does so instead (:mod:`spark_jobs.writing.floor`): no change below it inserts a row. A purge
takes a number of the transaction sequence of the table, so that each batch in flight is planned again, with the new
floor.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.source_checks import check_keys
from spark_jobs.batches.target_table import MAX_RACES, lost_races
from spark_jobs.ledger.entries import PURGE
from spark_jobs.ledger.fold import higher_floor
from spark_jobs.ledger.table_rows import TIME
from spark_jobs.writing.delta_table import DeltaWriter, read_table
from spark_jobs.writing.failures import translating_spark_errors
from spark_jobs.writing.floor import floor_above, floor_of, floor_sql
from spark_jobs.writing.keyed import DELETED, SEQUENCE_BY, Keys
from stream_consumers.errors import InvalidOptionError


def purge_deleted(spark: SparkSession, ingestion: Ingestion, *, older_than: timedelta) -> int:
    """Remove rows of deleted keys that are older than a time and than all later changes; return how many.

    The floor is the lowest value of ``sequence_by`` among the rows of newer messages. So while newer messages come in
    their order, none is below the floor. A table without newer messages keeps its floor.

    Args:
        spark: a session that can write Delta tables.
        ingestion: group, table and keys.
        older_than: the least age of the message that deleted the key.

    Raises:
        InvalidOptionError: the table has no such rows, or has other keys.
        UnsupportedError: the type of ``sequence_by`` has no floor.
        WriteError: Spark failed, or other runs were always faster.
    """
    check_has_deleted_rows(ingestion.keys, table=ingestion.table)
    own = replace(ingestion, member=PURGE, shard=None)
    ledger, writer = own.ledger(), DeltaWriter(own.table)
    cutoff = datetime.now(timezone.utc) - older_than
    for _ in range(MAX_RACES):
        state = ledger.read()
        if state.newest is None:
            return 0
        check_keys(state, own)
        table = read_table(spark, ledger.log, version=state.version)
        kind = table.schema[SEQUENCE_BY].dataType
        is_old = f.coalesce(f.col(TIME) < f.lit(cutoff), f.lit(False))
        is_purged = f"{DELETED} AND {TIME} < TIMESTAMP '{cutoff.isoformat()}' AND {SEQUENCE_BY} < "
        with translating_spark_errors(own.table):
            newer = table.where(~is_old).agg(f.min(floor_of(f.col(SEQUENCE_BY), kind)).alias("lowest")).collect()
            floor = higher_floor(state.floor, newer[0]["lowest"])
            if floor is None:
                return 0
            # If a far value is the only newer one, it must not raise the floor above later changes.
            purged = table.where(is_purged + floor_sql(floor, kind))
            above = purged.agg(floor_above(f.max(SEQUENCE_BY), kind).alias("above")).collect()[0]["above"]
            if above is None:
                return 0
            floor = higher_floor(state.floor, min(floor, above))
            assert floor is not None  # the other one is a floor
            condition = is_purged + floor_sql(floor, kind)
            count = table.where(condition).count()
        if not count:
            return 0
        entry = ledger.entry(PURGE, state, purged_below=floor)
        failure = writer.try_purge(spark, condition, entry)
        if writer.verified(entry, failure, spark=spark, ledger=ledger) is not None:
            return count
    raise lost_races(ledger, own)


def check_has_deleted_rows(keys: Keys | None, *, table: str) -> None:
    """Refuse to purge a table that keeps no rows of deleted keys.

    Args:
        keys: the keys of the table, if it is keyed.
        table: its name, for the error.

    Raises:
        InvalidOptionError: it keeps none.
    """
    if keys is None or not keys.sequence_by or keys.keeps_history:
        raise InvalidOptionError(
            f"{table} keeps no rows of deleted keys, so there is nothing to purge",
            remedy="Leave purge_after_days out: only a keyed table with sequence_by, of SCD type 1, has such rows.",
        )
