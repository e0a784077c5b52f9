"""Redis groups in claim mode, whose members share by claiming entries: new ones, those of dead members, heartbeat.

Whether a name may be taken from is not decided here: :mod:`spark_jobs.claims.claim_job` asks the ledger.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from stream_consumers.batches import BatchPlan, Range
from stream_consumers.client_config import ClientConfig
from stream_consumers.closing import ClosesOnExit
from stream_consumers.epochs import EpochNameMap, EpochNames, accept_remedy, split_epoch
from stream_consumers.errors import GroupRemovedError, SourceRecreatedError, StreamAssetsError, StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, choice
from stream_consumers.redis.batches import Slice, split_slices
from stream_consumers.redis.client import claim_policy
from stream_consumers.redis.entries import id_before, printable_key, sequence_after, to_id, to_sequence
from stream_consumers.redis.group import CLAIM_MODE_SENTINEL, NOW, START, GroupFacts, PendingEntry, RedisGroup
from stream_consumers.redis.scripts import CLAIM_NEW, COUNT_AS_READ, RELEASE, REMOVE_CONSUMER, TAKE_OVER, TIME, TOUCH
from stream_consumers.redis.server import PAGE_SIZE, RedisConnection, StreamFacts
from stream_consumers.urls import StreamUrl

CLAIM_PAGE_SIZE = 4096
# A released entry is this idle (three years), so that any member takes it over at once.
RELEASED_MS = 100_000_000_000
_NAME = re.compile(r"([^/]+)/([1-9][0-9]*)/([0-9a-f]{32})\Z")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True, slots=True)
class ClaimName:
    """The consumer name that holds the entries of one batch attempt; the ledger knows whether the batch was written.

    Args:
        member: the member that claimed them.
        number: of the batch in the member's transaction sequence.
        bid: the batch id.

    Example:
        >>> name = ClaimName("main", 7, "0" * 32)
        >>> ClaimName.parse(str(name).encode()) == name, ClaimName.parse(b"worker-1")
        (True, None)
    """

    member: str
    number: int
    bid: str

    def __str__(self) -> str:
        return f"{self.member}/{self.number}/{self.bid}"

    @classmethod
    def parse(cls, raw: bytes) -> ClaimName | None:
        """Parse a consumer name; ``None`` if it is the name of another kind of client, which may be any bytes."""
        match = _NAME.match(raw.decode("utf-8", "replace"))
        return cls(match[1], int(match[2]), match[3]) if match else None


class Backlog(NamedTuple):
    """How many entries of a shard a group has not finished.

    Args:
        unread: entries that were not delivered yet; an upper bound if single entries were deleted.
        pending: entries that were delivered and not acknowledged.
    """

    unread: int
    pending: int

    @property
    def total(self) -> int:
        """Unread and pending entries."""
        return self.unread + self.pending


class TrimmedEntries(NamedTuple):
    """Entries that were removed from a stream before they were delivered to the group.

    Args:
        start: the lost entries are at or after it.
        end: the lost entries are before it.
        entries: how many.
        read: how many entries the group counts as read; together with ``start`` it identifies the loss.
        position: the sequence after the last one that was delivered.
    """

    start: int
    end: int
    entries: int
    read: int
    position: int


@dataclass
class ClaimedEntries:
    """The entries that a consumer name holds by now: the batch that is being claimed.

    Args:
        name: the consumer name.
        records: the most entries.
        room: the most bytes; one entry is always taken.
        ids: of the entries that it holds.
        slices: how to read them.
        used: the bytes of the entries.
    """

    name: ClaimName
    records: int
    room: int
    ids: dict[Shard, list[bytes]] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    used: int = 0

    @property
    def count(self) -> int:
        """How many entries it holds."""
        return sum(map(len, self.ids.values()))

    def add(self, piece: Slice, ids: Sequence[bytes], size: int) -> None:
        """Add entries that were claimed."""
        self.ids.setdefault(piece.shard, []).extend(ids)
        self.slices.append(piece)
        self.used += size


class RedisClaims(ClosesOnExit):
    """A group in claim mode; a context manager.

    Args:
        url: ``redis://host:6379/orders``.
        group: the consumer group's name; other clients may be in it, too.
        client: as for :class:`stream_consumers.redis.batches.RedisBatchSource`, and the fields of
            :class:`stream_consumers.redis.client.ClaimPolicy`.
        names: for each stream the name of its epoch, see :mod:`stream_consumers.epochs`; by default the first.
    """

    def __init__(
        self, url: str | StreamUrl, group: str, client: ClientConfig | None = None, *, names: EpochNameMap | None = None
    ) -> None:
        url = StreamUrl.parse(url)
        self.url = url
        self.server = EpochServer(url, client, names=names or {})
        self.group = RedisGroup(self.server, group)
        self.policy = claim_policy(self.server.client_options)
        self.shards = self.server.shards()
        self.ends = {shard: facts.end for shard, facts in self._facts().items()}
        self._delivered: Mapping[Shard, str] = {}

    def close(self) -> None:
        """Close the connection."""
        self.server.close()

    def identities(self) -> Mapping[str, str]:
        """See :meth:`stream_consumers.redis.batches.RedisBatchSource.identities`."""
        return self.server.identities()

    def _facts(self) -> Mapping[Shard, StreamFacts]:
        found = self.server.facts_of(self.shards)
        return {shard: facts for shard, facts in found.items() if facts is not None}

    def check(self, known: Mapping[Shard, int | None]) -> None:
        """Refuse a group or a stream that does not match the ledger.

        Args:
            known: the shards that the ledger knows, and for each the sequence behind the last one in the table.

        Raises:
            SourceRecreatedError: the group or the stream of a known shard is gone, or the stream was recreated.
        """
        own = {shard: written for shard, written in sorted(known.items()) if shard.stream in self.identities()}
        # In this order: what another member is given in between must not lie behind the end.
        groups, streams, name = self.group.facts_of(own), self.server.facts_of(own), self.group.name
        for shard, written in own.items():
            facts, group = streams[shard], groups[shard]
            if facts is not None and group is None and _is_accepted(shard, written):
                continue
            if facts is None or group is None:
                raise self._lost_group(shard, facts)
            if group.position > facts.end:
                raise SourceRecreatedError(
                    f"{shard} of {self.url} ends before the position of group {name!r}: it was recreated",
                    remedy=f"Redis would deliver nothing of it. {accept_remedy(shard.stream)}",
                    position=group.position,
                    end=facts.end,
                )
            if written is not None and group.position < written:
                raise SourceRecreatedError(
                    f"group {name!r} of {shard} at {self.url} was moved back, or the server lost its latest state: "
                    "entries that are in the table would be delivered again",
                    remedy="If nothing before it is missing, move it on: "
                    f"XGROUP SETID {printable_key(self.server.key(shard))} {name} {to_id(written - 1)}. "
                    f"{accept_remedy(shard.stream)}",
                    position=group.position,
                    table=written,
                )

    def prepare(self, start: AutoStreamReset, known: Mapping[Shard, int | None] | None = None) -> Mapping[Shard, int]:
        """Create the group where it does not exist yet, and let it enter claim mode.

        Args:
            start: where a new group starts; a group that exists is not moved.
            known: see :meth:`check`.

        Returns:
            Per shard, the sequence at which the group started, as far as that is known.

        Raises:
            SourceRecreatedError: the group or the stream of a known shard is gone, or the stream was recreated.
        """
        start, known = choice(AutoStreamReset, start, option="start"), known or {}
        self.check(known)
        begun = {shard.stream for shard in known}
        positions = {}
        for shard in self.shards:
            is_created = False
            if self.group.facts(shard) is None:
                is_latest = start is AutoStreamReset.LATEST and not known
                # Of a shard that is new in a stream, or of a new epoch, the group wants all that was ever added.
                is_created = self.group.create(shard, NOW if is_latest else START, counts_removed=shard.stream in begun)
            self.check({shard: None})
            # A shard that the ledger knows entered it before: if it is not in it now, it was switched back.
            is_new = (is_created or shard not in known) and self.group.enter_claim_mode(shard)
            # A group that another member has created at the beginning may have moved on since.
            positions[shard] = self.position(shard) if is_new or not known else 0
        return positions

    def _lost_group(self, shard: Shard, facts: StreamFacts | None) -> SourceRecreatedError:
        key, name = printable_key(self.server.key(shard)), self.group.name
        what = f"the stream {shard}" if facts is None else f"group {name!r} of {shard}"
        return SourceRecreatedError(
            f"{what} is gone from {self.url}, and with it its position and its pending entries",
            remedy=f"If the stream is still the same and nothing was pending, create the group where it was: XGROUP "
            f"CREATE {key} {name} <the last id that is in the table>. {accept_remedy(shard.stream)}",
            end=facts.end if facts else None,
        )

    def holds(self, shard: Shard, sequence: int) -> bool:
        """Whether the stream has the entry with this sequence."""
        return not self.missing({shard: [to_id(sequence).encode()]})

    def backlog(self) -> Mapping[Shard, Backlog]:
        """How many entries of each shard the group has not finished; all of them where there is no group yet."""
        found = {}
        streams = self._facts()
        groups = self.group.facts_of(streams)
        for shard, facts in streams.items():
            group = groups[shard]
            if group is None:
                found[shard] = Backlog(facts.length, 0)
            else:
                found[shard] = Backlog(self._unread(shard, facts, group), group.pending)
        return found

    def _unread(self, shard: Shard, facts: StreamFacts, group: GroupFacts) -> int:
        """Entries not delivered yet; Redis' own lag counts trimmed ones, too, and is nil where Redis does not know."""
        if facts.last is None or facts.last < group.position:
            return 0
        if facts.first is not None and facts.first >= group.position:
            return facts.length
        if facts.added is not None and group.read is not None:
            return max(0, min(facts.length, facts.added - group.read))
        return self.server.count(shard, group.position, facts.end, length=facts.length)

    def is_in_claim_mode(self) -> bool:
        """Whether the group is in claim mode, as far as the server knows."""
        for shard in self.shards:
            if self.group.facts(shard) is not None:
                return self.group.is_in_claim_mode(shard)
        return False

    def position(self, shard: Shard) -> int:
        """The sequence behind the last entry of a shard that was delivered."""
        group = self.group.facts(shard)
        return group.position if group else 0

    def positions(self) -> Mapping[Shard, int]:
        """The position of each shard that has the group; new entries are claimed from it, or from one of a member."""
        found = self.group.facts_of(self.shards)
        self._delivered = {shard: facts.delivered for shard, facts in found.items() if facts is not None}
        return {shard: sequence_after(delivered) for shard, delivered in self._delivered.items()}

    def pending_ends(self, shards: Iterable[Shard]) -> Mapping[Shard, int]:
        """The sequence behind the last pending entry of each shard; 0 where there is none."""
        asked = list(shards)
        words = [("XPENDING", self.server.key(shard), self.group.name) for shard in asked]
        replies = self.server.replies(words, f"asking what is pending in {self.url}")
        return {shard: sequence_after(reply["max"]) if reply["pending"] else 0 for shard, reply in zip(asked, replies)}

    def has_others(self, shard: Shard) -> bool:
        """Whether clients of another kind are in the group, or were and were not removed."""
        names = {member["name"] for member in self.group.members(shard)} - {CLAIM_MODE_SENTINEL.encode()}
        return any(ClaimName.parse(name) is None for name in names)

    def count(self, shard: Shard, part: Range) -> int:
        """How many entries of a range the stream holds."""
        return self.server.count(shard, part.start, part.end)

    def has_grown(self, *, with_new_shards: bool = True) -> bool:
        """Whether entries were added behind :attr:`ends`; then :attr:`ends` and :attr:`shards` are those of now.

        Args:
            with_new_shards: look for new shards, too, which takes longer.
        """
        shards = self.server.shards() if with_new_shards else self.shards
        grown = self.server.progress([self.server.key(shard) for shard in shards])
        ends = {shard: sequence_after(now.last) for shard, now in zip(shards, grown) if now is not None}
        if ends == self.ends:
            return False
        self.shards, self.ends = shards, ends
        return True

    def is_drained(self) -> bool:
        """Whether every entry up to the end offsets captured at the start was delivered and acknowledged."""
        for shard, end in self.ends.items():
            group = self.group.facts(shard)
            if group and group.pending and any(self.group.pending(shard, below=end, page_size=1)):
                return False
            after = f"({group.delivered}" if group else "-"
            with self.server.explained(f"asking what is left in {shard}"):
                key = self.server.key(shard)
                if end and self.server.connection.execute_command("XRANGE", key, after, id_before(end), "COUNT", 1):
                    return False
        return True

    def trimmed(self) -> Mapping[Shard, TrimmedEntries]:
        """Entries that were removed before they were delivered, per shard, as far as Redis 7 counts them."""
        found = {}
        streams = self._facts()
        groups = self.group.facts_of(streams)
        for shard, facts in streams.items():
            group = groups[shard]
            if group is None or facts.added is None or group.read is None:
                continue
            position, deleted = group.position, facts.deleted or 0
            first = facts.end if facts.first is None else facts.first
            if first >= position:
                start, end, unread = position, first if first > position else facts.end, facts.length
            elif facts.end == position or deleted >= position:
                # Single entries were deleted, of which the last one is known.
                start, end = min(position, deleted), max(position, deleted + 1)
                unread = self.server.count(shard, position, facts.end, length=facts.length)
            else:
                continue
            entries = facts.added - group.read - unread
            if entries > 0:
                found[shard] = TrimmedEntries(start, end, entries, group.read, position)
        return found

    def count_reads(self) -> None:
        """Let the server count what the group reads, where it does not; what was lost before is unknown."""
        streams = self._facts()
        for shard, group in self.group.facts_of(streams).items():
            facts = streams[shard]
            if group is not None and facts.added is not None and group.read is None:
                unread = self.server.count(shard, group.position, facts.end, length=facts.length)
                self._count_as_read(shard, group.position, "", facts.added - unread)

    def account_for(self, shard: Shard, trimmed: TrimmedEntries) -> None:
        """Let the group count lost entries as read, now that the loss is recorded in the table."""
        self._count_as_read(shard, trimmed.position, str(trimmed.read), trimmed.read + trimmed.entries)

    def _count_as_read(self, shard: Shard, position: int, counted: str, read: int) -> None:
        self.group.run(shard, COUNT_AS_READ, [id_before(position), counted, read])

    def idle_names(self, shard: Shard) -> frozenset[bytes]:
        """The names that were idle for the policy's time."""
        return frozenset(m["name"] for m in self.group.members(shard) if m["idle"] >= self.policy.min_idle_ms)

    def is_released(self, shard: Shard, name: ClaimName) -> bool:
        """Whether a name has released the entries that it holds."""
        return any(self.group.pending(shard, consumer=str(name), idle_ms=RELEASED_MS, page_size=1))

    def now(self, shard: Shard) -> int:
        """The time in milliseconds at the server that has a shard."""
        return int(self.group.run(shard, TIME, []))

    def holders(self) -> Mapping[Shard, list[bytes]]:
        """The names that hold entries, per shard that has the group."""
        return {shard: [m["name"] for m in members if m["pending"]] for shard, members in self._members()}

    def _members(self) -> Iterator[tuple[Shard, Sequence[Mapping[str, Any]]]]:
        for shard in self.shards:
            if self.group.facts(shard) is not None:
                yield shard, self.group.members(shard)

    def pending(self, shard: Shard, name: ClaimName | bytes, *, idle: bool) -> Iterator[list[PendingEntry]]:
        """The entries that a name holds, in pages; with ``idle`` only those that were idle for the policy's time."""
        return self.group.pending(shard, consumer=_consumer(name), idle_ms=self.policy.min_idle_ms if idle else 0)

    def claim_new(self, held: ClaimedEntries, shard: Shard, records: int) -> bool:
        """Claim new entries of a shard, in order, up to the captured end; whether the limit of bytes was reached.

        Raises:
            StreamAssetsError: it is unknown whether entries were claimed: give up the name.
        """
        key, end, left = self.server.key(shard), self.ends.get(shard, 0), records
        while left > 0 and end:
            asked = min(left, CLAIM_PAGE_SIZE)
            room, take_one = held.room - held.used, int(not held.count)
            expected = self._delivered.get(shard, "")
            arguments = [str(held.name), id_before(end), asked, room, take_one, CLAIM_MODE_SENTINEL, expected]
            is_full, is_refused, size, ids = self.group.run(shard, CLAIM_NEW, arguments)
            if ids:
                part = Range(to_sequence(ids[0]), to_sequence(ids[-1]) + 1)
                held.add(Slice(shard, key, part, len(ids)), ids, size)
            left -= len(ids)
            if is_full or is_refused or len(ids) < asked:
                return bool(is_full)
        return False

    def take_over(
        self,
        held: ClaimedEntries,
        shard: Shard,
        name: ClaimName | bytes,
        entries: Sequence[PendingEntry],
        *,
        since: int | None = None,
        error: str | None = None,
    ) -> tuple[bool, list[bytes]]:
        """Move entries from a dead name, if it still holds them.

        Args:
            held: gets the entries.
            shard: of the entries.
            name: the name that holds them.
            entries: which.
            since: only if they were idle since this :meth:`now`; of other clients also for the policy's time.
            error: they become dead letters with this text.

        Returns:
            Whether the limit of bytes was reached, and the ids of entries that are no longer in the stream.

        Raises:
            StreamAssetsError: it is unknown whether entries were moved: give up the name.
        """
        gone: list[bytes] = []
        least = 0 if isinstance(name, ClaimName) else self.policy.min_idle_ms
        for begin in range(0, len(entries), PAGE_SIZE):
            ids = [entry.id for entry in entries[begin : begin + PAGE_SIZE]]
            arguments = [
                _consumer(name),
                str(held.name),
                least,
                held.room - held.used,
                int(not held.count),
                int(not isinstance(name, ClaimName)),
                CLAIM_MODE_SENTINEL,
                "" if since is None else since,
                *ids,
            ]
            is_full, size, moved, missing = self.group.run(shard, TAKE_OVER, arguments)
            if moved:
                sequences = tuple(to_sequence(entry_id) for entry_id in moved)
                piece = Slice(shard, self.server.key(shard), Range(min(sequences), max(sequences) + 1), len(sequences))
                held.add(replace(piece, sequences=sequences, error=error), moved, size)
            gone += missing
            if is_full:
                return True, gone
        return False, gone

    def plan(self, held: ClaimedEntries, *, parallelism: int) -> BatchPlan:
        """How to read the entries that a name holds."""
        splits = split_slices(
            self.url, self.server.client_options, held.slices, size=held.used, parallelism=parallelism
        )
        return BatchPlan({}, splits, held.count)

    def acknowledge(self, ids: Mapping[Shard, Sequence[bytes]]) -> None:
        """Acknowledge entries that are in the table, whichever name holds them by now.

        Raises:
            StreamNotFoundError: the group is gone.
        """
        for shard, listed in ids.items():
            try:
                self.group.acknowledge(shard, listed)
            except GroupRemovedError as error:
                raise StreamNotFoundError(
                    f"{shard} of {self.url} has no group {self.group.name!r} any more: nothing could be acknowledged",
                    remedy="The entries are in the table. The next run says what to do about the group.",
                    entries=len(listed),
                ) from error

    def missing(self, ids: Mapping[Shard, Sequence[bytes]]) -> Mapping[Shard, list[bytes]]:
        """The entries among these that are no longer in the stream."""
        found = {}
        for shard, listed in ids.items():
            ranges = [("XRANGE", self.server.key(shard), entry_id, entry_id) for entry_id in listed]
            replies = self.server.replies(ranges, f"looking for entries of {shard}")
            found[shard] = [entry_id for entry_id, reply in zip(listed, replies) if not reply]
        return {shard: listed for shard, listed in found.items() if listed}

    def release(self, shard: Shard, name: ClaimName) -> None:
        """Let others take over at once the entries that a name holds; this delivery does not count."""
        self._page_through(RELEASE, shard, name, RELEASED_MS)

    def touch(self, name: ClaimName, shards: Iterable[Shard]) -> None:
        """Send a heartbeat: the entries that the name still holds are no longer idle."""
        for shard in shards:
            self._page_through(TOUCH, shard, name)

    def _page_through(self, script: str, shard: Shard, name: ClaimName, *arguments: object) -> None:
        start: object = "-"
        while start:
            start = self.group.run(shard, script, [str(name), start, PAGE_SIZE, *arguments])

    def remove_name(self, shard: Shard, name: ClaimName) -> bool:
        """Remove a name if it holds no entry; whether it was removed."""
        return bool(self.group.run(shard, REMOVE_CONSUMER, [str(name)]))

    def names(self, *, empty: bool = False) -> Mapping[Shard, list[ClaimName]]:
        """Names of batches that were not removed; with ``empty`` only those that hold no entry any more."""
        found = {}
        for shard, members in self._members():
            parsed = (ClaimName.parse(member["name"]) for member in members if not (empty and member["pending"]))
            found[shard] = [name for name in parsed if name is not None]
        return found


