"""Ledger.read(), from the newest state that an entry carries, against a naive fold of the whole log."""

import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_jobs.ledger.entries import LedgerEntry, ShardState, Totals
from spark_jobs.ledger.fold import fold, restore, totals_after
from spark_jobs.ledger.intervals import MIN_SEQUENCE, Intervals
from spark_jobs.ledger.ledger import Ledger
from stream_consumers.batches import LastMessage, Range
from stream_consumers.errors import LedgerTruncatedError, RestoreTargetError
from stream_consumers.messages import Shard
from tests.support.profiles import examples
from tests.support.written_log import WrittenLog, made_entry

SHARDS = (Shard("s", 0), Shard("s", 1))
MEMBERS = ("a", "b")
TOP = 12
BELOW = -1
"""Stands in the sets for everything below 0: covered as soon as there is an origin."""


@dataclass
class Seen:
    """What the reference knows of a shard: sets of numbers from BELOW to TOP."""

    covered: frozenset = frozenset()
    redo: frozenset = frozenset()
    origin: int | None = None
    adopted: int | None = None


@dataclass
class Reference:
    """Folds the log from version 0, a list of (what, details) a version."""

    commits: list = field(default_factory=list)

    def fold(self, version):
        states = [self._start()]
        for number, (what, details) in enumerate(self.commits[: version + 1]):
            now = {shard: Seen(s.covered, s.redo, s.origin, s.adopted) for shard, s in states[-1].items()}
            if what == "restore":
                past = states[details + 1]
                for shard, seen in now.items():
                    if past[shard].adopted is not None:
                        seen.origin, seen.adopted = past[shard].origin, past[shard].adopted
                    elif seen.adopted is not None:
                        seen.origin = seen.adopted
                    begun = frozenset() if seen.origin is None else frozenset(range(BELOW, seen.origin))
                    seen.covered, seen.redo = past[shard].covered | begun, past[shard].redo
            elif what == "ours":
                between = [one for kind, one in self.commits[details.base + 1 : number] if kind == "ours"]
                redriven = [one.places for one in between if one.kind == "replay"]
                self._apply(now, details, self._is_late(details.base, number), redriven)
            states.append(now)
        return states[-1]

    def surviving(self, version):
        """The entries whose rows are in the table, oldest first."""
        found = []
        while version >= 0:
            what, details = self.commits[version]
            found += [details] if what == "ours" else []
            version = details if what == "restore" else version - 1
        return found[::-1]

    def totals(self, version):
        found = Totals()
        for entry in self.surviving(version):
            found = totals_after(found, entry)
        return found

    def _start(self):
        return {shard: Seen() for shard in SHARDS}

    def _is_late(self, base, number):
        return any(what == "restore" for what, _ in self.commits[base + 1 : number])

    def _apply(self, now, entry, late, redriven):
        for shard, origin in entry.origin.items():
            if now[shard].origin is None or shard in entry.adopted:
                start = entry.adopted[shard] if late and shard in entry.adopted else origin
                now[shard].origin, now[shard].adopted = start, entry.adopted.get(shard)
                now[shard].covered |= frozenset(range(BELOW, start))
        if entry.kind == "replay" and entry.mode == "append":
            return
        parts = {shard: frozenset(range(*part)) for shard, part in entry.ranges.items()}
        parts |= {shard: frozenset(n for own in places for n in range(*own)) for shard, places in entry.places.items()}
        for shard, part in parts.items():
            seen = now[shard]
            if entry.mode == "append" or late:
                seen.redo |= part & seen.covered
                is_adopt_undone = seen.adopted is not None and seen.adopted == seen.origin
                seen.redo |= part if late and (is_adopt_undone or entry.mode == "replace") else frozenset()
            elif entry.mode == "replace":
                seen.redo -= part
                overtaken = {n for places in redriven for own in places.get(shard, ()) for n in range(*own)}
                seen.redo |= part & overtaken
            seen.covered |= part
            if shard in entry.until:
                seen.redo |= frozenset(range(entry.ranges[shard].end, entry.until[shard])) & seen.covered


