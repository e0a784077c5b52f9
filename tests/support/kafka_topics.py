"""Topics, transactions and groups on a real broker, and a pipeline that drains one of them.

:class:`Broker` talks to the broker with the plain client, so that what the tests compare with does not come from the
code under test.
"""

from __future__ import annotations

import ctypes
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import confluent_kafka
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka import admin as kafka_admin
from confluent_kafka.cimpl import NewPartitions
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Batch, BatchReport, Ingestion, Observer, Step, ignore_steps
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.run_ingestion import drain
from spark_jobs.verify import ShardVerdict, verify
from stream_consumers.create import StreamSource
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode, Limits
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.streams import Identity, sequences_in_table
from tests.support.topics import admin, committed, create_topic, leaders, sequences_in_topic

SECONDS = 20.0
MALFORMED = b'{"id": '
Payload = bytes | None


class Broker:
    """A broker and the topics of one test; they are deleted when the test ends."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.topics: list[str] = []
        self._admin = admin(address)

    def _settings(self, **more: Any) -> dict[str, Any]:
        return {"bootstrap.servers": self.address, "log_level": 2, **more}

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        if self.topics:
            self._admin.delete_topics(self.topics)

    def create(self, *, partitions: int = 1, name: str = "", config: Mapping[str, str] | None = None) -> str:
        """A new topic, ready to be written to; its name."""
        self.topics.append(create_topic(self.address, partitions, name=name, **(config or {})))
        return self.topics[-1]

    def delete(self, name: str) -> None:
        """Delete a topic, and wait until it is gone."""
        self._admin.delete_topics([name])[name].result(SECONDS)
        self.topics.remove(name)
        until(lambda: self._is_gone(name), what=f"the end of topic {name}")

    def _is_gone(self, name: str) -> bool:
        try:
            self._admin.describe_topics(TopicCollection([name]))[name].result(SECONDS)
        except KafkaException:
            return True
        return False

    def recreate(self, name: str, *, partitions: int = 1) -> None:
        """Another topic of the same name."""
        self.delete(name)
        self.create(partitions=partitions, name=name)

    def add_partitions(self, name: str, total: int) -> None:
        """Make it so many."""
        self._admin.create_partitions([NewPartitions(name, total)])[name].result(SECONDS)
        until(lambda: leaders(self._admin, name) == total, what=f"{total} partitions")

    def remove_before(self, name: str, offset: int, *, partition: int = 0) -> None:
        """Remove the messages before an offset, as retention does."""
        place = TopicPartition(name, partition, offset)
        (future,) = self._admin.delete_records([place]).values()
        assert future.result(SECONDS).low_watermark == offset

    def send(
        self,
        name: str,
        payloads: Iterable[Payload],
        *,
        partition: int = 0,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> None:
        """Send messages to one partition."""
        producer = Producer(self._settings())
        for payload in payloads:
            producer.produce(name, payload, key, partition, headers=list(headers))
        assert producer.flush(SECONDS) == 0

    def send_with_header_name(self, name: str, header: bytes) -> None:
        """A message with any bytes for the name of a header, as clients in other languages send them."""
        library = ctypes.CDLL(str(next(Path(confluent_kafka.__file__).parents[1].glob("*.libs/librdkafka*"))))
        for function in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_headers_new"):
            getattr(library, function).restype = ctypes.c_void_p
        why = ctypes.create_string_buffer(512)
        config = ctypes.c_void_p(library.rd_kafka_conf_new())
        library.rd_kafka_conf_set(config, b"bootstrap.servers", self.address.encode(), why, 512)
        producer = ctypes.c_void_p(library.rd_kafka_new(0, config, why, 512))
        headers = ctypes.c_void_p(library.rd_kafka_headers_new(ctypes.c_size_t(1)))
        library.rd_kafka_header_add(headers, header, ctypes.c_ssize_t(len(header)), b"v", ctypes.c_ssize_t(1))
        # Pairs of a tag and its values: topic, partition, payload, key, headers, the end.
        words = [1, name.encode(), 3, 0, 4, order(7), ctypes.c_size_t(len(order(7)))]
        words += [5, b"key", ctypes.c_size_t(3), 10, headers, 0]
        assert library.rd_kafka_producev(producer, *words) == 0
        assert library.rd_kafka_flush(producer, int(SECONDS * 1000)) == 0
        library.rd_kafka_destroy(producer)

    def begin(self, name: str, count: int, *, first: int = 0) -> Producer:
        """An open transaction with some messages in it; whoever asked for it commits or aborts it."""
        producer = Producer(self._settings(**{"transactional.id": uuid.uuid4().hex}))
        producer.init_transactions(SECONDS)
        producer.begin_transaction()
        for payload in orders(count, first=first):
            producer.produce(name, payload, key=b"k", partition=0)
        assert producer.flush(SECONDS) == 0
        return producer

    def commit(self, name: str, count: int, *, first: int = 0) -> None:
        """A transaction that is committed: so many messages, and a marker behind them."""
        self.begin(name, count, first=first).commit_transaction(SECONDS)
        self.settle(name)

    def abort(self, name: str, count: int) -> None:
        """A transaction that is aborted: so many messages that do not count, and a marker behind them."""
        self.begin(name, count).abort_transaction(SECONDS)
        self.settle(name)

    def settle(self, name: str) -> None:
        """Wait for the markers of transactions that have ended: they are written a little later."""
        until(lambda: self.end(name) == self.end(name, committed=False), what=f"the markers in {name}")

    def end(self, name: str, *, partition: int = 0, committed: bool = True) -> int:
        """The end of a partition for readers of what is committed, or for all."""
        place = TopicPartition(name, partition)
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        future = self._admin.list_offsets({place: vars(kafka_admin)["OffsetSpec"].latest()}, isolation_level=level)
        return int(future[place].result(SECONDS).offset)

    def messages(self, name: str, *, level: str = "read_committed") -> set[Identity]:
        """What a plain consumer finds in a topic."""
        return sequences_in_topic(self.address, name, level=level)

    def committed(self, group: str, name: str) -> dict[int, int]:
        """The offsets that the group has committed, by partition; without one it is left out."""
        return committed(self.address, group, name)

    def move(self, group: str, name: str, offset: int, *, partition: int = 0) -> None:
        """Commit an offset by hand."""
        places = [TopicPartition(name, partition, offset)]
        future = self._admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, places)])[group]
        assert [place.error for place in _result(future).topic_partitions] == [None]

    def forget(self, group: str) -> None:
        """Delete a group with its offsets."""
        self._admin.delete_consumer_groups([group])[group].result(SECONDS)

    def members(self, group: str) -> int:
        """How many live members a group has."""
        try:
            return len(self._admin.describe_consumer_groups([group])[group].result(SECONDS).members)
        except KafkaException:
            return 0

    @contextmanager
    def subscriber(self, group: str, name: str, *, client_id: str) -> Iterator[Consumer]:
        """A live member of the group that neither reads on nor commits."""
        settings = {"group.id": group, "client.id": client_id, "enable.auto.commit": False}
        consumer = Consumer(self._settings(**settings, **{"auto.offset.reset": "latest"}))
        consumer.subscribe([name])

        def is_member() -> bool:
            consumer.poll(0.05)
            return bool(consumer.assignment())

        until(is_member, what=f"the membership of {client_id}")
        try:
            yield consumer
        finally:
            consumer.close()


def _result(future: Future[Any]) -> Any:
    return future.result(SECONDS)


def order(number: int) -> bytes:
    """The payload of an order."""
    return b'{"id": %d}' % number


def orders(count: int, *, first: int = 0) -> list[Payload]:
    """Payloads of orders."""
    return [order(number) for number in range(first, first + count)]


@dataclass(frozen=True)
class Pipeline:
    """From one topic into one table.

    Args:
        spark: the session.
        url: of the topic.
        ingestion: what goes where.
        mode: how the group shares.
        client: options of the Kafka client.
    """

    spark: SparkSession
    url: str
    ingestion: Ingestion
    mode: ConsumerMode = ConsumerMode.RESUMABLE
    client: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        spark: SparkSession,
        url: str,
        table: Path,
        *,
        records: int = 1000,
        client: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Pipeline:
        """A pipeline with a group of its own."""
        settings: dict[str, Any] = {
            "group": f"lakehouse-{uuid.uuid4().hex[:8]}",
            "table": str(table),
            "decoder": Json("id BIGINT"),
            "limits": Limits(max_records=records),
            "retry_seconds": 0.0,
            # Its batches are small, and are read by executors all the same.
            "driver_records": 0,
        }
        return cls(spark, url, Ingestion(**{**settings, **options}), client=client or {})

    @property
    def group(self) -> str:
        return self.ingestion.group

    @property
    def table(self) -> str:
        return self.ingestion.table

    @property
    def topic(self) -> str:
        return StreamUrl.parse(self.url).required_streams()[0]

    @property
    def source(self) -> StreamSource:
        """Made anew at each call, as by a new process."""
        return StreamSource(StreamUrl.parse(self.url), self.mode, self.client)

    def having(self, **changes: Any) -> Pipeline:
        """The same with another ingestion."""
        return replace(self, ingestion=replace(self.ingestion, **changes))

    def shared(self) -> Pipeline:
        """The same in mode ``load_balanced``."""
        return replace(self.having(sharing=ConsumerMode.LOAD_BALANCED), mode=ConsumerMode.LOAD_BALANCED)

    def drain(self, observer: Observer = ignore_steps, *, max_batches: int | None = None) -> list[BatchReport]:
        """One run to the end."""
        found = drain(self.spark, self.source, self.ingestion, observer=observer, max_batches=max_batches)
        return list(found)

    def verify(self) -> list[ShardVerdict]:
        """What the project itself says of the table."""
        with self.source.open() as opened:
            return verify(opened, self.ingestion)

    def positions(self) -> dict[int, int]:
        """The ledger's positions, by shard."""
        return {shard.id: position for shard, position in self.ingestion.ledger().read().positions.items()}

    def rows(self) -> Counter[Identity]:
        """Every row of the table."""
        return sequences_in_table(self.table)

    def letters(self) -> Counter[Identity]:
        """Every dead letter that has a sequence and counts."""
        counted = self.ingestion.dead_letters().counted(self.spark, self.ingestion.ledger())
        rows = [] if counted is None else counted.where("_sequence IS NOT NULL").collect()
        return Counter((row["_stream"], row["_shard"], row["_sequence"]) for row in rows)


