"""Streams into Delta tables exactly once, as Dagster assets.

Import the public names from here: ``from stream_assets import stream_asset, stream_definitions, Json``. The module of a
name is imported on first use, because importing Dagster takes a second, and only some commands need it.
"""

from stream_consumers.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "sensors.lag_sensor": ("LagPolicy",),
        "spark_jobs.dead_letters.reader": ("DeadLetters", "DeadLetterFilter"),
        "spark_jobs.decoding.avro": ("Avro",),
        "spark_jobs.decoding.debezium": ("Debezium",),
        "spark_jobs.decoding.decoders": ("Raw", "Text"),
        "spark_jobs.decoding.json_decoder": ("Json", "JsonMode"),
        "spark_jobs.decoding.json_schema": ("JsonSchema",),
        "spark_jobs.decoding.protobuf": ("Protobuf",),
        "spark_jobs.decoding.schema_registry": ("SchemaRegistry",),
        "spark_jobs.reading.rejection": ("reject",),
        "spark_jobs.session": ("delta_spark_config",),
        "spark_jobs.writing.keyed": ("Keys",),
        "spark_jobs.writing.layout": ("TableLayout",),
        "stream_assets.asset": ("StreamAsset", "stream_asset"),
        "stream_assets.catalogs": ("HiveMetastore", "UnityCatalog"),
        "stream_assets.checks": (
            "DEFAULT_CHECKS",
            "NO_DEAD_LETTERS",
            "NO_GAPS",
            "build_continuity_check",
            "build_dead_letter_ratio_check",
            "build_freshness_check",
            "build_lag_check",
        ),
        "stream_assets.component": ("StreamIngestionComponent",),
        "stream_assets.definitions_builder": (
            "build_ingest_job",
            "build_rebuild_job",
            "build_redrive_job",
            "build_replay_job",
            "build_sensor",
            "stream_definitions",
        ),
        "stream_assets.operations": ("NewDeadLetters", "build_dead_letter_sensor", "build_maintenance"),
        "stream_assets.options": (
            "OpOptions",
            "PlaceConfig",
            "RedriveConfig",
            "ReplayConfig",
            "RunLimits",
            "StreamConfig",
        ),
        "stream_assets.resources": (
            "DeltaLake",
            "KafkaCluster",
            "LakeTable",
            "RedisServer",
            "SparkSessionResource",
            "StreamFile",
        ),
        "stream_assets.stream_run": ("StreamRun",),
        "stream_assets.stream_to_table": ("StreamCheck", "StreamCheckContext", "StreamToTable"),
        "stream_assets.testing": ("Kill", "KillSwitch"),
        "stream_assets.translator": ("StreamTranslator", "StreamTranslatorData"),
        "stream_consumers.options": ("ErrorPolicy",),
    },
)
