"""JSON with a JSON Schema: the columns of each type, references, the registry's serializer, and validation."""

import json
import sys
from datetime import date, datetime, timezone

import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding.json_schema import JsonSchema
from spark_jobs.decoding.schema_registry import SchemaRegistry
from stream_consumers.errors import MissingDependencyError, SchemaMismatchError
from tests.support.arrow_columns import decode
from tests.support.profiles import examples

ORDER = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Order",
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0},
        "user": {"type": ["null", "string"]},
        "at": {"type": "string", "format": "date-time"},
        "lines": {"type": "array", "items": {"$ref": "#/definitions/Line"}},
    },
    "required": ["id"],
    "definitions": {"Line": {"type": "object", "properties": {"count": {"type": "integer"}}}},
}


def of(schema, **more):
    return {"type": "object", "properties": {"f": schema}, **more}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "boolean"}, "BOOLEAN"),
        ({"type": "integer"}, "BIGINT"),
        ({"type": "integer", "format": "int32"}, "INT"),
        ({"type": "integer", "connect.type": "int8"}, "TINYINT"),
        ({"type": "number"}, "DOUBLE"),
        ({"type": "number", "format": "float"}, "FLOAT"),
        ({"type": "string"}, "STRING"),
        ({"type": "string", "format": "date-time"}, "TIMESTAMP"),
        ({"type": "string", "format": "date"}, "DATE"),
        ({"type": "string", "format": "uuid"}, "STRING"),
        ({"type": "string", "contentEncoding": "base64"}, "BINARY"),
        ({"type": "string", "connect.type": "bytes"}, "BINARY"),
        ({"type": ["null", "integer"]}, "BIGINT"),
        ({"type": ["integer", "string"]}, "STRING"),
        ({"type": "null"}, "STRING"),
        ({"enum": ["a", "b", None]}, "STRING"),
        ({"enum": [1, 2]}, "BIGINT"),
        ({"const": True}, "BOOLEAN"),
        ({"oneOf": [{"type": "null"}, {"type": "integer"}]}, "BIGINT"),
        ({"anyOf": [{"type": "integer"}, {"type": "integer", "minimum": 7}]}, "BIGINT"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "STRING"),
        ({"allOf": [{"type": "integer"}]}, "BIGINT"),
        ({"type": "array", "items": {"type": "integer"}}, "ARRAY<BIGINT>"),
        ({"type": "array"}, "STRING"),
        ({"type": "array", "items": [{"type": "integer"}, {"type": "string"}]}, "STRING"),
        (of({"type": "integer"}), "STRUCT<`f`: BIGINT>"),
        ({"properties": {"f": {"type": "integer"}}}, "STRUCT<`f`: BIGINT>"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "MAP<STRING, BIGINT>"),
        ({"type": "object"}, "STRING"),
        ({"$ref": "#/definitions/Some"}, "STRUCT<`f`: DOUBLE>"),
        ({"oneOf": [{"type": "null"}, {"$ref": "#/definitions/Some"}]}, "STRUCT<`f`: DOUBLE>"),
        ({"type": "object", "properties": {"a": {"$ref": "#/definitions/Some"}}}, "STRUCT<`a`: STRUCT<`f`: DOUBLE>>"),
        (True, "STRING"),
        ({}, "STRING"),
    ],
)
def test_the_type_of_each_column(schema, kind):
    assert JsonSchema(of(schema, definitions={"Some": of({"type": "number"})})).ddl() == f"`f` {kind}"


