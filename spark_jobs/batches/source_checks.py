"""Checks that the stream, the group and the mode are those in the ledger, before a batch is planned."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.ledger.entries import CLAIMS, LEAVING_CLAIMS, MODES, SWITCHING, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import LedgerState, kind_of_table
from spark_jobs.ledger.table_rows import ROW_PLACE, in_places, scan
from stream_consumers.batches import BatchSource, Extent, FactsByShard, LastMessage, Range, position_facts_in
from stream_consumers.epochs import accept_remedy, newest_epochs, split_epoch, truncation_remedy
from stream_consumers.errors import DataLossError, InvalidOptionError, SourceRecreatedError, SourceTruncatedError
from stream_consumers.messages import Shard
from stream_consumers.options import ConsumerMode
from stream_consumers.urls import StreamUrl

# Whose transaction sequence has the positions: the sequence of the one member, one per shard, or none in claim mode.
_SEQUENCES = {
    ConsumerMode.REAL_TIME.value: "member",
    ConsumerMode.RESUMABLE.value: "member",
    ConsumerMode.LOAD_BALANCED.value: "shard",
    CLAIMS: "claims",
}


def lag(source: BatchSource, state: LedgerState, extents: Mapping[Shard, Extent]) -> Mapping[Shard, int]:
    """Count the messages to write per shard: those after the covered range, and those to replace; an upper bound."""
    known = {shard: state.shards.get(shard, ShardState()) for shard in extents}
    ends = {shard: s.covered.position for shard, s in known.items()}
    starts = {shard: extents[shard].start if end is None else end for shard, end in ends.items()}
    total = dict(source.count({shard: Range(start, extents[shard].end) for shard, start in starts.items()}))
    for index in range(max((len(s.redo.ranges) for s in known.values()), default=0)):
        parts = {shard: s.redo.ranges[index] for shard, s in known.items() if index < len(s.redo.ranges)}
        for shard, count in source.count(parts).items():
            total[shard] += count
    return total


def check_sharing(state: LedgerState, ingestion: Ingestion) -> None:
    """Refuse a group in another mode, whose batches have other transaction sequences: one in flight could land, too.

    Raises:
        InvalidOptionError: with the mode of the group and the way to change it.
    """
    wanted = ingestion.sharing.value
    if not state.sharing or _SEQUENCES.get(state.sharing) == _SEQUENCES[ingestion.sharing_mode]:
        return
    raise InvalidOptionError(
        f"group {ingestion.group!r} of {ingestion.table} is {state.sharing}, not {ingestion.sharing_mode}",
        remedy=f"Change the group's mode with: stream-assets switch --to {wanted}; or use mode {state.sharing!r}."
        if state.sharing not in (SWITCHING, LEAVING_CLAIMS)
        else f"A switch was begun and not finished: run stream-assets switch --to {wanted}.",
    )


def check_keys(state: LedgerState, ingestion: Ingestion) -> None:
    """Refuse to write a keyed table with another key or order, to append to it, and to make another table keyed.

    Raises:
        InvalidOptionError: with the key of the table.
    """
    if state.newest is None or state.keys == ingestion.key_order:
        return
    was, wanted = kind_of_table(state.keys), kind_of_table(ingestion.key_order)
    raise InvalidOptionError(
        f"{ingestion.table} is {was}, and this run would have it {wanted}",
        remedy="Use the keys of the table. Or make it anew from the first message of the stream, with the options of "
        "this run: stream-assets rebuild "
        f"{shlex.join(['--table', ingestion.table, '--group', ingestion.group])} …, or the rebuild job.",
    )


def without_positions(state: LedgerState, streams: Iterable[str]) -> frozenset[str]:
    """Return the streams in which the group has no position."""
    return frozenset(streams) - {shard.stream for shard in state.shards}


def check_other_group(ingestion: Ingestion, state: LedgerState, streams: frozenset[str], *, url: StreamUrl) -> None:
    """Refuse a second group for a stream in a table, because a replace of one would remove the rows of the other.

    Args:
        ingestion: group and table.
        state: the ledger that the first commit with these streams is planned from.
        streams: the streams that the group begins with.
        url: the URL of the source, for the message.

    Raises:
        InvalidOptionError: another group writes one of them into the table.
        LedgerTruncatedError: the log was cleaned, so that it is unknown which group wrote the rows of the streams.
    """
    _refuse_other(ingestion, ingestion.ledger().other_group(streams, base=state.version), url=url)


def check_only_group(ingestion: Ingestion, state: LedgerState, streams: Iterable[str], *, url: StreamUrl) -> None:
    """Refuse a group that began with a stream at the same time as another one, and came second.

    Delta accepts the first commits of both, because they share no transaction sequence. Each plan checks this until a
    batch is written, because a run may be killed between its first commit and the check. The check reads the log back
    to the first commit with the stream, so that a plan does it only for the streams that it writes.

    Args:
        ingestion: group and table.
        state: the ledger. A state that was derived from the rows has no batch id, and is not checked: it is committed
            first (:func:`spark_jobs.batches.ledger_recovery.keep`).
        streams: those that are about to be written or moved; streams that the group has written are not checked again.
        url: the URL of the source, for the message.

    Raises:
        InvalidOptionError, LedgerTruncatedError: see :func:`check_other_group` and :func:`check_owner`.
    """
    if state.newest is None or not state.newest.bid:
        return
    known: dict[str, list[ShardState]] = {}
    for shard, one in state.shards.items():
        known.setdefault(shard.stream, []).append(one)
    unwritten = frozenset(s for s in streams if s in known and not any(one.is_written for one in known[s]))
    if unwritten:
        _refuse_other(ingestion, ingestion.ledger().earlier_group(unwritten), url=url)
        check_owner(ingestion, url=url)


def check_owner(ingestion: Ingestion, *, url: StreamUrl) -> None:
    """Refuse to write a table with rows or positions of other streams, unless it began with those of the source.

    Two streams may begin at the same time in different transaction sequences. Then the first in the log stays.

    Args:
        ingestion: group and table; only a table that its streams own is checked.
        url: the URL of the source.

    Raises:
        InvalidOptionError: the table belongs to other streams, or to another program.
    """
    if not ingestion.owns_table:
        return
    ledger, own = ingestion.ledger(), frozenset(url.required_streams())
    known = ledger.read().streams
    snapshot = ledger.log.snapshot()
    has_foreign_rows = not known and snapshot is not None and snapshot.has_rows
    # The streams that the table began with are read last, because another run of this group may begin meanwhile.
    if (known - own or has_foreign_rows or ledger.other_groups()) and not own & ledger.first_streams():
        raise InvalidOptionError(
            f"{ingestion.table} has rows or positions of other streams than {url}, which a pattern found",
            remedy="If the rows of this stream belong into that table, name it in an entry of its own, with stream.",
            streams=", ".join(sorted(known - own)),
        )


def _refuse_other(ingestion: Ingestion, other: str | None, *, url: StreamUrl) -> None:
    if other is not None:
        raise InvalidOptionError(
            f"group {other!r} already writes {url} into {ingestion.table}",
            remedy=f"Use group {other!r}, or another table: the rows of two groups cannot be distinguished.",
        )


def check_removed_by_restore(state: LedgerState, ingestion: Ingestion) -> None:
    """Refuse to continue if a RESTORE removed rows that the group cannot simply read again.

    They are rows of claimed entries, which are acknowledged, or adopted rows.

    Raises:
        DataLossError: the entries of the rows are acknowledged, so that they cannot be claimed again.
        InvalidOptionError, TableUnreadableError: see :func:`check_undone_adopt`.
    """
    if state.removed_claim_batches:
        raise DataLossError(
            f"a RESTORE of {ingestion.table} removed batches whose entries group {ingestion.group!r} has acknowledged; "
            "they cannot be claimed again",
            remedy="RESTORE the table to a version that has them, or ingest the stream with a new group name into "
            "another table.",
            batches=state.removed_claim_batches.size,
            version=state.version,
        )
    check_undone_adopt(ingestion, state)


def check_undone_adopt(ingestion: Ingestion, state: LedgerState) -> None:
    """Refuse to continue after a RESTORE to before an adopt, if messages of adopted rows would be read again.

    Args:
        ingestion: group and table.
        state: the ledger.

    Raises:
        InvalidOptionError: the table holds rows that no commit covers.
        DataLossError: the members of the group claim entries one by one, and the entries of the rows are acknowledged.
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    undone = {shard: known for shard, known in sorted(state.shards.items()) if known.is_adopt_undone}
    if state.sharing == CLAIMS:
        # If the RESTORE came before the switch to claims, the group has read the messages by position since.
        undone = {shard: known for shard, known in undone.items() if known.covered.position == known.origin}
    if not undone:
        return
    what = f"a RESTORE of {ingestion.table} to before its rows were adopted has removed some rows of {min(undone)}"
    remedy = "RESTORE the table to a version after that"
    if state.sharing == CLAIMS:
        raise DataLossError(
            f"{what}, whose entries cannot be claimed again", remedy=f"{remedy}.", version=state.version
        )
    places = {s: Intervals.of((known.origin or 0, 2**63 - 1)) - known.covered for s, known in undone.items()}
    found = scan(ingestion.ledger().log, ROW_PLACE, where=in_places(places), version=state.version)
    if any(rows.num_rows for rows in found):
        is_written = any(known.is_written for known in undone.values())
        again = "" if is_written else ", or adopt the remaining rows with: stream-assets adopt"
        raise InvalidOptionError(
            f"{what}, and the table holds other rows that no commit covers",
            remedy=f"{remedy}{again}.",
            version=state.version,
        )


