"""Where the positions of a group are kept, per backend, and what came of committing them."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Consumer
from stream_consumers.errors import GroupActiveError, GroupsNotRememberedError, InvalidOptionError
from stream_consumers.in_process_groups import SharedGroupConsumer
from stream_consumers.kafka.consumer import KafkaConsumer
from stream_consumers.memory import MemoryBatchSource
from stream_consumers.messages import Shard
from stream_consumers.options import AutoCommit
from stream_consumers.redis.group import RedisGroup
from stream_consumers.redis.group_consumer import RedisGroupConsumer
from stream_consumers.redis.server import RedisServer
from stream_consumers.urls import StreamUrl

Positions = Mapping[Shard, int]
Entries = Mapping[Shard, Sequence[int]]


class CommitResult(enum.Enum):
    """What came of a commit; Faust's ``bool`` cannot tell the four apart.

    Example:
        >>> CommitResult.FAILED.value
        'failed'
    """

    NOTHING_TO_DO = "nothing to do"
    COMMITTED = "committed"
    ANOTHER_WAS_RUNNING = "another was running"
    FAILED = "failed"


class PositionCommitter(Protocol):
    """Keeps the positions of one group. A position is the next sequence to read; 0 is not "none".

    Example:
        >>> committer: PositionCommitter = ProcessCommitter({Shard("orders"): 3})
        >>> committer.committed()
        {Shard(stream='orders', id=0): 3}
    """

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


@runtime_checkable
class EntryCommitter(Protocol):
    """Beyond :class:`PositionCommitter`: keeps message by message which ones are finished, in any order.

    Example:
        >>> isinstance(ProcessCommitter(), EntryCommitter)
        False
    """

    def commit_entries(self, entries: Entries) -> None:
        """Keep that these messages are finished.

        Args:
            entries: their sequences, per shard.

        Raises:
            StreamAssetsError: they may not have been kept.
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

    Example::

        url = StreamUrl.parse("kafka://localhost:9092/orders")
        member = KafkaConsumer(url, mode=ConsumerMode.LOAD_BALANCED, group="billing")
        with TrackedConsumer(member, KafkaCommitter(member)) as consumer:
            for message in consumer:
                with consumer.processing(message):
                    bill(message)
    """

    is_transactional = False

    def __init__(self, consumer: KafkaConsumer) -> None:
        self._consumer = consumer

    def commit(self, positions: Positions) -> None:
        """See :meth:`stream_consumers.kafka.consumer.KafkaConsumer.commit`."""
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

    Example::

        url = StreamUrl.parse("redis://localhost:6379/orders")
        committer = RedisCommitter(url, "billing")
        with TrackedConsumer(create_consumer(url), committer) as consumer:
            consumer.seek_to_committed()
    """

    is_transactional = False

    def __init__(self, url: StreamUrl, group: str, client: ClientConfig | None = None) -> None:
        self._group = RedisGroup(RedisServer(url, client), group)

    def commit(self, positions: Positions) -> None:
        """See :meth:`PositionCommitter.commit`.

        Raises:
            GroupActiveError: the group's entries are claimed one by one: it has no position.
            StreamNotFoundError: there is no such stream.
            BrokerUnavailableError, AccessDeniedError: as the server says.
        """
        for shard, position in sorted(positions.items()):
            if not self._group.set_position(shard, position, entries_read=None):
                raise GroupActiveError(
                    f"group {self._group.name!r} of {shard} is shared entry by entry",
                    remedy="Acknowledge its entries, or commit for a group of its own.",
                )

    def committed(self) -> Positions:
        """See :meth:`PositionCommitter.committed`."""
        facts = {shard: self._group.facts(shard) for shard in self._group.server.shards()}
        return {shard: found.position for shard, found in facts.items() if found is not None}


