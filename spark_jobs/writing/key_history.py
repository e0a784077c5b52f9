"""Keyed tables of SCD type 2: a row per change of a key, which is valid until the next change of the key.

A deletion has a row, too, with ``_deleted`` true, because a change that is older than the deletion may come later. When
a row is valid follows from the order of all changes of its key. So a merge writes the rows of the batch, and computes
the extents of all rows of its keys, in the batch and in the table. Then merges give the same table in whatever order
changes arrive, and however often, and nothing has to be merged again.

This needs the rows of the table as of the version that the MERGE changes: Delta reads a table that a MERGE changes and
joins in one version, and refuses the MERGE if another commit has changed those rows since. ``tests/model/keyed.py``
shows it (``h7``), and that rows which were read before are wrong (``h6``).
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as f

from spark_jobs.decoding.ddl import quoted
from spark_jobs.ledger.table_rows import ROW_PLACE, TIME
from spark_jobs.reading.rejection import REASON
from spark_jobs.table_location import spark_location
from spark_jobs.writing.failures import NO_VALUE
from spark_jobs.writing.keyed import (
    DELETED,
    EXTENT,
    FOUND,
    IS_CURRENT,
    NEIGHBOURS,
    SEQUENCE_BY,
    UNAVAILABLE,
    VALID_FROM,
    VALID_TO,
    Keys,
    absent,
    assigned,
    in_order,
    is_sound,
    joined,
    listed_keys,
    matches,
    run_merge,
    value_columns,
    with_checked_marks,
    with_neighbours,
    within,
)

_OF_ROWS = (*ROW_PLACE, TIME, DELETED)


def start_column(keys: Keys) -> str:
    """Return the name of the column with the moment from which a change is valid."""
    return TIME if keys.is_ordered_by_position else SEQUENCE_BY


def with_extents(rows: DataFrame, keys: Keys) -> DataFrame:
    """Return rows with the extents that follow from the order of the changes of a key.

    Where positions order them, timestamps may go back, so that a row is valid from the greatest one of the key so far.
    Of several rows that are valid from one moment, the extents of all but the last one are empty.

    Args:
        rows: all rows of some keys.
        keys: the key and the order.
    """
    order = in_order(keys)
    start = f.max(start_column(keys)).over(_up_to_row(keys))
    is_last = f.lead(f.lit(True)).over(order).isNull()
    started = rows.withColumn(VALID_FROM, start)
    return started.withColumns({VALID_TO: f.lead(VALID_FROM).over(order), IS_CURRENT: is_last & ~f.col(DELETED)})


def changed_rows(changes: DataFrame, keys: Keys, table: DataFrame) -> DataFrame:
    """Return the changes as rows of the table, and those rows of the table whose extents they change.

    The rows of the table have only what a merge writes of them, and their extent until now. The read of the result
    fails if the order of the changes of a key is unknown, or a change lacks a value that no change before it has.

    Args:
        changes: the changes of a batch; see :meth:`Keys.changes`. They are read several times.
        keys: the key and the order.
        table: the rows of the table.
    """
    rows = _with_rows(with_checked_marks(changes, keys), keys, table)
    if UNAVAILABLE in changes.columns:
        rows = _with_values(rows, keys)
    rows = with_neighbours(with_extents(rows, keys), keys, in_order(keys))
    is_changed = f.col(FOUND).isNull() | ~f.col(FOUND).eqNullSafe(f.struct(*EXTENT))
    if UNAVAILABLE in changes.columns:
        is_changed |= f.size(UNAVAILABLE) > 0
    return rows.where(is_sound(keys) & is_changed).drop(*NEIGHBOURS)


def lacking_history(changes: DataFrame, keys: Keys, table: DataFrame) -> DataFrame:
    """Return the places of changes that lack a value which no change before them has, with the reason.

    A change that lacks a value needs a change before it that has all values, after the last deletion; another one that
    lacks values is among these places itself, or has such a change before it.

    Args:
        changes: the changes of a batch; see :meth:`Keys.changes`.
        keys: the key and the order.
        table: the rows of the table.
    """
    rows = _with_rows(changes, keys, table)
    names = value_columns(rows.columns, keys)
    lost = f.filter(UNAVAILABLE, lambda name: name.isin(names))
    # The rows of the table have all their values.
    lacks = (f.size(lost) > 0) & f.col(FOUND).isNull()
    is_gone = f.last_value(f.when(f.col(DELETED), True).when(~lacks, False), ignoreNulls=True).over(_up_to_row(keys))
    why = f.concat(f.lit(f"{NO_VALUE} "), f.array_join(lost, ", "))
    reason = f.when(lacks & ~f.col(DELETED) & f.coalesce(is_gone, f.lit(True)), why)
    return rows.select(*ROW_PLACE, reason.alias(REASON)).where(f.col(REASON).isNotNull())


def _with_rows(changes: DataFrame, keys: Keys, table: DataFrame) -> DataFrame:
    """Return the changes, and the rows of their keys that others have made, with the extents of these rows."""
    own = [*keys.columns, *ROW_PLACE]
    needed = changes.columns if UNAVAILABLE in changes.columns else [*keys.columns, *_OF_ROWS, *keys.ordering]
    known = {name.lower() for name in table.columns}
    there = [quoted(name) for name in dict.fromkeys((*needed, *EXTENT)) if name.lower() in known]
    others = table.select(*there).join(changes.select(*map(quoted, keys.columns)), [*keys.columns], "left_semi")
    others = others.join(changes.select(*map(quoted, own)), own, "left_anti")
    found = others.withColumn(FOUND, f.struct(*EXTENT)).drop(*EXTENT)
    rows = changes.drop(*EXTENT).unionByName(found, allowMissingColumns=True)
    if UNAVAILABLE in changes.columns:
        # The rows that another decoder made lack no value.
        rows = rows.withColumn(UNAVAILABLE, f.coalesce(UNAVAILABLE, f.array().cast("array<string>")))
    return rows


def _with_values(rows: DataFrame, keys: Keys) -> DataFrame:
    """Take each value that a change does not have from the last change before it that has it, up to the last deletion.

    The names of these columns stay in the row, so that an older change that comes later still gives it its values.
    """
    up_to_row, is_deletion = _up_to_row(keys), f.col(DELETED)

    def value_of(name: str) -> Column:
        column, lacks = f.col(quoted(name)), f.array_contains(UNAVAILABLE, name)
        known = f.when(is_deletion | ~lacks, f.struct(column.alias("value"), DELETED))
        last = f.last_value(known, ignoreNulls=True).over(up_to_row)
        is_missing = ~is_deletion & lacks & f.coalesce(last[DELETED], f.lit(True))
        return f.when(is_missing, f.raise_error(f.lit(f"{NO_VALUE} {name}"))).otherwise(last["value"])

    return rows.withColumns({name: value_of(name) for name in value_columns(rows.columns, keys)})


def _up_to_row(keys: Keys) -> WindowSpec:
    return in_order(keys).rowsBetween(Window.unboundedPreceding, Window.currentRow)


def merge_history(
    changes: DataFrame,
    keys: Keys,
    table: str,
    *,
    adds_columns: bool,
    is_small: bool,
    settings: Mapping[str, str],
    columns: Mapping[str, str] | None = None,
) -> None:
    """Merge changes into a table with a row per change, in one commit; see :func:`spark_jobs.writing.keyed.merge`.

    Args:
        changes: see :meth:`Keys.changes`.
        keys: the key and the order.
        table: its path or URI.
        adds_columns: whether the table gets columns that it does not have.
        is_small: whether to list the keys of the changes; see :func:`spark_jobs.writing.keyed.listed_keys`.
        settings: the settings of the session that merges.
        columns: the columns of the table that a write sets, and the SQL of the value of each in rows that lack it.

    Raises:
        Exception: whatever Spark raises.
    """
    # Computed once, so that a transform cannot return other keys for the rows of the table than for those of the batch.
    changes = changes.persist()
    try:
        listed = listed_keys(changes, keys) if is_small else {}
        found = changes.sparkSession.read.format("delta").load(spark_location(table))
        found = found.where(" AND ".join(within(listed)) or "TRUE")
        lacking = absent(columns or {}, changes)
        statement = history_statement(
            changes.columns, keys, table, adds_columns=adds_columns, absent=lacking, listed=listed
        )
        run_merge(statement, changed_rows(changes, keys, found), settings)
    finally:
        changes.unpersist()


def history_statement(
    columns: list[str],
    keys: Keys,
    table: str,
    *,
    adds_columns: bool,
    absent: Mapping[str, str] | None = None,
    listed: Mapping[str, str] | None = None,
) -> str:
    """Return the MERGE of the frame ``{changes}`` into a table; see :func:`merge_history`.

    Args:
        columns: the columns of the changes.
        keys: the key and the order.
        table: its path or URI.
        adds_columns: whether the table gets columns that it does not have.
        absent: the columns of the table that the changes lack; see :func:`spark_jobs.writing.keyed.absent`.
        listed: the keys of the changes, if they are few; see :func:`spark_jobs.writing.keyed.listed_keys`.

    Example:
        >>> print(history_statement(["id"], Keys("id", stored_as_scd_type=2), "/lake/t", adds_columns=False))
        MERGE INTO delta.`file:///lake/t` t USING {changes} s ON t.`id` = s.`id` AND t._stream = s._stream \
