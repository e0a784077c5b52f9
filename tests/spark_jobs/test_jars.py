"""Downloads of jars: repositories fail now and then, may be others, and processes ask at the same time."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from spark_jobs import jars, session
from stream_consumers.errors import InvalidOptionError, MissingDependencyError, UntrustedFileError

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
    folder = jars.resolved(COORDINATE)
    assert {jar.name for jar in folder.glob("*.jar")} == {"parts-1.0.jar", "shipped-2.13.jar"}
    assert calls(repository) == 3
    assert jars.resolved(COORDINATE) == folder
    assert calls(repository) == 3, "what is there is not downloaded again"


def test_a_download_that_always_fails_is_an_error_with_the_reason(repository: Path) -> None:
    fail_first(repository, 9)
    with pytest.raises(MissingDependencyError, match=r"(?s)org.example:parts:1.0 .* 3 attempts.*Bad Gateway"):
        jars.resolved(COORDINATE)
    assert calls(repository) == 3
    assert not list((repository / "cache").rglob("*.jar"))


@pytest.mark.parametrize("start", [lambda: jars.resolved(COORDINATE), jars.delta_jars])
def test_the_report_of_java_is_repeated_without_secrets(
    repository: Path, start: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Djavax.net.ssl.keyStorePassword=hunter2-of-the-lake")
    monkeypatch.setattr(jars, "pinned", lambda found: found)
    if start is jars.delta_jars:
        monkeypatch.setattr(jars, "resolved", lambda coordinate: repository)
    command = repository / "bin" / "java"
    command.write_text(
        '#!/bin/sh\necho "Picked up JAVA_TOOL_OPTIONS: $JAVA_TOOL_OPTIONS"\necho "no $JAVA_TOOL_OPTIONS"\nexit 1\n'
    )
    command.chmod(0o755)
    with pytest.raises(MissingDependencyError) as raised:
        start()
    assert "hunter2" not in str(raised.value)
    assert "Picked up" not in str(raised.value)
    assert "no -Djavax.net.ssl.keyStorePassword=" in str(raised.value)


def test_processes_that_ask_at_the_same_time_download_once(repository: Path) -> None:
    fail_first(repository, 0)
    with ThreadPoolExecutor(4) as pool:
        folders = {pool.submit(jars.resolved, COORDINATE) for _ in range(4)}
        assert len({folder.result() for folder in folders}) == 1
    assert calls(repository) == 1
    (lock,) = (repository / "cache" / "jars").glob("lock")
    assert lock.stat().st_mode & 0o077 == 0, "another user who can open it can hold it"


def test_who_waits_for_the_download_is_told_and_nobody_else(repository: Path) -> None:
    fail_first(repository, 0)
    assert f"downloaded into {repository / 'cache'} first" in (jars.download_note() or "")
    jars.resolved(jars.DELTA_COORDINATE)
    assert jars.download_note() is None
    # Spark 4.0 cannot write tables there.
    is_announced = (jars.download_note(with_s3=True) or "").startswith("the jars of S3A are downloaded")
    assert is_announced is (jars.SPARK_LINE != "4.0")


def test_where_there_is_no_network_a_copy_of_the_cache_is_enough(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_first(repository, 0)
    jars.resolved(COORDINATE)
    shutil.copytree(repository / "cache" / "jars", repository / "image" / "jars")
    monkeypatch.setenv(jars.CACHE_VARIABLE, str(repository / "image"))
    folder = jars.resolved(COORDINATE)
    assert folder.is_relative_to(repository / "image")
    assert calls(repository) == 1


def test_a_mirror_is_asked_in_place_of_the_public_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Ivy itself: the artifact is nowhere else."""
    place = tmp_path / "mirror" / "k3y" / "org" / "example" / "parts" / "1.0"
    place.mkdir(parents=True)
    names = "<groupId>org.example</groupId><artifactId>parts</artifactId><version>1.0</version>"
    (place / "parts-1.0.pom").write_text(f"<project><modelVersion>4.0.0</modelVersion>{names}</project>")
    (place / "parts-1.0.jar").write_bytes(b"of the mirror")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(tmp_path / "mirror")))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv(jars.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(jars.REPOSITORY_VARIABLE, f"http://127.0.0.1:{server.server_port}/k3y")
    monkeypatch.setattr(jars, "RETRY_PAUSES_SECONDS", ())
    try:
        folder = jars.resolved(COORDINATE)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert {file.name for file in folder.iterdir()} == {"parts-1.0.jar", jars.COMPLETE}
    assert (folder / "parts-1.0.jar").read_bytes() == b"of the mirror"
    kept = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert not [file for file in kept if b"k3y" in file.read_bytes()], "its path may be a key"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


class TestDigests:
    @pytest.fixture
    def jar(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        jar = tmp_path / "parts-1.0.jar"
        jar.write_bytes(b"as it was released")
        digests = tmp_path / "jars.sha256"
        digests.write_text(f"{hashlib.sha256(jar.read_bytes()).hexdigest()}  {jar.name}\n")
        monkeypatch.setattr(jars, "DIGESTS", digests)
        return jar

    def test_a_jar_as_it_was_released_is_taken(self, jar: Path) -> None:
        assert jars.pinned([jar]) == [jar]

    @pytest.mark.parametrize("accepted", ["", "1"])
    def test_another_jar_of_the_name_is_refused(
        self, jar: Path, accepted: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(jars.UNPINNED_VARIABLE, accepted)
        jar.write_bytes(b"as somebody changed it")
        with pytest.raises(UntrustedFileError):
            jars.pinned([jar])

    def test_an_unknown_jar_is_taken_only_if_the_user_says_so(self, jar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        newer = jar.rename(jar.with_name("parts-1.1.jar"))
        with pytest.raises(UntrustedFileError, match=jars.UNPINNED_VARIABLE):
            jars.pinned([newer])
        monkeypatch.setenv(jars.UNPINNED_VARIABLE, "1")
        assert jars.pinned([newer]) == [newer]

    @pytest.mark.parametrize("name", ["delta_jars", "s3_jars"])
    def test_what_is_downloaded_is_checked_at_each_call(
        self, repository: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fail_first(repository, 0)
        download = getattr(jars, name)
        # Those of Delta are checked before those of S3.
        monkeypatch.setattr(jars, "delta_jars", list)
        with pytest.raises(UntrustedFileError, match=r"parts-1\.0\.jar"):
            download()


class TestRights:
    def test_others_cannot_write_what_is_made_whatever_the_umask(self, repository: Path) -> None:
        fail_first(repository, 0)
        before = os.umask(0)
        try:
            folder = jars.resolved(COORDINATE)
        finally:
            os.umask(before)
        made = [repository / "cache", folder.parent, folder, *folder.iterdir()]
        assert [file for file in made if file.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)] == []

    @pytest.mark.parametrize(
        "place", ["cache", "cache/jars", "cache/jars/parts-1.0", "cache/jars/parts-1.0/parts-1.0.jar"]
    )
    def test_what_others_can_change_is_refused(self, repository: Path, place: str) -> None:
        fail_first(repository, 0)
        jars.resolved(COORDINATE)
        (repository / place).chmod(0o777)
        with pytest.raises(UntrustedFileError, match="0777"):
            jars.resolved(COORDINATE)

    @pytest.mark.parametrize(("mode", "is_refused"), [(0o777, True), (0o1777, False), (0o755, False)])
    def test_a_folder_above_in_which_others_can_replace_it_is_refused(
        self, repository: Path, mode: int, is_refused: bool
    ) -> None:
        (repository / "shared").mkdir()
        (repository / "shared").chmod(mode)
        with pytest.raises(UntrustedFileError) if is_refused else nullcontext():
            jars.own_folder(repository / "shared" / "cache" / "jars")
        (repository / "link").symlink_to(repository / "shared" / "cache")
        with pytest.raises(UntrustedFileError) if is_refused else nullcontext():
            jars.own_folder(repository / "link" / "jars")

    def test_a_folder_above_with_the_sticky_bit_must_not_be_of_another_user(
        self, repository: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its owner can replace what is in it."""
        (repository / "shared").mkdir()
        if os.getuid() == 0:
            os.chown(repository / "shared", 12345, 12345)
        else:
            monkeypatch.setattr(os, "getuid", lambda: 12345)
        (repository / "shared").chmod(0o1777)
        with pytest.raises(UntrustedFileError):
            jars.own_folder(repository / "shared" / "cache" / "jars")

    def test_what_belongs_to_another_user_is_refused(self, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fail_first(repository, 0)
        folder = jars.resolved(COORDINATE)
        if os.getuid() == 0:
            os.chown(folder, 12345, 12345)
        else:
            # Then the files are of another user than the one who asks.
            monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(UntrustedFileError):
            jars.resolved(COORDINATE)

    def test_the_packages_for_executors_are_kept_as_safely(self, repository: Path) -> None:
        before = os.umask(0)
        try:
            archive = session.archive()
        finally:
            os.umask(before)
        made = archive.read_bytes()
        archive.write_bytes(b"of another user")
        archive.chmod(0o666)
        assert session.archive() == archive
        assert (archive.read_bytes(), stat.S_IMODE(archive.stat().st_mode)) == (made, 0o644)
        (repository / "cache" / "packages").chmod(0o777)
        with pytest.raises(UntrustedFileError):
            session.archive()


def test_a_mirror_with_a_password_is_refused_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(jars.REPOSITORY_VARIABLE, "http://ann:hunter2@127.0.0.1:9/m2")
    monkeypatch.setenv("STREAM_ASSETS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InvalidOptionError) as told:
        jars.delta_jars()
    assert "hunter2" not in str(told.value)
    assert not any(b"hunter2" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
