"""Avro's schema resolution: reads values that one schema has written as values of another schema's columns.

fastavro decodes with an equivalent schema of the same bytes, in which unions name their branch, and enums and booleans
are the raw numbers, so that damaged bytes are never accepted as a value. A function that is created once for a pair of
schemas converts the decoded values to values that the column accepts.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Context, Decimal
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from spark_jobs.decoding.avro_schema import UUID_BYTES, AvroField, AvroType, members
from spark_jobs.decoding.decoders import Column, columns_of, import_library
from spark_jobs.decoding.schema_limits import WeightBudget
from stream_consumers.errors import SchemaMismatchError
from stream_consumers.messages import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS

Convert: TypeAlias = Callable[[Any], Any]
"""Converts a decoded value to one that Arrow accepts for the column, or raises ``ValueError``."""
_REMEDY = "Write with a schema that is compatible with the reader's, or read with another schema."
_PROMOTIONS = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
INTS = (-(1 << 31), (1 << 31) - 1)
"""The smallest and the largest int."""
MICROSECONDS = (MIN_TIMESTAMP_MS * 1000, MAX_TIMESTAMP_MS * 1000 + 999)
"""The first and the last TIMESTAMP, in microseconds since 1970."""
DAYS = (MIN_TIMESTAMP_MS // 86_400_000, MAX_TIMESTAMP_MS // 86_400_000)
"""The first and the last DATE, in days since 1970."""
_BOOLEANS = {b"\0": False, b"\1": True}
_DURATION = struct.Struct("<III")
_EXACT = Context(prec=80)
# The library uses a damaged, negative branch of a union as an index from the end of the list of branches. So each list
# ends with branches for which no payload is long enough.
_NO_BRANCH = {"type": "fixed", "name": "no_branch", "size": 1 << 62}
_NO_BRANCHES = 64
# A number of variable length has at most ten bytes, of which the tenth has one bit. The library drops further bits.
_TOO_LONG = re.compile(rb"[\x80-\xff]{9}[\x02-\xff]")
# The numbers from -65 to -128, which the library takes for branches of a union of up to 64. The end of the smallest
# number, which it takes for the length of an empty block, looks the same.
_NEGATIVE = re.compile(b"[%s](?:\x01|\x81\x80*\x00)" % re.escape(bytes(range(0x81, 0x100, 2))))
MAX_DEFAULT_LENGTH = 10_000
"""The longest default of a field, in characters, with the defaults within it: each row can have it many times."""
# The types of the library that have the same bytes; an enum becomes the number of its symbol.
_SCALARS = {
    "enum": "int",
    **{kind: kind for kind in ("null", "int", "long", "float", "double", "bytes", "string")},
}
# The size of values of these types in bytes; values of other types begin with their size.
_SIZES = {"null": 0, "boolean": 1, "float": 4, "double": 8}
MAX_MEMORY_PER_BYTE = 2048
"""The most memory that decoding an item of an array or a map may need for each byte of the item, in bytes.

