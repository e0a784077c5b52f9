"""One redrive in a process of :mod:`tests.support.killed_runs`."""

from __future__ import annotations

from pathlib import Path

from spark_jobs.batches.dead_letter_jobs import Redrive, RedriveJob
from spark_jobs.batches.ingestion import Batch, Ingestion, Step
from spark_jobs.batches.job import drain_batches
from spark_jobs.session import SparkOptions, create_session
from stream_assets.testing import Kill, KillSwitch
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl
from tests.support.decoders_of_runs import decoder_of
from tests.support.settings import SMALL


def main(url: str, table: str, records: str, fault: str, group: str, remote: str) -> None:
    kills = [Kill.parse(fault)] if fault else []
    observer = KillSwitch(kills, table=table, memory=Path(table).with_name(f"faults-{fault.replace(' ', '-')}"))

    def watch(step: Step, batch: Batch | None) -> None:
        print(step.value, batch.number if batch else "", flush=True)
        observer(step, batch)

    what = Ingestion(group, table, decoder_of(), limits=Limits(max_records=int(records)))
    spark = create_session(SparkOptions(master="local[1]", remote=remote or None, config={} if remote else SMALL))
    job = RedriveJob(spark, what, Redrive(), url=StreamUrl.parse(url), observer=watch)
    for report in drain_batches(job):
        print("report", report.rows, flush=True)
    print("done", job.outcome, flush=True)
