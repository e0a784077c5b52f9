"""Orders from a Kafka topic into a Delta table: run it with the commands in README.md."""

import os
from pathlib import Path

import dagster as dg
from pyspark.sql import DataFrame

from stream_assets import Json, KafkaCluster, LagPolicy, stream_asset, stream_definitions

BROKER = os.environ.get("KAFKA_BROKER", "localhost:9092")
LAKE = Path(os.environ.get("LAKE") or Path.cwd() / ".demo" / "kafka").absolute()


@stream_asset(
    # A secured cluster: security_protocol, sasl_mechanism, sasl_username and sasl_password=dg.EnvVar("KAFKA_PASSWORD");
    # options={…} takes almost any option of librdkafka.
    source=KafkaCluster(bootstrap_servers=BROKER).stream("orders"),
    group="lakehouse",
    table=str(LAKE / "orders"),
    decode=Json("id BIGINT, user STRING, amount DECIMAL(10,2)", key="key"),
    sensor=LagPolicy(interval_seconds=5, status=dg.DefaultSensorStatus.RUNNING),
)
def orders(batch: DataFrame) -> DataFrame:
    """Orders of a positive amount, each once."""
    return batch.where("amount > 0")


defs = stream_definitions([orders])