A message of 1 MB, the most that a broker accepts by default, then needs no more than a decoder may use.
"""
# The memory of decoded and converted values with their place in a record or a list, in bytes; measured.
_NULL_MEMORY, _VALUE_MEMORY, _RECORD_MEMORY, _COLUMN_MEMORY = 24, 64, 200, 8
# The Python types of defaults in JSON.
_DEFAULTS: dict[str, Any] = {
    "null": type(None),
    "boolean": bool,
    **dict.fromkeys(("int", "long"), int),
    **dict.fromkeys(("float", "double"), (int, float)),
    **dict.fromkeys(("string", "bytes", "fixed", "enum"), str),
    **dict.fromkeys(("record", "map"), dict),
    "array": list,
}


class AvroReader:
    """Reads payloads of one schema into the columns of another one.

    Args:
        writer: the schema that has written the payloads.
        reader: the schema of the columns.
        schema: the columns.
        is_one: whether the whole value is one column.

    Raises:
        SchemaMismatchError: the reader's schema cannot read values of the writer's schema, or small payloads may need
            too much memory; see :data:`MAX_MEMORY_PER_BYTE`.
    """

    def __init__(self, writer: AvroType, reader: AvroType, schema: pa.Schema, *, is_one: bool) -> None:
        fastavro = import_library("fastavro", extra="avro")
        _excess_memory(writer, (reader,))
        self._decode = fastavro.schemaless_reader
        library = _LibrarySchema()
        self._schema = fastavro.parse_schema(library.schema(writer))
        self._has_wide_union = library.has_wide_union
        self._writer = writer
        self._convert = resolution(writer, reader, schema.field(0).name if is_one else "")
        self._kind = schema.field(0).type if is_one else pa.struct(list(schema))
        self._is_one = is_one

    def read(self, payload: bytes) -> Any:
        """See :meth:`spark_jobs.decoding.decoders.RowReader.read`."""
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
            raise ValueError(f"the payload has {left} bytes after the end of the value")
        # Text may look like such a number, so the numbers are looked up.
        if self._has_wide_union or _TOO_LONG.search(payload) or _NEGATIVE.search(payload):
            _skip_value(self._writer, payload, 0)
        return self._convert(value)

    def columns(self, values: Sequence[Any]) -> list[Column]:
        """See :meth:`spark_jobs.decoding.decoders.RowReader.columns`."""
        return columns_of(pa.array(values, self._kind), is_one=self._is_one)


def _skip_value(kind: AvroType, payload: bytes, place: int) -> int:
    """Return the place after a value that the library has decoded.

    Args:
        kind: its type.
        payload: the whole payload.
        place: where the value begins.

    Raises:
        ValueError: one of its numbers has more than 64 bits, or is no branch of a union or length of a block.
    """
    if kind.kind == "record":
        for field in kind.fields:
            place = _skip_value(field.type, payload, place)
        return place
    if kind.kind == "fixed" or kind.kind in _SIZES:
        return place + _SIZES.get(kind.kind, kind.size)
    number, place = _number(payload, place)
    if kind.kind == "union":
        if not 0 <= number < len(kind.parts):
            raise ValueError("a union has no such branch")
        return _skip_value(kind.parts[number], payload, place)
    if kind.kind in ("string", "bytes"):
        return place + number
    while kind.kind in ("array", "map") and number:
        # Each item has at least one byte.
        if abs(number) > len(payload):
            raise ValueError("a block has more items than the payload has bytes")
        if number < 0:
            # The size of the block in bytes follows.
            _, place = _number(payload, place)
        for _ in range(abs(number)):
            if kind.kind == "map":
                length, place = _number(payload, place)
                place += length
            place = _skip_value(kind.parts[0], payload, place)
        number, place = _number(payload, place)
    return place


def _number(payload: bytes, place: int) -> tuple[int, int]:
    """Read a number of variable length, and return it and the place after it."""
    if _TOO_LONG.match(payload, place):
        raise ValueError("a number has more than 64 bits")
    number = shift = 0
    while payload[place] >= 0x80:
        number |= (payload[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
    number |= payload[place] << shift
    return (number >> 1) ^ -(number & 1), place + 1


class _LibrarySchema:
    """Builds the schema with which the library decodes: for the same bytes, but with values that show the raw ones."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._has_no_branch = False
        self.has_wide_union = False

    def schema(self, kind: AvroType) -> Any:
        if kind.kind == "union":
            made: Any = self._union(kind)
        elif kind.kind == "record":
            fields = [{"name": field.name, "type": self.schema(field.type)} for field in kind.fields]
            made = {"type": "record", "name": self._name(), "fields": fields}
        elif kind.kind == "array":
            made = {"type": "array", "items": self.schema(kind.parts[0])}
        elif kind.kind == "map":
            # It has the same bytes; in a map the library would keep only one of two values of a key.
            fields = [{"name": "key", "type": "string"}, {"name": "value", "type": self.schema(kind.parts[0])}]
            made = {"type": "array", "items": {"type": "record", "name": self._name(), "fields": fields}}
        elif kind.kind in ("boolean", "fixed"):
            made = {"type": "fixed", "name": self._name(), "size": 1 if kind.kind == "boolean" else kind.size}
        else:
            made = _SCALARS[kind.kind]
        return made

    def _union(self, kind: AvroType) -> list[Any]:
        is_plain = len(kind.branches) < 2
        self.has_wide_union |= len(kind.parts) > _NO_BRANCHES
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
    """Return the name of a branch of a union in decoded values."""
    return f"branch_{place}"


