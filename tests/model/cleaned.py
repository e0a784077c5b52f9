"""A Delta log that is cleaned up to any version, also after a RESTORE, before the group runs again.

Checkpoints keep the last number and the rows, but no position. The broker has the position of the batch that it was
told of, with the number of that batch; a RESTORE changes neither. A run that cannot read the position takes the
broker's, or stops with an error, after which a user rewinds to the beginning.

Another table of the same group and topic may tell the broker its own number and position at any time. A batch that was
planned before another writer committed can be read only together with what was before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.model.search import Model, Result, State, Variant, quick, search


def number(log: State) -> int:
    return sum(c[0] != "R" for c in log)


def rows(log: State, messages: str) -> frozenset[int]:
    """The messages that have a row: a RESTORE goes back to those of its version."""
    at: list[frozenset[int]] = [frozenset()]
    for c in log:
        if c[0] == "R":
            at.append(at[c[1]])
        else:
            wrote = {c[1] - 1} if c[0] in "bo" and messages[c[1] - 1] == "r" else set()
            at.append(at[-1] | wrote)
    return at[-1]


def position(log: State, cleaned: int, version: int) -> int | None:
    """What the commits from ``cleaned`` to ``version`` say; ``None`` where they do not."""
    for at in range(version - 1, cleaned - 1, -1):
        if log[at][0] == "R":
            return position(log, cleaned, log[at][1])
        return None if log[at][0] == "o" and 0 < cleaned == at else int(log[at][1])
    return None if cleaned else 0


def model(rule: str, *, messages: str = "rrr", restores: int = 1, has_other: bool = False) -> Result:
    """Explore it.

    Args:
        rule: when the broker is trusted: ``number``: it has the last number; ``log``: and no RESTORE can be read;
            ``letters``: and a row or a dead letter lies right before the position; ``rows``: and a row does, or the
            batch can be read; ``ends``: same, and the batch ends at the position.
        messages: what becomes of each: a row (r), a dead letter (d), or nothing, because the transform drops it (f).
        restores: how many there may be.
        has_other: whether another table tells the broker, too.
    """
    # The log: ("b", end), a batch of one message; ("o", end), one that another writer overtook; ("k", position), what a
    # recovery writes down; ("R", version). Then the first version that can be read, the number and the position at the
    # broker, and how many RESTOREs are left.
    init: State = ((), 0, (0, 0), restores)

    def is_trusted(log: State, cleaned: int, broker: State) -> bool:
        if broker[0] != number(log):
            return False
        if rule != "number" and any(c[0] == "R" for c in log[cleaned:]):
            return False
        newest = next((c for c in reversed(log[cleaned:]) if c[0] != "R"), None)
        if newest is not None and rule in ("rows", "ends"):
            return rule == "rows" or newest[1] == broker[1]
        held = rows(log, messages)
        if rule == "letters":
            # No RESTORE of the table takes back a dead letter.
            held |= {c[1] - 1 for c in log if c[0] in "bo" and messages[c[1] - 1] == "d"}
        return rule in ("number", "log") or max(held, default=-1) + 1 >= broker[1]

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, cleaned, broker, rs = st
        known = position(log, cleaned, len(log))
        if known is None:
            if is_trusted(log, cleaned, broker):
                yield f"a run trusts the broker: {broker[1]}", ((*log, ("k", broker[1])), cleaned, broker, rs)
            else:
                yield "a run stops, and a user rewinds", ((*log, ("k", 0)), cleaned, broker, rs)
        else:
            if known < len(messages):
                for kind in "bo" if has_other else "b":
                    yield f"a batch [{known},{known + 1}) ({kind})", ((*log, (kind, known + 1)), cleaned, broker, rs)
            yield f"the broker is told {number(log)}: {known}", (log, cleaned, (number(log), known), rs)
        for v in range(cleaned, len(log)) if rs else ():
            yield f"!RESTORE to version {v}", ((*log, ("R", v)), cleaned, broker, rs - 1)
        for end in range(len(messages) + 1) if has_other else ():
            yield f"!another table tells the broker {number(log)}: {end}", (log, cleaned, (number(log), end), rs)
        # The number grows with each recovery: no need to clean more often than there are messages.
        if number(log) <= len(messages) + 1:
            for v in range(cleaned + 1, len(log) + 1):
                yield f"!the log is cleaned before version {v}", (log, v, broker, rs)

    def missing(log: State, known: int) -> set[int]:
        return {x for x in range(known) if messages[x] == "r"} - rows(log, messages)

    def wrong(st: State) -> str | None:
        known = position(st[0], st[1], len(st[0]))
        return f"{missing(st[0], known)} count as read, and have no row" if known and missing(st[0], known) else None

    def is_done(st: State) -> bool:
        return position(st[0], st[1], len(st[0])) == len(messages)

    return search(Model(init, step, wrong, is_done))


VARIANTS = [
    quick("number", "the last number is enough", "BAD", partial(model, "number")),
    quick("log", "and no RESTORE can be read; it was cleaned, too", "BAD", partial(model, "log")),
    quick("letters", "and a row or a dead letter is last", "BAD", partial(model, "letters", messages="rrd")),
    Variant("rows", "and a row is last", "PASS", partial(model, "rows", restores=2)),
    quick("rows-letter", "same, with a dead letter", "PASS", partial(model, "rows", messages="rdr")),
    quick("rows-dropped", "same, a message is dropped", "PASS", partial(model, "rows", messages="rrf")),
    quick("other", "same, and another table tells the broker", "BAD", partial(model, "rows", has_other=True)),
    quick("ends", "and it ends there", "PASS", partial(model, "ends", messages="rr", restores=0, has_other=True)),
    Variant("ends-restore", "same, with a RESTORE", "PASS", partial(model, "ends", messages="rr", has_other=True)),
]
