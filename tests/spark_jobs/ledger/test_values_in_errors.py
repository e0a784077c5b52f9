"""Errors about a table that delta-rs cannot read show no value of a row, such as one of a partition column."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from spark_jobs.ledger.delta_log import DeltaLog, unreadable, without_values
from spark_jobs.ledger.table_rows import scan
from spark_jobs.writing.delta_table import check_files
from stream_consumers.errors import StorageMismatchError, StreamAssetsError, TableUnreadableError
from tests.support.kept_errors import kept

VALUE = "4111.50"


def read_rows(log: DeltaLog) -> int:
    return sum(len(rows) for rows in scan(log))


READS: tuple[Callable[[DeltaLog], Any], ...] = (DeltaLog.snapshot, DeltaLog.open, DeltaLog.row_count, read_rows)


def partitioned(folder: Path) -> DeltaLog:
    """A table whose only partition has the value."""
    prices = pa.array([Decimal(VALUE)], pa.decimal128(10, 2))
    write_deltalake(folder, pa.table({"id": [1], "price": prices}), partition_by=["price"])
    return DeltaLog(str(folder))


@pytest.mark.parametrize("read", READS)
def test_a_partition_column_of_a_wider_type_is_told_with_what_undoes_it(
    folder: Path, read: Callable[[DeltaLog], Any]
) -> None:
    log = partitioned(folder)
    actions = map(json.loads, (folder / "_delta_log" / f"{0:020d}.json").read_text().splitlines())
    (before,) = [action for action in actions if "metaData" in action]
    wider = json.dumps(before).replace("decimal(10,2)", "decimal(14,4)")
    (folder / "_delta_log" / f"{1:020d}.json").write_text(wider)
    with pytest.raises(TableUnreadableError) as raised:
        read(log)
    assert "RESTORE" in raised.value.remedy
    assert VALUE not in kept(raised.value)
    (folder / "_delta_log" / f"{2:020d}.json").write_text(json.dumps(before))
    read(log)


def put_a_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:9]), put_a_fifo])
def test_a_data_file_is_named_without_the_value_of_its_folder(folder: Path, damage: Callable[[Path], object]) -> None:
    log = partitioned(folder)
    (file,) = folder.glob("*/*.parquet")
    damage(file)
    with pytest.raises(StreamAssetsError) as raised:
        read_rows(log)
    assert file.name in raised.value.what
    assert VALUE not in kept(raised.value)


def test_a_file_that_is_on_another_machine_is_named_without_the_value_of_its_folder(folder: Path) -> None:
    log = partitioned(folder)
    (file,) = folder.glob("*/*.parquet")
    file.unlink()
    with pytest.raises(StorageMismatchError) as raised:
        check_files(log, 0)
    assert file.name in raised.value.what
    assert VALUE not in kept(raised.value)


@pytest.mark.parametrize(
    "said",
    [
        f"Kernel error: Failed to parse value 'it's\n{VALUE}' as 'long'",
        f"External error: Arrow error: Cast error: Cannot cast string '{VALUE}' to value of Int64 type",
        f"Parser error: Error parsing timestamp from '{VALUE}': error parsing date",
        f"Kernel error: Json error: whilst decoding field 'id': failed to parse \"{VALUE}\" as Int64",
        f"Invalid argument error: {VALUE} is too large to store in a Decimal128 of precision 4",
        f"Object at location /lake/t/a=b/price={VALUE} x/day={VALUE}/part-0.parquet not found",
        f"no such file: price={VALUE}/part-0.parquet",
    ],
)
def test_no_value_is_repeated(said: str) -> None:
    error = unreadable(DeltaLog("t"), ValueError(said), what="t cannot be read", remedy="Correct it.")
    assert VALUE not in kept(error)
    assert re.match(r"t cannot be read \(\w", error.what)


@pytest.mark.parametrize(
    "said",
    [
        "External error: Transaction failed: Unsupported table features required: [TypeWidening]",
        'GET http://host/lake?list-type=2&prefix=t/_delta_log/ 404: <?xml version="1.0" encoding="UTF-8"?><a></a>',
        "error sending request for url (http://host:9000/lake?x=1), os error=2: see https://host/",
    ],
)
def test_other_texts_stay(said: str) -> None:
    assert without_values(said) == said
