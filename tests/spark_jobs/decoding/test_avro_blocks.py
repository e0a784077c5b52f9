"""Avro a block at a time is what it is payload by payload; what it does not take is left to that."""

import json
import struct
import time
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding.avro import Avro, avro_decoding, block_reader, is_common
from spark_jobs.decoding.avro_resolution import AvroReader, resolution
from spark_jobs.decoding.avro_schema import columns_ddl, parse_avro
from spark_jobs.decoding.decoders import decode_rows
from spark_jobs.decoding.schema_limits import MAX_WEIGHT
from spark_jobs.decoding.schema_registry import StoredSchema
from stream_consumers.errors import SchemaMismatchError
from tests.support.arrow_columns import arrow_columns
from tests.support.avro_schemas import common_schemas, damaged, encoded, evolved, schemas, values
from tests.support.profiles import examples


def tree(schema):
    return parse_avro(StoredSchema("AVRO", json.dumps(schema)))


def field(kind, **more):
    return {"type": "record", "name": "Order", "fields": [{"name": "f", "type": kind, **more}]}


class Both:
    """The two ways from one schema to another; blocks only of what is common."""

    def __init__(self, writer, reader):
        own, read = tree(writer), tree(reader)
        self.schema = arrow_columns(columns_ddl(read, None))
        self.careful = AvroReader(own, read, self.schema, is_one=False)
        self.block = block_reader(own, read, pa.struct(list(self.schema))) if is_common(own, read) else None

    def is_taken(self, payloads):
        """Whether a block takes these payloads; it takes none that is refused, and those as the careful way does."""
        payloads = pa.array(payloads, pa.binary())
        columns, errors = decode_rows(self.careful, payloads)
        try:
            found = self.block(payloads) if self.block else None
        except ValueError:
            found = None
        if found is None:
            return False
        found.validate(full=True)
        assert errors.null_count == len(payloads)
        assert [column.to_pylist() for column in found.flatten()] == [column.to_pylist() for column in columns]
        return True


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_what_a_block_takes_is_what_its_payloads_are(data):
    writer = data.draw(common_schemas(), label="writer")
    reader = data.draw(evolved(writer) | schemas() | common_schemas(), label="reader")
    rows = data.draw(st.lists(values(writer), min_size=1, max_size=5), label="values")
    good = [encoded(writer, row) for row in rows]
    try:
        both = Both(writer, reader)
    except SchemaMismatchError:
        return
    _, errors = decode_rows(both.careful, pa.array(good, pa.binary()))
    assert both.is_taken(good) == (both.block is not None and errors.null_count == len(good))
    both.is_taken([*good, data.draw(damaged(good[0])), *good])
    both.is_taken(data.draw(st.lists(st.binary(max_size=30), max_size=4)))


LONG = {"type": "array", "items": "string"}


@pytest.mark.parametrize(
    ("writer", "reader", "payload"),
    [
        (field("string"), field("string"), b"\x02\xff"),
        (field("string"), field("string"), b"\x01"),
        (field("string"), field("string"), b"\x04a"),
        (field("bytes"), field("string"), b"\x02\xff"),
        (field("boolean"), field("boolean"), b"\x02"),
        (field("int"), field("int"), b"\x80\x80\x80\x80\x10"),
        (field("long"), field("long"), b"\x80"),
        (field("long"), field("long"), b"\xff" * 10),
        (field("long"), field("long"), b"\xff" * 9 + b"\x02"),
        (field("double"), field("double"), b"\0" * 7),
        (field(["null", "long"]), field(["null", "long"]), b"\x01\x02"),
        (field(["null", "long"]), field(["null", "long"]), b"\x04\x02"),
        (field(["null", "long"]), field("long"), b"\x00"),
        (field(["string", "long"]), field("long"), b"\x00\x02a"),
        (field({"type": "array", "items": ["null", "int"]}), field({"type": "array", "items": "int"}), b"\x02\x00\x00"),
        (field(LONG), field(LONG), b"\xfe\xff\xff\xff\x0f\x02a"),
        (field({"type": "bytes", "logicalType": "decimal", "precision": 2}),) * 2 + (b"\x02\x64",),
        (field({"type": "int", "logicalType": "date"}),) * 2 + (b"\xff\xff\xff\xff\x0f",),
        (field({"type": "long", "logicalType": "timestamp-millis"}),) * 2 + (b"\xff" * 9 + b"\x01",),
        (field({"type": "enum", "name": "E", "symbols": ["A"]}),) * 2 + (b"\x02",),
        (field({"type": "enum", "name": "E", "symbols": ["A"]}),) * 2 + (b"\x01",),
        (field("long"), field("long"), b"\x02\x02"),
        (field("long"), field("long"), b""),
    ],
)
def test_what_is_left_to_the_careful_way(writer, reader, payload):
    assert not Both(writer, reader).is_taken([payload])


