"""A stream that was deleted and made again continues into its table, once it is accepted; each message once."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.batches import accept as accepting
from spark_jobs.batches.accept import AcceptedEpoch, accept
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Batch, Ingestion, Observer, PlanAgain, Step
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.claims.claim_job import ClaimJob
from spark_jobs.lag import measure
from spark_jobs.mode_switch import switch_sharing
from spark_jobs.verify import verify
from spark_jobs.writing.delta_table import DeltaWriter
from stream_consumers.create import StreamSource, create_producer, open_batch_source
from stream_consumers.errors import DataLossError, InvalidOptionError, SourceRecreatedError, StreamNotFoundError
from stream_consumers.memory import forget_memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, ConsumerMode, ErrorPolicy
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import drain, entries, ingestion, run_batch
from tests.support.kafka_topics import Pipeline, Topics, orders
from tests.support.killed_runs import kill_in_turn
from tests.support.redis_tables import Stream
from tests.support.streams import sequences_in_table


class Stage:
    """A stream in memory, or in a file, and the table that it is written into."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self.spark = spark
        self.url = url
        self.folder = folder
        self.what = ingestion(folder / "t")
        self.sent: Counter[tuple[str, int, int]] = Counter()

    def send(self, count: int, *, epoch: str = "orders") -> None:
        """Append messages, and expect them as rows of an epoch."""
        first = 1 if self.url.startswith("file:") else 0
        with create_producer(self.url) as producer:
            for _ in range(count):
                producer.send(b'{"id": 1, "user": "u"}')
        known = sum(1 for stream, _, _ in self.sent if stream == epoch)
        self.sent.update((epoch, 0, first + known + number) for number in range(count))

    def recreate(self) -> None:
        """Another stream of the same name, without messages."""
        if self.url.startswith("memory:"):
            forget_memory_broker(StreamUrl.parse(self.url))
        else:
            (self.folder / "orders.ss").unlink()

    def recreated(self, before: int, after: int) -> None:
        """Write this number of messages into the table, and make the stream again with others."""
        self.send(before)
        self.drain()
        self.recreate()
        self.send(after, epoch="orders#2")

    def continued(self, before: int, after: int) -> None:
        """As :meth:`recreated`, and go on with the new stream."""
        self.recreated(before, after)
        self.accept()
        self.drain()

    def replaced(self) -> Observer:
        """Makes the stream again, and accepts it, while a batch is written."""

        def observe(step: Step, batch: Batch | None) -> None:
            if step is Step.WRITING:
                self.recreate()
                self.send(4, epoch="orders#2")
                self.accept()

        return observe

    def drain(self, **changes: object) -> None:
        """A run to the end."""
        drain(self.spark, self.url, replace(self.what, **changes))  # type: ignore[arg-type]

    def accept(self, *epochs: str) -> list[AcceptedEpoch]:
        with open_batch_source(self.url) as source:
            return accept(self.spark, source, self.what, epochs=epochs)

    def rows(self) -> Counter[tuple[str, int, int]]:
        return sequences_in_table(self.folder / "t")

    def letters(self) -> list[tuple[str, int | None]]:
        """Stream and sequence of each dead letter."""
        rows = DeltaTable(f"{self.what.table}_dead_letters").to_pyarrow_table().to_pylist()
        return [(row["_stream"], row["_sequence"]) for row in rows]

    def restore(self, version: int) -> None:
        self.spark.sql(f"RESTORE TABLE delta.`{self.what.table}` TO VERSION AS OF {version}")

    def is_right(self) -> bool:
        """What verify says of the stream as it is now."""
        with open_batch_source(self.url) as source:
            return all(verdict.is_right and not verdict.lag for verdict in verify(source, self.what))


@pytest.fixture
def stage(spark: SparkSession, folder: Path) -> Iterator[Stage]:
    url = f"memory://{uuid.uuid4().hex}/orders"
    yield Stage(spark, url, folder)
    forget_memory_broker(StreamUrl.parse(url))


