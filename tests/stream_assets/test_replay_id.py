"""By which id a run continues its replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from stream_assets.options import PlaceConfig, StreamConfig
from stream_assets.stream_run import of_run, replay_id

pytestmark = pytest.mark.dagster
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
    return of_run(context, ORDERS, StreamConfig(**config).replay()).id


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
