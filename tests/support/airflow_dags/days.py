"""A DAG whose runs replay the messages of a day each; its transform marks the rows that it makes."""

from __future__ import annotations

import os
from datetime import datetime, timezone

from airflow.sdk import DAG
from pyspark.sql import DataFrame
from pyspark.sql.functions import lit

from spark_jobs.session import SparkOptions
from stream_airflow import Json, ReplayOperator
from tests.support.settings import SMALL

try:
    from airflow.sdk import CronDataIntervalTimetable
except ImportError:
    # Airflow 3.0 and 3.1
    from airflow.timetables.interval import CronDataIntervalTimetable  # type: ignore[no-redef]


def mark(rows: DataFrame) -> DataFrame:
    """Write another value than the first ingestion."""
    return rows.withColumn("user", lit("replayed"))


# The scheduler starts no run by itself, because the last day is past.
with DAG(
    "days",
    schedule=CronDataIntervalTimetable("0 0 * * *", timezone="UTC"),
    start_date=datetime(2023, 11, 1, tzinfo=timezone.utc),
    end_date=datetime(2023, 11, 30, tzinfo=timezone.utc),
    catchup=False,
):
    ReplayOperator(
        task_id="replay",
        source=os.environ["TEST_STREAM"],
        table=os.environ["TEST_TABLE"],
        group="lakehouse",
        decode=Json("id BIGINT, user STRING"),
        transform=mark,
        spark=SparkOptions(master="local[2]", config=SMALL),
        retries=2,
    )
