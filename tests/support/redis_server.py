"""Real redis-servers on the loopback interface, without persistence, gone with their folder."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
import trustme
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.kafka_broker import free_port
from tests.support.polling import until


@contextmanager
def redis_server(folder: Path, *options: str, port: int | None = None) -> Iterator[str]:
    """A running server, as ``host:port``; ``options`` go on its command line."""
    port = port or free_port()
    with _running(folder, "--port", str(port), *options):
        until(lambda: _answers(port), seconds=20, what="the Redis server")
        yield f"127.0.0.1:{port}"


@contextmanager
def tls_server(folder: Path, *options: str) -> Iterator[tuple[str, Path]]:
    """A server that speaks TLS only, as ``host:port``, and the certificate of the authority that signed its own."""
    authority, port = trustme.CA(), free_port()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    files = ("--tls-cert-file", folder / "cert.pem", "--tls-key-file", folder / "key.pem")
    words = ("--port", "0", "--tls-port", str(port), *map(str, files), "--tls-auth-clients", "no", *options)
    with _running(folder, *words):
        until(lambda: _answers(port, ssl=True, ssl_ca_certs=str(folder / "ca.pem")), seconds=20, what="the TLS server")
        yield f"127.0.0.1:{port}", folder / "ca.pem"


@contextmanager
def redis_cluster(folder: Path, nodes: int = 3) -> Iterator[list[str]]:
    """A cluster of primaries that share the slots, as a list of ``host:port``."""
    with ExitStack() as stack:
        addresses: list[str] = []
        buses: list[int] = []
        for number in range(nodes):
            home = folder / f"node-{number}"
            home.mkdir()
            # The bus would be 10000 above the port, which is often more than a port can be.
            buses.append(free_port())
            words = ("--cluster-enabled", "yes", "--cluster-port", str(buses[number]))
            addresses.append(stack.enter_context(redis_server(home, *words)))
        clients = [stack.enter_context(_client(int(address.partition(":")[2]))) for address in addresses]
        bounds = [16384 * number // nodes for number in range(nodes + 1)]
        for client, first, behind in zip(clients, bounds, bounds[1:]):
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, behind - 1)
            client.execute_command("CLUSTER MEET", *addresses[0].split(":"), buses[0])
        for client in clients:
            until(lambda one=client: _is_whole(one, nodes), seconds=30, what="the cluster")  # type: ignore[misc]
        yield addresses


@contextmanager
def _running(folder: Path, *options: str) -> Iterator[None]:
    program = shutil.which("redis-server")
    assert program, "redis-server is not installed; make setup does it where it may"
    command = [program, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    with (folder / "redis.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.kill()
            process.wait()


def _client(port: int, **options: Any) -> Any:
    # Refused passwords would be tried again for seconds.
    made: Any = redis.Redis("127.0.0.1", port, retry=Retry(NoBackoff(), 0), **options)
    return made


def _is_whole(client: Any, nodes: int) -> bool:
    info = client.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == nodes


def _answers(port: int, **options: Any) -> bool:
    with _client(port, **options) as client, suppress(redis.ConnectionError):
        try:
            return bool(client.ping())
        except redis.AuthenticationError:
            return True
    return False


def main() -> None:
    """Run a server until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=6379)
    port = parser.parse_args().port
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="redis-") as folder, redis_server(Path(folder), port=port) as address:
        print(f"Redis is listening at {address}; Ctrl-C stops it and removes its data", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("stopping", flush=True)


if __name__ == "__main__":
    main()
