"""The time partitions of a table: which of them a batch has touched, and which ones a run is to replay."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone

import dagster as dg
import numpy as np

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.replay import OnReplay, Replay
from spark_jobs.ledger.delta_log import Commit
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import (
    PLACE,
    ROW_TIME,
    Sequences,
    changed_times,
    in_ranges,
    in_time,
    names_in_files,
    scan,
    sequences_of,
    times_in_table,
)
from stream_assets.options import ReplayConfig, StreamConfig
from stream_consumers.batches import Range
from stream_consumers.epochs import split_epoch
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Shard

_MINUTE_MS = 60_000
_MAX_WINDOW_TERMS = 32
"""The most terms of the condition for the rows of some partitions; later ones become one, with what lies between."""


@dataclass(frozen=True, slots=True)
class PartitionRows:
    """Rows by time partition.

    Args:
        rows: how many were written, by the key of the partition; 0 where rows were only replaced.
        outside: how many are of no partition.
        unknown: versions of the table whose rows are in unknown partitions.
    """

    rows: Mapping[str, int] = field(default_factory=dict)
    outside: int = 0
    unknown: tuple[int, ...] = ()


def check_partitions(partitions: object, *, option: str) -> None:
    """Refuse what is no windows of time.

    Raises:
        InvalidOptionError: naming the option.
    """
    if partitions is not None and not isinstance(partitions, dg.TimeWindowPartitionsDefinition):
        raise InvalidOptionError(
            f"{option}={partitions!r} are no windows of time",
            remedy="Use dg.DailyPartitionsDefinition, dg.HourlyPartitionsDefinition and the like, or None.",
        )


def check_current_partition(partitions: dg.TimeWindowPartitionsDefinition) -> None:
    """Refuse partitions without the one that messages come into now.

    Raises:
        InvalidOptionError: a day that is not over is not one of them.
    """
    if partitions.end_offset < 1:
        raise InvalidOptionError(
            f"partitions={partitions!r} has end_offset={partitions.end_offset}: its current day or hour becomes a "
            "partition only when it is over, and until then Dagster makes nothing downstream of its rows",
            remedy="Add end_offset=1, as in dg.DailyPartitionsDefinition('2026-01-01', end_offset=1), also to the "
            "partitions of what is downstream.",
        )


def count_by_partition(
    times: Iterable[Sequences], partitions: dg.TimeWindowPartitionsDefinition, *, now: float | None = None
) -> PartitionRows:
    """How many of these times lie in each partition, also in the one that is not over yet.

    Args:
        times: in milliseconds since 1970.
        partitions: windows of time; none begins or ends within a minute.
        now: in seconds since 1970; what begins later is outside.

    Example:
        >>> days = dg.DailyPartitionsDefinition("2026-11-16")
        >>> midnight = 1_794_960_000_000
        >>> count_by_partition([np.array([midnight - 1, midnight, midnight + 5])], days, now=midnight / 1000 + 60)
        PartitionRows(rows={'2026-11-17': 1, '2026-11-18': 2}, outside=0, unknown=())
    """
    latest = time.time() if now is None else now
    rows: dict[str, int] = {}
    outside = 0
    for part in times:
        minutes, counts = np.unique(part // _MINUTE_MS, return_counts=True)
        first = 0
        while first < len(minutes):
            seconds = int(minutes[first]) * 60
            window = _window(partitions, seconds, latest)
            if window is None:
                outside += int(counts[first])
                first += 1
                continue
            key, end = window
            after = int(np.searchsorted(minutes, end // 60))
            rows[key] = rows.get(key, 0) + int(counts[first:after].sum())
            first = after
    return PartitionRows(dict(sorted(rows.items())), outside)


def _window(partitions: dg.TimeWindowPartitionsDefinition, seconds: int, latest: float) -> tuple[str, int] | None:
    """The partition of a time and where it ends; ``None`` if it is of none."""
    try:
        key = partitions.get_partition_key_for_timestamp(seconds)
        window = partitions.time_window_for_partition_key(key)
    except (ValueError, OverflowError, OSError):
        # Years that dates of Python do not have.
        return None
    start, end = window.start.timestamp(), window.end.timestamp()
    is_defined = partitions.start.timestamp() <= start and (partitions.end is None or end <= partitions.end.timestamp())
    if not is_defined or not start <= seconds < end:
        return None
    # The window of now becomes a partition when it is over, and has these rows then.
    if start <= latest:
        return key, int(end)
    with dg.partition_loading_context(effective_dt=datetime.fromtimestamp(latest, timezone.utc)):
        return (key, int(end)) if partitions.has_partition_key(key) else None


def changed_since(
    ledger: Ledger, partitions: dg.TimeWindowPartitionsDefinition, version: int | None
) -> tuple[PartitionRows, int] | None:
    """The partitions that ingestion has touched since a version of the table.

    Args:
        ledger: of the group.
        partitions: windows of time.
        version: from which Dagster knows of all batches; ``None`` if it knows none: then all rows count.

    Returns:
        They, and the version of the newest batch; ``None`` if there was no batch since.

    Raises:
        LedgerUnreadableError, TableUnreadableError: the log or the data cannot be read.
    """
    commits = []
    for commit in ledger.surviving():
        if version is not None and commit.version <= version:
            break
        # Dagster does not know the rows of a redrive, as it does not know those of ingestion.
        if commit.entry is not None and (commit.entry.kind == "batch" or commit.entry.places):
            commits.append(commit)
            if version is None:
                break
    if not commits:
        return None
    newest = commits[0].version
    if version is None:
        return count_by_partition(times_in_table(ledger.log), partitions), newest
    return changed_by(ledger, partitions, commits), newest


def changed_by(
    ledger: Ledger, partitions: dg.TimeWindowPartitionsDefinition, commits: Iterable[Commit]
) -> PartitionRows:
    """The partitions that batches have touched, with the rows that they wrote there.

    Args:
        ledger: of the group.
        partitions: windows of time.
        commits: those of the batches.

    Raises:
        TableUnreadableError: the table lacks one of our columns.
    """
    names = names_in_files(ledger.log, ROW_TIME)
    found = {commit.version: changed_times(ledger.log, commit, names=names) for commit in commits}
    known = [times for times in found.values() if times is not None]
    written = count_by_partition((times.written for times in known), partitions)
    replaced = count_by_partition((times.replaced for times in known), partitions)
    unknown = tuple(sorted(version for version, times in found.items() if times is None))
    keys = sorted(written.rows.keys() | replaced.rows.keys())
    return PartitionRows({key: written.rows.get(key, 0) for key in keys}, written.outside, unknown)


def rows_in_partitions(
    ledger: Ledger, partitions: dg.TimeWindowPartitionsDefinition, keys: Collection[str]
) -> Mapping[str, int]:
    """How many rows the table has in each of these partitions.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    windows: list[dg.TimeWindow] = []
    for window in sorted(map(partitions.time_window_for_partition_key, keys), key=lambda one: one.start):
        if windows and (window.start <= windows[-1].end or len(windows) == _MAX_WINDOW_TERMS):
            windows[-1] = dg.TimeWindow(windows[-1].start, window.end)
        else:
            windows.append(window)
    if not windows:
        return {}
    where = " OR ".join(f"({window_condition(window)})" for window in windows)
    found = count_by_partition(times_in_table(ledger.log, where), partitions).rows
    return {key: found.get(key, 0) for key in keys}


