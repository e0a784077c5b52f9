"""Json: a column has the value that a message says, or the message is a dead letter; in both modes, on each way."""

import subprocess
import sys
from datetime import date, datetime, timezone
from decimal import Decimal

import pyarrow as pa
import pytest

from spark_jobs.decoding.json_decoder import Json, JsonMode
from spark_jobs.decoding.json_documents import parse_block
from spark_jobs.decoding.json_values import VARIANT
from tests.support.settings import ROOT

MONEY = pa.decimal128(10, 2)
TIME = pa.timestamp("us", "UTC")
LOCAL = pa.timestamp("us")
MAP = pa.field("m", pa.map_(pa.string(), pa.int64()))
NEIGHBOURS = {
    "alone": (),
    # Arrow refuses these, so that the whole block is decoded in the slower way.
    "beside odd documents": (b'{"v":[[]]}', b'{"v":', b'{"v":{"v":{}}}'),
}


def decoded(document, kind, mode, others=(), *, has_map=False):
    """The value of ``v`` of a document, or ``None`` and the reason."""
    schema = pa.schema([pa.field("v", kind), *([MAP] if has_map else [])])
    payloads = pa.array([document, *others], pa.binary())
    found = Json("v BIGINT", mode=mode).decode(payloads, schema)
    return found.columns[0][0].as_py(), found.errors[0].as_py()


def on_each_way(text, kind, mode):
    """What a value becomes by Arrow and by Python, which have to agree."""
    document = b'{"v":%s}' % text.encode()
    ways = [decoded(document, kind, mode, others) for others in NEIGHBOURS.values()]
    ways.append(decoded(document, kind, mode, has_map=True))
    assert ways == [ways[0]] * len(ways)
    return ways[0]


REFUSED_DECIMALS = [
    *('"12,50"', '"1.234,50"', '"1,234.5"', '"1_000"', '" 12"', '"12 "', '"12\\n"', '"$5"', '"5 EUR"', '"0x10"'),
    *('"+5"', '"-+5"', '"1."', '"1.e1"', '".5"', '"-.5"', '"01"', '"-01"', '"1e"', '"1e+-1"', '""', '"-"', '"١٢"'),
    *('"NaN"', '"Infinity"', "NaN", "-Infinity", "true", "{}", "[1]", '"\\u002b5"', '"1\\u002e"'),
    # More digits than there is room for, before the point and after it.
    *("9.999", "9.995", '"9.999"', "0.001", "1e-3", "123456789", "100000000.00", "1e8", "9" * 39, "9" * 5000),
    *("1e999999999999999999999", "1e-999999999999999999999", "0." + "0" * 200 + "1", "0." + "1" * 50),
]
TAKEN_DECIMALS = [
    *[("12.5", "12.50"), ('"12.50"', "12.50"), ("9.990", "9.99"), ('"-0"', "0.00"), ("0e-9999999", "0.00")],
    *[("1.5e2", "150.00"), ("150000e-3", "150.00"), ('"1E+2"', "100.00"), ("99999999.99", "99999999.99")],
    *[("12345678." + "0" * 60, "12345678.00"), ("0.50" + "0" * 3000, "0.50"), ('"\\u0031\\u002e5"', "1.50")],
]


@pytest.mark.parametrize("mode", JsonMode)
@pytest.mark.parametrize("text", REFUSED_DECIMALS, ids=lambda text: text[:20])
def test_a_decimal_is_never_made_by_dropping_characters(text, mode):
    value, reason = on_each_way(text, MONEY, mode)
    assert value is None
    assert reason


@pytest.mark.parametrize("mode", JsonMode)
@pytest.mark.parametrize(("text", "expected"), TAKEN_DECIMALS, ids=lambda text: text[:20])
def test_a_decimal_has_the_value_that_is_written(text, expected, mode):
    assert on_each_way(text, MONEY, mode) == (Decimal(expected), None)


