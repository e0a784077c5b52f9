"""A DAG for each stream of an environment variable, scheduled by the messages of the stream."""

from __future__ import annotations

import json
import os
from datetime import timedelta

from airflow.sdk import DAG, Asset, AssetWatcher

from spark_jobs.session import SparkOptions
from stream_airflow import IngestOperator, Json, StreamLagTrigger
from stream_consumers.options import Limits
from tests.support.settings import SMALL

for name, (source, table) in json.loads(os.environ["TEST_STREAMS"]).items():
    stream = {"source": source, "table": table, "group": "lakehouse"}
    trigger = StreamLagTrigger(**stream, interval_seconds=1.0, patience_seconds=60.0)
    with DAG(name, schedule=[Asset(f"{name}-messages", watchers=[AssetWatcher("lag", trigger)])], max_active_runs=1):
        IngestOperator(
            task_id="ingest",
            **stream,
            decode=Json("id BIGINT, user STRING"),
            limits=Limits(max_records=100),
            spark=SparkOptions(master="local[2]", config=SMALL),
            outlets=[Asset(name)],
            retries=10,
            retry_delay=timedelta(seconds=1),
        )
