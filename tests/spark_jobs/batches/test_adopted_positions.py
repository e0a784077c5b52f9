"""Where a group continues that adopts the rows of a copied table. No Spark is needed to know that."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.ledger_recovery import plan_adoption
from spark_jobs.batches.source_checks import check_adopted
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.intervals import Intervals
from spark_jobs.mode_switch import _is_behind
from stream_consumers.batches import Range
from stream_consumers.create import open_batch_source
from stream_consumers.errors import DataLossError, InvalidOptionError
from tests.support.ingesting import ingestion
from tests.support.streams import shard, write_stream


def places(*sequences: int) -> dict[str, pa.Array]:
    return {
        "_stream": pa.array(["orders"] * len(sequences)),
        "_shard": pa.array([0] * len(sequences), pa.int32()),
        "_sequence": pa.array(sequences, pa.int64()),
    }


def write_dead_letters(what: Ingestion, *sequences: int, number: int | None) -> None:
    """Those of a batch; without a number they are a copy, too, and no commit tells of a batch."""
    rows = {**places(*sequences), "_batch": ["b"] * len(sequences), "_group": [what.group] * len(sequences)}
    metadata = {"v": 1, "bid": "b", "app": f"{what.group}/main", "n": 1, "number": number}
    told = CommitProperties(
        custom_metadata={"userMetadata": json.dumps(metadata)}, app_transactions=[Transaction(f"{what.group}/main", 1)]
    )
    write_deltalake(what.dead_letters().path, pa.table(rows), commit_properties=None if number is None else told)


@pytest.mark.parametrize(
    ("number", "position"),
    [pytest.param(7, 4, id="left from the table before"), pytest.param(None, 6, id="copied with the rows")],
)
def test_dead_letters_of_a_table_that_was_replaced_by_a_copy_of_older_rows_are_not_gone_over(
    folder: Path, number: int | None, position: int
) -> None:
    url, what = write_stream(folder / "orders.ss", 10, shards=1), ingestion(folder / "t")
    write_deltalake(what.table, pa.table(places(1, 2, 3)))
    write_dead_letters(what, 5, number=number)
    with open_batch_source(url) as source:
        assert plan_adoption(source, what) == {shard(0): position}


def land(what: Ingestion, entry: LedgerEntry, *sequences: int) -> None:
    properties = CommitProperties(
        custom_metadata={"userMetadata": entry.to_json()}, app_transactions=[Transaction(entry.app, entry.number)]
    )
    write_deltalake(what.table, pa.table(places(*sequences)), mode="append", commit_properties=properties)


def adopt(what: Ingestion, origin: int, *, start: int = 1) -> LedgerEntry:
    """As the adopt of the rows before ``origin`` plans its commit."""
    ledger = what.ledger()
    state = ledger.read()
    switch = None if state.newest else "resumable"
    return ledger.entry("init", state, origin={shard(0): origin}, adopted={shard(0): start}, switch=switch)


def append(what: Ingestion, start: int, end: int) -> LedgerEntry:
    ledger = what.ledger()
    return ledger.entry("batch", ledger.read(), ranges={shard(0): Range(start, end)})


@pytest.fixture
def copy(folder: Path) -> Ingestion:
    """Nine messages; rows of the first three were copied in version 0, those of the next three in version 1."""
    write_stream(folder / "orders.ss", 9, shards=1)
    what = ingestion(folder / "t")
    write_deltalake(what.table, pa.table(places(1, 2, 3)))
    write_deltalake(what.table, pa.table(places(4, 5, 6)), mode="append")
    return what


def position(what: Ingestion) -> int:
    return what.ledger().read().positions[shard(0)]


def test_a_restore_takes_an_adopt_back_and_what_is_left_is_refused_until_it_is_adopted_again(copy: Ingestion) -> None:
    land(copy, adopt(copy, 7))
    land(copy, append(copy, 7, 9), 7, 8)
    assert position(copy) == 9
    DeltaTable(copy.table).restore(0)
    assert position(copy) == 1, "the first of the messages whose rows it removed is 4"
    with pytest.raises(InvalidOptionError):
        check_adopted(copy, copy.ledger().read())
    write_dead_letters(copy, 6, number=None)
    url = f"file://{Path(copy.table).parent}/orders.ss/orders"
    with open_batch_source(url) as source:
        assert plan_adoption(source, copy) == {shard(0): 4}, "its dead letters stayed, also behind removed rows"
    land(copy, adopt(copy, 4))
    check_adopted(copy, copy.ledger().read())
    assert position(copy) == 4
    DeltaTable(copy.table).restore(3)
    check_adopted(copy, copy.ledger().read())
    assert position(copy) == 9, "the first adopt is back, and the batch behind it"
    with open_batch_source(url) as source, pytest.raises(InvalidOptionError):
        plan_adoption(source, copy)


def test_after_a_restore_that_left_none_of_the_adopted_rows_all_is_read(copy: Ingestion) -> None:
    DeltaTable(copy.table).delete()
    write_deltalake(copy.table, pa.table(places(1, 2, 3)), mode="append")
    land(copy, adopt(copy, 4))
    DeltaTable(copy.table).restore(2)
    check_adopted(copy, copy.ledger().read())
    assert position(copy) == 1
    land(copy, append(copy, 1, 5), 1, 2, 4)
    check_adopted(copy, copy.ledger().read())
    assert position(copy) == 5


def test_an_adopt_or_a_batch_that_lands_after_the_restore_hides_no_rows(copy: Ingestion) -> None:
    late = adopt(copy, 7)
    DeltaTable(copy.table).restore(0)
    land(copy, late)
    assert position(copy) == 1
    with pytest.raises(InvalidOptionError):
        check_adopted(copy, copy.ledger().read())
    land(copy, adopt(copy, 4))
    late = append(copy, 4, 7)
    DeltaTable(copy.table).restore(0)
    land(copy, late, 4, 5, 6)
    with pytest.raises(InvalidOptionError):
        check_adopted(copy, copy.ledger().read())
    assert copy.ledger().read().shards[shard(0)].redo == Intervals.of((4, 7))


def test_a_group_that_claims_cannot_read_again_what_a_restore_of_adopted_rows_removed(copy: Ingestion) -> None:
    land(copy, adopt(copy, 7))
    ledger = copy.ledger()
    land(copy, ledger.entry("fence", ledger.read(), switch="load_balanced by claims"))
    check_adopted(copy, ledger.read())
    DeltaTable(copy.table).restore(0)
    with pytest.raises(DataLossError):
        check_adopted(copy, copy.ledger().read())


def test_a_group_that_has_read_the_adopted_messages_itself_may_claim(tmp_path: Path) -> None:
    group = ingestion(tmp_path / "t")
    write_deltalake(group.table, pa.table(places(0)).slice(0, 0))
    write_deltalake(group.table, pa.table(places(1, 2, 3)), mode="append")
    land(group, adopt(group, 4))
    DeltaTable(group.table).restore(0)
    ledger = group.ledger()
    assert any(map(_is_behind, ledger.read().shards.values()))
    land(group, append(group, 1, 10), *range(1, 10))
    assert not any(map(_is_behind, ledger.read().shards.values()))
    land(group, ledger.entry("fence", ledger.read(), switch="switching"))
    land(group, ledger.entry("fence", ledger.read(), switch="load_balanced by claims"))
    check_adopted(group, ledger.read())
