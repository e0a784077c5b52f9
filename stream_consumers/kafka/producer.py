"""A producer for Kafka topics: sends in the background, and reports every failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Message as KafkaMessage
from confluent_kafka import Producer as ClientProducer

from stream_consumers.client_config import ClientConfig, Scalar
from stream_consumers.errors import (
    BrokerUnavailableError,
    InvalidOptionError,
    OutOfBoundsError,
    SizeLimitError,
    StreamAssetsError,
    StreamNotFoundError,
)
from stream_consumers.kafka.client import check_producer_options
from stream_consumers.kafka.cluster import KafkaBrokers
from stream_consumers.messages import Receipt, Shard
from stream_consumers.options import check_count, check_range, is_plain_text
from stream_consumers.producer import Producer, check_headers, check_payload, undelivered
from stream_consumers.urls import StreamUrl

FLUSH_SECONDS = 30.0
POLL_SECONDS = 0.1
DROP_SECONDS = 5.0
# How often a send polls for delivery reports: polling each time would cost as much as sending.
DELIVERY_POLL_SECONDS = 0.01
_DEFAULTS: dict[str, Scalar] = {"enable.idempotence": True}
_TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}
_PURGED = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}
_REFUSED = {KafkaError.INVALID_TIMESTAMP, KafkaError.INVALID_RECORD}
MessageHeaders = Sequence[tuple[str, "bytes | None"]]
_UNDELIVERED = "Send again the messages whose receipts have no sequence."
_ENDED = "The producer has ended. Send again, with another producer, the messages whose receipts have no sequence."


def produce(
    client: ClientProducer,
    shard: Shard,
    timestamp_ms: int,
    *,
    payload: bytes | None,
    key: bytes | None,
    headers: MessageHeaders,
    wait_for_room: Callable[[float], None],
    on_delivery: Callable[[KafkaError | None, KafkaMessage], None] | None = None,
) -> None:
    """Put a message into the client's queue.

    Args:
        client: the client.
        shard: the target.
        timestamp_ms: unix milliseconds, at least 1.
        payload: the bytes; ``None`` is a tombstone.
        key: the key of the message.
        headers: (name, value) pairs, kept in this order.
        wait_for_room: called while the queue is full, with the ``time.monotonic`` at which it became full; raises an
            error after its timeout.
        on_delivery: called when the message was delivered or failed.

    Raises:
        InvalidOptionError: the client would read the timestamp as "now", or a payload, key or header has a wrong type.
        KafkaException: the client refuses the message.
    """
    if timestamp_ms < 1:
        raise InvalidOptionError(
            f"Kafka's client cannot send timestamp_ms={timestamp_ms}, which means now", remedy="Use 1 or more."
        )
    value = None if payload is None else check_payload(payload)
    key = None if key is None else check_payload(key, option="key")
    pairs: list[tuple[str, str | bytes | None]] | None = [*check_headers(headers, may_be_none=True)] or None
    for name, _ in pairs or ():
        if not is_plain_text(name):
            raise InvalidOptionError(
                f"Kafka's client cannot send a header named {name!r}",
                remedy="Leave NUL and lone surrogates out of its name.",
            )
    full_since = 0.0
    while True:
        try:
            client.produce(
                shard.stream, value, key, shard.id, on_delivery=on_delivery, timestamp=timestamp_ms, headers=pairs
            )
            return
        except BufferError:
            full_since = full_since or time.monotonic()
            wait_for_room(full_since)


class KafkaProducer(Producer):
    """A producer of Kafka topics; see :class:`stream_consumers.producer.Producer`.

    A message is queued when :meth:`send` returns. If it cannot be delivered, the next call of send, :meth:`flush` or
    :meth:`close` raises the error, and so does the ``sequence`` of its own receipt. Retries of the client neither
    repeat nor reorder messages (``enable.idempotence``); a message stays queued until the client drops it after
    ``message.timeout.ms``, five minutes by default.

    Args:
        url: ``kafka://host:9092/orders``; ``send`` uses its first stream by default.
        client: any configuration of librdkafka, like ``linger.ms`` or ``compression.type``.
        shards: create a missing topic with this number of partitions; an existing topic does not change.
        flush_seconds: how long to wait for a broker that does not answer.

    Raises:
        StreamNotFoundError: a topic is missing, and ``shards`` was not given.
        InvalidOptionError: the client refuses a setting, or users may not change it.
        BrokerUnavailableError, AccessDeniedError, BrokerError: the broker does not answer, or refuses.

    Example::

        with KafkaProducer("kafka://localhost:9092/orders", {"linger.ms": 5}) as producer:
            receipt = producer.send(b"{}", key=b"customer-7")
            print(receipt.shard, receipt.sequence)
    """

    def __init__(
        self,
        url: str | StreamUrl,
        client: ClientConfig | None = None,
        *,
        shards: int | None = None,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        url = StreamUrl.parse(url)
        super().__init__(url)
        if shards is not None:
            check_count("shards", shards)
        check_range("flush_seconds", flush_seconds)
        check_producer_options(client or {})
        self._new_shards = shards
        self._patience = flush_seconds
        self._shards: set[Shard] = set()
        self._note_at = self._delivered_at = 0.0
        self._failed: list[tuple[KafkaError, Shard]] = []
        self._dropped: list[Shard] = []
        self._cluster = KafkaBrokers(url, client)
        for stream in url.required_streams():
            self._look_up(stream)
        self._client = self._cluster.producer(defaults=_DEFAULTS, fixed={})

    def __repr__(self) -> str:
        return f"KafkaProducer({str(self._url)!r})"

    def send(
        self,
        payload: bytes | None,
        *,
        stream: str | None = None,
        shard: int = 0,
        timestamp_ms: int | None = None,
        key: bytes | None = None,
        headers: MessageHeaders = (),
    ) -> Receipt:
        """See :meth:`stream_consumers.producer.Producer.send`.

        Args:
            payload: the bytes; ``None`` is a tombstone.
            stream: the topic; the first of the URL by default.
            shard: the partition.
            timestamp_ms: unix milliseconds; now by default.
            key: the key of the message; it does not choose the shard.
            headers: (name, value) pairs, kept in this order.

        Raises:
            StreamNotFoundError: the topic is missing, and ``shards`` was not given.
            OutOfBoundsError: the topic has no such partition.
            SizeLimitError: the message is larger than the client or the broker allows.
            BrokerUnavailableError: the queue is full, and the broker accepts no messages.
            StreamAssetsError: an earlier message was not delivered; this one was not sent.
        """
        with self._lock:
            target, moment = self._defaults(stream, shard, timestamp_ms)
            self._note_deliveries()
            if target not in self._shards:
                self._check_shard(target)
            return self._send(target, moment, payload, key, headers)

    def _flush(self) -> None:
        """Wait until the brokers have all sent messages.

        Raises:
            BrokerUnavailableError: no message was delivered for ``flush_seconds``; the error has the number of messages
                left. They stay in the queue: flush again.
            StreamAssetsError: the client has dropped messages; the error has their number for each shard. They are not
                queued again, because messages sent later may have arrived before them.
        """
        since = time.monotonic()
        while left := self._client.flush(POLL_SECONDS):
            self.check_progress(since, left, "Check the address and that the broker runs, then flush again.")
        self._raise_failures()

    def _end(self) -> None:
        try:
            self._flush()
        except StreamAssetsError as error:
            self._drop()
            if self._dropped:
                raise undelivered(error, self._dropped, remedy=_ENDED) from error
            raise
        finally:
            # The client's own close would wait forever for a broker that is away.
            self._client.purge()
            self._client.close()
            self._cluster.close()

    def _drop(self) -> None:
        """Empty the queue; the receipt of each dropped message then raises an error."""
        self._client.purge()
        until = time.monotonic() + DROP_SECONDS
        while len(self._client) and time.monotonic() < until:
            self.poll()

    def poll(self) -> None:
        """Record the messages that were delivered meanwhile, waiting a moment for the first one."""
        self._client.poll(POLL_SECONDS)

    def record(self, error: KafkaError | None, shard: Shard) -> None:
        """Record that a message was delivered, or failed."""
        self._delivered_at = time.monotonic()
        if error is not None and error.code() in _PURGED:
            self._dropped.append(shard)
        elif error is not None:
            self._failed.append((error, shard))

    def check_progress(self, since: float, left: int, remedy: str) -> None:
        """Raise an error if no message was delivered for ``flush_seconds``.

        Raises:
            BrokerUnavailableError: the error has the number of messages left.
        """
        if time.monotonic() - max(since, self._delivered_at) > self._patience:
            raise BrokerUnavailableError(
                f"no message was delivered to {self._url} for {self._patience:g} s: "
                f"{self._cluster.reason(KafkaError(KafkaError._TIMED_OUT)) or 'no answer'}",
                remedy=remedy,
                undelivered=left,
            )

    def explain(self, error: KafkaError, what: str, **facts: object) -> StreamAssetsError:
        """Map the error of a message that was not delivered to a :class:`StreamAssetsError`."""
        what = f"{what} of {self._url}"
        if error.code() in _TOO_LARGE:
            return SizeLimitError(
                f"{what} is too large: {self._cluster.said(error)}",
                remedy="Send smaller messages, or raise message.max.bytes here and at the topic.",
                **facts,
            )
        if error.code() in _REFUSED:
            return InvalidOptionError(
                f"{what} was refused: {self._cluster.said(error)}",
                remedy="Check its timestamp. In a compacted topic, it also needs a key.",
                **facts,
            )
        if error.code() == KafkaError._MSG_TIMED_OUT:
            return BrokerUnavailableError(
                f"{what} was not delivered: {self._cluster.said(error)}", remedy=_UNDELIVERED, **facts
            )
        known = self._cluster.explain(error, f"{what} was not delivered")
        return type(known)(known.what, remedy=_UNDELIVERED, **{**known.facts, **facts})

    def _note_deliveries(self) -> None:
        now = time.monotonic()
        if now >= self._note_at:
            self._note_at = now + DELIVERY_POLL_SECONDS
            self._client.poll(0)
        self._raise_failures()

    def _raise_failures(self) -> None:
        if not self._failed:
            return
        failed, self._failed = self._failed, []
        error, shard = failed[0]
        raise undelivered(self.explain(error, f"a message to {shard}"), (to for _, to in failed), remedy=_UNDELIVERED)

    def _send(
        self,
        shard: Shard,
        timestamp_ms: int,
        payload: bytes | None,
        key: bytes | None = None,
        headers: MessageHeaders = (),
    ) -> Receipt:
        delivery = DeliveryReport(self, shard)
        try:
            produce(
                self._client,
                shard,
                timestamp_ms,
                payload=payload,
                key=key,
                headers=headers,
                wait_for_room=self._wait_for_room,
                on_delivery=delivery,
            )
        except KafkaException as error:
            raise self.explain(error.args[0], f"a message to {shard}") from None
        return Receipt(shard, delivery.sequence, timestamp_ms)

    def _wait_for_room(self, since: float) -> None:
        self.poll()
        self.check_progress(since, len(self._client), "Check the brokers; this message was not sent.")

    def _check_shard(self, shard: Shard) -> None:
        """Refuse a shard that the topic lacks, after another look-up, because partitions may be new."""
        count = self._look_up(shard.stream)
        if shard not in self._shards:
            raise OutOfBoundsError(
                f"the topic {shard.stream!r} of {self._url} has no partition {shard.id}",
                remedy=f"Use 0 to {count - 1}, or add partitions.",
                partitions=count,
            )

    def _look_up(self, stream: str) -> int:
        """Return the number of partitions of a topic, which is created if it is missing and ``shards`` was given."""
        try:
            topic = self._cluster.topics([stream])[stream]
        except StreamNotFoundError as error:
            if self._new_shards is None:
                raise StreamNotFoundError(
                    error.what, remedy="Create the topic, or give the number of shards to create it with."
                ) from error
            topic = self._cluster.create_topic(stream, self._new_shards)
        self._shards.update(topic.shards)
        return topic.partitions


class DeliveryReport:
    """The delivery report of one message; the client calls it once the message was delivered or has failed."""

    __slots__ = ("_error", "_offset", "_producer", "shard")

    def __init__(self, producer: KafkaProducer, shard: Shard) -> None:
        self.shard = shard
        self._producer = producer
        self._offset: int | None = None
        self._error: KafkaError | None = None

    def __call__(self, error: KafkaError | None, message: KafkaMessage) -> None:
        """Record that the message was delivered, or failed."""
        if error is None:
            self._offset = message.offset()
        self._error = error
        self._producer.record(error, self.shard)

    def sequence(self) -> int:
        """Wait for the delivery of the message, and return its offset.

        Raises:
            StreamAssetsError: the message was not delivered.
        """
        since = time.monotonic()
        while self._offset is None and self._error is None:
            self._producer.poll()
            self._producer.check_progress(since, 1, "Check the address and that the broker runs, then flush.")
        if self._error is not None:
            raise self._producer.explain(self._error, f"a message to {self.shard}")
        return self._offset or 0