def losses(
    source: BatchSource, ingestion: Ingestion, state: LedgerState, extents: Mapping[Shard, Extent]
) -> Mapping[Shard, Range]:
    """Return what the next run would report as lost: in the stream, and what a RESTORE removed of an ended shard.

    Args:
        source: the stream, by the names of its epochs, after :meth:`BatchSource.extents` with ``state.resume``.
        ingestion: the group.
        state: the ledger.
        extents: what the stream holds.

    Raises:
        DataLossError: see :func:`check_removed_by_restore`.
    """
    check_removed_by_restore(state, ingestion)
    known = {shard: state.shards[shard].covered for shard in extents if shard in state.shards}
    gaps = {shard: covered.first_gap(extents[shard].end) for shard, covered in known.items()}
    lost = source.lost({shard: gap for shard, gap in gaps.items() if gap is not None})
    return {**lost, **{shard: parts.hull for shard, parts in state.removed_from_ended.items()}}


def not_held(
    source: BatchSource,
    ingestion: Ingestion,
    state: LedgerState,
    extents: Mapping[Shard, Extent],
    ranges: Mapping[Shard, Range],
) -> Mapping[Shard, Range]:
    """Return what the stream may no longer hold of ranges, and of what a commit has merged again behind them.

    Args:
        source: the stream, by the names of its epochs.
        ingestion: its write mode says whether all that is covered behind a range is merged again.
        state: the ledger.
        extents: what the stream holds.
        ranges: covered ranges that are to be read again, or to be merged.
    """
    if not redoes_rest(ingestion):
        return source.lost({shard: part for shard, part in ranges.items() if part.start < part.end})
    ends = {s: known.covered.ranges[-1].end for s, known in state.shards.items() if known.covered}
    needed = {s: Range(part.start, max(part.end, ends.get(s, part.end))) for s, part in ranges.items()}
    needed = {shard: part for shard, part in needed.items() if part.start < part.end}
    gone = {shard: part for shard, part in needed.items() if shard not in extents}
    return {**gone, **source.maybe_lost({shard: part for shard, part in needed.items() if shard in extents})}


