"""Schemas that an attacker has written: of a message, of a subject, and what they refer to."""

import base64
import errno
import gzip
import json
import os
import threading
import tracemalloc

import fastavro
import pyarrow as pa
import pytest

from spark_jobs.decoding import avro_schema, protobuf_schema, schema_limits
from spark_jobs.decoding import schema_registry as registries
from spark_jobs.decoding.avro import Avro, avro_decoding
from spark_jobs.decoding.avro_resolution import default_of
from spark_jobs.decoding.avro_schema import columns_ddl, parse_avro
from spark_jobs.decoding.isolated_process import limited_memory
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.json_schema import JsonSchema, cpu_limit
from spark_jobs.decoding.protobuf import Protobuf, message_check
from spark_jobs.decoding.protobuf_schema import compiled, files_of_stored, schema_of_text
from spark_jobs.decoding.schema_registry import SchemaRegistry, StoredSchema
from stream_consumers.errors import (
    AccessDeniedError,
    InvalidOptionError,
    SchemaMismatchError,
    SchemaRegistryError,
    StreamAssetsError,
)
from tests.support.arrow_columns import CRASHED, arrow_columns, decode, decode_isolated_each
from tests.support.schema_registry import schema_registry

QUICK = {"max.retries": 0, "timeout": 5}
PROTO = 'syntax = "proto3"; message Order { int64 id = 1; }'
# A whole block, so that payloads are decoded together, too.
ROWS = 100


def record(*fields, name="R"):
    return {"type": "record", "name": name, "fields": list(fields)}


def field(kind, name="id"):
    return {"name": name, "type": kind}


def properties(**more):
    return {"type": "object", "properties": more}


GOOD = {
    "AVRO": (Avro, json.dumps(record(field("long"))), b"\x0e"),
    "PROTOBUF": (Protobuf, PROTO, b"\0\x08\x07"),
    "JSON": (JsonSchema, json.dumps(properties(id={"type": "integer"})), b'{"id":7}'),
}


def decoder_of(registry, kind, subject="good-value", **more):
    return GOOD[kind][0](registry=SchemaRegistry(registry.url, options=QUICK), subject=subject, **more)


def framed(number, payload):
    return b"\0" + number.to_bytes(4, "big") + payload


def read_next_to_a_good_one(registry, kind, text, references=()):
    """What becomes of messages that name a schema, next to a good one: the error of the first of them."""
    _, good_text, payload = GOOD[kind]
    registry.serializes = False
    good = framed(registry.register("good-value", good_text, kind), payload)
    bad = framed(registry.register("bad-value", text, kind, references), payload)
    rows, errors = decode(decoder_of(registry, kind).resolved(), [good, *[bad] * ROWS, good])
    assert (rows[0], rows[-1], errors[0], errors[-1]) == ({"id": 7}, {"id": 7}, None, None)
    assert len(set(errors[1:-1])) == 1
    return errors[1]


def nested_arrays(depth):
    return '{"type":"array","items":' * depth + '"long"' + "}" * depth


def chain(length, fields):
    """Records of which each has the one before it in these fields."""
    first = record(field("long"), name="R0")
    return json.dumps(
        [first, *(record(*(field(f"R{n - 1}", name) for name in fields), name=f"R{n}") for n in range(1, length))]
    )


def referring(length, names):
    """Types of which each refers to the next one in these properties."""
    types = {
        f"t{n}": properties(**{name: {"$ref": f"#/definitions/t{n + 1}"} for name in names}) for n in range(length - 1)
    }
    last = {f"t{length - 1}": {"type": "integer"}}
    return json.dumps({**properties(id={"$ref": "#/definitions/t0"}), "definitions": {**types, **last}})


def messages(length, fields):
    """Messages of which each has the next one in these fields."""
    made = [
        f"message M{n} {{ {' '.join(f'M{n + 1} {name} = {place};' for place, name in enumerate(fields, 1))} }}"
        for n in range(length)
    ]
    return f'syntax = "proto3"; {" ".join(made)} message M{length} {{ int64 id = 1; }}'


def at_each_reference(named, references):
    """A record with many fields of one type."""
    return json.dumps(record(field(named, "f0"), *(field("E", f"f{place}") for place in range(1, references))))


def within(namespace, length):
    """Records that are within each other's namespace, which is a part of the name of each."""
    inner = [{"type": "fixed", "name": f"F{place}", "size": 1} for place in range(length)]
    return json.dumps({**record(*(field(kind, f"f{n}") for n, kind in enumerate(inner))), "namespace": namespace})


def alike(kind, references):
    """Properties that all refer to one type."""
    names = {f"p{place}": {"$ref": "#/definitions/t"} for place in range(references)}
    return json.dumps({**properties(**names), "definitions": {"t": kind}})


def all_of(depth, junk):
    made = {"type": "string"}
    for _ in range(depth):
        made = {"allOf": [made]}
    return {**made, **{f"x{place}": 0 for place in range(junk)}}


SYMBOLS = [f"s{place:x}" for place in range(20_000)]


def fixed(size):
    return json.dumps(record(field({"type": "fixed", "name": "F", "size": size})))


