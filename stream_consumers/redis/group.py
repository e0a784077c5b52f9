"""A consumer group of Redis Streams: all commands on it, and the committer of a group that is read by position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import redis

from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Positions, check_positions
from stream_consumers.display import counted
from stream_consumers.errors import BrokerError, GroupActiveError, GroupRemovedError, StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.options import check_name
from stream_consumers.redis.entries import RawEntry, id_before, is_numbered, printable_key, sequence_after, to_id
from stream_consumers.redis.scripts import CREATE_GROUP, RECLAIM, SET_POSITION
from stream_consumers.redis.server import PAGE_SIZE, REPLY_SECONDS, RedisConnection
from stream_consumers.urls import StreamUrl

START = "0-0"
BEGIN = "-"
"""The start of a search for pending entries."""
NEW = ">"
NOW = "$"
ACK_CHUNK = 1000
CLAIM_MODE_SENTINEL = "stream-assets:claimed"
"""The consumer name that marks a group as in claim mode: its entries are claimed one by one."""
# The error codes of Redis for a missing group: of a command, and of a blocked command.
_GONE = ("NOGROUP", "UNBLOCKED")


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The result of XINFO GROUPS for one group.

    Args:
        delivered: the id of the last delivered entry.
        read: the number of entries read, as Redis 7 counts them; ``None`` if Redis does not know.
        pending: the number of delivered entries that are not acknowledged.
    """

    delivered: str
    read: int | None
    pending: int

    @property
    def position(self) -> int:
        """The sequence after the last delivered entry."""
        return sequence_after(self.delivered)


class PendingEntry(NamedTuple):
    """A delivered entry that is not acknowledged.

    Args:
        id: the entry id.
        deliveries: the number of deliveries.
    """

    id: bytes
    deliveries: int


class ReclaimedEntries(NamedTuple):
    """Entries that were taken over from other members.

    Args:
        cursor: where to continue the search; empty at the end.
        entries: the entries; each counts as one more delivery, except entries that are no longer in the stream, which
            stay pending for the member that held them.
    """

    cursor: str
    entries: list[RawEntry]


