"""Lines as messages: SeaStreamer's vectors, what it gets wrong, and any bytes at all."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stream_consumers.errors import FormatError, InvalidOptionError, InvalidStreamKeyError
from stream_consumers.messages import MAX_SHARD, Message, Shard
from stream_consumers.stdio.lines import ESCAPE, SEQUENCES, Line, format_bare_line, format_line, parse_line
from tests.support.raising import raises_with

JANUARY = 1_641_092_645_000  # 2022-01-02T03:04:05
NUMBERS = st.integers(0, SEQUENCES - 1)
STREAMS = st.text("abcXYZ019._-", min_size=1, max_size=249)
# The years that a line can name.
TIMES = st.integers(-62_135_596_800_000, 253_402_300_799_999)
# Of lines that have a header, or nearly.
PIECES = [
    b"[", b"]", b"|", b" ", b"\t", b"k", b"0", b"7", b"18446744073709551615", b"2022-01-02T03:04:05", b".5",
    b"[2022-01-02T03:04:05 | k | 7", b"[9999-12-31T23:59:59.999 | k | 7 | 3] ", ESCAPE, b"Cg==", b"\xff", b"\xc2\x85",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a plain, raw message", Line(b"a plain, raw message")),
        ("[2022-01-02T03:04:05.678 | my-fancy_topic.1] {}", Line(b"{}", JANUARY + 678, "my-fancy_topic.1")),
        ("[2022-01-02T03:04:05 | k | 123 | 4] {}", Line(b"{}", JANUARY, "k", 123, 4)),
        ("[k] {}", Line(b"{}", None, "k")),
        ("[k | 123 | 4] {}", Line(b"{}", None, "k", 123, 4)),
        # Its README calls this invalid; its code reads it.
        ("[2022-01-01T00:00:00] 12345", Line(b"12345", 1_640_995_200_000)),
        ("[a|7]x", Line(b"x", None, "a", 7)),
        ("[k]   around \t\r", Line(b"around", None, "k")),
        ("[a] [b] x", Line(b"[b] x", None, "a")),
        ("  raw, as it is \r", Line(b"  raw, as it is \r")),
        ("", Line(b"")),
        (f"[k | {SEQUENCES - 1}] x", Line(b"x", None, "k", SEQUENCES - 1)),
        ("[" + "k" * 249 + "] x", Line(b"x", None, "k" * 249)),
    ],
)
def test_lines_that_seastreamer_reads(text: str, expected: Line) -> None:
    assert parse_line(text.encode()) == expected


PAYLOADS = [
    "[ ]", "[]", "[", "[no end", "[Jan 1, 2022] x", "[a | b] x", '["x"]', "[1, 2, 3]", '[{"id": 1}]', "[[1], [2]]",
    "[1]", "[-1.5e3]", "[true]", "[2022-13-45T03:04:05] x", "[2022-01-02T03:04:05.1239] x",
    "[2022-01-02T03:04:05.123000 | k | 1] x", "[2022-01-02T03:04] x", "[2022-01-02T03:04:05 | ] x",
    "[k | 1 | 2 | 3] x", "[2022-01-02T03:04:05 | k | 1 | 2 | 3] x", "[k | 2022-01-02T03:04:05] x",
    f"[k | {SEQUENCES}] x", f"[k | 1 | {MAX_SHARD + 1}] x", "[2022-01-02T03:04:05 | SEA_STREAMER_INTERNAL | 1] x",
    "[k | -1] x", "[k | ²] x", "[" + "k" * 250 + "] x", "[ö] x",
]  # fmt: skip


@pytest.mark.parametrize("text", PAYLOADS)
def test_a_line_without_a_valid_header_is_a_payload(text: str) -> None:
    assert parse_line(text.encode()) == Line(text.encode())


def test_a_stream_may_have_the_name_of_a_number() -> None:
    assert parse_line(b"[1] x") == Line(b"x", None, "1")
    assert parse_line(b"[2022-01-02T03:04:05 | 1]") == Line(b"", JANUARY, "1")
    assert parse_line(b"[1 | 2]") == Line(b"", None, "1", 2)


@given(st.binary())
@example(b"[\xff] x")
@example(b"[k] \xff\x00")
def test_any_bytes_are_a_line(line: bytes) -> None:
    read = parse_line(line)
    assert read.payload in line or read.timestamp_ms is not None
    if not line.startswith(b"["):
        assert read == Line(line)


@given(st.text("[]|:.-T 0129abk\r", max_size=40))
def test_anything_like_a_header_is_a_line(text: str) -> None:
    assert parse_line(text.encode()).payload in text.encode()


@given(st.lists(st.sampled_from(PIECES), max_size=8).map(b"".join), st.binary(max_size=20))
@example(b"[2022-01-02T03:04:05.678|k|1|2]", ESCAPE + b"Cg==")
def test_what_was_read_can_be_written_and_read_again(head: bytes, rest: bytes) -> None:
    read = parse_line(head + rest)
    if read.timestamp_ms is None or read.stream is None or read.sequence is None:
        return
    line = format_line(Message(Shard(read.stream, read.shard or 0), read.sequence, read.timestamp_ms, read.payload))
    assert parse_line(line[:-1]) == replace(read, shard=read.shard or None)


@given(st.binary(), STREAMS, st.integers(0, MAX_SHARD), NUMBERS, TIMES)
@example(b"two\nlines", "k", 0, 0, 0)
@example(b" around ", "k", 0, 0, 0)
@example(b"\xff", "k", 0, 0, 0)
@example(ESCAPE + b"eA==", "k", 0, 0, 0)
@example(ESCAPE + b"Cg==", "k", 0, 0, 0)
@example(b"", "1", 0, 0, 0)
@example(b"[k] x", "broadcast", 0, 0, -1)
def test_every_message_comes_back(payload: bytes, stream: str, shard: int, sequence: int, timestamp_ms: int) -> None:
    line = format_line(Message(Shard(stream, shard), sequence, timestamp_ms, payload))
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    line.decode()
    assert parse_line(line[:-1]) == Line(payload, timestamp_ms, stream, sequence, shard or None)


def test_what_is_written_is_what_seastreamer_writes() -> None:
    plain = Message(Shard("orders"), 7, JANUARY, b'{"name": "\xc3\xb6"}')
    assert format_line(plain) == b'[2022-01-02T03:04:05 | orders | 7] {"name": "\xc3\xb6"}\n'
    assert format_line(Message(Shard("orders", 2), 7, JANUARY + 20, None)) == (
        b"[2022-01-02T03:04:05.020 | orders | 7 | 2]\n"
    )


@pytest.mark.parametrize(
    "text",
    # Without the header that we write, or not as we write it, it is somebody else's text.
    [
        *(head + ESCAPE + b"Cg==" for head in (b"", b"[k | 1] ")),
        *(b"[2022-01-02T03:04:05 | k | 1] " + ESCAPE + text for text in (b"Cg", b"???", b"eA==")),
    ],
)
def test_only_our_own_base64_is_read(text: bytes) -> None:
    assert parse_line(text).payload == text[text.index(ESCAPE) :]


@pytest.mark.parametrize(
    "message",
    [
        Message(Shard("or ders"), 0, 0, b""),
        Message(Shard(""), 0, 0, b""),
        Message(Shard("k", -1), 0, 0, b""),
        Message(Shard("k", MAX_SHARD + 1), 0, 0, b""),
        Message(Shard("k"), SEQUENCES, 0, b""),
        Message(Shard("k"), 0, 10**15, b""),
    ],
)
def test_what_no_line_can_say(message: Message) -> None:
    with pytest.raises((InvalidOptionError, InvalidStreamKeyError)):
        format_line(message)


def test_a_bare_line_is_the_payload() -> None:
    assert format_bare_line(Message(Shard("k"), 0, 0, b' {"a": 1}\xff')) == b' {"a": 1}\xff\n'
    with raises_with(FormatError, sequence=5, newlines=2):
        format_bare_line(Message(Shard("k", 3), 5, 0, b"a\nb\n"))


def test_a_long_line_of_bars_takes_little_memory() -> None:
    line = b"[" + b"ab|" * 500_000 + b"] x"
    tracemalloc.start()
    try:
        assert parse_line(line) == Line(line)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(line)
    finally:
        tracemalloc.stop()
