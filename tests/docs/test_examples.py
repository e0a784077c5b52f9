"""The programs of ``examples/consumers`` do what their READMEs say, as a user would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support.settings import ROOT

FOLDER = ROOT / "examples" / "consumers"
FRUIT = """next: apples/0 0
all: ['0', '2', '4', '6', '8']
seek to a time: ['4', '6', '8']
rewind to a sequence: ['6', '8']
rewind to the beginning: 5 messages
asynchronous: ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9']
"""
ORDERS = """failed: 3 this order is not ready
unfinished: ['3']
livelocks: []
delivered again: ['3', '4', '5']
committed: {'orders/0': 6}
"""
HANDLED = """handled, in order: good 1, flaky 1, flaky 2, broken 1, last 1
still running: False
dead letter: broken - the customer does not exist
"""
ENTRIES = """got: one ((b'msg', b'0'),)
got: two ((b'msg', b'0'),)
got: one ((b'msg', b'1'),)
got: two ((b'msg', b'1'),)
then: one 1
then: two 1
then: one 2
then: two 2
nothing more: None
without a group: [('one', '0'), ('one', '1'), ('one', '2')]
"""


def run(name: str, *words: str, folder: Path) -> str:
    """What a program prints; on stderr are the failures of its handlers, and nothing else."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = [line for line in done.stderr.splitlines() if not line.startswith("handler of ")]
    assert (done.returncode, told) == (0, []), done.stderr
    return done.stdout


@pytest.fixture
def server(redis_address: str) -> Iterator[str]:
    host, _, port = redis_address.partition(":")
    with redis.Redis(host, int(port)) as client:
        client.flushdb()
        yield f"redis://{redis_address}/"
        client.flushdb()


def test_seastreamer_in_memory_and_in_a_file(tmp_path: Path) -> None:
    assert run("seastreamer.py", folder=tmp_path) == FRUIT
    assert run("seastreamer.py", "file://fruit.ss/", folder=tmp_path) == FRUIT
    assert (tmp_path / "fruit.ss").exists()


def test_faust(tmp_path: Path) -> None:
    assert run("faust.py", folder=tmp_path) == ORDERS


def test_stream_backend_in_memory_and_on_redis(tmp_path: Path, server: str) -> None:
    assert run("stream_backend.py", folder=tmp_path) == HANDLED
    assert run("stream_backend.py", server, folder=tmp_path) == HANDLED


def test_coredis(tmp_path: Path, server: str) -> None:
    assert run("coredis.py", server, folder=tmp_path) == ENTRIES


def test_seastreamer_on_redis(tmp_path: Path, server: str) -> None:
    assert run("seastreamer.py", server, folder=tmp_path) == FRUIT
