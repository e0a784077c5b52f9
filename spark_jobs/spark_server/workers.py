"""The Python workers of a server's sessions: each session has its own, and they end with it.

Spark keys the daemons that fork workers by session, so that no run meets modules that another one imported. But it
starts them in a folder of the session, and never ends them. So the interpreter that a server has for its workers is a
script that runs this module: it works where the run works, and writes down which session it is for.
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
    """Write the script.

    Args:
        path: the script.
        python: the interpreter that it runs.
        folder: for the files that say which daemons there are.
    """
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        # Of sessions of servers that have ended.
        file.unlink(missing_ok=True)
    command = shlex.join([*worker_python(python, f"from {__name__} import main; main(sys.argv[1:])"), str(folder)])
    lines = [
        "#!/bin/sh",
        # What is no module is no worker: Spark asks the interpreter for its version.
        f'[ "$1" = -m ] || exec {shlex.quote(python)} "$@"',
        f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
        f'exec {command} "$@"',
    ]
    path.write_text("\n".join([*lines, ""]))
    path.chmod(0o700)


def end_workers(folder: Path, session: str) -> None:
    """End the daemons of a session, with their workers; one that Spark still starts for it ends at once."""
    _ended(folder, session).touch()
    for file in folder.glob(f"{session}.*"):
        # A daemon that sees that its session has ended removes its file by itself.
        with suppress(FileNotFoundError, ProcessLookupError), file.open("r+") as opened:
            process = int(file.suffix[1:])
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # The lock is held by the daemon or by workers that it forked, so that the number is theirs.
                os.kill(process, signal.SIGTERM)
        file.unlink(missing_ok=True)


def _ended(folder: Path, session: str) -> Path:
    """Is there when the session has ended."""
    return folder / f"ended.{session}"


def main(words: list[str]) -> None:
    """Become what Spark asks for: ``-m pyspark.daemon pyspark.worker``, for instance."""
    folder, _, module, *rest = words
    session = os.environ.get(SESSION_VARIABLE, "none")
    file = Path(folder) / f"{session}.{os.getpid()}"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    if _ended(Path(folder), session).exists():
        # A query went on while the session was closed. Either that is known here, or the file was seen there.
        file.unlink(missing_ok=True)
        sys.exit(f"the session {session} has ended")
    # Where a shell ignores SIGINT (nohup), Dagster lets all that it starts ignore SIGTERM: nobody could end it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
