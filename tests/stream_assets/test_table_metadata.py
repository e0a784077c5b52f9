"""What the page of a table says of it before and after a run: its name, where its columns and its code are from."""

from __future__ import annotations

import pytest
from pyspark.sql.types import LongType, StringType, StructField

from stream_assets.metadata import column_schema, table_metadata
from tests.support.dagster_runs import plain_asset

pytestmark = pytest.mark.dagster


def test_an_asset_that_was_never_made_names_its_table() -> None:
    orders = plain_asset(table="s3a://bucket/lake/sales/orders")
    assert orders.get_asset_spec().metadata["dagster/table_name"] == "sales.orders"


def test_a_materialization_has_the_version_and_the_place_of_the_table() -> None:
    columns = [StructField("id", LongType())]
    told = table_metadata("/lake/sales/orders", version=3, total_rows=5, columns=columns)
    assert {name: value.value for name, value in told.items() if name != "dagster/column_schema"} == {
        "delta/version": 3,
        "dagster/uri": "file:///lake/sales/orders",
        "dagster/row_count": 5,
    }


def test_the_columns_of_a_message_are_described_and_a_comment_of_the_table_counts_more() -> None:
    columns = [StructField(name, StringType()) for name in ("_stream", "_shard", "_sequence", "_timestamp", "user")]
    columns.append(StructField("_timestamp", StringType(), metadata={"comment": "by the table"}))
    *places, user, own = (column.description for column in column_schema(columns).columns)
    assert all(places)
    assert (user, own) == (None, "by the table")
