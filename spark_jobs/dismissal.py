"""A dismissal: dead letters that nobody will decode are marked as done with, by a person, with a note.

A batch of kind ``dismiss`` replaces exactly their places, as a redrive does, and writes them into the dead-letter table
once more, with who dismissed them and why. A dead letter without a sequence has no place; its copy names the batch of
the dead letter that it stands for. So the earlier dead letter counts no longer, the later one does, and a RESTORE takes
a dismissal back like any other commit. What is left to do is what is not dismissed yet: a dismissal that was killed is
run again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion, Observer, ignore_steps
from spark_jobs.batches.replay import REPLAY_MEMBER, check_replay
from spark_jobs.batches.retries import Retries
from spark_jobs.batches.writer import BatchWriter
from spark_jobs.dead_letters import MOST_BYTES, MOST_LETTERS, DeadLetters, LetterFilter
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.table_rows import PLACE, by_shard
from spark_jobs.writing.dead_letters import RECORDED
from stream_consumers.errors import InvalidOptionError, StreamAssetsError
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dismissal:
    """Who dismisses dead letters, and why.

    Args:
        by: a person, or a run.
        note: why.

    Raises:
        InvalidOptionError: one of them is empty.
    """

    by: str
    note: str

    def __post_init__(self) -> None:
        for name, value in (("by", self.by), ("note", self.note)):
            if not value.strip():
                raise InvalidOptionError(f"{name} of a dismissal is empty", remedy=f"Say it: --{name} TEXT.")


def dismiss(
    spark: SparkSession,
    ingestion: Ingestion,
    wanted: LetterFilter,
    dismissal: Dismissal,
    *,
    limit: int | None = None,
    observer: Observer = ignore_steps,
    on_wait: Callable[[str], object] = _log.warning,
) -> Iterator[int]:
    """Dismiss dead letters that count, some thousand in each commit.

    Args:
        spark: a session that can write Delta tables.
        ingestion: the group, the table, and how long to retry.
        wanted: which dead letters.
        dismissal: by whom, and why.
        limit: how many at most.
        observer: called at each step.
        on_wait: called with the reason of a wait.

    Yields:
        How many each commit has dismissed.

    Raises:
        StreamNotFoundError, UnsupportedError: the group has written nothing, or has no places of its own.
        WriteError: Spark failed, or other runs were always faster; what was yielded before is dismissed.
    """
    own = replace(ingestion, member=REPLAY_MEMBER, shard=None)
    # No stream is opened; the URL is for errors about one.
    writer = BatchWriter(spark, own, url=StreamUrl("file", (ingestion.table,), ()), observer=observer)
    retries = Retries(ingestion.retry_seconds, on_wait=on_wait)
    left = limit
    while left is None or left > 0:
        try:
            count = _dismiss_some(writer, own, wanted, dismissal, most=left)
        except StreamAssetsError as error:
            retries.wait(error)
            continue
        retries.reset()
        if count == 0:
            return
        if count is not None:
            left = None if left is None else left - count
            yield count


def _dismiss_some(
    writer: BatchWriter, ingestion: Ingestion, wanted: LetterFilter, dismissal: Dismissal, *, most: int | None
) -> int | None:
    """One commit: how many it has dismissed; ``None`` if another run was faster."""
    # The ledger before the dead letters: another run that has changed what they are in between took our number.
    state = writer.ledger.read()
    check_replay(state, ingestion)
    writer.delete_orphaned(state)
    letters = _open(ingestion, wanted, MOST_LETTERS if most is None else min(most, MOST_LETTERS))
    if not letters.num_rows:
        return 0
    entry = writer.entry(
        "dismiss",
        state,
        identities={},
        places=_places(letters),
        mode="replace",
        dead=letters.num_rows,
        hint=state.newest.hint if state.newest else None,
    )
    batches: Any = pc.if_else(letters.column("_sequence").is_valid(), None, letters.column("_batch"))
    marked = letters.select(list(RECORDED)).append_column("dismisses", batches)
    for name, value in (("dismissed_by", dismissal.by), ("note", dismissal.note)):
        marked = marked.append_column(name, pa.array([value] * marked.num_rows, pa.string()))
    return None if writer.dismiss(marked, entry) is None else letters.num_rows


def _open(ingestion: Ingestion, wanted: LetterFilter, most: int) -> pa.Table:
    """The first of those that are meant, one of each place, and all that have none."""
    letters = DeadLetters.of(ingestion)
    parts = [letters.schema().empty_table()]
    for part in letters.tables(replace(wanted, is_all=False, is_dismissed=False), limit=most):
        frame = part.select(list(PLACE)).to_pandas()
        is_meant = part.column("_sequence").is_null().to_numpy() | ~frame.duplicated().to_numpy()
        parts.append(part.filter(pa.array(is_meant)))
        if sum(part.nbytes for part in parts) > MOST_BYTES:
            break
    return pa.concat_tables(parts)


def _places(letters: pa.Table) -> Mapping[Shard, Intervals]:
    frame = letters.filter(letters.column("_sequence").is_valid()).select(list(PLACE)).to_pandas()
    return {
        shard: Intervals.of(*((sequence, sequence + 1) for sequence in own.tolist()))
        for shard, own in by_shard(frame, *PLACE)
    }
