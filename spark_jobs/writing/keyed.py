"""Keyed tables: one row per key, which a MERGE keeps equal to the newest change of that key.

:mod:`spark_jobs.writing.key_history` merges into tables that have a row per change (SCD type 2).

A batch is reduced to the newest change of each key, and merged in one commit. There are two orders of changes:

* The position in the shard, which is the default. A key must come from one shard only. The row of a deleted key is
  removed, so that what is read again below the position has to be read on up to it (:mod:`spark_jobs.ledger.fold`).
* The value of ``sequence_by``, and where it is equal, the place of the message. The row of a deleted key stays, with
  ``_deleted`` true, so that a merge gives the same table in whatever order changes arrive, and however often.

Both are explored in ``tests/model/keyed.py``.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession, Window, WindowSpec
from pyspark.sql import functions as f
from pyspark.sql.types import DataType, IntegralType, LongType, StructField, StructType

from spark_jobs.decoding.ddl import VARIABLE, folded, quoted
from spark_jobs.decoding.decoders import Decoder
from spark_jobs.ledger.entries import Floor, KeyOrder
from spark_jobs.ledger.table_expressions import check_expression
from spark_jobs.ledger.table_rows import ROW_PLACE, TIME
from spark_jobs.reading.rejection import REASON
from spark_jobs.reading.spark_types import text
from spark_jobs.table_location import spark_location, sql_name
from spark_jobs.writing.failures import BELOW_FLOOR, KEY_IN_TWO_SHARDS, KEY_TWICE, NO_KEY, NO_VALUE, NOT_THERE
from spark_jobs.writing.floor import floor_sql
from spark_jobs.writing.layout import TableLayout, check_names
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError

DELETED = "_deleted"
"""The column that says whether a change deletes its key. A table with ``sequence_by`` has it, too."""
TRUNCATES = "_truncates"
"""The column that says whether a change removes all older rows."""
SEQUENCE_BY = "_sequence_by"
"""The column with the value of ``sequence_by``."""
UNAVAILABLE = "_unavailable"
"""The column of a decoder with the names of columns whose values a change does not have: the row keeps its own."""
MAX_CLUSTERED = 4
"""Delta clusters by at most this many columns."""
MAX_LISTED = 1_000
"""The keys of a batch with at most this many messages are listed in its MERGE."""
STRING_TYPE = "__CHAR_VARCHAR_TYPE_STRING"
"""Where Spark keeps the type of a string column that was declared with a length."""
_OF_NOTHING = " (NULL)"
_SHARD = ("_stream", "_shard")
_SHARDS = ("_first_shard", "_last_shard")
_OF_CHANGES = (DELETED, SEQUENCE_BY, TRUNCATES)
NEIGHBOURS = ("_next", *_SHARDS)
"""The columns of :func:`with_neighbours`."""
FOUND = "_found"
"""The column with the extent that a row of the table has before a merge; ``NULL`` for a change of the batch."""
_RANK, _NEWEST, _IS_DELETED = "_rank", "_newest", "_is_deleted"
_TAKEN = "_taken"
"""The column with the order of the change that each value of a newest change is of; ``NULL`` if it has no value."""
VALID_FROM, VALID_TO, IS_CURRENT = EXTENT = ("_valid_from", "_valid_to", "_is_current")
"""The columns that say when the row of a change is valid, in a table of SCD type 2."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Makes a table keyed: it has one row per key, which is updated and deleted as changes arrive.

    The names of the options are those of AUTO CDC in Spark and Databricks.

    Args:
        columns: the columns of the key, of types that can be compared. A change without a key is a bad row.
        sequence_by: a SQL expression over a row that orders the changes of a key, like ``updated_at``. By default the
            position in the shard orders them.
        apply_as_deletes: a SQL condition over a row, true for changes that delete their key, like ``op = 'd'``. By
            default none does.
        apply_as_truncates: a SQL condition over a row, true for changes that remove all older rows, like ``op =
            't'``. Their key may be NULL. The stream must have one shard, because nothing orders a truncate among
            others. By default none does.
        except_columns: columns that the table does not get, although the expressions may use them.
        stored_as_scd_type: 1 keeps the newest row of each key; 2 keeps a row per change, with ``_valid_from``,
            ``_valid_to`` and ``_is_current``. They are values of ``sequence_by``; without it, the greatest
            ``_timestamp`` of the key so far.

    Raises:
        InvalidOptionError: an option has no meaning, or an expression may run code or read other tables.

    Example:
        >>> Keys(["id"], apply_as_deletes="op = 'd'", except_columns=["op"]).columns
        ('id',)
    """

    columns: Sequence[str]
    sequence_by: str = ""
    apply_as_deletes: str = ""
    apply_as_truncates: str = ""
    except_columns: Sequence[str] = ()
    stored_as_scd_type: int = 1

    def __post_init__(self) -> None:
        for option in ("columns", "except_columns"):
            object.__setattr__(self, option, check_names(option, getattr(self, option)))
        if not self.columns:
            raise InvalidOptionError("a keyed table needs a key", remedy="Name its columns, like keys=['id'].")
        if both := sorted({*map(str.lower, self.columns)} & {*map(str.lower, self.except_columns)}):
            raise InvalidOptionError(
                f"the key column {both[0]!r} is among except_columns",
                remedy="A table needs its key: leave it out there.",
            )
        for option in ("sequence_by", "apply_as_deletes", "apply_as_truncates"):
            check_expression(getattr(self, option), where=option)
        if self.stored_as_scd_type not in (1, 2):
            raise InvalidOptionError(
                f"stored_as_scd_type must be 1 or 2, got {self.stored_as_scd_type!r}",
                remedy="Use 1 for the newest row of each key, or 2 for a row per change.",
            )
        other = "stored_as_scd_type" if self.keeps_history else "sequence_by" if self.sequence_by else ""
        if other and self.apply_as_truncates:
            raise InvalidOptionError(
                f"apply_as_truncates={self.apply_as_truncates!r} cannot be combined with "
                f"{other}={getattr(self, other)!r}: an older change that comes later would bring its key back",
                remedy=f"Leave {other} out, if the stream has one shard; or leave truncates out of the stream.",
            )

    @property
    def order(self) -> KeyOrder:
        """What the ledger remembers, because another key, order or SCD type needs a new table."""
        return KeyOrder(tuple(self.columns), self.sequence_by, self.stored_as_scd_type)

    @property
    def keeps_history(self) -> bool:
        """Whether the table has a row per change; see :mod:`spark_jobs.writing.key_history`."""
        return self.stored_as_scd_type == 2

    @property
    def ordering(self) -> tuple[str, ...]:
        """The columns that order the changes of a key."""
        return ("_sequence",) if self.is_ordered_by_position else (SEQUENCE_BY, *ROW_PLACE)

    @property
    def own_names(self) -> frozenset[str]:
        """The names, folded, that a message and a transform cannot give to a column."""
        own = (*_OF_CHANGES, UNAVAILABLE, *NEIGHBOURS, FOUND, _RANK, _NEWEST, _IS_DELETED, _TAKEN)
        return frozenset(map(folded, (*own, *(EXTENT if self.keeps_history else ()))))

    @property
    def required(self) -> frozenset[str]:
        """The columns that no row may lack, in lower case."""
        return frozenset([*map(str.lower, self.columns), *_OF_CHANGES])

    def layout(self, given: TableLayout) -> TableLayout:
        """Return the layout of a new table, in which a MERGE finds and changes few files.

        Args:
            given: the user's layout. Unless it says otherwise, the table is clustered by the key, and has deletion
                vectors, so that a changed row does not rewrite its file.
        """
        is_laid_out = given.partition_by or given.cluster_by
        return replace(
            given,
            cluster_by=given.cluster_by if is_laid_out else self.columns[:MAX_CLUSTERED],
            properties={"delta.enableDeletionVectors": "true", **given.properties},
        )

    def mode(self, *, again: bool) -> str:
        """Return the write mode of a batch; see :data:`spark_jobs.ledger.entries.MODES`.

        Args:
            again: whether its messages were merged before.
        """
        return f"{'upsert' if self.keeps_deletions else 'merge'}{' again' if again else ''}"

    @property
    def keeps_deletions(self) -> bool:
        """Whether the change that deletes a key has a row, so that merges give the same table in any order."""
        return bool(self.sequence_by) or self.keeps_history

    @property
    def is_ordered_by_position(self) -> bool:
        """Whether the position in the shard orders the changes of a key."""
        return not self.sequence_by

    @property
    def shown_where(self) -> str:
        """The SQL condition of the rows of keys that are not deleted; empty if the table has no others."""
        return f"NOT {DELETED}" if self.keeps_deletions else ""

    def of_decoder(self, decoder: Decoder) -> Keys:
        """Return the keys with what the decoder knows of its changes: which of them delete, and its own columns."""
        deletes, own = getattr(decoder, "deletes_where", None), getattr(decoder, "change_columns", ())
        if UNAVAILABLE in {*map(folded, self.except_columns)}.difference(own):
            raise InvalidOptionError(
                f"except_columns names {UNAVAILABLE}, which only a decoder of changes may make",
                remedy="Let the transform drop that column of the payloads, or rename it.",
            )
        if deletes is None:
            return self
        left_out = dict.fromkeys((*self.except_columns, *own))
        truncates = "" if self.sequence_by or self.keeps_history else getattr(decoder, "truncates_where", "")
        return replace(
            self,
            apply_as_deletes=self.apply_as_deletes or deletes,
            apply_as_truncates=self.apply_as_truncates or truncates,
            except_columns=tuple(left_out),
        )

    def changes(self, rows: DataFrame, made: Iterable[str] = ()) -> DataFrame:
        """Return the rows as changes: with ``_deleted``, and with ``_sequence_by`` and ``_truncates`` if there are any.

        Where the table has a row per change, they have the columns of :data:`EXTENT`, too. A merge computes these anew.

        Args:
            rows: the rows of the decoder or of the transform.
            made: the columns that the transform has added.

        Raises:
            SchemaMismatchError: a column is missing or has the name of one of ours, or has a type without an order.
        """
        names = {name.lower() for name in rows.columns}
        if lacking := [name for name in (*self.columns, *self.except_columns) if name.lower() not in names]:
            raise SchemaMismatchError(
                f"the rows have no column {', '.join(lacking)}, only {', '.join(rows.columns)}",
                remedy="Correct the columns of the key and except_columns, or let the transform make them.",
            )
        # Only the decoder says which values a change lacks, see of_decoder(), and never a field of a message.
        has_marks = UNAVAILABLE in self.except_columns
        own = self.own_names - ({UNAVAILABLE} if has_marks else set())
        if taken := [name for name in rows.columns if folded(name) in own]:
            raise SchemaMismatchError(
                f"the rows have a column {taken[0]}, which a keyed table uses itself",
                remedy="Rename it in the transform.",
            )
        is_deleted = f.expr(self.apply_as_deletes) if self.apply_as_deletes else f.lit(False)
        columns = {DELETED: f.coalesce(is_deleted.cast("boolean"), f.lit(False))}
        if self.sequence_by:
            columns[SEQUENCE_BY] = f.expr(self.sequence_by)
        if self.keeps_history:
            start = columns.get(SEQUENCE_BY, f.col("_timestamp"))
            columns |= {VALID_FROM: start, VALID_TO: f.when(f.lit(False), start), IS_CURRENT: ~columns[DELETED]}
        if has_marks:
            # A transform may make rows without marks, which lack no value.
            marks = f.coalesce(f.array_compact(UNAVAILABLE), f.array().cast("array<string>"))
            if nulls := [f.when(f.col(quoted(name)).isNull(), f.lit(name)) for name in made]:
                # It may have made NULL of a value that is not there. No column has such a name; see not_there().
                lost = f.array_except(f.array_compact(f.array(*nulls)), marks)
                lost = f.transform(lost, lambda name: f.concat(name, f.lit(_OF_NOTHING)))
                marks = f.when(f.size(marks) > 0, f.concat(marks, lost)).otherwise(marks)
            columns[UNAVAILABLE] = marks
        if self.apply_as_truncates:
            columns[TRUNCATES] = f.coalesce(f.expr(self.apply_as_truncates).cast("boolean"), f.lit(False))
        return rows.withColumns(columns).drop(*(name for name in self.except_columns if name != UNAVAILABLE))

    def table_columns(self, changes: StructType) -> StructType:
        """Return the columns of the table for changes with these columns.

        Raises:
            SchemaMismatchError: a column of the key, or the value that orders, has a type that cannot be compared.
        """
        for column in changes.fields:
            if column.name.lower() in self.required:
                _check_has_order(column)
        return StructType([column for column in changes.fields if column.name in self.written(changes.names)])

    def written(self, names: Iterable[str]) -> list[str]:
        """Return the columns of changes that the table has."""
        if self.keeps_history:
            return list(names)
        hidden = {UNAVAILABLE, TRUNCATES} if self.keeps_deletions else {UNAVAILABLE, TRUNCATES, DELETED}
        return [name for name in names if name not in hidden]

    def not_there(self, columns: Iterable[str]) -> Column:
        """Return why a change cannot be merged that lacks a value of another column than these; null if it can."""
        left_out = [name.lower() for name in self.except_columns]
        lost = f.filter(UNAVAILABLE, lambda name: ~(name.isin([*columns]) | f.lower(name).isin(left_out)))
        return f.when(f.size(lost) > 0, f.concat(f.lit(f"{NOT_THERE} "), f.array_join(lost, ", ")))


def check_key_of_table(keys: Keys, columns: Iterable[Mapping[str, Any]]) -> None:
    """Check that a table that the user has made has no key of type CHAR, which Spark pads in only one side of a MERGE.

    Args:
        keys: the key.
        columns: the columns of the table, in the format of the log.

    Raises:
        SchemaMismatchError: it has one.
    """
    names = {name.lower() for name in keys.columns}
    for column in columns:
        kind = column.get("metadata", {}).get(STRING_TYPE, "")
        if column["name"].lower() in names and kind.startswith("char("):
            raise SchemaMismatchError(
                f"the key column {column['name']} is {kind.upper()} in the table, and Spark cannot merge by a CHAR",
                remedy="Make the column a STRING or a VARCHAR in a new table.",
            )


def _check_has_order(column: StructField) -> None:
    if not _has_order(column.dataType):
        raise SchemaMismatchError(
            f"{column.name} is {column.dataType.simpleString()}, and values of this type have no order",
            remedy="Use a number, a text, a date, a time or bytes; let the transform convert it.",
        )


def _has_order(kind: DataType) -> bool:
    return kind.typeName() not in ("map", "array", "struct", "variant", "void", "interval")


def last_truncate(changes: DataFrame, keys: Keys) -> int | None:
    """Return the sequence of the last change that truncates, of changes of one shard; ``None`` if none does.

    Raises:
        Exception: whatever Spark raises.
    """
    if not keys.apply_as_truncates:
        return None
    found = changes.where(f.col(TRUNCATES)).agg(f.max("_sequence").alias("last")).collect()[0]["last"]
    return None if found is None else int(found)


def after_truncate(changes: DataFrame, last: int | None) -> DataFrame:
    """Return the changes after a truncate; see :func:`last_truncate`."""
    return changes if last is None else changes.where(f.col("_sequence") > last)


def newest_changes(changes: DataFrame, keys: Keys, *, is_first_read: bool = False) -> DataFrame:
    """Return the newest change of each key. The read of the result fails if it is unknown which one that is.

    It is unknown if the transform makes two rows with one key from one message; or, where the position orders the
    changes, if changes of one key come from two shards. The read fails, too, if a change has no key or no order: a
    table that a rebuild made keyed does not refuse NULL itself.

    Args:
        changes: the changes of a batch; see :meth:`Keys.changes`.
        keys: the key and the order.
        is_first_read: whether the read of the result also fails if a change behind a delete lacks a value, which the
            row of before the delete must not give it. Of changes that were merged before, a later one has the value.
    """
    newest_first = _of_key(keys).orderBy(*map(f.desc, keys.ordering))
    changes = with_checked_marks(changes, keys)
    ranked = with_neighbours(changes, keys, newest_first).withColumn(_RANK, f.row_number().over(newest_first))
    if UNAVAILABLE in changes.columns:
        ranked = _with_newest_values(ranked, keys, newest_first, is_first_read=is_first_read)
    return ranked.where((f.col(_RANK) == 1) & is_sound(keys)).drop(_RANK, *NEIGHBOURS)


def with_checked_marks(changes: DataFrame, keys: Keys) -> DataFrame:
    """Return the changes; the read fails if one lacks a value of a column that they do not have."""
    if UNAVAILABLE not in changes.columns:
        return changes
    why = keys.not_there(changes.columns)
    return changes.withColumn(UNAVAILABLE, f.when(why.isNull(), f.col(UNAVAILABLE)).otherwise(f.raise_error(why)))


def lacking_changes(changes: DataFrame, keys: Keys, table: DataFrame, *, is_first_read: bool) -> DataFrame:
    """Return the places of changes that lack a value which neither the batch nor the table has, with the reason.

    The MERGE fails for the newest change of a key without such a value. Then all changes of the key after its last
    delete, in the batch or the table, lack the value. The merge of the others does not fail.

    Args:
        changes: the changes of a batch; see :meth:`Keys.changes`.
        keys: the key and the order.
        table: the rows of the table.
        is_first_read: see :func:`newest_changes`.
    """
    of_key, order = [*map(quoted, keys.columns)], f.struct(*keys.ordering)
    newest = newest_changes(changes, keys).where(~f.col(DELETED))
    taken = {name: f.col(_TAKEN)[name] for name in value_columns(changes.columns, keys)}
    lacks = f.size(UNAVAILABLE) > 0
    if taken:
        newest = newest.where(lacks | reduce(or_, (one < order for one in taken.values())))
    is_deleted = f.col(DELETED) if keys.keeps_deletions else f.lit(False)
    rows = table.select(*of_key, is_deleted.alias(_IS_DELETED), order.alias(FOUND))
    rows = rows.join(newest.select(*of_key), [*keys.columns], "left_semi")
    last_deletes = changes.where(DELETED).groupBy(*of_key).agg(f.max(order).alias(_NEWEST))
    joined = newest.withColumn(_RANK, order).join(rows, [*keys.columns], "left")
    joined = joined.join(last_deletes, [*keys.columns], "left")
    # The value of a change before the delete that the table has is that of a row which is gone.
    is_gone = f.coalesce(f.col(_IS_DELETED) & (f.col(_RANK) >= f.col(FOUND)), f.lit(False))
    is_without = {
        name: f.array_contains(UNAVAILABLE, name) | (is_gone & (taken[name] < f.col(FOUND))) for name in taken
    }
    lost = f.array_compact(f.array(*(f.when(is_it, f.lit(name)) for name, is_it in is_without.items())))
    has_no_row = f.col(FOUND).isNull() | is_gone | (f.lit(is_first_read) & f.col(_NEWEST).isNotNull())
    why = f.concat(f.lit(f"{NO_VALUE} "), f.array_join(lost, ", ")).alias(REASON)
    last = f.greatest(_NEWEST, f.when(is_gone, f.col(FOUND))).alias(_NEWEST)
    absent = joined.where(has_no_row & (f.size(lost) > 0)).select(*of_key, last, why)
    others = changes.where(~f.col(DELETED)).select(*of_key, *ROW_PLACE, order.alias(_RANK))
    after = f.col(_NEWEST).isNull() | (f.col(_RANK) > f.col(_NEWEST))
    return others.join(absent, [*keys.columns]).where(after).select(*ROW_PLACE, REASON)


def _of_key(keys: Keys) -> WindowSpec:
    return Window.partitionBy(*map(quoted, keys.columns))


def in_order(keys: Keys) -> WindowSpec:
    """Return the window of the changes of a key, the oldest one first."""
    return _of_key(keys).orderBy(*keys.ordering)


def with_neighbours(changes: DataFrame, keys: Keys, order: WindowSpec) -> DataFrame:
    """Return the changes with the place of the next one of their key, and the first and the last shard of the key."""
    # One order for all functions, so that Spark computes them in one pass.
    shard, of_key = f.struct(*_SHARD), order.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    ways = (f.lead(f.struct(*ROW_PLACE)).over(order), f.min(shard).over(of_key), f.max(shard).over(of_key))
    return changes.withColumns(dict(zip(NEIGHBOURS, ways, strict=True)))


def is_sound(keys: Keys) -> Column:
    """Return a condition on changes with their neighbours: it is true, or fails.

    It fails if their order is unknown, or a change has no key: a table that a rebuild made keyed does not refuse NULL.
    """
    lacks = reduce(or_, (f.col(name).isNull() for name in (*map(quoted, keys.columns), *keys.ordering)))
    found = _unless(~lacks, NO_KEY, _text(ROW_PLACE))
    found &= _unless(f.col("_next").isNull() | (f.col("_next") != f.struct(*ROW_PLACE)), KEY_TWICE, _text(ROW_PLACE))
    if keys.is_ordered_by_position:
        both = f.concat_ws(" and ", *(_text([f"{name}.{part}" for part in _SHARD]) for name in _SHARDS))
        found &= _unless(f.col("_first_shard") == f.col("_last_shard"), KEY_IN_TWO_SHARDS, both)
    return found


def value_columns(names: Iterable[str], keys: Keys) -> list[str]:
    """Return the columns of changes whose values a change may lack."""
    own = {*keys.required, *ROW_PLACE, TIME, UNAVAILABLE, FOUND, _RANK, *NEIGHBOURS}
    return [name for name in names if name.lower() not in own]


def _with_newest_values(ranked: DataFrame, keys: Keys, newest_first: WindowSpec, *, is_first_read: bool) -> DataFrame:
    """Take each value that the newest change does not have from the newest one that has it, up to the newest delete.

    A delete has no values, and those before it are of another row: a change of the key of a row creates a row under the
    new key, without the large values that it leaves alone. A delete itself stays as it is. The row of the table may be
    newer than the change that a value is taken from, so that the MERGE compares both; see :data:`_TAKEN`.
    """
    names = value_columns(ranked.columns, keys)
    if not names:
        return ranked.withColumn(UNAVAILABLE, f.array().cast("array<string>"))
    whole = newest_first.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    so_far = newest_first.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    is_delete = f.col(DELETED)

    def newest(name: str) -> Column:
        has_value = ~f.array_contains(UNAVAILABLE, name) & ~f.col(_IS_DELETED)
        value = f.struct(f.col(quoted(name)).alias("value"), f.struct(*keys.ordering).alias("order"))
        return f.first_value(f.when(has_value, value), ignoreNulls=True).over(whole).alias(name)

    marked = ranked.withColumn(_IS_DELETED, f.bool_or(is_delete).over(so_far))
    found = marked.withColumn(_NEWEST, f.struct(*map(newest, names)))
    newest_of = {name: f.col(f"{_NEWEST}.{quoted(name)}") for name in names}
    lacks = {name: one.isNull() & ~is_delete for name, one in newest_of.items()}
    still = f.array_compact(f.array(*(f.when(is_lacking, f.lit(name)) for name, is_lacking in lacks.items())))
    if is_first_read:
        has_delete = f.bool_or(is_delete).over(whole)
        fails = f.raise_error(f.concat(f.lit(f"{NO_VALUE} "), f.array_join(still, ", ")))
        still = f.when((f.col(_RANK) == 1) & has_delete & (f.size(still) > 0), fails).otherwise(still)
    values = {name: f.when(is_delete, f.col(quoted(name))).otherwise(one["value"]) for name, one in newest_of.items()}
    taken = f.struct(*(f.when(~is_delete, one["order"]).alias(name) for name, one in newest_of.items()))
    return found.withColumns({**values, UNAVAILABLE: still, _TAKEN: taken}).drop(_NEWEST, _IS_DELETED)


def _unless(condition: Column, what: str, details: Column) -> Column:
    return f.when(condition, f.lit(True)).otherwise(f.raise_error(f.concat(f.lit(f"{what} "), details)))


def _text(names: Sequence[str]) -> Column:
    return f.concat_ws(" ", *(f.col(name).cast("string") for name in names))


def merge(
    changes: DataFrame,
    keys: Keys,
    table: str,
    *,
    overwrites_equal: bool,
    adds_columns: bool,
    is_small: bool,
    floor: Floor | None,
    truncate: int | None,
    settings: Mapping[str, str],
    columns: Mapping[str, str] | None = None,
) -> None:
    """Merge changes into a keyed table in one commit.

    Delta takes the transaction and the metadata of a MERGE from the settings of the session, so that the MERGE runs in
    a copy of it, in which nothing else is written.

    Args:
        changes: see :meth:`Keys.changes`.
        keys: the key and the order.
        table: its path or URI.
        overwrites_equal: whether a change replaces a row that it has made before, as a replay does.
        adds_columns: whether the table gets columns that it does not have.
        is_small: whether to list the keys of the changes; see :func:`listed_keys`.
        floor: the floor of the table, see :mod:`spark_jobs.writing.floor`; ``None`` without one.
        truncate: the sequence of the last truncate among the changes; ``None`` without one.
        settings: the settings of that session.
        columns: the columns of the table that a write sets, and the SQL of the value of each in rows that lack it.

    Raises:
        Exception: whatever Spark raises.
    """
    known = changes.columns
    if adds_columns:
        known = changes.sparkSession.read.format("delta").load(spark_location(table)).columns
    names = {name.lower() for name in known}
    statement = merge_statement(
        changes.columns,
        keys,
        table,
        overwrites_equal=overwrites_equal,
        adds_columns=adds_columns,
        new=[name for name in changes.columns if name.lower() not in names],
        floor="" if floor is None else floor_sql(floor, changes.schema[SEQUENCE_BY].dataType),
        truncate=truncate,
        absent=absent(columns or {}, changes),
        # A truncate also changes the rows of other keys.
        listed=listed_keys(changes, keys) if is_small and truncate is None else {},
    )
    newest = newest_changes(after_truncate(changes, truncate), keys, is_first_read=not overwrites_equal)
    run_merge(statement, newest, settings)


def listed_keys(changes: DataFrame, keys: Keys) -> Mapping[str, str]:
    """Return the values of each column of the key that has whole numbers, as a SQL list.

    With the list, Spark reads and joins only the rows of the table with these values. Without it, Spark sorts all rows
    of the files that a batch changes, however few changes there are. Delta records the list in the commit, so that it
    must be short, and has no texts.

    Args:
        changes: few changes, which are the same whenever they are read; see :meth:`Keys.changes`.
        keys: the key and the order.

    Raises:
        Exception: whatever Spark raises.
    """
    fields = changes.select(*map(quoted, keys.columns)).schema.fields
    suffixes = {
        quoted(one.name): "L" if isinstance(one.dataType, LongType) else ""
        for one in fields
        if isinstance(one.dataType, IntegralType)
    }
    if not suffixes:
        return {}
    found = zip(suffixes.items(), changes.select(*suffixes).toArrow().columns, strict=True)
    return {
        name: ", ".join(f"{value}{suffix}" for value in column.drop_null().unique().sort().to_pylist()) or "NULL"
        for (name, suffix), column in found
    }


def matches(names: Iterable[str], listed: Mapping[str, str]) -> str:
    """Return the condition of a MERGE that a row and a change have equal values in these columns.

    Args:
        names: the columns, quoted.
        listed: see :func:`listed_keys`.

    Example:
        >>> matches(["`id`", "_shard"], {"`id`": "3L, 7L"})
        't.`id` = s.`id` AND t._shard = s._shard AND t.`id` IN (3L, 7L)'
    """
    return " AND ".join([*(f"t.{name} = s.{name}" for name in names), *within(listed, "t.")])


def within(listed: Mapping[str, str], side: str = "") -> Iterator[str]:
    """Yield the conditions that a row has a listed key; see :func:`listed_keys`."""
    return (f"{side}{name} IN ({values})" for name, values in listed.items())


def merge_statement(
    columns: Sequence[str],
    keys: Keys,
    table: str,
    *,
    overwrites_equal: bool,
    adds_columns: bool,
    new: Collection[str] = (),
    floor: str = "",
    truncate: int | None = None,
    absent: Mapping[str, str] | None = None,
    listed: Mapping[str, str] | None = None,
) -> str:
    """Return the MERGE of the frame ``{changes}`` into a table; see :func:`merge`.

    Args:
        columns: the columns of the changes.
        keys: the key and the order.
        table: its path or URI.
        overwrites_equal: whether a change replaces a row that it has made before.
        adds_columns: whether the table gets columns that it does not have.
        new: the columns of the changes that the table does not have, so that its rows have no value in them.
        floor: the floor of the table as SQL; empty without one.
        truncate: the sequence of the last truncate among the changes; ``None`` without one.
        absent: the columns of the table that the changes lack; see :func:`absent`.
        listed: the keys of the changes, if they are few; see :func:`listed_keys`.

    Example:
        >>> keys = Keys("id")
        >>> print(merge_statement(["id", "_deleted"], keys, "/lake/t", overwrites_equal=False, adds_columns=False))
        MERGE INTO delta.`file:///lake/t` t USING {changes} s ON t.`id` = s.`id`
        WHEN MATCHED AND NOT (t._stream = s._stream AND t._shard = s._shard) THEN UPDATE SET `id` = s.`id`, `_shard` = \
