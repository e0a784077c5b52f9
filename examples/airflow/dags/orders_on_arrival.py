"""Orders into a Delta table as they arrive: messages that are unread schedule the DAG."""

import os
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, Asset, AssetWatcher
from pyspark.sql import DataFrame

from stream_airflow import IngestOperator, Json, Limits, StreamLagTrigger

SHOP = os.environ.get("SHOP") or str(Path(__file__).parents[3] / ".demo" / "airflow")
STREAM = {"source": f"file://{SHOP}/orders.ss/orders", "group": "lakehouse", "table": f"{SHOP}/lake/orders"}

order_messages = Asset("order_messages", watchers=[AssetWatcher(name="lag", trigger=StreamLagTrigger(**STREAM))])


def valid_orders(batch: DataFrame) -> DataFrame:
    """Return the orders without negative amounts."""
    return batch.where("amount >= 0")


with DAG(
    "orders_on_arrival",
    schedule=[order_messages],
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 3, "retry_delay": timedelta(seconds=5)},
) as dag:
    IngestOperator(
        task_id="ingest",
        **STREAM,
        decode=Json("id BIGINT, user STRING, amount DECIMAL(10,2)"),
        transform=valid_orders,
        limits=Limits(max_records=25_000),
        outlets=[Asset("orders")],
    )
