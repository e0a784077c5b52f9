"""Programs in another Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.settings import ROOT

SECONDS = 400.0


def run_python(
    program: str, *words: str | Path, cwd: Path = ROOT, text: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever its exit code is; ``text`` is its input."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        input=text,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def run_command(*words: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command of stream-assets in another process."""
    return run_python("from stream_assets.cli.main import main; main()", *words, cwd=cwd)
