"""Kafka transactions: commit sent messages atomically with the positions of the messages that they came from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from stream_consumers.client_config import ClientConfig
from stream_consumers.closing import ClosesOnExit
from stream_consumers.consumer import Positions
from stream_consumers.errors import (
    BrokerUnavailableError,
    InvalidOptionError,
    ProducerEndedError,
    ProducerFencedError,
    StreamAssetsError,
    TransactionAbortedError,
)
from stream_consumers.kafka.client import RETRY_SECONDS, check_producer_options, until_found
from stream_consumers.kafka.cluster import KafkaBrokers, places_of
from stream_consumers.kafka.consumer import KafkaConsumer
from stream_consumers.kafka.producer import MessageHeaders, produce
from stream_consumers.messages import Shard
from stream_consumers.options import check_count
from stream_consumers.producer import check_target, check_timestamp
from stream_consumers.urls import StreamUrl

ANSWER_SECONDS = 30.0
_FENCED = {
    KafkaError._FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
    KafkaError.TRANSACTION_COORDINATOR_FENCED,
}


class KafkaTransactions(ClosesOnExit):
    """Sends messages in transactions; also a :class:`stream_consumers.consumer.PositionCommitter`.

    As the committer of a tracked consumer, every commit ends a transaction and begins the next one: the messages that
    were sent since the last commit count together with the positions. Send the results of a message before its ``ack``,
    and commit between messages: results of an unfinished message would count, and be sent again after a crash.

    Args:
        url: the topics to send to, ``kafka://host:9092/results``.
        transactional_id: the id of this producer; the next producer with the same id fences this one out.
        consumer: the member of a group whose positions are committed.
        client: any configuration of librdkafka for the producer.
        timeout_seconds: how long to wait for an answer of the broker.

    Raises:
        ProducerFencedError: another producer uses this id now.
        BrokerUnavailableError, AccessDeniedError, BrokerError: the broker does not answer, or refuses.

    Example::

        with TrackedConsumer(member, transactions, options=options) as consumer:
            for _, message in consumer.getmany(timeout_seconds=1.0):
                transactions.send(priced(message.payload), stream="priced")
                consumer.ack(message)
            consumer.commit()
    """

    is_transactional = True

    def __init__(
        self,
        url: str | StreamUrl,
        transactional_id: str,
        consumer: KafkaConsumer,
        *,
        client: ClientConfig | None = None,
        timeout_seconds: float = ANSWER_SECONDS,
    ) -> None:
        url = StreamUrl.parse(url)
        if not transactional_id:
            raise InvalidOptionError("transactional_id must not be empty", remedy="Give each instance its own id.")
        check_producer_options(client or {})
        self._id, self._consumer, self._timeout = transactional_id, consumer, timeout_seconds
        self._stream = url.required_streams()[0]
        self._cluster = KafkaBrokers(url, client)
        self._lock = threading.RLock()
        self._is_open = self._is_ended = False
        self._aborted: TransactionAbortedError | None = None
        self._producer = self._cluster.producer(defaults={}, fixed={"transactional.id": transactional_id})
        self._ask("starting", self._producer.init_transactions)

    def __repr__(self) -> str:
        return f"KafkaTransactions({self._id!r})"

    @property
    def is_open(self) -> bool:
        """Whether a transaction was begun and has not ended."""
        return self._is_open

    def begin(self) -> None:
        """Begin a transaction unless one is open.

        Raises:
            ProducerEndedError: after :meth:`close`.
            TransactionAbortedError: a transaction was aborted, and the consumer is still after the committed positions.
            ProducerFencedError: another producer uses this id now.
        """
        with self._lock:
            self._check_usable()
            if not self._is_open:
                try:
                    self._producer.begin_transaction()
                except KafkaException as error:
                    raise self._explain(error.args[0], "beginning") from None
                self._is_open = True

    def send(
        self,
        payload: bytes | None,
        *,
        stream: str | None = None,
        shard: int = 0,
        timestamp_ms: int | None = None,
        key: bytes | None = None,
        headers: MessageHeaders = (),
    ) -> None:
        """Send a message that counts when the transaction does.

        The arguments are those of :meth:`stream_consumers.kafka.producer.KafkaProducer.send`.

        Raises:
            InvalidOptionError: no transaction was begun.
            ProducerFencedError: another producer uses this id now.
            BrokerUnavailableError: the queue is full, and the broker accepts no messages.
        """
        with self._lock:
            self._check_open()
            check_count("shard", shard, at_least=0)
            target = Shard(self._stream if stream is None else check_target(self._cluster.url, stream), shard)
            moment = check_timestamp(timestamp_ms)
            try:
                produce(
                    self._producer,
                    target,
                    moment,
                    payload=payload,
                    key=key,
                    headers=headers,
                    wait_for_room=self._wait_for_room,
                )
            except KafkaException as error:
                raise self._failed(error.args[0], "sending") from None

    def _wait_for_room(self, since: float) -> None:
        if time.monotonic() - since >= self._timeout:
            raise BrokerUnavailableError(
                f"the queue of producer {self._id!r} is full, and the broker accepts no messages",
                remedy="Check the broker; abort the transaction, and continue from the committed positions.",
            )
        self._producer.poll(RETRY_SECONDS)

    def commit_and_end_transactions(self, positions: Positions) -> None:
        """End the transaction: its messages and these positions count from now on, together.

        Args:
            positions: the next sequence to read, per shard of the consumer.

        Raises:
            InvalidOptionError: no transaction was begun.
            TransactionAbortedError: neither counts; continue from the committed positions.
            ProducerFencedError: another producer uses this id now; neither counts.
            BrokerUnavailableError: it is unknown whether they count; call it again.
        """
        with self._lock:
            self._check_open()
            places = places_of(positions)
            if places:
                member = self._consumer.group_metadata()
                self._ask(
                    "sending positions", lambda wait: self._producer.send_offsets_to_transaction(places, member, wait)
                )
            self._ask("committing", self._producer.commit_transaction)
            self._is_open = False

    def abort(self) -> None:
        """Abort the transaction if one is open: its messages do not count.

        The messages that they came from must be read again: call ``seek_to_committed`` of the tracked consumer.

        Raises:
            ProducerFencedError: another producer uses this id now.
            BrokerUnavailableError: call it again.
        """
        with self._lock:
            if self._is_open:
                self._ask("aborting", self._producer.abort_transaction)
                self._is_open = False
                self._aborted = self._new_aborted("abort was called")

    def commit(self, positions: Positions, *, start_new_transaction: bool = True) -> None:
        """Commit the transaction with these positions, and begin the next one.

        Args:
            positions: the next sequence to read, per shard of the consumer.
            start_new_transaction: without it, the next one begins with :meth:`begin`, or the next commit.

        Raises:
            TransactionAbortedError: also after :meth:`abort`, until :meth:`committed` is called.
        """
        with self._lock:
            self.begin()
            self.commit_and_end_transactions(positions)
            if start_new_transaction:
                self.begin()

    def committed(self) -> Positions:
        """Return the committed positions, from which the caller must continue."""
        positions = self._consumer.committed()
        self._aborted = None
        return positions

    def close(self) -> None:
        """Abort an open transaction, and close the producer.

        Raises:
            StreamAssetsError: the abort failed; the broker aborts the transaction after its own timeout.
        """
        with self._lock:
            if self._is_ended:
                return
            try:
                self.abort()
            finally:
                self._is_ended = True
                self._cluster.close()
                # A client that was fenced out raises that error for each call.
                with suppress(KafkaException):
                    self._producer.purge()
                    self._producer.close()

    def _check_usable(self) -> None:
        if self._is_ended:
            raise ProducerEndedError(f"the producer {self._id!r} has ended", remedy="Create a new one.")
        if self._aborted is not None:
            raise self._aborted

    def _check_open(self) -> None:
        self._check_usable()
        if not self._is_open:
            raise InvalidOptionError(f"producer {self._id!r} has no open transaction", remedy="Call begin first.")

    def _ask(self, what: str, request: Callable[[float], Any]) -> None:
        """Send a request that may be repeated, and retry it until the coordinator answers."""
        try:
            until_found(request, seconds=self._timeout)
        except KafkaException as error:
            raise self._failed(error.args[0], what) from None

    def _failed(self, error: KafkaError, what: str) -> StreamAssetsError:
        """Return the error to raise; if the transaction is lost, it is aborted at once."""
        if not error.txn_requires_abort():
            return self._explain(error, what)
        try:
            self._producer.abort_transaction(self._timeout)
        except KafkaException as raised:
            return self._explain(raised.args[0], "aborting")
        self._is_open = False
        self._aborted = self._new_aborted(f"{what}: {self._cluster.said(error)}")
        return self._aborted

    def _new_aborted(self, reason: str) -> TransactionAbortedError:
        return TransactionAbortedError(
            f"a transaction of {self._id!r} was aborted: {reason}",
            remedy="Call seek_to_committed, then begin: this reads the messages that it came from again.",
        )

    def _explain(self, error: KafkaError, what: str) -> StreamAssetsError:
        if error.code() in _FENCED:
            self._is_open = False
            return ProducerFencedError(
                f"another producer uses the transactional id {self._id!r}",
                remedy="Give each instance its own id, or stop this one: the other producer has taken over.",
                error=error.name(),
            )
        return self._cluster.explain(error, f"{what} transaction {self._id!r}")
