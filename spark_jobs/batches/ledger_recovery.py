"""Finds positions that the ledger does not have: its log was cleaned, or the table was copied without its log.

*A cleaned log.* Checkpoints keep the transaction numbers, so that it is known that the group has written, but not how
far. There are two ways to continue:

    at the broker         Each commit to the broker has the number and the id of the batch. If the number is the last
                          one in the table, nothing was written since. Then the positions of the broker are those of
                          the ledger, with two exceptions: they may belong to another table of the group, or a RESTORE
                          may have removed rows of the batch, which changes no number. So one of two things has to be
                          true. Either the log shows that the batch has this id and leads to these positions, and that
                          there was no RESTORE since. Or the rows reach up to the positions.
    a new start           A user gives a position. Everything that the table holds after it is replaced, so that any
                          position is safe. Dead letters after the last row may belong to a batch that was never
                          written, or that a RESTORE removed. So everything after the last row is replaced in any case.

In both cases the state is committed in an empty commit of kind ``keep``.

*A copied table* (CREATE TABLE … AS SELECT, a clone, INSERT INTO, files that were copied) has the rows of a stream, but
the positions are only in the log of the original table. Ingestion into it as a new table would write each message a
second time, so that it is refused, until a user who knows the origin of the rows adopts them (:func:`adopt`): each
shard continues after its last row.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.source_checks import (
    certain_facts,
    check_other_group,
    check_sharing,
    last_messages_before,
    without_positions,
)
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
from stream_consumers.batches import (
    BatchSource,
    LastMessage,
    PositionFacts,
    Range,
    hint_with_facts,
    position_facts_in,
)
from stream_consumers.errors import (
    InvalidOptionError,
    LedgerTruncatedError,
    SourceRecreatedError,
    StreamNotFoundError,
    UnsupportedError,
)
from stream_consumers.messages import Shard


def commit_metadata(app: str, state: LedgerState, shards: Iterable[Shard]) -> str:
    """Return the metadata to commit with the positions to the broker; empty if the ledger has gaps or ``redo``.

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
    # The newest entry of a group with several transaction sequences may belong to another sequence.
    is_known = newest is not None and (newest.app, newest.number) == (app, state.last_number)
    return f"{app} {state.last_number} {newest.bid if newest and is_known else ''}".rstrip()


def commit_positions(source: BatchSource, ingestion: Ingestion, state: LedgerState, streams: Container[str]) -> None:
    """Commit the positions of a transaction sequence to the broker, with the number and id of its last batch.

    Args:
        source: the stream.
        ingestion: the group, and the member or shard of the sequence.
        state: the ledger.
        streams: the streams of the source; the group may have others.
    """
    positions = ingestion.own(state.positions, streams)
    if state.resume is not None:
        source.remember(state.resume)
    metadata = commit_metadata(ingestion.ledger().app, state, positions)
    source.commit(ingestion.group, positions, metadata=metadata)


def has_begun(ingestion: Ingestion) -> bool:
    """Return whether the group has written anything, even if its log was cleaned."""
    try:
        return ingestion.ledger().read().newest is not None
    except LedgerTruncatedError:
        return True


def read_or_recover(source: BatchSource, ingestion: Ingestion, ledger: Ledger) -> tuple[LedgerState, bool]:
    """Read the ledger; if its log was cleaned, recover its state from what the broker has.

    Args:
        source: the stream, by the names of its epochs.
        ingestion: group and table.
        ledger: the ledger of the group.

    Returns:
        The state, and whether it has to be committed with :func:`keep`.

    Raises:
        LedgerTruncatedError: the log was cleaned, and the broker does not agree with the table.
    """
    try:
        return ledger.read(), False
    except LedgerTruncatedError as error:
        if ingestion.keys is not None:
            raise LedgerTruncatedError(
                error.what,
                remedy="Restore the log files, or write into a new table: the rows of a keyed table do not show which "
                "messages were merged.",
                **error.facts,
            ) from None
        state = _from_broker(source, ingestion)
        if state is None:
            raise
        return state, True


