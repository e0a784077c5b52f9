"""What is known at the positions of shards: whichever entry is the newest, the one that moved a shard says it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from spark_jobs.ledger.entries import LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState
from stream_consumers.batches import LastMessage, PositionFacts, Range, hint_with_facts, position_facts_in
from stream_consumers.messages import Shard
from tests.support.written_log import WrittenLog

A, B = Shard("orders", 0), Shard("orders", 1)
OTHER = Shard("clicks", 0)
MANY = (A, B, OTHER, *(Shard("orders", number) for number in range(2, 60)))


def at(**positions: int) -> Mapping[str, object] | None:
    """A hint with ten entries before the position 10, and so on."""
    return hint_with_facts(
        None, {{"a": A, "b": B, "other": OTHER}[name]: (n, PositionFacts(n)) for name, n in positions.items()}
    )


class Group:
    """A group of three shards, or of many, of which not all entries are full."""

    def __init__(self, path: Path, shards: tuple[Shard, ...]) -> None:
        self.log = WrittenLog(path)
        self.commit(self.planned("init", origin=dict.fromkeys(shards, 0), hint=at(a=0, b=0, other=0)))

    def read(self) -> LedgerState:
        return Ledger(self.log.log(), group="g", member="main").read()

    def planned(self, kind: str = "batch", state: LedgerState | None = None, **fields: object) -> LedgerEntry:
        return Ledger(self.log.log(), group="g", member="main").entry(kind, state or self.read(), **fields)

    def commit(self, entry: LedgerEntry) -> None:
        self.log.ours(entry)

    def batch(self, shard: Shard, start: int, end: int, **fields: object) -> LedgerEntry:
        entry = self.planned(
            ranges={shard: Range(start, end)}, hint=hint_with_facts(None, {shard: (end, PositionFacts(end))}), **fields
        )
        self.commit(entry)
        return entry

    def known(self) -> Mapping[Shard, tuple[int, int]]:
        return {
            shard: (position, known.added) for shard, (position, known) in position_facts_in(self.read().hint).items()
        }


@pytest.fixture(params=[(A, B, OTHER), MANY], ids=["all_full", "some_full"])
def group(tmp_path: Path, request: pytest.FixtureRequest) -> Group:
    return Group(tmp_path / "table", request.param)


def test_each_batch_says_what_it_moves_and_the_others_stay(group: Group) -> None:
    group.batch(A, 0, 5)
    group.batch(B, 0, 3)
    group.batch(A, 5, 9)
    assert group.known() == {A: (9, 9), B: (3, 3), OTHER: (0, 0)}


def test_an_older_run_that_commits_last_does_not_bring_its_old_counts_back(group: Group) -> None:
    """It knows an older place of a shard that it does not read."""
    group.batch(B, 0, 8)
    group.commit(group.planned(ranges={A: Range(0, 10)}, hint=at(a=10, b=5)))
    assert group.known() == {A: (10, 10), B: (8, 8), OTHER: (0, 0)}
    group.batch(A, 10, 12)
    assert group.known() == {A: (12, 12), B: (8, 8), OTHER: (0, 0)}


def test_a_replay_that_lost_a_race_does_not_bring_its_old_counts_back(group: Group) -> None:
    group.batch(A, 0, 5)
    before = group.read()
    group.batch(A, 5, 9)
    group.commit(group.planned("replay", ranges={A: Range(0, 5)}, mode="replace", hint=before.hint))
    assert group.known()[A] == (9, 9)


def test_what_lands_between_the_base_of_a_full_entry_and_itself_counts(group: Group) -> None:
    full = group.planned("fence")
    group.batch(B, 0, 3)
    group.commit(replace(full, number=3))
    assert full.is_full
    assert group.known() == {A: (0, 0), B: (3, 3), OTHER: (0, 0)}


@pytest.mark.parametrize("hint", [None, {"created_at_ms": 5, "offset": 700, "positions": {"clicks/0": 4}}])
def test_a_source_of_another_kind_in_the_same_group_changes_nothing(group: Group, hint: Mapping[str, object]) -> None:
    group.batch(A, 0, 5)
    group.commit(group.planned(ranges={OTHER: Range(0, 4)}, hint=hint))
    assert group.known() == {A: (5, 5), B: (0, 0)}, "of the other nothing is known where it is now"
    group.batch(A, 5, 6)
    assert group.known() == {A: (6, 6), B: (0, 0)}


def test_the_place_in_a_file_is_that_of_the_newest_entry_as_a_whole(group: Group) -> None:
    """Its offset and its positions belong together: those of two batches would skip what lies between them."""
    first = {"created_at_ms": 5, "offset": 700, "positions": {"orders/0": 4, "orders/1": 4}}
    second = {"created_at_ms": 5, "offset": 800, "positions": {"orders/1": 9}}
    group.commit(group.planned(ranges={A: Range(0, 4), B: Range(0, 4)}, hint=first))
    assert {name: (group.read().hint or {}).get(name) for name in first} == first
    group.commit(group.planned(ranges={B: Range(4, 9)}, hint=second))
    assert {name: (group.read().hint or {}).get(name) for name in second} == second
    group.log.restore(version=1)
    assert {name: (group.read().hint or {}).get(name) for name in first} == first


def test_a_restore_takes_back_what_is_known_with_the_position(group: Group) -> None:
    group.batch(A, 0, 5)
    group.batch(B, 0, 3)
    group.batch(A, 5, 9)
    group.log.restore(version=1)
    assert group.read().positions[A] == 5
    assert group.known() == {A: (5, 5), B: (0, 0), OTHER: (0, 0)}
    group.batch(B, 0, 4)
    group.log.restore(version=0)
    assert group.known() == {A: (0, 0), B: (0, 0), OTHER: (0, 0)}
    group.log.restore(version=3)
    assert group.known() == {A: (9, 9), B: (3, 3), OTHER: (0, 0)}


def test_what_is_known_at_an_origin_outlives_a_restore_to_before_it(tmp_path: Path) -> None:
    group = Group(tmp_path / "table", MANY)
    new, adopted = Shard("added", 0), Shard("copied", 0)
    group.batch(A, 0, 5)
    facts = {new: PositionFacts(4, 2, 3), adopted: PositionFacts(1)}
    group.commit(group.planned("init", origin={new: 6, adopted: 20}, adopted={adopted: 8}, facts_at_start=facts))
    assert position_facts_in(group.read().hint)[new] == (6, PositionFacts(4, 2, 3))
    assert adopted not in group.known(), "the position is behind its rows"
    for _ in range(2):
        group.batch(new, group.read().positions[new], 12)
        group.log.restore(version=1)
        places = position_facts_in(group.read().hint)
        assert (places[new], places[adopted]) == ((6, PositionFacts(4, 2, 3)), (8, PositionFacts(1)))
        assert places[A] == (5, PositionFacts(5))


def test_what_is_known_at_the_first_origin_outlives_a_restore_to_before_the_group(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path / "table")
    log.commit()
    ledger = Ledger(log.log(), group="g", member="main")
    log.ours(ledger.entry("init", ledger.read(), origin={A: 3}, hint=at(a=3)))
    log.ours(ledger.entry("batch", ledger.read(), ranges={A: Range(3, 9)}, hint=at(a=9)))
    log.restore(version=0)
    assert position_facts_in(ledger.read().hint) == {A: (3, PositionFacts(3))}


@pytest.mark.parametrize("last", [None, LastMessage(4, 5, 6)], ids=["unread", "read"])
@pytest.mark.parametrize("facts", [None, PositionFacts(3), PositionFacts(3, 0, 2)], ids=str)
def test_a_state_is_read_back(last: LastMessage | None, facts: PositionFacts | None) -> None:
    state = ShardState(Intervals.of((MIN_SEQUENCE, 5)), origin=0, last=last, facts_at_start=facts)
    assert ShardState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_of_shards_that_have_ended_nothing_is_known(group: Group) -> None:
    new = Shard("orders#2", 0)
    hint = hint_with_facts(None, {new: (7, PositionFacts(2))})
    fields = {"identities": {"orders#2": "redis"}, "ended": {A: 0, B: 0}, "origin": {new: 7}}
    group.commit(group.planned("accept", hint=hint, **fields))
    assert group.known() == {new: (7, 2), OTHER: (0, 0)}


def test_what_is_known_is_corrected_where_the_position_stays(group: Group) -> None:
    """As where claims end: what the members recorded as lost was counted by the server."""
    group.commit(
        group.planned("fence", ranges={A: Range(0, 0)}, hint=hint_with_facts(None, {A: (0, PositionFacts(4))}))
    )
    assert group.known() == {A: (0, 4), B: (0, 0), OTHER: (0, 0)}
