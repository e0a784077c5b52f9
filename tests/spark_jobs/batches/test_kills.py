"""A run in its own process, killed with SIGKILL at each step of a batch, then resumed: each message once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark_jobs.batches.test_ingest import drain, ingestion
from tests.support.polling import until
from tests.support.settings import ROOT
from tests.support.streams import assert_each_once, sequences_in_table, write_stream

pytestmark = [pytest.mark.spark, pytest.mark.kill]
MESSAGES = 400
RECORDS = 150
MALFORMED = frozenset({10, 170, 399})


@contextmanager
def running(
    url: str, table: Path, fault: str = "", *more: str, records: int = RECORDS, module: str = "one_run"
) -> Iterator[subprocess.Popen[bytes]]:
    """A run in a process group of its own; whatever is left of it is killed at the end."""
    command = [sys.executable, "-m", f"tests.spark.{module}", url, str(table), str(records), fault, *more]
    with table.with_name(f"run-{len(os.listdir(table.parent))}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def logs(table: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(table.parent.glob("run-*.log")))


def kill_in_turn(
    url: str, table: Path, faults: Sequence[str], *more: str, records: int = 40, module: str = "one_run"
) -> None:
    """A run after the other, each killed at its fault, so that each one finds what the one before left behind."""
    for fault in faults:
        with running(url, table, fault, *more, records=records, module=module) as process:
            assert process.wait(180) == -signal.SIGKILL, logs(table)


def test_runs_that_are_killed_between_any_two_steps_are_continued(
    spark: SparkSession, server: str, folder: Path
) -> None:
    """Spark has nothing to do at these places, so that a server that survives is as good as a JVM that dies, too."""
    url = write_stream(folder / "orders.ss", MESSAGES, malformed=frozenset(range(5, MESSAGES, 20)))
    table = folder / "t"
    faults = ["claimed", "planned", "read", "dead letters written", "rows written", "verified", "committed"]
    kill_in_turn(url, table, faults, "lakehouse", "resumable", server)
    assert 0 < sum(sequences_in_table(table).values()) < MESSAGES, "each was killed on the way"
    drain(spark, url, ingestion(table))
    assert_each_once(folder / "orders.ss", table)


def test_runs_that_are_killed_in_the_middle_of_a_write_are_continued(spark: SparkSession, folder: Path) -> None:
    """With and without the JVM."""
    url = write_stream(folder / "orders.ss", MESSAGES, malformed=frozenset(range(5, MESSAGES, 20)))
    table = folder / "t"
    kill_in_turn(url, table, ["mid-dead-letters!group-SIGKILL", "mid-write", "mid-write!group-SIGKILL"])
    drain(spark, url, ingestion(table))
    assert_each_once(folder / "orders.ss", table)


def test_a_run_stopped_in_the_middle_of_its_write_wakes_up_after_another_one_finished(
    spark: SparkSession, folder: Path
) -> None:
    url = write_stream(folder / "orders.ss", MESSAGES, malformed=MALFORMED)
    table = folder / "t"
    with running(url, table, "mid-write@3!group-SIGSTOP") as zombie:
        until(lambda: list(folder.glob("faults-*/fault-*")), seconds=180, what="the stop")
        until(lambda: is_stopped(zombie.pid), seconds=10, what="the process being stopped")
        drain(spark, url, ingestion(table))
        assert_each_once(folder / "orders.ss", table)
        os.killpg(zombie.pid, signal.SIGCONT)
        assert zombie.wait(180) == 0, logs(table)
    assert "drained" in logs(table)
    drain(spark, url, ingestion(table))
    assert_each_once(folder / "orders.ss", table)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_two_runs_at_the_same_time_write_each_message_once(server: str, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", MESSAGES, malformed=MALFORMED)
    table = folder / "t"
    words = ("", "lakehouse", "resumable", server)
    with running(url, table, *words, records=40) as one, running(url, table, *words, records=60) as other:
        assert one.wait(240) == 0, logs(table)
        assert other.wait(240) == 0, logs(table)
    assert_each_once(folder / "orders.ss", table)
