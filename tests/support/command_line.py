"""Commands in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from stream_assets.cli.main import main

SCHEMA = "id BIGINT, user STRING, amount DECIMAL(10,2)"


def run(*words: str | Path, text: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], input=text)


def printed(*words: str | Path) -> list[dict[str, Any]]:
    """What a command that succeeds prints for machines."""
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return found


def failing(result: Result, *texts: str) -> None:
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    for text in texts:
        assert text in result.stderr, result.stderr
