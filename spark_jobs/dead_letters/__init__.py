"""Dead letters: their Delta table, and how they are read. Jobs on them are in :mod:`spark_jobs.batches`."""
