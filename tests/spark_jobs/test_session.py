"""Where a session comes from, and its settings for the storage of a table; none is made here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkRuntimeError

from spark_jobs import session
from spark_jobs.jars import LOG_STORE_CLASS, S3_LOG_STORE_CLASS
from spark_jobs.session import (
    LOCAL_LOG_STORE,
    SparkOptions,
    check_session,
    create_session,
    delta_spark_config,
    object_store_config,
)
from spark_jobs.spark_server import client
from spark_jobs.spark_server.folder import UnusableFolderError
from spark_jobs.spark_start import GUARD
from spark_jobs.writing.failures import catalog_unavailable, explain
from stream_consumers.errors import InvalidOptionError, SparkSessionError
from tests.support.kept_errors import kept


class Spark:
    """What ``pyspark.sql.SparkSession`` is to its users: ``builder``, and ``active``."""

    running: Any = None

    def __init__(self) -> None:
        self.asked: dict[str, str] = {}
        self.settings: dict[str, str] = {}

    @property
    def builder(self) -> Spark:
        return self

    def active(self) -> Any:
        if self.running is None:
            raise PySparkRuntimeError("none", {})
        return self.running

    def appName(self, name: str) -> Spark:  # noqa: N802 - Spark's name
        return self

    def config(self, name: str, value: str) -> Spark:
        self.settings[name] = value
        return self

    def master(self, name: str) -> Spark:
        self.asked = {"master": name}
        return self

    def getOrCreate(self) -> str:  # noqa: N802 - Spark's name
        return "in process"


class Lent:
    """A session in a server."""

    def __init__(self, is_served: bool) -> None:
        self.is_served = is_served
        self.is_stopped = False

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> Spark:
    made = Spark()
    monkeypatch.delenv("STREAM_ASSETS_SPARK", raising=False)
    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    monkeypatch.setattr(session, "_table_config", lambda *of_table: {"spark.jars": "delta.jar"})
    monkeypatch.setattr(session, "java", lambda: "java")
    monkeypatch.setattr(session, "start_context", lambda settings, master: None)
    monkeypatch.setattr(session, "check_session", lambda found: found)
    monkeypatch.setattr(session.SparkSession, "active", made.active)
    monkeypatch.setattr(session.SparkSession, "builder", made)
    monkeypatch.setattr(client, "connect", lambda settings: {"served": settings})
    return made


def test_a_local_spark_is_a_server(spark: Spark) -> None:
    found: Any = create_session(SparkOptions(master="local[2]", config={"spark.driver.memory": "1g"}))
    settings: Mapping[str, str] = found["served"]
    assert (settings["spark.master"], settings["spark.driver.memory"]) == ("local[2]", "1g")
    assert settings["spark.jars"] == "delta.jar"
    assert create_session() != "in process"


@pytest.mark.parametrize("in_process", [True, False])
def test_a_local_spark_asks_for_a_secret_whatever_its_settings_say(spark: Spark, in_process: bool) -> None:
    options = SparkOptions(in_process=in_process, config={"spark.authenticate": "false"})
    found: Any = create_session(options)
    settings = spark.settings if in_process else found["served"]
    assert settings["spark.authenticate"] == "true"


@pytest.mark.parametrize("master", ["local[2]", "spark://host:7077", "yarn"])
def test_spark_logs_no_values_of_rows_unless_the_user_sets_a_level(spark: Spark, master: str) -> None:
    create_session(SparkOptions(master=master, in_process=True))
    assert spark.settings["spark.log.level"] == "FATAL"
    create_session(SparkOptions(master=master, in_process=True, config={"spark.log.level": "WARN"}))
    assert spark.settings["spark.log.level"] == "WARN"


def test_what_says_otherwise(spark: Spark, monkeypatch: pytest.MonkeyPatch) -> None:
    assert create_session(SparkOptions(in_process=True)) == "in process"
    assert create_session(SparkOptions(master="spark://host:7077")) == "in process"
    assert spark.asked == {"master": "spark://host:7077"}
    monkeypatch.setenv("SPARK_REMOTE", "sc://host")
    assert create_session() == "in process"
    monkeypatch.delenv("SPARK_REMOTE")
    monkeypatch.setenv("STREAM_ASSETS_SPARK", "in-process")
    assert create_session() == "in process"
    monkeypatch.setenv("STREAM_ASSETS_SPARK", "elsewhere")
    with pytest.raises(InvalidOptionError, match="STREAM_ASSETS_SPARK is 'elsewhere'"):
        create_session()


def test_without_a_safe_folder_it_is_in_process_and_said(
    spark: Spark, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(settings: Mapping[str, str]) -> None:
        raise UnusableFolderError("/home cannot be written")

    monkeypatch.setattr(client, "connect", refused)
    assert create_session() == "in process"
    assert "in the process of this run" in caplog.text
    assert "/home cannot be written" in caplog.text


def test_a_session_of_the_user_is_used_as_it_is(spark: Spark, monkeypatch: pytest.MonkeyPatch) -> None:
    class Classic(session.SparkSession):
        def __init__(self) -> None: ...

    def refused(name: str, value: str) -> Spark:
        raise AssertionError(f"{name} would be set in a session of the user")

    monkeypatch.setattr(spark, "config", refused)
    spark.running = Classic()
    assert create_session(SparkOptions(config={"spark.sql.session.timeZone": "UTC"})) is spark.running


def test_a_session_that_is_lent_already_is_used_while_its_server_lives(spark: Spark) -> None:
    spark.running = lent = Lent(is_served=True)
    assert create_session(SparkOptions(in_process=True)) is lent
    spark.running = dead = Lent(is_served=False)
    assert create_session() != "in process"
    assert (lent.is_stopped, dead.is_stopped) == (False, True)


def test_a_spark_that_starts_gets_what_the_storage_of_the_table_needs(
    spark: Spark, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(**config: str) -> tuple[str, Mapping[str, str]]:
        found: list[Any] = []
        monkeypatch.setattr(session, "_table_config", lambda *of_table: found.append(of_table) or {})
        create_session(SparkOptions(table="s3a://lake/orders", storage_options={"AWS_REGION": "x"}, config=config))
        return found[0]  # type: ignore[no-any-return]

    assert asked() == ("s3a://lake/orders", {"AWS_REGION": "x"})
    assert asked(**{"spark.jars.packages": "org.apache.hadoop:hadoop-aws:3.4.1"})[0] == ""


@pytest.mark.parametrize(
    "remote",
    [
        "sc://127.0.0.1:1/;token=hunter2",
        "sc://127.0.0.1:hunter2/;x",
        "sc://127.0.0.1;token=hunter2",
        "sc://me:hunter2@127.0.0.1:1",
        "127.0.0.1;token=hunter2",
    ],
)
def test_no_error_repeats_what_may_be_a_token(remote: str) -> None:
    with pytest.raises(SparkSessionError) as raised:
        create_session(SparkOptions(remote=remote))
    assert "hunter2" not in kept(raised.value)


@pytest.mark.parametrize("remote", ["sc://127.0.0.1:1/p;token=hunter2", "sc://127.0.0.1:hunter2/;token=x"])
def test_no_error_repeats_what_may_be_a_token_in_the_environment(monkeypatch: pytest.MonkeyPatch, remote: str) -> None:
    monkeypatch.setattr(session, "running_session", lambda: None)
    monkeypatch.setattr(session, "_table_config", lambda *of_table: {})
    monkeypatch.setenv("SPARK_REMOTE", remote)
    with pytest.raises(SparkSessionError) as raised:
        create_session(SparkOptions(config={"spark.connect.x": "1"}))
    assert "hunter2" not in kept(raised.value)


@pytest.mark.parametrize(
    ("options", "secret"),
    [
        (SparkOptions(config={"spark.hadoop.fs.s3a.secret.key": "setting-hunter2"}), "setting-hunter2"),
        (SparkOptions(storage_options={"AWS_SESSION_TOKEN": "option-hunter2"}), "option-hunter2"),
        (SparkOptions(), "environment-hunter2"),
    ],
)
def test_no_error_repeats_a_secret_that_spark_was_given(
    spark: Spark, monkeypatch: pytest.MonkeyPatch, options: SparkOptions, secret: str
) -> None:
    def refused(settings: Mapping[str, str]) -> None:
        raise PySparkRuntimeError(f"The token {secret} has expired", {})

    monkeypatch.setenv("AWS_SESSION_TOKEN", "environment-hunter2")
    monkeypatch.setattr(client, "connect", refused)
    with pytest.raises(SparkSessionError) as raised:
        create_session(options)
    assert "hunter2" not in kept(raised.value)
    table = "s3a://lake/orders"
    text = f"java.io.IOException: {table}/_delta_log: the token {secret} has expired"
    explained = explain(RuntimeError(text), table=table)
    assert "[hidden] has expired" in str(explained)
    assert "hunter2" not in str(explained.revealed())
    hive = f"HiveException: Could not connect to meta store: {secret}"
    away = catalog_unavailable(RuntimeError(hive))
    assert away is not None
    assert "hunter2" not in str(away)


@pytest.fixture(autouse=True)
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "s3_jars", lambda: [Path("/jars/s3a.jar")])
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


def settings(**options: str) -> dict[str, str]:
    """What S3A is told."""
    prefix = "spark.hadoop.fs.s3a."
    config = object_store_config("s3a://lake/orders", options)
    return {name.removeprefix(prefix): value for name, value in config.items() if name.startswith(prefix)}


def test_spark_gets_the_options_of_delta_rs_however_they_are_written() -> None:
    expected = {"access.key": "key", "secret.key": "secret", "session.token": "token", "endpoint.region": "eu-west-1"}
    values = ["key", "secret", "token", "eu-west-1"]
    for names in (
        ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"],
        ["aws_access_key_id", "aws_secret_access_key", "aws_session_token", "aws_default_region"],
        ["access_key_id", "secret_access_key", "token", "region"],
    ):
        assert settings(**dict(zip(names, values))) == expected


def test_an_endpoint_is_addressed_by_paths_unless_it_has_virtual_hosts() -> None:
    one = settings(AWS_ENDPOINT_URL="http://127.0.0.1:9000")
    assert one == {"endpoint": "http://127.0.0.1:9000", "path.style.access": "true"}
    other = settings(AWS_ENDPOINT_URL="http://127.0.0.1:9000", AWS_VIRTUAL_HOSTED_STYLE_REQUEST="true")
    assert other["path.style.access"] == "false"
    assert settings() == {}, "Amazon's own"


def test_what_is_not_given_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the machine")
    # Only what is Amazon's: a variable of that name may be anybody's.
    monkeypatch.setenv("TOKEN", "of somebody else")
    assert settings(access_key_id="given") == {"endpoint.region": "eu-west-1", "access.key": "given"}


def test_what_is_given_counts_more_than_the_environment_whatever_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://another")
    given = {"AWS_DEFAULT_REGION": "us-east-1", "endpoint": "http://lake"}
    assert settings(**given) == {"endpoint.region": "us-east-1", "endpoint": "http://lake", "path.style.access": "true"}
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://of-s3")
    assert settings()["endpoint"] == "http://of-s3", "as delta-rs and the AWS tools take it"


def test_a_bucket_for_everybody_needs_no_keys() -> None:
    assert settings(AWS_SKIP_SIGNATURE="true") == {
        "aws.credentials.provider": "org.apache.hadoop.fs.s3a.AnonymousAWSCredentialsProvider"
    }
    with pytest.raises(InvalidOptionError):
        settings(AWS_SKIP_SIGNATURE="perhaps")


@pytest.mark.parametrize("table", ["s3a://lake/orders", "s3://lake/orders"])
def test_both_names_of_the_storage_have_the_log_store(table: str) -> None:
    config = delta_spark_config(table)
    for scheme in ("s3", "s3a"):
        assert config[f"spark.delta.logStore.{scheme}.impl"] == S3_LOG_STORE_CLASS
    assert config[LOCAL_LOG_STORE] == LOG_STORE_CLASS
    assert config["spark.jars"].endswith(",/jars/s3a.jar")
    assert "s3a.jar" not in delta_spark_config("/lake/orders")["spark.jars"]


def test_a_session_made_elsewhere_requires_a_secret_at_its_ports() -> None:
    assert delta_spark_config("/lake/orders").items() >= GUARD.items()


@pytest.mark.parametrize(("master", "is_guarded"), [("local[2]", "true"), ("local[2]", None), ("yarn", None)])
def test_a_local_session_without_a_secret_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, master: str, is_guarded: str | None
) -> None:
    monkeypatch.setattr(session, "_use_own_python", lambda found: None)
    monkeypatch.setattr(session, "send_packages", lambda found: None)
    made: Any = SimpleNamespace(conf=RuntimeConf({**delta_spark_config("/lake/orders"), "spark.master": master}))
    made.conf.settings["spark.authenticate"] = is_guarded or "false"
    check_session(made)
    assert ("spark.authenticate" in caplog.text) == (master == "local[2]" and not is_guarded)


@dataclass
class RuntimeConf:
    """The settings of a session."""

    settings: dict[str, str]

    def get(self, name: str, default: str) -> str:
        return self.settings.get(name, default)

    def set(self, name: str, value: str) -> None:
        self.settings[name] = value


def test_a_session_shows_no_secret_of_the_storage() -> None:
    assert "s3cret" not in repr(SparkOptions(table="s3a://lake/t", storage_options={"AWS_SECRET_ACCESS_KEY": "s3cret"}))
