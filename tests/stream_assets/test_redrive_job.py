"""The redrive job of a stream asset, in a real Dagster instance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from stream_assets import Json, RunLimits, StreamAsset, build_redrive_job, stream_definitions
from stream_assets.options import RedriveConfig
from stream_consumers.errors import InvalidOptionError
from tests.support.dagster_runs import declare, execute, plain_asset
from tests.support.streams import sequences_in_table, write_stream

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
    with pytest.raises(dg.DagsterInvalidConfigError, match="on_replay"):
        dg.validate_run_config(job, {"ops": {"redrive_orders_dead_letters": {"config": {"on_replay": "append"}}}})


def test_claimed_entries_have_none() -> None:
    claimed = plain_asset(source="redis://localhost:6379/orders", mode="load_balanced")
    with pytest.raises(InvalidOptionError):
        build_redrive_job(claimed)
    assert "redrive_orders" not in {job.name for job in stream_definitions([claimed], redrive_jobs=True).jobs or []}


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
@pytest.mark.dagster
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
