"""A pipe that is spooled into a file: each line once, whatever is killed, and nothing that cannot be read."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from stream_assets.cli.main import main
from stream_consumers import batches as stream_batches
from stream_consumers.create import StreamSource, create_producer
from stream_consumers.errors import (
    InvalidOptionError,
    InvalidUrlError,
    ProducerBusyError,
    SizeLimitError,
    StreamNotFoundError,
    UntrustedFileError,
)
from stream_consumers.file.batches import FileBatchSource
from stream_consumers.file.format import encode_frame
from stream_consumers.file.scanner import Frame, FrameScanner
from stream_consumers.messages import Shard
from stream_consumers.options import FileProducerOptions
from stream_consumers.stdio.spool import SpoolResult, default_spool_path, spool_stdin, spool_url
from stream_consumers.urls import StreamUrl
from tests.support.polling import until
from tests.support.settings import ROOT
from tests.support.stdio_pipes import broker_of, open_pipe

ORDERS = StreamUrl.parse("stdio:///orders")
SPOOL = """
import sys
from pathlib import Path
from stream_consumers.options import FileProducerOptions
from stream_consumers.stdio.spool import spool_stdin
from stream_consumers.urls import StreamUrl
options = FileProducerOptions(beacon_interval=1024)
print(spool_stdin(StreamUrl.parse("stdio:///orders"), Path(sys.argv[1]), options=options))
"""


def frames(path: Path) -> list[Frame]:
    """Every frame of the file, none of which is damaged or unfinished."""
    with FrameScanner(path) as scanner:
        items = list(scanner)
        assert scanner.incomplete_bytes == 0
    found = [item for item in items if isinstance(item, Frame)]
    assert found == items
    return found


def payloads_so_far(path: Path) -> list[bytes]:
    """Of the whole frames that are in a file that is being written."""
    if not path.exists() or path.stat().st_size < 128:
        return []
    with FrameScanner(path) as scanner:
        return [item.payload for item in scanner if isinstance(item, Frame)]


@contextmanager
def spooling(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", SPOOL, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def test_each_line_is_a_message_of_the_file(path: Path) -> None:
    data = b"[orders | 7] a\nall\n[INFO] started\n[2022-01-02T03:04:05 | clicks | 8] b\n"
    data += b"[2022-01-02T03:04:05.6 | orders | 7 | 3] \xff\n"
    # A file has no times before 1970.
    data += b"[1969-12-31T23:59:59.999 | clicks | 9 | 2] old\n[1970-01-01T00:00:00 | orders] new"
    seen: list[bytes | None] = []
    done = spool_stdin(ORDERS, path, broker=broker_of(data), on_message=lambda message: seen.append(message.payload))
    assert done == SpoolResult(messages=6, others=1)
    # The sequences are the file's own: two lines with one number are two messages.
    assert [(str(f.shard), f.sequence, f.payload) for f in frames(path)] == [
        ("orders/0", 1, b"a"),
        ("orders/0", 2, b"all"),
        ("orders/0", 3, b"[INFO] started"),
        ("clicks/0", 1, b"b"),
        ("orders/3", 1, b"\xff"),
        ("orders/0", 4, b"[1969-12-31T23:59:59.999 | clicks | 9 | 2] old"),
        ("orders/0", 5, b"new"),
    ]
    shown = [f.timestamp_ms for f in frames(path)]
    assert (shown[4], shown[6]) == (1_641_092_645_600, 0)
    assert abs(shown[5] - time.time() * 1000) < 60_000
    assert seen == [frame.payload for frame in frames(path)]


def test_a_header_that_no_reader_takes_is_text(path: Path) -> None:
    lines = [
        b"[orders | 1 | 9223372036854775808] boom",
        b"[2022-01-02T03:04:05 | SEA_STREAMER_INTERNAL | 1] EOS",
        b"[worker-1 | 7] done ",
        b"[42] hello",
        b"[2026-11-01T12:00:00.123987] INFO  stopped ",
        b"[2026-11-01T12:00:00] INFO  restarted ",
        b"[2026-11-01T12:00:00.123987 | orders | 7] ready ",
        b"[broadcast] sent ",
    ]
    assert spool_stdin(ORDERS, path, broker=broker_of(b"\n".join(lines))) == SpoolResult(messages=len(lines), others=0)
    assert [(str(f.shard), f.payload) for f in frames(path)] == [("orders/0", line) for line in lines]


def test_no_other_user_can_read_a_file_from_its_creation_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        with monkeypatch.context() as patched:
            # Nothing changes the mode afterwards: it is right when the file appears.
            patched.setattr(os, "fchmod", None)
            patched.setattr(os, "chmod", None)
            spool_stdin(ORDERS, path, broker=broker_of(b"1\n"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    spool_stdin(ORDERS, path, broker=broker_of(b"2\n"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [f.payload for f in frames(path)] == [b"1", b"2"]


def test_a_file_of_another_user_and_a_link_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = path.with_name("target.ss")
    path.symlink_to(target)
    with pytest.raises(UntrustedFileError):
        spool_stdin(ORDERS, path, broker=broker_of(b"1\n"))
    assert not target.exists()
    path.unlink()
    spool_stdin(ORDERS, path, broker=broker_of(b"1\n"))
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(UntrustedFileError):
        spool_stdin(ORDERS, path, broker=broker_of(b"2\n"))
    assert [f.payload for f in frames(path)] == [b"1"]


def _refuse(file: int, mode: int) -> None:
    raise PermissionError(errno.EPERM, "this file system has no modes")


@pytest.mark.parametrize("fchmod", [_refuse, lambda file, mode: None])
def test_a_file_system_without_modes_must_keep_the_file_from_others(
    path: Path, monkeypatch: pytest.MonkeyPatch, fchmod: Callable[[int, int], None]
) -> None:
    """Each file of vfat has the mode that the file system is mounted with; CIFS may take another one and forget it."""
    monkeypatch.setattr(os, "fchmod", fchmod)
    path.touch(0o700)
    path.chmod(0o700)
    spool_stdin(ORDERS, path, broker=broker_of(b"1\n"))
    path.chmod(0o755)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(UntrustedFileError):
        spool_stdin(ORDERS, path, broker=broker_of(b"2\n"))
    assert os.listdir("/proc/self/fd") == before, "it was closed"
    assert [f.payload for f in frames(path)] == [b"1"]


def test_lines_are_in_the_file_while_the_pipe_is_open_and_survive_a_kill(path: Path) -> None:
    lines = [b"line %d" % n for n in range(300)]
    with spooling(path) as process:
        assert process.stdin
        for part in (lines[:200], lines[200:]):
            process.stdin.write(b"".join(line + b"\n" for line in part))
            process.stdin.flush()
            until(lambda: payloads_so_far(path)[-1:] == part[-1:], what="lines in the file")  # noqa: B023
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert [f.payload for f in frames(path)] == lines
    with spooling(path) as process:
        out, _ = process.communicate(b"again\n", timeout=60)
        assert out == b"SpoolResult(messages=1, others=0)\n"
    assert [f.payload for f in frames(path)] == [*lines, b"again"]
    assert [f.sequence for f in frames(path)] == list(range(1, 302))


@pytest.mark.slow
def test_a_kill_at_full_speed_leaves_whole_lines_at_most_once(path: Path) -> None:
    """The pipe never pauses, so that the kill falls into the middle of something."""
    lines = [b"%d %s" % (n, b"x" * (n * 37 % 5000)) for n in range(20_000)]
    with spooling(path) as process:
        assert process.stdin
        os.set_blocking(process.stdin.fileno(), False)
        data, sent = b"".join(line + b"\n" for line in lines), 0

        def feed() -> bool:
            nonlocal sent
            with suppress(BlockingIOError):
                sent += os.write(process.stdin.fileno() if process.stdin else -1, data[sent : sent + 65536])
            return path.exists() and path.stat().st_size > 3_000_000

        while not feed():
            pass
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    before = payloads_so_far(path)
    assert before == lines[: len(before)]
    assert 100 < len(before) < len(lines)
    with spooling(path) as process:
        process.communicate(data, timeout=60)
    assert [f.payload for f in frames(path)] == before + lines


@pytest.mark.parametrize("cut", [1, 1000])
def test_an_unfinished_message_is_moved_aside(path: Path, cut: int) -> None:
    options = FileProducerOptions(beacon_interval=1024)
    spool_stdin(ORDERS, path, broker=broker_of(b"one\ntwo\n" + b"x" * 3000), options=options)
    os.truncate(path, path.stat().st_size - cut)
    spool_stdin(ORDERS, path, broker=broker_of(b"three\n"))
    assert [f.payload for f in frames(path)] == [b"one", b"two", b"three"]
    assert len(list(path.parent.glob("*.tail-*"))) == 1


@pytest.mark.parametrize("line", [b"y" * 5000, encode_frame(Shard("x"), 1, 1, b"hello")[0] + b"y" * 5000])
@pytest.mark.parametrize("interval", [1024, 1024 * 1024])
def test_a_killed_write_of_any_line_stops_no_pipe(path: Path, line: bytes, interval: int) -> None:
    """Nor the messages before it, nor those after it, and no bytes of it are lost."""
    options = FileProducerOptions(beacon_interval=interval)
    spool_stdin(ORDERS, path, broker=broker_of(b"one\ntwo\n" + line), options=options)
    os.truncate(path, path.stat().st_size - 1000)
    for _ in range(2):
        assert spool_stdin(ORDERS, path, broker=broker_of(b"three\nfour\n")).messages == 2
    with FrameScanner(path) as scanner:
        items = list(scanner)
    assert [item.payload for item in items if isinstance(item, Frame)] == [b"one", b"two", *2 * [b"three", b"four"]]
    beside = list(path.parent.glob("*.tail-*"))
    assert len(items) - 6 + len(beside) == 1
    kept = path.read_bytes() + b"".join(found.read_bytes() for found in beside)
    assert b"y" * 500 in kept


def test_nothing_is_read_that_cannot_be_written(path: Path) -> None:
    with open_pipe() as pipe, create_producer(f"file://{path}/orders"):
        pipe.write(b"precious")
        with pytest.raises(ProducerBusyError):
            spool_stdin(ORDERS, path, broker=pipe.broker)
        with pytest.raises(StreamNotFoundError):
            spool_stdin(ORDERS, path.parent / "nowhere" / "x.ss", broker=pipe.broker)
        pipe.end()
        assert spool_stdin(ORDERS, path.with_name("other.ss"), broker=pipe.broker).messages == 1


def test_the_spool_is_beside_the_table(tmp_path: Path) -> None:
    assert default_spool_path(f"{tmp_path}/t") == tmp_path / "t.spool.ss"
    assert default_spool_path(f"file://{tmp_path}/t/") == tmp_path / "t.spool.ss"
    for table in ("s3://bucket/t", "abfss://a@b/t", "/", "file://host/t"):
        with pytest.raises(InvalidOptionError):
            default_spool_path(table)
    assert StreamSource(spool_url(ORDERS, tmp_path / "t.spool.ss")).url.path == f"{tmp_path}/t.spool.ss"
    with pytest.raises(InvalidUrlError):
        spool_url(StreamUrl.parse("stdio://here/orders"), tmp_path)


@pytest.fixture
def drained(monkeypatch: pytest.MonkeyPatch) -> list[StreamUrl]:
    """What ``ingest`` would have given to Spark."""
    found: list[StreamUrl] = []

    def drain(spark: object, source: StreamSource, *more: object, **options: object) -> Iterator[object]:
        found.append(source.url)
        return iter(())

    monkeypatch.setattr("spark_jobs.run_ingestion.run_events", drain)
    monkeypatch.setattr("spark_jobs.session.create_session", lambda options: None)
    return found


def ingest(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(
        main, ["ingest", *words], input=b"[orders] 1\nall\n[2022-01-02T03:04:05 | clicks | 8] 2\n"
    )
    return done.exit_code, done.output


def test_ingest_spools_a_pipe_and_reads_the_file(tmp_path: Path, drained: list[StreamUrl]) -> None:
    table, other = f"{tmp_path}/lake/t", tmp_path / "other.ss"
    code, output = ingest("--source", "stdio:///orders", "--table", table)
    assert code == 0, output
    beside = tmp_path / "lake" / "t.spool.ss"
    note = f"note: wrote 2 messages of stdin to {beside}, and 1 message of other streams, which are not ingested"
    assert note in output
    assert ingest("--source", "stdio:///orders", "--table", table, "--spool", str(other))[0] == 0
    assert [str(url) for url in drained] == [f"file://{beside}/orders", f"file://{other}/orders"]
    assert [f.payload for f in frames(beside)] == [f.payload for f in frames(other)] == [b"1", b"all", b"2"]


def test_what_is_in_the_spool_is_ingested_even_if_no_more_can_be_written(
    tmp_path: Path, drained: list[StreamUrl], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(file: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = ("--source", "stdio:///orders", "--table", f"{tmp_path}/t")
    assert ingest(*words)[0] == 0
    monkeypatch.setattr(os, "pwrite", pwrite)
    code, output = ingest(*words)
    assert code == 1
    assert "No space left on device" in output
    monkeypatch.undo()
    assert [str(url) for url in drained] == 2 * [f"file://{tmp_path}/t.spool.ss/orders"]
    assert [frame.payload for frame in frames(tmp_path / "t.spool.ss")] == [b"1", b"all", b"2"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--source", "stdio:///orders", "--table", "s3://bucket/t"), "--spool PATH"),
        (("--source", "stdio:///orders", "--table", "t", "--mode", "load_balanced"), "Use mode 'resumable'"),
        (("--source", "stdio:///orders", "--table", "t", "--decode", "json"), "needs --schema"),
        (("--source", "stdio://x/orders", "--table", "t"), "a pipe has no host"),
        (("--source", "stdio:///orders", "--table", "t", "-X", "a=b"), "no client to configure"),
        (
            ("--source", "file://x.ss/orders", "--table", "t", "--spool", "y.ss"),
            "--spool is only for stdio, not for file://x.ss/orders",
        ),
        (("--source", "stdio:///orders", "--table", "file.txt"), "is a file, not a table"),
    ],
)
def test_ingest_reads_nothing_when_its_words_are_wrong(
    words: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drained: list[StreamUrl]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("")
    code, output = ingest(*words)
    assert code == 1
    assert text in output
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]


def test_lines_for_all_streams_count_as_those_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_batches, "MAX_SHARDS", 3)
    path = tmp_path / "spool.ss"
    lines = [b"[2026-01-01T00:00:00 | broadcast | 1 | %d] x" % shard for shard in range(1, 6)]
    spool_stdin("stdio:///orders", path, broker=broker_of(b"\n".join(lines)))
    with FileBatchSource(spool_url("stdio:///orders", path)) as source:
        assert len(source.extents()) == 3


def test_lines_of_more_shards_than_the_ledger_can_keep_are_payloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the URL's own streams and of others, also in a second run; they stop no stream."""
    monkeypatch.setattr(stream_batches, "MAX_SHARDS", 3)
    path = tmp_path / "spool.ss"
    lines = [
        b"[2026-01-01T00:00:00 | %b | 1 | %d] x" % (stream, shard)
        for shard in range(1, 6)
        for stream in (b"orders", b"noise", b"clicks")
    ]
    for half in (lines[:8], lines[8:], [b"plain"]):
        spool_stdin("stdio:///orders,clicks", path, broker=broker_of(b"\n".join(half)))
    found = frames(path)
    assert Counter(frame.shard.stream for frame in found if frame.payload == b"x") == {
        "noise": 3,
        "orders": 1,
        "clicks": 1,
    }
    refused = [frame.payload for frame in found if frame.payload != b"x"]
    assert refused == [
        *(
            line
            for line in lines
            if b" 1 | 1]" not in line and (b"noise" not in line or b"| 4]" in line or b"| 5]" in line)
        ),
        b"plain",
    ]
    assert {frame.shard for frame in found if frame.payload != b"x"} == {Shard("orders")}
    with FileBatchSource(spool_url("stdio:///orders,clicks", path)) as source:
        assert len(source.extents()) == 3
    with FileBatchSource(spool_url("stdio:///noise", path)) as source:
        assert len(source.extents()) == 3


