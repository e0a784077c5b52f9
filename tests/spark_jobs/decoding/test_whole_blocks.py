"""Json: a block that is parsed as a whole gives what its documents give one by one, and good blocks are."""

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spark_jobs.decoding import json_documents
from spark_jobs.decoding.json_documents import decode_documents, decode_json, parse_block
from tests.support.payloads import BAD, GOOD, NUMBERS, STRINGS
from tests.support.profiles import examples

MONEY = pa.decimal128(10, 2)
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("small", pa.int8()),
        pa.field("bytes", pa.binary()),
        pa.field("text", pa.string()),
        pa.field("is_new", pa.bool_()),
        pa.field("amount", pa.float64()),
        pa.field("ratio", pa.float32()),
        pa.field("price", MONEY),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("nested", pa.struct([pa.field("a", pa.int32(), nullable=False), ("b", pa.list_(pa.string()))])),
        pa.field("list", pa.list_(pa.struct([pa.field("price", MONEY), pa.field("day", pa.date32())]))),
    ]
)
NAMES = [f'"{name}"' for name in (*SCHEMA.names, "unknown", "", "\\u0069d", "a", "b")]
SPACE = st.sampled_from([*[""] * 5, " ", "\n", "\r\n", "\t", "\x0b", "\x0c", "\x00", "\x1c", "\xa0", "\u2028", "//"])
SCALARS = st.sampled_from([*NUMBERS, *STRINGS, "null", "true", "false", "True", "", "nulll"])


def _spaced(*parts):
    return st.tuples(*(part for one in parts for part in (SPACE, one))).map("".join)


def _listed(opening, items, closing):
    return st.tuples(
        st.lists(items, max_size=3), st.sampled_from([",", ",", ",", " , ", ",\n", ";", "", "}{", "} {", "}\n{"])
    ).map(lambda found: opening + found[1].join(found[0]) + closing)


def _members(values):
    return _spaced(st.sampled_from(NAMES), st.sampled_from([":", ":", ":", " : ", ""]), values)


VALUES = st.recursive(
    SCALARS, lambda inner: _listed("[", inner, "]") | _listed("{", _members(inner), "}"), max_leaves=6
)
ANY_OBJECTS = _spaced(_listed("{", _members(VALUES), "}"), st.just("")).map(str.encode)
GOOD_VALUES = {
    "id": ["7", "-1", "null", "9223372036854775807"],
    "small": ["127", "-128"],
    "text": ['"x"', '"NaN, Inf and }{"', '"level: Info"', '"\\u2028\\n"', '"\u2028é"', '""', "null"],
    "is_new": ["true", "false"],
    "amount": ["1", "1.5", "-0.0", "5e-324", "1e15"],
    "ratio": ["1", "0.1", "1e7"],
    "price": ["1.25", '"-2.67"', "99999999.99", "0"],
    "day": ['"2024-02-29"', '"0001-01-01"'],
    "at": ['"2024-02-29T12:00:00.5Z"', '"2024-02-29"'],
    "nested": ['{"a":1}', '{"b":["x",null],\n"a":-1}', "null"],
    "list": ["[]", '[{"price":0.12},null,{"day":"2024-02-29"}]'],
    "bytes": ['"AAEC"', '""', "null"],
    "unknown": ["[[{}]]", '"NaN"', "1e300", '{"id":[]}'],
}
GOOD_OBJECTS = st.builds(
    lambda chosen, comma, colon, head, tail: (
        head + "{" + comma.join(f'"{name}"{colon}{text}' for name, text in chosen) + "}" + tail
    ).encode(),
    st.lists(
        st.sampled_from([(name, text) for name, texts in GOOD_VALUES.items() for text in texts]),
        unique_by=lambda chosen: chosen[0],
        max_size=4,
    ),
    st.sampled_from([",", ", ", "\n,\t"]),
    st.sampled_from([":", " : ", ":\r\n"]),
    st.sampled_from(["", "", " ", "\n\x0b"]),
    st.sampled_from(["", "", "\r\n", "\x0c"]),
)
GOOD_DOCUMENTS = GOOD_OBJECTS | st.sampled_from([good % 7 for good in GOOD]) | st.none()
ODD_DOCUMENTS = (
    GOOD_DOCUMENTS
    | ANY_OBJECTS
    | st.sampled_from(BAD)
    | st.binary(max_size=6).map(lambda data: b"{" + data + b"}")
    | st.tuples(GOOD_OBJECTS, st.sampled_from([b"", b"\n", b" ", b",", b"\xef\xbb\xbf"]), GOOD_OBJECTS).map(b"".join)
)


