"""Reading the ledger does not walk the log."""

import pytest

from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.entries import LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import Ledger
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
