"""Writes a batch, or a commit without rows: steps 5 to 7 of the commit order (:mod:`spark_jobs.batches`)."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from spark_jobs.batches.caution import Caution
from spark_jobs.batches.ingestion import (
    Batch,
    Ingestion,
    Observer,
    Step,
    check_other_group,
    without_positions,
)
from spark_jobs.batches.sieve import Cached, Sieve, Sifted, caching
from spark_jobs.decoding.ddl import quoted
from spark_jobs.decoding.decoders import Decoder, is_resolved, resolved
from spark_jobs.decoding.isolation import prepare
from spark_jobs.decoding.json_decoder import Json
from spark_jobs.decoding.json_inference import Seen
from spark_jobs.decoding.undeclared import UNDECLARED, Watching, seen_in, watching
from spark_jobs.ledger.delta_log import Commit
from spark_jobs.ledger.entries import LedgerEntry
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.ledger.table_rows import PLACE, count_where, in_places, in_ranges
from spark_jobs.reading.rejection import fail_write
from spark_jobs.reading.small import read_small
from spark_jobs.reading.source import DEAD_LETTER_COLUMNS, STREAM_COLUMNS, SourceColumns, read_splits
from spark_jobs.reading.whole import reads_everything
from spark_jobs.session import check_session
from spark_jobs.writing.dead_letters import LETTER_SCHEMA, Settlement, lost_ranges
from spark_jobs.writing.failures import UnexplainedError, explain_failed_read, explain_read
from spark_jobs.writing.layout import create_table, register
from spark_jobs.writing.new_fields import new_columns, takes_any_name, with_columns_of, with_new_fields
from spark_jobs.writing.rescue import rescue
from spark_jobs.writing.schema_changes import check_columns, check_places, lets_widen
from spark_jobs.writing.sink import DeltaSink, only_within, write_verified
from spark_jobs.writing.storage import check_log_store, check_unseen, read_table
from stream_consumers.batches import BatchPlan, LastMessage, Range, Split
from stream_consumers.errors import (
    BatchTooLargeError,
    ConstraintViolatedError,
    DataLossError,
    InvalidOptionError,
    SchemaMismatchError,
    StreamAssetsError,
    TransformError,
    WriteError,
)
from stream_consumers.messages import Shard
from stream_consumers.options import DataLoss, SchemaChanges
from stream_consumers.urls import StreamUrl

MAX_RACES = 20
_log = logging.getLogger(__name__)


class OutdatedError(Exception):
    """What was known of the stream when the batch was planned is not true any more."""

    def __init__(self, reason: DataLossError | BatchTooLargeError) -> None:
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

    entry: LedgerEntry
    commit: Commit
    messages: Mapping[Shard, int]


@dataclass(frozen=True, slots=True)
class _Read:
    """A batch that was read before it is written.

    Args:
        frame: with the columns of :func:`spark_jobs.reading.source.read_splits`.
        messages: how many could be decoded, per shard.
        dead: how many dead letters there are.
    """

    frame: DataFrame
    messages: Mapping[Shard, int]
    dead: int


class BatchWriter:
    """Writes the batches of one transaction sequence.

    Args:
        spark: a session that can write Delta tables.
        ingestion: what goes where.
        url: of the source, for messages.
        observer: told of each step.

    Raises:
        SparkSessionError: the session cannot write Delta tables.
        UnsafeStorageError: another driver could overwrite what this one writes.
    """

    def __init__(self, spark: SparkSession, ingestion: Ingestion, *, url: StreamUrl, observer: Observer) -> None:
        self._spark = _checked_session(spark, ingestion)
        self._ingestion = ingestion
        self._url = url
        self._observer = observer
        self.ledger = ingestion.ledger()
        self._dead_letters = ingestion.dead_letters()
        self._sink = DeltaSink(ingestion.table, ingestion.layout.all_properties(), ingestion.schema_changes)
        self._settlement: Settlement | None = None
        # The version up to which RESTOREs are known to the settlement.
        self._looked_at = -1
        self._unwritten: frozenset[str] = frozenset()
        self._races = 0
        self._caution = Caution()
        self._sieve = Sieve(spark, ingestion, self.ledger, finish=self._rescued)
        self._decoder: Decoder | None = None
        self._source: SourceColumns | None = None
        # Finds fields of JSON that nobody has declared, and knows those that can be no columns.
        self._watching: Watching | None = None
        # Whose columns are known to fit those of the table, and which these are.
        self._fitting: tuple[Decoder, str] | None = None
        self._columns: StructType | None = None
        if ingestion.driver_records:
            prepare()

    @property
    def decoder(self) -> Decoder:
        """With the schema that a registry has for it, as of the newest batch, and with columns for new fields."""
        if self._watching is not None:
            return self._watching.decoder
        if self._decoder is None:
            self._decoder = resolved(self._ingestion.decoder)
            if self._ingestion.schema_changes is SchemaChanges.ADD_COLUMNS:
                self._watching = watching(self._decoder)
        return self._decoder

    @property
    def source(self) -> SourceColumns:
        """The decoder, and its columns."""
        decoder = self.decoder
        if self._source is None or self._source.decoder != decoder:
            self._source = SourceColumns.of(decoder)
        return self._source

    def _source_of_batch(self) -> SourceColumns:
        """The same with a decoder that finds the fields that nobody has declared, where columns are made of them."""
        return self.source if self._watching is None else replace(self.source, decoder=self._watching)

    def _look_up(self) -> None:
        """Ask the registry again, behind the plan: who has written its messages has registered their schemas before.

        Otherwise a run that stays would leave out the fields that are new.
        """
        if is_resolved(self._ingestion.decoder):
            return
        found = resolved(self._ingestion.decoder)
        if found != self._decoder:
            self._decoder = found
            if self._watching is not None:
                # Of a decoder of JSON it is the key that has its schema there.
                self._watching = replace(self._watching, decoder=replace(self._watching.decoder, key=found.key))
            self.check_columns(self.ledger.read())

    def entry(self, kind: str, state: LedgerState, *, identities: Mapping[str, str], **fields: Any) -> LedgerEntry:
        """Batch metadata of what this run makes; ``fields`` are those of :class:`LedgerEntry`."""
        identities = {**state.identities, **identities}
        made: dict[str, Any] = {"transform": self._ingestion.transform_name}
        if self._settlement is not None:
            known = self._settlement
            made |= {"settled": known.version, "uncounted": known.uncounted, "judged": known.judged}
        return self.ledger.entry(kind, state, identities=identities, **made, **fields)

    def initialize(
        self,
        state: LedgerState,
        origin: Mapping[Shard, int],
        *,
        identities: Mapping[str, str],
        last_messages: Mapping[Shard, LastMessage] | None = None,
    ) -> None:
        """The first commit of a group: empty, with the resolved origin, and the last messages before it."""
        self.ledger.check_first(origin)
        self.check_unwritten(state, identities)
        entry = self.entry(
            "init",
            state,
            identities=identities,
            origin=origin,
            switch=self._ingestion.sharing_mode,
            last_messages=last_messages or {},
        )
        self.check_columns(state)
        empty = self._sieve.transformed(self._nothing())
        if state.version < 0:
            check_unseen(self._spark, self.ledger.log)
            if not self._ingestion.layout.is_plain:
                create_table(self._spark, self.ledger.log, empty.schema, self._ingestion.layout)
                state = self.ledger.read()
                entry = self.ledger.renewed(entry, state)
        # A lost race to create the table shows in many ways; any entry of the group will do.
        found = write_verified(
            lambda: self._sink.write(empty, entry, creates=state.version < 0),
            lambda: self.ledger.read().newest,
            spark=self._spark,
            log=self.ledger.log,
            bid=entry.bid,
        )
        if found is None:
            self._raced()
        self._observer(Step.INITIALIZED, None)

    def check_unwritten(self, state: LedgerState, streams: Iterable[str]) -> None:
        """Refuse to begin with a stream whose rows the table has already, whoever wrote them.

        A copy of a table (CREATE TABLE … AS SELECT, a clone, INSERT INTO) has the rows; the positions stayed in the log
        of the table that it was made from, and to begin anew would write each message a second time.

        Args:
            state: the ledger; streams in which it has positions are fine.
            streams: that are to be written.

        Raises:
            InvalidOptionError: another group writes them, or the rows are there and no positions are.
            LedgerTruncatedError: the log was cleaned, so that whose rows they are is unknown.
        """
        begun = without_positions(state, streams) - self._unwritten
        if not begun:
            return
        check_other_group(self._ingestion, begun, url=self._url)
        snapshot = self.ledger.log.snapshot()
        if snapshot is not None and snapshot.may_hold(begun):
            table = read_table(self._spark, self.ledger.log)
            if "_stream" in table.columns and not table.where(f.col("_stream").isin(*begun)).isEmpty():
                raise InvalidOptionError(
                    f"{self._ingestion.table} holds rows of {', '.join(sorted(begun))}, and its log does not tell how "
                    f"far group {self._ingestion.group!r} has read: a copy of a table has the rows, but no positions",
                    remedy=f"To continue behind these rows, run: stream-assets adopt --source {self._url} "
                    f"--table {self._ingestion.table} --group {self._ingestion.group}. If they are of something else, "
                    "ingest into another table.",
                )
        self._unwritten |= begun

    def delete_orphaned(self, state: LedgerState, *, again: bool = False) -> None:
        """Delete the orphaned dead letters of batches that were dropped: the first time, after a RESTORE, or ``again``.

        A RESTORE may have removed batches that dead letters were counted with. Another writer of the group may have
        committed since, so that ``state.is_restored`` does not tell.
        """
        if again or self._settlement is None or self.ledger.was_restored(after=self._looked_at, state=state):
            self._settlement = self._dead_letters.settle(self._spark, self.ledger, state)
        self._looked_at = state.version

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
        self._look_up()
        read = self._read_small(batch)
        if read is not None:
            return self._write_read(read, batch, check, renew)
        is_isolated = False
        counts = self._caution.counts(batch)
        rows = self._rows_of_one_pass(batch) if counts is not None else None
        if counts is not None and rows is not None:
            try:
                return self._write_in_one_pass(rows, batch, counts)
            except BatchTooLargeError as error:
                raise OutdatedError(error) from error
            except StreamAssetsError as error:
                if not self._sieve.is_for_care(error):
                    raise
                # What is wrong, if the messages can be read, shows once more.
                _log.info("batch %d of %s is read and counted first: %s", batch.number, self.ledger.app, error)
                self._caution.failed()
                self._observer(Step.UNCLEAN, batch)
                # Under the same number Delta takes one of the two, if the first one lands after all (tests/model).
                batch = replace(batch, entry=replace(batch.entry, bid=uuid.uuid4().hex))
                is_isolated = isinstance(error, UnexplainedError)
        return self._write_with_care(batch, check, renew, is_isolated=is_isolated)

    def _read_small(self, batch: Batch) -> _Read | None:
        """The messages of a small batch; ``None`` if executors are to read it."""
        if batch.plan.records > self._ingestion.driver_records or batch.doubtful:
            return None
        source = self._source_of_batch()
        try:
            small = read_small(batch.plan.splits, source, keeps_payloads=self._sieve.needs_payloads)
        except (DataLossError, BatchTooLargeError) as error:
            raise OutdatedError(error) from error
        except StreamAssetsError:
            raise
        except Exception as error:  # noqa: BLE001 - a decoder of the user's may raise anything
            raise explain_read(f"{type(error).__name__}: {error}", what=str(self._url)) from None
        return None if small is None else _Read(small.frame(self._spark, source), small.messages, small.dead)

    def _rows_of_one_pass(self, batch: Batch) -> DataFrame | None:
        """The rows to write while they are read; ``None`` if Spark might not read every split to its end."""
        frame = read_splits(self._spark, batch.plan.splits, self._source_of_batch(), identities=batch.identities)
        if self._ingestion.transform is None:
            return self._sieve.transform(frame)
        with suppress(StreamAssetsError):
            # It may look at the rows, which are not known to be clean.
            rows = self._sieve.transform(frame, fail_write)
            if reads_everything(rows):
                return rows
        self._caution.failed()
        return None

    def _write_in_one_pass(self, rows: DataFrame, batch: Batch, counts: Mapping[Shard, int]) -> Written | None:
        """Write the batch while it is read; executors check that it is what was planned, or nothing is committed."""
        entry = replace(batch.entry, rows=sum(counts.values()), dead=0)
        commit = self._commit(rows, entry, batch)
        if commit is None:
            self._raced()
            return None
        self._races = 0
        self._caution.succeeded()
        self._observer(Step.VERIFIED, batch)
        return Written(entry, commit, counts)

    def _write_with_care(
        self,
        batch: Batch,
        check: Callable[[], None],
        renew: Callable[[Batch], Batch | None],
        *,
        is_isolated: bool,
    ) -> Written | None:
        """Read and count the batch, then write its dead letters and its rows.

        Args:
            batch: what to write.
            check: as in :meth:`write`.
            renew: as in :meth:`write`.
            is_isolated: executors decode in processes of their own. They do so anyway once a read has failed for no
                known reason: a message may have crashed a Python worker.
        """
        with caching() as cached:
            try:
                read = self._read_with_care(batch, cached, is_isolated=is_isolated)
            except UnexplainedError as error:
                if is_isolated:
                    raise
                _log.warning("batch %d of %s is decoded in isolation: %s", batch.number, self.ledger.app, error)
                read = self._read_with_care(batch, cached, is_isolated=True)
            return self._write_read(read, batch, check, renew)

    def _read_with_care(self, batch: Batch, cached: Cached, *, is_isolated: bool) -> _Read:
        source, keeps_payloads = self._source_of_batch(), self._sieve.needs_payloads
        try:
            read = read_splits(
                self._spark, batch.plan.splits, source, keeps_payloads=keeps_payloads, is_isolated=is_isolated
            )
            frame = cached.keep(self._without_written(read, batch.doubtful))
        except Exception as error:  # noqa: BLE001 - Spark raises what comes, once it has ended
            raise explain_failed_read(error, what=str(self._url)) from None
        return self._read(frame)

    def _write_read(
        self, read: _Read, batch: Batch, check: Callable[[], None], renew: Callable[[Batch], Batch | None]
    ) -> Written | None:
        """Write what was read and counted: the dead letters, among them what is bad, then the other rows."""
        check()
        self._observer(Step.READ, batch)
        if read.dead and self._finds_new_fields(read.frame):
            return self.write(batch, check=check, renew=renew)
        has_payloads = self._sieve.needs_payloads
        with caching() as cached:
            sifted = self._sieve.sift(read.frame, cached)
            if self._sieve.needs_payloads and not has_payloads:
                # The transform was not seen before to reject rows, and now it does.
                return self.write(batch, check=check, renew=renew)
            if sifted.frame is not read.frame:
                read = self._read(sifted.frame)
            attempt: Batch | None = batch
            while attempt is not None:
                entry = replace(attempt.entry, rows=sum(read.messages.values()), dead=read.dead)
                commit = self._write_once(sifted, entry, attempt)
                if commit is not None:
                    self._races = 0
                    self._observer(Step.VERIFIED, attempt)
                    return Written(entry, commit, read.messages)
                self._raced()
                attempt = renew(attempt)
        return None

    def _finds_new_fields(self, frame: DataFrame) -> bool:
        """Whether messages have fields that nobody has declared; from then on the decoder has columns for them."""
        before = self._watching
        if before is None:
            return False
        errors = frame.where(f.col("_error").startswith(UNDECLARED)).select("_error")
        seen = seen_in(row["_error"] for row in errors.toLocalIterator())
        if not seen.fields:
            return False
        # Another run may have made columns of them since.
        self._columns = read_table(self._spark, self.ledger.log).schema
        self._watching = self._with_new_fields(before, seen)
        self.check_columns(self.ledger.read())
        if added := new_columns(before, self._watching):
            _log.info("%s has fields that were not declared, which become columns: %s", self._url, ", ".join(added))
        if refused := self._watching.known - before.known:
            told = ", ".join(sorted(repr(".".join(path)) for path in refused))
            _log.warning("no columns can be made of fields of %s, which are left out: %s", self._url, told)
        return True

    def _with_new_fields(self, before: Watching, seen: Seen) -> Watching:
        snapshot = self.ledger.log.snapshot()
        made_by_transform = set(self._sieve.transformed(self._nothing()).columns) - set(self.source.columns.names)
        grow = partial(
            with_new_fields,
            own=self._decoder or before.decoder,
            computed=(snapshot.computed_columns if snapshot else frozenset()) | made_by_transform,
            any_name=snapshot is not None and takes_any_name(snapshot.configuration),
        )
        widens = snapshot is not None and lets_widen(snapshot.configuration)
        if (grown := self._suiting(partial(grow, before, seen), widens=widens)) is not None:
            return grown
        # Some of them do not suit the transform, like one whose name it gives to another column.
        kept = before
        for name in seen.fields:
            grown = self._suiting(partial(grow, kept, seen.only(name)), widens=widens)
            kept = grown if grown is not None else replace(kept, known=kept.known | {(name,)})
        return kept

    def _suiting(self, grow: Callable[..., Watching], *, widens: bool) -> Watching | None:
        """The decoder with new fields that the transform takes, and of whose rows the table does; ``None``: neither.

        What a transform gets is not what the table has of it: text, for instance, of which it makes a time. So the
        values give the types first, and widen a column only where the rows would not fit without that.
        """
        own = self._columns
        ways = ((own, widens),) if self._ingestion.transform is None else ((None, False), (None, widens), (own, widens))
        for table, may_widen in ways:
            self._watching = grown = grow(table=table)
            with suppress(TransformError, SchemaMismatchError):
                rows = self._sieve.transformed(self._nothing()).schema
                # Where nobody transforms the rows new fields always suit; what else does not fit is told later.
                if self._ingestion.transform is not None:
                    self._check_fit(rows, widens=may_widen)
                return grown
        return None

    def _write_once(self, sifted: Sifted, entry: LedgerEntry, batch: Batch) -> Commit | None:
        """Dead letters and rows; the commit, or ``None`` if another run was faster."""
        frame, rows = sifted.frame, sifted.rows
        if entry.mode == "replace":
            rows = self._with_last_copies(rows, frame, entry)
        if entry.dead or entry.lost:
            dead_letters = frame.where(f.col("_error").isNotNull()).select(*STREAM_COLUMNS, *DEAD_LETTER_COLUMNS)
            dead_letters = dead_letters.unionByName(lost_ranges(self._spark, entry)) if entry.lost else dead_letters
            if not self._dead_letters.write(dead_letters, ledger=self.ledger, number=entry.number, bid=entry.bid):
                return None
        if batch.corrected is not None and not self._append_letters(batch.corrected, entry):
            return None
        self._observer(Step.DEAD_LETTERS_WRITTEN, batch)
        return self._commit(rows, entry, batch)

    def dismiss(self, letters: pa.Table, entry: LedgerEntry) -> Commit | None:
        """Steps 5 to 7 of a dismissal: its dead letters, then a commit without rows; ``None`` if another was faster.

        Args:
            letters: as their table has them, with ``dismissed_by`` and ``note``.
            entry: of the dismissal.

        Raises:
            WriteError: nothing of it counts.
            LedgerUnreadableError: whether it is in the table cannot be told.
        """
        batch = Batch(entry, BatchPlan({}, [], 0))
        # Another run may have made rows of them since; Delta refuses what comes from here on.
        is_free = count_where(self.ledger.log, in_places(entry.written)) == 0
        if is_free and self._append_letters(letters, entry):
            self._observer(Step.DEAD_LETTERS_WRITTEN, batch)
            commit = self._sink.commit(no_rows(self._spark, self.ledger), entry, ledger=self.ledger)
            if commit is not None:
                self._races = 0
                self._observer(Step.VERIFIED, batch)
                return commit
        self._raced()
        return None

    def _append_letters(self, letters: pa.Table, entry: LedgerEntry) -> bool:
        schema = from_arrow_schema(pa.schema([LETTER_SCHEMA.field(name) for name in letters.column_names]))
        frame = self._spark.createDataFrame(letters, schema)
        return self._dead_letters.append(frame, ledger=self.ledger, number=entry.number, bid=entry.bid)

    def _commit(self, rows: DataFrame, entry: LedgerEntry, batch: Batch) -> Commit | None:
        """The rows in one commit; ``None`` if another run was faster."""
        self._observer(Step.WRITING, batch)
        if self._ingestion.transform is not None:
            rows = only_within(rows, entry.extents)
        try:
            commit = self._sink.commit(
                rows, entry, ledger=self.ledger, on_return=lambda: self._observer(Step.ROWS_WRITTEN, batch)
            )
        except ConstraintViolatedError as error:
            raise self._sieve.located(error, rows) from error
        except SchemaMismatchError:
            if self._fitting is None or self.ledger.read().schema == self._fitting[1]:
                raise
            _log.info("the columns of %s are other ones by now; planning again", self._ingestion.table)
            return None
        if commit is None:
            _log.info("batch %d of %s was written by another run; planning again", entry.number, entry.app)
        return commit

    def _with_last_copies(self, rows: DataFrame, frame: DataFrame, entry: LedgerEntry) -> DataFrame:
        """Together with the rows of the range whose messages cannot be read again: nobody else has them.

        Raises:
            DataLossError: there are some, and it was not said that they are to be kept.
        """
        place = ["_stream", "_shard", "_sequence"]
        table = read_table(self._spark, self.ledger.log)
        last = table.where(in_places(entry.written)).join(frame.select(*place), place, "left_anti")
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
                "on_data_loss='record': then they stay as they are, and the others are replaced.",
            )
        _log.warning("%d rows whose messages are gone from %s stay as they are", counts["rows"], self._url)
        snapshot = self.ledger.log.snapshot()
        computed = (snapshot.computed_columns if snapshot else frozenset()) - set(rows.columns)
        return rows.unionByName(last.select(*map(quoted, table.columns)).drop(*computed), allowMissingColumns=True)

    def _without_written(self, frame: DataFrame, doubtful: Mapping[Shard, Range]) -> DataFrame:
        """Without what is in the table, or in the dead letters that count, within ``doubtful``."""
        if not doubtful:
            return frame
        place, condition = ["_stream", "_shard", "_sequence"], in_ranges(doubtful)
        found = read_table(self._spark, self.ledger.log).where(condition).select(*place)
        dead_letters = self._dead_letters.counted(self._spark, self.ledger)
        if dead_letters is not None:
            found = found.unionByName(dead_letters.where(condition).select(*place))
        return frame.join(found, place, "left_anti").select(*map(quoted, frame.columns))

    def _read(self, frame: DataFrame) -> _Read:
        """Read the source into the cache, and count."""
        is_dead = f.col("_error").isNotNull().cast("bigint")
        counts = frame.groupBy("_stream", "_shard").agg(f.count("*").alias("all"), f.sum(is_dead).alias("dead"))
        try:
            found = counts.collect()
        except Exception as error:  # noqa: BLE001 - Spark raises what comes
            explained = explain_failed_read(error, what=str(self._url))
            if isinstance(explained, (DataLossError, BatchTooLargeError)):
                raise OutdatedError(explained) from None
            raise explained from None
        messages = {Shard(row["_stream"], row["_shard"]): int(row["all"] - row["dead"]) for row in found}
        return _Read(frame, messages, sum(int(row["dead"]) for row in found))

    def refused(self, splits: Sequence[Split]) -> Mapping[tuple[Shard, int], str]:
        """The messages that would become dead letters although they can be decoded, and why; nothing is written.

        They are decoded in isolation: they are dead letters, and one may have crashed a process before.

        Args:
            splits: to be read; each message can be decoded, without the new fields that it may have.

        Raises:
            TransformError: the transform raised, or fails for some of them.
        """
        with caching() as cached:
            frame = cached.keep(read_splits(self._spark, splits, self._source_of_batch(), is_isolated=True))
            if self._finds_new_fields(frame):
                return self.refused(splits)
            sifted = self._sieve.sift(frame, cached).frame
            if sifted is frame and self._watching is None:
                return {}
            bad = sifted.where(f.col("_error").isNotNull()).select(*PLACE, "_error").collect()
            return {(Shard(row["_stream"], row["_shard"]), row["_sequence"]): row["_error"] for row in bad}

    def _rescued(self, rows: DataFrame) -> DataFrame:
        return rescue(rows, self._columns) if self._ingestion.schema_changes is SchemaChanges.RESCUE else rows

    def _nothing(self) -> DataFrame:
        return self._spark.createDataFrame([], self.source.columns)

    def check_columns(self, state: LedgerState) -> None:
        """Before the first batch, and when the payloads or the table have another schema: do the rows fit the table?

        Raises:
            SchemaMismatchError, TransformError: they do not.
        """
        decoder = self.decoder
        if self._fitting == (decoder, state.schema):
            return
        try:
            self._check_columns(state)
        except SchemaMismatchError:
            own = self._decoder
            if self._watching is None or not isinstance(own, Json) or own == decoder:
                raise
            # Somebody else has made columns of new fields, of other types.
            self._watching = replace(self._watching, decoder=own)
            self._check_columns(state)
        if state.newest is not None:
            self._fitting = self.decoder, state.schema

    def _check_columns(self, state: LedgerState) -> None:
        self._columns = read_table(self._spark, self.ledger.log).schema if state.version >= 0 else None
        if self._columns is not None and state.shards:
            check_places(self._columns, path=self._ingestion.table)
        snapshot = self.ledger.log.snapshot() if state.version >= 0 else None
        is_plain = self._ingestion.transform is None
        # A transform may have made columns of the table of others.
        if is_plain and self._watching is not None and self._columns is not None and snapshot is not None:
            # A column with a default has it in rows that do not say otherwise.
            made_by_delta = snapshot.computed_columns | snapshot.default_columns
            self._watching = with_columns_of(self._watching, self._columns, computed=made_by_delta)
        rows = self._sieve.rejections(self._nothing())[0].schema
        layout = self._ingestion.layout
        if state.version >= 0:
            layout.check_table(self.ledger.log)
        else:
            layout.check_columns(rows.names)
        if state.newest is not None and layout.catalog_table:
            register(self._spark, self._ingestion.table, layout.catalog_table)
        self._check_fit(rows, widens=snapshot is not None and lets_widen(snapshot.configuration))

    def _check_fit(self, rows: StructType, *, widens: bool) -> None:
        ingestion = self._ingestion
        check_columns(rows, self._columns, path=ingestion.table, schema_changes=ingestion.schema_changes, widens=widens)

    def look_again(self, outdated: OutdatedError) -> None:
        """The stream is not what it was when the batch was planned; the next plan says what is missing.

        Raises:
            DataLossError: it was planned again so often that something else is wrong.
        """
        _log.warning("%s is planned again: %s", self.ledger.app, outdated.reason)
        self._races += 1
        if self._races >= MAX_RACES:
            raise outdated.reason

    def _raced(self) -> None:
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


def _checked_session(spark: SparkSession, ingestion: Ingestion) -> SparkSession:
    """The session, if it can write the table safely."""
    check_session(spark)
    check_log_store(spark, ingestion.table, single_writer=ingestion.single_writer)
    return spark


def commit_empty(
    spark: SparkSession,
    ingestion: Ingestion,
    kind: str,
    fields: Callable[[LedgerState], Mapping[str, Any] | None],
    *,
    read: Callable[[], LedgerState] | None = None,
) -> None:
    """Take the next number of a transaction sequence with a commit without rows.

    Args:
        spark: a session that can write Delta tables.
        ingestion: group, table, and the member or the shard whose sequence it is.
        kind: of the entry.
        fields: more fields of :class:`spark_jobs.ledger.entries.LedgerEntry`, for the ledger as it is at each attempt;
            ``None`` if there is nothing to commit any more.
        read: tells the state of the ledger where its log was cleaned.

    Raises:
        WriteError: Spark failed, or others were always faster.
    """
    ledger, sink = ingestion.ledger(), DeltaSink(ingestion.table)
    rows = no_rows(_checked_session(spark, ingestion), ledger)
    for _ in range(MAX_RACES):
        state = (read or ledger.read)()
        more = fields(state)
        if more is None:
            return
        hint = state.newest.hint if state.newest else None
        if sink.commit(rows, ledger.entry(kind, state, **{"hint": hint, **more}), ledger=ledger) is not None:
            return
    raise WriteError(
        f"{ledger.app} lost {MAX_RACES} races for an empty commit to {ingestion.table} in a row",
        remedy="Other runs of the same group are faster; stop them, then run this again.",
    )


def no_rows(spark: SparkSession, ledger: Ledger) -> DataFrame:
    """No rows, with the columns that a commit to the table needs."""
    snapshot = ledger.log.snapshot()
    # Delta takes no rows that have a column whose identities it makes, not even none.
    computed = snapshot.computed_columns if snapshot else frozenset[str]()
    return read_table(spark, ledger.log).limit(0).drop(*computed)
