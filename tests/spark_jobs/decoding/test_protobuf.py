"""Protobuf: every type, wherever the schema is from, and bytes that are damaged."""

import pickle
import struct
import sys
from datetime import datetime, timedelta, timezone
from decimal import Decimal

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.protobuf import Protobuf, message_check
from spark_jobs.decoding.protobuf_schema import MessageSchema, compiled
from spark_jobs.decoding.schema_registry import SchemaRegistry
from stream_consumers.errors import InvalidOptionError, MissingDependencyError, SchemaMismatchError
from tests.support.arrow_columns import CRASHED, decode, decode_isolated_each
from tests.support.profiles import examples
from tests.support.schema_registry import schema_registry

TYPES = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/wrappers.proto";
import "google/protobuf/struct.proto";
import "google/protobuf/any.proto";
import "google/type/money.proto";

enum Kind { UNKNOWN = 0; NEW = 1; OLD = 2; }
message Empty {}
message Item { string name = 1; optional int32 count = 2; }
message Types {
  double f_double = 1;
  float f_float = 2;
  int32 f_int32 = 3;
  int64 f_int64 = 4;
  uint32 f_uint32 = 5;
  uint64 f_uint64 = 6;
  sint32 f_sint32 = 7;
  sint64 f_sint64 = 8;
  fixed32 f_fixed32 = 9;
  fixed64 f_fixed64 = 10;
  sfixed32 f_sfixed32 = 11;
  sfixed64 f_sfixed64 = 12;
  bool f_bool = 13;
  string f_string = 14;
  bytes f_bytes = 15;
  Kind f_enum = 16;
  Item f_item = 17;
  repeated int64 f_longs = 18;
  repeated Item f_items = 19;
  map<string, Item> f_by_name = 20;
  map<uint64, bool> f_by_number = 21;
  optional string f_optional = 22;
  oneof choice { string f_one = 23; Item f_other = 24; }
  google.protobuf.Timestamp f_timestamp = 25;
  google.protobuf.Duration f_duration = 26;
  google.protobuf.Int64Value f_wrapped = 27;
  repeated google.protobuf.Timestamp f_timestamps = 28;
  google.protobuf.Struct f_struct = 29;
  google.protobuf.Any f_any = 30;
  google.type.Money f_money = 31;
  Empty f_empty = 32;
  repeated Kind f_kinds = 33;
  google.protobuf.UInt64Value f_wrapped_uint64 = 34;
}
"""
KINDS = {
    "f_double": "DOUBLE",
    "f_float": "FLOAT",
    "f_int32": "INT",
    "f_int64": "BIGINT",
    "f_uint32": "BIGINT",
    "f_uint64": "DECIMAL(20,0)",
    "f_sint32": "INT",
    "f_sint64": "BIGINT",
    "f_fixed32": "BIGINT",
    "f_fixed64": "DECIMAL(20,0)",
    "f_sfixed32": "INT",
    "f_sfixed64": "BIGINT",
    "f_bool": "BOOLEAN",
    "f_string": "STRING",
    "f_bytes": "BINARY",
    "f_enum": "STRING",
    "f_item": "STRUCT<`name`: STRING, `count`: INT>",
    "f_longs": "ARRAY<BIGINT>",
    "f_items": "ARRAY<STRUCT<`name`: STRING, `count`: INT>>",
    "f_by_name": "MAP<STRING, STRUCT<`name`: STRING, `count`: INT>>",
    "f_by_number": "MAP<DECIMAL(20,0), BOOLEAN>",
    "f_optional": "STRING",
    "f_one": "STRING",
    "f_other": "STRUCT<`name`: STRING, `count`: INT>",
    "f_timestamp": "TIMESTAMP",
    "f_duration": "STRUCT<`seconds`: BIGINT, `nanos`: INT>",
    "f_wrapped": "BIGINT",
    "f_timestamps": "ARRAY<TIMESTAMP>",
    "f_struct": "STRING",
    "f_any": "STRUCT<`type_url`: STRING, `value`: BINARY>",
    "f_money": "STRUCT<`currency_code`: STRING, `units`: BIGINT, `nanos`: INT>",
    "f_kinds": "ARRAY<STRING>",
    "f_wrapped_uint64": "DECIMAL(20,0)",
}
MOMENT = datetime(2024, 2, 29, 12, 30, 15, 123456, timezone.utc)
ORDER = 'syntax = "proto3"; package shop; message Order { int64 id = 1; optional string user = 2; }'
LATER = 'syntax = "proto3"; package shop; message Order { int64 id = 1; optional string user = 2; bool paid = 3; }'


@pytest.fixture(scope="module")
def types():
    return Protobuf(TYPES, message="shop.Types")


@pytest.fixture(scope="module")
def order():
    return Protobuf(ORDER)


def one(decoder, **fields):
    message = decoder.schema.message_class()(**fields)
    rows, errors = decode(decoder, [message.SerializeToString()])
    assert errors == [None]
    return rows[0]


def test_the_type_of_each_column(types):
    assert types.ddl() == ", ".join(f"`{name}` {kind}" for name, kind in KINDS.items())


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("f_double", 0.1, 0.1),
        ("f_float", 0.5, 0.5),
        ("f_int32", -(2**31), -(2**31)),
        ("f_int64", -(2**63), -(2**63)),
        ("f_uint32", 2**32 - 1, 2**32 - 1),
        ("f_uint64", 2**64 - 1, Decimal(2**64 - 1)),
        ("f_sint32", -5, -5),
        ("f_sint64", -(2**63), -(2**63)),
        ("f_fixed32", 2**32 - 1, 2**32 - 1),
        ("f_fixed64", 2**64 - 1, Decimal(2**64 - 1)),
        ("f_sfixed32", -5, -5),
        ("f_sfixed64", -5, -5),
        ("f_bool", True, True),
        ("f_string", "gruß", "gruß"),
        ("f_bytes", b"\0\xff", b"\0\xff"),
        ("f_enum", 2, "OLD"),
        ("f_enum", 9, "9"),
        ("f_item", {"name": "a"}, {"name": "a", "count": None}),
        ("f_item", {}, {"name": "", "count": None}),
        ("f_longs", [1, 2], [1, 2]),
        ("f_items", [{"name": "a", "count": 0}, {}], [{"name": "a", "count": 0}, {"name": "", "count": None}]),
        ("f_by_name", {"a": {"count": 2}}, [("a", {"name": "", "count": 2})]),
        ("f_by_number", {2**64 - 1: True}, [(Decimal(2**64 - 1), True)]),
        ("f_optional", "", ""),
        ("f_one", "", ""),
        ("f_other", {"name": "a"}, {"name": "a", "count": None}),
        ("f_timestamp", MOMENT, MOMENT),
        (
            "f_timestamp",
            {"seconds": -1, "nanos": 999_999_999},
            datetime(1969, 12, 31, 23, 59, 59, 999999, timezone.utc),
        ),
        ("f_duration", timedelta(seconds=1.5), {"seconds": 1, "nanos": 500_000_000}),
        ("f_wrapped", {"value": 0}, 0),
        ("f_wrapped_uint64", {"value": 2**64 - 1}, Decimal(2**64 - 1)),
        ("f_timestamps", [MOMENT], [MOMENT]),
        ("f_struct", {"a": [1, None, "ü"]}, '{"a":[1.0,null,"ü"]}'),
        ("f_any", {"type_url": "t", "value": b"v"}, {"type_url": "t", "value": b"v"}),
        ("f_money", {"units": 3}, {"currency_code": "", "units": 3, "nanos": 0}),
        ("f_kinds", [0, 1, 7], ["UNKNOWN", "NEW", "7"]),
    ],
)
def test_each_type(types, name, value, expected):
    row = one(types, **{name: value})
    assert row[name] == expected
    others = {other: found for other, found in row.items() if other != name}
    unset = [other for other, found in others.items() if found is None]
    assert "f_optional" in unset or name == "f_optional"


def test_what_was_not_written(types):
    row = one(types)
    absent = {"f_item", "f_optional", "f_one", "f_other", "f_timestamp", "f_duration", "f_wrapped", "f_struct"}
    absent |= {"f_any", "f_money", "f_wrapped_uint64"}
    assert {name for name, value in row.items() if value is None} == absent
    assert (row["f_int64"], row["f_string"], row["f_enum"], row["f_longs"], row["f_by_name"]) == (
        0,
        "",
        "UNKNOWN",
        [],
        [],
    )
    assert decode(types, [None]) == ([dict.fromkeys(KINDS)], [None])


def test_proto2_tells_what_was_written():
    decoder = Protobuf(
        'syntax = "proto2";'
        "message M { optional int32 a = 1 [default = 5]; required int32 b = 2; optional string c = 3; }"
    )
    assert one(decoder, b=1) == {"a": None, "b": 1, "c": None}
    rows, errors = decode(decoder, [b"", b"\x10\x01\x1a\x01\xff", b"\x10\x07"])
    assert errors == ["the message lacks b", errors[1], None]
    assert "Could" in errors[1]
    assert rows[2] == {"a": None, "b": 7, "c": None}


CLOSED = {
    "proto2": 'syntax = "proto2"; package shop; enum Kind { A = 0; B = 2; }',
    "edition": 'edition = "2023"; package shop; enum Kind { option features.enum_type = CLOSED; A = 0; B = 2; }',
    "open": 'edition = "2023"; package shop; enum Kind { A = 0; B = 2; }',
}
CLOSED_FIELDS = """message Order {
    X Kind one = 1; repeated Kind many = 2; repeated Kind packed = 3 Y; map<string, Kind> by_name = 4;
    oneof choice { Kind first = 5; string other = 6; } X Kind preset = 7 [default = B]; X Line line = 8;
    repeated Line lines = 9; message Line { X Kind kind = 1; X int32 count = 2; }
}"""


@pytest.mark.parametrize("syntax", CLOSED)
def test_a_number_that_an_enum_does_not_name_is_its_text_also_if_the_enum_is_closed(syntax):
    label, option = ("optional", "[packed = true]") if syntax == "proto2" else ("", "")
    decoder = Protobuf(CLOSED[syntax] + CLOSED_FIELDS.replace("X", label).replace("Y", option))
    assert decoder.ddl().startswith("`one` STRING, `many` ARRAY<STRING>, `packed` ARRAY<STRING>")
    payloads = {
        b"\x08\x07": {"one": "7"},
        b"\x08\x02\x08\x07": {"one": "7"},
        b"\x08\x07\x08\x02": {"one": "B"},
        b"\x08" + b"\xff" * 9 + b"\x01": {"one": "-1"},
        b"\x10\x02\x10\x07\x10\x00": {"many": ["B", "7", "A"]},
        b"\x1a\x03\x02\x07\x00": {"packed": ["B", "7", "A"]},
        b"\x22\x05\x0a\x01x\x10\x07\x22\x05\x0a\x01y\x10\x02\x22\x03\x0a\x01z": {
            "by_name": [("x", "7"), ("y", "B"), ("z", "A")]
        },
        b"\x32\x01a\x28\x07": {"first": "7"},
        b"\x28\x07\x32\x01a": {"other": "a"},
        b"\x38\x07": {"preset": "7"},
        b"": {},
        b"\x42\x04\x08\x07\x10\x05": {"line": {"kind": "7", "count": 5}},
        b"\x4a\x02\x08\x07\x4a\x02\x08\x02": {"lines": [{"kind": "7", "count": None}, {"kind": "B", "count": None}]},
    }
    rows, errors = decode(pickle.loads(pickle.dumps(decoder)), list(payloads))
    assert errors == [None] * len(payloads)
    unset = dict.fromkeys(("one", "first", "other", "preset", "line"))
    unset |= {name: [] for name in ("many", "packed", "by_name", "lines")}
    for row, expected in zip(rows, payloads.values()):
        row["by_name"].sort()
        assert row == {**unset, **expected}


def test_a_missing_field_is_named_without_the_keys_of_maps():
    decoder = Protobuf('syntax = "proto2"; message M { map<string, V> by = 1; } message V { required int32 a = 1; }')
    for key in (b"ada", b'\\" ada', b"]ada"):
        assert decode(decoder, [b"\x0a%c\x0a%c%s\x12\x00" % (len(key) + 4, len(key), key)])[1] == [
            "the message lacks by[].a"
        ]


def test_missing_fields_are_named_once():
    decoder = Protobuf(
        """syntax = "proto2";
        message M { optional V one = 1; repeated V many = 2; map<string, V> by = 3; map<string, int32> n = 4; }
        message V { required int32 a = 1; required int32 b = 2; optional W m = 3; }
        message W { optional U one = 1; }
        message U { required int32 a = 1; required int32 b = 2; }"""
    )
    value = b"\x08\x01\x1a\x02\x0a\x00"
    payload = b"\x0a\x02\x10\x01" + b"\x12\x00" * 2 + b"\x1a\x0b\x0a\x01k\x12\x06" + value + b"\x22\x03\x0a\x01k"
    (error,) = decode(decoder, [payload])[1]
    assert set(error.removeprefix("the message lacks ").split(", ")) == {
        "one.a",
        "many[].a",
        "many[].b",
        "by[].b",
        "by[].m.one.a",
        "by[].m.one.b",
    }


def test_a_key_that_is_no_unicode_ends_no_process():
    """The library looks for missing fields and ends it."""
    decoder = Protobuf('syntax = "proto2"; message M { map<string, V> by = 1; } message V { required int32 a = 1; }')
    _, errors = decode_isolated_each(decoder, [b"\x0a\x03\x0a\x01\xff"] * 25)
    assert {None, CRASHED}.isdisjoint(errors)


def test_a_required_closed_enum_is_there_whatever_its_number():
    decoder = Protobuf(
        'syntax = "proto2"; enum K { A = 1; }message M { required K k = 1; optional group G = 2 { optional K k = 1; } }'
    )
    rows, errors = decode(decoder, [b"\x08\x07\x13\x08\x08\x14", b""])
    assert rows[0] == {"k": "7", "g": {"k": "8"}}
    assert errors == [None, "the message lacks k"]


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_any_values_and_any_damage(types, data):
    message = types.schema.message_class()
    numbers = st.integers(-(2**63), 2**63 - 1)
    items = st.fixed_dictionaries({}, optional={"name": st.text(max_size=3), "count": st.integers(0, 9)})
    fields = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "f_int64": numbers,
                "f_uint64": st.integers(0, 2**64 - 1),
                "f_string": st.text(max_size=5),
                "f_longs": st.lists(numbers, max_size=3),
                "f_items": st.lists(items, max_size=2),
                "f_by_name": st.dictionaries(st.text(max_size=2), items, max_size=2),
                "f_one": st.text(max_size=3),
            },
        )
    )
    whole = message(**fields).SerializeToString()
    bad = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(bad)))
        bad[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    rows, errors = decode(types, [whole, bytes(bad), None, whole])
    assert errors[0] is errors[2] is errors[3] is None
    assert rows[0] == rows[3]
    item = {"name": "", "count": None}
    expected = {**fields, "f_items": [{**item, **one} for one in fields.get("f_items", [])]}
    expected["f_by_name"] = {key: {**item, **one} for key, one in fields.get("f_by_name", {}).items()}
    assert {name: dict(rows[0][name]) if name == "f_by_name" else rows[0][name] for name in expected} == expected


def test_a_moment_that_spark_does_not_have(types):
    message = types.schema.message_class()
    moments = [{"seconds": 2**60}, {"nanos": -1}, {"seconds": 1}]
    payloads = [message(f_timestamp=moment).SerializeToString() for moment in moments]
    rows, errors = decode(types, payloads)
    assert "is not in the years 1 to 9999" in errors[0]
    assert "is not in the years 1 to 9999" in errors[1]
    assert (errors[2], rows[2]["f_timestamp"]) == (None, datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc))


@pytest.mark.parametrize(
    ("text", "message", "why"),
    [
        ('syntax = "proto3"; message N { N next = 1; }', None, "the message N contains itself"),
        (
            'syntax = "proto3"; message A { repeated B b = 1; } message B { map<string, A> a = 1; }',
            None,
            "contains itself",
        ),
        ('syntax = "proto3"; message E {}', None, "the message E has no fields"),
        ('syntax = "proto3"; message E { int32 id = 1; int32 ID = 2; }', None, "field 'ID' twice"),
        ('syntax = "proto3"; message E { int32 id = 1 }', None, 'cannot be compiled: .*Expected ";"'),
        ('syntax = "proto3"; enum E { A = 0; }', None, "has no messages"),
        (
            'syntax = "proto3"; import "other.proto"; message E { int32 id = 1; }',
            None,
            "cannot be compiled: other.proto",
        ),
        (ORDER, "shop.Refund", "has no message 'shop.Refund', but shop.Order"),
    ],
)
def test_schemas_without_columns_are_refused_at_once(text, message, why):
    with pytest.raises(SchemaMismatchError, match=why):
        Protobuf(text, message=message)


def test_where_the_schema_is_from(tmp_path, order):
    text, made = tmp_path / "order.proto", tmp_path / "order.pb"
    text.write_text(ORDER)
    made.write_bytes(compiled({"order.proto": ORDER}, "order.proto").SerializeToString())
    payload = order.schema.message_class()(id=7).SerializeToString()
    for decoder in (order, Protobuf(schema_file=text), Protobuf(schema_file=made), Protobuf(order.schema)):
        assert decode(pickle.loads(pickle.dumps(decoder)), [payload]) == ([{"id": 7, "user": None}], [None])
    made.write_bytes(b"\xff")
    with pytest.raises(SchemaMismatchError, match="the descriptor set cannot be read"):
        Protobuf(schema_file=made)
    made.write_bytes(b"")
    with pytest.raises(SchemaMismatchError, match="the descriptor set has no files"):
        Protobuf(schema_file=made)
    whole = compiled({"order.proto": TYPES}, "order.proto")
    del whole.file[:-1]
    made.write_bytes(whole.SerializeToString())
    assert Protobuf(schema_file=made, message="shop.Types").ddl().startswith("`f_double` DOUBLE")
    own = compiled(
        {"a.proto": ORDER, "b.proto": 'syntax = "proto3"; import "a.proto"; message B { shop.Order o = 1; }'}, "b.proto"
    )
    del own.file[0]
    made.write_bytes(own.SerializeToString())
    with pytest.raises(SchemaMismatchError, match=r"lacks the file a\.proto"):
        Protobuf(schema_file=made)


def test_generated_classes():
    assert Protobuf(duration_pb2.Duration).ddl() == "`seconds` BIGINT, `nanos` INT"
    moment = timestamp_pb2.Timestamp(seconds=1)
    assert decode(Protobuf(timestamp_pb2.Timestamp), [moment.SerializeToString(), None]) == (
        [{"payload": datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc)}, {"payload": None}],
        [None, None],
    )
    assert decode(Protobuf(wrappers_pb2.StringValue), [b"\x0a\x01x"])[0] == [{"payload": "x"}]
    document = struct_pb2.Struct()
    document.update({"a": 1})
    assert decode(Protobuf(struct_pb2.Struct, column="doc"), [document.SerializeToString()])[0] == [
        {"doc": '{"a":1.0}'}
    ]
    assert Protobuf(duration_pb2.Duration, column="d").ddl() == "`d` STRUCT<`seconds`: BIGINT, `nanos`: INT>"


def test_without_a_compiler_only_text_is_refused(monkeypatch, order):
    monkeypatch.setitem(sys.modules, "grpc_tools", None)
    with pytest.raises(
        MissingDependencyError, match=r"grpc_tools is not installed.*pip install 'stream-assets\[protobuf\]'"
    ):
        Protobuf(ORDER)
    assert Protobuf(order.schema).ddl() == order.ddl()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "no schema is given"),
        ({"schema": 7}, "schema=7 is not a Protobuf schema"),
        ({"schema": dict}, "is not a Protobuf schema"),
        ({"schema": ORDER, "framed": 1}, "not a Boolean"),
        ({"schema": ORDER, "message": ""}, "message='' cannot be used"),
        ({"subject": "orders-value"}, "needs a registry"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, why):
    with pytest.raises(InvalidOptionError, match=why):
        Protobuf(**arguments)


def test_framed_payloads_without_a_registry(order):
    decoder = Protobuf(order.schema, framed=True)
    payload = order.schema.message_class()(id=7).SerializeToString()
    head = b"\0\0\0\0\1"
    rows, errors = decode(
        decoder,
        [head + b"\0" + payload, head + b"\2\0" + payload, head, head + b"\x80", head + b"\xff\xff\xff\xff\x0f", b"\0"],
    )
    assert [row["id"] for row in rows] == [7, 7, None, None, None, None]
    assert errors[:2] == [None, None]
    assert errors[2] == errors[3] == "the payload has no message indexes after its schema id"
    assert "the number of message indexes is" in errors[4]
    assert "too short for a schema id" in errors[5]


BASE = 'syntax = "proto3"; package shop; message Money { int64 cents = 1; }'
NESTED = (
    'syntax = "proto3"; package shop; import "money.proto"; import "google/protobuf/timestamp.proto";'
    "message Refund { int64 id = 1; message Reason { string text = 1; } }"
    "message Order { int64 id = 1; Money total = 2; google.protobuf.Timestamp at = 3; message Line { int32 n = 1; } }"
)


class Topic:
    """A topic of a registry, and what its serializer writes."""

    def __init__(self, registry, topic="orders"):
        self.registry = SchemaRegistry(registry.url, options={"max.retries": 0})
        self.url, self.topic = registry.url, topic
        self.subject = f"{topic}-value"

    def written(self, *messages):
        with SchemaRegistryClient({"url": self.url}) as client:
            write = ProtobufSerializer(type(messages[0]), client, {"use.deprecated.format": False})
            return [write(message, SerializationContext(self.topic, MessageField.VALUE)) for message in messages]

    def decoder(self, **more):
        return Protobuf(registry=self.registry, subject=self.subject, **more)


def classes(text, names, others=()):
    files = compiled({"own.proto": text, **dict(others)}, "own.proto")
    return [MessageSchema(name, files.SerializeToString(deterministic=True)).message_class() for name in names]


@pytest.mark.parametrize("serializes", [True, False], ids=["descriptors", "text only"])
def test_a_registry_that_knows_text(registry, serializes):
    """Other languages register the text; not each registry gives a descriptor for it."""
    registry.serializes = serializes
    registry.register("money", BASE, "PROTOBUF")
    reference = {"name": "money.proto", "subject": "money", "version": 1}
    number = registry.register("orders-value", NESTED, "PROTOBUF", [reference])
    topic = Topic(registry)
    decoder = topic.decoder(message="shop.Order").resolved()
    assert decoder.ddl() == "`id` BIGINT, `total` STRUCT<`cents`: BIGINT>, `at` TIMESTAMP"
    (made,) = classes(NESTED, ["shop.Order"], {"money.proto": BASE}.items())
    payload = made(id=7, total={"cents": 3}).SerializeToString()
    head = b"\0" + struct.pack(">I", number)
    rows, errors = decode(
        decoder, [head + b"\x02\x02" + payload, head + b"\0" + payload, head + b"\x04\x02\0", head + b"\x02\x09"]
    )
    assert rows[0] == {"id": 7, "total": {"cents": 3}, "at": None}
    assert errors == [
        None,
        "the payload is of the message shop.Refund, not of shop.Order",
        "the payload is of the message shop.Order.Line, not of shop.Order",
        "the payload is of an unknown message at [-5], not of shop.Order",
    ]
    assert topic.decoder().resolved().ddl() == "`id` BIGINT"


def test_what_the_serializer_of_the_registry_has_written(registry, types):
    topic = Topic(registry)
    message = types.schema.message_class()
    payloads = topic.written(message(f_int64=1, f_timestamp=MOMENT, f_by_name={"a": {}}), message(f_one="x"))
    decoder = topic.decoder(message="shop.Types").resolved()
    assert decoder.ddl() == types.ddl()
    rows, errors = decode(decoder, [*payloads, None, payloads[0][:-1]])
    assert errors[:3] == [None] * 3
    assert errors[3] is not None
    assert (rows[0]["f_int64"], rows[0]["f_timestamp"], rows[1]["f_one"]) == (1, MOMENT, "x")


def test_messages_of_an_older_and_of_a_newer_schema(registry):
    topic = Topic(registry)
    (old,), (new,) = classes(ORDER, ["shop.Order"]), classes(LATER, ["shop.Order"])
    payloads = topic.written(old(id=1, user="a"))
    first = topic.decoder().resolved()
    payloads += topic.written(new(id=2, paid=True))
    second = topic.decoder().resolved()
    assert decode(first, payloads)[0] == [{"id": 1, "user": "a"}, {"id": 2, "user": None}]
    assert decode(second, payloads)[0] == [{"id": 1, "user": "a", "paid": False}, {"id": 2, "user": None, "paid": True}]
    registry.asked.clear()
    assert decode(second, payloads)[1] == [None, None]
    assert registry.asked == []


def test_ids_that_are_unknown_or_of_something_else(registry):
    topic = Topic(registry)
    (made,) = classes(ORDER, ["shop.Order"])
    (payload,) = topic.written(made(id=1))
    other = registry.register("avro", '"long"')
    rows, errors = decode(
        topic.decoder().resolved(), [payload, b"\0\0\0\0\x63" + payload[5:], b"\0\0\0\0" + bytes([other]) + payload[5:]]
    )
    assert [row["id"] for row in rows] == [1, None, None]
    assert errors[1:] == [
        f"the schema registry {registry.url} has no schema id 99",
        "the schema is of format AVRO, not PROTOBUF",
    ]
    with pytest.raises(SchemaMismatchError, match="of format PROTOBUF, not AVRO"):
        Avro(registry=topic.registry, subject=topic.subject).resolved()


INNER = "message Inner { %s cents = 1; }"
CHANGES = {
    # what the field is written as, what it is read as, values with those of the column, values that are refused
    "int64 to int32": ("int64 f = 1;", "int32 f = 1;", {0: 0, 5: 5, -(2**31): -(2**31)}, [2**31, 5_000_000_000, 2**32]),
    "unset or not": ("optional int64 f = 1;", "int32 f = 1;", {None: 0, 0: 0, 7: 7}, [2**32]),
    "uint64 to uint32": ("uint64 f = 1;", "optional uint32 f = 1;", {0: None, 5: 5}, [2**32]),
    "uint64 to int64": ("uint64 f = 1;", "int64 f = 1;", {5: 5}, [2**63]),
    "uint32 to int32": ("uint32 f = 1;", "int32 f = 1;", {5: 5}, [2**31]),
    "int32 to uint64": ("int32 f = 1;", "uint64 f = 1;", {5: 5}, [-1]),
    "int64 to bool": ("int64 f = 1;", "bool f = 1;", {0: False, 1: True}, [2, 2**40]),
    "int64 to an enum": ("int64 f = 1;", "Kind f = 1;", {0: "A", 1: "B", 9: "9"}, [5_000_000_000]),
    "zigzag": ("sint64 f = 1;", "int64 f = 1;", {0: 0}, [1, -1]),
    "double to int64": ("double f = 1;", "int64 f = 1;", {0.0: 0}, [2.5, 1.0]),
    "an explicit 0.0": ("optional double f = 1;", "optional int64 f = 1;", {None: None}, [0.0]),
    "float to fixed32": ("float f = 1;", "fixed32 f = 1;", {0.0: 0}, [1.0]),
    "int64 to string": ("int64 f = 1;", "string f = 1;", {0: ""}, [7]),
    "bytes to string": ("bytes f = 1;", "string f = 1;", {b"x": "x"}, [b"\xff"]),
    "a message to string": (f"Inner f = 1; {INNER % 'int64'}", "string f = 1;", {None: ""}, [{"cents": 1}, {}]),
    "packed double to int64": ("repeated double f = 1;", "repeated int64 f = 1;", {(): []}, [(1.0,), (0.0, 0.0)]),
    "a list to one": ("repeated string f = 1;", "string f = 1;", {(): "", ("a",): "a"}, [("a", "b"), ("a", "")]),
    "packed to one": ("repeated int32 f = 1;", "int32 f = 1;", {(): 0}, [(1,), (1, 2)]),
    "a map to a list": ("map<string, int64> f = 1;", "repeated string f = 1;", {(): []}, [{"a": 1}]),
    "in a map": ("map<int64, int64> f = 1;", "map<int32, int32> f = 1;", {(): []}, [{2**32: 1}, {1: 2**33}]),
    "in messages": (
        f"repeated Inner f = 1; {INNER % 'int64'}",
        f"repeated Inner f = 1; {INNER % 'int32'}",
        {(): []},
        [[{"cents": 1}, {"cents": 2**32}]],
    ),
    "in messages of a map": (
        f"map<string, Inner> f = 1; {INNER % 'int64'}",
        f"map<string, Inner> f = 1; {INNER % 'int32'}",
        {(): []},
        [{"a": {"cents": 1}, "b": {"cents": 2**32}}],
    ),
    "a wrapper to another one": (
        "google.protobuf.Int64Value f = 1;",
        "google.protobuf.Int32Value f = 1;",
        {None: None},
        [{"value": 2**32}],
    ),
    "a wrapper to its type": ("google.protobuf.Int64Value f = 1;", "int64 f = 1;", {None: 0}, [{"value": 1}]),
    "a message to a document": (f"Inner f = 1; {INNER % 'int64'}", "google.protobuf.Value f = 1;", {None: None}, [{}]),
}
SAME = {
    "wider": ("int32 f = 1;", "int64 f = 1;", -1, -1),
    "uint32 to int64": ("uint32 f = 1;", "int64 f = 1;", 2**32 - 1, 2**32 - 1),
    "bool to int32": ("bool f = 1;", "int32 f = 1;", True, 1),
    "an enum to int32": ("Kind f = 1;", "int32 f = 1;", 9, 9),
    "string to bytes": ("string f = 1;", "bytes f = 1;", "x", b"x"),
    "one to a list": ("string f = 1;", "repeated string f = 1;", "x", ["x"]),
    "packed or not": ("repeated int32 f = 1 [packed = false];", "repeated int64 f = 1;", [1, 2], [1, 2]),
    "a document": (
        "google.protobuf.Value f = 1;",
        "google.protobuf.Value f = 1; int32 g = 2;",
        {"bool_value": True},
        "true",
    ),
    "in a message": (f"Inner f = 1; {INNER % 'int32'}", f"Inner f = 1; {INNER % 'int64'}", {"cents": 5}, {"cents": 5}),
    "another field": ("int32 f = 1; int64 g = 2;", "int32 f = 1; reserved 2;", 5, 5),
}


APART = ("optional string f = 1; optional string g = 2;", "oneof choice { string f = 1; string g = 2; }")
WRITTEN, READ = (
    [*(change[place] for change in (*CHANGES.values(), *SAME.values())), APART[place], APART[1]] for place in (0, 1)
)


def file_of(messages):
    head = 'syntax = "proto3"; package shop; import "google/protobuf/struct.proto";'
    kinds = 'import "google/protobuf/wrappers.proto"; enum Kind { A = 0; B = 1; }'
    return head + kinds + "".join(f"message M{place} {{ {fields} }}" for place, fields in enumerate(messages))


@pytest.fixture(scope="module")
def two_versions():
    """The topic, and the files, of a subject with two versions of many messages."""
    with schema_registry() as server:
        for messages in (READ, WRITTEN):
            number = server.register("orders-value", file_of(messages), "PROTOBUF")
        files = [
            compiled({"own.proto": file_of(messages)}, "own.proto").SerializeToString() for messages in (READ, WRITTEN)
        ]
        yield Topic(server), b"\0" + struct.pack(">I", number) + b"\2", files


def read_as(two_versions, place, *fields):
    """The rows, and the reasons, of messages of the second version that are read with the first one."""
    topic, head, files = two_versions
    reader, writer = (MessageSchema(f"shop.M{place}", file) for file in files)
    payloads = [head + bytes([2 * place]) + writer.message_class()(**own).SerializeToString() for own in fields]
    found = decode(topic.decoder(version=1, message=reader.name).resolved(), payloads)
    assert decode(Protobuf(reader, registry=topic.registry), payloads) == found
    assert message_check(reader, reader) is None
    return (*found, message_check(writer, reader))


@pytest.mark.parametrize("change", CHANGES)
def test_a_value_of_the_writer_that_is_none_of_the_reader_is_a_dead_letter(two_versions, change):
    _, _, kept, refused = CHANGES[change]
    place = list(CHANGES).index(change)
    rows, errors, check = read_as(two_versions, place, *({"f": value} for value in (*kept, *refused)))
    assert [row["f"] for row in rows] == [*kept.values(), *[None] * len(refused)]
    assert [error is None for error in errors] == [True] * len(kept) + [False] * len(refused)
    if check is not None:
        reasons = ("field 'f' was written", "field 'f.cents' was", "field 'f.value' was", "Error parsing")
        assert [error for error in errors if error and not error.startswith(reasons)] == []
    else:
        assert change == "bytes to string"


@pytest.mark.parametrize("change", SAME)
def test_every_value_of_the_writer_may_be_one_of_the_reader(two_versions, change):
    _, _, value, expected = SAME[change]
    place = len(CHANGES) + list(SAME).index(change)
    rows, errors, check = read_as(two_versions, place, {"f": value})
    assert (rows[0]["f"], errors, check) == (expected, [None], None)


def test_of_several_fields_that_are_one_choice_of_the_reader_none_is_dropped(two_versions):
    place = len(WRITTEN) - 2
    rows, errors, _ = read_as(two_versions, place, {"f": "a"}, {"g": ""}, {"f": "a", "g": "b"})
    assert rows == [{"f": "a", "g": None}, {"f": None, "g": ""}, {"f": None, "g": None}]
    assert errors[:2] == [None, None]
    assert errors[2].startswith("field 'f' was written")
    assert read_as(two_versions, place + 1, {"g": "b"}) == ([{"f": None, "g": "b"}], [None], None)


def test_numbers_of_closed_enums_are_compared(registry):
    text = 'syntax = "proto2"; enum Kind { A = 0; B = 1; } message M { optional %s f = 1; optional %s g = 2; }'
    own, other = (Protobuf(text % kinds).schema for kinds in (("Kind", "int32"), ("int64", "Kind")))
    registry.register("orders-value", text % ("Kind", "int32"), "PROTOBUF")
    topic = Topic(registry)
    payloads = topic.written(*(other.message_class()(f=value, g=1) for value in (1, 9, 2**32)))
    rows, errors = decode(topic.decoder(version=1).resolved(), payloads)
    assert rows == [{"f": "B", "g": 1}, {"f": "9", "g": 1}, {"f": None, "g": None}]
    assert [error is None for error in errors] == [True, True, False]
    assert message_check(own, own) is None


def test_members_of_a_choice_that_are_not_compared_remove_the_others():
    other = Protobuf(
        'syntax = "proto3"; message M { message N {} oneof o { int64 a = 1; string b = 2; N c = 3; } }'
    ).schema
    made = other.message_class()
    both = [made(a=7).SerializeToString() + last.SerializeToString() for last in (made(b="x"), made(c={}))]
    alone = Protobuf('syntax = "proto3"; message M { int32 a = 1; }').schema
    together = Protobuf('syntax = "proto3"; message M { oneof o { int32 a = 1; string b = 2; } }').schema
    check, read = message_check(other, alone), alone.reading_class().FromString
    assert check is not None
    for payload in both:
        with pytest.raises(ValueError, match="a"):
            check(payload, read(payload))
    check, read = message_check(other, together), together.reading_class().FromString
    assert check is not None
    check(both[0], read(both[0]))


def test_fields_of_protobuf_2_are_compared():
    fields = "optional group Part = 3 { optional %s n = 1; } repeated string t = 4; oneof o { %s p = 5; %s q = 6; }"
    named = 'optional %s foo_bar = 1 [json_name = "a"]; optional %s fooBar = 2 [json_name = "b", default = 5];'
    own, other = (
        Protobuf(f'syntax = "proto2"; message M {{ {named % (kind, kind)} {fields.replace("%s", kind)} }}').schema
        for kind in ("int32", "int64")
    )
    made = other.message_class()
    payloads = [made(foo_bar=1, part={"n": 2}, t=["x"], p=3), made(part={"n": 2**32}), made(fooBar=2**32), made(p=0)]
    check, read = message_check(other, own), own.reading_class().FromString
    assert check is not None

    def is_refused(payload):
        try:
            check(payload, read(payload))
        except ValueError:
            return True
        return False

    # A reader keeps only the last one of a choice.
    both = made(p=1).SerializeToString() + made(q=2).SerializeToString()
    assert [is_refused(one.SerializeToString()) for one in payloads] == [False, True, True, False]
    assert not is_refused(both)
