"""Shares a limit fairly over shards."""

from __future__ import annotations

from collections.abc import Mapping

from stream_consumers.messages import Shard


def fair_shares(wanted: Mapping[Shard, int], total: int, *, turn: int = 0) -> Mapping[Shard, int]:
    """Everyone gets an equal share; what one does not need goes to the others; odd ones go in turn.

    Args:
        wanted: how much each shard could use.
        total: what there is.
        turn: whose turn it is for the odd ones: a number that grows by what was given, so that with a total below the
            number of shards each of them is served in the end.

    Returns:
        The shards that get something.

    Example:
        >>> a, b, c = (Shard("orders", n) for n in range(3))
        >>> fair_shares({a: 100, b: 2, c: 100}, 12) == {a: 5, b: 2, c: 5}
        True
        >>> fair_shares({a: 9, b: 9, c: 9}, 2, turn=2) == {c: 1, a: 1}
        True
    """
    shares = {shard: 0 for shard in sorted(wanted)}
    open_shards = [shard for shard in shards_in_turn(shares, turn) if wanted[shard] > 0]
    left = total
    while open_shards and left:
        each = left // len(open_shards)
        if each == 0:
            for shard in open_shards[:left]:
                shares[shard] += 1
            break
        for shard in open_shards:
            given = min(each, wanted[shard] - shares[shard])
            shares[shard] += given
            left -= given
        open_shards = [shard for shard in open_shards if shares[shard] < wanted[shard]]
    return {shard: share for shard, share in shares.items() if share}


def shards_in_turn(shards: Mapping[Shard, object], turn: int) -> list[Shard]:
    """The shards in order, starting with number ``turn`` (modulo their count)."""
    ordered = sorted(shards)
    start = turn % len(ordered) if ordered else 0
    return ordered[start:] + ordered[:start]
