"""Finds positions that the ledger does not have: its log was cleaned, or the table was copied without its log.

*A cleaned log.* Checkpoints keep the transaction numbers, so that it is known that the group has written, but not how
far. Two ways on:

    the broker's mirror   Each commit to the broker has the number of the batch, and its id. If that is the last number
                          in the table, nothing was written since, and the positions of the broker are those of the
                          ledger, unless they are of another table of the group, or a RESTORE has removed rows of that
                          batch: it changes no number. Either the log shows that the batch has this id and leads to
                          these positions, and that there was no RESTORE since; or the rows reach up to the positions.
    a new start           A user says where. Everything after that place which the table holds is replaced, so that
                          any place is safe. Dead letters behind the last row may be of a batch that was never written,
                          or that a RESTORE removed: from that row on all is replaced, wherever the user begins.

Either way the state is written down in an empty commit of kind ``keep``.

*A copied table* (CREATE TABLE … AS SELECT, a clone, INSERT INTO, files that were copied) has the rows of a stream, but
the positions stayed in the log of the table that it was made from. To ingest into it as if it were new would write each
message a second time, so these rows are refused, until a user who knows where they come from adopts them
(:func:`adopt`): each shard continues after its last row.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.source_checks import check_other_group, check_sharing, without_positions
from spark_jobs.batches.target_table import commit_empty
from spark_jobs.ledger.entries import CLAIMS, EntryFields, LedgerEntry, ShardState
from spark_jobs.ledger.fold import fold
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.ledger.table_rows import (
    NO_TIMESTAMP,
    ROW_TIME,
    TIME,
    column_names,
    extents_of,
    in_ranges,
    last_sequences,
    row_extents,
    scan,
    timestamps_of,
)
from stream_consumers.batches import BatchSource, PositionFacts, Range, position_facts_in
from stream_consumers.errors import (
    InvalidOptionError,
    LedgerTruncatedError,
    SourceRecreatedError,
    StreamNotFoundError,
    UnsupportedError,
)
from stream_consumers.messages import Shard


def commit_metadata(app: str, state: LedgerState, shards: Iterable[Shard]) -> str:
    """What the broker keeps with the positions of a batch; nothing where they are not all there is to know.

    Example:
        >>> orders = Shard("orders")
        >>> whole = ShardState(Intervals.of((MIN_SEQUENCE, 90)))
        >>> newest = LedgerEntry("batch", "lakehouse", "lakehouse/main", 7, "main", "5f0c", 6)
        >>> commit_metadata("lakehouse/main", LedgerState(8, {orders: whole}, newest, last_number=7), [orders])
        'lakehouse/main 7 5f0c'
    """
    known = [state.shards[shard] for shard in shards]
    is_simple = all(len(s.covered.ranges) == 1 and not s.redo for s in known)
    if not is_simple:
        return ""
    newest = state.newest
    # The newest entry of a group with several transaction sequences may be of another one.
    is_known = newest is not None and (newest.app, newest.number) == (app, state.last_number)
    return f"{app} {state.last_number} {newest.bid if newest and is_known else ''}".rstrip()


def commit_positions(source: BatchSource, ingestion: Ingestion, state: LedgerState, streams: Container[str]) -> None:
    """Commit the positions of a transaction sequence to the broker, with the batch that they belong to.

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
    mirrored: dict[tuple[str, int], _Mirror] = {}
    for own, shards in ingestion.by_sequence(positions):
        ledger = own.ledger()
        number = ledger.last_number(ledger.member)
        bids = {_bid_in(metadata.get(shard, ""), ledger.app, number) for shard in shards}
        bid = bids.pop()
        if bid is None or bids:
            return None
        mirrored[ledger.app, number] = _Mirror(bid, {shard: positions[shard] for shard in shards})
    rows, letters = _last_sequences(ingestion, source)
    if any(positions.get(shard, -1) <= last for shard, last in (*rows.items(), *letters.items())):
        return None
    if not _is_confirmed(ingestion, mirrored, positions):
        return None
    _check_last_rows(ingestion, source, rows)
    return _state(ingestion, source, {shard: _covered_to(end) for shard, end in positions.items()})


@dataclass(frozen=True, slots=True)
class _Mirror:
    """What the broker has of a transaction sequence.

    Args:
        bid: of the newest batch; empty if an older release committed it.
        positions: behind that batch.
    """

    bid: str
    positions: Mapping[Shard, int]

    def is_of(self, entry: LedgerEntry) -> bool:
        """Whether it is what this entry led to, and not one with the same number in another table."""
        if self.bid and (self.bid != entry.bid or not entry.is_full):
            return self.bid == entry.bid
        known = fold(entry.state or {}, entry, late=False)
        return all(shard in known and known[shard].position == end for shard, end in self.positions.items())


def _bid_in(metadata: str, app: str, number: int) -> str | None:
    """The id of the batch in what :func:`commit_metadata` made; ``None`` if that is of another batch."""
    bid = metadata.removeprefix(f"{app} {number}")
    return bid.removeprefix(" ") if bid != metadata and bid[:1] in ("", " ") else None


