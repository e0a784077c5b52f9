"""The shards of a tracked consumer: what was handed out, what is held, how far each may be committed. No locks here."""

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


@dataclass
class TrackedShard:
    """One shard.

    Args:
        window: what was handed out.
        started: when it was first known, in seconds of ``time.monotonic``.
    """

    window: AckWindow
    started: float
    arrived: float | None = None
    committed_at: float | None = None
    # The next sequence that the consumer will deliver, as far as it is known.
    next_sequence: int | None = None
    # Where this consumer began.
    first: int | None = None
    # After a seek by time it is unknown where it goes on before the first message.
    is_sought: bool = False


class TrackedShards:
    """The shards of one consumer.

    Args:
        options: when a shard is full.
        keeps_entries: remember which messages were finished until :meth:`settled`, besides the positions.
    """

    def __init__(self, options: TrackingOptions, *, keeps_entries: bool = False) -> None:
        self._options, self._keeps_entries = options, keeps_entries
        self._finished: dict[Shard, set[int]] = {}
        self.known: dict[Shard, TrackedShard] = {}
        self.paused: set[Shard] = set()
        self.full: set[Shard] = set()
        # Fetched and not handed out yet; a number is the end that was reached behind the messages before it. Shards
        # that have none are not in here, so that a message costs the same however many shards there are.
        self._held: OrderedDict[Shard, deque[Message | int]] = OrderedDict()
        self._unacked: dict[tuple[Shard, int], tuple[Message, int]] = {}

    @property
    def unacked_count(self) -> int:
        """How many were handed out and are not finished."""
        return len(self._unacked)

    @property
    def messages(self) -> list[Message]:
        """Those that were handed out and are not finished."""
        return [message for message, _ in self._unacked.values()]

    @property
    def is_holding(self) -> bool:
        """Whether anything was fetched and not handed out."""
        return bool(self._held)

    @property
    def closed(self) -> frozenset[Shard]:
        """The shards of which nothing is handed out."""
        return frozenset(self.paused | self.full)

    @property
    def can_hold(self) -> bool:
        """Whether every shard may be fetched: what arrives of a closed one must be kept."""
        return all(len(self._held.get(shard, ())) < self._options.buffer_size for shard in self.closed)

    def shard(self, shard: Shard, committed: int | None = None) -> TrackedShard:
        """This shard, known from now on."""
        if shard not in self.known:
            self.known[shard] = TrackedShard(AckWindow(committed=committed), time.monotonic())
        return self.known[shard]

    def hold(self, message: Message) -> None:
        """Keep a message that was fetched, behind those that are kept."""
        found = self.shard(message.shard)
        found.arrived, found.next_sequence = time.monotonic(), message.sequence + 1
        self._held.setdefault(message.shard, deque()).append(message)

    def reach(self, ends: Positions) -> None:
        """The ends of shards were reached; what is between the last message and there is no message."""
        for shard, end in ends.items():
            found = self.shard(shard)
            if found.next_sequence is not None and found.next_sequence >= end and not found.is_sought:
                continue
            found.next_sequence = end
            if shard in self._held:
                self._held[shard].append(end)
            else:
                found.window.skip_to(end)

    def take(self) -> Message | None:
        """The next message that may be handed out, of the shard that the scheduler chooses; else shards take turns."""
        shard = self._choose()
        if shard is None:
            return None
        held = self._held.pop(shard)
        message = held.popleft()
        # Ends are kept behind messages only.
        assert isinstance(message, Message)
        self.track(message)
        while held and isinstance(end := held[0], int):
            self.known[shard].window.skip_to(end)
            held.popleft()
        if held:
            self._held[shard] = held
        return message

    def _choose(self) -> Shard | None:
        open_ones = (shard for shard in self._held if shard not in self.paused and shard not in self.full)
        if self._options.scheduler is None:
            return next(open_ones, None)
        ready = list(open_ones)
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
        """Note a message that is handed out to this number of readers."""
        found = self.shard(message.shard)
        if found.is_sought:
            found.is_sought = False
            self._seek(message.shard, message.sequence)
        if found.first is None:
            found.first = message.sequence
        found.window.deliver(message.sequence)
        self._unacked[message.shard, message.sequence] = (message, readers)

    def acknowledge(self, shard: Shard, sequence: int) -> bool:
        """One reader has finished a message; whether that was the last one."""
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

    def is_too_full(self, shard: Shard) -> bool:
        """Whether so much of it is unfinished that no more should be handed out."""
        return shard not in self.full and len(self.shard(shard).window) >= self._options.full_at

    def is_drained(self, shard: Shard) -> bool:
        """Whether a full shard has so little unfinished that it goes on."""
        return shard in self.full and len(self.shard(shard).window) <= self._options.drop_at

    def committable(self, chosen: Collection[str | Shard] | None = None) -> dict[Shard, int]:
        """The positions to commit, of all shards or of these shards and streams."""
        return {
            shard: position
            for shard, found in sorted(self.known.items())
            if (position := found.window.committable) is not None and _is_chosen(shard, chosen)
        }

    def finished(self, chosen: Collection[str | Shard] | None = None) -> dict[Shard, list[int]]:
        """The messages that are finished and not settled, of all shards or of these shards and streams."""
        return {shard: sorted(found) for shard, found in sorted(self._finished.items()) if _is_chosen(shard, chosen)}

    def settled(self, entries: Mapping[Shard, Sequence[int]]) -> None:
        """It is kept that these are finished."""
        for shard, sequences in entries.items():
            left = self._finished[shard].difference(sequences)
            if left:
                self._finished[shard] = left
            else:
                del self._finished[shard]
            if shard in self.known:
                self.known[shard].committed_at = time.monotonic()

    def committed(self, positions: Positions) -> None:
        """These were committed; what was lost meanwhile is left out."""
        for shard, position in positions.items():
            if shard in self.known:
                self.known[shard].window.committed(position)
                self.known[shard].committed_at = time.monotonic()

    def learn(self, positions: Positions) -> None:
        """Note positions that the broker has, whichever client committed them."""
        for shard, position in positions.items():
            self.known[shard].window.committed(position)

    def seek(self, sequence: int | None) -> None:
        """Every shard goes on at ``sequence``; ``None`` where that is unknown before the next message."""
        self._held.clear()
        for shard, found in self.known.items():
            found.is_sought, found.next_sequence = True, None
            if sequence is not None:
                self._seek(shard, sequence)

    def go_to(self, positions: Positions) -> None:
        """These shards go on at these sequences."""
        for shard, position in positions.items():
            self._held.pop(shard, None)
            found = self.shard(shard)
            found.is_sought, found.next_sequence = False, position
            self._seek(shard, position)

    def forget(self, shards: Iterable[Shard]) -> None:
        """Forget everything about these shards: they have another owner."""
        for shard in shards:
            self._seek(shard, 0)
            self.known.pop(shard, None)
            self._held.pop(shard, None)
            self.paused.discard(shard)
            self.full.discard(shard)

    def start(self, shard: Shard, committed: int | None) -> None:
        """This shard begins anew, at what is committed."""
        self.forget([shard])
        self.shard(shard, committed)

    def progress(self, fetched: float | None) -> list[ShardProgress]:
        """How far every shard is.

        Args:
            fetched: when the consumer last came back from fetching.
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
        for place in [place for place in self._unacked if place[0] == shard and place[1] >= sequence]:
            del self._unacked[place]

    def _committed_of(self, shard: Shard, window: AckWindow) -> int | None:
        """The next sequence to read as the broker has it.

        Where single messages are kept: the first that is not finished, or was not sent to the broker.
        """
        position = window.position
        if not self._keeps_entries or position is None:
            return window.last_committed
        return min(self._finished.get(shard, set()) | {position})


def _is_chosen(shard: Shard, chosen: Collection[str | Shard] | None) -> bool:
    return chosen is None or shard in chosen or shard.stream in chosen
