"""Where the positions of a group are kept, per backend, and what came of committing them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Consumer
from stream_consumers.errors import GroupActiveError, GroupsNotRememberedError
from stream_consumers.kafka_consumer import KafkaConsumer
from stream_consumers.memory import MemoryBatchSource
from stream_consumers.messages import Shard
from stream_consumers.redis_server import RedisServer
from stream_consumers.urls import StreamUrl

Positions = Mapping[Shard, int]


class CommitResult(enum.Enum):
    """What came of a commit; Faust's ``bool`` cannot tell the four apart."""

    NOTHING_TO_DO = "nothing to do"
    COMMITTED = "committed"
    ANOTHER_WAS_RUNNING = "another was running"
    FAILED = "failed"


class PositionCommitter(Protocol):
    """Keeps the positions of one group. A position is the next sequence to read; 0 is not "none"."""

    @property
    def is_transactional(self) -> bool:
        """Whether a commit ends a transaction, so that only the one who fills it may call it."""
        ...

    def commit(self, positions: Positions) -> None:
        """Keep these positions.

        Raises:
            StreamAssetsError: they were not kept.
        """
        ...

    def committed(self) -> Positions:
        """What is kept; shards without a position are left out.

        Raises:
            StreamAssetsError: it cannot be told.
        """
        ...


class ProcessCommitter:
    """Keeps positions in this process only: for streams whose broker remembers none.

    Example:
        >>> committer = ProcessCommitter()
        >>> committer.commit({Shard("orders"): 0})
        >>> committer.committed()
        {Shard(stream='orders', id=0): 0}
    """

    is_transactional = False

    def __init__(self, positions: Positions | None = None) -> None:
        self._positions = dict(positions or {})

    def commit(self, positions: Positions) -> None:
        """See :meth:`PositionCommitter.commit`."""
        self._positions |= positions

    def committed(self) -> Positions:
        """See :meth:`PositionCommitter.committed`."""
        return dict(self._positions)


class MemoryCommitter:
    """Keeps positions in the broker of a ``memory://`` URL.

    Args:
        url: where.
        group: whose.

    Example:
        >>> committer = MemoryCommitter(StreamUrl.parse("memory://commits/orders"), "billing")
        >>> committer.commit({Shard("orders"): 7})
        >>> committer.committed()
        {Shard(stream='orders', id=0): 7}
    """

    is_transactional = False

    def __init__(self, url: StreamUrl, group: str) -> None:
        self._source, self._group = MemoryBatchSource(url), group

    def commit(self, positions: Positions) -> None:
        """See :meth:`PositionCommitter.commit`."""
        self._source.commit(self._group, positions)

    def committed(self) -> Positions:
        """See :meth:`PositionCommitter.committed`."""
        return self._source.committed(self._group) or {}


class KafkaCommitter:
    """Keeps positions in the group of a consumer, as that member.

    Args:
        consumer: with a group (mode ``resumable`` or ``load_balanced``).
    """

    is_transactional = False

    def __init__(self, consumer: KafkaConsumer) -> None:
        self._consumer = consumer

    def commit(self, positions: Positions) -> None:
        """See :meth:`stream_consumers.kafka_consumer.KafkaConsumer.commit`."""
        self._consumer.commit(positions)

    def committed(self) -> Positions:
        """See :meth:`PositionCommitter.committed`."""
        return self._consumer.committed()


class RedisCommitter:
    """Keeps positions in a group of Redis Streams that is read by position, as this project's ingestion does.

    Args:
        url: ``redis://host:6379/orders``.
        group: whose; it is made at the first commit.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.
    """

    is_transactional = False

    def __init__(self, url: StreamUrl, group: str, client: ClientConfig | None = None) -> None:
        self._server, self._group = RedisServer(url, client), group

    def commit(self, positions: Positions) -> None:
        """See :meth:`PositionCommitter.commit`.

        Raises:
            GroupActiveError: the group's entries are claimed one by one: it has no position.
            StreamNotFoundError: there is no such stream.
            BrokerUnavailableError, AccessDeniedError: as the server says.
        """
        for shard, position in sorted(positions.items()):
            if not self._server.set_position(self._group, shard, position, entries_read=None):
                raise GroupActiveError(
                    f"group {self._group!r} of {shard} is shared entry by entry",
                    remedy="Acknowledge its entries, or commit for a group of its own.",
                )

    def committed(self) -> Positions:
        """See :meth:`PositionCommitter.committed`."""
        facts = {shard: self._server.group_facts(self._group, shard) for shard in self._server.shards()}
        return {shard: found.position for shard, found in facts.items() if found is not None}


def create_committer(
    url: StreamUrl, group: str, *, consumer: Consumer | None = None, client: ClientConfig | None = None
) -> PositionCommitter:
    """What keeps the positions of a group of this stream.

    Args:
        url: the stream.
        group: whose positions.
        consumer: that reads; a Kafka group takes positions from its member only.
        client: configuration of the broker's client.

    Raises:
        GroupsNotRememberedError: nobody does, or for Kafka no consumer of it was given.

    Example:
        >>> create_committer(StreamUrl.parse("file:///tmp/a.ss/orders"), "billing")
        Traceback (most recent call last):
        stream_consumers.errors.GroupsNotRememberedError: no broker remembers the groups of file:///tmp/a.ss/orders \
(group=billing). Keep the positions yourself, or use ProcessCommitter for the time of this process.
    """
    if url.protocol == "memory":
        return MemoryCommitter(url, group)
    if url.protocol in {"redis", "rediss"}:
        return RedisCommitter(url, group, client)
    if isinstance(consumer, KafkaConsumer):
        return KafkaCommitter(consumer)
    remedy = "Keep the positions yourself, or use ProcessCommitter for the time of this process."
    if url.protocol == "kafka":
        remedy = "Give the KafkaConsumer that reads: its group takes positions from its own member."
    raise GroupsNotRememberedError(f"no broker remembers the groups of {url}", remedy=remedy, group=group)