def as_intervals(numbers):
    return Intervals.of(*((MIN_SEQUENCE if n == BELOW else n, n + 1) for n in numbers))


def as_state(seen):
    return {
        shard: ShardState(as_intervals(s.covered), as_intervals(s.redo), s.origin, adopted=s.adopted)
        for shard, s in seen.items()
        if s != Seen()
    }


def known(state):
    return {shard: s for shard, s in state.items() if s != ShardState()}


@st.composite
def logs(draw):
    """Kinds and details of the commits of a log that our protocol may come to see."""
    reference, numbers = Reference(), dict.fromkeys(MEMBERS, 0)
    pick = lambda *of: draw(st.sampled_from(of))  # noqa: E731
    for version in range(draw(st.integers(1, 22))):
        kinds = ["ours"] * 6 + ["foreign"] * 2 + (["restore"] * 2 if version else [])
        what = pick(*kinds)
        if what == "restore":
            reference.commits.append((what, draw(st.integers(0, version - 1))))
        elif what == "foreign":
            reference.commits.append((what, pick("OPTIMIZE", "DELETE", "other group", "no json", "other json")))
        else:
            base = version - 1 - pick(0, 0, 1, 2, 3)
            entry = draw(entries(version, max(base, -1), numbers, reference))
            reference.commits.append((what, entry))
    return reference


@st.composite
def entries(draw, version, base, numbers, reference):
    pick = lambda *of: draw(st.sampled_from(of))  # noqa: E731
    kind = pick("init", "batch", "batch", "batch", "replay", "dismiss", "fence", "keep")
    member = pick(*MEMBERS)
    numbers[member] += 1
    ranges, places, until, origin, adopted = {}, {}, {}, {}, {}
    is_redrive = kind == "dismiss" or (kind == "replay" and pick(True, False))
    mode = pick("append", "append", "replace") if kind in ("batch", "replay") else "append"
    mode = "dismiss" if kind == "dismiss" else "replace" if is_redrive else mode
    for shard in draw(st.sets(st.sampled_from(SHARDS), min_size=1)):
        if is_redrive:
            places[shard] = as_intervals(draw(st.sets(st.integers(0, TOP - 1), min_size=1)))
        elif kind in ("batch", "replay"):
            start = draw(st.integers(0, TOP - 1))
            ranges[shard] = Range(start, draw(st.integers(start + 1, TOP)))
            if mode == "replace" and kind == "batch" and pick(True, False):
                until[shard] = draw(st.integers(ranges[shard].end, TOP))
        if kind in ("init", "batch") and pick(True, False):
            origin[shard] = draw(st.integers(0, 4))
            if kind == "init" and origin[shard] and pick(True, False):
                adopted[shard] = draw(st.integers(0, origin[shard] - 1))
    is_full = pick(True, False) or not any(what == "ours" for what, _ in reference.commits)
    return made_entry(
        numbers[member],
        base,
        member=member,
        kind=kind,
        bid=f"bid{version}",
        ranges=ranges,
        places=places,
        mode=mode,
        until=until,
        origin=origin,
        adopted=adopted,
        messages=TOP,
        dead=draw(st.integers(0, 3)),
        lost={shard: Intervals.of(part) for shard, part in ranges.items()} if pick(True, False, False) else {},
        replay=pick("", "one", "two") if kind == "replay" and not is_redrive else "",
        goal=dict.fromkeys(SHARDS, Range(2, 5)) if kind == "replay" and not is_redrive else {},
        state=as_state(reference.fold(base)) if is_full else None,
        totals=reference.totals(base) if is_full else Totals(),
    )


