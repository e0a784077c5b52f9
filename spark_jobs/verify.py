"""Verifies a table: compares the sequences in the stream with those in the table and its dead letters.

The ledger shows the expected content of the table, batch by batch. Without a transform each message is a row or a dead
letter. With a transform a message becomes any number of rows, so that the files which the commit of the batch added are
read: these never change, even if the rows change later. If VACUUM removed them after they were rewritten, only the row
count of the commit can be compared. The ledger also has the number of dead letters of each batch.

The comparison goes range by range, so that the whole stream or table is never in memory. It needs no JVM: it reads the
stream like an executor, and the table with delta-rs.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import pyarrow as pa

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.source_checks import lag, losses_of_stream
from spark_jobs.claims.claim_state import ClaimState
from spark_jobs.dead_letters.table import NO_TABLE
from spark_jobs.ledger.delta_log import Commit
from spark_jobs.ledger.entries import ClaimedRange, LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState, in_effect
from spark_jobs.ledger.table_rows import (
    MESSAGE_TIME,
    NO_TIMES,
    ROW_PLACE,
    ROW_TIME,
    Sequences,
    Timestamps,
    column_names,
    compared,
    count_rows,
    extents_of,
    in_ranges,
    names_in_files,
    scan,
    sequences_of,
    timestamps_of,
    within,
    written_sequences,
)
from stream_consumers.batches import BatchSource, Extent, Range, Split
from stream_consumers.errors import LedgerUnreadableError, StreamNotFoundError, UnsupportedError
from stream_consumers.messages import Shard
from stream_consumers.options import Limits

_NONE: Sequences = np.empty(0, np.int64)
EXAMPLES = 5
# The version for rows of several batches, which can only be compared together.
_NO_BATCH = -1
COUNTS = (
    *("messages", "rows", "dead", "filtered", "skipped"),
    *("missing", "duplicated", "unknown", "unexplained", "other"),
)


@dataclass(frozen=True, slots=True)
class ShardVerdict:
    """The result for one shard, within the range that the ledger covers.

    Args:
        shard: the shard.
        first: its first sequence in the stream; ``None`` if the stream holds no message of it.
        last: its last covered sequence in the stream.
        messages: messages in the stream.
        rows: rows in the table.
        dead: dead letters that count.
        filtered: messages that the transform dropped: the batch that read them wrote no rows for them.
        skipped: messages that the group skipped because a user moved it forwards.
        missing: sequences with fewer rows than their batch wrote, or with neither a row nor a dead letter although they
            were not filtered. If only the number of rows or dead letters of a batch is known, the missing number.
        duplicated: sequences with more rows than their batch wrote, or with both a row and a dead letter; and dead
            letters without a sequence of one offset of a file, except the first.
        unknown: sequences with rows or dead letters of messages that the stream does not have, from its first message
            and the group's origin on; and sequences with rows of messages that the transform dropped, even if such a
            row is there twice.
        unexplained: messages without a row in a table with a transform, if the log no longer shows whether the
            transform dropped them or their dead letters are gone.
        lag: messages after the covered range.
        lost: messages that the stream no longer holds and the group has not read, or that a RESTORE removed; ``None``
            if nothing is lost.
        uncompared: the range before the group's origin in which the stream holds messages that no readable batch wrote:
            the group began after them, or its log was cleaned and its positions were derived. ``None`` without one.
        examples: some sequences of each kind of fault.
        other: sequences whose row or dead letter has another timestamp than the message in the stream.
        missing_dead: the number of missing dead letters by batch id; ``missing`` includes them. For a batch of several
            shards, they are counted for the shards with messages that have neither a row nor a dead letter.
        unreadable_tail: why the bytes after the last message of the stream cannot be read, which may contain messages
            of each shard; ``None`` if there are none.
    """

    shard: Shard
    first: int | None
    last: int | None
    messages: int
    rows: int
    dead: int
    filtered: int
    skipped: int
    missing: int
    duplicated: int
    unknown: int
    lag: int
    unexplained: int = 0
    examples: Mapping[str, list[int]] = field(default_factory=dict)
    missing_dead: Mapping[str, int] = field(default_factory=dict)
    other: int = 0
    lost: Range | None = None
    uncompared: Range | None = None
    unreadable_tail: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether everything is in the table exactly as it was written, and no unread message is lost or unreadable."""
        is_complete = self.lost is None and self.unreadable_tail is None
        return is_complete and not (self.missing or self.duplicated or self.unknown or self.other)


