"""Client options: secrets stay where they are until a client is made."""

from __future__ import annotations

import dagster as dg
import pytest

from stream_consumers.client_config import EnvironmentVariable, parse_client_option, resolve, without_values
from stream_consumers.create import StreamSource
from stream_consumers.errors import InvalidOptionError
from stream_consumers.urls import StreamUrl


@pytest.mark.parametrize("secret", [EnvironmentVariable("KAFKA_PASSWORD"), dg.EnvVar("KAFKA_PASSWORD")])
def test_secrets_are_looked_up_when_a_client_is_made(
    secret: EnvironmentVariable | dg.EnvVar, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"sasl.password": secret}
    with pytest.raises(InvalidOptionError, match="KAFKA_PASSWORD, which is not set"):
        resolve(options)
    source = StreamSource(StreamUrl.parse("kafka://broker/orders"), client=options)
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter2")
    assert resolve(options) == {"sasl.password": "hunter2"}
    assert "hunter2" not in repr(source)


def test_what_cannot_be_sent_to_executors_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="'error_cb' is a builtin_function_or_method"):
        resolve({"error_cb": print})  # type: ignore[dict-item]


@pytest.mark.parametrize("text", ["", "=x", "sasl.password"])
def test_an_option_needs_a_name_and_a_value(text: str) -> None:
    with pytest.raises(InvalidOptionError):
        parse_client_option(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable.auto.commit", "true"),
        ("enable.auto.commit", True),
        ("auto.offset.reset", "earliest"),
        ("auto.offset.reset", EnvironmentVariable("RESET")),
        ("group.id", "mine"),
        ("bootstrap.servers", "elsewhere"),
        ("enable.partition.eof", False),
    ],
)
def test_what_exactly_once_stands_on_cannot_be_set(name: str, value: str | bool | EnvironmentVariable) -> None:
    with pytest.raises(InvalidOptionError, match=name):
        StreamSource(StreamUrl.parse("kafka://broker/orders"), client={name: value})


def test_what_is_set_anyway_may_be_said() -> None:
    StreamSource(StreamUrl.parse("kafka://b/o"), client={"enable.auto.commit": "false", "auto.offset.reset": "error"})


@pytest.mark.parametrize("text", ["AWS_REGION=\udcff", "AWS\udcff=eu", "sasl.password=a\0b"])
def test_text_that_a_client_cannot_be_given_is_refused_without_its_value(text: str) -> None:
    with pytest.raises(InvalidOptionError) as told:
        resolve(dict([parse_client_option(text)]))
    assert "a\\x00b" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("password", "s3cret", "AUTH 's3cret'"),
        ("password", "s3cret/word", "http://s3cret%2Fword@host"),
        ("password", "s3cret", "Basic czNjcmV0"),
        ("token", "s3cret\n", "Illegal header value b'Bearer s3cret\\n'"),
        ("token", "s3cret and a lot more of it", "the token s3cret and a lot m is"),
        ("proxy", "http://me:s3cret@host:1", "Invalid port: 's3cret@host'"),
        ("AWS_ENDPOINT_URL", "http://me:s3cret@host", "error for http://me:s3cret@host/lake"),
        ("GOOGLE_SERVICE_ACCOUNT", '{"private_key": "s3cret"}', 'no file {"private_key": "s3cret"}'),
        ("timeout", "s3cret", "could not convert string to float: 's3cret'"),
    ],
)
def test_the_text_of_a_client_is_repeated_without_values(name: str, value: str, said: str) -> None:
    found = without_values(said, {name: value})
    assert "s3cret" not in found
    assert "czNjcmV0" not in found


def test_the_text_of_a_client_keeps_what_is_no_secret() -> None:
    said = "connecting to http://store:9000 in us-east-1 failed after 10 s: not true, me.txt is missing"
    options = {
        "AWS_ENDPOINT_URL": "http://store:9000",
        "region": "us-east-1",
        "timeout": "10",
        "cluster": "true",
        "user": "me",
        "max": 3,
        "password": "",
    }
    assert without_values(said, options) == said.replace("me.txt", "[hidden].txt")
