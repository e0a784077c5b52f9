"""The partitioned replay job of a stream asset: the Dagster backfill page ingests days or hours again."""

from collections.abc import Iterator
from typing import Any

import dagster as dg

from stream_assets.asset import DAILY, StreamAsset
from stream_assets.config import ReplayConfig, checked
from stream_assets.partitions import check_partitions, is_of_partitions, window_replay
from stream_assets.stream_run import replay_id
from stream_consumers.errors import InvalidOptionError


def build_replay_job(stream: StreamAsset, partitions: dg.TimeWindowPartitionsDefinition = DAILY) -> dg.JobDefinition:
    """A job that replays the messages of one partition, by their timestamps; it never moves the group.

    Partitions neither overlap nor leave a message out. They may run at the same time: one that meets another commit
    waits a moment, says so, and writes again.

    Args:
        stream: the asset.
        partitions: the days or hours, in the zone that counts.

    Raises:
        InvalidOptionError: the partitions are no windows of time; the members of the group claim entries one by one, so
            that there are no ranges; or the table has a single writer, and the asset has no pool that would keep the
            two apart.
    """
    declared = stream.declared
    check_partitions(partitions, option="partitions")
    if declared.is_claimed:
        raise InvalidOptionError(
            f"{stream.key.to_user_string()} claims entries one by one, so that there are no ranges to replay",
            remedy="Use mode 'resumable', or build no replay job.",
        )

    @dg.op(
        # Two names: a code location does not load if an op is called like a job.
        name=f"{declared.replay_job_name}_partition",
        description=f"Make the rows of one partition of {declared.origin} again.",
        required_resource_keys=set(stream.op.required_resource_keys),
        pool=stream.pool_beside("job of replay_partitions", None) or declared.replay_job_name,
        out=dg.Out(dg.Nothing),
    )
    def replay(context: dg.OpExecutionContext, config: ReplayConfig) -> Iterator[Any]:
        if not is_of_partitions(context):
            raise InvalidOptionError(
                f"the job {declared.replay_job_name} replays partitions, and this run has none",
                remedy="Choose one in the launchpad, or some with 'Launch backfill…' on the page of its partitions.",
            )
        wanted = window_replay(context.partition_time_window, config, replay_id(context, declared.key))
        yield from stream.replay(context, wanted, config)
        yield dg.Output(None)

    @dg.job(
        name=declared.replay_job_name,
        description=(
            f"Read the messages of a partition, by their timestamps, from {declared.origin} again, and replace their "
            f"rows in {declared.table}. No position moves.\n\nPartitions, *Launch backfill…*: name the "
            "partitions; for those that were replayed before, tick *Completed*."
        ),
        partitions_def=partitions,
        executor_def=dg.in_process_executor,
        run_tags=dict(stream.run_tags),
    )
    def replay_job() -> None:
        checked(replay, ReplayConfig)()

    return replay_job
