"""Of groups that begin with one stream in one table at the same moment, one writes it, and the others are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches import writer
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.writing.layout import TableLayout
from stream_consumers.create import create_producer
from stream_consumers.errors import InvalidOptionError
from tests.support.command_line import failing, run
from tests.support.ingesting import drain, entries, ingestion
from tests.support.streams import sequences_in_file, sequences_in_table, write_stream

pytestmark = pytest.mark.spark


def stream_of_users(folder: Path) -> str:
    url = f"file://{folder}/users-only.ss/users"
    with create_producer(url) as producer:
        producer.send(b'{"id": 1, "user": "u"}')
    return url


def after_check(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do something once, between the next look for other groups and the commit that follows it."""
    look = writer.check_unwritten

    def looking(*args: object, **options: object) -> None:
        monkeypatch.setattr(writer, "check_unwritten", look)
        look(*args, **options)  # type: ignore[arg-type]
        action()

    monkeypatch.setattr(writer, "check_unwritten", looking)


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


@pytest.mark.parametrize("begins", ["table", "layout", "stream"])
def test_the_second_of_two_groups_is_refused(
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
