"""Payloads and keys whose schemas are in a registry, from Kafka into Delta."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Batch, Step
from spark_jobs.batches.run_control import IdleWait
from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.decoders import Decoder
from spark_jobs.decoding.schema_registry import SchemaRegistry
from spark_jobs.run_ingestion import run_events
from stream_consumers.client_config import EnvironmentVariable
from stream_consumers.errors import AccessDeniedError, SchemaMismatchError, SchemaRegistryError
from stream_consumers.options import ErrorPolicy
from tests.support.ingesting import run_batch
from tests.support.kafka_topics import Pipeline, Topics
from tests.support.schema_registry import Registry, schema_registry
from tests.support.scripted_jobs import reports_when_waiting

QUICK = {"max.retries": 0, "timeout": 5}
MOMENT = datetime(2024, 2, 29, 12, 30, 15, 123456, timezone.utc)
FIRST = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
        {"name": "tags", "type": {"type": "map", "values": {"type": "array", "items": "string"}}},
        {"name": "origin", "type": ["null", "string", {"type": "record", "name": "Shop", "fields": []}, "int"]},
    ],
}
SECOND = {**FIRST, "fields": [*FIRST["fields"], {"name": "user", "type": ["null", "string"], "default": None}]}


@pytest.fixture
def registry() -> Iterator[Registry]:
    with schema_registry() as running:
        yield running


def row(number: int, **more: Any) -> dict[str, Any]:
    known = {"amount": Decimal("12.50"), "at": MOMENT, "local": MOMENT.replace(tzinfo=None), "tags": {"a": ["b"]}}
    return {"id": number, **known, "origin": "web", **more}


class Writer:
    """Writes with Confluent's own serializers."""

    def __init__(self, client: SchemaRegistryClient, topics: Topics, topic: str) -> None:
        self._client = client
        self._topics = topics
        self._topic = topic

    def encoded(self, schema: Any, value: Any, of: str = MessageField.VALUE) -> bytes:
        write = AvroSerializer(self._client, json.dumps(schema))
        return bytes(write(value, SerializationContext(self._topic, of)))

    def send(self, *messages: tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]) -> None:
        producer = Producer({"bootstrap.servers": self._topics.address})
        for key, payload, headers in messages:
            producer.produce(self._topic, payload, key, 0, headers=headers)
        assert producer.flush(20) == 0

    def pipeline(self, decoder: Decoder, **options: Any) -> Pipeline:
        return self._topics.pipeline(self._topic, decoder=decoder, **options)


@pytest.fixture
def writer(registry: Registry, topics: Topics) -> Iterator[Writer]:
    with SchemaRegistryClient({"url": registry.url}) as client:
        yield Writer(client, topics, topics.create())


def stored(registry: Registry, topic: str, **more: Any) -> Avro:
    return Avro(registry=SchemaRegistry(registry.url, options=QUICK), subject=f"{topic}-value", **more)


@pytest.mark.parametrize("driver_records", [pytest.param(0, marks=pytest.mark.slow), 1000], ids=["executors", "driver"])
def test_values_keys_and_headers(registry: Registry, writer: Writer, driver_records: int) -> None:
    key = Avro(registry=SchemaRegistry(registry.url, options=QUICK), subject=f"{writer._topic}-key")
    decoder = stored(registry, writer._topic, key=key, headers={"trace": "trace-id", "of": "of"})
    keys = [writer.encoded("long", number, MessageField.KEY) for number in range(4)]
    good = writer.encoded(FIRST, row(1))
    writer.send(
        (keys[0], writer.encoded(FIRST, row(0, origin=("int", 7))), [("trace-id", b"a"), ("trace-id", b"b")]),
        (keys[1], good, []),
        (keys[2], None, [("trace-id", None)]),
        (keys[3], good + b"\0", [("of", b"x")]),
        (b"plain", good, []),
        (keys[1], good, [("of", b"\xff")]),
        (None, b"\0\0\0\x03\xe7rest", []),
    )
    pipe = writer.pipeline(decoder, driver_records=driver_records)
    (report,) = pipe.drain()
    assert (report.rows, report.dead) == (3, 4)
    found = pipe.spark.read.format("delta").load(pipe.table).orderBy("_sequence")
    kinds = dict(found.dtypes)
    assert (kinds["amount"], kinds["tags"]) == ("decimal(10,2)", "map<string,array<string>>")
    assert (kinds["at"], kinds["local"], kinds["key"]) == ("timestamp", "timestamp_ntz", "bigint")
    assert kinds["origin"] == "struct<string:string,int:int>"
    first, second, third = found.selectExpr(
        "id", "amount", "string(at)", "string(local)", "tags", "origin.string", "origin.int", "key", "trace"
    ).collect()
    assert tuple(first) == (0, Decimal("12.50"), str(MOMENT)[:26], str(MOMENT)[:26], {"a": ["b"]}, None, 7, 0, "b")
    assert (second["id"], second["string"], second["int"], second["trace"]) == (1, "web", None, None)
    assert tuple(third)[:-2] == (None,) * 7
    assert third["key"] == 2
    letters = pipe.spark.read.format("delta").load(f"{pipe.table}_dead_letters").orderBy("_sequence")
    assert [letter["error"] for letter in letters.collect()] == [
        "the payload has 1 bytes after the end of the value",
        "the key: the first byte is 112, not the 0 before a schema id",
        "the header 'of' is not UTF-8: invalid start byte at byte 0",
        f"the schema registry {registry.url} has no schema id 999",
    ]


