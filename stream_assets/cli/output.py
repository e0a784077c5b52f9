"""Output of the commands: progress, tables of rows, and the result of each batch."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stream_consumers.display import printable, printable_lines
from stream_consumers.messages import DeadLetter, utc_text

if TYPE_CHECKING:
    from spark_jobs.batches.ingestion import BatchReport, Event

out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)


class PrintableFormatter(logging.Formatter):
    """Formats log lines without terminal control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record with its traceback."""
        return printable_lines(super().format(record))


def progress_bar(console: Console = err) -> Progress:
    """Create a progress bar; on stderr by default, because stdout may be a pipe."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def inform(text: str, *, style: str | None = None) -> None:
    """Print text on stderr, without terminal control characters."""
    err.print(printable_lines(text), style=style, markup=False, soft_wrap=True)


def print_waiting(why: str) -> None:
    """Print why a command waits."""
    inform(f"waiting: {why}", style="yellow")


def print_dead_letter(dead: DeadLetter) -> None:
    """Print a dead letter on stderr."""
    when = "" if dead.timestamp_ms is None else f" of {utc_text(dead.timestamp_ms)}"
    inform(
        f"dead letter{when} in {dead.shard} at offset {dead.offset}: {dead.error} ({len(dead.payload)} bytes)",
        style="yellow",
    )


def print_rows(
    rows: list[dict[str, Any]],
    *,
    title: str,
    as_json: bool = False,
    empty: str = "nothing",
    if_any: Collection[str] = (),
    more: Mapping[str, Any] | None = None,
    console: Console = out,
) -> None:
    """Print rows as a table, or as JSON.

    Args:
        rows: the values by column; all rows have the same columns.
        title: the title above the table.
        as_json: print JSON, with all columns.
        empty: the text that is printed if there are no rows.
        if_any: columns that the table omits if they are 0 or missing in all rows.
        more: further values of the JSON, beside the rows.
        console: the console of the table.
    """
    if as_json:
        click.echo(json.dumps({"rows": rows, **(more or {})}))
        return
    if not rows:
        console.print(empty)
        return
    console.print(title, style="italic", markup=False, soft_wrap=True)
    table, shown = Table(), [name for name in rows[0] if name not in if_any or any(row[name] for row in rows)]
    for name in shown:
        justify: Literal["left", "right"] = "right" if isinstance(rows[0][name], int | float) else "left"
        table.add_column(name, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_cell(row[name])) for name in shown))
    # The table may be wider than the terminal, so that numbers are never truncated.
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    Console(file=console.file, width=max(needed, console.width), highlight=False, emoji=False).print(table)


def _cell(value: Any) -> str:
    # Reasons of dead letters may quote control characters from messages.
    return "–" if value is None else printable(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def follow_batches(
    events: Iterable[Event], progress: Progress, task: TaskID, tails: list[str] | None = None
) -> Iterator[BatchReport]:
    """Yield the batches as they are written and show progress; print waits, and collect truncated ends in ``tails``."""
    from spark_jobs.batches.ingestion import BatchReport, UnreadableTail, Waiting

    done, number = 0, 0
    for report in events:
        if isinstance(report, Waiting):
            print_waiting(report.why)
        elif isinstance(report, UnreadableTail) and tails is not None:
            tails.append(report.what)
        if not isinstance(report, BatchReport):
            continue
        number += 1
        done += sum(report.messages.values()) + report.dead
        total = done + sum(report.lag.values())
        progress.update(task, description=f"batch {number}", completed=done, total=total)
        yield report
    progress.update(task, description="done", completed=done, total=done)


def batch_row(report: BatchReport, *, number: int, more: dict[str, object], lag: str = "lag") -> dict[str, object]:
    """Return a batch as a row for :func:`print_rows`.

    Args:
        report: the batch.
        number: the number of the batch, which starts at 1 in each run of the command.
        more: additional columns of a command.
        lag: the name of the column of messages that are left.
    """
    return {
        "batch": number,
        "version": report.version,
        "rows": report.rows,
        "dead letters": report.dead,
        **more,
        lag: sum(report.lag.values()),
        "seconds": round(report.seconds, 2),
    }
