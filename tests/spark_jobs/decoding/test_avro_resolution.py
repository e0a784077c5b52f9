"""Avro's schema resolution: what one schema wrote, read with another; fastavro's own resolution is the measure."""

import io
import json
from decimal import Decimal

import fastavro
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spark_jobs.decoding.avro_resolution import AvroReader
from spark_jobs.decoding.avro_schema import columns_ddl, is_record, parse_avro
from spark_jobs.decoding.decoders import decode_rows
from spark_jobs.decoding.schema_registry import StoredSchema
from stream_consumers.errors import SchemaMismatchError
from tests.support.arrow_columns import arrow_columns
from tests.support.avro_schemas import encoded, evolved, kind_of, schemas, values
from tests.support.profiles import examples


def read(writer, reader, *payloads):
    """The rows that the reader's schema makes of them, and what is wrong with the others."""
    written, own = (StoredSchema("AVRO", json.dumps(schema)) for schema in (writer, reader))
    tree = parse_avro(own)
    schema = arrow_columns(columns_ddl(tree, None))
    reader_of = AvroReader(parse_avro(written), tree, schema, is_one=not is_record(tree))
    columns, errors = decode_rows(reader_of, pa.array(payloads, pa.binary()))
    rows = pa.RecordBatch.from_arrays(columns, schema=schema)
    rows.validate(full=True)
    return rows.to_pylist(), errors.to_pylist()


def field(kind, name="f", **more):
    return {"type": "record", "name": "Order", "fields": [{"name": name, "type": kind, **more}]}


def one(writer, reader, value, **more):
    """A value that was written as one type and is read as another."""
    rows, errors = read(field(writer), field(reader, **more), encoded(field(writer), {"f": value}))
    return errors[0] or rows[0]["f"]


def fixed(size, name="F"):
    return {"type": "fixed", "name": name, "size": size}


def enum(*symbols, **more):
    return {"type": "enum", "name": "E", "symbols": symbols, **more}


def logical(kind, name, **more):
    return {**(kind if isinstance(kind, dict) else {"type": kind}), "logicalType": name, **more}


def decimal(precision, scale, kind="bytes"):
    return logical(kind, "decimal", precision=precision, scale=scale)


NARROWER = {
    "bytes": {"string"},
    "string": {"bytes"},
    "long": {"int"},
    "float": {"int", "long"},
    "double": {"int", "long", "float"},
}


def is_promoted_in_a_union(kind):
    """Whether fastavro takes another branch than that of a value's own type, since it comes first."""
    if isinstance(kind, list):
        kinds = [kind_of(part) for part in kind]
        behind = [NARROWER.get(one, set()) & set(kinds[place:]) for place, one in enumerate(kinds)]
        return any(behind) or any(map(is_promoted_in_a_union, kind))
    if kind_of(kind) == "record":
        return any(is_promoted_in_a_union(own["type"]) for own in kind["fields"])
    inner = {"array": "items", "map": "values"}.get(kind_of(kind))
    return is_promoted_in_a_union(kind[inner]) if inner else False


def _tag(part):
    return part["name"] if kind_of(part) in ("record", "enum", "fixed") else kind_of(part)


def flattened(kind, value):
    """A row of ours, with the branch of a union in the place of the STRUCT, and maps as dicts."""
    if value is None:
        return None
    if isinstance(kind, list):
        branches = [part for part in kind if part != "null"]
        if len(branches) == 1:
            return flattened(branches[0], value)
        found = [(part, value[_tag(part).rpartition(".")[2]]) for part in branches]
        taken = [(part, own) for part, own in found if own is not None]
        return flattened(*taken[0]) if taken else None
    if kind_of(kind) == "record":
        return {own["name"]: flattened(own["type"], value[own["name"]]) for own in kind["fields"]}
    if kind_of(kind) == "array":
        return [flattened(kind["items"], item) for item in value]
    return {k: flattened(kind["values"], v) for k, v in value} if kind_of(kind) == "map" else value


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_a_later_schema_reads_what_fastavro_reads_with_it(data):
    writer = data.draw(schemas(logical=False), label="writer")
    reader = data.draw(evolved(writer), label="reader")
    assume(not is_promoted_in_a_union(reader))
    rows = data.draw(st.lists(values(writer), min_size=1, max_size=3), label="values")
    payloads = [encoded(writer, row) for row in rows]
    found, errors = read(writer, reader, *payloads)
    parsed = fastavro.parse_schema(writer), fastavro.parse_schema(reader)
    for payload, row, error in zip(payloads, found, errors):
        # fastavro rounds whole numbers that a floating point number cannot hold.
        assert error is None or "can hold exactly" in error
        assert error or flattened(reader, row) == fastavro.schemaless_reader(io.BytesIO(payload), *parsed)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_any_two_schemas_give_rows_or_reasons(data):
    """Nothing raises, and what both can read is the same."""
    writer, reader = (data.draw(schemas(), label=label) for label in ("writer", "reader"))
    payload = encoded(writer, data.draw(values(writer), label="value"))
    try:
        rows, errors = read(writer, reader, payload)
    except SchemaMismatchError:
        return
    assert len(rows) == len(errors) == 1


