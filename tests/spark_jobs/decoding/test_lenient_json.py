"""Json, lenient: what it takes, whatever the documents around it are; and the types that Arrow lacks."""

import json
from datetime import date, datetime, timezone
from unittest.mock import Mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding import json_documents
from spark_jobs.decoding.json_decode import decode_json
from spark_jobs.decoding.json_decoder import Json, JsonMode
from spark_jobs.decoding.json_documents import decode_documents
from spark_jobs.decoding.json_types import VARIANT
from spark_jobs.decoding.json_values import MOST_NESTED, MOST_VARIANT_BYTES, conversion, scanner
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError
from tests.support.payloads import BAD, NUMBERS, STRINGS
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
    ('{"b": 1.10, "c" : [1 ,2]}', pa.string(), '{"b": 1.10, "c" : [1 ,2]}'),
    ('[ "\\u00e9", {} ]', pa.string(), '[ "\\u00e9", {} ]'),
    ('"\\ud83d\\ude00"', pa.string(), "\U0001f600"),
    # Rounded to DOUBLE first it would be the next one.
    ("1.00000017881393432617187499", pa.float32(), 1.0000001192092896),
]


@pytest.mark.parametrize(("text", "kind", "expected"), TAKEN, ids=lambda given: str(given)[:40])
def test_a_value_that_is_written_in_another_way_is_a_value(text, kind, expected):
    assert value(text, kind) == expected


@pytest.mark.parametrize(("text", "kind", "expected"), TAKEN, ids=lambda given: str(given)[:40])
def test_strict_takes_only_what_is_written_as_the_type_is(text, kind, expected):
    found = value(text, kind, mode="strict")
    assert isinstance(found, ValueError) or found == expected


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ('"1"', pa.int64(), "field 'v' is not a whole number of 64 bits"),
        ("1.0", pa.int64(), "field 'v' is not a whole number of 64 bits"),
        ("128", pa.int8(), "field 'v' is not a whole number of 8 bits"),
        ('"1"', pa.float64(), "field 'v' is not a number"),
        ("1", pa.bool_(), "field 'v' is not true or false"),
        ('"12:00"', TIME, "field 'v' is not a time"),
        ('"2024-02-29T12:00:00 Nowhere"', TIME, "field 'v' is not a time"),
        ('"2024-02-29T12:00:00Z"', LOCAL, "field 'v' is not a time without a zone"),
        ("1709208000", LOCAL, "field 'v' is not a time without a zone"),
        ('"10000-01-01"', TIME, "field 'v' is not in the years 1 to 9999"),
        ('"0000-01-01"', pa.date32(), "field 'v' is not in the years 1 to 9999"),
        ('"20240229"', pa.date32(), "field 'v' is not a date"),
        ("123456789", pa.decimal128(10, 2), "field 'v' is not a number with at most 8 digits before the point"),
        ('"x"', pa.decimal128(10, 2), "field 'v' is not a number"),
        ("true", pa.decimal128(10, 2), "field 'v' is not a number"),
        ('"AAE"', pa.binary(), "field 'v' is not base64"),
        ("{}", pa.list_(pa.int64()), "field 'v' is not an array"),
        ("[1]", pa.struct([("a", pa.int64())]), "field 'v' is not an object"),
        ('{"a":[{"b":"x"}]}', pa.struct([("a", pa.list_(pa.struct([("b", pa.int8())])))]), "field 'v.a[].b' is not"),
        ('{"k":"x"}', pa.map_(pa.string(), pa.int8()), "field 'v{}' is not a whole number of 8 bits"),
        ("[]", pa.map_(pa.string(), pa.int8()), "field 'v' is not an object"),
    ],
)
def test_what_is_refused_says_which_field_wanted_what(text, kind, expected):
    assert expected in refusal(text, kind)


def test_milliseconds_are_told_from_seconds():
    assert "read milliseconds as BIGINT" in refusal("1709208000000", TIME)


def test_a_nan_that_nobody_asked_for_is_nobodys_business():
    schema = pa.schema([("v", pa.int64())])
    assert decode([b'{"v":1,"x":NaN,"y":[-Infinity]}', b'{"v":NaN}'], schema) == (
        [{"v": 1}, {"v": None}],
        [None, "field 'v' is not a whole number of 64 bits; found NaN or infinity"],
    )


