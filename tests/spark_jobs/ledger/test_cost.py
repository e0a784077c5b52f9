"""Reading the ledger does not walk the log."""

import time
from dataclasses import replace

import pytest

from spark_jobs.batches.replay import replay_progress
from spark_jobs.dead_letters.table import replacements
from spark_jobs.ledger import delta_log
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.entries import MAX_REPLAYS, ShardState, Totals
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import MAX_AGE_VERSIONS, Ledger
from stream_consumers.batches import Range
from stream_consumers.messages import Shard
from tests.support.written_log import WrittenLog, made_entry

COMMITS = 500
SHARD = Shard("orders", 0)
FIRST_REPLACE = COMMITS - 10


def batch(version):
    state = {SHARD: ShardState(Intervals.of((MIN_SEQUENCE, version)), origin=0)}
    ranges = {SHARD: Range(version, version + 1)}
    return made_entry(
        version + 1,
        version - 1,
        ranges=ranges,
        state=state,
        dead=1,
        # One of the replaces is not considered yet.
        replaces_considered=2 if version > FIRST_REPLACE + 2 else 0,
        totals=Totals(dead=version, replaced=min(3, max(0, version - FIRST_REPLACE))),
        mode="replace" if 0 <= version - FIRST_REPLACE < 3 else "append",
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
    assert ledger.commit_of(COMMITS - 1, after=COMMITS - 3).version == COMMITS - 2
    assert opened == {COMMITS - 2, COMMITS - 1}


def test_a_ledger_of_many_shards_is_read_from_the_newest_full_entry(tmp_path, opened):
    shards = [Shard("orders", number) for number in range(50)]
    log = WrittenLog(tmp_path / "table")
    planner = Ledger(log.log(), group="g", member="main")
    log.ours(planner.entry("init", planner.read(), origin=dict.fromkeys(shards, 0)))
    for number in range(3 * MAX_AGE_VERSIONS):
        shard = shards[number % len(shards)]
        position = planner.read().positions[shard]
        entry = planner.entry("batch", planner.read(), ranges={shard: Range(position, position + 1)})
        log.ours(entry, timestamp_ms=int(time.time() * 1000))
    opened.clear()
    assert sum(Ledger(log.log(), group="g", member="main").read().positions.values()) == 3 * MAX_AGE_VERSIONS
    assert len(opened) <= MAX_AGE_VERSIONS


def test_what_commits_add_up_to_is_not_searched(long_log, opened):
    ledger = Ledger(long_log.log(), group="g", member="main")
    assert replay_progress(ledger, "id") is None
    assert ledger.read().totals.dead == COMMITS
    assert opened == {COMMITS - 1}


def test_what_was_replaced_is_searched_only_where_it_is_not_considered(long_log, opened):
    ledger = Ledger(long_log.log(), group="g", member="main")
    found = replacements(ledger, ledger.read())
    assert found.ranges == {SHARD: [(Range(FIRST_REPLACE + 2, FIRST_REPLACE + 3), 7)]}
    assert opened == set(range(FIRST_REPLACE + 2, COMMITS))


def test_of_many_replays_the_oldest_are_searched(tmp_path, opened):
    log = WrittenLog(tmp_path / "table")
    ledger = Ledger(log.log(), group="g", member="main")
    log.ours(ledger.entry("init", ledger.read(), origin={SHARD: 0}))

    def replay(name, *, begins):
        state = ledger.read()
        part, goal = {SHARD: Range(state.last_number, state.last_number + 1)}, {SHARD: Range(0, 99)}
        log.ours(ledger.entry("replay", state, ranges=part, goal=goal, replay=name, begins=begins))

    for number in range(MAX_REPLAYS + 2):
        replay(str(number), begins=True)
    opened.clear()
    assert replay_progress(ledger, "0").done == {SHARD: Intervals.of((1, 2))}
    assert 1 in opened
    assert replay_progress(ledger, "none") is None
    replay("0", begins=False)
    assert replay_progress(ledger, "0").done == {SHARD: Intervals.of((1, 2), (MAX_REPLAYS + 3, MAX_REPLAYS + 4))}
    opened.clear()
    assert replay_progress(ledger, str(MAX_REPLAYS + 1)).done == {
        SHARD: Intervals.of((MAX_REPLAYS + 2, MAX_REPLAYS + 3))
    }
    assert 1 not in opened, "it is remembered"


def test_a_reader_that_stays_keeps_no_more_commits_than_it_may(long_log, monkeypatch):
    monkeypatch.setattr(delta_log, "KEPT_COMMITS", 50)
    log = long_log.log()
    assert sum(1 for _ in log.readable()) == COMMITS
    assert len(log._commits) == 50


def test_a_restore_is_told_to_a_writer_that_others_have_written_after(tmp_path):
    log = WrittenLog(tmp_path / "table")
    for version in range(3):
        log.ours(batch(version))
    log.restore(version=1, back_to=1)
    log.ours(replace(batch(4), base=3))
    ledger = Ledger(log.log(), group="g", member="main")
    state = ledger.read()
    assert [ledger.was_restored(after=version, up_to=state.version) for version in (1, 2, 3, 4)] == [
        True,
        True,
        False,
        False,
    ]
