"""The rows of a Delta table, read without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow.compute as pc
import pyarrow.dataset
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from spark_jobs.ledger.delta_log import DeltaLog
from stream_consumers.batches import Range
from stream_consumers.errors import TableUnreadableError
from stream_consumers.messages import Shard

PLACE = ("_stream", "_shard", "_sequence")
Sequences = npt.NDArray[np.int64]


def open_dataset(
    path: str, *, version: int | None = None, storage_options: Mapping[str, str] | None = None
) -> pyarrow.dataset.Dataset:
    """One version of a table, the newest by default.

    Local files are opened by Arrow itself. delta-rs would have them opened by Python: Arrow's threads then need the
    interpreter to close them, and where it is gone by then, the process ends with "terminate called".

    Args:
        path: a local path or a URI that delta-rs understands.
        version: of the table.
        storage_options: credentials and settings for object stores.
    """
    table = DeltaTable(path, version=version, storage_options=dict(storage_options or {}))
    root = str(Path(path).absolute())
    # Names that the log escapes, and files of other folders, are for delta-rs to find.
    is_plain = "://" not in path and all(uri.startswith(f"{root}/") and "%" not in uri for uri in table.file_uris())
    return table.to_pyarrow_dataset(filesystem=SubTreeFileSystem(root, LocalFileSystem()) if is_plain else None)


def sequences(log: DeltaLog, *, version: int) -> Mapping[Shard, Sequences]:
    """All sequences of a version of a table per shard, duplicates included.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    parts: dict[Shard, list[Sequences]] = {}
    with _readable(log):
        dataset = open_dataset(log.path, version=version, storage_options=log.storage_options)
        for batch in dataset.to_batches(columns=list(PLACE)):
            for shard, found in by_shard(batch.to_pandas(), *PLACE):
                parts.setdefault(shard, []).append(found)
    return {shard: np.concatenate(found) for shard, found in parts.items()}


def last_sequences(*logs: DeltaLog) -> Mapping[Shard, int]:
    """The last sequence of each shard in several tables; one that does not exist holds none.

    Raises:
        TableUnreadableError: delta-rs cannot read the data of a table.
    """
    last: dict[Shard, int] = {}
    for log in logs:
        snapshot = log.snapshot()
        for shard, own in sequences(log, version=snapshot.version).items() if snapshot else ():
            last[shard] = max(int(own.max()), last.get(shard, -1))
    return last


def count_rows(log: DeltaLog, ranges: Mapping[Shard, Range]) -> Mapping[Shard, int]:
    """The rows of a table within these ranges, per shard.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    with _readable(log):
        table = open_dataset(log.path, storage_options=log.storage_options)
        return {shard: table.count_rows(filter=is_within(shard, part)) for shard, part in ranges.items()}


def is_within(shard: Shard, part: Range) -> pc.Expression:
    """The rows of one range; rows without a sequence lie in none."""
    stream, number, sequence = map(pc.field, PLACE)
    is_inside: pc.Expression = (stream == shard.stream) & (number == shard.id)
    return is_inside & (sequence >= part.start) & (sequence < part.end) & sequence.is_valid()


def by_shard(frame: pd.DataFrame, stream: str, number: str, sequence: str) -> Iterator[tuple[Shard, Sequences]]:
    """The sequences of each shard in a frame with these columns; rows without a place are left out."""
    placed = frame[[stream, number, sequence]].dropna()
    for (key, shard_id), found in placed.groupby([stream, number])[sequence]:
        yield Shard(str(key), int(shard_id)), found.to_numpy(np.int64)


@contextmanager
def _readable(log: DeltaLog) -> Iterator[None]:
    try:
        yield
    except (DeltaError, OSError, KeyError, ValueError) as error:
        raise TableUnreadableError(
            f"the rows of {log.path} cannot be read without Spark ({error})",
            remedy=f"The table needs its columns {', '.join(PLACE)}, and features that delta-rs can read.",
        ) from error
