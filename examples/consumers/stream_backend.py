"""eventbus-core's StreamBackend: a subscription with retries, dead letters and a graceful shutdown.

python examples/consumers/stream_backend.py [URL]   # in memory by default; redis://localhost:6379/
"""

import sys
import threading
from uuid import uuid4

from stream_consumers import (
    EventMessage,
    MemoryBackend,
    ReceivedMessage,
    RedisBackend,
    RetryPolicy,
    StreamBackend,
    Subscription,
    SubscriptionConfig,
)
from stream_consumers.subscription.backend import DecodedEntry

handled: list[str] = []
is_last = threading.Event()


def handle(received: ReceivedMessage) -> None:
    """Return to acknowledge a message; raise an error to retry it; nack it to make it a dead letter."""
    order, attempt = received.message.payload.decode(), received.delivery.attempt
    handled.append(f"{order} {attempt}")
    if order == "flaky" and attempt < 2:
        raise TimeoutError("the database is busy")
    if order == "broken":
        received.nack("the customer does not exist")
    if order == "last":
        is_last.set()


def main(url: str | None) -> None:
    backend: StreamBackend = RedisBackend(url) if url else MemoryBackend()
    stream = f"orders-{uuid4().hex[:8]}"
    config = SubscriptionConfig(
        stream=stream,
        group="billing",
        dead_letter_stream=f"{stream}.dead",
        retry=RetryPolicy(max_retries=3, backoff_seconds=0.05),
    )
    backend.publish_batch(stream, [EventMessage(order) for order in (b"good", b"flaky", b"broken", b"last")])
    with Subscription(backend, config, handle) as subscription:
        is_last.wait(30)
        # The exit waits for the handlers, sends their acknowledgements and leaves the group.
    print("handled, in order:", ", ".join(handled))
    print("still running:", subscription.is_running)
    backend.create_group(f"{stream}.dead", "looking", "0")
    for entry in backend.read_new(f"{stream}.dead", "looking", "me", 10, 0):
        if isinstance(entry, DecodedEntry):
            print("dead letter:", entry.message.payload.decode(), "-", entry.message.headers["dead-letter-reason"])
    backend.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
