"""Payloads that crash their decoder: they become dead letters, and nothing else does, wherever they are decoded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.dead_letter_jobs import Redrive, RedriveJob
from spark_jobs.batches.job import drain_batches
from spark_jobs.decoding import isolation
from stream_consumers.errors import DecoderCrashedError
from stream_consumers.urls import StreamUrl
from tests.support.crashing import HUNGRY, SEGFAULT, Broken, Crashing
from tests.support.crashing_streams import assert_refused, write_crashing
from tests.support.decoders_of_runs import CRASHING
from tests.support.ingesting import ORDERS, drain, entries, ingestion
from tests.support.killed_runs import logs, running
from tests.support.one_run import DRIVER_RECORDS_VARIABLE
from tests.support.redis_tables import Stream
from tests.support.spark_servers import spark_servers
from tests.support.steps import Steps
from tests.support.streams import assert_each_once, sequences_in_table

pytestmark = pytest.mark.spark
MESSAGES = 24
WHERE = ["driver", "workers"]


@pytest.mark.parametrize("driver_records", [1000, 0], ids=WHERE)
def test_what_crashes_the_decoder_is_a_dead_letter(driver_records: int, spark: SparkSession, folder: Path) -> None:
    url = write_crashing(folder / "orders.ss", MESSAGES, segfault=5, hungry=17)
    what = replace(ingestion(folder / "t", decoder=Crashing()), driver_records=driver_records)
    (report,) = drain(spark, url, what, steps := Steps())
    assert steps.ways() == ["careful" if driver_records else "both"]
    assert (report.rows, report.dead, sum(report.messages.values()), sum(report.lag.values())) == (22, 2, 22, 0)
    assert_refused(folder / "t", SEGFAULT, HUNGRY)
    assert_each_once(folder / "orders.ss", folder / "t")


@pytest.mark.slow
@pytest.mark.parametrize("driver_records", [1000, 0], ids=WHERE)
def test_a_decoder_that_crashes_for_every_message_fails_the_run(
    driver_records: int, spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of executors it is what it is.
    monkeypatch.setattr(isolation, "MOST_CRASHES", 3)
    url = write_crashing(folder / "orders.ss", MESSAGES)
    what = replace(ingestion(folder / "t", decoder=Broken()), driver_records=driver_records)
    with pytest.raises(DecoderCrashedError):
        drain(spark, url, what)
    assert [entry.kind for entry in entries(what)] == ["init"]
    assert not sequences_in_table(f"{folder}/t_dead_letters")


@pytest.mark.slow
@pytest.mark.parametrize("driver_records", [1000, 0], ids=WHERE)
def test_claimed_entries_that_crash_the_decoder_are_dead(
    driver_records: int, spark: SparkSession, redis_address: str, folder: Path
) -> None:
    stream = Stream(redis_address, folder, shards=1, mode="load_balanced")
    stream.add(MESSAGES, payload=lambda index: SEGFAULT if index == 5 else b'{"id": %d, "user": "u"}' % index)
    what = stream.ingestion(decoder=Crashing(), driver_records=driver_records)
    (report,) = stream.drain(spark, what)
    assert (report.rows, report.dead) == (23, 1)
    assert_refused(folder / "t", SEGFAULT)
    stream.assert_each_once()
    stream.client.close()


@pytest.mark.slow
def test_a_redrive_leaves_what_crashes_the_decoder(spark: SparkSession, folder: Path) -> None:
    url = write_crashing(folder / "orders.ss", MESSAGES, segfault=5, hungry=17)
    what = replace(ingestion(folder / "t", decoder=Crashing()), driver_records=1000)
    drain(spark, url, what)
    still = RedriveJob(spark, what, Redrive(), url=StreamUrl.parse(url))
    assert list(drain_batches(still)) == []
    assert (still.outcome.decoded, still.outcome.dead) == (0, 2)
    mended = RedriveJob(spark, replace(what, decoder=ORDERS), Redrive(), url=StreamUrl.parse(url))
    assert [report.rows for report in drain_batches(mended)] == [2]
    assert sum(sequences_in_table(folder / "t").values()) == MESSAGES


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.parametrize("driver_records", ["1000", "0"], ids=WHERE)
def test_a_run_on_the_local_spark_server_outlives_what_crashes_the_decoder(driver_records: str, folder: Path) -> None:
    url, table = write_crashing(folder / "orders.ss", MESSAGES, segfault=5, hungry=17), folder / "t"
    environment = {**CRASHING, DRIVER_RECORDS_VARIABLE: driver_records}
    with spark_servers(folder / "servers") as servers:
        words = ("lakehouse", "resumable", f"servers:{servers.folder}")
        with running(url, table, "", *words, records=MESSAGES, environment=environment) as run:
            assert run.wait() == 0, logs(table)
    assert_refused(table, SEGFAULT, HUNGRY)
    assert_each_once(folder / "orders.ss", table)
