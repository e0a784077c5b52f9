"""The decoder of a run in a process of its own: JSON; Avro where its environment names a schema registry; or Debezium
where it has the options of one.

Where the environment says so it is one that single payloads crash.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from pyspark import cloudpickle

from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.debezium import Debezium
from spark_jobs.decoding.decoders import Decoder
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.schema_registry import SchemaRegistry
from tests.support import crashing
from tests.support.schema_registry import Registry

REGISTRY_VARIABLE = "REGISTRY_OF_THE_RUN"
DEBEZIUM_VARIABLE = "DEBEZIUM_OF_THE_RUN"
SCHEMA_VARIABLE = "SCHEMA_OF_THE_RUN"
CRASHING = {"CRASHES_OF_THE_RUN": "1"}
SUBJECT = "orders-value"
_FIELDS = [{"name": "id", "type": "long"}, {"name": "user", "type": ["null", "string"], "default": None}]
_SCHEMA = {"type": "record", "name": "Order", "fields": _FIELDS}
_TEXT = json.dumps(_SCHEMA)


def decoder_of(environment: Mapping[str, str] = os.environ) -> Decoder:
    """What a run decodes with: columns ``id`` and ``user``, if its environment names no others."""
    if environment.items() >= CRASHING.items():
        # Executors on a cluster have no tests to import.
        cloudpickle.register_pickle_by_value(crashing)  # type: ignore[no-untyped-call]
        return crashing.Crashing()
    if options := environment.get(DEBEZIUM_VARIABLE):
        return Debezium(**json.loads(options))
    registry = environment.get(REGISTRY_VARIABLE)
    if registry is None:
        return Json(environment.get(SCHEMA_VARIABLE, "id BIGINT, user STRING"))
    return Avro(registry=SchemaRegistry(registry, options={"max.retries": 0, "timeout": 60}), subject=SUBJECT)


def in_registry(registry: Registry) -> dict[str, str]:
    """The environment of runs that decode with the schema of orders, which is registered."""
    registry.register(SUBJECT, _TEXT)
    return {REGISTRY_VARIABLE: registry.url}


def order_in_avro(registry: Registry, number: int) -> bytes:
    """A payload in Confluent's wire format."""
    return registry.framed(SUBJECT, _SCHEMA, {"id": number, "user": f"u{number % 7}"})
