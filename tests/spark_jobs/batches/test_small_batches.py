"""Batches that the driver or executors read and decode: small ones, payloads that crash the decoder, and VARIANT."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.batches.dead_letter_jobs import Redrive, RedriveJob
from spark_jobs.batches.ingestion import Ingestion, Step
from spark_jobs.batches.job import drain_batches
from spark_jobs.decoding import isolation
from spark_jobs.decoding.decoders import DecodedColumns
from spark_jobs.decoding.isolation import MAX_CRASHES
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.json_values import variant_problem
from spark_jobs.reading import source
from spark_jobs.reading.source import SourceColumns
from spark_jobs.verify import verify
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import DecoderCrashedError, SourceRecreatedError
from stream_consumers.options import ErrorPolicy, OnBadRows
from stream_consumers.testing.batch_source_contract import plan_all
from stream_consumers.urls import StreamUrl
from tests.support.crashing import HUNGRY, SEGFAULT, Broken, Crashing
from tests.support.crashing_streams import assert_refused, write_crashing
from tests.support.decoders_of_runs import CRASHING
from tests.support.ingesting import ORDERS, drain, entries, ingestion
from tests.support.kafka_topics import Once, Topics, orders
from tests.support.killed_runs import logs, running
from tests.support.one_run import DRIVER_RECORDS_VARIABLE
from tests.support.redis_tables import Stream
from tests.support.spark_servers import spark_servers
from tests.support.steps import Steps
from tests.support.streams import assert_each_once, sequences_in_table, write_stream

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


@pytest.mark.slow
def test_large_batches_are_left_to_executors(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write_stream(folder / "orders.ss", 100)
    what, told = in_driver(folder)
    drain(spark, url, replace(what, driver_records=99))
    assert not told.was_driver(), "by the number of its messages"
    monkeypatch.setattr(source, "MAX_DRIVER_BYTES", 5000)
    write_stream(folder / "orders.ss", 100)
    drain(spark, url, what)
    # The driver has begun with it, and so it has decoded something.
    assert not told.was_driver(), "by their bytes"
    assert_each_once(folder / "orders.ss", folder / "t")


def test_the_driver_reads_no_more_than_the_heap_of_spark_can_hold(spark: SparkSession, folder: Path) -> None:
    """Spark needs about a hundred times the bytes that Arrow has for empty objects."""
    columns = SourceColumns.of(Json("id BIGINT, x ARRAY<STRUCT<a: BOOLEAN>>"))
    url = f"file://{folder}/orders.ss/orders"
    for is_read in (True, False):
        with create_producer(url) as producer:
            for _ in range(3):
                producer.send(b'{"id": 1, "x": [%s]}' % b",".join([b"{}"] * 330_000))
        with open_batch_source(url) as stream:
            found = source.read_on_driver(plan_all(stream).splits, columns)
        assert (found is not None) == is_read


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
        for _ in range(MAX_CRASHES + 1):
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

    with pytest.raises(SourceRecreatedError):
        what.drain(Once(Step.PLANNED, recreate))
    assert what.rows() == {}


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


@pytest.mark.parametrize("place", [0, 5, MESSAGES - 1])
def test_what_crashes_the_decoder_is_a_dead_letter_also_where_payloads_are_kept(
    place: int, spark: SparkSession, folder: Path
) -> None:
    url = write_crashing(folder / "orders.ss", MESSAGES, segfault=place)
    errors = ErrorPolicy(on_bad_rows=OnBadRows.DEAD_LETTER)
    what = replace(ingestion(folder / "t", decoder=Crashing(), errors=errors), driver_records=1000)
    (report,) = drain(spark, url, what)
    assert (report.rows, report.dead) == (MESSAGES - 1, 1)
    assert_each_once(folder / "orders.ss", folder / "t")


@pytest.mark.slow
@pytest.mark.parametrize("driver_records", [1000, 0], ids=WHERE)
def test_a_decoder_that_crashes_for_every_message_fails_the_run(
    driver_records: int, spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of executors it is what it is.
    monkeypatch.setattr(isolation, "MAX_CRASHES", 3)
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
@pytest.mark.spark
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


SCHEMA = """
    id BIGINT, extra VARIANT, parts STRUCT<v: VARIANT, `a.b`: INT>, list ARRAY<VARIANT>, named MAP<STRING, VARIANT>,
    counts MAP<STRING, BIGINT>, bytes BINARY
