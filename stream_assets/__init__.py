"""Streams into Delta tables exactly once, as Dagster assets."""

from spark_jobs.decode import Json, Raw, Text
from stream_assets.asset import StreamAsset, stream_asset
from stream_assets.checks import build_continuity_check, build_dead_letter_check
from stream_assets.composition import build_ingest_job, build_sensor, stream_definitions
from stream_assets.config import StreamConfig
from stream_assets.resources import SparkResource

__all__ = [
    "Json",
    "Raw",
    "SparkResource",
    "StreamAsset",
    "StreamConfig",
    "Text",
    "build_continuity_check",
    "build_dead_letter_check",
    "build_ingest_job",
    "build_sensor",
    "stream_asset",
    "stream_definitions",
]
