"""Compares a thousand shards with ten on every backend: the cost of a message, and of the plan of a batch.

``python -m benchmarks.shards --messages 20000 --shards 10 1000`` sends the same messages to the shards in turn.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from stream_consumers.batches import BatchSource, Range, Split
from stream_consumers.consumer import ProcessCommitter
from stream_consumers.create import create_consumer, create_producer, open_batch_source
from stream_consumers.messages import Shard
from stream_consumers.options import AutoStreamReset, FileProducerOptions, Limits
from stream_consumers.tracking.consumer import TrackedConsumer
from stream_consumers.tracking.options import TrackingOptions
from tests.support.kafka_broker import kafka_broker
from tests.support.redis_server import redis_server
from tests.support.topics import create_topic

PAYLOAD = b"x" * 100
# The number of moves between shards; small, because each move costs a request on some backends.
MOVES = 20


class Measurement:
    """Measurements of one stream with a number of shards.

    Args:
        url: the stream.
        messages: the number of messages to send.
        shards: the number of shards, which get the messages in turn.
    """

    def __init__(self, url: str, *, messages: int, shards: int) -> None:
        self.url, self.messages, self.shards = url, messages, shards
        self.source: BatchSource | None = None
        self.splits: list[Split] = []

    def produce(self) -> None:
        """Send all messages with one producer, and flush."""
        with create_producer(self.url, shards=self.shards) as producer:
            for number in range(self.messages):
                producer.send(PAYLOAD, shard=number % self.shards)

    def replay(self) -> None:
        """Read all messages with a consumer."""
        with create_consumer(self.url, live=False) as consumer:
            assert sum(1 for _ in consumer) == self.messages

    def track(self) -> None:
        """Read and acknowledge all messages, and commit after each thousand."""
        options = TrackingOptions(commit_interval_seconds=None, commit_every=None, buffer_size=self.messages * 2)
        with TrackedConsumer(create_consumer(self.url, live=False), ProcessCommitter(), options=options) as consumer:
            for index, message in enumerate(consumer):
                consumer.ack(message)
                if index % 1000 == 999:
                    consumer.commit()

    def follow(self) -> None:
        """Wait for a live message that is sent to one shard, then to the next."""
        with (
            create_consumer(self.url, reset=AutoStreamReset.LATEST) as consumer,
            create_producer(self.url, shards=self.shards) as producer,
        ):
            for number in range(MOVES):
                producer.send(PAYLOAD, shard=number % self.shards)
                producer.flush()
                assert consumer.next(60) is not None

    def measure_extents(self) -> None:
        """Get the extents of the shards."""
        self.source = open_batch_source(self.url)
        assert len(self.source.extents()) == min(self.shards, self.messages)

    def plan(self) -> None:
        """Plan one batch of all messages."""
        assert self.source is not None
        gaps: dict[Shard, Range] = {s: Range(e.start, e.end) for s, e in self.source.extents().items()}
        plan = self.source.plan(gaps, limits=Limits(self.messages * 2, 2**40), parallelism=2)
        assert plan is not None
        self.splits = list(plan.splits)

    def read(self) -> None:
        """Read the splits of that batch, as executors do."""
        assert sum(batch.num_rows for split in self.splits for batch in split.read()) >= self.messages
        assert self.source is not None
        self.source.close()

    def run(self) -> dict[str, float]:
        """Run all steps, and return the seconds of each."""
        steps: dict[str, Callable[[], None]] = {
            "produce": self.produce,
            "replay": self.replay,
            "track and acknowledge": self.track,
            "extents": self.measure_extents,
            "plan": self.plan,
            "read splits": self.read,
            f"follow {MOVES} messages": self.follow,
        }
        taken = {}
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            taken[name] = round(time.perf_counter() - began, 3)
        return taken


@contextmanager
def stream_urls(folder: Path, backend: str) -> Iterator[Callable[[int], str]]:
    """Run the server of the backend, and yield a function from a number of shards to the URL of an empty stream."""
    if backend == "memory":
        yield lambda shards: f"memory://shards-{shards}/orders"
    elif backend == "file":
        yield lambda shards: _new_file(folder / f"shards-{shards}.ss")
    elif backend == "redis":
        with redis_server(folder) as address:
            yield lambda shards: f"redis://{address}/orders{shards}"
    else:
        with kafka_broker(folder) as (address, _):
            yield lambda shards: f"kafka://{address}/{create_topic(address, shards)}"


def _new_file(path: Path) -> str:
    url = f"file://{path}/orders"
    create_producer(url, producer_options=FileProducerOptions()).close()
    return url


def main(arguments: list[str] | None = None) -> Mapping[str, object]:
    """Measure all backends, and print a JSON object for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--shards", type=int, nargs="+", default=[10, 1000])
    parser.add_argument("--backends", nargs="+", default=["memory", "file", "redis", "kafka"])
    options = parser.parse_args(arguments)
    report: dict[str, object] = {"messages": options.messages}
    for backend in options.backends:
        with tempfile.TemporaryDirectory(prefix="bench-") as scratch, stream_urls(Path(scratch), backend) as new_url:
            taken = {
                shards: Measurement(new_url(shards), messages=options.messages, shards=shards).run()
                for shards in options.shards
            }
        report[backend] = {
            step: {f"{shards} shards": taken[shards][step] for shards in options.shards}
            for step in taken[options.shards[0]]
        }
        print(json.dumps({backend: report[backend]}), flush=True)
    return report


if __name__ == "__main__":
    main()