@pytest.mark.parametrize(
    ("kind", "payload", "expected"),
    [
        ("long", b"\x82\x00", 1),
        ("string", b"\x82\x80\x00a", "a"),
        ({"type": "fixed", "name": "F", "size": 40}, b"x" * 40, b"x" * 40),
        ("double", struct.pack("<d", float("-inf")), float("-inf")),
    ],
)
def test_what_is_taken(kind, payload, expected):
    both = Both(field(kind), field(kind))
    assert both.is_taken([payload])
    assert both.block(pa.array([payload], pa.binary())).to_pylist() == [{"f": expected}]


def test_a_payload_that_ends_too_early_does_not_go_on_in_its_neighbour():
    schema = field(["null", "string"])
    whole = encoded(schema, {"f": ("string", "abcdef")})
    both = Both(schema, schema)
    assert not any(both.is_taken([whole[:cut], whole]) for cut in range(len(whole)))
    assert both.is_taken([whole, whole])


KINDS = {
    "boolean": [True, False],
    "int": [-1, 2**31 - 1],
    "long": [0, -(2**63)],
    "float": [0.5],
    "double": [0.5],
    "bytes": [b"", b"xyz"],
    "string": ["", "xyz"],
}
KINDS_OF_MORE = [
    ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, ["A", "B"]),
    ({"type": "fixed", "name": "F", "size": 3}, [b"abc"]),
    ({"type": "record", "name": "R", "fields": [{"name": "x", "type": "string"}]}, [{"x": "abc"}]),
]


@pytest.mark.parametrize("nested", ["plain", "array", "map", "union", "deep"])
@pytest.mark.parametrize(("kind", "own"), [*KINDS.items(), *KINDS_OF_MORE], ids=str)
def test_values_of_every_type_are_passed_over(kind, own, nested):
    made = {
        "plain": (kind, own),
        "array": ({"type": "array", "items": kind}, [own, [], own * 3]),
        "map": ({"type": "map", "values": kind}, [{"a": own[0]}, {}, {"b": own[0], "c": own[-1]}]),
        "union": (["null", kind], [*own, None]),
        "deep": (
            {"type": "array", "items": {"type": "map", "values": {"type": "array", "items": kind}}},
            [[{"a": own}, {}]],
        ),
    }
    skipped, rows = made[nested]
    reader = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
    writer = {**reader, "fields": [{"name": "f", "type": skipped}, *reader["fields"]]}
    payloads = [encoded(writer, {"f": row, "id": number}) for number, row in enumerate(rows)]
    both = Both(writer, reader)
    assert both.is_taken(payloads) == (nested in ("plain", "union"))
    # What is cut off is left, wherever that is.
    assert not any(both.is_taken([payload[:cut]]) for payload in payloads for cut in range(len(payload)))


def test_one_field_of_the_writer_may_be_two_of_the_reader():
    writer = field("int")
    reader = field("long")
    reader["fields"].append({"name": "again", "type": "double", "aliases": ["f"]})
    assert Both(writer, reader).is_taken([encoded(writer, {"f": n}) for n in range(3)])


