"""Which way a batch went."""

from __future__ import annotations

from spark_jobs.batches.ingestion import Batch, Step

CAREFUL = (Step.READ, Step.DEAD_LETTERS_WRITTEN)


class Steps:
    """Remembers which way each batch went."""

    def __init__(self) -> None:
        self.of: dict[int, list[Step]] = {}

    def __call__(self, step: Step, batch: Batch | None) -> None:
        if batch is not None:
            self.of.setdefault(batch.number, []).append(step)

    def ways(self) -> list[str]:
        """Per batch: ``one``, ``careful``, or ``both``."""
        return [
            "both" if Step.UNCLEAN in steps else "careful" if set(CAREFUL) <= set(steps) else "one"
            for steps in self.of.values()
        ]
