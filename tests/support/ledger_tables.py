"""Tables with batches of ours in them, written without Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from spark_jobs.ledger.table_rows import in_ranges
from stream_consumers.batches import Range
from stream_consumers.messages import Shard
from tests.support.written_log import made_entry

STREAM = "orders"


def at(text: str) -> int:
    """A time in UTC, in milliseconds.

    Example:
        >>> at("2026-11-17")
        1794873600000
    """
    return int(datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp() * 1000)


def write_batch(
    table: Path,
    rows: Mapping[int, str],
    *,
    kind: str = "batch",
    ranges: Iterable[int] | None = None,
    replay: str = "",
    partition_by: list[str] | None = None,
    properties: dict[str, str | None] | None = None,
) -> int:
    """A commit of a batch of one shard: rows by their sequences, each with its time; the version.

    Args:
        table: the folder.
        rows: what it writes.
        kind: of its entry.
        ranges: the sequences that it replaces; without any it appends.
        replay: the id of the replay that it begins and ends.
        partition_by: what the table is partitioned by, where this makes it.
        properties: of the table, where this makes it.
    """
    version = DeltaTable(str(table)).version() if table.exists() else -1
    number = version + 2
    covered = sorted(rows if ranges is None else ranges)
    written = {Shard(STREAM, 0): Range(covered[0], covered[-1] + 1)}
    entry = made_entry(
        number,
        version,
        group="lakehouse",
        kind=kind,
        bid=f"bid-{number}",
        ranges=written,
        mode="append" if ranges is None else "replace",
        replay=replay,
        goal=written if replay else {},
        begins=bool(replay),
    )
    data = pa.table(
        {
            "_stream": pa.array([STREAM] * len(rows), pa.string()),
            "_shard": pa.array([0] * len(rows), pa.int64()),
            "_sequence": pa.array(list(rows), pa.int64()),
            "_timestamp": pa.array([at(moment) * 1000 for moment in rows.values()], pa.timestamp("us", "UTC")),
        }
    )
    commit = CommitProperties(
        custom_metadata={"userMetadata": entry.to_json()}, app_transactions=[Transaction(entry.app, number)]
    )
    if ranges is None:
        write_deltalake(
            str(table),
            data,
            mode="append",
            partition_by=partition_by,
            configuration=properties,
            commit_properties=commit,
        )
    else:
        condition = in_ranges(entry.ranges)
        write_deltalake(str(table), data, mode="overwrite", predicate=condition, commit_properties=commit)
    return version + 1
