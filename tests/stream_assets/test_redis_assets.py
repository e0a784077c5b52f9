"""Redis stream assets under Dagster: members that claim entries, each run with a name of its own."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from sensors.lag_sensor import MEMBER_TAG
from tests.support.dagster_runs import declare, execute, materializations, skip_message, tick
from tests.support.redis_tables import Stream
from tests.support.settings import ROOT

pytestmark = [pytest.mark.spark, pytest.mark.dagster]


@pytest.fixture
def instance(folder: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(folder)) as made:
        yield made


def test_members_claim_entries_under_names_of_their_own(
    spark: SparkSession, redis_address: str, folder: Path, instance: dg.DagsterInstance
) -> None:
    made = Stream(redis_address, folder, shards=4, mode="load_balanced")
    stream = declare(
        folder, source=made.url, group=made.group, mode="load_balanced", members=3, client={"min_idle_seconds": 1.0}
    )
    made.add(40)
    asked = tick(stream, instance).run_requests or []
    assert [request.tags[MEMBER_TAG] for request in asked] == ["main", "member-2", "member-3"]
    assert asked[0].tags["stream_assets/lag"] == "40"
    instance.create_run_for_job(
        dg.Definitions(jobs=[dg.job(name=stream.job_name)(lambda: None)]).resolve_job_def(stream.job_name),
        status=dg.DagsterRunStatus.STARTED,
        tags={MEMBER_TAG: "member-2"},
    )
    asked = tick(stream, instance).run_requests or []
    assert [request.tags[MEMBER_TAG] for request in asked] == ["main", "member-3"]
    result = execute(stream, instance)
    assert result.success
    (found,) = materializations(result)
    table = found.metadata["stream/ranges"]
    assert isinstance(table, dg.TableMetadataValue)
    assert sum(int(record.data["messages"]) for record in table.records) == 40
    assert found.metadata["stream/lag_after"].value == 0
    made.table = folder / "t"
    made.assert_each_once()
    assert "no lag" in skip_message(tick(stream, instance))


def test_the_example_loads() -> None:
    stream = runpy.run_path(str(ROOT / "examples" / "redis" / "definitions.py"))["orders"]
    assert stream.ingestion.claims
    assert stream.stream.is_claimed
