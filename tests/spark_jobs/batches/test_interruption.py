"""SIGINT and SIGTERM while a batch is in hand: real signals, to this process and to others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches.run_control import HeldSignals
from tests.support.command_line import run
from tests.support.ingesting import drain, entries, ingestion
from tests.support.killed_runs import logs, running
from tests.support.polling import until
from tests.support.settings import ROOT
from tests.support.streams import assert_each_once, sequences_in_table, write_stream


def interrupt(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


pytestmark = pytest.mark.usefixtures("default_handlers")


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_waits_until_the_batch_is_finished(number: signal.Signals, error: type[BaseException]) -> None:
    done: list[str] = []

    def work() -> None:
        with HeldSignals() as held:
            interrupt(number)
            assert held.is_pending
            done.append("the batch")

    with pytest.raises(error) as caught:
        work()
    assert done == ["the batch"]
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 143


@pytest.mark.parametrize("again", [lambda: interrupt(signal.SIGTERM), lambda: time.sleep(60)])
def test_neither_a_second_signal_nor_the_deadline_waits(again: Callable[[], None]) -> None:
    done: list[str] = []

    def work() -> None:
        with HeldSignals(0.2):
            interrupt(signal.SIGTERM)
            again()
            done.append("never")

    with pytest.raises(SystemExit):
        work()
    assert done == []


def test_an_error_of_the_batch_does_not_take_the_place_of_a_signal() -> None:
    def work() -> None:
        with HeldSignals():
            interrupt(signal.SIGTERM)
            raise ValueError

    with pytest.raises(SystemExit):
        work()


def test_a_handler_of_ones_own_is_called_and_an_ignored_signal_stays_ignored() -> None:
    called: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        called.append(number)

    before = signal.signal(signal.SIGTERM, own), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with HeldSignals() as held:
            interrupt(signal.SIGINT)
            assert not held.is_pending
            interrupt(signal.SIGTERM)
            assert called == []
        assert called == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


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
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, at: int
) -> None:
    called: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        called.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(one, own) for one in numbers]
    alarm, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    try:
        with monkeypatch.context() as patched:
            interrupting(patched, number, at=at)
            with HeldSignals():
                pass
        assert called == [number]
        assert [signal.getsignal(one) for one in (*numbers, signal.SIGALRM)] == [own, own, alarm]
        assert signal.getitimer(signal.ITIMER_REAL) == pytest.approx(timer, abs=5)
    finally:
        for one, handler in zip(numbers, before, strict=True):
            signal.signal(one, handler)


def test_what_a_handler_raises_before_it_is_held_leaves_nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(number: int, frame: FrameType | None) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, own), signal.getsignal(signal.SIGINT)
    try:
        with monkeypatch.context() as patched:
            interrupting(patched, signal.SIGTERM, at=1)
            with pytest.raises(SystemExit):
                HeldSignals().__enter__()
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == (own, before[1])
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


def test_in_another_thread_nothing_is_held() -> None:
    found: list[object] = []

    def work() -> None:
        with HeldSignals():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.kill
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
@pytest.mark.spark
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
    assert "Leave --linger out" in done.stderr
