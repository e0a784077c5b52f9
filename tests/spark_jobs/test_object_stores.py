"""One set of storage options, for Spark and for the reader of the Delta log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spark_jobs import session
from spark_jobs.jars import LOG_STORE_CLASS, S3_LOG_STORE_CLASS
from spark_jobs.session import LOCAL_LOG_STORE, SparkOptions, delta_spark_config, object_store_config
from stream_consumers.errors import InvalidOptionError


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


def test_a_session_shows_no_secret_of_the_storage() -> None:
    assert "s3cret" not in repr(SparkOptions(table="s3a://lake/t", storage_options={"AWS_SECRET_ACCESS_KEY": "s3cret"}))
