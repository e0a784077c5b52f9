"""The commands that move a group or write rows again: ``replay``, ``rebuild``, ``rewind``, ``adopt`` and others."""

from __future__ import annotations

import shlex
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from stream_assets.cli.options import (
    MODES,
    Pipeline,
    RowConversion,
    SparkSettings,
    batches_option,
    data_loss_option,
    json_option,
    layout_options,
    limit_options,
    pipeline_options,
    retry_option,
    row_options,
    spark_options,
)
from stream_assets.cli.output import batch_row, follow_batches, inform, print_rows, print_waiting, progress_bar
from stream_consumers.errors import InvalidOptionError, LedgerTruncatedError
from stream_consumers.options import ConsumerMode, choice

if TYPE_CHECKING:
    from spark_jobs.batches.bounds import Bound
    from spark_jobs.writing.layout import TableLayout


@click.command()
@pipeline_options()
@click.option(
    "--from", "start", help="Where to start: a sequence, SHARD=SEQUENCE,…, a time, or earliest (the default)."
)
@click.option("--until", "stop", help="Where to stop, exclusive, in the same form; by default the group's position.")
@click.option(
    "--on-replay",
    type=click.Choice(["replace", "append"]),
    default="replace",
    show_default=True,
    help="Replace the rows of the messages, or append their rows a second time.",
)
@click.option("--id", "replay_id", help="Continue the killed replay that printed this id.")
@click.option("--dry-run", is_flag=True, help="Print what would be read and replaced, and change nothing.")
@data_loss_option
@row_options
@limit_options
@batches_option
@retry_option
@spark_options
@json_option
def replay(
    pipeline: Pipeline,
    start: str | None,
    stop: str | None,
    on_replay: str,
    replay_id: str | None,
    dry_run: bool,
    conversion: RowConversion,
    max_batches: int | None,
    spark: SparkSettings,
    as_json: bool,
    **settings: Any,
) -> None:
    """Read messages again, and replace their rows. No position moves.

    \b
    Examples:
      stream-assets replay --source kafka://localhost:9092/orders --table lake/orders --group lakehouse \\
          --from 2026-11-17T00:00:00Z --until 2026-11-18T00:00:00Z --transform my_definitions:orders --dry-run
      stream-assets replay --source file://orders.ss/orders --table lake/orders --group lakehouse \\
          --from orders/0=100,orders/1=90 --decode json --schema 'id BIGINT, user STRING'
    """
    from spark_jobs.batches.bounds import Bound
    from spark_jobs.batches.job import batch_events
    from spark_jobs.batches.replay import OnReplay, Replay, ReplayJob, plan_replay, replay_progress
    from spark_jobs.batches.run_control import Retries, result_of
    from spark_jobs.ledger.table_rows import count_rows

    ingestion = conversion.ingestion(
        pipeline, sharing=_sharing(pipeline), single_writer=spark.single_writer, **settings
    )
    wanted = Replay(
        Bound.parse(start) if start else None,
        Bound.parse(stop) if stop else None,
        OnReplay(on_replay),
        replay_id or uuid.uuid4().hex,
    )
    with pipeline.stream().open() as stream, progress_bar() as progress:
        opened, ledger = ingestion.in_epochs(stream), ingestion.ledger()
        state = ledger.read()
        conversion.check(state)
        if replay_id and replay_progress(ledger, replay_id) is None:
            raise InvalidOptionError(f"{pipeline.table} has no replay {replay_id!r}", remedy="Leave --id out.")
        find = partial(plan_replay, wanted, opened, ingestion, ledger, state)
        plan = result_of(Retries(ingestion.retry_seconds).call(find), print_waiting)
        goal = plan.progress.goal
        if plan.note:
            inform(f"note: {plan.note}", style="yellow")
        messages = opened.count(goal)
        if dry_run:
            progress.stop()
            replaced = count_rows(ledger.log, goal)
            rows: list[dict[str, object]] = [
                {
                    "shard": str(shard),
                    "from": pipeline.shown(part.start),
                    "until": pipeline.shown(part.end),
                    "messages": messages[shard],
                    "rows replaced": replaced[shard],
                }
                for shard, part in sorted(goal.items())
            ]
            title = f"would be replayed into {pipeline.table}"
            print_rows(rows, as_json=as_json, title=title, empty="nothing to replay")
            return
        inform(f"note: if the replay is killed, continue it with --id {wanted.id}", style="yellow")
        task = progress.add_task("starting Spark", total=sum(messages.values()))
        job = ReplayJob(spark.session(pipeline.table, pipeline.storage), opened, ingestion, wanted)
        batches = follow_batches(batch_events(job, max_batches=max_batches), progress, task)
        rows = []
        for number, report in enumerate(batches, 1):
            stale = {"stale": report.stale} if ingestion.keys is not None else {}
            rows.append(batch_row(report, number=number, more={"replaced": report.replaced, **stale}, lag="left"))
    print_rows(rows, as_json=as_json, title=f"{pipeline.source} into {pipeline.table}", empty="nothing to replay")


