"""Values of messages reach no log, no event of Dagster and no error, whatever goes wrong with them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches import read_and_commit
from spark_jobs.decoding.decoders import DecodedColumns
from spark_jobs.structured_logs import JsonFormatter
from stream_assets import ErrorPolicy, Json, RunLimits, Text, reject, stream_asset
from stream_consumers.create import create_producer
from tests.support.dagster_runs import execute

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
    return rows.withColumn("card", f.col("user").cast("int").cast("string"))


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


def reflects(rows: DataFrame) -> DataFrame:
    return rows.withColumn("card", f.expr("reflect('java.net.InetAddress', 'getByName', concat('[', user))"))


def elsewhere(rows: DataFrame) -> DataFrame:
    return rows.withColumn("_stream", f.col("user"))


def rejects(rows: DataFrame) -> DataFrame:
    return reject(rows, "true", f.concat(f.lit("never heard of "), "user"))


@dataclass(frozen=True)
class Case:
    """What goes wrong.

    Args:
        event: what an event says of it.
        transform: of the asset.
        sql: run before, for the table.
        options: of the asset.
        succeeds: whether the run does.
        is_made_by_run: whether there is no table before.
    """

    event: str
    transform: Transform | None = None
    sql: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    succeeds: bool = False
    is_made_by_run: bool = False


DEAD = {"errors": ErrorPolicy(on_bad_rows="dead_letter")}
CHECK = "ALTER TABLE delta.`{}` ADD CONSTRAINT known CHECK (user = 'known')"
CASES = {
    "check": Case("[DELTA_VIOLATE_CONSTRAINT_WITH_VALUES]", sql=CHECK),
    "check as dead letters": Case("the CHECK constraint known", sql=CHECK, options=DEAD, succeeds=True),
    "not null": Case("the column id is NOT NULL", lambda rows: rows.withColumn("id", f.lit(None).cast("bigint"))),
    "cast": Case("[CAST_INVALID_INPUT]", casts),
    "cast as dead letters": Case("an expression of the transform failed", casts, options=DEAD, succeeds=True),
    "udf": Case("raised ValueError in line", udf_raises),
    "udf as dead letters": Case("raised ValueError in line", udf_raises, options=DEAD, succeeds=True),
    "arrow": Case("raised KeyError in line", arrow_raises),
    "transform": Case("raised ValueError in line", raises_itself),
    "transform of spark": Case("raised NumberFormatException in line", raises_of_spark),
    "raise_error": Case("[USER_RAISED_EXCEPTION]", raises_by_expression),
    "reflect": Case("caused by UnknownHostException", reflects),
    "another place": Case("the transform changes the columns that identify the message", elsewhere),
    "rejected": Case("rejected: '", rejects, succeeds=True),
    "decoder": Case("ValueError", options={"decode": Raising()}, succeeds=True, is_made_by_run=True),
    "undecodable": Case(
        "is not a time",
        options={"decode": Json("id BIGINT, user TIMESTAMP", mode="strict")},
        succeeds=True,
        is_made_by_run=True,
    ),
    "another type": Case("user is array<string> but string", lambda rows: rows.withColumn("user", f.array("user"))),
}
TABLE = """CREATE TABLE delta.`{}` (id BIGINT NOT NULL, user STRING, card STRING, payload STRING,
    _stream STRING, _shard BIGINT, _sequence BIGINT, _timestamp TIMESTAMP) USING delta"""
# An error of Spark and one of Python are in the first tier.
FIRST = ("check", "udf as dead letters")


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What all loggers log, as the handlers of a ``dagster.yaml`` write it."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    yield text
    logging.getLogger().removeHandler(handler)


def run(case: Case, instance: dg.DagsterInstance, folder: Path, spark: SparkSession, **options: Any) -> str:
    """A run of an asset for one message; all that Dagster keeps of it."""
    with create_producer(f"file://{folder}/orders.ss/orders") as producer:
        payload = json.dumps({"id": 1, "user": USER, "card": f"card of {MARK}"}).encode()
        producer.send(payload, timestamp_ms=1_700_000_000_000)
    if not case.is_made_by_run:
        spark.sql(TABLE.format(folder / "t"))
    if case.sql:
        spark.sql(case.sql.format(folder / "t"))
    given: dict[str, Any] = {"decode": Json(SCHEMA), "limits": RunLimits(retry_seconds=0), **case.options, **options}

    @stream_asset(source=f"file://{folder}/orders.ss/orders", group="lakehouse", table=str(folder / "t"), **given)
    def orders(batch: DataFrame) -> DataFrame:
        return case.transform(batch) if case.transform else batch

    result = execute(orders, instance)
    assert result.success is case.succeeds
    events = instance.get_records_for_run(result.run_id).records
    return "\n".join(dg.serialize_value(event.event_log_entry) for event in events)


@pytest.mark.parametrize("reader", [pytest.param("executors", marks=pytest.mark.slow), "driver"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in CASES]
)
def test_no_value_of_a_message_is_logged(
    name: str,
    reader: str,
    instance: dg.DagsterInstance,
    folder: Path,
    spark: SparkSession,
    logged: io.StringIO,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if reader == "executors":
        monkeypatch.setattr(read_and_commit, "read_on_driver", lambda *splits, **options: None)
    said = run(CASES[name], instance, folder, spark)
    assert CASES[name].event in said
    captured = capfd.readouterr()
    for where, text in {"events": said, "logs": logged.getvalue(), "output": captured.out + captured.err}.items():
        found = text.find(MARK)
        assert found < 0, f"{where}: {text[max(0, found - 300) : found + 100]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["udf", "transform"])
def test_an_asset_that_shows_payloads_shows_what_was_raised(
    name: str, instance: dg.DagsterInstance, folder: Path, spark: SparkSession
) -> None:
    said = run(CASES[name], instance, folder, spark, errors=ErrorPolicy(dead_letter_payloads=True))
    assert MARK in said
    assert "test_hidden_values.py" in said