class RedisGroupCommitter:
    """Acknowledges the entries of a member of a Redis group, one by one: what is finished, whatever came before it.

    A message is told to the server (XACK) when it is acknowledged *and* a commit runs; until then it is pending, and
    delivered again to the next consumer of the same name, or to a peer that takes it over.

    Args:
        consumer: the member, with ``auto_commit`` ``disabled``: any other one would acknowledge what is unfinished, or
            only at its own times.

    Raises:
        InvalidOptionError: the member acknowledges by itself.

    Example::

        options = RedisGroupOptions(auto_commit=AutoCommit.DISABLED)
        member = RedisGroupConsumer(url, group="billing", options=options)
        with TrackedConsumer(member, RedisGroupCommitter(member)) as consumer:
            for message in consumer:
                with consumer.processing(message):
                    bill(message)
    """

    is_transactional = False

    def __init__(self, consumer: RedisGroupConsumer) -> None:
        if consumer.auto_commit is not AutoCommit.DISABLED:
            raise InvalidOptionError(
                f"auto_commit of {consumer} is {consumer.auto_commit.value!r}: it would not wait for the messages that "
                "are unfinished",
                remedy="Give it RedisGroupOptions(auto_commit=AutoCommit.DISABLED).",
            )
        self._consumer = consumer

    def commit(self, positions: Positions) -> None:
        """Nothing: a group that shares entries has no positions."""

    def commit_entries(self, entries: Entries) -> None:
        """See :meth:`EntryCommitter.commit_entries`.

        Raises:
            GroupRemovedError: the group is gone.
            BrokerUnavailableError, AccessDeniedError: as the server says; the next commit tells it all again.
        """
        for shard, sequences in entries.items():
            for sequence in sequences:
                self._consumer.ack((shard, sequence))
        self._consumer.commit()

    def committed(self) -> Positions:
        """Nothing: the server knows what is pending, and delivers that."""
        return {}


def check_committer(consumer: Consumer, committer: PositionCommitter) -> None:
    """Refuse positions for a consumer that is given single messages of a shard, others of which are somebody else's.

    Args:
        consumer: what is read.
        committer: what is to keep what was finished.

    Raises:
        InvalidOptionError: naming what fits it.

    Example:
        >>> from stream_consumers.create import create_consumer
        >>> check_committer(create_consumer("file://orders.ss/orders"), ProcessCommitter())
    """
    if isinstance(consumer, SharedGroupConsumer):
        raise InvalidOptionError(
            f"a member of group {consumer.group!r} is given some messages of each shard: a position would say that "
            "those of the other members are finished, too",
            remedy="Track a consumer without a group, and share its messages between threads.",
        )
    if isinstance(consumer, RedisGroupConsumer) and not isinstance(committer, EntryCommitter):
        raise InvalidOptionError(
            f"{type(committer).__name__} keeps positions, and {consumer} is given entries that are acknowledged one "
            "by one: nothing would be acknowledged",
            remedy="Use RedisGroupCommitter(consumer), or create_committer with this consumer.",
        )


def create_committer(
    url: StreamUrl, group: str, *, consumer: Consumer | None = None, client: ClientConfig | None = None
) -> PositionCommitter:
    """What keeps the positions of a group of this stream.

    Args:
        url: the stream.
        group: whose positions.
        consumer: that reads. A Kafka group takes positions from its member only; the entries of a Redis group are
            acknowledged through their member.
        client: configuration of the broker's client.

    Raises:
        GroupsNotRememberedError: nobody does, or for Kafka no consumer of it was given.
        InvalidOptionError: the consumer is a member of another group, or acknowledges by itself.

    Example:
        >>> create_committer(StreamUrl.parse("file:///tmp/a.ss/orders"), "billing")
        Traceback (most recent call last):
        stream_consumers.errors.GroupsNotRememberedError: no broker remembers the groups of file:///tmp/a.ss/orders \
(group=billing). Keep the positions yourself, or use ProcessCommitter for the time of this process.
    """
    if url.protocol == "memory":
        return MemoryCommitter(url, group)
    if isinstance(consumer, RedisGroupConsumer):
        if consumer.group != group:
            raise InvalidOptionError(
                f"{consumer} is no member of group {group!r}", remedy=f"Give group={consumer.group!r}."
            )
        return RedisGroupCommitter(consumer)
    if url.protocol in {"redis", "rediss"}:
        return RedisCommitter(url, group, client)
    if isinstance(consumer, KafkaConsumer):
        return KafkaCommitter(consumer)
    remedy = "Keep the positions yourself, or use ProcessCommitter for the time of this process."
    if url.protocol == "kafka":
        remedy = "Give the KafkaConsumer that reads: its group takes positions from its own member."
    raise GroupsNotRememberedError(f"no broker remembers the groups of {url}", remedy=remedy, group=group)
