"""Dagster definitions of stream assets: jobs, sensors, and checks for conflicts between assets."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import dagster as dg

from sensors.lag_sensor import SensorInputs, build_lag_sensor
from spark_jobs.dead_letters.table import dead_letter_path
from spark_jobs.table_location import comparable_location, folders_above
from stream_assets.asset import StreamAsset
from stream_assets.options import RedriveConfig, ReplayConfig, WriterConfig, with_config_check
from stream_assets.partitions import check_partitions, is_partition_run, window_replay
from stream_assets.stream_run import Rebuild, with_replay_id
from stream_assets.stream_to_table import StreamToTable
from stream_assets.translator import STREAM_URL, cluster_name
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import ConsumerMode
from stream_consumers.urls import StreamUrl

DAILY = dg.DailyPartitionsDefinition(start_date="2025-01-01", end_offset=1)


def build_replay_job(stream: StreamAsset, partitions: dg.TimeWindowPartitionsDefinition = DAILY) -> dg.JobDefinition:
    """Build a job that replays the messages of a partition, selected by their timestamps; the group does not move.

    Several partitions may be replayed at the same time: a run whose commit conflicts with another one logs that, waits
    a moment, and writes again.

    Args:
        stream: the asset.
        partitions: the days or hours, in their time zone.

    Raises:
        InvalidOptionError: the partitions are not time windows; or the members of the group claim entries one by one,
            so there are no ranges to replay.
    """
    declared = stream.declared
    check_partitions(partitions, option="partitions")

    def replay(context: dg.OpExecutionContext, config: ReplayConfig) -> Iterator[Any]:
        if not is_partition_run(context):
            raise InvalidOptionError(
                f"the job {declared.replay_job_name} replays partitions, but this run has none",
                remedy="Select one in the launchpad, or several with 'Launch backfill…' on the page of its partitions.",
            )
        wanted = with_replay_id(context, declared.key, window_replay(context.partition_time_window, config))
        yield from stream.events(context, config, wanted)

    description = (
        f"Read the messages of a partition, by their timestamps, from {declared.origin} again, and replace their rows "
        f"in {declared.table}. No position moves.\n\nUnder Partitions, click *Launch backfill…* and select the "
        "partitions; for partitions that were replayed before, tick *Completed*."
    )
    return _job(stream, declared.replay_job_name, replay, what="partition", about=description, partitions=partitions)


def build_redrive_job(stream: StreamAsset) -> dg.JobDefinition:
    """Build a job that decodes the dead letters of an asset again, and writes their rows; the group does not move.

    It reads the dead-letter table, so it does not matter whether the stream still has the messages. Messages that still
    cannot be decoded remain dead letters. A run that was killed can be launched again.

    Args:
        stream: the asset.

    Raises:
        InvalidOptionError: the members of the group claim entries one by one, so no range can be replaced.

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
        f"Decode the dead letters of {stream.declared.table} again, as the asset does now: those that can be decoded "
        "become rows, exactly once; the others remain dead letters. No position moves.\n\nWith dry_run the run logs "
        "how many would become rows, and why the others would not."
    )
    return _job(stream, stream.declared.redrive_job_name, redrive, what="dead_letters", about=description)


def build_rebuild_job(stream: StreamAsset) -> dg.JobDefinition:
    """Build a job that makes the whole table anew from the first message, with today's decoder, transform and keys.

    Readers see the old rows until one commit swaps the new ones in. A run that was killed can be launched again, with
    the same code. It is refused if rows would be gone whose messages the stream has lost.

    Args:
        stream: the asset.

    Raises:
        InvalidOptionError: the members of the group claim entries one by one.

    Example:
        >>> from stream_assets import stream_asset
        >>> @stream_asset(source="memory://shop/orders", group="lakehouse", table="lake/orders")
        ... def orders(batch):
        ...     return batch
        >>> build_rebuild_job(orders).name
        'rebuild_orders'
    """

    def rebuild(context: dg.OpExecutionContext, config: WriterConfig) -> Iterator[Any]:
        yield from stream.events(context, config, Rebuild())

    description = (
        f"Make {stream.declared.table} anew from the first message of {stream.declared.origin}, with the decoder, the "
        "transform and the keys of the asset as they are now. Readers see the old rows until one commit swaps the new "
        "ones in; the group continues after them."
    )
    return _job(stream, stream.declared.rebuild_job_name, rebuild, what="table", about=description)


