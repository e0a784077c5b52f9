"""Fields of JSON that nobody has declared become columns with ``schema_changes="add_columns"``."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import count
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import BatchReport, Ingestion, Step
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.rebuild import rebuild_events
from spark_jobs.batches.replay import Replay, ReplayJob
from spark_jobs.batches.row_columns import RowColumns
from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.json_inference import MAX_COUNTED_LEVELS
from spark_jobs.decoding.schema_registry import SchemaRegistry
from spark_jobs.reading.rejection import reject
from spark_jobs.run_ingestion import run_events
from spark_jobs.writing import schema_evolution
from spark_jobs.writing.keyed import Keys
from spark_jobs.writing.layout import TableLayout
from stream_consumers.create import open_batch_source
from stream_consumers.errors import SchemaMismatchError
from stream_consumers.memory import memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import ErrorPolicy, Limits
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import drain, ingestion, reports_with, run_batch
from tests.support.kafka_topics import Broker, Once, Pipeline
from tests.support.memory_streams import ingest, rows, send
from tests.support.redis_tables import Stream
from tests.support.schema_registry import schema_registry

pytestmark = pytest.mark.spark


@pytest.fixture
def what(folder: Path) -> Ingestion:
    made = ingestion(folder / "t", decoder=Json("id BIGINT"), errors=ErrorPolicy(schema_changes="add_columns"))
    return replace(made, driver_records=1000)


def kinds(spark: SparkSession, what: Ingestion) -> dict[str, str]:
    schema = spark.read.format("delta").load(what.table).schema
    return {c.name: c.dataType.simpleString() for c in schema.fields if not c.name.startswith("_")}


@pytest.mark.parametrize("driver_records", [pytest.param(0, marks=pytest.mark.slow), 1000], ids=["executors", "driver"])
def test_new_fields_become_columns(spark: SparkSession, url: StreamUrl, what: Ingestion, driver_records: int) -> None:
    what = replace(what, driver_records=driver_records, decoder=Json("id BIGINT, shop STRUCT<name: STRING>"))
    ingest(spark, url, what, {"id": 1})
    assert kinds(spark, what) == {"id": "bigint", "shop": "struct<name:string>"}
    new = {"on": True, "count": 2, "price": 1.5, "day": "2024-02-29", "tags": ["a"], "by": {"name": "ada", "age": 3}}
    send(url, {"id": 2, "shop": {"name": "a", "zip": "07"}, **new}, {"id": 3, "nothing": None, "empty": [{}]})
    reports = drain(spark, str(url), what)
    assert [(report.rows, report.dead) for report in reports] == [(2, 0)]
    assert kinds(spark, what) == {
        **{"id": "bigint", "shop": "struct<name:string,zip:string>", "on": "boolean", "count": "bigint"},
        **{"price": "double", "day": "string", "tags": "array<string>", "by": "struct<name:string,age:bigint>"},
    }
    found = rows(spark, what)
    assert found[1] == {"id": 2, "shop": {"name": "a", "zip": "07"}, **new}
    assert [row["id"] for row in found] == [1, 2, 3]
    assert {row["count"] for row in found if row["id"] != 2} == {None}


@pytest.mark.slow
def test_the_columns_stay_and_keep_their_types(spark: SparkSession, url: StreamUrl, what: Ingestion) -> None:
    ingest(spark, url, what, {"id": 1, "size": 1, "by": {"age": 3}})
    # What came first has the type; what does not fit is a dead letter, as with a declared column.
    send(url, {"id": 2, "size": 2, "by": {"age": 4}}, {"id": 3, "size": "L"}, {"id": 4, "by": {"name": "ada"}})
    steps: list[Step] = []
    (report,) = drain(spark, str(url), what, lambda step, batch: steps.append(step))
    assert (report.rows, report.dead) == (2, 1)
    assert kinds(spark, what) == {"id": "bigint", "size": "bigint", "by": "struct<age:bigint,name:string>"}
    # A run that begins knows the columns, and reads nothing twice.
    send(url, {"id": 5, "size": 5, "by": {"age": 5, "name": "eve"}})
    steps.clear()
    drain(spark, str(url), what, lambda step, batch: steps.append(step))
    assert steps.count(Step.READ) == 1
    assert rows(spark, what)[-1] == {"id": 5, "size": 5, "by": {"age": 5, "name": "eve"}}


@pytest.mark.slow
def test_columns_of_the_table_give_the_types(spark: SparkSession, url: StreamUrl, what: Ingestion) -> None:
    ingest(spark, url, what, {"id": 1})
    spark.sql(f"ALTER TABLE delta.`{what.table}` ADD COLUMNS (at TIMESTAMP, day DATE)")
    ingest(spark, url, what, {"id": 2, "at": "2024-02-29T12:00:00Z", "day": "2024-02-29", "ID": 7})
    found = rows(spark, what)[-1]
    assert (found["at"].year, found["day"].isoformat()) == (2024, "2024-02-29")
    assert kinds(spark, what) == {"id": "bigint", "at": "timestamp", "day": "date"}


@pytest.mark.slow
def test_a_transform_decides_what_is_kept(spark: SparkSession, url: StreamUrl, what: Ingestion) -> None:
    def doubled(batch: DataFrame) -> DataFrame:
        return batch.withColumn("twice", f.col("id") * 2)

    def narrow(batch: DataFrame) -> DataFrame:
        return batch.select("id", "_stream", "_shard", "_sequence", "_timestamp")

    ingest(spark, url, replace(what, transform=doubled), {"id": 1, "twice": "is made by the transform", "color": "red"})
    assert rows(spark, what) == [{"id": 1, "twice": 2, "color": "red"}]
    ingest(spark, url, replace(what, transform=narrow), {"id": 2, "weight": 1})
    assert rows(spark, what)[1] == {"id": 2, "twice": None, "color": None}


@pytest.mark.slow
def test_a_transform_may_make_columns_of_new_fields(spark: SparkSession, url: StreamUrl, what: Ingestion) -> None:
    def renamed(batch: DataFrame) -> DataFrame:
        return batch.withColumnRenamed("x", "y")

    what = replace(what, transform=renamed)
    ingest(spark, url, what, {"id": 1, "x": 5})
    ingest(spark, url, what, {"id": 2, "x": 6})
    # A field of the name that the transform gives to another one is left out.
    ingest(spark, url, what, {"id": 3, "x": 7, "y": "other"})
    assert rows(spark, what) == [{"id": 1, "y": 5}, {"id": 2, "y": 6}, {"id": 3, "y": 7}]


@pytest.mark.slow
def test_a_change_data_feed_keeps_its_columns(spark: SparkSession, url: StreamUrl, what: Ingestion) -> None:
    feed = TableLayout(properties={"delta.enableChangeDataFeed": "true"})
    send(url, {"id": 1, "_change_type": "x", "_commit_version": 1, "_commit_timestamp": 2, "color": "red"})
    drain(spark, str(url), replace(what, layout=feed))
    assert rows(spark, what) == [{"id": 1, "color": "red"}]


def test_what_can_be_no_column_is_told_and_rescued_where_that_is_asked_for(
    spark: SparkSession, url: StreamUrl, what: Ingestion, caplog: pytest.LogCaptureFixture
) -> None:
    what = replace(what, decoder=Json("id BIGINT, any VARIANT", rescue=True))
    send(url, {"id": 1, "first name": "ada", "ID": 2, "_error": "x", "": 0, "color": "red", "any": {"a": 1}})
    with caplog.at_level("WARNING"):
        drain(spark, str(url), what)
    (told,) = [
        text for one in caplog.records if "cannot become columns, and are left out" in (text := one.getMessage())
    ]
    assert all(name in told for name in ("'ID'", "'_error'", "2 with other names"))
    assert "first name" not in told, "a name that is no identifier may be a value"
    (found,) = rows(spark, what)
    assert json.loads(found["_rescued"]) == {"first name": "ada", "ID": 2, "_error": "x", "": 0}
    assert (found["id"], found["color"], found["any"].toPython()) == (1, "red", {"a": 1})
    ingest(spark, url, what, {"id": 2, "first name": "eve", "color": "blue"})
    assert rows(spark, what)[1]["color"] == "blue"


@pytest.mark.slow
def test_names_with_spaces_are_columns_where_the_table_takes_them(
    spark: SparkSession, url: StreamUrl, what: Ingestion
) -> None:
    ingest(spark, url, what, {"id": 1})
    spark.sql(f"ALTER TABLE delta.`{what.table}` SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    ingest(spark, url, what, {"id": 2, "first name": "ada", "by": {"a,b": 1}})
    assert rows(spark, what)[1] == {"id": 2, "first name": "ada", "by": {"a,b": 1}}


@pytest.mark.slow
def test_no_field_gets_a_name_that_hadoop_would_replace_by_a_value(
    spark: SparkSession, url: StreamUrl, what: Ingestion
) -> None:
    what = replace(what, layout=TableLayout(properties={"delta.columnMapping.mode": "name"}))
    odd = {"${env.HOME}": 1, "a ${user.dir}": 1, "in": {"${env.HOME}": 1, "li": [{"${user.dir}": 1, "b {": 1}]}}
    for number in (1, 2):
        reports = ingest(spark, url, what, {"id": number, **odd}, b'{"id": "x", "${env.HOME}": 1}')
        assert [(report.rows, report.dead) for report in reports] == [(1, 1)]
    with open_batch_source(str(url)) as source:
        list(rebuild_events(spark, source, what))
    assert rows(spark, what) == [{"id": number, "in": {"li": [{"b {": 1}]}} for number in (1, 2)]
    texts = [DeltaTable(path).schema().to_json() for path in (what.table, what.dead_letters().path)]
    texts += [str(pq.read_metadata(file).metadata) for file in Path(what.table).rglob("*.parquet")]
    assert not [text for text in texts if "${" in text or os.environ["HOME"] in text]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_values_of_several_types_are_kept(spark: SparkSession, url: StreamUrl, what: Ingestion, mode: str) -> None:
    send(url, {"id": 1, "any": 1, "big": 2**70}, {"id": 2, "any": "a", "big": 1}, {"id": 3, "any": [1.5]})
    (report,) = drain(spark, str(url), replace(what, decoder=Json("id BIGINT", mode=mode)))
    assert (report.rows, report.dead) == (3, 0)
    found = [row["any"] for row in rows(spark, what)]
    assert kinds(spark, what)["big"] == ("string" if mode == "lenient" else "variant")
    if mode == "strict":
        assert [one.toPython() for one in found] == [1, "a", [1.5]]
    else:
        assert found == ["1", "a", "[1.5]"]


@pytest.mark.slow
def test_fields_within_arrays_and_maps(spark: SparkSession, url: StreamUrl, what: Ingestion) -> None:
    what = replace(what, decoder=Json("id BIGINT, items ARRAY<STRUCT<a: INT>>, by MAP<STRING, STRUCT<a: INT>>"))
    ingest(spark, url, what, {"id": 1, "items": [{"a": 1}], "by": {"x": {"a": 1}}})
    ingest(spark, url, what, {"id": 2, "items": [{"a": 1}, {"b": 2}], "by": {"x": {"a": 1, "b": 2}}})
    assert rows(spark, what)[1]["items"] == [{"a": 1, "b": None}, {"a": None, "b": 2}]
    assert rows(spark, what)[1]["by"] == {"x": {"a": 1, "b": 2}}


@pytest.mark.slow
def test_a_transform_that_makes_another_type_of_a_new_field_gets_it_as_it_is_each_time(
    spark: SparkSession, url: StreamUrl, what: Ingestion
) -> None:
    def moments(batch: DataFrame) -> DataFrame:
        return batch.withColumn("at", f.timestamp_millis("at")) if "at" in batch.columns else batch

    what = replace(what, transform=moments)
    for number in (1, 2):
        (report,) = ingest(spark, url, what, {"id": number, "at": 1_709_208_000_000 + number})
        assert (report.rows, report.dead) == (1, 0)
    assert kinds(spark, what) == {"id": "bigint", "at": "timestamp"}
    assert [row["at"].microsecond for row in rows(spark, what)] == [1000, 2000]


@pytest.mark.slow
@pytest.mark.parametrize("driver_records", [0, 1000], ids=["executors", "driver"])
def test_columns_with_dots_in_their_names_are_no_obstacle_to_bad_rows(
    spark: SparkSession, url: StreamUrl, what: Ingestion, driver_records: int
) -> None:
    def odd(batch: DataFrame) -> DataFrame:
        return reject(batch, "id % 2 = 0", "is even")

    what = replace(what, driver_records=driver_records)
    ingest(spark, url, what, {"id": 1, "service.name": "a", "service": {"name": "b"}})
    send(url, {"id": 2, "service.name": "c"}, {"id": 3, "service.name": "d"})
    (report,) = drain(spark, str(url), replace(what, transform=odd))
    assert (report.rows, report.dead) == (1, 1)
    assert rows(spark, what)[-1] == {"id": 3, "service.name": "d", "service": None}
    memory_broker(url).messages[Shard("orders")].pop(0)
    with open_batch_source(str(url)) as source:
        recording = replace(what, errors=replace(what.errors, on_data_loss="record"))
        list(drain_batches(ReplayJob(spark, source, recording, Replay())))
    assert [(row["id"], row["service.name"]) for row in rows(spark, what)] == [(1, "a"), (2, "c"), (3, "d")]


@pytest.mark.slow
def test_columns_with_defaults_keep_them(spark: SparkSession, url: StreamUrl, what: Ingestion) -> None:
    spark.sql(
        f"CREATE TABLE delta.`{what.table}` (id BIGINT, status STRING NOT NULL DEFAULT 'new', _stream STRING, "
        "_shard BIGINT, _sequence BIGINT, _timestamp TIMESTAMP) USING DELTA TBLPROPERTIES "
        "('delta.feature.allowColumnDefaults' = 'supported', 'delta.constraints.known' = \"status IN ('new', 'done')\")"
    )
    send(url, {"id": 1}, {"id": 2})
    (report,) = drain(spark, str(url), replace(what, errors=replace(what.errors, on_bad_rows="dead_letter")))
    assert (report.rows, report.dead) == (2, 0)
    ingest(spark, url, what, {"id": 3, "status": "done"})
    assert [row["status"] for row in rows(spark, what)] == ["new", "new", "done"]


@pytest.mark.slow
def test_a_key_whose_schema_grows_in_a_registry_has_the_new_field(
    spark: SparkSession, url: StreamUrl, what: Ingestion
) -> None:
    first = {"type": "record", "name": "Key", "fields": [{"name": "user", "type": "string"}]}
    second = {**first, "fields": [*first["fields"], {"name": "region", "type": "string", "default": ""}]}

    with schema_registry() as registry:
        key = Avro(registry=SchemaRegistry(registry.url), subject="orders-key")
        what = replace(what, decoder=Json("id BIGINT", key=key), limits=Limits(max_records=1))
        send(url, {"id": 1}, {"id": 2})
        messages = memory_broker(url).messages[Shard("orders")]
        key_of_ada = registry.framed("orders-key", first, {"user": "ada"})
        messages[:] = [replace(message, key=key_of_ada) for message in messages]
        with open_batch_source(str(url)) as source:
            job = IngestJob(spark, source, what)
            batch = job.plan()
            assert batch is not None
            run_batch(job, batch)
            key_of_bob = registry.framed("orders-key", second, {"user": "bob", "region": "eu"})
            messages[1] = replace(messages[1], key=key_of_bob)
            batch = job.plan()
            assert batch is not None
            run_batch(job, batch)
    assert kinds(spark, what)["key"] == "struct<user:string,region:string>"
    assert rows(spark, what)[1]["key"] == {"user": "bob", "region": "eu"}


def test_messages_are_read_again_only_by_another_decoder(spark: SparkSession, url: StreamUrl, what: Ingestion) -> None:
    ingest(spark, url, what, {"id": 1})
    ledger = what.ledger()
    columns = RowColumns(spark, what, ledger, url=url)
    columns.check(ledger.read())
    empty, full = (spark.createDataFrame([(found,)], "_undeclared STRING") for found in ('{"x": [[]]}', '{"x": [[1]]}'))
    columns.learn_fields(empty)
    assert [columns.learn_fields(frame) for frame in (empty, full, full)] == [False, True, False]


@pytest.mark.slow
def test_a_name_that_delta_does_not_distinguish_is_left_out(
    spark: SparkSession, url: StreamUrl, what: Ingestion
) -> None:
    (dotted, two), kept = ("\u0130", "i\u0307"), {"id": 1, "\u0130": 1, "in": {"a": 1, "\u0130": 1}}
    ingest(spark, url, what, {**kept, two: 2, "in": {"a": 1, dotted: 1, two: 2}})
    reports = ingest(spark, url, replace(what, transform=lambda batch: batch), {"id": 2, two: 2, "in": {two: 2}})
    assert [(report.rows, report.dead) for report in reports] == [(1, 0)]
    assert rows(spark, what) == [kept, {"id": 2, dotted: None, "in": {"a": None, dotted: None}}]


def test_odd_names_and_depths_stop_nothing(spark: SparkSession, url: StreamUrl, what: Ingestion) -> None:
    deep = b"[" * 400 + b"1" + b"]" * 400
    names = [b"\\ud800", b"a.b", b"`", "😀".encode(), b"x" * 300, b"\\u0000", b"'", b"%", b"/", b"\\\\", b'\\"']
    names.append(b"y" * 1001)
    fields = b", ".join(b'"%s": 1' % name for name in names)
    deeper = b'{"id": 3, "x": %s}' % (b"[" * MAX_COUNTED_LEVELS + b"1" + b"]" * MAX_COUNTED_LEVELS)
    messages = (b'{"id": 1, "deep": %s, %s}' % (deep, fields), b'{"id": 2, "a": 1, "a": "x"}', deeper)
    reports = ingest(spark, url, what, *messages)
    assert [(report.rows, report.dead) for report in reports] == [(2, 1)], "a field that is there twice"
    found = rows(spark, what)
    assert {found[0][name] for name in ("a.b", "`", "😀", "x" * 300, "'", "%", "/")} == {1}
    assert not {'"', "\\"} & {*found[0]}, "Delta would write them into Java source"
    assert [row["id"] for row in found] == [1, 3]
    # Readers other than Spark take the names.
    assert DeltaTable(what.table).to_pyarrow_table().num_rows == 2


@pytest.mark.parametrize("scd_type", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_field_takes_no_name_that_a_keyed_table_uses(
    spark: SparkSession, url: StreamUrl, what: Ingestion, scd_type: int
) -> None:
    keys = Keys(["id"], sequence_by="id", stored_as_scd_type=scd_type)
    what = replace(what, decoder=Json("id BIGINT, name STRING"), keys=keys)
    ingest(spark, url, what, {"id": 1, "name": "a"})
    taken = {**dict.fromkeys([*keys.own_names, "_la\u017ft_shard"], 5), "_unavailable": ["name"]}
    for number in (2, 3):
        (report,) = ingest(spark, url, what, {"id": 1, "name": f"b{number}", **taken, "more": number})
        assert (report.dead, sum(report.messages.values())) == (0, 1)
    found = rows(spark, what)[-1]
    assert (found["name"], found["more"]) == ("b3", 3)
    assert 5 not in found.values()


@pytest.mark.parametrize(
    "name", ["user-{}", pytest.param("user {}", id="that can be no columns", marks=pytest.mark.slow)]
)
def test_names_that_are_ids_are_refused(
    spark: SparkSession, url: StreamUrl, what: Ingestion, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(schema_evolution, "MAX_UNDECLARED_FIELDS", 20)
    send(url, *({"id": number, name.format(number): 1} for number in range(21)))
    with pytest.raises(SchemaMismatchError, match="21 undeclared fields") as caught:
        drain(spark, str(url), what)
    assert "MAP<STRING" in caught.value.remedy
    # Nothing was lost: whoever keeps them in one column has them.
    drain(spark, str(url), replace(what, errors=ErrorPolicy(), decoder=Json("id BIGINT")))
    assert len(rows(spark, what)) == 21


def test_names_that_are_ids_are_counted_while_they_are_looked_at(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_evolution, "MAX_UNDECLARED_FIELDS", 20)
    decoder = Json("id BIGINT, known MAP<STRING, STRUCT<a: BIGINT>>")
    endless = (f'{{"user-{number}": 1, "by": {{"in-{number}": 1}}}}' for number in count())
    with pytest.raises(SchemaMismatchError, match="200 undeclared fields"):
        schema_evolution.undeclared_values(endless, decoder)
    keys = (f'{{"known": {{"u{number}": {{"b": 1}}}}, "new": {{"u{number}": [1]}}}}' for number in range(10_000))
    assert schema_evolution.undeclared_values(keys, decoder).size() == 6, "the keys of maps are not kept"


@pytest.mark.slow
def test_a_replay_fills_new_columns_of_old_rows(spark: SparkSession, url: StreamUrl, what: Ingestion) -> None:
    ingest(spark, url, replace(what, errors=ErrorPolicy()), {"id": 1, "color": "red"}, {"id": 2, "color": "blue"}, b"{")
    assert rows(spark, what) == [{"id": 1}, {"id": 2}]
    with open_batch_source(str(url)) as source:
        list(drain_batches(ReplayJob(spark, source, what, Replay())))
    assert rows(spark, what) == [{"id": 1, "color": "red"}, {"id": 2, "color": "blue"}]


@pytest.mark.slow
def test_a_lost_race_keeps_what_another_run_has_made_of_the_field(
    spark: SparkSession, url: StreamUrl, what: Ingestion
) -> None:
    """Both find the same field with other values; each message is a row or a dead letter, once."""
    ingest(spark, url, what, {"id": 0})
    send(url, {"id": 1, "size": "L"}, {"id": 2, "size": 1})
    drain(spark, str(url), what, Once(Step.READ, lambda: drain(spark, str(url), what)))
    assert [(row["id"], row["size"]) for row in rows(spark, what)] == [(0, None), (1, "L"), (2, "1")]


@pytest.mark.slow
def test_a_run_that_stays_on_kafka_takes_new_fields_and_tombstones_as_they_come(
    spark: SparkSession, folder: Path, kafka: str
) -> None:
    with Broker(kafka) as broker:
        topic = broker.create()
        pipe = Pipeline.of(
            spark,
            f"kafka://{kafka}/{topic}",
            folder / "t",
            errors=ErrorPolicy(schema_changes="add_columns"),
            driver_records=1000,
        )
        sent = [
            [b'{"id": 0}', None],
            [b'{"id": 1, "color": "red"}', None, b'{"id": '],
            [b'{"id": 2, "color": "blue", "size": 2}', b'{"id": 3, "by": {"name": "ada"}}'],
        ]
        reports: list[BatchReport] = []

        def more() -> None:
            if sent and len(reports) == 3 - len(sent):
                broker.send(topic, sent.pop(0))

        events = run_events(spark, pipe.source, pipe.ingestion, linger_seconds=600, max_batches=3)
        for report in reports_with(events, more):
            reports.append(report)
        assert [(report.rows, report.dead) for report in reports] == [(2, 0), (2, 1), (2, 0)]
        found = rows(spark, pipe.ingestion)
        assert [tuple(row.values()) for row in found] == [
            *[(0, None, None, None), (None, None, None, None), (1, "red", None, None), (None, None, None, None)],
            *[(2, "blue", 2, None), (3, None, None, {"name": "ada"})],
        ]
        assert [verdict.is_right for verdict in pipe.verify()] == [True]


@pytest.mark.slow
def test_members_that_claim_entries_of_redis_make_the_same_columns(
    spark: SparkSession, folder: Path, redis_address: str
) -> None:
    stream = Stream(redis_address, folder, mode="load_balanced")
    what = stream.ingestion(
        claims=True, decoder=Json("id BIGINT"), errors=ErrorPolicy(schema_changes="add_columns"), driver_records=1000
    )
    stream.add(10)
    stream.drain(spark, what)
    assert kinds(spark, what) == {"id": "bigint", "user": "string"}

    def race() -> None:
        stream.add(5, first=20, payload=b'{"id": %d, "size": "L"}')
        # It would wait for the entries that are held here.
        stream.drain(spark, replace(what, member="other"), max_batches=1)

    stream.add(5, first=10, payload=b'{"id": %d, "size": 1, "on": true}')
    raced = Once(Step.READ, race)
    stream.drain(spark, what, raced)
    assert raced.is_done
    assert kinds(spark, what) == {"id": "bigint", "user": "string", "size": "string", "on": "boolean"}
    stream.assert_each_once()
    assert sorted(row["id"] for row in rows(spark, what)) == [*range(15), *range(20, 25)]
    stream.client.close()
