"""The metadata keys that assets, streams, checks and jobs show in Dagster: the list that the reference prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetadataKey:
    """A key of the metadata that Dagster shows.

    Args:
        key: the key, with ``<…>`` for its variable parts.
        meaning: the meaning of its value, with the unit.
    """

    key: str
    meaning: str


BATCH = "Observation of an asset: one micro-batch, or all of `materialize_seconds`"
INGESTION = "Materialization by ingestion"
REPLAY = "Materialization by a replay"
REDRIVE = "Materialization by a redrive, and output of its run"
REBUILD = "Materialization by a rebuild"
TABLE = "Materialization of any kind: the table afterwards"
DEFINITION = "Definition of an asset"
STREAM = "Observation of a stream, by its sensor"
CHECK = "Result of a check"
OTHER = "Pauses, new dead letters and maintenance"

_SUMS = (
    ("rows", "Rows written."),
    ("messages", "Messages decoded."),
    ("dead_letters", "Messages that became dead letters."),
    ("ranges", "A table with the first sequence of each shard, the sequence after the last, its messages and its lag."),
    ("rows_per_second", "Rows written for each second from the plan to the commit."),
    ("replaced_rows", "Rows that were deleted in the same commit. Missing if the Delta log does not have the number."),
    ("inserted_rows", "Rows that were inserted into a keyed table."),
    ("updated_rows", "Rows of a keyed table that were updated."),
    ("deleted_rows", "Rows that were deleted from a keyed table; with `sequence_by` they are updated instead."),
    ("lost", "Ranges of sequences that were gone from the stream, by shard."),
)


def _sums(prefix: str) -> tuple[MetadataKey, ...]:
    return tuple(MetadataKey(f"{prefix}/{name}", meaning) for name, meaning in _SUMS)


METADATA_KEYS: dict[str, tuple[MetadataKey, ...]] = {
    BATCH: (
        *_sums("stream"),
        MetadataKey("stream/batches", "Micro-batches."),
        MetadataKey("stream/lag_after", "Messages left after the last batch, up to the end that the run has captured."),
        MetadataKey("stream/worst_lag", "The most messages that were left after one of the batches."),
        MetadataKey("stream/batch", "The id of the last batch, which its dead letters have, too."),
        MetadataKey("delta/transaction", "Its number in the group's sequence of Delta transactions."),
        MetadataKey("delta/version", "The version of the table with the last batch."),
    ),
    INGESTION: (
        MetadataKey("stream/kind", "`ingestion`, `replay`, `redrive` or `rebuild`."),
        *_sums("ingest"),
        MetadataKey("ingest/batches", "Micro-batches; 0 if a run that was killed wrote them."),
        MetadataKey("ingest/dead_letter_reasons", "The most frequent reasons of the dead letters, with an example."),
        MetadataKey("ingest/partition_rows", "Rows that this run wrote into the partition."),
        MetadataKey("ingest/version", "The newest version of the table that has been reported to Dagster."),
        MetadataKey("stream/lag_after", "Messages left after the last batch."),
        MetadataKey("delta/first_version", "The version of the table with the first batch."),
    ),
    REPLAY: (
        *_sums("replay"),
        MetadataKey("replay/batches", "Micro-batches."),
        MetadataKey("replay/start", "Where the replayed range starts."),
        MetadataKey("replay/stop", "Where the replayed range ends."),
        MetadataKey("replay/partitions", "The partitions that were replayed."),
        MetadataKey(
            "replay/stale_rows",
            "Rows of the replayed range that stay in a keyed table, although their messages make no row any more. "
            "Missing if 0.",
        ),
        MetadataKey("replay/rows_left_out", "Rows of the replayed time outside of the replayed ranges. Missing if 0."),
    ),
    REDRIVE: (
        MetadataKey("redrive/batches", "Micro-batches."),
        MetadataKey("redrive/messages", "Dead letters that were decoded."),
        MetadataKey("redrive/rows", "Rows written."),
        MetadataKey("redrive/decoded", "Dead letters that were decoded, or would be in a dry run."),
        MetadataKey("redrive/still_dead", "Dead letters that could not be decoded."),
        MetadataKey("redrive/reasons", "Why these could not be decoded, with an example of each reason."),
        MetadataKey("redrive/dismissed", "Dead letters that were dismissed in place of decoding them."),
    ),
    REBUILD: (
        MetadataKey("rebuild/messages", "Messages that were decoded, of all runs of the rebuild."),
        MetadataKey("rebuild/rows", "Rows of the new table."),
        MetadataKey("rebuild/dead_letters", "Messages that became dead letters."),
    ),
    TABLE: (
        MetadataKey("delta/version", "The version of the table."),
        MetadataKey(
            "dagster/row_count",
            "Rows of the table, with those of deleted keys; of an asset with partitions it is on no partition.",
        ),
        MetadataKey("dagster/partition_row_count", "Rows of the partition."),
        MetadataKey("dagster/column_schema", "Columns with their types and comments."),
        MetadataKey("dagster/uri", "The URI of the table."),
        MetadataKey("stream/dead_letter_commands", "Commands that list, redrive and dismiss the dead letters."),
    ),
    DEFINITION: (
        MetadataKey("stream/source", "The URL of the streams, without secrets."),
        MetadataKey("stream/group", "The consumer group."),
        MetadataKey("stream/replay_job", "The job that replays a range of the stream."),
        MetadataKey("stream/url", "Of a stream: its URL, without secrets."),
        MetadataKey("stream/key", "Of a stream: its stream key."),
        MetadataKey("dagster/table_name", "The last two folders of the table's path, as `schema.table`."),
        MetadataKey("dagster/uri", "The URI of the table."),
    ),
    STREAM: (
        MetadataKey("stream/lag/<group>/<asset>", "Messages that the group is behind in the table of that asset."),
        MetadataKey(
            "stream/status",
            "`idle`: everything readable is written. `behind`: there is something to read. `blocked`: an open "
            "transaction holds back the next messages, or bytes after the last one cannot be read. `lost`: messages "
            "are gone that were not read, or the stream was created again.",
        ),
        MetadataKey("stream/group", "The consumer group."),
        MetadataKey("stream/cluster", "The servers, or the file."),
        MetadataKey("stream/table_asset", "The asset of the table."),
        MetadataKey("stream/sensor", "The name of the sensor that observed it."),
        MetadataKey("stream/shards", "A table with the end, the lag, and what is blocked or lost of each shard."),
        MetadataKey("stream/reason", "Why the status is `lost`, or which bytes after the last message cannot be read."),
    ),
    CHECK: (
        MetadataKey("stream/lag", "Messages that the group is behind."),
        MetadataKey("stream/max_lag", "The most messages that the lag check accepts."),
        MetadataKey("stream/lost", "Ranges of sequences that were gone, by shard."),
        MetadataKey("stream/max_seconds", "The age of the last batch that the freshness check accepts."),
        MetadataKey("stream/seconds_since_batch", "The age of the last batch."),
        MetadataKey("stream/dead_letter_ratio", "Dead letters for each message of the newest batches."),
        MetadataKey("stream/max_dead_letter_ratio", "The ratio that the check accepts."),
        MetadataKey("stream/dead_letters", "Dead letters that count."),
        MetadataKey("stream/dead_letter_reasons", "Their most frequent reasons, with an example."),
        MetadataKey("stream/dead_letter_table", "The path of their table."),
        MetadataKey("stream/messages", "Messages of the newest batches."),
        MetadataKey("stream/shards", "Shards that the continuity check compared."),
        MetadataKey("stream/gaps", "Ranges of sequences that no batch covers, by shard."),
    ),
    OTHER: (
        MetadataKey("sensor/name", "The sensor that pauses after a cancelled run."),
        MetadataKey("sensor/cancelled_run", "The run that was cancelled."),
        MetadataKey("sensor/paused_until", "When the pause ends."),
        MetadataKey("stream/new_dead_letters", "Dead letters since the last observation."),
        MetadataKey("stream/lost_messages", "Messages that were gone before they were read, in all."),
        MetadataKey("delta/files_joined", "Small files that maintenance compacted."),
        MetadataKey("delta/files_written", "Files that replaced them."),
        MetadataKey("delta/files_deleted", "Files that VACUUM deleted."),
        MetadataKey("delta/purged_rows", "Rows of deleted keys that maintenance removed from a keyed table."),
        MetadataKey("stream/ledger_kept", "Whether maintenance committed a snapshot of the ledger anew."),
    ),
}
"""The keys by where they are shown."""
