"""``make demo``: the whole way from a stream file to a Delta table under a real Dagster daemon, with two kills."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import dagster as dg
from rich.console import Console
from rich.progress import Progress
from sqlalchemy.exc import OperationalError

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.jars import CACHE_VARIABLE, cache_folder, check_parents, delta_jars, own_folder
from spark_jobs.ledger.table_rows import scan
from spark_jobs.verify import verify
from stream_assets.cli.output import print_rows, progress_bar
from stream_assets.testing import KILLS_VARIABLE
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.display import counted
from stream_consumers.errors import LedgerUnreadableError, UntrustedFileError, WriteError

MALFORMED = 20
SHARDS = 2
FIRST_ROWS = 5
BATCHES = 4
KILLS = "mid-write@3,rows written@4"
FAULTS = 2
WHEN_KILLED = {1: "in the middle of writing a batch", 2: "right after its Delta commit"}
OTHER_FAILURES = 2
RECORDS_VARIABLE = "STREAM_ASSETS_DEMO_RECORDS"
DEADLINE_SECONDS = 1200.0
POLL_SECONDS = 0.5
LONGEST_TEMPORARY_FOLDER = 70
"""In bytes: the path of a socket has at most 107, and its name has up to 32."""
ENDED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
_DAGSTER_YAML = """\
telemetry:
  enabled: false
nux:
  enabled: false
run_monitoring:
  enabled: true
  poll_interval_seconds: 1
run_coordinator:
  module: dagster.core.run_coordinator
  class: QueuedRunCoordinator
  config:
    max_concurrent_runs: 1
    dequeue_interval_seconds: 1
