"""The redrive job of a stream asset: its dead letters are decoded again, with the decoder of today."""

from collections.abc import Iterator
from typing import Any

import dagster as dg

from stream_assets.asset import StreamAsset
from stream_assets.config import RedriveConfig, checked
from stream_consumers.errors import InvalidOptionError


def build_redrive_job(stream: StreamAsset) -> dg.JobDefinition:
    """A job that makes rows of the dead letters that the asset's decoder can read by now; it never moves the group.

    It reads the table of the dead letters, so that the stream may have dropped the messages. Those that still cannot be
    decoded stay what they are. A run that was killed is simply launched again.

    Args:
        stream: the asset.

    Raises:
        InvalidOptionError: the members of the group claim entries one by one, so that no place is one to replace; or
            the table has a single writer, and the asset has no pool that would keep the two apart.

    Example:
        >>> from stream_assets import stream_asset
        >>> @stream_asset(source="memory://shop/orders", group="lakehouse", table="lake/orders")
        ... def orders(batch):
        ...     return batch
        >>> build_redrive_job(orders).name
        'redrive_orders'
    """
    declared = stream.declared
    if declared.is_claimed:
        raise InvalidOptionError(
            f"{stream.key.to_user_string()} claims entries one by one, so that there are no places to replace",
            remedy="Use mode 'resumable', or build no redrive job.",
        )

    @dg.op(
        # Two names: a code location does not load if an op is called like a job.
        name=f"{declared.redrive_job_name}_dead_letters",
        description=f"Decode the dead letters of {declared.origin} again.",
        required_resource_keys=set(stream.op.required_resource_keys),
        pool=stream.pool_beside("redrive job", None) or declared.redrive_job_name,
        out=dg.Out(dg.Nothing),
    )
    def redrive(context: dg.OpExecutionContext, config: RedriveConfig) -> Iterator[Any]:
        yield from stream.redrive(context, config)
        yield dg.Output(None)

    @dg.job(
        name=declared.redrive_job_name,
        description=(
            f"Decode the dead letters of {declared.table} again, as the asset does today: those that can be "
            "decoded become rows, exactly once; the others stay what they are. No position moves.\n\n"
            "With dry_run the log says how many would become rows, and why the others do not."
        ),
        executor_def=dg.in_process_executor,
        run_tags=dict(stream.run_tags),
    )
    def redrive_job() -> None:
        checked(redrive, RedriveConfig)()

    return redrive_job
