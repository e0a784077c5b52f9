"""The commands ``replay``, ``rewind`` and ``seek``."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from stream_assets.cli.options import err, print_rows, progress_bar, reports_errors, stream_options, table_path
from stream_assets.cli.transform_options import (
    check_maker,
    limit_options,
    limits,
    row_maker,
    row_options,
    spark_options,
)
from stream_consumers.batches import BatchSource, Range
from stream_consumers.client_config import ClientConfig
from stream_consumers.create import StreamSource
from stream_consumers.errors import InvalidOptionError, LedgerTruncatedError
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode, DataLoss, choice
from stream_consumers.urls import StreamUrl

if TYPE_CHECKING:
    from spark_jobs.batches.bounds import Bound
    from spark_jobs.batches.ingestion import BatchReport, Ingestion

P = ParamSpec("P")
R = TypeVar("R")


@click.command()
@click.option("--source", required=True, help="The stream URL.")
@click.option("--table", required=True, help="The Delta table, a path or URI.")
@click.option("--from", "start", help="A sequence, SHARD=SEQUENCE,…, a time, or earliest (the default).")
@click.option("--until", "stop", help="Likewise; by default the position of the group.")
@click.option("--on-replay", type=click.Choice(["replace", "append"]), default="replace", show_default=True)
@click.option("--id", "replay_id", help="Go on with the replay of this id, which was killed.")
@click.option("--dry-run", is_flag=True, help="Print what would be read and replaced, and change nothing.")
@click.option("--on-data-loss", type=click.Choice(["error", "record"]), default="error", show_default=True)
@row_options
@limit_options
@spark_options
@stream_options
@reports_errors
def replay(
    source: str,
    table: str,
    start: str | None,
    stop: str | None,
    on_replay: str,
    replay_id: str | None,
    dry_run: bool,
    on_data_loss: str,
    decode: str | None,
    schema: str | None,
    transform: str | None,
    max_records: int | None,
    max_bytes: int | None,
    max_batches: int | None,
    master: str,
    remote: str | None,
    group: str,
    client: ClientConfig,
    as_json: bool,
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
    from spark_jobs.batches.replay import OnReplay, Replay, ReplayJob, begun, check_replay, drain_replay, goal_of
    from spark_jobs.session import SparkOptions, create_session

    maker = row_maker(decode, schema, transform)
    ingestion = replace(
        _ingestion(group, table),
        decoder=maker.decoder,
        transform=maker.transform,
        on_data_loss=choice(DataLoss, on_data_loss, option="--on-data-loss"),
        limits=limits(max_records, max_bytes),
    )
    wanted = Replay(
        Bound.parse(start) if start else None,
        Bound.parse(stop) if stop else None,
        OnReplay(on_replay),
        replay_id or uuid.uuid4().hex,
    )
    reports: list[dict[str, object]] = []
    with StreamSource(StreamUrl.parse(source), client=client).open() as opened, progress_bar() as progress:
        state = ingestion.ledger().read()
        check_replay(state, ingestion)
        check_maker(state, maker)
        known = begun(ingestion.ledger(), wanted.id)
        if replay_id and known is None:
            raise InvalidOptionError(f"there is no replay {replay_id!r} in {table}", remedy="Leave --id out.")
        extents = opened.extents()
        goal = known.goal if known else goal_of(wanted, opened, state, extents)
        if dry_run:
            progress.stop()
            rows = _replay_rows(opened, ingestion, goal)
            print_rows(rows, as_json=as_json, title=f"would be replayed into {table}", empty="nothing to replay")
            return
        err.print(f"note: if it is killed, go on with --id {wanted.id}", style="yellow", markup=False, soft_wrap=True)
        task = progress.add_task("starting Spark", total=sum(opened.count(goal).values()))
        spark = create_session(SparkOptions(master=master, remote=remote))
        job = ReplayJob(
            spark, opened, ingestion, wanted, on_wait=lambda why: progress.update(task, description=f"waiting: {why}")
        )
        for report, _ in drain_replay(job, max_batches=max_batches):
            progress.update(
                task,
                description=f"batch {report.batch.number}",
                advance=sum(report.messages.values()) + report.dead,
            )
            reports.append(_report_row(report))
        progress.update(task, description="done")
    print_rows(reports, as_json=as_json, title=f"{source} into {table}", empty="nothing to replay")


def _report_row(report: BatchReport) -> dict[str, object]:
    return {
        "batch": report.batch.number,
        "version": report.version,
        "replaced": report.replaced,
        "rows": report.rows,
        "dead letters": report.dead,
        "left": sum(report.lag.values()),
        "seconds": round(report.seconds, 2),
    }


def _replay_rows(opened: BatchSource, ingestion: Ingestion, goal: Mapping[Shard, Range]) -> list[dict[str, Any]]:
    messages, rows = opened.count(goal), _rows_in(ingestion, goal)
    return [
        {
            "shard": str(shard),
            "from": part.start,
            "until": part.end,
            "messages": messages[shard],
            "rows replaced": rows[shard],
        }
        for shard, part in sorted(goal.items())
    ]


def _rows_in(ingestion: Ingestion, ranges: Mapping[Shard, Range]) -> Mapping[Shard, int]:
    from spark_jobs.verify import count_rows

    return count_rows(ingestion, ranges)


def _ingestion(group: str, table: str) -> Ingestion:
    """The group as its ledger says that it shares."""
    from spark_jobs.batches.ingestion import Ingestion

    ingestion = Ingestion(group=group, table=table_path(table))
    try:
        sharing = ingestion.ledger().read().sharing
    except LedgerTruncatedError:
        # A group that shares its shards has a number line for each.
        is_one_line = ingestion.ledger().last_number(ingestion.member) > 0
        sharing = (ConsumerMode.RESUMABLE if is_one_line else ConsumerMode.LOAD_BALANCED).value
    modes = {mode.value: mode for mode in ConsumerMode}
    return replace(ingestion, sharing=modes.get(sharing, ConsumerMode.RESUMABLE))


def _move_options(command: Callable[P, R]) -> Callable[P, R]:
    """The options that :func:`_move` takes."""
    options: list[Callable[[Callable[P, R]], Callable[P, R]]] = [
        stream_options,
        spark_options,
        click.option("--dry-run", is_flag=True, help="Print what would be moved, and change nothing."),
        click.option("--table", required=True, help="The Delta table, a path or URI."),
        click.option("--source", required=True, help="The stream URL."),
    ]
    for option in options:
        command = option(command)
    return command


def _move(
    to: Bound,
    *,
    source: str,
    table: str,
    group: str,
    client: ClientConfig,
    dry_run: bool,
    master: str,
    remote: str | None,
    as_json: bool,
) -> None:
    from spark_jobs.batches.rewind import plan_moves, read_or_guess, rewind
    from spark_jobs.session import SparkOptions, create_session

    ingestion = _ingestion(group, table)
    mode = ingestion.sharing if ingestion.sharing is ConsumerMode.REAL_TIME else ConsumerMode.RESUMABLE
    with StreamSource(StreamUrl.parse(source), mode, client).open() as opened, progress_bar() as progress:
        state, _ = read_or_guess(opened, ingestion)
        moves = plan_moves(opened, ingestion, to, state=state)
        replaced = {move.shard: move.replaced for move in moves}
        messages, rows = opened.count(replaced), _rows_in(ingestion, replaced)
        skipped = opened.count({move.shard: move.skipped for move in moves})
        if moves and not dry_run:
            progress.add_task("moving the group", total=None)
            moves = rewind(create_session(SparkOptions(master=master, remote=remote)), opened, ingestion, to)
    listed = [
        {
            "shard": str(move.shard),
            "position": move.position,
            "to": move.to,
            "messages to read again": messages.get(move.shard, 0),
            "rows to replace": rows.get(move.shard, 0),
            "messages skipped": skipped.get(move.shard, 0),
        }
        for move in moves
    ]
    title = f"group {group} {'would be' if dry_run else 'is'} moved; the next run of ingest continues there"
    print_rows(listed, as_json=as_json, title=title, empty=f"group {group} is there already")


@click.command()
@click.option("--to", required=True, help="earliest, latest, a sequence, or SHARD=SEQUENCE[,SHARD=SEQUENCE…].")
@_move_options
@reports_errors
def rewind(to: str, **options: Any) -> None:
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
    _move(bound, **options)


@click.command()
@click.option("--to", required=True, help="A time like 2026-11-01T00:00:00Z.")
@_move_options
@reports_errors
def seek(to: str, **options: Any) -> None:
    """Move the position of a group to the first message with a timestamp, or a later one.

    \b
    Example:
      stream-assets seek --source redis://localhost:6379/orders --table lake/orders --group lakehouse \\
          --to 2026-11-01T00:00:00Z --dry-run
    """
    from spark_jobs.batches.bounds import Bound

    _move(Bound.at_time(to), **options)
