"""Streams with payloads that crash their decoder, and what becomes of them."""

from __future__ import annotations

from pathlib import Path

from deltalake import DeltaTable

from stream_consumers.create import create_producer
from tests.support.crashing import HUNGRY, SEGFAULT

REASONS = {
    SEGFAULT: "decoding this message ended the process with SIGSEGV",
    HUNGRY: "decoding this message needed more than",
}


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