@click.command()
@pipeline_options()
@data_loss_option
@row_options
@layout_options
@limit_options
@retry_option
@spark_options
@json_option
def rebuild(
    pipeline: Pipeline,
    conversion: RowConversion,
    layout: TableLayout,
    spark: SparkSettings,
    as_json: bool,
    **settings: Any,
) -> None:
    """Make a whole table anew from the first message of its stream, with these options; also with other keys.

    Messages go into the table <table>_rebuild first, and one commit swaps its rows in. Until then readers see the old
    rows. It is refused if rows or dead letters would be gone whose messages the stream has lost. Run it again after a
    kill, with the same options, and it continues; delete the folders <table>_rebuild and <table>_rebuild_dead_letters
    to begin again with others.

    \b
    Examples:
      stream-assets rebuild --source kafka://localhost:9092/shop.public.customers --table lake/customers \
          --group lakehouse --decode debezium --schema 'id BIGINT, name STRING' --keys id
      stream-assets rebuild --source file://orders.ss/orders --table lake/orders --group lakehouse \
          --transform my_definitions:orders
    """
    from spark_jobs.batches.rebuild import first_messages, rebuild_events, staging_of
    from spark_jobs.batches.run_control import Retries, result_of

    sharing = _sharing(pipeline)
    # A group whose members share its shards is refused by the rebuild itself.
    mode = sharing if sharing is ConsumerMode.REAL_TIME else ConsumerMode.RESUMABLE
    ingestion = conversion.ingestion(
        pipeline, sharing=mode, layout=layout, single_writer=spark.single_writer, **settings
    )
    with pipeline.stream(mode).open() as stream, progress_bar() as progress:
        conversion.check(ingestion.ledger().read())
        find = partial(first_messages, stream, ingestion, staging_of(ingestion))
        result_of(Retries(ingestion.retry_seconds).call(find), print_waiting)
        task = progress.add_task("starting Spark", total=None)
        events = rebuild_events(spark.session(pipeline.table, pipeline.storage), stream, ingestion)
        rows = [
            batch_row(report, number=number, more={"table": "swapped" if report.entry.kind == "rebuild" else "staging"})
            for number, report in enumerate(follow_batches(events, progress, task), 1)
        ]
    print_rows(
        rows,
        as_json=as_json,
        title=f"{pipeline.table} is made anew from {pipeline.source}",
        empty=f"an earlier run has made {pipeline.table} anew",
    )


def _sharing(pipeline: Pipeline) -> ConsumerMode:
    """Return the mode in which the group shares the stream, from its ledger."""
    ingestion = pipeline.ingestion()
    try:
        sharing = ingestion.ledger().read().sharing
    except LedgerTruncatedError:
        # A group that shares its shards has a transaction sequence for each.
        is_one_sequence = ingestion.ledger().last_number(ingestion.member) > 0
        sharing = (ConsumerMode.RESUMABLE if is_one_sequence else ConsumerMode.LOAD_BALANCED).value
    modes = {mode.value: mode for mode in ConsumerMode}
    return modes.get(sharing, ConsumerMode.RESUMABLE)


