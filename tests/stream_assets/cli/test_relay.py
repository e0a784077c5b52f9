"""``stream-assets relay`` in real pipes: whatever goes in comes out, and what did not is told."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner, Result

from stream_assets.cli import stream_commands as cli_relay
from stream_assets.cli.main import main
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import BrokerError, SizeLimitError
from stream_consumers.memory import MemoryProducer, forget_memory_broker
from stream_consumers.messages import Message, Shard
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.redis_server import redis_server
from tests.support.settings import ROOT
from tests.support.ss_files import flip, items, numbered, payload_offset, write_file
from tests.support.stdio_pipes import read_all

RELAY = f"{shlex.quote(sys.executable)} -m stream_assets.cli.main relay"
LINES = b'[orders] {"id": 1}\n["an", "array"]\n\n[orders | 7] \xff\xfe\n[2022-01-02T03:04:05.6 | orders | 9] six\nlast'
PAYLOADS = [b'{"id": 1}', b'["an", "array"]', b"", b"\xff\xfe", b"six", b"last"]
EVERYTHING = [bytes((n,)) for n in range(256)] + [b"", b"two\nlines", b" around ", b"[k] x", b"\r\n", b"x" * 100_000]


def shell(script: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = ["/bin/bash", "-c", f"set -o pipefail; {script}"]
    return subprocess.run(command, input=given, capture_output=True, check=False, cwd=ROOT, timeout=100)


def run(*words: str, given: bytes = b"") -> Result:
    return CliRunner().invoke(main, ["relay", *words], input=given)


@pytest.fixture
def memory() -> Iterator[str]:
    url = "memory://relay/"
    yield url
    forget_memory_broker(StreamUrl.parse(url))


@pytest.fixture(scope="module")
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of these tests alone: their streams have names that others use, too."""
    with redis_server(tmp_path_factory.mktemp("redis")) as address:
        yield address


@pytest.fixture
def server(own_redis: str) -> Iterator[str]:
    yield f"redis://{own_redis}/"
    host, _, port = own_redis.partition(":")
    with redis.Redis(host, int(port)) as client:
        client.flushdb()


@contextmanager
def relaying(source: str, target: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "stream_assets.cli.main", "relay", source, target, *more]
    pipe = subprocess.PIPE
    # A process whose parent ignores interrupts, as those in the background of a shell do, would ignore them, too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT)
    finally:
        signal.signal(signal.SIGINT, before)
    with started as process:
        try:
            yield process
        finally:
            process.kill()


def messages(url: str) -> list[Message]:
    with create_consumer(url, live=False) as consumer:
        return list(consumer)


def test_a_pipe_into_redis_and_back(server: str) -> None:
    sent = shell(f"{RELAY} stdio:///orders {server}orders", LINES)
    assert (sent.returncode, sent.stdout) == (0, b"")
    assert [m.payload for m in messages(f"{server}orders")] == PAYLOADS
    back = shell(f"{RELAY} {server}orders stdio:///orders")
    assert back.returncode == 0
    back.stdout.decode()
    assert read_all(back.stdout) == [("orders", 0, n, payload) for n, payload in enumerate(PAYLOADS)]


@pytest.mark.slow
def test_a_producer_that_fails_is_told_and_what_it_said_has_arrived(server: str) -> None:
    done = shell(f"(printf 'one\\ntwo\\n'; exit 3) | {RELAY} stdio:///orders {server}orders")
    assert done.returncode == 3
    assert [m.payload for m in messages(f"{server}orders")] == [b"one", b"two"]


@pytest.mark.slow
def test_any_bytes_go_through_pipes_into_a_file(tmp_path: Path) -> None:
    first, second = f"file://{tmp_path}/a.ss/orders,clicks", f"file://{tmp_path}/b.ss/orders,clicks"
    with create_producer(first) as producer:
        for n, payload in enumerate(EVERYTHING):
            stream = ("orders", "clicks")[n % 2]
            producer.send(payload, stream=stream, shard=n % 3, timestamp_ms=1_700_000_000_000 + n)
    pipes = "stdio:///orders,clicks"
    done = shell(f"{RELAY} {first} {pipes} | {RELAY} {pipes} {pipes} | {RELAY} {pipes} {second}")
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    assert messages(second) == messages(first)
    assert len(messages(second)) == len(EVERYTHING)


