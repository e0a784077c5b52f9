"""The comparison of a keyed table accounts for messages that cannot be decoded when it reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_jobs import verify_keyed as verify_keyed_module
from spark_jobs.batches import row_columns
from spark_jobs.batches.dead_letter_jobs import Redrive, RedriveJob
from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.job import drain_batches
from spark_jobs.dead_letters.corrections import Corrections
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.row_size import ROWS_IN_HEAP
from spark_jobs.verify_keyed import verify_keyed
from spark_jobs.writing.keyed import Keys
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl
from tests.support.crashing import SEGFAULT, Crashing
from tests.support.keyed_tables import BY_POSITION, BY_VALUE, HISTORY_BY_VALUE, SCHEMA, KeyedTable

SHARD = Shard("changes", 0)
DAMAGED = b'{"id": 3, "name": '


def send_payload(table: KeyedTable, payload: bytes) -> None:
    with create_producer(table.url) as producer:
        producer.send(payload, shard=0, timestamp_ms=table.first_ms)


def redrive(table: KeyedTable, payloads: Mapping[tuple[Shard, int], bytes]) -> None:
    what = Redrive(corrections=Corrections(payloads, by="ann"))
    list(drain_batches(RedriveJob(table.spark, table.ingestion, what, url=StreamUrl.parse(table.url))))


@pytest.mark.slow
def test_a_message_without_a_row_and_without_its_dead_letter_is_a_fault(spark: SparkSession, folder: Path) -> None:
    table = KeyedTable(spark, folder, BY_VALUE, records=100)
    table.send({"id": 1, "name": "a", "op": "u", "at": 1})
    send_payload(table, DAMAGED)
    table.drain()
    assert table.verdict().is_right
    spark.sql(f"DELETE FROM delta.`{folder}/t_dead_letters` WHERE true")
    verdict = table.verdict()
    assert (verdict.undecoded, verdict.examples, verdict.is_right) == (1, {"undecoded": [(SHARD, 2)]}, False)
    assert (verdict.messages, verdict.uncompared, verdict.missing) == (1, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, BY_VALUE, HISTORY_BY_VALUE], ids=["position", "value", "history"])
def test_a_corrected_message_is_compared_with_its_corrected_payload(
    spark: SparkSession, folder: Path, keys: Keys
) -> None:
    table = KeyedTable(spark, folder, keys, records=100)
    table.send({"id": 1, "name": "a", "op": "u", "at": 1}, {"id": 2, "name": "b", "op": "u", "at": 2})
    send_payload(table, DAMAGED)
    send_payload(table, DAMAGED)
    table.drain()
    dead = table.ingestion.ledger().read().version
    payloads = {
        (SHARD, 3): b'{"id": 3, "name": "c", "op": "u", "at": 3}',
        (SHARD, 4): b'{"id": 1, "op": "d", "at": 4}',
    }
    redrive(table, payloads)
    table.drain()
    verdict = table.verdict()
    assert (verdict.is_right, verdict.messages, verdict.keys) == (True, 4, 3), verdict
    spark.sql(f"DELETE FROM delta.`{folder}/t` WHERE id = 3")
    verdict = table.verdict()
    assert (verdict.missing, verdict.examples, verdict.is_right) == (1, {"missing": [(SHARD, 3)]}, False)
    table.restore(dead)
    verdict = table.verdict()
    assert (verdict.is_right, verdict.messages) == (True, 2), "the dead letters count again"


@pytest.mark.slow
@pytest.mark.parametrize("keys", [BY_POSITION, BY_VALUE, HISTORY_BY_VALUE], ids=["position", "value", "history"])
def test_a_row_above_the_limit_of_this_session_is_not_compared(
    spark: SparkSession, folder: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = KeyedTable(spark, folder, keys, records=100)
    table.send({"id": 1, "name": "a", "op": "u", "at": 1}, {"id": 2, "name": "b", "op": "u", "at": 2})
    table.send({"id": 1, "name": "x" * 10_000, "op": "u", "at": 3})
    table.drain()
    assert table.verdict().is_right
    monkeypatch.setattr(row_columns, "heap_bytes", lambda session: 5_000 * ROWS_IN_HEAP)
    verdict = table.verdict()
    assert (verdict.is_right, verdict.uncompared, verdict.undecoded, verdict.messages) == (True, 1, 0, 2), verdict
    spark.sql(f"DELETE FROM delta.`{folder}/t` WHERE _sequence = 3")
    verdict = table.verdict()
    assert (verdict.is_right, verdict.uncompared, verdict.undecoded) == (False, 0, 1), verdict
    assert verdict.examples["undecoded"] == [(SHARD, 3)]


@pytest.mark.slow
def test_a_dead_letter_that_crashes_the_decoder_does_not_end_the_comparison(spark: SparkSession, folder: Path) -> None:
    table = KeyedTable(spark, folder, records=100)
    send_payload(table, SEGFAULT)
    table.send({"id": 1, "name": "a", "op": "u", "at": 1})
    what = replace(table.ingestion, decoder=Crashing(Json(SCHEMA)))
    with open_batch_source(table.url) as source:
        assert [report.dead for report in drain_batches(IngestJob(spark, source, what))] == [1]
    with open_batch_source(table.url) as source:
        verdict = verify_keyed(spark, source, what)
    assert (verdict.is_right, verdict.messages, verdict.rows) == (True, 1, 1), verdict


@pytest.mark.slow
@pytest.mark.parametrize("driver_records", [1000, 0], ids=["driver", "executors"])
def test_a_correction_stays_where_an_earlier_message_is_redriven(
    driver_records: int, spark: SparkSession, folder: Path
) -> None:
    """The changes behind it are merged again, from the stream, which has the payload of before the correction."""
    table = KeyedTable(spark, folder, BY_POSITION, records=100, driver_records=driver_records)
    table.send({"id": 1, "name": "a", "op": "u", "at": 1})
    send_payload(table, DAMAGED)
    table.send({"id": 2, "name": "c", "op": "u", "at": 3})
    send_payload(table, DAMAGED)
    table.drain()
    redrive(table, {(SHARD, 4): b'{"id": 2, "op": "d", "at": 4}'})
    table.drain()
    assert table.rows() == {1: "a"}
    redrive(table, {(SHARD, 2): b'{"id": 2, "name": "b", "op": "u", "at": 2}'})
    table.drain()
    table.drain()
    assert table.rows() == {1: "a"}
    dead_letters = table.ingestion.dead_letters()
    assert sum(map(len, dead_letters.open_places(table.ingestion.ledger()))) == 0
    records = dead_letters.corrections(table.ingestion.ledger()).select(["_sequence", "corrected_by", "correction"])
    assert {row["_sequence"]: (row["corrected_by"], b'"d"' in row["correction"]) for row in records.to_pylist()} == {
        2: ("ann", False),
        4: ("ann", True),
    }
    assert table.verdict().is_right


@pytest.mark.slow
def test_a_redrive_that_lands_amid_a_comparison_is_no_fault(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = KeyedTable(spark, folder, BY_VALUE, records=100)
    table.send({"id": 1, "name": "a", "op": "u", "at": 1})
    send_payload(table, DAMAGED)
    table.drain()
    plan, met = verify_keyed_module.read_all, []

    def landing(*arguments: Any, **options: Any) -> DataFrame:
        if not met:
            met.append(1)
            redrive(table, {(SHARD, 2): b'{"id": 3, "name": "c", "op": "u", "at": 2}'})
        return plan(*arguments, **options)

    monkeypatch.setattr(verify_keyed_module, "read_all", landing)
    verdict = table.verdict()
    assert (verdict.is_right, verdict.messages, verdict.keys) == (True, 2, 2), verdict
    assert met
