"""Fault injection: kill or stop the own process at a step of a batch, for tests of users' pipelines and of ours."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spark_jobs.ingestion import Batch, Step
from stream_consumers.errors import InvalidOptionError

KILLS_VARIABLE = "STREAM_ASSETS_KILLS"
_POLL_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Kill:
    """One fault.

    Args:
        step: after which step; ``None``: while the rows are being written, as soon as a data file shows up.
        number: of the batch; ``None``: any.
        signal: SIGKILL, or SIGSTOP to make a zombie.
    """

    step: Step | None
    number: int | None = None
    signal: signal.Signals = signal.SIGKILL

    @classmethod
    def parse(cls, text: str) -> Kill:
        """Read ``STEP[@NUMBER]``: a step's value, or ``mid-write``.

        Raises:
            InvalidOptionError: an unknown step.

        Example:
            >>> Kill.parse("rows written@3").number
            3
        """
        name, _, number = text.partition("@")
        steps = {step.value: step for step in Step}
        if name != "mid-write" and name not in steps:
            raise InvalidOptionError(f"there is no step {name!r}", remedy=f"Use mid-write, {', '.join(steps)}.")
        return cls(steps.get(name), int(number) if number else None)


class KillSwitch:
    """An observer of batches that ends its own process, each fault once.

    Args:
        kills: the faults.
        table: the table that is written, to see when its files appear.
        memory: a folder that remembers which faults have happened, so that the next run survives.

    Example:
        >>> switch = KillSwitch([Kill.parse("verified")], table="lake/orders", memory="marks")
    """

    def __init__(self, kills: list[Kill], *, table: str, memory: str | Path) -> None:
        self._kills = kills
        self._table = Path(table)
        self._memory = Path(memory)

    @classmethod
    def from_environment(
        cls, *, table: str, memory: str | Path, environment: Mapping[str, str] = os.environ
    ) -> KillSwitch:
        """The faults named in ``STREAM_ASSETS_KILLS``, separated by commas."""
        listed = environment.get(KILLS_VARIABLE, "")
        return cls([Kill.parse(text) for text in listed.split(",") if text], table=table, memory=memory)

    def __call__(self, step: Step, batch: Batch | None) -> None:
        """Told of a step: end the process if a fault is due."""
        for index, kill in enumerate(self._kills):
            is_due = kill.number is None or (batch is not None and batch.number == kill.number)
            if not is_due or self._mark(index).exists():
                continue
            if kill.step is step:
                self._fire(index, kill)
            elif kill.step is None and step is Step.WRITING:
                before = self._files()
                threading.Thread(target=self._fire_on_file, args=(index, kill, before), daemon=True).start()

    def _fire_on_file(self, index: int, kill: Kill, before: frozenset[str]) -> None:
        while self._files() <= before:
            time.sleep(_POLL_SECONDS)
        self._fire(index, kill)

    def _files(self) -> frozenset[str]:
        return frozenset(name for name in os.listdir(self._table) if ".parquet" in name)

    def _mark(self, index: int) -> Path:
        return self._memory / f"fault-{index}"

    def _fire(self, index: int, kill: Kill) -> None:
        self._memory.mkdir(parents=True, exist_ok=True)
        self._mark(index).write_text(str(os.getpid()))
        self.send(kill)

    def send(self, kill: Kill) -> None:
        """Send the signal to the own process; override it to reach others, too."""
        os.kill(os.getpid(), kill.signal)
