"""The ``stream-assets`` command."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from stream_consumers.client_config import ClientConfig, parse_client_option
from stream_consumers.connect import StreamSource, create_consumer, create_producer, open_batch_source
from stream_consumers.consumer import Consumer
from stream_consumers.errors import InvalidOptionError, StreamAssetsError, TruncatedTailError
from stream_consumers.messages import DeadLetter, Message, Receipt, Shard, format_timestamp
from stream_consumers.options import AutoStreamReset, ConsumerMode, DataLoss, FileProducerOptions, Limits, choice
from stream_consumers.urls import StreamUrl

if TYPE_CHECKING:
    from spark_jobs.ingestion import BatchReport

P = ParamSpec("P")
R = TypeVar("R")
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
MODES = [mode.value for mode in ConsumerMode]


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Print our errors as one line on stderr and end with exit code 1."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except StreamAssetsError as error:
            err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
            sys.exit(1)
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(0)

    return run


def progress_bar() -> Progress:
    """A progress bar on stderr, so that stdout stays clean for pipes."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=err
    )


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="stream-assets")
def main() -> None:
    """Streams into Delta tables exactly once.

    URLs name the streams behind the last slash:

    \b
      file://path/to/orders.ss/orders      kafka://host:9092/orders      memory://name/orders
    """


client_option = click.option(
    "-X",
    "--client",
    "client",
    multiple=True,
    metavar="NAME=VALUE",
    callback=lambda context, option, values: dict(parse_client_option(value) for value in values),
    help="Configure the broker's client; NAME=env:VARIABLE keeps a secret in the environment.",
)


@main.command()
@click.argument("url")
@click.option("--count", type=click.IntRange(min=0), help="Write so many numbered JSON messages.")
@click.option("--from", "lines", type=click.File("rb"), help="Send each line of this file; '-' is stdin.")
@click.option("--shards", type=click.IntRange(min=1), default=1, show_default=True, help="Send in turn to so many.")
@click.option("--beacon-interval", type=int, default=FileProducerOptions().beacon_interval, show_default=True)
@click.option("--end", is_flag=True, help="Write the end-of-stream message (files).")
@click.option("--json", "as_json", is_flag=True, help="Print receipts as JSON.")
@client_option
@reports_errors
def produce(
    url: str,
    count: int | None,
    lines: Any,
    shards: int,
    beacon_interval: int,
    end: bool,
    as_json: bool,
    client: ClientConfig,
) -> None:
    """Send messages; each line of stdin is one unless --count or --from is given.

    \b
    Examples:
      stream-assets produce file://orders.ss/orders --count 1000 --shards 2
      cat orders.jsonl | stream-assets produce file://orders.ss/orders
      stream-assets produce kafka://localhost:9092/orders --count 1000 --shards 4
    """
    if count is not None and lines is not None:
        raise InvalidOptionError("--count and --from exclude each other", remedy="Use one of them.")
    options = FileProducerOptions(beacon_interval=beacon_interval, end_with_eos=end)
    payloads = _numbered(count) if count is not None else _lines(lines or sys.stdin.buffer)
    first: dict[Shard, Receipt] = {}
    last: dict[Shard, Receipt] = {}
    opened = create_producer(url, file_options=options, client=client, shards=shards)
    with opened as producer, progress_bar() as progress:
        task = progress.add_task("sent", total=count)
        for index, payload in enumerate(payloads):
            receipt = producer.send(payload, shard=index % shards)
            first.setdefault(receipt.shard, receipt)
            last[receipt.shard] = receipt
            if index % 1000 == 999:
                progress.update(task, completed=index + 1)
        progress.update(task, completed=sum(r.sequence - first[s].sequence + 1 for s, r in last.items()))
    rows = [{"shard": str(s), "first": first[s].sequence, "last": r.sequence} for s, r in sorted(last.items())]
    print_rows(rows, as_json=as_json, title=f"sent to {url}")


def _numbered(count: int) -> Iterator[bytes]:
    for index in range(count):
        yield json.dumps({"id": index, "user": f"user-{index % 97}", "amount": round(index % 1000 / 7, 2)}).encode()


def _lines(stream: Any) -> Iterator[bytes]:
    for line in stream:
        yield line.rstrip(b"\n")


