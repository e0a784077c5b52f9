"""The jobs of a stream asset that write its table without moving the group: one replays, one redrives."""

from collections.abc import Callable, Iterator
from typing import Any

import dagster as dg

from stream_assets.asset import StreamAsset
from stream_assets.config import RedriveConfig, ReplayConfig, checked
from stream_assets.partitions import check_partitions, is_of_partitions, window_replay
from stream_assets.stream_run import of_run
from stream_consumers.errors import InvalidOptionError

DAILY = dg.DailyPartitionsDefinition(start_date="2025-01-01", end_offset=1)


def build_replay_job(stream: StreamAsset, partitions: dg.TimeWindowPartitionsDefinition = DAILY) -> dg.JobDefinition:
    """A job that replays the messages of one partition, by their timestamps; it never moves the group.

    Partitions neither overlap nor leave a message out. They may run at the same time: one that meets another commit
    waits a moment, logs that, and writes again.

    Args:
        stream: the asset.
        partitions: the days or hours, in the zone that counts.

    Raises:
        InvalidOptionError: the partitions are no windows of time; or the members of the group claim entries one by one,
            so that there are no ranges.
    """
    declared = stream.declared
    check_partitions(partitions, option="partitions")

    def replay(context: dg.OpExecutionContext, config: ReplayConfig) -> Iterator[Any]:
        if not is_of_partitions(context):
            raise InvalidOptionError(
                f"the job {declared.replay_job_name} replays partitions, and this run has none",
                remedy="Choose one in the launchpad, or some with 'Launch backfill…' on the page of its partitions.",
            )
        wanted = of_run(context, declared.key, window_replay(context.partition_time_window, config))
        yield from stream.events(context, config, wanted)

    description = (
        f"Read the messages of a partition, by their timestamps, from {declared.origin} again, and replace their rows "
        f"in {declared.table}. No position moves.\n\nPartitions, *Launch backfill…*: name the partitions; for those "
        "that were replayed before, tick *Completed*."
    )
    return _job(stream, declared.replay_job_name, replay, what="partition", about=description, partitions=partitions)


def build_redrive_job(stream: StreamAsset) -> dg.JobDefinition:
    """A job that makes rows of the dead letters that the asset's decoder can read by now; it never moves the group.

    It reads the table of the dead letters, so that the stream may have dropped the messages. Those that still cannot be
    decoded stay what they are. A run that was killed is simply launched again.

    Args:
        stream: the asset.

    Raises:
        InvalidOptionError: the members of the group claim entries one by one, so that no place is one to replace.

    Example:
        >>> from stream_assets import stream_asset
        >>> @stream_asset(source="memory://shop/orders", group="lakehouse", table="lake/orders")
        ... def orders(batch):
        ...     return batch
        >>> build_redrive_job(orders).name
        'redrive_orders'
    """

    def redrive(context: dg.OpExecutionContext, config: RedriveConfig) -> Iterator[Any]:
        yield from stream.events(context, config, config.redrive())

    description = (
        f"Decode the dead letters of {stream.declared.table} again, as the asset does today: those that can be decoded "
        "become rows, exactly once; the others stay what they are. No position moves.\n\nWith dry_run the log says how "
        "many would become rows, and why the others do not."
    )
    return _job(stream, stream.declared.redrive_job_name, redrive, what="dead_letters", about=description)


def _job(
    stream: StreamAsset,
    name: str,
    body: Callable[..., Iterator[Any]],
    *,
    what: str,
    about: str,
    partitions: dg.PartitionsDefinition | None = None,
) -> dg.JobDefinition:
    """A job of one op, whose body takes the context and the config that its annotation says."""
    declared, kind = stream.declared, body.__annotations__["config"]
    if declared.is_claimed:
        raise InvalidOptionError(
            f"{stream.key.to_user_string()} claims entries one by one, so that no range of its rows can be replaced",
            remedy=f"Use mode 'resumable', or leave the job {name} out.",
        )
    op = dg.op(
        # Two names: a code location does not load if an op is called like a job.
        name=f"{name}_{what}",
        description=about.partition(".")[0],
        required_resource_keys=set(stream.op.required_resource_keys),
        pool=declared.pool or name,
        out=dg.Out(dg.Nothing),
    )(body)

    @dg.job(
        name=name,
        description=about,
        partitions_def=partitions,
        executor_def=dg.in_process_executor,
        run_tags=dict(declared.op.run_tags),
    )
    def job() -> None:
        checked(op, kind)()

    return job
