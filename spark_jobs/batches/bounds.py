"""The bounds of a replay, and the target of a rewind: an edge, sequences, or a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone

from stream_consumers.batches import BatchSource, Extent
from stream_consumers.epochs import split_epoch
from stream_consumers.errors import InvalidOptionError, InvalidUrlError
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, choose_fields
from stream_consumers.redis.entries import parse_sequence

_REMEDY = (
    "Use earliest, latest, a sequence, SHARD=SEQUENCE[,SHARD=SEQUENCE…] with shards like orders/0, "
    "or a time like 2026-11-01T00:00:00Z."
)


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound in the shards of a stream, not resolved yet; exactly one of the arguments is set.

    Args:
        edge: the earliest message that the stream holds, or its end.
        sequences: a sequence for some shards. A start leaves the other shards out; an end does not bound them.
        sequence: the same sequence for every shard.
        moment: stands for the first message with this timestamp or a later one.

    Example:
        >>> Bound.parse("orders/0=5,orders/1=7").sequences[Shard("orders", 1)]
        7
        >>> Bound.parse("2026-11-01T00:00:00Z").timestamp_ms
        1793491200000
    """

    edge: AutoStreamReset | None = None
    sequences: Mapping[Shard, int] = field(default_factory=dict)
    sequence: int | None = None
    moment: datetime | None = None

    def __post_init__(self) -> None:
        if self.edge is not None:
            choose_fields(self, edge=AutoStreamReset)

    @classmethod
    def parse(cls, text: str) -> Bound:
        """Parse the text of a command line option.

        Raises:
            InvalidOptionError: it is not a bound.
        """
        if text in (edge.value for edge in AutoStreamReset):
            return cls(edge=AutoStreamReset(text))
        if (sequence := parse_sequence(text)) is not None:
            return cls(sequence=sequence)
        if "=" in text:
            return cls.at_sequences(dict(part.rpartition("=")[::2] for part in text.split(",")))
        return cls.at_time(text)

    @classmethod
    def at_sequences(cls, listed: Mapping[str, object]) -> Bound:
        """Parse names of shards with sequences, as in a run config.

        Raises:
            InvalidOptionError: a name is not a shard, or a value is not a sequence.
        """
        sequences = {}
        for name, value in listed.items():
            sequence = None if isinstance(value, bool) else parse_sequence(str(value))
            if sequence is None:
                raise InvalidOptionError(f"{value!r} is not a sequence, for shard {name!r}", remedy=_REMEDY)
            try:
                sequences[Shard.parse(name)] = sequence
            except (InvalidUrlError, ValueError) as error:
                raise InvalidOptionError(f"{name!r} is not a shard", remedy=_REMEDY) from error
        if not sequences:
            raise InvalidOptionError("the mapping of shards to sequences is empty", remedy=_REMEDY)
        return cls(sequences=sequences)

    @classmethod
    def at_time(cls, text: str) -> Bound:
        """Parse a time in ISO format; without a time zone it is UTC.

        Raises:
            InvalidOptionError: it is not a time.
        """
        try:
            moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
            moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
            # In another time zone it may be outside the years that Python supports.
            moment.astimezone(timezone.utc)
        except (ValueError, OverflowError) as error:
            raise InvalidOptionError(f"{text!r} is not a bound in a stream", remedy=_REMEDY) from error
        return cls(moment=moment)

    @property
    def timestamp_ms(self) -> int | None:
        """The moment in milliseconds since 1970."""
        return None if self.moment is None else round(self.moment.timestamp() * 1000)

    def __str__(self) -> str:
        if self.edge is not None:
            return self.edge.value
        if self.moment is not None:
            return self.moment.isoformat()
        if self.sequence is not None:
            return str(self.sequence)
        return ",".join(f"{shard}={sequence}" for shard, sequence in sorted(self.sequences.items()))

    def resolve(self, source: BatchSource, extents: Mapping[Shard, Extent]) -> Mapping[Shard, int]:
        """Return the sequence in each shard that has a bound.

        Args:
            source: the stream; ``extents`` is the last result of its ``extents()``.
            extents: what each shard holds.

        Raises:
            InvalidOptionError: the stream does not have a shard, or does not hold a sequence; with the numbers.
        """
        if self.edge is not None:
            is_first = self.edge is AutoStreamReset.EARLIEST
            return {shard: extent.start if is_first else extent.end for shard, extent in extents.items()}
        if self.timestamp_ms is not None:
            return source.at(self.timestamp_ms)
        wanted = self.sequences if self.sequence is None else dict.fromkeys(extents, self.sequence)
        for shard, sequence in sorted(wanted.items()):
            listed, names = ", ".join(map(str, sorted(extents))), {known.stream for known in extents}
            is_other = split_epoch(shard.stream)[0] in {split_epoch(name)[0] for name in names}
            if is_other and shard.stream not in names:
                raise InvalidOptionError(
                    f"{shard} belongs to another epoch of {source.url} than the present one: the stream was recreated, "
                    "and the messages of the other epoch are gone",
                    remedy=f"It has {listed}. The rows of {shard.stream!r} in the table stay as they are.",
                )
            if shard not in extents:
                raise InvalidOptionError(f"{source.url} has no shard {shard}", remedy=f"It has {listed}.")
            extent = extents[shard]
            if not extent.start <= sequence <= extent.end:
                raise InvalidOptionError(
                    f"{shard} of {source.url} does not hold sequence {sequence}",
                    remedy=f"Use earliest, latest, or a sequence from {extent.start} to {extent.end - 1}.",
                    earliest=extent.start,
                    latest=extent.end,
                )
        return dict(wanted)
