"""How downstream assets load the table of a stream asset: as they ask for it, of the version that their run is about.

An asset whose function has a parameter ``orders`` gets the table of the asset ``orders`` as its annotation says: a
Spark DataFrame, an Arrow table or dataset, a Polars or pandas frame, or a ``deltalake.DeltaTable``. It is pinned to the
version of the last materialization before the run was made, so that whatever the run makes is of one version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from typing import Any, cast

import dagster as dg
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.ledger.table_times import TIME
from spark_jobs.table_location import spark_location
from stream_assets.metadata import VERSION
from stream_assets.resources import run_session
from stream_assets.stream_to_table import StreamToTable
from stream_consumers.errors import InvalidOptionError

_PAGE = 100
Window = tuple[datetime, datetime]


class TableLoader(dg.IOManager):
    """Loads the table of a stream asset; runs of that write it by themselves.

    Args:
        declared: the stream, the table, and how.
        spark: makes a session; asked only for a Spark DataFrame.
    """

    def __init__(self, declared: StreamToTable, spark: Callable[[], SparkSession]) -> None:
        self._declared = declared
        self._spark = spark

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        """Nothing: what a run wrote is in the table."""

    def load_input(self, context: dg.InputContext) -> Any:
        """The table, as the annotation of the parameter says.

        Raises:
            InvalidOptionError: it says something else.
        """
        version = pinned_version(context)
        path, wanted = self._declared.table.path, context.dagster_type.typing_type
        context.log.info(f"loading {path} at {'its newest version' if version is None else f'version {version}'}")
        window = _window(context)
        if wanted is Any or (isinstance(wanted, type) and issubclass(wanted, DataFrame)):
            return self._spark_frame(path, version, window)
        table = DeltaTable(path, version=version, storage_options=self._declared.table.options())
        return _as(wanted, table, window)

    def _spark_frame(self, path: str, version: int | None, window: Window | None) -> DataFrame:
        reader = self._spark().read.format("delta")
        frame = (reader if version is None else reader.option("versionAsOf", version)).load(spark_location(path))
        if window is None:
            return frame
        time = f.col(TIME)
        return frame.where((time >= f.lit(window[0])) & (time < f.lit(window[1])))


def build_table_loader(declared: StreamToTable) -> dg.IOManagerDefinition:
    """The IO manager of an asset; it has no config, and no key that another asset could have.

    Args:
        declared: the stream, the table, and how.
    """
    keys = {declared.spark} if isinstance(declared.spark, str) else set()

    def load(context: dg.InitResourceContext) -> Iterator[TableLoader]:
        with ExitStack() as stack:
            yield TableLoader(declared, lambda: stack.enter_context(run_session(context, declared.spark)))

    # Dagster closes a generator behind the run; the type of the argument does not say that it takes one.
    make = cast("Callable[[dg.InitResourceContext], dg.IOManager]", load)
    return dg.IOManagerDefinition(make, required_resource_keys=keys, description=f"Loads {declared.table}.")


def pinned_version(context: dg.InputContext) -> int | None:
    """The version of the table that a run is to see.

    That is the one that this run has made, or that of the last materialization before the run was made. ``None`` if
    nothing was ever told of.
    """
    run_id, instance, key = context.step_context.run_id, context.instance, context.asset_key
    record = instance.get_run_record_by_id(run_id)
    made = None if record is None else record.create_timestamp.timestamp()
    own = dg.AssetRecordsFilter(asset_key=key, after_timestamp=made)
    for event in instance.fetch_materializations(own, limit=_PAGE).records:
        if event.run_id == run_id and (version := _version(event)) is not None:
            return version
    before = dg.AssetRecordsFilter(asset_key=key, before_timestamp=made)
    for event in instance.fetch_materializations(before, limit=_PAGE).records:
        if (version := _version(event)) is not None:
            return version
    return None


def _version(event: dg.EventLogRecord) -> int | None:
    made = event.asset_materialization
    value = made.metadata[VERSION].value if made is not None and VERSION in made.metadata else None
    return value if isinstance(value, int) else None


def _window(context: dg.InputContext) -> Window | None:
    """The time of the partitions that are loaded, where the table has some."""
    if not context.has_asset_partitions:
        return None
    window = context.asset_partitions_time_window
    return window.start, window.end


def _as(wanted: Any, table: DeltaTable, window: Window | None) -> Any:
    if wanted is DeltaTable:
        return table
    dataset = table.to_pyarrow_dataset()
    if window is not None:
        time = ds.field(TIME)
        dataset = dataset.filter((time >= pa.scalar(window[0])) & (time < pa.scalar(window[1])))
    if wanted is ds.Dataset:
        return dataset
    module, name = getattr(wanted, "__module__", ""), getattr(wanted, "__name__", str(wanted))
    kind = f"{module.partition('.')[0]}.{name}"
    if wanted is pa.Table:
        return dataset.to_table()
    if kind == "pandas.DataFrame":
        return dataset.to_table().to_pandas()
    if kind in ("polars.DataFrame", "polars.LazyFrame"):
        import polars  # noqa: PLC0415 - whoever annotates with it has it

        frame = polars.DataFrame(dataset.to_table())
        return frame.lazy() if name == "LazyFrame" else frame
    raise InvalidOptionError(
        f"a table cannot be loaded as {module}.{name}",
        remedy="Annotate the parameter with a Spark, pandas or Polars DataFrame, pyarrow.Table, "
        "pyarrow.dataset.Dataset or deltalake.DeltaTable.",
    )
