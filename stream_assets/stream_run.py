"""A run of a stream asset: it ingests micro-batches, replays or redrives, and then evaluates the checks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import dagster as dg

from sensors.asset_runs import MEMBER_TAG
from spark_jobs.batches.accept import accept
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.dead_letter_jobs import Dismissal, DismissJob, Outcome, Redrive, RedriveJob
from spark_jobs.batches.ingestion import BatchReport, Event, Ingestion, Transform, Waiting
from spark_jobs.batches.job import batch_events
from spark_jobs.batches.ledger_recovery import has_begun
from spark_jobs.batches.rebuild import rebuild_events
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.batches.run_control import result_of
from spark_jobs.dead_letters.reader import DeadLetterFilter
from spark_jobs.decoding.isolation import prepare
from spark_jobs.run_ingestion import run_events
from spark_jobs.run_report import describe_ranges
from stream_assets.materializations import (
    Context,
    IngestMaterializations,
    PartitionMaterialization,
    RebuildMaterialization,
    RedriveMaterialization,
    ReplayMaterialization,
    RunScope,
    describe_partitions,
    to_materialize_result,
)
from stream_assets.metadata import outcome_metadata
from stream_assets.options import RedriveConfig, RunLimits, StreamConfig, WriterConfig
from stream_assets.partitions import is_partition_run, partition_replay
from stream_assets.resources import run_session
from stream_assets.stream_to_table import StreamCheckContext, StreamToTable
from stream_consumers.display import counted
from stream_consumers.errors import InvalidOptionError, StreamAssetsError, Terminal

MATERIALIZE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Makes the whole table anew, in a run of a job."""


@dataclass(frozen=True)
class StreamRun:
    """A run of a stream asset. The body of the asset starts it: ``yield from stream.run(context)``.

    Args:
        declared: the stream, the table, and their options.
        config: the run config.
        wanted: what another job does: a replay, a redrive, or a rebuild; ``None`` in a run of the asset.

    Example:
        >>> from stream_assets import stream_asset
        >>> @stream_asset(source="memory://shop/orders", group="lakehouse", table="lake/orders")
        ... def orders(context, stream: StreamRun):
        ...     context.log.info(f"into {stream.declared.ingestion.table}")
        ...     yield from stream.run(context, transform=lambda rows: rows.where("payload is not null"))
    """

    declared: StreamToTable
    config: WriterConfig
    wanted: Replay | Redrive | Rebuild | None = None

    def run(self, context: Context, *, transform: Transform | None = None) -> Iterator[Any]:
        """Write the messages of the stream, and report them and the checks to Dagster.

        Without ``start`` the run writes micro-batches up to the end that the stream had when the run started. With
        ``linger_seconds`` it keeps polling for new messages. With ``start`` it replays, or moves the group. Each batch
        is reported as an observation after its commit. All batches together are one materialization at the end, or
        several in a run that keeps polling. A replay is materialized when it is complete. A run of partitions replays
        them. A run of checks only evaluates the checks.

        Args:
            context: the context of the asset.
            transform: converts the decoded rows of a batch to the rows to write, which must keep the stream columns.

        Yields:
            ``MaterializeResult`` and ``AssetCheckResult``; in an op of another job, the events of both.

        Raises:
            dagster.Failure: an error that a retry cannot fix; other errors are raised as they are.
        """
        with final_failures(shows_values=self.declared.errors.dead_letter_payloads):
            if self.wanted is None and not isinstance(context, dg.AssetExecutionContext):
                raise InvalidOptionError(
                    f"run({context!r}) did not get the context of an asset",
                    remedy="Add a parameter context to the body, and pass it on: yield from stream.run(context).",
                )
            declared = self.declared.configured(self.config, transform)
            declared = declared.located(
                context.instance, retry_seconds=declared.retry_seconds, on_wait=context.log.warning
            )
            if self.wanted is not None:
                with run_session(context, declared.spark, declared.table) as spark:
                    made = self._run_job(RunScope.of(context, declared.key, declared, spark), self.wanted)
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
                    made = _run(context, RunScope.of(context, key, declared, spark), self.config)
                if made is not None:
                    yield to_materialize_result(made)
            of_key = {key: StreamCheckContext(key, declared, context.instance) for key in asked.values()}
            yield from (c.result(of_key[asked[c.name]]) for c in declared.checks if c.name in asked)

    def _run_job(self, run: RunScope, wanted: Replay | Redrive | Rebuild) -> dg.AssetMaterialization | None:
        if isinstance(wanted, Rebuild):
            return _run_rebuild(run)
        if isinstance(wanted, Redrive):
            assert isinstance(self.config, RedriveConfig)
            return run_redrive(run, wanted, self.config)
        return _run_replay(run, wanted, _replay_reporter(run, wanted, partitions=describe_partitions(run.context)))


