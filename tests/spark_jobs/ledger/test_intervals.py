"""Intervals against Python sets of the same numbers."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from stream_consumers.batches import Range

PAIRS = st.lists(st.tuples(st.integers(-3, 25), st.integers(-3, 25)), max_size=8)
ALL = range(-5, 30)


def numbers(pairs):
    return {n for start, end in pairs for n in range(start, end)}


def content(intervals):
    return {n for n in ALL if n in intervals}


@settings(deadline=None)
@given(PAIRS)
def test_normal_form(pairs):
    ranges = Intervals.of(*pairs).ranges
    assert content(Intervals.of(*pairs)) == numbers(pairs)
    assert all(part.start < part.end for part in ranges)
    assert all(left.end < right.start for left, right in pairwise(ranges))
    assert Intervals.of(*reversed(pairs)) == Intervals.of(*pairs)
    assert bool(Intervals.of(*pairs)) == bool(numbers(pairs))


@settings(deadline=None)
@given(PAIRS, PAIRS)
def test_set_operations(left, right):
    a, b = Intervals.of(*left), Intervals.of(*right)
    assert a | b == Intervals.of(*left, *right)
    assert content(a & b) == numbers(left) & numbers(right)
    assert content(a - b) == numbers(left) - numbers(right)
    assert (a - b) | (a & b) == a
    assert (a & b) == Intervals.of(*(a & b).ranges)
    assert (a - b) == Intervals.of(*(a - b).ranges)


@settings(deadline=None)
@given(PAIRS, st.none() | st.integers(-3, 25))
def test_json_round_trip(pairs, origin):
    intervals = Intervals.of(*pairs, *([] if origin is None else [(MIN_SEQUENCE, origin)]))
    assert Intervals.from_json(intervals.to_json()) == intervals
    if origin is not None:
        assert intervals.to_json()[0][0] is None


@settings(deadline=None)
@given(PAIRS, st.integers(-3, 28), st.integers(-3, 28))
def test_first_gap_is_the_lowest_hole_behind_the_first_interval(pairs, origin, end):
    covered = Intervals.of((MIN_SEQUENCE, origin), *pairs)
    holes = [n for n in range(origin, end) if n not in numbers(pairs)]
    gap = covered.first_gap(end)
    if not holes:
        assert gap is None
    else:
        assert gap is not None
        run = next((n for n in range(holes[0], end) if n not in holes), end)
        assert gap == Range(holes[0], run)
    assert covered.position == next(n for n in range(origin, 40) if n not in numbers(pairs))
