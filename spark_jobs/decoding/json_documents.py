"""JSON documents into typed Arrow columns by Python, each document by itself.

It knows what Arrow's parser does not: MAP and VARIANT, numbers that Arrow must not read, and what lenient mode takes
though it is written in another way, like a number where text is wanted. What Arrow refuses is decided here, so that the
reason of a dead letter names the field. Documents are parsed one by one and become columns a field at a time.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from spark_jobs.decoding.json_decode import (
    FAILURES,
    joined,
    may_hold_constants,
    may_hold_odd_decimals,
    named_row,
    parse_lines,
    placed,
    reason_of,
)
from spark_jobs.decoding.json_types import Column, decoded_type, has_own_way, is_variant
from spark_jobs.decoding.json_values import (
    Constant,
    JsonText,
    RepeatingObject,
    Scan,
    conversion,
    kind_of,
    read_pairs,
    refuse_constant,
    scanner,
    variant_problem,
)

Fail: TypeAlias = Callable[[int, str], None]
"""Told of a row, and why it cannot be decoded."""
# So many documents are parsed by Arrow again without one that it does not parse, and so often.
_FEW_ROWS = 256
_TRIES = 5
_MANY_ROWS = 2048
# With fewer brackets Python reads any document, wherever it is called; Arrow reads deeper.
_SURELY_FLAT = 400
_TOMBSTONE = b"{}"
_SPACES = " \t\n\r"
_SPACE = re.compile(f"[{_SPACES}]*")
_LIST: Any = pa.ListArray
_MAP: Any = pa.MapArray
_NAMES = conversion(pa.string(), is_lenient=False)
_scan = scanner(parse_constant=Constant)
_scan_strictly = scanner(parse_constant=refuse_constant)


def decode_block(
    documents: list[bytes | None], schema: pa.Schema, *, is_lenient: bool
) -> tuple[list[Column], list[str | None]]:
    """Decode a block of which Arrow does not parse all.

    See :class:`spark_jobs.decoding.json_decode.Careful` for the result.

    Args:
        documents: ``None`` is a tombstone.
        schema: the columns.
        is_lenient: see :func:`decode_documents`.
    """
    if any(has_own_way(field.type) for field in schema):
        return decode_documents(documents, schema, is_lenient=is_lenient)
    parts: list[list[Column]] = []
    errors: list[str | None] = []
    rows = _FEW_ROWS
    while len(errors) < len(documents):
        chunk = documents[len(errors) : len(errors) + rows]
        columns, found, is_mostly_parsed = _decode_chunk(chunk, schema, is_lenient=is_lenient)
        parts.append(columns)
        errors.extend(found)
        # Where Arrow failed at many, it will fail at many of the next ones, too.
        rows = _FEW_ROWS if is_mostly_parsed else _MANY_ROWS
    return joined(parts), errors


def _decode_chunk(
    documents: list[bytes | None], schema: pa.Schema, *, is_lenient: bool
) -> tuple[list[Column], list[str | None], bool]:
    """Arrow parses the documents without those at which it fails, if these are few; the others are left to Python.

    Returns:
        The columns, per row why it could not be decoded, and whether Arrow parsed most of them.
    """
    lines = [_TOMBSTONE if document is None else document.strip() for document in documents]
    sound = _sound(lines, schema)
    parsed, columns = _parse_most(lines, sound, schema)
    parts = [(parsed, columns)] if parsed else []
    left = set(range(len(lines))).difference(parsed)
    for row in left.intersection(sound):
        if lines[row].count(b"[") + lines[row].count(b"{") > _SURELY_FLAT:
            with suppress(*FAILURES):
                parts.append(([row], parse_lines([lines[row]], schema)))
                left.remove(row)
    others = sorted(left)
    columns, found = decode_documents([lines[row] for row in others], schema, is_lenient=is_lenient)
    errors: list[str | None] = [None] * len(lines)
    for row, error in zip(others, found):
        errors[row] = error
    parts.append((others, columns))
    rows = [row for own, _ in parts for row in own]
    return placed(joined([columns for _, columns in parts]), rows, len(lines)), errors, bool(parsed)


def _sound(lines: list[bytes], schema: pa.Schema) -> list[int]:
    """The documents that Arrow either parses or refuses, as it should."""
    texts: dict[int, str] = {}
    for row, line in enumerate(lines):
        if line[:1] == b"{" and line[-1:] == b"}" and not may_hold_constants(line):
            with suppress(UnicodeDecodeError):
                texts[row] = line.decode()
    is_odd = may_hold_odd_decimals(pa.array(texts.values(), pa.string()), schema).to_pylist()
    return [row for row, odd in zip(texts, is_odd) if not odd]


def _parse_most(lines: list[bytes], rows: list[int], schema: pa.Schema) -> tuple[list[int], list[Column]]:
    """Those of these rows that Arrow parses, and their columns; none if it fails at many."""
    left = list(rows)
    for _ in range(_TRIES):
        try:
            return left, parse_lines([lines[row] for row in left], schema) if left else []
        except FAILURES as error:
            named = named_row(error)
            if named is None or named >= len(left):
                break
            del left[named]
    return [], []


def decode_documents(
    documents: Sequence[bytes | None], schema: pa.Schema, *, is_lenient: bool
) -> tuple[list[Column], list[str | None]]:
    """Decode documents one by one.

    Args:
        documents: ``None`` is a tombstone.
        schema: the columns; a VARIANT becomes its JSON text.
        is_lenient: take what is written in another way than the type is, see docs/payloads.md.

    Returns:
        The columns, and per row why it could not be decoded.
    """
    root = _root(schema, is_lenient)
    errors: list[str | None] = [None] * len(documents)
    objects: list[Mapping[str, Any]] = []

    def fail(row: int, reason: str) -> None:
        errors[row] = errors[row] or reason

    scan = _scan if is_lenient else _scan_strictly
    is_wanted = False
    for row, document in enumerate(documents):
        found: Mapping[str, Any] = {}
        try:
            if document is not None:
                text = object_text(document)
                # Where the last one was wanted as it is written, so is this one, most probably.
                written = _exact(root, text) if is_wanted and is_lenient else None
                if written is None:
                    found = read_object(text, scan)
                    is_wanted = root.wants_text(found)
                    written = root.exact(text, 0)[0] if is_wanted else found
                found = written
        except (ValueError, RecursionError, StopIteration) as error:
            found = {}
            fail(row, why(error))
        objects.append(found)
    columns = root.columns(objects, range(len(objects)), "", fail)
    good = [row for row, error in enumerate(errors) if error is None]
    if len(good) < len(errors):
        columns = placed([column.take(pa.array(good, pa.int64())) for column in columns], good, len(errors))
    return columns, errors


def decode_values(documents: list[bytes | None], schema: pa.Schema) -> tuple[list[Column], list[str | None]]:
    """Decode documents of any kind, not only objects, as one VARIANT.

    See :func:`spark_jobs.decoding.json_decode.decode_carefully` for arguments and result.
    """
    texts: list[str | None] = []
    errors: list[str | None] = []
    for document in documents:
        text, problem = None, None
        if document is not None:
            try:
                text = document.strip().decode()
                problem = variant_problem(text)
            except UnicodeDecodeError as error:
                problem = why(error)
        texts.append(None if problem else text)
        errors.append(problem)
    return [pa.array(texts, pa.string())], errors


def object_text(document: bytes) -> str:
    """A document that looks like an object, as text without white space around it.

    Raises:
        ValueError: it does not, or is not UTF-8.
    """
    line = document.strip()
    if line[:1] != b"{" or line[-1:] != b"}":
        raise ValueError("not a JSON object")
    return line.decode()


def read_object(text: str, scan: Scan = _scan) -> dict[str, Any]:
    """An object as it is parsed, with numbers as they are written.

    Args:
        text: of :func:`object_text`.
        scan: parses.

    Raises:
        ValueError, StopIteration, RecursionError: it is none, or cannot be read; see :func:`why`.
    """
    found, end = scan(text, 0)
    if end != len(text):
        raise ValueError("more than one JSON object")
    return found  # type: ignore[no-any-return]


def _exact(root: _Struct, text: str) -> Mapping[str, Any] | None:
    """An object whose values are as they are written where that is wanted; ``None`` if it cannot be read so."""
    try:
        found, end = root.exact(text, 0)
    except (IndexError, ValueError, RecursionError, StopIteration):
        return None
    return found if end == len(text) else None


def why(error: Exception) -> str:
    """What is wrong with a document, of what :func:`read_object` raises."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason} at byte {error.start}"
    return "not JSON" if isinstance(error, StopIteration) else reason_of(error)


