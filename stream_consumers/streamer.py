"""SeaStreamer's ``Streamer`` and sharders: connect once, make consumers and producers, disconnect."""

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
    """Chooses a shard for a message. Threads may share it.

    Example:
        >>> from stream_consumers.streamer import connect
        >>> with connect("memory://sharded/orders") as streamer:
        ...     producer = streamer.create_producer(sharder=RoundRobin(2))
        ...     [producer.send(b"{}").shard.id for _ in range(3)]
        [0, 1, 0]
    """

    @property
    def shards(self) -> int:
        """How many there are to choose from."""
        ...

    def choose(self, stream: str, payload: bytes) -> int:
        """The shard for this message: 0 to ``shards - 1``."""
        ...


class RoundRobin:
    """One shard after the other, whatever the stream.

    Args:
        shards: how many; at least 1.

    Raises:
        InvalidOptionError: fewer.

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
    """Any shard, each as often as the others in the long run.

    SeaStreamer takes the current millisecond, so that what is sent within one goes to a single shard; this does not.

    Args:
        shards: how many; at least 1.
        seed: for the same choices again; by default the time.

    Raises:
        InvalidOptionError: fewer.

    Example:
        >>> sharder = PseudoRandom(3, seed=7)
        >>> {sharder.choose("orders", b"{}") for _ in range(100)}
        {0, 1, 2}
    """

    def __init__(self, shards: int, *, seed: int | None = None) -> None:
        self.shards = check_count("shards", shards)
        # A shard may be guessed.
        self._random = random.Random(seed)  # noqa: S311

    def choose(self, stream: str, payload: bytes) -> int:
        """See :meth:`Sharder.choose`."""
        return self._random.randrange(self.shards)


class StreamerProducer(ClosesOnExit):
    """A producer of a :class:`Streamer`; see :class:`stream_consumers.producer.Producer`.

    Args:
        streamer: that it is of.
        stream: the anchor: where messages go that name no stream.
        sharder: chooses the shard of a message that names none.
        shards: the number of shards of a stream that has to be created.

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
        """The anchor."""
        return self._stream

    @property
    def is_ended(self) -> bool:
        """Whether it was ended or closed."""
        return self._ended

    def anchor(self, stream: str) -> None:
        """Say where messages go that name no stream; once.

        Raises:
            InvalidOptionError: there is an anchor already.
            InvalidStreamKeyError: it is not a stream key.
            StreamNotFoundError: as the backend says.
        """
        with self._lock:
            if self._stream is not None:
                raise InvalidOptionError(
                    f"the producer is anchored to {self._stream!r} already", remedy="Name the stream when sending."
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
            shard: the shard id; by default the sharder's choice, 0 without one.
            timestamp_ms: unix milliseconds; now by default.

        Raises:
            InvalidOptionError: neither a stream nor an anchor.
            ProducerEndedError: the producer was ended, or the streamer was disconnected.
        """
        with self._lock:
            target = self._stream if stream is None else check_target(self._streamer.url, stream)
            if target is None:
                raise InvalidOptionError("the message has no stream", remedy="Name it, or anchor the producer.")
            writer, data = self._opened(target), check_payload(payload)
            if shard is None:
                shard = 0 if self._sharder is None else self._sharder.choose(target, data)
            return writer.send(data, stream=target, shard=shard, timestamp_ms=timestamp_ms)

    def flush(self) -> None:
        """Wait until everything sent is with the backend."""
        with self._lock:
            self._check_not_ended()
            if self._writer is not None:
                self._writer.flush()

    def end(self) -> None:
        """Flush and end; a file gets its end-of-stream message if that was asked for.

        No producer of this streamer writes to the file again: connect again to append.
        """
        with self._lock:
            self._ended = True
            if self._writer is not None:
                self._writer.close()

    def close(self) -> None:
        """Flush and end; other producers of the same file go on."""
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
    """A connection to a file, a broker or memory; made by :func:`connect`, a context manager that disconnects.

    Args:
        url: where; its streams are the default ones.
        client: configuration of the broker's client.
        producer_options: of the producers, of the backend's own type.

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
        # Strong references: disconnecting flushes what was sent by a producer that was dropped.
        self._producers: list[StreamerProducer] = []
        self._writer: Producer | None = None
        self._is_connected = True

    def __repr__(self) -> str:
        return f"Streamer({str(self._url)!r})"

    @property
    def url(self) -> StreamUrl:
        """Where it is connected to."""
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
        """A consumer, see :func:`stream_consumers.create.create_consumer`; closed when the streamer disconnects.

        Args:
            streams: which to read; by default those of the URL. ``*`` stands for all.
            mode: how it shares and remembers.
            group: the consumer group.
            reset: where to start without a position. SeaStreamer's default is the latest.
            live: wait at the end; without it the stream ends there.
            group_options: of a member of a group, of the backend's own type.
            on_dead_letter: called with each part of the stream that cannot be used as a message.

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
        """A producer; ended when the streamer disconnects. Those of a file write with one writer, in the order of send.

        Args:
            stream: the anchor: where messages go that name no stream; by default the only stream of the URL.
            sharder: chooses the shard of a message that names none.
            shards: the number of shards of a stream that has to be created (Kafka, Redis); on Redis, the sharder's by
                default.

        Raises:
            ProducerEndedError: the streamer was disconnected.
            ProducerBusyError: the file has a producer that is not this streamer's.
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
        """Whether all of its producers write with the same writer, so that closing one of them leaves it open."""
        return self._backend.has_one_writer

    def open_writer(self, stream: str, shards: int | None) -> Producer:
        """What sends the messages of a producer, or of all of them.

        Args:
            stream: that the first message goes to.
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
        """Flush and end the producers, close the consumers; again does nothing.

        Raises:
            StreamAssetsError: as the backend says; everything is closed nevertheless.
        """
        with self._lock:
            self._is_connected = False
            consumers, producers, writer = list(self._consumers), list(self._producers), self._writer
        # Without the lock: a producer that is opening its writer has its own and waits for ours.
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
    """Connect to where a URL says (SeaStreamer's ``Streamer::connect``); disconnect when done.

    Args:
        url: ``redis://host:6379/``, ``kafka://host:9092/``, ``file://path/to/orders.ss/``, ``memory://name/``; streams
            behind the slash are the default ones.
        client: configuration of the broker's client.
        producer_options: ``FileProducerOptions`` of a file: without them it must be there, with them ``creation`` says.
            ``StdioProducerOptions`` of lines on stdout: with ``loopback``, consumers of this process get what it sends.

    Raises:
        InvalidUrlError: unknown protocol.
        BrokerUnavailableError, AccessDeniedError: as the broker says, which is asked at once.
        StreamNotFoundError, StreamExistsError, FormatError: as the file is, and as ``creation`` asks.

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
    """Continue behind a sequence (SeaStreamer's rewind on Redis), not at it as :meth:`Consumer.rewind` does.

    Args:
        consumer: which to move.
        sequence: the last one that is not delivered again.

    Raises:
        OutOfBoundsError: there is nothing behind it yet; the position stays.

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
        consumer: which to move.
        moment: the last time that is not delivered again.

    Raises:
        OutOfBoundsError: there is none yet; the position stays.

    Example:
        >>> with connect("memory://seek-after/orders") as streamer:
        ...     producer, consumer = streamer.create_producer(), streamer.create_consumer()
        ...     receipts = [producer.send(b"%d" % second, timestamp_ms=1000 * second) for second in range(3)]
        ...     seek_after(consumer, from_milliseconds(1000))
        ...     consumer.next().text()
        '2'
    """
    consumer.seek(from_milliseconds(to_milliseconds(moment) + 1))
