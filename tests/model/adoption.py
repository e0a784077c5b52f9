"""Rows of a copied table that a group adopts, and RESTOREs to before the adopt, which remove some of them.

The rows are in no commit of the group: the adopt only makes what comes after the last one the origin. A RESTORE may
remove all of the rows, some, or none, and the group may adopt what is left again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.model.search import Model, Result, State, Variant, search

SIZE = 3


class View(NamedTuple):
    """What the ledger knows: whether the adopt was taken back is ``is_back``."""

    covered: frozenset[int] = frozenset()
    redo: frozenset[int] = frozenset()
    origin: int | None = None
    is_back: bool = False


def model(rule: str, *, restores: int = 2, crashes: int = 1) -> Result:
    """Explore it.

    Args:
        rule: what a RESTORE to before the adopt does: the origin ``stays``; it goes ``back`` to before the rows, and
            the group reads on; same, but rows that no commit covers are refused, and an adopt that lands after a
            RESTORE counts (``late``); or it does not (``once``); and then, a batch that lands after it has to be
            ``replaced``.
        restores: how many there may be.
        crashes: how many there may be.
    """
    # The log: ("f", s, e) rows that others wrote; ("a", origin, base) an adopt; ("b", s, e, base) a batch, ("r", …) one
    # that replaces; ("R", version). The group: ("i",) idle, or what it is about to write. Then how many RESTOREs and
    # crashes are left.
    init: State = ((("f", 0, 1), ("f", 1, 2)), ("i",), restores, crashes)

    def is_late(log: State, number: int) -> bool:
        return any(c[0] == "R" for c in log[log[number][-1] : number])

    def table(log: State) -> State:
        """How many rows there are of each message; a replace around a RESTORE is assumed to remove nothing."""
        at = [(0,) * SIZE]
        for number, c in enumerate(log):
            if c[0] == "R":
                at.append(at[c[1]])
                continue
            wrote = range(c[1], c[2]) if c[0] in "fbr" else ()
            kept = 0 if c[0] == "r" and not is_late(log, number) else 1
            at.append(tuple(count * kept + 1 if x in wrote else count for x, count in enumerate(at[-1])))
        return at[-1]

    def view(log: State) -> View:
        at = [View()]
        for number, c in enumerate(log):
            covered, redo, origin, is_back = at[-1]
            if c[0] == "a":
                is_back = rule in ("once", "replaced") and is_late(log, number)
                origin = 0 if is_back else c[1]
                covered |= frozenset(range(origin))
            elif c[0] in "br":
                own = frozenset(range(c[1], c[2]))
                late = is_late(log, number)
                redo = redo - own if c[0] == "r" and not late else redo | (own & covered)
                redo |= own if rule == "replaced" and late and is_back else frozenset()
                covered |= own
            elif c[0] == "R":
                past = at[c[1]]
                covered, redo = past[:2]
                if rule == "stays" or origin is None:
                    origin = past.origin if origin is None else origin
                else:
                    origin, is_back = (0, True) if past.origin is None else past[2:]
                covered |= frozenset(range(origin or 0))
            at.append(View(covered, redo, origin, is_back))
        return at[-1]

    def is_refused(log: State) -> bool:
        known = view(log)
        return (
            known.is_back
            and rule != "back"
            and any(count and x not in known.covered for x, count in enumerate(table(log)))
        )

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, p, left, cr = st
        covered, redo, origin, is_back = view(log)
        rows = [x for x, count in enumerate(table(log)) if count]
        if p[0] == "i":
            if rows and (origin is None or (is_back and not covered and rule != "back")):
                yield f"plans to adopt up to {rows[-1]}", (log, ("a", rows[-1] + 1, len(log)), left, cr)
            elif not is_refused(log):
                missing = sorted(redo) or sorted(frozenset(range(SIZE)) - covered)
                for x in missing[:1]:
                    kind = "r" if redo else "b"
                    yield f"plans a batch {kind} of {x}", (log, (kind, x, x + 1, len(log)), left, cr)
            else:
                for version in range(len(log)):
                    if view(log[:version]).origin is not None and not is_refused(log[:version]):
                        yield f"operator: RESTORE to {version}, after an adopt", ((*log, ("R", version)), p, left, cr)
        else:
            yield f"writes {p}", ((*log, p), ("i",), left, cr)
            if cr:
                yield "!crashes", (log, ("i",), left, cr - 1)
        if left:
            for version in range(1, len(log)):
                yield f"!operator: RESTORE to {version}", ((*log, ("R", version)), p, left - 1, cr)

    def wrong(st: State) -> str | None:
        known, counts = view(st[0]), table(st[0])
        for x in range(SIZE):
            if counts[x] > 1 and x not in known.redo:
                return f"message {x} twice, and the ledger does not know"
            if x in known.covered and not counts[x]:
                return f"message {x} is lost: it counts as read"
        return None

    def is_done(st: State) -> bool:
        known = view(st[0])
        return known.covered == frozenset(range(SIZE)) and not known.redo and st[1][0] == "i"

    return search(Model(init, step, wrong, is_done))


VARIANTS = (
    Variant("a1", "the origin of an adopt survives a RESTORE", "BAD", lambda: model("stays"), is_small=True),
    Variant("a2", "the group reads again from before the rows", "BAD", lambda: model("back"), is_small=True),
    Variant("a3", "an adopt that lands after a RESTORE counts", "BAD", lambda: model("late"), is_small=True),
    Variant("a4", "a batch that lands after a RESTORE is in once", "BAD", lambda: model("once"), is_small=True),
    Variant(
        "a5",
        "rows that no commit covers are refused or adopted again, and a batch that lands after a RESTORE is replaced",
        "PASS",
        lambda: model("replaced"),
        is_small=True,
    ),
)