class RedisGroup:
    """A consumer group, optionally from the perspective of one member.

    A command that needs the group raises :class:`stream_consumers.errors.GroupRemovedError` if the group or its stream
    was removed.

    Args:
        server: the server; it is closed with this object.
        name: the name of the group.
        consumer: the name of the member; required for reading.
        acknowledge_on_read: let the server acknowledge entries when it delivers them (NOACK).
    """

    def __init__(
        self, server: RedisConnection, name: str, consumer: str = "", *, acknowledge_on_read: bool = False
    ) -> None:
        self.name, self.server = check_name("group", name), server
        self.consumer = check_name("consumer", consumer) if consumer else ""
        # The keys of known shards; the server looks up the keys of other shards.
        self.keys: Mapping[Shard, bytes] = {}
        self._options = ("NOACK",) if acknowledge_on_read else ()
        self._received = 0

    @cached_property
    def _reading(self) -> Any:
        """A separate connection, because a read blocks it."""
        return self.server.new_connection(REPLY_SECONDS)

    def find_shards(self) -> Mapping[Shard, bytes]:
        """Find the shards and their keys; known shards stay, so that reading a deleted one raises an error."""
        found = {shard: self.server.key(shard) for shard in self.server.shards()}
        # If numbered keys appear, the plain key is no longer read; the reverse never happens.
        kept = {s: key for s, key in self.keys.items() if s not in found or not is_numbered(found[s], s)}
        self.keys = {**found, **kept}
        return self.keys

    def key(self, shard: Shard) -> bytes:
        """Return the key of a shard."""
        return self.keys.get(shard) or self.server.key(shard)

    # the group

    def create(self, shard: Shard, start: str, *, create_stream: bool = True, counts_removed: bool = False) -> bool:
        """Create the group if it does not exist yet.

        Redis 7 counts the entries that a group has read, starting from a number that this command sets. It is set
        whenever the server knows it, so that the lag is known, and later trimming of unread entries is detected.

        Args:
            shard: the shard.
            start: the id after which the group starts; :data:`NOW` is the last id, which Redis stores, so that no later
                entry is missed.
            create_stream: also create the stream.
            counts_removed: count entries that are already removed as unread, so that they are detected as lost.

        Returns:
            Whether this call created the group.

        Raises:
            StreamNotFoundError: the stream does not exist.
            FormatError: the key does not hold a stream.
        """
        key = self.key(shard)
        arguments = [self.name, start, int(create_stream), int(counts_removed)]
        try:
            self.server.run(CREATE_GROUP, [key], arguments, f"creating group {self.name!r} of {printable_key(key)}")
        except StreamNotFoundError as error:
            raise StreamNotFoundError(
                f"cannot create group {self.name!r}: no stream {printable_key(key)} at {self.server.url}",
                remedy="Check the stream key, or set the group option create_stream.",
            ) from error
        except BrokerError as error:
            if "BUSYGROUP" in str(error.__context__):
                return False
            raise
        return True

    def facts(self, shard: Shard) -> GroupFacts | None:
        """Return facts about the group; ``None`` if the stream or its group does not exist."""
        return self.facts_of([shard])[shard]

    def facts_of(self, shards: Iterable[Shard]) -> Mapping[Shard, GroupFacts | None]:
        """Return facts about the group in many shards, in few round trips."""
        asked = list(shards)
        words = [("XINFO GROUPS", self.key(shard)) for shard in asked]
        return {
            shard: self._facts(shard, answer)
            for shard, answer in zip(asked, self.server.answers(words, "asking for the groups"))
        }

    def _facts(self, shard: Shard, answer: Any) -> GroupFacts | None:
        if isinstance(answer, redis.RedisError):
            if "no such key" in str(answer):
                return None
            with self.server.explained(f"asking for the groups of {shard}"):
                raise answer
        for found in answer:
            if found["name"] == self.name.encode():
                read = found.get("entries-read")
                counted = None if read is None else int(read)
                return GroupFacts(found["last-delivered-id"].decode(), counted, int(found["pending"]))
        return None

    def set_position(
        self, shard: Shard, position: int, *, entries_read: int | None, enter_claim_mode: bool = False
    ) -> bool:
        """Set the position of the group, unless it is in claim mode; create the group if it does not exist.

        Args:
            shard: the shard.
            position: the next sequence.
            entries_read: the number of entries added before the position, if known.
            enter_claim_mode: enter claim mode in the same step.

        Returns:
            Whether the position was set.
        """
        last, count = id_before(position), "" if entries_read is None else entries_read
        arguments = [CLAIM_MODE_SENTINEL, last, count, int(enter_claim_mode)]
        try:
            return bool(self.run(shard, SET_POSITION, arguments))
        except GroupRemovedError:
            is_new = self.create(shard, last, create_stream=False)
        # A new group is already at this position; setting it without a count would delete its count.
        if is_new and entries_read is None and not enter_claim_mode:
            return True
        return bool(self.run(shard, SET_POSITION, arguments))

    def run(self, shard: Shard, script: str, arguments: Sequence[object], *, more_keys: Sequence[bytes] = ()) -> Any:
        """Run a script whose first argument is the group's name.

        Args:
            shard: the shard whose key is the first key of the script.
            script: see :mod:`stream_consumers.redis.scripts`.
            arguments: the arguments after the group's name.
            more_keys: further keys, in the same slot of a cluster.
        """
        key = self.key(shard)
        what = f"changing group {self.name!r} of {shard}"
        with self._explained(what, [key]):
            return self.server.run(script, [key, *more_keys], [self.name, *arguments], what)

    # claim mode: entries are claimed one by one, and positions can no longer be set

    def enter_claim_mode(self, shard: Shard) -> bool:
        """Enter claim mode; return whether the group was not in it before."""
        return bool(self._command(shard, "XGROUP CREATECONSUMER", CLAIM_MODE_SENTINEL))

    def leave_claim_mode(self, shard: Shard) -> None:
        """Leave claim mode; from then on, the scripts that claim entries fail."""
        self._command(shard, "XGROUP DELCONSUMER", CLAIM_MODE_SENTINEL)

    def is_in_claim_mode(self, shard: Shard) -> bool:
        """Return whether the group is in claim mode."""
        return any(member["name"] == CLAIM_MODE_SENTINEL.encode() for member in self.members(shard))

    # reading

    def read(self, after: Mapping[Shard, str], *, count: int, seconds: float = 0.0) -> Mapping[Shard, list[RawEntry]]:
        """Run XREADGROUP; return the entries of each shard that has some.

        Args:
            after: for each shard, :data:`NEW`, or an id: then entries after it that are pending for this member.
            count: the most entries per shard.
            seconds: how long to wait for new entries; 0 does not wait.
        """
        keys = {self.key(shard): entry_id for shard, entry_id in after.items()}
        shards = {self.key(shard): shard for shard in after}
        command = ["XREADGROUP", "GROUP", self.name, self.consumer, "COUNT", count, *self._options]
        with self._explained("reading", list(keys)):
            pages = self.server.read(self._reading, command, keys, seconds=seconds)
        self._received += sum(len(entries) for _, entries in pages)
        return {shards[key]: entries for key, entries in pages}

    def acknowledge(self, shard: Shard, ids: Sequence[bytes | str], *, times: bytes | None = None) -> int:
        """Run XACK in chunks; return how many entries were pending.

        Args:
            shard: the shard.
            ids: the ids of the entries.
            times: a hash in the same slot, from which the ids are also removed.
        """
        key, commands = self.key(shard), list[tuple[object, ...]]()
        for begin in range(0, len(ids), ACK_CHUNK):
            chunk = ids[begin : begin + ACK_CHUNK]
            commands.append(("XACK", key, self.name, *chunk))
            commands += [("HDEL", times, *chunk)] if times else []
        replies = list(self.server.replies(commands, f"acknowledging in {printable_key(key)}"))
        done = sum(int(count) for (command, *_), count in zip(commands, replies) if command == "XACK")
        # XACK returns 0 both for a missing group and for entries that were acknowledged before.
        if ids and not done and self.facts(shard) is None:
            raise self._removed([key], f"could not acknowledge {counted(len(ids), 'entry', 'entries')}")
        return done

    def acknowledge_below(self, shard: Shard, position: int) -> None:
        """Acknowledge the pending entries below a position."""
        for page in self.pending(shard, below=position):
            self.acknowledge(shard, [entry.id for entry in page])

    # pending entries

    def members(self, shard: Shard) -> Sequence[Mapping[str, Any]]:
        """Return the result of XINFO CONSUMERS for each member."""
        key = self.key(shard)
        with self._explained(f"asking for the members of group {self.name!r}", [key]):
            found: Sequence[Mapping[str, Any]] = self.server.connection.xinfo_consumers(key, self.name)
        return found

    def pending(
        self,
        shard: Shard,
        *,
        below: int | None = None,
        consumer: str | bytes | None = None,
        idle_ms: int = 0,
        page_size: int = PAGE_SIZE,
    ) -> Iterator[list[PendingEntry]]:
        """Yield the pending entries in pages.

        Args:
            shard: the shard.
            below: only entries below this sequence.
            consumer: only entries that this consumer holds.
            idle_ms: only entries that were idle for this time.
            page_size: the most entries in a page.
        """
        if below is not None and below <= 1:
            return
        key, start, end = self.key(shard), BEGIN, "+" if below is None else to_id(below - 1)
        idle = ["IDLE", idle_ms] if idle_ms else []
        # The method of the client for this drops an empty name, which a consumer may have.
        holder = [] if consumer is None else [consumer]
        while True:
            words = ["XPENDING", key, self.name, *idle, start, end, page_size, *holder]
            with self._explained(f"reading the pending entries of {shard}", [key]):
                listed = self.server.connection.execute_command(*words, parse_detail=True)
            if not listed:
                return
            yield [PendingEntry(found["message_id"], int(found["times_delivered"])) for found in listed]
            start = f"({listed[-1]['message_id'].decode()}"

    def has_idle_peer(self, shard: Shard, idle_seconds: float) -> bool:
        """Return whether another member holds entries and has been idle for this time."""
        members = self.members(shard)
        if any(member["name"] == CLAIM_MODE_SENTINEL.encode() for member in members):
            # In claim mode, only claim-mode members take over entries: the holder's name identifies the batch.
            return False
        return any(
            member["name"] != self.consumer.encode() and member["pending"] and member["idle"] >= idle_seconds * 1000
            for member in members
        )

    def reclaim(self, shard: Shard, cursor: str, *, idle_seconds: float, count: int) -> ReclaimedEntries:
        """Take over at most ``count`` entries of other members that were idle for this time, and deliver them.

        Args:
            shard: the shard.
            cursor: where to start; :data:`BEGIN`, or the cursor of the last result.
            idle_seconds: the least idle time of the entries.
            count: the most entries.
        """
        arguments = [self.consumer, round(idle_seconds * 1000), cursor, count, PAGE_SIZE, 1]
        after, _, found = self.run(shard, RECLAIM, arguments)
        self._received += len(found)
        return ReclaimedEntries(after.decode(), [(entry_id, fields) for entry_id, _, _, fields in found])

    def deliveries(self, shard: Shard, ids: Sequence[bytes]) -> dict[bytes, int]:
        """Return the number of deliveries of each of these pending entries."""
        key = self.key(shard)
        with self._explained("asking for deliveries", [key]):
            pipeline = self.server.connection.pipeline(transaction=False)
            for entry_id in ids:
                pipeline.xpending_range(key, self.name, entry_id, entry_id, 1)
            answers = pipeline.execute()
        return {found["message_id"]: int(found["times_delivered"]) for answer in answers for found in answer}

    def stop_reading(self) -> None:
        """Close the connection for reading; the connection of the server stays open."""
        if "_reading" in self.__dict__:
            self._reading.close()

    def close(self) -> None:
        """Close the connections."""
        self.stop_reading()
        self.server.close()

    def _command(self, shard: Shard, command: str, *words: object) -> Any:
        key = self.key(shard)
        with self._explained(f"{command} of group {self.name!r}", [key]):
            return self.server.connection.execute_command(command, key, self.name, *words)

    @contextmanager
    def _explained(self, what: str, keys: list[bytes]) -> Iterator[None]:
        try:
            with self.server.explained(what):
                yield
        except BrokerError as error:
            if any(said in str(error.__context__) for said in _GONE):
                raise self._removed(keys, error.what) from error
            raise

    def _removed(self, keys: list[bytes], said: str) -> GroupRemovedError:
        with self.server.explained("looking for the streams"):
            there = sum(int(self.server.connection.exists(key)) for key in keys)
        return GroupRemovedError(
            f"group {self.name!r} of {', '.join(map(printable_key, keys))} was removed: {said}",
            remedy="Its position and pending entries are lost. Create it again at the id where it should continue.",
            streams=len(keys),
            streams_there=there,
            received_before=self._received,
        )


