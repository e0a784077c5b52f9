"""A stream that lost its newest messages and grew again is detected, and accepted where it differs from the table."""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis
from deltalake import CommitProperties, Transaction, write_deltalake
from pyspark.sql import SparkSession

from spark_jobs.batches.accept import divergences, same_up_to
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Ingestion, Observer, Step, ignore_steps
from spark_jobs.batches.replay import rewind
from spark_jobs.decoding.decoders import Raw
from spark_jobs.lag import measure
from spark_jobs.run_ingestion import drain
from spark_jobs.verify import ShardVerdict, verify
from stream_consumers.batches import Range
from stream_consumers.create import StreamSource, create_producer, open_batch_source
from stream_consumers.errors import SourceTruncatedError
from stream_consumers.kafka import batches as kafka_batches
from stream_consumers.memory import forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, DataLoss, ErrorPolicy, Limits
from stream_consumers.redis.batches import RedisBatchSource
from stream_consumers.redis.entries import to_sequence
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import entries, ingestion
from tests.support.kafka_broker import broker_in
from tests.support.kafka_topics import Once, Topics, assert_each_once, orders
from tests.support.redis_tables import Stream
from tests.support.streams import Identity, sequences_in_table
from tests.support.written_log import made_entry

RECORD = ErrorPolicy(on_data_loss="record")
FIRST, SECOND = Shard("orders", 0), Shard("orders", 1)


