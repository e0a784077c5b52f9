"""Redis groups in claim mode: claims of new entries, takeover of entries of dead members, and heartbeats.

This module does not decide whether entries may be taken from a name; :mod:`spark_jobs.claims.claim_job` asks the
ledger.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from stream_consumers.batches import BatchPlan, Range
from stream_consumers.client_config import ClientConfig
from stream_consumers.closing import ClosesOnExit
from stream_consumers.epochs import EpochNameMap, EpochNames, accept_remedy, split_epoch
from stream_consumers.errors import (
    DataLossError,
    GroupRemovedError,
    InvalidOptionError,
    SourceRecreatedError,
    StreamAssetsError,
    StreamNotFoundError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, check_member, choice
from stream_consumers.redis.batches import Slice, split_slices
from stream_consumers.redis.client import claim_policy
from stream_consumers.redis.entries import id_before, quoted_words, sequence_after, to_id, to_sequence
from stream_consumers.redis.group import CLAIM_MODE_SENTINEL, NOW, START, GroupFacts, PendingEntry, RedisGroup
from stream_consumers.redis.scripts import CLAIM_NEW, COUNT_AS_READ, RELEASE, REMOVE_CONSUMER, TAKE_OVER, TIME, TOUCH
from stream_consumers.redis.server import LOOK_TRIES, PAGE_SIZE, Look, RedisConnection, StreamFacts
from stream_consumers.urls import StreamUrl

CLAIM_PAGE_SIZE = 4096
# The idle time of a released entry (three years), so that any member can take it over immediately.
RELEASED_MS = 100_000_000_000
# A transaction number in a Delta log is a signed number of 64 bits.
_MAX_NUMBER = 2**63 - 1
_NAME = re.compile(r"([^/]+)/([1-9][0-9]{0,18})/([0-9a-f]{32})\Z")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True, slots=True)
class ClaimName:
    """The consumer name that holds the entries of one batch attempt; the ledger knows whether the batch was written.

    Args:
        member: the member that claimed them.
        number: the number of the batch in the member's transaction sequence.
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
        r"""Parse a consumer name; return ``None`` for the name of another kind of client, which may be any bytes.

        Example:
            >>> [ClaimName.parse(name + b"/1/" + b"0" * 32) for name in (b" ", b"\xff", b"x/9")]
            [None, None, None]
        """
        try:
            # Strict, so that the name written again has the same bytes: others would not be found at the server.
            match = _NAME.match(raw.decode())
            if match is None or int(match[2]) > _MAX_NUMBER:
                return None
            return cls(check_member(match[1]), int(match[2]), match[3])
        except (UnicodeDecodeError, InvalidOptionError):
            return None


class Backlog(NamedTuple):
    """The numbers of entries of a shard that a group has not finished.

    Args:
        unread: entries that were not delivered yet; an upper bound if single entries were deleted.
        pending: delivered entries that are not acknowledged.
    """

    unread: int
    pending: int

    @property
    def total(self) -> int:
        """The sum of unread and pending entries."""
        return self.unread + self.pending


class TrimmedEntries(NamedTuple):
    """Entries that were removed from a stream before they were delivered to the group.

    Args:
        start: a lower bound of the lost sequences.
        end: an exclusive upper bound of the lost sequences.
        entries: the number of lost entries; the most that can be lost if ``read`` is ``None``.
        read: the number of entries that the group counts as read, or ``None`` if this count is unknown or too high;
            together with ``start`` it identifies the loss.
        position: the sequence after the last delivered one.
    """

    start: int
    end: int
    entries: int
    read: int | None
    position: int


@dataclass
class ClaimedEntries:
    """The entries that a consumer name holds so far: the batch that is being claimed.

    Args:
        name: the consumer name.
        records: the limit of entries.
        room: the limit of bytes; a batch always holds at least one entry.
        ids: the ids of the entries that the name holds.
        slices: the slices for reading them.
        used: the size of the entries in bytes.
    """

    name: ClaimName
    records: int
    room: int
    ids: dict[Shard, list[bytes]] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    used: int = 0

    @property
    def count(self) -> int:
        """The number of entries that the name holds."""
        return sum(map(len, self.ids.values()))

    def add(self, piece: Slice, ids: Sequence[bytes], size: int) -> None:
        """Add claimed entries."""
        self.ids.setdefault(piece.shard, []).extend(ids)
        self.slices.append(piece)
        self.used += size


