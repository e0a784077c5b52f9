"""The commands for streams alone: ``produce`` and ``peek``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import click

from stream_assets.cli.options import MODES, client_option
from stream_assets.cli.output import print_letter, print_rows, progress_bar
from stream_assets.cli.relay import kept, send_message
from stream_consumers.backend import find_backend
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Consumer
from stream_consumers.create import StreamSource, create_consumer, create_producer
from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Message, Receipt, Shard, now_milliseconds, utc_text
from stream_consumers.options import (
    DEFAULT_BEACON_INTERVAL,
    AutoStreamReset,
    ConsumerMode,
    FileProducerOptions,
    choice,
)
from stream_consumers.readable import printable, shown_bytes
from stream_consumers.redis.ids import parse_sequence
from stream_consumers.urls import StreamUrl


@click.command()
@click.argument("url")
@click.option("--count", type=click.IntRange(min=0), help="Write so many numbered JSON messages.")
@click.option("--from", "lines", type=click.File("rb"), help="Send each line of this file; '-' is stdin.")
@click.option("--json-lines", is_flag=True, help="Each line is a message as peek --json prints it.")
@click.option("--shards", type=click.IntRange(min=1), help="Send to this many shards in turn; 1 by default.")
@click.option("--shard", type=click.IntRange(min=0), help="Send everything to this shard (a Kafka partition).")
@click.option("--key", help="The key of each message (Kafka).")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header of each message.")
@click.option("--beacon-interval", type=int, help="Bytes between the beacons of a stream file; 1048576 by default.")
@click.option("--end", is_flag=True, help="Write the end-of-stream message into a stream file.")
@click.option("--json", "as_json", is_flag=True, help="Print receipts as JSON.")
@client_option()
def produce(
    url: str,
    count: int | None,
    lines: Any,
    json_lines: bool,
    shards: int | None,
    shard: int | None,
    key: str | None,
    headers: tuple[str, ...],
    beacon_interval: int | None,
    end: bool,
    as_json: bool,
    client: ClientConfig,
) -> None:
    """Send messages; each line of stdin is one unless --count or --from is given.

    A JSON line keeps its own key, headers and time; its stream and sequence are not used, and its shard only if neither
    --shard nor --shards is given.

    \b
    Examples:
      stream-assets produce file://orders.ss/orders --count 1000 --shards 2
      cat orders.jsonl | stream-assets produce file://orders.ss/orders
      stream-assets produce kafka://localhost:9092/orders --count 1000 --shards 4
      echo '{"id": 7}' | stream-assets produce kafka://localhost:9092/orders --key 7 --header source=test --shard 2
      stream-assets peek file://old.ss/orders --json | stream-assets produce file://new.ss/orders --json-lines
    """
    given_options = {"--count": count, "--from": lines, "--json-lines": json_lines or None}
    given_options |= {"--shards": shards, "--shard": shard, "--key": key, "--header": headers or None}
    exclusive = [("--count", "--from"), ("--shards", "--shard")]
    for one, other in (*exclusive, *(("--json-lines", option) for option in ("--count", "--key", "--header"))):
        if given_options[one] is not None and given_options[other] is not None:
            raise InvalidOptionError(f"{one} and {other} exclude each other", remedy="Use one of them.")
    target = StreamUrl.parse(url)
    is_file = find_backend(target.protocol).producer_options is FileProducerOptions
    if not is_file and (beacon_interval is not None or end):
        raise InvalidOptionError(f"{target.shown} is no stream file", remedy="Leave out --beacon-interval and --end.")
    interval = DEFAULT_BEACON_INTERVAL if beacon_interval is None else beacon_interval
    options = FileProducerOptions(beacon_interval=interval, end_with_eos=end) if is_file else None
    payloads = _numbered(count) if count is not None else _lines(lines or sys.stdin.buffer)
    given = Message(Shard(""), 0, 0, None, None if key is None else os.fsencode(key), tuple(map(_header, headers)))
    first: dict[Shard, Receipt] = {}
    last: dict[Shard, Receipt] = {}
    several = shards or 1 if shard is None else shard + 1
    opened = create_producer(url, producer_options=options, client=client, shards=several)
    sent = 0
    with opened as producer, progress_bar() as progress:
        task = progress.add_task("sent", total=count)
        for index, payload in enumerate(payloads):
            message = _message(payload, given, is_json=json_lines)
            if kept(producer, message) != message:
                raise InvalidOptionError(
                    f"{target.shown} cannot keep the key, the headers or the missing payload of message {index + 1}",
                    remedy="Leave them out. The messages before it were sent.",
                    sent=index,
                )
            to = message.shard.id if shard is None else shard
            receipt = send_message(producer, message, shard=index % shards if shards else to)
            first.setdefault(receipt.shard, receipt)
            last[receipt.shard] = receipt
            sent = index + 1
            if sent % 1000 == 0:
                progress.update(task, completed=sent)
        producer.flush()
        progress.update(task, completed=sent)
    shown = find_backend(target.protocol).shown_sequence
    rows = [
        {"shard": str(s), "first": shown(first[s].sequence), "last": shown(r.sequence)} for s, r in sorted(last.items())
    ]
    print_rows(rows, as_json=as_json, title=f"sent to {url}")


def _numbered(count: int) -> Iterator[bytes]:
    for index in range(count):
        yield json.dumps({"id": index, "user": f"user-{index % 97}", "amount": round(index % 1000 / 7, 2)}).encode()


def _header(text: str) -> tuple[str, bytes]:
    name, mark, value = text.partition("=")
    if not name or not mark:
        raise InvalidOptionError(f"--header {text!r} has no name or no value", remedy="Write NAME=VALUE.")
    return name, os.fsencode(value)


def _message(line: bytes, given: Message, *, is_json: bool) -> Message:
    """The message of a line: a JSON line has a key and headers of its own, any other has those of the command line."""
    if not is_json:
        return replace(given, payload=line, timestamp_ms=now_milliseconds())
    try:
        return Message.from_json(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise InvalidOptionError(
            f"a line is not JSON: {error}", remedy="Leave --json-lines out, or correct it."
        ) from error


def _lines(stream: Any) -> Iterator[bytes]:
    for line in stream:
        yield line.rstrip(b"\n")


@click.command()
@click.argument("url")
@click.option("--mode", type=click.Choice(MODES), default="real_time", show_default=True)
@click.option("--group", help="The consumer group, for modes that have one.")
@click.option("--start", default="earliest", show_default=True, help="earliest, latest, a sequence, or an ISO time.")
@click.option("--max", "limit", type=click.IntRange(min=1), help="Stop after so many messages.")
@click.option("--follow", is_flag=True, help="Wait for more at the end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@client_option()
def peek(
    url: str,
    mode: str,
    group: str | None,
    start: str,
    limit: int | None,
    follow: bool,
    as_json: bool,
    client: ClientConfig,
) -> None:
    """Print messages; nothing is committed. Dead letters go to stderr.

    With --mode resumable and --group (Kafka) it begins where the group is.

    \b
    Examples:
      stream-assets peek file://orders.ss/orders --max 5
      stream-assets peek file://orders.ss/orders --start 2026-11-01T00:00:00Z --json
      stream-assets peek kafka://localhost:9092/orders --max 5
    """
    shown = find_backend(StreamUrl.parse(url).protocol).shown_sequence
    if mode != ConsumerMode.REAL_TIME.value and StreamSource(url, client=client).may_be_claimed:
        raise InvalidOptionError(
            f"a look as a member of the group would take its entries away: --mode {mode}",
            remedy="Leave --mode out, and begin with --start at a sequence that stream-assets lag shows.",
        )
    is_latest = start == "latest"
    reset = AutoStreamReset.LATEST if is_latest else AutoStreamReset.EARLIEST
    opened = create_consumer(
        url,
        mode=choice(ConsumerMode, mode, option="--mode"),
        group=group,
        reset=reset,
        live=follow or is_latest,
        client=client,
        on_dead_letter=print_letter,
    )
    with opened as consumer:
        go_to(consumer, start)
        for index, message in enumerate(consumer, 1):
            _print_message(message, shown(message.sequence), as_json=as_json)
            if index == limit:
                break


def go_to(consumer: Consumer, start: str) -> None:
    """Move a consumer to where ``--start`` says.

    Raises:
        InvalidOptionError: that is no place.
    """
    if start in ("earliest", "latest"):
        return
    if (sequence := parse_sequence(start)) is not None:
        consumer.rewind(sequence)
        return
    try:
        moment = datetime.fromisoformat(start.replace("Z", "+00:00"))
    except ValueError as error:
        raise InvalidOptionError(
            f"--start {start!r} is no place",
            remedy="Use earliest, latest, a sequence, or a time like 2026-11-01T12:00.",
        ) from error
    consumer.seek(moment)


def _print_message(message: Message, sequence: int, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(message.to_json()))
        return
    place = f"{message.shard.stream} | {sequence} | {message.shard.id}"
    key = "" if message.key is None else f" key={shown_bytes(message.key)}"
    headers = "".join(f" {name}={shown_bytes(value)}" for name, value in message.headers)
    click.echo(f"[{utc_text(message.timestamp_ms)} | {place}]{printable(key + headers)} {shown_bytes(message.payload)}")
