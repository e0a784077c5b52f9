"""Switching a Redis group between positions and claims: what was on its way on the other side never doubles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs import sharing
from spark_jobs.claim_job import ClaimJob
from spark_jobs.ingest import IngestJob
from spark_jobs.sharing import switch_sharing
from stream_consumers.connect import StreamSource
from stream_consumers.errors import GroupActiveError, InvalidOptionError
from stream_consumers.options import ConsumerMode
from stream_consumers.urls import StreamUrl
from tests.spark.redis_streams import Stream

pytestmark = pytest.mark.spark


@pytest.fixture
def stream(redis_address: str, folder: Path) -> Iterator[Stream]:
    made = Stream(redis_address, folder)
    made.add(20)
    yield made
    made.client.close()


def switch(spark: SparkSession, stream: Stream, to: str) -> bool:
    source = StreamSource(StreamUrl.parse(stream.url), client=stream.options)
    with source.open() as opened, source.claims(stream.group) as claims:
        changed = switch_sharing(spark, stream.ingestion(), to=ConsumerMode(to), source=opened, claims=claims)
    stream.mode = ConsumerMode(to)
    return changed


def test_a_batch_by_position_that_is_on_its_way_never_lands_after_a_switch(spark: SparkSession, stream: Stream) -> None:
    stream.drain(spark)
    stream.add(20, first=20)
    with stream.source.open() as opened:
        job = IngestJob(spark, opened, stream.ingestion())
        batch = job.plan()
        assert batch is not None
        assert switch(spark, stream, "load_balanced")
        stream.drain(spark, max_batches=1)
        assert job.run(batch) is None
        opened.commit(stream.group, stream.ingestion().ledger().read().positions)
        with pytest.raises(InvalidOptionError, match="load_balanced by claims"):
            job.plan()
    stream.drain(spark)
    stream.assert_each_once()


def test_claims_that_are_on_their_way_stop_a_switch(spark: SparkSession, stream: Stream) -> None:
    stream.mode = ConsumerMode.LOAD_BALANCED
    stream.drain(spark)
    stream.add(20, first=20)
    with stream.source.claims(stream.group) as claims:
        job = ClaimJob(spark, claims, stream.ingestion(claims=True))
        batch = job.plan()
        assert batch is not None
        with pytest.raises(GroupActiveError, match="20 entries"):
            switch(spark, stream, "resumable")
        assert job.run(batch) is not None
    assert switch(spark, stream, "resumable")
    stream.add(4, first=40)
    stream.drain(spark)
    stream.assert_each_once()


@pytest.mark.parametrize("to", ["load_balanced", "resumable"])
def test_a_switch_that_is_interrupted_at_any_step_is_run_again(
    spark: SparkSession, stream: Stream, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    other = "resumable" if to == "load_balanced" else "load_balanced"
    stream.mode = ConsumerMode(other)
    stream.drain(spark)
    fence, steps = sharing._fence, 2 if to == "load_balanced" else 3
    for step in range(steps):
        left = [step]

        def interrupted(*words: object, left: list[int] = left, **options: object) -> None:
            if not left[0]:
                raise InterruptedError
            left[0] -= 1
            fence(*words, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(sharing, "_fence", interrupted)
        with pytest.raises(InterruptedError):
            switch(spark, stream, to)
        monkeypatch.setattr(sharing, "_fence", fence)
    stream.add(20, first=20)
    assert switch(spark, stream, to)
    stream.drain(spark)
    stream.assert_each_once()
    stream.mode = ConsumerMode(to)
    assert switch(spark, stream, other)
    stream.add(4, first=40)
    stream.drain(spark)
    stream.assert_each_once()


def test_a_group_cannot_be_used_the_other_way(spark: SparkSession, stream: Stream) -> None:
    stream.drain(spark)
    stream.mode = ConsumerMode.LOAD_BALANCED
    with pytest.raises(InvalidOptionError, match="switch --to load_balanced"):
        stream.drain(spark, replace(stream.ingestion()))
