"""Json, lenient: what it takes, whatever the documents around it are; and the types that Arrow lacks."""

import json
from datetime import date, datetime, timezone

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding.json_decoder import Json, JsonMode
from spark_jobs.decoding.json_documents import FAILURES, decode_documents, parse_block
from spark_jobs.decoding.json_schema import cpu_limit
from spark_jobs.decoding.json_values import MAX_JSON_LEVELS, MAX_VARIANT_BYTES, VARIANT, variant_problem
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError
from tests.support.payloads import NUMBERS, STRINGS
from tests.support.profiles import examples

TIME = pa.timestamp("us", "UTC")
LOCAL = pa.timestamp("us")
LEAVES = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.binary()),
    *(pa.date32(), TIME, LOCAL, pa.decimal128(10, 2), pa.decimal128(38, 0), pa.decimal128(38, 38), pa.decimal128(3, 3)),
]


def decode(payloads, schema, *, mode="lenient"):
    decoded = Json("v BIGINT", mode=mode).decode(pa.array(payloads, pa.binary()), schema)
    for column in decoded.columns:
        column.validate(full=True)
    rows = [dict(zip(schema.names, values)) for values in zip(*(column.to_pylist() for column in decoded.columns))]
    return rows, decoded.errors.to_pylist()


def value(text, kind, *, mode="lenient"):
    """The value of field ``v`` of one payload, or its error."""
    (row,), (error,) = decode([b'{"v":%s}' % text.encode()], pa.schema([pa.field("v", kind)]), mode=mode)
    return row["v"] if error is None else ValueError(error)


def refusal(text, kind, *, mode="lenient"):
    found = value(text, kind, mode=mode)
    assert isinstance(found, ValueError), found
    return str(found)


def moment(*parts):
    return datetime(*parts, tzinfo=timezone.utc)


TAKEN = [
    ('"2024-02-29T12:00:00.12345600000Z"', TIME, moment(2024, 2, 29, 12, 0, 0, 123456)),
    ('"2024-02-29 12:00:00.1234560"', LOCAL, datetime(2024, 2, 29, 12, 0, 0, 123456)),  # noqa: DTZ001
    ('"2024-02-29T12:00:00 Europe/Paris"', TIME, moment(2024, 2, 29, 11)),
    ('"2024-07-01T12:00:00.5America/New_York"', TIME, moment(2024, 7, 1, 16, 0, 0, 500000)),
    ('"2024-02-29T12:00:00 UTC+01:00"', TIME, moment(2024, 2, 29, 11)),
    ('"2024-2-9 1:2:3"', TIME, moment(2024, 2, 9, 1, 2, 3)),
    ("1709208000", TIME, moment(2024, 2, 29, 12)),
    ("-1", TIME, moment(1969, 12, 31, 23, 59, 59)),
    ('"2024-2-9"', pa.date32(), date(2024, 2, 9)),
    ("1.10", pa.string(), "1.10"),
    ("true", pa.string(), "true"),
    ("NaN", pa.string(), "NaN"),
    ('{"b": 1.10, "c" : [1 ,2]}', pa.string(), '{"b": 1.10, "c": [1, 2]}'),
    ('[ "\\u00e9", {}, NaN ]', pa.string(), '["é", {}, NaN]'),
    ('"\\ud83d\\ude00"', pa.string(), "\U0001f600"),
    # Rounded to DOUBLE first it would be the next one.
    ("1.00000017881393432617187499", pa.float32(), 1.0000001192092896),
]


@pytest.mark.parametrize(("text", "kind", "expected"), TAKEN, ids=lambda given: str(given)[:40])
def test_a_value_that_is_written_in_another_way_is_a_value(text, kind, expected):
    assert value(text, kind) == expected


def test_milliseconds_are_told_from_seconds():
    assert "read milliseconds as BIGINT" in refusal("1709208000000", TIME)


def test_a_nan_that_nobody_asked_for_is_nobodys_business():
    schema = pa.schema([("v", pa.int64())])
    assert decode([b'{"v":1,"x":NaN,"y":[-Infinity]}', b'{"v":NaN}'], schema) == (
        [{"v": 1}, {"v": None}],
        [None, "field 'v' is not a whole number of 64 bits; found NaN or infinity"],
    )


# -- each value as it is alone ----------------------------------------------------------------------------------------


def by_arrow_alone(document, schema):
    """The columns of a document; ``None`` if Arrow does not take it."""
    try:
        return parse_block(pa.array([document]), schema)
    except FAILURES:
        return None


