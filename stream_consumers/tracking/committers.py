"""Which committer fits a consumer, and what came of a commit."""

from __future__ import annotations

import enum

from stream_consumers.backend import find_backend
from stream_consumers.client_config import ClientConfig
from stream_consumers.committer import EntryCommitter, PositionCommitter
from stream_consumers.consumer import Consumer
from stream_consumers.errors import InvalidOptionError
from stream_consumers.in_process_groups import SharedGroupConsumer
from stream_consumers.redis.group_consumer import RedisGroupConsumer
from stream_consumers.urls import StreamUrl


class CommitResult(enum.Enum):
    """What came of a commit; Faust's ``bool`` does not distinguish the four.

    Example:
        >>> CommitResult.FAILED.value, bool(CommitResult.FAILED)
        ('failed', False)
    """

    NOTHING_TO_DO = "nothing to do"
    COMMITTED = "committed"
    ANOTHER_WAS_RUNNING = "another was running"
    FAILED = "failed"

    def __bool__(self) -> bool:
        """Whether something was committed, as Faust's commit returns."""
        return self is CommitResult.COMMITTED


def check_committer(consumer: Consumer, committer: PositionCommitter) -> None:
    """Refuse positions for a consumer that is given single messages of a shard, others of which go to other members.

    Args:
        consumer: what is read.
        committer: what is to keep what was finished.

    Raises:
        InvalidOptionError: naming what fits it.

    Example:
        >>> from stream_consumers.committer import ProcessCommitter
        >>> from stream_consumers.create import create_consumer
        >>> check_committer(create_consumer("file://orders.ss/orders"), ProcessCommitter())
    """
    if isinstance(consumer, SharedGroupConsumer):
        raise InvalidOptionError(
            f"a member of group {consumer.group!r} is given some messages of each shard: a position would say that "
            "those of the other members are finished, too",
            remedy="Track a consumer without a group, and share its messages between threads.",
        )
    if isinstance(committer, RedisGroupConsumer):
        committer.check_waits_for_ack()
    elif isinstance(consumer, RedisGroupConsumer) and not isinstance(committer, EntryCommitter):
        raise InvalidOptionError(
            f"{type(committer).__name__} keeps positions, and {consumer} is given entries that are acknowledged one "
            "by one: nothing would be acknowledged",
            remedy="Give the consumer itself as the committer, or use create_committer with it.",
        )


def create_committer(
    url: str | StreamUrl, group: str, *, consumer: Consumer | None = None, client: ClientConfig | None = None
) -> PositionCommitter:
    """What keeps the positions of a group of this stream.

    Args:
        url: the stream.
        group: whose positions.
        consumer: that reads. A Kafka group takes positions from its member only; the entries of a Redis group are
            acknowledged through their member.
        client: configuration of the broker's client.

    Raises:
        GroupsNotRememberedError: no broker does, or for Kafka no consumer of it was given.
        InvalidOptionError: the consumer is a member of another group, or acknowledges by itself.

    Example:
        >>> create_committer(StreamUrl.parse("file:///tmp/a.ss/orders"), "billing")
        Traceback (most recent call last):
        stream_consumers.errors.GroupsNotRememberedError: no broker remembers the groups of file:///tmp/a.ss/orders \
(group=billing). Keep the positions yourself, or use ProcessCommitter for the time of this process.
    """
    url = StreamUrl.parse(url)
    return find_backend(url.protocol).committer(url, group, consumer=consumer, client=client or {})
