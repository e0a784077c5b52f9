"""What decoders may do, at some numbers; each process that decodes imports this, so that it imports little itself."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from spark_jobs.decoding import isolated_process
from stream_consumers.errors import SchemaNotFoundError

SEGFAULT, EXIT, HUNGRY, SCHEMA, ODD, STOPPED = -1, -2, -3, -4, -5, -6


def negated(block: pa.RecordBatch) -> pa.RecordBatch:
    """What a decoder may do, at the numbers above."""
    numbers = block.column("number").to_pylist()
    print("a decoder may print")
    if SEGFAULT in numbers:
        os.kill(os.getpid(), signal.SIGSEGV)
    if EXIT in numbers:
        sys.exit(3)
    taken = []
    while HUNGRY in numbers:
        taken.append(np.zeros(1 << 28, np.uint8))
    if SCHEMA in numbers:
        raise SchemaNotFoundError("there is no schema", remedy="Register it.", id=7)
    if STOPPED in numbers:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    if ODD in numbers:
        raise ValueError("an odd payload")
    return pa.record_batch({"found": [str(-number) for number in numbers]})


def killing_once(block: pa.RecordBatch, *, mark: Path) -> pa.RecordBatch:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return negated(block)


class Unloadable:
    """A decoder that ends the process that unpickles it."""

    def __call__(self, block: pa.RecordBatch) -> pa.RecordBatch:
        return block

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (5,)


@dataclass
class Hurried:
    """Parses payloads, and returns them; the process that unpickles it has little CPU time for a block.

    Args:
        message: the schema of the payloads.
    """

    message: Any

    def __call__(self, block: pa.RecordBatch) -> pa.RecordBatch:
        for payload in block.column("payload").to_pylist():
            self.message.message_class().FromString(payload)
        return block

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        isolated_process.BASE_SECONDS, isolated_process.SECONDS_PER_BYTE = 0.2, 0.0
