"""SeaStreamer's ``Streamer`` and sharders: connect once, create consumers and producers, disconnect."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from typing import Protocol
from weakref import WeakSet

from stream_consumers.backend import find_backend
from stream_consumers.client_config import ClientConfig
from stream_consumers.closing import ClosesOnExit
from stream_consumers.consumer import Consumer, DeadLetterObserver, log_dead_letter
from stream_consumers.create import check_options, create_consumer, create_producer
from stream_consumers.errors import InvalidOptionError, ProducerEndedError, StreamEndedError
from stream_consumers.messages import WILDCARD, Receipt, from_milliseconds, to_milliseconds
from stream_consumers.options import AutoStreamReset, ConsumerMode, check_count
from stream_consumers.producer import Producer, check_payload, check_target
from stream_consumers.urls import StreamUrl


class Sharder(Protocol):
    """Chooses the shard of a message; must be thread-safe.

    Example:
        >>> from stream_consumers.streamer import connect
        >>> with connect("memory://sharded/orders") as streamer:
        ...     producer = streamer.create_producer(sharder=RoundRobin(2))
        ...     [producer.send(b"{}").shard.id for _ in range(3)]
        [0, 1, 0]
    """

    @property
    def shards(self) -> int:
        """The number of shards to choose from."""
        ...

    def choose(self, stream: str, payload: bytes) -> int:
        """Return the shard of this message, from 0 to ``shards - 1``."""
        ...


class RoundRobin:
    """Chooses the shards in turn, regardless of the stream.

    Args:
        shards: the number of shards; at least 1.

    Raises:
        InvalidOptionError: ``shards`` is less than 1.

    Example:
        >>> sharder = RoundRobin(2)
        >>> [sharder.choose("orders", b"{}") for _ in range(3)]
        [0, 1, 0]
    """

    def __init__(self, shards: int) -> None:
        self.shards = check_count("shards", shards)
        self._turns = itertools.count()

    def choose(self, stream: str, payload: bytes) -> int:
        """See :meth:`Sharder.choose`."""
        return next(self._turns) % self.shards


class PseudoRandom:
    """Chooses shards at random, with equal probability.

    SeaStreamer derives the shard from the current millisecond, so that all messages of a millisecond go to one shard;
    this class does not.

    Args:
        shards: the number of shards; at least 1.
        seed: makes the choices reproducible; by default they differ each time.

    Raises:
        InvalidOptionError: ``shards`` is less than 1.

    Example:
        >>> sharder = PseudoRandom(3, seed=7)
        >>> {sharder.choose("orders", b"{}") for _ in range(100)}
        {0, 1, 2}
    """

    def __init__(self, shards: int, *, seed: int | None = None) -> None:
        self.shards = check_count("shards", shards)
        # The choice need not be unpredictable.
        self._random = random.Random(seed)  # noqa: S311

    def choose(self, stream: str, payload: bytes) -> int:
        """See :meth:`Sharder.choose`."""
        return self._random.randrange(self.shards)


class StreamerProducer(ClosesOnExit):
    """A producer of a :class:`Streamer`; see :class:`stream_consumers.producer.Producer`.

    Args:
        streamer: the streamer that created the producer.
        stream: the anchor: the default stream of messages.
        sharder: chooses the shard of messages that are sent without one.
        shards: the number of shards of a stream that must be created.

    Example:
        >>> with connect("memory://anchored/") as streamer:
        ...     producer = streamer.create_producer()
        ...     producer.anchor("orders")
        ...     producer.send(b"{}").shard
        Shard(stream='orders', id=0)
    """

    def __init__(self, streamer: Streamer, stream: str | None, *, sharder: Sharder | None, shards: int | None) -> None:
        self._streamer, self._sharder, self._shards = streamer, sharder, shards
        self._stream: str | None = None
        self._writer: Producer | None = None
        self._lock = threading.RLock()
        self._ended = False
        if stream is not None:
            self.anchor(stream)

    @property
    def stream(self) -> str | None:
        """The anchor: the default stream."""
        return self._stream

    @property
    def is_ended(self) -> bool:
        """Whether the producer was ended or closed."""
        return self._ended

    def anchor(self, stream: str) -> None:
        """Set the default stream of messages; this is possible only once.

        Raises:
            InvalidOptionError: the producer already has an anchor.
            InvalidStreamKeyError: ``stream`` is not a stream key.
            StreamNotFoundError: the backend does not find the stream.
        """
        with self._lock:
            if self._stream is not None:
                raise InvalidOptionError(
                    f"the producer is already anchored to {self._stream!r}", remedy="Pass the stream to send()."
                )
            key = check_target(self._streamer.url, stream)
            self._opened(key)
            self._stream = key

    def send(
        self, payload: bytes, *, stream: str | None = None, shard: int | None = None, timestamp_ms: int | None = None
    ) -> Receipt:
        """See :meth:`stream_consumers.producer.Producer.send`.

        Args:
            payload: the bytes.
            stream: the stream key; the anchor by default.
            shard: the shard id; by default the sharder's choice, or 0 without a sharder.
            timestamp_ms: the timestamp in Unix milliseconds; now by default.

        Raises:
            InvalidOptionError: the producer has no anchor, and no stream is given.
            ProducerEndedError: the producer has ended, or the streamer was disconnected.
        """
        with self._lock:
            target = self._stream if stream is None else check_target(self._streamer.url, stream)
            if target is None:
                raise InvalidOptionError("the message has no stream", remedy="Pass one, or anchor the producer.")
            writer, data = self._opened(target), check_payload(payload)
            if shard is None:
                shard = 0 if self._sharder is None else self._sharder.choose(target, data)
            return writer.send(data, stream=target, shard=shard, timestamp_ms=timestamp_ms)

    def flush(self) -> None:
        """Wait until the backend has acknowledged all messages."""
        with self._lock:
            self._check_not_ended()
            if self._writer is not None:
                self._writer.flush()

    def end(self) -> None:
        """Flush and end; a file gets an end-of-stream message if its options request one.

        No producer of this streamer can write to the file afterwards: connect again to append.
        """
        with self._lock:
            self._ended = True
            if self._writer is not None:
                self._writer.close()

    def close(self) -> None:
        """Flush and end; other producers of the same file can continue."""
        with self._lock:
            if not self._streamer.has_one_writer:
                self.end()
            elif not self._ended:
                self.flush()
                self._ended = True

    def _check_not_ended(self) -> None:
        if self._ended:
            raise ProducerEndedError("the producer has ended", remedy="Create a new one.")

    def _opened(self, stream: str) -> Producer:
        self._check_not_ended()
        if self._writer is None:
            self._writer = self._streamer.open_writer(stream, self._shards)
        return self._writer


class Streamer:
    """A connection to a file, a broker or memory, created by :func:`connect`; a context manager that disconnects.

    Args:
        url: the location; its streams are the default streams.
        client: configuration of the broker's client.
        producer_options: the options of its producers, of the backend's own type.

    Example:
        >>> with connect("memory://fruit/") as streamer:
        ...     with streamer.create_producer() as producer:
        ...         receipts = [producer.send(b"%d" % n, stream=name) for n, name in enumerate(["apples", "pears"])]
        ...     [message.text() for message in streamer.create_consumer("*", live=False)]
        ['0', '1']
    """

    def __init__(
        self,
        url: str | StreamUrl,
        *,
        client: ClientConfig | None = None,
        producer_options: object | None = None,
    ) -> None:
        url = StreamUrl.parse(url)
        self._url, self._client, self._producer_options = url, client, producer_options
        self._backend = find_backend(url.protocol)
        self._lock = threading.RLock()
        self._consumers: WeakSet[Consumer] = WeakSet()
        # Strong references: disconnecting also flushes messages of producers that were dropped.
        self._producers: list[StreamerProducer] = []
        self._writer: Producer | None = None
        self._is_connected = True

    def __repr__(self) -> str:
        return f"Streamer({str(self._url)!r})"

    @property
    def url(self) -> StreamUrl:
        """The URL of the connection."""
        return self._url

    def create_consumer(
        self,
        streams: str | Sequence[str] | None = None,
        *,
        mode: ConsumerMode | str = ConsumerMode.REAL_TIME,
        group: str | None = None,
        reset: AutoStreamReset = AutoStreamReset.EARLIEST,
        live: bool = True,
        group_options: object | None = None,
        on_dead_letter: DeadLetterObserver = log_dead_letter,
    ) -> Consumer:
        """Create a consumer, see :func:`stream_consumers.create.create_consumer`; disconnecting closes it.

        Args:
            streams: the streams to read; by default those of the URL. ``*`` stands for all streams.
            mode: how the consumer shares the stream and stores positions.
            group: the consumer group.
            reset: where to start without a position. SeaStreamer's default is the latest.
            live: wait for more messages at the end; without it, reading ends there.
            group_options: options of a group member, of the backend's own type.
            on_dead_letter: called with each part of the stream that cannot be read as a message.

        Raises:
            StreamEndedError: the streamer was disconnected.
        """
        with self._lock:
            if not self._is_connected:
                raise StreamEndedError(f"{self._url} was disconnected", remedy="Connect again.")
            consumer = create_consumer(
                self._url_of(streams),
                mode=mode,
                group=group,
                reset=reset,
                live=live,
                client=self._client,
                group_options=group_options,
                on_dead_letter=on_dead_letter,
            )
            self._consumers.add(consumer)
            return consumer

    def create_producer(
        self, stream: str | None = None, *, sharder: Sharder | None = None, shards: int | None = None
    ) -> StreamerProducer:
        """Create a producer; disconnecting ends it. Producers of one file share a writer, in the order of their sends.

        Args:
            stream: the anchor: the default stream of messages; by default the only stream of the URL.
            sharder: chooses the shard of messages that are sent without one.
            shards: the number of shards of a stream that must be created (Kafka, Redis); on Redis, the default is the
                sharder's number.

        Raises:
            ProducerEndedError: the streamer was disconnected.
            ProducerBusyError: a producer of another streamer has the file open.
        """
        if shards is None and sharder is not None and self._backend.takes_shard_count_of_sharder:
            shards = sharder.shards
        if stream is None and len(self._url.streams) == 1 and WILDCARD not in self._url.streams:
            stream = self._url.streams[0]
        with self._lock:
            self._check_connected()
            producer = StreamerProducer(self, stream, sharder=sharder, shards=shards)
            self._producers = [*(known for known in self._producers if not known.is_ended), producer]
            return producer

    @property
    def has_one_writer(self) -> bool:
        """Whether all producers share one writer, so that closing one of them leaves it open."""
        return self._backend.has_one_writer

    def open_writer(self, stream: str, shards: int | None) -> Producer:
        """Return the writer of a producer, or the shared writer of all producers.

        Args:
            stream: the stream of the first message.
            shards: see :meth:`create_producer`.

        Raises:
            ProducerEndedError: the streamer was disconnected.
        """
        if not self.has_one_writer:
            return self._open_writer(stream, shards)
        with self._lock:
            self._check_connected()
            if self._writer is None:
                self._writer = self._open_writer(stream, None)
            return self._writer

    def disconnect(self) -> None:
        """Flush and end the producers, and close the consumers; a second call does nothing.

        Raises:
            StreamAssetsError: the backend raised an error; everything is closed nevertheless.
        """
        with self._lock:
            self._is_connected = False
            consumers, producers, writer = list(self._consumers), list(self._producers), self._writer
        # Do not hold the lock: a producer that is opening its writer holds its own lock and waits for this one.
        with ExitStack() as stack:
            for consumer in consumers:
                stack.callback(consumer.close)
            if writer is not None:
                stack.callback(writer.close)
            for producer in producers:
                stack.callback(producer.end)

    def __enter__(self) -> Streamer:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def _check_connected(self) -> None:
        if not self._is_connected:
            raise ProducerEndedError(f"{self._url} was disconnected", remedy="Connect again.")

    def _open_writer(self, stream: str, shards: int | None) -> Producer:
        return create_producer(
            self._url_of(stream),
            client=self._backend.producer_client_config(self._client or {}),
            producer_options=self._producer_options,
            shards=shards,
        )

    def _url_of(self, streams: str | Sequence[str] | None) -> StreamUrl:
        return self._url if streams is None else self._url.with_streams(streams)


def connect(
    url: str | StreamUrl,
    *,
    client: ClientConfig | None = None,
    producer_options: object | None = None,
) -> Streamer:
    """Connect to the location of a URL (SeaStreamer's ``Streamer::connect``); disconnect when done.

    Args:
        url: ``redis://host:6379/``, ``kafka://host:9092/``, ``file://path/to/orders.ss/``, ``memory://name/``; streams
            after the last slash are the default streams.
        client: configuration of the broker's client.
        producer_options: ``FileProducerOptions`` for a file: without them, the file must exist; with them, ``creation``
            decides. ``StdioProducerOptions`` for lines on stdout: with ``loopback``, consumers of this process get the
            sent messages.

    Raises:
        InvalidUrlError: the protocol is unknown.
        BrokerUnavailableError, AccessDeniedError: the broker, which is contacted immediately, returned an error.
        StreamNotFoundError, StreamExistsError, FormatError: the file is not in the state that ``creation`` requires.

    Example:
        >>> with connect("memory://market/") as streamer:
        ...     with streamer.create_producer("fruit") as producer:
        ...         receipt = producer.send(b"apple")
        ...     streamer.create_consumer("fruit").next().text()
        'apple'
    """
    parsed = StreamUrl.parse(url)
    backend = find_backend(parsed.protocol)
    check_options("producer_options", producer_options, backend.producer_options, parsed)
    backend.check(parsed, client or {})
    options = backend.connect(parsed, client or {}, producer_options)
    return Streamer(parsed, client=client, producer_options=options)


def rewind_after(consumer: Consumer, sequence: int) -> None:
    """Continue after a sequence (SeaStreamer's rewind on Redis); :meth:`Consumer.rewind` continues at it.

    Args:
        consumer: the consumer to move.
        sequence: the last sequence that is not delivered again.

    Raises:
        OutOfBoundsError: the stream has no later message yet; the position does not change.

    Example:
        >>> with connect("memory://numbers/digits") as streamer:
        ...     producer, consumer = streamer.create_producer(), streamer.create_consumer()
        ...     receipts = [producer.send(b"%d" % number) for number in range(3)]
        ...     rewind_after(consumer, receipts[1].sequence)
        ...     consumer.next().text()
        '2'
    """
    consumer.rewind(sequence + 1)


def seek_after(consumer: Consumer, moment: datetime) -> None:
    """Continue at the first message later than ``moment`` (SeaStreamer's seek on Redis and files), to the millisecond.

    Args:
        consumer: the consumer to move.
        moment: the last timestamp that is not delivered again.

    Raises:
        OutOfBoundsError: the stream has no later message yet; the position does not change.

    Example:
        >>> with connect("memory://seek-after/orders") as streamer:
        ...     producer, consumer = streamer.create_producer(), streamer.create_consumer()
        ...     receipts = [producer.send(b"%d" % second, timestamp_ms=1000 * second) for second in range(3)]
        ...     seek_after(consumer, from_milliseconds(1000))
        ...     consumer.next().text()
        '2'
    """
    consumer.seek(from_milliseconds(to_milliseconds(moment) + 1))