class Stage:
    """A stream in memory that can lose its newest messages, and the table that it is written into."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.url = f"memory://{uuid.uuid4().hex}/orders"
        self.table = folder / "t"
        self.what: Ingestion = replace(ingestion(self.table), driver_records=10_000)
        self.moment = 1_000_000

    def send(self, count: int, shard: Shard = FIRST) -> None:
        """Append messages, each a millisecond later than the one before it."""
        for _ in range(count):
            self.moment += 1
            memory_broker(self.url).append(shard, b'{"id": %d}' % self.moment, self.moment)

    def cut(self, end: int, shard: Shard = FIRST) -> None:
        """Lose the messages from this sequence on."""
        broker = memory_broker(self.url)
        with broker.changed:
            del broker.messages[shard][end:]
            broker.ends[shard] = end

    @property
    def source(self) -> StreamSource:
        return StreamSource(StreamUrl.parse(self.url))

    def drain(self, observer: Observer = ignore_steps, **changes: Any) -> None:
        """A run to the end."""
        list(drain(self.spark, self.source, replace(self.what, **changes), observer=observer))

    def record(self, **changes: Any) -> None:
        """A run to the end that records what the stream has lost."""
        self.drain(errors=RECORD, **changes)

    def rows(self) -> Counter[Identity]:
        return sequences_in_table(self.table)

    def verify(self) -> list[ShardVerdict]:
        with open_batch_source(self.url) as source:
            return verify(source, self.what)

    def is_right(self) -> bool:
        return all(verdict.is_right and not verdict.lag for verdict in self.verify())


@pytest.fixture
def stage(spark: SparkSession, folder: Path) -> Iterator[Stage]:
    made = Stage(spark, folder)
    yield made
    forget_memory_broker(StreamUrl.parse(made.url))


def orders_of(epoch: str, start: int, end: int, shard: int = 0) -> set[Identity]:
    return {(epoch, shard, number) for number in range(start, end)}


@pytest.mark.parametrize("grown", [*(pytest.param(count, marks=pytest.mark.slow) for count in (0, 20, 50)), 90])
def test_a_stream_that_was_cut_is_an_error_or_continues_where_it_differs(stage: Stage, grown: int) -> None:
    stage.send(30)
    stage.drain()
    stage.send(70)
    stage.drain()
    stage.cut(50)
    stage.send(grown)
    for read in (stage.drain, stage.verify, lambda: measure(stage.source, stage.what)):
        with pytest.raises(SourceTruncatedError) as error:
            read()
        facts = error.value.facts
        assert (facts["shard"], facts["sequence"], facts["position"]) == ("orders/0", 99, 100)
        assert (facts["end"], facts["expected_timestamp_ms"]) == (50 + grown, 1_000_100)
        assert (facts["found_sequence"] == 99) == (grown >= 50)
    found = measure(stage.source, replace(stage.what, errors=RECORD))
    assert found.total > 0, "the sensor asks for the run that records it"
    stage.record()
    wanted = orders_of("orders", 0, 100) | orders_of("orders#2", 50, 50 + grown)
    assert_each_once(stage.rows(), wanted)
    (accepted,) = (entry for entry in entries(stage.what) if entry.kind == "accept")
    assert (dict(accepted.origin), dict(accepted.ended)) == ({Shard("orders#2"): 50}, {FIRST: 100})
    assert stage.is_right()
    stage.send(5)
    stage.drain()
    assert_each_once(stage.rows(), wanted | orders_of("orders#2", 50 + grown, 55 + grown))


@pytest.mark.slow
def test_shards_that_lost_nothing_continue_at_their_positions_and_are_still_watched(stage: Stage) -> None:
    stage.send(10)
    stage.send(10, SECOND)
    stage.drain()
    stage.cut(6)
    stage.send(9)
    stage.send(3, SECOND)
    stage.record()
    wanted = orders_of("orders", 0, 10) | orders_of("orders", 0, 10, 1)
    wanted |= orders_of("orders#2", 6, 15) | orders_of("orders#2", 10, 13, 1)
    assert_each_once(stage.rows(), wanted)
    stage.cut(8, SECOND)
    stage.send(20, SECOND)
    with pytest.raises(SourceTruncatedError):
        stage.drain()
    stage.record()
    # This cut goes below the origin of its epoch. No message of it is the same, so all of the shard is read again.
    assert_each_once(stage.rows(), wanted | orders_of("orders#3", 0, 28, 1))


@pytest.mark.slow
def test_a_shard_that_was_lost_as_a_whole_begins_anew(spark: SparkSession, folder: Path) -> None:
    path = folder / "orders.ss"
    what = replace(ingestion(folder / "t"), driver_records=10_000, errors=RECORD)
    source = StreamSource(StreamUrl.parse(f"file://{path}/orders"))

    def send(count: int, shard: int = 0) -> None:
        with create_producer(str(source.url)) as producer:
            for _ in range(count):
                producer.send(b'{"id": 1}', shard=shard)

    send(2)
    copy = path.read_bytes()
    send(1, 1)
    send(1, 2)
    send(1)
    list(drain(spark, source, what))
    path.write_bytes(copy)
    send(2)
    send(2, 1)
    list(drain(spark, source, what))
    wanted = orders_of("orders", 1, 4) | orders_of("orders", 1, 2, 1) | orders_of("orders", 1, 2, 2)
    wanted |= orders_of("orders#2", 3, 5) | orders_of("orders#2", 1, 3, 1)
    assert_each_once(sequences_in_table(what.table), wanted)
    send(2, 2)
    list(drain(spark, source, what))
    assert_each_once(sequences_in_table(what.table), wanted | orders_of("orders#2", 1, 3, 2))


@pytest.mark.slow
def test_messages_with_equal_timestamps_are_told_apart_and_none_is_lost(stage: Stage) -> None:
    for number in range(20):
        memory_broker(stage.url).append(FIRST, b'{"id": %d}' % number, 7)
    stage.drain()
    stage.cut(10)
    for number in range(20):
        memory_broker(stage.url).append(FIRST, b'{"id": %d}' % (100 + number), 7)
    with pytest.raises(SourceTruncatedError):
        stage.drain()
    stage.record()
    # Timestamps do not show where the streams differ, so that the new epoch begins where the group did.
    assert_each_once(stage.rows(), orders_of("orders", 0, 20) | orders_of("orders#2", 0, 30))


@pytest.mark.slow
def test_a_stream_that_was_cut_after_its_oldest_messages_expired_continues_where_it_differs(stage: Stage) -> None:
    """All timestamps are equal, so that only the last messages of the batches show the place."""
    for number in range(150):
        if number == 100:
            stage.drain(limits=Limits(max_records=10))
            with memory_broker(stage.url).changed:
                del memory_broker(stage.url).messages[FIRST][:75]
                del memory_broker(stage.url).messages[FIRST][-10:]
                memory_broker(stage.url).ends[FIRST] = 90
        memory_broker(stage.url).append(FIRST, b'{"id": %d}' % number, 1_000)
    stage.record()
    assert_each_once(stage.rows(), orders_of("orders", 0, 100) | orders_of("orders#2", 90, 140))


def test_a_group_that_began_at_the_end_misses_nothing_of_a_stream_that_was_cut_below_that(stage: Stage) -> None:
    stage.send(10)
    stage.drain(start=AutoStreamReset.LATEST)
    assert stage.what.ledger().read().positions == {FIRST: 10}
    stage.cut(5)
    stage.send(20)
    with pytest.raises(SourceTruncatedError):
        stage.drain()
    stage.record()
    # Which messages before its origin are new the group cannot know: it reads all of them.
    assert_each_once(stage.rows(), orders_of("orders#2", 0, 25))


@pytest.mark.slow
def test_a_transform_that_drops_all_rows_hides_nothing(stage: Stage) -> None:
    stage.send(10)
    nothing = {"transform": lambda rows: rows.where("false")}
    stage.drain(**nothing)
    stage.send(10)
    stage.drain(**nothing)
    stage.cut(15)
    stage.send(15)
    with pytest.raises(SourceTruncatedError):
        stage.drain(**nothing)
    stage.record(**nothing)
    # There are no rows to compare: the new epoch begins behind the last batch that is the same.
    assert stage.what.ledger().read().positions == {FIRST: 20, Shard("orders#2"): 30}
    (accepted,) = (entry for entry in entries(stage.what) if entry.kind == "accept")
    assert dict(accepted.origin) == {Shard("orders#2"): 10}


@pytest.mark.parametrize("loss", [DataLoss.ERROR, pytest.param(DataLoss.RECORD, marks=pytest.mark.slow)])
def test_a_stream_that_is_cut_between_two_batches_of_a_run(stage: Stage, loss: DataLoss) -> None:
    stage.what = replace(
        stage.what, limits=replace(stage.what.limits, max_records=10), errors=ErrorPolicy(on_data_loss=loss)
    )
    stage.send(20)

    def cut() -> None:
        stage.cut(5)
        stage.send(30)

    cutting = Once(Step.COMMITTED, cut)
    if loss is DataLoss.RECORD:
        stage.drain(cutting)
        assert_each_once(stage.rows(), orders_of("orders", 0, 10) | orders_of("orders#2", 5, 35))
    else:
        with pytest.raises(SourceTruncatedError):
            stage.drain(cutting)
        assert_each_once(stage.rows(), orders_of("orders", 0, 10))
    assert cutting.is_done


def test_a_run_whose_ends_another_run_has_passed_raises_no_false_alarm(stage: Stage) -> None:
    """Rows are left to replace, so that it plans again below the ends that it captured when it began."""
    stage.what = replace(stage.what, limits=replace(stage.what.limits, max_records=10))
    stage.send(20)

    def pass_by() -> None:
        stage.send(10)
        stage.drain()
        with open_batch_source(stage.url) as source:
            rewind(stage.spark, source, stage.what, Bound(edge=AutoStreamReset.EARLIEST))

    passing = Once(Step.COMMITTED, pass_by)
    stage.drain(passing)
    assert passing.is_done
    assert stage.what.ledger().read().positions == {FIRST: 30}
    assert_each_once(stage.rows(), orders_of("orders", 0, 30))


@pytest.mark.slow
def test_what_moves_a_group_without_a_loss_raises_no_false_alarm(stage: Stage) -> None:
    stage.send(10)
    stage.drain()
    version = stage.what.ledger().read().version
    stage.send(10)
    stage.drain()
    stage.spark.sql(f"RESTORE TABLE delta.`{stage.table}` TO VERSION AS OF {version}")
    last = stage.what.ledger().read().last_messages[FIRST]
    assert last.sequence == 9, "the last message is taken back with the position"
    stage.drain()
    with open_batch_source(stage.url) as source:
        rewind(stage.spark, source, stage.what, Bound(edge=AutoStreamReset.EARLIEST))
    stage.drain()
    assert stage.what.ledger().read().last_messages[FIRST].sequence == 19
    assert_each_once(stage.rows(), orders_of("orders", 0, 20))
    # Retention, or compaction, removes the very message.
    broker = memory_broker(stage.url)
    with broker.changed:
        del broker.messages[FIRST][15:20]
    stage.send(3)
    stage.drain()
    assert_each_once(stage.rows(), orders_of("orders", 0, 23))


@pytest.mark.slow
def test_messages_in_place_of_some_that_nobody_could_read(stage: Stage) -> None:
    """Those of an aborted transaction, for instance: the last message that was read is far before the position."""
    stage.send(10)
    broker = memory_broker(stage.url)
    with broker.changed:
        del broker.messages[FIRST][5:10]
    stage.drain()
    state = stage.what.ledger().read()
    assert (state.positions[FIRST], state.last_messages[FIRST].sequence) == (10, 4)
    stage.cut(5)
    stage.send(10)
    with pytest.raises(SourceTruncatedError) as error:
        stage.drain()
    assert (error.value.facts["position"], error.value.facts["found_sequence"]) == (10, 9)
    stage.record()
    assert_each_once(stage.rows(), orders_of("orders", 0, 5) | orders_of("orders#2", 5, 15))


def test_entries_of_older_releases_raise_no_alarm(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.send(10)
    with monkeypatch.context() as older:
        older.setattr("stream_consumers.memory.MemoryBatchSource.last_messages", lambda self, ranges: {})
        stage.drain()
    assert stage.what.ledger().read().last_messages == {}
    stage.cut(5)
    stage.send(10)
    stage.drain()
    assert stage.what.ledger().read().last_messages[FIRST].sequence == 14
    (verdict,) = stage.verify()
    assert (verdict.other, verdict.examples["other"], verdict.is_right) == (5, [5, 6, 7, 8, 9], False)


@pytest.mark.parametrize("kind", ["CreateTime", pytest.param("LogAppendTime", marks=pytest.mark.slow)])
def test_a_topic_that_grew_past_the_position_again(topics: Topics, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A topic that is made anew, under the same id, stands for a broker that is restored."""
    monkeypatch.setattr(
        kafka_batches, "topic_ids", lambda cluster, streams: dict.fromkeys(cluster.topics(streams), "kafka:the one")
    )
    config = {"message.timestamp.type": kind}
    topic = topics.create(config=config)
    topics.send(topic, orders(8))
    what = topics.pipeline(topic, driver_records=10_000)
    what.drain()
    topics.delete(topic)
    topics.create(name=topic, config=config)
    topics.send(topic, orders(12, first=100))
    for read in (what.drain, lambda: measure(what.source, what.ingestion)):
        with pytest.raises(SourceTruncatedError) as error:
            read()
        assert (error.value.facts["position"], error.value.facts["end"]) == (8, 12)
    what.having(errors=RECORD).drain()
    assert_each_once(what.rows(), {(topic, 0, n) for n in range(8)} | {(f"{topic}#2", 0, n) for n in range(12)})
    assert all(verdict.is_right for verdict in what.verify())


