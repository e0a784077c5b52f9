"""A Redis server or cluster as this project uses it: keys, stream and group facts, errors in our words."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry

from stream_consumers.client_config import ClientConfig, resolve
from stream_consumers.errors import (
    AccessDeniedError,
    BrokerError,
    BrokerUnavailableError,
    FormatError,
    InvalidOptionError,
    InvalidUrlError,
    StreamAssetsError,
    StreamNotFoundError,
)
from stream_consumers.messages import Shard
from stream_consumers.redis_ids import to_id, to_sequence
from stream_consumers.urls import StreamUrl

DEFAULT_PORT = 6379
CONNECT_SECONDS = 5.0
REPLY_SECONDS = 15.0
MESSAGE_FIELD = "msg"
ACK_CHUNK = 1000
PAGE = 1000
_OWN = {"message_field", "cluster"}
RESERVED = {
    "host": "the URL says which server",
    "port": "the URL says which port",
    "ssl": "the protocol rediss:// says so",
    "decode_responses": "payloads are bytes",
}
_DENIED = ("NOAUTH", "WRONGPASS", "NOPERM", "invalid username-password", "AUTH ")
_WITH_ENTRIES = ("XRANGE", "XREAD", "XREADGROUP", "XCLAIM", "XAUTOCLAIM", "XREVRANGE")
_log = logging.getLogger(__name__)
RawEntry = tuple[bytes, "list[bytes] | None"]
"""An entry as Redis replies it: its id, and names and values in turn; ``None`` where it was trimmed."""


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """What XINFO STREAM says.

    Args:
        first: the first sequence that is there; ``None`` if the stream is empty.
        end: the sequence behind the last one ever added.
        length: entries that are there.
        added: entries ever added; ``None`` before Redis 7.
    """

    first: int | None
    end: int
    length: int
    added: int | None


class RedisServer:
    """The server of a URL.

    Args:
        url: ``redis://host:6379/orders``, ``rediss://`` for TLS.
        client: arguments of ``redis.Redis`` (``username``, ``password``, ``db``, ``ssl_ca_certs``, …), and our own:
            ``message_field`` (``msg``) and ``cluster`` (false).

    Raises:
        InvalidUrlError: credentials in the URL, or several nodes without ``cluster``.
        InvalidOptionError: an option that this project decides.
    """

    def __init__(self, url: StreamUrl, client: ClientConfig | None = None) -> None:
        check_redis_url(url)
        check_redis_options(client or {})
        self.url = url
        self.client_options = resolve(client or {})
        self.message_field = str(self.client_options.get("message_field", MESSAGE_FIELD)).encode()
        self.is_cluster = str(self.client_options.get("cluster", False)).lower() == "true"
        if len(url.nodes) > 1 and not self.is_cluster:
            raise InvalidUrlError(f"{url} names several servers", remedy="Name one, or set the client option cluster.")
        self._keys: dict[Shard, str] = {}

    @cached_property
    def connection(self) -> Any:
        """The client for requests that answer at once; it does not repeat what may have been done."""
        return self.new_connection(REPLY_SECONDS)

    def new_connection(self, reply_seconds: float) -> Any:
        """A client of its own, for requests that block up to ``reply_seconds``."""
        options: dict[str, Any] = {name: v for name, v in self.client_options.items() if name not in _OWN}
        common = {
            "socket_connect_timeout": CONNECT_SECONDS,
            "retry": Retry(NoBackoff(), 0),
            **options,
            "socket_timeout": reply_seconds,
            "ssl": self.url.protocol == "rediss",
        }
        nodes = [_address(node) for node in self.url.nodes]
        if self.is_cluster:
            node: Any = ClusterNode
            made: Any = _Cluster(startup_nodes=[node(host, port) for host, port in nodes], **common)
        else:
            made = redis.Redis(host=nodes[0][0], port=nodes[0][1], **common)
        _keep_entries(made)
        return made

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Errors of Redis within, in our words."""
        try:
            yield
        except redis.RedisError as error:
            raise explain(error, what=f"{what} at {self.url}") from error

    def shards(self) -> list[Shard]:
        """The shards of the URL's streams: keys ``stream:0``, ``stream:1``, …, else the key ``stream`` alone."""
        self._keys = {}
        for stream in self.url.required_streams():
            self._look_up(stream)
        return sorted(self._keys)

    def key(self, shard: Shard) -> str:
        """The key of a shard."""
        if not any(known.stream == shard.stream for known in self._keys):
            self._look_up(shard.stream)
        is_numbered = shard.id or any(known.stream == shard.stream and ":" in key for known, key in self._keys.items())
        return self._keys.get(shard, f"{shard.stream}:{shard.id}" if is_numbered else shard.stream)

    def _look_up(self, stream: str) -> None:
        numbered = {}
        with self.explained(f"looking for the shards of {stream!r}"):
            for key in self.connection.scan_iter(match=f"{stream}:*", count=PAGE):
                tail = key.decode("utf-8", "replace").removeprefix(f"{stream}:")
                if tail.isascii() and tail.isdigit() and str(int(tail)) == tail:
                    numbered[Shard(stream, int(tail))] = f"{stream}:{tail}"
        self._keys |= numbered or {Shard(stream, 0): stream}

    def facts(self, shard: Shard) -> StreamFacts | None:
        """What the stream of a shard holds; ``None`` if there is no such key."""
        try:
            with self.explained(f"asking for {shard}"):
                raw = self.connection.execute_command("XINFO STREAM", self.key(shard))
        except StreamNotFoundError:
            return None
        info = {_text(name): value for name, value in raw.items()} if isinstance(raw, Mapping) else _pairs(raw)
        first = info.get("first-entry")
        return StreamFacts(
            first=to_sequence(first[0]) if first else None,
            end=_behind(info["last-generated-id"]),
            length=int(info["length"]),
            added=int(info["entries-added"]) if "entries-added" in info else None,
        )

    def committed(self, group: str, shard: Shard) -> int | None:
        """The next sequence of a group; ``None`` if the stream has no such group."""
        with self.explained(f"asking for the groups of {shard}"):
            try:
                groups = self.connection.xinfo_groups(self.key(shard))
            except redis.ResponseError as error:
                if "no such key" in str(error):
                    return None
                raise
        for found in groups:
            if _text(found["name"]) == group:
                return _behind(found["last-delivered-id"])
        return None

    def set_position(self, group: str, shard: Shard, position: int, *, entries_read: int | None) -> None:
        """Let the group go on at ``position``; the group is made if it is not there."""
        last = to_id(position - 1) if position > 0 else "0-0"
        count = [] if entries_read is None else ["ENTRIESREAD", entries_read]
        key = self.key(shard)
        with self.explained(f"the position of group {group!r} in {shard}"):
            try:
                self.connection.execute_command("XGROUP SETID", key, group, last, *count)
            except redis.ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                self.connection.execute_command("XGROUP CREATE", key, group, last, *count)

    def pending_below(self, group: str, shard: Shard, position: int) -> Iterator[list[bytes]]:
        """The ids below ``position`` that somebody was given and never acknowledged, in pages."""
        if position <= 1:
            return
        start, end = "-", to_id(position - 1)
        while True:
            with self.explained(f"what is pending in {shard}"):
                try:
                    page = self.connection.xpending_range(self.key(shard), group, start, end, PAGE)
                except redis.ResponseError as error:
                    if "NOGROUP" in str(error):
                        return
                    raise
            if not page:
                return
            ids = [found["message_id"] for found in page]
            yield ids
            start = f"({ids[-1].decode()}"

    def acknowledge(self, group: str, shard: Shard, ids: Sequence[bytes | str]) -> int:
        """XACK in chunks; returns how many were pending."""
        done = 0
        with self.explained(f"acknowledging in {shard}"):
            for begin in range(0, len(ids), ACK_CHUNK):
                done += int(self.connection.xack(self.key(shard), group, *ids[begin : begin + ACK_CHUNK]))
        return done

    def close(self) -> None:
        """Close the connection."""
        if "connection" in self.__dict__:
            self.connection.close()


