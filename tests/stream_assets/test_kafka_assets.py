"""Kafka stream assets under Dagster: the sensor, the runs, and what an operator sees of them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from confluent_kafka import Consumer, Producer
from pyspark.sql import SparkSession

from stream_assets import LagPolicy, RunLimits, StreamAsset
from stream_consumers.errors import InvalidOptionError
from tests.support.dagster_runs import declare, execute, materializations, plain_asset, skip_message, tick
from tests.support.polling import until
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
def test_a_live_member_is_named_in_the_failed_run(
    spark: SparkSession, kafka: str, folder: Path, instance: dg.DagsterInstance
) -> None:
    topic = create_topic(kafka, 1)
    fill(kafka, topic, 10, partitions=1)
    stream = kafka_asset(kafka, topic, folder)
    settings = {"bootstrap.servers": kafka, "group.id": stream.declared.ingestion.group, "client.id": "console-7"}
    member = Consumer({**settings, "enable.auto.commit": False, "log_level": 2})
    member.subscribe([topic])
    until(lambda: member.poll(0.1) or member.assignment(), what="the member's assignment")
    failed = execute(stream, instance)
    assert not failed.success
    (failure,) = [event.step_failure_data for event in failed.all_events if event.is_step_failure]
    assert "console-7" in str(failure.error)
    member.close()
    assert execute(stream, instance).success
    assert set(sequences_in_table(folder / "t").values()) == {1}
    assert committed(kafka, stream.declared.ingestion.group, topic) == {0: 10}


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
def test_the_example(
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