class RedisClaims(ClosesOnExit):
    """A group in claim mode; a context manager.

    Args:
        url: ``redis://host:6379/orders``.
        group: the name of the consumer group; other clients may also be members.
        client: as for :class:`stream_consumers.redis.batches.RedisBatchSource`, and the fields of
            :class:`stream_consumers.redis.client.ClaimPolicy`.
        names: the epoch name of each stream, see :mod:`stream_consumers.epochs`; by default the first epoch.
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
        """Raise if a group or a stream does not match the ledger.

        Args:
            known: the shards in the ledger, each with the sequence after the last one in the table.

        Raises:
            SourceRecreatedError: the group or the stream of a known shard was removed, or the stream was recreated.
        """
        own = {shard: written for shard, written in sorted(known.items()) if shard.stream in self.identities()}
        # Read groups before streams: an entry that is delivered in between must not appear to be after the end.
        groups, streams, name = self.group.facts_of(own), self.server.facts_of(own), self.group.name
        for shard, written in own.items():
            facts, group = streams[shard], groups[shard]
            if facts is not None and group is None and _is_accepted(shard, written):
                continue
            if facts is None or group is None:
                raise self._lost_group(shard, facts)
            words = quoted_words(self.server.key(shard), name)
            if group.delivered != id_before(group.position):
                raise DataLossError(
                    f"group {name!r} of {shard} at {self.url} is at {group.delivered}, which has no sequence: another "
                    "client moved it, or added an entry there",
                    remedy=f"Move it back: XGROUP SETID {words} "
                    f"{'<the last id that is in the table>' if written is None else id_before(written)}. The next run "
                    "then reports whether entries may be gone.",
                    position=group.position,
                    table=written,
                )
            if group.position > facts.end:
                raise SourceRecreatedError(
                    f"{shard} of {self.url} ends before the position of group {name!r}: it was recreated",
                    remedy=f"Redis would deliver no entry of it. {accept_remedy(shard.stream)}",
                    position=group.position,
                    end=facts.end,
                )
            if written is not None and group.position < written:
                # Without the count, Redis would not report what was trimmed unread after the new position.
                read = self._reads(shard, facts, group)
                more = 0 if read is None else self.count(shard, Range(group.position, written))
                counted = "" if read is None else f" ENTRIESREAD {read + more}"
                raise SourceRecreatedError(
                    f"group {name!r} of {shard} at {self.url} was moved back, or the server lost its latest state: "
                    "entries that are in the table would be delivered again",
                    remedy="If no entry before it is missing, move it forward: "
                    f"XGROUP SETID {words} {id_before(written)}{counted}. "
                    f"{accept_remedy(shard.stream)}",
                    position=group.position,
                    table=written,
                )

    def prepare(self, start: AutoStreamReset, known: Mapping[Shard, int | None] | None = None) -> Mapping[Shard, int]:
        """Create the group if it does not exist yet, and enter claim mode.

        Args:
            start: where a new group starts; an existing group is not moved.
            known: see :meth:`check`.

        Returns:
            The sequence at which the group started in each shard; 0 if unknown.

        Raises:
            SourceRecreatedError: the group or the stream of a known shard was removed, or the stream was recreated.
        """
        start, known = choice(AutoStreamReset, start, option="start"), known or {}
        self.check(known)
        begun = {shard.stream for shard in known}
        positions = {}
        for shard in self.shards:
            is_created = False
            if self.group.facts(shard) is None:
                is_latest = start is AutoStreamReset.LATEST and not known
                # In a new shard of a known stream, or in a new epoch, the group must read all entries ever added.
                is_created = self.group.create(shard, NOW if is_latest else START, counts_removed=shard.stream in begun)
            self.check({shard: None})
            # A shard in the ledger entered claim mode before: if it is not in it now, it was switched back.
            is_new = (is_created or shard not in known) and self.group.enter_claim_mode(shard)
            # If another member created the group at the beginning, it may have moved since.
            positions[shard] = self.position(shard) if is_new or not known else 0
        return positions

    def _lost_group(self, shard: Shard, facts: StreamFacts | None) -> SourceRecreatedError:
        name = self.group.name
        words = quoted_words(self.server.key(shard), name)
        what = f"the stream {shard}" if facts is None else f"group {name!r} of {shard}"
        return SourceRecreatedError(
            f"{what} was removed from {self.url}, with its position and its pending entries",
            remedy=f"If the stream is the same and no entries were pending, create the group at its last position: "
            f"XGROUP CREATE {words} <the last id that is in the table>. {accept_remedy(shard.stream)}",
            end=facts.end if facts else None,
        )

    def holds(self, shard: Shard, sequence: int) -> bool:
        """Return whether the stream has the entry with this sequence."""
        return not self.missing({shard: [to_id(sequence).encode()]})

    def backlog(self) -> Mapping[Shard, Backlog]:
        """Return the numbers of unfinished entries of each shard; without a group, all entries are unfinished."""
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
        """Count the undelivered entries; Redis' own lag includes trimmed entries, and may be unknown."""
        return self.server.count_unread(shard, group.position, facts, group.read)

    def _reads(self, shard: Shard, facts: StreamFacts, group: GroupFacts) -> int | None:
        """Return Redis' count of the entries that the group has read; ``None`` if it is unknown or too high."""
        return _counted(facts, group, self._unread(shard, facts, group))

    def is_in_claim_mode(self) -> bool:
        """Return whether the group is in claim mode in the first shard that has it."""
        for shard in self.shards:
            if self.group.facts(shard) is not None:
                return self.group.is_in_claim_mode(shard)
        return False

    def position(self, shard: Shard) -> int:
        """Return the sequence after the last delivered entry of a shard."""
        group = self.group.facts(shard)
        return group.position if group else 0

    def positions(self) -> Mapping[Shard, int]:
        """Return the group's position in each shard; later claims start there, or where another member has moved it."""
        found = self.group.facts_of(self.shards)
        self._delivered = {shard: facts.delivered for shard, facts in found.items() if facts is not None}
        return {shard: sequence_after(delivered) for shard, delivered in self._delivered.items()}

    def pending_ends(self, shards: Iterable[Shard]) -> Mapping[Shard, int]:
        """Return the sequence after the last pending entry of each shard; 0 without pending entries."""
        asked = list(shards)
        words = [("XPENDING", self.server.key(shard), self.group.name) for shard in asked]
        replies = self.server.replies(words, f"reading the pending entries of {self.url}")
        return {shard: sequence_after(reply["max"]) if reply["pending"] else 0 for shard, reply in zip(asked, replies)}

    def consumers(self, shard: Shard) -> frozenset[bytes]:
        """Return the consumer names of the group, including those of consumers that ended."""
        return frozenset(member["name"] for member in self.group.members(shard)) - {CLAIM_MODE_SENTINEL.encode()}

    def count(self, shard: Shard, part: Range) -> int:
        """Return the number of entries in a range of the stream."""
        return self.server.count(shard, part.start, part.end)

    def has_grown(self, *, with_new_shards: bool = True) -> bool:
        """Return whether entries were added after :attr:`ends`; if so, update :attr:`ends` and :attr:`shards`.

        Args:
            with_new_shards: also search for new shards, which takes longer.
        """
        shards = self.server.shards() if with_new_shards else self.shards
        grown = self.server.progress([self.server.key(shard) for shard in shards])
        ends = {shard: sequence_after(now.last) for shard, now in zip(shards, grown) if now is not None}
        if ends == self.ends:
            return False
        self.shards, self.ends = shards, ends
        return True

    def is_drained(self) -> bool:
        """Return whether every entry before :attr:`ends` was delivered and acknowledged."""
        for shard, end in self.ends.items():
            group = self.group.facts(shard)
            if group and group.pending and any(self.group.pending(shard, below=end, page_size=1)):
                return False
            after = f"({group.delivered}" if group else "-"
            with self.server.explained(f"reading the rest of {shard}"):
                key = self.server.key(shard)
                if end and self.server.connection.execute_command("XRANGE", key, after, id_before(end), "COUNT", 1):
                    return False
        return True

    def may_be_removed(self, shard: Shard, start: int) -> bool:
        """Return whether entries from this sequence on may have been trimmed or deleted."""
        facts = self.server.facts_of([shard])[shard]
        return facts is not None and _may_be_removed(facts, start)

    def trimmed(self, written: Collection[Shard] = ()) -> Mapping[Shard, TrimmedEntries]:
        """Return entries that were removed before they were delivered, per shard; only Redis 7 counts them.

        Redis forgets its count if another client runs ``XGROUP SETID`` or ``XGROUP CREATE`` without ``ENTRIESREAD``, or
        reads while a deleted entry is ahead. A count that another client has set so high that fewer entries could be
        unread than the stream has is as good as forgotten (``tests/model/counts.py``).

        Args:
            written: the shards of which the table has entries. If Redis has forgotten the count of one of them, all
                entries that may have been removed unread are returned.
        """
        found = {}
        streams = self._facts()
        groups = self.group.facts_of(streams)
        for shard, facts in streams.items():
            group = groups[shard]
            if group is None or facts.added is None:
                continue
            # Other members may have moved the group between the two replies, so a loss is looked at again.
            held = facts.held_from(group.position)
            if held is None:
                may_lack = (facts.deleted or 0) >= group.position
            else:
                may_lack = _trimmed(group, Look(facts, held, held), is_written=shard in written) is not None
            if not may_lack:
                continue
            at = self._look(shard)
            if at is not None and (trimmed := _trimmed(*at, is_written=shard in written)) is not None:
                found[shard] = trimmed
        return found

    def _look(self, shard: Shard) -> tuple[GroupFacts, Look] | None:
        """Return the facts about a group and its stream at one moment; ``None`` if members move it all the time."""
        for _ in range(LOOK_TRIES):
            group, facts = self.group.facts(shard), self.server.facts(shard)
            if group is None or facts is None:
                return None
            look, again = self.server.look(shard, group.position, facts), self.group.facts(shard)
            if again is not None and (again.delivered, again.read) == (group.delivered, group.read):
                return group, look
        return None

    def count_reads(self, written: Collection[Shard] = ()) -> None:
        """Make the server count the entries that the group reads, if its count is unknown or too high.

        Args:
            written: as for :meth:`trimmed`. In the other shards, the group begins where it is: earlier losses stay
                unknown.
        """
        # Read groups before streams: an entry that is delivered in between must not make the count appear too high.
        groups = self.group.facts_of(self.shards)
        for shard, facts in self._facts().items():
            seen = groups[shard]
            if seen is None or facts.added is None or self._reads(shard, facts, seen) is not None:
                continue
            if (at := self._look(shard)) is None:
                continue
            group, look = at
            counted, read = "" if group.read is None else str(group.read), ""
            if not (shard in written and _may_be_removed(look.facts, group.position)):
                read = str((look.facts.added or 0) - look.most)
            # A count that is too high is removed, so that it hides nothing that is trimmed later.
            if read != counted:
                if read and shard in written:
                    _log.warning(
                        "the count of the entries of %s that group %r has read begins anew, because Redis does not "
                        "have it: entries before %d that were removed unread are not detected",
                        shard,
                        self.group.name,
                        group.position,
                    )
                self._count_as_read(shard, group.position, counted, read)

    def account_for(self, shard: Shard, trimmed: TrimmedEntries) -> None:
        """Count lost entries as read, once the loss is recorded in the table."""
        counted = "" if trimmed.read is None else str(trimmed.read)
        self._count_as_read(shard, trimmed.position, counted, str((trimmed.read or 0) + trimmed.entries))

    def _count_as_read(self, shard: Shard, position: int, counted: str, read: str) -> None:
        self.group.run(shard, COUNT_AS_READ, [id_before(position), counted, read])

    def idle_names(self, shard: Shard) -> frozenset[bytes]:
        """Return the names that were idle for the policy's time."""
        return frozenset(m["name"] for m in self.group.members(shard) if m["idle"] >= self.policy.min_idle_ms)

    def is_released(self, shard: Shard, name: ClaimName) -> bool:
        """Return whether a name has released the entries that it holds."""
        return any(self.group.pending(shard, consumer=str(name), idle_ms=RELEASED_MS, page_size=1))

    def now(self, shard: Shard) -> int:
        """Return the time in milliseconds at the server of a shard."""
        return int(self.group.run(shard, TIME, []))

    def holders(self) -> Mapping[Shard, list[bytes]]:
        """Return the names that hold entries, for each shard that has the group."""
        return {shard: [m["name"] for m in members if m["pending"]] for shard, members in self._members()}

    def _members(self) -> Iterator[tuple[Shard, Sequence[Mapping[str, Any]]]]:
        for shard in self.shards:
            if self.group.facts(shard) is not None:
                yield shard, self.group.members(shard)

    def pending(self, shard: Shard, name: ClaimName | bytes, *, idle: bool) -> Iterator[list[PendingEntry]]:
        """Yield the entries of a name in pages; with ``idle``, only those that were idle for the policy's time."""
        return self.group.pending(shard, consumer=_consumer(name), idle_ms=self.policy.min_idle_ms if idle else 0)

    def claim_new(self, held: ClaimedEntries, shard: Shard, records: int) -> bool:
        """Claim new entries of a shard in order, up to :attr:`ends`; return whether the limit of bytes was reached.

        Raises:
            StreamAssetsError: it is unknown whether entries were claimed; do not use the name again.
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
            if is_full or is_refused or not ids:
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
        """Move entries from a dead name if it still holds them.

        Args:
            held: the batch that gets the entries.
            shard: the shard of the entries.
            name: the name that holds them.
            entries: the entries to move.
            since: move only entries that were idle since this :meth:`now`; entries of other clients must also have been
                idle for the policy's time.
            error: the reason, if the entries are to become dead letters.

        Returns:
            Whether the limit of bytes was reached, and the ids of entries that are no longer in the stream.

        Raises:
            StreamAssetsError: it is unknown whether entries were moved; do not use the name again.
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
        """Plan how to read the entries that a name holds."""
        splits = split_slices(
            self.url, self.server.client_options, held.slices, size=held.used, parallelism=parallelism
        )
        return BatchPlan({}, splits, held.count)

    def acknowledge(self, ids: Mapping[Shard, Sequence[bytes]]) -> None:
        """Acknowledge entries that are in the table, regardless of the name that holds them now.

        Raises:
            StreamNotFoundError: the group was removed.
        """
        for shard, listed in ids.items():
            try:
                self.group.acknowledge(shard, listed)
            except GroupRemovedError as error:
                raise StreamNotFoundError(
                    f"{shard} of {self.url} no longer has group {self.group.name!r}: no entry was acknowledged",
                    remedy="The entries are in the table. Run again: the next error has the remedy for the group.",
                    entries=len(listed),
                ) from error

    def missing(self, ids: Mapping[Shard, Sequence[bytes]]) -> Mapping[Shard, list[bytes]]:
        """Return the entries among these that are no longer in the stream."""
        found = {}
        for shard, listed in ids.items():
            ranges = [("XRANGE", self.server.key(shard), entry_id, entry_id) for entry_id in listed]
            replies = self.server.replies(ranges, f"looking for entries of {shard}")
            found[shard] = [entry_id for entry_id, reply in zip(listed, replies) if not reply]
        return {shard: listed for shard, listed in found.items() if listed}

    def release(self, shard: Shard, name: ClaimName) -> None:
        """Release the entries of a name: others can take them over immediately, and this delivery does not count."""
        self._page_through(RELEASE, shard, name, RELEASED_MS)

    def touch(self, name: ClaimName, shards: Iterable[Shard]) -> None:
        """Send a heartbeat, which resets the idle time of the entries that the name still holds."""
        for shard in shards:
            self._page_through(TOUCH, shard, name)

    def _page_through(self, script: str, shard: Shard, name: ClaimName, *arguments: object) -> None:
        start: object = "-"
        while start:
            start = self.group.run(shard, script, [str(name), start, PAGE_SIZE, *arguments])

    def remove_name(self, shard: Shard, name: ClaimName) -> bool:
        """Remove a name if it holds no entry; return whether it was removed."""
        return bool(self.group.run(shard, REMOVE_CONSUMER, [str(name)]))

    def names(self, *, empty: bool = False) -> Mapping[Shard, list[bytes]]:
        """Return the names that were not removed; with ``empty``, only names that hold no entry."""
        return {s: [m["name"] for m in members if not (empty and m["pending"])] for s, members in self._members()}


