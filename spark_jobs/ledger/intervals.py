"""Sets of sequences, kept as sorted half-open intervals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from stream_consumers.batches import Range
from stream_consumers.messages import Shard

_Read = TypeVar("_Read")

MIN_SEQUENCE = -(2**63)
"""Stands for "before everything": an origin covers ``[MIN_SEQUENCE, origin)``."""
MAX_SEQUENCE = 2**63 - 1
"""Stands for "behind everything"."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """A set of whole numbers as disjoint, sorted, non-adjacent ranges.

    Example:
        >>> str(Intervals.of((0, 5), (5, 9), (20, 30)) - Intervals.of((3, 4)))
        '[0,3) [4,9) [20,30)'
    """

    ranges: tuple[Range, ...] = ()

    @classmethod
    def of(cls, *pairs: tuple[int, int]) -> Intervals:
        """Return the union of ``[start, end)`` pairs; empty pairs are ignored."""
        merged: list[Range] = []
        for start, end in sorted(pairs):
            if start >= end:
                continue
            if merged and start <= merged[-1].end:
                merged[-1] = Range(merged[-1].start, max(end, merged[-1].end))
            else:
                merged.append(Range(start, end))
        return cls(tuple(merged))

    @classmethod
    def from_json(cls, pairs: Iterable[Sequence[int | None]]) -> Intervals:
        """Read the result of :meth:`to_json`."""
        return cls.of(*((MIN_SEQUENCE if start is None else start, end or 0) for start, end in pairs))

    def to_json(self) -> list[list[int | None]]:
        """Return pairs of start and end, with ``None`` for :data:`MIN_SEQUENCE`."""
        return [[None if start == MIN_SEQUENCE else start, end] for start, end in self.ranges]

    def __or__(self, other: Intervals) -> Intervals:
        return Intervals.of(*self.ranges, *other.ranges)

    def __and__(self, other: Intervals) -> Intervals:
        found: list[Range] = []
        for mine in self.ranges:
            for theirs in other.ranges[bisect_right(other.ranges, mine.start, key=lambda part: part.end) :]:
                if theirs.start >= mine.end:
                    break
                found.append(mine.clamp(theirs))
        return Intervals(tuple(found))

    def __sub__(self, other: Intervals) -> Intervals:
        left: list[Range] = []
        for mine in self.ranges:
            at = mine.start
            for hole in other.ranges[bisect_right(other.ranges, at, key=lambda part: part.end) :]:
                if hole.start >= mine.end:
                    break
                if at < hole.start:
                    left.append(Range(at, hole.start))
                at = hole.end
            if at < mine.end:
                left.append(Range(at, mine.end))
        return Intervals(tuple(left))

    def __contains__(self, sequence: object) -> bool:
        return any(sequence in part for part in self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __iter__(self) -> Iterator[Range]:
        return iter(self.ranges)

    def __str__(self) -> str:
        return " ".join(f"[{'…' if start == MIN_SEQUENCE else start},{end})" for start, end in self.ranges)

    @property
    def hull(self) -> Range:
        """The range from the first number to after the last one.

        Raises:
            IndexError: the set is empty.
        """
        return Range(self.ranges[0].start, self.ranges[-1].end)

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(end - start for start, end in self.ranges)

    @property
    def position(self) -> int | None:
        """The end of the first interval: the next sequence to read; ``None`` for the empty set."""
        return self.ranges[0].end if self.ranges else None

    def first_gap(self, end: int) -> Range | None:
        """Return the gap after the first interval, clamped to ``end``; ``None`` if there is none."""
        if not self.ranges:
            return None
        start = self.ranges[0].end
        stop = min(end, self.ranges[1].start) if len(self.ranges) > 1 else end
        return Range(start, stop) if start < stop else None


def json_values(value: Any) -> Any:
    """Convert a value to JSON values: by its ``to_json`` if it has one. Keys that are shards become text.

    Example:
        >>> json_values({Shard("orders", 3): Intervals.of((1, 2))})
        {'orders/3': [[1, 2]]}
    """
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(key): json_values(part) for key, part in value.items()}
    return [json_values(part) for part in value] if isinstance(value, (list, tuple)) else value


def per_shard(values: Mapping[str, Any], read: Callable[[Any], _Read]) -> dict[Shard, _Read]:
    """Read a JSON object whose keys are shards."""
    return {Shard.parse(shard): read(value) for shard, value in values.items()}
