"""Everything that a stream asset needs in Dagster, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import dagster as dg

from sensors.lag_sensor import build_lag_sensor
from stream_assets.asset import StreamAsset
from stream_assets.replay_job import build_replay_job
from stream_assets.stream_to_table import StreamToTable
from stream_consumers.errors import InvalidOptionError


def build_ingest_job(stream: StreamAsset) -> dg.UnresolvedAssetJobDefinition:
    """The job that the sensor asks for; one process, one Spark session."""
    return dg.define_asset_job(
        stream.declared.job_name,
        selection=dg.AssetSelection.assets(stream.key),
        executor_def=dg.in_process_executor,
        run_tags=dict(stream.run_tags),
        description=f"Drain {stream.declared.source} into {stream.declared.ingestion.table}.",
    )


def build_sensor(stream: StreamAsset, job: dg.UnresolvedAssetJobDefinition) -> dg.SensorDefinition:
    """The lag sensor of a stream asset."""
    declared = stream.declared
    return build_lag_sensor(
        name=f"{declared.name}_lag",
        source=declared.stream,
        ingestion=declared.ingestion,
        job=job,
        asset_key=stream.key,
        upstream=stream.upstream,
        policy=declared.policy,
        is_partitioned=declared.partitions is not None,
        minimum_interval_seconds=declared.sensor_seconds,
        default_status=declared.sensor_status,
    )


def _check_claims(one: StreamToTable, other: StreamToTable) -> None:
    """Each entry that members claim is given to one of them: two tables would each get a part of the stream."""
    groups = [(stream.source.nodes, stream.ingestion.group) for stream in (one, other)]
    shared = set(one.source.required_streams()) & set(other.source.required_streams())
    tables = {stream.ingestion.table for stream in (one, other)}
    if one.stream.is_claimed and other.stream.is_claimed and groups[0] == groups[1] and shared and len(tables) > 1:
        raise InvalidOptionError(
            f"the assets {one.key.to_user_string()} and {other.key.to_user_string()} share group {groups[0][1]!r} of "
            f"{', '.join(sorted(shared))}, so that each of their tables would get a part of the stream",
            remedy="Give each table a group of its own.",
        )


def stream_definitions(streams: Sequence[StreamAsset], *, resources: Mapping[str, Any] | None = None) -> dg.Definitions:
    """Definitions of stream assets: the assets with their checks, the streams, jobs and sensors.

    They merge with other definitions, also with those of another call: nothing is made for two assets at once, and a
    stream that both read is declared alike.

    Args:
        streams: what ``@stream_asset`` made.
        resources: those that the assets ask for by their keys; no other is needed.

    Raises:
        InvalidOptionError: two assets whose names differ only by characters that Dagster folds into one, or whose
            tables share a group that claims entries.

    Example:
        >>> from stream_assets import stream_asset
        >>> @stream_asset(source="memory://shop/orders", group="lakehouse", table="lake/orders")
        ... def orders(batch):
        ...     return batch
        >>> sorted(sensor.name for sensor in stream_definitions([orders]).sensors)
        ['orders_lag']
    """
    names: dict[str, StreamAsset] = {}
    for stream in streams:
        other = names.setdefault(stream.declared.name, stream)
        if other is not stream:
            raise InvalidOptionError(
                f"the assets {other.key.to_user_string()} and {stream.key.to_user_string()} have one name in Dagster",
                remedy="Rename one of them; '.', '-' and '_' count as the same.",
                name=stream.declared.name,
            )
    for one, another in combinations(streams, 2):
        _check_claims(one.declared, another.declared)
    jobs = {name: build_ingest_job(stream) for name, stream in names.items()}
    replayed = [(stream, stream.declared.replay_partitions) for stream in streams]
    upstream = {spec.key: spec for stream in streams for spec in stream.upstream_specs()}
    return dg.Definitions(
        assets=[*streams, *upstream.values()],
        jobs=[*jobs.values(), *(build_replay_job(stream, days) for stream, days in replayed if days)],
        sensors=[build_sensor(stream, jobs[name]) for name, stream in names.items()],
        resources=resources,
    )
