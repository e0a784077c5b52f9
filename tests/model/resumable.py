"""Mode resumable: several runs of one member race in one transaction sequence.

The broker takes any position from anybody (an offset commit without a member, XGROUP SETID), for Kafka as for Redis, so
one model serves both, and files without the broker.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.search import Model, Result, State, Variant, put, quick, search

MESSAGES = 3


def model(
    *,
    verify: bool = True,
    split_read: str = "",
    retry_new_number: bool = False,
    number_at_write: bool = False,
    crashes: int = 2,
    mono: bool = False,
    runs: int = 2,
    copied: int = 0,
    copy: str = "",
) -> Result:
    """Explore it.

    Args:
        verify: after the write, look whether the commit is one's own.
        split_read: which of the two, number and position, is read first, if not both from one snapshot.
        retry_new_number: a write that was too late is done again under the next number.
        number_at_write: the number is asked for when the write begins.
        crashes: how many there may be.
        mono: the broker is asked before it is told, so that its position never goes back.
        runs: of the member.
        copied: the table is a copy: it has the rows of so many messages, and no ledger.
        copy: what becomes of it: ``ingest`` as if it were new, ``refuse``, or ``adopt`` the rows.
    """
    # A run: ('i', k) idle, ('r', k, x) half a plan, ('p', k, N, s, e) planned, ('v', …) to verify, ('c', k, e) to
    # commit; k numbers its batches and stands for the batch id. The log: (N, (run, k), s, e).
    init = ((), 0, tuple(("i", 0) for _ in range(runs)), crashes)

    def last(log: State) -> int:
        return log[-1][0] if log else 0

    def pos(log: State) -> int:
        return log[-1][3] if log else 0

    def step(st: State) -> Iterator[tuple[str, State]]:
        log, broker, procs, cr = st
        for i, p in enumerate(procs):

            def to(q: State, log: State = log, broker: int = broker, i: int = i) -> State:
                return log, broker, put(procs, i, q), cr

            k = p[1]
            if p[0] == "i" and copied and not log and copy != "ingest":
                if copy == "adopt":
                    yield f"run{i} adopts [0,{copied})", to(("p", k, 1, copied, copied))
            elif p[0] == "i":
                if pos(log) < MESSAGES:
                    if not split_read:
                        for e in range(pos(log) + 1, MESSAGES + 1):
                            yield (
                                f"run{i} plans batch {last(log) + 1} [{pos(log)},{e})",
                                to(("p", k, last(log) + 1, pos(log), e)),
                            )
                    else:
                        x = pos(log) if split_read == "position first" else last(log) + 1
                        yield (
                            f"run{i} reads {'position' if split_read == 'position first' else 'number'} {x}",
                            to(("r", k, x)),
                        )
                if broker != pos(log):
                    yield f"run{i} reconciles: will commit {pos(log)}", to(("c", k, pos(log)))
            elif p[0] == "r":
                s, n = (p[2], last(log) + 1) if split_read == "position first" else (pos(log), p[2])
                if s >= MESSAGES:
                    yield f"run{i} nothing to do", to(("i", k))
                for e in range(s + 1, MESSAGES + 1):
                    yield f"run{i} plans batch {n} [{s},{e})", to(("p", k, n, s, e))
            elif p[0] == "p":
                _, k, n, s, e = p
                if number_at_write:
                    n = last(log) + 1
                if last(log) < n:
                    yield f"run{i} writes batch {n} [{s},{e})", to(("v", k, n, s, e), (*log, (n, (i, k), s, e)))
                elif retry_new_number:
                    yield (
                        f"run{i} conflict, retries the same rows as batch {last(log) + 1}",
                        to(("p", k, last(log) + 1, s, e)),
                    )
                else:
                    yield f"run{i} batch {n} skipped by Delta", to(("v", k, n, s, e))
            elif p[0] == "v":
                _, k, n, s, e = p
                if not verify or any(c[:2] == (n, (i, k)) for c in log):
                    yield f"run{i} takes batch {n} for written", to(("c", k + 1, e))
                else:
                    yield f"run{i} batch {n} is another's: drops it", to(("i", k + 1))
            elif p[0] == "c":
                if mono and p[2] <= broker:
                    yield f"run{i} broker already at {broker}", to(("i", k))
                else:
                    yield f"run{i} commits {p[2]} to the broker", to(("i", k), broker=p[2])
            if cr and p[0] != "i":
                yield f"!run{i} crashes", (log, broker, put(procs, i, ("i", k + 1)), cr - 1)

    def bad(st: State) -> str | None:
        log, broker, _, _ = st
        at = copied
        for _n, _, s, e in log:
            if s != at:
                return "message written twice" if s < at else "message lost"
            at = e
        return "broker ahead of the ledger" if broker > at else None

    def done(st: State) -> bool:
        return pos(st[0]) == MESSAGES == st[1] and all(p[0] == "i" for p in st[2])

    return search(Model(init, step, bad, done))


VARIANTS = (
    Variant("a0", "protocol as designed, plan from one snapshot, verify by (app id, number)", "PASS", model),
    quick("a0-small", "same, one crash", "PASS", lambda: model(crashes=1)),
    Variant("a0'", "same, three runs", "PASS", lambda: model(runs=3, crashes=1)),
    quick("a1", "no verify after the write", "BAD", lambda: model(verify=False)),
    quick("a2", "position read before the number (two snapshots)", "BAD", lambda: model(split_read="position first")),
    Variant("a2'", "number read before the position (two snapshots)", "PASS", lambda: model(split_read="number first")),
    quick(
        "a3",
        "retry of a conflicting write under a new number without re-planning",
        "BAD",
        lambda: model(retry_new_number=True),
    ),
    quick(
        "a4", "number computed when the write starts, range planned earlier", "BAD", lambda: model(number_at_write=True)
    ),
    Variant("a5", "non-atomic 'never backwards' guard at the broker", "PASS", lambda: model(mono=True)),
    quick("copy1", "a copy is ingested as if it were new", "BAD", lambda: model(copied=1, copy="ingest")),
    quick("copy2", "a copy is refused", "STUCK", lambda: model(copied=1, copy="refuse")),
    quick(
        "copy3",
        "its rows are adopted, under a number that is asked for when the write begins",
        "BAD",
        lambda: model(copied=1, copy="adopt", number_at_write=True),
    ),
    quick("copy4", "its rows are adopted", "PASS", lambda: model(copied=1, copy="adopt", crashes=1)),
)
