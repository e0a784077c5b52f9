"""A run in its own process, killed with SIGKILL at each step of a batch, then resumed: each message once."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.ingesting import drain, ingestion
from tests.support.killed_runs import asleep, kill_in_turn, logs, running
from tests.support.streams import assert_each_once, sequences_in_table, write_stream

pytestmark = [pytest.mark.spark, pytest.mark.kill]
MESSAGES = 400
MALFORMED = frozenset({10, 170, 399})


def test_runs_that_are_killed_between_any_two_steps_are_continued(
    spark: SparkSession, server: str, folder: Path
) -> None:
    """Spark has nothing to do at these places, so that a server that survives is as good as a JVM that dies, too."""
    url = write_stream(folder / "orders.ss", MESSAGES, malformed=frozenset(range(5, MESSAGES, 20)))
    table = folder / "t"
    faults = ["initialized", "planned", "read", "dead letters written", "rows written", "verified", "committed"]
    kill_in_turn(url, table, faults, "lakehouse", "resumable", server)
    assert 0 < sum(sequences_in_table(table).values()) < MESSAGES, "each was killed on the way"
    drain(spark, url, ingestion(table))
    assert_each_once(folder / "orders.ss", table)


@pytest.mark.slow
def test_runs_that_are_killed_in_the_middle_of_a_write_are_continued(spark: SparkSession, folder: Path) -> None:
    """With and without the JVM."""
    url = write_stream(folder / "orders.ss", MESSAGES, malformed=frozenset(range(5, MESSAGES, 20)))
    table = folder / "t"
    kill_in_turn(url, table, ["mid-dead-letters!group-SIGKILL", "mid-write", "mid-write!group-SIGKILL"])
    drain(spark, url, ingestion(table))
    assert_each_once(folder / "orders.ss", table)


@pytest.mark.slow
def test_a_run_stopped_in_the_middle_of_its_write_wakes_up_after_another_one_finished(
    spark: SparkSession, folder: Path
) -> None:
    url = write_stream(folder / "orders.ss", MESSAGES, malformed=MALFORMED)
    table = folder / "t"
    with asleep(url, table, "mid-write@3!group-SIGSTOP"):
        drain(spark, url, ingestion(table))
        assert_each_once(folder / "orders.ss", table)
    drain(spark, url, ingestion(table))
    assert_each_once(folder / "orders.ss", table)


@pytest.mark.slow
def test_two_runs_at_the_same_time_write_each_message_once(server: str, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", MESSAGES, malformed=MALFORMED)
    table = folder / "t"
    words = ("", "lakehouse", "resumable", server)
    with running(url, table, *words, records=40) as one, running(url, table, *words, records=60) as other:
        assert one.wait() == 0, logs(table)
        assert other.wait() == 0, logs(table)
    assert_each_once(folder / "orders.ss", table)
