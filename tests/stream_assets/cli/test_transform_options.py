"""What a command makes of ``--transform``; without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stream_assets import Avro, Json, JsonSchema, SchemaRegistry, StreamRun, stream_asset
from stream_assets.cli.schema_options import SchemaPlace
from stream_assets.cli.transform_options import make_rows
from stream_consumers.errors import InvalidOptionError


def declared(name: str, **more: Any) -> Any:
    return stream_asset(source="memory://transforms/orders", group="g", table=f"lake/{name}", name=name, **more)


@declared("plain")
def plain(batch: Any) -> Any:
    return batch


@declared("lenient", on_bad_rows="dead_letter")
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


def test_json_is_decoded_as_the_options_say() -> None:
    assert make_rows("json", "id BIGINT", None, None).decoder == Json("id BIGINT", mode="lenient")
    assert make_rows("json", "id BIGINT", None, None, json_mode="strict").decoder == Json("id BIGINT", mode="strict")
    assert make_rows("variant", None, None, None).decoder == Json()
    for decode, schema, mode in ((None, None, "strict"), ("variant", None, "lenient"), ("variant", "id BIGINT", None)):
        with pytest.raises(InvalidOptionError, match="--decode json"):
            make_rows(decode, schema, None, None, json_mode=mode)


def test_the_transform_of_an_asset_is_its_function() -> None:
    assert make_rows(None, None, f"{__name__}:plain", None).transform is plain.ingestion.transform is not None


def test_what_becomes_of_bad_rows_is_what_is_said_or_what_the_asset_says() -> None:
    of_asset = (None, None, f"{__name__}:lenient", None)
    found = [make_rows(None, None, None, None), make_rows(*of_asset), make_rows(*of_asset, on_bad_rows="fail")]
    assert [maker.options["on_bad_rows"].value for maker in found] == ["fail", "dead_letter", "fail"]


@pytest.mark.parametrize("name", ["with_context", "with_resource", "body"])
def test_an_asset_that_needs_dagster_is_refused_and_not_left_out(name: str) -> None:
    with pytest.raises(InvalidOptionError, match=rf"{name} needs a run of Dagster: .*Run it there"):
        make_rows(None, None, f"{__name__}:{name}", None)


def schema_file(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_each_format_and_its_file(tmp_path: Path) -> None:
    avro = schema_file(tmp_path, "n.avsc", '"long"')
    assert make_rows("avro", None, None, None, SchemaPlace(schema_file=avro)).decoder == Avro('"long"')
    text = 'syntax = "proto3"; message A { int32 a = 1; } message B { int32 b = 1; }'
    proto = schema_file(tmp_path, "b.proto", text)
    made = make_rows("protobuf", None, None, None, SchemaPlace(schema_file=proto, message="B"))
    assert made.decoder.ddl() == "`b` INT"
    described = '{"type": "object", "properties": {"id": {"type": "integer"}}}'
    document = schema_file(tmp_path, "b.json", described)
    assert make_rows("json-schema", None, None, None, SchemaPlace(schema_file=document)).decoder == JsonSchema(
        described
    )


def test_a_registry_and_its_options_are_shown_nowhere(tmp_path: Path) -> None:
    place = SchemaPlace("http://registry:8081", {"basic.auth.user.info": "me:s3cret"}, "orders-value")
    decoder = make_rows("avro", None, None, None, place).decoder
    registry = SchemaRegistry("http://registry:8081", options={"basic.auth.user.info": "me:s3cret"})
    assert decoder == Avro(registry=registry, subject="orders-value")
    assert "s3cret" not in repr(place) + repr(decoder)


@pytest.mark.parametrize(
    ("decode", "place", "why"),
    [
        ("avro", SchemaPlace(), "--decode avro needs a schema"),
        ("avro", SchemaPlace("http://registry"), "--decode avro needs a schema"),
        ("avro", SchemaPlace(subject="orders-value"), "--subject is for a schema registry, and none is given"),
        (
            "avro",
            SchemaPlace(registry_options={"a": "b"}, schema_file="f"),
            "--registry-option is for a schema registry",
        ),
        ("avro", SchemaPlace(schema_file="f", message="M"), "--message is for --decode protobuf"),
        ("avro", SchemaPlace("http://registry", subject="s", schema_file="f"), "schema_file and subject are given"),
        ("text", SchemaPlace(schema_file="f"), "--schema-file is for --decode avro, protobuf, json-schema"),
        (None, SchemaPlace("http://registry"), "--schema-registry is for --decode avro"),
        (None, SchemaPlace(message="M"), "--message is for --decode protobuf"),
        ("protobuf", SchemaPlace(schema_file="/no/such/file.proto"), "cannot be read: No such file"),
    ],
)
def test_options_of_schemas_that_do_not_go_together(decode: str | None, place: SchemaPlace, why: str) -> None:
    with pytest.raises(InvalidOptionError, match=why):
        make_rows(decode, None, None, None, place)
