"""``file://``: stream files as a backend."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from stream_consumers.backend import Backend, ConsumerOptions
from stream_consumers.batches import BatchSource, Membership
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Consumer
from stream_consumers.file.batches import FileBatchSource
from stream_consumers.file.consumer import FileConsumer
from stream_consumers.file.producer import FileProducer
from stream_consumers.file.scanner import FrameScanner
from stream_consumers.in_process_groups import SharedGroupConsumer
from stream_consumers.messages import INTERNAL_KEY
from stream_consumers.options import ConsumerMode, FileCreation, FileProducerOptions, Modes
from stream_consumers.producer import Producer
from stream_consumers.urls import StreamUrl


class FileStreams(Backend):
    """Stream files (``.ss``)."""

    consumer_modes = Modes(of="consumers of files", available=(ConsumerMode.REAL_TIME, ConsumerMode.LOAD_BALANCED))
    batch_modes = Modes(
        of="batches of files", available=(ConsumerMode.RESUMABLE,), host_groups={ConsumerMode.RESUMABLE: "r"}
    )
    producer_options = FileProducerOptions
    has_one_writer = True
    kind = "file"

    def open_consumer(self, url: StreamUrl, options: ConsumerOptions) -> Consumer:
        """See :meth:`stream_consumers.backend.Backend.open_consumer`."""
        reset, live = options.reset, options.live
        open_standalone = partial(FileConsumer, url, reset=reset, live=live, on_dead_letter=options.on_dead_letter)
        if options.group is None:
            return open_standalone()
        # Members of a group may write the path of the same file differently.
        resolved = replace(url, nodes=(str(Path(url.path).resolve()),))
        return SharedGroupConsumer(resolved, group=options.group, reset=reset, live=live, open_consumer=open_standalone)

    def open_producer(
        self, url: StreamUrl, *, client: ClientConfig, options: object | None, shards: int | None
    ) -> Producer:
        """See :meth:`stream_consumers.backend.Backend.open_producer`."""
        return FileProducer(url, options if isinstance(options, FileProducerOptions) else None)

    def open_batch_source(
        self, url: StreamUrl, *, mode: ConsumerMode, client: ClientConfig, membership: Membership | None
    ) -> BatchSource:
        """See :meth:`stream_consumers.backend.Backend.open_batch_source`."""
        return FileBatchSource(url)

    def connect(self, url: StreamUrl, client: ClientConfig, options: object | None) -> FileProducerOptions:
        """Create the file if the options ask for that; without options it must exist.

        Raises:
            StreamNotFoundError, StreamExistsError, FormatError: the file is missing, exists against the options, or is
                not a stream file.
        """
        wanted = options if isinstance(options, FileProducerOptions) else None
        wanted = wanted or FileProducerOptions(creation=FileCreation.NEVER)
        is_new = wanted.creation is FileCreation.ALWAYS_NEW or not Path(url.path).exists()
        if is_new and wanted.creation is not FileCreation.NEVER:
            # No message is written, so any stream will do.
            FileProducer(replace(url, streams=(INTERNAL_KEY,)), replace(wanted, end_with_eos=False)).close()
        FrameScanner(Path(url.path)).close()
        return replace(wanted, creation=FileCreation.NEVER)
