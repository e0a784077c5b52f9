"""Small batches are read by the driver: without executors, and with everything counted before anything is written.

To hand a few thousand messages from Kafka over Python workers to Spark takes longer than to read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from spark_jobs.reading.clean import count_by_shard
from spark_jobs.reading.source import SourceColumns
from spark_jobs.reading.spark_types import arrow_schema, with_variants
from stream_consumers.batches import Split
from stream_consumers.messages import Shard

MOST_BYTES = 8 << 20
"""Of decoded messages; what is larger is for executors."""


@dataclass(frozen=True, slots=True)
class SmallBatch:
    """The messages of some splits.

    Args:
        rows: as they were read.
        messages: how many could be decoded, per shard.
        dead: how many dead letters there are.
    """

    rows: pa.Table
    messages: Mapping[Shard, int]
    dead: int

    def frame(self, spark: SparkSession, source: SourceColumns) -> DataFrame:
        """The rows for Spark, in one partition: many small files would make the table slow to read."""
        # Of all that is lost there are no rows, and Spark makes nothing of an Arrow table without chunks.
        found: Any = self.rows if self.rows.num_rows else []
        rows = spark.createDataFrame(found, source.as_read).coalesce(1)
        return with_variants(rows, source.columns)


def read_small(splits: Sequence[Split], source: SourceColumns, *, keeps_payloads: bool = False) -> SmallBatch | None:
    """Read splits here and decode their messages in another process; ``None`` if they hold over :data:`MOST_BYTES`.

    Args:
        splits: what to read.
        source: the decoder of the payloads, and its columns.
        keeps_payloads: as in :func:`spark_jobs.reading.source.read_splits`.

    Raises:
        StreamAssetsError: a split cannot be read.
        Exception: whatever a decoder of the user's raises.
    """
    blocks = chain.from_iterable(split.read() for split in splits)
    found: list[pa.RecordBatch] = []
    size = 0
    for rows in source.decode(blocks, keeps_payloads=keeps_payloads):
        found.append(rows)
        size += rows.nbytes
        if size > MOST_BYTES:
            return None
    messages: Counter[Shard] = Counter()
    for rows in found:
        messages.update(dict(count_by_shard(rows.filter(rows.column("_error").is_null()))))
    table = pa.Table.from_batches(found, arrow_schema(source.as_read))
    return SmallBatch(table, messages, table.num_rows - messages.total())