def _is_confirmed(
    ingestion: Ingestion, mirrored: Mapping[tuple[str, int], _Mirror], positions: Mapping[Shard, int]
) -> bool:
    """Whether what the broker has is of batches of this table, of which no RESTORE has removed rows.

    Dead letters do not count as rows here, because a RESTORE of the table leaves them.

    Args:
        ingestion: group and table.
        mirrored: by app id and last number of each transaction sequence.
        positions: up to which they wrote.
    """
    log, unseen = ingestion.ledger().log, dict(mirrored)
    for commit in log.readable():
        if commit.restored is not None:
            return False
        entry = commit.entry
        if entry is not None and (mirror := unseen.pop((entry.app, entry.number), None)) and not mirror.is_of(entry):
            return False
        if not unseen:
            return True
    # A RESTORE removes the newest rows first, and may itself have been cleaned from the log.
    last = last_sequences(log)
    return all(last.get(shard, -1) + 1 >= position for shard, position in positions.items())


def _last_sequences(ingestion: Ingestion, source: BatchSource) -> tuple[Mapping[Shard, int], Mapping[Shard, int]]:
    """The last sequence of each shard of the source: in the table, and in its dead letters.

    Raises:
        TableUnreadableError: delta-rs cannot read the data of one of them.
    """
    streams, logs = source.identities(), (ingestion.ledger().log, ingestion.dead_letters().log())
    rows, letters = ({s: last for s, last in last_sequences(log).items() if s.stream in streams} for log in logs)
    return rows, letters


def _check_last_rows(ingestion: Ingestion, source: BatchSource, last: Mapping[Shard, int]) -> None:
    """Refuse a stream that holds other messages than those of the last rows, as far as their timestamps show it.

    The fingerprints were cleaned from the log, and a stream that was made again may be longer by now.

    Args:
        ingestion: group and table.
        source: the stream, by the names of its epochs, after :meth:`BatchSource.extents`.
        last: the last sequence of each shard in the table.

    Raises:
        SourceRecreatedError: with the timestamps.
    """
    log, places = ingestion.ledger().log, {shard: Range(sequence, sequence + 1) for shard, sequence in last.items()}
    if not places or not source.has_own_timestamps or TIME not in column_names(log):
        return
    rows = timestamps_of(scan(log, ROW_TIME, where=in_ranges(places)), ROW_TIME)
    for shard, message in sorted(source.last_messages(places).items()):
        moments = rows[shard].timestamps_ms
        if message.sequence == last[shard] and NO_TIMESTAMP not in moments and message.timestamp_ms not in moments:
            raise SourceRecreatedError(
                f"{source.url} holds another message than that of the last row of {shard} in {ingestion.table}, whose "
                "log was cleaned: the stream was recreated",
                remedy="Ingest it into another table. The rows of the stream before it stay in this one.",
                sequence=message.sequence,
                table=int(moments[0]),
                stream=message.timestamp_ms,
            )


