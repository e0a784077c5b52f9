"""The dead letters that count: by the kinds of their reasons, and one by one in the order of their places."""

from __future__ import annotations

import os
import urllib.request
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.dead_letter_jobs import dead_letter_span
from spark_jobs.dead_letters import reader as module
from spark_jobs.dead_letters import reader as reading
from spark_jobs.dead_letters.reader import NO_REASON, OTHER_REASONS, DeadLetterFilter, DeadLetters, kind_of_reason
from spark_jobs.dead_letters.table import DEAD_LETTER_SCHEMA
from spark_jobs.ledger.entries import LedgerEntry, Totals
from spark_jobs.ledger.intervals import Intervals
from stream_consumers.batches import Range
from stream_consumers.errors import StreamNotFoundError
from tests.support.letter_tables import CLICKS, NOON, ORDERS, SECOND, Tables
from tests.support.python_programs import run_python
from tests.support.s3_server import BUCKET, SECRET, object_store

EVERYTHING = DeadLetterFilter(includes_uncounted=True)


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """Six that count, an orphaned one, and one of another group."""
    made = Tables(tmp_path)
    made.add(ORDERS, 9, 2, 40, reason="field 'id' is not a whole number of 64 bits")
    made.add(SECOND, 7, reason="field 'amount' is not a whole number of 32 bits", payload=b"\xff\x00")
    made.add(CLICKS, 5, reason="not a JSON object", payload=None)
    made.add(ORDERS, None, reason="lost: sequences 50 to 59 were removed", payload=None, is_message=False)
    made.add(ORDERS, 60, group="other")
    made.add(CLICKS, 6, batch="b9", number=2)
    return made


def places(tables: pa.Table) -> list[str]:
    names = zip(*(tables.column(name).to_pylist() for name in ("_stream", "_shard", "_sequence")), strict=True)
    return [f"{stream}/{number}={sequence}" for stream, number, sequence in names]


def test_they_are_grouped_by_the_kind_of_their_reason_with_an_example(tables: Tables) -> None:
    found = {kind.reason: kind for kind in tables.letters().kinds()}
    assert {reason: kind.count for reason, kind in found.items()} == {
        "field '…' is not a whole number of # bits": 4,
        "lost: sequences # to # were removed": 1,
        "not a JSON object": 1,
    }
    assert next(iter(found)).startswith("field"), "the most frequent one first"
    numbers = found["field '…' is not a whole number of # bits"]
    assert (numbers.first, numbers.last) == (NOON.replace(minute=2), NOON.replace(minute=40))
    assert [*numbers.shards] == [ORDERS, SECOND]
    assert numbers.example is not None
    assert (numbers.example.place, numbers.example.payload) == ("orders/0=2", "2")
    assert numbers.example.reason == "field 'id' is not a whole number of 64 bits"
    lost, clicks = found["lost: sequences # to # were removed"], found["not a JSON object"]
    assert lost.example is not None
    assert (lost.example.place, lost.example.payload) == ("orders/0", "–")
    assert lost.first == NOON.replace(day=NOON.day + 1), "it has no time but that of its record"
    assert clicks.example is not None
    assert clicks.example.payload == "–"


def test_those_that_do_not_count_are_told_apart_when_asked(tables: Tables) -> None:
    replaced = {ORDERS: Intervals.of((2, 3), (9, 10))}
    tables.main.ours(
        LedgerEntry("replay", "g", "g/replay", 1, "replay", "r1", 0, places=replaced, mode="replace", messages=2)
    )
    letters = tables.letters()
    assert places(letters.to_arrow()) == ["clicks/0=5", "orders/0=40", "orders#2/1=7", "orders/0=None"]
    numbers = {kind.reason: (kind.count, kind.replaced, kind.orphaned) for kind in letters.kinds(EVERYTHING)}
    assert numbers == {
        "field '…' is not a whole number of # bits": (2, 2, 0),
        "lost: sequences # to # were removed": (1, 0, 0),
        "no number": (0, 0, 1),
        "not a JSON object": (1, 0, 0),
    }
    example = letters.kinds(EVERYTHING)[0].example
    assert example is not None
    assert example.place == "orders/0=40", "one that counts goes first"
    everything = letters.to_arrow(EVERYTHING)
    told = dict(zip(places(everything), everything.column("status").to_pylist()))
    assert (told["orders/0=2"], told["clicks/0=6"], told["orders/0=40"]) == ("replaced", "orphaned", "counts")
    assert "status" not in letters.to_arrow().column_names


