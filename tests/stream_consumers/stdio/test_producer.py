"""Producers of lines: what stands in the pipe, under which number, and what happens when nobody reads it."""

from __future__ import annotations

import errno
import io
import os
import threading
from typing import Any

import pytest

from stream_consumers.create import create_producer
from stream_consumers.errors import (
    BrokerError,
    FormatError,
    InvalidOptionError,
    InvalidStreamKeyError,
    InvalidUrlError,
    ProducerEndedError,
    StreamEndedError,
)
from stream_consumers.stdio.backend import StdioConsumer, StdioProducer, StdioProducerOptions
from stream_consumers.stdio.broker import StdioBroker
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.raising import raises_with
from tests.support.stdio_pipes import open_pipe, read_all

ORDERS = StreamUrl.parse("stdio:///orders,clicks")
LOOPBACK = StdioProducerOptions(loopback=True)
MOMENT = 1_641_092_645_000  # 2022-01-02T03:04:05


def test_lines_that_seastreamer_reads() -> None:
    broker = StdioBroker(None, out := io.BytesIO())
    with StdioProducer(ORDERS, broker=broker) as producer:
        receipts = [
            producer.send(b"a", timestamp_ms=MOMENT),
            producer.send(b"b", timestamp_ms=MOMENT + 20),
            producer.send(b"c", timestamp_ms=MOMENT, shard=3),
            producer.send(b"", timestamp_ms=MOMENT, stream="clicks"),
            producer.send(b"d", timestamp_ms=MOMENT, stream="other"),
        ]
        assert out.getvalue() == b""
        producer.flush()
        assert out.getvalue().decode().splitlines() == [
            "[2022-01-02T03:04:05 | orders | 0] a",
            "[2022-01-02T03:04:05.020 | orders | 1] b",
            "[2022-01-02T03:04:05 | orders | 0 | 3] c",
            "[2022-01-02T03:04:05 | clicks | 0]",
            "[2022-01-02T03:04:05 | other | 0] d",
        ]
    assert [str(r.shard) for r in receipts] == ["orders/0", "orders/0", "orders/3", "clicks/0", "other/0"]
    assert [(r.sequence, r.timestamp_ms - MOMENT) for r in receipts[:3]] == [(0, 0), (1, 20), (0, 0)]
    with pytest.raises(ProducerEndedError):
        producer.send(b"late")


