"""Fault injection: kill or stop the own process at a step of a batch, for tests of users' pipelines and of ours."""

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
    """One fault.

    Args:
        step: after which step.
        file_of: instead: while a table is being written, as soon as a data file shows up: ``rows`` or ``letters``.
        number: of the batch; ``None``: any.
        signal: SIGKILL, or SIGSTOP to make a zombie.
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
        """Read ``STEP[@NUMBER]``: a step's value, ``mid-write`` or ``mid-dead-letters``.

        Raises:
            InvalidOptionError: an unknown step.

        Example:
            >>> Kill.parse("rows written@3").number
            3
        """
        name, _, number = text.partition("@")
        steps = {step.value: step for step in Step}
        files = {"mid-write": "rows", "mid-dead-letters": "letters"}
        if name not in {**files, **steps}:
            known = ", ".join((*files, *steps))
            raise InvalidOptionError(f"there is no step {name!r}", remedy=f"Use one of: {known}.")
        return cls(steps.get(name), int(number) if number else None, file_of=files.get(name))


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
            elif kill.file_of is not None and step is _BEFORE_FILE[kill.file_of]:
                folder = self._table if kill.file_of == "rows" else Path(dead_letter_path(str(self._table)))
                words = (index, kill, folder, _data_files(folder))
                threading.Thread(target=self._fire_on_file, args=words, daemon=True).start()

    def _fire_on_file(self, index: int, kill: Kill, folder: Path, before: frozenset[str]) -> None:
        while _data_files(folder) <= before:
            time.sleep(_POLL_SECONDS)
        self._fire(index, kill)

    def _mark(self, index: int) -> Path:
        return self._memory / f"fault-{index}"

    def _fire(self, index: int, kill: Kill) -> None:
        self._memory.mkdir(parents=True, exist_ok=True)
        # A batch that is written a second time has two who wait for its files.
        with suppress(FileExistsError), self._mark(index).open("x") as mark:
            mark.write(str(os.getpid()))
            mark.flush()
            self.send(kill)

    def send(self, kill: Kill) -> None:
        """Send the signal to the own process; override it to reach others, too."""
        os.kill(os.getpid(), kill.signal)
