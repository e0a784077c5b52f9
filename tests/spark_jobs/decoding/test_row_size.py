"""Rows that Spark has no room for, by the size that they have there."""

from __future__ import annotations

import pyarrow as pa

from spark_jobs.decoding.row_size import has_large_row, spark_bytes

FLAGS = pa.struct([(f"f{number}", pa.bool_()) for number in range(20)])


def test_objects_without_values_are_as_large_as_spark_makes_them() -> None:
    column = pa.array([[{}] * 1000, None, []], pa.list_(FLAGS))
    assert column.nbytes < 10_000 < 176_000 <= spark_bytes(column) < 190_000
    assert spark_bytes(column.slice(1)) < 100, "only the values of the slice count"
    of_map = pa.array([[("a", {})] * 100, [("a", {})]], pa.map_(pa.string(), FLAGS))
    assert spark_bytes(of_map.slice(1)) < 1_000 < 17_600 <= spark_bytes(of_map)


def test_short_texts_count_as_the_objects_that_the_jvm_may_make_of_them() -> None:
    """A VARIANT is the text of its JSON here, and Spark holds both at once."""
    texts = pa.array([["1"] * 1_000_000], pa.list_(pa.string()))
    numbers = pa.array([[1] * 1_000_000], pa.list_(pa.int64()))
    assert spark_bytes(numbers) < 20_000_000 < 64_000_000 < spark_bytes(texts)


def test_one_row_counts_and_not_their_sum() -> None:
    many, one = ["x" * 900] * 100, ["", "x" * 20_000, ""]
    assert [has_large_row(pa.record_batch({"a": rows}), 10_000) for rows in (many, one, [], ["x" * 20_000])] == [
        False,
        True,
        False,
        True,
    ]
