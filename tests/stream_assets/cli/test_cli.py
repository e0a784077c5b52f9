"""The command line, with good and bad input; Spark is the shared session."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import cast
from unittest.mock import create_autospec

import pytest
from click.testing import Result
from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.jars import CACHE_VARIABLE
from stream_assets.cli.demo import LONGEST_TEMPORARY_FOLDER, DemoFolder, _daemon, make_empty, temporary_folder
from stream_assets.cli.ingest_commands import _listed
from stream_assets.cli.machine_commands import _java_version, doctor
from stream_assets.cli.options import _imported
from stream_assets.cli.output import inform
from stream_consumers.errors import InvalidOptionError, MissingDependencyError, UntrustedFileError
from tests.support.command_line import SCHEMA, failing, printed, run
from tests.support.groups_without_spark import GroupWithoutSpark
from tests.support.ss_files import NO_BEACONS, break_length, numbered, write_file
from tests.support.streams import assert_each_once, sequences_in_table, write_stream


def ingest(folder: Path, *more: str) -> Result:
    words = ["--source", f"file://{folder}/orders.ss/orders", "--table", str(folder / "t"), "--group", "g"]
    return run("ingest", *words, "--decode", "json", "--schema", SCHEMA, *more)


@pytest.mark.parametrize(("count", "line"), [(2, "17, 18"), (3, "17, 18 …")])
def test_dots_after_examples_show_that_there_are_more(count: int, line: str) -> None:
    assert _listed(["17", "18"], count=count) == line


def test_the_folder_of_the_demo_belongs_to_this_user_alone(tmp_path: Path) -> None:
    """The daemon imports modules from it."""
    ours, others = tmp_path / ".demo", tmp_path / "others"
    (ours / "yaml").mkdir(parents=True)
    make_empty(ours)
    assert not list(ours.iterdir())
    assert ours.stat().st_mode & 0o077 == 0
    (others / "yaml").mkdir(parents=True)
    ours.rmdir()
    ours.symlink_to(others)
    with pytest.raises(UntrustedFileError):
        make_empty(ours)
    others.chmod(0o777)
    with pytest.raises(UntrustedFileError):
        make_empty(others / ".demo")


def test_no_name_between_colons_becomes_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    inform("jobs:a: it raised")
    assert capsys.readouterr().err == "jobs:a: it raised\n"


def test_produce_peek_ingest_lag_and_verify(spark: SparkSession, folder: Path) -> None:
    url = f"file://{folder}/orders.ss/orders"
    sent = printed("produce", url, "--count", "100", "--shards", "2")
    assert sent == [{"shard": f"orders/{shard}", "first": 1, "last": 50} for shard in (0, 1)]
    peeked = run("peek", url, "--max", "2", "--json")
    lines = [json.loads(line) for line in peeked.stdout.splitlines()]
    assert [(m["stream_key"], m["shard_id"], m["sequence"]) for m in lines] == [("orders", 0, 1), ("orders", 1, 1)]
    assert list(lines[0]) == ["stream_key", "shard_id", "sequence", "timestamp", "payload"]
    place = ("--table", folder / "t", "--group", "g")
    assert [row["lag"] for row in printed("lag", url, *place)] == [50, 50]
    done = ingest(folder, "--max-records", "60", "--json")
    assert done.exit_code == 0, done.output
    batches = json.loads(done.stdout)["rows"]
    assert [(r["batch"], r["rows"], r["lag"]) for r in batches] == [(1, 60, 40), (2, 40, 0)]
    assert printed("lag", url, *place)[0] == {
        "shard": "orders/0",
        "start": 1,
        "committed": None,
        "ledger": 51,
        "end": 51,
        "lag": 0,
        "blocked": 0,
        "lost": None,
    }
    names = ("first", "last", "rows", "dead letters", "missing", "duplicated")
    verified = printed("verify", "--source", url, *place)
    assert [tuple(row[name] for name in names) for row in verified] == [(1, 50, 50, 0, 0, 0)] * 2
    assert "nothing to read: lag 0" in ingest(folder).output
    assert_each_once(folder / "orders.ss", folder / "t")
    spark.sql(f"DELETE FROM delta.`{folder}/t` WHERE _shard = 0 AND _sequence = 7")
    broken = run("verify", "--source", url, "--table", folder / "t", "--group", "g", "--json")
    assert broken.exit_code == 1
    assert [r["missing"] for r in json.loads(broken.stdout)["rows"]] == [1, 0]
    assert "note: another writer changed rows of the table: version 3, DELETE at 20" in broken.stderr
    assert "orders/0: missing 7\n" in broken.stderr, "these are all"
    assert "by a condition on _sequence, _shard" in broken.stderr
    assert " 7)" not in broken.stderr, "a condition has values of rows"
    assert "nothing to read: lag 0" in ingest(folder).output, "it is not read again in silence"
    assert "rows have no" not in broken.stderr
    spark.sql(f"UPDATE delta.`{folder}/t` SET _sequence = NULL WHERE _shard = 1 AND _sequence < 3")
    broken = run("verify", "--source", url, "--table", folder / "t", "--group", "g", "--json")
    assert [r["missing"] for r in json.loads(broken.stdout)["rows"]] == [1, 2]
    assert "note: 2 rows have no _stream or _shard or _sequence: they are not compared" in broken.stderr


def test_lines_on_stdin_are_messages(folder: Path) -> None:
    url = f"file://{folder}/lines.ss/lines"
    assert run("produce", url, text="one\n\n[three\n").exit_code == 0
    messages = [json.loads(line) for line in run("peek", url, "--json").stdout.splitlines()]
    assert [message["payload"] for message in messages] == ["one", "", "[three"]
    assert [m["sequence"] for m in map(json.loads, run("peek", url, "--start", "2", "--json").stdout.splitlines())] == [
        2,
        3,
    ]


def test_a_file_url_without_a_stream_key(folder: Path) -> None:
    write_stream(folder / "orders.ss", 3)
    failing(run("peek", f"file://{folder}/orders.ss"))
    failing(run("peek", f"file://{folder}/orders.ss/"))


def test_a_file_that_cannot_be_read_makes_no_table(folder: Path) -> None:
    file = folder / "orders.ss"
    failing(ingest(folder), "orders.ss")
    for content in (b"id,user\n" * 50, b""):
        file.write_bytes(content)
        failing(ingest(folder), "orders.ss", "first_bytes=")
    file.unlink()
    write_stream(file, 3)
    data = bytearray(file.read_bytes())
    data[2] = 2
    file.write_bytes(data)
    failing(ingest(folder), "version=2, known=1")
    assert not (folder / "t").exists()


@pytest.mark.slow
def test_a_truncated_tail_is_told_after_all_whole_messages_are_in_the_table(spark: SparkSession, folder: Path) -> None:
    write_stream(folder / "orders.ss", 40)
    file = folder / "orders.ss"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    long_ago = time.time() - 60
    os.utime(file, (long_ago, long_ago))
    failing(
        ingest(folder),
        "ends in the middle of a message",
        "All complete messages before it are in the table, and the next run continues after them.",
        "--count 0",
    )
    assert sum(sequences_in_table(folder / "t").values()) == 39
    assert run("produce", f"file://{file}/orders", "--count", "0").exit_code == 0
    assert list(folder.glob("orders.ss.tail-*"))
    write_stream(file, 10)
    assert ingest(folder).exit_code == 0
    assert_each_once(file, folder / "t")


def test_a_table_path_that_is_no_table(folder: Path) -> None:
    write_stream(folder / "orders.ss", 3)
    (folder / "t").write_text("not a folder")
    failing(ingest(folder), "is a file, not a table")
    (folder / "t").unlink()
    (folder / "t").mkdir()
    (folder / "t" / "notes.txt").write_text("keep me")
    failing(ingest(folder), "holds files but no Delta table")
    assert [path.name for path in (folder / "t").iterdir()] == ["notes.txt"]
    (folder / "t" / "notes.txt").unlink()
    (folder / "t" / "_delta_log").mkdir()
    (folder / "t" / "_delta_log" / f"{0:020d}.json").write_text("not json\n")
    failing(ingest(folder), "is torn", f"{0:020d}.json")


@pytest.mark.slow
def test_a_schema_that_does_not_match_changes_nothing(spark: SparkSession, folder: Path) -> None:
    write_stream(folder / "orders.ss", 10)
    assert ingest(folder).exit_code == 0
    write_stream(folder / "orders.ss", 10)
    failing(ingest(folder, "--schema", "id STRING"), "id is string but bigint in the table")
    assert ingest(folder).exit_code == 0
    assert_each_once(folder / "orders.ss", folder / "t")


def measured_lag(path: Path, table: str) -> tuple[int, str | None, list[tuple[int, int, int]]]:
    """The exit code of ``lag``, what cannot be read, and the position, the end and the lag of each shard."""
    done = run("lag", f"file://{path}/orders", "--table", table, "--group", "g", "--json")
    document = json.loads(done.stdout)
    rows = [(row["ledger"], row["end"], row["lag"]) for row in document["rows"]]
    assert (document["unreadable_tail"] or "") in done.stderr
    return done.exit_code, document["unreadable_tail"], rows


def test_lag_is_not_right_about_a_file_whose_end_cannot_be_read(folder: Path) -> None:
    path, what = folder / "orders.ss", Ingestion("g", str(folder / "t"))
    group = GroupWithoutSpark(f"file://{path}/orders", what)
    write_file(path, numbered(30), interval=NO_BEACONS)
    offset = break_length(path, 1)
    code, tail, rows = measured_lag(path, what.table)
    assert (code, f"offset {offset}" in (tail or ""), rows) == (1, True, [])
    write_file(path, numbered(10), interval=NO_BEACONS)
    group.begin()
    group.ingest()
    os.utime(path, (1, 1))
    assert measured_lag(path, what.table) == (0, None, [(11, 11, 0)])
    write_file(path, numbered(30), interval=NO_BEACONS)
    offset = break_length(path, 11)
    code, tail, rows = measured_lag(path, what.table)
    assert (code, f"offset {offset}" in (tail or ""), rows) == (1, True, [(11, 11, 0)])


def test_lag_is_not_right_about_a_file_that_ends_before_the_position(folder: Path) -> None:
    path, what = folder / "orders.ss", Ingestion("g", str(folder / "t"))
    group = GroupWithoutSpark(f"file://{path}/orders", what)
    write_file(path, numbered(100))
    group.begin()
    group.ingest()
    # The sequences of a producer that could not read the last messages begin again after those that it could read.
    data, more = path.read_bytes(), numbered(10, first=90)
    write_file(path, [*numbered(100), *more])
    os.utime(path, (1, 1))
    assert path.read_bytes().startswith(data)
    code, tail, rows = measured_lag(path, what.table)
    assert (code, tail is not None, [(position, lag) for position, _, lag in rows]) == (1, True, [(101, 0)])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("ingest", "--sorce", "x"), "--source"),
        (("ingest", "--source", "file://x.ss/o", "--table", "t", "--decode", "xml"), "'raw', 'text', 'json'"),
        (("ingest", "--source", "file://x.ss/o", "--table", "t", "--decode", "json"), "needs --schema"),
        (("ingest", "--source", "memory://x/o", "--table", "t", "--decode", "json", "--schema", "id BIGIN"), "BIGIN"),
        (("ingest", "--source", "file://x.ss/o", "--table", "t", "--mode", "load_balanced"), "Use mode 'resumable'"),
        (("ingest", "--source", "ftp://x/o", "--table", "t"), "no backend has the URL scheme 'ftp'"),
        (("peek", "orders.ss"), "has no protocol"),
        (("lag", "memory://nothing/o"), "the stream is empty or does not exist: lag 0"),
        (("produce", "file:///nowhere/at/all/x.ss/o", "--count", "1"), "/nowhere/at/all does not exist"),
        (
            ("produce", "memory://x/o", "--count", "1", "--end"),
            "is not a stream file. Leave out --beacon-interval and --end",
        ),
        (("produce", "memory://x/o", "--json-lines", "--key", "k"), "--json-lines and --key cannot be combined"),
        (("nonsense",), "No such command"),
    ],
)
def test_wrong_words_are_explained(words: tuple[str, ...], text: str) -> None:
    result = run(*words)
    assert text in result.output
    assert "Traceback" not in result.output
    assert result.exit_code == (0 if words[0] == "lag" else result.exit_code)
    assert result.exit_code != 0 or words[0] == "lag"


def test_help_starts_quickly_without_dagster_or_a_jvm() -> None:
    code = "import sys; import stream_assets.cli.main; assert not {'dagster', 'pyspark'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_a_closed_pipe_is_no_error(folder: Path) -> None:
    write_stream(folder / "orders.ss", 5000)
    command = f"{sys.executable} -m stream_assets.cli.main peek file://{folder}/orders.ss/orders | head -n 1"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_a_remote_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--remote", "env:SPARK_AT"]
    monkeypatch.delenv("SPARK_AT", raising=False)
    with pytest.raises(InvalidOptionError, match="SPARK_AT"):
        doctor.make_context("doctor", list(words))
    monkeypatch.setenv("SPARK_AT", "sc://spark:15002/;token=hunter2")
    assert doctor.make_context("doctor", words).params["remote"] == "sc://spark:15002/;token=hunter2"


@pytest.mark.parametrize(("version", "is_enough"), [("17.0.9", True), ("21", True), ("1.8.0_392", False)])
def test_the_version_of_java_is_known_where_java_repeats_its_options(
    version: str, is_enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "java"
    command.write_text(f"""#!/bin/sh\necho 'Picked up JAVA_TOOL_OPTIONS: -Da="b"\nopenjdk version "{version}"' >&2\n""")
    command.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if is_enough:
        assert _java_version() == version
    else:
        with pytest.raises(MissingDependencyError):
            _java_version()