def test_a_recreated_stream_continues_into_its_table_each_message_once(stage: Stage) -> None:
    with pytest.raises(StreamNotFoundError):
        stage.accept()
    stage.send(10)
    stage.drain()
    stage.recreate()
    stage.send(12, epoch="orders#2")
    with pytest.raises(SourceRecreatedError) as raised:
        stage.drain()
    assert "stream-assets accept --as 'orders#2'" in raised.value.remedy
    (accepted,) = stage.accept()
    assert (accepted.name, len(accepted.origin), len(accepted.ended)) == ("orders#2", 1, 1)
    found = measure(StreamSource(StreamUrl.parse(stage.url)), stage.what)
    assert (found.total, {shard.stream for shard in found.lag}) == (12, {"orders#2"})
    stage.drain()
    stage.send(3, epoch="orders#2")
    with create_producer(stage.url) as producer:
        producer.send(b"{")
    stage.drain()
    assert stage.rows() == stage.sent
    assert stage.letters() == [("orders#2", 15)]
    assert stage.is_right()
    assert [entry.kind for entry in entries(stage.what)] == ["init", "batch", "accept", "batch", "batch"]


@pytest.mark.slow
def test_what_is_not_recreated_is_refused_and_an_accept_is_done_once(stage: Stage) -> None:
    stage.send(5)
    stage.drain()
    for epochs in ((), ("orders#2",)):
        with pytest.raises(InvalidOptionError, match="was not recreated"):
            stage.accept(*epochs)
    stage.recreate()
    stage.send(5, epoch="orders#2")
    for wrong, remedy in (("orders#3", "Use orders#2."), ("clicks#2", "Use one of orders.")):
        with pytest.raises(InvalidOptionError) as refused:
            stage.accept(wrong)
        assert refused.value.remedy == remedy
    assert [one.name for one in stage.accept("orders#2")] == ["orders#2"]
    # A run that is tried again has the same settings; the next recreation is not accepted by them.
    assert stage.accept("orders#2") == []
    stage.drain()
    elsewhere = ingestion(stage.folder / "u", group="other")
    drain(stage.spark, stage.url, elsewhere)
    assert {stream for stream, _, _ in sequences_in_table(elsewhere.table)} == {"orders"}, "each table has its epochs"
    stage.recreate()
    stage.send(1)
    assert stage.accept("orders#2") == []
    with pytest.raises(SourceRecreatedError):
        stage.drain()


@pytest.mark.slow
def test_all_of_the_new_stream_is_read_wherever_the_group_began(stage: Stage) -> None:
    stage.send(5)
    stage.what = replace(stage.what, start=AutoStreamReset.LATEST)
    stage.drain()
    stage.recreate()
    stage.send(4, epoch="orders#2")
    stage.accept()
    stage.drain()
    assert {row for row in stage.rows() if row[0] == "orders#2"} == {("orders#2", 0, number) for number in range(4)}


def test_a_batch_that_is_on_its_way_loses_its_number_to_the_accept(stage: Stage) -> None:
    stage.send(5)
    stage.drain()
    with create_producer(stage.url) as producer:
        producer.send(b'{"id": 2, "user": "given up"}')
    # The old stream is still there for the run that has it open, as where a cluster was replaced.
    with open_batch_source(stage.url) as old:
        job = IngestJob(stage.spark, old, stage.what, observer=stage.replaced())
        batch = job.plan()
        assert batch is not None
        assert job.write(batch) is PlanAgain.LOST_RACE
        with pytest.raises(SourceRecreatedError, match="accepted as 'orders#2'"):
            job.plan()
    stage.drain()
    assert stage.rows() == stage.sent
    assert stage.is_right()


@pytest.mark.slow
def test_a_replay_that_is_on_its_way_loses_its_number_to_the_accept(stage: Stage) -> None:
    stage.send(5)
    stage.drain()
    with open_batch_source(stage.url) as old:
        job = ReplayJob(stage.spark, old, stage.what, Replay(), observer=stage.replaced())
        batch = job.plan()
        assert batch is not None
        with pytest.raises(SourceRecreatedError, match="accepted as"):
            run_batch(job, batch)
    assert [entry.kind for entry in entries(stage.what)] == ["init", "batch", "accept"]
    stage.drain()
    assert stage.rows() == stage.sent
    assert stage.is_right()


