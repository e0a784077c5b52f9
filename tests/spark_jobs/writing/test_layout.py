"""How a table is made: partitions, clustering, properties and a name in the catalog, also under replays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.errors import AnalysisException, IllegalArgumentException, PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.ledger import COMMIT_COORDINATOR, Ledger
from spark_jobs.reading.source import STREAM_COLUMNS, STREAM_DESCRIPTIONS
from spark_jobs.session import REQUIRED_CONFIG, check_session
from spark_jobs.verify import verify
from spark_jobs.writing.layout import STATS_COLUMNS, TableLayout, create_table, register
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import (
    ConstraintViolatedError,
    InvalidOptionError,
    SchemaMismatchError,
    StreamAssetsError,
    UnsupportedError,
    WriteError,
)
from stream_consumers.memory import forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import ErrorPolicy
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import drain, ingestion
from tests.support.streams import assert_each_once, write_stream
from tests.support.written_log import WrittenLog

STATS = "_stream,_shard,_sequence,_timestamp"


def with_day(rows: DataFrame) -> DataFrame:
    """A column to lay the table out by."""
    return rows.selectExpr("*", "CAST(id % 3 AS STRING) AS kind", "CAST(_timestamp AS DATE) AS day")


def laid_out(folder: Path, **layout: Any) -> Ingestion:
    return replace(ingestion(folder / "t", records=20, transform=with_day), layout=TableLayout(**layout))


def replay(spark: SparkSession, url: str, what: Ingestion) -> int:
    """All of it is replaced; how many batches."""
    with open_batch_source(url) as source:
        return len(list(drain_batches(ReplayJob(spark, source, what, Replay()))))


def assert_right(folder: Path, url: str, what: Ingestion) -> None:
    assert_each_once(folder / "orders.ss", folder / "t")
    with open_batch_source(url) as source:
        assert [verdict.is_right for verdict in verify(source, what)] == [True, True]


def detail(spark: SparkSession, table: str) -> Row:
    return spark.sql(f"DESCRIBE DETAIL delta.`{table}`").collect()[0]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize(
    ("layout", "partitions", "clusters", "stats"),
    [
        ({"partition_by": ["KIND", "_shard"]}, ["kind", "_shard"], [], "_stream,_sequence,_timestamp"),
        ({"cluster_by": "user"}, [], ["user"], f"{STATS},user"),
    ],
    ids=["partitioned", "clustered"],
)
def test_a_table_is_made_as_it_is_to_be_laid_out_and_replays_keep_it(
    layout: Mapping[str, Any], partitions: list[str], clusters: list[str], stats: str, spark: SparkSession, folder: Path
) -> None:
    url = write_stream(folder / "orders.ss", 40)
    what = laid_out(folder, **layout, properties={"delta.enableChangeDataFeed": "true"})
    drain(spark, url, what)
    assert replay(spark, url, what) == 2
    write_stream(folder / "orders.ss", 10)
    drain(spark, url, what)
    assert_right(folder, url, what)
    found = detail(spark, what.table)
    assert (found["partitionColumns"], found["clusteringColumns"]) == (partitions, clusters)
    assert found["properties"]["delta.enableChangeDataFeed"] == "true"
    assert found["properties"]["delta.dataSkippingStatsColumns"] == stats
    assert comments(what.table) == STREAM_DESCRIPTIONS


def make_with_sql(spark: SparkSession, what: Ingestion) -> None:
    spark.sql(
        f"CREATE TABLE delta.`{what.table}` (id BIGINT COMMENT 'of the order', user STRING, _stream STRING, "
        "_shard BIGINT, _sequence BIGINT, _timestamp TIMESTAMP, "
        "day DATE GENERATED ALWAYS AS (CAST(_timestamp AS DATE))) USING DELTA PARTITIONED BY (day)"
    )
    spark.sql(f"ALTER TABLE delta.`{what.table}` ADD CONSTRAINT known CHECK (id < 45)")


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("is_made_with_sql", [True, False], ids=["by SQL", "by the first batch"])
def test_generated_columns_and_constraints_are_kept_by_replays(
    is_made_with_sql: bool, spark: SparkSession, folder: Path
) -> None:
    what = ingestion(folder / "t", records=20, decoder=Json("id BIGINT COMMENT 'of the order', user STRING"))
    if is_made_with_sql:
        make_with_sql(spark, what)
    else:
        layout = TableLayout(
            partition_by=["DAY"],
            generated_columns={"day": "CAST(_timestamp AS DATE)"},
            properties={"delta.constraints.known": "id < 45"},
            comment="Orders, each once; the shop's",
        )
        what = replace(what, layout=layout)
    url = write_stream(folder / "orders.ss", 40)
    drain(spark, url, what)
    assert replay(spark, url, what) == 2
    assert_right(folder, url, what)
    found = detail(spark, what.table)
    assert (found["partitionColumns"], found["description"]) == (["day"], what.layout.comment)
    days = DeltaTable(what.table).to_pyarrow_table()["day"].to_pylist()
    assert {day.isoformat() for day in days} == {"2023-11-14"}
    assert comments(what.table)["id"] == "of the order"
    write_stream(folder / "orders.ss", 50)
    with pytest.raises(ConstraintViolatedError):
        drain(spark, url, what)
    spark.sql(f"ALTER TABLE delta.`{what.table}` DROP CONSTRAINT known")
    drain(spark, url, what)
    assert_right(folder, url, what)


@pytest.mark.spark
@pytest.mark.slow
def test_a_replay_keeps_rows_whose_messages_are_gone_with_what_delta_computed(
    spark: SparkSession, folder: Path
) -> None:
    url = "memory://layout-gone/orders"
    with create_producer(url) as producer:
        for index in range(4):
            producer.send(b'{"id": %d, "user": "u"}' % index)
    layout = TableLayout(generated_columns={"twice": "id * 2"})
    what = replace(ingestion(folder / "t"), layout=layout, errors=ErrorPolicy(on_data_loss="record"))
    drain(spark, url, what)
    messages = memory_broker(StreamUrl.parse(url)).messages[Shard("orders", 0)]
    messages[:] = [message for message in messages if message.sequence != 1]
    assert replay(spark, url, what) == 1
    rows = DeltaTable(what.table).to_pyarrow_table(columns=["id", "twice"]).to_pylist()
    assert sorted((row["id"], row["twice"]) for row in rows) == [(0, 0), (1, 2), (2, 4), (3, 6)]
    forget_memory_broker(StreamUrl.parse(url))


@pytest.mark.spark
@pytest.mark.slow
def test_a_table_with_identities_is_rewound_and_maintained(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 20)
    what = ingestion(folder / "t")
    spark.sql(
        f"CREATE TABLE delta.`{what.table}` (number BIGINT GENERATED ALWAYS AS IDENTITY, id BIGINT, user STRING, "
        "_stream STRING, _shard BIGINT, _sequence BIGINT, _timestamp TIMESTAMP) USING DELTA"
    )
    drain(spark, url, what)
    with open_batch_source(url) as source:
        rewind(spark, source, what, Bound.parse("earliest"), replay_id="again")
    drain(spark, url, what)
    assert_each_once(folder / "orders.ss", folder / "t")
    assert len(set(DeltaTable(what.table).to_pyarrow_table(columns=["number"])["number"].to_pylist())) == 20


def comments(table: str) -> dict[str, object]:
    fields = DeltaTable(table).schema().fields
    return {column.name: column.metadata["comment"] for column in fields if "comment" in column.metadata}


@pytest.mark.spark
def test_a_layout_that_cannot_be_is_told_before_anything_is_read(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 10)
    with pytest.raises(SchemaMismatchError, match="nothing"):
        drain(spark, url, laid_out(folder, cluster_by=["nothing"]))
    assert not (folder / "t").exists()
    with pytest.raises(SchemaMismatchError, match="user"):
        drain(spark, url, laid_out(folder, generated_columns={"USER": "'me'"}))
    with pytest.raises(InvalidOptionError, match="nothing"):
        drain(spark, url, laid_out(folder, generated_columns={"hour": "nothing + 1"}))
    for condition in ("nothing > 0", "id + 1", "id >"):
        with pytest.raises(InvalidOptionError):
            drain(spark, url, laid_out(folder, properties={"delta.constraints.known": condition}))
    assert not (folder / "t").exists()
    drain(spark, url, laid_out(folder, partition_by=["KIND", "_shard"]))
    drain(spark, url, laid_out(folder))
    found = detail(spark, str(folder / "t"))
    assert (found["partitionColumns"], found["clusteringColumns"]) == (["kind", "_shard"], [])
    assert found["properties"][STATS_COLUMNS] == "_stream,_sequence,_timestamp"
    assert comments(str(folder / "t")) == STREAM_DESCRIPTIONS
    with pytest.raises(SchemaMismatchError, match="twice"):
        drain(spark, url, laid_out(folder, generated_columns={"twice": "id * 2"}))
    with pytest.raises(SchemaMismatchError, match=r"partitioned by \['kind', '_shard'\], not by \['day'\]"):
        drain(spark, url, laid_out(folder, partition_by=["day"]))


def test_a_session_puts_no_variable_into_a_text_or_a_name(spark: SparkSession) -> None:
    for name in REQUIRED_CONFIG:
        spark.conf.unset(name)
    spark.conf.set("spark.sql.variable.substitute", "true")
    assert spark.sql("SELECT '${env:PATH}' AS `${env:HOME}`").first() != Row(**{"${env:HOME}": "${env:PATH}"})
    check_session(spark)
    assert spark.sql("SELECT '${env:PATH}' AS `${env:HOME}`").first() == Row(**{"${env:HOME}": "${env:PATH}"})
    assert {name: spark.conf.get(name) for name in REQUIRED_CONFIG} == REQUIRED_CONFIG


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (AnalysisException("[DELTA_UNKNOWN_CONFIGURATION] Unknown configuration: delta.foo"), InvalidOptionError),
        (IllegalArgumentException('For input string: "nonsense"'), InvalidOptionError),
        (PySparkException("the storage does not answer"), WriteError),
    ],
    ids=str,
)
def test_a_layout_that_spark_refuses_is_not_tried_again(
    raised: Exception, expected: type[StreamAssetsError], folder: Path
) -> None:
    spark = Mock(sql=Mock(side_effect=raised))
    columns, layout = StructType(), TableLayout(properties={"delta.foo": "1"})
    with pytest.raises(expected):
        create_table(spark, DeltaLog(str(folder / "t")), columns, layout)


def test_a_storage_that_does_not_answer_is_no_fault_of_the_name() -> None:
    """In a classic session that is a bare error of Java."""
    with pytest.raises(WriteError) as refused:
        register(Mock(sql=Mock(side_effect=RuntimeError("connection refused"))), "s3a://lake/orders", "sales.orders")
    assert refused.value.detail == "connection refused"


def test_who_was_slower_to_make_the_table_is_told_that_it_is_partitioned_in_another_way(folder: Path) -> None:
    table = str(folder / "t")
    made_by_another = Mock(sql=lambda _: write_deltalake(table, pa.table({"a": [1], "b": [2]}), partition_by="a"))
    with pytest.raises(SchemaMismatchError, match=r"partitioned by \['a'\], not by \['b'\]"):
        create_table(made_by_another, DeltaLog(table), StructType(), TableLayout(partition_by=["b"]))


@pytest.mark.parametrize(
    "option", [{}, {"generated_columns": {"KEY": "CAST(user AS BINARY)"}}], ids=["own", "computed"]
)
def test_bytes_divide_no_table(folder: Path, option: dict[str, Any]) -> None:
    """Delta keeps the values of partition columns as text, so that different bytes would become the same."""
    table = folder / "t"
    computed = StructType([StructField("key", BinaryType())])
    frame = Mock(schema=StructType([StructField("user", StringType()), *computed.fields]))
    spark = Mock(**{"createDataFrame.return_value.selectExpr.return_value": frame})
    columns = StructType([StructField("user", StringType())]) if option else computed
    with pytest.raises(InvalidOptionError, match="Key"):
        create_table(spark, DeltaLog(str(table)), columns, TableLayout(partition_by=["Key"], **option))
    assert not spark.sql.called


def test_a_table_that_another_program_divided_by_bytes_is_refused(spark: SparkSession, folder: Path) -> None:
    write_deltalake(str(folder / "t"), pa.table({"id": [1], "user": [b"x"]}), partition_by="user")
    url = write_stream(folder / "orders.ss", 3)
    with pytest.raises(InvalidOptionError, match="user"):
        drain(spark, url, ingestion(folder / "t", decoder=Json("id BIGINT, user BINARY")))
    assert DeltaTable(str(folder / "t")).version() == 0


@pytest.fixture
def names(spark: SparkSession) -> Iterator[list[str]]:
    """Names in the catalog, which outlives a test."""
    found: list[str] = []
    yield found
    for name in found:
        spark.sql(f"DROP TABLE IF EXISTS {name}")


@pytest.mark.spark
@pytest.mark.slow
def test_a_table_has_a_name_in_the_catalog(spark: SparkSession, folder: Path, names: list[str]) -> None:
    names.append(f"orders_{folder.name.replace('-', '_')}")
    url = write_stream(folder / "orders.ss", 40)
    what = laid_out(folder, catalog_table=names[0])
    drain(spark, url, what)
    assert spark.table(names[0]).count() == 40
    assert replay(spark, url, what) == 2
    assert spark.table(names[0]).count() == 40
    other = replace(what, table=str(folder / "other"))
    with pytest.raises(InvalidOptionError):
        drain(spark, url, other)
    with pytest.raises(InvalidOptionError, match=r"nowhere\.orders"):
        drain(spark, url, laid_out(folder, catalog_table="nowhere.orders"))


@pytest.mark.parametrize(
    "options",
    [
        {"partition_by": ["a"], "cluster_by": ["b"]},
        {"partition_by": ["a", "A"]},
        {"cluster_by": [""]},
        {"properties": {"delta.enableChangeDataFeed": True}},
        {"properties": {"delta.setTransactionRetentionDuration": "interval 1 day"}},
        {"properties": {"DELTA.setTransactionRetentionDuration": "interval 1 day"}},
        {"generated_columns": {"day": " "}},
        {"generated_columns": {"day": "1", "DAY": "2"}},
        {"catalog_table": "a.b.c.d"},
        {"catalog_table": "s3://lake/orders"},
        {"catalog_table": ""},
        {"catalog_table": ["a"]},
        {"partition_by": 5},
        {"properties": "delta.enableChangeDataFeed=true"},
        {"properties": [("a", "b")]},
        {"generated_columns": "day"},
        {"comment": 5},
        {"comment": "of ${env.X}"},
        {"properties": {"delta.x": "${env.X}"}},
        {"properties": {"fs.file.impl": "x"}},
        {"generated_columns": {"day": "'${env.X}'"}},
    ],
    ids=str,
)
def test_a_layout_that_makes_no_sense_is_refused(options: Any) -> None:
    with pytest.raises(InvalidOptionError):
        TableLayout(**options)


@pytest.mark.spark
def test_names_with_dots_and_commas_lay_a_table_out(spark: SparkSession, folder: Path) -> None:
    names = ["u.v", "u'v", "straße"]
    layout = TableLayout(cluster_by=names, properties={STATS_COLUMNS: "id, `u.v`"})
    assert layout.all_properties()[STATS_COLUMNS].endswith("_timestamp,`u.v`,`u'v`,`straße`,id")
    columns = StructType([StructField(name, StringType()) for name in [*STREAM_COLUMNS, *names, "id"]])
    create_table(spark, DeltaLog(str(folder / "t")), columns, layout)
    assert spark.read.format("delta").load(str(folder / "t")).columns == columns.names


@pytest.mark.parametrize(
    "made",
    [
        {"properties": {f"{COMMIT_COORDINATOR}-preview": "dynamodb"}},
        {"features": ["catalogManaged"]},
        {"features": ["catalogOwned-preview"]},
    ],
    ids=str,
)
def test_a_table_whose_commits_are_a_catalogs_is_refused(made: Mapping[str, Any], folder: Path) -> None:
    """Its newest commits may not be files yet: what the log says of positions would be old."""
    log = WrittenLog(folder / "t", **made)
    log.ours(LedgerEntry("init", "g", "g/main", 1, "main", "b", -1))
    with pytest.raises(UnsupportedError):
        Ledger(log.log(), group="g", member="main").read()