# -- each value as it is alone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", JsonMode)
@pytest.mark.parametrize("kind", LEAVES, ids=str)
def test_values_are_the_same_together_and_one_by_one(kind, mode):
    made, scan = conversion(kind, is_lenient=mode is JsonMode.LENIENT), scanner()
    for text in (*NUMBERS, *STRINGS, "true", "false"):
        try:
            parsed, _ = scan(text, 0)
        except (ValueError, StopIteration):
            continue
        if type(parsed) not in made.types:
            continue
        try:
            together = made.together([parsed, None])
        except (pa.ArrowInvalid, ValueError):
            continue
        one = pa.array([made.one(parsed), None], made.parsed).cast(kind)
        assert one.equals(together), text


def by_arrow_alone(document, schema):
    """The columns of a document; ``None`` if Arrow does not take it."""
    try:
        return decode_json(pa.array([document]), schema, Mock(side_effect=LookupError))[0]
    except LookupError:
        return None


@pytest.mark.parametrize("kind", LEAVES, ids=str)
def test_what_arrow_takes_both_modes_take_alike_and_lenient_all_that_strict_takes(kind):
    schema = pa.schema([("v", kind)])
    for text in (*NUMBERS, *STRINGS, "true", "false", "null"):
        document = b'{"v":%s}' % text.encode()
        by_arrow = by_arrow_alone(document, schema)
        strictly = decode_documents([document], schema, is_lenient=False)
        leniently = decode_documents([document], schema, is_lenient=True)
        if by_arrow is not None:
            assert strictly == (by_arrow, [None]), text
        if strictly[1] == [None]:
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


def test_few_odd_documents_leave_the_others_to_arrow(monkeypatch):
    seen = []
    by_python = json_documents.decode_documents
    monkeypatch.setattr(
        json_documents,
        "decode_documents",
        lambda lines, *more, **named: seen.extend(lines) or by_python(lines, *more, **named),
    )
    odd = [b'{"id":%d,"text":%s}' % (number, b"1" if number % 100 == 0 else b'"x"') for number in range(2000)]
    rows, errors = decode(odd, pa.schema([("id", pa.int64()), ("text", pa.string())]))
    assert errors == [None] * 2000
    assert [row["text"] for row in rows] == ["1" if number % 100 == 0 else "x" for number in range(2000)]
    assert sorted(seen) == sorted(odd[::100])


# -- text as it is written --------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(150))
@given(
    st.lists(st.tuples(JSON, st.sampled_from([(",", ":"), (" , ", " :\n"), (",\t", ": ")]), st.booleans()), max_size=4)
)
def test_text_and_variants_are_as_they_are_written(values):
    texts = [json.dumps(item, separators=space, ensure_ascii=ascii) for item, space, ascii in values]
    expected = [text if isinstance(item, (dict, list)) else json.loads(text) for (item, *_), text in zip(values, texts)]
    expected = [item if isinstance(item, str) or item is None else text for item, text in zip(expected, texts)]
    inner = pa.struct([("l", pa.list_(pa.string())), ("m", pa.map_(pa.string(), VARIANT))])
    listed, mapped = ", ".join(texts), ", ".join(f'"k{i}" :{text}' for i, text in enumerate(texts))
    document = f'{{"x": [{listed}], "v":{{"l" : [{listed}],\n"m":{{ {mapped}}}}}}}'
    rows, errors = decode([document.encode()], pa.schema([("v", inner)]))
    assert errors == [None]
    assert rows[0]["v"] == {"l": expected, "m": [(f"k{i}", text) for i, text in enumerate(texts)]}


WRONG = (
    *("[1 2]", "[1,]", "[,1]", "[1,,2]", "[1", "[1}", '{"a" 1}', '{"a":}', '{"a":1 "b":2}', '{"a":1,}', "{,}", "{a:1}"),
    *(
        '{"a":1',
        '{"a":1]',
        '{"a":1}}',
        '{"a"',
        '{"',
        "{1:1}",
        '"x',
        "01",
        "tru",
        "",
        "[1]]",
        "[1];",
        "[1;2]",
        '{"a":1;"b":2}',
        '{"a"=1}',
        '{xa":1}',
        '{"a":1,xb":2}',
    ),
)


