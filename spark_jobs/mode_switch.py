"""Changes how a group shares its shards, which changes the transaction sequences of its batches.

A batch planned in an old sequence could land next to one of a new sequence: the same messages twice. So the old
sequences are fenced, each by an empty commit that takes its next number, before anybody plans in the new ones:

    one sequence -> one a shard    ONE commit fences the sequence and switches
    one a shard -> one sequence    1 "switching": no run plans any more   2 every shard is fenced   3 the switch

Redis, where members claim entries, is in :mod:`spark_jobs.claims.switch`. A switch that was killed on the way is run
again. tests/spark_jobs/test_mode_switch_model.py explores all interleavings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.writer import commit_empty
from spark_jobs.claims.switch import check_switch, enter_claim_mode, keep_claim_mode, leave_claim_mode, settle_claims
from spark_jobs.ledger.entries import CLAIMS, LEAVING_CLAIMS, SWITCHING
from stream_consumers.batches import BatchSource, Range
from stream_consumers.errors import StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode, choice
from stream_consumers.redis.claims import RedisClaims


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
        GroupActiveError: entries are pending.
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
    is_leaving = state.sharing in (CLAIMS, LEAVING_CLAIMS)
    if claims is not None:
        check_switch(claims, state, ingestion, to_claims=wanted == CLAIMS)
    if claims is not None and wanted == CLAIMS:
        if not is_leaving:
            _fence(spark, member, switch=SWITCHING)
        enter_claim_mode(claims, member.ledger().read(), was_claimed=is_leaving)
    elif claims is not None and is_leaving:
        _end_claims(spark, member, claims)
    elif to is not ConsumerMode.LOAD_BALANCED and state.sharing not in _ONE_SEQUENCE:
        _fence(spark, member, switch=SWITCHING)
        # Asked only now: no run plans on a shard that appears later.
        for shard in sorted({*ingestion.in_epochs(source).extents(), *state.shards}):
            _fence(spark, replace(ingestion, shard=shard), switch=None)
    _fence(spark, member, switch=wanted)
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


def _fence(
    spark: SparkSession,
    ingestion: Ingestion,
    *,
    switch: str | None,
    ranges: Mapping[Shard, Range] | None = None,
    hint: Mapping[str, object] | None = None,
) -> None:
    more = {"switch": switch, "ranges": ranges or {}} | ({"hint": hint} if hint else {})
    commit_empty(spark, ingestion, "fence", lambda state: more)
