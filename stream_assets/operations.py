"""Maintenance of the table of a stream asset, and a sensor for its dead letters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dagster as dg

from sensors.asset_runs import IN_FLIGHT
from sensors.lag_sensor import read_cursor, write_cursor
from spark_jobs.maintenance import TableMaintenance, maintain
from spark_jobs.purge import check_has_deleted_rows
from stream_assets.asset import StreamAsset
from stream_assets.metadata import VERSION
from stream_assets.resources import run_session
from stream_assets.stream_run import final_failures
from stream_consumers.display import counted
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import check_count, check_range, choice


def build_maintenance(
    stream: StreamAsset,
    *,
    cron_schedule: str = "0 3 * * *",
    execution_timezone: str = "UTC",
    pool: str | None = None,
    schedule_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.STOPPED,
    group_name: str | None = None,
    purge_after_days: float | None = None,
) -> dg.Definitions:
    """Build an asset that maintains the table of a stream asset, with its job and its schedule.

    A run compacts small files (OPTIMIZE), and deletes files that no restorable version needs (VACUUM), in the table and
    in its dead-letter table. If the group is quiet, it commits the ledger of the group again, before the log that holds
    it is cleaned. Ingestion may run at the same time.

    Args:
        stream: the asset.
        cron_schedule: when to run; daily at 3:00 by default. It must run at least twice in the time that the table
            keeps its log (``delta.logRetentionDuration``, 30 days by default).
        execution_timezone: the time zone of ``cron_schedule``.
        pool: Dagster's pool of the asset. With ``single_writer=True``, where only one run may write the table, the
            default is the pool of the stream asset, whose limit must be 1.
        schedule_status: whether the schedule runs without being turned on.
        group_name: Dagster's group of the asset.
        purge_after_days: for a keyed table with ``sequence_by``, remove rows of deleted keys whose messages are older.
            From then on, a change whose ``sequence_by`` is below those of all younger messages, and whose key has
            no row, fails the run, or becomes a dead letter with ``on_bad_rows="dead_letter"``. By default they stay.

    Raises:
        InvalidOptionError: the table has a single writer, and ``pool`` is not the pool of the asset; or it has no rows
            that could be purged.

    Example:
        >>> from stream_assets import stream_asset
        >>> @stream_asset(source="memory://shop/orders", group="lakehouse", table="lake/orders")
        ... def orders(batch):
        ...     return batch
        >>> [job.name for job in build_maintenance(orders).jobs]
        ['maintain_orders']
    """
    status = choice(dg.DefaultScheduleStatus, schedule_status, option="schedule_status")
    own_pool = stream.declared.pool
    if own_pool and pool not in (None, own_pool):
        raise InvalidOptionError(
            f"pool={pool!r} lets maintenance write at the same time as {stream.key.to_user_string()}",
            remedy=f"Leave it out: the default is {own_pool!r}.",
        )
    if purge_after_days is not None:
        check_range("purge_after_days", purge_after_days)
        check_has_deleted_rows(stream.declared.keys, table=stream.key.to_user_string())
    spark = stream.declared.spark
    name = f"{stream.declared.name}_maintenance"

    @dg.asset(
        name=f"{stream.key.path[-1]}_maintenance",
        key_prefix=stream.key.path[:-1] or None,
        deps=[stream.key],
        group_name=group_name,
        kinds={"spark", "deltalake"},
        description=f"Compacts small files of {stream.key.to_user_string()} and deletes files that no version needs.",
        required_resource_keys={spark} if isinstance(spark, str) else set(),
        pool=pool or own_pool,
    )
    def maintenance(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]
        with final_failures(shows_values=stream.declared.errors.dead_letter_payloads):
            declared = stream.declared.located(
                context.instance, retry_seconds=stream.declared.retry_seconds, on_wait=context.log.warning
            )
            with run_session(context, spark, declared.table) as session:
                done = maintain(session, declared.ingestion, purge_after_days=purge_after_days)
        for table in done:
            context.log.info(_describe(table))
        return dg.MaterializeResult(metadata=_metadata(done))

    job = dg.define_asset_job(
        f"maintain_{stream.declared.name}",
        selection=dg.AssetSelection.assets(maintenance),
        executor_def=dg.in_process_executor,
        run_tags=dict(stream.declared.op.run_tags),
        description=f"Maintains the table of {stream.key.to_user_string()}.",
    )
    schedule = dg.ScheduleDefinition(
        name=name,
        job=job,
        cron_schedule=cron_schedule,
        execution_timezone=execution_timezone,
        default_status=status,
    )
    return dg.Definitions(assets=[maintenance], jobs=[job], schedules=[schedule])


def _describe(done: TableMaintenance) -> str:
    compacted = f"compacted {counted(done.files_before, 'file')} into {done.files_after}"
    if done.is_busy:
        compacted = "compacted no files, because another commit came first; the next run compacts them"
    deleted = "unneeded files" if done.deleted_files is None else counted(done.deleted_files, "file")
    kept = "; committed the positions again" if done.is_kept else ""
    purged = f"; purged {counted(done.purged_rows, 'row')} of deleted keys" if done.purged_rows else ""
    return f"{done.table}: {compacted}; deleted {deleted}{kept}{purged}"


def _metadata(done: list[TableMaintenance]) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        VERSION: done[0].version,
        "delta/files_joined": sum(table.files_before for table in done),
        "delta/files_written": sum(table.files_after for table in done),
        "stream/ledger_kept": done[0].is_kept,
        "delta/purged_rows": done[0].purged_rows,
    }
    if all(table.deleted_files is not None for table in done):
        metadata["delta/files_deleted"] = sum(table.deleted_files or 0 for table in done)
    return metadata


DEAD_LETTERS_TAG = "stream_assets/dead_letters"


@dataclass(frozen=True, slots=True)
class NewDeadLetters:
    """The numbers of dead letters since the last report.

    Args:
        asset_key: the key of the stream asset.
        table: the path of the dead-letter table.
        new: the dead letters since the last report.
        total: all dead letters that the group has written.
        lost: all messages that were gone before they were read, as an upper bound.
    """

    asset_key: dg.AssetKey
    table: str
    new: int
    total: int
    lost: int

    def describe(self) -> str:
        """Return the numbers as text.

        Example:
            >>> NewDeadLetters(dg.AssetKey("orders"), "/lake/orders_dead_letters", 3, 10, 0).describe()
            '/lake/orders_dead_letters has 3 new dead letters of orders, 10 in all'
        """
        lost = f"; up to {counted(self.lost, 'message')} gone before they were read" if self.lost else ""
        name = self.asset_key.to_user_string()
        return f"{self.table} has {counted(self.new, 'new dead letter')} of {name}, {self.total} in all{lost}"


Alert = Callable[[dg.SensorEvaluationContext, NewDeadLetters], object]


@dataclass(frozen=True, slots=True)
class _Cursor:
    """The numbers of the last report."""

    dead: int = 0
    lost: int = 0


def build_dead_letter_sensor(
    stream: StreamAsset,
    *,
    job: Any = None,
    alert: Alert | None = None,
    least: int = 1,
    sensor_seconds: int = 60,
    sensor_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """Build a sensor that reports new dead letters of a stream asset, or starts a job for them.

    It reads the Delta log, without Spark. Each time it finds new dead letters it writes an observation of the asset
    with the numbers, and a warning to the log of the tick. Then it calls ``alert`` and requests ``job``, if given.

    Args:
        stream: the asset.
        job: a job to run for new dead letters, one run at a time.
        alert: called with the context of the tick and a :class:`stream_assets.NewDeadLetters`. When it raises, the
            tick fails, and the next tick calls it again.
        least: the smallest number of new dead letters that is reported.
        sensor_seconds: the least time between two ticks.
        sensor_status: whether the sensor runs without being turned on.

    Example:
        >>> from stream_assets import stream_asset
        >>> @stream_asset(source="memory://shop/orders", group="lakehouse", table="lake/orders")
        ... def orders(batch):
        ...     return batch
        >>> build_dead_letter_sensor(orders, alert=lambda context, found: print(found.describe())).name
        'orders_dead_letters'
    """
    status = choice(dg.DefaultSensorStatus, sensor_status, option="sensor_status")
    check_count("least", least)

    def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        known = read_cursor(context.cursor, _Cursor)
        ingestion = stream.declared.located(context.instance).ingestion
        totals = ingestion.ledger().read().totals
        lost = sum(parts.size for parts in totals.lost.values())
        # A RESTORE may lower the numbers.
        known = _Cursor(min(known.dead, totals.dead), min(known.lost, lost))
        new = (totals.dead - known.dead) + (lost - known.lost)
        if new < least:
            return _skip(f"{counted(new, 'new dead letter')}, {totals.dead} in all", known)
        running = _running(context.instance, job) if job is not None else None
        if running is not None:
            return _skip(f"run {running} must end before {counted(new, 'new dead letter')} can be redriven", known)
        found = NewDeadLetters(stream.key, ingestion.dead_letters().path, totals.dead - known.dead, totals.dead, lost)
        context.log.warning(found.describe())
        if alert is not None:
            alert(context, found)
        observation = dg.AssetObservation(
            stream.key,
            metadata={
                "stream/new_dead_letters": found.new,
                "stream/dead_letters": found.total,
                "stream/lost_messages": found.lost,
                "stream/dead_letter_table": dg.MetadataValue.path(found.table),
            },
        )
        reported = write_cursor(_Cursor(totals.dead, lost))
        if job is None:
            return dg.SensorResult(skip_reason=found.describe(), cursor=reported, asset_events=[observation])
        request = dg.RunRequest(job_name=job.name, tags={DEAD_LETTERS_TAG: str(found.new)})
        return dg.SensorResult(run_requests=[request], cursor=reported, asset_events=[observation])

    options: dict[str, Any] = {} if job is None else {"job": job}
    return dg.SensorDefinition(
        name=f"{stream.declared.name}_dead_letters",
        evaluation_fn=evaluate,
        minimum_interval_seconds=sensor_seconds,
        default_status=status,
        description=f"Reports new dead letters of {stream.key.to_user_string()}.",
        **options,
    )


def _skip(why: str, cursor: _Cursor) -> dg.SensorResult:
    return dg.SensorResult(skip_reason=why, cursor=write_cursor(cursor))


def _running(instance: dg.DagsterInstance, job: Any) -> str | None:
    wanted = dg.RunsFilter(job_name=job.name, statuses=list(IN_FLIGHT))
    found = instance.get_runs(filters=wanted, limit=1)
    return found[0].run_id if found else None
