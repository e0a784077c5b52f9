"""Keyed tables: one MERGE a batch keeps one row a key, next to RESTORE, rewinds, replays, redrives and purges.

A merge reduces its batch to the newest change of each key and applies that to the row of the key. Order is the position
in the shard, or a value of the message. A deleted row goes, or it stays as a tombstone.

Delta applies a merge to the version that Spark reads for it, which may be any from the plan on, and refuses it where a
commit after that version has touched the same files. So a merge that lands applies to the rows that it finds there. It
may also be refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

from tests.model.search import Model, Result, State, Variant, put, quick, search

INGESTION, REPLAY, PURGE = 2, 3, 4
"""Where a state has what they have planned."""

Place = tuple[int, int]
Places = frozenset[Place]


class Change(NamedTuple):
    """A message.

    Args:
        key: its key.
        operation: ``u`` upserts, ``d`` deletes.
        order: the value of the message that orders it, or the time at which it was really made.
    """

    key: int
    operation: str
    order: int


class Row(NamedTuple):
    """What the table has of a key.

    Args:
        order: of the change that made it.
        shard: of that change.
        position: of that change.
        operation: ``d`` if this is a tombstone.
        transform: the version of the transform that made it.
    """

    order: int
    shard: int
    position: int
    operation: str
    transform: int


class Commit(NamedTuple):
    """A commit that is planned.

    Args:
        apps: the transaction sequences that it takes a number of.
        kind: ``merge``, ``replay``, ``redrive``, ``rewind``, or ``purge``.
        parts: the range of each shard, ``None`` where it has nothing.
        floor: tombstones with a lower order were removed, as far as the plan knows; of a purge, the new floor.
        is_taken: one of its numbers was taken since.
        is_late: a RESTORE has landed since.
        base: the rows that it was planned from, where they matter.
    """

    apps: str
    kind: str
    parts: tuple[Place | None, ...]
    floor: int = 0
    is_taken: bool = False
    is_late: bool = False
    base: tuple[Row | None, ...] = ()


class Version(NamedTuple):
    """The table and the ledger after a commit.

    Args:
        rows: per key.
        covered: places that were read.
        redo: places that are to be read again.
        replayed: places whose newest write was a replay.
        floor: tombstones with a lower order may be gone.
        dead: places that became dead letters, because they lie below the floor and there is no row of their key.
        is_known: whether the ledger vouches for the table.
        redriven: whether the dead letter is a row, or would be one without a newer change.
    """

    rows: tuple[Row | None, ...]
    covered: Places = frozenset()
    redo: Places = frozenset()
    replayed: Places = frozenset()
    floor: int = 0
    dead: Places = frozenset()
    is_known: bool = True
    redriven: bool = False


Messages = tuple[tuple[Change, ...], ...]


def shards(*texts: str) -> Messages:
    """The messages of each shard; ``au3`` upserts key ``a`` with order 3, the position if there is no number."""
    return tuple(
        tuple(Change(ord(word[0]) - ord("a"), word[1], int(word[2:] or at)) for at, word in enumerate(text.split()))
        for text in texts
    )


def model(
    messages: Messages,
    *,
    order: str = "position",
    deletes: str = "row goes",
    ties: str = "place",
    redo: str = "end",
    late: str = "redo",
    plan: str = "lowest",
    detects: str = "changes",
    replay: str = "merge",
    redrive: bool = False,
    app: str = "own",
    purge: str = "",
    floor: str = "insert",
    stops: bool = True,
    unchanged: str = "refused",
    restores: int = 1,
    rewinds: int = 1,
) -> Result:
    """Explore it.

    Args:
        messages: of each shard.
        order: of the changes of a key: the ``position`` in the shard, or a ``value`` of the message.
        deletes: ``row goes``, or a ``tombstone`` stays.
        ties: of equal values, which change wins: by ``place``, the higher shard and position; or the ``first`` or the
            ``last`` that is merged.
        redo: what has to be read again behind a merge: ``none`` but what a rewind names; the ``range`` of a late one;
            or all from its ``end`` to the highest place that is covered in the shard.
        late: the range of a merge that lands behind a RESTORE is read again (``redo``), or it is ``trusted``.
        plan: ingestion reads the ``lowest`` place that is missing or to be read again; or, as for tables that are
            appended to, what is to be read again ``redo first``; or ``gap first``.
        detects: which changes raise if they meet a row of another shard: all ``changes``, ``upserts``, or ``none``.
        replay: ``merge``, equal orders overwrite; ``newer``, they do not; ``refresh``, it only writes rows again that
            its own messages made, and covers nothing; none if empty.
        redrive: the replay writes the first place only, a dead letter that no other reader can decode.
        app: the transaction sequence of a replay, its ``own`` or that of ingestion (``shared``).
        purge: of tombstones, in the transaction sequence of the replay, where a replay has one of its own. ``plain``:
            at once; ``declared``: after an empty commit in the sequence of ingestion that says the floor; ``both``: at
            once, with a number in the sequence of ingestion, too; none if empty.
        floor: what happens below the floor: ``nothing``; ``refused``, a rewind or a replay to a change below is; or
            ``insert``, a change below it that meets no row makes none, and is a dead letter if it is read for the first
            time.
        stops: ingestion stops at a merge that was planned with a lower floor than that where it landed, until an
            operator RESTOREs the version before it.
        unchanged: a merge that would change nothing in the version that it was planned from is ``refused`` like others;
            or it may be ``landed`` without a change.
        restores: how many there may be.
        rewinds: how many there may be.

    Any run may be killed at any time: then it plans again, as after a commit that Delta refused.
    """
    everything = frozenset((shard, at) for shard, found in enumerate(messages) for at in range(len(found)))
    keys = 1 + max(change.key for found in messages for change in found)
    merges: dict[State, Version] = {}
    # The state: the version; those that a RESTORE may go back to; what ingestion, the replay and the purge have planned,
    # or what is to become of them; how many RESTOREs and rewinds are left; the version before a merge that stops it.

    def change_at(place: Place) -> Change:
        return messages[place[0]][place[1]]

    def row(place: Place, transform: int) -> Row:
        change = change_at(place)
        value = place[1] if order == "position" else change.order
        return Row(value, *place, change.operation, transform)

    def rank(one: Row) -> State:
        if order == "position":
            return (one.position,)
        return (one.order,) if ties != "place" else one[:3]

    def places(c: Commit) -> Places:
        return frozenset((shard, at) for shard, part in enumerate(c.parts) if part for at in range(*part))

    def merged(before: tuple[Row | None, ...], c: Commit) -> tuple[tuple[Row | None, ...], Places]:
        """The rows after a merge, and the places of changes below the floor that meet no row."""
        rows, dropped = list(before), set[Place]()
        for key in range(keys):
            found = [place for place in places(c) if change_at(place).key == key]
            if redrive and c.kind != "redrive":
                found = [place for place in found if place != (0, 0)]
            changes = [row(place, 1 if c.kind == "merge" else 2) for place in sorted(found)]
            old = rows[key]
            if c.kind == "replay" and replay == "refresh":
                rows[key] = next((one for one in changes if old and one[:3] == old[:3]), old)
                continue
            if not changes:
                continue
            new = max(reversed(changes) if ties == "last" else changes, key=rank)
            result = None if new.operation == "d" and deletes == "row goes" else new
            if old is None:
                if floor == "insert" and new.order < c.floor:
                    dropped.update(found)
                else:
                    rows[key] = result
            elif new[:3] == old[:3]:
                if c.kind != "merge" and replay != "newer":
                    rows[key] = result
            elif rank(new) > rank(old) or (ties == "last" and rank(new) == rank(old)):
                rows[key] = result
        return tuple(rows), frozenset(dropped)

    def after(before: Version, c: Commit, *, is_unchanged: bool = False) -> Version:
        made = merges.get((before, c, is_unchanged))
        if made is None:
            made = merges[before, c, is_unchanged] = applied(before, c, is_unchanged=is_unchanged)
        return made

    def applied(before: Version, c: Commit, *, is_unchanged: bool) -> Version:
        if c.kind == "purge":
            left = tuple(None if r and r.operation == "d" and r.order < c.floor else r for r in before.rows)
            return before._replace(rows=left, floor=max(before.floor, c.floor))
        rows, dropped = merged(before.rows, c)
        if is_unchanged:
            rows = before.rows
        written = places(c)
        is_known = not (stops and c.kind != "rewind" and c.floor < before.floor)
        if c.kind == "replay" and replay == "refresh":
            return before._replace(rows=rows, replayed=before.replayed | written, is_known=is_known)
        covered = before.covered | written
        again = before.redo - written
        if c.is_late and late == "redo" and redo != "none":
            again |= written
        for shard, part in enumerate(c.parts):
            if part and (redo == "end" or c.kind == "rewind"):
                again |= frozenset((shard, at) for at in range(part[1], len(messages[shard]))) & covered
        first_read = written if c.is_late else written - before.covered | before.dead
        return Version(
            rows,
            covered,
            again,
            before.replayed - written if c.kind == "merge" else before.replayed | written,
            before.floor,
            before.dead - written | dropped & first_read,
            is_known,
            before.redriven or c.kind == "redrive",
        )

    def runs(places: Places, shard: int, start: int) -> Iterator[Place]:
        """The ranges of it that begin there, the empty one first."""
        end = start
        while True:
            yield start, end
            if (shard, end) not in places:
                return
            end += 1

    def plans(at: Version) -> Iterator[tuple[Place | None, ...]]:
        missing = everything - at.covered
        wanted = missing | at.redo
        if plan == "redo first":
            wanted = at.redo or missing
        elif plan == "gap first":
            wanted = missing or at.redo
        choices: list[list[Place | None]] = []
        for shard in range(len(messages)):
            start = min((x for s, x in wanted if s == shard), default=-1)
            choices.append([part if part[0] < part[1] else None for part in runs(wanted, shard, start)])
        for parts in product(*choices):
            if any(parts):
                yield parts

    def single(shard: int, part: Place) -> tuple[Place | None, ...]:
        return tuple(part if s == shard else None for s in range(len(messages)))

    def meets_other(rows: tuple[Row | None, ...], c: Commit) -> bool:
        if order == "value" or detects == "none" or len(messages) == 1:
            return False
        found = {(change_at(place).key, place[0]) for place in places(c)}
        if detects == "upserts":
            found = {(change_at(p).key, p[0]) for p in places(c) if change_at(p).operation == "u"}
        owners = {(key, one.shard) for key, one in enumerate(rows) if one}
        keys_of_shards = found | owners if found else set()
        return any(len({s for k, s in keys_of_shards if k == key}) > 1 for key, _ in found)

    def is_below(at: Version, shard: int, start: int) -> bool:
        return floor == "refused" and any(messages[shard][x].order < at.floor for x in range(start, len(messages[shard])))

    def touched(c: State | Commit | str | None, *, apps: str = "", is_late: bool = False) -> object:
        """A planned commit after something landed."""
        if not isinstance(c, Commit):
            return c
        is_taken = c.is_taken or any(app in c.apps for app in apps)
        return c._replace(is_taken=is_taken, is_late=c.is_late or is_late)

    def landed(st: State, slot: int, end: object) -> Iterator[tuple[str, State]]:
        """What becomes of the write of what is planned there."""
        c = st[slot]
        what = f"{c.kind} {c.apps} {c.parts}"
        if c.is_taken:
            yield f"{what} is skipped: its number is taken", put(st, slot, end)
            return
        unchangeds = [False]
        if unchanged == "landed" and c.kind in ("merge", "replay") and merged(c.base, c)[0] == c.base:
            unchangeds.append(True)
        for is_unchanged in unchangeds:
            at = after(st[0], c._replace(base=()), is_unchanged=is_unchanged)
            seen = st[1] | {at} if st[5] else st[1]
            others = (touched(one, apps=c.apps) for one in st[2:5])
            good = st[7] if at.is_known else st[0]
            following = put((at, seen, *others, *st[5:7], good), slot, end)
            yield f"{what} lands{' without a change' if is_unchanged else ''}", following

    def planned(st: State, slot: int, apps: str, kind: str, parts: tuple[Place | None, ...]) -> tuple[str, State]:
        base = st[0].rows if unchanged == "landed" else ()
        return f"a {kind} {apps} {parts} is planned", put(st, slot, Commit(apps, kind, parts, st[0].floor, base=base))

    def restored(st: State, to: Version, *, left: int) -> State:
        return (to, st[1] if left else frozenset(), *(touched(c, is_late=True) for c in st[2:5]), left, st[6], None)

    def step(st: State) -> Iterator[tuple[str, State]]:
        at, seen, f, p, g, rs, rw, good = st
        if f == "raised":
            return
        if not at.is_known:
            yield "an operator RESTOREs the version before", restored(st, good, left=rs)
        if f is None and at.is_known:
            for parts in plans(at):
                yield planned(st, INGESTION, "A", "merge", parts)
            for shard, to in at.covered if rw else ():
                if not is_below(at, shard, to):
                    yield planned(put(st, 6, rw - 1), INGESTION, "A", "rewind", single(shard, (to, to)))
        elif isinstance(f, Commit):
            if f.kind == "merge" and meets_other(at.rows, f):
                yield f"the merge {f.parts} meets a row of another shard", put(st, INGESTION, "raised")
            else:
                yield from landed(st, INGESTION, None)
            yield "ingestion is refused or killed", put(st, INGESTION, None)
        name = "A" if app == "shared" else "P"
        if p == "wanted" and at.is_known:
            for shard, start in at.covered:
                for part in runs(at.covered, shard, start):
                    is_other = redrive and (shard, *part) != (0, 0, 1)
                    if part[0] < part[1] and not is_other and not is_below(at, shard, start):
                        yield planned(st, REPLAY, name, "redrive" if redrive else "replay", single(shard, part))
            yield "no replay is wanted", put(st, REPLAY, "over")
        elif isinstance(p, Commit):
            if not meets_other(at.rows, p):
                yield from landed(st, REPLAY, "over")
            yield "the replay is dropped", put(st, REPLAY, "over")
        if g == "wanted" and at.is_known:
            if dead := [one.order for one in at.rows if one and one.operation == "d"]:
                plan_of = Commit("AP" if purge == "both" else name, "purge", (), max(dead) + 1)
                before = st
                if purge == "declared":
                    to = at._replace(floor=max(at.floor, plan_of.floor))
                    before = (to, seen | {to} if rs else seen, *(touched(c, apps="A") for c in st[2:5]), *st[5:])
                yield f"a purge {plan_of.apps} below {plan_of.floor} is planned", put(before, PURGE, plan_of)
            yield "no purge is wanted", put(st, PURGE, "over")
        elif isinstance(g, Commit):
            yield from landed(st, PURGE, "over")
            yield "the purge is dropped", put(st, PURGE, "over")
        for to in seen if rs else ():
            yield f"!RESTORE to {[tuple(r) if r else None for r in to.rows]}", restored(st, to, left=rs - 1)

    def expected(key: int, covered: Places) -> Place | None:
        """The place of the change that a row must be of."""
        found = [place for place in covered if change_at(place).key == key]
        if order == "position":
            newest = max(found, key=lambda place: change_at(place).order, default=None)
        else:
            newest = max(found, key=lambda place: (change_at(place).order, place), default=None)
        return None if newest is None or change_at(newest).operation == "d" else newest

    def wrong(st: State) -> str | None:
        at, _, f = st[:3]
        if f == "raised" or at.redo or not at.is_known:
            return None
        read = at.covered - at.dead - ({(0, 0)} if redrive and not at.redriven else set())
        for key, one in enumerate(at.rows):
            homes = {s for s, found in enumerate(messages) for change in found if change.key == key}
            if order == "position":
                # What is missing in between is read later, and what was read behind it then again.
                is_whole = at.covered == everything if len(homes) > 1 else is_prefix(at.covered, homes)
                if not is_whole:
                    continue
            there = None if one is None or one.operation == "d" else (one.shard, one.position)
            if there != expected(key, read):
                return f"covered {sorted(at.covered)}: key {key} has {there}, and must have {expected(key, read)}"
            if there in at.replayed and one and one.transform != 2:
                return f"key {key} was replayed, and has its old row"
        return None

    def is_prefix(covered: Places, homes: Iterable[int]) -> bool:
        return all(
            {x for s, x in covered if s == shard} == set(range(sum(s == shard for s, _ in covered))) for shard in homes
        )

    def is_done(st: State) -> bool:
        at, _, f, p, g = st[:5]
        is_over = f is None and p == "over" and g == "over" and at.is_known
        return f == "raised" or (is_over and at.covered == everything and not at.redo)

    start = Version((None,) * keys)
    waits = ("wanted" if replay else "over", "wanted" if purge else "over")
    first = (start, frozenset([start]), None, *waits, restores, rewinds, None)
    return search(Model(first, step, wrong, is_done))
