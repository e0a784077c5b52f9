"""Faust's consumer: what is committed is behind the longest run of finished messages; a crash loses none.

python examples/consumers/faust.py
"""

from stream_consumers import (
    LivelockWatch,
    MemoryBatchSource,
    MemoryCommitter,
    Message,
    ShardEnd,
    StreamUrl,
    TrackedConsumer,
    TrackingOptions,
    create_consumer,
    create_producer,
)

URL = StreamUrl.parse("memory://shop/orders")
OPTIONS = TrackingOptions(commit_interval_seconds=0.05, commit_every=1000, buffer_size=100, close_seconds=0)


def start() -> TrackedConsumer:
    """A consumer that goes on where the group is, and commits in the background."""
    consumer = TrackedConsumer(create_consumer(URL), MemoryCommitter(URL, "billing"), options=OPTIONS)
    consumer.seek_to_committed()
    return consumer


def work(consumer: TrackedConsumer, message: Message) -> None:
    """Acknowledged if the block ends well; what raises stays unfinished."""
    with consumer.processing(message):
        if message.text() == "3":
            raise ValueError("this order is not ready")


def main() -> None:
    with create_producer(URL) as producer:
        for number in range(6):
            producer.send(b"%d" % number)
    with start() as consumer:
        for message in consumer.get_many(6, timeout_seconds=10):
            try:
                work(consumer, message)
            except ValueError as error:
                print("failed:", message.text(), error)
        consumer.commit()
        # 4 and 5 are finished, too, but 3 is not: it holds the position back.
        print("unfinished:", [message.text() for message in consumer.unacked])
        with MemoryBatchSource(URL) as source:
            ends = {shard: ShardEnd(extent.end, extent.end) for shard, extent in source.extents().items()}
        print("livelocks:", LivelockWatch(consumer.progress, lambda: ends).check())
    # Leaving did not wait: that is what a crash is like. The next one begins at what is committed.
    with start() as consumer:
        again = consumer.get_many(6, timeout_seconds=10)
        print("delivered again:", [message.text() for message in again])
        for message in again:
            consumer.ack(message)
    positions = MemoryCommitter(URL, "billing").committed()
    print("committed:", {str(shard): position for shard, position in positions.items()})


if __name__ == "__main__":
    main()
