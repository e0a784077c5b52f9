"""Which settings of Spark are secrets: in the texts of errors, on Spark's own pages, and in addresses."""

from __future__ import annotations

import os
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs import redaction
from spark_jobs.metrics.recorders import _otlp_secrets
from spark_jobs.redaction import JAVA_VARIABLES, hide, jvm_output, redacted
from spark_jobs.session import SparkOptions, create_session, object_store_config
from spark_jobs.spark_server.client import _raise_start_error
from spark_jobs.spark_start import spark_defaults
from stream_consumers.client_config import redact_options
from stream_consumers.errors import InvalidOptionError, SparkSessionError
from stream_consumers.urls import check_no_credentials
from tests.support.held_servers import made

SECRET = "hunter2-of-the-lake"
SETTINGS = {
    "spark.hadoop.fs.azure.account.key.lake.dfs.core.windows.net": SECRET,
    "spark.hadoop.fs.azure.sas.lake.account.blob.core.windows.net": SECRET,
    "spark.hadoop.fs.azure.client-provided-encryption-key": SECRET,
    "spark.hadoop.fs.azure.encryption.encoded.client-provided-key": SECRET,
    "spark.hadoop.fs.gs.auth.service.account.private.key": SECRET,
    "spark.hadoop.fs.s3a.encryption.key": SECRET,
    "spark.hadoop.fs.s3a.secret.key": SECRET,
    "spark.hadoop.fs.swift.apikey": SECRET,
    "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:postgresql://db/meta?user=hive&password={SECRET}",
    "spark.executorEnv.DB_PW": SECRET,
    "spark.executorEnv.PGPASS": SECRET,
    "spark.executorEnv.SIGNING_KEY": SECRET,
    "spark.executorEnv.GITHUB_PAT": SECRET,
    "spark.driver.defaultJavaOptions": f"-Xss2m -Djavax.net.ssl.keyStorePassword={SECRET}",
    "spark.catalog.uri": f"https://catalog?user=hive&password={SECRET}",
}
SHOWN = {
    "spark.hadoop.fs.s3a.aws.credentials.provider": "org.apache.hadoop.fs.s3a.AnonymousAWSCredentialsProvider",
    "spark.sql.warehouse.dir": "abfss://lake@account.dfs.core.windows.net/warehouse",
    "spark.sql.shuffle.partitions": "4",
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test hides is hidden in no other one."""
    monkeypatch.setattr(redaction, "_hidden", {})


@pytest.mark.parametrize("name", SETTINGS)
def test_a_secret_setting_is_in_no_text_of_an_error(name: str) -> None:
    hide({}, {name: SETTINGS[name]}, None)
    assert redacted(f"Spark cannot use {SECRET}") == "Spark cannot use [hidden]"


class Emptied(UserDict[str, str]):
    """An environment from which another thread removes each variable right after its name was read."""

    def __iter__(self) -> Iterator[str]:
        for name in list(self.data):
            self.data.pop(name)
            yield name


@pytest.mark.parametrize(
    "read",
    [lambda: redact_options("no", {}), lambda: redacted("no"), _otlp_secrets, lambda: object_store_config("s3://b/t")],
    ids=["options", "settings", "headers", "storage"],
)
def test_a_variable_that_is_removed_meanwhile_is_as_if_not_set(
    read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["HTTP_PROXY", "AWS_SECRET_ACCESS_KEY", "OTEL_EXPORTER_OTLP_HEADERS"]
    monkeypatch.setattr("spark_jobs.session.s3_jars", list)
    with monkeypatch.context() as patched:
        patched.setattr(os, "environ", {})
        without = read()
        patched.setattr(os, "environ", Emptied(dict.fromkeys(names, SECRET)))
        assert read() == without


def test_the_address_of_a_metastore_is_shown_without_its_password() -> None:
    name = "spark.hadoop.javax.jdo.option.ConnectionURL"
    hide({}, {name: "jdbc:derby:;databaseName=/tmp/kept/metastore_db;create=true"}, None)
    hide({}, {name: f"jdbc:mysql://db/hive?user=hive&password={SECRET}"}, None)
    assert redacted(f"/tmp/kept/metastore_db is open: {SECRET}") == "/tmp/kept/metastore_db is open: [hidden]"


def test_secrets_stay_hidden_when_a_later_session_has_others_of_the_same_names() -> None:
    secrets = [f"{number}-{name}-of-the-lake" for number in range(2) for name in ("option", "setting", "token")]
    for option, setting, token in (secrets[:3], secrets[3:]):
        hide({"AWS_SECRET_ACCESS_KEY": option}, {"spark.hadoop.fs.s3a.secret.key": setting}, f"sc://a/;token={token}")
    assert redacted(", ".join(secrets)) == ", ".join(["[hidden]"] * len(secrets))


def test_other_settings_are_shown_in_the_text_of_an_error() -> None:
    hide({}, SHOWN, None)
    said = ", ".join(SHOWN.values())
    assert redacted(said) == said


@pytest.mark.parametrize("variable", JAVA_VARIABLES)
@pytest.mark.parametrize(
    "options",
    [
        f"-Xmx2g -Djavax.net.ssl.keyStorePassword={SECRET} -Duser.timezone=UTC",
        f"--conf spark.hadoop.fs.s3a.secret.key={SECRET} pyspark-shell",
        f"--conf 'spark.driver.extraJavaOptions=-Duser.timezone=UTC -Dpassword={SECRET}' pyspark-shell",
        f"--conf spark.hadoop.fs.azure.sas.lake.account={SECRET} pyspark-shell",
        f"--conf spark.executorEnv.DB_PW={SECRET} pyspark-shell",
        f"--conf 'spark.sql.catalog.rest.header.Authorization=Bearer {SECRET}' pyspark-shell",
        f"--repositories https://robot:{SECRET}@repo.example/maven pyspark-shell",
        f"-Dproxy=http://robot:{SECRET}@proxy:3128",
        f"-Dpassword={SECRET} -Dpassword=last",
        f"-Dpassword=pa\\{SECRET}",
        f"-Da=b\n-Dpassword={SECRET}",
    ],
)
def test_options_of_java_from_the_environment_are_in_no_text(
    variable: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, options)
    assert SECRET not in redacted(f"{options}: unrecognized in UTC")
    assert redacted("unrecognized in UTC") == "unrecognized in UTC"
    assert SECRET not in redacted(f"cannot use {SECRET}")
    for begin in ("", "NOTE: "):
        assert jvm_output(f"{begin}Picked up {variable}: {options}\nError: no such jar\n") == "Error: no such jar"


@pytest.mark.parametrize(
    "line",
    [
        f"spark.jars.repositories https://robot:{SECRET}@repo.example/maven",
        f"spark.jars.repositories = https://repo.example,https://robot:{SECRET}@repo.example",
        f"  spark.jars.repositories: https://repo.example,\\\n  https\\://robot:{SECRET}@repo.example",
        f"spark.hadoop.fs.s3a.secret.key\t{SECRET}",
        f"spark.driver.extraJavaOptions -Xmx2g -Dpassword={SECRET}",
    ],
)
@pytest.mark.parametrize("variable", ["SPARK_CONF_DIR", "SPARK_HOME"])
def test_secrets_of_the_defaults_of_spark_are_in_no_text(
    line: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text(f"# defaults\nspark.ui.enabled false\n{line}\n")
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "conf" if variable == "SPARK_CONF_DIR" else tmp_path))
    with pytest.raises(SparkSessionError):
        create_session(SparkOptions(remote="sc://127.0.0.1:1"))
    assert redacted(f"{SECRET} of repo.example in maven") == "[hidden] of repo.example in maven"


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (" spark.a b \n\n\t!c d\n#e f", {"spark.a": "b"}),
        ("spark.a=b\nspark.c : d\nspark.e", {"spark.a": "b", "spark.c": "d", "spark.e": ""}),
        ("# C:\\spark\\\nspark.a b", {"spark.a": "b"}),
        ("spark.a C:\\\\spark\\\\\nspark.b c", {"spark.a": "C:\\spark\\", "spark.b": "c"}),
        ("spark.a b\\\n  #c\\\n\\\n d\\", {"spark.a": "b#cd"}),
        ("spark.\\\n  a \\\n  b", {"spark.a": "b"}),
        ("spark.a b\\\r\n  c\rspark.d e", {"spark.a": "bc", "spark.d": "e"}),
        ("\fspark.a\fb", {"spark.a": "b"}),
        ("spark.a p\\u0040\\ud83d\\udd11\\t\\q\\u00", {"spark.a": "p@\U0001f511\tqu00"}),
        ("spark.a\\=b\\:c\\ d=e=f", {"spark.a=b:c d": "e=f"}),
    ],
)
def test_defaults_of_spark_are_read_as_java_reads_properties(
    text: str, settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spark-defaults.conf").write_bytes(text.encode())
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert spark_defaults() == settings


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("jdbc:mysql://db/hive?user=me&amp;password=a,b", "jdbc:mysql://db/hive?user=me&amp;password=[hidden]"),
        ("(jdbc:sqlserver://db;PWD=a;user=me)", "(jdbc:sqlserver://db;PWD=[hidden];user=me)"),
        ("https://a/b?X-Amz-Signature=0a1b&c=d", "https://a/b?X-Amz-Signature=[hidden]&c=d"),
        (f"https://robot:{SECRET}@repo.example/a added", "https://[hidden]@repo.example/a added"),
        (f"https://repo.example,k8s://https://{SECRET}@a", "https://repo.example,k8s://https://[hidden]@a"),
        (f"wasbs://robot:{SECRET}@account/a", "wasbs://[hidden]@account/a"),
        ("abfss://lake@account/a, hdfs://host:8020/me@CORP", "abfss://lake@account/a, hdfs://host:8020/me@CORP"),
    ],
)
def test_the_user_and_the_password_of_an_address_are_in_no_text(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_a_server_that_did_not_start_names_the_causes_and_not_the_frames(tmp_path: Path) -> None:
    folder = made(tmp_path, "server")
    frames = "".join(f"\tat org.apache.spark.A$.b(A.scala:{line})\n" for line in range(30))
    log = f"unresolved dependency: a#b;1\n{frames}Caused by: java.B: no room\n{frames}\t... 30 more\n"
    log += '  File "/lib/pyspark/context.py", line 1, in start\n    start()\n    ^^^^^^^\nPySparkError: it exited\n'
    folder.log.write_text(log)
    with pytest.raises(SparkSessionError) as raised:
        _raise_start_error(folder, 0)
    _, *lines = raised.value.what.strip().split("\n")
    assert lines == ["unresolved dependency: a#b;1", "Caused by: java.B: no room", "PySparkError: it exited"]


def test_the_token_of_a_remote_session_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_CONNECT_AUTHENTICATE_TOKEN", SECRET)
    assert redacted(f"the gateway does not know {SECRET}") == "the gateway does not know [hidden]"


def test_the_end_of_the_log_of_a_server_is_repeated_without_secrets(tmp_path: Path) -> None:
    folder = made(tmp_path, "server")
    option = f"-javax.net.ssl.keyStorePassword={SECRET}"
    hide({}, {"spark.driver.extraJavaOptions": option}, None)
    folder.log.write_text(f"Unrecognized option: {option}\nError: no JVM\n")
    with pytest.raises(SparkSessionError) as raised:
        _raise_start_error(folder, 0)
    assert SECRET not in str(raised.value)
    assert "Error: no JVM" in str(raised.value)


@pytest.mark.parametrize(
    "value",
    [
        f"https://robot:{SECRET}@repo.example/maven",
        f"https://{SECRET}@repo.example",
        f"https://repo.example,https://robot:{SECRET}@repo.example/maven?a=b",
        f"https://robot:with/{SECRET}@repo.example",
        f"https://robot:with,{SECRET}@repo.example",
        f"s3a://AKIA:{SECRET}@bucket/logs",
        f"abfss://lake@account/a,wasbs://robot:{SECRET}@account/b",
        f"-Xss2m -Dhttp.proxy=http://robot:{SECRET}@proxy:3128 -Xmx2g",
        f"k8s://https://robot:{SECRET}@cluster:6443",
        f"https://robot:principal={SECRET}@repo.example",
        f"jdbc:hive2://robot:{SECRET}@hs2/default;principal=hive@EXAMPLE.COM",
    ],
)
def test_an_address_with_a_password_is_refused_and_not_repeated(value: str) -> None:
    with pytest.raises(InvalidOptionError) as raised:
        create_session(SparkOptions(config={"spark.any.setting": value}))
    assert SECRET not in str(raised.value)
    assert "spark.any.setting" in str(raised.value)


def test_a_master_with_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidOptionError) as raised:
        create_session(SparkOptions(master=f"k8s://https://robot:{SECRET}@cluster:6443"))
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "value",
    [
        "jdbc:hive2://hs2:10000/default;principal=hive/_HOST@EXAMPLE.COM",
        "jdbc:hive2://hs2;principal=hive@EXAMPLE.COM",
        '{"url": "https://wiki", "owner": "me@corp"}',
        "abfss://lake@account/a,abfss://other@account/b",
        "hdfs://namenode:8020/user/me@CORP",
    ],
)
def test_an_address_without_a_password_is_taken(value: str) -> None:
    assert check_no_credentials("spark.any.setting", value, remedy="") == value


def test_long_lists_of_files_are_looked_through_at_once() -> None:
    files = ",".join(f"/opt/lib/aws-token-provider-key-{number}.jar" for number in range(400))
    began = time.process_time()
    hide({}, {"spark.jars": files, "spark.driver.extraJavaOptions": f"-Dpassword={SECRET}"}, None)
    assert time.process_time() - began < 5
    assert SECRET not in redacted(SECRET)


@pytest.mark.spark
def test_spark_itself_hides_the_same_settings(spark: SparkSession) -> None:
    context = spark.sparkContext
    jvm = context._jvm
    assert jvm is not None
    conf = jvm.SparkConf(False)
    addresses = {"spark.jars.repositories": f"https://robot:{SECRET}@repo.example", **SETTINGS}
    regex = {"spark.redaction.regex": str(context.getConf().get("spark.redaction.regex"))}
    for name, value in {**regex, **addresses, **SHOWN}.items():
        conf.set(name, value)
    pairs = jvm.scala.collection.immutable.ArraySeq.unsafeWrapArray(conf.getAll())
    redacted_pairs = jvm.org.apache.spark.util.Utils.redact(conf, pairs)
    found = {pair._1(): pair._2() for pair in map(redacted_pairs.apply, range(redacted_pairs.size()))}
    assert {name: found[name] for name in SHOWN} == SHOWN
    assert [name for name in addresses if SECRET in found[name]] == []
