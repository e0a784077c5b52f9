"""What a tick costs: each commit opened once, and as few requests to a broker for a thousand shards as for one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from confluent_kafka import Producer

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.lag import measure
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.entries import ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from stream_consumers.batches import Range
from stream_consumers.create import StreamSource, create_producer, open_batch_source
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.memory import forget_memory_broker
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, ConsumerMode
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.topics import create_topic, delete_topics
from tests.support.written_log import WrittenLog, made_entry

URL = StreamUrl.parse("memory://lag/orders")
SHARD = Shard("orders")


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Path]:
    """Eight of ten messages are written, in eight batches."""
    log = WrittenLog(tmp_path / "table")
    with create_producer(str(URL)) as producer:
        for number in range(10):
            producer.send(b"%d" % number)
    with open_batch_source(str(URL)) as source:
        identities = source.identities()
    for number in range(8):
        state = {SHARD: ShardState(Intervals.of((MIN_SEQUENCE, number)), origin=0)}
        written = {"ranges": {SHARD: Range(number, number + 1)}, "identities": identities, "sharing": "resumable"}
        log.ours(made_entry(number + 1, number - 1, state=state, **written))
    yield log.path
    forget_memory_broker(URL)


def test_a_tick_opens_each_commit_once(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, opened = DeltaLog._read, Counter[str]()

    def counting(self: DeltaLog, name: str) -> str:
        opened[name] += 1
        return read(self, name)

    monkeypatch.setattr(DeltaLog, "_read", counting)
    assert measure(StreamSource(URL), Ingestion("g", str(table))).total == 2
    assert {name: count for name, count in opened.items() if name.endswith(".json")} == {f"_delta_log/{7:020d}.json": 1}


KEYS = 250
# What any two ticks may differ by: a client that is connected anew asks for the brokers once more.
SPARE = 2


class Requests:
    """The requests of all Kafka clients that are made while it is there, by their types, as librdkafka counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._of_clients: dict[str, Mapping[str, int]] = {}
        self._reports = 0
        settings, close = KafkaBrokers._own_settings, KafkaBrokers.close
        watched = {"statistics.interval.ms": 20, "stats_cb": self._add}
        monkeypatch.setattr(KafkaBrokers, "_own_settings", lambda cluster: {**settings(cluster), **watched})

        def closed(cluster: KafkaBrokers) -> None:
            before = self._reports
            # What was asked last is in the report after the next one.
            until(lambda: cluster._admin.poll(0.05) is not None and self._reports > before + 1, what="the counts")
            close(cluster)

        monkeypatch.setattr(KafkaBrokers, "close", closed)

    def _add(self, text: str) -> None:
        told = json.loads(text)
        asked: Counter[str] = Counter()
        for broker in told["brokers"].values():
            asked.update(broker["req"])
        self._of_clients[told["name"]] = asked
        self._reports += 1

    def take(self) -> Counter[str]:
        """Those since the last call."""
        found: Counter[str] = Counter()
        for asked in self._of_clients.values():
            found.update(asked)
        self._of_clients.clear()
        return +found


def known(folder: Path, source: StreamSource, positions: Mapping[Shard, int], **fields: Any) -> Ingestion:
    """A table that the group has begun with, at these positions."""
    what = Ingestion("lakehouse", str(folder), sharing=source.mode, claims=source.is_claimed)
    details = {"origin": positions, "identities": dict.fromkeys({s.stream for s in positions}, "redis"), **fields}
    entry = made_entry(1, -1, group="lakehouse", kind="init", **details)
    WrittenLog(folder).ours(entry)
    return what


@pytest.mark.slow
def test_a_tick_asks_kafka_no_more_of_a_thousand_partitions_than_of_one(
    kafka: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = {count: create_topic(kafka, count) for count in (1, 1000)}
    producer = Producer({"bootstrap.servers": kafka, "linger.ms": 5})
    for count, topic in topics.items():
        for partition in range(count):
            producer.produce(topic, b"{}", partition=partition)
    assert producer.flush(60) == 0
    found: dict[int, Counter[str]] = {}
    requests = Requests(monkeypatch)
    for count, topic in topics.items():
        source = StreamSource(f"kafka://{kafka}/{topic}")
        with source.open() as opened:
            identities = opened.identities()
        positions = {Shard(topic, partition): 0 for partition in range(count)}
        what = known(folder / topic, source, positions, identities=identities)
        requests.take()
        assert measure(source, what).total == count
        found[count] = requests.take()
    delete_topics(kafka, list(topics.values()))
    assert found[1]["ListOffsets"] == found[1000]["ListOffsets"] == 3, "beginning, end and last stable offset"
    assert found[1000].total() <= found[1].total() + SPARE, found


class Server:
    """A Redis server whose commands are counted."""

    def __init__(self, address: str) -> None:
        self.client: Any = redis.Redis.from_url(f"redis://{address}")

    def taken(self) -> tuple[Counter[str], int]:
        """The commands since the last call, by name, and how often the server read from its clients."""
        stats = self.client.info("commandstats")
        reads = self.client.info("stats")["total_reads_processed"]
        self.client.config_resetstat()
        return Counter({name.removeprefix("cmdstat_"): told["calls"] for name, told in stats.items()}), reads

    def send(self, name: str, count: int) -> None:
        pipeline = self.client.pipeline(transaction=False)
        for key in range(KEYS):
            for _ in range(count):
                pipeline.xadd(f"{name}:{key}", {b"msg": b"{}"})
        pipeline.execute()


@pytest.mark.parametrize(
    ("mode", "each"),
    [
        (ConsumerMode.RESUMABLE, {"xinfo|stream": KEYS}),
        (ConsumerMode.LOAD_BALANCED, {"xinfo|stream": 4 * KEYS, "xinfo|groups": 4 * KEYS, "xpending": KEYS}),
    ],
    ids=["positions", "claims"],
)
def test_a_tick_asks_redis_for_each_key_a_few_times_and_waits_for_few_answers(
    mode: ConsumerMode, each: Mapping[str, int], redis_address: str, folder: Path
) -> None:
    server, name = Server(redis_address), f"{folder.name}-{mode.value}"
    source = StreamSource(f"redis://{redis_address}/{name}", mode)
    server.send(name, 1)
    shards = [Shard(name, key) for key in range(KEYS)]
    if source.is_claimed:
        with source.claims("lakehouse", None) as claims:
            claims.prepare(AutoStreamReset.EARLIEST)
    what = known(
        folder / "t",
        source,
        dict.fromkeys(shards, 0),
        switch="load_balanced by claims" if source.is_claimed else "resumable",
    )
    for messages in (1, 40):
        server.send(name, messages - 1)
        server.taken()
        assert measure(source, what).total == messages * KEYS
        commands, reads = server.taken()
        asked = {name: count for name, count in commands.items() if name.startswith(("x", "eval"))}
        assert asked == each
        assert commands["scan"] <= 2 + server.client.dbsize() // 500
        assert reads <= sum(asked.values()) / 10, "they are sent without waiting for each answer"
    server.client.close()
