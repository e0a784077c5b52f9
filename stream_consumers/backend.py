"""The interface of a backend: one object per URL scheme, which opens streams and declares what they support.

This package has the backends of ``kafka://…``, ``redis://…`` and others. Another distribution registers its backend
with an entry point::

    [project.entry-points."stream_consumers.backends"]
    pulsar = "stream_pulsar:PulsarStreams"

and tests it with the contract suite in :mod:`stream_consumers.testing`. A backend is imported when its scheme is first
used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
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
    """The options of a consumer, with mode and group already checked.

    Args:
        mode: how the consumer shares the stream and stores positions.
        group: the group, with its default filled in; ``None`` with mode ``real_time``.
        reset: where to start without a position.
        live: wait for more messages at the end; without it, reading ends there.
        client: configuration of the broker's client.
        group_options: an instance of the backend's :attr:`Backend.group_options`.
        on_dead_letter: called with each part of the stream that cannot be read as a message.

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
        # A group may have a position before the end, so LATEST without live may still read something.
        choose_reset(self.reset, live=self.live or self.group is not None)
        if not callable(self.on_dead_letter):
            raise InvalidOptionError(
                f"on_dead_letter={self.on_dead_letter!r} is not callable",
                remedy="Give a function that takes a DeadLetter, or leave it out.",
            )


