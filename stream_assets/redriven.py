"""What the run of a redrive job does, and what Dagster is told of it."""

from __future__ import annotations

import dagster as dg

from spark_jobs.batches.dead_letter_jobs import Dismissal, DismissJob, Outcome, Redrive, RedriveJob
from spark_jobs.batches.ingestion import BatchReport, Waiting
from spark_jobs.batches.job import batch_events
from spark_jobs.dead_letters.reader import LetterFilter
from stream_assets.config import RedriveConfig
from stream_assets.materializations import Context, RunScope, Told
from stream_assets.metadata import outcome_metadata, redrive_metadata
from stream_consumers.wording import counted


class RedriveMaterialization(Told):
    """What a redrive has made of dead letters is one materialization, also if it ends with an error.

    Args:
        run: what it works with.
        outcome: what has become of the dead letters so far.
    """

    def __init__(self, run: RunScope, outcome: Outcome) -> None:
        super().__init__(run)
        self._outcome = outcome

    def add(self, report: BatchReport) -> None:
        """A batch is in the table: say how far the redrive is."""
        super().add(report)
        left = sum(report.lag.values())
        self._run.log.info(
            f"version {report.version} of {self._run.ingestion.table} has rows of "
            f"{counted(sum(report.messages.values()), 'dead letter')}; {left} are left to try"
        )

    def tell_rest(self) -> None:
        """The run ends with an error: each batch that was written is right by itself."""
        self._try_to_tell(lambda: self._run.context.log_event(self._materialization()))

    def result(self) -> dg.AssetMaterialization | None:
        """What became of them; ``None`` if no row was made."""
        return None if self._sum is None else self._materialization()

    def _materialization(self) -> dg.AssetMaterialization:
        assert self._sum is not None
        return self._made(redrive_metadata(self._sum, self._outcome), self._sum.last.version)


def redriven(run: RunScope, wanted: Redrive, config: RedriveConfig) -> dg.AssetMaterialization | None:
    """Decode dead letters again, and write those that can be.

    Args:
        run: what it works with; the decoder and the transform of the asset make the rows.
        wanted: which dead letters.
        config: of the run.

    Returns:
        The materialization; ``None`` if no row was made.
    """
    if config.dismiss:
        _dismiss(run, wanted, config)
        return None
    job = RedriveJob(
        run.spark,
        run.ingestion,
        wanted,
        url=run.source.url,
        observer=run.declared.observer,
    )
    if config.dry_run:
        _tell_outcome(run.context, job.preview(), become="would become rows")
        return None
    told = RedriveMaterialization(run, job.outcome)
    made = told.tell(batch_events(job, max_batches=config.max_batches))
    _tell_outcome(run.context, job.outcome, become="became rows")
    return made


def _dismiss(run: RunScope, wanted: Redrive, config: RedriveConfig) -> None:
    """Dismiss dead letters in place of decoding them; the page of the run says how many."""
    meant = LetterFilter(run.source.url.required_streams(), wanted.span(), config.reason)
    job = DismissJob(
        run.spark,
        run.ingestion,
        meant,
        Dismissal(f"run {run.context.run_id}", config.dismiss),
        limit=wanted.limit,
        observer=run.declared.observer,
    )
    count = 0
    for event in batch_events(job):
        if isinstance(event, BatchReport):
            count += event.dead
        elif isinstance(event, Waiting):
            run.log.warning(event.why)
    run.context.add_output_metadata({"redrive/dismissed": count})
    run.context.log.info(f"dismissed {counted(count, 'dead letter')}: {config.dismiss}")


def _tell_outcome(context: Context, outcome: Outcome, *, become: str) -> None:
    # Without a row there is no materialization; the run has it in any case.
    context.add_output_metadata(outcome_metadata(outcome))
    context.log.info(f"{counted(outcome.decoded, 'dead letter')} {become}, {outcome.dead} stay what they are")
    for reason, refusal in outcome.refused.items():
        example = f", like {refusal.first}" if refusal.first else ""
        context.log.info(f"{refusal.count} stay dead letters{example}: {reason}")
