"""Who vouches for a single writer says so on the asset, or on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from stream_assets import OpOptions
from stream_consumers.errors import InvalidOptionError
from tests.support.command_line import run
from tests.support.dagster_runs import plain_asset


def test_a_single_writer_has_a_pool() -> None:
    with pytest.raises(InvalidOptionError, match="pool"):
        OpOptions(single_writer=True)

    orders = plain_asset(table="s3a://lake/orders", op=OpOptions(single_writer=True, pool="orders"))
    assert orders.declared.ingestion.single_writer
    assert orders.op.pool == "orders"


@pytest.mark.spark
def test_doctor_looks_at_the_log_store_of_a_table(spark: SparkSession, folder: Path) -> None:
    refused = run("doctor", "--table", "s3a://lake/orders")
    assert refused.exit_code == 1
    assert "spark.delta.logStore.s3a.impl" in "".join(refused.output.split())
    assert run("doctor", "--table", "s3a://lake/orders", "--single-writer").exit_code == 0
    local = run("doctor", "--table", folder / "t")
    assert local.exit_code == 0
    assert "HardLinkLogStore" in local.output
