"""Stdin into a stream file: a pipe cannot be read twice, a file can."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stream_consumers.errors import InvalidOptionError, StreamEndedError
from stream_consumers.file.producer import FileProducer
from stream_consumers.messages import Message
from stream_consumers.options import FileProducerOptions
from stream_consumers.stdio.broker import StdioBroker, check_stdio_url
from stream_consumers.stdio.consumer import StdioConsumer
from stream_consumers.stdio.lines import BROADCAST
from stream_consumers.urls import StreamUrl

IDLE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Spooled:
    """What a spool took from the pipe.

    Args:
        messages: how many are in the file now that were not before.
        unclaimed: lines that were of none of the streams, and are not in the file.

    Example:
        >>> Spooled(messages=3, unclaimed=1).messages
        3
    """

    messages: int
    unclaimed: int


def spool_url(url: StreamUrl, path: Path) -> StreamUrl:
    """The URL of the file that a pipe is spooled into, with the same streams.

    Args:
        url: of the pipe, ``stdio:///orders``.
        path: of the file.

    Raises:
        InvalidUrlError: the URL of the pipe names a host, or no stream.

    Example:
        >>> str(spool_url(StreamUrl.parse("stdio:///orders"), Path("lake/orders.spool.ss")))
        'file://lake/orders.spool.ss/orders'
    """
    return StreamUrl("file", (str(path),), check_stdio_url(url))


def default_spool_path(table: str) -> Path:
    """Where the pipe for a table is spooled: beside it, with ``.spool.ss`` behind its name.

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
            f"there is no place beside the table {table!r} to spool stdin into", remedy="Name a file: --spool PATH."
        )
    return path.with_name(f"{path.name}.spool.ss")


def spool_stdin(
    url: StreamUrl,
    path: Path,
    *,
    broker: StdioBroker | None = None,
    options: FileProducerOptions | None = None,
    on_message: Callable[[Message], None] = lambda message: None,
) -> Spooled:
    """Copy stdin into a stream file until its end; what is in the file already stays.

    Lines without a stream go to the first one of the URL. Times are kept (a
    file's begin in 1970); sequences are the file's own, so that each
    message has one of its own whatever the lines say. A killed run leaves what it had written, whole messages and
    perhaps a part of one, which the next run moves aside. When this returns, everything is on the disk.

    What was in the pipe when a run was killed is gone, unless it is sent again; lines that are sent again and had
    been written are in the file twice.

    Args:
        url: ``stdio:///orders``.
        path: the file; made if it is missing.
        broker: other pipes than stdin and stdout.
        options: of the file.
        on_message: told of each message that is in the file.

    Raises:
        InvalidUrlError: the URL names a host, or no stream.
        ProducerBusyError: somebody else spools into the file.
        StreamNotFoundError: there is no folder for it, or stdin is closed.
        StreamRemovedError, FormatError: stdin cannot be read on; what came before is in the file.

    Example:
        >>> import io
        >>> pipes = StdioBroker(io.BytesIO(b"one"), io.BytesIO())
        >>> spool_stdin(StreamUrl.parse("stdio:///orders"), Path("spool.ss"), broker=pipes)
        Spooled(messages=1, unclaimed=0)
    """
    first = spool_url(url, path).streams[0]
    messages = 0
    with (
        FileProducer(spool_url(url, path), options) as producer,
        StdioConsumer(url, broker=broker) as consumer,
    ):
        _sync_folder(path)
        patience: float | None = IDLE_SECONDS
        while True:
            try:
                message = consumer.next(patience)
            except StreamEndedError:
                break
            if message is None:
                producer.flush()
                patience = None
                continue
            patience = IDLE_SECONDS
            stream = first if message.shard.stream == BROADCAST else message.shard.stream
            moment = max(0, message.timestamp_ms)
            producer.send(message.payload or b"", stream=stream, shard=message.shard.id, timestamp_ms=moment)
            messages += 1
            on_message(message)
        unclaimed = consumer.unclaimed
    return Spooled(messages, unclaimed)


def _sync_folder(path: Path) -> None:
    """The file's name has to be on the disk, too."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
