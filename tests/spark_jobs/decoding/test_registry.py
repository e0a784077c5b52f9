"""Schemas that are in a registry: what is asked, how often, and what happens when it has no answer."""

import itertools
import json
import pickle
import ssl
import time
from random import Random
from types import SimpleNamespace

import dagster as dg
import pytest
import trustme
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decoding import schema_registry as registries
from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.decoders import Text, is_resolved, resolved
from spark_jobs.decoding.schema_registry import SchemaRegistry
from stream_consumers.client_config import EnvironmentVariable
from stream_consumers.errors import (
    AccessDeniedError,
    InvalidOptionError,
    SchemaMismatchError,
    SchemaNotFoundError,
    SchemaRegistryError,
)
from tests.support.arrow_columns import decode
from tests.support.avro_schemas import column, schemas, values
from tests.support.kept_errors import kept
from tests.support.profiles import examples
from tests.support.schema_registry import schema_registry

ORDERS = "orders-value"
QUICK = {"max.retries": 0, "timeout": 5}
FIRST = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
SECOND = {**FIRST, "fields": [*FIRST["fields"], {"name": "user", "type": ["null", "string"], "default": None}]}


def written(registry, schema, *rows, topic="orders"):
    """Rows as Confluent's own serializer writes them; the schema is registered with the first one."""
    with SchemaRegistryClient({"url": registry.url}) as client:
        write = AvroSerializer(client, schema if isinstance(schema, Schema) else json.dumps(schema))
        return [write(row, SerializationContext(topic, MessageField.VALUE)) for row in rows]


def stored(registry, **arguments):
    return Avro(registry=SchemaRegistry(registry.url, options=QUICK), **{"subject": ORDERS, **arguments})


def test_the_columns_are_those_of_the_newest_schema_when_the_run_begins(registry):
    old = written(registry, FIRST, {"id": 1})
    first = stored(registry).resolved()
    new = written(registry, SECOND, {"id": 2, "user": "ada"})
    second = stored(registry).resolved()
    assert first.ddl() == "`id` BIGINT"
    assert second.ddl() == "`id` BIGINT, `user` STRING"
    assert decode(first, [*old, *new, None]) == ([{"id": 1}, {"id": 2}, {"id": None}], [None] * 3)
    assert decode(second, [*new, *old]) == ([{"id": 2, "user": "ada"}, {"id": 1, "user": None}], [None] * 2)
    assert stored(registry, version=1).resolved().ddl() == "`id` BIGINT"


def test_a_schema_of_our_own_reads_what_others_have_written(registry):
    payloads = written(registry, SECOND, {"id": 2, "user": "ada"})
    decoder = Avro(
        {"type": "record", "name": "Order", "fields": [{"name": "user", "type": "string", "default": "?"}]},
        registry=SchemaRegistry(registry.url),
    )
    assert decode(decoder, payloads) == ([{"user": "ada"}], [None])


def test_each_schema_is_asked_for_once_in_a_process(registry):
    payloads = written(registry, FIRST, {"id": 1}) * 3 + written(registry, SECOND, {"id": 2, "user": None}) * 3
    decoder = stored(registry).resolved()
    registry.asked.clear()
    for _ in range(3):
        copy = pickle.loads(pickle.dumps(decoder))
        assert decode(copy, payloads)[1] == [None] * 6
    assert sorted(registry.asked) == ["GET /schemas/ids/1", "GET /schemas/ids/2"]


def test_a_block_whose_schemas_are_known_makes_no_client(registry, monkeypatch):
    """It takes longer than the block."""
    payloads = written(registry, FIRST, {"id": 1})
    decoder = stored(registry).resolved()
    assert decode(decoder, payloads)[1] == [None]
    monkeypatch.setattr("spark_jobs.decoding.schema_registry.Lookups._made", None)
    assert decode(decoder, payloads)[1] == [None]


def test_an_unknown_id_is_a_dead_letter_and_is_asked_for_once_in_a_while(registry, monkeypatch):
    (payload,) = written(registry, FIRST, {"id": 1})
    decoder = stored(registry).resolved()
    unknown = b"\0\0\0\0\x63" + payload[5:]
    registry.asked.clear()
    for _ in range(3):
        rows, errors = decode(decoder, [payload, unknown, payload, unknown])
        assert rows == [{"id": 1}, {"id": None}] * 2
        assert errors == [None, f"the schema registry {registry.url} has no schema id 99"] * 2
    assert registry.asked.count("GET /schemas/ids/99") == 1
    monkeypatch.setattr(registries, "UNKNOWN_SECONDS", 0.0)
    decode(decoder, [unknown])
    assert registry.asked.count("GET /schemas/ids/99") == 2


