"""A Redis server or cluster: its shards, facts about its streams, reads, and detection of deleted streams."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import redis
from redis.exceptions import RedisClusterException

from stream_consumers.client_config import ClientConfig, resolve
from stream_consumers.display import counted
from stream_consumers.errors import (
    AccessDeniedError,
    DataLossError,
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
    id_range,
    is_numbered,
    numbered_key,
    pattern_of_shards,
    printable_key,
    sequence_after,
    sequence_up_to,
    shard_of,
    to_sequence,
)
from stream_consumers.redis.scripts import COUNT
from stream_consumers.urls import StreamUrl

REPLY_SECONDS = 15.0
MESSAGE_FIELD = "msg"
PAGE_SIZE = 1000
# XINFO STREAM returns the first and the last entry with their payloads, so a page has few keys.
FACTS_PAGE_SIZE = 100
COUNT_PAGE_SIZE = 5000
# How often entries are counted if other clients remove some meanwhile.
LOOK_TRIES = 5
MAX_COUNT_PAGES = 400
# Entries after a position that are counted one by one at each look at a stream, even if there is a count of the reads.
EXACT_COUNT = 10_000
CLUSTER_WAIT_SECONDS = 0.01
REMOVAL_CHECK_SECONDS = 5.0
# The most streams of one check for removals; with more streams, a full round takes several checks.
REMOVAL_CHECK_STREAMS = 1000
_NO_ID = "0-0"
Command = tuple[object, ...]
"""The words of a command; the second one is a key."""


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """The result of XINFO STREAM.

    Args:
        first: the first existing sequence; ``None`` if the stream is empty.
        last: the last existing sequence; ``None`` if the stream is empty.
        end: the sequence after the last one ever added.
        length: the number of existing entries.
        added: the number of entries ever added; ``None`` before Redis 7.
        deleted: the highest deleted sequence, not counting trimmed ones; 0 if none, ``None`` before Redis 7.
    """

    first: int | None
    last: int | None
    end: int
    length: int
    added: int | None
    deleted: int | None

    @property
    def first_or_end(self) -> int:
        """The first existing sequence, or the end of an empty stream; all entries before it are removed."""
        return self.end if self.first is None else self.first

    @property
    def removed(self) -> int | None:
        """The number of trimmed or deleted entries; ``None`` before Redis 7."""
        return None if self.added is None else self.added - self.length

    def held_from(self, position: int) -> int | None:
        """Return the number of entries from a position on; ``None`` if they have to be counted."""
        if self.first_or_end >= position:
            return self.length
        return 0 if position >= self.end else None

    def is_complete_from(self, position: int) -> bool:
        """Return whether no entry from a position on was removed: trimming removes the first ones, deleting any."""
        return self.first_or_end <= position and (self.deleted or 0) < position


class Look(NamedTuple):
    """A stream at one moment.

    Args:
        facts: the facts at that moment.
        least: the least number of entries that it had from a position on.
        most: the greatest number; not the same only if other clients removed entries during each count.
    """

    facts: StreamFacts
    least: int
    most: int


class StreamProgress(NamedTuple):
    """The values of a stream that never decrease.

    Args:
        last: the last id that the stream has generated, which trimming does not change.
        added: the number of entries ever added; ``None`` if unknown.
    """

    last: str
    added: int | None

    def has_regressed(self, before: StreamProgress) -> bool:
        """Return whether a value is less than ``before``: then the stream was replaced by another one.

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
        client: arguments of ``redis.Redis`` (``username``, ``password``, ``db``, ``ssl_ca_certs``, …), and options of
            this project: ``message_field`` (default ``msg``), ``cluster`` (default false), ``sentinel_service`` (the
            URL then names Sentinels; with ``sentinel_username`` and ``sentinel_password``), and the fields of
            :class:`stream_consumers.redis.client.ClaimPolicy`.

    Raises:
        InvalidUrlError: the URL contains credentials, or several nodes without ``cluster`` or ``sentinel_service``.
        InvalidOptionError: a reserved option is set.
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
                remedy="Name one server, or set the client option cluster or sentinel_service.",
            )
        self._keys: dict[Shard, bytes] = {}

    @cached_property
    def connection(self) -> Any:
        """The client for commands that do not block."""
        return self.new_connection(self.answer_seconds)

    def new_connection(self, reply_seconds: float) -> Any:
        """Create a separate client, for requests that block up to ``reply_seconds``."""
        return new_client(self.url, self.client_options, reply_seconds=reply_seconds, is_cluster=self.is_cluster)

    def check(self) -> None:
        """Check that the server answers.

        Raises:
            BrokerUnavailableError, AccessDeniedError: the server returned an error.
        """
        try:
            with self.explained("connecting"):
                self.connection.ping()
        finally:
            self.close()

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Map errors of the Redis client within the context to StreamAssetsError."""
        try:
            yield
        except redis.RedisError as error:
            raise self.error(error, f"{what} at {self.url}") from None
        except RedisClusterException as error:
            # It is not a RedisError: no node answered as a cluster.
            raise self.error(redis.ConnectionError(str(error)), f"{what} at {self.url}") from None

    def error(self, error: redis.RedisError, what: str) -> StreamAssetsError:
        """Map an error to a StreamAssetsError; see :func:`stream_consumers.redis.client.explain`."""
        return explain(error, what=what, options=self.client_options)

    def shards(self) -> list[Shard]:
        """Return the shards of the URL's streams: the keys ``stream:0``, ``stream:1``, …, or the single key ``stream``.

        With the wildcard, return the shards of all streams of the database.

        Raises:
            UnsupportedError: a stream has numbered keys, and also entries in its plain key.
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
        """Return the key of a shard."""
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
        """Raise if a stream with numbered keys has entries in its plain key: they would not be read."""
        plain = decode_key(stream)
        numbered = [printable_key(key) for shard, key in self._keys.items() if shard.stream == stream and key != plain]
        if not numbered:
            return
        # Ignore the check if the client has no access to the plain key.
        length = 0
        with suppress(AccessDeniedError), self.explained(f"looking at {printable_key(plain)}"):
            length = self.connection.xlen(plain) if self.connection.type(plain) == b"stream" else 0
        if length:
            raise UnsupportedError(
                f"{self.url} has {counted(length, 'entry', 'entries')} in the key {printable_key(plain)}, which are "
                f"not read because {stream!r} also has numbered keys: {', '.join(sorted(numbered)[:3])}",
                remedy=f"Move the entries to a numbered key, or rename or delete the key {printable_key(plain)}.",
                plain_key=printable_key(plain),
                numbered_keys=sorted(numbered)[:3],
                entries=length,
            )

    def shards_by_key(self) -> Mapping[bytes, Shard]:
        """Return the keys of all streams of the database, each with the shard that it would be."""
        with self.explained("looking for the streams"):
            return {key: shard_of(key) for key in self.connection.scan_iter(count=PAGE_SIZE, _type="STREAM")}

    def _look_up_all(self) -> None:
        found = self.shards_by_key()
        numbered = {key: shard for key, shard in found.items() if is_numbered(key, shard)}
        streams = {shard.stream for shard in numbered.values()}
        # If a stream has numbered keys, its plain key is not a shard.
        self._keys = {shard: key for key, shard in found.items() if key in numbered or shard.stream not in streams}
        for stream in streams & {shard.stream for key, shard in found.items() if key not in numbered}:
            self._check_plain_key(stream)

    def facts(self, shard: Shard) -> StreamFacts | None:
        """Return facts about the stream of a shard; ``None`` if its key does not exist."""
        return self.facts_of([shard])[shard]

    def facts_of(self, shards: Iterable[Shard]) -> Mapping[Shard, StreamFacts | None]:
        """Return the facts about many shards, in few round trips."""
        keys = {shard: self.key(shard) for shard in shards}
        infos = self._stream_infos(list(keys.values()))
        return {shard: None if info is None else _facts(info) for shard, info in zip(keys, infos)}

    def last_id(self, key: bytes) -> str:
        """Return the last id that a stream has generated; ``0-0`` if its key does not exist."""
        (info,) = self._stream_infos([key])
        return "0-0" if info is None else _text(info["last-generated-id"])

    def progress(self, keys: Sequence[bytes]) -> list[StreamProgress | None]:
        """Return the progress of these streams, in few round trips; ``None`` for a key that does not exist."""
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
        """Send commands in pipelines, and yield the replies; errors are among them.

        Args:
            commands: the commands.
            what: the operation, for the error message.
            page_size: the number of commands in a pipeline.
        """
        for begin in range(0, len(commands), page_size):
            with self.explained(what):
                found = self._pipelined(commands[begin : begin + page_size])
            yield from found

    def replies(self, commands: Sequence[Command], what: str, *, page_size: int = PAGE_SIZE) -> Iterator[Any]:
        """Send commands in pipelines, and yield the replies; raise if a command fails.

        Raises:
            StreamAssetsError: the first error among the replies.
        """
        for answer in self.answers(commands, what, page_size=page_size):
            with self.explained(what):
                if isinstance(answer, redis.RedisError):
                    raise answer
            yield answer

    def add(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands that add entries, each at most once, and return the replies; errors are among them.

        redis-py repeats the commands of a pipeline to a cluster if the connection is lost, although they may have been
        executed. So a cluster gets them one by one.

        Raises:
            redis.RedisError: it is unknown which commands were executed.
        """
        if not self.is_cluster:
            return self._pipelined(commands)
        found: list[Any] = []
        for words in commands:
            try:
                found.append(self.connection.execute_command(*words))
            except (redis.ConnectionError, redis.TimeoutError, RedisClusterException) as error:
                lost = redis.ConnectionError(str(error))
                return [*found, *(lost for _ in commands[len(found) :])]
            except redis.RedisError as error:
                found.append(error)
        return found

    def _pipelined(self, commands: Iterable[Command]) -> list[Any]:
        pipeline = self.connection.pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words)
        found: list[Any] = pipeline.execute(raise_on_error=False)
        return found

    def run(self, script: str, keys: Sequence[bytes], arguments: Sequence[object], what: str) -> Any:
        """Run a script of :mod:`stream_consumers.redis.scripts`; ``what`` names the operation in errors."""
        registered: Any = self.connection.register_script(script)
        with self.explained(what):
            return registered(keys=keys, args=arguments)

    def count(self, shard: Shard, start: int, end: int, *, length: int | None = None) -> int:
        """Count the entries in ``[start, end)``; the server counts them page by page.

        Args:
            shard: the shard.
            start: the first sequence.
            end: the sequence after the last one.
            length: the length of the stream, which is returned if counting takes too long; without it, all entries are
                counted.
        """
        found: int = 0
        place: str | None
        place, last_id = id_range(start, end)
        pages = 0
        while place is not None:
            if length is not None and pages == MAX_COUNT_PAGES:
                return length
            arguments = [place, last_id, COUNT_PAGE_SIZE]
            count, last, are_all = self.run(COUNT, [self.key(shard)], arguments, f"counting entries of {shard}")
            found, pages = found + count, pages + 1
            place = None if are_all else f"({last.decode()}"
        return found

    def look(self, shard: Shard, position: int, facts: StreamFacts) -> Look:
        """Return the facts about a stream and the number of its entries from a position on, at one moment.

        Whether entries are missing follows from both. If they were of two moments, entries that another client removes
        in between would appear to be missing in one and not in the other.

        Args:
            shard: the shard.
            position: the first sequence.
            facts: the facts that are known; newer ones are used if entries have to be counted, and some were removed.

        Raises:
            DataLossError: the stream was deleted.
        """
        if (held := facts.held_from(position)) is not None:
            return Look(facts, held, held)
        if facts.is_complete_from(position):
            held = self.count(shard, position, facts.end)
            now = self.facts(shard)
            if now is not None and now.is_complete_from(position):
                return Look(facts, held, held)
        counted = 0
        for _ in range(LOOK_TRIES):
            look = self._look(shard, position)
            counted += look.most
            if look.least == look.most or counted > MAX_COUNT_PAGES * COUNT_PAGE_SIZE:
                break
        return look

    def _look(self, shard: Shard, position: int) -> Look:
        """Count from a position to the end, between facts about the stream.

        The server usually runs the commands of a pipeline without others in between, and the facts show whether it did.
        Nothing after the highest deleted entry was removed, so the moment is that of the page with this entry, and only
        up to then nothing may be removed.
        """
        key, found = self.key(shard), 0
        pages: list[tuple[int, StreamFacts]] = []
        place, _ = id_range(position, position)
        while True:
            words = [("XINFO STREAM", key), ("EVAL", COUNT, 1, key, place, "+", COUNT_PAGE_SIZE), ("XINFO STREAM", key)]
            try:
                before, (count, last, are_all), after = self.replies(words, f"counting entries of {shard}")
            except StreamNotFoundError as error:
                raise DataLossError(
                    f"{shard} of {self.url} was deleted while its entries were counted", remedy="Run again to see why."
                ) from error
            begun, facts = _facts(_as_mapping(before)), _facts(_as_mapping(after))
            found += count
            if not pages:
                first = begun
            if (held := facts.held_from(position)) is not None:
                return Look(facts, held, held)
            if are_all:
                break
            place = f"({last.decode()}"
            pages.append((sequence_up_to(last), facts))
        deleted = facts.deleted or 0
        moment = next((then for end, then in pages if end >= deleted), facts)
        found -= (facts.added or 0) - (moment.added or 0)
        added = (facts.added or 0) - (begun.added or 0)
        # While there are entries before the position, only deletions remove later ones.
        removed = (moment.removed or 0) - (first.removed or 0) if deleted >= position else 0
        return Look(moment, max(0, found - abs(removed)), found + abs(added))

    def count_unread(self, shard: Shard, position: int, facts: StreamFacts, read: int | None) -> int:
        """Count the entries from a position on; never 0 while there is one.

        The result is exact if the count of the reads leaves few entries, because that count may be too high: another
        client may have set it, or the stream is a copy. Otherwise it is an upper bound.

        Args:
            shard: the shard.
            position: the first sequence.
            facts: the facts about the stream.
            read: the count of the entries added before the position, if known.
        """
        if facts.last is None or facts.last < position:
            return 0
        if facts.first_or_end >= position:
            return facts.length
        left = 0 if facts.added is None or read is None else facts.added - read
        if left >= min(EXACT_COUNT, facts.length):
            return min(left, facts.length)
        return self.count(shard, position, facts.end, length=facts.length)

    def read(
        self, connection: Any, command: Sequence[object], after: Mapping[bytes, str], *, seconds: float
    ) -> list[tuple[bytes, list[RawEntry]]]:
        """Run XREAD or XREADGROUP on several streams; on a cluster one after the other, because the slots differ.

        Args:
            connection: a client from :meth:`new_connection`, so that waiting blocks no other command.
            command: the words before STREAMS, without BLOCK.
            after: for each key, the id to read after.
            seconds: how long to wait for an entry; 0 does not wait.

        Returns:
            The entries of each key that has some.
        """
        deadline = time.monotonic() + seconds
        name, *words = command
        while True:
            # BLOCK 0 would wait forever.
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
        """Return constants: Redis has no fingerprints, so only an end below the position shows a recreated stream."""
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
        deleted=sequence_up_to(info["max-deleted-entry-id"]) if "max-deleted-entry-id" in info else None,
    )


def _added(info: Mapping[str, Any]) -> int | None:
    return int(info["entries-added"]) if "entries-added" in info else None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _as_mapping(raw: Any) -> dict[str, Any]:
    """Convert a reply of names and values, which the client may have converted already, to a mapping."""
    pairs = raw.items() if isinstance(raw, Mapping) else zip(raw[::2], raw[1::2])
    return {_text(name): value for name, value in pairs}


class RemovalDetector:
    """Detects that streams which are read by position were deleted. Not thread-safe.

    Args:
        server: the server of the streams.
    """

    def __init__(self, server: RedisConnection) -> None:
        self._server = server
        self._recorded: dict[Shard, StreamProgress] = {}
        self._next_check = time.monotonic() + REMOVAL_CHECK_SECONDS
        self._checked = 0
        self._removed: StreamRemovedError | None = None

    def record(self, shard: Shard, last: str) -> None:
        """Record that a stream has reached at least this id."""
        seen = self._recorded.get(shard, StreamProgress(last, None))
        self._recorded[shard] = seen._replace(last=max(seen.last, last, key=id_order))

    def reset(self, shards: Iterable[Shard] | None = None) -> None:
        """Drop the recorded progress of these streams, by default of all, and accept their current state."""
        for shard in list(self._recorded) if shards is None else shards:
            self._recorded.pop(shard, None)
        self._removed = None

    def check(self, keys: Mapping[Shard, bytes], *, now: bool = False) -> None:
        """Check whether streams were removed, at most every :data:`REMOVAL_CHECK_SECONDS`.

        Args:
            keys: the keys of the streams.
            now: check all streams now, whenever the last check was.

        Raises:
            StreamRemovedError: a stream was deleted since its progress was recorded; each later call raises it, too.
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
                what = "was deleted and created again" if there else "was deleted"
                self._removed = StreamRemovedError(
                    f"the stream {printable_key(key)} at {self._server.url} {what} while it was read",
                    remedy="Unread messages are lost. Rewind to the beginning, or create a new consumer, to read the "
                    "current stream.",
                    last_id=seen.last,
                    last_id_now=there.last if there else None,
                )
                return