def test_lines_for_other_tools(tmp_path: Path, memory: str) -> None:
    with create_producer(f"file://{tmp_path}/a.ss/orders") as producer:
        for n in range(3):
            producer.send(b'{"id": %d}' % n)
    done = run(f"file://{tmp_path}/a.ss/orders", "stdio:///orders", "--bare")
    assert done.exit_code == 0
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"id": n} for n in range(3)]
    assert "orders/0: sent up to sequence 2" in done.stderr
    with create_producer(f"{memory}orders") as producer:
        for payload in (b"{}", b"{\n}", b"[]"):
            producer.send(payload)
    refused = run(f"{memory}orders", "stdio:///orders", "--bare")
    assert refused.exit_code == 1
    assert "a message to orders/0 contains a newline" in refused.stderr
    assert "read, but may not have arrived: 2 of orders/0, sequences 0 to 1" in refused.stderr


@pytest.mark.slow
def test_messages_arrive_while_the_pipe_is_open(server: str) -> None:
    with relaying("stdio:///orders", f"{server}orders") as process:
        assert process.stdin
        for count in (1, 2):
            process.stdin.write(b"line\n")
            process.stdin.flush()
            until(lambda n=count: len(messages(f"{server}orders")) == n, what="a message that waits for no other")  # type: ignore[misc]
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    with create_producer(f"file://{tmp_path}/a.ss/orders") as producer:
        for n in range(20_000):
            producer.send(b"%d" % n)
    done = shell(f"({RELAY} file://{tmp_path}/a.ss/orders stdio:///orders --bare; echo code $? >&2) | head -n 2")
    assert done.stdout == b"0\n1\n"
    assert b"code 0" in done.stderr
    assert b"rror" not in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_following_ends_with_an_interrupt(tmp_path: Path) -> None:
    source = f"file://{tmp_path}/a.ss/orders"
    with create_producer(source) as producer, relaying(source, "stdio:///orders", "--live") as process:
        assert process.stdout
        assert process.stderr
        for payload in (b"one", b"two"):
            producer.send(payload)
            producer.flush()
            assert process.stdout.readline().endswith(b"] " + payload + b"\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        told = process.stderr.read()
        assert b"2 messages arrived" in told
        assert b"not known" not in told
        assert b"Traceback" not in told


def test_what_was_read_and_not_sent_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stream_consumers.file.producer import FileProducer

    send = FileProducer.send

    def full(self: FileProducer, payload: bytes, **options: object) -> object:
        if payload == b"4":
            raise SizeLimitError("the file is full", remedy="Make room.")
        return send(self, payload, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(FileProducer, "send", full)
    lines = b"".join(b"[orders | %d] %d\n" % (n + 100, n) for n in range(10))
    failed = run("stdio:///orders", f"file://{tmp_path}/a.ss/orders", given=lines)
    assert failed.exit_code == 1
    assert failed.stdout == ""
    assert "0 messages arrived" in failed.stderr
    assert "read, but may not have arrived: 5 of orders/0, sequences 100 to 104" in failed.stderr
    assert "read from stdin, but not sent: " in failed.stderr
    assert "error: the file is full. Make room." in failed.stderr


def test_what_arrived_is_not_told_as_lost(monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    flush, flushes = MemoryProducer.flush, iter([False, True])

    def failing(self: MemoryProducer) -> None:
        if next(flushes, False):
            raise BrokerError("the broker is gone", remedy="Try again.")
        flush(self)

    monkeypatch.setattr(MemoryProducer, "flush", failing)
    monkeypatch.setattr(cli_relay, "FLUSH_MESSAGES", 3)
    failed = run("stdio:///orders", f"{memory}orders", given=b"[orders] x\n" * 5)
    assert failed.exit_code == 1
    assert "3 messages arrived" in failed.stderr
    assert "read, but may not have arrived: 2 of orders/0, sequences 3 to 4" in failed.stderr


def test_dead_letters_of_a_file_end_it_with_an_error(tmp_path: Path, memory: str) -> None:
    path = tmp_path / "a.ss"
    source = f"file://{path}/orders"
    write_file(path, numbered(20), interval=1024 * 1024)
    for index, offset in ((9, 0), (14, -3)):
        flip(path, payload_offset(items(path)[index]) + offset)
    failed = run(source, f"{memory}orders")
    assert failed.exit_code == 1
    assert [m.sequence for m in messages(f"{memory}orders")] == list(range(13))
    for offset in (items(path)[9].offset, items(path)[-1].end):
        assert f" in orders/0 at offset {offset}: " in failed.stderr
    assert "2 dead letters" in failed.stderr
    peeked = CliRunner().invoke(main, ["peek", source])
    assert len(peeked.stdout.splitlines()) == 13
    assert f"at offset {items(path)[-1].end}" in peeked.stderr


def test_an_unfinished_message_of_a_file_is_told(tmp_path: Path, memory: str) -> None:
    path = write_file(tmp_path / "a.ss", numbered(5))
    path.write_bytes(path.read_bytes()[:-5])
    done = run(f"file://{path}/orders", f"{memory}orders")
    assert done.exit_code == 0
    assert f"the last {path.stat().st_size - items(path)[-1].end} bytes" in done.stderr
    assert len(messages(f"{memory}orders")) == 4


def test_streams_keep_their_names_or_one_gets_another(memory: str) -> None:
    lines = b"[orders] 1\n[clicks] 2\nall\n[2022-01-02T03:04:05 | else | 1] 3\n"
    done = run("stdio:///orders,clicks", f"{memory}clicks,orders", given=lines)
    assert done.exit_code == 0
    assert "not sent: 1 line of other streams" in done.stderr
    assert [(m.shard.stream, m.payload) for m in messages(f"{memory}orders,clicks")] == [
        ("clicks", b"2"),
        ("orders", b"1"),
        ("clicks", b"all"),
    ]
    assert run("stdio:///orders", f"{memory}sales", given=lines).exit_code == 0
    assert [m.payload for m in messages(f"{memory}sales")] == [b"1", b"[clicks] 2", b"all"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("stdio:///a,b", "memory://m/a"), "has no stream for b"),
        (("stdio:///a", "memory://m/b,c"), "has no stream for a"),
        (("memory://m/a,b", "memory://m/b,a"), "would be sent to itself"),
        (("file://a.ss/a", "file://./a.ss/a"), "would be sent to itself"),
        (("memory://m/a", "ftp://x/a"), "no backend has the URL scheme 'ftp'"),
        (("memory://m/a", "memory://n/a", "--bare"), "--bare is for stdio"),
        (("memory://m/a", "memory://n/a", "--shards", "2"), "--shards is for Kafka and Redis"),
        (("stdio:///a", "memory://m/a", "--source-client", "a=b"), "no client to configure"),
        (("stdio://host/a", "memory://m/a"), "a pipe has no host"),
    ],
)
def test_what_cannot_be_relayed(words: tuple[str, ...], text: str) -> None:
    failed = run(*words, given=b"x\n")
    assert failed.exit_code == 1
    assert text in failed.stderr
    assert "Traceback" not in failed.output


def test_what_a_message_has_besides_its_payload_goes_where_it_can(server: str, memory: str) -> None:
    with create_producer(f"{server}orders") as producer:
        producer.send(b"x", headers=[("a", b"1")])  # type: ignore[call-arg]
        producer.send(b"y")
    assert run(f"{server}orders", f"{server}copy").exit_code == 0
    assert [(m.payload, m.headers) for m in messages(f"{server}copy")] == [(b"x", (("a", b"1"),)), (b"y", ())]
    lost = run(f"{server}orders", f"{memory}orders")
    assert lost.exit_code == 0
    assert "the target cannot keep the key, headers or null payload of 1 message" in lost.stderr


def test_an_empty_key_is_sent_as_one_and_not_as_none(monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    sent: list[dict[str, object]] = []
    monkeypatch.setattr(cli_relay, "representable", lambda producer, message: message)
    monkeypatch.setattr(MemoryProducer, "send", lambda producer, payload, **more: sent.append(more))
    with create_producer(f"{memory}orders") as producer:
        for key in (b"", None):
            cli_relay.send_message(producer, Message(Shard("orders"), 0, 1, b"x", key=key))
    assert [more.get("key") for more in sent] == [b"", None]
