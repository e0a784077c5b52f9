"""Epochs: names for streams that were deleted and created again, or replaced by another stream of the same name.

The sequences of the new stream collide with those of the old one. Stream, shard and sequence must still identify a row,
so the first epoch has the stream's own name, and later epochs have names that are not valid stream keys: ``orders``,
``orders#2``, ``orders#3``. To an engine that stores positions, an epoch is a stream like any other.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from stream_consumers.batches import (
    BatchPlan,
    BatchSource,
    CountedSplit,
    Extent,
    LastMessage,
    PositionFacts,
    Range,
    Resume,
    Split,
)
from stream_consumers.errors import InvalidUrlError
from stream_consumers.messages import EPOCH_MARK, Shard
from stream_consumers.options import Limits

T = TypeVar("T")
EpochNameMap = Mapping[str, str]
"""The epoch name of each stream key."""
Hint = Mapping[str, object]
"""The state that a source stores in the ledger for its next plan."""


def epoch_name(stream: str, epoch: int) -> str:
    """Return the name of an epoch of a stream.

    Example:
        >>> epoch_name("orders", 1), epoch_name("orders", 2)
        ('orders', 'orders#2')
    """
    return stream if epoch == 1 else f"{stream}{EPOCH_MARK}{epoch}"


def split_epoch(name: str) -> tuple[str, int]:
    """Split an epoch name into the stream key and the number of the epoch.

    Example:
        >>> split_epoch("orders"), split_epoch("orders#2")
        (('orders', 1), ('orders', 2))
    """
    stream, mark, number = name.rpartition(EPOCH_MARK)
    return (stream, int(number)) if mark and number.isdigit() else (name, 1)


def newest_epochs(known: Iterable[str], streams: Iterable[str]) -> EpochNameMap:
    """Return the newest known epoch of each stream; the first epoch if none is known.

    Example:
        >>> newest_epochs(["orders", "orders#2", "clicks"], ["orders", "users"])
        {'orders': 'orders#2', 'users': 'users'}
    """
    newest: dict[str, int] = {}
    for name in known:
        stream, epoch = split_epoch(name)
        newest[stream] = max(epoch, newest.get(stream, 1))
    return {stream: epoch_name(stream, newest.get(stream, 1)) for stream in streams}


def accept_remedy(name: str) -> str:
    """Return the remedy for a stream that was recreated.

    Args:
        name: the epoch name in the ledger.
    """
    following, how = _next_epoch(name)
    return (
        f"If it was recreated on purpose, accept it: {how}. The group continues with the first message of the new "
        f"stream, and where it was in shards that were not recreated, with _stream = '{following}'; existing rows stay."
    )


def truncation_remedy(name: str) -> str:
    """Return the remedy for a stream that lost its newest messages.

    Args:
        name: the epoch name in the ledger.
    """
    following, how = _next_epoch(name)
    return (
        "A broker was restored to an older state, or a lagging replica became the leader. Restore the messages if you "
        "can. To continue without them, set on_data_loss to 'record', or accept the stream once: "
        f"{how}. The group continues where the stream and the table differ, with _stream = "
        f"'{following}'; existing rows stay."
    )


def _next_epoch(name: str) -> tuple[str, str]:
    """Return the name of the next epoch, and how to accept it."""
    stream, epoch = split_epoch(name)
    following = epoch_name(stream, epoch + 1)
    command = f"stream-assets accept --as {shlex.quote(following)}, with the same --source, --table and --group"
    return following, f"{command}, or in Dagster the run config accept: [{following}]"


def with_epoch_names(source: BatchSource, names: EpochNameMap) -> BatchSource:
    """Wrap a source so that its streams have their epoch names.

    Args:
        source: the source.
        names: the epoch name of each stream of the source.
    """
    if isinstance(source, EpochSource) or all(stream == name for stream, name in names.items()):
        return source
    return EpochSource(source, names)


@dataclass(frozen=True, slots=True)
class EpochNames:
    """Translates shards between epoch names and stream keys.

    Args:
        names: the epoch name of each stream key.

    Example:
        >>> names = EpochNames({"orders": "orders#2"})
        >>> str(names.to_epoch(Shard("orders", 3))), str(names.to_stream(Shard("orders#2", 3)))
        ('orders#2/3', 'orders/3')
    """

    names: EpochNameMap

    def to_epoch(self, shard: Shard) -> Shard:
        """Return the shard with its epoch name."""
        return Shard(self.names.get(shard.stream, shard.stream), shard.id)

    def to_stream(self, shard: Shard) -> Shard:
        """Return the shard with its stream key."""
        return Shard(split_epoch(shard.stream)[0], shard.id)

    def all_to_epochs(self, values: Mapping[Shard, T]) -> dict[Shard, T]:
        """Apply :meth:`to_epoch` to the keys of a mapping."""
        return {self.to_epoch(shard): value for shard, value in values.items()}

    def all_to_streams(self, values: Mapping[Shard, T]) -> dict[Shard, T]:
        """Apply :meth:`to_stream` to the keys of a mapping; drop shards of other epochs and of other streams."""
        own = frozenset(self.names.values())
        return {self.to_stream(shard): value for shard, value in values.items() if shard.stream in own}

    def hint_to_epochs(self, hint: Hint | None) -> Hint | None:
        """Translate the shards in a hint, which are keys, to epoch names."""
        return None if hint is None else self._hint(hint, to_epochs=True)

    def hint_to_streams(self, hint: Hint | None) -> Hint | None:
        """Translate the shards in a hint to stream keys; drop those of other epochs of these streams."""
        return None if hint is None else self._hint(hint, to_epochs=False)

    def _hint(self, hint: Hint, *, to_epochs: bool) -> Hint:
        renamed: dict[str, object] = {}
        for key, value in hint.items():
            shard = _shard(key)
            if shard is None or split_epoch(shard.stream)[0] not in self.names:
                renamed[key] = self._hint(value, to_epochs=to_epochs) if isinstance(value, Mapping) else value
            elif to_epochs:
                renamed[str(self.to_epoch(shard))] = value
            elif shard.stream in self.names.values():
                renamed[str(self.to_stream(shard))] = value
        return renamed


def _shard(key: str) -> Shard | None:
    try:
        return Shard.parse(key)
    except InvalidUrlError:
        return None


@dataclass(frozen=True, slots=True)
class EpochSplit:
    """A split whose messages have epoch names."""

    split: Split
    names: EpochNameMap

    def read(self) -> Iterator[pa.RecordBatch]:
        """See :meth:`stream_consumers.batches.Split.read`."""
        for batch in self.split.read():
            column = batch.column("stream")
            for stream, name in self.names.items():
                column = pc.if_else(pc.equal(column, pa.scalar(stream)), pa.scalar(name), column)
            yield batch.set_column(batch.schema.get_field_index("stream"), batch.schema.field("stream"), column)

    def counts(self) -> Mapping[Shard, int] | None:
        """See :meth:`stream_consumers.batches.CountedSplit.counts`."""
        counts = self.split.counts() if isinstance(self.split, CountedSplit) else None
        return None if counts is None else EpochNames(self.names).all_to_epochs(counts)

    def identities(self) -> Mapping[str, str]:
        """See :meth:`stream_consumers.batches.CountedSplit.identities`."""
        assert isinstance(self.split, CountedSplit)
        return {self.names[stream]: identity for stream, identity in self.split.identities().items()}


class EpochSource(BatchSource):
    """A batch source whose streams have their epoch names.

    Args:
        source: the wrapped source.
        names: the epoch name of each stream of the source.
    """

    def __init__(self, source: BatchSource, names: EpochNameMap) -> None:
        super().__init__(source.url)
        self.has_own_timestamps = source.has_own_timestamps
        self._source = source
        self._names = EpochNames(names)

    def identities(self) -> Mapping[str, str]:
        """See :meth:`stream_consumers.batches.BatchSource.identities`."""
        return {self._names.names[stream]: identity for stream, identity in self._source.identities().items()}

    def extents(self, *, resume: Resume | None = None, budget_seconds: float | None = None) -> Mapping[Shard, Extent]:
        """See :meth:`stream_consumers.batches.BatchSource.extents`."""
        found = self._source.extents(resume=resume and self._resume(resume), budget_seconds=budget_seconds)
        self.is_exact = self._source.is_exact
        return self._names.all_to_epochs(found)

    def has_grown(self, extents: Mapping[Shard, Extent], *, resume: Resume | None = None) -> bool:
        """See :meth:`stream_consumers.batches.BatchSource.has_grown`."""
        return self._source.has_grown(self._names.all_to_streams(extents), resume=resume and self._resume(resume))

    def _resume(self, resume: Resume) -> Resume:
        return Resume(self._names.all_to_streams(resume.positions), self._names.hint_to_streams(resume.hint))

    def remember(self, resume: Resume) -> None:
        """See :meth:`stream_consumers.batches.BatchSource.remember`."""
        self._source.remember(self._resume(resume))

    def plan(self, gaps: Mapping[Shard, Range], *, limits: Limits, parallelism: int) -> BatchPlan | None:
        """See :meth:`stream_consumers.batches.BatchSource.plan`."""
        plan = self._source.plan(self._names.all_to_streams(gaps), limits=limits, parallelism=parallelism)
        if plan is None:
            return None
        splits = [EpochSplit(split, self._names.names) for split in plan.splits]
        ranges, lost = self._names.all_to_epochs(plan.ranges), self._names.all_to_epochs(plan.lost)
        return BatchPlan(ranges, splits, plan.records, self._names.hint_to_epochs(plan.hint), lost)

    def hint(self, positions: Mapping[Shard, int], known: Hint | None = None) -> Hint | None:
        """See :meth:`stream_consumers.batches.BatchSource.hint`."""
        found = self._source.hint(self._names.all_to_streams(positions), self._names.hint_to_streams(known))
        return self._names.hint_to_epochs(found)

    def at(self, timestamp_ms: int) -> Mapping[Shard, int]:
        """See :meth:`stream_consumers.batches.BatchSource.at`."""
        return self._names.all_to_epochs(self._source.at(timestamp_ms))

    def first(self, shard: Shard, extent: Extent) -> int:
        """See :meth:`stream_consumers.batches.BatchSource.first`."""
        return self._source.first(self._names.to_stream(shard), extent)

    def is_in_claim_mode(self, group: str) -> bool:
        """See :meth:`stream_consumers.batches.BatchSource.is_in_claim_mode`."""
        return self._source.is_in_claim_mode(group)

    def set_request_timeout(self, seconds: float) -> None:
        """See :meth:`stream_consumers.batches.BatchSource.set_request_timeout`."""
        self._source.set_request_timeout(seconds)

    def lost(self, gaps: Mapping[Shard, Range]) -> Mapping[Shard, Range]:
        """See :meth:`stream_consumers.batches.BatchSource.lost`."""
        return self._names.all_to_epochs(self._source.lost(self._names.all_to_streams(gaps)))

    def maybe_lost(self, gaps: Mapping[Shard, Range]) -> Mapping[Shard, Range]:
        """See :meth:`stream_consumers.batches.BatchSource.maybe_lost`."""
        return self._names.all_to_epochs(self._source.maybe_lost(self._names.all_to_streams(gaps)))

    def recreated(self, positions: Mapping[Shard, int]) -> frozenset[Shard]:
        """See :meth:`stream_consumers.batches.BatchSource.recreated`."""
        return frozenset(map(self._names.to_epoch, self._source.recreated(self._names.all_to_streams(positions))))

    def with_late_messages(
        self, facts: Mapping[Shard, Collection[tuple[int, PositionFacts]]], *, counts_all: bool
    ) -> Mapping[Shard, int]:
        """See :meth:`stream_consumers.batches.BatchSource.with_late_messages`."""
        found = self._source.with_late_messages(self._names.all_to_streams(facts), counts_all=counts_all)
        return self._names.all_to_epochs(found)

    def last_messages(self, ranges: Mapping[Shard, Range]) -> Mapping[Shard, LastMessage]:
        """See :meth:`stream_consumers.batches.BatchSource.last_messages`."""
        return self._names.all_to_epochs(self._source.last_messages(self._names.all_to_streams(ranges)))

    def is_replaced(self, shard: Shard, read: LastMessage, held: LastMessage | None) -> bool:
        """See :meth:`stream_consumers.batches.BatchSource.is_replaced`."""
        return self._source.is_replaced(self._names.to_stream(shard), read, held)

    def count(self, gaps: Mapping[Shard, Range]) -> Mapping[Shard, int]:
        """See :meth:`stream_consumers.batches.BatchSource.count`."""
        return self._names.all_to_epochs(self._source.count(self._names.all_to_streams(gaps)))

    def unreadable_tail(self) -> str | None:
        """See :meth:`stream_consumers.batches.BatchSource.unreadable_tail`."""
        return self._source.unreadable_tail()

    def committed(self, group: str) -> Mapping[Shard, int] | None:
        """See :meth:`stream_consumers.batches.BatchSource.committed`."""
        found = self._source.committed(group)
        return None if found is None else self._names.all_to_epochs(found)

    def commit(self, group: str, positions: Mapping[Shard, int], *, metadata: str = "") -> None:
        """See :meth:`stream_consumers.batches.BatchSource.commit`."""
        self._source.commit(group, self._names.all_to_streams(positions), metadata=metadata)

    def committed_metadata(self, group: str) -> Mapping[Shard, str]:
        """See :meth:`stream_consumers.batches.BatchSource.committed_metadata`."""
        return self._names.all_to_epochs(self._source.committed_metadata(group))

    def close(self) -> None:
        """See :meth:`stream_consumers.batches.BatchSource.close`."""
        self._source.close()