def verify(
    source: BatchSource,
    ingestion: Ingestion,
    *,
    claims: ClaimState | None = None,
    progress: Callable[[int], None] = lambda count: None,
    limits: Limits | None = None,
) -> list[ShardVerdict]:
    """Compare each covered shard of ``source`` with the table.

    Args:
        source: the stream.
        ingestion: group and table.
        claims: the state of the claims, if members claim entries one by one. Entries that another client in the group
            has acknowledged count as missing.
        progress: called with the number of messages that were read.
        limits: the size of the ranges that are compared.

    Raises:
        StreamNotFoundError: there is no table, or the group has written nothing into it.
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    source = ingestion.in_epochs(source)
    table = _Table(ingestion)
    state = table.state
    if state.keys is not None:
        raise UnsupportedError(
            f"{ingestion.table} is keyed by {state.keys}, so a message need not have a row",
            remedy="Pass the keys, the decoder and the transform, which show what each row has to be.",
        )
    streams = source.identities().keys()
    if not any(shard.stream in streams for shard in state.shards):
        raise StreamNotFoundError(
            f"group {ingestion.group!r} has written no messages of {source.url} into {ingestion.table}",
            remedy="Check --source, --table and --group, or ingest first.",
        )
    lost = losses_of_stream(source, ingestion, state) if claims is None else claims.lost
    # A scan from the positions and one from the start of the stream may end at different bytes.
    tail = source.unreadable_tail()
    # Without the positions of the ledger, because a source may report only later messages for them.
    extents = source.extents()
    tail = tail or source.unreadable_tail()
    batches = _Batches(table.ledger, state)
    covered = {s: batches.read(s, known) for s, known in state.shards.items() if s in extents}
    # If members claim entries, those that are not delivered yet, or are being written, are not compared.
    delivered: Mapping[Shard, Intervals] = {}
    pending: Mapping[Shard, Sequences] = {}
    if claims is not None:
        covered = delivered = {s: parts for s, parts in claims.delivered.items() if s in extents}
        pending = claims.pending
    by_shard = {shard: _ShardCounts() for shard in extents}
    for ranges, messages in _parts(source, table, covered, limits or Limits(), progress):
        rows, row_times = table.rows(ranges)
        dead_letters = table.dead_letters(ranges)
        for shard, part in ranges.items():
            own, dead, busy = messages.get(shard, NO_TIMES), dead_letters.get(shard, NO_TIMES), pending.get(shard)
            found = _Contents(
                _to_compare(own.sequences, covered.get(shard, Intervals()), busy),
                _to_compare(rows.get(shard, _NONE), delivered.get(shard), busy),
                _to_compare(dead.sequences, delivered.get(shard), busy),
            )
            start = extents[shard].start if shard in extents else 0
            origin = state.shards[shard].origin if shard in state.shards else None
            counts = by_shard.setdefault(shard, _ShardCounts())
            counts.add(shard, part, found, batches, start=start, origin=origin)
            wrong = [compared(own, times)[1] for times in (row_times.get(shard, NO_TIMES), dead)]
            counts.count("other", np.unique(np.concatenate(wrong)))
    batches.compare_claimed(by_shard)
    batches.count_rows(by_shard)
    batches.count_dead(by_shard, table)
    lags = lag(source, state, extents) if claims is None else claims.lag
    for (shard, offset), count in table.unplaced_dead_letters().items():
        counted = by_shard.setdefault(shard, _ShardCounts()).counts
        counted["dead"] += count
        counted["duplicated"] += count - 1 if offset is not None else 0
    # The stream may hold no readable message of a shard.
    for shard in (*lost, *(() if tail is None else state.shards)):
        by_shard.setdefault(shard, _ShardCounts())
    return [
        by_shard[shard].verdict(
            shard,
            lags.get(shard, 0),
            lost.get(shard),
            batches.uncompared(shard, state.shards.get(shard, ShardState()), extents.get(shard)),
            tail,
        )
        for shard in sorted(by_shard)
        if shard.stream in streams or shard in lost
    ]


def places_read(ledger: Ledger, state: LedgerState) -> Mapping[Shard, Intervals]:
    """Return the covered places that a group has read or adopted, as far as the log reaches back."""
    batches = _Batches(ledger, state)
    starts = {s: known.origin if known.adopted is None else known.adopted for s, known in state.shards.items()}
    return {
        shard: batches.read(shard, replace(known, origin=starts[shard])) - batches.skipped(shard)
        for shard, known in state.shards.items()
    }


def _parts(
    source: BatchSource,
    table: _Table,
    covered: Mapping[Shard, Intervals],
    limits: Limits,
    progress: Callable[[int], None],
) -> Iterator[tuple[Mapping[Shard, Range], Mapping[Shard, Timestamps]]]:
    """Yield disjoint ranges that together hold every row of the source, with the messages of the stream in them."""
    gaps = {s: part.hull for s, part in covered.items() if part}
    streams, most = source.identities(), limits.max_records
    for shard, parts in sorted(table.extents().items()):
        if shard.stream in streams:
            for part in parts - Intervals.of(*([gaps[shard]] if shard in gaps else [])):
                yield from (({shard: piece}, {}) for piece in table.pieces(shard, part, most))
    # Payloads are not kept in memory, so that their bytes need no limit.
    by_records = replace(limits, max_bytes=sys.maxsize)
    while (plan := source.plan(gaps, limits=by_records, parallelism=1)) is not None:
        read = timestamps_of(_counted(plan.splits, progress), MESSAGE_TIME)
        ranges = {shard: Range(gaps[shard].start, part.end) for shard, part in plan.ranges.items()}
        yield ranges, read
        gaps |= {shard: Range(part.end, gaps[shard].end) for shard, part in ranges.items()}
    for shard, gap in gaps.items():
        # The stream holds no messages in these ranges, but the table may have rows.
        yield from (({shard: piece}, {}) for piece in table.pieces(shard, gap, most))


def _counted(splits: Iterable[Split], progress: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    for split in splits:
        for batch in split.read():
            yield batch
            progress(len(batch))


def _to_compare(found: Sequences, parts: Intervals | None, pending: Sequences | None) -> Sequences:
    """Return the sequences in these parts, without those that members are writing at the moment."""
    found = found if parts is None else within(found, parts)
    return found if pending is None else found[~np.isin(found, pending)]


class _Table:
    """The rows of a table and the dead letters that count, at one moment, because runs may continue meanwhile."""

    def __init__(self, ingestion: Ingestion) -> None:
        self.ledger = ingestion.ledger()
        self._table = ingestion.dead_letters()
        self._dead_letter_log = self._table.log()
        self.state = self.ledger.read()
        self._left_out = self._table.not_counting(self.ledger, self.state)
        self._version = self._left_out.version
        # Adopted rows may have no timestamp.
        names = column_names(self.ledger.log, version=self.state.version) if self.state.version >= 0 else ()
        self._columns = ROW_TIME if ROW_TIME[-1] in names else ROW_PLACE

    def rows(self, ranges: Mapping[Shard, Range]) -> tuple[Mapping[Shard, Sequences], Mapping[Shard, Timestamps]]:
        """Return the sequences of the rows, and their timestamps if the table has them."""
        scanned = scan(self.ledger.log, self._columns, where=in_ranges(ranges), version=self.state.version)
        if self._columns != ROW_TIME:
            return sequences_of(scanned), {}
        moments = timestamps_of(scanned, self._columns)
        return {shard: found.sequences for shard, found in moments.items()}, moments

    def dead_letters(self, ranges: Mapping[Shard, Range]) -> Mapping[Shard, Timestamps]:
        """Return the dead letters that count."""
        return timestamps_of(self._scan_dead_letters(in_ranges(ranges), ROW_TIME), ROW_TIME)

    def extents(self) -> Mapping[Shard, Intervals]:
        """Return the ranges with rows or dead letters."""
        rows = extents_of(scan(self.ledger.log, ROW_PLACE, version=self.state.version))
        found: dict[Shard, Intervals] = {}
        for extents in (rows, extents_of(self._scan_dead_letters("_sequence IS NOT NULL"))):
            for shard, part in extents.items():
                found[shard] = found.get(shard, Intervals()) | Intervals.of(part)
        return found

    def pieces(self, shard: Shard, part: Range, most: int) -> Iterator[Range]:
        """Yield the range in parts: it is halved until no part has more than ``most`` rows."""
        if part.start >= part.end:
            return
        if part.end - part.start <= most or count_rows(self.ledger.log, {shard: part})[shard] <= most:
            yield part
            return
        middle = (part.start + part.end) // 2
        yield from self.pieces(shard, Range(part.start, middle), most)
        yield from self.pieces(shard, Range(middle, part.end), most)

    def unplaced_dead_letters(self) -> Counter[tuple[Shard, int | None]]:
        """Count the dead letters without a sequence, by their offset: of a lost framing, or (``None``) a lost range."""
        found: Counter[tuple[Shard, int | None]] = Counter()
        if self._version == NO_TABLE:
            return found
        known = column_names(self._dead_letter_log, version=self._version)
        names = [name for name in ("_stream", "_shard", "offset") if name in known]
        for batch in self._scan_dead_letters("_sequence IS NULL", names):
            for row in batch.to_pylist():
                found[Shard(row["_stream"], row["_shard"]), row.get("offset")] += 1
        return found

    def _scan_dead_letters(self, where: str, columns: Sequence[str] = ROW_PLACE) -> Iterator[pa.RecordBatch]:
        return self._table.scan(self.ledger.group, self._left_out, columns, where=where)

    def dead_letters_by_batch(self) -> Counter[str]:
        """Count the dead letters of each batch, including those that do not count."""
        return self._table.by_batch(version=self._version) if self._version != NO_TABLE else Counter()

    def most_deleted(self, bid: str, replaced: Mapping[Shard, Intervals]) -> int:
        """Return how many dead letters of a batch may have been deleted, because their range was replaced."""
        if not replaced or self._version == NO_TABLE:
            return sum(parts.size for parts in replaced.values())
        commit: Commit | None = None
        with suppress(LedgerUnreadableError):
            commit = self._dead_letter_log.find(lambda one: one.user_metadata.get("bid") == bid, after=-1)
        names, most = names_in_files(self._dead_letter_log), 0
        for shard, parts in replaced.items():
            hull = {shard: parts.hull}
            written = written_sequences(self._dead_letter_log, commit, hull, names=names) if commit else None
            most += parts.size if written is None else len(within(written.get(shard, _NONE), parts))
            where = f"_batch = '{bid}' AND {in_ranges(hull)}"
            left = sequences_of(scan(self._dead_letter_log, ROW_PLACE, where=where, version=self._version))
            most -= len(within(left.get(shard, _NONE), parts))
        return most


@dataclass(frozen=True, slots=True)
class _Contents:
    """The sequences in one range of a shard: of messages, of rows, and of dead letters."""

    messages: Sequences
    rows: Sequences
    dead: Sequences

    def within(self, parts: Intervals) -> _Contents:
        return _Contents(within(self.messages, parts), within(self.rows, parts), within(self.dead, parts))


class _Batches:
    """Finds the batch that decides the expected content of a range: the newest surviving one that wrote it."""

    def __init__(self, ledger: Ledger, state: LedgerState) -> None:
        self._log = ledger.log
        self._names = names_in_files(ledger.log)
        self._has_transform = bool(state.newest and state.newest.transform)
        # If the log reaches back to the first version, a range that is in none of its batches was never written.
        self._is_whole_log = ledger.log.commit(0) is not None
        self._claimed: list[Commit] = []
        self._counted: dict[int, tuple[Commit, Counter[Shard]]] = {}
        self._whole: dict[int, bool] = {}
        self._ranges: dict[Shard, list[tuple[Range, Commit]]] = {}
        self._with_dead: list[tuple[LedgerEntry, int, Mapping[Shard, Intervals]]] = []
        newer: dict[Shard, Intervals] = {}
        replaced: dict[Shard, Intervals] = {}
        for commit in in_effect(ledger.surviving(state.version)):
            entry = commit.entry
            if entry is None or entry.kind == "fence" or entry.adds_copies:
                continue
            if entry.claims and not entry.lost:
                self._claimed.append(commit)
            if entry.dead or entry.lost:
                version = _NO_BATCH if entry.claims else commit.version
                self._with_dead.append((entry, version, _within_places(entry, replaced)))
            self._whole[commit.version] = True
            # If a group that claims entries skipped some, they are in no range of the entry.
            skipped = {shard: Intervals.of(part) for shard, part in entry.skipped.items()}
            for shard, parts in {**skipped, **entry.affected}.items():
                own = parts - newer.get(shard, Intervals())
                self._whole[commit.version] &= own == parts
                newer[shard] = newer.get(shard, Intervals()) | own
                self._ranges.setdefault(shard, []).extend((piece, commit) for piece in own)
            for shard, parts in ledger.replaced_by(commit).items():
                replaced[shard] = replaced.get(shard, Intervals()) | parts
        for pieces in self._ranges.values():
            pieces.sort(key=lambda piece: piece[0].start)
        of_shards: dict[Shard, list[ClaimedRange]] = {}
        for commit in self._claimed:
            for shard, claimed in commit.entry.claims.items() if commit.entry else ():
                of_shards.setdefault(shard, []).append(claimed)
        self._claims = {shard: _Claims(claimed) for shard, claimed in of_shards.items()}

    def read(self, shard: Shard, known: ShardState) -> Intervals:
        """Return the covered sequences that the group has read: from its origin on, and earlier ranges of batches."""
        written = Intervals.of(*(piece for piece, _ in self._ranges.get(shard, [])))
        return known.covered & (Intervals.of((known.origin or 0, 2**63 - 1)) | written)

    def skipped(self, shard: Shard) -> Intervals:
        """Return the sequences that the group was moved past, and has not read later."""
        pieces = self._ranges.get(shard, [])
        return Intervals.of(*(piece for piece, commit in pieces if commit.entry and shard in commit.entry.skipped))

    def uncompared(self, shard: Shard, known: ShardState, extent: Extent | None) -> Range | None:
        """Return the range in which the stream may hold messages that are not compared, before the group's origin."""
        if extent is None:
            return None
        written = Intervals.of(*(piece for piece, _ in self._ranges.get(shard, [])))
        before = Intervals.of((extent.start, known.origin or 0)) - written
        return before.hull if before else None

    def of(self, shard: Shard, part: Range) -> Iterator[tuple[Intervals, Commit | None]]:
        """Yield the parts of a range, each with the batch that decides its expected content; ``None`` without one."""
        found: dict[int, tuple[Commit, list[Range]]] = {}
        pieces = self._ranges.get(shard, [])
        first = bisect_right(pieces, part.start, key=lambda piece: piece[0].end)
        for piece, commit in islice(pieces, first, None):
            if piece.start >= part.end:
                break
            found.setdefault(commit.version, (commit, []))[1].append(piece.clamp(part))
        rest = Intervals.of(part) - Intervals.of(*(piece for _, own in found.values() for piece in own))
        yield from ((Intervals.of(*own), commit) for commit, own in found.values())
        claimed = self._claims[shard].parts if shard in self._claims else Intervals()
        yield from ((own, None) for own in (rest & claimed, rest - claimed) if own)

    def expected(
        self, shard: Shard, parts: Intervals, commit: Commit | None, found: _Contents, *, start: int
    ) -> tuple[Sequences, str]:
        """Return the sequence of each expected row, and the count for messages without rows and dead letters."""
        hull = parts.hull
        commits = [commit] if commit is not None else []
        # A batch that overwrites nothing left out entries of its range that were claimed, and in the table.
        entry = commit.entry if commit else None
        adds_to_claims = commit is None or (entry and entry.kind == "batch" and not entry.write_mode.overwrites)
        if adds_to_claims and shard in self._claims and self._claims[shard].parts & parts:
            commits += [c for c in self._claimed if c.entry and _overlaps(c.entry.claims.get(shard), hull)]
        if not (all(map(_has_transform, commits)) if commits else self._has_transform and not self._is_whole_log):
            # Each message became one row, or is in no batch. Rows of trimmed messages that no file shows are accepted.
            trimmed = parts & Intervals.of((MIN_SEQUENCE, start))
            written = self._written(shard, trimmed, commits) if trimmed else None
            known = [found.messages, found.rows[found.rows < start], _NONE if written is None else written]
            return np.setdiff1d(np.concatenate(known), found.dead), "missing"
        written = self._written(shard, parts, commits)
        if commits and written is not None:
            return written, "filtered"
        if len(commits) == 1 and commit and commit.output_rows is not None and self._whole[commit.version]:
            self._counted.setdefault(commit.version, (commit, Counter()))[1][shard] += len(found.rows)
            return found.rows, "filtered"
        return found.rows, "unexplained"

    def _written(self, shard: Shard, parts: Intervals, commits: Sequence[Commit]) -> Sequences | None:
        """Return the sequence of each row that these batches wrote in these parts; ``None`` if a file is gone."""
        found = [written_sequences(self._log, each, {shard: parts.hull}, names=self._names) for each in commits]
        known = [within(each.get(shard, _NONE), parts) for each in found if each is not None]
        return np.concatenate([_NONE, *known]) if len(known) == len(found) else None

    def count_claimed(self, shard: Shard, commit: Commit | None, messages: Sequences, absent: Sequences) -> None:
        """Count the messages in ranges of claimed entries, and those of them that may be filtered."""
        is_claimed = commit is None or (commit.entry is not None and bool(commit.entry.places))
        if is_claimed and shard in self._claims:
            self._claims[shard].add(messages, absent)

    def compare_claimed(self, by_shard: Mapping[Shard, _ShardCounts]) -> None:
        """Count messages that no batch can have claimed as missing, because no transform can have dropped them."""
        for shard, claims in self._claims.items():
            if count := claims.unclaimed():
                by_shard[shard].move(_NO_BATCH, count, to="missing" if self._is_whole_log else "unexplained")

    def count_rows(self, by_shard: Mapping[Shard, _ShardCounts]) -> None:
        """For batches whose files are gone, compare the number of rows with the number that the batch wrote."""
        for commit, rows in self._counted.values():
            surplus = rows.total() - (commit.output_rows or 0)
            by_shard[min(rows)].counts["duplicated"] += max(0, surplus)
            _miss(by_shard, sorted(rows), commit.version, max(0, -surplus))

    def count_dead(self, by_shard: dict[Shard, _ShardCounts], table: _Table) -> None:
        """Compare the number of dead letters of each batch with the number that it wrote."""
        found_dead = table.dead_letters_by_batch() if self._with_dead else Counter[str]()
        for entry, version, replaced in self._with_dead:
            # Each lost range is a dead letter without a message.
            missing = entry.dead + sum(len(parts.ranges) for parts in entry.lost.values()) - found_dead[entry.bid]
            if missing > 0 and replaced:
                missing -= table.most_deleted(entry.bid, replaced)
            if missing > 0:
                places = entry.affected.keys() | entry.claims.keys() | entry.lost.keys()
                # Prefer the shards of the source to others.
                shards = sorted(places, key=lambda shard: (shard not in by_shard, shard))
                for shard in shards:
                    by_shard.setdefault(shard, _ShardCounts())
                of_messages = min(missing, entry.dead)
                found = _miss(by_shard, shards, version, of_messages)
                found[shards[0]] += missing - of_messages
                by_shard[shards[0]].counts["missing"] += missing - of_messages
                for shard, count in (+found).items():
                    by_shard[shard].missing_dead[entry.bid] = count


