"""A stream that loses its newest messages and grows again, while runs read it and the table is restored.

The stream is the same by its identity, but other messages have the sequences of lost ones. A run plans from one
snapshot, reads the last message of its range, asks whether the last message of the ledger is still the same, reads, and
writes. If it is another one, the run finds where stream and table differ, and begins the next epoch there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from tests.model.search import Model, Result, State, Variant, put, quick, search

MESSAGES = 3
_ALL = frozenset(range(MESSAGES))


class Known(NamedTuple):
    """The fold: the newest epoch, and per epoch what is covered, the last message, and where it ended.

    A message is its sequence, and how often the stream was cut before it was written.
    """

    epoch: int
    covered: dict[int, frozenset[int]]
    last: dict[int, tuple[int, int] | None]
    ended: dict[int, int]

    @property
    def is_gone(self) -> bool:
        """Whether a RESTORE removed rows of an epoch that is over: the next run stops with an error."""
        return any(not frozenset(range(end)) <= self.covered[k] for k, end in self.ended.items())


def numbers(log: State) -> int:
    return max((c[0] for c in log), default=0)


def fold(log: State) -> Known:
    at = [Known(1, {1: frozenset()}, {1: None}, {})]
    origins = {1: 0}
    for c in log:
        epoch, covered, last, ended = at[-1].epoch, dict(at[-1].covered), dict(at[-1].last), dict(at[-1].ended)
        if c[1] == "R":
            past = at[c[2]]
            covered = {k: past.covered.get(k, frozenset()) | frozenset(range(origins[k])) for k in covered}
            last = {k: past.last.get(k) for k in covered}
        elif c[1] == "x":
            # As it was at the plan: a RESTORE in between is one that removed rows of an epoch that is over.
            ended[epoch] = c[5]
            epoch, origins[c[2]] = c[2], c[3]
            covered[epoch], last[epoch] = frozenset(range(c[3])), c[4]
        else:
            covered[c[2]] = covered[c[2]] | frozenset(range(c[3], c[4]))
            last[c[2]] = max(filter(None, (last[c[2]], c[6])), default=None)
        at.append(Known(epoch, covered, last, ended))
    return at[-1]


def rows(log: State) -> State:
    """What is in the table: (epoch, sequence, the cut before which the message was written)."""
    at: list[State] = [()]
    for c in log:
        table = at[-1]
        if c[1] == "R":
            table = at[c[2]]
        elif c[1] == "b":
            table = tuple(sorted(table + tuple((c[2], c[3] + place, one) for place, one in enumerate(c[5]))))
        at.append(table)
    return at[-1]


def divergence(log: State, epoch: int, stream: State) -> int:
    """Behind the newest remembered message that is the same, and behind the rows that are the same, if one differs."""
    known = fold(log)
    remembered = [
        last for c in log if c[1] in "bx" and c[2] == epoch for last in [c[4] if c[1] == "x" else c[6]] if last
    ]
    start = max((sequence + 1 for sequence, one in remembered if stream[sequence] == one), default=0)
    held = {sequence: one for k, sequence, one in rows(log) if k == epoch}
    place = start
    while place in known.covered[epoch] and held.get(place) == stream[place]:
        place += 1
        if place == MESSAGES:
            return start
    return place if place in held else start


def model(
    *,
    cuts: int = 1,
    runs: int = 2,
    restores: int = 0,
    crashes: int = 1,
    checks: bool = True,
    checks_first: bool = False,
    reads_first: bool = False,
    carries: bool = True,
    clamps: bool = True,
) -> Result:
    """Explore it.

    Args:
        cuts: how often the stream may lose messages; it has as many again at once.
        runs: at the same time.
        restores: how many there may be.
        crashes: how many there may be.
        checks: a plan asks for the last message.
        checks_first: the last message of the range is read after the check.
        reads_first: the last message of the range is read after the range.
        carries: a new epoch has the message before its origin as its last message.
        clamps: a new epoch begins at the position at the latest.
    """
    # The log: (number, "b", epoch, start, end, messages, last), (0, "R", version), and
    # (number, "x", epoch, origin, last, end of the epoch before it).
    init: State = ((), (0,) * MESSAGES, (("i",),) * runs, cuts, restores, crashes)

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, stream, processes, left, rs, cr = st
        known = fold(log)
        for i, p in enumerate(processes):

            def to(p: State, log: State = log, cr: int = cr, i: int = i) -> State:
                return log, stream, put(processes, i, p), left, rs, cr

            if p[0] == "i":
                yield from plans(i, known, log, to)
            elif p[0] == "d":
                _, n, k, position = p
                # Where it differs, and the message before that, are taken from one look at the stream.
                origin = min(position, divergence(log, k, stream)) if clamps else divergence(log, k, stream)
                last = (origin - 1, stream[origin - 1]) if origin and carries else None
                yield f"run{i} finds that they differ from {origin} on", to(("x", n, k + 1, origin, last, position))
            elif p[0] == "x":
                after = (*log, (p[1], "x", *p[2:])) if numbers(log) < p[1] else log
                yield f"run{i} accepts epoch {p[2]} from {p[3]}", to(("i",), log=after)
            elif p[0] == "w":
                _, n, k, s, e, messages, last = p
                after = (*log, (n, "b", k, s, e, messages, last)) if numbers(log) < n else log
                yield f"run{i} writes {n}: epoch {k} [{s},{e}) {messages}", to(("i",), log=after)
            else:
                yield from works(i, p, stream, to)
            if cr and p[0] != "i":
                yield f"!run{i} crashes", to(("i",), cr=cr - 1)
        for place in range(MESSAGES) if left else ():
            cut = (*stream[:place], *(cuts - left + 1 for _ in range(place, MESSAGES)))
            yield f"!the stream is cut at {place}", (log, cut, processes, left - 1, rs, cr)
        for v in range(len(log)) if rs else ():
            yield f"!RESTORE to version {v}", ((*log, (0, "R", v)), stream, processes, left, rs - 1, cr)

    def plans(i: int, known: Known, log: State, to: object) -> Iterator[tuple[str, State]]:
        assert callable(to)
        missing = sorted(_ALL - known.covered[known.epoch])
        start = missing[0] if missing else MESSAGES
        n, last = numbers(log) + 1, known.last[known.epoch]
        if not missing:
            # A run that finds nothing to read checks all the same.
            yield f"run{i} looks at the end", to(("c", n, known.epoch, start, start, None, last, None))
        for end in range(start + 1, MESSAGES + 1):
            if frozenset(range(start, end)) <= frozenset(missing):
                first = "c" if checks_first or reads_first else "a"
                yield f"run{i} plans [{start},{end})", to((first, n, known.epoch, start, end, None, last, None))

    def works(i: int, p: State, stream: State, to: object) -> Iterator[tuple[str, State]]:
        """The steps between plan and write: a, the last message of the range; c, the check; r, the read."""
        assert callable(to)
        what, n, k, s, e, own, last, messages = p
        if what == "a":
            own = (e - 1, stream[e - 1])
            following = "r" if checks_first else "c"
            if messages is not None:
                yield f"run{i} reads the last message {own}", to(("w", n, k, s, e, messages, own))
            else:
                yield f"run{i} reads the last message {own}", to((following, n, k, s, e, own, last, None))
        elif what == "c" and checks and last is not None and stream[last[0]] != last[1]:
            yield f"run{i} finds another message at {last[0]}", to(("d", n, k, s))
        elif what == "c" and s == e:
            yield f"run{i} has nothing to do", to(("i",))
        elif what == "c":
            following = "a" if checks_first else "r"
            yield f"run{i} finds the same message", to((following, n, k, s, e, own, last, None))
        elif reads_first:
            yield f"run{i} reads", to(("a", n, k, s, e, own, last, stream[s:e]))
        else:
            yield f"run{i} reads", to(("w", n, k, s, e, stream[s:e], own))

    def is_settled(st: State) -> bool:
        log, stream, processes, *_ = st
        known = fold(log)
        last = known.last[known.epoch]
        is_same = last is None or not checks or stream[last[0]] == last[1]
        return all(p == ("i",) for p in processes) and known.covered[known.epoch] == _ALL and is_same

    def wrong(st: State) -> str | None:
        log, stream, *_ = st
        table = rows(log)
        if len({(k, sequence) for k, sequence, _ in table}) < len(table):
            return "two rows of one epoch and sequence"
        there = {(sequence, one) for _, sequence, one in table}
        if is_settled(st) and not fold(log).is_gone and not set(enumerate(stream)) <= there:
            return "a message is lost in silence"
        return None

    return search(Model(init, step, wrong, is_settled))


VARIANTS = [
    quick("cut", "the stream is cut once", "PASS", partial(model, runs=1)),
    Variant("two-runs", "two runs at the same time", "PASS", model),
    Variant("cut-twice", "the stream is cut twice", "PASS", partial(model, runs=1, cuts=2)),
    Variant("cut-restore", "a RESTORE as well", "PASS", partial(model, runs=1, restores=1)),
    Variant(
        "behind-a-hole",
        "an epoch begins behind what a RESTORE under a batch has left out",
        "BAD",
        partial(model, runs=1, restores=1, clamps=False),
    ),
    quick("not-checked", "no plan asks", "BAD", partial(model, runs=1, checks=False)),
    quick("checked-first", "a range's last message is read late", "BAD", partial(model, checks_first=True)),
    quick("read-first", "it is read after the range", "BAD", partial(model, reads_first=True)),
    quick("not-carried", "an epoch begins without one", "BAD", partial(model, runs=1, cuts=2, carries=False)),
]
