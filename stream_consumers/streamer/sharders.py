"""What spreads messages over the shards of a stream (SeaStreamer's sharders)."""

from __future__ import annotations

import itertools
import random
from typing import Protocol

from stream_consumers.errors import InvalidOptionError


class Sharder(Protocol):
    """Chooses a shard for a message. Threads may share it.

    Example:
        >>> from stream_consumers.streamer.streamer import connect
        >>> with connect("memory://sharded/orders") as streamer:
        ...     producer = streamer.create_producer(sharder=RoundRobin(2))
        ...     [producer.send(b"{}").shard.id for _ in range(3)]
        [0, 1, 0]
    """

    @property
    def shards(self) -> int:
        """How many there are to choose from."""
        ...

    def choose(self, stream: str, payload: bytes) -> int:
        """The shard for this message: 0 to ``shards - 1``."""
        ...


class RoundRobin:
    """One shard after the other, whatever the stream.

    Args:
        shards: how many; at least 1.

    Raises:
        InvalidOptionError: fewer.

    Example:
        >>> sharder = RoundRobin(2)
        >>> [sharder.choose("orders", b"{}") for _ in range(3)]
        [0, 1, 0]
    """

    def __init__(self, shards: int) -> None:
        self.shards = _checked(shards)
        self._turns = itertools.count()

    def choose(self, stream: str, payload: bytes) -> int:
        """See :meth:`Sharder.choose`."""
        return next(self._turns) % self.shards


class PseudoRandom:
    """Any shard, each as often as the others in the long run.

    SeaStreamer takes the current millisecond, so that what is sent within one goes to a single shard; this does not.

    Args:
        shards: how many; at least 1.
        seed: for the same choices again; by default the time.

    Raises:
        InvalidOptionError: fewer.

    Example:
        >>> sharder = PseudoRandom(3, seed=7)
        >>> {sharder.choose("orders", b"{}") for _ in range(100)}
        {0, 1, 2}
    """

    def __init__(self, shards: int, *, seed: int | None = None) -> None:
        self.shards = _checked(shards)
        # Nobody must be unable to guess a shard.
        self._random = random.Random(seed)  # noqa: S311

    def choose(self, stream: str, payload: bytes) -> int:
        """See :meth:`Sharder.choose`."""
        return self._random.randrange(self.shards)


def _checked(shards: int) -> int:
    if shards < 1:
        raise InvalidOptionError(f"shards={shards} leaves no place for a message", remedy="Use 1 or more.")
    return shards
