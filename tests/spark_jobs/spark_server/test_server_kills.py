"""The server of a run is killed with SIGKILL at each step of a batch, its client, or both: each message once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.ingesting import drain, ingestion
from tests.support.killed_runs import logs, running
from tests.support.spark_servers import spark_servers
from tests.support.streams import assert_each_once, sequences_in_table, write_stream

pytestmark = [pytest.mark.spark, pytest.mark.kill, pytest.mark.slow]
MESSAGES = 400
FAILS = 1
# At the last two the batch is in the table already, and the run notices with the next one.
SERVER = ["read", "dead letters written", "mid-write", "rows written", "committed"]


def test_the_server_its_client_or_both_die_in_the_middle_of_a_batch(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", MESSAGES, malformed=frozenset(range(5, MESSAGES, 20)))
    table = folder / "t"
    deaths = [(f"{step}!server-SIGKILL", FAILS) for step in SERVER] + [("mid-write", -signal.SIGKILL)]
    with spark_servers(folder / "servers") as servers:
        for fault, ending in deaths:
            words = ("lakehouse", "resumable", f"servers:{servers.folder}")
            with running(url, table, fault, *words, records=40) as run:
                assert run.wait() == ending, logs(table)
        said = logs(table)
    assert said.count("SparkEndedError: the local Spark server of this run") >= len(SERVER), said
    assert 0 < sum(sequences_in_table(table).values()) < MESSAGES, "each ended on the way"
    drain(spark, url, ingestion(table))
    assert_each_once(folder / "orders.ss", table)
