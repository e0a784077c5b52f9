"""Keyed tables: one MERGE a batch keeps one row a key, next to RESTORE, rewinds, replays, redrives and purges.

A merge reduces its batch to the newest change of each key and applies that to the row of the key. Order is the position
in the shard, or a value of the message. A deleted row goes, or it stays as a tombstone.

Delta applies a merge to the version that Spark reads for it, which may be any from the plan on, and refuses it where a
commit after that version has touched the same files. So a merge that lands applies to the rows that it finds there. It
may also be refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import permutations, product
from typing import Any, NamedTuple

from spark_jobs.ledger.entries import KeyOrder, LedgerEntry, ShardState
from spark_jobs.ledger.fold import floor_after, fold, is_below_floor, is_of_other_keys, keys_after
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from stream_consumers.batches import Range
from stream_consumers.messages import Shard
from tests.model.search import Model, Result, State, Variant, put, quick, search

INGESTION, REPLAY, PURGE = 2, 3, 4
"""Where a state has what they have planned."""

Place = tuple[int, int]
Places = frozenset[Place]


class Change(NamedTuple):
    """A message.

    Args:
        key: its key.
        operation: ``u`` upserts, ``d`` deletes, ``p`` updates and does not have the large value; ``t`` truncates,
            which deletes all keys, whatever its own is.
        order: the value of the message that orders it, or the time at which it was really made.
        is_broken: the payload in the stream cannot be read. The change is that of the corrected payload.
    """

    key: int
    operation: str
    order: int
    is_broken: bool = False


class Row(NamedTuple):
    """What the table has of a key.

    Args:
        order: of the change that made it.
        shard: of that change.
        position: of that change.
        operation: ``d`` if this is a tombstone.
        transform: the version of the transform that made it.
        large: the place of the change that its large value is of.
    """

    order: int
    shard: int
    position: int
    operation: str
    transform: int
    large: Place | None = None


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
        is_overtaken: whether something has landed since, where it matters.
        gone: how many of the first messages the stream has lost.
        corrected: the broken messages whose corrected payloads it has.
    """

    apps: str
    kind: str
    parts: tuple[Place | None, ...]
    floor: int = 0
    is_taken: bool = False
    is_late: bool = False
    base: tuple[Row | None, ...] = ()
    is_overtaken: bool = False
    gone: int = 0
    corrected: Places = frozenset()


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
        corrected: the broken messages whose corrections are in force, because the batches that recorded them are in the
            table (``dead_letters.py``). The others are dead letters.
        stale: those that a late batch has corrected, although a RESTORE had removed their corrections.
        lacks: whether a run has ended because a change lacks a value that no row has.
    """

    rows: tuple[Row | None, ...]
    covered: Places = frozenset()
    redo: Places = frozenset()
    replayed: Places = frozenset()
    floor: int = 0
    dead: Places = frozenset()
    is_known: bool = True
    corrected: Places = frozenset()
    stale: Places = frozenset()
    lacks: bool = False


Messages = tuple[tuple[Change, ...], ...]


def shards(*texts: str) -> Messages:
    """The messages of each shard.

    ``au3`` upserts key ``a`` with order 3, the position if there is no number. ``aU`` does so once it is corrected.
    """
    return tuple(
        tuple(
            Change(ord(word[0]) - ord("a"), word[1].lower(), int(word[2:] or at), word[1].isupper())
            for at, word in enumerate(text.split())
        )
        for text in texts
    )


def folded(before: Version, c: Commit, *, by_position: bool) -> tuple[Places, Places]:
    """The places that are covered, and those that are to be read again, after a commit, as the ledger computes them."""
    known = before.covered | before.redo
    state = state_of(before.covered, before.redo, shards=len(c.parts))
    ranges = {Shard("a", shard): Range(*part) for shard, part in enumerate(c.parts) if part}
    again = c.kind != "merge" or any((s, x) in known for s, part in enumerate(c.parts) if part for x in range(*part))
    mode = f"{'merge' if by_position else 'upsert'}{' again' if again else ''}"
    until = {}
    if c.kind == "rewind":
        mode, until = "replace", {shard: state[shard].covered.ranges[-1].end for shard in ranges}
    kind = "replay" if c.kind == "replay" else "batch"
    entry = LedgerEntry(kind, "g", "g/main", 1, "main", "b", 0, ranges=ranges, mode=mode, until=until)
    return places_of(fold(state, entry, late=c.is_late))


def state_of(covered: Places, redo: Places, *, shards: int = 1) -> dict[Shard, ShardState]:
    """The state of the ledger with these places."""
    found = {}
    for shard in range(shards):
        first, second = (Intervals.of(*((x, x + 1) for s, x in part if s == shard)) for part in (covered, redo))
        found[Shard("a", shard)] = ShardState(Intervals.of((MIN_SEQUENCE, 0)) | first, second, origin=0)
    return found


def places_of(state: Mapping[Shard, ShardState]) -> tuple[Places, Places]:
    """The places that are covered in a state of the ledger, and those that are to be read again."""
    covered, redo = (
        frozenset(
            (shard.id, x)
            for shard, one in state.items()
            for part in of(one)
            for x in range(max(0, part.start), part.end)
        )
        for of in (lambda one: one.covered, lambda one: one.redo)
    )
    return covered, redo


@cache
def entry_of(kind: str, floor: int) -> LedgerEntry:
    """The entry of a commit, as far as it is about the floor."""
    known, mode = floor or None, "replace" if kind == "rewind" else "upsert"
    if kind == "purge":
        return LedgerEntry(kind, "g", "g/main", 1, "purge", "b", 0, purged_below=known)
    return LedgerEntry("batch", "g", "g/main", 1, "main", "b", 0, mode=mode, floor=known)


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
    corrections: str = "in force",
    app: str = "own",
    purge: str = "",
    floor: str = "insert",
    stops: bool = True,
    unchanged: str = "refused",
    lacking: str = "skipped",
    taken: str = "newer",
    truncates: str = "all",
    trims: str = "",
    truncated: str = "gone",
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
            all from its ``end`` to the highest place that is covered in the shard; or what the ``code`` of the ledger
            says.
        late: the range of a merge that lands behind a RESTORE is read again (``redo``), or it is ``trusted``.
        plan: ingestion reads the ``lowest`` place that is missing or to be read again; or, as for tables that are
            appended to, what is to be read again ``redo first``; or ``gap first``.
        detects: which changes raise if they meet a row of another shard: all ``changes``, ``upserts``, or ``none``.
        replay: ``merge``, equal orders overwrite; ``newer``, they do not; ``refresh``, it only writes rows again that
            its own messages made, and covers nothing; none if empty.
        corrections: that redrives have recorded. ``in force``: merges of covered places, and replays, have the
            corrected payloads; ``merged``: only merges have them; ``replayed``: only replays.
        app: the transaction sequence of a replay, its ``own`` or that of ingestion (``shared``).
        purge: of tombstones, in the transaction sequence of the replay, where a replay has one of its own. ``plain``:
            at once; ``declared``: after an empty commit in the sequence of ingestion that says the floor; ``both``: at
            once, with a number in the sequence of ingestion, too; none if empty.
        floor: what happens below the floor: ``nothing``; ``refused``, a rewind or a replay to a change below is, and a
            purge while something is to be read again; or
            ``insert``, a change below it that meets no row makes none, and an upsert is a dead letter then.
        stops: ingestion stops at a merge that was planned with a lower floor than that where it landed, until an
            operator RESTOREs the version before it.
        unchanged: a merge that would change nothing in the version that it was planned from is ``refused`` like others;
            or it may be ``landed`` without a change.
        lacking: what becomes of a change that is read again, and lacks a value that no row has: it is ``skipped``, or
            it ``ends`` the run, as one does that is read for the first time.
        taken: of the values in the batch, that one is taken which is ``newer`` than the row in the table; or ``always``
            the newest one.
        truncates: a truncate deletes ``all`` rows that are older; or those of the keys of its ``batch``.
        trims: the stream loses its first messages after they were read. Ingestion stops where a message is gone that it
            has not read; where one is gone that it has to read again, too, if ``both`` look for that, it and a redrive,
            which is refused if later messages are gone; or only the ``redrive`` looks, or ``none``. If empty, the
            stream loses nothing.
        truncated: for the large value of a change, a row of before a truncate of the batch is ``gone``, or ``there``.
        restores: how many there may be.
        rewinds: how many there may be.

    Any run may be killed at any time: then it plans again, as after a commit that Delta refused.
    """
    everything = frozenset((shard, at) for shard, found in enumerate(messages) for at in range(len(found)))
    keys = 1 + max(change.key for found in messages for change in found)
    has_large = any(change.operation == "p" for found in messages for change in found)
    broken = frozenset((shard, at) for shard, at in everything if messages[shard][at].is_broken)
    merges: dict[State, Version] = {}
    # The state: the version; those that RESTOREs will go back to; what ingestion, the replay and the purge have
    # planned, or what is to become of them; how many more RESTOREs and rewinds there may be; the version that an
    # operator goes back to; how many messages the stream has lost.

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

    def with_large(new: Row, changes: list[Row], old: Row | None) -> Row | None:
        """The newest change with the large value of the row; ``None`` if there is none."""
        if new.operation != "p":
            return new._replace(large=new[1:3])
        for one in sorted(changes, key=rank, reverse=True):
            if taken == "newer" and old and rank(one) < rank(old):
                break
            if one.operation != "p":
                return new._replace(large=one[1:3]) if one.operation == "u" else None
        return None if old is None or old.operation == "d" else new._replace(large=old.large)

    def is_changed(key: int, c: Commit) -> bool:
        return any(change_at(place).key == key for place in places(c))

    def last_truncate(c: Commit) -> int:
        return max((at for shard, at in places(c) if messages[shard][at].operation == "t"), default=-1)

    def has_values(one: Row | None, c: Commit) -> Row | None:
        """The row from which a change of the batch may take a value."""
        return None if one and truncated == "gone" and one.position < last_truncate(c) else one

    def merged(before: tuple[Row | None, ...], c: Commit) -> tuple[tuple[Row | None, ...], Places]:
        """The rows after a merge, and the places of changes below the floor that meet no row."""
        rows, dropped = list(before), set[Place]()
        last = last_truncate(c)
        for key, one in enumerate(rows):
            if one and one.position < last and (truncates == "all" or is_changed(key, c)):
                rows[key] = None
        for key in range(keys):
            found = [place for place in places(c) if change_at(place).key == key and place[1] > last]
            found = [place for place in found if place not in broken or place in c.corrected]
            if c.kind != "redrive":
                found = [place for place in found if place[1] >= c.gone]
            changes = [row(place, 1 if c.kind == "merge" else 2) for place in sorted(found)]
            old = rows[key]
            if c.kind == "replay" and replay == "refresh":
                rows[key] = next((one._replace(large=old.large) for one in changes if old and one[:3] == old[:3]), old)
                continue
            if not changes:
                continue
            newest = max(reversed(changes) if ties == "last" else changes, key=rank)
            new = with_large(newest, changes, has_values(before[key], c))
            if new is None:
                continue
            result = None if new.operation == "d" and deletes == "row goes" else new
            if old is None:
                if floor == "insert" and new.order < c.floor:
                    dropped.update(place for place in found if new.operation == change_at(place).operation == "u")
                else:
                    rows[key] = result
            elif new[:3] == old[:3]:
                if c.kind != "merge" and replay != "newer":
                    rows[key] = result
            elif rank(new) > rank(old) or (ties == "last" and rank(new) == rank(old)):
                rows[key] = result
        return tuple(rows), frozenset(dropped)

    def is_lacking(before: Version, c: Commit) -> bool:
        """Whether the merge raises because a change lacks a value that no row has."""
        is_again = c.kind != "merge" or bool(places(c) & before.covered)
        if c.kind == "rewind" or (is_again and lacking == "skipped"):
            return False
        for key in {change_at(place).key for place in places(c)}:
            found = [one for one in sorted(places(c)) if change_at(one).key == key and one[1] > last_truncate(c)]
            if not found:
                continue
            changes = [row(place, 1) for place in found]
            old, new = has_values(before.rows[key], c), max(changes, key=rank)
            if (old is None or rank(new) > rank(old)) and with_large(new, changes, old) is None:
                return True
        return False

    def after(before: Version, c: Commit, *, is_unchanged: bool = False) -> Version:
        made = merges.get((before, c, is_unchanged))
        if made is None:
            made = merges[before, c, is_unchanged] = applied(before, c, is_unchanged=is_unchanged)
        return made

    def applied(before: Version, c: Commit, *, is_unchanged: bool) -> Version:
        if c.kind == "purge":
            left = tuple(None if r and r.operation == "d" and r.order < c.floor else r for r in before.rows)
            return before._replace(rows=left, floor=floor_after(before.floor or None, entry_of(c.kind, c.floor)) or 0)
        rows, dropped = merged(before.rows, c)
        if is_lacking(before, c):
            return before._replace(lacks=True)
        if is_unchanged:
            rows = before.rows
        written = places(c)
        stopped = stops and is_below_floor(before.floor or None, entry_of(c.kind, c.floor))
        is_known = before.is_known and not stopped
        if c.kind == "replay" and replay == "refresh":
            return before._replace(rows=rows, replayed=before.replayed | written, is_known=is_known)
        covered = before.covered | written
        again = before.redo - written
        if redo == "code":
            covered, again = folded(before, c, by_position=order == "position")
        elif c.is_late and late == "redo" and redo != "none":
            again |= written
        for shard, part in enumerate(c.parts):
            if part and (redo == "end" or (c.kind == "rewind" and redo != "code")):
                again |= frozenset((shard, at) for at in range(part[1], len(messages[shard]))) & covered
        corrected = before.corrected | (c.corrected if c.kind == "redrive" else frozenset())
        return Version(
            rows,
            covered,
            again,
            before.replayed - written if c.kind == "merge" else before.replayed | written,
            before.floor,
            before.dead - written | dropped,
            is_known,
            corrected,
            (before.stale | c.corrected) - corrected,
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
        return floor == "refused" and any(
            messages[shard][x].order < at.floor for x in range(start, len(messages[shard]))
        )

    def touched(c: State | Commit | str | None, *, apps: str = "", is_late: bool = False) -> object:
        """A planned commit after something landed."""
        if not isinstance(c, Commit):
            return c
        is_taken = c.is_taken or any(app in c.apps for app in apps)
        return c._replace(is_taken=is_taken, is_late=c.is_late or is_late, is_overtaken=has_large)

    def landed(st: State, slot: int, end: object) -> Iterator[tuple[str, State]]:
        """What becomes of the write of what is planned there."""
        c = st[slot]
        what = f"{c.kind} {c.apps} {c.parts}"
        if c.is_taken:
            yield f"{what} is skipped: its number is taken", put(st, slot, end)
            return
        if c.is_overtaken and is_lacking(st[0], c):
            # The run ends, and the next one plans from what is there now.
            return
        unchangeds = [False]
        if unchanged == "landed" and c.kind in ("merge", "replay") and merged(c.base, c)[0] == c.base:
            unchangeds.append(True)
        for is_unchanged in unchangeds:
            at = after(st[0], c._replace(base=()), is_unchanged=is_unchanged)
            others = (touched(one, apps=c.apps) for one in st[2:5])
            good = None if at.is_known else st[7] or st[0]
            following = put((at, st[1], *others, *st[5:7], good, st[8]), slot, end)
            yield f"{what} lands{' without a change' if is_unchanged else ''}", following

    def planned(st: State, slot: int, apps: str, kind: str, parts: tuple[Place | None, ...]) -> tuple[str, State]:
        base = st[0].rows if unchanged == "landed" else ()
        made = Commit(apps, kind, parts, st[0].floor, base=base, gone=st[8])
        if kind == "redrive":
            made = made._replace(corrected=places(made))
        elif corrections == "in force" or (kind, corrections) in (("merge", "merged"), ("replay", "replayed")):
            made = made._replace(corrected=places(made) & st[0].covered & st[0].corrected)
        return f"a {kind} {apps} {parts} is planned", put(st, slot, made)

    def is_gone(st: State, parts: tuple[Place | None, ...]) -> bool:
        """Whether the next run of ingestion ends, because messages are gone that it has to read."""
        lost = {(0, x) for x in range(*(parts[0] or (0, 0))) if x < st[8]}
        return bool(lost) and (trims == "both" or not lost <= st[0].covered)

    def may_redrive(st: State, end: int) -> bool:
        return trims in ("", "none") or not any(x < st[8] for _, x in st[0].covered if x >= end)

    def restored(st: State, to: Version, saved: State) -> State:
        good = None if to.is_known else st[7] or st[0]
        return (to, saved, *(touched(c, is_late=True) for c in st[2:5]), *st[5:7], good, st[8])

    def step(st: State) -> Iterator[tuple[str, State]]:
        at, saved, f, p, g, rs, rw, good, gone = st
        if f == "raised" or at.lacks:
            return
        if trims and (0, gone) in at.covered:
            yield f"the stream loses message {gone}", put(st, 8, gone + 1)
        if not at.is_known:
            yield "an operator RESTOREs the version before", restored(st, good, saved)
        if f is None and at.is_known:
            for parts in plans(at):
                if is_gone(st, parts):
                    yield "messages are gone, and ingestion stops", put(st, INGESTION, "raised")
                else:
                    yield planned(st, INGESTION, "A", "merge", parts)
            for shard, to in at.covered if rw else ():
                if to >= gone and not is_below(at, shard, to):
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
                for part in runs(at.covered, shard, start) if replay else ():
                    if part[0] < part[1] and start >= gone and not is_below(at, shard, start):
                        yield planned(st, REPLAY, name, "replay", single(shard, part))
                for part in runs(at.covered & broken - at.corrected, shard, start):
                    if part[0] < part[1] and may_redrive(st, part[1]):
                        yield planned(st, REPLAY, name, "redrive", single(shard, part))
            yield "no replay is wanted", put(st, REPLAY, "over")
        elif isinstance(p, Commit):
            if not meets_other(at.rows, p):
                yield from landed(st, REPLAY, "wanted" if p.kind == "redrive" else "over")
            yield "the replay is dropped", put(st, REPLAY, "over")
        if g == "wanted" and at.is_known and not (floor == "refused" and at.redo):
            if dead := [one.order for one in at.rows if one and one.operation == "d"]:
                plan_of = Commit("AP" if purge == "both" else name, "purge", (), max(dead) + 1)
                before = st
                if purge == "declared":
                    to = at._replace(floor=max(at.floor, plan_of.floor))
                    before = (to, saved, *(touched(c, apps="A") for c in st[2:5]), *st[5:])
                yield f"a purge {plan_of.apps} below {plan_of.floor} is planned", put(before, PURGE, plan_of)
            yield "no purge is wanted", put(st, PURGE, "over")
        elif isinstance(g, Commit):
            yield from landed(st, PURGE, "over")
            yield "the purge is dropped", put(st, PURGE, "over")
        # Which version a RESTORE goes back to is chosen when the table is at it: fewer states than all that it was.
        if rs and at not in saved:
            yield "here a RESTORE will go back to", put(put(st, 1, saved | {at}), 5, rs - 1)
        for to in saved:
            yield f"!RESTORE to {[tuple(r) if r else None for r in to.rows]}", restored(st, to, saved - {to})

    def expected(key: int, covered: Places) -> Place | None:
        """The place of the change that a row must be of."""
        found = [place for place in covered if change_at(place).key == key or change_at(place).operation == "t"]
        if order == "position":
            newest = max(found, key=lambda place: change_at(place).order, default=None)
        else:
            newest = max(found, key=lambda place: (change_at(place).order, place), default=None)
        return None if newest is None or change_at(newest).operation in "dt" else newest

    def large_of(place: Place) -> Place | None:
        """The place of the change that has the large value of the row of a change; ``None`` if none has it."""
        own = [
            one for one in everything if change_at(one).key == change_at(place).key and change_at(one).operation in "ud"
        ]
        own += [one for one in everything if change_at(one).operation == "t"]
        newest = max((one for one in map(ranked, own) if one <= ranked(place)), default=None)
        return newest[1] if newest and change_at(newest[1]).operation == "u" else None

    def ranked(place: Place) -> tuple[int, Place]:
        return change_at(place).order, place

    def wrong(st: State) -> str | None:
        at, _, f = st[:3]
        if at.lacks:
            if any(change_at(one).operation == "p" and large_of(one) is None for one in everything):
                return None
            return "a change lacks a value, and no row has it"
        if f == "raised" or at.redo or not at.is_known:
            return None
        read = at.covered - at.dead - (broken - at.corrected)
        for key, one in enumerate(at.rows):
            # Its row, or the lack of one, may stay until the message is corrected once more.
            if any(change_at(place).key == key for place in at.stale):
                continue
            homes = {s for s, found in enumerate(messages) for change in found if change.key == key}
            if order == "position":
                # What is missing in between is read later, and what was read behind it then again.
                is_whole = at.covered == everything if len(homes) > 1 else is_prefix(at.covered, homes)
                if not is_whole:
                    continue
            there = None if one is None or one.operation == "d" else (one.shard, one.position)
            if there != expected(key, read):
                return f"covered {sorted(at.covered)}: key {key} has {there}, and must have {expected(key, read)}"
            if there and one and one.large != large_of(there):
                return f"key {key} has the large value of {one.large}, and must have that of {large_of(there)}"
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
        return f == "raised" or at.lacks or (is_over and at.covered == everything and not at.redo)

    start = Version((None,) * keys)
    waits = ("wanted" if replay or broken else "over", "wanted" if purge else "over")
    first: State = (start, frozenset(), None, *waits, restores, rewinds, None, 0)
    return search(Model(first, step, wrong, is_done))


def history(
    operations: str = "uud",
    orders: State = (0, 2, 1),
    *,
    way: str = "derive",
    reads: str = "before",
    app: str = "shared",
    late: str = "redo",
    restores: int = 1,
    replay: bool = True,
) -> Result:
    """Explore a table with a row a change, valid from its order to the next one (SCD type 2); one key, one shard.

    Args:
        operations: of the messages, ``u`` or ``d``.
        orders: of the messages, all different.
        way: ``close``: a change ends the row that has no end, and begins one; ``split``: a change ends the row that is
            valid at its order, and a deletion leaves no row; ``missing``: deletions leave a row without an extent, and
            all ends of the key follow from the orders of its rows, unless the table has the changes already;
            ``derive``: the same, always.
        reads: the rows of the key are read ``before`` the merge, when it is planned; or by the ``merge`` itself.
        app: the transaction sequence of a replay, its ``own`` or that of ingestion (``shared``).
        late: the range of a merge that lands behind a RESTORE is read again (``redo``), or it is ``trusted``; or what
            is read again is what the ``code`` of the ledger says.
        restores: how many there may be.
        replay: whether there may be one.
    """
    # The rows: (order, end, transform). The version: (rows, covered, redo). A plan: (app, range, transform, the rows at
    # its base, whether its number is taken, whether it is late).
    everything = frozenset(range(len(orders)))
    first_version: State = (frozenset(), frozenset(), frozenset())
    keeps_deletes = way in ("missing", "derive")

    def in_shard(places: frozenset[int]) -> Places:
        return frozenset((0, x) for x in places)

    def derived(found: dict[int, int]) -> frozenset[State]:
        known = sorted(found)
        return frozenset((o, end, found[o]) for o, end in zip(known, [*known[1:], None]))

    def classic(rows: frozenset[State], changes: list[int], transform: int) -> frozenset[State]:
        """One after the other, in their order."""
        for x in sorted(changes, key=lambda x: orders[x]):
            at = orders[x]
            known = next((one for one in rows if one[0] == at), None)
            if known:
                rows = rows - {known} | {(at, known[1], transform)}
                continue
            end = None
            for one in rows:
                if one[1] is None if way == "close" else one[0] < at and (one[1] is None or at < one[1]):
                    end = None if way == "close" else one[1]
                    rows = rows - {one} | {(one[0], at, one[2])}
            if operations[x] == "u":
                if way == "split":
                    end = min((one[0] for one in rows if one[0] > at), default=None) if end is None else end
                rows |= {(at, end, transform)}
        return rows

    def merged(rows: frozenset[State], plan: State) -> frozenset[State]:
        _, part, transform, base, _, _ = plan
        if not keeps_deletes:
            return classic(rows, list(range(*part)), transform)
        batch = {orders[x]: transform for x in range(*part)}
        source = base if reads == "before" else rows
        if way == "missing" and transform == 1 and batch.keys() <= {one[0] for one in source}:
            return rows
        result = derived({one[0]: one[2] for one in source} | batch)
        # Of the rows that it has read, it only writes the ends.
        there = {one[0]: one for one in rows}
        kept = {one[0]: one[1] for one in result}
        updated = frozenset((o, kept.get(o, end), batch.get(o, by)) for o, end, by in there.values())
        return updated | frozenset(one for one in result if one[0] in batch and one[0] not in there)

    def step(st: State) -> Iterator[tuple[str, State]]:
        version, saved, plans, rs = st
        rows, covered, redo = version
        for i, plan in enumerate(plans):
            if plan is None and i == 0:
                wanted = redo | (everything - covered)
                start = min(wanted, default=0)
                for end in range(start + 1, len(orders) + 1):
                    if frozenset(range(start, end)) <= wanted:
                        made = ("A", (start, end), 1, rows, False, False)
                        yield f"ingestion plans [{start},{end})", (version, saved, put(plans, i, made), rs)
            elif plan == "wanted":
                yield "no replay is wanted", (version, saved, put(plans, i, "over"), rs)
                for start in covered:
                    for end in range(start + 1, len(orders) + 1):
                        if frozenset(range(start, end)) <= covered:
                            made = ("A" if app == "shared" else "P", (start, end), 2, rows, False, False)
                            yield f"a replay plans [{start},{end})", (version, saved, put(plans, i, made), rs)
            elif isinstance(plan, tuple):
                over = "over" if i else None
                yield f"{plan[:3]} is dropped", (version, saved, put(plans, i, over), rs)
                if plan[4]:
                    continue
                written = frozenset(range(*plan[1]))
                again = redo | written if plan[5] and late == "redo" else redo - written
                if late == "code":
                    kind, before = ("merge", "replay")[i], Version((), in_shard(covered), in_shard(redo))
                    read = folded(before, Commit(plan[0], kind, (plan[1],), is_late=plan[5]), by_position=False)
                    again = frozenset(x for _, x in read[1])
                after = (merged(rows, plan), covered | written, again)
                others = tuple((*p[:4], True, p[5]) if isinstance(p, tuple) and p[0] == plan[0] else p for p in plans)
                yield f"{plan[:3]} lands", (after, saved, put(others, i, over), rs)
        if rs and version not in saved:
            yield "here a RESTORE will go back to", (version, saved | {version}, plans, rs - 1)
        for to in saved:
            others = tuple((*p[:5], True) if isinstance(p, tuple) else p for p in plans)
            yield f"!RESTORE to {sorted(to[1])} covered", (to, saved - {to}, others, rs)

    def wrong(st: State) -> str | None:
        rows, covered, redo = st[0]
        if redo:
            return None
        deleted = {orders[x] for x in covered if operations[x] == "d"}
        visible = {one[:2] for one in rows if one[0] not in deleted}
        known = derived({orders[x]: 0 for x in covered})
        must = {one[:2] for one in known if one[0] not in deleted}
        return None if visible == must else f"covered {sorted(covered)}: {visible}, and must be {must}"

    def is_done(st: State) -> bool:
        return st[2] == (None, "over") and st[0][1] == everything and not st[0][2]

    first: State = (first_version, frozenset(), (None, "wanted" if replay else "over"), restores)
    return search(Model(first, step, wrong, is_done))


def rebuild(
    operations: str = "udu",
    *,
    app: str = "shared",
    carries: str = "copied",
    removes: str = "all",
    was: str = "keyed",
    stops: bool = True,
    late: bool = True,
    restores: int = 1,
    replay: bool = True,
    code: bool = False,
) -> Result:
    """Explore a rebuild: the messages are merged into a staging table, whose rows one commit puts into the table.

    Deleted rows go, and a merge below the highest covered place has all from its end read again.

    Args:
        operations: of the messages, ``u`` or ``d``.
        app: the transaction sequence of the swap and of a replay, that of ingestion (``shared``) or their ``own``; or
            only that of the ``replay`` is its own.
        carries: the position that the swap says: that of the version of the staging table that it has ``copied``; that
            of the ``newest`` one; or that of the ``table`` as it was.
        removes: ``all`` that the table has where it lands, because Delta refuses it if anything landed since it was
            read; or what the table had when it was ``planned``.
        was: the table before: ``keyed``; or each message was ``appended``, and a swap makes it keyed.
        stops: an append that lands in a keyed table, or a merge in one that is not, stops ingestion until an operator
            RESTOREs the version before it.
        late: whether a write that was planned before the swap counts as late behind it, like one before a RESTORE.
        restores: how many there may be.
        replay: whether there may be one, that was planned before the swap.
        code: the ledger decides: by its fold, by its rule of batches for other keys, and with replays of tables that
            are appended to.
    """
    # The version: (whether it is keyed, rows, covered, redo). Rows: the messages that are there of the key, each once
    # or more often. A plan: (app, way, range, taken, late, rows at its base).
    size = len(operations)
    everything = frozenset(range(size))
    start: State = (was == "keyed", (), frozenset(), frozenset())

    def newest(row: tuple[int, ...], at: int) -> tuple[int, ...]:
        if row and at <= max(row):
            return row
        return (at,) if operations[at] == "u" else ()

    def entry_of(plan: State) -> LedgerEntry:
        way, is_swap = plan[1], plan[1] == "swap"
        part = (0, plan[2][-1]) if is_swap else plan[2]
        kind, mode = ("rebuild", "rebuild") if is_swap else ("batch", way)
        keys = None if way in ("append", "replace") else KeyOrder(("id",))
        ranges = {Shard("a"): Range(*part)}
        return LedgerEntry(kind, "g", "g/main", 1, "main", "b", 0, ranges=ranges, mode=mode, keys=keys)

    def swapped(version: State, plan: State) -> State:
        """The version after a swap, nothing after another commit."""
        if plan[1] != "swap":
            return ()
        _, made, position = plan[2]
        left = () if removes == "all" else tuple(x for x in version[1] if x not in plan[5])
        return True, tuple(sorted([*left, *made])), frozenset(range(position)), frozenset()

    def by_code(version: State, plan: State) -> State:
        """The version after a commit, as the ledger computes it."""
        is_keyed, rows, covered, redo = version
        entry = entry_of(plan)
        state = state_of(frozenset((0, x) for x in covered), frozenset((0, x) for x in redo))
        keys = keys_after(KeyOrder(("id",)) if is_keyed else None, entry, is_first=False)
        covered, redo = (frozenset(x for _, x in part) for part in places_of(fold(state, entry, late=plan[4])))
        if plan[1] == "swap":
            rows = plan[2][1]
        elif plan[1] in ("append", "replace"):
            part = range(*plan[2])
            rows = tuple(sorted([*(x for x in rows if plan[1] == "append" or x not in part), *part]))
        else:
            rows = newest(rows, plan[2][1] - 1)
        return keys is not None, rows, covered, redo

    def written(version: State, plan: State) -> State:
        is_keyed, rows, covered, redo = version
        _, way, (s, e), _, is_late, _ = plan
        part = frozenset(range(s, e))
        if way == "append":
            # What is to be read again is replaced, unless a RESTORE came in between.
            rows = tuple(sorted([*(x for x in rows if is_late or x not in part & redo), *part]))
            again = redo | part & covered if is_late else redo - part | part & covered - redo
        else:
            rows = newest(rows, e - 1)
            again = redo | part if is_late else redo - part
            again |= frozenset(range(e, size)) & (covered | part)
        return is_keyed, rows, covered | part, again

    def step(st: State) -> Iterator[tuple[str, State]]:
        version, saved, staged, (f, p, g), rs = st
        is_keyed, rows, covered, redo = version
        if staged[0] < size and g is None:
            for end in range(staged[0] + 1, size + 1):
                more = (end, newest(staged[1], end - 1))
                yield f"the staging table gets up to {end}", (version, saved, more, (f, p, g), rs)
        if f is None:
            wanted = redo or everything - covered if code else redo | (everything - covered)
            s = min(wanted, default=0)
            for e in range(s + 1, size + 1):
                if frozenset(range(s, e)) <= wanted:
                    way = "merge" if is_keyed else "replace" if code and redo else "append"
                    plan = ("A", way, (s, e), False, False, ())
                    yield f"ingestion plans {plan[1]} [{s},{e})", (version, saved, staged, (plan, p, g), rs)
        name = "A" if app == "shared" else "P"
        if p == "wanted":
            yield "no replay is wanted", (version, saved, staged, (f, "over", g), rs)
            for s in covered if is_keyed or code else ():
                for e in range(s + 1, size + 1):
                    if frozenset(range(s, e)) <= covered:
                        way = "replace" if not is_keyed else "merge again" if code else "merge"
                        plan = (name, way, (s, e), False, False, ())
                        yield f"a replay plans [{s},{e})", (version, saved, staged, (f, plan, g), rs)
        if g is None:
            says = (*staged, len(covered)) if carries == "table" else (*staged, staged[0])
            swap = ("S" if app == "own" else "A", "swap", says, False, False, rows)
            yield f"a swap with {staged} is planned", (version, saved, staged, (f, p, swap), rs)
            if carries == "newest" and staged[0] < size:
                swap = ("S" if app == "own" else "A", "swap", (*staged, staged[0] + 1), False, False, rows)
                yield (
                    f"a swap with {staged} is planned, and says {staged[0] + 1}",
                    (version, saved, staged, (f, p, swap), rs),
                )
        for i, plan in enumerate((f, p, g)):
            if not isinstance(plan, tuple):
                continue
            over = None if i == 0 or (i == 2 and plan[3]) else "over"
            yield f"{plan[:3]} is dropped", (version, saved, staged, put((f, p, g), i, None if i != 1 else over), rs)
            if plan[3]:
                continue
            if plan[1] == "swap":
                over = "over"
            after: State = by_code(version, plan) if code else swapped(version, plan) or written(version, plan)
            others = tuple(
                (*q[:3], q[3] or q[0] == plan[0], q[4] or (late and plan[1] == "swap"), q[5])
                if isinstance(q, tuple)
                else q
                for q in (f, p, g)
            )
            is_wrong = plan[1] != "swap" and is_keyed != (plan[1] == "merge")
            if code:
                is_wrong = is_of_other_keys(KeyOrder(("id",)) if is_keyed else None, entry_of(plan))
            if stops and is_wrong:
                others = tuple((*q[:4], True, q[5]) if isinstance(q, tuple) else q for q in others)
                name = f"{plan[:3]} lands, and an operator takes it back"
                yield name, (version, saved, staged, put(others, i, over), rs)
                continue
            yield f"{plan[:3]} lands", (after, saved, staged, put(others, i, over), rs)
        if rs and version not in saved:
            yield "here a RESTORE will go back to", (version, saved | {version}, staged, (f, p, g), rs - 1)
        for to in saved:
            others = tuple((*q[:4], True, q[5]) if isinstance(q, tuple) else q for q in (f, p, g))
            yield f"!RESTORE to {to[1:3]}", (to, saved - {to}, staged, others, rs)

    def wrong(st: State) -> str | None:
        is_keyed, rows, covered, redo = st[0]
        if redo or covered != frozenset(range(len(covered))):
            return None
        if is_keyed:
            end = len(covered)
            must = (end - 1,) if end and operations[end - 1] == "u" else ()
        else:
            must = tuple(sorted(covered))
        return None if rows == must else f"covered {sorted(covered)}: {rows}, and must be {must}"

    def is_done(st: State) -> bool:
        version, (f, p, g) = st[0], st[3]
        return f is None and p == "over" and g in (None, "over") and version[2] == everything and not version[3]

    first: State = (start, frozenset(), (0, ()), (None, "wanted" if replay else "over", None), restores)
    return search(Model(first, step, wrong, is_done))


def joined(results: Iterable[Result]) -> Result:
    """The first that does not pass, or that all pass."""
    states = 0
    for result in results:
        states += result.states
        if result.verdict != "PASS":
            return result
    return Result("PASS", "", [], states)


def one_key(*sizes: int, **options: Any) -> Result:
    """All updates and deletes of one key in one shard."""
    return joined(
        model(shards(" ".join(f"a{operation}" for operation in operations)), **options)
        for size in sizes
        for operations in product("ud", repeat=size)
    )


def redriven(*patterns: str, **options: Any) -> Result:
    """All updates and deletes of one key in one shard, corrected where the pattern has ``X``, in one sequence."""
    values = {"replay": "", "app": "shared", **options}
    return joined(
        model(shards(" ".join(f"a{operation}" for operation in operations)), **values)
        for pattern in patterns
        for operations in product(*("UD" if mark == "X" else "ud" for mark in pattern))
    )


def corrected(*patterns: str, **options: Any) -> Result:
    """Redrives by the code of the ledger, which reads again first, next to a replay."""
    return redriven(*patterns, **{"redo": "code", "plan": "redo first", "replay": "merge", **options})


LARGE = ("au ap", "au au ap", "au ap au", "au ap ap", "au ap ad", "ad au ap")
"""Updates that leave a large value alone, behind one that has it."""


def large_values(*texts: str, **options: Any) -> Result:
    """Updates that leave a large value alone, in one shard."""
    return joined(model(shards(text), **options) for text in texts)


# Two changes in one shard, or in two: in order, the other way round, and equal.
SEQUENCED = tuple(
    shards(*texts)
    for one, other in product("ud", repeat=2)
    for a, b in ((0, 1), (1, 0), (1, 1))
    for texts in ((f"a{one}{a} a{other}{b}",), (f"a{one}{a}", f"a{other}{b}"))
)
LATE = (shards("au0 ad1"), shards("ad1 au0"), shards("ad1", "au0"))
"""A deletion before, behind and beside an older upsert."""
TWO_VALUES = (shards("au1 ap2", "au0"),)
"""Two values, of which the update lacks the newer one."""


def truncated(*texts: str, **options: Any) -> Result:
    """Two keys in one shard, and truncates."""
    return joined(model(shards(one), **{"redo": "code", **options}) for one in texts)


MOVED = ("au at ap", "au bu at ap bu")
TRUNCATED = ("au bu at au", "au at bd", "at au", "au at au at")


def sequenced(messages: Iterable[Messages] = SEQUENCED, **options: Any) -> Result:
    """Order is a value, and deletes stay."""
    values = {"order": "value", "deletes": "tombstone", "redo": "range", **options}
    return joined(model(one, **values) for one in messages)


def two_shards(*texts: str, **options: Any) -> Result:
    """Order is the position; the numbers say in which order the changes were made."""
    return model(shards(*texts), **options)


def histories(*sizes: int, **options: Any) -> Result:
    """All updates and deletes of one key, in all orders."""
    return joined(
        history("".join(operations), orders, **options)
        for size in sizes
        for operations in product("ud", repeat=size)
        for orders in permutations(range(size))
    )


def rebuilds(*sizes: int, **options: Any) -> Result:
    """All updates and deletes of one key."""
    return joined(
        rebuild("".join(operations), **options) for size in sizes for operations in product("ud", repeat=size)
    )


VARIANTS = (
    quick("k1", "deleted rows go, nothing is read again", "BAD", partial(one_key, 2, redo="none")),
    quick("k2", "what a RESTORE made late is read again", "BAD", partial(one_key, 2, redo="range")),
    quick("k3-small", "all from there to the position is read again", "PASS", partial(one_key, 1, 2)),
    Variant("k3", "same, three messages", "PASS", partial(one_key, 3)),
    Variant("k3-restores", "same, two messages, two RESTOREs", "PASS", partial(one_key, 1, 2, restores=2)),
    quick(
        "k3-order",
        "same, what is to be read again before what is missing",
        "PASS",
        partial(one_key, 1, 2, plan="redo first"),
    ),
    quick("k3-code-small", "same, by the code of the ledger", "PASS", partial(one_key, 1, 2, redo="code")),
    Variant("k3-code", "same, three messages", "PASS", partial(one_key, 3, redo="code")),
    Variant(
        "k3-code-restores", "same, two messages, two RESTOREs", "PASS", partial(one_key, 1, 2, restores=2, redo="code")
    ),
    quick(
        "k3-code-order",
        "same, what is to be read again first",
        "PASS",
        partial(one_key, 1, 2, plan="redo first", redo="code"),
    ),
    quick(
        "k3-code-shared", "same, in one transaction sequence", "PASS", partial(one_key, 1, 2, app="shared", redo="code")
    ),
    quick("k3-code-redrive", "same, a redrive of a dead letter", "PASS", partial(redriven, "X", "Xx", redo="code")),
    quick("k3-trusted", "same, a late range itself is not read again", "PASS", partial(one_key, 1, 2, late="trusted")),
    quick("k3-shared", "same, a replay in the sequence of ingestion", "PASS", partial(one_key, 1, 2, app="shared")),
    quick("k3-redrive", "same, a redrive of a dead letter", "PASS", partial(redriven, "X", "Xx")),
    quick("k3-redrive-alone", "a redrive has nothing read again", "BAD", partial(redriven, "Xx", redo="range")),
    quick(
        "k3-trim",
        "the stream loses messages that were read, and a redrive does not look",
        "BAD",
        partial(redriven, "Xx", redo="code", trims="none"),
    ),
    quick(
        "k3-trim-redrive",
        "it does, and ingestion does not",
        "BAD",
        partial(redriven, "Xx", redo="code", trims="redrive"),
    ),
    quick("k3-trim-both", "both do", "PASS", partial(redriven, "X", "Xx", redo="code", trims="both", restores=0)),
    Variant("k3-trim-3", "same, three messages", "PASS", partial(redriven, "Xxx", redo="code", trims="both")),
    quick("k3-trim-replay", "same, a replay", "PASS", partial(one_key, 1, 2, redo="code", trims="both", restores=0)),
    quick(
        "c1",
        "corrections are in force where their messages are merged again, and replayed",
        "PASS",
        partial(corrected, "xX", "XX"),
    ),
    Variant("c1-restores", "same, two RESTOREs", "PASS", partial(corrected, "XX", restores=2, replay="")),
    Variant("c1-3", "same, three messages", "PASS", partial(corrected, "xXX", "XxX", "XXX", replay="", rewinds=0)),
    quick("c2", "not where they are merged again", "BAD", partial(corrected, "XX", corrections="replayed")),
    quick("c3", "not where they are replayed", "BAD", partial(corrected, "xX", corrections="merged")),
    quick("c4", "a redrive has a sequence of its own", "BAD", partial(corrected, "XX", app="own", restores=0)),
    quick(
        "k4",
        "a replay only writes the rows again that its messages made",
        "PASS",
        partial(one_key, 1, 2, replay="refresh"),
    ),
    quick("k5", "a replay does not overwrite equal orders", "BAD", partial(one_key, 1, replay="newer")),
    quick(
        "k6", "Delta does not refuse a merge that would change nothing", "BAD", partial(one_key, 2, unchanged="landed")
    ),
    quick(
        "k6-shared",
        "same, in one transaction sequence",
        "PASS",
        partial(one_key, 1, 2, unchanged="landed", app="shared"),
    ),
    quick("t1", "truncates, all from there to the position is read again", "PASS", partial(truncated, *TRUNCATED)),
    quick("t1-shared", "same, in one transaction sequence", "PASS", partial(truncated, *TRUNCATED, app="shared")),
    quick("t2", "a truncate deletes the keys of its batch only", "BAD", partial(truncated, "au bt", truncates="batch")),
    quick("t3", "truncates, nothing is read again", "BAD", partial(truncated, "au bt", redo="none")),
    quick(
        "t4",
        "two shards, the truncate is read before an older change of the other",
        "BAD",
        partial(two_shards, "au0", "bt1", restores=0, rewinds=0, replay=""),
    ),
    quick(
        "t5",
        "a change after a truncate lacks a value, which a row of before it does not give",
        "PASS",
        partial(truncated, *MOVED, restores=0, rewinds=0, replay=""),
    ),
    quick(
        "t6", "the row gives it", "BAD", partial(truncated, *MOVED, truncated="there", restores=0, rewinds=0, replay="")
    ),
    quick(
        "l1",
        "updates lack a large value; one that is read again, and whose row is gone, makes no row",
        "PASS",
        partial(large_values, *LARGE, redo="code", restores=0),
    ),
    quick(
        "l1-order",
        "same, what is to be read again first, in one transaction sequence",
        "PASS",
        partial(large_values, *LARGE, redo="code", plan="redo first", app="shared", restores=0),
    ),
    quick("l2", "it ends the run", "BAD", partial(large_values, *LARGE, redo="code", lacking="ends", restores=0)),
    quick(
        "l2-late",
        "an update that was planned before a RESTORE takes the value of the row that this one brings back",
        "BAD",
        partial(large_values, *LARGE, redo="code", rewinds=0, replay=""),
    ),
    quick(
        "l3",
        "order is a value, tombstones",
        "PASS",
        partial(sequenced, (shards("au0 ap1"), shards("au0 ap1 ad2")), lacking="ends", restores=0),
    ),
    quick(
        "l4",
        "same, the update is in another shard, and is read before the value that it leaves alone",
        "BAD",
        partial(sequenced, (shards("au0 au1", "ap2"),), restores=0, rewinds=0, replay=""),
    ),
    quick(
        "l5",
        "same, an older value of another shard comes with an update that lacks it",
        "PASS",
        partial(sequenced, TWO_VALUES, lacking="ends", restores=0),
    ),
    quick(
        "l6",
        "same, the newest value of the batch is taken, although that of the row is newer",
        "BAD",
        partial(sequenced, TWO_VALUES, lacking="ends", taken="always", restores=0, replay=""),
    ),
    quick(
        "s1",
        "a key in two shards, nothing raises",
        "BAD",
        partial(two_shards, "au0 ad1", "au2", detects="none", rewinds=0, replay=""),
    ),
    quick(
        "s2",
        "upserts raise, deletes do not",
        "BAD",
        partial(two_shards, "au0", "ad1", detects="upserts", restores=0, rewinds=0, replay=""),
    ),
    quick(
        "s3",
        "all changes raise; the deletion is in another shard than the row, and is read first",
        "BAD",
        partial(two_shards, "au0", "ad1", restores=0, rewinds=0, replay=""),
    ),
    quick(
        "s4",
        "same, a key moves, and is deleted where it was",
        "BAD",
        partial(two_shards, "au0 ad2", "au1", restores=0, rewinds=0, replay=""),
    ),
    quick("s5", "same, both shards have a row", "PASS", partial(two_shards, "au0", "au1")),
    quick("s6", "same, a key moves after it was deleted", "PASS", partial(two_shards, "au0 ad1", "au2", rewinds=0)),
    quick(
        "s7",
        "same, it moves back and forth, beside another key",
        "PASS",
        partial(two_shards, "au0 ad1", "bu0 au2", restores=0, rewinds=0, replay=""),
    ),
    quick(
        "v1",
        "order is a value, equal values by place, tombstones, nothing is read again",
        "PASS",
        partial(sequenced, late="trusted"),
    ),
    quick("v1-late", "same, what a RESTORE made late is read again", "PASS", sequenced),
    quick("v1-code", "same, by the code of the ledger", "PASS", partial(sequenced, redo="code")),
    quick("v2", "of equal values the first stays", "BAD", partial(sequenced, ties="first")),
    quick("v3", "of equal values the last wins", "BAD", partial(sequenced, ties="last")),
    quick("v4", "order is a value, deleted rows go", "BAD", partial(sequenced, deletes="row goes")),
    quick(
        "p1",
        "tombstones are purged",
        "BAD",
        partial(sequenced, LATE, purge="plain", floor="nothing", restores=0, stops=False),
    ),
    quick(
        "p2",
        "and what would read below is refused",
        "BAD",
        partial(sequenced, LATE, purge="plain", floor="refused", restores=0, stops=False),
    ),
    quick(
        "p2-late",
        "same, in one sequence; an older change arrives late",
        "BAD",
        partial(sequenced, LATE[1:], purge="plain", floor="refused", app="shared", restores=0, stops=False),
    ),
    quick(
        "p3",
        "or nothing is inserted below the floor",
        "BAD",
        partial(sequenced, LATE, purge="plain", restores=0, stops=False),
    ),
    quick(
        "p4-small",
        "same, the floor is declared in the sequence of ingestion first, replays have their own",
        "PASS",
        partial(sequenced, LATE, purge="declared", restores=0),
    ),
    quick("p4", "same, with a RESTORE", "BAD", partial(sequenced, LATE, purge="declared", stops=False)),
    quick(
        "p5-small",
        "the purge has a number of both sequences",
        "PASS",
        partial(sequenced, LATE, purge="both", restores=0),
    ),
    Variant("p5", "same, with a RESTORE", "PASS", partial(sequenced, LATE, purge="both", stops=False)),
    Variant(
        "p6",
        "all is in one sequence, with a RESTORE",
        "PASS",
        partial(sequenced, LATE, purge="plain", app="shared", stops=False),
    ),
    Variant(
        "p6-stops",
        "two sequences, ingestion stops at a merge with too low a floor",
        "PASS",
        partial(sequenced, LATE, purge="plain"),
    ),
    Variant(
        "p7",
        "same, two RESTOREs",
        "BAD",
        partial(sequenced, LATE, purge="plain", app="shared", stops=False, restores=2, rewinds=0),
    ),
    Variant(
        "p8",
        "same, ingestion stops at a merge with too low a floor",
        "PASS",
        partial(sequenced, LATE, purge="plain", app="shared", restores=2, rewinds=0),
    ),
    quick(
        "h1",
        "SCD 2: a change ends the row without an end; orders out of order",
        "BAD",
        partial(histories, 2, way="close", restores=0),
    ),
    quick(
        "h1-order", "same, in order", "PASS", partial(history, "uud", (0, 1, 2), way="close", restores=0, replay=False)
    ),
    quick(
        "h2",
        "a change splits the row at its order, deletions leave none",
        "BAD",
        partial(histories, 2, way="split", restores=0),
    ),
    quick(
        "h3",
        "all ends follow from the orders, but for changes that are there",
        "BAD",
        partial(histories, 2, way="missing"),
    ),
    quick("h4-small", "same, always", "PASS", partial(histories, 1, 2)),
    Variant("h4", "same, three messages", "PASS", partial(histories, 3)),
    quick("h5", "a late range is not read again", "BAD", partial(histories, 2, late="trusted")),
    quick("h6", "a replay has a sequence of its own", "BAD", partial(histories, 2, app="own", restores=0)),
    quick(
        "h7",
        "same, the merge itself reads the rows of the key",
        "PASS",
        partial(histories, 1, 2, app="own", reads="merge"),
    ),
    quick(
        "h7-code-small",
        "same, by the code of the ledger",
        "PASS",
        partial(histories, 1, 2, app="own", reads="merge", late="code", restores=2),
    ),
    Variant("h7-code", "same, three messages", "PASS", partial(histories, 3, app="own", reads="merge", late="code")),
    quick(
        "h8",
        "the rows of the key are read before the merge, in one sequence, by the code of the ledger",
        "BAD",
        partial(histories, 1, 2, late="code"),
    ),
    quick(
        "r1-small",
        "a rebuild: the swap carries the position of its rows, in one sequence",
        "PASS",
        partial(rebuilds, 1, 2),
    ),
    Variant("r1", "same, three messages", "PASS", partial(rebuilds, 3)),
    quick("r2", "it says the position of the table", "BAD", partial(rebuilds, 1, 2, carries="table")),
    quick("r3", "it says a newer position of the staging table", "BAD", partial(rebuilds, 1, 2, carries="newest")),
    quick("r4", "rows that landed since it was planned stay", "BAD", partial(rebuilds, 1, 2, removes="planned")),
    quick("r5", "the table was appended to", "PASS", partial(rebuilds, 1, 2, was="appended")),
    quick("r5-late", "same, nothing stops at a late merge", "BAD", partial(rebuilds, 2, was="appended", stops=False)),
    quick(
        "r6",
        "same, the swap has a sequence of its own, no RESTORE",
        "BAD",
        partial(rebuilds, 1, 2, was="appended", app="own", stops=False, restores=0, replay=False),
    ),
    quick("r7", "a keyed table, the swap has a sequence of its own", "PASS", partial(rebuilds, 1, 2, app="own")),
    quick(
        "r8-code",
        "by the code of the ledger, only a replay has a sequence of its own",
        "PASS",
        partial(rebuilds, 1, 2, app="replay", late=False, code=True),
    ),
    Variant("r8-code-3", "same, three messages", "PASS", partial(rebuilds, 3, app="replay", late=False, code=True)),
    quick(
        "r9-code",
        "same, the table was appended to",
        "PASS",
        partial(rebuilds, 1, 2, was="appended", app="replay", late=False, code=True),
    ),
    quick(
        "r9-code-late",
        "same, the ledger stops at no batch for other keys",
        "BAD",
        partial(rebuilds, 1, 2, was="appended", app="replay", late=False, code=True, stops=False),
    ),
    quick(
        "r10-code",
        "same, the swap has a sequence of its own, too: the ledger stops at a batch that was in flight",
        "PASS",
        partial(rebuilds, 1, 2, was="appended", app="own", late=False, code=True),
    ),
)
