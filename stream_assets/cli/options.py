"""What the commands share: options, progress, tables, and how errors are told."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from stream_consumers.client_config import parse_client_option
from stream_consumers.errors import StreamAssetsError
from stream_consumers.options import ConsumerMode

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


def named_client_option(*names: str, of: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """An option that configures the client of a broker."""
    return click.option(
        *names,
        multiple=True,
        metavar="NAME=VALUE",
        callback=lambda context, option, values: dict(parse_client_option(value) for value in values),
        help=f"Configure the {of} client; NAME=env:VARIABLE keeps a secret in the environment.",
    )


client_option = named_client_option("-X", "--client", "client", of="broker's")


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


def table_path(table: str) -> str:
    """A local path made absolute; a URI as it is."""
    return table if "://" in table else str(Path(table).absolute())


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
    console.print(title, style="italic", markup=False, soft_wrap=True)
    table = Table()
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right", no_wrap=True)
    for row in rows:
        table.add_row(*("–" if value is None else str(value) for value in row.values()))
    # Numbers are never cut, however narrow the terminal or the file is.
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    Console(file=console.file, width=max(needed, console.width), highlight=False).print(table)
