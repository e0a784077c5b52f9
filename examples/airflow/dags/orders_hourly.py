"""Orders into a Delta table each hour, and then the comparison of the table with the stream."""

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

from airflow.sdk import DAG, Asset

from stream_airflow import IngestOperator, Json, VerifyOperator

SHOP = os.environ.get("SHOP") or str(Path(__file__).parents[3] / ".demo" / "airflow")
# Another group has positions of its own.
STREAM = {"source": f"file://{SHOP}/orders.ss/orders", "group": "hourly", "table": f"{SHOP}/lake/orders_hourly"}

with DAG(
    "orders_hourly",
    schedule="@hourly",
    start_date=datetime(2026, 1, 1, tzinfo=timezone.utc),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 3, "retry_delay": timedelta(seconds=5)},
) as dag:
    ingest = IngestOperator(
        task_id="ingest",
        **STREAM,
        decode=Json("id BIGINT, user STRING, amount DECIMAL(10,2)"),
        outlets=[Asset("orders_hourly")],
    )
    ingest >> VerifyOperator(task_id="verify", **STREAM)