@pytest.mark.parametrize("union", [["string", "Inner"], ["Inner", "string"]])
@pytest.mark.parametrize("is_last", [True, False])
def test_each_field_that_reads_a_field_of_the_writer_must_be_common(union, is_last):
    inner = {"type": "record", "name": "Inner", "fields": [{"name": "id", "type": "long"}]}
    kinds = [inner, union] if is_last else [inner, union, "Inner"]
    fields = [{"name": f"f{place}", "aliases": ["f"], "type": kind} for place, kind in enumerate(kinds)]
    assert not Both(field(inner), {**field("long"), "fields": fields}).is_taken([b"\x08"])


def test_a_block_of_many_is_taken_at_once(monkeypatch):
    price = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    fields = [{"name": "n", "type": ["null", "long"]}, {"name": "price", "type": price}]
    schema = field(["null", {"type": "record", "name": "Inner", "fields": fields}])
    rows = [{"n": n if n % 3 else None, "price": Decimal(n)} if n % 2 else None for n in range(500)]
    payloads = [encoded(schema, {"f": row}) for row in rows]
    payloads[7] = None
    decoder = Avro(schema)
    columns = arrow_columns(decoder.ddl())
    expected = decode_rows(Both(schema, schema).careful, pa.array(payloads, pa.binary()))[0][0].to_pylist()
    damaged_one = decoder.decode(pa.array([*payloads, b"\xff"], pa.binary()), columns)
    assert damaged_one.errors.null_count == 500
    assert damaged_one.columns[0].to_pylist() == [*expected, None]
    monkeypatch.setattr(AvroReader, "read", lambda self, payload: pytest.fail("one by one"))
    # It may be a slice of a larger array.
    decoded = decoder.decode(pa.array([b"before", *payloads], pa.binary()).slice(1), columns)
    assert decoded.errors.null_count == 500
    assert decoded.columns[0].to_pylist() == expected
    assert [row for row, value in enumerate(expected) if value is not None] == [n for n in range(1, 500, 2) if n != 7]


def nested(depth, wrap):
    kind = "long"
    for level in range(depth):
        kind = wrap(level, kind)
    return kind


def record(level, *kinds):
    fields = [{"name": f"f{place}", "type": kind} for place, kind in enumerate(kinds)]
    return {"type": "record", "name": f"R{level}", "fields": fields}


@pytest.mark.parametrize(
    "kind",
    [
        nested(80, record),
        nested(80, lambda level, kind: record(level, kind, *["long"] * 80)),
        nested(45, lambda level, kind: ["null", record(level, kind)]),
        nested(45, lambda level, kind: ["null", "string", record(level, kind)]),
        nested(80, lambda level, kind: {"type": "array", "items": kind}),
        nested(80, lambda level, kind: {"type": "map", "values": kind}),
        # Each record is in the next one twice, the second time by its name.
        nested(11, lambda level, kind: record(level, kind, f"R{level - 1}" if level else kind)),
        nested(10, lambda level, kind: record(level, ["null", kind], ["null", f"R{level - 1}" if level else kind])),
        record(0, *["long"] * 9000),
        record(0, *(record(number + 1, "long") for number in range(4500))),
        ["null", *(record(number, "long") for number in range(4500))],
    ],
    ids=["records", "wide", "nullable", "unions", "arrays", "maps", "twice", "or null", "fields", "small", "branches"],
)
def test_the_deepest_and_the_widest_schemas_are_prepared_at_once(kind):
    """A message chooses the schema that has written it, which may be as large as ``check_weight`` admits."""
    fields = [{"name": "id", "type": "long"}, {"name": "more", "type": kind}]
    writer, reader = (
        StoredSchema("AVRO", json.dumps({"type": "record", "name": "Order", "fields": own}))
        for own in (fields, fields[:1])
    )
    began = time.process_time()
    avro_decoding(writer, reader, pa.schema([("id", pa.int64())]), False)
    tree = parse_avro(writer)
    assert tree.weight <= MAX_WEIGHT
    # Each branch of a writer is compared with each branch of its reader, which the user chooses.
    if not isinstance(kind, list) or len(kind) < 9:
        resolution(tree, tree, "")
        is_common(tree, tree)
    assert time.process_time() - began < 5
