"""Tables in an object store that does not answer, or that has no such bucket, told in words."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.storage_errors import unreadable
from stream_consumers.errors import LedgerUnreadableError, TableUnreadableError
from tests.support.s3_server import ObjectStore, object_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("s3")) as started:
        yield started


def test_a_bucket_that_is_not_there_is_told(store: ObjectStore) -> None:
    with pytest.raises(TableUnreadableError) as raised:
        DeltaLog("s3a://nowhere/orders", storage_options=store.options).snapshot()
    assert raised.value.what == "there is no bucket or container of s3a://nowhere/orders"


def test_a_bucket_without_the_table_has_none(store: ObjectStore) -> None:
    assert DeltaLog("s3a://lake/orders", storage_options=store.options).snapshot() is None


def test_the_server_that_is_given_counts_more_than_one_of_the_environment(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    log = DeltaLog("s3a://lake/orders", storage_options={**store.options, "max_retries": "0"})
    assert log.snapshot() is None


def test_a_server_that_does_not_answer_may_do_so_later(store: ObjectStore) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        options = {**store.options, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{taken.getsockname()[1]}"}
        log = DeltaLog("s3a://lake/orders", storage_options={**options, "max_retries": "1", "retry_timeout": "5s"})
        with pytest.raises(LedgerUnreadableError) as raised:
            log.snapshot()
    assert "the storage of s3a://lake/orders does not answer" in raised.value.what
    assert "\x1b" not in raised.value.what
    assert "\n" not in raised.value.what


def test_what_stays_wrong_is_said_in_one_line() -> None:
    error = unreadable("t", ValueError("no such\n feature"), what="it cannot be read", remedy="Correct it.")
    assert isinstance(error, TableUnreadableError)
    assert str(error) == "it cannot be read (no such feature). Correct it."