def assert_each_once(found: Counter[Identity], wanted: Iterable[Identity]) -> None:
    """Each of what is wanted is there once, and nothing else."""
    assert {identity: count for identity, count in found.items() if count != 1} == {}
    assert set(found) == set(wanted)


def shard(topic: str, number: int = 0) -> Shard:
    return Shard(topic, number)


class Once:
    """An observer that does something at the first occurrence of a step, and remembers that it did.

    Args:
        step: when.
        action: what; it may raise.
        number: only at this batch.
    """

    def __init__(self, step: Step, action: Any, *, number: int | None = None) -> None:
        self._step = step
        self._action = action
        self._number = number
        self.is_done = False

    def __call__(self, step: Step, batch: Batch | None) -> None:
        is_due = self._number is None or (batch is not None and batch.number == self._number)
        if step is self._step and is_due and not self.is_done:
            self.is_done = True
            self._action()


class FailOnce:
    """Raises an error at the first call, and does nothing at the next ones."""

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error

    def __call__(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


class CrashError(Exception):
    """Raised by a test in place of a crash."""


def crash() -> None:
    """End the run here."""
    raise CrashError


class Topics(Broker):
    """A broker whose topics are read into the table ``t`` of a folder."""

    def __init__(self, address: str, spark: SparkSession, folder: Path) -> None:
        super().__init__(address)
        self.spark = spark
        self.folder = folder

    def pipeline(self, topic: str, *, table: str = "t", **options: Any) -> Pipeline:
        """From a topic into a table of the folder."""
        return Pipeline.of(self.spark, f"kafka://{self.address}/{topic}", self.folder / table, **options)

    def filled(self, payloads: Iterable[Payload], *, partitions: int = 1, **options: Any) -> tuple[str, Pipeline]:
        """A new topic with these messages in its first partition, and a pipeline from it."""
        topic = self.create(partitions=partitions)
        self.send(topic, payloads)
        return topic, self.pipeline(topic, **options)
