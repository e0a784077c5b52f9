"""``stdio://``: the lines of stdin and stdout as a backend."""

from __future__ import annotations

from stream_consumers.backend import Backend, ConsumerOptions
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Consumer, Producer
from stream_consumers.stdio.consumer import CONSUMER_MODES, StdioConsumer
from stream_consumers.stdio.producer import StdioProducer, StdioProducerOptions
from stream_consumers.urls import StreamUrl


class StdioStreams(Backend):
    """Lines of stdin and stdout."""

    consumer_modes = CONSUMER_MODES
    producer_options = StdioProducerOptions
    is_pipe = True

    def open_consumer(self, url: StreamUrl, options: ConsumerOptions) -> Consumer:
        """See :meth:`stream_consumers.backend.Backend.open_consumer`."""
        return StdioConsumer(url, mode=options.mode, group=options.group, reset=options.reset)

    def open_producer(
        self, url: StreamUrl, *, client: ClientConfig, options: object | None, shards: int | None
    ) -> Producer:
        """See :meth:`stream_consumers.backend.Backend.open_producer`."""
        return StdioProducer(url, options if isinstance(options, StdioProducerOptions) else None)
