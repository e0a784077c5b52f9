"""Streams of any key that Redis allows: written, read, shared, claimed and planned, under a name of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.batches.bounds import Bound
from stream_consumers.batches import Range
from stream_consumers.create import create_consumer, create_producer, open_batch_source
from stream_consumers.errors import InvalidStreamKeyError
from stream_consumers.messages import MAX_SHARD, Message, Shard, check_encoded_key, decode_key, encode_key
from stream_consumers.options import AutoCommit, ConsumerMode, Limits, RedisGroupOptions
from stream_consumers.redis.entries import to_sequence
from stream_consumers.redis.entry_consumer import create_entry_consumer
from stream_consumers.streamer import connect
from stream_consumers.testing.batch_source_contract import read
from stream_consumers.urls import StreamUrl
from tests.support.command_line import run
from tests.support.redis_server import redis_server

KEYS = {
    b"user:events": "user:events",
    b"user:42": "user%3A42",
    b"a:b:c:007": "a:b:c:007",
    b"{shop}:orders": "{shop}:orders",
    b"tenants/7": "tenants%2F7",
    b"a,b": "a%2Cb",
    b"100%": "100%25",
    b"%41": "%2541",
    b"with space\n": "with%20space%0A",
    b"*": "%2A",
    b"SEA_STREAMER_WILDCARD": "%53EA_STREAMER_WILDCARD",
    "événements".encode(): "événements",
    b"\xff\x00:\xfe": "%FF%00:%FE",
    b"it's [a] \\ pattern?*": "it%27s%20[a]%20%5C%20pattern%3F%2A",
    b":7": ":7",
    b"orders:%d" % MAX_SHARD: "orders%3A9223372036854775807",
    b"orders:%d" % (MAX_SHARD + 1): "orders:9223372036854775808",
    b"\xff": "%FF",
    b"x" * 1000: "x" * 1000,
}
PATIENCE = 60.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("keys")) as found:
        yield found


@pytest.fixture
def client(address: str) -> Iterator[Any]:
    host, _, port = address.partition(":")
    with redis.Redis(host, int(port)) as found:
        found.flushdb()
        yield found


@pytest.fixture(params=list(KEYS), ids=lambda key: KEYS[key][:40])
def key(request: pytest.FixtureRequest) -> bytes:
    found: bytes = request.param
    return found


def payloads(messages: list[Message]) -> list[bytes | None]:
    return [message.payload for message in messages]


# names


def test_each_key_has_one_name_and_comes_back(key: bytes) -> None:
    assert encode_key(key) == KEYS[key]
    assert decode_key(KEYS[key]) == key
    url = StreamUrl.parse(f"redis://localhost/{KEYS[key]},other")
    assert url.streams == (KEYS[key], "other")
    assert StreamUrl.parse(str(url)) == url
    assert Shard.parse(str(Shard(KEYS[key], 3))) == Shard(KEYS[key], 3)


@given(st.binary(max_size=20) | st.text("ab:0123456789%/,*é ", max_size=9).map(str.encode))
def test_any_bytes_come_back(key: bytes) -> None:
    stream = encode_key(key)
    assert decode_key(stream) == key
    assert check_encoded_key(stream) == stream
    assert not set(stream) & set("/,'\"\\ \n")
    assert stream not in ("*", "SEA_STREAMER_WILDCARD")


@given(st.text(max_size=9) | st.text("ab:01%42F/", max_size=9))
def test_any_text_is_the_name_of_one_key_or_refused(text: str) -> None:
    try:
        stream = check_encoded_key(text)
    except InvalidStreamKeyError:
        return
    assert stream == "SEA_STREAMER_WILDCARD" or stream == encode_key(decode_key(text))


@pytest.mark.parametrize(
    ("text", "written"),
    [("user:42", "user%3A42"), ("a b", "%20"), ("user:*", "%2A"), ("50%off", "%25"), ("o\n", "%0A"), ("o?g=g", "%3F")],
)
def test_what_may_be_read_in_two_ways_is_refused(text: str, written: str) -> None:
    with pytest.raises(InvalidStreamKeyError) as refused:
        StreamUrl.parse(f"redis://localhost/{text}")
    assert written in str(refused.value)


# reading and writing


@pytest.mark.parametrize("shards", [1, 3])
def test_a_producer_writes_the_key_and_a_consumer_reads_it(address: str, client: Any, key: bytes, shards: int) -> None:
    url = f"redis://{address}/{KEYS[key]}"
    with create_producer(url, shards=shards) as producer:
        for number in range(6):
            producer.send(b"%d" % number, shard=number % shards)
    keys = [key] if shards == 1 else [b"%s:%d" % (key, number) for number in range(shards)]
    assert set(client.keys()) == set(keys)
    with create_consumer(url, live=False) as consumer:
        found = list(consumer)
    assert sorted(payloads(found)) == [b"%d" % number for number in range(6)]
    assert {message.shard for message in found} == {Shard(KEYS[key], number) for number in range(shards)}


def test_the_wildcard_reads_every_key(address: str, client: Any) -> None:
    for key in KEYS:
        client.xadd(key, {"msg": key})
    client.set("not-a-stream", 1)
    with create_consumer(f"redis://{address}/*", live=False) as consumer:
        found = {message.payload: message.shard for message in consumer}
    # user:42 is shard 42 of user, as where that stream is named.
    expected = {key: Shard(stream) for key, stream in KEYS.items()} | {
        b"user:42": Shard("user", 42),
        b"orders:%d" % MAX_SHARD: Shard("orders", MAX_SHARD),
    }
    assert found == expected


def test_a_name_that_looks_like_a_pattern_is_none(address: str, client: Any) -> None:
    for key in (b"a*:0", b"a*:1", b"ab:0", b"[ab]:0", b"a:0"):
        client.xadd(key, {"msg": key})
    for stream, expected in (("a%2A", [b"a*:0", b"a*:1"]), ("[ab]", [b"[ab]:0"]), ("a", [b"a:0"])):
        with create_consumer(f"redis://{address}/{stream}", live=False) as consumer:
            assert payloads(list(consumer)) == expected


# groups


@pytest.mark.parametrize("mode", [ConsumerMode.RESUMABLE, ConsumerMode.LOAD_BALANCED])
def test_a_group_reads_acknowledges_and_goes_on(address: str, client: Any, key: bytes, mode: ConsumerMode) -> None:
    for number in range(3):
        client.xadd(key, {"msg": str(number)})
    options = RedisGroupOptions(auto_commit=AutoCommit.DISABLED, consumer="me")
    url = f"redis://{address}/{KEYS[key]}"

    def take(count: int) -> list[bytes | None]:
        with create_consumer(url, mode=mode, group="g", group_options=options) as member:
            found = [message for _ in range(count) if (message := member.next(PATIENCE))]
            for message in found[:2]:
                member.ack(message)
            member.commit()
        return payloads(found)

    assert take(3) == [b"0", b"1", b"2"]
    assert client.xpending(key, "g")["pending"] == 1
    assert take(1) == [b"2"]
    assert client.xpending(key, "g")["pending"] == 0


def test_entry_consumers_call_a_stream_by_its_key(address: str, client: Any, key: bytes) -> None:
    client.xadd(key, {"msg": "0"})
    name = key.decode("utf-8", "surrogateescape")
    with create_entry_consumer(f"redis://{address}/{KEYS[key]}", identifiers={name: "0-0"}) as consumer:
        found = consumer.get_entry(PATIENCE)
        assert found is not None
        assert found[0] == name
        assert consumer.positions == {name: found[1].identifier}
    with create_entry_consumer(f"redis://{address}/{KEYS[key]}", group="g", consumer="me") as member:
        found = member.get_entry(PATIENCE)
        assert found is not None
        assert (found[0], member.acknowledge(*found)) == (name, 1)
    with create_entry_consumer(f"redis://{address}/other", timeout_seconds=0) as consumer:
        consumer.add_stream(name, "0-0")
        assert [where for where, _ in consumer] == [name]


def test_a_streamer_and_its_producers(address: str, client: Any) -> None:
    with connect(f"redis://{address}/") as streamer:
        with streamer.create_producer("user:events") as producer:
            producer.send(b"0")
        with streamer.create_producer() as anybody:
            anybody.send(b"1", stream="tenants%2F7")
            with pytest.raises(InvalidStreamKeyError):
                anybody.send(b"2", stream="tenants/8")
            with pytest.raises(InvalidStreamKeyError):
                anybody.send(b"2", stream="user:42")
        found = list(streamer.create_consumer(["user:events", "tenants%2F7"], live=False))
    assert {message.shard.stream for message in found} == {"user:events", "tenants%2F7"}
    assert set(client.keys()) == {b"user:events", b"tenants/7"}


# batches and claims


def test_batches(address: str, client: Any, key: bytes) -> None:
    for shard in range(2):
        for number in range(5):
            client.xadd(b"%s:%d" % (key, shard), {"msg": str(number)})
    with open_batch_source(f"redis://{address}/{KEYS[key]}") as source:
        extents = source.extents()
        assert set(extents) == {Shard(KEYS[key], 0), Shard(KEYS[key], 1)}
        gaps = {shard: Range(extent.start, extent.end) for shard, extent in extents.items()}
        assert set(source.count(gaps).values()) == {5}
        plan = source.plan(gaps, limits=Limits(), parallelism=2)
        assert plan is not None
        assert len(read(plan)) == 10
        assert {stream for stream, _, _ in read(plan)} == {KEYS[key]}
        ends = {shard: extent.end for shard, extent in extents.items()}
        source.commit("g", ends)
        assert source.committed("g") == ends
        assert list(source.identities()) == [KEYS[key]]


@pytest.mark.slow
def test_a_cluster(nodes: list[str]) -> None:
    host, _, port = nodes[0].partition(":")
    client = redis.RedisCluster(host=host, port=int(port))
    options: Any = {"cluster": True}
    for key in KEYS:
        client.xadd(key, {"msg": key})
    url = f"redis://{nodes[0]}/{','.join(KEYS.values())}"
    with create_consumer(url, client=options, live=False) as consumer:
        assert {message.payload: message.shard.stream for message in consumer} == KEYS
    with create_consumer(url, mode=ConsumerMode.RESUMABLE, group="g", client=options, live=False) as member:
        assert {message.payload for message in member} == set(KEYS)
    with create_producer(f"redis://{nodes[0]}/user:events", client=options) as producer:
        producer.send(b"1")
    assert client.xlen("user:events") == 2
    client.close()


# the command line


def test_sequences_are_shown_and_taken_as_entry_ids(address: str, client: Any) -> None:
    url = f"redis://{address}/shown"
    ids = [client.xadd("shown", {"msg": n, "tag": "t"}, id=f"{1_700_000_000_000 + n}-3").decode() for n in range(3)]
    shown = run("lag", url).stdout
    assert ids[0] in shown
    assert "1700000000002-4" in shown, "the end is one behind the last entry"
    peeked = run("peek", url, "--start", ids[1]).stdout.splitlines()
    assert [f"| {entry_id} |" in line for entry_id, line in zip(ids[1:], peeked)] == [True, True]
    assert len(peeked) == 2
    assert "tag=t" in peeked[0]
    numbers = [json.loads(line)["sequence"] for line in run("peek", url, "--json").stdout.splitlines()]
    assert numbers == [to_sequence(entry_id) for entry_id in ids], "machines get numbers"
    assert Bound.parse(f"shown/0={ids[1]}").sequences == {Shard("shown"): numbers[1]}


def test_what_a_target_cannot_keep_is_refused_before_it_is_sent(address: str) -> None:
    url = f"redis://{address}/refused"
    refused = run("produce", url, "--key", "k", text="one\n")
    assert refused.exit_code == 1
    assert "cannot keep the key" in refused.stderr
    assert run("peek", url).stdout == ""
    assert run("produce", url, "--header", "a=b", text="one\n").exit_code == 0
    assert run("peek", url, "--json").stdout.count('"headers": [{"name": "a", "value": "b"}]') == 1


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"shard_id": "x"}', '{"payload": 7}', '{"payload_base64": "?"}', '{"timestamp": 1}', "[" * 99999],
)
def test_a_line_that_is_no_message_is_refused(address: str, line: str) -> None:
    refused = run("produce", f"redis://{address}/lines", "--json-lines", text=f"{line}\n")
    assert refused.exit_code == 1
    assert isinstance(refused.exception, SystemExit)
    assert run("peek", f"redis://{address}/lines").stdout == ""