CAST(raise_error(concat('a key has changes in two shards: ', concat_ws(' ', t._stream, t._shard, 'and', s._stream, \
s._shard))) AS BIGINT)
        WHEN MATCHED AND s._sequence > t._sequence AND s._deleted THEN DELETE
        WHEN MATCHED AND s._sequence > t._sequence THEN UPDATE SET `id` = s.`id`
        WHEN NOT MATCHED AND NOT s._deleted THEN INSERT (`id`) VALUES (s.`id`)
    """
    written = {name: quoted(name) for name in keys.written(columns)}
    on = matches(map(quoted, keys.columns), listed or {})
    updated = inserted = {name: f"s.{own}" for name, own in written.items()}
    # A row of a deleted key, or of before a truncate, has no values for the changes after it.
    is_gone = f"t.{DELETED}" if keys.keeps_deletions else "" if truncate is None else f"t._sequence < {truncate:d}"
    if UNAVAILABLE in columns:
        lacks = {name: f"array_contains(s.{UNAVAILABLE}, {text(name)})" for name in written}
        fails = {name: f"raise_error({text(f'{NO_VALUE} {name}')})" for name in written}
        old = {name: "NULL" if name in new else f"t.{own}" for name, own in written.items()}
        kept = {name: f"IF({is_gone}, {fails[name]}, {value})" if is_gone else value for name, value in old.items()}
        # A value that the batch has is older than the row, if others have changed the row since.
        of_row = _order_of("t", keys)
        is_other = "t._sequence < s._sequence AND " if keys.is_ordered_by_position else ""
        keeps = {
            name: f"{lacks[name]} OR ({is_other}s.{_TAKEN}.{written[name]} < {of_row})"
            for name in value_columns(written, keys)
        }
        updated = updated | {name: f"IF({keeps[name]}, {kept[name]}, s.{written[name]})" for name in keeps}
        inserted = {name: f"IF({lacks[name]}, {fails[name]}, s.{own})" for name, own in written.items()}
    update = f"UPDATE SET {assigned({own: updated[name] for name, own in written.items()}, absent or {})}"
    insert = _insert(written, inserted)
    compares = ">=" if overwrites_equal else ">"
    if keys.is_ordered_by_position:
        # It sets all columns, so that the MERGE reads no other ones of the table than those that it compares.
        refused = {own: f"s.{own}" for own in written.values()} | {"`_shard`": _fails(KEY_IN_TWO_SHARDS, "t", "s")}
        is_newer = f"s._sequence {compares} t._sequence"
        # What is read again may lack values of a row that a later change deleted, which is read again, too.
        is_read_again = overwrites_equal and UNAVAILABLE in columns
        is_whole = f" AND size(s.{UNAVAILABLE}) = 0" if is_read_again else ""
        is_removed = f"s.{DELETED}"
        if is_read_again and is_gone:
            is_removed = f"({is_removed} OR ({is_gone} AND size(s.{UNAVAILABLE}) > 0))"
        clauses = [
            "MATCHED AND NOT (t._stream = s._stream AND t._shard = s._shard) "
            f"THEN UPDATE SET {assigned(refused, absent or {})}",
            f"MATCHED AND {is_newer} AND {is_removed} THEN DELETE",
            f"MATCHED AND {is_newer} THEN {update}",
            f"NOT MATCHED AND NOT s.{DELETED}{is_whole} THEN {insert}",
        ]
        if truncate is not None:
            clauses.append(f"NOT MATCHED BY SOURCE AND t._sequence < {truncate:d} THEN DELETE")
    else:
        of_row, of_change = (_order_of(side, keys) for side in "ts")
        clauses = [f"MATCHED AND {of_change} {compares} {of_row} THEN {update}"]
        if floor:
            clauses.append(f"NOT MATCHED AND s.{SEQUENCE_BY} >= {floor} THEN {insert}")
            failing = _insert(written, {**inserted, "_sequence": _fails(BELOW_FLOOR, "s")})
            clauses.append(f"NOT MATCHED AND NOT s.{DELETED} THEN {failing}")
        else:
            clauses.append(f"NOT MATCHED THEN {insert}")
    return joined(table, on, clauses, adds_columns=adds_columns)


def absent(columns: Mapping[str, str], changes: DataFrame) -> Mapping[str, str]:
    """Return the columns of a table that its changes lack, with their values.

    An update gives them the value that an insert gives them. Otherwise the row would keep the value of an older change,
    or of a deleted row, depending on which changes are in one batch.

    Args:
        columns: the columns of the table that a write sets, and the SQL of the value of each in rows that lack it.
        changes: the changes.
    """
    known = {name.lower() for name in changes.columns}
    return {quoted(name): value for name, value in columns.items() if name.lower() not in known}


def assigned(*values: Mapping[str, str]) -> str:
    """Return the SQL of an update that gives columns these values."""
    return ", ".join(f"{name} = {value}" for part in values for name, value in part.items())


def joined(table: str, on: str, clauses: Sequence[str], *, adds_columns: bool) -> str:
    """Return a MERGE of the frame ``{changes}``, named ``s``, into a table, named ``t``.

    Args:
        table: its path or URI.
        on: the condition of a match.
        clauses: what to do, without ``WHEN``.
        adds_columns: whether the table gets columns that it does not have.
    """
    evolution = " WITH SCHEMA EVOLUTION" if adds_columns else ""
    # Spark replaces what is in single braces, so those in a name or a path are doubled.
    into, matches, *whens = (
        part.replace("{", "{{").replace("}", "}}")
        for part in (sql_name(table), on, *(f"WHEN {one}" for one in clauses))
    )
    return "\n".join([f"MERGE{evolution} INTO {into} t USING {{changes}} s ON {matches}", *whens])


def _order_of(side: str, keys: Keys) -> str:
    return f"struct({', '.join(f'{side}.{name}' for name in keys.ordering)})"


def _insert(written: Mapping[str, str], values: Mapping[str, str]) -> str:
    return f"INSERT ({', '.join(written.values())}) VALUES ({', '.join(values[name] for name in written)})"  # noqa: S608


def _fails(what: str, *sides: str) -> str:
    """Return the SQL of a ``_sequence`` whose computation fails, with the shards of these sides of a MERGE."""
    places = ", 'and', ".join(f"{side}._stream, {side}._shard" for side in sides)
    return f"CAST(raise_error(concat('{what} ', concat_ws(' ', {places}))) AS BIGINT)"


def purge(session: SparkSession, table: str, condition: str, *, settings: Mapping[str, str]) -> None:
    """Remove rows that mark deleted keys in one commit; see :mod:`spark_jobs.writing.floor`.

    Args:
        session: a session that can write Delta tables.
        table: its path or URI.
        condition: the SQL condition of the rows.
        settings: the settings of the session of this commit; see :func:`merge`.

    Raises:
        Exception: whatever Spark raises.
    """
    with own_session(session, settings) as own:
        own.sql(f"DELETE FROM {sql_name(table)} WHERE {condition}").collect()  # noqa: S608


def run_merge(statement: str, changes: DataFrame, settings: Mapping[str, str]) -> None:
    """Run a MERGE in a copy of the session of the changes, with settings of its own; see :func:`own_session`.

    The changes are a view there. Their plan would not do: on Spark Connect, it refers to rows of the client that are
    larger than ``spark.sql.session.localRelationCacheThreshold`` by their hashes, and only the session to which they
    were sent can read these.

    Args:
        statement: the MERGE of the frame ``{changes}``.
        changes: the frame.
        settings: settings of the copy.

    Raises:
        Exception: whatever Spark raises.
    """
    session, view = changes.sparkSession, f"_stream_assets_{uuid.uuid4().hex}"
    changes.createTempView(view)
    try:
        with own_session(session, settings) as own:
            own.sql(statement.format(changes=view)).collect()
    finally:
        # A view that cannot be dropped ends with its session.
        with suppress(Exception):
            session.catalog.dropTempView(view)


@contextmanager
def own_session(session: SparkSession, settings: Mapping[str, str]) -> Iterator[SparkSession]:
    """Provide a copy of a session, with its settings, views and functions, and with settings of its own from then on.

    A server of Spark Connect keeps a session for an hour unless it is released, and its client stays until the process
    ends.

    Args:
        session: the session.
        settings: settings of the copy.
    """
    if not hasattr(session, "cloneSession"):
        # A classic session has no such method in Python.
        copy = SparkSession(session.sparkContext, session._jsparkSession.cloneSession())
        yield _having(copy, settings)
        return
    copy = session.cloneSession()
    try:
        yield _having(copy, settings)
    finally:
        # A copy has no stop() in PySpark 4.2. What cannot be released ends by itself.
        with suppress(Exception):
            copy.client.release_session()
        copy.client.close()


def _having(session: SparkSession, settings: Mapping[str, str]) -> SparkSession:
    for name, value in settings.items():
        if VARIABLE in value:
            raise InvalidOptionError(
                f"the setting {name} of a keyed table contains {VARIABLE}, which Spark would replace by a variable",
                remedy="Use a name of the group without it.",
            )
        session.conf.set(name, value)
    return session
