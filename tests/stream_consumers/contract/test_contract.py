"""Our own backends keep the contract that others prove themselves with."""

from __future__ import annotations

from stream_consumers.testing import BatchSourceContract, ConsumerContract, ProducerContract


class TestConsumer(ConsumerContract):
    """See :class:`stream_consumers.testing.ConsumerContract`."""


class TestProducer(ProducerContract):
    """See :class:`stream_consumers.testing.ProducerContract`."""


class TestBatchSource(BatchSourceContract):
    """See :class:`stream_consumers.testing.BatchSourceContract`."""
