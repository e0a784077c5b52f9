"""Measures alternating cases, and compares the results with targets."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from pyspark.sql import SparkSession

from benchmarks.process_cost import Memory, ProcessTree
from spark_jobs.session import SparkOptions, create_session
from spark_jobs.spark_server.client import end_server
from spark_jobs.spark_server.folder import server_folders

T = TypeVar("T")
MEGABYTE = 2**20
CORES = 2


@dataclass(frozen=True, slots=True)
class Case:
    """One way to do the work.

    Args:
        name: the name in the report.
        work: the function to measure; it writes to the path that it gets, where nothing exists.
        check: a function, not timed, that fails unless each message was written once.
        is_bare: whether the case runs in the workers and not in Spark; only the CPU and memory of those count.
    """

    name: str
    work: Callable[[Path], object]
    check: Callable[[Path], None]
    is_bare: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A measured value with the bound that it should reach.

    Args:
        what: the name of the value.
        value: the measured value.
        bound: the bound.
        is_least: whether the bound is a lower one.
    """

    what: str
    value: float
    bound: float
    is_least: bool

    @property
    def is_reached(self) -> bool:
        """Whether the value keeps the bound."""
        return self.value >= self.bound if self.is_least else self.value <= self.bound


@dataclass(slots=True)
class Section:
    """A table of the report.

    Args:
        title: the title of the table.
        text: what was measured.
        columns: the names of the columns.
        rows: by the name of the row, a value for each column.
        targets: the targets of these numbers.
    """

    title: str
    text: str
    columns: Sequence[str]
    rows: dict[str, list[float | str]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)


