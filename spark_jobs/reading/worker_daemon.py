"""The process that forks Spark's Python workers, with what they need imported already.

Each worker would import it by itself otherwise, which takes a second, and a failed task costs a worker.
"""

from __future__ import annotations

import gc
import runpy

# They are for the workers; Spark imports pandas where rows are passed on as Arrow.
import pandas  # noqa: F401
import pyspark.worker  # noqa: F401

import spark_jobs.decoding.json_decoder
import spark_jobs.reading.source  # noqa: F401
import stream_consumers.kafka.batches  # noqa: F401
from spark_jobs.python_start import forget_worker_variables

if __name__ == "__main__":
    # Spark has the garbage of each task collected: what was imported is never garbage, and takes 30 ms to look through.
    gc.collect()
    gc.freeze()
    forget_worker_variables()
    runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)
