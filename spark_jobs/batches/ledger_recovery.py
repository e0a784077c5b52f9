"""What to do when the Delta log was cleaned so far that no commit of the group can be read any more.

Checkpoints keep the transaction numbers, so that it is known that the group has written, but not how far. Two ways on:

    the broker's mirror   Each commit to the broker has the number of the batch. If that is the last number in the
                          table, nothing was written since, and the positions of the broker are those of the ledger,
                          unless a RESTORE has removed rows of that batch: it changes no number. Either the log shows
                          that there was none since, or the rows reach up to the positions.
    a new start           A user says where. Everything after that place which the table holds is replaced, so that
                          any place is safe.

Either way the state is written down in an empty commit of kind ``keep``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.writer import commit_empty
from spark_jobs.ledger.entries import ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.ledger.table_rows import last_sequences
from stream_consumers.batches import BatchSource
from stream_consumers.errors import LedgerTruncatedError
from stream_consumers.messages import Shard


def commit_metadata(app: str, state: LedgerState, shards: Iterable[Shard]) -> str:
    """What the broker keeps with the positions of a batch; nothing where they are not all there is to know.

    Example:
        >>> orders = Shard("orders")
        >>> whole = ShardState(Intervals.of((MIN_SEQUENCE, 90)))
        >>> commit_metadata("lakehouse/main", LedgerState(8, {orders: whole}, last_number=7), [orders])
        'lakehouse/main 7'
    """
    known = [state.shards[shard] for shard in shards]
    is_simple = all(len(s.covered.ranges) == 1 and not s.redo for s in known)
    return f"{app} {state.last_number}" if is_simple else ""


def commit_positions(source: BatchSource, ingestion: Ingestion, state: LedgerState, streams: Container[str]) -> None:
    """Tell the broker the positions of a transaction sequence, and which batch they belong to.

    Args:
        source: the stream.
        ingestion: the group, and which sequence it is.
        state: the ledger.
        streams: the streams of the source; the group may have others.
    """
    positions = ingestion.own(state.positions, streams)
    metadata = commit_metadata(ingestion.ledger().app, state, positions)
    source.commit(ingestion.group, positions, metadata=metadata)


def has_begun(ingestion: Ingestion) -> bool:
    """Whether the group has written anything, be its log cleaned or not."""
    try:
        return ingestion.ledger().read().newest is not None
    except LedgerTruncatedError:
        return True


def read_or_recover(source: BatchSource, ingestion: Ingestion, ledger: Ledger) -> tuple[LedgerState, bool]:
    """The ledger; where its log was cleaned, what the broker's mirror says.

    Args:
        source: the stream, by the names of its epochs.
        ingestion: group and table.
        ledger: of the group.

    Returns:
        The state, and whether it has to be written down with :func:`keep`.

    Raises:
        LedgerTruncatedError: the log was cleaned, and the mirror does not agree with the table.
    """
    try:
        return ledger.read(), False
    except LedgerTruncatedError as error:
        state = _mirrored(source, ingestion)
        if state is None:
            raise LedgerTruncatedError(
                error.what,
                remedy="Say where to go on: stream-assets rewind --to earliest, or --to SHARD=SEQUENCE,… with the "
                "same --source, --table and --group. What the table holds behind that place is replaced, so that "
                "nothing is doubled.",
                **error.facts,
            ) from error
        return state, True


def _mirrored(source: BatchSource, ingestion: Ingestion) -> LedgerState | None:
    metadata, positions = source.committed_metadata(ingestion.group), source.committed(ingestion.group) or {}
    ends = {s: extent.end + extent.blocked for s, extent in source.extents().items()}
    if not positions or any(ends.get(shard, -1) < position for shard, position in positions.items()):
        return None
    newest: dict[str, int] = {}
    for own, shards in ingestion.by_sequence(positions):
        ledger = own.ledger()
        newest[ledger.app] = ledger.last_number(ledger.member)
        if any(metadata.get(shard) != f"{ledger.app} {newest[ledger.app]}" for shard in shards):
            return None
    if any(positions.get(shard, -1) <= last for shard, last in last_in_table(ingestion, source).items()):
        return None
    return _state(ingestion, source, positions) if _are_rows_there(ingestion, newest, positions) else None


def _are_rows_there(ingestion: Ingestion, newest: Mapping[str, int], positions: Mapping[Shard, int]) -> bool:
    """Whether no RESTORE has removed rows of the newest batches.

    Dead letters do not count as rows here, because a RESTORE of the table leaves them.

    Args:
        ingestion: group and table.
        newest: the last number of each transaction sequence.
        positions: up to which they wrote.
    """
    log, unseen = ingestion.ledger().log, set(newest.items())
    for commit in log.readable():
        if commit.restored is not None:
            return False
        if commit.entry is not None:
            unseen.discard((commit.entry.app, commit.entry.number))
        if not unseen:
            return True
    # A RESTORE removes the newest rows first, and may itself have been cleaned from the log.
    last = last_sequences(log)
    return all(last.get(shard, -1) + 1 >= position for shard, position in positions.items())


def last_in_table(ingestion: Ingestion, source: BatchSource) -> Mapping[Shard, int]:
    """The last sequence of each shard of the source that has a row or a dead letter in the table.

    Raises:
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    streams, logs = source.identities(), (ingestion.ledger().log, ingestion.dead_letters().log())
    return {shard: sequence for shard, sequence in last_sequences(*logs).items() if shard.stream in streams}


def surviving_state(ingestion: Ingestion, source: BatchSource) -> LedgerState:
    """The state that the rows and the dead letters show: each shard is covered up to its last sequence in the table."""
    starts = {shard: extent.start for shard, extent in source.extents().items()}
    return _state(ingestion, source, starts | {s: last + 1 for s, last in last_in_table(ingestion, source).items()})


def _state(ingestion: Ingestion, source: BatchSource, ends: Mapping[Shard, int]) -> LedgerState:
    ledger = ingestion.ledger()
    snapshot = ledger.log.snapshot()
    letters = ingestion.dead_letters().log().snapshot()
    version, number = (snapshot.version, snapshot.last_number(ledger.app)) if snapshot else (-1, 0)
    # What was written before cannot be judged any more.
    settled = letters.version if letters else -1
    shards = {shard: ShardState(Intervals.of((MIN_SEQUENCE, end)), origin=end) for shard, end in ends.items()}
    state = LedgerState(version, shards, None, number, settled, ingestion.sharing_mode)
    kept = ledger.entry("keep", state, number=number, bid="", identities=source.identities())
    return replace(state, newest=kept, identities=kept.identities)


def keep(spark: SparkSession, source: BatchSource, ingestion: Ingestion, state: LedgerState) -> None:
    """Write the state down, so that the ledger can be read again; nothing if another run has done so.

    Raises:
        WriteError: Spark failed; run it again.
    """
    ends = {shard: end for shard, known in state.shards.items() if (end := known.covered.position) is not None}

    def fields(state: LedgerState) -> Mapping[str, object] | None:
        # What another run has written since then is not in this state.
        return None if _is_readable(ingestion) else {}

    commit_empty(spark, ingestion, "keep", fields, read=lambda: _state(ingestion, source, ends))


def _is_readable(ingestion: Ingestion) -> bool:
    try:
        ingestion.ledger().read()
    except LedgerTruncatedError:
        return False
    return True