def _from_broker(source: BatchSource, ingestion: Ingestion) -> LedgerState | None:
    metadata, positions = source.committed_metadata(ingestion.group), source.committed(ingestion.group) or {}
    ends = {s: extent.end + extent.blocked for s, extent in source.extents().items()}
    if not positions or any(ends.get(shard, -1) < position for shard, position in positions.items()):
        return None
    at_broker: dict[tuple[str, int], _BrokerPositions] = {}
    for own, shards in ingestion.by_sequence(positions):
        ledger = own.ledger()
        number = ledger.last_number(ledger.member)
        bids = {_bid_in(metadata.get(shard, ""), ledger.app, number) for shard in shards}
        bid = bids.pop()
        if bid is None or bids:
            return None
        at_broker[ledger.app, number] = _BrokerPositions(bid, {shard: positions[shard] for shard in shards})
    rows, dead_letters = _last_sequences(ingestion, source)
    if any(positions.get(shard, -1) <= last for shard, last in (*rows.items(), *dead_letters.items())):
        return None
    if not _is_confirmed(ingestion, at_broker, positions):
        return None
    known = _covered_to(source, positions)
    _check_last_rows(ingestion, source, rows)
    return _state(ingestion, source, known)


@dataclass(frozen=True, slots=True)
class _BrokerPositions:
    """The metadata and positions that the broker has of a transaction sequence.

    Args:
        bid: the id of the newest batch; empty if an older release committed it.
        positions: the positions after that batch.
    """

    bid: str
    positions: Mapping[Shard, int]

    def is_of(self, entry: LedgerEntry) -> bool:
        """Return whether it was committed after this entry, and not after one with the same number in another table."""
        if self.bid and (self.bid != entry.bid or not entry.is_full):
            return self.bid == entry.bid
        known = fold(entry.state or {}, entry, late=False)
        return all(shard in known and known[shard].position == end for shard, end in self.positions.items())


def _bid_in(metadata: str, app: str, number: int) -> str | None:
    """Return the batch id in a result of :func:`commit_metadata`; ``None`` if that has another app id or number."""
    bid = metadata.removeprefix(f"{app} {number}")
    return bid.removeprefix(" ") if bid != metadata and bid[:1] in ("", " ") else None


def _is_confirmed(
    ingestion: Ingestion, at_broker: Mapping[tuple[str, int], _BrokerPositions], positions: Mapping[Shard, int]
) -> bool:
    """Return whether the broker's positions belong to batches of this table, and no RESTORE has removed rows of them.

    Dead letters do not count as rows here, because a RESTORE of the table does not remove them.

    Args:
        ingestion: group and table.
        at_broker: what the broker has of each transaction sequence, by app id and last number.
        positions: the positions of the broker.
    """
    log, unseen = ingestion.ledger().log, dict(at_broker)
    for commit in log.readable():
        if commit.restore_target is not None:
            return False
        entry = commit.entry
        if entry is not None and (known := unseen.pop((entry.app, entry.number), None)) and not known.is_of(entry):
            return False
        if not unseen:
            return True
    # A RESTORE removes the newest rows first, and may itself have been cleaned from the log.
    last = last_sequences(log)
    return all(last.get(shard, -1) + 1 >= position for shard, position in positions.items())


def _last_sequences(ingestion: Ingestion, source: BatchSource) -> tuple[Mapping[Shard, int], Mapping[Shard, int]]:
    """Return the last sequence of each shard of the source in the table, and in its dead letters.

    Raises:
        TableUnreadableError: delta-rs cannot read the data of one of them.
    """
    streams, logs = source.identities(), (ingestion.ledger().log, ingestion.dead_letters().log())
    rows, dead = ({s: last for s, last in last_sequences(log).items() if s.stream in streams} for log in logs)
    return rows, dead