@pytest.mark.parametrize(
    ("writer", "reader", "value", "expected"),
    [
        ("int", "long", 7, 7),
        ("int", "float", 7, 7.0),
        ("long", "double", -(2**63), -(2.0**63)),
        ("long", "double", 2**53 + 1, "f is not a whole number that a double can hold exactly"),
        ("long", "float", 2**24, 2.0**24),
        ("int", "float", 2**24 + 1, "f is not a whole number that a float can hold exactly"),
        ("float", "double", 0.5, 0.5),
        ("string", "bytes", "ü", "ü".encode()),
        ("bytes", "string", "ü".encode(), "ü"),
        ("int", ["null", "string", "double"], 7, {"string": None, "double": 7.0}),
        # The type itself comes before one that it could be promoted to.
        ("int", ["null", "long", "int"], 7, {"long": None, "int": 7}),
        (["null", "int", "string"], ["null", "string", "long"], ("int", 7), {"string": None, "long": 7}),
        (["null", "int", "long"], ["null", "double"], ("long", 7), 7.0),
        (["null", "int"], "long", 7, 7),
        (["int", "string"], "long", ("int", 7), 7),
        ("null", ["null", "long"], None, None),
        (enum("A", "B"), enum("B", "A"), "B", "B"),
        (enum("A", "C"), enum("A", "B", default="B"), "C", "B"),
        (decimal(5, 1), decimal(9, 3), Decimal("12.5"), "12.500"),
        (decimal(5, 1, fixed(4)), decimal(9, 3), Decimal("-12.5"), "-12.500"),
        ("bytes", decimal(5, 1), b"\x7d", "12.5"),
        (
            logical("long", "timestamp-millis"),
            logical("long", "timestamp-micros"),
            1500,
            "1970-01-01 00:00:01.500000+00:00",
        ),
        (
            logical("long", "timestamp-nanos"),
            logical("long", "timestamp-millis"),
            1500,
            "1970-01-01 00:00:00.000001+00:00",
        ),
        ("int", logical("long", "timestamp-millis"), 1500, "1970-01-01 00:00:01.500000+00:00"),
        ("int", logical("int", "date"), 1, "1970-01-02"),
        (logical("int", "date"), "int", 1, 1),
    ],
)
def test_what_is_promoted(writer, reader, value, expected):
    found = one(writer, reader, value)
    assert (str(found) if isinstance(expected, str) and not isinstance(found, (str, bytes)) else found) == expected


@pytest.mark.parametrize(
    ("writer", "reader", "value", "why"),
    [
        ("long", "int", 7, "f: long was written, and cannot be read as int"),
        ("string", "long", "7", "f: string was written, and cannot be read as long"),
        ("null", "long", None, "f: null was written, and cannot be read as long"),
        (["null", "long"], ["null", "int"], 7, "f: long was written, and cannot be read as int"),
        ("string", ["null", "long", "int"], "x", "f: string was written, and cannot be read as long or int"),
        (fixed(2), fixed(3), b"ab", "f: fixed F was written, and cannot be read as fixed F"),
        (fixed(2), fixed(2, "G"), b"ab", "f: fixed F was written, and cannot be read as fixed G"),
        (decimal(5, 3), decimal(9, 1), 1, r"decimal\(5, 3\) was written, and cannot be read as decimal\(9, 1\)"),
        ("string", decimal(9, 1), "1", r"string was written, and cannot be read as decimal\(9, 1\)"),
        (logical("int", "time-millis"), logical("long", "time-micros"), 1, "time-millis was written"),
        (
            logical("long", "local-timestamp-micros"),
            logical("long", "timestamp-micros"),
            1,
            "local-timestamp-micros was",
        ),
        (logical("int", "date"), logical("long", "timestamp-micros"), 1, "date was written"),
        ({"type": "array", "items": "string"}, {"type": "array", "items": "int"}, ["x"], r"f\[\]: string was written"),
        ({"type": "map", "values": "string"}, {"type": "map", "values": "int"}, {}, r"f{}: string was written"),
        ({"type": "array", "items": "int"}, {"type": "map", "values": "int"}, [], "array was written"),
        ({"type": "array", "items": "null"}, "int", [], "each null within the array"),
    ],
)
def test_what_cannot_be_read_is_said(writer, reader, value, why):
    with pytest.raises(SchemaMismatchError, match=why):
        read(field(writer), field(reader), b"")


