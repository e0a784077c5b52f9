"""What a group has committed, asked for by a consumer that is no member of it.

An admin client could be asked, too, but librdkafka ends the process with a null pointer when the coordinator of the
group moves or is still loading (librdkafka issue 5040).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from stream_consumers.kafka.errors import RETRY_SECONDS, until_found


class GroupPositions:
    """The positions of one group.

    Args:
        settings: of the client; those that only members of a group know are none of them.
        group: its name.

    Raises:
        KafkaException: the client refuses its options.
    """

    def __init__(self, settings: Mapping[str, Any], group: str, **options: Any) -> None:
        own = {
            "group.id": group,
            "enable.auto.commit": False,
            # What is committed counts, whether or not a transaction is about to commit more.
            "isolation.level": "read_uncommitted",
        }
        self._consumer = Consumer({**settings, **own}, **options)

    def read(self, places: Sequence[TopicPartition], *, timeout: float) -> list[TopicPartition]:
        """The same with their offsets, negative where nothing is committed, and metadata.

        Raises:
            KafkaException: there is no answer within ``timeout`` seconds, or it is an error.
        """
        deadline = time.monotonic() + timeout

        def ask() -> list[TopicPartition]:
            return self._consumer.committed(list(places), max(RETRY_SECONDS, deadline - time.monotonic()))

        try:
            return until_found(ask, seconds=timeout)
        except KafkaException:
            # Only so it tells what it knows of its connections.
            self._consumer.poll(0)
            raise