"""
console = Console(highlight=False, emoji=False)


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """The folder of the demo."""

    path: Path
    messages: int
    group: str = "demo"

    @property
    def source(self) -> str:
        """The stream URL."""
        return f"file://{self.path}/orders.ss/orders"

    @property
    def table(self) -> str:
        """The Delta table."""
        return str(self.path / "lake" / "orders")

    @property
    def dagster_home(self) -> Path:
        """Where the daemon keeps its state."""
        return self.path / "dagster"

    def ingestion(self) -> Ingestion:
        """Return the group and the table."""
        return Ingestion(group=self.group, table=self.table)


def run_demo(messages: int) -> int:
    """Run the demo in the folder ``.demo``, which is emptied; return 0 only if each message is written exactly once.

    Args:
        messages: the number of messages; the kills need several thousand.

    Raises:
        UntrustedFileError: another user can put files into the folder.
    """
    folder = DemoFolder((Path.cwd() / ".demo").absolute(), messages)
    make_empty(folder.path)
    folder.dagster_home.mkdir()
    (folder.dagster_home / "dagster.yaml").write_text(_DAGSTER_YAML)
    console.print(f"[bold]stream-assets demo[/] in {folder.path}")
    with progress_bar(console) as progress:
        task = progress.add_task("Delta jars", total=1)
        delta_jars()
        progress.update(task, completed=1)
        produce(folder, progress)
        # Opened before the daemon starts, because two processes cannot create the database at the same time.
        with dg.DagsterInstance.from_config(str(folder.dagster_home)) as instance, _daemon(folder) as log:
            _follow(folder, instance, progress, log)
    print_first_rows(folder)
    _print_ui_command(folder)
    return print_result(folder, kills=len(list((folder.path / "faults").glob("fault-*"))))


def make_empty(path: Path) -> None:
    """Create a folder anew, which only this user can access, because the daemon imports modules from it.

    Raises:
        UntrustedFileError: it cannot be removed, or another user can replace it.
    """
    shutil.rmtree(path, ignore_errors=True)
    check_parents(path)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        raise UntrustedFileError(
            f"{path} cannot be removed: it is a link, or has files of other users",
            remedy="Remove it, or run the command in another folder.",
        ) from None


def produce(folder: DemoFolder, progress: Progress) -> None:
    """Send JSON messages to two shards; some messages are truncated."""
    task = progress.add_task("messages into orders.ss", total=folder.messages)
    spacing = folder.messages // MALFORMED - 1  # odd, so that every shard has some
    with create_producer(folder.source) as producer:
        for index in range(folder.messages):
            text = json.dumps({"id": index, "user": f"user-{index % 997}", "amount": index % 10_000 / 100})
            cut = len(text) // 2 if index % spacing == 0 and index // spacing < MALFORMED else len(text)
            producer.send(text[:cut].encode(), shard=index % SHARDS)
            if index % 1000 == 999:
                progress.update(task, completed=index + 1)


def temporary_folder() -> str:
    """Return a private folder for ``TMPDIR``, in the cache if possible.

    Code servers have their sockets in it, and Spark loads native code from it. It is not removed, because a Spark
    server uses it after the demo has ended, and in a shared folder another user could create it again.
    """
    with suppress(OSError, UntrustedFileError):
        folder = own_folder(cache_folder().absolute()) / "tmp"
        if len(os.fsencode(folder)) <= LONGEST_TEMPORARY_FOLDER:
            folder.mkdir(exist_ok=True)
            folder.chmod(0o700)
            return str(folder)
    return tempfile.mkdtemp()


@contextmanager
def _daemon(folder: DemoFolder) -> Iterator[Path]:
    """Run a real Dagster daemon on the workspace of this project, and end it by its process id."""
    workspace = Path(__file__).parents[1] / "definitions.py"
    environment = {
        **os.environ,
        "TMPDIR": temporary_folder(),
        "DAGSTER_HOME": str(folder.dagster_home),
        "STREAM_ASSETS_DEMO": str(folder.path),
        CACHE_VARIABLE: str(cache_folder().absolute()),
        KILLS_VARIABLE: KILLS,
        RECORDS_VARIABLE: str(folder.messages // BATCHES),
    }
    log = folder.path / "daemon.log"
    command = [sys.executable, "-m", "dagster._daemon", "run", "-f", str(workspace), "-d", str(folder.path)]
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - fixed words
            command,
            env=environment,
            # With -m, Python first searches this folder for modules, also in the processes that the daemon starts.
            cwd=folder.path,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            yield log
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _follow(folder: DemoFolder, instance: dg.DagsterInstance, progress: Progress, log: Path) -> None:
    """Show what the daemon does until a run has succeeded and nothing is left to read.

    Raises:
        WriteError: the demo took too long, or too many runs failed for other reasons than the kills.
    """
    task = progress.add_task("positions in the Delta log", total=folder.messages)
    seen: dict[str, dg.DagsterRunStatus] = {}
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        for record in reversed(_records(instance)):
            run = record.dagster_run
            if seen.get(run.run_id) is not run.status:
                _print_run(folder, run, seen)
        done = covered(folder)
        progress.update(task, completed=done)
        failures = sum(status is dg.DagsterRunStatus.FAILURE for status in seen.values())
        if done == folder.messages and seen and all(status in ENDED for status in seen.values()):
            return
        if failures > FAULTS + OTHER_FAILURES:
            break
        time.sleep(POLL_SECONDS)

    raise WriteError(
        "the demo did not finish",
        remedy=f"Read {log}.",
        covered=covered(folder),
        runs=len(seen),
    )


def _records(instance: dg.DagsterInstance) -> Sequence[dg.RunRecord]:
    try:
        return instance.get_run_records(limit=10)
    except OperationalError:
        # SQLite is busy: the daemon and the runs write to it, too.
        return []


def _print_run(folder: DemoFolder, run: dg.DagsterRun, seen: dict[str, dg.DagsterRunStatus]) -> None:
    seen[run.run_id] = run.status
    what = {
        dg.DagsterRunStatus.QUEUED: f"was requested by the sensor: lag {run.tags.get('stream_assets/lag')}",
        dg.DagsterRunStatus.STARTED: "started",
        dg.DagsterRunStatus.SUCCESS: "[green]succeeded[/]",
    }.get(run.status)
    if run.status is dg.DagsterRunStatus.FAILURE:
        failed = sum(status is dg.DagsterRunStatus.FAILURE for status in seen.values())
        kills = len(list((folder.path / "faults").glob("fault-*")))
        how = f"killed with SIGKILL {WHEN_KILLED.get(kills, '')}" if failed <= kills else "failed, and is retried"
        what = f"[red]{how}[/]; the ledger has {counted(covered(folder), 'message')}"
    if what:
        console.print(f"  run {run.run_id[:8]} {what}", soft_wrap=True)


def covered(folder: DemoFolder) -> int:
    """Return how many messages are in the table, by the positions in its Delta log."""
    try:
        state = folder.ingestion().ledger().read()
    except LedgerUnreadableError:
        return 0
    return sum(position - 1 for position in state.positions.values())


def print_first_rows(folder: DemoFolder) -> None:
    """Print some rows of the table."""
    log = folder.ingestion().ledger().log
    beginning = [row for batch in scan(log, where=f"_sequence <= {FIRST_ROWS}") for row in batch.to_pylist()]
    print_rows(
        sorted(beginning, key=lambda row: row["id"])[:FIRST_ROWS],
        title=f"first rows of {folder.table}",
        console=console,
    )


def _print_ui_command(folder: DemoFolder) -> None:
    """Print how to view the runs; Dagster's web server is an extra, because nothing else needs it."""
    if find_spec("dagster_webserver") is None:
        console.print("to see the runs in the Dagster UI, first: pip install 'stream-assets[demo]'", markup=False)
    values = {
        "DAGSTER_HOME": folder.dagster_home,
        "STREAM_ASSETS_DEMO": folder.path,
        "TMPDIR": temporary_folder(),
    }
    names = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in values.items())
    console.print(
        f"the Dagster UI of these runs: {names} dg dev -m stream_assets.definitions", markup=False, soft_wrap=True
    )


def print_result(folder: DemoFolder, *, kills: int) -> int:
    """Compare the stream with the table, and print the result; return 0 only if each message was written exactly once.

    Args:
        folder: the folder of the demo.
        kills: how many runs were killed.
    """
    with open_batch_source(folder.source) as source:
        verdicts = verify(source, folder.ingestion())
    names = ("first", "last", "messages", "rows", "dead", "missing", "duplicated", "lag")
    rows = [{"shard": str(verdict.shard), **{name: getattr(verdict, name) for name in names}} for verdict in verdicts]
    print_rows(rows, title="by sequence numbers", console=console)
    counts = ("messages", "rows", "dead", "missing", "duplicated", "unknown", "lag")
    counted = {name: sum(getattr(verdict, name) for verdict in verdicts) for name in counts}
    console.print(
        "demo: {messages} produced, {rows} rows, {dead} dead letters, {missing} missing, {duplicated} duplicated, "
        "lag {lag}".format(**counted),
        soft_wrap=True,
    )
    expected = [folder.messages, folder.messages - MALFORMED, MALFORMED, 0, 0, 0, 0]
    return 0 if [*counted.values()] == expected and kills == FAULTS else 1
