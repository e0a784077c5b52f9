"""Consumers of a pipe: who gets which line, under which number, and where it ends."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from datetime import datetime, timezone
from pathlib import Path

import pytest

from stream_consumers.consumer import Edge
from stream_consumers.create import StreamSource, create_consumer, open_batch_source
from stream_consumers.errors import (
    FormatError,
    InvalidOptionError,
    InvalidUrlError,
    NotSubscribedError,
    StreamEndedError,
    StreamNotFoundError,
    StreamRemovedError,
    UnsupportedError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, ConsumerMode
from stream_consumers.stdio.backend import StdioConsumer
from stream_consumers.stdio.broker import StdioBroker, read_lines
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.raising import raises_with
from tests.support.settings import ROOT
from tests.support.stdio_pipes import Pipe, broker_of, open_pipe, read_all
from tests.support.streams import take

ORDERS = StreamUrl.parse("stdio:///orders")
BOTH = StreamUrl.parse("stdio:///orders,clicks")


def member(broker: StdioBroker, group: str = "abc", url: StreamUrl = ORDERS) -> StdioConsumer:
    return StdioConsumer(url, mode=ConsumerMode.LOAD_BALANCED, group=group, broker=broker)


def test_lines_are_messages_of_their_stream() -> None:
    data = b"[2022-01-02T03:04:05.5 | orders | 3 | 4] a\n[clicks] b\n[orders] c\n[else | 9] d\n"
    data += b"[2022-01-02T03:04:05 | else | 9] e\n"
    assert read_all(data, "stdio:///orders,clicks") == [
        ("orders", 4, 3, b"a"),
        ("clicks", 0, 0, b"b"),
        ("orders", 0, 0, b"c"),
        ("broadcast", 0, 0, b"[else | 9] d"),
    ]
    with StdioConsumer(ORDERS, broker=broker_of(data)) as consumer:
        first = consumer.next()
        assert first is not None
        assert first.timestamp.isoformat() == "2022-01-02T03:04:05.500000+00:00"
        before = time.time_ns() // 1_000_000
        text, second = consumer.next(), consumer.next()
        assert text is not None
        assert second is not None
        assert before - 60_000 < second.timestamp_ms <= time.time_ns() // 1_000_000
        # Text in brackets may look like a header, unless that has a time and a sequence.
        assert [text.payload, *(message.payload for message in consumer)] == [b"[clicks] b", b"[else | 9] d"]
        assert consumer.unclaimed == 1


def test_every_line_counts() -> None:
    assert read_all(b'["a"]\n\n[oops\n\xff\xfe\r\nlast') == [
        ("broadcast", 0, sequence, payload)
        for sequence, payload in enumerate([b'["a"]', b"", b"[oops", b"\xff\xfe\r", b"last"])
    ]
    assert read_all(b"") == []


def test_an_explicit_sequence_sets_the_counter_of_its_shard() -> None:
    lines = b"[orders] x\n[orders|7] x\n[orders] x\n[orders|5] x\n[orders] x\n[orders|1|2] x\n[orders] x\n"
    # SeaStreamer has 0, 7, 7, 5, 5: two messages with one name.
    assert [(shard, sequence) for _, shard, sequence, _ in read_all(lines)] == [
        (0, 0),
        (0, 7),
        (0, 8),
        (0, 5),
        (0, 6),
        (2, 1),
        (0, 7),
    ]
    last = f"[orders|{2**64 - 1}] x\n[orders] x\n".encode()
    assert [sequence for _, _, sequence, _ in read_all(last)] == [2**64 - 1, 0]


def test_shards_that_nobody_reads_take_no_memory() -> None:
    count = 5000
    lines = b"".join(b"[2022-01-02T03:04:05 | clicks | 1 | %d]\n" % number for number in range(count))
    broker = broker_of(lines + b"[orders] x\n")
    tracemalloc.start()
    try:
        with StdioConsumer(ORDERS, broker=broker) as consumer:
            assert take(consumer, 1) == [0]
        assert broker.unclaimed == count
        assert tracemalloc.get_traced_memory()[0] < 20 * count
    finally:
        tracemalloc.stop()


def test_a_line_without_a_stream_is_for_everybody_and_one_with_a_stream_for_its_consumers() -> None:
    broker = broker_of(b"[clicks] 1\nall\n[orders] 2\n[2022-01-02T03:04:05|broadcast|9] all\n")
    consumers = [StdioConsumer(url, broker=broker) for url in (ORDERS, StreamUrl.parse("stdio:///clicks"), BOTH)]
    assert [[m.payload for m in consumer] for consumer in consumers] == [
        [b"all", b"2", b"all"],
        [b"1", b"all", b"all"],
        [b"1", b"all", b"2", b"all"],
    ]
    assert broker.unclaimed == 0


def test_a_group_shares_by_sequence_in_the_order_of_joining() -> None:
    """Upstream's group test."""
    with open_pipe() as pipe:
        first = member(pipe.broker)
        pipe.write(*(b"[orders] %d" % i for i in range(4)))
        assert take(first, 4) == [0, 1, 2, 3]
        second = member(pipe.broker)
        pipe.write(*(b"[orders] %d" % i for i in range(10)))
        assert [m.payload for m in (first.next(20) for _ in range(5)) if m] == [b"0", b"2", b"4", b"6", b"8"]
        assert [m.payload for m in (second.next(20) for _ in range(5)) if m] == [b"1", b"3", b"5", b"7", b"9"]
        first.close()
        pipe.write(*(b"[orders] %d" % i for i in range(3)))
        assert take(second, 3) == [14, 15, 16]


