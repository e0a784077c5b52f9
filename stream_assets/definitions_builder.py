"""Dagster definitions of stream assets: their jobs and sensors, and which assets exclude each other."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import dagster as dg

from sensors.lag_sensor import SensorInputs, build_lag_sensor
from spark_jobs.dead_letters.table import dead_letter_path
from stream_assets.asset import StreamAsset
from stream_assets.options import RedriveConfig, ReplayConfig, with_config_check
from stream_assets.partitions import check_partitions, is_partition_run, window_replay
from stream_assets.stream_run import with_replay_id
from stream_assets.stream_to_table import StreamToTable
from stream_assets.translator import STREAM_URL, cluster_name
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import ConsumerMode
from stream_consumers.urls import StreamUrl

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
        if not is_partition_run(context):
            raise InvalidOptionError(
                f"the job {declared.replay_job_name} replays partitions, and this run has none",
                remedy="Choose one in the launchpad, or some with 'Launch backfill…' on the page of its partitions.",
            )
        wanted = with_replay_id(context, declared.key, window_replay(context.partition_time_window, config))
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
        with_config_check(op, kind)()

    return job


def build_ingest_job(stream: StreamAsset) -> "dg.UnresolvedAssetJobDefinition":
    """The job that the sensor asks for; one process, one Spark session."""
    return dg.define_asset_job(
        stream.declared.job_name,
        selection=dg.AssetSelection.assets(stream.key),
        executor_def=dg.in_process_executor,
        run_tags=dict(stream.declared.op.run_tags),
        description=f"Drain {stream.declared.origin} into {stream.declared.table}.",
    )


def build_sensor(stream: StreamAsset, job: "dg.UnresolvedAssetJobDefinition") -> dg.SensorDefinition:
    """The lag sensor of a stream asset."""
    declared = stream.declared
    return build_lag_sensor(
        name=f"{declared.name}_lag",
        inputs=lambda instance: SensorInputs(declared.stream, declared.located(instance).ingestion, stream.upstream),
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
                remedy="Give them different keys in get_stream_spec of a StreamTranslator; or add an AssetSpec "
                "of that key, which stands for both.",
            )
    return list(found.values())


def check_conflicts(declared: Sequence[StreamToTable]) -> None:
    """Refuse assets that would take messages from each other, or mix their rows in one table by accident.

    Several assets may write different streams of one group into one table. What comes from a variable is compared by
    its name.

    Raises:
        InvalidOptionError: naming the two assets, and what they share.
    """
    of_group = defaultdict(list)
    of_table = defaultdict(list)
    for one in declared:
        of_table[_location(one)].append(one)
        if one.mode is ConsumerMode.LOAD_BALANCED:
            of_group[one.shown_group].append(one)
    for one, other in _pairs(of_group.values()):
        _check_group(one, other)
    for one, other in _pairs(of_table.values()):
        _check_table(one, other)
    for table, writers in of_table.items():
        for other in of_table.get(dead_letter_path(table), ()):
            raise InvalidOptionError(
                f"{other.table}, the table of {_name(other)}, is where the dead letters of {_name(writers[0])} go",
                remedy="Give one of them another table.",
            )


def _pairs(groups: Iterable[Sequence[StreamToTable]]) -> Iterator[tuple[StreamToTable, StreamToTable]]:
    for group in groups:
        yield from combinations(group, 2)


def _check_group(one: StreamToTable, other: StreamToTable) -> None:
    """Each message is given to one of the members: two tables would each get a part of the stream."""
    shared = _shared_streams(one, other)
    if shared and _is_same_source(one, other) and _location(one) != _location(other):
        raise InvalidOptionError(
            f"the assets {_name(one)} and {_name(other)} share group {one.shown_group!r} of {', '.join(shared)}, so "
            "that each of their tables would get a part of the stream",
            remedy="Give each table a group of its own.",
        )


def _check_table(one: StreamToTable, other: StreamToTable) -> None:
    shared = _shared_streams(one, other)
    if shared and not _is_same_source(one, other):
        # The ledger knows a stream by its key: the position in one would count for the other.
        raise InvalidOptionError(
            f"the assets {_name(one)} and {_name(other)} write {', '.join(shared)} of {one.origin} and of "
            f"{other.origin} into one table, {one.table}, which knows streams only by their keys",
            remedy="Give each of them a table of its own.",
        )
    if shared and one.shown_group == other.shown_group:
        raise InvalidOptionError(
            f"the assets {_name(one)} and {_name(other)} write {', '.join(shared)} into one table, {one.table}, for "
            f"group {one.shown_group!r}: each message would be in one of them, by chance",
            remedy="Declare one asset, or give each a table and a group of its own.",
        )
    if one.table.is_named_by_key and other.table.is_named_by_key:
        raise InvalidOptionError(
            f"the keys {_name(one)} and {_name(other)} stand for one table of the lake, {one.table}",
            remedy="Change a key, of which the last two parts name the table. If both are to write it, say so with "
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


def _location(stream: StreamToTable) -> str:
    return stream.table.shown.rstrip("/")


def _name(stream: StreamToTable) -> str:
    return stream.key.to_user_string()
