"""Two assets that would take messages from each other, or mix their rows by accident, are refused as code is loaded."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from stream_assets import DeltaLake, KafkaCluster, StreamAsset, stream_asset, stream_definitions
from stream_consumers.errors import InvalidOptionError

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
    with pytest.raises(
        InvalidOptionError, match=r"assets a and b write orders of .* tells streams apart by their keys"
    ):
        stream_definitions([declare("a", one, table), declare("b", other, table, group="h")])
    assert stream_definitions([declare("a", one, table), declare("b", other, "lake/b")])


@pytest.mark.parametrize("table", ["lake/all", LAKE.table("all")], ids=["path", "lake"])
@pytest.mark.parametrize("other", ["kafka://a:9092/returns", "kafka://b:9092/returns"])
def test_several_assets_may_write_one_table(other: str, table: Any) -> None:
    one = declare("orders", "kafka://a:9092,b:9092/orders", table)
    assert stream_definitions([one, declare("others", other, table)])


@pytest.mark.parametrize("table", ["lake/all", LAKE.table("all")], ids=["path", "lake"])
def test_one_stream_goes_into_one_table_once(table: Any) -> None:
    one = declare("orders", "kafka://a:9092,b:9092/orders", table)
    other = declare("others", "kafka://b:9092,a:9092/returns,orders", table)
    with pytest.raises(InvalidOptionError, match=r"assets orders and others write orders into one table.* group 'g'"):
        stream_definitions([one, other])


def test_one_table_is_found_however_it_is_written() -> None:
    one, other = "kafka://eu:9092/orders", "kafka://us:9092/orders"
    for path in ("./lake/all", "lake/all/"):
        with pytest.raises(InvalidOptionError, match="into one table"):
            stream_definitions([declare("a", one), declare("b", other, path)])


def test_two_keys_that_stand_for_one_table_of_a_lake_are_refused() -> None:
    eu = declare("o", "kafka://a:9092/eu", LAKE, spec=dg.AssetSpec(["eu", "sales", "o"]))
    us = declare("o", "kafka://a:9092/us", LAKE, spec=dg.AssetSpec(["us", "sales", "o"]))
    with pytest.raises(InvalidOptionError, match=r"eu/sales/o and us/sales/o stand for .* \{LAKE\}/sales/o"):
        stream_definitions([eu, us])
    said = declare("o", "kafka://a:9092/us", LAKE.table("o", schema="sales"), spec=dg.AssetSpec(["us", "sales", "o"]))
    assert stream_definitions([eu, said])


@pytest.mark.parametrize("tables", [("lake/o", "lake/o_dead_letters"), (LAKE, LAKE)], ids=["path", "lake"])
def test_the_table_of_the_dead_letters_of_another_asset_is_refused(tables: tuple[Any, Any]) -> None:
    one = declare("o", "kafka://a:9092/o", tables[0])
    other = declare("o_dead_letters", "kafka://a:9092/o_dead_letters", tables[1])
    for assets in ([one, other], [other, one]):
        with pytest.raises(InvalidOptionError, match=r"table of o_dead_letters, is where the dead letters of o go"):
            stream_definitions(assets)


@pytest.mark.parametrize("server", ["kafka://a:9092", "redis://a:6379"])
def test_members_of_one_group_share_messages_so_that_two_tables_need_two_groups(server: str) -> None:
    one = declare("a", f"{server}/orders", "lake/a", mode="load_balanced")
    other = f"{server}/orders,returns"
    with pytest.raises(InvalidOptionError, match=r"a and b share group 'g' of orders, so that each of their tables"):
        stream_definitions([one, declare("b", other, "lake/b", mode="load_balanced")])
    assert stream_definitions([one, declare("b", other, "lake/b", mode="load_balanced", group="h")])
    assert stream_definitions([one, declare("b", f"{server}/returns", "lake/b", mode="load_balanced")])
    assert stream_definitions([one, declare("b", "redis://b:1/orders", "lake/b", mode="load_balanced")])
    assert stream_definitions([one, declare("b", other, "lake/b")])