@pytest.mark.parametrize("is_considered", [False, True])
def test_a_dismissal_takes_effect_where_it_was_planned(tables: Tables, is_considered: bool) -> None:
    def statuses() -> list[tuple[str, str]]:
        found = tables.letters().to_arrow(DeadLetterFilter(("orders",), includes_uncounted=True))
        own = zip(places(found), found.column("status").to_pylist())
        return sorted((place, status) for place, status in own if place in ("orders/0=2", "orders/0=40"))

    first = statuses()
    assert first == [("orders/0=2", "counts"), ("orders/0=40", "counts")]
    # While it is in flight, another run replaces one of its two places.
    tables.commit(2, "b2", {ORDERS: Range(0, 10)}, mode="replace")
    both = {ORDERS: Intervals.of((2, 3), (40, 41))}
    tables.add(ORDERS, 2, 40, batch="d1", dismissed_by="ann", metadata={"app": "g/replay", "n": 1})
    tables.main.ours(LedgerEntry("dismiss", "g", "g/replay", 1, "replay", "d1", 0, places=both, mode="dismiss", dead=2))
    if is_considered:
        # An entry that was planned between the two, and lands after both.
        uncounted = {"b1": {ORDERS: Intervals.of((2, 10))}}
        totals = Totals(dead=9, replaced=1)
        tables.commit(3, "b3", {}, replaces_considered=1, uncounted=uncounted, totals=totals, dead_letters_version=0)
    landed = [
        ("orders/0=2", "replaced"),
        ("orders/0=2", "replaced"),
        ("orders/0=40", "dismissed"),
        ("orders/0=40", "replaced"),
    ]
    assert statuses() == landed
    tables.main.restore(version=1)
    assert [status for _, status in statuses()] == ["orphaned", "replaced", "counts", "orphaned"]
    tables.main.restore(version=2)
    assert statuses() == landed


def test_damage_of_a_file_that_was_read_again_counts_once(tmp_path: Path) -> None:
    made = Tables(tmp_path)

    def statuses() -> dict[tuple[str, int], str]:
        found = made.letters().to_arrow(replace(EVERYTHING, streams=("orders",)), columns=["_batch", "offset"])
        columns = (found.column(name).to_pylist() for name in ("_batch", "offset", "status"))
        return {(batch, offset): status for batch, offset, status in zip(*columns, strict=True)}

    damage = {"is_message": False, "reason": "unreadable from here on"}
    made.add(ORDERS, None, offset=640, **damage)
    made.add(ORDERS, None, offset=900, **damage)
    made.add(ORDERS, None, offset=640, batch="b2", number=2, **damage)
    made.add(CLICKS, None, offset=640, batch="b2", number=2, **damage)
    assert statuses()["b1", 640] == "counts", "the second batch has not landed"
    made.commit(2, "b2", {ORDERS: Range(0, 100)}, dead=2)
    found = statuses()
    assert found == {("b1", 640): "replaced", ("b1", 900): "counts", ("b2", 640): "counts"}
    assert sorted(places(made.letters().to_arrow())) == ["clicks/0=None", "orders/0=None", "orders/0=None"]
    made.add(ORDERS, None, offset=640, batch="b3", number=3, dismissed_by="ann", dismisses="b2", **damage)
    made.commit(3, "b3", {}, dead=1)
    assert statuses() | {("b2", 640): ""} == {**found, ("b2", 640): "", ("b3", 640): "dismissed"}
    made.add(ORDERS, None, offset=640, batch="b4", number=4, **damage)
    made.commit(4, "b4", {ORDERS: Range(0, 100)}, dead=1)
    found = statuses()
    assert (found["b3", 640], found["b4", 640]) == ("replaced", "counts")
    made.add(ORDERS, None, offset=640, batch="b5", number=5, is_message=False, reason="sequence 3 comes after 9")
    made.commit(5, "b5", {ORDERS: Range(0, 100)}, dead=1)
    found = statuses()
    assert (found["b4", 640], found["b5", 640]) == ("counts", "counts"), "the file lost what was before it"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (DeadLetterFilter(streams=("clicks",)), ["clicks/0=5"]),
        (DeadLetterFilter(streams=("orders",), reason="WHOLE NUMBER OF 32"), ["orders#2/1=7"]),
        (DeadLetterFilter(span=dead_letter_span(Bound.parse("6"), Bound.parse("10"))), ["orders/0=9", "orders#2/1=7"]),
        (
            DeadLetterFilter(span=dead_letter_span(None, Bound.parse("orders/0=9"))),
            ["clicks/0=5", "orders/0=2", "orders#2/1=7"],
        ),
        (DeadLetterFilter(span=dead_letter_span(Bound.parse("2026-11-17T12:30:00Z"), None)), ["orders/0=40"]),
        (DeadLetterFilter(places={ORDERS: Intervals.of((9, 10), (41, 42))}), ["orders/0=9"]),
        (DeadLetterFilter(places={}), []),
        (DeadLetterFilter(batches=["b9", "it's"]), []),
        (DeadLetterFilter(reason="lost"), ["orders/0=None"]),
    ],
)
def test_a_filter_leaves_those_that_are_meant(tables: Tables, wanted: DeadLetterFilter, expected: list[str]) -> None:
    assert places(tables.letters().to_arrow(wanted)) == expected
    assert sum(kind.count for kind in tables.letters().kinds(wanted)) == len(expected)


