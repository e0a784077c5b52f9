"""No kind of a reason has a value of the payload in it, whichever decoder and whichever library says the reason."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence

import fastavro
import pyarrow as pa
import pytest

from spark_jobs.dead_letters.reader import kind_of_reason
from spark_jobs.decoding.avro import Avro
from spark_jobs.decoding.decoders import Decoder, Text
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.json_schema import JsonSchema
from spark_jobs.decoding.protobuf import Protobuf
from tests.support.arrow_columns import arrow_columns

MARK = "Mallory"
TYPES = (
    "BOOLEAN", "INT", "BIGINT", "DOUBLE", "DECIMAL(10,2)", "DATE", "TIMESTAMP", "TIMESTAMP_NTZ", "BINARY", "STRING",
    "ARRAY<INT>", "MAP<STRING, INT>", "STRUCT<x: INT>",
)  # fmt: skip
# What a reader of quotes may be confused by.
VALUES = (
    MARK, f"it's {MARK}", f'"{MARK}', f"'{MARK}", {MARK: MARK}, [MARK], {"x": MARK}, {"x": {MARK: 1}}, f"1{MARK}",
    f"2024-01-01{MARK}", f"{MARK}\n{MARK}Error: {MARK}", f"b'{MARK}", f"\\'{MARK}'", f"[{MARK}]: {MARK}",
)  # fmt: skip
FIELDS = [{"f": value} for value in VALUES] + [{MARK: value, "f": value} for value in VALUES]
DOCUMENTS = [
    *(json.dumps(fields).encode() for fields in FIELDS),
    *(json.dumps(fields).encode()[:-3] for fields in FIELDS),
    *(text.encode() for text in (MARK, f'"{MARK}"', f"[{MARK}]", f'{{"f": 1, "f": "{MARK}"}}', f'{{"f": {MARK}}}')),
    f'{{"f": 1}} {MARK}'.encode(),
    MARK.encode() + b"\xff",
]
RECORD = {
    "type": "record",
    "name": "R",
    "fields": [
        {"name": "a", "type": "string"},
        {"name": "b", "type": {"type": "enum", "name": "E", "symbols": ["A", "B"]}},
        {"name": "c", "type": ["null", "string", {"type": "int", "logicalType": "date"}]},
        {"name": "d", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "e", "type": {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}},
    ],
}
MESSAGE = 'syntax = "proto3"; message R { string a = 1; int32 b = 2; map<string, int32> c = 3; }'


def damaged(payload: bytes) -> list[bytes]:
    """Copies of a payload with other bytes, and cut off, the same ones each time."""
    chance = random.Random(1)
    found = []
    for _ in range(200):
        copy = bytearray(payload)
        for _ in range(chance.randrange(3)):
            copy[chance.randrange(len(copy))] = chance.randrange(256)
        found.append(bytes(copy[: chance.randrange(len(copy))] if chance.random() < 0.5 else copy))
    return found


def avro_payload() -> bytes:
    encoded = io.BytesIO()
    text = MARK.encode()
    fastavro.schemaless_writer(encoded, {"type": "array", "items": "string"}, [MARK] * 4)
    return encoded.getvalue() + bytes([2 * len(text)]) + text


def schemas() -> list[Decoder]:
    bounds = {"minimum": 5, "maxLength": 1, "pattern": "^z", "enum": [1, "zz"]}
    found: list[Decoder] = []
    for kind in ("integer", "string", "boolean", "number", "array", "object"):
        field = {"type": kind, **bounds}
        found += [
            JsonSchema(json.dumps({"type": "object", "additionalProperties": False, **rules}), validate=True)
            for rules in (
                {"properties": {"f": field}, "required": ["g"]},
                {"properties": {"f": {"type": kind, "additionalProperties": {"type": "integer"}}}},
                {"properties": {"f": {"type": kind}}, "propertyNames": {"maxLength": 2}},
            )
        ]
    return found


CASES: dict[str, tuple[Sequence[Decoder], Sequence[bytes]]] = {
    "text": ([Text()], DOCUMENTS),
    "json": ([Json(f"f {kind}", mode=mode) for kind in TYPES for mode in ("lenient", "strict")], DOCUMENTS),
    "json schema": (schemas(), DOCUMENTS),
    "avro": ([Avro(json.dumps(RECORD))], damaged(avro_payload())),
    "protobuf": (
        [Protobuf(MESSAGE)],
        damaged(b"\x0a\x07" + MARK.encode() + b"\x10\x05\x1a\x0b\x0a\x07" + MARK.encode()),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_no_kind_has_a_value(name: str) -> None:
    decoders, payloads = CASES[name]
    reasons: list[tuple[str, bytes]] = []
    for decoder in decoders:
        decoded = decoder.decode(pa.array(payloads, pa.binary()), arrow_columns(decoder.ddl()))
        reasons += [(said, payload) for said, payload in zip(decoded.errors.to_pylist(), payloads) if said]
    assert reasons
    leaks = {kind_of_reason(said): payload for said, payload in reasons if MARK.lower() in kind_of_reason(said).lower()}
    assert leaks == {}


def test_bytes_in_quotes_are_left_out() -> None:
    assert kind_of_reason(f"got {MARK.encode()!r}, not bytes") == "got '…', not bytes"