@pytest.mark.slow
def test_topics_that_lose_messages_to_retention_and_transactions_raise_no_false_alarm(topics: Topics) -> None:
    topic = topics.create()
    what = topics.pipeline(topic, driver_records=10_000)
    topics.commit(topic, 3)
    what.drain()
    assert what.ingestion.ledger().read().last_messages[Shard(topic)].sequence == 2, "a marker is no message"
    topics.abort(topic, 4)
    what.drain()
    topics.send(topic, orders(2))
    what.drain()
    end = topics.end(topic)
    assert what.ingestion.ledger().read().last_messages[Shard(topic)].sequence == end - 1
    topics.remove_before(topic, end)
    assert what.drain() == []
    assert [(v.missing, v.duplicated, v.unknown, v.is_right) for v in what.verify()] == [(0, 0, 0, True)]
    topics.send(topic, orders(2))
    what.drain()
    assert sum(what.rows().values()) == 3 + 2 + 2


def test_a_redis_replica_that_lacks_the_newest_entries(spark: SparkSession, redis_address: str, folder: Path) -> None:
    """Its clock is behind, so that some new entries have lower ids than those that were lost."""
    stream = Stream(redis_address, folder, shards=1)
    (key,) = stream.keys

    def add(*ids: str) -> None:
        for entry_id in ids:
            stream.client.xadd(key, {"msg": b'{"id": 1}'}, id=entry_id)

    def rows(epoch: str, *ids: str) -> set[Identity]:
        return {(epoch, 0, to_sequence(entry_id)) for entry_id in ids}

    kept, lost = [f"100{n}-0" for n in range(6)], [f"100{n}-0" for n in range(6, 10)]
    add(*kept)
    replica = stream.client.dump(key)
    add(*lost)
    stream.drain(spark)
    assert stream.drain(spark) == []
    stream.client.restore(key, 0, replica, replace=True)
    new = ["1005-1", "1005-2", "1007-5", "1010-0"]
    add(*new)
    with pytest.raises(SourceTruncatedError):
        stream.drain(spark)
    stream.drain(spark, replace(stream.ingestion(), errors=RECORD))
    # The time of an entry is in its id, so that it shows no difference: the batch that was lost in part is repeated.
    repeated = rows(f"{stream.name}#2", *kept, *new)
    assert_each_once(sequences_in_table(stream.table), rows(stream.name, *kept, *lost) | repeated)
    # Entries that are deleted, or trimmed, are no such loss.
    stream.client.xdel(key, "1010-0")
    add("1011-0")
    stream.drain(spark)
    stream.client.xtrim(key, maxlen=0, approximate=False)
    add("1012-0")
    stream.drain(spark)
    assert sequences_in_table(stream.table).total() == 10 + 6 + 6


