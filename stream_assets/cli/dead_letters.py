"""The commands for dead letters: ``dead-letters list``, ``show``, ``export``, ``redrive`` and ``dismiss``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from stream_assets.cli.dismiss import dismiss
from stream_assets.cli.letter_export import export
from stream_assets.cli.letter_options import filter_options, letter_options
from stream_assets.cli.options import json_option
from stream_assets.cli.output import out, tell
from stream_assets.cli.redrive import redrive
from stream_consumers.errors import InvalidOptionError, InvalidUrlError
from stream_consumers.messages import Shard
from stream_consumers.readable import as_text, printable, shortened, shown_bytes
from stream_consumers.redis.ids import parse_sequence
from stream_consumers.wording import counted

if TYPE_CHECKING:
    from spark_jobs.dead_letters import DeadLetters, LetterFilter, LetterKind
    from spark_jobs.ledger.intervals import Intervals

MOST_SHARDS = 5


@click.group("dead-letters")
def dead_letters() -> None:
    """Look at the messages that could not become rows, take them along, and decode them again.

    Only those count whose batch is in the table, and which were not redriven, replayed or dismissed since.

    \b
    Examples:
      stream-assets dead-letters list --table lake/orders --group lakehouse
      stream-assets dead-letters show --table lake/orders --group lakehouse orders/0=17
      stream-assets dead-letters export --table lake/orders --group lakehouse letters.ndjson
      stream-assets dead-letters redrive --source kafka://localhost:9092/orders --table lake/orders --group lakehouse \\
          --transform my_definitions:orders --dry-run
    """


@dead_letters.command("list")
@letter_options
@filter_options
@click.option("--limit", type=click.IntRange(min=1), help="Show so many kinds at most, the most frequent ones.")
@json_option
def list_kinds(letters: DeadLetters, wanted: LetterFilter, limit: int | None, as_json: bool) -> None:
    """How many there are of each kind of reason, with an example each.

    Reasons are of one kind if they differ only in numbers, times, ids and what stands in quotes. The times are those of
    the messages; where these are not known, when the dead letters were recorded.

    \b
    Examples:
      stream-assets dead-letters list --table lake/orders --group lakehouse
      stream-assets dead-letters list --table lake/orders --group lakehouse --from 2026-11-17T00:00:00Z --json
      stream-assets dead-letters list --table lake/orders --group lakehouse --reason "not a JSON object" --all
    """
    kinds = letters.kinds(wanted)
    shown = kinds[:limit]
    if as_json:
        click.echo(
            json.dumps({"rows": [_kind_row(kind, is_all=wanted.is_all or wanted.is_dismissed) for kind in shown]})
        )
        return
    if not kinds:
        out.print("there are no dead letters")
        return
    count = counted(sum(kind.count for kind in kinds), "dead letter")
    if wanted.is_dismissed:
        count = f"{sum(kind.dismissed for kind in kinds)} dismissed dead letters"
    others = sum(kind.replaced + kind.orphaned + kind.dismissed for kind in kinds)
    beside = f", and {others} that do not count" if wanted.is_all else ""
    title = f"{letters.table}, group {letters.group}: {count}{beside}, {counted(len(kinds), 'kind')} of reasons"
    _print(title, style="italic")
    for kind in shown:
        _print_kind(kind)
    if len(shown) < len(kinds):
        _print(f"… and {counted(len(kinds) - len(shown), 'more kind')}")


def _kind_row(kind: LetterKind, *, is_all: bool) -> dict[str, Any]:
    example = kind.example
    return {
        "reason": kind.reason,
        "dead letters": kind.count,
        **({"replaced": kind.replaced, "orphaned": kind.orphaned, "dismissed": kind.dismissed} if is_all else {}),
        "first": _time(kind.first),
        "last": _time(kind.last),
        "shards": [str(shard) for shard in kind.shards],
        "example": example and {"place": example.place, "reason": example.reason, "payload": example.payload},
    }


def _print_kind(kind: LetterKind) -> None:
    numbers = [f"{kind.count}"]
    others = ((kind.replaced, "replaced"), (kind.orphaned, "orphaned"), (kind.dismissed, "dismissed"))
    numbers += [f"{count} {why}" for count, why in others if count]
    _print(f"\n{', '.join(numbers)}: {printable(kind.reason)}", style="bold")
    shards = [str(shard) for shard in kind.shards[:MOST_SHARDS]]
    more = len(kind.shards) - len(shards)
    where = f"{printable(', '.join(shards))}{f' and {more} more' if more else ''}"
    when = _time(kind.first) if kind.first == kind.last else f"{_time(kind.first)} to {_time(kind.last)}"
    _print(f"  {when or '–'}, {where}")
    if kind.example is not None:
        _print(_cut(f"  {printable(kind.example.place)}: {printable(kind.example.reason)}"))
        _print(_cut(f"  {kind.example.payload}"))


@dead_letters.command()
@letter_options
@filter_options
@click.argument("places", nargs=-1, metavar="[SHARD=SEQUENCE]…")
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True, help="So many at most.")
@click.option("--full", is_flag=True, help="Payloads as they are, whole and with their lines.")
@json_option
def show(
    letters: DeadLetters, wanted: LetterFilter, places: Sequence[str], limit: int, full: bool, as_json: bool
) -> None:
    """Single ones, in the order of their places in the stream: all that is known of them.

    A place is SHARD=SEQUENCE, as list tells it, or SHARD:SEQUENCE. Payloads are text where they are, else hexadecimal
    digits; with --json they are whole, and base64 under payload_base64 where they are no text.

    \b
    Examples:
      stream-assets dead-letters show --table lake/orders --group lakehouse orders/0=17 orders/1:4
      stream-assets dead-letters show --table lake/orders --group lakehouse --reason "is missing" --limit 3 --full
    """
    if places:
        wanted = replace(wanted, places=_places(places))
    rows = _rows(letters, wanted, limit=limit + 1)
    if as_json:
        _print_json(islice(rows, limit))
        return
    count = 0
    for row in rows:
        count += 1
        if count > limit:
            _print(f"… and more: --limit {2 * limit} shows so many of them")
            return
        _print_letter(row, is_full=full)
    if not count:
        tell("there is no such dead letter" if places else "there are no dead letters")
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
            raise InvalidOptionError(f"{text!r} is no place of a message", remedy=_PLACE_REMEDY) from error
        if sequence is None:
            raise InvalidOptionError(f"{text!r} has no sequence", remedy=_PLACE_REMEDY)
        found[shard] = found.get(shard, Intervals()) | Intervals.of((sequence, sequence + 1))
    return found


_PLACE_REMEDY = "Write it as SHARD=SEQUENCE with a shard like orders/0: orders/0=17."


def _rows(letters: DeadLetters, wanted: LetterFilter, *, limit: int) -> Iterator[dict[str, Any]]:
    """One after the other."""
    for table in letters.tables(wanted, limit=limit):
        for row in range(table.num_rows):
            yield table.slice(row, 1).to_pylist()[0]


def _print_json(rows: Iterator[dict[str, Any]]) -> None:
    """As one JSON list of them, of which no more than one is held."""
    from stream_assets.cli.letter_export import letter_json

    separator = '{"rows": ['
    for row in rows:
        click.echo(separator + json.dumps(letter_json(row)), nl=False)
        separator = ", "
    click.echo(("" if separator == ", " else separator) + "]}")


def _print_letter(row: Mapping[str, Any], *, is_full: bool) -> None:
    shard, sequence = Shard(row["_stream"], row["_shard"]), row["_sequence"]
    place = printable(str(shard) if sequence is None else f"{shard}={sequence}")
    status = row.get("status", "counts")
    _print(f"{place}  {_time(row['_timestamp']) or '–'}{'' if status == 'counts' else f'  {status}'}", style="bold")
    told = {
        "reason": printable(row["error"] or "–"),
        "key": shown_bytes(row["key"]),
        "headers": ", ".join(f"{printable(h['name'])}={shown_bytes(h['value'])}" for h in row["headers"] or ()) or "–",
        "batch": f"{printable(row['_batch'] or '–')}, recorded {_time(row['_recorded_at']) or '–'}",
    }
    for status_of, by in (("dismissed", row["dismissed_by"]), ("corrected", row["corrected_by"])):
        if by is not None:
            told[status_of] = f"by {printable(by)}: {printable(row['note'] or '–')}"
    for name, text in told.items():
        line = f"  {name:8} {text}"
        _print(line if is_full or name == "reason" else _cut(line))
    if not is_full:
        _print(_cut(f"  payload  {shown_bytes(row['payload'], most=max(out.width, 200))}"))
        return
    _print("  payload")
    text = as_text(row["payload"])
    for line in text.split("\n") if text else [shown_bytes(row["payload"])]:
        _print(f"    {printable(line)}")


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cut(line: str) -> str:
    """No longer than a line of the terminal, if it is one."""
    return shortened(line, out.width) if out.is_terminal else line


def _print(line: str, *, style: str = "") -> None:
    out.print(Text(line, style=style), soft_wrap=True)


dead_letters.add_command(export)
dead_letters.add_command(redrive)
dead_letters.add_command(dismiss)
