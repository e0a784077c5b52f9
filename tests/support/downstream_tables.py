"""Definitions for a daemon: two streams, and what is made of their tables when these change.

``totals`` is made of ``orders``, ``revenue`` of ``payments``, day by day, and ``all_payments`` of all days.
"""

from __future__ import annotations

import os
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import dagster as dg

from stream_assets import LagPolicy, RunLimits, SparkSessionResource, StreamAsset, stream_definitions
from stream_consumers.create import create_producer
from tests.support.dagster_runs import declare
from tests.support.settings import SMALL

FOLDER_VARIABLE = "DOWNSTREAM_TABLES_FOLDER"
# The day of the test, also for processes that Dagster starts after midnight.
DAY_VARIABLE = "DOWNSTREAM_TABLES_DAY"
PER_DAY = 30
TODAY = date.fromisoformat(os.environ.get(DAY_VARIABLE) or datetime.now(timezone.utc).date().isoformat())
KEYS = [(TODAY - timedelta(days=back)).isoformat() for back in (2, 1, 0)]
DAYS = dg.DailyPartitionsDefinition(KEYS[0], end_offset=1)
# Half of the messages of a day, so that a run has several batches, and a replay, too.
RECORDS = PER_DAY // 2


def write_days(folder: Path, name: str, keys: list[str]) -> None:
    """A stream with so many messages of each of these days."""
    with create_producer(f"file://{folder}/{name}.ss/{name}") as producer:
        for key in keys:
            midnight = int(datetime.fromisoformat(key).replace(tzinfo=timezone.utc).timestamp() * 1000)
            for index in range(PER_DAY):
                producer.send(b'{"id": %d, "user": "u"}' % index, timestamp_ms=midnight + index)


def declare_table(folder: Path, name: str, partitions: dg.DailyPartitionsDefinition | None) -> StreamAsset:
    return declare(
        folder,
        source=f"file://{folder}/{name}.ss/{name}",
        table=str(folder / "lake" / name),
        spark=SparkSessionResource(master="local[1]", spark_config=SMALL),
        spec=dg.AssetSpec(name, partitions_def=partitions),
        limits=RunLimits(max_records=RECORDS),
        sensor=LagPolicy(interval_seconds=1, status=dg.DefaultSensorStatus.RUNNING),
    )


@dg.asset(deps=["orders"], automation_condition=dg.AutomationCondition.eager())
def totals() -> None:
    """Of all orders."""


@dg.asset(
    deps=["payments"],
    partitions_def=DAYS,
    automation_condition=dg.AutomationCondition.eager().without(dg.AutomationCondition.in_latest_time_window()),
)
def revenue() -> None:
    """Of each day."""


@dg.asset(
    deps=["payments"],
    automation_condition=dg.AutomationCondition.eager().without(~dg.AutomationCondition.any_deps_missing()),
)
def all_payments() -> None:
    """Of all days."""


if FOLDER_VARIABLE in os.environ:
    where = Path(os.environ[FOLDER_VARIABLE])
    streams = [declare_table(where, "orders", None), declare_table(where, "payments", DAYS)]
    automation = dg.AutomationConditionSensorDefinition(
        "automation",
        target=dg.AssetSelection.assets(totals, revenue, all_payments),
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=1,
    )
    defs = dg.Definitions.merge(
        stream_definitions(streams),
        dg.Definitions([totals, revenue, all_payments], sensors=[automation], executor=dg.in_process_executor),
    )