def test_a_stream_file_that_is_restored_from_a_copy_and_grows_again(spark: SparkSession, folder: Path) -> None:
    """Messages that are dead letters are replaced by messages of the same sizes."""
    path = folder / "orders.ss"
    what = replace(ingestion(folder / "t"), driver_records=10_000)
    url = f"file://{path}/orders"
    source = StreamSource(StreamUrl.parse(url))

    def send(*payloads: bytes, shard: int = 0) -> None:
        with create_producer(url) as producer:
            for payload in payloads:
                producer.send(payload, shard=shard)

    send(b'{"id": 1}', b'{"id": 2}')
    copy = path.read_bytes()
    send(b'{"id" 03}', b'{"id" 04}')
    list(drain(spark, source, what))
    path.write_bytes(copy)
    send(b'{"id": 5}', b'{"id": 6}', b'{"id": 7}')
    send(b'{"id": 8}', b'{"id": 9}', shard=1)
    with pytest.raises(SourceTruncatedError) as error:
        list(drain(spark, source, what))
    assert (error.value.facts["sequence"], error.value.facts["position"], error.value.facts["end"]) == (4, 5, 6)
    list(drain(spark, source, replace(what, errors=RECORD)))
    wanted = orders_of("orders", 1, 3) | orders_of("orders#2", 3, 6) | orders_of("orders#2", 1, 3, 1)
    assert_each_once(sequences_in_table(what.table), wanted)
    assert sequences_in_table(f"{what.table}_dead_letters") == Counter(orders_of("orders", 3, 5))
    with open_batch_source(url) as opened:
        assert all(verdict.is_right and not verdict.lag for verdict in verify(opened, what))