OF_ANY = {
    "AVRO: nested without end": ("AVRO", nested_arrays(100_000)),
    "AVRO: nested deep": ("AVRO", nested_arrays(150)),
    "AVRO: a chain of names": ("AVRO", chain(300, ["a"])),
    "AVRO: names that double": ("AVRO", chain(40, ["a", "b"])),
    "AVRO: null": ("AVRO", "null"),
    "AVRO: a number": ("AVRO", "1"),
    "AVRO: a type that is a number": ("AVRO", '{"type": 5}'),
    "AVRO: a field that is none": ("AVRO", json.dumps(record(5))),
    "AVRO: symbols that are none": ("AVRO", json.dumps(record(field({"type": "enum", "name": "E", "symbols": 5})))),
    "AVRO: huge fixed": ("AVRO", fixed(1 << 40)),
    "AVRO: negative fixed": ("AVRO", fixed(-5)),
    "AVRO: fixed of text": ("AVRO", fixed("x")),
    "AVRO: symbols at each reference": (
        "AVRO",
        at_each_reference({"type": "enum", "name": "E", "symbols": SYMBOLS}, 500),
    ),
    "AVRO: aliases at each reference": (
        "AVRO",
        at_each_reference({"type": "fixed", "name": "E", "size": 1, "aliases": SYMBOLS}, 500),
    ),
    "AVRO: a default at each reference": (
        "AVRO",
        at_each_reference(record({**field("string"), "default": "x" * 100_000}, name="E"), 500),
    ),
    "AVRO: a long symbol": ("AVRO", json.dumps(record(field({"type": "enum", "name": "E", "symbols": ["A" * 2000]})))),
    "AVRO: names in a long namespace": ("AVRO", within("n" * 100_000, 5000)),
    "PROTOBUF: names within a long one": (
        "PROTOBUF",
        PROTO.replace("Order {", f"{'M' * 100_000} {{ {''.join(f'message A{n} {{}}' for n in range(5000))}"),
    ),
    "PROTOBUF: methods within a long name": (
        "PROTOBUF",
        f"{PROTO} service {'S' * 100_000} {{ {''.join(f'rpc r{n}(Order) returns (Order);' for n in range(1000))} }}",
    ),
    "PROTOBUF: a long package": ("PROTOBUF", PROTO.replace("message", f"package {'p' * 2000}; message")),
    "PROTOBUF: messages without end": (
        "PROTOBUF",
        f"{PROTO} {''.join(f'message M{n} {{}}' for n in range(11_000))}",
    ),
    "PROTOBUF: nested deep": ("PROTOBUF", "message M {" * 3000 + "}" * 3000),
    "PROTOBUF: an absolute import": ("PROTOBUF", f'import "/etc/passwd"; {PROTO}'),
    "PROTOBUF: an import from above": ("PROTOBUF", f'syntax = "proto3"; import "../../a.proto"; {PROTO[19:]}'),
    "PROTOBUF: an import with NUL": ("PROTOBUF", 'syntax = "proto3"; import "google/protobuf/a\0.proto";'),
    "PROTOBUF: half a character": ("PROTOBUF", "\ud800"),
    "PROTOBUF: too long": ("PROTOBUF", f"{PROTO} //{'x' * registries.MAX_SCHEMA_CHARACTERS}"),
    "JSON: nested without end": ("JSON", '{"a":' * 100_000 + "1" + "}" * 100_000),
    "JSON: too long": ("JSON", json.dumps("x" * registries.MAX_SCHEMA_CHARACTERS)),
}
OF_SUBJECTS = {
    "PROTOBUF: a chain of messages": ("PROTOBUF", messages(300, ["a"])),
    "PROTOBUF: messages that double": ("PROTOBUF", messages(40, ["a", "b"])),
    "JSON: a type that is a number": ("JSON", '{"type": 5}'),
    "JSON: properties that are none": ("JSON", '{"type": "object", "properties": [1]}'),
    "JSON: nothing in common": ("JSON", '{"allOf": [5]}'),
    "JSON: examples that are none": ("JSON", '{"enum": 5}'),
    "AVRO: a long name": ("AVRO", json.dumps(record(field("long", "x" * 2000)))),
    "PROTOBUF: a long name of a value": (
        "PROTOBUF",
        f'syntax = "proto3"; enum E {{ {"V" * 2000} = 0; }} message M {{ repeated E id = 1; }}',
    ),
    "JSON: a long name": ("JSON", json.dumps(properties(**{"x" * 2000: {"type": "integer"}}))),
    "JSON: a chain of references": ("JSON", referring(300, ["a"])),
    "JSON: references that double": ("JSON", referring(40, ["a", "b"])),
    "JSON: values at each reference": ("JSON", alike({"enum": list(range(20_000))}, 400)),
    "JSON: a type of one other, of another, at each reference": ("JSON", alike(all_of(100, 10_000), 40)),
}


@pytest.mark.parametrize(("kind", "text"), OF_ANY.values(), ids=OF_ANY)
def test_a_message_with_a_schema_that_cannot_be_used_is_a_dead_letter(registry, kind, text):
    assert read_next_to_a_good_one(registry, kind, text) is not None


EVERY = {**OF_ANY, **OF_SUBJECTS}


@pytest.mark.parametrize(("kind", "text"), EVERY.values(), ids=EVERY)
def test_a_subject_with_a_schema_that_cannot_be_used_is_refused(registry, kind, text):
    registry.register("good-value", text, kind)
    registry.serializes = False
    with pytest.raises(SchemaMismatchError), cpu_limit(10):
        decoder_of(registry, kind).resolved().ddl()


