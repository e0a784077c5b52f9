"""Reading the ledger does not walk the log."""

import time

import pytest

from spark_jobs.batches.replay import begun
from spark_jobs.ledger import delta_log
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.entries import LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import MOST_VERSIONS, Ledger
from stream_consumers.batches import Range
from stream_consumers.messages import Shard
from tests.support.written_log import WrittenLog

COMMITS = 2000
SHARD = Shard("orders", 0)


def batch(version):
    state = {SHARD: ShardState(Intervals.of((MIN_SEQUENCE, version)), origin=0)}
    ranges = {SHARD: Range(version, version + 1)}
    return LedgerEntry(
        "batch", "g", "g/main", version + 1, "main", f"b{version}", version - 1, ranges=ranges, state=state
    )


@pytest.fixture(scope="module")
def long_log(tmp_path_factory):
    log = WrittenLog(tmp_path_factory.mktemp("long") / "table")
    for version in range(COMMITS):
        log.ours(batch(version))
    return log


@pytest.fixture
def opened(monkeypatch):
    versions = set()
    commit = DeltaLog.commit

    def counting(self, version):
        versions.add(version)
        return commit(self, version)

    monkeypatch.setattr(DeltaLog, "commit", counting)
    return versions


def test_only_the_newest_commit_is_opened(long_log, opened):
    ledger = Ledger(long_log.log(), group="g", member="main")
    assert ledger.read().positions == {SHARD: COMMITS}
    assert opened == {COMMITS - 1}


def test_verifying_opens_only_what_came_after_the_plan(long_log, opened):
    ledger = Ledger(long_log.log(), group="g", member="main")
    assert ledger.written(COMMITS - 1, after=COMMITS - 3).version == COMMITS - 2
    assert opened == {COMMITS - 2, COMMITS - 1}


def test_a_ledger_of_many_shards_is_read_from_the_newest_full_entry(tmp_path, opened):
    shards = [Shard("orders", number) for number in range(100)]
    log = WrittenLog(tmp_path / "table")
    planner = Ledger(log.log(), group="g", member="main")
    log.ours(planner.entry("init", planner.read(), origin=dict.fromkeys(shards, 0)))
    for number in range(6 * MOST_VERSIONS):
        shard = shards[number % len(shards)]
        position = planner.read().positions[shard]
        entry = planner.entry("batch", planner.read(), ranges={shard: Range(position, position + 1)})
        log.ours(entry, timestamp_ms=int(time.time() * 1000))
    opened.clear()
    assert sum(Ledger(log.log(), group="g", member="main").read().positions.values()) == 6 * MOST_VERSIONS
    assert len(opened) <= MOST_VERSIONS


def test_whether_a_replay_was_begun_is_not_searched_where_nothing_was_replayed(long_log, opened):
    assert begun(Ledger(long_log.log(), group="g", member="main"), "id") is None
    assert opened == set()


def test_a_reader_that_stays_keeps_no_more_commits_than_it_may(long_log, monkeypatch):
    monkeypatch.setattr(delta_log, "KEPT_COMMITS", 50)
    log = long_log.log()
    assert sum(1 for _ in log.readable()) == COMMITS
    assert len(log._commits) == 50
