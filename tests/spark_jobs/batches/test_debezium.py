"""Change events of Debezium in a table of changes: messages that make no row are counted, and are no dead letters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches import job
from spark_jobs.decoding.debezium import Debezium
from spark_jobs.verify import verify
from stream_consumers.create import create_producer, open_batch_source
from tests.support.debezium_messages import (
    PLACEHOLDER,
    envelope,
    field,
    heartbeat,
    logical_message,
    schema_change,
    transaction,
)
from tests.support.ingesting import drain, ingestion

pytestmark = pytest.mark.slow
FIELDS = (
    field("id", "int64"),
    field("name", "string"),
    field("at", "int64", "io.debezium.time.MicroTimestamp"),
    field("document", "string", "io.debezium.data.Json"),
)
ADA = {"id": 7, "name": "Ada", "at": 1700000000123456, "document": '{"a": [1, null]}'}
MESSAGES = [
    envelope("c", after=ADA, fields=FIELDS),
    heartbeat(),
    envelope("u", after={**ADA, "name": PLACEHOLDER, "document": PLACEHOLDER}, fields=FIELDS),
    transaction("BEGIN"),
    envelope("d", before={"id": 7}, fields=FIELDS),
    schema_change(),
    logical_message(),
    envelope("t", fields=FIELDS),
]
ROWS = [
    (1, 7, "Ada", 1700000000.123456, '{"a":[1,null]}', "c", []),
    (3, 7, None, 1700000000.123456, None, "u", ["name", "document"]),
    (5, 7, None, None, None, "d", []),
    (8, None, None, None, None, "t", []),
]
DECODER = Debezium("id BIGINT NOT NULL, name STRING, at TIMESTAMP, document VARIANT", source_order=True)


def _as_they_are(rows: DataFrame) -> DataFrame:
    """A transform that would fail for a row of no change."""
    return rows.withColumn("_op", f.expr("nvl(_op, raise_error('a row of no change'))"))


@pytest.mark.parametrize(
    ("way", "transform"),
    [("driver", None), ("driver", _as_they_are), ("executors", None), ("executors", _as_they_are), ("one pass", None)],
)
def test_messages_that_make_no_row(
    spark: SparkSession,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    transform: Callable[[DataFrame], DataFrame] | None,
) -> None:
    url = f"file://{folder}/changes.ss/changes"
    bad = [] if way == "one pass" else [b"{}"]
    with create_producer(url) as producer:
        for payload in [*MESSAGES, *bad]:
            producer.send(payload)
    ways: list[str] = []
    in_one_pass = job.commit_in_one_pass

    def watched(*arguments: object) -> object:
        ways.append("one pass")
        return in_one_pass(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(job, "commit_in_one_pass", watched)
    what = ingestion(folder / "t", decoder=DECODER, transform=transform)
    what = replace(what, driver_records=1000 if way == "driver" else 0)
    (report,) = drain(spark, url, what)
    assert (report.rows, report.dead, sum(report.messages.values())) == (len(ROWS), len(bad), len(MESSAGES))
    assert ways == ([] if way == "driver" or transform else ["one pass"])
    columns = ["_sequence", "id", "name", "CAST(at AS DOUBLE) at", "to_json(document) document", "_op", "_unavailable"]
    found = spark.read.format("delta").load(f"{folder}/t").selectExpr(*columns).orderBy("_sequence").collect()
    assert [tuple(row) for row in found] == ROWS
    with open_batch_source(url) as source:
        (verdict,) = verify(source, what)
    assert (verdict.rows, verdict.filtered, verdict.dead, verdict.is_right) == (len(ROWS), 4, len(bad), True)
