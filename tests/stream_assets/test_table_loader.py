"""What downstream assets get of the table: as they ask for it, of the version that their run was asked for with."""

import logging
import shutil
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession

from stream_assets import DeltaLake, Keys, StreamAsset, stream_asset, stream_definitions
from stream_consumers.errors import InvalidOptionError, TableUnreadableError
from tests.support.delta_writes import clean_log
from tests.support.repeating_storage import repeating_storage
from tests.support.s3_server import BUCKET, ObjectStore, object_store

ORDERS = dg.AssetKey(["sales", "orders"])
DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-03", end_offset=1)
MAPPED: dict[str, str | None] = {"delta.columnMapping.mode": "name"}
EAGER = [pa.Table, pl.DataFrame, pl.LazyFrame, pd.DataFrame]


@pytest.fixture
def lake(tmp_path: Path) -> DeltaLake:
    return DeltaLake(root=str(tmp_path))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("s3")) as started:
        yield started


def declare(
    lake: DeltaLake, partitions: dg.DailyPartitionsDefinition | None = None, keys: Keys | None = None
) -> StreamAsset:
    @stream_asset(
        source="memory://loader/orders",
        group="g",
        table=lake,
        keys=keys,
        spec=dg.AssetSpec(["sales", "orders"], partitions_def=partitions),
    )
    def orders(batch: Any) -> Any:
        return batch

    return orders


def write(lake: DeltaLake, instance: dg.DagsterInstance, *ids: int) -> int:
    """Rows into the table, and a materialization that tells of them; the version."""
    path = lake.table_of(ORDERS).path
    write_deltalake(path, pa.table({"id": pa.array(ids, pa.int64())}), mode="append")
    version = DeltaTable(path).version()
    instance.report_runless_asset_event(dg.AssetMaterialization(ORDERS, metadata={"delta/version": version}))
    return version


def ids_of(got: Any) -> list[int]:
    if isinstance(got, DeltaTable):
        got = got.to_pyarrow_table()
    if isinstance(got, pl.LazyFrame):
        got = got.collect()
    found = got["id"]
    return list(found.to_pylist() if isinstance(got, pa.Table) else found.to_list())


def write_days(lake: DeltaLake, *days: datetime, properties: dict[str, str | None] | None = None) -> None:
    """A row of each of these days, with the number of the day as its id."""
    rows = {"id": [day.day for day in days], "_timestamp": pa.array(days, pa.timestamp("us", "UTC"))}
    write_deltalake(lake.table_of(ORDERS).path, pa.table(rows), mode="append", configuration=properties)


def load(
    lake: DeltaLake,
    instance: dg.DagsterInstance,
    wanted: Any,
    *,
    before: Any = None,
    partitions: dg.DailyPartitionsDefinition | None = None,
    of: dg.DailyPartitionsDefinition | None = None,
    mapping: dg.PartitionMapping | None = None,
    partition_key: str | None = None,
    keys: Keys | None = None,
) -> Any:
    """What an asset gets that has the annotation; a function is called when its run has begun.

    The table has ``partitions``, and the asset is one ``of`` some.
    """
    got = []

    @dg.asset
    def first() -> None:
        if before is not None:
            before()

    @dg.asset(ins={"orders": dg.AssetIn(ORDERS, partition_mapping=mapping)}, deps=[first], partitions_def=of)
    def totals(orders: wanted) -> None:
        got.append(orders)

    definitions = dg.Definitions.merge(
        stream_definitions([declare(lake, partitions, keys)]),
        dg.Definitions([first, totals], jobs=[dg.define_asset_job("only", selection=[first.key, totals.key])]),
    )
    job = definitions.resolve_job_def("only")
    result = job.execute_in_process(instance=instance, partition_key=partition_key)
    assert result.success
    return got[0]


