"""One run, in a process of :mod:`tests.support.killed_runs`."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from spark_jobs.batches.ingestion import RETRY_SECONDS, Batch, Ingestion, Step
from spark_jobs.batches.job import reports_of
from spark_jobs.batches.rebuild import rebuild_events
from spark_jobs.run_ingestion import run_events
from spark_jobs.session import SPARK_VARIABLE, SparkOptions, create_session
from spark_jobs.spark_server.folder import SERVERS_VARIABLE, server_folders
from spark_jobs.writing.keyed import Keys
from stream_assets.testing import Kill, KillSwitch
from stream_consumers.create import StreamSource
from stream_consumers.options import ConsumerMode, ErrorPolicy, Limits
from stream_consumers.urls import StreamUrl
from tests.support.bad_rows import bad_rows
from tests.support.decoders_of_runs import decoder_of
from tests.support.old_and_new import old
from tests.support.settings import SMALL

# A member that stops is missed after a second.
QUICK = {"session.timeout.ms": 1000, "heartbeat.interval.ms": 300}
QUICK_CLAIMS = {"min_idle_seconds": 1.0, "max_deliveries": 3}


class GroupKillSwitch(KillSwitch):
    """Sends the signal to the whole process group, the JVM included."""

    def send(self, kill: Kill) -> None:
        os.killpg(os.getpgid(0), kill.signal)


class ServerKillSwitch(KillSwitch):
    """Sends the signal to the Spark servers that outlive runs, with their JVMs, and lives on."""

    def send(self, kill: Kill) -> None:
        for server in server_folders():
            process = server.process()
            assert process is not None
            os.killpg(process, kill.signal)


def poisonous(rows: DataFrame) -> DataFrame:
    """Ends the process where a row is poison."""
    if not rows.where("user = 'poison'").isEmpty():
        os.kill(os.getpid(), signal.SIGKILL)
    return rows


SWITCHES = {"": KillSwitch, "group": GroupKillSwitch, "server": ServerKillSwitch}


def slow(rows: DataFrame, *, seconds: float = 0.01) -> DataFrame:
    """Takes so long for each row, on an executor."""

    def late(number):  # type: ignore[no-untyped-def]  # Spark would evaluate the annotations
        time.sleep(seconds)
        return number

    return rows.withColumn("id", f.udf(late, "bigint")("id"))


TRANSFORMS = {"poison": poisonous, "old": old, "slow": slow, "bad rows": bad_rows}
# The master of the run, if it is not local, with more settings of Spark as JSON.
MASTER_VARIABLE = "MASTER_OF_THE_RUN"
CONFIG_VARIABLE = "SPARK_OF_THE_RUN"
# Where the table is, if not in the folder of the run: a URI.
TABLE_VARIABLE = "TABLE_OF_THE_RUN"
# Batches of so many messages are read by its driver, not by executors.
DRIVER_RECORDS_VARIABLE = "DRIVER_RECORDS_OF_THE_RUN"
# How long it tries again what may be gone soon.
RETRY_VARIABLE = "RETRY_SECONDS_OF_THE_RUN"
# The options of the keys of its table, and of what it does about new columns, as JSON.
KEYS_VARIABLE = "KEYS_OF_THE_RUN"
SCHEMA_CHANGES_VARIABLE = "SCHEMA_CHANGES_OF_THE_RUN"
# Set if the run is a rebuild.
REBUILD_VARIABLE = "REBUILD_OF_THE_RUN"


def keys_of_run() -> Keys | None:
    """The keys of its table, if its environment has their options."""
    options = os.environ.get(KEYS_VARIABLE)
    return Keys(**json.loads(options)) if options else None


def _session(remote: str, table: str) -> SparkSession:
    """In this process; at a Connect address; or in a server that outlives it, kept in a folder: ``servers:PATH``."""
    kind, _, folder = remote.partition(":")
    if kind == "sc":
        return create_session(SparkOptions(remote=remote))
    if kind == "servers":
        del os.environ[SPARK_VARIABLE]
        os.environ[SERVERS_VARIABLE] = folder
    config = {**SMALL, **json.loads(os.environ.get(CONFIG_VARIABLE, "{}"))}
    master = os.environ.get(MASTER_VARIABLE, "local[1]")
    return create_session(SparkOptions(master=master, config=config, in_process=kind != "servers", table=table))


def main(
    url: str,
    table: str,
    records: str,
    fault: str,
    group: str = "lakehouse",
    mode: str = "resumable",
    remote: str = "",
    member: str = "main",
    transform: str = "",
) -> None:
    name, _, wanted = fault.partition("!")
    # The fault "rebuild:verified" happens only in a batch of kind "rebuild".
    kind, _, name = name.rpartition(":")
    whom, _, how = wanted.rpartition("-")
    kill = Kill.parse(name) if name not in ("", "poison") else None
    observer = None
    if kill is not None:
        kill = replace(kill, signal=signal.Signals[how or "SIGKILL"])
        switch = SWITCHES[whom]
        memory = Path(table).with_name(f"faults-{fault.replace(' ', '-')}")
        observer = switch([kill], table=table, memory=memory)

    def watch(step: Step, batch: Batch | None) -> None:
        print(step.value, batch.number if batch else "", flush=True)
        if observer is not None and (not kind or (batch is not None and batch.kind == kind)):
            observer(step, batch)

    client = QUICK if url.startswith("kafka:") else QUICK_CLAIMS if url.startswith("redis:") else {}
    source = StreamSource(StreamUrl.parse(url), ConsumerMode(mode), client)
    where = os.environ.get(TABLE_VARIABLE, table)
    ingestion = Ingestion(
        group=group,
        table=where,
        decoder=decoder_of(),
        limits=Limits(max_records=int(records)),
        sharing=source.mode,
        claims=source.is_claimed,
        member=member,
        transform=TRANSFORMS.get("poison" if fault == "poison" else transform),
        is_row_wise=transform == "bad rows",
        driver_records=int(os.environ.get(DRIVER_RECORDS_VARIABLE, "0")),
        retry_seconds=float(os.environ.get(RETRY_VARIABLE, RETRY_SECONDS)),
        errors=ErrorPolicy(
            on_bad_rows="dead_letter" if transform == "bad rows" else "fail",
            schema_changes=os.environ.get(SCHEMA_CHANGES_VARIABLE, "fail"),
        ),
        keys=keys_of_run(),
    )
    spark = _session(remote, where)
    with ExitStack() as opened:
        if REBUILD_VARIABLE in os.environ:
            events = rebuild_events(spark, opened.enter_context(source.open()), ingestion, observer=watch)
        else:
            events = run_events(spark, source, ingestion, observer=watch)
        for report in reports_of(events):
            print("report", dict(report.entry.ranges), flush=True)
    print("drained", flush=True)