def test_a_table_that_is_not_there_an_empty_one_and_a_group_that_has_written_nothing(tmp_path: Path) -> None:
    with pytest.raises(StreamNotFoundError, match="'g'"):
        DeadLetters(str(tmp_path / "t"), group="g").kinds()
    made = Tables(tmp_path)
    assert made.letters().kinds() == []
    assert made.letters().to_arrow().schema == DEAD_LETTER_SCHEMA
    made.add(ORDERS)
    assert made.letters().kinds() == []
    assert made.letters().to_arrow(columns=["error"]).column_names == ["error"]
    made.add(ORDERS, 1, 2)
    with pytest.raises(StreamNotFoundError, match=r"'g' \(2\)"):
        DeadLetters(str(tmp_path / "t"), group="h").to_arrow()


def test_a_group_whose_name_has_quotes(tmp_path: Path) -> None:
    made = Tables(tmp_path, group='it\'s "g"')
    made.add(ORDERS, 1)
    made.add(ORDERS, 2, group="g")
    assert places(made.letters().to_arrow()) == ["orders/0=1"]


def test_what_others_do_to_the_table_changes_nothing_but_what_they_delete(tables: Tables) -> None:
    before = tables.letters().to_arrow()
    table = DeltaTable(tables.table.path)
    table.optimize.compact()
    assert tables.letters().to_arrow() == before
    table.delete("_sequence = 40")
    assert places(tables.letters().to_arrow()) == [place for place in places(before) if place != "orders/0=40"]


@pytest.mark.slow
def test_they_are_read_from_an_object_store(tables: Tables, tmp_path: Path) -> None:
    expected = tables.letters().to_arrow()
    with object_store(tmp_path) as store:
        for file in (path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".log"):
            url = f"{store.endpoint}/{BUCKET}/{file.relative_to(tmp_path).as_posix()}"
            plain = {"Content-Type": "application/octet-stream"}
            put = urllib.request.Request(url, file.read_bytes(), plain, method="PUT")
            urllib.request.urlopen(put, timeout=60).close()
        letters = DeadLetters(f"s3a://{BUCKET}/t", group="g", storage_options=store.options)
        assert letters.to_arrow() == expected
        assert [kind.count for kind in letters.kinds()] == [4, 1, 1]
    assert SECRET not in repr(letters)


