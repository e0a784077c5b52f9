"""Replays and redrives as run configs, jobs and partitions, in a real Dagster instance."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.batches import target_table
from stream_assets import (
    ErrorPolicy,
    Json,
    OpOptions,
    RunLimits,
    StreamAsset,
    build_redrive_job,
    stream_definitions,
    stream_run,
)
from stream_assets.options import RedriveConfig
from stream_consumers.create import create_producer
from stream_consumers.errors import InvalidOptionError
from tests.support.dagster_runs import declare, execute, materializations, plain_asset, tick
from tests.support.ledger_tables import at, write_batch
from tests.support.streams import sequences_in_table, shard, write_stream

pytestmark = pytest.mark.dagster
DAY_MS = 86_400_000
TUESDAY_MS = int(datetime(2026, 11, 17, tzinfo=timezone.utc).timestamp() * 1000)


def makers(folder: Path) -> Counter[str]:
    return Counter(DeltaTable(str(folder / "t")).to_pyarrow_table(columns=["made_by"]).to_pydict()["made_by"])


def new_ids(folder: Path) -> set[int]:
    rows = DeltaTable(str(folder / "t")).to_pyarrow_table(columns=["id", "made_by"]).to_pylist()
    return {row["id"] for row in rows if row["made_by"] == "new"}


@pytest.mark.slow
@pytest.mark.spark
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


@pytest.mark.slow
@pytest.mark.spark
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


@pytest.mark.slow
@pytest.mark.spark
def test_move_group_says_where_a_new_group_begins(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance
) -> None:
    write_stream(folder / "orders.ss", 100)
    config = {"start": {"seek": "2023-11-14T22:13:20.060Z"}, "move_group": True, "stop": {"rewind": "latest"}}
    assert execute(declare(folder, "new"), instance, config=config).success
    assert new_ids(folder) == set(range(60, 100))


@pytest.mark.slow
@pytest.mark.spark
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
    # Dagster shows as not checked what was materialized by a run without an evaluation.
    checks = {one.check_name: one.passed for one in result.get_asset_check_evaluations()}
    assert checks == {"no_gaps": True, "no_dead_letters": True, "dead_letter_ratio": True}
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


@pytest.fixture
def planning_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without Spark, as far as the plan."""
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=1))
    monkeypatch.setattr(stream_run, "run_session", lambda *_: nullcontext(session))
    monkeypatch.setattr(target_table, "_check_session", lambda *_: None)


