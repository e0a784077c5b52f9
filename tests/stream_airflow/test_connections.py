"""What Airflow knows of this package as a provider, and what its connections become; no server is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.airflow_home import LOWEST, NEWEST, AirflowHome

pytestmark = pytest.mark.xdist_group("airflow")
PASSWORD = "hunter2hunter2"
CONNECTIONS = {
    "kafka_default": {
        "conn_type": "kafka",
        "extra": {
            "bootstrap.servers": "broker:9093",
            "group.id": "of the provider",
            "auto.offset.reset": "earliest",
            "security.protocol": "SASL_SSL",
            "sasl.password": PASSWORD,
        },
    },
    "redis_default": {
        "conn_type": "redis",
        "host": "redis",
        "port": 6380,
        "login": "me",
        "password": PASSWORD,
        "extra": {"ssl": True, "db": 2},
    },
    "aws_default": {
        "conn_type": "aws",
        "login": "AKIA",
        "password": PASSWORD,
        "extra": {"region_name": "eu-central-1", "endpoint_url": "https://s3.example.org"},
    },
    "spark_connect": {"conn_type": "spark_connect", "host": "spark", "port": 15002, "password": PASSWORD},
    "spark_default": {"conn_type": "spark", "host": "spark://spark", "port": 7077},
}
SECRETS = {
    "PEM": "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\nc2VjcmV0\n-----END PRIVATE KEY-----\n",
    "KEY": "a2V5a2V5Cg==",
}
RESOLVE = """
import json, os
from airflow.providers_manager import ProvidersManager
try:
    from airflow.sdk.log import redact
except ImportError:
    from airflow.sdk.execution_time.secrets_masker import redact
from spark_jobs.session import SparkOptions
from stream_airflow import IngestOperator
from stream_airflow.connections import connected, connected_spark
from stream_airflow.declaration import StreamTable
from stream_airflow.trigger import StreamLagTrigger
from stream_consumers.errors import InvalidOptionError

def resolved(**given):
    declared = connected(StreamTable(**{"source": "orders,payments", "table": "s3a://lake/t", "group": "g", **given}))
    return [str(declared.stream.url), dict(declared.client), dict(declared.storage_options)]

found = {
    "kafka": resolved(stream_conn_id="kafka_default"),
    "url": resolved(source="kafka://other:9092/orders", stream_conn_id="kafka_default", client={"sasl.password": "x"}),
    "redis": resolved(stream_conn_id="redis_default", storage_conn_id="aws_default"),
    "connect": connected_spark(SparkOptions(), "spark_connect").remote,
    "master": connected_spark(SparkOptions(), "spark_default").master,
    "none": connected_spark(SparkOptions(), None).master,
    "is_provider": "stream-assets" in ProvidersManager().providers,
}
try:
    resolved(stream_conn_id="aws_default")
except InvalidOptionError as error:
    found["wrong"] = str(error)
trigger = StreamLagTrigger(source="orders", table="t", group="g", stream_conn_id="kafka_default")
found["serialized"] = trigger.serialize()[1]
given = {"client": {"ssl.key.pem": "env:PEM", "sasl.mechanism": "OAUTHBEARER"}}
given["storage_options"] = {"AZURE_STORAGE_ACCOUNT_KEY": "env:KEY", "AZURE_STORAGE_ACCOUNT_NAME": "lakehouse"}
IngestOperator(task_id="t", source="kafka://b:9092/orders", table="az://c/t", group="g", **given).declared()
texts = [os.environ["PEM"], *os.environ["PEM"].splitlines(), os.environ["KEY"], "OAUTHBEARER", "lakehouse"]
found["logged"] = [redact(f"a library says {text} here") for text in texts]
print(json.dumps(found))
"""


@pytest.mark.parametrize("version", [NEWEST, pytest.param(LOWEST, marks=pytest.mark.slow)])
def test_connections_become_urls_and_options(tmp_path: Path, version: str) -> None:
    airflow = AirflowHome.make(tmp_path / "airflow", version)
    variables = {f"AIRFLOW_CONN_{name.upper()}": json.dumps(value) for name, value in CONNECTIONS.items()}
    found = json.loads(airflow.python(RESOLVE, **variables, **SECRETS).splitlines()[-1])
    assert found["is_provider"]
    own = {"security.protocol": "SASL_SSL", "sasl.password": PASSWORD}
    assert found["kafka"] == ["kafka://broker:9093/orders,payments", own, {}]
    assert found["url"] == ["kafka://other:9092/orders", {**own, "sasl.password": "x"}, {}]
    assert found["redis"] == [
        "rediss://redis:6380/orders,payments",
        {"username": "me", "password": PASSWORD, "db": 2},
        {
            "AWS_ACCESS_KEY_ID": "AKIA",
            "AWS_SECRET_ACCESS_KEY": PASSWORD,
            "AWS_REGION": "eu-central-1",
            "AWS_ENDPOINT_URL": "https://s3.example.org",
        },
    ]
    assert found["connect"] == f"sc://spark:15002/;token={PASSWORD}"
    assert (found["master"], found["none"]) == ("spark://spark:7077", "local[*]")
    assert "kafka or redis" in found["wrong"]
    assert PASSWORD not in json.dumps(found["serialized"]), "the database of Airflow has only the name"
    *secrets, mechanism, account = found["logged"]
    lines = [line for secret in SECRETS.values() for line in secret.splitlines()]
    assert [line for line in lines if line in "".join(secrets)] == []
    assert ("OAUTHBEARER" in mechanism, "lakehouse" in account) == (True, True)
