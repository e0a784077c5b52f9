"""Reads rows of a Delta table without Spark, with deletion vectors, column mapping, and the files of a clone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import reduce
from operator import and_, or_
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
from deltalake import DeltaTable

from spark_jobs.ledger.delta_log import Commit, DataFile, DeltaLog, reading
from spark_jobs.ledger.intervals import Intervals
from stream_consumers.batches import Range
from stream_consumers.errors import LedgerUnreadableError, StreamAssetsError, TableUnreadableError
from stream_consumers.messages import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS, Shard

ROW_PLACE = ("_stream", "_shard", "_sequence")
"""The columns that identify the message of a row: its place in the stream."""
HAS_NO_PLACE = " OR ".join(f"{name} IS NULL" for name in ROW_PLACE)
"""A SQL condition: the rows without a place. Other programs wrote them, or changed them."""
TIME = "_timestamp"
ROW_TIME = (*ROW_PLACE, TIME)
"""The place and the timestamp of a row."""
MESSAGE_TIME = ("stream", "shard", "sequence", "timestamp_ms")
"""The place and the timestamp of a message of :data:`stream_consumers.batches.MESSAGE_SCHEMA`."""
Sequences = npt.NDArray[np.int64]
_PLACE_TYPES: Sequence[pa.DataType] = (pa.string(), pa.int64(), pa.int64())


NO_TIMESTAMP = int(np.iinfo(np.int64).min)
"""The value for a row without a timestamp."""


class Timestamps(NamedTuple):
    """Sequences of a shard, and for each the timestamp in milliseconds, or :data:`NO_TIMESTAMP`."""

    sequences: Sequences
    timestamps_ms: Sequences


NO_TIMES = Timestamps(np.empty(0, np.int64), np.empty(0, np.int64))
# Arrow would read Spark's INT96 timestamps as nanoseconds, which end in the year 2262.
_PARQUET = pyarrow.dataset.ParquetFileFormat(coerce_int96_timestamp_unit="us")


def scan(
    log: DeltaLog, columns: Sequence[str] | None = None, *, where: str = "", version: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one version of a table in chunks.

    Args:
        log: the log of the table.
        columns: the columns to read; all by default.
        where: a SQL condition; files that it excludes are not opened.
        version: the version of the table, the newest by default.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
        LedgerUnreadableError: its log names a path that is not a data file.
    """
    with _readable(log, version):
        table = DeltaTable(log.path, version=version, storage_options=log.storage_options)
        if "://" not in log.path:
            log.check_files(unquote(str(path)) for path in pa.table(table.get_add_actions()).column("path").to_pylist())
        for batch in table.scan(list(columns) if columns else None, where or None):
            yield pa.record_batch(batch)


