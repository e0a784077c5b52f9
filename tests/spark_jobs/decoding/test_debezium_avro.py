"""Debezium in Avro: the columns of the envelope's row, its types, and schemas that change."""

import json
from datetime import date, datetime, timezone
from decimal import Decimal

import pytest

from spark_jobs.decoding import debezium_avro
from spark_jobs.decoding.avro import MIN_BLOCK_ROWS, Avro
from spark_jobs.decoding.debezium import Debezium
from spark_jobs.decoding.decoders import is_resolved, resolved
from spark_jobs.decoding.schema_registry import SchemaRegistry
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError
from tests.support.arrow_columns import decode
from tests.support.avro_schemas import encoded
from tests.support.debezium_messages import PLACEHOLDER, POSTGRES

TIME, DATA, CONNECT = "io.debezium.time.", "io.debezium.data.", "org.apache.kafka.connect.data."
SECONDS = 1700000000
AT = datetime(2023, 11, 14, 22, 13, 20, tzinfo=timezone.utc)


def framed(number, data):
    return b"\0" + number.to_bytes(4, "big") + data


def semantic(kind, name, **more):
    return {"type": kind, "connect.version": 1, "connect.name": name, **more}


def field(name, kind):
    return {"name": name, "type": ["null", kind], "default": None}


FIELDS = [
    {"name": "id", "type": "long"},
    field("name", "string"),
    field("day", semantic("int", f"{TIME}Date")),
    field("at", semantic("long", f"{TIME}MicroTimestamp")),
    field("at_ms", semantic("long", f"{TIME}Timestamp")),
    field("at_ns", semantic("long", f"{TIME}NanoTimestamp")),
    field("at_connect", semantic("long", f"{CONNECT}Timestamp", logicalType="timestamp-millis")),
    field("zoned", semantic("string", f"{TIME}ZonedTimestamp")),
    field("clock", semantic("long", f"{TIME}MicroTime")),
    field("price", semantic("bytes", f"{CONNECT}Decimal", scale=2, precision=10, logicalType="decimal")),
    field(
        "amount",
        {
            **semantic("record", f"{DATA}VariableScaleDecimal"),
            "name": "VariableScaleDecimal",
            "namespace": "io.debezium.data",
            "fields": [{"name": "scale", "type": "int"}, {"name": "value", "type": "bytes"}],
        },
    ),
    field("amount_again", "io.debezium.data.VariableScaleDecimal"),
    field("document", semantic("string", f"{DATA}Json")),
    field("raw", "bytes"),
    field("tags", {"type": "array", "items": ["null", "string"]}),
    field("times", {"type": "array", "items": ["null", semantic("long", f"{TIME}MicroTimestamp")]}),
]
DDL = (
    "`id` BIGINT, `name` STRING, `day` DATE, `at` TIMESTAMP, `at_ms` TIMESTAMP, `at_ns` BIGINT, "
    "`at_connect` TIMESTAMP, `zoned` TIMESTAMP, `clock` BIGINT, `price` DECIMAL(10,2), `amount` STRING, "
    "`amount_again` STRING, "
    "`document` STRING, `raw` BINARY, `tags` ARRAY<STRING>, `times` ARRAY<TIMESTAMP>"
)
ROW = {
    "id": 7,
    "name": "Ada",
    "day": 19675,
    "at": SECONDS * 10**6,
    "at_ms": SECONDS * 10**3,
    "at_ns": SECONDS * 10**9 + 1,
    "at_connect": AT,
    "zoned": "2023-11-14T22:13:20Z",
    "clock": 3723000005,
    "price": Decimal("1234.56"),
    "amount": {"scale": 3, "value": (-1234567).to_bytes(3, "big", signed=True)},
    "amount_again": {"scale": 0, "value": b"\7"},
    "document": '{"a": 1}',
    "raw": b"\0\1",
    "tags": ["x", None],
    "times": [SECONDS * 10**6, None],
}
COLUMNS = {
    "id": 7,
    "name": "Ada",
    "day": date(2023, 11, 14),
    "at": AT,
    "at_ms": AT,
    "at_ns": SECONDS * 10**9 + 1,
    "at_connect": AT,
    "zoned": AT,
    "clock": 3723000005,
    "price": Decimal("1234.56"),
    "amount": "-1234.567",
    "amount_again": "7",
    "document": '{"a": 1}',
    "raw": b"\0\1",
    "tags": ["x", None],
    "times": [AT, None],
}
PLACE = "00000000000024023119/00000000000024023128"
NOTHING = {**dict.fromkeys(COLUMNS), "_op": None, "_unavailable": None}


