"""Downloads of jars: repositories fail now and then, and processes ask at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spark_jobs import jars
from stream_consumers.errors import MissingDependencyError

COORDINATE = ("org.example", "parts", "1.0")
IVY = """\
#!/bin/sh
# Stands for Ivy, whose repository cannot be made to fail: notes the call, fails the first {failures} times.
set -e
mkdir "{folder}/at-work" || exit 9
echo call >> "{folder}/calls"
sleep 0.2
rmdir "{folder}/at-work"
[ "$(wc -l < "{folder}/calls")" -gt {failures} ] || {{ echo "SERVER ERROR: Bad Gateway"; exit 1; }}
for last; do :; done
mkdir -p "$(dirname "$last")"
touch "$(dirname "$last")/parts-1.0.jar" "$(dirname "$last")/shipped-2.13.jar"
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv(jars.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(jars, "RETRY_PAUSES_SECONDS", (0.0, 0.0))
    return tmp_path


def fail_first(folder: Path, failures: int) -> None:
    command = folder / "bin" / "java"
    command.write_text(IVY.format(folder=folder, failures=failures))
    command.chmod(0o755)


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().split())


def test_a_download_that_fails_is_tried_again(repository: Path) -> None:
    fail_first(repository, 2)
    folder = jars.resolved(COORDINATE, without={"shipped"})
    assert [jar.name for jar in folder.glob("*.jar")] == ["parts-1.0.jar"]
    assert calls(repository) == 3
    assert jars.resolved(COORDINATE) == folder
    assert calls(repository) == 3, "what is there is not downloaded again"


def test_a_download_that_always_fails_is_an_error_with_the_reason(repository: Path) -> None:
    fail_first(repository, 9)
    with pytest.raises(MissingDependencyError, match=r"(?s)org.example:parts:1.0 .* 3 attempts.*Bad Gateway"):
        jars.resolved(COORDINATE)
    assert calls(repository) == 3
    assert not list((repository / "cache").rglob("*.jar"))


def test_processes_that_ask_at_the_same_time_download_once(repository: Path) -> None:
    fail_first(repository, 0)
    with ThreadPoolExecutor(4) as pool:
        folders = {pool.submit(jars.resolved, COORDINATE) for _ in range(4)}
        assert len({folder.result() for folder in folders}) == 1
    assert calls(repository) == 1


def test_who_waits_for_the_download_is_told_and_nobody_else(repository: Path) -> None:
    fail_first(repository, 0)
    assert f"downloaded into {repository / 'cache'} first" in (jars.download_note() or "")
    jars.resolved(jars.DELTA_COORDINATE)
    assert jars.download_note() is None
    # Spark 4.0 cannot write tables there.
    is_announced = (jars.download_note(with_s3=True) or "").startswith("the jars of S3A are downloaded")
    assert is_announced is (jars.SPARK_LINE != "4.0")
