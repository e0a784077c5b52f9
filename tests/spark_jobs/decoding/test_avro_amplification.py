"""The memory that small Avro payloads may need, whichever schema their writer has registered."""

import json
import tracemalloc

import pyarrow as pa
import pytest

from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.avro_resolution import MAX_MEMORY_PER_BYTE, AvroReader
from spark_jobs.decoding.avro_schema import columns_ddl, parse_avro
from spark_jobs.decoding.decoders import decode_rows
from spark_jobs.decoding.schema_registry import SchemaRegistry, StoredSchema
from stream_consumers.errors import SchemaMismatchError
from tests.support.arrow_columns import arrow_columns, decode
from tests.support.avro_schemas import encoded

NOTHING = {"type": "fixed", "name": "Nothing", "size": 0}
EMPTY = {"type": "record", "name": "Empty", "fields": [{"name": "n", "type": "null"}]}


def item(*kinds, name="Item", **more):
    fields = [{"name": f"f{place}", "type": kind, **more} for place, kind in enumerate(kinds)]
    return {"type": "record", "name": name, "fields": fields}


def named_once(kind, count):
    """A type in many fields, which has its name in the first of them only."""
    return [kind, *[kind["name"]] * (count - 1)]


def nested(depth, kind="boolean"):
    for level in range(depth):
        kind = item(kind, name=f"Level{level}")
    return kind


def items(kind):
    return {"type": "array", "items": kind}


def values(kind):
    return {"type": "map", "values": kind}


def order(*kinds):
    fields = [{"name": f"more{place}", "type": kind} for place, kind in enumerate(kinds)]
    return {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}, *fields]}


def with_defaults(count, kind, default):
    more = [{"name": f"d{place}", "type": kind, "default": default} for place in range(count)]
    return {**item("boolean"), "fields": [{"name": "f0", "type": "boolean"}, *more]}


def reader_of(writer, reader):
    tree = parse_avro(StoredSchema("AVRO", json.dumps(reader)))
    schema = arrow_columns(columns_ddl(tree, None))
    return AvroReader(parse_avro(StoredSchema("AVRO", json.dumps(writer))), tree, schema, is_one=False)


OWN = order()
NULLS = ["null"] * 2500
WIDE = ["null", item(*["long"] * 500, name="Wide")]
HOSTILE = {
    "nulls": (order(items(item("boolean", *NULLS))), OWN),
    "nulls that a column skips": (order(items(item("boolean", *NULLS))), order(items(item("boolean")))),
    "empty records": (order(items(item("boolean", *named_once(EMPTY, 2500)))), OWN),
    "fixed without bytes": (order(items(item("boolean", *named_once(NOTHING, 2500)))), OWN),
    "a map": (order(values(item(*NULLS))), OWN),
    "items of items": (order(items(items(item("boolean", *NULLS)))), OWN),
    "values of items": (order(items(values(item("boolean", *NULLS)))), OWN),
    "a branch": (order(items(["null", "string", item(*NULLS)])), OWN),
    "an array in a branch": (order(["null", "string", items(item("boolean", *NULLS))]), OWN),
    "nested records": (order(items(nested(60))), OWN),
    "nested records with columns": (order(items(nested(60))),) * 2,
    "an enum": (order(items(item({"type": "enum", "name": "E", "symbols": ["A"]}, *NULLS))), OWN),
    "defaults": (order(items(item("boolean"))), order(items(with_defaults(500, "long", 0)))),
    "defaults of null": (order(items(item("boolean"))), order(items(with_defaults(500, ["null", "long"], None)))),
    "a long default": (order(items(item("boolean"))), order(items(with_defaults(1, "string", "x" * 9000)))),
    "one field as many columns": (order(items(item("boolean"))), order(items(item(*["boolean"] * 40, aliases=["f0"])))),
    "null as many columns": (order(items(item("boolean", "null"))), order(items(item("boolean", WIDE)))),
    "items without bytes": (order(items(item())), OWN),
}


@pytest.mark.parametrize(("writer", "reader"), HOSTILE.values(), ids=HOSTILE)
def test_items_that_need_much_memory_for_each_byte_are_refused(writer, reader):
    with pytest.raises(SchemaMismatchError):
        reader_of(writer, reader)


