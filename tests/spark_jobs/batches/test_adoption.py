"""Copies of tables: they have the rows of a stream and no positions, so they are refused, or adopted deliberately."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.ledger_recovery import adopt, plan_adoption
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import InvalidOptionError, SourceRecreatedError, StreamNotFoundError, UnsupportedError
from stream_consumers.options import ConsumerMode
from tests.support.command_line import failing, run
from tests.support.ingesting import drain, entries, ingestion
from tests.support.streams import shard, write_stream

pytestmark = pytest.mark.spark
COPIES = {
    "as select": "CREATE TABLE delta.`{copy}` USING delta AS SELECT * FROM delta.`{table}`",
    "shallow clone": "CREATE TABLE delta.`{copy}` SHALLOW CLONE delta.`{table}`",
}


def places(spark: SparkSession, what: Ingestion) -> list[tuple[int, int]]:
    rows = spark.read.format("delta").load(what.table).select("_shard", "_sequence").collect()
    return sorted((row["_shard"], row["_sequence"]) for row in rows)


def stream_of_users(folder: Path) -> str:
    url = f"file://{folder}/users-only.ss/users"
    with create_producer(url) as producer:
        for index in range(6):
            producer.send(b'{"id": %d, "user": "u"}' % index)
    return url


@pytest.mark.parametrize("how", ["shallow clone", pytest.param("as select", marks=pytest.mark.slow)])
def test_a_copy_is_refused_until_its_rows_are_adopted(spark: SparkSession, folder: Path, how: str) -> None:
    url = write_stream(folder / "orders.ss", 10)
    original, copy = ingestion(folder / "t"), ingestion(folder / "copy")
    drain(spark, url, original)
    spark.sql(COPIES[how].format(table=original.table, copy=copy.table))
    write_stream(folder / "orders.ss", 4)
    with pytest.raises(InvalidOptionError, match="rows of orders") as raised:
        drain(spark, url, copy)
    assert f"stream-assets adopt --source {url} --table {copy.table} --group lakehouse" in raised.value.remedy
    assert entries(copy) == []
    with open_batch_source(url) as source:
        assert adopt(spark, source, copy) == {shard(0): 6, shard(1): 6}
        with pytest.raises(InvalidOptionError, match="already"):
            plan_adoption(source, copy)
    assert [report.rows for report in drain(spark, url, copy)] == [4]
    drain(spark, url, original)
    assert places(spark, copy) == places(spark, original) == [(s, n) for s in (0, 1) for n in range(1, 8)]


def test_after_a_restore_to_before_the_adopt_what_is_left_is_adopted_again(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 6, shards=1)
    original, copy = ingestion(folder / "t"), ingestion(folder / "copy")
    drain(spark, url, original)
    rows = f"SELECT * FROM delta.`{original.table}` WHERE _sequence"
    spark.sql(f"CREATE TABLE delta.`{copy.table}` USING delta AS {rows} <= 3")
    spark.sql(f"INSERT INTO delta.`{copy.table}` {rows} > 3")
    with open_batch_source(url) as source:
        assert adopt(spark, source, copy) == {shard(0): 7}
    write_stream(folder / "orders.ss", 2, shards=1)
    drain(spark, url, copy)
    spark.sql(f"RESTORE TABLE delta.`{copy.table}` TO VERSION AS OF 0")
    with pytest.raises(InvalidOptionError):
        drain(spark, url, copy)
    with open_batch_source(url) as source:
        assert adopt(spark, source, copy) == {shard(0): 4}
    drain(spark, url, copy)
    assert places(spark, copy) == [(0, n) for n in range(1, 9)]


@pytest.mark.slow
def test_rows_of_a_stream_that_a_group_begins_with_later_are_no_less_of_a_copy(
    spark: SparkSession, folder: Path
) -> None:
    orders, other = ingestion(folder / "t"), ingestion(folder / "u", group="other")
    url = write_stream(folder / "orders.ss", 4)
    drain(spark, url, orders)
    users = stream_of_users(folder)
    drain(spark, users, other)
    spark.sql(f"INSERT INTO delta.`{orders.table}` SELECT * FROM delta.`{other.table}`")
    with pytest.raises(InvalidOptionError, match="rows of users"):
        drain(spark, users, orders)
    with open_batch_source(users) as source:
        assert adopt(spark, source, orders) == {shard(0, "users"): 7}
    assert drain(spark, users, orders) == drain(spark, url, orders) == []


@pytest.mark.slow
def test_another_group_that_writes_a_stream_is_seen_when_it_is_added_later(spark: SparkSession, folder: Path) -> None:
    orders, users = write_stream(folder / "orders.ss", 4), stream_of_users(folder)
    mine, other = ingestion(folder / "t"), ingestion(folder / "t", group="other")
    drain(spark, orders, mine)
    drain(spark, users, other)
    with pytest.raises(InvalidOptionError, match="group 'other' already writes"):
        drain(spark, users, mine)


def test_what_cannot_be_adopted(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 10)
    what = ingestion(folder / "t")
    with open_batch_source(url) as source:
        with pytest.raises(StreamNotFoundError, match="no rows"):
            plan_adoption(source, what)
        claims = replace(what, sharing=ConsumerMode.LOAD_BALANCED, claims=True)
        with pytest.raises(UnsupportedError, match="one by one"):
            plan_adoption(source, claims)
    drain(spark, url, what)
    copy = ingestion(folder / "copy")
    spark.sql(COPIES["as select"].format(table=what.table, copy=copy.table))
    shorter = write_stream(folder / "shorter.ss", 4)
    with open_batch_source(shorter) as source, pytest.raises(SourceRecreatedError, match="ends before the last row"):
        adopt(spark, source, copy)


def test_the_command_says_where_it_would_go_on_and_then_does(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 10)
    what, copy = ingestion(folder / "t"), ingestion(folder / "copy")
    drain(spark, url, what)
    spark.sql(COPIES["as select"].format(table=what.table, copy=copy.table))
    words = ("adopt", "--source", url, "--table", copy.table, "--group", "lakehouse")
    said = run(*words, "--dry-run", "--json")
    assert said.exit_code == 0, said.output
    assert entries(copy) == []
    done = run(*words, "--json")
    assert json.loads(said.stdout)["rows"] == json.loads(done.stdout)["rows"]
    assert dict(copy.ledger().read().positions) == {shard(0): 6, shard(1): 6}
    failing(run(*words), "already")
