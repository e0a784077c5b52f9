"""When a batch is tried in one pass, and when it is read and counted before it is written."""

from __future__ import annotations

from collections.abc import Mapping

from spark_jobs.batches.ingestion import Batch
from spark_jobs.ledger.entries import LedgerEntry
from stream_consumers.batches import clean_counts, widths
from stream_consumers.messages import Shard

LONGEST_PAUSE = 64


class Caution:
    """Tells which batches are tried in one pass: those that may well be clean, since a try that fails is for nothing.

    None is tried after a batch that was not clean, as the ledger says; so a new process does not have to find that out.
    After a try that failed, 1, 2, 4, … up to 64 batches are not tried, until one is written in one pass again.

    Example:
        >>> caution = Caution()
        >>> caution.failed()
        >>> [caution.is_over() for _ in range(3)]
        [False, True, True]
        >>> caution.failed()
        >>> [caution.is_over() for _ in range(3)]
        [False, False, True]
    """

    def __init__(self) -> None:
        self._pause = 0
        self._longer = 1

    def counts(self, batch: Batch) -> Mapping[Shard, int] | None:
        """What a clean read of the batch gives, per shard; ``None`` if it is to be read and counted first."""
        entry = batch.entry
        is_plain = entry.kind == "batch" and entry.mode == "append" and not (entry.claims or entry.lost)
        if not is_plain or batch.doubtful or not batch.plan.splits:
            return None
        counts = clean_counts(batch.plan.splits)
        if counts is None or not self.is_over():
            return None
        planned = sum(widths(batch.plan.ranges).values())
        return counts if _is_clean(batch.previous, is_dense=sum(counts.values()) == planned) else None

    def is_over(self) -> bool:
        """Whether the pause after the last try that failed is over; it gets shorter with each question."""
        if self._pause:
            self._pause -= 1
            return False
        return True

    def failed(self) -> None:
        """A try was for nothing."""
        self._pause = self._longer
        self._longer = min(LONGEST_PAUSE, 2 * self._longer)

    def succeeded(self) -> None:
        """A batch was written in one pass."""
        self._longer = 1


def _is_clean(entry: LedgerEntry | None, *, is_dense: bool) -> bool:
    """Whether a batch held no dead letter, and where sequences grow by one, a message for each of them."""
    if entry is None or entry.kind != "batch":
        return True
    return not entry.dead and not (is_dense and entry.rows < sum(widths(entry.ranges).values()))