@pytest.mark.parametrize("kind", LEAVES, ids=str)
def test_what_arrow_takes_both_modes_take_alike_and_lenient_all_that_strict_takes(kind):
    schema = pa.schema([("v", kind)])
    for text in (*NUMBERS, *STRINGS, "true", "false", "null"):
        document = b'{"v":%s}' % text.encode()
        by_arrow = by_arrow_alone(document, schema)
        strictly = decode_documents(pa.array([document]), schema, is_lenient=False)
        leniently = decode_documents(pa.array([document]), schema, is_lenient=True)
        if by_arrow is not None:
            assert strictly == (by_arrow, pa.nulls(1, pa.string())), text
        if strictly[1].null_count:
            assert leniently == strictly, text


def test_every_mixture_of_good_odd_and_bad_gives_each_its_own():
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("at", TIME)])
    kinds = [
        (b'{"id":%d,"text":"x","at":"2024-02-29"}', "x"),
        (b'{"id":%d,"text":1.0,"at":"2024-02-29"}', "1.0"),
        (b'{"id":%d,"text":"x","at":"2024-2-29 0:00:00 Europe/Paris","more":NaN}', "x"),
        (b'{"id":%d,"text":"x","at":"never"}', None),
        (b'{"id":%d,"text":"x","deep":' + b"[" * 3000 + b"]" * 3000 + b"}", "x"),
        (b"%d", None),
    ]
    for share in (1, 3, 50, 700):
        chosen = [kinds[(number // 5) % 6 if number % share == 0 else 0] for number in range(2500)]
        rows, errors = decode([text % number for number, (text, _) in enumerate(chosen)], schema)
        for number, (_, text) in enumerate(chosen):
            assert (errors[number] is None) == (text is not None), number
            assert rows[number]["id"] == (number if text else None)
            assert rows[number]["text"] == text


# -- text of JSON ----------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(150))
@given(st.lists(JSON, max_size=4))
def test_text_and_variants_are_the_json_that_is_written(values):
    inner = pa.struct([("l", pa.list_(pa.string())), ("m", pa.map_(pa.string(), VARIANT))])
    mapped = {f"k{place}": item for place, item in enumerate(values)}
    document = json.dumps({"x": values, "v": {"l": values, "m": mapped}}, indent=1)
    rows, errors = decode([document.encode()], pa.schema([("v", inner)]))
    assert errors == [None]
    dumped = [json.dumps(item, ensure_ascii=False) for item in values]
    assert rows[0]["v"] == {
        "l": [item if item is None or isinstance(item, str) else text for item, text in zip(values, dumped)],
        "m": list(zip(mapped, dumped)),
    }


# -- MAP and VARIANT --------------------------------------------------------------------------------------------------

PARTS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("m", pa.map_(pa.string(), pa.struct([pa.field("a", pa.int32(), nullable=False), ("v", VARIANT)]))),
        ("v", VARIANT),
        ("l", pa.list_(VARIANT)),
    ]
)


@pytest.mark.parametrize("mode", JsonMode)
def test_maps_and_variants(mode):
    rows, errors = decode(
        [
            b'{"id":1,"m":{"x":{"a":1,"v":[1.10]},"y":null},"v":{"k": null},"l":[1, "x", null]}',
            b'{"id":2,"v":null,"m":{},"l":null}',
            b'{"id":3}',
            b'{"id":4,"m":{"x":{}}}',
            b'{"v":1}',
            None,
            b"[]",
        ],
        PARTS,
        mode=mode,
    )
    missing = "field 'id' is missing, but it is NOT NULL"
    inside = "field 'm{}.a' is missing, but it is NOT NULL"
    assert errors == [None, None, None, inside, missing, missing, "not a JSON object"]
    assert rows[0] == {
        "id": 1,
        "m": [("x", {"a": 1, "v": "[1.10]"}), ("y", None)],
        "v": '{"k": null}',
        "l": ["1", '"x"', "null"],
    }
    assert rows[1] == {"id": 2, "m": [], "v": "null", "l": None}
    assert rows[2] == {"id": 3, "m": None, "v": None, "l": None}


LONG = "1" * 1000
EXACT = "9" * 38
NAME = "n" * 50_000
# Jackson counts a character beyond U+FFFF twice.
WIDE_NAME = "\U0001f600" * 25_000
ESCAPED_NAME = "\\ud83d\\ude00" * 25_000


@pytest.mark.parametrize("mode", JsonMode)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":1,"b":{"a":2}}', None),
        ('{"a":1,"a":2}', "the key 'a' occurs twice"),
        ('[{"a":1,"b":3,"a":2}]', "the key 'a' occurs twice"),
        ('"\\ud83d\\ude00"', None),
        ('"\\\\ud800"', None),
        ('"\\ud800"', "surrogate"),
        ('{"\\udc00":1}', "surrogate"),
        (f"-{EXACT}", None),
        (f"[-{EXACT}1]", "more than the 38 digits"),
        (f"0.{LONG[:900]}e1", None),
        (f'{{"a":[0.{LONG}e1]}}', "more than the 1000 characters"),
        (f'"{LONG}1"', None),
        (f'{{"{NAME}":1}}', None),
        (f'{{"{NAME}n":1}}', "more than the 50000 characters"),
        (f'{{"{WIDE_NAME}":1}}', None),
        (f'{{"{WIDE_NAME}n":1}}', "more than the 50000 characters"),
        (f'[{{"{ESCAPED_NAME}":1}}]', None),
        (f'[{{"{ESCAPED_NAME}n":1}}]', "more than the 50000 characters"),
        ("[" * MAX_JSON_LEVELS + "]" * MAX_JSON_LEVELS, None),
        ("[" * (MAX_JSON_LEVELS + 1) + "]" * (MAX_JSON_LEVELS + 1), "nested deeper"),
        ("[" * 3000 + "]" * 3000, "nested"),
        ("[" + "[]," * 2000 + "[]]", None),
        ('"' + "x" * (MAX_VARIANT_BYTES - 2) + '"', None),
        ('"' + "x" * (MAX_VARIANT_BYTES - 1) + '"', "longer than the 4 MiB"),
    ],
    ids=lambda text: str(text)[:20],
)
def test_a_variant_holds_what_spark_has_room_for(mode, text, expected):
    found = value(text, VARIANT, mode=mode)
    assert (json.loads(found) == json.loads(text)) if expected is None else (expected in str(found))


