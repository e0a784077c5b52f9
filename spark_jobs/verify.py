"""Proves what a table holds: compares the sequences in the stream with those in the table and its dead letters.

The ledger says what should be there, batch by batch. Without a transform each message is a row or a dead letter. With
one it is what the batch wrote, none or any number of rows a message: the commit names the files that it added, and
those never change, whatever became of the rows. Where they are gone (rewritten, and removed by VACUUM) the number of
rows that the commit counted is left. The ledger also has how many dead letters each batch wrote.

Range by range, as the stream is read, so that neither of the two is ever in memory as a whole. No JVM: the stream is
read as executors would read it, the table with delta-rs.
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
from spark_jobs.ledger.delta_log import Commit
from spark_jobs.ledger.entries import ClaimedRange, LedgerEntry, ShardState
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.ledger.table_rows import (
    MESSAGE_TIME,
    NO_TIMES,
    PLACE,
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
from stream_consumers.errors import LedgerUnreadableError, StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.options import Limits

_NONE: Sequences = np.empty(0, np.int64)
EXAMPLES = 5
MOST_LOOKS = 20
# Stands for several batches, where only all of them together say what should be in a range.
_NO_BATCH = -1
_COUNTS = (
    "messages",
    "rows",
    "dead",
    "filtered",
    "skipped",
    "missing",
    "duplicated",
    "unknown",
    "unexplained",
    "other",
)


@dataclass(frozen=True, slots=True)
class ShardVerdict:
    """What was found for one shard, within the range that the ledger covers.

    Args:
        shard: the shard.
        first: its first sequence in the stream; ``None`` if there is none.
        last: its last covered sequence in the stream.
        messages: messages in the stream.
        rows: rows in the table.
        dead: dead letters that count.
        filtered: messages that the transform dropped: the batch that read them wrote no row of them.
        skipped: messages that the group went over because a user moved it forwards.
        missing: sequences with fewer rows than their batch wrote, or in neither of the two, and not filtered; where the
            ledger only records how many rows or dead letters a batch wrote, how many of them are not there.
        duplicated: sequences with more rows than their batch wrote, or in both of the two.
        unknown: sequences that are there but not in the stream, from the stream's first one and the group's origin on;
            or that the transform dropped.
        unexplained: messages without a row in a table with a transform, where the log no longer shows whether the
            transform dropped them or their dead letters are gone.
        lag: messages behind the covered range.
        lost: what the stream does not hold any more of what the group has not read, or a RESTORE removed; ``None`` if
            nothing is gone.
        uncompared: where the stream holds messages from before the group's origin that no readable batch wrote: the
            group began after them, or its log was cleaned and its positions were made anew. ``None`` if nothing is.
        examples: some sequences of what is wrong.
        other: sequences whose rows or dead letters have another timestamp than the message that the stream holds there.
        missing_dead: how many dead letters of each batch are not there, by its id; they are among the missing. Of a
            batch of several shards it is not known whose they are: those count that have messages in neither table.
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

    @property
    def is_right(self) -> bool:
        """Whether everything is there exactly as it was written, and nothing is gone that is still to be read."""
        return not (self.missing or self.duplicated or self.unknown or self.other or self.lost)


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
        claims: where members claim entries one by one, what the group is done with; what another client in the group
            has acknowledged counts as missing.
        progress: called with the number of messages that were read.
        limits: how much is compared at a time.

    Raises:
        StreamNotFoundError: there is no table, or the group has written nothing into it.
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    source = ingestion.in_epochs(source)
    table = _Table(ingestion)
    state = table.state
    streams = source.identities().keys()
    if not any(shard.stream in streams for shard in state.shards):
        raise StreamNotFoundError(
            f"group {ingestion.group!r} has written nothing of {source.url} into {ingestion.table}",
            remedy="Check --source, --table and --group, or ingest first.",
        )
    lost = losses_of_stream(source, ingestion, state) if claims is None else claims.lost
    # A look with what the ledger knows may leave out what was read.
    extents = source.extents()
    batches = _Batches(table.ledger, state)
    covered = {s: batches.read(s, known) for s, known in state.shards.items() if s in extents}
    # Where members claim entries, what they have not been given yet, or are writing at the moment, is left out.
    delivered: Mapping[Shard, Intervals] = {}
    unsettled: Mapping[Shard, Sequences] = {}
    if claims is not None:
        covered = delivered = {s: parts for s, parts in claims.delivered.items() if s in extents}
        unsettled = claims.unsettled
    tallies = {shard: _Tally() for shard in extents}
    for ranges, messages in _parts(source, table, covered, limits or Limits(), progress):
        rows, kept = table.rows(ranges)
        letters = table.letters(ranges)
        for shard, part in ranges.items():
            held, dead, busy = messages.get(shard, NO_TIMES), letters.get(shard, NO_TIMES), unsettled.get(shard)
            found = _Found(
                _meant(held.sequences, covered.get(shard, Intervals()), busy),
                _meant(rows.get(shard, _NONE), delivered.get(shard), busy),
                _meant(dead.sequences, delivered.get(shard), busy),
            )
            start = extents[shard].start if shard in extents else 0
            origin = state.shards[shard].origin if shard in state.shards else None
            tally = tallies.setdefault(shard, _Tally())
            tally.add(shard, part, found, batches, start=start, origin=origin)
            others = [compared(held, own)[1] for own in (kept.get(shard, NO_TIMES), dead)]
            tally.count("other", np.unique(np.concatenate(others)))
    batches.compare_claimed(tallies)
    batches.count_rows(tallies)
    batches.count_dead(tallies, table)
    behind = lag(source, state, extents) if claims is None else claims.lag
    for shard, count in table.unplaced_dead_letters().items():
        tallies.setdefault(shard, _Tally()).counts["dead"] += count
    for shard in lost:
        tallies.setdefault(shard, _Tally())
    return [
        tallies[shard].verdict(
            shard,
            behind.get(shard, 0),
            lost.get(shard),
            batches.uncompared(shard, state.shards.get(shard, ShardState()), extents.get(shard)),
        )
        for shard in sorted(tallies)
        if shard.stream in streams or shard in lost
    ]


