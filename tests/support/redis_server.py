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

from tests.support.polling import until
from tests.support.servers import Server, anew, running, serve, some_port

START_SECONDS = 60.0
TRIES = 5  # a port may be in use
SERVICE = "orders-service"


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


class Watched(NamedTuple):
    """A master with a replica, and the Sentinels that watch them.

    Args:
        sentinels: their addresses, as ``host:port``, separated by commas.
        servers: the addresses of the master at the start, and of its replica.
        password: of the Sentinels.
    """

    sentinels: str
    servers: tuple[str, str]
    password: str | None

    def fail_over(self) -> None:
        """Promote the replica; when this returns, the Sentinels name it, and the master follows it."""
        before = self.master()
        with self._sentinel() as sentinel:
            until(lambda: _is_ok(sentinel), seconds=START_SECONDS, what="the Sentinels can fail over")
            sentinel.execute_command("SENTINEL FAILOVER", SERVICE)
        until(lambda: self.master() != before, seconds=START_SECONDS, what="another server is the master")
        host, _, port = before.partition(":")
        with redis.Redis(host, int(port)) as demoted:
            until(lambda: demoted.info("replication")["role"] == "slave", seconds=START_SECONDS, what="it follows")

    def master(self) -> str:
        """The address of the master, as the first Sentinel says."""
        with self._sentinel() as sentinel:
            host, port = sentinel.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)
        return f"{host.decode()}:{port.decode()}"

    def _sentinel(self) -> Any:
        host, _, port = self.sentinels.partition(",")[0].partition(":")
        client: Any = redis.Redis(host, int(port), password=self.password, protocol=2)
        client.response_callbacks.clear()
        return client


def _is_ok(sentinel: Any) -> bool:
    """Whether the Sentinel knows a replica that is up, and two other Sentinels."""
    flat = sentinel.execute_command("SENTINEL MASTER", SERVICE)
    known = dict(zip(flat[::2], flat[1::2]))
    return bool(known[b"num-slaves"] == b"1" and known[b"num-other-sentinels"] == b"2" and known[b"flags"] == b"master")


@contextmanager
def watched_server(folder: Path, sentinels: int = 3, password: str | None = None) -> Iterator[Watched]:
    """A master, its replica, and Sentinels, which want ``password`` if there is one."""
    with ExitStack() as stack:
        servers: list[Any] = []
        for name in ("master", "replica"):
            home = folder / name
            home.mkdir()
            options = ["--replicaof", "127.0.0.1", servers[0].rpartition(":")[2]] if servers else []
            servers.append(stack.enter_context(redis_server(home, "--repl-diskless-sync-delay", "0", *options)))
        addresses = []
        for number in range(sentinels):
            home = folder / f"sentinel-{number}"
            home.mkdir()
            start = partial(_sentinel, home, servers[0], password)
            addresses.append(stack.enter_context(anew(start, times=TRIES)))
        yield Watched(",".join(addresses), (servers[0], servers[1]), password)


@contextmanager
def _sentinel(folder: Path, master: str, password: str | None) -> Iterator[str]:
    port, (host, _, watched) = some_port(), master.partition(":")
    config = folder / "sentinel.conf"
    lines = [
        f"port {port}",
        "bind 127.0.0.1",
        f"dir {folder}",
        f"sentinel monitor {SERVICE} {host} {watched} 2",
        f"sentinel down-after-milliseconds {SERVICE} 2000",
        f"sentinel failover-timeout {SERVICE} 5000",
    ]
    config.write_text(
        "\n".join([*lines, *([f"requirepass {password}", f"sentinel sentinel-pass {password}"] if password else [])])
        + "\n"
    )
    program = shutil.which("redis-server")
    assert program
    with running("redis-sentinel", [program, str(config), "--sentinel"], folder / "sentinel.log") as server:
        server.until(lambda: server.said("monitor master"), seconds=START_SECONDS, what="it watches")
        yield f"127.0.0.1:{port}"


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
    # Before Redis 7, every user of the machine could let the server write other files, run a module, or crash.
    removed = (word for command in ("CONFIG", "MODULE", "DEBUG") for word in ("--rename-command", command, ""))
    options = ("--appendonly", "yes", *removed)
    serve("Redis", 6379, lambda folder, port: redis_server(folder, *options, port=port))
