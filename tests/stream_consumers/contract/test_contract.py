"""Our own backends keep the contract that others prove themselves with."""

from __future__ import annotations

from stream_consumers.batches import expected_counts
from stream_consumers.create import open_batch_source
from stream_consumers.testing import BatchSourceContract, ConsumerContract, ProducerContract
from stream_consumers.testing.batch_source_contract import plan_all
from stream_consumers.testing.harness import Stream, round_robin


class TestConsumer(ConsumerContract):
    """See :class:`stream_consumers.testing.ConsumerContract`."""


class TestProducer(ProducerContract):
    """See :class:`stream_consumers.testing.ProducerContract`."""


class TestBatchSource(BatchSourceContract):
    """See :class:`stream_consumers.testing.BatchSourceContract`."""

    def test_a_clean_plan_is_written_in_one_pass(self, stream: Stream) -> None:
        """Others need not know what their splits hold; ours do."""
        stream.send(round_robin(30, shards=3))
        with open_batch_source(stream.url()) as source:
            assert set((expected_counts(plan_all(source).splits) or {}).values()) == {10}
