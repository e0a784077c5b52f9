"""A schema of a sample: its types, its remarks, and that the sample fits it."""

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructType

from spark_jobs.decoding.json_decoder import FieldFinder, Json
from spark_jobs.decoding.json_inference import MAX_FIELD_NAMES, MAX_LEVELS
from spark_jobs.reading.spark_types import arrow_schema, struct_type
from spark_jobs.writing.schema_evolution import names_of_delta, undeclared_values, with_columns_of, with_new_fields
from spark_jobs.writing.schema_inference import fitted, infer
from tests.support.payloads import NUMBERS, TIMES
from tests.support.profiles import examples


def inferred(*values):
    return infer([f'{{"v":{value}}}'.encode() for value in values])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "-9223372036854775808"], "bigint"),
        (["1", "null", "2.5"], "double"),
        (["NaN"], "string"),
        (["1.5", "NaN"], "string"),
        (["1e400"], "string"),
        (["9007199254740993", "0.5"], "string"),
        (["1", "9223372036854775808"], "string"),
        (["true", "false"], "boolean"),
        (['"2024-02-29"'], "date"),
        (['"2024-02-29"', '"2024-02-29T12:00:00.123456+02:00"'], "timestamp"),
        (['"2024-02-29T12:00:00.123456789+02:00"'], "string"),
        (['"2024-02-29 12:00:00 Europe/Paris"'], "timestamp"),
        (['"2024-02-30"'], "string"),
        (['"2024"'], "string"),
        (['"2024-02-29"', '"never"'], "string"),
        (["1", '"1"'], "string"),
        (["1", '{"a": 1}'], "string"),
        (["[1]", "[]", "[2.5]"], "ARRAY<double>"),
        (['[1, "x"]'], "ARRAY<string>"),
        (['{"a": 1}', '{"b": [{"c": "2024-01-01"}]}'], "STRUCT<a: bigint, b: ARRAY<STRUCT<c: date>>>"),
        (['{"a-b": 1, "c`d": 2}'], "STRUCT<`a-b`: bigint, `c``d`: bigint>"),
    ],
)
def test_types(values, kind):
    assert inferred(*values).ddl() == f"v {kind}"


@pytest.mark.parametrize("value", ["null", "{}", "[]", "[[null]]"])
def test_a_field_with_nothing_in_it_is_no_column(value):
    found = inferred(value)
    assert (found.ddl(), len(found.remarks)) == ("", 1)


def test_names_that_spark_takes_for_others_or_for_its_own_are_no_columns():
    refused = ("u\u017fer", "_\u017fequence", "_tmp_metadata_row_index", "__Delta_internal_x", "_metadata")
    refused += ('y"', "back\\slash", "_Stream_assets_reason", "_row_id_", "filePath")
    document = dict.fromkeys(("user", *refused, "metadata"), 1) | {"in": {"_metadata": 1}}
    assert infer([json.dumps(document).encode()]).ddl() == "user bigint, metadata bigint, in STRUCT<_metadata: bigint>"
    document = {"\u0130": 1, "i\u0307": 1, "in": {"\u0130": 1, "i\u0307": 1}}
    assert infer([json.dumps(document).encode()]).ddl() == "`\u0130` bigint, in STRUCT<`\u0130`: bigint>"


def test_a_schema_that_is_pasted_has_nothing_that_a_shell_or_a_template_would_run():
    found = infer([b"""{"it's": 1, "in": {"it's": 1}, "$(id)": 1, "{{ 7 * 7 }}": 1, "{%if": 1, "id": 1}"""])
    assert (found.ddl(), len(found.remarks)) == ("id bigint", 5)


@pytest.mark.spark
def test_a_column_that_a_table_has_is_filled_whatever_its_name_means_to_readers(spark):
    decoder = Json("id BIGINT")
    of_table = struct_type("id BIGINT, _metadata STRING")
    assert with_columns_of(FieldFinder(decoder), of_table, computed=frozenset()).decoder.ddl() == (
        "`id` bigint, `_metadata` string"
    )
    seen = undeclared_values(['{"_metadata": "x", "_change_type": "y"}'], decoder)
    grown = with_new_fields(
        FieldFinder(decoder), seen, table=of_table, own=decoder, computed=names_of_delta(of_table), any_name=False
    )
    assert (grown.decoder.ddl(), grown.known) == ("`id` bigint, `_metadata` string", {("_change_type",)})
    grown = with_columns_of(
        FieldFinder(Json("`i\u0307` INT")), struct_type("id INT, `\u0130` INT"), computed=frozenset()
    )
    assert grown.decoder.ddl() == "`i\u0307` int, `id` int"


def test_many_names_are_the_keys_of_a_map():
    ids = {f"u{number}": {"n": number / 2 if number % 2 else number} for number in range(MAX_FIELD_NAMES + 1)}
    assert inferred(json.dumps(ids)).ddl() == "v MAP<string, STRUCT<n: double>>"
    ids.popitem()
    assert inferred(json.dumps(ids)).ddl().startswith("v STRUCT<u0: STRUCT<n: bigint>, u1:")


def test_what_is_very_deep_is_text():
    depth = MAX_LEVELS + 1
    assert inferred("[" * depth + "1" + "]" * depth).ddl() == "v " + "ARRAY<" * MAX_LEVELS + "string" + ">" * MAX_LEVELS


def test_remarks_name_what_does_not_agree():
    found = infer(
        [
            b'{"id":1,"at":"2024-01-01","l":[{"a":1}]}',
            b'{"id":"x","at":"never","l":[{"a":{}}],"Id":2,"a b":1,"_shard":1,"":1}',
            None,
            b'{"id":null}',
            b"{",
            b"[1]",
        ]
    )
    assert (found.messages, found.refused) == (5, {"not a JSON object": 2})
    assert {field.name: (field.ddl, field.messages, field.remarks) for field in found.fields} == {
        "id": ("string", 2, ("id is whole number 1 time and text 1 time",)),
        "at": ("string", 2, ("at is date 1 time and text 1 time",)),
        "l": ("ARRAY<STRUCT<a: string>>", 2, ("l[].a is whole number 1 time and object 1 time",)),
        "a b": ("bigint", 1, ("Delta accepts this name only with delta.columnMapping.mode=name",)),
    }
    assert found.remarks == ["'' cannot be a column", "'Id' cannot be a column", "'_shard' cannot be a column"]


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
    table = StructType().add("amount", "decimal(10,2)")
    (amount,) = fitted(infer(payloads), payloads, table).fields
    assert (amount.ddl, len(amount.remarks)) == ("double", 1)
