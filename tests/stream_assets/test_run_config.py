"""A run config is refused before there is a run, or arrives; and the id by which a run continues its replay."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
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
from stream_assets.options import BadRows, PlaceConfig, WriterConfig
from stream_assets.stream_run import replay_id, with_replay_id
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
    ("config", "word"),
    [
        ({"start": {"seek": "2026-13-99"}}, "'2026-13-99'"),
        ({"stop": {"seek": "9999-12-31T23:59:59-12:00"}}, "'9999-12-31T23:59:59-12:00'"),
        ({"max_records": -5}, "max_records=-5"),
        ({"linger_seconds": -1.0}, "linger_seconds=-1.0"),
        ({"linger_seconds": math.inf}, "linger_seconds=inf"),
        ({"retry_seconds": math.inf}, "retry_seconds=inf"),
        ({"start": {"rewind": "earliest", "seek": "2026-11-01"}}, "seek"),
        ({"start": {"rewind": "2026-11-17"}}, "Use seek"),
        ({"start": {"rewind": {"orders/0": "x"}}}, "'x'"),
        ({"start": {"rewind": "earliest"}, "move_group": True, "on_replay": "append"}, "cannot be combined"),
        ({"move_group": True}, "move_group"),
        ({"start": {"rewind": "earliest"}, "max_batches": 3}, "max_batches=3"),
        ({"rebuild": True, "start": {"rewind": "earliest"}}, "start"),
        ({"rebuild": True, "linger_seconds": 5.0}, "linger_seconds"),
        ({"max_recrods": 10}, "max_recrods"),
        ({"start": {"sek": "2026-11-17"}}, "sek"),
        ({"on_replay": "put"}, "put"),
    ],
    ids=repr,
)
def test_nonsense_is_refused_before_there_is_a_run(config: dict[str, Any], word: str) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError) as refused:
        dg.validate_run_config(JOB, run_config(config))
    assert word in str(refused.value)


def test_a_run_that_moves_the_group_may_stop_after_some_batches() -> None:
    moved = run_config({"start": {"rewind": "earliest"}, "move_group": True, "max_batches": 3})
    assert dg.validate_run_config(JOB, moved), "the next run continues"


@pytest.mark.parametrize(
    ("job", "op", "configs"),
    [
        ("replay_orders", "replay_orders_partition", [{"max_records": -1}, {"max_batches": 3}]),
        (
            "redrive_orders",
            "redrive_orders_dead_letters",
            [
                {"limit": 0},
                {"start": {"seek": "x"}},
                {"start": {"rewind": 9}, "stop": {"rewind": 3}},
                {"on_replay": "append"},
            ],
        ),
    ],
)
def test_nonsense_for_another_job_is_refused_there_too(job: str, op: str, configs: list[dict[str, Any]]) -> None:
    definition = DEFINITIONS.resolve_job_def(job)
    taken: Any = definition.nodes[0].definition
    assert taken.pool == job, "what the op had, it has"
    assert dg.validate_run_config(definition, {"ops": {op: {"config": {"max_records": 5}}}})
    for config in configs:
        with pytest.raises(dg.DagsterInvalidConfigError):
            dg.validate_run_config(definition, {"ops": {op: {"config": config}}})


def test_the_job_of_a_replay_has_a_partition(instance: dg.DagsterInstance) -> None:
    with pytest.raises(InvalidOptionError):
        DEFINITIONS.resolve_job_def("replay_orders").execute_in_process(instance=instance)


def test_what_makes_sense_arrives_and_nonsense_makes_no_run(instance: dg.DagsterInstance) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError):
        JOB.execute_in_process(instance=instance, run_config=run_config({"max_records": -5}))
    assert instance.get_runs_count() == 0
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


ORDERS, RETURNS = dg.AssetKey(["sales", "orders"]), dg.AssetKey(["sales", "returns"])


@dg.job
def replays() -> None:
    """Of no step: only its runs are looked at."""


def start(instance: dg.DagsterInstance, status: dg.DagsterRunStatus, parent: dg.DagsterRun | None = None) -> Any:
    """The context of a run that ends so, or of one that executes its parent again."""
    of = {"parent_run_id": parent.run_id, "root_run_id": parent.run_id} if parent else {}
    return SimpleNamespace(instance=instance, run=instance.create_run_for_job(replays, status=status, **of))


def test_two_assets_of_one_run_have_replays_of_their_own(instance: dg.DagsterInstance) -> None:
    """They may have one group and one table, where replays are known by their ids."""
    context = start(instance, dg.DagsterRunStatus.STARTED)
    assert replay_id(context, ORDERS) != replay_id(context, RETURNS)
    assert replay_id(context, ORDERS) == replay_id(context, ORDERS)


def test_a_retry_continues_what_failed_and_begins_anew_what_succeeded(instance: dg.DagsterInstance) -> None:
    failed = start(instance, dg.DagsterRunStatus.FAILURE)
    retry = start(instance, dg.DagsterRunStatus.STARTED, failed.run)
    assert replay_id(retry, ORDERS) == replay_id(failed, ORDERS)
    whole = start(instance, dg.DagsterRunStatus.SUCCESS)
    assert replay_id(start(instance, dg.DagsterRunStatus.STARTED, whole.run), ORDERS) != replay_id(whole, ORDERS)


def replayed(context: Any, **config: Any) -> str:
    return with_replay_id(context, ORDERS, StreamConfig(**config).replay()).id


def test_what_is_executed_again_with_another_config_is_another_replay(instance: dg.DagsterInstance) -> None:
    first, other = PlaceConfig(rewind={"orders/0": 1}), PlaceConfig(rewind={"orders/0": 71})
    failed = start(instance, dg.DagsterRunStatus.FAILURE)
    retry = start(instance, dg.DagsterRunStatus.STARTED, failed.run)
    assert replayed(retry, start=first, max_records=5) == replayed(failed, start=first), "it only does less at a time"
    asked: list[dict[str, Any]] = [
        {"start": first},
        {"start": other},
        {"start": first, "stop": other},
        {"start": first, "on_replay": "append"},
    ]
    assert len({replayed(failed, **config) for config in asked}) == len(asked)
    moves = {replay_id(context, ORDERS, place.bound()) for context in (failed, retry) for place in (first, other)}
    assert len(moves) == 2