def write(log, reference):
    for version, (what, details) in enumerate(reference.commits):
        if what == "restore":
            log.restore(**({"version": details} if version % 2 else {"version": str(details), "timestamp": None}))
        elif what == "ours":
            log.ours(details)
        elif details == "other group":
            log.ours(made_entry(version + 1, version - 1, group="gg", member="a", ranges={SHARDS[0]: Range(0, TOP)}))
        elif details == "no json":
            log.commit(metadata="{not json")
        elif details == "other json":
            log.commit(metadata='{"v":1,"kind":"batch"}', transactions={"gg": 7})
        else:
            log.commit(details, parameters={"predicate": "[]"})


def in_folder(check):
    folder = Path(tempfile.mkdtemp())
    try:
        check(WrittenLog(folder / "t"))
    finally:
        shutil.rmtree(folder)


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(logs(), st.sampled_from(MEMBERS))
def test_reading_from_the_newest_full_entry_is_the_fold_of_the_whole_log(reference, member):
    def check(log):
        write(log, reference)
        ledger = Ledger(log.log(), group="g", member=member)
        found = ledger.read()
        ours = [d for what, d in reference.commits if what == "ours"]
        assert known(found.shards) == as_state(reference.fold(len(reference.commits) - 1))
        assert found.version == len(reference.commits) - 1
        assert found.totals == reference.totals(len(reference.commits) - 1)
        assert found.newest == (ours[-1] if ours else None)
        assert found.last_number == max((d.number for d in ours if d.by == member), default=0)

    in_folder(check)


@settings(deadline=None, max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow])
@given(logs(), st.data())
def test_a_cleaned_log_gives_the_same_answer_or_none(reference, data):
    ours = [d for what, d in reference.commits if what == "ours"]

    def check(log):
        write(log, reference)
        member = ours[-1].by if ours else "a"
        whole = Ledger(log.log(), group="g", member=member).read()
        checkpoint(log)
        log.clean_before(data.draw(st.integers(0, len(reference.commits)), label="cleaned before"))
        try:
            assert Ledger(log.log(), group="g", member=member).read() == whole
        except LedgerTruncatedError:
            assert ours

    in_folder(check)


def checkpoint(log):
    DeltaTable(str(log.path)).create_checkpoint()


def restored_again(levels, restores):
    """Each level goes back to before the state that the fold to it starts from."""
    shard = SHARDS[0]
    reference = Reference([("ours", made_entry(1, -1, member="a", kind="init", origin={shard: 0}))])
    for number in range(levels):
        base = len(reference.commits) - 1
        state = as_state(reference.fold(base))
        batch = made_entry(number + 2, base, member="a", ranges={shard: Range(number, number + 1)}, state=state)
        reference.commits += [("ours", batch), *[("restore", max(base - 1, 0))] * restores]
    return reference


def test_levels_of_restores_are_folded_once_each(monkeypatch):
    reference, folded = restored_again(8, 3), []

    def counted(*arguments, **options):
        folded.append(arguments)
        return fold(*arguments, **options)

    monkeypatch.setattr("spark_jobs.ledger.ledger.fold", counted)

    def check(log):
        write(log, reference)
        found = Ledger(log.log(), group="g", member="a").read()
        assert known(found.shards) == as_state(reference.fold(len(reference.commits) - 1))
        assert len(folded) <= len(reference.commits)

    in_folder(check)


def test_more_levels_of_restores_than_ingestion_makes_are_refused(monkeypatch):
    monkeypatch.setattr("spark_jobs.ledger.ledger.MAX_NESTED_RESTORES", 3)

    def check(log):
        write(log, restored_again(8, 3))
        with pytest.raises(RestoreTargetError):
            Ledger(log.log(), group="g", member="a").read()
        log.restore(version=0)
        assert Ledger(log.log(), group="g", member="a").read().positions == {SHARDS[0]: 0}

    in_folder(check)


