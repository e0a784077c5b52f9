"""What the ledger knows of a stream that was recreated and accepted, also after late commits and a RESTORE."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState
from stream_consumers.batches import Range
from stream_consumers.messages import Shard
from tests.support.written_log import WrittenLog

OLD, NEW = Shard("orders"), Shard("orders#2")
BOTH = {"orders": "kafka:a", "orders#2": "kafka:b"}


class Group:
    """A group whose commits are planned from the newest version, or from an earlier one."""

    def __init__(self, path: Path) -> None:
        self.log = WrittenLog(path)

    def read(self) -> LedgerState:
        return Ledger(self.log.log(), group="g", member="main").read()

    def planned(self, kind: str, *, member: str = "main", **fields: object) -> LedgerEntry:
        """An entry with what is known now."""
        ledger = Ledger(self.log.log(), group="g", member=member)
        return ledger.entry(kind, ledger.read(), **fields)

    def commit(self, kind: str, **fields: object) -> int:
        return self.log.ours(self.planned(kind, **fields))


@pytest.fixture
def group(tmp_path: Path) -> Group:
    """Versions 0 to 2: a first commit, [0,5) and [5,9)."""
    made = Group(tmp_path / "table")
    made.commit("init", origin={OLD: 0}, identities={"orders": "kafka:a"})
    made.commit("batch", ranges={OLD: Range(0, 5)})
    made.commit("batch", ranges={OLD: Range(5, 9)})
    return made


def accept(group: Group) -> int:
    return group.commit("accept", origin={NEW: 0}, ended={OLD: 9}, identities=BOTH)


def test_the_new_epoch_begins_and_the_old_one_has_ended(group: Group) -> None:
    accept(group)
    state = group.read()
    assert state.identities == BOTH
    assert state.positions == {OLD: 9, NEW: 0}
    assert (state.shards[OLD].ended, state.shards[NEW].ended, state.removed_from_ended) == (9, None, {})


def test_a_commit_that_was_planned_before_the_accept_does_not_take_it_back(group: Group) -> None:
    late = group.planned("replay", member="replay", mode="replace", ranges={OLD: Range(0, 5)})
    accept(group)
    group.log.ours(late)
    assert group.read().identities == BOTH
    group.commit("batch", ranges={NEW: Range(0, 4)})
    state = group.read()
    assert state.identities == BOTH
    assert state.positions == {OLD: 9, NEW: 4}


def test_a_restore_to_before_the_accept_leaves_it_and_tells_what_is_gone(group: Group) -> None:
    accept(group)
    group.commit("batch", ranges={NEW: Range(0, 4)})
    group.log.restore(back_to=1, version=1)
    for _ in range(2):
        state = group.read()
        assert state.identities == BOTH
        assert state.positions == {OLD: 5, NEW: 0}
        assert state.removed_from_ended == {OLD: Intervals.of((5, 9))}
        # What others write does not hide it.
        group.commit("fence")
    group.commit("batch", ranges={OLD: Range(5, 9)}, lost={OLD: Intervals.of((5, 9))})
    assert group.read().removed_from_ended == {}
    assert group.read().positions == {OLD: 9, NEW: 0}


def test_rows_of_an_ended_shard_are_never_to_be_replaced(group: Group) -> None:
    rewound = group.commit("batch", mode="replace", ranges={OLD: Range(0, 0)}, until={OLD: 9})
    assert group.read().shards[OLD].redo
    accept(group)
    assert not group.read().shards[OLD].redo
    group.log.restore(back_to=rewound, version=rewound)
    assert not group.read().shards[OLD].redo
    group.commit("batch", ranges={OLD: Range(0, 5)})
    assert not group.read().shards[OLD].redo
