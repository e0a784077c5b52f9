"""The asset checks of a table that is not there, and behind a replay."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from stream_assets import StreamAsset, stream_definitions
from stream_consumers.create import create_producer
from tests.support.dagster_runs import declare, execute
from tests.support.streams import write_stream

pytestmark = pytest.mark.dagster
MONDAY_MS = int(datetime(2026, 11, 16, tzinfo=timezone.utc).timestamp() * 1000)


def check(stream: StreamAsset, instance: dg.DagsterInstance) -> dict[str, dg.AssetCheckEvaluation]:
    """Only the checks, as somebody starts them in the UI."""
    job = dg.define_asset_job("check", selection=dg.AssetSelection.checks_for_assets(stream.key))
    definitions = dg.Definitions.merge(stream_definitions([stream]), dg.Definitions(jobs=[job]))
    result = definitions.resolve_job_def("check").execute_in_process(instance=instance)
    return {found.check_name: found for found in result.get_asset_check_evaluations()}


@pytest.mark.spark
def test_no_check_passes_on_a_table_that_only_another_group_has_written(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance
) -> None:
    write_stream(folder / "orders.ss", 5)
    execute(declare(folder), instance)
    assert {one.passed for one in check(declare(folder), instance).values()} == {True}
    found = check(declare(folder, group="somebody"), instance)
    assert {one.passed for one in found.values()} == {False}
    assert f"group 'somebody' has written nothing into {folder}/t" in (found["no_gaps"].description or "")


@pytest.mark.slow
@pytest.mark.spark
def test_behind_a_replay_the_checks_are_those_of_its_rows(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance
) -> None:
    with create_producer(f"file://{folder}/orders.ss/orders") as producer:
        for index in range(10):
            payload = b'{"id": ' if index == 7 else b'{"id": %d, "user": "u"}' % index
            producer.send(payload, timestamp_ms=MONDAY_MS + index)
    stream = declare(folder)
    execute(stream, instance)
    job = stream_definitions([stream]).resolve_job_def("replay_orders")
    result = job.execute_in_process(instance=instance, partition_key="2026-11-16")
    # Dagster shows as not checked what was materialized by a run without an evaluation.
    assert {one.check_name: one.passed for one in result.get_asset_check_evaluations()} == {
        "no_gaps": True,
        "no_dead_letters": False,
        "dead_letter_ratio": False,
    }
    (newest,) = instance.fetch_materializations(stream.key, limit=1).records
    assert newest.run_id == result.run_id
    assert newest.asset_materialization is not None
    assert newest.asset_materialization.metadata["stream/kind"].value == "replay"