def _move(
    to: Bound, pipeline: Pipeline, spark: SparkSettings, *, dry_run: bool, retry_seconds: float, as_json: bool
) -> None:
    from spark_jobs.batches.replay import plan_moves, read_or_derive, rewind
    from spark_jobs.batches.run_control import Retries, result_of
    from spark_jobs.ledger.table_rows import count_rows

    sharing = _sharing(pipeline)
    ingestion = pipeline.ingestion(sharing=sharing, retry_seconds=retry_seconds, single_writer=spark.single_writer)
    mode = sharing if sharing is ConsumerMode.REAL_TIME else ConsumerMode.RESUMABLE
    with pipeline.stream(mode).open() as stream, progress_bar() as progress:
        opened = ingestion.in_epochs(stream)
        state, is_derived = read_or_derive(opened, ingestion)
        find = partial(plan_moves, opened, ingestion, to, state=state)
        moves = result_of(Retries(retry_seconds).call(find), print_waiting)
        replaced = {move.shard: move.replaced for move in moves}
        messages, rows = opened.count(replaced), count_rows(ingestion.ledger().log, replaced)
        skipped = opened.count({move.shard: move.skipped for move in moves})
        # A derived state has to be committed, even if it already has the position.
        if (moves or is_derived) and not dry_run:
            progress.add_task("moving the group", total=None)
            moves = rewind(
                spark.session(pipeline.table, pipeline.storage), opened, ingestion, to, on_wait=print_waiting
            )
    listed = [
        {
            "shard": str(move.shard),
            "position": pipeline.shown(move.position),
            "to": pipeline.shown(move.to),
            "messages to read again": messages.get(move.shard, 0),
            "rows to replace": rows.get(move.shard, 0),
            "messages skipped": skipped.get(move.shard, 0),
        }
        for move in moves
    ]
    title = f"group {pipeline.group} {'would be' if dry_run else 'is'} moved; the next run of ingest continues there"
    empty = f"group {pipeline.group} is there already"
    if is_derived:
        empty += f"; the log {'would have' if dry_run else 'has'} its position again"
    print_rows(listed, as_json=as_json, title=title, empty=empty)


_dry_run = click.option("--dry-run", is_flag=True, help="Print what would be moved, and change nothing.")


@click.command()
@click.option("--to", required=True, help="earliest, latest, a sequence, or SHARD=SEQUENCE[,SHARD=SEQUENCE…].")
@pipeline_options()
@_dry_run
@retry_option
@spark_options
@json_option
def rewind(to: str, pipeline: Pipeline, spark: SparkSettings, **options: Any) -> None:
    """Move the position of a group. The next runs continue from there, and replace the old rows.

    \b
    Examples:
      stream-assets rewind --source file://orders.ss/orders --table lake/orders --group lakehouse --to earliest
      stream-assets rewind --source kafka://localhost:9092/orders --table lake/orders --group lakehouse \\
          --to orders/0=1000,orders/1=900 --dry-run
    """
    from spark_jobs.batches.bounds import Bound

    bound = Bound.parse(to)
    if bound.moment is not None:
        raise InvalidOptionError(f"{to} is a time", remedy=f"Use: stream-assets seek --to {shlex.quote(to)}.")
    _move(bound, pipeline, spark, **options)


@click.command()
@click.option("--to", required=True, help="A time like 2026-11-01T00:00:00Z.")
@pipeline_options()
@_dry_run
@retry_option
@spark_options
@json_option
def seek(to: str, pipeline: Pipeline, spark: SparkSettings, **options: Any) -> None:
    """Move the position of a group to a time: to the first message with this timestamp or a later one.

    \b
    Example:
      stream-assets seek --source redis://localhost:6379/orders --table lake/orders --group lakehouse \\
          --to 2026-11-01T00:00:00Z --dry-run
    """
    from spark_jobs.batches.bounds import Bound

    try:
        bound = Bound.at_time(to)
    except InvalidOptionError as error:
        Bound.parse(to)  # Raises its own error, unless rewind accepts the position.
        raise InvalidOptionError(
            f"{to} is not a time", remedy=f"Use: stream-assets rewind --to {shlex.quote(to)}."
        ) from error
    _move(bound, pipeline, spark, **options)


