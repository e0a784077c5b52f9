"""Functions that open the streams of a URL with the backend of its scheme."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stream_consumers.backend import Backend, ConsumerOptions, find_backend
from stream_consumers.batches import BatchSource, Membership
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Consumer, DeadLetterObserver, log_dead_letter
from stream_consumers.epochs import EpochNameMap
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import AutoStreamReset, ConsumerMode, choice
from stream_consumers.producer import Producer
from stream_consumers.urls import StreamUrl

if TYPE_CHECKING:
    from stream_consumers.redis.claims import RedisClaims


@dataclass(frozen=True, init=False)
class StreamSource:
    """The source of batches, as a value; creating it opens nothing.

    Args:
        url: the stream URL.
        mode: how the group shares the stream and stores positions.
        client: configuration of the broker's client; left out of the representation.

    Raises:
        InvalidUrlError: the protocol is unknown, or the URL names no stream.
        InvalidOptionError: the backend does not have the mode, or does not accept client options.
        UnsupportedError: the source is a pipe, which cannot be read twice.

    Example:
        >>> StreamSource("memory://shop/orders").mode.value
        'resumable'
    """

    url: StreamUrl
    mode: ConsumerMode
    client: ClientConfig = field(repr=False)

    def __init__(
        self,
        url: str | StreamUrl,
        mode: ConsumerMode = ConsumerMode.RESUMABLE,
        client: ClientConfig | None = None,
    ) -> None:
        object.__setattr__(self, "url", StreamUrl.parse(url))
        object.__setattr__(self, "mode", choice(ConsumerMode, mode, option="mode"))
        object.__setattr__(self, "client", client or {})
        self.backend.check_batches(self.url, self.mode, self.client)

    @property
    def backend(self) -> Backend:
        """The backend of the URL's scheme."""
        return find_backend(self.url.protocol)

    def group(self, name: str | None) -> str:
        """Return the group's name in the ledger, with the default of the mode if it has one.

        Raises:
            InvalidOptionError: the mode needs a name and none is given, or the mode has no group.
        """
        return self.backend.batch_modes.group(self.mode, name) or self.mode.value

    def join(self, group: str) -> Membership:
        """Become a member of the group (mode ``load_balanced``); close it when done.

        Raises:
            StreamNotFoundError, BrokerUnavailableError, AccessDeniedError: the broker returned an error.
        """
        return self.backend.join(self.url, group, self.client)

    @property
    def is_claimed(self) -> bool:
        """Whether members share the stream by claiming single entries instead of whole shards."""
        return self.may_be_claimed and self.mode is ConsumerMode.LOAD_BALANCED

    @property
    def may_be_claimed(self) -> bool:
        """Whether the backend has groups whose members claim entries."""
        return self.backend.claims_entries

    def claims(self, group: str, names: EpochNameMap | None = None) -> RedisClaims:
        """Open the group whose members claim entries; close it when done.

        Args:
            group: the consumer group.
            names: the epoch names of recreated streams.

        Raises:
            BrokerUnavailableError, AccessDeniedError: the server returned an error.
        """
        claims: RedisClaims = self.backend.claims(self.url, group, self.client, names or {})
        return claims

    def open(self, membership: Membership | None = None) -> BatchSource:
        """Open the batch source; close it when done.

        Args:
            membership: commit as this member.

        Raises:
            StreamNotFoundError, FormatError: the stream cannot be opened.
        """
        return self.backend.open_batch_source(self.url, mode=self.mode, client=self.client, membership=membership)


def open_batch_source(url: str | StreamUrl, *, client: ClientConfig | None = None) -> BatchSource:
    """Open the batch source of a URL in ``resumable`` mode; close it when done.

    Args:
        url: the streams, each by its name.
        client: configuration of the broker's client.

    Raises:
        InvalidUrlError: the protocol is unknown, or the URL names no stream.
        StreamNotFoundError, FormatError: the stream cannot be opened.

    Example:
        >>> with open_batch_source("memory://example/clicks") as source:
        ...     dict(source.extents())
        {}
    """
    return StreamSource(url, client=client).open()


