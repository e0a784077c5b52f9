"""What the commits of a group add up to, and how entries say it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import reduce
from typing import Any

from spark_jobs.ledger.entries import MAX_LOSSES, MAX_REPLAYS, LedgerEntry, ReplayProgress, Totals
from spark_jobs.ledger.fold import totals_after
from spark_jobs.ledger.intervals import Intervals
from stream_consumers.batches import Range
from stream_consumers.messages import Shard

ZERO, ONE = Shard("orders", 0), Shard("orders", 1)


def entry(kind: str = "batch", **details: Any) -> LedgerEntry:
    return LedgerEntry(kind, "g", "g/main", 1, "main", "b", 0, **details)


def of(*entries: LedgerEntry) -> Totals:
    return reduce(totals_after, entries, Totals())


def replayed(replay: str, start: int, end: int, shard: Shard = ZERO) -> LedgerEntry:
    goal = {ZERO: Range(0, 9), ONE: Range(5, 6)}
    return entry("replay", replay=replay, goal=goal, ranges={shard: Range(start, end)}, mode="replace")


def test_what_is_dead_lost_or_replaced_is_added_up() -> None:
    found = of(
        entry(dead=2, lost={ZERO: Intervals.of((3, 5))}),
        entry(dead=1, mode="replace"),
        entry(lost={ZERO: Intervals.of((5, 6)), ONE: Intervals.of((1, 2))}),
    )
    assert found == Totals(dead=3, lost={ZERO: Intervals.of((3, 6)), ONE: Intervals.of((1, 2))}, replaced=1)


def test_a_replay_is_remembered_until_nothing_is_left_of_it() -> None:
    begun = of(replayed("r", 0, 4), replayed("r", 5, 6, ONE))
    assert begun.replays["replay/r"].done == {ZERO: Intervals.of((0, 4)), ONE: Intervals.of((5, 6))}
    assert set(begun.replays["replay/r"].goal) == {ZERO, ONE}
    assert totals_after(begun, replayed("r", 4, 9)).replays == {"replay/r": ReplayProgress()}


def test_the_newest_replays_are_remembered() -> None:
    names = [str(number) for number in range(MAX_REPLAYS)]
    keys = [f"replay/{name}" for name in names]
    full = of(*(replayed(name, 0, 1) for name in names))
    assert (list(full.replays), full.has_dropped_replays) == (keys, False)
    again = of(*(replayed(name, 0, 1) for name in names), replayed("0", 1, 2), replayed("new", 0, 1))
    assert (list(again.replays), again.has_dropped_replays) == ([*keys[2:], "replay/0", "replay/new"], True)


def test_an_entry_says_them_in_the_same_order() -> None:
    totals = of(entry(dead=2, lost={ONE: Intervals.of((3, 5))}), *(replayed(name, 0, 4) for name in ("b", "a", "c")))
    told = LedgerEntry.from_json(json.loads(entry(totals=totals, replaces_considered=2, state={}).to_json()))
    assert told is not None
    assert (told.totals, list(told.totals.replays), told.replaces_considered) == (
        totals,
        ["replay/b", "replay/a", "replay/c"],
        2,
    )


def test_nothing_takes_no_place() -> None:
    assert "totals" not in entry(totals=Totals()).to_json()


def test_a_replay_that_was_forgotten_meanwhile_is_known_in_part_only() -> None:
    others = [replayed(str(number), 0, 1) for number in range(MAX_REPLAYS)]
    found = of(replayed("r", 0, 1), *others, replayed("r", 1, 2)).replays["replay/r"]
    assert (found.done, found.is_complete) == ({ZERO: Intervals.of((1, 2))}, False)
    first = replace(replayed("new", 0, 1), begins=True)
    assert of(*others, replayed("last", 0, 1), first).replays["replay/new"].is_complete


def test_finished_replays_are_forgotten_first() -> None:
    finished = [replayed("done", 0, 9), replayed("done", 5, 6, ONE)]
    others = [replayed(str(number), 0, 1) for number in range(MAX_REPLAYS)]
    assert list(of(others[0], *finished, *others[1:]).replays) == [f"replay/{n}" for n in range(MAX_REPLAYS)]


def test_a_rewind_and_a_replay_of_one_run_are_not_taken_for_each_other() -> None:
    rewind = entry(replay="run", ranges={ZERO: Range(3, 3)}, mode="replace")
    assert set(of(rewind, replayed("run", 0, 1)).replays) == {"batch/run", "replay/run"}


def test_places_of_many_losses_are_joined() -> None:
    lost = [entry(lost={ZERO: Intervals.of((10 * number, 10 * number + 1))}) for number in range(3 * MAX_LOSSES)]
    (parts,) = of(*lost).lost.values()
    assert len(parts.ranges) == MAX_LOSSES
    assert (parts.ranges[0].start, parts.ranges[-1].end) == (0, 10 * (3 * MAX_LOSSES - 1) + 1)
