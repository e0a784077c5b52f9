"""When a drain ends and what it tells of first, without Spark."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_jobs import run_ingestion
from spark_jobs.batches.ingestion import CONTINUES, Ingestion, PlanAgain
from spark_jobs.batches.job import batch_events, drain_batches, reports_of
from spark_jobs.batches.run_control import IdleWait
from spark_jobs.ledger.entries import ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.run_ingestion import SharedDrain
from stream_consumers.batches import BatchSource
from stream_consumers.create import StreamSource
from stream_consumers.errors import DataLossError
from stream_consumers.memory import MemoryBroker, forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import reports_with
from tests.support.scripted_jobs import ScriptedJob, values_of

pytestmark = pytest.mark.usefixtures("default_handlers")
ZERO, ONE = Shard("orders", 0), Shard("orders", 1)


class Jobs(ScriptedJob):
    """A replay of two batches; the messages of the third are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Any] = ["first", "second", DataLossError("gone", remedy="None.")]

    def next(self) -> Any:
        planned = self.left.pop(0)
        if isinstance(planned, Exception):
            raise planned
        return planned


def test_batches_of_a_replay_that_are_in_the_table_are_told_of_before_an_error() -> None:
    told: list[Any] = []

    def tell() -> None:
        for report in drain_batches(Jobs()):
            told.append(report.entry)

    with pytest.raises(DataLossError):
        tell()
    assert told == ["first", "second"]


@pytest.mark.parametrize("reason", PlanAgain)
def test_a_batch_that_is_not_in_the_table_is_planned_again(reason: PlanAgain) -> None:
    job = Jobs()
    job.left = ["first", reason, "second", None]
    assert values_of(batch_events(job)) == ["first", "second"]


NO_SPARK: Any = SimpleNamespace(interruptAll=lambda: None)


class Member:
    """A member that has one shard."""

    def shards(self) -> Set[Shard]:
        return {ZERO}


@pytest.mark.parametrize(("own", "other", "is_over"), [(10, 10, True), (4, 10, True), (10, 4, False), (4, 4, False)])
def test_a_member_waits_for_the_shards_of_others_and_not_for_those_it_has_drained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, own: int, other: int, is_over: bool
) -> None:
    """Somebody may have moved them back since."""
    positions = {shard: ShardState(Intervals.of((MIN_SEQUENCE, at))) for shard, at in ((ZERO, own), (ONE, other))}
    monkeypatch.setattr(Ledger, "read", lambda ledger: LedgerState(1, positions))
    source = StreamSource(StreamUrl.parse("memory://drains/orders"))
    member: Any = Member()
    drain = SharedDrain(NO_SPARK, source, Ingestion("g", str(folder / "t")), member, make_job=pytest.fail)
    drain._done = {ZERO}
    assert drain._is_reached({ZERO: 10, ONE: 10}) is is_over


class Follower(ScriptedJob):
    """The job of one shard of a memory stream, without Spark: each batch is what came since the last one."""

    def __init__(self, source: BatchSource, shard: Shard, began: Callable[[], object]) -> None:
        super().__init__()
        self._source = source
        self._shard = shard
        self._began = began
        self._at = 0

    def next(self) -> Any:
        end = self._source.extents()[self._shard].end
        return end if end > self._at else None

    def put(self, value: int) -> Any:
        self._began()
        before, self._at = self._at, value
        return str(self._shard), before, value


class Both(Member):
    """A member that has both shards."""

    def shards(self) -> Set[Shard]:
        return {ZERO, ONE}

    def wait(self, seconds: float) -> bool:
        return True


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    url = StreamUrl.parse("memory://members/orders")
    made = memory_broker(url)
    for shard in (ZERO, ONE):
        made.append(shard, b"{}")
    yield made
    forget_memory_broker(url)


def member_of(folder: Path, *, idle_wait: float, began: Callable[[], object] = lambda: None) -> SharedDrain:
    made: list[Shard] = []

    def make_job(source: BatchSource, ingestion: Ingestion) -> Any:
        assert ingestion.shard is not None
        made.append(ingestion.shard)
        assert len(made) == len(set(made)), "a shard keeps its job while the member stays"
        return Follower(source, ingestion.shard, began)

    member: Any = Both()
    source = StreamSource(StreamUrl.parse("memory://members/orders"))
    what = Ingestion("g", str(folder / "t"))
    return SharedDrain(NO_SPARK, source, what, member, make_job, idle_wait=IdleWait(idle_wait), max_batches=5)


