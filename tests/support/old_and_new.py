"""Two transforms that drop different rows, and the rows that they make of a feed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from pathlib import Path

import pyarrow.compute as pc
from deltalake import DeltaTable
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from tests.support.feeds import SHARDS, Feed

Row = tuple[str, int, int, int, int, str]
COLUMNS = ["_stream", "_shard", "_sequence", "_timestamp", "id", "made_by"]


def old(rows: DataFrame) -> DataFrame:
    """Drops every tenth message, and says who made the row."""
    return rows.where("id % 10 <> 3").withColumn("made_by", f.lit("old"))


def new(rows: DataFrame) -> DataFrame:
    """Drops others."""
    return rows.where("id % 10 <> 4").withColumn("made_by", f.lit("new"))


def rows_of(table: Path | str) -> Counter[Row]:
    """Every row of a table that these two made: stream, shard, sequence, timestamp in ms, id, who made it."""
    found = DeltaTable(str(table)).to_pyarrow_table(columns=COLUMNS)
    milliseconds = pc.divide(pc.cast(found["_timestamp"], "int64"), 1000)
    columns = [(milliseconds if name == "_timestamp" else found[name]).to_pylist() for name in COLUMNS]
    return Counter(zip(*columns))


def made(feed: Feed, numbers: Iterable[int], *, by_new: Container[int] = ()) -> Counter[Row]:
    """The rows of these messages, made by :func:`new` where it says so, else by :func:`old`."""
    found: Counter[Row] = Counter()
    for number in numbers:
        name, dropped = ("new", 4) if number in by_new else ("old", 3)
        if number % 10 != dropped:
            place = (feed.stream, number % SHARDS, feed.sequence(number), feed.moment(number))
            found[(*place, number, name)] += 1
    return found
