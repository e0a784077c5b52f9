"""A real Kafka broker in one process: KRaft, loopback only, gone with its folder.

Run it by hand with ``python -m tests.support.kafka_broker --port 9092`` (``make kafka``).
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from spark_jobs.jars import java, resolved
from tests.support.polling import until

COORDINATE = ("org.apache.kafka", "kafka_2.13", "4.1.0")
START_SECONDS = 60
PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller},SECURE://127.0.0.1:{secure}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},SECURE://127.0.0.1:{secure}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
sasl.enabled.mechanisms=PLAIN
listener.name.secure.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required user_reader="{password}";
log.dirs={folder}/data
log.retention.ms=-1
log.cleaner.backoff.ms=200
log.initial.task.delay.ms=100
log.segment.delete.delay.ms=1000
file.delete.delay.ms=1000
auto.create.topics.enable=false
num.partitions=1
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
group.consumer.min.session.timeout.ms=1000
group.consumer.min.heartbeat.interval.ms=500
"""
SECURE_USER = "reader"
SECURE_PASSWORD = "correct-horse-battery"


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def kafka_broker(folder: Path, *, port: int | None = None, secure: int | None = None) -> Iterator[str]:
    """A running broker, as ``host:port``; its data is in ``folder``.

    A second listener on ``secure`` asks for SASL/PLAIN with :data:`SECURE_USER` and :data:`SECURE_PASSWORD`.
    """
    port = port or free_port()
    config = folder / "server.properties"
    config.write_text(
        PROPERTIES.format(
            port=port,
            controller=free_port(),
            secure=secure or free_port(),
            password=SECURE_PASSWORD,
            folder=folder,
        )
    )
    jvm = [java(), "-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", f"{resolved(COORDINATE)}/*"]
    cluster = ["-t", "stream-assets-tests-000", "-c", str(config), "--ignore-formatted"]
    log_path = folder / "broker.log"
    with log_path.open("wb") as log:
        subprocess.run([*jvm, "kafka.tools.StorageTool", "format", *cluster], stdout=log, stderr=log, check=True)
        broker = subprocess.Popen([*jvm, "kafka.Kafka", str(config)], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            until(lambda: _answers(f"127.0.0.1:{port}", broker, log_path), seconds=START_SECONDS, what="the broker")
            _load_groups(f"127.0.0.1:{port}")
            yield f"127.0.0.1:{port}"
        finally:
            broker.kill()
            broker.wait()


def _answers(address: str, broker: subprocess.Popen[bytes], log: Path) -> bool:
    if broker.poll() is not None:
        raise AssertionError(f"the broker ended with {broker.returncode}:\n{log.read_text()[-4000:]}")
    try:
        admin = AdminClient({"bootstrap.servers": address, "logger": None, "log_level": 0})
        return bool(admin.list_topics(timeout=2).brokers)
    except KafkaException:
        return False


def _load_groups(address: str) -> None:
    """Have the coordinator loaded: an admin client that asks it before may end the process."""
    settings = {"bootstrap.servers": address, "group.id": "loaded", "logger": None, "log_level": 0}
    Consumer(settings).committed([TopicPartition("loaded", 0)], START_SECONDS)


def main() -> None:
    """Run a broker until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=9092)
    port = parser.parse_args().port
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="kafka-") as folder, kafka_broker(Path(folder), port=port) as address:
        print(f"Kafka {COORDINATE[2]} is listening at {address}; Ctrl-C stops it and removes its data", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("stopping", flush=True)


if __name__ == "__main__":
    main()
