"""What the ledger knows of claimed batches that a RESTORE removed: nothing but a RESTORE makes it forget them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.source_checks import check_removed_by_restore
from spark_jobs.ledger.entries import CLAIMS, KEEPER, LEAVING_CLAIMS, SWITCHING, ClaimedRange, LedgerEntry
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState
from stream_consumers.batches import Range
from stream_consumers.errors import DataLossError, RestoreTargetError
from stream_consumers.messages import Shard
from tests.support.written_log import WrittenLog

SHARD = Shard("orders")
OTHER = Shard("other")


class Group:
    """A group whose commits are planned from the newest version, or from an earlier one."""

    def __init__(self, path: Path, sharing: str = CLAIMS) -> None:
        self.log = WrittenLog(path)
        self.commit("init", origin={SHARD: 0}, switch=sharing)

    def read(self) -> LedgerState:
        return Ledger(self.log.log(), group="g", member="main").read()

    def planned(self, kind: str, *, member: str = "main", **fields: object) -> LedgerEntry:
        ledger = Ledger(self.log.log(), group="g", member=member)
        return ledger.entry(kind, ledger.read(), **fields)  # type: ignore[arg-type]

    def commit(self, kind: str, *, member: str = "main", **fields: object) -> int:
        return self.write(self.planned(kind, member=member, **fields))

    def claimed(self, start: int, shard: Shard = SHARD, *, member: str = "main") -> LedgerEntry:
        """A batch of ten claimed entries."""
        return self.planned("batch", member=member, claims={shard: ClaimedRange(start, start + 10, 10)})

    def write(self, entry: LedgerEntry) -> int:
        """A commit whose batches add a file, so that a RESTORE by a timestamp is understood by the files."""
        has_rows = entry.kind == "batch"
        return self.log.ours(entry, files=self.log.files | {f"rows-{self.log.next}"} if has_rows else self.log.files)

    def restore(self, version: int) -> int:
        return self.log.restore(back_to=version, version=version)


@pytest.fixture
def group(tmp_path: Path) -> Group:
    """Versions 0 to 2: a first commit, and the claimed entries [0,10) and [10,20)."""
    made = Group(tmp_path / "table")
    made.write(made.claimed(0))
    made.write(made.claimed(10))
    return made


def versions(*found: int) -> Intervals:
    return Intervals.of(*((version, version + 1) for version in found))


@pytest.mark.parametrize(
    "following",
    [
        {"kind": "keep", "member": KEEPER},
        {"kind": "fence", "switch": CLAIMS},
        {"kind": "fence", "member": "other"},
        {"kind": "accept", "origin": {Shard("orders#2"): 0}, "ended": {SHARD: 0}},
        {"kind": "batch", "claims": {SHARD: ClaimedRange(20, 30, 10)}},
    ],
    ids=lambda one: str(one["kind"]) + str(one.get("switch", "")),
)
def test_no_commit_makes_the_group_forget_what_a_restore_removed(group: Group, following: dict[str, object]) -> None:
    group.restore(1)
    assert group.read().removed_claim_batches == versions(2)
    for _ in range(2):
        group.commit(**following)  # type: ignore[arg-type]
        assert group.read().removed_claim_batches == versions(2)
        with pytest.raises(DataLossError) as caught:
            check_removed_by_restore(group.read(), Ingestion("g", str(group.log.path)))
        assert caught.value.facts["batches"] == 1


def test_a_restore_that_brings_them_back_ends_it(group: Group) -> None:
    group.restore(1)
    group.commit("keep", member=KEEPER)
    group.restore(2)
    assert group.read().removed_claim_batches == Intervals()
    check_removed_by_restore(group.read(), Ingestion("g", str(group.log.path)))
    group.write(group.claimed(20))
    assert group.read().removed_claim_batches == Intervals()


def test_a_restore_that_brings_some_of_them_back_leaves_the_others(group: Group) -> None:
    group.write(group.claimed(20))
    group.restore(0)
    assert group.read().removed_claim_batches == versions(1, 2, 3)
    group.commit("keep", member=KEEPER)
    group.restore(2)
    assert group.read().removed_claim_batches == versions(3)


def test_what_lands_after_the_restore_is_removed_by_the_next_one(group: Group) -> None:
    late = group.claimed(20)
    group.restore(1)
    landed = group.write(late)
    assert group.read().removed_claim_batches == versions(2)
    group.restore(2)
    assert group.read().removed_claim_batches == versions(landed)


def test_restores_to_versions_after_a_restore_are_followed(group: Group) -> None:
    group.restore(1)
    kept = group.commit("keep", member=KEEPER)
    group.restore(2)
    group.restore(kept)
    assert group.read().removed_claim_batches == versions(2)


def test_the_state_is_the_same_however_far_back_the_newest_full_entry_lies(group: Group) -> None:
    group.restore(1)
    for number in range(30):
        group.write(group.claimed(100 + 10 * number, member=f"m{number % 3}"))
    assert group.read().removed_claim_batches == versions(2)
    group.restore(2)
    assert group.read().removed_claim_batches == versions(*range(4, 34))


def test_rows_that_were_read_by_position_are_read_again(tmp_path: Path) -> None:
    group = Group(tmp_path / "table", "resumable")
    group.commit("batch", ranges={SHARD: Range(0, 10)})
    group.restore(0)
    assert group.read().removed_claim_batches == Intervals()
    assert group.read().positions == {SHARD: 0}


def test_rows_that_were_read_by_position_before_the_switch_are_not_read_again(tmp_path: Path) -> None:
    group = Group(tmp_path / "table", "resumable")
    read = group.commit("batch", ranges={SHARD: Range(0, 10)})
    group.commit("fence", switch=CLAIMS)
    group.restore(0)
    assert group.read().removed_claim_batches == versions(read)


@pytest.mark.parametrize("sharing", [LEAVING_CLAIMS, SWITCHING])
def test_a_restore_during_a_switch(group: Group, sharing: str) -> None:
    """Away from claims nothing is claimed again; towards them the group is not set to its positions yet."""
    group.commit("fence", switch=sharing)
    group.restore(1)
    assert group.read().removed_claim_batches == (versions(2) if sharing == LEAVING_CLAIMS else Intervals())
    group.commit("fence", switch="resumable")
    assert bool(group.read().removed_claim_batches) == (sharing == LEAVING_CLAIMS)


def test_a_switch_to_claims_that_a_restore_was_faster_than_does_not_count(tmp_path: Path) -> None:
    group = Group(tmp_path / "table", "resumable")
    group.commit("batch", ranges={SHARD: Range(0, 10)})
    group.commit("fence", switch=SWITCHING)
    late = group.planned("fence", switch=CLAIMS)
    group.restore(0)
    group.write(late)
    assert group.read().sharing == SWITCHING
    group.commit("fence", switch=CLAIMS)
    assert group.read().sharing == CLAIMS
    assert group.read().positions == {SHARD: 0}


def test_after_a_switch_to_positions_claimed_entries_of_a_stream_that_is_gone_are_a_loss(group: Group) -> None:
    group.commit("fence", switch=LEAVING_CLAIMS)
    group.commit("fence", ranges={SHARD: Range(0, 20)})
    group.commit("fence", switch="resumable")
    there = group.read().version
    group.restore(1)
    assert group.read().removed_claim_batches == Intervals()
    assert group.read().shards[SHARD].claimed == 20
    group.restore(there)
    group.commit("accept", origin={Shard("orders#2"): 0}, ended={SHARD: 20})
    group.restore(1)
    assert group.read().removed_claim_batches == versions(2)
    assert group.read().removed_from_ended == {SHARD: Intervals.of((0, 20))}


def test_what_a_batch_by_position_left_out_is_written_again_where_a_restore_came_in_between(group: Group) -> None:
    group.commit("fence", switch=LEAVING_CLAIMS)
    group.commit("fence", ranges={SHARD: Range(0, 20)})
    there = group.commit("fence", switch="resumable")
    group.restore(1)
    timely, late = (group.planned("batch", ranges={SHARD: Range(0, 30)}) for _ in range(2))
    group.write(timely)
    assert group.read().shards[SHARD].redo == Intervals()
    group.restore(there)
    group.restore(1)
    group.write(replace(late, number=late.number + 1))
    assert group.read().shards[SHARD].redo == Intervals.of((0, 20))
    assert group.read().positions == {SHARD: 0}


def test_what_is_known_of_removed_batches_is_read_back(group: Group) -> None:
    group.restore(1)
    entry = group.planned("keep", member=KEEPER)
    assert '"removed":[[2,3]]' in entry.to_json()
    group.restore(2)
    assert '"removed"' not in group.planned("keep", member=KEEPER).to_json()


def test_a_restore_to_a_number_after_one_that_is_ambiguous(tmp_path: Path) -> None:
    group = Group(tmp_path / "table")
    group.write(group.claimed(0))
    group.log.ours(group.claimed(10), files=group.log.files)
    newest = group.write(group.claimed(20))
    group.log.restore(back_to=2, timestamp="2023-11-14 22:15:20")
    with pytest.raises(RestoreTargetError):
        group.read()
    group.restore(newest)
    assert (group.read().removed_claim_batches, group.read().shards[SHARD].claimed) == (Intervals(), 30)


def test_a_first_commit_that_lands_after_a_restore_says_how_the_group_shares(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path / "table")
    log.commit(files=frozenset({"foreign"}))
    ledger = Ledger(log.log(), group="g", member="main")
    late = ledger.entry("init", ledger.read(), origin={SHARD: 0}, switch=CLAIMS)
    log.restore(back_to=0, version=0)
    log.ours(late)
    there = log.next
    log.ours(ledger.entry("batch", ledger.read(), claims={SHARD: ClaimedRange(0, 10, 10)}), files=log.files | {"rows"})
    assert ledger.read().sharing == CLAIMS
    log.restore(back_to=there - 1, version=there - 1)
    assert ledger.read().removed_claim_batches == versions(there)
