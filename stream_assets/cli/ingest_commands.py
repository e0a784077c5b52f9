"""The commands for streams and tables: ``ingest``, ``lag``, ``verify`` and ``switch``."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stream_assets.cli.options import (
    MODES,
    client_option,
    err,
    print_rows,
    progress_bar,
    reports_errors,
    stream_options,
    table_path,
)
from stream_assets.cli.transform_options import (
    check_maker,
    limit_options,
    limits,
    row_maker,
    row_options,
    spark_options,
)
from stream_consumers.backend import find_backend
from stream_consumers.batches import Range
from stream_consumers.client_config import ClientConfig
from stream_consumers.create import StreamSource, open_batch_source
from stream_consumers.errors import InvalidOptionError, TruncatedTailError
from stream_consumers.options import AutoStreamReset, ConsumerMode, DataLoss, choice
from stream_consumers.stdio.spool import default_spool_path, spool_stdin, spool_url
from stream_consumers.urls import StreamUrl

if TYPE_CHECKING:
    from rich.progress import Progress

    from spark_jobs.batches.ingestion import BatchReport
    from spark_jobs.ledger.ledger import LedgerState


@click.command()
@click.option("--source", required=True, help="The stream URL.")
@click.option("--table", required=True, help="The Delta table, a path or URI.")
@click.option("--mode", type=click.Choice(MODES), default="resumable", show_default=True)
@click.option(
    "--start",
    type=click.Choice(["earliest", "latest"]),
    help="Where a group without a position starts: earliest by default, latest in mode real_time.",
)
@click.option("--on-data-loss", type=click.Choice(["error", "record"]), default="error", show_default=True)
@click.option("--member", default="main", show_default=True, help="Its name among members that claim entries (Redis).")
@click.option("--spool", type=click.Path(path_type=Path), help="The file for stdio: <table>.spool.ss by default.")
@row_options
@limit_options
@spark_options
@stream_options
@reports_errors
def ingest(
    source: str,
    table: str,
    decode: str | None,
    schema: str | None,
    transform: str | None,
    mode: str,
    start: str | None,
    on_data_loss: str,
    member: str,
    max_records: int | None,
    max_bytes: int | None,
    max_batches: int | None,
    spool: Path | None,
    master: str,
    remote: str | None,
    group: str,
    client: ClientConfig,
    as_json: bool,
) -> None:
    """Write a stream into a Delta table up to its present end, each message once.

    A pipe (stdio:///orders) is written into a stream file first, up to its end; that file is what is ingested.

    \b
    Examples:
      stream-assets ingest --source file://orders.ss/orders --table lake/orders \\
          --decode json --schema 'id BIGINT, user STRING, amount DECIMAL(10,2)'
      stream-assets ingest --source kafka://broker:9093/orders --table lake/orders --group lakehouse \\
          -X security.protocol=SASL_SSL -X sasl.mechanism=PLAIN -X sasl.username=me \\
          -X sasl.password=env:KAFKA_PASSWORD
      tail -n 1000 app.log | stream-assets ingest --source stdio:///log --table lake/log
    """
    from spark_jobs.batches.ingestion import Ingestion
    from spark_jobs.run_ingestion import drain
    from spark_jobs.session import SparkOptions, create_session

    maker = row_maker(decode, schema, transform)
    url, pipe = _file_of_pipe(StreamUrl.parse(source), table, spool)
    stream = StreamSource(url, choice(ConsumerMode, mode, option="--mode"), client)
    first = "latest" if stream.mode is ConsumerMode.REAL_TIME else "earliest"
    ingestion = Ingestion(
        group=group if stream.mode is not ConsumerMode.REAL_TIME else stream.group(None),
        table=table_path(table),
        decoder=maker.decoder,
        transform=maker.transform,
        member=member,
        sharing=stream.mode,
        claims=stream.is_claimed,
        start=choice(AutoStreamReset, start or first, option="--start"),
        on_data_loss=choice(DataLoss, on_data_loss, option="--on-data-loss"),
        limits=limits(max_records, max_bytes),
    )
    reports: list[dict[str, object]] = []
    tails: list[str] = []
    with progress_bar() as progress:
        # What is wrong with either of them is told before Spark starts.
        check_maker(ingestion.ledger().read(), maker)
        if pipe is not None:
            _spool(pipe, url, progress)
        with stream.open() as opened:
            opened.identities()
        task = progress.add_task("starting Spark", total=None)
        spark = create_session(SparkOptions(master=master, remote=remote))
        progress.update(task, description="reading")
        done = 0
        for report, _ in drain(spark, stream, ingestion, max_batches=max_batches, on_tail=tails.append):
            done += sum(report.messages.values()) + report.dead
            left = sum(report.lag.values())
            progress.update(task, description=f"batch {report.batch.number}", completed=done, total=done + left)
            reports.append(_report_row(report))
        progress.update(task, description="done", completed=done, total=done)
    print_rows(reports, as_json=as_json, title=f"{source} into {table}", empty="nothing to read: lag 0")
    if tails:
        raise TruncatedTailError(
            tails[0],
            remedy="All whole messages before it are in the table; the next run continues behind them.",
        )


def _file_of_pipe(url: StreamUrl, table: str, spool: Path | None) -> tuple[StreamUrl, StreamUrl | None]:
    """What to ingest, and the pipe that is spooled into it first, if it is one."""
    if find_backend(url.protocol).is_pipe:
        return spool_url(url, spool or default_spool_path(table)), url
    if spool is not None:
        raise InvalidOptionError(f"{url} is read where it is: --spool is for stdio", remedy="Leave --spool out.")
    return url, None


def _spool(pipe: StreamUrl, file: StreamUrl, progress: Progress) -> None:
    path = Path(file.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    task = progress.add_task("spooled", total=None)
    spooled = spool_stdin(pipe, path, on_message=lambda message: progress.advance(task))
    note = f"note: {spooled.messages} messages of stdin are in {path} now"
    if spooled.unclaimed:
        note += f"; {spooled.unclaimed} lines of other streams are not"
    err.print(note, style="yellow", markup=False, soft_wrap=True)


def _report_row(report: BatchReport) -> dict[str, object]:
    lost = [f"{shard} {part.start}-{part.end}" for shard, parts in report.batch.entry.lost.items() for part in parts]
    return {
        "batch": report.batch.number,
        "version": report.version,
        "rows": report.rows,
        "dead letters": report.dead,
        "lost": ", ".join(lost) or None,
        "lag": sum(report.lag.values()),
        "seconds": round(report.seconds, 2),
    }


@click.command()
@click.argument("url")
@click.option("--table", help="The Delta table whose ledger is compared.")
@stream_options
@reports_errors
def lag(url: str, table: str | None, group: str, client: ClientConfig, as_json: bool) -> None:
    """Per shard: where it starts and ends, where the group is, and how far behind.

    "blocked" counts what an open transaction holds back behind the end.

    \b
    Example:
      stream-assets lag file://orders.ss/orders --group lakehouse --table lake/orders
      stream-assets lag kafka://localhost:9092/orders --group lakehouse
    """
    from spark_jobs.batches.ingestion import CLAIMS, Ingestion, check_source
    from spark_jobs.ledger.ledger import LedgerState as State

    ledger = State(-1)
    if table is not None:
        ledger = Ingestion(group=group, table=table_path(table)).ledger().read()
    if ledger.sharing == CLAIMS or (table is None and _is_claimed(url, group, client)):
        _print_claims(url, group, client, ledger, as_json=as_json)
        return
    with open_batch_source(url, client=client) as opened:
        extents, committed = opened.extents(), opened.committed(group)
        known = ledger.positions if table is not None else committed or {}
        gaps = {shard: Range(known.get(shard, extent.start), extent.end) for shard, extent in extents.items()}
        behind = opened.count(gaps)
    if table is None and committed is None:
        raise InvalidOptionError(
            f"{url} has no broker that remembers groups", remedy="Add --table: the positions are in its ledger."
        )
    if table is not None and ledger.newest is None:
        err.print(f"note: the ledger of {table} knows nothing of group {group!r} yet", style="yellow", markup=False)
    elif ledger.newest is not None:
        check_source(opened, group, ledger, extents)
    rows = [
        {
            "shard": str(shard),
            "start": extent.start,
            "committed": (committed or {}).get(shard),
            "ledger": ledger.positions.get(shard),
            "end": extent.end,
            "lag": behind[shard],
            "blocked": extent.blocked,
        }
        for shard, extent in extents.items()
    ]
    print_rows(rows, as_json=as_json, title=f"{url}, group {group}", empty="the stream is empty: lag 0")


def _is_claimed(url: str, group: str, client: ClientConfig) -> bool:
    source = StreamSource(StreamUrl.parse(url), client=client)
    if not source.may_be_claimed:
        return False
    with source.claims(group) as claims:
        return claims.is_in_claim_mode()


def _print_claims(url: str, group: str, client: ClientConfig, ledger: LedgerState, *, as_json: bool) -> None:
    """A group that claims entries has no position; the server knows what nobody was given and what is pending."""
    with StreamSource(StreamUrl.parse(url), ConsumerMode.LOAD_BALANCED, client).claims(group) as claims:
        claims.check({shard: known.claimed for shard, known in ledger.shards.items()})
        rows = [
            {
                "shard": str(shard),
                "delivered": claims.position(shard),
                "end": claims.ends.get(shard),
                "unread": backlog.unread,
                "pending": backlog.pending,
                "lag": backlog.total,
            }
            for shard, backlog in claims.backlog().items()
        ]
    print_rows(rows, as_json=as_json, title=f"{url}, group {group}", empty="the stream is empty: lag 0")


@click.command()
@click.option("--source", required=True, help="The stream URL.")
@click.option("--table", required=True, help="The Delta table.")
@stream_options
@reports_errors
def verify(source: str, table: str, group: str, client: ClientConfig, as_json: bool) -> None:
    """Compare the sequences in the stream with those in the table; exit code 1 unless each is there once.

    \b
    Example:
      stream-assets verify --source file://orders.ss/orders --table lake/orders --group lakehouse
    """
    from spark_jobs.batches.ingestion import CLAIMS, Ingestion
    from spark_jobs.claims.status import claim_state
    from spark_jobs.verify import verify as compare

    ingestion = Ingestion(group=group, table=table_path(table))
    claimed, state = None, ingestion.ledger().read()
    if state.sharing == CLAIMS:
        with StreamSource(StreamUrl.parse(source), ConsumerMode.LOAD_BALANCED, client).claims(group) as claims:
            claimed = claim_state(claims, ingestion.ledger(), state.shards)
    with open_batch_source(source, client=client) as opened, progress_bar() as progress:
        task = progress.add_task("read", total=None)
        verdicts = compare(opened, ingestion, claims=claimed, progress=lambda count: progress.advance(task, count))
    columns = (
        "first",
        "last",
        "messages",
        "rows",
        "dead",
        "filtered",
        "skipped",
        "missing",
        "duplicated",
        "unknown",
        "lag",
    )
    rows = [{"shard": str(v.shard), **{name: getattr(v, name) for name in columns}} for v in verdicts]
    renamed = [{("dead letters" if k == "dead" else k): value for k, value in row.items()} for row in rows]
    print_rows(renamed, as_json=as_json, title=f"{source} and {table}", empty="the stream is empty")
    for verdict in verdicts:
        for what, sequences in verdict.examples.items():
            err.print(f"{verdict.shard}: {what} {sequences} …", style="red", markup=False)
    if not all(verdict.is_right for verdict in verdicts):
        sys.exit(1)


@click.command()
@click.option("--source", required=True, help="The stream URL.")
@click.option("--table", required=True, help="The Delta table.")
@click.option("--to", required=True, type=click.Choice(MODES), help="The new mode.")
@click.option("--master", default="local[*]", show_default=True, help="The Spark master.")
@click.option("--remote", help="A Spark Connect address, sc://host:port, instead of --master.")
@click.option("--group", required=True, help="The consumer group.")
@client_option
@reports_errors
def switch(source: str, table: str, to: str, master: str, remote: str | None, group: str, client: ClientConfig) -> None:
    """Change how a group shares its shards; stop its runs first. Run it again if it was interrupted.

    \b
    Example:
      stream-assets switch --source kafka://localhost:9092/orders --table lake/orders \\
          --group lakehouse --to load_balanced
    """
    from spark_jobs.batches.ingestion import Ingestion
    from spark_jobs.mode_switch import switch_sharing
    from spark_jobs.session import SparkOptions, create_session

    mode = choice(ConsumerMode, to, option="--to")
    ingestion = Ingestion(group=group, table=table_path(table))
    stream = StreamSource(StreamUrl.parse(source), mode, client)
    with ExitStack() as stack:
        opened = stack.enter_context(stream.open())
        claims = stack.enter_context(stream.claims(group)) if stream.may_be_claimed else None
        progress = stack.enter_context(progress_bar())
        ingestion.ledger().read()
        progress.add_task("switching", total=None)
        spark = create_session(SparkOptions(master=master, remote=remote))
        is_changed = switch_sharing(spark, ingestion, to=mode, source=opened, claims=claims)
    click.echo(f"group {group} is {to} now" if is_changed else f"group {group} was {to} already")
