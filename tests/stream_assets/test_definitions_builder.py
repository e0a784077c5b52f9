"""How streams and tables become assets, and which two assets are refused. No Spark."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from stream_assets import (
    DeltaLake,
    KafkaCluster,
    LakeTable,
    StreamAsset,
    StreamTranslator,
    StreamTranslatorData,
    stream_asset,
    stream_definitions,
)
from stream_consumers.errors import InvalidOptionError
from tests.support.dagster_runs import plain_asset


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("kafka://localhost:9092/orders", "kafka://localhost:9093/orders"),
        ("redis://a/orders", "redis://b/orders"),
        ("file://a.ss/orders", "file://b.ss/orders"),
    ],
)
def test_the_streams_of_two_clusters_are_two_nodes(one: str, other: str) -> None:
    merged = dg.Definitions.merge(
        stream_definitions([plain_asset("a", source=one)]), stream_definitions([plain_asset("b", source=other)])
    )
    dg.Definitions.validate_loadable(merged)
    graph = merged.resolve_asset_graph()
    parents = [graph.get(dg.AssetKey(name)).parent_keys for name in ("a", "b")]
    assert not parents[0] & parents[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("kafka://a:9092,b:9092/orders", "kafka://b:9092,a:9092/orders"),
        ("kafka://a:9092,b:9092/orders", "kafka://a/orders"),
        ("redis://a/orders", "redis://a:6379/orders,returns"),
        ("file:///lake/orders.ss/orders", "file:///lake/orders.ss/orders,returns"),
    ],
)
def test_a_stream_is_one_node_however_its_servers_are_written(one: str, other: str) -> None:
    first, second = plain_asset("a", source=one), plain_asset("b", source=other)
    assert first.upstream["orders"] == second.upstream["orders"]
    merged = dg.Definitions.merge(stream_definitions([first]), stream_definitions([second]))
    for definitions in (merged, stream_definitions([first, second])):
        dg.Definitions.validate_loadable(definitions)
        node = definitions.resolve_asset_graph().get(first.upstream["orders"])
        assert node.child_keys == {first.key, second.key}


def test_two_streams_are_not_one_node_unless_somebody_says_so() -> None:
    files = [plain_asset("a", source="file:///eu/orders.ss/o"), plain_asset("b", source="file:///us/orders.ss/o")]
    with pytest.raises(InvalidOptionError):
        stream_definitions(files)
    both = dg.AssetSpec(["file", "orders.ss", "o"], description="Of both halls.")
    definitions = stream_definitions([*files, both])
    assert definitions.resolve_asset_graph().get(both.key).description == "Of both halls."


class Sales(StreamTranslator):
    """As somebody wants it."""

    def get_asset_spec(self, data: StreamTranslatorData) -> dg.AssetSpec:
        spec = super().get_asset_spec(data)
        return spec.replace_attributes(
            key=spec.key.with_prefix("sales"), group_name="sales", automation_condition=dg.AutomationCondition.eager()
        ).merge_attributes(tags={"domain": "sales"})

    def get_stream_spec(self, data: StreamTranslatorData, stream: str) -> dg.AssetSpec:
        return dg.AssetSpec(["events", stream], group_name="events", owners=["team:shop"])


def test_a_translator_decides() -> None:
    orders = plain_asset(
        "orders", source="kafka://a:9092/orders", translator=Sales(), spec=dg.AssetSpec("orders", tags={"kept": "yes"})
    )
    assert orders.key == dg.AssetKey(["sales", "orders"])
    assert orders.declared.job_name == "ingest_sales__orders"
    spec = orders.get_asset_spec()
    assert spec.group_name == "sales"
    assert {"domain": "sales", "kept": "yes"}.items() <= spec.tags.items()
    assert spec.automation_condition == dg.AutomationCondition.eager()
    definitions = stream_definitions([orders])
    dg.Definitions.validate_loadable(definitions)
    node = definitions.resolve_asset_graph().get(dg.AssetKey(["events", "orders"]))
    assert node.child_keys == {orders.key}
    assert node.owners == ["team:shop"]


def test_a_stream_that_somebody_describes_himself_takes_the_place_of_ours() -> None:
    orders = plain_asset("orders", source="kafka://a:9092/orders")
    mine = dg.AssetSpec(["kafka", "a", "orders"], description="What the shop sells.")
    definitions = stream_definitions([orders, mine])
    dg.Definitions.validate_loadable(definitions)
    assert definitions.resolve_asset_graph().get(mine.key).description == "What the shop sells."
    # Without the convenience nothing is declared for the stream, and everything is left to its owner.
    dg.Definitions.validate_loadable(dg.Definitions(assets=[orders, mine]))


LAKE = DeltaLake(root=dg.EnvVar("LAKE"))


def declare(name: str, source: Any, table: Any = "lake/all", **options: Any) -> StreamAsset:
    given = {"source": source, "group": "g", "table": table, "spec": dg.AssetSpec(name), **options}
    return stream_asset(**given)(lambda rows: rows)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("kafka://eu:9092/orders", "kafka://us:9092/orders,returns"),
        ("redis://a/orders", "redis://b/orders"),
        ("redis://a/orders", "kafka://a/orders"),
        ("file:///lake/eu.ss/orders", "file:///lake/us.ss/orders"),
        (
            KafkaCluster(bootstrap_servers=dg.EnvVar("EU")).stream("orders"),
            KafkaCluster(bootstrap_servers=dg.EnvVar("US")).stream("orders"),
        ),
    ],
)
@pytest.mark.parametrize("table", ["lake/all", LAKE.table("all")], ids=["path", "lake"])
def test_streams_of_one_key_at_two_places_need_two_tables(one: Any, other: Any, table: Any) -> None:
    with pytest.raises(InvalidOptionError):
        stream_definitions([declare("a", one, table), declare("b", other, table, group="h")])
    assert stream_definitions([declare("a", one, table), declare("b", other, "lake/b")])


@pytest.mark.parametrize("table", ["lake/all", LAKE.table("all")], ids=["path", "lake"])
def test_several_assets_may_write_one_table_each_stream_once(table: Any) -> None:
    one = declare("orders", "kafka://a:9092,b:9092/orders", table)
    for other in ("kafka://a:9092/returns", "kafka://b:9092/returns"):
        assert stream_definitions([one, declare("others", other, table)])
    with pytest.raises(InvalidOptionError):
        stream_definitions([one, declare("others", "kafka://b:9092,a:9092/returns,orders", table)])


def test_one_table_is_found_however_it_is_written() -> None:
    one, other = "kafka://eu:9092/orders", "kafka://us:9092/orders"
    for path in ("./lake/all", "lake/all/"):
        with pytest.raises(InvalidOptionError):
            stream_definitions([declare("a", one), declare("b", other, path)])


def test_two_keys_that_stand_for_one_table_of_a_lake_are_refused() -> None:
    eu = declare("o", "kafka://a:9092/eu", LAKE, spec=dg.AssetSpec(["eu", "sales", "o"]))
    us = declare("o", "kafka://a:9092/us", LAKE, spec=dg.AssetSpec(["us", "sales", "o"]))
    with pytest.raises(InvalidOptionError):
        stream_definitions([eu, us])
    said = declare("o", "kafka://a:9092/us", LAKE.table("o", schema="sales"), spec=dg.AssetSpec(["us", "sales", "o"]))
    assert stream_definitions([eu, said])


@pytest.mark.parametrize(
    "tables",
    [("lake/o", "lake/o_dead_letters"), (LAKE, LAKE), ("s3://lake/o", "s3a://lake/o_dead_letters")],
    ids=["path", "lake", "schemes"],
)
def test_the_table_of_the_dead_letters_of_another_asset_is_refused(tables: tuple[Any, Any]) -> None:
    one = declare("o", "kafka://a:9092/o", tables[0])
    other = declare("o_dead_letters", "kafka://a:9092/o_dead_letters", tables[1])
    for assets in ([one, other], [other, one]):
        with pytest.raises(InvalidOptionError):
            stream_definitions(assets)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("lake/sales", DeltaLake(root="lake").table("o", schema="sales")),
        ("lake/o", "lake/o_dead_letters/o"),
        ("s3a://bucket/lake", "s3a://bucket/lake/sales/o"),
        (LakeTable(dg.EnvVar("T_LAKE"), ("sales",)), LakeTable(dg.EnvVar("T_LAKE"), ("sales", "o"))),
    ],
    ids=["lake", "dead letters", "bucket", "variable"],
)
def test_a_table_in_the_folder_of_another_asset_is_refused(outer: Any, inner: Any) -> None:
    assets = [declare("a", "kafka://a:9092/a", outer), declare("b", "kafka://a:9092/b", inner)]
    for given in (assets, assets[::-1]):
        with pytest.raises(InvalidOptionError):
            stream_definitions(given)
    assert stream_definitions([assets[0], declare("b", "kafka://a:9092/b", "lake/sales_of_b")])


@pytest.mark.parametrize("server", ["kafka://a:9092", "redis://a:6379"])
def test_members_of_one_group_share_messages_so_that_two_tables_need_two_groups(server: str) -> None:
    one = declare("a", f"{server}/orders", "lake/a", mode="load_balanced")
    other = f"{server}/orders,returns"
    with pytest.raises(InvalidOptionError):
        stream_definitions([one, declare("b", other, "lake/b", mode="load_balanced")])
    assert stream_definitions([one, declare("b", other, "lake/b", mode="load_balanced", group="h")])
    assert stream_definitions([one, declare("b", f"{server}/returns", "lake/b", mode="load_balanced")])
    assert stream_definitions([one, declare("b", "redis://b:1/orders", "lake/b", mode="load_balanced")])
    assert stream_definitions([one, declare("b", other, "lake/b")])
