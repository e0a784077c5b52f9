"""Writes and reads the Delta table of dead letters. Jobs on dead letters are in :mod:`spark_jobs.batches`."""
