"""When runs end, pause, stay and try again: signals, budgets, the size of batches, and runs that stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import RETRY_SECONDS, Ingestion
from spark_jobs.batches.job import batch_events, drain_batches
from spark_jobs.batches.run_control import MIN_RECORDS, BatchSizer, DeferredSignals, Retries, result_of
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
from stream_consumers.options import Limits
from tests.support.command_line import run
from tests.support.dagster_runs import declare
from tests.support.ingesting import drain, entries, ingestion
from tests.support.killed_runs import logs, running
from tests.support.polling import until
from tests.support.scripted_jobs import ScriptedJob, values_of
from tests.support.settings import ROOT
from tests.support.streams import assert_each_once, sequences_in_table, write_stream

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
    assert (caught.value.facts, caught.value.__cause__) == ({"partition": 3}, DOWN)
    assert "still after 10 more tries in 300 s" in str(caught.value)
    assert "tried again in 4 s; tried for 3 s so far, of 300 s at most" in time.told[2]


@pytest.mark.parametrize(
    ("budget", "error"), [(300, InvalidOptionError("no such thing", remedy="Correct it.")), (0, DOWN)]
)
def test_a_lasting_error_is_not_tried_again_nor_is_any_without_a_budget(budget: int, error: StreamAssetsError) -> None:
    time = Time()
    with pytest.raises(type(error)) as caught:
        time.call(time.retries(budget), lambda: fail(error))
    assert caught.value is error
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

    with pytest.raises(BrokerUnavailableError):
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
    with pytest.raises(SparkEndedError) as raised:
        next(iter(Retries(300).pause(error)))
    assert raised.value is error


def test_the_budget_is_five_minutes_unless_the_asset_or_the_run_says_otherwise() -> None:
    assert RETRY_SECONDS == 300
    assert Ingestion("lakehouse", "t").retry_seconds == 300
    asset = declare(Path("t"), limits=RunLimits(retry_seconds=7.0)).declared
    assert asset.configured(StreamConfig(), None).ingestion.retry_seconds == 7
    assert asset.configured(StreamConfig(retry_seconds=0), None).ingestion.retry_seconds == 0
    with pytest.raises(InvalidOptionError, match="retry_seconds=-1"):
        Ingestion("lakehouse", "t", retry_seconds=-1)


LIMITS = Limits(max_records=1_000_000)


@given(st.integers(1, 10_000_000), st.lists(st.tuples(st.integers(0, 2_000_000), st.floats(0, 1e6)), max_size=20))
def test_it_stays_within_the_limits(most: int, batches: list[tuple[int, float]]) -> None:
    sizer = BatchSizer(Limits(max_records=most, max_bytes=77))
    for records, seconds in batches:
        sizer.adapt(records, seconds)
        assert min(MIN_RECORDS, most) <= sizer.limits.max_records <= most
        assert sizer.limits.max_bytes == 77


@given(st.floats(100, 100_000))
def test_batches_come_to_take_the_target_time(speed: float) -> None:
    """At a constant speed of so many messages a second, and with more to read than a batch holds."""
    sizer = BatchSizer(LIMITS, target_seconds=20)
    for _ in range(10):
        sizer.adapt(sizer.limits.max_records, sizer.limits.max_records / speed)
    wanted = min(LIMITS.max_records, 20 * speed)
    assert 0.9 * wanted <= sizer.limits.max_records <= 1.1 * wanted


def test_small_batches_say_nothing_of_large_ones() -> None:
    sizer = BatchSizer(LIMITS, target_seconds=20)
    sizer.adapt(1_000_000, 80)
    assert sizer.limits.max_records == 250_000
    for _ in range(20):
        sizer.adapt(10, 0.1)
    assert sizer.limits.max_records == 250_000


def test_where_the_bytes_are_the_limit_slow_batches_make_the_next_ones_smaller() -> None:
    sizer = BatchSizer(LIMITS, target_seconds=20)
    for expected in (250_000, 62_500, 15_625, 3_906, 1_953):
        sizer.adapt(5_000, 40)
        assert sizer.limits.max_records == expected


def test_one_small_batch_that_was_slow_says_little() -> None:
    sizer = BatchSizer(LIMITS, target_seconds=20)
    sizer.adapt(1, 60)
    assert sizer.limits.max_records == LIMITS.max_records // 4


def interrupt(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_waits_until_the_batch_is_finished(number: signal.Signals, error: type[BaseException]) -> None:
    done: list[str] = []

    def work() -> None:
        with DeferredSignals() as signals:
            interrupt(number)
            assert signals.is_pending
            done.append("the batch")

    with pytest.raises(error) as caught:
        work()
    assert done == ["the batch"]
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 143


@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize("again", [lambda: interrupt(signal.SIGTERM), lambda: sleep(60)])
def test_neither_a_second_signal_nor_the_deadline_waits(again: Callable[[], None]) -> None:
    done: list[str] = []

    def work() -> None:
        with DeferredSignals(0.2):
            interrupt(signal.SIGTERM)
            again()
            done.append("never")

    with pytest.raises(SystemExit):
        work()
    assert done == []


@pytest.mark.usefixtures("default_handlers")
def test_an_error_of_the_batch_does_not_take_the_place_of_a_signal() -> None:
    def work() -> None:
        with DeferredSignals():
            interrupt(signal.SIGTERM)
            raise ValueError

    with pytest.raises(SystemExit):
        work()


@pytest.fixture
def handle() -> Iterator[Callable[..., None]]:
    """Sets handlers of signals, which are put back after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def set_handlers(handler: Any, *numbers: int) -> None:
        for number in numbers:
            signal.signal(number, handler)

    yield set_handlers
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_handler_of_ones_own_is_called_and_an_ignored_signal_stays_ignored(handle: Callable[..., None]) -> None:
    called: list[int] = []
    handle(lambda number, frame: called.append(number), signal.SIGTERM)
    handle(signal.SIG_IGN, signal.SIGINT)
    with DeferredSignals() as signals:
        interrupt(signal.SIGINT)
        assert not signals.is_pending
        interrupt(signal.SIGTERM)
        assert called == []
    assert called == [signal.SIGTERM]


