"""The settings of an ingestion, and the events and reports of a run. Nothing here needs a Spark session."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame

from spark_jobs.dead_letters.table import DeadLetterTable, dead_letter_path
from spark_jobs.decoding.decoders import Decoder, Raw
from spark_jobs.decoding.json_decoder import with_rescue
from spark_jobs.ledger.delta_log import Commit, DeltaLog, MergedRows
from spark_jobs.ledger.entries import CLAIMS, KEEPER, REPLAYER, KeyOrder, LedgerEntry, PlannedFields
from spark_jobs.ledger.ledger import Ledger, LedgerState
from spark_jobs.ledger.table_rows import last_sequences
from spark_jobs.table_location import check_location
from spark_jobs.writing.keyed import Keys
from spark_jobs.writing.layout import TableLayout
from stream_consumers.batches import BatchPlan, BatchSource, Range
from stream_consumers.epochs import EpochNameMap, epoch_name, newest_epochs, split_epoch, with_epoch_names
from stream_consumers.errors import DataLossError, InvalidOptionError, LedgerTruncatedError, TableUnreadableError
from stream_consumers.messages import Shard
from stream_consumers.options import (
    AutoStreamReset,
    ConsumerMode,
    DataLoss,
    ErrorPolicy,
    Limits,
    SchemaChanges,
    check_member,
    check_name,
    check_range,
    check_switch,
    choose_fields,
)

RETRY_SECONDS = 300.0
BATCH_SECONDS = 1.0
NOTHING_TO_READ = BatchPlan({}, [], 0)
DRIVER_RECORDS = 10_000
Transform = Callable[[DataFrame], DataFrame]
T = TypeVar("T")


class Step(enum.Enum):
    """The step that was just done when an observer is called.

    A batch that is written while it is read has no ``READ`` and no ``DEAD_LETTERS_WRITTEN``. If it turns out not to be
    clean, ``UNCLEAN`` follows, and then the steps of a batch that is read first, so that there are two ``WRITING``.
    """

    INITIALIZED = "initialized"
    PLANNED = "planned"
    READ = "read"
    DEAD_LETTERS_WRITTEN = "dead letters written"
    WRITING = "writing"
    UNCLEAN = "unclean"
    ROWS_WRITTEN = "rows written"
    VERIFIED = "verified"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True)
class Batch:
    """A planned batch. Its ledger entry is created when it is written, because only then is its content known.

    Args:
        kind: the kind of its entry.
        state: the ledger that it was planned from.
        plan: how to read it.
        fields: the fields of the entry that are known before the read; :meth:`TargetTable.entry` makes the entry.
        bid: its batch id.
        identities: the fingerprint of each stream that is read.
        maybe_written: the ranges whose messages may be in the table already, so that the write has to check.
        dead_letters: rows of the dead-letter table that are not read from the stream: corrections, or dismissals.
        job_data: what the job that planned it needs to write and finish it.
    """

    kind: str
    state: LedgerState
    plan: BatchPlan = NOTHING_TO_READ
    fields: PlannedFields = field(default_factory=PlannedFields)
    bid: str = field(default_factory=lambda: uuid.uuid4().hex)
    identities: Mapping[str, str] = field(default_factory=dict)
    maybe_written: Mapping[Shard, Range] = field(default_factory=dict)
    dead_letters: pa.Table | None = field(default=None, repr=False)
    job_data: Any = field(default=None, repr=False)

    @property
    def number(self) -> int:
        """The transaction number."""
        return self.state.last_number + 1


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """A batch that is in the table.

    Args:
        batch: the batch as it was written. A repeated write gives it another batch id.
        entry: the metadata of its commit.
        commit: the commit.
        messages: messages decoded, per shard.
        stale: see :class:`BatchReport`.
    """

    batch: Batch
    entry: LedgerEntry
    commit: Commit
    messages: Mapping[Shard, int]
    stale: int = 0


class PlanAgain(enum.Enum):
    """Why a batch is not in the table, so that it has to be planned again from a new snapshot."""

    DEAD_LETTERS_TAKEN = "another run has used its number in the dead-letter table"
    LOST_RACE = "another commit came first"
    COLUMNS_CHANGED = "the columns of the table have changed"
    NOT_NEXT = "another run has done a part of it"


@dataclass(frozen=True, slots=True)
class BatchReport:
    """A batch that is in the table.

    Args:
        entry: the metadata of its commit.
        plan: how it was read.
        version: the table version of its commit.
        messages: messages decoded, per shard.
        rows: rows in the commit, after the transform.
        dead: dead letters.
        lag: the messages left, per shard: between the position of the group and the end that was captured before, for
            all its shards (an upper bound); for a replay or a redrive, those that it has left to do.
        seconds: from the plan to the commit.
        replaced: rows that were replaced; ``None`` if the log of the table does not record it.
        bytes: the size of the data files of the commit.
        merged: the rows that were inserted, updated and deleted in a keyed table; ``None`` for other tables.
        stale: for a replay into a keyed table, the rows of its range that stay although their messages make no row.
    """

    entry: LedgerEntry
    plan: BatchPlan
    version: int
    messages: Mapping[Shard, int]
    rows: int
    dead: int
    lag: Mapping[Shard, int]
    seconds: float
    replaced: int | None = 0
    bytes: int = 0
    merged: MergedRows | None = None
    stale: int = 0


@dataclass(frozen=True, slots=True)
class Continues:
    """The run goes on, and may yield more batches."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The run waits, because of an error that may be temporary, or because another run asked to go first.

    Args:
        why: the reason, and how long it waits.
    """

    why: str


@dataclass(frozen=True, slots=True)
class UnreadableTail:
    """The stream has content after its last message that cannot be read.

    Args:
        what: the description of it.
    """

    what: str


CONTINUES = Continues()
Event = BatchReport | Continues | Waiting | UnreadableTail
"""An event that a run yields."""
Observer = Callable[[Step, "Batch | None"], None]


def ignore_steps(step: Step, batch: Batch | None) -> None:
    """The default observer."""


@dataclass(frozen=True, slots=True)
class Ingestion:
    """The settings of an ingestion: a group, a table, and how messages become rows.

    Args:
        group: the consumer group.
        table: the Delta table, a path or URI; a relative path is resolved from the current working directory.
        decoder: decodes payloads into columns.
        transform: returns the rows to write for the decoded rows; they must keep the stream columns.
        member: the name of this member in its group.
        shard: in place of ``member``, if every shard has its own transaction sequence: that shard.
        sharing: how the group shares its shards.
        claims: whether members share by claiming entries one by one (Redis, load_balanced), not whole shards.
        errors: what to do about lost messages, bad rows and new columns.
        start: where a group without a position starts.
        limits: the most that one batch holds; a job makes its batches smaller while they take longer than a minute.
        retry_seconds: how long a run retries errors that may be temporary, like a broker that does not answer, with
            growing pauses; 0 to not retry. The time starts again after a batch that succeeds.
        batch_seconds: while a run lingers, the least time between two batches; a backlog is written without pauses.
        finish_seconds: how long a signal that asks the process to end is deferred for the current batch, in seconds;
            ``None`` for the default, 20 s.
        storage_options: the options of an object store, for reading the Delta log.
        single_writer: no two drivers write the table at the same time, so that its storage need not decide which of two
            commits came first.
        is_row_wise: the transform computes each row from one row alone, and always with the same result, so that Spark
            reads all messages to compute it. Large batches are then written while they are read.
        layout: the layout of the table, if it has to be created.
        keys: makes the table keyed, so that it has one row per key, which is updated and deleted.
        owns_table: a pattern found the streams, whose names any client may have chosen: the group begins with them only
            in a table that has no other streams.
        driver_records: the driver reads batches of up to this number of messages; with 0, executors read all batches.
    """

    group: str
    table: str
    decoder: Decoder = field(default_factory=Raw)
    transform: Transform | None = None
    member: str = "main"
    shard: Shard | None = None
    sharing: ConsumerMode = ConsumerMode.RESUMABLE
    claims: bool = False
    errors: ErrorPolicy = field(default_factory=ErrorPolicy)
    start: AutoStreamReset = AutoStreamReset.EARLIEST
    limits: Limits = field(default_factory=Limits)
    retry_seconds: float = RETRY_SECONDS
    batch_seconds: float = BATCH_SECONDS
    finish_seconds: float | None = None
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    single_writer: bool = False
    is_row_wise: bool = False
    layout: TableLayout = field(default_factory=TableLayout)
    driver_records: int = DRIVER_RECORDS
    keys: Keys | None = None
    owns_table: bool = False

    def __post_init__(self) -> None:
        choose_fields(self, sharing=ConsumerMode, start=AutoStreamReset)
        check_range("retry_seconds", self.retry_seconds)
        check_range("batch_seconds", self.batch_seconds)
        if self.finish_seconds is not None:
            check_range("finish_seconds", self.finish_seconds)
        check_name("group", self.group, without="/")
        check_member(self.member)
        check_switch("single_writer", self.single_writer)
        if isinstance(self.decoder, type) or not callable(getattr(self.decoder, "ddl", None)):
            raise InvalidOptionError(
                f"decoder={self.decoder!r} is not a decoder", remedy="Use Json(schema), Text(), Raw(), or another one."
            )
        if self.keys is not None and self.sharing is ConsumerMode.LOAD_BALANCED:
            raise InvalidOptionError(
                "mode 'load_balanced' does not work with a keyed table: its members would merge in parallel, and Delta "
                "refuses all but one of them",
                remedy="Use mode 'resumable'.",
            )
        is_rescue = self.errors.schema_changes is SchemaChanges.RESCUE
        if is_rescue and self.keys is not None and hasattr(self.decoder, "change_columns"):
            raise InvalidOptionError(
                "schema_changes='rescue' does not work with keys and a decoder of changes: an update that leaves a "
                "large value alone would remove it from _rescued",
                remedy="Declare the columns in the decoder, and use schema_changes='add_columns' or 'fail'.",
            )
        if self.keys is not None:
            object.__setattr__(self, "keys", self.keys.of_decoder(self.decoder))
            object.__setattr__(self, "layout", self.keys.layout(self.layout))
        if is_rescue:
            object.__setattr__(self, "decoder", with_rescue(self.decoder))
        # Spark would resolve a relative path from another directory, and the working directory may change.
        object.__setattr__(self, "table", check_location(self.table))

    @property
    def sharing_mode(self) -> str:
        """The name of the way to share in the ledger; it decides which transaction sequences there are."""
        return CLAIMS if self.claims else self.sharing.value

    def write_mode(self, *, again: bool) -> str:
        """Return the mode of a batch: how it is written.

        Args:
            again: whether its messages were written before.
        """
        if self.keys is not None:
            return self.keys.mode(again=again)
        return "replace" if again else "append"

    @property
    def key_order(self) -> KeyOrder | None:
        """What the ledger remembers of the key; ``None`` for a table that is appended to."""
        return None if self.keys is None else self.keys.order

    @property
    def transform_name(self) -> str:
        """The name of the transform in the ledger; empty without one."""
        return "" if self.transform is None else str(getattr(self.transform, "__name__", "") or "transform")

    def refuse_or_record(self, error: DataLossError) -> None:
        """Raise the error about a loss, unless losses are to be recorded."""
        if self.errors.on_data_loss is DataLoss.ERROR:
            raise error

    def own(self, shards: Mapping[Shard, T], streams: Container[str]) -> Mapping[Shard, T]:
        """Return the shards of these streams that belong to this transaction sequence."""
        return {s: value for s, value in shards.items() if s.stream in streams and self.shard in (None, s)}

    def by_sequence(self, shards: Iterable[Shard]) -> list[tuple[Ingestion, frozenset[Shard]]]:
        """Return the ingestion of each transaction sequence with its shards: all of them, or one."""
        if self.sharing is ConsumerMode.LOAD_BALANCED:
            return [(replace(self, shard=shard), frozenset((shard,))) for shard in sorted(shards)]
        all_shards = frozenset(shards)
        return [(replace(self, shard=None), all_shards)] if all_shards else []

    def of_sequence(self, app: str) -> Ingestion:
        """Return the ingestion of the transaction sequence with this app id of the group."""
        member = app.removeprefix(f"{self.group}/")
        if "/" in member:
            return replace(self, shard=Shard.parse(member))
        return replace(self, member=member, shard=None)

    def epochs(self, streams: Collection[str], ledger: Ledger | None = None) -> EpochNameMap:
        """Return the newest epoch name of each stream, from the ledger, or from the rows for streams that it lacks.

        It lacks all streams if the log was cleaned, and those of other URLs after it was recovered for one URL.

        Args:
            streams: their keys.
            ledger: the ledger of the group, if the caller has one, which caches what it has read.
        """
        ledger = ledger or self.ledger()
        try:
            known = frozenset(ledger.read().identities)
        except LedgerTruncatedError:
            known = frozenset()
        log, lacking = ledger.log, frozenset(streams) - {split_epoch(name)[0] for name in known}
        snapshot = log.snapshot() if lacking else None
        if snapshot is not None and snapshot.may_hold(frozenset(epoch_name(stream, 2) for stream in lacking)):
            # A table without our columns has no epochs.
            with suppress(TableUnreadableError):
                in_rows = {shard.stream for shard in last_sequences(log, self.dead_letters().log())}
                known |= {name for name in in_rows if split_epoch(name)[0] in lacking}
        return newest_epochs(known, streams)

    def in_epochs(self, source: BatchSource, ledger: Ledger | None = None) -> BatchSource:
        """Return the source with its streams renamed to their newest epochs; see :meth:`epochs`."""
        return with_epoch_names(source, self.epochs(source.url.required_streams(), ledger))

    def ledger(self) -> Ledger:
        """Return the ledger of the group in the table.

        Redrives and replays take their numbers from the transaction sequence of ingestion, as everything does that
        merges into a keyed table. So no batch that replaces rows lands if it was planned before another one. The keeper
        of the ledger writes no rows, and has its own.
        """
        log = DeltaLog(self.table, storage_options=self.storage_options)
        is_shared = self.member == REPLAYER or (self.keys is not None and self.member != KEEPER)
        return Ledger(log, group=self.group, member=self.shard or self.member, is_shared=is_shared)

    def dead_letters(self) -> DeadLetterTable:
        """Return the dead-letter table of the table."""
        return DeadLetterTable(dead_letter_path(self.table), self.storage_options)
