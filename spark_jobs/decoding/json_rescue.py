"""What JSON documents have that no column was declared for, as JSON again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.json as pj

from spark_jobs.decoding.json_decode import BLOCK_ROWS, FAILURES, bounded, document_lines, parsed_schema
from spark_jobs.decoding.json_types import Column, has_own_way, is_variant
from spark_jobs.decoding.json_values import Constant, Number, scanner

Path: TypeAlias = "tuple[str, ...]"
"""The names of a field and of all around it."""
IN_ARRAY, IN_MAP = "[]", "{}"
"""In a path, an item of an array, and a value of a map."""
_scan = scanner(parse_constant=Constant)
_FAILED: tuple[type[Exception], ...] = (ValueError, RecursionError, StopIteration)


def rescued(
    payloads: Column,
    schema: pa.Schema,
    wanted: Callable[[Path, Any], bool] | None = None,
    *,
    constants: bool = False,
) -> Column:
    """For each document an object of its fields that the schema does not name; null if there are none.

    Fields of objects within objects, arrays and maps are found, too, and stand at the same place. Numbers stay as they
    are written. What is null is left out. What is no JSON object has none.

    Args:
        payloads: the documents; a tombstone has no fields.
        schema: the columns that were declared.
        wanted: whether to take such a field, by its path and its value; all of them by default.
        constants: write NaN and infinity as they are, which is no JSON; as text by default.

    Example:
        >>> schema = pa.schema([("id", pa.int64()), ("shop", pa.struct([("name", pa.string())]))])
        >>> documents = [b'{"id": 1, "shop": {"name": "a", "zip": 1.10}, "new": [1]}', b'{"id": 2, "new": null}']
        >>> rescued(pa.array(documents), schema).to_pylist()
        ['{"shop": {"zip": 1.10}, "new": [1]}', None]
    """
    kind = pa.struct(list(schema))
    # Arrow does not look into what is decoded in another way.
    is_told = not any(has_own_way(field.type) for field in schema)
    found: list[Column] = [pa.array([], pa.string())]
    for start in range(0, len(payloads), BLOCK_ROWS):
        for block in bounded(payloads.slice(start, BLOCK_ROWS)):
            if is_told and _has_only(block, schema):
                found.append(pa.nulls(len(block), pa.string()))
            else:
                left = [_rescued(document, kind, wanted, constants) for document in block.to_pylist()]
                found.append(pa.array(left, pa.string()))
    return pa.concat_arrays(found)


def _has_only(block: Column, schema: pa.Schema) -> bool:
    """Whether Arrow finds no other fields in any of the documents; where it finds out nothing, there may be some."""
    try:
        lines = document_lines(block, schema)
        source: Any = pa.BufferReader(lines)
        pj.read_json(
            source,
            read_options=pj.ReadOptions(use_threads=False, block_size=len(lines) + 1),
            parse_options=pj.ParseOptions(explicit_schema=parsed_schema(schema), unexpected_field_behavior="error"),
        )
    except FAILURES:
        return False
    return True


def united(first: str | None, second: str | None) -> str | None:
    """Two JSON objects in one, and so the objects in them that have the same name; numbers stay as they are written.

    Example:
        >>> united('{"shop": {"zip": 1.10}}', '{"shop":{"city":"b"},"user":"ada"}')
        '{"shop": {"zip": 1.10, "city": "b"}, "user": "ada"}'
    """
    if first is None or second is None:
        return first or second
    (one, _), (other, _) = _scan(first, 0), _scan(second, 0)
    return _written(_together(one, other))


def _together(one: Any, other: Any) -> Any:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return {**one, **{name: _together(one[name], value) if name in one else value for name, value in other.items()}}


def _rescued(
    document: bytes | None, kind: pa.DataType, wanted: Callable[[Path, Any], bool] | None, constants: bool
) -> str | None:
    if document is None:
        return None
    try:
        value, _ = _scan(document.decode().strip(), 0)
        left = _left(value, kind, (), wanted) if isinstance(value, dict) else None
        return None if left is None else _written(left, constants)
    except _FAILED:
        # Why it is none is for the decoder to say.
        return None


def _left(value: Any, kind: pa.DataType, path: Path, wanted: Callable[[Path, Any], bool] | None) -> Any:
    """What of a value has no place in a type; ``None`` if all of it has one."""
    found: dict[str, Any] = {}
    if is_variant(kind):
        return None
    if isinstance(value, dict) and isinstance(kind, pa.StructType):
        known = {field.name: field.type for field in kind}
        for name, one in value.items():
            inner = (*path, name)
            if name in known:
                found[name] = _left(one, known[name], inner, wanted)
            elif wanted is None or wanted(inner, one):
                found[name] = one
    elif isinstance(value, dict) and isinstance(kind, pa.MapType):
        found = {name: _left(one, kind.item_type, (*path, IN_MAP), wanted) for name, one in value.items()}
    elif isinstance(value, list) and isinstance(kind, pa.ListType):
        parts = [_left(one, kind.value_type, (*path, IN_ARRAY), wanted) for one in value]
        return parts if any(part is not None for part in parts) else None
    return {name: one for name, one in found.items() if one is not None} or None


def _written(value: Any, constants: bool = False) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(name)}: {_written(one, constants)}' for name, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(_written(one, constants) for one in value)}]"
    if isinstance(value, Number) and (constants or not isinstance(value, Constant)):
        return str(value)
    return json.dumps(str(value) if isinstance(value, Constant) else value)
