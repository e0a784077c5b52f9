"""Fields with the names of columns that Delta or a merge add themselves stop no stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob
from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.schema_registry import SchemaRegistry
from spark_jobs.writing.keyed import Keys
from spark_jobs.writing.layout import TableLayout
from stream_consumers.create import open_batch_source
from stream_consumers.errors import SchemaMismatchError
from stream_consumers.options import ErrorPolicy
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import ingestion
from tests.support.memory_streams import ingest, rows
from tests.support.schema_registry import Registry, schema_registry

pytestmark = [pytest.mark.spark, pytest.mark.slow]
NAMES = ("filePath", "_row_dropped_", "_metadata", "_change_type", "_deleted", "_Next")


@pytest.fixture
def registry() -> Iterator[Registry]:
    with schema_registry() as running:
        yield running


def made(folder: Path, decoder: Any, changes: str = "add_columns", **options: Any) -> Ingestion:
    what = ingestion(folder / "t", decoder=decoder, errors=ErrorPolicy(schema_changes=changes))
    return replace(what, driver_records=1000, **options)


def message(registry: Registry, value: dict[str, Any]) -> bytes:
    """A message of the newest schema of the subject, which has fields for the names of this value."""
    fields = [{"name": name, "type": ["null", "long"], "default": None} for name in value]
    return registry.framed("orders-value", {"type": "record", "name": "Order", "fields": fields}, value)


def of_registry(registry: Registry) -> Avro:
    return Avro(registry=SchemaRegistry(registry.url), subject="orders-value")


@pytest.mark.parametrize("changes", ["add_columns", "rescue"])
@pytest.mark.parametrize("keys", [Keys(["id"]), None], ids=["keyed", "plain"])
def test_fields_of_a_registry_are_left_out_or_rescued(
    spark: SparkSession,
    folder: Path,
    url: StreamUrl,
    registry: Registry,
    caplog: pytest.LogCaptureFixture,
    changes: str,
    keys: Keys | None,
) -> None:
    feed = TableLayout(properties={"delta.enableChangeDataFeed": "true", "delta.enableDeletionVectors": "true"})
    what = made(folder, of_registry(registry), changes, keys=keys, layout=feed)
    names = NAMES if keys is not None else NAMES[:-2]
    ingest(spark, url, what, message(registry, {"id": 1, "v": 1}))
    with caplog.at_level("WARNING"):
        for number in (2, 3):
            value = {"id": 1, "v": number, "color": 7, **dict.fromkeys(names, number)}
            (report,) = ingest(spark, url, what, message(registry, value))
            assert report.dead == 0
    (warned,) = {text for one in caplog.records if "left out" in (text := one.getMessage())}
    assert all(name in warned for name in names)
    with open_batch_source(str(url)) as source:
        list(drain_batches(ReplayJob(spark, source, what, Replay())))
    *_, found = rows(spark, what)
    rescued = {"color": 7, **dict.fromkeys(names, 3)}
    if changes == "rescue":
        assert json.loads(found.pop("_rescued")) == rescued
        assert found == {"id": 1, "v": 3}
    else:
        assert found == {"id": 1, "v": 3, "color": 7}


def test_a_transform_may_rename_them(spark: SparkSession, folder: Path, url: StreamUrl, registry: Registry) -> None:
    def renamed(batch: DataFrame) -> DataFrame:
        return batch.withColumnRenamed("filePath", "path")

    what = made(folder, of_registry(registry), transform=renamed, keys=Keys(["id"]))
    for number in (1, 2):
        ingest(spark, url, what, message(registry, {"id": 1, "filePath": number}))
    assert rows(spark, what) == [{"id": 1, "path": 2}]


def test_undeclared_fields_become_no_columns_of_a_table_with_deletion_vectors(
    spark: SparkSession, folder: Path, url: StreamUrl
) -> None:
    layout = TableLayout(properties={"delta.enableDeletionVectors": "true"})
    what = made(folder, Json("id BIGINT", rescue=True), layout=layout)
    names = ("deletionVectorId", "rowindexcol", "filePath", "__is_cdc", "_condition_", "_input_file_name_")
    ingest(spark, url, what, *({"id": number, **dict.fromkeys(names, number)} for number in range(4)))
    with open_batch_source(str(url)) as source:
        list(drain_batches(ReplayJob(spark, source, what, Replay())))
    found = rows(spark, what)
    assert [(row["id"], json.loads(row["_rescued"])) for row in found] == [
        (number, dict.fromkeys(names[:-1], number)) for number in range(4)
    ]


@pytest.mark.parametrize("transform", [None, lambda batch: batch])
def test_a_column_that_a_table_has_already_keeps_its_values(
    spark: SparkSession, folder: Path, url: StreamUrl, registry: Registry, transform: Any
) -> None:
    what = made(folder, Json("id BIGINT"), transform=transform)
    ingest(spark, url, what, {"id": 1})
    spark.sql(f"ALTER TABLE delta.`{what.table}` ADD COLUMNS (filePath BIGINT)")
    ingest(spark, url, what, {"id": 2, "filePath": 5})
    ingest(spark, url, replace(what, decoder=Json("id BIGINT, filePath BIGINT")), {"id": 3, "filePath": 6})
    ingest(spark, url, replace(what, decoder=of_registry(registry)), message(registry, {"id": 4, "filePath": 7}))
    assert [row["filePath"] for row in rows(spark, what)] == [None, 5, 6, 7]


@pytest.mark.parametrize("keys", [Keys(["id"]), None], ids=["keyed", "plain"])
def test_a_declared_one_is_refused_before_anything_is_written(
    spark: SparkSession, folder: Path, url: StreamUrl, keys: Keys | None
) -> None:
    what = made(folder, Json("id BIGINT, filePath BIGINT"), keys=keys)
    with pytest.raises(SchemaMismatchError, match="filePath"):
        ingest(spark, url, what, {"id": 1, "filePath": 5})
    assert what.ledger().log.snapshot() is None
