"""Opens a stream URL with the backend of its protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from stream_consumers.batches import BatchSource, Membership
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Consumer, DeadLetterObserver, Producer, log_dead_letter
from stream_consumers.errors import InvalidOptionError, InvalidUrlError, UnsupportedError
from stream_consumers.file.batches import FileBatchSource
from stream_consumers.file.consumer import FileConsumer
from stream_consumers.file.producer import FileProducer
from stream_consumers.in_process_groups import SharedGroupConsumer
from stream_consumers.kafka.batches import KafkaBatchSource
from stream_consumers.kafka.cluster import check_client_options
from stream_consumers.kafka.consumer import KafkaConsumer
from stream_consumers.kafka.membership import KafkaMembership
from stream_consumers.kafka.producer import KafkaProducer
from stream_consumers.memory import MemoryBatchSource, MemoryConsumer, MemoryProducer
from stream_consumers.options import AutoStreamReset, ConsumerMode, FileProducerOptions, RedisGroupOptions, host_id
from stream_consumers.redis.batches import RedisBatchSource
from stream_consumers.redis.claims import RedisClaims
from stream_consumers.redis.client import check_redis_options, check_redis_url
from stream_consumers.redis.consumer import RedisConsumer
from stream_consumers.redis.group_consumer import RedisGroupConsumer
from stream_consumers.redis.producer import RedisProducer
from stream_consumers.stdio.consumer import StdioConsumer
from stream_consumers.stdio.producer import StdioProducer, StdioProducerOptions
from stream_consumers.urls import StreamUrl

PROTOCOLS = ("file", "kafka", "memory", "redis", "rediss", "stdio")
_REDIS = ("redis", "rediss")


@dataclass(frozen=True)
class StreamSource:
    """Where batches come from, as a value: nothing is opened yet.

    Args:
        url: the stream URL.
        mode: how the group shares and remembers.
        client: configuration of the broker's client; shown nowhere.

    Raises:
        InvalidUrlError: unknown protocol, no stream.
        InvalidOptionError: a mode that the backend does not have, or client options where there is no client.
        UnsupportedError: a pipe, which cannot be read twice.

    Example:
        >>> StreamSource(StreamUrl.parse("memory://shop/orders")).mode.value
        'resumable'
    """

    url: StreamUrl
    mode: ConsumerMode = ConsumerMode.RESUMABLE
    client: ClientConfig = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.url.required_streams()
        check_protocol(self.url)
        if self.url.protocol == "stdio":
            raise UnsupportedError(
                f"{self.url}: a pipe cannot be read twice, so there is no position to go on from",
                remedy="Spool it into a file (stream-assets ingest does, or stdio_spool.spool_stdin), and use that.",
            )
        if self.url.protocol == "kafka":
            check_client_options(self.client)
            return
        if self.url.protocol in _REDIS:
            check_redis_url(self.url)
            check_redis_options(self.client)
        else:
            check_client(self.url, self.client)
        if self.mode is not ConsumerMode.RESUMABLE and self.url.protocol not in _REDIS:
            raise InvalidOptionError(
                f"mode {self.mode.value!r} is not available for {self.url.protocol}", remedy="Use mode 'resumable'."
            )

    def group(self, name: str | None) -> str:
        """The group's name in the ledger, a default where there is one.

        Raises:
            InvalidOptionError: none given where one is needed, or one where there is none.
        """
        if self.mode is ConsumerMode.REAL_TIME:
            if name is not None:
                raise InvalidOptionError(
                    f"mode real_time has no group, but group={name!r} is given",
                    remedy="Leave the group out, or use mode resumable or load_balanced.",
                )
            return ConsumerMode.REAL_TIME.value
        if name is None and self.url.protocol in _REDIS:
            return f"{host_id()}:{'s' if self.mode is ConsumerMode.LOAD_BALANCED else 'r'}"
        if name is None and self.mode is ConsumerMode.LOAD_BALANCED:
            raise InvalidOptionError("mode load_balanced needs a group", remedy="Give all members the same group.")
        return f"{host_id()}r" if name is None else name

    def join(self, group: str) -> Membership:
        """Become a member of the group (mode ``load_balanced``); close it when done.

        Raises:
            StreamNotFoundError, BrokerUnavailableError, AccessDeniedError: as the broker says.
        """
        return KafkaMembership(self.url, group, self.client)

    @property
    def is_claimed(self) -> bool:
        """Whether members share by claiming entries one by one, not whole shards."""
        return self.may_be_claimed and self.mode is ConsumerMode.LOAD_BALANCED

    @property
    def may_be_claimed(self) -> bool:
        """Whether the backend has groups whose entries are claimed."""
        return self.url.protocol in _REDIS

    def claims(self, group: str) -> RedisClaims:
        """The group, where entries are claimed; close it when done.

        Raises:
            BrokerUnavailableError, AccessDeniedError: as the server says.
        """
        return RedisClaims(self.url, group, self.client)

    def open(self, membership: Membership | None = None) -> BatchSource:
        """The batch source; close it when done.

        Args:
            membership: commit as this member.

        Raises:
            StreamNotFoundError, FormatError: as the backend says.
        """
        if self.url.protocol == "file":
            return FileBatchSource(self.url)
        if self.url.protocol == "kafka":
            return KafkaBatchSource(self.url, self.client, mode=self.mode, membership=membership)
        if self.url.protocol in _REDIS:
            return RedisBatchSource(self.url, self.client, mode=self.mode)
        return MemoryBatchSource(self.url)


def check_protocol(url: StreamUrl) -> None:
    """Refuse a protocol without a backend.

    Raises:
        InvalidUrlError: naming those there are.
    """
    if url.protocol not in PROTOCOLS:
        raise InvalidUrlError(
            f"{url}: there is no backend for {url.protocol!r}", remedy=f"Use one of: {', '.join(PROTOCOLS)}."
        )


def check_client(url: StreamUrl, client: ClientConfig | None) -> None:
    """Refuse client options where there is no client.

    Raises:
        InvalidOptionError: naming them.
    """
    if client:
        raise InvalidOptionError(
            f"{url.protocol} has no client to configure", remedy="Leave the client options out.", options=sorted(client)
        )


def open_batch_source(url: str | StreamUrl, *, client: ClientConfig | None = None) -> BatchSource:
    """The batch source of a URL, in ``resumable`` mode; close it when done.

    Args:
        url: which streams, each by its name.
        client: configuration of the broker's client.

    Raises:
        InvalidUrlError: unknown protocol, no stream.
        StreamNotFoundError, FormatError: as the backend says.

    Example:
        >>> with open_batch_source("memory://example/clicks") as source:
        ...     dict(source.extents())
        {}
    """
    return StreamSource(_parsed(url), client=client or {}).open()


def create_consumer(
    url: str | StreamUrl,
    *,
    mode: ConsumerMode = ConsumerMode.REAL_TIME,
    group: str | None = None,
    reset: AutoStreamReset = AutoStreamReset.EARLIEST,
    live: bool = True,
    client: ClientConfig | None = None,
    group_options: RedisGroupOptions | None = None,
    on_dead_letter: DeadLetterObserver = log_dead_letter,
) -> Consumer:
    """A consumer of the streams of a URL.

    Args:
        url: where to read.
        mode: ``real_time`` has no group; ``resumable`` goes on where the group is, with all shards; ``load_balanced``
            shares with the group's other members: shards on Kafka, messages elsewhere. Members that read a file or
            memory are those of this process, see :class:`stream_consumers.in_process_groups.SharedGroupConsumer`.
        group: the consumer group.
        reset: where to start without a position.
        live: wait at the end; without it the stream ends there.
        client: configuration of the broker's client.
        group_options: of a member of a Redis group: when it commits, what it takes over.
        on_dead_letter: told of what cannot be used as a message.

    Raises:
        InvalidUrlError: unknown protocol, no stream.
        InvalidOptionError: a group or a mode that the backend does not have, or options of a group where there is none.

    Example:
        >>> with create_consumer("file://orders.ss/orders", live=False) as orders:
        ...     [message.text() for message in orders]
        ['{"id": 0}', '{"id": 1}', '{"id": 2}']
    """
    parsed = _parsed(url)
    check_protocol(parsed)
    is_redis = parsed.protocol in _REDIS
    if group_options is not None and (not is_redis or mode is ConsumerMode.REAL_TIME):
        raise InvalidOptionError(
            f"{parsed.protocol} in mode {mode.value} has no group that group_options are for",
            remedy="Leave them out, or use Redis in mode resumable or load_balanced.",
        )
    if parsed.protocol == "kafka":
        return KafkaConsumer(
            parsed,
            mode=mode,
            group=group,
            reset=reset,
            live=live,
            client=client,
            on_dead_letter=on_dead_letter,
        )
    if is_redis and mode is not ConsumerMode.REAL_TIME:
        return RedisGroupConsumer(
            parsed,
            mode=mode,
            group=group,
            reset=reset,
            live=live,
            client=client,
            options=group_options,
            on_dead_letter=on_dead_letter,
        )
    if parsed.protocol == "stdio":
        check_client(parsed, client)
        return StdioConsumer(parsed, mode=mode, group=group, reset=reset)
    if mode is ConsumerMode.REAL_TIME and group is not None:
        others = "resumable (one member) or load_balanced (several)" if is_redis else "load_balanced"
        raise InvalidOptionError(
            f"mode real_time has no group, but group={group!r} is given",
            remedy=f"Leave it out, or use {others}.",
        )
    if is_redis:
        return RedisConsumer(parsed, reset=reset, live=live, client=client, on_dead_letter=on_dead_letter)
    check_client(parsed, client)
    open_consumer = partial(_open_consumer, parsed, reset=reset, live=live, on_dead_letter=on_dead_letter)
    if mode is ConsumerMode.RESUMABLE:
        raise InvalidOptionError(
            f"{parsed.protocol} remembers no positions to resume at", remedy="Use mode real_time or load_balanced."
        )
    if mode is ConsumerMode.REAL_TIME:
        return open_consumer()
    if group is None:
        raise InvalidOptionError("mode load_balanced needs a group", remedy="Give all members the same group.")
    return SharedGroupConsumer(parsed, group=group, reset=reset, live=live, open_consumer=open_consumer)


def _open_consumer(
    url: StreamUrl, *, reset: AutoStreamReset, live: bool, on_dead_letter: DeadLetterObserver
) -> Consumer:
    if url.protocol == "file":
        return FileConsumer(url, reset=reset, live=live, on_dead_letter=on_dead_letter)
    return MemoryConsumer(url, reset=reset, live=live)


def create_producer(
    url: str | StreamUrl,
    *,
    client: ClientConfig | None = None,
    file_options: FileProducerOptions | None = None,
    stdio_options: StdioProducerOptions | None = None,
    shards: int | None = None,
) -> Producer:
    """A producer for the streams of a URL.

    Args:
        url: where to send.
        client: configuration of the broker's client.
        file_options: of a ``.ss`` file.
        stdio_options: of lines on stdout.
        shards: a topic that is not there is created with so many partitions; without it that is an error.

    Raises:
        InvalidUrlError: unknown protocol, no stream.
        InvalidOptionError: options of stdio for another backend.

    Example:
        >>> with create_producer("memory://example-connect/orders") as producer:
        ...     producer.send(b"{}").sequence
        0
    """
    parsed = _parsed(url)
    check_protocol(parsed)
    if stdio_options is not None and parsed.protocol != "stdio":
        raise InvalidOptionError(f"{parsed.protocol} is not written in lines", remedy="Leave stdio_options out.")
    if parsed.protocol == "kafka":
        return KafkaProducer(parsed, client, shards=shards)
    if parsed.protocol in _REDIS:
        return RedisProducer(parsed, client, shards=shards)
    check_client(parsed, client)
    if parsed.protocol == "file":
        return FileProducer(parsed, file_options)
    if parsed.protocol == "stdio":
        return StdioProducer(parsed, stdio_options)
    return MemoryProducer(parsed)


def _parsed(url: str | StreamUrl) -> StreamUrl:
    return StreamUrl.parse(url) if isinstance(url, str) else url
