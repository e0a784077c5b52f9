"""Debezium: envelopes, unwrapped rows, messages that make no row, and what is no change event."""

import json
from base64 import b64encode

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.debezium import Debezium
from spark_jobs.decoding.decoders import Text, is_resolved, resolved, rows_where
from spark_jobs.decoding.json_decoder import Json, with_rescue
from stream_consumers.errors import InvalidOptionError, SchemaMismatchError
from tests.support.arrow_columns import decode
from tests.support.debezium_messages import (
    MYSQL,
    ORACLE,
    PLACEHOLDER,
    POSTGRES,
    SQLSERVER,
    envelope,
    envelope_schema,
    field,
    heartbeat,
    logical_message,
    schema_change,
    transaction,
    with_schema,
)
from tests.support.profiles import examples

COLUMNS = "id BIGINT, name STRING"
FIELDS = (field("id", "int64"), field("name", "string"))
ADA, NO_ONE = {"id": 7, "name": "Ada"}, {"id": None, "name": None}
NOTHING = {**NO_ONE, "_op": None, "_unavailable": None}


def changed(operation, row, unavailable=()):
    return {**NO_ONE, **row, "_op": operation, "_unavailable": list(unavailable)}


def test_the_columns():
    assert Debezium(COLUMNS).ddl() == f"{COLUMNS}, `_op` STRING, `_unavailable` ARRAY<STRING>"
    ordered = Debezium(Json(COLUMNS), source_order=True)
    assert ordered.ddl() == f"{COLUMNS}, `_op` STRING, `_source_order` STRING, `_unavailable` ARRAY<STRING>"
    assert Debezium(Json(COLUMNS)) == Debezium(COLUMNS)


@pytest.mark.parametrize("fields", [None, FIELDS], ids=["without schema", "with schema"])
@pytest.mark.parametrize("source", [POSTGRES, MYSQL, SQLSERVER, ORACLE], ids=lambda source: source["connector"])
def test_the_row_of_each_operation(source, fields):
    eve = {"id": 7, "name": "Eve"}
    messages = [
        envelope("c", after=ADA, source=source, fields=fields),
        envelope("u", before=ADA, after=eve, source=source, fields=fields),
        envelope("r", after=ADA, source=source, fields=fields),
        envelope("d", before=eve, source=source, fields=fields),
        envelope("d", before={"id": 7, "name": None}, source=source, fields=fields),
        envelope("d", before={"id": 7}, source=source, fields=fields),
        envelope("t", source=source, fields=fields),
    ]
    expected = [
        changed("c", ADA),
        changed("u", eve),
        changed("r", ADA),
        changed("d", eve),
        changed("d", {"id": 7}),
        changed("d", {"id": 7}),
        changed("t", {}),
    ]
    assert decode(Debezium(COLUMNS), messages) == (expected, [None] * len(messages))


def named(name):
    return {"type": "struct", "fields": [], "optional": False, "name": name}


