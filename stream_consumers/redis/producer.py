"""The producer of Redis Streams, which sends many XADD commands in one round trip."""

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

# The limits of the queue: a full queue is sent, and while that fails, further messages are rejected.
PIPELINE = 512
PIPELINE_BYTES = 8 * 1024 * 1024
# The limit of a Redis bulk string, unless the server is configured for more.
MAX_PAYLOAD_BYTES = 512 * 1024 * 1024
_CHECK_SERVER = "Check the address and the server."
_QUEUED = "The messages stay queued, in order: flush again. Messages that were in transit may then be added twice."
_DROPPED = "The producer has ended: send messages whose receipt has no sequence again, with another producer."
# Add messages to a stream up to the first rejected one, so that later messages do not overtake it. ARGV: the largest
# second number of an id, then for each message its millisecond, its number of words, and the words. Ids only grow: a
# message older than the last one gets the last one's millisecond, or the next millisecond if that is full.
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

    Many messages are sent in one round trip, at the latest by :meth:`flush` or when the sequence of a receipt is read.
    Messages that the server has not acknowledged stay queued, in the order of each shard, and the next flush sends them
    again. Delivery is at least once: a message whose acknowledgement was lost with the connection is added twice.
    An entry has the field ``msg`` (client option ``message_field``), and one field for each header. Its id has the time
    ``timestamp_ms``, or the time of the last id if that is later, because ids only grow.

    Args:
        url: ``redis://host:6379/orders``; ``send`` uses its first stream by default.
        client: arguments of ``redis.Redis``, and ``message_field`` and ``cluster``.
        shards: the number of shards of a stream that does not exist yet. With more than one, shard n is the key
            ``stream:n``; with one, it is the key ``stream``. Without it, the first message decides: for shard 0, the
            stream is the key ``stream``.

    Raises:
        BrokerUnavailableError, AccessDeniedError: the server returned an error.

    Example::

        with RedisProducer("redis://localhost:6379/orders", shards=4) as producer:
            receipt = producer.send(b"{}", shard=3, headers=[("source", b"web")])
            print(receipt.shard, receipt.sequence)
    """

    def __init__(self, url: str | StreamUrl, client: ClientConfig | None = None, *, shards: int | None = None) -> None:
        url = StreamUrl.parse(url)
        super().__init__(url)
        self._wants_numbers = shards is not None and check_count("shards", shards) > 1
        # For each stream that was sent to, whether its shards are numbered keys.
        self._is_numbered: dict[str, bool] = {}
        self._server = RedisConnection(url, client)
        self._server.shards()
        with self._server.explained("preparing to send"):
            self._script: Any = self._server.connection.script_load(_ADD)
        # For each key, the messages that the server has not acknowledged, in order.
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
            InvalidOptionError: a header has the name of the message field, or the stream is a single key and the shard
                is not 0: with numbered keys, readers would no longer read the single key.
            SizeLimitError: the payload exceeds the limit of Redis.
            StreamAssetsError: the queue is full and cannot be sent; this message was not queued.
        """
        return self._send(*self._defaults(stream, shard, timestamp_ms), check_payload(payload), headers)

    def _send(
        self, shard: Shard, timestamp_ms: int, payload: bytes, headers: Sequence[tuple[str, bytes]] = ()
    ) -> Receipt:
        check_count("timestamp_ms", timestamp_ms, at_least=0, at_most=MAX_MS)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise SizeLimitError(
                f"a message to {shard} exceeds the size limit of Redis",
                remedy="Send smaller messages.",
                bytes=len(payload),
                limit=MAX_PAYLOAD_BYTES,
            )
        pairs = check_headers(headers)
        field = self._server.message_field
        if any(name.encode() == field for name, _ in pairs):
            raise InvalidOptionError(
                f"a header named {field.decode()!r} would be a second payload", remedy="Give the header another name."
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
                # This message is queued, so a failure is raised only by the next send or flush.
                with suppress(StreamAssetsError):
                    self.flush()
        return Receipt(shard, delivery.sequence, timestamp_ms)

    def _flush(self) -> None:
        """Send the queued messages.

        Raises:
            StreamAssetsError: messages were not acknowledged; the facts count them by shard. They stay queued, in
                order. If several errors occur, the first one is raised.
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
                f"{shard} would be the key {printable_key(numbered_key(shard))} at {self._url}, and then no "
                f"consumer reads the key {printable_key(decode_key(stream))}",
                remedy="Send only to shard 0, or to a new stream, created with shards=2 or more.",
            )
        return numbered_key(shard) if has_numbers else decode_key(stream)

    def _is_full(self) -> bool:
        return self._count >= PIPELINE or self._bytes >= PIPELINE_BYTES

    def _undelivered_shards(self) -> list[Shard]:
        return [delivery.shard for delivery in chain.from_iterable(self._queued.values())]

    def _send_queued(self) -> StreamAssetsError | None:
        """Send the queued messages and remove the acknowledged ones; return the error of the others, if any."""
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
                    # The message was added after an id that another client chose, and has no sequence.
                    failed = delivery.error = error
            if not queue:
                del self._queued[key]
        return failed

    def _add(self, keys: list[bytes]) -> dict[bytes, Any]:
        """Return the reply for each key: the ids of its messages up to the first rejected one, or an error."""
        words = {key: chain.from_iterable(delivery.words for delivery in self._queued[key]) for key in keys}
        commands = [("EVALSHA", self._script, 1, key, MAX_SUB, *of_key) for key, of_key in words.items()]
        answers = dict(zip(keys, self._server.add(commands)))
        forgotten = [key for key, answer in answers.items() if isinstance(answer, redis.exceptions.NoScriptError)]
        if forgotten:
            # The server was restarted and lost the script; it added none of these messages.
            self._server.connection.script_load(_ADD)
            answers.update(self._add(forgotten))
        return answers

    def _refused(self, what: str, answer: object) -> StreamAssetsError:
        if isinstance(answer, redis.RedisError):
            return self._server.error(answer, what)
        return BrokerError(f"{what}: {answer!r}", remedy=_CHECK_SERVER)


class _QueuedMessage:
    """A queued message and the result of sending it.

    Args:
        producer: the producer with the queue.
        shard: the shard of the message.
        words: its arguments of the script.
        size: the size of its payload in bytes.
    """

    __slots__ = ("_producer", "error", "found", "shard", "size", "words")

    def __init__(self, producer: RedisProducer, shard: Shard, words: list[Any], size: int) -> None:
        self._producer = producer
        self.shard, self.words, self.size = shard, words, size
        self.found: int | None = None
        self.error: StreamAssetsError | None = None

    def sequence(self) -> int:
        """Return the sequence of the message; if it is still queued, send the queue first."""
        if self.found is None and self.error is None:
            try:
                self._producer.flush()
            except StreamAssetsError:
                # The error may concern other messages only; this one may have been sent.
                if self.found is None:
                    raise
        if self.found is None:
            assert self.error is not None
            raise self.error
        return self.found
