"""Asset checks that read only the Delta log. They are evaluated after each run, or by themselves.

What is not there is not right: a check of a table that nobody has written does not pass.
"""

from __future__ import annotations

import dagster as dg

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.ledger.ledger import LedgerState
from stream_assets.stream_to_table import StreamCheck, StreamToTable


def _check_dead_letters(stream: StreamToTable) -> dg.AssetCheckResult:
    ingestion = stream.ingestion
    ledger = ingestion.ledger()
    state = ledger.read()
    totals = ledger.totals(state)
    dead = totals.dead
    if totals.replaced:
        # Some of them may be in ranges that were replaced since, so that they count no more.
        dead = sum(part.num_rows for part in ingestion.dead_letters().counted_places(ledger))
    lost = [f"{shard} {part.start} to {part.end}" for shard, parts in sorted(totals.lost.items()) for part in parts]
    nothing = _nothing_written(ingestion, state)
    return dg.AssetCheckResult(
        passed=dead == 0 and not lost and not nothing,
        severity=dg.AssetCheckSeverity.WARN,
        description=nothing,
        metadata={
            "stream/dead_letters": dead,
            "stream/lost": dg.MetadataValue.json(lost),
            "stream/dead_letter_table": ingestion.dead_letters().path,
        },
    )


def _check_gaps(stream: StreamToTable) -> dg.AssetCheckResult:
    ingestion = stream.ingestion
    state = ingestion.ledger().read()
    shards = state.shards
    broken = {str(shard): str(s.covered) for shard, s in shards.items() if len(s.covered.ranges) > 1 or s.redo}
    nothing = _nothing_written(ingestion, state)
    return dg.AssetCheckResult(
        passed=not broken and not nothing,
        description=nothing,
        metadata={"stream/shards": len(shards), "stream/gaps": dg.MetadataValue.json(broken)},
    )


def _nothing_written(ingestion: Ingestion, state: LedgerState) -> str | None:
    """What is told of a table without a commit of the group; ``None`` if there is one."""
    if state.newest is not None:
        return None
    table, group = ingestion.table, ingestion.group
    what = f"there is no table {table}" if state.version < 0 else f"group {group!r} has written nothing into {table}"
    return f"{what}: there is nothing to check. Materialize the asset, or correct its table and group."


NO_DEAD_LETTERS = StreamCheck("no_dead_letters", "No message was unusable or gone.", _check_dead_letters)
NO_GAPS = StreamCheck("no_gaps", "Each shard is covered without a hole.", _check_gaps)
DEFAULT_CHECKS = (NO_DEAD_LETTERS, NO_GAPS)
