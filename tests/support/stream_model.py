"""What a consumer should do, as simple as it can be said: a dict of lists, and a place in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from stream_consumers.messages import Shard
from stream_consumers.testing.harness import SHARDS, STREAMS
from tests.support.contract_backends import Backend


class Sent(NamedTuple):
    """A message as it is in the stream."""

    sequence: int
    timestamp_ms: int
    payload: bytes


Logs = dict[Shard, list[Sent]]


def empty_logs() -> Logs:
    """Every shard of every stream, without messages."""
    return {Shard(stream, number): [] for stream in STREAMS for number in range(SHARDS)}


def append(backend: Backend, log: list[Sent], sequence: int, timestamp_ms: int, payload: bytes) -> None:
    """A message was sent; checks its sequence."""
    if log:
        assert sequence > log[-1].sequence
    elif backend.first_sequence is not None:
        assert sequence == backend.first_sequence
    if log and backend.is_in_order_of_time:
        timestamp_ms = max(timestamp_ms, log[-1].timestamp_ms)
    log.append(Sent(sequence, timestamp_ms, payload))


class ConsumerModel:
    """A consumer.

    Args:
        backend: where it reads.
        logs: what is in the streams.
        streams: which it is for.
        is_live: it waits at the end.
        is_latest: it starts at the end.
    """

    def __init__(self, backend: Backend, logs: Logs, streams: Iterable[str], *, is_live: bool, is_latest: bool) -> None:
        self._backend, self._logs, self._streams, self._is_live = backend, logs, frozenset(streams), is_live
        # The shards that were chosen, and those that are read since the last move; None: all of the streams.
        self._chosen: frozenset[Shard] | None = None
        self._reading: frozenset[Shard] | None = None
        self.go_to_edge(is_end=is_latest)

    # reading

    def next_ones(self) -> dict[Shard, Sent]:
        """The next message of each shard that has one."""
        places = {shard: self._place(shard) for shard in self._of(self._reading)}
        return {shard: self._logs[shard][place] for shard, place in places.items() if place < len(self._logs[shard])}

    def certain_ones(self) -> dict[Shard, Sent]:
        """Those of them that have to come: a replay may leave out what was sent after it began."""
        return {
            shard: sent
            for shard, sent in self.next_ones().items()
            if self._is_live or self._place(shard) < self._ends[shard]
        }

    def take(self, shard: Shard, sent: Sent) -> None:
        """A message came; it must be the next one of its shard."""
        assert self.next_ones().get(shard) == sent
        self._places[shard] = self._place(shard) + 1
        self._begun.add(shard)

    # moving

    def go_to_edge(self, *, is_end: bool) -> None:
        """A rewind to the beginning or the end."""
        places = {shard: len(log) if is_end else 0 for shard, log in self._logs.items()}
        self._go_to(places, lambda sent: True)

    def go_to_first(self, is_wanted: Callable[[Sent], bool]) -> bool:
        """A seek, or a rewind to a sequence: each shard goes on with its first such message; false if there is none."""
        if not any(is_wanted(sent) for log in self._of(self._chosen).values() for sent in log):
            return False
        self._go_to(dict.fromkeys(self._logs, 0), is_wanted)
        return True

    def go_to(self, positions: Mapping[Shard, int]) -> list[Shard]:
        """Of these shards, those that are read go on at these sequences; returns them."""
        found = sorted(self._of(self._reading).keys() & positions.keys())
        for shard in found:
            self._places[shard] = sum(sent.sequence < positions[shard] for sent in self._logs[shard])
            self._begun.add(shard)
        return found

    def _go_to(self, places: dict[Shard, int], is_wanted: Callable[[Sent], bool]) -> None:
        self._reading, self._places = self._chosen, places
        # Of a shard that has not begun, nothing comes before the first message that is wanted.
        self._begun: set[Shard] = set()
        self._is_wanted = is_wanted
        # Where a replay ends at the earliest.
        self._ends = {shard: len(log) for shard, log in self._logs.items()}

    def _place(self, shard: Shard) -> int:
        log, place = self._logs[shard], self._places[shard]
        while shard not in self._begun and place < len(log) and not self._is_wanted(log[place]):
            place += 1
        return place

    # choosing

    def may_assign(self, shard: Shard) -> bool:
        """Whether it can be assigned; then it is."""
        if shard.stream not in self._streams:
            return False
        self._chosen = (self._chosen or frozenset()) | {shard}
        return True

    def may_unassign(self, shard: Shard) -> bool:
        """Whether it can be unassigned; then it is."""
        assigned = self._known() if self._chosen is None else self._chosen
        if shard not in assigned or len(assigned) == 1:
            return False
        self._chosen = assigned - {shard}
        return True

    def _known(self) -> frozenset[Shard]:
        return frozenset(s for s, log in self._of(None).items() if log or self._backend.has_all_shards)

    def _of(self, shards: frozenset[Shard] | None) -> Logs:
        return {
            shard: log
            for shard, log in self._logs.items()
            if shard.stream in self._streams and (shards is None or shard in shards)
        }


class GroupModel:
    """What a group may commit, and must, while one member works on its messages in any order.

    Args:
        logs: what is in the streams.
    """

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self.committed: Mapping[Shard, int] = {}
        self.begin()

    def begin(self) -> None:
        """A member starts: it knows what is committed, and nothing else."""
        self.running: dict[Shard, set[int]] = {shard: set() for shard in self._logs}
        self._finished: dict[Shard, set[int]] = {shard: set() for shard in self._logs}
        self._moved: set[Shard] = set()
        self._first: dict[Shard, int] = {}
        # What is behind here will be delivered again, and is not finished before.
        self._limit: dict[Shard, int] = {}

    @property
    def positions(self) -> Mapping[Shard, int]:
        """Where shards go on that are moved to what is committed: there, or where this member began with them."""
        return {**self._first, **self.committed}

    @property
    def places(self) -> list[tuple[Shard, int]]:
        """The messages that are being worked on."""
        return [(shard, sequence) for shard in sorted(self.running) for sequence in sorted(self.running[shard])]

    def deliver(self, shard: Shard, sequence: int) -> None:
        """A message is handed out: it is not finished, whatever it was before."""
        self._first.setdefault(shard, sequence)
        if shard in self._moved:
            self._moved.discard(shard)
            self._go_back(shard, sequence)
        self._finished[shard].discard(sequence)
        self.running[shard].add(sequence)
        if shard in self._limit:
            self._limit[shard] = max(self._limit[shard], sequence + 1)

    def finish(self, shard: Shard, sequence: int) -> None:
        """A message is finished."""
        self.running[shard].remove(sequence)
        self._finished[shard].add(sequence)

    def go_to(self, shards: Iterable[Shard]) -> None:
        """These shards go on at :attr:`positions`."""
        for shard in shards:
            self._moved.discard(shard)
            self._go_back(shard, self.positions[shard])

    def move(self, sequence: int | None) -> None:
        """Everything goes on at this sequence; without one, each shard where its next message tells."""
        self._moved, self._limit = set(self._logs), {}
        if sequence is not None:
            for shard in self._logs:
                self._go_back(shard, sequence)

    def check(self, committed: Mapping[Shard, int], *, is_done: bool) -> None:
        """What is committed after a commit that was done, or that failed."""
        if not is_done:
            assert committed == self.committed
        for shard, log in self._logs.items():
            before, after, running = self.committed.get(shard), committed.get(shard), self.running[shard]
            finished = [s for s in self._finished[shard] if s < min(running, default=s + 1)]
            if after is None:
                assert before is None, "forgotten"
                assert not (finished and is_done), "nothing is committed"
                continue
            assert after >= (before or 0), "backwards"
            assert after == before or after <= min(running, default=after), "past an unfinished message"
            assert after == before or after <= self._limit.get(shard, after), "past what comes again"
            assert after <= log[-1].sequence + 1, "past the end"
            assert not is_done or after > max(finished, default=-1), "a finished message is left out"
        self.committed = committed

    def _go_back(self, shard: Shard, sequence: int) -> None:
        self._limit[shard] = sequence
        for known in (self.running, self._finished):
            known[shard] = {s for s in known[shard] if s < sequence}
