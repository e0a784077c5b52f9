"""A stream that was deleted and made again: somebody accepts the new one, and ingestion continues in a new epoch.

Sequences of the new stream collide with those of the old one, so rows and ranges carry the epoch. A run opens the
stream (its identity then), looks up in which epoch the ledger has it, plans from one snapshot, reads (whatever the
stream is by then), asks for the identity again, and writes. An accept reads the ledger, asks for the identity, and
writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from tests.model.search import Model, Result, State, Variant, put, quick, search

MESSAGES = 2
_ALL = frozenset(range(MESSAGES))
# What is known after a commit: the identity of each epoch, what is covered of it, and where those end that are over.
Known = tuple[dict[int, int], dict[int, frozenset[int]], dict[int, int]]


def last(log: State, line: str) -> int:
    return max((c[1] for c in log if c[0] == line), default=0)


def fold(log: State, *, survives: bool, has_epochs: bool) -> Known:
    at: list[Known] = [({}, {}, {})]
    for c in log:
        identities, covered, ends = (dict(part) for part in at[-1])
        if c[2] == "R":
            past = at[c[5]]
            covered = {epoch: past[1].get(epoch, frozenset()) for epoch in identities}
            if not survives:
                identities, covered, ends = (dict(part) for part in past)
        elif c[2] == "x":
            if identities:
                known = max(identities)
                ends[known] = max(covered[known], default=-1) + 1
            identities[c[3]] = c[4]
            covered[c[3]] = covered.get(c[3], frozenset()) if has_epochs else frozenset()
        else:
            covered[c[3]] = covered.get(c[3], frozenset()) | frozenset(range(c[5], c[6]))
        at.append((identities, covered, ends))
    return at[-1]


def rows(log: State) -> State:
    """What is in the table: (epoch, sequence, the identity it was read from), each as often as it is there."""
    at: list[State] = [()]
    for c in log:
        table = at[-1]
        if c[2] == "R":
            table = at[c[5]]
        elif c[2] == "b":
            table = tuple(sorted(table + tuple((c[3], sequence, c[4]) for sequence in range(c[5], c[6]))))
        at.append(table)
    return at[-1]


def gone(known: Known) -> Mapping[int, frozenset[int]]:
    """What a RESTORE took from epochs that are over: nobody can read it again."""
    _, covered, ends = known
    missing = {epoch: frozenset(range(end)) - covered.get(epoch, frozenset()) for epoch, end in sorted(ends.items())}
    return {epoch: part for epoch, part in missing.items() if part}


def model(
    *,
    per_shard: bool = False,
    recreations: int = 1,
    restores: int = 0,
    crashes: int = 1,
    accepts: int = 2,
    runs: int = 2,
    has_epochs: bool = True,
    asks_again: bool = True,
    takes_planned_number: bool = True,
    survives: bool = True,
    records: bool = True,
    looks_again: bool = True,
) -> Result:
    """Explore it.

    Args:
        per_shard: each shard, so each epoch, has a transaction sequence of its own; accepts have that of the group.
        recreations: how often the stream is made again.
        restores: how many there may be.
        crashes: how many there may be.
        accepts: how many somebody may have going at the same time.
        runs: likewise.
        has_epochs: without them the new stream continues under the old name, from its first message.
        asks_again: after the read, a run asks for the identity again.
        takes_planned_number: an accept takes the number that it planned with, not whatever is next.
        survives: an accept survives a RESTORE; otherwise it is taken back, like what is covered.
        records: what a RESTORE took from an epoch that is over is an error until it is recorded.
        looks_again: at each plan a run looks whether its epoch is still the one of the ledger.
    """
    # The log: (line, number, kind, epoch, identity, start, end); kind: b batch, x accept, l recorded loss, R a RESTORE
    # to the version in start. A state: log, the identity of the stream now, runs, accepts, restores and crashes left.
    init = ((("main", 1, "x", 1, 0, 0, 0),), 0, (("i",),) * runs, (("i",),) * accepts, restores, crashes)

    def line(epoch: int) -> str:
        return f"shard of epoch {epoch}" if per_shard else "main"

    def write(log: State, own: str, number: int, *entry: object) -> State:
        return (*log, (own, number, *entry)) if last(log, own) < number else log

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, world, processes, accepting, rs, cr = st
        known = fold(log, survives=survives, has_epochs=has_epochs)
        identities = known[0]
        epoch = max(identities)
        for i, p in enumerate(processes):

            def to(p: State, log: State = log, cr: int = cr, i: int = i) -> State:
                return log, world, put(processes, i, p), accepting, rs, cr

            if p[0] == "i":
                yield f"run{i} opens the stream: identity {world}", to(("o", world))
            elif p[0] == "o":
                is_known = identities[epoch] == p[1]
                yield (
                    (f"run{i} is in epoch {epoch}", to(("r", p[1], epoch)))
                    if is_known
                    else (f"run{i}: another stream, an error", to(("i",)))
                )
            elif p[0] == "r" and looks_again and epoch != p[2]:
                yield f"run{i}: the ledger is in another epoch, an error", to(("i",))
            elif p[0] == "r":
                yield from run_plans(i, p, log, known, to)
            elif p[0] == "p":
                _, w, k, n, s, e = p
                if asks_again and world != w:
                    yield f"run{i} reads, and the identity is {world} then: an error", to(("i",))
                else:
                    yield f"run{i} reads identity {world}", to(("w", w, k, n, s, e, world))
            elif p[0] == "w":
                _, w, k, n, s, e, read = p
                after = write(log, line(k), n, "b", k, read, s, e)
                yield f"run{i} writes {line(k)}:{n}, epoch {k} [{s},{e}) of identity {read}", to(("r", w, k), log=after)
            elif p[0] == "l":
                _, w, k, n, g, s, e = p
                yield f"run{i} records a loss", to(("r", w, k), log=write(log, line(k), n, "l", g, -1, s, e))
            if cr and p[0] != "i":
                yield f"!run{i} crashes", to(("i",), cr=cr - 1)
        for i, x in enumerate(accepting):

            def on(x: State, log: State = log, cr: int = cr, i: int = i) -> State:
                return log, world, processes, put(accepting, i, x), rs, cr

            if x[0] == "i" and identities[epoch] != world:
                yield f"accept{i} reads the ledger", on(("a", last(log, "main") + 1, epoch, identities[epoch]))
            elif x[0] == "a" and world == x[3]:
                yield f"accept{i}: nothing was made again, refused", on(("i",))
            elif x[0] == "a":
                yield f"accept{i} finds identity {world}", on(("x", x[1], x[2], world))
            elif x[0] == "x":
                n = x[1] if takes_planned_number else last(log, "main") + 1
                k = x[2] + 1 if has_epochs else x[2]
                yield f"accept{i} writes main:{n}, epoch {k}", on(("i",), log=write(log, "main", n, "x", k, x[3], 0, 0))
            if cr and x[0] != "i":
                yield f"!accept{i} crashes", on(("i",), cr=cr - 1)
        if world < recreations:
            yield f"!the stream is made again: identity {world + 1}", (log, world + 1, processes, accepting, rs, cr)
        for v in range(1, len(log)) if rs else ():
            restored = (*log, ("", 0, "R", 0, 0, v, 0))
            yield f"!RESTORE to version {v}", (restored, world, processes, accepting, rs - 1, cr)

    def run_plans(i: int, p: State, log: State, known: Known, to: object) -> Iterator[tuple[str, State]]:
        assert callable(to)
        _, w, k = p
        n = last(log, line(k)) + 1
        if records and gone(known):
            over, part = next(iter(gone(known).items()))
            yield f"run{i} will record a loss in epoch {over}", to(("l", w, k, n, over, min(part), max(part) + 1))
            return
        left = sorted(_ALL - known[1].get(k, frozenset()))
        if not left:
            yield f"run{i} is at the end", to(("i",))
        for e in range(left[0] + 1, MESSAGES + 1) if left else ():
            if frozenset(range(left[0], e)) <= frozenset(left):
                yield f"run{i} plans {line(k)}:{n}, epoch {k} [{left[0]},{e})", to(("p", w, k, n, left[0], e))

    def wrong(st: State) -> str | None:
        log = st[0]
        identities, covered, _ = fold(log, survives=survives, has_epochs=has_epochs)
        table = rows(log)
        if len({(k, q) for k, q, _ in table}) < len(table):
            return "two rows of one epoch and sequence"
        if len({(w, q) for _, q, w in table}) < len(table):
            return "one message in two epochs"
        if any(identities.get(k) != w for k, _, w in table):
            return "a message stands in the epoch of another identity"
        lost = {(c[3], q) for c in log if c[2] == "l" for q in range(c[5], c[6])}
        counted = {(k, q) for k in identities for q in covered[k]}
        there = {(k, q) for k, q, _ in table}
        if not counted <= there | lost:
            return "a message is lost: the ledger counts it as read"
        return None if there <= counted else "a message is in the table, and the ledger will read it again"

    def is_done(st: State) -> bool:
        log, world, processes, accepting, _, _ = st
        known = fold(log, survives=survives, has_epochs=has_epochs)
        epoch = max(known[0])
        is_idle = all(p == ("i",) for p in (*processes, *accepting))
        return is_idle and known[0][epoch] == world and known[1][epoch] == _ALL and not gone(known)

    return search(Model(init, step, wrong, is_done))


_BY = {"one": False, "shard": True}
VARIANTS = [
    variant
    for name, per_shard in _BY.items()
    for variant in (
        quick(
            f"{name}-epochs",
            "the new stream is accepted, and continues in an epoch of its own",
            "PASS",
            partial(model, per_shard=per_shard, accepts=1),
        ),
        Variant(f"{name}-two-accepts", "two accepts at the same time", "PASS", partial(model, per_shard=per_shard)),
        Variant(
            f"{name}-twice",
            "the stream is made again twice",
            "PASS",
            partial(model, per_shard=per_shard, recreations=2, crashes=0),
        ),
        Variant(
            f"{name}-restore",
            "a RESTORE, also to before the accept",
            "PASS",
            partial(model, per_shard=per_shard, restores=1, accepts=1),
        ),
        Variant(
            f"{name}-twice-restore",
            "made again twice, and a RESTORE",
            "PASS",
            partial(model, per_shard=per_shard, recreations=2, restores=1, accepts=1, runs=1),
        ),
        quick(
            f"{name}-no-epochs",
            "the new stream continues under the old name",
            "BAD",
            partial(model, per_shard=per_shard, has_epochs=False),
        ),
        quick(
            f"{name}-not-asked-again",
            "the identity is not asked for after the read",
            "BAD",
            partial(model, per_shard=per_shard, asks_again=False),
        ),
        Variant(
            f"{name}-any-number",
            "an accept takes whatever number is next",
            "BAD",
            partial(model, per_shard=per_shard, recreations=2, takes_planned_number=False),
        ),
        quick(
            f"{name}-taken-back",
            "a RESTORE takes an accept back",
            "BAD",
            partial(model, per_shard=per_shard, recreations=2, restores=1, accepts=1, survives=False),
        ),
        quick(
            f"{name}-forgotten",
            "what a RESTORE took from an epoch that is over is forgotten",
            "STUCK",
            partial(model, per_shard=per_shard, restores=1, accepts=1, runs=1, records=False),
        ),
        Variant(
            f"{name}-late-run",
            "a run stays in its epoch to its end: its messages belong there",
            "PASS",
            partial(model, per_shard=per_shard, accepts=1, looks_again=False),
        ),
    )
]
