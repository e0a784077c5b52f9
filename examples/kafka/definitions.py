"""Orders from a Kafka topic into a Delta table: run it with the commands in README.md."""

import os
from pathlib import Path

import dagster as dg
from pyspark.sql import DataFrame

from stream_assets import Json, stream_asset, stream_definitions

BROKER = os.environ.get("KAFKA_BROKER", "localhost:9092")
LAKE = Path(os.environ.get("LAKE") or Path.cwd() / ".demo" / "kafka").absolute()


@stream_asset(
    source=f"kafka://{BROKER}/orders",
    group="lakehouse",
    table=str(LAKE / "orders"),
    decode=Json("id BIGINT, user STRING, amount DECIMAL(10,2)", key="key"),
    sensor_seconds=5,
    sensor_status=dg.DefaultSensorStatus.RUNNING,
    # A secured cluster: any option of librdkafka, secrets from the environment.
    # client={
    #     "security.protocol": "SASL_SSL",
    #     "sasl.mechanism": "SCRAM-SHA-512",
    #     "sasl.username": "lakehouse",
    #     "sasl.password": dg.EnvVar("KAFKA_PASSWORD"),
    # },
)
def orders(batch: DataFrame) -> DataFrame:
    """Orders of a positive amount, each once."""
    return batch.where("amount > 0")


defs = stream_definitions([orders])
