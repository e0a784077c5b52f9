"""Changes how a group shares its shards, which changes the transaction sequences of its batches.

A batch planned in an old sequence could land next to one of a new sequence: the same messages twice. So the old
sequences are fenced, each by an empty commit that takes its next number, before a run plans in the new ones:

    one sequence -> one a shard    ONE commit fences the sequence and switches
    one a shard -> one sequence    1 "switching": no run plans any more   2 every shard is fenced   3 the switch

With Redis, members may claim entries one by one. There the server's position decides what is delivered next:

    positions -> claims   1 "switching"   2 the group is set to the ledger's positions and to claim mode   3 the switch
    claims -> positions   1 nothing may be pending   2 "switching", the group leaves claim mode, every member and
                          every open claim is fenced   3 what was delivered is covered   4 the switch

Claim mode keeps a late run by position from moving the group back. A switch that was killed on the way is run again.
tests/spark_jobs/test_mode_switch_model.py explores all interleavings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.source_checks import check_restored
from spark_jobs.batches.target_table import commit_empty
from spark_jobs.claims.claim_state import ClaimStatus, ClaimStatuses, moved_forwards, skipped_entries
from spark_jobs.ledger.entries import CLAIMS, LEAVING_CLAIMS, SWITCHING, EntryFields, ShardState
from spark_jobs.ledger.ledger import Ledger, LedgerState
from stream_consumers.batches import BatchSource, Range, position_facts_in
from stream_consumers.display import counted
from stream_consumers.epochs import split_epoch
from stream_consumers.errors import GroupActiveError, InvalidOptionError, StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode, choice
from stream_consumers.redis.claims import ClaimName, RedisClaims


def switch_sharing(
    spark: SparkSession,
    ingestion: Ingestion,
    *,
    to: ConsumerMode,
    source: BatchSource,
    claims: RedisClaims | None = None,
) -> bool:
    """Change how the group shares its shards; stop its runs first, or they fail when they plan their next batch.

    Args:
        spark: a session that can write Delta tables.
        ingestion: group and table.
        to: the new mode.
        source: the stream; each of its shards is fenced, besides those that the ledger knows.
        claims: the group, where members claim entries in mode ``load_balanced`` (Redis).

    Returns:
        Whether anything had to be changed.

    Raises:
        StreamNotFoundError: the group has written nothing into the table.
        GroupActiveError: entries are pending, or something else changed the group meanwhile.
        DataLossError: a RESTORE removed claimed batches, or another client moved the group forwards.
        WriteError: Spark failed; run it again.
    """
    to = choice(ConsumerMode, to, option="to")
    member = replace(ingestion, shard=None)
    state = member.ledger().read()
    if state.newest is None:
        raise StreamNotFoundError(
            f"group {ingestion.group!r} has written nothing into {ingestion.table}",
            remedy="There is nothing to switch: its first run decides the mode.",
        )
    wanted = CLAIMS if claims is not None and to is ConsumerMode.LOAD_BALANCED else to.value
    if state.sharing == wanted:
        if claims is not None and wanted == CLAIMS:
            keep_claim_mode(claims, state)
        return False
    is_leaving = state.sharing in _CLAIMED
    if claims is not None:
        check_switch(claims, state, ingestion, to_claims=wanted == CLAIMS)
    if claims is not None and wanted == CLAIMS:
        if not is_leaving:
            _fence(spark, member, switch=SWITCHING)
    elif claims is not None and is_leaving:
        _end_claims(spark, member, claims)
    elif to is not ConsumerMode.LOAD_BALANCED and state.sharing not in _ONE_SEQUENCE:
        _fence(spark, member, switch=SWITCHING)
        # Asked only now: no run plans on a shard that appears later.
        for shard in sorted({*ingestion.in_epochs(source).extents(), *state.shards}):
            _fence(spark, replace(ingestion, shard=shard), switch=None)

    def enter(state: LedgerState) -> None:
        # By the state that the switch is planned from. Where a RESTORE comes in between, the switch does not count.
        if claims is not None and wanted == CLAIMS:
            check_switch(claims, state, ingestion, to_claims=True)
            enter_claim_mode(claims, state, was_claimed=state.sharing in _CLAIMED)

    _fence(spark, member, switch=wanted, prepare=enter)
    if (found := member.ledger().read().sharing) != wanted:
        raise GroupActiveError(
            f"group {ingestion.group!r} is {found}, not {wanted}: a RESTORE, or another switch, came in between",
            remedy="Run the switch again.",
        )
    return True


def _end_claims(spark: SparkSession, ingestion: Ingestion, claims: RedisClaims) -> None:
    _fence(spark, ingestion, switch=LEAVING_CLAIMS)
    leave_claim_mode(claims)

    def fence(member: str, number: int) -> None:
        fenced = replace(ingestion, member=member)
        while fenced.ledger().read().last_number < number:
            _fence(spark, fenced, switch=None)

    # A member that looked before this switch began has its next number already.
    for member in {c.entry.by for c in ingestion.ledger().newest_first() if c.entry and "/" not in c.entry.by}:
        _fence(spark, replace(ingestion, member=member), switch=None)
    ranges, hint = settle_claims(claims, ingestion.ledger(), fence)
    _fence(spark, ingestion, switch=None, ranges=ranges, hint=hint)


_ONE_SEQUENCE = (ConsumerMode.RESUMABLE.value, ConsumerMode.REAL_TIME.value)
_CLAIMED = (CLAIMS, LEAVING_CLAIMS)


def _fence(
    spark: SparkSession,
    ingestion: Ingestion,
    *,
    switch: str | None,
    ranges: Mapping[Shard, Range] | None = None,
    hint: Mapping[str, object] | None = None,
    prepare: Callable[[LedgerState], None] | None = None,
) -> None:
    more = EntryFields(switch=switch, ranges=ranges or {})
    if hint:
        more["hint"] = hint

    def fields(state: LedgerState) -> EntryFields:
        if prepare is not None:
            prepare(state)
        return more

    commit_empty(spark, ingestion, "fence", fields)


def enter_claim_mode(claims: RedisClaims, state: LedgerState, *, was_claimed: bool) -> None:
    """Step 2 towards claims: every shard continues at the position of the ledger.

    Args:
        claims: the group.
        state: the ledger; nothing is written by position any more.
        was_claimed: the entries were claimed all along, so that the server's position is right as it is.
    """
    counted = position_facts_in(state.hint)
    for shard, position in state.positions.items():
        if shard not in claims.shards or was_claimed:
            continue
        place, known = counted.get(shard, (None, None))
        read = known.added if known is not None and place == position else None
        claims.group.set_position(shard, position, entries_read=read, enter_claim_mode=True)
        # The table has them; otherwise they would be taken over from the consumer that holds them.
        claims.group.acknowledge_below(shard, position)
    keep_claim_mode(claims, state)


def keep_claim_mode(claims: RedisClaims, state: LedgerState) -> None:
    """Set claim mode where it is missing."""
    for shard in claims.shards:
        if shard in state.shards and claims.group.facts(shard) is not None:
            claims.group.enter_claim_mode(shard)


def check_switch(claims: RedisClaims, state: LedgerState, ingestion: Ingestion, *, to_claims: bool) -> None:
    """Refuse what cannot be switched.

    Raises:
        InvalidOptionError: streams of the group are missing in the URL, or positions have gaps.
        DataLossError: a RESTORE removed claimed batches, or another client moved the group forwards.
        SourceRecreatedError: the group is gone, or was moved back.
        GroupActiveError: entries are pending.
    """
    read = {split_epoch(shard.stream)[0] for shard in state.shards}
    missing = sorted(read - set(claims.url.required_streams()))
    if missing:
        raise InvalidOptionError(
            f"group {ingestion.group!r} reads {', '.join(missing)}, too, which {claims.url} does not name",
            remedy="Name all streams of the group in the URL: a group has one mode.",
        )
    check_restored(state, ingestion)
    if not to_claims:
        check_position(claims, state)
        check_settled(claims)
        if skipped := skipped_entries(claims, ingestion.ledger()):
            raise moved_forwards(claims, skipped)
        return
    by_position = {} if state.sharing in _CLAIMED else state.shards
    broken = sorted(str(shard) for shard, known in by_position.items() if _is_behind(known))
    if broken:
        raise InvalidOptionError(
            f"group {ingestion.group!r} has to write {', '.join(broken)} again in part, since a RESTORE",
            remedy=f"Let it run in mode {state.sharing or 'resumable'} to its end, then switch.",
        )


def _is_behind(known: ShardState) -> bool:
    """Whether a group that reads by position has to read something again, before rows that are in the table."""
    is_before_claims = known.ended is None and (known.claimed or 0) > (known.covered.position or 0)
    is_before_adopted = known.lacks_adopted and known.covered.position == known.origin
    return len(known.covered.ranges) > 1 or bool(known.redo) or is_before_claims or is_before_adopted


def check_position(claims: RedisClaims, state: LedgerState) -> None:
    """Refuse where the server's position, which is to be the ledger's, is not behind all that is written.

    Raises:
        SourceRecreatedError: the group is gone, or was moved back.
    """
    claims.check({shard: known.written_end for shard, known in state.shards.items()})


def check_settled(claims: RedisClaims) -> None:
    """Refuse while entries are pending: a position says nothing of them.

    Raises:
        GroupActiveError: with the numbers.
    """
    pending = {shard: backlog.pending for shard, backlog in claims.backlog().items() if backlog.pending}
    if pending:
        raise GroupActiveError(
            f"group {claims.group.name!r} of {claims.url} has "
            f"{counted(sum(pending.values()), 'pending entry', 'pending entries')}",
            remedy="Let its members write or acknowledge them and end; then switch. If a switch was begun, first go "
            "back with: stream-assets switch --to load_balanced.",
            **{str(shard): count for shard, count in sorted(pending.items())},
        )


def settle_claims(
    claims: RedisClaims, ledger: Ledger, fence: Callable[[str, int], None]
) -> tuple[Mapping[Shard, Range], Mapping[str, object]]:
    """Steps 2 and 3 towards positions: no batch lands any more, and what was delivered is to be covered.

    Args:
        claims: the group.
        ledger: of the group.
        fence: takes a number of a member away.

    Returns:
        What is to be covered, and the hint for the first batch by position.

    Raises:
        GroupActiveError: entries are left that are in no batch.
        SourceRecreatedError: the group is gone, or was moved back.
    """
    status = ClaimStatuses(ledger)
    names = {name for listed in claims.holders().values() for raw in listed if (name := ClaimName.parse(raw))}
    for name, found in status.of(names).items():
        if found is ClaimStatus.OPEN:
            fence(name.member, name.number)
    written = {name for name, found in status.of(names).items() if found is ClaimStatus.WRITTEN}
    for shard in claims.shards:
        for name in written:
            for page in claims.pending(shard, name, idle=False):
                claims.acknowledge({shard: [entry.id for entry in page]})
    # In this order: what a member is given in between is pending.
    delivered = {shard: claims.group.facts(shard) for shard in claims.shards}
    check_settled(claims)
    state = ledger.read()
    check_position(claims, state)
    positions = state.positions
    known = {shard: facts for shard, facts in delivered.items() if facts is not None and shard in positions}
    ranges = {shard: Range(positions[shard], facts.position) for shard, facts in known.items()}
    counted = {str(shard): [facts.position, facts.read] for shard, facts in known.items() if facts.read is not None}
    return ranges, {"added_before": counted}


def leave_claim_mode(claims: RedisClaims) -> None:
    """Nothing is claimed any more: the scripts that claim look for claim mode."""
    for shard in claims.shards:
        if claims.group.facts(shard) is not None:
            claims.group.leave_claim_mode(shard)
