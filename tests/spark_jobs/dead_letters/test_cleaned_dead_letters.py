"""Dead letters count as long as their batch is in the table, also when the commit that tells it was cleaned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.target_table import fence_abandoned
from spark_jobs.dead_letters import table
from spark_jobs.dead_letters.table import CheckedDeadLetters, DeadLetterTable
from spark_jobs.ledger.entries import LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.maintenance import keep_alive
from stream_consumers.batches import Range
from stream_consumers.messages import Shard
from tests.support.delta_writes import remove_older_commits
from tests.support.groups_without_spark import write_empty_commits_by
from tests.support.letter_tables import write_letters
from tests.support.written_log import WrittenLog

SHARD = Shard("orders", 0)
WIDTH = 10


class DeltaRsSession:
    """Deletes as Spark would."""

    def __init__(self, path: str) -> None:
        self.path = path

    def sql(self, text: str) -> None:
        DeltaTable(self.path).delete(text.split(" WHERE ", 1)[1])


class Tables:
    """A table whose batches are written by hand, ten messages each, and the table of their dead letters."""

    def __init__(self, folder: Path, *, group: str = "g", has_totals: bool = True) -> None:
        self.has_totals = has_totals
        self.group, self.app = group, f"{group}/main"
        self.main = WrittenLog(folder / "t")
        self.letters = DeadLetterTable(str(folder / "t_dead_letters"))
        self.number = 0
        self.settlement = CheckedDeadLetters(-1)

    def batch(
        self, index: int, *, dead: int = 0, bid: str = "", lands: bool = True, base: int | None = None, **details: Any
    ) -> None:
        """The batch of ``[10 * index, 10 * index + 10)``, its last messages dead letters."""
        self.number += lands
        number = self.number if lands else self.number + 1
        bid = bid or f"b{number}"
        if dead:
            places = [WIDTH * (index + 1) - 1 - i for i in range(dead)]
            more: dict[str, Any] = {"number": number, "metadata": {"app": self.app}}
            write_letters(self.letters, SHARD, *places, group=self.group, batch=bid, **more)
        if lands:
            fields = {
                "ranges": {SHARD: Range(WIDTH * index, WIDTH * (index + 1))},
                "state": {SHARD: ShardState(Intervals.of((MIN_SEQUENCE, WIDTH * index)), origin=0)},
                "dead_letters_version": self.settlement.version,
                "uncounted": self.settlement.uncounted,
            }
            if self.has_totals:
                ledger = self.ledger()
                fields |= {"replaces_considered": self.settlement.replaces_considered, "totals": ledger.read().totals}
            base = self.main.next - 1 if base is None else base
            entry = LedgerEntry("batch", self.group, self.app, number, "main", bid, base, **{**fields, **details})
            self.main.ours(entry)

    def ledger(self) -> Ledger:
        return Ledger(self.main.log(), group=self.group, member="main")

    def settle(self) -> None:
        """What a run does first, and again at its end."""
        session: Any = DeltaRsSession(self.letters.path)
        self.settlement = self.letters.clean_up(session, self.ledger(), self.ledger().read())

    def clean_before(self, version: int) -> None:
        DeltaTable(str(self.main.path)).create_checkpoint()
        self.main.clean_before(version)

    def counted(self) -> list[int]:
        batches = self.letters.counted_places(self.ledger())
        return sorted(sequence for batch in batches for sequence in batch["_sequence"].to_pylist())

    def there(self) -> list[int]:
        return sorted(DeltaTable(self.letters.path).to_pyarrow_table().column("_sequence").to_pylist())


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["", "older entries"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    return Tables(tmp_path, has_totals=request.param)


def test_a_batch_whose_commit_was_cleaned_still_counts(tables: Tables) -> None:
    for index in range(8):
        tables.batch(index, dead=index in (1, 3))
    tables.clean_before(5)
    assert tables.counted() == [19, 39]


def test_and_after_a_restore(tables: Tables) -> None:
    tables.batch(0, dead=1)
    tables.settle()
    for index in range(1, 8):
        tables.batch(index, dead=index in (3, 7))
    tables.clean_before(5)
    tables.main.restore(version=6, back_to=6)
    assert tables.counted() == [9, 39]
    tables.settle()
    assert tables.there() == [9, 39, 79]


def test_what_a_restore_removed_does_not_count_again_when_its_commits_are_cleaned(tables: Tables) -> None:
    for index in range(4):
        tables.batch(index, dead=1)
    tables.main.restore(version=1, back_to=1)
    tables.settle()
    for index in range(2, 8):
        tables.batch(index, dead=1, state={SHARD: ShardState(Intervals.of((MIN_SEQUENCE, WIDTH * index)), origin=0)})
    wanted = [9, 19, 29, 39, 49, 59, 69, 79]
    assert tables.counted() == wanted
    tables.clean_before(7)
    assert tables.counted() == wanted
    # Nobody can restore the table to what was removed any more: its dead letters are deleted.
    tables.settle()
    assert tables.there() == wanted
    assert tables.settlement.uncounted == {}


def test_what_entries_say_is_said_on_while_a_restore_may_bring_it_back(tables: Tables) -> None:
    for index in range(4):
        tables.batch(index, dead=1)
    tables.main.restore(version=1, back_to=1)
    tables.settle()
    for index in range(2, 5):
        tables.batch(index, dead=1)
    wanted = [9, 19, 29, 39, 49]
    # The batches that were removed are cleaned away, and the RESTORE is not.
    tables.clean_before(4)
    tables.settle()
    assert tables.counted() == wanted
    assert set(tables.settlement.uncounted) == {"b3", "b4"}
    assert len(tables.there()) == 7
    tables.batch(5)
    assert tables.counted() == wanted


def test_what_an_entry_says_that_was_planned_before_a_restore_is_not_believed(tables: Tables) -> None:
    for index in range(3):
        tables.batch(index, dead=1)
    tables.settle()
    tables.main.restore(version=0, back_to=0)
    tables.batch(3, base=2)
    assert tables.counted() == [9]


def test_a_restore_brings_back_what_another_one_removed(tables: Tables) -> None:
    for index in range(4):
        tables.batch(index, dead=1)
    tables.main.restore(version=1, back_to=1)
    tables.settle()
    tables.batch(2, dead=1)
    assert tables.counted() == [9, 19, 29]
    tables.settle()
    tables.main.restore(version=3, back_to=3)
    assert tables.counted() == [9, 19, 29, 39]


@pytest.mark.parametrize("group", ["Marie's", "''", "x' OR '1'='1", 'a "b"', "a\\b", "größe; --"])
def test_the_name_of_a_group_may_have_quotes(tmp_path: Path, group: str) -> None:
    tables, other = Tables(tmp_path, group=group), Tables(tmp_path / "other")
    for index in range(3):
        tables.batch(index, dead=1)
    replay(tables, 1)
    tables.settle()
    assert tables.counted() == [9, 19, 29]
    other.letters = tables.letters
    assert other.counted() == []


def test_a_replace_of_which_the_log_no_longer_says_whether_it_is_late_replaces_no_dead_letter(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    for index in range(3):
        tables.batch(index, dead=1)
    base = tables.main.next - 1
    tables.main.restore(version=2, back_to=2)
    known = ShardState(Intervals.of((MIN_SEQUENCE, 30)), origin=0)
    tables.batch(1, mode="replace", base=base, state={SHARD: known})
    redo = replace(known, redo=Intervals.of((10, 20)))
    tables.batch(3, dead=1, state={SHARD: redo}, totals=tables.ledger().read().totals, uncounted={})
    assert tables.counted() == [9, 19, 29, 39]
    tables.clean_before(4)
    assert tables.counted() == [9, 19, 29, 39]


def test_a_batch_that_never_landed_does_not_count(tables: Tables) -> None:
    tables.batch(0)
    tables.batch(1, dead=1, bid="dropped", lands=False)
    assert tables.counted() == []
    tables.batch(1, dead=1)
    assert tables.counted() == [19]
    tables.settle()
    assert tables.there() == [19]


def test_what_was_replaced_does_not_count_again_when_the_commit_that_replaced_it_is_cleaned(tables: Tables) -> None:
    for index in range(3):
        tables.batch(index, dead=1)
    replay(tables, 1)
    assert tables.counted() == [9, 19, 29]
    tables.settle()
    for index in range(3, 8):
        tables.batch(index)
    tables.clean_before(5)
    assert tables.counted() == [9, 19, 29]
    tables.settle()
    assert tables.there() == [9, 19, 29]
    assert tables.counted() == [9, 19, 29]


def test_what_a_restore_could_bring_back_is_not_deleted(tables: Tables) -> None:
    for index in range(3):
        tables.batch(index, dead=1)
    replay(tables, 1)
    for index in (3, 4):
        tables.settle()
        tables.batch(index)
    tables.settle()
    tables.main.restore(version=2, back_to=2)
    assert tables.counted() == [9, 19, 29]


def test_dead_letters_of_a_batch_that_lands_after_a_replace_count(tables: Tables) -> None:
    for index in range(3):
        tables.batch(index, dead=1)
    replay(tables, 1)
    # Another replay of the same has written its dead letters when somebody settles, and lands behind it.
    tables.batch(1, dead=1, bid="late", lands=False)
    tables.settle()
    tables.batch(3)
    covered = Intervals.of((MIN_SEQUENCE, WIDTH * 4))
    tables.batch(1, bid="late", mode="replace", state={SHARD: ShardState(covered, origin=0)})
    assert tables.counted() == [9, 19, 29]


def replay(tables: Tables, index: int) -> None:
    """Replace a batch by one that has a dead letter in the same place."""
    covered = Intervals.of((MIN_SEQUENCE, WIDTH * 3))
    tables.batch(index, dead=1, mode="replace", state={SHARD: ShardState(covered, origin=0)})


def test_an_entry_without_the_field_is_read(tables: Tables) -> None:
    tables.batch(0, dead=1)
    file = tables.main.file(0)
    file.write_text(file.read_text().replace(r",\"uncounted\":{}", ""))
    assert "uncounted" not in file.read_text()
    assert tables.ledger().read().uncounted == {}
    assert tables.counted() == [9]


def redrive(tables: Tables, *places: int) -> None:
    """Replace these places by rows."""
    ledger = Ledger(tables.main.log(), group=tables.group, member="replay")
    known = {"dead_letters_version": tables.settlement.version, "uncounted": tables.settlement.uncounted}
    known |= {"replaces_considered": tables.settlement.replaces_considered} if tables.has_totals else {}
    parts = {SHARD: Intervals.of(*((place, place + 1) for place in places))}
    tables.main.ours(ledger.entry("replay", ledger.read(), places=parts, mode="replace", **known))


def test_what_a_redrive_has_written_counts_no_more_and_its_neighbours_do(tables: Tables) -> None:
    for index in range(3):
        tables.batch(index, dead=3)
    assert tables.counted() == [7, 8, 9, 17, 18, 19, 27, 28, 29]
    tables.settle()
    redrive(tables, 7, 9, 17, 18, 19)
    assert tables.counted() == [8, 27, 28, 29]
    before = tables.main.next - 1
    tables.settle()
    of_batches = {bid: str(parts[SHARD]) for bid, parts in tables.settlement.uncounted.items()}
    assert of_batches == {"b1": "[7,8) [9,10)", "b2": "[17,20)"}, "as short as it can be said"
    tables.batch(3, dead=1)
    redrive(tables, 8)
    assert tables.counted() == [27, 28, 29, 39]
    tables.main.restore(version=before, back_to=before)
    assert tables.counted() == [8, 27, 28, 29]
    tables.main.restore(version=2, back_to=2)
    assert tables.counted() == [7, 8, 9, 17, 18, 19, 27, 28, 29]


def test_what_was_redriven_does_not_count_again_when_the_commit_that_tells_it_is_cleaned(tables: Tables) -> None:
    for index in range(3):
        tables.batch(index, dead=2)
    tables.settle()
    redrive(tables, 8, 19)
    for index in range(3, 8):
        tables.settle()
        tables.batch(index, dead=index == 7)
    tables.clean_before(7)
    wanted = [9, 18, 28, 29, 79]
    assert tables.counted() == wanted
    tables.settle()
    assert tables.there() == wanted, "nothing brings them back: they are deleted"
    assert tables.counted() == wanted


@pytest.fixture
def what(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Tables, Ingestion]:
    """A table whose empty commits are written by hand, too."""
    tables = Tables(tmp_path)
    write_empty_commits_by(monkeypatch, lambda what, entry: tables.main.ours(entry))
    return tables, Ingestion("g", str(tables.main.path))


def kill(tables: Tables, app: str, *, number: int = 1) -> None:
    """A batch of another sequence that writes dead letters and a correction, and never its rows."""
    more: dict[str, Any] = {"batch": "killed", "number": number, "metadata": {"app": app}}
    write_letters(tables.letters, SHARD, 5, **more)
    write_letters(tables.letters, SHARD, 6, correction=b"never", **more)


def run(tables: Tables, what: Ingestion) -> list[int]:
    """What a run does first; return the numbers that it takes of other sequences."""
    before = tables.main.next
    tables.settle()
    session: Any = DeltaRsSession(tables.letters.path)
    fence_abandoned(session, what, tables.settlement.abandoned)
    commits = (tables.main.log().commit(version) for version in range(before, tables.main.next))
    return [commit.entry.number for commit in commits if commit and commit.entry]


@pytest.mark.parametrize(
    ("app", "number", "fences"),
    [
        ("g/main", 1, [1]),
        pytest.param("g/main", 7, [1, 7], id="of a newer copy of the table"),
        ("g/orders/1", 1, [1]),
        ("g/orders#2/0", 1, [1]),
        ("g/worker-1", 1, [1]),
    ],
)
def test_dead_letters_of_a_batch_whose_number_no_batch_takes_never_count(
    what: tuple[Tables, Ingestion], monkeypatch: pytest.MonkeyPatch, app: str, number: int, fences: list[int]
) -> None:
    tables, of_table = what
    own = replace(of_table, shard=SHARD)
    tables.app = own.ledger().app
    tables.batch(0, dead=1)
    kill(tables, app, number=number)
    assert run(tables, own) == [], "it may still land"
    monkeypatch.setattr(table, "ABANDONED_AFTER_MS", -1)
    assert run(tables, own) == fences
    assert run(tables, own) == []
    assert tables.there() == [9]
    tables.batch(1, dead=1)
    remove_older_commits(tables.letters.path)
    assert tables.counted() == [9, 19]
    assert tables.letters.corrections(tables.ledger()).num_rows == 0


def test_the_number_of_an_abandoned_batch_of_the_own_sequence_is_left_to_the_next_batch(
    what: tuple[Tables, Ingestion], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, own = what
    monkeypatch.setattr(table, "ABANDONED_AFTER_MS", -1)
    tables.batch(0, dead=1)
    kill(tables, tables.app, number=2)
    assert run(tables, own) == []
    tables.batch(1, dead=1)
    tables.settle()
    assert tables.there() == [9, 19]


def test_maintenance_deletes_dead_letters_of_a_dropped_batch_before_the_log_is_cleaned(
    what: tuple[Tables, Ingestion],
) -> None:
    tables, own = what
    session: Any = DeltaRsSession(tables.letters.path)
    tables.batch(0)
    tables.settle()
    tables.batch(1, dead=2, bid="dropped", lands=False)
    tables.batch(1, dead=1)
    assert keep_alive(session, own)
    assert tables.counted() == [19]
    tables.clean_before(tables.main.next - 1)
    assert tables.counted() == [19]


def test_maintenance_records_what_a_restore_removed_before_the_log_is_cleaned(
    what: tuple[Tables, Ingestion],
) -> None:
    tables, own = what
    session: Any = DeltaRsSession(tables.letters.path)
    tables.batch(0, dead=1)
    tables.batch(1, dead=1)
    tables.main.restore(version=0, back_to=0)
    assert keep_alive(session, own)
    tables.clean_before(tables.main.next - 1)
    assert tables.counted() == [9]


def test_maintenance_fences_abandoned_batches(what: tuple[Tables, Ingestion], monkeypatch: pytest.MonkeyPatch) -> None:
    tables, own = what
    session: Any = DeltaRsSession(tables.letters.path)
    assert not keep_alive(session, own), "the group has not begun"
    monkeypatch.setattr(table, "ABANDONED_AFTER_MS", -1)
    tables.batch(0, dead=1)
    kill(tables, tables.app, number=2)
    assert keep_alive(session, own)
    assert tables.there() == [9]
    assert tables.ledger().read().last_number == 2
