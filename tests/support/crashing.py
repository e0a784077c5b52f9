"""A decoder that single payloads crash, and the streams and checks of tests about it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from spark_jobs.decoding.decoders import DecodedColumns
from spark_jobs.decoding.json_decoder import Json
from stream_consumers.create import create_producer
from tests.support.ingesting import ORDERS

SEGFAULT = b'{"id": -1, "user": "segfault"}'
HUNGRY = b'{"id": -2, "user": "hungry"}'
REASONS = {
    SEGFAULT: "decoding this message ended the process with SIGSEGV",
    HUNGRY: "decoding this message needed more than",
}


@dataclass(frozen=True)
class Crashing:
    """Decodes JSON; dies of a signal at one payload, and takes memory without end at another."""

    decoder: Json = ORDERS
    key: None = None
    headers: None = None

    def ddl(self) -> str:
        return self.decoder.ddl()

    def check(self, schema: pa.Schema) -> None:
        self.decoder.check(schema)

    def decode(self, payloads: pa.Array, schema: pa.Schema) -> DecodedColumns:
        found = payloads.to_pylist()
        if SEGFAULT in found:
            os.kill(os.getpid(), signal.SIGSEGV)
        taken = []
        while HUNGRY in found:
            # Reserved and not touched: the limit counts it, the machine does not have to give it.
            taken.append(np.zeros(1 << 28, np.uint8))
        return self.decoder.decode(payloads, schema)


def write_crashing(path: Path, count: int, **places: int) -> str:
    """Write a stream file of one shard in which the messages at some places crash the decoder; its URL."""
    crashing = {places.get("segfault"): SEGFAULT, places.get("hungry"): HUNGRY}
    url = f"file://{path}/orders"
    with create_producer(url) as producer:
        for index in range(count):
            producer.send(crashing.get(index, b'{"id": %d, "user": "u"}' % index), timestamp_ms=1_700_000_000_000)
    return url


def assert_refused(table: Path, *payloads: bytes) -> None:
    """These payloads are the dead letters of a table, each with its own bytes and reason."""
    letters = DeltaTable(f"{table}_dead_letters").to_pyarrow_table().to_pylist()
    assert sorted(letter["payload"] for letter in letters) == sorted(payloads)
    assert all(letter["error"].startswith(REASONS[letter["payload"]]) for letter in letters)
    assert all(letter["is_message"] for letter in letters)