@pytest.mark.slow
def test_a_new_field_in_the_registry_is_a_column_from_the_next_batch(registry: Registry, writer: Writer) -> None:
    """Also of a run that stays; and where columns may not come in, the run says so before it reads anything."""
    writer.send((None, writer.encoded(FIRST, row(0)), []))
    pipe = writer.pipeline(stored(registry, writer._topic), errors=ErrorPolicy(schema_changes="add_columns"))
    strict = pipe.having(table=f"{pipe.table}-strict", errors=ErrorPolicy())
    strict.drain()
    with pipe.source.open() as source:
        job = IngestJob(pipe.spark, source, pipe.ingestion, idle_wait=IdleWait(3600.0))
        for message in (row(1), row(2)):
            batch = job.plan()
            assert batch is not None
            assert run_batch(job, batch) is not None
            assert job.plan() is None
            writer.send((None, writer.encoded(SECOND, {**message, "user": "ada"}), []))
    pipe.drain()
    users = {found["id"]: found["user"] for found in pipe.spark.read.format("delta").load(pipe.table).collect()}
    assert users == {0: None, 1: "ada", 2: "ada"}
    with pytest.raises(SchemaMismatchError):
        strict.drain()
    assert len(strict.rows()) == 1


@pytest.mark.slow
def test_a_run_goes_on_when_the_registry_is_back(registry: Registry, writer: Writer) -> None:
    writer.send(*((None, writer.encoded(FIRST, row(number)), []) for number in range(3)))
    pipe = writer.pipeline(stored(registry, writer._topic), retry_seconds=60.0)
    said: list[str] = []

    def fail(step: Step, batch: Batch | None) -> None:
        if step is Step.PLANNED and not said:
            registry.failing = 503

    def mend(why: str) -> None:
        said.append(why)
        registry.failing = 0

    (report,) = reports_when_waiting(run_events(pipe.spark, pipe.source, pipe.ingestion, observer=fail), mend)
    assert (report.rows, report.dead) == (3, 0)
    assert len(said) == 1
    assert "cannot answer for subject" in said[0]
    writer.send((None, writer.encoded(FIRST, row(3)), []))
    registry.failing = 503
    (report,) = reports_when_waiting(run_events(pipe.spark, pipe.source, pipe.ingestion), mend)
    assert report.rows == 1
    assert "cannot answer for subject" in said[1]


@pytest.mark.slow
def test_the_registry_is_named_in_the_error(
    registry: Registry, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.send((None, writer.encoded(FIRST, row(0)), []))
    monkeypatch.setenv("REGISTRY_USER", "me:s3cret")
    options = {**QUICK, "basic.auth.user.info": EnvironmentVariable("REGISTRY_USER")}
    decoder = Avro(registry=SchemaRegistry(registry.url, options=options), subject=f"{writer._topic}-value")
    pipe = writer.pipeline(decoder)

    def then(failing: int, password: str = "") -> Any:
        def change(step: Step, batch: Batch | None) -> None:
            if step is Step.PLANNED:
                registry.failing, registry.password = failing, password

        return change

    with pytest.raises(SchemaRegistryError, match=r"cannot answer for subject"):
        pipe.drain(then(503))
    registry.failing = 0
    with pytest.raises(AccessDeniedError, match="Unauthorized") as raised:
        pipe.drain(then(0, "another"))
    assert "s3cret" not in str(raised.value)
    registry.password = "s3cret"
    assert [report.rows for report in pipe.drain()] == [1]
