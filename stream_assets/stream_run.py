"""What a run of a stream asset does: micro-batches into the table, or a replay, and the checks behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import dagster as dg
from pyspark.sql import SparkSession

from sensors.lag_sensor import MEMBER_TAG
from spark_jobs.batches.accept import accept
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import BatchReport, Ingestion, Transform
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.ledger_recovery import has_begun
from spark_jobs.batches.redrive import Redrive
from spark_jobs.batches.replay import Replay, ReplayJob
from spark_jobs.batches.rewind import rewind
from spark_jobs.decoding.isolation import prepare
from spark_jobs.run_ingestion import drain
from stream_assets.config import RedriveConfig, ReplayConfig, StreamConfig
from stream_assets.materializations import (
    Context,
    IngestMaterializations,
    PartitionMaterialization,
    ReplayMaterialization,
    as_result,
    describe_partitions,
    describe_ranges,
)
from stream_assets.partitions import is_of_partitions, partition_replay
from stream_assets.redriven import redriven
from stream_assets.resources import run_session
from stream_assets.stream_to_table import StreamCheckContext, StreamToTable
from stream_consumers.errors import InvalidOptionError, StreamAssetsError, Terminal

MATERIALIZE_SECONDS = 30.0


@dataclass(frozen=True)
class StreamRun:
    """A run of a stream asset, which the body of the asset starts: ``yield from stream.run(context)``.

    Args:
        declared: what the asset was declared with.
        config: the run config.
        wanted: what a job replays or redrives; ``None`` in a run of the asset.

    Example:
        >>> from stream_assets import stream_asset
        >>> @stream_asset(source="memory://shop/orders", group="lakehouse", table="lake/orders")
        ... def orders(context, stream: StreamRun):
        ...     context.log.info(f"into {stream.declared.ingestion.table}")
        ...     yield from stream.run(context, transform=lambda rows: rows.where("payload is not null"))
    """

    declared: StreamToTable
    config: ReplayConfig | RedriveConfig
    wanted: Replay | Redrive | None = None

    def run(self, context: Context, *, transform: Transform | None = None) -> Iterator[Any]:
        """Write what there is, and tell Dagster of it and of the checks.

        Without a start the run writes micro-batches up to the end that the stream had when it began. With
        ``linger_seconds`` it stays, and writes what comes. With a start it replays, or moves the group. Each batch is
        an observation when it is in the table and committed; all of them are one materialization at the end, or several
        while the run stays. A replay is materialized when it is whole. A run of partitions of the asset replays them. A
        run that was asked only for checks does only those.

        Args:
            context: of the asset.
            transform: from the decoded rows of a batch to the rows to write; they must keep the stream columns.

        Yields:
            ``MaterializeResult`` and ``AssetCheckResult``; in the op of another job what is said there instead.

        Raises:
            dagster.Failure: for errors that come back until somebody changes something; other errors pass through.
        """
        with failures(shows_values=self.declared.dead_letter_payloads):
            if self.wanted is None and not isinstance(context, dg.AssetExecutionContext):
                raise InvalidOptionError(
                    f"run({context!r}) has no context of an asset",
                    remedy="Give the body a parameter context, and hand it on: yield from stream.run(context).",
                )
            declared = self.declared.with_transform(transform).located(
                context.instance,
                retry_seconds=self.config.configured(self.declared.template).retry_seconds,
                on_wait=context.log.warning,
            )
            if self.wanted is not None:
                with run_session(context, declared.spark, declared.table) as spark:
                    made = self._made_by_job(context, declared, spark, self.wanted)
                if made is not None:
                    yield made
                checked = StreamCheckContext(declared.key, declared, context.instance)
                yield from (check.evaluation(checked) for check in declared.checks)
                return
            assert isinstance(context, dg.AssetExecutionContext)
            assert isinstance(self.config, StreamConfig)
            asked = {key.name: key.asset_key for key in context.selected_asset_check_keys}
            prepare()
            for key in context.selected_asset_keys:
                with run_session(context, declared.spark, declared.table) as spark:
                    made = _made(context, key, declared, spark, self.config)
                if made is not None:
                    yield as_result(made)
            of_key = {key: StreamCheckContext(key, declared, context.instance) for key in asked.values()}
            yield from (c.result(of_key[asked[c.name]]) for c in declared.checks if c.name in asked)

    def _made_by_job(
        self, context: Context, declared: StreamToTable, spark: SparkSession, wanted: Replay | Redrive
    ) -> dg.AssetMaterialization | None:
        if isinstance(wanted, Redrive):
            assert isinstance(self.config, RedriveConfig)
            return redriven(context, declared, spark, wanted, self.config)
        assert isinstance(self.config, ReplayConfig)
        partitions = describe_partitions(context)
        told = _replay_told(context, declared.key, declared, spark, wanted, partitions=partitions)
        return _replayed(context, declared, spark, wanted, self.config, told=told)


def _made(
    context: dg.AssetExecutionContext,
    key: dg.AssetKey,
    declared: StreamToTable,
    spark: SparkSession,
    config: StreamConfig,
) -> dg.AssetMaterialization | None:
    if declared.partitions is not None and is_of_partitions(context):
        wanted = partition_replay(context.partition_time_window, config, replay_id(context, key))
        of_partitions = PartitionMaterialization(
            context,
            key,
            declared.ingestion,
            spark,
            replay_id=wanted.id,
            streams=declared.source.required_streams(),
            partitions=declared.partitions,
        )
        return _replayed(context, declared, spark, wanted, config, told=of_partitions)
    config.check()
    _accept(context, declared, spark, config)
    if config.start.bound() is not None and not config.move_group:
        wanted = config.replay(replay_id(context, key))
        told = _replay_told(context, key, declared, spark, wanted)
        return _replayed(context, declared, spark, wanted, config, told=told)
    linger_seconds, every_seconds = staying(declared, config)
    ingested = IngestMaterializations(
        context,
        key,
        declared.ingestion,
        spark,
        every_seconds=every_seconds,
        partitions=declared.partitions,
        shows_payloads=declared.dead_letter_payloads,
    )
    reports = _drained(context, declared, spark, config, linger_seconds=linger_seconds, on_next=ingested.tell_if_due)
    return ingested.tell(reports)


def _accept(context: Context, declared: StreamToTable, spark: SparkSession, config: StreamConfig) -> None:
    if not config.accept:
        return
    stream, ingestion = declared.stream, config.configured(declared.ingestion)
    with ExitStack() as stack:
        opened = stack.enter_context(stream.open())
        names = ingestion.epochs(stream.url.required_streams())
        claimed = stream.claims(ingestion.group, names) if stream.is_claimed else None
        claims = stack.enter_context(claimed) if claimed else None
        found = accept(spark, opened, ingestion, epochs=config.accept, claims=claims)
    for one in found:
        context.log.info(f"{one.name} is accepted, known by {one.identity}; {one.before} has ended")


def _replay_told(
    context: Context, key: dg.AssetKey, declared: StreamToTable, spark: SparkSession, wanted: Replay, **what: str
) -> ReplayMaterialization:
    what = {"start": str(wanted.start or "earliest"), "stop": str(wanted.stop or "the group's position"), **what}
    return ReplayMaterialization(
        context, key, declared.ingestion, spark, replay_id=wanted.id, what=what, partitions=declared.partitions
    )


def staying(declared: StreamToTable, config: StreamConfig) -> tuple[float, float | None]:
    """How long the run stays, and the least time between two materializations; ``None`` for one at its end."""
    linger = declared.linger_seconds if config.linger_seconds is None else config.linger_seconds
    # A run that is to stop somewhere has nothing to stay for.
    linger = 0.0 if config.stop.bound() else linger
    every = declared.materialize_seconds if config.materialize_seconds is None else config.materialize_seconds
    if every is None:
        every = MATERIALIZE_SECONDS if linger else None
    return linger, every


def _drained(
    context: dg.AssetExecutionContext,
    declared: StreamToTable,
    spark: SparkSession,
    config: StreamConfig,
    *,
    linger_seconds: float,
    on_next: Callable[[], object],
) -> Iterator[BatchReport]:
    tagged = context.run.tags.get(MEMBER_TAG, declared.ingestion.member)
    member = tagged if declared.stream.is_claimed else declared.ingestion.member
    ingestion = replace(config.configured(declared.ingestion), member=member)
    to = config.start.bound()
    if to is not None and has_begun(ingestion):
        _move(context, declared, spark, ingestion, to)
    is_empty = True
    for report in drain(
        spark,
        declared.stream,
        ingestion,
        observer=declared.observer,
        max_batches=config.max_batches,
        on_tail=context.log.warning,
        origin=to,
        stop=config.stop.bound(),
        linger_seconds=linger_seconds,
        on_next=on_next,
        on_wait=context.log.warning,
    ):
        is_empty = False
        yield report
    if is_empty:
        context.log.info(f"nothing to read: group {ingestion.group} is at the end of {declared.source}")


def _move(context: Context, declared: StreamToTable, spark: SparkSession, ingestion: Ingestion, to: Bound) -> None:
    with declared.stream.open() as opened:
        own_id = replay_id(context, declared.key)
        moves = rewind(spark, opened, ingestion, to, replay_id=own_id, on_wait=context.log.warning)
        for move in moves:
            context.log.info(f"{move.shard} is moved from {move.position} to {move.to}")


def _replayed(
    context: Context,
    declared: StreamToTable,
    spark: SparkSession,
    wanted: Replay,
    config: ReplayConfig,
    *,
    told: ReplayMaterialization,
) -> dg.AssetMaterialization | None:
    ingestion = config.configured(declared.ingestion)
    with declared.stream.open() as opened:
        job = ReplayJob(spark, opened, ingestion, wanted, observer=declared.observer, on_wait=context.log.warning)
        start, stop = wanted.start or "the beginning", wanted.stop or "the position of the group"
        ranges = describe_ranges(job.goal()) or "nothing"
        context.log.info(f"replaying from {start} to {stop}: {ranges}")
        told.leave(job.last_copies())
        return told.tell(drain_batches(job))


def replay_id(context: Context, key: dg.AssetKey) -> str:
    """The id of a run's replay: a retry of a run that failed goes on with it; what had succeeded is begun anew.

    Args:
        context: of the run.
        key: of the asset; others of the same run may have the same group and table, and each replays its own stream.
    """
    run = context.run
    while run.parent_run_id is not None:
        parent = context.instance.get_run_by_id(run.parent_run_id)
        if parent is None or parent.status is dg.DagsterRunStatus.SUCCESS:
            break
        run = parent
    return f"{run.run_id}/{key.to_user_string()}"


@contextmanager
def failures(*, shows_values: bool = False) -> Iterator[None]:
    """Errors that come back until somebody changes something are not retried.

    Args:
        shows_values: whether Dagster gets what may hold values of messages.
    """
    try:
        yield
    except StreamAssetsError as error:
        shown = error.revealed() if shows_values else error
        if isinstance(shown, Terminal):
            raise dg.Failure(description=str(shown), allow_retries=False) from shown
        raise shown from error.__cause__
