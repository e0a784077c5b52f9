"""Decoders that payloads crash; each process that decodes imports this, so that it imports little itself."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from spark_jobs.decoding.decoders import DecodedColumns
from spark_jobs.decoding.json_decoder import Json

SEGFAULT = b'{"id": -1, "user": "segfault"}'
HUNGRY = b'{"id": -2, "user": "hungry"}'
ORDERS = Json("id BIGINT, user STRING")


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


@dataclass(frozen=True)
class Broken(Crashing):
    """Crashes whatever it decodes."""

    def decode(self, payloads: pa.Array, schema: pa.Schema) -> DecodedColumns:
        return super().decode(pa.array([SEGFAULT] * len(payloads), pa.binary()), schema)