def _excess_memory(writer: AvroType, readers: Sequence[AvroType]) -> int:
    """Return how much more memory any value of a type may need than its bytes in a payload allow, in bytes.

    The result is negative if each value needs less. It excludes the items of arrays and maps, because an item never
    needs more than its bytes allow.

    Args:
        writer: the type that was written.
        readers: the types that a value is converted to; aliases can make these several.

    Raises:
        SchemaMismatchError: an item of an array or a map may need more, and a payload may have any number of items.
    """
    # A value of one of several branches is in a dictionary that names its branch.
    if writer.kind == "union":
        wrapper = _RECORD_MEMORY if len(writer.branches) > 1 else 0
        parts = (_excess_memory(part, () if part.kind == "null" else readers) for part in writer.parts)
        return wrapper + max(parts, default=0) - MAX_MEMORY_PER_BYTE
    if writer.kind == "null":
        return _NULL_MEMORY + _COLUMN_MEMORY * sum(map(_count_columns, readers))
    branches = [branch for reader in readers for branch in reader.branches]
    excess = _RECORD_MEMORY * sum(len(reader.branches) > 1 for reader in readers)
    if writer.kind == "record":
        return excess + _excess_of_record(writer, [branch for branch in branches if _is_alike(writer, branch)])
    if writer.kind in ("array", "map"):
        _check_items(writer, [branch for branch in branches if branch.kind == writer.kind])
    fewest_bytes = {**_SIZES, "fixed": writer.size}.get(writer.kind, 1)
    return excess + _VALUE_MEMORY * (1 + len(readers)) - MAX_MEMORY_PER_BYTE * fewest_bytes


def _check_items(writer: AvroType, readers: Sequence[AvroType]) -> None:
    (item,) = writer.parts
    excess = _excess_memory(item, [reader.parts[0] for reader in readers])
    if writer.kind == "map":
        excess += _RECORD_MEMORY + _VALUE_MEMORY * (1 + len(readers)) - MAX_MEMORY_PER_BYTE
    if excess > 0:
        raise SchemaMismatchError(
            f"each {item} within the {writer} may need more than {MAX_MEMORY_PER_BYTE} bytes of memory for each byte",
            remedy="Write it with fewer nested records and fewer fields that have no bytes, or read it with fewer "
            "fields that are not written.",
        )


def _excess_of_record(writer: AvroType, readers: Sequence[AvroType]) -> int:
    written = {field.name: field for field in writer.fields}
    read: dict[str, list[AvroType]] = {name: [] for name in written}
    excess = _RECORD_MEMORY * (1 + len(readers))
    for field in itertools.chain.from_iterable(reader.fields for reader in readers):
        if field.type.has_column:
            own = written_field(written, field)
            if own is None:
                excess += _COLUMN_MEMORY * _count_columns(field.type) + _default_memory(field)
            else:
                read[own.name].append(field.type)
    return excess + sum(_excess_memory(field.type, read[field.name]) for field in writer.fields)


def _default_memory(field: AvroField) -> int:
    with suppress(SchemaMismatchError):
        value = default_of(field, field.name)
        return 0 if value is None else _VALUE_MEMORY + len(repr(value))
    return 0


def _count_columns(kind: AvroType) -> int:
    """Count the columns of scalars or lists that Arrow has for a type, each of which has a place for each value."""
    within = (*kind.parts, *(field.type for field in kind.fields)) if kind.kind in ("record", "union") else ()
    return sum(map(_count_columns, within)) if within else int(kind.has_column)


