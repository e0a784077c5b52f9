"""The budget for one outage: what is tried again, how long, and what is told of it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_jobs.batches.ingestion import RETRY_SECONDS, Ingestion
from spark_jobs.batches.job import batch_events, drain_batches
from spark_jobs.batches.run_control import Retries, result_of
from spark_jobs.writing.failures import raised_on_executor
from stream_assets import RunLimits
from stream_assets.options import StreamConfig
from stream_consumers.errors import (
    BrokerUnavailableError,
    InvalidOptionError,
    SparkEndedError,
    StreamAssetsError,
    StreamRemovedError,
    Transient,
    WriteError,
)
from tests.support.dagster_runs import declare
from tests.support.scripted_jobs import ScriptedJob, values_of

DOWN = BrokerUnavailableError("kafka://a does not answer", remedy="Check it.", partition=3)


class Time:
    """A clock that only pauses move; it remembers them."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        self.told: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def retries(self, seconds: float) -> Retries:
        return Retries(seconds, sleep=self.sleep, clock=lambda: self.now)

    def call(self, retries: Retries, step: Callable[[], None]) -> None:
        result_of(retries.call(step), self.told.append)


def fail(error: StreamAssetsError = DOWN) -> None:
    raise error


def test_a_pause_is_as_long_as_a_server_asks_for_within_the_budget() -> None:
    time = Time()
    with pytest.raises(BrokerUnavailableError):
        time.call(time.retries(100), lambda: fail(BrokerUnavailableError("busy", remedy="Wait.", retry_after=70)))
    assert time.pauses == [70, 30]


def test_pauses_grow_and_the_last_try_is_at_the_end_of_the_budget() -> None:
    time = Time()
    with pytest.raises(BrokerUnavailableError) as caught:
        time.call(time.retries(300), fail)
    assert time.pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 57]
    assert sum(time.pauses) == 300
    assert str(caught.value) == (
        "kafka://a does not answer, still after 10 more tries in 300 s (partition=3). Check it."
    )
    assert caught.value.__cause__ is DOWN
    assert time.told[2] == (
        "kafka://a does not answer (partition=3). Check it. It is tried again in 4 s; tried for 3 s so far, "
        "of 300 s at most"
    )


def test_what_does_not_go_by_itself_is_not_tried_again() -> None:
    time = Time()
    wrong = InvalidOptionError("no such thing", remedy="Correct it.")
    with pytest.raises(InvalidOptionError) as caught:
        time.call(time.retries(300), lambda: fail(wrong))
    assert caught.value is wrong
    assert time.pauses == []


def test_without_a_budget_the_first_error_is_the_answer() -> None:
    time = Time()
    with pytest.raises(BrokerUnavailableError) as caught:
        time.call(time.retries(0), fail)
    assert caught.value is DOWN
    assert time.pauses == []


def test_a_success_gives_the_budget_back_but_a_step_alone_does_not() -> None:
    time = Time()
    retries = time.retries(10)
    failures = iter([DOWN, None] * 50)

    def step() -> None:
        error = next(failures)
        if error is not None:
            raise error

    def plan_in_vain() -> None:
        for _ in range(50):
            time.call(retries, step)

    with pytest.raises(BrokerUnavailableError, match="in 10 s"):
        plan_in_vain()
    retries.reset()
    failures = iter([DOWN, DOWN, None])
    time.call(retries, step)
    assert time.pauses[-2:] == [1, 2]


class Scripted(ScriptedJob):
    """A job whose steps fail as often as a test says."""

    def __init__(self, time: Time, **failures: int) -> None:
        super().__init__(time.retries(300))
        self._failures = Counter(failures)
        self.steps: list[str] = []

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if self._failures[name] > 0:
            self._failures[name] -= 1
            raise DOWN

    def next(self) -> str | None:
        self._step("plan")
        return None if "finish" in self.steps else "a batch"

    def put(self, value: str) -> str:
        self._step("write")
        return value

    def finish(self, written: object) -> dict[Any, int]:
        self._step("finish")
        return {}


def test_a_job_plans_anew_after_a_write_that_failed_and_reports_a_batch_once() -> None:
    time = Time()
    job = Scripted(time, plan=1, write=1, finish=2)
    assert values_of(batch_events(job)) == ["a batch"]
    assert job.steps == ["plan", "plan", "write", "plan", "write", "finish", "finish", "finish", "plan"]
    assert time.pauses == [1, 2, 4, 8]


@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize("step", ["plan", "write"])
def test_a_signal_during_a_pause_ends_a_run_that_has_nothing_in_hand(step: str) -> None:
    time = Time()
    time.sleep = lambda seconds: os.kill(os.getpid(), signal.SIGINT)  # type: ignore[method-assign]
    claims = Scripted(time, **{step: 2})
    # Where entries are claimed, signals are held while a batch is planned, too.
    claims.claims_while_planning = True
    with pytest.raises(KeyboardInterrupt) as caught:
        next(drain_batches(claims))
    assert claims.steps == ["plan", "write"][: 1 + (step == "write")]
    assert "pause" in [frame.name for frame in caught.traceback], "it came in the pause, not behind it"


@pytest.mark.usefixtures("default_handlers")
def test_a_signal_while_the_broker_is_told_of_a_batch_waits_for_its_report() -> None:
    time = Time()
    time.sleep = lambda seconds: os.kill(os.getpid(), signal.SIGINT)  # type: ignore[method-assign]
    reports = drain_batches(Scripted(time, finish=1))
    assert next(reports).entry == "a batch"
    with pytest.raises(KeyboardInterrupt):
        next(reports)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("stream_consumers.errors.BrokerUnavailableError: nothing came", BrokerUnavailableError),
        ("stream_consumers.errors.StreamRemovedError: orders/0 is gone", StreamRemovedError),
        ("stream_consumers.errors.Transient: what is this", WriteError),
        ("OSError: the disk", WriteError),
    ],
)
def test_what_an_executor_raised_keeps_its_type(reason: str, kind: type[StreamAssetsError]) -> None:
    assert raised_on_executor(reason) is kind


def test_a_spark_that_has_ended_is_not_waited_for() -> None:
    """Its session does not come back within the run, but a runner may run again."""
    error = SparkEndedError("the server has ended", remedy="Run again.")
    assert isinstance(error, Transient)
    with pytest.raises(SparkEndedError, match=r"the server has ended\. Run again\.\Z"):
        next(iter(Retries(300).pause(error)))


def test_the_budget_is_five_minutes_unless_the_asset_or_the_run_says_otherwise() -> None:
    assert RETRY_SECONDS == 300
    assert Ingestion("lakehouse", "t").retry_seconds == 300
    asset = declare(Path("t"), limits=RunLimits(retry_seconds=7.0)).declared
    assert asset.configured(StreamConfig(), None).ingestion.retry_seconds == 7
    assert asset.configured(StreamConfig(retry_seconds=0), None).ingestion.retry_seconds == 0
    with pytest.raises(InvalidOptionError, match="retry_seconds=-1 is out of range"):
        Ingestion("lakehouse", "t", retry_seconds=-1)
