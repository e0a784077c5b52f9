"""Json, strict: what a payload becomes never depends on its neighbours."""

from datetime import date, datetime, timezone
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding import json_documents
from spark_jobs.decoding.json_decoder import FieldFinder, Json
from spark_jobs.decoding.json_documents import read_object
from spark_jobs.decoding.json_inference import MAX_COUNTED_LEVELS, FieldStats, merge
from stream_consumers.errors import SchemaMismatchError
from tests.support.profiles import examples

MONEY = pa.decimal128(10, 2)
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("text", pa.string()),
        pa.field("price", MONEY),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("nested", pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.list_(pa.string()))])),
        pa.field("list", pa.list_(pa.struct([pa.field("price", MONEY), pa.field("day", pa.date32())]))),
    ]
)


def decode(payloads, schema=SCHEMA):
    decoded = Json("v BIGINT", mode="strict").decode(pa.array(payloads, pa.binary()), schema)
    assert [column.type for column in decoded.columns] == [field.type for field in schema]
    for column in decoded.columns:
        column.validate(full=True)
    rows = [dict(zip(schema.names, values)) for values in zip(*(column.to_pylist() for column in decoded.columns))]
    return rows, decoded.errors.to_pylist()


def value(text, kind, *, nullable=True):
    """The value of field ``v`` of one payload, or its error."""
    rows, (error,) = decode([b'{"v":%s}' % text.encode()], pa.schema([pa.field("v", kind, nullable=nullable)]))
    return rows[0]["v"] if error is None else ValueError(error)


def is_refused(found):
    return isinstance(found, ValueError)


@pytest.mark.parametrize("rows", [1, 3, 5, 100_001])
def test_blocks_join_in_order(monkeypatch, rows):
    if rows < 10:
        monkeypatch.setattr(json_documents, "BLOCK_ROWS", 2)
    found, errors = decode([b'{"id":%d}' % i if i % 7 else b"x" for i in range(rows)], SCHEMA_OF_ID)
    assert [row["id"] for row in found] == [i if i % 7 else None for i in range(rows)]
    assert [error is None for error in errors] == [bool(i % 7) for i in range(rows)]


SCHEMA_OF_ID = pa.schema([pa.field("id", pa.int64())])


def test_large_payloads_are_parsed_in_parts(monkeypatch):
    sizes = []
    parse = json_documents.parse_block
    monkeypatch.setattr(json_documents, "BLOCK_BYTES", 100)
    monkeypatch.setattr(json_documents, "parse_block", lambda *block: sizes.append(len(block[0])) or parse(*block))
    rows, errors = decode([b'{"id":%d,"text":"%s"}' % (i, b"x" * 60) for i in range(5)])
    assert [row["id"] for row in rows] == list(range(5))
    assert errors == [None] * 5
    assert sizes == [1] * 5


def test_missing_and_null_fields():
    rows, errors = decode([b"{}", b'{"text":null,"nested":{},"list":[]}'])
    assert errors == [None, None]
    assert set(rows[0].values()) == {None}
    assert rows[1]["nested"] == {"a": None, "b": None}
    assert rows[1]["list"] == []


def test_not_null():
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])
    rows, errors = decode([b'{"id":1}', b'{"text":"x"}', b"x", b'{"id":null}', b'{"id":2}'], schema)
    assert [row["id"] for row in rows] == [1, None, None, None, 2]
    missing = "field 'id' is missing, but it is NOT NULL"
    assert errors == [None, missing, "not a JSON object", missing, None]


def test_not_null_inside_a_struct():
    kind = pa.struct([pa.field("a", pa.int32(), nullable=False)])
    schema = pa.schema([pa.field("s", kind), pa.field("l", pa.list_(kind))])
    rows, errors = decode(
        [b'{"s":{"a":1}}', b'{"s":{}}', b'{"s":null}', b"{}", b'{"l":[null,{"a":2}]}', b'{"l":[{}]}'], schema
    )
    assert [error is None for error in errors] == [True, False, True, True, True, False]
    assert errors[1] == "field 's.a' is missing, but it is NOT NULL"
    assert rows[4]["l"] == [None, {"a": 2}]


@settings(deadline=None, max_examples=examples(100))
@given(
    st.integers(-(10**21), 10**21).map(lambda whole: Decimal(whole).scaleb(-9))
    | st.integers(-(10**9), 10**9).map(lambda whole: Decimal(whole).scaleb(-2)),
    st.sampled_from([(10, 2), (38, 0), (38, 10), (5, 5), (18, 9)]),
    st.booleans(),
)
def test_decimals_are_exact_or_refused(number, kind, is_text):
    precision, scale = kind
    document = b'{"v":"%s"}' if is_text else b'{"v":%s}'
    schema = pa.schema([pa.field("v", pa.decimal128(precision, scale))])
    rows, errors = decode([document % f"{number:f}".encode(), b'{"v":0.000}', b"{}"], schema)
    fits = abs(number) < Decimal(10) ** (precision - scale) and number.scaleb(scale) % 1 == 0
    assert rows[0]["v"] == (number if fits else None)
    assert (errors[0] is None) == fits
    assert errors[1:] == [None, None]


WRAPPING = ("28751.175757626", "99999999.995", "1e38", "1e60", "1e76", "1e999", "9" * 39, "-1e39")


