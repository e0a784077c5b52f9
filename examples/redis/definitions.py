"""Orders from Redis Streams into a Delta table, by several members: run it with the commands in README.md."""

import os
from pathlib import Path

import dagster as dg
from pyspark.sql import DataFrame

from stream_assets import Json, LagPolicy, RedisServer, stream_asset, stream_definitions

SERVER = os.environ.get("REDIS_SERVER", "localhost:6379")
LAKE = Path(os.environ.get("LAKE") or Path.cwd() / ".demo" / "redis").absolute()


@stream_asset(
    # A secured server: password=dg.EnvVar("REDIS_PASSWORD"), tls=True. options={…} takes arguments of redis.Redis and
    # ours: message_field, cluster, max_deliveries, and min_idle_seconds, after which others claim a dead member's
    # entries.
    source=RedisServer(address=SERVER).stream("orders"),
    group="lakehouse",
    mode="load_balanced",
    table=str(LAKE / "orders"),
    decode=Json("id BIGINT, user STRING, amount DECIMAL(10,2)"),
    sensor=LagPolicy(max_runs=2, interval_seconds=5, status=dg.DefaultSensorStatus.RUNNING),
)
def orders(batch: DataFrame) -> DataFrame:
    """Orders of a positive amount, each once."""
    return batch.where("amount > 0")


defs = stream_definitions([orders])
