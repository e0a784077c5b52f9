"""The command ``dead-letters dismiss``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stream_assets.cli.letter_options import filter_options, letter_options
from stream_assets.cli.options import SparkChoice, json_option, retry_option, spark_options
from stream_assets.cli.output import print_rows, progress_bar, tell_waiting
from stream_assets.cli.redrive import person

if TYPE_CHECKING:
    from spark_jobs.dead_letters import DeadLetters, LetterFilter


@click.command()
@letter_options
@filter_options
@click.option("--note", required=True, help="Why; it is kept with each of them.")
@click.option("--by", help="Who dismisses them; by default this user and machine.")
@click.option("--limit", type=click.IntRange(min=1), help="Dismiss at most this many.")
@retry_option
@spark_options
@json_option
def dismiss(
    letters: DeadLetters,
    wanted: LetterFilter,
    note: str,
    by: str | None,
    limit: int | None,
    retry_seconds: float,
    spark: SparkChoice,
    as_json: bool,
) -> None:
    """Mark dead letters as done with, since nothing will ever decode them; checks count them no longer.

    They stay in the dead-letter table, with who dismissed them, when and why, and `verify` accounts for their messages.

    \b
    Examples:
      stream-assets dead-letters dismiss --table lake/orders --group lakehouse --reason "not a JSON object" \\
          --note "test messages of 2026-11-17"
      stream-assets dead-letters list --table lake/orders --group lakehouse --dismissed
    """
    from spark_jobs.batches.ingestion import Ingestion
    from spark_jobs.dismissal import Dismissal
    from spark_jobs.dismissal import dismiss as dismiss_letters

    dismissal = Dismissal(by or person(), note)
    ingestion = Ingestion(
        letters.group,
        letters.table,
        storage_options=letters.storage_options,
        retry_seconds=retry_seconds,
        single_writer=spark.single_writer,
    )
    with progress_bar() as progress:
        progress.add_task("dismissing", total=None)
        session = spark.session(letters.table, letters.storage_options)
        count = sum(dismiss_letters(session, ingestion, wanted, dismissal, limit=limit, on_wait=tell_waiting))
    rows = [{"dismissed": count, "by": dismissal.by, "note": dismissal.note}] if count else []
    print_rows(rows, as_json=as_json, title=f"dead letters of {letters.table}", empty="there is nothing to dismiss")
