"""Debezium: each type in each column that it may have, with a schema in the message and without one."""

import json
from base64 import b64encode
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spark_jobs.decoding.debezium import Debezium
from spark_jobs.decoding.debezium_types import MAX_DECIMAL_BYTES
from spark_jobs.decoding.json_values import VARIANT
from tests.support.arrow_columns import decode
from tests.support.debezium_messages import envelope, field
from tests.support.profiles import examples

TIME, DATA, CONNECT = "io.debezium.time.", "io.debezium.data.", "org.apache.kafka.connect.data."
SECONDS = 1700000000
AT = datetime(2023, 11, 14, 22, 13, 20, tzinfo=timezone.utc)
MILLIS, MICROS = AT.replace(microsecond=123000), AT.replace(microsecond=123456)


def base64(data):
    return b64encode(data).decode()


def unscaled(number, length=None):
    return base64(number.to_bytes(length or number.bit_length() // 8 + 1, "big", signed=True))


def decoded(kind, written, value, **options):
    """The value of a column, and the reason of a dead letter; ``written`` is the schema, or ``None`` for no schema."""
    fields = None if written is None else (written,)
    rows, errors = decode(Debezium(f"v {kind}", **options), [envelope("c", after={"v": value}, fields=fields)])
    return rows[0]["v"], errors[0]


def of(kind, semantic=None, **more):
    return field("v", kind, semantic and semantic, **more)


SCALE_2 = {"parameters": {"scale": "2", "connect.decimal.precision": "10"}}
VARIABLE = {"scale": 3, "value": unscaled(-1234567)}
VARIABLE_FIELDS = [field("scale", "int32"), field("value", "bytes")]
POINT = {"x": 1.0, "y": 2.0, "wkb": "AQE=", "srid": None}
POINT_FIELDS = [field("x", "double"), field("y", "double"), field("wkb", "bytes"), field("srid", "int32")]
STRUCTURED_FIELDS = [field("year", "int32"), field("specialValue", "string")]


@pytest.mark.parametrize(
    ("written", "value", "kind", "expected"),
    [
        # What has no semantic type.
        (of("boolean"), True, "BOOLEAN", True),
        (of("int16"), -7, "SMALLINT", -7),
        (of("int64"), 2**63 - 1, "BIGINT", 2**63 - 1),
        (of("float"), 0.5, "FLOAT", 0.5),
        (of("double"), 1e300, "DOUBLE", 1e300),
        (of("string"), "gruß", "STRING", "gruß"),
        (of("bytes"), "AAH/", "BINARY", b"\0\1\xff"),
        (of("int64"), SECONDS, "STRING", "1700000000"),
        # Days.
        (of("int32", f"{TIME}Date"), 19675, "DATE", date(2023, 11, 14)),
        (of("int32", f"{TIME}Date"), -1, "DATE", date(1969, 12, 31)),
        (of("int32", f"{CONNECT}Date"), 19675, "DATE", date(2023, 11, 14)),
        (of("int32", f"{TIME}Date"), 19675, "STRING", "2023-11-14"),
        (of("int32", f"{TIME}Date"), 19675, "INT", 19675),
        (of("int32", f"{TIME}Date"), 19675, "TIMESTAMP", datetime(2023, 11, 14, tzinfo=timezone.utc)),
        (of("string", f"{TIME}IsoDate"), "2023-11-14Z", "DATE", date(2023, 11, 14)),
        (of("string", f"{TIME}IsoDate"), "2023-11-14Z", "STRING", "2023-11-14Z"),
        (of("int32", f"{TIME}Year"), 2023, "INT", 2023),
        # Times of a day.
        (of("int32", f"{TIME}Time"), 3723004, "STRING", "01:02:03.004"),
        (of("int32", f"{CONNECT}Time"), 3723000, "STRING", "01:02:03"),
        (of("int64", f"{TIME}MicroTime"), 3723000005, "STRING", "01:02:03.000005"),
        (of("int64", f"{TIME}NanoTime"), 3723000000006, "STRING", "01:02:03.000000006"),
        (of("int64", f"{TIME}MicroTime"), -3020399000000, "STRING", "-838:59:59"),
        (of("int64", f"{TIME}MicroTime"), 3723000005, "BIGINT", 3723000005),
        (of("string", f"{TIME}ZonedTime"), "10:15:30+01:00", "STRING", "10:15:30+01:00"),
        (of("string", f"{TIME}IsoTime"), "10:15:30Z", "STRING", "10:15:30Z"),
        # Times.
        (of("int64", f"{TIME}Timestamp"), SECONDS * 1000 + 123, "TIMESTAMP", MILLIS),
        (of("int64", f"{CONNECT}Timestamp"), SECONDS * 1000 + 123, "TIMESTAMP", MILLIS),
        (of("int64", f"{TIME}MicroTimestamp"), SECONDS * 10**6 + 123456, "TIMESTAMP", MICROS),
        (of("int64", f"{TIME}MicroTimestamp"), SECONDS * 10**6 + 123456, "TIMESTAMP_NTZ", MICROS.replace(tzinfo=None)),
        (of("int64", f"{TIME}NanoTimestamp"), SECONDS * 10**9 + 123456000, "TIMESTAMP", MICROS),
        (of("int64", f"{TIME}NanoTimestamp"), SECONDS * 10**9 + 1, "STRING", "2023-11-14T22:13:20.000000001"),
        (of("int64", f"{TIME}NanoTimestamp"), SECONDS * 10**9 + 1, "BIGINT", SECONDS * 10**9 + 1),
        (of("int64", f"{TIME}Timestamp"), -1, "TIMESTAMP", datetime(1969, 12, 31, 23, 59, 59, 999000, timezone.utc)),
        (of("int64", f"{TIME}Timestamp"), 0, "STRING", "1970-01-01T00:00:00"),
        (of("string", f"{TIME}ZonedTimestamp"), "2023-11-14T23:13:20.123456+01:00", "TIMESTAMP", MICROS),
        (of("string", f"{TIME}ZonedTimestamp"), "2023-11-14T22:13:20Z", "STRING", "2023-11-14T22:13:20Z"),
        (of("string", f"{TIME}IsoTimestamp"), "2023-11-14T22:13:20Z", "TIMESTAMP", AT),
        # Durations.
        (of("string", f"{TIME}Interval"), "P1Y2M3DT4H5M6.7S", "STRING", "P1Y2M3DT4H5M6.7S"),
        (of("int64", f"{TIME}MicroDuration"), 86400000000, "BIGINT", 86400000000),
        (of("int64", f"{TIME}NanoDuration"), 7, "BIGINT", 7),
        # Decimals, in all modes.
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), unscaled(123456), "DECIMAL(10,2)", Decimal("1234.56")),
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), unscaled(-5, 8), "DECIMAL(10,2)", Decimal("-0.05")),
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), unscaled(123456), "DECIMAL(38,6)", Decimal("1234.56")),
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), unscaled(123456), "STRING", "1234.56"),
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), unscaled(123456), "DOUBLE", 1234.56),
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), unscaled(123456), "BINARY", (123456).to_bytes(3, "big")),
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), 1234.56, "DECIMAL(10,2)", Decimal("1234.56")),
        (of("bytes", f"{CONNECT}Decimal", parameters={"scale": "0"}), unscaled(7), "BIGINT", 7),
        (of("bytes", f"{CONNECT}Decimal", parameters={"scale": "-3"}), unscaled(7), "BIGINT", 7000),
        (of("struct", f"{DATA}VariableScaleDecimal", fields=VARIABLE_FIELDS), VARIABLE, "STRING", "-1234.567"),
        (
            of("struct", f"{DATA}VariableScaleDecimal", fields=VARIABLE_FIELDS),
            VARIABLE,
            "DECIMAL(10,3)",
            Decimal("-1234.567"),
        ),
        (
            of("struct", f"{DATA}VariableScaleDecimal", fields=VARIABLE_FIELDS),
            VARIABLE,
            "STRUCT<scale: INT, value: BINARY>",
            {"scale": 3, "value": (-1234567).to_bytes(3, "big", signed=True)},
        ),
        (of("double"), 1234.56, "DECIMAL(10,2)", Decimal("1234.56")),
        (of("string"), "1234.56", "DECIMAL(10,2)", Decimal("1234.56")),
        (of("string"), "1234", "DECIMAL(10,2)", Decimal(1234)),
        # The others.
        (of("bytes", f"{DATA}Bits", parameters={"length": "10"}), "AwA=", "BINARY", b"\3\0"),
        (of("string", f"{DATA}Json"), '{"a": 1.10}', "STRING", '{"a": 1.10}'),
        (of("string", f"{DATA}Json"), '{"a": 1.10}', "STRUCT<a: DECIMAL(4,2)>", {"a": Decimal("1.10")}),
        (of("string", f"{DATA}Json"), '{"a": "x"}', "MAP<STRING, STRING>", [("a", "x")]),
        (of("string", f"{DATA}Json"), " [1, null] ", "ARRAY<BIGINT>", [1, None]),
        (of("string", f"{DATA}Uuid"), "a0ee-bc99", "STRING", "a0ee-bc99"),
        (of("string", f"{DATA}Xml"), "<a/>", "STRING", "<a/>"),
        (of("string", f"{DATA}Enum", parameters={"allowed": "a,b"}), "a", "STRING", "a"),
        (of("string", f"{DATA}EnumSet", parameters={"allowed": "a,b"}), "a,b", "STRING", "a,b"),
        (of("string", f"{DATA}Ltree"), "Top.Science", "STRING", "Top.Science"),
        (of("string", f"{DATA}Tsvector"), "'a':1", "STRING", "'a':1"),
        (
            of("struct", f"{DATA}geometry.Point", fields=POINT_FIELDS),
            POINT,
            "STRUCT<wkb: BINARY, srid: INT, x: DOUBLE>",
            {"wkb": b"\1\1", "srid": None, "x": 1.0},
        ),
        (of("array", f"{DATA}DoubleVector", items={"type": "double"}), [0.5, 1.0], "ARRAY<DOUBLE>", [0.5, 1.0]),
        (
            of("struct", f"{TIME}StructuredDate", fields=STRUCTURED_FIELDS),
            {"year": 2023, "specialValue": None},
            "STRUCT<year: INT, specialValue: STRING>",
            {"year": 2023, "specialValue": None},
        ),
        # Types within types.
        (
            of("array", items={"type": "int64", "name": f"{TIME}MicroTimestamp"}),
            [SECONDS * 10**6, None],
            "ARRAY<TIMESTAMP>",
            [AT, None],
        ),
        (
            of("array", items={"type": "bytes", "name": f"{CONNECT}Decimal", **SCALE_2}),
            [unscaled(7)],
            "ARRAY<DECIMAL(5,2)>",
            [Decimal("0.07")],
        ),
        (
            of("map", keys={"type": "string"}, values={"type": "int32", "name": f"{TIME}Date"}),
            {"a": 0, "b": None},
            "MAP<STRING, DATE>",
            [("a", date(1970, 1, 1)), ("b", None)],
        ),
        (
            of("struct", fields=[field("at", "int64", f"{TIME}Timestamp")]),
            {"at": SECONDS * 1000},
            "STRUCT<at: TIMESTAMP, more: STRING>",
            {"at": AT, "more": None},
        ),
        # A semantic type that is not known is decoded as what it is written as.
        (of("string", "com.acme.Money"), "7 EUR", "STRING", "7 EUR"),
        (of("int64", "com.acme.Cents"), 700, "BIGINT", 700),
    ],
)
def test_each_type_with_its_schema(written, value, kind, expected):
    assert decoded(kind, written, value) == (expected, None)
    assert decoded(kind, written, None) == (None, None)