def _run(context: dg.AssetExecutionContext, run: RunScope, config: StreamConfig) -> dg.AssetMaterialization | None:
    if run.declared.partitions is not None and is_partition_run(context):
        wanted = with_replay_id(context, run.key, partition_replay(context.partition_time_window, config))
        return _run_replay(run, wanted, PartitionMaterialization(run, context, run.declared.partitions, wanted.id))
    config.check()
    if config.rebuild:
        return _run_rebuild(run)
    _accept(run, config)
    if config.start.bound() is not None and not config.move_group:
        wanted = with_replay_id(context, run.key, config.replay())
        return _run_replay(run, wanted, _replay_reporter(run, wanted))
    linger_seconds, every_seconds = polling_times(run.declared.limits, config)
    reporter = IngestMaterializations(run, every_seconds=every_seconds)
    return reporter.report(_run_events(run, config, linger_seconds=linger_seconds))


def _accept(run: RunScope, config: StreamConfig) -> None:
    if not config.accept:
        return
    stream, ingestion = run.source, run.ingestion
    names = ingestion.epochs(stream.url.required_streams())
    with (
        stream.open() as opened,
        stream.claims(ingestion.group, names) if stream.is_claimed else nullcontext() as claims,
    ):
        found = accept(run.spark, opened, ingestion, epochs=config.accept, claims=claims)
    for one in found:
        run.log.info(f"accepted {one.name}, identified by {one.identity}; {one.before} has ended")


def _replay_reporter(run: RunScope, wanted: Replay, **what: str) -> ReplayMaterialization:
    what = {"start": str(wanted.start or "earliest"), "stop": str(wanted.stop or "the group's position"), **what}
    return ReplayMaterialization(run, replay_id=wanted.id, what=what)


def polling_times(limits: RunLimits, config: StreamConfig) -> tuple[float, float | None]:
    """Return how long the run polls, and the least time between materializations; ``None`` for one at its end."""
    # A run with a stop does not poll for new messages.
    linger = 0.0 if config.stop.bound() else limits.linger_seconds or 0.0
    every = limits.materialize_seconds
    if every is None:
        every = MATERIALIZE_SECONDS if linger else None
    return linger, every


def _run_events(run: RunScope, config: StreamConfig, *, linger_seconds: float) -> Iterator[Event]:
    ingestion = run.ingestion
    if run.source.is_claimed:
        ingestion = replace(ingestion, member=run.context.run.tags.get(MEMBER_TAG, ingestion.member))
    to = config.start.bound()
    if to is not None and has_begun(ingestion):
        _move_group(run, ingestion, to)
    is_empty = True
    for event in run_events(
        run.spark,
        run.source,
        ingestion,
        observer=run.declared.op.observer,
        max_batches=config.max_batches,
        origin=to,
        stop=config.stop.bound(),
        linger_seconds=linger_seconds,
    ):
        is_empty = is_empty and not isinstance(event, BatchReport)
        yield event
    if is_empty:
        run.log.info(f"no new messages: group {ingestion.group} is at the end of {run.source.url}")


def _move_group(run: RunScope, ingestion: Ingestion, to: Bound) -> None:
    with run.source.open() as opened:
        own_id = replay_id(run.context, run.declared.key, to)
        for move in rewind(run.spark, opened, ingestion, to, replay_id=own_id, on_wait=run.log.warning):
            run.log.info(f"moved {move.shard} from {move.position} to {move.to}")


def _run_replay(run: RunScope, wanted: Replay, reporter: ReplayMaterialization) -> dg.AssetMaterialization | None:
    with run.source.open() as opened:
        job = ReplayJob(run.spark, opened, run.ingestion, wanted, observer=run.declared.op.observer)
        start, stop = wanted.start or "the beginning", wanted.stop or "the position of the group"
        plan = result_of(job.retries.call(job.resolve), run.log.warning)
        ranges = describe_ranges(plan.progress.goal) or "nothing"
        run.log.info(f"replaying from {start} to {stop}: {ranges}")
        reporter.warn_of_kept_rows(plan)
        return reporter.report(batch_events(job))