def surviving_state(ingestion: Ingestion, source: BatchSource) -> LedgerState:
    """The state that the table shows: each shard is covered up to its last row.

    What lies between that row and the last dead letter has to be replaced.

    Raises:
        UnsupportedError: the members of the group claim entries one by one, so that rows do not show what was read.
        SourceRecreatedError: the stream is another one than that of the rows.
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    if source.is_in_claim_mode(ingestion.group):
        raise UnsupportedError(
            f"the log of {ingestion.table} was cleaned, and group {ingestion.group!r} claims entries of {source.url} "
            "one by one: which of those before the last row are in the table is unknown",
            remedy="Restore the log files from a backup; or use another group and table. To write again all that the "
            "stream holds, end the members of the group, remove it from the server (XGROUP DESTROY), and run: "
            "stream-assets rewind --to earliest.",
        )
    extents = source.extents()
    rows, letters = _last_sequences(ingestion, source)
    _check_last_rows(ingestion, source, rows)
    starts = {shard: extent.start for shard, extent in extents.items()}
    ends = starts | {shard: last + 1 for shard, last in rows.items()}
    shards = {
        shard: _covered_to(ends.get(shard, MIN_SEQUENCE), letters.get(shard, MIN_SEQUENCE) + 1)
        for shard in sorted(ends.keys() | letters.keys())
    }
    return _state(ingestion, source, shards)


def _covered_to(end: int, replaced: int = MIN_SEQUENCE) -> ShardState:
    """All before ``end`` is in the table, and what lies between it and ``replaced`` may be."""
    again = Intervals.of((end, replaced)) if replaced > end else Intervals()
    last = max(end, replaced)
    return ShardState(Intervals.of((MIN_SEQUENCE, last)), again, origin=last)


def _state(ingestion: Ingestion, source: BatchSource, shards: Mapping[Shard, ShardState]) -> LedgerState:
    ledger = ingestion.ledger()
    snapshot = ledger.log.snapshot()
    letters = ingestion.dead_letters().log().snapshot()
    version, number = (snapshot.version, snapshot.last_number(ledger.app)) if snapshot else (-1, 0)
    # What was written before cannot be judged any more.
    settled = letters.version if letters else -1
    state = LedgerState(version, shards, None, number, settled, ingestion.sharing_mode)
    kept = ledger.entry("keep", state, number=number, bid="", identities=source.identities())
    return replace(state, newest=kept, identities=kept.identities)


def keep(spark: SparkSession, source: BatchSource, ingestion: Ingestion, state: LedgerState) -> None:
    """Write the state down, so that the ledger can be read again; nothing if another run has done so.

    Raises:
        WriteError: Spark failed; run it again.
    """
    shards = state.shards

    def fields(state: LedgerState) -> EntryFields | None:
        # What another run has written since then is not in this state.
        return None if _is_readable(ingestion) else {}

    commit_empty(spark, ingestion, "keep", fields, read=lambda: _state(ingestion, source, shards))


def _is_readable(ingestion: Ingestion) -> bool:
    try:
        ingestion.ledger().read()
    except LedgerTruncatedError:
        return False
    return True


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
    return _adoption(ingestion.in_epochs(source), ingestion, ingestion.ledger().read()).positions


class _Adoption(NamedTuple):
    """The next sequence of each shard, and for those with rows: where these begin, and what is known there."""

    positions: Mapping[Shard, int]
    adopted: Mapping[Shard, int]
    facts_at_start: Mapping[Shard, PositionFacts]


def _adoption(source: BatchSource, ingestion: Ingestion, state: LedgerState) -> _Adoption:
    check_sharing(state, ingestion)
    if CLAIMS in (state.sharing, ingestion.sharing_mode):
        raise UnsupportedError(
            f"group {ingestion.group!r} claims entries one by one, so that it does not continue behind a row",
            remedy="Adopt the rows in mode 'resumable', and change it with: stream-assets switch --to load_balanced.",
        )
    begun, taken_back = _left_to_adopt(state, source)
    streams = begun | {shard.stream for shard in taken_back}
    if not streams:
        raise InvalidOptionError(
            f"group {ingestion.group!r} has positions of {source.url} in {ingestion.table} already",
            remedy="Just ingest. To move the group, use: stream-assets rewind.",
        )
    check_other_group(ingestion, state, streams, url=source.url)
    rows = row_extents(ingestion.ledger().log)
    last = {s: end for s, end in _last(ingestion, rows, taken_back).items() if s.stream in begun or s in taken_back}
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
    starts = {shard: extent.start for shard, extent in extents.items() if shard.stream in begun}
    positions = dict(sorted((starts | {shard: sequence + 1 for shard, sequence in last.items()}).items()))
    # From the first row on, also where the stream has lost its message by now: after a RESTORE to before the adopt that
    # is a loss. What the stream has before the first row is read then, because a transform may have dropped it.
    begins = {**starts, **taken_back}
    firsts = {shard: min(begins[shard], rows[shard].start if shard in rows else begins[shard]) for shard in last}
    adopted = {shard: start for shard, start in firsts.items() if start < positions[shard]}
    facts = {
        # The message of a first row that is gone by now counts as not read, so that the loss is known.
        shard: known._replace(added=known.added - 1) if place < extents[shard].start else known
        for shard, (place, known) in position_facts_in(source.hint(adopted)).items()
    }
    kept = {
        s: one for s, start in taken_back.items() if adopted.get(s) == start and (one := state.shards[s].facts_at_start)
    }
    return _Adoption(positions, adopted, {**facts, **kept})


def _left_to_adopt(state: LedgerState, source: BatchSource) -> tuple[frozenset[str], Mapping[Shard, int]]:
    """The streams without a position, and the shards whose adopt a RESTORE took back: where their rows began."""
    streams = source.identities()
    shards = {s: one for s, one in state.shards.items() if one.lacks_adopted and not one.is_written}
    return without_positions(state, streams), {s: one.adopted or 0 for s, one in shards.items() if s.stream in streams}


def _last(ingestion: Ingestion, rows: Mapping[Shard, Range], taken_back: Container[Shard]) -> Mapping[Shard, int]:
    counted = extents_of(ingestion.dead_letters().counted_places(ingestion.ledger()))
    # A RESTORE that took the adopt of a shard back has left its dead letters, also behind rows that it removed.
    letters = {shard: part for shard, part in counted.items() if shard not in taken_back}
    shards = letters.keys() | rows.keys()
    return {shard: max(found[shard].end - 1 for found in (letters, rows) if shard in found) for shard in shards}


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
    positions = dict(plan_adoption(source, ingestion))
    ingestion.ledger().check_first(positions)

    def fields(state: LedgerState) -> EntryFields | None:
        if not any(_left_to_adopt(state, source)):
            # Another run did the same at the same time.
            return None
        # As of this state: should a RESTORE remove rows before the commit lands, the ledger sees it.
        found = _adoption(source, ingestion, state)
        positions.clear()
        positions.update(found.positions)
        return EntryFields(
            origin=found.positions,
            adopted=found.adopted,
            facts_at_start=found.facts_at_start,
            identities={**state.identities, **source.identities()},
            switch=None if state.newest else ingestion.sharing_mode,
            hint=source.hint(positions, state.hint),
        )

    commit_empty(spark, ingestion, "init", fields)
    return positions
