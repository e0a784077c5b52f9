"""What a rebuild refuses before it begins, and what it deletes at its end; without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pytest
from deltalake import CommitProperties, Transaction, write_deltalake
from pyspark.sql import DataFrame

from spark_jobs.batches import rebuild
from spark_jobs.batches.ingestion import Ingestion, Transform
from spark_jobs.batches.rebuild import (
    OPTIONS,
    STAGING,
    check_staging,
    delete_staging,
    first_messages,
    staging_of,
)
from spark_jobs.dead_letters.table import DEAD_LETTER_SCHEMA
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.ledger.delta_log import DeltaLog
from spark_jobs.ledger.ledger import Ledger
from spark_jobs.writing.keyed import Keys
from stream_consumers.batches import Extent, Range, Resume
from stream_consumers.errors import (
    DataLossError,
    InvalidOptionError,
    KeyConflictError,
    StreamNotFoundError,
    UnsupportedError,
)
from stream_consumers.memory import MemoryBatchSource, forget_memory_broker, memory_broker
from stream_consumers.messages import Shard
from tests.support.s3_server import BUCKET, object_store
from tests.support.written_log import WrittenLog

URL = "memory://shop/orders"
ORDERS = Shard("orders")


class Trimmed(MemoryBatchSource):
    """A stream that no longer holds its first messages."""

    first = 0

    def extents(self, *, resume: Resume | None = None, budget_seconds: float | None = None) -> Mapping[Shard, Extent]:
        found = super().extents(resume=resume, budget_seconds=budget_seconds)
        return {shard: extent._replace(start=self.first) for shard, extent in found.items()}

    def lost(self, gaps: Mapping[Shard, Range]) -> Mapping[Shard, Range]:
        before = {shard: gap.clamp(Range(0, self.first)) for shard, gap in gaps.items()}
        return {shard: part for shard, part in before.items() if part.start < part.end}


@pytest.fixture
def source() -> Iterator[Trimmed]:
    for number in range(9):
        memory_broker(URL).append(ORDERS, b"%d" % number)
    with Trimmed(URL) as opened:
        yield opened
    forget_memory_broker(URL)


class Table:
    """A table that group ``g`` has written up to 5, from 2 on."""

    def __init__(self, folder: Path) -> None:
        self.log = WrittenLog(folder / "t")
        self.rows: list[pa.RecordBatch] = []
        self.ingestion = Ingestion(group="g", table=str(folder / "t"), keys=Keys(["id"]), retry_seconds=0.0)
        self.write("init", origin={ORDERS: 2}, switch="resumable", identities={"orders": "shop"})
        self.write("batch", ranges={ORDERS: Range(2, 5)})

    def write(self, kind: str, *, group: str = "g", **fields: Any) -> int:
        ledger = Ledger(self.log.log(), group=group, member="main")
        return self.log.ours(ledger.entry(kind, ledger.read(), **fields))

    def begin(self, source: Trimmed, **options: Any) -> Mapping[Shard, int]:
        return first_messages(source, self.ingestion, staging_of(self.ingestion)).sequences


@pytest.fixture
def table(tmp_path: Path, source: Trimmed, monkeypatch: pytest.MonkeyPatch) -> Table:
    made = Table(tmp_path)
    # The log names files that are not there.
    monkeypatch.setattr(rebuild, "scan", lambda *_, **__: iter(made.rows))
    made.write("batch", ranges={ORDERS: Range(5, 6)}, identities=source.identities())
    return made


def test_a_rebuild_begins_at_the_first_message_that_the_stream_holds(table: Table, source: Trimmed) -> None:
    assert table.begin(source) == {ORDERS: 0}
    source.first = 2
    assert table.begin(source) == {ORDERS: 2}


def test_a_stream_without_the_first_messages_of_the_table_is_refused_unless_the_rebuild_has_them(
    table: Table, source: Trimmed
) -> None:
    source.first = 3
    with pytest.raises(DataLossError) as failure:
        table.begin(source)
    assert failure.value.facts == {"orders/0": "2 to 3"}
    staged = WrittenLog(Path(staging_of(table.ingestion).table), properties={STAGING: "g"})
    ledger = Ledger(staged.log(), group="g", member="main")
    staged.ours(ledger.entry("init", ledger.read(), origin={ORDERS: 2}))
    table.begin(source)


def test_rows_that_a_replay_wrote_from_before_the_origin_are_last_copies(table: Table, source: Trimmed) -> None:
    table.rows.append(pa.record_batch({"_stream": ["orders"], "_shard": [0], "_sequence": [1]}))
    source.first = 1
    assert table.begin(source) == {ORDERS: 1}
    source.first = 2
    with pytest.raises(DataLossError) as failure:
        table.begin(source)
    assert failure.value.facts == {"orders/0": "1 to 2"}


def test_rows_that_a_rebuild_would_not_make_are_not_removed(tmp_path: Path, table: Table, source: Trimmed) -> None:
    table.write("init", origin={Shard("clicks"): 0})
    with pytest.raises(InvalidOptionError, match="clicks"):
        table.begin(source)
    other = Table(tmp_path / "other")
    other.write("init", group="else", origin={Shard("clicks"): 0})
    with pytest.raises(InvalidOptionError, match="else"):
        other.begin(source)
    recreated = Table(tmp_path / "recreated")
    recreated.write("accept", origin={Shard("orders#2"): 0}, ended={ORDERS: 5}, identities={"orders#2": "shop"})
    with pytest.raises(DataLossError):
        recreated.begin(source)


@pytest.mark.parametrize(
    ("sharing", "refusal"), [("load_balanced", InvalidOptionError), ("load_balanced by claims", UnsupportedError)]
)
def test_a_group_with_several_sequences_is_refused(
    table: Table, source: Trimmed, sharing: str, refusal: type[Exception]
) -> None:
    table.write("fence", switch=sharing)
    with pytest.raises(refusal):
        table.begin(source)


def test_a_table_that_does_not_exist_is_refused(tmp_path: Path, source: Trimmed) -> None:
    ingestion = Ingestion(group="g", table=str(tmp_path / "none"))
    with pytest.raises(StreamNotFoundError):
        first_messages(source, ingestion, staging_of(ingestion))


def test_positions_do_not_order_changes_of_shards_that_were_added(table: Table, source: Trimmed) -> None:
    memory_broker(URL).append(Shard("orders", 1), b"x")
    with Trimmed(URL) as grown:
        with pytest.raises(KeyConflictError):
            table.begin(grown)
        table.ingestion = Ingestion(group="g", table=table.ingestion.table, keys=Keys(["id"], sequence_by="at"))
        assert table.begin(grown) == {ORDERS: 0, Shard("orders", 1): 0}


def test_a_table_that_is_no_staging_table_is_neither_written_nor_deleted(table: Table) -> None:
    staging = staging_of(table.ingestion)
    assert not check_staging(table.ingestion, staging)
    write_deltalake(staging.table, pa.table({"id": [1]}))
    with pytest.raises(InvalidOptionError):
        check_staging(table.ingestion, staging)


def test_a_rebuild_with_other_options_is_not_continued(table: Table) -> None:
    staging = staging_of(table.ingestion)
    WrittenLog(Path(staging.table), properties={**staging.layout.properties}).commit(files={"a"})
    assert not check_staging(table.ingestion, staging)
    others = {"keys": Keys(["id", "name"]), "decoder": Json("id BIGINT"), "transform": lambda rows: rows}
    for option, value in others.items():
        other = replace(table.ingestion, **{option: value})
        with pytest.raises(InvalidOptionError):
            check_staging(other, staging_of(other))


def keeping() -> Transform:
    def rows_of(rows: DataFrame) -> DataFrame:
        return rows

    return rows_of


def filtering() -> Transform:
    def rows_of(rows: DataFrame) -> DataFrame:
        return rows.where("id > 0")

    return rows_of


def test_a_rebuild_with_another_transform_of_the_same_name_is_not_continued(table: Table) -> None:
    asked = [replace(table.ingestion, transform=made()) for made in (keeping, keeping, filtering)]
    first, same, other = ((one, staging_of(one)) for one in asked)
    WrittenLog(Path(first[1].table), properties={**first[1].layout.properties}).commit(files={"a"})
    assert not check_staging(*same)
    with pytest.raises(InvalidOptionError):
        check_staging(*other)
    # A function that is written in C has no source text.
    assert staging_of(replace(table.ingestion, transform=iter)).layout.properties[OPTIONS]


def write_dead_letters(staging: Ingestion, *, app: str = "g/main") -> None:
    """Write an empty table as dead letters of a group are written."""
    txn = CommitProperties(app_transactions=[Transaction(app, 1)])
    write_deltalake(staging.dead_letters().path, DEAD_LETTER_SCHEMA.empty_table(), commit_properties=txn)


def write_others(staging: Ingestion) -> None:
    write_deltalake(staging.dead_letters().path, pa.table({"mine": [1]}))


def write_dead_letters_of_others(staging: Ingestion) -> None:
    write_dead_letters(staging, app="other/main")


def write_a_file(staging: Ingestion) -> None:
    Path(staging.dead_letters().path).mkdir()
    Path(staging.dead_letters().path, "part-0.parquet").write_bytes(b"mine")


@pytest.mark.parametrize("write", [write_others, write_dead_letters_of_others, write_a_file])
def test_a_table_in_place_of_the_dead_letters_is_neither_written_nor_deleted(
    table: Table, write: Callable[[Ingestion], None]
) -> None:
    staging = staging_of(table.ingestion)
    write(staging)
    before = sorted(Path(staging.dead_letters().path).rglob("*"))
    for refused in (lambda: check_staging(table.ingestion, staging), lambda: delete_staging(staging)):
        with pytest.raises(InvalidOptionError):
            refused()
    assert sorted(Path(staging.dead_letters().path).rglob("*")) == before


def test_what_a_link_in_the_staging_table_points_to_is_kept(table: Table) -> None:
    staging, kept = staging_of(table.ingestion), Path(table.ingestion.table).parent / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    WrittenLog(Path(staging.table), properties={STAGING: "g"}).commit()
    Path(staging.table, "folder").symlink_to(kept)
    Path(staging.table, "linked").symlink_to(kept / "file")
    delete_staging(staging)
    assert not Path(staging.table).exists()
    assert [path.name for path in kept.iterdir()] == ["file"]


@pytest.mark.parametrize("deleted", range(7))
def test_a_swap_is_recognised_until_the_last_file_of_the_staging_table_is_deleted(
    table: Table, deleted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = staging_of(table.ingestion)
    properties = {**staging.layout.properties}
    staged = WrittenLog(Path(staging.table), table_id="staging", properties=properties)
    for name in ("a", "b", "c"):
        staged.commit(files=staged.files | {name})
        (staged.path / name).write_bytes(b"rows")
    write_dead_letters(staging)
    assert not check_staging(table.ingestion, staging)
    ranges = {ORDERS: Range(0, 9)}
    table.write("rebuild", ranges=ranges, mode="rebuild", replay="staging", goal=ranges, begins=True)
    left = [None] * deleted

    def delete_file(path: str) -> None:
        left.pop()
        (staged.path / path).unlink()

    def files(log: DeltaLog) -> Any:
        found = pyarrow.fs.SubTreeFileSystem(log.path, pyarrow.fs.LocalFileSystem())
        is_staging = log.path == staging.table
        return SimpleNamespace(delete_file=delete_file if is_staging else found.delete_file)

    with monkeypatch.context() as patched, suppress(IndexError):
        patched.setattr(DeltaLog, "files", files)
        delete_staging(staging)
    assert check_staging(table.ingestion, staging) is (deleted < 6)
    delete_staging(staging)
    assert not any(Path(path).exists() for path in (staging.table, staging.dead_letters().path))
    delete_staging(staging)


@pytest.mark.slow
def test_only_the_staging_table_is_deleted_from_an_object_store(tmp_path: Path) -> None:
    with object_store(tmp_path) as store:
        ingestion = Ingestion(group="g", table=f"s3a://{BUCKET}/t", storage_options=store.options)
        staging = staging_of(ingestion)
        beside = replace(staging, table=f"{staging.table}_2")
        for own in (staging, beside):
            for mode in ("error", "append"):
                write_deltalake(own.table, pa.table({"id": [1]}), mode=mode, storage_options=store.options)
        delete_staging(staging)
        assert staging.ledger().log.snapshot() is None
        assert beside.ledger().log.snapshot() is not None
