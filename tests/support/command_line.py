"""Commands in this process."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from stream_assets.cli.main import main

SCHEMA = "id BIGINT, user STRING, amount DECIMAL(10,2)"


def run(*words: str | Path, text: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], input=text)


def failing(result: Result, *texts: str) -> None:
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    for text in texts:
        assert text in result.stderr, result.stderr
