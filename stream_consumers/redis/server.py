"""A Redis server or cluster: its shards, facts of its streams, reading them, and noticing that one was deleted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import redis

from stream_consumers.client_config import ClientConfig, resolve
from stream_consumers.display import counted
from stream_consumers.errors import (
    AccessDeniedError,
    InvalidUrlError,
    StreamAssetsError,
    StreamNotFoundError,
    StreamRemovedError,
    UnsupportedError,
)
from stream_consumers.messages import WILDCARD, Shard, decode_key
from stream_consumers.redis.client import check_redis_options, explain, new_client
from stream_consumers.redis.entries import (
    RawEntry,
    id_order,
    is_numbered,
    numbered_key,
    pattern_of_shards,
    printable_key,
    sequence_after,
    shard_of,
    to_id,
    to_sequence,
)
from stream_consumers.redis.scripts import COUNT
from stream_consumers.urls import StreamUrl

REPLY_SECONDS = 15.0
MESSAGE_FIELD = "msg"
PAGE_SIZE = 1000
# XINFO STREAM returns the first and the last entry with their payloads, so that few keys are asked for at once.
FACTS_PAGE_SIZE = 100
COUNT_PAGE_SIZE = 5000
MAX_COUNT_PAGES = 400
CLUSTER_WAIT_SECONDS = 0.01
REMOVAL_CHECK_SECONDS = 5.0
# The most streams that one look is at; with more of them, it takes several.
REMOVAL_CHECK_STREAMS = 1000
_NO_ID = "0-0"
Command = tuple[object, ...]
"""The words of a command; the second one is a key."""


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """What XINFO STREAM says.

    Args:
        first: the first sequence that exists; ``None`` if the stream is empty.
        last: the last one that exists.
        end: the sequence behind the last one ever added.
        length: entries that exist.
        added: entries ever added; ``None`` before Redis 7.
        deleted: the highest sequence that was deleted, 0 if none was, trimming aside; ``None`` before Redis 7.
    """

    first: int | None
    last: int | None
    end: int
    length: int
    added: int | None
    deleted: int | None

    @property
    def first_or_end(self) -> int:
        """Entries before it are gone: the first sequence that exists, or the end of an empty stream."""
        return self.end if self.first is None else self.first

    @property
    def removed(self) -> int | None:
        """Entries that were trimmed or deleted; ``None`` before Redis 7."""
        return None if self.added is None else self.added - self.length


class StreamProgress(NamedTuple):
    """What a stream can only gain.

    Args:
        last: the last id that it has made, which it remembers when entries are trimmed.
        added: entries ever added; ``None`` where that is unknown.
    """

    last: str
    added: int | None

    def has_regressed(self, before: StreamProgress) -> bool:
        """Whether something is gone that was there ``before``: then it is another stream.

        Example:
            >>> before = StreamProgress("9-0", 2)
            >>> StreamProgress("10-0", 3).has_regressed(before), StreamProgress("10-0", 1).has_regressed(before)
            (False, True)
        """
        is_fewer = self.added is not None and before.added is not None and self.added < before.added
        return is_fewer or id_order(self.last) < id_order(before.last)


class RedisConnection:
    """The server of a URL.

    Args:
        url: ``redis://host:6379/orders``, ``rediss://`` for TLS.
        client: arguments of ``redis.Redis`` (``username``, ``password``, ``db``, ``ssl_ca_certs``, …), and our own:
            ``message_field`` (``msg``), ``cluster`` (false), ``sentinel_service`` (with ``sentinel_username`` and
            ``sentinel_password``: the URL names Sentinels), and the fields of
            :class:`stream_consumers.redis.client.ClaimPolicy`.

    Raises:
        InvalidUrlError: credentials in the URL, or several nodes without ``cluster``.
        InvalidOptionError: an option that this project decides.
    """

    def __init__(self, url: str | StreamUrl, client: ClientConfig | None = None) -> None:
        url = StreamUrl.parse(url)
        url.check_servers()
        check_redis_options(client or {})
        self.url = url
        self.answer_seconds = REPLY_SECONDS
        self.client_options = resolve(client or {})
        self.message_field = str(self.client_options.get("message_field", MESSAGE_FIELD)).encode()
        self.is_cluster = str(self.client_options.get("cluster", False)).lower() == "true"
        if len(url.nodes) > 1 and not self.is_cluster and "sentinel_service" not in self.client_options:
            raise InvalidUrlError(
                f"{url} names several servers",
                remedy="Name one, or set the client option cluster or sentinel_service.",
            )
        self._keys: dict[Shard, bytes] = {}

    @cached_property
    def connection(self) -> Any:
        """The client for commands that answer at once."""
        return self.new_connection(self.answer_seconds)

    def new_connection(self, reply_seconds: float) -> Any:
        """A client of its own, for requests that block up to ``reply_seconds``."""
        return new_client(self.url, self.client_options, reply_seconds=reply_seconds, is_cluster=self.is_cluster)

    def check(self) -> None:
        """Check that the server answers.

        Raises:
            BrokerUnavailableError, AccessDeniedError: as the server says.
        """
        try:
            with self.explained("connecting"):
                self.connection.ping()
        finally:
            self.close()

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Maps errors of the Redis client within to StreamAssetsError."""
        try:
            yield
        except redis.RedisError as error:
            raise self.error(error, f"{what} at {self.url}") from None

    def error(self, error: redis.RedisError, what: str) -> StreamAssetsError:
        """An error of the Redis client as StreamAssetsError; see :func:`stream_consumers.redis.client.explain`."""
        return explain(error, what=what, options=self.client_options)

    def shards(self) -> list[Shard]:
        """The shards of the URL's streams: keys ``stream:0``, ``stream:1``, …, else the key ``stream`` alone.

        With the wildcard, of all streams of the database.

        Raises:
            UnsupportedError: a stream that is named has numbered keys, and entries in the plain one, too.
        """
        self._keys = {}
        if WILDCARD in self.url.streams:
            self._look_up_all()
        else:
            for stream in self.url.required_streams():
                self._look_up(stream)
                self._check_plain_key(stream)
        return sorted(self._keys)

    def key(self, shard: Shard) -> bytes:
        """The key of a shard."""
        if not any(known.stream == shard.stream for known in self._keys):
            self._look_up(shard.stream)
        has_numbers = shard.id or any(s.stream == shard.stream and is_numbered(key, s) for s, key in self._keys.items())
        return self._keys.get(shard, numbered_key(shard) if has_numbers else decode_key(shard.stream))

    def _look_up(self, stream: str) -> None:
        with self.explained(f"looking for the shards of {stream!r}"):
            for key in self.connection.scan_iter(match=pattern_of_shards(stream), count=PAGE_SIZE, _type="STREAM"):
                shard = shard_of(key)
                if shard.stream == stream:
                    self._keys[shard] = key
        if not any(shard.stream == stream for shard in self._keys):
            self._keys[Shard(stream, 0)] = decode_key(stream)

    def _check_plain_key(self, stream: str) -> None:
        """Refuse entries in the plain key of a stream that has numbered ones: they would not be read."""
        plain = decode_key(stream)
        numbered = [printable_key(key) for shard, key in self._keys.items() if shard.stream == stream and key != plain]
        if not numbered:
            return
        # A client without a right to the plain key is not refused.
        length = 0
        with suppress(AccessDeniedError), self.explained(f"looking at {printable_key(plain)}"):
            length = self.connection.xlen(plain) if self.connection.type(plain) == b"stream" else 0
        if length:
            raise UnsupportedError(
                f"{self.url} has {counted(length, 'entry', 'entries')} in the key {printable_key(plain)}, which are "
                f"not read because {stream!r} has keys with numbers, too: {', '.join(sorted(numbered)[:3])}",
                remedy=f"Move the entries to a key with a number, or rename or delete the key {printable_key(plain)}.",
                plain_key=printable_key(plain),
                numbered_keys=sorted(numbered)[:3],
                entries=length,
            )

    def _look_up_all(self) -> None:
        with self.explained("looking for the streams"):
            found = {key: shard_of(key) for key in self.connection.scan_iter(count=PAGE_SIZE, _type="STREAM")}
        numbered = {key: shard for key, shard in found.items() if is_numbered(key, shard)}
        streams = {shard.stream for shard in numbered.values()}
        # With numbered keys, the plain one is none of the shards.
        self._keys = {shard: key for key, shard in found.items() if key in numbered or shard.stream not in streams}
        for stream in streams & {shard.stream for key, shard in found.items() if key not in numbered}:
            self._check_plain_key(stream)

    def facts(self, shard: Shard) -> StreamFacts | None:
        """What the stream of a shard holds; ``None`` if there is no such key."""
        return self.facts_of([shard])[shard]

    def facts_of(self, shards: Iterable[Shard]) -> Mapping[Shard, StreamFacts | None]:
        """The same of many, in few round trips."""
        keys = {shard: self.key(shard) for shard in shards}
        infos = self._stream_infos(list(keys.values()))
        return {shard: None if info is None else _facts(info) for shard, info in zip(keys, infos)}

    def last_id(self, key: bytes) -> str:
        """The last id that a stream has made; ``0-0`` if there is no such key."""
        (info,) = self._stream_infos([key])
        return "0-0" if info is None else _text(info["last-generated-id"])

    def progress(self, keys: Sequence[bytes]) -> list[StreamProgress | None]:
        """What these streams have come to, in few round trips; ``None`` for a key that is not there."""
        return [
            None if info is None else StreamProgress(_text(info["last-generated-id"]), _added(info))
            for info in self._stream_infos(keys)
        ]

    def _stream_infos(self, keys: Sequence[bytes]) -> list[dict[str, Any] | None]:
        words = [("XINFO STREAM", key) for key in keys]
        return [
            self._stream_info(key, answer)
            for key, answer in zip(keys, self.answers(words, "looking at the streams", page_size=FACTS_PAGE_SIZE))
        ]

    def _stream_info(self, key: bytes, answer: Any) -> dict[str, Any] | None:
        try:
            with self.explained(f"asking for {printable_key(key)}"):
                if isinstance(answer, redis.RedisError):
                    raise answer
        except StreamNotFoundError:
            return None
        return _as_mapping(answer)

    def answers(self, commands: Sequence[Command], what: str, *, page_size: int = PAGE_SIZE) -> Iterator[Any]:
        """What the server answers to commands that it is sent without waiting; errors are among the answers.

        Args:
            commands: each with its words; the second is a key.
            what: is done, for the message.
            page_size: how many to send at once.
        """
        for begin in range(0, len(commands), page_size):
            with self.explained(what):
                pipeline = self.connection.pipeline(transaction=False)
                for words in commands[begin : begin + page_size]:
                    pipeline.execute_command(*words)
                found = pipeline.execute(raise_on_error=False)
            yield from found

    def replies(self, commands: Sequence[Command], what: str, *, page_size: int = PAGE_SIZE) -> Iterator[Any]:
        """The same where no command may fail.

        Raises:
            StreamAssetsError: the first error among the answers.
        """
        for answer in self.answers(commands, what, page_size=page_size):
            with self.explained(what):
                if isinstance(answer, redis.RedisError):
                    raise answer
            yield answer

    def run(self, script: str, keys: Sequence[bytes], arguments: Sequence[object], what: str) -> Any:
        """Run a script of :mod:`stream_consumers.redis.scripts`; ``what`` is done, for the message."""
        registered: Any = self.connection.register_script(script)
        with self.explained(what):
            return registered(keys=keys, args=arguments)

    def count(self, shard: Shard, start: int, end: int, *, length: int | None = None) -> int:
        """How many entries there are from ``start`` up to ``end``: counted by the server, page by page.

        Args:
            shard: where.
            start: the first sequence.
            end: the sequence behind the last one.
            length: entries in the stream; the answer if counting takes too long. Without it all are counted.
        """
        found: int = 0
        place: str | None = to_id(start)
        pages = 0
        while place is not None:
            if length is not None and pages == MAX_COUNT_PAGES:
                return length
            arguments = [place, to_id(end - 1), COUNT_PAGE_SIZE]
            count, last = self.run(COUNT, [self.key(shard)], arguments, f"counting entries of {shard}")
            found, pages = found + count, pages + 1
            place = f"({last.decode()}" if count == COUNT_PAGE_SIZE else None
        return found

    def read(
        self, connection: Any, command: Sequence[object], after: Mapping[bytes, str], *, seconds: float
    ) -> list[tuple[bytes, list[RawEntry]]]:
        """XREAD or XREADGROUP of several streams; on a cluster one after the other, since their keys are apart.

        Args:
            connection: of :meth:`new_connection`, so that waiting holds nothing else back.
            command: the words before STREAMS, without BLOCK.
            after: per key, the id to read behind.
            seconds: how long to wait for one entry; 0 does not wait.

        Returns:
            Per key with entries, these.
        """
        deadline = time.monotonic() + seconds
        name, *words = command
        while True:
            # BLOCK 0 would mean for ever.
            block = ["BLOCK", max(1, round(seconds * 1000))] if seconds and not self.is_cluster else []
            reads = [{key: entry_id} for key, entry_id in after.items()] if self.is_cluster else [after]
            found: list[tuple[bytes, list[RawEntry]]] = []
            for read in reads:
                with self.explained("reading"):
                    reply = connection.execute_command(name, *words, *block, "STREAMS", *read, *read.values())
                found += list(reply.items() if isinstance(reply, Mapping) else reply or ())
            left = deadline - time.monotonic()
            if found or not self.is_cluster or left <= 0:
                return found
            time.sleep(min(left, CLUSTER_WAIT_SECONDS))

    def identities(self) -> Mapping[str, str]:
        """Redis has no fingerprint of a stream: a recreated one is detected by an end below the position."""
        return {stream: "redis" for stream in sorted(self.url.required_streams())}

    def close(self) -> None:
        """Close the connection."""
        if "connection" in self.__dict__:
            self.connection.close()


