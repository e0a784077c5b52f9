"""A redrive: dead letters that today's decoder can read become rows, next to ingestion, a replay and RESTOREs."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.search import Model, Result, State, Variant, put, quick, search

ROW, FIXED, HOPELESS = range(3)
"""What a message is: a row for each decoder, a dead letter for the old one, a dead letter for both."""


def model(
    *,
    way: str = "replace",
    uncounts: str = "places",
    late: str = "redo",
    app: str = "shared",
    redrives: int = 2,
    replay: str = "",
    restores: int = 1,
    crashes: int = 1,
    messages: State = (FIXED, ROW, FIXED),
    corrects: bool = False,
    compares: str = "",
    rewinds: int = 0,
    gone: State = (),
    drops: bool = False,
    overtaken: str = "trusted",
) -> Result:
    """Explore it.

    Args:
        way: of a redrive to write. ``replace``: the places of the dead letters that it can read now are replaced, in
            one commit with their rows; ``hull``: all from the first one to the last one is; ``append``: the rows are
            appended, and the commit says which dead letters count no more; ``delete_first``: the dead letters are
            deleted, then the rows appended; ``delete_after``: the other way round.
        uncounts: which dead letters count no more: those at the ``places`` that were replaced; or ``all`` of the
            batches that they are of.
        late: what replaces rows, and lands behind a RESTORE, leaves its places to be replaced again (``redo``), or only
            those that were ``covered`` before it; or redrives are ``trusted``.
        app: whose transaction sequence a redrive takes: that of the replays (``shared``), or its ``own``.
        redrives: how many processes do one.
        replay: the decoder of a replay of everything, ``old`` or ``new``; none if empty.
        restores: how many there may be.
        crashes: how many there may be.
        messages: what the stream holds; ingestion has the old decoder.
        corrects: each redrive gives one message another payload, which may have been corrected before, and ends.
            Whatever is planned later, and reads the message, has its newest correction.
        compares: what a replace compares at its places, at its plan and at its write: the number of ``rows`` of each
            message; or ``which`` rows they are; nothing if empty. If that has changed, it is planned again.
        rewinds: how many there may be.
        gone: the messages that the stream has lost since they were read first. What replaces them writes the rows again
            that they had at its plan.
        drops: the transform may drop a corrected message, so that a redrive makes no row of it. Not with ``gone``.
        overtaken: if a redrive landed since the plan of a replace, the places of the redrive are replaced again
            (``redo``), or the replace is ``trusted``.
    """
    # The log: (app, number, kind, places, rows, batch id, base); kinds: a append, r replace, p replay, d redrive, w
    # rewind, R RESTORE (number: the version). Dead letters: (batch id, message, whether they were deleted). Runs:
    # ("i",) idle; ("l", …) about to write dead letters; ("w", …) about to write the commit; ("x",) over. The first one
    # ingests, the second one replays, the others redrive. A late replace is assumed to have removed nothing: that is
    # the worst.
    size = len(messages)
    everything = frozenset(range(size))
    runs = (("i",), ("i",) if replay else ("x",), *[("i",)] * redrives)
    init = ((), frozenset(), runs, restores, crashes, 0)

    def last(log: State, name: str) -> int:
        return max((c[1] for c in log if c[0] == name), default=0)

    def is_late(log: State, at: int) -> bool:
        return any(c[2] == "R" for c in log[log[at][6] : at])

    def surviving(log: State) -> list[int]:
        """The places of the commits whose rows the newest version has, the newest first."""
        found, at = [], len(log) - 1
        while at >= 0:
            if log[at][2] == "R":
                at = log[at][1] - 1
                continue
            found.append(at)
            at -= 1
        return found

    def rows(log: State) -> State:
        """For each message, the commits that made its rows."""
        at: list[State] = [((),) * size]
        for number, c in enumerate(log):
            if c[2] == "R":
                at.append(at[c[1]])
                continue
            removes = c[2] in "rpd" and not (c[2] == "d" and way != "replace" and way != "hull")
            removes = removes and not is_late(log, number)
            before = tuple(() if removes and x in c[3] else at[-1][x] for x in range(size))
            at.append(tuple((*before[x], number) if x in c[4] else before[x] for x in range(size)))
        return at[-1]

    def is_changed(log: State, base: int, places: frozenset[int]) -> bool:
        """Whether a replace of these places, that was planned from a version, finds that others have changed them."""
        then, now = rows(log[:base]), rows(log)
        if compares == "rows":
            return any(len(then[x]) != len(now[x]) for x in places)
        return compares == "which" and any(then[x] != now[x] for x in places)

    def in_force(log: State, x: int) -> int:
        """The redrive whose correction of a message is in force; -1 without one."""
        return next((at for at in surviving(log) if log[at][2] == "d" and x in log[at][3]), -1) if corrects else -1

    def is_dropped(log: State, x: int) -> bool:
        """Whether the correction of a message that is in force makes no row."""
        at = in_force(log, x)
        return at >= 0 and x not in log[at][4]

    def correction_of(log: State, number: int, x: int) -> int:
        """The redrive with whose correction a commit made its row of a message."""
        _, _, kind, _, _, _, base = log[number]
        if kind == "d" or not corrects:
            return number if corrects else -1
        if kind in "rp" and x in gone:
            return max(correction_of(log, maker, x) for maker in rows(log[:base])[x])
        return in_force(log[:base], x)

    def fold(log: State) -> tuple[frozenset[int], frozenset[int]]:
        """What is covered, and what has to be replaced."""
        at = [(frozenset[int](), frozenset[int]())]
        for number, c in enumerate(log):
            covered, redo = at[-1]
            if c[2] in "Rw":
                at.append(at[c[1]] if c[2] == "R" else (covered, covered))
                continue
            between = [b[3] for b in log[c[6] : number] if b[2] == "d"] if overtaken == "redo" else []
            if c[2] == "a":
                redo = redo | c[3] & covered
            elif is_late(log, number) and not (c[2] == "d" and late == "trusted"):
                redo = redo | (c[3] & covered if late == "covered" else c[3])
            else:
                redo = redo - c[3] | c[3] & frozenset().union(*between)
            at.append((covered | c[3], redo))
        return at[-1]

    def counted(log: State, letters: frozenset[State]) -> list[State]:
        """The dead letters that count: of a surviving batch, and no newer one has replaced their places."""
        held = surviving(log)
        age = {log[at][5]: number for number, at in enumerate(held)}
        replaced: list[tuple[int, frozenset[int], frozenset[State]]] = []
        for number, at in enumerate(held):
            if log[at][2] in "rpd":
                batches = frozenset(bid for bid, x, _ in letters if x in log[at][3])
                replaced.append((number, log[at][3], batches if log[at][2] == "d" else frozenset()))
        return [
            (bid, x)
            for bid, x, is_deleted in letters
            if not is_deleted
            and bid in age
            and not any(
                number < age[bid] and (x in places or (uncounts == "all" and bid in batches))
                for number, places, batches in replaced
            )
        ]

    def read(places: frozenset[int], decoder: str, log: State = ()) -> tuple[frozenset[int], frozenset[int]]:
        """Rows and dead letters, next to what the table has where the places are replaced."""
        known = rows(log)
        dropped = frozenset(x for x in places if is_dropped(log, x))
        good = frozenset(
            x
            for x in places - dropped
            if (known[x] if log and x in gone else messages[x] == ROW or in_force(log, x) >= 0)
            or (messages[x] == FIXED and decoder == "new")
        )
        return good, places - good - dropped

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, letters, ps, rs, cr, bids = st
        covered, redo = fold(log)

        def to(i: int, run: State, log: State = log, letters: frozenset[State] = letters, bids: int = bids) -> State:
            return log, letters, put(ps, i, run), rs, cr, bids

        for i, p in enumerate(ps):
            who = ("ingestion", "replay")[i] if i < 2 else f"redrive{i - 2}"
            if p[0] == "i" and i == 0:
                missing = redo or everything - covered
                start = min(missing, default=0)
                for end in range(start + 1, size + 1):
                    part = frozenset(range(start, end))
                    if part <= missing:
                        kind = "r" if redo else "a"
                        found = read(part, "old", log if redo else ())
                        plan = ("A", last(log, "A") + 1, kind, part, *found, bids, len(log))
                        yield f"{who} plans {kind} [{start},{end})", to(i, ("l", *plan), bids=bids + 1)
            elif p[0] == "i" and i == 1:
                if covered:
                    found = read(covered, replay, log)
                    plan = ("P", last(log, "P") + 1, "p", covered, *found, bids, len(log))
                    yield f"{who} plans {sorted(covered)}", to(i, ("l", *plan), bids=bids + 1)
                yield f"{who} is not wanted", to(i, ("x",))
            elif p[0] == "i":
                found = frozenset(x for _, x in counted(log, letters)) & covered
                corrected = frozenset(x for x in covered if in_force(log, x) >= 0)
                for good in [frozenset({x}) for x in found | corrected] if corrects else [read(found, "new")[0]]:
                    if not good:
                        continue
                    places = frozenset(range(min(good), max(good) + 1)) if way == "hull" else good
                    name = "P" if app == "shared" else "D"
                    for rows_of in (good, frozenset[int]()) if drops else (good,):
                        plan = (name, last(log, name) + 1, "d", places, rows_of, frozenset(), bids, len(log))
                        what = f"{sorted(places)}{'' if rows_of else ', which make no row'}"
                        yield f"{who} plans {what}", to(i, ("l", *plan), bids=bids + 1)
            elif p[0] == "l":
                dead, bid = p[6], p[7]
                more = frozenset((bid, x, False) for x in dead)
                if p[3] == "d" and way == "delete_first":
                    known = frozenset((b, x, is_deleted or x in p[4]) for b, x, is_deleted in letters)
                    yield f"{who} deletes the dead letters {sorted(p[4])}", to(i, ("w", *p[1:]), letters=known)
                else:
                    yield f"{who} writes the dead letters {sorted(dead)}", to(i, ("w", *p[1:]), letters=letters | more)
            elif p[0] == "w":
                _, name, n, kind, places, good, _, bid, base = p
                ok = last(log, name) < n
                if ok and kind in "rpd" and is_changed(log, base, places):
                    yield f"{who} finds other rows at {sorted(places)}: plans again", to(i, ("i",))
                    continue
                after = ("x",) if ok and (i == 1 or (i > 1 and corrects)) else ("i",)
                if ok and kind == "d" and way == "delete_after":
                    after = ("e", places)
                commit = (name, n, kind, places, good, bid, base)
                yield (
                    f"{who} writes {name}:{n} {sorted(places)}{'' if ok else ': skipped'}",
                    to(i, after, (*log, commit) if ok else log),
                )
                if any(c[2] == "R" for c in log[base:]):
                    yield f"{who}'s write of {name}:{n} conflicts with the RESTORE: drops it", to(i, ("i",))
            elif p[0] == "e":
                known = frozenset((b, x, is_deleted or x in p[1]) for b, x, is_deleted in letters)
                yield f"{who} deletes the dead letters {sorted(p[1])}", to(i, ("i",), letters=known)
            if cr and p[0] not in "ix":
                yield f"!{who} crashes", (log, letters, put(ps, i, ("i",)), rs, cr - 1, bids)
        if covered and sum(c[2] == "w" for c in log) < rewinds:
            rewind = ("A", last(log, "A") + 1, "w", frozenset(), frozenset(), -1, len(log))
            yield "!a rewind", ((*log, rewind), letters, ps, rs, cr, bids)
        if rs:
            for version in range(len(log)):
                restore = ("", version, "R", frozenset(), frozenset(), -1, 0)
                yield f"!RESTORE to {version}", ((*log, restore), letters, ps, rs - 1, cr, bids)

    def bad(st: State) -> str | None:
        log, letters = st[:2]
        covered, redo = fold(log)
        there, open_letters = rows(log), counted(log, letters)
        dead = [x for _, x in open_letters]
        for x in range(size):
            found = len(there[x]) + dead.count(x)
            if found > 1 and x not in redo:
                return f"message {x} is there {found} times, and the ledger does not know"
            if drops and x in covered and (x in redo or (is_dropped(log, x) and not found)):
                continue
            if (found > 0) != (x in covered):
                return f"message {x} is {'lost' if x in covered else 'there, and will be read again'}"
            bids = [bid for bid, place in open_letters if place == x]
            makers = [*there[x], *(at for at, c in enumerate(log) if drops and c[5] in bids)]
            if x not in redo and any(correction_of(log, maker, x) != in_force(log, x) for maker in makers):
                return f"message {x} has another correction than that in force"
        return None

    def done(st: State) -> bool:
        log, letters, ps = st[:3]
        covered, redo = fold(log)
        left = {messages[x] for _, x in counted(log, letters)}
        is_over = ps[1] == ("x",) and all(p in (("i",), ("x",)) for p in ps)
        return is_over and covered == everything and not redo and (corrects or FIXED not in left)

    return search(Model(init, step, bad, done))


def corrected(
    *,
    compares: str = "",
    gone: State = (),
    restores: int = 0,
    drops: bool = False,
    overtaken: str = "trusted",
    replay: str = "",
    late: str = "redo",
) -> Result:
    """Explore two redrives that correct one message, next to a rewound batch in another transaction sequence."""
    return model(
        corrects=True,
        compares=compares,
        rewinds=1,
        gone=gone,
        restores=restores,
        crashes=0,
        messages=(FIXED,),
        drops=drops,
        overtaken=overtaken,
        replay=replay,
        late=late,
    )


VARIANTS = (
    quick(
        "d1",
        "the exact places are replaced, in one commit with their rows; a RESTORE",
        "PASS",
        lambda: model(redrives=1, crashes=0, messages=(FIXED, HOPELESS)),
    ),
    Variant("d1'", "same, two redrives", "PASS", lambda: model(messages=(FIXED,))),
    quick(
        "d1-small",
        "same, one redrive, no crash, a row between",
        "PASS",
        lambda: model(redrives=1, crashes=0, restores=0),
    ),
    quick(
        "d2",
        "same, next to a replay with the old decoder",
        "PASS",
        lambda: model(redrives=1, replay="old", messages=(FIXED, HOPELESS), restores=0),
    ),
    quick(
        "d3",
        "same, next to a replay with the new decoder, and a RESTORE",
        "PASS",
        lambda: model(redrives=1, replay="new", messages=(FIXED,), crashes=0),
    ),
    quick(
        "d4",
        "a redrive has a transaction sequence of its own, next to a replay",
        "PASS",
        lambda: model(app="own", redrives=1, replay="new", messages=(FIXED, ROW), crashes=0, restores=0),
    ),
    quick(
        "d5",
        "all from the first place to the last one is replaced: the rows between are gone",
        "BAD",
        lambda: model(way="hull", redrives=1),
    ),
    quick(
        "d6",
        "the rows are appended, next to a replay",
        "BAD",
        lambda: model(way="append", app="own", redrives=1, replay="new", messages=(FIXED, ROW), restores=0),
    ),
    quick(
        "d7",
        "the dead letters are deleted, then the rows appended",
        "BAD",
        lambda: model(way="delete_first", redrives=1, messages=(FIXED,), restores=0),
    ),
    quick(
        "d8",
        "the rows are appended, then the dead letters deleted; two redrives, each in the sequence of its own",
        "BAD",
        lambda: model(way="delete_after", messages=(FIXED,), restores=1, uncounts="places", crashes=0),
    ),
    quick(
        "d9",
        "no dead letter of the batch counts any more, also those that still cannot be read",
        "BAD",
        lambda: model(uncounts="all", redrives=1, messages=(FIXED, HOPELESS), restores=0),
    ),
    quick(
        "d10",
        "a redrive that lands behind a RESTORE is trusted",
        "BAD",
        lambda: model(late="trusted", messages=(FIXED,), restores=2, crashes=0),
    ),
    quick("d11", "a rewound batch next to redrives of one message: what it replaces is not compared", "BAD", corrected),
    quick("d11-rows", "same, the number of rows is compared", "BAD", lambda: corrected(compares="rows")),
    quick("d11-which", "same, the rows are compared", "PASS", lambda: corrected(compares="which")),
    quick(
        "d12-rows",
        "same, the stream has lost the message, a RESTORE, the number of rows is compared",
        "BAD",
        lambda: corrected(compares="rows", gone=(0,), restores=1),
    ),
    Variant(
        "d12-which",
        "same, the rows are compared",
        "PASS",
        lambda: corrected(compares="which", gone=(0,), restores=1),
    ),
    quick(
        "d13",
        "same, no RESTORE, and the transform may drop the corrected message: no row changes",
        "BAD",
        lambda: corrected(compares="which", drops=True),
    ),
    quick(
        "d13-redo",
        "same, a replace that a redrive overtook is read again",
        "PASS",
        lambda: corrected(compares="which", drops=True, overtaken="redo"),
    ),
    Variant(
        "d13-replay",
        "same, next to a replay",
        "PASS",
        lambda: corrected(compares="which", drops=True, overtaken="redo", replay="old"),
    ),
    quick(
        "d14",
        "same, without the replay, with a RESTORE; of what lands behind it, only what was covered before is read again",
        "BAD",
        lambda: corrected(compares="which", drops=True, overtaken="redo", restores=1, late="covered"),
    ),
    Variant(
        "d14-redo",
        "same, all of it is read again",
        "PASS",
        lambda: corrected(compares="which", drops=True, overtaken="redo", restores=1),
    ),
)
