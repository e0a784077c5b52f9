"""Streams into Delta tables exactly once, as Dagster assets."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_jobs.reading.decode import Json, Raw, Text
    from stream_assets.asset import StreamAsset, stream_asset
    from stream_assets.checks import build_continuity_check, build_dead_letter_check
    from stream_assets.config import PlaceConfig, ReplayConfig, StreamConfig
    from stream_assets.definitions_builder import build_ingest_job, build_sensor, stream_definitions
    from stream_assets.replay_job import build_replay_job
    from stream_assets.resources import SparkResource

_HOMES = {
    "Json": "spark_jobs.reading.decode",
    "PlaceConfig": "stream_assets.config",
    "Raw": "spark_jobs.reading.decode",
    "ReplayConfig": "stream_assets.config",
    "SparkResource": "stream_assets.resources",
    "StreamAsset": "stream_assets.asset",
    "StreamConfig": "stream_assets.config",
    "Text": "spark_jobs.reading.decode",
    "build_continuity_check": "stream_assets.checks",
    "build_dead_letter_check": "stream_assets.checks",
    "build_ingest_job": "stream_assets.definitions_builder",
    "build_replay_job": "stream_assets.replay_job",
    "build_sensor": "stream_assets.definitions_builder",
    "stream_asset": "stream_assets.asset",
    "stream_definitions": "stream_assets.definitions_builder",
}

__all__ = [
    "Json",
    "PlaceConfig",
    "Raw",
    "ReplayConfig",
    "SparkResource",
    "StreamAsset",
    "StreamConfig",
    "Text",
    "build_continuity_check",
    "build_dead_letter_check",
    "build_ingest_job",
    "build_replay_job",
    "build_sensor",
    "stream_asset",
    "stream_definitions",
]


def __getattr__(name: str) -> Any:
    # Dagster takes a second to import, and the command line needs it only for some of its commands.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
