"""Two processes put the same version of a table on Amazon S3, for which a server stands that honours its conditions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError

from spark_jobs.jars import S3_LOG_STORE_CLASS
from spark_jobs.session import object_store_config
from tests.support.log_stores import LogStore, log_store
from tests.support.s3_server import ObjectStore, object_store

pytestmark = pytest.mark.slow
VERSIONS = {True: 400, False: 300}
OF_DELTA = "io.delta.storage.S3SingleDriverLogStore"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture(scope="module", params=[S3_LOG_STORE_CLASS, OF_DELTA], ids=["ours", "of Delta"])
def two_processes(request: pytest.FixtureRequest, store: ObjectStore) -> Iterator[tuple[bool, list[LogStore]]]:
    config = object_store_config("s3a://lake/t", store.options)
    settings = {
        name.removeprefix("spark.hadoop."): value for name, value in config.items() if name.startswith("spark.hadoop.")
    }
    with ExitStack() as stack:
        both = [stack.enter_context(log_store(request.param, settings)) for _ in range(2)]
        yield request.param == S3_LOG_STORE_CLASS, both


def test_of_two_processes_that_race_one_wins_each_version(two_processes: tuple[bool, list[LogStore]]) -> None:
    """With the log store that Delta takes by itself, which shows that it is a race, both win many of them."""
    is_ours, stores = two_processes
    start = threading.Barrier(2)

    def put(number: int) -> list[bool]:
        outcomes = []
        for version in range(VERSIONS[is_ours]):
            start.wait(300)
            outcomes.append(stores[number].put(f"s3a://lake/race-{is_ours}/{version:020d}.json", f"by {number}"))
        return outcomes

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(put, range(2))
    overwritten = sum(one and other for one, other in zip(first, second))
    assert not any(not one and not other for one, other in zip(first, second)), "a version that nobody has won"
    assert (overwritten == 0) == is_ours
    assert 0 < sum(first) < VERSIONS[is_ours], "one of them was always the first"


def test_who_is_refused_finds_what_the_other_has_put(two_processes: tuple[bool, list[LogStore]]) -> None:
    is_ours, (one, other) = two_processes
    commit, outcomes = f"s3a://lake/second-{is_ours}/00000000000000000007.json", list[bool]()
    # The other one puts it between the look and the write of this one.
    assert one.put(commit, "one", meanwhile=lambda: outcomes.append(other.put(commit, "other", "more"))) is not is_ours
    assert outcomes == [True]
    if is_ours:
        # An answer that was lost makes the client put the same again, and be refused because of itself.
        assert one.put(commit, "other", "more")
        assert not one.put(commit, "other")
        assert one.put(commit, "again", overwrite=True)


def test_a_file_system_that_has_no_such_condition_is_refused(
    two_processes: tuple[bool, list[LogStore]], folder: Path
) -> None:
    is_ours, (one, _) = two_processes
    if is_ours:
        with pytest.raises(Py4JJavaError, match=r"cannot put an object only if it is absent; 3\.4\.2 and newer can"):
            one.put(folder / "0.json", "one")
        assert not list(folder.iterdir())
