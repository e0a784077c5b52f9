"""The release 0.1 of this package, from the history of the repository, run in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.settings import ROOT

COMMIT = "3d439c9"
"""It writes batch metadata of format 2, and reads the formats 1 and 2."""
PACKAGES = ("stream_consumers", "spark_jobs", "sensors", "stream_assets")


class OlderRelease:
    """The packages of release 0.1 in a folder.

    Args:
        folder: an empty folder for them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        packed = subprocess.run(["git", "archive", COMMIT, *PACKAGES], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)

    def python(self, code: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run Python code with its packages; ``sys.argv[1:]`` are the words."""
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, words)],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(self._folder)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def command(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command of ``stream-assets``."""
        return self.python("from stream_assets.cli.main import main; main()", *words)
