"""What a trigger concludes from the ledger about the runs that it requested."""

from __future__ import annotations

from spark_jobs.lag import Measurement
from spark_jobs.ledger.entries import ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.run_policy import RunStatus
from stream_airflow.requested_runs import RequestedRuns
from stream_consumers.batches import Extent
from stream_consumers.messages import Shard
from tests.support.written_log import made_entry

SHARD = Shard("orders", 0)
NOW = 1_000_000.0
PATIENCE = 300.0


def at(position: int | None, end: int) -> Measurement:
    """A group at a position in a stream with this end; ``None`` if it has written nothing."""
    if position is None:
        return Measurement(LedgerState(-1), {SHARD: Extent(0, end)}, {SHARD: end}, is_exact=True)
    shards = {SHARD: ShardState(Intervals.of((MIN_SEQUENCE, position)), origin=0)}
    state = LedgerState(1, newest=made_entry(1, -1), shards=shards)
    return Measurement(state, {SHARD: Extent(0, end)}, {SHARD: end - position}, is_exact=True)


def after(requested: RequestedRuns, found: Measurement, seconds: float) -> RequestedRuns:
    return requested.after(found, NOW + seconds, patience_seconds=PATIENCE)


def statuses(requested: RequestedRuns) -> list[RunStatus]:
    return [run.status for run in requested.finished]


def test_a_run_is_in_flight_until_it_has_read_what_was_there() -> None:
    requested = RequestedRuns().requested(at(None, 10), NOW)
    assert len(requested.past(NOW).in_flight) == 1
    for position in (0, 4, 9):
        assert after(requested, at(position, 30), 5).current is not None
    for position, end in ((10, 30), (12, 30), (10, 10)):
        done = after(requested, at(position, end), 5)
        assert done.current is None
        assert statuses(done) == [RunStatus.SUCCEEDED]


def test_a_run_that_writes_nothing_for_long_has_failed() -> None:
    requested = RequestedRuns().requested(at(0, 10), NOW)
    assert after(requested, at(0, 20), PATIENCE - 1).current is not None
    assert statuses(after(requested, at(0, 20), PATIENCE)) == [RunStatus.FAILED]


def test_each_batch_begins_the_patience_again() -> None:
    requested = after(RequestedRuns().requested(at(0, 10), NOW), at(5, 20), PATIENCE - 1)
    assert after(requested, at(5, 20), 2 * PATIENCE - 2).current is not None
    assert statuses(after(requested, at(5, 20), 2 * PATIENCE - 1)) == [RunStatus.FAILED]


def test_a_clock_that_is_set_back_ends_no_run() -> None:
    requested = after(RequestedRuns().requested(at(0, 10), NOW), at(0, 10), -1000)
    assert after(requested, at(0, 10), -1000 + PATIENCE - 1).current is not None
    assert after(requested, at(0, 10), -1000 + PATIENCE).current is None


def test_members_that_claim_entries_have_done_something_with_any_batch() -> None:
    def claimed(number: int) -> Measurement:
        state = LedgerState(number, newest=made_entry(number, number))
        return Measurement(state, {SHARD: Extent(0, 10)}, {SHARD: 3}, is_exact=True)

    requested = RequestedRuns().requested(claimed(1), NOW)
    assert after(requested, claimed(1), 5).current is not None
    assert statuses(after(requested, claimed(2), 5)) == [RunStatus.SUCCEEDED]
