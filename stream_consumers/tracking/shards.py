"""The state of a tracked consumer's shards: returned and held messages, and positions to commit. It has no locks."""

from __future__ import annotations

import bisect
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stream_consumers.consumer import Positions
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Message, Shard
from stream_consumers.tracking.livelock import ShardProgress
from stream_consumers.tracking.options import TrackingOptions


class AckWindow:
    """The messages of one shard between the committed position and the last delivered message.

    The semantics are those of Faust's ``Consumer._new_offset``, as documented: the position follows the longest run of
    finished messages from the first delivered one. Sequences need not be consecutive: sequences that were never
    delivered (transaction markers, compacted messages, the gaps between Redis ids) never block the position.

    Every call takes constant time on average, except for a message that is delivered out of order.

    Args:
        committed: the committed position at the broker; ``None`` if it has none (0 is a position).

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
        self._after_run = committed
        # In order of sequence: unfinished messages, and finished messages after them.
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
        """The delivered messages that are not finished, in order."""
        return tuple(sorted(self._unfinished))

    @property
    def position(self) -> int | None:
        """The position that may be committed; ``None`` if none may, and for 0 if none is committed."""
        position = self._after_run
        if position is not None and self._pending:
            position = min(position, self._pending[0])
        return None if position == 0 and self._committed is None else position

    @property
    def committable(self) -> int | None:
        """The position if it is after the committed one, so that commits never move back or repeat; else ``None``."""
        position = self.position
        if position is None or (self._committed is not None and position <= self._committed):
            return None
        return position

    @property
    def last_committed(self) -> int | None:
        """The committed position at the broker; ``None`` if it has none."""
        return self._committed

    def deliver(self, sequence: int) -> None:
        """Record a delivered message; a repeated delivery makes it unfinished again."""
        self._unfinished.add(sequence)
        if sequence not in self._known:
            self._add_pending(sequence)

    def acknowledge(self, sequence: int) -> bool:
        """Record that a message is finished; return ``False`` if it was never delivered or had been finished."""
        if sequence not in self._unfinished:
            return False
        self._unfinished.remove(sequence)
        self._advance()
        return True

    def skip_to(self, sequence: int) -> None:
        """Record that no undelivered message is before ``sequence``, because of a gap such as transaction markers."""
        last = sequence - 1
        if not self._pending:
            self._after_run = sequence if self._after_run is None else max(self._after_run, sequence)
        elif last > self._pending[-1]:
            self._add_pending(last)

    def committed(self, position: int) -> None:
        """Record a position that was committed; call this after success only, so that a failed commit is retried."""
        self._committed = position

    def seek(self, sequence: int) -> None:
        """Record that reading continues at ``sequence``, and forget the messages from there on.

        Earlier messages do not change, so that the position is at most ``sequence``. Nor does the committed position:
        a seek never moves it back (Faust's rule).
        """
        while self._pending and self._pending[-1] >= sequence:
            forgotten = self._pending.pop()
            self._known.discard(forgotten)
            self._unfinished.discard(forgotten)
        if self._after_run is not None:
            self._after_run = min(self._after_run, sequence)
        self._advance()

    def _add_pending(self, sequence: int) -> None:
        self._known.add(sequence)
        if not self._pending or sequence > self._pending[-1]:
            self._pending.append(sequence)
        else:
            bisect.insort(self._pending, sequence)

    def _advance(self) -> None:
        while self._pending and self._pending[0] not in self._unfinished:
            finished = self._pending.popleft()
            self._known.discard(finished)
            self._after_run = finished + 1 if self._after_run is None else max(self._after_run, finished + 1)


@dataclass
class TrackedShard:
    """The state of one shard.

    Args:
        window: the returned messages.
        started: when the shard was first known, in seconds of ``time.monotonic``.
    """

    window: AckWindow
    started: float
    arrived: float | None = None
    committed_at: float | None = None
    # The next sequence that the consumer will deliver; None if unknown.
    next_sequence: int | None = None
    # The first sequence that this consumer returned.
    first: int | None = None
    # After a seek by time, the next sequence is unknown until the first message arrives.
    is_after_seek: bool = False


class TrackedShards:
    """The state of the shards of one consumer.

    Args:
        options: when a shard is full.
        keeps_entries: also keep the finished messages until :meth:`settled`, besides the positions.
    """

    def __init__(self, options: TrackingOptions, *, keeps_entries: bool = False) -> None:
        self._options, self._keeps_entries = options, keeps_entries
        self._finished: dict[Shard, set[int]] = {}
        self.known: dict[Shard, TrackedShard] = {}
        self.paused: set[Shard] = set()
        self.full: set[Shard] = set()
        # Fetched messages that were not returned yet; a number is the end that was reached after the messages before
        # it. Shards without messages are left out, so that the cost of a message does not depend on their number.
        self._held: OrderedDict[Shard, deque[Message | int]] = OrderedDict()
        self._unacked: dict[tuple[Shard, int], tuple[Message, int]] = {}

    @property
    def unacked_count(self) -> int:
        """The number of returned messages that are not finished."""
        return len(self._unacked)

    @property
    def messages(self) -> list[Message]:
        """The returned messages that are not finished."""
        return [message for message, _ in self._unacked.values()]

    @property
    def is_holding(self) -> bool:
        """Whether any fetched message was not returned yet."""
        return bool(self._held)

    @property
    def closed(self) -> frozenset[Shard]:
        """The shards whose messages are not returned: paused and full ones."""
        return frozenset(self.paused | self.full)

    @property
    def can_hold(self) -> bool:
        """Whether the consumer may fetch: messages that arrive for closed shards must be kept."""
        return all(len(self._held.get(shard, ())) < self._options.buffer_size for shard in self.closed)

    def shard(self, shard: Shard, committed: int | None = None) -> TrackedShard:
        """Return the state of a shard, created if it is new."""
        if shard not in self.known:
            self.known[shard] = TrackedShard(AckWindow(committed=committed), time.monotonic())
        return self.known[shard]

    def hold(self, message: Message) -> None:
        """Keep a fetched message after the other held messages of its shard."""
        found = self.shard(message.shard)
        found.arrived, found.next_sequence = time.monotonic(), message.sequence + 1
        self._held.setdefault(message.shard, deque()).append(message)

    def reach_ends(self, ends: Positions) -> None:
        """Record that the ends of shards were reached, and that no message is between the last one and the end."""
        for shard, end in ends.items():
            found = self.shard(shard)
            if found.next_sequence is not None and found.next_sequence >= end and not found.is_after_seek:
                continue
            found.next_sequence = end
            if shard in self._held:
                self._held[shard].append(end)
            else:
                found.window.skip_to(end)

    def take(self) -> Message | None:
        """Take the next message to return, from the shard that the scheduler chooses, else from the shards in turn."""
        shard = self._choose()
        if shard is None:
            return None
        held = self._held.pop(shard)
        message = held.popleft()
        # An end is never kept without a message before it.
        assert isinstance(message, Message)
        self.track(message)
        while held and isinstance(end := held[0], int):
            self.known[shard].window.skip_to(end)
            held.popleft()
        if held:
            self._held[shard] = held
        return message

    def _choose(self) -> Shard | None:
        open_shards = (shard for shard in self._held if shard not in self.paused and shard not in self.full)
        if self._options.scheduler is None:
            return next(open_shards, None)
        ready = list(open_shards)
        if not ready:
            return None
        chosen = self._options.scheduler(ready)
        if chosen not in ready:
            raise InvalidOptionError(
                f"the scheduler chose {chosen}, which has no message",
                remedy="Return one of the shards that it is called with.",
                shards=len(ready),
            )
        return chosen

    def track(self, message: Message, readers: int = 1) -> None:
        """Record a message that is returned to this number of readers."""
        found = self.shard(message.shard)
        if found.is_after_seek:
            found.is_after_seek = False
            self._seek(message.shard, message.sequence)
        if found.first is None:
            found.first = message.sequence
        found.window.deliver(message.sequence)
        self._unacked[message.shard, message.sequence] = (message, readers)

    def acknowledge(self, shard: Shard, sequence: int) -> bool:
        """Record that one reader has finished a message; return whether it was the last reader."""
        if (shard, sequence) not in self._unacked:
            return False
        message, readers = self._unacked[shard, sequence]
        if readers > 1:
            self._unacked[shard, sequence] = (message, readers - 1)
            return False
        del self._unacked[shard, sequence]
        is_finished = self.known[shard].window.acknowledge(sequence)
        if is_finished and self._keeps_entries:
            self._finished.setdefault(shard, set()).add(sequence)
        return is_finished

    def becomes_full(self, shard: Shard) -> bool:
        """Return whether too many messages of a shard are unfinished, so that it becomes full."""
        return shard not in self.full and len(self.shard(shard).window) >= self._options.full_at

    def is_drained(self, shard: Shard) -> bool:
        """Return whether few enough messages of a full shard are unfinished, so that it resumes."""
        return shard in self.full and len(self.shard(shard).window) <= self._options.drop_at

    def committable(self, chosen: Collection[str | Shard] | None = None) -> dict[Shard, int]:
        """Return the positions to commit, of all shards or of these shards and streams."""
        return {
            shard: position
            for shard, found in sorted(self.known.items())
            if (position := found.window.committable) is not None and _is_chosen(shard, chosen)
        }

    def finished(self, chosen: Collection[str | Shard] | None = None) -> dict[Shard, list[int]]:
        """Return the messages that are finished and not settled, of all shards or of these shards and streams."""
        return {shard: sorted(found) for shard, found in sorted(self._finished.items()) if _is_chosen(shard, chosen)}

    def settled(self, entries: Mapping[Shard, Sequence[int]]) -> None:
        """Record that the broker has the acknowledgements of these messages."""
        for shard, sequences in entries.items():
            left = self._finished[shard].difference(sequences)
            if left:
                self._finished[shard] = left
            else:
                del self._finished[shard]
            if shard in self.known:
                self.known[shard].committed_at = time.monotonic()

    def committed(self, positions: Positions) -> None:
        """Record committed positions, except for shards that were revoked meanwhile."""
        for shard, position in positions.items():
            if shard in self.known:
                self.known[shard].window.committed(position)
                self.known[shard].committed_at = time.monotonic()

    def record_committed(self, positions: Positions) -> None:
        """Record the positions at the broker, whichever client committed them."""
        for shard, position in positions.items():
            self.known[shard].window.committed(position)

    def seek(self, sequence: int | None) -> None:
        """Record that every shard continues at ``sequence``; ``None`` if that is unknown until the next message."""
        self._held.clear()
        for shard, found in self.known.items():
            found.is_after_seek, found.next_sequence = True, None
            if sequence is not None:
                self._seek(shard, sequence)

    def go_to(self, positions: Positions) -> None:
        """Record that these shards continue at these sequences."""
        for shard, position in positions.items():
            self._held.pop(shard, None)
            found = self.shard(shard)
            found.is_after_seek, found.next_sequence = False, position
            self._seek(shard, position)

    def forget(self, shards: Iterable[Shard]) -> None:
        """Forget these shards, because they have another owner."""
        for shard in shards:
            self._seek(shard, 0)
            self.known.pop(shard, None)
            self._held.pop(shard, None)
            self.paused.discard(shard)
            self.full.discard(shard)

    def start(self, shard: Shard, committed: int | None) -> None:
        """Start a shard at its committed position, and forget its earlier state."""
        self.forget([shard])
        self.shard(shard, committed)

    def progress(self, fetched: float | None) -> list[ShardProgress]:
        """Return the progress of every shard.

        Args:
            fetched: when the consumer last finished a fetch.
        """
        return [
            ShardProgress(
                shard=shard,
                started=found.started,
                fetched=None if fetched is None or fetched < found.started else fetched,
                arrived=found.arrived,
                committed_at=found.committed_at,
                received=found.window.last_committed if found.next_sequence is None else found.next_sequence,
                committed=self._committed_of(shard, found.window),
                committable=found.window.committable,
                unfinished=len(found.window),
                is_paused=shard in self.paused,
            )
            for shard, found in sorted(self.known.items())
        ]

    def _seek(self, shard: Shard, sequence: int) -> None:
        if shard in self.known:
            self.known[shard].window.seek(sequence)
        for key in [key for key in self._unacked if key[0] == shard and key[1] >= sequence]:
            del self._unacked[key]

    def _committed_of(self, shard: Shard, window: AckWindow) -> int | None:
        """Return the committed position at the broker; for single entries, the first one not acknowledged there."""
        position = window.position
        if not self._keeps_entries or position is None:
            return window.last_committed
        return min(self._finished.get(shard, set()) | {position})


def _is_chosen(shard: Shard, chosen: Collection[str | Shard] | None) -> bool:
    return chosen is None or shard in chosen or shard.stream in chosen