NODE = of({"$ref": "#"})


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (NODE, "contains itself: #"),
        (
            of(
                {"type": "array", "items": {"$ref": "#/definitions/A"}},
                definitions={"A": of({"$ref": "#/definitions/A"})},
            ),
            "itself",
        ),
        ({"type": "string"}, "does not describe an object with properties"),
        ({"type": "object"}, "does not describe an object with properties"),
        ("{", "cannot be used: JSONDecodeError"),
        (of({"$ref": "#/definitions/Gone"}), "refers to #/definitions/Gone, which does not exist"),
        (of({"$ref": "other.json"}), r"refers to other\.json, which does not exist"),
        ({"type": "object", "properties": {"a": {}, "A": {}}}, "field 'A' twice"),
        ({"type": "object", "properties": {"\u0130": {}, "i\u0307": {}}}, "twice"),
    ],
)
def test_schemas_without_columns_are_refused_at_once(schema, why):
    with pytest.raises(SchemaMismatchError, match=why):
        JsonSchema(schema)


def test_payloads_are_read_as_json():
    moment = datetime(2024, 2, 29, 12, 30, tzinfo=timezone.utc)
    good = b'{"id":7,"user":null,"at":"2024-02-29T12:30:00Z","lines":[{"count":2}],"more":1}'
    rows, errors = decode(JsonSchema(ORDER), [good, b"{", None, b'{"id":"x"}', b"{}"])
    assert rows[0] == {"id": 7, "user": None, "at": moment, "lines": [{"count": 2}]}
    assert rows[2] == rows[4] == dict.fromkeys(rows[0])
    assert [error is None for error in errors] == [True, False, True, False, True]


def test_what_has_no_type_of_its_own_is_text():
    properties = {
        "any": {"anyOf": [{"type": "integer"}, {"type": "object"}]},
        "free": {"type": "object"},
        "numbers": {"type": "object", "additionalProperties": {"type": "integer"}},
        "bytes": {"type": "string", "contentEncoding": "base64"},
    }
    decoder = JsonSchema({"type": "object", "properties": properties})
    payloads = [
        b'{"any":{"a": 1.10},"free":{"b":[]},"numbers":{"x":1,"y":2},"bytes":"AP8="}',
        b'{"any":7,"numbers":{}}',
        b'{"numbers":{"x":"y"}}',
    ]
    rows, errors = decode(decoder, payloads)
    assert errors[:2] == [None, None]
    assert errors[2] is not None
    assert rows[0] == {"any": '{"a": 1.10}', "free": '{"b": []}', "numbers": [("x", 1), ("y", 2)], "bytes": b"\0\xff"}
    assert rows[1] == {"any": "7", "free": None, "numbers": [], "bytes": None}


def test_the_file_of_a_schema(tmp_path):
    path = tmp_path / "order.json"
    path.write_text(json.dumps(of({"type": "string", "format": "date"})))
    assert decode(JsonSchema(schema_file=path), [b'{"f":"2024-02-29"}']) == ([{"f": date(2024, 2, 29)}], [None])


def test_what_a_schema_does_not_allow_is_told_if_asked():
    strict, lax = JsonSchema(ORDER, validate=True), JsonSchema(ORDER)
    payloads = [b'{"id":7}', b'{"id":-1}', b"{}", None, b"{", b'{"id":7,"lines":[{"count":1.5}]}']
    rows, errors = decode(strict, payloads)
    assert errors[0] is errors[3] is None
    assert errors[1] == "'$.id': -1 is less than the minimum of 0"
    assert errors[2] == "'$': 'id' is a required property"
    assert errors[4] == decode(lax, payloads)[1][4] is not None
    assert [error is None for error in decode(lax, payloads)[1]][:4] == [True] * 4
    assert rows[0]["id"] == 7
    with pytest.raises(SchemaMismatchError):
        decode(JsonSchema(of({"type": "integer", "minimum": "x"}), validate=True), [b'{"f":1}'])


