"""A component in a project of Dagster's: from a ``defs.yaml`` to rows in Delta."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import dagster as dg
import pytest
import yaml
from deltalake import DeltaTable
from jsonschema import Draft202012Validator
from pyspark.sql import SparkSession

from spark_jobs.decoding.decoders import Decoder
from stream_assets import (
    Avro,
    Debezium,
    ErrorPolicy,
    Json,
    JsonSchema,
    KafkaCluster,
    Keys,
    LagPolicy,
    LakeTable,
    Protobuf,
    RunLimits,
    SchemaRegistry,
    StreamAsset,
    StreamIngestionComponent,
    TableLayout,
    Text,
    stream_asset,
)
from stream_consumers.create import create_producer
from stream_consumers.errors import InvalidOptionError
from tests.support.dg_projects import DgProject

SECRETS = {
    "T_KAFKA": "kafka-1.internal:9092",
    "T_PASSWORD": "12345",
    "T_GROUP": "group-of-the-environment",
    "T_LAKE": "/lake-of-the-environment",
    "T_KEY": "a-very-secret-key",
}


@pytest.fixture
def project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> DgProject:
    made = DgProject.make(folder)
    monkeypatch.syspath_prepend(made.source)
    return made


def load(project: DgProject, text: str) -> dg.Definitions:
    """The definitions of a project with this component."""
    project.write("defs/shop/defs.yaml", f"type: stream_assets.StreamIngestionComponent\n{dedent(text)}")
    loaded = project.load()
    dg.Definitions.validate_loadable(loaded)
    return loaded


def spec_of(definitions: dg.Definitions, *path: str) -> dg.AssetSpec:
    return definitions.resolve_asset_graph().get(dg.AssetKey(path)).to_asset_spec()


def op_of(definitions: dg.Definitions, job: str) -> Any:
    (node,) = definitions.resolve_job_def(job).nodes
    return node.definition


ORDERS = """
attributes:
  connection: memory://component
  streams:
    - stream: orders
      group: lakehouse
      table: lake/orders