class _Claims:
    """Compares the number of entries of a shard that batches have claimed with the number of messages in their ranges.

    The entries of several batches may alternate, so that only the sums of overlapping claims can be compared.

    Args:
        claimed: the claims of the batches that are in the table.
    """

    def __init__(self, claimed: Iterable[ClaimedRange]) -> None:
        self.parts = Intervals.of(*((start, end) for start, end, _ in claimed))
        self._starts = np.array([part.start for part in self.parts], np.int64)
        self._unclaimed = np.zeros(len(self._starts), np.int64)
        self._absent = np.zeros(len(self._starts), np.int64)
        for start, _, entries in claimed:
            self._unclaimed[self._at(np.array([start]))] -= entries

    def add(self, messages: Sequences, absent: Sequences) -> None:
        """Count messages, and those of them that may be filtered or in no batch."""
        for counts, found in ((self._unclaimed, messages), (self._absent, absent)):
            np.add.at(counts, self._at(within(found, self.parts)), 1)

    def unclaimed(self) -> int:
        """Return how many of the absent messages no batch can have claimed."""
        return int(np.clip(self._unclaimed, 0, self._absent).sum())

    def _at(self, places: Sequences) -> Sequences:
        return np.searchsorted(self._starts, places, side="right") - 1


def _miss(by_shard: Mapping[Shard, _ShardCounts], shards: Sequence[Shard], version: int, count: int) -> Counter[Shard]:
    """Count messages of a batch as missing, in the shards that have absent messages; the rest in the first shard."""
    found: Counter[Shard] = Counter()
    for shard in shards:
        found[shard] = by_shard[shard].miss(version, count - found.total())
    rest = count - found.total()
    found[shards[0]] += rest
    by_shard[shards[0]].counts["missing"] += rest
    return found


