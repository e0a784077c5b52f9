"""A stream-consumer library: one set of words over files, brokers and memory; no Dagster, no Spark."""
