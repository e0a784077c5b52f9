"""A stream asset is an asset of Dagster's: it goes wherever one goes, and merges with whatever is there. No Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from stream_assets import OpOptions, StreamRun, build_maintenance, stream_asset, stream_definitions
from stream_consumers.errors import InvalidOptionError
from tests.support.dagster_runs import plain_asset


class Lamp(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A resource of somebody's."""

    colour: str = "red"


def test_two_calls_merge_with_each_other_and_with_a_resource_of_the_users_own() -> None:
    merged = dg.Definitions.merge(
        stream_definitions([plain_asset("orders")]),
        stream_definitions([plain_asset("bills")]),
        dg.Definitions(resources={"spark": Lamp()}),
    )
    dg.Definitions.validate_loadable(merged)
    graph = merged.resolve_asset_graph()
    stream = dg.AssetKey(["memory", "declared", "orders"])
    assert graph.get_all_asset_keys() == {stream, dg.AssetKey("orders"), dg.AssetKey("bills")}
    assert graph.get(stream).child_keys == {dg.AssetKey("orders"), dg.AssetKey("bills")}


def test_it_is_an_asset_of_definitions_with_its_checks() -> None:
    orders = plain_asset()
    assert isinstance(orders, dg.AssetsDefinition)
    definitions = dg.Definitions(assets=[orders])
    dg.Definitions.validate_loadable(definitions)
    keys = definitions.resolve_asset_graph().asset_check_keys
    assert {key.name for key in keys} == {"no_dead_letters", "no_gaps", "dead_letter_ratio"}


def test_a_folder_of_definitions_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defs = tmp_path / "composed_project" / "defs"
    defs.mkdir(parents=True)
    (tmp_path / "composed_project" / "__init__.py").touch()
    (defs / "__init__.py").touch()
    (defs / "orders.py").write_text(
        "from stream_assets import build_ingest_job, build_sensor, stream_asset\n"
        "@stream_asset(source='memory://composed/orders', group='g', table='lake/orders')\n"
        "def orders(batch):\n    return batch\n"
        "ingest_orders = build_ingest_job(orders)\n"
        "orders_lag = build_sensor(orders, ingest_orders)\n"
    )
    (tmp_path / "pyproject.toml").write_text(
        '[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "composed_project"\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = dg.load_from_defs_folder(path_within_project=defs)
    dg.Definitions.validate_loadable(found)
    assert dg.AssetKey("orders") in found.resolve_asset_graph().materializable_asset_keys
    assert [sensor.name for sensor in found.sensors or []] == ["orders_lag"]


def test_a_copy_of_dagsters_runs_what_was_declared(instance: dg.DagsterInstance) -> None:
    told: list[object] = []

    @stream_asset(source="memory://composed/orders", group="g", table="lake/orders", checks=())
    def orders(context: dg.AssetExecutionContext, stream: StreamRun) -> Any:
        told.append((context.asset_key, stream.declared.ingestion.group, stream.config.max_records))
        yield dg.MaterializeResult(metadata={"rows": 5})

    assert dg.Definitions(assets=[orders]).resolve_asset_graph()
    copied = orders.with_attributes(asset_key_replacements={orders.key: dg.AssetKey(["lake", "orders"])})
    config = {"ops": {"orders": {"config": {"max_records": 7}}}}
    result = dg.materialize([copied], instance=instance, run_config=config)
    (made,) = result.get_asset_materialization_events()
    assert made.asset_key == dg.AssetKey(["lake", "orders"])
    assert told == [(dg.AssetKey(["lake", "orders"]), "g", 7)]


@dg.asset
def report() -> None:
    """An asset without a stream."""


def test_what_has_no_stream_is_refused_in_stream_definitions() -> None:
    orders = plain_asset()
    copied = orders.with_attributes(asset_key_replacements={orders.key: dg.AssetKey(["lake", "orders"])})
    (mapped,) = dg.map_asset_specs(lambda spec: spec.replace_attributes(group_name="shop"), [orders])
    other: Any
    for other in (report, copied, mapped):
        with pytest.raises(InvalidOptionError):
            stream_definitions([plain_asset("bills"), other])


def test_a_body_and_a_transform_get_context_and_resources(instance: dg.DagsterInstance) -> None:
    @stream_asset(source="memory://composed/orders", group="g", table="lake/orders", checks=())
    def orders(context: dg.AssetExecutionContext, lamp: Lamp, stream: StreamRun) -> Any:
        context.log.info("begins")
        yield dg.MaterializeResult(metadata={"colour": lamp.colour})

    result = dg.materialize([orders], instance=instance, resources={"lamp": Lamp(colour="green")})
    (made,) = result.get_asset_materialization_events()
    assert made.materialization.metadata["colour"].value == "green"

    @stream_asset(source="memory://composed/orders", group="g", table="lake/orders")
    def bills(context: dg.AssetExecutionContext, batch: Any, lamp: Lamp) -> Any:
        return (batch, lamp)

    assert {"lamp"} <= set(bills.required_resource_keys)
    assert bills(dg.build_asset_context(), "rows", "lamp") == ("rows", "lamp")


def test_a_body_without_its_parameter_is_refused() -> None:
    with pytest.raises(InvalidOptionError):

        @stream_asset(source="memory://composed/orders", group="g", table="lake/orders")
        def orders(context: Any) -> Any:
            yield None


def test_a_body_that_runs_without_a_context_is_told_what_to_write(instance: dg.DagsterInstance) -> None:
    @stream_asset(source="memory://composed/orders", group="g", table="lake/orders", checks=())
    def orders(stream: StreamRun) -> Any:
        none: Any = None
        yield from stream.run(none)

    with pytest.raises(dg.Failure):
        dg.materialize([orders], instance=instance)


@pytest.mark.parametrize("returned", [None, dg.MaterializeResult()], ids=repr)
def test_a_body_that_yields_nothing_is_told_what_to_write(instance: dg.DagsterInstance, returned: Any) -> None:
    @stream_asset(source="memory://composed/orders", group="g", table="lake/orders", checks=())
    def orders(context: Any, stream: StreamRun) -> Any:
        stream.run(context)
        return returned

    with pytest.raises(InvalidOptionError):
        dg.materialize([orders], instance=instance)


def test_options_of_the_op_reach_the_op_and_the_runs_of_each_job() -> None:
    pod = {"container_config": {"resources": {"limits": {"memory": "4Gi"}}}}

    @dg.success_hook
    def done(context: dg.HookContext) -> None:
        """Nothing."""

    retry, run_tags = dg.RetryPolicy(max_retries=3), {"dagster/priority": "3", "dagster-k8s/config": pod}
    options = OpOptions(retry, tags={"team/op": "orders"}, pool="lake", hooks={done}, run_tags=run_tags)
    orders = plain_asset(op=options)
    assert (orders.op.retry_policy, orders.op.pool, orders.op.tags["team/op"]) == (retry, "lake", "orders")
    every = dg.Definitions.merge(stream_definitions([orders], redrive_jobs=True), build_maintenance(orders))
    for name in ("ingest_orders", "replay_orders", "redrive_orders", "maintain_orders"):
        tags = every.resolve_job_def(name).run_tags
        assert (tags["dagster/priority"], json.loads(tags["dagster-k8s/config"])) == ("3", pod), name