def create_consumer(
    url: str | StreamUrl,
    *,
    mode: ConsumerMode | str = ConsumerMode.REAL_TIME,
    group: str | None = None,
    reset: AutoStreamReset = AutoStreamReset.EARLIEST,
    live: bool = True,
    client: ClientConfig | None = None,
    group_options: object | None = None,
    on_dead_letter: DeadLetterObserver = log_dead_letter,
) -> Consumer:
    """Create a consumer of the streams of a URL; with a group, it is a member of the group.

    Args:
        url: the streams to read.
        mode: ``real_time`` has no group; ``resumable`` continues at the position of the group, with all shards;
            ``load_balanced`` shares the stream with the other members: shards on Kafka, messages elsewhere. Groups of
            files and memory exist within this process, see
            :class:`stream_consumers.in_process_groups.SharedGroupConsumer`.
        group: the consumer group.
        reset: where to start without a position.
        live: wait for more messages at the end; without it, reading ends there.
        client: configuration of the broker's client.
        group_options: options of a group member, of the backend's own type. ``RedisGroupOptions`` decide when it
            commits, and which entries it takes over.
        on_dead_letter: called with each part of the stream that cannot be read as a message.

    Raises:
        InvalidUrlError: the protocol is unknown, or the URL names no stream.
        InvalidOptionError: the backend does not have the group or the mode, or ``group_options`` are given without a
            group.

    Example:
        >>> with create_consumer("file://orders.ss/orders", live=False) as orders:
        ...     [message.text() for message in orders]
        ['{"id": 0}', '{"id": 1}', '{"id": 2}']
    """
    parsed = StreamUrl.parse(url)
    chosen, reset = choice(ConsumerMode, mode, option="mode"), choice(AutoStreamReset, reset, option="reset")
    backend = find_backend(parsed.protocol)
    check_options("group_options", group_options, backend.group_options, parsed)
    if group_options is not None and chosen is ConsumerMode.REAL_TIME:
        raise InvalidOptionError(
            "mode real_time has no group, but group_options are given",
            remedy="Leave them out, or use a mode with a group.",
        )
    name = backend.consumer_modes.group(chosen, group)
    backend.check(parsed, client or {})
    options = ConsumerOptions(
        mode=chosen,
        group=name,
        reset=reset,
        live=live,
        client=client or {},
        group_options=group_options,
        on_dead_letter=on_dead_letter,
    )
    return backend.open_consumer(parsed, options)


def create_producer(
    url: str | StreamUrl,
    *,
    client: ClientConfig | None = None,
    producer_options: object | None = None,
    shards: int | None = None,
) -> Producer:
    """Create a producer for the streams of a URL.

    Args:
        url: the streams to send to.
        client: configuration of the broker's client.
        producer_options: options of the backend's own type: ``FileProducerOptions`` for a ``.ss`` file,
            ``StdioProducerOptions`` for lines on stdout.
        shards: the number of shards of a stream that must be created (Kafka, Redis; other backends create shards
            automatically). Without it, a missing Kafka topic is an error.

    Raises:
        InvalidUrlError: the protocol is unknown, or the URL names no stream.
        InvalidOptionError: the options are of another backend.

    Example:
        >>> with create_producer("memory://example-connect/orders") as producer:
        ...     producer.send(b"{}").sequence
        0
    """
    parsed = StreamUrl.parse(url)
    backend = find_backend(parsed.protocol)
    check_options("producer_options", producer_options, backend.producer_options, parsed)
    backend.check(parsed, client or {})
    return backend.open_producer(parsed, client=client or {}, options=producer_options, shards=shards)


def check_options(option: str, given: object | None, expected: type | None, url: StreamUrl) -> None:
    """Raise if options are of another type than the backend's.

    Args:
        option: the name of the argument, for the error.
        given: the options, if any.
        expected: the type of the backend's options; ``None`` if it has none.
        url: the stream URL, for the error.

    Raises:
        InvalidOptionError: the types differ.
    """
    if given is None or (expected is not None and isinstance(given, expected)):
        return
    raise InvalidOptionError(
        f"{option} of {url.shown} cannot be {type(given).__name__}",
        remedy=f"Use {expected.__name__}, or leave them out." if expected else "Leave them out.",
    )
