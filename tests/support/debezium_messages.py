"""Change events of Debezium, as Kafka Connect's JSON converter writes them with and without schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

PLACEHOLDER = "__debezium_unavailable_value"
_COMMON = {"version": "3.4.0.Final", "name": "shop", "ts_ms": 1559033904863, "snapshot": "false", "db": "shop"}
POSTGRES = {
    **_COMMON,
    "connector": "postgresql",
    "sequence": '["24023119","24023128"]',
    "schema": "public",
    "table": "customers",
    "txId": 555,
    "lsn": 24023128,
    "xmin": None,
}
MYSQL = {
    **_COMMON,
    "connector": "mysql",
    "sequence": None,
    "table": "customers",
    "server_id": 223344,
    "gtid": None,
    "file": "mysql-bin.000003",
    "pos": 484,
    "row": 0,
    "thread": 7,
    "query": None,
}
SQLSERVER = {
    **_COMMON,
    "connector": "sqlserver",
    "schema": "dbo",
    "table": "customers",
    "change_lsn": "00000027:00000758:0003",
    "commit_lsn": "00000027:00000758:0005",
    "event_serial_no": 1,
}
ORACLE = {
    **_COMMON,
    "connector": "oracle",
    "schema": "DEBEZIUM",
    "table": "CUSTOMERS",
    "txId": "6.28.807",
    "scn": "2122184",
    "commit_scn": "2122185",
    "lcr_position": None,
    "rs_id": "001234.00012345.0124",
    "ssn": 1,
    "redo_thread": 1,
}


def field(name: str, kind: str, semantic: str | None = None, **more: Any) -> dict[str, Any]:
    """The schema of a field of a row."""
    named = {} if semantic is None else {"name": semantic, "version": 1}
    return {"type": kind, "optional": True, **named, **more, "field": name}


def envelope_schema(fields: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of an envelope of such rows."""
    row = {"type": "struct", "fields": list(fields), "optional": True, "name": "shop.public.customers.Value"}
    source = {"type": "struct", "fields": [], "optional": False, "name": "io.debezium.connector.Source"}
    own = [
        {**row, "field": "before"},
        {**row, "field": "after"},
        {**source, "field": "source"},
        {"type": "string", "optional": False, "field": "op"},
        {"type": "int64", "optional": True, "field": "ts_ms"},
    ]
    return {"type": "struct", "fields": own, "optional": False, "name": "shop.public.customers.Envelope", "version": 2}


def with_schema(schema: Mapping[str, Any] | None, payload: Any) -> bytes:
    """What the converter writes with ``schemas.enable=true``."""
    return json.dumps({"schema": schema, "payload": payload}, separators=(",", ":")).encode()


def envelope(
    operation: str,
    *,
    before: Any = None,
    after: Any = None,
    source: Mapping[str, Any] = POSTGRES,
    fields: Sequence[Mapping[str, Any]] | None = None,
    **more: Any,
) -> bytes:
    """A change event; with its schema if the fields of the row are given."""
    value = {
        "before": before,
        "after": after,
        "source": source,
        "transaction": None,
        "op": operation,
        "ts_ms": 1559033904863,
        "ts_us": 1559033904863841,
        "ts_ns": 1559033904863841257,
        **more,
    }
    return json.dumps(value).encode() if fields is None else with_schema(envelope_schema(fields), value)


def heartbeat() -> bytes:
    """What a connector writes to its heartbeat topic."""
    return json.dumps({"ts_ms": 1, "ts_us": 1000, "ts_ns": 1000000}).encode()


def transaction(status: str) -> bytes:
    """What a connector writes to its transaction topic."""
    is_end = status == "END"
    collections = [{"data_collection": "public.customers", "event_count": 1}] if is_end else None
    more = {"event_count": 1 if is_end else None, "data_collections": collections}
    return json.dumps({"status": status, "id": "571:53195829", "ts_ms": 1, **more}).encode()


def schema_change() -> bytes:
    """What a connector writes to its schema change topic."""
    more = {"databaseName": "shop", "schemaName": None, "ddl": "CREATE TABLE customers (id INT)", "tableChanges": []}
    return json.dumps({"source": MYSQL, "ts_ms": 1, **more}).encode()


def logical_message() -> bytes:
    """What a connector of PostgreSQL writes for ``pg_logical_emit_message``."""
    value = {"op": "m", "ts_ms": 1, "source": POSTGRES, "message": {"prefix": "p", "content": "AAE="}}
    return json.dumps(value).encode()
