"""Whoever asked the brokers keeps no client of theirs once it is closed, also where it is still referred to.

An error refers to it in a cycle. Python may collect that in a thread of another client, where librdkafka ends the
process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
from confluent_kafka.admin import AdminClient

from stream_consumers.closing import ClosesOnExit
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.kafka.batches import KafkaBatchSource
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.kafka.membership import KafkaMembership
from tests.support.topics import create_topic, unique_group


def admin_clients() -> int:
    return sum(type(one) is AdminClient for one in gc.get_objects())


def asked_source(url: str) -> ClosesOnExit:
    source = KafkaBatchSource(url)
    source.extents()
    return source


def asked_cluster(url: str) -> ClosesOnExit:
    cluster = KafkaBrokers(url)
    cluster.check()
    return cluster


def consumer(url: str) -> ClosesOnExit:
    found = create_consumer(url, group=unique_group(), mode="resumable")
    found.next(0)
    return found


def producer(url: str) -> ClosesOnExit:
    found = create_producer(url)
    found.send(b"{}")
    found.flush()
    return found


def member(url: str) -> ClosesOnExit:
    return KafkaMembership(url, unique_group())


@pytest.mark.parametrize("opened", [asked_source, asked_cluster, consumer, producer, member])
def test_what_is_closed_has_no_client(kafka: str, opened: Callable[[str], ClosesOnExit]) -> None:
    url = f"kafka://{kafka}/{create_topic(kafka, 1)}"
    gc.collect()
    before = admin_clients()
    with opened(url) as asked:
        assert admin_clients() == before + 1
    assert asked
    assert admin_clients() == before
