"""Fields that nobody declared are kept as they were written, and those that were declared are not."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding.json_decoder import (
    MAX_FORM_CHARACTERS,
    FieldFinder,
    Json,
    Path,
    has_content,
    merge_objects,
    rescued,
    share_values,
)
from spark_jobs.decoding.json_documents import read_object
from spark_jobs.decoding.json_inference import FieldStats
from spark_jobs.decoding.json_values import MAX_JSON_LEVELS
from tests.support.profiles import examples

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("shop", pa.struct([("name", pa.string()), ("at", pa.struct([("zip", pa.string())]))])),
        ("items", pa.list_(pa.struct([("price", pa.float64())]))),
    ]
)


@pytest.mark.parametrize(
    ("document", "kept"),
    [
        (b'{"id": 1}', None),
        (b'{"id": 1, "new": null, "shop": {"other": null}}', None),
        (b'{"id": 1, "new": 1.10}', '{"new": 1.10}'),
        (b'{"new": 123456789012345678901234567890}', '{"new": 123456789012345678901234567890}'),
        (b'{"new": 1e400, "more": -0.0}', '{"new": 1e400, "more": -0.0}'),
        (b'{"new": {"a": [1, {"b": null}], "c": {}}}', '{"new": {"a": [1, {"b": null}], "c": {}}}'),
        (b'{"shop": {"name": "a", "at": {"zip": "1", "new": true}}}', '{"shop": {"at": {"new": true}}}'),
        (b'{"items": [{"price": 1}, {"price": 2, "new": "x"}]}', '{"items": [null, {"new": "x"}]}'),
        (b'{"ID": 1}', '{"ID": 1}'),
        (b'{"new": "\\ud83d\\ude00 \\"\\n"}', '{"new": "\\ud83d\\ude00 \\"\\n"}'),
        (b'{"new": NaN}', '{"new": "NaN"}'),
        (b' \n{"new": 1} ', '{"new": 1}'),
        (b"[1]", None),
        (b"no JSON", None),
        (b"\xff", None),
        (b'{"a":' * 3000, None),
        (None, None),
    ],
)
def test_what_is_kept(document: bytes | None, kept: str | None) -> None:
    payloads = pa.array([document, b'{"id": 2}'], pa.binary())
    assert rescued(payloads, SCHEMA).fields.to_pylist() == [kept, None]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(
    st.sampled_from(["id", "shop", "items", "new", "Id"]) | st.text(max_size=3), values, max_size=5
)


@settings(max_examples=examples(40))
@given(st.lists(objects, max_size=20))
def test_what_is_kept_of_a_document_does_not_depend_on_its_neighbours(documents: list[dict[str, Any]]) -> None:
    payloads = [json.dumps(document).encode() for document in documents]
    together = rescued(pa.array(payloads, pa.binary()), SCHEMA).fields.to_pylist()
    assert together == [rescued(pa.array([payload], pa.binary()), SCHEMA).fields[0].as_py() for payload in payloads]
    for document, kept in zip(documents, together):
        found = json.loads(kept or "{}")
        assert {name: found.get(name) for name in document if name not in SCHEMA.names} == {
            name: value for name, value in document.items() if name not in SCHEMA.names
        }
        assert found.keys() <= document.keys()


def test_a_decoder_has_one_column_more() -> None:
    decoder = Json("id BIGINT", rescue=True)
    assert decoder.ddl() == "id BIGINT, _rescued STRING"
    schema = pa.schema([("id", pa.int64()), ("_rescued", pa.string())])
    decoded = decoder.decode(pa.array([b'{"id": 1, "x": 2}', b'{"id": "no", "x": 2}'], pa.binary()), schema)
    assert [column.to_pylist() for column in decoded.columns] == [[1, None], ['{"x": 2}', '{"x": 2}']]
    assert decoded.errors.to_pylist()[0] is None
    assert decoded.errors.to_pylist()[1] is not None


TWICE = [
    b'{"id":1,"tax":1,"tax":2}',
    b'{"id":1,"shop":{"zip":1,"zip":2}}',
    b'{"id":1,"x":{"a":1,"a":2}}',
    b'{"id":1,"x":[{"a":1,"a":2}]}',
]


@pytest.mark.parametrize("document", TWICE)
def test_a_field_without_a_column_that_is_there_twice_is_an_error(document: bytes) -> None:
    schema = pa.schema([("id", pa.int64()), ("shop", pa.struct([("name", pa.string())]))])
    payloads = pa.array([b'{"id":1,"tax":1}', document], pa.binary())
    rescuing = Json("id BIGINT, shop STRUCT<name: STRING>", rescue=True)
    found = rescuing.decode(payloads, schema.append(pa.field("_rescued", pa.string())))
    assert [error is None for error in found.errors.to_pylist()] == [True, False]
    finder = FieldFinder(Json("id BIGINT, shop STRUCT<name: STRING>"))
    assert finder.decode(payloads, schema).errors[1].as_py() is not None


@pytest.mark.parametrize("depth", [1000, 100_000])
@pytest.mark.parametrize("known", [None, ()])
def test_fields_beside_one_that_is_nested_too_deep_are_not_left_out(depth: int, known: Collection[Path] | None) -> None:
    document = b'{"id":1,"tax":1.10,"extra":%s}' % (b"[" * depth + b"]" * depth)
    found = rescued(pa.array([document]), pa.schema([("id", pa.int64())]), known)
    assert (found.fields.to_pylist(), found.errors.to_pylist()) == ([None], ["nested too deep"])


def test_a_name_that_is_too_long_for_a_column_is_found_by_none() -> None:
    schema = pa.schema([("id", pa.int64())])
    documents = pa.array([b'{"id":1,"%s":1}' % (b"x" * length) for length in (1000, 1001, 1 << 20)], pa.binary())
    found = FieldFinder(Json("id BIGINT")).decode(documents, schema)
    assert found.errors.is_null().to_pylist() == [False, True, True]
    kept = Json("id BIGINT", rescue=True).decode(documents, schema.append(pa.field("_rescued", pa.string())))
    assert kept.columns[1].null_count == 0


def nested(levels: int) -> bytes:
    return b"[" * levels + b"1" + b"]" * levels


@pytest.mark.parametrize(("levels", "is_kept"), [(MAX_JSON_LEVELS, True), (MAX_JSON_LEVELS + 1, False)])
def test_what_is_kept_of_a_document_has_a_limit_of_levels(levels: int, is_kept: bool) -> None:
    """Python's own limit counts the callers too, so that a worker of Spark would have another one."""
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("_rescued", pa.string())])
    payloads = pa.array([b'{"id":1,"x":%s}' % nested(levels - 1), b'{"id":1,"text":%s}' % nested(levels)])
    decoder = Json("id BIGINT, text STRING", rescue=True)
    for calls in (0, 300):
        decoded = below(calls, lambda: decoder.decode(payloads, schema))
        assert decoded.errors.is_null().to_pylist() == [is_kept, is_kept]


