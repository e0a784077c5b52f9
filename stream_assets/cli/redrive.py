"""The command ``dead-letters redrive``."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stream_assets.cli.options import Place, SparkChoice, json_option, place_options, retry_option, spark_options
from stream_assets.cli.output import follow_batches, print_rows, progress_bar
from stream_assets.cli.row_options import RowMaker, limit_options, row_options
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Shard, bytes_from_json

if TYPE_CHECKING:
    from spark_jobs.batches.dead_letter_jobs import Outcome


@click.command()
@place_options()
@click.option("--from", "start", help="A sequence, SHARD=SEQUENCE,…, or a time of messages; by default all.")
@click.option("--until", "stop", help="Likewise; the first that is left alone.")
@click.option("--limit", type=click.IntRange(min=1), help="Try so many dead letters at most.")
@click.option(
    "--payloads",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Only the dead letters of this NDJSON file, with its payloads.",
)
@click.option("--note", default="", help="With --payloads: why; it is kept with each correction.")
@click.option("--dry-run", is_flag=True, help="Say how many would decode, and why the others do not; change nothing.")
@row_options
@limit_options
@retry_option
@spark_options
@json_option
def redrive(
    place: Place,
    start: str | None,
    stop: str | None,
    limit: int | None,
    payloads: Path | None,
    note: str,
    dry_run: bool,
    maker: RowMaker,
    spark: SparkChoice,
    as_json: bool,
    **settings: Any,
) -> None:
    """Decode dead letters again; those that can be decoded now become rows, and no position moves.

    They are read from the dead-letter table, so that the stream may have dropped them. The others stay dead letters. A
    redrive that was killed is simply done again.

    With --payloads their payloads are those of a file, which has a JSON object a line: _stream, _shard, _sequence, and
    payload or payload_base64. The dead-letter table records the correction, beside the original.

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
    from spark_jobs.batches.dead_letter_jobs import Corrections, Redrive, RedriveJob
    from spark_jobs.batches.job import batch_events

    ingestion = maker.ingestion(place, single_writer=spark.single_writer, **settings)
    corrections = None
    if payloads is not None:
        corrections = Corrections(read_payloads(payloads), person(), note)
    wanted = Redrive(Bound.parse(start) if start else None, Bound.parse(stop) if stop else None, limit, corrections)
    wanted.span()
    maker.check(ingestion.ledger().read())
    with progress_bar() as progress:
        task = progress.add_task("starting Spark", total=None)
        job = RedriveJob(spark.session(place.table, place.storage), ingestion, wanted, url=place.url)
        if dry_run:
            progress.update(task, description="decoding")
            job.preview()
        else:
            for _ in follow_batches(batch_events(job), progress, task):
                pass
    title = f"dead letters of {place.table}{', if they were redriven' if dry_run else ''}"
    print_rows(_rows(job.outcome), as_json=as_json, title=title, empty="there are no dead letters to redrive")


def read_payloads(file: Path) -> dict[tuple[Shard, int], bytes]:
    """The payloads of an NDJSON file by their places.

    Raises:
        InvalidOptionError: the file cannot be read; or with the number of a line that has no place or no payload, or
            the place of an earlier one.
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
                raise TypeError("_stream is a text, _shard and _sequence are numbers")
            payload = bytes_from_json("payload", row)
            if payload is None:
                raise TypeError("it has no payload")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidOptionError(
                f"line {number} of {file} is no corrected dead letter ({error!r:.200})",
                remedy="Write a JSON object with _stream, _shard, _sequence, and payload or payload_base64.",
            ) from error
        if (Shard(stream, shard), sequence) in found:
            raise InvalidOptionError(
                f"line {number} of {file} has the place of an earlier line", remedy="Leave one of them out."
            )
        found[Shard(stream, shard), sequence] = payload
    return found


def person() -> str:
    """This user and machine."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _rows(outcome: Outcome) -> list[dict[str, Any]]:
    """What became of them, then why the others stay what they are, the most frequent reason first."""
    refused = sorted(outcome.refused.items(), key=lambda item: (-item[1].count, item[0]))
    rows = [
        {"result": "stays a dead letter", "dead letters": one.count, "reason": reason, "example": one.first or None}
        for reason, one in refused
    ]
    decoded = {"result": "becomes a row", "dead letters": outcome.decoded, "reason": None, "example": None}
    return [decoded, *rows] if outcome.decoded else rows