def interrupting(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, *, at: int) -> None:
    """A signal comes right behind the change of a handler: the one of this number."""
    change = signal.signal
    changes: list[int] = []

    def changed(of: int, handler: Any) -> Any:
        before = change(of, handler)
        changes.append(of)
        if len(changes) == at:
            interrupt(number)
        return before

    monkeypatch.setattr("spark_jobs.batches.run_control.signal.signal", changed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_signal_while_handlers_change_counts_once(
    monkeypatch: pytest.MonkeyPatch, handle: Callable[..., None], number: signal.Signals, at: int
) -> None:
    called: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        called.append(number)

    handle(own, signal.SIGINT, signal.SIGTERM)
    alarm, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    with monkeypatch.context() as patched:
        interrupting(patched, number, at=at)
        with DeferredSignals():
            pass
    assert called == [number]
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == [own, own, alarm]
    assert signal.getitimer(signal.ITIMER_REAL) == pytest.approx(timer, abs=5)


def test_what_a_handler_raises_before_it_is_held_leaves_nothing_held(
    monkeypatch: pytest.MonkeyPatch, handle: Callable[..., None]
) -> None:
    def own(number: int, frame: FrameType | None) -> None:
        raise SystemExit(143)

    handle(own, signal.SIGTERM)
    other = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        interrupting(patched, signal.SIGTERM, at=1)
        with pytest.raises(SystemExit):
            DeferredSignals().__enter__()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == (own, other)


def test_in_another_thread_nothing_is_held() -> None:
    found: list[object] = []

    def work() -> None:
        with DeferredSignals():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize(
    ("step", "code", "batches"),
    [("planned", -signal.SIGTERM, 1), ("writing", 128 + signal.SIGTERM, 2), ("verified", 128 + signal.SIGTERM, 2)],
)
def test_a_run_that_is_asked_to_end_finishes_its_batch_and_tells_of_it(
    spark: SparkSession, server: str, folder: Path, step: str, code: int, batches: int
) -> None:
    url, table = write_stream(folder / "orders.ss", 100, malformed=frozenset({5})), folder / "t"
    words = (f"{step}@3!SIGTERM", "lakehouse", "resumable", server)
    with running(url, table, *words, records=20) as one:
        assert one.wait() == code, logs(table)
    written = [entry for entry in entries(ingestion(table)) if entry.kind == "batch"]
    assert len(written) == logs(table).count("report {") == batches
    drain(spark, url, ingestion(table))
    assert_each_once(folder / "orders.ss", table)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ingest_that_stays_ends_and_prints_what_it_wrote(server: str, folder: Path, number: signal.Signals) -> None:
    """In a process of its own: a signal that comes too late would end the tests."""
    url, table = write_stream(folder / "orders.ss", 10), folder / "t"
    words = ["ingest", "--source", url, "--table", str(table), "--linger", "3600", "--json", "--remote", server]
    words += ["--decode", "json", "--schema", "id BIGINT, user STRING"]
    with Path(folder / "out").open("wb") as output, Path(folder / "errors").open("wb") as errors:
        command = [sys.executable, "-m", "stream_assets.cli.main", *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=errors)
    try:
        until((table / "_delta_log" / f"{1:020d}.json").exists, seconds=600, what="the table")
        until(lambda: sum(sequences_in_table(table).values()) == 10, seconds=600, what="the rows")
        write_stream(folder / "orders.ss", 10)
        until(lambda: sum(sequences_in_table(table).values()) == 20, seconds=600, what="the rows that came later")
        process.send_signal(number)
        assert process.wait(600) == 128 + number, (folder / "errors").read_text()
    finally:
        process.kill()
        process.wait()
    assert '"rows": 10' in (folder / "out").read_text()
    assert "Traceback" not in (folder / "errors").read_text()
    assert_each_once(folder / "orders.ss", table)


def test_a_pipe_has_nothing_to_stay_for(tmp_path: Path) -> None:
    done = run("ingest", "--source", "stdio:///orders", "--table", tmp_path / "t", "--linger", "5", text="1\n")
    assert done.exit_code == 1
    assert "stdio:///orders is read to its end first, so --linger has no effect. Leave it out." in done.stderr
