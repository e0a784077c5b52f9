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
from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.linger import Linger
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

pytestmark = pytest.mark.usefixtures("default_handlers")
ZERO, ONE = Shard("orders", 0), Shard("orders", 1)


class Jobs:
    """A replay of two batches; the messages of the third are gone."""

    def __init__(self) -> None:
        self.left: list[Any] = ["first", "second", DataLossError("gone", remedy="None.")]

    def plan(self) -> Any:
        planned = self.left.pop(0)
        if isinstance(planned, Exception):
            raise planned
        return planned

    def run(self, batch: str) -> str:
        return f"{batch} is in the table"


def test_batches_of_a_replay_that_are_in_the_table_are_told_of_before_an_error() -> None:
    told: list[Any] = []
    jobs: Any = Jobs()

    def tell() -> None:
        for report in drain_batches(jobs):
            told.append(report)

    with pytest.raises(DataLossError):
        tell()
    assert told == ["first is in the table", "second is in the table"]


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
    drain = SharedDrain(source, Ingestion("g", str(folder / "t")), member, job_of=pytest.fail)
    drain._done = {ZERO}
    assert drain._is_reached({ZERO: 10, ONE: 10}) is is_over


class Follower:
    """The job of one shard of a memory stream, without Spark: each batch is what came since the last one."""

    def __init__(self, source: BatchSource, shard: Shard, began: Callable[[], object]) -> None:
        self._source = source
        self._shard = shard
        self._began = began
        self._at = 0

    def plan(self) -> Any:
        end = self._source.extents()[self._shard].end
        return end if end > self._at else None

    def run(self, batch: int) -> Any:
        self._began()
        before, self._at = self._at, batch
        return str(self._shard), before, batch


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


def member_of(
    folder: Path, *, linger: float, on_next: Callable[[], object], began: Callable[[], object] = lambda: None
) -> SharedDrain:
    made: list[Shard] = []

    def job_of(source: BatchSource, ingestion: Ingestion) -> Any:
        assert ingestion.shard is not None
        made.append(ingestion.shard)
        assert len(made) == len(set(made)), "a shard keeps its job while the member stays"
        return Follower(source, ingestion.shard, began)

    member: Any = Both()
    source = StreamSource(StreamUrl.parse("memory://members/orders"))
    what = Ingestion("g", str(folder / "t"))
    return SharedDrain(source, what, member, job_of, linger=Linger(linger), on_next=on_next, max_batches=5)


def test_a_member_that_stays_follows_its_shards(folder: Path, broker: MemoryBroker) -> None:
    arrivals = [ONE, ZERO, ONE]

    def arrive() -> None:
        if arrivals and drain._shards() <= drain._done:
            broker.append(arrivals.pop(0), b"{}")

    drain = member_of(folder, linger=600.0, on_next=arrive)
    found: list[Any] = list(drain.reports())
    assert sorted(found[:2]) == [("orders/0", 0, 1), ("orders/1", 0, 1)]
    assert found[2:] == [("orders/1", 1, 2), ("orders/0", 1, 2), ("orders/1", 2, 3)]


def test_a_member_that_stays_reads_again_what_a_restore_or_a_rewind_leaves_to_read(
    folder: Path, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_ingestion, "LOOK_SECONDS", 0.05)
    moves = [ONE, ZERO, ONE]

    def move() -> None:
        if moves and drain._shards() <= drain._done and all(job._at for job in jobs.values()):
            jobs[moves.pop(0)]._at = 0

    drain = member_of(folder, linger=600.0, on_next=move)
    jobs: Any = drain._jobs
    ledger: Any = SimpleNamespace(read=lambda: SimpleNamespace(positions={s: job._at for s, job in jobs.items()}))
    drain._ledger = ledger
    found: list[Any] = list(drain.reports())
    assert found[2:] == [("orders/1", 0, 1), ("orders/0", 0, 1), ("orders/1", 0, 1)]


def test_a_member_ends_when_its_time_is_over(folder: Path, broker: MemoryBroker) -> None:
    looks: list[int] = []
    drain = member_of(folder, linger=0.3, on_next=lambda: looks.append(1))
    assert len(list(drain.reports())) == 2
    assert len(looks) > 3


def test_a_member_tells_what_it_has_written_before_it_waits_for_more(
    folder: Path, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what is written while it waits for its shards."""
    begin = threading.Event()
    wait = run_ingestion.wait
    monkeypatch.setattr(run_ingestion, "wait", lambda running, *_: (begin.set(), wait(running, 60))[1])
    told_at_pauses: list[int] = []
    time = itertools.count()
    drain = member_of(folder, linger=600.0, on_next=lambda: None, began=lambda: begin.wait(60))
    written: Any = SimpleNamespace(read=lambda: SimpleNamespace(positions={ZERO: 1, ONE: 1}))
    drain._ledger = written
    drain._linger = Linger(5, sleep=lambda _: told_at_pauses.append(len(found)), clock=lambda: next(time))
    found: list[Any] = []
    for report in drain.reports():
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
    drain = member_of(folder, linger=600.0, on_next=lambda: None, began=began)

    def follow() -> None:
        for report in drain.reports():
            found.append(report)

    with pytest.raises(SystemExit):
        follow()
    thread.join()
    assert sorted(found) == [("orders/0", 0, 1), ("orders/1", 0, 1)]


def test_a_member_that_is_asked_to_end_while_it_plans_begins_no_batch(folder: Path, broker: MemoryBroker) -> None:
    drain = member_of(folder, linger=600.0, on_next=lambda: None, began=pytest.fail)

    class Planning:
        def plan(self) -> str:
            drain._stop.set()
            return "a batch"

        def run(self, batch: str) -> None:
            pytest.fail("nobody would interrupt it")

    job: Any = Planning()
    drain._jobs[ZERO] = job
    assert drain._drain_shard(ZERO) is False
