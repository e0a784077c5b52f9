"""Asset checks that read only the Delta log."""

from __future__ import annotations

import dagster as dg

from stream_assets.asset import StreamAsset


def build_dead_letter_check(stream: StreamAsset) -> dg.AssetChecksDefinition:
    """A check that warns while dead letters, or messages that were gone unread, are in the ledger of the table."""

    @dg.asset_check(asset=stream.key, name="no_dead_letters", description="No message was unusable or gone.")
    def no_dead_letters() -> dg.AssetCheckResult:
        ledger = stream.ingestion.ledger()
        entries = [c.entry for c in ledger.surviving() if c.entry]
        # After a replace the ledger's own counts are of dead letters that count no more, too.
        is_replaced = any(entry.mode == "replace" for entry in entries)
        counted = stream.ingestion.dead_letters().counted_places(ledger).num_rows if is_replaced else None
        dead = sum(entry.dead for entry in entries) if counted is None else counted
        lost = [
            f"{shard} {part.start} to {part.end}"
            for entry in entries
            for shard, parts in entry.lost.items()
            for part in parts
        ]
        return dg.AssetCheckResult(
            passed=dead == 0 and not lost,
            severity=dg.AssetCheckSeverity.WARN,
            metadata={
                "stream/dead_letters": dead,
                "stream/lost": dg.MetadataValue.json(lost),
                "stream/dead_letter_table": stream.ingestion.dead_letters().path,
            },
        )

    return no_dead_letters


def build_continuity_check(stream: StreamAsset) -> dg.AssetChecksDefinition:
    """A check that the ledger covers each shard without a hole, and that nothing waits to be written again."""

    @dg.asset_check(asset=stream.key, name="no_gaps", description="Each shard is covered without a hole.")
    def no_gaps() -> dg.AssetCheckResult:
        shards = stream.ingestion.ledger().read().shards
        broken = {str(shard): str(s.covered) for shard, s in shards.items() if len(s.covered.ranges) > 1 or s.redo}
        return dg.AssetCheckResult(
            passed=not broken, metadata={"stream/shards": len(shards), "stream/gaps": dg.MetadataValue.json(broken)}
        )

    return no_gaps
