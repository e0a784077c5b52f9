"""Which runs share a server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spark_jobs.spark_server.configuration import configuration_key, server_environment

SETTINGS = {"spark.master": "local[2]", "spark.hadoop.fs.s3a.secret.key": "secret"}


def test_what_a_run_could_notice_is_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jar = tmp_path / "a.jar"
    jar.write_text("1")
    settings = {**SETTINGS, "spark.jars": str(jar)}
    environment = {"AWS_SECRET_ACCESS_KEY": "secret", "TZ": "UTC"}
    keys = {configuration_key(settings, environment)}
    keys.add(configuration_key({**settings, "spark.master": "local[1]"}, environment))
    keys.add(configuration_key(settings, {**environment, "AWS_SECRET_ACCESS_KEY": "other"}))
    keys.add(configuration_key(settings, {**environment, "PYTHONPATH": "elsewhere"}))
    monkeypatch.setattr("sys.executable", "/another/python")
    keys.add(configuration_key(settings, environment))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    jar.write_text("22")
    keys.add(configuration_key(settings, environment))
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    keys.add(configuration_key(settings, environment))
    assert len(keys) == 7
    assert not any("secret" in key for key in keys)


@pytest.mark.parametrize("variable", ["SPARK_CONF_DIR", "HADOOP_CONF_DIR", "SPARK_HOME"])
def test_files_with_settings_count(tmp_path: Path, variable: str) -> None:
    folder = tmp_path / "conf"
    folder.mkdir()
    environment = {variable: str(tmp_path if variable == "SPARK_HOME" else folder)}
    keys = {configuration_key(SETTINGS, environment)}
    for text in ("spark.ui.enabled true", "spark.ui.enabled false"):
        (folder / "spark-defaults.conf").write_text(text)
        keys.add(configuration_key(SETTINGS, environment))
    assert len(keys) == 3


@pytest.mark.parametrize("name", ["spark.driver.extraClassPath", "spark.jars"])
def test_jars_by_other_names_count(tmp_path: Path, name: str) -> None:
    jar = tmp_path / "a.jar"
    settings = {**SETTINGS, name: f"/elsewhere.jar:{jar}" if "Path" in name else f"file://{jar}"}
    before = configuration_key(settings)
    jar.write_text("1")
    assert configuration_key(settings) != before


def test_a_working_directory_that_was_made_again_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, kept = tmp_path / "here", tmp_path / "kept"
    here.mkdir()
    monkeypatch.chdir(here)
    before = configuration_key(SETTINGS)
    here.rename(kept)
    here.mkdir()
    monkeypatch.chdir(here)
    assert configuration_key(SETTINGS) != before


def test_who_makes_files_with_other_rights_has_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {configuration_key(SETTINGS)}
    before = os.umask(0o031)
    try:
        keys.add(configuration_key(SETTINGS))
        assert os.umask(0o031) == 0o031, "it was only looked at"
    finally:
        os.umask(before)
    for function, found in (("getegid", 12345), ("getgroups", [12345])):
        with monkeypatch.context() as patched:
            patched.setattr(os, function, lambda found=found: found)
            keys.add(configuration_key(SETTINGS))
    assert len(keys) == 4


def test_what_a_terminal_says_of_itself_is_no_other_server() -> None:
    noise = {"TERM": "xterm", "SSH_TTY": "/dev/pts/1", "PWD": "/", "SHLVL": "3", "DAGSTER_HOME": "/home"}
    noise |= {"AIRFLOW_CTX_DAG_RUN_ID": "scheduled__2026-11-27", "_AIRFLOW_PARSING_CONTEXT_TASK_ID": "ingest"}
    assert configuration_key(SETTINGS, {**os.environ, **noise}) == configuration_key(SETTINGS, os.environ)
    kept = dict.fromkeys(("TZ", "HISTORY_TABLE", "TERMS_PATH", "SSH_KEY_FILE", "GPG_KEY", "WT_LIMIT", "DBUS_LINE"), "1")
    assert server_environment({**noise, **kept}) == kept


def test_a_run_that_imports_from_its_working_folder_has_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = configuration_key(SETTINGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert configuration_key(SETTINGS) != before
