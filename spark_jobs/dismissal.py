"""A dismissal: dead letters that will never be decoded are marked as done with, by a person, with a note.

A batch of kind ``dismiss`` replaces exactly their places, as a redrive does, and writes them into the dead-letter table
once more, with who dismissed them and why. A dead letter without a sequence has no place; its copy names the batch of
the dead letter that it stands for. So the earlier dead letter counts no longer, the later one does, and a RESTORE takes
a dismissal back like any other commit. What is left to do is what is not dismissed yet: a dismissal that was killed is
run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import NOTHING_TO_READ, Batch, Ingestion, Observer, ignore_steps
from spark_jobs.batches.job import BatchJob
from spark_jobs.batches.redrive import intervals_of
from spark_jobs.batches.replay import REPLAY_MEMBER, check_replay
from spark_jobs.batches.writer import Written, no_rows, write_recorded
from spark_jobs.dead_letters import DeadLetters
from spark_jobs.ledger.table_rows import PLACE, count_where, in_places
from spark_jobs.writing.dead_letters import RECORDED
from spark_jobs.writing.letters import MOST_BYTES, MOST_LETTERS, LetterFilter
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl


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


class DismissJob(BatchJob):
    """Dismisses dead letters that count, some thousand in each commit; :func:`batch_events` runs it.

    Args:
        spark: a session that can write Delta tables.
        ingestion: the group, the table, and how long to retry.
        wanted: which dead letters.
        dismissal: by whom, and why.
        limit: how many at most.
        observer: called at each step.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
    """

    def __init__(
        self,
        spark: SparkSession,
        ingestion: Ingestion,
        wanted: LetterFilter,
        dismissal: Dismissal,
        *,
        limit: int | None = None,
        observer: Observer = ignore_steps,
    ) -> None:
        own = replace(ingestion, member=REPLAY_MEMBER, shard=None)
        # No stream is opened; the URL is for errors about one.
        super().__init__(spark, own, url=StreamUrl("file", (ingestion.table,), ()), observer=observer)
        self._wanted = wanted
        self._dismissal = dismissal
        self._left = limit

    def plan(self) -> Batch | None:
        """The next dead letters to dismiss; ``None`` if there are no more.

        Raises:
            StreamNotFoundError, UnsupportedError: the group has written nothing, or has no places of its own.
        """
        # The ledger before the dead letters: another run that has changed what they are in between took our number.
        state = self.ledger.read()
        check_replay(state, self.ingestion)
        state = self.settled(state)
        most = MOST_LETTERS if self._left is None else min(self._left, MOST_LETTERS)
        letters = _open(self.ingestion, self._wanted, most) if most > 0 else None
        if letters is None or not letters.num_rows:
            return None
        batches: Any = pc.if_else(letters.column("_sequence").is_valid(), None, letters.column("_batch"))
        marked = letters.select(list(RECORDED)).append_column("dismisses", batches)
        for name, value in (("dismissed_by", self._dismissal.by), ("note", self._dismissal.note)):
            marked = marked.append_column(name, pa.array([value] * marked.num_rows, pa.string()))
        return self._planned(
            "dismiss",
            state,
            NOTHING_TO_READ,
            identities={},
            letters=marked,
            places=intervals_of(letters.filter(letters.column("_sequence").is_valid())),
            mode="replace",
            dead=letters.num_rows,
        )

    def write(self, batch: Batch) -> Written | None:
        """The dead letters, then a commit without rows."""
        target, entry = self.target, self.target.entry(batch)
        # Another run may have made rows of them since; Delta refuses what comes from here on.
        is_free = count_where(self.ledger.log, in_places(entry.affected)) == 0
        rows = no_rows(target.spark, self.ledger)
        written = write_recorded(target, batch, entry, rows, {}) if is_free else None
        if written is None:
            self.lose_race()
        return written

    def finish(self, written: Written) -> Mapping[Shard, int]:
        """The broker is not concerned."""
        if self._left is not None:
            self._left -= written.entry.dead
        return {}


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