"""
FULL = {
    **{"id": 1, "extra": {"a": [1, 2.5, "x", None]}, "parts": {"v": [True], "a.b": 7}, "list": [1, "x", None]},
    **{"named": {"k": {"n": 1}}, "counts": {"a": 1, "b": None}, "bytes": "AAEC"},
}
REPEATED = b'{"id":3,"extra":{"a":1,"a":2}}'


def send(url: str, *payloads: bytes) -> None:
    with create_producer(url) as producer:
        for payload in payloads:
            producer.send(payload)


def rows_of(spark: SparkSession, what: Ingestion) -> list[dict[str, Any]]:
    columns = ["id", "counts", "bytes", "parts.`a.b`", "parts IS NULL AS is_empty"]
    columns += [f"to_json({name}) AS {name}" for name in ("extra", "list", "named")]
    frame = spark.read.format("delta").load(what.table).orderBy("_sequence")
    return [row.asDict() for row in frame.selectExpr(*columns, "to_json(parts.v) AS v").collect()]


@pytest.mark.parametrize(
    "driver_records", [pytest.param(0, marks=pytest.mark.slow, id="executors"), pytest.param(1000, id="driver")]
)
def test_values_without_a_schema_are_in_the_table(spark: SparkSession, folder: Path, driver_records: int) -> None:
    url = f"file://{folder}/orders.ss/orders"
    what = replace(ingestion(folder / "t", decoder=Json(SCHEMA)), driver_records=driver_records)
    send(url, json.dumps(FULL).encode(), b'{"id":2,"extra":null,"parts":{},"list":[],"named":{}}', REPEATED, b"{}")
    (report,) = drain(spark, url, what)
    assert (report.rows, report.dead) == (3, 1)
    full, empty, nothing = rows_of(spark, what)
    assert {name: json.loads(full[name]) for name in ("extra", "list", "named", "v")} == {
        **{name: FULL[name] for name in ("extra", "list", "named")},
        "v": [True],
    }
    assert (full["counts"], full["bytes"], full["a.b"]) == ({"a": 1, "b": None}, bytearray(b"\0\1\2"), 7)
    assert (empty["extra"], empty["v"], empty["is_empty"], empty["list"]) == ("null", None, False, "[]")
    assert nothing == {**dict.fromkeys(full), "is_empty": True}
    # The next batch, a redrive and the proof read the log and the files without Spark.
    send(url, b'{"id":4,"extra":[4]}')
    (report,) = drain(spark, url, what)
    assert (report.rows, report.dead) == (1, 0)
    without = replace(what, decoder=Json(SCHEMA.replace("extra VARIANT,", "")))
    list(drain_batches(RedriveJob(spark, without, Redrive(), url=StreamUrl.parse(url))))
    assert [row["id"] for row in rows_of(spark, what)] == [1, 2, 3, None, 4]
    with open_batch_source(url) as source:
        (verdict,) = verify(source, what)
    assert (verdict.rows, verdict.dead, verdict.missing, verdict.duplicated) == (5, 0, 0, 0)


# Jackson refuses a document in which so many names have the same hash.
SAME_HASH = json.dumps({"".join(parts): 1 for parts in itertools.product(("bA", "ab"), repeat=9)}).encode()


@pytest.mark.parametrize("on_bad_rows", OnBadRows)
@pytest.mark.parametrize(
    "driver_records", [pytest.param(0, marks=pytest.mark.slow, id="executors"), pytest.param(1000, id="driver")]
)
def test_json_that_only_spark_refuses_is_a_dead_letter(
    spark: SparkSession, folder: Path, driver_records: int, on_bad_rows: OnBadRows
) -> None:
    url = f"file://{folder}/orders.ss/orders"
    errors = ErrorPolicy(on_bad_rows=on_bad_rows)
    what = replace(ingestion(folder / "t", decoder=Json(SCHEMA)), driver_records=driver_records, errors=errors)
    wrong = [
        b'{"id":2,"%s":%s}' % (name, part)
        for name, part in (
            (b"extra", SAME_HASH),
            (b"parts", b'{"v":%s}' % SAME_HASH),
            (b"list", b"[1,%s]" % SAME_HASH),
            (b"named", b'{"k":%s}' % SAME_HASH),
        )
    ]
    send(url, json.dumps(FULL).encode(), *wrong, b'{"id":3}')
    (report,) = drain(spark, url, what)
    assert (report.rows, report.dead) == (2, 4)
    assert [row["id"] for row in rows_of(spark, what)] == [1, 3]
    letters = what.dead_letters().counted(spark, what.ledger())
    assert letters is not None
    found = letters.orderBy("sequence" if "sequence" in letters.columns else "_sequence").collect()
    assert [bytes(row["payload"]) for row in found] == wrong


def test_spark_stores_each_number_of_a_variant_that_is_taken(spark: SparkSession) -> None:
    nines, nine_places = "9" * 38, "0." + "0" * 37
    numbers = ["0", "-0", "1.10", f"-{nines}", f"{nines}9", "1" * 400, f"{nine_places}9", f"{nine_places}09", "1" * 900]
    numbers += ["18446744073709551617", f"1.{'1' * 37}", f"1.{'1' * 38}", "1e2", "-1.5E-7", "1e308", "1e309", "-1e400"]
    numbers += ["5e-324", "1e-400", "-2e-324", "0e-400", f"0.{'1' * 900}e-3", "9007199254740993", "340282366920938e24"]
    taken = [text for text in numbers if variant_problem(text) is None]
    assert len(taken) == 15
    rows = spark.createDataFrame([(text,) for text in taken], "text STRING").selectExpr("to_json(parse_json(text))")
    for text, (stored,) in zip(taken, rows.collect(), strict=True):
        is_double = "e" in text.lower()
        assert (float(stored) == float(text)) if is_double else (Decimal(stored) == Decimal(text)), text


@pytest.mark.slow
def test_payloads_without_a_schema_are_one_variant(spark: SparkSession, folder: Path) -> None:
    url = f"file://{folder}/orders.ss/orders"

    def dear(rows: Any) -> Any:
        return rows.where("payload:amount::double > 1 OR payload:amount IS NULL")

    what = ingestion(folder / "t", decoder=Json(), transform=dear)
    send(url, b'{"amount": 2.5, "user": {"name": "x"}}', b'{"amount": 1}', b"[1, 2]", b"no JSON")
    (report,) = drain(spark, url, what)
    assert (report.rows, report.dead) == (2, 1)
    frame = spark.read.format("delta").load(what.table).orderBy("_sequence")
    assert [tuple(row) for row in frame.selectExpr("payload:user.name::string", "payload:[1]::int").collect()] == [
        ("x", None),
        (None, 2),
    ]
