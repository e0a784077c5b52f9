"""Faust's consumer: it commits only the longest run of finished messages, so that a crash loses none.

python examples/consumers/faust.py
"""

from stream_consumers import Message, TrackedConsumer, TrackingOptions, create_consumer, create_producer
from stream_consumers.memory import MemoryCommitter
from stream_consumers.tracking.livelock import LivelockOptions

URL = "memory://shop/orders"
OPTIONS = TrackingOptions(
    commit_interval_seconds=0.05,
    buffer_size=100,
    close_seconds=0,
    livelock=LivelockOptions(commit_timeout_seconds=60),
)


def start() -> TrackedConsumer:
    """A consumer that starts at the committed position of its group, and commits in the background."""
    consumer = TrackedConsumer(create_consumer(URL), MemoryCommitter(URL, "billing"), options=OPTIONS)
    consumer.seek_to_committed()
    return consumer


def work(consumer: TrackedConsumer, message: Message) -> None:
    """Acknowledge the message unless the block raises an error; then it stays unfinished."""
    with consumer.processing(message):
        if message.text() == "3":
            raise ValueError("this order is not ready")


def main() -> None:
    with create_producer(URL) as producer:
        for number in range(6):
            producer.send(b"%d" % number)
    with start() as consumer:
        for _, message in consumer.getmany(timeout_seconds=10):
            try:
                work(consumer, message)
            except ValueError as error:
                print("failed:", message.text(), error)
        consumer.commit()
        # 4 and 5 are finished, too, but the position stays before 3, which is not.
        print("unfinished:", [message.text() for message in consumer.unacked])
        print("livelocks:", consumer.livelocks)
    # The consumer closed without waiting, as in a crash. The next one starts at the committed position.
    with start() as consumer:
        again = [message for _, message in consumer.getmany(timeout_seconds=10)]
        print("delivered again:", [message.text() for message in again])
        for message in again:
            consumer.ack(message)
    positions = MemoryCommitter(URL, "billing").committed()
    print("committed:", {str(shard): position for shard, position in positions.items()})


if __name__ == "__main__":
    main()
