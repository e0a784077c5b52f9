"""One replay, one rebuild, or one rewind and the ingestion behind it, in a process of :mod:`tests.support.killed_runs`.

With a stop it is a replay; without a start, a rebuild.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from spark_jobs.batches import replay as rewinding
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.ingestion import Batch, Ingestion, Step
from spark_jobs.batches.job import drain_batches, reports_of
from spark_jobs.batches.rebuild import rebuild_events
from spark_jobs.batches.replay import Replay, ReplayJob, rewind
from spark_jobs.run_ingestion import drain
from spark_jobs.session import SparkOptions, create_session
from stream_assets.testing import Kill, KillSwitch
from stream_consumers.create import StreamSource
from stream_consumers.options import Limits
from stream_consumers.urls import StreamUrl
from tests.support.decoders_of_runs import decoder_of
from tests.support.old_and_new import new
from tests.support.one_run import keys_of_run
from tests.support.settings import SMALL

MOVED = "moved"


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(
    url: str,
    table: str,
    records: str,
    fault: str,
    group: str,
    remote: str,
    run_id: str,
    start: str = "",
    stop: str = "",
) -> None:
    kills = [Kill.parse(fault)] if fault not in ("", MOVED) else []
    observer = KillSwitch(kills, table=table, memory=Path(table).with_name(f"faults-{fault.replace(' ', '-')}"))
    if fault == MOVED:
        # Behind the commit of the rewind, before the broker is told.
        rewinding._commit_to_broker = die

    def watch(step: Step, batch: Batch | None) -> None:
        print(step.value, batch.number if batch else "", flush=True)
        observer(step, batch)

    source = StreamSource(StreamUrl.parse(url))
    what = Ingestion(group, table, decoder_of(), new, limits=Limits(max_records=int(records)), keys=keys_of_run())
    spark = create_session(SparkOptions(master="local[1]", remote=remote or None, config={} if remote else SMALL))
    with source.open() as opened:
        if stop:
            wanted = Replay(Bound.parse(start), Bound.parse(stop), id=run_id)
            reports = drain_batches(ReplayJob(spark, opened, what, wanted, observer=watch))
        elif start:
            rewind(spark, opened, what, Bound.parse(start), replay_id=run_id)
            reports = drain(spark, source, what, observer=watch)
        else:
            reports = reports_of(rebuild_events(spark, opened, what, observer=watch))
        for report in reports:
            print("report", dict(report.entry.ranges), flush=True)
    print("done", flush=True)