def resolution(writer: AvroType, reader: AvroType, path: str) -> Convert:
    """Make the conversion from decoded values to values of a column; ``None`` is null.

    Args:
        writer: the type that was written.
        reader: the type that it is read as.
        path: the path of the value, for errors.

    Raises:
        SchemaMismatchError: the writer's type cannot be read as the reader's.
    """
    if writer.kind == "union":
        return _from_union(writer, reader, path)
    if writer.kind == "null":
        if not reader.is_nullable:
            raise _mismatch(writer, reader, path)
        return _same
    branches = reader.branches
    if len(branches) == 1:
        return _KINDS.get(branches[0].kind, _scalar)(writer, branches[0], path)
    return _into_union(writer, reader, path)


def _same(value: Any) -> Any:
    return value


def _from_union(writer: AvroType, reader: AvroType, path: str) -> Convert:
    """Read a union as the reader's type; a branch that cannot be read fails only for values of that branch."""
    conversions: dict[str, Convert] = {}
    refused: dict[str, SchemaMismatchError] = {}
    for place, part in enumerate(writer.parts):
        try:
            if part.kind != "null":
                conversions[_branch(place)] = resolution(part, reader, path)
        except SchemaMismatchError as error:
            if len(writer.branches) == 1:
                raise
            refused[_branch(place)] = error
    if not conversions and not reader.is_nullable:
        raise _mismatch(writer, reader, path)
    is_plain, is_nullable = len(writer.branches) < 2, reader.is_nullable
    (only,) = conversions.values() if is_plain and conversions else (_same,)

    def convert(value: Any) -> Any:
        if value is None:
            if not is_nullable:
                raise ValueError(f"{path} is null, and its type has no null")
            return None
        if is_plain:
            return only(value)
        ((branch, one),) = value.items()
        if branch in refused:
            raise ValueError(refused[branch].what)
        return conversions[branch](one)

    return convert


def _into_union(writer: AvroType, reader: AvroType, path: str) -> Convert:
    """Read one type as a STRUCT of several, of which one is set."""
    # The same type is tried before types to which it could be promoted.
    for name, branch in sorted(members(reader, path), key=lambda member: not _is_alike(writer, member[1])):
        with suppress(SchemaMismatchError):
            # Each conversion is created only once, because the time would double with each nested union.
            return partial(_member, name, resolution(writer, branch, path))
    if any(_is_alike(writer, branch) for branch in reader.branches):
        return lambda value: None
    raise _mismatch(writer, reader, path)


def _member(name: str, convert: Convert, value: Any) -> dict[str, Any]:
    return {name: convert(value)}


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


def _record(writer: AvroType, reader: AvroType, path: str) -> Convert:
    if not _is_alike(writer, reader):
        raise _mismatch(writer, reader, path)
    written = {field.name: field for field in writer.fields}
    defaults: dict[str, Any] = {}
    steps: list[tuple[str, str, Convert]] = []
    for field in reader.fields:
        if field.type.has_column:
            own, inner = written_field(written, field), f"{path}.{field.name}".removeprefix(".")
            if own is None:
                default = default_of(field, inner)
                # Arrow sets a field to null that is not in the dictionary.
                if default is not None:
                    defaults[field.name] = default
            else:
                steps.append((field.name, own.name, resolution(own.type, field.type, inner)))

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        found = {name: one(value[own]) for name, own, one in steps}
        found.update(defaults)
        return found

    return convert


def written_field(written: Mapping[str, AvroField], field: AvroField) -> AvroField | None:
    """Find the writer's field for a field of the reader by its name or an alias."""
    return next((written[name] for name in (field.name, *field.aliases) if name in written), None)


def _array(writer: AvroType, reader: AvroType, path: str) -> Convert:
    if writer.kind != "array":
        raise _mismatch(writer, reader, path)
    item = resolution(writer.parts[0], reader.parts[0], f"{path}[]")
    return lambda value: list(map(item, value))


