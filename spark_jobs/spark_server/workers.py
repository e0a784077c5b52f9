"""Starts and ends the Python workers of a server's sessions: each session has its own, which end with the session.

Spark has a daemon per session that forks its workers, so that a run never sees modules that another run imported. But
Spark starts the daemon in a folder of the session, and never ends it. So a server gives Spark a script as the
interpreter. The script runs this module, which changes to the working folder of the run and records its session.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path

from spark_jobs.python_start import worker_python

SESSION_VARIABLE = "SPARK_JOB_ARTIFACT_UUID"


def write_interpreter(path: Path, *, python: str, folder: Path) -> None:
    """Write the script that Spark starts as the Python interpreter.

    Args:
        path: the script.
        python: the interpreter that the script runs.
        folder: the folder of the files that daemons hold locked.
    """
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        # These are left from servers that have ended.
        file.unlink(missing_ok=True)
    command = shlex.join([*worker_python(python, f"from {__name__} import main; main(sys.argv[1:])"), str(folder)])
    lines = [
        "#!/bin/sh",
        # Spark also calls the interpreter without -m, to get its version; that is not a worker.
        f'[ "$1" = -m ] || exec {shlex.quote(python)} "$@"',
        f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
        f'exec {command} "$@"',
    ]
    path.write_text("\n".join([*lines, ""]))
    path.chmod(0o700)


def end_workers(folder: Path, session: str) -> None:
    """End the daemons of a session with their workers; a daemon that Spark starts for it afterwards ends at once."""
    _ended(folder, session).touch()
    for file in folder.glob(f"{session}.*"):
        # A daemon whose session has ended may remove its file itself.
        with suppress(FileNotFoundError, ProcessLookupError), file.open("r+") as opened:
            process = int(file.suffix[1:])
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # The daemon or workers that it forked hold the lock, so that the process id is still theirs.
                os.kill(process, signal.SIGTERM)
        file.unlink(missing_ok=True)


def _ended(folder: Path, session: str) -> Path:
    """Return the file whose presence means that the session has ended."""
    return folder / f"ended.{session}"


def main(words: list[str]) -> None:
    """Register this daemon for its session, and run the module that Spark names, such as ``-m pyspark.daemon``."""
    folder, _, module, *rest = words
    session = os.environ.get(SESSION_VARIABLE, "none")
    file = Path(folder) / f"{session}.{os.getpid()}"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    if _ended(Path(folder), session).exists():
        # A query was running while the session was closed. Either this check or end_workers() ends the daemon.
        file.unlink(missing_ok=True)
        sys.exit(f"the session {session} has ended")
    # Where a shell ignores SIGINT (nohup), Dagster's children ignore SIGTERM, and end_workers() could not end them.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
