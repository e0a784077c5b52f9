"""What became of a claim: the ledger says whether the batch that claimed the entries is in the table."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spark_jobs.ledger.entries import State
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger, app_id
from stream_consumers.batches import Range
from stream_consumers.messages import Shard
from stream_consumers.redis.claim_name import ClaimName
from stream_consumers.redis.claims import RedisClaims
from stream_consumers.redis.ids import to_id, to_sequence


class ClaimStatus(enum.Enum):
    """Of a claim, known by its consumer name. ``WRITTEN`` and ``DEAD`` never change again.

    ``OPEN``: its number may still be written. ``WRITTEN``: its batch is in the table, so its entries are acknowledged
    and never written again. ``DEAD``: it never will be, so its entries may be moved into another batch.
    """

    OPEN = "open"
    WRITTEN = "written"
    DEAD = "dead"


class ClaimStatuses:
    """Looks claims up in the ledger of their group.

    Args:
        ledger: of the group.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: dict[ClaimName, ClaimStatus] = {}

    def of(self, names: Iterable[ClaimName]) -> Mapping[ClaimName, ClaimStatus]:
        """The status of each claim.

        Raises:
            LedgerTruncatedError: the log was cleaned, so that it is unknown.
        """
        wanted = set(names)
        unknown = wanted - self._known.keys()
        last = {member: self._ledger.last_number(member) for member in {name.member for name in unknown}}
        closed = {name for name in unknown if name.number <= last[name.member]}
        group = self._ledger.group
        entries = self._ledger.find((app_id(group, name.member), name.number) for name in closed)
        for name in closed:
            entry = entries.get((app_id(group, name.member), name.number))
            is_written = entry is not None and entry.kind == "batch" and entry.bid == name.bid
            self._known[name] = ClaimStatus.WRITTEN if is_written else ClaimStatus.DEAD
        return {name: self._known.get(name, ClaimStatus.OPEN) for name in wanted}


@dataclass(frozen=True, slots=True)
class ClaimState:
    """What a group that claims entries is done with.

    Args:
        delivered: per shard, from where the group began to after the last entry that was delivered, without what is
            recorded as skipped.
        unsettled: the sequences in it that are pending, and not in the table.
        lag: entries that are unread or pending.
        lost: what is gone before it was written, or was skipped, and is not recorded.
    """

    delivered: Mapping[Shard, Intervals]
    unsettled: Mapping[Shard, npt.NDArray[np.int64]]
    lag: Mapping[Shard, int]
    lost: Mapping[Shard, Range] = field(default_factory=dict)


class Skipped(NamedTuple):
    """Entries that no member was given, since another client moved the group forwards.

    Args:
        part: from the first one to the position of the group.
        entries: how many the stream holds.
    """

    part: Range
    entries: int


def skipped_entries(claims: RedisClaims, ledger: Ledger) -> Mapping[Shard, Skipped]:
    """What lies between the last entry that a member was given and the position of the group, and is not recorded.

    An entry that a member was given is pending, or its batch is in the table. Other clients in the group acknowledge
    what they like, so that where there are some nothing is found.

    Args:
        claims: the group; it refuses from here on to claim from another position, unless a member has moved it.
        ledger: of the group.
    """
    # In this order: what is acknowledged between two of these steps is seen by the next one.
    positions = claims.positions()
    ends = claims.pending_ends(positions)
    shards = ledger.read().shards
    found = {}
    for shard, position in positions.items():
        if shard not in shards:
            continue
        known = shards[shard]
        part = Range(max(known.claimed or 0, known.covered.position or 0, ends[shard]), position)
        if part.start >= part.end or claims.has_others(shard) or not claims.count(shard, part):
            continue
        left = Intervals.of(part) - recorded_skips(ledger).get(shard, Intervals())
        entries = sum(claims.count(shard, piece) for piece in left)
        if entries:
            found[shard] = Skipped(left.hull, entries)
    return found


def recorded_skips(ledger: Ledger) -> Mapping[Shard, Intervals]:
    """What the ledger says that the group skipped."""
    found: dict[Shard, Intervals] = {}
    for commit in ledger.surviving():
        for shard, part in commit.entry.skipped.items() if commit.entry is not None else ():
            found[shard] = found.get(shard, Intervals()) | Intervals.of(part)
    return found


def losses_of_claims(claims: RedisClaims, ledger: Ledger | None = None) -> Mapping[Shard, Range]:
    """What a run would find of the group: entries that are gone, or were skipped, before a member was given them.

    Args:
        claims: the group.
        ledger: of the group, where there is a table.

    Raises:
        SourceRecreatedError: see :meth:`stream_consumers.redis.claims.RedisClaims.check`.
    """
    lost: dict[Shard, Range] = {}
    if ledger is not None:
        claims.check({shard: known.written_end for shard, known in ledger.read().shards.items()})
        lost = {shard: skipped.part for shard, skipped in skipped_entries(claims, ledger).items()}
    return lost | {shard: Range(part.start, part.end) for shard, part in claims.trimmed().items()}


def claim_state(claims: RedisClaims, ledger: Ledger, known: State) -> ClaimState:
    """What a run would find: ask the server, and the ledger for what became of the names.

    Args:
        claims: the group.
        ledger: of the group.
        known: the shards of the ledger.

    Raises:
        SourceRecreatedError: see :meth:`stream_consumers.redis.claims.RedisClaims.check`.
        LedgerTruncatedError: the log was cleaned, so that it is unknown.
    """
    lost = dict(losses_of_claims(claims, ledger))
    status = ClaimStatuses(ledger)
    skipped = recorded_skips(ledger)
    delivered, unsettled = {}, {}
    for shard, names in claims.holders().items():
        places: list[int] = []
        for raw in names:
            name = ClaimName.parse(raw)
            if name is None or status.of([name])[name] is not ClaimStatus.WRITTEN:
                pages = claims.pending(shard, raw, idle=False)
                places += [to_sequence(entry.id) for page in pages for entry in page]
        unsettled[shard] = np.array(sorted(places), np.int64)
        origin = known[shard].origin if shard in known else None
        delivered[shard] = Intervals.of((origin or 0, claims.position(shard))) - skipped.get(shard, Intervals())
        gone = claims.missing({shard: [to_id(place).encode() for place in unsettled[shard].tolist()]}).get(shard)
        if gone:
            lost[shard] = Range(to_sequence(gone[0]), to_sequence(gone[-1]) + 1)
    return ClaimState(delivered, unsettled, {shard: b.total for shard, b in claims.backlog().items()}, lost)