@pytest.mark.parametrize(
    ("written", "value", "kind"),
    [
        (of("int64", f"{TIME}MicroTimestamp"), 9223372036825200000, "TIMESTAMP"),
        (of("int64", f"{TIME}MicroTimestamp"), 9223372036825200000, "STRING"),
        (of("int64", f"{TIME}Timestamp"), 2**63, "TIMESTAMP"),
        (of("int64", f"{TIME}Timestamp"), 10**30, "BIGINT"),
        (of("int64", f"{TIME}Timestamp"), 1.5, "TIMESTAMP"),
        (of("int64", f"{TIME}Timestamp"), "2023-11-14", "TIMESTAMP"),
        (of("int64", f"{TIME}Timestamp"), SECONDS * 1000 + 1, "DATE"),
        (of("int64", f"{TIME}NanoTimestamp"), SECONDS * 10**9 + 1, "TIMESTAMP"),
        (of("string", f"{TIME}ZonedTimestamp"), "infinity", "TIMESTAMP"),
        (of("string", f"{TIME}ZonedTimestamp"), "2023-11-14T22:13:20.123456789Z", "TIMESTAMP"),
        (of("int32", f"{TIME}Date"), 2932897, "DATE"),
        (of("int32", f"{TIME}Date"), 2**62, "DATE"),
        (of("int64", f"{TIME}MicroTime"), 1, "TIMESTAMP"),
        # A number that lenient JSON would take for seconds, and bytes that it would take for text.
        (of("int64"), SECONDS, "TIMESTAMP"),
        (of("int64", "com.acme.Moment"), SECONDS, "TIMESTAMP"),
        (of("int32", "com.acme.Day"), 7, "DATE"),
        (of("bytes", "com.acme.Decimal"), base64(b"\xd7\x6d\xf8"), "DECIMAL(10,2)"),
        (of("bytes"), "1234", "DECIMAL(10,2)"),
        (of("string"), "beef", "BINARY"),
        (of("array", items={"type": "int64"}), [SECONDS], "ARRAY<TIMESTAMP>"),
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), unscaled(123456), "DECIMAL(10,1)"),
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), unscaled(123456), "DECIMAL(5,2)"),
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), unscaled(123456), "BIGINT"),
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), "not base64", "DECIMAL(10,2)"),
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), "", "DECIMAL(10,2)"),
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), base64(b"\1" * (MAX_DECIMAL_BYTES + 1)), "STRING"),
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), ["AA=="], "STRING"),
        (of("bytes", f"{CONNECT}Decimal"), unscaled(7), "STRING"),
        (of("bytes", f"{CONNECT}Decimal", parameters={"scale": "x"}), unscaled(7), "STRING"),
        (of("bytes", f"{CONNECT}Decimal", parameters={"scale": "1" * 5000}), unscaled(7), "STRING"),
        (of("bytes", f"{CONNECT}Decimal", parameters={"scale": "2000"}), unscaled(7), "STRING"),
        (of("bytes", f"{CONNECT}Decimal", parameters={"scale": []}), unscaled(7), "STRING"),
        (of("bytes", f"{CONNECT}Decimal", parameters=[]), unscaled(7), "STRING"),
        (of("bytes", f"{CONNECT}Decimal", parameters="x"), unscaled(7), "STRING"),
        (of("struct", f"{DATA}VariableScaleDecimal"), {"scale": 10**6, "value": unscaled(7)}, "STRING"),
        (of("struct", f"{DATA}VariableScaleDecimal"), {"scale": 1.5, "value": unscaled(7)}, "STRING"),
        (of("struct", f"{DATA}VariableScaleDecimal"), {"scale": 1, "value": 7}, "STRING"),
        (of("struct", f"{DATA}VariableScaleDecimal"), {"value": unscaled(7)}, "STRING"),
        (of("string"), "NaN", "DECIMAL(10,2)"),
        (of("string", f"{DATA}Json"), "{", "MAP<STRING, STRING>"),
        (of("string", f"{DATA}Json"), "{} {}", "MAP<STRING, STRING>"),
        (of("string", f"{DATA}Json"), '{"a": NaN}', "MAP<STRING, DOUBLE>"),
        (of("string", f"{DATA}Json"), "[" * 5000 + "]" * 5000, "ARRAY<STRING>"),
        (of("string", f"{DATA}Json"), '{"a": "x", "a": "y"}', "MAP<STRING, STRING>"),
        (of("string", f"{DATA}Json"), {"a": "x"}, "MAP<STRING, STRING>"),
        (of("array", items=7), [1], "ARRAY<BIGINT>"),
        (of("struct", fields=[7]), {"a": 1}, "STRUCT<a: BIGINT>"),
    ],
    ids=lambda part: repr(part)[:60],
)
def test_what_a_column_cannot_hold_exactly_is_a_dead_letter(written, value, kind):
    found, error = decoded(kind, written, value)
    assert found is None
    assert "'v" in error or "Kafka Connect" in error or "nested too deep" in error or "twice" in error
    assert isinstance(value, str) is False or len(value) < 3 or value not in error