"""


@pytest.mark.slow
@pytest.mark.dagster
def test_a_scaffolded_project_is_checked_and_listed_by_the_commands(project: DgProject) -> None:
    project.dg("scaffold", "defs", "stream_assets.StreamIngestionComponent", "shop")
    assert "All definitions loaded successfully" in project.dg("check", "defs")
    listed = project.dg("list", "defs")
    for name in ("orders_lag", "ingest_orders", "no_gaps", "orders.ss/orders"):
        assert name in listed
    assert "stream_assets.StreamIngestionComponent" in project.dg("list", "components")


@pytest.mark.slow
@pytest.mark.spark
def test_a_message_becomes_a_row(project: DgProject, spark: SparkSession, instance: dg.DagsterInstance) -> None:
    project.write("defs/shop/transforms.py", "def orders(batch):\n    return batch.where('id > 1')\n")
    (project.root / "data").mkdir(parents=True)
    with create_producer(f"file://{project.root}/data/orders.ss/orders") as producer:
        for number in (1, 2, 3):
            producer.send(b'{"id": %d}' % number)
    loaded = load(
        project,
        """
        attributes:
          connection: {type: file, path: "{{ context.project_root }}/data/orders.ss"}
          lake: {root: "{{ context.project_root }}/data/lake"}
          streams:
            - stream: orders
              group: lakehouse
              decode: {type: json, schema: id BIGINT}
              transform: .transforms.orders
        """,
    )
    assert loaded.resolve_job_def("ingest_orders").execute_in_process(instance=instance).success
    table = DeltaTable(f"{project.root}/data/lake/public/orders")
    assert sorted(table.to_pyarrow_table().column("id").to_pylist()) == [2, 3]


def test_a_catalog_names_the_tables_of_entries_that_have_one(
    project: DgProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("T_TOKEN", "a-very-secret-token")
    loaded = load(
        project,
        """
        attributes:
          connection: memory://component
          lake: /lake
          catalog: {type: unity, url: "https://unity", token: "{{ EnvVar('T_TOKEN') }}"}
          defaults: {group: lakehouse}
          streams:
            - stream: orders
              table: main.sales.orders
            - stream: payments
        """,
    )
    assert spec_of(loaded, "orders").metadata["dagster/uri"] == "https://unity/main.sales.orders"
    assert spec_of(loaded, "payments").metadata["dagster/uri"] == "/lake/public/payments"
    hive = {"connection": "memory://component", "catalog": {"type": "hive", "uri": "thrift://hive:9083"}}
    streams = [{"stream": "orders", "group": "g", "table": "main.sales.orders"}]
    component = StreamIngestionComponent.from_attributes_dict(attributes={**hive, "streams": streams})
    with pytest.raises(InvalidOptionError, match="orders"):
        component.build_defs(dg.ComponentTree.for_test().load_context)


def test_the_asset_is_what_python_makes_of_the_same(folder: Path) -> None:
    component = StreamIngestionComponent.from_attributes_dict(
        attributes={
            "connection": {"type": "kafka", "bootstrap_servers": "kafka:9092"},
            "lake": {"root": "/lake", "storage_options": {"AWS_REGION": "eu-1"}},
            "defaults": {
                "decode": {"type": "json", "schema": "id BIGINT", "key": "k"},
                "limits": {"max_records": 9, "max_bytes": 8},
            },
            "streams": [
                {
                    "stream": "orders",
                    "group": "g",
                    "mode": "load_balanced",
                    "limits": {"max_records": 7},
                    "sensor": {"min_lag": 3, "max_runs": 3, "status": "RUNNING"},
                    "errors": {"on_bad_rows": "dead_letter"},
                    "layout": {"cluster_by": ["id"], "properties": {"delta.appendOnly": "true"}},
                }
            ],
        }
    )
    definitions = component.build_defs(dg.ComponentTree.for_test().load_context)
    (made,) = [one for one in definitions.assets or () if isinstance(one, StreamAsset)]

    @stream_asset(
        source=KafkaCluster(bootstrap_servers="kafka:9092").stream("orders"),
        table=LakeTable("/lake/public/orders", storage_options={"AWS_REGION": "eu-1"}),
        group="g",
        decode=Json("id BIGINT", key="k"),
        mode="load_balanced",
        limits=RunLimits(max_records=7, max_bytes=8),
        sensor=LagPolicy(min_lag=3, max_runs=3, status=dg.DefaultSensorStatus.RUNNING),
        errors=ErrorPolicy(on_bad_rows="dead_letter"),
        layout=TableLayout(cluster_by=["id"], properties={"delta.appendOnly": "true"}),
        spec=dg.AssetSpec("orders"),
    )
    def expected(batch: Any) -> Any:
        return batch

    assert replace(made.declared, transform=None).ingestion == replace(expected.declared, transform=None).ingestion
    for name in ("key", "stream", "policy", "checks", "partitions", "op"):
        assert getattr(made.declared, name) == getattr(expected.declared, name), name
    assert made("rows") == "rows"


def test_keys_are_those_of_python() -> None:
    attributes = {
        "connection": {"type": "kafka", "bootstrap_servers": "kafka:9092"},
        "lake": {"root": "/lake"},
        "streams": [
            {
                "stream": "orders",
                "group": "g",
                "keys": {"columns": ["id"], "sequence_by": "at", "stored_as_scd_type": 2},
            }
        ],
    }
    component = StreamIngestionComponent.from_attributes_dict(attributes=attributes)
    definitions = component.build_defs(dg.ComponentTree.for_test().load_context)
    (made,) = [one for one in definitions.assets or () if isinstance(one, StreamAsset)]
    assert made.declared.keys == Keys(["id"], sequence_by="at", stored_as_scd_type=2)


REGISTRY = "registry: {url: 'http://registry:8081', options: {basic.auth.user.info: \"{{ EnvVar('T_USER') }}\"}}"


def registry() -> SchemaRegistry:
    return SchemaRegistry("http://registry:8081", options={"basic.auth.user.info": dg.EnvVar("T_USER")})


@pytest.mark.parametrize(
    ("decode", "expected"),
    [
        (
            "{type: avro, REGISTRY, subject: orders-value, key: {type: avro, REGISTRY, subject: orders-key}, "
            "headers: {trace: t}}",
            lambda folder: Avro(
                registry=registry(),
                subject="orders-value",
                key=Avro(registry=registry(), subject="orders-key"),
                headers={"trace": "t"},
            ),
        ),
        (
            "{type: protobuf, schema_file: order.proto, message: Order, framed: true, key: {type: text, column: user}}",
            lambda folder: Protobuf(schema_file=folder / "order.proto", message="Order", framed=True, key=Text("user")),
        ),
        (
            "{type: json_schema, REGISTRY, subject: orders-value, version: 3, validate: true, key: k}",
            lambda folder: JsonSchema(registry=registry(), subject="orders-value", version=3, validate=True, key="k"),
        ),
        ("{type: json, schema: id INT, mode: strict}", lambda folder: Json("id INT", mode="strict")),
        ("{type: variant, column: event}", lambda folder: Json(column="event")),
        (
            "{type: debezium, schema: 'id INT, at TIMESTAMP', source_order: true, "
            "types: {at: io.debezium.time.Timestamp}, key: key}",
            lambda folder: Debezium(
                "id INT, at TIMESTAMP", source_order=True, types={"at": "io.debezium.time.Timestamp"}, key="key"
            ),
        ),
        (
            "{type: debezium, REGISTRY, subject: shop.customers-value, unwrapped: rewrite}",
            lambda folder: Debezium(registry=registry(), subject="shop.customers-value", unwrapped="rewrite"),
        ),
    ],
    ids=["avro", "protobuf", "json_schema", "json", "variant", "debezium", "debezium in avro"],
)
def test_decoders(
    project: DgProject, monkeypatch: pytest.MonkeyPatch, decode: str, expected: Callable[[Path], Decoder]
) -> None:
    monkeypatch.delenv("T_USER", raising=False)
    project.write("defs/shop/order.proto", 'syntax = "proto3"; message Order { int64 id = 1; }')
    built: list[dg.Definitions] = []
    build = StreamIngestionComponent.build_defs

    def kept(component: StreamIngestionComponent, context: dg.ComponentLoadContext) -> dg.Definitions:
        built.append(build(component, context))
        return built[-1]

    monkeypatch.setattr(StreamIngestionComponent, "build_defs", kept)
    decode = decode.replace("REGISTRY", REGISTRY)
    load(project, ORDERS.replace("group:", f"decode: {decode}\n      group:"))
    (asset,) = [one for one in built[0].assets or () if isinstance(one, StreamAsset)]
    decoder = asset.declared.decode
    assert decoder == expected(project.source / project.package / "defs" / "shop")


@pytest.mark.parametrize(
    ("translation", "key"),
    [
        ('{key: "sales/{{ stream }}"}', "sales/orders-eu"),
        ("""{key: "sales/{{ stream | replace('orders-', '') }}"}""", "sales/eu"),
        ("""{key_prefix: ["sales"], key: "{{ stream | replace('orders-', '') }}"}""", "sales/eu"),
        ("""{deps: ["{{ stream[7:] }}"], key: "sales/{{ stream[7:] }}"}""", "sales/eu"),
        (""""{{ {'key': 'sales/' ~ stream[7:]} }}\"""", "sales/eu"),
        (""""{{ {'key': 'sales/' ~ stream | length, 'deps': some([stream[7:]])} }}\"""", "sales/9"),
        ("""{key: "{{ decoded(stream[7:]) }}"}""", "eu"),
        (""""{{ {'key': decoded(stream[7:])} }}\"""", "eu"),
    ],
)
def test_the_name_of_a_stream_is_never_a_template(
    project: DgProject, monkeypatch: pytest.MonkeyPatch, translation: str, key: str
) -> None:
    names = ["orders-eu", "orders-{{7~true}}", "orders-{%if", "orders-{#~#}", "orders-{orders-{7~true}orders-}"]
    # What decodes it makes a literal of Python of it, and Dagster a template of the literal.
    names += ["orders-%22%5Cx7b%5Cx7b7~true%5Cx7d%5Cx7d%22", "orders-%28'%7B%7B7~true%7D%7D',%29"]
    monkeypatch.setattr(StreamIngestionComponent, "_all_streams", lambda self: names)
    project.write(
        "defs/shop/names.py",
        """
        from collections import deque
        from urllib.parse import unquote
        import dagster as dg

        @dg.template_var
        def decoded():
            return unquote

        @dg.template_var
        def some():
            return deque
        """,
    )
    loaded = load(
        project,
        """
        template_vars_module: .names
        attributes:
          connection: {type: redis, address: "localhost:1"}
          lake: /lake
          streams:
            - {pattern: orders-*, translation: TRANSLATION}
        """.replace("TRANSLATION", translation),
    )
    graph = loaded.resolve_asset_graph()
    keys = {found.to_user_string() for found in graph.get_all_asset_keys()}
    assert key in keys
    assert not any("7True" in found for found in keys)