def redoes_rest(ingestion: Ingestion) -> bool:
    """Return whether all that is covered behind a merge is merged again, as in the order of positions."""
    return MODES[ingestion.write_mode(again=True)].redoes_rest


def losses_of_stream(source: BatchSource, ingestion: Ingestion, state: LedgerState) -> Mapping[Shard, Range]:
    """Check the stream like a run, and return the messages that are gone and that the group has not read.

    Args:
        source: the stream, by the names of its epochs.
        ingestion: the group.
        state: the ledger.

    Raises:
        DataLossError: see :func:`check_removed_by_restore`.
        InvalidOptionError, LedgerTruncatedError: see :func:`check_only_group`.
        SourceRecreatedError, SourceTruncatedError: see :func:`check_source`.
    """
    extents, positions = source.extents(resume=state.resume), state.positions
    unread = {shard.stream for shard, extent in extents.items() if positions.get(shard, extent.start) < extent.end}
    check_only_group(ingestion, state, unread, url=source.url)
    check_source(source, ingestion.group, state, extents)
    return losses(source, ingestion, state, extents)


def check_loss(
    source: BatchSource, ingestion: Ingestion, lost: Mapping[Shard, Range], extents: Mapping[Shard, Extent]
) -> None:
    """Refuse to continue after a loss, unless it is to be recorded.

    Args:
        source: the stream, for the message.
        ingestion: the group, and what to do about messages that are gone.
        lost: the ranges that are gone and were not read.
        extents: what the stream holds.

    Raises:
        DataLossError: with the ranges.
    """
    if not lost:
        return
    ranges = ", ".join(f"{shard} from {part.start} to {part.end}" for shard, part in sorted(lost.items()))
    error = DataLossError(
        f"messages of {source.url} are gone that group {ingestion.group!r} has not read: {ranges}",
        remedy="Bring them back. Or set on_data_loss='record' to skip them and continue, and record the loss in the "
        "table's log and dead letters.",
        **{
            str(shard): f"committed {part.start}, earliest {part.end}, latest {extents[shard].end}"
            for shard, part in sorted(lost.items())
        },
    )
    ingestion.refuse_or_record(error)


