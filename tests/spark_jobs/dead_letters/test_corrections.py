"""Which corrections are in force, without Spark; ``tests/model/keyed.py`` has the protocol."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_jobs.dead_letters.corrections import CorrectedSplit, StoredSplit, corrected_splits
from spark_jobs.dead_letters.table import DeadLetterTable
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

    def record(self, number: int, *sequences: int, payload: bytes = b"{}") -> None:
        """Write records of corrections for a batch."""
        self.add(ORDERS, *sequences, batch=f"b{number}", number=number, correction=payload)

    def corrected(self) -> list[int]:
        """The messages with corrections in force."""
        return sorted(self.table.corrections(self.ledger()).column("_sequence").to_pylist())

    def counted(self) -> list[int]:
        """The places of the dead letters that count."""
        parts = self.table.counted_places(self.ledger())
        return [place for part in parts for place in part.column("_sequence").to_pylist()]

    def payloads(self) -> list[bytes]:
        found: list[bytes] = self.table.corrections(self.ledger()).column("correction").to_pylist()
        return found


@pytest.fixture
def tables(tmp_path: Path) -> Corrected:
    return Corrected(tmp_path)


def test_a_correction_is_in_force_while_its_batch_is(tables: Corrected) -> None:
    tables.add(ORDERS, 5)
    tables.record(2, 5)
    assert tables.corrected() == [], "its batch has not landed"
    tables.merge(2, kind="replay", places={ORDERS: Intervals.of((5, 6))})
    assert tables.corrected() == [5]
    tables.merge(3, 0, 10, kind="replay", dead=(5,))
    tables.merge(4, 0, 10, dead=(5,))
    tables.merge(5, 0, 100, kind="rebuild", mode="rebuild")
    assert tables.corrected() == [5], "whatever reads its message again"
    tables.main.restore(version=0, back_to=0)
    assert tables.corrected() == []
    tables.main.restore(version=4, back_to=4)
    assert tables.corrected() == [5]
    tables.record(6, 7)
    tables.merge(6, 0, 10)
    tables.merge(7, 0, 10)
    assert tables.corrected() == [5, 7]


def test_the_newest_correction_of_a_place_is_in_force(tables: Corrected) -> None:
    tables.add(ORDERS, 5)
    for number, payload in ((2, b"first"), (3, b"second"), (4, b"third")):
        tables.record(number, 5, payload=payload)
        tables.merge(number, kind="replay", places={ORDERS: Intervals.of((5, 6))})
        assert tables.payloads() == [payload]
    tables.main.restore(version=2, back_to=2)
    assert tables.payloads() == [b"second"]


def test_a_correction_between_two_dead_letters_that_do_not_count_stays(tables: Corrected) -> None:
    tables.add(ORDERS, 2, 5, 9)
    tables.redrive(2, 5)
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


def test_a_check_is_about_the_state_that_it_is_given(tables: Corrected) -> None:
    tables.add(ORDERS, 5)
    tables.merge(2, 0, 10, kind="replay", dead=(5,))
    session: Any = None  # nothing is deleted
    ledger = tables.ledger()
    state = ledger.read()
    tables.merge(3, 0, 10, kind="replay", dead=(5,))
    then, now = (tables.table.clean_up(session, ledger, one) for one in (state, ledger.read()))
    assert (then.uncounted.keys(), then.version) == ({"b1"}, now.version - 1)
    assert now.uncounted.keys() == {"b1", "b2"}


def amid(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], None]) -> None:
    """Let another run act when this method of the table returns for the first time."""
    method, met = getattr(DeadLetterTable, name), []

    def and_act(*arguments: Any) -> Any:
        found = method(*arguments)
        if not met:
            met.append(name)
            act()
        return found

    monkeypatch.setattr(DeadLetterTable, name, and_act)


def test_a_record_of_a_batch_that_begins_amid_the_read_is_not_in_force(
    tables: Corrected, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables.add(ORDERS, 5)
    tables.redrive(2, 5)
    amid(monkeypatch, "orphaned", lambda: tables.record(3, 5, payload=b"new"))
    assert tables.payloads() == [b"{}"]


def test_dead_letters_of_a_batch_that_begins_amid_the_read_do_not_count(
    tables: Corrected, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables.add(ORDERS, 5)
    amid(monkeypatch, "orphaned", lambda: tables.add(ORDERS, 7, batch="b2", number=2))
    assert tables.counted() == [5]


def test_dead_letters_of_a_batch_that_lands_amid_the_read_count_once(
    tables: Corrected, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables.add(ORDERS, 5)
    tables.add(ORDERS, 5, batch="b2", number=2)
    amid(monkeypatch, "_replaced", lambda: tables.merge(2, 0, 10, kind="replay"))
    assert tables.counted() == [5]
    assert tables.counted() == [5]


def test_splits_have_only_the_corrections_that_they_were_given_last(tables: Corrected) -> None:
    plain = [StoredSplit(b"one"), StoredSplit(b"two")]
    assert corrected_splits(plain, tables.table.corrections(tables.ledger())) == plain
    tables.add(ORDERS, 5)
    tables.redrive(2, 5)
    once = corrected_splits(plain, tables.table.corrections(tables.ledger()))
    assert once == corrected_splits(once, tables.table.corrections(tables.ledger()))
    tables.record(3, 5, payload=b"new")
    tables.merge(3, kind="replay", places={ORDERS: Intervals.of((5, 6))})
    again = corrected_splits(once, tables.table.corrections(tables.ledger()))
    assert again != once
    assert [one.split for one in again if isinstance(one, CorrectedSplit)] == plain
