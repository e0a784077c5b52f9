"""What keeps the positions of a group, or which of its messages are finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from stream_consumers.capabilities import Positions, check_positions
from stream_consumers.messages import Shard

Entries = Mapping[Shard, Sequence[int]]


class PositionCommitter(Protocol):
    """Keeps the positions of one group. A position is the next sequence to read; 0 is not "none".

    Example:
        >>> committer: PositionCommitter = ProcessCommitter({Shard("orders"): 3})
        >>> committer.committed()
        {Shard(stream='orders', id=0): 3}
    """

    @property
    def is_transactional(self) -> bool:
        """Whether a commit ends a transaction, so that only the one who fills it may call it."""
        ...

    def commit(self, positions: Positions) -> object:
        """Keep these positions.

        Raises:
            StreamAssetsError: they were not kept.
        """
        ...

    def committed(self) -> Positions:
        """What is kept; shards without a position are left out.

        Raises:
            StreamAssetsError: it cannot be told.
        """
        ...


@runtime_checkable
class TransactionCommitter(PositionCommitter, Protocol):
    """Beyond :class:`PositionCommitter`: its commits end a transaction.

    Example:
        >>> isinstance(ProcessCommitter(), TransactionCommitter)
        False
    """

    @property
    def is_open(self) -> bool:
        """Whether a transaction was begun and has not ended."""
        ...

    def commit(self, positions: Positions, *, start_new_transaction: bool = True) -> None:
        """Keep these positions, and end the transaction with them.

        Args:
            positions: the next sequence to read, per shard.
            start_new_transaction: begin the next one at once.

        Raises:
            StreamAssetsError: they were not kept.
        """
        ...


@runtime_checkable
class EntryCommitter(Protocol):
    """Beyond :class:`PositionCommitter`: keeps message by message which ones are finished, in any order.

    Example:
        >>> isinstance(ProcessCommitter(), EntryCommitter)
        False
    """

    def commit_entries(self, entries: Entries) -> None:
        """Keep that these messages are finished.

        Args:
            entries: their sequences, per shard.

        Raises:
            StreamAssetsError: they may not have been kept.
        """
        ...


class ProcessCommitter:
    """Keeps positions in this process only: for streams whose broker remembers none.

    Example:
        >>> committer = ProcessCommitter()
        >>> committer.commit({Shard("orders"): 0})
        >>> committer.committed()
        {Shard(stream='orders', id=0): 0}
    """

    is_transactional = False

    def __init__(self, positions: Positions | None = None) -> None:
        check_positions(positions or {})
        self._positions = dict(positions or {})

    def commit(self, positions: Positions) -> None:
        """See :meth:`PositionCommitter.commit`."""
        check_positions(positions)
        self._positions |= positions

    def committed(self) -> Positions:
        """See :meth:`PositionCommitter.committed`."""
        return dict(self._positions)
