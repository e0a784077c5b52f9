"""Proves what a table holds: compares the sequences in the stream with those in the table and its dead letters.

No JVM: the stream is read as executors would read it, the table with delta-rs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from spark_jobs.ingestion import Ingestion
from spark_jobs.ledger import Ledger
from stream_consumers.batches import BatchSource, Range
from stream_consumers.errors import StreamNotFoundError, TableUnreadableError
from stream_consumers.messages import Shard
from stream_consumers.options import Limits

Sequences = npt.NDArray[np.int64]
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
        missing: sequences in neither of the two, and not filtered.
        duplicated: sequences that are there more than once.
        unknown: sequences that are there but not in the stream.
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
    source: BatchSource, ingestion: Ingestion, *, progress: Callable[[int], None] = lambda count: None
) -> list[ShardVerdict]:
    """Compare each covered shard of ``source`` with the table.

    Args:
        source: the stream.
        ingestion: group and table.
        progress: told how many messages of the stream were read.

    Raises:
        StreamNotFoundError: there is no table, or the group has written nothing into it.
        TableUnreadableError: delta-rs cannot read the table's data.
    """
    ledger = ingestion.ledger()
    state = ledger.read()
    if state.newest is None:
        raise StreamNotFoundError(
            f"group {ingestion.group!r} has written nothing into {ingestion.table}",
            remedy="Check --table and --group, or ingest first.",
        )
    extents = source.extents()
    covered = {s: Range(extents[s].start, end) for s, end in state.positions.items() if s in extents}
    stream = _read_source(source, covered, progress)
    rows = _sequences(ingestion.table, ingestion.storage_options)
    dead_letters = ingestion.dead_letters()
    letters: Mapping[Shard, Sequences] = {}
    if dead_letters.log().snapshot() is not None:
        strays = [stray.bid for stray in dead_letters.strays(ledger)]
        counts = (ds.field("_group") == ingestion.group) & ~ds.field("_batch").isin(pa.array(strays, pa.string()))
        letters = _sequences(dead_letters.path, ingestion.storage_options, counts)
    verdicts = [
        _judge(
            shard,
            stream.get(shard, _NONE),
            rows.get(shard, _NONE),
            letters.get(shard, _NONE),
            max(0, extents[shard].end - state.positions.get(shard, extents[shard].start)),
        )
        for shard in sorted(extents)
    ]
    return _without_filtered(verdicts, stream, rows, letters, ledger)


def _read_source(
    source: BatchSource, covered: Mapping[Shard, Range], progress: Callable[[int], None]
) -> Mapping[Shard, Sequences]:
    found: dict[Shard, list[Sequences]] = {}
    gaps = dict(covered)
    while (plan := source.plan(gaps, limits=Limits(), parallelism=1)) is not None:
        for split in plan.splits:
            for batch in split.read():
                shards = zip(batch.column("stream").to_pylist(), batch.column("shard").to_pylist())
                sequences = batch.column("sequence")
                ids = np.array([f"{stream}/{number}" for stream, number in shards])
                for text in np.unique(ids):
                    chosen = sequences.filter(ids == text).drop_null()
                    found.setdefault(Shard.parse(str(text)), []).append(chosen.to_numpy(zero_copy_only=False))
                progress(len(batch))
        gaps = {
            shard: Range(plan.ranges[shard].end if shard in plan.ranges else gap.start, gap.end)
            for shard, gap in gaps.items()
        }
    return {shard: np.concatenate(parts).astype(np.int64) for shard, parts in found.items()}


def _sequences(
    path: str, storage_options: Mapping[str, str], condition: ds.Expression | None = None
) -> Mapping[Shard, Sequences]:
    """All sequences of a table per shard, duplicates included."""
    try:
        table = DeltaTable(path, storage_options=dict(storage_options))
        dataset = table.to_pyarrow_dataset()
        scanner = dataset.scanner(columns=["_stream", "_shard", "_sequence"], filter=condition)
        parts: dict[Shard, list[Sequences]] = {}
        for batch in scanner.to_batches():
            if not len(batch):
                continue
            grouped = batch.to_pandas().dropna().groupby(["_stream", "_shard"])["_sequence"]
            for (stream, number), sequences in grouped:
                parts.setdefault(Shard(str(stream), int(number)), []).append(sequences.to_numpy(np.int64))
    except (DeltaError, OSError, KeyError, ValueError) as error:
        raise TableUnreadableError(
            f"the rows of {path} cannot be read without Spark ({error})",
            remedy="The table needs its columns _stream, _shard and _sequence, and features that delta-rs can read.",
        ) from error
    return {shard: np.concatenate(found) for shard, found in parts.items()}


def _judge(shard: Shard, stream: Sequences, rows: Sequences, letters: Sequences, lag: int) -> ShardVerdict:
    there = np.concatenate([rows, letters])
    unique, counts = np.unique(there, return_counts=True)
    missing = np.setdiff1d(stream, unique)
    doubled = unique[counts > 1]
    unknown = np.setdiff1d(unique, stream)
    wrong = {"missing": missing, "duplicated": doubled, "unknown": unknown}
    return ShardVerdict(
        shard,
        int(stream.min()) if len(stream) else None,
        int(stream.max()) if len(stream) else None,
        len(stream),
        len(rows),
        len(letters),
        0,
        len(missing),
        len(doubled),
        len(unknown),
        lag,
        {name: [int(s) for s in found[:EXAMPLES]] for name, found in wrong.items() if len(found)},
    )


def _without_filtered(
    verdicts: list[ShardVerdict],
    stream: Mapping[Shard, Sequences],
    rows: Mapping[Shard, Sequences],
    letters: Mapping[Shard, Sequences],
    ledger: Ledger,
) -> list[ShardVerdict]:
    """Tell what a transform dropped from what was lost.

    The ledger knows how many messages each batch decoded and how many rows it wrote. Where exactly so many are absent
    in its ranges, they were filtered; anything beyond that is missing.
    """
    if all(not verdict.missing for verdict in verdicts):
        return verdicts
    absent = {
        shard: np.setdiff1d(found, np.concatenate([rows.get(shard, _NONE), letters.get(shard, _NONE)]))
        for shard, found in stream.items()
    }
    filtered: dict[Shard, int] = {}
    for commit in ledger.batch_commits().values():
        entry = commit.entry
        if entry is None or not entry.ranges or commit.output_rows is None:
            continue
        inside = {
            shard: int(np.count_nonzero((absent[shard] >= part.start) & (absent[shard] < part.end)))
            for shard, part in entry.ranges.items()
            if shard in absent
        }
        if sum(inside.values()) == entry.rows - commit.output_rows:
            for shard, count in inside.items():
                filtered[shard] = filtered.get(shard, 0) + count
    return [_less_filtered(verdict, filtered.get(verdict.shard, 0)) for verdict in verdicts]


def _less_filtered(verdict: ShardVerdict, filtered: int) -> ShardVerdict:
    missing = max(0, verdict.missing - filtered)
    examples = {name: found for name, found in verdict.examples.items() if name != "missing" or missing}
    return replace(verdict, filtered=filtered, missing=missing, examples=examples)
