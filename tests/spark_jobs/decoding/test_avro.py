"""Avro: every type, whatever wrote it, and bytes that are damaged."""

import io
import json
import struct
from datetime import date, datetime, time, timezone
from decimal import Decimal
from uuid import UUID

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding import avro
from spark_jobs.decoding.avro import Avro
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError
from tests.support.arrow_columns import decode
from tests.support.avro_schemas import column, damaged, encoded, schemas, values
from tests.support.profiles import examples

MOMENT = datetime(2024, 2, 29, 12, 30, 15, 123456, timezone.utc)
DAY_ONE = datetime(1, 1, 1, tzinfo=timezone.utc)


def record(*types, name="Order"):
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": f"f{place}", "type": kind} for place, kind in enumerate(types)],
    }


def of_type(kind, size=0):
    return {"type": kind, "name": "Some", "size": size} if size else kind


def logical(kind, name, size=0, **more):
    schema = of_type(kind, size)
    return {**(schema if size else {"type": kind}), "logicalType": name, **more}


def only(decoder, *payloads):
    rows, errors = decode(decoder, payloads)
    assert errors == [None] * len(payloads)
    return [next(iter(row.values())) for row in rows]


@pytest.mark.parametrize(
    ("kind", "ddl", "value", "expected"),
    [
        ("boolean", "BOOLEAN", True, True),
        ("int", "INT", -(2**31), -(2**31)),
        ("long", "BIGINT", 2**63 - 1, 2**63 - 1),
        ("float", "FLOAT", 0.5, 0.5),
        ("double", "DOUBLE", float("inf"), float("inf")),
        ("bytes", "BINARY", b"\0\xff", b"\0\xff"),
        ("string", "STRING", "gruß", "gruß"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "STRING", "B", "B"),
        (of_type("fixed", 3), "BINARY", b"abc", b"abc"),
        ({"type": "fixed", "name": "F", "size": 0}, "BINARY", b"", b""),
        ({"type": "array", "items": ["null", "int"]}, "ARRAY<INT>", [1, None], [1, None]),
        ({"type": "map", "values": "long"}, "MAP<STRING, BIGINT>", {"a": 1, "b": 2}, [("a", 1), ("b", 2)]),
        (record("int", name="Inner"), "STRUCT<`f0`: INT>", {"f0": 7}, {"f0": 7}),
        (["null", "string"], "STRING", None, None),
        (["string"], "STRING", "x", "x"),
        (["null", "int", "string"], "STRUCT<`int`: INT, `string`: STRING>", "x", {"int": None, "string": "x"}),
        (["null", "int", "string"], "STRUCT<`int`: INT, `string`: STRING>", None, None),
        (["int", "long"], "STRUCT<`int`: INT, `long`: BIGINT>", ("long", 7), {"int": None, "long": 7}),
        (
            ["float", "double"],
            "STRUCT<`float`: FLOAT, `double`: DOUBLE>",
            ("float", 2.0),
            {"float": 2.0, "double": None},
        ),
        (
            ["bytes", of_type("fixed", 2)],
            "STRUCT<`bytes`: BINARY, `Some`: BINARY>",
            ("Some", b"ab"),
            {"bytes": None, "Some": b"ab"},
        ),
        (logical("int", "date"), "DATE", date(1969, 12, 31), date(1969, 12, 31)),
        (logical("int", "time-millis"), "INT", time(1, 0, 0, 5000), 3_600_005),
        (logical("long", "time-micros"), "BIGINT", time(1, 0, 0, 5), 3_600_000_005),
        (logical("long", "timestamp-millis"), "TIMESTAMP", MOMENT, MOMENT.replace(microsecond=123000)),
        (logical("long", "timestamp-micros"), "TIMESTAMP", MOMENT, MOMENT),
        (logical("long", "timestamp-micros"), "TIMESTAMP", DAY_ONE, DAY_ONE),
        (logical("long", "timestamp-nanos"), "TIMESTAMP", 1_999, datetime(1970, 1, 1, 0, 0, 0, 1, timezone.utc)),
        (logical("long", "timestamp-nanos"), "TIMESTAMP", -1, datetime(1969, 12, 31, 23, 59, 59, 999999, timezone.utc)),
        (
            logical("long", "local-timestamp-micros"),
            "TIMESTAMP_NTZ",
            MOMENT.replace(tzinfo=None),
            MOMENT.replace(tzinfo=None),
        ),
        (logical("bytes", "decimal", precision=5, scale=2), "DECIMAL(5,2)", Decimal("-999.99"), Decimal("-999.99")),
        (
            logical("fixed", "decimal", 16, precision=38, scale=0),
            "DECIMAL(38,0)",
            Decimal(10**38 - 1),
            Decimal(10**38 - 1),
        ),
        (logical("string", "uuid"), "STRING", UUID(int=7), str(UUID(int=7))),
        (logical("fixed", "uuid", 16), "STRING", UUID(int=7).bytes, str(UUID(int=7))),
        (
            logical("fixed", "duration", 12),
            "STRUCT<months: BIGINT, days: BIGINT, milliseconds: BIGINT>",
            struct.pack("<III", 1, 2, 2**32 - 1),
            {"months": 1, "days": 2, "milliseconds": 2**32 - 1},
        ),
        # What means nothing there is not looked at, as Avro has it.
        (logical("int", "timestamp-micros"), "INT", 7, 7),
        (logical("string", "decimal", precision=2, scale=1), "STRING", "x", "x"),
        (logical("string", "of-our-own"), "STRING", "x", "x"),
    ],
)
@pytest.mark.parametrize("fewest_rows", [avro.MIN_BLOCK_ROWS, 0], ids=["one by one", "as a block"])
def test_each_type(kind, ddl, value, expected, fewest_rows, monkeypatch):
    monkeypatch.setattr(avro, "MIN_BLOCK_ROWS", fewest_rows)
    decoder = Avro(record(kind))
    assert decoder.ddl() == f"`f0` {ddl}"
    assert only(decoder, encoded(record(kind), {"f0": value})) == [expected]


