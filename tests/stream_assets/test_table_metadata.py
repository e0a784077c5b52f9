"""What the page of a table says of it before and after a run: its name, where its columns and its code are from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql.types import LongType, StringType, StructField

from stream_assets import Json, StreamAsset, StreamRun, stream_asset
from stream_assets.metadata import code_references, column_schema, lineage_of_columns, table_metadata

pytestmark = pytest.mark.dagster


def declare(**options: Any) -> StreamAsset:
    @stream_asset(
        source="memory://described/orders,returns",
        group="g",
        table="s3a://bucket/lake/sales/orders",
        decode=Json("id BIGINT, user STRUCT<name: STRING, age: INT>", key="k"),
        **options,
    )
    def orders(batch: Any) -> Any:
        return batch

    return orders


def lineage(metadata: Any) -> dict[str, list[tuple[str, str]]]:
    found = metadata["dagster/column_lineage"].column_lineage.deps_by_column
    return {name: [(dep.asset_key.path[-1], dep.column_name) for dep in deps] for name, deps in found.items()}


def test_an_asset_that_was_never_made_says_where_its_table_and_its_code_are() -> None:
    metadata = declare().get_asset_spec().metadata
    assert metadata["dagster/table_name"].value == "sales.orders"
    (place,) = metadata["dagster/code_references"].code_references
    assert Path(place.file_path) == Path(__file__)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert lines[place.line_number - 1].strip() == "@stream_asset("


def test_each_column_of_a_message_comes_from_both_streams() -> None:
    found = lineage(declare().get_asset_spec().metadata)
    assert found["id"] == [("orders", "id"), ("returns", "id")]
    assert found["k"] == [("orders", "key"), ("returns", "key")]
    assert list(found) == ["id", "user", "k", "_stream", "_shard", "_sequence", "_timestamp"]


def test_a_materialization_has_the_lineage_of_the_columns_that_are_there() -> None:
    columns = [StructField("id", LongType()), StructField("of_the_transform", StringType())]
    declared = declare().get_asset_spec().metadata
    assert list(lineage(lineage_of_columns(declared, columns))) == ["id"]
    assert lineage_of_columns(declared, None) == {}
    told = table_metadata("/lake/sales/orders", version=3, total_rows=5, columns=columns)
    assert {name: value.value for name, value in told.items() if name != "dagster/column_schema"} == {
        "delta/version": 3,
        "dagster/uri": "file:///lake/sales/orders",
        "dagster/row_count": 5,
    }


def test_what_somebody_says_of_the_asset_stands() -> None:
    metadata = declare(metadata={"dagster/table_name": "main.sales.orders"}).get_asset_spec().metadata
    assert metadata["dagster/table_name"] == "main.sales.orders"


def test_the_references_can_be_made_links_to_a_repository() -> None:
    with pytest.warns(dg.BetaWarning):
        (linked,) = dg.link_code_references_to_git(
            [declare()],
            git_url="https://github.com/somebody/lake",
            git_branch="main",
            file_path_mapping=dg.AnchorBasedFilePathMapping(Path(__file__), "tests/orders.py"),
        )
    assert isinstance(linked, dg.AssetsDefinition)
    (spec,) = linked.specs
    (place,) = spec.metadata["dagster/code_references"].code_references
    assert place.url.startswith("https://github.com/somebody/lake/tree/main/tests/orders.py#L")


def test_a_body_has_a_reference_and_what_is_not_of_a_file_has_none() -> None:
    @stream_asset(source="memory://described/orders", group="g", table="lake/orders")
    def orders(context: dg.AssetExecutionContext, stream: StreamRun) -> Any:
        yield from stream.run(context)

    assert "dagster/code_references" in orders.get_asset_spec().metadata
    assert code_references(len) == {}


def test_the_columns_of_a_message_are_described_and_a_comment_of_the_table_counts_more() -> None:
    columns = [StructField(name, StringType()) for name in ("_stream", "_shard", "_sequence", "_timestamp", "user")]
    columns.append(StructField("_timestamp", StringType(), metadata={"comment": "by the table"}))
    *places, user, own = (column.description for column in column_schema(columns).columns)
    assert all(places)
    assert (user, own) == (None, "by the table")