class Sample(NamedTuple):
    """What one measurement of a case took."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


class Bench:
    """Collects the measurements of a suite.

    Args:
        folder: an empty folder for all files.
        scale: the factor of the sizes; 1 for the sizes of the report.
        rounds: the number of times that each case is measured.
        log: prints a line of progress.
    """

    def __init__(self, folder: Path, *, scale: float, rounds: int, log: Callable[[str], object]) -> None:
        self.folder = folder
        self.scale = scale
        self.rounds = rounds
        self.log = log
        self.sections: list[Section] = []
        self._services: set[int] = set()
        self._spark: set[int] = set()
        self._workers: set[int] = set()
        self._paths = 0

    def size(self, full: int, *, least: int = 100) -> int:
        """A number of messages at this scale."""
        return max(least, round(full * self.scale))

    def new_path(self) -> Path:
        """A new path, where nothing exists yet."""
        self._paths += 1
        return self.folder / f"path-{self._paths}"

    def section(self, title: str, text: str, columns: Sequence[str], **options: Any) -> Section:
        """Add a table to the report."""
        section = Section(title, text, columns, **options)
        self.sections.append(section)
        self.log(title)
        return section

    def row(self, section: Section, name: str, *values: float | str) -> None:
        """Add a row, and log it."""
        section.rows[name] = list(values)
        values_text = ", ".join(f"{column} {formatted(value)}" for column, value in zip(section.columns, values))
        self.log(f"  {name}: {values_text}")

    def target(
        self, section: Section, what: str, value: float, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Compare a value with its bound, and log the result."""
        is_least = at_least is not None
        bound = at_least if at_least is not None else at_most
        assert bound is not None
        target = Target(what, value, bound, is_least)
        section.targets.append(target)
        sign = ("≥" if is_least else "≤") + f" {bound:g}"
        self.log(f"  {what}: {formatted(value)}, to be {sign}: {'reached' if target.is_reached else 'MISSED'}")

    @contextmanager
    def service(self, service: AbstractContextManager[T]) -> Iterator[T]:
        """Run a server during the block; its CPU and memory count for no case."""
        before = ProcessTree(os.getpid()).processes()
        with service as started:
            self._services |= ProcessTree(os.getpid()).processes() - before
            yield started

    @contextmanager
    def workers(self) -> Iterator[ProcessPoolExecutor]:
        """Start as many processes for bare loops as Spark has cores."""
        before = ProcessTree(os.getpid()).processes()
        with ProcessPoolExecutor(CORES, multiprocessing.get_context("spawn")) as pool:
            # The first tasks start the processes.
            for started in [pool.submit(time.sleep, 0.5) for _ in range(CORES)]:
                started.result()
            self._workers = ProcessTree(os.getpid()).processes() - before
            yield pool
        self._workers = set()

    @contextmanager
    def spark(self, jars: Sequence[Path] = (), *, is_kept: bool = False, **settings: str) -> Iterator[SparkSession]:
        """Create a session of the local server, with two cores; the server ends with it unless ``is_kept``."""
        beside = {"spark.jars": ",".join(map(str, jars))} if jars else {}
        session = create_session(SparkOptions(master=f"local[{CORES}]", config={**beside, **settings}))
        self._spark = {address.pid for server in server_folders() if (address := server.address()) is not None}
        try:
            yield session
        finally:
            session.stop()
            if not is_kept:
                end_servers()

    def processes(self) -> ProcessTree:
        """This process, its descendants without services, and the local Spark servers that run now."""
        servers = {address.pid for server in server_folders() if (address := server.address()) is not None}
        return ProcessTree(os.getpid(), *servers, without=self._services)

    def server_memory(self) -> Memory:
        """The memory of the local server now."""
        return ProcessTree(*self._spark).memory()

    def compare(self, title: str, text: str, cases: Sequence[Case], *, messages: int) -> Mapping[str, Sample]:
        """Measure the cases in turn, after one round that is not counted.

        Returns:
            The median of the seconds and of the CPU time of each case, and its largest memory.
        """
        columns = ("seconds", "messages/s", "fastest", "slowest", "CPU-seconds", "peak MB")
        section, medians = self.section(title, text, columns), {}
        for name, samples in self.measure(cases).items():
            seconds_of, cpu_of, peak_of = zip(*samples)
            seconds, cpu, peak = median(seconds_of), median(cpu_of), max(peak_of)
            medians[name] = Sample(seconds, cpu, peak)
            values = (seconds, round(messages / seconds), min(seconds_of), max(seconds_of), cpu, peak // MEGABYTE)
            self.row(section, name, *values)
        return medians

    def measure(
        self,
        cases: Sequence[Case],
        *,
        rounds: int | None = None,
        before_round: Callable[[], object] = lambda: None,
    ) -> Mapping[str, Sequence[Sample]]:
        """Measure the cases in turn, after one round that is not counted.

        Args:
            cases: the cases.
            rounds: the number of rounds that count, in place of the usual one.
            before_round: called before each round; it is not timed.
        """
        taken: dict[str, list[Sample]] = {case.name: [] for case in cases}
        for turn in range((rounds or self.rounds) + 1):
            before_round()
            for case in cases:
                path = self.new_path()
                with self._processes(case).measured() as cost:
                    began = perf_counter()
                    case.work(path)
                    seconds = perf_counter() - began
                case.check(path)
                shutil.rmtree(path, ignore_errors=True)
                self.log(f"  round {turn or 'to warm up'}: {case.name} took {seconds:.2f} s")
                if turn:
                    taken[case.name].append(Sample(seconds, cost.cpu_seconds, cost.peak_bytes))
        return taken

    def _processes(self, case: Case) -> ProcessTree:
        others = self._spark if case.is_bare else self._workers
        return ProcessTree(os.getpid(), *(set() if case.is_bare else self._spark), without=self._services | others)

    def to_json(self) -> list[dict[str, Any]]:
        """The tables as JSON."""
        return [asdict(section) for section in self.sections]


def end_servers() -> None:
    """End the local Spark servers of this benchmark, which have their own folder."""
    for server in server_folders():
        if server.is_alive():
            with server.start_lock():
                end_server(server)


def formatted(value: float | str) -> str:
    """A number with three significant digits, or the text."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{round(value):,}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
