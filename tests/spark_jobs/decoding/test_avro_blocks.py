"""Avro a block at a time is what it is payload by payload; what it does not take is left to that."""

import json
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding import avro_blocks
from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.avro_blocks import MOST_ITEMS, AvroDecoding, BlockReader
from spark_jobs.decoding.avro_resolution import AvroReader
from spark_jobs.decoding.avro_types import columns_ddl, is_record, parse_avro
from spark_jobs.decoding.rows import decode_rows
from spark_jobs.decoding.schema_registry import StoredSchema
from stream_consumers.errors import SchemaMismatchError
from tests.support.arrow_columns import arrow_columns
from tests.support.avro_schemas import damaged, encoded, evolved, schemas, values
from tests.support.profiles import examples


def tree(schema):
    return parse_avro(StoredSchema("AVRO", json.dumps(schema)))


def field(kind, **more):
    return {"type": "record", "name": "Order", "fields": [{"name": "f", "type": kind, **more}]}


class Both:
    """The two ways from one schema to another."""

    def __init__(self, writer, reader):
        own, read = tree(writer), tree(reader)
        self.schema = arrow_columns(columns_ddl(read, None))
        self.is_one = not is_record(read)
        self.careful = AvroReader(own, read, self.schema, is_one=self.is_one)
        kind = self.schema.field(0).type if self.is_one else pa.struct(list(self.schema))
        self.block = BlockReader(own, read, kind)
        self.whole = AvroDecoding(own, read, self.schema, is_one=self.is_one)

    def compared(self, payloads):
        """Which payloads the block was left with; those that it took are as the careful way has them."""
        columns, errors = decode_rows(self.careful, payloads)
        expected = pa.RecordBatch.from_arrays(columns, schema=self.schema).to_pylist()
        column, left = self.block.read(pa.array(payloads, pa.binary()))
        column.validate(full=True)
        found = column.to_pylist()
        if self.is_one:
            found = [{self.schema.names[0]: value} for value in found]
        for row, is_left in enumerate(left):
            if not is_left:
                assert errors[row] is None
                # A top-level null is a row of nulls.
                assert (found[row] or dict.fromkeys(self.schema.names)) == expected[row]
        return left


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_what_a_block_takes_is_what_its_payloads_are(data):
    writer = data.draw(schemas(), label="writer")
    reader = data.draw(evolved(writer), label="reader")
    rows = data.draw(st.lists(values(writer), min_size=1, max_size=5), label="values")
    good = [encoded(writer, row) for row in rows]
    both = Both(writer, reader)
    left = both.compared(good)
    _, errors = decode_rows(both.careful, good)
    assert [error is not None for error in errors] == list(left)
    bad = [data.draw(damaged(payload)) for payload in good]
    mixed = data.draw(st.permutations([*good, *bad]))
    both.compared(mixed)
    both.compared(data.draw(st.lists(st.binary(max_size=30), max_size=4)))


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_any_two_schemas(data):
    writer, reader = (data.draw(schemas(), label=label) for label in ("writer", "reader"))
    payload = encoded(writer, data.draw(values(writer), label="value"))
    try:
        both = Both(writer, reader)
    except SchemaMismatchError:
        return
    both.compared([payload])


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_the_whole_decoding_puts_each_row_in_its_place(data):
    writer = data.draw(schemas(), label="schema")
    good = data.draw(st.lists(values(writer), min_size=1, max_size=4), label="values").copy()
    payloads = [encoded(writer, row) for row in good]
    payloads += [data.draw(damaged(payload)) for payload in payloads] + [None]
    payloads = data.draw(st.permutations(payloads))
    both = Both(writer, writer)
    column = pa.array([b"before", *payloads], pa.binary()).slice(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(avro_blocks, "FEWEST_ROWS", 0)
        found, errors = both.whole.decode(column)
    expected, reasons = decode_rows(both.careful, payloads)
    assert errors.to_pylist() == reasons
    assert [part.to_pylist() for part in found] == [part.to_pylist() for part in expected]


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
        (
            field({"type": "map", "values": "int"}),
            field({"type": "map", "values": "int"}),
            b"\x04\x02a\x02\x02a\x04\x00",
        ),
        (field(LONG), field(LONG), b"\xfe\xff\xff\xff\x0f\x02a"),
        (field(LONG), field(LONG), encoded(LONG, ["a"] * (MOST_ITEMS + 1))),
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
    both = Both(writer, reader)
    assert both.compared([payload]).tolist() == [True]


@pytest.mark.parametrize(
    ("kind", "payload", "expected"),
    [
        # Blocks of items, with and without their size in bytes, and one of a length that is written in more bytes.
        (LONG, b"\x02\x02a\x03\x08\x02b\x02c\x00", ["a", "b", "c"]),
        ("long", b"\x82\x00", 1),
        ("string", b"\x82\x80\x00a", "a"),
        ({"type": "fixed", "name": "F", "size": 40}, b"x" * 40, b"x" * 40),
        ("double", struct.pack("<d", float("-inf")), float("-inf")),
    ],
)
def test_what_is_taken(kind, payload, expected):
    both = Both(field(kind), field(kind))
    assert both.compared([payload]).tolist() == [False]
    assert both.block.read(pa.array([payload], pa.binary()))[0].to_pylist() == [{"f": expected}]


def test_a_block_with_an_end_in_each_of_its_payloads():
    """A payload that ends too early does not go on in its neighbour."""
    schema = field(["null", "string"])
    whole = encoded(schema, {"f": ("string", "abcdef")})
    payloads = [whole[:cut] for cut in range(len(whole))] * 3 + [whole]
    left = Both(schema, schema).compared(payloads)
    assert left.tolist() == [True] * (len(payloads) - 1) + [False]


KINDS = {
    "null": [None],
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
    if nested in ("array", "deep") and kind == "null":
        return
    made = {
        "plain": (kind, own),
        "array": ({"type": "array", "items": kind}, [own, [], own * 3]),
        "map": ({"type": "map", "values": kind}, [{"a": own[0]}, {}, {"b": own[0], "c": own[-1]}]),
        "union": (["null", kind] if kind != "null" else ["null"], [*own, None]),
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
    assert not both.compared(payloads).any()
    # What is cut off is left, wherever that is.
    both.compared([payload[:cut] for payload in payloads for cut in range(len(payload))])


def test_one_field_of_the_writer_may_be_two_of_the_reader():
    writer = field("int")
    reader = field("long")
    reader["fields"].append({"name": "again", "type": "double", "aliases": ["f"]})
    assert not Both(writer, reader).compared([encoded(writer, {"f": n}) for n in range(3)]).any()


def test_a_block_of_many_is_taken_at_once(monkeypatch):
    schema = field({"type": "map", "values": ["null", "string", "long"]})
    payloads = [encoded(schema, {"f": {str(n): ("long", n)} if n % 2 else {}}) for n in range(500)]
    payloads[7] = None
    decoder = Avro(schema)
    columns = arrow_columns(decoder.ddl())
    expected = decode_rows(Both(schema, schema).careful, payloads)[0][0].to_pylist()
    monkeypatch.setattr(AvroReader, "read", lambda self, payload: pytest.fail("one by one"))
    decoded = decoder.decode(pa.array(payloads, pa.binary()), columns)
    assert decoded.errors.null_count == 500
    assert decoded.columns[0].to_pylist() == expected
    assert np.flatnonzero(np.asarray(decoded.columns[0].is_null())).tolist() == [7]
