"""The Spark resource. Any other resource with a ``spark_session`` works in its place."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg
from pydantic import ConfigDict, Field, PrivateAttr
from pyspark.sql import SparkSession

from spark_jobs.jars import download_note
from spark_jobs.session import SparkOptions, create_session, running_session
from spark_jobs.table_location import is_s3
from stream_assets.catalogs import CatalogTable
from stream_assets.delta_lake import LakeTable


class SparkSessionResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # the class is generic only inside Dagster
    """A Spark session that can write Delta tables: local, on a master, or over Spark Connect.

    The session is made when it is first asked for, and stopped after the run if this made it. A local Spark is a server
    that outlives the run, so that the next one does not wait for a JVM; ``stream-assets spark status`` shows it.

    Example:
        >>> SparkSessionResource(master="local[2]").remote is None
        True
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, coerce_numbers_to_str=True)

    master: str = Field(default="local[*]", description="The Spark master; not used with `remote`.")
    remote: str | None = Field(default=None, repr=False, description="A Spark Connect address, sc://host:port.")
    in_process: bool = Field(default=False, description="Start a local Spark for each run, in its process.")
    spark_config: dict[str, str] = Field(default_factory=dict, repr=False, description="More Spark settings.")

    _session: SparkSession | None = PrivateAttr(default=None)
    _is_own: bool = PrivateAttr(default=False)

    @property
    def spark_session(self) -> SparkSession:
        """The session.

        Raises:
            SparkSessionError: it cannot be had.
            MissingDependencyError: there is no Java.
        """
        return self.session_for("", {})

    def session_for(self, table: str, storage_options: Mapping[str, str]) -> SparkSession:
        """The session; if it is made now, Spark gets what it needs to write a table in an object store.

        Args:
            table: a path or URI.
            storage_options: for the table, as delta-rs has them.

        Raises:
            SparkSessionError: it cannot be had.
            MissingDependencyError: there is no Java, or jars cannot be downloaded.
        """
        if self._session is None:
            self._is_own = running_session() is None
            self._session = create_session(
                SparkOptions(
                    master=self.master,
                    remote=self.remote,
                    config=self.spark_config,
                    in_process=self.in_process,
                    table=table,
                    storage_options=storage_options,
                )
            )
        return self._session

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Stop the session if this resource made it."""
        session, self._session = self._session, None
        if session is not None and self._is_own:
            session.stop()


@contextmanager
def run_session(context: Any, spark: Any, table: LakeTable | CatalogTable) -> Iterator[SparkSession]:
    """The session of a run.

    Args:
        context: of the run, or of a resource of it.
        spark: a resource, or the key of one; ``None`` for a local Spark.
        table: what the run writes or reads.
    """
    if isinstance(spark, str):
        yield _session_of(context, getattr(context.resources, spark), table)
        return
    resource = SparkSessionResource() if spark is None else spark
    # A resource of the asset's own is set up here, not by Dagster: so that it has no key that another asset could have,
    # and no place in the run config, where a launchpad would keep its settings.
    with dg.build_resources({"spark": resource}, instance=context.instance) as resources:
        yield _session_of(context, resources.spark, table)


def _session_of(context: Any, resource: Any, table: LakeTable | CatalogTable) -> SparkSession:
    """The session of a resource. Starting one may take minutes, in which the log of a run would say nothing."""
    note = None if getattr(resource, "remote", None) else download_note(with_s3=is_s3(table.path))
    context.log.info(f"waiting for Spark; {note}" if note else "waiting for Spark")
    since = time.monotonic()
    session: SparkSession
    if isinstance(resource, SparkSessionResource):
        session = resource.session_for(table.path, table.options())
    else:
        session = resource.spark_session
    context.log.info(f"Spark is ready after {time.monotonic() - since:.1f} s")
    return session