class Backend(ABC):
    """The streams of a URL scheme.

    A backend declares what it supports by its attributes. :meth:`check` and :class:`stream_consumers.options.Modes`
    reject every URL and option that can be rejected without asking a server, before another method is called.

    Attributes:
        consumer_modes: the modes of its consumers.
        batch_modes: the modes in which batches are ingested; none by default.
        producer_options: the type of its producer options; ``None`` if it has none.
        group_options: the type of the options of a group member; ``None`` if it has none.
        creates_shards: a stream gets its number of shards when it is created; otherwise, a shard is created by its
            first message.
        takes_shard_count_of_sharder: by default, a stream is created with as many shards as the producer's sharder has.
        has_one_writer: a location has one writer at a time, so that all producers of a streamer share it.
        claims_entries: with mode ``load_balanced``, members share single entries instead of whole shards.
        answers_for_many: one request returns what many streams of a server hold.
        is_pipe: each message can be read only once; a pipe has no position to return to.
        kind: the kind of its assets, one for which Dagster has an icon.

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
    answers_for_many = False
    is_pipe = False
    kind: str | None = None

    @abstractmethod
    def open_consumer(self, url: StreamUrl, options: ConsumerOptions) -> Consumer:
        """Open a consumer.

        Raises:
            StreamAssetsError: the backend raised an error.
        """

    @abstractmethod
    def open_producer(
        self, url: StreamUrl, *, client: ClientConfig, options: object | None, shards: int | None
    ) -> Producer:
        """Open a producer.

        Args:
            url: the streams to send to.
            client: configuration of the broker's client.
            options: an instance of :attr:`producer_options`.
            shards: if :attr:`creates_shards`, the number of shards of a stream that must be created.

        Raises:
            StreamAssetsError: the backend raised an error.
        """

    def open_batch_source(
        self, url: StreamUrl, *, mode: ConsumerMode, client: ClientConfig, membership: Membership | None
    ) -> BatchSource:
        """Open a source of micro-batches.

        Args:
            url: the streams to read.
            mode: one of :attr:`batch_modes`.
            client: configuration of the broker's client.
            membership: commit as this member.

        Raises:
            UnsupportedError: the backend has no batches.
            StreamAssetsError: the backend raised an error.
        """
        raise _no_batches(url)

    def streams(self, url: StreamUrl, client: ClientConfig) -> Collection[str]:
        """Return the keys of all streams at the location of a URL, without asking for anything else about them.

        Args:
            url: the location; its streams do not matter.
            client: configuration of the broker's client.

        Raises:
            UnsupportedError: the backend cannot list its streams.
            StreamAssetsError: the backend raised an error.
        """
        raise UnsupportedError(
            f"the streams of {url.with_streams([])} cannot be listed without reading all messages",
            remedy="Name the streams.",
        )

    def shown_sequence(self, sequence: int) -> int:
        """Return an int that prints the sequence in this backend's own notation; a plain number by default."""
        return sequence

    def check(self, url: StreamUrl, client: ClientConfig) -> None:
        """Reject an invalid URL or client option without asking a server; the default rejects every client option.

        Raises:
            InvalidUrlError, InvalidOptionError: the URL or an option is invalid.
        """
        if client:
            raise InvalidOptionError(
                f"{url.protocol} has no client to configure",
                remedy="Leave the client options out.",
                options=sorted(client),
            )

    def producer_client_config(self, client: ClientConfig) -> ClientConfig:
        """Return the part of a shared configuration that a producer accepts; by default all of it."""
        return client

    def check_batches(self, url: StreamUrl, mode: ConsumerMode, client: ClientConfig) -> None:
        """Reject a source that cannot be ingested, without asking a server.

        Raises:
            InvalidUrlError, InvalidOptionError, UnsupportedError: the source cannot be ingested.
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
        """Check that the broker answers, and create what must exist before the first producer.

        Args:
            url: the location; it need not name a stream.
            client: configuration of the broker's client.
            options: the options of future producers.

        Returns:
            The options for future producers, without the steps that this call has done.

        Raises:
            StreamAssetsError: the backend raised an error.
        """
        return options

    def join(self, url: StreamUrl, group: str, client: ClientConfig) -> Membership:
        """Become a member of a group whose members share shards; close it when done.

        Raises:
            UnsupportedError: the backend has no such groups.
        """
        raise UnsupportedError(f"{url}: the backend has no groups to join", remedy="Use mode 'resumable'.")

    def claims(self, url: StreamUrl, group: str, client: ClientConfig, names: EpochNameMap) -> Any:
        """Open a group whose members share entries, if :attr:`claims_entries`; close it when done.

        Args:
            url: the stream.
            group: the consumer group.
            client: configuration of the broker's client.
            names: the epoch names of recreated streams, see :mod:`stream_consumers.epochs`.

        Returns:
            A :class:`stream_consumers.redis.claims.RedisClaims` for ``spark_jobs.claims``. It has no protocol class
            while Redis is the only server with claims.

        Raises:
            UnsupportedError: the backend has no such groups.
        """
        raise UnsupportedError(f"{url}: the backend cannot claim entries", remedy="Use mode 'resumable'.")

    def committer(
        self, url: StreamUrl, group: str, *, consumer: Consumer | None, client: ClientConfig
    ) -> PositionCommitter:
        """Return the committer that stores the positions of a group.

        Args:
            url: the stream.
            group: the consumer group.
            consumer: the consumer that reads the stream.
            client: configuration of the broker's client.

        Raises:
            GroupsNotRememberedError: no broker stores the positions.
        """
        raise GroupsNotRememberedError(
            f"no broker stores group positions of {url}",
            remedy="Store the positions yourself, or use ProcessCommitter to keep them for the life of this process.",
            group=group,
        )


def _no_batches(url: StreamUrl) -> UnsupportedError:
    return UnsupportedError(f"{url} cannot be read in batches", remedy="Read it with a consumer.")


def find_backend(scheme: str) -> Backend:
    """Return the backend of a URL scheme, from this package or from an installed distribution.

    Args:
        scheme: the part of the URL before ``://``.

    Raises:
        InvalidUrlError: no backend has this scheme; the error lists the known schemes.
        BackendLoadError: the backend cannot be loaded, or two distributions register the scheme.

    Example:
        >>> find_backend("file").kind
        'file'
    """
    # Only successful lookups are cached, so that a distribution that is installed later is found.
    return _loaded(_entry_point(scheme))


@cache
def _loaded(entry: EntryPoint) -> Backend:
    try:
        backend = entry.load()()
    except Exception as error:
        raise BackendLoadError(
            f"the backend of {entry.name}:// cannot be loaded: {_shown(entry)} raises {type(error).__name__}: {error}",
            remedy="Install what it needs, and point it at a class that extends stream_consumers.Backend and has a "
            "constructor without arguments.",
        ) from error
    if not isinstance(backend, Backend) or not isinstance(getattr(backend, "consumer_modes", None), Modes):
        raise BackendLoadError(
            f"the backend of {entry.name}:// cannot be used: {_shown(entry)} creates a {type(backend).__name__}",
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
            f"no backend has the URL scheme {scheme!r}",
            remedy=f"Use one of: {', '.join(known)}; or install a package that registers one.",
        )
    if len(found) > 1:
        raise BackendLoadError(
            f"{scheme}:// has {len(found)} backends: {'; '.join(_shown(entry) for entry in found.values())}",
            remedy="Uninstall all but one of these packages.",
        )
    return next(iter(found.values()))


def _shown(entry: EntryPoint) -> str:
    package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist else ""
    return f"the entry point {entry.value!r}{package}"
