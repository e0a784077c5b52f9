"""Where Kafka's shards end, for the livelock watch: what can be read, and what was written."""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import IsolationLevel

from stream_consumers.client_config import ClientConfig
from stream_consumers.kafka.cluster import KafkaCluster
from stream_consumers.messages import Shard
from stream_consumers.tracking.livelock import ShardEnd
from stream_consumers.urls import StreamUrl


class KafkaEnds:
    """Asks the brokers when it is called.

    Args:
        url: the topics.
        client: any configuration of librdkafka; ``isolation.level`` as the consumer has it.
    """

    def __init__(self, url: StreamUrl, client: ClientConfig | None = None) -> None:
        self._cluster, self._streams = KafkaCluster(url, client), url.required_streams()

    def __call__(self) -> Mapping[Shard, ShardEnd]:
        """The ends now.

        Raises:
            StreamNotFoundError, BrokerUnavailableError, AccessDeniedError: as the broker says.
        """
        shards = [shard for topic in self._cluster.topics(self._streams).values() for shard in topic.shards]
        readable = self._cluster.ends(shards)
        written = self._cluster.ends(shards, IsolationLevel.READ_UNCOMMITTED)
        return {shard: ShardEnd(readable[shard], written[shard]) for shard in shards}
