"""Asset checks that read only the Delta log.

What is not there is not right: a check of a table that nobody has written does not pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg

from spark_jobs.ledger.ledger import LedgerState
from stream_assets.asset import StreamAsset

DEAD_LETTERS = "no_dead_letters"
GAPS = "no_gaps"


def build_dead_letter_check(stream: StreamAsset) -> dg.AssetChecksDefinition:
    """A check that warns while dead letters, or messages that were gone unread, are in the ledger of the table."""

    @dg.asset_check(asset=stream.key, name=DEAD_LETTERS, description="No message was unusable or gone.")
    def no_dead_letters() -> dg.AssetCheckResult:
        return _check_dead_letters(stream)

    return no_dead_letters


def build_continuity_check(stream: StreamAsset) -> dg.AssetChecksDefinition:
    """A check that the ledger covers each shard without a hole, and that nothing waits to be written again."""

    @dg.asset_check(asset=stream.key, name=GAPS, description="Each shard is covered without a hole.")
    def no_gaps() -> dg.AssetCheckResult:
        return _check_gaps(stream)

    return no_gaps


def evaluate_checks(stream: StreamAsset) -> Iterator[dg.AssetCheckEvaluation]:
    """The same checks, for an op that materializes the asset: Dagster runs them by itself only behind the asset's own.

    An older evaluation does not count for a newer materialization.
    """
    for name, result in ((DEAD_LETTERS, _check_dead_letters(stream)), (GAPS, _check_gaps(stream))):
        yield dg.AssetCheckEvaluation(
            asset_key=stream.key,
            check_name=name,
            passed=result.passed,
            metadata=result.metadata,
            severity=result.severity,
            description=result.description,
        )


def _check_dead_letters(stream: StreamAsset) -> dg.AssetCheckResult:
    ledger = stream.ingestion.ledger()
    state = ledger.read()
    totals = ledger.totals(state)
    dead = totals.dead
    if totals.replaced:
        # Some of them may be in ranges that were replaced since, so that they count no more.
        dead = sum(part.num_rows for part in stream.ingestion.dead_letters().counted_places(ledger))
    lost = [f"{shard} {part.start} to {part.end}" for shard, parts in sorted(totals.lost.items()) for part in parts]
    nothing = _nothing_written(stream, state)
    return dg.AssetCheckResult(
        passed=dead == 0 and not lost and not nothing,
        severity=dg.AssetCheckSeverity.WARN,
        description=nothing,
        metadata={
            "stream/dead_letters": dead,
            "stream/lost": dg.MetadataValue.json(lost),
            "stream/dead_letter_table": stream.ingestion.dead_letters().path,
        },
    )


def _check_gaps(stream: StreamAsset) -> dg.AssetCheckResult:
    state = stream.ingestion.ledger().read()
    shards = state.shards
    broken = {str(shard): str(s.covered) for shard, s in shards.items() if len(s.covered.ranges) > 1 or s.redo}
    nothing = _nothing_written(stream, state)
    return dg.AssetCheckResult(
        passed=not broken and not nothing,
        description=nothing,
        metadata={"stream/shards": len(shards), "stream/gaps": dg.MetadataValue.json(broken)},
    )


def _nothing_written(stream: StreamAsset, state: LedgerState) -> str | None:
    """What is told of a table without a commit of the group; ``None`` if there is one."""
    if state.newest is not None:
        return None
    table, group = stream.ingestion.table, stream.ingestion.group
    what = f"there is no table {table}" if state.version < 0 else f"group {group!r} has written nothing into {table}"
    return f"{what}: there is nothing to check. Materialize the asset, or correct its table and group."