class _Cluster(RedisCluster):
    """A cluster whose nodes' clients, which read the replies first, leave entries as they are."""

    def get_redis_connection(self, node: ClusterNode) -> Any:
        client: Any = super().get_redis_connection(node)
        _keep_entries(client)
        return client


def check_redis_url(url: StreamUrl) -> None:
    """Refuse credentials in a URL: it shows up in logs and in the UI.

    Raises:
        InvalidUrlError: without repeating them.
    """
    if any("@" in node for node in url.nodes):
        raise InvalidUrlError(
            f"the URL of {','.join(url.streams)!r} has credentials in it",
            remedy="Give them as client options: username, and password from the environment.",
        )


def check_redis_options(client: ClientConfig) -> None:
    """Refuse options that this project decides.

    Raises:
        InvalidOptionError: naming the option and the reason.
    """
    for name, reason in RESERVED.items():
        if name in client:
            raise InvalidOptionError(f"the client option {name!r} cannot be set: {reason}", remedy="Leave it out.")


def explain(error: redis.RedisError, *, what: str) -> StreamAssetsError:
    """A Redis error in our words."""
    said = f"{what}: {error}"
    text = str(error)
    if isinstance(error, redis.AuthenticationError) or any(mark in text for mark in _DENIED):
        return AccessDeniedError(said, remedy="Check the client options username and password, and the ACLs.")
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        return BrokerUnavailableError(
            said, remedy="Check the address and that the server runs; nothing was lost, run again."
        )
    if "no such key" in text:
        return StreamNotFoundError(said, remedy="Check the stream key.")
    if "WRONGTYPE" in text:
        return FormatError(said, remedy="The key holds something else than a stream.")
    return BrokerError(said, remedy="Nothing was lost; run again.")


def _address(node: str) -> tuple[str, int]:
    if node == ".":
        return "localhost", DEFAULT_PORT
    host, colon, port = node.rpartition(":")
    if not colon or not port.isdigit():
        return node.strip("[]"), DEFAULT_PORT
    return host.strip("[]"), int(port)


def _behind(entry_id: bytes | str) -> int:
    """The next sequence; 0 where there was no entry yet (0-0 is never one)."""
    sequence = to_sequence(entry_id)
    return sequence + 1 if sequence else 0


def _keep_entries(client: Any) -> None:
    """The client's own reading makes a dict of an entry, which loses names that occur twice."""
    for command in _WITH_ENTRIES:
        client.set_response_callback(command, _as_it_is)


def _as_it_is(reply: Any, **options: Any) -> Any:
    return reply


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _pairs(raw: Sequence[Any]) -> dict[str, Any]:
    return {_text(raw[i]): raw[i + 1] for i in range(0, len(raw), 2)}