def test_a_day_after_a_message_with_a_time_in_the_future_fails_and_names_its_sequences(
    planning_only: None, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    moments = ["2026-11-16", "2030-01-01", "2026-11-17", "2026-11-17"]
    with create_producer(f"file://{tmp_path}/orders.ss/orders") as producer:
        sequences = [producer.send(b"{}", timestamp_ms=at(moment)).sequence for moment in moments]
    write_batch(tmp_path / "t", dict(zip(sequences, moments)))
    stream = declare(tmp_path, "new")
    job = stream_definitions([stream]).resolve_job_def("replay_orders")
    of_day = job.execute_in_process(instance=instance, partition_key="2026-11-17", raise_on_error=False)
    times = {"start": {"seek": "2026-11-17"}, "stop": {"seek": "2026-11-18"}}
    for result in (of_day, execute(stream, instance, config=times)):
        (failed,) = [event for event in result.all_events if event.event_type is dg.DagsterEventType.STEP_FAILURE]
        assert "--from orders/0=3 --until orders/0=5" in str(failed.step_failure_data.error)
    assert DeltaTable(str(tmp_path / "t")).version() == 0


@pytest.mark.slow
@pytest.mark.spark
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


STRICT = Json("id BIGINT, user STRING, amount BIGINT NOT NULL")
TODAY = Json("id BIGINT, user STRING, amount BIGINT")


def test_the_job_is_there_on_request_and_has_nothing_to_do_with_the_others() -> None:
    orders = plain_asset()
    plain, with_it = stream_definitions([orders]), stream_definitions([orders], redrive_jobs=True)
    named = [{job.name for job in definitions.jobs or []} for definitions in (plain, with_it)]
    assert named[1] - named[0] == {"redrive_orders"}
    job = with_it.resolve_job_def("redrive_orders")
    good = {"start": {"seek": "2026-11-17"}, "stop": {"rewind": 9}, "limit": 5, "dry_run": True}
    assert dg.validate_run_config(job, {"ops": {"redrive_orders_dead_letters": {"config": good}}})
    for wrong in ({"dismiss": "why", "dry_run": True}, {"reason": "not a JSON object"}):
        with pytest.raises(InvalidOptionError):
            RedriveConfig(**wrong).check()


def test_claimed_entries_have_none() -> None:
    claimed = plain_asset(source="redis://localhost:6379/orders", mode="load_balanced")
    with pytest.raises(InvalidOptionError):
        build_redrive_job(claimed)


def redrive(stream: StreamAsset, instance: dg.DagsterInstance, **config: Any) -> dg.ExecuteInProcessResult:
    job = stream_definitions([stream], redrive_jobs=True).resolve_job_def("redrive_orders")
    run_config = {"ops": {"redrive_orders_dead_letters": {"config": config}}}
    return job.execute_in_process(instance=instance, run_config=run_config, raise_on_error=False)


def dead(result: dg.ExecuteInProcessResult) -> tuple[bool, object]:
    (found,) = [e for e in result.get_asset_check_evaluations() if e.check_name == "no_dead_letters"]
    return found.passed, found.metadata["stream/dead_letters"].value


def outcome(result: dg.ExecuteInProcessResult) -> dict[str, object]:
    """The numbers that the page of the run has."""
    (event,) = [e for e in result.all_events if e.event_type is dg.DagsterEventType.STEP_OUTPUT]
    metadata = event.step_output_data.metadata
    return {name: value.value for name, value in metadata.items() if isinstance(value, dg.IntMetadataValue)}


@pytest.mark.slow
@pytest.mark.spark
def test_a_redrive_is_one_materialization_and_its_check_becomes_green(
    spark: SparkSession, folder: Path, instance: dg.DagsterInstance
) -> None:
    write_stream(folder / "orders.ss", 20)
    # No message has an amount, which was to be there.
    assert dead(execute(declare(folder, decode=STRICT), instance)) == (False, 20)
    today = declare(folder, decode=TODAY, limits=RunLimits(max_records=6))
    tried = redrive(today, instance, dry_run=True)
    assert dead(tried) == (False, 20)
    assert outcome(tried) == {"redrive/decoded": 20, "redrive/still_dead": 0}
    assert not tried.get_asset_materialization_events()
    assert dead(redrive(today, instance, limit=5)) == (False, 15)
    dismissed = redrive(today, instance, dismiss="test messages", reason="is missing", limit=2)
    assert outcome(dismissed) == {"redrive/dismissed": 2}
    assert dead(dismissed) == (False, 13)
    done = redrive(today, instance)
    assert outcome(done) == {"redrive/decoded": 13, "redrive/still_dead": 0}
    assert dead(done) == (True, 0)
    (event,) = done.get_asset_materialization_events()
    told = event.step_materialization_data.materialization.metadata
    assert told["stream/kind"].value == "redrive"
    names = ("batches", "messages", "rows", "still_dead")
    assert [told[f"redrive/{name}"].value for name in names] == [3, 13, 13, 0]
    assert not any(name.startswith("ingest/") or name == "stream/lag_after" for name in told)
    assert sum(sequences_in_table(folder / "t").values()) == len(sequences_in_table(folder / "t")) == 18


DAYS = dg.DailyPartitionsDefinition("2026-11-14", end_offset=1)
KEY = dg.AssetKey("orders")


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
    assert "start, stop cannot be combined with partitions" in (failure.description or "")


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


def test_partitions_without_the_current_one_and_those_of_claimed_entries_are_refused(folder: Path) -> None:
    past: tuple[dg.TimeWindowPartitionsDefinition, ...] = (
        dg.DailyPartitionsDefinition("2026-11-14"),
        dg.HourlyPartitionsDefinition("2026-11-14-00:00"),
    )
    for partitions in past:
        with pytest.raises(InvalidOptionError, match="end_offset=1"):
            declare(folder, spec=dg.AssetSpec("orders", partitions_def=partitions))
    claimed = {"source": "redis://localhost:6379/orders", "mode": "load_balanced"}
    with pytest.raises(InvalidOptionError):
        declare(folder, **claimed, spec=dg.AssetSpec("orders", partitions_def=DAYS))
