"""What some consumers can do beyond the protocol, as a wrapper finds out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Shard, check_shard
from stream_consumers.options import check_count

Positions = Mapping[Shard, int]


def check_positions(positions: object) -> None:
    """Refuse what is not a mapping of shards to sequences.

    Raises:
        InvalidOptionError: naming what it is instead.

    Example:
        >>> check_positions("orders")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: positions='orders' is a str. Give a mapping of shards to \
sequences, like {Shard('orders'): 3}.
    """
    if not isinstance(positions, Mapping):
        raise InvalidOptionError(
            f"positions={positions!r} is a {type(positions).__name__}",
            remedy="Give a mapping of shards to sequences, like {Shard('orders'): 3}.",
        )
    for shard, position in positions.items():
        check_count(f"the position in {check_shard(shard)}", position, at_least=-(2**63))


@runtime_checkable
class PositionedConsumer(Protocol):
    """A consumer whose shards can be moved one by one."""

    def assigned(self) -> frozenset[Shard]:
        """The shards that are read now."""
        ...

    def go_to(self, positions: Positions) -> None:
        """Continue these shards at these sequences; others go on where they are.

        Args:
            positions: the next sequence to read, per shard: one before everything, like -1, is the beginning, and the
                end of the shard is the last place to go to.

        Raises:
            NotSubscribedError: a shard is not read by this consumer; no shard is moved.
            OutOfBoundsError: a position is behind the end of its shard; no shard is moved.
        """
        ...


def positioned(consumer: object) -> PositionedConsumer:
    """This consumer, if its shards can be moved one by one.

    Raises:
        InvalidOptionError: they cannot.

    Example:
        >>> positioned("no consumer")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: str cannot move single shards. Use rewind or seek.
    """
    if not isinstance(consumer, PositionedConsumer):
        raise InvalidOptionError(f"{type(consumer).__name__} cannot move single shards", remedy="Use rewind or seek.")
    return consumer


@runtime_checkable
class PausableConsumer(Protocol):
    """A consumer that can stop fetching single shards."""

    def pause(self, shards: Iterable[Shard]) -> None:
        """Fetch nothing of these."""
        ...

    def resume(self, shards: Iterable[Shard]) -> None:
        """Fetch them again."""
        ...


class ShardObserver(Protocol):
    """Is told, by the thread that reads, of shards that come and go."""

    def on_assigned(self, shards: frozenset[Shard]) -> None:
        """These are read from here on."""
        ...

    def on_revoked(self, shards: frozenset[Shard]) -> None:
        """These are given back when this returns: the last moment to commit them."""
        ...


@runtime_checkable
class ObservableConsumer(Protocol):
    """A consumer whose shards come and go."""

    def observe(self, observer: ShardObserver) -> None:
        """Tell ``observer``."""
        ...


@runtime_checkable
class EndedConsumer(Protocol):
    """A consumer that knows of ends that are no messages."""

    def reached_ends(self) -> Positions:
        """The ends that were reached since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class ShardEnd:
    """Where a shard ends.

    Args:
        readable: the sequence behind what can be read (Kafka's last stable offset with ``read_committed``).
        written: the sequence behind what was written; greater while a transaction is open.

    Example:
        >>> ShardEnd(readable=7, written=9).written
        9
    """

    readable: int
    written: int


@runtime_checkable
class MeasurableConsumer(Protocol):
    """A consumer that can ask how far its shards reach."""

    def ends(self) -> Mapping[Shard, ShardEnd]:
        """The ends of the shards that are read, now; any thread may ask, also while another one waits in ``next``.

        Raises:
            StreamAssetsError: as the broker says.
        """
        ...


@runtime_checkable
class EmptyingConsumer(Protocol):
    """A consumer that knows which messages are unfinished."""

    def wait_empty(self, timeout_seconds: float | None = None) -> bool:
        """Wait until everything that was handed out is finished; whether that came true in time."""
        ...