# What fastavro adds to a schema that it has parsed: it believes this, and checks nothing.
PARSED = {"__fastavro_parsed": True, "__named_schemas": {}}
RECURSIVE = record(field("long"), field(record(field({"type": "array", "items": "type_0"}, "y"), name="type_0"), "x"))
UNKNOWN = record(field("long"), field("type_0", "x"))
UNCHECKED = {
    "recursion": RECURSIVE | PARSED,
    "recursion in a union": ["null", RECURSIVE | PARSED],
    "recursion within": record(field("long"), field({**RECURSIVE, "name": "S", **PARSED}, "s")) | PARSED,
    "recursion of what it names": {
        **record(field("long"), field("type_0", "x")),
        **PARSED,
        "__named_schemas": {"type_0": RECURSIVE["fields"][1]["type"]},
    },
    "an unknown name": UNKNOWN | PARSED,
    "an unknown name in a union": ["null", UNKNOWN | PARSED],
    "an unknown name in a union in a union": [["null", UNKNOWN | PARSED]],
    "an unknown name within": record(field("long"), field({**UNKNOWN, "name": "S", **PARSED}, "s")) | PARSED,
    "symbols that are lists": record(field({"type": "enum", "name": "E", "symbols": [[1]]})) | PARSED,
    "symbols that are one text": record(field({"type": "enum", "name": "E", "symbols": "ab"})),
    "a symbol twice": record(field({"type": "enum", "name": "E", "symbols": ["a", "a"]})) | PARSED,
    "a field twice": record(field("long"), field("long")),
    "a field without a name": record(field("long"), field("long", None)),
    "a fixed of half a byte": record(field({"type": "fixed", "name": "F", "size": 1.5})),
    "a fixed of true": record(field({"type": "fixed", "name": "F", "size": True})),
    "a scale of text": record(field({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": ""})),
    "an alias that is a number": record({**field("long"), "aliases": [1]}),
    "aliases that are one text": {**record(field("long")), "aliases": "ab"},
    "a namespace that is a list": {**record(field("long")), "namespace": ["n" * 100_000]},
}


@pytest.mark.parametrize("schema", UNCHECKED.values(), ids=UNCHECKED)
def test_an_avro_schema_cannot_say_that_it_is_checked(schema):
    with pytest.raises(SchemaMismatchError):
        parse_avro(StoredSchema("AVRO", json.dumps(schema)))


@pytest.mark.parametrize("schema", [RECURSIVE, UNKNOWN], ids=["recursion", "an unknown name"])
def test_a_reference_of_an_avro_schema_cannot_say_that_it_is_checked(schema):
    reference = StoredSchema("AVRO", json.dumps({**schema, **PARSED, "__named_schemas": {"R": schema}}))
    with pytest.raises(SchemaMismatchError):
        parse_avro(StoredSchema("AVRO", json.dumps(record(field("R"), name="Q")), (("R", reference),)))


@pytest.mark.parametrize("body", [b"\2", b"\2" * 300_000], ids=len)
def test_messages_of_a_recursive_avro_schema_are_dead_letters_and_end_no_process(registry, body):
    good = framed(registry.register("good-value", GOOD["AVRO"][1]), GOOD["AVRO"][2])
    recursive = record(field("long"), field(record(field("type_0", "y"), name="type_0"), "x"))
    bad = framed(registry.register("bad-value", json.dumps(recursive | PARSED)), body)
    decoder = decoder_of(registry, "AVRO").resolved()
    # More messages than may end a process.
    rows, errors = decode_isolated_each(decoder, [good, *[bad] * 25, good])
    assert [row["id"] for row in rows] == [7, *[None] * 25, 7]
    assert [error is None for error in errors] == [True, *[False] * 25, True]
    assert CRASHED not in errors


def test_a_name_that_is_that_of_a_simple_type_means_the_simple_type():
    schema = record(field(record(field("string", "a"), name="int"), "x"), field("int"))
    assert decode(Avro(schema), [b"\2z\x0e"]) == ([{"x": {"a": "z"}, "id": 7}], [None])


def test_attributes_that_avro_does_not_know_are_ignored_and_data_is_left():
    odd = {"__x": 1, "-flag": [], "connect.name": "c", "doc": "__fastavro_parsed", **PARSED}
    marks = list(PARSED)
    symbols = {"type": "enum", "name": "E", "symbols": marks, "default": marks[0], **odd}
    more = {**field({"type": "map", "values": "boolean", **odd}, "more"), "default": {marks[0]: True}, **odd}
    inner = {**record(field("string", "name"), field("string", marks[1]), name="I"), **odd}
    default = {"name": "d" * 2000, marks[1]: "n"}
    writer = record({**field({"type": "long", **odd}), **odd}, {**field(symbols, marks[0]), **odd}) | odd
    reader = {**writer, "fields": [*writer["fields"], more, {**field(inner, "inner"), "default": default}]}
    own, written = (StoredSchema("AVRO", json.dumps(one)) for one in (reader, writer))
    schema = arrow_columns(columns_ddl(parse_avro(own), None))
    columns, errors = avro_decoding(written, own, schema, False).decode(pa.array([b"\x0e\2"]))
    expected = {"id": 7, marks[0]: marks[1], "more": [(marks[0], True)], "inner": default}
    assert errors.to_pylist() == [None]
    assert pa.RecordBatch.from_arrays(columns, schema=schema).to_pylist() == [expected]


def test_a_schema_that_fastavro_has_parsed_is_a_schema():
    enum = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
    parsed = fastavro.parse_schema({**record(field(enum), field("E", "b")), "namespace": "n"})
    assert parsed["__fastavro_parsed"]
    assert decode(Avro(parsed), [b"\0\2"]) == ([{"id": "A", "b": "B"}], [None])


def test_a_default_of_many_records_with_defaults_of_their_own_is_refused():
    default = {"default": [{}] * 300}
    inner = record({**field("string", "a"), "default": "x" * 1000}, name="A0")
    for depth in range(1, 4):
        inner = record({**field({"type": "array", "items": inner}, "a"), **default}, name=f"A{depth}")
    reader = record(field("long"), {**field({"type": "array", "items": inner}, "more"), **default})
    number = b"\0\0\0\0\1"
    decoder = Avro(reader, framed=True)
    assert decode(decoder, [number + b"\x0e\0"]) == ([{"id": 7, "more": []}], [None])
    with pytest.raises(SchemaMismatchError), cpu_limit(10):
        default_of(parse_avro(decoder.schema).fields[1], "more")


def test_a_long_default_is_refused_where_it_is_used():
    """A payload of many items would become a row that is as many times as long."""
    item = record(field("long"), {**field("string", "more"), "default": "x" * 20_000}, name="I")
    with pytest.raises(SchemaMismatchError):
        default_of(parse_avro(Avro(item).schema).fields[1], "more")


def with_map(order, *, numbers=(1, 2), kinds=(9, 3), labels=(1, 1), names=("key", "value"), field_kind=11, label=3):
    """Give a message a map m, or something similar."""
    entry = order.nested_type.add(name="MEntry", options={"map_entry": True})
    for name, number, kind, of in zip(names, numbers, kinds, labels, strict=True):
        entry.field.add(name=name, number=number, type=kind, label=of, type_name=".Order" if kind == 11 else None)
    order.field.add(name="m", number=2, type=field_kind, label=label, type_name=".Order.MEntry")
    return entry


def with_map_elsewhere(file):
    with_map(file.message_type[0])
    other = file.message_type.add(name="Other")
    other.field.add(name="m", number=1, type=11, label=3, type_name=".Order.MEntry")


def with_entry_as_message(file):
    order = file.message_type[0]
    order.field.add(name="key", number=1, type=3, label=1)
    order.field.add(name="value", number=2, type=9, label=1)
    order.options.map_entry = True
    file.message_type.add(name="Other").field.add(name="o", number=1, type=11, label=3, type_name=".Order")


def with_extended_map(file):
    with_map(file.message_type[0])
    file.message_type.add(name="Other").extension_range.add(start=100, end=200)
    file.extension.add(name="x", number=100, type=11, label=3, type_name=".Order.MEntry", extendee=".Other")


ODD_MAPS = {
    "other numbers": lambda file: with_map(file.message_type[0], numbers=(7, 9)),
    "numbers the other way round": lambda file: with_map(file.message_type[0], numbers=(2, 1)),
    "other names": lambda file: with_map(file.message_type[0], names=("k", "v")),
    "messages with other numbers": lambda file: with_map(file.message_type[0], numbers=(7, 9), kinds=(9, 11)),
    "a key that is a message": lambda file: with_map(file.message_type[0], kinds=(11, 3)),
    "a key that is a real number": lambda file: with_map(file.message_type[0], kinds=(1, 3)),
    "several keys": lambda file: with_map(file.message_type[0], labels=(3, 1)),
    "several values": lambda file: with_map(file.message_type[0], labels=(1, 3)),
    "one entry": lambda file: with_map(file.message_type[0], label=1),
    "no value": lambda file: with_map(file.message_type[0]).field.pop(),
    "three fields": lambda file: with_map(file.message_type[0]).field.add(name="more", number=3, type=3, label=1),
    "a nested message": lambda file: with_map(file.message_type[0]).nested_type.add(name="N"),
    "a group": lambda file: with_map(file.message_type[0], field_kind=10),
    "the map of another message": with_map_elsewhere,
    "a message that is an entry": with_entry_as_message,
    "an extension": with_extended_map,
}


def descriptors(change):
    """The schema of a message with an id, after a change that no compiler makes, as a registry returns it."""
    text = 'syntax = "proto2"; message Order { optional int64 id = 5; }'
    (file,) = compiled({"order.proto": text}, "order.proto").file
    change(file)
    return base64.b64encode(file.SerializeToString()).decode()


@pytest.mark.parametrize("change", ODD_MAPS.values(), ids=ODD_MAPS)
def test_an_entry_of_a_map_is_as_the_compiler_makes_it(registry, change):
    text = 'syntax = "proto2"; message Order { optional int64 id = 5; map<string, int32> m = 2; }'
    good = registry.register("good-value", text, "PROTOBUF")
    bad = registry.register("bad-value", descriptors(change), "PROTOBUF")
    decoder = decoder_of(registry, "PROTOBUF").resolved()
    payloads = [framed(good, b"\0\x28\x07"), *[framed(bad, b"\0\x28\x07")] * 25, framed(good, b"\0\x28\x07")]
    # More messages than may end a process.
    rows, errors = decode_isolated_each(decoder, payloads)
    assert [row["id"] for row in rows] == [7, *[None] * 25, 7]
    assert CRASHED not in errors
    with pytest.raises(SchemaMismatchError):
        decoder_of(registry, "PROTOBUF", "bad-value").resolved()


def test_a_map_that_the_compiler_has_made_is_one(registry):
    text = descriptors(lambda file: with_map(file.message_type[0]))
    number = registry.register("good-value", text, "PROTOBUF")
    rows, errors = decode(decoder_of(registry, "PROTOBUF").resolved(), [framed(number, b"\0\x12\x05\x0a\1k\x10\7")])
    assert (rows, errors) == ([{"id": None, "m": [("k", 7)]}], [None])


def test_a_large_oneof_is_compared_in_proportion_to_its_size():
    read = "".join(f"int32 f{number} = {number};" for number in range(1, 3000))
    texts = [f'syntax = "proto3"; message M {{ oneof o {{ {read} }} {more} }}' for more in ("", "string z = 5000;")]
    reader, writer = (schema_of_text(text, None) for text in texts)
    with cpu_limit(2):
        assert message_check(writer, reader) is None


def many(kind, count):
    return " ".join(f"{kind} f{number} = {number};" for number in range(2, count))


WIDE = {
    "a field that is not read": (
        "message Order { int32 f2 = 2; }",
        f"message Order {{ int64 f2 = 2; repeated Wide items = 1; }} message Wide {{ {many('int64', 5000)} }}",
    ),
    "items with a field to compare": (
        "message Order { repeated Item items = 1; int32 f2 = 2; } message Item { int32 f2 = 2; }",
        f"message Order {{ repeated Wide items = 1; int64 f2 = 2; }} message Wide {{ {many('int64', 5000)} }}",
    ),
    "items that have many fields to compare elsewhere": (
        f"message Order {{ repeated Item items = 1; {many('int32', 2500)} }} message Item {{ int32 f2 = 2; }}",
        f"message Order {{ repeated Order items = 1; {many('int64', 2500)} }}",
    ),
    "items that become text": (
        "message Order { repeated string items = 1; int32 f2 = 2; }",
        f"message Order {{ repeated Wide items = 1; int64 f2 = 2; }} message Wide {{ {many('int64', 5000)} }}",
    ),
}


@pytest.mark.parametrize("texts", WIDE.values(), ids=WIDE)
def test_fields_of_a_writer_need_no_memory_unless_they_are_compared(registry, monkeypatch, texts):
    """Protobuf allocates all fields of each item, which has two bytes."""
    good, bad = (
        registry.register(name, f'syntax = "proto3"; {text}', "PROTOBUF")
        for name, text in zip(("good-value", "bad-value"), texts)
    )
    decoder = decoder_of(registry, "PROTOBUF").resolved()
    payloads = [framed(good, b"\0\x10\x07"), framed(bad, b"\0\x10\x07" + b"\x0a\0" * 20_000)]
    monkeypatch.setattr("spark_jobs.decoding.isolated_process.BASE_MEMORY", 128 << 20)
    with limited_memory(len(payloads[1])):
        rows, errors = decode(decoder, payloads)
    assert (rows[0]["f2"], errors[0]) == (7, None)
    if "repeated string" in texts[0]:
        assert "'items' was written" in errors[1]
    else:
        assert (rows[1]["f2"], errors[1]) == (7, None)


def test_a_pattern_that_takes_long_to_compile_is_refused(monkeypatch):
    monkeypatch.setattr("spark_jobs.decoding.json_schema.SCHEMA_SECONDS", 0.1)
    pattern = "(?i)" + "[a-\uffff]" * 40
    decoder = JsonSchema(properties(id={"type": "integer"}, s={"type": "string", "pattern": pattern}), validate=True)
    with pytest.raises(SchemaMismatchError):
        decode(decoder, [b'{"id":7}'])


def test_a_machine_that_cannot_compile_for_now_refuses_no_schema(monkeypatch):
    stored = StoredSchema("PROTOBUF", f"{PROTO} // compiled on another day")
    with monkeypatch.context() as full:
        full.setattr("tempfile.TemporaryDirectory", raising(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(SchemaRegistryError):
            files_of_stored(stored)
    assert files_of_stored(stored).names == {(0,): "Order"}


def raising(error):
    def call(*_, **__):
        raise error

    return call


@pytest.mark.parametrize("inner", ["a.proto/b.proto", "A.Proto/b.proto"])
def test_a_file_within_another_file_is_refused(inner):
    references = tuple((name, StoredSchema("PROTOBUF", PROTO)) for name in ("a.proto", inner))
    with pytest.raises(SchemaMismatchError):
        files_of_stored(StoredSchema("PROTOBUF", PROTO, references))


def test_enums_of_many_fields_share_their_names():
    symbols = " ".join(f"S{place} = {place};" for place in range(20_000))
    fields = " ".join(f"E f{place} = {place};" for place in range(1, 1000))
    text = f'syntax = "proto3"; enum E {{ {symbols} }} message M {{ {fields} }}'
    with cpu_limit(10):
        assert decode(Protobuf(text), [b"\x08\x05"])[0][0]["f1"] == "S5"


@pytest.mark.parametrize(
    ("kind", "text"),
    [OF_ANY["PROTOBUF: nested deep"], OF_ANY["AVRO: symbols at each reference"]],
    ids=["compiled", "parsed"],
)
def test_a_schema_that_was_refused_is_not_tried_again(registry, kind, text, monkeypatch):
    tried = []
    for module, name in ((protobuf_schema, "compiled"), (avro_schema, "_document")):
        tried_now = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, make=tried_now, **more: (tried.append(given), make(*given, **more))[1]
        )
    first = read_next_to_a_good_one(registry, kind, f"{text} ")
    tried.clear()
    assert read_next_to_a_good_one(registry, kind, f"{text} ") == first
    assert tried == []


def test_what_is_made_of_schemas_is_kept_up_to_a_size(monkeypatch):
    monkeypatch.setattr(schema_limits, "MAX_CACHED_CHARACTERS", 3 * schema_limits.ENTRY_CHARACTERS + 100)
    made = []

    @schema_limits.cached_by_size(len)
    def spelled(stored):
        made.append(stored.text)
        return stored.text

    def used(*texts):
        made.clear()
        for text in texts:
            spelled(StoredSchema("AVRO", text))
        return made

    assert used("a", "b", "c", "a") == ["a", "b", "c"]
    # The one that was used least lately makes room, and a large one counts for more.
    assert used("d", "a", "c", "b") == ["d", "b"]
    assert used("x" * 2000, "b") == ["x" * 2000, "b"]


# Text of Protobuf behind // is a comment, and Python continues a line behind \.
POLYGLOT = 'syntax = "proto3" // __import__("pathlib").Path("MARK").touch() \\\n;'


def test_what_a_schema_refers_to_is_never_run(registry, tmp_path):
    """The compiler once imported what a reference had written beside it."""
    mark = tmp_path / "mark"
    registry.register("package", 'syntax = "proto3";', "PROTOBUF")
    registry.register("module", POLYGLOT.replace("MARK", str(mark)), "PROTOBUF")
    references = [
        {"name": "../grpc_tools/__init__.py", "subject": "package", "version": 1},
        {"name": "../grpc_tools/protoc.py", "subject": "module", "version": 1},
    ]
    assert "../grpc_tools" in read_next_to_a_good_one(registry, "PROTOBUF", f"{PROTO} ", references)
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    [
        "../order.proto",
        "shop/../../order.proto",
        "./order.proto",
        "/tmp/order.proto",
        "//order.proto",
        "shop//order.proto",
        "shop\\order.proto",
        "C:order.proto",
        "order\0.proto",
        "order.proto\n",
        "-I.proto",
        ".order.proto",
        "order.py",
        ".proto",
        "",
        f"{'a' * 250}.proto",
    ],
)
def test_names_of_files_that_are_no_plain_paths_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SchemaMismatchError):
        files_of_stored(StoredSchema("PROTOBUF", PROTO, ((name, StoredSchema("PROTOBUF", PROTO)),)))
    with pytest.raises(SchemaMismatchError):
        compiled({"own.proto": PROTO, name: PROTO}, "own.proto")
    assert list(tmp_path.iterdir()) == []


def test_the_compiler_imports_nothing_that_others_may_write(tmp_path, monkeypatch):
    package, mark = tmp_path / "grpc_tools", tmp_path / "mark"
    package.mkdir()
    for module in ("__init__", "protoc"):
        (package / f"{module}.py").write_text(f"open({str(mark)!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(package / "protoc.py"))
    assert [file.name for file in compiled({"own.proto": PROTO}, "own.proto").file] == ["own.proto"]
    assert not mark.exists()


def test_the_compiler_has_limits(monkeypatch):
    program = protobuf_schema._COMPILER
    # More than its memory, which no machine has to give as long as it is not written to.
    monkeypatch.setattr(protobuf_schema, "_COMPILER", program.replace("from", "much = bytearray(4 << 30)\nfrom"))
    with pytest.raises(SchemaMismatchError) as raised:
        compiled({"own.proto": PROTO}, "own.proto")
    assert raised.value.facts["exit_code"] == 1


def test_what_the_compiler_prints_is_limited():
    """Each error repeats the name of the message, so that all errors have about 130 million characters."""
    text = f'syntax = "proto3"; message {"M" * 65_000} {{ {"bool a = 1;" * 1000} }}'
    tracemalloc.start()
    try:
        with pytest.raises(SchemaMismatchError) as raised:
            compiled({"own.proto": text}, "own.proto")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert raised.value.facts["exit_code"] != 0
    assert peak < 4 << 20


def test_a_slow_machine_refuses_no_schema(monkeypatch):
    stored = StoredSchema("PROTOBUF", f"{PROTO} // compiled on a busy day")
    with monkeypatch.context() as busy:
        busy.setattr(protobuf_schema, "_COMPILER", "import time; time.sleep(60)")
        busy.setattr(protobuf_schema, "_COMPILE_SECONDS", 0.2)
        with pytest.raises(SchemaRegistryError) as raised:
            files_of_stored(stored)
        assert raised.value.facts == {"seconds": 0.2}
    assert files_of_stored(stored).names == {(0,): "Order"}


def test_messages_that_are_called_like_those_of_protobuf_are_what_they_are(registry):
    registry.serializes = False
    text = (
        'syntax = "proto3"; package google.protobuf; message Timestamp { string seconds = 1; }'
        "message Int64Value { bool other = 1; } message Value { int64 id = 1; }"
        "message Order { Timestamp at = 1; Int64Value count = 2; Value any = 3; }"
    )
    own = {"name": "google/protobuf/timestamp.proto", "subject": "good-value", "version": 1}
    registry.register("good-value", text, "PROTOBUF")
    decoder = decoder_of(registry, "PROTOBUF", message="google.protobuf.Order").resolved()
    assert (
        decoder.ddl() == "`at` STRUCT<`seconds`: STRING>, `count` STRUCT<`other`: BOOLEAN>, `any` STRUCT<`id`: BIGINT>"
    )
    using = (
        'syntax = "proto3"; import "google/protobuf/timestamp.proto"; message O { google.protobuf.Timestamp at = 1; }'
    )
    registry.register("using-value", using, "PROTOBUF", [own])
    assert decoder_of(registry, "PROTOBUF", "using-value").resolved().ddl() == "`at` TIMESTAMP"


def reference(name, subject, version=1):
    return {"name": name, "subject": subject, "version": version}


def test_references_that_go_in_a_circle(registry):
    registry.register(
        "one", record_text := json.dumps(record(field("Two"), name="One")), "AVRO", [reference("Two", "two")]
    )
    registry.register("two", json.dumps(record(field("One"), name="Two")), "AVRO", [reference("One", "one")])
    assert read_next_to_a_good_one(registry, "AVRO", f"{record_text} ", [reference("Two", "two")]) is not None


def test_references_that_double_at_each_step_are_read_once(registry):
    """There are 2 to the power of 40 ways from the first to the last."""
    for step in range(40):
        next_ones = [reference(f"{side}{step}", f"step-{step + 1}") for side in "ab"]
        registry.register(f"step-{step}", json.dumps({"$id": str(step)}), "JSON", next_ones)
    registry.register("step-40", "{}", "JSON")
    registry.asked.clear()
    assert read_next_to_a_good_one(registry, "JSON", "{} ", [reference("first", "step-0")]) is None
    assert len(registry.asked) == len(set(registry.asked))


def test_references_without_end(registry, monkeypatch):
    monkeypatch.setattr(registries, "MAX_REFERENCES", 20)
    for step in range(40):
        next_one = [reference(f"name-{step}", f"step-{step + 1}")]
        registry.register(f"step-{step}", json.dumps({"$id": str(step)}), "JSON", next_one)
    assert read_next_to_a_good_one(registry, "JSON", "{} ", [reference("first", "step-0")]) is not None
    assert len(registry.asked) < 30


@pytest.mark.parametrize(
    "broken", [reference("a", "b", "1/../../config"), reference("a", None), reference(None, "b"), {}], ids=str
)
def test_references_that_are_none(registry, broken):
    assert read_next_to_a_good_one(registry, "JSON", "{} ", [broken]) is not None
    assert not any("config" in path for path in registry.asked)


@pytest.mark.parametrize("long", [reference("a", "s" * 70_000), reference("n" * 70_000, "a")], ids=["subject", "name"])
@pytest.mark.parametrize("is_limited", [True, False])
def test_a_reference_that_cannot_be_requested_is_no_outage(registry, monkeypatch, long, is_limited):
    if not is_limited:
        monkeypatch.setattr(registries, "MAX_NAME_CHARACTERS", 1 << 20)
    assert read_next_to_a_good_one(registry, "AVRO", f"{GOOD['AVRO'][1]} ", [long]) is not None


def test_references_of_one_schema_are_limited(registry, monkeypatch):
    registry.register("a", '"long"')
    monkeypatch.setattr(registries, "MAX_REFERENCES", 20)
    assert read_next_to_a_good_one(registry, "AVRO", '"long" ', [reference("a", "a")] * 21) is not None
    monkeypatch.setattr(registries, "MAX_SCHEMA_CHARACTERS", 1000)
    references = [reference(f"{step}{'n' * 50}", "a") for step in range(19)]
    assert read_next_to_a_good_one(registry, "AVRO", '"long"  ', references) is not None
    assert registry.asked.count("GET /subjects/a/versions/1") == 0


def test_a_subject_is_one_part_of_an_address(registry):
    with pytest.raises(StreamAssetsError):
        decoder_of(registry, "AVRO", "../../config?deleted=#/x").resolved()
    assert registry.asked == ["GET /subjects/..%2F..%2Fconfig%3Fdeleted%3D%23%2Fx/versions/latest"]


def test_credentials_follow_no_redirect(registry):
    with schema_registry() as other:
        registry.register("good-value", GOOD["AVRO"][1])
        registry.redirect = other.url
        options = {**QUICK, "basic.auth.user.info": "me:s3cret"}
        with pytest.raises(InvalidOptionError) as raised:
            Avro(registry=SchemaRegistry(registry.url, options=options), subject="good-value").resolved()
        assert raised.value.facts["status"] == 307
        assert other.asked == []


@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef", "$schema", "$id"])
def test_a_json_schema_fetches_nothing(registry, keyword, tmp_path):
    (tmp_path / "x").write_text("{}")
    with schema_registry() as other:
        for address in (f"{other.url}/x", (tmp_path / "x").as_uri()):
            value = {"type": "object", "properties": {"id": {"type": "integer"}, "more": {keyword: address}}}
            decoder = JsonSchema(value, validate=True) if keyword != "$ref" else None
            if decoder is None:
                with pytest.raises(SchemaMismatchError):
                    JsonSchema(value)
                # A place that no column is made of.
                decoder = JsonSchema({**properties(id={"type": "integer"}), "not": {"$ref": address}}, validate=True)
            decode(decoder, [b'{"id":7,"more":{}}'])
        assert other.asked == []


def test_a_schema_that_is_empty_is_that_of_a_message_only(registry):
    number = registry.register("good-value", GOOD["AVRO"][1])
    registry.parts = lambda: [b'{"schema": ""}']
    with pytest.raises(SchemaMismatchError):
        SchemaRegistry(registry.url, options=QUICK).schema(number)


@pytest.mark.parametrize(
    "name", ["A/" * 300 + "B", "A" * 1_000_000, "../zoneinfo/UTC", "posix/UTC", "__init__.py", "\0"]
)
def test_no_zone_that_a_message_names_is_looked_up_as_a_file_or_a_module(name):
    payload = json.dumps({"id": 2, "at": f"2024-01-01T00:00:00 {name}"}).encode()
    rows, errors = decode(Json("id BIGINT, at TIMESTAMP"), [b'{"id":1}', payload, b'{"id":3}'])
    assert (rows[0], rows[2]) == ({"id": 1, "at": None}, {"id": 3, "at": None})
    assert [error is None for error in errors] == [True, False, True]


def fetching_tokens(registry):
    """The options of a client that fetches its tokens."""
    oauth = {"source": "OAUTHBEARER", "issuer.endpoint.url": f"{registry.url}/token", "logical.cluster": "c"}
    oauth |= {"client.id": "lake", "client.secret": "s3cret-4711", "scope": "x", "identity.pool.id": "p"}
    named = {f"bearer.auth.{'credentials.' * (name == 'source')}{name}": value for name, value in oauth.items()}
    return {**QUICK, **named}


def test_a_token_that_the_client_has_fetched_is_hidden_in_what_the_registry_says_of_it(registry):
    token = "2YotnFZFEjr1zCsicMWpAA-opaque_tGzv3JOkF0XG5Qx2TlKWIA"
    registry.replies["/token"] = 200, {"access_token": token, "token_type": "Bearer", "expires_in": 3600}
    registry.replies["/schemas/ids/5"] = 403, {"error_code": 40301, "message": f"{token} is for another audience"}
    with pytest.raises(StreamAssetsError) as raised:
        SchemaRegistry(registry.url, options=fetching_tokens(registry)).schema(5)
    assert "is for another audience" in str(raised.value)
    assert token[:12] not in str(raised.value)


@pytest.mark.parametrize(
    ("status", "answer", "error"),
    [
        (400, {"error": "invalid_client"}, AccessDeniedError),
        (200, {"expires_in": 3600}, AccessDeniedError),
        (503, {}, SchemaRegistryError),
    ],
)
def test_a_refused_token_is_no_outage(registry, status, answer, error):
    registry.replies["/token"] = status, answer
    with pytest.raises(error):
        SchemaRegistry(registry.url, options=fetching_tokens(registry)).schema(5)


def test_an_answer_that_may_unpack_to_anything_is_refused(registry):
    number = registry.register("good-value", GOOD["AVRO"][1])
    registry.headers = {"Content-Encoding": "gzip"}
    registry.parts = lambda: [gzip.compress(b" " * (1 << 20))]
    with pytest.raises(SchemaMismatchError):
        SchemaRegistry(registry.url, options=QUICK).schema(number)


def test_names_in_a_schema_are_names_of_columns(registry):
    names = ["a`b", "x\n--;", "y` STRING, `z", "DROP TABLE t"]
    registry.register("good-value", json.dumps(properties(**{name: {"type": "integer"} for name in names})), "JSON")
    assert arrow_columns(decoder_of(registry, "JSON").resolved().ddl()).names == names


def test_the_reason_of_a_dead_letter_is_short(registry):
    """It is written for each of them, whatever a schema calls its types."""
    error = read_next_to_a_good_one(registry, "AVRO", json.dumps(record(field("long"), name="R" * 1_000_000)))
    assert len(error) < 400


@pytest.mark.parametrize("size", [1 << 20, 1 << 40])
def test_the_size_of_a_fixed_allocates_nothing(registry, size):
    """A payload of a few bytes, in a schema that says it has more."""
    decimal = {"logicalType": "decimal", "precision": 10, "scale": 2}
    registry.register("good-value", json.dumps(record(field({"type": "bytes", **decimal}))))
    written = {"type": "fixed", "name": "F", "size": size, **decimal}
    number = registry.register("bad-value", json.dumps(record(field(written))))
    decoder = decoder_of(registry, "AVRO").resolved()
    tracemalloc.start()
    try:
        errors = decode(decoder, [framed(number, b"\1")] * ROWS)[1]
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert None not in errors


def test_unions_within_unions_are_planned_once():
    schema = "long"
    for depth in range(30):
        schema = record(field(["null", "string", schema], "a"), name=f"R{depth}")
    assert decode(Avro(schema), [b"\0", b"\2\2x"])[0] == [{"a": None}, {"a": {"string": "x", "R28": None}}]


def test_schemas_are_kept_up_to_a_size(registry, monkeypatch):
    monkeypatch.setattr(registries, "MAX_CACHED_CHARACTERS", 3_500)
    _, text, payload = GOOD["JSON"]
    numbers = [registry.register("good-value", f"{text}{' ' * more}", "JSON") for more in range(10)]
    decoder = decoder_of(registry, "JSON").resolved()
    assert decode(decoder, [framed(number, payload) for number in numbers]) == ([{"id": 7}] * 10, [None] * 10)
    assert len(decoder.registry._lookups()._known) <= 3


EXPLODING = {**properties(id={"type": "integer"}, s={"type": "string", "pattern": "^(a+)+$"})}
ATTACK = json.dumps({"id": 7, "s": "a" * 60 + "!"}).encode()


def test_only_schemas_of_the_subject_validate(registry):
    own = registry.register("orders-value", GOOD["JSON"][1], "JSON")
    other = registry.register("attacker-value", json.dumps(EXPLODING), "JSON")
    decoder = decoder_of(registry, "JSON", "orders-value", validate=True).resolved()
    rows, errors = decode(decoder, [framed(own, b'{"id":7}'), framed(other, ATTACK), framed(own, b'{"id":"x"}')])
    assert (rows[0], errors[0]) == ({"id": 7}, None)
    assert errors[1] == f"schema id {other} is not registered under subject 'orders-value'"
    assert errors[2] is not None
    # Without validation nothing of the schema is run.
    assert decode(decoder_of(registry, "JSON", "orders-value").resolved(), [framed(other, ATTACK)])[1] == [None]
    # Whether a schema belongs to a subject is asked for once.
    registry.asked.clear()
    assert decode(decoder, [framed(own, b'{"id":7}'), framed(other, ATTACK)])[1] == [None, errors[1]]
    assert registry.asked == []


def test_a_schema_of_our_own_validates_whatever_the_id(registry):
    other = registry.register("attacker-value", json.dumps(EXPLODING), "JSON")
    ours = properties(id={"type": "integer", "minimum": 0}, s={"type": "string"})
    decoder = JsonSchema(ours, registry=SchemaRegistry(registry.url, options=QUICK), validate=True)
    rows, errors = decode(decoder, [framed(other, ATTACK), framed(other, b'{"id":-1}')])
    assert (rows[0]["id"], errors[0]) == (7, None)
    assert errors[1] is not None


def test_a_pattern_of_the_subject_that_takes_for_ever_is_interrupted(monkeypatch):
    monkeypatch.setattr("spark_jobs.decoding.json_schema.VALIDATION_SECONDS", 0.1)
    rows, errors = decode(JsonSchema(EXPLODING, validate=True), [b'{"id":7,"s":"aa"}', ATTACK, b'{"id":8}'])
    assert [row["id"] for row in rows] == [7, 7, 8]
    assert [error is None for error in errors] == [True, False, True]


def test_a_limit_of_cpu_time_is_no_more_than_a_block_and_a_thread():
    with cpu_limit(0.01):
        pass
    done = []

    def elsewhere():
        with cpu_limit(0.0):
            done.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    before = os.times().user
    while os.times().user - before < 0.05:
        pass
    assert done == [True]


def test_what_is_no_unicode_in_a_payload_is_a_reason_that_can_be_written():
    schema = {**properties(id={"type": "integer"}), "additionalProperties": {"type": "integer"}}
    (_, error) = decode(JsonSchema(schema, validate=True), [b'{"id":7}', b'{"id":7,"\\ud800":"x"}'])[1]
    assert error is not None


def test_a_payload_that_the_validator_cannot_parse_is_not_let_through():
    digits = b'{"id":7,"n":' + b"9" * 5000 + b"}"
    assert decode(JsonSchema(properties(id={"type": "integer"})), [digits])[1] == [None]
    assert decode(JsonSchema(properties(id={"type": "integer"}), validate=True), [digits])[1] != [None]


def test_a_key_of_a_map_that_is_there_twice_is_an_error():
    schema = record(field({"type": "map", "values": "int"}))
    rows, errors = decode(
        Avro(schema), [b"\x02\x02a\x02\x00", b"\x04\x02a\x02\x02a\x04\x00", b"\x02\x02a\x02\x02\x02a\x04\x00"]
    )
    assert (rows[0], [error is None for error in errors]) == ({"id": [("a", 1)]}, [True, False, False])


@pytest.mark.parametrize(
    "answer",
    [
        b'{"schema": 5}',
        b"[]",
        b"\xff",
        b"[" * 200_000,
        b'{"schema": "null", "references": "abc"}',
        b'{"schema": "null", "schemaType": ["AVRO"]}',
    ],
)
def test_an_odd_answer_of_a_registry_is_about_the_schema_that_a_message_names(registry, answer):
    _, text, payload = GOOD["AVRO"]
    good = framed(registry.register("good-value", text), payload)
    decoder = decoder_of(registry, "AVRO").resolved()
    registry.parts, registry.odd_path = lambda: [answer], "/77"
    rows, errors = decode(decoder, [good, framed(77, payload), good])
    assert (rows[0], rows[2]) == ({"id": 7}, {"id": 7})
    assert [error is None for error in errors] == [True, False, True]
