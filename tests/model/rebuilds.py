"""The swap of a rebuild: it removes no last copy of a row, and no rows of another group.

A source may lose a message when a newer one has its key (compaction), or after all messages before it (trimming).
Here the group has read it before.
``tests/model/keyed.py`` explores what becomes of the positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.model.search import Model, Result, State, Variant, quick, search

Places = frozenset[int]
PLAN, BEGUN = 3, 4
"""Where a state has the swap that is planned, and the one that Delta has begun."""


def model(
    messages: str = "au bu au bd",
    *,
    to: str = "appended",
    drops: Places = frozenset(),
    checks: str,
    sees: str = "begun",
    catches_up: bool = True,
) -> Result:
    """Explore it.

    Args:
        messages: each is a key, and ``u`` for an update or ``d`` for a delete, and its order, by default its place. The
            table has been appended to.
        to: the table is ``appended`` to from then on, or has the ``newest`` row of each key.
        drops: the messages that today's transform drops.
        checks: for which rows a swap is refused: ``none``; all, if the ``start`` of the stream is gone; those that have
            no ``row`` in the staging table; or of these, those that the stream does not hold now (``held``); or these
            and the ``deletions`` of keys that the staging table has.
        catches_up: no swap is planned before the staging table has read as far as the table.
        sees: the swap sees rows of another group that it has when it is ``planned``, or when Delta has ``begun`` it.
    """
    sent = messages.split()
    size = len(sent)

    def rows_of(read: Places) -> Places:
        made = read - drops
        if to == "appended":
            return made
        return frozenset(x for x in read & made if sent[x][1] == "u" and not is_superseded(x, read))

    def order(x: int) -> tuple[int, int]:
        return int(sent[x][2:] or x), x

    def has_newer(x: int, others: Places) -> bool:
        """Whether a later message has its key, so that a compaction may remove it."""
        return any(y > x and sent[y][0] == sent[x][0] for y in others)

    def is_superseded(x: int, others: Places) -> bool:
        return any(order(y) > order(x) and sent[y][0] == sent[x][0] for y in others)

    def is_refused(table: Places, made: Places, gone: Places) -> bool:
        if checks in ("none", "start"):
            return checks == "start" and 0 in gone
        wanted = table if to == "appended" else frozenset(x for x in table if not is_superseded(x, table | made))
        wanted = frozenset(x for x in wanted - made if to == "appended" or sent[x][1] == "u" or comes_back(x, made))
        return bool(wanted - (frozenset() if checks == "row" else frozenset(range(size)) - gone))

    def comes_back(x: int, made: Places) -> bool:
        """Whether the key of a deletion would."""
        return checks == "deletions" and any(sent[y][0] == sent[x][0] for y in made)

    def step(st: State) -> Iterator[tuple[str, State]]:
        gone, table, (end, read), plan, begun, (written, there), over = st
        if over:
            return
        for x in table - gone:
            if has_newer(x, frozenset(range(size))) or frozenset(range(x)) <= gone:
                yield f"message {x} is gone", (gone | {x}, *st[1:])
        if len(table) < size:
            yield "ingestion appends a message", (gone, table | {len(table)}, *st[2:])
        if end < size and plan is None:
            now = (end + 1, read if end in gone else read | {end})
            yield f"the staging table gets up to {end + 1}", (gone, table, now, *st[3:])
        if plan is None and len(table) and end and (end >= len(table) or not catches_up):
            refused = there or is_refused(table, rows_of(read), gone)
            yield "a swap is planned", (*st[:PLAN], (table, there), None, st[5], "refused" if refused else "")
        if not written:
            yield "another group appends", (*st[:5], (True, True), over)
        if plan is not None and begun is None:
            if sees == "begun" and plan[1] != there:
                yield "Delta begins, and the check fails", (*st[:PLAN], None, None, st[5], "refused")
            else:
                yield "Delta begins", (*st[:BEGUN], there, *st[5:])
        if begun is not None:
            if plan[0] == table:
                there = there and not begun
                yield "the swap lands", (gone, table, st[2], plan, begun, (written, there), "swapped")
            yield "the swap is dropped", (*st[:PLAN], None, None, *st[5:])

    def wrong(st: State) -> str | None:
        gone, table, (end, read), _, _, (written, there), over = st
        if over == "refused":
            return "refused, although all is there" if not gone and not written else None
        if over != "swapped":
            return None
        if written and not there:
            return "the rows of the other group are gone"
        lost = {x for x in table - read if x < end or x in gone}
        if to == "newest":
            back = {x for x in table - read if sent[x][1] == "d" and not is_superseded(x, table | read)}
            if back := {x for x in back if any(sent[y][0] == sent[x][0] for y in rows_of(read))}:
                return f"deleted keys are back: {sorted(back)}"
            lost -= {x for x in lost if is_superseded(x, read | table) or sent[x][1] == "d"}
        return f"last copies are gone: {sorted(lost)}" if lost else None

    first: State = (frozenset(), frozenset(), (0, frozenset()), None, None, (False, False), "")
    return search(Model(first, step, wrong, lambda st: bool(st[-1])))


held = partial(model, checks="held")
VARIANTS: tuple[Variant, ...] = (
    quick("c1", "nothing is checked", "BAD", partial(model, checks="none")),
    quick("c2", "the start of the stream is checked", "BAD", partial(model, checks="start")),
    quick("c3", "rows that the staging table lacks", "PASS", partial(model, checks="row")),
    quick("c3-drops", "same, the transform drops a message", "BAD", partial(model, checks="row", drops=frozenset({1}))),
    quick("c4", "those of them whose messages the stream does not hold", "PASS", held),
    quick("c4-behind", "same, the table may have read further", "BAD", partial(held, catches_up=False)),
    quick("c4-drops", "same, the transform drops a message", "PASS", partial(held, drops=frozenset({1}))),
    quick("c4-newest", "same, a row per key", "BAD", partial(held, to="newest")),
    quick("c4-newest-drops", "same, it drops messages", "PASS", partial(held, to="newest", drops=frozenset({0, 2}))),
    quick("c4-values", "same, in the order of a value", "BAD", partial(held, "au1 ad9 au5 bu6", to="newest")),
    quick(
        "c5",
        "same, deletions of keys that the staging table has, too",
        "PASS",
        partial(model, "au1 ad9 au5 bu6", to="newest", checks="deletions"),
    ),
    quick("c5-order", "same, in the order of the places", "PASS", partial(model, to="newest", checks="deletions")),
    quick("o1", "rows of another group are seen in the plan only", "BAD", partial(held, sees="planned")),
)
