"""Rows that are large, or become large late in a batch: a small JVM has room for them, or they are dead letters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from stream_consumers.create import create_producer
from tests.support.python_programs import run_python
from tests.support.streams import assert_each_once

# A row may have 8 MiB.
HEAP = "1g"
MIB = 1024 * 1024
RUN = """\
import json, sys
from dataclasses import replace
from pathlib import Path
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.session import SparkOptions, create_session
from spark_jobs.writing.keyed import Keys
from stream_consumers.options import Limits
from tests.support.ingesting import drain, ingestion

url, table, keys, heap = sys.argv[1:]
options = SparkOptions(master="local[2]", config={"spark.driver.memory": heap}, in_process=True)
what = ingestion(Path(table), decoder=Json("id BIGINT, text STRING"))
what = replace(what, keys=Keys(**json.loads(keys)) if keys else None, limits=Limits(max_bytes=2**29), retry_seconds=0.0)
print(json.dumps([[report.rows, report.dead] for report in drain(create_session(options), url, what)]))
"""


def batches_of(folder: Path, *sizes: int, key: Callable[[int], int] = int, **keys: Any) -> list[list[int]]:
    """Write a message of each size, and return the rows and the dead letters of each batch of a run with a small heap.

    Args:
        folder: where the stream and the table are.
        sizes: the sizes of the messages in bytes; of a large one, each byte is the same, as it compresses best.
        key: the key of each message, by its place.
        keys: the options of a keyed table.
    """
    url = f"file://{folder}/orders.ss/orders"
    with create_producer(url) as producer:
        for place, size in enumerate(sizes):
            producer.send(json.dumps({"id": key(place), "text": f"{place} {'x' * size}"}).encode(), shard=0)
    ran = run_python(RUN, url, folder / "t", json.dumps(keys) if keys else "", HEAP)
    assert ran.returncode == 0, ran.stderr[-2_000:]
    found: list[list[int]] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_large_rows_behind_many_small_ones_are_written(folder: Path) -> None:
    """A writer of Parquet that has seen small rows only looks at its memory every 10,000 rows."""
    assert batches_of(folder, *[10] * 20_000, *[MIB] * 480) == [[20_480, 0]]
    assert_each_once(folder / "orders.ss", folder / "t")


@pytest.mark.slow
def test_a_batch_of_the_largest_rows_is_written_and_still_larger_ones_are_dead_letters(folder: Path) -> None:
    """More than 20 dead letters, as their sizes say nothing about the decoder. Dead letters lack what is too large."""
    found = batches_of(folder, *[7 * MIB] * 40, *[9 * MIB] * 25)
    assert [sum(counts) for counts in zip(*found, strict=True)] == [40, 25]
    assert_each_once(folder / "orders.ss", folder / "t")
    letters = DeltaTable(f"{folder}/t_dead_letters").to_pyarrow_table(columns=["payload"])
    assert letters.column("payload").null_count == len(letters) == 25


@pytest.mark.slow
def test_a_history_of_a_key_with_large_rows_grows_on(spark: SparkSession, folder: Path) -> None:
    """Each later batch changes a row of a file with hundreds of large rows, all of the same key."""
    found = batches_of(folder, *[MIB] * 1_100, key=lambda place: 7, columns=["id"], stored_as_scd_type=2)
    assert len(found) == 3
    rows = spark.read.format("delta").load(f"{folder}/t").select("_sequence", "_is_current").orderBy("_sequence")
    assert list(map(tuple, rows.collect())) == [(place, place == 1_100) for place in range(1, 1_101)]
