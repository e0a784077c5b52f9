"""The process that forks Spark's Python workers, after it has imported the modules that they need.

Otherwise each worker would import them, which takes a second, and each failed task starts a new worker.
"""

from __future__ import annotations

import gc
import runpy

# The workers need these modules; Spark imports pandas when rows are passed as Arrow.
import pandas  # noqa: F401
import pyspark.worker  # noqa: F401

import spark_jobs.decoding.json_decoder
import spark_jobs.reading.source  # noqa: F401
import stream_consumers.kafka.batches  # noqa: F401
from spark_jobs.python_start import forget_worker_variables

if __name__ == "__main__":
    # Spark collects garbage after each task. Skipping the imported modules, which are never garbage, saves 30 ms.
    gc.collect()
    gc.freeze()
    forget_worker_variables()
    runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)
