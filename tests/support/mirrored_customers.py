"""Definitions for a daemon: a table that is kept equal to one of a database, by runs of which some are killed."""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg
from pyspark.sql import DataFrame

from stream_assets import (
    Debezium,
    LagPolicy,
    OpOptions,
    RunLimits,
    SparkSessionResource,
    StreamAsset,
    stream_asset,
    stream_definitions,
)
from stream_assets.testing import KillSwitch
from tests.support.customers import COLUMNS

URL_VARIABLE = "MIRRORED_CUSTOMERS_URL"
TABLE_VARIABLE = "MIRRORED_CUSTOMERS_TABLE"
# The address of the Spark Connect server that the runs use.
REMOTE_VARIABLE = "MIRRORED_CUSTOMERS_REMOTE"


def declare_mirror(url: str, table: str, remote: str) -> StreamAsset:
    """The asset ``customers``, whose runs kill themselves at the steps of ``STREAM_ASSETS_KILLS``."""
    switch = KillSwitch.from_environment(table=table, memory=Path(table).with_name("faults"))

    @stream_asset(
        source=url,
        group="mirror",
        table=table,
        decode=Debezium(COLUMNS),
        keys=["id"],
        limits=RunLimits(max_records=1000),
        spark=SparkSessionResource(remote=remote),
        op=OpOptions(observer=switch),
        sensor=LagPolicy(interval_seconds=1, retry_seconds=1, status=dg.DefaultSensorStatus.RUNNING),
    )
    def customers(changes: DataFrame) -> DataFrame:
        """What SELECT * FROM customers returns."""
        return changes

    return customers


if URL_VARIABLE in os.environ:
    mirror = declare_mirror(*(os.environ[name] for name in (URL_VARIABLE, TABLE_VARIABLE, REMOTE_VARIABLE)))
    defs = stream_definitions([mirror], rebuild_jobs=True)
