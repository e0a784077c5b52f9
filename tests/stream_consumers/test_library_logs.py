"""What client libraries log has no secret, and a log call raises nothing, whatever the redaction does."""

from __future__ import annotations

import logging

import pytest

from stream_consumers import library_logs
from stream_consumers.library_logs import LIBRARIES, NOT_SHOWN, redact_logs
from stream_consumers.redis.client import new_client
from stream_consumers.urls import StreamUrl

SECRET = "hunter2-of-the-lake"


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_redaction_that_fails_shows_no_text_and_raises_nothing(
    library: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> dict[str, str]:
        raise ValueError(SECRET)

    monkeypatch.setattr(library_logs, "_sources", [])
    redact_logs(fail)
    try:
        raise ValueError(SECRET)
    except ValueError:
        logging.getLogger(f"{library}.module").exception("failed with %s", SECRET)
    assert caplog.messages == [NOT_SHOWN]
    assert SECRET not in caplog.text


def test_a_record_with_wrong_arguments_shows_no_text_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library_logs, "_sources", [])
    redact_logs(dict)
    logging.getLogger("urllib3").error("%s of %d", SECRET)  # noqa: PLE1206 - as a library may do
    assert caplog.messages == [NOT_SHOWN]


def test_secrets_that_begin_alike_are_hidden_completely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library_logs, "_sources", [])
    redact_logs(lambda: {"password": SECRET})
    redact_logs(lambda: {"password": f"{SECRET}-and-of-the-server"})
    logging.getLogger("urllib3").error("cannot use %s-and-of-the-server", SECRET)
    assert caplog.messages == ["cannot use [hidden]"]


@pytest.mark.parametrize("logger", ["redis._parsers.base", "push_response"])
@pytest.mark.parametrize("options", [{"password": SECRET}, {"password": "s3cret", "username": "me"}])
def test_what_redis_logs_of_a_server_has_no_option(
    options: dict[str, str], logger: str, caplog: pytest.LogCaptureFixture
) -> None:
    for more in (options, {}):
        new_client(StreamUrl.parse("redis://127.0.0.1:1/"), more, reply_seconds=1.0, is_cluster=False)
    secret = options["password"]
    logging.getLogger(logger).error("cannot handle %s", [b"MOVING", f"`HELLO` `3` `AUTH` `me` `{secret}`".encode()])
    [said] = caplog.messages
    assert "MOVING" in said
    assert secret not in said