@pytest.mark.parametrize(
    "refused", [r"GET .*\.parquet", pytest.param(r"GET .*prefix=sales/orders/?(&|$)", marks=pytest.mark.slow)]
)
def test_no_event_repeats_a_token_of_the_storage(
    instance: dg.DagsterInstance, store: ObjectStore, refused: str
) -> None:
    """Of the data files, and of the list of them that says whether a version has all of its files."""
    path = f"s3://{BUCKET}/sales/orders"
    for ids in ([1], [2]):
        write_deltalake(path, pa.table({"id": ids}), mode="overwrite", storage_options=store.options)
    instance.report_runless_asset_event(dg.AssetMaterialization(ORDERS, metadata={"delta/version": 0}))
    secrets = {"AWS_SESSION_TOKEN": "hunter2", "max_retries": "0", "retry_timeout": "1s"}
    with repeating_storage(refused, store.endpoint) as address:
        options = {**store.options, **secrets, "AWS_ENDPOINT_URL": address}
        lake = DeltaLake(root=f"s3a://{BUCKET}", storage_options=options)
        with pytest.raises(TableUnreadableError):
            load(lake, instance, pa.Table)
    (run,) = instance.get_runs(limit=1)
    events = [dg.serialize_value(event) for event in instance.all_logs(run.run_id)]
    assert any("ExpiredToken" in event for event in events)
    assert not any("hunter2" in event for event in events)


@pytest.mark.parametrize("wanted", [*EAGER, DeltaTable])
def test_the_table_is_what_the_annotation_says(lake: DeltaLake, instance: dg.DagsterInstance, wanted: Any) -> None:
    write(lake, instance, 1, 2)
    got = load(lake, instance, wanted)
    assert isinstance(got, wanted)
    rows = ids_of(got)
    assert sorted(rows) == [1, 2]


@pytest.mark.parametrize("wanted", [pa.Table, pl.LazyFrame])
def test_rows_of_deleted_keys_are_left_out(lake: DeltaLake, instance: dg.DagsterInstance, wanted: Any) -> None:
    rows = {"id": pa.array([1, 2], pa.int64()), "_deleted": [False, True]}
    write_deltalake(lake.table_of(ORDERS).path, pa.table(rows))
    assert ids_of(load(lake, instance, wanted, keys=Keys(["id"], sequence_by="at"))) == [1]
    assert ids_of(load(lake, instance, DeltaTable, keys=Keys(["id"], sequence_by="at"))) == [1, 2]
    assert ids_of(load(lake, instance, wanted, keys=Keys(["id"]))) == [1, 2], "where they are removed, no column marks"


def test_a_run_sees_the_version_of_the_materialization_before_it(lake: DeltaLake, instance: dg.DagsterInstance) -> None:
    version = write(lake, instance, 1)
    got = load(lake, instance, DeltaTable, before=lambda: write(lake, instance, 2))
    assert got.version() == version
    assert load(lake, instance, DeltaTable).version() == version + 1
    instance.wipe_assets([ORDERS])
    assert load(lake, instance, DeltaTable).version() == version + 1, "without a materialization it is the newest one"


def warnings_of(instance: dg.DagsterInstance) -> list[str]:
    """What the newest run has warned of."""
    (run,) = instance.get_runs(limit=1)
    return [entry.user_message for entry in instance.all_logs(run.run_id) if entry.level == logging.WARNING]


@pytest.mark.parametrize("gone", ["log", "files", "table"])
def test_the_newest_version_is_loaded_where_that_of_the_materialization_is_gone(
    lake: DeltaLake, instance: dg.DagsterInstance, gone: str
) -> None:
    path = lake.table_of(ORDERS).path
    for number in (1, 2):
        version = write(lake, instance, number)
    assert ids_of(load(lake, instance, pa.Table)) == [2, 1]
    assert not warnings_of(instance)
    if gone == "table":
        shutil.rmtree(path)
        write_deltalake(path, pa.table({"id": pa.array([1, 2], pa.int64())}))
    else:
        DeltaTable(path).optimize.compact()
    if gone == "files":
        DeltaTable(path).vacuum(0, enforce_retention_duration=False, dry_run=False)
    if gone == "log":
        clean_log(path)
    rows = ids_of(load(lake, instance, pa.Table))
    assert sorted(rows) == [1, 2]
    (warning,) = warnings_of(instance)
    assert (
        f"version {version} of {path}, which was last materialized, is gone: it was cleaned up, or the table was "
        "recreated; the newest version"
    ) in warning


