"""A table of a database as Delta tables: its changes as they came, and its state. README.md has the commands."""

import os
from pathlib import Path

import dagster as dg

from stream_assets import Debezium, LagPolicy, stream_asset, stream_definitions

CHANGES = os.environ.get("CUSTOMERS", "kafka://localhost:9092/shop.public.customers")
LAKE = Path(os.environ.get("LAKE") or Path.cwd() / ".demo" / "customers").absolute()
ROW = Debezium("id BIGINT, name STRING, email STRING, notes STRING", source_order=True)
SENSOR = LagPolicy(interval_seconds=5, status=dg.DefaultSensorStatus.RUNNING)


@stream_asset(source=CHANGES, group="changes", table=str(LAKE / "customer_changes"), decode=ROW, sensor=SENSOR)
def customer_changes(changes):
    """Each change once: the row, _op, and _source_order, the place in the log of the database."""
    return changes


@stream_asset(source=CHANGES, group="lakehouse", table=str(LAKE / "customers"), decode=ROW, keys=["id"], sensor=SENSOR)
def customers(changes):
    """What SELECT * FROM customers returns: one row per id."""
    return changes


defs = stream_definitions([customer_changes, customers])
