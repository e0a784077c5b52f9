"""The contract suite: what a backend's author runs with pytest to prove the backend.

Extend the contracts in a test module, and give them a fixture ``harness``::

    import uuid
    import pytest
    from stream_consumers.testing import BatchSourceContract, ConsumerContract, Harness, ProducerContract

    @pytest.fixture
    def harness():
        return Harness("pulsar", create=lambda folder: f"pulsar://localhost:6650/{uuid.uuid4().hex}/")

    class TestConsumer(ConsumerContract): ...
    class TestProducer(ProducerContract): ...
    class TestBatchSource(BatchSourceContract): ...

The backends of this package run the same tests. They need pytest, as the extra ``testing`` has it.
"""

import pytest

# Before they are imported, so that a failed assertion shows what it compared.
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
