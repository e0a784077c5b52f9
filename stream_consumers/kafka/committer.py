"""Keeps the positions of a tracked consumer in its Kafka group."""

from __future__ import annotations

from stream_consumers.capabilities import Positions
from stream_consumers.kafka.consumer import KafkaConsumer


class KafkaCommitter:
    """Keeps positions in the group of a consumer, as that member.

    Args:
        consumer: with a group (mode ``resumable`` or ``load_balanced``).

    Example::

        url = "kafka://localhost:9092/orders"
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
        """See :meth:`stream_consumers.committer.PositionCommitter.committed`."""
        return self._consumer.committed()
