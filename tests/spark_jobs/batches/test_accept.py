"""A stream that was deleted and made again continues into its table, once it is accepted; each message once."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from sensors.lag import measure
from spark_jobs.batches import accept as accepting
from spark_jobs.batches.accept import AcceptedEpoch, accept
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Batch, Ingestion, Observer, Step
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
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
from tests.support.kafka_topics import Broker, Pipeline, filled, orders
from tests.support.killed_runs import kill_in_turn
from tests.support.redis_tables import Stream
from tests.support.streams import sequences_in_table

pytestmark = pytest.mark.spark


class Stage:
    """A stream in memory, or in a file, and the table that it is written into."""

    def __init__(self, url: str, folder: Path) -> None:
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

    def recreated(self, spark: SparkSession, before: int, after: int) -> None:
        """Write this number of messages into the table, and make the stream again with others."""
        self.send(before)
        self.drain(spark)
        self.recreate()
        self.send(after, epoch="orders#2")

    def continued(self, spark: SparkSession, before: int, after: int) -> None:
        """As :meth:`recreated`, and go on with the new stream."""
        self.recreated(spark, before, after)
        self.accept(spark)
        self.drain(spark)

    def replaced(self, spark: SparkSession) -> Observer:
        """Makes the stream again, and accepts it, while a batch is written."""

        def observe(step: Step, batch: Batch | None) -> None:
            if step is Step.WRITING:
                self.recreate()
                self.send(4, epoch="orders#2")
                self.accept(spark)

        return observe

    def drain(self, spark: SparkSession, **changes: object) -> None:
        """A run to the end."""
        drain(spark, self.url, replace(self.what, **changes))  # type: ignore[arg-type]

    def accept(self, spark: SparkSession, *epochs: str) -> list[AcceptedEpoch]:
        with open_batch_source(self.url) as source:
            return accept(spark, source, self.what, epochs=epochs)

    def rows(self) -> Counter[tuple[str, int, int]]:
        return sequences_in_table(self.folder / "t")

    def is_right(self) -> bool:
        """What verify says of the stream as it is now."""
        with open_batch_source(self.url) as source:
            return all(verdict.is_right and not verdict.lag for verdict in verify(source, self.what))


@pytest.fixture
def stage(folder: Path) -> Iterator[Stage]:
    url = f"memory://{uuid.uuid4().hex}/orders"
    yield Stage(url, folder)
    forget_memory_broker(StreamUrl.parse(url))


@pytest.mark.parametrize("backend", [pytest.param("memory", marks=pytest.mark.slow), "file"])
def test_a_recreated_stream_continues_into_its_table_each_message_once(
    spark: SparkSession, stage: Stage, folder: Path, backend: str
) -> None:
    if backend == "file":
        stage = Stage(f"file://{folder}/orders.ss/orders", folder)
    stage.send(10)
    stage.drain(spark)
    for epoch, count in (("orders#2", 4), ("orders#3", 12)):
        stage.recreate()
        stage.send(count, epoch=epoch)
        with pytest.raises(SourceRecreatedError, match=f"stream-assets accept --as {epoch}"):
            stage.drain(spark)
        (accepted,) = stage.accept(spark)
        assert (accepted.name, len(accepted.origin), len(accepted.ended)) == (epoch, 1, 1)
        found = measure(StreamSource(StreamUrl.parse(stage.url)), stage.what)
        assert (found.total, {shard.stream for shard in found.lag}) == (count, {epoch})
        stage.drain(spark)
        assert stage.rows() == stage.sent
        assert stage.is_right()
        stage.send(3, epoch=epoch)
        stage.drain(spark)
        assert stage.rows() == stage.sent
        assert stage.is_right()
    kinds = [entry.kind for entry in entries(stage.what)]
    assert kinds == ["init", "batch", "accept", "batch", "batch", "accept", "batch", "batch"]


def test_what_is_not_recreated_is_refused_and_an_accept_is_done_once(spark: SparkSession, stage: Stage) -> None:
    stage.send(5)
    with pytest.raises(StreamNotFoundError, match="has written nothing"):
        stage.accept(spark)
    stage.drain(spark)
    with pytest.raises(InvalidOptionError, match="nothing to accept"):
        stage.accept(spark)
    with pytest.raises(InvalidOptionError, match="was not recreated"):
        stage.accept(spark, "orders#2")
    stage.recreate()
    stage.send(5, epoch="orders#2")
    with pytest.raises(InvalidOptionError, match=r"That is orders#2"):
        stage.accept(spark, "orders#3")
    with pytest.raises(InvalidOptionError, match="Read are: orders"):
        stage.accept(spark, "clicks#2")
    assert [one.name for one in stage.accept(spark, "orders#2")] == ["orders#2"]
    # A run that is tried again has the same settings; the next recreation is not accepted by them.
    assert stage.accept(spark, "orders#2") == []
    stage.drain(spark)
    stage.recreate()
    stage.send(1)
    assert stage.accept(spark, "orders#2") == []
    with pytest.raises(SourceRecreatedError, match="orders#3"):
        stage.drain(spark)


def test_all_of_the_new_stream_is_read_wherever_the_group_began(spark: SparkSession, stage: Stage) -> None:
    stage.send(5)
    stage.what = replace(stage.what, start=AutoStreamReset.LATEST)
    stage.drain(spark)
    stage.recreate()
    stage.send(4, epoch="orders#2")
    stage.accept(spark)
    stage.drain(spark)
    assert {row for row in stage.rows() if row[0] == "orders#2"} == {("orders#2", 0, number) for number in range(4)}


def test_a_batch_that_is_on_its_way_loses_its_number_to_the_accept(spark: SparkSession, stage: Stage) -> None:
    stage.send(5)
    stage.drain(spark)
    with create_producer(stage.url) as producer:
        producer.send(b'{"id": 2, "user": "given up"}')
    # The old stream is still there for the run that has it open, as where a cluster was replaced.
    with open_batch_source(stage.url) as old:
        job = IngestJob(spark, old, stage.what, observer=stage.replaced(spark))
        batch = job.plan()
        assert batch is not None
        assert run_batch(job, batch) is None
        with pytest.raises(SourceRecreatedError, match="accepted as 'orders#2' while this run was at work"):
            job.plan()
    stage.drain(spark)
    assert stage.rows() == stage.sent
    assert stage.is_right()


@pytest.mark.slow
def test_a_batch_in_another_sequence_that_lands_after_the_accept_does_not_take_it_back(
    spark: SparkSession, stage: Stage
) -> None:
    """A replay has a transaction sequence of its own; what it has planned does not know of the accept."""
    stage.send(5)
    stage.drain(spark)
    with open_batch_source(stage.url) as old:
        job = ReplayJob(spark, old, stage.what, Replay(), observer=stage.replaced(spark))
        batch = job.plan()
        assert batch is not None
        with pytest.raises(SourceRecreatedError, match="accepted as"):
            run_batch(job, batch)
    assert [entry.kind for entry in entries(stage.what)] == ["init", "batch", "accept", "replay"]
    stage.drain(spark)
    assert stage.rows() == stage.sent
    assert stage.is_right()


@pytest.mark.slow
def test_two_accepts_at_the_same_time_begin_one_epoch(
    spark: SparkSession, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.recreated(spark, 5, 4)
    plan = accepting.plan_accept

    def overtaken(*arguments: object, **more: object) -> list[AcceptedEpoch]:
        found = plan(*arguments, **more)  # type: ignore[arg-type]
        monkeypatch.setattr(accepting, "plan_accept", plan)
        stage.accept(spark, "orders#2")
        return found

    monkeypatch.setattr(accepting, "plan_accept", overtaken)
    assert stage.accept(spark, "orders#2") == []
    assert [entry.kind for entry in entries(stage.what)].count("accept") == 1
    stage.drain(spark)
    assert stage.rows() == stage.sent


@pytest.mark.parametrize("is_written", [pytest.param(False, marks=pytest.mark.slow), True], ids=["before", "after"])
def test_an_accept_that_dies_before_or_behind_its_commit_is_run_again(
    spark: SparkSession, stage: Stage, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    stage.recreated(spark, 5, 4)
    write = DeltaWriter.write

    def dies(*arguments: object, **more: object) -> None:
        if is_written:
            write(*arguments, **more)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(DeltaWriter, "write", dies)
    with pytest.raises(KeyboardInterrupt):
        stage.accept(spark, "orders#2")
    monkeypatch.undo()
    assert len(stage.accept(spark, "orders#2")) == (not is_written)
    stage.drain(spark)
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
    with pytest.raises(SourceRecreatedError, match="--as clicks#2"):
        drain(spark, urls["clicks"], what)
    with open_batch_source(urls["clicks"]) as source:
        accept(spark, source, what)
    for url in urls.values():
        drain(spark, url, what)
    rows = Counter(stream for stream, _, _ in sequences_in_table(folder / "t").elements())
    assert rows == {"orders": 5, "clicks": 5, "orders#2": 3, "clicks#2": 3}


@pytest.mark.slow
def test_a_second_group_is_refused_and_has_its_own_epochs_in_its_own_table(spark: SparkSession, stage: Stage) -> None:
    stage.continued(spark, 5, 4)
    with pytest.raises(InvalidOptionError, match="group 'lakehouse' already writes"):
        stage.drain(spark, group="other")
    elsewhere = ingestion(stage.folder / "u", group="other")
    drain(spark, stage.url, elsewhere)
    assert {stream for stream, _, _ in sequences_in_table(stage.folder / "u")} == {"orders"}


def restore(spark: SparkSession, stage: Stage, version: int) -> None:
    spark.sql(f"RESTORE TABLE delta.`{stage.what.table}` TO VERSION AS OF {version}")


@pytest.mark.slow
def test_a_restore_to_before_the_accept_does_not_take_it_back(spark: SparkSession, stage: Stage) -> None:
    stage.send(10)
    stage.drain(spark)  # init 0, batch 1
    stage.recreate()
    stage.send(4, epoch="orders#2")
    stage.accept(spark)  # 2
    stage.drain(spark)  # 3
    restore(spark, stage, 1)
    stage.drain(spark)
    assert stage.rows() == stage.sent
    assert stage.is_right()


@pytest.mark.slow
def test_what_a_restore_removed_of_a_stream_that_is_gone_is_an_error_until_it_is_recorded(
    spark: SparkSession, stage: Stage
) -> None:
    stage.send(5)
    stage.drain(spark)
    stage.continued(spark, 5, 4)
    before = stage.what.ledger().read().version
    restore(spark, stage, 1)
    for _ in range(2):
        with pytest.raises(DataLossError, match=r"recreated since: orders/0 \[5,10\)"):
            stage.drain(spark)
        assert not stage.is_right()
    restore(spark, stage, before)
    stage.drain(spark)
    assert stage.rows() == stage.sent, "a RESTORE forwards brings them back"
    restore(spark, stage, 1)
    stage.drain(spark, errors=ErrorPolicy(on_data_loss="record"))
    lost = {("orders", 0, number) for number in range(5, 10)}
    assert stage.rows() == {row: 1 for row in stage.sent if row not in lost}
    assert [str(parts) for entry in entries(stage.what) for parts in entry.lost.values()] == ["[5,10)"]
    letters = spark.read.format("delta").load(f"{stage.what.table}_dead_letters").collect()
    assert [(row["_stream"], "sequences 5 to 9" in row["error"]) for row in letters] == [("orders", True)]
    assert stage.what.ledger().read().gone == {}
    stage.drain(spark)
    assert stage.is_right()


@pytest.mark.slow
def test_a_replay_of_what_is_gone_says_so_and_touches_nothing(spark: SparkSession, stage: Stage) -> None:
    stage.send(10)
    stage.drain(spark)
    with open_batch_source(stage.url) as old:
        begun = replace(stage.what, limits=replace(stage.what.limits, max_records=4))
        wanted = Replay(id="begun")
        list(drain_batches(ReplayJob(spark, old, begun, wanted), max_batches=1))
    stage.recreate()
    stage.send(4, epoch="orders#2")
    stage.accept(spark)
    stage.drain(spark)
    with open_batch_source(stage.url) as source:
        job = ReplayJob(spark, source, stage.what, Replay(start=Bound.parse("orders/0=2")))
        with pytest.raises(InvalidOptionError, match="orders/0 is of another epoch"):
            job.plan()
        with pytest.raises(DataLossError, match="recreated since this replay was begun"):
            ReplayJob(spark, source, stage.what, wanted).plan()
        assert stage.rows() == stage.sent
        list(drain_batches(ReplayJob(spark, source, stage.what, Replay())))
        replaced = [entry.ranges for entry in entries(stage.what) if entry.kind == "replay"][-1]
        assert replaced == {Shard("orders#2"): (0, 4)}
    assert stage.rows() == stage.sent


@pytest.mark.slow
def test_a_rewind_moves_the_new_epoch_only(spark: SparkSession, stage: Stage) -> None:
    stage.continued(spark, 10, 6)
    with open_batch_source(stage.url) as source:
        (move,) = rewind(spark, source, stage.what, Bound.parse("earliest"))
        assert (str(move.shard), move.position, move.to) == ("orders#2/0", 6, 0)
    stage.drain(spark)
    assert stage.rows() == stage.sent
    assert stage.is_right()


@pytest.mark.slow
def test_rows_that_were_to_be_replaced_stay_when_their_stream_is_gone(spark: SparkSession, stage: Stage) -> None:
    stage.send(10)
    stage.drain(spark)
    with open_batch_source(stage.url) as source:
        rewind(spark, source, stage.what, Bound.parse("earliest"))
    stage.recreate()
    stage.send(4, epoch="orders#2")
    stage.accept(spark)
    stage.drain(spark)
    assert stage.rows() == stage.sent
    assert stage.what.ledger().read().shards[Shard("orders")].redo.ranges == ()


@pytest.mark.slow
def test_the_transform_sees_the_epoch_and_dead_letters_carry_it(spark: SparkSession, stage: Stage) -> None:
    stage.send(3)
    stage.drain(spark)
    stage.recreate()
    with create_producer(stage.url) as producer:
        producer.send(b"{")
    stage.accept(spark)
    stage.drain(spark)
    letters = spark.read.format("delta").load(f"{stage.what.table}_dead_letters").collect()
    assert [(row["_stream"], row["_sequence"]) for row in letters] == [("orders#2", 0)]
    assert stage.is_right()


# On Kafka


def accept_topic(spark: SparkSession, what: Pipeline) -> list[AcceptedEpoch]:
    with what.source.open() as opened:
        return accept(spark, opened, what.ingestion)


def identities(topic: str, count: int, *, epoch: int = 1) -> set[tuple[str, int, int]]:
    name = topic if epoch == 1 else f"{topic}#{epoch}"
    return {(name, 0, number) for number in range(count)}


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True], ids=["resumable", "load_balanced"])
def test_a_recreated_topic_continues_and_the_broker_hears_of_it(
    spark: SparkSession, broker: Broker, folder: Path, is_shared: bool
) -> None:
    topic, what = filled(spark, broker, folder, orders(8))
    what = what.shared() if is_shared else what
    what.drain()
    broker.recreate(topic)
    broker.send(topic, orders(5, first=100))
    with pytest.raises(SourceRecreatedError, match=f"accept --as {topic}#2"):
        what.drain()
    accept_topic(spark, what)
    what.drain()
    assert broker.committed(what.group, topic) == {0: 5}
    broker.send(topic, orders(5, first=105))
    what.drain()
    assert broker.committed(what.group, topic) == {0: 10}
    assert sequences_in_table(folder / "t") == dict.fromkeys(identities(topic, 8) | identities(topic, 10, epoch=2), 1)
    with what.source.open() as opened:
        assert all(verdict.is_right and not verdict.lag for verdict in verify(opened, what.ingestion))


@pytest.mark.slow
def test_the_mode_is_switched_in_a_later_epoch(spark: SparkSession, broker: Broker, folder: Path) -> None:
    topic, what = filled(spark, broker, folder, orders(8))
    what.drain()
    broker.recreate(topic)
    broker.send(topic, orders(5, first=100))
    accept_topic(spark, what)
    what.drain()
    for to, following in ((ConsumerMode.LOAD_BALANCED, what.shared()), (ConsumerMode.RESUMABLE, what)):
        with what.source.open() as opened:
            assert switch_sharing(spark, what.ingestion, to=to, source=opened)
        broker.send(topic, orders(2))
        following.drain()
    assert sequences_in_table(folder / "t") == dict.fromkeys(identities(topic, 8) | identities(topic, 9, epoch=2), 1)


# On Redis


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["resumable", "load_balanced"])
def test_a_redis_stream_that_was_made_again_with_lower_ids_continues(
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
        with pytest.raises(SourceRecreatedError, match=f"accept --as {stream.name}#{epoch}"):
            stream.drain(spark)
        name = f"{stream.name}#{epoch}"
        assert [one.name for one in accept_epochs(name)] == [name]
        assert sum(measure(stream.source, stream.ingestion(claims=mode != "resumable")).lag.values()) == count
        stream.drain(spark)
        add_with_ids(stream, 1, first=count)
        stream.drain(spark)
        if mode == "load_balanced":
            assert stream.groups()[0][1:] == (0, 0)
        with pytest.raises(InvalidOptionError, match="nothing to accept"):
            accept_epochs()
    found = Counter(name for name, _, _ in sequences_in_table(stream.table).elements())
    assert found == {stream.name: 10, f"{stream.name}#2": 5, f"{stream.name}#3": 4}
    assert max(sequences_in_table(stream.table).values()) == 1
    stream.client.close()


def add_with_ids(stream: Stream, count: int, *, first: int = 0) -> None:
    for number in range(first, first + count):
        stream.client.xadd(stream.keys[0], {"msg": b'{"id": 1, "user": "u"}'}, id=f"{1000 + number}-0")


@pytest.mark.slow
def test_a_group_that_is_gone_from_the_same_stream_is_not_accepted_as_another_one(
    spark: SparkSession, redis_address: str, folder: Path
) -> None:
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
def test_members_that_claim_from_the_new_group_under_the_old_name_write_nothing(
    spark: SparkSession, redis_address: str, folder: Path
) -> None:
    """A member looked into the ledger before the accept, and claims after another one has made the group."""
    from spark_jobs.claims.claim_job import ClaimJob

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
def test_runs_that_are_killed_before_and_after_an_accept_are_continued(
    spark: SparkSession, server: str, folder: Path
) -> None:
    stage = Stage(f"file://{folder}/orders.ss/orders", folder)
    # Each kill happens once.
    faults = {"orders": ["planned", "mid-write"], "orders#2": ["writing", "rows written"], "orders#3": ["verified"]}
    for epoch, listed in faults.items():
        stage.send(200, epoch=epoch)
        if epoch != "orders":
            stage.accept(spark, epoch)
        kill_in_turn(stage.url, folder / "t", listed, "lakehouse", "resumable", server)
        stage.drain(spark)
        assert stage.rows() == stage.sent
        assert stage.is_right()
        stage.recreate()
