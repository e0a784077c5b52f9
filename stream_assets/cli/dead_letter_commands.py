"""The commands for dead letters: ``dead-letters list``, ``show``, ``redrive`` and ``dismiss``."""

from __future__ import annotations

import getpass
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from stream_assets.cli.options import (
    Pipeline,
    RowConversion,
    SparkSettings,
    combine_options,
    group_option,
    json_option,
    limit_options,
    pipeline_options,
    retry_option,
    row_options,
    spark_options,
    storage_option,
)
from stream_assets.cli.output import follow_batches, inform, out, print_rows, progress_bar
from stream_consumers.display import as_text, counted, printable, shortened, shown_bytes
from stream_consumers.errors import InvalidOptionError, InvalidUrlError
from stream_consumers.messages import Shard, bytes_from_json, bytes_to_json
from stream_consumers.redis.entries import parse_sequence
from stream_consumers.urls import StreamUrl

if TYPE_CHECKING:
    from spark_jobs.batches.dead_letter_jobs import Outcome
    from spark_jobs.dead_letters.reader import DeadLetterFilter, DeadLetterKind, DeadLetters
    from spark_jobs.ledger.intervals import Intervals

_BYTES = ("key", "payload", "correction")


def make_reader(table: str, group: str, storage: Mapping[str, str]) -> DeadLetters:
    """Open the dead letters of a table and a group.

    Raises:
        InvalidOptionError: the table or the group is not valid.
    """
    from spark_jobs.dead_letters.reader import DeadLetters

    return DeadLetters(table, group=group, storage_options=storage)


def make_filter(
    source: str | None, start: str | None, stop: str | None, reason: str, is_all: bool, is_dismissed: bool
) -> DeadLetterFilter:
    """Build the filter that the options describe.

    Raises:
        InvalidUrlError: the source is not a URL of streams.
        InvalidOptionError: a bound is not a position, or the bounds select nothing.
    """
    from spark_jobs.batches.bounds import Bound
    from spark_jobs.batches.dead_letter_jobs import dead_letter_span
    from spark_jobs.dead_letters.reader import DeadLetterFilter

    streams = () if source is None else StreamUrl.parse(source).required_streams()
    span = dead_letter_span(Bound.parse(start) if start else None, Bound.parse(stop) if stop else None)
    return DeadLetterFilter(streams, span, reason, includes_uncounted=is_all, is_dismissed=is_dismissed)


reader_options = combine_options(
    "reader",
    make_reader,
    click.option("--table", required=True, help="The Delta table of the rows, a path or URI."),
    group_option,
    storage_option,
)
filter_options = combine_options(
    "wanted",
    make_filter,
    click.option(
        "--source", help="Only streams of this URL, which is not opened; by default all streams of the group."
    ),
    click.option("--from", "start", help="Only from here on: a sequence, SHARD=SEQUENCE,…, or a time of messages."),
    click.option("--until", "stop", help="Only before this: a sequence, SHARD=SEQUENCE,…, or a time of messages."),
    click.option("--reason", default="", metavar="TEXT", help="Only dead letters with this text in their reason."),
    click.option(
        "--all",
        "is_all",
        is_flag=True,
        help="Include dead letters that do not count, like those that were redriven, replayed or dismissed.",
    ),
    click.option("--dismissed", "is_dismissed", is_flag=True, help="Only dismissed dead letters."),
)


@click.group("dead-letters")
def dead_letters() -> None:
    """List, redrive or dismiss dead letters: messages that could not become rows.

    Commands and checks count a dead letter only if its batch is in the table, and if it was not redriven, replayed or
    dismissed.

    \b
    Examples:
      stream-assets dead-letters list --table lake/orders --group lakehouse
      stream-assets dead-letters show --table lake/orders --group lakehouse orders/0=17
      stream-assets dead-letters redrive --source kafka://localhost:9092/orders --table lake/orders --group lakehouse \\
          --transform my_definitions:orders --dry-run
    """


