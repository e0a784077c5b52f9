"""The commands that only use streams: ``produce``, ``peek``, ``relay`` and ``infer``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from stream_assets.cli.options import MODES, client_option, storage_option
from stream_assets.cli.output import err, inform, print_dead_letter, print_rows, progress_bar
from stream_consumers.backend import find_backend
from stream_consumers.client_config import ClientConfig
from stream_consumers.consumer import Consumer
from stream_consumers.create import StreamSource, create_consumer, create_producer
from stream_consumers.display import counted, printable, shown_bytes
from stream_consumers.errors import (
    FormatError,
    InvalidOptionError,
    SchemaMismatchError,
    StreamEndedError,
    TableUnreadableError,
)
from stream_consumers.file.consumer import FileConsumer
from stream_consumers.kafka.producer import KafkaProducer
from stream_consumers.messages import DeadLetter, Message, Receipt, Shard, now_milliseconds, utc_text
from stream_consumers.options import (
    DEFAULT_BEACON_INTERVAL,
    AutoStreamReset,
    ConsumerMode,
    FileProducerOptions,
    choice,
)
from stream_consumers.producer import Producer
from stream_consumers.redis.entries import parse_sequence
from stream_consumers.redis.producer import RedisProducer
from stream_consumers.stdio.backend import StdioConsumer, StdioProducerOptions
from stream_consumers.stdio.lines import BROADCAST
from stream_consumers.urls import StreamUrl

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


@click.command()
@click.argument("url")
@click.option("--count", type=click.IntRange(min=0), help="Write this many numbered JSON messages.")
@click.option("--from", "lines", type=click.File("rb"), help="Send each line of this file; '-' is stdin.")
@click.option("--json-lines", is_flag=True, help="Read each line as a message in the format of peek --json.")
@click.option("--shards", type=click.IntRange(min=1), help="Distribute messages over this many shards; 1 by default.")
@click.option("--shard", type=click.IntRange(min=0), help="Send all messages to this shard (a Kafka partition).")
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
    """Send messages. Each line of stdin is a message, unless --count or --from is given.

    With --json-lines, a message keeps its key, headers and time. Its stream and sequence are ignored, and so is its
    shard if --shard or --shards is given.

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
            raise InvalidOptionError(f"{one} and {other} cannot be combined", remedy="Use one of them.")
    target = StreamUrl.parse(url)
    is_file = find_backend(target.protocol).producer_options is FileProducerOptions
    if not is_file and (beacon_interval is not None or end):
        raise InvalidOptionError(
            f"{target.shown} is not a stream file", remedy="Leave out --beacon-interval and --end."
        )
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
            if representable(producer, message) != message:
                raise InvalidOptionError(
                    f"{target.shown} cannot keep the key, the headers or the missing payload of message {index + 1}",
                    remedy="Leave them out. The messages before this one were sent.",
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
    """Make the message of a line; a JSON line has its own key and headers, any other line those of the options."""
    if not is_json:
        return replace(given, payload=line, timestamp_ms=now_milliseconds())
    try:
        return Message.from_json(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise InvalidOptionError(
            f"a line is not JSON: {error}", remedy="Leave --json-lines out, or correct the line."
        ) from error


def _lines(stream: Any) -> Iterator[bytes]:
    for line in stream:
        yield line.rstrip(b"\n")


@click.command()
@click.argument("url")
@click.option("--mode", type=click.Choice(MODES), default="real_time", show_default=True, help="How to read.")
@click.option("--group", help="The consumer group, in modes that have one.")
@click.option("--start", default="earliest", show_default=True, help="earliest, latest, a sequence, or an ISO time.")
@click.option("--max", "limit", type=click.IntRange(min=1), help="Stop after this many messages.")
@click.option("--follow", is_flag=True, help="Wait for more messages at the end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
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
    """Print messages, and dead letters on stderr. Nothing is committed.

    With --mode resumable and --group (Kafka), it starts at the positions of the group.

    \b
    Examples:
      stream-assets peek file://orders.ss/orders --max 5
      stream-assets peek file://orders.ss/orders --start 2026-11-01T00:00:00Z --json
      stream-assets peek kafka://localhost:9092/orders --max 5
    """
    shown = find_backend(StreamUrl.parse(url).protocol).shown_sequence
    if mode != ConsumerMode.REAL_TIME.value and StreamSource(url, client=client).may_be_claimed:
        raise InvalidOptionError(
            f"--mode {mode} would claim entries of the group, which other members would then not get",
            remedy="Leave --mode out, and set --start to a sequence that stream-assets lag shows.",
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
        on_dead_letter=print_dead_letter,
    )
    with opened as consumer:
        seek_start(consumer, start)
        for index, message in enumerate(consumer, 1):
            _print_message(message, shown(message.sequence), as_json=as_json)
            if index == limit:
                break


def seek_start(consumer: Consumer, start: str) -> None:
    """Move a consumer to the value of ``--start``.

    Raises:
        InvalidOptionError: the value is not a position.
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
            f"--start {start!r} is not a position",
            remedy="Use earliest, latest, a sequence, or a time like 2026-11-01T12:00.",
        ) from error
    consumer.seek(moment)


def _print_message(message: Message, sequence: int, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(message.to_json()))
        return
    position = f"{message.shard.stream} | {sequence} | {message.shard.id}"
    key = "" if message.key is None else f" key={shown_bytes(message.key)}"
    headers = "".join(f" {name}={shown_bytes(value)}" for name, value in message.headers)
    text = f"{printable(key + headers)} {shown_bytes(message.payload)}"
    click.echo(f"[{utc_text(message.timestamp_ms)} | {position}]{text}")


FLUSH_MESSAGES = 5000
IDLE_SECONDS = 0.05


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--live/--no-live", default=False, show_default=True, help="Wait for more messages at the end of SOURCE.")
@click.option(
    "--shards", type=click.IntRange(min=1), help="The number of shards of a new stream in TARGET (Kafka, Redis)."
)
@click.option("--bare", is_flag=True, help="Write only payloads to stdout, for tools like jq.")
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

    Streams, shards and times are kept; TARGET assigns new sequences. A single stream may go to a stream of another
    name. Lines without a stream go to the first stream of TARGET. A pipe ends when it is closed. After an error, the
    command reports messages that were read, but may not have arrived. Every run starts at the beginning. If SOURCE has
    dead letters, which are not sent, the exit code is 1.

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
    to_streams = route_streams(from_url, to_url)
    if bare and backend.producer_options is not StdioProducerOptions:
        raise InvalidOptionError(f"--bare is for stdio, not for {to_url.shown}", remedy="Leave it out.")
    if shards is not None and not backend.creates_shards:
        raise InvalidOptionError(f"--shards is for Kafka and Redis, not for {to_url.shown}", remedy="Leave it out.")
    options = StdioProducerOptions(bare=True) if bare else None
    dead_letters = 0

    def note(dead: DeadLetter) -> None:
        nonlocal dead_letters
        dead_letters += 1
        print_dead_letter(dead)

    with (
        create_consumer(from_url, live=live, client=source_client, on_dead_letter=note) as consumer,
        create_producer(to_url, client=target_client, producer_options=options, shards=shards) as producer,
    ):
        sent = RelayProgress(producer)
        try:
            _relay(consumer, sent, to_streams)
        except BrokenPipeError:
            raise
        except BaseException as error:
            try:
                if isinstance(error, KeyboardInterrupt):
                    # Ctrl-C is the usual end of --live, so messages that were sent are flushed.
                    sent.flush()
            finally:
                inform(sent.shortfall(), style="red")
                if isinstance(consumer, StdioConsumer) and consumer.waiting:
                    inform(f"read from stdin, but not sent: {counted(consumer.waiting, 'more line')}", style="red")
            raise
    for shard, receipt in sorted(sent.receipts.items()):
        inform(f"{shard}: sent up to sequence {receipt.sequence}")
    if sent.stripped:
        inform(f"the target cannot keep the key, headers or null payload of {counted(sent.stripped, 'message')}")
    if isinstance(consumer, StdioConsumer) and consumer.unclaimed:
        inform(f"not sent: {counted(consumer.unclaimed, 'line')} of other streams")
    if isinstance(consumer, FileConsumer) and consumer.unfinished_bytes:
        inform(f"not sent: an unfinished message, the last {counted(consumer.unfinished_bytes, 'byte')} of the file")
    if dead_letters:
        raise FormatError(
            f"{counted(dead_letters, 'dead letter')} of {from_url.shown} could not be sent",
            remedy="All other messages were sent. Look for what is missing at the places above.",
        )


def route_streams(source: StreamUrl, target: StreamUrl) -> Mapping[str, str]:
    """Return the stream of the target for each stream of the source.

    Raises:
        InvalidUrlError: a URL names no stream.
        InvalidOptionError: a stream of the source has no stream in the target, or would be sent to itself.

    Example:
        >>> route_streams(StreamUrl.parse("stdio:///orders"), StreamUrl.parse("memory://shop/sales"))
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
    if is_same_broker(source, target) and any(stream == to for stream, to in found.items()):
        raise InvalidOptionError(f"{target.shown} would be sent to itself", remedy="Name another stream or server.")
    if is_pipe:
        found.setdefault(BROADCAST, BROADCAST if BROADCAST in to_streams else to_streams[0])
    return found


def is_same_broker(source: StreamUrl, target: StreamUrl) -> bool:
    """Return whether both URLs have the same file or broker; two pipes are always different."""
    is_pipe = find_backend(source.protocol).is_pipe
    return not is_pipe and source.protocol == target.protocol and _broker(source) == _broker(target)


def _broker(url: StreamUrl) -> object:
    """Return the servers, or the real path of a file."""
    return os.path.realpath(url.path) if url.protocol == "file" else sorted(url.nodes)


@dataclass
class RelayProgress:
    """The messages that a relay has sent, and those that have arrived."""

    producer: Producer
    done: int = 0
    stripped: int = 0
    unsent: dict[Shard, list[int]] = field(default_factory=dict)
    receipts: dict[Shard, Receipt] = field(default_factory=dict)

    def send(self, message: Message, stream: str) -> None:
        """Send a message to a stream of the target."""
        self.unsent.setdefault(message.shard, []).append(message.sequence)
        receipt = send_message(self.producer, message, stream=stream)
        self.stripped += representable(self.producer, message) != message
        self.receipts[receipt.shard] = receipt

    def flush(self) -> None:
        """Wait until all messages that were sent have arrived."""
        self.producer.flush()
        self.done += sum(map(len, self.unsent.values()))
        self.unsent.clear()

    def shortfall(self) -> str:
        """Return a report of the messages that arrived, and of those that were read, but may not have arrived."""
        lines = [f"{counted(self.done, 'message')} arrived"]
        lines += [
            f"read, but may not have arrived: {len(sequences)} of {shard}, "
            f"sequences {min(sequences)} to {max(sequences)}"
            for shard, sequences in sorted(self.unsent.items())
        ]
        return "\n".join(lines)


def _relay(consumer: Consumer, sent: RelayProgress, to_streams: Mapping[str, str]) -> None:
    """Send all messages until the source ends; flush after a number of messages, and when no message is available."""
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


def representable(producer: Producer, message: Message) -> Message:
    """Return a message without the parts that the target cannot store: its key, its headers, or a null payload."""
    if isinstance(producer, KafkaProducer):
        return message
    headers = message.headers if isinstance(producer, RedisProducer) else ()
    held = tuple((name, value) for name, value in headers if value is not None)
    return replace(message, payload=message.payload or b"", key=None, headers=held)


def send_message(
    producer: Producer, message: Message, *, stream: str | None = None, shard: int | None = None
) -> Receipt:
    """Send a message with its time, and with its key and headers as far as they are :func:`representable`.

    Args:
        producer: the producer of the target.
        message: a message of any stream.
        stream: the stream of the target; the first stream of the producer by default.
        shard: the shard of the target; the shard of the message by default.
    """
    sent = representable(producer, message)
    payload: Any = sent.payload
    more: dict[str, Any] = {"headers": sent.headers} if sent.headers else {}
    if sent.key is not None:
        more["key"] = sent.key
    number = message.shard.id if shard is None else shard
    return producer.send(payload, stream=stream, shard=number, timestamp_ms=message.timestamp_ms, **more)


@click.command()
@click.argument("url")
@click.option("--sample", type=click.IntRange(min=1), default=1000, show_default=True, help="Read this many messages.")
@click.option("--start", default="earliest", show_default=True, help="earliest, a sequence, or an ISO time.")
@click.option("--table-like", metavar="TABLE", help="Keep the types of this Delta table if the messages fit them.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@client_option()
@storage_option
def infer(
    url: str,
    sample: int,
    start: str,
    table_like: str | None,
    as_json: bool,
    client: ClientConfig,
    storage: dict[str, str],
) -> None:
    """Infer a schema from JSON payloads: print the DDL, and details on stderr.

    The command joins no group, commits nothing, and needs no Spark.

    \b
    Examples:
      stream-assets infer file://orders.ss/orders
      stream-assets infer kafka://localhost:9092/orders --sample 10000 --start 2026-11-01T00:00:00Z
      stream-assets infer file://orders.ss/orders --table-like lake/orders --json
    """
    from spark_jobs.writing.schema_inference import fitted, infer

    if start == "latest":
        raise InvalidOptionError("--start latest selects no messages", remedy="Use earliest, a sequence, or a time.")
    with create_consumer(url, live=False, client=client, on_dead_letter=print_dead_letter) as consumer:
        seek_start(consumer, start)
        payloads = [message.payload for message in islice(consumer, sample)]
    found = infer(payloads)
    if not found.fields:
        reasons = "; ".join(f"{count} are {reason}" for reason, count in found.refused.items())
        raise SchemaMismatchError(
            f"of {counted(found.messages, 'message')}, none has a field{': ' if reasons else ''}{reasons}",
            remedy="Read from another position with --start; or use --decode variant, text or raw, without a schema.",
        )
    if table_like:
        found = fitted(found, payloads, _columns(table_like, storage))
    fields: list[dict[str, Any]] = [
        {"name": column.name, "type": column.ddl, "messages": column.messages, "remarks": list(column.remarks)}
        for column in found.fields
    ]
    if as_json:
        shown = {"messages": found.messages, "refused": dict(found.refused), "remarks": list(found.remarks)}
        click.echo(json.dumps({"ddl": found.ddl(), "fields": fields, **shown}))
        return
    for reason, count in found.refused.items():
        inform(f"{count} of {counted(found.messages, 'message')} would become dead letters: {reason}", style="yellow")
    print_rows(fields, title=counted(found.messages, "message"), console=err)
    for remark in found.remarks:
        inform(remark, style="yellow")
    click.echo(printable(found.ddl()))


def _columns(table: str, storage: Mapping[str, str]) -> StructType:
    """Return the columns of a table without the stream columns."""
    from pyspark.sql.types import StructType

    from spark_jobs.ledger.delta_log import DeltaLog
    from spark_jobs.ledger.table_rows import schema_of
    from spark_jobs.reading.source import STREAM_COLUMNS
    from spark_jobs.table_location import check_location

    log = DeltaLog(check_location(table), storage_options=storage)
    if log.snapshot() is None:
        raise TableUnreadableError(f"{table} is not a Delta table", remedy="Correct --table-like, or leave it out.")
    columns = StructType.fromJson(dict(schema_of(log))).fields
    return StructType([column for column in columns if column.name not in STREAM_COLUMNS])