def envelope_schema(fields=None, namespace="shop.public.customers"):
    """The schema of an envelope as Connect's converter registers it."""
    value = {"type": "record", "name": "Value", "namespace": namespace, "fields": FIELDS if fields is None else fields}
    source = [
        {"name": "connector", "type": "string"},
        {"name": "snapshot", "type": ["null", semantic("string", f"{DATA}Enum")], "default": None},
        {"name": "sequence", "type": ["null", "string"], "default": None},
        {"name": "lsn", "type": ["null", "long"], "default": None},
    ]
    return {
        "type": "record",
        "name": "Envelope",
        "namespace": namespace,
        "fields": [
            {"name": "before", "type": ["null", value], "default": None},
            {"name": "after", "type": ["null", "Value"], "default": None},
            {
                "name": "source",
                "type": {
                    "type": "record",
                    "name": "Source",
                    "namespace": "io.debezium.connector.postgresql",
                    "fields": source,
                },
            },
            {"name": "op", "type": "string"},
            {"name": "ts_ms", "type": ["null", "long"], "default": None},
        ],
        "connect.version": 2,
        "connect.name": f"{namespace}.Envelope",
    }


SCHEMA = envelope_schema()


def event(operation, *, before=None, after=None, schema=SCHEMA, source=POSTGRES):
    return encoded(schema, {"before": before, "after": after, "source": source, "op": operation, "ts_ms": 1})


def changed(operation, row, unavailable=()):
    return {**NOTHING, **row, "_op": operation, "_unavailable": list(unavailable)}


@pytest.mark.parametrize("times", [1, MIN_BLOCK_ROWS], ids=["one by one", "as blocks"])
def test_the_row_of_each_operation(times):
    decoder = Debezium(Avro(SCHEMA), source_order=True)
    assert decoder.ddl() == f"{DDL}, `_op` STRING, `_source_order` STRING, `_unavailable` ARRAY<STRING>"
    messages = [
        event("c", after=ROW),
        event("u", before=ROW, after={**ROW, "name": "Eve"}),
        event("r", after={"id": 8}),
        event("d", before={**ROW, "name": None}),
        event("t"),
        event("m"),
        None,
    ]
    expected = [
        changed("c", COLUMNS),
        changed("u", {**COLUMNS, "name": "Eve"}),
        changed("r", {"id": 8}),
        changed("d", {**COLUMNS, "name": None}),
        changed("t", {}),
        NOTHING,
        NOTHING,
    ]
    expected = [{**row, "_source_order": PLACE if row["_op"] else None} for row in expected]
    assert decode(decoder, messages * times) == (expected * times, [None] * len(messages) * times)


def test_values_that_the_database_did_not_log():
    gone = {"name": PLACEHOLDER, "raw": PLACEHOLDER.encode(), "tags": [PLACEHOLDER], "document": PLACEHOLDER}
    rows, errors = decode(Debezium(Avro(SCHEMA)), [event("u", after={**ROW, **gone}), event("u", after=ROW)])
    assert errors == [None, None]
    unavailable = ["name", "document", "raw", "tags"]
    assert rows == [changed("u", {**COLUMNS, **dict.fromkeys(gone)}, unavailable), changed("u", COLUMNS)]


GONE = {**ROW, "name": PLACEHOLDER, "tags": [PLACEHOLDER]}


