"""The operators' pack: what a run reports of its batches, the dead-letter sensor, maintenance, and single writers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from spark_jobs.metrics.recorders import recorders
from spark_jobs.structured_logs import JsonFormatter
from stream_assets import (
    Keys,
    NewDeadLetters,
    OpOptions,
    build_dead_letter_sensor,
    build_maintenance,
    build_rebuild_job,
    build_redrive_job,
    build_replay_job,
    stream_definitions,
)
from stream_consumers.create import create_producer
from stream_consumers.errors import InvalidOptionError
from tests.support.command_line import run
from tests.support.dagster_runs import declare, execute, plain_asset

pytestmark = pytest.mark.dagster
SECRET = "4111-1111"


class Lines(logging.Handler):
    """What is logged, as JSON objects."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(JsonFormatter())
        self.found: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(json.loads(self.format(record)))


def send(folder: Path, *payloads: bytes) -> None:
    with create_producer(f"file://{folder}/orders.ss/orders") as producer:
        for payload in payloads:
            producer.send(payload)


def tick(
    sensor: dg.SensorDefinition, instance: dg.DagsterInstance, definitions: dg.Definitions, cursor: str | None
) -> Any:
    context = dg.build_sensor_context(instance=instance, cursor=cursor, definitions=definitions)
    return sensor.evaluate_tick(context)


@pytest.mark.slow
def test_only_a_table_that_keeps_rows_of_deleted_keys_is_purged() -> None:
    for keys in (None, Keys(["id"])):
        with pytest.raises(InvalidOptionError):
            build_maintenance(plain_asset(keys=keys), purge_after_days=30)
    ordered = plain_asset(keys=Keys(["id"], sequence_by="at"))
    with pytest.raises(InvalidOptionError):
        build_maintenance(ordered, purge_after_days=-1)
    assert build_maintenance(ordered, purge_after_days=30).assets