def test_lists_patterns_defaults_and_names(project: DgProject) -> None:
    for stream in ("orders-eu", "orders-us", "orders-test", "clicks", "other"):
        with create_producer(f"memory://patterns/{stream}") as producer:
            producer.send(b"{}")
    loaded = load(
        project,
        """
        attributes:
          connection: memory://patterns
          lake: /lake
          defaults:
            group: shop
            decode: {type: text}
            op: {pool: lake, retry_policy: "{{ RetryPolicy(max_retries=3) }}", run_tags: {team: shop}}
            translation: {group_name: shop, owners: ["team:shop"]}
          streams:
            - stream: orders-test
              name: trial
              group: tests
              op: {retry_policy: "{{ RetryPolicy(max_retries=0) }}"}
              translation: {group_name: trials}
            - {pattern: orders-*}
            - {stream: [clicks, other], name: both, table: elsewhere/both}
        """,
    )
    graph = loaded.resolve_asset_graph()
    assert {key.to_user_string() for key in graph.materializable_asset_keys} == {
        "trial",
        "orders_eu",
        "orders_us",
        "both",
    }
    assert spec_of(loaded, "orders_eu").metadata["dagster/uri"] == "/lake/public/orders_eu"
    assert spec_of(loaded, "orders_eu").metadata["stream/group"] == "shop"
    assert spec_of(loaded, "trial").metadata["stream/group"] == "tests"
    for name, group, retries in (("orders_eu", "shop", 3), ("trial", "trials", 0)):
        spec, op = spec_of(loaded, name), op_of(loaded, f"ingest_{name}")
        assert (spec.group_name, list(spec.owners), op.pool) == (group, ["team:shop"], "lake"), "each field for itself"
        assert (op.retry_policy.max_retries if op.retry_policy else 0) == retries
        assert loaded.resolve_job_def(f"ingest_{name}").run_tags["team"] == "shop"
    assert len(graph.get(dg.AssetKey("both")).parent_keys) == 2


