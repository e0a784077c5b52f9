"""A run config that makes no sense is refused before there is a run, and what a run can be told is shown. No Spark."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest

from stream_assets import (
    ErrorPolicy,
    RedriveConfig,
    ReplayConfig,
    RunLimits,
    StreamConfig,
    StreamRun,
    stream_asset,
    stream_definitions,
)
from stream_assets.options import BadRows, WriterConfig
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import Limits, OnBadRows


@stream_asset(source="memory://launchpad/orders", group="g", table="lake/orders", checks=())
def orders(context: dg.AssetExecutionContext, stream: StreamRun) -> Any:
    """Tells what it was told."""
    yield dg.MaterializeResult(metadata={"start": str(stream.config.start.bound()) if is_of_asset(stream) else ""})


def is_of_asset(stream: Any) -> bool:
    return hasattr(stream.config, "start")


DEFINITIONS = stream_definitions([orders], redrive_jobs=True)
JOB = DEFINITIONS.resolve_job_def("ingest_orders")


def run_config(config: dict[str, Any]) -> dict[str, Any]:
    return {"ops": {"orders": {"config": config}}}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"start": {"seek": "2026-13-99"}}, "'2026-13-99' is no place in a stream"),
        ({"stop": {"seek": "9999-12-31T23:59:59-12:00"}}, "'9999-12-31T23:59:59-12:00' is no place in a stream"),
        ({"stop": {"seek": "yesterday"}}, "'yesterday' is no place in a stream"),
        ({"max_records": -5}, "max_records=-5: Input should be greater than 0"),
        ({"linger_seconds": -1.0}, "linger_seconds=-1.0: Input should be greater than or equal to 0"),
        ({"linger_seconds": math.inf}, "linger_seconds=inf: Input should be a finite number"),
        ({"retry_seconds": math.inf}, "retry_seconds=inf: Input should be a finite number"),
        ({"start": {"rewind": "earliest", "seek": "2026-11-01"}}, "Give one of the two"),
        ({"start": {"rewind": "2026-11-17"}}, "Use seek for that"),
        ({"start": {"rewind": {"orders/0": "x"}}}, "'x' is no sequence of shard 'orders/0'"),
        ({"start": {"rewind": "earliest"}, "move_group": True, "on_replay": "append"}, "does not go together"),
        ({"move_group": True}, "move_group says nothing without start"),
        ({"start": {"rewind": "earliest"}, "max_batches": 3}, "max_batches=3 would leave a replay in the middle"),
    ],
    ids=repr,
)
def test_nonsense_is_refused_before_there_is_a_run(
    instance: dg.DagsterInstance, config: dict[str, Any], text: str
) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError) as refused:
        JOB.execute_in_process(instance=instance, run_config=run_config(config))
    assert text in str(refused.value)
    assert instance.get_runs_count() == 0
    with pytest.raises(dg.DagsterInvalidConfigError):
        dg.validate_run_config(JOB, run_config(config))


@pytest.mark.parametrize(
    ("config", "word"),
    [({"max_recrods": 10}, "max_recrods"), ({"start": {"sek": "2026-11-17"}}, "sek"), ({"on_replay": "put"}, "put")],
    ids=repr,
)
def test_a_wrong_key_or_name_is_explained(config: dict[str, Any], word: str) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError, match=word):
        dg.validate_run_config(JOB, run_config(config))


def test_the_job_of_a_replay_does_all_of_it() -> None:
    config = {"ops": {"replay_orders_partition": {"config": {"max_batches": 3}}}}
    with pytest.raises(dg.DagsterInvalidConfigError, match="max_batches"):
        dg.validate_run_config(DEFINITIONS.resolve_job_def("replay_orders"), config)
    moved = run_config({"start": {"rewind": "earliest"}, "move_group": True, "max_batches": 3})
    assert dg.validate_run_config(JOB, moved), "the next run continues"


@pytest.mark.parametrize(
    ("job", "op", "config", "text"),
    [
        ("replay_orders", "replay_orders_partition", {"max_records": -1}, "max_records=-1: Input should be greater"),
        ("redrive_orders", "redrive_orders_dead_letters", {"limit": 0}, "limit=0: Input should be greater than 0"),
        ("redrive_orders", "redrive_orders_dead_letters", {"start": {"seek": "x"}}, "'x' is no place in a stream"),
        (
            "redrive_orders",
            "redrive_orders_dead_letters",
            {"start": {"rewind": 9}, "stop": {"rewind": 3}},
            "would stop at 3, before its start at 9",
        ),
    ],
    ids=repr,
)
def test_nonsense_for_another_job_is_refused_there_too(job: str, op: str, config: dict[str, Any], text: str) -> None:
    definition = DEFINITIONS.resolve_job_def(job)
    taken: Any = definition.nodes[0].definition
    assert taken.pool == job, "what the op had, it has"
    assert dg.validate_run_config(definition, {"ops": {op: {"config": {"max_records": 5}}}})
    with pytest.raises(dg.DagsterInvalidConfigError) as refused:
        dg.validate_run_config(definition, {"ops": {op: {"config": config}}})
    assert text in str(refused.value)


def test_the_job_of_a_replay_has_a_partition(instance: dg.DagsterInstance) -> None:
    with pytest.raises(InvalidOptionError, match=r"replays partitions, and this run has none\. Choose one"):
        DEFINITIONS.resolve_job_def("replay_orders").execute_in_process(instance=instance)


def test_what_makes_sense_arrives(instance: dg.DagsterInstance) -> None:
    result = JOB.execute_in_process(instance=instance, run_config=run_config({"start": {"rewind": {"orders/0": 7}}}))
    (made,) = result.get_asset_materialization_events()
    assert made.materialization.metadata["start"].value == "orders/0=7"


@pytest.mark.parametrize("kind", [StreamConfig, ReplayConfig, RedriveConfig])
def test_a_run_config_overrides_what_the_asset_says(kind: type[WriterConfig]) -> None:
    given = {"limits": RunLimits(max_records=9, max_bytes=8), "errors": ErrorPolicy(on_bad_rows="dead_letter")}
    lenient = replace(orders.declared, **given)
    assert lenient.configured(kind(), None).ingestion == lenient.ingestion
    strict = lenient.configured(kind(on_bad_rows=BadRows.fail, max_records=7), None).ingestion
    assert (strict.errors.on_bad_rows, strict.limits) == (OnBadRows.FAIL, Limits(7, 8))
    assert (
        dg.validate_run_config(JOB, run_config({"on_bad_rows": "dead_letter"}))["ops"]["orders"]["config"][
            "on_bad_rows"
        ]
        == "dead_letter"
    )


def test_the_launchpad_shows_start_and_stop_and_freezes_no_settings_of_resources() -> None:
    told = dg.validate_run_config(JOB, {})
    config = told["ops"]["orders"]["config"]
    assert config["start"] == config["stop"] == {"rewind": "", "seek": ""}
    assert "spark" not in told["resources"]
    assert not any((one or {}).get("config") for one in told["resources"].values())
