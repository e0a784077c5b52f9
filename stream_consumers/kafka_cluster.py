"""A Kafka cluster as this project uses it: configuration, topics, offsets, groups, and errors in our words."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka import admin as kafka_admin
from confluent_kafka.admin import AdminClient

from stream_consumers.client_config import ClientConfig, Deferred, Scalar, resolve
from stream_consumers.errors import (
    AccessDeniedError,
    BrokerError,
    BrokerUnavailableError,
    GroupActiveError,
    InvalidOptionError,
    StreamAssetsError,
    StreamNotFoundError,
)
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

T = TypeVar("T")
DEFAULT_PORT = 9092
REQUEST_SECONDS = 10.0
# What this project decides, and why nobody else may.
RESERVED = {
    "bootstrap.servers": "the URL says which servers",
    "group.id": "the group is an option of its own",
    "enable.partition.eof": "a range ends there, whatever is missing in it",
}
FIXED: Mapping[str, Scalar] = {"enable.auto.commit": False, "auto.offset.reset": "error"}
_WHY_FIXED = {
    "enable.auto.commit": "it would commit what is not in the table yet",
    "auto.offset.reset": "it would skip or repeat messages without a word; use start or reset",
}
_DENIED = {
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_SILENT = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TIMED_OUT,
    KafkaError._RESOLVE,
    KafkaError.REQUEST_TIMED_OUT,
}
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
# The client's type hints do not export it.
_SPECS: Any = vars(kafka_admin)["OffsetSpec"]
_log = logging.getLogger(__name__)


def check_client_options(client: ClientConfig) -> None:
    """Refuse settings that this project decides; nothing is looked up.

    Raises:
        InvalidOptionError: naming the setting and the reason.
    """
    for name, reason in RESERVED.items():
        if name in client:
            raise InvalidOptionError(f"the client option {name!r} cannot be set: {reason}", remedy="Leave it out.")
    for name, fixed in FIXED.items():
        if name in client and (isinstance(client[name], Deferred) or str(client[name]).lower() != str(fixed).lower()):
            raise InvalidOptionError(
                f"the client option {name!r} is refused: {_WHY_FIXED[name]}", remedy="Leave it out."
            )


def client_settings(url: StreamUrl, client: ClientConfig | None) -> dict[str, Scalar]:
    """The settings of every client of this cluster, secrets looked up.

    Args:
        url: its nodes are the bootstrap servers, port 9092 by default.
        client: any configuration of librdkafka, like ``security.protocol`` or ``isolation.level``.

    Raises:
        InvalidOptionError: a setting that this project decides, or a variable that is not set.

    Example:
        >>> client_settings(StreamUrl.parse("kafka://a,b:1/orders"), None)["bootstrap.servers"]
        'a:9092,b:1'
    """
    check_client_options(client or {})
    given = resolve(client or {})
    servers = ",".join(_with_port(node) for node in url.nodes if node != ".") or f"localhost:{DEFAULT_PORT}"
    # What the client has to say reaches the reader in our errors; its own log lines come on top only if asked for.
    return {"log_level": 2, **given, **FIXED, "bootstrap.servers": servers}


def _with_port(node: str) -> str:
    is_bare = ":" not in node or node.endswith("]")
    return f"{node}:{DEFAULT_PORT}" if is_bare else node


def isolation(settings: Mapping[str, Scalar]) -> IsolationLevel:
    """The isolation level of the settings; ``read_committed`` by default, as in librdkafka.

    Raises:
        InvalidOptionError: an unknown level.
    """
    level = str(settings.get("isolation.level", "read_committed"))
    levels = {
        "read_committed": IsolationLevel.READ_COMMITTED,
        "read_uncommitted": IsolationLevel.READ_UNCOMMITTED,
    }
    if level not in levels:
        raise InvalidOptionError(f"isolation.level={level!r} is unknown", remedy=f"Use one of: {', '.join(levels)}.")
    return levels[level]


def explain(error: KafkaError, *, what: str, reason: str = "") -> StreamAssetsError:
    """A Kafka error in our words.

    Args:
        error: as the client reported it.
        what: what failed, naming the servers.
        reason: what the client said of its connection, which tells more than "timed out".
    """
    said = f"{what}: {reason or error.str()}"
    code = error.code()
    if code in _DENIED or "authentication" in reason.lower():
        return AccessDeniedError(said, remedy="Check security.protocol, the sasl.* options and the broker's ACLs.")
    if code in _MISSING:
        return StreamNotFoundError(said, remedy="Create the topic, or check its name and the ACLs.")
    if code in _SILENT:
        return BrokerUnavailableError(
            said, remedy="Check the address and that the broker runs; nothing was lost, run again."
        )
    if code == KafkaError.UNKNOWN_MEMBER_ID:
        return GroupActiveError(said, remedy="Stop the group's other members; the next run sets its positions.")
    return BrokerError(said, remedy="Nothing was lost; run again.", code=error.name())


class ConnectionReasons:
    """Remembers what a client says about its connections; give it as ``error_cb``."""

    def __init__(self) -> None:
        self._said: deque[str] = deque(maxlen=4)

    def __call__(self, error: KafkaError) -> None:
        """Called by the client."""
        _log.debug("kafka client: %s", error.str())
        if error.code() != KafkaError._ALL_BROKERS_DOWN:
            self._said.append(error.str())

    def __str__(self) -> str:
        return self._said[-1] if self._said else ""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it is now: its id tells a recreated one from the old one."""

    name: str
    id: str
    partitions: int

    @property
    def shards(self) -> list[Shard]:
        """Its partitions."""
        return [Shard(self.name, number) for number in range(self.partitions)]


