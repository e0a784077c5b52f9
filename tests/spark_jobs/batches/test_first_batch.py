"""A large first batch creates its table, in one commit with the positions of the group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import DRIVER_RECORDS, Ingestion, Step
from stream_consumers.errors import InvalidOptionError
from tests.support.ingesting import drain, entries, ingestion
from tests.support.kafka_topics import Once
from tests.support.killed_runs import kill_in_turn
from tests.support.streams import assert_each_once, sequences_in_table, write_stream

MESSAGES = DRIVER_RECORDS + 500


def large(table: Path, *, group: str = "lakehouse") -> Ingestion:
    return ingestion(table, records=DRIVER_RECORDS + 100, group=group)


@pytest.mark.parametrize("malformed", [frozenset[int](), frozenset({7, MESSAGES - 1})], ids=["clean", "malformed"])
def test_its_ledger_is_that_of_a_table_which_began_without_rows(
    spark: SparkSession, folder: Path, malformed: frozenset[int]
) -> None:
    url, what = write_stream(folder / "orders.ss", MESSAGES, malformed=malformed), large(folder / "t")
    drain(spark, url, what)
    assert [(entry.kind, entry.number) for entry in entries(what)] == [("batch", 1), ("batch", 2)]
    assert_each_once(folder / "orders.ss", folder / "t")
    small = replace(ingestion(folder / "small"), limits=replace(what.limits, max_records=1000))
    drain(spark, url, small)
    assert entries(small)[0].kind == "init"
    one, other = what.ledger().read(), small.ledger().read()
    assert (one.shards, one.sharing, one.identities) == (other.shards, other.sharing, other.identities)
    assert (one.positions, one.hint, one.totals.dead) == (other.positions, other.hint, other.totals.dead)


def test_of_two_groups_that_create_a_table_one_is_refused(spark: SparkSession, folder: Path) -> None:
    url, table = write_stream(folder / "orders.ss", MESSAGES), folder / "t"
    other = Once(Step.WRITING, lambda: drain(spark, url, large(table, group="other")))
    with pytest.raises(InvalidOptionError, match="other"):
        drain(spark, url, large(table), other)
    assert_each_once(folder / "orders.ss", table)
    assert {entry.group for entry in entries(large(table))} == {"other"}


def test_of_two_runs_that_create_a_table_one_plans_again(spark: SparkSession, folder: Path) -> None:
    url, what = write_stream(folder / "orders.ss", MESSAGES), large(folder / "t")
    other = Once(Step.WRITING, lambda: drain(spark, url, what))
    assert drain(spark, url, what, other) == []
    assert_each_once(folder / "orders.ss", folder / "t")


@pytest.mark.slow
@pytest.mark.kill
def test_a_run_that_is_killed_while_it_creates_the_table_is_continued(
    spark: SparkSession, server: str, folder: Path
) -> None:
    url, table = write_stream(folder / "orders.ss", MESSAGES, malformed=frozenset({7})), folder / "t"
    faults = ["planned", "writing", "unclean", "mid-dead-letters", "dead letters written", "mid-write"]
    words = ("lakehouse", "resumable", server, "main", "")
    kill_in_turn(url, table, faults, *words, records=large(table).limits.max_records)
    assert not sequences_in_table(table), "each was killed before its commit"
    kill_in_turn(url, table, ["verified"], *words, records=large(table).limits.max_records)
    assert len(sequences_in_table(table)) == DRIVER_RECORDS + 99
    drain(spark, url, large(table))
    assert_each_once(folder / "orders.ss", table)
    assert set(sequences_in_table(f"{table}_dead_letters")) == {("orders", 1, 4)}
