"""A producer for Redis Streams: XADD, many in a round trip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis

from stream_consumers.client_config import ClientConfig
from stream_consumers.errors import BrokerError, InvalidOptionError, StreamAssetsError
from stream_consumers.messages import Receipt, Shard, decode_key
from stream_consumers.producer_base import ProducerBase
from stream_consumers.redis.client import explain
from stream_consumers.redis.ids import MAX_SUB, to_sequence
from stream_consumers.redis.keys import is_numbered, numbered_key, readable
from stream_consumers.redis.server import RedisServer
from stream_consumers.urls import StreamUrl

PIPELINE = 512
# Ids only grow: a message older than the last one gets the last one's millisecond, or the next one if that is full.
_ADD = """
local function add(ms) return redis.pcall('XADD', KEYS[1], ms .. '-*', unpack(ARGV, 3)) end
local function last_id()
  local info = redis.pcall('XINFO', 'STREAM', KEYS[1])
  for index = 1, #info, 2 do if info[index] == 'last-generated-id' then return info[index + 1] end end
  return '0-0'
end
local ms, sub = string.match(last_id(), '(%d+)-(%d+)')
if tonumber(ms) < tonumber(ARGV[1]) then return add(ARGV[1]) end
if tonumber(sub) >= tonumber(ARGV[2]) then ms = string.format('%.0f', tonumber(ms) + 1) end
return add(ms)
"""


class RedisProducer(ProducerBase):
    """A producer of Redis Streams; see :class:`stream_consumers.consumer.Producer`.

    Messages are sent many in a round trip, at the latest at :meth:`flush` or when a receipt is asked for its sequence.
    An entry has the field ``msg`` (the client option ``message_field``); a header is a field of its own. Its id is made
    of ``timestamp_ms``, or of the last id's where that is later: ids only grow.

    Args:
        url: ``redis://host:6379/orders``; ``send`` uses its first stream by default.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.
        shards: of a stream that is not there yet: with more than one, shard n is the key ``stream:n``; with one it is
            the key ``stream`` itself. Without it the first message decides: shard 0 is the key ``stream``.

    Raises:
        BrokerUnavailableError, AccessDeniedError: as the server says.

    Example::

        with RedisProducer("redis://localhost:6379/orders", shards=4) as producer:
            receipt = producer.send(b"{}", shard=3, headers=[("source", b"web")])
            print(receipt.shard, receipt.sequence)
    """

    def __init__(self, url: str | StreamUrl, client: ClientConfig | None = None, *, shards: int | None = None) -> None:
        url = StreamUrl.parse(url)
        super().__init__(url)
        self._wants_numbers = shards is not None and shards > 1
        # Per stream that was sent to, whether its shards are keys with numbers.
        self._is_numbered: dict[str, bool] = {}
        self._server = RedisServer(url, client)
        self._server.shards()
        with self._server.explained("preparing to send"):
            self._script: Any = self._server.connection.script_load(_ADD)
        self._waiting: list[tuple[bytes, list[Any], _Delivery]] = []
        self._failed: StreamAssetsError | None = None

    def send(
        self,
        payload: bytes,
        *,
        stream: str | None = None,
        shard: int = 0,
        timestamp_ms: int | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> Receipt:
        """See :meth:`stream_consumers.consumer.Producer.send`.

        Raises:
            InvalidOptionError: a header with the name of the message field, or a shard with a number where the
                stream is one key: readers would not find what is in that key any more.
        """
        return self._send(*self._defaults(stream, shard, timestamp_ms), payload, headers)

    def _send(
        self, shard: Shard, timestamp_ms: int, payload: bytes, headers: Sequence[tuple[str, bytes]] = ()
    ) -> Receipt:
        field = self._server.message_field
        if any(name.encode() == field for name, _ in headers):
            raise InvalidOptionError(
                f"a header named {field.decode()!r} would be a second message", remedy="Give the header another name."
            )
        delivery = _Delivery(self)
        arguments: list[Any] = [timestamp_ms, MAX_SUB, field, payload]
        for name, value in headers:
            arguments += [name, value]
        with self._lock:
            self._check_not_ended()
            self._raise_failure()
            self._waiting.append((self._key(shard), arguments, delivery))
            if len(self._waiting) >= PIPELINE:
                self._send_waiting()
        return Receipt(shard, delivery.sequence, timestamp_ms)

    def flush(self) -> None:
        """Send the messages that wait.

        Raises:
            StreamAssetsError: messages were not added; those without an answer may have been.
        """
        with self._lock:
            self._send_waiting()
            self._raise_failure()

    def _end(self) -> None:
        try:
            self.flush()
        finally:
            self._server.close()

    def _key(self, shard: Shard) -> bytes:
        stream = shard.stream
        if stream not in self._is_numbered:
            if is_numbered(self._server.key(Shard(stream)), Shard(stream)):
                self._is_numbered[stream] = True
            else:
                facts = self._server.facts(Shard(stream))
                is_empty = facts is None or not facts.length
                self._is_numbered[stream] = is_empty and (self._wants_numbers or shard.id > 0)
        has_numbers = self._is_numbered[stream]
        if not has_numbers and (shard.id or self._wants_numbers):
            raise InvalidOptionError(
                f"{shard} would be the key {readable(numbered_key(shard))} at {self._url}, and with such keys nobody "
                f"reads the messages in the key {readable(decode_key(stream))}",
                remedy="Send to another stream, or to shard 0 only; a new one is made with shards=2 or more.",
            )
        return numbered_key(shard) if has_numbers else decode_key(stream)

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        try:
            with self._server.explained(f"sending {len(waiting)} messages"):
                answers = self._add(waiting)
        except StreamAssetsError as error:
            self._failed = error
            for *_, delivery in waiting:
                delivery.error = error
            return
        for (key, _, delivery), answer in zip(waiting, answers):
            if isinstance(answer, bytes):
                delivery.found = to_sequence(answer)
            else:
                delivery.error = self._failed = _refused(
                    f"a message to {readable(key)} of {self._url} was refused", answer
                )

    def _add(self, waiting: list[tuple[bytes, list[Any], _Delivery]]) -> list[Any]:
        """The answer of the server to each: an id, or an error."""
        pipeline = self._server.connection.pipeline(transaction=False)
        for key, arguments, _ in waiting:
            pipeline.execute_command("EVALSHA", self._script, 1, key, *arguments)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        forgotten = [n for n, answer in enumerate(answers) if isinstance(answer, redis.exceptions.NoScriptError)]
        if forgotten:
            # The server was restarted; it added nothing of these.
            self._server.connection.script_load(_ADD)
            for number, answer in zip(forgotten, self._add([waiting[n] for n in forgotten])):
                answers[number] = answer
        return answers

    def _raise_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed


def _refused(what: str, answer: object) -> StreamAssetsError:
    if isinstance(answer, redis.RedisError):
        return explain(answer, what=what)
    return BrokerError(f"{what}: {answer!r}", remedy="Send it again.")


class _Delivery:
    """The outcome of one message, once it is known."""

    __slots__ = ("_producer", "error", "found")

    def __init__(self, producer: RedisProducer) -> None:
        self._producer = producer
        self.found: int | None = None
        self.error: StreamAssetsError | None = None

    def sequence(self) -> int:
        """The sequence of the message; sends the messages that wait, if it is among them."""
        if self.found is None and self.error is None:
            self._producer.flush()
        if self.found is None:
            assert self.error is not None
            raise self.error
        return self.found
