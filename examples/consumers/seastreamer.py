"""SeaStreamer's consumer: connect, read two streams, iterate, seek and rewind.

python examples/consumers/seastreamer.py [URL]     memory:// by default; file://fruit.ss/, redis://localhost:6379/, …
"""

import asyncio
import sys
from datetime import datetime, timezone

from stream_consumers import AsyncConsumer, Edge, FileCreation, FileProducerOptions, Streamer, connect


def produce(streamer: Streamer) -> None:
    """Send ten messages in turn to two streams, a second apart."""
    with streamer.create_producer() as producer:
        for number in range(10):
            stream, moment = ("apples", "pears")[number % 2], 1_700_000_000_000 + 1000 * number
            producer.send(b"%d" % number, stream=stream, timestamp_ms=moment)


async def iterate(streamer: Streamer) -> None:
    """Read with asyncio; ``*`` (SEA_STREAMER_WILDCARD) means all existing streams."""
    async with AsyncConsumer(streamer.create_consumer("*", live=False)) as everything:
        print("asynchronous:", sorted([message.text() async for message in everything]))


def main(url: str) -> None:
    is_file = url.startswith("file:")
    options = FileProducerOptions(creation=FileCreation.IF_MISSING, end_with_eos=True) if is_file else None
    with connect(url, producer_options=options) as streamer:
        produce(streamer)
        with streamer.create_consumer(["apples", "pears"]) as fruit:
            first = fruit.next(timeout_seconds=10)
            if first is None:
                raise SystemExit("no message arrived within 10 seconds")
            print("next:", first.shard, first.text())
        with streamer.create_consumer("apples", live=False) as apples:
            messages = list(apples)
            print("all:", [message.text() for message in messages])
            apples.seek(datetime.fromtimestamp(1_700_000_004, timezone.utc))
            print("seek to a time:", [message.text() for message in apples])
            apples.rewind(messages[3].sequence)
            print("rewind to a sequence:", [message.text() for message in apples])
            apples.rewind(Edge.BEGINNING)
            print("rewind to the beginning:", len(list(apples)), "messages")
        asyncio.run(iterate(streamer))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memory://fruit/")
