"""What becomes of columns that a table does not have, and of types that it has otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pyspark.sql.types import ArrayType, DataType, DecimalType, IntegralType, MapType, StructType

from spark_jobs.decoding.decoders import RESCUED
from spark_jobs.reading.source import STREAM_COLUMNS, STREAM_TYPES
from stream_consumers.errors import SchemaMismatchError
from stream_consumers.options import SchemaChanges, choice

WIDENING = "delta.enableTypeWidening"
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_DIGITS = {"tinyint": 10, "smallint": 10, "int": 10, "bigint": 20}
"""Of the decimals that Delta widens them to."""


def check_columns(
    rows: StructType, table: StructType | None, *, path: str, schema_changes: SchemaChanges | str, widens: bool = False
) -> None:
    """Refuse rows that do not fit the table before anything is read.

    Args:
        rows: the columns to write.
        table: those of the table; ``None`` if it is new.
        path: the table, for the message.
        schema_changes: what may come in.
        widens: whether the table lets its types be widened.

    Raises:
        SchemaMismatchError: listing the columns that do not fit.
    """
    chosen = choice(SchemaChanges, schema_changes, option="schema_changes")
    _check_stream_columns(rows)
    if table is None:
        return
    may_change = chosen is SchemaChanges.ADD_COLUMNS
    changed: list[str] = []
    wider: list[str] = []
    new: list[str] = []
    for name, found, wanted in _differences("", rows, table):
        if wanted is None:
            if name == RESCUED and chosen is SchemaChanges.RESCUE:
                continue
            new.append(f"{name} is not in the table")
            continue
        told = f"{name} is {found.simpleString()} but {wanted.simpleString()} in the table"
        (wider if is_wider(found, wanted) else changed).append(told)
    problems = [*changed, *([] if may_change and widens else wider), *([] if may_change else new)]
    if problems:
        raise SchemaMismatchError(
            f"the rows do not fit the table {path}: {'; '.join(problems)}",
            remedy=_remedy(changed=bool(changed), wider=bool(wider), widens=widens, new=bool(new)),
        )


def check_places(table: StructType, *, path: str) -> None:
    """Refuse a table of ours that says no more which message a row is from.

    Raises:
        SchemaMismatchError: naming the columns that it lacks.
    """
    lacking = [name for name in STREAM_COLUMNS if name not in table.names]
    if lacking:
        raise SchemaMismatchError(
            f"the table {path} has no column {', '.join(lacking)} any more: somebody has renamed or dropped it",
            remedy="Without it a replay would write its rows a second time. Give it its name back (ALTER TABLE … "
            "RENAME COLUMN … TO …), or RESTORE the table to a version that has it.",
        )


def _remedy(*, changed: bool, wider: bool, widens: bool, new: bool) -> str:
    if changed:
        return (
            "Change the transform or the schema; schema_changes='add_columns' lets new columns and fields in, and "
            f"wider types where the table has {WIDENING}, but no other change of a type."
        )
    let_in = " and ".join(["new columns and fields"] * new + ["wider types"] * wider)
    also = "" if widens or not wider else f", and the table's property {WIDENING}, which its readers have to support"
    return f"Change the transform or the schema, or let {let_in} in with schema_changes='add_columns'{also}."


def _check_stream_columns(rows: StructType) -> None:
    lacking = [name for name in STREAM_COLUMNS if name not in rows.names]
    if lacking:
        raise SchemaMismatchError(
            f"the transform drops {', '.join(lacking)}",
            remedy="Keep the columns _stream, _shard, _sequence and _timestamp: they tell which message a row is from.",
        )
    kinds = {name: rows[name].dataType.simpleString() for name in STREAM_COLUMNS}
    other = [f"{name} is {kinds[name]}, not {kind}" for name, kind in STREAM_TYPES.items() if kinds[name] != kind]
    if other:
        raise SchemaMismatchError(
            f"the transform changes the types of stream columns: {'; '.join(other)}",
            remedy="Keep them as they are, and put what is made of them into columns of other names.",
        )


def lets_widen(properties: Mapping[str, str]) -> bool:
    """Whether a table with these properties lets its types be widened.

    Example:
        >>> lets_widen({"delta.enableTypeWidening": "true"}), lets_widen({})
        (True, False)
    """
    return properties.get(WIDENING, "").lower() == "true"


def is_wider(found: DataType, wanted: DataType) -> bool:
    """Whether Delta widens a column of the type ``wanted`` to ``found`` when rows are written.

    As its protocol for type widening has it: integers to longer ones, to DOUBLE but for BIGINT, and to decimals that
    hold all of them; FLOAT to DOUBLE; decimals to those with as many places on both sides or more.

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
    """What is of another type in the table, or not in it: the name, and the types."""
    if isinstance(rows, StructType) and isinstance(table, StructType):
        known = {field.name.lower(): field.dataType for field in table.fields}
        for field in rows.fields:
            path = f"{name}.{field.name}" if name else field.name
            wanted = known.get(field.name.lower())
            if wanted is None:
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
