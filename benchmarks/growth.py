"""How times and memory grow with the table, the stream and the backlog."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from deltalake import DeltaTable
from pyspark.sql import SparkSession

from benchmarks import messages
from benchmarks.harness import MEGABYTE, Bench
from benchmarks.messages import DDL, documents
from benchmarks.micro_batch import ROWS, BareAppend
from benchmarks.process_cost import ProcessTree
from spark_jobs.batches.ingestion import BatchReport, Ingestion
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.lag import measure
from spark_jobs.ledger.entries import LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.run_ingestion import drain
from stream_consumers.batches import Range
from stream_consumers.create import StreamSource
from stream_consumers.messages import Shard
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl
from tests.support.kafka_broker import kafka_broker
from tests.support.redis_server import redis_server
from tests.support.topics import create_topic
from tests.support.written_log import WrittenLog

LOOKUPS = 5
BATCHES = 5
# A leak in the heap would end the server long before the last batch.
HEAP = "768m"
BATCHES_OF_A_RUN = 25


def sizes(bench: Bench, *full: int) -> list[int]:
    """The sizes that are not too large at this scale, and always the first."""
    return [size for size in full if size == full[0] or size <= full[-1] * bench.scale]


def versions(bench: Bench) -> None:
    """Measure a look-up in the ledger, from 10 versions of the table to 10,000."""
    section = bench.section(
        "A look-up of positions, by versions of the table",
        "A new process looks up the positions of 12 shards. Each commit adds a file; the last checkpoint is five "
        "commits before the end.",
        ("ms",),
    )
    shards = [Shard("orders", number) for number in range(12)]
    counts = sizes(bench, 10, 100, 1000, 10_000)
    log, taken = WrittenLog(bench.new_path()), {}
    for count in counts:
        while log.next < count + 5:
            if (log.next and log.next % 1000 == 0) or log.next == count:
                DeltaTable(str(log.path)).create_checkpoint()
            log.ours(_entry(log.next, shards))
        seconds = []
        for _ in range(LOOKUPS):
            began = perf_counter()
            ledger = Ledger(log.log(), group="bench", member="main")
            assert set(ledger.read().positions) == set(shards)
            seconds.append(perf_counter() - began)
        taken[count] = median(seconds)
        bench.row(section, str(count), 1000 * taken[count])
    ratio = taken[counts[-1]] / taken[counts[0]]
    bench.target(section, f"a look-up at {counts[-1]:,} versions, times one at {counts[0]}", ratio, at_most=2.0)


def _entry(version: int, shards: Sequence[Shard]) -> LedgerEntry:
    """A ledger entry; every tenth also carries the folded state."""
    state = {shard: ShardState(Intervals.of((MIN_SEQUENCE, version)), origin=0) for shard in shards}
    ranges = {shard: Range(version, version + 1) for shard in shards}
    full = state if version % 10 == 0 else None
    words = ("batch", "bench", "bench/main", version + 1, "main", f"b{version}", version - 1)
    return LedgerEntry(*words, ranges=ranges, state=full)


def files(bench: Bench) -> None:
    """Measure a batch of 1,000 messages and a bare append, into tables of 10 to 100,000 files."""
    section = bench.section(
        "A batch of 1,000 messages, by files of the table",
        f"Another writer has added the files. Medians of {BATCHES} batches.",
        ("stream-assets s", "bare append s"),
    )
    with bench.spark() as spark:
        for count in sizes(bench, 10, 1000, 10_000, 100_000):
            path = bench.folder / f"files-{count}.ss"
            url, table, other = f"file://{path}/orders", bench.new_path(), bench.new_path()
            append = BareAppend(spark, other)
            messages.to_file(url, documents(ROWS))
            list(_drained(spark, url, table))
            append()
            for grown in (table, other):
                _add_files(grown, count)
            whole, bare = [], []
            for turn in range(BATCHES + 1):
                messages.to_file(url, documents(ROWS))
                began = perf_counter()
                (report,) = _drained(spark, url, table)
                whole.append(perf_counter() - began)
                assert report.rows == ROWS
                bare.append(append())
                if not turn:
                    whole.clear()
                    bare.clear()
            bench.row(section, str(count), median(whole), median(bare))


def _drained(
    spark: SparkSession, url: str, table: Path, *, max_records: int = Limits().max_records
) -> Iterator[BatchReport]:
    limits = Limits(max_records=max_records)
    ingestion = Ingestion(group="bench", table=str(table), decoder=Json(DDL), retry_seconds=0.0, limits=limits)
    return drain(spark, StreamSource(StreamUrl.parse(url)), ingestion)


def _add_files(table: Path, count: int) -> None:
    """Commit ``count`` files as another writer; they do not exist, because no query reads them."""
    version = DeltaTable(str(table)).version() + 1
    stats = json.dumps({"numRecords": 1})
    added = {"partitionValues": {}, "size": 1, "modificationTime": 0, "dataChange": True, "stats": stats}
    actions = [{"commitInfo": {"timestamp": 1_700_000_000_000, "operation": "WRITE", "operationParameters": {}}}]
    actions += [{"add": {"path": f"added-{number}.parquet", **added}} for number in range(count)]
    text = "".join(json.dumps(action) + "\n" for action in actions)
    (table / "_delta_log" / f"{version:020d}.json").write_text(text)


def shards(bench: Bench) -> None:
    """Measure the metadata of a commit and the time of a tick, from 10 shards to 1,000."""
    section = bench.section(
        "Commits and ticks, by shards of a stream",
        "A Redis stream of that many keys. The bytes are the metadata of a commit for ten of the keys; a tick is what "
        "the sensor does.",
        ("bytes of a commit", "tick ms"),
    )
    counts = sizes(bench, 10, 100, 1000)
    with bench.spark() as spark, bench.service(redis_server(bench.folder)) as address:
        import redis as client  # noqa: PLC0415 - only this suite needs it

        server = client.Redis.from_url(f"redis://{address}")
        for count in counts:
            url, table = f"redis://{address}/s{count}", bench.new_path()
            pipeline = server.pipeline(transaction=False)
            for number in range(10 * count):
                pipeline.xadd(f"s{count}:{number % count}", {b"msg": b'{"id": 1}'})
            pipeline.execute()
            sum(1 for _ in _drained(spark, url, table))
            for _ in range(3):
                for key in range(10):
                    server.xadd(f"s{count}:{key}", {b"msg": b'{"id": 1}'})
                sum(1 for _ in _drained(spark, url, table))
            ingestion = Ingestion(group="bench", table=str(table), decoder=Json(DDL))
            source, seconds = StreamSource(StreamUrl.parse(url)), []
            for _ in range(LOOKUPS):
                began = perf_counter()
                assert measure(source, ingestion).total == 0
                seconds.append(perf_counter() - began)
            assert DeltaTable(str(table)).to_pyarrow_table(columns=["id"]).num_rows == 10 * count + 30
            bench.row(section, str(count), _metadata_bytes(table), 1000 * median(seconds))
        server.close()
    entry, tick = (float(value) for value in section.rows[str(counts[-1])])
    bench.target(section, f"bytes of an ordinary commit at {counts[-1]:,} shards", entry, at_most=10 * 1024)
    bench.target(section, f"seconds of a tick at {counts[-1]:,} shards", tick / 1000, at_most=1.0)


def _metadata_bytes(table: Path) -> int:
    last = max((table / "_delta_log").glob("*.json"))
    (commit,) = (action["commitInfo"] for action in map(json.loads, last.open()) if "commitInfo" in action)
    return len(commit["userMetadata"].encode())


def backlog(bench: Bench) -> None:
    """Measure the memory of a run whose backlog is 1, 4 and 16 batches."""
    limit = bench.size(50_000, least=1000)
    section = bench.section(
        f"The memory of a run, by its backlog in batches of {limit:,} messages",
        "`stream-assets ingest --in-process`, JSON from Kafka: the peak of all its processes.",
        ("peak MB", "peak MB without the JVM", "seconds"),
    )
    with bench.service(kafka_broker(bench.folder)) as (address, _):
        for times in (1, 4, 16):
            topic, table = create_topic(address, messages.PARTITIONS), bench.new_path()
            expected = messages.to_kafka(address, topic, documents(times * limit))
            command = [sys.executable, "-m", "stream_assets.cli.main", "ingest", "--in-process", "--master", "local[2]"]
            command += ["--source", f"kafka://{address}/{topic}", "--table", str(table), "--decode", "json"]
            command += ["--schema", DDL, "--max-records", str(limit), "--json"]
            began = perf_counter()
            with (bench.folder / "backlog.log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log)
                with ProcessTree(process.pid).measured() as cost:
                    assert process.wait() == 0, (bench.folder / "backlog.log").read_text()
            messages.check_delta(table, expected)
            python = (cost.peak_bytes - cost.peak_java_bytes) // MEGABYTE
            bench.row(section, str(times), cost.peak_bytes // MEGABYTE, python, perf_counter() - began)
    first, last = (float(section.rows[times][0]) for times in ("1", "16"))
    bench.target(section, "memory of a run with 16 times the backlog, times that with one", last / first, at_most=1.25)


def server(bench: Bench) -> None:
    """Measure the memory of the Spark server that outlives runs, over the batches that it has written."""
    section = bench.section(
        "The memory of the Spark server, by batches that it has written",
        f"After runs of {BATCHES_OF_A_RUN} batches of 100 messages, each with its own session, on one server with a "
        f"heap of at most {HEAP}.",
        ("MB", "MB without the JVM", "processes"),
    )
    url, table = f"file://{bench.folder}/server.ss/orders", bench.new_path()
    marks = sizes(bench, 50, 100, 200, 500, 1000)
    for number in range(BATCHES_OF_A_RUN, marks[-1] + 1, BATCHES_OF_A_RUN):
        messages.to_file(url, documents(100 * BATCHES_OF_A_RUN))
        is_last = number == marks[-1]
        with bench.spark((), is_kept=not is_last, **{"spark.driver.memory": HEAP}) as spark:
            assert sum(1 for _ in _drained(spark, url, table, max_records=100)) == BATCHES_OF_A_RUN
            spark.stop()
            if number in marks:
                now = bench.server_memory()
                python = (now.bytes - now.java_bytes) // MEGABYTE
                bench.row(section, str(number), now.bytes // MEGABYTE, python, now.processes)
    warm = marks[len(marks) // 2]
    first, last = (float(section.rows[str(count)][0]) for count in (warm, marks[-1]))
    bench.target(section, f"memory after {marks[-1]:,} batches, times that after {warm}", last / first, at_most=1.1)