@main.command()
@click.argument("url")
@click.option("--mode", type=click.Choice(MODES), default="real_time", show_default=True)
@click.option("--group", help="The consumer group, for modes that have one.")
@click.option("--start", default="earliest", show_default=True, help="earliest, latest, a sequence, or an ISO time.")
@click.option("--max", "limit", type=click.IntRange(min=1), help="Stop after so many messages.")
@click.option("--follow", is_flag=True, help="Wait for more at the end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@client_option
@reports_errors
def peek(
    url: str,
    mode: str,
    group: str | None,
    start: str,
    limit: int | None,
    follow: bool,
    as_json: bool,
    client: ClientConfig,
) -> None:
    """Print messages; nothing is committed. Dead letters go to stderr.

    With --mode resumable and --group it begins where the group is.

    \b
    Examples:
      stream-assets peek file://orders.ss/orders --max 5
      stream-assets peek file://orders.ss/orders --start 2026-11-01T00:00:00 --json
      stream-assets peek kafka://localhost:9092/orders --max 5
    """
    is_latest = start == "latest"
    reset = AutoStreamReset.LATEST if is_latest else AutoStreamReset.EARLIEST
    opened = create_consumer(
        url,
        mode=choice(ConsumerMode, mode, option="--mode"),
        group=group,
        reset=reset,
        live=follow or is_latest,
        client=client,
        on_dead_letter=_print_letter,
    )
    with opened as consumer:
        _go_to(consumer, start)
        for index, message in enumerate(consumer, 1):
            _print_message(message, as_json=as_json)
            if index == limit:
                break


def _go_to(consumer: Consumer, start: str) -> None:
    if start in ("earliest", "latest"):
        return
    if start.isdecimal():
        consumer.rewind(int(start))
        return
    try:
        moment = datetime.fromisoformat(start.replace("Z", "+00:00"))
    except ValueError as error:
        raise InvalidOptionError(
            f"--start {start!r} is no place",
            remedy="Use earliest, latest, a sequence, or a time like 2026-11-01T12:00.",
        ) from error
    consumer.seek(moment)


def _print_message(message: Message, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(message.to_json()))
        return
    text = message.to_json()
    payload = text.get("payload") if "payload" in text else f"<{len(message.payload or b'')} bytes>"
    click.echo(f"[{text['timestamp']} | {message.shard.stream} | {message.sequence} | {message.shard.id}] {payload}")


def _print_letter(letter: DeadLetter) -> None:
    when = "" if letter.timestamp_ms is None else f" of {format_timestamp(letter.timestamp_ms)}"
    err.print(
        f"dead letter{when} in {letter.shard} at offset {letter.offset}: {letter.error} ({len(letter.payload)} bytes)",
        style="yellow",
        markup=False,
        soft_wrap=True,
    )


def stream_options(command: Callable[P, R]) -> Callable[P, R]:
    """The options that name a stream, a group and a table."""
    options: list[Callable[[Callable[P, R]], Callable[P, R]]] = [
        click.option("--json", "as_json", is_flag=True, help="Print JSON for machines."),
        click.option("--group", default="stream-assets", show_default=True, help="The consumer group."),
        client_option,
    ]
    for option in options:
        command = option(command)
    return command


@main.command()
@click.option("--source", required=True, help="The stream URL.")
@click.option("--table", required=True, help="The Delta table, a path or URI.")
@click.option("--decode", type=click.Choice(["raw", "text", "json"]), default="raw", show_default=True)
@click.option("--schema", help="Spark DDL of the columns, for --decode json: 'id BIGINT, user STRING'.")
@click.option("--mode", type=click.Choice(MODES), default="resumable", show_default=True)
@click.option("--start", type=click.Choice(["earliest", "latest"]), default="earliest", show_default=True)
@click.option("--on-data-loss", type=click.Choice(["error", "record"]), default="error", show_default=True)
@click.option("--max-records", type=click.IntRange(min=1), help="The most messages in a micro-batch.")
@click.option("--max-bytes", type=click.IntRange(min=1), help="The most payload bytes in a micro-batch.")
@click.option("--max-batches", type=click.IntRange(min=1), help="Stop after so many.")
@click.option("--master", default="local[*]", show_default=True, help="The Spark master.")
@click.option("--remote", help="A Spark Connect address, sc://host:port, instead of --master.")
@stream_options
@reports_errors
def ingest(
    source: str,
    table: str,
    decode: str,
    schema: str | None,
    mode: str,
    start: str,
    on_data_loss: str,
    max_records: int | None,
    max_bytes: int | None,
    max_batches: int | None,
    master: str,
    remote: str | None,
    group: str,
    client: ClientConfig,
    as_json: bool,
) -> None:
    """Write a stream into a Delta table up to its present end, each message once.

    \b
    Examples:
      stream-assets ingest --source file://orders.ss/orders --table lake/orders \\
          --decode json --schema 'id BIGINT, user STRING, amount DECIMAL(10,2)'
      stream-assets ingest --source kafka://broker:9093/orders --table lake/orders --group lakehouse \\
          -X security.protocol=SASL_SSL -X sasl.mechanism=PLAIN -X sasl.username=me \\
          -X sasl.password=env:KAFKA_PASSWORD
    """
    from spark_jobs.decode import Decoder, Json, Raw, Text
    from spark_jobs.draining import drain
    from spark_jobs.ingestion import Ingestion
    from spark_jobs.session import SparkOptions, create_session

    if (decode == "json") != (schema is not None):
        raise InvalidOptionError("--decode json and --schema belong together", remedy="Give both, or neither.")
    decoders: dict[str, Decoder] = {"raw": Raw(), "text": Text()}
    defaults = Limits()
    stream = StreamSource(StreamUrl.parse(source), choice(ConsumerMode, mode, option="--mode"), client)
    ingestion = Ingestion(
        group=group if stream.mode is not ConsumerMode.REAL_TIME else stream.group(None),
        table=table_path(table),
        decoder=Json(schema) if schema else decoders[decode],
        sharing=stream.mode,
        start=choice(AutoStreamReset, start, option="--start"),
        on_data_loss=choice(DataLoss, on_data_loss, option="--on-data-loss"),
        limits=Limits(max_records or defaults.max_records, max_bytes or defaults.max_bytes),
    )
    reports: list[dict[str, object]] = []
    tails: list[str] = []
    with progress_bar() as progress:
        # What is wrong with either of them is told before Spark starts.
        ingestion.ledger().read()
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


def _report_row(report: BatchReport) -> dict[str, object]:
    lost = [f"{shard} {part.start}-{part.end}" for shard, part in report.batch.entry.lost.items()]
    return {
        "batch": report.batch.number,
        "version": report.version,
        "rows": report.rows,
        "dead letters": report.dead,
        "lost": ", ".join(f"{shard} {part.start}-{part.end}" for shard, part in report.batch.entry.lost.items())
        or None,
        "lag": sum(report.lag.values()),
        "seconds": round(report.seconds, 2),
    }


def table_path(table: str) -> str:
    """A local path made absolute; a URI as it is."""
    return table if "://" in table else str(Path(table).absolute())


@main.command()
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
    from spark_jobs.ingestion import Ingestion, check_source
    from spark_jobs.ledger import LedgerState

    ledger = LedgerState(-1)
    if table is not None:
        ledger = Ingestion(group=group, table=table_path(table)).ledger().read()
    with open_batch_source(url, client=client) as opened:
        extents, committed = opened.extents(), opened.committed(group)
    if table is None and committed is None:
        raise InvalidOptionError(
            f"{url} has no broker that remembers groups", remedy="Add --table: the positions are in its ledger."
        )
    if table is not None and ledger.newest is None:
        err.print(f"note: the ledger of {table} knows nothing of group {group!r} yet", style="yellow", markup=False)
    elif ledger.newest is not None:
        check_source(opened, group, ledger, extents)
    known = ledger.positions if table is not None else committed or {}
    rows = [
        {
            "shard": str(shard),
            "start": extent.start,
            "committed": (committed or {}).get(shard),
            "ledger": ledger.positions.get(shard),
            "end": extent.end,
            "lag": max(0, extent.end - known.get(shard, extent.start)),
            "blocked": extent.blocked,
        }
        for shard, extent in extents.items()
    ]
    print_rows(rows, as_json=as_json, title=f"{url}, group {group}", empty="the stream is empty: lag 0")


@main.command()
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
    from spark_jobs.ingestion import Ingestion
    from spark_jobs.verify import verify as compare

    ingestion = Ingestion(group=group, table=table_path(table))
    with open_batch_source(source, client=client) as opened, progress_bar() as progress:
        task = progress.add_task("read", total=None)
        verdicts = compare(opened, ingestion, progress=lambda count: progress.advance(task, count))
    columns = ("first", "last", "messages", "rows", "dead", "filtered", "missing", "duplicated", "unknown", "lag")
    rows = [{"shard": str(v.shard), **{name: getattr(v, name) for name in columns}} for v in verdicts]
    renamed = [{("dead letters" if k == "dead" else k): value for k, value in row.items()} for row in rows]
    print_rows(renamed, as_json=as_json, title=f"{source} and {table}", empty="the stream is empty")
    for verdict in verdicts:
        for what, sequences in verdict.examples.items():
            err.print(f"{verdict.shard}: {what} {sequences} …", style="red", markup=False)
    if not all(verdict.is_right for verdict in verdicts):
        sys.exit(1)


@main.command()
@click.option("--messages", type=click.IntRange(min=4000), default=100_000, show_default=True)
@reports_errors
def demo(messages: int) -> None:
    """Messages from a file into Delta under a real Dagster daemon, with two runs killed on the way."""
    from stream_assets.demo import run_demo

    sys.exit(run_demo(messages=messages))


@main.command()
@reports_errors
def doctor() -> None:
    """Check what this machine has: Java, the Delta jars, packages."""
    from stream_assets.doctor import examine

    findings = examine()
    print_rows([dict(finding) for finding in findings], as_json=False, title="doctor")
    if any(finding["state"] != "ok" for finding in findings):
        sys.exit(1)


def print_rows(
    rows: list[dict[str, Any]], *, as_json: bool, title: str, empty: str = "nothing", console: Console = out
) -> None:
    """Print rows as a table for people, or as one JSON list for machines."""
    if as_json:
        click.echo(json.dumps({"rows": rows}))
        return
    if not rows:
        console.print(empty)
        return
    table = Table(title=title, title_justify="left")
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right", no_wrap=True)
    for row in rows:
        table.add_row(*("–" if value is None else str(value) for value in row.values()))
    console.print(table)


if __name__ == "__main__":
    main()