def count_where(log: DeltaLog, where: str) -> int:
    """Count the rows that fulfil a SQL condition.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    return sum(batch.num_rows for batch in scan(log, ROW_PLACE, where=where))


def sequences_of(batches: Iterable[pa.RecordBatch], names: Sequence[str] = ROW_PLACE) -> Mapping[Shard, Sequences]:
    """Return the sequences of these rows per shard, with repetitions; rows without a place are left out.

    Args:
        batches: rows, or messages.
        names: the names of the columns with their place.
    """
    parts: dict[Shard, list[Sequences]] = {}
    for batch in batches:
        for shard, found in by_shard(_frame(batch.select(list(names))), *names):
            parts.setdefault(shard, []).append(found)
    return {shard: np.concatenate(found) for shard, found in parts.items()}


def timestamps_of(batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> Mapping[Shard, Timestamps]:
    """Return the sequences and timestamps per shard, with repetitions; rows without a place are left out.

    A timestamp that no table can hold becomes :data:`NO_TIMESTAMP`: such a message is a dead letter without one.

    Args:
        batches: rows, or messages.
        names: the names of their columns: :data:`ROW_TIME`, or :data:`MESSAGE_TIME`.
    """
    parts: dict[Shard, list[Timestamps]] = {}
    for batch in batches:
        placed = batch.select(names[:3]).to_pandas(integer_object_nulls=True)
        timestamps = batch.column(names[3])
        if pa.types.is_timestamp(timestamps.type):
            timestamps = timestamps.cast(pa.timestamp("ms", timestamps.type.tz), safe=False)
        moments = timestamps.cast(pa.int64()).fill_null(NO_TIMESTAMP).to_numpy()
        is_possible = (moments >= MIN_TIMESTAMP_MS) & (moments <= MAX_TIMESTAMP_MS)
        placed["moment"] = np.where(is_possible, moments, NO_TIMESTAMP)
        for (stream, number), own in placed.dropna().groupby([*names[:2]]):
            found = Timestamps(own[names[2]].to_numpy(np.int64), own["moment"].to_numpy(np.int64))
            parts.setdefault(Shard(str(stream), int(number)), []).append(found)
    return {shard: Timestamps(*map(np.concatenate, zip(*found))) for shard, found in parts.items()}


def compared(stream: Timestamps, table: Timestamps) -> tuple[Sequences, Sequences]:
    """Return the sequences that are in both: those with the same timestamp, and those with different timestamps."""
    sequences, first = np.unique(stream.sequences, return_index=True)
    at = np.searchsorted(sequences, table.sequences)
    is_common = at < len(sequences)
    is_common[is_common] = sequences[at[is_common]] == table.sequences[is_common]
    is_same = stream.timestamps_ms[first[at[is_common]]] == table.timestamps_ms[is_common]
    common = table.sequences[is_common]
    return common[is_same], common[~is_same]


def column_names(log: DeltaLog, *, version: int | None = None) -> list[str]:
    """Return the column names of one version of a table, the newest by default.

    Raises:
        TableUnreadableError: delta-rs cannot read the table.
    """
    with _readable(log):
        table = DeltaTable(log.path, version=version, storage_options=log.storage_options)
        return [column.name for column in table.schema().fields]


def schema_of(log: DeltaLog) -> Mapping[str, Any]:
    """Return the columns of the newest version of a table, as Delta writes them in JSON.

    Raises:
        TableUnreadableError: delta-rs cannot read the table.
    """
    with _readable(log):
        table = DeltaTable(log.path, storage_options=log.storage_options)
        schema: Mapping[str, Any] = json.loads(table.schema().to_json())
        return schema


def names_in_files(log: DeltaLog, columns: Sequence[str] = ROW_PLACE) -> list[str]:
    """Return the names of columns in the data files, which differ with column mapping.

    Raises:
        TableUnreadableError: the table lacks one of them.
    """
    with _readable(log):
        fields = {column["name"]: column.get("metadata", {}) for column in schema_of(log)["fields"]}
        return [str(fields[name].get("delta.columnMapping.physicalName", name)) for name in columns]


def written_sequences(
    log: DeltaLog, commit: Commit, ranges: Mapping[Shard, Range], *, names: Sequence[str]
) -> Mapping[Shard, Sequences] | None:
    """Return the sequences of the rows that a commit wrote within these ranges, from the files that it added.

    A data file never changes, so that later changes of the rows do not matter.

    Args:
        log: the log of the table.
        commit: the commit of a batch.
        ranges: the ranges.
        names: see :func:`names_in_files`.

    Returns:
        The sequences per shard; ``None`` if a file is gone, because VACUUM removes files that were rewritten.
    """
    try:
        files = log.added_files(commit.version)
        if not files:
            return {}
        found = open_files(log, files, names).to_table(filter=inside(ranges, names)).to_pandas()
    except (OSError, ValueError, KeyError, LedgerUnreadableError):
        return None
    return dict(by_shard(found, *names))


def open_files(log: DeltaLog, files: Sequence[DataFile], names: Sequence[str]) -> pyarrow.dataset.Dataset:
    """Open data files, with the columns of :data:`ROW_PLACE` also if the table is partitioned by them.

    Args:
        log: the log of the table.
        files: one or more files.
        names: the names of the columns in the files: those of :data:`ROW_PLACE`, and others after them.

    Raises:
        LedgerUnreadableError: a path is not that of a data file.
        OSError: a file is gone.
        KeyError: a column is neither in the first file nor in the partition of each file.
    """
    types, partitioned = dict(zip(names, _PLACE_TYPES)), [name for name in names if name in files[0].partition]
    where = log.files()
    log.check_files(file.path for file in files)
    fragments = []
    for file in files:
        if file.path.startswith("/"):
            # A file of the table that this one is a shallow clone of, which is not in the folder of this one.
            raise FileNotFoundError(file.path)
        condition = reduce(
            and_, (_is(name, file.partition[name], types[name]) for name in partitioned), pc.scalar(True)
        )
        fragments.append(_PARQUET.make_fragment(file.path, where, partition_expression=condition))
    written = fragments[0].physical_schema
    columns = [pa.field(name, types[name]) if name in partitioned else written.field(name) for name in names]
    return pyarrow.dataset.FileSystemDataset(fragments, pa.schema(columns), _PARQUET, where)


def _is(name: str, text: str | None, kind: pa.DataType) -> pc.Expression:
    # Delta writes no value for null.
    return pc.field(name) == pa.scalar(text).cast(kind) if text else pc.field(name).is_null()


def inside(ranges: Mapping[Shard, Range], names: Sequence[str]) -> pc.Expression:
    """Return a condition for the rows in these ranges, where the columns of :data:`ROW_PLACE` have these names."""
    stream, number, sequence = map(pc.field, names)
    parts = [
        (stream == shard.stream) & (number == shard.id) & (sequence >= part.start) & (sequence < part.end)
        for shard, part in ranges.items()
    ]
    return reduce(or_, parts, pc.scalar(False))


def extents_of(batches: Iterable[pa.RecordBatch]) -> Mapping[Shard, Range]:
    """Return the range from the first to after the last sequence of each shard."""
    found: dict[Shard, Range] = {}
    for batch in batches:
        for shard, own in by_shard(_frame(batch), *ROW_PLACE):
            known = found.get(shard, Range(int(own.min()), int(own.max()) + 1))
            found[shard] = Range(min(known.start, int(own.min())), max(known.end, int(own.max()) + 1))
    return found


def _frame(batch: pa.RecordBatch) -> pd.DataFrame:
    """Convert rows to pandas, with whole numbers also next to nulls: floats are not exact beyond 2^53."""
    return batch.to_pandas(integer_object_nulls=True)


def last_sequences(*logs: DeltaLog) -> Mapping[Shard, int]:
    """Return the last sequence of each shard in several tables, some of which may not exist.

    Raises:
        TableUnreadableError: delta-rs cannot read the data of a table.
    """
    last: dict[Shard, int] = {}
    for log in logs:
        for shard, part in row_extents(log).items():
            last[shard] = max(part.end - 1, last.get(shard, -1))
    return last


def row_extents(log: DeltaLog) -> Mapping[Shard, Range]:
    """Return the range from the first to after the last row of each shard; nothing if there is no table.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    return extents_of(scan(log, ROW_PLACE) if log.snapshot() else ())


