"""What a backend is: an object a URL scheme, that opens streams and says what they can do.

``kafka://…`` and ``redis://…`` are backends of this package. Another distribution brings its own with an entry point::

    [project.entry-points."stream_consumers.backends"]
    pulsar = "stream_pulsar:PulsarStreams"

and proves it with the tests of :mod:`stream_consumers.testing`. A backend is imported when its scheme is first used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from stream_consumers.batches import BatchSource, Membership
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Consumer, DeadLetterObserver, PositionCommitter, log_dead_letter
from stream_consumers.epochs import EpochNameMap
from stream_consumers.errors import (
    BackendLoadError,
    GroupsNotRememberedError,
    InvalidOptionError,
    InvalidUrlError,
    UnsupportedError,
)
from stream_consumers.options import AutoStreamReset, ConsumerMode, Modes, check_switch, choose_fields, choose_reset
from stream_consumers.producer import Producer
from stream_consumers.urls import StreamUrl

ENTRY_POINTS = "stream_consumers.backends"
_OURS = {
    "file": "stream_consumers.file.backend:FileStreams",
    "kafka": "stream_consumers.kafka.backend:KafkaStreams",
    "memory": "stream_consumers.memory:MemoryStreams",
    "redis": "stream_consumers.redis.backend:RedisStreams",
    "rediss": "stream_consumers.redis.backend:RedisStreams",
    "stdio": "stream_consumers.stdio.backend:StdioStreams",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """How a consumer reads, after the mode and the group were checked.

    Args:
        mode: how it shares and remembers.
        group: the group, with its default filled in; ``None`` with mode ``real_time``.
        reset: where to start without a position.
        live: wait at the end; without it the stream ends there.
        client: configuration of the broker's client.
        group_options: of the type that the backend names.
        on_dead_letter: called with each part of the stream that cannot be used as a message.

    Example:
        >>> consumer = find_backend("memory").open_consumer(StreamUrl.parse("memory://empty/orders"), ConsumerOptions())
        >>> consumer.next(timeout_seconds=0) is None
        True
    """

    mode: ConsumerMode = ConsumerMode.REAL_TIME
    group: str | None = None
    reset: AutoStreamReset = AutoStreamReset.EARLIEST
    live: bool = True
    client: ClientConfig = field(default_factory=dict, repr=False)
    group_options: object | None = None
    on_dead_letter: DeadLetterObserver = log_dead_letter

    def __post_init__(self) -> None:
        choose_fields(self, mode=ConsumerMode, reset=AutoStreamReset)
        check_switch("live", self.live)
        # A group has positions, from which there is something to read.
        choose_reset(self.reset, live=self.live or self.group is not None)
        if not callable(self.on_dead_letter):
            raise InvalidOptionError(
                f"on_dead_letter={self.on_dead_letter!r} cannot be called",
                remedy="Give a function that takes a DeadLetter, or leave it out.",
            )


class Backend(ABC):
    """The streams of a URL scheme.

    Attributes, which a backend sets, say what it can do. :meth:`check` and :class:`stream_consumers.options.Modes`
    refuse every URL and option that can be refused without asking a server, before another method is called.

    Attributes:
        consumer_modes: the modes of its consumers.
        batch_modes: the modes in which batches are ingested; none by default.
        producer_options: the type of the options of its producers, if they have any.
        group_options: the type of the options of a member of its groups, if there are any.
        creates_shards: a stream has as many shards as it was created with; elsewhere a shard begins with a message.
        takes_shard_count_of_sharder: a stream is created with as many shards as the producer's sharder has, by default.
        has_one_writer: a place has one writer at a time, so that all producers of a streamer share it.
        claims_entries: with mode ``load_balanced``, members share entries one by one and not whole shards.
        is_pipe: a message is read once: there is no position to go back to.
        kind: shown for its assets, one of the kinds that Dagster has an icon for.

    Example:
        >>> find_backend("kafka").claims_entries, find_backend("redis").claims_entries
        (False, True)
    """

    consumer_modes: Modes
    batch_modes = Modes(of="batches", available=())
    producer_options: type | None = None
    group_options: type | None = None
    creates_shards = False
    takes_shard_count_of_sharder = False
    has_one_writer = False
    claims_entries = False
    is_pipe = False
    kind: str | None = None

    @abstractmethod
    def open_consumer(self, url: StreamUrl, options: ConsumerOptions) -> Consumer:
        """A consumer.

        Raises:
            StreamAssetsError: as the backend says.
        """

    @abstractmethod
    def open_producer(
        self, url: StreamUrl, *, client: ClientConfig, options: object | None, shards: int | None
    ) -> Producer:
        """A producer.

        Args:
            url: where to send.
            client: configuration of the broker's client.
            options: of the type :attr:`producer_options`.
            shards: where :attr:`creates_shards`, the number of shards of a stream that has to be created.

        Raises:
            StreamAssetsError: as the backend says.
        """

    def open_batch_source(
        self, url: StreamUrl, *, mode: ConsumerMode, client: ClientConfig, membership: Membership | None
    ) -> BatchSource:
        """A source of micro-batches.

        Args:
            url: which streams.
            mode: one of :attr:`batch_modes`.
            client: configuration of the broker's client.
            membership: commit as this member.

        Raises:
            UnsupportedError: the backend has no batches.
            StreamAssetsError: as the backend says.
        """
        raise _no_batches(url)

    def shown_sequence(self, sequence: int) -> int:
        """The sequence as an int that is printed the way people of this backend write it; by default as a number."""
        return sequence

    def check(self, url: StreamUrl, client: ClientConfig) -> None:
        """Refuse what cannot be right, without asking a server; by default any client option.

        Raises:
            InvalidUrlError, InvalidOptionError: naming it.
        """
        if client:
            raise InvalidOptionError(
                f"{url.protocol} has no client to configure",
                remedy="Leave the client options out.",
                options=sorted(client),
            )

    def producer_client_config(self, client: ClientConfig) -> ClientConfig:
        """The part of a shared configuration that a producer takes; by default all of it."""
        return client

    def check_batches(self, url: StreamUrl, mode: ConsumerMode, client: ClientConfig) -> None:
        """Refuse what cannot be ingested, without asking a server.

        Raises:
            InvalidUrlError, InvalidOptionError, UnsupportedError: naming it.
        """
        url.required_streams()
        if self.is_pipe:
            raise UnsupportedError(
                f"{url}: a pipe cannot be read twice, so there is no position to continue from",
                remedy="Spool it into a file (stream-assets ingest does, or spool_stdin), and use that.",
            )
        self.check(url, client)
        if not self.batch_modes.available:
            raise _no_batches(url)
        self.batch_modes.check(mode)

    def connect(self, url: StreamUrl, client: ClientConfig, options: object | None) -> object | None:
        """Check that the broker answers, and create what is created once, before the first producer.

        Args:
            url: where; it may name no stream.
            client: configuration of the broker's client.
            options: of the producers to come.

        Returns:
            The options of the producers to come, after what they ask for was done.

        Raises:
            StreamAssetsError: as the backend says.
        """
        return options

    def join(self, url: StreamUrl, group: str, client: ClientConfig) -> Membership:
        """Become a member of a group whose members share shards; close it when done.

        Raises:
            UnsupportedError: the backend has no such groups.
        """
        raise UnsupportedError(f"{url}: there are no groups to join", remedy="Use mode 'resumable'.")

    def claims(self, url: StreamUrl, group: str, client: ClientConfig, names: EpochNameMap) -> Any:
        """A group whose members share entries, where :attr:`claims_entries`; close it when done.

        Args:
            url: the stream.
            group: whose members share.
            client: configuration of the broker's client.
            names: for streams that were recreated the names of their epochs, see :mod:`stream_consumers.epochs`.

        Returns:
            What ``spark_jobs.claims`` works with: a :class:`stream_consumers.redis.claims.RedisClaims`, which has no
            protocol of its own while Redis is the only server with claims.

        Raises:
            UnsupportedError: the backend has no such groups.
        """
        raise UnsupportedError(f"{url}: there are no entries to claim", remedy="Use mode 'resumable'.")

    def committer(
        self, url: StreamUrl, group: str, *, consumer: Consumer | None, client: ClientConfig
    ) -> PositionCommitter:
        """The committer that keeps the positions of a group.

        Args:
            url: the stream.
            group: whose positions.
            consumer: that reads.
            client: configuration of the broker's client.

        Raises:
            GroupsNotRememberedError: no broker keeps them.
        """
        raise GroupsNotRememberedError(
            f"no broker remembers the groups of {url}",
            remedy="Keep the positions yourself, or use ProcessCommitter for the time of this process.",
            group=group,
        )


def _no_batches(url: StreamUrl) -> UnsupportedError:
    return UnsupportedError(f"{url} cannot be read in batches", remedy="Read it with a consumer.")


def find_backend(scheme: str) -> Backend:
    """The backend of a URL scheme: one of this package, or one that an installed distribution registers.

    Args:
        scheme: what is before ``://``.

    Raises:
        InvalidUrlError: there is none; it names those there are.
        BackendLoadError: there is one, but it cannot be loaded, or two distributions claim the scheme.

    Example:
        >>> find_backend("file").kind
        'file'
    """
    # Only what was found is kept: what is installed later is found later.
    return _loaded(_entry_point(scheme))


@cache
def _loaded(entry: EntryPoint) -> Backend:
    try:
        backend = entry.load()()
    except Exception as error:
        raise BackendLoadError(
            f"the backend of {entry.name}:// cannot be loaded: {_place(entry)} raises {type(error).__name__}: {error}",
            remedy="Install what it needs, and point it at a class that extends stream_consumers.Backend and is made "
            "without arguments.",
        ) from error
    if not isinstance(backend, Backend) or not isinstance(getattr(backend, "consumer_modes", None), Modes):
        raise BackendLoadError(
            f"the backend of {entry.name}:// cannot be used: {_place(entry)} makes a {type(backend).__name__}",
            remedy="Extend stream_consumers.Backend, and set consumer_modes of the class to "
            "stream_consumers.options.Modes.",
        )
    return backend


def _entry_point(scheme: str) -> EntryPoint:
    if scheme in _OURS:
        return EntryPoint(scheme, _OURS[scheme], ENTRY_POINTS)
    registered = entry_points(group=ENTRY_POINTS)
    found = {entry.value: entry for entry in registered if entry.name == scheme}
    if not found:
        known = sorted({*_OURS, *(entry.name for entry in registered)})
        raise InvalidUrlError(
            f"there is no backend for {scheme!r}",
            remedy=f"Use one of: {', '.join(known)}; or install a package that has one.",
        )
    if len(found) > 1:
        raise BackendLoadError(
            f"{scheme}:// has {len(found)} backends: {'; '.join(_place(entry) for entry in found.values())}",
            remedy="Remove all of them but one.",
        )
    return next(iter(found.values()))


def _place(entry: EntryPoint) -> str:
    package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist else ""
    return f"the entry point {entry.value!r}{package}"
