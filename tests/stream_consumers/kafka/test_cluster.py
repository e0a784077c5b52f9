"""Requests to the brokers: coordinators that move or load, and clients that are released when their owner is closed.

An error refers to its client in a cycle. Python may collect that in a thread of another client, where librdkafka ends
the process.
"""

from __future__ import annotations

import gc
import logging
import socketserver
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from stream_consumers.closing import ClosesOnExit
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import AccessDeniedError, BrokerError, GroupActiveError, InvalidOptionError
from stream_consumers.kafka import cluster as kafka_cluster
from stream_consumers.kafka.batches import KafkaBatchSource
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.kafka.membership import KafkaMembership
from stream_consumers.kafka.producer import KafkaProducer
from stream_consumers.kafka.transactions import KafkaTransactions
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl
from tests.support.settings import ROOT
from tests.support.topics import create_topic, unique_group

API_VERSIONS, HANDSHAKE, AUTHENTICATE = 18, 17, 36
UNSUPPORTED_VERSION, AUTHENTICATION_FAILED = 35, 58
# What it takes: the number of a request, and its first and last version.
REQUESTS = [(API_VERSIONS, 0, 0), (HANDSHAKE, 0, 1), (AUTHENTICATE, 0, 0), (3, 0, 4), (1, 0, 11), (10, 0, 2)]


class _Client(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while size := self.rfile.read(4):
            request = self.rfile.read(struct.unpack(">i", size)[0])
            kind, version, number, name = struct.unpack(">hhih", request[:10])
            answer = _answer(kind, version, request[10 + max(name, 0) :])
            self.wfile.write(struct.pack(">ii", 4 + len(answer), number) + answer)


def _answer(kind: int, version: int, body: bytes) -> bytes:
    if kind == API_VERSIONS:
        code = UNSUPPORTED_VERSION if version else 0
        return struct.pack(">hi", code, len(REQUESTS)) + b"".join(struct.pack(">hhh", *one) for one in REQUESTS)
    if kind == HANDSHAKE:
        return struct.pack(">hih", 0, 1, 5) + b"PLAIN"
    said = b"bad password " + body.split(b"\0")[-1]
    return struct.pack(">hh", AUTHENTICATION_FAILED, len(said)) + said + struct.pack(">i", 0)


class _Broker(socketserver.ThreadingTCPServer):
    daemon_threads = True


@contextmanager
def repeating_broker() -> Iterator[str]:
    """Its address; it takes SASL/PLAIN."""
    with _Broker(("127.0.0.1", 0), _Client) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


URL = StreamUrl.parse("kafka://nobody:1/orders")
POSITIONS = {Shard("orders"): 7}
PASSING = [KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.COORDINATOR_NOT_AVAILABLE]
ASK = """
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.support.topics import admin, create_topic
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

offsets, address = "__consumer_offsets", sys.argv[1]
brokers = admin(address)
topic = create_topic(address, 1)

def ask(number):
    cluster = KafkaBrokers(StreamUrl.parse(f"kafka://{address}/{topic}"))
    shard = Shard(topic)
    def turn(position):
        cluster.commit(f"group-{number}", {shard: position})
        return cluster.committed(f"group-{number}", [shard])[shard]
    return [turn(position) for position in range(3)]

with ThreadPoolExecutor(4) as threads:
    for number in range(6):
        brokers.delete_topics([offsets])[offsets].result(10)
        print(*threads.map(ask, range(8)))
"""

SECRET = "hunter2-of-kafka"
SECRETS = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "me",
    "sasl.password": SECRET,
}


class Coordinator:
    """Refuses two requests, as a whole or for their partition, and answers the third; stands for every client."""

    def __init__(self, code: int, said: str | None = None, *, per_partition: bool = False) -> None:
        self._error, self._per_partition = KafkaError(code, said), per_partition
        self.requests = 0

    def places(self) -> list[Any]:
        self.requests += 1
        is_refused = self.requests < 3
        if is_refused and not self._per_partition:
            raise KafkaException(self._error)
        error = self._error if is_refused else None
        return [SimpleNamespace(topic="orders", partition=0, offset=7, metadata="batch 3", error=error)]

    def _future(self, group: str, answer: Callable[[], object]) -> Mapping[str, Future[Any]]:
        future: Future[Any] = Future()
        try:
            future.set_result(answer())
        except KafkaException as error:
            future.set_exception(error)
        return {group: future}

    def poll(self, seconds: float) -> None:
        """The admin client has nothing to tell."""

    def committed(self, places: list[TopicPartition], timeout: float) -> list[Any]:
        return self.places()

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> list[Any]:
        return self.places()

    def alter_consumer_group_offsets(
        self, request: list[ConsumerGroupTopicPartitions], **_: object
    ) -> Mapping[str, Future[Any]]:
        def answer() -> object:
            answered = ConsumerGroupTopicPartitions(request[0].group_id, [])
            answered.topic_partitions = self.places()
            return answered

        return self._future(request[0].group_id, answer)

    def describe_consumer_groups(self, groups: list[str], **_: object) -> Mapping[str, Future[Any]]:
        member = SimpleNamespace(client_id="pump", host="/10.0.0.7", assignment=None)
        return self._future(groups[0], lambda: [self.places(), SimpleNamespace(members=[member])][1])

    def init_transactions(self, seconds: float) -> None:
        self.places()


