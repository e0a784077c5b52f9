"""Opens a stream URL with the backend of its protocol."""

from __future__ import annotations

from stream_consumers.batches import BatchSource
from stream_consumers.consumer import Consumer, DeadLetterObserver, Producer
from stream_consumers.errors import InvalidUrlError
from stream_consumers.file_batches import FileBatchSource
from stream_consumers.file_consumer import FileConsumer, log_dead_letter
from stream_consumers.file_producer import FileProducer
from stream_consumers.memory import MemoryBatchSource, MemoryConsumer, MemoryProducer
from stream_consumers.options import AutoStreamReset, FileProducerOptions
from stream_consumers.urls import StreamUrl

PROTOCOLS = ("file", "memory")


def _unknown(url: StreamUrl) -> InvalidUrlError:
    return InvalidUrlError(
        f"{url}: there is no backend for {url.protocol!r}", remedy=f"Use one of: {', '.join(PROTOCOLS)}."
    )


def open_batch_source(url: str | StreamUrl) -> BatchSource:
    """The batch source of a URL; close it when done.

    Raises:
        InvalidUrlError: unknown protocol, no stream.
        StreamNotFoundError, FormatError: as the backend says.

    Example:
        >>> with open_batch_source("memory://example/clicks") as source:
        ...     dict(source.extents())
        {}
    """
    parsed = StreamUrl.parse(url) if isinstance(url, str) else url
    parsed.required_streams()
    if parsed.protocol == "file":
        return FileBatchSource(parsed)
    if parsed.protocol == "memory":
        return MemoryBatchSource(parsed)
    raise _unknown(parsed)


def create_consumer(
    url: str | StreamUrl,
    *,
    reset: AutoStreamReset = AutoStreamReset.EARLIEST,
    live: bool = True,
    on_dead_letter: DeadLetterObserver = log_dead_letter,
) -> Consumer:
    """A consumer of the streams of a URL.

    Args:
        url: where to read.
        reset: where to start.
        live: wait at the end; without it the stream ends there.
        on_dead_letter: told of what cannot be used as a message.

    Raises:
        InvalidUrlError: unknown protocol, no stream.
    """
    parsed = StreamUrl.parse(url) if isinstance(url, str) else url
    if parsed.protocol == "file":
        return FileConsumer(parsed, reset=reset, live=live, on_dead_letter=on_dead_letter)
    if parsed.protocol == "memory":
        return MemoryConsumer(parsed, reset=reset, live=live)
    raise _unknown(parsed)


def create_producer(url: str | StreamUrl, *, file_options: FileProducerOptions | None = None) -> Producer:
    """A producer for the streams of a URL.

    Raises:
        InvalidUrlError: unknown protocol, no stream.
    """
    parsed = StreamUrl.parse(url) if isinstance(url, str) else url
    if parsed.protocol == "file":
        return FileProducer(parsed, file_options)
    if parsed.protocol == "memory":
        return MemoryProducer(parsed)
    raise _unknown(parsed)
