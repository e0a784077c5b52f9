"""Redis keys and the shards that they are: a stream is one key, or the keys ``stream:0``, ``stream:1``, …."""

from __future__ import annotations

import re

from stream_consumers.errors import InvalidOptionError
from stream_consumers.messages import Shard, decode_key, encode_key
from stream_consumers.redis.ids import is_shard_id

_PATTERN_CHARACTERS = re.compile(rb"[*?\[\]\\]")


def shard_of(key: bytes) -> Shard:
    """The shard that a key is (SeaStreamer's rule).

    Example:
        >>> shard_of(b"orders:3"), shard_of(b"user:events")
        (Shard(stream='orders', id=3), Shard(stream='user:events', id=0))
    """
    stream, _, tail = key.rpartition(b":")
    number = tail.decode("latin-1")
    return Shard(encode_key(stream), int(number)) if stream and is_shard_id(number) else Shard(encode_key(key))


def numbered_key(shard: Shard) -> bytes:
    """The key of a shard of a stream with several.

    Example:
        >>> numbered_key(Shard("orders", 3)), numbered_key(Shard("user%3A42", 0))
        (b'orders:3', b'user:42:0')
    """
    return b"%s:%d" % (decode_key(shard.stream), shard.id)


def is_numbered(key: bytes, shard: Shard) -> bool:
    """Whether the key of a shard has its number, or is the one key of its stream.

    Example:
        >>> is_numbered(b"orders:0", Shard("orders")), is_numbered(b"orders", Shard("orders"))
        (True, False)
    """
    return key != decode_key(shard.stream)


def pattern_of_shards(stream: str) -> bytes:
    r"""What SCAN matches with the numbered keys of a stream, and with some others.

    Example:
        >>> pattern_of_shards("orders"), pattern_of_shards("[a]")
        (b'orders:*', b'\\[a\\]:*')
    """
    return _PATTERN_CHARACTERS.sub(rb"\\\g<0>", decode_key(stream)) + b":*"


def key_of(name: str) -> bytes:
    r"""The key that :func:`name_of` is the text of.

    Raises:
        InvalidOptionError: it is no text, or has a surrogate that stands for no byte.

    Example:
        >>> key_of("user:42")
        b'user:42'
        >>> key_of("\ud800")
        Traceback (most recent call last):
        stream_consumers.errors.InvalidOptionError: stream='\ud800' cannot be used. Use the text of a key, or its bytes.
    """
    try:
        return name.encode("utf-8", "surrogateescape")
    except (AttributeError, UnicodeEncodeError) as error:
        raise InvalidOptionError(
            f"stream={name!r} cannot be used", remedy="Use the text of a key, or its bytes."
        ) from error


def name_of(key: bytes) -> str:
    r"""A key as text, for those to whom a stream is a key and nothing else.

    Example:
        >>> key_of(name_of(b"any bytes: \xff"))
        b'any bytes: \xff'
    """
    return key.decode("utf-8", "surrogateescape")


def readable(key: bytes) -> str:
    """A key for people.

    Example:
        >>> readable(b"orders:0")
        'orders:0'
    """
    return key.decode("utf-8", "backslashreplace")