def _parts(
    source: BatchSource,
    table: _Table,
    covered: Mapping[Shard, Intervals],
    limits: Limits,
    progress: Callable[[int], None],
) -> Iterator[tuple[Mapping[Shard, Range], Mapping[Shard, Timestamps]]]:
    """Ranges that are disjoint and leave no row of the source out, and the messages of the stream in them."""
    gaps = {s: part.hull for s, part in covered.items() if part}
    streams, most = source.identities(), limits.max_records
    for shard, parts in sorted(table.extents().items()):
        if shard.stream in streams:
            for part in parts - Intervals.of(*([gaps[shard]] if shard in gaps else [])):
                yield from (({shard: piece}, {}) for piece in table.pieces(shard, part, most))
    # Only places are kept of what is read, so that bytes do not matter.
    of_places = replace(limits, max_bytes=sys.maxsize)
    while (plan := source.plan(gaps, limits=of_places, parallelism=1)) is not None:
        read = timestamps_of(_counted(plan.splits, progress), MESSAGE_TIME)
        ranges = {shard: Range(gaps[shard].start, part.end) for shard, part in plan.ranges.items()}
        yield ranges, read
        gaps |= {shard: Range(part.end, gaps[shard].end) for shard, part in ranges.items()}
    for shard, gap in gaps.items():
        # The stream holds nothing there, but the table may.
        yield from (({shard: piece}, {}) for piece in table.pieces(shard, gap, most))


