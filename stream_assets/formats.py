"""The formats of payloads, by their names in ``defs.yaml`` and on the command line."""

from __future__ import annotations

from typing import Any

from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.debezium import Debezium
from spark_jobs.decoding.decoders import Raw, Text
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.json_schema import JsonSchema
from spark_jobs.decoding.protobuf import Protobuf

_SCHEMA_OPTIONS = ("registry", "subject", "version", "schema_file", "framed")
FORMATS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "json": (Json, ("schema", "mode")),
    "variant": (Json, ("column",)),
    "text": (Text, ("column",)),
    "raw": (Raw, ("column",)),
    "avro": (Avro, (*_SCHEMA_OPTIONS, "column")),
    "protobuf": (Protobuf, (*_SCHEMA_OPTIONS, "message", "column")),
    "debezium": (
        Debezium,
        (
            *("schema", "registry", "subject", "version", "schema_file", "unwrapped", "source_order", "types"),
            *("time_precision_mode", "decimal_handling_mode", "unavailable_value_placeholder"),
        ),
    ),
    "json_schema": (JsonSchema, (*_SCHEMA_OPTIONS, "validate")),
}
"""The decoder of each format, and its options other than ``key`` and ``headers``."""