def test_all_streams_that_the_url_does_not_name_share_a_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new stream takes memory for good, so that a pipe must not name ever new ones."""
    monkeypatch.setattr(stream_batches, "MAX_SHARDS", 3)
    lines = [b"[2026-01-01T00:00:00 | s%d | 1] x" % number for number in range(6)]
    for half in (lines[:2], lines[2:]):
        spool_stdin("stdio:///orders", path, broker=broker_of(b"\n".join(half)))
    found = [(frame.shard.stream, frame.payload) for frame in frames(path)]
    assert found == [*((f"s{number}", b"x") for number in range(3)), *(("orders", line) for line in lines[3:])]


def test_a_spool_may_exceed_the_limit_of_other_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows with each run, and no run could be piped into another file without losing its place."""
    defaults = FileProducerOptions()
    lowered = (defaults.creation, defaults.beacon_interval, defaults.end_with_eos, 1000)
    monkeypatch.setattr(FileProducerOptions.__init__, "__defaults__", lowered)
    for _ in range(3):
        assert spool_stdin(ORDERS, path, broker=broker_of(b"x" * 500 + b"\na\n")).messages == 2
    assert len(frames(path)) == 6
    with pytest.raises(SizeLimitError):
        spool_stdin(ORDERS, path, broker=broker_of(b"a"), options=FileProducerOptions())
