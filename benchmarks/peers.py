"""Spark Structured Streaming from Kafka into Delta, the usual alternative.

``python -m benchmarks.peers ADDRESS TOPIC TABLE`` runs a query with ``processingTime='0 seconds'`` until it is ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pyspark
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as f
from pyspark.sql.avro.functions import from_avro

from spark_jobs.jars import delta_jars, resolved
from spark_jobs.session import SparkOptions, create_session

Transform = Callable[[DataFrame], DataFrame]
# Each jar is named, without its dependencies, because some mirrors lack later versions of the second one, which only
# delegation tokens need.
CONNECTOR = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", pyspark.__version__),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0"),
    ("org.apache.kafka", "kafka-clients", "3.9.1"),
    ("org.apache.commons", "commons-pool2", "2.12.1"),
    # The functions for Avro, which Spark does not ship; some mirrors lack those of 4.2.
    ("org.apache.spark", "spark-avro_2.13", "4.1.1"),
)


def jars() -> list[Path]:
    """The jars of Delta, and of Spark's connector for Kafka and its Avro functions."""
    peers = [jar for one in CONNECTOR for jar in resolved(one, is_alone=True).glob("*.jar")]
    return [*delta_jars(), *peers]


def raw(messages: DataFrame) -> DataFrame:
    """Select key, value and position."""
    return messages.select("key", "value", *_position())


def typed(ddl: str) -> Transform:
    """Select the columns of JSON documents, and the position."""

    def select(messages: DataFrame) -> DataFrame:
        document = f.from_json(f.col("value").cast("string"), ddl).alias("document")
        return messages.select(document, *_position()).select("document.*", "_shard", "_sequence", "_timestamp")

    return select


def of_avro(schema: str) -> Transform:
    """Select the columns of Avro values that follow the id of their schema, and the position."""

    def select(messages: DataFrame) -> DataFrame:
        value = from_avro(f.expr("substring(value, 6)"), schema).alias("value")
        return messages.select(value, *_position()).select("value.*", "_shard", "_sequence", "_timestamp")

    return select


def stream(spark: SparkSession, address: str, topic: str) -> DataFrame:
    """A streaming query over all messages of the topic."""
    options = {"kafka.bootstrap.servers": address, "subscribe": topic, "startingOffsets": "earliest"}
    return spark.readStream.format("kafka").options(**options).load()


def available_now(spark: SparkSession, address: str, topic: str, select: Transform, table: Path) -> None:
    """Write the messages that the topic has, and end."""
    writer = select(stream(spark, address, topic)).writeStream.format("delta")
    writer = writer.option("checkpointLocation", f"{table}-checkpoint").trigger(availableNow=True)
    writer.start(str(table)).awaitTermination()


def merge_available_now(
    spark: SparkSession, address: str, topic: str, ddl: str, statement: str, checkpoint: Path
) -> None:
    """Merge the changes that the topic has, and end.

    Args:
        spark: the session.
        address: the address of the broker.
        topic: the topic.
        ddl: the columns of the JSON documents.
        statement: the MERGE of the newest ``{changes}`` of each ``id``.
        checkpoint: the folder of the query.
    """

    def merge(changes: DataFrame, number: int) -> None:
        newest_first = Window.partitionBy("id").orderBy(f.desc("_sequence"))
        newest = changes.withColumn("_rank", f.row_number().over(newest_first)).where("_rank = 1").drop("_rank")
        changes.sparkSession.sql(statement, changes=newest).collect()

    changes = typed(ddl)(stream(spark, address, topic)).withColumn("_stream", f.lit(topic))
    writer = changes.writeStream.foreachBatch(merge).option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()


def _position() -> tuple[Column, ...]:
    return (
        f.col("partition").alias("_shard"),
        f.col("offset").alias("_sequence"),
        f.col("timestamp").alias("_timestamp"),
    )


def main() -> None:
    """Write new messages until the process is ended."""
    from benchmarks.messages import DDL  # noqa: PLC0415

    address, topic, table = sys.argv[1:]
    joined = ",".join(map(str, jars()))
    spark = create_session(SparkOptions(master="local[*]", config={"spark.jars": joined}, in_process=True))
    writer = typed(DDL)(stream(spark, address, topic)).writeStream.format("delta")
    writer = writer.option("checkpointLocation", f"{table}-checkpoint").trigger(processingTime="0 seconds")
    writer.start(table).awaitTermination()


if __name__ == "__main__":
    main()