def test_translation_and_op(project: DgProject) -> None:
    project.write(
        "names.py",
        """
        import dagster as dg
        from stream_assets import StreamTranslator

        class Events(StreamTranslator):
            def get_stream_spec(self, data, stream):
                return dg.AssetSpec(["events", stream])
        """,
    )
    loaded = load(
        project,
        f"""
        attributes:
          connection: memory://component
          lake: /lake
          translator: {project.package}.names.Events
          streams:
            - stream: orders
              group: lakehouse
              translation:
                partitions_def: "{{{{ dg.DailyPartitionsDefinition(start_date='2026-01-01', end_offset=1) }}}}"
                key: "sales/{{{{ stream }}}}"
                owners: ["team:shop"]
                automation_condition: "{{{{ dg.AutomationCondition.eager() }}}}"
              op:
                pool: lake
                retry_policy: "{{{{ RetryPolicy(max_retries=3) }}}}"
                tags: {{team/op: orders}}
                run_tags:
                  dagster/priority: "3"
                  dagster-k8s/config: {{container_config: {{resources: {{limits: {{memory: 4Gi}}}}}}}}
        """,
    )
    spec = spec_of(loaded, "sales", "orders")
    assert list(spec.owners) == ["team:shop"]
    assert spec.automation_condition == dg.AutomationCondition.eager()
    assert spec.partitions_def == dg.DailyPartitionsDefinition(start_date="2026-01-01", end_offset=1)
    assert spec.metadata["dagster/uri"] == "/lake/sales/orders"
    assert [dep.asset_key.to_user_string() for dep in spec.deps] == ["events/orders"]
    op = op_of(loaded, "ingest_sales__orders")
    assert (op.pool, op.retry_policy.max_retries) == ("lake", 3)
    assert op.tags["team/op"] == "orders"
    run_tags = loaded.resolve_job_def("ingest_sales__orders").run_tags
    assert run_tags["dagster/priority"] == "3"
    assert "4Gi" in run_tags["dagster-k8s/config"]


SECRET = """
attributes:
  connection:
    type: kafka
    bootstrap_servers: "{{ EnvVar('T_KAFKA') }}"
    sasl_username: "{{ env('T_USER', '007') }}"
    sasl_password: "{{ EnvVar('T_PASSWORD') }}"
  lake:
    root: "{{ EnvVar('T_LAKE') }}"
    storage_options: {AWS_SECRET_ACCESS_KEY: "{{ EnvVar('T_KEY') }}"}
  streams:
    - {stream: orders, group: "{{ EnvVar('T_GROUP') }}"}
"""