def _counted(splits: Iterable[Split], progress: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    for split in splits:
        for batch in split.read():
            yield batch
            progress(len(batch))


def _meant(found: Sequences, parts: Intervals | None, unsettled: Sequences | None) -> Sequences:
    """Those in these parts, without what members are writing at the moment."""
    found = found if parts is None else within(found, parts)
    return found if unsettled is None else found[~np.isin(found, unsettled)]


class _Table:
    """The rows of a table, and the dead letters that count, as they were at one moment: runs go on meanwhile."""

    def __init__(self, ingestion: Ingestion) -> None:
        self.ledger = ingestion.ledger()
        self._table = ingestion.dead_letters()
        self._letters = self._table.log()
        self.state = self.ledger.read()
        for _ in range(MOST_LOOKS):
            snapshot = self._letters.snapshot()
            self._version = snapshot.version if snapshot is not None else None
            self._left_out = self._table.not_counting(self.ledger, version=self._version)
            before, self.state = self.state, self.ledger.read()
            if self.state.version == before.version:
                break
        # Rows that others wrote, and that were adopted, may have no timestamp.
        names = column_names(self.ledger.log, version=self.state.version) if self.state.version >= 0 else ()
        self._columns = ROW_TIME if ROW_TIME[-1] in names else PLACE

    def rows(self, ranges: Mapping[Shard, Range]) -> tuple[Mapping[Shard, Sequences], Mapping[Shard, Timestamps]]:
        """The sequences of the rows, and their timestamps where they have some."""
        scanned = scan(self.ledger.log, self._columns, where=in_ranges(ranges), version=self.state.version)
        if self._columns != ROW_TIME:
            return sequences_of(scanned), {}
        moments = timestamps_of(scanned, self._columns)
        return {shard: found.sequences for shard, found in moments.items()}, moments

    def letters(self, ranges: Mapping[Shard, Range]) -> Mapping[Shard, Timestamps]:
        """The dead letters that count."""
        return timestamps_of(self._scan_dead_letters(in_ranges(ranges), ROW_TIME), ROW_TIME)

    def extents(self) -> Mapping[Shard, Intervals]:
        """Where there are rows or dead letters."""
        rows = extents_of(scan(self.ledger.log, PLACE, version=self.state.version))
        found: dict[Shard, Intervals] = {}
        for extents in (rows, extents_of(self._scan_dead_letters("_sequence IS NOT NULL"))):
            for shard, part in extents.items():
                found[shard] = found.get(shard, Intervals()) | Intervals.of(part)
        return found

    def pieces(self, shard: Shard, part: Range, most: int) -> Iterator[Range]:
        """The range, halved until no part has more rows than may be compared at a time."""
        if part.start >= part.end:
            return
        if part.end - part.start <= most or count_rows(self.ledger.log, {shard: part})[shard] <= most:
            yield part
            return
        middle = (part.start + part.end) // 2
        yield from self.pieces(shard, Range(part.start, middle), most)
        yield from self.pieces(shard, Range(middle, part.end), most)

    def unplaced_dead_letters(self) -> Counter[Shard]:
        """How many have no sequence: their framing was lost, or they stand for what was gone."""
        found: Counter[Shard] = Counter()
        for batch in self._scan_dead_letters("_sequence IS NULL"):
            for stream, number in batch.to_pandas()[["_stream", "_shard"]].itertuples(index=False):
                found[Shard(str(stream), int(number))] += 1
        return found

    def _scan_dead_letters(self, where: str, columns: Sequence[str] = PLACE) -> Iterator[pa.RecordBatch]:
        if self._version is not None:
            group = self.ledger.group
            yield from self._table.scan(group, self._left_out, columns, where=where, version=self._version)

    def dead_letters_by_batch(self) -> Counter[str]:
        """How many there are of each batch, also of those that do not count."""
        return self._table.by_batch(version=self._version) if self._version is not None else Counter()

    def most_deleted(self, bid: str, replaced: Mapping[Shard, Intervals]) -> int:
        """How many dead letters of a batch may be gone from ranges that were replaced, where they do not count."""
        if not replaced or self._version is None:
            return sum(parts.size for parts in replaced.values())
        commit: Commit | None = None
        with suppress(LedgerUnreadableError):
            commit = self._letters.find(lambda one: one.user_metadata.get("bid") == bid, after=-1)
        names, most = names_in_files(self._letters), 0
        for shard, parts in replaced.items():
            hull = {shard: parts.hull}
            written = written_sequences(self._letters, commit, hull, names=names) if commit else None
            most += parts.size if written is None else len(within(written.get(shard, _NONE), parts))
            where = f"_batch = '{bid}' AND {in_ranges(hull)}"
            left = sequences_of(scan(self._letters, PLACE, where=where, version=self._version))
            most -= len(within(left.get(shard, _NONE), parts))
        return most


@dataclass(frozen=True, slots=True)
class _Found:
    """What is in one range of a shard."""

    messages: Sequences
    rows: Sequences
    dead: Sequences

    def within(self, parts: Intervals) -> _Found:
        return _Found(within(self.messages, parts), within(self.rows, parts), within(self.dead, parts))


class _Batches:
    """Which batch decides what should be in a range: the newest one that wrote it and survived."""

    def __init__(self, ledger: Ledger, state: LedgerState) -> None:
        self._log = ledger.log
        self._names = names_in_files(ledger.log)
        self._has_transform = bool(state.newest and state.newest.transform)
        # Where the log reaches back to the first version, what lies in none of its batches was never written.
        self._is_whole_log = ledger.log.commit(0) is not None
        self._claimed: list[Commit] = []
        self._counted: dict[int, tuple[Commit, Counter[Shard]]] = {}
        self._whole: dict[int, bool] = {}
        self._ranges: dict[Shard, list[tuple[Range, Commit]]] = {}
        self._with_dead: list[tuple[LedgerEntry, int, Mapping[Shard, Intervals]]] = []
        judged: dict[Shard, Intervals] = {}
        replaced: dict[Shard, Intervals] = {}
        for commit in ledger.surviving(state.version):
            entry = commit.entry
            if entry is None or entry.kind == "fence" or entry.adds_copies:
                continue
            if entry.claims and not entry.lost:
                self._claimed.append(commit)
            if entry.dead or entry.lost:
                version = _NO_BATCH if entry.claims else commit.version
                self._with_dead.append((entry, version, _within_places(entry, replaced)))
            self._whole[commit.version] = True
            # What a group that claims entries was moved over is in no range of its own.
            skipped = {shard: Intervals.of(part) for shard, part in entry.skipped.items()}
            for shard, parts in {**skipped, **entry.affected}.items():
                own = parts - judged.get(shard, Intervals())
                self._whole[commit.version] &= own == parts
                judged[shard] = judged.get(shard, Intervals()) | own
                self._ranges.setdefault(shard, []).extend((piece, commit) for piece in own)
                if entry.does.uncounts_dead_letters:
                    replaced[shard] = replaced.get(shard, Intervals()) | parts
        for pieces in self._ranges.values():
            pieces.sort(key=lambda piece: piece[0].start)
        of_shards: dict[Shard, list[ClaimedRange]] = {}
        for commit in self._claimed:
            for shard, claimed in commit.entry.claims.items() if commit.entry else ():
                of_shards.setdefault(shard, []).append(claimed)
        self._claims = {shard: _Claims(claimed) for shard, claimed in of_shards.items()}

    def read(self, shard: Shard, known: ShardState) -> Intervals:
        """The covered sequences that the group has read: from its origin on, and what batches wrote before it."""
        written = Intervals.of(*(piece for piece, _ in self._ranges.get(shard, [])))
        return known.covered & (Intervals.of((known.origin or 0, 2**63 - 1)) | written)

    def uncompared(self, shard: Shard, known: ShardState, extent: Extent | None) -> Range | None:
        """Where the stream may hold messages that are not compared, because the group began after them."""
        if extent is None:
            return None
        written = Intervals.of(*(piece for piece, _ in self._ranges.get(shard, [])))
        before = Intervals.of((extent.start, known.origin or 0)) - written
        return before.hull if before else None

    def of(self, shard: Shard, part: Range) -> Iterator[tuple[Intervals, Commit | None]]:
        """The parts of a range, each with the batch that decides what should be there; ``None`` if there is none."""
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
        self, shard: Shard, parts: Intervals, commit: Commit | None, found: _Found, *, start: int
    ) -> tuple[Sequences, str]:
        """The sequence of each row that should be there, and what a message without rows and dead letters counts as."""
        hull = parts.hull
        commits = [commit] if commit is not None else []
        # An append to where entries were claimed left out what is in the table.
        adds_to_claims = commit is None or (commit.entry is not None and _is_append(commit.entry))
        if adds_to_claims and shard in self._claims and self._claims[shard].parts & parts:
            commits += [c for c in self._claimed if c.entry and _overlaps(c.entry.claims.get(shard), hull)]
        if not (all(map(_has_transform, commits)) if commits else self._has_transform and not self._is_whole_log):
            # Each message was one row, or is in no batch at all; of what the stream has dropped no more is known.
            messages = np.union1d(found.messages, found.rows[found.rows < start])
            return np.setdiff1d(messages, found.dead), "missing"
        written = [written_sequences(self._log, each, {shard: hull}, names=self._names) for each in commits]
        if commits and all(each is not None for each in written):
            known = [within(each.get(shard, _NONE), parts) for each in written if each is not None]
            return np.concatenate([_NONE, *known]), "filtered"
        if len(commits) == 1 and commit and commit.output_rows is not None and self._whole[commit.version]:
            self._counted.setdefault(commit.version, (commit, Counter()))[1][shard] += len(found.rows)
            return found.rows, "filtered"
        return found.rows, "unexplained"

    def count_claimed(self, shard: Shard, commit: Commit | None, messages: Sequences, absent: Sequences) -> None:
        """Remember how many messages there are where entries were claimed, and which of them may be filtered."""
        is_claimed = commit is None or (commit.entry is not None and bool(commit.entry.places))
        if is_claimed and shard in self._claims:
            self._claims[shard].add(messages, absent)

    def compare_claimed(self, tallies: Mapping[Shard, _Tally]) -> None:
        """Count as missing by how many the messages exceed what batches have claimed: no transform saw those."""
        for shard, claims in self._claims.items():
            if count := claims.unclaimed():
                tallies[shard].move(_NO_BATCH, count, to="missing" if self._is_whole_log else "unexplained")

    def count_rows(self, tallies: Mapping[Shard, _Tally]) -> None:
        """Where the files of a batch are gone, compare how many rows there are with how many it wrote."""
        for commit, rows in self._counted.values():
            surplus = rows.total() - (commit.output_rows or 0)
            tallies[min(rows)].counts["duplicated"] += max(0, surplus)
            _miss(tallies, sorted(rows), commit.version, max(0, -surplus))

    def count_dead(self, tallies: dict[Shard, _Tally], table: _Table) -> None:
        """Compare how many dead letters of each batch there are with how many it wrote."""
        there = table.dead_letters_by_batch() if self._with_dead else Counter[str]()
        for entry, version, replaced in self._with_dead:
            # Each range that was lost is one, too, which no message stands for.
            missing = entry.dead + sum(len(parts.ranges) for parts in entry.lost.values()) - there[entry.bid]
            if missing > 0 and replaced:
                missing -= table.most_deleted(entry.bid, replaced)
            if missing > 0:
                places = entry.affected.keys() | entry.claims.keys() | entry.lost.keys()
                # What is missing is counted for a shard that is asked for, if there is one.
                shards = sorted(places, key=lambda shard: (shard not in tallies, shard))
                for shard in shards:
                    tallies.setdefault(shard, _Tally())
                of_messages = min(missing, entry.dead)
                found = _miss(tallies, shards, version, of_messages)
                found[shards[0]] += missing - of_messages
                tallies[shards[0]].counts["missing"] += missing - of_messages
                for shard, count in (+found).items():
                    tallies[shard].missing_dead[entry.bid] = count


