"""The budget for one outage: what is tried again, how long, and what is told of it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_jobs.batches.ingestion import RETRY_SECONDS, Ingestion
from spark_jobs.batches.job import BatchJob, drain_batches
from spark_jobs.batches.linger import Linger
from spark_jobs.batches.pace import Pace
from spark_jobs.batches.retries import Retries
from spark_jobs.run_ingestion import _claimed_reports
from spark_jobs.writing.failures import raised_on_executor
from stream_assets.cli.main import main
from stream_assets.config import StreamConfig
from stream_consumers.errors import (
    BrokerUnavailableError,
    InvalidOptionError,
    SparkEndedError,
    StreamAssetsError,
    StreamRemovedError,
    Transient,
    WriteError,
)
from stream_consumers.options import Limits
from tests.support.dagster_runs import declare

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
        return Retries(seconds, on_wait=self.told.append, sleep=self.sleep, clock=lambda: self.now)


def fail(error: StreamAssetsError = DOWN) -> None:
    raise error


def test_pauses_grow_and_the_last_try_is_at_the_end_of_the_budget() -> None:
    time = Time()
    with pytest.raises(BrokerUnavailableError) as caught:
        time.retries(300).call(fail)
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
        time.retries(300).call(lambda: fail(wrong))
    assert caught.value is wrong
    assert time.pauses == []


def test_without_a_budget_the_first_error_is_the_answer() -> None:
    time = Time()
    with pytest.raises(BrokerUnavailableError) as caught:
        time.retries(0).call(fail)
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
            retries.call(step)

    with pytest.raises(BrokerUnavailableError, match="in 10 s"):
        plan_in_vain()
    retries.reset()
    failures = iter([DOWN, DOWN, None])
    retries.call(step)
    assert time.pauses[-2:] == [1, 2]


def test_an_attempt_that_yields_begins_anew_behind_what_it_yielded() -> None:
    time = Time()
    begun: list[int] = []

    def attempt(count: int) -> Iterator[int]:
        begun.append(count)
        for number in range(count, 6):
            if number in (2, 4) and len(begun) <= number // 2:
                raise DOWN
            yield number

    assert list(time.retries(300).iterate(attempt)) == [0, 1, 2, 3, 4, 5]
    assert begun == [0, 2, 4]
    assert time.pauses == [1, 1], "an item gives the budget back"


class Scripted(BatchJob):
    """A job whose steps fail as they are told; no Spark."""

    def __init__(self, time: Time, **failures: int) -> None:
        self._retries = time.retries(300)
        self._ingestion: Any = SimpleNamespace(table="t")
        self._failures = Counter(failures)
        self._pace = Pace(Limits())
        self._telemetry: Any = SimpleNamespace(planning=lambda: None, written=lambda report: None)
        self._ledger = SimpleNamespace(log=SimpleNamespace(deleted_rows=lambda commit: 0))
        self.steps: list[str] = []

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if self._failures[name] > 0:
            self._failures[name] -= 1
            raise DOWN

    def _next_batch(self) -> Any:
        self._step("plan")
        return None if "finish" in self.steps else SimpleNamespace(plan=SimpleNamespace(records=5))

    def _write(self, batch: object) -> Any:
        self._step("write")
        commit = SimpleNamespace(version=1, output_rows=5, output_bytes=50)
        return SimpleNamespace(entry=SimpleNamespace(dead=0), commit=commit, messages={})

    def _finish(self, batch: object) -> dict[Any, int]:
        self._step("finish")
        return {}


def test_a_job_plans_anew_after_a_write_that_failed_and_reports_a_batch_once() -> None:
    time = Time()
    job = Scripted(time, plan=1, write=1, finish=2)
    assert [report.rows for report in drain_batches(job)] == [5]
    assert job.steps == ["plan", "plan", "write", "plan", "write", "finish", "finish", "finish", "plan"]
    assert time.pauses == [1, 2, 4, 8]


@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize("step", ["plan", "write"])
def test_a_signal_during_a_pause_ends_a_run_that_has_nothing_in_hand(step: str) -> None:
    time = Time()
    time.sleep = lambda seconds: os.kill(os.getpid(), signal.SIGINT)  # type: ignore[method-assign]
    claims: Any = Scripted(time, **{step: 2})
    # Where entries are claimed, signals are held while a batch is planned, too.
    reports = _claimed_reports(claims, Ingestion("lakehouse", "t"), None, Linger(), lambda: None)
    with pytest.raises(KeyboardInterrupt) as caught:
        next(reports)
    assert claims.steps == ["plan", "write"][: 1 + (step == "write")]
    assert "_wait" in [frame.name for frame in caught.traceback], "it came in the pause, not behind it"


@pytest.mark.usefixtures("default_handlers")
def test_a_signal_while_the_broker_is_told_of_a_batch_waits_for_its_report() -> None:
    time = Time()
    time.sleep = lambda seconds: os.kill(os.getpid(), signal.SIGINT)  # type: ignore[method-assign]
    reports = drain_batches(Scripted(time, finish=1))
    assert next(reports).rows == 5
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
        Retries(300, on_wait=pytest.fail).wait(error)


def test_the_budget_is_five_minutes_unless_the_asset_or_the_run_says_otherwise() -> None:
    assert RETRY_SECONDS == 300
    assert Ingestion("lakehouse", "t").retry_seconds == 300
    assert StreamConfig().configured(Ingestion("lakehouse", "t", retry_seconds=7)).retry_seconds == 7
    assert StreamConfig(retry_seconds=0).configured(Ingestion("lakehouse", "t")).retry_seconds == 0
    with pytest.raises(InvalidOptionError, match="retry_seconds=-1 is out of range"):
        Ingestion("lakehouse", "t", retry_seconds=-1)


def test_the_asset_takes_the_budget(tmp_path: Path) -> None:
    assert declare(tmp_path, retry_seconds=12.5).ingestion.retry_seconds == 12.5


@pytest.mark.parametrize("command", ["ingest", "replay", "rewind", "seek"])
def test_each_command_that_writes_has_the_option(command: str) -> None:
    (option,) = [parameter for parameter in main.commands[command].params if parameter.name == "retry_seconds"]
    assert option.default == RETRY_SECONDS
