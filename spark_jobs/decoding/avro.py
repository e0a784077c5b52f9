"""``Avro``: decodes Avro, with a schema registry or a given schema; if possible a field of a whole block at a time.

Blocks of records of scalars, and of such records, are decoded field by field. If a payload of a block does not decode
that way, :class:`spark_jobs.decoding.avro_resolution.AvroReader` decodes the payloads of the block one by one, and
returns the reasons of failures. Both ways return the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa

from spark_jobs.decoding.avro_resolution import (
    DAYS,
    INTS,
    MICROSECONDS,
    AvroReader,
    Convert,
    default_of,
    resolution,
    written_field,
)
from spark_jobs.decoding.avro_schema import AvroType, columns_ddl, is_record, parse_avro
from spark_jobs.decoding.decoders import Column, DecodedColumns, columns_of, decode_rows, import_library
from spark_jobs.decoding.schema_decoder import BodyDecoder, SchemaDecoder, decode_frames
from spark_jobs.decoding.schema_limits import cached_by_size, schema_use
from spark_jobs.decoding.schema_registry import StoredSchema
from stream_consumers.options import check_name

Numbers: TypeAlias = Any
"""A numpy array."""
Decode: TypeAlias = "Callable[[Cursor, Numbers], Column]"
"""Reads a value of each of these rows and moves their cursors past it; ``ValueError`` if one may have to be refused."""

PADDING = bytes(16)
MAX_NUMBER_BYTES = 10
# Smaller blocks are decoded faster one by one.
MIN_BLOCK_ROWS = 64
_WIDTHS = {"float": 4, "double": 8}


@dataclass(frozen=True, slots=True)
class Avro(SchemaDecoder):
    """Decodes Avro values into the columns of the reader's schema.

    With a registry each payload begins with the id of the schema that has written it, and Avro's schema resolution
    applies: fields that the reader's schema lacks are ignored, fields that were not written get their default, and
    numbers are widened. Without a registry all payloads are written with the reader's schema. A payload that does not
    fit its schema, has bytes after its end, or has an unknown id becomes a dead letter. A tombstone becomes a row of
    nulls.

    The types of the columns are in docs/decode-messages.md. A union of several types becomes a STRUCT with a field for
    each.

    Args:
        schema: the reader's schema, as JSON text or as Python values.
        schema_file: the path of an ``.avsc`` file with the reader's schema, which is read immediately.
        registry: the registry with the schemas.
        subject: the subject whose schema is the reader's, looked up for each batch, like ``orders-value``.
        version: the version of the subject; the newest by default.
        framed: whether payloads begin with a schema id; by default they do with a registry. Framed payloads without a
            registry are read with the reader's schema, whatever their id.
        column: one column for the whole value, as a STRUCT if it is a record; by default a record gets a column for
            each field, and anything else the column ``payload``.
        key: a column for the message key, as BINARY; or a decoder of it.
        headers: a column for the headers, as ARRAY<STRUCT<name: STRING, value: BINARY>>; or for each column of text the
            name of a header.

    Raises:
        InvalidOptionError: the arguments contradict each other.
        SchemaMismatchError: the schema cannot be used, or has no columns in Spark.
        MissingDependencyError: fastavro is not installed.

    Example:
        >>> Avro('{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}').ddl()
        '`id` BIGINT'
        >>> from spark_jobs.decoding.schema_registry import SchemaRegistry
        >>> Avro(registry=SchemaRegistry("https://registry:8081"), subject="orders-value").is_resolved
        False
    """

    form: ClassVar[str] = "Avro"
    schema: str | Mapping[str, Any] | list[Any] | StoredSchema | None = None
    column: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        import_library("fastavro", extra="avro")
        if self.column is not None:
            check_name("column", self.column)
        SchemaDecoder.__post_init__(self)

    @property
    def is_one_column(self) -> bool:
        """Whether the whole value is one column, instead of one for each field."""
        return self.column is not None or not is_record(parse_avro(self._known()))

    def ddl(self) -> str:
        """See :meth:`Decoder.ddl`; asks the registry unless it is resolved."""
        return columns_ddl(parse_avro(self._known()), self.column)

    def check(self, schema: pa.Schema) -> None:
        """See :meth:`Decoder.check`; its columns are its own."""

    def decode(self, payloads: Column, schema: pa.Schema) -> DecodedColumns:
        """See :meth:`Decoder.decode`."""
        own = self._known()
        is_one = self.is_one_column
        registry = self.registry
        if not self.is_framed:
            return DecodedColumns(*avro_decoding(own, own, schema, is_one).decode(payloads))

        def decoder_of(number: int) -> BodyDecoder:
            writer = own if registry is None else registry.schema(number)
            return avro_decoding(writer, own, schema, is_one).decode

        return decode_frames(payloads, schema, decoder_of, registry)


@dataclass(slots=True)
class Cursor:
    """The read position in each payload of a block.

    Args:
        data: the concatenated bytes of all payloads, and some padding.
        position: for each payload the place where its next value begins.
        end: for each payload the place where it ends.
    """

    data: Numbers
    position: Numbers
    end: Numbers

    @classmethod
    def of(cls, payloads: Column) -> Cursor:
        """Return a cursor at the beginning of these payloads, none of which is null."""
        buffers: Any = payloads.buffers()
        content = b"" if buffers[2] is None else buffers[2]
        ends = np.frombuffer(buffers[1], np.int32)[payloads.offset : payloads.offset + len(payloads) + 1]
        data = np.frombuffer(memoryview(content)[: ends[-1]].tobytes() + PADDING, np.uint8)
        own = ends.astype(np.int64)
        return cls(data, own[:-1].copy(), own[1:])

    def take(self, rows: Numbers, sizes: Numbers) -> Numbers:
        """Move past values of these sizes in bytes, and return where they begin."""
        starts = self.position[rows]
        if ((sizes < 0) | (sizes > self.end[rows] - starts)).any():
            raise ValueError("a payload ends too early")
        self.position[rows] = starts + sizes
        return starts

    def numbers(self, rows: Numbers) -> Numbers:
        """Read numbers of variable length."""
        starts = self.position[rows]
        byte = self.data[starts]
        found = (byte & 0x7F).astype(np.uint64)
        sizes = np.ones(len(rows), np.int64)
        more = np.flatnonzero(byte >= 0x80)
        for place in range(1, MAX_NUMBER_BYTES):
            if not len(more):
                break
            byte = self.data[starts[more] + place]
            found[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * place)
            sizes[more] = place + 1
            if place == MAX_NUMBER_BYTES - 1 and (byte > 1).any():
                raise ValueError("a number has more than 64 bits")
            more = more[byte >= 0x80]
        self.take(rows, sizes)
        unsigned = found >> np.uint64(1)
        return np.where(found & np.uint64(1), ~unsigned, unsigned).view(np.int64)

    def numbers_within(self, rows: Numbers, first: int, last: int) -> Numbers:
        """Read numbers of variable length, all of which must be from ``first`` to ``last``."""
        found = self.numbers(rows)
        if ((found < first) | (found > last)).any():
            raise ValueError("a number is out of range")
        return found


def block_reader(writer: AvroType, reader: AvroType, kind: pa.DataType) -> Callable[[Column], Column]:
    """Make the function that reads a block of payloads of one schema into a column of another schema.

    The function accepts no null, and raises ``ValueError`` if a payload may have to be refused.

    Args:
        writer: the schema that has written the payloads, for which :func:`is_common` holds.
        reader: the schema of the columns, a record that can read it.
        kind: a STRUCT of the columns.
    """
    decode = _plan(writer, reader, kind, "")

    def read(payloads: Column) -> Column:
        cursor = Cursor.of(payloads)
        column = decode(cursor, np.arange(len(payloads)))
        if (cursor.position != cursor.end).any():
            raise ValueError("a payload continues after its end")
        return column

    return read


def is_common(writer: AvroType, reader: AvroType) -> bool:
    """Return whether whole blocks can be read: records of scalars, of such records, and of these or null.

    Args:
        writer: the type that was written.
        reader: the type that it is read as, which must be possible.
    """
    if len(writer.branches) != 1 or len(writer.parts) > 2:
        return False
    (only,) = writer.branches
    if only.kind != "record":
        return only.kind not in ("array", "map")
    if [branch.kind for branch in reader.branches] != ["record"]:
        return False
    written = {field.name: field for field in only.fields}
    wanted = [field for field in reader.branches[0].fields if field.type.has_column]
    read = [(own, field.type) for field in wanted if (own := written_field(written, field))]
    names = {own.name for own, _ in read}
    # Each type of the writer is checked once for each field that reads it: one more check would double the time with
    # each nested record.
    pairs = [*read, *((field, field.type) for field in only.fields if field.name not in names)]
    return all(is_common(own.type, kind) for own, kind in pairs)


class AvroDecoding:
    """Decodes payloads of one schema into the columns of another one.

    Args:
        writer: the schema that has written the payloads.
        reader: the schema of the columns.
        schema: the columns.
        is_one: whether the whole value is one column.

    Raises:
        SchemaMismatchError: the reader's schema cannot read values of the writer's schema.
    """

    def __init__(self, writer: AvroType, reader: AvroType, schema: pa.Schema, *, is_one: bool) -> None:
        self._rows = AvroReader(writer, reader, schema, is_one=is_one)
        self._read: Callable[[Column], Column] | None = None
        if writer.kind == reader.kind == "record" and is_common(writer, reader):
            self._read = block_reader(writer, reader, schema.field(0).type if is_one else pa.struct(list(schema)))
        self._is_one = is_one
        self.weight = writer.weight + reader.weight
        """The weight of both schemas; see :func:`spark_jobs.decoding.schema_limits.check_weight`."""

    def decode(self, payloads: Column) -> tuple[list[Column], Column]:
        """Decode payloads; return the columns, and for each row the reason why that failed (null if it did not)."""
        if self._read is None or len(payloads) - payloads.null_count < MIN_BLOCK_ROWS:
            return decode_rows(self._rows, payloads)
        try:
            columns = columns_of(self._read(payloads.drop_null()), is_one=self._is_one)
        except ValueError:
            return decode_rows(self._rows, payloads)
        if payloads.null_count:
            is_there = np.asarray(payloads.is_valid())
            places: Any = pa.array(np.cumsum(is_there) - 1, mask=~is_there)
            columns = [column.take(places) for column in columns]
        return columns, pa.nulls(len(payloads), pa.string())


@cached_by_size(lambda decoding: decoding.weight)
def avro_decoding(writer: StoredSchema, reader: StoredSchema, schema: pa.Schema, is_one: bool) -> AvroDecoding:
    """Make the decoding of a pair of schemas, once."""
    with schema_use("Avro"):
        return AvroDecoding(parse_avro(writer), parse_avro(reader), schema, is_one=is_one)


def _plan(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Decode:
    """Choose how a column is decoded."""
    (only,) = writer.branches
    if only.kind == "record":
        decode = _record(only, reader.branches[0], kind, path)
    else:
        decode = _fast(only, reader, kind) or _converted(only, resolution(only, reader, path), kind)
    if writer.kind != "union":
        return decode
    return partial(_nullable, writer, reader.is_nullable, decode)


def _nullable(writer: AvroType, may_be_null: bool, decode: Decode, cursor: Cursor, rows: Numbers) -> Column:
    branches = cursor.numbers_within(rows, 0, len(writer.parts) - 1)
    is_there = np.array([part.kind != "null" for part in writer.parts])[branches]
    if is_there.all():
        return decode(cursor, rows)
    if not may_be_null:
        raise ValueError("a value is null, and its type has no null")
    places: Any = pa.array(np.cumsum(is_there) - 1, mask=~is_there)
    return decode(cursor, rows[is_there]).take(places)


def _record(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Decode:
    assert isinstance(kind, pa.StructType)
    written = {field.name: field for field in writer.fields}
    wanted: dict[str, list[tuple[int | None, Decode]]] = {}
    defaults: list[tuple[int, Column]] = []
    for place, (wanted_field, child) in enumerate(zip((f for f in reader.fields if f.type.has_column), kind)):
        own, inner = written_field(written, wanted_field), f"{path}.{wanted_field.name}".removeprefix(".")
        if own is None:
            defaults.append((place, pa.array([default_of(wanted_field, inner)], child.type)))
        else:
            wanted.setdefault(own.name, []).append((place, _plan(own.type, wanted_field.type, child.type, inner)))
    # Fields without a column are read all the same, to find where the next field begins.
    steps = [wanted.get(field.name) or [(None, _skip(field.type))] for field in writer.fields]

    def read(cursor: Cursor, rows: Numbers) -> Column:
        children: dict[int | None, Column] = {}
        for places in steps:
            start = cursor.position[rows]
            for place, decode in places:
                # Two fields of the reader may be one of the writer, by an alias.
                cursor.position[rows] = start
                children[place] = decode(cursor, rows)
        for place, default in defaults:
            children[place] = default.take(pa.array(np.zeros(len(rows), np.int64), pa.int64()))
        return pa.StructArray.from_arrays([children[place] for place in range(len(kind))], fields=list(kind))

    return read


def _skip(writer: AvroType) -> Decode:
    """Choose how a value is skipped; the column that this returns is not used."""
    (only,) = writer.branches
    if only.kind == "record":
        decode: Decode = partial(_skip_all, [_skip(field.type) for field in only.fields])
    else:
        decode = _raw(only)
    return decode if writer.kind != "union" else partial(_nullable, writer, True, decode)


def _skip_all(parts: Sequence[Decode], cursor: Cursor, rows: Numbers) -> Column:
    for part in parts:
        part(cursor, rows)
    return pa.nulls(len(rows))


def _raw(writer: AvroType) -> Decode:
    """Choose how a value is read without conversion, as :class:`AvroReader` decodes it."""
    if writer.kind in ("int", "long", "enum"):
        return lambda cursor, rows: _array(cursor.numbers(rows))
    if writer.kind in _WIDTHS:
        return partial(_floats, _WIDTHS[writer.kind], pa.float32() if writer.kind == "float" else pa.float64())
    if writer.kind in ("string", "bytes"):
        return _text if writer.kind == "string" else _bytes
    return partial(_fixed, writer.size if writer.kind == "fixed" else 1)


def _fast(writer: AvroType, reader: AvroType, kind: pa.DataType) -> Decode | None:
    """Choose how a value is decoded that needs no conversion, or a conversion of whole arrays; ``None`` for others."""
    if len(reader.branches) != 1:
        return None
    (only,) = reader.branches
    if only.unit:
        return partial(_moments, writer.unit or only.unit, kind)
    if only.logical == "date":
        return lambda cursor, rows: pa.array(cursor.numbers_within(rows, *DAYS).astype(np.int32)).cast(kind)
    if writer.kind in ("int", "long") and only.kind in ("int", "long"):
        return partial(_whole, writer.kind, kind)
    if writer.kind != only.kind or only.logical == "decimal" or writer.kind in ("enum", "fixed"):
        return None
    return _booleans if writer.kind == "boolean" else _raw(writer)


def _converted(writer: AvroType, convert: Convert, kind: pa.DataType) -> Decode:
    """Decode a type whose values are converted one by one."""
    raw = _raw(writer)

    def read(cursor: Cursor, rows: Numbers) -> Column:
        return pa.array([convert(value) for value in raw(cursor, rows).to_pylist()], kind)

    return read


def _array(values: Any) -> Column:
    found: Column = pa.array(values)
    return found


def _buffer(values: Numbers) -> Any:
    contiguous: Any = np.ascontiguousarray(values)
    return pa.py_buffer(memoryview(contiguous).cast("B")) if len(values) else pa.py_buffer(b"")


def _whole(written: str, kind: pa.DataType, cursor: Cursor, rows: Numbers) -> Column:
    found = cursor.numbers_within(rows, *INTS) if written == "int" else cursor.numbers(rows)
    return _array(found.astype(kind.to_pandas_dtype()))


def _moments(unit: str, kind: pa.DataType, cursor: Cursor, rows: Numbers) -> Column:
    factor = {"millis": 1000}.get(unit, 1)
    first, last = MICROSECONDS
    if unit == "nanos":
        found = cursor.numbers(rows) // 1000
    else:
        found = cursor.numbers_within(rows, first // factor, last // factor) * factor
    return _array(found).cast(kind)


def _booleans(cursor: Cursor, rows: Numbers) -> Column:
    found = cursor.data[cursor.take(rows, np.ones(len(rows), np.int64))]
    if (found > 1).any():
        raise ValueError("a truth value is neither 0 nor 1")
    return _array(found == 1)


def _floats(width: int, kind: pa.DataType, cursor: Cursor, rows: Numbers) -> Column:
    starts = cursor.take(rows, np.full(len(rows), width))
    found = cursor.data[starts[:, None] + np.arange(width)].view(f"<f{width}").reshape(-1)
    return _array(found.astype(kind.to_pandas_dtype()))


def _fixed(width: int, cursor: Cursor, rows: Numbers) -> Column:
    return _sized(cursor, rows, np.full(len(rows), width))


def _bytes(cursor: Cursor, rows: Numbers) -> Column:
    return _sized(cursor, rows, cursor.numbers(rows))


def _text(cursor: Cursor, rows: Numbers) -> Column:
    return _bytes(cursor, rows).cast(pa.string())


def _sized(cursor: Cursor, rows: Numbers, sizes: Numbers) -> Column:
    """Read bytes of these sizes."""
    starts = cursor.take(rows, sizes)
    if not len(rows):
        return pa.array([], pa.binary())
    # The bytes between two values are an element of their own, which is not taken.
    ends = np.empty(2 * len(rows), np.int32)
    ends[::2] = starts
    ends[1::2] = starts + sizes
    every = pa.Array.from_buffers(pa.binary(), 2 * len(rows) - 1, [None, _buffer(ends), _buffer(cursor.data)])
    return every.take(pa.array(np.arange(0, 2 * len(rows), 2), pa.int64()))
