"""Whether a split that is written while it is read is what was planned: told by the executor that reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from stream_consumers.batches import CountedSplit
from stream_consumers.messages import Shard


class UncleanError(Exception):
    """A split is not what was planned. The Spark job fails before it commits, and the batch is written the careful way.

    It is raised as soon as that is known: a cluster runs a task that fails four times.
    """


@dataclass(frozen=True, slots=True)
class CleanRead:
    """What a clean read of a split gives.

    Args:
        counts: messages of each shard.
        identities: for each epoch of each stream, the fingerprint of the stream that was planned; more may be named.

    Example:
        >>> rows = pa.record_batch({"_stream": ["orders"], "_shard": [0], "_error": pa.nulls(1, pa.string())})
        >>> from stream_consumers.memory import MemorySplit
        >>> clean = CleanRead({Shard("orders"): 1}, {"orders": "first"})
        >>> [found.num_rows for found in clean.checked([rows], MemorySplit((), {"orders": "first"}))]
        [1]
        >>> [found.num_rows for found in clean.checked([rows], MemorySplit((), {"orders": "second"}))]
        Traceback (most recent call last):
        spark_jobs.reading.clean.UncleanError: the stream was recreated while it was read: {'orders': 'second'}
    """

    counts: Mapping[Shard, int]
    identities: Mapping[str, str]

    def checked(self, batches: Iterable[pa.RecordBatch], split: CountedSplit) -> Iterator[pa.RecordBatch]:
        """The decoded rows of the split, as long as each message is there once and is no dead letter.

        Args:
            batches: with the columns ``_stream``, ``_shard`` and ``_error``.
            split: asked at the end whether its streams are still those that were planned.

        Raises:
            UncleanError: it is not so.
        """
        left = dict(self.counts)
        for rows in batches:
            dead = rows.num_rows - rows.column("_error").null_count
            if dead:
                raise UncleanError(f"{dead} of {rows.num_rows} messages are dead letters")
            for shard, count in count_by_shard(rows):
                left[shard] = left.get(shard, 0) - count
                if left[shard] < 0:
                    raise UncleanError(f"{shard} holds more messages than the {self.counts.get(shard, 0)} planned")
            yield rows
        missing = {str(shard): count for shard, count in left.items() if count}
        if missing:
            raise UncleanError(f"messages that were planned are not there: {missing}")
        found = split.identities()
        streams = {shard.stream for shard in self.counts}
        if not streams <= found.keys() or any(self.identities.get(name) != found[name] for name in found):
            raise UncleanError(f"the stream was recreated while it was read: {dict(found)}")


def count_by_shard(rows: pa.RecordBatch) -> Iterator[tuple[Shard, int]]:
    """How many rows each shard has, by the columns ``_stream`` and ``_shard``."""
    places = pa.Table.from_batches([rows.select(["_stream", "_shard"])])
    counted = places.group_by(["_stream", "_shard"], use_threads=False).aggregate([([], "count_all")])
    for row in counted.to_pylist():
        yield Shard(row["_stream"], row["_shard"]), row["count_all"]
