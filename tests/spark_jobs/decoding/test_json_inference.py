"""A schema of a sample: its types, what is told of it, and that the sample fits it."""

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.json_inference import MOST_LEVELS, MOST_NAMES, fitted, infer
from spark_jobs.reading.spark_types import arrow_schema, struct_type
from tests.support.payloads import NUMBERS, TIMES
from tests.support.profiles import examples


def inferred(*values, taken=()):
    return infer([f'{{"v":{value}}}'.encode() for value in values], taken=taken)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "-9223372036854775808"], "BIGINT"),
        (["1", "null", "2.5"], "DOUBLE"),
        (["NaN"], "STRING"),
        (["1.5", "NaN"], "STRING"),
        (["1e400"], "STRING"),
        (["9007199254740993", "0.5"], "STRING"),
        (["1", "9223372036854775808"], "DECIMAL(38,0)"),
        (["9" * 39], "STRING"),
        (["true", "false"], "BOOLEAN"),
        (['"2024-02-29"'], "DATE"),
        (['"2024-02-29"', '"2024-02-29T12:00:00.123456+02:00"'], "TIMESTAMP"),
        (['"2024-02-29T12:00:00.123456789+02:00"'], "STRING"),
        (['"2024-02-29 12:00:00 Europe/Paris"'], "TIMESTAMP"),
        (['"2024-02-30"'], "STRING"),
        (['"2024"'], "STRING"),
        (['"2024-02-29"', '"never"'], "STRING"),
        (["1", '"1"'], "STRING"),
        (["1", "true"], "STRING"),
        (["1", "{}"], "VARIANT"),
        (["[]", "{}"], "VARIANT"),
        (["{}"], "VARIANT"),
        (["[]"], "ARRAY<STRING>"),
        (["[1]", "[]", "[2.5]"], "ARRAY<DOUBLE>"),
        (['[1, "x"]'], "ARRAY<STRING>"),
        (["null"], "STRING"),
        (['{"a": 1}', '{"b": [{"c": "2024-01-01"}]}'], "STRUCT<a: BIGINT, b: ARRAY<STRUCT<c: DATE>>>"),
        (['{"a-b": 1, "c`d": 2}'], "STRUCT<`a-b`: BIGINT, `c``d`: BIGINT>"),
    ],
)
def test_types(values, kind):
    assert inferred(*values).ddl() == f"v {kind}"


def test_many_names_are_the_keys_of_a_map():
    ids = {f"u{number}": {"n": number / 2 if number % 2 else number} for number in range(MOST_NAMES + 1)}
    assert inferred(json.dumps(ids)).ddl() == "v MAP<STRING, STRUCT<n: DOUBLE>>"
    ids.popitem()
    assert inferred(json.dumps(ids)).ddl().startswith("v STRUCT<u0: STRUCT<n: BIGINT>, u1:")


def test_what_is_very_deep_is_a_variant():
    depth = MOST_LEVELS + 1
    assert (
        inferred("[" * depth + "1" + "]" * depth).ddl() == "v " + "ARRAY<" * MOST_LEVELS + "VARIANT" + ">" * MOST_LEVELS
    )


def test_what_does_not_agree_is_told():
    found = infer(
        [
            b'{"id":1,"at":"2024-01-01","l":[{"a":1}]}',
            b'{"id":"x","at":"never","l":[{"a":{}}],"Id":2,"a b":1,"_shard":1,"":1}',
            None,
            b'{"id":null}',
            b"{",
            b"[1]",
        ],
        taken=("_shard",),
    )
    assert (found.messages, found.refused) == (5, {"not a JSON object": 2})
    told = {field.name: (field.ddl, field.messages, field.remarks) for field in found.fields}
    assert told == {
        "id": ("STRING", 2, ("id is whole number 1 time and text 1 time",)),
        "at": ("STRING", 2, ("at is date 1 time and text 1 time, like 'never'",)),
        "l": ("ARRAY<STRUCT<a: VARIANT>>", 2, ("l[].a is whole number 1 time and object 1 time",)),
        "a b": ("BIGINT", 1, ()),
    }
    assert list(found.remarks) == [
        "'Id' differs from 'id' only in upper and lower case",
        "'' is no name of a column",
        "'a b': Delta takes this name with delta.columnMapping.mode=name only",
        "'_shard' is a name of stream-assets",
    ]


SCALARS = st.sampled_from(
    [
        *(n for n in NUMBERS if n in ("NaN", "Infinity") or n[0] in "-0123456789"),
        *map(json.dumps, TIMES),
        "true",
        "null",
    ]
)


def written(fields):
    members = ",".join(f'"{name}":{text}' for name, text in fields.items())
    return f"{{{members}}}"


VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda found: f"[{','.join(found)}]")
        | st.dictionaries(st.sampled_from(["a", "b", "B", "select", "x-y"]), inner, max_size=3).map(written)
    ),
    max_leaves=5,
)


@pytest.mark.spark
@settings(max_examples=examples(60))
@given(st.lists(st.dictionaries(st.sampled_from(["interval", "order", "é", "A", "a"]), VALUES), min_size=1, max_size=4))
def test_a_sample_fits_the_schema_that_is_made_of_it(spark, sample):
    payloads = [written(one).encode() for one in sample]
    found = infer(payloads)
    if not found.fields:
        return
    wanted = arrow_schema(struct_type(found.ddl()))
    decoded = Json(found.ddl()).decode(pa.array(payloads, pa.binary()), wanted)
    reasons = [error for error in decoded.errors.to_pylist() if error and "is not JSON" not in error]
    assert len(reasons) == sum(found.refused.values()), (found.ddl(), payloads)


def test_a_payload_that_crashes_the_decoder_does_not_fit_the_type_of_a_table() -> None:
    payloads = [b'{"amount":1.5}', b'{"amount":1e-9999999}']
    column = pa.field("amount", pa.decimal128(10, 2))
    (amount,) = fitted(infer(payloads), payloads, {"amount": (column, "DECIMAL(10,2)")}).fields
    assert (amount.ddl, len(amount.remarks)) == ("DOUBLE", 1)