def test_all_producers_of_a_process_count_together() -> None:
    broker = StdioBroker(None, out := io.BytesIO())

    def send(producer: StdioProducer) -> None:
        for _ in range(500):
            producer.send(b"x" * 300)

    producers = [StdioProducer(ORDERS, broker=broker) for _ in range(4)]
    threads = [threading.Thread(target=send, args=(producer,)) for producer in producers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    producers[0].close()
    assert [(n, p) for _, _, n, p in read_all(out.getvalue())] == [(n, b"x" * 300) for n in range(2000)]


def test_bare_lines_for_other_tools() -> None:
    broker = StdioBroker(None, out := io.BytesIO())
    with StdioProducer(ORDERS, StdioProducerOptions(bare=True), broker=broker) as producer:
        producer.send(b'{"a": 1}')
        with raises_with(FormatError, sequence=1):
            producer.send(b"{\n}")
        assert producer.send(b"[1]").sequence == 1
    assert out.getvalue() == b'{"a": 1}\n[1]\n'


def test_what_no_line_can_say_is_refused_and_not_counted() -> None:
    broker = StdioBroker(None, out := io.BytesIO())
    with StdioProducer(ORDERS, broker=broker) as producer:
        for words in ({"stream": "a b"}, {"shard": -1}, {"timestamp_ms": 10**18}):
            with pytest.raises((InvalidStreamKeyError, InvalidOptionError)):
                producer.send(b"", **words)  # type: ignore[arg-type]
        assert producer.send(b"x", timestamp_ms=MOMENT).sequence == 0
    assert out.getvalue() == b"[2022-01-02T03:04:05 | orders | 0] x\n"
    with pytest.raises(InvalidUrlError):
        StdioProducer(StreamUrl.parse("stdio://here/orders"))
    with pytest.raises(InvalidOptionError):
        create_producer("memory://m/orders", producer_options=LOOPBACK)


def test_loopback_gives_a_process_its_own_messages() -> None:
    """Upstream's loopback test: off, nothing is echoed; on, 0..4 come back, in order, while stdin is open."""
    with open_pipe() as pipe:
        consumer = StdioConsumer(ORDERS, broker=pipe.broker)
        with StdioProducer(ORDERS, broker=pipe.broker) as silent:
            silent.send(b"unheard")
        with StdioProducer(ORDERS, LOOPBACK, broker=pipe.broker) as producer:
            receipts = [producer.send(b"%d" % i) for i in range(5)]
            found = [consumer.next(20) for _ in range(5)]
            assert [(m.sequence, m.payload) for m in found if m] == [
                (r.sequence, b"%d" % i) for i, r in enumerate(receipts)
            ]
            assert [r.sequence for r in receipts] == [1, 2, 3, 4, 5]
            pipe.write(b"[orders] from outside")
            outside = consumer.next(20)
            assert outside is not None
            assert (outside.sequence, outside.payload) == (6, b"from outside")


def test_a_stream_goes_on_while_somebody_loops_back() -> None:
    with open_pipe() as pipe:
        consumer = StdioConsumer(ORDERS, broker=pipe.broker)
        producer = StdioProducer(ORDERS, LOOPBACK, broker=pipe.broker)
        pipe.write(b"[orders] last of the pipe")
        pipe.end()
        assert consumer.next(20) is not None
        assert consumer.next(timeout_seconds=0.05) is None
        producer.send(b"more")
        producer.close()
        producer.close()
        assert [m.payload for m in consumer] == [b"more"]
        with pytest.raises(StreamEndedError):
            consumer.next()


def test_a_pipe_that_was_closed_is_not_taken_for_the_next_one_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    class LateThread(threading.Thread):
        def run(self) -> None:
            gate.wait(20)
            super().run()

    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as source, monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", LateThread)
        consumer = StdioConsumer(ORDERS, broker=StdioBroker(source, io.BytesIO()))
        assert consumer.next(0) is None
    os.write(writing, b"[orders] ours\n")
    os.close(writing)
    other, others = os.pipe()
    try:
        assert other == reading
        os.write(others, b"[orders] of somebody else\n")
        gate.set()
        assert [message.payload for message in consumer] == [b"ours"]
        assert os.read(other, 100) == b"[orders] of somebody else\n"
    finally:
        os.close(other)
        os.close(others)


def test_a_full_buffer_makes_a_loopback_wait() -> None:
    with open_pipe(buffer_messages=2) as pipe, StdioProducer(ORDERS, LOOPBACK, broker=pipe.broker) as producer:
        producer.send(b"nobody is there")
        consumer = StdioConsumer(ORDERS, broker=pipe.broker)
        sent: list[int] = []
        sender = threading.Thread(target=lambda: sent.extend(producer.send(b"").sequence for _ in range(5)))
        sender.start()
        until(lambda: consumer.waiting == 2)
        assert sent in ([1], [1, 2])
        assert [m.sequence for m in (consumer.next(20) for _ in range(2)) if m] == [1, 2]
        consumer.close()
        sender.join()
        assert sent == [1, 2, 3, 4, 5]


def test_a_pipe_that_nobody_reads_any_more() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as target:
        producer = StdioProducer(ORDERS, broker=StdioBroker(None, target))
        producer.send(b"x")
        with pytest.raises(BrokenPipeError):
            producer.flush()
        # What was lost is lost: leaving does not fail once more.
        producer.close()


def test_a_full_disk_loses_nothing() -> None:
    class Disk(io.BytesIO):
        is_full = True

        def write(self, data: Any, /) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    disk = Disk()
    producer = StdioProducer(ORDERS, broker=StdioBroker(None, disk))
    producer.send(b"x", timestamp_ms=MOMENT)
    with raises_with(BrokerError, bytes=37, undelivered=1):
        producer.flush()
    disk.is_full = False
    producer.close()
    assert disk.getvalue() == b"[2022-01-02T03:04:05 | orders | 0] x\n"
    closed = StdioProducer(ORDERS, broker=StdioBroker(None, None))
    closed.send(b"x" * 100_000)
    for ask in (closed.flush, lambda: closed.send(b"not taken"), closed.close):
        with raises_with(BrokerError, undelivered=1, to="1 to orders/0"):
            ask()


def test_a_slow_reader_gets_whole_lines() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    found: list[bytes] = []

    def read() -> None:
        with os.fdopen(reading, "rb") as source:
            found.extend(source)

    with os.fdopen(writing, "wb") as target:
        producer = StdioProducer(ORDERS, broker=StdioBroker(None, target))
        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(20):
            producer.send(b"x" * 50_000)
        producer.close()
        target.close()
        reader.join()
    assert [p for *_, p in read_all(b"".join(found))] == [b"x" * 50_000] * 20