@dead_letters.command("list")
@reader_options
@filter_options
@click.option("--limit", type=click.IntRange(min=1), help="Show at most this many kinds, the most frequent ones.")
@json_option
def list_kinds(reader: DeadLetters, wanted: DeadLetterFilter, limit: int | None, as_json: bool) -> None:
    """Count dead letters by kind of reason. Each kind is shown with an example.

    Two reasons are of the same kind if they differ only in numbers, times, ids and quoted text. "first" and "last" are
    timestamps of messages. If a message has none, the time when its dead letter was recorded is used.

    \b
    Examples:
      stream-assets dead-letters list --table lake/orders --group lakehouse
      stream-assets dead-letters list --table lake/orders --group lakehouse --from 2026-11-17T00:00:00Z --json
      stream-assets dead-letters list --table lake/orders --group lakehouse --reason "not a JSON object" --all
    """
    kinds = reader.kinds(wanted)
    rows = [_kind_row(kind, is_all=wanted.includes_uncounted or wanted.is_dismissed) for kind in kinds[:limit]]
    count = counted(sum(kind.count for kind in kinds), "dead letter")
    title = f"{reader.table}, group {reader.group}: {count} of {counted(len(kinds), 'kind')}"
    print_rows(rows, as_json=as_json, title=title, empty="there are no dead letters")


def _kind_row(kind: DeadLetterKind, *, is_all: bool) -> dict[str, Any]:
    example = kind.example
    return {
        "dead letters": kind.count,
        **({"replaced": kind.replaced, "orphaned": kind.orphaned, "dismissed": kind.dismissed} if is_all else {}),
        "reason": kind.reason,
        "first": _time(kind.first),
        "last": _time(kind.last),
        "shards": [str(shard) for shard in kind.shards],
        "example": example and example.place,
    }


@dead_letters.command()
@reader_options
@filter_options
@click.argument("places", nargs=-1, metavar="[SHARD=SEQUENCE]…")
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True, help="Show at most this many.")
@click.option("--full", is_flag=True, help="Show the whole payload, with its line breaks.")
@json_option
def show(
    reader: DeadLetters, wanted: DeadLetterFilter, places: Sequence[str], limit: int, full: bool, as_json: bool
) -> None:
    """Show single dead letters in detail. They are ordered by their places in the stream.

    Write a place as SHARD=SEQUENCE, as list prints it, or SHARD:SEQUENCE. A payload that is not text is shown as
    hexadecimal digits. With --json, payloads are complete; one that is not text is base64, in payload_base64.

    \b
    Examples:
      stream-assets dead-letters show --table lake/orders --group lakehouse orders/0=17 orders/1:4
      stream-assets dead-letters show --table lake/orders --group lakehouse --reason "is missing" --limit 3 --full
    """
    if places:
        wanted = replace(wanted, places=_places(places))
    found = (row for part in reader.tables(wanted, limit=limit + 1) for row in part.to_pylist())
    rows = list(islice(found, limit))
    if as_json:
        click.echo(json.dumps({"rows": [row_to_json(row) for row in rows]}))
        return
    for row in rows:
        _print_dead_letter(row, is_full=full)
    if next(found, None) is not None:
        inform(f"… and more: --limit {2 * limit} shows more of them")
    if not rows:
        inform("there is no such dead letter" if places else "there are no dead letters")
        sys.exit(1 if places else 0)


def _places(texts: Sequence[str]) -> Mapping[Shard, Intervals]:
    from spark_jobs.ledger.intervals import Intervals

    found: dict[Shard, Intervals] = {}
    for text in texts:
        at = max(text.rfind("="), text.rfind(":"))
        name, sequence = text[: max(at, 0)], parse_sequence(text[at + 1 :])
        try:
            shard = Shard.parse(name)
        except InvalidUrlError as error:
            raise InvalidOptionError(f"{text!r} is not the place of a message", remedy=_PLACE_REMEDY) from error
        if sequence is None:
            raise InvalidOptionError(f"{text!r} has no sequence", remedy=_PLACE_REMEDY)
        found[shard] = found.get(shard, Intervals()) | Intervals.of((sequence, sequence + 1))
    return found


_PLACE_REMEDY = "Write it as SHARD=SEQUENCE with a shard like orders/0: orders/0=17."


