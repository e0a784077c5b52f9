"""A rebuild makes a table anew from the first message, also with other keys, whatever dies or writes meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Batch, BatchReport, Ingestion, Observer, Step, ignore_steps
from spark_jobs.batches.job import drain_batches, reports_of
from spark_jobs.batches.rebuild import rebuild_events, staging_of
from spark_jobs.ledger.entries import KeyOrder
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.writing.layout import TableLayout
from stream_consumers.create import open_batch_source
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Shard
from tests.support.keyed_tables import KeyedTable, random_changes

NO_KEY = {"name": "no key", "op": "u", "at": 0}


@dataclass
class Changes(KeyedTable):
    """A table that is appended to at first."""

    is_keyed: bool = False

    @property
    def ingestion(self) -> Ingestion:
        found = super().ingestion
        return found if self.is_keyed else replace(found, keys=None, layout=TableLayout())

    def ingest(self, observer: Observer) -> list[BatchReport]:
        with open_batch_source(self.url) as source:
            return list(drain_batches(IngestJob(self.spark, source, self.ingestion, observer=observer)))

    def rebuild(self, observer: Observer = ignore_steps) -> list[BatchReport]:
        with open_batch_source(self.url) as source:
            return list(reports_of(rebuild_events(self.spark, source, self.ingestion, observer=observer)))

    def state(self) -> LedgerState:
        return self.ingestion.ledger().read()

    def dead_letters(self) -> int:
        counted = self.ingestion.dead_letters().counted_places(self.ingestion.ledger())
        return sum(len(part) for part in counted)

    def assert_right(self, *, dead_letters: int = 0) -> None:
        """Assert that the table has what was sent, and nothing has to be read again."""
        assert self.rows() == self.expected()
        assert self.dead_letters() == dead_letters
        assert all(not shard.redo for shard in self.state().shards.values())
        assert not Path(staging_of(self.ingestion).table).exists()


def once(at: Step, kind: str, do: Callable[[], object]) -> Observer:
    """Call ``do`` at the first such step of a batch of this kind."""
    done: list[object] = []

    def observer(step: Step, batch: Batch | None) -> None:
        if step is at and batch is not None and batch.kind == kind and not done:
            done.append(step)
            do()

    return observer


@pytest.fixture
def table(spark: SparkSession, folder: Path) -> Changes:
    """One that was appended to, with 20 changes and a message without a key, and 10 changes that were not read."""
    made = Changes(spark, folder, records=30)
    made.send(NO_KEY, *random_changes(20, keys=4, seed=2))
    made.drain()
    made.sent.remove(NO_KEY)
    made.send(*random_changes(10, keys=4, seed=3, first=20))
    made.is_keyed = True
    return made


def test_an_appended_table_becomes_keyed(table: Changes) -> None:
    assert table.state().keys is None
    with pytest.raises(InvalidOptionError):
        table.drain()
    *_, swap = table.rebuild()
    table.assert_right(dead_letters=1)
    assert (swap.entry.kind, table.state().keys) == ("rebuild", KeyOrder(("id",)))
    assert table.state().positions == {Shard("changes"): 32}, "31 messages, from 1 on"


@pytest.mark.slow
def test_ingestion_that_is_in_flight_loses_to_the_swap(table: Changes) -> None:
    table.rebuild()
    table.send(*random_changes(5, keys=4, seed=4, first=30))
    table.ingest(once(Step.WRITING, "batch", table.rebuild))
    table.assert_right(dead_letters=1)


@pytest.mark.slow
def test_a_swap_that_is_in_flight_loses_to_ingestion(table: Changes) -> None:
    table.rebuild()

    def ingest() -> None:
        table.send(*random_changes(5, keys=4, seed=4, first=30))
        table.drain()

    table.rebuild(once(Step.WRITING, "rebuild", ingest))
    table.drain()
    table.assert_right(dead_letters=1)
