"""Every interleaving of a switch with runs of both modes that pause, race and crash: each message once.

An explicit-state model of spark_jobs/mode_switch.py and of the batch protocol, two shards of two messages.
What a process does between two reads or writes is one step, so a process may sleep anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

State = tuple[Any, ...]
SHARDS = ("s0", "s1")
SIZE = 2


def last(log: State, line: str) -> int:
    return max((entry[1] for entry in log if entry[0] == line), default=0)


def position(log: State, shard: str) -> int:
    return max((end for _, _, ranges, _, _ in log for name, _, end in ranges if name == shard), default=0)


def sharing(log: State, *, by_newest: bool) -> str:
    """How the group shares: by the fold, or (a flaw) as the newest commit says."""
    if by_newest:
        return str(log[-1][4])
    return str([entry[3] for entry in log if entry[3]][-1])


def commit(log: State, line: str, number: int, ranges: State, switch: str, mode: str) -> State:
    """One Delta write: nothing if the number is taken."""
    return log if last(log, line) >= number else (*log, (line, number, ranges, switch, mode))


def runs(log: State, mode: str, *, by_newest: bool) -> Iterator[State]:
    """The batches that a run of this mode can plan now: (line, number, ranges, mode)."""
    if sharing(log, by_newest=by_newest) != mode:
        return
    behind = [shard for shard in SHARDS if position(log, shard) < SIZE]
    if mode == "resumable" and behind:
        yield "main", last(log, "main") + 1, tuple((s, position(log, s), position(log, s) + 1) for s in behind), mode
    if mode == "load_balanced":
        for shard in behind:
            at = position(log, shard)
            yield shard, last(log, shard) + 1, ((shard, at, at + 1),), mode


def switcher(to: str, variant: str) -> list[tuple[str, str]]:
    """The fences of a switch in order: (line, switch)."""
    if to == "load_balanced":
        return [("main", "load_balanced")] if variant != "no fence" else [("s0", "load_balanced")]
    fences = [(shard, "") for shard in SHARDS]
    return {
        "right": [("main", "switching"), *fences, ("main", "resumable")],
        "no fence": [("main", "resumable")],
        "switch first": [("main", "resumable"), *fences],
        "fences first": [*fences, ("main", "resumable")],
        "newest": [("main", "switching"), *fences, ("main", "resumable")],
    }[variant]


def explore(start: str, to: str, variant: str) -> str | None:
    """The first wrong state that can be reached; ``None`` if there is none."""
    by_newest = variant == "newest"
    fences = switcher(to, variant)
    # log, two runs of the old mode, one of the new: what each has planned; the switcher: (next fence, number read)
    first: State = ((("main", 1, (), start, start),), (None, None, None), (0, None), 1)
    modes = (start, start, to)
    seen = {first}
    todo = [first]
    while todo:
        state = todo.pop()
        log, planned, (fence, number), crashes = state
        for shard in SHARDS:
            at = 0
            for entry in log:
                for name, begin, end in entry[2]:
                    if name == shard:
                        if begin != at:
                            return f"{shard} twice or lost: {log}"
                        at = end
        following: list[State] = []
        for index, plan in enumerate(planned):
            before, behind = planned[:index], planned[index + 1 :]
            if plan is None:
                following += [
                    (log, (*before, batch, *behind), (fence, number), crashes)
                    for batch in runs(log, modes[index], by_newest=by_newest)
                ]
            else:
                line, n, ranges, mode = plan
                written = commit(log, line, n, ranges, "", mode)
                following.append((written, (*before, None, *behind), (fence, number), crashes))
        if fence < len(fences):
            line, switch = fences[fence]
            if number is None:
                following.append((log, planned, (fence, last(log, line) + 1), crashes))
            else:
                after = commit(log, line, number, (), switch, switch or "switching")
                following.append((after, planned, (fence + (after != log), None), crashes))
            if crashes:
                following.append((log, planned, (0, None), crashes - 1))
        for nxt in following:
            if nxt not in seen:
                seen.add(nxt)
                todo.append(nxt)
    return None


@pytest.mark.parametrize(("start", "to"), [("resumable", "load_balanced"), ("load_balanced", "resumable")])
def test_a_switch_loses_and_doubles_nothing(start: str, to: str) -> None:
    assert explore(start, to, "right") is None


@pytest.mark.parametrize(
    ("start", "to", "variant"),
    [
        ("resumable", "load_balanced", "no fence"),
        ("load_balanced", "resumable", "no fence"),
        ("load_balanced", "resumable", "switch first"),
        ("load_balanced", "resumable", "fences first"),
        ("load_balanced", "resumable", "newest"),
    ],
)
def test_what_looks_right_and_is_not(start: str, to: str, variant: str) -> None:
    assert explore(start, to, variant) is not None