def row_to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dead letter as JSON, with the names of the columns of its table; bytes that are not text are base64.

    Example:
        >>> row_to_json({"_sequence": 7, "key": None, "payload": b"\\xff", "headers": [{"name": "a", "value": b"b"}]})
        {'_sequence': 7, 'key': None, 'payload_base64': '/w==', 'headers': [{'name': 'a', 'value': 'b'}]}
    """
    found: dict[str, Any] = {}
    for name, value in row.items():
        if name in _BYTES:
            found |= bytes_to_json(name, value)
        elif name == "headers" and value is not None:
            found[name] = [{"name": pair["name"], **bytes_to_json("value", pair["value"])} for pair in value]
        else:
            found[name] = value.isoformat() if isinstance(value, datetime) else value
    return found


def _print_dead_letter(row: Mapping[str, Any], *, is_full: bool) -> None:
    shard, sequence = Shard(row["_stream"], row["_shard"]), row["_sequence"]
    place = printable(str(shard) if sequence is None else f"{shard}={sequence}")
    status = row.get("status", "counts")
    _print(f"{place}  {_time(row['_timestamp']) or '–'}{'' if status == 'counts' else f'  {status}'}", style="bold")
    known = {
        "reason": printable(row["error"] or "–"),
        "key": shown_bytes(row["key"]),
        "headers": ", ".join(f"{printable(h['name'])}={shown_bytes(h['value'])}" for h in row["headers"] or ()) or "–",
        "batch": f"{printable(row['_batch'] or '–')}, recorded {_time(row['_recorded_at']) or '–'}",
    }
    for status_of, by in (("dismissed", row["dismissed_by"]), ("corrected", row["corrected_by"])):
        if by is not None:
            known[status_of] = f"by {printable(by)}: {printable(row['note'] or '–')}"
    text = as_text(row["payload"])
    if is_full:
        known["payload"] = "\n    ".join(
            ["", *map(printable, text.split("\n") if text else [shown_bytes(row["payload"])])]
        )
    else:
        known["payload"] = shown_bytes(row["payload"], most=max(out.width, 200))
    for name, value in known.items():
        line = f"  {name:8} {value}"
        _print(line if is_full or name == "reason" or not out.is_terminal else shortened(line, out.width))


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _print(line: str, *, style: str = "") -> None:
    out.print(Text(line, style=style), soft_wrap=True)


@dead_letters.command()
@reader_options
@filter_options
@click.option("--note", required=True, help="Why they are dismissed; stored with each dead letter.")
@click.option("--by", help="Who dismisses them; by default your user name and machine.")
@click.option("--limit", type=click.IntRange(min=1), help="Dismiss at most this many.")
@retry_option
@spark_options
@json_option
def dismiss(
    reader: DeadLetters,
    wanted: DeadLetterFilter,
    note: str,
    by: str | None,
    limit: int | None,
    retry_seconds: float,
    spark: SparkSettings,
    as_json: bool,
) -> None:
    """Mark dead letters as final, so that checks no longer count them.

    They stay in the dead-letter table, with your name, the time and the note. `verify` does not count their messages
    as missing.

    \b
    Examples:
      stream-assets dead-letters dismiss --table lake/orders --group lakehouse --reason "not a JSON object" \\
          --note "test messages of 2026-11-17"
      stream-assets dead-letters list --table lake/orders --group lakehouse --dismissed
    """
    from spark_jobs.batches.dead_letter_jobs import Dismissal, DismissJob
    from spark_jobs.batches.ingestion import Ingestion
    from spark_jobs.batches.job import batch_events

    dismissal = Dismissal(by or current_user(), note)
    ingestion = Ingestion(
        reader.group,
        reader.table,
        storage_options=reader.storage_options,
        retry_seconds=retry_seconds,
        single_writer=spark.single_writer,
    )
    with progress_bar() as progress:
        task = progress.add_task("dismissing", total=None)
        session = spark.session(reader.table, reader.storage_options)
        job = DismissJob(session, ingestion, wanted, dismissal, limit=limit)
        count = sum(report.dead for report in follow_batches(batch_events(job), progress, task))
    rows = [{"dismissed": count, "by": dismissal.by, "note": dismissal.note}] if count else []
    print_rows(rows, as_json=as_json, title=f"dead letters of {reader.table}", empty="there is nothing to dismiss")


@dead_letters.command()
@pipeline_options()
@click.option("--from", "start", help="Only from here on: a sequence, SHARD=SEQUENCE,…, or a time of messages.")
@click.option("--until", "stop", help="Only before this: a sequence, SHARD=SEQUENCE,…, or a time of messages.")
@click.option("--limit", type=click.IntRange(min=1), help="Decode at most this many.")
@click.option(
    "--payloads",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Redrive only the dead letters in this NDJSON file, with the payloads in it.",
)
@click.option("--note", default="", help="Why the payloads were corrected; stored with each correction of --payloads.")
@click.option(
    "--dry-run", is_flag=True, help="Print how many can be decoded, and why the others cannot. Change nothing."
)
@row_options
@limit_options
@retry_option
@spark_options
@json_option
def redrive(
    pipeline: Pipeline,
    start: str | None,
    stop: str | None,
    limit: int | None,
    payloads: Path | None,
    note: str,
    dry_run: bool,
    conversion: RowConversion,
    spark: SparkSettings,
    as_json: bool,
    **settings: Any,
) -> None:
    """Decode dead letters again. Those that can be decoded now become rows; the others stay dead letters.

    No position moves. Messages are read from the dead-letter table. Only in a table with keys, without --sequence-by
    and history, the stream must also hold all later messages. If a redrive was killed, run it again.

    --payloads names a file with corrected payloads. Each line of it is a JSON object with _stream, _shard, _sequence,
    and payload or payload_base64. The dead-letter table keeps both the original and the correction.

    \b
    Examples:
      stream-assets dead-letters redrive --source kafka://localhost:9092/orders --table lake/orders --group lakehouse \\
          --transform my_definitions:orders --dry-run
      stream-assets dead-letters redrive --source kafka://localhost:9092/orders --table lake/orders --group lakehouse \\
          --from 2026-11-17T00:00:00Z --until 2026-11-18T00:00:00Z --decode json --schema 'id BIGINT, user STRING'
      stream-assets dead-letters redrive --source kafka://localhost:9092/orders --table lake/orders --group lakehouse \\
          --transform my_definitions:orders --payloads corrected.ndjson --note "TICKET-17"
    """
    from spark_jobs.batches.bounds import Bound
    from spark_jobs.batches.dead_letter_jobs import Redrive, RedriveJob
    from spark_jobs.batches.job import batch_events
    from spark_jobs.dead_letters.corrections import Corrections

    ingestion = conversion.ingestion(pipeline, single_writer=spark.single_writer, **settings)
    corrections = None
    if payloads is not None:
        corrections = Corrections(read_payloads(payloads), current_user(), note)
    wanted = Redrive(Bound.parse(start) if start else None, Bound.parse(stop) if stop else None, limit, corrections)
    wanted.span()
    conversion.check(ingestion.ledger().read())
    with progress_bar() as progress:
        task = progress.add_task("starting Spark", total=None)
        session = spark.session(pipeline.table, pipeline.storage)
        job = RedriveJob(session, ingestion, wanted, url=pipeline.url, client=pipeline.client)
        if dry_run:
            progress.update(task, description="decoding")
            job.preview()
        else:
            for _ in follow_batches(batch_events(job), progress, task):
                pass
    title = f"dead letters of {pipeline.table}{', if they were redriven' if dry_run else ''}"
    print_rows(_rows(job.outcome), as_json=as_json, title=title, empty="there are no dead letters to redrive")


def read_payloads(file: Path) -> dict[tuple[Shard, int], bytes]:
    """Read the payloads of an NDJSON file, by place.

    Raises:
        InvalidOptionError: the file cannot be read, or a line has no place, no payload, or the place of an earlier
            line; the error has the number of the line.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise InvalidOptionError(f"{file} cannot be read ({error.strerror})", remedy="Correct --payloads.") from error
    found: dict[tuple[Shard, int], bytes] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            stream, shard, sequence = (row[name] for name in ("_stream", "_shard", "_sequence"))
            if not (isinstance(stream, str) and type(shard) is int and type(sequence) is int):
                raise TypeError("_stream must be text, _shard and _sequence numbers")
            payload = bytes_from_json("payload", row)
            if payload is None:
                raise TypeError("it has no payload")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidOptionError(
                f"line {number} of {file} is not a corrected dead letter ({type(error).__name__}: {error!s:.200})",
                remedy="Write a JSON object with _stream, _shard, _sequence, and payload or payload_base64.",
            ) from error
        if (Shard(stream, shard), sequence) in found:
            raise InvalidOptionError(
                f"line {number} of {file} has the place of an earlier line", remedy="Leave one of them out."
            )
        found[Shard(stream, shard), sequence] = payload
    return found


def current_user() -> str:
    """Return the names of this user and machine."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the number of decoded dead letters, then the reasons of the others, the most frequent first."""
    refused = sorted(outcome.refused.items(), key=lambda item: (-item[1].count, item[0]))
    rows = [
        {"result": "stays a dead letter", "dead letters": one.count, "reason": reason, "example": one.first or None}
        for reason, one in refused
    ]
    decoded = {"result": "becomes a row", "dead letters": outcome.decoded, "reason": None, "example": None}
    return [decoded, *rows] if outcome.decoded else rows
