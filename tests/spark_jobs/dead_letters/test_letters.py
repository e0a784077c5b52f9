"""Dead letters read again as messages: which ones, as what, and how much at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.dead_letter_jobs import Redrive
from spark_jobs.dead_letters.reader import DeadLetterReader, first_places, messages_of, without_first
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.ledger import Ledger
from stream_consumers.batches import MESSAGE_SCHEMA, Range
from stream_consumers.errors import InvalidOptionError
from tests.support.letter_tables import CLICKS, ORDERS, SECOND, Tables


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    made = Tables(tmp_path)
    made.add(ORDERS, 9, 2, 40, None)
    made.add(SECOND, 7)
    made.add(CLICKS, 5)
    made.add(ORDERS, 60, group="other")
    return made


def found(reader: DeadLetterReader) -> dict[str, list[int]]:
    return {str(shard): own.tolist() for shard, own in reader.places()[0].items()}


def test_the_places_are_those_of_the_group_and_the_streams_in_all_their_epochs(tables: Tables) -> None:
    tables.add(ORDERS, 2)
    assert found(tables.reader()) == {"orders/0": [2, 9, 40], "orders#2/1": [7]}, "each once, in order"
    assert tables.reader().places()[1] == 1, "one has no sequence"
    assert found(tables.reader(streams=("clicks",))) == {"clicks/0": [5]}


def test_large_sequences_are_exact_beside_one_that_is_missing(tables: Tables) -> None:
    large = 2**60 + 1
    tables.add(CLICKS, large, None)
    assert found(tables.reader(streams=("clicks",))) == {"clicks/0": [5, large]}


def test_no_table_has_no_dead_letters(tmp_path: Path) -> None:
    reader = Tables(tmp_path).reader()
    assert reader.places() == ({}, 0)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Redrive(Bound.parse("7"), Bound.parse("40")), {"orders/0": [9], "orders#2/1": [7]}),
        (Redrive(Bound.parse("orders/0=9")), {"orders/0": [9, 40]}),
        (Redrive(stop=Bound.parse("orders/0=9")), {"orders/0": [2], "orders#2/1": [7]}),
        (Redrive(Bound.parse("2026-11-17T12:07:00Z"), Bound.parse("2026-11-17T12:09:00Z")), {"orders#2/1": [7]}),
        (Redrive(Bound.parse("2026-11-17T12:09:00Z")), {"orders/0": [9, 40]}),
        (Redrive(Bound.parse("earliest"), Bound.parse("latest")), {"orders/0": [2, 9, 40], "orders#2/1": [7]}),
        (Redrive(Bound.parse("90")), {}),
    ],
)
def test_bounds_are_sequences_or_times_of_messages(
    tables: Tables, wanted: Redrive, expected: dict[str, list[int]]
) -> None:
    reader = tables.reader(wanted.span())
    assert found(reader) == expected
    assert reader.places()[1] == (1 if wanted.span().is_unbounded else 0)


def test_bounds_that_leave_nothing_and_a_limit_that_is_none_are_refused() -> None:
    for wanted in (Redrive(Bound.parse("latest")), Redrive(stop=Bound.parse("earliest"))):
        with pytest.raises(InvalidOptionError):
            wanted.span()
    with pytest.raises(InvalidOptionError, match="limit"):
        Redrive(limit=0)


@pytest.mark.parametrize(
    ("start", "stop"),
    [("9", "3"), ("orders/0=9", "orders/0=3,orders/1=20"), ("2026-11-18T00:00:00Z", "2026-11-17T00:00:00Z")],
)
def test_a_redrive_that_stops_before_it_begins_is_refused(start: str, stop: str) -> None:
    with pytest.raises(InvalidOptionError):
        Redrive(Bound.parse(start), Bound.parse(stop)).span()
    Redrive(Bound.parse(stop), Bound.parse(start)).span()
    Redrive(Bound.parse(start), Bound.parse(start)).span()


def test_a_dead_letter_is_the_message_that_the_stream_held(tables: Tables) -> None:
    tables.add(ORDERS, 2)
    reader = tables.reader()
    found = reader.dead_letters(first_places(reader.places()[0], 2), max_bytes=1 << 20)
    assert found is not None
    messages = messages_of(found)
    assert messages.schema == MESSAGE_SCHEMA
    rows = messages.to_pylist()
    assert [row["sequence"] for row in rows] == [2, 9], "each once, and no others"
    assert rows[1] == {
        "stream": "orders",
        "shard": 0,
        "sequence": 9,
        "timestamp_ms": 1_794_917_340_000,
        "key": b"k",
        "payload": b"9",
        "headers": [{"name": "trace", "value": b"\xff"}],
        "error": None,
        "offset": None,
    }


def test_what_was_no_whole_message_keeps_its_error(tables: Tables) -> None:
    tables.add(CLICKS, 10, is_message=False)
    tables.add(CLICKS, 11, is_message=None)
    reader = tables.reader(streams=("clicks",))
    found = reader.dead_letters(reader.places()[0], max_bytes=1 << 20)
    assert found is not None
    errors = {row["sequence"]: row["error"] for row in messages_of(found).to_pylist()}
    assert errors == {5: None, 10: "no number", 11: None}, "a table of an older version does not tell"


def test_no_more_is_held_than_was_asked_for_but_one_message_always_is(tables: Tables) -> None:
    reader = tables.reader()
    places, _ = reader.places()
    assert reader.dead_letters(places, max_bytes=1) is None
    one = reader.dead_letters(first_places(places, 1), max_bytes=1)
    assert one is not None
    assert one.num_rows == 1
    left = without_first(places, 1)
    assert {str(shard): own.tolist() for shard, own in left.items()} == {"orders/0": [9, 40], "orders#2/1": [7]}


def test_a_batch_that_replaces_nothing_of_a_shard_leaves_its_dead_letters(tables: Tables) -> None:
    replaced = {ORDERS: Range(0, 30), SECOND: Range(100, 100)}
    tables.main.ours(LedgerEntry("batch", "g", "g/main", 2, "main", "b2", 0, ranges=replaced, mode="replace"))
    ledger = Ledger(tables.main.log(), group="g", member="replay")
    uncounted = tables.table.not_counting(ledger).ranges
    assert {bid: {str(shard): str(parts) for shard, parts in of.items()} for bid, of in uncounted.items()} == {
        "b1": {"orders/0": "[2,10)"}
    }, "from the first to the last of them in the range"
    assert found(tables.reader()) == {"orders/0": [40], "orders#2/1": [7]}