@pytest.mark.slow
def test_two_accepts_at_the_same_time_begin_one_epoch(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.recreated(5, 4)
    plan = accepting.plan_accept

    def overtaken(*arguments: object, **more: object) -> list[AcceptedEpoch]:
        found = plan(*arguments, **more)  # type: ignore[arg-type]
        monkeypatch.setattr(accepting, "plan_accept", plan)
        stage.accept("orders#2")
        return found

    monkeypatch.setattr(accepting, "plan_accept", overtaken)
    assert stage.accept("orders#2") == []
    assert [entry.kind for entry in entries(stage.what)].count("accept") == 1
    stage.drain()
    assert stage.rows() == stage.sent


@pytest.mark.slow
@pytest.mark.parametrize("is_written", [False, True], ids=["before", "after"])
def test_an_accept_that_dies_is_run_again(stage: Stage, monkeypatch: pytest.MonkeyPatch, is_written: bool) -> None:
    stage.recreated(5, 4)
    write = DeltaWriter.write

    def dies(*arguments: object, **more: object) -> None:
        if is_written:
            write(*arguments, **more)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(DeltaWriter, "write", dies)
    with pytest.raises(KeyboardInterrupt):
        stage.accept("orders#2")
    monkeypatch.undo()
    assert len(stage.accept("orders#2")) == (not is_written)
    stage.drain()
    assert stage.rows() == stage.sent


@pytest.mark.slow
def test_one_of_several_streams_is_accepted_and_the_others_go_on(spark: SparkSession, folder: Path) -> None:
    urls = {name: f"file://{folder}/{name}.ss/{name}" for name in ("orders", "clicks")}
    what = ingestion(folder / "t")

    def send(name: str, count: int) -> None:
        with create_producer(urls[name]) as producer:
            for _ in range(count):
                producer.send(b'{"id": 1, "user": "u"}')

    for name, url in urls.items():
        send(name, 5)
        drain(spark, url, what)
    for name in urls:
        (folder / f"{name}.ss").unlink()
        send(name, 3)
    with open_batch_source(urls["orders"]) as source:
        assert [one.name for one in accept(spark, source, what)] == ["orders#2"]
    drain(spark, urls["orders"], what)
    with pytest.raises(SourceRecreatedError):
        drain(spark, urls["clicks"], what)
    with open_batch_source(urls["clicks"]) as source:
        accept(spark, source, what)
    for url in urls.values():
        drain(spark, url, what)
    rows = Counter(stream for stream, _, _ in sequences_in_table(folder / "t").elements())
    assert rows == {"orders": 5, "clicks": 5, "orders#2": 3, "clicks#2": 3}


@pytest.mark.slow
def test_a_restore_to_before_the_accept_does_not_take_it_back(stage: Stage) -> None:
    stage.send(10)
    stage.drain()  # init 0, batch 1
    stage.recreate()
    stage.send(4, epoch="orders#2")
    stage.accept()  # 2
    stage.drain()  # 3
    stage.restore(1)
    stage.drain()
    assert stage.rows() == stage.sent
    assert stage.is_right()


@pytest.mark.slow
def test_what_a_restore_removed_of_a_stream_that_is_gone_is_an_error_until_it_is_recorded(stage: Stage) -> None:
    stage.send(5)
    stage.drain()
    stage.continued(5, 4)
    before = stage.what.ledger().read().version
    stage.restore(1)
    for _ in range(2):
        with pytest.raises(DataLossError, match=r"orders/0 \[5,10\)"):
            stage.drain()
        assert not stage.is_right()
    stage.restore(before)
    stage.drain()
    assert stage.rows() == stage.sent, "a RESTORE forwards brings them back"
    stage.restore(1)
    stage.drain(errors=ErrorPolicy(on_data_loss="record"))
    lost = {("orders", 0, number) for number in range(5, 10)}
    assert stage.rows() == {row: 1 for row in stage.sent if row not in lost}
    assert [str(parts) for entry in entries(stage.what) for parts in entry.lost.values()] == ["[5,10)"]
    assert stage.letters() == [("orders", None)]
    assert stage.what.ledger().read().removed_from_ended == {}
    stage.drain()
    assert stage.is_right()


@pytest.mark.slow
def test_a_replay_of_what_is_gone_says_so_and_touches_nothing(stage: Stage) -> None:
    stage.send(10)
    stage.drain()
    with open_batch_source(stage.url) as old:
        begun = replace(stage.what, limits=replace(stage.what.limits, max_records=4))
        wanted = Replay(id="begun")
        list(drain_batches(ReplayJob(stage.spark, old, begun, wanted), max_batches=1))
    stage.recreate()
    stage.send(4, epoch="orders#2")
    stage.accept()
    stage.drain()
    with open_batch_source(stage.url) as source:
        job = ReplayJob(stage.spark, source, stage.what, Replay(start=Bound.parse("orders/0=2")))
        with pytest.raises(InvalidOptionError, match="orders/0 belongs to another epoch"):
            job.plan()
        with pytest.raises(DataLossError, match="recreated since this replay began, so the messages that it has left"):
            ReplayJob(stage.spark, source, stage.what, wanted).plan()
        assert stage.rows() == stage.sent
        list(drain_batches(ReplayJob(stage.spark, source, stage.what, Replay())))
        replaced = [entry.ranges for entry in entries(stage.what) if entry.kind == "replay"][-1]
        assert replaced == {Shard("orders#2"): (0, 4)}
    assert stage.rows() == stage.sent


@pytest.mark.slow
def test_a_rewind_replaces_no_row_of_a_stream_that_is_gone(stage: Stage) -> None:
    """Neither one before the accept, nor one after it."""
    stage.send(10)
    stage.drain()

    def move(position: int, shard: str) -> None:
        with open_batch_source(stage.url) as source:
            (move,) = rewind(stage.spark, source, stage.what, Bound.parse("earliest"))
        assert (str(move.shard), move.position, move.to) == (shard, position, 0)

    move(10, "orders/0")
    stage.recreate()
    stage.send(6, epoch="orders#2")
    stage.accept()
    stage.drain()
    assert stage.rows() == stage.sent
    assert stage.what.ledger().read().shards[Shard("orders")].redo.ranges == ()
    move(6, "orders#2/0")
    stage.drain()
    assert stage.rows() == stage.sent
    assert stage.is_right()


# On Kafka


def accept_topic(what: Pipeline) -> list[AcceptedEpoch]:
    with what.source.open() as opened:
        return accept(what.spark, opened, what.ingestion)


def identities(topic: str, count: int, *, epoch: int = 1) -> set[tuple[str, int, int]]:
    name = topic if epoch == 1 else f"{topic}#{epoch}"
    return {(name, 0, number) for number in range(count)}


@pytest.mark.slow
def test_a_recreated_topic_continues_in_each_mode_and_the_broker_follows(topics: Topics) -> None:
    """And a mode is switched in a later epoch."""
    topic, alone = topics.filled(orders(8))
    what, wanted = alone, identities(topic, 8)
    what.drain()
    modes = ((ConsumerMode.LOAD_BALANCED, alone.shared()), (ConsumerMode.RESUMABLE, alone))
    for epoch, (to, following) in enumerate(modes, start=2):
        topics.recreate(topic)
        topics.send(topic, orders(5, first=100))
        with pytest.raises(SourceRecreatedError):
            what.drain()
        accept_topic(what)
        what.drain()
        assert topics.committed(what.group, topic) == {0: 5}
        with alone.source.open() as opened:
            assert switch_sharing(what.spark, alone.ingestion, to=to, source=opened)
        what = following
        topics.send(topic, orders(2))
        what.drain()
        assert topics.committed(what.group, topic) == {0: 7}
        wanted |= identities(topic, 7, epoch=epoch)
    assert what.rows() == dict.fromkeys(wanted, 1)
    assert all(verdict.is_right and not verdict.lag for verdict in what.verify())


# On Redis


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["resumable", "load_balanced"])
def test_a_redis_stream_of_lower_ids_continues(
    spark: SparkSession, redis_address: str, folder: Path, mode: str
) -> None:
    stream = Stream(redis_address, folder, shards=1, mode=mode)
    (key,) = stream.keys
    add_with_ids(stream, 10)
    stream.drain(spark)

    def accept_epochs(*epochs: str) -> list[AcceptedEpoch]:
        with stream.source.open() as opened:
            if mode == "resumable":
                return accept(spark, opened, stream.ingestion(), epochs=epochs)
            names = stream.ingestion().epochs([stream.name])
            with stream.source.claims(stream.group, names) as claims:
                return accept(spark, opened, stream.ingestion(claims=True), epochs=epochs, claims=claims)

    for epoch, count in ((2, 4), (3, 3)):
        stream.client.delete(key)
        add_with_ids(stream, count)
        with pytest.raises(SourceRecreatedError):
            stream.drain(spark)
        name = f"{stream.name}#{epoch}"
        assert [one.name for one in accept_epochs(name)] == [name]
        assert sum(measure(stream.source, stream.ingestion(claims=mode != "resumable")).lag.values()) == count
        stream.drain(spark)
        add_with_ids(stream, 1, first=count)
        stream.drain(spark)
        if mode == "load_balanced":
            assert stream.groups()[0][1:] == (0, 0)
        with pytest.raises(InvalidOptionError, match="was not recreated"):
            accept_epochs()
    found = Counter(name for name, _, _ in sequences_in_table(stream.table).elements())
    assert found == {stream.name: 10, f"{stream.name}#2": 5, f"{stream.name}#3": 4}
    assert max(sequences_in_table(stream.table).values()) == 1
    stream.client.close()