def check_source(
    source: BatchSource,
    group: str,
    state: LedgerState,
    extents: Mapping[Shard, Extent],
    *,
    reads_last_messages: bool = True,
) -> None:
    """Refuse a stream that is not the one in the ledger, that was cut, or that ends before the position.

    Args:
        source: the stream, by the names of its epochs.
        group: for the message.
        state: the ledger, read before ``extents``.
        extents: what the stream holds.
        reads_last_messages: also compare the last message that was read of each shard.

    Raises:
        SourceRecreatedError: with both identities, or the position and the end.
        SourceTruncatedError: with the last message that was read, and the one that the stream has in its place.
    """
    check_epochs(state, source.identities(), url=source.url)
    for error in recreations(source, group, state, extents, reads_last_messages=reads_last_messages).values():
        raise error


def check_planned(source: BatchSource, group: str, state: LedgerState, extents: Mapping[Shard, Extent]) -> None:
    """Refuse a stream that was recreated, or that has other messages in place of those that were read.

    Args:
        source: the stream, by the names of its epochs, after a plan.
        group: for the message.
        state: the ledger.
        extents: what the planned shards hold.

    Raises:
        SourceRecreatedError: with the position.
        SourceTruncatedError: with the last message that was read, and the one that the stream has in its place.
    """
    positions = {shard: position for shard, position in state.positions.items() if shard in extents}
    for error in _recreated(source, group, positions).values():
        raise error
    for truncation in truncations(source, group, state, extents).values():
        raise truncation


