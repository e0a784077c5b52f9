"""The commands that write a stream into a table, and compare both: ``ingest``, ``lag`` and ``verify``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stream_assets.cli.options import (
    MODES,
    Pipeline,
    RowConversion,
    SparkSettings,
    batches_option,
    client_option,
    data_loss_option,
    group_option,
    json_option,
    layout_options,
    limit_options,
    pipeline_options,
    retry_option,
    row_options,
    spark_options,
    storage_option,
)
from stream_assets.cli.output import batch_row, follow_batches, inform, print_rows, print_waiting, progress_bar
from stream_consumers.backend import find_backend
from stream_consumers.batches import Extent, Range
from stream_consumers.client_config import ClientConfig
from stream_consumers.create import StreamSource
from stream_consumers.display import counted
from stream_consumers.errors import (
    BrokerError,
    FormatError,
    InvalidOptionError,
    SizeLimitError,
    StreamAssetsError,
    StreamRemovedError,
    TruncatedTailError,
)
from stream_consumers.messages import Shard, utc_text
from stream_consumers.options import AutoStreamReset, ConsumerMode, check_range, choice
from stream_consumers.stdio.spool import default_spool_path, spool_stdin, spool_url
from stream_consumers.urls import StreamUrl

if TYPE_CHECKING:
    from rich.progress import Progress

    from spark_jobs.batches.ingestion import BatchReport
    from spark_jobs.ledger.ledger import Ledger, LedgerState

MAX_FOREIGN_COMMITS = 20
VERDICT_COUNTS = (
    *("messages", "rows", "dead", "filtered", "unexplained", "skipped"),
    *("missing", "duplicated", "unknown", "other", "lag"),
)
HIDDEN_IF_ZERO = ("unexplained", "skipped", "unknown", "other", "lost")


@click.command()
@click.option("--mode", type=click.Choice(MODES), default="resumable", show_default=True, help="The mode of the group.")
@click.option(
    "--start",
    type=click.Choice(["earliest", "latest"]),
    help="Where a group without a position starts: earliest by default, latest in mode real_time.",
)
@data_loss_option
@click.option("--member", default="main", show_default=True, help="The name of this member of a Redis group.")
@click.option(
    "--spool",
    type=click.Path(path_type=Path),
    help="The file that a pipe is first written into; by default <table>.spool.ss.",
)
@pipeline_options()
@row_options
@layout_options
@limit_options
@batches_option
@click.option(
    "--linger",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Keep polling for this long. After SIGTERM or Ctrl-C, the command finishes the current batch within 20 "
    "seconds or drops it; a later run writes it.",
)
# The default is that of Ingestion, as for --retry-seconds.
@click.option(
    "--batch-seconds",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="With --linger, the least time between two batches; with more there are fewer versions and small files.",
)
@retry_option
@spark_options
@json_option
def ingest(
    pipeline: Pipeline,
    mode: str,
    start: str | None,
    spool: Path | None,
    conversion: RowConversion,
    max_batches: int | None,
    linger: float,
    spark: SparkSettings,
    as_json: bool,
    **settings: Any,
) -> None:
    """Write a stream into a Delta table up to its current end, exactly once. With --linger, also write new messages.

    A pipe (stdio:///orders) is first written into a stream file, up to its end; then that file is ingested.

    \b
    Examples:
      stream-assets ingest --source file://orders.ss/orders --table lake/orders \\
          --decode json --schema 'id BIGINT, user STRING, amount DECIMAL(10,2)'
      stream-assets ingest --source kafka://broker:9093/orders --table lake/orders --group lakehouse \\
          -X security.protocol=SASL_SSL -X sasl.mechanism=PLAIN -X sasl.username=me \\
          -X sasl.password=env:KAFKA_PASSWORD
      stream-assets ingest --source kafka://broker:9092/orders --table lake/orders --decode avro \\
          --schema-registry https://registry:8081 --subject orders-value \\
          --registry-option basic.auth.user.info=env:REGISTRY_USER_INFO
      stream-assets ingest --source redis://localhost:6379/orders --table lake/orders --linger 3600
      tail -n 1000 app.log | stream-assets ingest --source stdio:///log --table lake/log
    """
    from spark_jobs.batches.run_control import Retries, result_of
    from spark_jobs.decoding.isolation import prepare
    from spark_jobs.run_ingestion import run_events

    url, pipe = _file_of_pipe(pipeline.url, pipeline.table, spool)
    if pipe is not None and linger:
        raise InvalidOptionError(f"{pipe} is read to its end first, so --linger has no effect", remedy="Leave it out.")
    stream = StreamSource(url, choice(ConsumerMode, mode, option="--mode"), pipeline.client)
    first = "latest" if stream.mode is ConsumerMode.REAL_TIME else "earliest"
    ingestion = conversion.ingestion(
        pipeline,
        group=pipeline.group if stream.mode is not ConsumerMode.REAL_TIME else stream.group(None),
        sharing=stream.mode,
        claims=stream.is_claimed,
        start=choice(AutoStreamReset, start or first, option="--start"),
        single_writer=spark.single_writer,
        **settings,
    )
    tails: list[str] = []
    check_range("linger_seconds", linger)
    prepare()
    with progress_bar() as progress:
        # Errors of the table and the stream are raised before Spark starts.
        conversion.check(ingestion.ledger().read())
        failure = _spool(pipe, url, progress) if pipe is not None else None
        with stream.open() as opened:
            result_of(Retries(ingestion.retry_seconds).call(opened.identities), print_waiting)
        task = progress.add_task("starting Spark", total=None)
        session = spark.session(pipeline.table, pipeline.storage)
        progress.update(task, description="reading")
        events = run_events(session, stream, ingestion, max_batches=max_batches, linger_seconds=linger)
        rows: list[dict[str, object]] = []
        interruption: BaseException | None = None
        try:
            for report in follow_batches(events, progress, task, tails):
                rows.append(batch_row(report, number=len(rows) + 1, more={"lost": _lost(report)}))
        except (KeyboardInterrupt, SystemExit) as error:
            interruption = error
    empty = "nothing to read: lag 0" if interruption is None else "interrupted before a batch was written"
    print_rows(rows, as_json=as_json, title=f"{pipeline.source} into {pipeline.table}", empty=empty)
    if interruption is not None:
        raise interruption
    if failure is not None:
        raise failure
    if tails:
        raise TruncatedTailError(
            tails[0],
            remedy="All complete messages before it are in the table, and the next run continues after them.",
        )


def _file_of_pipe(url: StreamUrl, table: str, spool: Path | None) -> tuple[StreamUrl, StreamUrl | None]:
    """Return the URL to ingest, and the pipe that is spooled into it first, if any."""
    if find_backend(url.protocol).is_pipe:
        return spool_url(url, spool or default_spool_path(table)), url
    if spool is not None:
        raise InvalidOptionError(f"--spool is only for stdio, not for {url.shown}", remedy="Leave --spool out.")
    return url, None


def _spool(pipe: StreamUrl, file: StreamUrl, progress: Progress) -> StreamAssetsError | None:
    """Write a pipe into a file; return the error if a part of it cannot be written, to raise it after ingestion."""
    path = Path(file.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    task = progress.add_task("spooled", total=None)
    try:
        spooled = spool_stdin(pipe, path, on_message=lambda message: progress.advance(task))
    except (BrokerError, FormatError, SizeLimitError, StreamRemovedError) as error:
        inform(f"note: not all of stdin could be written to {path}; what is in it is ingested first", style="yellow")
        return error
    note = f"note: wrote {counted(spooled.messages, 'message')} of stdin to {path}"
    if spooled.others:
        note += f", and {counted(spooled.others, 'message')} of other streams, which are not ingested"
    inform(note, style="yellow")
    return None


def _lost(report: BatchReport) -> str | None:
    lost = [f"{shard} {part.start}-{part.end}" for shard, parts in report.entry.lost.items() for part in parts]
    return ", ".join(lost) or None


@click.command()
@click.argument("url")
@click.option("--table", help="The Delta table, whose log has the positions of the group.")
@group_option
@client_option()
@storage_option
@json_option
def lag(url: str, table: str | None, group: str, client: ClientConfig, storage: dict[str, str], as_json: bool) -> None:
    """Print the start and the end of each shard, the positions of the group, and its lag.

    "blocked" is the number of messages after the end that an open transaction holds back. "lost" is a range that is
    gone from the stream and that the group has not read, or whose rows a RESTORE removed after the stream was created
    again. If there is a lost range, or bytes after the last message cannot be read, the exit code is 1.

    A Redis group in mode load_balanced has no positions. For it, "delivered" is the place after the last entry that
    the server gave to a member, "unread" counts the entries from there on, and "pending" those that members got and
    did not acknowledge.

    \b
    Examples:
      stream-assets lag file://orders.ss/orders --group lakehouse --table lake/orders
      stream-assets lag kafka://localhost:9092/orders --group lakehouse
    """
    from spark_jobs.batches.source_checks import losses_of_stream
    from spark_jobs.ledger.entries import CLAIMS
    from spark_jobs.ledger.ledger import LedgerState as State

    pipeline = Pipeline(url, table or "", group, client, storage)
    read, tail = None if table is None else pipeline.ingestion().ledger(), None
    ledger = read.read() if read else State(-1)
    if ledger.sharing == CLAIMS or (table is None and _is_claimed(pipeline)):
        rows = _claimed_rows(pipeline, ledger)
    else:
        with pipeline.stream().open() as stream:
            opened = pipeline.ingestion().in_epochs(stream, read) if read else stream
            lost: Mapping[Shard, Range] = {}
            if ledger.newest is not None:
                lost = losses_of_stream(opened, pipeline.ingestion(), ledger)
                # A scan from the positions and one from the start of the stream may end at different bytes.
                tail = opened.unreadable_tail()
            extents, committed = opened.extents(), opened.committed(group)
            tail = tail or opened.unreadable_tail()
            known = ledger.positions if table is not None else committed or {}
            gaps = {shard: Range(known.get(shard, extent.start), extent.end) for shard, extent in extents.items()}
            behind = opened.count(gaps)
            # A shard of an ended epoch has no extent, but a RESTORE may have removed rows of it.
            extents = {**{shard: Extent(part.start, part.end) for shard, part in lost.items()}, **extents}
        if table is None and committed is None:
            raise InvalidOptionError(
                f"{url} has no broker that stores groups", remedy="Add --table, whose ledger has the positions."
            )
        if table is not None and ledger.newest is None:
            inform(f"note: the ledger of {table} has no entry of group {group!r} yet", style="yellow")
        rows = [
            {
                "shard": str(shard),
                "start": pipeline.shown(extent.start),
                "committed": pipeline.shown((committed or {}).get(shard)),
                "ledger": pipeline.shown(ledger.positions.get(shard)),
                "end": pipeline.shown(extent.end),
                "lag": behind.get(shard, 0),
                "blocked": extent.blocked,
                "lost": pipeline.span(lost.get(shard)),
            }
            for shard, extent in extents.items()
        ]
    print_rows(
        rows,
        as_json=as_json,
        title=f"{pipeline.url}, group {group}",
        empty="the stream is empty or does not exist: lag 0" if tail is None else "no message can be read",
        more={"unreadable_tail": tail},
    )
    has_lost = any(row["lost"] for row in rows)
    if has_lost:
        inform(f"the next run of group {group} stops; with --on-data-loss record it records the loss", style="red")
    if tail is not None:
        inform(tail, style="red")
    if has_lost or tail is not None:
        sys.exit(1)


def _is_claimed(pipeline: Pipeline) -> bool:
    if not pipeline.stream().may_be_claimed:
        return False
    with pipeline.stream().claims(pipeline.group) as claims:
        return claims.is_in_claim_mode()


def _claimed_rows(pipeline: Pipeline, ledger: LedgerState) -> list[dict[str, Any]]:
    """Return the rows of a group that claims entries. It has no positions, but unread and pending entries."""
    from spark_jobs.claims.claim_state import claim_state, losses_of_claims

    with pipeline.claims() as claims:
        if ledger.newest is not None:
            lost = claim_state(claims, pipeline.ingestion(), ledger.shards).lost
        else:
            lost = losses_of_claims(claims)
        return [
            {
                "shard": str(shard),
                "delivered": pipeline.shown(claims.position(shard)),
                "end": pipeline.shown(claims.ends.get(shard)),
                "unread": backlog.unread,
                "pending": backlog.pending,
                "lag": backlog.total,
                "lost": pipeline.span(lost.get(shard)),
            }
            for shard, backlog in claims.backlog().items()
        ]


@click.command()
@pipeline_options()
@row_options
@spark_options
@json_option
def verify(pipeline: Pipeline, conversion: RowConversion, spark: SparkSettings, as_json: bool) -> None:
    """Compare the stream with the table, message by message.

    The exit code is 1 if a message is missing, duplicated, unknown or other, a range is lost, or bytes after the last
    message cannot be read. Messages that are unexplained do not change it.

    With --keys, a keyed table is compared key by key, with the decoder and transform that make its rows. The exit code
    is 1 if a row is missing, stale (of an older change than the newest one), undeleted, unknown, doubled or other, a
    range is lost, bytes after the last message cannot be read, or a message that cannot be decoded here (undecoded) has
    neither a row nor a dead letter.

    \b
    Examples:
      stream-assets verify --source file://orders.ss/orders --table lake/orders --group lakehouse
      stream-assets verify --source kafka://localhost:9092/shop.public.customers --table lake/customers \\
          --decode debezium --schema 'id BIGINT, name STRING' --keys id
    """
    from spark_jobs.claims.claim_state import claim_state
    from spark_jobs.ledger.entries import CLAIMS
    from spark_jobs.verify import verify as compare

    if conversion.keys is not None:
        _verify_keyed(pipeline, conversion, spark, as_json=as_json)
        return
    ingestion = pipeline.ingestion()
    claimed, state = None, ingestion.ledger().read()
    if state.sharing == CLAIMS:
        with pipeline.claims() as claims:
            claimed = claim_state(claims, ingestion, state.shards)
    with pipeline.stream().open() as opened, progress_bar() as progress:
        task = progress.add_task("read", total=None)
        verdicts = compare(opened, ingestion, claims=claimed, progress=lambda count: progress.advance(task, count))
    rows = [
        {
            "shard": str(v.shard),
            "first": pipeline.shown(v.first),
            "last": pipeline.shown(v.last),
            **{"dead letters" if name == "dead" else name: getattr(v, name) for name in VERDICT_COUNTS},
            "lost": pipeline.span(v.lost),
        }
        for v in verdicts
    ]
    tail = verdicts[0].unreadable_tail if verdicts else None
    print_rows(
        rows,
        as_json=as_json,
        title=f"{pipeline.source} and {pipeline.table}",
        empty="the stream is empty",
        if_any=HIDDEN_IF_ZERO,
        more={"unreadable_tail": tail},
    )
    for verdict in verdicts:
        for what, sequences in verdict.examples.items():
            shown = [str(pipeline.shown(sequence)) for sequence in sequences]
            inform(f"{verdict.shard}: {what} {_listed(shown, count=getattr(verdict, what))}", style="red")
        if verdict.lost is not None:
            _inform_lost(pipeline, verdict.shard, verdict.lost)
        for bid, count in verdict.missing_dead.items():
            inform(f"{verdict.shard}: batch {bid} lacks {counted(count, 'dead letter')}", style="red")
        if verdict.unexplained:
            inform(
                f"note: {verdict.shard}: {counted(verdict.unexplained, 'message')} without rows may be filtered or "
                "missing; the commits or files that would show it are gone, or parts of their batch were replaced",
                style="yellow",
            )
        if verdict.uncompared is not None:
            inform(
                f"note: {verdict.shard}: {pipeline.span(verdict.uncompared)} is not compared: the group started after "
                "it, or its positions were recreated after its log was cleaned",
                style="yellow",
            )
    if tail is not None:
        inform(tail, style="red")
    for note in _notes(ingestion.ledger(), state):
        inform(f"note: {note}", style="yellow")
    if not all(verdict.is_right for verdict in verdicts):
        sys.exit(1)


def _verify_keyed(pipeline: Pipeline, conversion: RowConversion, spark: SparkSettings, *, as_json: bool) -> None:
    from spark_jobs.verify_keyed import COUNTS, UNCOMPARED, verify_keyed

    with pipeline.stream().open() as opened:
        session = spark.session(pipeline.table, pipeline.storage)
        verdict = verify_keyed(session, opened, conversion.ingestion(pipeline))
    row = {name: getattr(verdict, name) for name in COUNTS}
    lost = ", ".join(f"{shard} {pipeline.span(part)}" for shard, part in sorted(verdict.lost.items()))
    title = f"{pipeline.source} and {pipeline.table}"
    print_rows(
        [{**row, "lost": lost or None}],
        as_json=as_json,
        title=title,
        empty="",
        if_any=(*UNCOMPARED, "undecoded", "lost"),
        more={"unreadable_tail": verdict.unreadable_tail},
    )
    for what, places in verdict.examples.items():
        shown = [f"{shard}={pipeline.shown(sequence)}" for shard, sequence in places]
        inform(f"{what}: {_listed(shown, count=row[what])}", style="red")
    if verdict.undecoded or verdict.uncompared:
        inform(
            "note: some messages cannot be decoded here; use the decoder, schema and Spark memory of the runs",
            style="yellow",
        )
    for shard, part in sorted(verdict.lost.items()):
        _inform_lost(pipeline, shard, part)
    if verdict.unreadable_tail is not None:
        inform(verdict.unreadable_tail, style="red")
    if not verdict.is_right:
        sys.exit(1)


def _inform_lost(pipeline: Pipeline, shard: Shard, lost: Range) -> None:
    inform(f"{shard}: {pipeline.span(lost)} is gone from the stream, and is not in the table", style="red")


def _listed(examples: Sequence[str], *, count: int) -> str:
    """Return the examples in one line, which ends with dots if there are more than these."""
    return ", ".join(examples) + (" …" if count > len(examples) else "")


def _condition(predicate: str, columns: Iterable[str]) -> str:
    """Return which columns the condition of a commit names; the condition itself has values of rows.

    Example:
        >>> _condition("((_sequence#7L = 7) AND (EMAIL#3 = alice@example.org))", ["email", "_sequence", "id"])
        ' by a condition on _sequence, email'
        >>> _condition("(renamed_since#3 = alice@example.org)", ["email"])
        ' by a condition'
    """
    words = {word.casefold() for word in re.findall(r"\w+", predicate)}
    named = ", ".join(sorted(name for name in columns if words.issuperset(re.findall(r"\w+", name.casefold()))))
    return f" by a condition{f' on {named}' if named else ''}" if predicate else ""


def _notes(ledger: Ledger, state: LedgerState) -> Iterator[str]:
    """Yield notes on what cannot be compared, and on changes by other writers, which may explain differences."""
    from spark_jobs.ledger.table_rows import HAS_NO_PLACE, ROW_PLACE, column_names, count_where

    if ended := sorted(str(shard) for shard, known in state.shards.items() if known.ended is not None):
        yield f"{', '.join(ended)}: this epoch has ended, so its rows cannot be compared"
    names = column_names(ledger.log)
    for commit in islice(ledger.foreign(), MAX_FOREIGN_COMMITS):
        parts = [f"version {commit.version}, {commit.operation}"]
        if commit.timestamp_ms is not None:
            parts.append(f"at {utc_text(commit.timestamp_ms)}")
        parts += [f"by {commit.by}"] if commit.by else []
        yield f"another writer changed rows of the table: {' '.join(parts)}{_condition(commit.predicate, names)}"
    if count := count_where(ledger.log, HAS_NO_PLACE):
        yield (
            f"{count} rows have no {' or '.join(ROW_PLACE)}: they are not compared, and no replay replaces them. If "
            "another writer set these to null, RESTORE the table, or delete the rows before a replay writes them again"
        )
