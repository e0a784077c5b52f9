"""Reports runs to Dagster: observations of micro-batches, and materializations of the asset."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
from pyspark.sql import SparkSession

from spark_jobs.batches.dead_letter_jobs import Outcome
from spark_jobs.batches.ingestion import BatchReport, Continues, Event, Ingestion, Waiting
from spark_jobs.batches.replay import ReplayPlan, replay_commits
from spark_jobs.ledger.delta_log import Commit
from spark_jobs.run_report import BatchTotals, kept_rows
from spark_jobs.writing.delta_table import read_table
from stream_assets.metadata import (
    PARTITION_METADATA,
    PARTITION_ROW_COUNT,
    PARTITION_ROWS,
    REPORTED_VERSION,
    batch_metadata,
    dead_letter_reasons,
    ingest_metadata,
    materializations_of,
    rebuild_metadata,
    redrive_metadata,
    replay_metadata,
    table_metadata,
)
from stream_assets.partitions import PartitionRows, changed_by, changed_since, rows_in_partitions
from stream_assets.stream_to_table import StreamToTable
from stream_consumers.create import StreamSource
from stream_consumers.display import counted
from stream_consumers.errors import LedgerUnreadableError, TableUnreadableError, log_text

Context = dg.AssetExecutionContext | dg.OpExecutionContext
_DATA_VERSION = "dagster/data_version"
_MAX_LISTED_PARTITIONS = 7
_MAX_REASON_BATCHES = 100
"""How many batches of a run, the newest ones, have the reasons of their dead letters reported at most."""


@dataclass(frozen=True)
class RunScope:
    """The objects of one run. Variables and catalogs are read once, when it is created.

    Args:
        context: the context of the run.
        key: the key of the asset.
        declared: the stream, the table, and their options.
        source: the stream.
        ingestion: the group, the table, and how rows are made.
        spark: the Spark session.
    """

    context: Context
    key: dg.AssetKey
    declared: StreamToTable
    source: StreamSource
    ingestion: Ingestion
    spark: SparkSession

    @classmethod
    def of(cls, context: Context, key: dg.AssetKey, declared: StreamToTable, spark: SparkSession) -> RunScope:
        """Resolve the variables of an asset for a run."""
        return cls(context, key, declared, declared.stream, declared.ingestion, spark)

    @property
    def log(self) -> dg.DagsterLogManager:
        """The log of the run."""
        return self.context.log


class MaterializationReporter(ABC):
    """Reports the batches of a run to Dagster."""

    def __init__(self, run: RunScope) -> None:
        self._run = run
        self._ledger = run.ingestion.ledger()
        self._partitions = run.declared.partitions
        self._totals: BatchTotals | None = None
        # Spark is not used after an error, because Spark may have caused it.
        self._has_failed = False

    def report(self, events: Iterable[Event]) -> dg.AssetMaterialization | None:
        """Report the batches of the run as they arrive, and log why it waits.

        Returns:
            The last materialization of the run; ``None`` if nothing is left to report.
        """
        try:
            for event in events:
                if isinstance(event, BatchReport):
                    self.add(event)
                elif isinstance(event, Continues):
                    self.materialize_if_due()
                else:
                    self._run.log.warning(event.why if isinstance(event, Waiting) else event.what)
        except BaseException:
            self._has_failed = True
            self.report_after_error()
            raise
        return self.result()

    def add(self, report: BatchReport) -> None:
        """Add a batch that was committed."""
        if self._totals is None:
            self._totals = BatchTotals(report)
        self._totals.add(report)

    def materialize_if_due(self) -> None:  # noqa: B027 - most reporters materialize only at the end
        """Materialize the batches so far, in a run that continues."""

    @abstractmethod
    def report_after_error(self) -> None:
        """Report the committed batches of a run that ends with an error."""

    def _report_despite_errors(self, report: Callable[[], None]) -> None:
        """Report the committed batches, if any; a failure to report does not hide the error that ends the run."""
        if self._totals is None:
            return
        batches = self._totals.batches
        try:
            report()
        except Exception as error:  # noqa: BLE001 - the error that ends the run is raised
            self._run.log.warning(
                f"could not report {counted(batches, 'batch', 'batches')} to Dagster: {log_text(error)}"
            )

    @abstractmethod
    def result(self) -> dg.AssetMaterialization | None:
        """Return the last materialization of a run that succeeds; ``None`` if nothing is left to report."""

    def _row_counts(
        self, partitions: dg.TimeWindowPartitionsDefinition, keys: Collection[str]
    ) -> Mapping[str, Mapping[str, dg.MetadataValue]]:
        """Return metadata with the rows of each of these partitions; empty if the table cannot be read."""
        try:
            rows = rows_in_partitions(self._ledger, partitions, keys)
        except (LedgerUnreadableError, TableUnreadableError) as error:
            self._run.log.warning(f"the rows of the partitions cannot be counted: {error}")
            return {}
        return {key: {PARTITION_ROW_COUNT: dg.MetadataValue.int(count)} for key, count in rows.items()}

    def _log_rows_without_partition(self, changed: PartitionRows) -> None:
        if changed.unknown:
            self._run.log.warning(
                f"versions {', '.join(map(str, changed.unknown))} of {self._run.ingestion.table} changed unknown "
                "partitions, because VACUUM removed their files; replay the partitions that may be affected"
            )
        if changed.outside:
            self._run.log.info(f"rows that belong to no partition: {changed.outside}")

    def _build(self, metadata: Mapping[str, dg.MetadataValue], version: int) -> dg.AssetMaterialization:
        log = self._ledger.log
        columns = None if self._has_failed else read_table(self._run.spark, log).schema.fields
        table = table_metadata(self._run.ingestion.table, version=version, total_rows=log.row_count(), columns=columns)
        tags = {_DATA_VERSION: f"delta:{version}"}
        return dg.AssetMaterialization(self._run.key, metadata={**metadata, **table}, tags=tags)


class IngestMaterializations(MaterializationReporter):
    """Reports ingestion: an observation of each batch, and one materialization at the end of the run.

    A run that keeps polling has a batch each second. So it reports, at most every ``every_seconds``, one observation
    and one materialization, both with the sums of the batches since the last ones.

    A downstream asset with automation runs once for each materialization. If a run is killed before it reports, the
    next run reports the batches. An asset with partitions gets a materialization of each partition that was changed
    (the first time, of each partition with rows), and one of the whole asset, because the run is for no partition and
    Dagster would skip downstream assets in a run without a result.

    Args:
        run: the objects of the run.
        every_seconds: the least time between two reports before the end, in seconds; 0 for one per batch, ``None`` for
            only one materialization, at the end, and an observation of each batch.
        clock: returns the time in seconds; for tests.
    """

    def __init__(
        self, run: RunScope, *, every_seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(run)
        self._every_seconds = every_seconds
        self._clock = clock
        self._due_at = clock()
        self._asset_materialization: dg.AssetMaterialization | None = None
        # Separate totals, so that no batch is observed twice if the materialization fails after the observation.
        self._unobserved: BatchTotals | None = None

    def add(self, report: BatchReport) -> None:
        """Add a batch that was committed; in a run that ends by itself, report it as an observation."""
        super().add(report)
        self._unobserved = self._unobserved or BatchTotals(report)
        self._unobserved.add(report)
        if self._every_seconds is None:
            self._log_observation()

    def materialize_if_due(self) -> None:
        """Report the batches so far, unless the last report is too recent."""
        if self._every_seconds is not None and self._totals is not None and self._clock() >= self._due_at:
            self._log_unreported()
            self._due_at = self._clock() + self._every_seconds

    def report_after_error(self) -> None:
        """Report the committed batches, which are in the table although the run fails."""
        self._report_despite_errors(self._log_unreported)

    def result(self) -> dg.AssetMaterialization | None:
        """Return what is left to report of this run or of one that was killed; ``None`` if Dagster knows all batches.

        Partitions are reported as events, and the result is the materialization of the whole asset.
        """
        if self._partitions is not None:
            self._log_unreported()
            return self._asset_materialization
        self._log_observation()
        return next(self._unreported(), None)

    def _log_observation(self) -> None:
        """Report the batches since the last observation as one, which Dagster plots."""
        if self._unobserved is not None:
            observed = dg.AssetObservation(self._run.key, metadata=batch_metadata(self._unobserved))
            self._run.context.log_event(observed)
            self._unobserved = None

    def _log_unreported(self) -> None:
        self._log_observation()
        for made in self._unreported():
            self._run.context.log_event(made)
        # After a failure to report, the next materialization must include these batches, so they are cleared last.
        self._totals = None

    def _unreported(self) -> Iterator[dg.AssetMaterialization]:
        if self._partitions is not None:
            yield from self._by_partition(self._partitions)
            return
        version = self._newest_unreported() if self._totals is None else self._totals.last.version
        if version is not None:
            made = self._build(self._metadata(), version)
            yield _with_metadata(made, {REPORTED_VERSION: dg.MetadataValue.int(version)})

    def _metadata(self) -> dict[str, dg.MetadataValue]:
        """Return metadata of the ingestion, with the reasons of its dead letters."""
        metadata = ingest_metadata(self._totals)
        batches = self._totals.dead_batches[-_MAX_REASON_BATCHES:] if self._totals is not None else ()
        if batches:
            payloads = self._run.declared.errors.dead_letter_payloads
            reasons = dead_letter_reasons(self._run.ingestion, batches=batches, payloads=payloads)
            metadata |= {"ingest/dead_letter_reasons": reasons} if reasons else {}
        return metadata

    def _newest_unreported(self) -> int | None:
        """Return the version of the newest batch of the group; ``None`` if Dagster knows it."""
        known = reported_version(self._run.context.instance, self._run.key)
        for commit in self._ledger.surviving():
            if known is not None and commit.version <= known:
                break
            if commit.entry is not None and commit.entry.kind == "batch":
                return commit.version
        return None

    def _by_partition(self, partitions: dg.TimeWindowPartitionsDefinition) -> Iterator[dg.AssetMaterialization]:
        known = reported_version(self._run.context.instance, self._run.key, of_partitions=True)
        if known is not None and self._totals is not None:
            # A table that was dropped and created again has lower versions than Dagster knows.
            known = min(known, self._totals.first_version - 1)
        found = changed_since(self._ledger, partitions, known)
        if found is None:
            return
        changed, version = found
        self._log_rows_without_partition(changed)
        # A run that wrote a batch is reported, even if its rows belong to no partition or it wrote no rows.
        if not changed.rows and self._totals is None:
            return
        made = self._build(self._metadata(), version)
        counts = self._row_counts(partitions, changed.rows)
        last = max(changed.rows, default=None)
        for partition, rows in changed.rows.items():
            metadata = {PARTITION_ROWS: dg.MetadataValue.int(rows), **counts.get(partition, {})}
            if partition == last:
                # If the run is killed before the last partition, the next run must report all of them again.
                metadata[REPORTED_VERSION] = dg.MetadataValue.int(version)
            yield _for_partition(made, metadata, partition=partition)
        # The reported version belongs to the partitions only.
        self._asset_materialization = made


class ReplayMaterialization(MaterializationReporter):
    """Reports a replay when it is complete; before that, the table has only a part of its rows.

    Args:
        run: the objects of the run.
        replay_id: the id of the replay, which also finds the commits of earlier runs of it that were killed.
        what: descriptions of what is replayed, for the metadata.
    """

    def __init__(self, run: RunScope, *, replay_id: str, what: Mapping[str, str]) -> None:
        super().__init__(run)
        self._replay_id = replay_id
        self._what = what
        self._rows_left_out = 0
        self._messages = 0
        self._left: int | None = None

    def warn_of_kept_rows(self, plan: ReplayPlan) -> None:
        """Warn of rows of the replayed time that the replay does not replace."""
        self._rows_left_out = sum(part.rows for part in plan.left_out.values())
        for note in kept_rows(plan):
            self._run.log.warning(note)

    def add(self, report: BatchReport) -> None:
        """Add a batch that was committed, and log the progress of the replay."""
        super().add(report)
        self._messages += sum(report.messages.values()) + report.dead
        self._left = sum(report.lag.values())
        share = 100 * self._messages // max(1, self._messages + self._left)
        self._run.log.info(f"replayed {counted(self._messages, 'message')}, {share} %; {self._left} left")

    def report_after_error(self) -> None:
        """Log how many messages are left; an incomplete replay is not materialized."""
        if self._left:
            self._run.log.warning(
                f"the replay is incomplete: {counted(self._left, 'message')} left; it is materialized when it is "
                "complete, and a retry of this run continues it"
            )

    def result(self) -> dg.AssetMaterialization | None:
        """Return the materialization of the whole asset; ``None`` if no rows were replaced.

        The changed partitions are reported as events, because the run is not for partitions.
        """
        commits = replay_commits(self._ledger, self._replay_id)
        if self._totals is None and not commits:
            return None
        made = self._replay_materialization()
        if self._partitions is not None:
            self._log_partitions(made, self._partitions, self._changed_rows(self._partitions, commits).rows)
        return made

    def _log_partitions(
        self, made: dg.AssetMaterialization, partitions: dg.TimeWindowPartitionsDefinition, keys: Collection[str]
    ) -> None:
        counts = self._row_counts(partitions, keys)
        for partition in keys:
            self._run.context.log_event(_for_partition(made, counts.get(partition, {}), partition=partition))

    def _replay_materialization(self) -> dg.AssetMaterialization:
        version = self._totals.last.version if self._totals else self._ledger.read().version
        metadata = replay_metadata(self._totals, self._what, rows_left_out=self._rows_left_out)
        return self._build(metadata, version)

    def _changed_rows(self, partitions: dg.TimeWindowPartitionsDefinition, commits: Iterable[Commit]) -> PartitionRows:
        changed = changed_by(self._ledger, partitions, commits)
        self._log_rows_without_partition(changed)
        return changed


class PartitionMaterialization(ReplayMaterialization):
    """Reports a replay of partitions: when it is complete, all of them are materialized, also those without messages.

    Args:
        run: the objects of the run.
        context: the context of the run, with its partitions.
        partitions: the partitions of the asset.
        replay_id: the id of the replay.
    """

    def __init__(
        self,
        run: RunScope,
        context: dg.AssetExecutionContext,
        partitions: dg.TimeWindowPartitionsDefinition,
        replay_id: str,
    ) -> None:
        super().__init__(run, replay_id=replay_id, what={"partitions": describe_partitions(context)})
        self._partition_context = context
        self._time_partitions = partitions

    def result(self) -> dg.AssetMaterialization:
        """Return the result of each partition, and add the number of rows that each one has now."""
        context = self._partition_context
        commits = replay_commits(self._ledger, self._replay_id)
        for partition, count in self._row_counts(self._time_partitions, context.partition_keys).items():
            context.add_asset_metadata(count, asset_key=self._run.key, partition_key=partition)
        made = self._replay_materialization()
        # Late messages of other partitions lie in the replayed ranges, so their rows were replaced, too.
        others = self._changed_rows(self._time_partitions, commits).rows.keys() - set(context.partition_keys)
        self._log_partitions(made, self._time_partitions, sorted(others))
        # Dagster adds the metadata of the result to each of the partitions.
        return _for_partition(made, {})


class RedriveMaterialization(MaterializationReporter):
    """Reports a redrive as one materialization, also if it ends with an error.

    Args:
        run: the objects of the run.
        outcome: the results of the redrive so far.
    """

    def __init__(self, run: RunScope, outcome: Outcome) -> None:
        super().__init__(run)
        self._outcome = outcome

    def add(self, report: BatchReport) -> None:
        """Add a batch that was committed, and log the progress of the redrive."""
        super().add(report)
        left = sum(report.lag.values())
        self._run.log.info(
            f"version {report.version} of {self._run.ingestion.table} has rows of "
            f"{counted(sum(report.messages.values()), 'dead letter')}; {left} are left to try"
        )

    def report_after_error(self) -> None:
        """Materialize the committed batches, each of which is complete by itself."""
        self._report_despite_errors(lambda: self._run.context.log_event(self._materialization()))

    def result(self) -> dg.AssetMaterialization | None:
        """Return the materialization; ``None`` if no dead letter became a row."""
        return None if self._totals is None else self._materialization()

    def _materialization(self) -> dg.AssetMaterialization:
        assert self._totals is not None
        return self._build(redrive_metadata(self._totals, self._outcome), self._totals.last.version)


class RebuildMaterialization(MaterializationReporter):
    """Reports a rebuild when the new rows are in the table; until then, the table has the old ones."""

    def add(self, report: BatchReport) -> None:
        """Log the progress of the staging table; add the swap."""
        if report.entry.kind == "rebuild":
            super().add(report)
            return
        self._run.log.info(
            f"version {report.version} of the staging table: {counted(sum(report.messages.values()), 'message')}, "
            f"{sum(report.lag.values())} left"
        )

    def report_after_error(self) -> None:
        """Log that the rebuild can be continued, or materialize the new rows."""
        if self._totals is None:
            self._run.log.warning("the table is not rebuilt; a retry of this run continues from the staging table")
        self._report_despite_errors(lambda: self._run.context.log_event(self.result()))

    def result(self) -> dg.AssetMaterialization:
        """Return the materialization, also of new rows that a killed run has swapped in."""
        version = self._ledger.read().version if self._totals is None else self._totals.last.version
        return self._build(rebuild_metadata(self._totals), version)


def reported_version(instance: dg.DagsterInstance, key: dg.AssetKey, *, of_partitions: bool = False) -> int | None:
    """Return the version of the table up to which Dagster knows the ingested batches; ``None`` if it knows none.

    Args:
        instance: the Dagster instance.
        key: the key of the asset.
        of_partitions: consider only what was reported of partitions.
    """
    for _, made in materializations_of(instance, key):
        # A replay writes the same table, but does not report the batches that ingestion wrote in the meantime.
        reported = made.metadata.get(REPORTED_VERSION) if made.partition or not of_partitions else None
        if reported is not None and isinstance(reported.value, int):
            return reported.value
    return None


def describe_partitions(context: Context) -> str:
    """Return the partitions of a run as text."""
    keys = context.partition_keys
    return ", ".join(keys) if len(keys) <= _MAX_LISTED_PARTITIONS else f"{len(keys)} from {keys[0]} to {keys[-1]}"


def to_materialize_result(made: dg.AssetMaterialization) -> dg.MaterializeResult[Any]:
    """Convert a materialization to the result of an asset."""
    version = dg.DataVersion((made.tags or {})[_DATA_VERSION])
    return dg.MaterializeResult(made.asset_key, metadata=made.metadata, data_version=version)


def _for_partition(
    made: dg.AssetMaterialization, more: Mapping[str, dg.MetadataValue], *, partition: str | None = None
) -> dg.AssetMaterialization:
    """Return the materialization of one partition, without the totals of the run and of the table."""
    kept = {name: value for name, value in made.metadata.items() if name in PARTITION_METADATA}
    return dg.AssetMaterialization(made.asset_key, metadata={**kept, **more}, partition=partition, tags=made.tags)


def _with_metadata(made: dg.AssetMaterialization, more: Mapping[str, dg.MetadataValue]) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(made.asset_key, metadata={**made.metadata, **more}, tags=made.tags)
