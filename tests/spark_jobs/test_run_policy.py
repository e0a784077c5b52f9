"""When a run is wanted, decided from values alone, as for any orchestrator."""

from __future__ import annotations

import pytest

from spark_jobs.lag import Measurement
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.run_policy import (
    MAX_BACKOFF_SECONDS,
    MAX_BROKER_WAIT_SECONDS,
    Decision,
    PastRun,
    PastRuns,
    RunPolicy,
    RunStatus,
    Waits,
    decide,
)
from stream_consumers.batches import Extent
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Shard

NOW = 1_000_000.0
SHARDS = (Shard("orders", 0), Shard("orders", 1))


def measured(*lag: int, is_exact: bool = True) -> Measurement:
    """A lag of these messages in as many shards."""
    shards = SHARDS[: len(lag)]
    extents = {shard: Extent(0, 100) for shard in shards}
    return Measurement(LedgerState(3), extents, dict(zip(shards, lag, strict=True)), is_exact)


def ended(status: RunStatus, ago: float, *, id: str = "a") -> PastRun:
    """A run that ended so many seconds ago."""
    return PastRun(id, status, NOW - ago - 5, NOW - ago)


def decided(found: Measurement, *past: PastRun, waits: Waits | None = None, **policy: float) -> Decision:
    """The decision after these runs."""
    in_flight = [run for run in past if run.status is RunStatus.IN_FLIGHT]
    runs = PastRuns(NOW, in_flight, [run for run in past if run not in in_flight])
    return decide(found, runs, (waits or Waits()).after(found, NOW), RunPolicy(**policy))  # type: ignore[arg-type]


def test_a_run_is_wanted_as_soon_as_there_is_a_message() -> None:
    assert decided(measured(1)) == Decision(1)
    assert decided(measured(0)).runs == 0
    assert decided(measured(0, is_exact=False)).runs == 1
    assert decided(measured(), keeps_alive=True).runs == 1


def test_messages_wait_for_others_and_no_longer_than_allowed() -> None:
    found = measured(3)
    waiting = decided(found, min_lag=10, max_wait_seconds=60)
    assert (waiting.runs, waiting.until) == (0, NOW + 60)
    since = Waits(waiting_since=NOW - 59)
    assert decided(found, waits=since, min_lag=10, max_wait_seconds=60).until == NOW + 1
    assert decided(found, waits=Waits(waiting_since=NOW - 60), min_lag=10, max_wait_seconds=60).runs == 1
    assert decided(measured(10), min_lag=10, max_wait_seconds=60).runs == 1


def test_a_run_in_flight_delays_the_next_one() -> None:
    running = PastRun("a", RunStatus.IN_FLIGHT, NOW - 5)
    assert decided(measured(3), running).runs == 0
    assert decided(measured(3, 3), running, max_runs=3).runs == 2
    assert decided(measured(3, 0), running, max_runs=3).runs == 1


@pytest.mark.parametrize(("failures", "pause"), [(1, 0), (2, 30), (3, 60), (40, MAX_BACKOFF_SECONDS)])
def test_pauses_grow_with_the_failures(failures: int, pause: float) -> None:
    def past(ago: float) -> list[PastRun]:
        return [ended(RunStatus.FAILED, ago + number) for number in range(failures)]

    assert decided(measured(3), *past(pause + 0.1)).runs == 1
    if pause:
        waiting = decided(measured(3), *past(pause - 1))
        assert (waiting.runs, waiting.until) == (0, NOW + 1)
        assert decided(measured(3), ended(RunStatus.SUCCEEDED, 0), *past(pause - 1)).runs == 1


def test_a_cancelled_run_is_a_pause_until_another_one_is_started() -> None:
    cancelled = ended(RunStatus.CANCELLED, 20)
    waiting = decided(measured(3), cancelled, after_cancel_seconds=120)
    assert (waiting.runs, waiting.until, waiting.cancelled) == (0, NOW + 100, cancelled)
    later = PastRun("b", RunStatus.SUCCEEDED, NOW - 10, NOW - 5)
    assert decided(measured(3), cancelled, later, after_cancel_seconds=120).runs == 1


def test_a_silent_broker_is_asked_at_growing_intervals() -> None:
    waits, now, pauses = Waits(number=7), NOW, []
    for _ in range(8):
        waits = waits.after_silence(now)
        pauses.append(waits.ask_at - now)
        now = max(waits.ask_at, now + 5)
    assert pauses == [0, 5, 10, 20, 40, MAX_BROKER_WAIT_SECONDS, MAX_BROKER_WAIT_SECONDS, MAX_BROKER_WAIT_SECONDS]
    assert waits.after(measured(0), now).silent_since is None


def test_a_wrong_policy_is_refused() -> None:
    with pytest.raises(InvalidOptionError):
        RunPolicy(max_wait_seconds=-1)
    with pytest.raises(InvalidOptionError):
        RunPolicy(min_lag=5).for_runs(60)
