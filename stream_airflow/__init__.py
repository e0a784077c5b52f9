"""Streams into Delta tables exactly once, in Airflow.

Import the public names from here: ``from stream_airflow import IngestOperator, StreamLagTrigger, Json``. The module of
a name is imported on first use, because Airflow reads the files of DAGs often.
"""

from stream_consumers.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "spark_jobs.decoding.avro": ("Avro",),
        "spark_jobs.decoding.debezium": ("Debezium",),
        "spark_jobs.decoding.decoders": ("Raw", "Text"),
        "spark_jobs.decoding.json_decoder": ("Json", "JsonMode"),
        "spark_jobs.decoding.json_schema": ("JsonSchema",),
        "spark_jobs.decoding.protobuf": ("Protobuf",),
        "spark_jobs.decoding.schema_registry": ("SchemaRegistry",),
        "spark_jobs.reading.rejection": ("reject",),
        "spark_jobs.run_policy": ("RunPolicy",),
        "spark_jobs.session": ("SparkOptions",),
        "spark_jobs.writing.keyed": ("Keys",),
        "spark_jobs.writing.layout": ("TableLayout",),
        "stream_airflow.operators": ("IngestOperator",),
        "stream_airflow.provider": ("get_provider_info",),
        "stream_airflow.sensor": ("StreamLagSensor",),
        "stream_airflow.table_operators": ("RebuildOperator", "RedriveOperator", "ReplayOperator", "VerifyOperator"),
        "stream_airflow.trigger": ("StreamLagTrigger",),
        "stream_consumers.options": ("ErrorPolicy", "Limits"),
    },
)
