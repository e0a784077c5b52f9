"""How the commands for dead letters are told which of them are meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from stream_assets.cli.options import gathered, group_option, storage_option
from stream_consumers.urls import StreamUrl

if TYPE_CHECKING:
    from spark_jobs.dead_letters import DeadLetters, LetterFilter


def make_letters(table: str, group: str, storage: Mapping[str, str]) -> DeadLetters:
    """The dead letters of a table and a group.

    Raises:
        InvalidOptionError: there cannot be such a table, or such a group.
    """
    from spark_jobs.dead_letters import DeadLetters

    return DeadLetters(table, group=group, storage_options=storage)


def make_filter(
    source: str | None, start: str | None, stop: str | None, reason: str, is_all: bool, is_dismissed: bool
) -> LetterFilter:
    """Which of them are meant.

    Raises:
        InvalidUrlError: the source is no URL of streams.
        InvalidOptionError: a bound is no place, or they leave nothing.
    """
    from spark_jobs.batches.bounds import Bound
    from spark_jobs.batches.redrive import letter_span
    from spark_jobs.dead_letters import LetterFilter

    streams = () if source is None else StreamUrl.parse(source).required_streams()
    span = letter_span(Bound.parse(start) if start else None, Bound.parse(stop) if stop else None)
    return LetterFilter(streams, span, reason, is_all=is_all, is_dismissed=is_dismissed)


letter_options = gathered(
    "letters",
    make_letters,
    click.option("--table", required=True, help="The Delta table of the rows, a path or URI."),
    group_option,
    storage_option,
)
filter_options = gathered(
    "wanted",
    make_filter,
    click.option("--source", help="The stream URL; by default every stream of the group. It is not opened."),
    click.option("--from", "start", help="A sequence, SHARD=SEQUENCE,…, or a time of messages; by default all."),
    click.option("--until", "stop", help="Likewise; the first that is not meant."),
    click.option("--reason", default="", metavar="TEXT", help="Those with this text in their reason."),
    click.option(
        "--all",
        "is_all",
        is_flag=True,
        help="Also those that do not count: orphaned, redriven, replayed, dismissed ones.",
    ),
    click.option("--dismissed", "is_dismissed", is_flag=True, help="Only those that were dismissed."),
)