def _map(writer: AvroType, reader: AvroType, path: str) -> Convert:
    if writer.kind != "map":
        raise _mismatch(writer, reader, path)
    item = resolution(writer.parts[0], reader.parts[0], f"{path}{{}}")

    def convert(pairs: list[dict[str, Any]]) -> list[tuple[str, Any]]:
        found = [(pair["key"], item(pair["value"])) for pair in pairs]
        if len({key for key, _ in found}) < len(found):
            raise ValueError(f"{path}: a key of the map occurs twice")
        return found

    return convert


def _enum(writer: AvroType, reader: AvroType, path: str) -> Convert:
    if not _is_alike(writer, reader):
        raise _mismatch(writer, reader, path)
    known = set(reader.symbols)
    texts = [symbol if symbol in known else reader.default for symbol in writer.symbols]

    def convert(place: int) -> str:
        if not 0 <= place < len(texts):
            raise ValueError(f"{path}: {writer} has no symbol {place}")
        found = texts[place]
        if found is None:
            raise ValueError(f"{path}: the reader's {reader} has no {writer.symbols[place]!r}, and no default")
        return found

    return convert


def _scalar(writer: AvroType, reader: AvroType, path: str) -> Convert:
    is_logical = bool(writer.logical and reader.logical)
    if is_logical and writer.logical.rpartition("-")[0] != reader.logical.rpartition("-")[0]:
        raise _mismatch(writer, reader, path)
    if reader.logical == "decimal":
        return _decimal(writer, reader, path)
    is_uuid = is_logical and reader.logical == "uuid"
    if reader.kind == "fixed" and not is_uuid and (not _is_alike(writer, reader) or writer.size != reader.size):
        raise _mismatch(writer, reader, path)
    if not is_uuid and writer.kind != reader.kind and reader.kind not in _PROMOTIONS.get(writer.kind, ()):
        raise _mismatch(writer, reader, path)
    if is_logical and not reader.unit and writer.logical != reader.logical:
        # They are milliseconds and microseconds of a day.
        raise _mismatch(writer, reader, path)
    return _plain(writer, reader, path)


def _plain(writer: AvroType, reader: AvroType, path: str) -> Convert:
    """Make the conversion between two types of which the one can be read as the other."""
    convert: Convert = _same
    if reader.unit:
        convert = partial(_moment, writer.unit or reader.unit, path)
    elif reader.logical == "date":
        convert = partial(_checked, *DAYS, f"{path} is not in the years 1 to 9999")
    elif reader.logical == "duration":
        convert = _duration
    elif writer.kind == "boolean":
        convert = _boolean
    elif reader.logical == "uuid" and writer.kind == "fixed" and writer.size == UUID_BYTES:
        convert = _uuid
    elif reader.kind in ("float", "double") and writer.kind in ("int", "long"):
        convert = partial(_exactly, reader.kind, path)
    elif writer.kind == "int":
        convert = partial(_checked, *INTS, f"{path} is not an int of 32 bits")
    elif writer.kind == "bytes" and reader.kind == "string":
        convert = bytes.decode
    elif writer.kind == "string" and reader.kind == "bytes":
        convert = str.encode
    return convert


def _checked(first: int, last: int, why: str, value: int) -> int:
    if not first <= value <= last:
        raise ValueError(why)
    return value


def _exactly(kind: str, path: str, value: int) -> float:
    """Convert a whole number to the same floating point number."""
    found = float(value) if kind == "double" else float(np.float32(value))
    if int(found) != value:
        raise ValueError(f"{path} is not a whole number that a {kind} can hold exactly")
    return found


def _boolean(value: bytes) -> bool:
    if value not in _BOOLEANS:
        raise ValueError(f"a truth value is {value[0]}")
    return _BOOLEANS[value]


