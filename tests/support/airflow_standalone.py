"""``airflow standalone``: scheduler, triggerer, DAG processor and API server on the loopback interface."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from tests.support.airflow_home import AirflowHome
from tests.support.servers import anew, running, some_port

START_SECONDS = 240.0
ANSWER_SECONDS = 30.0
SETTINGS = {
    "AIRFLOW__API__HOST": "127.0.0.1",
    "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
    "AIRFLOW__CORE__PARALLELISM": "2",
    "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
    "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "10",
}
# The servers are on this machine, which no proxy reaches.
_opener = build_opener(ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Standalone:
    """An Airflow that runs.

    Args:
        address: of its UI and its REST API.
        token: of an administrator, for the API.
        log: what its processes log.
    """

    address: str
    token: str
    log: Path

    def ask(self, path: str, *, method: str = "GET", body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what the REST API answers; it is empty for what is not there yet, and while SQLite is busy."""
        try:
            return _ask(f"{self.address}/api/v2/{path}", method=method, body=body, token=self.token)
        except HTTPError as error:
            if error.code in (404, 503):
                return {}
            raise

    def start_dag(self, name: str) -> bool:
        """Unpause a DAG; returns whether it is there already."""
        return bool(self.ask(f"dags/{name}", method="PATCH", body={"is_paused": False}))

    def runs(self, dag: str) -> list[dict[str, Any]]:
        """Return the runs of a DAG, the oldest one first."""
        runs: list[dict[str, Any]] = self.ask(f"dags/{dag}/dagRuns?order_by=id").get("dag_runs", [])
        return runs

    def tasks(self, dag: str) -> list[dict[str, Any]]:
        """Return the tasks of the runs of a DAG."""
        tasks: list[dict[str, Any]] = self.ask(f"dags/{dag}/dagRuns/~/taskInstances").get("task_instances", [])
        return tasks


@contextmanager
def airflow_standalone(home: AirflowHome, **variables: str) -> Iterator[Standalone]:
    """A running Airflow, with these environment variables as well; it ends with its tasks."""
    with anew(lambda: _started(home, variables)) as started:
        yield started


@contextmanager
def _started(home: AirflowHome, variables: Mapping[str, str]) -> Iterator[Standalone]:
    port = some_port()
    address, log = f"http://127.0.0.1:{port}", home.folder / "standalone.log"
    login = {"username": "admin", "password": secrets.token_hex(16)}
    passwords = home.folder / "passwords.json"
    passwords.touch(0o600)
    passwords.write_text(json.dumps({login["username"]: login["password"]}))
    own = {
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords),
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__BASE_URL": address,
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
    }
    with running(
        "airflow standalone",
        [str(home.place / "bin" / "airflow"), "standalone"],
        log,
        environment=home.environment(**SETTINGS, **own, **variables),
        stop=signal.SIGINT,
        with_children=True,
    ) as server:
        token = server.until(lambda: _token(address, login), seconds=START_SECONDS, what="its API answers")
        yield Standalone(address, token, log)


def _token(address: str, login: Mapping[str, str]) -> str:
    try:
        return str(_ask(f"{address}/auth/token", method="POST", body=login)["access_token"])
    except (URLError, ConnectionError, TimeoutError):
        return ""


def _ask(
    url: str, *, method: str = "GET", body: Mapping[str, Any] | None = None, token: str | None = None
) -> dict[str, Any]:
    request = Request(url, method=method, data=None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with _opener.open(request, timeout=ANSWER_SECONDS) as answer:
        found: dict[str, Any] = json.load(answer)
        return found
