"""Membership of a Kafka consumer group without reading: the group assigns shards here, and executors read them.

The group protocol requires a consumer that polls. A background thread polls with every partition paused, so that the
member stays alive even if a batch takes long to write.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from stream_consumers.batches import Membership
from stream_consumers.client_config import ClientConfig
from stream_consumers.errors import BrokerUnavailableError, StreamAssetsError
from stream_consumers.kafka.cluster import KafkaBrokers, shards_of
from stream_consumers.messages import Shard
from stream_consumers.urls import StreamUrl

POLL_SECONDS = 0.02
COMMIT_SECONDS = 60.0
LEAVE_SECONDS = 10.0
# The leader of a group assigns a new partition when it detects it; by default it checks every five minutes.
METADATA_MS = 5000
_REFRESH = "topic.metadata.refresh.interval.ms"
_log = logging.getLogger(__name__)
# Errors of reading, which a member does not do.
_READ_ERRORS = {KafkaError._AUTO_OFFSET_RESET, KafkaError._PARTITION_EOF, KafkaError.OFFSET_OUT_OF_RANGE}

# The positions to commit, their metadata, and the future of the answer.
_Request = tuple[Mapping[Shard, int], str, "Future[KafkaError | None]"]


class KafkaMembership(Membership):
    """A member of a consumer group; see :class:`stream_consumers.batches.Membership`.

    Args:
        url: the topics to share.
        group: the consumer group.
        client: any configuration of librdkafka, ``partition.assignment.strategy`` and ``session.timeout.ms`` included.

    Raises:
        StreamNotFoundError: a topic does not exist.
        BrokerUnavailableError, AccessDeniedError: the broker does not answer, or refuses.
    """

    def __init__(self, url: str | StreamUrl, group: str, client: ClientConfig | None = None) -> None:
        url = StreamUrl.parse(url)
        self._group = group
        self._cluster = KafkaBrokers(url, client)
        self._cluster.topics(url.required_streams())
        self._changed = threading.Condition()
        self._shards: frozenset[Shard] = frozenset()
        self._assignments = 0
        self._to_pause: list[TopicPartition] = []
        self._error: StreamAssetsError | None = None
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()

        self._closing = threading.Event()
        own = {} if _REFRESH in self._cluster.settings else {_REFRESH.replace(".", "_"): METADATA_MS}
        self._consumer: Consumer = self._cluster.consumer(group=group, **own)
        self._consumer.subscribe(
            list(url.required_streams()), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_revoke
        )
        self._thread = threading.Thread(target=self._poll_until_closed, name=f"member of {group}", daemon=True)
        self._thread.start()

    def shards(self) -> frozenset[Shard]:
        """See :meth:`stream_consumers.batches.Membership.shards`."""
        with self._changed:
            if self._error is not None:
                raise self._error
            return self._shards

    def wait(self, seconds: float) -> bool:
        """See :meth:`stream_consumers.batches.Membership.wait`."""
        with self._changed:
            self._changed.wait_for(lambda: self._assignments or self._error, seconds)
            if self._error is not None:
                raise self._error
            return self._assignments > 0

    def commit(self, positions: Mapping[Shard, int], *, metadata: str = "") -> bool:
        """See :meth:`stream_consumers.batches.Membership.commit`."""
        if not positions:
            return True
        answer: Future[KafkaError | None] = Future()
        self._requests.put((positions, metadata, answer))
        if self._closing.is_set():
            self._answer_requests()
        try:
            refusal = answer.result(COMMIT_SECONDS)
        except FutureTimeoutError as error:
            raise BrokerUnavailableError(
                f"group {self._group!r} did not answer a commit within {COMMIT_SECONDS:g} s",
                remedy="Check the brokers. The rows stay in the table once, and the next run sets the positions.",
            ) from error
        if refusal is not None:
            _log.info("group %s refused a commit (%s): another member continues", self._group, refusal.name())
        return refusal is None

    def close(self) -> None:
        """See :meth:`stream_consumers.batches.Membership.close`."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(LEAVE_SECONDS)
            if self._thread.is_alive():
                # The thread waits for a broker; the group drops this member at its session timeout.
                _log.warning("group %s: the broker does not answer; left without notice", self._group)
                return
            self._answer_requests()
            self._consumer.close()
            self._cluster.close()

    def _poll_until_closed(self) -> None:
        while not self._closing.is_set():
            try:
                self._answer_requests()
                message = self._consumer.poll(POLL_SECONDS)
                if self._to_pause:
                    self._consumer.pause(self._to_pause)
                    self._to_pause = []
            except KafkaException as error:
                self._fail(error.args[0])
                continue
            problem = message.error() if message is not None else None
            if problem is not None and problem.code() not in _READ_ERRORS:
                self._fail(problem)

    def _answer_requests(self) -> None:
        """Commit for other threads, because only the client's own thread can commit without waiting for itself."""
        while True:
            try:
                positions, metadata, answer = self._requests.get_nowait()
            except queue.Empty:
                return
            try:
                commit = self._cluster.commit_as_member
                answer.set_result(commit(self._consumer, self._group, positions, metadata=metadata))
            except StreamAssetsError as error:
                answer.set_exception(error)

    def _fail(self, error: KafkaError) -> None:
        if error.code() == KafkaError._MAX_POLL_EXCEEDED or error.retriable():
            return
        with self._changed:
            self._error = self._cluster.explain(error, f"group {self._group!r}")
            self._changed.notify_all()
        time.sleep(POLL_SECONDS)

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # The client assigns the partitions when this returns; they are paused right after.
        self._to_pause += partitions
        with self._changed:
            self._assignments += 1
            self._shards |= shards_of(partitions)
            self._changed.notify_all()
        _log.info("group %s: assigned %s", self._group, sorted(map(str, shards_of(partitions))))

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        with self._changed:
            self._shards -= shards_of(partitions)
            self._changed.notify_all()
        _log.info("group %s: revoked %s", self._group, sorted(map(str, shards_of(partitions))))
