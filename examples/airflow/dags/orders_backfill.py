"""The days of a backfill again: each run replaces the rows of the messages of its data interval."""

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

from airflow.sdk import DAG, Asset
from airflow.timetables.interval import CronDataIntervalTimetable
from pyspark.sql import DataFrame

from stream_airflow import Json, ReplayOperator

SHOP = os.environ.get("SHOP") or str(Path(__file__).parents[3] / ".demo" / "airflow")


def corrected_orders(batch: DataFrame) -> DataFrame:
    """Return the orders as they should have been written."""
    return batch.where("amount >= 0").selectExpr("* EXCEPT (user)", "upper(user) AS user")


with DAG(
    "orders_backfill",
    schedule=CronDataIntervalTimetable("@daily", timezone="UTC"),
    start_date=datetime(2026, 1, 1, tzinfo=timezone.utc),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 3, "retry_delay": timedelta(seconds=5)},
) as dag:
    ReplayOperator(
        task_id="replay",
        source=f"file://{SHOP}/orders.ss/orders",
        group="lakehouse",
        table=f"{SHOP}/lake/orders",
        decode=Json("id BIGINT, user STRING, amount DECIMAL(10,2)"),
        transform=corrected_orders,
        outlets=[Asset("orders")],
    )