def test_they_come_in_order_whatever_is_held_at_a_time(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tables.letters().to_arrow(EVERYTHING)
    assert places(tables.letters().to_arrow(limit=2)) == ["clicks/0=5", "orders/0=2"]
    assert places(tables.letters().to_arrow(limit=6))[-1] == "orders/0=None"
    for name, value in (("MAX_DEAD_LETTERS", 2), ("MAX_DEAD_LETTER_BYTES", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(reading, name, value)
            assert tables.letters().to_arrow(EVERYTHING) == whole
            sizes = [part.num_rows for part in tables.letters().tables()]
    assert sizes == [1] * 6, "no two fit"


def test_of_very_many_kinds_the_others_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Tables(tmp_path)
    for number, word in enumerate(("one", "two", "three", "four")):
        made.add(ORDERS, *range(10 * number, 10 * number + number + 1), reason=f"reason {word}")
    monkeypatch.setattr(module, "MAX_REASON_KINDS", 2)
    monkeypatch.setattr(module, "_EXAMPLES_AT_A_TIME", 1)
    found = made.letters().kinds()
    assert sum(kind.count for kind in found) == 10
    assert len(found) == 3
    assert [kind.example is None for kind in found] == [kind.reason == OTHER_REASONS for kind in found]


def test_kinds_are_the_same_for_the_same_cause(tmp_path: Path) -> None:
    same = ["timestamp 1 ms is not in the years 1 to 9999", "timestamp -253402300800000 ms is not in the years 1 to 9"]
    assert len({kind_of_reason(reason) for reason in same}) == 1
    assert kind_of_reason("value 'd\\'or, 5' of `a b`") == "value '…' of '…'"
    # In linear time, which a schema could make exponential.
    assert kind_of_reason("the record '" + "\\" * 300 + "a'x contains itself").startswith("the record '")
    assert kind_of_reason("it doesn't fit, and isn't 5 long") == "it doesn't fit, and isn't # long"
    assert kind_of_reason("id 123e4567-e89b-12d3-a456-426614174000 at 2026-11-17T12:00:00.5Z") == "id # at #"
    assert kind_of_reason("not UTF-8, v1_2") == "not UTF-8, v1_2"
    assert kind_of_reason(None) == kind_of_reason(" ") == NO_REASON
    assert "secret" not in kind_of_reason("got 'secret " + "x" * 100_000), "nor is it if its end is far away"
    assert kind_of_reason("\x1b[2J\nline") == "\\x1b[#J line"
    assert len(kind_of_reason("word " * 1000)) == 200
    assert kind_of_reason(kind_of_reason(same[0])) == kind_of_reason(same[0])
    made = Tables(tmp_path)
    made.add(ORDERS, 1, reason=None)
    (kind,) = made.letters().kinds()
    assert (kind.reason, kind.example and kind.example.reason) == (NO_REASON, NO_REASON)


@pytest.mark.spark
def test_a_view_of_spark_has_those_that_counted_when_it_was_made(spark: SparkSession, tables: Tables) -> None:
    def viewed() -> list[tuple[str, int, int | None]]:
        found = spark.sql(
            "SELECT _stream, _shard, _sequence FROM letters_that_count ORDER BY _stream, _shard, _sequence"
        )
        return [tuple(row) for row in found.collect()]

    counted = [("clicks", 0, 5), ("orders", 0, None), ("orders", 0, 2), ("orders", 0, 9), ("orders", 0, 40)]
    tables.letters().create_view(spark, "letters_that_count")
    assert viewed() == [*counted, ("orders#2", 1, 7)]
    replaced = {ORDERS: Intervals.of((2, 3), (9, 10))}
    tables.main.ours(
        LedgerEntry("replay", "g", "g/replay", 1, "replay", "r1", 0, places=replaced, mode="replace", messages=2)
    )
    tables.add(ORDERS, 60)
    assert len(viewed()) == 6, "until it is made again"
    tables.letters().create_view(spark, "letters_that_count")
    assert viewed() == [*counted[:2], *counted[4:], ("orders", 0, 60), ("orders#2", 1, 7)]


@pytest.mark.spark
def test_a_view_without_any_dead_letter_has_their_columns(spark: SparkSession, tmp_path: Path) -> None:
    Tables(tmp_path).letters().create_view(spark, "none")
    found = spark.table("none")
    assert (found.columns, found.count()) == (DEAD_LETTER_SCHEMA.names, 0)


_PEAK = """
import re, sys
from pathlib import Path
from spark_jobs.dead_letters.reader import DeadLetters
from spark_jobs.dead_letters import reader as reading
from spark_jobs.dead_letters.reader import DeadLetterFilter

def memory(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def peak(count):
    # From here on the peak is counted anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    assert count() == int(sys.argv[2])
    return (memory("VmHWM") - before) // 1024

letters = DeadLetters(sys.argv[1], group="g")
print(peak(lambda: sum(kind.count for kind in letters.kinds())))
print(peak(lambda: sum(part.num_rows for part in letters.tables())))
"""


def peaks(table: Path, count: int) -> tuple[int, int]:
    """The megabytes that listing takes, and reading all, in a process of its own."""
    done = run_python(_PEAK, table, str(count))
    assert done.returncode == 0, done.stderr
    of_kinds, of_all = map(int, done.stdout.split())
    return of_kinds, of_all


@pytest.mark.slow
def test_the_memory_is_bounded_however_many_and_however_large_they_are(tmp_path: Path) -> None:
    many, large = Tables(tmp_path / "many"), Tables(tmp_path / "large")
    for start in range(0, 100_000, 25_000):
        many.add(ORDERS, *range(start, start + 25_000), payload=os.urandom(3000))
    for start in range(0, 80, 10):
        large.add(ORDERS, *range(start, start + 10), payload=os.urandom(5000) * 1000)
    # They have 300 and 400 MB of payloads.
    assert max(peaks(many.main.path, 100_000)) < 250
    assert max(peaks(large.main.path, 80)) < 250