@pytest.mark.parametrize(
    ("kind", "value"), [("long", 7), (["null", "string"], "x"), ({"type": "array", "items": "int"}, [1])]
)
def test_a_schema_that_is_no_record_is_one_column(kind, value):
    assert only(Avro(json.dumps(kind)), encoded(kind, value), None) == [value, None]
    assert Avro(kind if isinstance(kind, list) else json.dumps(kind)).ddl().startswith("`payload` ")
    assert Avro(json.dumps(kind), column="count").ddl().startswith("`count` ")


def test_a_record_as_one_column():
    schema = record("long", "string")
    decoder = Avro(schema, column="order")
    assert decoder.ddl() == "`order` STRUCT<`f0`: BIGINT, `f1`: STRING>"
    assert only(decoder, encoded(schema, {"f0": 1, "f1": "x"}), None) == [{"f0": 1, "f1": "x"}, None]


def test_what_holds_nothing_but_null_has_no_column():
    schema = record("null", "long", record(name="Empty"), ["null", record("null", name="Nothing")])
    assert Avro(schema).ddl() == "`f1` BIGINT"
    assert decode(Avro(schema), [encoded(schema, {"f0": None, "f1": 7, "f2": {}, "f3": None})]) == ([{"f1": 7}], [None])


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_schema_and_its_values(data):
    schema = data.draw(schemas(), label="schema")
    rows = data.draw(st.lists(st.none() | values(schema), max_size=4), label="values")
    found, errors = decode(Avro(schema), [None if row is None else encoded(schema, row) for row in rows])
    assert errors == [None] * len(rows)
    names = [field["name"] for field in schema["fields"]]
    assert found == [dict.fromkeys(names) if row is None else column(schema, row) for row in rows]


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_damaged_bytes_never_hurt_their_neighbours(data):
    schema = data.draw(schemas(), label="schema")
    good = data.draw(values(schema), label="good")
    bad = data.draw(damaged(encoded(schema, data.draw(values(schema)))), label="bad")
    whole = encoded(schema, good)
    found, errors = decode(Avro(schema), [whole, bad, None, whole])
    assert errors[0] is errors[2] is errors[3] is None
    assert found[0] == found[3] == column(schema, good)
    if errors[1] is not None:
        assert not any(found[1].values()) or all(value is None for value in found[1].values())


