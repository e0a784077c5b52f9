"""Small batches are read by the driver, and what is too large for it by executors."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion, Step
from spark_jobs.decoding.decoders import DecodedColumns
from spark_jobs.decoding.isolation import MOST_CRASHES
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.reading import source
from stream_consumers.create import create_producer
from stream_consumers.errors import DecoderCrashedError, SourceRecreatedError
from tests.support.ingesting import ORDERS, drain, ingestion
from tests.support.kafka_topics import Once, Topics, orders
from tests.support.streams import assert_each_once, sequences_in_table, write_stream

pytestmark = pytest.mark.spark
IN_DRIVER = 1000


@dataclass(frozen=True)
class Told:
    """Decodes as another one, and writes down in which sessions; what decodes for the driver has one of its own."""

    decoder: Json
    folder: Path
    key: None = None
    headers: None = None

    def ddl(self) -> str:
        return self.decoder.ddl()

    def check(self, schema: pa.Schema) -> None:
        self.decoder.check(schema)

    def decode(self, payloads: pa.Array, schema: pa.Schema) -> DecodedColumns:
        if not len(payloads):
            return self.decoder.decode(payloads, schema)
        (self.folder / f"session {os.getsid(0)}").touch()
        if b"odd" in payloads.to_pylist():
            raise ValueError("an odd payload")
        return self.decoder.decode(payloads, schema)

    def was_driver(self) -> bool:
        """Whether no Python worker of Spark has decoded, since it was asked last; they are in our session."""
        found = list(self.folder.glob("session *"))
        assert found
        for session in found:
            session.unlink()
        return f"session {os.getsid(0)}" not in [session.name for session in found]


def in_driver(folder: Path) -> tuple[Ingestion, Told]:
    told = Told(ORDERS, folder)
    return replace(ingestion(folder / "t", decoder=told), driver_records=IN_DRIVER), told


def test_a_small_batch_with_dead_letters_is_read_by_the_driver(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 400, malformed=frozenset({7, 199}))
    what, told = in_driver(folder)
    (report,) = drain(spark, url, what)
    assert told.was_driver()
    assert (report.rows, report.dead, sum(report.messages.values())) == (398, 2, 398)
    assert_each_once(folder / "orders.ss", folder / "t")
    assert len(DeltaTable(str(folder / "t")).file_uris()) == 1, "a small batch makes one file"


def test_what_is_too_large_is_left_to_executors(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write_stream(folder / "orders.ss", 100)
    what, told = in_driver(folder)
    drain(spark, url, replace(what, driver_records=99))
    assert not told.was_driver(), "by the number of its messages"
    monkeypatch.setattr(source, "MOST_DRIVER_BYTES", 5000)
    write_stream(folder / "orders.ss", 100)
    drain(spark, url, what)
    # The driver has begun with it, and so it has decoded something.
    assert not told.was_driver(), "by their bytes"
    assert_each_once(folder / "orders.ss", folder / "t")


@pytest.mark.parametrize("driver_records", [pytest.param(0, marks=pytest.mark.slow), IN_DRIVER])
def test_what_the_decoder_raises_for_is_a_dead_letter(spark: SparkSession, folder: Path, driver_records: int) -> None:
    url = write_stream(folder / "orders.ss", 10, shards=1)
    with create_producer(url) as producer:
        producer.send(b"odd", shard=0)
    write_stream(folder / "orders.ss", 10, shards=1)
    what, _ = in_driver(folder)
    (report,) = drain(spark, url, replace(what, driver_records=driver_records))
    assert (report.rows, report.dead) == (20, 1)
    letters = DeltaTable(f"{folder}/t_dead_letters").to_pyarrow_table().to_pylist()
    assert [(one["_sequence"], one["payload"]) for one in letters] == [(11, b"odd")]
    assert "ValueError" in letters[0]["error"]
    assert "an odd payload" not in letters[0]["error"], "what a decoder says may hold values"


@pytest.mark.slow
def test_a_decoder_that_raises_for_all_is_an_error_and_nothing_is_written(spark: SparkSession, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 10)
    what, _ = in_driver(folder)
    drain(spark, url, what)
    with create_producer(url) as producer:
        for _ in range(MOST_CRASHES + 1):
            producer.send(b"odd", shard=0)
    with pytest.raises(DecoderCrashedError):
        drain(spark, url, what)
    assert len(sequences_in_table(folder / "t")) == 10


def test_a_topic_recreated_behind_the_plan_is_not_written(topics: Topics) -> None:
    """With just as many messages, so that only the identity tells."""
    topic = topics.create()
    topics.send(topic, orders(10))
    what = topics.pipeline(topic).having(driver_records=IN_DRIVER)

    def recreate() -> None:
        topics.recreate(topic)
        topics.send(topic, orders(10, first=100))

    with pytest.raises(SourceRecreatedError, match="recreated while it was read"):
        what.drain(Once(Step.PLANNED, recreate))
    assert what.rows() == {}
