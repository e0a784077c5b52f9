"""Committers of a Redis group: one that keeps positions, and one that acknowledges entries one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stream_consumers.capabilities import Positions, check_positions
from stream_consumers.client_config import ClientConfig
from stream_consumers.errors import GroupActiveError, InvalidOptionError
from stream_consumers.messages import Shard
from stream_consumers.options import AutoCommit
from stream_consumers.redis.group import RedisGroup
from stream_consumers.redis.group_consumer import RedisGroupConsumer
from stream_consumers.redis.server import RedisServer
from stream_consumers.urls import StreamUrl

Entries = Mapping[Shard, Sequence[int]]


class RedisCommitter:
    """Keeps positions in a group of Redis Streams that is read by position, as this project's ingestion does.

    Args:
        url: ``redis://host:6379/orders``.
        group: its name; the group is created at the first commit.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.

    Example::

        url = "redis://localhost:6379/orders"
        committer = RedisCommitter(url, "billing")
        with TrackedConsumer(create_consumer(url), committer) as consumer:
            consumer.seek_to_committed()
    """

    is_transactional = False

    def __init__(self, url: str | StreamUrl, group: str, client: ClientConfig | None = None) -> None:
        url = StreamUrl.parse(url)
        self._group = RedisGroup(RedisServer(url, client), group)

    def commit(self, positions: Positions) -> None:
        """See :meth:`stream_consumers.committer.PositionCommitter.commit`.

        Raises:
            GroupActiveError: the group is in claim mode, so that it has no position.
            StreamNotFoundError: there is no such stream.
            BrokerUnavailableError, AccessDeniedError: as the server says.
        """
        check_positions(positions)
        for shard, position in sorted(positions.items()):
            if not self._group.set_position(shard, position, entries_read=None):
                raise GroupActiveError(
                    f"group {self._group.name!r} of {shard} is in claim mode: its entries are shared entry by entry",
                    remedy="Acknowledge its entries, or commit for a group of its own.",
                )

    def committed(self) -> Positions:
        """See :meth:`stream_consumers.committer.PositionCommitter.committed`."""
        facts = self._group.facts_of(self._group.server.shards())
        return {shard: found.position for shard, found in facts.items() if found is not None}


class RedisGroupCommitter:
    """Acknowledges finished entries for a member of a Redis group, one by one and in any order.

    The server is sent an XACK when a message was acknowledged *and* a commit runs; until then the message is pending,
    and delivered again to the next consumer of the same name, or to a peer that takes it over.

    Args:
        consumer: the member, with ``auto_commit`` ``disabled``: with another mode it would acknowledge unfinished
            messages, or only at its own times.

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
                f"auto_commit of {consumer} is {consumer.auto_commit.value!r}: it would not wait for "
                "unfinished messages",
                remedy="Give it RedisGroupOptions(auto_commit=AutoCommit.DISABLED).",
            )
        self._consumer = consumer

    def commit(self, positions: Positions) -> None:
        """Do nothing: a group whose members share entries has no positions."""

    def commit_entries(self, entries: Entries) -> None:
        """See :meth:`stream_consumers.committer.EntryCommitter.commit_entries`.

        Raises:
            GroupRemovedError: the group is gone.
            BrokerUnavailableError, AccessDeniedError: as the server says; the next commit sends them again.
        """
        for shard, sequences in entries.items():
            for sequence in sequences:
                self._consumer.ack((shard, sequence))
        self._consumer.commit()

    def committed(self) -> Positions:
        """No positions: the server knows the pending entries, and delivers those."""
        return {}