@pytest.mark.parametrize(
    ("kind", "payload", "reason"),
    [
        ("string", b"\x08abc", "ends too early"),
        ("string", b"\x06abcd", "has 1 bytes after the end"),
        ("string", b"\x02\xff", "can't decode byte 0xff"),
        ("string", b"\x01a", "ends too early"),
        ("boolean", b"\x02", "truth value is 2"),
        ("int", b"\x80\x80\x80\x80\x10", "f0"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, b"\x01", "has no symbol -1"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, b"\x04", "has no symbol 2"),
        (["null", "string"], b"\x01\x02a", "no such branch"),
        (["null", "string"], b"\x03", "no such branch"),
        (["null", "string"], b"\x04\x02a", "no such branch"),
        (["null", "int", "string"], b"\x01\x02a", "no such branch"),
        (["null", "int", "string"], b"\xff\xff\x01", "no such branch"),
        (logical("bytes", "decimal", precision=2, scale=0), b"\x02\x64", "not a number of at most 2 digits"),
        (logical("bytes", "decimal", precision=2, scale=0), b"\x00", "not a number of at most 2 digits"),
        (logical("int", "date"), b"\xff\xff\xff\xff\x0f", "not in the years 1 to 9999"),
        (
            logical("long", "timestamp-millis"),
            b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            "not in the years 1 to 9999",
        ),
        ({"type": "array", "items": "string"}, b"\xfe\xff\xff\xff\x0f\x02a", "ends too early"),
    ],
)
def test_what_is_wrong_with_a_payload_is_said(kind, payload, reason):
    rows, errors = decode(Avro(record(kind)), [payload])
    assert rows == [{"f0": None}]
    assert reason in errors[0]


TOO_LONG = [bytes([0xFF] * 9 + [0x7F]), bytes([0xFE] * 9 + [0x02]), bytes([0x80] * 9 + [0x02]), b"\x80" * 10 + b"\0"]


@pytest.mark.parametrize("number", TOO_LONG, ids=bytes.hex)
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("int", b"", b""),
        ("long", b"", b""),
        ("string", b"", b""),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, b"", b""),
        (logical("long", "timestamp-millis"), b"", b""),
        (["null", "double", "long"], b"\x04", b""),
        ({"type": "array", "items": "long"}, b"\x03\x04\x02\x06\x02", b"\0"),
        ({"type": "map", "values": "boolean"}, b"\x02\x02a\x01", b""),
        (record("bytes", "float", of_type("fixed", 2), "long", name="Inner"), b"\x02b\0\0\0\0\0\0", b""),
    ],
    ids=str,
)
def test_a_number_of_more_than_64_bits_is_refused(kind, before, after, number):
    decoder = Avro(record("string", kind))
    payload = b"\x06abc" + before + number + after
    for payloads in ([payload], [payload] * 100):
        rows, errors = decode(decoder, payloads)
        assert rows == [{"f0": None, "f1": None}] * len(payloads)
        assert None not in errors


@pytest.mark.parametrize("kind", ["string", "bytes"])
def test_bytes_that_look_like_a_number_of_more_than_64_bits_are_taken(kind):
    text = "абвгде"
    value = text if kind == "string" else text.encode()
    schema = record({"type": "array", "items": kind}, {"type": "map", "values": ["null", kind, "long"]})
    row = {"f0": [value, value], "f1": {"a": value, "b": None, text: -(2**63)}}
    pairs = [("a", {kind: value, "long": None}), ("b", None), (text, {kind: None, "long": -(2**63)})]
    assert decode(Avro(schema), [encoded(schema, row)]) == ([{"f0": [value, value], "f1": pairs}], [None])


RECURSIVE = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (RECURSIVE, "Node contains itself"),
        (record({"type": "array", "items": RECURSIVE}), "Node contains itself"),
        (record(logical("bytes", "decimal", precision=39, scale=0)), "decimal of 39 digits"),
        (record({"type": "array", "items": "null"}), r"f0\[\] is always null"),
        (record({"type": "array", "items": ["null"]}), r"f0\[\] is always null"),
        (record({"type": "map", "values": []}), r"f0\{\} is always null"),
        (record({"type": "array", "items": {"type": "map", "values": ["null"]}}), "is always null"),
        (record("null"), "no columns"),
        ("null", "no columns"),
        (record(["null", ["int", "string"]]), "the Avro schema has a union in a union"),
        ("{", "cannot be used"),
        ('{"type": "record"}', "cannot be used"),
        ('{"type": "unheard"}', "cannot be used"),
        (
            {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}, {"name": "ID", "type": "int"}]},
            "field 'ID' twice",
        ),
        (
            record(["null", {"type": "fixed", "name": "a.X", "size": 1}, {"type": "fixed", "name": "a.x", "size": 1}]),
            "f0 has the field 'a_x' twice",
        ),
    ],
)
def test_schemas_without_columns_are_refused_at_once(schema, why):
    with pytest.raises(SchemaMismatchError, match=why):
        Avro(schema if isinstance(schema, str) and schema.startswith("{") else json.dumps(schema))


