"""What an asset is declared with is checked when code is loaded, and it goes wherever one of Dagster's goes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from sensors.lag_sensor import LagPolicy
from spark_jobs.run_policy import STALE_RUN_SECONDS
from stream_assets import (
    NO_GAPS,
    ErrorPolicy,
    Json,
    KafkaCluster,
    OpOptions,
    RunLimits,
    SparkSessionResource,
    StreamRun,
    StreamTranslator,
    build_maintenance,
    build_replay_job,
    stream_asset,
    stream_definitions,
)
from stream_consumers.errors import InvalidOptionError, InvalidUrlError
from tests.support.dagster_runs import plain_asset

OBJECTS: Mapping[str, tuple[str, Any]] = {
    "max_records": ("limits", RunLimits),
    "linger_seconds": ("limits", RunLimits),
    "materialize_seconds": ("limits", RunLimits),
    "batch_seconds": ("limits", RunLimits),
    "max_runs": ("sensor", LagPolicy),
    "min_lag": ("sensor", LagPolicy),
    "max_wait_seconds": ("sensor", LagPolicy),
    "interval_seconds": ("sensor", LagPolicy),
    "status": ("sensor", LagPolicy),
    "on_data_loss": ("errors", ErrorPolicy),
    "on_bad_rows": ("errors", ErrorPolicy),
    "schema_changes": ("errors", ErrorPolicy),
    "dead_letter_payloads": ("errors", ErrorPolicy),
    "single_writer": ("op", OpOptions),
    "pool": ("op", OpOptions),
    "partitions_def": ("spec", lambda **options: dg.AssetSpec("orders", **options)),
}
NONSENSE: Mapping[str, tuple[object, ...]] = {
    "max_records": (0, "5", True, math.nan),
    "linger_seconds": (-1, "60", True, math.nan, math.inf),
    "materialize_seconds": (-1, "60", True, math.nan, math.inf),
    "batch_seconds": (-1, "60", True, math.nan, math.inf),
    "max_runs": (0, -1, 1.5, "2", True, None, math.inf),
    "min_lag": (-1, 1.5, "5", True, None, math.nan),
    "max_wait_seconds": (-1, "60", True, None, math.nan, math.inf),
    "interval_seconds": (0, -30, 0.5, "30", True, None),
    "status": ("on", "", None),
    "on_data_loss": ("skip", "", None),
    "on_bad_rows": ("skip", "", None),
    "schema_changes": ("add", "", True, None),
    "dead_letter_payloads": ("yes", "", 0, 1, None),
    "single_writer": ("false", "", 0, 1, None),
    "pool": ("",),
    "partitions_def": (dg.StaticPartitionsDefinition(["a"]),),
    "errors": ("fail", None),
    "limits": (100, None),
    "layout": ({"partition_by": ["day"]}, None),
    "sensor": ({"min_lag": 5}, None),
    "spec": ("orders",),
    "op": ("lake", None),
    "group": ("", " ", "a/b", 5),
    "table": (
        "",
        " ",
        None,
        5,
        "/lake/a%20b",
        "/lake/a\nb",
        "/lake/a\\b",
        "~/lake/a",
        "hdfs:/lake/a",
        "s3a:/b/a",
        "dbfs:/a",
    ),
    "checks": ("no_gaps", NO_GAPS, None, ["no_gaps"]),
    "spark": (SparkSessionResource,),
    "translator": (StreamTranslator,),
}


@pytest.mark.parametrize("option", NONSENSE)
def test_nonsense_is_refused_with_the_option_and_the_value(option: str) -> None:
    name, make = OBJECTS.get(option, (option, None))
    for value in NONSENSE[option]:
        with pytest.raises(InvalidOptionError) as refused:
            plain_asset(**{name: make(**{option: value}) if make else value})
        assert f"{option}={value!r}" in str(refused.value)
        assert refused.value.remedy


@pytest.mark.parametrize(
    "make",
    [
        lambda: build_replay_job(plain_asset(), dg.StaticPartitionsDefinition(["a"])),  # type: ignore[arg-type]
        *(lambda decode=decode: plain_asset(decode=decode) for decode in ("json", Json, "", 5)),
        *(lambda schema=schema: Json(schema) for schema in ("", " ", 5)),
        *(
            lambda names=names: KafkaCluster(bootstrap_servers="a:9092").stream(*names)
            for names in (("",), ("a", None))
        ),
        *(lambda wrong=wrong: RunLimits(**wrong) for wrong in ({"max_recrods": 5}, {"linger": 5})),
        # A function without a name needs one.
        lambda: stream_asset(source="memory://declared/orders", table="t", group="g")(lambda batch: batch),
        # Several runs are not one writer, and a single writer has a pool.
        lambda: plain_asset(
            source="kafka://localhost:9092/orders",
            mode="load_balanced",
            sensor=LagPolicy(max_runs=2),
            op=OpOptions(single_writer=True, pool="orders"),
        ),
        lambda: OpOptions(single_writer=True),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidOptionError):
        make()


@pytest.mark.parametrize("source", [None, 5, b"memory://declared/orders"], ids=repr)
def test_a_source_is_text(source: object) -> None:
    with pytest.raises(InvalidUrlError):
        plain_asset(source=source)


@pytest.mark.parametrize(
    "name", ["budget_seconds", "answer_seconds", "retry_seconds", "after_cancel_seconds", "stale_run_seconds"]
)
def test_the_times_of_a_policy_are_numbers(name: str) -> None:
    for seconds in (-1, "5", math.nan):
        with pytest.raises(InvalidOptionError, match=f"{name}="):
            LagPolicy(**{name: seconds})


def test_a_run_that_stays_is_not_stale_and_waits_for_messages() -> None:
    source = {"source": "kafka://localhost:9092/orders", "mode": "load_balanced", "limits": RunLimits(linger_seconds=9)}
    usual = plain_asset(**source, sensor=LagPolicy(max_runs=4)).declared.policy
    assert (usual.max_runs, usual.keeps_alive, usual.stale_run_seconds) == (4, True, STALE_RUN_SECONDS + 9)
    own = plain_asset(**source, sensor=LagPolicy(stale_run_seconds=60, retry_seconds=5)).declared.policy
    assert (own.max_runs, own.keeps_alive, own.stale_run_seconds, own.retry_seconds) == (1, True, 60, 5)
    with pytest.raises(InvalidOptionError):
        plain_asset(**source, sensor=LagPolicy(min_lag=5))


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
