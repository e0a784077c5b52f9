"""One run in a process of its own, to be killed: ``python -m tests.spark.one_run URL TABLE RECORDS FAULT``."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from spark_jobs.decode import Json
from spark_jobs.ingest import IngestJob
from spark_jobs.ingestion import Batch, Ingestion, Step
from spark_jobs.session import SparkOptions, create_session
from stream_assets.testing import Kill, KillSwitch
from stream_consumers.connect import open_batch_source
from stream_consumers.options import Limits
from tests.conftest import SHORT_LIVED


class GroupKillSwitch(KillSwitch):
    """Sends the signal to the whole process group, the JVM included."""

    def send(self, kill: Kill) -> None:
        os.killpg(os.getpgid(0), kill.signal)


def main(url: str, table: str, records: str, fault: str) -> None:
    name, _, wanted = fault.partition("!")
    group = wanted.startswith("group-")
    kill = Kill.parse(name) if name else None
    observer = None
    if kill is not None:
        kill = replace(kill, signal=signal.Signals[wanted.removeprefix("group-") or "SIGKILL"])
        switch = GroupKillSwitch if group else KillSwitch
        observer = switch([kill], table=table, memory=Path(table).with_name("faults"))

    def watch(step: Step, batch: Batch | None) -> None:
        print(step.value, batch.number if batch else "", flush=True)
        if observer is not None:
            observer(step, batch)

    ingestion = Ingestion(
        group="lakehouse",
        table=table,
        decoder=Json("id BIGINT, user STRING"),
        limits=Limits(max_records=int(records)),
    )
    with open_batch_source(url) as source:
        job = IngestJob(
            create_session(SparkOptions(master="local[1]", config=SHORT_LIVED)), source, ingestion, observer=watch
        )
        while (batch := job.plan()) is not None:
            job.run(batch)
    print("drained", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