def test_without_the_library_nothing_is_validated(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(MissingDependencyError, match=r"stream-assets\[json-schema\]"):
        JsonSchema(ORDER, validate=True)
    assert JsonSchema(ORDER).ddl().startswith("`id`")


class Topic:
    """A topic of a registry, and what its serializer writes."""

    def __init__(self, registry):
        self.registry = SchemaRegistry(registry.url, options={"max.retries": 0})
        self.url = registry.url

    def written(self, schema, *rows):
        with SchemaRegistryClient({"url": self.url}) as client:
            write = JSONSerializer(schema if isinstance(schema, Schema) else json.dumps(schema), client)
            return [write(row, SerializationContext("orders", MessageField.VALUE)) for row in rows]

    def decoder(self, **more):
        return JsonSchema(registry=self.registry, subject="orders-value", **more).resolved()


def test_what_the_serializer_of_the_registry_has_written(registry):
    topic = Topic(registry)
    row = {"id": 7, "user": "ada", "at": "2024-02-29T12:30:00Z", "lines": [{"count": 2}, {}]}
    good, other = topic.written(ORDER, row, {"id": 8})
    avro = b"\0\0\0\0" + bytes([registry.register("avro", '"long"')])
    rows, errors = decode(
        topic.decoder(), [good, None, other, good[5:], avro + good[5:], b"\0\0\0\0\x63" + good[5:], good[:-1], good]
    )
    assert [row["id"] for row in rows] == [7, None, 8, None, None, None, None, 7]
    assert rows[0]["lines"] == [{"count": 2}, {"count": None}]
    assert errors[0] is errors[1] is errors[2] is errors[7] is None
    assert errors[3:6] == [
        "the first byte is 123, not the 0 before a schema id",
        "the schema is of format AVRO, not JSON",
        f"the schema registry {registry.url} has no schema id 99",
    ]
    assert errors[6] is not None


def test_payloads_are_validated_with_the_schema_of_their_id(registry):
    topic = Topic(registry)
    (first,) = topic.written(of({"type": "integer"}), {"f": -1})
    (second,) = topic.written(of({"type": "integer", "minimum": 0}), {"f": 1})
    bad = second[:5] + first[5:]
    rows, errors = decode(topic.decoder(validate=True), [first, second, bad])
    assert errors == [None, None, "'$.f': -1 is less than the minimum of 0"]
    assert [row["f"] for row in rows][:2] == [-1, 1]


def test_schemas_that_refer_to_others(registry):
    topic = Topic(registry)
    money = {"$schema": "http://json-schema.org/draft-07/schema#", **of({"type": "integer", "minimum": 0})}
    registry.register("money", json.dumps(money), "JSON")
    order = Schema(json.dumps(of({"$ref": "money.json"})), "JSON", [SchemaReference("money.json", "money", 1)])
    (payload,) = topic.written(order, {"f": {"f": 7}})
    decoder = topic.decoder(validate=True)
    assert decoder.ddl() == "`f` STRUCT<`f`: BIGINT>"
    bad = payload.replace(b"7", b"-7")
    assert decode(decoder, [payload, bad])[1] == [None, "'$.f.f': -7 is less than the minimum of 0"]


_scalars = st.sampled_from(
    [("integer", st.integers(-(2**63), 2**63 - 1)), ("string", st.text(max_size=5)), ("boolean", st.booleans())]
)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_schema_and_its_values(data):
    def drawn(depth):
        kind = data.draw(st.sampled_from(["scalar", "array", "object"] if depth else ["scalar"]))
        if kind == "scalar":
            name, values = data.draw(_scalars)
            return {"type": [name, "null"]}, data.draw(values | st.none())
        if kind == "array":
            schema, _ = drawn(0)
            return {"type": "array", "items": schema}, []
        parts = {
            name: drawn(depth - 1) for name in data.draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True))
        }
        schema = {"type": "object", "properties": {name: part for name, (part, _) in parts.items()}}
        return schema, {name: value for name, (_, value) in parts.items()}

    parts = {name: drawn(2) for name in ("x", "y")}
    schema = {"type": "object", "properties": {name: part for name, (part, _) in parts.items()}}
    value = {name: one for name, (_, one) in parts.items()}
    payload = json.dumps(value).encode()
    assert decode(JsonSchema(schema), [payload, b"", payload])[0][::2] == [value, value]
