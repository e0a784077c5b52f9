"""What the table has no column for is kept in ``_rescued``, and the table stays as it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob
from spark_jobs.decoding.json_decoder import Json
from stream_consumers.create import open_batch_source
from stream_consumers.errors import SchemaMismatchError
from stream_consumers.options import ErrorPolicy
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import drain, ingestion
from tests.support.memory_streams import ingest, rows, send

pytestmark = pytest.mark.spark
FIRST = "id BIGINT, shop STRUCT<name: STRING>, items ARRAY<STRUCT<price: DOUBLE>>"
SECOND = "id BIGINT, shop STRUCT<name: STRING, zip: STRING>, items ARRAY<STRUCT<price: DOUBLE>>, user STRING"
DOCUMENT = {"id": 1, "shop": {"name": "a", "zip": "07"}, "items": [{"price": 1.5}], "user": "ada", "more": 1}


@pytest.mark.slow
@pytest.mark.parametrize("driver_records", [0, 1000], ids=["executors", "driver"])
def test_nothing_is_lost_and_a_replay_brings_it_back(
    spark: SparkSession, folder: Path, url: StreamUrl, driver_records: int
) -> None:
    made = ingestion(folder / "t", decoder=Json(FIRST), errors=ErrorPolicy(schema_changes="rescue"))
    what = replace(made, driver_records=driver_records)
    ingest(spark, url, what, DOCUMENT, {"id": 2})
    told = {"shop": {"zip": "07"}, "user": "ada", "more": 1}
    first, second = rows(spark, what)
    assert json.loads(first.pop("_rescued")) == told
    assert (second.pop("_rescued"), second["id"]) == (None, 2)
    known = {"id": 1, "shop": {"name": "a"}, "items": [{"price": 1.5}]}
    assert first == known
    # Columns that the decoder knows by now, and the table does not.
    ingest(spark, url, replace(what, decoder=Json(SECOND)), DOCUMENT)
    newest = rows(spark, what)[-1]
    assert json.loads(newest.pop("_rescued")) == told
    assert newest == known
    grown = replace(what, decoder=Json(SECOND), errors=ErrorPolicy(schema_changes="add_columns"))
    with open_batch_source(str(url)) as source:
        list(drain_batches(ReplayJob(spark, source, grown, Replay())))
    found = rows(spark, what)
    assert [row.pop("_rescued") for row in found] == [None, None, None]
    whole = {**known, "shop": DOCUMENT["shop"], "user": "ada"}
    assert [row for row in found if row["id"] == 1] == [{**whole, "more": 1}] * 2


def test_a_table_of_before_gets_one_column_and_no_more(spark: SparkSession, folder: Path, url: StreamUrl) -> None:
    what = ingestion(folder / "t", decoder=Json("id BIGINT"))
    ingest(spark, url, what, DOCUMENT)
    send(url, DOCUMENT)
    own = replace(what, errors=ErrorPolicy(schema_changes="rescue"), decoder=Json(SECOND))
    drain(spark, str(url), own)
    assert [row.keys() - {"id"} for row in rows(spark, what)] == [{"_rescued"}, {"_rescued"}]
    assert json.loads(rows(spark, what)[1]["_rescued"]) == {name: DOCUMENT[name] for name in DOCUMENT if name != "id"}
    # Another group begins with an empty commit, which brings no column in either.
    elsewhere = StreamUrl.parse(f"{url}-of-others")
    send(elsewhere, DOCUMENT)
    drain(spark, str(elsewhere), replace(own, group="others"))
    assert rows(spark, what)[0].keys() == {"id", "_rescued"}


@pytest.mark.slow
def test_parts_of_an_object_from_the_decoder_and_from_the_table_are_in_one(
    spark: SparkSession, folder: Path, url: StreamUrl
) -> None:
    what = ingestion(folder / "t", decoder=Json("id BIGINT, shop STRUCT<name: STRING>"))
    ingest(spark, url, what, {"id": 1})
    decoder = Json("id BIGINT, shop STRUCT<name: STRING, city: STRING>, at TIMESTAMP, local TIMESTAMP_NTZ", rescue=True)
    times = {"at": "2024-02-29T12:30:15.123456+02:00", "local": "2024-02-29T12:30:15.123456"}
    deep = b'{"id": 4, "shop": {"city": "b"}, "deep": %s1%s}' % (b"[" * 499, b"]" * 499)
    send(url, {"id": 2, "shop": {"name": "a", "city": "b", "zip": 1.50}, **times}, {"id": 3, "shop": {"zip": 2}}, deep)
    drain(spark, str(url), replace(what, decoder=decoder, errors=ErrorPolicy(schema_changes="rescue")))
    assert [json.loads(row["_rescued"] or "null") for row in rows(spark, what)] == [
        None,
        {"shop": {"zip": 1.5, "city": "b"}, **times, "at": "2024-02-29T10:30:15.123456Z"},
        {"shop": {"zip": 2}},
        {"shop": {"city": "b"}, "deep": json.loads(deep)["deep"]},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("schema", ["id BIGINT", "id BIGINT, shop STRUCT<name: STRING, city: STRING>"])
@pytest.mark.parametrize("driver_records", [0, 1000], ids=["executors", "driver"])
def test_a_field_with_the_name_of_a_new_column_of_the_transform_is_no_second_value_of_it(
    spark: SparkSession, folder: Path, url: StreamUrl, driver_records: int, schema: str
) -> None:
    made = ingestion(folder / "t", decoder=Json("id BIGINT, shop STRUCT<name: STRING>"))
    what = replace(made, driver_records=driver_records, errors=ErrorPolicy(schema_changes="rescue"))
    ingest(spark, url, what, {"id": 1, "tag": "of the message"})
    tagged = replace(what, decoder=Json(schema), transform=lambda batch: batch.withColumn("tag", f.lit("made")))
    (report,) = ingest(spark, url, tagged, {"id": 2, "tag": "of the message"}, {"id": 3, "shop": {"city": "b"}})
    assert (report.rows, report.dead) == (1, 1)
    assert [json.loads(row["_rescued"]) for row in rows(spark, what)] == [
        {"tag": "of the message"},
        {"shop": {"city": "b"}, "tag": "made"},
    ]
    letters = spark.read.format("delta").load(f"{folder}/t_dead_letters").collect()
    assert [row["_sequence"] for row in letters] == [1]


@pytest.mark.slow
def test_fields_within_arrays_do_not_fit(spark: SparkSession, folder: Path, url: StreamUrl) -> None:
    what = ingestion(folder / "t", decoder=Json(FIRST), errors=ErrorPolicy(schema_changes="rescue"))
    ingest(spark, url, what, DOCUMENT)
    send(url, DOCUMENT)
    more = replace(what, decoder=Json(FIRST.replace("price: DOUBLE", "price: DOUBLE, tax: DOUBLE")))
    with pytest.raises(SchemaMismatchError, match=r"items\[\]\.tax is not in the table"):
        drain(spark, str(url), more)