def test_restore_back_and_forth():
    reference = Reference()

    def add(kind, base, **details):
        number = sum(what == "ours" for what, _ in reference.commits) + 1
        state = as_state(reference.fold(base))
        entry = made_entry(number, base, member="a", kind=kind, state=state, **details)
        reference.commits.append(("ours", entry))

    add("init", -1, origin={SHARDS[0]: 0})
    add("batch", 0, ranges={SHARDS[0]: Range(0, 5)})
    reference.commits.append(("restore", 0))
    add("batch", 2, ranges={SHARDS[0]: Range(0, 3)})
    reference.commits.append(("restore", 1))
    add("batch", 3, ranges={SHARDS[0]: Range(3, 6)})

    def check(log):
        write(log, reference)
        state = Ledger(log.log(), group="g", member="a").read().shards[SHARDS[0]]
        assert str(state.covered) == "[…,6)"
        assert str(state.redo) == "[3,5)"

    in_folder(check)


def test_a_batch_that_lands_behind_a_restore_to_before_the_claim_does_not_hide_what_was_lost():
    reference = Reference([("foreign", "DELETE")])
    shard = SHARDS[0]
    for number, (kind, details) in enumerate(
        [("init", {"origin": {shard: 2}}), ("batch", {"ranges": {shard: Range(2, 5)}})], start=1
    ):
        state = as_state(reference.fold(number - 1))
        reference.commits.append(
            ("ours", made_entry(number, number - 1, member="a", kind=kind, state=state, **details))
        )
    late = made_entry(3, 2, member="a", ranges={shard: Range(5, 9)}, state=as_state(reference.fold(2)))
    reference.commits += [("restore", 0), ("ours", late)]

    def check(log):
        write(log, reference)
        state = Ledger(log.log(), group="g", member="a").read()
        assert state.positions == {shard: 2}
        assert state.shards[shard].covered.first_gap(20) == Range(2, 5)

    in_folder(check)


def test_a_replace_that_lands_behind_a_restore_may_have_removed_nothing():
    reference, shard = Reference(), SHARDS[0]
    for number, (kind, base, details) in enumerate(
        [
            ("init", -1, {"origin": {shard: 0}}),
            ("batch", 0, {"ranges": {shard: Range(0, 5)}}),
            ("restore", 1, None),
            ("replay", 1, {"ranges": {shard: Range(1, 3)}, "mode": "replace"}),
        ],
        start=1,
    ):
        if kind == "restore":
            reference.commits.append((kind, base))
        else:
            state = as_state(reference.fold(base))
            reference.commits.append(("ours", made_entry(number, base, member="a", kind=kind, state=state, **details)))

    def check(log):
        write(log, reference)
        assert str(Ledger(log.log(), group="g", member="a").read().shards[shard].redo) == "[1,3)"

    in_folder(check)


def test_a_commit_is_late_also_where_the_restore_lies_before_the_state_that_the_fold_starts_from():
    shard = SHARDS[0]
    state = {shard: ShardState(Intervals.of((MIN_SEQUENCE, 5)), origin=0)}

    def check(log):
        log.ours(made_entry(1, -1, member="a", kind="init", origin={shard: 0}))
        log.ours(made_entry(2, 0, member="a", ranges={shard: Range(0, 5)}, state=None))
        log.restore(version=1)
        log.ours(made_entry(3, 2, member="a", kind="fence", state=state))
        late = {"kind": "replay", "ranges": {shard: Range(1, 3)}, "mode": "replace", "state": None}
        log.ours(made_entry(1, 1, member="b", **late))
        assert str(Ledger(log.log(), group="g", member="a").read().shards[shard].redo) == "[1,3)"

    in_folder(check)


