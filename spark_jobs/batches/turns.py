"""Whose turn it is to write: a run that replaces rows asks ingestion, through the Delta log, to wait for it.

Delta refuses a replace that finds another commit behind its snapshot, whichever rows that has. Where ingestion commits
every second, a replace of some seconds would never land. So after some lost races it *asks*: with an empty commit that
ingestion sees before it plans its next batch. It waits until the one that asked has committed again, or the
request is old. Nothing is right or wrong because of a request: whoever does not see it, or waits no longer, only makes
the other one try once more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from pyspark.sql import SparkSession

from spark_jobs.batches.ingestion import Ingestion
from spark_jobs.batches.writer import commit_empty
from spark_jobs.ledger.ledger import Ledger

PATIENCE_SECONDS = 60.0
"""So long the others wait for one that asked: it may have died since."""
ASK_AFTER = 2
"""At the lost race of this number, and at each one behind it, the others are asked."""
LONGEST_PAUSE_SECONDS = 5.0
MOST_COMMITS = 200
"""A request further back than so many commits is not looked for."""
_POLL_SECONDS = 0.2


class Turns:
    """The turns of one run in one table.

    Args:
        spark: commits requests.
        ingestion: group, table, and the member or the shard whose transaction sequence it is.
        ledger: of that sequence.
        on_wait: told why the run waits.
    """

    def __init__(
        self, spark: SparkSession, ingestion: Ingestion, ledger: Ledger, on_wait: Callable[[str], object]
    ) -> None:
        self._spark = spark
        self._ingestion = ingestion
        self._ledger = ledger
        self._on_wait = on_wait
        self._lost = 0
        # Whose clock is ahead would be waited for again and again.
        self._waited_for = -1

    def wait(self, version: int) -> bool:
        """Before a batch is planned: let one that asked go first.

        Args:
            version: of the table as it was read for the plan.

        Returns:
            Whether it has waited, so that the table is another one now.
        """
        asked = self._request(range(version, self._waited_for, -1))
        if asked is None:
            return False
        self._on_wait(
            f"a run that replaces rows of {self._ingestion.table} has asked for its turn (version {asked}); this one "
            f"waits until that has written, up to {PATIENCE_SECONDS:g} s"
        )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while asked is not None and time.monotonic() < deadline:
            self._waited_for = asked
            time.sleep(_POLL_SECONDS)
            asked = self._request(self._ledger.log.newest_versions(after=self._waited_for - 1))
        return True

    def ask(self) -> None:
        """After a lost race: wait a moment; after another one, make the others wait.

        Raises:
            WriteError: the request cannot be committed.
        """
        self._lost += 1
        what = f"another run wrote to {self._ingestion.table} while this one replaced rows in it"
        if self._lost < ASK_AFTER:
            pause = random.uniform(0, LONGEST_PAUSE_SECONDS)  # noqa: S311 - no secret, only a turn
            self._on_wait(f"{what}; it is tried again in {pause:.1f} s")
            time.sleep(pause)
            return
        self._on_wait(f"{what}; the others are asked to wait, and it is tried again")
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