def _facts(info: Mapping[str, Any]) -> StreamFacts:
    first, last = info.get("first-entry"), info.get("last-entry")
    return StreamFacts(
        first=to_sequence(first[0]) if first else None,
        last=to_sequence(last[0]) if last else None,
        end=sequence_after(info["last-generated-id"]),
        length=int(info["length"]),
        added=_added(info),
        deleted=to_sequence(info["max-deleted-entry-id"]) if "max-deleted-entry-id" in info else None,
    )


def _added(info: Mapping[str, Any]) -> int | None:
    return int(info["entries-added"]) if "entries-added" in info else None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _as_mapping(raw: Any) -> dict[str, Any]:
    """A reply of names and values, which the client may have made a mapping already."""
    pairs = raw.items() if isinstance(raw, Mapping) else zip(raw[::2], raw[1::2])
    return {_text(name): value for name, value in pairs}


class RemovalDetector:
    """What is known of the streams that a reader goes through by position. Not thread-safe.

    Args:
        server: where they are.
    """

    def __init__(self, server: RedisConnection) -> None:
        self._server = server
        self._recorded: dict[Shard, StreamProgress] = {}
        self._next_check = time.monotonic() + REMOVAL_CHECK_SECONDS
        self._checked = 0
        self._removed: StreamRemovedError | None = None

    def record(self, shard: Shard, last: str) -> None:
        """A stream has got to an id, at least."""
        seen = self._recorded.get(shard, StreamProgress(last, None))
        self._recorded[shard] = seen._replace(last=max(seen.last, last, key=id_order))

    def reset(self, shards: Iterable[Shard] | None = None) -> None:
        """Whatever these streams are now is right; all of them by default."""
        for shard in list(self._recorded) if shards is None else shards:
            self._recorded.pop(shard, None)
        self._removed = None

    def check(self, keys: Mapping[Shard, bytes], *, now: bool = False) -> None:
        """Look at streams, unless the last look was a moment ago.

        Args:
            keys: their keys.
            now: look in any case, at all of them.

        Raises:
            StreamRemovedError: one was deleted since it was seen; from then on at each call.
        """
        if self._removed is None and (now or time.monotonic() >= self._next_check):
            self._next_check = time.monotonic() + REMOVAL_CHECK_SECONDS
            self._check_now(keys if now else self._in_turn(keys))
        if self._removed is not None:
            raise self._removed

    def _in_turn(self, keys: Mapping[Shard, bytes]) -> Mapping[Shard, bytes]:
        shards = list(keys)
        begin = self._checked % max(1, len(shards))
        chosen = (shards[begin:] + shards[:begin])[:REMOVAL_CHECK_STREAMS]
        self._checked = begin + len(chosen)
        return {shard: keys[shard] for shard in chosen}

    def _check_now(self, keys: Mapping[Shard, bytes]) -> None:
        for (shard, key), there in zip(keys.items(), self._server.progress(list(keys.values()))):
            seen = self._recorded.get(shard)
            if there is not None and (seen is None or not there.has_regressed(seen)):
                self._recorded[shard] = there
            elif seen is not None and seen.last != _NO_ID:
                what = "was deleted and made again" if there else "was deleted"
                self._removed = StreamRemovedError(
                    f"the stream {printable_key(key)} at {self._server.url} {what} while it was read",
                    remedy="What had not been read is lost. Rewind to the beginning, or make a new consumer, to read "
                    "what there is now.",
                    last_id=seen.last,
                    last_id_now=there.last if there else None,
                )
                return
