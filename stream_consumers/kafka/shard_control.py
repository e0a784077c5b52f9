"""What a Kafka consumer tells of its shards, and how single ones are paused and moved."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from stream_consumers.capabilities import Positions, ShardObserver
from stream_consumers.consumer_base import check_read
from stream_consumers.errors import InvalidOptionError
from stream_consumers.kafka.cluster import KafkaCluster
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode


class KafkaShardControl(ABC):
    """The part of :class:`stream_consumers.kafka.consumer.KafkaConsumer` that is about single shards."""

    _consumer: Consumer
    _cluster: KafkaCluster
    _lock: threading.RLock
    _group: str | None
    _mode: ConsumerMode
    _known: frozenset[Shard]
    _given: frozenset[Shard]
    _unreached: set[Shard]
    _reached: dict[Shard, int]
    # Where reading was begun; what the client tells is how far it came from there.
    _begun: dict[Shard, int]
    _observer: ShardObserver | None = None

    def observe(self, observer: ShardObserver) -> None:
        """Tell ``observer`` of the shards that the group gives and takes (mode ``load_balanced``)."""
        with self._lock:
            self._observer = observer
            if self._given:
                observer.on_assigned(self._given)

    def committed(self) -> Positions:
        """What the group has committed; shards without a position are left out.

        In mode ``load_balanced`` it is asked for the shards of this member only.

        Raises:
            InvalidOptionError: mode ``real_time`` has no group.
            BrokerUnavailableError, AccessDeniedError: as the broker says.
        """
        if self._group is None:
            raise InvalidOptionError("mode real_time has no group that commits", remedy="Use mode resumable.")
        is_member = self._mode is ConsumerMode.LOAD_BALANCED
        return self._cluster.committed(self._group, self._given if is_member else self._known)

    def group_metadata(self) -> Any:
        """Who this member is, for a transaction that takes the group's positions along."""
        return self._consumer.consumer_group_metadata()

    def reached_ends(self) -> Positions:
        """The end of each shard that was read to its end: behind markers, which are no messages."""
        with self._lock:
            return dict(self._reached)

    def go_to(self, positions: Positions) -> None:
        """Continue at these sequences; other shards go on where they are.

        Raises:
            NotSubscribedError: a shard is not read by this consumer.
        """
        with self._lock:
            check_read(positions, self._given)
            others = {shard: self._here(shard) for shard in self._given - frozenset(positions)}
            self._unreached -= frozenset(positions)
            self._go_to({**others, **positions})

    def pause(self, shards: Iterable[Shard]) -> None:
        """Fetch nothing of these shards until :meth:`resume`; a seek or a change of owner ends it, too."""
        with self._lock:
            self._consumer.pause([TopicPartition(s.stream, s.id) for s in sorted(shards) if s in self._given])

    def resume(self, shards: Iterable[Shard]) -> None:
        """Go on with these shards; nothing was lost meanwhile."""
        with self._lock:
            self._consumer.resume([TopicPartition(s.stream, s.id) for s in sorted(shards) if s in self._given])

    @abstractmethod
    def _go_to(self, positions: Positions) -> None: ...

    def _here(self, shard: Shard) -> int:
        (place,) = self._consumer.position([TopicPartition(shard.stream, shard.id)])
        return int(place.offset) if place.offset >= 0 else self._begun[shard]
