"""Definitions for a daemon whose runs wait, without Spark, until somebody ends them: a stream asset, and a job with a
name of the user's own that makes it, too."""

from __future__ import annotations

import os
import time
from pathlib import Path

import dagster as dg

from stream_assets import LagPolicy, stream_definitions
from tests.support.dagster_runs import declare

FOLDER_VARIABLE = "WAITING_JOBS_FOLDER"


class Waits:
    """In place of Spark."""

    @property
    def spark_session(self) -> None:
        """Never comes."""
        while True:
            time.sleep(0.1)


stream = declare(
    Path(os.environ.get(FOLDER_VARIABLE, "unused")),
    spark=Waits(),
    sensor=LagPolicy(interval_seconds=1, status=dg.DefaultSensorStatus.RUNNING),
)
defs = dg.Definitions.merge(
    stream_definitions([stream]),
    dg.Definitions(jobs=[dg.define_asset_job("nightly", selection=[stream.key], executor_def=dg.in_process_executor)]),
)
