"""Breadth-first search over the states of a protocol model: shortest counterexamples, and states that lead nowhere."""

from __future__ import annotations

import gc
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

State = tuple[Any, ...]
LIMIT = 3_000_000


@dataclass(frozen=True, slots=True)
class Model:
    """A protocol.

    Args:
        first: the state it begins with.
        step: what may happen next in a state, each with its name. Names that begin with ``!`` are faults: they happen,
            but progress may not depend on them.
        wrong: what is wrong with a state; ``None`` if nothing is.
        is_done: whether the state is one in which everything is written.
    """

    first: State
    step: Callable[[State], Iterator[tuple[str, State]]]
    wrong: Callable[[State], str | None]
    is_done: Callable[[State], bool]


@dataclass(frozen=True, slots=True)
class Result:
    """What the search found.

    Args:
        verdict: ``PASS``: every state that can be reached was seen. ``BAD``: one is wrong. ``STUCK``: from one no end
            can be reached without a fault. ``LIMIT``: too many states.
        why: what is wrong.
        trace: the shortest way there.
        states: how many were seen.
    """

    verdict: str
    why: str
    trace: list[str]
    states: int

    def __str__(self) -> str:
        steps = "".join(f"\n{number:4}. {step}" for number, step in enumerate(self.trace, 1))
        return f"{self.verdict} {self.states} states {self.why}{steps}"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to do it, and what the search must say of it.

    Args:
        name: short, for test ids.
        what: it does.
        expect: the verdict.
        explore: searches.
        is_small: it takes no more than a second or two, so that the first tier has it.
    """

    name: str
    what: str
    expect: str
    explore: Callable[[], Result]
    is_small: bool = False


def quick(name: str, what: str, expect: str, explore: Callable[[], Result]) -> Variant:
    """A variant that is small."""
    return Variant(name, what, expect, explore, is_small=True)


def search(model: Model, *, limit: int = LIMIT) -> Result:
    """Visit every state that can be reached."""
    # Millions of states, none of them in a cycle: a third of the time went into looking for some.
    gc.disable()
    try:
        return _search(model, limit)
    finally:
        gc.enable()


def _search(model: Model, limit: int) -> Result:
    ids, states, parent, label = {model.first: 0}, [model.first], [-1], [""]
    source, target = array("I"), array("I")
    queue, goals = deque([0]), []

    def trace(index: int) -> list[str]:
        steps = []
        while parent[index] >= 0:
            steps.append(label[index])
            index = parent[index]
        return steps[::-1]

    while queue:
        index = queue.popleft()
        state = states[index]
        why = model.wrong(state)
        if why:
            return Result("BAD", why, trace(index), len(states))
        if model.is_done(state):
            goals.append(index)
        for name, following in model.step(state):
            known = ids.get(following)
            if known is None:
                known = ids[following] = len(states)
                states.append(following)
                parent.append(index)
                label.append(name)
                queue.append(known)
            if not name.startswith("!"):
                source.append(index)
                target.append(known)
        if len(states) > limit:
            return Result("LIMIT", f"no violation within {limit} states", [], len(states))
    before: list[list[int]] = [[] for _ in states]
    for a, b in zip(source, target):
        before[b].append(a)
    leads_to_end = bytearray(len(states))
    queue = deque(goals)
    for goal in goals:
        leads_to_end[goal] = 1
    while queue:
        for a in before[queue.popleft()]:
            if not leads_to_end[a]:
                leads_to_end[a] = 1
                queue.append(a)
    # Found breadth first, so the first one is a nearest one.
    stuck = leads_to_end.find(0)
    if stuck >= 0:
        return Result("STUCK", "from here no end can be reached without a fault", trace(stuck), len(states))
    return Result("PASS", "", [], len(states))


def put(values: State, index: int, value: object) -> State:
    """The tuple with one value replaced."""
    return (*values[:index], value, *values[index + 1 :])
