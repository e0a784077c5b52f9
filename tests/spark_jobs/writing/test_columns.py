"""Which rows fit a table: new columns and new fields of structs if they may come in, and no change of a type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from spark_jobs.batches.rebuild import rebuild_events
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.reading.spark_types import struct_type
from spark_jobs.writing.layout import TableLayout
from spark_jobs.writing.schema_evolution import WIDENING, check_columns
from stream_consumers.create import open_batch_source
from stream_consumers.errors import SchemaMismatchError, TableUnreadableError
from stream_consumers.memory import memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import ErrorPolicy, SchemaChanges
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import drain, ingestion
from tests.support.memory_streams import ingest

pytestmark = pytest.mark.spark
FAIL, ADD = SchemaChanges.FAIL, SchemaChanges.ADD_COLUMNS
STREAM = "_stream STRING, _shard BIGINT, _sequence BIGINT, _timestamp TIMESTAMP"


def test_the_columns_of_the_place_keep_their_types(spark: SparkSession) -> None:
    rows = StructType.fromDDL(STREAM.replace("_sequence BIGINT", "_sequence STRING"))
    assert isinstance(rows, StructType)
    with pytest.raises(SchemaMismatchError, match="_sequence"):
        check_columns(rows, None, path="t", schema_changes=FAIL)


@pytest.mark.parametrize(
    "rows",
    [
        *('`a"b` INT', "ma MAP<STRUCT<`a\\\\b`: INT>, STRING>", "li ARRAY<STRUCT<`a\nb`: INT>>"),
        *("`${env.X}` INT", "li ARRAY<STRUCT<`a${user.dir}`: INT>>", "id INT COMMENT '${env.X}'"),
        "li ARRAY<STRUCT<a: INT COMMENT 'of ${env.X}'>>",
    ],
)
def test_names_and_comments_that_are_not_plain_text_for_java_and_hadoop_are_refused(
    spark: SparkSession, rows: str
) -> None:
    assert problem(rows, "id INT", schema_changes=ADD)


def test_names_that_spark_or_delta_add_themselves_are_no_new_columns(spark: SparkSession) -> None:
    for name in ("filePath", "_Row_Id_", "deletionVectorId", "_metadata", "_change_type", "_stream_assets_x"):
        assert name in problem(f"id INT, {name} INT", "id INT", schema_changes=ADD)
        assert problem(f"id INT, {name} INT", f"{name.upper()} INT, id INT", schema_changes=ADD) == ""
        assert problem(f"id INT, {name} INT", None, schema_changes=FAIL)
        assert problem(f"id INT, st STRUCT<{name}: INT>", None, schema_changes=FAIL) == ""


def problem(
    rows: str, table: str | None, *, schema_changes: SchemaChanges, widens: bool = False, partitions: Sequence[str] = ()
) -> str:
    """What is wrong, and the remedy; empty if nothing is."""
    found, own = (struct_type(f"{columns}, {STREAM}") if columns else None for columns in (rows, table))
    assert found is not None
    try:
        check_columns(found, own, path="t", schema_changes=schema_changes, widens=widens, partitions=partitions)
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
    found = problem(rows, TABLE, schema_changes=FAIL)
    assert f"{name} is not in the table" in found
    assert "schema_changes='add_columns'" in found
    assert problem(rows, TABLE, schema_changes=ADD) == ""


def test_a_new_field_that_delta_takes_for_another_is_refused(spark: SparkSession) -> None:
    for table in ("`\u0130` INT", "st STRUCT<`\u0130`: INT>"):
        assert problem(table.replace("\u0130", "i\u0307"), table, schema_changes=ADD)


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
    for schema_changes in SchemaChanges:
        found = problem(rows, TABLE, schema_changes=schema_changes, widens=True)
        assert told in found
        assert "no other change of a type" in found


WIDER = {
    "TINYINT": "SMALLINT",
    "INT": "BIGINT",
    "SMALLINT": "DOUBLE",
    "FLOAT": "DOUBLE",
    "INT ": "DECIMAL(12, 2)",
    "DECIMAL(5, 2)": "DECIMAL(12, 5)",
    "STRUCT<a: INT>": "STRUCT<a: BIGINT>",
    "ARRAY<INT>": "ARRAY<BIGINT>",
}
OTHER = {
    "BIGINT": "INT",
    "INT": "STRING",
    "BIGINT ": "DOUBLE",
    "DECIMAL(5, 2)": "DECIMAL(12, 1)",
    "INT ": "DECIMAL(11, 2)",
    "DATE": "TIMESTAMP",
}


def columns(kinds: Iterable[str]) -> str:
    return ", ".join(f"c{number} {kind}" for number, kind in enumerate(kinds))


def test_types_are_widened_where_the_table_lets_them_and_delta_does_so(spark: SparkSession, folder: Path) -> None:
    for table, rows in WIDER.items():
        assert problem(f"c {rows}", f"c {table}", schema_changes=ADD, widens=True) == ""
        assert WIDENING in problem(f"c {rows}", f"c {table}", schema_changes=ADD)
        assert "wider types with schema_changes='add_columns'" in problem(
            f"c {rows}", f"c {table}", schema_changes=FAIL, widens=True
        )
    path = str(folder / "t")
    spark.createDataFrame([], columns(WIDER)).write.format("delta").option(WIDENING, "true").save(path)
    rows = spark.createDataFrame([], columns(WIDER.values()))
    rows.write.format("delta").option("mergeSchema", "true").mode("append").save(path)
    assert spark.read.format("delta").load(path).schema == rows.schema


def test_a_partition_column_keeps_its_type(spark: SparkSession) -> None:
    for table, rows in WIDER.items():
        for schema_changes in SchemaChanges if "<" not in table else ():
            found = problem(f"C {rows}", f"c {table}", schema_changes=schema_changes, widens=True, partitions=["c"])
            assert "A partition column keeps its type" in found
        assert not problem(f"c {rows}, d INT", f"c {table}, d INT", schema_changes=ADD, widens=True, partitions=["d"])
    assert not problem("c STRUCT<d: BIGINT>", "c STRUCT<d: INT>", schema_changes=ADD, widens=True, partitions=["d"])


@pytest.mark.slow
def test_a_wider_partition_column_is_refused_and_that_of_another_program_can_be_undone(
    spark: SparkSession, folder: Path, url: StreamUrl
) -> None:
    layout = TableLayout(partition_by=["price"], properties={WIDENING: "true"})
    old, wide = (Json(f"id BIGINT, price DECIMAL({digits})") for digits in ("10, 2", "14, 4"))
    what = replace(ingestion(folder / "t", decoder=old, errors=ErrorPolicy(schema_changes=ADD)), layout=layout)
    ingest(spark, url, what, b'{"id": 1, "price": 1.50}')
    before = what.ledger().read()
    with pytest.raises(SchemaMismatchError, match="price"):
        ingest(spark, url, replace(what, decoder=wide), b'{"id": 2, "price": 2.25}')
    assert what.ledger().read() == before
    spark.sql(f"ALTER TABLE delta.`{what.table}` ALTER COLUMN price TYPE DECIMAL(14, 4)")
    with pytest.raises(TableUnreadableError) as raised:
        drain(spark, str(url), what)
    assert "RESTORE" in raised.value.remedy
    assert "1.50" not in str(raised.value)
    spark.sql(f"RESTORE TABLE delta.`{what.table}` TO VERSION AS OF {before.version}")
    drain(spark, str(url), what)
    with open_batch_source(str(url)) as source:
        list(rebuild_events(spark, source, replace(what, decoder=wide)))
    ingest(spark, url, replace(what, decoder=wide), b'{"id": 3, "price": 3.1234}')
    rows = spark.read.format("delta").load(what.table).orderBy("id").collect()
    assert [str(row["price"]) for row in rows] == ["1.5000", "2.2500", "3.1234"]


def test_types_that_are_not_widened_are_those_that_delta_refuses(spark: SparkSession, folder: Path) -> None:
    path = str(folder / "t")
    spark.createDataFrame([], columns(OTHER)).write.format("delta").option(WIDENING, "true").save(path)
    for number, (table, rows) in enumerate(OTHER.items()):
        assert "no other change of a type" in problem(f"c {rows}", f"c {table}", schema_changes=ADD, widens=True)
        changed = spark.createDataFrame([], f"c{number} {rows}").write.format("delta").option("mergeSchema", "true")
        with pytest.raises(PySparkException, match="DELTA_FAILED_TO_MERGE"):
            changed.mode("append").save(path)


def test_fewer_columns_and_fields_fit(spark: SparkSession) -> None:
    assert problem("st STRUCT<in: STRUCT<x: INT>>", TABLE, schema_changes=FAIL) == ""


def test_delta_takes_what_fits(spark: SparkSession, folder: Path, url: StreamUrl) -> None:
    what = ingestion(folder / "t", errors=ErrorPolicy(schema_changes=ADD))
    for schema, document in {
        "id BIGINT, st STRUCT<a: INT, c: ARRAY<STRUCT<d: INT>>>": b'{"id": 1, "st": {"a": 1, "c": [{"d": 3}]}}',
        "st STRUCT<b: INT>, extra STRING": b'{"st": {"b": 2}, "extra": "x"}',
        "id BIGINT, st STRUCT<c: ARRAY<STRUCT<e: INT>>>": b'{"id": 1, "st": {"c": [{"e": 4}]}}',
    }.items():
        (report,) = ingest(spark, url, replace(what, decoder=Json(schema)), document)
        assert (report.rows, report.dead) == (1, 0)
    rows = spark.read.format("delta").load(str(folder / "t")).orderBy("_sequence").collect()
    structs = [row["st"].asDict(recursive=True) if row["st"] else None for row in rows]
    assert structs == [
        {"a": 1, "b": None, "c": [{"d": 3, "e": None}]},
        {"a": None, "b": 2, "c": None},
        {"a": None, "b": None, "c": [{"d": None, "e": 4}]},
    ]
    assert [row["extra"] for row in rows] == [None, "x", None]


def test_times_of_all_years_are_what_other_readers_read(spark: SparkSession, folder: Path, url: StreamUrl) -> None:
    years = [1, 1500, 2024, 9999]
    for year in years:
        memory_broker(url).append(Shard("orders"), b'{"at": "%04d-12-31T00:00:00Z"}' % year)
    drain(spark, str(url), ingestion(folder / "t", decoder=Json("at TIMESTAMP")))
    table = DeltaTable(str(folder / "t"))
    for found in (table.to_pyarrow_table(), pa.table(table.scan())):
        assert sorted(moment.year for moment in found["at"].to_pylist()) == years


@pytest.mark.slow
def test_a_column_of_ours_that_is_gone_is_not_made_anew(spark: SparkSession, folder: Path, url: StreamUrl) -> None:
    """Its rows would have no place any more, and be written a second time by a replay."""
    what = ingestion(folder / "t", decoder=Json("id BIGINT"), errors=ErrorPolicy(schema_changes=ADD))
    ingest(spark, url, what, b'{"id": 1}')
    spark.sql(f"ALTER TABLE delta.`{what.table}` SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    spark.sql(f"ALTER TABLE delta.`{what.table}` RENAME COLUMN _sequence TO seq")
    memory_broker(url).append(Shard("orders"), b'{"id": 2}')
    with pytest.raises(SchemaMismatchError, match="_sequence") as caught:
        drain(spark, str(url), what)
    assert "RENAME COLUMN" in caught.value.remedy
    spark.sql(f"ALTER TABLE delta.`{what.table}` RENAME COLUMN seq TO _sequence")
    drain(spark, str(url), what)
    assert sorted(row["id"] for row in spark.read.format("delta").load(what.table).collect()) == [1, 2]


@pytest.mark.slow
def test_a_dead_letter_table_of_an_older_version_gets_the_new_columns(
    spark: SparkSession, folder: Path, url: StreamUrl
) -> None:
    what = ingestion(folder / "t")
    older = f"{STREAM}, payload BINARY, error STRING, _batch STRING, _group STRING, _member STRING, _number BIGINT"
    spark.createDataFrame([], older).write.format("delta").save(what.dead_letters().path)
    (report,) = ingest(spark, url, what, b"no JSON")
    assert report.dead == 1
    (row,) = spark.read.format("delta").load(what.dead_letters().path).collect()
    assert (bytes(row["payload"]), row["headers"], row["offset"]) == (b"no JSON", None, None)
