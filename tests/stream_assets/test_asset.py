"""Stream assets in a real Dagster instance, on the shared Spark session."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import dagster as dg
import pytest
from dagster_pyspark import LazyPySparkResource, PySparkResource
from pyspark.sql import SparkSession

from sensors.lag_sensor import LagCursor, LagPolicy, read_cursor
from spark_jobs.session import delta_spark_config
from stream_assets import OpOptions, SparkSessionResource, stream_definitions
from stream_consumers.create import create_producer
from stream_consumers.errors import InvalidOptionError, SourceRecreatedError, StreamNotFoundError
from tests.support.dagster_runs import declare, execute, materializations, observations, skip_message, tick
from tests.support.settings import ROOT
from tests.support.streams import assert_each_once, sequences_in_table, write_stream

pytestmark = [pytest.mark.spark, pytest.mark.dagster]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "eager", "lazy"])
def test_any_resource_with_a_spark_session_works(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance, kind: str
) -> None:
    write_stream(folder / "orders.ss", 100, malformed=frozenset({5}))
    config = {key: value for key, value in delta_spark_config().items() if key != "spark.jars"}
    resource = {
        "own": SparkSessionResource(),
        "eager": PySparkResource(spark_config=config),
        "lazy": LazyPySparkResource(spark_config=config),
    }[kind]
    result = execute(declare(folder, spark=resource), instance)
    assert result.success
    assert_each_once(folder / "orders.ss", folder / "t")
    assert spark.sql("SELECT 1").count() == 1, "a session that was there before is not stopped"


def test_the_sensor_asks_and_the_run_reports_each_batch_and_one_materialization(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance
) -> None:
    write_stream(folder / "orders.ss", 100, malformed=frozenset({5}))
    stream = declare(folder)
    first = tick(stream, instance)
    assert first.run_requests
    assert first.run_requests[0].run_key is None, "a failed run must not burn its own retry"
    assert [event.metadata["stream/lag/lakehouse/orders"].value for event in first.asset_events] == [100]
    assert [event.asset_key for event in first.asset_events] == [dg.AssetKey(["file", "orders.ss", "orders"])]
    asked = tick(stream, instance, first.cursor)
    assert asked.run_requests
    assert not asked.asset_events, "nothing changed since the last observation"
    result = execute(stream, instance)
    last = tick(stream, instance, asked.cursor)
    assert not last.run_requests
    assert [event.metadata["stream/lag/lakehouse/orders"].value for event in last.asset_events] == [0]
    assert read_cursor(last.cursor, LagCursor).waiting_since is None
    found = observations(instance)
    assert [m.metadata["delta/version"].value for m in found] == [1, 2, 3]
    assert [m.metadata["stream/rows"].value for m in found] == [39, 40, 20]
    assert [m.metadata["stream/dead_letters"].value for m in found] == [1, 0, 0]
    assert [m.metadata["stream/lag_after"].value for m in found] == [60, 20, 0]
    ranges = found[1].metadata["stream/ranges"]
    assert isinstance(ranges, dg.TableMetadataValue)
    assert [dict(record.data) for record in ranges.records] == [
        {"shard": "orders/0", "start": 21, "end": 41, "messages": 20, "lag after": 10},
        {"shard": "orders/1", "start": 21, "end": 41, "messages": 20, "lag after": 10},
    ]
    (made,) = materializations(result)
    assert (made.metadata["ingest/batches"].value, made.metadata["ingest/rows"].value) == (3, 99)
    assert made.metadata["dagster/row_count"].value == 99
    schema = made.metadata["dagster/column_schema"]
    assert isinstance(schema, dg.TableSchemaMetadataValue)
    assert [c.name for c in schema.schema.columns][:2] == ["id", "user"]
    assert made.metadata["dagster/uri"].value == f"file://{folder}/t"
    assert found[2].metadata["stream/rows_per_second"].value > 0
    checks = {c.check_name: c for c in result.get_asset_check_evaluations()}
    assert checks["no_gaps"].passed
    assert not checks["no_dead_letters"].passed
    assert checks["no_dead_letters"].description == f"dead letters: 1, in {folder}/t_dead_letters"
    assert_each_once(folder / "orders.ss", folder / "t")
    again = execute(stream, instance)
    assert again.success
    assert materializations(again) == []
    evaluated = {c.check_name: c.passed for c in again.get_asset_check_evaluations()}
    assert evaluated == {name: found.passed for name, found in checks.items()}, "also with nothing to read"


def test_a_quiet_stream_waits_for_min_lag_but_no_longer_than_max_wait(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    write_stream(folder / "orders.ss", 5)
    stream = declare(folder, sensor=LagPolicy(min_lag=10, max_wait_seconds=60))
    result = tick(stream, instance)
    assert "lag 5 (orders/0: 3, orders/1: 2) is below min_lag 10" in skip_message(result)
    waited = json.loads(result.cursor or "")
    waited["waiting_since"] -= 61
    assert tick(stream, instance, json.dumps(waited)).run_requests
    assert tick(declare(folder, sensor=LagPolicy(min_lag=5)), instance).run_requests


@pytest.mark.slow
def test_the_wait_begins_anew_after_each_run(spark: SparkSession, folder: Path, instance: dg.DagsterInstance) -> None:
    write_stream(folder / "orders.ss", 5)
    stream = declare(folder, sensor=LagPolicy(min_lag=10, max_wait_seconds=60))
    waited = json.loads(tick(stream, instance).cursor or "")
    waited["waiting_since"] -= 61
    asked = tick(stream, instance, json.dumps(waited))
    assert asked.run_requests
    execute(stream, instance)
    write_stream(folder / "orders.ss", 5)
    assert "is below min_lag 10" in skip_message(tick(stream, instance, asked.cursor))


@pytest.mark.slow
def test_a_run_accepts_a_replaced_file_and_the_sensor_goes_on_with_it(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance
) -> None:
    write_stream(folder / "orders.ss", 50)
    execute(declare(folder), instance)
    config = {"accept": ["orders#2"]}
    assert not execute(declare(folder), instance, config=config).success, "nothing was recreated"
    (folder / "orders.ss").unlink()
    write_stream(folder / "orders.ss", 20)
    with pytest.raises(SourceRecreatedError):
        tick(declare(folder), instance)
    assert not execute(declare(folder), instance).success
    # A log store that two drivers can overwrite commits with.
    unsafe = SparkSessionResource(spark_config={"spark.delta.logStore.file.impl": "io.delta.storage.LocalLogStore"})
    alone = OpOptions(single_writer=True, pool="orders")
    assert execute(declare(folder, spark=unsafe, op=alone), instance, config=config).success
    write_stream(folder / "orders.ss", 4)
    asked = tick(declare(folder), instance)
    (observed,) = asked.asset_events
    assert observed.metadata["stream/lag/lakehouse/orders"].value == 4
    assert asked.run_requests
    # The same config accepts nothing more.
    assert execute(declare(folder), instance, config=config).success
    rows = sequences_in_table(folder / "t")
    assert max(rows.values()) == 1
    assert Counter(stream for stream, _, _ in rows) == {"orders": 50, "orders#2": 24}
    (folder / "orders.ss").unlink()
    write_stream(folder / "orders.ss", 1)
    assert not execute(declare(folder), instance, config=config).success


def test_a_budget_that_is_too_short_asks_for_a_run_instead_of_saying_no_lag(
    folder: Path, instance: dg.DagsterInstance
) -> None:
    with create_producer(f"file://{folder}/orders.ss/other") as producer:
        for index in range(500):
            producer.send(b"%d" % index)
    stream = declare(folder, sensor=LagPolicy(budget_seconds=0.0))
    assert tick(stream, instance).run_requests


def test_any_cursor_is_taken(folder: Path, instance: dg.DagsterInstance) -> None:
    write_stream(folder / "orders.ss", 5)
    nonsense = ("", "nonsense", "[]", '{"waiting_since": "x"}', '{"v": 9, "more": 1}', '{"number": 1e400}', "[" * 9999)
    # As one that was written before a clock was set back.
    later = '{"v": 1, "silent_since": 1e11, "ask_at": 1e11}'
    for cursor in (*nonsense, None, later):
        assert tick(declare(folder), instance, cursor).run_requests, cursor


def test_a_missing_file_fails_the_tick(folder: Path, instance: dg.DagsterInstance) -> None:
    with pytest.raises(StreamNotFoundError):
        tick(declare(folder), instance)


@pytest.mark.slow
def test_a_tick_starts_no_jvm(folder: Path) -> None:
    write_stream(folder / "orders.ss", 1000)
    code = f"""
import dagster as dg, os, subprocess
from dataclasses import replace
from pathlib import Path
from pyspark import SparkContext
from tests.support.dagster_runs import declare, tick
with dg.DagsterInstance.ephemeral() as instance:
    assert tick(declare(Path({str(folder)!r})), instance).run_requests
assert SparkContext._gateway is None
children = Path(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read_text().split()
assert children == [], children
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.slow
def test_the_workspace_loads_from_any_folder(folder: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("dagster")),
        "definitions",
        "validate",
        "-w",
        str(ROOT / "workspace.yaml"),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_names_that_dagster_folds_into_one_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidOptionError):
        stream_definitions([declare(folder, spec=dg.AssetSpec("a-b")), declare(folder, spec=dg.AssetSpec("a_b"))])


def test_lineage_goes_from_the_stream_to_the_table(folder: Path) -> None:
    definitions = stream_definitions([declare(folder, spec=dg.AssetSpec(["lake", "orders"]))])
    graph = definitions.resolve_asset_graph()
    assert graph.get(dg.AssetKey(["lake", "orders"])).parent_keys == {dg.AssetKey(["file", "orders.ss", "orders"])}
    assert graph.get(dg.AssetKey(["lake", "orders"])).kinds == {"file", "spark", "deltalake"}