def test_variables_are_looked_up_when_they_are_used_and_never_shown(
    project: DgProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(project, SECRET)  # without any of them
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    loaded = load(project, SECRET)
    job = loaded.resolve_job_def("ingest_orders")
    component = StreamIngestionComponent.from_attributes_dict(attributes=yaml.safe_load(SECRET)["attributes"])
    shown = "".join(
        [
            repr(component),
            *(repr(spec) for spec in loaded.resolve_all_asset_specs()),
            *(str(one.description) for one in [*(loaded.sensors or []), job]),
            str(dg.validate_run_config(job, {})),
        ]
    )
    for value in SECRETS.values():
        assert value not in shown
    definitions = component.build_defs(dg.ComponentTree.for_test().load_context)
    (made,) = [one for one in definitions.assets or () if isinstance(one, StreamAsset)]
    assert str(made.declared.source) == "kafka://kafka-1.internal:9092/orders"
    assert made.declared.ingestion.group == SECRETS["T_GROUP"]
    assert made.declared.ingestion.table == "/lake-of-the-environment/public/orders"
    assert made.declared.ingestion.storage_options == {"AWS_SECRET_ACCESS_KEY": SECRETS["T_KEY"]}
    assert made.declared.stream.client["sasl.username"] == "007"
    password = made.declared.stream.client["sasl.password"]
    assert isinstance(password, dg.EnvVar)
    assert password.get_value() == SECRETS["T_PASSWORD"]


GROUP, STREAM = "group:", "stream: orders"
WRONG = [
    ("  connection: memory://component\n", "", "connection"),
    ("memory://component", "{type: kafak}", "kafak"),
    ("memory://component", "kafak://component", "kafak"),
    ("memory://component", "\"{{ EnvVar('T_URL') }}\"", "T_URL"),
    ("lakehouse", "\"{{ env('T_X') }}\"", "T_X"),
    ("      table: lake/orders\n", "", "table"),
    (STREAM, "stream: []", "stream="),
    (STREAM, "name: orders", "stream=None and pattern=None"),
    (STREAM, "stream: [a, b]", "stream="),
    (STREAM, "pattern: o*", "pattern="),
    (GROUP, "mode: resume\n      group:", "mode='resume'"),
    (GROUP, "transform: .transforms.orders\n      group:", "transforms"),
    (GROUP, "transform: json.orders\n      group:", "'orders'"),
    (GROUP, "transform: sys.path\n      group:", "transform='sys.path'"),
    (GROUP, "decode: json.loads\n      group:", "decode='json.loads'"),
    (GROUP, "decode: {type: json}\n      group:", "schema"),
    ("  streams:", "  translator: json.loads\n  streams:", "translator='json.loads'"),
]


@pytest.mark.parametrize(("before", "after", "named"), WRONG)
def test_what_is_wrong_is_named(project: DgProject, before: str, after: str, named: str) -> None:
    assert before in ORDERS
    # Dagster says in which file it is, and gives what was raised as the cause.
    with pytest.raises(Exception, match="shop") as raised:
        load(project, ORDERS.replace(before, after))
    assert named in str(raised.value.__cause__)


def test_streams_of_a_file_have_no_pattern(project: DgProject) -> None:
    with create_producer(f"file://{project.root}/orders.ss/orders") as producer:
        producer.send(b"{}")
    attributes = {"connection": f"file://{project.root}/orders.ss", "lake": "/lake", "streams": [{"pattern": "*"}]}
    component = StreamIngestionComponent.from_attributes_dict(attributes=attributes)
    with pytest.raises(InvalidOptionError):
        component.build_defs(dg.ComponentTree.for_test().load_context)


def test_each_attribute_is_described() -> None:
    schema = StreamIngestionComponent.model().model_json_schema()
    parts = {"": schema, **schema["$defs"]}
    ours = [name for name in parts if not name.startswith(("AssetSpec", "Hourly", "Daily", "Weekly", "Time", "Static"))]
    silent = {
        f"{part}.{name}"
        for part in ours
        for name, about in parts[part].get("properties", {}).items()
        if not about.get("description") and name != "type"
    }
    assert not silent


def test_a_misspelt_attribute_is_named_by_the_schema() -> None:
    schema = Draft202012Validator(StreamIngestionComponent.model().model_json_schema())

    def found(entry: dict[str, Any]) -> list[tuple[str, str]]:
        attributes = {"connection": "memory://component", "streams": [{"stream": "orders", **entry}]}
        return [(".".join(map(str, one.absolute_path)), one.message) for one in schema.iter_errors(attributes)]

    for entry, path, word in (
        ({"transfrom": ".x"}, "streams.0", "transfrom"),
        ({"op": {"pol": "lake"}}, "streams.0.op", "pol"),
        ({"limits": {"max_recrods": 5}}, "streams.0.limits", "max_recrods"),
        ({"decode": {"type": "json", "schema": "id INT", "mod": "strict"}}, "streams.0.decode", "mod"),
        ({"decode": {"type": "jsn"}}, "streams.0.decode.type", "jsn"),
    ):
        ((place, message),) = found(entry)
        assert (place, f"'{word}'" in message) == (path, True), message
    good = {"group": "{{ EnvVar('T_GROUP') }}", "decode": {"type": "json", "schema": "id INT"}, "op": {"pool": "p"}}
    assert found(good) == found({"decode": "my_project.decoders.orders"}) == []