@pytest.mark.parametrize(
    ("writer", "reader", "value", "why"),
    [
        (["null", "int"], "long", None, "f is null, and its type has no null"),
        (["int", "string"], "long", ("string", "x"), "f: string was written, and cannot be read as long"),
        ({"type": "array", "items": ["null", "int"]}, {"type": "array", "items": "int"}, [None], r"f[] is null"),
        (enum("A", "C"), enum("A", "B"), "C", "the reader's enum E has no 'C', and no default"),
        (decimal(5, 1), decimal(5, 3), Decimal("999.9"), "f is not a number of at most 5 digits"),
        ("bytes", "string", b"\xff", "can't decode byte"),
    ],
)
def test_a_value_that_cannot_be_read_is_a_reason(writer, reader, value, why):
    good = encoded(field("int"), {"f": 1})
    assert why in one(writer, reader, value)
    assert read(field("int"), field("int"), good, b"", good)[1][::2] == [None, None]


@pytest.mark.parametrize(
    ("kind", "default", "expected"),
    [
        ("long", 7, 7),
        ("double", 7, 7.0),
        ("boolean", True, True),
        ("string", "x", "x"),
        ("bytes", "\u00ff", b"\xff"),
        (fixed(1), "\u00ff", b"\xff"),
        (enum("A", "B"), "B", "B"),
        (["null", "long"], None, None),
        (["long", "null"], 7, 7),
        (["string", "long"], "x", {"string": "x", "long": None}),
        ({"type": "array", "items": "int"}, [1], [1]),
        ({"type": "map", "values": "int"}, {"a": 1}, [("a", 1)]),
        (field("long", default=3), {}, {"f": 3}),
        (field("long"), {"f": 4}, {"f": 4}),
        (logical("int", "date"), 1, "1970-01-02"),
        (decimal(4, 2), "\u0064", "1.00"),
    ],
)
def test_fields_that_were_not_written_get_their_default(kind, default, expected):
    if isinstance(kind, dict) and kind["type"] == "record":
        kind = {**kind, "name": "Inner"}
    rows, errors = read(field("int", "id"), field(kind, default=default), encoded(field("int", "id"), {"id": 1}), None)
    found = rows[0]["f"]
    assert (str(found) if isinstance(expected, str) and not isinstance(found, str) else found) == expected
    assert (rows[1], errors) == ({"f": None}, [None, None])


def test_a_field_without_a_default_must_be_written():
    with pytest.raises(SchemaMismatchError):
        read(field("int", "id"), field("int"), b"")


def test_fields_and_records_are_found_by_their_aliases():
    old = {**field("int", "number"), "name": "n.Old"}
    new = {**field("int", "id", aliases=["number"]), "name": "n.New", "aliases": ["Old"]}
    assert read(old, new, encoded(old, {"number": 7})) == ([{"id": 7}], [None])
    with pytest.raises(SchemaMismatchError, match=r"n\.New.*n\.Old"):
        read(new, old, b"")


def test_what_the_reader_leaves_out_is_still_read_to_its_end():
    writer = {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "f", "type": "int"}, {"name": "g", "type": {"type": "map", "values": ["null", "string"]}}],
    }
    payload = encoded(writer, {"f": 7, "g": {"a": None, "b": "x"}})
    assert read(writer, field("int"), payload, payload + b"\0", payload[:-1]) == (
        [{"f": 7}, {"f": None}, {"f": None}],
        [None, "the payload has 1 bytes after the end of the value", "the payload ends too early"],
    )


def test_a_value_of_every_branch_keeps_its_row():
    writer, reader = field(["null", "int", "string", fixed(1)]), field(["null", "string", fixed(1), "double"])
    rows = [None, ("string", "a"), ("int", 1), ("F", b"x"), ("int", 2), None, ("string", "b")]
    found, errors = read(writer, reader, *(encoded(writer, {"f": row}) for row in rows))
    assert errors == [None] * len(rows)
    assert [row["f"] and {k: v for k, v in row["f"].items() if v is not None} for row in found] == [
        None,
        {"string": "a"},
        {"double": 1.0},
        {"F": b"x"},
        {"double": 2.0},
        None,
        {"string": "b"},
    ]