@pytest.mark.parametrize(
    ("message", "is_value"),
    [
        (event("r", after=GONE), True),
        (event("u", before=ROW, after=GONE), True),
        (event("u", before=GONE, after=GONE), False),
        (event("u", before={"id": 7}, after=GONE), False),
        (event("c", after=GONE), False),
        (event("d", before=GONE), False),
    ],
)
def test_a_placeholder_is_a_value_where_the_value_cannot_be_lacking(message, is_value):
    rows, errors = decode(Debezium(Avro(SCHEMA)), [message, event("u", after=GONE)])
    assert errors == [None, None]
    found = [(row["name"], row["tags"], row["_unavailable"]) for row in rows]
    lacks = (None, None, ["name", "tags"])
    assert found == [(PLACEHOLDER, [PLACEHOLDER], []) if is_value else lacks, lacks]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (event("x", after=ROW), "field 'op' is not one of c, u, d, r, t and m; found text"),
        (event("u", before=ROW), "field 'after' is null"),
        (event("d", after=ROW), "field 'before' is null"),
        (event("c", after={**ROW, "zoned": "infinity"}), "field 'zoned' is not a time"),
        (event("c", after={**ROW, "zoned": "2023-11-14T22:13:20.123456789Z"}), "field 'zoned' is not a time"),
        (event("c", after={**ROW, "amount": {"scale": 1, "value": b""}}), "field 'amount' is not a decimal"),
        (event("c", after={**ROW, "amount": {"scale": -(10**8), "value": b"\1"}}), "field 'amount' has a scale"),
        (event("c", after={**ROW, "amount": {"scale": 10**8, "value": b"\1"}}), "field 'amount' has a scale"),
        (event("c", after={**ROW, "at": 2**62}), "not in the years 1 to 9999"),
        (event("c", after=ROW, source={**POSTGRES, "lsn": None, "sequence": None}), "field 'source.lsn' is missing"),
        (event("c", after=ROW)[:-3], "ends too early"),
        (b"", ""),
    ],
)
def test_what_is_no_change_event_is_a_dead_letter(message, reason):
    rows, errors = decode(Debezium(Avro(SCHEMA), source_order=True), [message, event("c", after=ROW)])
    assert reason in errors[0]
    assert errors[1] is None
    assert rows[1]["id"] == 7


def test_a_field_of_the_order_of_another_type_is_a_dead_letter():
    schema = envelope_schema()
    source = schema["fields"][2]["type"]["fields"]
    source[2] = {"name": "sequence", "type": ["null", "long"], "default": None}
    rows, errors = decode(
        Debezium(Avro(schema), source_order=True),
        [event("c", after=ROW, schema=schema, source={**POSTGRES, "sequence": one}) for one in (5, None)],
    )
    assert "field 'source.sequence' is not" in errors[0]
    assert (errors[1], rows[1]["id"]) == (None, 7)


def test_a_row_for_which_anything_fails_stops_no_other_one(monkeypatch):
    def picky(source):
        if source["lsn"] == 5:
            raise KeyError("any error of a library")
        return PLACE

    monkeypatch.setattr(debezium_avro, "source_order", picky)
    messages = [event("c", after=ROW, source={**POSTGRES, "lsn": lsn}) for lsn in (4, 5, 6)]
    rows, errors = decode(Debezium(Avro(SCHEMA), source_order=True), messages)
    assert [error is None for error in errors] == [True, False, True]
    assert [(row["id"], row["_op"], row["_source_order"]) for row in rows] == [
        (7, "c", PLACE),
        (None, None, None),
        (7, "c", PLACE),
    ]


def test_unwrapped_rows():
    marks = [field("__deleted", "string"), field("__op", "string")]
    schema = {"type": "record", "name": "Value", "namespace": "shop", "fields": [*FIELDS, *marks]}
    decoder = Debezium(Avro(schema), unwrapped="rewrite-with-tombstone")
    assert decoder.ddl() == f"{DDL}, `_op` STRING, `_unavailable` ARRAY<STRING>"
    messages = [
        encoded(schema, {**ROW, "__deleted": "false", "__op": "c"}),
        encoded(schema, {**ROW, "__deleted": "true"}),
        encoded(schema, {**ROW, "__deleted": None}),
        None,
    ]
    rows, errors = decode(decoder, messages)
    assert [row["_op"] for row in rows] == ["c", "d", None, None]
    assert rows[0] == changed("c", COLUMNS)
    assert [error is None for error in errors] == [True, True, False, True]


