"""Everything that a stream asset needs in Dagster, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from sensors.lag_sensor import Watched, build_lag_sensor
from stream_assets.asset import StreamAsset
from stream_assets.conflicts import check_conflicts
from stream_assets.jobs import DAILY, build_redrive_job, build_replay_job
from stream_assets.translator import STREAM_URL
from stream_consumers.errors import InvalidOptionError


def build_ingest_job(stream: StreamAsset) -> dg.UnresolvedAssetJobDefinition:
    """The job that the sensor asks for; one process, one Spark session."""
    return dg.define_asset_job(
        stream.declared.job_name,
        selection=dg.AssetSelection.assets(stream.key),
        executor_def=dg.in_process_executor,
        run_tags=dict(stream.declared.op.run_tags),
        description=f"Drain {stream.declared.origin} into {stream.declared.table}.",
    )


def build_sensor(stream: StreamAsset, job: dg.UnresolvedAssetJobDefinition) -> dg.SensorDefinition:
    """The lag sensor of a stream asset."""
    declared = stream.declared
    return build_lag_sensor(
        name=f"{declared.name}_lag",
        watched=lambda instance: Watched(declared.stream, declared.located(instance).ingestion, stream.upstream),
        description=f"Asks for a run of {stream.key.to_user_string()} when its group is behind on {declared.origin}.",
        job=job,
        asset_key=stream.key,
        policy=declared.policy,
        is_partitioned=declared.partitions is not None,
        replay_jobs=(declared.replay_job_name, declared.redrive_job_name),
    )


def stream_definitions(
    streams: Sequence[StreamAsset | dg.AssetSpec],
    *,
    resources: Mapping[str, Any] | None = None,
    replay_partitions: dg.TimeWindowPartitionsDefinition = DAILY,
    redrive_jobs: bool = False,
) -> dg.Definitions:
    """Definitions of stream assets: the assets with their checks, the streams, jobs and sensors.

    They merge with other definitions, also with those of another call: nothing is made for two assets at once, and a
    stream that both read is declared alike.

    Args:
        streams: what ``@stream_asset`` made; and ``AssetSpec`` of streams that you describe yourself, which take the
            places of ours.
        resources: those that the assets ask for by their keys; no other is needed.
        replay_partitions: of the jobs that replay the messages of a day or an hour, one for each asset that has no
            partitions of its own and does not claim entries; daily in UTC by default.
        redrive_jobs: also a job for each asset that decodes its dead letters again, see :func:`build_redrive_job`; not
            for those that claim entries.

    Raises:
        InvalidOptionError: something else among ``streams``, like an asset that Dagster has made of a stream asset; two
            assets whose names differ only by characters that Dagster folds into one, or whose tables share a group of
            mode ``load_balanced``; that write streams of one key at two places into one table, or one table of a
            ``DeltaLake`` by accident, or where dead letters of the other go; or two streams that would be one asset.

    Example:
        >>> from stream_assets import stream_asset
        >>> @stream_asset(source="memory://shop/orders", group="lakehouse", table="lake/orders")
        ... def orders(batch):
        ...     return batch
        >>> sorted(sensor.name for sensor in stream_definitions([orders]).sensors)
        ['orders_lag']
    """
    names: dict[str, StreamAsset] = {}
    for place, one in enumerate(streams):
        if not isinstance(one, StreamAsset | dg.AssetSpec):
            raise InvalidOptionError(
                f"streams[{place}] is of type {type(one).__name__}, which has no stream",
                remedy="Give what @stream_asset made, as it is: its arguments and a StreamTranslator say what Dagster "
                "shows of it. Add other assets with dg.Definitions.merge.",
            )
    own = {one.key: one for one in streams if isinstance(one, dg.AssetSpec)}
    assets = [one for one in streams if isinstance(one, StreamAsset)]
    for stream in assets:
        other = names.setdefault(stream.declared.name, stream)
        if other is not stream:
            raise InvalidOptionError(
                f"the assets {other.key.to_user_string()} and {stream.key.to_user_string()} have one name in Dagster",
                remedy="Rename one of them; '.', '-' and '_' count as the same.",
                name=stream.declared.name,
            )
    check_conflicts([stream.declared for stream in assets])
    jobs = {name: build_ingest_job(stream) for name, stream in names.items()}
    replayed = [stream for stream in assets if stream.declared.has_replay_job]
    redriven = [stream for stream in assets if redrive_jobs and not stream.declared.is_claimed]
    return dg.Definitions(
        assets=[*assets, *_upstream(assets, own)],
        jobs=[
            *jobs.values(),
            *(build_replay_job(stream, replay_partitions) for stream in replayed),
            *map(build_redrive_job, redriven),
        ],
        sensors=[build_sensor(stream, jobs[name]) for name, stream in names.items()],
        resources=resources,
    )


def _upstream(assets: Sequence[StreamAsset], own: Mapping[dg.AssetKey, dg.AssetSpec]) -> list[dg.AssetSpec]:
    """The assets that stand for the streams: the user's own, and ours for the others."""
    found = dict(own)
    for spec in (spec for stream in assets for spec in stream.streams.values()):
        urls = [one.metadata.get(STREAM_URL) for one in (found.setdefault(spec.key, spec), spec)]
        if spec.key not in own and urls[0] != urls[1]:
            raise InvalidOptionError(
                f"the streams {urls[0]} and {urls[1]} would be one asset, {spec.key.to_user_string()}",
                remedy="Tell them apart in get_stream_spec of a StreamTranslator; or add an AssetSpec of that key, "
                "which stands for both.",
            )
    return list(found.values())