class Heartbeat(ClosesOnExit):
    """Sends heartbeats for a name while its batch is written, so that no other member takes its entries over."""

    def __init__(self, claims: RedisClaims, held: ClaimedEntries) -> None:
        self._claims = claims
        self._held = held
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(self._claims.policy.min_idle_seconds / 3):
            try:
                self._claims.touch(self._held.name, list(self._held.ids))
            except StreamAssetsError as error:
                # No harm is done: at worst another member writes the batch, too, and the ledger picks one.
                _log.warning("the heartbeat of %s failed: %s", self._held.name, error)

    def close(self) -> None:
        """Stop the heartbeat."""
        self._stop.set()
        self._thread.join()


def _is_accepted(shard: Shard, written: int | None) -> bool:
    """Whether the stream was recreated and accepted, and nothing of it is written yet, so that its group is to come."""
    return written is None and split_epoch(shard.stream)[1] > 1


class EpochServer(RedisConnection):
    """A server whose streams are called by the names of their epochs.

    Args:
        url: see :class:`stream_consumers.redis.server.RedisConnection`.
        client: likewise.
        names: for each stream the name of its epoch.
    """

    def __init__(self, url: str | StreamUrl, client: ClientConfig | None = None, *, names: EpochNameMap) -> None:
        super().__init__(url, client)
        self._names = EpochNames(names)

    def shards(self) -> list[Shard]:
        """See :meth:`stream_consumers.redis.server.RedisConnection.shards`."""
        return sorted(map(self._names.to_epoch, super().shards()))

    def key(self, shard: Shard) -> bytes:
        """The key of a shard."""
        return super().key(self._names.to_stream(shard))

    def identities(self) -> Mapping[str, str]:
        """See :meth:`stream_consumers.redis.server.RedisConnection.identities`."""
        return {self._names.names.get(stream, stream): known for stream, known in super().identities().items()}


def _consumer(name: ClaimName | bytes) -> str | bytes:
    return str(name) if isinstance(name, ClaimName) else name
