"""Avro schemas and values of them, made at random, and what the columns of a value should be."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

import fastavro
from hypothesis import strategies as st

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_INTS = {"int": 31, "long": 63}
WIDER = {"int": ["long", "double"], "long": ["double"], "float": ["double"], "string": ["bytes"]}
_PLAIN = ["boolean", "int", "long", "float", "double", "bytes", "string"]
_LOGICAL: list[dict[str, Any]] = [
    {"type": "int", "logicalType": "date"},
    {"type": "int", "logicalType": "time-millis"},
    {"type": "long", "logicalType": "time-micros"},
    {"type": "long", "logicalType": "timestamp-millis"},
    {"type": "long", "logicalType": "timestamp-micros"},
    {"type": "long", "logicalType": "local-timestamp-millis"},
    {"type": "long", "logicalType": "local-timestamp-micros"},
    {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 5},
    {"type": "string", "logicalType": "uuid"},
]
_text = st.text(max_size=5)
_moments = st.datetimes(timezones=st.just(timezone.utc))


def schemas(*, logical: bool = True) -> st.SearchStrategy[dict[str, Any]]:
    """Records with fields of any type; names are counted, so that no two are alike."""
    return st.builds(_named, _records(_types(logical)))


def common_schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Records of scalars and of records, which may be null."""

    def nullable(kind: Any) -> st.SearchStrategy[Any]:
        return st.sampled_from([kind, ["null", kind], [kind, "null"]])

    leaves = _leaves(logical=True).flatmap(nullable)
    return st.builds(_named, _records(leaves | _records(leaves).flatmap(nullable)))


def _leaves(logical: bool) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.sampled_from([*_PLAIN, *(_LOGICAL if logical else ())]),
        st.lists(st.sampled_from("ABCDE"), min_size=1, unique=True).map(lambda s: {"type": "enum", "symbols": s}),
        st.integers(1, 20).map(lambda size: {"type": "fixed", "size": size}),
    )


def _types(logical: bool) -> st.SearchStrategy[Any]:
    return st.recursive(_leaves(logical), _nested, max_leaves=6)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        inner.map(lambda items: {"type": "array", "items": items}),
        inner.map(lambda values: {"type": "map", "values": values}),
        _records(inner),
        st.lists(inner, min_size=1, max_size=4, unique_by=kind_of).map(_union),
    )


def _union(parts: list[Any]) -> Any:
    flat = [branch for part in parts for branch in (part if isinstance(part, list) else [part]) if branch != "null"]
    # A union may hold one of each unnamed type.
    kept = {kind_of(branch): branch for branch in flat if kind_of(branch) not in ("record", "enum", "fixed")}
    named = {kind_of(branch): branch for branch in flat if kind_of(branch) in ("record", "enum", "fixed")}
    return ["null", *kept.values(), *named.values()]


def kind_of(schema: Any) -> str:
    """What Avro calls a type."""
    if isinstance(schema, list):
        return "union"
    return kind_of(schema["type"]) if isinstance(schema, dict) else str(schema)


