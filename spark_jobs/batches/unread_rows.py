"""Finds last copies: the rows and dead letters whose messages cannot be read again.

A place at which the stream holds only damaged bytes now has no message; a row or dead letter that a whole message made
there is a last copy (:func:`without_messages`).

A rebuild would remove those whose messages the staging table has not read (:func:`unread_rows`).

A source may lose messages in the middle of a stream, for example by compaction, so that the start of the stream does
not show it. The rows of the staging table do not show it either, because a message that it has read may have made no
row. So a message counts as read if it has a row or a dead letter in the staging table, or if the stream holds it now:
messages only disappear from a stream, so the staging table has read what the stream holds. A message that made no row,
and has disappeared since it was read, counts as not read; then a rebuild is refused although nothing would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from spark_jobs.batches.bad_rows import Cached
from spark_jobs.decoding.ddl import quoted
from spark_jobs.ledger.entries import KeyOrder
from spark_jobs.ledger.table_rows import ROW_PLACE
from spark_jobs.writing.keyed import DELETED, Keys
from stream_consumers.batches import Range
from stream_consumers.errors import SchemaMismatchError
from stream_consumers.messages import Shard

_OTHER = "_other_"
_HELD = "_held"
_IS_MESSAGE = "_is_message"
_MADE_BY_MESSAGE = "_made_by_message"
_IS_DEAD = "_is_dead"
_RANK = "_rank"


@dataclass(frozen=True, slots=True)
class Stored:
    """A table with its dead letters.

    Args:
        rows: the rows.
        dead_letters: the dead letters that count; ``None`` without any.
    """

    rows: DataFrame
    dead_letters: DataFrame | None


@dataclass(frozen=True, slots=True)
class UnreadRows:
    """The rows and dead letters of a table whose messages were not read.

    Args:
        places: their places.
        rows: the number of the rows.
        dead: the number of the dead letters.
        within: the range from the first to after the last of them, per shard.
    """

    places: DataFrame
    rows: int
    dead: int
    within: Mapping[Shard, Range]

    def of_rows(self, rows: DataFrame) -> DataFrame:
        """Return those of these rows that are among them."""
        return _joined(rows, self.places.where(~f.col(_IS_DEAD)), "left_semi")

    def of_dead_letters(self, dead_letters: DataFrame) -> DataFrame:
        """Return those of these dead letters that are among them."""
        return _joined(dead_letters, self.places.where(_IS_DEAD), "left_semi")


def unread_rows(
    table: Stored,
    staged: Stored,
    held: Callable[[Mapping[Shard, Range]], DataFrame],
    cached: Cached,
    *,
    keys: Keys | None,
    was: KeyOrder | None,
) -> UnreadRows:
    """Find the rows and dead letters of a table whose messages a staging table has not read.

    In a table with a row per key, only the newest change of each key counts, unless the staging table has a newer one.
    If that change deletes the key, it counts only where the staging table has a row of the key, which would come back.

    Args:
        table: the table.
        staged: the staging table.
        held: returns what the stream holds within ranges, with ``_is_message``.
        cached: keeps what is computed.
        keys: of the staging table; ``None`` for one that is appended to.
        was: the keys of the table.

    Raises:
        Exception: whatever Spark raises.
    """
    found = _placed(_to_compare(table.rows, staged.rows, keys, was), is_dead=False)
    made = staged.rows.select(*ROW_PLACE, f.lit(True).alias(_IS_MESSAGE))
    if table.dead_letters is not None:
        found = found.unionByName(_placed(table.dead_letters.where("_sequence IS NOT NULL"), is_dead=True))
    if staged.dead_letters is not None:
        is_message = f.expr(made_by_message(staged.dead_letters)).alias(_IS_MESSAGE)
        made = made.unionByName(staged.dead_letters.select(*ROW_PLACE, is_message))
    found = cached.keep(without_messages(found, made, _MADE_BY_MESSAGE))
    if within := _extents(found):
        found = cached.keep(without_messages(found, held(within), _MADE_BY_MESSAGE))
    counts = found.groupBy(_IS_DEAD).count().collect()
    number = {bool(row[_IS_DEAD]): int(row["count"]) for row in counts}
    return UnreadRows(found, number.get(False, 0), number.get(True, 0), _extents(found) if counts else {})


def without_messages(table: DataFrame, held: DataFrame, is_message: str) -> DataFrame:
    """Return the rows of a table without a message at their places.

    Args:
        table: rows or dead letters.
        held: what is held at which place, with ``_is_message``, which is false for damaged bytes.
        is_message: a SQL condition for those rows of ``table`` that a whole message made, not damaged bytes.
    """
    named = held.select(*(f.col(name).alias(f"{_HELD}{name}") for name in (*ROW_PLACE, _IS_MESSAGE)))
    is_same = " AND ".join(f"{name} = {_HELD}{name}" for name in ROW_PLACE)
    is_held = f"{is_same} AND (coalesce({_HELD}{_IS_MESSAGE}, TRUE) OR NOT coalesce({is_message}, FALSE))"
    return table.join(named, f.expr(is_held), "left_anti")


def without_places(frame: DataFrame, others: DataFrame) -> DataFrame:
    """Return the rows of a frame at other places than those of ``others``, and those without a place."""
    return frame.join(others.select(*ROW_PLACE), [*ROW_PLACE], "left_anti").select(*map(quoted, frame.columns))


def made_by_message(dead_letters: DataFrame) -> str:
    """Return a SQL condition for the dead letters that a whole message made; older releases did not write it."""
    return "is_message" if "is_message" in dead_letters.columns else "FALSE"


def _placed(found: DataFrame, *, is_dead: bool) -> DataFrame:
    is_message = f.expr(made_by_message(found) if is_dead else "TRUE")
    return found.select(*ROW_PLACE, f.lit(is_dead).alias(_IS_DEAD), is_message.alias(_MADE_BY_MESSAGE))


def _joined(found: DataFrame, others: DataFrame, how: str) -> DataFrame:
    """Join by place. Rows of other programs may have none, and count as well."""
    named = others.select(*(f.col(name).alias(f"{_OTHER}{name}") for name in ROW_PLACE))
    return found.join(named, reduce(and_, (f.col(n).eqNullSafe(f.col(f"{_OTHER}{n}")) for n in ROW_PLACE)), how)


def _extents(found: DataFrame) -> Mapping[Shard, Range]:
    placed = found.where(" AND ".join(f"{name} IS NOT NULL" for name in ROW_PLACE)).groupBy("_stream", "_shard")
    rows = placed.agg(f.min("_sequence").alias("first"), f.max("_sequence").alias("last")).collect()
    return {Shard(row["_stream"], row["_shard"]): Range(row["first"], row["last"] + 1) for row in rows}


def _to_compare(table: DataFrame, staged: DataFrame, keys: Keys | None, was: KeyOrder | None) -> DataFrame:
    """Return the rows whose changes the staging table must have read."""
    changes = None if keys is None or keys.keeps_history else _as_changes(table, keys, was)
    names = [] if keys is None else [*keys.columns, *keys.ordering]
    if keys is None or changes is None or _types(changes, names) != _types(staged, names):
        # A row that only marks a deleted key has no values.
        has_marks = was is not None and bool(was.sequence_by) and was.scd_type == 1
        return _with_deletions(table, keys, staged, f.lit(True)) if has_marks else table
    newest_first = Window.partitionBy(*map(quoted, keys.columns)).orderBy(*map(f.desc, keys.ordering))
    is_known = reduce(and_, (f.col(quoted(name)).isNotNull() for name in names))
    newest = changes.withColumn(_RANK, f.row_number().over(newest_first)).where(~is_known | (f.col(_RANK) == 1))
    is_newer = _order(keys, _OTHER) >= _order(keys, "")
    unread = newest.join(_named(staged, names), _has_same_key(keys) & is_newer, "left_anti")
    return _with_deletions(unread, keys, staged, is_known)


def _with_deletions(rows: DataFrame, keys: Keys | None, staged: DataFrame, is_known: Column) -> DataFrame:
    """Return the rows, of the known ones that delete their keys only those of keys which the staging table has."""
    is_deletion = f.col(DELETED) & is_known
    others = rows.where(~is_deletion)
    if keys is None or _types(rows, [*keys.columns]) != _types(staged, [*keys.columns]):
        return others
    of_key = _named(staged, keys.columns)
    return others.unionByName(rows.where(is_deletion).join(of_key, _has_same_key(keys), "left_semi"))


def _named(staged: DataFrame, names: Sequence[str]) -> DataFrame:
    return staged.select(*(f.col(quoted(name)).alias(f"{_OTHER}{name}") for name in names))


def _has_same_key(keys: Keys) -> Column:
    return reduce(and_, (f.col(quoted(name)) == f.col(quoted(f"{_OTHER}{name}")) for name in keys.columns))


def _order(keys: Keys, prefix: str) -> Column:
    return f.struct(*(f.col(f"{prefix}{name}").alias(name) for name in keys.ordering))


def _as_changes(table: DataFrame, keys: Keys, was: KeyOrder | None) -> DataFrame | None:
    """Return the rows as changes, with their order and whether they delete; ``None`` if the table does not show it."""
    if was is None:
        try:
            changes = keys.changes(table)
            changes.schema  # noqa: B018 - a Connect session resolves the rows only now
            return changes
        except (SchemaMismatchError, AnalysisException):
            return None
    if (was.columns, was.sequence_by) != (keys.order.columns, keys.order.sequence_by):
        return None
    return table if DELETED in table.columns else table.withColumn(DELETED, f.lit(False))


def _types(rows: DataFrame, names: list[str]) -> list[str] | None:
    known = {column.name.lower(): column.dataType.simpleString() for column in rows.schema.fields}
    return [known[name.lower()] for name in names] if {*map(str.lower, names)} <= known.keys() else None
