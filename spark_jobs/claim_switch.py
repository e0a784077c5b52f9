"""Changes between positions and claimed entries (Redis), where the server's position decides what is delivered next.

    positions -> claims   1 "switching"   2 the group is set to the ledger's positions and marked   3 the switch
    claims -> positions   1 nothing may be pending   2 "switching", and names that are open are fenced
                          3 what was delivered is covered   4 the mark is removed   5 the switch

The mark keeps a late run of the other mode from moving the group back. Killed on the way, it is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spark_jobs.claim_names import NameStatus, Status
from spark_jobs.ledger import Ledger
from stream_consumers.batches import Range
from stream_consumers.claims import ClaimName
from stream_consumers.errors import GroupActiveError
from stream_consumers.messages import Shard
from stream_consumers.redis_claims import RedisClaims

CoverRanges = Mapping[Shard, Range]


def mark_claims(claims: RedisClaims, ledger: Ledger) -> None:
    """Step 2 towards claims: every shard of the ledger goes on where the ledger is."""
    positions = ledger.read().positions
    for shard in claims.shards:
        if shard in positions:
            claims.server.set_position(claims.group, shard, positions[shard], entries_read=None, mark=True)


def check_settled(claims: RedisClaims) -> None:
    """Refuse while entries are pending: a position says nothing of them.

    Raises:
        GroupActiveError: with the numbers.
    """
    pending = {shard: backlog.pending for shard, backlog in claims.backlog().items() if backlog.pending}
    if pending:
        raise GroupActiveError(
            f"{sum(pending.values())} entries of {claims.url} are pending in group {claims.group!r}",
            remedy="Let its members write or acknowledge them and end; then switch. If a switch was begun, first go "
            "back with: stream-assets switch --to load_balanced.",
            **{str(shard): count for shard, count in sorted(pending.items())},
        )


def settle_claims(claims: RedisClaims, ledger: Ledger, fence: Callable[[str, int], None]) -> CoverRanges:
    """Steps 2 and 3 towards positions: no batch lands any more, and what was delivered is to be covered.

    Args:
        claims: the group.
        ledger: of the group.
        fence: takes a number of a member's line away.

    Raises:
        GroupActiveError: entries are left that are in no batch.
    """
    status = NameStatus(ledger)
    names = {name for listed in claims.holders().values() for text in listed if (name := ClaimName.parse(text))}
    for name, found in status.of(names).items():
        if found is Status.OPEN:
            fence(name.member, name.number)
    written = {name for name, found in status.of(names).items() if found is Status.WRITTEN}
    for shard in claims.shards:
        for name in written:
            for page in claims.pending(shard, str(name), idle=False):
                claims.acknowledge({shard: [entry.id for entry in page]})
    check_settled(claims)
    positions = ledger.read().positions
    return {
        shard: Range(positions[shard], claims.position(shard))
        for shard in claims.shards
        if shard in positions and positions[shard] < claims.position(shard)
    }


def unmark_claims(claims: RedisClaims) -> None:
    """Step 4 towards positions."""
    for shard in claims.shards:
        claims.server.unmark_claimed(claims.group, shard)
