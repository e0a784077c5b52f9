"""A DAG by days with each operator; environment variables name the stream and the table."""

from __future__ import annotations

import os

from airflow.sdk import Asset

try:
    from airflow.sdk import CronDataIntervalTimetable
except ImportError:
    from airflow.timetables.interval import CronDataIntervalTimetable

from spark_jobs.session import SparkOptions
from stream_airflow import IngestOperator, Json, RebuildOperator, RedriveOperator, ReplayOperator, VerifyOperator
from tests.support.airflow_dags.runs import DAG
from tests.support.settings import SMALL

STREAM = {
    "source": os.environ["TEST_STREAM"],
    "table": os.environ["TEST_TABLE"],
    "group": "lakehouse",
    "decode": Json("id BIGINT, user STRING"),
    "spark": SparkOptions(master="local[2]", config=SMALL),
}

with DAG("tables", schedule=CronDataIntervalTimetable("@daily", timezone="UTC"), catchup=False) as dag:
    (
        IngestOperator(task_id="ingest", **STREAM)
        >> ReplayOperator(task_id="replay", **STREAM, outlets=[Asset("replayed")])
        >> RedriveOperator(task_id="preview", **STREAM, only_preview=True)
        >> RedriveOperator(task_id="redrive", **STREAM)
        >> RebuildOperator(task_id="rebuild", **STREAM)
        >> VerifyOperator(task_id="verify", **STREAM)
    )

with DAG("missing") as missing:
    IngestOperator(
        task_id="ingest",
        **{**STREAM, "source": "file:///there-is-no-{{ dag.dag_id }}.ss/orders"},
        retries=3,
    )
