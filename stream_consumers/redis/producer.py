"""A producer for Redis Streams: XADD, many in a round trip."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import redis

from stream_consumers.client_config import ClientConfig
from stream_consumers.display import counted
from stream_consumers.errors import (
    BrokerError,
    FormatError,
    InvalidOptionError,
    SizeLimitError,
    StreamAssetsError,
    Transient,
)
from stream_consumers.messages import Receipt, Shard, decode_key
from stream_consumers.options import check_count
from stream_consumers.producer import Producer, check_headers, check_payload, undelivered
from stream_consumers.redis.entries import MAX_MS, MAX_SUB, is_numbered, numbered_key, printable_key, to_sequence
from stream_consumers.redis.server import RedisConnection
from stream_consumers.urls import StreamUrl

# How much may wait to be sent: then it is sent, and what is more is refused as long as that fails.
PIPELINE = 512
PIPELINE_BYTES = 8 * 1024 * 1024
# A bulk string of Redis holds no more, unless its server is configured to take more.
MAX_PAYLOAD_BYTES = 512 * 1024 * 1024
_CHECK_SERVER = "Check the address and the server."
_QUEUED = "The messages stay queued, in order: flush again. Those that were on their way may be there twice then."
_DROPPED = "The producer has ended: send what has no receipt with a sequence again, with another one."
# Adds messages to a stream until the first that is refused, so that the others stay behind it. ARGV: the largest number
# of an id, then for each message its millisecond, how many words it has, and the words. Ids only grow: a message older
# than the last one gets the last one's millisecond, or the next one if that is full.
_ADD = """
local last, found, at = '0-0', {}, 2
local info = redis.pcall('XINFO', 'STREAM', KEYS[1])
for index = 1, #info, 2 do if info[index] == 'last-generated-id' then last = info[index + 1] end end
while at <= #ARGV do
  local wanted, words = ARGV[at], tonumber(ARGV[at + 1])
  local ms, sub = string.match(last, '(%d+)-(%d+)')
  if tonumber(ms) < tonumber(wanted) then ms = wanted
  elseif tonumber(sub) >= tonumber(ARGV[1]) then ms = string.format('%.0f', tonumber(ms) + 1) end
  local added = redis.pcall('XADD', KEYS[1], ms .. '-*', unpack(ARGV, at + 2, at + 1 + words))
  found[#found + 1] = added
  if type(added) == 'table' then return found end
  last, at = added, at + 2 + words
end
return found
"""


class RedisProducer(Producer):
    """A producer of Redis Streams; see :class:`stream_consumers.producer.Producer`.

    Messages are sent many in a round trip, at the latest at :meth:`flush` or when a receipt is asked for its sequence.
    What the server has not acknowledged stays queued, in the order of each shard, and is sent again by the next flush:
    at least once, as messages whose acknowledgement was lost with the connection are added a second time then.
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
        self._wants_numbers = shards is not None and check_count("shards", shards) > 1
        # Per stream that was sent to, whether its shards are keys with numbers.
        self._is_numbered: dict[str, bool] = {}
        self._server = RedisConnection(url, client)
        self._server.shards()
        with self._server.explained("preparing to send"):
            self._script: Any = self._server.connection.script_load(_ADD)
        # Per key, what the server has not acknowledged, in order.
        self._queued: dict[bytes, deque[_QueuedMessage]] = {}
        self._count = self._bytes = 0

    def send(
        self,
        payload: bytes,
        *,
        stream: str | None = None,
        shard: int = 0,
        timestamp_ms: int | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> Receipt:
        """See :meth:`stream_consumers.producer.Producer.send`.

        Raises:
            InvalidOptionError: a header with the name of the message field, or a shard with a number where the
                stream is one key: readers would not find what is in that key any more.
            SizeLimitError: the payload is larger than Redis takes.
            StreamAssetsError: the queue is full, and cannot be sent; this message was not taken.
        """
        return self._send(*self._defaults(stream, shard, timestamp_ms), check_payload(payload), headers)

    def _send(
        self, shard: Shard, timestamp_ms: int, payload: bytes, headers: Sequence[tuple[str, bytes]] = ()
    ) -> Receipt:
        check_count("timestamp_ms", timestamp_ms, at_least=0, at_most=MAX_MS)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise SizeLimitError(
                f"a message to {shard} is larger than Redis takes",
                remedy="Send less at once.",
                bytes=len(payload),
                limit=MAX_PAYLOAD_BYTES,
            )
        pairs = check_headers(headers)
        field = self._server.message_field
        if any(name.encode() == field for name, _ in pairs):
            raise InvalidOptionError(
                f"a header named {field.decode()!r} would be a second message", remedy="Give the header another name."
            )
        words: list[Any] = [field, payload, *chain.from_iterable(pairs)]
        with self._lock:
            self._check_not_ended()
            key = self._key(shard)
            if self._is_full():
                self.flush()
            delivery = _QueuedMessage(self, shard, [timestamp_ms, len(words), *words], len(payload))
            self._queued.setdefault(key, deque()).append(delivery)
            self._count, self._bytes = self._count + 1, self._bytes + delivery.size
            if self._is_full():
                # What fails now is raised by the next send or flush: this message was taken.
                with suppress(StreamAssetsError):
                    self.flush()
        return Receipt(shard, delivery.sequence, timestamp_ms)

    def _flush(self) -> None:
        """Send the messages that wait.

        Raises:
            StreamAssetsError: messages were not acknowledged; the facts count them by shard. They stay queued, in
                order. Of several errors, the first is raised.
        """
        with self._lock:
            if self._queued:
                failed = self._send_queued()
                if failed is not None:
                    first = _CHECK_SERVER if isinstance(failed, Transient) else failed.remedy
                    raise undelivered(failed, self._undelivered_shards(), remedy=f"{first} {_QUEUED}")

    def _end(self) -> None:
        try:
            self._flush()
        except StreamAssetsError as error:
            dropped = undelivered(error, self._undelivered_shards(), remedy=_DROPPED)
            for delivery in chain.from_iterable(self._queued.values()):
                delivery.error = dropped
            self._queued.clear()
            raise dropped from error
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
                f"{shard} would be the key {printable_key(numbered_key(shard))} at {self._url}, and with such keys no "
                f"consumer reads the messages in the key {printable_key(decode_key(stream))}",
                remedy="Send to another stream, or to shard 0 only; a new one is made with shards=2 or more.",
            )
        return numbered_key(shard) if has_numbers else decode_key(stream)

    def _is_full(self) -> bool:
        return self._count >= PIPELINE or self._bytes >= PIPELINE_BYTES

    def _undelivered_shards(self) -> list[Shard]:
        return [delivery.shard for delivery in chain.from_iterable(self._queued.values())]

    def _send_queued(self) -> StreamAssetsError | None:
        """Send what waits; what was acknowledged waits no more. Returns why something was not."""
        failed: StreamAssetsError | None = None
        try:
            with self._server.explained(f"sending {counted(self._count, 'message')}"):
                answers = self._add(list(self._queued))
        except StreamAssetsError as error:
            return error
        for key, answer in answers.items():
            queue = self._queued[key]
            for said in answer if isinstance(answer, list) else [answer]:
                if not isinstance(said, bytes):
                    what = f"a message to {printable_key(key)} of {self._url} was refused"
                    failed = failed or self._refused(what, said)
                    break
                delivery = queue.popleft()
                self._count, self._bytes = self._count - 1, self._bytes - delivery.size
                try:
                    delivery.found = to_sequence(said)
                except FormatError as error:
                    # It was added, after an id that another client chose, and it has no sequence.
                    failed = delivery.error = error
            if not queue:
                del self._queued[key]
        return failed

    def _add(self, keys: list[bytes]) -> dict[bytes, Any]:
        """The server's answer for each key: the ids of its messages up to the first that is refused, or an error."""
        pipeline = self._server.connection.pipeline(transaction=False)
        for key in keys:
            words = chain.from_iterable(delivery.words for delivery in self._queued[key])
            pipeline.execute_command("EVALSHA", self._script, 1, key, MAX_SUB, *words)
        answers = dict(zip(keys, pipeline.execute(raise_on_error=False)))
        forgotten = [key for key, answer in answers.items() if isinstance(answer, redis.exceptions.NoScriptError)]
        if forgotten:
            # The server was restarted; it added nothing of these.
            self._server.connection.script_load(_ADD)
            answers.update(self._add(forgotten))
        return answers

    def _refused(self, what: str, answer: object) -> StreamAssetsError:
        if isinstance(answer, redis.RedisError):
            return self._server.error(answer, what)
        return BrokerError(f"{what}: {answer!r}", remedy=_CHECK_SERVER)


class _QueuedMessage:
    """A message that waits, and what became of it.

    Args:
        producer: whose queue it is in.
        shard: where it goes.
        words: what the script is given for it.
        size: its bytes.
    """

    __slots__ = ("_producer", "error", "found", "shard", "size", "words")

    def __init__(self, producer: RedisProducer, shard: Shard, words: list[Any], size: int) -> None:
        self._producer = producer
        self.shard, self.words, self.size = shard, words, size
        self.found: int | None = None
        self.error: StreamAssetsError | None = None

    def sequence(self) -> int:
        """The sequence of the message; sends the messages that wait, if it is among them."""
        if self.found is None and self.error is None:
            try:
                self._producer.flush()
            except StreamAssetsError:
                # Of this message or of others: what became of this one is known now.
                if self.found is None:
                    raise
        if self.found is None:
            assert self.error is not None
            raise self.error
        return self.found
