"""The contract suite's harness for each of our backends, and an empty place a test for what is tested beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stream_consumers.options import Limits
from stream_consumers.testing.harness import Harness, Stream
from tests.support.contract_backends import BACKENDS, Backend

# A topic that is made and deleted takes half a second: of the suite on Kafka, the first tier runs what other tests
# with a broker do not reach, with one value of each parameter.
KAFKA_FIRST = """
    iteration_yields_everything_once_in_the_order_of_each_shard live_following_goes_on_with_what_is_sent_later
    latest_starts_behind_what_is_there threads_that_wait_hold_up_neither_a_look_nor_a_move
    rewind_to_a_sequence_is_inclusive seek_goes_to_the_first_message_at_or_after_the_moment
    out_of_bounds_keeps_the_position assignments_count_from_the_next_move_on single_shards_are_moved
    messages_are_what_was_sent what_cannot_be_sent_is_refused_and_takes_nobody_with_it
    extents rows_carry_the_message last_messages_are_those_at_the_ends_or_are_not_told
    splits_are_disjoint_and_together_the_ranges plans_stay_within_the_gaps batches_keep_to_their_limits
    resumed_plans_are_those_without_the_hint a_hint_that_does_not_fit_the_positions_is_ignored
    new_shards_appear extents_are_frozen_and_plans_stay_readable
    committed_positions_are_told_back_where_there_is_somebody_to_tell
    at_is_the_first_sequence_with_that_timestamp_or_a_later_one
"""
FIRST_VALUES = {"index": 50, "at": 1_251, "parallelism": 3, "limits": Limits(max_bytes=450), "streams": ("orders",)}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what of the suite is in the second tier."""
    for item in items:
        if item.path.name == "test_contract.py" and isinstance(item, pytest.Function) and "[kafka" in item.name:
            is_first = item.originalname.removeprefix("test_") in KAFKA_FIRST.split() and all(
                FIRST_VALUES.get(name, value) == value for name, value in item.callspec.params.items()
            )
            if not is_first:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(params=BACKENDS, ids=str)
def harness(request: pytest.FixtureRequest) -> Harness:
    """Each backend, with its server."""
    backend: Backend = request.param
    return backend.harness(request.getfixturevalue(backend.service) if backend.service else "")


@pytest.fixture
def stream(harness: Harness, tmp_path: Path) -> Iterator[Stream]:
    """An empty stream of each backend."""
    location = harness.create(tmp_path)
    yield Stream(location)
    harness.remove(location)