def _recreated(source: BatchSource, group: str, positions: Mapping[Shard, int]) -> Mapping[str, SourceRecreatedError]:
    """Return the streams that were recreated since these positions, if fingerprints do not show it."""
    return {
        shard.stream: SourceRecreatedError(
            f"{shard} of {source.url} has other counts than group {group!r} has seen: it was deleted and recreated, or "
            "a failover lost its newest entries",
            remedy=accept_remedy(shard.stream),
            position=positions[shard],
        )
        for shard in sorted(source.recreated(positions), reverse=True)
    }


def truncations(
    source: BatchSource,
    group: str,
    state: LedgerState,
    extents: Mapping[Shard, Extent],
    *,
    reads_last_messages: bool = True,
    counts_all: bool = False,
) -> Mapping[Shard, SourceTruncatedError]:
    """Return an error for each shard that lost messages which were read.

    The last message that was read is compared with the message that the stream has in its place. Leader epochs alone
    would miss a broker that was restored to a snapshot, which may get the same epoch again. Rows alone would miss
    messages that a transform drops. One fetch is enough for all shards, so that every plan compares them, and need not
    detect a new leader or a new connection.

    Args:
        source: the stream, by the names of its epochs.
        group: for the message.
        state: the ledger, read before ``extents``.
        extents: what the shards hold that are checked.
        reads_last_messages: compare the messages, not only the ends.
        counts_all: count messages even if that takes long; see ``BatchSource.with_late_messages``.
    """
    known = {shard: last for shard, last in state.last_messages.items() if shard in extents}
    positions = {shard: state.shards[shard].covered.position for shard in known}
    # Up to the position: the last offsets of a range may have held no readable message, but may hold one now.
    asked = {shard: Range(MIN_SEQUENCE, max(last.sequence + 1, positions[shard] or 0)) for shard, last in known.items()}
    in_stream = source.last_messages(asked) if reads_last_messages else {}
    facts = {shard: [at] for shard, at in position_facts_in(state.hint).items() if shard in known}
    late = source.with_late_messages(facts, counts_all=counts_all) if reads_last_messages else {}
    errors: dict[Shard, SourceTruncatedError] = {}
    for shard, last in known.items():
        position, end = positions[shard], extents[shard].end + extents[shard].blocked
        found = in_stream.get(shard)
        if end <= last.sequence:
            what = "ends before the last message that"
        elif reads_last_messages and source.is_replaced(shard, last, found):
            what = "holds other messages than"
        elif shard in late:
            what = "got messages before those that"
        else:
            continue
        errors[shard] = SourceTruncatedError(
            f"{shard} of {source.url} {what} group {group!r} has read: the broker lost its newest messages",
            remedy=truncation_remedy(shard.stream),
            shard=str(shard),
            sequence=last.sequence,
            expected_timestamp_ms=last.timestamp_ms,
            found_sequence=None if found is None else found.sequence,
            found_timestamp_ms=None if found is None else found.timestamp_ms,
            position=position,
            end=end,
        )
    return errors


def changed_shards(
    source: BatchSource, group: str, state: LedgerState, extents: Mapping[Shard, Extent]
) -> frozenset[Shard]:
    """Return the shards that were recreated, that were cut, or that end before the position.

    Args:
        source: the stream, by the names of its epochs.
        group: for the message of errors.
        state: the ledger, read before ``extents``.
        extents: what the shards hold.
    """
    positions = {shard: position for shard, position in state.positions.items() if shard in extents}
    ends = {shard: extents[shard].end + extents[shard].blocked for shard in positions}
    short = {shard for shard, end in ends.items() if end < (state.shards[shard].covered.position or 0)}
    return source.recreated(positions) | truncations(source, group, state, extents, counts_all=True).keys() | short


