"""The servers of ``make kafka`` and ``make redis`` give other users of the machine only messages."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from confluent_kafka import KafkaException, admin

from spark_jobs.spark_server.folder import UnusableFolderError
from stream_consumers.errors import UntrustedFileError
from tests.support.kafka_broker import kafka_broker
from tests.support.servers import VARIABLES, kept_folder, running, some_port

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


def test_the_log_of_a_server_is_private_and_no_link(folder: Path) -> None:
    """The broker's has the name of its administrator. Another user may have put a link into a folder of theirs."""
    log = folder / "log"
    log.touch(0o644)
    with running("true", ["/bin/true"], log):
        assert log.stat().st_mode & 0o777 == 0o600
    (folder / "link").symlink_to(log)
    with pytest.raises(OSError, match="symbolic links"), running("true", ["/bin/true"], folder / "link"):
        pass


def test_another_user_neither_reads_kept_data_nor_changes_the_redis_server(folder: Path) -> None:
    kept, port = folder / "kept", some_port()
    kept.mkdir(mode=0o755)
    command = [sys.executable, "-m", "tests.support.redis_server", "--port", str(port), "--keep", str(kept)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with running("make redis", command, folder / "log", environment=environment, stop=signal.SIGTERM) as server:
        server.until(lambda: server.said("Redis is listening"), seconds=60, what="its start")
        assert kept.stat().st_mode & 0o777 == 0o700
        with redis.Redis("127.0.0.1", port) as client:
            for words in (["CONFIG", "GET", "dir"], ["MODULE", "LIST"], ["DEBUG", "JMAP"]):
                with pytest.raises(redis.ResponseError, match="unknown command"):
                    client.execute_command(*words)


def test_data_is_kept_in_no_folder_that_another_user_may_have_made(folder: Path) -> None:
    (folder / "link").symlink_to(folder)
    (folder / "shared").mkdir()
    (folder / "shared").chmod(0o777)
    with pytest.raises(UnusableFolderError):
        kept_folder(folder / "link")
    with pytest.raises(UntrustedFileError):
        kept_folder(folder / "shared" / "kept")
