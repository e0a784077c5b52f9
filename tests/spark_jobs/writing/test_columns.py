"""Which rows fit a table: new columns and new fields of structs if they may come in, and no change of a type."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from spark_jobs.decoding.decoders import Json
from spark_jobs.writing.sink import check_columns
from stream_consumers.errors import SchemaMismatchError
from stream_consumers.memory import forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import drain, ingestion

pytestmark = pytest.mark.spark
STREAM = "_stream STRING, _shard BIGINT, _sequence BIGINT, _timestamp TIMESTAMP"


def test_the_columns_of_the_place_keep_their_types(spark: SparkSession) -> None:
    rows = StructType.fromDDL(STREAM.replace("_sequence BIGINT", "_sequence STRING"))
    assert isinstance(rows, StructType)
    with pytest.raises(SchemaMismatchError, match="stream columns: _sequence is string, not bigint"):
        check_columns(rows, None, path="t", merge_schema=False)


def problem(rows: str, table: str, *, merge_schema: bool) -> str:
    """What is wrong, and the remedy; empty if nothing is."""
    schemas = [StructType.fromDDL(f"{columns}, {STREAM}") for columns in (rows, table)]
    assert isinstance(schemas[0], StructType)
    assert isinstance(schemas[1], StructType)
    try:
        check_columns(schemas[0], schemas[1], path="t", merge_schema=merge_schema)
    except SchemaMismatchError as error:
        return str(error)
    return ""


TABLE = "id BIGINT, st STRUCT<a: INT, in: STRUCT<x: INT>>, li ARRAY<STRUCT<a: INT>>, ma MAP<STRING, STRUCT<a: INT>>"


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ("new INT", "new"),
        ("st STRUCT<a: INT, in: STRUCT<x: INT>, b: INT>", "st.b"),
        ("ST STRUCT<A: INT, b: INT>", "ST.b"),
        ("st STRUCT<a: INT, in: STRUCT<x: INT, y: INT>>", "st.in.y"),
        ("li ARRAY<STRUCT<a: INT, b: INT>>", "li[].b"),
        ("ma MAP<STRING, STRUCT<a: INT, b: INT>>", "ma.value.b"),
    ],
)
def test_new_columns_and_fields_come_in_only_if_they_may(spark: SparkSession, rows: str, name: str) -> None:
    found = problem(rows, TABLE, merge_schema=False)
    assert f"{name} is not in the table" in found
    assert "merge_schema=True" in found
    assert problem(rows, TABLE, merge_schema=True) == ""


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("id STRING", "id is string but bigint in the table"),
        ("st STRUCT<a: STRING>", "st.a is string but int in the table"),
        ("st STRUCT<a: STRING, b: INT>", "st.a is string but int in the table"),
        ("st INT", "st is int but struct<a:int,in:struct<x:int>> in the table"),
        ("li ARRAY<STRUCT<a: STRING>>", "li[].a is string but int in the table"),
        ("ma MAP<INT, STRUCT<a: INT>>", "ma.key is int but string in the table"),
    ],
)
def test_a_type_never_changes_and_nobody_is_sent_in_a_circle(spark: SparkSession, rows: str, told: str) -> None:
    for merge_schema in (False, True):
        found = problem(rows, TABLE, merge_schema=merge_schema)
        assert told in found
        assert "changes no type" in found
    assert "let new columns" not in problem(rows, TABLE, merge_schema=True)


def test_fewer_columns_and_fields_fit(spark: SparkSession) -> None:
    assert problem("st STRUCT<in: STRUCT<x: INT>>", TABLE, merge_schema=False) == ""


@pytest.fixture
def url() -> Iterator[StreamUrl]:
    made = StreamUrl.parse(f"memory://{uuid.uuid4().hex}/orders")
    yield made
    forget_memory_broker(made)


def test_delta_takes_what_fits(spark: SparkSession, folder: Path, url: StreamUrl) -> None:
    what = ingestion(folder / "t", merge_schema=True)
    for schema in (
        "id BIGINT, st STRUCT<a: INT>",
        "id BIGINT, st STRUCT<a: INT, b: INT>",
        "id BIGINT, st STRUCT<a: INT>, extra STRING",
        "id BIGINT",
        "id BIGINT, st STRUCT<c: ARRAY<STRUCT<d: INT>>>",
        "id BIGINT, st STRUCT<c: ARRAY<STRUCT<e: INT>>>",
    ):
        memory_broker(url).append(
            Shard("orders"), b'{"id":1,"st":{"a":1,"b":2,"c":[{"d":3,"e":4}]},"extra":"x","other":1}'
        )
        (report,) = drain(spark, str(url), replace(what, decoder=Json(schema)))
        assert (report.rows, report.dead) == (1, 0)
    rows = spark.read.format("delta").load(str(folder / "t")).orderBy("_sequence").collect()
    structs = [row["st"].asDict(recursive=True) if row["st"] else None for row in rows]
    assert structs == [
        {"a": 1, "b": None, "c": None},
        {"a": 1, "b": 2, "c": None},
        {"a": 1, "b": None, "c": None},
        None,
        {"a": None, "b": None, "c": [{"d": 3, "e": None}]},
        {"a": None, "b": None, "c": [{"d": None, "e": 4}]},
    ]
    assert [row["extra"] for row in rows] == [None, None, "x", None, None, None]


def test_a_dead_letter_table_of_an_older_version_gets_the_new_columns(
    spark: SparkSession, folder: Path, url: StreamUrl
) -> None:
    what = ingestion(folder / "t")
    older = f"{STREAM}, payload BINARY, error STRING, _batch STRING, _group STRING, _member STRING, _number BIGINT"
    spark.createDataFrame([], older).write.format("delta").save(what.dead_letters().path)
    memory_broker(url).append(Shard("orders"), b"no JSON")
    (report,) = drain(spark, str(url), what)
    assert report.dead == 1
    (row,) = spark.read.format("delta").load(what.dead_letters().path).collect()
    assert (bytes(row["payload"]), row["headers"], row["offset"]) == (b"no JSON", None, None)
