"""Proves what a table holds: compares the sequences in the stream with those in the table and its dead letters.

No JVM: the stream is read as executors would read it, the table with delta-rs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from spark_jobs.batches.ingestion import Ingestion, check_source, lag
from spark_jobs.claims.status import ClaimState
from spark_jobs.ledger.entries import ShardState
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.ledger.table_rows import PLACE, Sequences, by_shard, sequences
from spark_jobs.writing.dead_letters import DeadLetterTable
from stream_consumers.batches import BatchSource, Range
from stream_consumers.errors import StreamNotFoundError
from stream_consumers.messages import Shard
from stream_consumers.options import Limits

_NONE: Sequences = np.empty(0, np.int64)
EXAMPLES = 5


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
        filtered: messages that the transform dropped, as the ledger counted them.
        skipped: messages that the group went over because somebody moved it forwards.
        missing: sequences in neither of the two, and not filtered.
        duplicated: sequences that are there more than once.
        unknown: sequences that are there but not in the stream, from the stream's first one on.
        lag: messages behind the covered range.
        examples: some sequences of what is wrong.
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
    examples: Mapping[str, list[int]] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether each message is there exactly once."""
        return not (self.missing or self.duplicated or self.unknown)


def verify(
    source: BatchSource,
    ingestion: Ingestion,
    *,
    claims: ClaimState | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> list[ShardVerdict]:
    """Compare each covered shard of ``source`` with the table.

    Args:
        source: the stream.
        ingestion: group and table.
        claims: where members claim entries one by one, what the group is done with; what another client in the group
            has acknowledged counts as missing.
        progress: told how many messages of the stream were read.

    Raises:
        StreamNotFoundError: there is no table, or the group has written nothing into it.
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    ledger = ingestion.ledger()
    state = ledger.read()
    extents = source.extents()
    streams = source.identities().keys()
    if not any(shard.stream in streams for shard in state.shards):
        raise StreamNotFoundError(
            f"group {ingestion.group!r} has written nothing of {source.url} into {ingestion.table}",
            remedy="Check --source, --table and --group, or ingest first.",
        )
    check_source(source, ingestion.group, state, extents)
    covered = {s: _covered(known) for s, known in state.shards.items() if s in extents}
    if claims is not None:
        covered = {s: Intervals.of(part) for s, part in claims.delivered.items() if s in extents}
    stream = _read_source(source, covered, progress)
    if claims is not None:
        stream = {s: np.setdiff1d(found, claims.unsettled.get(s, _NONE)) for s, found in stream.items()}
    rows = sequences(ledger.log, version=state.version)
    if claims is not None:
        rows = _settled(rows, covered, claims)
    dead_letter_table = ingestion.dead_letters()
    dead_letters: Mapping[Shard, Sequences] = {}
    unplaced: Mapping[Shard, int] = {}
    if dead_letter_table.log().snapshot() is not None:
        dead_letters, unplaced = _dead_letters(dead_letter_table, ledger)
        if claims is not None:
            dead_letters = _settled(dead_letters, covered, claims)
    shards = {s for s in (*extents, *rows, *dead_letters, *unplaced) if s.stream in streams}
    behind = lag(source, state, extents) if claims is None else claims.lag
    filtered, skipped, absent = _explained(stream, rows, dead_letters, ledger)
    return [
        _judge(
            shard,
            stream.get(shard, _NONE),
            rows.get(shard, _NONE),
            dead_letters.get(shard, _NONE),
            unplaced=unplaced.get(shard, 0),
            absent=absent.get(shard, _NONE),
            filtered=filtered.get(shard, 0),
            skipped=skipped.get(shard, 0),
            start=extents[shard].start if shard in extents else 0,
            lag=behind.get(shard, 0),
        )
        for shard in sorted(shards)
    ]


def _covered(known: ShardState) -> Intervals:
    """What was read: the covered sequences from the origin on."""
    origin = 0 if known.origin is None else known.origin
    return known.covered & Intervals.of((origin, 2**63 - 1))


def _read_source(
    source: BatchSource, covered: Mapping[Shard, Intervals], progress: Callable[[int], None]
) -> Mapping[Shard, Sequences]:
    found: dict[Shard, list[Sequences]] = {}
    gaps = {s: Range(part.ranges[0].start, part.ranges[-1].end) for s, part in covered.items() if part}
    while (plan := source.plan(gaps, limits=Limits(), parallelism=1)) is not None:
        for split in plan.splits:
            for batch in split.read():
                for shard, own in by_shard(batch.to_pandas(), "stream", "shard", "sequence"):
                    found.setdefault(shard, []).append(own)
                progress(len(batch))
        gaps = {
            shard: Range(plan.ranges[shard].end if shard in plan.ranges else gap.start, gap.end)
            for shard, gap in gaps.items()
        }
    return {shard: _within(np.concatenate(parts), covered[shard]) for shard, parts in found.items()}


def _settled(
    found: Mapping[Shard, Sequences], covered: Mapping[Shard, Intervals], claims: ClaimState
) -> Mapping[Shard, Sequences]:
    """Without what members are writing at the moment."""
    delivered = {s: _within(part, covered[s]) if s in covered else part for s, part in found.items()}
    return {s: part[~np.isin(part, claims.unsettled.get(s, _NONE))] for s, part in delivered.items()}


def _within(found: Sequences, covered: Intervals) -> Sequences:
    masks = [(found >= part.start) & (found < part.end) for part in covered]
    return found[np.logical_or.reduce(masks)] if masks else _NONE


def _dead_letters(table: DeadLetterTable, ledger: Ledger) -> tuple[Mapping[Shard, Sequences], Mapping[Shard, int]]:
    """The dead letters that count: sequences per shard, and how many have no sequence."""
    frame = table.counted_places(ledger).to_pandas()
    lost = frame[frame["_sequence"].isna()].groupby(["_stream", "_shard"]).size()
    unplaced = {Shard(str(stream), int(number)): int(count) for (stream, number), count in lost.items()}
    return dict(by_shard(frame, *PLACE)), unplaced


def _explained(
    stream: Mapping[Shard, Sequences],
    rows: Mapping[Shard, Sequences],
    dead_letters: Mapping[Shard, Sequences],
    ledger: Ledger,
) -> tuple[Mapping[Shard, int], Mapping[Shard, int], Mapping[Shard, Sequences]]:
    """Tell what a transform dropped, and what was skipped, from what was lost.

    The ledger knows how many messages each batch decoded and how many rows it wrote. So many of the sequences that are
    absent in its ranges were filtered; more than that is missing. The newest batch that wrote a range judges it.

    Returns:
        Per shard how many were filtered and how many skipped, and the sequences that are absent otherwise.
    """
    absent = {
        shard: np.setdiff1d(found, np.concatenate([rows.get(shard, _NONE), dead_letters.get(shard, _NONE)]))
        for shard, found in stream.items()
    }
    filtered: dict[Shard, int] = {}
    skipped: dict[Shard, int] = {}
    judged: dict[Shard, Intervals] = {}
    if not any(map(len, absent.values())):
        return filtered, skipped, absent
    for commit in ledger.surviving():
        entry = commit.entry
        if entry is None or commit.output_rows is None:
            continue
        for shard, part in entry.skipped.items():
            gone = _within(absent.get(shard, _NONE), Intervals.of(part) - judged.get(shard, Intervals()))
            skipped[shard] = skipped.get(shard, 0) + len(gone)
            absent[shard] = np.setdiff1d(absent.get(shard, _NONE), gone)
        left = entry.rows - commit.output_rows
        for shard, (start, end, *_) in {**entry.ranges, **entry.claims}.items():
            own = Intervals.of((start, end)) - judged.get(shard, Intervals())
            if shard in entry.ranges and entry.kind != "fence":
                # What members claimed lies in between what others did.
                judged[shard] = judged.get(shard, Intervals()) | Intervals.of((start, end))
            count = min(max(0, left), len(_within(absent.get(shard, _NONE), own)))
            left -= count
            filtered[shard] = min(filtered.get(shard, 0) + count, len(absent.get(shard, _NONE)))
    return filtered, skipped, absent


def _judge(
    shard: Shard,
    stream: Sequences,
    rows: Sequences,
    dead_letters: Sequences,
    *,
    unplaced: int,
    absent: Sequences,
    filtered: int,
    skipped: int,
    start: int,
    lag: int,
) -> ShardVerdict:
    unique, counts = np.unique(np.concatenate([rows, dead_letters]), return_counts=True)
    missing = len(absent) - filtered
    wrong = {
        "missing": absent if missing else _NONE,
        "duplicated": unique[counts > 1],
        # What the stream has dropped since it was written cannot be compared.
        "unknown": np.setdiff1d(unique[unique >= start], stream),
    }
    return ShardVerdict(
        shard,
        first=int(stream.min()) if len(stream) else None,
        last=int(stream.max()) if len(stream) else None,
        messages=len(stream),
        rows=len(rows),
        dead=len(dead_letters) + unplaced,
        filtered=filtered,
        skipped=skipped,
        missing=missing,
        duplicated=len(wrong["duplicated"]),
        unknown=len(wrong["unknown"]),
        lag=lag,
        examples={name: [int(s) for s in found[:EXAMPLES]] for name, found in wrong.items() if len(found)},
    )
