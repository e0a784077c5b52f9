"""Claim mode (Redis, load_balanced): entries are claimed into the name ``<member>/<N>/<u>`` of one batch attempt.

Others move them out of names that are dead, and they are acknowledged after the write.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.search import Model, Result, State, Variant, put, quick, search


def model(
    *,
    procs: str = "AB",
    uuid: bool = True,
    resolve: str = "carry",
    move: str = "cas",
    restart: str = "fence",
    heartbeat: str = "",
    lost_reply: str = "",
    delete: str = "",
    entries: int = 3,
    crashes: int = 1,
    takes: int = 3,
    fence: bool = True,
    compare: bool = False,
    failover: str = "",
    seizes: int = 0,
    foreign: str = "fence",
) -> Result:
    """Explore it.

    Args:
        procs: the member of each process; ``AA`` are two runs of one member.
        uuid: whether the name has a batch id.
        resolve: when an entry counts as written: ``carry``, the commit (member, N) must carry the id; ``le``, N is not
            behind the ledger.
        move: ``cas``, only from the name that was looked at; ``blind``, whoever has it (XAUTOCLAIM).
        restart: ``fence`` an open batch of one's own, or ``replay`` it under its number.
        heartbeat: ``cas`` or ``xclaim``.
        lost_reply: of a claim: ``ignore`` or ``abandon`` the name.
        delete: remove empty names, ``lua`` in one step with the look, or ``plain``.
        entries: how many there are.
        crashes: how many there may be.
        takes: takeovers of names that are held.
        fence: whether names of others are fenced.
        compare: the ledger is read after the claim, and what is in the table by then is not written.
        failover: the server forgets its newest changes once: ``quiet``, what is in hand is known to the older state,
            or ``any``, at any moment.
        seizes: how many entries another client takes from whoever holds them (XAUTOCLAIM).
        foreign: entries are moved from it after ``fence``, a fence of every open name in the group, or at once
            (``take``).
    """
    # The log: (member, N, kind, u, entries). An entry: 0 undelivered, 'x' acknowledged, 'gone' deleted, or its name
    # (member, N, u); u is the smallest number that nobody refers to for this (member, N).
    # A process: ('i',) idle, ('c', N, u, ids) claiming, ('m', N, u, ids, e, name) about to move e, ('w', N, u, ids)
    # closed, about to write, ('v', N, u, ids) to verify, ('a', ids) to acknowledge, ('f', name) about to fence,
    # ('d', name) about to delete the consumer, ('k', names, e, name) about to fence names, and then to move e. 'w' has
    # one field more: what is not written, since it is in the table. The last field of a state is the older state of
    # the server (``None`` if none is left to go back to, () if none was kept yet), and the seizures that are left.
    everything = range(entries)
    init = (
        (),
        (0,) * entries,
        (("i",),) * len(procs),
        crashes,
        takes,
        1 if lost_reply else 0,
        (() if failover else None, seizes),
    )

    def last(log: State, m: str) -> int:
        return max((c[1] for c in log if c[0] == m), default=0)

    def state_of(log: State, name: State) -> str:
        m, n, u = name
        if n > last(log, m):
            return "open"
        if resolve == "le":
            return "written"
        return (
            "written"
            if any(c[0] == m and c[1] == n and c[2] == "b" and (c[3] == u or not uuid) for c in log)
            else "dead"
        )

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, pel, ps, cr, tk, lr, (copy, left) = st
        in_table = frozenset(e for c in log if c[2] == "b" for e in c[4])
        if copy == ():
            yield "the replica has all until now", (log, pel, ps, cr, tk, lr, (pel, left))
        elif copy is not None:
            names = {(procs[j], q[1], q[2]): q[3] for j, q in enumerate(ps) if q[0] in ("c", "m", "w", "v")}
            if failover == "any" or all(copy[e] == name for name, ids in names.items() for e in ids):
                yield "!the replica is promoted", (log, copy, ps, cr, tk, lr, (None, left))
        for e in everything if left else ():
            if isinstance(pel[e], tuple) and pel[e][0] != "?":
                seized = put(pel, e, ("?", left, 0))
                yield f"!another client takes {e} from {pel[e]}", (log, seized, ps, cr, tk, lr, (copy, left - 1))
        for i in range(len(procs)):
            m, ph = procs[i], ps[i]

            def to(
                ph: State = ph, log: State = log, pel: State = pel, cr: int = cr, tk: int = tk, lr: int = lr, i: int = i
            ) -> State:
                return log, pel, put(ps, i, ph), cr, tk, lr, (copy, left)

            who = f"{m}{i}"
            pend = [e for e in everything if isinstance(pel[e], tuple)]
            held = {(procs[j], q[1], q[2]) for j, q in enumerate(ps) if q[0] in ("c", "m", "w", "v")}
            fresh = [e for e in everything if pel[e] == 0][:1]
            if ph[0] == "i":
                for name in sorted({pel[e] for e in pend}, key=str):
                    if name[0] == "?":
                        if foreign == "fence":
                            full = {(procs[j], q[1], q[2]) for j, q in enumerate(ps) if q[0] in "cmwv" and q[3]}
                            full |= {p for p in pel if isinstance(p, tuple) and p[0] != "?"}
                            listed = tuple(sorted(x for x in full if state_of(log, x) == "open"))
                            yield (
                                f"{who} will fence {listed} before it moves {name}",
                                to(("k", listed, pel.index(name), name)),
                            )
                        continue
                    what, mine = state_of(log, name), name[0] == m
                    es = frozenset(e for e in pend if pel[e] == name)
                    if what == "written":
                        yield f"{who} finds {name} written: acknowledges {sorted(es)}", to(("a", es))
                    elif what == "open" and mine and restart == "replay":
                        yield f"{who} resumes {name} with {sorted(es)}", to(("w", name[1], name[2], es, frozenset()))
                    elif what == "open" and fence and (tk or name not in held):
                        yield (
                            f"{who} finds {name} idle and open: will fence it",
                            to(("f", name), tk=tk - (name in held)),
                        )
                if fresh or pend:
                    n = last(log, m) + 1
                    used = {p[2] for p in (*pel, *(copy or ())) if isinstance(p, tuple) and p[:2] == (m, n)} | {
                        q[2] for q in held if q[:2] == (m, n)
                    }
                    used |= {q[-1][2] for q in ps if q[0] in "mfd" and q[-1][:2] == (m, n)}
                    u = min(set(range(9)) - used) if uuid else 0
                    yield f"{who} starts batch {n} as {(m, n, u)}", to(("c", n, u, frozenset()))
                if delete:
                    for name in sorted(held):
                        if tk and state_of(log, name) != "open" and not any(p == name for p in pel):
                            yield f"{who} sees {name} empty: will delete the consumer", to(("d", name), tk=tk - 1)
            elif ph[0] == "f":
                name = ph[1]
                ok = last(log, name[0]) < name[1]
                yield (
                    f"{who} fences {name[0]}:{name[1]}{'' if ok else ': skipped'}",
                    to(("i",), log=(*log, (name[0], name[1], "f", 0, frozenset())) if ok else log),
                )
            elif ph[0] == "k" and ph[1]:
                _, (name, *rest), e, old = ph
                ok = last(log, name[0]) < name[1]
                yield (
                    f"{who} fences {name[0]}:{name[1]}{'' if ok else ': skipped'}",
                    to(("k", tuple(rest), e, old), log=(*log, (name[0], name[1], "f", 0, frozenset())) if ok else log),
                )
            elif ph[0] == "k":
                _, _, e, old = ph
                n = last(log, m) + 1
                used = {p[2] for p in (*pel, *(copy or ())) if isinstance(p, tuple) and p[:2] == (m, n)}
                used |= {q[2] for q in held if q[:2] == (m, n)}
                u = min(set(range(9)) - used)
                yield f"{who} starts batch {n} as {(m, n, u)}", to(("m", n, u, frozenset(), e, old))
            elif ph[0] == "c":
                _, n, u, ids = ph
                name = (m, n, u)
                for e in fresh:
                    yield (
                        f"{who} XREADGROUP > delivers {e} to {name}",
                        to(("c", n, u, ids | {e}), pel=put(pel, e, name)),
                    )
                    if lr:
                        q = ("c", n, u, ids) if lost_reply == "ignore" else ("i",)
                        yield (
                            f"!{who} XREADGROUP > delivers {e} to {name}, the reply is lost",
                            to(q, pel=put(pel, e, name), lr=0),
                        )
                for e in pend:
                    if pel[e] == name:
                        continue
                    if pel[e][0] == "?":
                        if foreign == "take":
                            yield f"{who} will move {e} from {pel[e]}", to(("m", n, u, ids, e, pel[e]))
                        continue
                    if move == "blind" and not fence:
                        if tk:
                            yield (
                                f"{who} XAUTOCLAIMs {e} from {pel[e]}",
                                to(("c", n, u, ids | {e}), pel=put(pel, e, name), tk=tk - 1),
                            )
                    elif state_of(log, pel[e]) == "dead" or (
                        resolve == "le" and any(c[:3] == (*pel[e][:2], "f") for c in log)
                    ):
                        yield f"{who} will move {e} from dead {pel[e]}", to(("m", n, u, ids, e, pel[e]))
                if ids:
                    yield (
                        f"{who} closes batch {n} with {sorted(ids)}",
                        to(("w", n, u, ids, ids & in_table if compare else frozenset())),
                    )
                else:
                    yield f"{who} has nothing in batch {n}", to(("i",))
            elif ph[0] == "m":
                _, n, u, ids, e, old = ph
                if isinstance(pel[e], tuple) and (move == "blind" or pel[e] == old):
                    yield (
                        f"{who} takes {e} from {pel[e]} to {(m, n, u)}",
                        to(("c", n, u, ids | {e}), pel=put(pel, e, (m, n, u))),
                    )
                else:
                    yield f"{who} no longer finds {e} in {old}", to(("c", n, u, ids))
            elif ph[0] == "w":
                _, n, u, ids, known = ph
                ok = last(log, m) < n
                yield (
                    f"{who} writes {m}:{n} {sorted(ids - known)}{'' if ok else ': skipped'}",
                    to(("v", n, u, ids), log=(*log, (m, n, "b", u, ids - known)) if ok else log),
                )
                if heartbeat and tk:
                    new = tuple(
                        (m, n, u)
                        if e in ids and isinstance(pel[e], tuple) and (heartbeat == "xclaim" or pel[e] == (m, n, u))
                        else pel[e]
                        for e in everything
                    )
                    if new != pel:
                        yield f"{who} heartbeat XCLAIM JUSTID {sorted(ids)} to {(m, n, u)}", to(pel=new, tk=tk - 1)
            elif ph[0] == "v":
                _, n, u, ids = ph
                if any(c[:2] == (m, n) and c[2] == "b" and c[3] == u and (uuid or c[4] == ids) for c in log):
                    yield f"{who} verified {m}:{n}", to(("a", ids))
                else:
                    yield f"{who} was raced or fenced at {m}:{n}: drops the batch", to(("i",))
            elif ph[0] == "a":
                rest = sorted(ph[1])
                new = pel
                for e in rest:
                    new = put(new, e, "x") if isinstance(new[e], tuple) else new
                yield f"{who} XACK {rest}", to(("i",), pel=new)
                if len(rest) > 1:
                    e = rest[0]
                    yield (
                        f"!{who} XACK {e}, then crashes",
                        (
                            log,
                            put(pel, e, "x") if isinstance(pel[e], tuple) else pel,
                            put(ps, i, ("i",)),
                            cr,
                            tk,
                            lr,
                            (copy, left),
                        ),
                    )
            elif ph[0] == "d":
                here = any(p == ph[1] for p in pel)
                if delete == "plain" or not here:
                    yield f"{who} DELCONSUMER {ph[1]}", to(("i",), pel=tuple("gone" if p == ph[1] else p for p in pel))
                else:
                    yield f"{who} does not delete {ph[1]}: entries pending", to(("i",))
            if cr and ph[0] != "i":
                yield f"!{who} crashes", (log, pel, put(ps, i, ("i",)), cr - 1, tk, lr, (copy, left))

    def bad(st: State) -> str | None:
        log, pel = st[0], st[1]
        seen = set()
        for c in log:
            if c[2] == "b":
                if seen & c[4]:
                    return f"entry {sorted(seen & c[4])} written twice"
                seen |= c[4]
        for e in everything:
            if pel[e] in ("x", "gone") and e not in seen:
                return f"entry {e} {'acknowledged' if pel[e] == 'x' else 'deleted with the consumer'} but never written"

    def done(st: State) -> bool:
        return all(p == "x" for p in st[1]) and all(p == ("i",) for p in st[2])

    return search(Model(init, step, bad, done))


VARIANTS = (
    quick(
        "c1",
        "as designed: names without uuid, number <= ledger acknowledges, XAUTOCLAIM, own open batch replayed",
        "BAD",
        lambda: model(uuid=False, resolve="le", move="blind", restart="replay", entries=2),
    ),
    quick(
        "c1'",
        "same, nothing but crashes of one member and its fence",
        "BAD",
        lambda: model(uuid=False, resolve="le", move="cas", restart="fence", procs="A", entries=2),
    ),
    quick(
        "c2",
        "commit must be a batch (not a fence), but no uuid in the name; two runs of one member",
        "BAD",
        lambda: model(uuid=False, resolve="carry", procs="AA", entries=2, crashes=0),
    ),
    Variant(
        "c3",
        "uuid in the name, XAUTOCLAIM/XCLAIM without looking at the owner again",
        "BAD",
        lambda: model(move="blind", entries=2, crashes=2),
    ),
    quick("c3'", "XAUTOCLAIM first, then ask", "BAD", lambda: model(move="blind", fence=False, entries=1)),
    quick(
        "c4",
        "uuid, cas, but the own open batch is replayed under its number",
        "BAD",
        lambda: model(restart="replay", procs="AA", entries=2),
    ),
    quick(
        "c5",
        "uuid, cas, fence on restart; heartbeat by plain XCLAIM JUSTID",
        "BAD",
        lambda: model(heartbeat="xclaim", entries=1),
    ),
    quick("c6", "reply of XREADGROUP lost, ignored", "BAD", lambda: model(lost_reply="ignore", entries=2)),
    quick(
        "c8",
        "empty consumers of resolved batches removed by XPENDING then XGROUP DELCONSUMER",
        "BAD",
        lambda: model(delete="plain", entries=1, takes=2),
    ),
    Variant("c7", "fixed: uuid, carry, cas, fence on restart", "PASS", lambda: model(entries=2, crashes=1, takes=1)),
    quick("c7'", "fixed, one entry, more crashes and takeovers", "PASS", lambda: model(entries=1, crashes=2, takes=2)),
    Variant("c7a", "fixed, two runs of one member", "PASS", lambda: model(procs="AA", entries=2, crashes=1, takes=1)),
    quick("c7b", "fixed, cas heartbeat", "PASS", lambda: model(heartbeat="cas", entries=1, crashes=1, takes=2)),
    Variant(
        "c7c",
        "fixed, lost reply abandons the name",
        "PASS",
        lambda: model(lost_reply="abandon", entries=2, crashes=0, takes=1),
    ),
    quick(
        "c7d",
        "fixed, three members (second takeover)",
        "PASS",
        lambda: model(procs="ABC", entries=1, crashes=0, takes=2),
    ),
    Variant("c7e", "fixed, three entries, no crash", "PASS", lambda: model(entries=3, crashes=0, takes=1)),
    quick(
        "c7f", "fixed, DELCONSUMER only if empty, atomically", "PASS", lambda: model(delete="lua", entries=1, takes=2)
    ),
    Variant(
        "c9",
        "the server forgets that entries were given and acknowledged, and the ledger is not asked again",
        "BAD",
        lambda: model(procs="A", failover="quiet", entries=1, crashes=0),
        is_small=True,
    ),
    Variant(
        "c9a",
        "every entry is compared with the table after the claim, one member, a failover at any moment",
        "PASS",
        lambda: model(procs="A", failover="any", compare=True, entries=2),
        is_small=True,
    ),
    Variant(
        "c9b",
        "the same, two members, the failover forgets nothing that is in hand",
        "PASS",
        lambda: model(failover="quiet", compare=True, entries=1, takes=1),
        is_small=True,
    ),
    Variant(
        "c9c",
        "the limit: two members have the same entry in hand, since the server forgot that it had given it",
        "BAD",
        lambda: model(failover="any", compare=True, entries=1, crashes=0, takes=0),
        is_small=True,
    ),
    Variant(
        "c10",
        "another client takes entries of an open name, and they are moved from it and compared, without a fence",
        "BAD",
        lambda: model(seizes=1, foreign="take", compare=True, entries=1, crashes=0),
        is_small=True,
    ),
    Variant(
        "c10a",
        "every open name in the group is fenced before entries are moved from another client",
        "PASS",
        lambda: model(seizes=1, compare=True, entries=1, takes=1),
        is_small=True,
    ),
    Variant(
        "c10b",
        "the same, it takes twice",
        "PASS",
        lambda: model(seizes=2, compare=True, entries=1, crashes=1, takes=0),
        is_small=True,
    ),
)
