"""Fair shares: everyone gets some, nothing is left while somebody wants it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stream_consumers.batches import fair_shares
from stream_consumers.messages import Shard

SHARDS = st.dictionaries(st.integers(0, 30), st.integers(0, 1000), max_size=12)


@given(SHARDS, st.integers(1, 5000), st.integers(0, 100))
def test_all_of_it_is_given_and_nobody_gets_more_than_they_want(wanted: dict[int, int], total: int, turn: int) -> None:
    asked = {Shard("orders", number): count for number, count in wanted.items()}
    shares = fair_shares(asked, total, turn=turn)
    assert sum(shares.values()) == min(total, sum(asked.values()))
    assert all(0 < share <= asked[shard] for shard, share in shares.items())


@given(SHARDS, st.integers(1, 5000), st.integers(0, 100))
def test_who_gets_less_than_another_wanted_no_more(wanted: dict[int, int], total: int, turn: int) -> None:
    asked = {Shard("orders", number): count for number, count in wanted.items()}
    shares = fair_shares(asked, total, turn=turn)
    most = max(shares.values(), default=0)
    for shard, count in asked.items():
        assert shares.get(shard, 0) == count or shares.get(shard, 0) >= most - 1


def test_with_fewer_records_than_shards_everybody_gets_a_turn() -> None:
    """1000 partitions that never run dry, ten records a batch: the positions alone say whose turn it is."""
    positions = {Shard("orders", number): 0 for number in range(1000)}
    served: Counter[Shard] = Counter()
    for _ in range(200):
        shares = fair_shares(dict.fromkeys(positions, 10**6), 10, turn=sum(positions.values()))
        for shard, share in shares.items():
            positions[shard] += share
            served[shard] += share
    assert set(served.values()) == {2}