def _records(types: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(types, min_size=1, max_size=4).map(lambda kinds: {"type": "record", "fields": kinds})


def _named(record: dict[str, Any]) -> dict[str, Any]:
    numbers = itertools.count()

    def name(schema: Any) -> Any:
        if isinstance(schema, list):
            return [name(part) for part in schema]
        if not isinstance(schema, dict):
            return schema
        kind = kind_of(schema)
        if kind in ("array", "map"):
            inner = "items" if kind == "array" else "values"
            return {**schema, inner: name(schema[inner])}
        if kind not in ("record", "enum", "fixed"):
            return schema
        own = {**schema, "name": f"n.T{next(numbers)}"}
        if kind == "record":
            own["fields"] = [{"name": f"f{place}", "type": name(part)} for place, part in enumerate(schema["fields"])]
        return own

    made = name(record)
    assert isinstance(made, dict)
    return made


def values(schema: Any) -> st.SearchStrategy[Any]:
    """Values of a schema, as fastavro takes them."""
    if isinstance(schema, list):
        return st.one_of([st.none() if part == "null" else _tagged(part) for part in schema])
    logical = schema.get("logicalType") if isinstance(schema, dict) else None
    if logical:
        return _logical_values(schema)
    kind = kind_of(schema)
    if kind == "record":
        return st.fixed_dictionaries({field["name"]: values(field["type"]) for field in schema["fields"]})
    if kind == "array":
        return st.lists(values(schema["items"]), max_size=3)
    if kind == "map":
        return st.dictionaries(_text, values(schema["values"]), max_size=3)
    if kind in _INTS:
        return st.integers(-(2 ** _INTS[kind]), 2 ** _INTS[kind] - 1)
    return {
        "boolean": st.booleans(),
        "float": st.floats(width=32, allow_nan=False),
        "double": st.floats(allow_nan=False),
        "bytes": st.binary(max_size=5),
        "string": _text,
        "enum": st.sampled_from(schema["symbols"]) if kind == "enum" else st.nothing(),
        "fixed": st.binary(min_size=schema["size"], max_size=schema["size"]) if kind == "fixed" else st.nothing(),
    }[kind]


def _tagged(part: Any) -> st.SearchStrategy[Any]:
    """A value that says which branch of a union it is of."""
    tag = part["name"] if kind_of(part) in ("record", "enum", "fixed") else kind_of(part)
    return values(part).map(lambda value: (tag, value))


def _logical_values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    head, _, unit = schema["logicalType"].rpartition("-")
    if unit == "date":
        return st.dates()
    if head == "time":
        times = st.times()
        return times if unit == "micros" else times.map(lambda t: t.replace(microsecond=t.microsecond // 1000 * 1000))
    if head in ("timestamp", "local-timestamp"):
        moments = _moments if head == "timestamp" else _moments.map(lambda m: m.replace(tzinfo=None))
        return (
            moments if unit == "micros" else moments.map(lambda m: m.replace(microsecond=m.microsecond // 1000 * 1000))
        )
    if unit == "uuid":
        return st.uuids()
    return st.decimals(min_value=-(10**14), max_value=10**14, places=5, allow_nan=False)


def encoded(schema: Any, value: Any) -> bytes:
    """A value as plain Avro."""
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(schema), value)
    return buffer.getvalue()


def column(schema: Any, value: Any) -> Any:
    """The value of the column, by the tables of docs/decode-messages.md; ``value`` as :func:`values` makes it."""
    if isinstance(schema, list):
        return _union_column([part for part in schema if part != "null"], value)
    if value is None:
        return None
    logical = schema.get("logicalType") if isinstance(schema, dict) else None
    if logical:
        return _logical_column(logical, value)
    kind = kind_of(schema)
    if kind == "record":
        return {field["name"]: column(field["type"], value[field["name"]]) for field in schema["fields"]}
    if kind == "array":
        return [column(schema["items"], item) for item in value]
    if kind == "map":
        return [(key, column(schema["values"], item)) for key, item in value.items()]
    return value


def _union_column(branches: list[Any], value: Any) -> Any:
    if len(branches) == 1:
        return column(branches[0], None if value is None else value[1])
    if value is None:
        return None
    names = {part["name"] if kind_of(part) in ("record", "enum", "fixed") else kind_of(part): part for part in branches}
    tag, own = value
    return {name.rpartition(".")[2]: column(part, own) if name == tag else None for name, part in names.items()}


def _logical_column(logical: str, value: Any) -> Any:
    if logical == "uuid":
        return str(value)
    if logical == "time-millis":
        return _since_midnight(value) // 1000
    return _since_midnight(value) if logical == "time-micros" else value


def _since_midnight(value: Any) -> int:
    return (datetime.combine(EPOCH, value, timezone.utc) - EPOCH) // timedelta(microseconds=1)


@st.composite
def evolved(draw: st.DrawFn, schema: Any) -> Any:
    """A schema that can read what this one has written: fewer fields, more of them, wider ones, in another order."""
    if isinstance(schema, list):
        parts = [draw(evolved(part)) for part in schema]
        parts = [part if isinstance(part, str | dict) else part[1] for part in parts]
        # Of two branches that a value could be read as, ours is the one of its own type; fastavro's is the first one.
        kept = parts if len({kind_of(part) for part in parts}) == len(parts) else schema
        return kept if "null" in kept or draw(st.booleans()) else ["null", *kept]
    kind = kind_of(schema)
    if kind == "record":
        kept = [own for own in schema["fields"] if draw(st.integers(0, 3))]
        fields = [{**own, "type": draw(evolved(own["type"]))} for own in kept]
        if draw(st.booleans()) or not fields:
            fields.append({"name": "new", "type": ["null", "string"], "default": None})
        if draw(st.booleans()):
            fields.append({"name": "more", "type": {"type": "array", "items": "int"}, "default": [1, 2]})
        return {**schema, "fields": draw(st.permutations(fields))}
    if kind in ("array", "map"):
        inner = "items" if kind == "array" else "values"
        return {**schema, inner: draw(evolved(schema[inner]))}
    if kind in WIDER and draw(st.booleans()):
        return draw(st.sampled_from(WIDER[kind]))
    return ["null", schema] if draw(st.integers(0, 3)) == 0 and schema != "null" else schema


@st.composite
def damaged(draw: st.DrawFn, payload: bytes) -> bytes:
    """A payload of which some bytes are others, gone, or more."""
    bad = bytearray(payload)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(0, len(bad) - 1)))
        how = draw(st.sampled_from(["flip", "cut", "add", "make"]))
        if how == "flip" and bad:
            bad[place] ^= draw(st.integers(1, 255))
        elif how == "cut":
            del bad[place:]
        elif how == "add":
            bad[place:place] = draw(st.binary(min_size=1, max_size=12))
        else:
            bad = bytearray(draw(st.binary(max_size=30)))
    return bytes(bad)
