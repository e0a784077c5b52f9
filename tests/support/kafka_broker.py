"""A real Kafka broker in one process: KRaft, loopback only, gone with its folder.

Run it by hand with ``python -m tests.support.kafka_broker --port 9092`` (``make kafka``).
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyspark
from confluent_kafka import Consumer, KafkaException, TopicPartition, admin

from spark_jobs.jars import resolved
from tests.support.servers import Server, anew, jvm, running, serve

COORDINATE = ("org.apache.kafka", "kafka_2.13", "4.1.0")
START_SECONDS = 120.0
# Ports are chosen by the system. Nobody asks the controller before it listens: it is its own only voter.
PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:1
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:0,SECURE://127.0.0.1:0
advertised.listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:0,SECURE://127.0.0.1:0
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:SASL_PLAINTEXT,SECURE:SASL_PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=SECURE
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:{administrator}
sasl.enabled.mechanisms=PLAIN,OAUTHBEARER
sasl.mechanism.controller.protocol=PLAIN
sasl.mechanism.inter.broker.protocol=PLAIN
listener.name.controller.sasl.enabled.mechanisms=PLAIN
listener.name.controller.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required \
username="{administrator}" password="{secret}" user_{administrator}="{secret}";
listener.name.secure.oauthbearer.sasl.jaas.config=\
org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="admin";
listener.name.secure.oauthbearer.sasl.server.callback.handler.class=\
org.apache.kafka.common.security.oauthbearer.internals.unsecured.OAuthBearerUnsecuredValidatorCallbackHandler
listener.name.secure.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required \
username="{administrator}" password="{secret}" user_{administrator}="{secret}" user_reader="{password}";
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
group.consumer.heartbeat.interval.ms=500
"""
# Kafka ships no binding for its log; pyspark does.
LOGGING_JARS = ("slf4j-api-*.jar", "log4j-slf4j2-impl-*.jar", "log4j-api-*.jar", "log4j-core-*.jar")
LOGGING = """
rootLogger.level=info
rootLogger.appenderRef.console.ref=console
appender.console.type=Console
appender.console.name=console
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%d{HH:mm:ss.SSS} %p %c{1}: %m%n
logger.settings.name=org.apache.kafka.common.config
logger.settings.level=warn
"""
# Who can change settings of the broker can make it read files of the user who runs it.
FORBIDDEN = ("ALTER", "ALTER_CONFIGS")
SECURE_USER = "reader"
SECURE_PASSWORD = "correct-horse-battery"


class Listeners(NamedTuple):
    """Where a broker listens, as host:port.

    ``secure`` wants SASL/PLAIN with :data:`SECURE_USER` and its password, or OAUTHBEARER with a token of
    :mod:`tests.support.tokens`.
    """

    plain: str
    secure: str


@contextmanager
def kafka_broker(folder: Path, *, port: int = 0) -> Iterator[Listeners]:
    """A running broker that has its groups loaded; its data is in ``folder``."""
    with anew(lambda: broker_in(Path(tempfile.mkdtemp(dir=folder)), port)) as listeners:
        yield listeners


@contextmanager
def broker_in(folder: Path, port: int) -> Iterator[Listeners]:
    """The same in a folder of its own; one that ran there before is started again, with its data."""
    config, logging = folder / "server.properties", folder / "log4j2.properties"
    # Nobody can guess the name, and name it in a token that nobody has signed.
    administrator, secret = f"administrator-{secrets.token_hex(16)}", secrets.token_hex(16)
    names = {"administrator": administrator, "secret": secret, "password": SECURE_PASSWORD}
    config.unlink(missing_ok=True)
    config.touch(0o600)
    config.write_text(PROPERTIES.format(port=port, folder=folder, **names))
    logging.write_text(LOGGING)
    shipped = Path(pyspark.__file__).parent / "jars"
    jars = [str(next(shipped.glob(pattern))) for pattern in LOGGING_JARS]
    classes = ":".join([*jars, f"{resolved(COORDINATE)}/*"])
    program = jvm(folder, f"-Dlog4j2.configurationFile={logging}", "-cp", classes)
    prepare = ["kafka.tools.StorageTool", "format", "-t", "stream-assets-tests-000", "-c", str(config), "--standalone"]
    if not (folder / "data").exists():
        with running("the format of the broker's storage", [*program, *prepare], folder / "format.log") as storage:
            storage.until(
                lambda: storage.said("Formatting .+"), seconds=START_SECONDS, what="the storage was formatted"
            )
            storage.process.wait(START_SECONDS)
    with running("the Kafka broker", [*program, "kafka.Kafka", str(config)], folder / "broker.log") as server:
        server.until(lambda: server.said("Kafka Server started"), seconds=START_SECONDS, what="its start")
        listeners = Listeners(*(_address(server, name) for name in ("PLAINTEXT", "SECURE")))
        _forbid_settings(listeners.secure, administrator, secret)
        server.until(lambda: _loads_groups(listeners.plain), seconds=START_SECONDS, what="its groups are loaded")
        yield listeners


def _address(server: Server, listener: str) -> str:
    # Those of earlier starts are in its data, and come first.
    *_, port = server.said(rf"Replayed .*RegisterBrokerRecord.*name='{listener}', host='127.0.0.1', port=(\d+)")
    return f"127.0.0.1:{port}"


def _forbid_settings(address: str, administrator: str, secret: str) -> None:
    """Let everybody do everything but change the settings of the broker; until then only the administrator may."""
    kafka: Any = admin  # its names have no types
    login = {"sasl.mechanism": "PLAIN", "sasl.username": administrator, "sasl.password": secret}
    client = kafka.AdminClient({"bootstrap.servers": address, "security.protocol": "SASL_PLAINTEXT", **login})
    cluster, *kinds = (kafka.ResourceType[name] for name in ("BROKER", "TOPIC", "GROUP", "TRANSACTIONAL_ID"))
    rules = [*((kind, "*", "ALL", "ALLOW") for kind in kinds), (cluster, "kafka-cluster", "ALL", "ALLOW")]
    rules += [(cluster, "kafka-cluster", operation, "DENY") for operation in FORBIDDEN]
    bindings = [
        kafka.AclBinding(
            *(kind, name, kafka.ResourcePatternType.LITERAL, "User:*", "*"),
            *(kafka.AclOperation[operation], kafka.AclPermissionType[permission]),
        )
        for kind, name, operation, permission in rules
    ]
    for made in client.create_acls(bindings).values():
        made.result(START_SECONDS)


def _loads_groups(address: str) -> bool:
    """Whether the coordinator answers; it makes its topic first, and an admin client that asks before may crash."""
    settings = {"bootstrap.servers": address, "group.id": "loaded", "logger": None, "log_level": 0}
    try:
        Consumer(settings).committed([TopicPartition("loaded", 0)], 5.0)
    except KafkaException:
        return False
    return True


if __name__ == "__main__":
    serve(f"Kafka {COORDINATE[2]}", 9092, broker_in)