@pytest.mark.spark
def test_what_operators_see_of_a_run(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAM_ASSETS_PROMETHEUS_TEXTFILES", str(folder / "textfiles"))
    recorders.cache_clear()
    lines, log = Lines(), logging.getLogger("spark_jobs")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    send(folder, b'{"id": 1, "user": "%s"}' % SECRET.encode(), SECRET.encode(), b'{"id": 3, "user": "u"}')
    stream = declare(folder)
    try:
        assert execute(stream, instance).success
    finally:
        log.removeHandler(lines)
        log.setLevel(logging.NOTSET)
        recorders.cache_clear()
    # Lines with the batch that they are about, and its numbers.
    (batch,) = [line for line in lines.found if "rows" in line]
    assert (batch["messages"], batch["rows"], batch["dead_letters"], batch["lag"]) == (2, 2, 1, 0)
    newest = stream.declared.ingestion.ledger().read().newest
    assert newest is not None
    assert (batch["batch"], batch["batch_number"], batch["group"]) == (newest.bid, newest.number, "lakehouse")
    assert batch["bytes"] > 0
    # Metrics, with each step on the way.
    metrics = (folder / "textfiles" / "stream_assets.prom").read_text()
    labels = f'group="lakehouse",kind="batch",table="{stream.declared.ingestion.table}"'
    assert f"stream_assets_rows_total{{{labels}}} 2.0" in metrics
    assert f"stream_assets_dead_letters_total{{{labels}}} 1.0" in metrics
    for step in ("planned", "read", "rows written", "verified", "committed"):
        assert f'step="{step}"' in metrics
    # Never what is in a message.
    assert SECRET not in metrics
    assert SECRET not in json.dumps(lines.found)
    _check_dead_letters(stream, folder, instance)
    _check_maintenance(stream, instance)


def _check_dead_letters(stream: Any, folder: Path, instance: dg.DagsterInstance) -> None:
    told: list[NewDeadLetters] = []

    @dg.job
    def look_at_them() -> None:
        """What a team does about dead letters."""

    sensor = build_dead_letter_sensor(stream, job=look_at_them, alert=lambda context, found: told.append(found))
    definitions = dg.Definitions.merge(stream_definitions([stream]), dg.Definitions(sensors=[sensor]))
    first = tick(sensor, instance, definitions, None)
    assert [(one.new, one.total, one.lost) for one in told] == [(1, 1, 0)]
    (request,) = first.run_requests
    assert (request.job_name, request.tags["stream_assets/dead_letters"]) == ("look_at_them", "1")
    (observation,) = first.asset_events
    assert observation.asset_key == stream.key
    assert observation.metadata["stream/new_dead_letters"].value == 1
    second = tick(sensor, instance, definitions, first.cursor)
    assert not second.run_requests
    assert second.skip_message == "0 new dead letters, 1 in all"
    # While a run is at work, what comes waits for the next one.
    send(folder, b"not JSON either", b"nor this")
    assert execute(stream, instance).success
    run = instance.create_run_for_job(look_at_them, status=dg.DagsterRunStatus.STARTED)
    third = tick(sensor, instance, definitions, second.cursor)
    assert third.skip_message == f"run {run.run_id} must end before 2 new dead letters can be redriven"
    instance.delete_run(run.run_id)
    fourth = tick(sensor, instance, definitions, third.cursor)
    assert fourth.run_requests[0].tags["stream_assets/dead_letters"] == "2"
    # Without a job, the tick says it.
    silent = build_dead_letter_sensor(stream, least=4)
    assert tick(silent, instance, definitions, None).skip_message == "3 new dead letters, 3 in all"
    alone = tick(build_dead_letter_sensor(stream), instance, definitions, None)
    assert alone.skip_message.endswith("_dead_letters has 3 new dead letters of orders, 3 in all")


def _check_maintenance(stream: Any, instance: dg.DagsterInstance) -> None:
    pack = build_maintenance(stream, cron_schedule="30 2 * * *")
    definitions = dg.Definitions.merge(stream_definitions([stream]), pack)
    dg.Definitions.validate_loadable(definitions)
    (schedule,) = pack.schedules or []
    assert isinstance(schedule, dg.ScheduleDefinition)
    assert (schedule.name, schedule.cron_schedule, schedule.job_name) == (
        "orders_maintenance",
        "30 2 * * *",
        "maintain_orders",
    )
    result = definitions.resolve_job_def("maintain_orders").execute_in_process(instance=instance)
    (done,) = result.asset_materializations_for_node("orders_maintenance")
    # The table and its dead letters.
    assert done.metadata["delta/files_joined"].value == 2
    assert done.metadata["delta/files_written"].value == 1
    assert done.metadata["delta/files_deleted"].value == 0


def test_all_writers_share_the_pool_of_a_single_writer(folder: Path) -> None:
    alone = declare(folder, op=OpOptions(single_writer=True, pool="orders"))
    with pytest.raises(InvalidOptionError):
        build_maintenance(alone, pool="maintenance")
    (maintenance,) = build_maintenance(alone).assets or []
    assert isinstance(maintenance, dg.AssetsDefinition)
    assert maintenance.op.pool == "orders"
    jobs = (build_replay_job(alone), build_redrive_job(alone), build_rebuild_job(alone))
    assert [node.definition.pool for job in jobs for node in job.nodes] == ["orders", "orders", "orders"]
    jobs = (build_replay_job(declare(folder)), build_redrive_job(declare(folder, op=OpOptions(pool="orders"))))
    assert [node.definition.pool for job in jobs for node in job.nodes] == ["replay_orders", "redrive_orders"]


def test_a_table_that_is_not_there_has_no_dead_letters(folder: Path, instance: dg.DagsterInstance) -> None:
    stream = declare(folder)
    definitions = stream_definitions([stream])
    found = tick(build_dead_letter_sensor(stream), instance, definitions, None)
    assert found.skip_message == "0 new dead letters, 0 in all"


def test_a_single_writer_writes_alone() -> None:
    orders = plain_asset(table="s3a://lake/orders", op=OpOptions(single_writer=True, pool="orders"))
    assert orders.declared.ingestion.single_writer
    assert orders.op.pool == "orders"


@pytest.mark.spark
def test_doctor_looks_at_the_log_store_of_a_table(spark: SparkSession, folder: Path) -> None:
    refused = run("doctor", "--table", "s3a://lake/orders")
    assert refused.exit_code == 1
    assert "spark.delta.logStore.s3a.impl" in "".join(refused.output.split())
    assert run("doctor", "--table", "s3a://lake/orders", "--single-writer").exit_code == 0
    local = run("doctor", "--table", folder / "t")
    assert local.exit_code == 0
    assert "HardLinkLogStore" in local.output