REFUSED = [
    # Numbers are numbers of JSON, which the column can hold.
    *[(text, pa.int64()) for text in ('"1"', "1.0", "1e3", "9223372036854775808", "NaN", "true")],
    *[("128", pa.int8()), ("-32769", pa.int16()), ("2147483648", pa.int32())],
    *[(text, pa.float64()) for text in ('"1"', '"NaN"', '"-INF"', "NaN", "-Infinity", "1e400", "1" * 400)],
    *[("9007199254740993", pa.float64()), ("-36893488147419103233", pa.float64())],
    *[("16777217", pa.float32()), ("1e39", pa.float32()), ("340282356779733661637539395458142568448", pa.float32())],
    *[("1", pa.bool_()), ('"true"', pa.bool_()), ('"True"', pa.bool_())],
    # Times: nothing is cut, completed, or guessed.
    *[(f'"2024-02-29T12:00:00{end}"', TIME) for end in (".1234567", ".123456789Z", ".0000001+02:00", "PST", " IST")],
    *[('"2024-03-31T02:30:00 Europe/Paris"', TIME), ('"2024-10-27T02:30:00 Europe/Paris"', TIME)],
    *[(text, TIME) for text in ('"2024"', '"2024-02"', '"12:00"', '" 2024-02-29"', '"2024-02-29T12:00:00. Z"')],
    *[(f'"{text}"', TIME) for text in ("0000-12-31", "0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00")],
    *[("1709208000.5", TIME), ('"1709208000"', TIME), ("1709208000000", TIME), ("true", TIME)],
    *[(text, LOCAL) for text in ('"2024-02-29T12:00:00.1234567"', '"2024-02-29T12:00:00Z"', "1709208000")],
    *[
        (f'"{text}"', pa.date32())
        for text in ("2024-02-29T00:00:00", "2024-02-29 12:00", "2024", "2024-02", "2024-02-30")
    ],
    *[('" 2024-02-29"', pa.date32()), ("19782", pa.date32()), ('"0000-12-31"', pa.date32())],
    # Bytes and text.
    *[(f'"{text}"', pa.binary()) for text in ("AAE", "AB==", "AA EC", "AA==\\r\\n", "-_-_", "AA==AA==")],
    *[('"\\ud800x"', pa.string()), ('"x\\udc00"', pa.string()), ('[{"a":1,"a":2}]', pa.string())],
    *[("{}", pa.list_(pa.int64())), ('"[1]"', pa.list_(pa.int64())), ('"{}"', pa.struct([("a", pa.int64())]))],
]
TAKEN = [
    *[("-0", pa.int64(), 0), ("9223372036854775807", pa.int64(), 2**63 - 1)],
    *[("0.1", pa.float64(), 0.1), ("1e300", pa.float64(), 1e300), ("9007199254740992", pa.float64(), 2.0**53)],
    # As JavaScript writes a DOUBLE that is 123456789012345683968.
    *[("123456789012345680000", pa.float64(), 123456789012345680000.0), ("16777216", pa.float32(), 2.0**24)],
    ('"2024-02-29T12:00:00.123456Z"', TIME, datetime(2024, 2, 29, 12, 0, 0, 123456, timezone.utc)),
    ('"2024-02-29"', pa.date32(), date(2024, 2, 29)),
    *[('"AAEC"', pa.binary(), b"\0\1\2"), ('""', pa.binary(), b""), ('"\\ud83d\\ude00"', pa.string(), "\U0001f600")],
]
TAKEN_LENIENTLY = [
    ('"2024-02-29T12:00:00.123456000Z"', TIME, datetime(2024, 2, 29, 12, 0, 0, 123456, timezone.utc)),
    ("1709208000", TIME, datetime(2024, 2, 29, 12, tzinfo=timezone.utc)),
    ('"2024-07-01T12:00:00 Europe/Paris"', TIME, datetime(2024, 7, 1, 10, tzinfo=timezone.utc)),
    ('"2024-2-9"', pa.date32(), date(2024, 2, 9)),
    *[("1.10", pa.string(), "1.10"), ("true", pa.string(), "true"), ("NaN", pa.string(), "NaN")],
    ('{"b": 1.10}', pa.string(), '{"b": 1.10}'),
]


