"""Values of messages reach no log, no event of Dagster and no error, whatever goes wrong with them."""

from __future__ import annotations

import io
import json
import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.decoding.decoders import DecodedColumns
from spark_jobs.structured_logs import JsonFormatter
from stream_assets import Json, Text, reject
from stream_consumers.create import create_producer
from stream_consumers.options import OnBadRows
from tests.support.dagster_runs import declare, execute

pytestmark = [pytest.mark.spark, pytest.mark.dagster]
MARK = "Mallory"
USER = f"it's {MARK}, 'or not"
SCHEMA = "id BIGINT, user STRING, card STRING"
Transform = Callable[[DataFrame], DataFrame]


@dataclass(frozen=True)
class Raising(Text):
    """A decoder of the user's that raises."""

    def decode(self, payloads: Any, schema: pa.Schema) -> DecodedColumns:
        raise ValueError(f"cannot read {payloads.to_pylist()}")


def casts(rows: DataFrame) -> DataFrame:
    return rows.withColumn("card", f.col("user").cast("int"))


def udf_raises(rows: DataFrame) -> DataFrame:
    def raising(user):  # type: ignore[no-untyped-def]  # Spark would evaluate the annotations
        raise ValueError(f"no such user: {user}\n{user}")

    return rows.withColumn("card", f.udf(raising, "string")("user"))


def arrow_raises(rows: DataFrame) -> DataFrame:
    def raising(blocks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for block in blocks:
            raise KeyError(block.to_pylist()[0]["user"])
            yield block

    return rows.mapInArrow(raising, rows.schema)


def raises_itself(rows: DataFrame) -> DataFrame:
    for row in rows.collect():
        raise ValueError(f"broken: {row}")
    return rows


def raises_of_spark(rows: DataFrame) -> DataFrame:
    casts(rows).collect()
    return rows


def raises_by_expression(rows: DataFrame) -> DataFrame:
    return rows.withColumn("card", f.raise_error(f.concat(f.lit("no user "), "user")).cast("string"))


def elsewhere(rows: DataFrame) -> DataFrame:
    return rows.withColumn("_stream", f.col("user"))


def rejects(rows: DataFrame) -> DataFrame:
    return reject(rows, "true", f.concat(f.lit("never heard of "), "user"))


@dataclass(frozen=True)
class Case:
    """What goes wrong.

    Args:
        transform: of the asset.
        sql: run before, for the table.
        options: of the asset.
        succeeds: whether the run does.
    """

    transform: Transform | None = None
    sql: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    succeeds: bool = False


DEAD = {"on_bad_rows": OnBadRows.DEAD_LETTER}
CHECK = "ALTER TABLE delta.`{}` ADD CONSTRAINT known CHECK (user = 'known')"
CASES = {
    "check": Case(sql=CHECK),
    "check as dead letters": Case(sql=CHECK, options=DEAD, succeeds=True),
    "not null": Case(lambda rows: rows.withColumn("id", f.lit(None).cast("bigint")), options={"decode": Json(SCHEMA)}),
    "length": Case(sql="ALTER TABLE delta.`{}` ADD CONSTRAINT short CHECK (length(user) < 3)"),
    "cast": Case(casts),
    "cast as dead letters": Case(casts, options=DEAD, succeeds=True),
    "udf": Case(udf_raises),
    "udf as dead letters": Case(udf_raises, options=DEAD, succeeds=True),
    "arrow": Case(arrow_raises),
    "transform": Case(raises_itself),
    "transform of spark": Case(raises_of_spark),
    "raise_error": Case(raises_by_expression),
    "another place": Case(elsewhere),
    "rejected": Case(rejects, succeeds=True),
    "decoder": Case(options={"decode": Raising()}),
    "undecodable": Case(options={"decode": Json("id INT, user TIMESTAMP, card DATE", mode="strict")}, succeeds=True),
    "another type": Case(lambda rows: rows.withColumn("user", f.array("user"))),
}
TABLE = """CREATE TABLE delta.`{}` (id BIGINT NOT NULL, user STRING, card STRING, payload STRING,
    _stream STRING, _shard BIGINT, _sequence BIGINT, _timestamp TIMESTAMP) USING delta"""
# Each of them takes some seconds.
FIRST = ("check", "udf as dead letters", "transform", "decoder")


def everything_said(
    case: Case, instance: dg.DagsterInstance, folder: Path, spark: SparkSession, **options: Any
) -> tuple[bool, str]:
    """Whether the run succeeds, and all that Dagster and the logs have of it."""
    with create_producer(f"file://{folder}/orders.ss/orders") as producer:
        payload = json.dumps({"id": 1, "user": USER, "card": f"card of {MARK}"}).encode()
        producer.send(payload, key=MARK.encode(), timestamp_ms=1_700_000_000_000)
    table = folder / "t"
    spark.sql(TABLE.format(table))
    if case.sql:
        spark.sql(case.sql.format(table))
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        given = {"decode": Json(SCHEMA), **case.options, **options}
        stream = declare(folder, transform=case.transform, **given)
        result = execute(stream, instance)
    finally:
        root.removeHandler(handler)
    events = [dg.serialize_value(record.event_log_entry) for record in instance.get_records_for_run(result.run_id).records]
    raised = [
        "".join(traceback.format_exception(failed)) for failed in (_exception_of(event) for event in result.all_events) if failed
    ]
    return result.success, "\n".join([*events, *raised, logged.getvalue()])
