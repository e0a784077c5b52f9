"""Runs that stay: when they end, what they notice while they wait, and what they cost meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_jobs.batches import ingest_job
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import CONTINUES, BatchReport, Continues, Ingestion, Waiting
from spark_jobs.batches.job import batch_events, reports_of
from spark_jobs.batches.replay import rewind
from spark_jobs.batches.run_control import MAX_POLL_SECONDS, IdleWait
from spark_jobs.claims import claim_job
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.run_ingestion import drain, run_events
from stream_consumers.batches import Range
from stream_consumers.create import StreamSource, create_producer
from stream_consumers.errors import InvalidOptionError, SourceRecreatedError, SparkEndedError
from stream_consumers.memory import forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import ingestion
from tests.support.kafka_topics import Topics, orders
from tests.support.kafka_topics import assert_each_once as assert_these_once
from tests.support.outages import stoppable_redis
from tests.support.redis_tables import Stream
from tests.support.scripted_jobs import ScriptedJob, values_of
from tests.support.streams import assert_each_once, sequences_in_table, shard, write_stream
from tests.support.topics import fill

LONG = 600.0


class Time:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def idle_wait(self, seconds: float, *, batch_seconds: float = 0.0) -> IdleWait:
        return IdleWait(seconds, batch_seconds=batch_seconds, sleep=self.sleep, clock=lambda: self.now)


class Job(ScriptedJob):
    """As many batches as its script says, and then another one at each look that finds one."""

    def __init__(self, time: Time, script: list[object]) -> None:
        super().__init__()
        self._time = time
        self._script = script
        self.looks = 0

    def next(self) -> object:
        return self._script.pop(0) if self._script else None

    def put(self, value: object) -> object:
        self._time.now += 10.0
        return value

    def has_more(self) -> bool:
        self.looks += 1
        return bool(self._script)


def test_the_time_of_a_run_counts_from_its_beginning_and_the_batch_in_hand_is_finished() -> None:
    time = Time()
    jobs = Job(time, ["a", None, "b", "c", "d", "e", "f"])
    idle_wait = time.idle_wait(25.0)
    assert values_of(batch_events(jobs, idle_wait=idle_wait)) == ["a", "b", "c", "d", "e", "f"], (
        "what is known is written"
    )
    assert idle_wait.is_over
    assert time.pauses == [], "there was something at each look"
    assert values_of(batch_events(Job(time, ["a"]), idle_wait=idle_wait)) == ["a"]
    assert values_of(batch_events(Job(time, ["a", None, "b"]), idle_wait=idle_wait)) == ["a"], "it does not stay"


def test_pauses_grow_to_a_fraction_of_a_second_and_the_last_one_ends_with_the_run() -> None:
    time = Time()
    jobs = Job(time, [])
    events = list(batch_events(jobs, idle_wait=time.idle_wait(5.0)))
    assert time.pauses[:3] == [0.02, 0.03, 0.045]
    assert max(time.pauses) == MAX_POLL_SECONDS
    assert time.now == pytest.approx(1005.0)
    assert events == [CONTINUES] * jobs.looks
    assert len(time.pauses) == jobs.looks


def test_a_run_that_stays_stops_behind_its_last_batch() -> None:
    time = Time()
    jobs = Job(time, ["a", None, "b", "c"])
    assert values_of(batch_events(jobs, max_batches=2, idle_wait=time.idle_wait(LONG))) == ["a", "b"]
    assert jobs.looks == 1


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan"), True])
def test_no_time_to_stay(seconds: float) -> None:
    with pytest.raises(InvalidOptionError, match="linger_seconds="):
        IdleWait(seconds)
    with pytest.raises(InvalidOptionError, match="batch_seconds="):
        IdleWait(batch_seconds=seconds)


def test_a_run_that_waits_for_its_next_batch_goes_on_and_ends_in_time() -> None:
    """It looks at nothing before the batch is due; then at once."""
    time = Time()
    idle_wait = time.idle_wait(45.0, batch_seconds=30.0)
    began: list[float] = []

    class Begins(Job):
        def next(self) -> object:
            idle_wait.begin()
            began.append(time.now)
            return super().next()

    jobs = Begins(time, ["a", None, "b", None, "c"])
    events = list(batch_events(jobs, idle_wait=idle_wait))
    assert [event.entry for event in events if isinstance(event, BatchReport)] == ["a", "b"]
    assert time.now == pytest.approx(1050.0), "the time is over while the second batch is written"
    assert (jobs.looks, began[2]) == (1, pytest.approx(1040.0))
    assert events.count(CONTINUES) > 100
    ends = time.idle_wait(0.0, batch_seconds=LONG)
    ends.begin()
    assert ends.is_due, "a run that does not stay never waits"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "claims", "kafka"])
def test_a_busy_stream_has_few_versions(
    spark: SparkSession, folder: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """Also if there are always more messages to read."""
    add: Callable[[], object]
    if kind == "kafka":
        topics: Topics = request.getfixturevalue("topics")
        topic = topics.create(partitions=2)
        pipe = topics.pipeline(topic).shared()
        source, what = pipe.source, pipe.ingestion
        add = partial(fill, topics.address, topic, 4, partitions=2)
    else:
        mode = "load_balanced" if kind == "claims" else "resumable"
        stream = Stream(request.getfixturevalue("redis_address"), folder, mode=mode)
        source, what = stream.source, stream.ingestion(claims=kind == "claims")
        add = partial(stream.add, 4)
    add()
    # Each shard of a Kafka group that shares them has its own batches.
    began, left = monotonic(), 12 if kind == "kafka" else 6
    events = run_events(spark, source, replace(what, batch_seconds=2.0), linger_seconds=LONG, observer=lambda *_: add())
    for event in events:
        add()
        left -= isinstance(event, BatchReport)
        if not left:
            break
    assert monotonic() - began >= 5 * 2.0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["resumable", "load_balanced"])
def test_neither_a_backlog_nor_the_end_of_a_run_waits_for_the_next_batch(
    spark: SparkSession, folder: Path, redis_address: str, mode: str
) -> None:
    stream = Stream(redis_address, folder, mode=mode)
    stream.add(50)
    what = replace(stream.ingestion(20, claims=mode == "load_balanced"), batch_seconds=LONG)
    events = run_events(spark, stream.source, what, linger_seconds=15.0)
    assert [report.rows for report in reports_of(events)] == [20, 20, 10]


def test_a_stop_and_a_stay_do_not_go_together(tmp_path: Path) -> None:
    nothing: Any = None
    batches = drain(
        nothing,
        StreamSource("memory://stop/orders"),
        ingestion(tmp_path / "t"),
        stop=Bound.parse("latest"),
        linger_seconds=5,
    )
    with pytest.raises(InvalidOptionError, match="linger_seconds=5"):
        next(batches)


class Idle:
    """Does one thing after the other, each as soon as a run that stays has nothing to do."""

    def __init__(self, *acts: Callable[[], object]) -> None:
        self._acts = list(acts)
        self._is_busy = True
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self._acts and self.calls % 3 == 0:
            self._acts.pop(0)()


def staying(
    spark: SparkSession,
    source: str | StreamSource,
    what: Ingestion,
    *acts: Callable[[], object],
    batches: int,
    rows: int | None = None,
    on_wait: Callable[[str], object] = pytest.fail,
) -> list[BatchReport]:
    """The batches of a run that ends with this number of batches, or of rows."""
    found: list[BatchReport] = []
    stream = source if isinstance(source, StreamSource) else StreamSource(source)
    # What each act adds is a batch of its own.
    what = replace(what, batch_seconds=0.0)
    events = run_events(spark, stream, what, linger_seconds=LONG, max_batches=batches)
    idle = Idle(*acts)
    for event in events:
        if isinstance(event, Continues):
            idle()
        elif isinstance(event, Waiting):
            on_wait(event.why)
        elif isinstance(event, BatchReport):
            found.append(event)
        if sum(one.rows for one in found) == rows:
            break
    return found


def test_what_comes_while_a_run_stays_is_written(spark: SparkSession, folder: Path) -> None:
    path = folder / "orders.ss"
    url = write_stream(path, 30)
    acts = [lambda: write_stream(path, 20), lambda: write_stream(path, 10, shards=3)]
    reports = staying(spark, url, ingestion(folder / "t"), *acts, batches=3)
    assert [report.rows for report in reports] == [30, 20, 10]
    assert_each_once(path, folder / "t")


@pytest.mark.slow
def test_a_run_stays_on_a_stream_that_is_still_empty(spark: SparkSession, folder: Path) -> None:
    url = StreamUrl.parse("memory://staying/orders")
    broker = memory_broker(url)
    reports = staying(
        spark,
        str(url),
        ingestion(folder / "t"),
        lambda: broker.append(shard(0), b'{"id": 1}'),
        lambda: broker.append(shard(1), b'{"id": 2}'),
        batches=2,
    )
    assert [dict(report.messages) for report in reports] == [{shard(0): 1}, {shard(1): 1}]
    assert broker.committed == {("lakehouse", shard(n)): 1 for n in range(2)}
    forget_memory_broker(url)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("resumable", marks=pytest.mark.slow),
        pytest.param("real_time", marks=pytest.mark.slow),
        "load_balanced",
    ],
)
def test_redis_and_its_new_shards_are_followed(
    spark: SparkSession, folder: Path, redis_address: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ingest_job, claim_job):
        monkeypatch.setattr(module, "CHECK_INTERVAL_SECONDS", 0.05)
    stream = Stream(redis_address, folder, mode=mode)
    stream.add(5)

    def add_to_more_shards() -> None:
        stream.keys.append(f"{stream.name}:2")
        stream.add(21, first=15)

    acts = [lambda: stream.add(10, first=5), add_to_more_shards]
    what = stream.ingestion(claims=mode == "load_balanced")
    found = staying(spark, stream.source, what, *acts, batches=4, rows=36)
    # Claims are of known shards only, so that the new one may come in a batch of its own.
    assert [report.rows for report in found] in ([5, 10, 21], [5, 10, 14, 7])
    assert stream.rows() == stream.there()


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True], ids=["resumable", "load_balanced"])
def test_kafka_is_followed(topics: Topics, is_shared: bool) -> None:
    topic = topics.create(partitions=2)
    pipe = topics.pipeline(topic, records=100)
    pipe = pipe.shared() if is_shared else pipe
    fill(topics.address, topic, 10, partitions=2)
    acts = [lambda count=count: fill(topics.address, topic, count, partitions=2) for count in (10, 20)]
    # A look may come between two messages of one fill, so that how many batches there are is left to the broker.
    found = staying(topics.spark, pipe.source, pipe.ingestion, *acts, batches=40, rows=40)
    assert sum(report.rows for report in found) == 40
    assert_these_once(pipe.rows(), topics.messages(topic))
    assert pipe.positions() == {number: topics.end(topic, partition=number) for number in range(2)}


@pytest.mark.slow
def test_a_partition_that_is_new_and_empty_holds_nothing_up(topics: Topics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest_job, "CHECK_INTERVAL_SECONDS", 0.05)
    topic, what = topics.filled(orders(10))
    acts = [
        lambda: topics.add_partitions(topic, 2),
        lambda: topics.send(topic, orders(5)),
        lambda: topics.send(topic, orders(3), partition=1),
    ]
    found = staying(topics.spark, what.source, what.ingestion, *acts, batches=3)
    assert [dict(report.messages) for report in found] == [
        {Shard(topic, 0): 10},
        {Shard(topic, 0): 5},
        {Shard(topic, 1): 3},
    ]


@pytest.mark.parametrize("kind", [ingest_job.IngestJob, claim_job.ClaimJob])
def test_a_run_that_waits_notices_that_its_server_has_ended(kind: type[Any]) -> None:
    def ended() -> None:
        raise SparkEndedError("the local Spark server of this run has ended", remedy="Run again.")

    waiting = kind.__new__(kind)
    waiting.target = SimpleNamespace(spark=SimpleNamespace(check_served=ended))
    with pytest.raises(SparkEndedError):
        waiting.has_more()


@pytest.mark.slow
def test_a_waiting_run_reads_no_ledger(spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = StreamUrl.parse("memory://cheap/orders")
    broker = memory_broker(url)
    broker.append(shard(0), b'{"id": 1}')
    monkeypatch.setattr(ingest_job, "CHECK_INTERVAL_SECONDS", LONG)
    reads: list[int] = []
    read = Ledger.read
    monkeypatch.setattr(Ledger, "read", lambda ledger: (reads.append(1), read(ledger))[1])
    counts: list[int] = []
    quiet = [lambda: counts.append(len(reads))] * 4
    staying(spark, str(url), ingestion(folder / "t"), *quiet, lambda: broker.append(shard(0), b'{"id": 2}'), batches=2)
    assert len(counts) == 4
    assert len(set(counts)) == 1
    forget_memory_broker(url)


@pytest.mark.slow
def test_a_staying_run_reads_what_is_left(spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest_job, "CHECK_INTERVAL_SECONDS", 0.05)
    url = write_stream(folder / "orders.ss", 40)
    what = ingestion(folder / "t", records=20)

    def restore() -> None:
        spark.sql(f"RESTORE TABLE delta.`{folder}/t` TO VERSION AS OF 1")

    def move() -> None:
        with StreamSource(url).open() as source:
            rewind(spark, source, what, Bound.parse("earliest"), replay_id="again")

    reports = staying(spark, url, what, restore, move, batches=5)
    assert [report.rows for report in reports] == [20] * 5
    assert [report.replaced for report in reports] == [0, 0, 0, 20, 20]
    assert_each_once(folder / "orders.ss", folder / "t")


@pytest.mark.slow
def test_a_deleted_table_is_begun_anew(spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest_job, "CHECK_INTERVAL_SECONDS", 0.05)
    url = StreamUrl.parse("memory://deleted/orders")
    broker = memory_broker(url)

    def add() -> None:
        broker.append(shard(0), b'{"id": 1}')

    def delete() -> None:
        shutil.rmtree(folder / "t")
        add()

    add()
    what = ingestion(folder / "t", start=AutoStreamReset.LATEST)
    reports = staying(spark, str(url), what, add, delete, add, batches=2)
    assert [report.entry.ranges for report in reports] == [{shard(0): Range(1, 2)}, {shard(0): Range(3, 4)}]
    forget_memory_broker(url)


@pytest.mark.slow
def test_a_replaced_file_stops_the_run(spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "orders.ss"
    url = write_stream(path, 10)
    before = sequences_in_table(folder / "t")

    def replaced() -> None:
        path.unlink()
        with create_producer(url) as producer:
            producer.send(b"{}")

    with pytest.raises(SourceRecreatedError, match="is not the stream that group"):
        staying(spark, url, ingestion(folder / "t"), replaced, batches=2)
    assert sum(before.values()) + 10 == sum(sequences_in_table(folder / "t").values())


@pytest.mark.slow
def test_an_outage_while_a_run_waits_is_waited_for(spark: SparkSession, folder: Path) -> None:
    told: list[str] = []
    with stoppable_redis(folder) as (server, address):
        stream = Stream(address, folder)
        stream.add(5)

        def on_wait(why: str) -> None:
            told.append(why)
            server.start()
            if not told[1:]:
                stream.add(6, first=5)

        what = stream.ingestion(retry_seconds=LONG)
        reports = staying(spark, stream.source, what, server.stop, batches=2, on_wait=on_wait)
        assert [report.rows for report in reports] == [5, 6]
        assert f"of {LONG:g} s at most" in told[0]
        stream.assert_each_once()
