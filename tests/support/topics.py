"""Topics for tests, made, filled and read without the code under test."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from functools import cache
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.support.polling import until
from tests.support.streams import Identity


def create_topic(address: str, partitions: int, *, name: str | None = None, **config: str) -> str:
    """A new topic; returns its name. Keyword ``a_b`` is the topic's setting ``a.b``."""
    name = name or f"orders-{uuid.uuid4().hex[:8]}"
    settings = {key.replace("_", "."): value for key, value in config.items()}
    topic, client = NewTopic(name, partitions, 1, config=settings), admin(address)

    def is_created() -> bool:
        try:
            client.create_topics([topic])[name].result(60)
        except KafkaException as error:
            # One of this name is still being deleted.
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
            return False
        return True

    until(is_created, what=f"topic {name}")
    # The broker says so before it knows the topic itself.
    until(lambda: leaders(client, name) == partitions, what=f"topic {name}")
    return name


def leaders(client: AdminClient, name: str) -> int:
    """How many partitions of a topic have one."""
    topics = client.list_topics(timeout=60).topics
    return sum(p.leader >= 0 for p in topics[name].partitions.values()) if name in topics else 0


def delete_topics(address: str, names: Sequence[str]) -> None:
    """Delete topics, and wait until they are gone."""
    if not names:
        return
    client = admin(address)
    for future in client.delete_topics(list(names)).values():
        future.result(60)
    until(lambda: not set(names) & set(client.list_topics(timeout=60).topics), what="the topics being gone")


def topics(address: str) -> set[str]:
    """The names of all topics but the broker's own."""
    return {name for name in admin(address).list_topics(timeout=60).topics if not name.startswith("__")}


@cache
def admin(address: str) -> AdminClient:
    """An admin client of the tests' own.

    Each lives as long as the process: if Python collected one in a thread of another, librdkafka would end the process.
    """
    return AdminClient({"bootstrap.servers": address, "log_level": 2})


def fill(address: str, topic: str, count: int, *, partitions: int, malformed: frozenset[int] = frozenset()) -> None:
    """``count`` JSON messages in turn to the partitions."""
    producer = Producer({"bootstrap.servers": address, "linger.ms": 5, "log_level": 2})
    for index in range(count):
        value = b'{"id": ' if index in malformed else b'{"id": %d, "user": "u%d"}' % (index, index % 7)
        producer.produce(topic, value, key=b"k%d" % index, partition=index % partitions)
        if index % 50_000 == 0:
            producer.flush()
    producer.flush()


def sequences_in_topic(address: str, topic: str, *, level: str = "read_committed") -> set[Identity]:
    """Every message of a topic that a plain consumer finds; those that are committed, by default."""
    settings: dict[str, Any] = {"bootstrap.servers": address, "group.id": "unused", "log_level": 2}
    settings |= {"enable.auto.commit": False, "enable.partition.eof": True, "auto.offset.reset": "earliest"}
    # The end is told by a fetch that waited in vain: let it not wait long.
    consumer = Consumer({**settings, "isolation.level": level, "fetch.wait.max.ms": 10})
    left = set(consumer.list_topics(topic, 60).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, number, 0) for number in left])
    found: set[Identity] = set()
    deadline = time.monotonic() + 60
    while left:
        assert time.monotonic() < deadline, f"partitions {left} of {topic} did not end"
        for message in consumer.consume(1000, 0.1):
            error = message.error()
            if error is None:
                found.add((topic, message.partition() or 0, message.offset() or 0))
            elif error.code() == KafkaError._PARTITION_EOF:
                left.discard(message.partition())
            else:
                raise KafkaException(error)
    consumer.close()
    return found


def committed(address: str, group: str, topic: str) -> dict[int, int]:
    """What Kafka's own admin API says that a group has committed, per partition.

    The end of a transaction is told before its offsets are those of the group: then they are waited for.
    """
    client = admin(address)

    def stable() -> tuple[list[TopicPartition]] | None:
        request = [ConsumerGroupTopicPartitions(group)]
        places = client.list_consumer_group_offsets(request, require_stable=True)[group].result(60).topic_partitions
        return None if any(place.error for place in places) else (places,)

    (places,) = until(stable, what=f"the offsets of {group}")
    return {place.partition: place.offset for place in places if place.topic == topic and place.offset >= 0}


def ends(address: str, topic: str) -> dict[int, int]:
    """The high watermark of each partition."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": "unused", "log_level": 2})
    numbers = consumer.list_topics(topic, 60).topics[topic].partitions
    found = {n: consumer.get_watermark_offsets(TopicPartition(topic, n), 60)[1] for n in numbers}
    consumer.close()
    return found


_unique = itertools.count()


def unique_group() -> str:
    """A group name that no other test uses."""
    return f"group-{uuid.uuid4().hex[:6]}-{next(_unique)}"