def test_files_that_were_joined_since_are_no_reason_for_another_version(
    lake: DeltaLake, instance: dg.DagsterInstance
) -> None:
    for number in (1, 2):
        version = write(lake, instance, number)
    DeltaTable(lake.table_of(ORDERS).path).optimize.compact()
    assert load(lake, instance, DeltaTable).version() == version
    assert not warnings_of(instance)


@pytest.mark.parametrize("mapping", [None, dg.AllPartitionMapping(), dg.LastPartitionMapping()], ids=repr)
def test_an_asset_without_partitions_gets_all_rows_unless_its_mapping_says_which(
    lake: DeltaLake, instance: dg.DagsterInstance, mapping: dg.PartitionMapping | None
) -> None:
    # One row from before the first partition, and one from behind the last one, which Dagster does not know of yet.
    write_days(lake, *(datetime(2026, 1, day, 12, tzinfo=timezone.utc) for day in (1, 2, 3, 4)))
    days = dg.DailyPartitionsDefinition("2026-01-02", end_date="2026-01-04", end_offset=1)
    rows = ids_of(load(lake, instance, pa.Table, partitions=days, mapping=mapping))
    assert sorted(rows) == ([3] if isinstance(mapping, dg.LastPartitionMapping) else [1, 2, 3, 4])


def test_before_the_first_day_is_over_an_asset_without_partitions_gets_its_rows(
    lake: DeltaLake, instance: dg.DagsterInstance
) -> None:
    today = datetime.now(timezone.utc)
    write_days(lake, today)
    days = dg.DailyPartitionsDefinition(today.date().isoformat(), end_offset=1)
    assert ids_of(load(lake, instance, pa.Table, partitions=days)) == [today.day]


def test_another_annotation_is_refused(lake: DeltaLake, instance: dg.DagsterInstance) -> None:
    write(lake, instance, 1)
    with pytest.raises(InvalidOptionError, match=r"builtins\.dict"):
        load(lake, instance, dict)


@pytest.mark.parametrize("wanted", [pa.Table, pl.LazyFrame])
def test_columns_with_other_names_in_the_files_are_loaded_also_by_day(
    lake: DeltaLake, instance: dg.DagsterInstance, wanted: Any
) -> None:
    write_days(lake, *(datetime(2026, 1, day, 23, tzinfo=timezone.utc) for day in (1, 2)), properties=MAPPED)
    rows = ids_of(load(lake, instance, wanted))
    assert sorted(rows) == [1, 2]
    assert ids_of(load(lake, instance, wanted, partitions=DAYS, of=DAYS, partition_key="2026-01-02")) == [2]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("wanted", [DataFrame, Any], ids=["annotated", "bare"])
def test_a_spark_frame_is_pinned_too(
    spark: SparkSession, lake: DeltaLake, instance: dg.DagsterInstance, wanted: Any
) -> None:
    write(lake, instance, 1)
    got = load(lake, instance, wanted, before=lambda: write(lake, instance, 2))
    assert [row["id"] for row in got.collect()] == [1]
    rows = {"id": pa.array([1, 2], pa.int64()), "_deleted": [False, True]}
    write_deltalake(lake.table_of(ORDERS).path, pa.table(rows), mode="overwrite", schema_mode="overwrite")
    instance.wipe_assets([ORDERS])
    got = load(lake, instance, wanted, keys=Keys(["id"], sequence_by="at"))
    assert [row["id"] for row in got.collect()] == [1]