def _run_rebuild(run: RunScope) -> dg.AssetMaterialization | None:
    with run.source.open() as opened:
        events = rebuild_events(run.spark, opened, run.ingestion, observer=run.declared.op.observer)
        return RebuildMaterialization(run).report(events)


def run_redrive(run: RunScope, wanted: Redrive, config: RedriveConfig) -> dg.AssetMaterialization | None:
    """Decode dead letters again, with the decoder and the transform of the asset, and write their rows.

    Args:
        run: the objects of the run.
        wanted: which dead letters to decode.
        config: the run config.

    Returns:
        The materialization; ``None`` if no dead letter became a row.
    """
    if config.dismiss:
        _dismiss(run, wanted, config)
        return None
    job = RedriveJob(
        run.spark,
        run.ingestion,
        wanted,
        url=run.source.url,
        client=run.source.client,
        observer=run.declared.op.observer,
    )
    if config.dry_run:
        _log_outcome(run.context, job.preview(), become="would become rows")
        return None
    reporter = RedriveMaterialization(run, job.outcome)
    made = reporter.report(batch_events(job, max_batches=config.max_batches))
    _log_outcome(run.context, job.outcome, become="became rows")
    return made


def _dismiss(run: RunScope, wanted: Redrive, config: RedriveConfig) -> None:
    """Dismiss dead letters, and add their number to the metadata of the run."""
    meant = DeadLetterFilter(run.source.url.required_streams(), wanted.span(), config.reason)
    job = DismissJob(
        run.spark,
        run.ingestion,
        meant,
        Dismissal(f"run {run.context.run_id}", config.dismiss),
        limit=wanted.limit,
        observer=run.declared.op.observer,
    )
    count = 0
    for event in batch_events(job):
        if isinstance(event, BatchReport):
            count += event.dead
        elif isinstance(event, Waiting):
            run.log.warning(event.why)
    run.context.add_output_metadata({"redrive/dismissed": count})
    run.context.log.info(f"dismissed {counted(count, 'dead letter')}: {config.dismiss}")


def _log_outcome(context: Context, outcome: Outcome, *, become: str) -> None:
    # The output of the run has the outcome, also if no row was written and nothing is materialized.
    context.add_output_metadata(outcome_metadata(outcome))
    context.log.info(f"{counted(outcome.decoded, 'dead letter')} {become}, {outcome.dead} remain dead letters")
    for reason, refusal in outcome.refused.items():
        example = f", like {refusal.first}" if refusal.first else ""
        context.log.info(f"{refusal.count} remain dead letters{example}: {reason}")


def with_replay_id(context: Context, key: dg.AssetKey, wanted: Replay) -> Replay:
    """Return the replay with the id of its run, see :func:`replay_id`."""
    return replace(wanted, id=replay_id(context, key, wanted.start, wanted.stop, wanted.on_replay.value))


def replay_id(context: Context, key: dg.AssetKey, *asked: object) -> str:
    """Return the id of a run's replay or move. A retry of a failed run has the same id, and continues it.

    A run that is started again after it succeeded has a new id, and starts anew.

    Args:
        context: the context of the run.
        key: the key of the asset, because assets of one run may share a group and a table, and replay other streams.
        asked: what is replayed, or where the group is moved, because another config is another replay.
    """
    run = context.run
    while run.parent_run_id is not None:
        parent = context.instance.get_run_by_id(run.parent_run_id)
        if parent is None or parent.status is dg.DagsterRunStatus.SUCCESS:
            break
        run = parent
    digest = hashlib.sha256(json.dumps([str(part) for part in asked]).encode()).hexdigest()
    return f"{run.run_id}/{key.to_user_string()}/{digest[:16]}"


@contextmanager
def final_failures(*, shows_values: bool = False) -> Iterator[None]:
    """Raise errors that a retry cannot fix as ``dagster.Failure``, which Dagster does not retry.

    Args:
        shows_values: whether Dagster may show errors that contain values of messages.
    """
    try:
        yield
    except StreamAssetsError as error:
        shown = error.revealed() if shows_values else error
        if isinstance(shown, Terminal):
            raise dg.Failure(description=str(shown), allow_retries=False) from shown
        raise shown from error.__cause__
