"""What JSON documents have that no column was declared for, as JSON again."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from spark_jobs.decoding.ddl import LONGEST_COLUMN_NAME
from spark_jobs.decoding.json_decode import blocks_of, has_only
from spark_jobs.decoding.json_types import Column, is_parsed, is_variant
from spark_jobs.decoding.json_values import Constant, Number, RepeatingObject, scanner

Path: TypeAlias = "tuple[str, ...]"
"""The names of a field and of all around it."""
IN_ARRAY, IN_MAP = "[]", "{}"
"""In a path, an item of an array, and a value of a map."""
# What is deeper may be too deep to be read again.
_MOST_LEVELS = 100
_scan = scanner(parse_constant=Constant)


class Rescued(NamedTuple):
    """What documents have that no column was declared for.

    Args:
        fields: per document a JSON object; null if there is nothing.
        errors: per document why it cannot be kept as it is written; null where it can.
    """

    fields: Column
    errors: Column


class _TwiceError(Exception):
    """A field that no column was declared for is there more than once: an object would keep one of them."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the field {name!r:.200}, for which there is no column, is there twice")


def rescued(payloads: Column, schema: pa.Schema, known: Collection[Path] | None = None) -> Rescued:
    """For each document an object of its fields that the schema does not name; null if there are none.

    Fields of objects within objects, arrays and maps are found, too, and stand at the same place. Numbers stay as they
    are written. What is null is left out. What is no JSON object has none.

    Args:
        payloads: the documents; a tombstone has no fields.
        schema: the columns that were declared.
        known: leave out these fields, too, with what is in them, fields whose names are too long for a column, and
            fields that hold nothing: null, empty objects and arrays. NaN and infinity stay as they are written then,
            which is no JSON; by default they are text.

    Example:
        >>> schema = pa.schema([("id", pa.int64()), ("shop", pa.struct([("name", pa.string())]))])
        >>> documents = [b'{"id": 1, "shop": {"name": "a", "zip": 1.10}, "new": [1]}', b'{"id": 2, "new": null}']
        >>> rescued(pa.array(documents), schema).fields.to_pylist()
        ['{"shop": {"zip": 1.10}, "new": [1]}', None]
    """
    kind = pa.struct(list(schema))
    found: list[str | None] = []
    errors: list[str | None] = []
    for block in blocks_of(payloads):
        # Arrow does not look into what it does not parse.
        if is_parsed(schema) and has_only(block, schema):
            found += [None] * len(block)
            errors += [None] * len(block)
            continue
        for document in block.to_pylist():
            error = fields = None
            try:
                fields = _rescued(document, kind, known)
            except _TwiceError as twice:
                error = str(twice)
            found.append(fields)
            errors.append(error)
    return Rescued(pa.array(found, pa.string()), pa.array(errors, pa.string()))


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


def _rescued(document: bytes | None, kind: pa.DataType, known: Collection[Path] | None) -> str | None:
    if document is None:
        return None
    try:
        value, _ = _scan(document.decode().strip(), 0)
        left = _left(value, kind, (), known) if isinstance(value, dict) else None
        return None if left is None else _written(left, known is not None)
    except (ValueError, RecursionError, StopIteration):
        # Why it is none is for the decoder to say.
        return None


def _left(value: Any, kind: pa.DataType, path: Path, known: Collection[Path] | None) -> Any:
    """What of a value has no place in a type; ``None`` if all of it has one."""
    found: dict[str, Any] = {}
    if is_variant(kind):
        return None
    if isinstance(value, dict) and isinstance(kind, pa.StructType):
        declared = {field.name: field.type for field in kind}
        repeated = value.repeated if isinstance(value, RepeatingObject) else frozenset[str]()
        for name, one in value.items():
            inner = (*path, name)
            if name in declared:
                found[name] = _left(one, declared[name], inner, known)
            elif known is None or (
                len(name) <= LONGEST_COLUMN_NAME and has_content(one) and not _is_within(inner, known)
            ):
                if name in repeated:
                    raise _TwiceError(name)
                found[name] = one
    elif isinstance(value, dict) and isinstance(kind, pa.MapType):
        found = {name: _left(one, kind.item_type, (*path, IN_MAP), known) for name, one in value.items()}
    elif isinstance(value, list) and isinstance(kind, pa.ListType):
        parts = [_left(one, kind.value_type, (*path, IN_ARRAY), known) for one in value]
        return parts if any(part is not None for part in parts) else None
    return {name: one for name, one in found.items() if one is not None} or None


def _is_within(path: Path, known: Collection[Path]) -> bool:
    return any(path[:length] in known for length in range(1, len(path) + 1))


def has_content(value: Any) -> bool:
    """Whether there is anything in a parsed value but null, and empty objects and arrays; not below 100 levels.

    Example:
        >>> has_content({"a": [None, {}]}), has_content({"a": [0]})
        (False, True)
    """
    left = [(value, 0)]
    while left:
        one, level = left.pop()
        if isinstance(one, (dict, list)):
            parts = one.values() if isinstance(one, dict) else one
            left.extend((part, level + 1) for part in parts if level < _MOST_LEVELS)
        elif one is not None:
            return True
    return False


def _written(value: Any, constants: bool = False) -> str:
    if isinstance(value, RepeatingObject):
        raise _TwiceError(min(value.repeated))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(name)}: {_written(one, constants)}' for name, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(_written(one, constants) for one in value)}]"
    if isinstance(value, Number) and (constants or not isinstance(value, Constant)):
        return str(value)
    return json.dumps(str(value) if isinstance(value, Constant) else value)
