"""Keeps what a name holds while its batch is written."""

from __future__ import annotations

import logging
import threading

from stream_consumers.errors import StreamAssetsError
from stream_consumers.redis.claimed_entries import Held
from stream_consumers.redis.claims import RedisClaims

_log = logging.getLogger(__name__)


class Heartbeat:
    """Touches what a name holds until it is closed, so that nobody takes it over; a context manager."""

    def __init__(self, claims: RedisClaims, held: Held) -> None:
        self._claims = claims
        self._held = held
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(self._claims.policy.min_idle_seconds / 3):
            try:
                self._claims.touch(self._held.name, list(self._held.ids))
            except StreamAssetsError as error:
                # Not needed for safety: at worst somebody else writes the batch, and the ledger picks one.
                _log.warning("the claim of %s could not be kept: %s", self._held.name, error)

    def close(self) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
