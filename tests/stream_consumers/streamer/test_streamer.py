"""SeaStreamer's way in: connect, make consumers and producers, disconnect; its file tests that need it."""

from __future__ import annotations

import io
import itertools
import os
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stream_consumers.errors import (
    BrokerUnavailableError,
    InvalidOptionError,
    InvalidStreamKeyError,
    InvalidUrlError,
    OutOfBoundsError,
    ProducerEndedError,
    StreamEndedError,
    StreamExistsError,
    StreamNotFoundError,
)
from stream_consumers.messages import from_milliseconds
from stream_consumers.options import (
    AutoCommit,
    AutoStreamReset,
    ConsumerMode,
    FileCreation,
    FileProducerOptions,
    RedisGroupOptions,
)
from stream_consumers.stdio.backend import StdioProducerOptions
from stream_consumers.streamer import PseudoRandom, RoundRobin, Streamer, connect, rewind_after, seek_after
from stream_consumers.urls import StreamUrl
from tests.support.redis_streams import unique_name
from tests.support.ss_files import END_OF_STREAM, items, sent
from tests.support.streams import take

PATIENCE = 60.0
LATEST = AutoStreamReset.LATEST
KIB_EOS = FileProducerOptions(beacon_interval=1024, end_with_eos=True)
_numbers = itertools.count()


@pytest.fixture
def place(path: Path) -> str:
    """The file without streams."""
    return f"file://{path}/"


@pytest.fixture
def memory() -> str:
    return f"memory://streamer-{next(_numbers)}/"


# Upstream's file tests


def test_a_file_that_is_missing(place: str, path: Path) -> None:
    """F-streamer."""
    with pytest.raises(StreamNotFoundError):
        connect(place)
    with pytest.raises(StreamNotFoundError):
        connect(place, producer_options=FileProducerOptions(creation=FileCreation.NEVER))
    assert not path.exists()
    new = FileProducerOptions(creation=FileCreation.ALWAYS_NEW, end_with_eos=True)
    connect(place, producer_options=new).disconnect()
    assert items(path) == []
    with pytest.raises(StreamExistsError):
        connect(place, producer_options=new)
    path.unlink()
    with connect(place, producer_options=new) as streamer:
        assert streamer.create_producer("hello").send(b"x").sequence == 1
    connect(place).disconnect()


def test_two_producers_write_in_the_order_of_send(place: str, path: Path) -> None:
    """F-producer."""
    with connect(place, producer_options=KIB_EOS) as streamer:
        first, consumer = streamer.create_producer("hello"), streamer.create_consumer("hello")
        assert [first.send(b"x").sequence for _ in range(24)] == list(range(1, 25))
        second = streamer.create_producer("hello")
        sequences = [(first, second)[number % 2].send(b"x").sequence for number in range(50)]
        assert sequences == list(range(25, 75))
        first.close()
        with pytest.raises(ProducerEndedError):
            first.send(b"x")
        assert [second.send(b"x").sequence for _ in range(50)] == list(range(75, 125))
        second.flush()
        assert take(consumer, 124) == list(range(1, 125))
        streamer.disconnect()
        with pytest.raises(ProducerEndedError):
            second.send(b"x")
        with pytest.raises(StreamEndedError):
            consumer.next()
    assert sent(items(path))[-1].payload == END_OF_STREAM.payload
    with connect(place, producer_options=KIB_EOS) as streamer:
        again = streamer.create_producer("hello")
        assert [again.send(b"x").sequence for _ in range(25)] == list(range(125, 150))
        again.end()
        consumer = streamer.create_consumer("hello")
        assert [message.sequence for message in consumer] == list(range(1, 150))


@pytest.fixture(params=["memory", "file", "redis"])
def sharded(request: pytest.FixtureRequest, memory: str, place: str) -> str:
    """A place whose shards need no preparation."""
    if request.param == "redis":
        return f"redis://{request.getfixturevalue('redis_address')}/"
    return memory if request.param == "memory" else place


def test_a_sharder_spreads_the_messages(sharded: str) -> None:
    """R-sharding, with a sharder."""
    name = unique_name()
    options = FileProducerOptions() if sharded.startswith("file") else None
    with connect(sharded, producer_options=options) as streamer:
        with streamer.create_producer(name, sharder=RoundRobin(3)) as producer:
            receipts = [producer.send(b"%d" % number) for number in range(10)]
            assert [receipt.shard.id for receipt in receipts] == [number % 3 for number in range(10)]
            assert producer.send(b"10", shard=2).shard.id == 2
        with streamer.create_consumer(name, live=False) as consumer:
            assert sorted(int(message.text()) for message in consumer) == list(range(11))