def add_with_ids(stream: Stream, count: int, *, first: int = 0) -> None:
    for number in range(first, first + count):
        stream.client.xadd(stream.keys[0], {"msg": b'{"id": 1, "user": "u"}'}, id=f"{1000 + number}-0")


@pytest.mark.slow
def test_a_stream_whose_group_is_gone_was_not_recreated(spark: SparkSession, redis_address: str, folder: Path) -> None:
    stream = Stream(redis_address, folder, shards=1, mode="load_balanced")
    stream.add(10)
    stream.drain(spark)
    stream.client.xgroup_destroy(stream.keys[0], stream.group)
    with (
        stream.source.open() as opened,
        stream.source.claims(stream.group) as claims,
        pytest.raises(InvalidOptionError, match="was not recreated"),
    ):
        accept(spark, opened, stream.ingestion(claims=True), claims=claims)
    stream.client.close()


@pytest.mark.slow
def test_claims_under_the_old_name_write_nothing(spark: SparkSession, redis_address: str, folder: Path) -> None:
    """A member looked into the ledger before the accept, and claims after another one has made the group."""
    stream = Stream(redis_address, folder, shards=1, mode="load_balanced")
    add_with_ids(stream, 10)
    stream.drain(spark)
    late: Ingestion = stream.ingestion(claims=True, member="late")
    with stream.source.claims(stream.group) as old:
        job = ClaimJob(spark, old, late)
        assert job.plan() is None
        stream.client.delete(stream.keys[0])
        add_with_ids(stream, 5)
        state = late.ledger().read()
        with stream.source.open() as opened, stream.source.claims(stream.group) as claims:
            accept(spark, opened, stream.ingestion(claims=True), claims=claims)
        names = late.epochs([stream.name])
        with stream.source.claims(stream.group, names) as made:
            made.prepare(AutoStreamReset.EARLIEST, {Shard(names[stream.name]): None})
        old.ends = {Shard(stream.name): 2**62}
        assert job._claim(state, []) is None, "the group is not where the member saw it"
    stream.drain(spark)
    found = Counter(name for name, _, _ in sequences_in_table(stream.table).elements())
    assert found == {stream.name: 10, f"{stream.name}#2": 5}
    stream.client.close()


@pytest.mark.kill
@pytest.mark.slow
def test_runs_killed_before_and_after_an_accept_are_continued(spark: SparkSession, server: str, folder: Path) -> None:
    stage = Stage(spark, f"file://{folder}/orders.ss/orders", folder)
    # Each kill happens once.
    faults = {"orders": ["planned", "mid-write"], "orders#2": ["writing", "rows written"], "orders#3": ["verified"]}
    for epoch, listed in faults.items():
        stage.send(200, epoch=epoch)
        if epoch != "orders":
            stage.accept(epoch)
        kill_in_turn(stage.url, folder / "t", listed, "lakehouse", "resumable", server)
        stage.drain()
        assert stage.rows() == stage.sent
        assert stage.is_right()
        stage.recreate()
