"""The fold: RESTORE, rewind and replay next to ingestion."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.search import Model, Result, State, Variant, quick, search


def model(
    *,
    reader: str = "fold",
    replay_app: str = "same",
    clamp: bool = True,
    restores: int = 1,
    rewind: int = 1,
    replay: int = 1,
    crashes: int = 1,
    redo: bool = True,
    size: int = 3,
    repair: bool = True,
    restored: str = "number",
    empty_rewind: bool = False,
    carried: str = "",
) -> Result:
    """Explore it.

    Args:
        reader: ``newest``, the newest commit gives the position; ``fold``, a set of covered messages.
        replay_app: ``same``, a replay writes in the member's transaction sequence; ``own``, in one of its own.
        clamp: a replay replaces only what is covered.
        restores: how many there may be.
        rewind: how many there may be.
        replay: whether there may be one.
        crashes: how many there may be.
        redo: the ledger remembers what a rewind has left to replace.
        size: how many messages there are.
        repair: what is there twice is replaced.
        restored: how the ledger knows the version of a RESTORE: by its ``number``; by a ``clock`` that may be wrong;
            by the ``files`` that it left behind, and where versions with the same files say something else, not at all:
            then the operator has to RESTORE to a number.
        empty_rewind: a rewind may be a commit without rows.
        carried: what the fold starts from: nothing, so that it goes over the whole log; or the newest state that a
            commit carries, where any commit may or may not carry that of its ``base``. Wrong ways to read on from
            there: the state is taken for that before its own commit (``newest``); a RESTORE to before it goes back to
            it (``floor``); whether a commit is late is looked up no further back than it (``near``); the state is
            taken from a commit that was planned before a RESTORE, for that behind the RESTORE (``over``).
    """
    # The log: (app, N, kind, s, e, until, base, state); kinds: a append, r replace (until: rewound up to there), p
    # replay, R RESTORE (s: the version, e: 1 if told); state: that at the base, or none. A write around a RESTORE may
    # be refused by Delta or land; a replace that lands then is assumed to have removed nothing: that is the worst.
    init = ((), ("i",), ("i",) if replay else ("x",), restores, rewind, crashes)

    def last(log: State, app: str) -> int:
        return max((c[1] for c in log if c[0] == app), default=0)

    def table(log: State) -> State:
        """Rows of each message; a RESTORE brings back those of its version."""
        at = [(0,) * size]
        for c in log:
            t = at[-1]
            if c[2] == "R":
                t = at[c[3]]
            else:
                late = any(d[2] == "R" for d in log[c[6] : len(at) - 1])
                t = tuple(
                    (1 if c[2] in "rp" and not late else t[x] + 1) if c[3] <= x < c[4] else t[x] for x in range(size)
                )
            at.append(t)
        return at[-1]

    def files(log: State) -> list[frozenset[State]]:
        """The files of each version: one a message and write."""
        at: list[frozenset[State]] = [frozenset()]
        for number, c in enumerate(log):
            if c[2] == "R":
                at.append(at[c[3]])
                continue
            late = any(d[2] == "R" for d in log[c[6] : number])
            gone = c[2] in "rp" and not late
            left = frozenset(file for file in at[-1] if not (gone and c[3] <= file[0] < c[4]))
            at.append(left | {(x, number) for x in range(c[3], c[4])})
        return at

    def understood(log: State, version: int, at: list[State]) -> State:
        """The state after a RESTORE to ``version``, as the ledger understands it."""
        now = len(at) - 1
        if restored == "clock":
            return at[max(0, version - 1)]
        found = files(log[:now])
        same = {at[v] for v in range(now) if found[v] == found[version]}
        return same.pop() if len(same) == 1 else (*at[-1][:2], False)

    def view(log: State) -> State:
        """What is covered, what has to be replaced, and whether that is certain."""
        return carried_fold(log) if carried else whole_fold(log)

    def applied(log: State, number: int, state: State, *, since: int = 0) -> State:
        c, (cov, again, known) = log[number], state
        r = frozenset(range(c[3], c[4]))
        if reader == "newest":
            return frozenset(range(c[4])), frozenset(), known
        late = any(d[2] == "R" for d in log[max(since, c[6]) : number])  # planned before a RESTORE, landed after it
        again = again | r & cov if repair and (c[2] == "a" or late) else again if c[2] == "a" else again - r
        if c[2] == "r" and c[5] and redo:
            again = (again | frozenset(range(c[4], c[5]))) & (cov | r)
        return frozenset(range(c[4])) if c[2] == "r" and not redo else cov | r, again, known

    def whole_fold(log: State) -> State:
        at: list[State] = [(frozenset(), frozenset(), True)]
        for number, c in enumerate(log):
            if c[2] == "R":
                at.append(at[c[3]] if restored == "number" or c[4] else understood(log, c[3], at))
            else:
                at.append(applied(log, number, at[-1]))
        return at[-1]

    def carried_fold(log: State) -> State:
        """The same, from the newest state that a commit carries."""
        full = max((number for number, c in enumerate(log) if c[2] != "R" and c[7]), default=None)
        state: State = (frozenset(), frozenset(), True)
        start = 0
        if full is not None:
            state, start = log[full][7], log[full][6]
            if carried == "newest":
                start = full
            elif carried == "over":
                start = max([start, *(number + 1 for number in range(start, full) if log[number][2] == "R")])
        at = {start: state}
        for number in range(start, len(log)):
            c = log[number]
            if c[2] != "R":
                state = applied(log, number, state, since=start if carried == "near" else 0)
            elif c[3] in at:
                state = at[c[3]]
            elif carried != "floor":
                state = carried_fold(log[: c[3]])
            else:
                state = at[start]
            at[number + 1] = state
        return state

    def states(log: State) -> list[State | None]:
        """What a commit planned from here may carry."""
        return [view(log), None] if carried else [None]

    def plans(cov: frozenset[int], again: frozenset[int]) -> Iterator[State]:
        if again:
            s = min(again)
            for e in range(s + 1, size + 1):
                if frozenset(range(s, e)) <= again:
                    yield "r", s, e, 0
            return
        gap = sorted(frozenset(range(size)) - cov)
        for e in range(gap[0] + 1, size + 1) if gap else ():
            if frozenset(range(gap[0], e)) <= frozenset(gap):
                yield "a", gap[0], e, 0

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, f, p, rs, rw, cr = st
        cov, again, known = view(log)
        if f[0] == "i" and known:
            n = last(log, "A") + 1
            for kind, s, e, u in plans(cov, again):
                for full in states(log):
                    yield (
                        f"forward plans A:{n} {'append' if kind == 'a' else 'replace'} [{s},{e}){_carrying(full)}",
                        (log, ("w", n, kind, s, e, u, len(log), full), p, rs, rw, cr),
                    )
            if rw and cov and not again:
                top = max(cov) + 1
                for e in range(0 if empty_rewind else 1, top + 1):
                    for full in states(log):
                        yield (
                            f"rewind to 0: plans A:{n} replace [0,{e}) of [0,{top}){_carrying(full)}",
                            (log, ("w", n, "r", 0, e, top, len(log), full), p, rs, rw - 1, cr),
                        )
        elif f[0] == "w":
            ok = last(log, "A") < f[1]
            yield (
                f"forward writes A:{f[1]} {f[2]} [{f[3]},{f[4]}){'' if ok else ': skipped'}",
                ((*log, ("A", *f[1:])) if ok else log, ("i",), p, rs, rw, cr),
            )
            if any(d[2] == "R" for d in log[f[6] :]):
                yield f"forward's write of A:{f[1]} conflicts with the RESTORE: drops it", (log, ("i",), p, rs, rw, cr)
            if cr:
                yield "!forward crashes", (log, ("i",), p, rs, rw, cr - 1)
        app = "A" if replay_app == "same" else "P"
        if p[0] == "i" and known:
            for s in range(size):
                for e in range(s + 1, size + 1):
                    if not clamp or frozenset(range(s, e)) <= cov:
                        for full in states(log):
                            yield (
                                f"replay plans {app}:{last(log, app) + 1} replace [{s},{e}){_carrying(full)}",
                                (log, f, ("w", last(log, app) + 1, s, e, len(log), full), rs, rw, cr),
                            )
            yield "replay not wanted", (log, f, ("x",), rs, rw, cr)
        elif p[0] == "w":
            ok = last(log, app) < p[1]
            yield (
                f"replay writes {app}:{p[1]} [{p[2]},{p[3]}){'' if ok else ': skipped'}",
                (
                    (*log, (app, p[1], "p", p[2], p[3], 0, *p[4:])) if ok else log,
                    f,
                    ("x",) if ok else ("i",),
                    rs,
                    rw,
                    cr,
                ),
            )
        if not known:
            for v in (v for v in range(len(log)) if view(log[:v])[2]):
                yield (
                    f"operator: RESTORE to version {v} by its number",
                    ((*log, ("", 0, "R", v, 1, 0, 0, None)), f, p, rs, rw, cr),
                )
        if rs:
            for v in range(len(log)):
                restore = ("", 0, "R", v, 0, 0, 0, None)
                yield f"!operator: RESTORE to version {v}", ((*log, restore), f, p, rs - 1, rw, cr)

    def complete(st: State) -> bool:
        cov, again, _ = view(st[0])
        return cov == frozenset(range(size)) and not again and st[1][0] == "i" and st[2][0] == "x"

    def bad(st: State) -> str | None:
        t = table(st[0])
        cov, again, known = view(st[0])
        if not known:
            return None
        for x in range(size):
            if t[x] > 1 and x not in again:
                return f"message {x} twice, and the ledger does not know"
            if (t[x] > 0) != (x in cov):
                return f"message {x} {'is lost: it counts as read' if x in cov else 'is there, and will be read again'}"

    return search(Model(init, step, bad, complete))


def _carrying(state: State | None) -> str:
    return ", with the state" if state else ""


VARIANTS = (
    quick(
        "f1",
        "position = end of the newest commit (RESTORE followed)",
        "BAD",
        lambda: model(reader="newest", replay=0, rewind=0),
    ),
    quick("f1'", "same, no RESTORE, a replay", "BAD", lambda: model(reader="newest", restores=0, rewind=0)),
    quick(
        "f2",
        "coverage fold without repair, replay under its own app id, not clamped",
        "BAD",
        lambda: model(replay_app="own", clamp=False, restores=0, rewind=0, repair=False),
    ),
    quick(
        "f3",
        "same but clamped to covered ground, no RESTORE",
        "PASS",
        lambda: model(replay_app="own", restores=0, repair=False),
    ),
    quick("f3'", "same with a RESTORE", "BAD", lambda: model(replay_app="own", restores=1, rewind=0, repair=False)),
    quick(
        "f3''",
        "replay with the member's app id, a RESTORE, no repair",
        "BAD",
        lambda: model(restores=1, rewind=0, repair=False),
    ),
    quick(
        "f4", "rewind with replace, later batches just append", "BAD", lambda: model(redo=False, restores=0, replay=0)
    ),
    quick(
        "f5",
        "fold, two RESTOREs (back and forth) around an append, no repair",
        "BAD",
        lambda: model(restores=2, replay=0, rewind=0, repair=False),
    ),
    quick(
        "f6",
        "fold + redo + repair, own app id for the replay, RESTORE",
        "PASS",
        lambda: model(replay_app="own", restores=1, rewind=0),
    ),
    Variant(
        "f7",
        "fold + redo + repair, replay with the member's app id, rewind, RESTORE",
        "PASS",
        lambda: model(restores=1),
    ),
    Variant("f8", "same, two RESTOREs, two messages", "PASS", lambda: model(restores=2, size=2)),
    quick(
        "g1",
        "a RESTORE to a time, understood by a clock that is wrong",
        "BAD",
        lambda: model(restored="clock", replay=0, rewind=0),
    ),
    Variant(
        "g2",
        "a RESTORE to a time, understood by the files that it left behind; rewinds are empty commits",
        "PASS",
        lambda: model(restored="files", empty_rewind=True, replay_app="own", size=2),
    ),
    Variant(
        "g3",
        "same, two RESTOREs, no replay",
        "PASS",
        lambda: model(restored="files", empty_rewind=True, restores=2, replay=0, size=2),
    ),
    quick("g2-small", "same, no replay", "PASS", lambda: model(restored="files", empty_rewind=True, replay=0, size=2)),
    Variant(
        "h1",
        "the fold starts from the newest state that a commit carries; any commit may carry it; a RESTORE, a replay",
        "PASS",
        lambda: model(carried="base", rewind=0, size=2),
    ),
    quick(
        "h1-small", "same, no replay, no crash", "PASS", lambda: model(carried="base", rewind=0, replay=0, crashes=0)
    ),
    Variant(
        "h2",
        "same, two RESTOREs, no replay",
        "PASS",
        lambda: model(carried="base", restores=2, rewind=0, replay=0, crashes=0, size=2),
    ),
    Variant("h2'", "same, a RESTORE and a rewind", "PASS", lambda: model(carried="base", replay=0, size=2)),
    quick(
        "h3",
        "the state is taken for that before its own commit, not for that at its base",
        "BAD",
        lambda: model(carried="newest", rewind=0, size=2),
    ),
    quick(
        "h4",
        "a RESTORE to before the state goes back to the state",
        "BAD",
        lambda: model(carried="floor", rewind=0, replay=0, size=2),
    ),
    quick(
        "h5",
        "whether a commit is late is looked up no further back than the state",
        "BAD",
        lambda: model(carried="near", restores=1, rewind=0, replay_app="own", size=2),
    ),
    quick(
        "h6",
        "the state of a commit that was planned before a RESTORE is taken for that behind it",
        "BAD",
        lambda: model(carried="over", rewind=0, replay=0, size=2),
    ),
)
