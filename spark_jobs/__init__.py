"""Spark and Delta: reading planned ranges on executors, the sink, the ledger. No Dagster."""
