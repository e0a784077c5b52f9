"""What operators add to a stream asset: the maintenance of its table."""

from typing import Any

import dagster as dg

from spark_jobs.maintenance import TableMaintenance, maintain
from stream_assets.asset import StreamAsset
from stream_assets.metadata import VERSION
from stream_assets.resources import run_session
from stream_assets.stream_run import failures
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import choice
from stream_consumers.wording import counted


def build_maintenance(
    stream: StreamAsset,
    *,
    cron_schedule: str = "0 3 * * *",
    execution_timezone: str = "UTC",
    pool: str | None = None,
    schedule_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.STOPPED,
    group_name: str | None = None,
) -> dg.Definitions:
    """An asset that maintains the table of a stream asset, its job and its schedule, to be merged with the others.

    A run joins small files (OPTIMIZE), deletes files that no version needs which can be restored (VACUUM), in the table
    and in that of its dead letters, and lets a group that is quiet say again what its ledger knows. Ingestion may run
    at the same time.

    Args:
        stream: the asset.
        cron_schedule: when to do it; daily at 3 by default. Once in half of the time that the table keeps its log
            (``delta.logRetentionDuration``, 30 days by default) is the least.
        execution_timezone: the zone of ``cron_schedule``.
        pool: Dagster's pool of the asset. With ``single_writer=True``, where only one run may write the table, it is by
            default the pool of the stream asset, whose limit has to be 1.
        schedule_status: whether the schedule runs without being turned on.
        group_name: Dagster's group of the asset.

    Raises:
        InvalidOptionError: the table has a single writer, and ``pool`` is not the pool of the asset.

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
            f"pool={pool!r} lets maintenance write beside {stream.key.to_user_string()}, which has a single writer",
            remedy=f"Leave it out: the default is {own_pool!r}.",
        )
    spark = stream.declared.spark
    name = f"{stream.declared.name}_maintenance"

    @dg.asset(
        name=f"{stream.key.path[-1]}_maintenance",
        key_prefix=stream.key.path[:-1] or None,
        deps=[stream.key],
        group_name=group_name,
        kinds={"spark", "deltalake"},
        description=f"Small files of {stream.key.to_user_string()} are joined, files that nobody needs are deleted.",
        required_resource_keys={spark} if isinstance(spark, str) else set(),
        pool=pool or own_pool,
    )
    def maintenance(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]
        with failures(shows_values=stream.declared.errors.dead_letter_payloads):
            declared = stream.declared.located(
                context.instance, retry_seconds=stream.declared.retry_seconds, on_wait=context.log.warning
            )
            with run_session(context, spark, declared.table) as session:
                done = maintain(session, declared.ingestion)
        for table in done:
            context.log.info(_describe(table))
        return dg.MaterializeResult(metadata=_metadata(done))

    job = dg.define_asset_job(
        f"maintain_{stream.declared.name}",
        selection=dg.AssetSelection.assets(maintenance),
        executor_def=dg.in_process_executor,
        run_tags=dict(stream.declared.op.run_tags),
        description=f"Maintain the table of {stream.key.to_user_string()}.",
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
    joined = f"{counted(done.files_before, 'file')} became {done.files_after}"
    if done.is_busy:
        joined = "another commit came first, so that files are joined the next time"
    deleted = "files that nobody needs" if done.deleted_files is None else counted(done.deleted_files, "file")
    kept = "; the ledger was said again" if done.is_kept else ""
    return f"{done.table}: {joined}, {deleted} were deleted{kept}"


def _metadata(done: list[TableMaintenance]) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        VERSION: done[0].version,
        "delta/files_joined": sum(table.files_before for table in done),
        "delta/files_written": sum(table.files_after for table in done),
        "stream/ledger_kept": done[0].is_kept,
    }
    if all(table.deleted_files is not None for table in done):
        metadata["delta/files_deleted"] = sum(table.deleted_files or 0 for table in done)
    return metadata
