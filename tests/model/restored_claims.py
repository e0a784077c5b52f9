"""A group that changes between positions and claimed entries (Redis), next to RESTOREs.

In claim mode the server delivers each entry once, and an entry that is acknowledged is never delivered again. So a
batch that a RESTORE removes is a loss there, which the ledger remembers until another RESTORE brings the batch back. A
group that reads by position reads again what a RESTORE removed, also where claimed entries had been written; there it
compares with the rows that are left.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.search import Model, Result, State, Variant, quick, search

POSITIONS, SWITCHING, CLAIMS, LEAVING = "positions", "switching", "claims", "leaving"


def model(
    *,
    alarm: str = "folded",
    compares: bool = True,
    late_again: bool = True,
    late_switch: bool = False,
    sets: str = "planned",
    size: int = 2,
    restores: int = 2,
    switches: int = 2,
    others: int = 1,
    start: str = CLAIMS,
    brings_back: bool = False,
) -> Result:
    """Explore it.

    Args:
        alarm: how a group knows that claimed batches were removed: ``folded``, until a RESTORE brings them back;
            ``newest``, if there was a RESTORE since its newest commit was planned.
        compares: a batch by position leaves out what claimed batches have written.
        late_again: where such a batch lands after a RESTORE, it is read again and replaced.
        late_switch: a switch to claims counts although a RESTORE landed between its plan and itself.
        sets: the server is set to the positions of the state that the switch to claims is ``planned`` from, or of one
            that was ``read`` before.
        size: how many messages there are.
        restores: how many RESTOREs there may be.
        switches: how many times a switch is begun, or begun again after it was killed.
        others: how many commits in other transaction sequences there may be.
        start: how the group shares at first.
        brings_back: in claim mode a RESTORE may bring back batches by position that one before the switch removed.
    """
    # The log: (kind, first, end, left out, base): 'a' appends, 'r' replaces, 'c' a batch of claimed entries, 'f' covers
    # what was delivered, 's' a switch (first is the mode), 'k' another commit, 'R' a RESTORE to version ``first``.
    # The worker: ('i',) idle, ('p', kind, first, end, base) planned, ('w', kind, first, end, left out, base) about to
    # write, ('x', first, end) about to acknowledge. The switcher: ('i',) or (mode to go to, step, what it has read).
    # The server: the next entry to deliver, what is pending, and whether it is in claim mode.
    everything = frozenset(range(size))
    init = ((("s", start, 0, frozenset(), 0),), ("i",), ("i",), (0, frozenset(), start == CLAIMS), restores, switches)
    init = (*init, others)

    def is_late(log: State, number: int) -> bool:
        return any(c[0] == "R" for c in log[log[number][4] : number])

    def way(log: State, version: int) -> list[int]:
        """The commits that a version holds."""
        found = []
        while version > 0:
            number = version - 1
            if log[number][0] == "R":
                version = log[number][1]
            else:
                found.append(number)
                version = number
        return found

    def view(log: State) -> tuple[frozenset[int], frozenset[int], int, str, frozenset[int]]:
        """What is covered, what is to be replaced, the end of the claimed entries, the mode, what was removed."""
        at: list[tuple[frozenset[int], frozenset[int]]] = [(frozenset(), frozenset())]
        claimed, mode, removed = 0, "", frozenset[int]()
        for number, (kind, first, end, _, _) in enumerate(log):
            cov, again = at[-1]
            late = is_late(log, number)
            if kind == "R":
                before, after = set(way(log, number)), set(way(log, first))
                lost = {n for n in before - after if log[n][0] in "arc"} if mode in (CLAIMS, LEAVING) else set()
                removed = (removed | lost) - after
                cov, again = at[first]
            elif kind == "s":
                mode = mode if late and first == CLAIMS and not late_switch else first
            elif kind == "c":
                claimed = max(claimed, end)
            elif kind in "arf":
                part = frozenset(range(first, end))
                doubtful = frozenset(range(claimed)) if late_again else frozenset()
                again = again | (part & (cov | doubtful if late else cov)) if kind != "r" or late else again - part
                cov |= part
            at.append((cov, again))
        if alarm == "newest":
            newest = max(number for number, c in enumerate(log) if c[0] != "R")
            is_restored = any(c[0] == "R" for c in log[log[newest][4] :])
            written = {number for number, c in enumerate(log) if c[0] in "arc"}
            removed = frozenset(written - set(way(log, len(log)))) if is_restored else frozenset()
        return *at[-1], claimed, mode, removed

    def table(log: State) -> State:
        at = [(0,) * size]
        for number, (kind, first, end, left_out, _) in enumerate(log):
            if kind == "R":
                at.append(at[first])
                continue
            written = frozenset(range(first, end)) - left_out if kind in "arc" else frozenset()
            replaces = kind == "r" and not is_late(log, number)
            at.append(tuple((1 if replaces else t + 1) if x in written else t for x, t in enumerate(at[-1])))
        return at[-1]

    def landed(log: State, commit: State) -> State | None:
        """The log with the commit; ``None`` if its number was taken."""
        is_taken = any(c[0] not in "Rk" for c in log[commit[4] :])
        return None if is_taken else (*log, commit)

    def work(st: State) -> Iterator[tuple[str, State]]:
        log, worker, switcher, (next_entry, pending, in_claim_mode), *left = st
        cov, again, claimed, mode, removed = view(log)
        now = len(log)

        def to(worker: State, log: State = log, server: State = (next_entry, pending, in_claim_mode)) -> State:
            return log, worker, switcher, server, *left

        if worker[0] == "i" and not removed:
            if mode == POSITIONS and again:
                first = min(again)
                yield f"a run plans to replace {first}", to(("w", "r", first, first + 1, frozenset(), now))
            elif mode == POSITIONS and (gap := everything - cov):
                first = min(gap)
                kind = "p" if compares and first < claimed else "w"
                known: State = (now,) if kind == "p" else (frozenset(), now)
                yield f"a run plans to append {first}", to((kind, "a", first, first + 1, *known))
            elif mode == CLAIMS and pending:
                first = min(pending)
                yield f"a member takes over {first}", to(("p", "c", first, first + 1, now))
            elif mode == CLAIMS and in_claim_mode and next_entry < size:
                server = next_entry + 1, pending | {next_entry}, True
                plan = ("p", "c", next_entry, next_entry + 1, now)
                yield f"a member claims {next_entry}", to(plan, server=server)
        elif worker[0] == "p":
            _, kind, first, end, base = worker
            held = frozenset(x for x in range(first, end) if table(log)[x] and (kind == "c" or x < claimed))
            yield f"it finds {sorted(held)} in the table", to(("w", kind, first, end, held, base))
        elif worker[0] == "w":
            _, kind, first, end, held, base = worker
            after = landed(log, (kind, first, end, held, base))
            if after is None:
                yield f"its batch of {first} is refused", to(("i",))
            else:
                yield f"it writes {first}", to(("x", first, end) if kind == "c" else ("i",), log=after)
        elif worker[0] == "x":
            acknowledged = next_entry, pending - frozenset(range(worker[1], worker[2])), in_claim_mode
            yield f"it acknowledges {worker[1]}", to(("i",), server=acknowledged)

    def switch(st: State) -> Iterator[tuple[str, State]]:
        log, worker, switcher, (next_entry, pending, in_claim_mode), rs, sw, ot = st
        cov, again, claimed, mode, removed = view(log)
        now, end = len(log), len(cov)

        def to(switcher: State, log: State = log, server: State = (next_entry, pending, in_claim_mode)) -> State:
            return log, worker, switcher, server, rs, sw, ot

        def fence(first: State | str, base: int) -> State | None:
            return landed(log, ("s", first, 0, frozenset(), base))

        whole = cov == frozenset(range(end)) and not again and claimed <= end
        may_enter = not removed and (mode in (CLAIMS, LEAVING) or whole)
        may_leave = not removed and not pending
        if switcher[0] == "i":
            if sw and mode != CLAIMS and may_enter:
                yield "a switch to claims begins", (log, worker, (CLAIMS, "begin", now), (*st[3],), rs, sw - 1, ot)
            if sw and mode != POSITIONS and (may_leave or mode == SWITCHING):
                yield "a switch to positions begins", (log, worker, (POSITIONS, "begin", now), st[3], rs, sw - 1, ot)
            return
        wanted, step, base = switcher
        yield "!the switch is killed", to(("i",))
        if step == "begin" and wanted == CLAIMS and mode in (LEAVING, CLAIMS):
            yield "the switch goes back", to((wanted, "set", now))
        elif step == "begin":
            first = SWITCHING if wanted == CLAIMS or mode in (SWITCHING, POSITIONS) else LEAVING
            after = fence(first, base)
            following = "set" if wanted == CLAIMS else "last" if first == SWITCHING else "leave"
            if after is None:
                yield "its fence is refused", to((wanted, "begin", now))
            else:
                yield f"the group is {first}", to((wanted, following, len(after)), log=after)
        elif step == "set":
            if may_enter and mode != CLAIMS:
                server = (next_entry if mode == LEAVING else end), pending, True
                yield f"the server is set to {server[0]}", to((wanted, "last", now), server=server)
            else:
                yield "it stops", to(("i",))
        elif step == "leave":
            yield "the group leaves claim mode", to((wanted, "cover", now), server=(next_entry, pending, False))
        elif step == "cover" and not pending:
            after = landed(log, ("f", min(end, next_entry), next_entry, frozenset(), now))
            assert after is not None
            # Another commit of the group, or a RESTORE, may come in between.
            yield "it reads what was delivered", to((wanted, "covers", (end, next_entry, now)))
        elif step == "cover":
            yield "it stops, because entries are pending", to(("i",))
        elif step == "covers":
            after = landed(log, ("f", base[0], base[1], frozenset(), base[2]))
            yield (
                "what was delivered is covered",
                to((wanted, "last", len(log) + 1) if after else ("i",), log=after or log),
            )
        elif step == "last":
            planned = now if sets == "read" or wanted == POSITIONS else base
            after = fence(wanted, planned)
            yield f"the group shares by {wanted}", to(("i",), log=after or log)

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, worker, switcher, server, rs, sw, ot = st
        yield from work(st)
        yield from switch(st)
        if ot:
            other = ("k", 0, 0, frozenset(), len(log))
            yield "!another commit of the group", ((*log, other), worker, switcher, server, rs, sw, ot - 1)
        mode, removed = view(log)[3:]
        for version in range(1, len(log)) if rs else ():
            back = {n for n in set(way(log, version)) - set(way(log, len(log))) if log[n][0] in "arc"}
            if mode in (CLAIMS, LEAVING) and back - removed and not brings_back:
                continue
            restore = ("R", version, 0, frozenset(), len(log))
            yield f"!RESTORE to {version}", ((*log, restore), worker, switcher, server, rs - 1, sw, ot)

    def bad(st: State) -> str | None:
        log, _, _, (next_entry, pending, _), *_ = st
        cov, again, _, mode, removed = view(log)
        if removed:
            return None
        is_claimed = mode in (CLAIMS, LEAVING)
        done = frozenset(range(next_entry)) - pending if is_claimed else cov - again
        for x, count in enumerate(table(log)):
            if count > 1 and (is_claimed or x not in again):
                return f"message {x} twice"
            if not count and x in done:
                return f"message {x} is lost"
        return None

    def done(st: State) -> bool:
        _, again, _, mode, removed = view(st[0])
        # What is stopped on the way of a switch waits for the user, who may begin it no more often here.
        is_stopped = bool(removed) or (mode in (SWITCHING, LEAVING) and not st[5])
        return is_stopped or (table(st[0]) == (1,) * size and st[1] == ("i",) and (mode == CLAIMS or not again))

    return search(Model(init, step, bad, done))


VARIANTS = (
    quick("r1", "asks for a RESTORE since the newest commit", "BAD", lambda: model(alarm="newest", switches=0)),
    quick("r2", "same, no other commit, but a switch", "BAD", lambda: model(alarm="newest", others=0, restores=1)),
    quick(
        "r3",
        "does not compare with claimed rows when a position lies before them",
        "BAD",
        lambda: model(compares=False, restores=1, others=0),
    ),
    Variant(
        "r4",
        "what it left out is not read again, although a RESTORE removed it before the batch landed",
        "BAD",
        lambda: model(late_again=False, others=0),
    ),
    quick(
        "r5",
        "a switch to claims counts although a RESTORE took positions back after the server was set to them",
        "BAD",
        lambda: model(late_switch=True, start=POSITIONS, restores=1, others=0),
    ),
    quick(
        "r6",
        "the server is set to positions that were read before the switch was planned",
        "BAD",
        lambda: model(sets="read", start=POSITIONS, restores=1, others=0),
    ),
    quick("r7-small", "as it is, one RESTORE", "PASS", lambda: model(restores=1, others=0)),
    quick("r8-small", "same, begun by position", "PASS", lambda: model(restores=1, others=0, start=POSITIONS)),
    Variant("r7", "as it is, two RESTOREs", "PASS", lambda: model(others=0)),
    Variant("r8", "same, begun by position", "PASS", lambda: model(start=POSITIONS, others=0)),
    Variant(
        "r9",
        "a limit: a RESTORE before a switch to claims is taken back by another one after it, while a member writes",
        "BAD",
        lambda: model(start=POSITIONS, others=0, brings_back=True),
    ),
)
