"""A real Postgres on the loopback interface, gone with its folder. ``tools/postgres`` installs it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg2

from tests.support.servers import anew, running, some_port

START_SECONDS = 120.0
TRIES = 5  # a port may be in use
USER = "dagster"
# Only this one can run programs as the user of the server.
ADMINISTRATOR = "administrator"
# Debian keeps its programs off the path, and its package makes this user. Postgres refuses to be run by root.
DEBIAN = Path("/usr/lib/postgresql")
UNPRIVILEGED = "postgres"


@dataclass(frozen=True, slots=True)
class Postgres:
    """A running server, and its empty database ``dagster``."""

    port: int
    password: str
    host: str = "127.0.0.1"
    user: str = USER
    database: str = "dagster"

    @property
    def url(self) -> str:
        """What ``psql`` connects to."""
        return f"postgresql://{self.user}:{self.password}@{self.host}:{self.port}/{self.database}"

    def rows(self, query: str) -> list[tuple[object, ...]]:
        """What a query finds."""
        with closing(self.connection()) as connection, connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall()

    def run(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""
        with closing(self.connection()) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            for statement in statements:
                cursor.execute(statement)

    def connection(self) -> psycopg2.extensions.connection:
        """A new connection; the caller closes it."""
        return psycopg2.connect(
            host=self.host, port=self.port, user=self.user, password=self.password, dbname=self.database
        )


@contextmanager
def postgres_server(*, port: int = 0, logs_changes: bool = False) -> Iterator[Postgres]:
    """A running server; with ``logs_changes`` its log has what Debezium reads.

    Its folder is not one of pytest: those of root are closed to the user that the server runs as.
    """
    with ExitStack() as stack:
        folder, logs = (Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="postgres-"))) for _ in "12")
        password = secrets.token_hex(16)
        # The server works in it, and may not change it: it is root who opens the log.
        logs.chmod(0o711)
        (folder / "password").write_text(password)
        if os.geteuid() == 0:
            for path in (folder, folder / "password"):
                shutil.chown(path, UNPRIVILEGED, UNPRIVILEGED)
        options = [
            "--username",
            ADMINISTRATOR,
            "--pwfile",
            str(folder / "password"),
            "--auth",
            "scram-sha-256",
            "--no-sync",
        ]
        made = subprocess.run(
            _command("initdb", "--pgdata", str(folder / "data"), *options),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        with anew(lambda: _server(folder / "data", logs, password, port, logs_changes), times=TRIES) as server:
            own = replace(server, password=secrets.token_hex(16))
            replace(server, user=ADMINISTRATOR, database="postgres").run(
                f"CREATE ROLE {USER} LOGIN REPLICATION PASSWORD '{own.password}'",
                f"CREATE DATABASE {own.database} OWNER {USER}",
            )
            yield own


@contextmanager
def _server(data: Path, logs: Path, password: str, port: int, logs_changes: bool) -> Iterator[Postgres]:
    port = port or some_port()
    words = ["-D", str(data), "-h", "127.0.0.1", "-p", str(port), "-k", "", "-F"]
    words += ["-c", f"wal_level={'logical' if logs_changes else 'replica'}"]
    # Interrupted, it closes all connections and ends.
    with running("Postgres", _command("postgres", *words), logs / "server.log", stop=signal.SIGINT) as server:
        server.until(
            lambda: server.said("database system is ready to accept connections"),
            seconds=START_SECONDS,
            what="it accepts connections",
        )
        yield Postgres(port, password)


def _command(program: str, *words: str) -> Sequence[str]:
    found = shutil.which(program) or next(map(str, sorted(DEBIAN.glob(f"*/bin/{program}"))), None)
    assert found, f"{program} is not installed; tools/postgres does it where it may"
    if os.geteuid() != 0:
        return [found, *words]
    return ["setpriv", "--reuid", UNPRIVILEGED, "--regid", UNPRIVILEGED, "--clear-groups", found, *words]
