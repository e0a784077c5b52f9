"""Decoding in a process of its own: what crashes it is found, and the process ends with the one that started it."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spark_jobs.decoding import isolated_process, isolation
from spark_jobs.decoding.decoders import TextReader, decode_rows
from spark_jobs.decoding.isolation import _CrashError, decode_here, decode_isolated
from spark_jobs.decoding.protobuf import Protobuf
from spark_jobs.decoding.protobuf_schema import schema_of_text
from spark_jobs.decoding.schema_limits import schema_use
from stream_consumers.errors import DecoderCrashedError, SchemaNotFoundError
from tests.support.arrow_columns import arrow_columns
from tests.support.crashing_numbers import (
    EXIT,
    HUNGRY,
    ODD,
    SCHEMA,
    SEGFAULT,
    STOPPED,
    Hurried,
    Unloadable,
    killing_once,
    negated,
)
from tests.support.polling import until
from tests.support.settings import ROOT


def refused(block: pa.RecordBatch, reason: str) -> pa.RecordBatch:
    (number,) = block.column("number").to_pylist()
    return pa.record_batch({"found": [f"{number}: {reason}"]})


def decoded(*blocks: list[int]) -> list[str]:
    batches = [pa.record_batch({"number": pa.array(block, pa.int64())}) for block in blocks]
    found = list(decode_isolated(batches, negated, refused))
    return [text for rows in found for text in rows.column("found").to_pylist()]


def test_messages_that_crash_the_decoder_are_found_and_the_others_keep_their_order() -> None:
    block = list(range(1, 40))
    block[3], block[20], block[21] = SEGFAULT, EXIT, HUNGRY
    found = decoded(block, [100], [SEGFAULT])
    reasons = {place: text for place, text in enumerate(found) if not text.lstrip("-").isdigit()}
    needed = isolated_process.allowance(8)
    assert reasons == {
        3: "-1: decoding this message ended the process with SIGSEGV",
        20: "-2: decoding this message ended the process with exit code 3",
        21: f"-3: decoding this message needed more than {needed} bytes of memory",
        40: "-1: decoding this message ended the process with SIGSEGV",
    }
    assert [text for place, text in enumerate(found) if place not in reasons] == [
        str(-number) for number in [*block, 100] if number > 0
    ]


def test_a_decoder_that_crashes_for_more_than_some_messages_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "MAX_CRASHES", 3)
    assert len(decoded([SEGFAULT] * 3)) == 3
    with pytest.raises(DecoderCrashedError):
        decoded([SEGFAULT] * 2, [SEGFAULT] * 2)


def test_what_a_decoder_raises_is_raised() -> None:
    with pytest.raises(SchemaNotFoundError) as raised:
        decoded([1, SCHEMA])
    assert raised.value.facts == {"id": 7}
    assert decoded([5]) == ["-5"]


@pytest.mark.parametrize("decode", [decode_isolated, decode_here])
def test_a_message_for_which_a_decoder_raises_is_refused(decode: Any) -> None:
    blocks = [pa.record_batch({"number": pa.array([1, ODD, 2, 3], pa.int64())})]
    found = [text for rows in decode(blocks, negated, refused) for text in rows.column("found").to_pylist()]
    assert found == ["-1", f"{ODD}: decoding this message raised ValueError", "-2", "-3"]


def swollen(block: pa.RecordBatch) -> pa.RecordBatch:
    sizes = block.column("number").to_pylist()
    return pa.record_batch({"found": ["x" * size for size in sizes]})


@pytest.mark.parametrize("decode", [decode_isolated, decode_here])
def test_a_message_that_becomes_a_large_row_is_refused(decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "MAX_CRASHES", 1)
    sizes = [4_000, 4_000, 11_000, 4_000, 9_000, 12_000]
    blocks = [pa.record_batch({"number": pa.array(sizes, pa.int64())})]
    decoded = decode(blocks, swollen, refused, max_row_bytes=10_000)
    found = [text for rows in decoded for text in rows.column("found").to_pylist()]
    assert [len(text) for number, text in enumerate(found) if number not in (2, 5)] == [4_000, 4_000, 4_000, 9_000]
    assert (found[2].split(":")[0], found[5].split(":")[0]) == ("11000", "12000")


@pytest.mark.parametrize("decode", [decode_here, decode_isolated])
def test_large_rows_of_small_messages_leave_the_decoder_in_small_blocks(
    decode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "MAX_BLOCK_BYTES", 100)
    numbers = list(range(1, 100))
    block = pa.record_batch({"number": pa.array(numbers, pa.int64())})
    found = list(decode([block, block.slice(0, 0)], negated, refused))
    assert [text for rows in found for text in rows.column("found").to_pylist()] == [str(-one) for one in numbers]
    assert max(rows.nbytes for rows in found) <= 100
    assert found[-1].num_rows == 0


def test_signals_that_ask_a_run_to_end_do_not_end_the_process_in_the_middle_of_a_batch() -> None:
    assert decoded([1, STOPPED]) == ["-1", "6"]


def test_a_message_is_not_refused_because_the_system_ended_the_process_once(folder: Path) -> None:
    batch = pa.record_batch({"number": pa.array([5], pa.int64())})
    (found,) = decode_isolated([batch], partial(killing_once, mark=folder / "mark"), refused)
    assert found.to_pydict() == {"found": ["-5"]}


def in_working_folder(block: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"found": [str(Path.cwd())]})


def test_a_decoder_runs_in_the_working_folder_of_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        (folder / name).mkdir()
        monkeypatch.chdir(folder / name)
        (found,) = decode_isolated([pa.record_batch({"number": [1]})], in_working_folder, refused)
        assert found.to_pydict() == {"found": [str(folder / name)]}
        # A process in a folder that is gone could not import the next decoder.
        (folder / name).rmdir()


def test_a_decoder_that_cannot_be_loaded_is_an_error_and_no_fault_of_a_message() -> None:
    with pytest.raises(DecoderCrashedError):
        list(decode_isolated([pa.record_batch({"number": [1, 2]})], Unloadable(), refused))


def test_the_limit_counts_what_is_taken_within_it_and_is_gone_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_process, "BASE_MEMORY", 1 << 28)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(MemoryError), isolated_process.limited_memory(0):
        np.zeros(1 << 29, np.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with isolated_process.limited_memory(1 << 24):
        np.zeros(1 << 29, np.uint8)
    np.zeros(1 << 29, np.uint8)


def colliding(count: int) -> bytes:
    """A map whose keys all have one hash, so that Protobuf compares each with all others; 40,000 take seconds."""
    keys = [struct.pack("<Q", (number << 32) | number) for number in range(1, count + 1)]
    return b"".join(b"\x0a\x09\x09" + key for key in keys)


@pytest.fixture(scope="module")
def hurried() -> Hurried:
    return Hurried(schema_of_text('syntax = "proto3"; message Numbers { map<fixed64, bool> number = 1; }', None))


# Protobuf holds the interpreter's lock, so that Python code could not interrupt it.
COLLIDING = [pa.record_batch({"payload": pa.array([colliding(2), colliding(40_000)], pa.binary())})]


def test_a_message_that_takes_too_long_is_refused(hurried: Hurried) -> None:
    reasons: list[str] = []

    def emptied(block: pa.RecordBatch, reason: str) -> pa.RecordBatch:
        reasons.append(reason)
        return block.slice(1)

    found = pa.Table.from_batches(decode_isolated(COLLIDING, hurried, emptied))
    assert found.column("payload").to_pylist() == [colliding(2)]
    assert reasons == [f"decoding this message {_CrashError(-signal.SIGPROF).failure(COLLIDING[0].slice(1))}"]
    assert "SIGPROF" not in reasons[0]


def test_a_worker_of_spark_that_takes_too_long_ends(hurried: Hurried) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as worker:
        worker.communicate(pickle.dumps((COLLIDING, hurried)))
    assert worker.returncode == -signal.SIGPROF


class Hungry(TextReader):
    """Has no memory for one payload, or for many rows."""

    def read(self, payload: bytes) -> str:
        if payload == b"large":
            raise MemoryError
        return super().read(payload)

    def columns(self, values: Sequence[Any]) -> list[Any]:
        if len(values) > 2:
            raise MemoryError
        return super().columns(values)


@pytest.mark.parametrize("payloads", [[b"1", b"large"], [b"1", b"2", b"3"]])
def test_a_want_of_memory_is_no_fault_of_a_message(payloads: list[bytes]) -> None:
    with pytest.raises(MemoryError):
        decode_rows(Hungry(), pa.array(payloads, pa.binary()))
    with pytest.raises(MemoryError), schema_use("Avro"):
        raise MemoryError


def test_a_library_that_has_no_memory_has_met_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protobuf raises the same error for both."""
    monkeypatch.setattr(isolated_process, "BASE_MEMORY", 1 << 26)
    text = (
        "message Item { int64 a = 1; string b = 2; string c = 3; string d = 4; } message Order { repeated Item i = 1; }"
    )
    decoder = Protobuf(f'syntax = "proto3"; {text}', message="Order")
    schema = arrow_columns(decoder.ddl())
    heavy = pa.array([b"\x0a\x00" * 400_000, b"\x0a\x00", b"\xff"], pa.binary())
    # It has taken memory before, as for the rows that it has read of a block.
    with isolated_process.limited_memory(0):
        taken = np.zeros(1 << 25, np.uint8)
        with pytest.raises(MemoryError):
            decoder.decode(heavy, schema)
    del taken
    with isolated_process.limited_memory(0):
        errors = decoder.decode(heavy[1:], schema).errors.to_pylist()
    assert [error is None for error in errors] == [True, False]


