"""A DAG by days with each operator; environment variables name the stream and the table."""

from __future__ import annotations

import os

from airflow.sdk import Asset

try:
    from airflow.sdk import CronDataIntervalTimetable
except ImportError:
    from airflow.timetables.interval import CronDataIntervalTimetable

from spark_jobs.session import SparkOptions
from stream_airflow import (
    IngestOperator,
    Json,
    RebuildOperator,
    RedriveOperator,
    ReplayOperator,
    StreamLagSensor,
    VerifyOperator,
)
from tests.support.airflow_dags.runs import DAG
from tests.support.settings import SMALL

PLACE = {"source": os.environ["TEST_STREAM"], "table": os.environ["TEST_TABLE"], "group": "lakehouse"}
STREAM = {
    **PLACE,
    # A local table needs no secret, and takes it.
    "storage_options": {"AWS_SECRET_ACCESS_KEY": "env:TEST_SECRET"},
    "decode": Json("id BIGINT, user STRING"),
    "spark": SparkOptions(master="local[2]", config=SMALL),
}

with DAG("tables", schedule=CronDataIntervalTimetable("@daily", timezone="UTC"), catchup=False) as dag:
    (
        StreamLagSensor(task_id="wait", **PLACE, interval_seconds=0.5)
        >> IngestOperator(task_id="ingest", **STREAM, intervals="day")
        >> ReplayOperator(task_id="replay", **STREAM, intervals="hour", outlets=[Asset("replayed")])
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

with DAG("stays") as stays:
    IngestOperator(task_id="ingest", **STREAM, linger_seconds=600.0)

with DAG("many") as many:
    options = {name: value for name, value in STREAM.items() if name not in PLACE}
    IngestOperator.partial(task_id="ingest", **options).expand_kwargs(
        [{**PLACE, "table": f"{PLACE['table']}_{name}", "group": name} for name in ("one", "two")]
    )
