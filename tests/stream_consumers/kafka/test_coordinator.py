"""Whatever is asked of a coordinator is asked again while one is being found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition

from stream_consumers.errors import BrokerError, GroupActiveError, InvalidOptionError
from stream_consumers.kafka import cluster as kafka_cluster
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.kafka.producer import KafkaProducer
from stream_consumers.kafka.transactions import KafkaTransactions
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

URL = StreamUrl.parse("kafka://nobody:1/orders")
POSITIONS = {Shard("orders"): 7}
PASSING = [KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.COORDINATOR_NOT_AVAILABLE]


class Coordinator:
    """Refuses two requests, as a whole or for their partition, and answers the third; stands for every client."""

    def __init__(self, code: int, *, per_partition: bool = False) -> None:
        self._error, self._per_partition = KafkaError(code), per_partition
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
    cluster = KafkaBrokers(URL)
    vars(cluster)["_admin"] = coordinator
    cluster._position_clients["billing"] = coordinator  # type: ignore[assignment]
    return cluster


@pytest.mark.parametrize("code", PASSING)
@pytest.mark.parametrize("per_partition", [False, True])
@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (commit, None),
        (commit_as_member, None),
        (committed, POSITIONS),
        (committed_metadata, {Shard("orders"): "batch 3"}),
    ],
)
def test_positions_are_asked_for_and_set_again(
    request_: Callable[[KafkaBrokers], object],
    answer: object,
    per_partition: bool,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stream_consumers.kafka.errors.RETRY_SECONDS", 0.001)
    coordinator = Coordinator(code, per_partition=per_partition)
    assert (request_(opened(coordinator)), coordinator.requests) == (answer, 3)


@pytest.mark.parametrize("code", PASSING)
def test_members_are_asked_for_again(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_consumers.kafka.errors.RETRY_SECONDS", 0.001)
    assert members(opened(Coordinator(code))) == ["client id 'pump' on host /10.0.0.7 (nothing assigned)"]


@pytest.mark.parametrize("code", PASSING)
def test_a_transaction_is_begun_again(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_consumers.kafka.errors.RETRY_SECONDS", 0.001)
    coordinator = Coordinator(code)
    monkeypatch.setattr(KafkaBrokers, "producer", lambda self, **_: coordinator)
    KafkaTransactions(URL, "pricing-1", None)  # type: ignore[arg-type]
    assert coordinator.requests == 3


@pytest.mark.parametrize("request_", [commit, committed, commit_as_member])
def test_a_coordinator_that_is_never_found_is_an_error(
    request_: Callable[[KafkaBrokers], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_cluster, "REQUEST_SECONDS", 0.0)
    with pytest.raises((BrokerError, GroupActiveError), match="billing"):
        request_(opened(Coordinator(KafkaError.NOT_COORDINATOR)))


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