class _Shape(Protocol):
    """What a type makes of values of JSON."""

    def wants_text(self, value: Any) -> bool:
        """Whether there is an object or an array in it that is wanted as it is written."""
        ...

    def exact(self, text: str, at: int) -> tuple[Any, int]:
        """The value that is written there, with :class:`JsonText` where it is wanted, and where it ends.

        Args:
            text: known to be JSON.
            at: where the value begins.
        """
        ...

    def column(self, values: Sequence[Any], rows: Sequence[int], name: str, fail: Fail) -> Column:
        """The values as a column.

        Args:
            values: parsed.
            rows: the document that each is of.
            name: of the field, for errors.
            fail: told of what does not fit.
        """
        ...


@functools.lru_cache(maxsize=64)
def _root(schema: pa.Schema, is_lenient: bool) -> _Struct:
    return _Struct(pa.struct(list(schema)), is_lenient)


def _shape(kind: pa.DataType, is_lenient: bool) -> _Shape:
    if is_variant(kind):
        return _Variant()
    if isinstance(kind, pa.StructType):
        return _Struct(kind, is_lenient)
    if isinstance(kind, pa.MapType):
        return _Map(kind, is_lenient)
    if isinstance(kind, pa.ListType):
        return _List(kind, is_lenient)
    return _Text(kind, True) if is_lenient and pa.types.is_string(kind) else _Leaf(kind, is_lenient)


