"""The size of the next batch, by how long the last one took."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.batches.run_control import FEWEST_RECORDS, BatchSizer
from stream_consumers.options import Limits

LIMITS = Limits(max_records=1_000_000)


@given(st.integers(1, 10_000_000), st.lists(st.tuples(st.integers(0, 2_000_000), st.floats(0, 1e6)), max_size=20))
def test_it_stays_within_the_limits(most: int, batches: list[tuple[int, float]]) -> None:
    sizer = BatchSizer(Limits(max_records=most, max_bytes=77))
    for records, seconds in batches:
        sizer.adapt(records, seconds)
        assert min(FEWEST_RECORDS, most) <= sizer.limits.max_records <= most
        assert sizer.limits.max_bytes == 77


@given(st.floats(100, 100_000))
def test_batches_come_to_take_the_target_time(speed: float) -> None:
    """At a constant speed of so many messages a second, and with more to read than a batch holds."""
    sizer = BatchSizer(LIMITS, target_seconds=20)
    for _ in range(10):
        sizer.adapt(sizer.limits.max_records, sizer.limits.max_records / speed)
    wanted = min(LIMITS.max_records, 20 * speed)
    assert 0.9 * wanted <= sizer.limits.max_records <= 1.1 * wanted


def test_small_batches_say_nothing_of_large_ones() -> None:
    sizer = BatchSizer(LIMITS, target_seconds=20)
    sizer.adapt(1_000_000, 80)
    assert sizer.limits.max_records == 250_000
    for _ in range(20):
        sizer.adapt(10, 0.1)
    assert sizer.limits.max_records == 250_000


def test_where_the_bytes_are_the_limit_slow_batches_make_the_next_ones_smaller_all_the_same() -> None:
    sizer = BatchSizer(LIMITS, target_seconds=20)
    for expected in (250_000, 62_500, 15_625, 3_906, 1_953):
        sizer.adapt(5_000, 40)
        assert sizer.limits.max_records == expected


def test_one_small_batch_that_was_slow_says_little() -> None:
    sizer = BatchSizer(LIMITS, target_seconds=20)
    sizer.adapt(1, 60)
    assert sizer.limits.max_records == LIMITS.max_records // 4
