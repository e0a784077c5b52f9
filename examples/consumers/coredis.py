"""coredis' consumers: a member of a group over two Redis streams, its backlog after a restart, and one without a group.

make redis                                          # in another terminal: a server at localhost:6379
python examples/consumers/coredis.py [URL]          # redis://localhost:6379/
"""

import sys
from uuid import uuid4

from stream_consumers import EntryConsumer, GroupEntryConsumer, create_producer


def main(server: str) -> None:
    one, two = (f"{name}-{uuid4().hex[:8]}" for name in ("one", "two"))
    url = f"{server.rstrip('/')}/{one},{two}"
    with create_producer(url) as producer:
        for number in range(3):
            producer.send(b"%d" % number, stream=one)
            producer.send(b"%d" % number, stream=two)

    # Streams take turns. What get_entry returns is pending until it is acknowledged.
    with GroupEntryConsumer(url, group="billing", consumer="me") as consumer:
        for count in range(4):
            found = consumer.get_entry(timeout_seconds=10)
            if found is None:
                raise SystemExit("no entry arrived within 10 seconds")
            stream, entry = found
            print("got:", stream.split("-")[0], entry.fields)
            if count < 2:
                consumer.acknowledge(stream, entry)

    # After a restart of the process: first the entries that it got and did not acknowledge, then new ones.
    with GroupEntryConsumer(url, group="billing", consumer="me", start_from_backlog=True) as consumer:
        for stream, entry in consumer:
            print("then:", stream.split("-")[0], entry.field_values[b"msg"].decode())
            consumer.acknowledge(stream, entry)
        print("nothing more:", consumer.get_entry())

    # Without a group: from an id on, or from the end; the server keeps no position.
    with EntryConsumer(url, identifiers={one: "0-0"}, buffer_size=10) as consumer:
        print("without a group:", [(stream.split("-")[0], e.field_values[b"msg"].decode()) for stream, e in consumer])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "redis://localhost:6379/")
