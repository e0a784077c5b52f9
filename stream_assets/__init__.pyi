"""The public names of ``stream_assets``, with their modules."""

from sensors.lag_sensor import LagPolicy as LagPolicy
from spark_jobs.dead_letters.reader import DeadLetters as DeadLetters
from spark_jobs.decoding.avro import Avro as Avro
from spark_jobs.decoding.debezium import Debezium as Debezium
from spark_jobs.decoding.decoders import Raw as Raw, Text as Text
from spark_jobs.decoding.json_decoder import Json as Json, JsonMode as JsonMode
from spark_jobs.decoding.json_schema import JsonSchema as JsonSchema
from spark_jobs.decoding.protobuf import Protobuf as Protobuf
from spark_jobs.decoding.schema_registry import SchemaRegistry as SchemaRegistry
from spark_jobs.reading.rejection import reject as reject
from spark_jobs.dead_letters.reader import DeadLetterFilter as DeadLetterFilter
from spark_jobs.session import delta_spark_config as delta_spark_config
from spark_jobs.writing.keyed import Keys as Keys
from spark_jobs.writing.layout import TableLayout as TableLayout
from stream_assets.asset import StreamAsset as StreamAsset, stream_asset as stream_asset
from stream_assets.catalogs import HiveMetastore as HiveMetastore, UnityCatalog as UnityCatalog
from stream_assets.checks import (
    DEFAULT_CHECKS as DEFAULT_CHECKS,
    NO_DEAD_LETTERS as NO_DEAD_LETTERS,
    NO_GAPS as NO_GAPS,
    build_continuity_check as build_continuity_check,
    build_dead_letter_ratio_check as build_dead_letter_ratio_check,
    build_freshness_check as build_freshness_check,
    build_lag_check as build_lag_check,
)
from stream_assets.component import StreamIngestionComponent as StreamIngestionComponent
from stream_assets.definitions_builder import (
    build_ingest_job as build_ingest_job,
    build_rebuild_job as build_rebuild_job,
    build_redrive_job as build_redrive_job,
    build_replay_job as build_replay_job,
    build_sensor as build_sensor,
    stream_definitions as stream_definitions,
)
from stream_assets.operations import (
    NewDeadLetters as NewDeadLetters,
    build_dead_letter_sensor as build_dead_letter_sensor,
    build_maintenance as build_maintenance,
)
from stream_assets.options import (
    OpOptions as OpOptions,
    PlaceConfig as PlaceConfig,
    RedriveConfig as RedriveConfig,
    ReplayConfig as ReplayConfig,
    RunLimits as RunLimits,
    StreamConfig as StreamConfig,
)
from stream_assets.resources import (
    DeltaLake as DeltaLake,
    KafkaCluster as KafkaCluster,
    LakeTable as LakeTable,
    RedisServer as RedisServer,
    SparkSessionResource as SparkSessionResource,
    StreamFile as StreamFile,
)
from stream_assets.stream_run import StreamRun as StreamRun
from stream_assets.stream_to_table import (
    StreamCheck as StreamCheck,
    StreamCheckContext as StreamCheckContext,
    StreamToTable as StreamToTable,
)
from stream_assets.testing import Kill as Kill, KillSwitch as KillSwitch
from stream_assets.translator import StreamTranslator as StreamTranslator, StreamTranslatorData as StreamTranslatorData
from stream_consumers.options import ErrorPolicy as ErrorPolicy
