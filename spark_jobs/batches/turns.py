"""Whose turn it is to write: a run that replaces rows asks ingestion, through the Delta log, to wait for it.

Delta refuses a replace that finds another commit behind its snapshot, whichever rows that has. Where ingestion commits
every second, a replace of some seconds would never land. So after some lost races it *asks*: with an empty commit that
ingestion sees before it plans its next batch. It waits until the one that asked has committed again, or the
request is old. Nothing is right or wrong because of a request: a run that does not see it, or waits no longer, only
makes the other one try once more.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator

from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion, Waiting
from spark_jobs.batches.writer import commit_empty
from spark_jobs.ledger.ledger import Ledger

PATIENCE_SECONDS = 60.0
"""How long to honour a request: the run that made it may have died."""
ASK_AFTER = 2
"""From this lost race on, the others are asked."""
LONGEST_PAUSE_SECONDS = 5.0
MOST_COMMITS = 200
"""A request further back than this number of commits is not looked for."""
_POLL_SECONDS = 0.2
_log = logging.getLogger(__name__)


class TurnRequestedError(Exception):
    """Another run has asked for its turn, so that no batch is planned now.

    Args:
        version: of the table, where the request is.
    """

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


class Turns:
    """The turns of one run in one table.

    Args:
        spark: commits requests.
        ingestion: group, table, and the member or the shard whose transaction sequence it is.
        ledger: of that sequence.
    """

    def __init__(self, spark: SparkSession, ingestion: Ingestion, ledger: Ledger) -> None:
        self._spark = spark
        self._ingestion = ingestion
        self._ledger = ledger
        self._lost = 0
        # A request from a clock that is ahead would be waited for again and again.
        self._waited_for = -1

    def check(self, version: int) -> None:
        """Before a batch is planned: let a run that asked go first.

        Args:
            version: of the table as it was read for the plan.

        Raises:
            TurnRequestedError: a run has asked; :meth:`wait`, and read the table again.
        """
        asked = self._request(range(version, self._waited_for, -1))
        if asked is not None:
            raise TurnRequestedError(asked)

    def wait(self, asked: int) -> Iterator[Waiting]:
        """Yield why this run waits, then wait until the run that asked has committed, or the request is old."""
        yield Waiting(
            f"a run that replaces rows of {self._ingestion.table} has asked for its turn (version {asked}); this one "
            f"waits until that has written, up to {PATIENCE_SECONDS:g} s"
        )
        deadline = time.monotonic() + PATIENCE_SECONDS
        request: int | None = asked
        while request is not None and time.monotonic() < deadline:
            self._waited_for = request
            time.sleep(_POLL_SECONDS)
            request = self._request(self._ledger.log.newest_versions(after=self._waited_for - 1))

    def ask(self) -> None:
        """After a lost race: wait a moment; after another one, make the others wait.

        Raises:
            WriteError: the request cannot be committed.
        """
        self._lost += 1
        what = f"another run wrote to {self._ingestion.table} while this one replaced rows in it"
        if self._lost < ASK_AFTER:
            pause = random.uniform(0, LONGEST_PAUSE_SECONDS)  # noqa: S311 - no secret, only a turn
            _log.warning("%s; it is tried again in %.1f s", what, pause)
            time.sleep(pause)
            return
        _log.warning("%s; the others are asked to wait, and it is tried again", what)
        commit_empty(self._spark, self._ingestion, "turn", lambda state: {})

    def _request(self, newest_first: range) -> int | None:
        """The version of the newest request that is neither answered nor old; ``None`` if there is none."""
        oldest = (time.time() - PATIENCE_SECONDS) * 1000
        answered = {self._ledger.app}
        for version in newest_first[:MOST_COMMITS]:
            commit = self._ledger.log.commit(version)
            if commit is None or (commit.timestamp_ms or 0) < oldest:
                return None
            entry = commit.entry
            if entry is not None and entry.app not in answered:
                if entry.kind == "turn":
                    return version
                answered.add(entry.app)
        return None
