"""Redis behind a password, TLS, another database, or as a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import redis

from stream_consumers.batches import Range
from stream_consumers.client_config import EnvironmentVariable, Scalar
from stream_consumers.consumer import Consumer
from stream_consumers.create import StreamSource, create_consumer, create_producer
from stream_consumers.errors import (
    AccessDeniedError,
    BrokerError,
    BrokerUnavailableError,
    InvalidOptionError,
    InvalidUrlError,
    StreamAssetsError,
)
from stream_consumers.options import AutoStreamReset, ConsumerMode, Limits
from stream_consumers.producer import Producer
from stream_consumers.redis.claims import ClaimedEntries, ClaimName
from stream_consumers.redis.client import new_client
from stream_consumers.redis.server import RedisConnection
from stream_consumers.urls import StreamUrl
from tests.support.kept_errors import kept
from tests.support.polling import until
from tests.support.redis_server import SERVICE, redis_server, tls_server, watched_server

BID = "b" * 32
Place = tuple[str, int, int]


def produce(url: str, client: Mapping[str, Scalar | EnvironmentVariable], *, shards: int = 3) -> set[Place]:
    with create_producer(url, client=client, shards=shards) as producer:
        receipts = [producer.send(b"%d" % number, shard=number % shards) for number in range(60)]
    return {(r.shard.stream, r.shard.id, r.sequence) for r in receipts}


def consume(url: str, client: Mapping[str, Scalar | EnvironmentVariable]) -> set[Place]:
    with create_consumer(url, client=client, live=False) as consumer:
        return {(m.shard.stream, m.shard.id, m.sequence) for m in consumer}


def read_by_position(url: str, client: Mapping[str, Scalar | EnvironmentVariable]) -> set[Place]:
    found = set()
    with StreamSource(StreamUrl.parse(url), client=client).open() as source:
        gaps = {shard: (extent.start, extent.end) for shard, extent in source.extents().items()}
        plan = source.plan({s: Range(*gap) for s, gap in gaps.items()}, limits=Limits(), parallelism=2)
        assert plan is not None
        for split in plan.splits:
            for batch in split.read():
                rows = batch.to_pydict()
                found |= set(zip(rows["stream"], rows["shard"], rows["sequence"]))
        source.commit("g", {shard: end for shard, (_, end) in gaps.items()})
        committed = source.committed("g")
    assert committed == {shard: end for shard, (_, end) in gaps.items()}
    return found


def claim_everything(url: str, client: Mapping[str, Scalar | EnvironmentVariable]) -> set[Place]:
    found = set()
    with StreamSource(StreamUrl.parse(url), ConsumerMode.LOAD_BALANCED, client).claims("members") as claims:
        claims.prepare(AutoStreamReset.EARLIEST)
        held = ClaimedEntries(ClaimName("main", 1, BID), 1000, 1_000_000)
        for shard in claims.shards:
            claims.claim_new(held, shard, 1000)
        assert sum(backlog.pending for backlog in claims.backlog().values()) == held.count
        for split in claims.plan(held, parallelism=2).splits:
            for batch in split.read():
                rows = batch.to_pydict()
                found |= set(zip(rows["stream"], rows["shard"], rows["sequence"]))
        claims.touch(held.name, list(held.ids))
        claims.acknowledge(held.ids)
        assert all(claims.remove_name(shard, held.name) for shard in held.ids)
        assert claims.is_drained()
    return found


def assert_everything_works(url: str, client: Mapping[str, Scalar | EnvironmentVariable]) -> None:
    sent = produce(url, client)
    assert len(sent) == 60
    assert consume(url, client) == sent
    assert read_by_position(url, client) == sent
    assert claim_everything(url, client) == sent


def test_username_and_password_come_from_the_environment_and_are_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_server(tmp_path, "--requirepass", "root-pw") as address:
        host, _, port = address.partition(":")
        with redis.Redis(host, int(port), password="root-pw") as admin:
            admin.execute_command("ACL SETUSER ingest on >hunter2 ~orders* +@all")
        url = f"redis://{address}/orders"
        monkeypatch.setenv("REDIS_PASSWORD", "hunter2")
        client = {"username": "ingest", "password": EnvironmentVariable("REDIS_PASSWORD")}
        assert_everything_works(url, client)
        with pytest.raises(AccessDeniedError) as refused:
            produce(url, {"username": "ingest", "password": "wrong-one"})
        assert "wrong-one" not in str(refused.value)
        with pytest.raises(AccessDeniedError, match="clicks"):
            produce(f"redis://{address}/clicks", client)


def test_tls(tmp_path: Path) -> None:
    with tls_server(tmp_path) as (address, authority):
        assert_everything_works(f"rediss://{address}/orders", {"ssl_ca_certs": str(authority)})
        with pytest.raises(BrokerUnavailableError):
            consume(f"rediss://{address}/orders", {})
        with pytest.raises(BrokerUnavailableError):
            consume(f"redis://{address}/orders", {})


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--cluster-enabled", "yes", "--tls-cluster", "yes"), marks=pytest.mark.slow)]
)
def test_a_certificate_for_another_host_is_refused_unless_the_user_says_so(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    with tls_server(tmp_path, *options, names=["other.example"]) as (address, authority):
        url, client = f"rediss://{address}/orders", {"ssl_ca_certs": str(authority), "cluster": bool(options)}
        if options:
            host, _, port = address.partition(":")
            with redis.Redis(host, int(port), ssl=True, ssl_cert_reqs="none", ssl_check_hostname=False) as admin:
                admin.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
                until(lambda: admin.execute_command("CLUSTER INFO")["cluster_state"] == "ok", seconds=30, what="ok")
        with pytest.raises(BrokerUnavailableError):
            produce(url, client)
        for trusting in ({"ssl_check_hostname": "false"}, {"ssl_cert_reqs": "none"}):
            assert len(produce(url, {**client, **trusting})) == 60


@pytest.mark.parametrize("options", [{}, {"sentinel_service": SERVICE}])
def test_the_client_is_told_to_check_the_host_name(options: dict[str, str]) -> None:
    """Before redis-py 6, it checks no host name unless it is asked to."""
    url = StreamUrl.parse("rediss://127.0.0.1:1/orders")
    made = new_client(url, options, reply_seconds=1.0, is_cluster=False)
    assert made.connection_pool.connection_kwargs["ssl_check_hostname"] is True


@pytest.mark.parametrize("fails_over", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sentinels_name_the_master_and_another_one_after_a_failover(tmp_path: Path, fails_over: bool) -> None:
    with watched_server(tmp_path, password="sentinel-pw") as watched:
        url = f"redis://{watched.sentinels}/orders"
        client = {"sentinel_service": SERVICE, "sentinel_password": "sentinel-pw", "socket_timeout": 5}
        assert watched.master() == watched.servers[0]
        assert_everything_works(url, client)
        if fails_over:
            with (
                create_consumer(url, client=client) as consumer,
                create_producer(url, client=client, shards=3) as producer,
            ):
                before = {message.payload for message in (consumer.next(10) for _ in range(60)) if message}
                assert len(before) == 60
                watched.fail_over()
                # What is under way is an outage, which runs try again.
                until(lambda: sends(producer), seconds=60, what="the producer found the master")
                assert until(lambda: reads(consumer), seconds=60, what="the consumer found the master") == b"after"
            host, _, port = watched.servers[1].partition(":")
            with redis.Redis(host, int(port)) as promoted:
                assert sum(promoted.xlen(f"orders:{number}") for number in range(3)) >= 61
            return
        with pytest.raises(AccessDeniedError):
            produce(url, {**client, "sentinel_password": "wrong-one"})
        with pytest.raises(BrokerUnavailableError) as unknown:
            produce(url, {**client, "sentinel_service": "another"})
        assert "no Sentinel reports a master" in str(unknown.value), "not the client's list of Sentinels and options"


def sends(producer: Producer) -> bool:
    try:
        producer.send(b"after")
        producer.flush()
    except (BrokerUnavailableError, BrokerError):
        return False
    return True


def reads(consumer: Consumer) -> bytes | None:
    try:
        message = consumer.next(0.1)
    except (BrokerUnavailableError, BrokerError):
        return None
    return message and message.payload


@pytest.mark.parametrize(
    "client",
    [
        {"sentinel_service": SERVICE, "cluster": True},
        {"sentinel_password": "alone"},
        {"sentinel_service": SERVICE, "no_such_option": "x"},
    ],
)
def test_options_of_sentinels_that_cannot_be(client: dict[str, Scalar]) -> None:
    with pytest.raises(InvalidOptionError):
        create_consumer("redis://127.0.0.1:1,127.0.0.1:2/orders", client=client)


def test_a_cluster_with_a_key_a_shard(nodes: list[str]) -> None:
    assert_everything_works(f"redis://{','.join(nodes)}/payments", {"cluster": True})


def test_several_servers_that_are_no_cluster_are_refused() -> None:
    with pytest.raises(InvalidUrlError):
        create_consumer("redis://one:6379,other:6379/orders")


@pytest.mark.parametrize(
    "client", [{"ssl": True}, {"decode_responses": True}, {"min_idle_seconds": "soon"}, {"max_deliveries": 1}]
)
def test_options_that_make_no_sense_are_refused_at_once(client: Mapping[str, Scalar]) -> None:
    with pytest.raises(InvalidOptionError):
        StreamSource(StreamUrl.parse("redis://server/orders"), ConsumerMode.LOAD_BALANCED, client)


@pytest.mark.parametrize(
    "own",
    [{}, {"username": "mallory"}, {"protocol": 3}, {"cluster": True}, {"sentinel_service": SERVICE}],
    ids=["password", "user", "protocol", "cluster", "sentinel"],
)
@pytest.mark.parametrize("command", ["HELLO", "AUTH"])
def test_no_error_repeats_a_password(command: str, own: Mapping[str, Scalar], tmp_path: Path) -> None:
    password = f"hunter2 {'x' * 200}"
    client = {"password": password, **own}
    if "sentinel_service" in own:
        client["sentinel_password"] = password
    # Of a command that it does not know the server repeats the words, up to 128 characters.
    with redis_server(tmp_path, "--rename-command", command, "") as address:
        said = [_failure(url, client) for url in (f"redis://{address}/orders", "redis://127.0.0.1:1/orders")]
    assert said[1]
    assert "hunter2" not in "".join(said)


def _failure(url: str, client: Mapping[str, Scalar]) -> str:
    try:
        RedisConnection(url, client).check()
    except StreamAssetsError as error:
        return kept(error)
    # A client of another release may not send this command.
    return ""


def test_a_cluster_that_is_not_there_is_told(tmp_path: Path) -> None:
    with redis_server(tmp_path) as address, pytest.raises(BrokerUnavailableError):
        create_consumer(f"redis://{address}/orders", client={"cluster": True})


def test_an_option_that_the_client_does_not_have_is_named() -> None:
    with pytest.raises(InvalidOptionError, match=r"rejects its options: .*'sockettimeout'"):
        create_consumer("redis://server/orders", client={"sockettimeout": 1})