def test_a_member_that_stays_follows_its_shards(folder: Path, broker: MemoryBroker) -> None:
    arrivals = [ONE, ZERO, ONE]

    found: list[Any] = []

    def arrive() -> None:
        # One after the other, since each shard is drained in a thread of its own.
        if arrivals and len(found) + len(arrivals) == 5 and drain._shards() <= drain._done:
            broker.append(arrivals.pop(0), b"{}")

    drain = member_of(folder, idle_wait=600.0)
    for report in reports_with(drain.events(), arrive):
        found.append(report.entry)
    assert sorted(found[:2]) == [("orders/0", 0, 1), ("orders/1", 0, 1)]
    assert found[2:] == [("orders/1", 1, 2), ("orders/0", 1, 2), ("orders/1", 2, 3)]


def test_a_member_that_stays_reads_again_what_a_restore_or_a_rewind_leaves_to_read(
    folder: Path, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_ingestion, "CHECK_INTERVAL_SECONDS", 0.05)
    moves = [ONE, ZERO, ONE]

    def move() -> None:
        if moves and drain._shards() <= drain._done and all(job._at for job in jobs.values()):
            jobs[moves.pop(0)]._at = 0

    drain = member_of(folder, idle_wait=600.0)
    jobs: Any = drain._jobs
    ledger: Any = SimpleNamespace(read=lambda: SimpleNamespace(positions={s: job._at for s, job in jobs.items()}))
    drain._ledger = ledger
    found = [report.entry for report in reports_with(drain.events(), move)]
    assert found[2:] == [("orders/1", 0, 1), ("orders/0", 0, 1), ("orders/1", 0, 1)]


def test_a_member_ends_when_its_time_is_over(folder: Path, broker: MemoryBroker) -> None:
    drain = member_of(folder, idle_wait=0.3)
    events = list(drain.events())
    assert sum(event is not CONTINUES for event in events) == 2
    assert events.count(CONTINUES) > 2 + 3


def test_a_member_tells_what_it_has_written_before_it_waits_for_more(
    folder: Path, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what is written while it waits for its shards."""
    begin = threading.Event()
    wait = run_ingestion.wait
    monkeypatch.setattr(run_ingestion, "wait", lambda running, *_: (begin.set(), wait(running, 60))[1])
    told_at_pauses: list[int] = []
    time = itertools.count()
    drain = member_of(folder, idle_wait=600.0, began=lambda: begin.wait(60))
    written: Any = SimpleNamespace(read=lambda: SimpleNamespace(positions={ZERO: 1, ONE: 1}))
    drain._ledger = written
    drain._idle_wait = IdleWait(5, sleep=lambda _: told_at_pauses.append(len(found)), clock=lambda: next(time))
    found: list[Any] = []
    for report in reports_of(drain.events()):
        found.append(report)
    assert len(found) == 2
    assert set(told_at_pauses) == {2}


def test_a_member_that_is_asked_to_end_tells_what_it_finishes(folder: Path, broker: MemoryBroker) -> None:
    begun = threading.Barrier(3)
    found: list[Any] = []

    def end() -> None:
        begun.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        begun.wait(60)

    def began() -> None:
        begun.wait(60)
        begun.wait(60)

    thread = threading.Thread(target=end)
    thread.start()
    drain = member_of(folder, idle_wait=600.0, began=began)

    def follow() -> None:
        for report in reports_of(drain.events()):
            found.append(report.entry)

    with pytest.raises(SystemExit):
        follow()
    thread.join()
    assert sorted(found) == [("orders/0", 0, 1), ("orders/1", 0, 1)]


def test_a_member_that_is_asked_to_end_while_it_plans_begins_no_batch(folder: Path, broker: MemoryBroker) -> None:
    drain = member_of(folder, idle_wait=600.0, began=pytest.fail)

    class Planning(ScriptedJob):
        def next(self) -> str:
            drain._stop.set()
            return "a batch"

        def put(self, value: str) -> None:
            pytest.fail("nothing would interrupt it")

    jobs: Any = drain._jobs
    jobs[ZERO] = Planning()
    assert drain._drain_shard(ZERO) is False