class _Claims:
    """How many entries of a shard batches have claimed, and how many messages there are in the same places.

    Between the entries of a batch lie those of others, so that of claims that overlap only the sums can be compared.

    Args:
        claimed: by the batches that are in the table.
    """

    def __init__(self, claimed: Iterable[ClaimedRange]) -> None:
        self.parts = Intervals.of(*((start, end) for start, end, _ in claimed))
        self._starts = np.array([part.start for part in self.parts], np.int64)
        self._unclaimed = np.zeros(len(self._starts), np.int64)
        self._absent = np.zeros(len(self._starts), np.int64)
        for start, _, entries in claimed:
            self._unclaimed[self._at(np.array([start]))] -= entries

    def add(self, messages: Sequences, absent: Sequences) -> None:
        """Count messages, and those among them that may be filtered, or in no batch."""
        for counts, found in ((self._unclaimed, messages), (self._absent, absent)):
            np.add.at(counts, self._at(within(found, self.parts)), 1)

    def unclaimed(self) -> int:
        """How many of the absent messages no batch can have claimed."""
        return int(np.clip(self._unclaimed, 0, self._absent).sum())

    def _at(self, places: Sequences) -> Sequences:
        return np.searchsorted(self._starts, places, side="right") - 1


def _miss(tallies: Mapping[Shard, _Tally], shards: Sequence[Shard], version: int, count: int) -> Counter[Shard]:
    """Count so much of a batch as missing, with the shards whose messages it may be as long as there are some."""
    found: Counter[Shard] = Counter()
    for shard in shards:
        found[shard] = tallies[shard].miss(version, count - found.total())
    rest = count - found.total()
    found[shards[0]] += rest
    tallies[shards[0]].counts["missing"] += rest
    return found


