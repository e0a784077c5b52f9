"""Of groups that begin with one stream in one table at the same moment, one writes it, and the others are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches import target_table
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.replay import rewind
from spark_jobs.writing.layout import TableLayout
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import AutoStreamReset
from tests.support.command_line import failing, run
from tests.support.ingesting import drain, entries, ingestion
from tests.support.streams import assert_each_once, sequences_in_file, sequences_in_table, write_stream

pytestmark = pytest.mark.spark


def stream_of_users(folder: Path) -> str:
    url = f"file://{folder}/users-only.ss/users"
    with create_producer(url) as producer:
        producer.send(b'{"id": 1, "user": "u"}')
    return url


def after_check(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do something once, between the next look for other groups and the commit that follows it."""
    look = target_table.check_unwritten

    def looking(*args: object, **options: object) -> None:
        monkeypatch.setattr(target_table, "check_unwritten", look)
        look(*args, **options)  # type: ignore[arg-type]
        action()

    monkeypatch.setattr(target_table, "check_unwritten", looking)


def assert_refused(spark: SparkSession, url: str, second: Ingestion) -> None:
    """The second group, at each try and by each command."""
    kinds = [entry.kind for entry in entries(second)]
    for _ in range(2):
        with pytest.raises(InvalidOptionError, match="group 'first' already writes"):
            drain(spark, url, second)
    options = ("--table", second.table, "--group", second.group)
    failing(run("lag", url, *options), "group 'first' already writes")
    failing(run("verify", "--source", url, *options), "group 'first' already writes")
    failing(run("seek", "--source", url, *options, "--to", "2030-01-01T00:00:00Z"), "group 'first' already writes")
    assert [entry.kind for entry in entries(second)] == kinds


@pytest.mark.parametrize(
    "begins", ["table", *(pytest.param(one, marks=pytest.mark.slow) for one in ("layout", "stream"))]
)
def test_the_second_group_is_refused(
    begins: str, spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, users = write_stream(folder / "orders.ss", 10), stream_of_users(folder)
    first, second = (ingestion(folder / "t", group=group) for group in ("first", "second"))
    if begins == "layout":
        first, second = (replace(one, layout=TableLayout(partition_by=("_shard",))) for one in (first, second))
    else:
        drain(spark, users, second if begins == "stream" else ingestion(folder / "t", group="third"))
    after_check(monkeypatch, lambda: drain(spark, url, first))
    with pytest.raises(InvalidOptionError, match="group 'first' already writes"):
        drain(spark, url, second)
    assert_refused(spark, url, second)
    write_stream(folder / "orders.ss", 4)
    assert [report.rows for report in drain(spark, url, first)] == [4]
    found = sequences_in_table(folder / "t")
    assert {place for place in found if place[0] == "orders"} == sequences_in_file(folder / "orders.ss")
    assert set(found.values()) == {1}


@pytest.mark.slow
def test_a_rewound_group_replaces_no_rows_of_another(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is to replace was not there when it was rewound, and the other group did not see its claim."""
    monkeypatch.setattr("spark_jobs.ledger.ledger.NEAR", 1)
    url = write_stream(folder / "orders.ss", 10)
    first = ingestion(folder / "t", group="first", start=AutoStreamReset.LATEST)
    drain(spark, url, first)
    with open_batch_source(url) as source:
        assert rewind(spark, source, first, Bound.parse("earliest"))
    spark.sql(f"ALTER TABLE delta.`{first.table}` SET TBLPROPERTIES ('a' = 'b')")
    drain(spark, url, ingestion(folder / "t", group="second"))
    before = entries(first)
    with pytest.raises(InvalidOptionError):
        drain(spark, url, first)
    assert entries(first) == before
    assert_each_once(folder / "orders.ss", folder / "t")
