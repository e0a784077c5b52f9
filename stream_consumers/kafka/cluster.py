"""A Kafka cluster as this project uses it: configuration, topics, offsets and groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka import (
    Message as KafkaMessage,
)
from confluent_kafka import (
    admin as kafka_admin,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from stream_consumers.client_config import ClientConfig, Scalar, resolve
from stream_consumers.closing import ClosesOnExit
from stream_consumers.errors import (
    AccessDeniedError,
    BrokerError,
    BrokerUnavailableError,
    FormatError,
    GroupActiveError,
    StreamAssetsError,
    StreamNotFoundError,
)
from stream_consumers.kafka.client import (
    ClientLog,
    ClientSecrets,
    ConnectionReasons,
    client_settings,
    explain,
    is_about_connection,
    is_lost,
    is_undecodable,
    isolation,
    options_explained,
    producer_options,
    raise_refused,
    until_found,
    with_tokens,
)
from stream_consumers.kafka.messages import MAX_BATCH_BYTES
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

K = TypeVar("K")
T = TypeVar("T")
REQUEST_SECONDS = 10.0
POLL_SECONDS = 0.05
# Seconds without any broker; not fewer, because only a later address of a host name may have a broker.
MIN_DOWN_SECONDS = 1.0
INTERNAL_TOPICS = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
"""The topics in which the brokers of each cluster keep their own state."""
# The client's type hints lack these names.
_SPECS: Any = vars(kafka_admin)["OffsetSpec"]
_RESOURCE: Any = vars(kafka_admin)["ConfigResource"]
_CONSUMER_DEFAULTS: Mapping[str, Scalar] = {
    # By default the client pauses for a second after its queue was full; with this, it reads six times as fast.
    "fetch.queue.backoff.ms": 10,
    # The client decompresses a batch only up to this size, by default 100 MB.
    "receive.message.max.bytes": MAX_BATCH_BYTES,
}


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic; its id is the fingerprint that detects a recreated one."""

    name: str
    id: str
    partitions: int

    @property
    def shards(self) -> list[Shard]:
        """The partitions of the topic."""
        return [Shard(self.name, number) for number in range(self.partitions)]


