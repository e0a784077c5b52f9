"""Random operations on a consumer of every backend, next to a model that is obviously right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from stream_consumers.consumer import Consumer, Edge, PositionCommitter, Positions
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import BrokerUnavailableError, NotSubscribedError, OutOfBoundsError, StreamEndedError
from stream_consumers.messages import Message, Shard, from_milliseconds
from stream_consumers.options import AutoStreamReset, ConsumerMode
from stream_consumers.testing.harness import SHARDS, STREAMS, Stream
from stream_consumers.tracking.commits import CommitResult, create_committer
from stream_consumers.tracking.consumer import TrackedConsumer
from stream_consumers.tracking.options import TrackingOptions
from stream_consumers.urls import StreamUrl
from tests.support.contract_backends import BACKENDS, Backend
from tests.support.profiles import examples
from tests.support.topics import unique_group


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


# For what has to come: where it may be on its way, and where it is there.
PATIENCE, SHORT_PATIENCE = 10.0, 0.2
# For what must not come.
MOMENT = 0.03
EVERY_SHARD = [Shard(stream, number) for stream in STREAMS for number in range(SHARDS)]
# A stream that is there without such a shard, and a stream that nobody reads.
OTHERS = [Shard(STREAMS[0], 7), Shard("others")]
TIMES = st.integers(1_000, 1_006)
CHOICES = st.sampled_from(EVERY_SHARD[:2] * 3 + EVERY_SHARD + OTHERS)
PLACES = st.sampled_from(EVERY_SHARD[:1] * 6 + EVERY_SHARD[:2] * 3 + EVERY_SHARD)
BATCHES = st.lists(st.tuples(PLACES, TIMES), min_size=1, max_size=8)
# Of what there is by then: what is drawn must not depend on what a broker does when.
PICKS = st.integers(0, 40)
PAYLOAD_SIZES = st.sampled_from([0, 20, 400])
# Commits only when it is told to, and tries none again by itself.
BY_HAND = TrackingOptions(
    commit_interval_seconds=None, commit_every=None, retry_seconds=3_600, retry_limit_seconds=3_600, close_seconds=0
)
STEPS = 50
# Bounded by what a place in a broker costs; a soak runs twenty times as many.
RUNS = {"memory": 40, "file": 30, "kafka": 10, "redis": 12}


class StreamMachine(RuleBasedStateMachine):
    """Something that reads streams while they grow.

    Args:
        backend: where.
        folder: for its files.
        address: of its server.
    """

    consumer: Consumer
    model: ConsumerModel
    is_live = True

    def __init__(self, backend: Backend, folder: Path, address: str) -> None:
        super().__init__()
        self.backend, self.stream = backend, Stream(backend.create(folder, address))
        self.patience = SHORT_PATIENCE if backend.reads_at_once else PATIENCE
        self.moment = 0 if backend.reads_at_once else MOMENT
        self.logs = empty_logs()
        self.producer = create_producer(self.stream.url())
        self.count = 0

    @rule(batch=BATCHES, size=PAYLOAD_SIZES)
    def send(self, batch: list[tuple[Shard, int]], size: int) -> None:
        made = []
        for shard, timestamp_ms in batch:
            payload = b"%d" % self.count + b"." * size
            self.count += 1
            receipt = self.producer.send(payload, stream=shard.stream, shard=shard.id, timestamp_ms=timestamp_ms)
            made.append((receipt, payload))
        self.producer.flush()
        for receipt, payload in made:
            append(self.backend, self.logs[receipt.shard], receipt.sequence, receipt.timestamp_ms, payload)

    # reading

    @rule(count=st.integers(1, 8))
    def read(self, count: int) -> None:
        for _ in range(count):
            if not self.pull(self.patience if self.model.certain_ones() or not self.is_live else self.moment):
                break

    @rule()
    def read_without_waiting(self) -> None:
        self.pull(0)

    def pull(self, timeout: float) -> bool:
        """Ask for a message; whether one came."""
        certain = self.model.certain_ones()
        try:
            message = self.consumer.next(timeout)
        except StreamEndedError:
            assert not self.is_live
            assert not certain, "it ended too early"
            return False
        if message is not None:
            self.model.take(message.shard, sent(message))
            self.took(message)
        elif timeout or self.backend.reads_at_once:
            assert self.is_live, "it does not end"
            assert not certain, "nothing comes"
        return message is not None

    def took(self, message: Message) -> None:
        """A message came."""

    # moving

    @rule(milliseconds=TIMES | st.sampled_from([-1, 0, 1_007]))
    def seek(self, milliseconds: int) -> None:
        moment = from_milliseconds(milliseconds)
        is_possible = succeeds(lambda: self.consumer.seek(moment), OutOfBoundsError)
        assert is_possible == self.model.go_to_first(lambda sent: sent.timestamp_ms >= milliseconds)
        if is_possible:
            self.moved(None)

    @rule(which=PICKS, step=st.sampled_from([0, 0, 1, -1]))
    def rewind(self, which: int, step: int) -> None:
        known = sorted({sent.sequence for log in self.logs.values() for sent in log})
        target = known[which % len(known)] + step if known else step
        is_possible = succeeds(lambda: self.consumer.rewind(target), OutOfBoundsError)
        assert is_possible == self.model.go_to_first(lambda sent: sent.sequence >= target)
        if is_possible:
            self.moved(target)

    @rule(edge=st.sampled_from(Edge))
    def rewind_to_edge(self, edge: Edge) -> None:
        self.consumer.rewind(edge)
        self.model.go_to_edge(is_end=edge is Edge.END)
        self.moved(None if edge is Edge.END else 0)

    def moved(self, sequence: int | None) -> None:
        """The consumer goes on somewhere else."""

    # choosing

    @rule(shard=CHOICES)
    def assign(self, shard: Shard) -> None:
        is_possible = succeeds(lambda: self.consumer.assign(shard), NotSubscribedError)
        assert is_possible == self.model.may_assign(shard)

    @rule(shard=CHOICES)
    def unassign(self, shard: Shard) -> None:
        is_possible = succeeds(lambda: self.consumer.unassign(shard), NotSubscribedError)
        assert is_possible == self.model.may_unassign(shard)

    # the end

    def teardown(self) -> None:
        try:
            if hasattr(self, "consumer"):
                while self.model.certain_ones():
                    self.pull(self.patience)
                self.pull(self.moment if self.is_live else self.patience)
                self.close()
        finally:
            self.producer.close()
            self.backend.remove(self.stream.location)

    def close(self) -> None:
        self.consumer.close()
        with pytest.raises(StreamEndedError):
            self.consumer.next(0)


class ConsumerMachine(StreamMachine):
    """A consumer without a group."""

    @initialize(
        batch=st.just([]) | BATCHES,
        streams=st.sampled_from([STREAMS[:1], STREAMS]),
        kind=st.sampled_from([(True, False), (True, False), (True, True), (False, False)]),
    )
    def begin(self, batch: list[tuple[Shard, int]], streams: tuple[str, ...], kind: tuple[bool, bool]) -> None:
        self.streams, (self.is_live, self.is_latest) = streams, kind
        self.send(batch, 20)
        self.open()

    def open(self) -> None:
        self.consumer = create_consumer(
            self.stream.url(*self.streams),
            live=self.is_live,
            reset=AutoStreamReset.LATEST if self.is_latest else AutoStreamReset.EARLIEST,
        )
        self.model = ConsumerModel(
            self.backend, self.logs, self.streams, is_live=self.is_live, is_latest=self.is_latest
        )

    @rule()
    @precondition(lambda self: self.count)
    def open_again(self) -> None:
        self.close()
        self.open()


class FailingCommitter:
    """Keeps positions where another one does, unless it is to fail."""

    is_transactional = False

    def __init__(self, committer: PositionCommitter) -> None:
        self.committer, self.is_failing = committer, False

    def commit(self, positions: Positions) -> None:
        if self.is_failing:
            raise BrokerUnavailableError("nobody answers", remedy="Wait.")
        self.committer.commit(positions)

    def committed(self) -> Positions:
        return self.committer.committed()


class GroupMachine(StreamMachine):
    """A member of a group that finishes messages in any order, ends or dies, and goes on at what is committed."""

    tracked: TrackedConsumer

    @initialize(batch=st.just([]) | BATCHES)
    def begin(self, batch: list[tuple[Shard, int]]) -> None:
        self.send(batch, 20)
        self.group, self.works = unique_group(), GroupModel(self.logs)
        self.open()

    def open(self, *, is_done: bool = True) -> None:
        """A new consumer; ``is_done`` is whether the one before has committed what it could."""
        mode = self.backend.positions_mode
        assert mode is not None
        group = self.group if mode is ConsumerMode.RESUMABLE else None
        consumer = create_consumer(self.stream.url(), mode=mode, group=group)
        self.committer = FailingCommitter(
            create_committer(StreamUrl.parse(self.stream.url()), self.group, consumer=consumer)
        )
        self.consumer = self.tracked = TrackedConsumer(consumer, self.committer, options=BY_HAND)
        self.works.check(self.committer.committed(), is_done=is_done)
        assert self.tracked.seek_to_committed() == self.works.committed
        self.works.begin()
        self.model = ConsumerModel(self.backend, self.logs, STREAMS[:1], is_live=True, is_latest=False)
        self.model.go_to(self.works.committed)

    def took(self, message: Message) -> None:
        self.works.deliver(message.shard, message.sequence)

    def moved(self, sequence: int | None) -> None:
        self.works.move(sequence)

    @rule(choices=st.lists(PICKS, min_size=1, max_size=6))
    def acknowledge(self, choices: list[int]) -> None:
        for which in choices[: len(self.works.places)]:
            self.finish(*self.works.places[which % len(self.works.places)])

    @rule(count=st.integers(1, 3))
    def read_and_acknowledge_everything(self, count: int) -> None:
        self.read(count)
        for place in self.works.places:
            self.finish(*place)

    def finish(self, shard: Shard, sequence: int) -> None:
        message = Message(shard, sequence, 0, b"")
        assert self.tracked.ack(message)
        assert not self.tracked.ack(message), "it was finished before"
        self.works.finish(shard, sequence)

    @rule(is_failing=st.sampled_from([False, False, True]))
    def commit(self, is_failing: bool) -> None:
        self.committer.is_failing = is_failing
        result = self.tracked.commit()
        assert result in {CommitResult.NOTHING_TO_DO, CommitResult.FAILED if is_failing else CommitResult.COMMITTED}
        self.works.check(self.committer.committed(), is_done=not is_failing)
        self.committer.is_failing = False

    @rule()
    def seek_to_committed(self) -> None:
        assert self.tracked.seek_to_committed() == self.works.committed
        self.works.go_to(self.model.go_to(self.works.positions))

    @rule(is_crash=st.booleans())
    def open_again(self, is_crash: bool) -> None:
        self.committer.is_failing = is_crash
        self.close()
        self.open(is_done=not is_crash)

    def close(self) -> None:
        with suppress(BrokerUnavailableError):
            self.tracked.close(timeout_seconds=0)
        with pytest.raises(StreamEndedError):
            self.consumer.next(0)


def sent(message: Message) -> Sent:
    assert message.payload is not None
    return Sent(message.sequence, message.timestamp_ms, message.payload)


def succeeds(call: Callable[[], None], refusal: type[Exception]) -> bool:
    try:
        call()
    except refusal:
        return False
    return True


def run(machine: type[StreamMachine], backend: Backend, request: pytest.FixtureRequest, folder: Path) -> None:
    address = request.getfixturevalue(backend.service) if backend.service else ""
    run_state_machine_as_test(
        lambda: machine(backend, folder, address),
        settings=settings(
            max_examples=examples(RUNS[backend.name]),
            stateful_step_count=STEPS,
            suppress_health_check=list(HealthCheck),
        ),
    )


def on(backends: Iterable[Backend]) -> Any:
    """A real broker takes a second for each place, and for each member that comes back."""
    slow = {"kafka": [pytest.mark.slow]}
    return pytest.mark.parametrize(
        "backend", [pytest.param(one, id=one.name, marks=slow.get(one.name, [])) for one in backends]
    )


@pytest.mark.hypothesis
@on(BACKENDS)
def test_any_operations_on_a_consumer_do_what_the_model_does(
    backend: Backend, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run(ConsumerMachine, backend, request, tmp_path)


@pytest.mark.hypothesis
@on(one for one in BACKENDS if one.positions_mode is not None)
def test_a_group_goes_on_behind_what_is_finished_whatever_happens(
    backend: Backend, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run(GroupMachine, backend, request, tmp_path)
