"""What became of a claim: the ledger says whether the batch that claimed the entries is in the table."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spark_jobs.ledger.entries import State
from spark_jobs.ledger.ledger import Ledger, app_id
from stream_consumers.batches import Range
from stream_consumers.messages import Shard
from stream_consumers.redis.claim_name import ClaimName
from stream_consumers.redis.claims import RedisClaims
from stream_consumers.redis.ids import to_sequence


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
            LedgerTruncatedError: the log was cleaned, so that it cannot be told.
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
        delivered: per shard, from where the group began to behind the last entry that was given to somebody.
        unsettled: the sequences in it that are pending, and not in the table.
        lag: entries that are unread or pending.
    """

    delivered: Mapping[Shard, Range]
    unsettled: Mapping[Shard, npt.NDArray[np.int64]]
    lag: Mapping[Shard, int]


def claim_state(claims: RedisClaims, ledger: Ledger, known: State) -> ClaimState:
    """Ask the server, and the ledger for what became of the names.

    Args:
        claims: the group.
        ledger: of the group.
        known: the shards of the ledger.

    Raises:
        LedgerTruncatedError: the log was cleaned, so that it cannot be told.
    """
    status = ClaimStatuses(ledger)
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
        delivered[shard] = Range(origin or 0, claims.position(shard))
    return ClaimState(delivered, unsettled, {shard: b.total for shard, b in claims.backlog().items()})
