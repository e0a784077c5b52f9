"""Orders of three days, and what Dagster loads to replay one of them: definitions that make rows in a new way."""

from __future__ import annotations

import os
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from stream_assets import Json, SparkSessionResource, StreamAsset, stream_asset, stream_definitions
from stream_consumers.create import create_producer

FOLDER_VARIABLE = "STREAM_ASSETS_TEST_FOLDER"
# Where it is set, the asset has partitions of its own.
PARTITIONS_VARIABLE = "STREAM_ASSETS_TEST_PARTITIONS"
PARTITIONS = dg.DailyPartitionsDefinition("2026-01-01", end_offset=1)
PER_DAY = 60
SHARDS = 2
DAY_MS = 86_400_000
DROPPED = {"old": 3, "new": 4}
# The old files do not end where a day does; a replay of the day is one batch.
PER_BATCH = {"old": 40, "new": 1000}
Row = tuple[Any, ...]


def last_tuesday() -> datetime:
    """The beginning of the last Tuesday that is over, in UTC."""
    today = datetime.now(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    return today - timedelta(days=(today.weekday() - 2) % 7 + 1)


def write_days(folder: Path, middle: datetime) -> None:
    """Messages of the day before, of the day from its first millisecond to its last, and of the day after."""
    start = int(middle.timestamp() * 1000) - DAY_MS
    with create_producer(f"file://{folder}/orders.ss/orders") as producer:
        for index in range(3 * PER_DAY):
            day, place = divmod(index, PER_DAY)
            moment = start + day * DAY_MS + place * (DAY_MS - 1) // (PER_DAY - 1)
            payload = b'{"id": %d, "user": "u%d"}' % (index, index % 7)
            producer.send(payload, shard=index % SHARDS, timestamp_ms=moment)


def declare(
    folder: Path,
    made_by: str,
    table: str = "orders",
    partitions: dg.DailyPartitionsDefinition | None = None,
) -> StreamAsset:
    """The asset; ``old`` and ``new`` drop different messages and fill a column differently."""

    @stream_asset(
        source=f"file://{folder}/orders.ss/orders",
        group="lakehouse",
        table=str(folder / "lake" / table),
        decode=Json("id BIGINT, user STRING"),
        max_records=PER_BATCH[made_by],
        partitions=partitions,
        spark=SparkSessionResource(master="local[2]", spark_config={"spark.sql.shuffle.partitions": "2"}),
    )
    def orders(batch: DataFrame) -> DataFrame:
        """Orders, each once."""
        return batch.where(f"id % 10 <> {DROPPED[made_by]}").withColumn("made_by", f.lit(made_by))

    return orders


def rows(table: str) -> Counter[Row]:
    """Every row: shard, sequence, time, and the other columns."""
    found = DeltaTable(table).to_pyarrow_table().to_pylist()
    return Counter((r.pop("_shard"), r.pop("_sequence"), r.pop("_timestamp"), *sorted(r.items())) for r in found)


def times(table: str) -> dict[str, list[Any]]:
    """For each file of a table, the times of its rows."""
    utc = pa.timestamp("us", tz="UTC")
    uris = DeltaTable(table).file_uris()
    return {uri: pq.read_table(uri, columns=["_timestamp"]).column(0).cast(utc).to_pylist() for uri in uris}


if FOLDER_VARIABLE in os.environ:
    days = PARTITIONS if PARTITIONS_VARIABLE in os.environ else None
    asset = declare(Path(os.environ[FOLDER_VARIABLE]), "new", partitions=days)
    defs = stream_definitions([asset])
