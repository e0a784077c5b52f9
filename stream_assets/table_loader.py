"""IO manager with which downstream assets load the table of a stream asset, at one version for a whole run.

An asset whose function has a parameter ``orders`` gets the table of the asset ``orders``. The annotation of the
parameter selects the type: a Spark DataFrame, an Arrow table, a Polars or pandas frame, or a ``deltalake.DeltaTable``.
The table is pinned to the version of the last materialization before the run was created, so all assets of the run see
one version. If that version was removed by a cleanup, the newest version is loaded.

A keyed table with ``sequence_by`` is loaded without the rows that mark deleted keys, except as a ``DeltaTable``.

delta-rs reads frames and Arrow tables. It supports column mapping and deletion vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any, cast
from urllib.parse import unquote

import dagster as dg
import pyarrow as pa
import pyarrow.fs
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.writing.delta_table import read_table
from stream_assets.metadata import MATERIALIZATIONS_PER_PAGE, VERSION, materializations_of
from stream_assets.partitions import window_condition
from stream_assets.resources import run_session
from stream_assets.stream_to_table import StreamToTable
from stream_consumers.errors import InvalidOptionError, TableUnreadableError


class TableLoader(dg.IOManager):
    """Loads the table of a stream asset; the runs of the asset write it themselves.

    Args:
        declared: the stream, the table, and their options.
        spark: creates a session for the table; called only for a Spark DataFrame.
    """

    def __init__(self, declared: StreamToTable, spark: Callable[[StreamToTable], SparkSession]) -> None:
        self._declared = declared
        self._spark = spark

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        """Do nothing, because the run has already written the table."""

    def load_input(self, context: dg.InputContext) -> Any:
        """Load the table as the type that the parameter is annotated with.

        Raises:
            InvalidOptionError: the table cannot be loaded as that type.
        """
        declared = self._declared.located(context.instance)
        log = DeltaLog(declared.table.path, storage_options=declared.table.options())
        wanted, condition = context.dagster_type.typing_type, _condition(declared, _window(context))
        with log.reading():
            table = _table(context, log)
        context.log.info(f"loading {log.path} at version {table.version()}")
        if wanted is Any or (isinstance(wanted, type) and issubclass(wanted, DataFrame)):
            frame = read_table(self._spark(declared), log, version=table.version())
            return frame.where(condition) if condition else frame
        return _load_as(wanted, log, table, condition)


def build_table_loader(declared: StreamToTable) -> dg.IOManagerDefinition:
    """Build the IO manager of an asset. It has no config, and its key belongs to this asset only."""
    keys = {declared.spark} if isinstance(declared.spark, str) else set()

    def load(context: dg.InitResourceContext) -> Iterator[TableLoader]:
        with ExitStack() as stack:
            yield TableLoader(declared, lambda one: stack.enter_context(run_session(context, one.spark, one.table)))

    # Dagster accepts a generator, and closes it after the run, although the type of the argument does not allow one.
    make = cast("Callable[[dg.InitResourceContext], dg.IOManager]", load)
    return dg.IOManagerDefinition(make, required_resource_keys=keys, description=f"Loads the table {declared.table}.")


def _table(context: dg.InputContext, log: DeltaLog) -> DeltaTable:
    """Open the pinned version; the newest one if no version is pinned, or the pinned one is gone."""
    version = pinned_version(context)
    newest = log.open()
    if version is None or version == newest.version():
        return newest
    try:
        pinned = log.open(version)
    except TableUnreadableError:
        # The version was cleaned from the log, or the table was dropped and has fewer versions now.
        pinned = None
    if pinned is not None and _has_its_files(pinned, newest, log):
        return pinned
    context.log.warning(
        f"version {version} of {log.path}, which was last materialized, is gone: it was cleaned up, or the table was "
        f"recreated; the newest version {newest.version()} is loaded instead"
    )
    return newest


def pinned_version(context: dg.InputContext) -> int | None:
    """Return the version of the table that a run must see.

    That is the version that this run materialized, or the one of the last materialization before the run was created.
    ``None`` if there was no materialization.
    """
    run_id, instance, key = context.step_context.run_id, context.instance, context.asset_key
    record = instance.get_run_record_by_id(run_id)
    made = None if record is None else record.create_timestamp.timestamp()
    since = dg.AssetRecordsFilter(key, after_timestamp=made)
    before = dg.AssetRecordsFilter(key, before_timestamp=made)
    own = (one for by, one in islice(materializations_of(instance, since), MATERIALIZATIONS_PER_PAGE) if by == run_id)
    others = (one for _, one in islice(materializations_of(instance, before), MATERIALIZATIONS_PER_PAGE))
    versions = (one.metadata[VERSION].value for one in chain(own, others) if VERSION in one.metadata)
    return next((version for version in versions if isinstance(version, int)), None)


def _window(context: dg.InputContext) -> dg.TimeWindow | None:
    """Return the time of the partitions to load; ``None`` for the whole table."""
    if not context.has_asset_partitions:
        return None
    loads = context.step_context.assets_def
    mapping = loads.get_partition_mapping(context.asset_key) if loads else None
    has_none = loads is None or loads.partitions_def is None
    # Partitions may not cover all rows: a day that is not over, or the time before the first one, may have none.
    if isinstance(mapping, dg.AllPartitionMapping) or (mapping is None and has_none):
        return None
    return context.asset_partitions_time_window


def _condition(declared: StreamToTable, window: dg.TimeWindow | None) -> str:
    """Return the SQL condition of the rows to load; empty for all of them."""
    shown = declared.keys.shown_where if declared.keys is not None else ""
    return " AND ".join(filter(None, [window_condition(window) if window else "", shown]))


def _has_its_files(pinned: DeltaTable, newest: DeltaTable, log: DeltaLog) -> bool:
    """Return whether all data files of a version exist; those that the newest version has are not looked for."""
    removed = _paths(pinned) - _paths(newest)
    if not removed:
        return True
    found = log.files().get_file_info(pyarrow.fs.FileSelector("", recursive=True))
    there = {info.path for info in found}
    # After a clone, the files of the source table are listed by their URIs.
    return all(path in there or unquote(path) in there or "://" in path for path in removed)


def _paths(table: DeltaTable) -> set[str]:
    return set(map(str, pa.table(table.get_add_actions()).column("path").to_pylist()))


def _load_as(wanted: Any, log: DeltaLog, table: DeltaTable, condition: str) -> Any:
    if wanted is DeltaTable:
        return table
    module, name = getattr(wanted, "__module__", ""), getattr(wanted, "__name__", str(wanted))
    kind = f"{module.partition('.')[0]}.{name}"
    if wanted is pa.Table:
        return _arrow_table(log, table, condition)
    if kind == "pandas.DataFrame":
        return _arrow_table(log, table, condition).to_pandas()
    if kind in ("polars.DataFrame", "polars.LazyFrame"):
        import polars  # noqa: PLC0415 - an optional dependency

        frame = polars.DataFrame(_arrow_table(log, table, condition))
        return frame.lazy() if name == "LazyFrame" else frame
    raise InvalidOptionError(
        f"a table cannot be loaded as {module}.{name}",
        remedy="Annotate the parameter with a Spark, pandas or Polars DataFrame, pyarrow.Table or "
        "deltalake.DeltaTable.",
    )


def _arrow_table(log: DeltaLog, table: DeltaTable, condition: str) -> pa.Table:
    with log.reading():
        found = pa.table(table.scan(predicate=condition or None))
        # pyarrow accepts the Arrow schema of delta-rs.
        schema: Any = table.schema().to_arrow()
        # The scan returns string views, which fewer readers support.
        return found.cast(pa.schema(schema))
