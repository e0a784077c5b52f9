"""``kafka://``: Kafka topics as a backend."""

from __future__ import annotations

from collections.abc import Collection

from stream_consumers.backend import Backend, ConsumerOptions
from stream_consumers.batches import BatchSource, Membership
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Consumer
from stream_consumers.errors import GroupsNotRememberedError
from stream_consumers.kafka.batches import KafkaBatchSource
from stream_consumers.kafka.client import check_client_options, producer_options
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.kafka.consumer import CONSUMER_MODES, KafkaConsumer
from stream_consumers.kafka.membership import KafkaMembership
from stream_consumers.kafka.producer import KafkaProducer
from stream_consumers.options import ConsumerMode, Modes
from stream_consumers.producer import Producer
from stream_consumers.urls import StreamUrl


class KafkaStreams(Backend):
    """Kafka topics."""

    consumer_modes = CONSUMER_MODES
    batch_modes = Modes(
        of="batches of Kafka", available=CONSUMER_MODES.available, host_groups=CONSUMER_MODES.host_groups
    )
    creates_shards = True
    answers_for_many = True
    kind = "kafka"

    def check(self, url: StreamUrl, client: ClientConfig) -> None:
        """See :meth:`stream_consumers.backend.Backend.check`."""
        url.check_servers()
        check_client_options(client)

    def streams(self, url: StreamUrl, client: ClientConfig) -> Collection[str]:
        """See :meth:`stream_consumers.backend.Backend.streams`.

        Raises:
            BrokerUnavailableError, AccessDeniedError, BrokerError: the broker does not answer, or refuses.
        """
        with KafkaBrokers(url, client) as cluster:
            return cluster.topic_names()

    def producer_client_config(self, client: ClientConfig) -> ClientConfig:
        """See :meth:`stream_consumers.backend.Backend.producer_client_config`; drops consumer settings."""
        return producer_options(client)

    def open_consumer(self, url: StreamUrl, options: ConsumerOptions) -> Consumer:
        """See :meth:`stream_consumers.backend.Backend.open_consumer`."""
        return KafkaConsumer(
            url,
            mode=options.mode,
            group=options.group,
            reset=options.reset,
            live=options.live,
            client=options.client,
            on_dead_letter=options.on_dead_letter,
        )

    def open_producer(
        self, url: StreamUrl, *, client: ClientConfig, options: object | None, shards: int | None
    ) -> Producer:
        """See :meth:`stream_consumers.backend.Backend.open_producer`."""
        return KafkaProducer(url, client, shards=shards)

    def open_batch_source(
        self, url: StreamUrl, *, mode: ConsumerMode, client: ClientConfig, membership: Membership | None
    ) -> BatchSource:
        """See :meth:`stream_consumers.backend.Backend.open_batch_source`."""
        return KafkaBatchSource(url, client, mode=mode, membership=membership)

    def connect(self, url: StreamUrl, client: ClientConfig, options: object | None) -> object | None:
        """Check that the brokers answer.

        Raises:
            BrokerUnavailableError, AccessDeniedError, BrokerError: the broker does not answer, or refuses.
        """
        with KafkaBrokers(url, client) as cluster:
            cluster.check()
        return options

    def join(self, url: StreamUrl, group: str, client: ClientConfig) -> Membership:
        """See :meth:`stream_consumers.backend.Backend.join`.

        Raises:
            StreamNotFoundError, BrokerUnavailableError, AccessDeniedError: the broker does not answer, or refuses.
        """
        return KafkaMembership(url, group, client)

    def committer(
        self, url: StreamUrl, group: str, *, consumer: Consumer | None, client: ClientConfig
    ) -> KafkaConsumer:
        """See :meth:`stream_consumers.backend.Backend.committer`."""
        if not isinstance(consumer, KafkaConsumer):
            raise GroupsNotRememberedError(
                f"only a member of group {group!r} can set its positions in {url}",
                remedy="Pass the KafkaConsumer that reads the stream.",
                group=group,
            )
        return consumer
