"""Copies stdin into a stream file, because a pipe cannot be read twice and a file can."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from stream_consumers import batches
from stream_consumers.errors import InvalidOptionError, StreamEndedError
from stream_consumers.file.producer import FileProducer
from stream_consumers.messages import Message, Shard
from stream_consumers.options import FileProducerOptions
from stream_consumers.stdio.broker import ShardLimit, StdioBroker, check_stdio_url, process_broker
from stream_consumers.stdio.lines import BROADCAST
from stream_consumers.urls import StreamUrl

IDLE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class SpoolResult:
    """The result of copying stdin into a file.

    Args:
        messages: the number of messages of the streams of the URL that were added to the file.
        others: the number of messages of other streams that were added to the file.

    Example:
        >>> SpoolResult(messages=3, others=1).messages
        3
    """

    messages: int
    others: int


def spool_url(url: str | StreamUrl, path: Path) -> StreamUrl:
    """Return the URL of the file that a pipe is spooled into, with the same streams.

    Args:
        url: the URL of the pipe, ``stdio:///orders``.
        path: the path of the file.

    Raises:
        InvalidUrlError: the URL of the pipe names a host, or no stream.

    Example:
        >>> str(spool_url(StreamUrl.parse("stdio:///orders"), Path("lake/orders.spool.ss")))
        'file://lake/orders.spool.ss/orders'
    """
    url = StreamUrl.parse(url)
    return StreamUrl("file", (str(path),), check_stdio_url(url))


def default_spool_path(table: str) -> Path:
    """Return the file that the pipe for a table is copied into: beside the table, with ``.spool.ss`` after its name.

    Args:
        table: a local path, or a ``file:`` URI.

    Raises:
        InvalidOptionError: the table is not on this machine.

    Example:
        >>> default_spool_path("lake/orders/").as_posix()
        'lake/orders.spool.ss'
    """
    local = table.removeprefix("file:") if table.startswith("file:///") else table
    path = Path(local)
    if "://" in local or not path.name:
        raise InvalidOptionError(
            f"stdin cannot be spooled beside the table {table!r}, which is not a local path",
            remedy="Name a file: --spool PATH.",
        )
    return path.with_name(f"{path.name}.spool.ss")


def spool_stdin(
    url: str | StreamUrl,
    path: Path,
    *,
    broker: StdioBroker | None = None,
    options: FileProducerOptions | None = None,
    on_message: Callable[[Message], None] = lambda message: None,
) -> SpoolResult:
    """Append stdin to a stream file until its end.

    Lines without a stream go to the first stream of the URL. Because a pipe cannot be read again, no line is left out:
    a line whose complete header names another stream is in the file under that name. Timestamps are kept; a file has
    none before 1970, so a line with such a time becomes a payload with its header. So does a line whose shard would be
    one more than a URL may have, or one more than all other streams may have together. The file assigns the sequences,
    so that they are unique whatever the lines contain. When this returns, all messages are on the disk. A killed run
    leaves whole messages, and perhaps an incomplete one, which the next run moves to another file or leaves as damage.

    Messages that were in the pipe when a run was killed are lost unless they are sent again; messages that are sent
    again and had been written are in the file twice.

    Args:
        url: ``stdio:///orders``.
        path: the file; it gets the mode 0600, and is created if it is missing.
        broker: other pipes than stdin and stdout.
        options: the options of the file's producer; by default the file has no size limit.
        on_message: called with each message that was appended.

    Raises:
        InvalidUrlError: the URL names a host, or no stream.
        ProducerBusyError: another producer has the file open.
        StreamNotFoundError: the folder of the file does not exist, or stdin is closed.
        UntrustedFileError: the file is a symbolic link, belongs to another user, or is on a file system that cannot
            deny other users access.
        StreamRemovedError, FormatError: reading stdin failed; the messages before that are in the file.

    Example:
        >>> import io
        >>> pipes = StdioBroker(io.BytesIO(b"one"), io.BytesIO())
        >>> spool_stdin(StreamUrl.parse("stdio:///orders"), Path("spool.ss"), broker=pipes)
        SpoolResult(messages=1, others=0)
    """
    url = StreamUrl.parse(url)
    options = options or FileProducerOptions(file_size_limit=None)
    streams = spool_url(url, path).streams
    messages = others = 0
    with ExitStack() as opened:
        producer = opened.enter_context(FileProducer(spool_url(url, path), options, is_private=True))
        broker = broker or process_broker()
        # The first stream of the URL gets the lines without a shard.
        limit = ShardLimit(streams, [*producer.shards, Shard(streams[0])], most=batches.MAX_SHARDS)
        queue = broker.subscribe(list(streams), takes_all=True, shard_limit=limit)
        opened.callback(broker.unsubscribe, queue)
        _sync_folder(path)
        patience: float | None = IDLE_SECONDS
        while True:
            try:
                message = broker.take(queue, patience)
            except StreamEndedError:
                break
            if message is None:
                producer.flush()
                patience = None
                continue
            patience = IDLE_SECONDS
            stream = streams[0] if message.shard.stream == BROADCAST else message.shard.stream
            shard, moment = message.shard.id, message.timestamp_ms
            producer.send(message.payload or b"", stream=stream, shard=shard, timestamp_ms=moment)
            messages += stream in streams
            others += stream not in streams
            on_message(message)
    return SpoolResult(messages, others)


def _sync_folder(path: Path) -> None:
    """Sync the folder, so that the name of the file is on the disk, too."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
