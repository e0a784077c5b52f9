"""A project as ``create-dagster`` lays it out, made by a test."""

from __future__ import annotations

import importlib
import os
import secrets
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from tests.support.settings import ROOT

# A command takes four seconds when nothing else runs.
PATIENCE = 120


@dataclass(frozen=True)
class DgProject:
    """A project.

    Args:
        root: its folder.
        package: the name of its package; no two in one process are alike, since Python remembers what it imports.
    """

    root: Path
    package: str

    @classmethod
    def make(cls, folder: Path, *, package: str | None = None) -> DgProject:
        project = cls(folder / "project", package or f"project_{secrets.token_hex(4)}")
        project.write("__init__.py", "")
        project.write("defs/__init__.py", "")
        project.write(
            "definitions.py",
            """
            from pathlib import Path
            import dagster as dg

            @dg.definitions
            def defs():
                return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
            """,
        )
        (project.root / "pyproject.toml").write_text(
            f'[project]\nname = "{project.package}"\nversion = "0.1.0"\n\n[tool.dg]\ndirectory_type = "project"\n\n'
            f'[tool.dg.project]\nroot_module = "{project.package}"\n'
        )
        return project

    @property
    def source(self) -> Path:
        """The folder that has the package."""
        return self.root / "src"

    def write(self, path: str, text: str) -> None:
        """Write a file of the package."""
        place = self.source / self.package / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(textwrap.dedent(text))

    def load(self) -> dg.Definitions:
        """What Dagster makes of it, in this process; the package can be imported as long as it is on the path."""
        importlib.invalidate_caches()
        return dg.load_from_defs_folder(path_within_project=self.source / self.package)

    def dg(self, *words: str) -> str:
        """What a command of ``dg`` prints in it."""
        done = subprocess.run(
            [str(Path(sys.executable).with_name("dg")), *words],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{self.source}", "COLUMNS": "200", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
