"""The floor of a keyed table in its ledger; what follows from it is in ``tests/model/keyed.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spark_jobs.ledger.entries import PURGE, LedgerEntry
from spark_jobs.ledger.ledger import Ledger
from stream_consumers.batches import Range
from stream_consumers.errors import KeyConflictError
from stream_consumers.messages import Shard
from tests.support.written_log import WrittenLog

SHARD = Shard("orders")


class Table:
    """A keyed table whose log is written by hand."""

    def __init__(self, path: Path, *, is_full: bool) -> None:
        self.log = WrittenLog(path)
        self.is_full = is_full
        self.log.ours(LedgerEntry("init", "g", "g/main", 1, "main", "b0", -1, origin={SHARD: 0}))

    def ledger(self) -> Ledger:
        return Ledger(self.log.log(), group="g", member="main")

    def planned(self, start: int) -> LedgerEntry:
        """A batch of two messages."""
        ledger = self.ledger()
        entry = ledger.entry("batch", ledger.read(), ranges={SHARD: Range(start, start + 2)}, mode="upsert")
        return entry if self.is_full else replace(entry, state=None)

    def purge(self, below: int | str) -> int:
        ledger = self.ledger()
        return self.log.ours(ledger.entry(PURGE, ledger.read(), purged_below=below))

    def restore(self, version: int) -> None:
        self.log.restore(back_to=version, version=version)


@pytest.fixture(params=[True, False], ids=["full entries", "small entries"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    return Table(tmp_path / "t", is_full=request.param)


def test_each_entry_has_the_floor_that_it_was_planned_with(table: Table) -> None:
    first = table.planned(0)
    table.log.ours(first)
    table.purge(7)
    second = table.planned(2)
    table.log.ours(second)
    assert (first.floor, second.floor, table.ledger().read().floor) == (None, 7, 7)
    table.purge(5)
    assert table.ledger().read().floor == 7, "it only rises"
    table.purge(9)
    assert table.ledger().read().floor == 9


def test_a_restore_takes_it_back_and_brings_it_back(table: Table) -> None:
    table.log.ours(table.planned(0))
    purged = table.purge("2026-11")
    table.log.ours(table.planned(2))
    table.restore(purged - 1)
    assert table.ledger().read().floor is None
    table.log.ours(table.planned(2))
    table.restore(purged)
    assert table.ledger().read().floor == "2026-11"


def test_a_batch_that_lands_above_its_floor_stops_the_group_until_it_is_taken_back(table: Table) -> None:
    """It needs a RESTORE that takes back another one, across a purge, with the batch in flight between them."""
    before = table.log.ours(table.planned(0))
    purged = table.purge(7)
    table.restore(before)
    in_flight = table.planned(2)
    table.restore(purged)
    landed = table.log.ours(in_flight)
    with pytest.raises(KeyConflictError) as raised:
        table.ledger().read()
    assert raised.value.facts["version"] == landed
    table.restore(landed - 1)
    state = table.ledger().read()
    assert (state.floor, state.positions) == (7, {SHARD: 2})


def test_a_batch_with_a_higher_floor_than_the_table_does_no_harm(table: Table) -> None:
    before = table.log.ours(table.planned(0))
    table.purge(7)
    in_flight = table.planned(2)
    table.restore(before)
    table.log.ours(in_flight)
    assert table.ledger().read().floor is None
