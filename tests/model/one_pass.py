"""One pass: a batch that is written while it is read, for it was planned what a clean read of it gives.

Executors compare what they read with the plan, and ask at the end of each split whether the stream is still the one
that was planned; whatever differs fails the write before its commit. Then the batch is written the careful way: read,
counted, its dead letters, its rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.search import Model, Result, State, Variant, put, quick, search

ROW, DEAD, HOLE = 0, 1, 2


def model(
    *,
    identity: str = "after",
    verdict: str = "held",
    reads: str = "to the end",
    after_failure: str = "look",
    number: str = "same",
    batch_id: str = "new",
    is_fickle: bool = False,
    messages: State = (ROW, DEAD, HOLE),
    runs: int = 2,
    crashes: int = 1,
    late: int = 1,
    recreations: int = 1,
    restores: int = 0,
) -> Result:
    """Explore it.

    Args:
        identity: when a split asks whether the stream is the planned one: ``after`` its read, or ``before``.
        verdict: ``held``: a split that is not clean fails the write; ``ignored``: it is written all the same.
        reads: Spark reads each split ``to the end``, or it may ``stop`` before (a limit, a join with nothing).
        after_failure: ``look`` into the log whether the write landed, or ``assume`` that it did not.
        number: of the careful way: the ``same``, or the ``next`` one when it writes.
        batch_id: of the careful way: a ``new`` one, or the ``same``.
        is_fickle: two reads of the same message may differ in whether it can be decoded.
        messages: what the stream holds.
        runs: of the member.
        crashes: how many there may be.
        late: how often a write may land that its run was told has failed (a Connect server finishes what it began).
        recreations: how often the stream may be deleted and made again, with other messages under the same sequences.
        restores: how often the table may be restored.
    """
    # The log: ('b', number, batch id, s, e, rows, which stream was read) or ('R', place). The dead letters: (batch id,
    # messages). The stream: how often it was recreated. A run: ('i', k) idle, ('o', k, n, s, e, at, seen, ok) in one
    # pass, ('f', k, n, s, e) failed, ('c', k, n, s, e, at, seen, ok) reading the careful way, ('d', …, seen) checked,
    # ('w', …, seen) dead letters written, ('x',) refused; k stands for the batch id. Then the writes that are under
    # way although their run was told that they failed: what they add to the log.
    size = len(messages)
    init = ((), (), 0, tuple(("i", 0) for _ in range(runs)), frozenset(), crashes, late, recreations, restores)

    def last(log: State) -> int:
        return max((c[1] for c in log if c[0] == "b"), default=0)

    def surviving(log: State) -> list[State]:
        found, at = [], len(log) - 1
        while at >= 0:
            if log[at][0] == "R":
                at = log[at][1] - 1
                continue
            found.append(log[at])
            at -= 1
        return found

    def gap(log: State) -> tuple[int, int] | None:
        covered = {x for c in surviving(log) for x in range(c[3], c[4])}
        start = next((x for x in range(size) if x not in covered), None)
        if start is None:
            return None
        return start, next((x for x in range(start, size) if x in covered), size)

    def kinds(x: int) -> set[int]:
        return {ROW, DEAD} if is_fickle and messages[x] == DEAD else {messages[x]}

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, dead, stream, ps, zombies, cr, lt, rc, rs = st

        def to(i: int, run: State, log: State = log, dead: State = dead, zombies: frozenset[State] = zombies) -> State:
            return log, dead, stream, put(ps, i, run), zombies, cr, lt, rc, rs

        for i, p in enumerate(ps):
            k = p[1] if len(p) > 1 else 0
            if p[0] == "i":
                found = gap(log)
                if stream:
                    # The ledger has the identity of the first stream.
                    yield f"run{i} refuses the recreated stream", to(i, ("x",))
                elif found:
                    for e in range(found[0] + 1, found[1] + 1):
                        for way in ("o", "c"):
                            begun = (way, k, last(log) + 1, found[0], e, found[0], (), True)
                            yield f"run{i} plans {last(log) + 1} [{found[0]},{e}) {way}", to(i, begun)
            elif p[0] == "o":
                _, k, n, s, e, at, seen, ok = p
                if at < e:
                    for kind in kinds(at):
                        is_ok = ok and (kind == ROW or verdict == "ignored")
                        yield f"run{i} reads {at}", to(i, ("o", k, n, s, e, at + 1, (*seen, (kind, stream)), is_ok))
                    if reads == "stop":
                        yield f"run{i} stops reading at {at}", to(i, ("o", k, n, s, e, e, seen, ok))
                else:
                    is_clean = ok and (identity == "before" or not stream)
                    rows = frozenset(s + y for y, (kind, _) in enumerate(seen) if kind == ROW)
                    commit = ("b", n, (i, k), s, e, rows, max((of for _, of in seen), default=0))
                    lands = is_clean and last(log) < n
                    if lands:
                        yield f"run{i} commits {n} in one pass", to(i, ("f", k, n, s, e), (*log, commit))
                    else:
                        yield f"run{i} does not commit {n} in one pass", to(i, ("f", k, n, s, e))
                    if lt and is_clean:
                        yield (
                            f"run{i} is told that {n} failed, and it is still under way",
                            (log, dead, stream, put(ps, i, ("f", k, n, s, e)), zombies | {commit}, cr, lt - 1, rc, rs),
                        )
            elif p[0] == "f":
                _, k, n, s, e = p
                there = next((c for c in log if c[0] == "b" and c[1] == n), None)
                if after_failure == "look" and there:
                    is_own = there[2] == (i, k)
                    yield f"run{i} finds {n}, {'its own' if is_own else 'of another'}", to(i, ("i", k + 1))
                else:
                    k = k + 1 if batch_id == "new" else k
                    yield f"run{i} turns to the careful way", to(i, ("c", k, n, s, e, s, (), True))
            elif p[0] == "c":
                _, k, n, s, e, at, seen, _ = p
                if at < e:
                    for kind in kinds(at):
                        yield f"run{i} caches {at}", to(i, ("c", k, n, s, e, at + 1, (*seen, (kind, stream)), True))
                elif stream:
                    yield f"run{i} sees that the stream was recreated", to(i, ("x",))
                else:
                    yield f"run{i} knows what it read", to(i, ("d", k, n, s, e, seen))
            elif p[0] == "d":
                _, k, n, s, e, seen = p
                letters = frozenset(s + y for y, (kind, _) in enumerate(seen) if kind == DEAD)
                yield (
                    f"run{i} writes dead letters {sorted(letters)}",
                    to(i, ("w", k, n, s, e, seen), dead=(*dead, ((i, k), letters)) if letters else dead),
                )
            elif p[0] == "w":
                _, k, n, s, e, seen = p
                n = n if number == "same" else last(log) + 1
                rows = frozenset(s + y for y, (kind, _) in enumerate(seen) if kind == ROW)
                ok = last(log) < n
                commit = ("b", n, (i, k), s, e, rows, 0)
                yield (
                    f"run{i} writes {n} the careful way{'' if ok else ': skipped'}",
                    to(i, ("i", k + 1), (*log, commit) if ok else log),
                )
            if cr and p[0] not in "ix":
                yield f"!run{i} crashes", (log, dead, stream, put(ps, i, ("i", k + 2)), zombies, cr - 1, lt, rc, rs)
        for commit in zombies:
            landed = (*log, commit) if last(log) < commit[1] else log
            yield f"!{commit[1]} lands late", (landed, dead, stream, ps, zombies - {commit}, cr, lt, rc, rs)
        if rc:
            yield "!the stream is made again", (log, dead, stream + 1, ps, zombies, cr, lt, rc - 1, rs)
        if rs:
            for at in range(len(log)):
                yield f"!RESTORE to {at}", ((*log, ("R", at)), dead, stream, ps, zombies, cr, lt, rc, rs - 1)

    def bad(st: State) -> str | None:
        log, dead = st[:2]
        held = surviving(log)
        for x in range(size):
            over = [c for c in held if c[3] <= x < c[4]]
            if len(over) > 1 and not any(c[0] == "R" for c in log):
                return f"{x} is covered twice"
            if any(c[6] for c in over):
                return f"{x} is of another stream"
            if len(over) != 1:
                continue
            counted = sum(x in letters for bid, letters in dead if bid == over[0][2])
            there = (x in over[0][5]) + counted
            if there != (messages[x] != HOLE):
                return f"{x} is there {there} times"
        return None

    def done(st: State) -> bool:
        log, _, stream, ps = st[:4]
        return all(p == ("x",) for p in ps) if stream else gap(log) is None and all(p[0] == "i" for p in ps)

    return search(Model(init, step, bad, done))


VARIANTS = (
    Variant(
        "one1", "identity asked after each split, and two runs", "PASS", lambda: model(messages=(ROW, DEAD), crashes=0)
    ),
    quick("one1-small", "same, one run, one message missing", "PASS", lambda: model(runs=1)),
    Variant(
        "one2",
        "same, one run and a RESTORE",
        "PASS",
        lambda: model(messages=(ROW, DEAD), runs=1, recreations=0, restores=1),
    ),
    Variant("one3", "same, three runs", "PASS", lambda: model(messages=(DEAD,), runs=3, crashes=0)),
    quick("one4", "the identity is asked before the read", "BAD", lambda: model(identity="before", runs=1)),
    quick(
        "one5",
        "a split that is not clean is written with the planned counts",
        "BAD",
        lambda: model(verdict="ignored", runs=1),
    ),
    quick("one6", "Spark may stop reading before the end", "BAD", lambda: model(reads="stop", runs=1)),
    quick(
        "one7",
        "a failed write is taken for missing, and done again under the next number",
        "BAD",
        lambda: model(after_failure="assume", number="next", runs=1),
    ),
    quick(
        "one8", "it is looked for, and done again under the next number", "BAD", lambda: model(number="next", runs=1)
    ),
    quick(
        "one9",
        "it is not looked for, but has the same number: Delta takes one of the two",
        "PASS",
        lambda: model(after_failure="assume", runs=1),
    ),
    quick(
        "one10",
        "the careful way keeps the batch id, and two reads may differ",
        "BAD",
        lambda: model(batch_id="same", is_fickle=True, messages=(DEAD,), runs=1),
    ),
    quick(
        "one11",
        "the careful way has a batch id of its own, and two reads may differ",
        "PASS",
        lambda: model(is_fickle=True, messages=(DEAD, ROW), runs=1),
    ),
)
