"""Airflow in an environment of its own, with a database of SQLite in a folder of the test."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.settings import ROOT

NEWEST = "3.3.2"
LOWEST = "3.0.0"
# The first installation downloads some 300 MB.
INSTALL_SECONDS = 900.0
SECONDS = 300.0


@dataclass(frozen=True)
class AirflowHome:
    """The home of an Airflow, whose programs run with this checkout.

    Args:
        folder: the home; ``dags`` in it has the files of DAGs.
        place: the environment.
        variables: more environment variables of its programs.
    """

    folder: Path
    place: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path, version: str = NEWEST) -> AirflowHome:
        """Make the environment if it is missing, and a home with an empty database."""
        made = subprocess.run(
            [ROOT / "tools" / "airflow", version],
            check=True,
            timeout=INSTALL_SECONDS,
            stdout=subprocess.PIPE,
            text=True,
        )
        # Airflow's files have passwords, and all users can read them.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        home = cls(folder, (ROOT / made.stdout.strip()).parents[1])
        home.dags.mkdir(parents=True)
        shutil.copy(home.place / "home" / "airflow.db", folder)
        return home

    @property
    def dags(self) -> Path:
        """The folder with the files of DAGs."""
        return self.folder / "dags"

    def environment(self, **variables: str) -> dict[str, str]:
        """The environment variables of all programs of this Airflow."""
        return {
            **os.environ,
            "AIRFLOW_HOME": str(self.folder),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.dags),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.folder}/airflow.db",
            "PATH": f"{self.place / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            **self.variables,
            **variables,
        }

    def run(self, *command: str | Path, seconds: float = SECONDS, **variables: str) -> str:
        """Run a program of the environment to its end, which must be a success; returns what it printed."""
        done = subprocess.run(
            [self.place / "bin" / command[0], *map(str, command[1:])],
            cwd=self.folder,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-20_000:]
        return done.stdout

    def python(self, program: str, *words: str | Path, **variables: str) -> str:
        """Run a program in the Python of the environment, as :meth:`run` does."""
        return self.run("python", "-c", program, *words, **variables)
