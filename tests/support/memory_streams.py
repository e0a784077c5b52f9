"""Documents sent to a stream in memory, and the rows that they become."""

from __future__ import annotations

import json
from typing import Any

from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import BatchReport, Ingestion
from spark_jobs.reading.source import STREAM_COLUMNS
from stream_consumers.memory import memory_broker
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import drain


def send(url: StreamUrl, *documents: Any) -> None:
    """Send documents as JSON; bytes as they are."""
    for document in documents:
        payload = document if isinstance(document, bytes) else json.dumps(document).encode()
        memory_broker(url).append(Shard("orders"), payload)


def ingest(spark: SparkSession, url: StreamUrl, what: Ingestion, *documents: Any) -> list[BatchReport]:
    """Send documents, see :func:`send`, and drain the stream."""
    send(url, *documents)
    return drain(spark, str(url), what)


def rows(spark: SparkSession, what: Ingestion) -> list[dict[str, Any]]:
    """The rows of the table in the order of their messages, without the columns of the stream."""
    found = spark.read.format("delta").load(what.table).orderBy("_sequence").drop(*STREAM_COLUMNS).collect()
    return [row.asDict(recursive=True) for row in found]
