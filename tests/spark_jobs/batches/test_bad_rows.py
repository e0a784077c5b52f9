"""Rows that are bad: their messages become dead letters with their bytes, the others are written, each once."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from spark_jobs.batches import bad_rows as filtering
from spark_jobs.batches.bounds import Bound
from spark_jobs.batches.dead_letter_jobs import Outcome, Redrive, RedriveJob
from spark_jobs.batches.ingestion import BatchReport, Ingestion
from spark_jobs.batches.job import drain_batches
from spark_jobs.batches.replay import Replay, ReplayJob
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.reading.rejection import reject
from spark_jobs.reading.source import STREAM_COLUMNS
from spark_jobs.verify import verify
from spark_jobs.writing.keyed import Keys
from spark_jobs.writing.layout import TableLayout
from stream_consumers.create import create_producer, open_batch_source
from stream_consumers.errors import ConstraintViolatedError, InvalidOptionError, TransformError
from stream_consumers.options import ErrorPolicy
from stream_consumers.urls import StreamUrl
from tests.support.ingesting import drain, ingestion
from tests.support.steps import Steps
from tests.support.streams import Identity, assert_each_once, sequences_in_table, write_stream

DEAD = ErrorPolicy(on_bad_rows="dead_letter")


@dataclass(frozen=True)
class Lake:
    """A file with messages of ids from 0 on, in two shards, and its table."""

    spark: SparkSession
    folder: Path
    ways: list[str] = field(default_factory=list)

    @property
    def table(self) -> str:
        return str(self.folder / "t")

    def send(self, count: int, **more: Any) -> str:
        return write_stream(self.folder / "orders.ss", count, **more)

    def what(self, transform: Callable[[DataFrame], DataFrame] | None = None, **more: Any) -> Ingestion:
        return replace(ingestion(Path(self.table), records=more.pop("records", 1000), transform=transform), **more)

    def send_payloads(self, *payloads: bytes) -> None:
        with create_producer(f"file://{self.folder}/orders.ss/orders") as producer:
            for index, payload in enumerate(payloads):
                producer.send(payload, shard=index % 2, timestamp_ms=1_700_000_000_000 + index)

    def ingest(self, what: Ingestion) -> list[BatchReport]:
        steps = Steps()
        try:
            return drain(self.spark, f"file://{self.folder}/orders.ss/orders", what, steps)
        finally:
            self.ways.extend(steps.ways())

    def letters(self) -> dict[int, tuple[str, bytes]]:
        """By the number of its message, what a dead letter says and holds."""
        if not DeltaTable.is_deltatable(f"{self.table}_dead_letters"):
            return {}
        rows = DeltaTable(f"{self.table}_dead_letters").to_pyarrow_table().to_pylist()
        assert all(row["is_message"] for row in rows)
        return {number(row): (row["error"], row["payload"]) for row in rows}

    def dead(self, what: Ingestion) -> Counter[Identity]:
        """The places of the dead letters that count."""
        rows = [row for batch in what.dead_letters().counted_places(what.ledger()) for row in batch.to_pylist()]
        return Counter((row["_stream"], row["_shard"], row["_sequence"]) for row in rows)

    def redrive(self, what: Ingestion, *, is_preview: bool = False) -> Outcome:
        job = RedriveJob(self.spark, what, Redrive(), url=StreamUrl.parse(f"file://{self.folder}/orders.ss/orders"))
        if is_preview:
            return job.preview()
        for _ in drain_batches(job):
            pass
        return job.outcome

    def errors(self) -> set[tuple[int, str]]:
        """Of each dead letter the id of its message, -1 if it has none, and what it says."""
        found = [(re.search(rb"[0-9]+", payload), error) for error, payload in self.letters().values()]
        return {(int(digits[0]) if digits else -1, error) for digits, error in found}

    def assert_each_once(self, what: Ingestion) -> None:
        assert_each_once(self.folder / "orders.ss", self.table)
        self.assert_right(what)

    def assert_right(self, what: Ingestion) -> None:
        with open_batch_source(f"file://{self.folder}/orders.ss/orders") as source:
            assert [found for found in verify(source, what) if not found.is_right or found.unexplained] == []


def number(row: dict[str, Any]) -> int:
    return int((row["_sequence"] - 1) * 2 + row["_shard"])


def place(index: int) -> Identity:
    return ("orders", index % 2, index // 2 + 1)


@pytest.fixture
def lake(spark: SparkSession, folder: Path) -> Lake:
    return Lake(spark, folder)


def no_seven(rows: DataFrame) -> DataFrame:
    """Rejects for two reasons, of which one is a column."""
    rows = reject(rows, "id IN (7, 8)", "seven or eight")
    rows = reject(rows, f.col("id").isin(8, 57), f.concat(f.col("user"), f.lit(" has fiftyseven")))
    return rows.select("id", *STREAM_COLUMNS, f.current_timestamp().alias("at"))


@pytest.mark.slow
def test_rejected_messages_become_dead_letters_with_their_bytes(lake: Lake) -> None:
    """The first reason counts; a batch without any is written in one pass, also one with a column of the time."""
    lake.send(300, malformed=frozenset({99}))
    what = lake.what(no_seven, records=100, is_row_wise=True)
    reports = lake.ingest(what)
    letters = lake.letters()
    assert set(letters) == {7, 8, 57, 99}
    assert letters[7] == ("rejected: seven or eight", b'{"id": 7, "user": "u0"}')
    assert letters[8] == ("rejected: seven or eight", b'{"id": 8, "user": "u1"}')
    assert letters[57] == ("rejected: 'u1 has fiftyseven'", b'{"id": 57, "user": "u1"}')
    assert [(report.dead, sum(report.messages.values())) for report in reports] == [(4, 96), (0, 100), (0, 100)]
    assert lake.ways == ["both", "careful", "one"]
    lake.assert_each_once(what)


@pytest.mark.parametrize("driver_records", [pytest.param(0, marks=pytest.mark.slow), 1000], ids=["executors", "driver"])
def test_one_batch_has_all_kinds_of_bad_rows(lake: Lake, driver_records: int) -> None:
    """Rejected, refused by the table, failing and malformed; also where the driver reads it."""

    def transform(rows: DataFrame) -> DataFrame:
        def picky(number):  # type: ignore[no-untyped-def]  # Spark would evaluate the annotations
            if number == 5:
                raise ValueError(number)
            return number

        return reject(rows, "id = 7", "seven").withColumn("id", f.udf(picky, "bigint")("id"))

    lake.send(1)
    what = lake.what(transform, errors=DEAD, driver_records=driver_records)
    lake.ingest(what)
    lake.spark.sql(f"ALTER TABLE delta.`{lake.table}` ADD CONSTRAINT few CHECK (id <> 3)")
    lake.send(10, malformed=frozenset({9}))
    (report,) = lake.ingest(what)
    place = re.compile(r"in line \d+ of \S+bad_rows\.py")
    assert {(index, place.sub("in its line", error)) for index, error in lake.errors()} == {
        (-1, "not a JSON object"),
        (7, "rejected: seven"),
        (3, "the CHECK constraint few (id <> 3) is violated"),
        (5, "a function of the transform raised ValueError in its line: '5'"),
    }
    assert (report.dead, report.rows) == (4, 6)
    lake.assert_each_once(what)


@pytest.mark.slow
def test_what_is_dropped_later_does_not_take_a_rejection_back(lake: Lake) -> None:
    """Spark would ask for the later condition first, and never see that the row is bad."""

    def transform(rows: DataFrame) -> DataFrame:
        return reject(rows, "id IS NULL", "no id").where("10 / id > 0")

    lake.send_payloads(b'{"user": "a"}', b'{"id": 1}', b'{"id": -1}')
    what = lake.what(transform, is_row_wise=True)
    lake.ingest(what)
    assert lake.ways == ["both"], "the write failed, though the row would have been dropped"
    assert lake.letters() == {0: ("rejected: no id", b'{"user": "a"}')}
    assert sequences_in_table(lake.table) == {place(1): 1}
    lake.assert_right(what)


@pytest.mark.slow
def test_a_message_of_several_rows_is_rejected_as_a_whole_and_redriven_as_a_whole(lake: Lake) -> None:
    def items(rows: DataFrame) -> DataFrame:
        return rows.withColumn("item", f.explode(f.array("id", f.col("id") + 1, f.col("id") + 2)))

    def strict(rows: DataFrame) -> DataFrame:
        return reject(items(rows), "item IN (5, 9)", f.concat(f.lit("item "), "item"))

    def today(rows: DataFrame) -> DataFrame:
        return reject(items(rows), "item = 9", f.concat(f.lit("item "), "item"))

    lake.send(10, malformed=frozenset({0}))
    lake.ingest(lake.what(strict))
    assert set(lake.letters()) == {0, 3, 4, 5, 7, 8, 9}
    lenient = lake.what(today)
    preview = lake.redrive(lenient, is_preview=True)
    outcome = lake.redrive(lenient)
    assert preview == outcome
    assert outcome.decoded == 3
    assert {reason: (one.count, one.first) for reason, one in outcome.refused.items() if "rejected" in reason} == {
        "rejected: '…'": (3, "orders/0=5")
    }
    assert sequences_in_table(lake.table) == Counter({place(index): 3 for index in (1, 2, 3, 4, 5, 6)})
    assert lake.dead(lenient) == Counter(map(place, (0, 7, 8, 9)))
    lake.assert_right(lenient)
    assert lake.redrive(lake.what(items)).decoded == 3
    assert sequences_in_table(lake.table) == Counter({place(index): 3 for index in range(1, 10)})
    lake.assert_right(lenient)


@pytest.mark.slow
def test_a_replay_rejects_what_was_written_and_writes_what_was_rejected(lake: Lake) -> None:
    def odd(rows: DataFrame) -> DataFrame:
        return reject(rows, "id % 2 = 1", "odd")

    def even(rows: DataFrame) -> DataFrame:
        return reject(rows, "id % 2 = 0", "even")

    url = lake.send(20)
    lake.ingest(lake.what(odd))
    what = lake.what(even)
    with open_batch_source(url) as source:
        for _ in drain_batches(ReplayJob(lake.spark, source, what, Replay(stop=Bound.at_sequences({"orders/0": 6})))):
            pass
    assert lake.dead(what) == Counter(map(place, range(0, 10, 2)))
    assert sequences_in_table(lake.table) == Counter(map(place, [*range(1, 20, 2), *range(10, 20, 2)]))
    lake.assert_right(what)


@pytest.mark.slow
def test_each_message_is_there_once_whatever_a_condition_says_the_next_time(lake: Lake) -> None:
    lake.send(200)
    what = lake.what(lambda rows: reject(reject(rows, f.rand() < 0.3, "one"), f.rand() < 0.3, "two"))
    lake.ingest(what)
    assert {error for error, _ in lake.letters().values()} == {"rejected: one", "rejected: two"}
    lake.assert_each_once(what)


@pytest.mark.slow
def test_a_transform_that_is_seen_late_to_reject_has_the_bytes_as_well(lake: Lake) -> None:
    """On no rows, as before the first batch, it does not."""
    lake.send(10)

    def transform(rows: DataFrame) -> DataFrame:
        return rows if rows.isEmpty() else reject(rows, "id = 3", "three").limit(100)

    lake.ingest(lake.what(transform))
    assert lake.ways == ["careful"]
    assert lake.letters() == {3: ("rejected: three", b'{"id": 3, "user": "u3"}')}
    lake.assert_each_once(lake.what(transform))


@pytest.mark.parametrize(
    "change",
    [lambda rows: rows.withColumn("_sequence", f.col("_sequence") + 1000), lambda rows: rows.drop("_shard")],
    ids=["another place", "no place"],
)
def test_what_is_rejected_is_a_message_of_the_batch(lake: Lake, change: Callable[[DataFrame], DataFrame]) -> None:
    lake.send(10)

    def transform(rows: DataFrame) -> DataFrame:
        reject(change(rows), "id IN (2, 3)", "two or three")
        return reject(rows, "id = 2", "two").limit(100)

    with pytest.raises(TransformError):
        lake.ingest(lake.what(transform))
    assert lake.letters() == {}
    assert sequences_in_table(lake.table) == {}


CONSTRAINTS = """CREATE TABLE delta.`{}` (
    id BIGINT, user VARCHAR(4), place STRUCT<zip: INT NOT NULL>, kind STRING NOT NULL,
    twice BIGINT GENERATED ALWAYS AS (2 * id), thrice BIGINT GENERATED ALWAYS AS (3 * id), missing INT,
    _stream STRING, _shard BIGINT, _sequence BIGINT, _timestamp TIMESTAMP
) USING delta PARTITIONED BY (kind)"""
# With what Spark writes as three bytes, a folder of 255 bytes.
LONGEST = filtering.ESCAPED + "x" * (250 - 3 * len(filtering.ESCAPED))
CONSTRAINED = Json("id BIGINT, user STRING, place STRUCT<zip: INT>, kind STRING, twice BIGINT")
GOOD = [
    b'{"id": 1, "user": "abcd", "place": {"zip": 1}, "kind": "k", "twice": 2}',
    b'{"id": 2, "place": {"zip": 2}, "kind": "k", "twice": 4}',
    json.dumps({"id": 7, "place": {"zip": 2}, "kind": LONGEST, "twice": 14}).encode(),
]
BROKEN = {
    b'{"id": 0, "place": {"zip": 1}, "kind": "k", "twice": 0}': "the CHECK constraint positive (id > 0) is violated",
    b'{"place": {"zip": 1}, "kind": "k"}': "the CHECK constraint positive (id > 0) is violated",
    b'{"id": 34, "place": {"zip": 1}, "kind": "k", "twice": 68}': "the CHECK constraint small (thrice < 100)",
    b'{"id": 3, "user": "abcde", "place": {"zip": 1}, "kind": "k", "twice": 6}': "the column user is a VARCHAR(4)",
    b'{"id": 4, "place": {}, "kind": "k", "twice": 8}': "the column place.zip is NOT NULL",
    b'{"id": 4, "kind": "k", "twice": 8}': "the column place.zip is NOT NULL",
    b'{"id": 5, "place": {"zip": 1}, "twice": 10}': "the column kind is NOT NULL",
    b'{"id": 6, "place": {"zip": 1}, "kind": "k", "twice": 13}': "the column twice differs from its generated value: 2",
    json.dumps(
        {"id": 8, "place": {"zip": 1}, "kind": f"{LONGEST}x", "twice": 16}
    ).encode(): "the column kind names a fol",
    b'{"id": 9, "place": {"zip": 1}, "kind": "a\\u0000b", "twice": 18}': "the column kind names a folder",
    b'{"id": 10, "place": {"zip": 1}, "kind": "", "twice": 20}': "the table is partitioned by the column kind, and ",
}


@pytest.fixture
def constrained(lake: Lake) -> Lake:
    lake.spark.sql(CONSTRAINTS.format(lake.table))
    for text in ("positive CHECK (id > 0)", "small CHECK (thrice < 100)", "fine CHECK (missing IS NULL)"):
        lake.spark.sql(f"ALTER TABLE delta.`{lake.table}` ADD CONSTRAINT {text}")
    return lake


@pytest.mark.slow
def test_messages_that_break_a_constraint_become_dead_letters_and_the_others_rows(constrained: Lake) -> None:
    lake = constrained
    lake.send_payloads(*GOOD, *BROKEN)
    what = lake.what(decoder=CONSTRAINED, errors=DEAD)
    (report,) = lake.ingest(what)
    letters = lake.letters()
    assert [letters[len(GOOD) + index][1] for index in range(len(BROKEN))] == [*BROKEN]
    assert all(letters[len(GOOD) + index][0].startswith(error) for index, error in enumerate(BROKEN.values()))
    assert (report.dead, report.rows) == (len(BROKEN), len(GOOD))
    assert lake.ways == ["both"]
    lake.assert_each_once(what)
    thrice = DeltaTable(lake.table).to_pyarrow_table().column("thrice").to_pylist()
    assert sorted(thrice) == [3, 6, 21]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["'delta.randomizeFilePrefixes' = 'true'", "'delta.columnMapping.mode' = 'name'"])
def test_a_value_of_any_length_is_a_row_where_folders_have_random_names(lake: Lake, setting: str) -> None:
    lake.spark.sql(f"{CONSTRAINTS.format(lake.table)} TBLPROPERTIES ({setting})")
    lake.send_payloads(json.dumps({"id": 1, "place": {"zip": 1}, "kind": "x" * 300, "twice": 2}).encode())
    what = lake.what(decoder=CONSTRAINED, errors=DEAD)
    (report,) = lake.ingest(what)
    assert (report.dead, report.rows) == (0, 1)
    # delta-rs does not read columns of another physical name.
    (row,) = lake.spark.read.format("delta").load(lake.table).collect()
    assert (row["_sequence"], row["kind"]) == (1, "x" * 300)


@pytest.mark.slow
@pytest.mark.parametrize("payload", BROKEN)
def test_delta_refuses_what_becomes_a_dead_letter(constrained: Lake, payload: bytes) -> None:
    """And it is told where it is, and what can be done."""
    lake = constrained
    lake.send_payloads(*GOOD, payload)
    with pytest.raises(ConstraintViolatedError) as raised:
        lake.ingest(lake.what(decoder=CONSTRAINED))
    assert f"at orders/1=2, for one, {BROKEN[payload]}" in raised.value.what
    assert sequences_in_table(lake.table) == {}


def with_bytes(rows: DataFrame) -> DataFrame:
    """Has a text that is not UTF-8, and drops the message -1."""
    dropped = rows.sparkSession.createDataFrame([(-1,)], "id BIGINT")
    return rows.join(f.broadcast(dropped), "id", "left_anti").withColumn(
        "kind", f.expr("IF(kind = 'bytes', CAST(X'61ff' AS STRING), kind)")
    )


@pytest.mark.slow
@pytest.mark.parametrize("driver_records", [0, 1000], ids=["executors", "driver"])
def test_a_value_that_delta_would_change_in_the_name_of_a_folder_is_not_written(
    lake: Lake, driver_records: int
) -> None:
    """Neither in a column of the rows nor in one that Delta computes; a run in mode ``fail`` commits nothing."""
    layout = TableLayout(partition_by=["KIND", "shown"], generated_columns={"shown": "concat('', user)"})
    decoder = Json("id BIGINT, kind STRING, user STRING")
    more = {"layout": layout, "decoder": decoder, "driver_records": driver_records, "is_row_wise": True}
    what = lake.what(with_bytes, **more)
    kinds = [None, "null", "K ", " k", "k", "__hive_default_partition__", "a%2Fb/c=d", "\u00e9", "e\u0301"]
    lake.send_payloads(*(json.dumps({"id": at, "kind": kind, "user": kind}).encode() for at, kind in enumerate(kinds)))
    lake.send_payloads(b'{"id": -1, "kind": "", "user": ""}')
    lake.ingest(what)
    for number, (kind, user) in enumerate(
        [("", "x"), ("__HIVE_DEFAULT_PARTITION__", "x"), ("bytes", "x"), ("x", ""), ("x", "__HIVE_DEFAULT_PARTITION__")]
    ):
        lake.send_payloads(json.dumps({"id": 99, "kind": kind, "user": user}).encode())
        version = DeltaTable(lake.table).version()
        with pytest.raises(ConstraintViolatedError) as raised:
            lake.ingest(what)
        assert f"partitioned by the column {'kind' if user == 'x' else 'shown'}, and" in raised.value.what
        assert DeltaTable(lake.table).version() == version
        (report,) = lake.ingest(replace(what, errors=DEAD))
        assert (report.dead, report.rows, len(lake.letters())) == (1, 0, number + 1)
    found = lake.spark.read.format("delta").load(lake.table).orderBy("id").collect()
    assert [(row["kind"], row["shown"]) for row in found] == [(kind, kind) for kind in kinds]
    assert set(lake.ways) == ({"one", "both", "careful"} if driver_records == 0 else {"careful"})
    lake.assert_right(what)


@pytest.mark.slow
def test_a_stream_with_the_name_that_stands_for_null_is_not_written_into_folders(lake: Lake) -> None:
    url = f"file://{lake.folder}/orders.ss/__HIVE_DEFAULT_PARTITION__"
    with create_producer(url) as producer:
        producer.send(b'{"id": 1}')
    with pytest.raises(ConstraintViolatedError):
        drain(lake.spark, url, lake.what(layout=TableLayout(partition_by=["_stream"])))
    assert sequences_in_table(lake.table) == {}


@pytest.mark.slow
def test_a_key_that_divides_the_table_is_read_back(lake: Lake) -> None:
    more = {"layout": TableLayout(partition_by=["kind"]), "decoder": Json("kind STRING, id BIGINT")}
    what = lake.what(keys=Keys(["kind"]), **more)
    lake.send_payloads(b'{"kind": "k", "id": 1}', b'{"kind": "j", "id": 0}')
    lake.ingest(what)
    lake.send_payloads(b'{"kind": "k", "id": 2}', b'{"kind": "", "id": 3}', b'{"kind": "K", "id": 4}')
    with pytest.raises(ConstraintViolatedError):
        lake.ingest(what)
    (report,) = lake.ingest(replace(what, errors=DEAD))
    rows = lake.spark.read.format("delta").load(lake.table).orderBy("id").collect()
    assert (report.dead, [(row["kind"], row["id"]) for row in rows]) == (1, [("j", 0), ("k", 2), ("K", 4)])


@pytest.mark.slow
def test_times_are_read_back_whatever_a_session_of_the_user_says(lake: Lake) -> None:
    settings = {
        "spark.sql.session.timeZone": "Europe/Paris",
        "spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY",
        "spark.databricks.delta.write.utcTimestampPartitionValues": "false",
    }
    times = ["0001-01-01T00:00:00.000001Z", "1582-10-10T12:00:00Z", "2024-10-27T00:30:00Z", "2024-10-27T01:30:00Z"]
    more = {"decoder": Json("at TIMESTAMP, day DATE, also TIMESTAMP"), "errors": DEAD}
    what = lake.what(layout=TableLayout(partition_by=["at"]), **more)
    lake.send_payloads(*(json.dumps({"at": at, "day": at[:10], "also": at}).encode() for at in times))
    before = {name: lake.spark.conf.get(name) for name in settings}
    try:
        for name, value in settings.items():
            lake.spark.conf.set(name, value)
        (report,) = lake.ingest(what)
    finally:
        for name, value in before.items():
            lake.spark.conf.set(name, value)
    # Clocks in Paris show both of the last two times as half past two, so that Delta would write the third one twice.
    assert (report.rows, [payload for _, payload in lake.letters().values()]) == (
        3,
        [json.dumps({"at": times[3], "day": times[3][:10], "also": times[3]}).encode()],
    )
    shape = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"
    frame = lake.spark.read.format("delta").load(lake.table).orderBy("day", "at")
    found = [
        tuple(row) for row in frame.selectExpr(f'date_format(at, "{shape}")', "string(day)", "at = also").collect()
    ]
    assert found == [(f"{at[:19]}.{at[20:26] if at[19] == '.' else '000000'}", at[:10], True) for at in times[:3]]


@pytest.mark.slow
def test_a_constraint_that_fails_the_run_is_told_with_a_place_and_what_to_do(lake: Lake) -> None:
    lake.send(1)
    what = lake.what(lambda rows: reject(rows, "id = 7", "seven"))
    lake.ingest(what)
    lake.spark.sql(f"ALTER TABLE delta.`{lake.table}` ADD CONSTRAINT few CHECK (id < 5)")
    lake.send(8)
    with pytest.raises(ConstraintViolatedError) as raised:
        lake.ingest(what)
    assert "CHECK constraint few (id < 5) violated by row" in raised.value.detail
    assert re.search(r"at orders/[01]=[34], for one, the CHECK constraint few", raised.value.what)
    lake.ingest(replace(what, errors=DEAD))
    assert {error for error, _ in lake.letters().values()} == {
        "the CHECK constraint few (id < 5) is violated",
        "rejected: seven",
    }
    lake.assert_each_once(what)


def poisonous(rows: DataFrame) -> DataFrame:
    """Fails for three messages, each in another way, where a column is made that nobody asks for."""

    def picky(number):  # type: ignore[no-untyped-def]  # Spark would evaluate the annotations
        if number == 13:
            raise ValueError("thirteen")
        return number

    rows = reject(rows, "id = 40", "forty")
    return (
        rows.withColumn("picky", f.udf(picky, "bigint")("id"))
        .withColumn("small", f.when(f.col("id") == 14, 2**40).otherwise(f.col("id")).cast("int"))
        .withColumn("sure", f.when(f.col("id") == 27, f.raise_error(f.lit("not sure"))).otherwise(f.lit("sure")))
    )


@pytest.mark.slow
def test_messages_that_the_transform_fails_for_are_found_and_become_dead_letters(lake: Lake) -> None:
    lake.send(60)
    with pytest.raises(TransformError):
        lake.ingest(lake.what(poisonous))
    what = lake.what(poisonous, errors=DEAD)
    (report,) = lake.ingest(what)
    letters = lake.letters()
    assert set(letters) == {13, 14, 27, 40}
    reason, payload = letters[13]
    assert reason.startswith("a function of the transform raised ValueError in line ")
    assert reason.endswith("test_bad_rows.py: 'thirteen'")
    assert payload == b'{"id": 13, "user": "u6"}'
    assert "[CAST_OVERFLOW]" in letters[14][0]
    assert "not sure" in letters[27][0]
    assert letters[40][0] == "rejected: forty"
    assert (report.dead, report.rows) == (4, 56)
    lake.assert_each_once(what)


@pytest.mark.slow
def test_a_transform_that_is_broken_makes_no_dead_letters(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtering, "MAX_FAILING_MESSAGES", 2)
    lake.send(8)
    what = lake.what(lambda rows: rows.withColumn("id", f.raise_error(f.lit("all")).cast("bigint")), errors=DEAD)
    with pytest.raises(TransformError):
        lake.ingest(what)
    assert lake.letters() == {}


@pytest.mark.slow
def test_a_transform_that_fails_for_all_together_is_told(lake: Lake) -> None:
    def only_few(rows: DataFrame) -> DataFrame:
        counted = rows.withColumn("many", f.count("*").over(Window.partitionBy(f.lit(1))))
        return counted.withColumn("many", f.when(f.col("many") > 4, f.raise_error(f.lit("too many"))))

    lake.send(8)
    with pytest.raises(TransformError) as raised:
        lake.ingest(lake.what(only_few, errors=DEAD))
    assert "too many" in raised.value.detail
    assert lake.letters() == {}


@pytest.mark.parametrize(("condition", "reason"), [("", "bad"), (True, "bad"), ("id = 1", ""), ("id = 1", 7)])
def test_what_says_nothing_is_refused(condition: Any, reason: Any, spark: SparkSession) -> None:
    with pytest.raises(InvalidOptionError):
        reject(spark.range(3), condition, reason)


def test_without_a_run_bad_rows_are_left_out(spark: SparkSession) -> None:
    """And where the condition is null, a row is not bad."""
    rows = spark.sql("SELECT * FROM VALUES (1), (2), (NULL) AS rows(id)")
    assert sorted(str(row.id) for row in reject(rows, f.col("id") > 1, "more").collect()) == ["1", "None"]
