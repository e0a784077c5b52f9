"""Definitions for a daemon whose runs stay for an hour, unless somebody ends them."""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg

from stream_assets import LagPolicy, RunLimits, SparkSessionResource, stream_definitions
from tests.support.dagster_runs import declare
from tests.support.settings import SMALL

FOLDER_VARIABLE = "STAYING_RUNS_FOLDER"
stream = declare(
    Path(os.environ.get(FOLDER_VARIABLE, "unused")),
    spark=SparkSessionResource(master="local[1]", spark_config=SMALL),
    sensor=LagPolicy(interval_seconds=1, status=dg.DefaultSensorStatus.RUNNING),
    limits=RunLimits(linger_seconds=3600.0, materialize_seconds=3600.0),
)
defs = stream_definitions([stream])