@pytest.mark.parametrize(
    "message",
    [
        None,
        with_schema(None, None),
        with_schema(envelope_schema(FIELDS), None),
        heartbeat(),
        transaction("BEGIN"),
        transaction("END"),
        schema_change(),
        logical_message(),
        with_schema(named("io.debezium.connector.common.Heartbeat"), {"ts_ms": 1}),
        with_schema(named("io.debezium.connector.common.TransactionMetadataValue"), {"status": "END"}),
        with_schema(named("io.debezium.connector.postgresql.MessageValue"), {"op": "m"}),
        with_schema(named("io.debezium.connector.sqlserver.SchemaChangeValue"), {"ddl": None}),
    ],
)
def test_messages_that_make_no_row(message):
    """They are no dead letters either, and the condition of the decoder leaves them out."""
    decoder = Debezium(COLUMNS)
    assert decode(decoder, [message, envelope("c", after=ADA)]) == ([NOTHING, changed("c", ADA)], [None, None])
    assert rows_where(decoder) == "_op IS NOT NULL"
    assert rows_where(Text()) is None


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b'{"id": 7}', "field 'op' is not one of c, u, d, r, t and m; found nothing"),
        (envelope("x", after=ADA), "field 'op' is not one of c, u, d, r, t and m; found text"),
        (b'{"op": 7, "after": {"id": 7}}', "field 'op' is not one of c, u, d, r, t and m; found a whole number"),
        (b'{"op": ["c"], "after": {"id": 7}}', "field 'op' is not one of c, u, d, r, t and m; found an array"),
        (envelope("c"), "field 'after' is null"),
        (envelope("u", before=ADA), "field 'after' is null"),
        (envelope("d", after=ADA), "field 'before' is null"),
        (envelope("c", after='{"id": 7}'), "field 'after' is not an object; found text"),
        (envelope("d", before=[ADA]), "field 'before' is not an object; found an array"),
        (b'{"op": "c", "op": "d", "after": {"id": 7}, "before": {"id": 7}}', "field 'op' is there twice"),
        (b'{"op": "c", "after": {"id": 7, "id": 8}}', "field 'id' of the row is there twice"),
        (b'{"op": "c", "after": {"id": "secret"}}', "field 'id' is not a whole number of 64 bits; found text"),
        (b'{"op": "c", "after": {"name": "\\ud800"}}', "half of a surrogate pair"),
        (b'{"op": "c", "after": {"name": ' + b"[" * 5000 + b"]" * 5000 + b"}}", "nested too deep"),
        (b'{"schema": 7, "payload": {"op": "c", "after": {"id": 7}}}', "field 'op' is not one of"),
        (b'{"schema": {"type": "struct"}, "payload": [7]}', "the payload in the message is not an object"),
        (b'{"schema": {"type": "struct", "fields": 7}, "payload": {}}', "is not one of Kafka Connect"),
        (b'{"schema": {"type": "struct", "fields": [{"field": []}]}, "payload": {}}', "is not one of Kafka Connect"),
        (b'{"status": "secret", "id": "7"}', "field 'op' is not one of"),
    ],
    ids=lambda part: repr(part)[:60],
)
def test_what_is_no_change_event_is_a_dead_letter(message, reason):
    rows, errors = decode(Debezium(COLUMNS), [message, envelope("c", after=ADA)])
    assert [row["id"] for row in rows] == [None, 7]
    assert reason in errors[0]
    assert "secret" not in errors[0].replace("'secret'", "")
    assert errors[1] is None


def test_not_null_is_checked_where_there_is_a_row():
    decoder = Debezium("id BIGINT NOT NULL, name STRING NOT NULL")
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("name", pa.string(), nullable=False),
            ("_op", pa.string()),
            ("_unavailable", pa.list_(pa.string())),
        ]
    )
    messages = [
        envelope("u", after={"id": 7}),
        envelope("u", after={"id": 7, "name": PLACEHOLDER}),
        envelope("d", before={"id": 7, "name": None}),
        envelope("t"),
        None,
    ]
    errors = decoder.decode(pa.array(messages, pa.binary()), schema).errors.to_pylist()
    assert errors == ["field 'name' is missing, but it is NOT NULL", None, None, None, None]


HSTORE = json.dumps({PLACEHOLDER: PLACEHOLDER}, separators=(",", ":"))
BASE64 = b64encode(PLACEHOLDER.encode()).decode()
# What Java's UUID.nameUUIDFromBytes makes of the placeholder.
OF_UUIDS = "b68a35a7-17ad-35b3-af2a-ae46edb4545a"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("STRING", PLACEHOLDER),
        ("STRING", HSTORE),
        ("BINARY", BASE64),
        ("DECIMAL(10,2)", PLACEHOLDER),
        ("ARRAY<STRING>", [PLACEHOLDER]),
        ("ARRAY<BINARY>", [BASE64]),
        ("ARRAY<STRING>", [OF_UUIDS]),
        ("ARRAY<BIGINT>", list(PLACEHOLDER.encode())),
        ("MAP<STRING, STRING>", {PLACEHOLDER: PLACEHOLDER}),
        ("MAP<STRING, STRING>", HSTORE),
    ],
)
def test_values_that_the_database_did_not_log(kind, value):
    decoder = Debezium(f"id BIGINT, big {kind}")
    rows, errors = decode(decoder, [envelope("u", after={"id": 7, "big": value}), envelope("u", after={"id": 7})])
    assert errors == [None, None]
    assert rows == [
        {"id": 7, "big": None, "_op": "u", "_unavailable": ["big"]},
        {"id": 7, "big": None, "_op": "u", "_unavailable": []},
    ]


@pytest.mark.parametrize("option", ["__gone__", "hex:5f5f676f6e655f5f"])
def test_a_placeholder_of_the_connector(option):
    decoder = Debezium(COLUMNS, unavailable_value_placeholder=option)
    rows, _ = decode(decoder, [envelope("u", after={"id": 7, "name": name}) for name in ("__gone__", PLACEHOLDER)])
    assert rows == [changed("u", {"id": 7}, ["name"]), changed("u", {"id": 7, "name": PLACEHOLDER})]


