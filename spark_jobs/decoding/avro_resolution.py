"""Avro's schema resolution: what one schema has written, as the columns of another one.

A plan is made once for a pair of schemas. The library decodes with a schema of the same bytes, in which unions say
which of their branches was taken, and enums and truth values what was written, so that nothing damaged is taken for a
value; then a column after the other is made of what was decoded.
"""

from __future__ import annotations

import io
import itertools
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.decoding.avro_types import UUID_BYTES, AvroField, AvroType, members
from spark_jobs.decoding.extras import imported
from spark_jobs.decoding.json_types import Column
from spark_jobs.decoding.rows import columns_of, list_offsets, reason
from stream_consumers.errors import SchemaMismatchError
from stream_consumers.messages import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS

Build: TypeAlias = Callable[[Sequence[Any]], Column]
_REMEDY = "Write with a schema that the reader's is compatible with, or read with another one."
_PROMOTIONS = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
_PER_MICROSECOND = {"millis": 1000, "micros": 1}
_NANOSECONDS = 1000
MICROSECONDS = (MIN_TIMESTAMP_MS * 1000, MAX_TIMESTAMP_MS * 1000 + 999)
"""The first and the last one that a TIMESTAMP can say, since 1970."""
DAYS = (MIN_TIMESTAMP_MS // 86_400_000, MAX_TIMESTAMP_MS // 86_400_000)
"""The first and the last one that a DATE can say, since 1970."""
_BOOLEANS = {b"\0": False, b"\1": True}
# A list takes a negative index for one from its end, and so does the library with the branch of a union that is
# damaged. There stand some that nothing is long enough for.
_NO_BRANCH = {"type": "fixed", "name": "no_branch", "size": 1 << 62}
_NO_BRANCHES = 64


class AvroReader:
    """Reads payloads of one schema into the columns of another one.

    Args:
        writer: the schema that has written them.
        reader: the schema of the columns.
        schema: the columns.
        is_one: whether all of the reader's schema is one column.

    Raises:
        SchemaMismatchError: the reader's schema cannot read what the writer's has written.
    """

    def __init__(self, writer: AvroType, reader: AvroType, schema: pa.Schema, *, is_one: bool) -> None:
        fastavro = imported("fastavro", extra="avro")
        self._decode = fastavro.schemaless_reader
        self._schema = fastavro.parse_schema(_Emitted().schema(writer))
        if is_one:
            self._build = plan(writer, reader, schema.field(0).type, schema.field(0).name)
        else:
            self._build = plan(writer, reader, pa.struct(list(schema)), "")
        self._is_one = is_one

    def read(self, payload: bytes) -> Any:
        """See :meth:`spark_jobs.decoding.rows.RowReader.read`."""
        buffer = io.BytesIO(payload)
        try:
            value = self._decode(buffer, self._schema)
        except IndexError:
            raise ValueError("a number is cut off, or a union has no such branch") from None
        except EOFError as error:
            no_branch = str(_NO_BRANCH["size"]) in str(error)
            raise ValueError("a union has no such branch" if no_branch else "the payload ends too early") from None
        left = len(payload) - buffer.tell()
        if left:
            raise ValueError(f"the payload goes on {left} bytes behind the end of the value")
        return value

    def columns(self, values: Sequence[Any]) -> list[Column]:
        """See :meth:`spark_jobs.decoding.rows.RowReader.columns`."""
        return columns_of(self._build(values), is_one=self._is_one)


class _Emitted:
    """Makes the schema that the library decodes with: the same bytes, and values that say what was written."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._has_no_branch = False

    def schema(self, kind: AvroType) -> Any:
        if kind.kind == "union":
            made: Any = self._union(kind)
        elif kind.kind == "record":
            fields = [{"name": field.name, "type": self.schema(field.type)} for field in kind.fields]
            made = {"type": "record", "name": self._name(), "fields": fields}
        elif kind.kind == "array":
            if not _fewest_bytes(kind.parts[0]):
                raise SchemaMismatchError("an array of items without bytes has no end", remedy=_REMEDY)
            made = {"type": "array", "items": self.schema(kind.parts[0])}
        elif kind.kind == "map":
            made = {"type": "map", "values": self.schema(kind.parts[0])}
        elif kind.kind in ("boolean", "fixed"):
            made = {"type": "fixed", "name": self._name(), "size": kind.size or 1}
        else:
            made = "int" if kind.kind == "enum" else kind.kind
        return made

    def _union(self, kind: AvroType) -> list[Any]:
        is_plain = len(kind.branches) < 2
        parts: list[Any] = [
            self.schema(part)
            if is_plain or part.kind == "null"
            else {
                "type": "record",
                "name": self._name(),
                "fields": [{"name": _branch(place), "type": self.schema(part)}],
            }
            for place, part in enumerate(kind.parts)
        ]
        parts += [_NO_BRANCH["name"] if self._has_no_branch else _NO_BRANCH]
        self._has_no_branch = True
        return [*parts, *[_NO_BRANCH["name"]] * (_NO_BRANCHES - 1)]

    def _name(self) -> str:
        return f"type_{next(self._numbers)}"


def _branch(place: int) -> str:
    """How a value names the branch of its union."""
    return f"branch_{place}"


def _fewest_bytes(kind: AvroType) -> int:
    if kind.kind == "record":
        return sum(_fewest_bytes(field.type) for field in kind.fields)
    return {"null": 0, "fixed": kind.size}.get(kind.kind, 1)


def plan(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Build:
    """How a column is made of what was decoded; ``None`` among it is null.

    Args:
        writer: the type of what was decoded.
        reader: the type that it is read as.
        kind: of the column.
        path: where it stands, for errors.

    Raises:
        SchemaMismatchError: the one cannot be read as the other.
    """
    if writer.kind == "union":
        return _from_union(writer, reader, kind, path)
    if writer.kind == "null":
        if not reader.is_nullable:
            raise _mismatch(writer, reader, path)
        return lambda values: _nulls(len(values), kind)
    branches = reader.branches
    if len(branches) == 1:
        return _PLANS.get(branches[0].kind, _plan_scalar)(writer, branches[0], kind, path)
    return _into_union(writer, reader, kind, path)


def _from_union(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Build:
    """A union as whatever the reader has there; a branch that it cannot read fails where it was taken."""
    if len(writer.branches) == 1:
        return plan(writer.branches[0], reader, kind, path)
    builds: dict[str, Build] = {}
    refused: dict[str, SchemaMismatchError] = {}
    for place, part in enumerate(writer.parts):
        try:
            builds[_branch(place)] = plan(part, reader, kind, path)
        except SchemaMismatchError as error:
            refused[_branch(place)] = error
    if not builds:
        raise _mismatch(writer, reader, path)

    def build(values: Sequence[Any]) -> Column:
        taken: dict[str, tuple[list[int], list[Any]]] = {}
        for row, value in enumerate(values):
            if value is not None:
                ((branch, one),) = value.items()
                rows, own = taken.setdefault(branch, ([], []))
                rows.append(row)
                own.append(one)
        parts, places = [_nulls(1, kind)], np.zeros(len(values), np.int64)
        behind = 1
        for branch, (rows, own) in taken.items():
            if branch in refused:
                raise ValueError(refused[branch].what)
            parts.append(builds[branch](own))
            places[rows] = np.arange(behind, behind + len(rows))
            behind += len(rows)
        merged: Column = pa.concat_arrays(parts)
        return merged.take(pa.array(places, pa.int64()))

    return build


def _into_union(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Build:
    """One type as a STRUCT of several, of which one is set."""
    place, branch, build = struct_member(writer, reader, kind, path)
    if branch is None:
        return build
    assert isinstance(kind, pa.StructType)
    return lambda values: _struct(
        [build(values) if other == place else _nulls(len(values), field.type) for other, field in enumerate(kind)],
        kind,
        values,
    )


def struct_member(
    writer: AvroType, reader: AvroType, kind: pa.DataType, path: str
) -> tuple[int, AvroType | None, Build]:
    """Which field of the STRUCT, that a union of several types is, a type is read into; its place, type, and values.

    ``None`` in the place of the type, and nulls of the STRUCT, if that has no column.

    Raises:
        SchemaMismatchError: there is none.
    """
    assert isinstance(kind, pa.StructType)
    found = members(reader, path)
    # A type itself comes before one that it could be promoted to.
    for place in sorted(range(len(found)), key=lambda place: not _is_alike(writer, found[place][1])):
        try:
            # Planned once: a second time at each level would double with each union within another.
            build = plan(writer, found[place][1], kind.field(place).type, path)
        except SchemaMismatchError:
            continue
        return place, found[place][1], build
    if any(_is_alike(writer, branch) for branch in reader.branches):
        return 0, None, lambda values: _nulls(len(values), kind)
    raise _mismatch(writer, reader, path)


def _is_alike(writer: AvroType, reader: AvroType) -> bool:
    return writer.kind == reader.kind and (not writer.name or _is_named_alike(writer, reader))


def _is_named_alike(writer: AvroType, reader: AvroType) -> bool:
    aliases = [alias.rpartition(".")[2] for alias in reader.aliases]
    return writer.short_name in (reader.short_name, *aliases)


def _mismatch(writer: AvroType, reader: AvroType, path: str) -> SchemaMismatchError:
    what = " or ".join(str(branch) for branch in reader.branches) or "null"
    where = f"{path}: " if path else ""
    shown = " or ".join(str(part) for part in writer.parts) if writer.kind == "union" else str(writer)
    return SchemaMismatchError(f"{where}{shown} was written, and cannot be read as {what}", remedy=_REMEDY)


def _plan_record(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Build:
    if not _is_alike(writer, reader):
        raise _mismatch(writer, reader, path)
    assert isinstance(kind, pa.StructType)
    written = {field.name: field for field in writer.fields}
    fields = [field for field in reader.fields if field.type.has_column]
    # Those of a union would be named otherwise.
    assert [name for name, _ in members(reader, path)] == [field.name for field in fields]
    builds = [
        _plan_field(written, field, child.type, f"{path}.{field.name}" if path else field.name)
        for field, child in zip(fields, kind)
    ]
    required = required_fields(written, reader)

    def build(values: Sequence[Any]) -> Column:
        for name in required:
            if any(value is not None and value[name] is None for value in values):
                raise ValueError(f"{path}.{name} is null, and its type has no null".removeprefix("."))
        return _struct([one(values) for one in builds], kind, values)

    return build


def _plan_field(written: dict[str, AvroField], field: AvroField, kind: pa.DataType, path: str) -> Build:
    """How a field of the reader is made of whole records."""
    own = written_field(written, field)
    if own is None:
        return default_of(field, kind, path)
    build, get = plan(own.type, field.type, kind, path), itemgetter(own.name)

    def of_records(values: Sequence[Any]) -> Column:
        if None in values:
            return build([None if value is None else get(value) for value in values])
        return build(list(map(get, values)))

    return of_records


def written_field(written: Mapping[str, AvroField], field: AvroField) -> AvroField | None:
    """The field of the writer that one of the reader is, by its name or an alias; ``None`` if there is none."""
    return next((written[name] for name in (field.name, *field.aliases) if name in written), None)


def required_fields(written: Mapping[str, AvroField], reader: AvroType) -> list[str]:
    """The names of what was written as null, perhaps, and must not be."""
    pairs = [(written_field(written, field), field) for field in reader.fields]
    return [own.name for own, field in pairs if own and own.type.is_nullable and not field.type.is_nullable]


def _nulls(count: int, kind: Any) -> Column:
    found: Column = pa.nulls(count, kind)
    return found


def _struct(children: list[Column], kind: pa.StructType, values: Sequence[Any]) -> Column:
    mask = pa.array([value is None for value in values], pa.bool_()) if None in values else None
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)


def _plan_array(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Build:
    if writer.kind != "array":
        raise _mismatch(writer, reader, path)
    assert isinstance(kind, pa.ListType)
    items = _plan_items(writer, reader, kind.value_type, f"{path}[]")

    def build(values: Sequence[Any]) -> Column:
        flat = [item for value in values if value is not None for item in value]
        offsets: Any = list_offsets(values)
        return pa.ListArray.from_arrays(offsets, items(flat), type=kind)

    return build


def _plan_map(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Build:
    if writer.kind != "map":
        raise _mismatch(writer, reader, path)
    assert isinstance(kind, pa.MapType)
    items = _plan_items(writer, reader, kind.item_type, f"{path}{{}}")

    def build(values: Sequence[Any]) -> Column:
        pairs = [pair for value in values if value is not None for pair in value.items()]
        keys, held = pa.array([key for key, _ in pairs], pa.string()), items([item for _, item in pairs])
        offsets: Any = list_offsets(values)
        made: Column = pa.MapArray.from_arrays(offsets, keys, held)
        return made if made.type == kind else made.cast(kind)

    return build


def _plan_items(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Build:
    own, wanted = writer.parts[0], reader.parts[0]
    build = plan(own, wanted, kind, path)
    if not own.is_nullable or wanted.is_nullable:
        return build

    def checked(values: Sequence[Any]) -> Column:
        if None in values:
            raise ValueError(f"{path} is null, and its type has no null")
        return build(values)

    return checked


def enum_texts(writer: AvroType, reader: AvroType, path: str) -> list[str | None]:
    """What the reader makes of each symbol of the writer; ``None`` of one that it does not know.

    Raises:
        SchemaMismatchError: they are not the same enum.
    """
    if not _is_alike(writer, reader):
        raise _mismatch(writer, reader, path)
    known = set(reader.symbols)
    return [symbol if symbol in known else reader.default for symbol in writer.symbols]


def _plan_enum(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Build:
    texts = enum_texts(writer, reader, path)

    def text(place: int | None) -> str | None:
        if place is None:
            return None
        if not 0 <= place < len(texts):
            raise ValueError(f"{path}: {writer} has no symbol {place}")
        found = texts[place]
        if found is None:
            raise ValueError(f"{path}: the reader's {reader} has no {writer.symbols[place]!r}, and no default")
        return found

    return lambda values: pa.array(list(map(text, values)), kind)


def _plan_scalar(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Build:
    is_logical = bool(writer.logical and reader.logical)
    if is_logical and writer.logical.rpartition("-")[0] != reader.logical.rpartition("-")[0]:
        raise _mismatch(writer, reader, path)
    if reader.logical == "decimal":
        return _plan_decimal(writer, reader, kind, path)
    is_uuid = is_logical and reader.logical == "uuid"
    if reader.kind == "fixed" and not is_uuid and (not _is_alike(writer, reader) or writer.size != reader.size):
        raise _mismatch(writer, reader, path)
    if not is_uuid and writer.kind != reader.kind and reader.kind not in _PROMOTIONS.get(writer.kind, ()):
        raise _mismatch(writer, reader, path)
    if reader.unit:
        return _plan_moment(writer, reader, kind, path)
    if is_logical and writer.logical != reader.logical:
        # Milliseconds of a day and microseconds of one.
        raise _mismatch(writer, reader, path)
    if reader.logical == "date":
        return lambda values: _checked(pa.array(values, pa.int32()), *DAYS, path).cast(kind)
    if reader.logical == "duration":
        return lambda values: _durations(values, kind)
    convert = _conversion(writer, reader, path)
    if convert is None:
        return lambda values: _array(values, kind, path)
    return lambda values: _array([None if value is None else convert(value) for value in values], kind, path)


def _conversion(writer: AvroType, reader: AvroType, path: str) -> Callable[[Any], Any] | None:
    """From what was decoded to what the column takes; ``None`` if nothing is to be done."""
    if writer.kind == "boolean":
        return _boolean
    if reader.logical == "uuid" and writer.kind == "fixed" and writer.size == UUID_BYTES:
        return lambda value: str(uuid.UUID(bytes=value))
    if reader.kind in ("float", "double") and writer.kind in ("int", "long"):
        return _exactly(reader.kind, path)
    if writer.kind == "bytes" and reader.kind == "string":
        return bytes.decode
    return str.encode if writer.kind == "string" and reader.kind == "bytes" else None


def _exactly(kind: str, path: str) -> Callable[[int], float]:
    """From a whole number to the same as a floating point number."""
    nearest: Callable[[int], Any] = float if kind == "double" else np.float32

    def convert(value: int) -> float:
        found = float(nearest(value))
        if int(found) != value:
            raise ValueError(f"{path} is not a whole number that a {kind} can hold exactly")
        return found

    return convert


def _boolean(value: bytes) -> bool:
    if value not in _BOOLEANS:
        raise ValueError(f"a truth value is {value[0]}")
    return _BOOLEANS[value]


def _array(values: Sequence[Any], kind: pa.DataType, path: str) -> Column:
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, OverflowError) as error:
        raise ValueError(f"{path}: {reason(error)}") from error


def _plan_moment(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Build:
    """Moments, in the unit in which they were written."""
    unit = writer.unit or reader.unit

    def build(values: Sequence[Any]) -> Column:
        if unit == "nanos":
            # Spark has no more than microseconds.
            values = [None if value is None else value // _NANOSECONDS for value in values]
        factor = _PER_MICROSECOND.get(unit, 1)
        column: Column = pa.array(values, pa.int64())
        _checked(column, MICROSECONDS[0] // factor, MICROSECONDS[1] // factor, path)
        return (column if factor == 1 else pc.multiply(column, factor)).cast(kind)

    return build


def _checked(column: Column, first: int, last: int, path: str) -> Column:
    found: Any = pc.min_max(column).as_py()
    if found["min"] is not None and not first <= found["min"] <= found["max"] <= last:
        raise ValueError(f"{path} is not in the years 1 to 9999")
    return column


def _plan_decimal(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Build:
    scale = writer.scale if writer.logical else reader.scale
    is_written = writer.kind in ("bytes", "fixed") if writer.logical else _is_alike(writer, reader)
    if not is_written or scale > reader.scale or (not writer.logical and writer.size != reader.size):
        raise _mismatch(writer, reader, path)
    factor, limit = int(10 ** (reader.scale - scale)), int(10**reader.precision)

    def unscaled(value: bytes) -> bytes:
        number: int = int.from_bytes(value, "big", signed=True) * factor
        if not value or abs(number) >= limit:
            raise ValueError(f"{path} is no number of {reader.precision} digits")
        return number.to_bytes(16, "little", signed=True)

    def build(values: Sequence[Any]) -> Column:
        numbers = b"".join(bytes(16) if value is None else unscaled(value) for value in values)
        valid = pa.array([value is not None for value in values], pa.bool_()).buffers()[1]
        return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(numbers)])

    return build


def _durations(values: Sequence[Any], kind: pa.DataType) -> Column:
    assert isinstance(kind, pa.StructType)
    numbers = np.frombuffer(b"".join(bytes(12) if value is None else value for value in values), "<u4").reshape(-1, 3)
    return _struct([pa.array(numbers[:, part].astype(np.int64)) for part in range(3)], kind, values)


def default_of(field: AvroField, kind: pa.DataType, path: str) -> Build:
    """How a column is made of the default of a field that was not written; ``None`` among the values is null.

    Raises:
        SchemaMismatchError: it has none, or none of its type.
    """
    if field.default is None:
        raise SchemaMismatchError(f"{path} was not written, and has no default", remedy=_REMEDY)
    try:
        one = plan(field.type, field.type, kind, path)([_default(field.type, json.loads(field.default))])
    except (ValueError, TypeError, KeyError, AttributeError, pa.ArrowException) as error:
        raise SchemaMismatchError(f"{path}: its default {field.default} is none of its type", remedy=_REMEDY) from error

    def build(values: Sequence[Any]) -> Column:
        return one.take(pa.array([None if value is None else 0 for value in values], pa.int64()))

    return build


def _default(kind: AvroType, default: Any) -> Any:
    """A default out of JSON, as it would have been decoded."""
    made: Any = default
    if kind.kind == "union":
        made = _default_of_union(kind, default)
    elif kind.kind == "record":
        own = {field.name: json.loads(field.default) for field in kind.fields if field.default is not None}
        given = {**own, **default}
        made = {field.name: _default(field.type, given[field.name]) for field in kind.fields}
    elif kind.kind == "array":
        made = [_default(kind.parts[0], item) for item in default]
    elif kind.kind == "map":
        made = {key: _default(kind.parts[0], item) for key, item in default.items()}
    elif kind.kind == "boolean":
        made = bytes([default])
    elif kind.kind in ("bytes", "fixed"):
        made = default.encode("latin-1")
    elif kind.kind in ("float", "double"):
        made = float(default)
    elif kind.kind == "enum":
        made = kind.symbols.index(default)
    return made


def _default_of_union(kind: AvroType, default: Any) -> Any:
    """The value of the first branch that takes it, which in older versions of Avro has to be the first one."""
    if default is None and kind.is_nullable:
        return None
    for place, part in enumerate(kind.parts):
        if part.kind == "null" or not _takes(part, default):
            continue
        value = _default(part, default)
        return value if len(kind.branches) == 1 else {_branch(place): value}
    raise ValueError("no branch takes it")


def _takes(kind: AvroType, default: Any) -> bool:
    """Whether a default may be one of this type."""
    if kind.kind in ("record", "map"):
        return isinstance(default, dict)
    if kind.kind == "array":
        return isinstance(default, list)
    if kind.kind == "boolean" or isinstance(default, bool):
        return kind.kind == "boolean" and isinstance(default, bool)
    if kind.kind in ("int", "long"):
        return isinstance(default, int)
    if kind.kind in ("float", "double"):
        return isinstance(default, (int, float))
    return isinstance(default, str) and (kind.kind != "enum" or default in kind.symbols)


_PLANS: dict[str, Callable[[AvroType, AvroType, pa.DataType, str], Build]] = {
    "record": _plan_record,
    "array": _plan_array,
    "map": _plan_map,
    "enum": _plan_enum,
}
