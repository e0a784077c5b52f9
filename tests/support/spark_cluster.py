"""A Spark standalone cluster: a master and workers, each a process of its own, whose Python lacks our packages.

It lets in drivers and executors that know its secret.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyspark

from tests.support.class_archive import quick_options
from tests.support.servers import Server, anew, running
from tests.support.settings import ROOT

START_SECONDS = 300.0
_SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
_DEPLOY = "org.apache.spark.deploy"
# A session of its own, so that its executors are ended with it.
_LEADER = "import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
# The Python of an executor is that of the tests, which has the checkout installed.
_WITHOUT_CHECKOUT = f"""import sys
sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]
sys.meta_path[:] = [one for one in sys.meta_path if not getattr(one, "__module__", "").startswith("__editable__")]
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster.

    Args:
        master: its address for drivers.
        workers: each with one core.
        config: the settings that a driver needs, with the secret of the cluster.
        configuration: a folder with these settings, for ``SPARK_CONF_DIR``.
    """

    master: str
    workers: list[Server]
    config: Mapping[str, str]
    configuration: Path

    def kill_worker(self, index: int) -> None:
        """A worker with its executors, as when its machine goes away."""
        worker = self.workers[index].process
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def without_checkout(folder: Path, site: str = "") -> Path:
    """A folder that a Python imports from at its start, and then does not find the packages of the checkout.

    Args:
        folder: where it is made.
        site: more Python that it runs then.
    """
    shadow = folder / "site"
    shadow.mkdir()
    (shadow / "sitecustomize.py").write_text(_WITHOUT_CHECKOUT + site)
    return shadow


@contextmanager
def spark_cluster(folder: Path, *, workers: int = 2, site: str = "") -> Iterator[Cluster]:
    """A cluster; what it starts ends with it.

    Args:
        folder: for what it logs, and the work of the executors.
        workers: how many.
        site: Python that each Python worker of the executors runs when it starts.
    """
    config = {
        "spark.authenticate": "true",
        "spark.authenticate.secret": secrets.token_hex(32),
        "spark.network.crypto.enabled": "true",
    }
    settings = folder / "conf" / "spark-defaults.conf"
    settings.parent.mkdir()
    settings.write_text("".join(f"{name} {value}\n" for name, value in config.items()))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    environment = {
        **kept,
        "PYTHONPATH": str(without_checkout(folder, site)),
        "SPARK_CONF_DIR": str(settings.parent),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": quick_options(),
        "SPARK_WORKER_DIR": str(folder / "work"),
    }
    leader = [sys.executable, "-c", _LEADER, str(_SPARK_CLASS)]
    address = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]

    @contextmanager
    def start(name: str, words: list[str], said: str) -> Iterator[tuple[Server, str]]:
        with running(f"the {name}", [*leader, *words], folder / f"{name}.log", environment=environment) as server:
            try:
                (told,) = server.until(lambda: server.said(said)[:1], seconds=START_SECONDS, what="it is ready")
                yield server, told
            finally:
                if server.process.poll() is None:
                    os.killpg(server.process.pid, signal.SIGKILL)

    words = [f"{_DEPLOY}.master.Master", *address]
    with ExitStack() as stack:
        _, master = stack.enter_context(anew(partial(start, "master", words, r"Starting Spark master at (\S+)")))
        own = [f"{_DEPLOY}.worker.Worker", *address, "--cores", "1", "--memory", "1g", master]
        starts = [
            partial(start, f"worker-{index}", own, "Successfully registered with master") for index in range(workers)
        ]
        yield Cluster(master, [stack.enter_context(anew(each))[0] for each in starts], config, settings.parent)
