"""The services of a real Airflow: processes that are started and killed one by one, gone after the test."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.request import urlopen

from tests.support.airflow_home import AirflowHome
from tests.support.polling import until
from tests.support.servers import Server, anew, running, some_port

T = TypeVar("T")
READY_SECONDS = 200.0
TRIES = 2  # a port may be in use
SERVICES = {
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "triggerer": ("triggerer", "--skip-serve-logs"),
    "dag_processor": ("dag-processor",),
    "api_server": ("api-server",),
}
"""The words after ``airflow`` by the name of the service."""
STANDALONE = {"standalone": ("standalone",)}
"""One process that starts all services."""
# The title of the process that runs a task has the id of its task instance.
TASK_TITLE = re.compile(r"airflow worker -- [0-9a-f]{8}-[0-9a-f-]{27}\s*")
# A new service takes over soon from one that was killed.
SETTINGS = {
    "API__WORKERS": "1",
    "CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
    "CORE__EXECUTOR": "LocalExecutor",
    "CORE__PARALLELISM": "3",
    "CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
    "DAG_PROCESSOR__PARSING_PROCESSES": "1",
    "SCHEDULER__JOB_HEARTBEAT_SEC": "1",
    "SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
    "SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "6",
    "SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "3",
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
    "TRIGGERER__JOB_HEARTBEAT_SEC": "1",
    "TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "5",
}


@dataclass
class AirflowServices:
    """Running services of an Airflow.

    Args:
        home: the home of the Airflow.
        port: the port of the API server.
        words: what starts each service.
    """

    home: AirflowHome
    port: int
    words: Mapping[str, Sequence[str]]
    _running: dict[str, Server] = field(default_factory=dict)
    _count: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)

    def start(self, name: str) -> None:
        """Start a service, and do not wait until it is ready."""
        self._count += 1
        started = running(
            f"the {name} of Airflow",
            [str(self.home.place / "bin" / "airflow"), *self.words[name]],
            self.home.folder / f"{self._count:02d}-{name}.log",
            environment=self.home.environment(),
            with_children=True,
        )
        self._running[name] = self._stack.enter_context(started)

    def kill(self, name: str) -> None:
        """Kill the process of a service by SIGKILL; the processes that it started go on."""
        process = self._running.pop(name).process
        assert process.poll() is None, f"{name} has ended with {process.returncode}:\n{self.logs()}"
        process.kill()
        process.wait()

    def until_ready(self) -> None:
        """Wait until the API server reports each service as healthy."""
        server = self._running.get("api_server") or self._running["standalone"]
        server.until(self._is_healthy, seconds=READY_SECONDS, what="all services are healthy")

    def tasks(self) -> list[int]:
        """The processes that run tasks."""
        return [pid for pid in self._processes() if TASK_TITLE.fullmatch(_title(pid))]

    def kill_task(self) -> bool:
        """Kill a process that runs a task by SIGKILL; returns whether there was one."""
        for pid in self.tasks():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def get(self, path: str) -> Any:
        """What the API server answers."""
        with urlopen(f"http://127.0.0.1:{self.port}/api/v2/{path}", timeout=30) as answer:
            return json.load(answer)

    def dags(self) -> list[str]:
        """The names of the DAGs that were read."""
        return [dag["dag_id"] for dag in self.get("dags")["dags"]]

    def runs(self, dag: str) -> list[dict[str, Any]]:
        """The runs of a DAG."""
        runs: list[dict[str, Any]] = self.get(f"dags/{dag}/dagRuns?limit=100")["dag_runs"]
        return runs

    def finished_runs(self, dag: str, *, seconds: float) -> list[dict[str, Any]]:
        """The runs of a DAG, as soon as there are some and all have ended."""

        def finished() -> list[dict[str, Any]] | None:
            runs = self.runs(dag)
            return runs if all(run["state"] in {"success", "failed"} for run in runs) else None

        return self.until(finished, seconds=seconds, what=f"the end of the runs of {dag}")

    def until(self, condition: Callable[[], T | None], *, seconds: float, what: str) -> T:
        """The first truthy value of ``condition``; the failure shows what the services logged."""
        try:
            return until(condition, seconds=seconds, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def logs(self) -> str:
        """The ends of what the services and the tasks logged."""
        paths = [*sorted(self.home.folder.glob("*.log")), *sorted(self.home.folder.glob("logs/dag_id=*/**/*.log"))[-5:]]
        return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def close(self) -> None:
        """Kill what is left."""
        self._stack.close()
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self) -> list[int]:
        """The processes of the services, of their children, and of children of those that were killed."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (folder / "cwd").readlink() == self.home.folder:
                    found.append(int(folder.name))
        return found

    def _is_healthy(self) -> bool:
        try:
            health = self.get("monitor/health")
        except (URLError, OSError):
            return False
        parts = ("metadatabase", "scheduler", "triggerer", "dag_processor")
        return all((health.get(part) or {}).get("status") == "healthy" for part in parts)


@contextmanager
def airflow_services(
    home: AirflowHome,
    *,
    database: str | None = None,
    words: Mapping[str, Sequence[str]] = SERVICES,
    **variables: str,
) -> Iterator[AirflowServices]:
    """All services, ready.

    Args:
        home: the home of the Airflow.
        database: the URL of an empty database; by default the one of SQLite in the home.
        words: what starts each service.
        variables: more environment variables.
    """
    settings = {**SETTINGS, "API_AUTH__JWT_SECRET": secrets.token_hex(32), "API__SECRET_KEY": secrets.token_hex(32)}
    settings["CORE__FERNET_KEY"] = urlsafe_b64encode(secrets.token_bytes(32)).decode()
    if database is not None:
        settings["DATABASE__SQL_ALCHEMY_CONN"] = database
    home = replace(home, variables={**_named(settings), **variables})
    if database is not None:
        home.run("airflow", "db", "migrate")
    with anew(lambda: _started(home, words), times=TRIES) as services:
        yield services


@contextmanager
def _started(home: AirflowHome, words: Mapping[str, Sequence[str]]) -> Iterator[AirflowServices]:
    port = some_port()
    url = f"http://127.0.0.1:{port}"
    addresses = {
        "API__HOST": "127.0.0.1",
        "API__PORT": str(port),
        "API__BASE_URL": url,
        "CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "LOGGING__WORKER_LOG_SERVER_PORT": str(some_port()),
        "LOGGING__TRIGGER_LOG_SERVER_PORT": str(some_port()),
    }
    services = AirflowServices(replace(home, variables={**home.variables, **_named(addresses)}), port, words)
    try:
        for name in words:
            services.start(name)
        services.until_ready()
        yield services
    finally:
        services.close()


def _named(settings: Mapping[str, str]) -> dict[str, str]:
    return {f"AIRFLOW__{name}": value for name, value in settings.items()}


def _title(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""
