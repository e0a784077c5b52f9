"""Groups that begin with one stream in one table at the same moment: only one of them may write it.

Two groups share no transaction sequence, so that Delta accepts the first commit of each, whatever each has checked
before. The first commit of a group claims the stream; the claim that lands first wins. The check before it sees rows,
and of claims without rows only those in the newest commits of the table.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.search import Model, Result, State, Variant, put, search


def model(
    look: str,
    *,
    members: tuple[int, ...] = (0, 1),
    crashes: int = 2,
    near: int = 9,
    others: int = 0,
    apart: bool = False,
) -> Result:
    """Explore it.

    Args:
        look: for which claims of other groups a group looks after its own has landed: ``none``; ``any``; those that
            landed before its ``newest`` claim; those before its first one (``before``), in each run or only in the
            run that claimed (``once``); or these and those whose check could not see its own (``both``).
        members: the group of each member; the members of a group have transaction sequences of their own.
        crashes: how many there may be.
        near: how many of the newest commits the check before a claim looks through.
        others: how many commits of other streams there may be.
        apart: no group begins while another one plans or writes its first batch.
    """
    # A member: ('n',) reads a snapshot, ('c', base) is about to claim, ('l',) has claimed, ('w',) is about to write.
    # The log: (group, 'claim' or 'batch', base), where the base is the number of commits before.
    init = ((), tuple(("n",) for _ in members), crashes, others)

    def may_write(log: State, group: int, *, has_claimed: bool) -> bool:
        claims = [(version, base) for version, (g, kind, base) in enumerate(log) if g == group and kind == "claim"]
        if look == "none" or (look == "once" and not has_claimed):
            return True
        foreign = [(version, *one) for version, one in enumerate(log) if one[0] not in (group, None)]
        if look == "any":
            return not foreign
        version, base = claims[-1 if look == "newest" else 0]
        if any(base <= at < version for at, *_ in foreign):
            return False
        return look != "both" or not any(
            kind == "batch" or base - version > near for at, _, kind, base in foreign if at > version
        )

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, procs, cr, left = st
        for i, (group, p) in enumerate(zip(members, procs)):

            def to(q: State, log: State = log, i: int = i) -> State:
                return log, put(procs, i, q), cr, left

            name = f"member {i} of group {group}"
            own = [kind for g, kind, _ in log if g == group]
            if apart and p[0] in "nl" and any(q[0] in ("w" if not own else "c") for q in procs):
                pass
            elif p[0] in "nl" and own:
                if "batch" not in own and may_write(log, group, has_claimed=p[0] == "l"):
                    yield f"{name} plans a batch", to(("w",))
            elif p[0] == "n" and all(
                g is None or (kind == "claim" and version < len(log) - near) for version, (g, kind, _) in enumerate(log)
            ):
                yield f"{name} finds no other group", to(("c", len(log)))
            elif p[0] == "c":
                yield f"{name} claims the stream", to(("l",), (*log, (group, "claim", p[1])))
            elif p[0] == "w":
                # The transaction number refuses a second one of the same group.
                written = log if "batch" in own else (*log, (group, "batch", len(log)))
                yield f"{name} writes its batch", to(("n",), written)
            if cr and p[0] != "n":
                yield f"!{name} crashes", (log, put(procs, i, ("n",)), cr - 1, left)
        if left:
            yield "!another stream is written", ((*log, (None, "other", len(log))), procs, cr, left - 1)

    def bad(st: State) -> str | None:
        return "two groups wrote the stream" if len({g for g, kind, _ in st[0] if kind == "batch"}) > 1 else None

    def done(st: State) -> bool:
        return any(kind == "batch" for _, kind, _ in st[0])

    return search(Model(init, step, bad, done))


VARIANTS = (
    Variant("g1", "no look after the claim", "BAD", lambda: model("none"), is_small=True),
    Variant("g2", "any other group is a reason to stop", "STUCK", lambda: model("any"), is_small=True),
    Variant("g3", "the look belongs to the run that claimed", "BAD", lambda: model("once"), is_small=True),
    Variant(
        "g4",
        "the look goes back from the newest claim of several members",
        "STUCK",
        lambda: model("newest", members=(0, 0, 1)),
        is_small=True,
    ),
    Variant("g5", "who claimed before the first own claim wins", "PASS", lambda: model("before"), is_small=True),
    Variant(
        "g5'",
        "same, but the check sees no old claim",
        "BAD",
        lambda: model("before", near=1, others=2, apart=True),
        is_small=True,
    ),
    Variant(
        "g6",
        "claims before the first own one count, and those that could not see it",
        "PASS",
        lambda: model("both", near=1, others=2, apart=True),
        is_small=True,
    ),
    Variant("g6'", "same, three groups", "PASS", lambda: model("both", members=(0, 1, 2), crashes=1), is_small=True),
    Variant(
        "g6''",
        "same, two members a group",
        "PASS",
        lambda: model("both", members=(0, 0, 1, 1), crashes=1),
        is_small=True,
    ),
    Variant(
        "g7",
        "same, and a group begins while the first batch of one whose claim is old is on its way",
        "BAD",
        lambda: model("both", near=1, others=2),
        is_small=True,
    ),
)
