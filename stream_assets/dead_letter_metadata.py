"""What Dagster is told of dead letters: their kinds as a table, and where to go on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence

import dagster as dg

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.dead_letters.reader import DeadLetters, LetterFilter, LetterKind
from stream_consumers.errors import StreamAssetsError
from stream_consumers.readable import shortened
from stream_consumers.wording import counted

DEAD_LETTER_COMMANDS = "stream/dead_letter_commands"
MOST_LOOKED_AT = 100_000
"""Of so many dead letters the kinds are told."""
MOST_TOLD = 20
MOST_PAYLOAD = 100
_MARKS = re.compile(r"([\\`*_{}\[\]#|<>~&!])")


def letter_reasons(
    ingestion: Ingestion, *, batches: Collection[str] | None = None, payloads: bool = False
) -> dg.MetadataValue | None:
    """The kinds of reasons as a table of Markdown; ``None`` if there are no dead letters.

    Why they cannot be read is told instead: nothing fails because of it, since the rows are in the table.

    Args:
        ingestion: group and table.
        batches: the ids of the batches that they are of; by default all that count.
        payloads: whether the beginning of the payload of each example is told. Dagster keeps for long what it was told,
            and others may see it than the table.
    """
    wanted, most_shown = LetterFilter(batches=batches), MOST_PAYLOAD if payloads else 0
    try:
        kinds = DeadLetters(ingestion.table, group=ingestion.group, storage_options=ingestion.storage_options).kinds(
            wanted, limit=MOST_LOOKED_AT, most_shown=most_shown
        )
    except StreamAssetsError as error:
        return dg.MetadataValue.text(f"the dead letters cannot be read: {error}")
    return dg.MetadataValue.md(reasons_markdown(kinds, payloads=payloads)) if kinds else None


def reasons_markdown(kinds: Sequence[LetterKind], *, payloads: bool = False) -> str:
    """A table with a line for each kind; of many, the most frequent ones.

    Example:
        >>> from stream_consumers.messages import Shard
        >>> kind = LetterKind("not a JSON object", 3, 0, 0, 0, None, None, [Shard("orders")], None)
        >>> print(reasons_markdown([kind]))
        | dead letters | reason | the first |
        |---:|---|---|
        | 3 | not a JSON object | – |
    """
    lines = [f"| dead letters | reason | the first |{' its payload |' if payloads else ''}"]
    lines.append(f"|---:|---|---|{'---|' if payloads else ''}")
    for kind in kinds[:MOST_TOLD]:
        example = kind.example
        cells = [str(kind.count), _cell(kind.reason), _cell(example.place) if example else "–"]
        cells += [_cell(example.payload) if example else "–"] if payloads else []
        lines.append(f"| {' | '.join(cells)} |")
    if len(kinds) > MOST_TOLD:
        others = sum(kind.count for kind in kinds[MOST_TOLD:])
        lines.append(f"| {others} | of {counted(len(kinds) - MOST_TOLD, 'more kind')} | {'| ' if payloads else ''}|")
    return "\n".join(lines)


def letter_commands(table: str, group: str, *, redrive_job: str | None) -> dg.MetadataValue:
    """How somebody looks at the dead letters of an asset, and decodes them again, as Markdown.

    Args:
        table: the path or URI of the table, for people.
        group: the consumer group, for people.
        redrive_job: the name of the job; ``None`` where there can be none.

    Example:
        >>> print(letter_commands("lake/orders", "lakehouse", redrive_job=None).value)
        `stream-assets dead-letters list --table lake/orders --group lakehouse` tells of messages that are no rows
    """
    place = shlex.join(["--table", table, "--group", group]).replace("`", "")
    text = f"`stream-assets dead-letters list {place}` tells of messages that are no rows"
    if redrive_job is not None:
        text += (
            f"; `stream-assets dead-letters redrive` decodes them again, and so does the job `{redrive_job}` where "
            "`stream_definitions` has `redrive_jobs=True`"
        )
    return dg.MetadataValue.md(text)


def _cell(text: str) -> str:
    return _MARKS.sub(r"\\\1", shortened(text, MOST_PAYLOAD + 20))
