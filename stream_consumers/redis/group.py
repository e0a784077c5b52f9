"""The commands on a consumer group of Redis Streams, as one of its members gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from stream_consumers.errors import BrokerError, GroupRemovedError, StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.redis.server import ACK_CHUNK, CLAIMED_MARK, REPLY_SECONDS, RawEntry, RedisServer

START = "0-0"
NEW = ">"
NOW = "$"
_GONE = ("NOGROUP", "UNBLOCKED")


@dataclass(frozen=True, slots=True)
class ClaimedPage:
    """What XAUTOCLAIM answers.

    Args:
        cursor: where to go on; ``0-0`` at the end. A page that is empty is not the end.
        ids: entries that are this member's now.
        deleted: entries that were pending and are not in the stream any more; Redis has removed them from the group.
    """

    cursor: str
    ids: list[bytes]
    deleted: list[bytes]


class RedisGroup:
    """A group as one of its members sees it. Reading blocks on a connection of its own.

    Args:
        server: the server; closed with this.
        name: of the group.
        consumer: the member's name.
        acknowledge_on_read: let the server acknowledge what it gives (NOACK).
    """

    def __init__(self, server: RedisServer, name: str, consumer: str, *, acknowledge_on_read: bool) -> None:
        self.name, self.consumer = name, consumer
        self.keys: Mapping[Shard, str] = {}
        self._server = server
        self._reading = server.new_connection(REPLY_SECONDS)
        self._options = ("NOACK",) if acknowledge_on_read else ()
        self._received = 0

    def find_shards(self) -> Mapping[Shard, str]:
        """Look for the shards and their keys; those that were known stay, so that a deleted one is told as an error."""
        found = {shard: self._server.key(shard) for shard in self._server.shards()}
        # Where keys with numbers appear, the key without one is not read any more, never the other way round.
        kept = {s: key for s, key in self.keys.items() if s not in found or found[s] == s.stream}
        self.keys = {**found, **kept}
        return self.keys

    def create(self, shard: Shard, start: str, *, create_stream: bool) -> None:
        """Make the group where it is not there yet.

        Args:
            shard: of which stream.
            start: the id that it starts behind.
            create_stream: make the stream, too.

        Raises:
            StreamNotFoundError: there is no stream.
            FormatError: the key holds something else.
        """
        key = self.keys[shard]
        words = ["MKSTREAM"] if create_stream else []
        with self._server.explained(f"making group {self.name!r} of {key}"):
            try:
                self._server.connection.execute_command("XGROUP CREATE", key, self.name, start, *words)
            except redis.ResponseError as error:
                if "requires the key to exist" in str(error):
                    raise StreamNotFoundError(
                        f"there is no stream {key} at {self._server.url} to make group {self.name!r} for",
                        remedy="Check the stream key, or set the group option create_stream.",
                    ) from error
                if "BUSYGROUP" not in str(error):
                    raise

    def read(self, places: Mapping[Shard, str], *, count: int, seconds: float = 0.0) -> Mapping[Shard, list[RawEntry]]:
        """XREADGROUP; returns the pages of those shards that have one.

        Args:
            places: per shard :data:`NEW`, or an id: what is pending for this member behind it.
            count: entries a shard.
            seconds: to wait for new ones; 0 does not wait.

        Raises:
            GroupRemovedError: a group or a stream is gone.
        """
        keys = {self.keys[shard]: place for shard, place in places.items()}
        shards = {self.keys[shard]: shard for shard in places}
        command = ["XREADGROUP", "GROUP", self.name, self.consumer, "COUNT", count, *self._options]
        with self._explained("reading", list(keys)):
            pages = self._server.read(self._reading, command, keys, seconds=seconds)
        self._received += sum(len(entries) for _, entries in pages)
        return {shards[key.decode()]: entries for key, entries in pages}

    def acknowledge(self, shard: Shard, ids: Sequence[bytes]) -> int:
        """XACK in chunks; returns how many were pending.

        Raises:
            GroupRemovedError: the group is gone, which XACK does not tell.
        """
        key, done = self.keys[shard], 0
        with self._server.explained(f"acknowledging in {key}"):
            for begin in range(0, len(ids), ACK_CHUNK):
                done += int(self._server.connection.xack(key, self.name, *ids[begin : begin + ACK_CHUNK]))
        if ids and not done and self.last_delivered(shard) is None:
            raise self._removed([key], f"{len(ids)} entries could not be acknowledged")
        return done

    def last_delivered(self, shard: Shard) -> str | None:
        """The id of the last entry that the group gave to anybody; ``None`` if the group or the stream is not there."""
        with self._server.explained("looking for the group"):
            try:
                groups = self._server.connection.xinfo_groups(self.keys[shard])
            except redis.ResponseError as error:
                if "no such key" in str(error):
                    return None
                raise
        found = (group["last-delivered-id"].decode() for group in groups if group["name"] == self.name.encode())
        return next(found, None)

    def has_idle_peer(self, shard: Shard, idle_seconds: float) -> bool:
        """Whether another member has entries and has been silent for so long."""
        key = self.keys[shard]
        with self._explained("asking for the members", [key]):
            members = self._server.connection.xinfo_consumers(key, self.name)
        if any(member["name"] == CLAIMED_MARK.encode() for member in members):
            # Members that ingest take over what is idle themselves, and tell by its name what became of a batch.
            return False
        return any(
            member["name"] != self.consumer.encode() and member["pending"] and member["idle"] >= idle_seconds * 1000
            for member in members
        )

    def claim(self, shard: Shard, cursor: str, *, idle_seconds: float, count: int) -> ClaimedPage:
        """Become the owner of entries that nobody has touched for so long; they are not counted as delivered yet."""
        key = self.keys[shard]
        words = [self.name, self.consumer, max(1, round(idle_seconds * 1000)), cursor, "COUNT", count, "JUSTID"]
        with self._explained("claiming", [key]):
            reply = self._server.connection.execute_command("XAUTOCLAIM", key, *words)
        # Before Redis 7 there is no third element.
        return ClaimedPage(reply[0].decode(), list(reply[1]), list(reply[2]) if len(reply) > 2 else [])

    def deliver(self, shard: Shard, ids: Sequence[bytes]) -> list[RawEntry]:
        """The entries of claimed ids, counted as delivered once more.

        One that was acknowledged meanwhile by who had it is not among them.
        """
        if not ids:
            return []
        key = self.keys[shard]
        with self._explained("claiming", [key]):
            reply = self._server.connection.execute_command("XCLAIM", key, self.name, self.consumer, 0, *ids)
        entries = [entry for entry in reply if entry is not None]
        self._received += len(entries)
        return entries

    def deliveries(self, shard: Shard, ids: Sequence[bytes]) -> dict[bytes, int]:
        """How often each of these pending entries was delivered."""
        key = self.keys[shard]
        with self._explained("asking for deliveries", [key]):
            pipeline = self._server.connection.pipeline(transaction=False)
            for entry_id in ids:
                pipeline.xpending_range(key, self.name, entry_id, entry_id, 1)
            answers = pipeline.execute()
        return {found["message_id"]: int(found["times_delivered"]) for answer in answers for found in answer}

    def run(self, shard: Shard, script: str, arguments: Sequence[object], *, beside: Sequence[str] = ()) -> Any:
        """Run a script; its arguments begin with the group's name and the member's.

        Args:
            shard: of the stream that is its first key.
            script: see :mod:`stream_consumers.redis.scripts`.
            arguments: after the names.
            beside: more keys, in the same slot of a cluster.

        Raises:
            GroupRemovedError: the group or the stream is gone.
        """
        key = self.keys[shard]
        registered: Any = self._server.connection.register_script(script)
        with self._explained("running a script", [key]):
            return registered(keys=[key, *beside], args=[self.name, self.consumer, *arguments])

    def stop_reading(self) -> None:
        """Close the connection for reading; the server's stays open."""
        self._reading.close()

    def close(self) -> None:
        """Close the connections."""
        self.stop_reading()
        self._server.close()

    @contextmanager
    def _explained(self, what: str, keys: list[str]) -> Iterator[None]:
        try:
            with self._server.explained(what):
                yield
        except BrokerError as error:
            if any(mark in str(error.__cause__) for mark in _GONE):
                raise self._removed(keys, str(error.__cause__)) from error
            raise

    def _removed(self, keys: list[str], said: str) -> GroupRemovedError:
        with self._server.explained("looking for the streams"):
            there = sum(int(self._server.connection.exists(key)) for key in keys)
        return GroupRemovedError(
            f"group {self.name!r} of {', '.join(keys)} is gone: {said}",
            remedy="What was pending and its position are lost. Make it again where it should go on (XGROUP CREATE).",
            streams=len(keys),
            streams_there=there,
            received_before=self._received,
        )