def test_a_message_of_such_items_is_a_dead_letter_that_needs_no_memory(registry):
    registry.serializes = False
    numbers = [
        registry.register(subject, json.dumps(schema), "AVRO")
        for subject, schema in {"good-value": OWN, "bad-value": HOSTILE["empty records"][0]}.items()
    ]
    good, bad = (b"\0" + number.to_bytes(4, "big") for number in numbers)
    decoder = Avro(registry=SchemaRegistry(registry.url), subject="good-value").resolved()
    # The items have one byte each, and their number has two.
    hostile = bad + b"\x0e\xd0\x0f" + bytes(1000) + b"\0"
    # The schema is parsed only once.
    decode(decoder, [hostile])
    tracemalloc.start()
    try:
        rows, errors = decode(decoder, [good + b"\x0e", hostile, good + b"\x10"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [row["id"] for row in rows] == [7, None, 8]
    assert [error is None for error in errors] == [True, False, True]
    assert peak < 1 << 20


ADMITTED = {
    "nulls": (order(items(item("boolean", *["null"] * 70))), OWN, b"\0"),
    "empty records": (order(items(item("boolean", *named_once(EMPTY, 7)))), OWN, b"\0"),
    "a map": (order(values(item("boolean", *["null"] * 100))), OWN, b"\0\0"),
    "a branch": (order(items(["null", "string", item(*["null"] * 60)])), OWN, b"\4"),
    "nested records": (order(items(nested(9))), OWN, b"\0"),
    "nested records with columns": (order(items(nested(4))),) * 2 + (b"\0",),
    "many booleans": (order(items(item(*["boolean"] * 500))),) * 2 + (bytes(500),),
    "defaults": (order(items(item("boolean"))), order(items(with_defaults(20, "long", 0))), b"\0"),
    "defaults of null": (
        order(items(item("boolean"))),
        order(items(with_defaults(150, ["null", "long"], None))),
        b"\0",
    ),
    "a default": (order(items(item("boolean"))), order(items(with_defaults(1, "string", "x" * 1000))), b"\0"),
    "null as columns": (
        order(items(item("boolean", "null"))),
        order(items(item("boolean", ["null", item(*["long"] * 100, name="Wide")]))),
        b"\0",
    ),
}


@pytest.mark.parametrize(("writer", "reader", "payload"), ADMITTED.values(), ids=ADMITTED)
def test_the_items_of_other_schemas_need_no_more_memory(writer, reader, payload):
    made = reader_of(writer, reader)
    count = 4000
    # The number of items has two bytes.
    message = b"\2" + bytes([(2 * count) & 0x7F | 0x80, 2 * count >> 7]) + payload * count + b"\0"
    tracemalloc.start()
    try:
        columns, errors = decode_rows(made, pa.array([message], pa.binary()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert errors.null_count == 1
    assert peak + sum(column.nbytes for column in columns) < MAX_MEMORY_PER_BYTE * len(message)


def test_fields_without_bytes_change_no_rows():
    note = {"name": "note", "type": ["null", "string"], "default": None}
    fields = [{"name": "sku", "type": "string"}, {"name": "count", "type": ["null", "int"]}]
    silent = [
        {"name": f"n{place}", "type": kind} for place, kind in enumerate([*["null"] * 20, EMPTY, "Empty", NOTHING])
    ]
    line = {"type": "record", "name": "Line", "fields": [*fields, *silent]}
    read = {"type": "record", "name": "Line", "fields": [*fields, note, {**note, "name": "n3"}]}
    writer, reader = (order(items(own), values(other)) for own, other in ((line, "Line"), (read, "Line")))
    nothing = {field["name"]: None for field in silent[:20]} | {"n20": {"n": None}, "n21": {"n": None}, "n22": b""}
    lines = [{"sku": "a", "count": 7}, {"sku": "", "count": None}]
    payload = encoded(
        writer, {"id": 1, "more0": [{**one, **nothing} for one in lines], "more1": {"k": lines[0] | nothing}}
    )
    columns, errors = decode_rows(reader_of(writer, reader), pa.array([payload], pa.binary()))
    expected = [{**one, "note": None, "n3": None} for one in lines]
    assert errors.to_pylist() == [None]
    assert [column.to_pylist()[0] for column in columns] == [1, expected, [("k", expected[0])]]