class RedisCommitter:
    """Stores positions in a Redis group that is read by position, as by this project's ingestion.

    Args:
        url: ``redis://host:6379/orders``.
        group: the name of the group; the first commit creates it.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.

    Example::

        url = "redis://localhost:6379/orders"
        committer = RedisCommitter(url, "billing")
        with TrackedConsumer(create_consumer(url), committer) as consumer:
            consumer.seek_to_committed()
    """

    is_transactional = False

    def __init__(self, url: str | StreamUrl, group: str, client: ClientConfig | None = None) -> None:
        url = StreamUrl.parse(url)
        self._group = RedisGroup(RedisConnection(url, client), group)

    def commit(self, positions: Positions) -> None:
        """See :meth:`stream_consumers.consumer.PositionCommitter.commit`.

        Raises:
            GroupActiveError: the group is in claim mode, so it has no position.
            StreamNotFoundError: the stream does not exist.
            BrokerUnavailableError, AccessDeniedError: the server returned an error.
        """
        check_positions(positions)
        for shard, position in sorted(positions.items()):
            if not self._group.set_position(shard, position, entries_read=None):
                raise GroupActiveError(
                    f"group {self._group.name!r} of {shard} is in claim mode: its members share single entries",
                    remedy="Acknowledge its entries, or commit to another group.",
                )

    def committed(self) -> Positions:
        """See :meth:`stream_consumers.consumer.PositionCommitter.committed`."""
        facts = self._group.facts_of(self._group.server.shards())
        return {shard: found.position for shard, found in facts.items() if found is not None}