def below(calls: int, function: Any) -> Any:
    """Call a function from within so many calls."""
    return below(calls - 1, function) if calls else function()


def test_all_that_is_kept_can_be_merged() -> None:
    deepest = f'{{"x": {nested(MAX_JSON_LEVELS - 1).decode()}}}'
    chain = '{"x": ' * (MAX_JSON_LEVELS - 1) + '{"%s": 1}' + "}" * (MAX_JSON_LEVELS - 1)
    # A column may be a VARIANT within a STRUCT.
    for one, other in ((deepest, '{"y": 1}'), (deepest, f'{{"y": {deepest}}}'), (chain % "a", chain % "b")):
        assert not below(200, lambda one=one, other=other: share_values(one, other))
        merged = below(200, lambda one=one, other=other: merge_objects(one, other))
        assert json.loads(merged).keys() == json.loads(one).keys() | json.loads(other).keys()
    assert share_values(chain % "a", chain % "a")


def shape(seen: FieldStats) -> Any:
    """What decides the columns of a field."""
    kinds = {"text" if kind in ("date", "time") else kind for kind in seen.kinds}
    parts = [seen.values and shape(seen.values), seen.items and shape(seen.items)]
    return kinds, seen.digits > 15, seen.is_wide, {name: shape(one) for name, one in seen.fields.items()}, parts


def forms_and_documents(payloads: list[bytes]) -> tuple[FieldStats, FieldStats]:
    """The statistics of what the driver reads, and of the whole messages."""
    found, whole = FieldStats(), FieldStats()
    for payload, form in zip(payloads, rescued(pa.array(payloads), pa.schema([]), ()).fields.to_pylist()):
        if form is not None:
            assert len(form) <= MAX_FORM_CHARACTERS
            found.add(read_object(form), pa.struct([]))
            whole.add(read_object(payload.decode()), pa.struct([]))
    return found, whole


ODD = [
    *("1e400", "1e3", "-0.0", "NaN", "-Infinity", "9223372036854775808", "-9223372036854775808", "1" * 400, "true"),
    *('"2024-02-29"', "[1, [], {}, null, 1.5]", '[{"a": 1}, {"b": 2}, {"a": 1}, {"a": ""}]', "123456789012345.5"),
    *("[" * 98 + "1" + "]" * 98, "[[[[1], [2]]], [[]], 3]", '{"in": {"a": [], "b": {}, "c": null, "d": 1}}'),
    json.dumps({f"id-{number}": {"n": number % 3 or None} for number in range(5000)}),
]


def test_the_driver_reads_no_values_and_makes_the_same_columns_without_them() -> None:
    for text in ODD:
        found, whole = forms_and_documents([b'{"x": %s}' % text.encode()])
        assert shape(found) == shape(whole), text
    many = b'{"id":1,"x":["secret",%s"x"]}' % (b"[],1.5," * 100_000)
    finder, schema = FieldFinder(Json("id BIGINT")), pa.schema([("id", pa.int64())])
    assert finder.decode(pa.array([many]), schema).undeclared.to_pylist() == ['{"x": ["", [], 0.5]}']
    names = [b'{"k%d": 1}' % number for number in range(100_000)]
    decoded = finder.decode(pa.array([b'{"x": [%s]}' % b",".join(names), b'{"x": 1}']), schema)
    assert decoded.undeclared.to_pylist() == [None, '{"x": 1}'], "too many to be read by the driver"
    assert None not in decoded.errors.to_pylist()


@settings(max_examples=examples(40))
@given(st.lists(st.dictionaries(st.text(max_size=3), values, max_size=5), max_size=10))
def test_forms_of_documents_get_their_columns(documents: list[dict[str, Any]]) -> None:
    payloads = [json.dumps({name: one for name, one in each.items() if has_content(one)}) for each in documents]
    found, whole = forms_and_documents([payload.encode() for payload in payloads])
    assert shape(found) == shape(whole)
