"""Notices that a stream was deleted under a reader that goes by position, also if it was made again since.

Such a reader would wait for ever: behind an id that the new stream has not got to, the server has nothing to say. Redis
gives a stream no fingerprint, but there are things that a stream can only gain, see
:class:`stream_consumers.redis.server.Growth`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from stream_consumers.errors import StreamRemovedError
from stream_consumers.messages import Shard
from stream_consumers.redis.ids import id_order
from stream_consumers.redis.keys import readable
from stream_consumers.redis.server import Growth, RedisConnection

LOOK_SECONDS = 5.0
# The most streams that one look is at; with more of them, it takes several.
LOOK_STREAMS = 1000
_NOTHING = "0-0"


class RemovalWatch:
    """What is known of the streams that a reader goes through by position. Not thread-safe.

    Args:
        server: where they are.
    """

    def __init__(self, server: RedisConnection) -> None:
        self._server = server
        self._seen: dict[Shard, Growth] = {}
        self._look_at = time.monotonic() + LOOK_SECONDS
        self._looked = 0
        self._found: StreamRemovedError | None = None

    def saw(self, shard: Shard, last: str) -> None:
        """A stream has got to an id, at least."""
        seen = self._seen.get(shard, Growth(last, None))
        self._seen[shard] = seen._replace(last=max(seen.last, last, key=id_order))

    def forget(self, shards: Iterable[Shard] | None = None) -> None:
        """Whatever these streams are now is right; all of them by default."""
        for shard in list(self._seen) if shards is None else shards:
            self._seen.pop(shard, None)
        self._found = None

    def look(self, keys: Mapping[Shard, bytes], *, now: bool = False) -> None:
        """Look at streams, unless the last look was a moment ago.

        Args:
            keys: their keys.
            now: look in any case, at all of them.

        Raises:
            StreamRemovedError: one was deleted since it was seen; from then on at each call.
        """
        if self._found is None and (now or time.monotonic() >= self._look_at):
            self._look_at = time.monotonic() + LOOK_SECONDS
            self._look(keys if now else self._in_turn(keys))
        if self._found is not None:
            raise self._found

    def _in_turn(self, keys: Mapping[Shard, bytes]) -> Mapping[Shard, bytes]:
        shards = list(keys)
        begin = self._looked % max(1, len(shards))
        chosen = (shards[begin:] + shards[:begin])[:LOOK_STREAMS]
        self._looked = begin + len(chosen)
        return {shard: keys[shard] for shard in chosen}

    def _look(self, keys: Mapping[Shard, bytes]) -> None:
        for (shard, key), there in zip(keys.items(), self._server.growth(list(keys.values()))):
            seen = self._seen.get(shard)
            if there is not None and (seen is None or not there.has_lost(seen)):
                self._seen[shard] = there
            elif seen is not None and seen.last != _NOTHING:
                what = "was deleted and made again" if there else "was deleted"
                self._found = StreamRemovedError(
                    f"the stream {readable(key)} at {self._server.url} {what} while it was read",
                    remedy="What had not been read is lost. Rewind to the beginning, or make a new consumer, to read "
                    "what there is now.",
                    last_id=seen.last,
                    last_id_now=there.last if there else None,
                )
                return
