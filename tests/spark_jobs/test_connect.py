"""The same job over Spark Connect: the session lives in a server, the client has no JVM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.settings import ROOT
from tests.support.streams import assert_each_once, write_stream

pytestmark = pytest.mark.spark


def test_ingest_over_connect(server: str, folder: Path) -> None:
    url = write_stream(folder / "orders.ss", 300, malformed=frozenset({7}))
    command = [sys.executable, "-m", "stream_assets.cli.main", "ingest", "--source", url, "--table", str(folder / "t")]
    command += ["--decode", "json", "--schema", "id BIGINT, user STRING", "--max-records", "200", "--json"]
    done = subprocess.run(
        [*command, "--remote", server], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(row["rows"], row["dead letters"]) for row in json.loads(done.stdout)["rows"]] == [(199, 1), (100, 0)]
    assert_each_once(folder / "orders.ss", folder / "t")
    wrong = subprocess.run(
        [*command, "--remote", "sc://127.0.0.1:1/;token=secret"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert wrong.returncode == 1
    assert "error: no Spark session at sc://127.0.0.1:1: " in wrong.stderr
    assert "secret" not in wrong.stderr + wrong.stdout
