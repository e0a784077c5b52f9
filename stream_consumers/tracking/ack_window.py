"""How far one shard may be committed, while its messages are finished in any order."""

from __future__ import annotations

import bisect
from collections import deque


class AckWindow:
    """The messages of one shard between what is committed and what was delivered last.

    The semantics are those of Faust's ``Consumer._new_offset``, as documented: the position is behind the longest run
    of finished messages from the head of what was delivered. Sequences need not be consecutive: what was never
    delivered (transaction markers, compacted messages, the gaps between Redis ids) never blocks.

    Every call takes constant time on average, but for a message that is delivered out of order.

    Args:
        committed: the next sequence to read as the broker has it; ``None`` if it has none (0 is a position).

    Example:
        >>> window = AckWindow(committed=10)
        >>> for sequence in (10, 11, 15):
        ...     window.deliver(sequence)
        >>> window.acknowledge(11), window.position, window.committable
        (True, 10, None)
        >>> window.acknowledge(10), window.position, window.unacknowledged
        (True, 12, (15,))
    """

    def __init__(self, *, committed: int | None = None) -> None:
        self._committed = committed
        self._behind_run = committed
        # In order of sequence: what may hold the position back, and what was finished behind that.
        self._pending: deque[int] = deque()
        self._known: set[int] = set()
        self._unfinished: set[int] = set()

    def __repr__(self) -> str:
        return f"AckWindow(committed={self._committed}, position={self.position}, unfinished={len(self)})"

    def __len__(self) -> int:
        return len(self._unfinished)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._unfinished

    @property
    def unacknowledged(self) -> tuple[int, ...]:
        """What was delivered and is not finished, in order."""
        return tuple(sorted(self._unfinished))

    @property
    def position(self) -> int | None:
        """The next sequence to read that may be committed; ``None`` if nothing may.

        Where nothing is committed, 0 would say no more than that, and is ``None``.
        """
        position = self._behind_run
        if position is not None and self._pending:
            position = min(position, self._pending[0])
        return None if position == 0 and self._committed is None else position

    @property
    def committable(self) -> int | None:
        """The position, if it is beyond what is committed: never backwards, never twice."""
        position = self.position
        if position is None or (self._committed is not None and position <= self._committed):
            return None
        return position

    @property
    def last_committed(self) -> int | None:
        """The position that the broker has; ``None`` if it has none."""
        return self._committed

    def deliver(self, sequence: int) -> None:
        """A message is handed out; once more, it counts as unfinished again."""
        self._unfinished.add(sequence)
        if sequence not in self._known:
            self._enter(sequence)

    def acknowledge(self, sequence: int) -> bool:
        """A message is finished; ``False`` if it was never delivered, or was finished before."""
        if sequence not in self._unfinished:
            return False
        self._unfinished.remove(sequence)
        self._pass_finished()
        return True

    def skip_to(self, sequence: int) -> None:
        """Nothing but what was delivered is below ``sequence``: a gap at the end, like transaction markers."""
        last = sequence - 1
        if not self._pending:
            self._behind_run = sequence if self._behind_run is None else max(self._behind_run, sequence)
        elif last > self._pending[-1]:
            self._enter(last)

    def committed(self, position: int) -> None:
        """The broker has this position. Call it after success only, so that a failed commit is tried again."""
        self._committed = position

    def seek(self, sequence: int) -> None:
        """Reading goes on at ``sequence``: what is from there on will be delivered again, or was jumped to.

        What is below stays as it is, so that the position is here at most. The committed position stays, too: a replay
        never moves it back (Faust's rule).
        """
        while self._pending and self._pending[-1] >= sequence:
            gone = self._pending.pop()
            self._known.discard(gone)
            self._unfinished.discard(gone)
        if self._behind_run is not None:
            self._behind_run = min(self._behind_run, sequence)
        self._pass_finished()

    def _enter(self, sequence: int) -> None:
        self._known.add(sequence)
        if not self._pending or sequence > self._pending[-1]:
            self._pending.append(sequence)
        else:
            bisect.insort(self._pending, sequence)

    def _pass_finished(self) -> None:
        while self._pending and self._pending[0] not in self._unfinished:
            passed = self._pending.popleft()
            self._known.discard(passed)
            self._behind_run = passed + 1 if self._behind_run is None else max(self._behind_run, passed + 1)