def _within_places(entry: LedgerEntry, parts: Mapping[Shard, Intervals]) -> Mapping[Shard, Intervals]:
    """These parts of the ranges that a batch wrote, or claimed entries of."""
    places = {**{shard: Intervals.of(part) for shard, part in entry.extents.items()}, **entry.affected}
    found = {shard: parts[shard] & own for shard, own in places.items() if shard in parts}
    return {shard: own for shard, own in found.items() if own}


def _has_transform(commit: Commit) -> bool:
    """Whether the rows of a batch may be other than one a message."""
    entry = commit.entry
    return entry is not None and (bool(entry.transform) or commit.output_rows != entry.messages)


def _is_append(entry: LedgerEntry) -> bool:
    return entry.kind == "batch" and not entry.does.replaces


def _overlaps(claimed: ClaimedRange | None, part: Range) -> bool:
    return claimed is not None and claimed.start < part.end and part.start < claimed.end


class _Tally:
    """What was found for a shard so far."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.last: int | None = None
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[int]] = {}
        self.missing_dead: dict[str, int] = {}
        # The messages without rows and dead letters, by the batch and by what they count as.
        self._absent: Counter[tuple[int, str]] = Counter()

    def add(
        self, shard: Shard, part: Range, found: _Found, batches: _Batches, *, start: int, origin: int | None
    ) -> None:
        """Compare one range.

        Args:
            shard: the shard.
            part: the range.
            found: what is in it.
            batches: decide what should be there.
            start: what the stream has dropped lies before it, and cannot be compared with it.
            origin: where the group began; rows before it that no batch wrote were adopted, and are what they are.
        """
        if len(found.messages):
            self.first = int(found.messages.min()) if self.first is None else min(self.first, int(found.messages.min()))
            self.last = max(self.last or 0, int(found.messages.max()))
        for what, those in (("messages", found.messages), ("rows", found.rows), ("dead", found.dead)):
            self.counts[what] += len(those)
        for piece, commit in batches.of(shard, part):
            is_told = commit is not None or origin is None
            own = piece if is_told else piece - Intervals.of((MIN_SEQUENCE, origin or 0))
            if own:
                self._compare(shard, own, commit, found.within(own), batches, start=start)

    def _compare(
        self, shard: Shard, parts: Intervals, commit: Commit | None, found: _Found, batches: _Batches, *, start: int
    ) -> None:
        if commit is not None and commit.entry is not None and shard in commit.entry.skipped:
            is_there = np.isin(found.messages, np.concatenate([found.rows, found.dead]))
            self.counts["skipped"] += int((~is_there).sum())
            found = replace(found, messages=found.messages[is_there])
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
        there = rows + dead > 0
        self.count("missing", places[rows < wanted])
        self.count("duplicated", places[((rows > wanted) & (wanted > 0)) | (dead > 1) | ((rows > 0) & (dead > 0))])
        is_unwanted = is_message & (rows > 0) & (wanted + dead == 0)
        self.count("unknown", places[(there & ~is_message & (places >= start)) | is_unwanted])

    def miss(self, version: int, most: int) -> int:
        """Count messages of a batch as missing that counted as something else; return how many, at most ``most``."""
        known = min(most, self._absent[version, "missing"])
        self._absent[version, "missing"] -= known
        return known + self.move(version, most - known, to="missing")

    def move(self, version: int, most: int, *, to: str) -> int:
        """Count messages of a batch that may be filtered as something else; return how many, at most ``most``."""
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

    def verdict(self, shard: Shard, lag: int, lost: Range | None, uncompared: Range | None) -> ShardVerdict:
        """What was found in all."""
        return ShardVerdict(
            shard,
            first=self.first,
            last=self.last,
            lag=lag,
            lost=lost,
            uncompared=uncompared,
            examples=self.examples,
            missing_dead=self.missing_dead,
            **{name: self.counts[name] for name in _COUNTS},
        )


def _count(places: Sequences, found: Sequences) -> Sequences:
    """How often each of these sorted places was found."""
    return np.searchsorted(np.sort(found), places, side="right") - np.searchsorted(np.sort(found), places, side="left")