def count_rows_outside(
    ledger: Ledger, window: dg.TimeWindow, ranges: Mapping[Shard, Range], *, streams: Collection[str]
) -> int:
    """How many rows of a window of time lie outside of these ranges: late messages, among those of another time.

    Args:
        ledger: of the group.
        window: of time.
        ranges: what was replayed, and what cannot be.
        streams: the keys of those that are replayed; the table may have rows of others.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    outside = f" AND NOT ({in_ranges(ranges)})" if ranges else ""
    found = sequences_of(scan(ledger.log, PLACE, where=window_condition(window) + outside))
    return sum(len(part) for shard, part in found.items() if split_epoch(shard.stream)[0] in streams)


def window_condition(window: dg.TimeWindow) -> str:
    """The rows whose messages have times in a window, as a SQL condition."""
    return in_time(window.start, window.end)


def is_partition_run(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> bool:
    """Whether the run was asked for partitions: then it replays them."""
    return bool(context.has_partition_key or context.has_partition_key_range)


def partition_replay(window: dg.TimeWindow, config: StreamConfig) -> Replay:
    """What a run of partitions replays: the messages of their time, of all of them at once.

    Args:
        window: from the first partition to the last one.
        config: of the run.

    Raises:
        InvalidOptionError: the run config says something that does not go together with partitions.
    """
    given = {
        "start": config.start.bound() is not None,
        "stop": config.stop.bound() is not None,
        "move_group": config.move_group,
        "accept": bool(config.accept),
        "max_batches": config.max_batches is not None,
        "linger_seconds": bool(config.linger_seconds),
    }
    refused = [name for name, is_given in given.items() if is_given]
    if refused:
        raise InvalidOptionError(
            f"{', '.join(refused)} does not go together with partitions: they say what is replayed, and all of it is",
            remedy="Leave it out; or run the asset's job without a partition, which ingests.",
        )
    return window_replay(window, config)


def window_replay(window: dg.TimeWindow, config: ReplayConfig) -> Replay:
    """The replay of the messages of a window of time.

    Args:
        window: in any time zone.
        config: of the run.
    """
    first, end = (Bound(moment=moment.astimezone(timezone.utc)) for moment in (window.start, window.end))
    return Replay(first, end, OnReplay(config.on_replay.value))
