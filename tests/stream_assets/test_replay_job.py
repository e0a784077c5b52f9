"""Replays, rewinds and stops as run configs, and the partitioned replay job, in a real Dagster instance."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

import dagster as dg
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from stream_assets import ErrorPolicy, Json, stream_definitions
from stream_consumers.create import create_producer
from tests.support.dagster_runs import declare, execute, materializations, tick
from tests.support.streams import shard, write_stream

pytestmark = [pytest.mark.spark, pytest.mark.dagster, pytest.mark.slow]
DAY_MS = 86_400_000
TUESDAY_MS = int(datetime(2026, 11, 17, tzinfo=timezone.utc).timestamp() * 1000)


def makers(folder: Path) -> Counter[str]:
    return Counter(DeltaTable(str(folder / "t")).to_pyarrow_table(columns=["made_by"]).to_pydict()["made_by"])


def new_ids(folder: Path) -> set[int]:
    rows = DeltaTable(str(folder / "t")).to_pyarrow_table(columns=["id", "made_by"]).to_pylist()
    return {row["id"] for row in rows if row["made_by"] == "new"}


def test_start_and_stop_replay_and_move_nothing(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance
) -> None:
    write_stream(folder / "orders.ss", 200)
    execute(declare(folder, "old"), instance)
    stream = declare(folder, "new")
    positions = stream.declared.ingestion.ledger().read().positions
    config = {"start": {"rewind": {"orders/0": 11}}, "stop": {"rewind": 31}, "max_records": 10}
    result = execute(stream, instance, config=config)
    assert result.success
    assert new_ids(folder) == set(range(20, 60, 2))
    assert makers(folder) == {"old": 180, "new": 20}
    assert stream.declared.ingestion.ledger().read().positions == positions
    found = materializations(result)
    assert [m.metadata["stream/kind"].value for m in found] == ["replay"]
    assert [m.metadata["replay/replaced_rows"].value for m in found] == [20]
    assert [m.metadata["replay/stop"].value for m in found] == ["31"]
    assert not tick(stream, instance).run_requests


def test_move_group_goes_back_and_the_next_tick_continues_there(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance
) -> None:
    write_stream(folder / "orders.ss", 200)
    execute(declare(folder, "old"), instance)
    stream = declare(folder, "new")
    config = {"start": {"rewind": 51}, "move_group": True, "max_batches": 1}
    assert execute(stream, instance, config=config).success
    assert makers(folder) == {"old": 160, "new": 40}
    (request,) = tick(stream, instance).run_requests or []
    assert request.tags["stream_assets/lag"] == "60"
    assert execute(stream, instance).success
    assert new_ids(folder) == set(range(100, 200))
    assert makers(folder) == {"old": 100, "new": 100}
    assert not tick(stream, instance).run_requests


def test_move_group_says_where_a_new_group_begins(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance
) -> None:
    write_stream(folder / "orders.ss", 100)
    config = {"start": {"seek": "2023-11-14T22:13:20.060Z"}, "move_group": True, "stop": {"rewind": "latest"}}
    assert execute(declare(folder, "new"), instance, config=config).success
    assert new_ids(folder) == set(range(60, 100))


def test_a_place_that_the_stream_does_not_hold_fails_the_run(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance
) -> None:
    write_stream(folder / "orders.ss", 10)
    execute(declare(folder, "old"), instance)
    result = execute(declare(folder, "new"), instance, config={"start": {"rewind": 5000}})
    failure = result.get_step_failure_events()[0].step_failure_data.user_failure_data
    assert failure is not None
    assert "does not hold sequence 5000" in (failure.description or "")
    assert makers(folder) == {"old": 10}


def test_a_day_is_replayed_by_its_partition(spark: SparkSession, folder: Path, instance: dg.DagsterInstance) -> None:
    with create_producer(f"file://{folder}/orders.ss/orders") as producer:
        for index in range(90):
            moment = TUESDAY_MS - DAY_MS + index // 30 * DAY_MS + index % 30 * 1000
            producer.send(b'{"id": %d, "user": "u"}' % index, shard=index % 2, timestamp_ms=moment)
    execute(declare(folder, "old"), instance)
    stream = declare(folder, "new")
    job = stream_definitions([stream]).resolve_job_def("replay_orders")
    result = job.execute_in_process(instance=instance, partition_key="2026-11-17")
    assert result.success
    assert new_ids(folder) == set(range(30, 60))
    assert makers(folder) == {"old": 60, "new": 30}
    assert stream.declared.ingestion.ledger().read().positions == {shard(0): 46, shard(1): 46}
    found = instance.fetch_materializations(stream.key, limit=10).records
    assert found[0].asset_materialization is not None
    assert found[0].asset_materialization.metadata["stream/kind"].value == "replay"
    assert found[0].asset_materialization.metadata["replay/partitions"].value == "2026-11-17"
    assert len(found) == 2, "one of the ingestion, one of the replay"
    config = {"ops": {"replay_orders_partition": {"config": {"on_replay": "append"}}}}
    assert job.execute_in_process(instance=instance, partition_key="2026-11-16", run_config=config).success
    assert makers(folder) == {"old": 60, "new": 60}


def test_dead_letters_that_a_replay_replaced_fail_no_check(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance
) -> None:
    write_stream(folder / "orders.ss", 40, malformed=frozenset({5, 30}))
    first = execute(declare(folder, "old"), instance)
    assert _dead(first) == 2
    replayed = execute(declare(folder, "new"), instance, config={"start": {"rewind": 1}, "stop": {"rewind": 11}})
    assert _dead(replayed) == 2, "the same two, not three"
    text = declare(
        folder,
        "new",
        decode=Json("id BIGINT, user STRING, more STRING"),
        errors=ErrorPolicy(schema_changes="add_columns"),
    )
    assert _dead(execute(text, instance, config={"start": {"rewind": "earliest"}})) == 2


def _dead(result: dg.ExecuteInProcessResult) -> object:
    (found,) = [e for e in result.get_asset_check_evaluations() if e.check_name == "no_dead_letters"]
    return found.metadata["stream/dead_letters"].value