def count_rows(log: DeltaLog, ranges: Mapping[Shard, Range]) -> Mapping[Shard, int]:
    """Count the rows of a table within these ranges, per shard.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    return {shard: count_where(log, in_ranges({shard: part})) for shard, part in ranges.items()}


def in_ranges(ranges: Mapping[Shard, Range]) -> str:
    """Return a SQL condition for the rows in these ranges.

    Example:
        >>> in_ranges({Shard("orders", 3): Range(5, 9)})
        "(_stream = 'orders' AND _shard = 3 AND _sequence >= 5 AND _sequence < 9)"
    """
    return " OR ".join(
        f"(_stream = '{shard.stream}' AND _shard = {shard.id} AND _sequence >= {start} AND _sequence < {end})"
        for shard, (start, end) in sorted(ranges.items())
    )


def in_places(places: Mapping[Shard, Intervals]) -> str:
    """Return a SQL condition for the rows with these sequences.

    Example:
        >>> in_places({Shard("orders", 3): Intervals.of((5, 9), (12, 13), (15, 16))})
        "(_stream = 'orders' AND _shard = 3 AND (_sequence IN (12, 15) OR (_sequence >= 5 AND _sequence < 9)))"
        >>> in_places({Shard("orders", 3): Intervals()})
        "(_stream = 'orders' AND _shard = 3 AND (FALSE))"
        >>> in_places({})
        'FALSE'
    """
    found = []
    for shard, parts in sorted(places.items()):
        single = [str(start) for start, end in parts if end - start == 1]
        within = [f"(_sequence >= {start} AND _sequence < {end})" for start, end in parts if end - start > 1]
        listed = [f"_sequence IN ({', '.join(single)})"] if single else []
        # A rewind has shards without a sequence.
        sequences = " OR ".join([*listed, *within]) or "FALSE"
        found.append(f"(_stream = '{shard.stream}' AND _shard = {shard.id} AND ({sequences}))")
    return " OR ".join(found) or "FALSE"


def within(found: Sequences, parts: Intervals) -> Sequences:
    """Return the sequences that are in the intervals, in the same order.

    Example:
        >>> within(np.array([9, 3, 4, 5]), Intervals.of((3, 5), (9, 12))).tolist()
        [9, 3, 4]
    """
    return found[is_within(found, parts)]


def is_within(found: Sequences, parts: Intervals) -> npt.NDArray[np.bool_]:
    """Return for each sequence whether it is in the intervals."""
    if not parts:
        return np.zeros(len(found), np.bool_)
    starts, ends = (np.array(bounds, np.int64) for bounds in zip(*parts.ranges))
    at = np.searchsorted(starts, found, side="right") - 1
    inside: npt.NDArray[np.bool_] = (at >= 0) & (found < ends[at])
    return inside


def by_shard(frame: pd.DataFrame, stream: str, number: str, sequence: str) -> Iterator[tuple[Shard, Sequences]]:
    """Yield the sequences of each shard in a frame with these columns; rows without a place are left out."""
    placed = frame[[stream, number, sequence]].dropna()
    for (key, shard_id), found in placed.groupby([stream, number])[sequence]:
        yield Shard(str(key), int(shard_id)), found.to_numpy(np.int64)


class ChangedTimes(NamedTuple):
    """The times of the rows that a batch wrote, and of those that it replaced, in milliseconds since 1970."""

    written: Sequences
    replaced: Sequences


def changed_times(log: DeltaLog, commit: Commit, *, names: Sequence[str]) -> ChangedTimes | None:
    """Return the times of the rows that a batch wrote, and of those that it replaced.

    Args:
        log: the log of the table.
        commit: the commit of the batch.
        names: the names of :data:`ROW_TIME` in the data files, see :func:`names_in_files`.

    Returns:
        ``None`` if a file is gone, because VACUUM removes files that were rewritten.
    """
    entry = commit.entry
    rewrites = entry is not None and entry.write_mode.rewrites_files
    condition = None
    if entry is not None and rewrites:
        # A replace writes whole files again, also those with only some rows in the range.
        condition = inside({shard: parts.hull for shard, parts in entry.affected.items() if parts}, names[:-1])
    try:
        removed = log.removed_files(commit.version) if rewrites else []
        return ChangedTimes(
            *(
                _milliseconds(open_files(log, files, names).to_table(columns=[names[-1]], filter=condition).column(0))
                if files
                else np.empty(0, np.int64)
                for files in (log.added_files(commit.version), removed)
            )
        )
    except (OSError, ValueError, KeyError, LedgerUnreadableError):
        return None


def times_in_table(log: DeltaLog, where: str = "") -> Iterator[Sequences]:
    """Yield the times of the rows of a table in chunks, in milliseconds since 1970.

    Args:
        log: the log of the table.
        where: a SQL condition.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    for batch in scan(log, (TIME,), where=where):
        yield _milliseconds(batch.column(0))