@pytest.mark.parametrize("mode", JsonMode)
@pytest.mark.parametrize(("text", "kind"), REFUSED, ids=lambda given: str(given)[:40])
def test_what_a_column_cannot_hold_as_it_is_is_refused(text, kind, mode):
    value, reason = on_each_way(text, kind, mode)
    assert value is None
    assert reason


@pytest.mark.parametrize("mode", JsonMode)
@pytest.mark.parametrize(("text", "kind", "expected"), TAKEN, ids=lambda given: str(given)[:40])
def test_what_a_column_can_hold_is_its_value(text, kind, expected, mode):
    assert on_each_way(text, kind, mode) == (expected, None)


@pytest.mark.parametrize(("text", "kind", "expected"), TAKEN_LENIENTLY, ids=lambda given: str(given)[:40])
def test_lenient_takes_values_that_are_written_in_another_way(text, kind, expected):
    assert on_each_way(text, kind, JsonMode.LENIENT) == (expected, None)
    value, reason = on_each_way(text, kind, JsonMode.STRICT)
    assert value is None
    assert reason


# Spark stores a number of a VARIANT as DECIMAL, and as the nearest DOUBLE if it has an exponent.
OF_VARIANT = {
    "9" * 38: True,
    "-" + "9" * 38: True,
    "-0." + "9" * 38: True,
    "0." + "0" * 37 + "1": True,
    "1." + "1" * 37: True,
    "1.10": True,
    "1e2": True,
    "-1.7976931348623157E+308": True,
    "5e-324": True,
    "0.000e-400": True,
    "1" + "0" * 38: False,
    "-" + "1" * 39: False,
    "1" * 400: False,
    "0." + "0" * 38 + "1": False,
    "1." + "1" * 38: False,
    "0." + "1" * 5000: False,
    "1e400": False,
    "-1E+309": False,
    "1e-400": False,
    "-2e-324": False,
    "NaN": False,
}


@pytest.mark.parametrize("mode", JsonMode)
@pytest.mark.parametrize(("text", "is_taken"), OF_VARIANT.items(), ids=lambda given: str(given)[:40])
def test_a_variant_takes_the_numbers_that_spark_stores_as_they_are(text, is_taken, mode):
    value, reason = on_each_way(text, VARIANT, mode)
    assert (value, reason is None) == (text if is_taken else None, is_taken)
    for document in (text, f'[{{"a":{text}}}]', f'{{"\\u0061":{text}}}'):
        found = Json(mode=mode).decode(pa.array([document.encode()], pa.binary()), pa.schema([("payload", VARIANT)]))
        assert [error is None for error in found.errors.to_pylist()] == [is_taken]


@pytest.mark.parametrize("mode", JsonMode)
@pytest.mark.parametrize(
    ("document", "kind", "path"),
    [
        (b'{"v":1,"v":2}', pa.int64(), "v"),
        (b'{"v":"x","v":2}', pa.int64(), "v"),
        (b'{"v":{"a":1,"\\u0061":1}}', pa.struct([("a", pa.int64())]), "v.a"),
        (b'{"v":[{"a":1,"a":1}]}', pa.list_(pa.struct([("a", pa.int64())])), "v[].a"),
        (b'{"v":{"a":1,"a":2}}', pa.map_(pa.string(), pa.int64()), "v"),
    ],
)
def test_of_two_values_of_a_field_none_is_chosen(document, kind, path, mode):
    for others in NEIGHBOURS.values():
        value, reason = decoded(document, kind, mode, others)
        assert value is None
        assert repr(path) in reason


@pytest.mark.parametrize("mode", JsonMode)
def test_a_field_without_a_column_may_be_there_twice_or_be_any_number(mode):
    for has_map in (False, True):
        assert decoded(b'{"v":1,"x":1,"x":2}', pa.int64(), mode, has_map=has_map) == (1, None)
        assert decoded(b'{"v":1,"x":1e999}', pa.int64(), mode, has_map=has_map) == (1, None)


