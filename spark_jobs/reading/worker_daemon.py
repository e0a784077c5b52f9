"""The process that forks Spark's Python workers, with what they need imported already.

Each worker would import it by itself otherwise, which takes a second, and a failed task costs a worker.
"""

from __future__ import annotations

import runpy

import stream_consumers.kafka.batches  # noqa: F401 - it is for the workers

if __name__ == "__main__":
    runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)