@pytest.mark.parametrize("kind", [(5, 5), (10, 2), (38, 0), (38, 37), (38, 38)])
@pytest.mark.parametrize("text", WRAPPING)
def test_decimals_never_wrap_around(text, kind):
    schema = pa.schema([pa.field("v", pa.decimal128(*kind))])
    rows, errors = decode([b'{"v":%s}' % text.encode(), b'{"v":0.0}', b'{"v":-0}'], schema)
    assert rows[0]["v"] is None
    assert [error is None for error in errors] == [False, True, True]


def test_decimals_within_arrays_and_structs():
    rows, errors = decode(
        [b'{"list":[{"price":0.12,"day":"2024-02-29"},null,{"price":2.5}]}', b'{"list":[{"price":0.125}]}']
    )
    assert [error is None for error in errors] == [True, False]
    assert rows[0]["list"] == [
        {"price": Decimal("0.12"), "day": date(2024, 2, 29)},
        None,
        {"price": Decimal("2.50"), "day": None},
    ]


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_whole_numbers_have_their_range(bits):
    kind = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[bits]
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    assert (value(str(low), kind), value(str(high), kind), value("-0", kind)) == (low, high, 0)
    assert all(is_refused(value(text, kind)) for text in (str(low - 1), str(high + 1), "1.0", "1e0", '"1"', "true"))


@pytest.mark.parametrize(
    ("kind", "largest", "beyond"),
    [
        (pa.float32(), "3.4028235677973366e38", "3.4028235677973367e38"),
        (pa.float32(), "3.4028234663852886e38", "1e39"),
        (pa.float32(), "3e38", "9" * 60),
        (pa.float64(), "1.7976931348623157e308", "1.7976931348623159e308"),
        (pa.float64(), "1.7e308", "1e400"),
        (pa.float64(), "1.7e308", "1" * 400),
    ],
)
@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize("wrap", ["{}", "[{}]", '{{"a": {}}}'])
def test_no_number_becomes_infinite(kind, largest, beyond, sign, wrap):
    wrapped = {"{}": kind, "[{}]": pa.list_(kind)}.get(wrap, pa.struct([("a", kind)]))
    payloads = [b'{"v": %s}' % wrap.format(sign + text).encode() for text in (largest, beyond, largest)]
    rows, (before, error, after) = decode(payloads, pa.schema([("v", wrapped)]))
    assert (before, after) == (None, None)
    assert error
    assert "inf" not in str(rows)
    assert rows[0] == rows[2] == {"v": value(wrap.format(sign + largest), wrapped)}


def test_the_first_and_the_last_time():
    for day in (date.min, date.max):
        assert value(f'"{day}"', pa.date32()) == day
    for moment in (datetime.min.replace(tzinfo=timezone.utc), datetime.max.replace(tzinfo=timezone.utc)):
        assert value(f'"{moment.isoformat()}"', pa.timestamp("us", "UTC")) == moment


@pytest.mark.parametrize(
    "kind",
    [pa.map_(pa.int64(), pa.int64()), pa.duration("us"), pa.uint8(), pa.time64("us"), pa.null(), pa.large_string()],
)
@pytest.mark.parametrize("wrap", [lambda k: k, pa.list_, lambda k: pa.struct([("x", k)])])
def test_other_types_are_refused_by_name(kind, wrap):
    with pytest.raises(SchemaMismatchError, match="column extra"):
        decode([b"{}"], pa.schema([pa.field("id", pa.int64()), pa.field("extra", wrap(kind))]))


def test_errors_say_what_is_wrong():
    reasons = {
        b"": "not a JSON object",
        b'{"id":7} {"id":8}': "more than one JSON object",
        b'{"id":"x"}': "field 'id' is not a whole number of 64 bits; found text",
        b'{"text":"\xff"}': "not UTF-8: invalid start byte at byte 9",
        b'{"id":NaN}': "NaN is not JSON",
        b'{"id":7,"id":8}': "field 'id' occurs twice",
        b'{"price":1234567890.1}': "field 'price' is not a number with at most 8 digits before the point and 2 after "
        "it; found a number with a point or an exponent",
    }
    assert decode(list(reasons))[1] == list(reasons.values())


@pytest.mark.parametrize("depth", range(MAX_COUNTED_LEVELS - 2, MAX_COUNTED_LEVELS + 2))
def test_a_field_that_the_decoder_finds_has_a_value_for_the_driver(depth):
    schema = pa.schema([("id", pa.int64()), ("in", pa.struct([("a", pa.int64())]))])
    finder, document = FieldFinder(Json("id BIGINT, in STRUCT<a: BIGINT>")), '{"in":{"x":%s1%s}}'
    for payload in (document, '{"x":%s1%s}'):
        decoded = finder.decode(pa.array([(payload % ("[" * depth, "]" * depth)).encode()]), schema)
        seen = FieldStats()
        for found in decoded.undeclared.to_pylist() if decoded.undeclared is not None else ():
            seen.add(read_object(found), pa.struct(list(schema)))
        assert seen.has_content() == (decoded.undeclared is not None)


def test_values_on_many_levels_do_not_exceed_the_recursion_limit():
    deep = "x"
    for _ in range(5000):
        deep = [deep]
    one, other = FieldStats(), FieldStats()
    one.add(deep)
    other.add(deep)
    assert merge([one, other]).size() == MAX_COUNTED_LEVELS + 1
