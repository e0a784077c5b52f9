"""Time partitions of a table: in which of them commits changed rows, and the replay of some of them."""

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
    ROW_TIME,
    Sequences,
    changed_times,
    in_time,
    names_in_files,
    times_in_table,
)
from stream_assets.options import ReplayConfig, StreamConfig
from stream_consumers.errors import InvalidOptionError

_MINUTE_MS = 60_000
_MAX_WINDOW_TERMS = 32
"""The most terms in the condition for the rows of partitions; further windows are merged into the last term."""


@dataclass(frozen=True, slots=True)
class PartitionRows:
    """Counts of written rows by time partition.

    Args:
        rows: the number of rows written, by partition key; 0 for a partition in which rows were only replaced.
        outside: the number of rows that belong to no partition.
        unknown: the versions of the table whose rows are in unknown partitions.
    """

    rows: Mapping[str, int] = field(default_factory=dict)
    outside: int = 0
    unknown: tuple[int, ...] = ()


def check_partitions(partitions: object, *, option: str) -> None:
    """Check that partitions are time windows.

    Raises:
        InvalidOptionError: they are something else.
    """
    if partitions is not None and not isinstance(partitions, dg.TimeWindowPartitionsDefinition):
        raise InvalidOptionError(
            f"{option}={partitions!r} are not time windows",
            remedy="Use dg.DailyPartitionsDefinition, dg.HourlyPartitionsDefinition and the like, or None.",
        )


def check_current_partition(partitions: dg.TimeWindowPartitionsDefinition) -> None:
    """Check that the day or hour that is not over yet is a partition, because messages arrive in it.

    Raises:
        InvalidOptionError: it is not.
    """
    if partitions.end_offset < 1:
        raise InvalidOptionError(
            f"partitions={partitions!r} has end_offset={partitions.end_offset}: the current day or hour becomes a "
            "partition only when it is over, and until then Dagster runs no downstream asset for its rows",
            remedy="Add end_offset=1, as in dg.DailyPartitionsDefinition('2026-01-01', end_offset=1), also to the "
            "partitions of downstream assets.",
        )


def count_by_partition(
    times: Iterable[Sequences], partitions: dg.TimeWindowPartitionsDefinition, *, now: float | None = None
) -> PartitionRows:
    """Count the times in each partition, including the one that is not over yet.

    Args:
        times: the times in milliseconds since 1970.
        partitions: time windows that start and end at full minutes.
        now: the present, in seconds since 1970; partitions that start later are not counted.

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
    """Return the partition of a time, and where it ends; ``None`` if it belongs to none."""
    try:
        key = partitions.get_partition_key_for_timestamp(seconds)
        window = partitions.time_window_for_partition_key(key)
    except (ValueError, OverflowError, OSError):
        # Python has no date for the year.
        return None
    start, end = window.start.timestamp(), window.end.timestamp()
    is_defined = partitions.start.timestamp() <= start and (partitions.end is None or end <= partitions.end.timestamp())
    if not is_defined or not start <= seconds < end:
        return None
    # The current window becomes a partition when it is over, and then contains these rows.
    if start <= latest:
        return key, int(end)
    with dg.partition_loading_context(effective_dt=datetime.fromtimestamp(latest, timezone.utc)):
        return (key, int(end)) if partitions.has_partition_key(key) else None


def changed_since(
    ledger: Ledger, partitions: dg.TimeWindowPartitionsDefinition, version: int | None
) -> tuple[PartitionRows, int] | None:
    """Count the rows that ingestion changed after a version of the table, by partition.

    Args:
        ledger: the ledger of the group.
        partitions: time windows.
        version: the version up to which Dagster knows all batches; ``None`` if it knows none, so that all rows count.

    Returns:
        The counts, and the version of the newest batch; ``None`` if no batch was written after the version.

    Raises:
        LedgerUnreadableError, TableUnreadableError: the log or the data cannot be read.
    """
    commits = []
    for commit in ledger.surviving():
        if version is not None and commit.version <= version:
            break
        # Dagster does not know in which partitions a redrive wrote rows, so redrives are counted, too.
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
    """Count the rows that commits wrote in each partition in which they changed rows.

    Args:
        ledger: the ledger of the group.
        partitions: time windows.
        commits: the commits of the batches.

    Raises:
        TableUnreadableError: the table lacks one of the stream columns.
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
    """Count the rows that the table has in each of these partitions.

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


def window_condition(window: dg.TimeWindow) -> str:
    """Return the SQL condition for rows whose messages have a time in the window."""
    return in_time(window.start, window.end)


def is_partition_run(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> bool:
    """Return whether the run is for partitions, so that it replays them."""
    return bool(context.has_partition_key or context.has_partition_key_range)


def partition_replay(window: dg.TimeWindow, config: StreamConfig) -> Replay:
    """Return the replay of a run of partitions, which covers the time of all of them.

    Args:
        window: the time from the first partition to the last one.
        config: the run config.

    Raises:
        InvalidOptionError: the run config has an option that cannot be combined with partitions.
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
            f"{', '.join(refused)} cannot be combined with partitions, because a run replays its partitions completely",
            remedy="Leave it out. To ingest, run the asset's job without a partition.",
        )
    return window_replay(window, config)


def window_replay(window: dg.TimeWindow, config: ReplayConfig) -> Replay:
    """Return the replay of the messages of a time window, in any time zone."""
    first, end = (Bound(moment=moment.astimezone(timezone.utc)) for moment in (window.start, window.end))
    return Replay(first, end, OnReplay(config.on_replay.value))