@pytest.mark.parametrize(
    ("text", "expected", "times"),
    [
        ("{" + ",".join(f'"{number}":1' for number in range(20_000)) + ',"19999":1}', "'19999' occurs twice", 1),
        ("[" + ",".join(["1" * 38] * 1280) + "]", "None", 200),
    ],
    ids=["keys", "digits"],
)
def test_a_variant_is_judged_in_a_time_that_grows_with_its_length(text, expected, times):
    with cpu_limit(2):
        found = {variant_problem(text) for _ in range(times)}
    assert [str(one).endswith(expected) for one in found] == [True]


@pytest.mark.parametrize("mode", JsonMode)
def test_without_a_schema_any_json_is_one_variant(mode):
    texts = [
        b' {"a": 1.10}\n',
        b"[1]",
        b"null",
        b'"x"',
        b"7",
        None,
        b"",
        b"{",
        b"1 2",
        b"NaN",
        b"\xff",
        b'{"a":1,"a":1}',
    ]
    decoder = Json(mode=mode)
    decoded = decoder.decode(pa.array(texts, pa.binary()), pa.schema([("payload", VARIANT)]))
    (column,) = decoded.columns
    assert column.to_pylist() == ['{"a": 1.10}', "[1]", "null", '"x"', "7", *[None] * 7]
    assert [error is None for error in decoded.errors.to_pylist()] == [True] * 6 + [False] * 6
    assert (decoder.ddl(), Json(column="a`b").ddl()) == ("`payload` VARIANT", "`a``b` VARIANT")


# -- what is declared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["INTERVAL DAY TO SECOND", "interval  year", "ARRAY<INTERVAL HOUR TO MINUTE>"])
def test_intervals_are_refused_where_they_are_declared(kind):
    with pytest.raises(InvalidOptionError, match="Delta tables have no intervals"):
        Json(f"id BIGINT, took {kind}")


@pytest.mark.parametrize(
    "ddl", ["interval INT", "`interval day` INT", "a INT COMMENT 'an interval day'", "interval DATE"]
)
def test_a_column_may_be_called_interval(ddl):
    assert Json(ddl).ddl() == ddl


def test_keys_of_maps_are_text():
    with pytest.raises(SchemaMismatchError, match="keys that are int64"):
        value("{}", pa.map_(pa.int64(), pa.int64()))


def test_a_mode_is_one_of_two():
    assert Json("v INT", mode="strict").mode is JsonMode.STRICT
    assert Json("v INT").mode is JsonMode.LENIENT
    with pytest.raises(InvalidOptionError, match="mode='loose'"):
        Json("v INT", mode="loose")


@pytest.mark.parametrize("schema", ["", " ", 7])
def test_a_schema_has_columns(schema):
    with pytest.raises(InvalidOptionError, match="has no columns"):
        Json(schema)
