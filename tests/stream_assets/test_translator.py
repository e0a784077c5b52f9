"""How streams and tables become assets, by default and as somebody wants it. No Spark."""

from __future__ import annotations

import dagster as dg
import pytest

from stream_assets import StreamTranslator, StreamTranslatorData, stream_definitions
from stream_consumers.errors import InvalidOptionError
from tests.support.dagster_runs import plain_asset


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("kafka://eu:9092/orders", "kafka://us:9092/orders"),
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
    with pytest.raises(
        InvalidOptionError, match=r"file:///eu/orders.ss/o and file:///us/orders.ss/o would be one asset"
    ):
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
