"""Streams and tables as resources, and text that stays in the environment until it is used. No Spark, no broker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from pydantic import ValidationError

from spark_jobs import redaction
from stream_assets import (
    DeltaLake,
    KafkaCluster,
    RedisServer,
    SparkSessionResource,
    StreamAsset,
    StreamFile,
    StreamTranslator,
    StreamTranslatorData,
    UnityCatalog,
    stream_definitions,
)
from stream_assets.component import attributes_of
from stream_assets.resources import LakeTable, run_session
from stream_consumers.create import create_producer
from stream_consumers.errors import InvalidOptionError, InvalidUrlError
from tests.support.dagster_runs import plain_asset, tick
from tests.support.kept_errors import kept

SECRETS = {
    "T_KAFKA": "kafka-1.internal:9092",
    "T_PASSWORD": "a-very-secret-password",
    "T_GROUP": "group-of-the-environment",
    "T_LAKE": "/lake-of-the-environment",
    "T_KEY": "a-very-secret-key",
    "T_URL": "memory://resources/orders",
}


def everything_in_variables() -> StreamAsset:
    kafka = KafkaCluster(
        bootstrap_servers=dg.EnvVar("T_KAFKA"),
        security_protocol="SASL_SSL",
        sasl_mechanism="PLAIN",
        sasl_username="lakehouse",
        sasl_password=dg.EnvVar("T_PASSWORD"),
        options={"client.id": "tests"},
    )
    return plain_asset(
        source=kafka.stream("orders", "payments"),
        group=dg.EnvVar("T_GROUP"),
        table=DeltaLake(root=dg.EnvVar("T_LAKE"), storage_options={"AWS_SECRET_ACCESS_KEY": dg.EnvVar("T_KEY")}),
        spec=dg.AssetSpec(["sales", "orders"]),
    )


def test_variables_are_looked_up_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = everything_in_variables()
    with pytest.raises(InvalidOptionError, match="T_KAFKA"):
        _ = orders.declared.stream
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    assert str(orders.declared.source) == "kafka://kafka-1.internal:9092/orders,payments"
    assert orders.declared.ingestion.group == "group-of-the-environment"
    assert orders.declared.ingestion.table == "/lake-of-the-environment/sales/orders"
    assert orders.declared.ingestion.storage_options == {"AWS_SECRET_ACCESS_KEY": "a-very-secret-key"}
    client = orders.declared.stream.client
    assert client["client.id"] == "tests"
    assert isinstance(client["sasl.password"], dg.EnvVar), "it stays there until the client is made"


@pytest.mark.parametrize("empty", ["T_KAFKA", "T_GROUP", "T_LAKE"])
def test_an_empty_variable_is_refused_and_stands_for_no_default(monkeypatch: pytest.MonkeyPatch, empty: str) -> None:
    for text in ("", " "):
        orders = everything_in_variables()
        for name, value in SECRETS.items():
            monkeypatch.setenv(name, text if name in (empty, "T_KEY") else value)
        with pytest.raises(InvalidOptionError, match=empty):
            _ = orders.declared.ingestion
        monkeypatch.setenv(empty, SECRETS[empty])
        assert orders.declared.ingestion.storage_options == {"AWS_SECRET_ACCESS_KEY": text}, "an option may be empty"


def test_the_schema_and_the_name_of_a_table_may_be_in_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    by_schema = plain_asset(table=DeltaLake(root="/lake", schema_name=dg.EnvVar("T_SCHEMA")))
    by_name = plain_asset(table=DeltaLake(root="/lake").table(dg.EnvVar("T_NAME"), schema="sales"))
    assert (str(by_schema.declared.table), str(by_name.declared.table)) == (
        "/lake/{T_SCHEMA}/orders",
        "/lake/sales/{T_NAME}",
    )
    with pytest.raises(InvalidOptionError, match="T_SCHEMA"):
        _ = by_schema.declared.ingestion
    monkeypatch.setenv("T_SCHEMA", "production")
    monkeypatch.setenv("T_NAME", "orders_of_all")
    assert by_schema.declared.ingestion.table == "/lake/production/orders"
    assert by_name.declared.ingestion.table == "/lake/sales/orders_of_all"


def test_a_misspelt_option_of_a_resource_is_refused() -> None:
    """Without the protocol of its security, a client would send its messages as plain text."""
    known = {"bootstrap_servers": "kafka:9092", "address": "redis:6379", "path": "orders.ss", "root": "/lake"}
    for resource in (KafkaCluster, RedisServer, StreamFile, DeltaLake, SparkSessionResource):
        needed: Any = {name: value for name, value in known.items() if name in resource.model_fields}
        resource(**needed)
        with pytest.raises(ValueError, match="securty_protocol"):
            resource(**needed, securty_protocol="SASL_SSL")


def test_no_value_of_a_variable_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    orders = everything_in_variables()
    definitions = stream_definitions([orders])
    dg.Definitions.validate_loadable(definitions)
    job = definitions.resolve_job_def("ingest_orders" if orders.declared.name == "orders" else orders.declared.job_name)
    shown = "".join(
        [
            *(repr(spec) for spec in definitions.resolve_all_asset_specs()),
            *(str(one.description) for one in [*(definitions.sensors or []), job]),
            str(dg.validate_run_config(job, {})),
            repr(orders.declared),
            repr(orders.declared.ingestion.storage_options.keys()),
        ]
    )
    for value in SECRETS.values():
        assert value not in shown
    spec = orders.get_asset_spec()
    assert spec.metadata["stream/source"] == "kafka://{T_KAFKA}/orders,payments"
    assert spec.metadata["stream/group"] == "{T_GROUP}"
    assert {key.to_user_string() for key in orders.dependency_keys} == {
        "kafka/T_KAFKA/orders",
        "kafka/T_KAFKA/payments",
    }


def test_a_source_that_is_a_variable_is_one_node_whose_lag_is_told(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    orders = plain_asset(source=dg.EnvVar("T_URL"), table=dg.EnvVar("T_TABLE"))
    assert [key.to_user_string() for key in orders.dependency_keys] == ["stream/T_URL"]
    monkeypatch.setenv("T_URL", SECRETS["T_URL"])
    monkeypatch.setenv("T_TABLE", str(tmp_path / "table"))
    with create_producer(SECRETS["T_URL"]) as producer:
        producer.send(b"{}")
    result = tick(orders, instance)
    assert result.run_requests
    (observed,) = result.asset_events
    assert observed.asset_key == dg.AssetKey(["stream", "T_URL"])
    assert observed.metadata["stream/lag/lakehouse/orders"].value == 1


@pytest.mark.parametrize(
    ("connection", "url", "client"),
    [
        (KafkaCluster(bootstrap_servers="a:1,b:2"), "kafka://a:1,b:2/orders", {}),
        (
            RedisServer(address="h:6379", tls=True, username="u", options={"db": 3}),
            "rediss://h:6379/orders",
            {"username": "u", "db": 3},
        ),
        (StreamFile(path="/data/orders.ss"), "file:///data/orders.ss/orders", {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_connection_has_its_url_and_its_client(connection: Any, url: str, client: dict[str, Any]) -> None:
    orders = plain_asset(source=connection.stream("orders"))
    assert str(orders.declared.source) == url
    assert orders.declared.stream.client == client


def test_a_connection_is_a_resource_of_dagster(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T_KAFKA", SECRETS["T_KAFKA"])

    @dg.asset
    def report(kafka: KafkaCluster) -> str:
        return str(kafka.stream("orders").url)

    resources = {"kafka": KafkaCluster(bootstrap_servers=dg.EnvVar("T_KAFKA"))}
    result = dg.materialize([report], instance=instance, resources=resources)
    assert result.output_for_node("report") == "kafka://kafka-1.internal:9092/orders"


class WithPartitions(StreamTranslator):
    def get_asset_spec(self, data: StreamTranslatorData) -> dg.AssetSpec:
        days = dg.StaticPartitionsDefinition(["a"])
        return super().get_asset_spec(data).replace_attributes(partitions_def=days)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"source": KafkaCluster(bootstrap_servers="a:99999").stream("orders")}, InvalidUrlError),
        ({"source": KafkaCluster(bootstrap_servers="a:9092").stream()}, InvalidUrlError),
        ({"table": DeltaLake(root="")}, InvalidOptionError),
        ({"translator": WithPartitions()}, InvalidOptionError),
        ({"source": StreamFile(path="x.ss").stream("orders"), "mode": "load_balanced"}, InvalidOptionError),
    ],
)
def test_what_can_be_seen_to_be_wrong_is_refused_at_once(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        plain_asset(**options)


@pytest.mark.parametrize(
    ("lake", "prefix", "expected"),
    [
        (DeltaLake(root="/lake"), [], "/lake/public/orders"),
        (DeltaLake(root="/lake/"), ["sales"], "/lake/sales/orders"),
        (DeltaLake(root="s3a://bucket/lake"), ["eu", "sales"], "s3a://bucket/lake/sales/orders"),
        (DeltaLake(root="/lake", schema_name="all"), ["sales"], "/lake/all/orders"),
        (DeltaLake(root="/lake").table("o", schema="s"), ["sales"], "/lake/s/o"),
    ],
    ids=repr,
)
def test_a_lake_is_laid_out_as_dagster_deltalake_does_it(lake: Any, prefix: list[str], expected: str) -> None:
    assert plain_asset(table=lake, spec=dg.AssetSpec([*prefix, "orders"])).declared.ingestion.table == expected


@pytest.mark.parametrize(
    "name", ["", ".", "..", "_delta_log", "a/b", "a\\b", "a\nb", "a\x85b", "%2e%2e", "x" * 256], ids=ascii
)
def test_a_name_that_is_not_that_of_one_folder_selects_no_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = DeltaLake(root=dg.EnvVar("T_LAKE"))
    for select in (
        lambda: lake.table(name),
        lambda: lake.table("orders", schema=name),
        lambda: lake.table_of(dg.AssetKey(["sales", name])),
        lambda: lake.table_of(dg.AssetKey([name, "orders"])),
    ):
        with pytest.raises(InvalidOptionError):
            select()
    monkeypatch.setenv("T_NAME", name or " ")
    with pytest.raises(InvalidOptionError):
        _ = DeltaLake(root="/lake").table(dg.EnvVar("T_NAME")).path


@pytest.mark.parametrize(
    "make",
    [
        lambda: DeltaLake(root="s3a://me:hunter2@bucket/lake").table(dg.EnvVar("TABLE")),
        lambda: plain_asset(table=DeltaLake(root="s3a://me:hunter2@bucket/lake")),
        lambda: plain_asset(table="s3a://me:hunter2@bucket/lake/orders"),
        lambda: plain_asset(table="abfss://lake@account.dfs.core.windows.net/orders?sig=hunter2"),
    ],
)
def test_no_address_with_credentials_is_taken(make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidOptionError) as refused:
        make()
    assert "hunter2" not in kept(refused.value)


def test_the_address_of_a_spark_is_not_shown() -> None:
    assert "hunter2" not in repr(SparkSessionResource(remote="sc://spark:15002/;token=hunter2"))


@pytest.mark.parametrize("remote", [None, "sc://spark:15002"])
def test_the_log_of_a_run_says_where_jars_go_while_it_waits_for_spark(
    remote: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAM_ASSETS_CACHE", str(tmp_path))
    told: list[str] = []
    spark = SimpleNamespace(spark_session="a session", remote=remote)
    context = SimpleNamespace(log=SimpleNamespace(info=told.append), resources=SimpleNamespace(spark=spark))
    with run_session(context, "spark", LakeTable("/lake/orders", (), {})) as session:
        assert session == "a session"
    waiting, _ = told
    assert (str(tmp_path) in waiting) == (remote is None), "a server has the jars of its own"


@pytest.mark.parametrize("make", [SimpleNamespace, SparkSessionResource])
def test_errors_hide_the_secrets_of_a_table_whose_session_was_made_before(
    make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redaction, "_hidden", {})
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    (tmp_path / "spark-defaults.conf").write_text("spark.hadoop.fs.s3a.secret.key hunter2-of-spark\n")
    spark = make()
    if isinstance(spark, SparkSessionResource):
        monkeypatch.setattr(spark, "_session", "a session")
    else:
        spark.spark_session = "a session"
    context = SimpleNamespace(log=SimpleNamespace(info=print), resources=SimpleNamespace(spark=spark))
    table = LakeTable("/lake/orders", (), {"AWS_SECRET_ACCESS_KEY": "hunter2-of-the-table"})
    with run_session(context, "spark", table):
        assert redaction.redacted("hunter2-of-the-table, hunter2-of-spark") == "[hidden], [hidden]"


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (KafkaCluster, {"bootstrap_servers": "a:1", "sasl_pasword": "hunter2"}),
        (RedisServer, {"address": "a:1", "password": ["hunter2"]}),
        (DeltaLake, {"root": "s3a://b", "storage_options": {"AWS_SECRET_ACCESS_KEY": ["hunter2"]}}),
        (SparkSessionResource, {"spark_confg": {"spark.hadoop.fs.s3a.secret.key": "hunter2"}}),
        (UnityCatalog, {"token": "hunter2"}),
        (attributes_of(KafkaCluster), {"sasl_pasword": "hunter2"}),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_no_error_of_a_resource_repeats_a_value(kind: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        kind(**given)
    assert "hunter2" not in kept(raised.value)


@pytest.mark.parametrize(
    ("kind", "given", "client"),
    [
        (KafkaCluster, {"bootstrap_servers": "a:1", "sasl_password": 4815}, {"sasl.password": "4815"}),
        (KafkaCluster, {"bootstrap_servers": "a:1", "options": {"x": 4815}}, {"x": "4815"}),
        (RedisServer, {"address": "a:1", "password": 4815}, {"password": "4815"}),
    ],
)
def test_a_number_is_a_password(kind: Any, given: dict[str, Any], client: dict[str, str]) -> None:
    """A template that stands for digits is a number."""
    assert kind(**given).client() == client
