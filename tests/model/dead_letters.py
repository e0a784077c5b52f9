"""Dead letters: in a second table, and written first."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.search import Model, Result, State, Variant, put, quick, search


def chain(log: State, version: int) -> list[int]:
    """The places of the batches whose rows a version has, the newest first."""
    found = []
    at = version - 1
    while at >= 0:
        if log[at][0] == "R":
            at = log[at][1] - 1
            continue
        found.append(at)
        at -= 1
    return found


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


def counting(
    *,
    absent: str = "counts",
    record: bool = True,
    trust_late: bool = False,
    restores: int = 2,
    cleans: int = 2,
    size: int = 2,
) -> Result:
    """Which dead letters count, once the commits that tell it are cleaned from the log.

    Every message is a dead letter here, and a batch is one message. A run settles before it writes, and again after a
    RESTORE: it knows what does not count, and each of its entries says so.

    Args:
        absent: a batch whose commit was cleaned ``counts``, or is ``orphaned``.
        record: entries say what does not count.
        trust_late: what an entry says counts, too, if it was planned before a RESTORE and landed behind it.
        restores: how many there may be, each to a version that is readable.
        cleans: how often the log may be cleaned, up to the newest entry.
        size: how many messages there are.
    """
    # The log: ('b', message, what does not count, base) or ('R', version). The run: ('i',) idle, ('s', known) settled,
    # ('w', message, known, base) about to write. A batch is known by its place in the log.
    init = ((), 0, ("i",), restores, cleans)

    def is_late(log: State, cleaned: int, at: int) -> bool:
        base = log[at][3]
        return base < cleaned or any(log[i][0] == "R" for i in range(base, at))

    def said(log: State, cleaned: int) -> frozenset[int]:
        """What the newest surviving entry says."""
        for at in chain(log, len(log)):
            if at >= cleaned and (trust_late or not is_late(log, cleaned, at)):
                return log[at][2]
        return frozenset()

    def uncounted(log: State, cleaned: int) -> frozenset[int]:
        held = set(chain(log, len(log)))
        batches = [at for at, c in enumerate(log) if c[0] == "b"]
        shown = frozenset(at for at in batches if at >= cleaned and at not in held)
        if absent == "orphaned":
            return shown | frozenset(at for at in batches if at < cleaned)
        return shown | said(log, cleaned)

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, cleaned, run, rs, cl = st
        held = {log[at][1] for at in chain(log, len(log))}
        missing = sorted(set(range(size)) - held)
        if run[0] == "i":
            yield "run settles", (log, cleaned, ("s", uncounted(log, cleaned) if record else frozenset()), rs, cl)
        elif run[0] == "s":
            if missing:
                yield f"run plans {missing[0]}", (log, cleaned, ("w", missing[0], run[1], len(log)), rs, cl)
            yield "run ends", (log, cleaned, ("i",), rs, cl)
        else:
            _, message, known, base = run
            is_restored = any(c[0] == "R" for c in log[base:])
            written = (*log, ("b", message, known, base))
            yield f"run writes {message}", (written, cleaned, ("i",) if is_restored else ("s", known), rs, cl)
            if is_restored:
                yield f"run drops {message}", (log, cleaned, ("i",), rs, cl)
        if rs:
            after = ("i",) if run[0] == "s" else run
            for version in range(cleaned + 1 if cleaned else 0, len(log)):
                yield f"!RESTORE to version {version}", ((*log, ("R", version)), cleaned, after, rs - 1, cl)
        newest = max((at for at, c in enumerate(log) if c[0] == "b"), default=0)
        # Cleaned further, the positions cannot be read either, and nothing goes on by itself.
        if cl and newest > cleaned and run[0] != "w" and all(c[0] == "b" for c in log[log[newest][3] :]):
            yield f"!the log is cleaned before {newest}", (log, newest, run, rs, cl - 1)

    def bad(st: State) -> str | None:
        log, cleaned = st[:2]
        held = chain(log, len(log))
        none = uncounted(log, cleaned)
        for message in range(size):
            there = [at for at, c in enumerate(log) if c[0] == "b" and c[1] == message]
            count = sum(at not in none for at in there)
            if count != sum(log[at][1] == message for at in held):
                return f"dead letter {message} counts {count} times"
        return None

    def done(st: State) -> bool:
        return {st[0][at][1] for at in chain(st[0], len(st[0]))} == set(range(size)) and st[2][0] != "w"

    return search(Model(init, step, bad, done))


def unplaced(
    *, of_an_offset: str = "newest counting", reads: int = 3, dismissals: int = 2, restores: int = 2
) -> Result:
    """Which dead letters of one damaged part of a file count: they have an offset, but no sequence.

    No range has them, so each replay or rewind writes another one. A dismissal copies the one that counts.

    Args:
        of_an_offset: which of them count: ``all`` that no dismissal replaces, the ``newest`` in the table, or the
            ``newest counting`` one: the newest of those whose batch the main ledger has.
        reads: how often the part is read.
        dismissals: how many there may be.
        restores: how many there may be, each to an earlier version of the main table.
    """
    # The main log: ('b', place of a dead letter) or ('R', version). The dead letters: the place of the one that each
    # dismisses, None for one that was read. Written ahead: the place of a dead letter whose batch has not landed.
    init = ((), (), None, reads, dismissals, restores)

    def landed(log: State, version: int) -> list[int]:
        """The dead letters whose batches a version has, the newest first."""
        return [log[at][1] for at in chain(log, version)]

    def counting(log: State, dead: State) -> list[int]:
        held = landed(log, len(log))
        replaced = {dead[at] for at in held}
        if of_an_offset == "newest":
            return [at for at in held if at == len(dead) - 1]
        found = [at for at in held if at not in replaced]
        return found if of_an_offset == "all" else found[:1]

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, dead, ahead, rd, ds, rs = st
        if ahead is not None:
            yield "the batch lands", ((*log, ("b", ahead)), dead, None, rd, ds, rs)
            yield "!it crashes", (log, dead, None, rd, ds, rs)
            return
        if rd:
            yield "the part is read", (log, (*dead, None), len(dead), rd - 1, ds, rs)
        for at in counting(log, dead) if ds else ():
            yield f"{at} is dismissed", (log, (*dead, at), len(dead), rd, ds - 1, rs)
        for version in range(len(log)) if rs else ():
            # A RESTORE to version v has what the first v entries have.
            yield f"!RESTORE to {version}", ((*log, ("R", version)), dead, None, rd, ds, rs - 1)

    def bad(st: State) -> str | None:
        log, dead = st[:2]
        held, count = landed(log, len(log)), counting(log, dead)
        if len(count) != bool(held):
            return f"the damage counts {len(count)} times"
        if held and count != held[:1]:
            return "the one that counts is not what was written last"
        return None

    def done(st: State) -> bool:
        return st[2] is None

    return search(Model(init, step, bad, done))


def dismissing(
    *, removes_rows: bool = False, takes_effect: str = "base", rewinds: int = 2, dismissals: int = 2, restores: int = 1
) -> Result:
    """A dismissal of the dead letter of one message, in its own transaction sequence, next to ingestion and rewinds.

    Ingestion makes a row or a dead letter of the message, each time as it likes.

    Args:
        removes_rows: a dismissal is an overwrite without rows, otherwise an append without rows.
        takes_effect: a dismissal hides older dead letters, and newer replaces hide its copy, in the order of the log
            (``commit``), or as if it had landed directly after the version that it was planned from (``base``).
        rewinds: how many there may be.
        dismissals: how many there may be.
        restores: how many there may be, each to an earlier version of the main table.
    """
    # The log: (kind, base, whether it has a dead letter); kinds: a append, r replace, w rewind, d dismissal, R RESTORE
    # (base: the version). A version has what the first entries have. What is in flight: the entry, or None. A late
    # replace or overwrite is assumed to have removed nothing: that is the worst.
    init = ((), None, None, rewinds, dismissals, restores)

    def is_late(log: State, at: int) -> bool:
        return any(kind == "R" for kind, _, _ in log[log[at][1] : at])

    def fold(log: State) -> tuple[int, bool, bool]:
        """The rows, whether the message is covered, and whether it has to be replaced."""
        states = [(0, False, False)]
        for at, (kind, base, is_dead) in enumerate(log):
            rows, covered, redo = states[-1]
            late = kind != "R" and is_late(log, at)
            if kind == "R":
                states.append(states[base])
                continue
            if kind == "w":
                states.append((rows, covered, covered))
                continue
            if (kind == "r" or (kind == "d" and removes_rows)) and not late:
                rows = 0
            if late or kind == "a":
                redo = redo or covered
            elif kind == "r":
                redo = False
            states.append((rows + (kind != "d" and not is_dead), True, redo))
        return states[-1]

    def counting(log: State) -> list[int]:
        """The commits whose dead letters count: no newer replace or dismissal hides them."""
        found, is_hidden, waiting = [], False, list[int]()

        def visit(at: int) -> None:
            nonlocal is_hidden
            if log[at][2] and not is_hidden:
                found.append(at)
            is_hidden = is_hidden or log[at][0] in "rd"

        for at in chain(log, len(log)):
            while waiting and log[waiting[0]][1] > at:
                visit(waiting.pop(0))
            if log[at][0] == "d" and takes_effect == "base":
                waiting.append(at)
            else:
                visit(at)
        for at in waiting:
            visit(at)
        return found

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, batch, dismissal, rw, ds, rs = st
        _, covered, redo = fold(log)
        if batch is not None:
            yield "the batch lands", ((*log, batch), None, dismissal, rw, ds, rs)
        elif redo or not covered:
            for is_dead in (False, True):
                planned = ("r" if redo else "a", len(log), is_dead)
                yield f"ingestion plans {planned}", (log, planned, dismissal, rw, ds, rs)
        elif rw:
            yield "a rewind", ((*log, ("w", len(log), False)), None, dismissal, rw - 1, ds, rs)
        if dismissal is not None:
            yield "the dismissal lands", ((*log, dismissal), batch, None, rw, ds, rs)
            yield "!the dismissal crashes", (log, batch, None, rw, ds, rs)
        elif ds and counting(log):
            yield "a dismissal is planned", (log, batch, ("d", len(log), True), rw, ds - 1, rs)
        for version in range(len(log)) if rs else ():
            yield f"!RESTORE to {version}", ((*log, ("R", version, False)), batch, dismissal, rw, ds, rs - 1)

    def bad(st: State) -> str | None:
        rows, covered, redo = fold(st[0])
        count = rows + len(counting(st[0]))
        if count > 1 and not redo:
            return f"the message is there {count} times, and the ledger does not know"
        if (count > 0) != covered:
            return f"the message is {'lost' if covered else 'there, and will be read again'}"
        newest = next((st[0][at] for at in chain(st[0], len(st[0])) if st[0][at][0] in "ar"), None)
        if newest is not None and not newest[2] and not rows:
            return "the row of the newest batch is gone"
        return None

    def done(st: State) -> bool:
        _, covered, redo = fold(st[0])
        return covered and not redo and st[1] is None and st[2] is None

    return search(Model(init, step, bad, done))


def using_up(*, absent: str = "shown", takes_next: bool = True, far: int = 5, batches: int = 3) -> Result:
    """Which dead letters count where fences use up several numbers of a member at once.

    Every batch has a dead letter. The log was cleaned up to the first batch of the member.

    Args:
        absent: a batch whose number no readable commit has ``counts``; or it counts unless it is ``shown`` that it
            never landed, because a readable commit has a lower number.
        takes_next: a fence takes the next number before it takes the far one.
        far: the far number.
        batches: how many there may be.
    """
    # The log: (number, batch or -1 for a fence). The numbers of the batches. The member: the batch that it is about to
    # write, or None. The fence: the numbers that it is about to take.
    init = (((1, 0),), (1,), None, (2, far) if takes_next else (far,))

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, planned, batch, fence = st
        last = log[-1][0]
        if batch is not None:
            number = planned[batch]
            after = (*log, (number, batch)) if number > last else log
            yield f"batch {batch} {'lands' if number > last else 'is dropped'}", (after, planned, None, fence)
            yield "!the member crashes", (log, planned, None, fence)
        elif len(planned) < batches:
            yield f"dead letters of number {last + 1}", (log, (*planned, last + 1), len(planned), fence)
        if fence:
            number = last + 1 if len(fence) == 2 else far
            after = (*log, (number, -1)) if number > last else log
            yield f"a fence of {number}", (after, planned, batch, fence[1:])

    def bad(st: State) -> str | None:
        log, planned = st[:2]
        readable = dict(log[1:])
        for one, number in enumerate(planned):
            is_cleaned = number <= log[-1][0] and number not in readable
            if absent == "shown":
                is_cleaned = is_cleaned and min(readable, default=number) >= number
            counts = is_cleaned or readable.get(number) == one
            if counts != ((number, one) in log):
                return f"the dead letter of batch {one} {'counts' if counts else 'does not count'}"
        return None

    def done(st: State) -> bool:
        return st[2] is None and not st[3]

    return search(Model(init, step, bad, done))


def abandoning(
    *,
    fences: bool = True,
    keeper_checks: bool = True,
    own_sequence: bool = True,
    redrives: int = 2,
    size: int = 4,
) -> Result:
    """Dead letters of redrives that are killed before they land, next to ingestion, and logs that are cleaned.

    A run of ingestion checks which dead letters count, and its entry says up to which of them all count. Dead letters
    that it sees never land are deleted.

    Args:
        fences: a run takes the number of a redrive that wrote its dead letters long ago and has not landed.
        keeper_checks: the keeper of the ledger checks, too, before it writes; if not, it repeats the newest entry.
        own_sequence: redrives have another transaction sequence than ingestion.
        redrives: how many there may be.
        size: from this many commits on, only redrives and fences commit.
    """
    # The main log: (sequence, number, redrive or -1, how many redrives are checked, base); what is cleaned of it. The
    # dead letters: the number of each redrive; what is cleaned of their log; which are deleted. The redrive in flight;
    # the entry that a run is about to write; how many runs have ended since the newest dead letters were written and
    # became old. Logs are cleaned so late that two have.
    ingestion = "ingestion" if own_sequence else "redrives"
    init = ((), 0, (), 0, frozenset(), None, None, 0, redrives)

    def last(main: State, sequence: str) -> int:
        return max((c[1] for c in main if c[0] == sequence), default=0)

    def orphaned(st: State) -> tuple[list[int], list[int]]:
        """The redrives that are in flight, and those that never land, as far as the logs show."""
        main, cleaned, dead, cleaned_dead, deleted = st[:5]
        checked = main[-1][3] if main else 0
        readable = {c[1]: c[2] for c in main[cleaned:] if c[0] == "redrives"}
        flying, never = [], []
        for at in range(max(checked, cleaned_dead), len(dead)):
            number = dead[at]
            if number > last(main, "redrives"):
                flying.append(at)
            elif readable.get(number, at) != at or (number not in readable and min(readable, default=number) < number):
                never.append(at)
        return [at for at in flying if at not in deleted], [at for at in never if at not in deleted]

    def step(st: State) -> Iterator[tuple[str, State]]:
        main, cleaned, dead, cleaned_dead, deleted, redrive, run, runs, left = st
        flying, never = orphaned(st)
        checked = min(flying, default=len(dead))
        if redrive is not None:
            is_free = dead[redrive] > last(main, "redrives")
            entry = ("redrives", dead[redrive], redrive, main[-1][3] if main else 0, -1)
            after = (*main, entry) if is_free else main
            name = f"redrive {redrive} {'lands' if is_free else 'is dropped'}"
            yield name, (after, cleaned, dead, cleaned_dead, deleted, None, run, runs, left)
            yield "!it is killed", (main, cleaned, dead, cleaned_dead, deleted, None, run, runs, left)
        elif left:
            known = (*dead, last(main, "redrives") + 1)
            yield (
                f"redrive {len(dead)} writes dead letters",
                (main, cleaned, known, cleaned_dead, deleted, len(dead), run, 0, left - 1),
            )
        if run is None:
            gone = deleted | frozenset(never)
            yield "a run checks", (main, cleaned, dead, cleaned_dead, gone, redrive, (checked, len(main)), runs, left)
            base = len(main)
            kept = ("keep", last(main, "keep") + 1, -1, checked if keeper_checks else main[-1][3] if main else 0, base)
            if len(main) < size:
                gone = gone if keeper_checks else deleted
                yield "the keeper writes", ((*main, kept), cleaned, dead, cleaned_dead, gone, redrive, run, runs, left)
        else:
            entry = (ingestion, last(main, ingestion) + 1, -1, *run)
            if len(main) < size:
                yield (
                    "the run writes",
                    ((*main, entry), cleaned, dead, cleaned_dead, deleted, redrive, None, runs, left),
                )
            ended = (*main, ("redrives", dead[flying[-1]], -1, main[-1][3] if main else 0, -1)) if flying else main
            if fences and flying:
                yield "the run fences", (ended, cleaned, dead, cleaned_dead, deleted, redrive, None, runs, left)
            elif redrive is None:
                ends = (main, cleaned, dead, cleaned_dead, deleted, redrive, None, min(runs + 1, 2), left)
                yield "the run ends", ends
        if runs == 2 and run is None and cleaned_dead < len(dead):
            yield "!the log of the dead letters is cleaned", (*st[:3], len(dead), *st[4:])
        newest = len(main) - 1
        if newest > cleaned and main[-1][4] == newest and run is redrive is None:
            yield "!the log is cleaned", (main, newest, *st[2:])

    def bad(st: State) -> str | None:
        main, _, dead, _, deleted = st[:5]
        flying, never = orphaned(st)
        for at in range(len(dead)):
            counts = at not in (*flying, *never, *deleted)
            if counts != any(c[0] == "redrives" and c[2] == at for c in main):
                return f"the dead letter of redrive {at} {'counts' if counts else 'does not count'}"
        return None

    def done(st: State) -> bool:
        return st[5] is st[6] is None and not orphaned(st)[0]

    return search(Model(init, step, bad, done))


def replacing(*, late: str = "replaces", restores: int = 1, redos: int = 2) -> Result:
    """The dead letter or the row of one message that the stream may lose, next to what replaces it.

    What is read makes a row, a dead letter, or nothing, as it likes. Of a message that the stream has lost, what
    replaces it writes what counted at its plan. It is planned again if the rows have changed when it lands.

    Args:
        late: whether a replace that lands behind a RESTORE ``replaces`` older dead letters, or whether they ``stay``.
        restores: how many there may be, each to an earlier version of the table.
        redos: how many replays or rewinds there may be.
    """
    # The log: (kind, base, what was made); kinds: a append, r replace, R RESTORE (base: the version). In flight: an
    # entry, or None; whether the stream has lost the message.
    init = ((), None, False, restores, redos)

    def is_late(log: State, at: int) -> bool:
        return any(kind == "R" for kind, _, _ in log[log[at][1] : at])

    def rows(log: State) -> tuple[int, ...]:
        """The commits that made the rows."""
        states: list[tuple[int, ...]] = [()]
        for at, (kind, base, made) in enumerate(log):
            before = states[base] if kind == "R" else () if kind == "r" else states[-1]
            states.append((*before, at) if made == "row" else before)
        return states[-1]

    def redo(log: State) -> bool:
        states = [(False, False)]
        for at, (kind, base, _) in enumerate(log):
            is_again = states[-1][0] and (kind == "a" or is_late(log, at))
            states.append(states[base] if kind == "R" else (True, is_again))
        return states[-1][1]

    def letters(log: State) -> list[int]:
        """The commits whose dead letters count."""
        found = []
        for at in chain(log, len(log)):
            found += [at] if log[at][2] == "letter" else []
            if log[at][0] == "r" and not (late == "stay" and is_late(log, at)):
                break
        return found

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, batch, is_gone, rs, again = st
        if batch is not None:
            kind, base, made = batch
            if kind == "r" and rows(log[:base]) != rows(log):
                yield "other rows: it is planned again", (log, None, is_gone, rs, again)
            else:
                yield f"it lands: {made}", ((*log, batch), None, is_gone, rs, again)
        elif not is_gone and (not log or again):
            for made in ("row", "letter", "nothing"):
                planned = ("r" if chain(log, len(log)) else "a", len(log), made)
                yield f"planned: {planned}", (log, planned, is_gone, rs, again - bool(log))
        elif again or redo(log):
            kept = "row" if rows(log) else "letter" if letters(log) else "unread"
            yield f"planned, kept: {kept}", (log, ("r", len(log), kept), is_gone, rs, max(again - 1, 0))
        if log and not is_gone:
            yield "!the stream loses the message", (log, batch, True, rs, again)
        for version in range(1, len(log)) if rs else ():
            yield f"!RESTORE to {version}", ((*log, ("R", version, "")), batch, is_gone, rs - 1, again)

    def bad(st: State) -> str | None:
        log = st[0]
        before, now = (len(rows(part)) + len(letters(part)) for part in (log[:-1], log))
        if now > 1 and not redo(log):
            return f"the message is there {now} times, and the ledger does not know"
        if before and not now and log[-1][2] == "unread":
            return "the last copy is gone"
        return None

    def done(st: State) -> bool:
        return bool(st[0]) and st[1] is None and not redo(st[0])

    return search(Model(init, step, bad, done))


VARIANTS = (
    quick("e1", "same numbers, dead-letter write not verified", "BAD", lambda: model(verify=False)),
    quick("e2", "same numbers, verified by batch id, loser re-plans", "STUCK", model),
    quick(
        "e3",
        "same numbers, the batch found in the dead letters is redone exactly; one member",
        "PASS",
        lambda: model(adopt=True),
    ),
    quick("e4", "same with a takeover by B", "BAD", lambda: model(adopt=True, procs="AB")),
    quick("e5", "own numbers, every row counts", "BAD", lambda: model(numbers="own")),
    Variant(
        "e6",
        "own numbers, rows count through the main ledger's batch ids; two runs of one member",
        "PASS",
        lambda: model(numbers="own", view="join", crashes=1),
    ),
    Variant("e7", "same with takeovers", "PASS", lambda: model(numbers="own", view="join", procs="AB", takes=2)),
    Variant("e8", "adopt + join, takeovers", "PASS", lambda: model(adopt=True, view="join", procs="AB", takes=2)),
    quick("clean1", "a batch whose commit was cleaned is orphaned", "BAD", lambda: counting(absent="orphaned")),
    quick("clean2", "it counts, and nobody writes down what does not", "BAD", lambda: counting(record=False)),
    quick("clean3", "entries say what does not, also late ones", "BAD", lambda: counting(trust_late=True)),
    quick("clean4", "entries say what does not", "PASS", lambda: counting(restores=1)),
    quick("clean5", "same, two RESTOREs and three messages", "PASS", lambda: counting(size=3)),
    quick("used1", "a batch counts if no readable commit has its number", "BAD", lambda: using_up(absent="counts")),
    quick("used2", "not if one has a lower number; the far number is taken", "BAD", lambda: using_up(takes_next=False)),
    quick("used3", "the same, but the next number is taken first", "PASS", using_up),
    quick("left1", "nobody takes the number of a killed redrive", "BAD", lambda: abandoning(fences=False)),
    quick("left2", "the keeper repeats what was checked", "BAD", lambda: abandoning(keeper_checks=False)),
    quick("left3", "a fence takes it, and the keeper checks", "PASS", lambda: abandoning(redrives=1)),
    Variant("left4", "same, two redrives", "PASS", abandoning),
    Variant("left5", "same, in the sequence of ingestion", "PASS", lambda: abandoning(own_sequence=False)),
    quick("offset1", "each dead letter of an offset counts", "BAD", lambda: unplaced(of_an_offset="all")),
    quick("offset2", "the newest in the table counts", "BAD", lambda: unplaced(of_an_offset="newest")),
    quick("offset3", "the newest of those whose batch is in the ledger counts", "PASS", unplaced),
    quick(
        "dismiss1",
        "a dismissal removes rows, and takes effect where it lands",
        "BAD",
        lambda: dismissing(removes_rows=True, takes_effect="commit", restores=0),
    ),
    quick(
        "dismiss2",
        "it removes no row, and takes effect where it lands",
        "BAD",
        lambda: dismissing(takes_effect="commit", restores=0),
    ),
    quick(
        "dismiss3",
        "it removes rows, and takes effect where it was planned",
        "BAD",
        lambda: dismissing(removes_rows=True, restores=0),
    ),
    quick(
        "dismiss4",
        "it removes no row, and takes effect where it was planned; a RESTORE",
        "PASS",
        lambda: dismissing(rewinds=1, dismissals=1),
    ),
    Variant("dismiss5", "same, two rewinds and two dismissals", "PASS", dismissing),
    quick("late1", "a replace behind a RESTORE also replaces dead letters that it brought back", "BAD", replacing),
    quick("late2", "it replaces no dead letter, and is made again", "PASS", lambda: replacing(late="stay")),
    Variant("late3", "same, two RESTOREs", "PASS", lambda: replacing(late="stay", restores=2, redos=3)),
    Variant("dismiss6", "same, two RESTOREs", "PASS", lambda: dismissing(rewinds=1, dismissals=1, restores=2)),
)
