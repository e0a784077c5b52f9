"""Rejects, adds or rescues columns that a table lacks, or has with another type.

With ``schema_changes='add_columns'`` undeclared fields of JSON become columns, with the types of the table or of their
values. With ``'rescue'`` they go into one column, as JSON, so that nothing is lost and no column changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegralType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from spark_jobs.decoding.ddl import MAX_COLUMN_NAME_LENGTH, VARIABLE, folded, is_internal, name_keys, quoted
from spark_jobs.decoding.decoders import RESCUED, Decoder, header_columns, key_columns
from spark_jobs.decoding.json_decoder import (
    IN_ARRAY,
    IN_MAP,
    FieldFinder,
    Json,
    JsonMode,
    Path,
    merge_objects,
    share_values,
)
from spark_jobs.decoding.json_documents import read_object
from spark_jobs.decoding.json_inference import MAX_LEVELS, NEEDS_MAPPING, FieldStats, is_name
from spark_jobs.decoding.json_values import check_json_type
from spark_jobs.ledger.table_expressions import unsafe_name
from spark_jobs.reading.source import DEAD_LETTER_COLUMNS, STREAM_COLUMNS, STREAM_TYPES
from spark_jobs.reading.spark_types import arrow_schema, column_ddl, declared_columns
from stream_consumers.display import printable
from stream_consumers.errors import SchemaMismatchError
from stream_consumers.options import SchemaChanges, choice

WIDENING = "delta.enableTypeWidening"
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_DIGITS = {"tinyint": 10, "smallint": 10, "int": 10, "bigint": 20}
"""The digits of the decimals that Delta widens each integer type to."""
_OF_PARTITIONS = (
    "A partition column keeps its type: change the transform or the schema. Or make the table anew with the wider "
    "type: with stream-assets rebuild, or under another name."
)
MAX_UNDECLARED_FIELDS = 1000
"""The most undeclared fields that become columns or fields of structs, or are recorded as fields that cannot."""
KEPT_FIELDS_FACTOR = 10
"""This many times :data:`MAX_UNDECLARED_FIELDS` are kept while messages are read, because a map is recognized late."""
# Fields are counted after each block of this many characters of JSON.
_CHECKED_CHARACTERS = 1 << 20
# Spark and Delta add these columns when they write a change data feed, merge or delete, and find them by name. With a
# column of such a name a table works at first, and then each write fails.
_OF_DELTA = frozenset(
    (
        *("_change_type", "_commit_version", "_commit_timestamp", "_metadata", "__is_cdc"),
        *("_row_id_", "_file_name_", "_condition_", "_row_dropped_", "_source_row_present_", "_target_row_present_"),
        *("_source_row_index", "_target_row_index_", "filepath", "dvfilepath", "deletionvectorid", "rowindexcol"),
    )
)
# A DOUBLE holds each whole number of at most this many digits.
_SURELY_DOUBLE = 15
_NUMBERS, _TIMES = {"whole number", "number"}, {"date", "time"}
_TEXTS = {"text", *_TIMES}
_OPTIONS = {
    "ignoreNullFields": "true",
    # Without these, times have milliseconds only, and the time zone of the writer.
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "timeZone": "UTC",
}


def check_columns(
    rows: StructType,
    table: StructType | None,
    *,
    path: str,
    schema_changes: SchemaChanges | str,
    widens: bool = False,
    partitions: Iterable[str] = (),
) -> None:
    """Check, before anything is read, that the rows fit the table.

    Args:
        rows: the columns to write.
        table: the columns of the table; ``None`` if it is new.
        path: the table, for the message.
        schema_changes: what happens to new columns and fields.
        widens: whether the table lets its types be widened.
        partitions: its partition columns, which keep their types: the log has their values as text, which delta-rs may
            not convert to a wider type. It could not open the table then, and the positions would be unreadable.

    Raises:
        SchemaMismatchError: columns do not fit; it lists them.
    """
    chosen = choice(SchemaChanges, schema_changes, option="schema_changes")
    _check_stream_columns(rows)
    if (unsafe := unsafe_name(rows.jsonValue()["fields"])) is not None:
        raise SchemaMismatchError(
            f"the rows have a column or field {printable(unsafe)}, which Java or Hadoop may not read as plain text",
            remedy="Use a name without ${, quotes, backslashes, line breaks and control characters: rename it in the "
            "transform, or declare the object that contains it as MAP<STRING, …> or VARIANT.",
        )
    unusable, known = names_of_delta(table), set(map(folded, table.names if table is not None else ()))
    if taken := [n for n in rows.names if folded(n) in unusable or (is_internal(n) and folded(n) not in known)]:
        raise SchemaMismatchError(
            f"the rows have a column {taken[0]}, and Spark, Delta or stream-assets add one of this name themselves",
            remedy="Rename it in the transform, or leave it out of the schema.",
        )
    if VARIABLE in rows.json():
        raise SchemaMismatchError(
            f"a comment of a column has {VARIABLE}: Hadoop would replace such a variable, and Spark write it to files",
            remedy="Write the comment in another way.",
        )
    if table is None:
        return
    may_change = chosen is SchemaChanges.ADD_COLUMNS
    fixed = _keys(partitions)
    changed: list[str] = []
    of_partitions: list[str] = []
    wider: list[str] = []
    new: list[str] = []
    for name, found, wanted in _differences("", rows, table):
        if wanted is None:
            if name == RESCUED and chosen is SchemaChanges.RESCUE:
                continue
            new.append(f"{name} is not in the table")
            continue
        change = f"{name} is {found.simpleString()} but {wanted.simpleString()} in the table"
        if not is_wider(found, wanted):
            changed.append(change)
        elif fixed.isdisjoint(name_keys(name)):
            wider.append(change)
        else:
            of_partitions.append(f"{change}, which is partitioned by it")
    problems = [*changed, *of_partitions, *([] if may_change and widens else wider), *([] if may_change else new)]
    if problems:
        raise SchemaMismatchError(
            f"the rows do not fit the table {path}: {'; '.join(problems)}",
            remedy=_OF_PARTITIONS
            if of_partitions
            else _remedy(changed=bool(changed), wider=bool(wider), widens=widens, new=bool(new)),
        )


def names_of_delta(table: StructType | None) -> frozenset[str]:
    """Return the names, folded, that no new column of a table can have, because Spark or Delta use them themselves.

    Args:
        table: the columns of the table, which keep their names; ``None`` if it is new.
    """
    return _OF_DELTA.difference(map(folded, table.names if table is not None else ()))


def check_places(table: StructType, *, path: str) -> None:
    """Check that a table with ingested rows still has the columns that identify the message of a row.

    Raises:
        SchemaMismatchError: it lacks some; it names them.
    """
    lacking = [name for name in STREAM_COLUMNS if name not in table.names]
    if lacking:
        raise SchemaMismatchError(
            f"the table {path} has no column {', '.join(lacking)} any more: it was renamed or dropped",
            remedy="Without it a replay would duplicate rows. Rename it back (ALTER TABLE … RENAME COLUMN … TO …), or "
            "RESTORE the table to a version that has it.",
        )


def _remedy(*, changed: bool, wider: bool, widens: bool, new: bool) -> str:
    if changed:
        return (
            "Change the transform or the schema; schema_changes='add_columns' adds new columns and fields, and wider "
            f"types if the table has {WIDENING}, but makes no other change of a type."
        )
    let_in = " and ".join(["new columns and fields"] * new + ["wider types"] * wider)
    also = "" if widens or not wider else f" and the table property {WIDENING}, which its readers have to support"
    return f"Change the transform or the schema, or allow {let_in} with schema_changes='add_columns'{also}."


def _check_stream_columns(rows: StructType) -> None:
    lacking = [name for name in STREAM_COLUMNS if name not in rows.names]
    if lacking:
        raise SchemaMismatchError(
            f"the transform drops {', '.join(lacking)}",
            remedy="Keep the columns _stream, _shard, _sequence and _timestamp: they identify the message of a row.",
        )
    kinds = {name: rows[name].dataType.simpleString() for name in STREAM_COLUMNS}
    other = [f"{name} is {kinds[name]}, not {kind}" for name, kind in STREAM_TYPES.items() if kinds[name] != kind]
    if other:
        raise SchemaMismatchError(
            f"the transform changes the types of stream columns: {'; '.join(other)}",
            remedy="Keep them unchanged, and put values computed from them into columns of other names.",
        )


def lets_widen(properties: Mapping[str, str]) -> bool:
    """Return whether a table with these properties lets its types be widened.

    Example:
        >>> lets_widen({"delta.enableTypeWidening": "true"}), lets_widen({})
        (True, False)
    """
    return properties.get(WIDENING, "").lower() == "true"


def is_wider(found: DataType, wanted: DataType) -> bool:
    """Return whether Delta widens a column of the type ``wanted`` to ``found`` when rows are written.

    Its protocol for type widening allows: integers to longer ones, to DOUBLE (except BIGINT), and to decimals that hold
    all of them; FLOAT to DOUBLE; decimals to those with at least as many digits on both sides of the point.

    Example:
        >>> from pyspark.sql.types import IntegerType, LongType
        >>> is_wider(LongType(), IntegerType()), is_wider(IntegerType(), LongType())
        (True, False)
        >>> is_wider(DecimalType(12, 2), IntegerType()), is_wider(DecimalType(11, 2), IntegerType())
        (True, False)
    """
    to, of = found.simpleString(), wanted.simpleString()
    if isinstance(found, DecimalType) and isinstance(wanted, (DecimalType, IntegralType)):
        digits, scale = (wanted.precision, wanted.scale) if isinstance(wanted, DecimalType) else (_DIGITS[of], 0)
        return found.scale >= scale and found.precision - found.scale >= digits - scale
    if of in _INTEGERS and to in _INTEGERS:
        return _INTEGERS.index(to) > _INTEGERS.index(of)
    return to == "double" and of in ("float", *_INTEGERS[:3])


def _differences(name: str, rows: DataType, table: DataType) -> Iterator[tuple[str, DataType, DataType | None]]:
    """Yield the name and both types of each column or field that the table lacks or has with another type."""
    if isinstance(rows, StructType) and isinstance(table, StructType):
        known = {folded(field.name): field.dataType for field in table.fields}
        for field in rows.fields:
            path = f"{name}.{field.name}" if name else field.name
            wanted = known.get(folded(field.name))
            if wanted is None:
                if not _keys(table.names).isdisjoint(name_keys(field.name)):
                    raise SchemaMismatchError(
                        f"the rows have the field {path}, and the table has one with the same name in lower case",
                        remedy="Delta does not distinguish them: rename the field in the transform or in the schema.",
                    )
                yield path, field.dataType, None
            else:
                yield from _differences(path, field.dataType, wanted)
    elif isinstance(rows, ArrayType) and isinstance(table, ArrayType):
        yield from _differences(f"{name}[]", rows.elementType, table.elementType)
    elif isinstance(rows, MapType) and isinstance(table, MapType):
        yield from _differences(f"{name}.key", rows.keyType, table.keyType)
        yield from _differences(f"{name}.value", rows.valueType, table.valueType)
    elif rows.simpleString() != table.simpleString():
        yield name, rows, table


def with_columns_of(finder: FieldFinder, table: StructType, *, computed: frozenset[str]) -> FieldFinder:
    """Return the decoder with the columns and fields of structs that only the table has.

    Args:
        finder: the decoder.
        table: the columns of the table.
        computed: columns whose values Delta computes.
    """
    declared = _declared(finder.decoder)
    of_table = {folded(field.name): field.dataType for field in table.fields}
    fields = [_with_type(own, _united(own.dataType, of_table.get(folded(own.name)))) for own in declared.fields]
    taken = _taken(finder.decoder) | _keys(declared.names) | _keys(computed)
    new = (column for column in table.fields if taken.isdisjoint(name_keys(column.name)))
    fields += [StructField(column.name, column.dataType) for column in new if _decodes(column)]
    return replace(finder, decoder=_with_fields(finder.decoder, fields)) if fields != declared.fields else finder


def with_new_fields(
    finder: FieldFinder,
    seen: FieldStats,
    *,
    table: StructType | None,
    own: Decoder,
    computed: frozenset[str],
    any_name: bool,
) -> FieldFinder:
    """Return the decoder with columns for undeclared fields; it records those that cannot become columns.

    Args:
        finder: the decoder that has found the fields.
        seen: the values of the fields.
        table: the table, whose types new columns get; ``None`` if their values decide the types.
        own: the decoder as the user has declared it.
        computed: names that no field gives to a column, such as those of columns that the transform or Delta computes.
        any_name: whether the table accepts names with spaces and special characters.

    Raises:
        SchemaMismatchError: there are too many fields, so that their names are probably ids.
    """
    taken = _taken(finder.decoder) | _keys(computed)
    growth = _SchemaGrowth(taken=taken, any_name=any_name, is_strict=finder.decoder.mode is JsonMode.STRICT)
    declared = _declared(finder.decoder)
    grown = growth.struct(declared, seen, table, ())
    known = finder.known | growth.refused
    new = len(_paths(grown) - _paths(declared_columns(own.ddl()))) + len(known)
    if new > MAX_UNDECLARED_FIELDS:
        raise _too_many(str(new))
    return FieldFinder(_with_fields(finder.decoder, grown.fields), known)


def columns_of(seen: FieldStats) -> tuple[StructType, frozenset[Path]]:
    """Return the columns for a sample of documents, in lenient mode, and the fields that cannot become columns."""
    growth = _SchemaGrowth(taken=_taken(Json()) | _OF_DELTA, any_name=True, keeps_times=True)
    return growth.struct(StructType(), seen, None, ()), frozenset(growth.refused)


def undeclared_values(documents: Iterable[str], decoder: Json) -> FieldStats:
    """Return statistics of the values of undeclared fields.

    Args:
        documents: JSON objects of :attr:`spark_jobs.decoding.decoders.DecodedColumns.undeclared`.
        decoder: the decoder that has found them.

    Raises:
        SchemaMismatchError: there are too many fields, so that their names are probably ids; the rest is not read.
    """
    seen, unchecked = FieldStats(), 0
    declared = pa.struct(list(arrow_schema(_declared(decoder))))
    for document in documents:
        seen.add(read_object(document), declared)
        unchecked += len(document)
        if unchecked > _CHECKED_CHARACTERS:
            unchecked = 0
            if seen.size() > KEPT_FIELDS_FACTOR * MAX_UNDECLARED_FIELDS:
                raise _too_many(f"more than {KEPT_FIELDS_FACTOR * MAX_UNDECLARED_FIELDS}")
    return seen


def _too_many(count: str) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"messages have {count} undeclared fields, and at most {MAX_UNDECLARED_FIELDS} can become columns: "
        "their names look like ids",
        remedy="Declare the object that contains them as MAP<STRING, …> or VARIANT; or keep them in one column with "
        "schema_changes='rescue'.",
    )


def new_columns(before: FieldFinder, after: FieldFinder) -> Sequence[str]:
    """Return the names of the columns and fields that ``after`` has and ``before`` lacks."""
    return sorted(_paths(_declared(after.decoder)) - _paths(_declared(before.decoder)))


def takes_any_name(properties: Mapping[str, str]) -> bool:
    """Return whether a table with these properties accepts any column name, because it maps names.

    Example:
        >>> takes_any_name({"delta.columnMapping.mode": "name"}), takes_any_name({})
        (True, False)
    """
    return properties.get("delta.columnMapping.mode", "none").lower() != "none"


def _declared(decoder: Json) -> StructType:
    """Return the columns of the schema, without ``_rescued``."""
    return declared_columns(replace(decoder, rescue=False).ddl())


def _with_fields(decoder: Json, fields: list[StructField]) -> Json:
    return replace(decoder, schema=", ".join(column_ddl(field, declared=True) for field in fields))


def _taken(decoder: Json) -> frozenset[str]:
    """Return the keys of names that columns of messages cannot have."""
    own = (*STREAM_COLUMNS, *DEAD_LETTER_COLUMNS, RESCUED)
    names = (*own, *key_columns(decoder), *header_columns(decoder))
    return _keys(names)


def _keys(names: Iterable[str]) -> frozenset[str]:
    """Return the keys of all of these names."""
    return frozenset[str]().union(*map(name_keys, names))


def _decodes(column: StructField) -> bool:
    """Return whether JSON can be decoded into the type of this column."""
    try:
        for field in arrow_schema(StructType([column])):
            check_json_type(field.name, field.type)
    except Exception:  # noqa: BLE001 - PySpark raises many types of errors for types that Arrow lacks
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _SchemaGrowth:
    """Adds fields to types.

    Args:
        taken: the keys of names that no column may have.
        any_name: whether the table accepts names with spaces and special characters.
        is_strict: whether a STRING accepts text only.
        keeps_times: whether a field that has only times becomes a DATE or TIMESTAMP.
        refused: collects the paths of fields that cannot become columns.
    """

    taken: frozenset[str]
    any_name: bool
    is_strict: bool = False
    keeps_times: bool = False
    refused: set[Path] = field(default_factory=set)

    def struct(self, own: StructType, seen: FieldStats, table: DataType | None, path: Path) -> StructType:
        """Return ``own`` with the new fields, also within its fields."""
        fields = {field.name: field for field in own.fields}
        names = set(_keys(fields))
        of_table = {folded(field.name): field for field in table.fields} if isinstance(table, StructType) else {}
        others = _keys(field.name for field in of_table.values())
        for name, inner in seen.fields.items():
            there = of_table.get(folded(name))
            place = (*path, name)
            if name in fields:
                kind = self._within(fields[name].dataType, inner, there.dataType if there else None, place)
                fields[name] = _with_type(fields[name], kind)
                continue
            # Executors skip names that are too long.
            if not inner.has_content() or len(name) > MAX_COLUMN_NAME_LENGTH:
                continue
            found = there.dataType if there is not None else self._type_of(inner, place)
            taken = names if there is not None else names | others
            if found is None or not self._may_be(name, taken, place) or not _decodes(StructField(name, found)):
                self.refused.add(place)
                continue
            names |= name_keys(name)
            fields[name] = StructField(name, found)
        return StructType(list(fields.values()))

    def _within(self, own: DataType, seen: FieldStats, table: DataType | None, path: Path) -> DataType:
        if isinstance(own, StructType):
            return self.struct(own, seen, table, path)
        if isinstance(own, ArrayType) and seen.items is not None:
            item = table.elementType if isinstance(table, ArrayType) else None
            return ArrayType(self._within(own.elementType, seen.items, item, (*path, IN_ARRAY)), own.containsNull)
        if isinstance(own, MapType) and seen.values is not None:
            item = table.valueType if isinstance(table, MapType) else None
            found = self._within(own.valueType, seen.values, item, (*path, IN_MAP))
            return MapType(own.keyType, found, own.valueContainsNull)
        return own

    def _may_be(self, name: str, names: set[str], path: Path) -> bool:
        is_free = len(path) > 1 or (self.taken.isdisjoint(name_keys(name)) and not is_internal(name))
        is_told_apart = names.isdisjoint(name_keys(name)) and is_free
        return is_name(name) and is_told_apart and (self.any_name or not NEEDS_MAPPING.search(name))

    def _type_of(self, seen: FieldStats, path: Path) -> DataType | None:
        """Return a type that these values fit and later ones probably fit; ``None`` if there are no values."""
        kinds = set(seen.kinds) - {"null"}
        if len(path) <= MAX_LEVELS and kinds == {"object"}:
            if seen.values is not None:
                item = self._type_of(seen.values, (*path, IN_MAP))
                return MapType(StringType(), item) if item is not None else None
            found = self.struct(StructType(), seen, None, path)
            return found if found.fields else None
        if len(path) <= MAX_LEVELS and kinds == {"array"}:
            assert seen.items is not None
            item = self._type_of(seen.items, (*path, IN_ARRAY))
            return ArrayType(item) if item is not None else None
        return self._type_of_scalars(seen, kinds)

    def _type_of_scalars(self, seen: FieldStats, kinds: set[str]) -> DataType | None:
        if not kinds:
            return None
        if kinds == {"whole number"} and not seen.is_wide:
            return LongType()
        if kinds <= _NUMBERS and seen.digits <= _SURELY_DOUBLE:
            return DoubleType()
        if kinds == {"true or false"}:
            return BooleanType()
        if self.keeps_times and kinds <= _TIMES:
            return DateType() if kinds == {"date"} else TimestampType()
        # A time today may be any text tomorrow, and a number of 30 digits is an id. In lenient mode a STRING accepts
        # any value, as it is written.
        return VariantType() if self.is_strict and not kinds <= _TEXTS else StringType()


def _united(own: DataType, table: DataType | None) -> DataType:
    """Return the type with the fields of structs that only the table has."""
    if isinstance(own, StructType) and isinstance(table, StructType):
        of_table = {folded(field.name): field for field in table.fields}
        names = _keys(own.names)
        fields = [
            _with_type(f, _united(f.dataType, of_table[folded(f.name)].dataType)) if folded(f.name) in of_table else f
            for f in own.fields
        ]
        new = [f for f in of_table.values() if names.isdisjoint(name_keys(f.name)) and _decodes(f)]
        return StructType([*fields, *(StructField(f.name, f.dataType) for f in new)])
    if isinstance(own, ArrayType) and isinstance(table, ArrayType):
        return ArrayType(_united(own.elementType, table.elementType), own.containsNull)
    if isinstance(own, MapType) and isinstance(table, MapType):
        return MapType(own.keyType, _united(own.valueType, table.valueType), own.valueContainsNull)
    return own


def _with_type(field: StructField, kind: DataType) -> StructField:
    return StructField(field.name, kind, field.nullable, field.metadata)


def _paths(kind: DataType, prefix: str = "") -> frozenset[str]:
    """Return the names of all columns, and of the fields in them."""
    if isinstance(kind, StructType):
        names = [(f"{prefix}{field.name}", field.dataType) for field in kind.fields]
        return frozenset(name for name, _ in names).union(*(_paths(inner, f"{name}.") for name, inner in names))
    if isinstance(kind, ArrayType):
        return _paths(kind.elementType, f"{prefix}[].")
    return _paths(kind.valueType, f"{prefix}{{}}.") if isinstance(kind, MapType) else frozenset()


def rescue(rows: DataFrame, table: StructType | None) -> DataFrame:
    """Return the rows in the columns of the table, with all other values as a JSON object in ``_rescued``.

    Fields that a struct of the table lacks are rescued within an object of its name. Those within arrays and maps stay
    there, and do not fit. Nulls are not rescued. ``_rescued`` keeps the values that it already holds.

    Args:
        rows: the rows to write.
        table: the columns of the table; ``None`` if these rows create it.
    """
    kept, rest = _divided_columns(rows, table)
    made = _object(rest)
    if RESCUED in rows.columns:
        # Both objects may have a struct of one name: the decoder rescues some of its fields, and this function others.
        made = _udf(merge_objects, StringType())(RESCUED, made) if rest else f.col(RESCUED)
    return rows.select(*kept, made.alias(RESCUED))


def rescued_twice(rows: DataFrame, table: StructType | None) -> Column | None:
    """Return a condition on rows that :func:`rescue` would give two values of one name; ``None`` if none can be.

    A field of a message is one of them, and the other is of a column that the transform adds and the table lacks.

    Args:
        rows: see :func:`rescue`.
        table: see :func:`rescue`.
    """
    _, rest = _divided_columns(rows, table)
    return _udf(share_values, BooleanType())(RESCUED, _object(rest)) if RESCUED in rows.columns and rest else None


def _divided_columns(rows: DataFrame, table: StructType | None) -> tuple[list[Column], list[Column]]:
    columns = [(f.col(quoted(field.name)), field) for field in rows.schema.fields if field.name != RESCUED]
    return _parts(columns, table if table is not None else rows.schema)


def _udf(function: Callable[..., Any], kind: DataType) -> Callable[..., Column]:
    # Unless useArrow is set, Spark infers it from the annotations, and warns.
    return f.udf(function, kind, useArrow=False)


def _parts(fields: Iterable[tuple[Column, StructField]], own: StructType) -> tuple[list[Column], list[Column]]:
    """Return the columns and parts of columns that fit the table, and those that do not, each under its name."""
    known = {folded(field.name): field for field in own.fields}
    kept: list[Column] = []
    rest: list[Column] = []
    for column, one in fields:
        place = known.get(folded(one.name))
        if place is None:
            rest.append(column.alias(one.name))
            continue
        inside, outside = _divided(column, one, place)
        kept.append(inside.alias(one.name, metadata=one.metadata))
        rest += [outside.alias(one.name)] if outside is not None else []
    return kept, rest


def _divided(column: Column, field: StructField, own: StructField) -> tuple[Column, Column | None]:
    """Return the part of a column that fits the table, and the rest, if there may be one."""
    if not isinstance(field.dataType, StructType) or not isinstance(own.dataType, StructType):
        return column, None
    kept, rest = _parts([(column.getField(one.name), one) for one in field.dataType.fields], own.dataType)
    if not rest:
        return column, None
    # An object without fields is null.
    outside = f.when(f.to_json(f.struct(*rest), _OPTIONS) != "{}", f.struct(*rest))
    whole = f.struct(*kept) if kept else f.lit(None).cast(own.dataType)
    return f.when(column.isNotNull(), whole), outside


def _object(columns: list[Column]) -> Column:
    """Return a JSON object of the columns that are not null, or null if all are."""
    if not columns:
        return f.lit(None).cast(StringType())
    return f.nullif(f.to_json(f.struct(*columns), _OPTIONS), f.lit("{}"))
