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
    forged: int = 0,
    steals: bool = False,
    fences: str = "once",
    reach: int = 9,
    backups: int = 0,
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
        forged: the number in the name of another client, which looks like that of a member; 0 without such a client.
        steals: whether this client takes its entry from whoever holds it, in place of a new one.
        fences: the numbers up to the one in a name are used up by two commits (``once``), or by one for ``each``.
        reach: a name is that of another client if its number is further than this after the last one of its member.
        backups: how many times the table is replaced by an older copy of it, which takes numbers back. The copy lacks
            no entry that is acknowledged, because that is a loss which the members report, and no fence of a batch
            that is still in flight, because no protocol could know of it.
    """
    # The log: (member, N, kind, u, entries). An entry: 0 undelivered, 'x' acknowledged, 'gone' deleted, or its name
    # (member, N, u); u is the smallest number that nobody refers to for this (member, N).
    # A process: ('i',) idle, ('c', N, u, ids) claiming, ('m', N, u, ids, e, name) about to move e, ('w', N, u, ids)
    # closed, about to write, ('v', N, u, ids) to verify, ('a', ids) to acknowledge, ('f', name) about to fence, ('j',
    # name) about to fence it after the next number of its member was used up, ('d', name) about to delete the consumer,
    # ('k', names, e, name) about to fence names, and then to move e. 'w' has one field more: what is not written, since
    # it is in the table. The last field of a state is the older state of the server (``None`` if none is left to go
    # back to, () if none was kept yet), and what is left of the seizures, the forged claims and the backups.
    everything = range(entries)
    init = (
        (),
        (0,) * entries,
        (("i",),) * len(procs),
        crashes,
        takes,
        1 if lost_reply else 0,
        (() if failover else None, (seizes, 1 if forged else 0, backups)),
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

    def is_ours(log: State, name: State) -> bool:
        return bool(name[0] != "?" and name[1] <= last(log, name[0]) + reach)

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, pel, ps, cr, tk, lr, (copy, left) = st
        in_table = frozenset(e for c in log if c[2] == "b" for e in c[4])
        if copy == ():
            yield "the replica has all until now", (log, pel, ps, cr, tk, lr, (pel, left))
        elif copy is not None:
            names = {(procs[j], q[1], q[2]): q[3] for j, q in enumerate(ps) if q[0] in ("c", "m", "w", "v")}
            if failover == "any" or all(copy[e] == name for name, ids in names.items() for e in ids):
                yield "!the replica is promoted", (log, copy, ps, cr, tk, lr, (None, left))
        seizes, forges, backups = left
        for e in everything if seizes else ():
            if isinstance(pel[e], tuple) and pel[e][0] != "?":
                seized = put(pel, e, ("?", seizes, 0))
                after = copy, put(left, 0, seizes - 1)
                yield f"!another client takes {e} from {pel[e]}", (log, seized, ps, cr, tk, lr, after)
        for e in everything if forges else ():
            if isinstance(pel[e], tuple) if steals else pel[e] == 0:
                taken = put(pel, e, ("C", forged, 0))
                yield f"!another client takes {e} as C/{forged}", (log, taken, ps, cr, tk, lr, (copy, put(left, 1, 0)))
        for kept in range(len(log)) if backups else ():
            cut = {e for c in log[kept:] for e in c[4]}
            held = {(procs[j], q[1]) for j, q in enumerate(ps) if q[0] in ("c", "m", "w", "v")}
            is_fence_cut = any(c[2] == "f" and c[:2] in held for c in log[kept:])
            is_acknowledged = any(q[0] == "a" and cut & q[1] for q in ps) or any(pel[e] == "x" for e in cut)
            if not is_fence_cut and not is_acknowledged:
                after = copy, put(left, 2, backups - 1)
                yield (
                    f"!a copy of the table with {kept} commits is put in place",
                    (log[:kept], pel, ps, cr, tk, lr, after),
                )
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
                    if not is_ours(log, name):
                        if foreign == "fence":
                            full = {(procs[j], q[1], q[2]) for j, q in enumerate(ps) if q[0] in "cmwv" and q[3]}
                            full |= {p for p in pel if isinstance(p, tuple)}
                            listed = tuple(sorted(x for x in full if is_ours(log, x) and state_of(log, x) == "open"))
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
                    used |= {q[-1][2] for q in ps if q[0] in "mfjd" and q[-1][:2] == (m, n)}
                    u = min(set(range(9)) - used) if uuid else 0
                    yield f"{who} starts batch {n} as {(m, n, u)}", to(("c", n, u, frozenset()))
                if delete:
                    for name in sorted(held):
                        if tk and state_of(log, name) != "open" and not any(p == name for p in pel):
                            yield f"{who} sees {name} empty: will delete the consumer", to(("d", name), tk=tk - 1)
            elif ph[0] in "fj":
                name = ph[1]
                following = last(log, name[0]) + 1
                ok = following <= name[1]
                number = name[1] if ph[0] == "j" else following
                yield (
                    f"{who} fences {name[0]}:{number}{'' if ok else ': skipped'}",
                    to(
                        ("j", name) if ph[0] == "f" and ok and number < name[1] and fences == "once" else ("i",),
                        log=(*log, (name[0], number, "f", 0, frozenset())) if ok else log,
                    ),
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
                    if not is_ours(log, pel[e]):
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
        # Each process may use up one number, and another one after a crash, before one of them takes the last one.
        if forged and sum(1 for c in log if c[0] == "C") > len(procs) + crashes + 1:
            return "a commit for each number"
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
    quick(
        "c11",
        "a copy of the table is put in place, and only the next number of a member counts as a name of it",
        "BAD",
        lambda: model(backups=1, reach=1, entries=1, crashes=0, takes=1),
    ),
    quick(
        "c11a",
        "the same, a name with a higher number counts, and is fenced at once",
        "PASS",
        lambda: model(backups=1, entries=1, crashes=1, takes=1),
    ),
    quick(
        "c12",
        "another client has a name with a high number, and each number up to it is fenced",
        "BAD",
        lambda: model(forged=5, fences="each", entries=2, crashes=0, takes=0),
    ),
    quick(
        "c12a",
        "two commits fence all of these numbers",
        "PASS",
        lambda: model(forged=5, entries=2, crashes=1, takes=0),
    ),
    quick(
        "c12b",
        "the number is so high that the name is that of another client",
        "PASS",
        lambda: model(forged=5, reach=2, entries=1, crashes=1, takes=1),
    ),
    quick(
        "c12c",
        "the limit: a client with a name like that of a member takes an entry that a member has in hand",
        "BAD",
        lambda: model(forged=5, steals=True, entries=1, crashes=0, takes=0, compare=True),
    ),
    quick(
        "c12d",
        "the same, and the number is so high that every open name is fenced",
        "PASS",
        lambda: model(forged=5, steals=True, reach=2, entries=1, crashes=0, takes=1, compare=True),
    ),
)
