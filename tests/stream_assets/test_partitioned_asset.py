"""An asset with partitions: fed by runs without one, replayed by runs of some, in a real Dagster instance."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from stream_assets import OpOptions, stream_definitions
from stream_consumers.create import create_producer
from stream_consumers.errors import InvalidOptionError
from tests.support.dagster_runs import declare, execute, tick
from tests.support.ledger_tables import at
from tests.support.streams import write_stream

pytestmark = pytest.mark.dagster
DAYS = dg.DailyPartitionsDefinition("2026-11-14", end_offset=1)
KEY = dg.AssetKey("orders")


def makers(folder: Path) -> Counter[str]:
    return Counter(DeltaTable(str(folder / "t")).to_pyarrow_table(columns=["made_by"]).to_pydict()["made_by"])


def told(instance: dg.DagsterInstance, run_id: str) -> dict[str | None, dict[str, Any]]:
    """The metadata of the partitions that a run has materialized."""
    found = instance.fetch_materializations(KEY, limit=100).records
    made = [record.asset_materialization for record in found if record.run_id == run_id]
    return {one.partition: {n: v.value for n, v in one.metadata.items()} for one in made if one and one.partition}


@pytest.mark.slow
@pytest.mark.spark
def test_ingestion_feeds_the_partitions_and_a_run_of_some_replays_them(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance
) -> None:
    """Two days are replayed in one run, with another transform; the one between has no messages."""
    with create_producer(f"file://{folder}/orders.ss/orders") as producer:
        for index, day in enumerate(sorted(["2026-11-15", "2026-11-16", "2026-11-18"] * 10)):
            producer.send(b'{"id": %d, "user": "u"}' % index, timestamp_ms=at(day) + index)
    ingested = execute(declare(folder, "old", spec=dg.AssetSpec("orders", partitions_def=DAYS)), instance)
    assert ingested.success
    found = told(instance, ingested.run_id)
    assert {day: one["ingest/partition_rows"] for day, one in found.items()} == {
        "2026-11-15": 10,
        "2026-11-16": 10,
        "2026-11-18": 10,
    }
    assert {day: one["dagster/partition_row_count"] for day, one in found.items()} == dict.fromkeys(found, 10)
    assert {one.check_name: one.passed for one in ingested.get_asset_check_evaluations()} == {
        "no_gaps": True,
        "no_dead_letters": True,
        "dead_letter_ratio": True,
    }

    stream = declare(folder, "new", spec=dg.AssetSpec("orders", partitions_def=DAYS))
    positions = stream.declared.ingestion.ledger().read().positions
    days = {"dagster/asset_partition_range_start": "2026-11-16", "dagster/asset_partition_range_end": "2026-11-18"}
    job = stream_definitions([stream]).resolve_implicit_global_asset_job_def()
    config = {"ops": {"orders": {"config": {"max_records": 7}}}}
    replayed = job.execute_in_process(instance=instance, tags=days, run_config=config, asset_selection=[KEY])
    assert replayed.success
    assert makers(folder) == {"old": 10, "new": 20}
    assert stream.declared.ingestion.ledger().read().positions == positions
    found = told(instance, replayed.run_id)
    assert {day: one["dagster/partition_row_count"] for day, one in found.items()} == {
        "2026-11-16": 10,
        "2026-11-17": 0,
        "2026-11-18": 10,
    }
    assert not any("replay/batches" in one or "dagster/row_count" in one for one in found.values())
    assert instance.get_materialized_partitions(KEY) == {"2026-11-15", "2026-11-16", "2026-11-17", "2026-11-18"}
    assert not tick(stream, instance).run_requests

    # From a place to another one, in a run without partitions: those that were touched are named, and no other one.
    between = {"start": {"seek": "2026-11-15"}, "stop": {"seek": "2026-11-16"}}
    replayed = execute(stream, instance, config=between)
    assert replayed.success
    assert set(told(instance, replayed.run_id)) == {"2026-11-15"}
    refused = job.execute_in_process(
        instance=instance,
        partition_key="2026-11-16",
        run_config={"ops": {"orders": {"config": between}}},
        asset_selection=[KEY],
        raise_on_error=False,
    )
    failure = refused.get_step_failure_events()[0].step_failure_data.user_failure_data
    assert failure is not None
    assert "start, stop does not go together with partitions" in (failure.description or "")


def test_an_asset_with_partitions_is_replayed_on_its_own_page_by_one_run_and_has_no_replay_job(folder: Path) -> None:
    stream = declare(folder, spec=dg.AssetSpec("orders", partitions_def=DAYS))
    assert stream.partitions_def == DAYS
    assert stream.backfill_policy == dg.BackfillPolicy.single_run()
    definitions = stream_definitions([stream])
    dg.Definitions.validate_loadable(definitions)
    assert [job.name for job in definitions.jobs or ()] == ["ingest_orders"]
    assert "stream/replay_job" not in stream.metadata_by_key[KEY]
    by_day = declare(
        folder,
        spec=dg.AssetSpec("orders", partitions_def=DAYS),
        op=OpOptions(backfill_policy=dg.BackfillPolicy.multi_run(1)),
    )
    assert by_day.backfill_policy == dg.BackfillPolicy.multi_run(1)
    assert declare(folder).backfill_policy is None


def test_the_sensor_asks_for_a_run_without_a_partition(folder: Path, instance: dg.DagsterInstance) -> None:
    write_stream(folder / "orders.ss", 5)
    (request,) = tick(declare(folder, spec=dg.AssetSpec("orders", partitions_def=DAYS)), instance).run_requests or []
    assert request.partition_key is None


@pytest.mark.parametrize(
    "partitions",
    [dg.DailyPartitionsDefinition("2026-11-14"), dg.HourlyPartitionsDefinition("2026-11-14-00:00")],
    ids=["days", "hours"],
)
def test_partitions_without_the_current_one_are_refused(
    folder: Path, partitions: dg.TimeWindowPartitionsDefinition
) -> None:
    with pytest.raises(InvalidOptionError, match="end_offset=1"):
        declare(folder, spec=dg.AssetSpec("orders", partitions_def=partitions))


def test_claimed_entries_have_no_partitions(folder: Path) -> None:
    with pytest.raises(InvalidOptionError, match="claim entries one by one"):
        declare(
            folder,
            source="redis://localhost:6379/orders",
            mode="load_balanced",
            spec=dg.AssetSpec("orders", partitions_def=DAYS),
        )
