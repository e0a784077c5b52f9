"""What is known of a stream at a position: how many messages it had ever got before it.

A stream of Redis says how many messages it ever got, and how many it holds. What was trimmed unread is known by the
difference, if the number at the position is known; if it is not, what is gone by now is taken for accounted.

An accept sets the position of a shard that lost nothing again, without a batch, when another shard was cut.

A server that crashes or fails over may go back to an older state, and count on from there: :func:`going_back`.

A group that claims entries leaves the number to the server, where another client may set it: :func:`claims`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from tests.model.search import Model, Result, State, quick, search

SIZE = 3


class View(NamedTuple):
    """What the ledger knows; ``places`` has what is known at the position, if that is known."""

    covered: frozenset[int] = frozenset()
    origin: int | None = None
    places: Mapping[int, int] = {}
    known_at_origin: int | None = None


def model(
    *,
    says: bool = True,
    keeps: bool = True,
    jumps: bool = True,
    carries: bool = True,
    accepts: int = 0,
    restores: int = 1,
    crashes: int = 1,
) -> Result:
    """Explore it.

    Args:
        says: the commit with the origin says what is known there.
        keeps: a RESTORE keeps that with the origin.
        jumps: a batch that fills a hole says what is known behind what is covered after it.
        carries: an accept says what was known at the position, not what is gone by then.
        accepts: how many there may be.
        restores: how many there may be.
        crashes: how many there may be.
    """
    # The log: ("t",) the table before the group; ("o", origin, known); ("b", start, end, rows, lost, position,
    # known); ("x", position, known); ("R", commits left). The run: ("i",) idle, or what it is about to write. How many
    # messages were trimmed. How many RESTOREs and crashes are left.
    init: State = ((("t",),), ("i",), 0, restores, crashes)

    def view(log: State) -> View:
        at = [View()]
        for c in log:
            now = at[-1]
            if c[0] == "o" and now.origin is None:
                places = {} if c[2] is None else {c[1]: c[2]}
                now = View(frozenset(range(c[1])), c[1], places, c[2])
            elif c[0] == "b":
                places = {**now.places} if c[6] is None else {**now.places, c[5]: c[6]}
                now = now._replace(covered=now.covered | frozenset(range(c[1], c[2])), places=places)
            elif c[0] == "x":
                now = now._replace(places={} if c[2] is None else {c[1]: c[2]})
            elif c[0] == "R":
                past = at[c[1]]
                kept = {} if not keeps or now.known_at_origin is None else {now.origin or 0: now.known_at_origin}
                covered = past.covered | frozenset(range(now.origin or 0))
                now = now._replace(covered=covered, places={**kept, **now.places, **past.places})
            here = {place: count for place, count in now.places.items() if place == position(now)}
            at.append(now._replace(places=here))
        return at[-1]

    def position(known: View) -> int:
        return next(x for x in range(SIZE + 1) if x not in known.covered)

    def surviving(log: State) -> list[State]:
        at: list[list[State]] = [[]]
        for c in log:
            at.append(at[c[1]] if c[0] == "R" else [*at[-1], c])
        return at[-1]

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, run, trimmed, rs, cr = st
        known = view(log)
        start = position(known)
        if run[0] != "i":
            yield f"the run writes {run}", ((*log, run), ("i",), trimmed, rs, cr)
            if cr:
                yield "!the run dies", (log, ("i",), trimmed, rs, cr - 1)
        elif known.origin is None:
            after = ("o", trimmed, trimmed if says else None)
            yield f"the run begins at {trimmed}", ((*log, after), run, trimmed, rs, cr)
        else:
            before = known.places.get(start, max(start, trimmed))
            gap = next(x for x in range(start, SIZE + 1) if x == SIZE or x in known.covered)
            for end in range(start + 1, gap + 1):
                there = known._replace(covered=known.covered | frozenset(range(start, end)))
                lost = frozenset(range(before, trimmed))
                reached = position(there)
                count = max(reached, trimmed) if reached == end or jumps else None
                plan = ("b", start, end, frozenset(range(max(start, trimmed), end)), lost, reached, count)
                yield f"the run plans [{start},{end}), lost {set(lost)}", (log, plan, trimmed, rs, cr)
            if sum(c[0] == "x" for c in log) < accepts:
                accept = ("x", start, known.places.get(start) if carries else max(start, trimmed))
                yield f"an accept of another shard at {start}", ((*log, accept), run, trimmed, rs, cr)
        if trimmed < SIZE:
            yield "!a message is trimmed", (log, run, trimmed + 1, rs, cr)
        for version in range(1, len(log)) if rs else ():
            yield f"!RESTORE to version {version - 1}", ((*log, ("R", version)), run, trimmed, rs - 1, cr)

    def is_done(st: State) -> bool:
        known = view(st[0])
        return st[1] == ("i",) and known.origin is not None and position(known) == SIZE

    def wrong(st: State) -> str | None:
        if not is_done(st):
            return None
        said: set[int] = set(range(view(st[0]).origin or 0))
        for c in surviving(st[0]):
            said |= c[3] | c[4] if c[0] == "b" else set()
        return None if said >= set(range(SIZE)) else "a message is lost in silence"

    return search(Model(init, step, wrong, is_done))


def claims(*, checks: bool = True, least: int = SIZE + 1, seen: bool = False) -> Result:
    """Explore a group whose number another client sets once, higher than it is.

    Args:
        checks: a number that leaves room for fewer entries than exist after the position counts as unknown.
        least: the lowest number that the other client sets.
        seen: no unread message is trimmed before it does, nor until a run looks at the number. (A user may set a higher
            number to say that trimmed messages are not lost.)
    """
    # How many messages were added, trimmed, and delivered; the number at the server; which messages were claimed or
    # reported; the run: idle, ready to claim, or done; whether the other client may still act; whether the number that
    # it has set awaits a look.
    init: State = (0, 0, 0, 0, frozenset(), "idle", True, False)

    def step(st: State) -> Iterator[tuple[str, State]]:
        added, trimmed, position, number, known, run, may, waits = st
        first = max(position, trimmed)
        unread, length = added - first, added - trimmed
        is_known = not (checks and added - number < unread)
        if run != "ready":
            lost = added - (number if is_known else 0) - unread
            if trimmed > position and lost > 0:
                told = known | frozenset(range(position, trimmed))
                yield "a run reports and accounts", (added, trimmed, position, added - unread, told, "idle", may, False)
            else:
                now = number if is_known else added - unread
                believed = unread if checks or trimmed >= position else max(0, min(length, added - now))
                after = "ready" if believed else "done"
                yield f"a run finds {believed}", (added, trimmed, position, now, known, after, may, False)
        elif not unread or (added - number > length and trimmed >= position) or (checks and added - number < 1):
            yield "the claim is refused", (added, trimmed, position, number, known, "idle", may, waits)
        else:
            claimed = (added, trimmed, first + 1, number + 1, known | {first}, "idle", may, waits)
            yield f"the run claims {first}", claimed
        run = "idle" if run == "done" else run
        if added < SIZE:
            yield "a message is added", (added + 1, trimmed, position, number, known, run, may, waits)
        if trimmed < added and not (seen and waits):
            yield "!a message is trimmed", (added, trimmed + 1, position, number, known, run, may, waits)
        may_now = may and not (seen and trimmed > position)
        for higher in range(max(least, number + 1), SIZE + 3) if may_now else ():
            yield f"!another client sets {higher}", (added, trimmed, position, higher, known, run, False, True)

    def wrong(st: State) -> str | None:
        if st[5] != "done" or st[4] >= frozenset(range(st[0])):
            return None
        return "a run ends, and a message is neither claimed nor reported"

    return search(Model(init, step, wrong, lambda st: st[0] == SIZE and st[5] == "done"))


def going_back(
    *,
    contradicts: bool = True,
    differs: bool = True,
    bounds: bool = True,
    sends_late: bool = False,
    keeps_lost: int = 0,
    compares: bool = False,
    joins: bool = False,
    size: int = 5,
    deletions: int = 2,
) -> Result:
    """Explore a group that reads by position from a server that goes back once, to a state that it saved before.

    A run stops if the stream is another one: fewer messages were added than it knows, or the last one that was read is
    missing although no later one was deleted. It counts the missing messages only if one may be missing. It may count
    too few: a message that was deleted after it was read looks like one that the server has lost. Until the server goes
    back, no run stops, and a single missing message is certain: it is the highest deleted one.

    Args:
        contradicts: it also stops if fewer were added since than exist or were deleted after the position, or if a
            deletion after the position was forgotten.
        differs: it also stops if not as many were added since as exist after the position, and none was deleted there.
        bounds: it also stops if more are missing after the position than were removed since.
        sends_late: producers send the lost messages again, after one late message with an id below the position.
        keeps_lost: so many of the first lost messages are not sent again, if there are more.
        compares: that the number of removed messages is as it was shows that none is missing.
        joins: it counts the messages after the position at a later moment than it asks how many were ever added.
        size: how many messages are added in all.
        deletions: how many are deleted in all.
    """
    # The server: (messages, how many were ever added, the highest deleted one). What it saved, or None. Whether it may
    # still go back. The next message; a late one has an odd number. The group: (position, known at it, last read, what
    # was looked at before the count), or None if a run has stopped. The messages that were read or told to be lost;
    # others that were deleted behind the position. How many deletions are left. The lost messages that are to be sent
    # again; None if some never are, because a newer one was added; or the set of late ones that a run has passed.
    nothing: frozenset[int] = frozenset()
    init: State = ((nothing, 0, 0), None, True, 2, (1, (0, 0, 0), 0, None), nothing, nothing, deletions, ())

    def lost_range(position: int, before: int, there: frozenset[int], deleted: int, lost: int) -> frozenset[int]:
        if lost == 1 and deleted >= max(position, before + 1):
            return frozenset([deleted])
        return frozenset(range(position, max(min(there, default=0), deleted + 1)))

    def step(st: State) -> Iterator[tuple[str, State]]:
        server, saved, may, new, group, told, untold, left, again = st
        held = server[0]
        if group is None:
            return
        position, known, last, looked = group
        there, added, deleted = looked or server
        if joins and looked is None:
            found = (position, known, last, server)
            yield "a run looks", (server, saved, may, new, found, told, untold, left, again)
        else:
            after = frozenset(x for x in held if position <= x <= max((*there, deleted)))
            since, is_deleted = added - known[0], deleted >= max(position, known[1] + 1)
            is_other = since < 0 or (last and last not in held and server[2] < last)
            is_other = is_other or (contradicts and deleted >= position and since < len(after) + is_deleted)
            is_other = is_other or (contradicts and deleted < known[1] >= position)
            is_other = is_other or (differs and deleted < position and since != len(after))
            removed = added - len(there)
            is_other = is_other or (bounds and since - len(after) > max(0, removed - known[2]))
            if is_other:
                yield "a run stops", (server, saved, may, new, None, told, untold, left, again)
            else:
                is_same = compares and removed == known[2]
                lost = 0 if deleted < position or is_same else max(0, since - len(after))
                read = (max((*after, position - 1)) + 1, (added, deleted, removed), max(after, default=last), None)
                reported = lost_range(position, known[1], there, deleted, lost) if lost and may else untold
                rest = untold - reported if lost else untold
                late = frozenset(x for x in held - told if x % 2 and x < position)
                seen = told | after | (untold - rest)
                passed = late if again == () else nothing
                if joins or (read, seen) != (group, told):
                    what = f"a run reads {sorted(after)}, lost {lost}"
                    yield what, (server, saved, may, new, read, seen, rest, left, passed or again)
        if new <= 2 * size:
            more, never = (held | {new}, server[1] + 1, server[2]), None if again else again
            yield "a message is added", (more, saved, may, new + 2, group, told, untold, left, never)
        for x in held if left else ():
            now = (held - {x}, server[1], max(server[2], x))
            gone = untold if x in told or x < position or x % 2 else untold | {x}
            yield f"!{x} is deleted", (now, saved, may, new, group, told, gone, left - 1, again)
        if saved is None:
            yield "it saves", (server, server, may, new, group, told, untold, left, again)
        elif may:
            lost_ids = tuple(range(max((*saved[0], saved[2])) // 2 * 2 + 2, new, 2)) if sends_late else ()
            lost_ids = lost_ids[keeps_lost:] or lost_ids
            yield "!it goes back", (saved, saved, False, new, group, told, nothing, left, lost_ids)
        if sends_late and isinstance(again, tuple) and again:
            more = (held | {again[0]}, server[1] + 1, server[2])
            yield f"{again[0]} is sent again", (more, saved, may, new, group, told, untold, left, again[1:])
            late = again[0] - 1
            if late > max((*held, server[2])) and not any(x % 2 for x in told | held | {server[2]}):
                more = (held | {late}, server[1] + 1, server[2])
                yield f"{late} is sent late", (more, saved, may, new, group, told, untold, left, again)

    def wrong(st: State) -> str | None:
        may, group, untold, again = st[2], st[4], st[6], st[8]
        if group is None:
            return "a run stops before the server goes back" if may else None
        if isinstance(again, frozenset):
            return f"a run has read on, and {sorted(again)} was sent late and is not read"
        if not untold or min(untold) >= group[0]:
            return None
        return f"a run has read on, and {sorted(untold)} were deleted unread"

    return search(Model(init, step, wrong, lambda st: st[4] is None or not st[6]))


_late = partial(going_back, sends_late=True, size=3, deletions=1)
VARIANTS = (
    quick("back", "a server goes back", "PASS", going_back),
    quick("back-removed", "its number of removed is believed", "BAD", lambda: going_back(compares=True, bounds=False)),
    quick("back-joined", "its counts are of two moments", "BAD", lambda: going_back(joins=True)),
    quick("back-trusted", "its counts are believed", "BAD", lambda: going_back(contradicts=False)),
    quick("back-late", "an older message is sent late", "PASS", _late),
    quick("late-lost", "and counts as lost", "BAD", lambda: _late(bounds=False)),
    quick("fewer", "and too few again", "PASS", lambda: going_back(sends_late=True, keeps_lost=2, size=4, deletions=1)),
    quick("late-trusted", "and counts as read", "BAD", lambda: going_back(sends_late=True, size=3, differs=False)),
    quick("trusted", "a number that is too high is trusted", "BAD", lambda: claims(checks=False, seen=True)),
    quick("checked", "a number that contradicts the stream counts as unknown", "PASS", claims),
    quick("seen", "and is seen before the next trim, however high it is", "PASS", lambda: claims(least=1, seen=True)),
    quick("unseen", "as many are trimmed unseen as it is too high by", "BAD", lambda: claims(least=1)),
    quick("kept", "what is known at the origin is said with it, and a RESTORE keeps it", "PASS", model),
    quick("unsaid", "the commit with the origin does not say it", "BAD", lambda: model(says=False)),
    quick("not-kept", "a RESTORE to before that commit forgets it", "BAD", lambda: model(keeps=False)),
    quick("accepted", "an accept carries it", "PASS", lambda: model(accepts=1, restores=0)),
    quick("recounted", "an accept counts anew", "BAD", lambda: model(accepts=1, restores=0, carries=False)),
    quick("behind-a-hole", "what is covered behind a hole is not counted", "BAD", lambda: model(jumps=False)),
)
