"""The site of the documentation can be built, and its list of metadata keys is complete."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from stream_assets.metadata_keys import METADATA_KEYS
from tests.support.settings import ROOT

KEY = re.compile(r"(stream|ingest|replay|redrive|delta|sensor|dagster)/[a-z_/]+\Z")
# Keys of Dagster's tags and storage, which are no metadata.
OTHERS = {"dagster/asset_partition_range_start", "dagster/data_version", "dagster/partition", "dagster/priority"}


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stdout + built.stderr
    reference = (tmp_path / "reference" / "index.html").read_text()
    for shown in ("linger_seconds", "dead-letters redrive", "stream/lag_after"):
        assert shown in reference


def test_every_metadata_key_is_in_the_reference() -> None:
    listed = {key.key for keys in METADATA_KEYS.values() for key in keys}
    used: set[str] = set()
    for path in [*(ROOT / "stream_assets").rglob("*.py"), *(ROOT / "sensors").rglob("*.py")]:
        if path.name != "metadata_keys.py":
            nodes = ast.walk(ast.parse(path.read_text()))
            used |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    found = {text for text in used if KEY.match(text)} - OTHERS - {"stream/lag/"}
    assert found - listed == set()
    # The sums of batches, of ingestion and of replays are named in metadata.py without their prefix.
    assert {key for key in listed - used if not re.match(r"(stream|ingest|replay)/", key)} == set()