@pytest.mark.parametrize(
    ("message", "is_value"),
    [
        (envelope("r", after={"id": 7, "name": PLACEHOLDER}), True),
        (envelope("u", before=ADA, after={"id": 7, "name": PLACEHOLDER}), True),
        (envelope("u", before={"id": 7, "name": PLACEHOLDER}, after={"id": 7, "name": PLACEHOLDER}), False),
        (envelope("u", before={"id": 7, "name": None}, after={"id": 7, "name": PLACEHOLDER}), False),
        (envelope("c", after={"id": 7, "name": PLACEHOLDER}), False),
        (envelope("d", before={"id": 7, "name": PLACEHOLDER}), False),
    ],
)
def test_a_placeholder_is_a_value_where_the_value_cannot_be_lacking(message, is_value):
    ((row,), errors) = decode(Debezium(COLUMNS), [message])
    assert errors == [None]
    assert (row["name"], row["_unavailable"]) == ((PLACEHOLDER, []) if is_value else (None, ["name"]))


def test_a_value_that_looks_like_a_part_of_a_placeholder_is_kept():
    decoder = Debezium("id BIGINT, tags ARRAY<STRING>")
    tags = [[], [PLACEHOLDER, PLACEHOLDER], ["x"], None]
    rows, errors = decode(decoder, [envelope("u", after={"id": 7, "tags": one}) for one in tags])
    assert errors == [None] * len(tags)
    assert [row["tags"] for row in rows] == tags
    assert [row["_unavailable"] for row in rows] == [[]] * len(tags)


# A table may have columns of these names.
SCHEMA_CHANGE = {"source": "app", "databaseName": "shop", "ddl": "CREATE TABLE customers"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({**ADA, "__deleted": "false"}, changed("u", ADA)),
        ({**ADA, "__deleted": False}, changed("u", ADA)),
        ({**ADA, "__deleted": "false", "__op": "c", "__lsn": 7}, changed("c", ADA)),
        ({**ADA, "__deleted": "false", "__op": "r"}, changed("r", ADA)),
        ({**ADA, "__deleted": "true"}, changed("d", ADA)),
        ({**ADA, "__deleted": True, "__op": "d"}, changed("d", ADA)),
        ({"id": 7, "name": PLACEHOLDER, "__deleted": "false"}, changed("u", {"id": 7}, ["name"])),
        ({**ADA, **SCHEMA_CHANGE, "__deleted": "false"}, changed("u", ADA)),
        ({**ADA, **SCHEMA_CHANGE, "source": {}, "__op": "u", "__deleted": "true"}, changed("d", ADA)),
        ({"ts_ms": 1}, NOTHING),
    ],
)
@pytest.mark.parametrize("has_schema", [False, True])
def test_unwrapped_rows(message, expected, has_schema):
    schema = {"type": "struct", "fields": list(FIELDS), "optional": False, "name": "shop.public.customers.Value"}
    payload = with_schema(schema, message) if has_schema else json.dumps(message).encode()
    assert decode(Debezium(COLUMNS, unwrapped="rewrite"), [payload]) == ([expected], [None])


@pytest.mark.parametrize(
    "message",
    [
        ADA,
        {"id": 7, "status": "END"},
        {**ADA, **SCHEMA_CHANGE},
        {**ADA, "__deleted": "maybe"},
        {**ADA, "__deleted": "false", "__op": "d"},
    ],
)
def test_unwrapped_rows_that_hide_deletes_are_dead_letters(message):
    rows, errors = decode(Debezium(COLUMNS, unwrapped="rewrite"), [json.dumps(message).encode()])
    assert rows == [NOTHING]
    assert errors[0].startswith(("field '__deleted'", "field '__op'"))


def test_a_tombstone_of_unwrapped_rows_is_left_out_only_if_it_follows_a_delete():
    schema = {"type": "struct", "fields": list(FIELDS), "optional": True, "name": "shop.public.customers.Value"}
    nulls = [None, with_schema(schema, None), with_schema(None, None)]
    messages = [*nulls, json.dumps({**ADA, "__deleted": "true"}).encode()]
    expected = [*[NOTHING] * len(nulls), changed("d", ADA)]
    assert decode(Debezium(COLUMNS, unwrapped="rewrite-with-tombstone"), messages) == (expected, [None] * len(messages))
    rows, errors = decode(Debezium(COLUMNS, unwrapped="rewrite"), messages)
    assert rows == expected
    assert all(error.startswith("the payload is null") for error in errors[:-1])
    assert errors[-1] is None


