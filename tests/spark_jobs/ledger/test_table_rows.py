"""The rows of a table, read without Spark, by a process that then ends."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.table_rows import (
    ROW_TIME,
    changed_times,
    extents_of,
    names_in_files,
    scan,
    sequences_of,
    written_sequences,
)
from stream_consumers.batches import Range
from stream_consumers.messages import Shard
from tests.support.ledger_tables import STREAM, at, write_batch
from tests.support.python_programs import run_python

MONDAY, TUESDAY, WEDNESDAY = "2026-11-16", "2026-11-17", "2026-11-18"

# A deletion vector of the row with index 1, as Delta writes it into a log.
SECOND_ROW = "^Bg9^0rr910000000000iXQKl0rr91000005c8Xg0rr91"
READ = """
import sys
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.table_rows import scan
print(sum(batch.num_rows for batch in scan(DeltaLog(sys.argv[1]), ["id"], where="id < 5")), flush=True)
"""


def write(path: Path, count: int) -> None:
    table = pa.table({"id": list(range(count)), "text": [f"{n:0100}" for n in range(count)]})
    for start in range(0, count, count // 4):
        write_deltalake(str(path), table.slice(start, count // 4), mode="append")


def test_a_process_that_has_read_a_table_ends_in_peace(folder: Path) -> None:
    """With files that Python opens for Arrow, it mostly ends with "terminate called" instead."""
    write(folder / "t", 100_000)
    for _ in range(3):
        done = run_python(READ, folder / "t")
        assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")


def test_versions_and_names_that_the_log_escapes(folder: Path) -> None:
    log = DeltaLog(str(folder / "a table"))
    write(Path(log.path), 8)
    assert sum(batch.num_rows for batch in scan(log)) == 8
    assert sum(batch.num_rows for batch in scan(log, version=0)) == 2
    named = pa.table({"id": [1, 2], "day": ["a b%c", "d"]})
    write_deltalake(str(folder / "parts"), named, partition_by=["day"])
    found = [row for batch in scan(DeltaLog(str(folder / "parts")), ["id", "day"]) for row in batch.to_pylist()]
    assert sorted(found, key=lambda row: row["id"]) == named.to_pylist()


@pytest.mark.parametrize("partition_by", [None, ["_stream"], ["_shard", "_stream"]], ids=repr)
@pytest.mark.parametrize("mapping", ["none", "name"])
def test_what_a_commit_wrote_is_told_also_of_a_table_that_is_partitioned_by_the_place(
    folder: Path, partition_by: list[str] | None, mapping: str
) -> None:
    table = folder / "t"
    properties: dict[str, str | None] = {"delta.columnMapping.mode": mapping}
    first = write_batch(table, {0: MONDAY, 1: TUESDAY}, partition_by=partition_by, properties=properties)
    second = write_batch(table, {1: WEDNESDAY}, kind="replay", ranges=[1])
    log, shard = DeltaLog(str(table)), Shard(STREAM, 0)
    commits = [log.commit(version) for version in (first, second)]
    names = names_in_files(log, ROW_TIME)
    times = [changed_times(log, commit, names=names) for commit in commits if commit]
    assert [None if of is None else (sorted(of.written), sorted(of.replaced)) for of in times] == [
        ([at(MONDAY), at(TUESDAY)], []),
        ([at(WEDNESDAY)], [at(TUESDAY)]),
    ]
    for part, expected in ((Range(0, 9), [0, 1]), (Range(1, 9), [1])):
        assert commits[0]
        found = written_sequences(log, commits[0], {shard: part}, names=names[:-1])
        assert found is not None
        assert found[shard].tolist() == expected


def test_sequences_of_redis_are_exact_beside_rows_that_have_none() -> None:
    last = 1_741_564_800_000 << 16 | 3
    batch = pa.record_batch({"_stream": ["s", "s"], "_shard": [0, 0], "_sequence": pa.array([last, None], pa.int64())})
    assert extents_of([batch]) == {Shard("s"): Range(last, last + 1)}
    assert [own.tolist() for own in sequences_of([batch]).values()] == [[last]]


def test_what_only_got_a_deletion_vector_is_no_file_that_is_missing(folder: Path) -> None:
    """In a shallow clone it is a file of the other table, named by a URI."""
    log = folder / "_delta_log"
    log.mkdir()
    files: list[dict[str, object]] = [
        {"path": "file:/elsewhere/a.parquet", "deletionVector": {"storageType": "u"}, "dataChange": True},
        {"path": "b.parquet", "dataChange": True},
    ]
    (log / f"{3:020d}.json").write_text("\n".join(json.dumps({"add": file}) for file in files))
    assert DeltaLog(str(folder)).missing_files(3) == ["b.parquet"]


def test_rows_that_a_deletion_vector_hides_are_not_counted(folder: Path) -> None:
    write_deltalake(folder, pa.table({"id": [1, 2, 3]}))
    log = DeltaLog(str(folder))
    assert log.row_count() == 3
    (added,) = [action for line in read_version(folder, 0) if (action := line.get("add"))]
    features = ["deletionVectors"]
    versions = {"minReaderVersion": 3, "minWriterVersion": 7}
    hidden = {"storageType": "i", "pathOrInlineDv": SECOND_ROW, "sizeInBytes": 34, "cardinality": 1}
    actions: list[dict[str, object]] = [
        {"protocol": {**versions, "readerFeatures": features, "writerFeatures": features}},
        {"remove": {"path": added["path"], "dataChange": True, "deletionTimestamp": 1}},
        {"add": {**added, "deletionVector": hidden}},
    ]
    (folder / "_delta_log" / f"{1:020d}.json").write_text("\n".join(map(json.dumps, actions)))
    assert (log.row_count(version=0), DeltaLog(str(folder)).row_count()) == (3, 2)


def test_rows_of_a_table_whose_types_may_be_widened_are_counted(folder: Path) -> None:
    write_deltalake(folder, pa.table({"id": [1, 2, 3]}))
    for version, features in enumerate((["typeWidening"], ["typeWidening", "deletionVectors"]), start=1):
        protocol = {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": features,
            "writerFeatures": features,
        }
        (folder / "_delta_log" / f"{version:020d}.json").write_text(json.dumps({"protocol": protocol}))
    log = DeltaLog(str(folder))
    assert [log.row_count(version=version) for version in range(3)] == [3, 3, None], "delta-rs reads no vectors there"


def read_version(folder: Path, version: int) -> list[dict[str, dict[str, object]]]:
    """The actions of a commit."""
    return [json.loads(line) for line in (folder / "_delta_log" / f"{version:020d}.json").read_text().splitlines()]