def test_an_unknown_id_is_asked_for_ever_less_often(registry, monkeypatch):
    (payload,) = written(registry, FIRST, {"id": 1})
    decoder = stored(registry).resolved()
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(registries, "time", SimpleNamespace(monotonic=lambda: clock.now))
    registry.asked.clear()
    for _ in range(6 * 120):
        decode(decoder, [b"\0\0\0\0\2" + payload[5:]])
        clock.now += registries.UNKNOWN_SECONDS
    assert 20 <= registry.asked.count("GET /schemas/ids/2") <= 30
    # It may be registered after all.
    assert written(registry, SECOND, {"id": 2, "user": None})[0][:5] == b"\0\0\0\0\2"
    clock.now += 2 * 3600
    assert decode(decoder, [b"\0\0\0\0\2" + payload[5:] + b"\0"])[0] == [{"id": 1}]


def test_damaged_ids_cost_one_request_each_and_no_good_message(registry, monkeypatch):
    # The ids are remembered for longer than their errors.
    monkeypatch.setattr(registries, "MAX_UNKNOWN_ERRORS", 20)
    (payload,) = written(registry, FIRST, {"id": 1})
    decoder = stored(registry).resolved()
    random = Random(1)
    damaged = [b"\0" + random.randrange(1000, 1 << 31).to_bytes(4, "big") + payload[5:] for _ in range(200)]
    registry.asked.clear()
    for _ in range(3):
        errors = decode(decoder, [*damaged, payload, payload])[1]
        assert [error is None for error in errors] == [False] * 200 + [True] * 2
    # Ids seldom displace each other in the table of unknown ids.
    assert 201 <= len(registry.asked) <= 220
    (new,) = written(registry, SECOND, {"id": 2, "user": None})
    assert decode(decoder, [damaged[0], new, payload])[0] == [{"id": None}, {"id": 2}, {"id": 1}]


@pytest.mark.parametrize("good", [100_001, (1 << 31) - 1])
def test_unknown_ids_do_not_decide_about_other_ids(registry, good):
    registry.replies[f"/schemas/ids/{good}"] = (200, {"schema": json.dumps(FIRST)})
    decoder = Avro(FIRST, registry=SchemaRegistry(registry.url, options=QUICK))
    damaged = [b"\0" + number.to_bytes(4, "big") + b"\x02" for number in range(1, 121)] * 2
    message = b"\0" + good.to_bytes(4, "big") + b"\x02"
    rows, errors = decode(decoder, [*damaged, message])
    assert (rows[-1], errors[-1], None in errors[:-1]) == ({"id": 1}, None, False)


def test_an_id_that_no_registry_counts_to_is_not_asked_for(registry):
    registry.answer = None
    decoder = Avro(FIRST, registry=SchemaRegistry(registry.url, options=QUICK))
    assert None not in decode(decoder, [b"\0\xff\xff\xff\xff\x0e", b"\0\x80\0\0\0\x0e"])[1]


@pytest.mark.parametrize("lists", [True, False])
def test_a_schema_that_we_may_not_read_is_a_dead_letter(registry, monkeypatch, lists):
    (payload,) = written(registry, FIRST, {"id": 1})
    other = b"\0" + registry.register("others-value", '"long"').to_bytes(4, "big") + b"\x0e"
    answer = registry.answer
    denied = [] if lists else ["/subjects"]

    def restricted(method, path, query, body):
        if path in ("/schemas/ids/2", *denied):
            return 403, {"error_code": 40301, "message": "User is denied operation Read"}
        return answer(method, path, query, body)

    registry.answer = restricted
    decoder = pickle.loads(pickle.dumps(stored(registry).resolved()))
    # Another process has asked nothing yet.
    monkeypatch.setattr(registries, "_lookups", {})
    rows, errors = decode(decoder, [other, other, payload])
    assert (rows[2], [error is None for error in errors]) == ({"id": 1}, [False, False, True])
    registry.asked.clear()
    assert decode(decoder, [other, payload])[1] == [errors[0], None]
    assert registry.asked == []
    # One that lets us read nothing any more says nothing about one schema.
    registry.answer = lambda *request: (403, {"error_code": 40301, "message": "User is denied operation Read"})
    monkeypatch.setattr(registries, "_lookups", {})
    with pytest.raises(AccessDeniedError):
        decode(decoder, [other, payload])