@pytest.mark.parametrize("apart_ms", [0, 1], ids=["one_millisecond", "a_millisecond_each"])
def test_entries_of_redis_with_the_ids_of_lost_ones_are_read(redis_address: str, tmp_path: Path, apart_ms: int) -> None:
    host, _, port = redis_address.partition(":")
    name = f"orders-{uuid.uuid4().hex[:8]}"
    shard, ids = Shard(name), [f"{1_700_000_000_000 + n * apart_ms}-{n}" for n in range(100)]
    what = Ingestion(group="g", table=str(tmp_path / "t"), decoder=Raw())
    with redis.Redis(host, int(port)) as client, RedisBatchSource(f"redis://{redis_address}/{name}") as source:
        begins = [to_sequence(entry_id) for entry_id in ids]
        for number, (start, end) in enumerate([(0, 40), (40, 100)], start=1):
            for n in range(start, 50 if end == 100 else end):
                client.xadd(name, {"msg": f"old {n}"}, id=ids[n])
            dump = client.dump(name)
            for n in range(50, end):
                client.xadd(name, {"msg": f"old {n}"}, id=ids[n])
            source.extents()
            part = Range(begins[start - 1] + 1 if start else 0, begins[end - 1] + 1)
            entry = made_entry(
                number,
                number - 2,
                origin={shard: 0} if number == 1 else {},
                ranges={shard: part},
                last_messages=source.last_messages({shard: part}),
                state={} if number == 1 else None,
            )
            rows = pa.table(
                {
                    "_stream": [name] * (end - start),
                    "_shard": pa.array([0] * (end - start), pa.int64()),
                    "_sequence": pa.array(begins[start:end], pa.int64()),
                    "_timestamp": pa.array([(s >> 16) * 1000 for s in begins[start:end]], pa.timestamp("us", "UTC")),
                }
            )
            properties = CommitProperties(
                {"userMetadata": entry.to_json()}, app_transactions=[Transaction(entry.app, number)]
            )
            write_deltalake(what.table, rows, mode="append", commit_properties=properties)
        client.restore(name, 0, dump, replace=True)
        for n in range(50, 80):
            client.xadd(name, {"msg": f"new {n}"}, id=ids[n])
        state, extents = what.ledger().read(), source.extents()
        found = divergences(source, what, state, extents, same_up_to(source, what, state, [shard]))
    assert found == {shard: begins[39] + 1}


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1], ids=["same_leader_epoch", "newer_leader_epoch"])
def test_a_restored_broker_that_grew_past(spark: SparkSession, folder: Path, tmp_path: Path, restarts: int) -> None:
    server, snapshot = tmp_path / "broker", tmp_path / "snapshot"
    server.mkdir()
    with broker_in(server, 0) as listeners:
        port = int(listeners.plain.rpartition(":")[2])
        topics = Topics(listeners.plain, spark, folder)
        topic = topics.create()
        topics.send(topic, orders(50))
    shutil.copytree(server, snapshot)
    with broker_in(server, port):
        topics.send(topic, orders(50, first=50))
        what = topics.pipeline(topic)
        what.drain()
        assert what.positions() == {0: 100}
    shutil.rmtree(server)
    shutil.copytree(snapshot, server)
    for _ in range(restarts):
        with broker_in(server, port):
            pass
    with broker_in(server, port):
        topics.send(topic, orders(100, first=1000))
        for read in (what.drain, what.verify, lambda: measure(what.source, what.ingestion)):
            with pytest.raises(SourceTruncatedError) as error:
                read()
            assert (error.value.facts["position"], error.value.facts["end"]) == (100, 150)
        what.having(errors=RECORD).drain()
        kept, new = {(topic, 0, number) for number in range(100)}, {(f"{topic}#2", 0, n) for n in range(50, 150)}
        assert_each_once(what.rows(), kept | new)
        assert all(verdict.is_right and not verdict.lag for verdict in what.verify())