def _within_places(entry: LedgerEntry, parts: Mapping[Shard, Intervals]) -> Mapping[Shard, Intervals]:
    """Return the given parts of the ranges that a batch wrote, or claimed entries of."""
    places = {**{shard: Intervals.of(part) for shard, part in entry.extents.items()}, **entry.affected}
    found = {shard: parts[shard] & own for shard, own in places.items() if shard in parts}
    return {shard: own for shard, own in found.items() if own}


def _has_transform(commit: Commit) -> bool:
    """Return whether a message of a batch may have become no row, or several."""
    entry = commit.entry
    return entry is not None and (bool(entry.transform) or commit.output_rows != entry.messages)


def _overlaps(claimed: ClaimedRange | None, part: Range) -> bool:
    return claimed is not None and claimed.start < part.end and part.start < claimed.end


class _ShardCounts:
    """The counts for a shard so far."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.last: int | None = None
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[int]] = {}
        self.missing_dead: dict[str, int] = {}
        # The messages without rows and dead letters, by the batch and the count that includes them.
        self._absent: Counter[tuple[int, str]] = Counter()

    def add(
        self, shard: Shard, part: Range, found: _Contents, batches: _Batches, *, start: int, origin: int | None
    ) -> None:
        """Compare one range.

        Args:
            shard: the shard.
            part: the range.
            found: the sequences in it.
            batches: decide its expected content.
            start: the first sequence of the stream; rows before it cannot be compared.
            origin: the start of the group; rows before it that no batch wrote were adopted, and are not compared.
        """
        if len(found.messages):
            self.first = int(found.messages.min()) if self.first is None else min(self.first, int(found.messages.min()))
            self.last = max(self.last or 0, int(found.messages.max()))
        for what, those in (("messages", found.messages), ("rows", found.rows), ("dead", found.dead)):
            self.counts[what] += len(those)
        for piece, commit in batches.of(shard, part):
            is_compared = commit is not None or origin is None
            own = piece if is_compared else piece - Intervals.of((MIN_SEQUENCE, origin or 0))
            if own:
                self._compare(shard, own, commit, found.within(own), batches, start=start)

    def _compare(
        self, shard: Shard, parts: Intervals, commit: Commit | None, found: _Contents, batches: _Batches, *, start: int
    ) -> None:
        if commit is not None and commit.entry is not None and shard in commit.entry.skipped:
            is_present = np.isin(found.messages, np.concatenate([found.rows, found.dead]))
            self.counts["skipped"] += int((~is_present).sum())
            found = replace(found, messages=found.messages[is_present])
        expected, absent_are = batches.expected(shard, parts, commit, found, start=start)
        places = np.unique(np.concatenate([found.rows, found.dead, expected]))
        rows, dead, wanted = (_count(places, own) for own in (found.rows, found.dead, expected))
        is_message = np.isin(places, found.messages)
        absent = found.messages[~np.isin(found.messages, np.concatenate([found.rows, found.dead]))]
        if absent_are != "missing":
            absent = np.setdiff1d(absent, expected)
            self.counts[absent_are] += len(absent)
            batches.count_claimed(shard, commit, found.messages, absent)
        else:
            batches.count_claimed(shard, commit, np.setdiff1d(found.messages, absent), _NONE)
        self._absent[_NO_BATCH if commit is None else commit.version, absent_are] += len(absent)
        is_present = rows + dead > 0
        self.count("missing", places[rows < wanted])
        self.count("duplicated", places[((rows > wanted) & (wanted > 0)) | (dead > 1) | ((rows > 0) & (dead > 0))])
        is_unwanted = is_message & (rows > 0) & (wanted + dead == 0)
        self.count("unknown", places[(is_present & ~is_message & (places >= start)) | is_unwanted])

    def miss(self, version: int, most: int) -> int:
        """Count up to ``most`` messages of a batch as missing instead of as something else; return how many."""
        known = min(most, self._absent[version, "missing"])
        self._absent[version, "missing"] -= known
        return known + self.move(version, most - known, to="missing")

    def move(self, version: int, most: int, *, to: str) -> int:
        """Count up to ``most`` messages of a batch as ``to`` that may be filtered; return how many."""
        found = 0
        for what in ("filtered", "unexplained"):
            moved = min(most - found, self._absent[version, what])
            self._absent[version, what] -= moved
            self.counts[what] -= moved
            found += moved
        self.counts[to] += found
        return found

    def count(self, what: str, places: Sequences) -> None:
        """Count these sequences as one kind of fault, and keep some as examples."""
        if len(places):
            self.counts[what] += len(places)
            known = self.examples.setdefault(what, [])
            known += [int(place) for place in places[: EXAMPLES - len(known)]]

    def verdict(
        self, shard: Shard, lag: int, lost: Range | None, uncompared: Range | None, unreadable_tail: str | None
    ) -> ShardVerdict:
        """Return the result for the shard."""
        return ShardVerdict(
            shard,
            first=self.first,
            last=self.last,
            lag=lag,
            lost=lost,
            uncompared=uncompared,
            unreadable_tail=unreadable_tail,
            examples=self.examples,
            missing_dead=self.missing_dead,
            **{name: self.counts[name] for name in COUNTS},
        )


def _count(places: Sequences, found: Sequences) -> Sequences:
    """Return how often each of these sorted places was found."""
    return np.searchsorted(np.sort(found), places, side="right") - np.searchsorted(np.sort(found), places, side="left")