def _check_last_rows(ingestion: Ingestion, source: BatchSource, last: Mapping[Shard, int]) -> None:
    """Refuse a stream whose messages have other timestamps than the last rows.

    The log has no fingerprints of the stream: it was cleaned, or it is that of a copy. A recreated stream may be longer
    than the old one by now.

    Args:
        ingestion: group and table.
        source: the stream, by the names of its epochs, after :meth:`BatchSource.extents`, and after the last messages
            for the ledger were read, so that a stream that is cut between the two is detected here.
        last: the sequence of the last row of each shard.

    Raises:
        SourceRecreatedError: with the timestamps.
    """
    log, places = ingestion.ledger().log, {shard: Range(sequence, sequence + 1) for shard, sequence in last.items()}
    if not places or not source.has_own_timestamps or TIME not in column_names(log):
        return
    rows = timestamps_of(scan(log, ROW_TIME, where=in_ranges(places)), ROW_TIME)
    messages = source.last_messages(places)
    for shard, (_, moments) in sorted(rows.items()):
        message = messages.get(shard)
        if message is not None and NO_TIMESTAMP not in moments and message.timestamp_ms not in moments:
            raise SourceRecreatedError(
                f"{source.url} is not the stream of the rows in {ingestion.table}: its message at the place of the "
                f"last row of {shard} has another timestamp",
                remedy="It was recreated, or is another stream of this name. Ingest it into another table. The rows of "
                "the old stream stay in this one.",
                sequence=message.sequence,
                table=int(moments[0]),
                stream=message.timestamp_ms,
            )


def surviving_state(ingestion: Ingestion, source: BatchSource) -> LedgerState:
    """Derive a state from the table: each shard is covered up to its last row.

    The range between that row and the last dead letter has to be replaced.

    Raises:
        UnsupportedError: the members of the group claim entries one by one, so that rows do not show what was read.
        SourceRecreatedError: the rows belong to another stream.
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    if source.is_in_claim_mode(ingestion.group):
        raise UnsupportedError(
            f"the log of {ingestion.table} was cleaned, and group {ingestion.group!r} claims entries of {source.url} "
            "one by one: it is unknown which entries before the last row are in the table",
            remedy="Restore the log files from a backup, or use another group and table. To write all entries of the "
            "stream again, end the members of the group, remove it from the server (XGROUP DESTROY), and run: "
            "stream-assets rewind --to earliest.",
        )
    extents = source.extents()
    rows, dead_letters = _last_sequences(ingestion, source)
    written = {shard.stream for shard in rows.keys() | dead_letters.keys()}
    # Of a stream that was read, a shard without rows and dead letters may have lost messages before they were read.
    unread = {shard for shard in extents if shard.stream in written} - dead_letters.keys()
    starts = {s: source.first(s, extent) if s in unread else extent.start for s, extent in extents.items()}
    ends = starts | {shard: last + 1 for shard, last in rows.items()}
    replaced = {shard: last + 1 for shard, last in dead_letters.items()}
    shards = _covered_to(source, dict.fromkeys(replaced, MIN_SEQUENCE) | ends, replaced)
    _check_last_rows(ingestion, source, rows)
    return _state(ingestion, source, shards)


def _covered_to(
    source: BatchSource, ends: Mapping[Shard, int], replaced: Mapping[Shard, int] | None = None
) -> Mapping[Shard, ShardState]:
    """Return states that are covered up to ``ends``, or up to ``replaced`` with the range between as ``redo``."""
    until = replaced or {}
    positions = {shard: max(end, until.get(shard, end)) for shard, end in sorted(ends.items())}
    last = last_messages_before(source, positions)
    return {
        shard: ShardState(
            Intervals.of((MIN_SEQUENCE, position)),
            Intervals.of((ends[shard], position)),
            origin=position,
            last=last.get(shard),
        )
        for shard, position in positions.items()
    }


def _state(ingestion: Ingestion, source: BatchSource, shards: Mapping[Shard, ShardState]) -> LedgerState:
    ledger = ingestion.ledger()
    snapshot = ledger.log.snapshot()
    dead_letters = ingestion.dead_letters().log().snapshot()
    version, number = (snapshot.version, snapshot.last_number(ledger.app)) if snapshot else (-1, 0)
    # It cannot be checked any more which of the earlier dead letters count, so all of them do.
    checked = dead_letters.version if dead_letters else -1
    state = LedgerState(version, shards, None, number, checked, ingestion.sharing_mode)
    kept = ledger.entry("keep", state, number=number, bid="", identities=source.identities())
    return replace(state, newest=kept, identities=kept.identities)


def keep(spark: SparkSession, source: BatchSource, ingestion: Ingestion, state: LedgerState) -> None:
    """Commit the state, so that the ledger can be read again, unless another run has done so.

    Raises:
        WriteError: Spark failed; run it again.
    """
    shards = state.shards

    def fields(state: LedgerState) -> EntryFields | None:
        # If another run has committed a state, this one may lack what was written since.
        return None if _is_readable(ingestion) else {}

    commit_empty(spark, ingestion, "keep", fields, read=lambda: _state(ingestion, source, shards))


def _is_readable(ingestion: Ingestion) -> bool:
    try:
        ingestion.ledger().read()
    except LedgerTruncatedError:
        return False
    return True


def plan_adoption(source: BatchSource, ingestion: Ingestion) -> Mapping[Shard, int]:
    """Return where :func:`adopt` would let each shard continue: after its last row, or last dead letter that counts.

    Dead letters of an earlier table at this path do not count, because this table does not have their batches, and may
    never have had the rows before them. Dead letters that were copied with the rows count.

    Args:
        source: the stream of the rows.
        ingestion: the group, and the table that holds the rows.

    Raises:
        StreamNotFoundError: the table holds no rows of the stream, or there is no table.
        InvalidOptionError: this group or another one already has positions in the stream.
        SourceRecreatedError: the stream ends before the last row, or has another message there, so that the rows belong
            to another stream.
        UnsupportedError: the members of the group claim entries one by one, so that it has no positions.
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    return _adoption(ingestion.in_epochs(source), ingestion, ingestion.ledger().read()).positions


