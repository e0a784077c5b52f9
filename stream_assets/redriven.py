"""What the run of a redrive job does, and what Dagster is told of it."""

from __future__ import annotations

import dagster as dg
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import BatchReport
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.redrive import Outcome, Redrive, RedriveJob
from spark_jobs.dead_letters import LetterFilter
from spark_jobs.dismissal import Dismissal, dismiss
from stream_assets.config import RedriveConfig
from stream_assets.materializations import Context, Told
from stream_assets.metadata import outcome_metadata, redrive_metadata
from stream_assets.stream_to_table import StreamToTable
from stream_consumers.wording import counted


class RedriveMaterialization(Told):
    """What a redrive has made of dead letters is one materialization, also if it ends with an error.

    Args:
        context: of the run.
        declared: the asset.
        spark: the session.
        outcome: what has become of the dead letters so far.
    """

    def __init__(self, context: Context, declared: StreamToTable, spark: SparkSession, outcome: Outcome) -> None:
        super().__init__(context, declared.key, declared.ingestion, spark)
        self._outcome = outcome

    def add(self, report: BatchReport) -> None:
        """A batch is in the table: say how far the redrive is."""
        super().add(report)
        left = sum(report.lag.values())
        self._context.log.info(
            f"version {report.version} of {self._table} has rows of "
            f"{counted(sum(report.messages.values()), 'dead letter')}; {left} are left to try"
        )

    def tell_rest(self) -> None:
        """The run ends with an error: each batch that was written is right by itself."""
        self._try_to_tell(lambda: self._context.log_event(self._materialization(is_spark_asked=False)))

    def result(self) -> dg.AssetMaterialization | None:
        """What became of them; ``None`` if no row was made."""
        return None if self._sum is None else self._materialization()

    def _materialization(self, *, is_spark_asked: bool = True) -> dg.AssetMaterialization:
        assert self._sum is not None
        metadata = redrive_metadata(self._sum, self._outcome)
        return self._made(metadata, self._sum.last.version, is_spark_asked=is_spark_asked)


def redriven(
    context: Context, declared: StreamToTable, spark: SparkSession, wanted: Redrive, config: RedriveConfig
) -> dg.AssetMaterialization | None:
    """Decode dead letters again, and write those that can be.

    Args:
        context: of the run.
        declared: the asset; its decoder and its transform make the rows.
        spark: the session.
        wanted: which dead letters.
        config: of the run.

    Returns:
        What Dagster is told; ``None`` if no row was made.
    """
    if config.dismiss:
        _dismiss(context, declared, spark, wanted, config)
        return None
    job = RedriveJob(
        spark,
        config.configured(declared.ingestion),
        wanted,
        url=declared.source,
        observer=declared.observer,
        on_wait=context.log.warning,
    )
    if config.dry_run:
        _tell_outcome(context, job.preview(), become="would become rows")
        return None
    told = RedriveMaterialization(context, declared, spark, job.outcome)
    made = told.tell(drain_batches(job, max_batches=config.max_batches))
    _tell_outcome(context, job.outcome, become="became rows")
    return made


def _dismiss(
    context: Context, declared: StreamToTable, spark: SparkSession, wanted: Redrive, config: RedriveConfig
) -> None:
    """Dismiss dead letters in place of decoding them; the page of the run says how many."""
    meant = LetterFilter(declared.source.required_streams(), wanted.span(), config.reason)
    dismissed = dismiss(
        spark,
        config.configured(declared.ingestion),
        meant,
        Dismissal(f"run {context.run_id}", config.dismiss),
        limit=wanted.limit,
        observer=declared.observer,
        on_wait=context.log.warning,
    )
    count = sum(dismissed)
    context.add_output_metadata({"redrive/dismissed": count})
    context.log.info(f"dismissed {counted(count, 'dead letter')}: {config.dismiss}")


def _tell_outcome(context: Context, outcome: Outcome, *, become: str) -> None:
    # Without a row there is no materialization; the run has it in any case.
    context.add_output_metadata(outcome_metadata(outcome))
    context.log.info(f"{counted(outcome.decoded, 'dead letter')} {become}, {outcome.dead} stay what they are")
    for reason, refusal in outcome.refused.items():
        example = f", like {refusal.first}" if refusal.first else ""
        context.log.info(f"{refusal.count} stay dead letters{example}: {reason}")
