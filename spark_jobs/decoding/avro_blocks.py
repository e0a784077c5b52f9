"""Avro a block at a time: field after field, of all payloads at once.

That decodes what is common, and decides nothing: whatever it would have to refuse, and whatever takes it too long, it
leaves to :class:`spark_jobs.decoding.avro_resolution.AvroReader`, which reads these payloads one by one and says what
is wrong. A payload that it takes is read as that one would read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from spark_jobs.decoding.avro_resolution import (
    DAYS,
    MICROSECONDS,
    AvroReader,
    default_of,
    enum_texts,
    plan,
    required_fields,
    struct_member,
    written_field,
)
from spark_jobs.decoding.avro_types import AvroType, parse_avro
from spark_jobs.decoding.json_types import Column
from spark_jobs.decoding.rows import columns_of, decode_rows
from spark_jobs.decoding.schema_registry import StoredSchema
from spark_jobs.decoding.schema_source import schema_use
from stream_consumers.errors import SchemaMismatchError

Numbers: TypeAlias = Any
"""A numpy array."""
Decode: TypeAlias = "Callable[[Cursor, Numbers], Column]"
"""Reads a value of each of these rows, and moves their cursors behind it."""

PADDING = bytes(16)
LONGEST_NUMBER = 10
MOST_ITEMS = 4096
# Below it, a look at each payload is faster.
FEWEST_ROWS = 64
_INT = (-(1 << 31), (1 << 31) - 1)
_WIDTHS = {"float": 4, "double": 8}


@dataclass(slots=True)
class Cursor:
    """Where each payload of a block is read.

    Args:
        data: the bytes of all of them, one behind the other, and some more.
        position: of each payload, where the next value begins.
        end: of each payload.
        left: which payloads are left to the careful way.
    """

    data: Numbers
    position: Numbers
    end: Numbers
    left: Numbers

    @classmethod
    def of(cls, payloads: Column) -> Cursor:
        """At the beginning of these payloads, none of which is null."""
        buffers: Any = payloads.buffers()
        content = b"" if buffers[2] is None else buffers[2]
        ends = np.frombuffer(buffers[1], np.int32)[payloads.offset : payloads.offset + len(payloads) + 1]
        data = np.frombuffer(memoryview(content)[: ends[-1]].tobytes() + PADDING, np.uint8)
        own = ends.astype(np.int64)
        return cls(data, own[:-1].copy(), own[1:], np.zeros(len(payloads), bool))

    def leave(self, rows: Numbers) -> None:
        """Leave these to the careful way."""
        self.left[rows] = True
        self.position[rows] = self.end[rows]

    def take(self, rows: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers]:
        """Move behind values of these sizes in bytes; where they begin, and their sizes, 0 for those that are left."""
        starts = self.position[rows]
        beyond = (sizes < 0) | (sizes > self.end[rows] - starts)
        if beyond.any():
            self.leave(rows[beyond])
            sizes = np.where(beyond, 0, sizes)
        self.position[rows] = np.where(beyond, self.end[rows], starts + sizes)
        return np.where(beyond, 0, starts), sizes

    def numbers(self, rows: Numbers) -> Numbers:
        """Numbers of variable length."""
        starts = self.position[rows]
        byte = self.data[starts]
        found = (byte & 0x7F).astype(np.uint64)
        sizes = np.ones(len(rows), np.int64)
        more = np.flatnonzero(byte >= 0x80)
        for place in range(1, LONGEST_NUMBER):
            if not len(more):
                break
            byte = self.data[starts[more] + place]
            found[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * place)
            sizes[more] = place + 1
            if place == LONGEST_NUMBER - 1:
                # More than 64 bits.
                self.leave(rows[more[byte > 1]])
            more = more[byte >= 0x80]
        self.take(rows, sizes)
        unsigned = found >> np.uint64(1)
        return np.where(found & np.uint64(1), ~unsigned, unsigned).view(np.int64)

    def numbers_within(self, rows: Numbers, first: int, last: int) -> Numbers:
        """Numbers of variable length; others than these are left, and are the first one here."""
        found = self.numbers(rows)
        outside = (found < first) | (found > last)
        if outside.any():
            self.leave(rows[outside])
            found = np.where(outside, first, found)
        return found


class BlockReader:
    """Reads payloads of one schema into a column, of another one, a block at a time.

    Args:
        writer: the schema that has written them.
        reader: the schema of the columns.
        kind: of the one column, or a STRUCT of all of them.

    Raises:
        SchemaMismatchError: the reader's schema cannot read what the writer's has written.
    """

    def __init__(self, writer: AvroType, reader: AvroType, kind: pa.DataType) -> None:
        self._decode = _plan(writer, reader, kind, "")

    def read(self, payloads: Column) -> tuple[Column, Numbers]:
        """The column of these payloads, none of which is null; and which are left to the careful way."""
        cursor = Cursor.of(payloads)
        column = self._decode(cursor, np.arange(len(payloads)))
        cursor.left |= cursor.position != cursor.end
        return column, cursor.left


class AvroDecoding:
    """Decodes payloads of one schema into the columns of another one.

    Args:
        writer: the schema that has written them.
        reader: the schema of the columns.
        schema: the columns.
        is_one: whether all of the reader's schema is one column.

    Raises:
        SchemaMismatchError: the reader's schema cannot read what the writer's has written.
    """

    def __init__(self, writer: AvroType, reader: AvroType, schema: pa.Schema, *, is_one: bool) -> None:
        self._rows = AvroReader(writer, reader, schema, is_one=is_one)
        kind = schema.field(0).type if is_one else pa.struct(list(schema))
        self._block = BlockReader(writer, reader, kind)
        self._is_one = is_one

    def decode(self, payloads: Column) -> tuple[list[Column], Column]:
        """The columns, and per row why it could not be decoded (null: it could)."""
        present = np.flatnonzero(np.asarray(payloads.is_valid()))
        if len(present) < FEWEST_ROWS:
            return self._carefully(payloads)
        column, left = self._block.read(payloads if len(present) == len(payloads) else _taken(payloads, present))
        columns = columns_of(column, is_one=self._is_one)
        errors: Column = pa.nulls(len(column), pa.string())
        if len(present) == len(payloads) and not left.any():
            return columns, errors
        # Where each row is, among those of the block and those that were left behind them; a tombstone is nowhere.
        others = present[left]
        found, reasons = self._carefully(_taken(payloads, others))
        places = np.full(len(payloads), -1)
        places[present] = np.arange(len(present))
        places[others] = len(present) + np.arange(len(others))
        order = pa.array(places, mask=places < 0)
        parts = zip([*columns, errors], [*found, reasons])
        *columns, errors = (pa.concat_arrays(list(part)).take(order) for part in parts)
        return columns, errors

    def _carefully(self, payloads: Column) -> tuple[list[Column], Column]:
        columns, errors = decode_rows(self._rows, payloads.to_pylist())
        return columns, pa.array(errors, pa.string())


@lru_cache(maxsize=64)
def avro_decoding(writer: StoredSchema, reader: StoredSchema, schema: pa.Schema, is_one: bool) -> AvroDecoding:
    """That of a pair of schemas; see :class:`AvroDecoding`."""
    with schema_use("Avro"):
        return AvroDecoding(parse_avro(writer), parse_avro(reader), schema, is_one=is_one)


def _plan(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Decode:
    """How a column is decoded; it refuses what :func:`plan` refuses."""
    if writer.kind == "union":
        return _from_union(writer, reader, kind, path)
    if writer.kind == "null":
        plan(writer, reader, kind, path)
        return lambda cursor, rows: _nulls(len(rows), kind)
    branches = reader.branches
    if len(branches) > 1:
        place, branch, _ = struct_member(writer, reader, kind, path)
        if branch is None:
            skipped = _skip(writer)
            return lambda cursor, rows: _after(skipped(cursor, rows), _nulls(len(rows), kind))
        assert isinstance(kind, pa.StructType)
        return partial(_into_union, _plan(writer, branch, kind.field(place).type, path), place, kind)
    (branch,) = branches
    return _PLANS.get(branch.kind, _plan_scalar)(writer, branch, kind, path)


def _after(_: object, column: Column) -> Column:
    return column


def _array(values: Any, kind: Any = None) -> Column:
    found: Column = pa.array(values, kind)
    return found


def _buffer(values: Numbers) -> Any:
    contiguous: Any = np.ascontiguousarray(values)
    return pa.py_buffer(memoryview(contiguous).cast("B")) if len(values) else pa.py_buffer(b"")


def _nulls(count: int, kind: Any) -> Column:
    found: Column = pa.nulls(count, kind)
    return found


def _into_union(decode: Decode, place: int, kind: pa.StructType, cursor: Cursor, rows: Numbers) -> Column:
    column = decode(cursor, rows)
    children = [column if other == place else _nulls(len(rows), field.type) for other, field in enumerate(kind)]
    return pa.StructArray.from_arrays(children, fields=list(kind))


def _from_union(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Decode:
    decodes: dict[int, Decode] = {}
    for place, part in enumerate(writer.parts):
        try:
            decodes[place] = _plan(part, reader, kind, path)
        except SchemaMismatchError:
            if part.kind == "null":
                # The record, or the list, that it is in looks for those.
                decodes[place] = lambda cursor, rows: _nulls(len(rows), kind)
            elif len(writer.branches) == 1:
                raise
    if not decodes:
        raise SchemaMismatchError(f"{path} cannot be read", remedy="See AvroReader.")
    last = len(writer.parts) - 1

    def decode(cursor: Cursor, rows: Numbers) -> Column:
        branches = cursor.numbers_within(rows, 0, last)
        parts, places = [_nulls(1, kind)], np.zeros(len(rows), np.int64)
        behind = 1
        for branch in range(last + 1):
            own = np.flatnonzero(branches == branch)
            if not len(own) or writer.parts[branch].kind == "null":
                continue
            if branch not in decodes:
                cursor.leave(rows[own])
                continue
            part = decodes[branch](cursor, rows[own])
            if len(own) == len(rows):
                return part
            parts.append(part)
            places[own] = np.arange(behind, behind + len(own))
            behind += len(own)
        return _taken(pa.concat_arrays(parts), places)

    return decode


def _taken(column: Column, places: Numbers) -> Column:
    return column.take(pa.array(places, pa.int64()))


def _plan_record(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Decode:
    plan(writer, reader, kind, path)
    assert isinstance(kind, pa.StructType)
    written = {field.name: field for field in writer.fields}
    wanted: dict[str, list[tuple[int, Decode]]] = {}
    defaults: list[tuple[int, Callable[[Sequence[Any]], Column]]] = []
    for place, (field, child) in enumerate(zip((f for f in reader.fields if f.type.has_column), kind)):
        own = written_field(written, field)
        if own is None:
            defaults.append((place, default_of(field, child.type, path)))
        else:
            decode = _plan(own.type, field.type, child.type, f"{path}.{field.name}".removeprefix("."))
            wanted.setdefault(own.name, []).append((place, decode))
    required = set(required_fields(written, reader))
    steps = [(field.name, wanted.get(field.name, []), _skip(field.type)) for field in writer.fields]

    def read(cursor: Cursor, rows: Numbers) -> Column:
        children: list[Any] = [None] * len(kind)
        for name, places, skip in steps:
            start = cursor.position[rows]
            for turn, (place, decode) in enumerate(places):
                if turn:
                    # Two fields of the reader may be one of the writer, by an alias.
                    cursor.position[rows] = np.where(cursor.left[rows], cursor.end[rows], start)
                column = children[place] = decode(cursor, rows)
                if name in required and column.null_count:
                    cursor.leave(rows[np.asarray(column.is_null())])
            if not places:
                skip(cursor, rows)
        for place, build in defaults:
            children[place] = build([()] * len(rows))
        return pa.StructArray.from_arrays(children, fields=list(kind))

    return read


def _plan_array(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Decode:
    plan(writer, reader, kind, path)
    assert isinstance(kind, pa.ListType)
    item = _plan_items(writer, reader, kind.value_type, f"{path}[]")

    def read(cursor: Cursor, rows: Numbers) -> Column:
        ends, (items,), _ = _items(cursor, rows, [item], [kind.value_type])
        offsets: Any = pa.array(ends)
        return pa.ListArray.from_arrays(offsets, items, type=kind)

    return read


def _plan_map(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Decode:
    plan(writer, reader, kind, path)
    assert isinstance(kind, pa.MapType)
    item = _plan_items(writer, reader, kind.item_type, f"{path}{{}}")

    def read(cursor: Cursor, rows: Numbers) -> Column:
        ends, (keys, items), owners = _items(cursor, rows, [_text, item], [pa.string(), kind.item_type])
        if len(keys):
            # Of a key that is there twice one counts, and which one is for the careful way to say.
            codes = _codes(keys)
            pairs, counts = np.unique(owners * (codes.max() + 1) + codes, return_counts=True)
            cursor.leave(rows[np.unique(pairs[counts > 1] // (codes.max() + 1))])
        offsets: Any = pa.array(ends)
        made: Column = pa.MapArray.from_arrays(offsets, keys, items)
        return made if made.type == kind else made.cast(kind)

    return read


def _codes(keys: Column) -> Numbers:
    """A number for each text, the same for the same."""
    encoded: Any = keys.dictionary_encode()
    return np.asarray(encoded.indices).astype(np.int64)


def _plan_items(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Decode:
    own, wanted = writer.parts[0], reader.parts[0]
    decode = _plan(own, wanted, kind, path)
    if not own.is_nullable or wanted.is_nullable:
        return decode

    def checked(cursor: Cursor, rows: Numbers) -> Column:
        column = decode(cursor, rows)
        if column.null_count:
            cursor.leave(rows[np.asarray(column.is_null())])
        return column

    return checked


def _items(
    cursor: Cursor, rows: Numbers, decodes: Sequence[Decode], kinds: Sequence[Any]
) -> tuple[Numbers, list[Column], Numbers]:
    """The items of a list of each row, in turn: where those of each row end, the columns, and the row of each item."""
    chunks: list[list[Column]] = [[_nulls(0, kind)] for kind in kinds]
    owners: list[Numbers] = []
    # The places of rows whose list goes on.
    active = np.arange(len(rows))
    while len(active):
        counts = cursor.numbers(rows[active])
        sized = np.flatnonzero(counts < 0)
        if len(sized):
            # With the size of the block behind its count, for who skips it.
            cursor.numbers(rows[active[sized]])
            counts[sized] = -counts[sized]
        # Each item has a byte at least.
        ahead = cursor.end[rows[active]] - cursor.position[rows[active]]
        beyond = (counts < 0) | (counts > np.minimum(ahead, MOST_ITEMS))
        if beyond.any():
            cursor.leave(rows[active[beyond]])
        kept = (counts > 0) & ~cursor.left[rows[active]]
        active, counts = active[kept], counts[kept]
        for turn in range(int(counts.max(initial=0))):
            own = active[(counts > turn) & ~cursor.left[rows[active]]]
            if not len(own):
                break
            for part, decode in zip(chunks, decodes):
                part.append(decode(cursor, rows[own]))
            owners.append(own)
        active = active[~cursor.left[rows[active]]]
    owner = np.concatenate(owners) if owners else np.zeros(0, np.int64)
    order = np.argsort(owner, kind="stable")
    ends = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(rows)))]).astype(np.int32)
    return ends, [_taken(pa.concat_arrays(part), order) for part in chunks], owner[order]


def _plan_enum(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Decode:
    texts = enum_texts(writer, reader, path)
    column: Column = pa.array(texts, kind)
    is_known = np.array([text is not None for text in texts])

    def read(cursor: Cursor, rows: Numbers) -> Column:
        places = cursor.numbers_within(rows, 0, len(texts) - 1)
        if not is_known.all():
            cursor.leave(rows[~is_known[places]])
        return _taken(column, places)

    return read


def _plan_scalar(writer: AvroType, reader: AvroType, kind: pa.DataType, path: str) -> Decode:
    build = plan(writer, reader, kind, path)
    if reader.unit:
        return partial(_moments, writer.unit or reader.unit, kind)
    if reader.logical == "date":
        return lambda cursor, rows: pa.array(cursor.numbers_within(rows, *DAYS).astype(np.int32)).cast(kind)
    if reader.logical and writer.kind in ("bytes", "fixed"):
        return partial(_built, build, _plain(writer, reader, kind))
    return _plain(writer, reader, kind)


def _plain(writer: AvroType, reader: AvroType, kind: pa.DataType) -> Decode:
    """How a value without a logical type is decoded, and promoted."""
    if writer.kind in ("int", "long"):
        return partial(_whole, writer.kind, kind)
    if writer.kind in _WIDTHS:
        return partial(_floats, _WIDTHS[writer.kind], kind)
    if writer.kind == "string" or (writer.kind == "bytes" and reader.kind == "string"):
        return lambda cursor, rows: _cast(_text(cursor, rows), kind)
    if writer.kind == "boolean":
        return _booleans
    return _bytes if writer.kind == "bytes" else partial(_fixed, writer.size)


def _built(build: Callable[[Sequence[Any]], Column], decode: Decode, cursor: Cursor, rows: Numbers) -> Column:
    """A column that is made of values; those that cannot be are left."""
    column = decode(cursor, rows)
    values = [None if is_left else value for is_left, value in zip(cursor.left[rows], column.to_pylist())]
    try:
        return build(values)
    except ValueError:
        for place, value in enumerate(values):
            try:
                build([value])
            except ValueError:
                cursor.leave(rows[place : place + 1])
                values[place] = None
        return build(values)


def _cast(column: Column, kind: pa.DataType) -> Column:
    return column if column.type == kind else column.cast(kind)


def _whole(written: str, kind: pa.DataType, cursor: Cursor, rows: Numbers) -> Column:
    found = cursor.numbers_within(rows, *_INT) if written == "int" else cursor.numbers(rows)
    made = found.astype(kind.to_pandas_dtype())
    if pa.types.is_floating(kind):
        # Floating point numbers of this size are so far apart. What is none of them is not exact.
        steps = np.maximum(np.spacing(np.abs(made)), 1).astype(np.int64)
        if (wrong := found % steps != 0).any():
            cursor.leave(rows[wrong])
    return _array(made)


def _moments(unit: str, kind: pa.DataType, cursor: Cursor, rows: Numbers) -> Column:
    factor = {"millis": 1000}.get(unit, 1)
    first, last = MICROSECONDS
    if unit == "nanos":
        found = cursor.numbers(rows) // 1000
    else:
        found = cursor.numbers_within(rows, first // factor, last // factor) * factor
    return _array(found).cast(kind)


def _booleans(cursor: Cursor, rows: Numbers) -> Column:
    starts, _ = cursor.take(rows, np.ones(len(rows), np.int64))
    found = cursor.data[starts]
    wrong = found > 1
    if wrong.any():
        cursor.leave(rows[wrong])
    return _array(found == 1)


def _floats(width: int, kind: pa.DataType, cursor: Cursor, rows: Numbers) -> Column:
    starts, _ = cursor.take(rows, np.full(len(rows), width))
    places = starts[:, None] + np.arange(width)
    found = cursor.data[np.minimum(places, len(cursor.data) - 1)].view(f"<f{width}").reshape(-1)
    return _array(found.astype(kind.to_pandas_dtype()))


def _fixed(width: int, cursor: Cursor, rows: Numbers) -> Column:
    return _sized(cursor, rows, np.full(len(rows), width))


def _bytes(cursor: Cursor, rows: Numbers) -> Column:
    return _sized(cursor, rows, cursor.numbers(rows))


def _sized(cursor: Cursor, rows: Numbers, sizes: Numbers) -> Column:
    """Bytes of these sizes; none of rows that are left."""
    starts, sizes = cursor.take(rows, sizes)
    if not len(rows):
        return pa.array([], pa.binary())
    # What stands between two of them is one in between, which is not taken; so places have to grow.
    reached = np.maximum.accumulate(np.where(sizes > 0, starts + sizes, 0))
    ends = np.empty(2 * len(rows), np.int32)
    ends[::2] = np.where(sizes > 0, starts, reached)
    ends[1::2] = ends[::2] + sizes
    every = pa.Array.from_buffers(pa.binary(), 2 * len(rows) - 1, [None, _buffer(ends), _buffer(cursor.data)])
    return _taken(every, np.arange(0, 2 * len(rows), 2))


def _text(cursor: Cursor, rows: Numbers) -> Column:
    found = _bytes(cursor, rows)
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        texts: list[str] = []
        values: list[Any] = found.to_pylist()
        for place, value in enumerate(values):
            try:
                texts.append(value.decode())
            except UnicodeDecodeError:
                cursor.leave(rows[place : place + 1])
                texts.append("")
        return pa.array(texts, pa.string())


def _skip(writer: AvroType) -> Decode:
    """How a value is passed over; what it gives is nothing."""
    if writer.kind in ("int", "long", "enum"):
        return lambda cursor, rows: _after(cursor.numbers(rows), _nulls(len(rows), pa.null()))
    if writer.kind == "record":
        parts = [_skip(field.type) for field in writer.fields]
        return lambda cursor, rows: _after([part(cursor, rows) for part in parts], _nulls(len(rows), pa.null()))
    if writer.kind in ("array", "map"):
        item = [_text, _skip(writer.parts[0])] if writer.kind == "map" else [_skip(writer.parts[0])]
        kinds = [pa.string(), pa.null()][-len(item) :]
        return lambda cursor, rows: _after(_items(cursor, rows, item, kinds), _nulls(len(rows), pa.null()))
    if writer.kind == "union":
        branches = [_skip(part) for part in writer.parts]
        return partial(_skip_union, branches)
    if writer.kind in ("string", "bytes"):
        text = _text if writer.kind == "string" else _bytes
        return lambda cursor, rows: _after(text(cursor, rows), _nulls(len(rows), pa.null()))
    width = {"null": 0, "boolean": 1, "fixed": writer.size, **_WIDTHS}[writer.kind]
    return lambda cursor, rows: _after(cursor.take(rows, np.full(len(rows), width)), _nulls(len(rows), pa.null()))


def _skip_union(branches: Sequence[Decode], cursor: Cursor, rows: Numbers) -> Column:
    taken = cursor.numbers_within(rows, 0, len(branches) - 1)
    for place, branch in enumerate(branches):
        own = rows[taken == place]
        if len(own):
            branch(cursor, own)
    return _nulls(len(rows), pa.null())


_PLANS: dict[str, Callable[[AvroType, AvroType, pa.DataType, str], Decode]] = {
    "record": _plan_record,
    "array": _plan_array,
    "map": _plan_map,
    "enum": _plan_enum,
}
