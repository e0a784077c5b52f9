"""Fault injection for tests: kills or stops this process at a step of a batch."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spark_jobs.batches.ingestion import Batch, Step
from spark_jobs.dead_letters.table import dead_letter_path
from stream_consumers.errors import InvalidOptionError
from stream_consumers.options import choose_fields

KILLS_VARIABLE = "STREAM_ASSETS_KILLS"
_POLL_SECONDS = 0.001
_BEFORE_FILE = {"rows": Step.WRITING, "letters": Step.READ}


def _data_files(folder: Path) -> frozenset[str]:
    return frozenset(name for name in os.listdir(folder) if ".parquet" in name) if folder.exists() else frozenset()


@dataclass(frozen=True, slots=True)
class Kill:
    """A fault to inject.

    Args:
        step: the step after which the fault happens; ``None`` with ``file_of``.
        number: the number of the batch; ``None`` for any batch.
        signal: SIGKILL, or SIGSTOP to make a zombie.
        file_of: ``rows`` or ``letters``: the fault happens once a data file of this table appears during a write.
    """

    step: Step | None
    number: int | None = None
    signal: signal.Signals = signal.SIGKILL
    file_of: str | None = None

    def __post_init__(self) -> None:
        if self.step is not None:
            choose_fields(self, step=Step)

    @classmethod
    def parse(cls, text: str) -> Kill:
        """Parse ``STEP[@NUMBER]``, where the step is a value of ``Step``, ``mid-write`` or ``mid-dead-letters``.

        Raises:
            InvalidOptionError: the step is unknown.

        Example:
            >>> Kill.parse("rows written@3").number
            3
        """
        name, _, number = text.partition("@")
        steps = {step.value: step for step in Step}
        files = {"mid-write": "rows", "mid-dead-letters": "letters"}
        if name not in {**files, **steps}:
            known = ", ".join((*files, *steps))
            raise InvalidOptionError(f"step {name!r} is unknown", remedy=f"Use one of: {known}.")
        return cls(steps.get(name), int(number) if number else None, file_of=files.get(name))


class KillSwitch:
    """An observer of batches that injects faults into its process, each of them once.

    Args:
        kills: the faults.
        table: the table that is written, whose folder is watched for new files.
        memory: a folder that records which faults have happened, so the next run survives them.

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
        """Read the faults from ``STREAM_ASSETS_KILLS``, separated by commas."""
        listed = environment.get(KILLS_VARIABLE, "")
        return cls([Kill.parse(text) for text in listed.split(",") if text], table=table, memory=memory)

    def __call__(self, step: Step, batch: Batch | None) -> None:
        """End the process if a fault is due after a step."""
        for index, kill in enumerate(self._kills):
            is_due = kill.number is None or (batch is not None and batch.number == kill.number)
            if not is_due or self._mark(index).exists():
                continue
            if kill.step is step:
                self._fire(index, kill)
            elif kill.file_of is not None and step is _BEFORE_FILE[kill.file_of]:
                folder = self._table if kill.file_of == "rows" else Path(dead_letter_path(str(self._table)))
                arguments = (index, kill, folder, _data_files(folder))
                threading.Thread(target=self._fire_on_file, args=arguments, daemon=True).start()

    def _fire_on_file(self, index: int, kill: Kill, folder: Path, before: frozenset[str]) -> None:
        while _data_files(folder) <= before:
            time.sleep(_POLL_SECONDS)
        self._fire(index, kill)

    def _mark(self, index: int) -> Path:
        return self._memory / f"fault-{index}"

    def _fire(self, index: int, kill: Kill) -> None:
        self._memory.mkdir(parents=True, exist_ok=True)
        # If a batch is written twice, two threads wait for its files.
        with suppress(FileExistsError), self._mark(index).open("x") as mark:
            mark.write(str(os.getpid()))
            mark.flush()
            self.send(kill)

    def send(self, kill: Kill) -> None:
        """Send the signal to this process. Override the method to signal other processes, too."""
        os.kill(os.getpid(), kill.signal)
