"""Orders from Redis Streams into a Delta table, by several members: run it with the commands in README.md."""

import os
from pathlib import Path

import dagster as dg
from pyspark.sql import DataFrame

from stream_assets import Json, stream_asset, stream_definitions

SERVER = os.environ.get("REDIS_SERVER", "localhost:6379")
LAKE = Path(os.environ.get("LAKE") or Path.cwd() / ".demo" / "redis").absolute()


@stream_asset(
    source=f"redis://{SERVER}/orders",
    group="lakehouse",
    mode="load_balanced",
    members=2,
    table=str(LAKE / "orders"),
    decode=Json("id BIGINT, user STRING, amount DECIMAL(10,2)"),
    sensor_seconds=5,
    sensor_status=dg.DefaultSensorStatus.RUNNING,
    # Arguments of redis.Redis, secrets from the environment; rediss:// for TLS. Ours: message_field, cluster,
    # min_idle_seconds (when entries of a member that died are taken over), max_deliveries.
    # client={"username": "lakehouse", "password": dg.EnvVar("REDIS_PASSWORD"), "min_idle_seconds": 60},
)
def orders(batch: DataFrame) -> DataFrame:
    """Orders of a positive amount, each once."""
    return batch.where("amount > 0")


defs = stream_definitions([orders])
