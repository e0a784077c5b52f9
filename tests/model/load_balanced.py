"""Mode load_balanced (Kafka): a shard moves to another member at any moment, and members learn of it late.

Variant b10 is what was chosen: a transaction sequence for each shard. In the others each member has one.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.search import Model, Result, State, Variant, put, quick, search

SIZES = (2, 1)


def model(
    how: str,
    *,
    mem: bool = False,
    order: str = "fence first",
    plan_check: bool = True,
    claim: bool = True,
    crashes: int = 1,
    moves: int = 3,
    sizes: State = SIZES,
    own0: State = (0, 0),
    relearn: bool = True,
    names: str = "AB",
) -> Result:
    """Explore it.

    Args:
        how: how a member finds the one whose batches it must fence: ``cover``, who wrote the newest batch of the shard;
            ``meta``, who is named in the broker's offset metadata; ``list``, all app ids of the group; ``list+reg``,
            the same where each registers first; ``owner``, ownership records in the ledger; ``shard``, nobody: each
            shard has a transaction sequence.
        mem: the number is kept in memory from the takeover on.
        order: with ``meta``, which comes first.
        plan_check: with ``owner``, the plan looks whether the shard is one's own.
        claim: with ``owner``, a free shard is claimed.
        crashes: how many there may be.
        moves: of shard 0.
        sizes: messages of each shard.
        own0: whose each shard is at the beginning.
        relearn: a batch that was raced makes the member look again.
        names: of the members.
    """
    # The log: (app, number, kind, data); b: a batch (id, ((shard, s, e), …)); f: a fence (taker, shard); k: a shard is
    # claimed; j: joined.
    shards = range(len(sizes))
    # member: (believes, ready, next number or 0, (incarnation, generation learned), phase)
    init = (
        (),
        (0,) * len(sizes),
        (None,) * len(sizes),
        own0,
        ((frozenset(), frozenset(), 0, (0, -1), ("i",)),) * len(names),
        moves,
        crashes,
    )

    def last(log: State, app: str) -> int:
        return max((c[1] for c in log if c[0] == app), default=0)

    def pos(log: State, s: int) -> int:
        return max((r[2] for c in log if c[2] == "b" for r in c[3][1] if r[0] == s), default=0)

    def owner(log: State, s: int) -> str | None:
        # A fence counts only if the one who is fenced owns the shard at that place of the log.
        o = None
        for app, _, kind, d in log:
            if kind == "f" and d[1] == s and o == app:
                o = d[0]
            elif kind == "k" and d == s and o is None:
                o = app
        return o

    def targets(st: State, m: str, s: int) -> list[str]:
        """Who must be fenced before ``m`` continues shard ``s``."""
        log, meta = st[0], st[2]
        if how == "cover":
            c = [c[0] for c in log if c[2] == "b" and any(r[0] == s for r in c[3][1])]
            return [c[-1]] if c and c[-1] != m else []
        if how == "meta":
            return [meta[s]] if meta[s] not in (None, m) else []
        if how in ("list", "list+reg"):
            return sorted({c[0] for c in log} - {m})
        o = owner(log, s)
        return [o] if o not in (None, m) else []

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, broker, meta, assign, mem_, mv, cr = st
        for i in range(len(names)):
            m, (bel, ready, nxt, k, ph) = names[i], mem_[i]
            gen, current = moves - mv, k[1] == moves - mv

            def to(
                i: int = i, bel=bel, ready=ready, nxt=nxt, k=k, ph=ph, log=log, broker=broker, meta=meta, cr=cr
            ) -> State:
                return log, broker, meta, assign, put(mem_, i, (bel, ready, nxt, k, ph)), mv, cr

            number = nxt if mem and nxt else last(log, m) + 1
            if ph[0] == "i":
                truth = frozenset(s for s in shards if assign[s] == i)
                if not current:
                    yield (
                        f"{m} learns generation {gen}: {sorted(truth)}",
                        to(bel=truth, ready=ready & truth if k[1] == gen - 1 else frozenset(), k=(k[0], gen)),
                    )
                if mem and not nxt and bel and (how != "list+reg" or any(c[0] == m for c in log)):
                    yield f"{m} reads its next number {last(log, m) + 1}", to(nxt=last(log, m) + 1)
                    continue
                if how == "list+reg" and bel and not any(c[0] == m for c in log):
                    yield (
                        f"{m} registers (empty commit {last(log, m) + 1})",
                        to(log=(*log, (m, last(log, m) + 1, "j", None))),
                    )
                    continue
                for s in sorted(bel - ready) if current else ():
                    t = targets(st, m, s)
                    if how == "meta" and order == "claim first" and meta[s] != m:
                        if current:
                            yield (
                                f"{m} puts its claim of shard {s} into the broker (was {meta[s]})",
                                to(meta=put(meta, s, m), ph=("f", tuple((a, last(log, a) + 1) for a in t), s)),
                            )
                    elif t:
                        yield (
                            f"{m} will fence {', '.join(f'{a}:{last(log, a) + 1}' for a in t)} for shard {s}",
                            to(ph=("f", tuple((a, last(log, a) + 1) for a in t), s)),
                        )
                    elif how == "owner" and claim and owner(log, s) is None:
                        yield (
                            f"{m} claims free shard {s}: will write {m}:{last(log, m) + 1}",
                            to(ph=("k", last(log, m) + 1, s)),
                        )
                    else:
                        yield f"{m} may continue shard {s}", to(ph=("y", s))
                use = [s for s in sorted(bel & ready) if pos(log, s) < sizes[s]]
                if how == "owner" and plan_check:
                    stale = [s for s in use if owner(log, s) not in ((m,) if claim else (m, None))]
                    if stale:
                        yield (
                            f"{m} sees in the ledger that shard {stale[0]} is not its own",
                            to(ready=ready - set(stale)),
                        )
                        use = []
                groups = [[s] for s in use] if how == "shard" else [use] if use else []
                for g in groups:
                    num, app = (last(log, f"s{g[0]}") + 1, f"s{g[0]}") if how == "shard" else (number, m)
                    for full in (0, 1) if any(sizes[s] - pos(log, s) > 1 for s in g) else (1,):
                        r = tuple((s, pos(log, s), sizes[s] if full else pos(log, s) + 1) for s in g)
                        yield f"{m} plans {app}:{num} {r}", to(ph=("p", app, num, r))
                for s in sorted(bel & ready):
                    if broker[s] != pos(log, s):
                        yield f"{m} reconciles shard {s}", to(ph=("c", ((s, 0, pos(log, s)),)))
            elif ph[0] == "f":
                _, ts, s = ph
                (a, num), rest = ts[0] if ts else (None, 0), ts[1:]
                if a is None:
                    yield f"{m} has nobody to fence", to(ph=("y", s))
                elif last(log, a) < num:
                    ev = to(log=(*log, (a, num, "f", (m, s))), ph=("f", rest, s) if rest else ("y", s))
                    if how == "owner":
                        ev = to(log=(*log, (a, num, "f", (m, s))), ready=ready | {s}, ph=("i",))
                    yield f"{m} fences {a}:{num} for shard {s}", ev
                else:
                    yield f"{m}'s fence {a}:{num} is skipped: re-reads", to(ph=("i",))
            elif ph[0] == "k":
                _, num, s = ph
                ok = last(log, m) < num
                yield (
                    f"{m} claim of shard {s} {'lands' if ok else 'skipped'}",
                    to(log=(*log, (m, num, "k", s)) if ok else log, ph=("i",) if not ok else ("o", s)),
                )
            elif ph[0] == "o":
                yield (
                    f"{m} verifies its claim of {ph[1]}: owner is {owner(log, ph[1])}",
                    to(ph=("i",), ready=ready | {ph[1]} if owner(log, ph[1]) == m else ready),
                )
            elif ph[0] == "y":  # takeover complete
                s = ph[1]
                if how == "meta" and order == "fence first":
                    if current:
                        yield (
                            f"{m} puts its claim of shard {s} into the broker",
                            to(meta=put(meta, s, m), ready=ready | {s}, ph=("i",)),
                        )
                    else:
                        yield (
                            f"{m}'s claim of shard {s} is refused by the broker (old generation)",
                            to(ph=("i",), bel=bel - {s}),
                        )
                else:
                    yield f"{m} is ready for shard {s}", to(ready=ready | {s}, ph=("i",))
            elif ph[0] == "p":
                _, app, num, r = ph
                ok = last(log, app) < num
                yield (
                    f"{m} writes {app}:{num} {r}" if ok else f"{m}'s write {app}:{num} is skipped",
                    to(log=(*log, (app, num, "b", ((i, k[0]), r))) if ok else log, ph=("v", app, num, r)),
                )
            elif ph[0] == "v":
                _, app, num, r = ph
                if any(c[:3] == (app, num, "b") and c[3][0] == (i, k[0]) for c in log):
                    yield f"{m} verified {app}:{num}", to(ph=("c", r), nxt=num + 1 if mem else 0)
                else:
                    yield (
                        f"{m} was raced or fenced at {app}:{num}: drops it",
                        to(ph=("i",), nxt=0, ready=frozenset() if relearn and how != "shard" else ready),
                    )
            elif ph[0] == "c":
                r, rest = ph[1][0], ph[1][1:]
                ok = current and assign[r[0]] == i
                yield (
                    f"{m} commits shard {r[0]} = {r[2]}{'' if ok else ' (refused: old generation)'}",
                    to(broker=put(broker, r[0], r[2]) if ok else broker, ph=("c", rest) if rest else ("i",)),
                )
            if cr and (ph[0] != "i" or bel):
                yield (
                    f"!{m} crashes",
                    to(bel=frozenset(), ready=frozenset(), nxt=0, k=(k[0] + 1, -1), ph=("i",), cr=cr - 1),
                )
        if mv:
            for j in range(len(names)):
                if j != assign[0]:
                    yield (
                        f"!broker moves shard 0 to {names[j]}",
                        (log, broker, meta, put(assign, 0, j), mem_, mv - 1, cr),
                    )

    def bad(st: State) -> str | None:
        log, broker = st[0], st[1]
        at = [0] * len(sizes)
        for c in log:
            if c[2] == "b":
                for s, a, e in c[3][1]:
                    if a != at[s]:
                        return f"shard {s}: message written twice" if a < at[s] else f"shard {s}: message lost"
                    at[s] = e
        return "broker ahead of the ledger" if any(b > a for b, a in zip(broker, at)) else None

    def done(st: State) -> bool:
        log, broker, mem_ = st[0], st[1], st[4]
        return all(pos(log, s) == sizes[s] == broker[s] for s in shards) and all(x[4] == ("i",) for x in mem_)

    return search(Model(init, step, bad, done))


VARIANTS = (
    quick(
        "b1",
        "owner = newest batch commit of the shard, N re-read from the ledger",
        "BAD",
        lambda: model("cover", crashes=0),
    ),
    quick("b1'", "same, number kept in memory since the takeover", "BAD", lambda: model("cover", mem=True, crashes=0)),
    Variant(
        "b2",
        "owner in the broker's offset metadata, claimed before the fence, N in memory",
        "BAD",
        lambda: model("meta", mem=True, order="claim first", moves=3),
    ),
    quick(
        "b3",
        "same, fence before claim, N re-read from the ledger at each plan",
        "BAD",
        lambda: model("meta", mem=False),
    ),
    Variant(
        "b4",
        "same, fence before claim, N in memory since the claim",
        "PASS",
        lambda: model("meta", mem=True, sizes=(2,), own0=(0,), moves=2),
    ),
    quick(
        "b5", "fence all app ids of the group that the log lists, N in memory", "BAD", lambda: model("list", mem=True)
    ),
    Variant(
        "b6",
        "same, every member registers (empty commit) before its first takeover, N in memory",
        "PASS",
        lambda: model("list+reg", mem=True, sizes=(2,), own0=(0,), moves=2),
    ),
    quick("b6'", "same, N re-read", "BAD", lambda: model("list+reg", mem=False, sizes=(2,), own0=(0,))),
    quick(
        "b7", "ownership records in the ledger, a free shard needs no claim", "BAD", lambda: model("owner", claim=False)
    ),
    quick(
        "b8",
        "ownership records + claims, owner not checked when planning",
        "BAD",
        lambda: model("owner", plan_check=False, relearn=False),
    ),
    Variant(
        "b9",
        "ownership records + claims + owner checked in the snapshot that gives N and the positions",
        "PASS",
        lambda: model("owner", sizes=(2,), own0=(0,)),
    ),
    Variant("b9'", "same, two shards in one batch", "PASS", lambda: model("owner", moves=2, crashes=0)),
    Variant(
        "b9''",
        "three members, one shard",
        "PASS",
        lambda: model("owner", sizes=(1,), own0=(0,), names="ABC", moves=3, crashes=0),
    ),
    Variant("b9\"'", "two shards, crash", "PASS", lambda: model("owner", moves=2, crashes=1, sizes=(1, 1))),
    Variant(
        'b9""',
        "three members, crash",
        "PASS",
        lambda: model("owner", sizes=(1,), own0=(0,), names="ABC", moves=2, crashes=1),
    ),
    Variant(
        "b10",
        "one app id per shard, one shard per transaction, no fence at all",
        "PASS",
        lambda: model("shard", moves=3),
    ),
    quick(
        "b10-small",
        "same, one message a shard, a move and a crash",
        "PASS",
        lambda: model("shard", moves=1, sizes=(1, 1)),
    ),
)
