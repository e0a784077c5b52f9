"""The contract suite: pytest tests that verify a backend.

In a test module, extend the contracts and provide a fixture ``harness``::

    import uuid
    import pytest
    from stream_consumers.testing import BatchSourceContract, ConsumerContract, Harness, ProducerContract

    @pytest.fixture
    def harness():
        return Harness("pulsar", create=lambda folder: f"pulsar://localhost:6650/{uuid.uuid4().hex}/")

    class TestConsumer(ConsumerContract): ...
    class TestProducer(ProducerContract): ...
    class TestBatchSource(BatchSourceContract): ...

The backends of this package run the same tests. They require pytest, which the extra ``testing`` installs.
"""

import pytest

# Register the modules before their import, so that a failed assertion shows the compared values.
pytest.register_assert_rewrite(
    "stream_consumers.testing.batch_source_contract",
    "stream_consumers.testing.consumer_contract",
)

from stream_consumers.testing.batch_source_contract import BatchSourceContract  # noqa: E402
from stream_consumers.testing.consumer_contract import ConsumerContract, ProducerContract  # noqa: E402
from stream_consumers.testing.harness import SHARDS, STREAMS, Harness, Stream  # noqa: E402

__all__ = [
    "SHARDS",
    "STREAMS",
    "BatchSourceContract",
    "ConsumerContract",
    "Harness",
    "ProducerContract",
    "Stream",
]
