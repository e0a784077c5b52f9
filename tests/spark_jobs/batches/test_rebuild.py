"""A rebuild makes a table anew from the first message, also with other keys, whatever dies or writes meanwhile."""

from __future__ import annotations

import stat
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
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import InvalidOptionError, KeyConflictError
from stream_consumers.options import AutoStreamReset
from tests.support.keyed_tables import BY_VALUE, FIRST_MS, KeyedTable, random_changes

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

    def count(self) -> int:
        return self.spark.read.format("delta").load(f"{self.folder}/t").count()

    def dead_letters(self) -> int:
        counted = self.ingestion.dead_letters().counted_places(self.ingestion.ledger())
        return sum(len(part) for part in counted)

    def assert_right(self, *, dead_letters: int = 0) -> None:
        """Assert that the table has what was sent, and nothing has to be read again."""
        assert self.rows() == self.expected()
        assert self.dead_letters() == dead_letters
        assert all(not shard.redo for shard in self.state().shards.values())
        assert not Path(staging_of(self.ingestion).table).exists()


class DiedError(BaseException):
    """Ends a run where it is, as a kill would."""


def once(at: Step, kind: str, do: Callable[[], object]) -> Observer:
    """Call ``do`` at the first such step of a batch of this kind."""
    done: list[object] = []

    def observer(step: Step, batch: Batch | None) -> None:
        if step is at and batch is not None and batch.kind == kind and not done:
            done.append(step)
            do()

    return observer


def die() -> None:
    raise DiedError


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
    assert (table.count(), table.state().keys) == (21, None)
    with pytest.raises(InvalidOptionError):
        table.drain()
    (table.folder / "t").chmod(0o2750)
    modes: dict[str, int] = {}

    def look(step: Step, batch: Batch | None) -> None:
        modes.update((path.name, stat.S_IMODE(path.stat().st_mode)) for path in table.folder.glob("t_rebuild*"))

    *staged, swap = table.rebuild(look)
    table.assert_right(dead_letters=1)
    assert modes == {"t_rebuild": 0o2750, "t_rebuild_dead_letters": 0o2750}
    assert [sum(report.messages.values()) for report in staged] == [29, 1]
    assert (swap.entry.kind, swap.rows, swap.dead, sum(swap.lag.values())) == ("rebuild", table.count(), 1, 0)
    assert (table.state().keys, [*table.state().positions.values()]) == (KeyOrder(("id",)), [32])
    table.send(NO_KEY, {"id": 9, "name": "new", "op": "u", "at": 31})
    (report,) = table.drain()
    assert (report.dead, table.rows()[9], table.dead_letters()) == (1, "new", 2)
    path = f"delta.`{table.folder}/t`"
    (detail,) = table.spark.sql(f"DESCRIBE DETAIL {path}").collect()
    assert (detail["clusteringColumns"], detail["properties"]["delta.enableDeletionVectors"]) == (["id"], "true")


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


@pytest.mark.slow
def test_a_merge_in_flight_over_a_restore_to_before_the_swap_stops_the_ledger(table: Changes) -> None:
    before = table.state().version
    table.rebuild()
    table.send({"id": 3, "name": "x", "op": "u", "at": 30})
    with pytest.raises(KeyConflictError) as failure:
        table.ingest(once(Step.WRITING, "batch", lambda: table.restore(before)))
    table.restore(int(str(failure.value.facts["version"])) - 1)
    table.is_keyed = False
    table.drain()
    assert (table.count(), table.dead_letters()) == (32, 0)


@pytest.mark.slow
def test_the_order_and_the_columns_may_change_and_keys_may_go(table: Changes) -> None:
    table.keys = BY_VALUE
    table.rebuild()
    table.assert_right(dead_letters=1)
    table.send(*random_changes(10, keys=4, seed=5, first=30))
    table.drain()
    table.assert_right(dead_letters=1)
    table.is_keyed = False
    table.rebuild()
    assert (table.count(), table.dead_letters()) == (41, 0)
    table.send(NO_KEY)
    table.drain()
    assert table.count() == 42
    assert "_deleted" not in table.spark.read.format("delta").load(f"{table.folder}/t").columns


@pytest.mark.slow
def test_a_rebuild_that_dies_at_each_step_is_continued(table: Changes) -> None:
    steps = [
        *((Step.READ, "batch"), (Step.ROWS_WRITTEN, "batch"), (Step.COMMITTED, "batch")),
        *((Step.PLANNED, "rebuild"), (Step.DEAD_LETTERS_WRITTEN, "rebuild"), (Step.WRITING, "rebuild")),
    ]
    for step, kind in steps:
        with pytest.raises(DiedError):
            table.rebuild(once(step, kind, die))
        assert table.state().keys is None
    with pytest.raises(DiedError):
        table.rebuild(once(Step.ROWS_WRITTEN, "rebuild", die))
    assert table.state().keys is not None
    version = table.state().version
    assert table.rebuild() == []
    table.assert_right(dead_letters=1)
    swaps = [c for c in table.ingestion.ledger().surviving() if c.entry and c.entry.kind == "rebuild"]
    assert [commit.version for commit in swaps] == [version]
    assert table.drain() == []


@pytest.mark.slow
def test_after_a_swap_whose_run_died_only_its_own_retry_does_nothing(table: Changes) -> None:
    with pytest.raises(DiedError):
        table.rebuild(once(Step.COMMITTED, "rebuild", die))
    table.keys = BY_VALUE
    assert [report.entry.kind for report in table.rebuild()][-1] == "rebuild"
    table.assert_right(dead_letters=1)
    with pytest.raises(DiedError):
        table.rebuild(once(Step.COMMITTED, "rebuild", die))
    table.send(*random_changes(5, keys=4, seed=6, first=30))
    table.drain()
    assert [report.entry.kind for report in table.rebuild()][-1] == "rebuild"
    table.assert_right(dead_letters=1)


@pytest.mark.slow
@pytest.mark.parametrize("start", [AutoStreamReset.EARLIEST, AutoStreamReset.LATEST], ids=["with rows", "without"])
def test_a_swap_removes_no_rows_of_a_group_that_begins_after_its_plan(table: Changes, start: AutoStreamReset) -> None:
    """One that has no rows yet is found when the swap has landed: a keyed table takes only one group."""
    url, before = f"file://{table.folder}/other.ss/other", table.state().version
    with create_producer(url) as producer:
        producer.send(b'{"id": 77, "name": "x", "op": "u", "at": 0}', timestamp_ms=FIRST_MS)
    other = replace(table.ingestion, group="other", keys=None, layout=TableLayout(), start=start)

    def begin() -> None:
        with open_batch_source(url) as source:
            list(drain_batches(IngestJob(table.spark, source, other)))

    has_rows = start is AutoStreamReset.EARLIEST
    with pytest.raises(InvalidOptionError if has_rows else KeyConflictError, match="other") as raised:
        table.rebuild(once(Step.WRITING, "rebuild", begin))
    if not has_rows:
        assert raised.value.facts == {"version": before}
        table.restore(before)
    assert (table.count(), table.state().keys) == (21 + has_rows, None)