def test_a_schema_for_which_the_registry_always_fails_is_a_dead_letter(registry):
    (payload,) = written(registry, FIRST, {"id": 1})
    answer, failing = registry.answer, {"/schemas/ids/2"}

    def broken(method, path, query, body):
        return (500, {"error_code": 50001, "message": "?"}) if path in failing else answer(method, path, query, body)

    registry.answer = broken
    decoder = stored(registry).resolved()
    other = b"\0\0\0\0\2" + payload[5:]
    rows, errors = decode(decoder, [other, payload])
    assert (rows[1], [error is None for error in errors]) == ({"id": 1}, [False, True])
    # One that fails for a schema that it has returned says nothing about the others.
    failing |= {"/schemas/ids/1", "/schemas/ids/3"}
    with pytest.raises(SchemaRegistryError):
        decode(decoder, [b"\0\0\0\0\3" + payload[5:]])


def test_a_registry_says_when_it_takes_requests_again(registry, monkeypatch):
    registry.failing, registry.headers = 429, {"Retry-After": "70"}
    with pytest.raises(SchemaRegistryError) as raised:
        stored(registry).resolved()
    assert raised.value.facts == {"status": 429, "retry_after": 70}
    registry.register(ORDERS, json.dumps(FIRST))
    registry.headers = {"Retry-After": "7"}
    waits = []

    def wait(seconds):
        waits.append(seconds)
        registry.failing = 0

    monkeypatch.setattr(registries, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
    assert Avro(registry=SchemaRegistry(registry.url), subject=ORDERS).resolved().ddl() == "`id` BIGINT"
    assert waits == [7]


def test_a_registry_that_limits_requests_is_waited_for(registry, monkeypatch):
    """A failed batch would be read again by processes that remember no unknown ids."""
    decoder = Avro(FIRST, registry=SchemaRegistry(registry.url, options={"retries.wait.ms": 1}))
    answer, refused, waits = registry.answer, itertools.cycle([True] * 5 + [False]), []

    def limited(*request):
        return (429, {"error_code": 429, "message": "Too many requests"}) if next(refused) else answer(*request)

    registry.answer = limited
    monkeypatch.setattr(registries, "time", SimpleNamespace(monotonic=time.monotonic, sleep=waits.append))
    assert None not in decode(decoder, [b"\0\0\0\0\5\2", b"\0\0\0\0\6\2"])[1]
    assert waits == [1] * 10


def test_a_registry_that_is_down_is_an_error_that_is_tried_again(registry, monkeypatch):
    monkeypatch.setattr(registries, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None))
    (payload,) = written(registry, FIRST, {"id": 1})
    decoder = stored(registry).resolved()
    for status in (500, 503, 429):
        registry.failing = status
        with pytest.raises(SchemaRegistryError, match="schema id 1"):
            decode(decoder, [payload])
        with pytest.raises(SchemaRegistryError, match=ORDERS):
            stored(registry).resolved()
    registry.failing = 0
    assert decode(decoder, [payload]) == ([{"id": 1}], [None])


def test_nobody_at_the_address():
    with schema_registry() as gone:
        pass
    with pytest.raises(SchemaRegistryError, match=gone.url):
        stored(gone).resolved()


def test_a_registry_that_lets_nobody_in(registry):
    registry.register(ORDERS, json.dumps(FIRST))
    registry.password = "s3cret"
    with pytest.raises(AccessDeniedError, match=ORDERS):
        stored(registry).resolved()
    right = SchemaRegistry(registry.url, options={"basic.auth.user.info": "me:s3cret"})
    assert Avro(registry=right, subject=ORDERS).resolved().ddl() == "`id` BIGINT"


