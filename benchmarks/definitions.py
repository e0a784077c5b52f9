"""The asset of :mod:`benchmarks.under_dagster`, for a real daemon."""

from __future__ import annotations

import os

import dagster as dg
from pyspark.sql import DataFrame

from benchmarks.messages import DDL
from stream_assets import Json, LagPolicy, RunLimits, stream_asset, stream_definitions


@stream_asset(
    source=os.environ.get("BENCH_SOURCE", "memory://bench/orders"),
    group="bench",
    table=os.environ.get("BENCH_TABLE", "unused"),
    decode=Json(DDL),
    limits=RunLimits(
        linger_seconds=float(os.environ.get("BENCH_LINGER_SECONDS", "0")),
        batch_seconds=float(os.environ.get("BENCH_BATCH_SECONDS", "1")),
    ),
    sensor=LagPolicy(interval_seconds=1, status=dg.DefaultSensorStatus.RUNNING),
)
def orders(batch: DataFrame) -> DataFrame:
    """Orders, unchanged."""
    return batch


defs = stream_definitions([orders])