@pytest.mark.parametrize("markers", [0, 1, 3], ids="{} markers".format)
def test_the_last_message_is_known_after_a_gap_is_filled(markers: int) -> None:
    """The last sequences of a range may be transaction markers, which are no messages."""
    orders = Shard("orders")

    def batch(number: int, start: int, end: int, *, has_messages: bool = True) -> LedgerEntry:
        found = LastMessage(end - 1 - markers, 1000 + end, 7 * end, 0)
        last = {orders: found} if has_messages else {}
        return made_entry(number, 0, ranges={orders: Range(start, end)}, last_messages=last)

    first = fold({orders: ShardState(origin=0, covered=Intervals.of((MIN_SEQUENCE, 0)))}, batch(1, 0, 10), late=False)
    ahead = fold(fold(first, batch(2, 10, 20), late=False), batch(3, 20, 30), late=False)
    late = fold(restore(ahead, first), batch(4, 30, 40), late=True)
    for parts in (
        [batch(5, 10, 30)],
        [batch(5, 10, 20), batch(6, 20, 30)],
        [batch(5, 10, 20, has_messages=False), batch(6, 20, 30, has_messages=False)],
    ):
        state = late
        for part in parts:
            state = fold(state, part, late=False)
            assert state[orders].last == LastMessage(39 - markers, 1040, 280, 0)
        assert state[orders].covered == Intervals.of((MIN_SEQUENCE, 40))
    # A late batch without messages does not tell which message is the last one before its end.
    empty = fold(restore(ahead, first), batch(4, 30, 40, has_messages=False), late=True)
    assert fold(empty, batch(5, 10, 30), late=False)[orders].last is None


def test_no_message_is_between_the_last_one_and_the_position():
    """Whatever lands late after which RESTORE; a check of the stream would take this message for a foreign one."""
    orders, size = Shard("orders"), 24
    for seed in range(800):
        random = Random(seed)
        messages = {sequence for sequence in range(size) if random.random() < 0.7}
        states = [{orders: ShardState(origin=0, covered=Intervals.of((MIN_SEQUENCE, 0)))}]
        restores, in_flight = [], []
        for number in range(1, 15):
            covered, chance = states[-1][orders].covered, random.random()
            if chance < 0.2:
                states.append(restore(states[-1], random.choice(states)))
                restores.append(len(states))
            elif chance < 0.4 and in_flight:
                base, late = in_flight.pop()
                states.append(fold(states[-1], late, late=any(version > base for version in restores)))
            elif covered.position < size:
                end = random.randint(covered.position, min([size, *(p.start for p in covered.ranges[1:])]) - 1) + 1
                part = Range(covered.position, end)
                own, before = messages & {*range(*part)}, states[-1][orders].last
                found = LastMessage(max(own), 1, 1, 0) if own else before
                batch = made_entry(number, 0, ranges={orders: part}, last_messages={orders: found} if found else {})
                if random.random() < 0.3:
                    in_flight.append((len(states), batch))
                else:
                    states.append(fold(states[-1], batch, late=False))
            state = states[-1][orders]
            if state.last is not None:
                assert not messages & {*range(state.last.sequence + 1, state.covered.position)}, seed


PLACES = {SHARDS[0]: Intervals.of((3, 4))}
REDRIVE = {"kind": "replay", "mode": "replace", "places": PLACES}
REPLAY = {"kind": "replay", "mode": "replace", "ranges": {SHARDS[0]: Range(0, 10)}}
DISMISSAL = {"kind": "dismiss", "mode": "dismiss", "places": PLACES}


@pytest.mark.parametrize("mode", ["replace", "merge", "merge again", "upsert", "upsert again"])
@pytest.mark.parametrize(
    ("between", "base", "redo"),
    [(REDRIVE, 2, "[3,4)"), (REDRIVE, 3, ""), (REPLAY, 2, ""), (DISMISSAL, 2, ""), (None, 2, "")],
    ids=["redrive", "planned after it", "replay", "dismissal", "OPTIMIZE"],
)
def test_places_that_a_redrive_wrote_since_the_plan_are_read_again(
    tmp_path: Path, mode: str, between: dict | None, base: int, redo: str
) -> None:
    shard, log = SHARDS[0], WrittenLog(tmp_path / "t")
    state = {shard: ShardState(Intervals.of((MIN_SEQUENCE, 10)), origin=0)}
    log.ours(made_entry(1, -1, kind="init", origin={shard: 0}))
    log.ours(made_entry(2, 0, ranges={shard: Range(0, 10)}))
    log.ours(
        made_entry(1, 1, member="rewind", mode="replace", ranges={shard: Range(0, 0)}, until={shard: 10}, state=state)
    )
    log.ours(made_entry(3, 2, state=None, **between)) if between else log.commit("OPTIMIZE")
    log.ours(made_entry(2, base, member="rewind", mode=mode, ranges={shard: Range(0, 10)}, state=None))
    assert str(Ledger(log.log(), group="g", member="main").read().shards[shard].redo) == redo
    # The next batch was planned after the redrive.
    log.ours(made_entry(3, 4, member="rewind", mode=mode, ranges={shard: Range(3, 4)}, state=None))
    assert not Ledger(log.log(), group="g", member="main").read().shards[shard].redo & PLACES[shard]