def test_one_member_of_each_group_gets_a_line_for_everybody() -> None:
    broker = broker_of(b"0\n1\n2\n")
    abc = [member(broker), member(broker)]
    other, alone = member(broker, "other"), StdioConsumer(ORDERS, broker=broker)
    assert [[m.payload for m in c] for c in (*abc, other, alone)] == [
        [b"0", b"2"],
        [b"1"],
        [b"0", b"1", b"2"],
        [b"0", b"1", b"2"],
    ]


def test_the_end_comes_after_everything_was_given_out() -> None:
    with open_pipe() as pipe:
        consumer = StdioConsumer(ORDERS, broker=pipe.broker)
        assert consumer.next(timeout_seconds=0) is None
        pipe.write(b"[orders] 1", b"[orders] 2")
        pipe.end()
        assert take(consumer, 2) == [0, 1]
        for _ in range(2):
            with pytest.raises(StreamEndedError):
                consumer.next()
        late = StdioConsumer(ORDERS, broker=pipe.broker)
        with pytest.raises(StreamEndedError):
            late.next(timeout_seconds=0)


def test_a_full_buffer_stops_the_pipe() -> None:
    with open_pipe(buffer_messages=3) as pipe:
        slow = StdioConsumer(ORDERS, broker=pipe.broker)
        quick = StdioConsumer(BOTH, broker=pipe.broker)
        pipe.write(*(b"[orders] %d" % i for i in range(10)))
        assert take(quick, 3) == [0, 1, 2]
        assert quick.next(timeout_seconds=0.05) is None
        # Three are waiting, seven lines were read from the pipe and not looked at.
        assert (slow.waiting, quick.waiting) == (10, 7)
        assert take(slow, 1) == [0]
        assert take(quick, 1) == [3]
        slow.close()
        assert take(quick, 6) == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(("group", "first"), [(None, [0, 1, 2]), ("abc", [0, 2, 4, 6])])
def test_a_consumer_that_was_dropped_holds_nobody_up(group: str | None, first: list[int]) -> None:
    with open_pipe(buffer_messages=3) as pipe:
        mode = ConsumerMode.LOAD_BALANCED if group else ConsumerMode.REAL_TIME
        staying, dropped = (StdioConsumer(ORDERS, mode=mode, group=group, broker=pipe.broker) for _ in range(2))
        pipe.write(*(b"[orders] %d" % i for i in range(20)))
        assert take(staying, len(first)) == first
        assert staying.next(timeout_seconds=0.05) is None
        del dropped
        assert take(staying, 19 - first[-1]) == list(range(first[-1] + 1, 20))


def test_whoever_writes_a_pipe_that_is_not_read_waits() -> None:
    with open_pipe(buffer_bytes=100_000) as pipe:
        consumer = StdioConsumer(ORDERS, broker=pipe.broker)
        os.set_blocking(pipe.writer.fileno(), False)
        line, sent = b"[orders] " + b"x" * 50_000 + b"\n", 0
        assert consumer.next(timeout_seconds=0) is None

        def fill() -> bool:
            nonlocal sent
            try:
                sent += os.write(pipe.writer.fileno(), (line * 2)[sent % len(line) :][: len(line)])
            except BlockingIOError:
                return consumer.waiting >= 2
            return False

        until(fill, what="a full pipe")
        assert sent < 20 * len(line)
        os.set_blocking(pipe.writer.fileno(), True)
        # A message that is larger than a buffer has an empty one for itself.
        rest = threading.Thread(target=lambda: pipe.write(line[sent % len(line) : -1], b"[orders] " + b"y" * 300_000))
        rest.start()
        payloads: list[bytes] = []
        while not payloads or not payloads[-1].startswith(b"y"):
            message = consumer.next(20)
            assert message is not None
            payloads.append(message.payload or b"")
        rest.join()
        assert payloads == [b"x" * 50_000] * (len(payloads) - 1) + [b"y" * 300_000]


def test_nothing_is_read_away_while_nobody_listens() -> None:
    with open_pipe() as pipe:
        first = StdioConsumer(ORDERS, broker=pipe.broker)
        pipe.write(b"[orders] 0")
        assert take(first, 1) == [0]
        first.close()
        pipe.write(b"[orders] 1")
        until(lambda: first.waiting == 1, what="a line that was read and is kept")
        pipe.end()
        assert [m.sequence for m in StdioConsumer(ORDERS, broker=pipe.broker)] == [1]