def _moment(unit: str, path: str, value: int) -> int:
    """Convert a time to microseconds, the precision of Spark."""
    found = value // 1000 if unit == "nanos" else value * {"millis": 1000, "micros": 1}[unit]
    return _checked(*MICROSECONDS, f"{path} is not in the years 1 to 9999", found)


def _uuid(value: bytes) -> str:
    return str(uuid.UUID(bytes=value))


def _duration(value: bytes) -> dict[str, int]:
    return dict(zip(("months", "days", "milliseconds"), _DURATION.unpack(value)))


def _decimal(writer: AvroType, reader: AvroType, path: str) -> Convert:
    scale = writer.scale if writer.logical else reader.scale
    is_written = writer.kind in ("bytes", "fixed") if writer.logical else _is_alike(writer, reader)
    if not is_written or scale > reader.scale or (not writer.logical and writer.size != reader.size):
        raise _mismatch(writer, reader, path)
    limit = int(10 ** (reader.precision - reader.scale + scale))

    def convert(value: bytes) -> Decimal:
        number = int.from_bytes(value, "big", signed=True)
        if not value or abs(number) >= limit:
            raise ValueError(f"{path} is not a number of at most {reader.precision} digits")
        return Decimal(number).scaleb(-scale, context=_EXACT)

    return convert


def default_of(field: AvroField, path: str) -> Any:
    """Return the value of the column of a field that was not written.

    Raises:
        SchemaMismatchError: the field has no default, or its default has another type.
    """
    if field.default is None:
        raise SchemaMismatchError(f"{path} was not written, and has no default", remedy=_REMEDY)
    try:
        value = _default(field.type, json.loads(field.default), WeightBudget("Avro"))
        if len(repr(value)) > MAX_DEFAULT_LENGTH:
            raise SchemaMismatchError(
                f"the default of {path} is longer than {MAX_DEFAULT_LENGTH}", remedy="Shorten it."
            )
        return resolution(field.type, field.type, path)(value)
    except (ValueError, TypeError, KeyError) as error:
        raise SchemaMismatchError(f"{path}: its default {field.default} is not of its type", remedy=_REMEDY) from error


def _default(kind: AvroType, default: Any, budget: WeightBudget) -> Any:
    """Convert a default in JSON to a decoded value; records in it may have defaults of their own."""
    budget.spend(1)
    if kind.kind == "union":
        return _default_of_union(kind, default, budget)
    if not isinstance(default, _DEFAULTS[kind.kind]) or isinstance(default, bool) != (kind.kind == "boolean"):
        raise ValueError("it is of another type")
    made: Any = default
    if kind.kind == "record":
        budget.spend(sum(len(field.default or "") for field in kind.fields))
        own = {field.name: json.loads(field.default) for field in kind.fields if field.default is not None}
        given = {**own, **default}
        made = {field.name: _default(field.type, given[field.name], budget) for field in kind.fields}
    elif kind.kind == "array":
        made = [_default(kind.parts[0], item, budget) for item in default]
    elif kind.kind == "map":
        made = [{"key": key, "value": _default(kind.parts[0], item, budget)} for key, item in default.items()]
    elif kind.kind == "boolean":
        made = bytes([default])
    elif kind.kind in ("bytes", "fixed"):
        made = default.encode("latin-1")
    elif kind.kind in ("float", "double"):
        made = float(default)
    elif kind.kind == "enum":
        made = kind.symbols.index(default)
    return made


def _default_of_union(kind: AvroType, default: Any, budget: WeightBudget) -> Any:
    """Use the first branch that accepts the default; older versions of Avro require that it is the first branch."""
    for place, part in enumerate(kind.parts):
        with suppress(ValueError, KeyError):
            value = _default(part, default, budget)
            return value if part.kind == "null" or len(kind.branches) == 1 else {_branch(place): value}
    raise ValueError("no branch accepts it")


_KINDS: dict[str, Callable[[AvroType, AvroType, str], Convert]] = {
    "record": _record,
    "array": _array,
    "map": _map,
    "enum": _enum,
}
