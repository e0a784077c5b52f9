"""Keeps the positions of a Redis group."""

from __future__ import annotations

from stream_consumers.capabilities import Positions, check_positions
from stream_consumers.client_config import ClientConfig
from stream_consumers.errors import GroupActiveError
from stream_consumers.redis.group import RedisGroup
from stream_consumers.redis.server import RedisConnection
from stream_consumers.urls import StreamUrl


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
        self._group = RedisGroup(RedisConnection(url, client), group)

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
