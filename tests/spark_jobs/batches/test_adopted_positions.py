"""Where a group continues that adopts the rows of a copied table. No Spark is needed to know that."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, Transaction, write_deltalake

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.ledger_recovery import plan_adoption
from stream_consumers.create import open_batch_source
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