@pytest.mark.parametrize(
    "schema",
    [
        '"long"',
        {"type": "record", "name": "Value", "fields": FIELDS},
        {**SCHEMA, "fields": [one for one in SCHEMA["fields"] if one["name"] != "op"]},
        {**SCHEMA, "fields": [{"name": name, "type": "string"} for name in ("before", "after", "op")]},
        {**SCHEMA, "fields": [*SCHEMA["fields"][:3], {"name": "op", "type": "int"}]},
    ],
)
def test_schemas_that_are_no_envelopes_are_refused_at_once(schema):
    with pytest.raises(SchemaMismatchError):
        Debezium(Avro(schema))


def test_the_order_needs_the_source():
    without = {**SCHEMA, "fields": [one for one in SCHEMA["fields"] if one["name"] != "source"]}
    empty = {
        "name": "source",
        "type": {"type": "record", "name": "Source", "fields": [{"name": "db", "type": "string"}]},
    }
    for schema in (without, {**without, "fields": [*without["fields"], empty]}):
        assert Debezium(Avro(schema)).ddl()
        with pytest.raises(SchemaMismatchError):
            Debezium(Avro(schema), source_order=True)


@pytest.mark.parametrize("schema", ['"long"', {"type": "record", "name": "Value", "fields": FIELDS}])
def test_unwrapped_rows_need_the_mark_of_deletes(schema):
    with pytest.raises(SchemaMismatchError):
        Debezium(Avro(schema), unwrapped="rewrite")


def test_the_schema_of_a_registry(registry):
    first = registry.register("shop.public.customers-value", json.dumps(SCHEMA))
    decoder = Debezium(registry=SchemaRegistry(registry.url), subject="shop.public.customers-value")
    assert not is_resolved(decoder)
    found = resolved(decoder)
    assert is_resolved(found)
    assert found.ddl() == f"{DDL}, `_op` STRING, `_unavailable` ARRAY<STRING>"

    # A column was added, and another one changes its precision: each payload has the unit of its own schema.
    changed_fields = [
        *(one for one in FIELDS if one["name"] != "at"),
        field("at", semantic("long", f"{TIME}Timestamp")),
        field("city", "string"),
    ]
    other = envelope_schema(changed_fields)
    second = registry.register("shop.public.customers-value", json.dumps(other))
    beat = {
        "type": "record",
        "name": "Heartbeat",
        "namespace": "io.debezium.connector.common",
        "fields": [{"name": "ts_ms", "type": "long"}],
    }
    third = registry.register("heartbeats", json.dumps(beat))
    messages = [
        framed(first, event("c", after=ROW)),
        framed(second, event("u", after={**ROW, "at": SECONDS * 1000, "city": "Rome"}, schema=other)),
        framed(third, encoded(beat, {"ts_ms": 1})),
        None,
        framed(99, b""),
    ]
    rows, errors = decode(found, messages)
    assert [error is None for error in errors] == [True, True, True, True, False]
    assert rows[:4] == [changed("c", COLUMNS), changed("u", COLUMNS), NOTHING, NOTHING]

    newest = resolved(decoder)
    assert newest.ddl().startswith(DDL.replace("`at` TIMESTAMP, ", ""))
    assert "`city` STRING" in newest.ddl()


def test_a_schema_and_a_registry_contradict_each_other():
    with pytest.raises(InvalidOptionError):
        Debezium("id BIGINT", registry=SchemaRegistry("http://registry"), subject="s")
    with pytest.raises(InvalidOptionError):
        Debezium(registry=SchemaRegistry("http://registry"))