MODES: list[tuple[dict[str, str], Any, str, Any]] = [
    ({}, 19675, "DATE", date(2023, 11, 14)),
    ({"time_precision_mode": "isostring"}, "2023-11-14Z", "DATE", date(2023, 11, 14)),
    ({"time_precision_mode": "isostring"}, "2023-11-14T22:13:20Z", "TIMESTAMP", AT),
    ({"time_precision_mode": "connect"}, SECONDS * 1000 + 123, "TIMESTAMP", MILLIS),
    ({"time_precision_mode": "microseconds"}, SECONDS * 10**6 + 123456, "TIMESTAMP", MICROS),
    ({"time_precision_mode": "microseconds"}, SECONDS * 10**6, "TIMESTAMP_NTZ", AT.replace(tzinfo=None)),
    ({"time_precision_mode": "nanoseconds"}, SECONDS * 10**9, "TIMESTAMP", AT),
    ({}, "2023-11-14T22:13:20.123456Z", "TIMESTAMP", MICROS),
    ({}, unscaled(123456), "DECIMAL(10,2)", Decimal("1234.56")),
    ({}, VARIABLE, "DECIMAL(10,3)", Decimal("-1234.567")),
    ({}, 1234.56, "DECIMAL(10,2)", Decimal("1234.56")),
    ({"decimal_handling_mode": "string"}, "1234", "DECIMAL(10,2)", Decimal(1234)),
    ({"decimal_handling_mode": "double"}, 1234.56, "DECIMAL(10,2)", Decimal("1234.56")),
    ({"decimal_handling_mode": "double"}, 1234.56, "DOUBLE", 1234.56),
    ({}, "AAH/", "BINARY", b"\0\1\xff"),
    ({}, '{"a": "x"}', "MAP<STRING, STRING>", [("a", "x")]),
    ({}, {"a": "x"}, "MAP<STRING, STRING>", [("a", "x")]),
    ({}, '{"a": 1}', "STRUCT<a: BIGINT>", {"a": 1}),
    ({}, [19675], "ARRAY<DATE>", [date(2023, 11, 14)]),
    ({"time_precision_mode": "connect"}, {"at": SECONDS * 1000}, "STRUCT<at: TIMESTAMP>", {"at": AT}),
    ({"types": {"v": f"{TIME}MicroTimestamp"}}, SECONDS * 10**6, "TIMESTAMP", AT),
    ({"types": {"v": f"{TIME}MicroTime"}}, 3723000005, "STRING", "01:02:03.000005"),
    ({"types": {"v": f"{DATA}Json"}}, '{"a": "x"}', "MAP<STRING, STRING>", [("a", "x")]),
]


