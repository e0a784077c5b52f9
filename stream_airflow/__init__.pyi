"""The public names of ``stream_airflow``, with their modules."""

from spark_jobs.decoding.avro import Avro as Avro
from spark_jobs.decoding.debezium import Debezium as Debezium
from spark_jobs.decoding.decoders import Raw as Raw, Text as Text
from spark_jobs.decoding.json_decoder import Json as Json, JsonMode as JsonMode
from spark_jobs.decoding.json_schema import JsonSchema as JsonSchema
from spark_jobs.decoding.protobuf import Protobuf as Protobuf
from spark_jobs.decoding.schema_registry import SchemaRegistry as SchemaRegistry
from spark_jobs.reading.rejection import reject as reject
from spark_jobs.run_policy import RunPolicy as RunPolicy
from spark_jobs.session import SparkOptions as SparkOptions
from spark_jobs.writing.keyed import Keys as Keys
from spark_jobs.writing.layout import TableLayout as TableLayout
from stream_airflow.operators import IngestOperator as IngestOperator
from stream_airflow.provider import get_provider_info as get_provider_info
from stream_airflow.sensor import StreamLagSensor as StreamLagSensor
from stream_airflow.table_operators import (
    RebuildOperator as RebuildOperator,
    RedriveOperator as RedriveOperator,
    ReplayOperator as ReplayOperator,
    VerifyOperator as VerifyOperator,
)
from stream_airflow.trigger import StreamLagTrigger as StreamLagTrigger
from stream_consumers.options import ErrorPolicy as ErrorPolicy, Limits as Limits