class Heartbeat(ClosesOnExit):
    """Sends heartbeats for a name while its batch is written, so that no other member takes over its entries."""

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
                # This is harmless: at worst another member also writes the batch, and the ledger selects one of them.
                _log.warning("the heartbeat of %s failed: %s", self._held.name, error)

    def close(self) -> None:
        """Stop the heartbeat."""
        self._stop.set()
        self._thread.join()


def _may_be_removed(facts: StreamFacts, start: int) -> bool:
    """Return whether entries from a sequence on may be gone: trimming removes the first ones, deleting any."""
    return start < facts.end and (facts.first_or_end > start or (facts.deleted or 0) >= start)


def _trimmed(group: GroupFacts, look: Look, *, is_written: bool) -> TrimmedEntries | None:
    facts, position = look.facts, group.position
    first, deleted = facts.first_or_end, facts.deleted or 0
    # Of single entries that were deleted, only the last one is known.
    end = max(position, first, deleted + 1)
    if first >= position:
        start, end = position, end if end > position else facts.end
    elif facts.end == position or deleted >= position:
        start = min(position, deleted)
    else:
        return None
    read = _counted(facts, group, look.least)
    if read is None and not (is_written and _may_be_removed(facts, position)):
        return None
    entries = (facts.added or 0) - (look.least if read is None else read + look.most)
    return TrimmedEntries(start, end, entries, read, position) if entries > 0 else None


