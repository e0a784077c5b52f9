"""Writes a batch: dead letters, rows, and the look into the log whether they are there.

Steps 5 to 7 of the protocol (:mod:`spark_jobs.batches.ingest`), the same for every kind of plan.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.storagelevel import StorageLevel

from spark_jobs.batches.ingestion import Batch, Ingestion, Observer, Step
from spark_jobs.ledger.delta_log import Commit
from spark_jobs.ledger.entries import Entry
from spark_jobs.ledger.ledger import LedgerState, app_id
from spark_jobs.reading.source import LETTER_COLUMNS, STREAM_COLUMNS, read_splits, source_schema
from spark_jobs.session import check_session, first_line
from spark_jobs.writing.dead_letters import lost_letters
from spark_jobs.writing.sink import DeltaSink, check_columns, explain, in_ranges, is_conflict, last_line
from stream_consumers.batches import Range
from stream_consumers.errors import DataLossError, InvalidOptionError, StreamAssetsError, TransformError, WriteError
from stream_consumers.messages import Shard
from stream_consumers.options import DataLoss
from stream_consumers.urls import StreamUrl

MAX_RACES = 20
_log = logging.getLogger(__name__)
_TABLE_PROPERTIES = {"delta.dataSkippingStatsColumns": "_stream,_shard,_sequence,_timestamp"}


class OutdatedError(Exception):
    """What was known of the stream when the batch was planned is not true any more."""

    def __init__(self, reason: DataLossError) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Written:
    """A batch that is in the table.

    Args:
        entry: what its commit says.
        commit: the commit.
        messages: messages decoded, per shard.
    """

    entry: Entry
    commit: Commit
    messages: Mapping[Shard, int]


class BatchWriter:
    """Writes the batches of one number line.

    Args:
        spark: a session that can write Delta tables.
        ingestion: what goes where.
        url: of the source, for messages.
        observer: told of each step.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
    """

    def __init__(self, spark: SparkSession, ingestion: Ingestion, *, url: StreamUrl, observer: Observer) -> None:
        self._spark = check_session(spark)
        self._ingestion = ingestion
        self._url = url
        self._observer = observer
        self.ledger = ingestion.ledger()
        self._letters = ingestion.dead_letters()
        self._sink = DeltaSink(ingestion.table, _TABLE_PROPERTIES, ingestion.merge_schema)
        self._checked = False
        self._settled = -1
        self._races = 0

    def entry(self, kind: str, state: LedgerState, *, identities: Mapping[str, str], **fields: Any) -> Entry:
        """An entry with the next number of the line and a new batch id; ``fields`` are those of :class:`Entry`."""
        return Entry(
            kind=kind,
            group=self._ingestion.group,
            app=self.ledger.app,
            number=state.last_number + 1,
            by=self.ledger.member,
            bid=uuid.uuid4().hex,
            base=state.version,
            state=state.shards,
            identities={**(state.newest.identities if state.newest else {}), **identities},
            letters=self._settled,
            sharing=state.sharing,
            transform=self._ingestion.transform_name,
            **fields,
        )

    def claim(self, state: LedgerState, origin: Mapping[Shard, int], *, identities: Mapping[str, str]) -> None:
        """The first commit of a group: empty, with the resolved origin (I9)."""
        self.ledger.check_first(origin)
        self._check_other_groups(identities)
        entry = self.entry("claim", state, identities=identities, origin=origin, switch=self._ingestion.lines)
        empty = self._transformed(self._spark.createDataFrame([], source_schema(self._ingestion.decoder)))
        self.check_columns(state)
        try:
            self._sink.write(empty, entry, creates=state.version < 0)
        except Exception as error:  # a lost race to create the table shows in many ways; the log decides
            if self.ledger.read().newest is None and not is_conflict(error):
                raise explain(error, table=self._ingestion.table) from error
            self.raced()
        self._observer(Step.CLAIMED, None)

    def _check_other_groups(self, identities: Mapping[str, str]) -> None:
        """One group a stream and table: a replace would take the rows of the other one away."""
        other = self.ledger.other_group(frozenset(identities))
        if other is not None:
            raise InvalidOptionError(
                f"group {other!r} already writes {self._url} into {self._ingestion.table}",
                remedy=f"Use group {other!r}, or another table: a row is known by stream, shard and sequence only.",
            )

    def fence(self, state: LedgerState, member: str, number: int, *, identities: Mapping[str, str]) -> None:
        """Take a number of another line, so that a batch that is on its way with it never lands (protocol R1).

        Whether it was in time is for the ledger to say: one of the two is there afterwards.

        Raises:
            WriteError: Spark failed; run again.
        """
        app = app_id(self._ingestion.group, member)
        entry = replace(self.entry("fence", state, identities=identities), app=app, number=number)
        rows = self._spark.read.format("delta").load(self._ingestion.table).limit(0)
        try:
            self._sink.write(rows, entry)
        except Exception as error:
            if not is_conflict(error):
                raise explain(error, table=self._ingestion.table) from error

    def settle(self, state: LedgerState, *, again: bool = False) -> None:
        """Delete the dead letters of batches that were dropped: the first time, after a RESTORE, or ``again``.

        A RESTORE may have removed batches that dead letters were counted with.
        """
        if again or not self._checked or state.letters < 0:
            self._checked = True
            self._settled = self._letters.settle(self._spark, self.ledger, after=state.letters)

    def write(
        self,
        batch: Batch,
        *,
        check: Callable[[], None] = lambda: None,
        renew: Callable[[Batch], Batch | None] = lambda batch: None,
    ) -> Written | None:
        """Steps 5 to 7; ``None`` if another run was faster, then plan again.

        Args:
            batch: what to write.
            check: called after the source was read: only then is it known that it was the stream that was planned.
            renew: asked after a lost race for the same ranges under a new number and id, which are then written
                without reading them again; ``None`` if they have to be planned anew.

        Raises:
            OutdatedError: the stream lost messages of the batch; nothing was written.
            DataLossError: rows would be replaced whose messages the stream does not hold any more.
            TransformError, SchemaMismatchError, WriteError: nothing of the batch is in the table.
            LedgerUnreadableError: whether it is cannot be told; nothing may be committed to the broker.
        """
        read = read_splits(self._spark, batch.plan.splits, self._ingestion.decoder)
        frame = self._without_written(read, batch.doubtful).persist(StorageLevel.MEMORY_AND_DISK)
        attempt: Batch | None = batch
        try:
            messages, dead = self._read(frame)
            check()
            self._observer(Step.READ, batch)
            while attempt is not None:
                entry = replace(attempt.entry, rows=sum(messages.values()), dead=sum(dead.values()))
                commit = self._write_once(frame, entry, attempt)
                if commit is not None:
                    self._races = 0
                    self._observer(Step.VERIFIED, attempt)
                    return Written(entry, commit, messages)
                self.raced()
                attempt = renew(attempt)
        finally:
            frame.unpersist()
        return None

    def _write_once(self, frame: DataFrame, entry: Entry, batch: Batch) -> Commit | None:
        """Dead letters and rows; the commit, or ``None`` if another run was faster."""
        rows = self._transformed(frame)
        if entry.mode == "replace":
            rows = self._with_last_copies(rows, frame, entry)
        if entry.dead or entry.lost:
            letters = frame.where(f.col("_error").isNotNull()).select(*STREAM_COLUMNS, *LETTER_COLUMNS)
            letters = letters.unionByName(lost_letters(self._spark, entry)) if entry.lost else letters
            if not self._letters.write(letters, ledger=self.ledger, number=entry.number, bid=entry.bid):
                return None
        self._observer(Step.DEAD_LETTERS_WRITTEN, batch)
        return self._write(rows, entry, batch)

    def _with_last_copies(self, rows: DataFrame, frame: DataFrame, entry: Entry) -> DataFrame:
        """Together with the rows of the range whose messages cannot be read again: nobody else has them.

        Raises:
            DataLossError: there are some, and it was not said that they are to be kept.
        """
        place = ["_stream", "_shard", "_sequence"]
        table = self._spark.read.format("delta").load(self._ingestion.table)
        last = table.where(in_ranges(entry.ranges)).join(frame.select(*place), place, "left_anti")
        found = last.agg(
            f.count("*").alias("rows"), f.min("_sequence").alias("first"), f.max("_sequence").alias("last")
        )
        counts = found.collect()[0]
        if not counts["rows"]:
            return rows
        if self._ingestion.on_data_loss is DataLoss.ERROR:
            raise DataLossError(
                f"{counts['rows']} rows of {self._ingestion.table} between sequences {counts['first']} and "
                f"{counts['last']} would be replaced, but {self._url} does not hold their messages any more",
                remedy="The rows are the last copy, so they are not touched. Replay only what the stream holds, or set "
                "on_data_loss to 'record': then they stay as they are, and the others are replaced.",
            )
        _log.warning("%d rows whose messages are gone from %s stay as they are", counts["rows"], self._url)
        return rows.unionByName(last.select(*table.columns), allowMissingColumns=True)

    def _without_written(self, frame: DataFrame, doubtful: Mapping[Shard, Range]) -> DataFrame:
        """Without what is in the table, or in the dead letters that count, within ``doubtful``."""
        if not doubtful:
            return frame
        place, condition = ["_stream", "_shard", "_sequence"], in_ranges(doubtful)
        found = self._spark.read.format("delta").load(self._ingestion.table).where(condition).select(*place)
        letters = self._letters.counted(self._spark, self.ledger)
        if letters is not None:
            found = found.unionByName(letters.where(condition).select(*place))
        return frame.join(found, place, "left_anti").select(*frame.columns)

    def _read(self, frame: DataFrame) -> tuple[Mapping[Shard, int], Mapping[Shard, int]]:
        """Read the source into the cache; messages and dead letters per shard."""
        is_dead = f.col("_error").isNotNull().cast("bigint")
        counts = frame.groupBy("_stream", "_shard").agg(f.count("*").alias("all"), f.sum(is_dead).alias("dead"))
        try:
            found = counts.collect()
        except PySparkException as error:
            reason = last_line(error)
            if DataLossError.__name__ in reason:
                raise OutdatedError(DataLossError(reason, remedy="Run again.")) from error
            raise WriteError(
                f"{self._url} could not be read: {reason}",
                remedy="Nothing was written; the batch is planned anew at the next run.",
            ) from error
        messages = {Shard(row["_stream"], row["_shard"]): int(row["all"] - row["dead"]) for row in found}
        return messages, {Shard(row["_stream"], row["_shard"]): int(row["dead"]) for row in found}

    def _transformed(self, frame: DataFrame) -> DataFrame:
        rows = frame.where(f.col("_error").isNull()).drop(*LETTER_COLUMNS)
        transform = self._ingestion.transform
        if transform is None:
            return rows
        name = getattr(transform, "__name__", "transform")
        try:
            result = transform(rows)
            columns = result.columns
        except StreamAssetsError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise TransformError(
                f"the transform {name!r} raised {type(error).__name__}: {first_line(error)}",
                remedy="Correct it; nothing was written, and the next run reads the same messages.",
            ) from error
        return result.select(*columns)

    def check_columns(self, state: LedgerState) -> None:
        """Before the first batch: do the rows fit the table?

        Raises:
            SchemaMismatchError, TransformError: they do not.
        """
        if self._checked:
            return
        rows = self._transformed(self._spark.createDataFrame([], source_schema(self._ingestion.decoder))).schema
        table = self._spark.read.format("delta").load(self._ingestion.table).schema.fields if state.version >= 0 else []
        check_columns(
            {column.name: column.dataType.simpleString() for column in rows.fields},
            {column.name: column.dataType.simpleString() for column in table},
            path=self._ingestion.table,
            merge_schema=self._ingestion.merge_schema,
        )

    def _write(self, rows: DataFrame, entry: Entry, batch: Batch) -> Commit | None:
        """Steps 6 and 7; the commit, or ``None`` if the number is somebody else's."""
        self._observer(Step.WRITING, batch)
        failure: Exception | None = None
        try:
            self._sink.write(rows, entry)
        except Exception as error:  # noqa: BLE001 - whether it landed is for the ledger to say
            failure = error
        self._observer(Step.ROWS_WRITTEN, batch)
        commit = self.ledger.written(entry.number, after=entry.base)
        if commit is not None and commit.entry is not None and commit.entry.bid == entry.bid:
            return commit
        if commit is None and failure is not None and not is_conflict(failure):
            raise explain(failure, table=self._ingestion.table) from failure
        _log.info("batch %d of %s was written by another run; planning again", entry.number, entry.app)
        return None

    def look_again(self, outdated: OutdatedError) -> None:
        """The stream is not what it was when the batch was planned; the next plan says what is missing.

        Raises:
            DataLossError: it was planned again so often that something else is wrong.
        """
        _log.warning("%s is planned again: %s", self.ledger.app, outdated.reason)
        self._races += 1
        if self._races >= MAX_RACES:
            raise outdated.reason

    def raced(self) -> None:
        """Another run was faster.

        Raises:
            WriteError: it was so too often.
        """
        self._races += 1
        if self._races >= MAX_RACES:
            raise WriteError(
                f"{self.ledger.app} lost {self._races} races for a batch of {self._ingestion.table} in a row",
                remedy="Other runs of the same group are faster; this one stops. Limit the group to one run at a time.",
            )
