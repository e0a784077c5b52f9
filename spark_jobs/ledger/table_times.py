"""The times of the messages whose rows a batch has changed, or that a table holds; read without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_jobs.ledger.delta_log import Commit, DeltaLog
from spark_jobs.ledger.table_rows import PLACE, inside, open_files, scan
from stream_consumers.errors import LedgerUnreadableError

TIME = "_timestamp"
COLUMNS = (*PLACE, TIME)
"""The columns whose names in the data files :func:`changed_times` asks for."""
Times = npt.NDArray[np.int64]


class ChangedTimes(NamedTuple):
    """The times of the rows that a batch wrote, and of those that it replaced, in milliseconds since 1970."""

    written: Times
    replaced: Times


def changed_times(log: DeltaLog, commit: Commit, *, names: Sequence[str]) -> ChangedTimes | None:
    """The times of the rows that a batch wrote, and of those that it replaced.

    Args:
        log: of the table.
        commit: of the batch.
        names: of :data:`COLUMNS` in the data files, see :func:`spark_jobs.ledger.table_rows.names_in_files`.

    Returns:
        ``None`` if a file is gone (VACUUM removes those that were rewritten), so that they are unknown.
    """
    entry = commit.entry
    is_replaced = entry is not None and entry.mode == "replace"
    condition = None
    if entry is not None and is_replaced:
        # Files that hold a part of the range were written again as a whole.
        condition = inside({shard: parts.hull for shard, parts in entry.written.items() if parts}, names[:-1])
    try:
        removed = log.removed_files(commit.version) if is_replaced else []
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


def times_in_table(log: DeltaLog, where: str = "") -> Iterator[Times]:
    """The times of the rows that a table holds, some at a time, in milliseconds since 1970.

    Args:
        log: of the table.
        where: a SQL condition.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    for batch in scan(log, (TIME,), where=where):
        yield _milliseconds(batch.column(0))


def in_time(start: datetime | None, end: datetime | None) -> str:
    """The rows whose messages are of a time, as a SQL condition.

    Args:
        start: its first moment, in any zone; ``None`` if it has none.
        end: the moment behind the last one; ``None`` if it has none.

    Example:
        >>> in_time(datetime(2026, 11, 17, tzinfo=timezone.utc), None)
        "_timestamp >= TIMESTAMP '2026-11-17T00:00:00+00:00'"
    """
    bounds = [(">=", start), ("<", end)]
    told = [
        f"{TIME} {sign} TIMESTAMP '{moment.astimezone(timezone.utc).isoformat()}'" for sign, moment in bounds if moment
    ]
    return " AND ".join(told) or "TRUE"


def _milliseconds(column: Any) -> Times:
    times = column.cast(pa.timestamp("ms"), safe=False).drop_null()
    found: Times = times.to_numpy().astype("datetime64[ms]").astype(np.int64)
    return found