def _counted(facts: StreamFacts, group: GroupFacts, unread: int) -> int | None:
    """Return Redis' count of the entries that a group has read, if it leaves room for the unread ones."""
    is_possible = group.read is not None and facts.added is not None and facts.added - group.read >= unread
    return group.read if is_possible else None


def _is_accepted(shard: Shard, written: int | None) -> bool:
    """Return whether the stream is an accepted epoch without written entries, so that its group does not exist yet."""
    return written is None and split_epoch(shard.stream)[1] > 1


class EpochServer(RedisConnection):
    """A server whose streams have their epoch names.

    Args:
        url: see :class:`stream_consumers.redis.server.RedisConnection`.
        client: see :class:`stream_consumers.redis.server.RedisConnection`.
        names: the epoch name of each stream.
    """

    def __init__(self, url: str | StreamUrl, client: ClientConfig | None = None, *, names: EpochNameMap) -> None:
        super().__init__(url, client)
        self._names = EpochNames(names)

    def shards(self) -> list[Shard]:
        """See :meth:`stream_consumers.redis.server.RedisConnection.shards`."""
        return sorted(map(self._names.to_epoch, super().shards()))

    def key(self, shard: Shard) -> bytes:
        """Return the key of a shard."""
        return super().key(self._names.to_stream(shard))

    def identities(self) -> Mapping[str, str]:
        """See :meth:`stream_consumers.redis.server.RedisConnection.identities`."""
        return {self._names.names.get(stream, stream): known for stream, known in super().identities().items()}


def _consumer(name: ClaimName | bytes) -> str | bytes:
    return str(name) if isinstance(name, ClaimName) else name