@pytest.mark.parametrize("kind", ["ImportError", "RuntimeError"])
def test_the_error_of_the_module_of_a_transform_is_repeated_without_passwords(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"raising_{kind}.py").write_text(f"raise {kind}('no https://robot:hunter2@repo.example/a')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidOptionError) as raised:
        _imported(f"raising_{kind}:orders")
    assert "repo.example" in raised.value.what
    assert "hunter2" not in raised.value.what


def test_a_module_in_the_working_folder_replaces_no_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("this_is_only_here", "colorsys"):
        (tmp_path / f"{name}.py").write_text("def hls_to_rgb() -> str: return 'local'")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert inspect.getfile(cast("FunctionType", _imported("colorsys:hls_to_rgb"))) != str(tmp_path / "colorsys.py")
    assert "" not in sys.path
    local = _imported("this_is_only_here:hls_to_rgb")
    assert callable(local)
    assert local() == "local"
    assert sys.path[-1] == ""


def test_the_demo_imports_nothing_from_here_nor_shares_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = create_autospec(subprocess.Popen)
    monkeypatch.setattr("stream_assets.cli.demo.subprocess.Popen", started)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".demo").mkdir()
    with _daemon(DemoFolder(tmp_path / ".demo", 8000)):
        ((command,), options) = started.call_args
    temporary = Path(options["env"]["TMPDIR"])
    assert temporary.stat().st_mode & 0o777 == 0o700, "a Spark server may still use it"
    assert options["cwd"] == tmp_path / ".demo"
    assert str(tmp_path) not in command


@pytest.mark.parametrize(("name", "is_in_cache"), [("c", True), ("c" * LONGEST_TEMPORARY_FOLDER, False)])
def test_the_temporary_folder_of_the_demo_is_private_and_short(
    monkeypatch: pytest.MonkeyPatch, name: str, is_in_cache: bool
) -> None:
    with TemporaryDirectory() as parent:
        monkeypatch.setenv(CACHE_VARIABLE, f"{parent}/{name}")
        monkeypatch.setattr("tempfile.tempdir", parent)
        folder = Path(temporary_folder())
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.is_relative_to(Path(parent, name)) == is_in_cache
        assert len(str(folder)) <= LONGEST_TEMPORARY_FOLDER