def test_secrets_are_looked_up_when_a_run_begins_and_shown_nowhere(registry, monkeypatch):
    (payload,) = written(registry, FIRST, {"id": 1})
    registry.password = "s3cret"
    for secret in (EnvironmentVariable("REGISTRY_USER"), dg.EnvVar("REGISTRY_USER")):
        decoder = Avro(
            registry=SchemaRegistry(dg.EnvVar("REGISTRY"), options={"basic.auth.user.info": secret}), subject=ORDERS
        )
        assert not decoder.is_resolved
        monkeypatch.delenv("REGISTRY_USER", raising=False)
        monkeypatch.setenv("REGISTRY", registry.url)
        with pytest.raises(InvalidOptionError, match="REGISTRY_USER"):
            decoder.resolved()
        monkeypatch.setenv("REGISTRY_USER", "me:s3cret")
        known = decoder.resolved()
        monkeypatch.delenv("REGISTRY_USER")
        monkeypatch.delenv("REGISTRY")
        # An executor has another environment.
        assert known.registry.options == {"basic.auth.user.info": "me:s3cret"}
        assert decode(pickle.loads(pickle.dumps(known)), [payload]) == ([{"id": 1}], [None])
        assert "s3cret" not in repr(known)
        assert "me:" not in repr(known)


@pytest.mark.parametrize(
    "options",
    [
        {"bearer.auth.token": "hunter2 \n and more"},
        {"bearer.auth.token": "hunter2\x7f"},
        {"proxy": "http://me:hunter2@127.0.0.1:1"},
        {"proxy": "http://me:hunter2/x@127.0.0.1:1"},
        {"proxy": "http://me:hunter2#x@127.0.0.1:1"},
        {"proxy": "me:hunter2@127.0.0.1:1"},
        {"timeout": "hunter2"},
        {"basic.auth.user.info": "hunter2"},
    ],
)
def test_no_error_repeats_an_option(registry, options):
    if "bearer.auth.token" in options:
        options = {
            **options,
            "bearer.auth.credentials.source": "STATIC_TOKEN",
            "bearer.auth.logical.cluster": "lsrc-1",
            "bearer.auth.identity.pool.id": "pool-1",
        }
    with pytest.raises((InvalidOptionError, SchemaRegistryError)) as raised:
        SchemaRegistry(registry.url, options={"max.retries": 0, **options}).subject(ORDERS)
    assert "hunter2" not in kept(raised.value)


def test_no_error_repeats_what_the_registry_says_of_an_option(registry):
    registry.answer = lambda *request: (403, {"error_code": 403, "message": "no user aHVudGVyMg== or me:hunter2"})
    options = {"max.retries": 0, "basic.auth.user.info": "me:hunter2"}
    with pytest.raises(AccessDeniedError) as raised:
        SchemaRegistry(registry.url, options=options).subject(ORDERS)
    assert "hunter2" not in kept(raised.value)


def test_a_token_out_of_a_file_has_a_newline(registry):
    registry.register(ORDERS, json.dumps(FIRST))
    options = {
        "bearer.auth.credentials.source": "STATIC_TOKEN",
        "bearer.auth.logical.cluster": "lsrc-1",
        "bearer.auth.identity.pool.id": "pool-1",
        "bearer.auth.token": "hunter2\n",
    }
    assert SchemaRegistry(registry.url, options=options).subject(ORDERS).kind == "AVRO"


def test_a_registry_over_tls(tmp_path):
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with schema_registry(context) as registry:
        registry.register(ORDERS, json.dumps(FIRST))
        trusting = SchemaRegistry(registry.url, options={"ssl.ca.location": str(tmp_path / "ca.pem")})
        assert Avro(registry=trusting, subject=ORDERS).resolved().ddl() == "`id` BIGINT"
        with pytest.raises(InvalidOptionError):
            stored(registry).resolved()