class _Leaf:
    """A type without parts."""

    def __init__(self, kind: pa.DataType, is_lenient: bool) -> None:
        self._conversion = conversion(kind, is_lenient=is_lenient)

    def wants_text(self, value: Any) -> bool:
        return False

    def exact(self, text: str, at: int) -> tuple[Any, int]:
        return _scan(text, at)

    def column(self, values: Sequence[Any], rows: Sequence[int], name: str, fail: Fail) -> Column:
        return self._conversion.column(
            values, lambda place, wanted: fail(rows[place], f"field {name!r} is not {wanted}")
        )


class _Text(_Leaf):
    """A STRING, which takes everything as it is written."""

    def wants_text(self, value: Any) -> bool:
        return isinstance(value, (dict, list))

    def exact(self, text: str, at: int) -> tuple[Any, int]:
        value, end = _scan(text, at)
        return JsonText(text[at:end]) if isinstance(value, (dict, list)) else value, end


class _Variant:
    """A VARIANT, as JSON text."""

    def wants_text(self, value: Any) -> bool:
        return True

    def exact(self, text: str, at: int) -> tuple[Any, int]:
        _, end = _scan(text, at)
        return JsonText(text[at:end]), end

    def column(self, values: Sequence[Any], rows: Sequence[int], name: str, fail: Fail) -> Column:
        found: list[str | None] = []
        for row, value in zip(rows, values):
            problem = None if value is None else variant_problem(value)
            if problem:
                fail(row, f"field {name!r}: {problem}")
            found.append(None if problem else value)
        return pa.array(found, pa.string())


class _Struct:
    """A STRUCT: the fields that it names."""

    def __init__(self, kind: pa.StructType, is_lenient: bool) -> None:
        self._fields = list(kind)
        self._decoded = [field.with_type(decoded_type(field.type)) for field in kind]
        self._shapes = [_shape(field.type, is_lenient) for field in kind]
        self._by_name = dict(zip(kind.names, self._shapes))
        self._with_text = [pair for pair in self._by_name.items() if type(pair[1]) is not _Leaf]

    def wants_text(self, value: Any) -> bool:
        if isinstance(value, dict):
            for name, shape in self._with_text:
                if name in value and shape.wants_text(value[name]):
                    return True
        return False

    def exact(self, text: str, at: int) -> tuple[Any, int]:
        return _exact_object(text, at, self._by_name.get)

    def columns(
        self, values: Sequence[Mapping[str, Any]], rows: Sequence[int], prefix: str, fail: Fail
    ) -> list[Column]:
        for row, value in zip(rows, values):
            if isinstance(value, RepeatingObject) and (twice := sorted(value.repeated.intersection(self._by_name))):
                fail(row, f"field {prefix + twice[0]!r} is there twice")
        return [
            shape.column([value.get(field.name) for value in values], rows, prefix + field.name, fail)
            for field, shape in zip(self._fields, self._shapes)
        ]

    def column(self, values: Sequence[Any], rows: Sequence[int], name: str, fail: Fail) -> Column:
        objects = _all_are(dict, values, rows, name, fail)
        columns = self.columns([value or {} for value in objects], rows, f"{name}.", fail)
        for field, column in zip(self._fields, columns):
            if not field.nullable and column.null_count:
                for row, value, is_there in zip(rows, objects, column.is_valid().to_pylist()):
                    if value is not None and not is_there:
                        fail(row, f"field {f'{name}.{field.name}'!r} is missing, but it is NOT NULL")
        mask = pa.array([value is None for value in objects], pa.bool_())
        return pa.StructArray.from_arrays(columns, fields=self._decoded, mask=mask)