# -- reasons ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", JsonMode)
@pytest.mark.parametrize(
    ("text", "kind", "parts"),
    [
        ('"s3cret"', pa.int64(), ("'v'", "whole number of 64 bits", "found text")),
        ('[{"b":"s3cret"}]', pa.list_(pa.struct([("b", pa.int8())])), ("'v[].b'", "8 bits", "found text")),
        ('{"a":{"b":"s3cret"}}', pa.struct([("a", pa.struct([("b", TIME)]))]), ("'v.a.b'", "a time", "found text")),
        ('{"a":"s3cret"}', pa.struct([("a", MONEY)]), ("'v.a'", "a number", "found text")),
        ("[71.234]", pa.list_(MONEY), ("'v[]'", "2 after it", "found a number")),
        ('{"k":"s3cret"}', pa.map_(pa.string(), pa.int64()), ("'v{}'", "64 bits", "found text")),
        ("[true]", pa.list_(pa.float64()), ("'v[]'", "a number", "found true or false")),
        ('{"a":[71]}', pa.struct([("a", pa.bool_())]), ("'v.a'", "true or false", "found an array")),
        ('{"a":71}', pa.struct([("a", pa.list_(pa.string()))]), ("'v.a'", "an array", "found a whole number")),
    ],
)
def test_a_reason_names_the_field_and_the_kind_of_the_value_but_not_the_value(text, kind, parts, mode):
    value, reason = decoded(b'{"v":%s}' % text.encode(), kind, mode)
    assert value is None
    assert [part for part in parts if part not in reason] == []
    assert "s3cret" not in reason
    assert "71" not in reason


# -- numbers that end the process of Arrow's parser -------------------------------------------------------------------

POISON = [
    *("1e-9999999", '"1e-9999999"', "0e-9999999", "0.0E-09999999", '"1\\u0065-9999999"', '"1e\\u002d9999999"'),
    *("1e-115", "0e-500000", "1e-2147483647", "0." + "0" * 500_000 + "1"),
]
PLACES = [
    (pa.decimal128(10, 2), '{"v":%s}'),
    (pa.decimal128(10, 2), '{"\\u0076" : %s}'),
    (pa.list_(pa.decimal128(38, 30)), '{"v":[1, %s]}'),
    (pa.struct([("a b\u00e9", pa.decimal128(10, 2))]), '{"v":{"a b\u00e9":\n%s}}'),
    (pa.struct([("é", pa.decimal128(10, 2))]), '{"v":{"\\u00e9":%s}}'),
    (pa.list_(pa.struct([("p", pa.list_(pa.decimal128(10, 2)))])), '{"v":[{"p":[1,2]},{"p":[\t%s]}]}'),
]
DECODE_ALL = """
import pyarrow as pa
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.json_decoder import rescued
from tests.spark_jobs.decoding.test_exact_values import PLACES, POISON
for kind, place in PLACES:
    schema = pa.schema([("id", pa.int64()), ("v", kind)])
    documents = pa.array([b'{"id":1}', *(place.replace("%s", text).encode() for text in POISON)], pa.binary())
    for mode in ("lenient", "strict"):
        errors = Json("v BIGINT", mode=mode).decode(documents, schema).errors.to_pylist()
        zeros = [text.startswith("0") and not text.endswith("1") for text in POISON]
        assert [error is None for error in errors] == [True, *zeros], errors
    rescued(documents, schema)
"""


def test_no_exponent_ends_the_process():
    """In a child, since what would fail is a segmentation fault."""
    ended = subprocess.run(
        [sys.executable, "-c", DECODE_ALL], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert (ended.returncode, ended.stderr[-2000:]) == (0, "")


def test_usual_numbers_are_left_to_arrow():
    """Also beside text that looks like an odd number, in a field that is no DECIMAL."""
    schema = pa.schema(
        [("amount", MONEY), ("prices", pa.list_(MONEY)), ("phone", pa.string()), ("ratio", pa.float64())]
    )
    texts = ["0", "-1.5", '"12.50"', "0." + "0" * 37, "1e5", "null"]
    documents = [f'{{"amount": {one}, "prices":[{one} ,1], "phone":"+49.", "ratio":1e-300}}' for one in texts]
    columns = parse_block(pa.array(documents), schema)
    assert columns[0][1].as_py() == Decimal("-1.50")
