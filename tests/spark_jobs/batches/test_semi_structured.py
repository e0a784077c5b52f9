"""VARIANT, MAP and BINARY from the stream into the table and back, read by the driver and by executors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.dead_letter_jobs import Redrive, RedriveJob
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.job import drain_batches
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.verify import verify
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import drain, ingestion

pytestmark = pytest.mark.spark
SCHEMA = """
    id BIGINT, extra VARIANT, parts STRUCT<v: VARIANT, `a.b`: INT>, list ARRAY<VARIANT>, named MAP<STRING, VARIANT>,
    counts MAP<STRING, BIGINT>, bytes BINARY
"""
FULL = {
    **{"id": 1, "extra": {"a": [1, 2.5, "x", None]}, "parts": {"v": [True], "a.b": 7}, "list": [1, "x", None]},
    **{"named": {"k": {"n": 1}}, "counts": {"a": 1, "b": None}, "bytes": "AAEC"},
}
REPEATED = b'{"id":3,"extra":{"a":1,"a":2}}'


def send(url: str, *payloads: bytes) -> None:
    with create_producer(url) as producer:
        for payload in payloads:
            producer.send(payload)


def rows_of(spark: SparkSession, what: Ingestion) -> list[dict[str, Any]]:
    columns = ["id", "counts", "bytes", "parts.`a.b`", "parts IS NULL AS is_empty"]
    columns += [f"to_json({name}) AS {name}" for name in ("extra", "list", "named")]
    frame = spark.read.format("delta").load(what.table).orderBy("_sequence")
    return [row.asDict() for row in frame.selectExpr(*columns, "to_json(parts.v) AS v").collect()]


@pytest.mark.parametrize(
    "driver_records", [pytest.param(0, marks=pytest.mark.slow, id="executors"), pytest.param(1000, id="driver")]
)
def test_values_without_a_schema_are_in_the_table(spark: SparkSession, folder: Path, driver_records: int) -> None:
    url = f"file://{folder}/orders.ss/orders"
    what = replace(ingestion(folder / "t", decoder=Json(SCHEMA)), driver_records=driver_records)
    send(url, json.dumps(FULL).encode(), b'{"id":2,"extra":null,"parts":{},"list":[],"named":{}}', REPEATED, b"{}")
    (report,) = drain(spark, url, what)
    assert (report.rows, report.dead) == (3, 1)
    full, empty, nothing = rows_of(spark, what)
    assert {name: json.loads(full[name]) for name in ("extra", "list", "named", "v")} == {
        **{name: FULL[name] for name in ("extra", "list", "named")},
        "v": [True],
    }
    assert (full["counts"], full["bytes"], full["a.b"]) == ({"a": 1, "b": None}, bytearray(b"\0\1\2"), 7)
    assert (empty["extra"], empty["v"], empty["is_empty"], empty["list"]) == ("null", None, False, "[]")
    assert nothing == {**dict.fromkeys(full), "is_empty": True}
    # The next batch, a redrive and the proof read the log and the files without Spark.
    send(url, b'{"id":4,"extra":[4]}')
    (report,) = drain(spark, url, what)
    assert (report.rows, report.dead) == (1, 0)
    without = replace(what, decoder=Json(SCHEMA.replace("extra VARIANT,", "")))
    list(drain_batches(RedriveJob(spark, without, Redrive(), url=StreamUrl.parse(url))))
    assert [row["id"] for row in rows_of(spark, what)] == [1, 2, 3, None, 4]
    with open_batch_source(url) as source:
        (verdict,) = verify(source, what)
    assert (verdict.rows, verdict.dead, verdict.missing, verdict.duplicated) == (5, 0, 0, 0)


@pytest.mark.slow
def test_payloads_without_a_schema_are_one_variant(spark: SparkSession, folder: Path) -> None:
    url = f"file://{folder}/orders.ss/orders"

    def dear(rows: Any) -> Any:
        return rows.where("payload:amount::double > 1 OR payload:amount IS NULL")

    what = ingestion(folder / "t", decoder=Json(), transform=dear)
    send(url, b'{"amount": 2.5, "user": {"name": "x"}}', b'{"amount": 1}', b"[1, 2]", b"no JSON")
    (report,) = drain(spark, url, what)
    assert (report.rows, report.dead) == (2, 1)
    frame = spark.read.format("delta").load(what.table).orderBy("_sequence")
    assert [tuple(row) for row in frame.selectExpr("payload:user.name::string", "payload:[1]::int").collect()] == [
        ("x", None),
        (None, 2),
    ]