@pytest.mark.parametrize(
    ("arguments", "error", "why"),
    [
        ({"subject": "nothing-value"}, SchemaNotFoundError, "has no subject 'nothing-value'"),
        ({"version": 7}, SchemaNotFoundError, "has no version 7 of subject 'orders-value'"),
        ({"subject": "json-value"}, SchemaMismatchError, "of format JSON, not AVRO"),
        ({"subject": "loop-value"}, SchemaMismatchError, "Node contains itself"),
    ],
)
def test_a_subject_that_has_no_columns(registry, arguments, error, why):
    registry.register(ORDERS, json.dumps(FIRST))
    registry.register("json-value", "{}", "JSON")
    loop = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}
    registry.register("loop-value", json.dumps(loop))
    with pytest.raises(error, match=why):
        stored(registry, **arguments).resolved()


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("registry:8081", {}, "has no scheme"),
        ("ftp://registry:8081", {}, "is not a URL"),
        ("https://me:s3cret@registry:8081", {}, "contains a user or a password"),
        ("https://me:x/s3cret@registry:8081", {}, "contains a user or a password"),
        ("me:s3cret@registry:8081", {}, "has no scheme"),
        ("https://a:8081?key=s3cret", {}, "has parameters"),
        ("https://a:8081#s3cret,http://b", {}, "has parameters"),
        ("https://a:8081,https://me:s3cret@b:8081", {}, "contains a user or a password"),
        ("", {}, "url='' cannot be used"),
        ("http://localhost:1", {"basic.auth.user.info": "me"}, "rejects its options: basic.auth.user.info must be"),
        ("http://localhost:1", {"ssl.ca.location": "/no/such/file"}, "rejects its options: .*No such file"),
        ("http://localhost:1", {"timeuot": 3}, "rejects its options: Unrecognized properties: timeuot"),
        ("http://localhost:1", {"timeout": "soon"}, "rejects its options: could not convert"),
        ("http://localhost:1", [], "got a list"),
    ],
)
def test_a_registry_that_cannot_be_one(url, options, why):
    with pytest.raises(InvalidOptionError, match=why) as raised:
        SchemaRegistry(url, options=options).subject("s")
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    "answer",
    [
        (200, {"hello": "world"}),
        (200, "<html>maintenance</html>"),
        (404, {"message": "Not Found"}),
        (422, {"error_code": 42202, "message": "The specified version is not valid"}),
    ],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_a_server_that_is_no_registry_makes_no_dead_letters(registry, answer, is_known):
    """Not even if it was one before: a proxy in maintenance says nothing about a schema."""
    (payload,) = written(registry, FIRST, {"id": 1})
    decoder = stored(registry).resolved() if is_known else Avro(FIRST, registry=SchemaRegistry(registry.url))
    registry.answer = lambda *request: answer
    with pytest.raises(InvalidOptionError):
        decode(decoder, [payload])
    with pytest.raises(InvalidOptionError):
        stored(registry).resolved()


def test_schemas_that_refer_to_others(registry):
    money = {"type": "record", "name": "shop.Money", "fields": [{"name": "cents", "type": "long"}]}
    order = {"type": "record", "name": "shop.Order", "fields": [{"name": "total", "type": "shop.Money"}]}
    registry.register("money", json.dumps(money))
    references = [SchemaReference("shop.Money", "money", 1)]
    (payload,) = written(registry, Schema(json.dumps(order), "AVRO", references), {"total": {"cents": 7}})
    assert decode(stored(registry).resolved(), [payload]) == ([{"total": {"cents": 7}}], [None])


def test_a_schema_of_another_record_is_a_dead_letter(registry):
    good = written(registry, FIRST, {"id": 1})
    other = written(registry, {**FIRST, "name": "Customer"}, {"id": 2}, topic="customers")
    broken = b"\0\0\0\0" + bytes([registry.register("broken", "{}")])
    of_json = b"\0\0\0\0" + bytes([registry.register("json", "{}", "JSON")])
    rows, errors = decode(stored(registry).resolved(), [*good, *other, broken, of_json, *good])
    assert [row["id"] for row in rows] == [1, None, None, None, 1]
    assert errors[0] is errors[4] is None
    assert errors[1] == "record Customer was written, and cannot be read as record Order"
    assert "cannot be used" in errors[2]
    assert errors[3] == "the schema is of format JSON, not AVRO"


def test_the_key_may_have_a_schema_too(registry):
    registry.register("orders-key", '"long"')
    decoder = Text(key=Avro(registry=SchemaRegistry(registry.url), subject="orders-key"))
    assert not is_resolved(decoder)
    assert is_resolved(resolved(decoder))
    assert resolved(decoder).key.ddl() == "`payload` BIGINT"
    assert resolved(Text(key="user")) == Text(key="user")


def test_what_the_serializer_of_the_registry_has_written(registry):
    numbers = itertools.count()

    @settings(max_examples=examples(12), deadline=None)
    @given(st.data())
    def check(data):
        schema = data.draw(schemas(), label="schema")
        rows = data.draw(st.lists(values(schema), min_size=1, max_size=3), label="values")
        topic = f"orders-{next(numbers)}"
        write = AvroSerializer(client, json.dumps(schema))
        payloads = [write(row, SerializationContext(topic, MessageField.VALUE)) for row in rows]
        found = decode(stored(registry, subject=f"{topic}-value").resolved(), payloads)
        assert found == ([column(schema, row) for row in rows], [None] * len(rows))

    # A client takes longer to make than all that it is asked.
    with SchemaRegistryClient({"url": registry.url}) as client, SchemaRegistry(registry.url, options=QUICK).open():
        check()
