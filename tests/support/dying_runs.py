"""A job whose run kills its own process, once; a sensor asks for one run of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import dagster as dg

DIED = "TEST_HAS_DIED"


@dg.op
def die_once() -> None:
    """The second run of it goes on."""
    died = Path(os.environ[DIED])
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@dg.job(executor_def=dg.in_process_executor)
def die() -> None:
    """In the process of the run, as runs of stream assets are."""
    die_once()


@dg.sensor(job=die, minimum_interval_seconds=1, default_status=dg.DefaultSensorStatus.RUNNING)
def ask_once() -> dg.RunRequest:
    """Dagster makes one run of a key."""
    return dg.RunRequest(run_key="once")


defs = dg.Definitions(jobs=[die], sensors=[ask_once])
