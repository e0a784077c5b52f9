"""What the tests share: one Spark session, streams, and what is in a table, read independently of the code."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.session import SparkOptions, create_session
from stream_consumers.connect import create_producer
from stream_consumers.messages import Shard
from stream_consumers.ss_scanner import Frame, FrameScanner
from tests.profiles import load_profile
from tests.services.kafka_broker import kafka_broker
from tests.services.redis_server import redis_server

ROOT = Path(__file__).parents[1]
os.environ.setdefault("STREAM_ASSETS_CACHE", str(ROOT / ".cache"))
# RESTORE and VACUUM look at files in as many tasks as the last one says.
SMALL = {"spark.sql.shuffle.partitions": "2", "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2"}
# Without the optimising compiler a JVM is a quarter faster for some seconds, and a third slower after minutes.
SHORT_LIVED = {**SMALL, "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
Identity = tuple[str, int, int]
load_profile()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one session of a test run."""
    warehouse = tmp_path_factory.mktemp("warehouse")
    session = create_session(
        SparkOptions(
            master="local[2]",
            config={**SMALL, "spark.sql.warehouse.dir": str(warehouse)},
        )
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The one Kafka broker of a test run, as host:port; ``TEST_KAFKA_BROKER`` names another one."""
    given = os.environ.get("TEST_KAFKA_BROKER")
    if given:
        yield given
        return
    with kafka_broker(tmp_path_factory.mktemp("kafka")) as address:
        yield address


@pytest.fixture(scope="session")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A second broker, always of ours: nothing is in it but what a test puts there, and a test may break it."""
    with kafka_broker(tmp_path_factory.mktemp("own-kafka")) as address:
        yield address


@pytest.fixture(scope="session")
def redis_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The one Redis server of a test run, as host:port; ``TEST_REDIS_URL`` names another one (redis://host:port)."""
    given = os.environ.get("TEST_REDIS_URL")
    if given:
        yield given.removeprefix("redis://").rstrip("/")
        return
    with redis_server(tmp_path_factory.mktemp("redis")) as address:
        yield address


def write_stream(path: Path, count: int, *, shards: int = 2, malformed: frozenset[int] = frozenset()) -> str:
    """Append ``count`` JSON messages in turn to the shards of a new file; returns its URL."""
    url = f"file://{path}/orders"
    with create_producer(url) as producer:
        for index in range(count):
            payload = b'{"id": ' if index in malformed else b'{"id": %d, "user": "u%d"}' % (index, index % 7)
            producer.send(payload, shard=index % shards, timestamp_ms=1_700_000_000_000 + index)
    return url


def sequences_in_file(path: Path) -> set[Identity]:
    """Every message of a stream file."""
    with FrameScanner(path) as scanner:
        return {(i.shard.stream, i.shard.id, i.sequence) for i in scanner if isinstance(i, Frame)}


def sequences_in_table(path: Path | str) -> Counter[Identity]:
    """Every row of a table, counted."""
    if not (Path(path) / "_delta_log").exists():
        return Counter()
    rows = DeltaTable(str(path)).to_pyarrow_table(columns=["_stream", "_shard", "_sequence"]).to_pydict()
    return Counter(zip(rows["_stream"], rows["_shard"], rows["_sequence"]))


def assert_each_once(file: Path, table: Path | str) -> None:
    """Every message of the file is in the table or its dead letters, once."""
    found = sequences_in_table(table) + sequences_in_table(f"{table}_dead_letters")
    assert {identity: count for identity, count in found.items() if count != 1} == {}
    assert set(found) == sequences_in_file(file)


def shard(number: int, stream: str = "orders") -> Shard:
    """A shard of the test stream."""
    return Shard(stream, number)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone after the test, so that tables do not fill the disk."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)
