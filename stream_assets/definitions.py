"""The asset of ``make demo`` and ``make dev``, which ``workspace.yaml`` loads."""

import os
from pathlib import Path

import dagster as dg
from pyspark.sql import DataFrame

from stream_assets import Json, LagPolicy, OpOptions, RunLimits, SparkSessionResource, stream_asset, stream_definitions
from stream_assets.testing import KillSwitch

DEMO_FOLDER = Path(os.environ.get("STREAM_ASSETS_DEMO") or Path.cwd() / ".demo").absolute()
TABLE = str(DEMO_FOLDER / "lake" / "orders")


# Runs of the demo take seconds: they are faster without the optimizing compiler, and need the server only briefly.
FAST_RUN = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.stream_assets.server.idleSeconds": "120",
}


@stream_asset(
    source=f"file://{DEMO_FOLDER}/orders.ss/orders",
    group="demo",
    table=TABLE,
    decode=Json("id BIGINT, user STRING, amount DECIMAL(10,2)"),
    limits=RunLimits(max_records=int(os.environ.get("STREAM_ASSETS_DEMO_RECORDS", "25000"))),
    sensor=LagPolicy(interval_seconds=5, status=dg.DefaultSensorStatus.RUNNING),
    spark=SparkSessionResource(master="local[2]", spark_config=FAST_RUN),
    op=OpOptions(observer=KillSwitch.from_environment(table=TABLE, memory=DEMO_FOLDER / "faults")),
)
def orders(batch: DataFrame) -> DataFrame:
    """Ingest orders from a stream file."""
    return batch


defs = stream_definitions([orders])
