"""Which records of corrections count, without Spark; ``tests/model/keyed.py`` has the protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger
from stream_consumers.batches import Range
from tests.support.letter_tables import ORDERS, Tables
from tests.support.written_log import made_entry


class Corrected(Tables):
    """A table with messages that are merged again; its first batch, ``b1``, has read 100 messages."""

    def ledger(self) -> Ledger:
        return Ledger(self.main.log(), group=self.group, member="main")

    def merge(
        self, number: int, *part: int, base: int | None = None, dead: tuple[int, ...] = (), **fields: Any
    ) -> None:
        """Commit a batch that merges a range again, and its dead letters."""
        base, bid = self.main.next - 1 if base is None else base, f"b{number}"
        if dead:
            self.add(ORDERS, *dead, batch=bid, number=number)
        written = {"ranges": {ORDERS: Range(*part)}} if part else {}
        self.main.ours(made_entry(number, base, bid=bid, **{"mode": "merge again", **written, **fields}))

    def redrive(self, number: int, *sequences: int) -> None:
        """Correct dead letters."""
        self.record(number, *sequences)
        self.merge(number, kind="replay", places={ORDERS: Intervals.of(*((at, at + 1) for at in sequences))})

    def record(self, number: int, *sequences: int) -> None:
        """Write records of corrections for a batch."""
        self.add(ORDERS, *sequences, batch=f"b{number}", number=number, correction=b"{}")

    def corrected(self) -> list[int]:
        """The messages with records that count."""
        return sorted(self.table.corrections(self.ledger()).column("_sequence").to_pylist())


@pytest.fixture
def tables(tmp_path: Path) -> Corrected:
    return Corrected(tmp_path)


def test_a_batch_in_flight_over_a_restore_leaves_the_corrections_that_this_one_brings_back(tables: Corrected) -> None:
    tables.add(ORDERS, 5)
    tables.redrive(2, 5)
    assert tables.corrected() == [5]
    tables.merge(3, 0, 10, kind="replay", dead=(5,))
    assert tables.corrected() == [], "a replay reads the original"
    tables.main.restore(version=1, back_to=1)
    assert tables.corrected() == [5]
    tables.merge(4, 0, 10, base=2, dead=(5,))
    assert tables.corrected() == [5], "it is merged again"
    tables.record(5, 5)
    tables.merge(5, 0, 10)
    assert tables.corrected() == [5]
    tables.merge(6, 0, 10, kind="replay", dead=(5,))
    assert tables.corrected() == []


def test_a_late_rebuild_leaves_no_correction_because_nothing_is_merged_again(tables: Corrected) -> None:
    tables.add(ORDERS, 5)
    tables.redrive(2, 5)
    tables.main.restore(version=1, back_to=1)
    tables.merge(3, 0, 100, base=1, kind="rebuild", mode="rebuild", dead=(5,))
    assert tables.corrected() == []


def test_a_correction_between_two_others_of_its_batch_stays(tables: Corrected) -> None:
    tables.record(2, 5)
    tables.merge(2, 0, 10, dead=(2, 9))
    tables.redrive(3, 2, 9)
    assert tables.corrected() == [2, 5, 9]
    session: Any = None  # nothing is deleted
    state = tables.ledger().read()
    checked = tables.table.clean_up(session, tables.ledger(), state)
    tables.merge(
        4,
        *(3, 5),
        state=state.shards,
        totals=state.totals,
        dead_letters_version=checked.version,
        uncounted=checked.uncounted,
        replaces_considered=checked.replaces_considered,
    )
    assert tables.corrected() == [2, 5, 9]
