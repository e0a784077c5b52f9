"""The command ``relay``: messages from one stream to another, whatever the backends are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import click

from stream_assets.cli.options import client_option
from stream_assets.cli.output import print_letter, progress_bar, tell
from stream_consumers.backend import find_backend
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Consumer, Producer
from stream_consumers.create import create_consumer, create_producer
from stream_consumers.errors import InvalidOptionError, StreamEndedError
from stream_consumers.kafka.producer import KafkaProducer
from stream_consumers.messages import Message, Receipt, Shard
from stream_consumers.redis.producer import RedisProducer
from stream_consumers.stdio.consumer import StdioConsumer
from stream_consumers.stdio.lines import BROADCAST
from stream_consumers.stdio.producer import StdioProducerOptions
from stream_consumers.urls import StreamUrl
from stream_consumers.wording import counted

FLUSH_MESSAGES = 5000
IDLE_SECONDS = 0.05


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--live/--no-live", default=False, show_default=True, help="Wait for more at the end of the source.")
@click.option(
    "--shards", type=click.IntRange(min=1), help="A stream that is not in TARGET is made with so many (Kafka, Redis)."
)
@click.option("--bare", is_flag=True, help="Write payloads without headers to stdout, for tools like jq.")
@client_option("--source-client", of="source's")
@client_option("--target-client", of="target's")
def relay(
    source: str,
    target: str,
    live: bool,
    shards: int | None,
    bare: bool,
    source_client: ClientConfig,
    target_client: ClientConfig,
) -> None:
    """Send every message of SOURCE to TARGET, from the beginning to the end.

    Streams, shards and times are kept; sequences are the target's. One stream may go to one of another name; lines
    without a stream go to the first stream of TARGET. A pipe ends when it is closed. If it fails, it tells what was
    read and is not known to have arrived; run again, it begins at the beginning.

    \b
    Examples:
      producer | stream-assets relay stdio:///orders redis://localhost:6379/orders
      stream-assets relay --shards 4 file://orders.ss/orders redis://localhost:6379/orders
      stream-assets relay file://orders.ss/orders stdio:///orders --bare | jq .id
      stream-assets relay --live kafka://localhost:9092/orders file://copy.ss/orders
    """
    from_url, to_url = StreamUrl.parse(source), StreamUrl.parse(target)
    find_backend(from_url.protocol)
    backend = find_backend(to_url.protocol)
    to_streams = routes(from_url, to_url)
    if bare and backend.producer_options is not StdioProducerOptions:
        raise InvalidOptionError(f"--bare is for stdio, not for {to_url.shown}", remedy="Leave it out.")
    if shards is not None and not backend.creates_shards:
        raise InvalidOptionError(f"--shards is for Kafka and Redis, not for {to_url.shown}", remedy="Leave it out.")
    options = StdioProducerOptions(bare=True) if bare else None
    with (
        create_consumer(from_url, live=live, client=source_client, on_dead_letter=print_letter) as consumer,
        create_producer(to_url, client=target_client, producer_options=options, shards=shards) as producer,
    ):
        sent = Relayed(producer)
        try:
            _relay(consumer, sent, to_streams)
        except BrokenPipeError:
            raise
        except BaseException as error:
            try:
                if isinstance(error, KeyboardInterrupt):
                    # The usual end of --live: what can arrive does.
                    sent.flush()
            finally:
                tell(sent.shortfall(), style="red")
                if isinstance(consumer, StdioConsumer) and consumer.waiting:
                    tell(f"read from stdin and not sent: {counted(consumer.waiting, 'more line')}", style="red")
            raise
    for shard, receipt in sorted(sent.receipts.items()):
        tell(f"{shard}: sent up to sequence {receipt.sequence}")
    if sent.stripped:
        tell(f"{counted(sent.stripped, 'message')} with a key, headers or no payload, which the target cannot keep")
    if isinstance(consumer, StdioConsumer) and consumer.unclaimed:
        tell(f"not sent: {counted(consumer.unclaimed, 'line')} of other streams")


def routes(source: StreamUrl, target: StreamUrl) -> Mapping[str, str]:
    """Which stream of the target each stream of the source goes to.

    Raises:
        InvalidUrlError: one of them names no stream.
        InvalidOptionError: a stream of the source has no place, or is its own.

    Example:
        >>> routes(StreamUrl.parse("stdio:///orders"), StreamUrl.parse("memory://shop/sales"))
        {'orders': 'sales', 'broadcast': 'sales'}
    """
    from_streams, to_streams = source.required_streams(), target.required_streams()
    if len(from_streams) == len(to_streams) == 1:
        found = {from_streams[0]: to_streams[0]}
    else:
        found = {stream: stream for stream in from_streams}
    missing = sorted(set(found.values()) - set(to_streams))
    if missing:
        raise InvalidOptionError(
            f"{target.shown} has no stream for {', '.join(missing)} of {source.shown}",
            remedy="Name the same streams in both, or one in each.",
        )
    is_pipe = find_backend(source.protocol).is_pipe
    if is_one_place(source, target) and any(stream == place for stream, place in found.items()):
        raise InvalidOptionError(f"{target.shown} would be sent to itself", remedy="Name another stream or place.")
    if is_pipe:
        found.setdefault(BROADCAST, BROADCAST if BROADCAST in to_streams else to_streams[0])
    return found


def is_one_place(source: StreamUrl, target: StreamUrl) -> bool:
    """Whether both are in one file, or at one broker; two pipes are two."""
    is_pipe = find_backend(source.protocol).is_pipe
    return not is_pipe and source.protocol == target.protocol and _place(source) == _place(target)


def _place(url: StreamUrl) -> object:
    """Where it is; a file has one place, however its path is written."""
    return os.path.realpath(url.path) if url.protocol == "file" else sorted(url.nodes)


@dataclass
class Relayed:
    """What a run has sent, and what of it is known to have arrived."""

    producer: Producer
    done: int = 0
    stripped: int = 0
    unsent: dict[Shard, list[int]] = field(default_factory=dict)
    receipts: dict[Shard, Receipt] = field(default_factory=dict)

    def send(self, message: Message, stream: str) -> None:
        """Send a message to a stream of the target."""
        self.unsent.setdefault(message.shard, []).append(message.sequence)
        receipt = send_message(self.producer, message, stream=stream)
        self.stripped += kept(self.producer, message) != message
        self.receipts[receipt.shard] = receipt

    def flush(self) -> None:
        """Wait until everything sent has arrived."""
        self.producer.flush()
        self.done += sum(map(len, self.unsent.values()))
        self.unsent.clear()

    def shortfall(self) -> str:
        """What arrived, and what was read and is not known to have arrived."""
        lines = [f"{counted(self.done, 'message')} arrived"]
        lines += [
            f"read and not known to have arrived: {len(sequences)} of {shard}, "
            f"sequences {min(sequences)} to {max(sequences)}"
            for shard, sequences in sorted(self.unsent.items())
        ]
        return "\n".join(lines)


def _relay(consumer: Consumer, sent: Relayed, to_streams: Mapping[str, str]) -> None:
    """Send everything until the source ends, and flush: often, and whenever there is nothing to read."""
    waiting = 0
    with progress_bar() as progress:
        task = progress.add_task("relayed", total=None)
        has_ended = False
        while not has_ended:
            message = None
            try:
                message = consumer.next(IDLE_SECONDS if waiting else 1.0)
            except StreamEndedError:
                has_ended = True
            if message is not None:
                sent.send(message, to_streams[message.shard.stream])
                waiting += 1
            if has_ended or (waiting and (message is None or waiting >= FLUSH_MESSAGES)):
                sent.flush()
                waiting = 0
                progress.update(task, completed=sent.done)


def kept(producer: Producer, message: Message) -> Message:
    """As much of a message as the target of a producer can hold of its key, its headers and a missing payload."""
    if isinstance(producer, KafkaProducer):
        return message
    headers = message.headers if isinstance(producer, RedisProducer) else ()
    held = tuple((name, value) for name, value in headers if value is not None)
    return replace(message, payload=message.payload or b"", key=None, headers=held)


def send_message(
    producer: Producer, message: Message, *, stream: str | None = None, shard: int | None = None
) -> Receipt:
    """Send a message with its time, its key and its headers, as far as they are :func:`kept`.

    Args:
        producer: sends it.
        message: of any stream.
        stream: where it goes; the first stream of the producer by default.
        shard: where it goes; that of the message by default.
    """
    sent = kept(producer, message)
    payload: Any = sent.payload
    more: dict[str, Any] = {"headers": sent.headers} if sent.headers else {}
    if sent.key is not None:
        more["key"] = sent.key
    number = message.shard.id if shard is None else shard
    return producer.send(payload, stream=stream, shard=number, timestamp_ms=message.timestamp_ms, **more)
