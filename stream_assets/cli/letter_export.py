"""The command ``dead-letters export``: dead letters into a file, or as messages into another stream."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from stream_assets.cli.letter_options import filter_options, letter_options
from stream_assets.cli.options import client_option
from stream_assets.cli.output import progress_bar, tell
from stream_assets.cli.relay import is_one_place, keeps, send_message
from stream_consumers.client_config import ClientConfig
from stream_consumers.create import create_producer
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Message, Shard, now_milliseconds, to_milliseconds
from stream_consumers.readable import as_text
from stream_consumers.subscription.processor import REASON, STREAM
from stream_consumers.urls import StreamUrl
from stream_consumers.wording import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_jobs.dead_letters import DeadLetters, LetterFilter

    Write = Callable[[Iterable[pa.Table], pa.Schema, BinaryIO], None]

SHARD, SEQUENCE = "dead-letter-shard", "dead-letter-sequence"
_BYTES = ("key", "payload", "correction")


@contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its place when all of it is written."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidOptionError(f"{path} cannot be written: it is a folder, or in none", remedy="Make the folder.")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


@click.command()
@letter_options
@filter_options
@click.argument("target", required=False, metavar="[FILE]")
@click.option("--limit", type=click.IntRange(min=1), help="So many at most, in the order of their places.")
@click.option("--to", "url", metavar="URL", help="Send their messages to this stream instead of writing a file.")
@click.option(
    "--shards",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="With --to: of the stream; one that is not there is made with so many (Kafka, Redis).",
)
@client_option()
def export(
    letters: DeadLetters,
    wanted: LetterFilter,
    target: str | None,
    limit: int | None,
    url: str | None,
    shards: int,
    client: ClientConfig,
) -> None:
    """Write them into FILE: .ndjson, .csv or .parquet, as it ends; - is NDJSON on stdout. Nothing else changes.

    FILE is there as a whole, or not at all. In NDJSON and CSV a payload or a key that is no text is base64, under
    payload_base64 or key_base64; in Parquet they are bytes.

    With --to they become messages again, each with its key, its headers and its time, and headers that say where it is
    from and why it is a dead letter. Those that were no whole message are left out. Done twice, it sends them twice.

    \b
    Examples:
      stream-assets dead-letters export --table lake/orders --group lakehouse letters.parquet
      stream-assets dead-letters export --table lake/orders --group lakehouse - | jq -r .payload
      stream-assets dead-letters export --table lake/orders --group lakehouse --reason "is missing" \\
          --to kafka://localhost:9092/orders-repair
    """
    if (target is None) == (url is None):
        raise InvalidOptionError(
            f"there {'is no' if url is None else 'are a'} FILE and {'no' if url is None else 'a'} --to",
            remedy="Give one of the two.",
        )
    if url is not None:
        _send(letters.tables(wanted, limit=limit), _elsewhere(url), shards, client)
        return
    assert target is not None
    write = _writer(target)
    schema = letters.schema(wanted)
    with progress_bar() as progress:
        task = progress.add_task("exported", total=None)

        def counted() -> Iterator[pa.Table]:
            for table in letters.tables(wanted, limit=limit):
                yield table
                progress.advance(task, table.num_rows)

        if target == "-":
            write(counted(), schema, sys.stdout.buffer)
            return
        with _whole_file(Path(target)) as file:
            write(counted(), schema, file)


def letter_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """A dead letter as JSON, with the names of the columns of its table; bytes that are no text are base64.

    Example:
        >>> letter_json({"_sequence": 7, "key": None, "payload": b"\\xff", "headers": [{"name": "a", "value": b"b"}]})
        {'_sequence': 7, 'key': None, 'payload_base64': '/w==', 'headers': [{'name': 'a', 'value': 'b'}]}
    """
    found: dict[str, Any] = {}
    for name, value in row.items():
        if name in _BYTES:
            found |= _bytes_json(name, value)
        elif name == "headers" and value is not None:
            found[name] = [{"name": pair["name"], **_bytes_json("value", pair["value"])} for pair in value]
        else:
            found[name] = value.isoformat() if isinstance(value, datetime) else value
    return found


def _bytes_json(name: str, value: bytes | None) -> dict[str, str | None]:
    text = as_text(value)
    if value is None or text is not None:
        return {name: text}
    return {f"{name}_base64": base64.b64encode(value).decode()}


def _writer(target: str) -> Write:
    """What writes a file of this name.

    Raises:
        InvalidOptionError: it ends like none of them.
    """
    endings: dict[str, Write] = {
        ".ndjson": _write_ndjson,
        ".jsonl": _write_ndjson,
        ".csv": _write_csv,
        ".parquet": _write_parquet,
    }
    write: Write | None = _write_ndjson if target == "-" else endings.get(Path(target).suffix.lower())
    if write is None:
        raise InvalidOptionError(
            f"{target} does not end like a format", remedy=f"Use {', '.join(endings)}; or - for NDJSON on stdout."
        )
    return write


def _write_ndjson(tables: Iterable[pa.Table], schema: pa.Schema, file: BinaryIO) -> None:
    for table in tables:
        for row in range(table.num_rows):
            # In ASCII: a terminal obeys nothing of it.
            line = json.dumps(letter_json(table.slice(row, 1).to_pylist()[0]))
            file.write(f"{line}\n".encode())
    file.flush()


def _write_csv(tables: Iterable[pa.Table], schema: pa.Schema, file: BinaryIO) -> None:
    """A null is nothing, and an empty text is ``""``."""
    from pyarrow import csv

    with csv.CSVWriter(file, _csv_table(schema.empty_table()).schema) as writer:
        for table in tables:
            writer.write(_csv_table(table))


def _csv_table(letters: pa.Table) -> pa.Table:
    import pyarrow as pa

    columns: dict[str, Any] = {}
    for name in letters.column_names:
        values = letters.column(name)
        if name in _BYTES:
            told = [_bytes_json(name, value) for value in values.to_pylist()]
            for own in (name, f"{name}_base64"):
                columns[own] = pa.array([one.get(own) for one in told], pa.string())
        elif name == "headers":
            told_headers = [letter_json({name: value})[name] for value in values.to_pylist()]
            columns[name] = pa.array([None if one is None else json.dumps(one) for one in told_headers], pa.string())
        else:
            columns[name] = values
    return pa.table(columns)


def _write_parquet(tables: Iterable[pa.Table], schema: pa.Schema, file: BinaryIO) -> None:
    from pyarrow import parquet

    with parquet.ParquetWriter(file, schema) as writer:
        for table in tables:
            writer.write_table(table)


def _elsewhere(url: str) -> StreamUrl:
    """The stream that the messages are sent to, if that is one, and none that they are from.

    Raises:
        InvalidOptionError: it is not.
    """
    target = StreamUrl.parse(url)
    streams = target.required_streams()
    if len(streams) != 1:
        raise InvalidOptionError(f"--to {target.shown} names {len(streams)} streams", remedy="Name one.")
    source = click.get_current_context().params.get("source")
    own = StreamUrl.parse(source) if source else None
    if own is not None and is_one_place(own, target) and streams[0] in own.required_streams():
        raise InvalidOptionError(
            f"--to {target.shown} is where they are from: each would come again as a new message",
            remedy="Name another stream; or decode them again with: stream-assets dead-letters redrive.",
        )
    return target


def _send(tables: Iterable[pa.Table], target: StreamUrl, shards: int, client: ClientConfig) -> None:
    """Send the messages, those of a shard in their order; tell what was not sent as it was."""
    sent = left_out = stripped = 0
    with create_producer(target, client=client, shards=shards) as producer, progress_bar() as progress:
        task = progress.add_task("sent", total=None)
        for table in tables:
            for row in range(table.num_rows):
                letter = table.slice(row, 1).to_pylist()[0]
                if not letter["is_message"] or letter["_sequence"] is None:
                    left_out += 1
                    continue
                message = _message(letter)
                send_message(producer, message, shard=letter["_shard"] % shards)
                sent, stripped = sent + 1, stripped + (not keeps(producer, message))
            producer.flush()
            progress.update(task, completed=sent)
    tell(f"sent {counted(sent, 'message')} to {target.shown}")
    if left_out:
        tell(f"{left_out} were no whole messages, and were left out", style="yellow")
    if stripped:
        tell(f"{stripped} have a key, headers or no payload, which {target.shown} cannot keep", style="yellow")


def _message(letter: Mapping[str, Any]) -> Message:
    shard, sequence = Shard(letter["_stream"], letter["_shard"]), letter["_sequence"]
    told = {STREAM: shard.stream, SHARD: str(shard.id), SEQUENCE: str(sequence), REASON: letter["error"] or ""}
    headers = [(pair["name"], pair["value"]) for pair in letter["headers"] or () if pair["name"] not in told]
    headers += [(name, text.encode()) for name, text in told.items()]
    time = letter["_timestamp"]
    return Message(
        shard,
        sequence,
        now_milliseconds() if time is None else to_milliseconds(time),
        letter["payload"],
        letter["key"],
        tuple(headers),
    )