def test_branches_of_one_short_name_are_called_by_their_whole_names():
    kind = [{"type": "fixed", "name": "a.X", "size": 1}, {"type": "fixed", "name": "b.X", "size": 2}]
    decoder = Avro(record(kind))
    assert decoder.ddl() == "`f0` STRUCT<`a_X`: BINARY, `b_X`: BINARY>"
    assert only(decoder, encoded(record(kind), {"f0": ("b.X", b"ab")})) == [{"a_X": None, "b_X": b"ab"}]


def test_a_type_that_is_named_twice_is_defined_once():
    inner = {"type": "record", "name": "n.Money", "fields": [{"name": "cents", "type": "long"}]}
    schema = {
        "type": "record",
        "name": "n.Order",
        "fields": [{"name": "net", "type": inner}, {"name": "gross", "type": ["null", "Money"]}],
    }
    row = {"net": {"cents": 1}, "gross": {"cents": 2}}
    assert decode(Avro(schema), [encoded(schema, row)]) == ([row], [None])


def test_the_file_of_a_schema(tmp_path):
    path = tmp_path / "order.avsc"
    path.write_text(json.dumps(record("long")))
    assert Avro(schema_file=path) == Avro(record("long"))
    with pytest.raises(InvalidOptionError, match=r"gone\.avsc cannot be read: No such file"):
        Avro(schema_file=tmp_path / "gone.avsc")
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidOptionError, match="is not UTF-8"):
        Avro(schema_file=path)


def test_framed_payloads_without_a_registry():
    schema = record("long")
    plain = encoded(schema, {"f0": 7})
    decoder = Avro(schema, framed=True)
    assert decode(decoder, [b"\0\0\0\0\7" + plain, b"\0\0\0\0\x09" + plain, None, plain, b"\1\0\0\0\7" + plain]) == (
        [{"f0": 7}, {"f0": 7}, {"f0": None}, {"f0": None}, {"f0": None}],
        [
            None,
            None,
            None,
            "1 bytes are too short for a schema id",
            "the first byte is 1, not the 0 before a schema id",
        ],
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "no schema is given"),
        ({"schema": '"long"', "subject": "s"}, "schema and subject are given"),
        ({"subject": "orders-value"}, "'orders-value' needs a registry"),
        ({"schema": '"long"', "version": 3}, "version=3 needs a subject"),
        ({"schema": '"long"', "framed": "no"}, "not a Boolean"),
        ({"schema": '"long"', "column": " "}, "cannot be used"),
        ({"schema": '"long"', "registry": "http://registry:8081"}, "got a str"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, why):
    with pytest.raises(InvalidOptionError, match=why):
        Avro(**arguments)


def test_payloads_of_the_library_are_read_alike():
    schema = record("long", ["null", "int", "string"])
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(schema), {"f0": 1, "f1": "x"})
    assert decode(Avro(schema), [buffer.getvalue()])[0] == [{"f0": 1, "f1": {"int": None, "string": "x"}}]


def number(value):
    """A number as Avro writes it."""
    return encoded("long", value)


@pytest.mark.parametrize("more", [b"", b"\x80\0"], ids=["shortest", "padded"])
@pytest.mark.parametrize("branches", [2, 64, 65, 200])
def test_negative_branches_of_a_union_are_refused(branches, more):
    kinds = [{"type": "fixed", "name": f"F{place}", "size": 1} for place in range(branches - 1)]
    decoder = Avro(record(["null", *kinds]))
    negative = [number(-place) for place in range(1, 600)]
    # A padded number has the same value, and ends later.
    padded = [bytes([*one[:-1], one[-1] | 0x80, *more[:-1], 0]) if more else one for one in negative]
    errors = decode(decoder, [one + end for one in padded for end in (b"", b"x")])[1]
    assert None not in errors
    assert decode(decoder, [number(0), number(branches - 1) + b"x"])[1] == [None, None]


def test_the_length_of_a_block_that_has_no_opposite_is_refused():
    """It is the smallest number. The library takes it for the length of an empty block."""
    decoder = Avro(record({"type": "array", "items": "string"}))
    assert None not in decode(decoder, [number(-(2**63)) + number(1) + b"\0"])[1]
    assert decode(decoder, [number(-1) + number(2) + number(1) + b"x\0"])[1] == [None]