def in_time(start: datetime | None, end: datetime | None) -> str:
    """Return a SQL condition for the rows whose messages have a timestamp from ``start`` up to ``end``.

    Args:
        start: in any time zone; ``None`` for no lower bound.
        end: exclusive; ``None`` for no upper bound.

    Example:
        >>> in_time(datetime(2026, 11, 17, tzinfo=timezone.utc), None)
        "_timestamp >= TIMESTAMP '2026-11-17T00:00:00+00:00'"
    """
    bounds = [(">=", start), ("<", end)]
    conditions = [
        f"{TIME} {sign} TIMESTAMP '{moment.astimezone(timezone.utc).isoformat()}'" for sign, moment in bounds if moment
    ]
    return " AND ".join(conditions) or "TRUE"


def _milliseconds(column: Any) -> Sequences:
    times = column.cast(pa.timestamp("ms"), safe=False).drop_null()
    found: Sequences = times.to_numpy().astype("datetime64[ms]").astype(np.int64)
    return found


@contextmanager
def _readable(log: DeltaLog, version: int | None = None) -> Iterator[None]:
    with reading(
        log,
        what=f"the rows of {log.path} cannot be read without Spark",
        remedy=f"The table needs its columns {', '.join(ROW_PLACE)}, and features that delta-rs can read.",
    ):
        try:
            yield
        except StreamAssetsError:
            raise
        except Exception:  # delta-rs raises a bare Exception for a missing file, in the middle of the rows
            if torn := log.torn_files(version):
                raise TableUnreadableError(
                    f"{len(torn)} data files of {log.path} are torn, like {torn[0]}",
                    remedy="A power cut, or a full or broken disk, leaves such files. Undo it with RESTORE TABLE … TO "
                    "VERSION AS OF the version before the one that added them; the next run reads the messages again.",
                ) from None
            raise
