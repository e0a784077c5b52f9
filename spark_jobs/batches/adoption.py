"""Rows that are in no ledger: they are refused, or adopted deliberately.

A copy of a table (CREATE TABLE … AS SELECT, a clone, INSERT INTO, files that were copied) has the rows of a stream, but
the positions stayed in the log of the table that it was made from. To ingest into it as if it were new would write each
message a second time. A user who knows where the rows come from may adopt them: each shard
continues after its last row.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion, check_other_group, check_sharing, without_positions
from spark_jobs.batches.writer import commit_empty
from spark_jobs.ledger.entries import CLAIMS
from spark_jobs.ledger.ledger import LedgerState
from spark_jobs.ledger.table_rows import extents_of, last_sequences
from stream_consumers.batches import BatchSource
from stream_consumers.errors import InvalidOptionError, SourceRecreatedError, StreamNotFoundError, UnsupportedError
from stream_consumers.messages import Shard


def plan_adoption(source: BatchSource, ingestion: Ingestion) -> Mapping[Shard, int]:
    """Where :func:`adopt` would let each shard continue: behind its last row, or dead letter that counts, in the table.

    Dead letters that another table of this path has left behind do not count, since this one has not their batches:
    what lies before them may never have been in it. Those that were copied with the rows do.

    Args:
        source: the stream that the rows are of.
        ingestion: the group, and the table that holds the rows.

    Raises:
        StreamNotFoundError: the table holds no rows of the stream, or there is none.
        InvalidOptionError: the group has positions in the stream already, or another group has.
        SourceRecreatedError: the stream ends before the last row, so that the rows are not of it.
        UnsupportedError: the members of the group claim entries one by one, so that it has no positions.
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    source = ingestion.in_epochs(source)
    state = ingestion.ledger().read()
    check_sharing(state, ingestion)
    if CLAIMS in (state.sharing, ingestion.sharing_mode):
        raise UnsupportedError(
            f"group {ingestion.group!r} claims entries one by one, so that it does not continue behind a row",
            remedy="Adopt the rows in mode 'resumable', and change it with: stream-assets switch --to load_balanced.",
        )
    streams = without_positions(state, source.identities())
    if not streams:
        raise InvalidOptionError(
            f"group {ingestion.group!r} has positions of {source.url} in {ingestion.table} already",
            remedy="Just ingest. To move the group, use: stream-assets rewind.",
        )
    check_other_group(ingestion, state, streams, url=source.url)
    last = {s: sequence for s, sequence in _last(ingestion).items() if s.stream in streams}
    if not last:
        raise StreamNotFoundError(
            f"{ingestion.table} holds no rows of {', '.join(sorted(streams))}",
            remedy="There is nothing to adopt: ingest.",
        )
    extents = {shard: extent for shard, extent in source.extents().items() if shard.stream in streams}
    for shard, sequence in sorted(last.items()):
        end = extents[shard].end + extents[shard].blocked if shard in extents else None
        if end is None or end <= sequence:
            raise SourceRecreatedError(
                f"{source.url} ends before the last row of {shard} in {ingestion.table}",
                remedy="The rows are of another stream of this name. Ingest into another table.",
                row=sequence,
                end=end,
            )
    starts = {shard: extent.start for shard, extent in extents.items()}
    return dict(sorted((starts | {shard: sequence + 1 for shard, sequence in last.items()}).items()))


def _last(ingestion: Ingestion) -> Mapping[Shard, int]:
    ledger = ingestion.ledger()
    counted = extents_of(ingestion.dead_letters().counted_places(ledger))
    letters, rows = {shard: part.end - 1 for shard, part in counted.items()}, last_sequences(ledger.log)
    return {shard: max(found.get(shard, -1) for found in (letters, rows)) for shard in letters.keys() | rows.keys()}


def adopt(spark: SparkSession, source: BatchSource, ingestion: Ingestion) -> Mapping[Shard, int]:
    """Make the rows of a table the group's own: it continues behind the last row of each shard.

    What is missing before that row counts as read: the transform may have dropped it, which is unknown. Rows of
    messages that were filtered or dead letters behind it are read again, and judged again.

    Args:
        spark: a session that can write Delta tables.
        source: the stream that the rows are of.
        ingestion: the group, and the table that holds the rows.

    Returns:
        The next sequence of each shard.

    Raises:
        StreamNotFoundError, InvalidOptionError, SourceRecreatedError, UnsupportedError, TableUnreadableError: see
            :func:`plan_adoption`.
        WriteError: Spark failed; run it again.
    """
    source = ingestion.in_epochs(source)
    positions = plan_adoption(source, ingestion)
    ingestion.ledger().check_first(positions)
    identities = source.identities()

    def fields(state: LedgerState) -> Mapping[str, object] | None:
        begun = without_positions(state, (shard.stream for shard in positions))
        if not begun:
            # Another run did the same at the same time.
            return None
        check_other_group(ingestion, state, begun, url=source.url)
        switch = None if state.newest else ingestion.sharing_mode
        return {
            "origin": positions,
            "identities": {**state.identities, **identities},
            "switch": switch,
            "hint": source.hint(positions, state.hint),
        }

    commit_empty(spark, ingestion, "init", fields)
    return positions
