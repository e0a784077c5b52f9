"""A DAG that is scheduled by the messages of a stream; environment variables name the stream and the table."""

from __future__ import annotations

import os

from airflow.sdk import Asset, AssetWatcher

from spark_jobs.session import SparkOptions
from stream_airflow import IngestOperator, Json, StreamLagTrigger
from tests.support.airflow_dags.runs import DAG
from tests.support.settings import SMALL

STREAM = {"source": os.environ["TEST_STREAM"], "table": os.environ["TEST_TABLE"], "group": "lakehouse"}
messages = Asset(
    "messages", watchers=[AssetWatcher(name="lag", trigger=StreamLagTrigger(**STREAM, interval_seconds=1.0))]
)
orders = Asset("orders")

with DAG("orders", schedule=[messages], catchup=False, max_active_runs=1) as dag:
    IngestOperator(
        task_id="ingest",
        **STREAM,
        decode=Json("id BIGINT, user STRING"),
        spark=SparkOptions(master="local[2]", config=SMALL),
        outlets=[orders],
    )