@click.command()
@click.option(
    "--mode",
    type=click.Choice(["resumable", "load_balanced"]),
    default="resumable",
    show_default=True,
    help="The mode of the group.",
)
@pipeline_options()
@click.option("--dry-run", is_flag=True, help="Print where the group would continue, and change nothing.")
@spark_options
@json_option
def adopt(mode: str, pipeline: Pipeline, dry_run: bool, spark: SparkSettings, as_json: bool) -> None:
    """Let a group continue after the rows of a copied table. The copy has rows, but no positions of the group.

    \b
    Example:
      stream-assets adopt --source kafka://localhost:9092/orders --table lake/orders_copy --group lakehouse --dry-run
    """
    from spark_jobs.batches import ledger_recovery

    stream = pipeline.stream(choice(ConsumerMode, mode, option="--mode"))
    ingestion = pipeline.ingestion(sharing=stream.mode, claims=stream.is_claimed)
    with pipeline.stream().open() as opened, progress_bar() as progress:
        positions = ledger_recovery.plan_adoption(opened, ingestion)
        if not dry_run:
            progress.add_task("adopting the rows", total=None)
            positions = ledger_recovery.adopt(spark.session(pipeline.table, pipeline.storage), opened, ingestion)
    rows = [{"shard": str(shard), "continues at": pipeline.shown(sequence)} for shard, sequence in positions.items()]
    title = f"group {pipeline.group} {'would continue' if dry_run else 'continues'} after the rows of {pipeline.table}"
    print_rows(rows, as_json=as_json, title=title)


@click.command()
@click.option("--to", required=True, type=click.Choice(MODES), help="The new mode.")
@pipeline_options(click.option("--group", required=True, help="The consumer group."))
@spark_options
def switch(to: str, pipeline: Pipeline, spark: SparkSettings) -> None:
    """Change the mode of a group. Stop its runs first. If the command was interrupted, run it again.

    \b
    Example:
      stream-assets switch --source kafka://localhost:9092/orders --table lake/orders \\
          --group lakehouse --to load_balanced
    """
    from spark_jobs.mode_switch import switch_sharing

    mode = choice(ConsumerMode, to, option="--to")
    ingestion = pipeline.ingestion(single_writer=spark.single_writer)
    with pipeline.opened(mode) as (stream, claims), progress_bar() as progress:
        ingestion.ledger().read()
        progress.add_task("switching", total=None)
        session = spark.session(pipeline.table, pipeline.storage)
        is_changed = switch_sharing(session, ingestion, to=mode, source=stream, claims=claims)
    click.echo(f"group {pipeline.group} is {to} now" if is_changed else f"group {pipeline.group} was {to} already")


@click.command()
@click.option(
    "--as",
    "epochs",
    multiple=True,
    metavar="EPOCH",
    help="Accept only this epoch, the next one of a stream, like orders#2. If it was accepted before, nothing happens.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be accepted, and change nothing.")
@pipeline_options(click.option("--group", required=True, help="The consumer group."))
@spark_options
@json_option
def accept(epochs: tuple[str, ...], dry_run: bool, pipeline: Pipeline, spark: SparkSettings, as_json: bool) -> None:
    """Accept a stream that was created again, replaced, or lost its newest messages.

    The group continues with the first message of the new stream, or the first one that differs from the table. Old rows
    stay. New rows have the name of a new epoch in _stream, like orders#2. Messages of the old stream that were not read
    are given up.

    \b
    Example:
      stream-assets accept --source kafka://localhost:9092/orders --table lake/orders --group lakehouse --as orders#2
    """
    from spark_jobs.batches.accept import accept as accept_epochs
    from spark_jobs.batches.accept import plan_accept

    ingestion = pipeline.ingestion()
    with pipeline.opened(ConsumerMode.RESUMABLE) as (stream, claims), progress_bar() as progress:
        accepted = plan_accept(stream, ingestion, ingestion.ledger().read(), epochs=epochs, claims=claims)
        if accepted and not dry_run:
            progress.add_task("accepting", total=None)
            session = spark.session(pipeline.table, pipeline.storage)
            accepted = accept_epochs(session, stream, ingestion, epochs=epochs, claims=claims)
    rows = [
        {
            "epoch": one.name,
            "begins at": ", ".join(f"{shard}={pipeline.shown(start)}" for shard, start in sorted(one.origin.items())),
            "known by": one.identity,
            "epoch before": one.before,
            "ended at": ", ".join(f"{shard}={pipeline.shown(end)}" for shard, end in sorted(one.ended.items())),
        }
        for one in accepted
    ]
    title = f"{'would be' if dry_run else 'is'} accepted by group {pipeline.group} of {pipeline.table}"
    print_rows(rows, as_json=as_json, title=title, empty=f"{', '.join(epochs)} was accepted before")