class KafkaBrokers(ClosesOnExit):
    """Sends requests to the brokers of a URL, but reads no messages; a context manager.

    Args:
        url: ``kafka://host:9092/orders``.
        client: any configuration of librdkafka.

    Attributes:
        answer_seconds: how long to wait for the answer to a request.
        is_hasty: whether a request fails once no broker could be reached for a second. A restarting broker takes
            longer, so this is for callers that retry later.

    Raises:
        InvalidOptionError: users may not change a setting.
    """

    def __init__(self, url: str | StreamUrl, client: ClientConfig | None = None) -> None:
        url = StreamUrl.parse(url)
        self.answer_seconds = REQUEST_SECONDS
        self.is_hasty = False
        self.url = url
        self.client = resolve(client or {})
        self.settings = client_settings(url, self.client)
        self.isolation = isolation(self.settings)
        self._secrets = ClientSecrets(self.settings)
        self._reasons = ConnectionReasons(self._secrets)
        self._log = ClientLog(self._secrets)
        # The clients that request the positions of a group without being a member of it.
        self._position_clients: dict[str, Consumer] = {}

    @cached_property
    def _admin(self) -> AdminClient:
        with options_explained(self._secrets):
            return AdminClient(self._own_settings(), logger=self._log)

    def _own_settings(self) -> dict[str, Any]:
        """Return the settings for an admin client or a producer, without those that only consumers have."""
        return self._for_client(producer_options(self.settings))

    def _for_client(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of one client, with its callbacks."""
        made = with_tokens(settings, self._secrets)
        self._reasons.tokens = made.get("oauth_cb")
        return {**made, "error_cb": self._reasons}

    def consumer(self, *, group: str | None = None, **own: Scalar) -> Consumer:
        """Create a client that consumes from this cluster; keyword ``a_b`` is the setting ``a.b``."""
        settings: dict[str, Scalar] = {name.replace("_", "."): value for name, value in own.items()}
        # The client requires a group id; without a subscription or a commit no broker sees it.
        settings["group.id"] = group or "stream-assets-no-group"
        with options_explained(self._secrets):
            return Consumer({**_CONSUMER_DEFAULTS, **self._for_client(self.settings), **settings}, logger=self._log)

    def producer(self, *, defaults: Mapping[str, Scalar], fixed: Mapping[str, Scalar]) -> Producer:
        """Create a client that produces to this cluster.

        Args:
            defaults: settings that the configuration of this cluster may change.
            fixed: settings that it may not change.

        Raises:
            InvalidOptionError: the client refuses its settings.
        """
        with options_explained(self._secrets):
            return Producer({**defaults, **self._own_settings(), **fixed}, logger=self._log)

    def check(self) -> None:
        """Check that the brokers answer.

        Raises:
            BrokerUnavailableError, AccessDeniedError, BrokerError: the broker does not answer, or refuses.
        """
        self._ask(lambda: {"": self._admin.describe_cluster(request_timeout=self.answer_seconds)}, "the cluster")

    def topics(self, streams: Sequence[str], *, seconds: float | None = None) -> Mapping[str, Topic]:
        """Return the topics with these names.

        Args:
            streams: the names.
            seconds: how long to wait for the answer; ``answer_seconds`` by default.

        Raises:
            StreamNotFoundError: one of the topics does not exist.
            BrokerUnavailableError, AccessDeniedError, BrokerError: the broker does not answer, or refuses.
        """
        return {name: _topic(topic) for name, topic in self._described(streams, seconds).items()}

    def create_topic(self, stream: str, shards: int) -> Topic:
        """Create a topic with ``shards`` partitions, unless another client has created it meanwhile, and return it.

        Raises:
            BrokerUnavailableError, AccessDeniedError, BrokerError: the broker does not answer, or refuses.
        """
        new = [NewTopic(stream, shards)]
        try:
            self._ask(lambda: self._admin.create_topics(new, request_timeout=self.answer_seconds), "creating the topic")
        except BrokerError as error:
            if error.facts["code"] != "TOPIC_ALREADY_EXISTS":
                raise
        deadline = time.monotonic() + self.answer_seconds
        while True:
            try:
                return self.topics([stream])[stream]
            except StreamNotFoundError:
                # A new topic reaches the brokers one after the other.
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_SECONDS)

    def topic_names(self) -> Sequence[str]:
        """Return the names of all topics that this client may see, except those that are internal in each cluster.

        Raises:
            BrokerUnavailableError, AccessDeniedError, BrokerError: the broker does not answer, or refuses.
        """
        found = self._answer(lambda left: self._admin.list_topics(timeout=left), lambda: "the topics")
        return [name for name in found.topics if name not in INTERNAL_TOPICS]

    def all_topics(self) -> Mapping[str, Topic]:
        """Return all topics that this client may see, except the internal ones of the brokers.

        Raises:
            BrokerUnavailableError, AccessDeniedError, BrokerError: the broker does not answer, or refuses.
        """
        for is_last in (False, False, True):
            listed = self.topic_names()
            if not listed:
                return {}
            try:
                found = self._described(listed)
            except StreamNotFoundError:
                # A topic was deleted in between.
                if is_last:
                    raise
                continue
            return {name: _topic(topic) for name, topic in found.items() if not topic.is_internal}
        return {}

    def _described(self, streams: Sequence[str], seconds: float | None = None) -> Mapping[str, Any]:
        names = TopicCollection(list(streams))
        return self._ask(
            lambda: self._admin.describe_topics(names, request_timeout=seconds or self.answer_seconds), "topic", seconds
        )

    def is_compacted(self, stream: str) -> bool:
        """Return whether the brokers may remove messages between others; also true if their answer is refused."""
        topic = _RESOURCE(_RESOURCE.Type.TOPIC, stream)
        with suppress(AccessDeniedError, BrokerError):
            found = self._ask(
                lambda: self._admin.describe_configs([topic], request_timeout=self.answer_seconds), "the settings of"
            )
            policy = found[topic].get("cleanup.policy")
            return policy is None or policy.value != "delete"
        return True

    def starts(self, shards: Iterable[Shard]) -> Mapping[Shard, int]:
        """Return the first offset of each shard that the brokers keep."""
        return self.offsets(shards, _SPECS.earliest())

    def ends(self, shards: Iterable[Shard], level: IsolationLevel | None = None) -> Mapping[Shard, int]:
        """Return the end of each shard at an isolation level, by default that of the settings."""
        return self.offsets(shards, _SPECS.latest(), level)

    def at(self, shards: Iterable[Shard], timestamp_ms: int) -> Mapping[Shard, int]:
        """Return the first offset of each shard with a timestamp at or after this one; -1 if none has."""
        # For the broker, negative timestamps name special offsets.
        return self.offsets(shards, _SPECS.for_timestamp(max(0, timestamp_ms)))

    def offsets(self, shards: Iterable[Shard], spec: Any, level: IsolationLevel | None = None) -> Mapping[Shard, int]:
        """Return an offset of each shard; -1 where no message fits ``spec`` (an ``OffsetSpec``)."""
        asked = {TopicPartition(shard.stream, shard.id): spec for shard in shards}
        if not asked:
            return {}
        level = self.isolation if level is None else level
        found = self._ask(
            lambda: self._admin.list_offsets(asked, isolation_level=level, request_timeout=self.answer_seconds),
            "offsets of",
        )
        return {Shard(place.topic, place.partition): int(answer.offset) for place, answer in found.items()}

    def committed(self, group: str, shards: Iterable[Shard]) -> Mapping[Shard, int]:
        """Return the committed positions of the group; shards without one are left out (0 is a position)."""
        return {shard: int(place.offset) for shard, place in self._places(group, shards).items()}

    def committed_metadata(self, group: str, shards: Iterable[Shard]) -> Mapping[Shard, str]:
        """Return the metadata of the group's committed positions; shards without metadata are left out."""
        return {shard: place.metadata for shard, place in self._places(group, shards).items() if place.metadata}

    def _places(self, group: str, shards: Iterable[Shard]) -> Mapping[Shard, TopicPartition]:
        asked = [TopicPartition(shard.stream, shard.id) for shard in shards]
        # A negative number means that the group has no position; 0 is an offset.
        found = (place for place in self._committed(group, asked) if place.offset >= 0) if asked else ()
        return {Shard(place.topic, place.partition): place for place in found}

    def _committed(self, group: str, asked: list[TopicPartition]) -> list[TopicPartition]:
        """Return the committed positions, requested by a consumer that is not a member.

        An admin client is not used, because librdkafka then crashes the process with a null pointer when the
        coordinator of the group moves or is still loading (librdkafka issue 5040).
        """
        consumer = self._position_client(group)

        def ask(left: float) -> list[TopicPartition]:
            places = consumer.committed(list(asked), left)
            raise_refused(places)
            return places

        try:
            return until_found(ask, seconds=self.answer_seconds)
        except KafkaException as error:
            # The client reports errors of its connections only when it is polled.
            consumer.poll(0)
            # A consumer waits for a coordinator without an error; an admin client gets the reason.
            self._described_group(group)
            raise self._explain(error.args[0], f"positions of group {group!r}") from None

    def _position_client(self, group: str) -> Consumer:
        if group not in self._position_clients:
            own = {
                "group.id": group,
                "enable.auto.commit": False,
                # The committed position counts, even if a transaction is about to commit another one.
                "isolation.level": "read_uncommitted",
            }
            with options_explained(self._secrets):
                self._position_clients[group] = Consumer({**self._own_settings(), **own}, logger=self._log)
        return self._position_clients[group]

    def commit(self, group: str, positions: Mapping[Shard, int], *, metadata: str = "") -> None:
        """Set the positions of a group without members, and store ``metadata`` with them.

        Raises:
            GroupActiveError: the group has members; the message names them.
        """
        if not positions:
            return
        request = [ConsumerGroupTopicPartitions(group, places_of(positions, metadata))]
        try:
            self._ask(
                lambda: self._admin.alter_consumer_group_offsets(request, request_timeout=self.answer_seconds),
                "committing for group",
            )
        except (BrokerError, GroupActiveError) as error:
            members = self.members(group)
            if not members:
                raise
            raise GroupActiveError(
                f"the positions of group {group!r} cannot be set: it has live members, {'; '.join(members)}",
                remedy="Stop them, or ingest with another group. The rows stay in the table once, and the next run "
                "sets the positions.",
                error=error.facts["code"],
            ) from error

    def commit_as_member(
        self, consumer: Consumer, group: str, positions: Mapping[Shard, int], *, metadata: str = ""
    ) -> KafkaError | None:
        """Set the positions of a group as the member that has these shards.

        Returns:
            ``None`` if they were set; else the reason for the refusal: another member has the shards now, or this
            member has left.

        Raises:
            BrokerUnavailableError, AccessDeniedError, BrokerError: the broker does not answer, or refuses.
        """
        places = places_of(positions, metadata)
        try:
            until_found(
                lambda left: raise_refused(consumer.commit(offsets=places, asynchronous=False) or []),
                seconds=self.answer_seconds,
            )
        except RuntimeError:
            # The client was closed meanwhile.
            return KafkaError(KafkaError._ASSIGNMENT_LOST)
        except KafkaException as error:
            refusal: KafkaError = error.args[0]
            if is_lost(refusal):
                return refusal
            raise self._explain(refusal, f"committing for group {group!r}") from None
        return None

    def members(self, group: str) -> list[str]:
        """Describe the live members of a group: client id, host and assigned partitions."""
        try:
            described = self._described_group(group)
        except StreamAssetsError:
            return []
        return [
            f"client id {member.client_id!r} on host {member.host} "
            f"({', '.join(f'{p.topic}/{p.partition}' for p in _assigned(member)) or 'nothing assigned'})"
            for member in described.members
        ]

    def _described_group(self, group: str) -> Any:
        return self._ask(
            lambda: self._admin.describe_consumer_groups([group], request_timeout=self.answer_seconds), "the group"
        )[group]

    def _ask(
        self, request: Callable[[], Mapping[K, Future[T]]], what: str, seconds: float | None = None
    ) -> Mapping[K, T]:
        """Return the answers to a request, which is retried while a leader or coordinator is being found."""
        name: object = ""

        def ask(left: float) -> Mapping[K, T]:
            nonlocal name
            answers = {}
            for asked, future in request().items():
                name = asked
                answers[asked] = answer = self._result(future, self.answer_seconds if seconds is None else seconds)
                if isinstance(answer, ConsumerGroupTopicPartitions):
                    raise_refused(answer.topic_partitions or [])
            return answers

        return self._answer(ask, lambda: f"{what} {_name(name)}", seconds)

    def _result(self, future: Future[T], seconds: float) -> T:
        deadline = time.monotonic() + seconds + 5
        while True:
            left = deadline - time.monotonic()
            try:
                return future.result(min(left, POLL_SECONDS) if self.is_hasty else left)
            except FutureTimeoutError:
                if time.monotonic() >= deadline:
                    raise
                # The client reports errors of its connections only when it is polled.
                self._admin.poll(0)
                if self._reasons.down_seconds > MIN_DOWN_SECONDS:
                    raise KafkaException(KafkaError(KafkaError._ALL_BROKERS_DOWN)) from None

    def _answer(self, ask: Callable[[float], T], what: Callable[[], str], seconds: float | None = None) -> T:
        """Return the answer of :func:`until_found`, with its errors explained."""
        try:
            return until_found(ask, seconds=self.answer_seconds if seconds is None else seconds)
        except FutureTimeoutError as error:
            self._forget_clients()
            raise BrokerUnavailableError(
                f"{what()} at {self.settings['bootstrap.servers']}: no answer",
                remedy="Check the brokers and run again; nothing was lost.",
            ) from error
        except KafkaException as error:
            raise self._explain(error.args[0], what()) from None

    def _explain(self, error: KafkaError, what: str) -> StreamAssetsError:
        self._admin.poll(0)
        explained = self.explain(error, f"{what} at {self.settings['bootstrap.servers']}")
        if is_about_connection(error):
            self._forget_clients()
        return explained

    def _forget_clients(self) -> None:
        """Close the clients, so that the next request creates new ones.

        A client that was connected to a restarted broker waits forever for the coordinator of a group, and still
        reports the errors of the outage.
        """
        self.close()
        self._reasons = ConnectionReasons(self._secrets)

    def close(self) -> None:
        """Release the clients; a later request creates new ones.

        An error keeps the cluster in a reference cycle. If Python collected that in a thread of another client,
        librdkafka would crash the process.
        """
        self.__dict__.pop("_admin", None)
        self._position_clients.clear()

    def explain(self, error: KafkaError, what: str) -> StreamAssetsError:
        """Map an error of a client; see :func:`stream_consumers.kafka.client.explain`."""
        return explain(error, what=what, said=self.said(error), reason=self.reason(error))

    def explain_read(self, message: KafkaMessage, error: KafkaError) -> StreamAssetsError:
        """Map the error of a message of a consumer."""
        place = f"{message.topic()}/{message.partition()}"
        if not is_undecodable(error):
            return self.explain(error, f"reading {place} of {self.url}")
        offset = message.offset() or 0
        return FormatError(
            f"{place} of {self.url} has a batch that cannot be read at offset {offset}: {self.said(error)}",
            remedy="Nothing of it was read. Repair the disk of the broker or use another replica, then run again; if "
            "only decompression fails, raise the client option receive.message.max.bytes. Or give up the messages of "
            f"the batch: stream-assets rewind --to {place}=OFFSET, with the first offset after it.",
            offset=offset,
            code=error.name(),
        )

    def misplaced(self, place: str, lowest: int, found: int) -> FormatError:
        """Return the error for an offset that is below the lowest valid one, or after the end of the partition."""
        return FormatError(
            f"{place} of {self.url} has a damaged batch: offset {found} is found where an offset from {lowest} up to "
            "the end is expected",
            remedy="Repair the disk of the broker or use another replica. Messages before this position may have been "
            "skipped: run stream-assets verify, and replay what it reports; or rewind to before the damaged batch.",
            offset=lowest,
            found=found,
        )

    def said(self, error: KafkaError) -> str:
        """Return the text of an error, which may repeat a broker's text, without secrets."""
        return self._secrets.redacted(error.str())

    def reason(self, error: KafkaError) -> str:
        """Return the last error about the connection, if the given error is about it; else empty."""
        return str(self._reasons) if is_about_connection(error) else ""


def places_of(positions: Mapping[Shard, int], metadata: str = "") -> list[TopicPartition]:
    """Convert positions to the client's type, in order."""
    return [TopicPartition(s.stream, s.id, offset, metadata) for s, offset in sorted(positions.items())]


def shards_of(places: Iterable[TopicPartition]) -> frozenset[Shard]:
    """Return the shards of the client's partitions."""
    return frozenset(Shard(place.topic, place.partition) for place in places)


def _topic(described: Any) -> Topic:
    return Topic(described.name, str(described.topic_id), len(described.partitions))


def _name(asked: object) -> str:
    return f"{asked.topic}/{asked.partition}" if isinstance(asked, TopicPartition) else repr(asked)


def _assigned(member: Any) -> Sequence[TopicPartition]:
    return member.assignment.topic_partitions if member.assignment else ()
