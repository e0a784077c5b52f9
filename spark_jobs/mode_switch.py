"""Changes how a group shares its shards, which changes the transaction sequences of its batches.

A batch planned in an old sequence could land next to one of a new sequence, and write the same messages twice. So the
old sequences are fenced, each by an empty commit with its next number, before a run plans in the new ones:

    one sequence -> one a shard    ONE commit fences the sequence and switches
    one a shard -> one sequence    1 "switching": no run plans any more   2 every shard is fenced   3 the switch

With Redis, members may claim entries one by one, and the server's position decides which entries are delivered next:

    positions -> claims   1 "switching"   2 the group is set to the ledger's positions and to claim mode   3 the switch
    claims -> positions   1 nothing may be pending   2 "switching", the group leaves claim mode, every member and
                          every open claim is fenced   3 delivered entries are covered   4 the switch

Claim mode prevents a late run by position from moving the group back. A killed switch can be run again.
tests/spark_jobs/test_mode_switch_model.py explores all interleavings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain

from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.source_checks import check_removed_by_restore, last_messages_before
from spark_jobs.batches.target_table import commit_empty
from spark_jobs.claims.claim_state import (
    ClaimStatus,
    ClaimStatuses,
    claim_names,
    fence_claim,
    moved_forwards,
    skipped_entries,
)
from spark_jobs.ledger.entries import CLAIMS, LEAVING_CLAIMS, SWITCHING, EntryFields, ShardState
from spark_jobs.ledger.ledger import Ledger, LedgerState
from stream_consumers.batches import BatchSource, LastMessage, Range, position_facts_in
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
        source: the stream; each of its shards is fenced, and each shard in the ledger.
        claims: the group, if members claim entries in mode ``load_balanced`` (Redis).

    Returns:
        Whether the mode was changed.

    Raises:
        StreamNotFoundError: the group has written nothing into the table.
        GroupActiveError: entries are pending, or a RESTORE or another switch changed the group meanwhile.
        DataLossError: a RESTORE removed claimed batches, or another client moved the group forwards.
        WriteError: Spark failed; run the switch again.
    """
    to = choice(ConsumerMode, to, option="to")
    member = replace(ingestion, shard=None)
    state = member.ledger().read()
    if state.newest is None:
        raise StreamNotFoundError(
            f"group {ingestion.group!r} has written nothing into {ingestion.table}",
            remedy="No switch is needed: its first run decides the mode.",
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
        _end_claims(spark, member, claims, ingestion.in_epochs(source))
    elif to is not ConsumerMode.LOAD_BALANCED and state.sharing not in _ONE_SEQUENCE:
        _fence(spark, member, switch=SWITCHING)
        # The shards are read only now, because no run plans on a shard that appears later.
        for shard in sorted({*ingestion.in_epochs(source).extents(), *state.shards}):
            _fence(spark, replace(ingestion, shard=shard), switch=None)

    def enter(state: LedgerState) -> None:
        # Use the state that the switch is planned from. After a RESTORE in between, the switch does not count.
        if claims is not None and wanted == CLAIMS:
            check_switch(claims, state, ingestion, to_claims=True)
            enter_claim_mode(claims, state, was_claimed=state.sharing in _CLAIMED)

    _fence(spark, member, switch=wanted, prepare=enter)
    if (found := member.ledger().read().sharing) != wanted:
        raise GroupActiveError(
            f"the mode of group {ingestion.group!r} is {found}, not {wanted}: a RESTORE or another switch intervened",
            remedy="Run the switch again.",
        )
    return True


def _end_claims(spark: SparkSession, ingestion: Ingestion, claims: RedisClaims, source: BatchSource) -> None:
    _fence(spark, ingestion, switch=LEAVING_CLAIMS)
    leave_claim_mode(claims)

    # A member that read the ledger before this switch began may already use its next number.
    for member in {c.entry.by for c in ingestion.ledger().newest_first() if c.entry and "/" not in c.entry.by}:
        _fence(spark, replace(ingestion, member=member), switch=None)
    ranges, hint = settle_claims(claims, ingestion.ledger(), lambda name: fence_claim(spark, ingestion, name))
    source.extents()
    last = last_messages_before(source, {shard: part.end for shard, part in ranges.items()})
    _fence(spark, ingestion, switch=None, ranges=ranges, last_messages=last, hint=hint)


_ONE_SEQUENCE = (ConsumerMode.RESUMABLE.value, ConsumerMode.REAL_TIME.value)
_CLAIMED = (CLAIMS, LEAVING_CLAIMS)


def _fence(
    spark: SparkSession,
    ingestion: Ingestion,
    *,
    switch: str | None,
    ranges: Mapping[Shard, Range] | None = None,
    last_messages: Mapping[Shard, LastMessage] | None = None,
    hint: Mapping[str, object] | None = None,
    prepare: Callable[[LedgerState], None] | None = None,
) -> None:
    more = EntryFields(switch=switch, ranges=ranges or {}, last_messages=last_messages or {})
    if hint:
        more["hint"] = hint

    def fields(state: LedgerState) -> EntryFields:
        if prepare is not None:
            prepare(state)
        return more

    commit_empty(spark, ingestion, "fence", fields)


def enter_claim_mode(claims: RedisClaims, state: LedgerState, *, was_claimed: bool) -> None:
    """Step 2 towards claims: set every shard on the server to the position in the ledger.

    Args:
        claims: the group.
        state: the ledger; no run writes by position any more.
        was_claimed: whether the group already claimed entries, so that the server's positions are right.
    """
    counted = position_facts_in(state.hint)
    for shard, position in state.positions.items():
        if shard not in claims.shards or was_claimed:
            continue
        place, known = counted.get(shard, (None, None))
        read = known.added if known is not None and place == position else None
        claims.group.set_position(shard, position, entries_read=read, enter_claim_mode=True)
        # These entries are in the table; without this, members would take them over from the consumer that holds them.
        claims.group.acknowledge_below(shard, position)
    keep_claim_mode(claims, state)


def keep_claim_mode(claims: RedisClaims, state: LedgerState) -> None:
    """Set claim mode for the shards that lack it."""
    for shard in claims.shards:
        if shard in state.shards and claims.group.facts(shard) is not None:
            claims.group.enter_claim_mode(shard)


def check_switch(claims: RedisClaims, state: LedgerState, ingestion: Ingestion, *, to_claims: bool) -> None:
    """Check that the group can be switched.

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
            f"group {ingestion.group!r} also reads {', '.join(missing)}, which {claims.url} does not name",
            remedy="Name all streams of the group in the URL: a group has one mode.",
        )
    check_removed_by_restore(state, ingestion)
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
            f"group {ingestion.group!r} has to write parts of {', '.join(broken)} again after a RESTORE",
            remedy=f"Run it in mode {state.sharing or 'resumable'} until it has written them, then switch.",
        )


def _is_behind(known: ShardState) -> bool:
    """Return whether a group that reads by position has to read messages again before rows that are in the table."""
    is_before_claims = known.ended is None and (known.claimed or 0) > (known.covered.position or 0)
    is_before_adopted = known.is_adopt_undone and known.covered.position == known.origin
    return len(known.covered.ranges) > 1 or bool(known.redo) or is_before_claims or is_before_adopted


def check_position(claims: RedisClaims, state: LedgerState) -> None:
    """Check that the server's positions, which the ledger will take over, are after all written entries.

    Raises:
        SourceRecreatedError: the group is gone, or was moved back.
    """
    claims.check({shard: known.written_end for shard, known in state.shards.items()})


def check_settled(claims: RedisClaims) -> None:
    """Check that no entries are pending, because a position does not show them.

    Raises:
        GroupActiveError: entries are pending; its facts are their numbers by shard.
    """
    pending = {shard: backlog.pending for shard, backlog in claims.backlog().items() if backlog.pending}
    if pending:
        raise GroupActiveError(
            f"group {claims.group.name!r} of {claims.url} has "
            f"{counted(sum(pending.values()), 'pending entry', 'pending entries')}",
            remedy="Let its members write or acknowledge them and end; then switch. If a switch was begun, first undo "
            "it with: stream-assets switch --to load_balanced.",
            **{str(shard): count for shard, count in sorted(pending.items())},
        )


def settle_claims(
    claims: RedisClaims, ledger: Ledger, fence: Callable[[ClaimName], None]
) -> tuple[Mapping[Shard, Range], Mapping[str, object]]:
    """Steps 2 and 3 towards positions: fence open claims, so that no batch lands any more, and cover delivered entries.

    Args:
        claims: the group.
        ledger: the ledger of the group.
        fence: uses up the number of a claim.

    Returns:
        The ranges to cover, and the hint for the first batch by position.

    Raises:
        GroupActiveError: entries are pending that are in no batch.
        SourceRecreatedError: the group is gone, or was moved back.
    """
    status = ClaimStatuses(ledger)
    names = claim_names(chain.from_iterable(claims.holders().values()), ledger).values()
    for name, found in status.of(names).items():
        if found is ClaimStatus.OPEN:
            fence(name)
    written = {name for name, found in status.of(names).items() if found is ClaimStatus.WRITTEN}
    for shard in claims.shards:
        for name in written:
            for page in claims.pending(shard, name, idle=False):
                claims.acknowledge({shard: [entry.id for entry in page]})
    # In this order: an entry that a member gets in between is pending.
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
    """End claim mode, without which the scripts of the server claim no entries."""
    for shard in claims.shards:
        if claims.group.facts(shard) is not None:
            claims.group.leave_claim_mode(shard)
