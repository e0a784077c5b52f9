"""A rebuild in the ledger: its state replaces the one before, and a RESTORE brings that back, with the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_jobs.batches.replay import replay_progress
from spark_jobs.ledger.entries import KeyOrder, LedgerEntry, ReplayProgress
from spark_jobs.ledger.ledger import Ledger
from stream_consumers.batches import LastMessage, Range
from stream_consumers.errors import KeyConflictError
from stream_consumers.messages import Shard
from tests.support.letter_tables import write_letters
from tests.support.written_log import WrittenLog

SHARD = Shard("orders")
KEY = KeyOrder(("id",))


class Table:
    """A table that was appended to up to 10, and swapped for the rows of a staging table that has read up to 8."""

    def __init__(self, folder: Path) -> None:
        self.log = WrittenLog(folder / "t")
        self.write("init", origin={SHARD: 3}, switch="resumable")
        self.appended = self.write("batch", ranges={SHARD: Range(3, 10)})
        self.in_flight = self.ledger().entry("replay", self.ledger("replay").read(), ranges={SHARD: Range(4, 6)})
        self.swap()

    def ledger(self, member: str = "main") -> Ledger:
        return Ledger(self.log.log(), group="g", member=member)

    def write(self, kind: str, *, member: str = "main", **fields: object) -> int:
        ledger = self.ledger(member)
        return self.log.ours(ledger.entry(kind, ledger.read(), **fields))  # type: ignore[arg-type]

    def swap(self, keys: KeyOrder = KEY) -> int:
        return self.log.ours(self.planned_swap(keys))

    def planned_swap(self, keys: KeyOrder) -> LedgerEntry:
        ranges = {SHARD: Range(2, 8)}
        last = {SHARD: LastMessage(7, 0, 0)}
        return self.ledger().entry(
            "rebuild",
            self.ledger().read(),
            mode="rebuild",
            ranges=ranges,
            goal=ranges,
            last_messages=last,
            keys=keys,
            replay="staging",
            begins=True,
        )


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def test_the_state_of_the_staging_table_takes_the_place_of_the_one_before(table: Table) -> None:
    state = table.ledger().read()
    assert (state.positions, state.keys, state.shards[SHARD].origin) == ({SHARD: 8}, KEY, 2)
    assert state.last_messages == {SHARD: LastMessage(7, 0, 0)}
    assert replay_progress(table.ledger(), "staging", kind="rebuild") == ReplayProgress()
    table.write("batch", ranges={SHARD: Range(8, 12)}, mode="merge")
    assert (table.ledger().read().positions, table.ledger().read().keys) == ({SHARD: 12}, KEY)


def test_a_restore_to_before_brings_the_state_and_the_key_back(table: Table) -> None:
    table.log.restore(back_to=table.appended, version=table.appended)
    state = table.ledger().read()
    assert (state.positions, state.keys, state.last_number) == ({SHARD: 10}, None, 3)
    assert replay_progress(table.ledger(), "staging", kind="rebuild") is None
    table.write("batch", ranges={SHARD: Range(10, 12)})
    assert table.ledger().read().keys is None
    table.swap()
    assert (table.ledger().read().positions, table.ledger().read().keys) == ({SHARD: 8}, KEY)


def test_a_restore_to_before_the_group_began_keeps_the_key(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path / "t")
    log.commit()
    ledger = Ledger(log.log(), group="g", member="main")
    log.ours(ledger.entry("init", ledger.read(), origin={SHARD: 0}, keys=KEY))
    log.restore(back_to=0, version=0)
    assert Ledger(log.log(), group="g", member="main").read().keys == KEY


@pytest.mark.parametrize("is_restored", [False, True], ids=["an append after the swap", "a merge after a RESTORE"])
def test_a_batch_for_another_key_stops_the_ledger_until_it_is_taken_back(table: Table, is_restored: bool) -> None:
    late: LedgerEntry = table.in_flight
    if is_restored:
        late = table.ledger("replay").entry(
            "replay", table.ledger("replay").read(), ranges={SHARD: Range(4, 6)}, mode="merge again"
        )
        table.log.restore(back_to=table.appended, version=table.appended)
    before = table.ledger().read()
    version = table.log.ours(late)
    with pytest.raises(KeyConflictError) as failure:
        table.ledger().read()
    assert failure.value.facts["version"] == version
    table.log.restore(back_to=version - 1, version=version - 1)
    after = table.ledger().read()
    assert (after.positions, after.keys) == (before.positions, before.keys)


def test_a_batch_that_lands_while_a_swap_to_another_key_is_in_flight_stops_nothing(table: Table) -> None:
    other = KeyOrder(("name",))
    swap = table.planned_swap(other)
    table.write("replay", member="replay", ranges={SHARD: Range(4, 6)}, mode="merge again")
    assert table.ledger().read().keys == KEY
    table.log.ours(swap)
    assert (table.ledger().read().keys, table.ledger().read().positions) == (other, {SHARD: 8})


def test_a_pause_for_another_key_stops_nothing(table: Table) -> None:
    replay = table.ledger("replay")
    asked = replay.entry("turn", replay.read())
    table.log.restore(back_to=table.appended, version=table.appended)
    table.log.ours(asked)
    assert table.ledger().read().keys is None


def test_no_older_dead_letter_counts_after_a_rebuild(table: Table, tmp_path: Path) -> None:
    from spark_jobs.dead_letters.table import DeadLetterTable

    letters = DeadLetterTable(str(tmp_path / "letters"))
    batch = next(c.entry for c in table.ledger().surviving() if c.entry and c.entry.kind == "batch")
    swap = next(c.entry for c in table.ledger().surviving() if c.entry and c.entry.kind == "rebuild")
    write_letters(letters, SHARD, 4, 9, batch=batch.bid, number=batch.number)
    write_letters(letters, SHARD, 4, batch=swap.bid, number=swap.number)
    counted = [place for part in letters.counted_places(table.ledger()) for place in part["_sequence"].to_pylist()]
    assert counted == [4]
    table.log.restore(back_to=table.appended, version=table.appended)
    counted = [place for part in letters.counted_places(table.ledger()) for place in part["_sequence"].to_pylist()]
    assert sorted(counted) == [4, 9]