def _job(
    stream: StreamAsset,
    name: str,
    body: Callable[..., Iterator[Any]],
    *,
    what: str,
    about: str,
    partitions: dg.PartitionsDefinition | None = None,
) -> dg.JobDefinition:
    """Build a job of one op. The annotation of the body's parameter ``config`` is the class of the run config."""
    declared, kind = stream.declared, body.__annotations__["config"]
    if declared.is_claimed:
        raise InvalidOptionError(
            f"{stream.key.to_user_string()} claims entries one by one, so no range of its rows can be replaced",
            remedy=f"Use mode 'resumable', or leave the job {name} out.",
        )
    op = dg.op(
        # The name differs from that of the job, because Dagster refuses an op with the name of a job.
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
        with_config_check(op, kind)()

    return job


def build_ingest_job(stream: StreamAsset) -> "dg.UnresolvedAssetJobDefinition":
    """Build the job that the sensor requests; it runs in one process, with one Spark session."""
    return dg.define_asset_job(
        stream.declared.job_name,
        selection=dg.AssetSelection.assets(stream.key),
        executor_def=dg.in_process_executor,
        run_tags=dict(stream.declared.op.run_tags),
        description=f"Ingest {stream.declared.origin} into {stream.declared.table}.",
    )


def build_sensor(stream: StreamAsset, job: "dg.UnresolvedAssetJobDefinition") -> dg.SensorDefinition:
    """Build the lag sensor of a stream asset."""
    declared = stream.declared
    return build_lag_sensor(
        name=f"{declared.name}_lag",
        inputs=lambda instance: SensorInputs(declared.stream, declared.located(instance).ingestion, stream.upstream),
        description=f"Requests a run of {stream.key.to_user_string()} when its group is behind {declared.origin}.",
        job=job,
        asset_key=stream.key,
        policy=declared.policy,
        is_partitioned=declared.partitions is not None,
        replay_jobs=(declared.replay_job_name, declared.redrive_job_name, declared.rebuild_job_name),
    )


def stream_definitions(
    streams: Sequence[StreamAsset | dg.AssetSpec],
    *,
    resources: Mapping[str, Any] | None = None,
    replay_partitions: dg.TimeWindowPartitionsDefinition = DAILY,
    redrive_jobs: bool = False,
    rebuild_jobs: bool = False,
) -> dg.Definitions:
    """Build definitions of stream assets: the assets with their checks, the streams, jobs and sensors.

    They merge with other definitions, also with those of another call: no definition belongs to two assets, and a
    stream that two assets read has the same spec in both calls.

    Args:
        streams: the assets that ``@stream_asset`` declared, and an ``AssetSpec`` for each stream that you describe
            yourself, which replaces the generated one.
        resources: the resources that the assets request by key; no others are needed.
        replay_partitions: the partitions of the replay jobs, daily in UTC by default. Each asset that has no partitions
            and does not claim entries has a replay job.
        redrive_jobs: whether each asset that does not claim entries has a job that decodes its dead letters again, see
            :func:`build_redrive_job`.
        rebuild_jobs: whether each asset that does not claim entries has a job that makes its table anew, see
            :func:`build_rebuild_job`.

    Raises:
        InvalidOptionError: ``streams`` contains something else, like an asset that Dagster derived from a stream asset;
            the names of two assets differ only by characters that Dagster replaces; the tables of two assets share a
            group of mode ``load_balanced``; two assets write streams of one key at two brokers into one table, or
            write one table of a ``DeltaLake`` by accident; an asset writes the dead-letter table of another, or into
            the folder of its table; or two streams would be one asset.

    Example:
        >>> from stream_assets import stream_asset
        >>> @stream_asset(source="memory://shop/orders", group="lakehouse", table="lake/orders")
        ... def orders(batch):
        ...     return batch
        >>> sorted(sensor.name for sensor in stream_definitions([orders]).sensors)
        ['orders_lag']
    """
    names: dict[str, StreamAsset] = {}
    for index, one in enumerate(streams):
        if not isinstance(one, StreamAsset | dg.AssetSpec):
            raise InvalidOptionError(
                f"streams[{index}] is of type {type(one).__name__}, which has no stream",
                remedy="Pass the result of @stream_asset unchanged; set what Dagster shows by its arguments or a "
                "StreamTranslator. Add other assets with dg.Definitions.merge.",
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
    by_position = [stream for stream in assets if not stream.declared.is_claimed]
    return dg.Definitions(
        assets=[*assets, *_upstream(assets, own)],
        jobs=[
            *jobs.values(),
            *(build_replay_job(stream, replay_partitions) for stream in replayed),
            *(build_redrive_job(stream) for stream in by_position if redrive_jobs),
            *(build_rebuild_job(stream) for stream in by_position if rebuild_jobs),
        ],
        sensors=[build_sensor(stream, jobs[name]) for name, stream in names.items()],
        resources=resources,
    )


def _upstream(assets: Sequence[StreamAsset], own: Mapping[dg.AssetKey, dg.AssetSpec]) -> list[dg.AssetSpec]:
    """Return the specs of the streams: those of the user, and generated ones for the others."""
    found = dict(own)
    for spec in (spec for stream in assets for spec in stream.streams.values()):
        urls = [one.metadata.get(STREAM_URL) for one in (found.setdefault(spec.key, spec), spec)]
        if spec.key not in own and urls[0] != urls[1]:
            raise InvalidOptionError(
                f"the streams {urls[0]} and {urls[1]} would be one asset, {spec.key.to_user_string()}",
                remedy="Return different keys from get_stream_spec of a StreamTranslator; or add an AssetSpec with "
                "that key, which stands for both.",
            )
    return list(found.values())


def check_conflicts(declared: Sequence[StreamToTable]) -> None:
    """Refuse assets that would take messages from each other, or mix their rows in one table by accident.

    Several assets may write different streams of one group into one table. Variables are compared by their names.

    Raises:
        InvalidOptionError: two assets conflict; the error names them, and what they share.
    """
    of_group = defaultdict(list)
    of_table = defaultdict(list)
    for one in declared:
        of_table[location_of(one)].append(one)
        if one.mode is ConsumerMode.LOAD_BALANCED:
            of_group[one.shown_group].append(one)
    for one, other in _pairs(of_group.values()):
        _check_group(one, other)
    for one, other in _pairs(of_table.values()):
        _check_table(one, other)
    folders = {path: one for table, (one, *_) in of_table.items() for path in (table, dead_letter_path(table))}
    for table, writers in of_table.items():
        for folder in folders_above(table):
            if folder in folders:
                raise InvalidOptionError(
                    f"{table}, the table of {_name(writers[0])}, is in {folder}, a table of {_name(folders[folder])}, "
                    "whose maintenance would delete its files",
                    remedy="Choose another folder for one of them.",
                )
        for other in of_table.get(dead_letter_path(table), ()):
            raise InvalidOptionError(
                f"{other.table}, the table of {_name(other)}, is also the dead-letter table of {_name(writers[0])}",
                remedy="Choose another table for one of them.",
            )


def _pairs(groups: Iterable[Sequence[StreamToTable]]) -> Iterator[tuple[StreamToTable, StreamToTable]]:
    for group in groups:
        yield from combinations(group, 2)


def _check_group(one: StreamToTable, other: StreamToTable) -> None:
    """Check that two tables do not share a group: each message goes to one member, so each table would get a part."""
    shared = _shared_streams(one, other)
    if shared and _is_same_source(one, other) and location_of(one) != location_of(other):
        raise InvalidOptionError(
            f"the assets {_name(one)} and {_name(other)} share group {one.shown_group!r} of {', '.join(shared)}, so "
            "each of their tables would get only a part of the stream",
            remedy="Use a different group for each table.",
        )


def _check_table(one: StreamToTable, other: StreamToTable) -> None:
    shared = _shared_streams(one, other)
    if shared and not _is_same_source(one, other):
        # The ledger identifies a stream by its key, so positions of one stream would be used for the other.
        raise InvalidOptionError(
            f"the assets {_name(one)} and {_name(other)} write {', '.join(shared)} of {one.origin} and of "
            f"{other.origin} into one table, {one.table}, which identifies streams only by their keys",
            remedy="Use a different table for each of them.",
        )
    if shared and one.shown_group == other.shown_group:
        raise InvalidOptionError(
            f"the assets {_name(one)} and {_name(other)} write {', '.join(shared)} into one table, {one.table}, for "
            f"group {one.shown_group!r}: each message would be written by only one of them, at random",
            remedy="Declare one asset, or use a different table and group for each.",
        )
    if one.table.is_named_by_key and other.table.is_named_by_key:
        raise InvalidOptionError(
            f"the keys {_name(one)} and {_name(other)} select one table of the lake, {one.table}",
            remedy="Change a key, whose last two parts name the table. If both assets should write the table, set "
            "table=lake.table(…).",
        )


def _shared_streams(one: StreamToTable, other: StreamToTable) -> list[str]:
    urls = [stream.origin.shown for stream in (one, other)]
    return sorted(set.intersection(*(set(url.required_streams() if url else ()) for url in urls)))


def _is_same_source(one: StreamToTable, other: StreamToTable) -> bool:
    first, second = (_source_of(stream.origin.shown) for stream in (one, other))
    return first == second


def _source_of(url: StreamUrl | None) -> tuple[str, str] | None:
    if url is None:
        return None
    return url.protocol, os.path.abspath(url.path) if url.protocol == "file" else cluster_name(url)


def location_of(stream: StreamToTable) -> str:
    """Return the location of the table for comparison with those of other assets."""
    return comparable_location(stream.table.shown)


def _name(stream: StreamToTable) -> str:
    return stream.key.to_user_string()
