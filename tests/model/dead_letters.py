"""Dead letters: in a second table, and written first."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.search import Model, Result, State, Variant, put, search


def model(
    *,
    numbers: str = "same",
    verify: bool = True,
    adopt: bool = False,
    view: str = "rows",
    procs: str = "AA",
    crashes: int = 2,
    takes: int = 1,
    msgs: State = (0, 1, 1),
) -> Result:
    """Explore it.

    Args:
        numbers: ``same``, the dead letters take the number of the batch; ``own``, the next one of their table.
        verify: look whether the dead letters that are there are one's own.
        adopt: where the table of the dead letters has the number, do exactly that batch.
        view: which count: all ``rows``, or by a ``join`` those whose batch the main ledger holds.
        procs: the member of each process.
        crashes: how many there may be.
        takes: takeovers.
        msgs: the messages; 1 is a dead letter.
    """
    # The main log: (app, N, kind, batch id, s, e); that of the dead letters: (app, n, batch id, rows).
    size = len(msgs)
    init = ((), (), (("i",),) * len(procs), crashes, takes)

    def last(t: State, m: str) -> int:
        return max((c[1] for c in t if c[0] == m), default=0)

    def pos(main: State) -> int:
        return max((c[5] for c in main if c[2] == "b"), default=0)

    def owner(main: State) -> str:
        return ([procs[0]] + [c[3] for c in main if c[2] == "f"])[-1]

    def step(st: State) -> Iterator[tuple[str, State]]:
        main, dead, ps, cr, tk = st
        for i, ph in enumerate(ps):
            m, who = procs[i], f"{procs[i]}{i}"

            def to(ph=ph, main=main, dead=dead, cr=cr, tk=tk, i=i) -> State:
                return main, dead, put(ps, i, ph), cr, tk

            if ph[0] == "i":
                if owner(main) != m:
                    if tk:
                        yield (
                            f"{who} will fence {owner(main)}",
                            to(("f", owner(main), last(main, owner(main)) + 1), tk=tk - 1),
                        )
                elif pos(main) < size:
                    n, s, k = last(main, m) + 1, pos(main), sum(c[2][0] == i for c in dead)  # k: batch ids stay unique
                    old = [c for c in dead if c[:2] == (m, n)]
                    if adopt and old:
                        b = old[0][2]
                        yield f"{who} finds dead letters of {m}:{n}: redoes exactly [{b[2]},{b[3]})", to(("w", n, b))
                    else:
                        for e in range(s + 1, size + 1):
                            yield (
                                f"{who} plans {m}:{n} [{s},{e})",
                                to(("d", n, last(dead, m) + 1 if numbers == "own" else n, (i, k, s, e))),
                            )
            elif ph[0] == "f":
                ok = last(main, ph[1]) < ph[2]
                yield (
                    f"{who} fences {ph[1]}:{ph[2]}{'' if ok else ': skipped'}",
                    to(("i",), main=(*main, (ph[1], ph[2], "f", m, 0, 0)) if ok else main),
                )
            elif ph[0] == "d":
                _, n, d, b = ph
                rows = frozenset(x for x in range(b[2], b[3]) if msgs[x])
                ok = last(dead, m) < d
                yield (
                    f"{who} writes dead letters {sorted(rows)} as {m}:{d}{'' if ok else ': skipped'}",
                    to(("e", n, d, b), dead=(*dead, (m, d, b, rows)) if ok else dead),
                )
            elif ph[0] == "e":
                _, n, d, b = ph
                if not verify or any(c[2] == b for c in dead):
                    yield f"{who} goes on to the rows of {m}:{n}", to(("w", n, b))
                else:
                    yield f"{who} dead letters {m}:{d} are another's: drops the batch", to(("i",))
            elif ph[0] == "w":
                _, n, b = ph
                ok = last(main, m) < n
                yield (
                    f"{who} writes rows of {m}:{n} [{b[2]},{b[3]}){'' if ok else ': skipped'}",
                    to(("i",), main=(*main, (m, n, "b", b, b[2], b[3])) if ok else main),
                )
            if cr and ph[0] != "i":
                yield f"!{who} crashes", (main, dead, put(ps, i, ("i",)), cr - 1, tk)

    def bad(st: State) -> str | None:
        main, dead, _ps, _, _ = st
        at = 0
        for c in main:
            if c[2] == "b":
                if c[4] != at:
                    return "message written twice" if c[4] < at else "message lost"
                at = c[5]
        ok = {c[3] for c in main if c[2] == "b"}
        count = [sum(x in c[3] for c in dead if view == "rows" or c[2] in ok) for x in range(size)]
        for x in range(size):
            if msgs[x] and x < at and count[x] == 0:
                return f"dead letter {x} lost (range is in the ledger)"
            if count[x] > 1:
                return f"dead letter {x} twice"

    def done(st: State) -> bool:
        return pos(st[0]) == size and all(p == ("i",) for p in st[2])

    return search(Model(init, step, bad, done))


VARIANTS = (
    Variant("e1", "same numbers, dead-letter write not verified", "BAD", lambda: model(verify=False), is_small=True),
    Variant("e2", "same numbers, verified by batch id, loser re-plans", "STUCK", model, is_small=True),
    Variant(
        "e3",
        "same numbers, the batch found in the dead letters is redone exactly; one member",
        "PASS",
        lambda: model(adopt=True),
        is_small=True,
    ),
    Variant("e4", "same with a takeover by B", "BAD", lambda: model(adopt=True, procs="AB"), is_small=True),
    Variant("e5", "own numbers, every row counts", "BAD", lambda: model(numbers="own"), is_small=True),
    Variant(
        "e6",
        "own numbers, rows count through the main ledger's batch ids; two runs of one member",
        "PASS",
        lambda: model(numbers="own", view="join", crashes=1),
    ),
    Variant("e7", "same with takeovers", "PASS", lambda: model(numbers="own", view="join", procs="AB", takes=2)),
    Variant("e8", "adopt + join, takeovers", "PASS", lambda: model(adopt=True, view="join", procs="AB", takes=2)),
)