@pytest.mark.parametrize(("options", "value", "kind", "expected"), MODES)
def test_each_type_without_a_schema(options, value, kind, expected):
    assert decoded(kind, None, value, **options) == (expected, None)


@pytest.mark.parametrize(
    ("options", "value", "kind"),
    [
        *[({"time_precision_mode": mode}, SECONDS, "TIMESTAMP") for mode in ("adaptive", "adaptive_time_microseconds")],
        ({"time_precision_mode": "isostring"}, SECONDS, "TIMESTAMP"),
        ({}, [SECONDS], "ARRAY<TIMESTAMP>"),
        ({}, {"at": SECONDS}, "STRUCT<at: TIMESTAMP>"),
        ({}, {"a": SECONDS}, "MAP<STRING, TIMESTAMP>"),
        ({}, unscaled(123456), "DOUBLE"),
        ({}, "1234.56", "DECIMAL(10,2)"),
        ({"decimal_handling_mode": "string"}, base64(b"\xff"), "DECIMAL(10,2)"),
        ({"decimal_handling_mode": "double"}, VARIABLE, "DECIMAL(10,2)"),
    ],
)
def test_what_a_message_without_a_schema_does_not_show_is_a_dead_letter(options, value, kind):
    found, error = decoded(kind, None, value, **options)
    assert found is None
    assert error is not None


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(-(10**38) + 1, 10**38 - 1), st.integers(0, 38))
@example(0, 5)
@example(-1, 38)
def test_every_decimal_comes_back(number, scale):
    written = of("bytes", f"{CONNECT}Decimal", parameters={"scale": str(scale)})
    expected = Decimal(number).scaleb(-scale) if abs(number) < 10**28 else Decimal(f"{number}e-{scale}")
    assert decoded(f"DECIMAL(38,{scale})", written, unscaled(number)) == (expected, None)
    text, error = decoded("STRING", written, unscaled(number))
    assert (Decimal(text), error) == (expected, None)