def same(payloads):
    """The errors of a block, the same in one go and one by one, strict and lenient, by Arrow and by Python."""
    errors, _ = (same_alone(payloads, is_lenient) for is_lenient in (False, True))
    return errors


def same_alone(payloads, is_lenient):
    columns, errors = decode_json(payloads, SCHEMA, is_lenient=is_lenient)
    for column, field in zip(columns, SCHEMA):
        column.validate(full=True)
        assert column.type == field.type
        assert len(column) == len(payloads)
    for row, document in enumerate(payloads.to_pylist()):
        alone = pa.array([document], pa.binary())
        own = [column.slice(row, 1) for column in (*columns, errors)]
        for decode in (decode_json, decode_documents):
            found, error = decode(alone, SCHEMA, is_lenient=is_lenient)
            assert own == [*found, error], document
    return errors


@settings(max_examples=examples(150))
@given(st.lists(ODD_DOCUMENTS, max_size=6), st.integers(0, 3), st.integers(0, 3))
@example([b'{"text":"', b'"}'], 0, 0)
@example([b'{"id":1}{"id":2}', b""], 0, 0)
@example([b'{"id":1}\n{"id":2}'], 0, 0)
@example([b'{"nested":{}', b"{}}", b'{"id":1}'], 0, 0)
@example([b'{"unknown":[1,NaN]}', b'{"unknown":[1,\n-Inf]}'], 0, 0)
def test_a_block_is_what_its_documents_are(documents, before, behind):
    """Also where it is a slice of a larger array, whose other payloads are nobody's business."""
    around = pa.array([b"\xff"] * before + documents + [b"{"] * behind, pa.binary())
    same(around.slice(before, len(documents)))


@settings(max_examples=examples(100))
@given(st.lists(GOOD_DOCUMENTS, min_size=1, max_size=20))
def test_good_blocks_are_parsed_as_a_whole(documents):
    payloads = pa.array(documents, pa.binary())
    assert parse_block(payloads, SCHEMA) == decode_documents(payloads, SCHEMA, is_lenient=False)[0]


@pytest.mark.parametrize("bad", BAD, ids=lambda d: repr(d)[:40])
def test_one_bad_document_in_a_good_block(bad):
    """Its neighbours are some of the good documents, other ones for each bad one."""
    first = 2 * BAD.index(bad) % len(GOOD)
    good = [one % 7 for one in GOOD[first : first + 2]]
    errors = same(pa.array([*good, bad, None, *good], pa.binary()))
    assert [row for row, error in enumerate(errors.to_pylist()) if error] == [2]


def test_documents_that_are_no_objects_do_not_slow_down_the_others(monkeypatch):
    """Arrow parses the good documents of their block, also with white space around them."""
    alone = []

    def decode_alone(documents, *args, **options):
        alone.extend(documents.to_pylist())
        return decode_documents(documents, *args, **options)

    monkeypatch.setattr(json_documents, "decode_documents", decode_alone)
    good = [b'{"id": 1}', b' {"id": 2}\n', None, b'{"text": "a\\n}"}']
    bad = [b'{"id": ', b"", b"\xff", b"plain text", b"[1]"]
    columns, errors = decode_json(pa.array([*bad, *good, *bad], pa.binary()), SCHEMA, is_lenient=False)
    assert alone == bad * 2
    assert [error is None for error in errors.to_pylist()] == [False] * 5 + [True] * 4 + [False] * 5
    assert columns[0].to_pylist()[5:9] == [1, 2, None, None]


def test_nothing():
    columns, errors = decode_json(pa.array([], pa.binary()), SCHEMA, is_lenient=False)
    assert [column.type for column in columns] == [field.type for field in SCHEMA]
    assert [len(column) for column in (*columns, errors)] == [0] * (len(SCHEMA) + 1)