class _Adoption(NamedTuple):
    """The next sequence of each shard, the hint for them, and the last messages before them.

    Shards with rows also have the start of the rows, and the facts known there.
    """

    positions: Mapping[Shard, int]
    hint: Mapping[str, object] | None
    last_messages: Mapping[Shard, LastMessage]
    adopted: Mapping[Shard, int]
    facts_at_start: Mapping[Shard, PositionFacts]


def _adoption(source: BatchSource, ingestion: Ingestion, state: LedgerState) -> _Adoption:
    check_sharing(state, ingestion)
    if CLAIMS in (state.sharing, ingestion.sharing_mode):
        raise UnsupportedError(
            f"group {ingestion.group!r} claims entries one by one, so that it cannot continue after a row",
            remedy="Adopt the rows in mode 'resumable', then change it with: stream-assets switch --to load_balanced.",
        )
    new, undone = _left_to_adopt(state, source)
    streams = new | {shard.stream for shard in undone}
    if not streams:
        raise InvalidOptionError(
            f"group {ingestion.group!r} already has positions of {source.url} in {ingestion.table}",
            remedy="Ingest without an adopt. To move the group, use: stream-assets rewind.",
        )
    check_other_group(ingestion, state, streams, url=source.url)
    rows = row_extents(ingestion.ledger().log)
    last = {s: end for s, end in _last(ingestion, rows, undone).items() if s.stream in new or s in undone}
    if not last:
        raise StreamNotFoundError(
            f"{ingestion.table} holds no rows of {', '.join(sorted(streams))}",
            remedy="Ingest without an adopt.",
        )
    extents = {shard: extent for shard, extent in source.extents().items() if shard.stream in streams}
    for shard, sequence in sorted(last.items()):
        end = extents[shard].end + extents[shard].blocked if shard in extents else None
        if end is None or end <= sequence:
            raise SourceRecreatedError(
                f"{source.url} ends before the last row of {shard} in {ingestion.table}",
                remedy="The rows belong to another stream of this name. Ingest into another table.",
                row=sequence,
                end=end,
            )
    starts = {shard: extent.start for shard, extent in extents.items() if shard.stream in new}
    positions = dict(sorted((starts | {shard: sequence + 1 for shard, sequence in last.items()}).items()))
    last_messages = last_messages_before(source, positions)
    _check_last_rows(ingestion, source, {shard: rows[shard].end - 1 for shard in last if shard in rows})
    # From the first row on, even if the stream has lost its message by now, which is a loss after a RESTORE to before
    # the adopt. Messages before the first row are read then, because a transform may have dropped them.
    begins = {**starts, **undone}
    firsts = {shard: min(begins[shard], rows[shard].start if shard in rows else begins[shard]) for shard in last}
    adopted = {shard: start for shard, start in firsts.items() if start < positions[shard]}
    facts = {
        # If the message of the first row is gone, it counts as not read, so that the loss is detected.
        shard: known._replace(added=known.added - 1) if place < extents[shard].start else known
        for shard, (place, known) in position_facts_in(source.hint(adopted)).items()
    }
    kept = {s: one for s, at in undone.items() if adopted.get(s) == at and (one := state.shards[s].facts_at_start)}
    after_rows = certain_facts(source, extents, {shard: positions[shard] for shard in last})
    hint = source.hint({shard: start for shard, start in starts.items() if shard not in last}, state.hint)
    hint = hint_with_facts(hint, {**position_facts_in(hint), **after_rows})
    return _Adoption(positions, hint, last_messages, adopted, {**facts, **kept})