AND t._shard = s._shard AND t._sequence = s._sequence
        WHEN MATCHED AND s._found IS NULL THEN UPDATE SET `id` = s.`id`
        WHEN MATCHED THEN UPDATE SET _valid_from = s._valid_from, _valid_to = s._valid_to, _is_current = s._is_current
        WHEN NOT MATCHED AND s._found IS NULL THEN INSERT (`id`) VALUES (s.`id`)
    """
    written = [quoted(name) for name in keys.written(columns)]
    on = matches((*map(quoted, keys.columns), *ROW_PLACE), listed or {})
    every, ends = ({name: f"s.{name}" for name in names} for names in (written, EXTENT))
    inserted = ", ".join(f"s.{name}" for name in written)
    clauses = [
        f"MATCHED AND s.{FOUND} IS NULL THEN UPDATE SET {assigned(every, absent or {})}",
        *([f"MATCHED AND size(s.{UNAVAILABLE}) > 0 THEN UPDATE SET {assigned(every)}"] * (UNAVAILABLE in columns)),
        f"MATCHED THEN UPDATE SET {assigned(ends)}",
        f"NOT MATCHED AND s.{FOUND} IS NULL THEN INSERT ({', '.join(written)}) VALUES ({inserted})",  # noqa: S608 - quoted
    ]
    return joined(table, on, clauses, adds_columns=adds_columns)
