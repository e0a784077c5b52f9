"""Where a group continues in a stream of Redis whose server went back to an older state: an accept compares batches.

Producers may send lost messages again, with their ids, after late ones with ids below. The messages of a batch are all
there only if its last message is, and as many messages were added up to there as when it was read. An accept looks at
the stream several times, and the producers do not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.model.search import Model, Result, State, Variant, quick, search


class Server(NamedTuple):
    """A stream: its messages, how many were ever added, the highest deleted one, the highest that was ever added."""

    held: frozenset[int] = frozenset()
    added: int = 0
    deleted: int = 0
    newest: int = 0

    @property
    def first(self) -> int:
        return min(self.held, default=self.newest + 1)

    @property
    def removed(self) -> int:
        return self.added - len(self.held)

    def count(self, start: int, end: int = 1_000_000) -> int:
        return sum(start <= x < end for x in self.held)

    def is_complete_from(self, position: int) -> bool:
        return self.first <= position and self.deleted < position

    def with_one(self, x: int) -> Server:
        return Server(self.held | {x}, self.added + 1, self.deleted, x)

    def without(self, x: int) -> Server:
        return self._replace(held=self.held - {x}, deleted=max(self.deleted, x))

    def trimmed(self) -> Server:
        return self._replace(held=self.held - {self.first})


class Batch(NamedTuple):
    """What the ledger has of a batch: its last message, and the counts after it."""

    last: int
    added: int
    deleted: int
    removed: int

    @property
    def position(self) -> int:
        return self.last + 1


class Accept(NamedTuple):
    """An accept: which look is next, the batches that are the same, and the look before with its count."""

    before: Server
    place: int = 0
    is_counting: bool = False
    same: tuple[int, ...] = ()
    late: int | None = None
    look: tuple[Server, int, int] | None = None


class Begin(NamedTuple):
    """Where the group continues, and how many messages were added before, as far as it accounts for them."""

    position: int
    added: int


def contradicts(batch: Batch, now: Server, held: int) -> bool:
    if now.deleted < batch.deleted >= batch.position:
        return True
    if now.first < batch.position and now.deleted < batch.position:
        return now.added < batch.added
    return now.added - batch.added < held + (now.deleted >= max(batch.position, batch.deleted + 1))


def is_late(batch: Batch, now: Server, held: int) -> bool:
    missing = now.added - batch.added - held
    if now.is_complete_from(batch.position):
        return missing != 0 or contradicts(batch, now, held)
    return missing > max(0, now.removed - batch.removed) or contradicts(batch, now, held)


def model(
    *,
    counts: bool = True,
    counts_last: bool = True,
    compares_each: bool = True,
    keeps: bool = True,
    batches: int = 3,
    size: int = 4,
    late: int = 1,
    removals: int = 0,
) -> Result:
    """Explore it.

    Args:
        counts: a batch is only the same if as many messages were added up to its end as then.
        counts_last: it counts after it has compared.
        compares_each: it compares the batches from the oldest to the first that differs; else it takes the newest one
            that is the same.
        keeps: what was removed since it began does not count as accounted.
        batches: how many are read at most before the server goes back.
        size: how many messages there are, without late ones.
        late: how many late messages, which have odd numbers, may be sent.
        removals: how many messages may be deleted or trimmed.
    """
    ids = range(1, 2 * size + 1)
    # The server; the state that it has saved or None; whether it went back; the batches; the messages that were read
    # before; how many late ones and removals are left; the accept, or where the group continues; which messages were
    # removed unread since the accept began.
    init: State = (Server(), None, False, (), frozenset(), late, removals, None, frozenset())

    def compared(server: Server, known: tuple[Batch, ...], accept: Accept) -> Accept:
        place = accept.place if compares_each else len(known) - 1 - accept.place
        batch = known[place]
        if batch.last in server.held:
            following = accept._replace(place=accept.place + 1, same=(*accept.same, place))
            is_last = not compares_each
        else:
            is_replaced = server.deleted < batch.last and server.first <= batch.last
            following = accept._replace(place=accept.place + 1)
            is_last = is_replaced and compares_each
        if is_last or following.place == len(known):
            return following._replace(place=0 if counts_last else len(known), is_counting=True)
        return following

    def counted(server: Server, known: tuple[Batch, ...], accept: Accept) -> Accept:
        batch = known[accept.place]
        start, look = batch.position, accept.look
        if look is None:
            now, held = server, server.count(start)
        else:
            now, held, counted_from = look
            if server.is_complete_from(counted_from) or server.removed == now.removed:
                held -= server.count(counted_from, start)
            else:
                now, held = server, server.count(start)
        if counts and is_late(batch, now, held):
            return accept._replace(place=len(known), late=start)
        return accept._replace(place=accept.place + 1, look=(now, held, start))

    def begin(server: Server, known: tuple[Batch, ...], accept: Accept) -> Begin:
        ends = [known[place].position for place in accept.same]
        position = max((end for end in ends if accept.late is None or end < accept.late), default=0)
        before = accept.before if keeps else server
        if position == 0:
            return Begin(0, 0)
        added = server.added - server.count(position)
        is_deleted = server.deleted != before.deleted or server.first == before.first
        if server.first > position or (server.deleted >= position and is_deleted):
            added -= max(0, server.removed - before.removed)
        return Begin(position, added)

    def step(st: State) -> Iterator[tuple[str, State]]:
        server, saved, went_back, known, told, late_left, left, accept, untold = st
        for x in ids:
            is_late_one = x % 2 == 1
            if x > server.newest and (went_back and late_left if is_late_one else went_back or x == server.newest + 2):
                rest = late_left - is_late_one
                yield f"{x} is sent", (server.with_one(x), saved, went_back, known, told, rest, left, accept, untold)
        for x in server.held if left else ():
            gone = untold | {x} if accept and x not in told else untold
            yield (
                f"!{x} is deleted",
                (server.without(x), saved, went_back, known, told, late_left, left - 1, accept, gone),
            )
        if server.held and left:
            gone = untold | {server.first} if accept and server.first not in told else untold
            after = (server.trimmed(), saved, went_back, known, told, late_left, left - 1, accept, gone)
            yield f"!{server.first} is trimmed", after
        if not went_back:
            unread = server.held - told
            if unread and len(known) < batches:
                batch = Batch(max(server.held), server.added, server.deleted, server.removed)
                after = (server, saved, went_back, (*known, batch), told | server.held, late_left, left, None, untold)
                yield f"a run reads {sorted(unread)}", after
            if saved is None:
                yield "it saves", (server, server, went_back, known, told, late_left, left, None, untold)
            elif known:
                yield "it goes back", (saved, saved, True, known, told, late_left, left, None, untold)
        elif accept is None:
            begun = Accept(server, is_counting=not counts_last)
            yield "an accept begins", (server, saved, went_back, known, told, late_left, left, begun, untold)
        elif isinstance(accept, Accept):
            if accept.is_counting and accept.place < len(known):
                now, what = counted(server, known, accept), f"it counts from {known[accept.place].position}"
                if now.place == len(known) and not counts_last:
                    now = now._replace(place=0, is_counting=False)
            elif accept.is_counting:
                now, what = begin(server, known, accept), "it is written"
            else:
                now, what = compared(server, known, accept), "it compares a batch"
            yield what, (server, saved, went_back, known, told, late_left, left, now, untold)

    def wrong(st: State) -> str | None:
        server, _, _, known, told, _, left, accept, untold = st
        if not isinstance(accept, Begin):
            return None
        passed = {x for x in server.held - told if x < accept.position}
        lost = {x for x in told if x < accept.position and x not in server.held}
        # Within one batch, as many may be lost as came late, and then its last message may be sent again.
        ends = {batch.last for batch in known if batch.last < accept.position}
        are_ends_lost = any(x not in server.held and x > max(server.deleted, server.first - 1) for x in ends)
        is_known_limit = not are_ends_lost and abs(len(passed) - len(lost)) <= removals - left
        if passed and not is_known_limit:
            return f"{sorted(passed)} came late, and the group continues at {accept.position}"
        behind = {x for x in untold if x >= accept.position}
        if behind and server.added - accept.added <= server.count(accept.position):
            return f"{sorted(behind)} were removed unread, and no run says so"
        return None

    return search(Model(init, step, wrong, lambda st: not st[2] or isinstance(st[7], Begin)))


VARIANTS = (
    quick("counted", "it compares each batch, then counts", "PASS", model),
    Variant("counted-longer", "and more messages come late", "PASS", lambda: model(size=5, late=2)),
    quick("uncounted", "it only compares", "BAD", lambda: model(counts=False)),
    quick("counted-first", "it counts before it compares", "BAD", lambda: model(counts_last=False)),
    quick("newest", "it takes the newest batch whose last message is there", "BAD", lambda: model(compares_each=False)),
    quick("removed", "others remove messages meanwhile", "PASS", lambda: model(size=3, removals=1)),
    Variant("removed-more", "and more of them", "PASS", lambda: model(size=3, removals=2)),
    quick("forgets", "and count as accounted", "BAD", lambda: model(size=3, removals=1, keeps=False)),
)
