"""``redis://`` and ``rediss://``: Redis Streams as a backend."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing

from stream_consumers.backend import Backend, ConsumerOptions
from stream_consumers.batches import BatchSource, Membership
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Consumer
from stream_consumers.epochs import EpochNameMap
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import ConsumerMode, Modes, RedisGroupOptions
from stream_consumers.producer import Producer
from stream_consumers.redis.batches import RedisBatchSource
from stream_consumers.redis.claims import RedisClaims
from stream_consumers.redis.client import check_redis_options
from stream_consumers.redis.consumer import RedisConsumer
from stream_consumers.redis.entries import EntrySequence
from stream_consumers.redis.group import RedisCommitter
from stream_consumers.redis.group_consumer import MEMBER_MODES, RedisGroupConsumer
from stream_consumers.redis.producer import RedisProducer
from stream_consumers.redis.server import RedisConnection
from stream_consumers.urls import StreamUrl

_MODES = (ConsumerMode.REAL_TIME, *MEMBER_MODES.available)


class RedisStreams(Backend):
    """Redis Streams."""

    consumer_modes = Modes(of="consumers of Redis", available=_MODES, host_groups=MEMBER_MODES.host_groups)
    batch_modes = Modes(of="batches of Redis", available=_MODES, host_groups=MEMBER_MODES.host_groups)
    group_options = RedisGroupOptions
    creates_shards = True
    takes_shard_count_of_sharder = True
    claims_entries = True
    answers_for_many = True
    kind = "redis"

    def shown_sequence(self, sequence: int) -> EntrySequence:
        """See :meth:`stream_consumers.backend.Backend.shown_sequence`."""
        return EntrySequence(sequence)

    def check(self, url: StreamUrl, client: ClientConfig) -> None:
        """See :meth:`stream_consumers.backend.Backend.check`."""
        url.check_servers()
        check_redis_options(client)

    def streams(self, url: StreamUrl, client: ClientConfig) -> Collection[str]:
        """See :meth:`stream_consumers.backend.Backend.streams`.

        Raises:
            BrokerUnavailableError, AccessDeniedError: the server returned an error.
        """
        with closing(RedisConnection(url, client)) as server:
            return {shard.stream for shard in server.shards_by_key().values()}

    def open_consumer(self, url: StreamUrl, options: ConsumerOptions) -> Consumer:
        """See :meth:`stream_consumers.backend.Backend.open_consumer`."""
        client, reset, live, on_dead_letter = options.client, options.reset, options.live, options.on_dead_letter
        if options.group is None:
            return RedisConsumer(url, reset=reset, live=live, client=client, on_dead_letter=on_dead_letter)
        return RedisGroupConsumer(
            url,
            mode=options.mode,
            group=options.group,
            reset=reset,
            live=live,
            client=client,
            options=options.group_options if isinstance(options.group_options, RedisGroupOptions) else None,
            on_dead_letter=on_dead_letter,
        )

    def open_producer(
        self, url: StreamUrl, *, client: ClientConfig, options: object | None, shards: int | None
    ) -> Producer:
        """See :meth:`stream_consumers.backend.Backend.open_producer`."""
        return RedisProducer(url, client, shards=shards)

    def open_batch_source(
        self, url: StreamUrl, *, mode: ConsumerMode, client: ClientConfig, membership: Membership | None
    ) -> BatchSource:
        """See :meth:`stream_consumers.backend.Backend.open_batch_source`."""
        return RedisBatchSource(url, client, mode=mode)

    def connect(self, url: StreamUrl, client: ClientConfig, options: object | None) -> object | None:
        """Check that the server answers.

        Raises:
            BrokerUnavailableError, AccessDeniedError: the server returned an error.
        """
        RedisConnection(url, client).check()
        return options

    def claims(self, url: StreamUrl, group: str, client: ClientConfig, names: EpochNameMap) -> RedisClaims:
        """See :meth:`stream_consumers.backend.Backend.claims`.

        Raises:
            BrokerUnavailableError, AccessDeniedError: the server returned an error.
        """
        return RedisClaims(url, group, client, names=names)

    def committer(
        self, url: StreamUrl, group: str, *, consumer: Consumer | None, client: ClientConfig
    ) -> RedisCommitter | RedisGroupConsumer:
        """See :meth:`stream_consumers.backend.Backend.committer`.

        Raises:
            InvalidOptionError: the consumer is a member of another group, or acknowledges automatically.
        """
        if not isinstance(consumer, RedisGroupConsumer):
            return RedisCommitter(url, group, client)
        if consumer.group != group:
            raise InvalidOptionError(
                f"{consumer} is not a member of group {group!r}", remedy=f"Give group={consumer.group!r}."
            )
        consumer.check_waits_for_ack()
        return consumer
