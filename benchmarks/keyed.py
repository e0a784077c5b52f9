"""Merges changes into keyed tables, beside Structured Streaming with ``foreachBatch`` and a bare MERGE."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from benchmarks import messages, peers
from benchmarks.harness import Bench, Case
from benchmarks.messages import DDL, PARTITIONS
from spark_jobs.batches.ingest_job import IngestJob
from spark_jobs.batches.ingestion import Batch, BatchReport, Ingestion
from spark_jobs.batches.job import written_events
from spark_jobs.batches.run_control import DeferredSignals, IdleWait
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.run_ingestion import drain
from spark_jobs.table_location import sql_name
from spark_jobs.writing.keyed import Keys
from stream_consumers.create import StreamSource
from stream_consumers.urls import StreamUrl
from tests.support.kafka_broker import kafka_broker
from tests.support.topics import create_topic

OURS, PEER, BARE = "stream-assets", "foreachBatch", "bare MERGE"
SMALL, LARGE = 1_000, 100_000
HOT, ANY = "hot", "any"
CHANGE_DDL = f"{DDL}, op STRING"
# A table has as many files as after OPTIMIZE; the number is the same at each scale.
TABLES = {2_000_000: 2, 20_000_000: 20}
HEAP = "6g"
"""The memory of the Spark server, which ended during merges into 20 M rows when it had the default of 2 GB."""
NEW, DELETED = 0.05, 0.1
NOTE = "the quick brown fox jumps over"
COLUMNS = ("id", "user", "amount", "ts", "note", "_stream", "_shard", "_sequence", "_timestamp")
MERGE = f"""
MERGE INTO {{table}} t USING {{{{changes}}}} s ON t.id = s.id
WHEN MATCHED AND s.op = 'd' THEN DELETE
WHEN MATCHED THEN UPDATE SET {", ".join(f"{name} = s.{name}" for name in COLUMNS)}
WHEN NOT MATCHED AND s.op <> 'd' THEN INSERT ({", ".join(COLUMNS)}) VALUES ({", ".join(f"s.{n}" for n in COLUMNS)})"""


class ChangeFeed:
    """Produces batches of changes to a topic, and remembers the newest change of each key.

    Args:
        address: the address of the broker.
        topic: the topic; all changes of a key are in one partition.
        rows: the number of keys in the table.
        newest: a path for the newest change of each key of the last batch.
    """

    def __init__(self, address: str, topic: str, rows: int, newest: Path) -> None:
        self._send = partial(messages.to_kafka, address, topic)
        self._topic = topic
        self._newest = newest
        self._random = np.random.default_rng(rows)
        self._end = rows
        self._sequences = np.zeros(PARTITIONS, np.int64)
        self.rows = rows
        self.changed: dict[int, tuple[int, bool]] = {}

    def send(self, count: int, *, are_hot: bool) -> None:
        """Produce a batch.

        Args:
            count: the number of changes.
            are_hot: whether a newer key changes more often than an older one, by Zipf's law.
        """
        hot, cold = self._end - self._random.zipf(1.5, count), self._random.integers(0, self._end, count)
        ids = np.where((hot >= 0) & are_hot, hot, cold)
        kind = self._random.random(count)
        is_new, is_deleted = kind < NEW, kind > 1 - DELETED
        ids[is_new] = self._end + np.arange(is_new.sum())
        self._end += int(is_new.sum())
        shards, sequences = ids % PARTITIONS, np.zeros(count, np.int64)
        for shard in range(PARTITIONS):
            own = shards == shard
            sequences[own] = self._sequences[shard] + np.arange(own.sum())
            self._sequences[shard] += own.sum()
        self._send(map(_document, ids.tolist(), is_deleted.tolist()), shards=shards.tolist())
        self.changed |= dict(zip(ids.tolist(), zip(sequences.tolist(), is_deleted.tolist())))
        _, last = np.unique(ids[::-1], return_index=True)
        newest = count - 1 - last
        columns = {"id": ids, "op": np.where(is_deleted, "d", "u"), "_shard": shards, "_sequence": sequences}
        pq.write_table(pa.table({name: pa.array(values[newest]) for name, values in columns.items()}), self._newest)

    def newest(self, spark: SparkSession) -> DataFrame:
        """The newest change of each key of the last batch, with the columns of the table."""
        return spark.read.parquet(str(self._newest)).selectExpr("*", *_values(self._topic))

    def check(self, table: DataFrame) -> None:
        """Fail unless the table has the newest change of each key."""
        changed = table.where("_sequence >= 0").select("id", "_sequence").toArrow()
        alive = {key: sequence for key, (sequence, is_deleted) in self.changed.items() if not is_deleted}
        assert dict(zip(*(column.to_pylist() for column in changed.columns))) == alive
        assert table.count() == self.rows - sum(key < self.rows for key in self.changed) + len(alive)


def _document(key: int, is_deleted: bool) -> bytes:
    return b'{"id":%d,"user":"u%d","amount":%d.25,"ts":"2026-11-21T00:00:00Z","note":"%s %x","op":"%s"}' % (
        key,
        key % 1000,
        key % 97,
        NOTE.encode(),
        key * 2_654_435_761,
        b"d" if is_deleted else b"u",
    )


def _values(topic: str) -> tuple[str, ...]:
    """The SQL of the other columns of a row with a given ``id``."""
    return (
        "concat('u', id % 1000) user",
        "CAST(id % 97 AS DOUBLE) + 0.25 amount",
        "TIMESTAMP '2026-11-21 00:00:00' ts",
        f"concat('{NOTE} ', lower(hex(id * 2654435761))) note",
        f"'{topic}' _stream",
        "TIMESTAMP '2026-11-21 00:00:00' _timestamp",
    )


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """A feed of changes, and a table for each way to merge them. The tables are equal before and after each round.

    Args:
        spark: the session.
        address: the address of the broker.
        topic: the topic of the feed.
        feed: produces the changes.
        paths: the table of each way.
    """

    spark: SparkSession
    address: str
    topic: str
    feed: ChangeFeed
    paths: Mapping[str, Path]

    @classmethod
    def create(cls, bench: Bench, spark: SparkSession, address: str, rows: int, files: int) -> Tables:
        """Create an empty table with stream-assets, fill it, and copy it."""
        topic, paths = create_topic(address, PARTITIONS), {name: bench.new_path() for name in (OURS, PEER, BARE)}
        tables = cls(spark, address, topic, ChangeFeed(address, topic, rows, bench.new_path()), paths)
        tables.drain()
        bench.log(f"writing {rows:,} rows")
        place = (f"id % {PARTITIONS} _shard", "CAST(-1 AS BIGINT) _sequence")
        stored = spark.range(0, rows, 1, files).selectExpr("id", *_values(topic), *place)
        stored.write.format("delta").mode("append").save(str(paths[OURS]))
        for name in (PEER, BARE):
            shutil.copytree(paths[OURS], paths[name], copy_function=_link)
        return tables

    def cases(self, running: IngestJob | None) -> Iterator[Case]:
        """The ways to merge what was sent.

        Args:
            running: a run of stream-assets that goes on; ``None`` to measure runs from their start to their end.
        """
        ours = self.drain if running is None else partial(_merge_one, running)
        ways = {OURS: ours, PEER: self.merge_available_now, BARE: self.merge_bare}
        for name, way in ways.items():
            yield Case(f"{name}, {self.feed.rows:,} rows", partial(_without_path, way), lambda path: None)

    @contextmanager
    def running(self) -> Iterator[IngestJob]:
        """Start a run of stream-assets that goes on."""
        with self.source.open() as source:
            job = IngestJob(self.spark, source, self.ingestion, idle_wait=IdleWait(36_000.0))
            assert job.plan() is None
            yield job

    @property
    def source(self) -> StreamSource:
        """The topic."""
        return StreamSource(StreamUrl.parse(f"kafka://{self.address}/{self.topic}"))

    @property
    def ingestion(self) -> Ingestion:
        """The settings of stream-assets."""
        keys = Keys(["id"], apply_as_deletes="op = 'd'", except_columns=["op"])
        decoder, table = Json(CHANGE_DDL), str(self.paths[OURS])
        return Ingestion(group="bench", table=table, decoder=decoder, retry_seconds=0.0, keys=keys)

    def drain(self) -> None:
        """Run stream-assets to the end of the topic."""
        for _ in drain(self.spark, self.source, self.ingestion):
            pass

    def merge_available_now(self) -> None:
        """Run Structured Streaming to the end of the topic."""
        statement = MERGE.format(table=sql_name(str(self.paths[PEER])))
        checkpoint = Path(f"{self.paths[PEER]}-checkpoint")
        peers.merge_available_now(self.spark, self.address, self.topic, CHANGE_DDL, statement, checkpoint)

    def merge_bare(self) -> None:
        """Merge the newest changes, which are Parquet."""
        statement = MERGE.format(table=sql_name(str(self.paths[BARE])))
        self.spark.sql(statement, changes=self.feed.newest(self.spark)).collect()

    def check(self) -> None:
        """Fail unless each table has the newest change of each key."""
        for path in self.paths.values():
            self.feed.check(self.spark.read.format("delta").load(str(path)))


def _link(source: str, target: str) -> None:
    """Copy a file of the log, and link a data file, which never changes."""
    (shutil.copy2 if "_delta_log" in source else os.link)(source, target)


def _without_path(way: Callable[[], object], path: Path) -> None:
    """Merge; the tables have their own paths."""
    way()


def _merge_one(job: IngestJob) -> None:
    """Merge a batch in a run that goes on."""
    batch = job.plan()
    assert isinstance(batch, Batch)
    assert any(isinstance(event, BatchReport) for event in written_events(job, batch, DeferredSignals()))


def keyed(bench: Bench) -> None:
    """Measure batches of 1,000 and 100,000 changes from Kafka into tables of 2 M and 20 M rows."""
    section = bench.section(
        "Changes into keyed tables",
        "Seconds of a batch of JSON from Kafka; a tenth are deletes, and 5 % are new keys. With hot keys, a newer key "
        "changes more often, by Zipf's law. Of 1,000 changes stream-assets merges those of a run that goes on; "
        "otherwise each run starts and ends. The bare MERGE gets the newest change of each key as Parquet. All "
        f"of them run in one Spark server with a heap of {HEAP}.",
        (OURS, PEER, BARE),
    )
    large = bench.size(LARGE, least=2 * SMALL)
    found: dict[tuple[int, str], list[list[float]]] = {}
    with ExitStack() as stack:
        spark = stack.enter_context(bench.spark(peers.jars(), is_kept=False, **{"spark.driver.memory": HEAP}))
        address, _ = stack.enter_context(bench.service(kafka_broker(bench.folder)))
        tables = [Tables.create(bench, spark, address, bench.size(rows), files) for rows, files in TABLES.items()]
        running = {own: stack.enter_context(own.running()) for own in tables}
        for count, keys in product((SMALL, large), (HOT, ANY)):
            # Small batches into both tables alternate, because they are compared; the rest of the time goes to the
            # table with a target.
            groups = [tables] if count == SMALL else [[own] for own in tables]
            for group in groups:
                ways = {own: list(own.cases(running[own] if count == SMALL else None)) for own in group}

                def send(count: int = count, keys: str = keys, group: Sequence[Tables] = group) -> None:
                    for own in group:
                        own.feed.send(count, are_hot=keys == HOT)

                rounds = bench.rounds if tables[0] in group else 1
                samples = bench.measure(
                    [case for own in ways.values() for case in own], rounds=rounds, before_round=send
                )
                for own, cases in ways.items():
                    own.check()
                    seconds = [median(sample.seconds for sample in samples[case.name]) for case in cases]
                    found.setdefault((count, keys), []).append(seconds)
                    bench.row(section, f"{count:,} of {keys} keys, {own.feed.rows:,} rows", *seconds)
    for keys in (HOT, ANY):
        (ours, _, bare), (into_large, *_) = found[SMALL, keys]
        bench.target(section, f"{SMALL:,} changes of {keys} keys: times a bare MERGE", ours / bare, at_most=1.3)
        if keys == HOT:
            bench.target(section, "the same into ten times the rows: times into these", into_large / ours, at_most=1.5)
        (ours, peer, _), _ = found[large, keys]
        what = f"{large:,} changes of {keys} keys: times as fast as foreachBatch"
        bench.target(section, what, peer / ours, at_least=1.2)