# connecting


@pytest.mark.parametrize("protocol", ["redis", "kafka"])
def test_a_broker_that_is_not_there_is_told_at_once(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_consumers.kafka.cluster.REQUEST_SECONDS", 1.0)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody else can have the port, and nobody listens on it
        with pytest.raises(BrokerUnavailableError):
            connect(f"{protocol}://127.0.0.1:{held.getsockname()[1]}/")


def test_what_cannot_be_connected_to(memory: str) -> None:
    for url in ("carrier-pigeon://roof/", "memory://shop"):
        with pytest.raises(InvalidUrlError):
            connect(url)
    for options in (
        {"client": {"username": "me"}},
        {"producer_options": FileProducerOptions()},
        {"producer_options": StdioProducerOptions()},
    ):
        with pytest.raises(InvalidOptionError):
            connect(memory, **options)  # type: ignore[arg-type]


def test_the_streams_of_the_url_are_the_default(memory: str) -> None:
    with connect(f"{memory}orders") as streamer:
        assert streamer.create_producer().send(b"x").shard.stream == "orders"
        assert take(streamer.create_consumer(), 1) == [0]
    with connect(f"{memory}orders,clicks") as streamer:
        assert streamer.create_producer().stream is None
    with connect(memory) as streamer, pytest.raises(InvalidUrlError):
        streamer.create_consumer()


def test_modes_and_groups_reach_the_backend(redis_address: str, memory: str) -> None:
    name = unique_name()
    with connect(f"redis://{redis_address}/{name}") as streamer:
        with streamer.create_producer() as producer:
            producer.send(b"x")
        options = RedisGroupOptions(auto_commit=AutoCommit.DISABLED, consumer="me")
        member = streamer.create_consumer(mode=ConsumerMode.RESUMABLE, group="g", group_options=options)
        assert len(take(member, 1)) == 1
        assert repr(member).endswith("mode='resumable', group='g', consumer='me')")
    with connect(f"{memory}orders") as streamer:
        chip, dale = (streamer.create_consumer(mode=ConsumerMode.LOAD_BALANCED, group="g") for _ in range(2))
        producer = streamer.create_producer()
        for _ in range(4):
            producer.send(b"x")
        assert (take(chip, 2), take(dale, 2)) == ([0, 2], [1, 3])


def test_consumers_are_moved_behind_a_sequence_or_a_moment(memory: str) -> None:
    with connect(f"{memory}orders") as streamer:
        with streamer.create_producer() as producer:
            for number in range(5):
                producer.send(b"%d" % number, timestamp_ms=1_000 + number)
        consumer = streamer.create_consumer()
        rewind_after(consumer, 2)
        assert take(consumer, 2) == [3, 4]
        seek_after(consumer, from_milliseconds(1_001))
        assert take(consumer, 3) == [2, 3, 4]
        with pytest.raises(OutOfBoundsError):
            rewind_after(consumer, 4)
        with pytest.raises(OutOfBoundsError):
            seek_after(consumer, from_milliseconds(1_004))


# disconnecting


def test_disconnecting_flushes_ends_and_closes_everything(place: str, path: Path) -> None:
    streamer = connect(f"{place}orders", producer_options=FileProducerOptions())
    producer, consumer = streamer.create_producer(), streamer.create_consumer()
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            consumer.next()
        except StreamEndedError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    streamer.create_producer("clicks").send(b"y")
    streamer.disconnect()
    streamer.disconnect()
    waiting.join(PATIENCE)
    assert len(caught) == 1
    with pytest.raises(ProducerEndedError):
        producer.send(b"x")
    for create in (streamer.create_producer, streamer.create_consumer):
        with pytest.raises((ProducerEndedError, StreamEndedError)):
            create()
    assert [message.payload for message in sent(items(path))] == [b"y"]
    # The file is free again.
    with connect(f"{place}orders") as other:
        other.create_producer()


def test_disconnecting_ends_a_file_whose_producers_are_closed(place: str, path: Path) -> None:
    with connect(place, producer_options=KIB_EOS) as streamer:
        for number in range(2):
            with streamer.create_producer("orders") as producer:
                producer.send(b"%d" % number)
            assert [message.payload for message in sent(items(path))] == [b"%d" % n for n in range(number + 1)]
        # One that sends nothing; those that were closed are forgotten.
        streamer.create_producer()
    assert [message.payload for message in sent(items(path))] == [b"0", b"1", END_OF_STREAM.payload]


def test_disconnecting_sends_what_producers_hold_that_nobody_closed(redis_address: str) -> None:
    name = unique_name()
    with connect(f"redis://{redis_address}/{name}") as streamer:
        streamer.create_producer().send(b"forgotten")
        with streamer.create_producer() as closed:
            closed.send(b"closed")
        producer = streamer.create_producer()
        producer.send(b"held")
    with pytest.raises(ProducerEndedError):
        producer.send(b"x")
    with connect(f"redis://{redis_address}/{name}") as streamer:
        found = {message.text() for message in streamer.create_consumer(live=False)}
    assert found == {"forgotten", "closed", "held"}


def test_lines_are_looped_back_after_connecting_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's loopback test of stdio."""
    reading, writing = os.pipe()
    with open(reading) as stdin, open(writing, "w") as _, io.TextIOWrapper(io.BytesIO()) as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        with connect("stdio:///") as streamer:
            consumer, producer = streamer.create_consumer("hello"), streamer.create_producer("hello")
            for _ in range(5):
                producer.send(b"-1")
        with pytest.raises(StreamEndedError):
            consumer.next()
        with pytest.raises(ProducerEndedError):
            producer.send(b"")
        with connect("stdio:///hello", producer_options=StdioProducerOptions(loopback=True)) as streamer:
            producer, consumer = streamer.create_producer(), streamer.create_consumer()
            for number in range(5):
                producer.send(b"%d" % number)
            found = [consumer.next(PATIENCE) for _ in range(5)]
            assert [message.text() for message in found if message] == ["0", "1", "2", "3", "4"]
            assert consumer.next(0) is None
        assert stdout.buffer.getvalue().count(b"| hello |") == 10  # type: ignore[attr-defined]


# producers and sharders


def test_an_anchor_is_set_once(memory: str) -> None:
    with connect(memory) as streamer:
        producer = streamer.create_producer()
        with pytest.raises(InvalidOptionError):
            producer.send(b"x")
        assert producer.send(b"x", stream="clicks").shard.stream == "clicks"
        with pytest.raises(InvalidStreamKeyError):
            producer.anchor("or ders")
        producer.anchor("orders")
        assert producer.send(b"x").shard.stream == "orders"
        with pytest.raises(InvalidOptionError):
            producer.anchor("clicks")


def test_sharders_use_every_shard() -> None:
    for sharder in (RoundRobin(4), PseudoRandom(4), PseudoRandom(4, seed=1)):
        counts = Counter(sharder.choose("orders", b"") for _ in range(4000))
        assert set(counts) == {0, 1, 2, 3}
        assert min(counts.values()) > 800
    same = [
        [sharder.choose("", b"") for _ in range(50)] for sharder in (PseudoRandom(9, seed=5), PseudoRandom(9, seed=5))
    ]
    assert same[0] == same[1]


def test_settings_of_its_consumers_are_no_producer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Kafka producer refuses them; a streamer has one configuration for both."""
    given: list[object] = []
    monkeypatch.setattr("stream_consumers.streamer.create_producer", lambda url, **options: given.append(options))
    client = {"session.timeout.ms": 6000, "linger.ms": 5}
    Streamer(StreamUrl.parse("kafka://nobody:1/pets"), client=client).create_producer()
    assert given == [{"client": {"linger.ms": 5}, "producer_options": None, "shards": None}]


def test_what_cannot_be_sent_is_refused_before_a_shard_is_chosen() -> None:
    with connect("memory://refused/") as streamer:
        producer = streamer.create_producer("orders", sharder=RoundRobin(2))
        for words in ({"payload": None}, {"payload": "text"}, {"stream": ""}, {"stream": "*"}, {"shard": "1"}):
            given: dict[str, Any] = {"payload": b"{}", **words}
            with pytest.raises((InvalidOptionError, InvalidStreamKeyError)):
                producer.send(**given)
        assert [producer.send(b"{}").shard.id for _ in range(3)] == [0, 1, 0]
        with pytest.raises(InvalidStreamKeyError):
            streamer.create_producer("*")