def test_a_late_batch_that_reads_messages_again_may_have_corrections_that_the_restore_removed() -> None:
    state = {SHARDS[0]: ShardState(Intervals.of((MIN_SEQUENCE, 2)), origin=0)}
    for mode, redo in (("append", (0, 2)), ("replace", (0, 5)), ("merge", (0, 2)), ("merge again", (0, 5))):
        entry = made_entry(1, 0, ranges={SHARDS[0]: Range(0, 5)}, mode=mode)
        assert fold(state, entry, late=True)[SHARDS[0]].redo == Intervals.of(redo)


def test_a_dismissal_makes_no_rows_so_that_what_is_to_be_replaced_still_is():
    shard, ten = SHARDS[0], Intervals.of((MIN_SEQUENCE, 10))
    state = {shard: ShardState(ten, Intervals.of((2, 8)), origin=0)}
    dismissal = made_entry(1, 0, kind="dismiss", places={shard: Intervals.of((3, 4))}, mode="dismiss", dead=1)
    assert fold(state, dismissal, late=False)[shard] == state[shard]
    gone = {shard: ShardState(Intervals.of((MIN_SEQUENCE, 1)), origin=0)}
    assert fold(gone, dismissal, late=True)[shard].covered == Intervals.of((MIN_SEQUENCE, 1), (3, 4))
    assert fold({shard: ShardState(ten, origin=0)}, dismissal, late=True)[shard].redo == Intervals.of((3, 4))
    assert (totals_after(Totals(dead=3), dismissal).dead, totals_after(Totals(dead=3), dismissal).replaced) == (3, 1)


def test_the_last_message_grows_with_appends_goes_back_with_a_restore_and_survives_json():
    orders = Shard("orders")

    def entry(number, end, *, mode="append"):
        last = {orders: LastMessage(end - 1, 1000 + end, 7 * end, epoch=end)} if mode == "append" else {}
        return made_entry(number, 0, ranges={orders: Range(end - 5, end)}, mode=mode, last_messages=last)

    states = [{orders: ShardState(origin=0, covered=Intervals.of((MIN_SEQUENCE, 0)))}]
    for one in (entry(1, 5), entry(2, 15), entry(3, 10), entry(4, 5, mode="replace")):
        assert LedgerEntry.from_json(json.loads(one.to_json())) == one
        states.append(fold(states[-1], one, late=False))
    assert [state[orders].last and state[orders].last.sequence for state in states] == [None, 4, 14, 14, 14]
    assert restore(states[4], states[1])[orders].last == LastMessage(4, 1005, 35, epoch=5)
    assert restore(states[4], states[0])[orders].last is None
    for state in states:
        assert ShardState.from_json(state[orders].to_json()) == state[orders]
    # Which message was the last one before a position that moves without it (of a group that claimed) is not known.
    fence = made_entry(5, 0, kind="fence", ranges={orders: Range(15, 20)})
    assert fold(states[4], fence, late=False)[orders].last is None
    # Nor is it where the position moves over what a batch without messages wrote that landed after a RESTORE.
    late = {orders: ShardState(origin=0, covered=Intervals.of((MIN_SEQUENCE, 0), (5, 8)))}
    assert fold(late, entry(1, 5), late=False)[orders].last is None
    full = made_entry(5, 4, state=states[4])
    assert LedgerEntry.from_json(json.loads(full.to_json())) == full