@pytest.mark.slow
def test_threads_decode_at_the_same_time() -> None:
    found: dict[int, list[str]] = {}

    def decode(number: int) -> None:
        found[number] = decoded([number], [number, SEGFAULT])

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reason = "-1: decoding this message ended the process with SIGSEGV"
    assert found == {number: [str(-number), str(-number), reason] for number in range(1, 4)}


WORKER = """
import pickle
import sys
from spark_jobs.decoding.isolation import decode_here

blocks, decode = pickle.load(sys.stdin.buffer)
list(decode_here(blocks, decode, None))
"""
DRIVER = """
import os
import re
import pyarrow as pa
from spark_jobs.decoding.isolation import decode_isolated

def busy(block):
    print(os.getpid(), os.getppid(), flush=True)
    # Holds the interpreter's lock for ever.
    re.match("(a+)+$", "a" * 100 + "b")

list(decode_isolated([pa.record_batch({"number": [1]})], busy, None))
"""


def test_a_driver_that_is_killed_leaves_no_process_however_busy_that_is() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as driver:
        assert driver.stderr is not None
        started = [Path(f"/proc/{int(number)}") for number in driver.stderr.readline().split()]
        assert all(map(is_running, started))
        driver.kill()
    until(lambda: not any(map(is_running, started)), seconds=30, what="the processes end")


def is_running(process: Path) -> bool:
    """One that nobody has waited for yet runs no more."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