class _List:
    """An ARRAY."""

    def __init__(self, kind: pa.ListType[Any], is_lenient: bool) -> None:
        self._kind = decoded_type(kind)
        self._shape = _shape(kind.value_type, is_lenient)

    def wants_text(self, value: Any) -> bool:
        return isinstance(value, list) and any(map(self._shape.wants_text, value))

    def exact(self, text: str, at: int) -> tuple[Any, int]:
        if text[at] != "[":
            return _scan(text, at)
        found: list[Any] = []
        at = _behind_space(text, at + 1)
        if text[at] == "]":
            return found, at + 1
        while True:
            value, at = self._shape.exact(text, at)
            found.append(value)
            at = _behind_space(text, at)
            if text[at] == "]":
                return found, at + 1
            _expect(text, at, ",")
            at = _behind_space(text, at + 1)

    def column(self, values: Sequence[Any], rows: Sequence[int], name: str, fail: Fail) -> Column:
        arrays = _all_are(list, values, rows, name, fail)
        inner, own = _flat(arrays, rows)
        items = self._shape.column(inner, own, f"{name}[]", fail)
        made: Column = _LIST.from_arrays(_offsets(arrays), items, type=self._kind)
        return made


class _Map:
    """A MAP with keys of text."""

    def __init__(self, kind: pa.MapType[Any, Any], is_lenient: bool) -> None:
        self._kind = decoded_type(kind)
        self._shape = _shape(kind.item_type, is_lenient)

    def wants_text(self, value: Any) -> bool:
        return isinstance(value, dict) and any(map(self._shape.wants_text, value.values()))

    def exact(self, text: str, at: int) -> tuple[Any, int]:
        return _exact_object(text, at, lambda name: self._shape)

    def column(self, values: Sequence[Any], rows: Sequence[int], name: str, fail: Fail) -> Column:
        objects = _all_are(dict, values, rows, name, fail)
        for row, value in zip(rows, objects):
            if isinstance(value, RepeatingObject):
                fail(row, f"field {name!r}: the key {min(value.repeated)!r} is there twice")
        keys, own = _flat(objects, rows)
        names = _NAMES.column(keys, lambda place, wanted: fail(own[place], f"a key of field {name!r} is not {wanted}"))
        inner, own = _flat([None if value is None else list(value.values()) for value in objects], rows)
        items = self._shape.column(inner, own, f"{name}{{}}", fail)
        made: Column = _MAP.from_arrays(_offsets(objects), names.fill_null(""), items, type=self._kind)
        return made


def _all_are(kind: type, values: Sequence[Any], rows: Sequence[int], name: str, fail: Fail) -> list[Any]:
    """The values, with null for those of another kind."""
    wanted = "an object" if kind is dict else "an array"
    found = []
    for row, value in zip(rows, values):
        if value is None or isinstance(value, kind):
            found.append(value)
        else:
            found.append(None)
            fail(row, f"field {name!r} is not {wanted}; found {kind_of(value)}")
    return found


def _flat(groups: Sequence[Any], rows: Sequence[int]) -> tuple[list[Any], list[int]]:
    """What is in these arrays, or the keys of these objects, and the row that each is of."""
    pairs = [(value, row) for group, row in zip(groups, rows) if group for value in group]
    return [value for value, _ in pairs], [row for _, row in pairs]


def _offsets(groups: Sequence[Any]) -> Column:
    offsets: list[int | None] = []
    end = 0
    for group in groups:
        offsets.append(None if group is None else end)
        end += len(group or ())
    return pa.array([*offsets, end], pa.int32())


def _exact_object(text: str, at: int, shape_of: Callable[[str], _Shape | None]) -> tuple[Any, int]:
    if text[at] != "{":
        return _scan(text, at)
    found: list[tuple[str, Any]] = []
    at = _behind_space(text, at + 1)
    if text[at] == "}":
        return {}, at + 1
    while True:
        _expect(text, at, '"')
        name, at = scanstring(text, at + 1, True)
        if text[at] != ":":
            at = _behind_space(text, at)
            _expect(text, at, ":")
        at += 1
        if text[at] in _SPACES:
            at = _behind_space(text, at)
        shape = shape_of(name)
        value, at = _scan(text, at) if shape is None else shape.exact(text, at)
        found.append((name, value))
        if text[at] in _SPACES:
            at = _behind_space(text, at)
        if text[at] == "}":
            return read_pairs(found), at + 1
        _expect(text, at, ",")
        at = _behind_space(text, at + 1)


def _expect(text: str, at: int, what: str) -> None:
    if text[at] != what:
        raise ValueError(f"no {what}")


def _behind_space(text: str, at: int) -> int:
    if text[at] not in _SPACES:
        return at
    match = _SPACE.match(text, at)
    assert match
    return match.end()
