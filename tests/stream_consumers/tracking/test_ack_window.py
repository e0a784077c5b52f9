"""How far a shard may be committed: Faust's statements, the cases in which it loses messages, and any order at all."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stream_consumers.tracking.shards import AckWindow
from tests.support.profiles import examples


def window(committed: int | None, delivered: Iterable[int], finished: Iterable[int]) -> AckWindow:
    made = AckWindow(committed=committed)
    for sequence in delivered:
        made.deliver(sequence)
    for sequence in finished:
        assert made.acknowledge(sequence)
    return made


@pytest.mark.parametrize(
    ("committed", "delivered", "finished", "position"),
    [
        # The cases in which Faust's _new_offset goes wrong: the first message of the window is still running,
        (10, [10, 11, 12], [11, 12], 10),
        # also that of a new group, or of a group that has committed 0, which is a position,
        (None, range(7), [5, 6], None),
        (0, range(7), [5, 6], 0),
        # or it is behind markers.
        (5, [5, 9, 10], [5, 10], 6),
        (5, [5, 9, 10], [5, 9], 10),
        # Faust's statements about it, without gaps
        (None, range(1, 11), [], None),
        (None, range(1, 11), [*range(1, 5), 6, 7, 8, 10], 5),
        (None, range(1, 11), [1, *range(3, 11)], 2),
        # and with gaps.
        (1, [*range(1, 9), 10], [*range(1, 9), 10], 11),
        (1, [*range(1, 5), *range(6, 11)], [*range(1, 5), 6, 7, 8, 10], 9),
        (1, [3, 4], [3, 4], 5),
    ],
)
def test_new_offset(
    committed: int | None, delivered: Iterable[int], finished: Sequence[int], position: int | None
) -> None:
    made = window(committed, delivered, finished)
    assert (made.position, made.committable) == (position, None if position == committed else position)
    assert made.unacknowledged == tuple(sorted(set(delivered) - set(finished)))


def test_case_h_markers_at_the_end_are_passed() -> None:
    made = window(0, [0, 1, 2], [0, 1])
    made.skip_to(7)
    assert made.committable == 2
    made.acknowledge(2)
    assert made.committable == 7
    made.deliver(7)
    assert made.position == 7


class Naive:
    """The same with plain sets: what runs, what is finished, and up to where everything is."""

    def __init__(self, committed: int | None) -> None:
        self.committed = self.done = committed
        self.running: set[int] = set()
        self.finished: set[int] = set()

    def deliver(self, sequence: int) -> None:
        self.finished.discard(sequence)
        self.running.add(sequence)

    def acknowledge(self, sequence: int) -> bool:
        if sequence not in self.running:
            return False
        self.running.remove(sequence)
        self.finished.add(sequence)
        self.pass_finished()
        return True

    def skip_to(self, sequence: int) -> None:
        if not self.running:
            self.done = sequence if self.done is None else max(self.done, sequence)
        elif sequence - 1 > max(self.running | self.finished):
            self.finished.add(sequence - 1)

    def seek(self, sequence: int) -> None:
        self.running = {s for s in self.running if s < sequence}
        self.finished = {s for s in self.finished if s < sequence}
        self.done = None if self.done is None else min(self.done, sequence)
        self.pass_finished()

    def pass_finished(self) -> None:
        passed = {s for s in self.finished if not self.running or s < min(self.running)}
        self.finished -= passed
        ends = [s + 1 for s in passed] + ([] if self.done is None else [self.done])
        self.done = max(ends, default=None)

    def position(self) -> int | None:
        if self.done is None:
            return None
        position = min([self.done, *self.running])
        return None if position == 0 and self.committed is None else position


SEQUENCES = st.integers(0, 12)
KINDS = ["deliver", "deliver", "next", "next", "ack", "ack", "ack", "skip", "seek", "commit", "fail"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), SEQUENCES), max_size=60)


@settings(max_examples=examples(400), deadline=None)
@given(committed=st.none() | SEQUENCES, steps=STEPS)
@example(committed=None, steps=[("deliver", 0), ("ack", 0), ("seek", 0)])
@example(committed=None, steps=[("skip", 0)])
@example(committed=0, steps=[("deliver", 0), ("ack", 0), ("seek", 0)])
@example(committed=None, steps=[("deliver", 5), ("ack", 5), ("deliver", 9), ("ack", 9), ("seek", 7)])
def test_any_order_of_deliveries_acks_duplicates_seeks_and_failed_commits(
    committed: int | None, steps: list[tuple[str, int]]
) -> None:
    made, naive = AckWindow(committed=committed), Naive(committed)
    reading = 0
    for step, number in steps:
        if step in {"deliver", "next"}:
            sequence = number if step == "deliver" else reading
            reading = sequence + 1 + number % 3
            made.deliver(sequence)
            naive.deliver(sequence)
        elif step == "ack":
            assert made.acknowledge(number) == naive.acknowledge(number)
        elif step == "skip":
            made.skip_to(number)
            naive.skip_to(number)
        elif step == "seek":
            made.seek(number)
            naive.seek(number)
            reading = number
        elif step == "commit" and made.committable is not None:
            assert made.last_committed is None or made.committable > made.last_committed, "backwards"
            naive.committed = made.committable
            made.committed(made.committable)
        running = sorted(naive.running)
        assert made.unacknowledged == tuple(running)
        assert made.position == naive.position()
        if made.position is not None and running:
            assert made.position <= running[0], "past an unfinished message"
        if made.committable is not None:
            assert made.committable == made.position
    # Nothing blocks for ever.
    for sequence in made.unacknowledged:
        made.acknowledge(sequence)
        naive.acknowledge(sequence)
    assert made.position == naive.position()


def test_a_long_window_takes_no_longer_per_message() -> None:
    begin = time.monotonic()
    made = AckWindow()
    for sequence in range(100_000):
        made.deliver(sequence)
    for sequence in reversed(range(100_000)):
        made.acknowledge(sequence)
        assert made.position == (100_000 if sequence == 0 else None)
    assert time.monotonic() - begin < 10
