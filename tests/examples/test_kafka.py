"""The broker of ``make kafka`` reads no file of its user for others, and its JVM loads no library that they made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, admin

from tests.support.kafka_broker import kafka_broker
from tests.support.servers import VARIABLES, running

PROVIDERS = "org.apache.kafka.common.config.provider"


def test_nobody_changes_the_settings_of_the_broker(folder: Path) -> None:
    kafka: Any = admin
    settings = {
        "config.providers": "dir",
        "config.providers.dir.class": f"{PROVIDERS}.DirectoryConfigProvider",
        "listener.name.secure.ssl.truststore.location": f"${{dir:{folder}:secret}}",
    }
    with kafka_broker(folder) as (address, _):
        client = kafka.AdminClient({"bootstrap.servers": address})
        broker = kafka.ConfigResource(kafka.ResourceType.BROKER, "1")
        for name, value in settings.items():
            broker.add_incremental_config(
                kafka.ConfigEntry(name, value, incremental_operation=kafka.AlterConfigOpType.SET)
            )
        (changed,) = client.incremental_alter_configs([broker]).values()
        with pytest.raises(KafkaException):
            changed.result()
        client.create_topics([kafka.NewTopic("orders", 1)])["orders"].result()


def test_a_server_gets_no_secrets_of_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with running("env", ["/usr/bin/env"], folder / "log") as server:
        server.process.wait()
    found = dict(line.split("=", 1) for line in (folder / "log").read_text().splitlines())
    assert found.keys() <= {*VARIABLES, "TMPDIR"}
    assert Path(found["TMPDIR"]).stat().st_mode & 0o777 == 0o700
