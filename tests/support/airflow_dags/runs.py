"""Runs of a DAG in the process that imports it."""

from __future__ import annotations

import subprocess
from typing import Any

from airflow.sdk import DAG

if not hasattr(DAG, "test"):
    # Airflow 3.0.0 has it only at another class.
    from airflow.models.dag import DAG

IS_30 = DAG.__module__ == "airflow.models.dag"


def run_dag(dag: DAG, **options: Any) -> Any:
    """Run a DAG to its end, with the options of ``DAG.test``; returns the run."""
    if IS_30:
        # It must be in the database before.
        subprocess.run(["airflow", "dags", "reserialize"], check=True)
    return dag.test(**options)
