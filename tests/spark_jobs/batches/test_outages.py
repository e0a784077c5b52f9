"""Real servers are killed while a run reads them and started again within its budget, or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Step
from spark_jobs.batches.job import batch_events
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.run_ingestion import drain, run_events
from stream_consumers.errors import BrokerUnavailableError
from stream_consumers.kafka import membership
from tests.support.command_line import SCHEMA, run
from tests.support.kafka_topics import Once, Topics, assert_each_once
from tests.support.one_run import QUICK
from tests.support.outages import Stoppable, stoppable_kafka, stoppable_redis
from tests.support.redis_tables import Stream
from tests.support.scripted_jobs import reports_when_waiting
from tests.support.topics import fill

BUDGET_SECONDS = 300.0


@pytest.fixture
def redis(folder: Path) -> Iterator[tuple[Stoppable, str]]:
    with stoppable_redis(folder) as made:
        yield made


@pytest.fixture
def server_and_topics(spark: SparkSession, folder: Path) -> Iterator[tuple[Stoppable, Topics]]:
    with stoppable_kafka(folder) as (server, address):
        yield server, Topics(address, spark, folder)


def stopping(server: Stoppable, step: Step, number: int | None = None) -> Once:
    return Once(step, server.stop, number=number)


@pytest.mark.parametrize(
    ("mode", "step"),
    [
        pytest.param("resumable", Step.PLANNED, marks=pytest.mark.slow),
        pytest.param("resumable", Step.VERIFIED, marks=pytest.mark.slow),
        pytest.param("resumable", Step.COMMITTED, marks=pytest.mark.slow),
        pytest.param("load_balanced", Step.PLANNED, marks=pytest.mark.slow),
        ("load_balanced", Step.VERIFIED),
        pytest.param("load_balanced", Step.COMMITTED, marks=pytest.mark.slow),
    ],
)
def test_an_ingestion_from_redis_outlives_an_outage(
    spark: SparkSession, folder: Path, redis: tuple[Stoppable, str], step: Step, mode: str
) -> None:
    server, address = redis
    stream = Stream(address, folder, mode=mode)
    stream.add(60)
    what = stream.ingestion(20, retry_seconds=BUDGET_SECONDS)
    watch = stopping(server, step)
    events = run_events(spark, stream.source, what, observer=watch)
    reports = list(reports_when_waiting(events, server.start_when_told))
    assert watch.is_done
    assert server.told
    assert f"of {BUDGET_SECONDS:g} s at most" in server.told[0]
    stream.assert_each_once()
    assert sum(report.rows for report in reports) == 60, "each batch is reported once"


@pytest.mark.slow
def test_an_interrupted_delivery_does_not_count(
    spark: SparkSession, folder: Path, redis: tuple[Stoppable, str]
) -> None:
    server, address = redis
    stream = Stream(address, folder, mode="load_balanced")
    stream.options["max_deliveries"] = 2
    stream.add(10)
    what = stream.ingestion(20, retry_seconds=BUDGET_SECONDS)
    count = 0

    def stop_thrice(step: Step, batch: object) -> None:
        nonlocal count
        if step is Step.PLANNED and count < 3:
            count += 1
            server.stop()

    events = run_events(spark, stream.source, what, observer=stop_thrice)
    reports = list(reports_when_waiting(events, server.start_when_told))
    assert count == 3
    assert [(report.rows, report.dead) for report in reports] == [(10, 0)], "as if it was delivered for the first time"
    stream.assert_each_once()


@pytest.mark.slow
def test_after_the_budget_the_next_run_goes_on(spark: SparkSession, folder: Path, redis: tuple[Stoppable, str]) -> None:
    server, address = redis
    stream = Stream(address, folder)
    stream.add(60)
    watch = stopping(server, Step.PLANNED, 2)
    with pytest.raises(BrokerUnavailableError):
        list(drain(spark, stream.source, stream.ingestion(20, retry_seconds=3), observer=watch))
    server.start()
    stream.drain(spark)
    stream.assert_each_once()


@pytest.mark.slow
def test_replays_and_rewinds_outlive_an_outage(spark: SparkSession, folder: Path, redis: tuple[Stoppable, str]) -> None:
    server, address = redis
    stream = Stream(address, folder)
    stream.add(60)
    stream.drain(spark)
    what = stream.ingestion(20, retry_seconds=BUDGET_SECONDS)
    with stream.source.open() as opened:
        # The replay writes the batches 3 to 5.
        watch = stopping(server, Step.PLANNED, 4)
        job = ReplayJob(spark, opened, what, Replay(), observer=watch)
        reports = reports_when_waiting(batch_events(job), server.start_when_told)
        assert sum(report.replaced or 0 for report in reports) == 60
        assert len(server.told) == 1
        stream.assert_each_once()
        server.stop()
        moves = rewind(spark, opened, what, Bound.parse("earliest"), on_wait=server.start_when_told)
        assert len(server.told) == 2
        assert len(moves) == 2
    stream.drain(spark)
    stream.assert_each_once()


def test_the_command_says_why_and_how_long_it_waits(folder: Path, redis: tuple[Stoppable, str]) -> None:
    server, address = redis
    server.stop()
    words = ["--source", f"redis://{address}/orders", "--table", folder / "t", "--decode", "json", "--schema", SCHEMA]
    done = run("ingest", *words, "--retry-seconds", "1.5")
    assert done.exit_code == 1
    assert "tried again in 1 s; tried for 0 s so far, of 1.5 s at most" in done.stderr
    assert "still after 2 more tries in 2 s" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("step", [Step.VERIFIED, Step.PLANNED])
def test_an_ingestion_from_kafka_outlives_an_outage(server_and_topics: tuple[Stoppable, Topics], step: Step) -> None:
    server, topics = server_and_topics
    topic = topics.create(partitions=2)
    fill(topics.address, topic, 60, partitions=2)
    pipe = topics.pipeline(topic, records=20, retry_seconds=BUDGET_SECONDS)
    events = run_events(pipe.spark, pipe.source, pipe.ingestion, observer=stopping(server, step, 2))
    reports = list(reports_when_waiting(events, server.start_when_told))
    assert server.told
    assert_each_once(pipe.rows(), topics.messages(topic))
    assert sum(report.rows for report in reports) == 60
    assert pipe.positions() == {0: 30, 1: 30}


@pytest.mark.slow
def test_members_and_a_replay_outlive_an_outage(
    server_and_topics: tuple[Stoppable, Topics], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A member waits longer for a broker that is silent than this test has to.
    monkeypatch.setattr(membership, "COMMIT_SECONDS", 6.0)
    server, topics = server_and_topics
    topic = topics.create(partitions=3)
    fill(topics.address, topic, 60, partitions=3)
    pipe = topics.pipeline(topic, records=10, client=QUICK, retry_seconds=BUDGET_SECONDS).shared()
    events = run_events(pipe.spark, pipe.source, pipe.ingestion, observer=stopping(server, Step.VERIFIED))
    list(reports_when_waiting(events, server.start_when_told))
    told = len(server.told)
    assert told
    assert_each_once(pipe.rows(), topics.messages(topic))
    with pipe.source.open() as opened:
        watch = stopping(server, Step.VERIFIED, 2)
        job = ReplayJob(pipe.spark, opened, pipe.ingestion, Replay(), observer=watch)
        reports = reports_when_waiting(batch_events(job), server.start_when_told)
        assert sum(report.replaced or 0 for report in reports) == 60
    assert len(server.told) > told
    assert_each_once(pipe.rows(), topics.messages(topic))