class KafkaCluster:
    """Asks and tells the brokers of a URL; no messages are read here.

    Args:
        url: ``kafka://host:9092/orders``.
        client: any configuration of librdkafka.

    Raises:
        InvalidOptionError: a setting that this project decides.
    """

    def __init__(self, url: StreamUrl, client: ClientConfig | None = None) -> None:
        self.url = url
        self.client = resolve(client or {})
        self.settings = client_settings(url, self.client)
        self.isolation = isolation(self.settings)
        self._reasons = ConnectionReasons()

    @cached_property
    def _admin(self) -> AdminClient:
        return AdminClient(self.own_settings(), logger=_log)

    def own_settings(self) -> dict[str, Any]:
        """The settings without those that only consumers know, for an admin client or a producer."""
        return {
            **{name: value for name, value in self.settings.items() if not _is_consumer_only(name)},
            "error_cb": self._reasons,
        }

    def consumer(self, *, group: str | None = None, **own: Scalar) -> Consumer:
        """A consumer of this cluster; keyword ``a_b`` is the setting ``a.b``."""
        settings: dict[str, Scalar] = {name.replace("_", "."): value for name, value in own.items()}
        # The client wants a group even where it has none; without a subscription or a commit nobody hears of it.
        return Consumer(
            {
                **_CONSUMER_DEFAULTS,
                **self.settings,
                **settings,
                "group.id": group or "stream-assets-no-group",
                "error_cb": self._reasons,
            },
            logger=_log,
        )

    def topics(self, streams: Sequence[str]) -> Mapping[str, Topic]:
        """The topics of these names.

        Raises:
            StreamNotFoundError: one of them is not there.
            BrokerUnavailableError, AccessDeniedError, BrokerError: as the broker says.
        """
        futures = self._admin.describe_topics(TopicCollection(list(streams)), request_timeout=REQUEST_SECONDS)
        found = {}
        for stream, future in futures.items():
            described = self._wait(future, f"topic {stream!r}")
            found[stream] = Topic(stream, str(described.topic_id), len(described.partitions))
        return found

    def starts(self, shards: Iterable[Shard]) -> Mapping[Shard, int]:
        """The first offset that the brokers keep, of each shard."""
        return self.offsets(shards, _SPECS.earliest())

    def ends(self, shards: Iterable[Shard], level: IsolationLevel | None = None) -> Mapping[Shard, int]:
        """The end of each shard at an isolation level, by default that of the settings."""
        return self.offsets(shards, _SPECS.latest(), level)

    def at(self, shards: Iterable[Shard], timestamp_ms: int) -> Mapping[Shard, int]:
        """The first offset with a timestamp at or after this one, of each shard; -1 where there is none."""
        return self.offsets(shards, _SPECS.for_timestamp(timestamp_ms))

    def offsets(self, shards: Iterable[Shard], spec: Any, level: IsolationLevel | None = None) -> Mapping[Shard, int]:
        """An offset of each shard; -1 where no message fits ``spec`` (an ``OffsetSpec``)."""
        asked = {TopicPartition(shard.stream, shard.id): spec for shard in shards}
        if not asked:
            return {}
        level = self.isolation if level is None else level
        futures = self._admin.list_offsets(asked, isolation_level=level, request_timeout=REQUEST_SECONDS)
        return {
            Shard(place.topic, place.partition): int(self._wait(future, f"{place.topic}/{place.partition}").offset)
            for place, future in futures.items()
        }

    def committed(self, group: str, shards: Iterable[Shard]) -> Mapping[Shard, int]:
        """What the group has committed of these shards; those without are left out (0 is not nothing)."""
        asked = [TopicPartition(shard.stream, shard.id) for shard in shards]
        if not asked:
            return {}
        request = [ConsumerGroupTopicPartitions(group, asked)]
        future = self._admin.list_consumer_group_offsets(request, request_timeout=REQUEST_SECONDS)[group]
        found = {}
        for place in self._wait(future, f"group {group!r}").topic_partitions:
            if place.error is not None:
                raise self._explain(place.error, f"the position of group {group!r}")
            if place.offset > OFFSET_INVALID and place.offset >= 0:
                found[Shard(place.topic, place.partition)] = int(place.offset)
        return found

    def commit(self, group: str, positions: Mapping[Shard, int]) -> None:
        """Set the positions of a group that has no members.

        Raises:
            GroupActiveError: it has some; the message names them.
        """
        if not positions:
            return
        places = [TopicPartition(shard.stream, shard.id, offset) for shard, offset in sorted(positions.items())]
        request = [ConsumerGroupTopicPartitions(group, places)]
        future = self._admin.alter_consumer_group_offsets(request, request_timeout=REQUEST_SECONDS)[group]
        try:
            # The future succeeds even where a partition was refused.
            refused = [p.error for p in self._result(future).topic_partitions if p.error is not None]
        except KafkaException as error:
            refused = [error.args[0]]
        if not refused:
            return
        members = self.members(group)
        if members:
            raise GroupActiveError(
                f"the positions of group {group!r} cannot be set: it has live members, {'; '.join(members)}",
                remedy="Stop them, or ingest with a group of its own. What is in the table stays there once, and the "
                "next run sets the positions.",
                error=refused[0].name(),
            )
        raise self._explain(refused[0], f"committing for group {group!r}")

    def members(self, group: str) -> list[str]:
        """The live members of a group, for people: client id, host, what they read."""
        future = self._admin.describe_consumer_groups([group], request_timeout=REQUEST_SECONDS)[group]
        try:
            described = self._result(future)
        except KafkaException:
            return []
        return [
            f"client id {member.client_id!r} on host {member.host} "
            f"({', '.join(f'{p.topic}/{p.partition}' for p in _assigned(member)) or 'nothing assigned'})"
            for member in described.members
        ]

    def _wait(self, future: Future[T], what: str) -> T:
        try:
            return self._result(future)
        except KafkaException as error:
            raise self._explain(error.args[0], what) from error

    def _result(self, future: Future[T]) -> T:
        return future.result(REQUEST_SECONDS + 5)

    def _explain(self, error: KafkaError, what: str) -> StreamAssetsError:
        self._admin.poll(0)
        return explain(error, what=f"{what} at {self.settings['bootstrap.servers']}", reason=self.reason(error))

    def reason(self, error: KafkaError) -> str:
        """What is known of the connection, if that is what the error is about."""
        return str(self._reasons) if error.code() in _SILENT else ""


def _assigned(member: Any) -> Sequence[TopicPartition]:
    return member.assignment.topic_partitions if member.assignment else ()


# After its queue was full the client would not fetch for a second: reading is six times as fast with this.
_CONSUMER_DEFAULTS: Mapping[str, Scalar] = {"fetch.queue.backoff.ms": 10}
_CONSUMER_ONLY = {
    "auto.offset.reset",
    "enable.auto.commit",
    "isolation.level",
    "session.timeout.ms",
    "heartbeat.interval.ms",
    "max.poll.interval.ms",
    "group.instance.id",
    "group.protocol",
    "group.remote.assignor",
    "partition.assignment.strategy",
    "check.crcs",
    "queued.min.messages",
    "queued.max.messages.kbytes",
}


def _is_consumer_only(name: str) -> bool:
    return name in _CONSUMER_ONLY or name.startswith("fetch.")
