"""What consumers of Redis entries do alike: buffers for many streams, and a life that can begin again."""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import DeadLetterObserver
from stream_consumers.errors import InvalidOptionError, StreamEndedError
from stream_consumers.messages import DeadLetter, Message, Shard
from stream_consumers.redis.entries import read_reply
from stream_consumers.redis.ids import is_shard_id
from stream_consumers.redis.server import RawEntry, RedisServer
from stream_consumers.urls import StreamUrl

BLOCK_SECONDS = 0.1
_IDENTIFIER = re.compile(r"\d+(-\d+)?\Z")
Self = TypeVar("Self", bound="EntryReader")


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a Redis stream, as it is and as a message.

    Args:
        id: its id, ``milliseconds-number``.
        fields: names and values, in order; a name may occur twice.
        message: what :func:`stream_consumers.redis.entries.read_entry` makes of it; a dead letter for an entry that
            does not have the message field once.

    Example:
        >>> message = Message(Shard("orders"), 1 << 16, 1, b"{}")
        >>> dict(Entry("1-0", ((b"msg", b"{}"), (b"source", b"web")), message).fields)
        {b'msg': b'{}', b'source': b'web'}
    """

    id: str
    fields: tuple[tuple[bytes, bytes], ...]
    message: Message | DeadLetter


@dataclass(frozen=True, slots=True)
class Arrival:
    """An entry in a buffer.

    Args:
        entry: the entry.
        is_trimmed: it was pending, and is not in the stream any more.
        is_pending: it was pending for this member before it was read now.
    """

    entry: Entry
    is_trimmed: bool
    is_pending: bool


class EntryReader(ABC):
    """Reads entries of many streams, one buffer a stream; see the consumers that are made of it.

    Args:
        url: ``redis://host:6379/one,two``; each stream is a Redis key, taken as it is.
        identifiers: per stream, where it starts; the others start where the consumer says.
        buffer_size: entries to fetch ahead, per stream.
        timeout: seconds that :meth:`get_entry` waits by default; without it, and with 0 or less, it does not wait.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.
        on_dead_letter: told of pending entries that were trimmed.
    """

    _words: ClassVar[tuple[str, ...]]
    """Identifiers that are no ids."""

    def __init__(
        self,
        url: StreamUrl,
        *,
        identifiers: Mapping[str, str] | None,
        buffer_size: int,
        timeout: float | None,
        client: ClientConfig | None,
        on_dead_letter: DeadLetterObserver,
    ) -> None:
        self._identifiers: dict[str, str | None] = dict.fromkeys(url.required_streams())
        unknown = sorted(set(identifiers or {}) - set(self._identifiers))
        if unknown:
            raise InvalidOptionError(
                f"identifiers are given for streams that are not read: {', '.join(unknown)}",
                remedy=f"Read are: {', '.join(self._identifiers)}.",
            )
        for name, identifier in (identifiers or {}).items():
            self._identifiers[name] = check_identifier(identifier, self._words)
        if buffer_size < 0:
            raise InvalidOptionError(f"buffer_size={buffer_size} is less than nothing", remedy="Use 0 or more.")
        self._url, self._client, self._on_dead_letter = url, client, on_dead_letter
        self._timeout, self._count = timeout or 0.0, buffer_size + 1
        self._buffers: dict[str, deque[Arrival]] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._is_started = False
        self._server = RedisServer(url, client)

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams that are read."""
        return tuple(self._identifiers)

    def get_entry(self, timeout: float | None = None) -> tuple[str, Entry] | None:
        """The next entry and its stream: of the buffers if there is one, else of the server.

        Args:
            timeout: seconds to wait for one, ``math.inf`` until there is one; the consumer's by default.

        Returns:
            ``None`` if there was none in time (coredis returns a pair of ``None``).

        Raises:
            StreamEndedError: the context was left.
            FormatError: a key holds something else than a stream.
            BrokerUnavailableError: nothing is lost; call it again.
        """
        deadline = time.monotonic() + max(0.0, self._timeout if timeout is None else timeout)
        while True:
            with self._lock:
                self._check_open()
                self._start()
                found = self._take()
                if found is not None:
                    return found
                left = deadline - time.monotonic()
                came = self._fetch(min(BLOCK_SECONDS, max(0.0, left)))
            if not came and left <= 0:
                return None

    def add_stream(self, name: str, identifier: str | None = None) -> bool:
        """Read another stream, too; the others stay where they are.

        Args:
            name: its key.
            identifier: where it starts, as for the consumer.

        Returns:
            False if it is read already; nothing is changed then.

        Raises:
            InvalidOptionError: ``identifier`` is no id.
            GroupNotFoundError: it has no group, which is not made either.
        """
        with self._lock:
            self._check_open()
            if name in self._identifiers:
                return False
            checked = None if identifier is None else check_identifier(identifier, self._words)
            self._start()
            self._join({name: checked})
            self._identifiers[name] = checked
            return True

    def close(self) -> None:
        """Release what is open and forget what is buffered; a waiting :meth:`get_entry` ends."""
        self._closed.set()
        with self._lock:
            self._buffers.clear()
            self._is_started = False
            self._release()
            self._server.close()

    def __iter__(self) -> Iterator[tuple[str, Entry]]:
        """Entries until there is none in time, as in coredis; iterate again to go on."""
        while (found := self.get_entry()) is not None:
            yield found

    def __enter__(self: Self) -> Self:
        with self._lock:
            self._closed.clear()
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # what the consumers differ in

    @abstractmethod
    def _open(self) -> None:
        """Make what is needed to read."""

    @abstractmethod
    def _release(self) -> None:
        """Close what :meth:`_open` made; it may be nothing."""

    @abstractmethod
    def _join(self, identifiers: Mapping[str, str | None]) -> None:
        """Begin to read these streams, all of them or none."""

    @abstractmethod
    def _fetch(self, seconds: float) -> bool:
        """Fill the buffers, waiting at most so long; whether something came."""

    @abstractmethod
    def _hand_out(self, name: str, arrival: Arrival) -> None:
        """The user gets this entry now, or the observer was told of it."""

    # the rest

    def _start(self) -> None:
        if self._is_started:
            return
        self._server = RedisServer(self._url, self._client)
        try:
            self._open()
            self._join(self._identifiers)
        except BaseException:
            self._release()
            self._server.close()
            raise
        self._is_started = True

    def _take(self) -> tuple[str, Entry] | None:
        for name, buffer in self._buffers.items():
            while buffer:
                arrival = buffer[0]
                if arrival.is_trimmed and isinstance(arrival.entry.message, DeadLetter):
                    buffer.popleft()
                    self._on_dead_letter(arrival.entry.message)
                    self._hand_out(name, arrival)
                    continue
                # It stays in the buffer if this fails.
                self._hand_out(name, arrival)
                buffer.popleft()
                return name, arrival.entry
        return None

    def _put(self, name: str, entries: Iterable[RawEntry], *, is_pending: bool = False) -> None:
        shard, field = shard_of(name), self._server.message_field
        buffer = self._buffers.setdefault(name, deque())
        for entry_id, fields in entries:
            words = fields or []
            pairs = tuple(zip(words[::2], words[1::2]))
            entry = Entry(entry_id.decode(), pairs, read_reply(shard, entry_id, fields, field))
            buffer.append(Arrival(entry, is_trimmed=fields is None, is_pending=is_pending))

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StreamEndedError("the consumer was closed", remedy="Enter it again, or create a new one.")


def check_identifier(identifier: str, words: Collection[str]) -> str:
    """Return ``identifier`` if it is the id of an entry, or one of ``words``.

    Raises:
        InvalidOptionError: it is neither.

    Example:
        >>> check_identifier("1700000000000-0", ["$"])
        '1700000000000-0'
    """
    if identifier not in words and not _IDENTIFIER.match(identifier):
        listed = ", ".join(map(repr, words))
        raise InvalidOptionError(
            f"{identifier!r} is not a place in a stream", remedy=f"Write an id like 1700000000000-0, or {listed}."
        )
    return identifier


def shard_of(key: str) -> Shard:
    """The shard that a Redis key is.

    Example:
        >>> shard_of("orders:3"), shard_of("orders")
        (Shard(stream='orders', id=3), Shard(stream='orders', id=0))
    """
    stream, _, tail = key.rpartition(":")
    return Shard(stream, int(tail)) if stream and is_shard_id(tail) else Shard(key)
