"""Assets of Kafka and Redis under Dagster: the sensor, members, and what an operator sees of them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from sensors.asset_runs import MEMBER_TAG
from stream_assets import LagPolicy, RunLimits, StreamAsset, stream_asset, stream_definitions
from stream_assets.translator import stream_asset_key
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import encode_key
from stream_consumers.options import ConsumerMode
from stream_consumers.redis.entries import to_sequence
from tests.support.command_line import run
from tests.support.dagster_runs import declare, execute, materializations, plain_asset, skip_message, source_with, tick
from tests.support.polling import until
from tests.support.redis_tables import QUICK, Stream
from tests.support.settings import ROOT
from tests.support.streams import sequences_in_table
from tests.support.topics import committed, create_topic, delete_topics, ends, fill, sequences_in_topic, unique_group

pytestmark = [pytest.mark.spark, pytest.mark.dagster]


def kafka_asset(kafka: str, topic: str, folder: Path, **options: Any) -> StreamAsset:
    settings = {"source": f"kafka://{kafka}/{topic}", "group": unique_group(), "limits": RunLimits(max_records=1000)}
    return declare(folder, **{**settings, **options})


def test_the_sensor_asks_the_run_writes_and_the_group_is_told(
    spark: SparkSession, kafka: str, folder: Path, instance: dg.DagsterInstance
) -> None:
    topic = create_topic(kafka, 3)
    stream = kafka_asset(kafka, topic, folder)
    assert "no lag" in skip_message(tick(stream, instance))
    fill(kafka, topic, 120, partitions=3, malformed=frozenset({5}))
    asked = tick(stream, instance)
    assert [request.tags["stream_assets/lag"] for request in asked.run_requests or []] == ["120"]
    result = execute(stream, instance)
    assert result.success
    (found,) = materializations(result)
    assert (found.metadata["ingest/rows"].value, found.metadata["ingest/dead_letters"].value) == (119, 1)
    assert "no lag" in skip_message(tick(stream, instance, asked.cursor))
    rows = sequences_in_table(folder / "t") + sequences_in_table(folder / "t_dead_letters")
    assert set(rows) == sequences_in_topic(kafka, topic)
    assert set(rows.values()) == {1}
    assert committed(kafka, stream.declared.ingestion.group, topic) == ends(kafka, topic)


@pytest.mark.slow
def test_members_are_runs_and_the_sensor_asks_for_those_that_are_missing(
    spark: SparkSession, kafka: str, folder: Path, instance: dg.DagsterInstance
) -> None:
    topic = create_topic(kafka, 4)
    stream = kafka_asset(kafka, topic, folder, mode="load_balanced", sensor=LagPolicy(max_runs=3))
    fill(kafka, topic, 40, partitions=4)
    assert len(tick(stream, instance).run_requests or []) == 3
    name = stream.declared.job_name
    instance.create_run_for_job(
        dg.Definitions(jobs=[dg.job(name=name)(lambda: None)]).resolve_job_def(name), status=dg.DagsterRunStatus.STARTED
    )
    assert len(tick(stream, instance).run_requests or []) == 2
    assert execute(stream, instance).success
    assert set(sequences_in_table(folder / "t")) == sequences_in_topic(kafka, topic)
    assert "no lag" in skip_message(tick(stream, instance))


@pytest.mark.slow
def test_an_open_transaction_is_named_and_no_alarm(
    spark: SparkSession, kafka: str, folder: Path, instance: dg.DagsterInstance
) -> None:
    topic = create_topic(kafka, 1)
    stream = kafka_asset(kafka, topic, folder)
    producer = Producer({"bootstrap.servers": kafka, "transactional.id": topic, "log_level": 2})
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce(topic, b'{"id": 1}')
    producer.flush()
    reason = skip_message(tick(stream, instance))
    assert reason.startswith("no lag")
    assert f"blocked by an open transaction: {topic}/0: 1" in reason
    assert execute(stream, instance).success
    producer.commit_transaction(10)
    until(lambda: tick(stream, instance).run_requests, what="the sensor asking for a run")
    assert execute(stream, instance).success
    assert sequences_in_table(folder / "t") == {(topic, 0, 0): 1}
    assert committed(kafka, stream.declared.ingestion.group, topic) == ends(kafka, topic) == {0: 2}


@pytest.mark.slow
def test_real_time_starts_at_the_end_and_has_no_group(
    spark: SparkSession, kafka: str, folder: Path, instance: dg.DagsterInstance
) -> None:
    topic = create_topic(kafka, 2)
    fill(kafka, topic, 20, partitions=2)
    stream = kafka_asset(kafka, topic, folder, mode="real_time", group=None)
    assert execute(stream, instance).success
    assert sequences_in_table(folder / "t") == {}
    fill(kafka, topic, 6, partitions=2)
    assert execute(stream, instance).success
    assert set(sequences_in_table(folder / "t")) == {(topic, p, n) for p in (0, 1) for n in (10, 11, 12)}
    assert committed(kafka, stream.declared.ingestion.group, topic) == {}


def test_groups_and_modes_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"group": "g", "mode": "real_time"}, {"group": None, "mode": "load_balanced"}):
        with pytest.raises(InvalidOptionError):
            plain_asset(source="kafka://b/o", **options)
    monkeypatch.setenv("HOST_ID", "7EA8906533ED")
    assert plain_asset(source="kafka://b/o", group=None).declared.ingestion.group == "7EA8906533EDr"


@pytest.mark.slow
def test_the_example_of_kafka(
    spark: SparkSession, kafka: str, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BROKER", kafka)
    monkeypatch.setenv("LAKE", str(folder))
    create_topic(kafka, 4, name="orders")
    try:
        fill(kafka, "orders", 40, partitions=4)
        stream = runpy.run_path(str(ROOT / "examples" / "kafka" / "definitions.py"))["orders"]
        assert execute(stream, instance).success
        assert committed(kafka, "lakehouse", "orders") == ends(kafka, "orders")
    finally:
        # Other tests on this broker make a topic of this name.
        delete_topics(kafka, ["orders"])


@pytest.mark.slow
def test_members_claim_entries_under_names_of_their_own(
    spark: SparkSession, redis_address: str, folder: Path, instance: dg.DagsterInstance
) -> None:
    made = Stream(redis_address, folder, shards=4, mode="load_balanced")
    stream = declare(
        folder,
        source=source_with(made.url, {"min_idle_seconds": 1.0}),
        group=made.group,
        mode="load_balanced",
        sensor=LagPolicy(max_runs=3),
    )
    made.add(40)
    asked = tick(stream, instance).run_requests or []
    assert [request.tags[MEMBER_TAG] for request in asked] == ["main", "member-2", "member-3"]
    assert asked[0].tags["stream_assets/lag"] == "40"
    name = stream.declared.job_name
    instance.create_run_for_job(
        dg.Definitions(jobs=[dg.job(name=name)(lambda: None)]).resolve_job_def(name),
        status=dg.DagsterRunStatus.STARTED,
        tags={MEMBER_TAG: "member-2"},
    )
    asked = tick(stream, instance).run_requests or []
    assert [request.tags[MEMBER_TAG] for request in asked] == ["main", "member-3"]
    result = execute(stream, instance)
    assert result.success
    (found,) = materializations(result)
    table = found.metadata["ingest/ranges"]
    assert isinstance(table, dg.TableMetadataValue)
    assert sum(int(record.data["messages"]) for record in table.records) == 40
    assert found.metadata["stream/lag_after"].value == 0
    made.table = folder / "t"
    made.assert_each_once()
    assert "no lag" in skip_message(tick(stream, instance))


@pytest.mark.slow
def test_a_stream_of_any_key_from_the_sensor_to_the_replay(
    spark: SparkSession, redis_address: str, folder: Path, instance: dg.DagsterInstance
) -> None:
    made = Stream(redis_address, folder)
    # A colon as people type it, and what a URL and SQL give a meaning.
    key = f"tenants/7:it's {made.name}"
    made.name = encode_key(key.encode())
    made.keys, made.url = [f"{key}:0", f"{key}:1"], f"redis://{redis_address}/{made.name}"
    assert made.name.startswith("tenants%2F7:it%27s%20orders-")
    stream = declare(folder, "old", source=made.url, group=made.group)
    (upstream,) = stream.upstream.values()
    assert (upstream.path[0], upstream.path[2]) == ("redis", "percent-encoded")
    made.add(20)
    assert [request.tags["stream_assets/lag"] for request in tick(stream, instance).run_requests or []] == ["20"]
    assert execute(stream, instance).success
    made.assert_each_once()
    assert "no lag" in skip_message(tick(stream, instance))

    again = declare(folder, "new", source=made.url, group=made.group)
    first = [to_sequence(made.entry_ids(shard)[0]) for shard in (0, 1)]
    assert execute(again, instance, config={"start": {"rewind": {f"{made.name}/1": first[1]}}}).success
    made.assert_each_once()
    rows = spark.read.format("delta").load(str(made.table)).groupBy("_stream", "_shard", "made_by").count().collect()
    assert {tuple(row) for row in rows} == {(made.name, 0, "old", 10), (made.name, 1, "new", 10)}

    words = ("--source", made.url, "--table", str(made.table), "--group", made.group)
    verified = run("verify", *words)
    assert verified.exit_code == 0, verified.output
    to = ",".join(f"{made.name}/{shard}={sequence}" for shard, sequence in enumerate(first))
    moved = run("rewind", *words, "--to", to, "--dry-run")
    assert moved.exit_code == 0, moved.output
    switched = run("switch", *words, "--to", "load_balanced")
    assert switched.exit_code == 0, switched.output
    made.add(10, first=20)
    made.mode, made.options = ConsumerMode.LOAD_BALANCED, dict(QUICK)
    made.drain(spark)
    made.assert_each_once()


def test_every_stream_has_an_asset_key_of_its_own_that_dagster_takes() -> None:
    streams = ["user:events", "user:events:new", "user_events", "user%3A42", "user_3A42", "tenants%2F7", "tenants_2F7"]
    streams += ["a::b", ":a", "événements", "%FF", "{shop}:orders", "percent-encoded:user_3A42", "orders.v1-x", "a~b"]
    keys = {stream: stream_asset_key("redis", "localhost", stream) for stream in streams}
    assert len(set(keys.values())) == len(streams)
    assert keys["user:events"].path == ["redis", "localhost", "user", "events"]
    assert keys["orders.v1-x"].path == ["redis", "localhost", "orders.v1-x"]
    for stream in streams:
        declared = stream_asset(source=f"redis://h/{stream}", group="g", table="t", spec=dg.AssetSpec("orders"))(
            lambda batch: batch
        )
        stream_definitions([declared]).resolve_job_def("ingest_orders")


def test_the_example_of_redis_loads() -> None:
    stream = runpy.run_path(str(ROOT / "examples" / "redis" / "definitions.py"))["orders"]
    assert stream.declared.ingestion.claims
    assert stream.declared.stream.is_claimed
