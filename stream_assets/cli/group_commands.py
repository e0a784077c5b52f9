"""The commands that move a group or write a range again: ``replay``, ``rewind``, ``seek``, ``adopt`` and others."""

from __future__ import annotations

import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from stream_assets.cli.options import (
    MODES,
    Place,
    RowMaker,
    SparkChoice,
    batches_option,
    data_loss_option,
    json_option,
    limit_options,
    place_options,
    retry_option,
    row_options,
    spark_options,
)
from stream_assets.cli.output import batch_row, follow_batches, inform, print_rows, print_waiting, progress_bar
from stream_consumers.errors import InvalidOptionError, LedgerTruncatedError
from stream_consumers.options import ConsumerMode, choice

if TYPE_CHECKING:
    from spark_jobs.batches.bounds import Bound


@click.command()
@place_options()
@click.option("--from", "start", help="A sequence, SHARD=SEQUENCE,…, a time, or earliest (the default).")
@click.option("--until", "stop", help="Likewise; by default the position of the group.")
@click.option("--on-replay", type=click.Choice(["replace", "append"]), default="replace", show_default=True)
@click.option("--id", "replay_id", help="Go on with the replay of this id, which was killed.")
@click.option("--dry-run", is_flag=True, help="Print what would be read and replaced, and change nothing.")
@data_loss_option
@row_options
@limit_options
@batches_option
@retry_option
@spark_options
@json_option
def replay(
    place: Place,
    start: str | None,
    stop: str | None,
    on_replay: str,
    replay_id: str | None,
    dry_run: bool,
    maker: RowMaker,
    max_batches: int | None,
    spark: SparkChoice,
    as_json: bool,
    **settings: Any,
) -> None:
    """Read messages again that are in the table, and replace their rows; no position moves.

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

    ingestion = maker.ingestion(place, sharing=_sharing(place), single_writer=spark.single_writer, **settings)
    wanted = Replay(
        Bound.parse(start) if start else None,
        Bound.parse(stop) if stop else None,
        OnReplay(on_replay),
        replay_id or uuid.uuid4().hex,
    )
    with place.stream().open() as stream, progress_bar() as progress:
        opened, ledger = ingestion.in_epochs(stream), ingestion.ledger()
        state = ledger.read()
        maker.check(state)
        if replay_id and replay_progress(ledger, replay_id) is None:
            raise InvalidOptionError(f"there is no replay {replay_id!r} in {place.table}", remedy="Leave --id out.")
        find = partial(plan_replay, wanted, opened, ingestion, ledger, state)
        goal = result_of(Retries(ingestion.retry_seconds).call(find), print_waiting).progress.goal
        messages = opened.count(goal)
        if dry_run:
            progress.stop()
            replaced = count_rows(ledger.log, goal)
            rows: list[dict[str, object]] = [
                {
                    "shard": str(shard),
                    "from": place.shown(part.start),
                    "until": place.shown(part.end),
                    "messages": messages[shard],
                    "rows replaced": replaced[shard],
                }
                for shard, part in sorted(goal.items())
            ]
            title = f"would be replayed into {place.table}"
            print_rows(rows, as_json=as_json, title=title, empty="nothing to replay")
            return
        inform(f"note: if it is killed, go on with --id {wanted.id}", style="yellow")
        task = progress.add_task("starting Spark", total=sum(messages.values()))
        job = ReplayJob(spark.session(place.table, place.storage), opened, ingestion, wanted)
        batches = follow_batches(batch_events(job, max_batches=max_batches), progress, task)
        rows = [
            batch_row(report, number=number, more={"replaced": report.replaced}, lag="left")
            for number, report in enumerate(batches, 1)
        ]
    print_rows(rows, as_json=as_json, title=f"{place.source} into {place.table}", empty="nothing to replay")


def _sharing(place: Place) -> ConsumerMode:
    """How the group shares, as its ledger says."""
    ingestion = place.ingestion()
    try:
        sharing = ingestion.ledger().read().sharing
    except LedgerTruncatedError:
        # A group that shares its shards has a transaction sequence for each.
        is_one_sequence = ingestion.ledger().last_number(ingestion.member) > 0
        sharing = (ConsumerMode.RESUMABLE if is_one_sequence else ConsumerMode.LOAD_BALANCED).value
    modes = {mode.value: mode for mode in ConsumerMode}
    return modes.get(sharing, ConsumerMode.RESUMABLE)


def _move(to: Bound, place: Place, spark: SparkChoice, *, dry_run: bool, retry_seconds: float, as_json: bool) -> None:
    from spark_jobs.batches.replay import plan_moves, read_or_derive, rewind
    from spark_jobs.batches.run_control import Retries, result_of
    from spark_jobs.ledger.table_rows import count_rows

    sharing = _sharing(place)
    ingestion = place.ingestion(sharing=sharing, retry_seconds=retry_seconds, single_writer=spark.single_writer)
    mode = sharing if sharing is ConsumerMode.REAL_TIME else ConsumerMode.RESUMABLE
    with place.stream(mode).open() as stream, progress_bar() as progress:
        opened = ingestion.in_epochs(stream)
        state, _ = read_or_derive(opened, ingestion)
        find = partial(plan_moves, opened, ingestion, to, state=state)
        moves = result_of(Retries(retry_seconds).call(find), print_waiting)
        replaced = {move.shard: move.replaced for move in moves}
        messages, rows = opened.count(replaced), count_rows(ingestion.ledger().log, replaced)
        skipped = opened.count({move.shard: move.skipped for move in moves})
        if moves and not dry_run:
            progress.add_task("moving the group", total=None)
            moves = rewind(spark.session(place.table, place.storage), opened, ingestion, to, on_wait=print_waiting)
    listed = [
        {
            "shard": str(move.shard),
            "position": place.shown(move.position),
            "to": place.shown(move.to),
            "messages to read again": messages.get(move.shard, 0),
            "rows to replace": rows.get(move.shard, 0),
            "messages skipped": skipped.get(move.shard, 0),
        }
        for move in moves
    ]
    title = f"group {place.group} {'would be' if dry_run else 'is'} moved; the next run of ingest continues there"
    print_rows(listed, as_json=as_json, title=title, empty=f"group {place.group} is there already")


_dry_run = click.option("--dry-run", is_flag=True, help="Print what would be moved, and change nothing.")


@click.command()
@click.option("--to", required=True, help="earliest, latest, a sequence, or SHARD=SEQUENCE[,SHARD=SEQUENCE…].")
@place_options()
@_dry_run
@retry_option
@spark_options
@json_option
def rewind(to: str, place: Place, spark: SparkChoice, **options: Any) -> None:
    """Move the position of a group; what is written again replaces what is there.

    \b
    Examples:
      stream-assets rewind --source file://orders.ss/orders --table lake/orders --group lakehouse --to earliest
      stream-assets rewind --source kafka://localhost:9092/orders --table lake/orders --group lakehouse \\
          --to orders/0=1000,orders/1=900 --dry-run
    """
    from spark_jobs.batches.bounds import Bound

    bound = Bound.parse(to)
    if bound.moment is not None:
        raise InvalidOptionError(f"{to} is a time", remedy=f"Use: stream-assets seek --to {to}.")
    _move(bound, place, spark, **options)


@click.command()
@click.option("--to", required=True, help="A time like 2026-11-01T00:00:00Z.")
@place_options()
@_dry_run
@retry_option
@spark_options
@json_option
def seek(to: str, place: Place, spark: SparkChoice, **options: Any) -> None:
    """Move the position of a group to the first message with a timestamp, or a later one.

    \b
    Example:
      stream-assets seek --source redis://localhost:6379/orders --table lake/orders --group lakehouse \\
          --to 2026-11-01T00:00:00Z --dry-run
    """
    from spark_jobs.batches.bounds import Bound

    try:
        bound = Bound.at_time(to)
    except InvalidOptionError as error:
        Bound.parse(to)  # Raises as well, unless it is a place that rewind takes.
        raise InvalidOptionError(f"{to} is no time", remedy=f"Use: stream-assets rewind --to {to}.") from error
    _move(bound, place, spark, **options)


@click.command()
@click.option("--mode", type=click.Choice(["resumable", "load_balanced"]), default="resumable", show_default=True)
@place_options()
@click.option("--dry-run", is_flag=True, help="Print where the group would continue, and change nothing.")
@spark_options
@json_option
def adopt(mode: str, place: Place, dry_run: bool, spark: SparkChoice, as_json: bool) -> None:
    """Let a group continue after the rows of a table whose ledger does not have them: a copy of a table.

    \b
    Example:
      stream-assets adopt --source kafka://localhost:9092/orders --table lake/orders_copy --group lakehouse --dry-run
    """
    from spark_jobs.batches import ledger_recovery

    stream = place.stream(choice(ConsumerMode, mode, option="--mode"))
    ingestion = place.ingestion(sharing=stream.mode, claims=stream.is_claimed)
    with place.stream().open() as opened, progress_bar() as progress:
        positions = ledger_recovery.plan_adoption(opened, ingestion)
        if not dry_run:
            progress.add_task("adopting the rows", total=None)
            positions = ledger_recovery.adopt(spark.session(place.table, place.storage), opened, ingestion)
    rows = [{"shard": str(shard), "continues at": place.shown(sequence)} for shard, sequence in positions.items()]
    title = f"group {place.group} {'would continue' if dry_run else 'continues'} after the rows of {place.table}"
    print_rows(rows, as_json=as_json, title=title)


@click.command()
@click.option("--to", required=True, type=click.Choice(MODES), help="The new mode.")
@place_options(click.option("--group", required=True, help="The consumer group."))
@spark_options
def switch(to: str, place: Place, spark: SparkChoice) -> None:
    """Change how a group shares its shards; stop its runs first. Run it again if it was interrupted.

    \b
    Example:
      stream-assets switch --source kafka://localhost:9092/orders --table lake/orders \\
          --group lakehouse --to load_balanced
    """
    from spark_jobs.mode_switch import switch_sharing

    mode = choice(ConsumerMode, to, option="--to")
    ingestion = place.ingestion(single_writer=spark.single_writer)
    with place.opened(mode) as (stream, claims), progress_bar() as progress:
        ingestion.ledger().read()
        progress.add_task("switching", total=None)
        session = spark.session(place.table, place.storage)
        is_changed = switch_sharing(session, ingestion, to=mode, source=stream, claims=claims)
    click.echo(f"group {place.group} is {to} now" if is_changed else f"group {place.group} was {to} already")


@click.command()
@click.option(
    "--as",
    "epochs",
    multiple=True,
    metavar="EPOCH",
    help="Only this, the next epoch of a stream, like orders#2; nothing happens if it was accepted before.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be accepted, and change nothing.")
@place_options(click.option("--group", required=True, help="The consumer group."))
@spark_options
@json_option
def accept(epochs: tuple[str, ...], dry_run: bool, place: Place, spark: SparkChoice, as_json: bool) -> None:
    """Let a group continue with a stream that was deleted and made again, or replaced.

    The rows that are in the table stay. Those of the new stream come beside them, with the name of a new epoch in
    _stream, like orders#2, from its first message on. What the old stream held that was not read is given up.

    \b
    Example:
      stream-assets accept --source kafka://localhost:9092/orders --table lake/orders --group lakehouse --as orders#2
    """
    from spark_jobs.batches.accept import accept as accept_epochs
    from spark_jobs.batches.accept import plan_accept

    ingestion = place.ingestion()
    with place.opened(ConsumerMode.RESUMABLE) as (stream, claims), progress_bar() as progress:
        accepted = plan_accept(stream, ingestion, ingestion.ledger().read(), epochs=epochs, claims=claims)
        if accepted and not dry_run:
            progress.add_task("accepting", total=None)
            session = spark.session(place.table, place.storage)
            accepted = accept_epochs(session, stream, ingestion, epochs=epochs, claims=claims)
    rows = [
        {
            "epoch": one.name,
            "begins at": ", ".join(f"{shard}={place.shown(start)}" for shard, start in sorted(one.origin.items())),
            "known by": one.identity,
            "epoch before": one.before,
            "ended at": ", ".join(f"{shard}={place.shown(end)}" for shard, end in sorted(one.ended.items())),
        }
        for one in accepted
    ]
    title = f"{'would be' if dry_run else 'is'} accepted by group {place.group} of {place.table}"
    print_rows(rows, as_json=as_json, title=title, empty=f"{', '.join(epochs)} was accepted before")
