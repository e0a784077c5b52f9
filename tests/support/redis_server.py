"""Real redis-servers on the loopback interface, without persistence, gone with their folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import redis
import trustme

from tests.support.servers import Server, anew, running, serve, some_port

START_SECONDS = 60.0
TRIES = 5  # a port may be in use


@contextmanager
def redis_server(folder: Path, *options: str, port: int | None = None) -> Iterator[str]:
    """A running server, as ``host:port``; ``options`` go on its command line."""
    with anew(lambda: _server(folder, port or some_port(), *options), times=TRIES) as server:
        yield server.address


@contextmanager
def tls_server(
    folder: Path, *options: str, names: Sequence[str] = ("127.0.0.1", "localhost")
) -> Iterator[tuple[str, Path]]:
    """A server that speaks TLS only, as ``host:port``, and the certificate of the authority that signed its own.

    Its own is issued for ``names``.
    """
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued = authority.issue_cert(*names)
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    own = ("--tls-cert-file", str(folder / "cert.pem"), "--tls-key-file", str(folder / "key.pem"))
    words = (*own, "--tls-ca-cert-file", str(folder / "ca.pem"), "--tls-auth-clients", "no", *options)
    with anew(lambda: _server(folder, some_port(), *words, listens="--tls-port"), times=TRIES) as server:
        yield server.address, folder / "ca.pem"


@contextmanager
def redis_cluster(folder: Path, nodes: int = 3) -> Iterator[list[str]]:
    """A cluster of primaries that share the slots, as a list of ``host:port``."""
    with anew(lambda: _cluster(Path(tempfile.mkdtemp(dir=folder)), nodes)) as addresses:
        yield addresses


class _Running(NamedTuple):
    server: Server
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextmanager
def _server(folder: Path, port: int, *options: str, listens: str = "--port") -> Iterator[_Running]:
    program = shutil.which("redis-server")
    assert program, "redis-server is not installed; make setup does it where it may"
    command = [program, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), "--port", "0", *options]
    with running("redis-server", [*command, listens, str(port)], folder / "redis.log") as server:
        server.until(
            lambda: server.said("Ready to accept connections"), seconds=START_SECONDS, what="it accepts connections"
        )
        yield _Running(server, port)


def _node(folder: Path) -> AbstractContextManager[_Running]:
    return _server(folder, some_port(), "--cluster-enabled", "yes")


@contextmanager
def _cluster(folder: Path, nodes: int) -> Iterator[list[str]]:
    with ExitStack() as stack:
        started: list[_Running] = []
        for number in range(nodes):
            home = folder / f"node-{number}"
            home.mkdir()
            started.append(stack.enter_context(anew(partial(_node, home), times=TRIES)))
        clients = [stack.enter_context(redis.Redis("127.0.0.1", node.port)) for node in started]
        bounds = [16384 * number // nodes for number in range(nodes + 1)]
        for client, first, behind in zip(clients, bounds, bounds[1:]):
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, behind - 1)
            client.execute_command("CLUSTER MEET", "127.0.0.1", started[0].port)
        for node, client in zip(started, clients):
            whole = partial(_is_whole, client, nodes)
            node.server.until(whole, seconds=START_SECONDS, what=f"it sees {nodes} nodes with all slots")
        yield [node.address for node in started]


def _is_whole(client: Any, nodes: int) -> bool:
    info = client.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == nodes


if __name__ == "__main__":
    serve("Redis", 6379, lambda folder, port: redis_server(folder, "--appendonly", "yes", port=port))
