"""Opens the streams of a URL with the backend of its scheme."""

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
        """The group's name in the ledger, a default where there is one.

        Raises:
            InvalidOptionError: none given where one is needed, or one where there is none.
        """
        return self.backend.batch_modes.group(self.mode, name) or self.mode.value

    def join(self, group: str) -> Membership:
        """Become a member of the group (mode ``load_balanced``); close it when done.

        Raises:
            StreamNotFoundError, BrokerUnavailableError, AccessDeniedError: as the broker says.
        """
        return self.backend.join(self.url, group, self.client)

    @property
    def is_claimed(self) -> bool:
        """Whether members share by claiming entries one by one, not whole shards."""
        return self.may_be_claimed and self.mode is ConsumerMode.LOAD_BALANCED

    @property
    def may_be_claimed(self) -> bool:
        """Whether the backend has groups whose entries are claimed."""
        return self.backend.claims_entries

    def claims(self, group: str, names: EpochNameMap | None = None) -> RedisClaims:
        """The group, where entries are claimed; close it when done.

        Args:
            group: whose members share.
            names: for streams that were recreated the names of their epochs.

        Raises:
            BrokerUnavailableError, AccessDeniedError: as the server says.
        """
        claims: RedisClaims = self.backend.claims(self.url, group, self.client, names or {})
        return claims

    def open(self, membership: Membership | None = None) -> BatchSource:
        """The batch source; close it when done.

        Args:
            membership: commit as this member.

        Raises:
            StreamNotFoundError, FormatError: as the backend says.
        """
        return self.backend.open_batch_source(self.url, mode=self.mode, client=self.client, membership=membership)


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
    """A consumer of the streams of a URL; with a group, a member of it.

    Args:
        url: where to read.
        mode: ``real_time`` has no group; ``resumable`` continues where the group is, with all shards; ``load_balanced``
            shares with the group's other members: shards on Kafka, messages elsewhere. Members that read a file or
            memory are those of this process, see :class:`stream_consumers.in_process_groups.SharedGroupConsumer`.
        group: the consumer group.
        reset: where to start without a position.
        live: wait at the end; without it the stream ends there.
        client: configuration of the broker's client.
        group_options: of a member of a group, of the backend's own type: ``RedisGroupOptions`` say when it commits,
            and what it takes over.
        on_dead_letter: called with each part of the stream that cannot be used as a message.

    Raises:
        InvalidUrlError: unknown protocol, no stream.
        InvalidOptionError: a group or a mode that the backend does not have, or options of a group where there is none.

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
    """A producer for the streams of a URL.

    Args:
        url: where to send.
        client: configuration of the broker's client.
        producer_options: of the backend's own type: ``FileProducerOptions`` for a ``.ss`` file,
            ``StdioProducerOptions`` for lines on stdout.
        shards: the number of shards of a stream that has to be created, where they do not come by themselves (Kafka,
            Redis). Without it, a missing Kafka topic is an error.

    Raises:
        InvalidUrlError: unknown protocol, no stream.
        InvalidOptionError: options of another backend.

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
    """Refuse options of another type than the backend's.

    Args:
        option: what to call them.
        given: the options, if any.
        expected: the type; ``None`` where there are none.
        url: for what.

    Raises:
        InvalidOptionError: naming both types.
    """
    if given is None or (expected is not None and isinstance(given, expected)):
        return
    raise InvalidOptionError(
        f"{option} of {url.shown} cannot be {type(given).__name__}",
        remedy=f"Use {expected.__name__}, or leave them out." if expected else "Leave them out.",
    )
