"""What a command makes of ``--transform``; without Spark."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from spark_jobs.ledger.ledger import LedgerState
from stream_assets import (
    Avro,
    Debezium,
    ErrorPolicy,
    Json,
    JsonSchema,
    Keys,
    Protobuf,
    SchemaRegistry,
    StreamRun,
    stream_asset,
)
from stream_assets.cli.options import make_conversion
from stream_consumers.errors import InvalidOptionError
from tests.support.written_log import made_entry


def declared(name: str, **more: Any) -> Any:
    return stream_asset(
        source="memory://transforms/orders", group="g", table=f"lake/{name}", spec=dg.AssetSpec(name), **more
    )


@declared("plain")
def plain(batch: Any) -> Any:
    return batch


@declared("lenient", errors=ErrorPolicy(on_bad_rows="dead_letter"))
def lenient(batch: Any) -> Any:
    return batch


@declared("with_context")
def with_context(context: Any, batch: Any) -> Any:
    return batch


@declared("with_resource")
def with_resource(batch: Any, settings: Any) -> Any:
    return batch


@declared("body")
def body(stream: StreamRun) -> Any:
    yield from ()


def test_the_transform_of_an_asset_is_its_function() -> None:
    assert make_conversion(transform=f"{__name__}:plain").transform is plain.declared.ingestion.transform is not None


def test_what_becomes_of_bad_rows_is_what_is_said_or_what_the_asset_says() -> None:
    of_asset = {"transform": f"{__name__}:lenient"}
    found = [make_conversion(), make_conversion(**of_asset), make_conversion(**of_asset, on_bad_rows="fail")]
    assert [one.errors.on_bad_rows for one in found] == ["fail", "dead_letter", "fail"]


@pytest.mark.parametrize("name", ["with_context", "with_resource", "body"])
def test_an_asset_that_needs_dagster_is_refused_and_not_left_out(name: str) -> None:
    with pytest.raises(InvalidOptionError, match="needs a run of Dagster"):
        make_conversion(transform=f"{__name__}:{name}")


AVRO = '"long"'
PROTO = 'syntax = "proto3"; message A { int32 a = 1; } message B { int32 b = 1; }'
ROW = '{"type": "record", "name": "Value", "fields": [{"name": "id", "type": "long"}]}'
ENVELOPE = (
    f'{{"type": "record", "name": "Envelope", "fields": [{{"name": "before", "type": ["null", {ROW}]}}, '
    '{"name": "after", "type": ["null", "Value"]}, {"name": "op", "type": "string"}]}'
)
JSON_SCHEMA = '{"type": "object", "properties": {"id": {"type": "integer"}}}'


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ({"decode": "json", "schema": "id BIGINT"}, "", Json("id BIGINT")),
        ({"decode": "json", "schema": "id BIGINT", "json_mode": "strict"}, "", Json("id BIGINT", mode="strict")),
        ({"decode": "variant"}, "", Json()),
        ({"decode": "json", "schema": "id BIGINT", "schema_registry": ""}, "", Json("id BIGINT")),
        ({"decode": "avro", "schema_registry": "", "subject": "", "message": ""}, AVRO, Avro(AVRO)),
        ({"decode": "avro"}, AVRO, Avro(AVRO)),
        ({"decode": "protobuf", "message": "B"}, PROTO, Protobuf(PROTO, message="B")),
        ({"decode": "json-schema"}, JSON_SCHEMA, JsonSchema(JSON_SCHEMA)),
        ({"decode": "debezium", "schema": "id BIGINT"}, "", Debezium("id BIGINT")),
        ({"decode": "debezium"}, ENVELOPE, Debezium(Avro(ENVELOPE))),
    ],
)
def test_the_decoder_is_the_one_that_the_options_describe(
    tmp_path: Path, options: dict[str, Any], text: str, expected: Any
) -> None:
    if text:
        file = tmp_path / {"avro": "n.avsc", "protobuf": "b.proto"}.get(options["decode"], "n.json")
        file.write_text(text)
        options = {**options, "schema_file": str(file)}
    assert make_conversion(**options).decoder.ddl() == expected.ddl()


@pytest.mark.parametrize(("given", "scd_type"), [({}, 1), ({"stored_as_scd_type": "2"}, 2)])
def test_a_table_keeps_the_newest_row_of_a_key_or_all(given: dict[str, str], scd_type: int) -> None:
    assert make_conversion(keys="id", **given).keys == Keys(["id"], stored_as_scd_type=scd_type)


def test_a_registry_and_its_options_are_shown_nowhere() -> None:
    user = {"basic.auth.user.info": "me:s3cret"}
    made = make_conversion(
        decode="avro", schema_registry="http://registry:8081", registry_option=user, subject="orders-value"
    )
    assert made.decoder == Avro(registry=SchemaRegistry("http://registry:8081", options=user), subject="orders-value")
    assert "s3cret" not in repr(made)


@pytest.mark.parametrize(
    "options",
    [
        {"json_mode": "strict"},
        {"decode": "json"},
        {"decode": "variant", "schema": "id BIGINT"},
        {"decode": "avro"},
        {"decode": "debezium"},
        {"decode": "debezium", "schema": "id BIGINT", "schema_registry": "http://registry", "subject": "s"},
        {"decode": "avro", "subject": "orders-value"},
        {"decode": "avro", "registry_option": {"a": "b"}, "schema_file": "f"},
        {"decode": "avro", "schema_file": "f", "message": "M"},
        {"decode": "avro", "schema_registry": "http://registry", "subject": "s", "schema_file": "f"},
        {"decode": "text", "schema_file": "f"},
        {"schema_registry": "http://registry"},
        {"decode": "protobuf", "schema_file": "/no/such/file.proto"},
        {"stored_as_scd_type": "2"},
    ],
)
def test_options_of_schemas_that_do_not_go_together(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        make_conversion(**options)


def test_the_command_in_a_remedy_quotes_names_of_the_log() -> None:
    name = "orders;touch x"
    state = LedgerState(0, newest=made_entry(1, -1, transform=name))
    with pytest.raises(InvalidOptionError) as raised:
        make_conversion().check(state)
    assert f"MODULE:{name}" in shlex.split(raised.value.remedy.removesuffix("."))
