"""A real Debezium in Kafka Connect, from a Postgres into a Kafka broker; it goes on where an earlier one stopped.

Run it by hand, with a Postgres, by ``python -m tests.support.debezium --broker localhost:9092`` (``make debezium``).
"""

from __future__ import annotations

import argparse
import secrets
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pyspark

from spark_jobs.jars import resolved
from tests.support.kafka_broker import COORDINATE, LOGGING, LOGGING_JARS
from tests.support.postgres import Postgres, postgres_server
from tests.support.servers import Server, jvm, running

CONNECT = ("org.apache.kafka", "connect-runtime", COORDINATE[2])
LOGIN = ("org.apache.kafka", "connect-basic-auth-extension", COORDINATE[2])
DEBEZIUM = ("io.debezium", "debezium-connector-postgres", "3.4.0.Final")
START_SECONDS = 240.0
PREFIX = "shop"
WORKER = """
bootstrap.servers={broker}
listeners=HTTP://127.0.0.1:0
key.converter=org.apache.kafka.connect.json.JsonConverter
value.converter=org.apache.kafka.connect.json.JsonConverter
offset.storage.file.filename={folder}/offsets
offset.flush.interval.ms=1000
plugin.discovery=only_scan
rest.extension.classes=org.apache.kafka.connect.rest.basic.auth.extension.BasicAuthSecurityRestExtension
"""
# Every user of the machine can connect to the REST API, which shows the password of the database. So it asks for a
# password that nobody knows.
LOGINS = """
KafkaConnect {{
    org.apache.kafka.connect.rest.basic.auth.extension.PropertyFileLoginModule required file="{users}";
}};
"""
# The topic is there before the connector, unless somebody runs it by hand.
CONNECTOR = """
name=shop
connector.class=io.debezium.connector.postgresql.PostgresConnector
tasks.max=1
plugin.name=pgoutput
publication.autocreate.mode=filtered
slot.name=shop
topic.prefix={prefix}
table.include.list={tables}
database.hostname={host}
database.port={port}
database.user={user}
database.password={password}
database.dbname={database}
topic.creation.default.partitions=2
topic.creation.default.replication.factor=1
"""


@contextmanager
def debezium(
    folder: Path, broker: str, database: Postgres, tables: str, options: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A Debezium that follows the changes of tables.

    Args:
        folder: keeps how far it is.
        broker: gets the topics ``shop.SCHEMA.TABLE``.
        database: a server with the logical log.
        tables: the names of tables, like ``public.customers``.
        options: more options of the connector.
    """
    folder.mkdir(parents=True, exist_ok=True)
    worker, connector = folder / "worker.properties", folder / "connector.properties"
    worker.write_text(WORKER.format(broker=broker, folder=folder))
    login = {"host": database.host, "port": database.port, "user": database.user, "password": database.password}
    connector.touch(0o600)
    text = CONNECTOR.format(prefix=PREFIX, tables=tables, database=database.database, **login)
    connector.write_text(text + "".join(f"{name}={value}\n" for name, value in (options or {}).items()))
    users, logins = folder / "users", folder / "logins.conf"
    users.touch(0o600)
    users.write_text(f"nobody={secrets.token_hex(16)}\n")
    logins.write_text(LOGINS.format(users=users))
    logging = folder / "log4j2.properties"
    logging.write_text(LOGGING)
    shipped = Path(pyspark.__file__).parent / "jars"
    jars = [str(next(shipped.glob(pattern))) for pattern in LOGGING_JARS]
    folders = resolved(CONNECT), resolved(LOGIN, is_alone=True), resolved(DEBEZIUM)
    classes = ":".join([*jars, *(f"{place}/*" for place in folders)])
    options = [f"-Dlog4j2.configurationFile={logging}", f"-Djava.security.auth.login.config={logins}"]
    command = [
        *jvm(folder, *options, "-cp", classes),
        "org.apache.kafka.connect.cli.ConnectStandalone",
        str(worker),
        str(connector),
    ]
    with running("Debezium", command, folder / "debezium.log") as server:
        server.until(lambda: server.said("Starting streaming"), seconds=START_SECONDS, what="it follows the log")
        yield server


# What examples/customers reads.
EXAMPLE = (
    "CREATE TABLE customers (id BIGINT PRIMARY KEY, name TEXT NOT NULL, email TEXT, notes TEXT)",
    "INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bob'), (3, 'Cleo')",
)


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="A real Postgres and Debezium on the loopback interface.")
    parser.add_argument("--port", type=int, default=5433, help="of Postgres")
    parser.add_argument("--broker", default="localhost:9092", help="the Kafka broker that gets the changes")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder, postgres_server(port=given.port, logs_changes=True) as database:
        database.run(*EXAMPLE)
        with debezium(Path(folder), given.broker, database, "public.customers"), suppress(KeyboardInterrupt):
            print(f"Changes go to kafka://{given.broker}/{PREFIX}.public.customers until Ctrl-C. Make some by:")
            # Every user of the machine can read a command line.
            password = Path(folder, "pgpass")
            password.touch(0o600)
            password.write_text(f"*:*:*:*:{database.password}\n")
            words = f"-h {database.host} -p {database.port} -U {database.user} {database.database}"
            print(f"PGPASSFILE={password} psql {words}", flush=True)
            signal.pause()


if __name__ == "__main__":
    main()
