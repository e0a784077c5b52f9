"""Changes how a group shares its shards, which changes the number lines that its batches are written on.

A batch that was planned on an old line could land next to one on a new line: the same messages twice. So the old lines
are fenced, each by an empty commit that takes the next number of the line, before anybody plans on the new ones:

    one line -> a line a shard    ONE commit fences the line and switches
    a line a shard -> one line    1 "switching": nobody plans any more    2 every shard's line is fenced    3 the switch

Redis, where members claim entries, is in :mod:`spark_jobs.claims.switch`. A switch that was killed on the way is run
again. tests/spark_jobs/test_mode_switch_model.py explores all interleavings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pyspark.sql import SparkSession

from spark_jobs.batches.empty_commit import commit_empty
from spark_jobs.batches.ingestion import CLAIMS, LEAVING_CLAIMS, SWITCHING, Ingestion
from spark_jobs.claims.switch import check_switch, mark_claims, remark_claims, settle_claims, unmark_claims
from stream_consumers.batches import BatchSource, Range
from stream_consumers.errors import StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode
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
        source: the stream; the line of each of its shards is fenced, besides those that the ledger knows.
        claims: the group, where members claim entries in mode ``load_balanced`` (Redis).

    Returns:
        Whether anything had to be changed.

    Raises:
        StreamNotFoundError: the group has written nothing into the table.
        GroupActiveError: entries are pending.
        WriteError: Spark failed; run it again.
    """
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
            remark_claims(claims, state)
        return False
    is_leaving = state.sharing in (CLAIMS, LEAVING_CLAIMS)
    if claims is not None:
        check_switch(claims, state, ingestion, to_claims=wanted == CLAIMS)
    if claims is not None and wanted == CLAIMS:
        if not is_leaving:
            _fence(spark, member, switch=SWITCHING)
        mark_claims(claims, member.ledger().read(), was_claimed=is_leaving)
    elif claims is not None and is_leaving:
        _end_claims(spark, member, claims)
    elif to is not ConsumerMode.LOAD_BALANCED and state.sharing not in _ONE_LINE:
        _fence(spark, member, switch=SWITCHING)
        # Asked only now: nobody plans on a shard that appears later.
        for shard in sorted({*source.extents(), *state.shards}):
            _fence(spark, replace(ingestion, shard=shard), switch=None)
    _fence(spark, member, switch=wanted)
    return True


def _end_claims(spark: SparkSession, ingestion: Ingestion, claims: RedisClaims) -> None:
    _fence(spark, ingestion, switch=LEAVING_CLAIMS)
    unmark_claims(claims)

    def fence(member: str, number: int) -> None:
        line = replace(ingestion, member=member)
        while line.ledger().read().last_number < number:
            _fence(spark, line, switch=None)

    # A member that looked before this switch began has its next number already.
    for member in {c.entry.by for c in ingestion.ledger().newest_first() if c.entry and "/" not in c.entry.by}:
        _fence(spark, replace(ingestion, member=member), switch=None)
    ranges, hint = settle_claims(claims, ingestion.ledger(), fence)
    _fence(spark, ingestion, switch=None, ranges=ranges, hint=hint)


_ONE_LINE = (ConsumerMode.RESUMABLE.value, ConsumerMode.REAL_TIME.value)


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
