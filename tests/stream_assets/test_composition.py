"""A stream asset is an asset of Dagster's: it goes wherever one goes, and merges with whatever is there. No Spark."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from stream_assets import (
    StreamAsset,
    StreamRun,
    build_ingest_job,
    build_maintenance,
    stream_asset,
    stream_definitions,
)
from stream_consumers.errors import InvalidOptionError


def declare(name: str = "orders", **options: Any) -> StreamAsset:
    settings = {"source": "memory://composed/orders", "group": "lakehouse", "table": f"lake/{name}", "name": name}

    @stream_asset(**{**settings, **options})
    def transform(batch: Any) -> Any:
        return ["transformed", batch]

    return transform


_HOUR = timedelta(hours=1)


class Lamp(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A resource of somebody's."""

    colour: str = "red"


def test_two_calls_merge_with_each_other_and_with_a_resource_of_the_users_own() -> None:
    merged = dg.Definitions.merge(
        stream_definitions([declare("orders")]),
        stream_definitions([declare("bills")]),
        dg.Definitions(resources={"spark": Lamp()}),
    )
    dg.Definitions.validate_loadable(merged)
    graph = merged.resolve_asset_graph()
    stream = dg.AssetKey(["memory", "composed", "orders"])
    assert graph.get_all_asset_keys() == {stream, dg.AssetKey("orders"), dg.AssetKey("bills")}
    assert graph.get(stream).child_keys == {
        dg.AssetKey("orders"),
        dg.AssetKey("bills"),
    }


def test_it_is_an_asset_of_definitions_with_its_checks() -> None:
    orders = declare()
    assert isinstance(orders, dg.AssetsDefinition)
    definitions = dg.Definitions(assets=[orders])
    dg.Definitions.validate_loadable(definitions)
    keys = definitions.resolve_asset_graph().asset_check_keys
    assert {key.name for key in keys} == {"no_dead_letters", "no_gaps", "dead_letter_ratio", "schema_change"}


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


@pytest.mark.parametrize(
    "other",
    [
        report,
        declare().with_attributes(asset_key_replacements={dg.AssetKey("orders"): dg.AssetKey(["lake", "orders"])}),
        *dg.map_asset_specs(lambda spec: spec.replace_attributes(group_name="shop"), [declare()]),
    ],
    ids=["plain", "with_attributes", "map_asset_specs"],
)
def test_what_has_no_stream_is_refused_in_stream_definitions(other: Any) -> None:
    with pytest.raises(InvalidOptionError, match=r"streams\[1\] is of type .*, which has no stream.* StreamTranslator"):
        stream_definitions([declare("bills"), other])


def test_called_it_is_the_function() -> None:
    assert declare()("rows") == ["transformed", "rows"]


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
    with pytest.raises(InvalidOptionError, match=r"'orders' yields, but it takes no StreamRun.*stream: StreamRun"):

        @stream_asset(source="memory://composed/orders", group="g", table="lake/orders")
        def orders(context: Any) -> Any:
            yield None


def test_a_body_that_runs_without_a_context_is_told_what_to_write(instance: dg.DagsterInstance) -> None:
    @stream_asset(source="memory://composed/orders", group="g", table="lake/orders", checks=())
    def orders(stream: StreamRun) -> Any:
        none: Any = None
        yield from stream.run(none)

    with pytest.raises(dg.Failure, match=r"has no context of an asset\. Give the body a parameter context"):
        dg.materialize([orders], instance=instance)


@pytest.mark.parametrize("returned", [None, dg.MaterializeResult()], ids=repr)
def test_a_body_that_yields_nothing_is_told_what_to_write(instance: dg.DagsterInstance, returned: Any) -> None:
    @stream_asset(source="memory://composed/orders", group="g", table="lake/orders", checks=())
    def orders(context: Any, stream: StreamRun) -> Any:
        stream.run(context)
        return returned

    with pytest.raises(InvalidOptionError, match=r"'orders' returned .* in it: yield from stream\.run\(context\)"):
        dg.materialize([orders], instance=instance)


def test_everything_that_dagster_has_is_passed_on() -> None:
    retry, condition = dg.RetryPolicy(max_retries=3), dg.AutomationCondition.eager()
    pod = {"container_config": {"resources": {"limits": {"memory": "4Gi"}}}}
    freshness = dg.FreshnessPolicy.cron(deadline_cron="0 9 * * *", lower_bound_delta=_HOUR)

    @dg.success_hook
    def done(context: dg.HookContext) -> None:
        """Nothing."""

    orders = declare(
        automation_condition=condition,
        freshness_policy=freshness,
        retry_policy=retry,
        op_tags={"team/op": "orders"},
        pool="lake",
        kinds={"kafka"},
        metadata={"team/page": "https://example.org"},
        code_version="2",
        hooks={done},
        tags={"domain": "sales"},
        run_tags={"dagster/priority": "3", "dagster-k8s/config": pod},
    )
    spec = orders.get_asset_spec()
    assert spec.automation_condition == condition
    assert spec.freshness_policy == freshness
    assert spec.code_version == "2"
    assert spec.kinds == {"kafka"}
    assert spec.tags["domain"] == "sales"
    assert spec.metadata["team/page"] == "https://example.org"
    assert orders.op.retry_policy == retry
    assert orders.op.pool == "lake"
    assert orders.op.tags["team/op"] == "orders"
    every = dg.Definitions.merge(stream_definitions([orders], redrive_jobs=True), build_maintenance(orders))
    for name in ("ingest_orders", "replay_orders", "redrive_orders", "maintain_orders"):
        tags = every.resolve_job_def(name).run_tags
        assert (tags["dagster/priority"], json.loads(tags["dagster-k8s/config"])) == ("3", pod), name


def test_what_others_change_of_the_asset_is_changed() -> None:
    orders = declare(owners=["team:a"])
    mapped = dg.map_asset_specs(lambda spec: spec.merge_attributes(deps=["calendar"]), [orders])
    definitions = dg.Definitions(assets=mapped, jobs=[build_ingest_job(orders)])
    dg.Definitions.validate_loadable(definitions)
    parents = definitions.resolve_asset_graph().get(dg.AssetKey("orders")).parent_keys
    assert parents == {dg.AssetKey("calendar"), dg.AssetKey(["memory", "composed", "orders"])}
    job = definitions.resolve_job_def("ingest_orders")
    with pytest.raises(dg.DagsterInvalidConfigError):
        dg.validate_run_config(job, {"ops": {"orders": {"config": {"max_records": -5}}}})