def test_closing_ends_a_waiting_next() -> None:
    with open_pipe() as pipe:
        consumer = StdioConsumer(ORDERS, broker=pipe.broker)
        ended = threading.Event()

        def wait() -> None:
            with pytest.raises(StreamEndedError):
                consumer.next()
            ended.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        consumer.close()
        consumer.close()
        assert ended.wait(20)
        waiting.join()


def test_shards_are_chosen_at_once() -> None:
    with open_pipe() as pipe:
        consumer = StdioConsumer(ORDERS, broker=pipe.broker)
        consumer.assign(Shard("orders", 2))
        pipe.write(b"[orders|5|1] one", b"[orders|6|2] two", b"all")
        assert take(consumer, 2) == [6, 0]
        with pytest.raises(NotSubscribedError):
            consumer.unassign(Shard("orders", 1))
        with pytest.raises(NotSubscribedError):
            consumer.assign(Shard("clicks"))
        consumer.assign(Shard("orders", 1))
        consumer.unassign(Shard("orders", 2))
        pipe.write(b"[orders|7|2] two", b"[orders|8|1] one")
        assert take(consumer, 1) == [8]


def test_a_pipe_has_no_places() -> None:
    with StdioConsumer(ORDERS, broker=broker_of(b"x\n")) as consumer:
        with pytest.raises(UnsupportedError):
            consumer.seek(datetime.now(timezone.utc))
        for place in (Edge.END, 3):
            with pytest.raises(UnsupportedError):
                consumer.rewind(place)
        assert [m.payload for m in consumer] == [b"x"]


@pytest.mark.parametrize(
    "options",
    [
        {"mode": ConsumerMode.RESUMABLE, "group": "g"},
        {"group": "g"},
        {"mode": ConsumerMode.LOAD_BALANCED},
        {"mode": ConsumerMode.LOAD_BALANCED, "group": ""},
        {"reset": AutoStreamReset.LATEST},
        {"client": {"a": "b"}},
    ],
)
def test_options_that_a_pipe_does_not_have(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOptionError):
        create_consumer("stdio:///orders", **options)  # type: ignore[arg-type]


def test_a_pipe_has_no_host_and_no_batches() -> None:
    for url in ("stdio://localhost/orders", "stdio:///"):
        with pytest.raises(InvalidUrlError):
            create_consumer(url)
    with pytest.raises(UnsupportedError):
        open_batch_source("stdio:///orders")
    with pytest.raises(UnsupportedError):
        StreamSource(ORDERS, ConsumerMode.LOAD_BALANCED)


def test_a_pipe_that_cannot_be_read_is_no_end(tmp_path: Path) -> None:
    consumer = StdioConsumer(ORDERS, broker=StdioBroker(None, None))
    with pytest.raises(StreamNotFoundError):
        consumer.next()

    class Folder(io.BytesIO):
        def fileno(self) -> int:
            return folder

    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        consumer = StdioConsumer(ORDERS, broker=StdioBroker(Folder(), None))
        for _ in range(2):
            with pytest.raises(StreamRemovedError):
                consumer.next()
    finally:
        os.close(folder)


def test_what_came_before_a_failure_is_given_out() -> None:
    class Failing(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size or -1)
            if not line:
                raise OSError("the disk is gone")
            return line

    consumer = StdioConsumer(ORDERS, broker=StdioBroker(Failing(b"[orders] 1\n"), None))
    assert take(consumer, 1) == [0]
    with pytest.raises(StreamRemovedError):
        consumer.next()


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory() -> None:
    lines = read_lines(io.BytesIO(b"short\n" + b"x" * 5000 + b"\n"), max_line_bytes=1000)
    assert next(lines) == [b"short"]
    with raises_with(FormatError, line=2, limit=1000):
        next(lines)


def test_lines_are_put_together_from_pieces() -> None:
    def pieces(pipe: Pipe) -> None:
        for byte in b"[orders | 7] ab\n\ncd":
            os.write(pipe.writer.fileno(), bytes((byte,)))
        pipe.end()

    with open_pipe() as pipe:
        writer = threading.Thread(target=pieces, args=(pipe,))
        writer.start()
        with StdioConsumer(ORDERS, broker=pipe.broker) as consumer:
            assert [(m.sequence, m.payload) for m in consumer] == [(7, b"ab"), (0, b""), (1, b"cd")]
        writer.join()


def test_a_process_ends_while_stdin_is_open() -> None:
    """A thread that waits inside Python's buffer of stdin would abort the interpreter."""
    code = (
        "from stream_consumers.create import create_consumer as c\n"
        "a, b = c('stdio:///orders'), c('stdio:///clicks')\n"
        "print(a.next().text(), b.next().text(), a.next(timeout_seconds=0.1))\n"
    )
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin, os.fdopen(writing, "wb") as lines:
        lines.write(b"[orders] one\n[clicks] two\n")
        lines.flush()
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=stdin, capture_output=True, cwd=ROOT, timeout=60, check=False
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"one two None\n", b"")
