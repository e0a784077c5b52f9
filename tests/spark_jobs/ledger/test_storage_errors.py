"""Tables in an object store that does not answer, or that has no such bucket, told in words."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from spark_jobs.ledger.delta_log import DeltaLog, unreadable
from spark_jobs.ledger.table_rows import scan
from spark_jobs.table_location import check_location
from stream_consumers.errors import InvalidOptionError, LedgerUnreadableError, TableUnreadableError
from tests.support.kept_errors import kept
from tests.support.repeating_storage import repeating_storage
from tests.support.s3_server import ObjectStore, object_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("s3")) as started:
        yield started


def test_a_bucket_that_is_not_there_is_told(store: ObjectStore) -> None:
    with pytest.raises(TableUnreadableError) as raised:
        DeltaLog("s3a://nowhere/orders", storage_options=store.options).snapshot()
    assert raised.value.what == "the bucket or container of s3a://nowhere/orders does not exist"


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
    error = unreadable(DeltaLog("t"), ValueError("no such\n feature"), what="it cannot be read", remedy="Correct it.")
    assert isinstance(error, TableUnreadableError)
    assert str(error) == "it cannot be read (no such feature). Correct it."


@pytest.fixture
def repeating() -> Iterator[str]:
    with repeating_storage() as address:
        yield address


QUICK = {"max_retries": "0", "retry_timeout": "1s", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
SECRETS = {"AWS_SESSION_TOKEN": "hunter2", "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret"}


def read_rows(table: str, options: dict[str, str]) -> None:
    for _ in scan(DeltaLog(table, storage_options=options)):
        pass


def snapshot(table: str, options: dict[str, str]) -> None:
    DeltaLog(table, storage_options=options).snapshot()


@pytest.mark.parametrize("read", [snapshot, read_rows])
@pytest.mark.parametrize("is_of_environment", [False, True])
def test_no_error_repeats_a_token(
    read: Callable[[str, dict[str, str]], None],
    is_of_environment: bool,
    repeating: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {**QUICK, "AWS_ENDPOINT_URL": repeating}
    if is_of_environment:
        for name, value in SECRETS.items():
            monkeypatch.setenv(name, value)
    else:
        options |= SECRETS
    with pytest.raises((TableUnreadableError, LedgerUnreadableError), match=r"ExpiredToken.*\[hidden\]") as raised:
        read("s3://lake/orders", options)
    assert "hunter2" not in kept(raised.value)


def test_no_error_about_a_torn_commit_repeats_a_token(store: ObjectStore) -> None:
    name = "_delta_log/00000000000000000000.json"
    DeltaLog("s3a://lake/torn", storage_options=store.options).files().open_output_stream(name).close()
    # The commit can be read; its size is asked for with a list.
    with repeating_storage(refused="prefix=torn/", behind=store.endpoint) as address:
        log = DeltaLog("s3a://lake/torn", storage_options={**QUICK, **SECRETS, "AWS_ENDPOINT_URL": address})
        with pytest.raises(TableUnreadableError, match=r"ExpiredToken.*\[hidden\]") as raised:
            log.commit(0)
    assert "hunter2" not in kept(raised.value)


def test_no_error_of_an_opened_version_repeats_a_token(store: ObjectStore) -> None:
    write_deltalake("s3://lake/opened", pa.table({"id": [1]}), storage_options=store.options)
    with repeating_storage(refused="none", behind=store.endpoint) as address:
        log = DeltaLog("s3a://lake/opened", storage_options={**QUICK, **SECRETS, "AWS_ENDPOINT_URL": address})
        snapshot = log.snapshot()
    assert snapshot is not None
    # The token expires: what delta-rs did not read yet it asks for now.
    with (
        repeating_storage(port=int(address.rpartition(":")[2])),
        pytest.raises(TableUnreadableError, match=r"ExpiredToken.*\[hidden\]") as raised,
    ):
        snapshot.last_number("group/main")
    assert "hunter2" not in kept(raised.value)


@pytest.mark.parametrize(
    ("table", "options"),
    [
        ("gs://lake/orders", {"GOOGLE_SERVICE_ACCOUNT": '{"private_key": "hunter2"}'}),
        ("gs://lake/orders", {"GOOGLE_SERVICE_ACCOUNT_KEY": '{"private_key": "hunter2", "x"'}),
    ],
)
def test_no_error_repeats_a_storage_option(table: str, options: dict[str, str]) -> None:
    with pytest.raises((TableUnreadableError, LedgerUnreadableError)) as raised:
        DeltaLog(table, storage_options=options).snapshot()
    assert "hunter2" not in kept(raised.value)


@pytest.mark.parametrize(
    "table",
    [
        "s3a://me:hunter2@bucket/orders",
        "s3a://me:x/hunter2@bucket/orders",
        "abfss://lake@account.dfs.core.windows.net/orders?sig=hunter2",
        "abfss://me:hunter2@account.dfs.core.windows.net/orders",
        "hdfs://name;token=hunter2/orders",
        "hdfs://me:hunter2/x@name:8020/orders",
        "hdfs://me:8020/hunter2@name:8020/orders",
        "s3a://me:8020/hunter2@bucket/orders",
        "me:hunter2@s3a://bucket/orders",
        "abfss://me%3Ahunter2@account.dfs.core.windows.net/orders",
        "abfss://lake%3Fsig%3dhunter2@account.dfs.core.windows.net/orders",
        "s3a:/me:hunter2@bucket/orders",
        # Characters that are normalized to these: urllib raises an error that repeats them.
        "s3a://me:hunter2\uff20bucket/orders",
        "s3a://bucket\uff0fhunter2/orders",
        "\uff53\uff13\uff41://me:hunter2@bucket/orders",
    ],
)
def test_no_address_with_credentials_is_taken(table: str) -> None:
    with pytest.raises(InvalidOptionError) as refused:
        check_location(table)
    assert "hunter2" not in kept(refused.value)


@pytest.mark.parametrize(
    "table",
    [
        "s3a://lake/me@home/day=1/orders",
        "abfss://lake@account.dfs.core.windows.net/orders",
        "abfss://My%20Workspace@onelake.dfs.fabric.microsoft.com/My%20Lake.Lakehouse/Tables/orders",
        "hdfs:///orders",
        "hdfs://name:8020/user/me@CORP/table",
        "hdfs://[::1]:8020/user/me@CORP/table",
        "hdfs://name:8020/orders",
        "gs://lake_1.a/orders",
    ],
)
def test_an_address_of_a_table_is_taken_as_it_is(table: str) -> None:
    assert check_location(table) == table


@pytest.mark.parametrize(
    ("endpoint", "cause"),
    [
        ("http://me:hunter2@127.0.0.1:1", "a user or a password"),
        ("http://user:8020/hunter2@127.0.0.1", "a user or a password"),
        ("http://127.0.0.1:1?key=hunter2", "parameters"),
        ("http://127.0.0.1:hunter2", "a port"),
        ("http://:1/hunter2", "no host"),
        ("http://127.0.0.1:1\n", "white space"),
        (" http://127.0.0.1:1", "white space"),
    ],
)
def test_no_endpoint_with_credentials_is_taken(endpoint: str, cause: str) -> None:
    with pytest.raises(InvalidOptionError, match=cause) as refused:
        DeltaLog("s3://lake/orders", storage_options={"AWS_ENDPOINT_URL": endpoint})
    assert "hunter2" not in kept(refused.value)


def test_no_error_repeats_a_password_in_an_endpoint_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:hunter2@127.0.0.1:1")
    with pytest.raises(LedgerUnreadableError) as raised:
        DeltaLog("s3://lake/orders", storage_options={**QUICK, "skip_signature": "true"}).snapshot()
    assert "hunter2" not in kept(raised.value)
