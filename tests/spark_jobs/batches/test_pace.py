"""The size of the next batch, by how long the last one took."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.batches.pace import FEWEST_RECORDS, Pace
from stream_consumers.options import Limits

LIMITS = Limits(max_records=1_000_000)


@given(st.integers(1, 10_000_000), st.lists(st.tuples(st.integers(0, 2_000_000), st.floats(0, 1e6)), max_size=20))
def test_it_stays_within_the_limits(most: int, batches: list[tuple[int, float]]) -> None:
    pace = Pace(Limits(max_records=most, max_bytes=77))
    for records, seconds in batches:
        pace.took(records, seconds)
        assert min(FEWEST_RECORDS, most) <= pace.limits.max_records <= most
        assert pace.limits.max_bytes == 77


@given(st.floats(100, 100_000))
def test_batches_come_to_take_the_target_time(speed: float) -> None:
    """At a constant speed of so many messages a second, and with more to read than a batch holds."""
    pace = Pace(LIMITS, target_seconds=20)
    for _ in range(10):
        pace.took(pace.limits.max_records, pace.limits.max_records / speed)
    wanted = min(LIMITS.max_records, 20 * speed)
    assert 0.9 * wanted <= pace.limits.max_records <= 1.1 * wanted


def test_small_batches_say_nothing_of_large_ones() -> None:
    pace = Pace(LIMITS, target_seconds=20)
    pace.took(1_000_000, 80)
    assert pace.limits.max_records == 250_000
    for _ in range(20):
        pace.took(10, 0.1)
    assert pace.limits.max_records == 250_000


def test_where_the_bytes_are_the_limit_slow_batches_make_the_next_ones_smaller_all_the_same() -> None:
    pace = Pace(LIMITS, target_seconds=20)
    for expected in (250_000, 62_500, 15_625, 3_906, 1_953):
        pace.took(5_000, 40)
        assert pace.limits.max_records == expected


def test_one_small_batch_that_was_slow_says_little() -> None:
    pace = Pace(LIMITS, target_seconds=20)
    pace.took(1, 60)
    assert pace.limits.max_records == LIMITS.max_records // 4