@settings(max_examples=examples(60), deadline=None)
@given(st.datetimes().map(lambda moment: moment.replace(tzinfo=timezone.utc)))
@example(datetime.min.replace(tzinfo=timezone.utc))
@example(datetime.max.replace(tzinfo=timezone.utc))
def test_every_time_comes_back(moment):
    since = moment - datetime(1970, 1, 1, tzinfo=timezone.utc)
    number = (since.days * 86400 + since.seconds) * 10**6 + since.microseconds
    written = of("int64", f"{TIME}MicroTimestamp")
    assert decoded("TIMESTAMP_NTZ", written, number) == (moment.replace(tzinfo=None), None)
    assert decoded("TIMESTAMP", written, number) == (moment, None)
    text, _ = decoded("STRING", written, number)
    assert datetime.fromisoformat(f"{text}+00:00") == moment


def test_a_field_of_the_schema_may_be_missing_or_of_another_table():
    message = envelope("c", after={"v": SECONDS, "w": "x"}, fields=(field("x", "int64"),))
    rows, errors = decode(Debezium("v BIGINT, w STRING"), [message])
    assert errors == [None]
    assert json.dumps(rows[0]["w"]) == '"x"'


@pytest.mark.parametrize(
    ("written", "value", "expected"),
    [
        (of("string", f"{DATA}Json"), '{"a": [1.10, null]}', '{"a": [1.10, null]}'),
        (of("string", f"{DATA}Json"), "null", "null"),
        (None, '{"a": 1}', '{"a": 1}'),
        (None, {"a": 1}, '{"a": 1}'),
        (of("string"), "text", '"text"'),
        (of("bytes", f"{CONNECT}Decimal", **SCALE_2), unscaled(123456), "1234.56"),
    ],
)
def test_a_variant_holds_what_json_means(written, value, expected):
    fields = None if written is None else (written,)
    schema = pa.schema([("v", VARIANT), ("_op", pa.string()), ("_unavailable", pa.list_(pa.string()))])
    messages = pa.array([envelope("c", after={"v": value}, fields=fields)], pa.binary())
    decoded = Debezium("v VARIANT").decode(messages, schema)
    assert (decoded.columns[0].to_pylist(), decoded.errors.to_pylist()) == ([expected], [None])