def commit(cluster: KafkaBrokers) -> object:
    return cluster.commit("billing", POSITIONS)


def commit_as_member(cluster: KafkaBrokers) -> object:
    return cluster.commit_as_member(cluster._position_client("billing"), "billing", POSITIONS)


def committed(cluster: KafkaBrokers) -> object:
    return cluster.committed("billing", POSITIONS)


def committed_metadata(cluster: KafkaBrokers) -> object:
    return cluster.committed_metadata("billing", POSITIONS)


def members(cluster: KafkaBrokers) -> object:
    return cluster.members("billing")


def opened(coordinator: Coordinator) -> KafkaBrokers:
    cluster = KafkaBrokers(URL, SECRETS)
    vars(cluster)["_admin"] = coordinator
    cluster._position_clients["billing"] = coordinator  # type: ignore[assignment]
    return cluster


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_consumers.kafka.client.RETRY_SECONDS", 0.001)


@pytest.mark.parametrize("code", PASSING)
@pytest.mark.usefixtures("quick")
def test_requests_are_made_again_while_the_coordinator_moves_or_loads(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for request, answer in (
        (commit, None),
        (commit_as_member, None),
        (committed, POSITIONS),
        (committed_metadata, {Shard("orders"): "batch 3"}),
    ):
        for per_partition in (False, True):
            coordinator = Coordinator(code, per_partition=per_partition)
            assert (request(opened(coordinator)), coordinator.requests) == (answer, 3)
    assert members(opened(Coordinator(code))) == ["client id 'pump' on host /10.0.0.7 (nothing assigned)"]
    coordinator = Coordinator(code)
    monkeypatch.setattr(KafkaBrokers, "producer", lambda self, **_: coordinator)
    KafkaTransactions(URL, "pricing-1", None)  # type: ignore[arg-type]
    assert coordinator.requests == 3


@pytest.mark.parametrize("request_", [commit, committed, commit_as_member])
def test_a_coordinator_that_is_never_found_is_an_error(
    request_: Callable[[KafkaBrokers], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_cluster, "REQUEST_SECONDS", 0.0)
    with pytest.raises((BrokerError, GroupActiveError)):
        request_(opened(Coordinator(KafkaError.NOT_COORDINATOR)))


@pytest.mark.parametrize("request_", [commit, committed, commit_as_member])
@pytest.mark.parametrize("code", [KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.INVALID_CONFIG])
def test_what_a_broker_says_is_repeated_without_the_options_of_the_client(
    request_: Callable[[KafkaBrokers], object], code: int
) -> None:
    with pytest.raises((AccessDeniedError, BrokerError)) as raised:
        request_(opened(Coordinator(code, f"no rights for me:{SECRET}")))
    assert "no rights for me:[hidden]" in str(raised.value)
    assert SECRET not in "".join(traceback.format_exception(raised.value))


def test_what_a_client_logs_is_without_its_options(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with repeating_broker() as address, KafkaBrokers(f"kafka://{address}/orders", {**SECRETS, "log_level": 7}) as one:
        one.answer_seconds = 3
        with pytest.raises(AccessDeniedError) as raised:
            one.check()
    lines = [record.getMessage() for record in caplog.records if "bad password [hidden]" in record.getMessage()]
    assert [line for line in lines if line.startswith("FAIL")]
    assert SECRET not in caplog.text + "".join(traceback.format_exception(raised.value))


def test_a_refusal_that_does_not_pass_is_not_repeated() -> None:
    coordinator = Coordinator(KafkaError.ILLEGAL_GENERATION)
    refusal = opened(coordinator).commit_as_member(coordinator, "billing", POSITIONS)  # type: ignore[arg-type]
    assert (refusal and refusal.name(), coordinator.requests) == ("ILLEGAL_GENERATION", 1)


def test_a_producer_refuses_what_only_consumers_know() -> None:
    settings = {"session.timeout.ms": 6000, "fetch.min.bytes": 1, "linger.ms": 5}
    for open_one in (
        lambda: KafkaProducer(URL, settings),
        lambda: KafkaTransactions(URL, "pricing-1", None, client=settings),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidOptionError, match=r"'fetch\.min\.bytes', 'session\.timeout\.ms'"):
            open_one()


@pytest.mark.slow
def test_a_coordinator_that_was_lost_ends_no_process(own_kafka: str) -> None:
    """An admin client that asks for positions ends with a segmentation fault, most of the times."""
    asked = subprocess.run(
        [sys.executable, "-c", ASK, own_kafka], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (asked.returncode, asked.stdout.split()) == (0, ["[0,", "1,", "2]"] * 48), asked.stderr


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


SLOW = [pytest.param(one, marks=pytest.mark.slow) for one in (asked_cluster, consumer, member)]


@pytest.mark.parametrize("opened", [asked_source, producer, *SLOW])
def test_what_is_closed_has_no_client(kafka: str, opened: Callable[[str], ClosesOnExit]) -> None:
    url = f"kafka://{kafka}/{create_topic(kafka, 1)}"
    gc.collect()
    before = admin_clients()
    with opened(url) as asked:
        assert admin_clients() == before + 1
    assert asked
    assert admin_clients() == before