def certain_facts(source: BatchSource, extents: Mapping[Shard, Extent], positions: Mapping[Shard, int]) -> FactsByShard:
    """Return the facts at positions that an entry sets without a batch, unless messages after them may be gone already.

    Those would count as accounted for. Without facts, a run warns that it cannot detect them.

    Args:
        source: the stream, by the names of its epochs.
        extents: what the shards hold.
        positions: the new positions.
    """
    return {
        shard: (position, known)
        for shard, (position, known) in position_facts_in(source.hint(positions)).items()
        if position <= 0
        or ((known.deleted or 0) < position and (position >= extents[shard].end or extents[shard].start < position))
    }


def last_messages_before(
    source: BatchSource, positions: Mapping[Shard, int], read: Mapping[Shard, LastMessage] | None = None
) -> Mapping[Shard, LastMessage]:
    """Return the last messages before these positions, which each entry that sets a position records.

    They show whether the stream is cut below the position later, and grows past it again.

    Args:
        source: the stream, by the names of its epochs, after :meth:`BatchSource.extents`.
        positions: the new positions.
        read: the last messages that were read. They count where all later ones before the position were removed.
    """
    found = source.last_messages({shard: Range(MIN_SEQUENCE, end) for shard, end in positions.items()})
    kept = {shard: last for shard, last in (read or {}).items() if last.sequence < positions.get(shard, MIN_SEQUENCE)}
    return {**kept, **{s: one for s, one in found.items() if s not in kept or one.sequence > kept[s].sequence}}


def check_epochs(state: LedgerState, streams: Iterable[str], *, url: StreamUrl) -> None:
    """Refuse to continue with streams whose next epoch was accepted meanwhile.

    Raises:
        SourceRecreatedError: with the name of the epoch.
    """
    for name in streams:
        stream, epoch = split_epoch(name)
        newest = newest_epochs(state.identities, [stream])[stream]
        if split_epoch(newest)[1] > epoch:
            raise SourceRecreatedError(
                f"{url} was recreated, and accepted as {newest!r} while this run was reading {name!r}",
                remedy="Run again: nothing was lost.",
            )


def recreations(
    source: BatchSource,
    group: str,
    state: LedgerState,
    extents: Mapping[Shard, Extent],
    *,
    reads_last_messages: bool = True,
    counts_all: bool = False,
) -> Mapping[str, SourceRecreatedError]:
    """Return an error for each epoch of the source that is not the stream in the ledger, or that was cut.

    Args:
        source: the stream, by the names of its epochs.
        group: for the message.
        state: the ledger, read before ``extents``.
        extents: what the stream holds.
        reads_last_messages: see :func:`truncations`.
        counts_all: see :func:`truncations`.
    """
    identities = source.identities()
    found: dict[str, SourceRecreatedError] = {}
    for name, identity in identities.items():
        known = state.identities.get(name, identity)
        if known != identity:
            found[name] = SourceRecreatedError(
                f"{source.url} is not the stream that group {group!r} has read so far as {name!r}",
                remedy=accept_remedy(name),
                ledger=known,
                found=identity,
            )
    found = {**_recreated(source, group, state.positions), **found}
    own = {shard: extent for shard, extent in extents.items() if shard.stream not in found}
    cut = truncations(source, group, state, own, reads_last_messages=reads_last_messages, counts_all=counts_all)
    for shard, truncation in cut.items():
        found.setdefault(shard.stream, truncation)
    for shard, known_shard in state.shards.items():
        position = known_shard.covered.position or 0
        end = extents[shard].end + extents[shard].blocked if shard in extents else None
        if shard.stream in identities and (end is None or end < position) and position > 0:
            found.setdefault(
                shard.stream,
                SourceRecreatedError(
                    f"{source.url} ends before the position of group {group!r} in {shard}",
                    remedy=f"Bring the stream back, if it was cut or replaced. {accept_remedy(shard.stream)}",
                    position=position,
                    end=end,
                ),
            )
    return found
