"""Ingests a backlog of Kafka, Redis and files into Delta at the default limits, against the peer and bare loops."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from benchmarks import bare_loops, messages, peers
from benchmarks.harness import CORES, Bench, Case
from benchmarks.messages import DDL, LARGE, PARTITIONS, SMALL, Sequences, check_delta, check_parquet, documents
from spark_jobs.batches.ingestion import Ingestion, Transform
from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.decoders import Decoder, Raw
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.schema_registry import SchemaRegistry
from spark_jobs.reading.spark_types import plain_strings
from spark_jobs.run_ingestion import drain
from stream_consumers.create import StreamSource
from stream_consumers.urls import StreamUrl
from tests.support.kafka_broker import kafka_broker
from tests.support.redis_server import redis_server
from tests.support.schema_registry import schema_registry
from tests.support.topics import create_topic

OURS, PEER, LIMIT, APPEND = "stream-assets", "availableNow", "bare loop", "append by Spark"
OF_APPEND = "The append has Spark write the Parquet files of the bare loop into a Delta table."


def ours(
    spark: SparkSession,
    url: str,
    name: str = OURS,
    *,
    decoder: Decoder,
    expected: Sequences,
    transform: Transform | None = None,
) -> Case:
    """The case of stream-assets: drain the stream at the default limits."""

    def work(table: Path) -> None:
        ingestion = Ingestion(
            group=table.name,
            table=str(table),
            decoder=decoder,
            transform=transform,
            is_row_wise=True,
            retry_seconds=0.0,
        )
        for _ in drain(spark, StreamSource(StreamUrl.parse(url)), ingestion):
            pass

    return Case(name, work, partial(check_delta, expected=expected))


def peer(
    spark: SparkSession,
    address: str,
    topic: str,
    name: str = PEER,
    *,
    select: peers.Transform,
    expected: Sequences,
) -> Case:
    """The case of Structured Streaming with ``availableNow``."""
    work = partial(peers.available_now, spark, address, topic, select)
    return Case(name, work, partial(check_delta, expected=expected))


def bare(pool: ProcessPoolExecutor, loops: Sequence[Callable[[Path], None]], expected: Sequences) -> Case:
    """The case of the bare loops: each runs in a process and writes Parquet files into one folder."""

    def work(folder: Path) -> None:
        folder.mkdir()
        for running in [pool.submit(loop, folder) for loop in loops]:
            running.result()

    return Case(LIMIT, work, partial(check_parquet, expected=expected), is_bare=True)


def append(spark: SparkSession, rows: Path, expected: Sequences) -> Case:
    """The case of writing only: Spark appends rows of Parquet files to a Delta table, and reads no stream."""

    def work(table: Path) -> None:
        spark.read.parquet(str(rows)).write.format("delta").mode("append").save(str(table))

    return Case(APPEND, work, partial(check_delta, expected=expected))


def kafka(bench: Bench) -> None:
    """Measure 2 M messages of 95 bytes and 200,000 of 2 KB, raw and as JSON, against availableNow and a bare loop."""
    broker = kafka_broker(bench.folder)
    with bench.spark(peers.jars()) as spark, bench.service(broker) as (address, _), bench.workers() as pool:
        for count, size, is_target in ((bench.size(2_000_000), SMALL, True), (bench.size(200_000), LARGE, False)):
            topic = create_topic(address, PARTITIONS)
            bench.log(f"producing {count:,} messages of {size} bytes")
            expected = messages.to_kafka(address, topic, documents(count, size))
            ends = {shard: len(sequences) for shard, sequences in expected.items()}
            for kind, decoder, select, least, most in (
                ("raw", Raw(), peers.raw, 1.2, 1.15),
                ("JSON", Json(DDL), peers.typed(DDL), 1.8, 0.65),
            ):
                loops = [
                    partial(_consume, address, topic, {s: ends[s] for s in list(ends)[n::CORES]}, kind == "JSON")
                    for n in range(CORES)
                ]
                medians = bench.compare(
                    f"Kafka, {kind}: {count:,} messages of {size} bytes",
                    "Five typed columns of each document." if kind == "JSON" else "Payloads as bytes.",
                    [
                        ours(spark, f"kafka://{address}/{topic}", decoder=decoder, expected=expected),
                        peer(spark, address, topic, select=select, expected=expected),
                        bare(pool, loops, expected),
                    ],
                    messages=count,
                )
                ratio = medians[PEER].seconds / medians[OURS].seconds
                section = bench.sections[-1]
                if is_target:
                    bench.target(section, f"Kafka, {kind}: times as fast as availableNow", ratio, at_least=least)
                    cost = medians[OURS].cpu_seconds / medians[PEER].cpu_seconds
                    bench.target(section, f"Kafka, {kind}: CPU-seconds, times availableNow's", cost, at_most=most)
                else:
                    bench.log(f"  {ratio:.2f} times as fast as availableNow")


def _consume(address: str, topic: str, ends: dict[int, int], is_json: bool, folder: Path) -> None:
    bare_loops.consume(address, topic, ends, folder, is_json)


def avro(bench: Bench) -> None:
    """Measure the messages of the suite ``kafka`` in Avro with a schema registry."""
    count, broker = bench.size(2_000_000), kafka_broker(bench.folder)
    with bench.spark(peers.jars()) as spark, bench.service(broker) as (address, _), schema_registry() as registry:
        topic, schema = create_topic(address, PARTITIONS), json.dumps(messages.AVRO)
        number = registry.register(f"{topic}-value", schema)
        bench.log(f"producing {count:,} messages in Avro")
        expected = messages.to_kafka(address, topic, messages.avro_values(count, SMALL, number=number))
        decoder = Avro(registry=SchemaRegistry(registry.url), subject=f"{topic}-value")
        medians = bench.compare(
            f"Kafka, Avro: {count:,} messages that have {SMALL} bytes as JSON",
            "Five typed columns, with the schema in a registry. The peer uses `from_avro` with a given schema, and "
            "cuts off the schema id.",
            [
                ours(spark, f"kafka://{address}/{topic}", decoder=decoder, expected=expected),
                peer(spark, address, topic, select=peers.of_avro(schema), expected=expected),
            ],
            messages=count,
        )
        bench.log(f"  {medians[PEER].seconds / medians[OURS].seconds:.2f} times as fast as availableNow")


def transforms(bench: Bench) -> None:
    """Measure JSON from Kafka with 1 % malformed messages, and with a Python UDF as transform."""
    count = bench.size(500_000)
    broker = kafka_broker(bench.folder)
    with bench.spark(peers.jars()) as spark, bench.service(broker) as (address, _):
        clean, dirty = (create_topic(address, PARTITIONS) for _ in range(2))
        expected = messages.to_kafka(address, clean, documents(count))
        # 101 and the number of partitions have no common divisor, so that each partition has malformed messages.
        messages.to_kafka(address, dirty, documents(count, malformed_every=101))
        urls = {topic: f"kafka://{address}/{topic}" for topic in (clean, dirty)}
        decoder = Json(DDL)
        among = ours(spark, urls[dirty], "1 % malformed", decoder=decoder, expected=expected)
        all_valid = ours(spark, urls[clean], "all well-formed", decoder=decoder, expected=expected)
        medians = bench.compare(
            f"Kafka, JSON: {count:,} messages, with 1 % malformed, and with a Python UDF",
            "Malformed messages go into the dead-letter table. The UDF is the transform, and makes one column.",
            [
                all_valid,
                Case(among.name, among.work, messages.check_with_dead_letters(expected)),
                ours(spark, urls[clean], "Python UDF", decoder=decoder, expected=expected, transform=_uppercase()),
                peer(
                    spark,
                    address,
                    clean,
                    "availableNow, Python UDF",
                    select=lambda rows: _readable(_uppercase()(peers.typed(DDL)(rows))),
                    expected=expected,
                ),
            ],
            messages=count,
        )
        ratio = medians[among.name].seconds / medians[all_valid.name].seconds
        bench.target(bench.sections[-1], "1 % malformed messages: times well-formed ones", ratio, at_most=1.2)


def _readable(rows: DataFrame) -> DataFrame:
    """Remove the collation that a Connect client adds to results of a UDF, which delta-rs does not support."""
    return plain_strings(rows, rows.schema.fields)


def _uppercase() -> Transform:
    """A transform with a Python UDF, defined in a function so that it is sent to the workers by value."""

    @f.udf("string")
    def upper(text: str) -> str:
        return text.upper()

    def transform(batch: DataFrame) -> DataFrame:
        return batch.withColumn("upper", upper("note"))

    return transform


def redis(bench: Bench) -> None:
    """Measure a million entries of 4 keys, against XRANGE and Parquet."""
    count = bench.size(1_000_000)
    with bench.spark() as spark, bench.service(redis_server(bench.folder)) as address, bench.workers() as pool:
        bench.log(f"adding {count:,} entries")
        expected = messages.to_redis(address, "orders", documents(count))
        loops = [partial(_xrange, address, list(range(PARTITIONS))[n::CORES]) for n in range(CORES)]
        read = bench.new_path()
        read.mkdir()
        for loop in loops:
            loop(read)
        medians = bench.compare(
            f"Redis, raw: {count:,} entries of {SMALL} bytes",
            f"The bare loop uses XRANGE. {OF_APPEND}",
            [
                ours(spark, f"redis://{address}/orders", decoder=Raw(), expected=expected),
                bare(pool, loops, expected),
                append(spark, read, expected),
            ],
            messages=count,
        )
        ratio = medians[LIMIT].seconds / medians[OURS].seconds
        bench.target(bench.sections[-1], "Redis: times as fast as the bare loop", ratio, at_least=0.7)


def _xrange(address: str, shards: list[int], folder: Path) -> None:
    bare_loops.xrange(address, "orders", shards, folder)


def file(bench: Bench) -> None:
    """Measure a stream file with a million messages of 4 shards, against a scan and Parquet."""
    count = bench.size(1_000_000)
    path = bench.folder / "orders.ss"
    bench.log(f"writing {count:,} messages")
    messages.to_file(f"file://{path}/orders", documents(count))
    scanned = bench.new_path()
    scanned.mkdir()
    bare_loops.scan(path, scanned)
    expected = _sequences(pq.read_table(scanned, columns=["_shard", "_sequence"]), count)
    with bench.spark() as spark, bench.workers() as pool:
        medians = bench.compare(
            f"File, raw: {count:,} messages of {SMALL} bytes",
            f"The bare loop runs in one process, because a file has no index of its frames. {OF_APPEND}",
            [
                ours(spark, f"file://{path}/orders", decoder=Raw(), expected=expected),
                bare(pool, [partial(bare_loops.scan, path)], expected),
                append(spark, scanned, expected),
            ],
            messages=count,
        )
        ratio = medians[LIMIT].seconds / medians[OURS].seconds
        bench.target(bench.sections[-1], "File: times as fast as the bare loop", ratio, at_least=0.5)


def _sequences(rows: pa.Table, count: int) -> Sequences:
    """The sequences of a scan, which must have found ``count`` messages."""
    shards, sequences = rows.column("_shard").to_numpy(), rows.column("_sequence").to_numpy()
    found = {shard: np.unique(sequences[shards == shard]) for shard in range(PARTITIONS)}
    assert sum(map(len, found.values())) == count
    return found