@pytest.mark.parametrize("wrong", [*WRONG, *BAD], ids=repr)
def test_beside_text_that_is_wanted_as_it_is_written_all_else_is_as_before(wrong):
    """Where one document was read in the slower way, the next ones are at once."""
    kind = pa.struct([("a", pa.string()), ("l", pa.list_(pa.string()))])
    schema = pa.schema([("v", pa.list_(pa.string())), ("w", kind), ("x", pa.string())])
    wanted = b'{"v":[[1]]}'
    documents = (
        [wrong]
        if isinstance(wrong, bytes)
        else [b'{"%s":%s}' % (name, wrong.encode()) for name in (b"v", b"w", b"x", b"y")]
    )
    for document in documents:
        alone = decode([document], schema)
        rows, errors = decode([wanted, document, wanted, document], schema)
        assert errors == [None, *alone[1], None, *alone[1]]
        assert rows[1] == rows[3] == alone[0][0]
        assert rows[0] == rows[2] == {"v": ["[1]"], "w": None, "x": None}


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


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ('{"a":"x"}', pa.string(), "field 'v{}' is not a whole number"),
        ('{"a":1,"a":2}', pa.int64(), "the key 'a' is there twice"),
        ('{"a":NaN}', pa.float64(), "NaN is not JSON"),
    ],
)
def test_maps_are_strict_as_well(text, kind, expected):
    kind = pa.map_(pa.string(), pa.int64() if kind == pa.string() else kind)
    assert expected in refusal(text, kind, mode="strict")


@pytest.mark.parametrize("kind", LEAVES, ids=str)
def test_beside_a_map_strict_takes_what_it_takes_without(kind):
    alone, beside = pa.schema([("v", kind)]), pa.schema([("v", kind), ("m", pa.map_(pa.string(), pa.int64()))])
    documents = [b'{"v":%s}' % text.encode() for text in (*NUMBERS, *STRINGS, "true", "null", "[]", "{}")]
    rows, errors = decode(documents, alone, mode="strict")
    found, reasons = decode(documents, beside, mode="strict")
    assert [error is None for error in reasons] == [error is None for error in errors]
    assert [row["v"] for row in found] == [row["v"] for row in rows]


LONG = "1" * 1000
NAME = "n" * 50_000


@pytest.mark.parametrize("mode", JsonMode)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":1,"b":{"a":2}}', None),
        ('{"a":1,"a":2}', "the key 'a' is there twice"),
        ('[{"a":1,"b":3,"a":2}]', "the key 'a' is there twice"),
        ('"\\ud83d\\ude00"', None),
        ('"\\\\ud800"', None),
        ('"\\ud800"', "surrogate"),
        ('{"\\udc00":1}', "surrogate"),
        (LONG, None),
        (f"[-{LONG}]", "more than the 1000 digits"),
        (f'"{LONG}1"', None),
        (f'{{"{NAME}":1}}', None),
        (f'{{"{NAME}n":1}}', "more than the 50000 characters"),
        ("[" * MOST_NESTED + "]" * MOST_NESTED, None),
        ("[" * (MOST_NESTED + 1) + "]" * (MOST_NESTED + 1), "nested deeper"),
        ("[" * 3000 + "]" * 3000, "nested"),
        ("[" + "[]," * 2000 + "[]]", None),
        ('"' + "x" * (MOST_VARIANT_BYTES - 2) + '"', None),
        ('"' + "x" * (MOST_VARIANT_BYTES - 1) + '"', "longer than the 4 MiB"),
    ],
    ids=lambda text: str(text)[:20],
)
def test_a_variant_holds_what_spark_has_room_for(mode, text, expected):
    found = value(text, VARIANT, mode=mode)
    assert (found == text) if expected is None else (expected in str(found))


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
    with pytest.raises(SchemaMismatchError, match="those of JSON are text"):
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