def _left_to_adopt(state: LedgerState, source: BatchSource) -> tuple[frozenset[str], Mapping[Shard, int]]:
    """Return the streams without a position, and the start of the rows of shards whose adopt a RESTORE undid."""
    streams = source.identities()
    shards = {s: one for s, one in state.shards.items() if one.is_adopt_undone and not one.is_written}
    return without_positions(state, streams), {s: one.adopted or 0 for s, one in shards.items() if s.stream in streams}


def _last(ingestion: Ingestion, rows: Mapping[Shard, Range], undone: Container[Shard]) -> Mapping[Shard, int]:
    counted = extents_of(ingestion.dead_letters().counted_places(ingestion.ledger()))
    # If a RESTORE undid the adopt of a shard, its dead letters are still there, also after the rows that are left.
    dead = {shard: part for shard, part in counted.items() if shard not in undone}
    shards = dead.keys() | rows.keys()
    return {shard: max(found[shard].end - 1 for found in (dead, rows) if shard in found) for shard in shards}


def adopt(spark: SparkSession, source: BatchSource, ingestion: Ingestion) -> Mapping[Shard, int]:
    """Let the group own the rows of a table: it continues after the last row of each shard.

    Messages without a row before that count as read, because the transform may have dropped them. Messages after it
    that the transform dropped, or that were dead letters, are read again.

    Args:
        spark: a session that can write Delta tables.
        source: the stream of the rows.
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
            # Another run has adopted the rows meanwhile.
            return None
        # From this state: if a RESTORE removes rows before the commit lands, the ledger sees that the commit is late.
        found = _adoption(source, ingestion, state)
        positions.clear()
        positions.update(found.positions)
        return EntryFields(
            origin=found.positions,
            last_messages=found.last_messages,
            adopted=found.adopted,
            facts_at_start=found.facts_at_start,
            identities={**state.identities, **source.identities()},
            switch=None if state.newest else ingestion.sharing_mode,
            hint=found.hint,
        )

    commit_empty(spark, ingestion, "init", fields)
    return positions