def test_a_schema_that_was_seen_before_is_that_of_its_own_messages():
    """Schemas are told apart by their text, whatever follows it, and there may be any number of them."""
    times = [("io.debezium.time.Timestamp", 10**3), ("io.debezium.time.MicroTimestamp", 10**6)]
    messages = []
    for number in range(40):
        semantic, unit = times[number % 2]
        more = field(f"more{number % 13}", "string")
        fields = (field("at", "int64", semantic), more)
        messages.append(envelope("c", after={"at": 60 * unit}, fields=fields))
    messages += [messages[-1][:-1] + b',"schema":null}', messages[-1] + b"}", messages[-1][:-1]]
    messages.append(messages[0].replace(b'{"schema"', b'{ "schema"'))
    messages.append(messages[0][:-1] + b" \n}")
    # No white space of JSON.
    messages += [messages[0][:-1] + space.encode() + b"}" for space in ("\u00a0", "\u2003", "\x1c")]
    rows, errors = decode(Debezium("at TIMESTAMP"), messages)
    assert [error is None for error in errors] == [*[True] * 40, False, False, False, True, True, False, False, False]
    assert {row["at"].minute for row in rows if row["at"]} == {1}


def test_undeclared_fields_are_ignored_or_rescued():
    message = envelope("c", after={**ADA, "price": 1.10, "big": PLACEHOLDER})
    assert decode(Debezium(COLUMNS), [message]) == ([changed("c", ADA)], [None])
    rescuing = with_rescue(Debezium(COLUMNS))
    assert decode(rescuing, [message, None]) == (
        [{**changed("c", ADA), "_rescued": '{"price": 1.1}'}, {**NOTHING, "_rescued": None}],
        [None, None],
    )


def test_strict_values():
    messages = [envelope("c", after={"id": 7, "name": 8})]
    assert decode(Debezium(COLUMNS), messages) == ([changed("c", {"id": 7, "name": "8"})], [None])
    assert decode(Debezium(Json(COLUMNS, mode="strict")), messages)[1] != [None]


def test_the_key_is_decoded_beside_it():
    decoder = Debezium(COLUMNS, key="key", headers="headers")
    assert (decoder.key, decoder.headers) == ("key", "headers")
    assert is_resolved(decoder)
    assert resolved(decoder) == decoder


@pytest.mark.parametrize(
    "make",
    [
        Debezium,
        lambda: Debezium(""),
        lambda: Debezium(Json()),
        lambda: Debezium(Text()),
        lambda: Debezium(Json(COLUMNS, key="key")),
        lambda: Debezium(Avro('"long"', column="all")),
        lambda: Debezium(COLUMNS, subject="s"),
        lambda: Debezium(COLUMNS, unwrapped="drop"),
        lambda: Debezium(COLUMNS, unwrapped="rewrite", source_order=True),
        lambda: Debezium(COLUMNS, source_order=1),
        lambda: Debezium(COLUMNS, time_precision_mode="seconds"),
        lambda: Debezium(COLUMNS, decimal_handling_mode="exact"),
        lambda: Debezium(COLUMNS, unavailable_value_placeholder="hex:x"),
        lambda: Debezium(COLUMNS, unavailable_value_placeholder=7),
    ],
)
def test_arguments_that_contradict_each_other(make):
    with pytest.raises(InvalidOptionError):
        make()


def test_columns_that_are_no_ddl():
    with pytest.raises(SchemaMismatchError):
        Debezium("id INTT")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["op", "after", "id", "fields", "type"]), inner)
    ),
    max_leaves=6,
)
PARTS = st.dictionaries(
    st.sampled_from(["op", "before", "after", "source", "schema", "payload", "ts_ms", "status", "id"]), JSON_VALUES
)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(PARTS.map(lambda part: json.dumps(part).encode()) | st.binary(max_size=8) | st.none(), max_size=4))
def test_anything_is_a_row_no_row_or_a_dead_letter(payloads):
    """It never raises, and never affects its neighbours."""
    good = envelope("c", after=ADA)
    rows, errors = decode(Debezium(COLUMNS, source_order=True), [good, *payloads, good])
    assert errors[0] is errors[-1] is None
    assert rows[0] == rows[-1]
    assert rows[0]["id"] == 7
    for row, error in zip(rows[1:-1], errors[1:-1], strict=True):
        assert error is None or row["_op"] is None or row["id"] is None
